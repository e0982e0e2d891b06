r"""Compute attention over Dask arrays, of more tokens than fit on one machine.

q, k and v are Dask arrays, cut along tokens and heads. For each chunk of keys, queries (or the
samples of random features) get a result, and `refattn.merge` combines these results in a tree. A
chunk of queries reads only the keys that it sees. Nothing is computed until the result is computed,
and a task holds a few chunks, whatever the number of tokens. If no process can hold the result,
compute its chunks with ``client.persist``, or store them. ``compute`` gathers all chunks in one
task: if causal, Dask may read the queries last, and hold keys and values in memory or on disk until
then.

This needs ``pip install 'refattn[distributed]'``. Every estimator also takes Dask arrays directly,
like arrays of any other library; here each task computes whole chunks, as on a single machine.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import reduce
from importlib import import_module
from itertools import accumulate, pairwise, product
from typing import Any

import numpy as np

from . import attention, sampling
from .arrays import checks, qkv
from .arrays.heads import grouped_lead
from .arrays.library import Array, array_namespace, device, is_numpy_array
from .arrays.words import with_known_keywords
from .attention import Alibi, Attended
from .engine.scores import Band, Scores
from .estimators.inputs import Options, change_gauge, choose_frequencies
from .streaming import PositiveState
from .typing import Coupling

__all__ = ["attend", "random_feature_attention", "softmax_attention"]
__dir__ = __all__.copy


Heads = list[Any]  # what chunks of query heads that share keys read

_FAN_IN = 8  # partial results that one task merges


@with_known_keywords
def attend(
    q: Array,
    k: Array,
    v: Array,
    *,
    bias: Array | Alibi | None = None,
    mask: Array | None = None,
    causal: bool = False,
    scale: float = 1.0,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    dropout: Array | None = None,
) -> Attended:
    r"""Compute softmax attention and its log normaliser, `refattn.attend`, chunk by chunk.

    Parameters
    ----------
    q : dask.array.Array, shape (..., n, d), float32 or float64
        Queries. A task attends from one chunk of queries to one chunk of keys.
    k : dask.array.Array, shape (..., m, d), dtype and leading axes of `q`
        Keys. Heads may be grouped as in `refattn.attend`: the length of the last leading axis may
        be a divisor of that of `q`.
    v : dask.array.Array, shape (..., m, d_v), dtype of `q` and leading axes of `k`
        Values.
    bias, mask, dropout : dask.array.Array, broadcasting to (..., n, m), optional
        As in `refattn.attend`. If their chunks differ from those of queries and keys, data moves
        between workers. `bias` may be an `alibi` of `refattn.attention` whose slopes are a Dask
        array.
    causal : bool, default False
        Query i sees key j only if j <= i + m - n. Chunks that it does not see are not read.
    window : pair of int or None, optional
        (left, right), as in `refattn.attend`. There is a task for each pair of chunks in which some
        query sees some key: linear in the tokens.
    scale, softcap, sinks
        As in `refattn.attend`; `sinks` is a dask.array.Array.

    Returns
    -------
    Attended
        `out`, shape (..., n, d_v), and `lse`, shape (..., n): Dask arrays in the chunks of `q`; a
        chunk with parts of several groups of heads is split.

    Examples
    --------
    >>> import dask.array as da
    >>> from refattn import distributed
    >>> q = k = v = da.ones((2, 6, 3), chunks=(1, 2, 3))
    >>> distributed.attend(q, k, v).out.compute().shape
    (2, 6, 3)
    """
    scale = checks.real("scale", scale)
    scores = Scores(scale, bias, mask, causal, window, softcap, sinks, dropout)
    return _attend_in_chunks(q, k, v, scores)


@with_known_keywords
def softmax_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float | None = None,
    bias: Array | Alibi | None = None,
    mask: Array | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    dropout: Array | None = None,
) -> Array:
    r"""Compute exact softmax attention, `refattn.softmax_attention`, chunk by chunk.

    Parameters
    ----------
    q, k, v, bias, mask, causal, window, softcap, sinks, dropout
        As in `attend`.
    scale : float, optional
        Factor on q . k, 1 / sqrt(d) by default.

    Returns
    -------
    dask.array.Array, shape (..., n, d_v)
        In the chunks of `q`, as in `attend`.

    Examples
    --------
    >>> import dask.array as da
    >>> from refattn import distributed
    >>> q = k = v = da.ones((6, 3), chunks=(2, 3))
    >>> float(distributed.softmax_attention(q, k, v, causal=True).sum().compute())
    18.0
    """
    scale = checks.real("scale", scale, optional=True)
    scores = Scores(scale, bias, mask, causal, window, softcap, sinks, dropout)
    return _attend_in_chunks(q, k, v, scores).out


@with_known_keywords
def random_feature_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    omega: Any = None,
    log_weight: Any = None,
    num_features: int | None = None,
    coupling: Coupling = "iid",
    proposal: sampling.Proposal | None = None,
    rng: Any = None,
    scale: float | None = None,
    causal: bool = False,
) -> Array:
    r"""Estimate softmax attention with positive random features, chunk by chunk.

    The samples attend to each chunk of keys, their states merge in a tree (one after another if
    causal), and chunks of queries read them: linear in n and m, in time and in traffic. The
    numbers are those of `refattn.random_feature_attention` to rounding.

    Parameters
    ----------
    q, k, v
        As in `attend`.
    omega : NumPy array, shape (S, d), optional
        Frequencies in kernel coordinates, the same for all heads; or give `num_features`.
    log_weight : NumPy array, shape (S,), optional
        Log importance weights of `omega`.
    num_features, coupling, proposal, rng, scale
        As in `refattn.random_feature_attention`; one proposal for all heads.
    causal : bool, default False
        Query i sees key j only if j <= i + m - n. Keys are cut where the queries are; if chunks
        differ, data moves between workers.

    Returns
    -------
    dask.array.Array, shape (..., n, d_v)
        In the chunks of `q`, as in `attend`.

    Examples
    --------
    >>> import dask.array as da
    >>> from refattn import distributed
    >>> q = k = v = da.ones((6, 3), chunks=(2, 3))
    >>> distributed.random_feature_attention(q, k, v, num_features=4, rng=0).compute().shape
    (6, 3)
    """
    _check_dask(q, k, v, causal)
    scale = checks.real("scale", scale, positive=True, optional=True)
    if heads := getattr(proposal, "lead", ()):
        raise ValueError(f"`proposal` must be one for all heads, got a batch of shape {heads}.")
    q, k = change_gauge(q, k, proposal, grouped_lead(q, k, v))
    like = np.empty((0, q.shape[-1]), q.dtype)
    delayed = _dask("delayed").delayed
    options = Options(
        omega=omega, log_weight=log_weight, num_features=num_features, coupling=coupling,
        proposal=proposal, rng=rng,
    )  # fmt: skip
    drawn = choose_frequencies(options, "num_features", like, ())
    samples = delayed(drawn)  # one node of the graph, not a copy in each task

    def rows(queries: list[Heads], keys: list[Any]) -> list[Heads]:
        state, read = delayed(_state), delayed(_read_state)
        states = [state(samples, scale, *pair) for pair in keys]
        if not causal:
            whole = _tree(PositiveState.merge, states)
            return [[read(whole, q_h) for q_h in q_i] for q_i in queries]
        first, merge = len(keys) - len(queries), delayed(PositiveState.merge)
        empty = state(samples, scale, *keys[0], tokens=0)
        past, out = _tree(PositiveState.merge, [empty, *states[: max(first, 0)]]), []
        for i, q_i in enumerate(queries):
            if first + i < 0:
                out.append([read(past, q_h) for q_h in q_i])
            else:
                out.append([read(past, q_h, *keys[first + i]) for q_h in q_i])
                past = merge(past, states[first + i])
        return out

    q, k, v = _rechunk(q, k, v, causal)
    return _assemble(_apply_to_heads(q, k, v, rows), q, v.shape[-1:])


def _attend_in_chunks(q: Array, k: Array, v: Array, scores: Scores) -> Attended:
    r"""Merge what each chunk of queries finds in the chunks j of keys that it sees, and the sink.

    .. math::
        (\mathrm{out}_i, \mathrm{lse}_i) = \mathrm{merge} \bigl( (0, \mathrm{sink}), \;
            \mathrm{attend}(q_i, k_j, v_j), \; \ldots \bigr)
    """
    bias, sinks = scores.bias, scores.sinks
    slopes = bias.slopes if isinstance(bias, Alibi) else None
    of_pairs: dict[str, Any] = {"mask": scores.mask, "dropout": scores.dropout}
    of_pairs["bias"] = None if isinstance(bias, Alibi) else bias
    _check_dask(q, k, v, scores.causal, of_pairs, {"sinks": sinks, "slopes": slopes})
    checks.real("softcap", scores.softcap, positive=True, optional=True)
    scores = scores._replace(window=qkv.window(scores.window), sinks=None)
    band = scores.band(q.shape[-2], k.shape[-2])

    q, k, v = _rechunk(q, k, v, causal=False)
    chunks = (*q.chunks[:-1], k.chunks[-2])
    of_pairs = {name: _grid(x, chunks) for name, x in of_pairs.items() if x is not None}
    sinks, slopes = (None if x is None else _grid(x, q.chunks[:-2]) for x in (sinks, slopes))
    queries, keys, values = (x.to_delayed()[..., 0] for x in (q, k, v))
    rows, columns = _tokens_of_chunks(q.chunks[-2]), _tokens_of_chunks(k.chunks[-2])
    delayed = _dask("delayed").delayed
    attend, no_keys = delayed(_attend_chunk), delayed(_no_keys)

    def row(g: tuple[int, ...], h: tuple[int, ...], i: int) -> Any:
        def part(j: int) -> Any:
            pairs = {name: x[(*h, i, j)] for name, x in of_pairs.items()}
            if slopes is not None:
                pairs["bias"] = Alibi(slopes[h])
            pairs["shift"] = band.shift + rows[i].start - columns[j].start
            of_chunk = scores._replace(**pairs)
            return attend(queries[(*h, i)], keys[(*g, j)], values[(*g, j)], of_chunk)

        parts = [part(j) for j in _chunks_seen(band, rows[i], columns)]
        if sinks is not None or not parts:
            sink = None if sinks is None else sinks[h]
            parts.append(no_keys(queries[(*h, i)], v.shape[-1], sink))
        return _tree(attention.merge, parts)

    heads = [(g, h) for g, readers in _head_groups(q, k) for h in readers]
    grid = {(*h, i): row(g, h, i) for g, h in heads for i in range(len(rows))}
    out = _assemble({i: x[0] for i, x in grid.items()}, q, v.shape[-1:])
    return Attended(out, _assemble({i: x[1] for i, x in grid.items()}, q, ()))


def _attend_chunk(q: Array, k: Array, v: Array, scores: Scores) -> Attended:
    """What one chunk of queries finds in one chunk of keys."""
    q, k, v, scores = map(_align, (q, k, v, scores))
    return attention.prepare_attention(q, k, v, scores, rooted=True).attend()


def _no_keys(q: Array, d_v: int, sinks: Array | None) -> Attended:
    """What a chunk of queries finds where there is at most a sink: (0, sink), or (0, -inf)."""
    xp, q = array_namespace(q), _align(q)
    v = xp.zeros((*q.shape[:-2], 0, d_v), dtype=q.dtype, device=device(q))
    return attention.attend(q, q[..., :0, :], v, sinks=_align(sinks))


def _chunks_seen(band: Band, i: slice, columns: list[slice]) -> range:
    """Chunks of keys that some of the queries i see."""
    span = band.keys(i, slice(0, columns[-1].stop))
    first = bisect_right(columns, span.start, key=lambda j: j.stop)
    return range(first, bisect_left(columns, span.stop, key=lambda j: j.start))


def _tokens_of_chunks(chunks: tuple[int, ...]) -> list[slice]:
    return [slice(*ends) for ends in pairwise(accumulate(chunks, initial=0))]


def _grid(x: Array, chunks: tuple[tuple[int, ...], ...]) -> Any:
    """The chunks of an array that broadcasts to one in `chunks`, by their index in that."""
    axes = zip(x.shape, chunks[len(chunks) - x.ndim :], strict=True)
    cut = x.rechunk(tuple((1,) if n == 1 else sizes for n, sizes in axes))
    return np.broadcast_to(cut.to_delayed(), tuple(map(len, chunks)))


def _state(
    samples: Any, scale: float | None, k: Array, v: Array, tokens: int | None = None
) -> PositiveState:
    """What the samples find in one chunk of keys, or in its first tokens."""
    k, v = k[..., :tokens, :], v[..., :tokens, :]
    k, v, omega, log_weight = map(_align, (k, v, *samples))
    return PositiveState.init(k, v, omega=omega, log_weight=log_weight, scale=scale)


def _read_state(state: PositiveState, q: Array, *tokens: Array) -> Array:
    """Read a state from a chunk of queries and, causally, its own keys and values."""
    state, q, tokens = _align(state), _align(q), tuple(map(_align, tokens))
    return state.read_causal(q, *tokens) if tokens else state.read(q)


def _align(x: Any) -> Any:
    """Align arrays as where they were made: from another worker they begin at any byte.

    NumPy multiplies arrays that are not aligned in another way, which rounds differently.
    """
    if isinstance(x, Attended | Alibi | Scores):
        return type(x)(*map(_align, x))
    if isinstance(x, PositiveState):
        return replace(x, **{name: _align(value) for name, value in vars(x).items()})
    return np.require(x, None, "A") if is_numpy_array(x) else x


def _tree(merge: Callable[[Any, Any], Any], parts: Sequence[Any]) -> Any:
    """Merge a few at a time, so that no task holds many."""
    fold = _dask("delayed").delayed(reduce)
    while len(parts) > 1:
        parts = [fold(merge, parts[i : i + _FAN_IN]) for i in range(0, len(parts), _FAN_IN)]
    return parts[0]


def _apply_to_heads(
    q: Array, k: Array, v: Array, rows: Callable[[list[Heads], list[Any]], list[Heads]]
) -> dict[tuple[int, ...], Any]:
    """Apply `rows` to the chunks of keys with values of each chunk of heads, and their queries."""
    queries, keys, values = (x.to_delayed()[..., 0] for x in (q, k, v))
    grid: dict[tuple[int, ...], Any] = {}
    for head, heads in _head_groups(q, k):
        tokens = [[queries[(*h, i)] for h in heads] for i in range(queries.shape[-1])]
        read = rows(tokens, list(zip(keys[head], values[head], strict=True)))
        grid |= {(*h, i): x for i, row in enumerate(read) for h, x in zip(heads, row, strict=True)}
    return grid


def _head_groups(q: Array, k: Array) -> Iterator[tuple[tuple[int, ...], list[tuple[int, ...]]]]:
    """Each chunk of key heads, with the chunks of query heads that read it, as indices."""
    readers = _readers(q, k)
    for head in product(*map(range, k.numblocks[:-2])):
        yield head, [(*head[:-1], *h) for h in readers[head[-1:]]]


def _readers(q: Array, k: Array) -> dict[tuple[int, ...], list[tuple[int, ...]]]:
    """Chunks of query heads for each chunk of key heads, as indices along the axis of heads."""
    if q.ndim < 3:
        return {(): [()]}
    ratio = max(1, q.shape[-3] // max(1, k.shape[-3]))
    ends = list(accumulate(k.chunks[-3]))
    readers: dict[tuple[int, ...], list[tuple[int, ...]]] = {(g,): [] for g in range(len(ends))}
    for h, start in enumerate(accumulate(q.chunks[-3][:-1], initial=0)):
        readers[(bisect_right(ends[:-1], start // ratio),)].append((h,))
    return readers


def _assemble(grid: dict[tuple[int, ...], Any], q: Array, core: tuple[int, ...]) -> Array:
    """Make one array of results in the chunks of the queries, with the last axes `core`."""
    da, graphs = _dask("array"), _dask("highlevelgraph")
    name = f"refattn-{_dask('base').tokenize(*(x.key for x in grid.values()))}"
    last = (0,) * len(core)
    layer = {(name, *index, *last): x.key for index, x in grid.items()}
    graph = graphs.HighLevelGraph.from_collections(name, layer, dependencies=list(grid.values()))
    chunks = (*q.chunks[:-1], *((size,) for size in core))
    return da.Array(graph, name, chunks, dtype=q.dtype)


def _rechunk(q: Array, k: Array, v: Array, causal: bool) -> tuple[Array, Array, Array]:
    """Give the arrays chunks of heads that go together, and rows that are whole.

    If causal, keys are cut where queries are, so that a chunk of queries sees whole chunks of keys
    and, causally, one more.
    """
    tokens, shift = q.chunks[-2], k.shape[-2] - q.shape[-2]
    if causal:
        tokens = _cut_at(tokens, max(-shift, 0))
        seen = _cut_at(k.chunks[-2], max(shift, 0))
        before = [n for n, end in zip(seen, accumulate(seen), strict=True) if end <= shift]
        unseen = [n for n, end in zip(tokens, accumulate(tokens), strict=True) if end <= -shift]
        columns = (*before, *tokens[len(unseen) :]) or (0,)
    else:
        columns = k.chunks[-2]
    lead, heads, groups = q.chunks[:-3], *_chunks_of_heads(q, k)
    return (
        q.rechunk((*lead, *heads, tokens, q.shape[-1:])),
        k.rechunk((*lead, *groups, columns, k.shape[-1:])),
        v.rechunk((*lead, *groups, columns, v.shape[-1:])),
    )


def _chunks_of_heads(q: Array, k: Array) -> tuple[Any, Any]:
    """Chunks of query and of key heads: several whole groups, or a part of one, go together."""
    if q.ndim < 3 or q.shape[-3] == k.shape[-3]:
        return q.chunks[-3:-2], q.chunks[-3:-2]
    ratio = q.shape[-3] // k.shape[-3]
    ends = {0, *accumulate(q.chunks[-3])}
    ends |= {
        e for end in ends if end % ratio for e in (end - end % ratio, end - end % ratio + ratio)
    }
    heads = sorted(ends)
    groups = [end // ratio for end in heads if end % ratio == 0]
    of_q, of_k = (tuple(b - a for a, b in pairwise(x)) for x in (heads, groups))
    return (of_q,), (of_k,)


def _cut_at(chunks: tuple[int, ...], at: int) -> tuple[int, ...]:
    """Cut the chunk that reaches beyond `at` in two."""
    ends = sorted({*accumulate(chunks), *([at] if at else [])})
    return tuple(b - a for a, b in zip([0, *ends[:-1]], ends, strict=True))


def _check_dask(
    q: Any,
    k: Any,
    v: Any,
    causal: Any,
    of_pairs: dict[str, Any] | None = None,
    of_heads: dict[str, Any] | None = None,
) -> None:
    """Check the arrays as `refattn.attend` does, and that they are Dask arrays of equal heads."""
    da, of_pairs, of_heads = _dask("array"), of_pairs or {}, of_heads or {}
    for name, x in {"q": q, "k": k, "v": v, **of_pairs, **of_heads}.items():
        if x is None:
            continue
        if not isinstance(x, da.Array):
            raise TypeError(f"`{name}` must be a Dask array, got {type(x).__name__}.")
        if any(n != n for n in x.shape):
            raise ValueError(f"`{name}` must have chunks of known sizes, got {x.chunks}.")
    qkv.check(q, k, v, causal=causal, **of_pairs)
    for name, x in of_heads.items():
        if x is not None:
            qkv.of_heads(name, x, q, k, v)
    grouped = min(q.ndim, k.ndim) > 2 and q.shape[:-3] == k.shape[:-3]
    grouped = grouped and 0 < k.shape[-3] <= q.shape[-3]
    for name, x, lead in (("k", k, k if grouped else q), ("v", v, k)):
        if x.shape[:-2] != lead.shape[:-2]:
            other = "q" if lead is q else "k"
            raise ValueError(
                f"`{name}` must have the leading axes of `{other}`, {lead.shape[:-2]}, or heads "
                f"that divide those of `q`, got {x.shape[:-2]}."
            )


def _dask(module: str) -> Any:
    """Import a module of Dask, which is an extra."""
    try:
        return import_module(f"dask.{module}")
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "refattn.distributed needs `pip install 'refattn[distributed]'`."
        ) from None
