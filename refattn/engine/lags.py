r"""Attention that is linear in features, with a bias by lag: weights times :math:`e^{b_{j-i}}`.

Queries share no state of the keys then. Tokens are cut into halves, and these again, down to
leaves, whose pairs are evaluated one by one. Each query of a later half sees all keys of the
earlier one. The sums over such a tile are those of its pairs again or, if that takes longer,
Toeplitz products by FFT, of every feature with every column of the values:

.. math::
    \sum_s \phi_{is} \sum_j e^{b_{j-i}} \, \psi_{js} \, [v_j, 1].

The rounding error of an FFT is relative to the largest term of all rows, not of each. So a straight
line in the lag, a factor of queries times one of keys, is taken from the bias first. If what is
left of it has a range of r in a tile, the sum of the absolute terms of each row is at least
:math:`e^{-r}` times that of any other, whatever the keys are, and the error relative to it is
about :math:`\mathrm{eps} \, e^r \sqrt{\log_2 n}`; float32 is transformed in float64. On NumPy,
tiles that would lose too many digits are evaluated pair by pair.

Choromanski et al., arXiv:2107.07999, and Luo et al., arXiv:2106.12566, make one transform of all
tokens, in which later keys round the results of earlier queries.
"""

from __future__ import annotations

import math
from functools import partial, reduce
from typing import Any, NamedTuple

import numpy as np

from ..arrays.arithmetic import (
    add,
    finite,
    multiply,
    sum_of_products,
    sum_of_visible,
    times,
    with_ones,
)
from ..arrays.blocks import (
    WHOLE,
    block_shape,
    blocks,
    buffers,
    put,
    room,
    some_heads,
    sum_to,
    tiles,
)
from ..arrays.library import (
    Array,
    as_written,
    device,
    has_fft,
    host_dtype,
    is_numpy_array,
    reverse,
    traced_once,
    untraced,
    widest,
)
from ..numbers.primitives import primitive, retraced
from ..numbers.tape import fixed
from .attend import Sums, combine, normalise, split_ones, sum_scores
from .causal import leaves
from .halves import log_kernel, log_of_all
from .hops import Keys, concatenate
from .positive import Positive
from .scores import causal_mask
from .signed import Signed, weights_at_base

_LEAF_TOKENS, _TRACED_TOKENS = 128, 512  # of a leaf; JAX compiles each leaf by itself
# Nanoseconds of a core: for a pair, for a pair and one feature or column, and for a number of two
# transforms and one halving of its length. They choose between two ways to the same sums.
_PAIR, _PRODUCT, _HALVING = 15.0, 0.12, 6.0
_WORST = 16.0  # the constant C of the accuracy contract: as many eps a transform may lose on NumPy


class Terms(NamedTuple):
    """Features of tokens, values times e^log."""

    values: Array | None  # (..., n, S); None if all are 1
    log: Array  # (..., n, S), or (..., n, 1) if the features of a token have one scale

    def part(self, tokens: slice) -> Terms:
        """Take some tokens."""
        return Terms(*(None if x is None else x[..., tokens, :] for x in self))


class _Tile(NamedTuple):
    """Queries and keys, with the biases of all their lags."""

    q: Terms
    k: Terms
    v: Array  # (..., m, d_v)
    bias: Array  # (..., 1, n + m - 1)
    most: int  # keys that a query may see, of this tile and others

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of queries and keys."""
        return self.q.log.shape[-2], self.k.log.shape[-2]

    def part(self, i: slice, j: slice) -> _Tile:
        """Take some queries and keys."""
        lags = slice(self.shape[0] - i.stop + j.start, self.shape[0] - 1 - i.start + j.stop)
        bias = self.bias[..., lags]
        return _Tile(self.q.part(i), self.k.part(j), self.v[..., j, :], bias, self.most)


@as_written
def attend_by_lags(
    q: Array, keys: Keys, bias: Array, features: Positive | Signed, causal: bool, xp: Any
) -> Array:
    """Attend with trusted arguments: a bias (..., 1, n + m - 1), a mask of keys (..., 1, m)."""
    lead, (n, m) = keys.lead(q, bias, *features.arrays), (q.shape[-2], keys.k.shape[-2])
    if m == 0:
        return xp.zeros((*lead, n, keys.v.shape[-1]), dtype=q.dtype, device=device(q))
    out, _ = buffers(q, keys.v, lead, xp)
    rows, columns = block_shape(q, n, m)
    held = max(max(n, m) * features.width, min(n, rows) * min(m, columns))
    heads = max(1, room(q) // held) if features.splits else math.prod(lead)
    for head in tiles(lead, heads) if n else ():
        some = features.part(head)
        tile = _make_tile(some_heads(q, head), keys.part(head), some_heads(bias, head), some, xp)
        sums = _sum_pairs(tile, causal, xp)
        if isinstance(some, Signed):
            done = sums.total / xp.where(sums.base == -math.inf, 1.0, sums.mass)
        else:
            done = normalise(sums, xp).out
        out = put(out, (*head, WHOLE, WHOLE), done)
    return out


def _make_tile(q: Array, keys: Keys, bias: Array, features: Positive | Signed, xp: Any) -> _Tile:
    """Make the features of all tokens; nothing is left of keys that are hidden."""
    (k, v, mask, _), seen = keys, None
    if mask is not None:
        seen = xp.matrix_transpose(mask)
        k, v = xp.where(seen, k, 0.0), xp.where(seen, v, 0.0)
    if isinstance(features, Signed):
        of_q = Terms(features.queries(q, WHOLE).values, xp.zeros_like(q[..., :1]))
        of_k = Terms(*features.keys(Keys(k, v))[:2])
    else:
        omega = xp.matrix_transpose(features.samples.omega)
        of_q = Terms(None, add(multiply(q, omega), features.samples.log_weight))
        y = multiply(k, omega)
        of_k = Terms(None, y if keys.half is None else add(y, keys.bias(k)[..., None]))
    if seen is not None:
        of_k = of_k._replace(log=xp.where(seen, of_k.log, -math.inf))
    return _Tile(of_q, of_k, v, bias, k.shape[-2])


def _sum_pairs(tile: _Tile, causal: bool, xp: Any) -> Sums:
    """Sum over the keys that each query sees; the last query is level with the last key."""
    n, m = tile.shape
    level = min(n, m)
    square = tile.part(slice(n - level, n), slice(m - level, m))
    sums = _sum_earlier(square, xp)
    if not causal:  # keys after the own: earlier ones in the reverse order, without the own
        own = xp.arange(2 * level - 1, device=device(tile.bias)) == level - 1
        later = square._replace(bias=xp.where(own, -math.inf, square.bias))
        sums = combine(sums, _reversed(_sum_earlier(_reversed(later), xp)), xp)
    if m > n:
        return combine(sums, _sum_tile(tile.part(slice(0, n), slice(0, m - n)), xp), xp)
    if n > m:
        first = tile.part(slice(0, n - m), slice(0, m))
        sums = _stack_queries(_nothing(first, xp) if causal else _sum_tile(first, xp), sums, xp)
    return sums


def _reversed(x: Any) -> Any:
    """Reverse the order of tokens, and of lags."""
    if isinstance(x, _Tile):
        q, k, v = map(_reversed, x[:3])
        return _Tile(q, k, v, reverse(x.bias, -1), x.most)
    if isinstance(x, tuple):
        return type(x)(*map(_reversed, x))
    return None if x is None else reverse(x, -2)


def _stack_queries(early: Sums, late: Sums, xp: Any) -> Sums:
    """Put the sums of later queries after those of earlier ones."""
    return Sums(*(concatenate(x, y, -2, xp) for x, y in zip(early, late, strict=True)))


def _nothing(tile: _Tile, xp: Any) -> Sums:
    """Sum over no keys."""
    zero = xp.zeros((tile.shape[0], 1), dtype=tile.v.dtype, device=device(tile.v))
    return Sums(xp.broadcast_to(zero, (tile.shape[0], tile.v.shape[-1])), zero, zero - math.inf)


def _sum_earlier(tile: _Tile, xp: Any) -> Sums:
    """Sum over the keys up to each query's own, of as many queries as keys."""
    n, leaf = tile.shape[0], _TRACED_TOKENS if traced_once(untraced(tile.v)) else _LEAF_TOKENS
    if n <= leaf:
        return _sum_block(tile, xp, causal=True)
    half = leaf << ((n - 1) // leaf).bit_length() - 1
    return _sum_halves(tile, half, _sum_earlier, _sum_tile, xp)


def _sum_halves(tile: _Tile, half: int, of_own: Any, of_early: Any, xp: Any) -> Sums:
    """Sum over the keys up to each query's own: of its half, and of the one before it."""
    early, late = slice(0, half), slice(half, tile.shape[0])
    own = of_own(tile.part(late, late), xp)
    more = combine(own, of_early(tile.part(late, early), xp), xp)
    return _stack_queries(of_own(tile.part(early, early), xp), more, xp)


def _sum_tile(tile: _Tile, xp: Any) -> Sums:
    """Sum over all keys, by a transform or in blocks of pairs."""
    (n, m), like = tile.shape, untraced(tile.v)
    bias = untraced(tile.bias)
    if is_numpy_array(like) and np.all(bias == -math.inf):
        return _nothing(tile, xp)
    if (
        _pays(tile)
        and has_fft(like, untraced(xp))
        and (not is_numpy_array(like) or _is_straight(bias, like))
    ):
        return _sum_by_transform(tile, xp)
    rows, columns = block_shape(like, n, m)

    def of_rows(i: slice) -> Sums:
        parts = (_sum_block(tile.part(i, j), xp) for j in blocks(0, m, columns))
        return reduce(partial(combine, xp=xp), parts)

    return reduce(partial(_stack_queries, xp=xp), map(of_rows, blocks(0, n, rows)))


@retraced
def _sum_block(tile: _Tile, xp: Any, causal: bool = False) -> Sums:
    """Sum over pairs, evaluated one by one."""
    if causal or not is_numpy_array(untraced(tile.v)):
        return _sum_logs(tile, causal, xp)
    (n, m), factors = tile.shape, _evaluate_factors(tile, xp.zeros_like(tile.bias[..., :1]), xp)
    weights = multiply(factors.phi, xp.matrix_transpose(factors.psi))
    bounded = _are_bounded(tile, factors, weights)
    weights = times(weights, _of_pairs(factors.by_lag, n, m, xp))
    sums = split_ones(sum_of_products(weights, with_ones(tile.v, xp)), factors.base)
    return sums if bounded.all() else _choose_sums(bounded, sums, _sum_logs(tile, False, xp), xp)


def _choose_sums(some: Array, a: Sums, b: Sums, xp: Any) -> Sums:
    """Take some queries from one and the others from another: each is as if it were alone."""
    return Sums(*(xp.where(some, x, y) for x, y in zip(a, b, strict=True)))


def _sum_logs(tile: _Tile, causal: bool, xp: Any) -> Sums:
    """Sum over pairs whose weights have a base of each query."""
    (q, k, v, bias, most), (n, m), width = tile, tile.shape, tile.k.log.shape[-1]
    bias = _of_pairs(bias, n, m, xp)
    seen = xp.any(k.log != -math.inf, axis=-1)[..., None, :]
    if causal:
        seen = seen & causal_mask(slice(0, n), slice(0, m), 0, device(v), xp)
    visible = seen & (bias != -math.inf)
    if q.values is not None:
        weights = multiply(q.values, xp.matrix_transpose(k.values))
        log = xp.where(visible, xp.matrix_transpose(k.log) + bias, -math.inf)
        base = xp.max(fixed(log), axis=-1, keepdims=True)
        weights = weights_at_base(weights, visible, log, base, xp)
        return split_ones(sum_of_visible(weights, with_ones(v, xp), visible, xp, signed=True), base)
    # A nan is in the weights of its key alone: others keep their bases.
    known = k.log < math.inf
    y = xp.where(known, k.log, -math.inf)
    if causal:
        shape = (1, 1 << (n - 1).bit_length())
        log = log_kernel(leaves(q.log, shape, xp), leaves(y, shape, xp), None, xp)
        log = log[..., 0, :n, :n]
    else:
        log = log_of_all(q.log, y, xp)
    log = xp.where(xp.all(known, axis=-1)[..., None, :], log, math.nan)
    plain = [untraced(x) for x in (log, bias, seen)]
    sums = sum_scores(log + bias, v, visible, most, xp)
    if not is_numpy_array(plain[0]) or m == 1:
        return sums
    lost = _are_lost(width, *plain)
    if not lost.any():
        return sums
    if causal:
        parts = _sum_halves(tile, m // 2, partial(_sum_block, causal=True), _sum_block, xp)
    else:
        halves = (tile.part(slice(0, n), j) for j in (slice(0, m // 2), slice(m // 2, m)))
        parts = reduce(partial(combine, xp=xp), (_sum_block(x, xp) for x in halves))
    return _choose_sums(lost, parts, sums, xp)


def _are_lost(width: int, log: Array, bias: Array, seen: Array) -> Array:
    """Say where a kernel below the smallest number may count, since its bias is large: on NumPy.

    Beside fewer keys it is not as small, and alone it is 1.
    """
    limits = np.finfo(log.dtype)
    small = float(np.log(limits.smallest_normal / limits.eps)) + 2 * math.log(width)
    least = np.fmax.reduce(np.where(seen, log, -math.inf), axis=-1, keepdims=True) + small
    lost = seen & (log < least)
    most = np.max(np.where(seen & ~lost, log + bias, -math.inf), axis=-1, keepdims=True)
    counts = least + bias > most + math.log(limits.eps / log.shape[-1])
    return np.any(lost & counts, axis=-1, keepdims=True)


class _Factors(NamedTuple):
    """What the weights of a tile are products of, all at most 1, times e^base."""

    phi: Array  # (..., n, S)
    psi: Array  # (..., m, S)
    by_lag: Array  # (..., 1, n + m - 1)
    base: Array  # (..., n, 1)


def _evaluate_factors(tile: _Tile, slope: Array, xp: Any) -> _Factors:
    """Evaluate the factors, less a line in the bias. All bases are constants, which cancel."""
    (q, k, v, bias, most), (n, m) = tile, tile.shape
    lag, row, key = (xp.arange(x, dtype=v.dtype, device=device(v)) for x in (n + m - 1, n, m))
    rest = bias - slope * lag
    top = xp.max(fixed(rest), axis=-1, keepdims=True)
    log_k = k.log + slope * key[:, None]
    base = xp.max(fixed(log_k), axis=-2, keepdims=True)
    log_q = q.log + base + top + slope * (n - 1 - row)[:, None]
    of_row = xp.max(fixed(log_q), axis=-1, keepdims=True)
    phi, psi = xp.exp(log_q - finite(of_row, xp)), xp.exp(log_k - finite(base, xp))
    if q.values is not None:
        phi, psi = phi * q.values, psi * k.values
    small = 2.0 * most * psi.shape[-1]  # sums of the largest values stay finite
    return _Factors(phi / small, psi, xp.exp(rest - finite(top, xp)), of_row + math.log(small))


def _are_bounded(tile: _Tile, factors: _Factors, weights: Array) -> Array:
    """Say for which queries no weight has lost digits below the smallest number, on NumPy."""
    weights, by_lag, log = (untraced(x) for x in (weights, factors.by_lag, tile.k.log))
    least = np.sqrt(np.sqrt(np.finfo(by_lag.dtype).smallest_normal))
    if tile.k.values is not None:  # of which small products are no loss
        weights = np.exp(np.min(log, axis=-2, keepdims=True) - np.max(log, axis=-2, keepdims=True))
    of_rows = np.min(weights, axis=-1, keepdims=True) >= least  # not if there is a nan
    return of_rows & (np.min(by_lag, axis=-1, keepdims=True) >= least)


def _of_pairs(bias: Array, n: int, m: int, xp: Any) -> Array:
    """Spread a bias by lag, (..., 1, n + m - 1), to pairs, (..., n, m)."""
    # In a circle of n + m numbers, of which each row takes one step less than a round.
    circle = xp.concat([bias[..., n - 1 :], bias[..., :1], bias[..., : n - 1]], axis=-1)
    rounds = xp.broadcast_to(circle, (*bias.shape[:-2], n, n + m))
    flat = xp.reshape(rounds, (*bias.shape[:-2], n * (n + m)))[..., : n * (n + m - 1)]
    return xp.reshape(flat, (*bias.shape[:-2], n, n + m - 1))[..., :m]


def _pays(tile: _Tile) -> bool:
    """Say whether a transform takes less time than pairs."""
    (n, m), w = tile.shape, tile.v.shape[-1] + 1
    size = (tile.k.log if tile.k.values is None else tile.k.values).shape[-1]
    halvings = size * w * (n + m) * math.log2(n + m)
    return bool(halvings * _HALVING < n * m * ((size + w) * _PRODUCT + _PAIR))


def _take_line(bias: Array, xp: Any) -> tuple[Array, Array]:
    """Find the slope of a line from end to end of a bias, and the rest."""
    count = bias.shape[-1]
    place = xp.arange(count, dtype=bias.dtype, device=device(bias))
    first, last = bias[..., :1], bias[..., -1:]
    slope = (last - first) / (count - 1)
    # Above a bias that falls ever faster it would lie far above all of it: then there is none.
    most = xp.maximum(first, last) + xp.max(bias - slope * place, axis=-1, keepdims=True) - first
    steep = most > xp.max(bias, axis=-1, keepdims=True) + math.log(_WORST)
    slope = xp.where(steep | ~xp.isfinite(slope), 0.0, slope)
    return slope, bias - slope * place


def _is_straight(bias: Array, like: Array) -> bool:
    """Say whether digits are left after a transform, on NumPy."""
    rest = float(np.max(np.ptp(_take_line(bias, np)[1], axis=-1)))
    digits = np.finfo(like.dtype).eps / np.finfo(host_dtype(like)).eps  # which float64 has more
    return bool(rest <= math.log(_WORST * float(digits)))


@retraced
def _sum_by_transform(tile: _Tile, xp: Any) -> Sums:
    """Sum over all keys by Toeplitz products, of a few features at a time."""
    (n, m), ones, total = tile.shape, with_ones(tile.v, xp), None
    phi, psi, by_lag, base = _evaluate_factors(tile, _take_line(fixed(tile.bias), xp)[0], xp)
    few = max(1, room(untraced(ones)) // (ones.shape[-1] * (n + m)))
    for s in blocks(0, psi.shape[-1], few):
        more = _sum_by_lag(by_lag, phi[..., s], psi[..., s], ones, xp)
        total = more if total is None else total + more
    return split_ones(total, base)


@retraced
def _sum_by_lag(by_lag: Array, phi: Array, psi: Array, v: Array, xp: Any) -> Array:
    """Sum products of some features and the values, (..., n, w)."""
    phi, psi, v = (xp.matrix_transpose(x) for x in (phi, psi, v))
    sums = toeplitz(by_lag[..., None, :], psi[..., :, None, :] * v[..., None, :, :], xp)
    return xp.matrix_transpose(xp.sum(phi[..., :, None, :] * sums, axis=-3))


@primitive
def toeplitz(by_lag: Array, x: Array, xp: Any) -> Array:
    """Sum t_(n - 1 + j - i) x_j over j, for t (..., n + m - 1) and x (..., m): (..., n)."""
    m = x.shape[-1]
    return _convolve(reverse(by_lag, -1), x, slice(m - 1, by_lag.shape[-1]), xp)


@toeplitz.pullback
def _pull_toeplitz(sums: Array, g: Array, by_lag: Array, x: Array, xp: Any) -> dict[str, Array]:
    """Multiply by the transposed matrix, and sum products of each lag."""
    lags = _convolve(reverse(g, -1), x, slice(0, by_lag.shape[-1]), xp)
    d_x = toeplitz(reverse(by_lag, -1), g, xp)
    return {"by_lag": sum_to(lags, by_lag.shape), "x": sum_to(d_x, x.shape)}


def _convolve(x: Array, y: Array, some: slice, xp: Any) -> Array:
    """Convolve in a circle that is long enough for the results wanted, which end at `some.stop`."""
    from scipy.fft import next_fast_len  # with the first long sequence

    dtype, wide, length = x.dtype, widest(x, xp), next_fast_len(int(some.stop), True)
    x, y = (xp.fft.rfft(xp.astype(z, wide, copy=False), n=length) for z in (x, y))
    return xp.astype(xp.fft.irfft(x * y, n=length)[..., some], dtype, copy=False)
