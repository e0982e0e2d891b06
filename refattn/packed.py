r"""Attend within sequences of many lengths, packed one after another or with keys in pages.

Inference servers store sequences of different lengths without padding. This module defines what
such layouts mean: each sequence attends only to itself. `varlen` and `paged` cut out each sequence,
call an attention function of the package or of your own, and put the results together. The function
takes q (heads, n, d), k (heads, m, d) and v (heads, m, d_v). `varlen` and `paged` are references
for kernels that read these layouts; they are not fast themselves.

Causal attention and windows apply to each sequence: its last query sees its last key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import Any, cast

import numpy as np

from .arrays import checks
from .arrays.library import Array, array_namespace, as_written, device
from .attention import Attended
from .typing import Recurrent

__all__ = ["paged", "varlen"]
__dir__ = __all__.copy


@as_written
def varlen(
    function: Callable[..., Any],
    q: Array,
    k: Array,
    v: Array,
    *,
    q_offsets: Any,
    k_offsets: Any,
    per_token: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> Any:
    r"""Attend within sequences that are packed one after another, with tokens before heads.

    .. math::
        \mathrm{out}[a_s : a_{s+1}] =
            \mathrm{function}(q[a_s : a_{s+1}], k[b_s : b_{s+1}], v[b_s : b_{s+1}])

    for the sequences s, with a = `q_offsets` and b = `k_offsets`; `function` gets heads first.

    Parameters
    ----------
    function : function
        Called as ``function(q, k, v, **options)``, once for each sequence, with arrays of shapes
        (heads, n, d), (heads_k, m, d) and (heads_k, m, d_v), of which n and m may be 0. It returns
        `out`, shape (heads, n, d_v), or a pair of this and `lse`, shape (heads, n), as
        `refattn.attend` does, or a `Recurrent`.
    q : array, shape (tokens, heads, d)
        Queries of all sequences.
    k : array, shape (tokens_k, heads_k, d)
        Keys of all sequences. `function` decides which heads may be grouped.
    v : array, shape (tokens_k, heads_k, d_v)
        Values.
    q_offsets, k_offsets : integers, shape (sequences + 1,)
        Where each sequence begins in `q`, and in `k` and `v`: from 0, never decreasing, to the
        number of tokens. A list, or an array of any library, whose values are read. A sequence may
        have no queries, no keys, or neither.
    per_token : mapping of arrays, optional
        Options of `function` that are arrays (tokens_k, heads, ...) or pairs of them, such as the
        decays of `refattn.recurrences`: cut as `k`, and passed with heads first.
    **options
        For `function`, the same for all sequences, for example `causal`, `window` or `sinks`. With
        an integer `rng` all sequences have the same draws; with a generator, each sequence has its
        own. An `initial_state` has one state for each sequence: (sequences, heads, d, d_v).

    Returns
    -------
    array, shape (tokens, heads, d_v), or Attended, or Recurrent
        What `function` returns, packed: `out` in the layout of `q`, and `lse`, if there is one, of
        shape (heads, tokens), or the last `state` of each sequence, (sequences, heads, d, d_v).

    Raises
    ------
    TypeError
        If `function` is not callable, an argument is not an array, or offsets are not integers.
    ValueError
        If shapes or offsets do not match, or if `function` returns a wrong shape.

    Notes
    -----
    The layout is that of the varlen functions in flash-attn, whose offsets are ``cu_seqlens_q``
    and ``cu_seqlens_k``.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import packed, softmax_attention
    >>> q, v = np.zeros((3, 1, 2)), np.array([[[2.0]], [[4.0]], [[9.0]]])
    >>> offsets = [0, 2, 3]
    >>> out = packed.varlen(softmax_attention, q, q, v, q_offsets=offsets, k_offsets=offsets)
    >>> out[:, 0, 0]
    array([3., 3., 9.])
    """
    _check_packed(function, 3, q=q, k=k, v=v)
    if v.shape[0] != k.shape[0]:
        raise ValueError(
            "`k` and `v` must have first axes of one length, the number of tokens, "
            f"got shapes {tuple(k.shape)} and {tuple(v.shape)}."
        )
    queries = _tokens_of_each("q_offsets", q_offsets, "q", q)
    keys = _tokens_of_each("k_offsets", k_offsets, "k", k)
    if len(queries) != len(keys):
        raise ValueError(
            "`q_offsets` and `k_offsets` must have one length, the number of sequences plus 1, "
            f"got {len(queries) + 1} and {len(keys) + 1}."
        )
    xp, states = array_namespace(q), cast(Array, options.get("initial_state"))
    apart = getattr(states, "ndim", 0) > 3
    if apart and (states.ndim != 4 or states.shape[0] != len(keys)):
        raise ValueError(
            "`initial_state` must have shape (heads, d, d_v) or (sequences, heads, d, d_v) with "
            f"sequences = {len(keys)}, got {tuple(states.shape)}."
        )
    parts = []
    for s, (i, j) in enumerate(zip(queries, keys, strict=True)):
        options |= {"initial_state": states[s, ...]} if apart else {}
        given = options | {x: _tokens_of(x, y, j, k, xp) for x, y in per_token.items()}
        parts.append(_attend_one_sequence(function, given, xp, q[i, ...], k[j, ...], v[j, ...]))
    return _join_sequences(parts, partial(xp.concat, axis=0), partial(xp.concat, axis=1), xp)


@as_written
def paged(
    function: Callable[..., Any],
    q: Array,
    k_pages: Array,
    v_pages: Array,
    *,
    block_table: Any,
    lengths: Any,
    **options: Any,
) -> Any:
    r"""Attend to keys in pages, which a table lists for each sequence.

    .. math::
        k_{sj} = \mathrm{pages}[\mathrm{table}[s, \lfloor j / c \rfloor], \; j \bmod c],
        \qquad j < \mathrm{length}_s

    for the sequences s and pages of c tokens; the same for values.

    Parameters
    ----------
    function : function
        As in `varlen`, called once for each sequence.
    q : array, shape (batch, n, heads, d)
        Queries: the last n tokens of each sequence, if `function` is causal.
    k_pages : array, shape (pages, page_size, heads_k, d)
        Keys. Sequences may share pages.
    v_pages : array, shape (pages, page_size, heads_k, d_v)
        Values.
    block_table : integers, shape (batch, most_pages)
        The pages of each sequence, in order; each must exist. Entries past its length are not
        read, and may be anything. A list, or an array of any library, whose values are read.
    lengths : integers, shape (batch,)
        How many keys each sequence has, 0 to most_pages * page_size; the rest of the last page is
        not read.
    **options
        For `function`, as in `varlen`.

    Returns
    -------
    array, shape (batch, n, heads, d_v), or Attended
        What `function` returns, stacked: `out` in the layout of `q`, and `lse`, if there is one, of
        shape (batch, heads, n).

    Notes
    -----
    The layout is that of the paged key-value cache in flash-attn, with ``cache_seqlens`` for
    `lengths`.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import packed, softmax_attention
    >>> pages = np.array([[9.0, np.nan], [2.0, 4.0]])[:, :, None, None]
    >>> q, k = np.zeros((2, 1, 1, 1)), np.zeros_like(pages)
    >>> table, lengths = [[1, 0], [0, -1]], [3, 1]
    >>> packed.paged(softmax_attention, q, k, pages, block_table=table, lengths=lengths)[:, 0, 0, 0]
    array([5., 9.])
    """
    _check_packed(function, 4, q=q, k_pages=k_pages, v_pages=v_pages)
    if v_pages.shape[:2] != k_pages.shape[:2] or k_pages.shape[1] == 0:
        raise ValueError(
            "`k_pages` and `v_pages` must have as many pages of one size, at least 1, "
            f"got shapes {tuple(k_pages.shape)} and {tuple(v_pages.shape)}."
        )
    xp, parts = array_namespace(q), []
    for s, (table, length) in enumerate(_pages(block_table, lengths, q, k_pages)):
        k, v = (_contiguous(pages, table, length, xp) for pages in (k_pages, v_pages))
        parts.append(_attend_one_sequence(function, options, xp, q[s, ...], k, v))
    stack = partial(xp.stack, axis=0)
    return _join_sequences(parts, stack, stack, xp)


def _tokens_of(name: str, x: Any, some: slice, k: Array, xp: Any) -> Any:
    """Cut an option out for the tokens of a sequence, heads first."""
    if isinstance(x, tuple | list):
        return tuple(_tokens_of(name, y, some, k, xp) for y in x)
    checks.is_array(name, x)
    if x.ndim < 2 or x.shape[0] != k.shape[0]:
        raise ValueError(
            f"`{name}` must have shape (tokens_k, heads, ...) with tokens_k = {k.shape[0]}, "
            f"got {tuple(x.shape)}."
        )
    return xp.permute_dims(x[some, ...], (1, 0, *range(2, x.ndim)))


def _attend_one_sequence(
    function: Callable[..., Any], options: dict[str, Any], xp: Any, q: Array, k: Array, v: Array
) -> tuple[Array, ...]:
    """Call the function on one sequence, tokens before heads; return `out` so, and the rest."""
    result = function(*(xp.permute_dims(x, (1, 0, 2)) for x in (q, k, v)), **options)
    result = result if isinstance(result, tuple) else (result,)
    if len(result) not in (1, 2):
        raise ValueError(
            "`function` must return an array or a pair (out, lse), "
            f"got a tuple of length {len(result)}."
        )
    n, heads = q.shape[0], max(q.shape[1], v.shape[1])
    checked = result[:1] if isinstance(result, Recurrent) else result
    for name, ndim, x in zip(("out", "lse"), (3, 2), checked, strict=False):
        checks.is_array(name, x)
        if x.ndim != ndim or tuple(x.shape[:2]) != (heads, n):
            rule = "(heads, n, d_v)" if ndim == 3 else "(heads, n)"
            raise ValueError(
                f"`function` must return `{name}` of shape {rule} with heads = {heads} and "
                f"n = {n}, got {tuple(x.shape)}."
            )
    out, *more = result
    out = xp.permute_dims(out, (1, 0, 2))
    return Recurrent(out, *more) if isinstance(result, Recurrent) else (out, *more)


def _join_sequences(
    parts: list[tuple[Array, ...]],
    join: Callable[[Any], Array],
    join_lse: Callable[[Any], Array],
    xp: Any,
) -> Any:
    """Make one result of those of all sequences."""
    outs, *more = zip(*parts, strict=True)
    if isinstance(parts[0], Recurrent):
        return Recurrent(join(outs), xp.stack(*more, axis=0))
    return Attended(join(outs), join_lse(*more)) if more else join(outs)


def _contiguous(pages: Array, table: list[int], length: int, xp: Any) -> Array:
    """Read the tokens of a sequence, shape (length, heads, d), from its pages in order."""
    size = pages.shape[1]
    none = xp.zeros((0, *pages.shape[2:]), dtype=pages.dtype, device=device(pages))
    starts = range(0, length, size)
    read = zip(table, starts, strict=True)
    return xp.concat([none, *(pages[p, : min(size, length - at), ...] for p, at in read)], axis=0)


def _tokens_of_each(name: str, offsets: Any, of: str, x: Array) -> list[slice]:
    ends = checks.host_integers(name, offsets, "(sequences + 1,)", 1)
    if len(ends) < 2 or ends[0] != 0 or np.any(np.diff(ends) < 0) or ends[-1] != x.shape[0]:
        raise ValueError(
            f"`{name}` must be at least 2 integers that begin at 0, never fall and end at the "
            f"number of tokens of `{of}`, {x.shape[0]}, got {ends.tolist()}."
        )
    return [slice(*pair) for pair in pairwise(ends.tolist())]


def _pages(block_table: Any, lengths: Any, q: Array, pages: Array) -> list[tuple[list[int], int]]:
    """Return the pages of each sequence that are read, and its length."""
    table = checks.host_integers("block_table", block_table, "(batch, most_pages)", 2)
    counts = checks.host_integers("lengths", lengths, "(batch,)", 1)
    batch, (count, size) = q.shape[0], pages.shape[:2]
    for name, x in (("block_table", table), ("lengths", counts)):
        if len(x) != batch or batch == 0:
            raise ValueError(
                f"`{name}` must have as many rows as `q` has sequences, {batch}, at least 1, got "
                f"shape {x.shape}."
            )
    most = table.shape[1] * size
    if np.any((counts < 0) | (counts > most)):
        raise ValueError(
            f"`lengths` must be between 0 and most_pages * page_size = {most}, "
            f"got {counts.tolist()}."
        )
    read = [row[: -(-length // size)] for row, length in zip(table, counts, strict=True)]
    for s, row in enumerate(read):
        if np.any((row < 0) | (row >= count)):
            raise ValueError(
                f"`block_table` must hold numbers of pages, 0 to {count - 1}, up to the length of "
                f"each sequence, got {row.tolist()} for sequence {s}."
            )
    return [(row.tolist(), length) for row, length in zip(read, counts.tolist(), strict=True)]


def _check_packed(function: Any, ndim: int, **arrays: Array) -> None:
    """Check the function, and arrays of one library and device with so many axes."""
    if not callable(function):
        raise TypeError(f"`function` must be callable, got {checks.describe(function)}.")
    head = arrays["q"]
    for name, x in arrays.items():
        checks.is_array(name, x)
        if x.ndim != ndim:
            raise ValueError(f"`{name}` must have {ndim} axes, got shape {tuple(x.shape)}.")
        checks.same_home(name, x, "q", head)
