"""Softmax attention in blocks of scores, on which every estimator rests; arguments are trusted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache, partial, reduce
from operator import and_
from typing import Any, Generic, NamedTuple

import numpy as np

from ..arrays.arithmetic import (
    UNCUT,
    Tree,
    Workspace,
    add,
    clip,
    exp,
    exp_less,
    exp_of_visible,
    finite,
    join_column,
    largest_visible,
    multiply,
    pairwise,
    rescale,
    sum_of_rows,
    sum_of_visible,
    sums_of_exponentials,
    times,
    with_ones,
    workspace,
)
from ..arrays.blocks import (
    WHOLE,
    block_shape,
    blocks,
    buffers,
    most_threads,
    part,
    put,
    room,
    tiles,
)
from ..arrays.heads import broadcast_lead
from ..arrays.library import (
    Array,
    array_namespace,
    as_written,
    device,
    fused,
    is_cupy_array,
    is_numpy_array,
    untraced,
)
from ..arrays.shown import held
from ..arrays.threads import available, for_each
from ..numbers.primitives import primitive
from ..numbers.tape import Traced, fixed
from ..typing import ArrayT
from .scores import PLAIN, Scores, cap_scores

_MOST_SPANS = 16  # for each thread, that keys are cut into for threads to share
_SHARED_BITS = 2**23  # of scores of heads that are taken together, at least
_BOUNDED_ROWS = 256  # queries from which on it pays to read keys and values once more


@held()
class Attended(NamedTuple, Generic[ArrayT]):
    """Attention over a set of keys, and the log normaliser that merging with another set needs.

    Attributes
    ----------
    out : array, shape (..., n, d_v)
        Weighted mean of the values; 0 for a query that sees no key.
    lse : array, shape (..., n)
        Log normaliser: log-sum-exp of the scores; -inf for a query that sees no key.
    """

    out: ArrayT
    lse: ArrayT


Attended.__module__ = "refattn.attention"  # where users find it, and so do pickles


class Sums(NamedTuple):
    """Sums over some keys of e^(score - base) times the values, and of e^(score - base)."""

    total: Array  # (..., n, d_v)
    mass: Array  # (..., n, 1)
    base: Array  # (..., n, 1), -inf where no key was seen


@as_written
def attend(
    q: Array,
    k: Array,
    v: Array,
    scores: Scores = PLAIN,
    *,
    key_bias: Callable[[Array], Array] | None = None,
    block: tuple[int, int] | None = None,
) -> Attended:
    """Attend with trusted arguments; `key_bias` maps keys (..., b, d) to their `bias` (..., b)."""
    if key_bias is not None and isinstance(k, Traced):  # whose cotangent goes on to the keys
        scores, key_bias = scores._replace(bias=key_bias(k)[..., None, :]), None
    return attend_in_blocks(q, k, v, scores, key_bias, block)


@primitive
def attend_in_blocks(
    q: Array,
    k: Array,
    v: Array,
    scores: Scores,
    key_bias: Callable[[Array], Array] | None = None,
    block: tuple[int, int] | None = None,
) -> Attended:
    """Attend as `attend` does, in one step of a tape; its pullback is in `attend_back`."""
    xp = array_namespace(q, k, v)
    n, m, d_v = q.shape[-2], k.shape[-2], v.shape[-1]
    scale, bias, mask, _, _, softcap, sinks, dropout, slopes, _ = scores
    # Whether the bias is of keys alone, and whether nothing else sets queries apart: then one
    # bound of a block of keys serves all queries.
    of_keys = key_bias is not None or (bias is not None and bias.shape[-2:-1] == (1,))
    plain = mask is None and slopes is None and dropout is None and (bias is None or of_keys)
    lead = broadcast_lead(q, k, v, bias, mask, sinks, slopes, dropout)
    outer = broadcast_lead(k, v, bias if of_keys else None)
    own = len(lead) - len(outer)  # leading axes that queries alone have
    if m == 0 and sinks is None:
        none: dict[str, Any] = {"dtype": q.dtype, "device": device(q)}
        out = xp.zeros((*lead, n, d_v), **none)
        return Attended(out, xp.full((*lead, n), -math.inf, **none))
    out, lse = buffers(q, v, lead, xp)
    if scale is not None and not is_numpy_array(q):  # in one call
        q, scale = q * scale, None
    budget = math.prod(block) if block else room(q)
    rows, columns = block or block_shape(q, n, m)
    columns *= 2 if is_cupy_array(q) and not block else 1  # few calls, of which it holds three
    # A narrow window: one block is to hold all that its queries see.
    rows, band = max(1, min(n, rows)), scores.band(n, m)
    columns = max(1, min(m, band.columns(rows, columns)))
    reaches: dict[tuple[int, ...], _Reach] = {}  # of blocks of keys, which many queries share

    def reach(head: tuple[slice, ...], j: slice, *keys: Any) -> _Reach:
        at = (*(h.start for h, n in zip(head[own:], outer, strict=True) if n != 1), j.start, j.stop)
        farthest = reaches.get(at)
        if farthest is None:
            farthest = _reach(*keys)
            # Kept only where other queries come back to it. Threads that race find the same.
            if n > rows or outer != lead:
                reaches[at] = farthest
        return farthest

    def block_sums(box: tuple[slice, ...], keys: slice, memory: Workspace | None) -> Iterator[Sums]:
        head, i = box[:-1], box[-1]
        q_i = part(q, (*box, WHOLE))
        if scale is not None:  # n d products, not n m
            q_i = q_i * scale
        norms = norm_bound(q_i, xp) if plain and _may_be_bounded(q_i, v) else None
        size, d = q_i.shape[-2:]  # on NumPy, of many rows; one more term leaves products uncut
        joined = memory and of_keys and softcap is None and size >= _BOUNDED_ROWS and d < UNCUT
        if joined:
            q_i = with_ones(q_i, xp, memory)
        # Blocks without a key that some query of the box sees are skipped.
        seen = band.keys(i, keys, band.step(rows, columns))
        for j in blocks(seen.start, seen.stop, columns):
            k_j, v_j = (part(x, (*head, j, WHOLE)) for x in (k, v))
            bias_j: Any = None if bias is None else part(bias, (*head, i, j))
            if key_bias is not None:
                bias_j = key_bias(k_j)[..., None, :]
            k_of = k_j
            if joined and memory:  # the bias is one more term of products with [q_i, 1]
                k_of = join_column(k_j, bias_j[..., 0, :], memory, "keys")
            scores = multiply(q_i, xp.matrix_transpose(k_of), memory)
            if softcap is not None:  # before the bias, which is not capped
                scores = cap_scores(scores, softcap, xp)
            if bias_j is not None and not joined:
                scores = add(scores, bias_j)
            if slopes is not None:
                scores = add(scores, band.alibi(slopes, box, j, xp))
            masked = None if mask is None else part(mask, (*head, i, j))
            visible = band.visible(i, j, device(q), xp, masked)
            bounded = None
            if norms is not None and visible is None:
                bounded = _bounded(norms, reach(head, j, k_j, bias_j, v_j, xp), m)
            if dropout is None and not is_numpy_array(q):  # weights in as few passes as can be
                yield sum_scores(scores, v_j, visible, m, xp)
                continue
            weights = weigh(scores, visible, m, xp, bounded)
            kept = None if dropout is None else part(dropout, (*head, i, j))
            yield sum_values(*weights, v_j, visible, xp, memory, kept)

    zeros = partial(xp.zeros, (1, 1), dtype=q.dtype, device=device(q))

    def write(box: tuple[slice, ...], sums: Sums) -> None:
        nonlocal out, lse
        if sinks is not None:  # a key whose value is 0: mass e^0 at the base of its logit
            sink = part(sinks, (*box[:-1], WHOLE, WHOLE))
            sums = combine(sums, Sums(zeros(), zeros() + 1.0, sink), xp)
        if is_numpy_array(v) and sums.base is _zero(v.dtype):
            # Weights are bounded: their sum is not 0, and the mean is finite.
            np.divide(sums.total, sums.mass, out=out[box])
            lse[box] = np.log(sums.mass[..., 0])
            return
        done = normalise(sums, xp)
        if (done.out.shape, done.lse.shape) == (out.shape, lse.shape):  # there is no other box
            out, lse = done
            return
        out = put(out, (*box, slice(0, d_v)), done.out)
        lse = put(lse, box, done.lse)

    join, most = partial(combine, xp=xp), most_threads(q, math.prod(lead) * n * m)
    shared = max(budget // min(4, most or 1), _SHARED_BITS // xp.finfo(v.dtype).bits)
    heads = shared // (rows * columns)  # small heads are computed together

    def boxes() -> Iterator[tuple[slice, ...]]:
        return ((*head, i) for head in tiles(lead, heads) for i in blocks(0, n, rows))

    # Threads take boxes of queries, and of these, if they are few, spans of keys.
    spans = _spans_of_keys(m, columns if most > 1 else max(1, m), sum(1 for _ in boxes()))

    def items() -> Iterator[tuple[Any, ...]]:
        for box in boxes():
            tree = Tree(join, len(spans))
            yield from ((box, tree, place, keys) for place, keys in enumerate(spans))

    def worker() -> Callable[[tuple[Any, ...]], None]:
        memory = workspace(q, budget)  # as much as any block takes, not as much as the first

        def attend_span(item: tuple[Any, ...]) -> None:
            box, tree, place, keys = item
            sums = pairwise(join, block_sums(box, keys, memory), None)
            whole = tree.add(place, sums or Sums(zeros(), zeros(), zeros() - math.inf))
            if whole is not None:  # this span was the last of its box
                write(box, whole)

        return attend_span

    for_each(worker, items(), most=most)
    return Attended(out, lse)


def _spans_of_keys(m: int, columns: int, boxes: int) -> list[slice]:
    """Cut the keys, where there are too few boxes of queries for many threads.

    In powers of two of blocks, which leaves the tree of sums, and so every bit, as it is.
    """
    while columns < m and boxes * -(-m // columns) > _MOST_SPANS * available():
        columns *= 2
    return list(blocks(0, m, columns)) or [slice(0, 0)]


def weigh(
    scores: Array, visible: Array | None, m: int, xp: Any, bounded: Array | None = None
) -> tuple[Array, Array]:
    """Turn scores (..., n, b) of some of m keys, our own, into weights e^(score - base) and base.

    Where `bounded`, (..., n, 1), is true, the base is 0.
    """
    if visible is not None:
        scores = xp.where(visible, scores, -math.inf)
    if bounded is not None and bounded.all():  # no maximum, and no pass to subtract it
        return exp(scores, xp), _zero(scores.dtype)
    base = _base_of(scores, m, xp)
    base = base if bounded is None else xp.where(bounded, 0.0, base)
    return exp_less(scores, base, xp, flush=True), base


def _base_of(scores: Array, m: int, xp: Any, visible: Array | None = None) -> Array:
    """Weights of which m sum to at most 1/2 keep sums of the largest finite values finite."""
    if visible is None:
        return xp.max(scores, axis=-1, keepdims=True) + math.log(2 * m)
    return largest_visible(scores, visible, math.log(2 * m), xp)[..., None]


def sum_scores(scores: Array, v: Array, visible: Array | None, m: int, xp: Any) -> Sums:
    """Sum values with the weights of scores (..., n, b) of some of m keys, our own."""
    if is_numpy_array(scores):
        return sum_values(*weigh(scores, visible, m, xp), v, visible, xp)
    base = _base_of(scores, m, xp, visible)
    if visible is None:
        return Sums(*sums_of_exponentials(scores, base, v, xp), base)
    return sum_values(exp_of_visible(scores, visible, base, xp), base, v, visible, xp)


@cache
def _zero(dtype: Any) -> Array:
    """0, the base of all queries, as one array: where it is the base of both, sums are added."""
    return np.zeros((1, 1), dtype=dtype)


def sum_values(
    weights: Array,
    base: Array,
    v: Array,
    visible: Array | None,
    xp: Any,
    memory: Workspace | None = None,
    dropout: Array | None = None,
) -> Sums:
    """Sum weights, and values with the weights times `dropout`."""
    mass = sum_of_rows(weights, xp)  # of all keys: dropout leaves the normaliser as it is
    if dropout is not None:
        weights, kept = times(weights, dropout), dropout != 0
        visible = kept if visible is None else visible & kept
    return Sums(sum_of_visible(weights, v, visible, xp, memory), mass, base)


def split_ones(totals: Array, base: Array) -> Sums:
    """Split sums (..., d_v + 1) of values and of 1."""
    return Sums(totals[..., :-1], totals[..., -1:], base)


class _Reach(NamedTuple):
    """How far keys and values of a block reach, (..., 1, 1) each."""

    norm: Array  # largest |k|
    rest: Array  # largest |bias| and |log| of the largest values of columns


def norm_bound(x: Array, xp: Any) -> Array:
    """Bound |x| along the last axis, which is kept: squares may underflow to 0."""
    # The root of all that d squares below the smallest normal number add up to.
    lost = (x.shape[-1] * float(xp.finfo(x.dtype).smallest_normal)) ** 0.5
    return xp.sqrt(xp.vecdot(x, x))[..., None] + lost


def _reach(k: Array, bias: Array | None, v: Array, xp: Any) -> _Reach:
    largest = nonzero(_largest_of_columns(v, xp), xp)  # a column of zeros has nothing to lose
    rest = xp.max(xp.abs(xp.log(largest)), axis=-1, keepdims=True)
    if bias is not None:
        rest = rest + xp.max(xp.abs(bias), axis=-1, keepdims=True)
    return _Reach(xp.max(norm_bound(k, xp), axis=-2, keepdims=True), rest)


def _may_be_bounded(q: Array, v: Array) -> bool:
    """Say whether `_bounded` pays; in other libraries its branch would wait for the device."""
    if not is_numpy_array(q) or q.shape[-2] < _BOUNDED_ROWS:
        return False
    return float(np.finfo(q.dtype).smallest_normal) > 0 and v.size > 0  # 0 for longdouble


def _bounded(norms: Array, keys: _Reach, m: int) -> Array:
    r"""Say which queries (..., n, 1) need no maximum over a block of the m keys.

    That saves three passes over the scores. By
    :math:`|q \cdot k + b| \le r = |q| \max |k| + \max |b|`, weights are between
    :math:`e^{-r}` and :math:`e^r`. Let :math:`v_c` be the largest magnitude in a column c of the
    values, unless all are 0. While

    .. math:: e^r \; \max_c \max(v_c, 1 / v_c) \; (2 m)^2 \le \mathrm{eps} / \mathrm{tiny},

    nothing overflows; what underflows is less than eps of :math:`v_c` times the least weight. Sums
    may be added to others that have a base, hence a mass of at least 1 / (2 m): where their factor
    for it is below tiny, and may be flushed to 0, these sums are less than eps of the others.
    """
    bounded: Array = norms * keys.norm + keys.rest <= _farthest(norms.dtype, m)
    return bounded


@cache
def _farthest(dtype: Any, m: int) -> float:
    """Say how far scores, with the logs of values, may reach without a maximum."""
    limits = np.finfo(dtype)
    # The log of the condition in `_bounded`: (2 m)^2 there.
    return math.log(float(limits.eps) / float(limits.smallest_normal)) - 2 * math.log(2 * m)


def _largest_of_columns(v: Array, xp: Any) -> Array:
    """Find the largest magnitude in each column, (..., 1, d_v)."""
    *lead, b, d_v = v.shape
    rows = math.gcd(b, 32)  # taken as one: NumPy needs as long for short rows as for long ones
    largest = xp.max(xp.reshape(xp.abs(v), (*lead, b // rows, rows * d_v)), axis=-2)
    return xp.max(xp.reshape(largest, (*lead, rows, d_v)), axis=-2, keepdims=True)


def base_of(some: Array, like: Array) -> Array:
    """0 where there are some keys, else -inf, in the dtype of `like`."""
    zero, nothing = np.asarray([0.0, -math.inf], dtype=like.dtype)
    return np.where(some, zero, nothing)


def combine(a: Sums, b: Sums, xp: Any) -> Sums:
    """Add the sums over two sets of keys, of which the totals may be overwritten."""
    if a.base is b.base:  # both are `_zero`: nothing to rescale
        return Sums(add(a.total, b.total), a.mass + b.mass, a.base)
    base, scale_a, scale_b = common_base(a.base, b.base, xp)
    mass = _weighted_mass(a.mass, scale_a, b.mass, scale_b, xp)
    return Sums(_weighted_total(a.total, scale_a, b.total, scale_b, xp), mass, base)


@fused
def common_base(a: Array, b: Array, xp: Any) -> tuple[Array, Array, Array]:
    """Find the larger base; relative to it, factors are at most 1: neither sum overflows."""
    base = xp.maximum(a, b)
    number = finite(base, xp)
    return base, xp.exp(a - number), xp.exp(b - number)


@fused
def _weighted_mass(a: Array, weight_a: Array, b: Array, weight_b: Array, xp: Any) -> Array:
    return a * weight_a + b * weight_b


@fused
def _weighted_total(a: Array, weight_a: Array, b: Array, weight_b: Array, xp: Any) -> Array:
    return add(rescale(a, weight_a), rescale(b, weight_b))


def normalise(sums: Sums, xp: Any) -> Attended:
    """Divide the total by the mass."""
    mass, lse = _log_of_mass(sums.mass, sums.base, xp)
    return Attended(_mean_of_total(sums.total, mass, xp), lse[..., 0])


@fused
def _mean_of_total(total: Array, mass: Array, xp: Any) -> Array:
    return undo_overflow(total / mass, total, xp=xp)


def undo_overflow(mean: Array, *averaged: Array, xp: Any) -> Array:
    """Undo overflow by rounding: where what was averaged is finite, so is the mean."""
    if is_numpy_array(untraced(mean)) and not np.isinf(untraced(mean)).any():
        return mean
    # An infinite value is an answer, and stays.
    undo = reduce(and_, map(xp.isfinite, averaged))
    most = xp.finfo(mean.dtype).max
    return xp.where(undo, clip(mean, -most, most, xp), mean)


@fused
def _log_of_mass(mass: Array, base: Array, xp: Any) -> tuple[Array, Array]:
    """Return the mass, with 0 replaced by 1, and log(mass * e^base)."""
    none = mass == 0  # no key was seen: 0 / 1 = 0 is the output
    mass = xp.where(none, 1.0, mass)
    return mass, xp.where(none, -math.inf, base + xp.log(mass))


@as_written
def log_sum_exp(scores: Array, xp: Any) -> Array:
    """Reduce the last axis, which must not be empty."""
    base = xp.max(fixed(scores), axis=-1)  # which cancels
    if is_cupy_array(scores):
        weights = exp_less(scores, base[..., None], xp)
    else:
        weights = xp.exp(scores - finite(base, xp)[..., None])
    return _log_of_mass(xp.sum(weights, axis=-1), base, xp)[1]


@as_written
def merge(a: Attended, b: Attended) -> Attended:
    """Merge attention over two sets of keys."""
    xp = array_namespace(*a, *b)
    share_a, share_b, lse = _shares(a.lse, b.lse, xp)
    return Attended(_share_out(a.out, share_a[..., None], b.out, share_b[..., None], xp), lse)


@fused
def _shares(a: Array, b: Array, xp: Any) -> tuple[Array, Array, Array]:
    """Say how much two sets of keys weigh, and the log normaliser of both."""
    base = finite(xp.maximum(a, b), xp)
    mass_a, mass_b = (xp.exp(x - base) for x in (a, b))
    mass = mass_a + mass_b
    none = mass == 0  # no key was seen
    mass = xp.where(none, 1.0, mass)
    lse = xp.where(none, -math.inf, base + xp.log(mass))
    return mass_a / mass, mass_b / mass, lse


@fused
def _share_out(a: Array, share_a: Array, b: Array, share_b: Array, xp: Any) -> Array:
    # Shares before values: a sum of large values times masses might overflow.
    return undo_overflow(share_a * a + share_b * b, a, b, xp=xp)


@fused
def nonzero(mass: Array, xp: Any) -> Array:
    """Replace 0, the mass of an empty set, by 1."""
    return xp.where(mass == 0, 1.0, mass)
