r"""Attention to a few keys in place of all: a coreset that stands for them, or a sample."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from ..arrays import checks, key_samples, qkv
from ..arrays.arithmetic import exp_of_visible, largest_visible, multiply, square_norm, with_ones
from ..arrays.blocks import (
    WHOLE,
    block_shape,
    blocks,
    buffers,
    part,
    put,
    room,
    some_heads,
    sum_to,
    tiles,
)
from ..arrays.heads import broadcast_lead, group_heads, group_with_lead
from ..arrays.library import (
    Array,
    as_written,
    centred,
    constant,
    device,
    fused,
    is_cupy_array,
    is_numpy_array,
    reverse,
    root_scale,
    take_rows,
    untraced,
    widest,
)
from ..engine.attend import Attended, attend, merge
from ..engine.scores import Scores
from ..numbers.primitives import primitive, retraced
from ..numbers.tape import Traced
from ..typing import ArrayT, Pivots
from . import key_sampling
from .inputs import Options, check_call, exactly_one, in_heads
from .key_sampling import PIVOTS

_ELIMINATED = 4  # rows in one kernel of CuPy


@as_written
def coreset_attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    *,
    num_keys: int | None = None,
    indices: Any = None,
    pivots: Pivots = "gaussian",
    rng: Any = None,
    scale: float | None = None,
    mask: Array | None = None,
) -> ArrayT:
    r"""Attend to a few keys that represent all keys (Nystrom approximation of their kernel).

    .. math::
        \mathrm{out}_i = \frac{\sum_{s \in J} e^{q_i \cdot k_s} (W v)_s}
                              {\sum_{s \in J} e^{q_i \cdot k_s} (W 1)_s}, \qquad
        W = h_{JJ}^{-1} h_{JK}, \quad h(k, k') = e^{k \cdot k'}

    after the mean of the visible keys is subtracted from the keys (WildCat, arXiv:2602.10056).
    Linear in n and m. Biased; weights and the denominator may be negative, or 0. With all keys in J
    it is exact attention. Not causal, and without a decoding state: the weights depend on all keys.

    Parameters
    ----------
    q, k, v
        As in `attend`: shapes (..., n, d), (..., m, d), (..., m, d_v), all float32 or float64.
    num_keys : int, optional
        Number S of keys in J, at most m, if `indices` are not given.
    indices : array of integers, shape (..., S), optional
        Keys J of each query head, or of each key head, from 0 to m - 1; checked as in
        `sampled_key_attention`. A key that is hidden, or that rounding cannot tell from the keys
        before it, is ignored.
    pivots : {"gaussian", "exponential"}
        How J is chosen, see `key_sampling.draw_pivots`.
    rng : None, int, numpy.random.Generator or anything numpy.random.default_rng takes
        Source of randomness.
    scale : float, optional
        Factor on q . k, 1 / sqrt(d) by default, positive.
    mask : array of bool, broadcasting to (..., 1, m), optional
        True where the queries attend to the key: the same for all queries.

    Returns
    -------
    array, shape (..., n, d_v)
        Same namespace, dtype and device as `q`. Rows that see no key of J are 0. Values are
        not confined to the range of `v`.

    Raises
    ------
    TypeError
        As in `attend`, and if `indices` or `num_keys` are not integers.
    ValueError
        As in `attend`; if not exactly one of `num_keys` and `indices` is given, if they request
        more keys than there are, if an index is out of range, if `pivots` is unknown, or if the
        mask differs between queries.

    Notes
    -----
    W is the identity at the keys of J, and only its other columns need a linear system. If the keys
    J attend to the other keys, with output f and log normaliser log Z, then

    .. math:: W v = v_J + h_{JJ}^{-1} (Z f)

    This is solved by a Cholesky factor of the Gaussian kernel g = h / (a a'), a = e^{|k|^2 / 2},
    whose diagonal is 1. Relative to the sum of the absolute terms the error is at most of the order
    of eps (1 + largest exponent) S sqrt(cond g). Rounding cannot tell a key from those before it if
    its pivot is at most S eps. g is factored in float64 if the device has it, but f and Z are in
    the dtype of `q`. For example, J may be 6 of 12 keys in 3 dimensions with coordinates of size
    0.1, 0.03, 0.01 or 0.003. In float32 the errors are then about 1e-5, 1e-4, 1e-3 and 1e-2 of
    values of size 1; in float64, which such keys need, they are below 1e-10. Keys further apart
    than |k - k'|^2 / 2 = 708, or 87 without float64, are treated as orthogonal. The gradients of
    `vjp` are those at keys J that do not change.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import coreset_attention, softmax_attention
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 40, 4))
    >>> approx = coreset_attention(q, k, v, num_keys=30, rng=1)
    >>> bool(np.max(np.abs(approx - softmax_attention(q, k, v))) < 0.1)
    True
    """
    scale, mask, _, xp = check_call(q, k, v, Options(scale, mask))
    mask = qkv.one_row(mask, k)
    checks.choice("pivots", pivots, PIVOTS)
    exactly_one(num_keys=num_keys, indices=indices)
    if indices is not None:
        indices = key_samples.check_indices(indices, q, k, v)[..., None, :]
    (q, k, v, mask, indices), ungroup = group_heads(q, k, v, mask, indices)
    if num_keys is not None:  # for each head that sees other keys
        each = xp.broadcast_to(k, (*broadcast_lead(k, mask), *k.shape[-2:]))
        drawn = key_sampling.draw_pivots(
            untraced(each),
            num_keys=num_keys,
            pivots=pivots,
            rng=rng,
            scale=scale,
            mask=untraced(mask),
        )
        indices = drawn[..., None, :]
    inputs = _CoresetInputs(q, k, v, mask, indices, root_scale(scale, q), xp)
    return ungroup(in_heads(inputs, _attend_by_coreset, q, v, xp))


class _CoresetInputs(NamedTuple):
    """Checked arguments of `coreset_attention`, heads in groups, and keys J, (..., 1, S)."""

    q: Array
    k: Array
    v: Array
    mask: Array | None
    indices: Array
    root: Array  # of the scale
    xp: Any  # the array namespace

    @property
    def lead(self) -> tuple[int, ...]:
        """Leading axes of the result."""
        return broadcast_lead(*self[:5])

    def part(self, head: tuple[slice, ...]) -> _CoresetInputs:
        """Take some heads."""
        q, k, v, mask, indices = (some_heads(x, head) for x in self[:5])
        return self._replace(q=q, k=k, v=v, mask=mask, indices=indices)


def _attend_by_coreset(inputs: _CoresetInputs) -> Array:
    """Attend to the keys of J with what they carry of the others."""
    q, k, v, mask, indices, root, xp = inputs
    indices = indices[..., 0, :]
    q, k = root * q, root * centred(k, mask, xp)
    chosen, v_chosen = take_rows(k, indices, xp), take_rows(v, indices, xp)
    square = square_norm(chosen)
    solve, free = _solver(_gaussian_kernel(chosen, mask, indices, xp), xp)
    free = free[..., None, :]
    identity = attend(q, chosen, with_ones(v_chosen, xp), Scores(mask=free))
    others = _not_chosen(indices, free, mask, k, xp)
    f, log_z = attend(chosen, k, v, Scores(mask=others))
    carried, bias = _carry(solve, free, with_ones(f, xp), log_z, square, xp)
    both = merge(identity, attend(q, chosen, carried, Scores(bias=bias)))
    return _ratio_of_sums(both.out[..., :-1], both.out[..., -1:], both.lse[..., None], xp)


@fused
def _ratio_of_sums(total: Array, mass: Array, lse: Array, xp: Any) -> Array:
    return total / xp.where(lse > -math.inf, mass, 1.0)


def _gaussian_kernel(x: Array, mask: Array | None, indices: Array, xp: Any) -> Array:
    """Gaussian kernel of the keys of J, in float64 where the device has it; 0 of hidden ones."""
    x = xp.astype(x, widest(x, xp), copy=False)
    square = square_norm(x)[..., None, :]
    gram = _exp_of_half(x @ xp.matrix_transpose(x), square, xp.matrix_transpose(square), xp)
    if mask is None:
        return gram
    return xp.where(take_rows(xp.matrix_transpose(mask), indices, xp), gram, 0.0)


@fused
def _exp_of_half(product: Array, x: Array, y: Array, xp: Any) -> Array:
    return xp.exp(product - x / 2 - y / 2)


def _solver(g: Array, xp: Any) -> tuple[Callable[[Array], Array], Array]:
    """Return b -> g^-1 b, and which rows of g do not depend on those before: the others give 0."""
    if is_numpy_array(untraced(g)):
        factor, free = _factor_kernel(g, xp)
        return partial(_solve_factored, factor, free[..., None], xp=xp), free
    inverse, free = _invert_factor(untraced(g), untraced(xp))
    return partial(_solve_by_inverse, g, inverse, xp=xp), free


def _carry(
    solve: Callable[[Array], Array], free: Array, f: Array, log_z: Array, square: Array, xp: Any
) -> tuple[Array, Array]:
    """Return what keys of J carry of the others, g^-1 (Z f), in rows of size 1, and their bias."""
    wide, free = widest(f, xp), free[..., 0, :]
    log_z = xp.astype(_less_half(log_z, square, xp), wide)
    top = largest_visible(log_z, free, 0.0, xp)[..., None]
    x = solve(_weigh_rows(exp_of_visible(log_z, free, top, xp)[..., None], f, xp))
    size = _largest_finite(x, xp)[..., None]
    return _of_size_1(x, size, f, xp), _log_of_size(size[..., 0], top, square, xp)[..., None, :]


@fused
def _less_half(x: Array, y: Array, xp: Any) -> Array:
    return x - y / 2


@fused
def _weigh_rows(weights: Array, x: Array, xp: Any) -> Array:
    return weights * xp.astype(x, weights.dtype)


@fused
def _largest_finite(x: Array, xp: Any) -> Array:
    """Find the largest magnitude of a row: what is not finite stays in its column."""
    return xp.max(xp.where(xp.isfinite(x), xp.abs(x), 1.0), axis=-1)


@fused
def _of_size_1(x: Array, size: Array, like: Array, xp: Any) -> Array:
    return xp.astype(x / xp.where(size > 0, size, 1.0), like.dtype)


@fused
def _log_of_size(size: Array, top: Array, square: Array, xp: Any) -> Array:
    some = size > 0
    log_size = xp.where(some, xp.log(xp.where(some, size, 1.0)), -math.inf)
    return xp.astype(log_size + top, square.dtype) - square / 2


def _not_chosen(indices: Array, free: Array, mask: Array | None, k: Array, xp: Any) -> Array:
    """Find keys that are seen and not among those of J that are `free`, (..., 1, m)."""
    m, parts = k.shape[-2], []
    at, there = indices[..., None], xp.matrix_transpose(free)
    for j in blocks(0, m, max(1, math.prod(block_shape(k)) // indices.shape[-1])):
        keys = xp.arange(j.start, j.stop, dtype=at.dtype, device=device(k))
        parts.append(_not_among(keys, at, there, xp))
    others = (xp.concat(parts, axis=-1) if len(parts) > 1 else parts[0])[..., None, :]
    return others if mask is None else others & mask


@fused
def _not_among(keys: Array, at: Array, there: Array, xp: Any) -> Array:
    return ~xp.any(there & (at == keys), axis=-2)


def _factor_kernel(a: Array, xp: Any) -> tuple[Array, Array]:
    """Factor a positive semidefinite matrix with ones on its diagonal.

    Returns the lower factor and which rows do not depend on those before, (..., S), to rounding:
    columns of the others are 0.
    """
    size = a.shape[-1]
    least = size * xp.finfo(a.dtype).eps
    lower, heads = xp.zeros_like(a), (WHOLE,) * (a.ndim - 2)
    for s in range(size):
        pivot = a[..., :1, :1]
        column = a[..., :1] / xp.sqrt(xp.where(pivot > least, pivot, math.inf))
        rest = column[..., 1:, :]
        a = a[..., 1:, 1:] - rest * xp.matrix_transpose(rest)
        lower = put(lower, (*heads, slice(s, size), slice(s, s + 1)), column)
    return lower, _diagonal(lower, xp) > 0


def _diagonal(x: Array, xp: Any) -> Array:
    """Take the diagonals of square matrices, (..., S)."""
    size = x.shape[-1]
    return xp.reshape(x, (*x.shape[:-2], size * size))[..., :: size + 1]


def _solve_factored(factor: Array, free: Array, b: Array, xp: Any) -> Array:
    """Solve L L^T x = b; x is 0 where a row is not `free`, (..., S, 1)."""
    y = _substitute(factor, free, b, xp)
    turned = reverse(reverse(xp.matrix_transpose(factor), -1), -2)
    return reverse(_substitute(turned, reverse(free, -2), reverse(y, -2), xp), -2)


def _invert_factor(a: Array, xp: Any) -> tuple[Array, Array]:
    """Invert the factor of `_factor_kernel`, with rows of 0 where that has columns of 0.

    Elimination of rows takes [a, 1] to [L^T, L^-1].
    """
    size = a.shape[-1]
    column = xp.reshape(xp.arange(2 * size, device=device(a)), (2, size))
    at = column[0, :]
    both = _with_identity(a[..., :, None, :], at[:, None, None], column, size, xp)
    both = xp.reshape(both, (*a.shape[:-1], 2 * size))
    for s in blocks(0, size, _ELIMINATED if is_cupy_array(a) else 1):
        rows = [both[..., i : i + 1, :] for i in range(s.start, s.stop)]
        # Of each number a matrix: the rows of the pivots and its own, likewise the columns.
        lines = [(*(x[..., i : i + 1] for i in range(s.start, s.stop)), x) for x in (*rows, both)]
        least = float(size * xp.finfo(a.dtype).eps)
        both = _eliminate_rows(
            *(x for line in lines for x in line), at[:, None], s.start, least, xp
        )
    inverse = both[..., size:]
    return inverse, _positive_on_diagonal(inverse, at[:, None], at, xp)


@fused
def _with_identity(a: Array, row: Array, column: Array, size: int, xp: Any) -> Array:
    return xp.where(column < size, a, xp.astype(column - size == row, a.dtype))


@fused
def _positive_on_diagonal(x: Array, row: Array, column: Array, xp: Any) -> Array:
    return xp.any((row == column) & (x > 0), axis=-1)


@fused
def _eliminate_rows(*arguments: Any) -> Array:
    """Eliminate rows in turn, the first number of each of which is a pivot."""
    *numbers, row, at, least, xp = arguments
    width = math.isqrt(len(numbers))
    lines = [numbers[i : i + width] for i in range(0, len(numbers), width)]
    result = numbers[-1]
    while len(lines) > 1:
        (pivot, *line), *lines = lines
        root = xp.sqrt(xp.where(pivot > least, pivot, math.inf))
        line = [x / root for x in line]
        result = xp.where(row == at, line[-1], result)
        lines = [[x - y / root * z for x, z in zip(xs, line, strict=True)] for y, *xs in lines]
        at = at + 1
    return xp.where(row >= at, lines[0][0], result)


@primitive
def _solve_by_inverse(a: Array, inverse: Array, b: Array, xp: Any) -> Array:
    """Solve a x = b by the inverse of a factor of a; x is 0 where that has rows of 0."""
    return xp.matrix_transpose(inverse) @ (inverse @ b)


@_solve_by_inverse.pullback
def _pull_solution(
    x: Array, g: Array, *, a: Array, inverse: Array, b: Array, xp: Any
) -> dict[str, Array]:
    """Return the cotangents a^-1 g of b, and -a^-1 g x^T of a."""
    of_b = _solve_by_inverse(a, inverse, g, xp)
    of_a = multiply(-of_b, xp.matrix_transpose(x))
    return {"a": sum_to(of_a, a.shape), "b": sum_to(of_b, b.shape)}


def _substitute(lower: Array, free: Array, b: Array, xp: Any) -> Array:
    """Solve L x = b row by row, with 0 in rows that are not `free`, (..., S, 1)."""
    shape = (*broadcast_lead(lower, b), *b.shape[-2:])
    x, heads = xp.zeros(shape, dtype=b.dtype, device=device(b)), (WHOLE,) * (len(shape) - 2)
    each = xp.where(free, _diagonal(lower, xp)[..., None], math.inf)
    for s in range(lower.shape[-1]):
        row = b[..., s : s + 1, :] - lower[..., s : s + 1, :s] @ x[..., :s, :]
        x = put(x, (*heads, slice(s, s + 1), WHOLE), row / each[..., s : s + 1, :])
    return x


@as_written
def sampled_key_attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    *,
    indices: Any,
    log_probability: Any = None,
    scale: float | None = None,
    mask: Array | None = None,
) -> ArrayT:
    r"""Attend to a sample of the keys, each weighted by the inverse of its sampling probability.

    .. math::
        \mathrm{out}_i = \frac{\sum_{j \in J_i} e^{q_i \cdot k_j} v_j / p_{ij}}
                              {\sum_{j \in J_i} e^{q_i \cdot k_j} / p_{ij}}

    Both sums are unbiased. Their ratio is not, unless p_ij is a multiple of e^(q_i . k_j): for S
    independent keys from pi_i, the softmax itself, it is unbiased, with variance Var_pi(v) / S.
    `theory.sampled_keys_law` computes bias and variance. Sampling by hashing (MagicPIG,
    HyperAttention) and by kernel densities (KDEformer) has this form, with other distributions;
    `key_sampling.draw_keys` draws from some of these distributions. A causal mask hides later keys
    of a sample, but p_ij belongs to draws from all keys. So there is no decoding state: a new key
    changes all draws.

    Parameters
    ----------
    q, k, v
        As in `attend`: shapes (..., n, d), (..., m, d), (..., m, d_v), all float32 or float64.
    indices : array of integers, shape (..., S) or (..., n, S)
        Which keys are in the sample: the same for all queries, or a sample for each query if there
        is one more axis. A key may appear several times. All must be from 0 to m - 1. This is
        checked except in Dask and while JAX traces; the result of any other index is undefined.
    log_probability : array, shape of `indices`, optional
        log p, where p is the expected number of times that a key is in the sample: the inclusion
        probability if no key appears twice. By default p is the same for all keys.
    scale, mask
        As in `softmax_attention`.

    Returns
    -------
    array, shape (..., n, d_v)
        Same namespace, dtype and device as `q`. Rows that see no key of the sample are 0.

    Raises
    ------
    TypeError
        As in `attend`, and if `indices` are not integers.
    ValueError
        As in `attend`; if shapes of `indices` or `log_probability` do not fit, or if an index is
        out of range.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import sampled_key_attention
    >>> q, k, v = np.zeros((1, 1)), np.zeros((3, 1)), np.array([[0.0], [1.0], [5.0]])
    >>> sampled_key_attention(q, k, v, indices=np.array([0, 2]), log_probability=np.log([0.25, 1]))
    array([[1.]])
    """
    inputs = prepare_samples(q, k, v, indices, log_probability, scale, mask)
    return inputs.ungroup(attend_samples(inputs).out)


class KeysOfQueries(NamedTuple):
    """Some queries, and the keys that their one sample (..., 1, S) is drawn from."""

    q: Array
    k: Array
    v: Array
    mask: Array | None  # (..., 1, m), or (..., n, m) if each query is to have a row of its own
    indices: Array
    log_p: Array
    scale: Any
    xp: Any  # the array namespace

    def taken(self) -> tuple[Array, Array, Scores]:
        """Take keys and values of the sample; return them, and how to attend to them."""
        at, mask, xp = self.indices[..., 0, :], self.mask, self.xp
        if mask is not None:
            mask = xp.matrix_transpose(take_rows(xp.matrix_transpose(mask), at, xp))
        k, v = take_rows(self.k, at, xp), take_rows(self.v, at, xp)
        return k, v, Scores(self.scale, -self.log_p, mask)

    def attend(self) -> Attended:
        """Attend to the keys of the sample."""
        return attend(self.q, *self.taken())


class SampledKeyInputs(NamedTuple):
    """Checked arguments of `sampled_key_attention`, heads in groups."""

    sample: KeysOfQueries  # its indices may be (..., n, S)
    lead: tuple[int, ...]  # the axes before those of queries
    ungroup: Callable[..., Array]

    @property
    def shared(self) -> bool:
        """Say whether all queries have one sample, of which they see the same keys."""
        mask = self.sample.mask
        return self.sample.indices.shape[-2] == 1 and (mask is None or mask.shape[-2] == 1)

    def each(self, at_least: int = 1) -> Iterator[tuple[tuple[slice, ...], KeysOfQueries]]:
        """Yield which queries, and with an axis for each of them their samples, some at once."""
        q, k, v, mask, indices, log_p, scale, xp = self.sample
        size = max(1, indices.shape[-1] * (q.shape[-1] + v.shape[-1]))
        most = max(at_least, room(q) // size)
        for box in tiles((*self.lead, q.shape[-2]), most):
            rows = (*box, WHOLE)
            k_h, v_h = (some_heads(x, box[:-1])[..., None, :, :] for x in (k, v))
            seen = None if mask is None else part(mask, rows)[..., None, :]
            at, of_at = (part(x, rows)[..., None, :] for x in (indices, log_p))
            q_i = part(q, rows)[..., None, :]
            yield box, KeysOfQueries(q_i, k_h, v_h, seen, at, of_at, scale, xp)


def prepare_samples(
    q: Array, k: Array, v: Array, indices: Any, log_probability: Any, scale: Any, mask: Any
) -> SampledKeyInputs:
    """Check arguments of `sampled_key_attention`, and group heads."""
    xp, _ = qkv.check(q, k, v, mask=mask)
    indices, log_p = key_samples.check_samples(indices, log_probability, q, k, v)
    scale = checks.real("scale", scale, optional=True, like=q)
    mask = qkv.key_rows(mask, k)
    more = (mask, indices, log_p)
    (q, k, v, mask, indices, log_p), lead, ungroup = group_with_lead(q, k, v, *more)
    scale = constant(q.shape[-1], q) ** -0.5 if scale is None else scale
    keys = KeysOfQueries(q, k, v, mask, indices, log_p, scale, xp)
    return SampledKeyInputs(keys, lead, ungroup)


@retraced
def _attend_sample(sample: KeysOfQueries) -> Attended:
    return sample.attend()


@as_written
def attend_samples(inputs: SampledKeyInputs) -> Attended:
    """Attend to samples, all at once where they are shared."""
    if inputs.shared:
        return inputs.sample.attend()
    q, v = inputs.sample.q, inputs.sample.v
    out, lse = buffers(q, v, inputs.lead, inputs.sample.xp)
    # Of a tape, as many places at once as there are keys: sums over these take no more time.
    most = -(-inputs.sample.k.shape[-2] // max(1, inputs.sample.indices.shape[-1]))
    for box, sample in inputs.each(most if isinstance(q, Traced) else 1):
        done = _attend_sample(sample)
        out = put(out, (*box, WHOLE), done.out[..., 0, :])
        lse = put(lse, box, done.lse[..., 0])
    return Attended(out, lse)
