r"""Keys chosen at random: pivots that span the kernel of all keys, and samples of keys.

Uniform numbers are drawn on the host in float64. They choose keys on the device, in float64 if it
has that. A seed chooses the same keys with every array library, unless a number is within rounding
of the border between two keys.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, get_args

import numpy as np

from ..arrays import checks, qkv
from ..arrays.arithmetic import exp_of_visible, largest_visible, square_norm
from ..arrays.blocks import WHOLE, block_shape, blocks, part, put, room, some_heads, tiles
from ..arrays.heads import group_heads, group_with_lead
from ..arrays.library import (
    Array,
    as_written,
    centred,
    constant,
    device,
    first_rows,
    fused,
    is_cupy_array,
    is_numpy_array,
    root_scale,
    take_flat,
    take_rows,
    widest,
)
from ..arrays.shown import held
from ..engine.attend import attend
from ..engine.hops import Keys
from ..engine.scores import Scores
from ..typing import KEY_LAWS, KeyLaw, Pivots

__all__ = ["PIVOTS", "KeySample", "draw_keys", "draw_pivots"]
__dir__ = __all__.copy


PIVOTS: tuple[Pivots, ...] = get_args(Pivots)
_JOINED_AT_ONCE = 64  # columns in one kernel of CuPy
_ROUNDS = 32  # of shares that are cut at 1; each cuts one at least, and most all


@held()
class KeySample(NamedTuple):
    """Keys of a sample.

    Attributes
    ----------
    indices : array of integers, shape (..., S) or (..., n, S)
        Which keys.
    log_probability : array, shape of `indices`
        Log of the expected number of times that each is drawn; infinite where a place is empty.
    """

    indices: Array
    log_probability: Array


@as_written
def draw_pivots(
    k: Array,
    *,
    num_keys: int,
    pivots: Pivots = "gaussian",
    rng: Any = None,
    scale: float | None = None,
    mask: Array | None = None,
) -> Array:
    r"""Choose keys whose kernels span those of the others (randomly pivoted Cholesky).

    .. math:: P(s) \propto h(k_s, k_s) - h_{sJ} \, h_{JJ}^{-1} \, h_{Js}

    for each key in turn, with J the keys chosen before it. Chen et al., arXiv:2207.06503. Takes
    time O(m S (d + S)) and memory O(m S) for each head.

    Parameters
    ----------
    k : array, shape (..., m, d), float32 or float64
        Keys.
    num_keys : int
        Number S of keys to choose, at most m.
    pivots : {"gaussian", "exponential"}
        The kernel h, e^{-|k - k'|^2 / 2} or e^{k . k'}, of keys from which the mean of the keys
        that may be chosen is subtracted. The latter prefers long keys. Both span the same functions
        of a query.
    rng : None, int, numpy.random.Generator or anything numpy.random.default_rng takes
        Source of randomness.
    scale : float, optional
        Factor on k . k', 1 / sqrt(d) by default, positive.
    mask : array of bool, broadcasting to (..., 1, m), optional
        True for keys that may be chosen. If none of these is left that differs from the chosen
        keys, the remaining indices are arbitrary.

    Returns
    -------
    array of integers, shape (..., S)
        Indices for each head of `k`, in the order in which they were chosen, with the namespace
        and device of `k`.

    Raises
    ------
    TypeError, ValueError
        As in `attend`; if `num_keys` is not a positive integer of at most m, or `pivots` unknown.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn.estimators import key_sampling
    >>> k = np.array([[0.0], [9.0], [0.0]])
    >>> sorted(key_sampling.draw_pivots(k, num_keys=2, rng=0, scale=1.0).tolist())
    [0, 1]
    """
    checks.arrays(2, k=k)
    xp, _ = qkv.check(k, k, k, mask=mask)
    scale = checks.real("scale", scale, positive=True, optional=True, like=k)
    checks.choice("pivots", pivots, PIVOTS)
    checks.length("num_keys", num_keys)
    checks.at_most("num_keys", num_keys, k.shape[-2], "the number of keys")
    rng, mask = checks.generator(rng), qkv.one_row(mask, k)
    u = rng.random((*k.shape[:-2], num_keys))
    return _draw_pivots(k, u, pivots, scale, mask, xp)


@as_written
def _draw_pivots(
    k: Array, u: Any, pivots: Pivots, scale: float | None, mask: Array | None, xp: Any
) -> Array:
    """Choose a key for each number of u, (..., S), a few heads at a time."""
    (*lead, m, d), size, wide = k.shape, u.shape[-1], widest(k, xp)
    u = np.minimum(u, 1 - float(xp.finfo(wide).eps))  # rounded to `wide` they stay below 1
    chosen = xp.empty(u.shape, dtype=xp.int32, device=device(k))
    for head in tiles(tuple(lead), room(k) // (m * (size + d))):
        box = (*head, WHOLE)
        seen = None if mask is None else part(mask, (*box, WHOLE))
        x = xp.astype(centred(part(k, (*box, WHOLE)), seen, xp), wide)
        x = root_scale(scale, x) * x
        points = constant(u[head], x)
        left = xp.ones(x.shape[:-1], dtype=wide, device=device(k))
        if seen is not None:
            left = xp.where(seen[..., 0, :], left, 0.0)
        heads = math.prod(x.shape[:-2])
        x, left = xp.reshape(x, (heads, m, d)), xp.reshape(left, (heads, m))
        each = xp.reshape(points, (heads, size))
        choose = _choose_in_kernels if is_cupy_array(x) else _choose_in_turn
        at = choose(x, left, each, pivots == "exponential", xp)
        chosen = put(chosen, box, xp.reshape(xp.astype(at, xp.int32), points.shape))
    return chosen


def _choose_in_turn(x: Array, left: Array, u: Array, exponential: bool, xp: Any) -> Array:
    """Choose a key for each number of u, (H, S), by the residual diagonal `left`, (H, m).

    Where nothing is left of a head all later numbers of it may be nan, and nothing stays left.
    """
    (heads, m, _), size, least = x.shape, u.shape[-1], _least_pivot(u, x, xp)
    # The residual of e^(k . k') is that of the Gaussian kernel times e^(|k|^2).
    log_factor = square_norm(x) if exponential else None
    rows, chosen = xp.zeros((heads, size, m), dtype=x.dtype, device=device(x)), []
    first, of_rows = first_rows(x, xp), xp.reshape(first_rows(rows[..., None], xp), (heads, size))
    for s in range(size):
        at = _invert(_shares_left(left, log_factor, xp), u[:, s : s + 1], xp)
        place = first + at
        apart = xp.sum((x - take_flat(x, place, xp)[:, None, :]) ** 2, axis=-1)
        known = s if is_numpy_array(x) else size  # a part is copied by others
        factor = xp.reshape(take_flat(rows[..., None], of_rows + at, xp), (heads, 1, size))
        product = (factor[..., :known] @ rows[:, :known, :])[:, 0, :]
        pivot = take_flat(left[..., None], place, xp)
        row, left = _factors_and_rest(left, apart, product, pivot, least, xp)
        rows = put(rows, (WHOLE, slice(s, s + 1), WHOLE), row[:, None, :])
        chosen.append(at)
    return xp.concat(chosen, axis=-1)


def _choose_in_kernels(x: Array, left: Array, u: Array, exponential: bool, xp: Any) -> Array:
    """Do so on CuPy, in six kernels a key: of each key, coordinates and factors are in one row."""
    (heads, m, d), size, least = x.shape, u.shape[-1], _least_pivot(u, x, xp)
    log_factor = square_norm(x) if exponential else None
    rows = xp.zeros((heads, m, d + 1 + size), dtype=x.dtype, device=device(x))
    rows = put(rows, (WHOLE, WHOLE, slice(0, d)), x)
    rows = put(rows, (WHOLE, WHOLE, slice(d, d + 1)), left[..., None])
    column = xp.arange(d + 1 + size, device=device(x))
    number = xp.reshape(xp.arange(heads * m, device=device(x)), (heads, m))
    which, chosen = column[:2, None, None], []
    for s in range(size):
        upper, known = xp.cumulative_sum(_shares_left(left, log_factor, xp), axis=-1), d + 1 + s
        place = _place_of(u[:, s : s + 1], upper, upper[:, -1:], number, number[:, -1:], xp)
        row = take_flat(rows, place, xp)[:, None, None, :known]
        sums = _apart_and_product(rows[:, None, :, :known], row, column[:known], d, which, xp)
        left = _add_factor(
            rows[..., known], rows[..., d], sums[:, 0], sums[:, 1], row[:, 0, :, d], least, xp
        )
        chosen.append(place[:, None])
    some = (chosen[i] for i in blocks(0, size, _JOINED_AT_ONCE))
    parts = [_joined_columns(*x, column[: len(x)], number[:, :1], xp) for x in some]
    return xp.concat(parts, axis=-1) if len(parts) > 1 else parts[0]


def _least_pivot(u: Array, x: Array, xp: Any) -> float:
    return float(u.shape[-1] * xp.finfo(x.dtype).eps)


def _shares_left(left: Array, log_factor: Array | None, xp: Any) -> Array:
    """Weigh what is left of each key, relative to the largest factor of those that are left."""
    if log_factor is None:
        return left
    some = left > 0
    top = largest_visible(log_factor, some, 0.0, xp)[..., None]
    return exp_of_visible(log_factor, some, top, xp) * left


def _factors_and_rest(
    left: Array, apart: Array, product: Array, pivot: Array, least: float, xp: Any
) -> tuple[Array, Array]:
    """Return the factors of keys with the chosen one, and what is left of them without it."""
    # Where nothing is left: Dask would divide by 0 later, where warnings are heard.
    row = (xp.exp(-0.5 * apart) - product) / xp.sqrt(xp.where(pivot > 0, pivot, math.inf))
    rest = left - row**2
    return row, xp.where(rest > least, rest, 0.0)


@fused
def _place_of(u: Array, upper: Array, total: Array, number: Array, last: Array, xp: Any) -> Array:
    """Find the number of the key whose part of the sum of shares holds u: after all not above."""
    return xp.min(xp.where(upper > u * total, number, last), axis=-1)


@fused
def _apart_and_product(
    rows: Array, row: Array, column: Array, d: int, which: Array, xp: Any
) -> Array:
    """Sum squares of differences of coordinates, or products of factors, (H, 2, m)."""
    term = xp.where(column < d, (rows - row) ** 2, rows * row)
    return xp.sum(xp.where(xp.where(which == 0, column < d, column > d), term, 0.0), axis=-1)


@fused
def _add_factor(
    factor: Array, left: Array, apart: Array, product: Array, pivot: Array, least: float, xp: Any
) -> Array:
    """Write factors and what is left, which is also returned."""
    factor[...], rest = _factors_and_rest(left, apart, product, pivot, least, xp)
    left[...] = rest
    return rest


@fused
def _joined_columns(*arguments: Any) -> Array:
    """Join columns, (H, 1) each, of numbers from a first: which column is given after them."""
    *columns, which, first, xp = arguments
    joined = columns[0]
    for i, x in enumerate(columns):
        joined = xp.where(which == i, x, joined)
    return joined - first


def _invert(share: Array, u: Array, xp: Any) -> Array:
    """Find whose part of the sum of shares (..., m) holds u, (..., S) as shares of the sum."""
    upper = xp.cumulative_sum(share, axis=-1)
    return _not_above(upper[..., :-1], u * upper[..., -1:], xp)


def _not_above(upper: Array, points: Array, xp: Any) -> Array:
    """Count the numbers (..., m) that are not above each point, (..., S)."""
    size, counts = max(1, math.prod(block_shape(upper)) // max(1, upper.shape[-1])), []
    for some in blocks(0, points.shape[-1], size):
        below = upper[..., None, :] <= points[..., some][..., None]
        counts.append(xp.count_nonzero(below, axis=-1))
    return xp.concat(counts, axis=-1) if len(counts) > 1 else counts[0]


@as_written
def draw_keys(
    q: Array,
    k: Array,
    v: Array,
    *,
    num_keys: int,
    law: KeyLaw = "uniform",
    rng: Any = None,
    scale: float | None = None,
    mask: Array | None = None,
) -> KeySample:
    r"""Draw a sample of keys for `sampled_key_attention`.

    Parameters
    ----------
    q, k, v
        As in `attend`: shapes (..., n, d), (..., m, d), (..., m, d_v).
    num_keys : int
        Places S of a sample, at most m.
    law : {"uniform", "norms", "softmax"}
        * ``"uniform"``: each key with probability S / m, without replacement;
        * ``"norms"``: with probability min(1, c (|v_j|^2 / sum_l |v_l|^2 + 1 / m)), with c such
          that the sum is S, without replacement: as in HyperAttention, Han et al.,
          arXiv:2310.05869, but half uniform, because keys with small values also count in the
          denominator;
        * ``"softmax"``: S independent keys of each query from its softmax, which takes time
          O(n m).

        A sample without replacement is a systematic sample, in the order of the keys.
    rng : None, int, numpy.random.Generator or anything numpy.random.default_rng takes
        Source of randomness.
    scale : float, optional
        Factor on q . k, 1 / sqrt(d) by default.
    mask : array of bool, broadcasting to (..., n, m), optional
        True where the query attends to the key; the same for all queries, of shape (..., 1, m),
        unless the law is ``"softmax"``.

    Returns
    -------
    KeySample
        `indices` and `log_probability`, of shape (..., S), or (..., n, S) if the law is
        ``"softmax"``, for each query head. `log_probability` has the dtype of `q`. If there are
        fewer than S visible keys, the remaining places have the log probability inf, and no query
        sees them.

    Raises
    ------
    TypeError, ValueError
        As in `attend`; if `num_keys` is not a positive integer of at most m, or `law` unknown.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn.estimators import key_sampling
    >>> q, k, v = np.zeros((1, 1)), np.zeros((4, 1)), np.ones((4, 1))
    >>> indices, log_p = key_sampling.draw_keys(q, k, v, num_keys=2, rng=0)
    >>> int(indices[1] - indices[0]), np.exp(log_p).round(6)
    (2, array([0.5, 0.5]))
    """
    xp, lead = qkv.check(q, k, v, mask=mask)
    scale = checks.real("scale", scale, optional=True, like=q)
    checks.choice("law", law, KEY_LAWS)
    checks.length("num_keys", num_keys)
    checks.at_most("num_keys", num_keys, k.shape[-2], "the number of keys")
    rng = checks.generator(rng)
    if law == "softmax":
        mask = qkv.key_rows(mask, k)
        u = rng.random((*lead, q.shape[-2], num_keys))
        (q, k, v, mask, u), ungroup = group_heads(q, k, v, mask, u)
        return KeySample(*map(ungroup, _draw_from_softmax(q, k, u, scale, mask, xp)))
    (q, k, v, mask), lead, ungroup = group_with_lead(q, k, v, qkv.one_row(mask, k))
    u = rng.random((*Keys(k, v, mask).lead(), 1))
    sample = _draw_systematic(k, v if law == "norms" else None, num_keys, u, mask, xp)
    return KeySample(*(ungroup(xp.broadcast_to(x, (*lead, num_keys)), core=1) for x in sample))


@as_written
def _draw_systematic(
    k: Array, v: Array | None, num_keys: int, u: Any, mask: Array | None, xp: Any
) -> KeySample:
    """Draw keys at u, u + 1, ... of the sum of their inclusion probabilities."""
    m, wide = k.shape[-2], widest(k, xp)
    seen = xp.ones((*u.shape[:-1], m), dtype=xp.bool, device=device(k))
    seen = seen if mask is None else seen & mask[..., 0, :]
    share = xp.where(seen, xp.ones((m,), dtype=wide, device=device(k)), 0.0)
    if v is not None and v.shape[-1]:
        values = xp.where(seen[..., None], xp.astype(v, wide), 0.0)
        most = xp.max(xp.abs(values), axis=(-2, -1), keepdims=True)
        norms = square_norm(values / xp.where(most > 0, most, 1.0))
        total, count = (xp.sum(x, axis=-1, keepdims=True) for x in (norms, share))
        share = share / xp.where(count > 0, count, 1.0) + norms / xp.where(total > 0, total, 1.0)
    p = share * 0.0
    for _ in range(_ROUNDS):  # those cut at 1 leave more to the others
        full = p >= 1
        rest = xp.sum(xp.where(full, 0.0, share), axis=-1, keepdims=True)
        due = num_keys - xp.sum(xp.astype(full, wide), axis=-1, keepdims=True)
        p = xp.where(
            full, 1.0, xp.minimum(share * (due / xp.where(rest > 0, rest, 1.0)), 1.0 + 0.0 * share)
        )
    upper = xp.cumulative_sum(p, axis=-1)
    points = constant(u, p) + xp.arange(num_keys, dtype=wide, device=device(k))
    at = xp.astype(_not_above(upper, points, xp), xp.int32)
    empty, at = at >= m, xp.minimum(at, m - 1)
    log_p = xp.where(empty, math.inf, xp.log(take_rows(p[..., None], at, xp)[..., 0]))
    return KeySample(at, xp.astype(log_p, k.dtype))


@as_written
def _draw_from_softmax(
    q: Array, k: Array, u: Any, scale: Any, mask: Array | None, xp: Any
) -> tuple[Array, Array]:
    """Invert the distribution function of each query's softmax at u, (..., n, S)."""
    (*lead, n, size), m, wide = u.shape, k.shape[-2], widest(k, xp)
    scale = constant(q.shape[-1], q) ** -0.5 if scale is None else scale
    options = {"device": device(q)}
    indices = xp.zeros((*lead, n, size), dtype=xp.int32, **options)
    log_p = xp.zeros((*lead, n, size), dtype=q.dtype, **options)
    below_one = 1 - xp.finfo(wide).eps
    for *head, i in tiles((*lead, n), max(1, room(q) // (m * size))):
        box = (*head, i, WHOLE)
        q_i, k_h = xp.astype(part(q, box), wide), xp.astype(some_heads(k, head), wide)
        seen = None if mask is None else part(mask, box)
        lse = attend(q_i, k_h, k_h[..., :1], Scores(scale, mask=seen)).lse[..., None]
        scores = (q_i * scale) @ xp.matrix_transpose(k_h)
        scores = scores if seen is None else xp.where(seen, scores, -math.inf)
        blind = lse == -math.inf
        lse = xp.where(blind, 0.0, lse)
        at = _invert(
            xp.exp(scores - lse), xp.minimum(constant(u[(*head, i)], scores), below_one), xp
        )
        score = take_rows(scores[..., None], at, xp)[..., 0]
        log_p_i = xp.where(blind, math.inf, score - lse + math.log(size))
        indices = put(indices, box, xp.astype(at, xp.int32))
        log_p = put(log_p, box, xp.astype(log_p_i, q.dtype))
    return indices, log_p
