r"""The law and the bound of the rounding errors of softmax attention, for some queries of a head.

A kernel multiplies each weight :math:`e_{ij}` by :math:`e^{\delta_{ij}}`, with the errors of the
score and of the exponential, and adds :math:`\eta_{ij}` where it rounds the weight to a narrow
type before the second product. With :math:`p_{ij} = e_{ij} / \sum_j e_{ij}`, to first order,

.. math:: \delta \mathrm{out}_{ic} = \sum_j p_{ij} \, \delta_{ij} (v_{jc} - \mathrm{out}_{ic})
    + \sum_j \eta_{ij} v_{jc} + \text{sums} + \text{the rounding of the result}.

A rounding to nearest moves a number by at most half of the distance of its neighbours h, and by
h / sqrt(12) in root mean square where nothing ties it to h. Where a number is not known that well,
and for its leading digits the law of Benford is taken, that is `RMS` units.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from . import _kernel
from ._blocks import blocks
from ._formats import Format

__all__ = ["RMS", "SURE", "WORST", "Head", "Kernel", "Rows", "Tile", "analyse", "tiles", "walk"]

_Floats = npt.NDArray[np.float64]

# Mean square of (h / sqrt(12)) / (u x) = 2^(1 - f) / sqrt(12) for x = 2^f, f uniform on [0, 1].
RMS = math.sqrt(1 / (8 * math.log(2)))
WORST = 1 / math.sqrt(3) / RMS  # for the least favourable digits, 1.00...
_KEYS = 64  # of a tile: as far apart are the running sums that are known
_BIAS = 1 / 16  # of the largest error of an exponential, that its errors have in common
_TRIFLE = 2.0**10  # what is so much smaller need not be known to be exact
_WIDTH = 8  # coordinates between running sums of q . k that are known, if they matter
SURE = 5.0  # standard deviations beyond which roundings are tied to each other


class Kernel(NamedTuple):
    """What a kernel rounds, in formats: `Profile` for a storage type."""

    scores: Format | None
    weights: Format | None
    softmax: Format
    accumulate: Format
    out: Format | None
    lanes: int
    normalised: bool
    run: int
    states: Format | None  # sums over keys, that queries read
    exp: float  # largest error of an exponential, which may have a sign, in units of the sums

    @property
    def fine(self) -> bool:
        """Whether nothing but sums and elementary functions is rounded."""
        return self.scores is None and self.weights is None

    @property
    def scores_matter(self) -> bool:
        """Whether the errors of scores and sums are more than a trifle beside those of weights."""
        if self.weights is None or self.scores is not None:
            return True
        return max(self.accumulate.unit, self.softmax.unit) * _TRIFLE > self.weights.unit


class Head(NamedTuple):
    """Softmax attention of one head, in float64."""

    q: _Floats
    k: _Floats
    v: _Floats
    scale: float
    bias: _Floats | None
    mask: npt.NDArray[np.bool_] | None
    causal: bool
    window: tuple[int | None, int | None]
    softcap: float | None

    def visible(self, i: slice, j: slice) -> npt.NDArray[np.bool_] | None:
        """Which keys the queries see; None for all."""
        seen = None if self.mask is None else np.asarray(self.mask[i, j])
        left, right = self.window
        if self.causal:
            right = 0 if right is None else min(right, 0)
        limits: list[npt.NDArray[np.bool_]] = []
        if left is not None:
            limits.append(self.ahead(i, j) >= -left)
        if right is not None:
            limits.append(self.ahead(i, j) <= right)
        for near in limits:
            seen = near if seen is None else seen & near
        return seen

    def ahead(self, i: slice, j: slice) -> npt.NDArray[np.int64]:
        """How far keys are ahead of queries, j - (i + m - n)."""
        shift = self.k.shape[0] - self.q.shape[0]
        found: npt.NDArray[np.int64] = (
            np.arange(j.start, j.stop) - np.arange(i.start + shift, i.stop + shift)[:, None]
        )
        return found


class Tile(NamedTuple):
    """Scores of some queries and keys, with what they are made of."""

    keys: slice
    visible: npt.NDArray[np.bool_] | None
    products: _Floats  # q . k
    logits: _Floats  # times the scale
    capped: _Floats
    scores: _Floats
    slope: _Floats | float  # of the cap


class Rows(NamedTuple):
    """What is known of some queries.

    Attributes
    ----------
    out, lse, top : arrays, (b, d_v), (b,) and (b,)
        The exact result, and the largest score.
    nearest : array, (b, d_v)
        The result where every rounding of the profile but those of sums is to nearest.
    std : array, (b, d_v)
        Standard deviation of the error; infinite where its law is not known.
    worst : array, (b, d_v)
        The same at the least favourable leading digits: the error is sub-Gaussian with it.
    bound : array, (b, d_v)
        What no error exceeds.
    lse_std, lse_bound : arrays, (b,)
        Of the log normaliser, before it is rounded itself.
    lse_slack : float
        How much of that may be the same for all.
    spacing : array, (b, d_v)
        Distance of the numbers that the result may be rounded to; 0 if it is not rounded.
    slack : array, (b, d_v)
        How much of the error may be the same for all, by the exponentials.
    tangents : dict of arrays, (b, d_v)
        Derivative of the result with respect to a change of the scores.
    """

    out: _Floats
    lse: _Floats
    top: _Floats
    nearest: _Floats
    std: _Floats
    worst: _Floats
    bound: _Floats
    lse_std: _Floats
    lse_bound: _Floats
    lse_slack: float
    spacing: _Floats
    slack: _Floats
    tangents: dict[str, _Floats]


def tiles(head: Head, i: slice, size: int = _KEYS) -> Iterator[Tile]:
    """Scores of the queries i with all keys."""
    for j in blocks(0, head.k.shape[0], size):
        visible = head.visible(i, j)
        if visible is not None and not visible.any():
            continue
        products = head.q[i] @ head.k[j].T
        yield _tile(head, i, j, visible, products)


def _tile(
    head: Head,
    i: slice,
    j: slice,
    visible: npt.NDArray[np.bool_] | None,
    products: _Floats,
    to: Callable[[_Floats], _Floats] = lambda x: x,
) -> Tile:
    """The steps from q . k to scores, each result passed through `to`."""
    products = to(products)
    logits = to(head.scale * products)
    capped: _Floats = logits
    slope: _Floats | float = 1.0
    if head.softcap is not None:
        ratio = np.tanh(logits / head.softcap)
        capped, slope = to(head.softcap * ratio), 1 - ratio * ratio
    scores = capped if head.bias is None else to(capped + head.bias[i, j])
    return Tile(j, visible, products, logits, capped, scores, slope)


class _First(NamedTuple):
    """Sums over the keys of a profile's own weights, and the largest score."""

    out: _Floats
    lse: _Floats
    top: _Floats


def _attend(head: Head, i: slice, to: Callable[[_Floats], _Floats] | None) -> _First:
    """Attention with scores that are exact, or rounded by `to`."""
    m, rows = head.k.shape[0], i.stop - i.start
    zero = np.zeros((1, 1))
    total, top = _kernel.Sums(zero, zero, zero - math.inf), np.full(rows, -math.inf)
    for tile in tiles(head, i, 16 * _KEYS):
        if to is not None:
            tile = _tile(head, i, tile.keys, tile.visible, tile.products, to)
        scores = np.array(np.broadcast_to(tile.scores, (rows, tile.scores.shape[-1])))
        seen = scores if tile.visible is None else np.where(tile.visible, scores, -math.inf)
        top = np.maximum(top, seen.max(-1))
        found = _kernel.sums(scores, head.v[tile.keys], tile.visible, m)
        total = _kernel.combine(total, found)
    out, lse = _kernel.normalise(total)
    shape = (rows, head.v.shape[-1])
    return _First(np.broadcast_to(out, shape), np.broadcast_to(lse, rows), top)


def _relative_variance(head: Head, kernel: Kernel, tile: Tile, i: slice, gap: _Floats) -> _Floats:
    """Variance of delta, of the scores and of the exponential."""
    unit, half = (RMS * kernel.accumulate.unit) ** 2, (RMS * kernel.softmax.unit) ** 2
    slope = np.square(tile.slope)
    found = unit * slope * (head.scale**2 * _running_products(head, kernel, tile, i)
                            + np.square(tile.logits))  # fmt: skip
    if head.bias is not None:
        found += unit * np.square(tile.scores)
    found += half * np.square(gap)
    found += (kernel.exp * kernel.accumulate.unit / 2) ** 2 * (gap < 0)
    if kernel.scores is not None:
        for number, factor in _rounded(head, tile, tile.slope):
            found += np.square(factor * kernel.scores.spacing(number)) / 12
    if kernel.softmax.unit > kernel.accumulate.unit:
        weight = np.exp(gap)
        found += np.square(kernel.softmax.spacing(weight) / weight) / 12 * (gap < 0)
    return np.asarray(found)


def _rounded(
    head: Head, tile: Tile, slope: _Floats | float
) -> Iterator[tuple[_Floats, _Floats | float]]:
    """What is rounded on the way to the scores, and the derivative of the score to it."""
    if abs(math.frexp(head.scale)[0]) != 0.5:  # by a power of two nothing is rounded
        yield tile.products, head.scale * slope
    yield tile.logits, slope
    if head.softcap is not None:
        yield tile.capped, 1.0
    if head.bias is not None:
        yield tile.scores, 1.0


def _running_products(head: Head, kernel: Kernel, tile: Tile, i: slice) -> _Floats:
    """Sum of the squares of the running sums of q . k."""
    d = head.q.shape[-1]
    if not kernel.scores_matter:
        return np.asarray(np.square(_norms(head, tile, i)) * d)
    width = _WIDTH if kernel.fine else d
    q, k = head.q[i], head.k[tile.keys]
    found = np.zeros((q.shape[0], k.shape[0]))
    first = np.zeros_like(found)
    for at in blocks(0, d, width):
        x, y = q[:, at], k[:, at]
        last = first + x @ y.T if width < d else tile.products
        found += walk(first, last, np.square(x) @ np.square(y).T, x.shape[-1], kernel.lanes)
        first = last
    return found


def _norms(head: Head, tile: Tile, i: slice) -> _Floats:
    """Norms of queries times norms of keys."""
    q, k = (np.sqrt(np.sum(np.square(x), -1)) for x in (head.q[i], head.k[tile.keys]))
    found: _Floats = q[:, None] * k
    return found


def walk(first: Any, last: Any, squares: Any, steps: int, lanes: int) -> Any:
    r"""Expected sum of squares of the running sums between two of them.

    Terms of which the sum of squares is known, in random order: the running sums are a line and a
    bridge, :math:`E S_t^2 = (a + t (b - a) / n)^2 + t (n - t) / (n (n - 1)) (Q - (b - a)^2 / n)`.
    With lanes, each holds a share.
    """
    rise = last - first
    line = (
        steps * first * (first + rise)
        + first * rise
        + rise * rise * ((steps + 1) * (2 * steps + 1) / (6 * steps))
    )
    bridge = np.maximum(squares - rise * rise / steps, 0.0) * (steps + 1) / 6
    return line / lanes**2 + bridge / lanes


def analyse(
    head: Head,
    kernel: Kernel,
    i: slice,
    changes: Mapping[str, Callable[[Head, Tile, slice], Any]] = MappingProxyType({}),
) -> Rows:
    """Say what a kernel that rounds like this may give for the queries i."""
    exact = _attend(head, i, None)
    own = exact if kernel.scores is None else _attend(head, i, kernel.scores.round)
    rows, d_v = exact.out.shape
    law = _Law(rows, d_v, head.k.shape[0], kernel)
    steep = {name: np.zeros((rows, d_v + 1)) for name in changes}
    nearest = np.zeros((rows, d_v))
    top, lse = (np.where(np.isfinite(x), x, 0.0)[:, None] for x in (exact.top, exact.lse))
    for tile in tiles(head, i):
        v = head.v[tile.keys]
        gap = np.minimum(tile.scores - top, 0.0)
        if tile.visible is not None:
            gap = np.where(tile.visible, gap, -math.inf)
        shares = np.exp(np.where(np.isneginf(gap), gap, tile.scores - lse))
        law.add(head, kernel, tile, i, gap, shares, v)
        nearest += _own_weights(head, kernel, tile, i, gap, shares, own) @ v
        with_ones = np.concatenate([v, np.ones((v.shape[0], 1))], -1)
        for name, change in changes.items():
            steep[name] += (shares * change(head, tile, i)) @ with_ones
    variance, least_favourable, bound = law.result(head, kernel, exact.out)
    std, worst = np.sqrt(variance), np.sqrt(least_favourable)
    tangents = {name: x[:, :-1] - x[:, -1:] * exact.out for name, x in steep.items()}
    loose = np.abs(nearest - exact.out) > SURE * std
    spacing = np.zeros_like(exact.out)
    if kernel.out is not None:
        spacing = kernel.out.spacing(exact.out)
        rounding = np.square(spacing) / 12
        std, worst = np.sqrt(variance + rounding), np.sqrt(least_favourable + rounding)
        bound = bound + kernel.out.spacing(np.abs(exact.out) + bound) / 2
        nearest = kernel.out.round(nearest)
        bound = np.where(np.abs(exact.out) + bound > kernel.out.largest, math.inf, bound)
    free = ~loose & (std > 0)
    std, worst = (np.where(free, x, math.inf) for x in (std, worst))
    lse_std, lse_bound = law.of_lse(head, kernel, exact.lse)
    slack = kernel.exp * kernel.accumulate.unit * law.common(exact.out)
    return Rows(
        exact.out,
        exact.lse,
        exact.top,
        nearest,
        std,
        worst,
        bound,
        lse_std,
        lse_bound,
        kernel.exp * kernel.accumulate.unit,
        spacing,
        slack,
        tangents,
    )


def _own_weights(
    head: Head,
    kernel: Kernel,
    tile: Tile,
    i: slice,
    gap: _Floats,
    shares: _Floats,
    own: _First,
) -> _Floats:
    """Weights over their sum, with the roundings of the profile to nearest."""
    if kernel.scores is not None:
        scores = _tile(head, i, tile.keys, None, tile.products, kernel.scores.round).scores
        top, lse = (np.where(np.isfinite(x), x, 0.0)[:, None] for x in (own.top, own.lse))
        gap = np.where(np.isneginf(gap), gap, scores - top)
        shares = np.exp(np.where(np.isneginf(gap), gap, scores - lse))
    if kernel.weights is None:
        return shares
    if kernel.normalised:
        return kernel.weights.round(shares)
    weights = np.exp(gap)
    return shares * (kernel.weights.round(weights) / np.where(weights > 0, weights, 1.0))


class _Law:
    """Sums over the keys that the variance and the bound are made of."""

    def __init__(self, rows: int, d_v: int, m: int, kernel: Kernel) -> None:
        self.scores = np.zeros((rows, 2 * d_v + 1))  # p^2 var(delta) times v^2, v and 1
        self.weights = np.zeros((rows, d_v))  # var(eta) v^2
        self.running = np.zeros((rows, d_v))  # squares of the running sums of p v
        self.run, self.runs, self.steps = np.zeros((rows, d_v)), np.zeros((rows, d_v)), 0
        self.relative = np.zeros(rows)  # p^2 var(delta)
        self.moved = np.zeros((rows, d_v))  # the largest errors of p, and of their sum, times |v|
        self.shift = np.zeros((rows, 1))  # p (e^epsilon - 1)
        self.least = np.zeros((rows, 1))  # the sum of the weights, at least
        self.sizes = np.zeros((rows, d_v))  # p |v|
        self.top = np.zeros((rows, d_v + 1))  # p |v| and p of the largest weights
        terms = min(m, kernel.run) / kernel.lanes + kernel.lanes + m / kernel.run + 2
        gamma = terms * kernel.accumulate.unit
        self.gamma = gamma / (1 - gamma) if gamma < 1 else math.inf

    def add(
        self,
        head: Head,
        kernel: Kernel,
        tile: Tile,
        i: slice,
        gap: _Floats,
        shares: _Floats,
        v: _Floats,
    ) -> None:
        """Add the keys of a tile."""
        finite = np.where(np.isneginf(gap), 0.0, gap)
        squares, sizes = v * v, np.abs(v)
        noise = shares * shares * _relative_variance(head, kernel, tile, i, finite)
        self.relative += np.sum(noise, -1)
        epsilon = _largest_error(head, kernel, tile, i, finite)
        with np.errstate(over="ignore", invalid="ignore"):
            most = np.where(shares > 0, shares * np.expm1(epsilon), 0.0)
            self.least += np.sum(shares * np.exp(-epsilon), -1, keepdims=True)
        self.shift += np.sum(most, -1, keepdims=True)
        self.sizes += shares @ sizes
        row, key = np.nonzero(gap == 0)
        top = shares[row, key, None]
        np.add.at(self.top, row, np.concatenate([top * sizes[key], top], -1))
        if kernel.weights is not None:
            step = _steps(kernel, gap, shares, 0.0)
            most = most + _steps(kernel, gap, shares, epsilon) / 2
            noise_of_weights = step * step / 12
            if not kernel.scores_matter:
                noise_of_weights += noise
            self.weights += noise_of_weights @ squares
        self.moved += most @ sizes
        if kernel.scores_matter:
            with_ones = np.concatenate([squares, v, np.ones((v.shape[0], 1))], -1)
            self.scores += noise @ with_ones
            steps, last = v.shape[0], self.run + shares @ v
            self.running += walk(self.run, last, (shares * shares) @ squares, steps, kernel.lanes)
            self.run, self.steps = last, self.steps + steps
            if self.steps >= kernel.run:
                self.close()

    def close(self) -> None:
        """End a run of the sum over the keys: it is added to those before."""
        self.runs += self.run
        self.running += np.square(self.runs)
        self.run, self.steps = np.zeros_like(self.run), 0

    def common(self, out: _Floats) -> _Floats:
        """What errors of exponentials of one sign add up to, over their size.

        That of e^0 is always the same, and of others it averages to `_BIAS` at most.
        """
        found: _Floats = _BIAS * (self.sizes + np.abs(out))
        return found + self.top[:, :-1] + np.abs(out) * self.top[:, -1:]

    def of_lse(self, head: Head, kernel: Kernel, lse: _Floats) -> tuple[_Floats, _Floats]:
        """Standard deviation and bound of the log normaliser."""
        m, unit = head.k.shape[0], kernel.accumulate.unit
        size = np.where(np.isfinite(lse), np.abs(lse), 0.0) + 1
        std = np.sqrt(self.relative + (RMS * unit) ** 2 * (m / 3 + 2 * size * size))
        spread = self.shift[:, 0] / np.where(self.least > 0, self.least, 1.0)[:, 0]
        return std, np.log1p(spread) + (m + 4) * unit + 4 * unit * size

    def result(self, head: Head, kernel: Kernel, out: _Floats) -> tuple[_Floats, _Floats, _Floats]:
        """Variance, that at the least favourable digits, and bound, but for the last rounding."""
        if self.steps:
            self.close()
        unit, half, d_v = kernel.accumulate.unit, kernel.softmax.unit, out.shape[-1]
        squares, first, zeroth = np.split(self.scores, [d_v, 2 * d_v], -1)
        scores = np.maximum(squares - 2 * out * first + out * out * zeroth, 0.0)
        running = self.running if kernel.scores_matter else out * out * head.k.shape[0]
        sums = (RMS * unit) ** 2 * (running + out * out) + (RMS * half * out) ** 2
        variance = scores + self.weights + sums
        known = self.weights if kernel.scores is None else scores + self.weights
        worst = known + WORST**2 * (variance - known)
        least = np.where(self.least > 0, self.least, 1.0)
        error = self.moved + self.gamma * (self.sizes + self.moved)
        bound = (error * (1 + self.shift) + np.abs(out) * self.shift) / least
        bound += (2 * self.gamma + 4 * half) * (np.abs(out) + bound)
        return variance, worst, bound


def _steps(kernel: Kernel, gap: _Floats, shares: _Floats, error: Any) -> _Floats:
    """Distance of the numbers that weights e^error times as large are rounded to.

    It is over the sum of the weights. So are they, or over the largest, which is exactly 1.
    """
    assert kernel.weights is not None
    with np.errstate(over="ignore"):
        if kernel.normalised:
            step = kernel.weights.spacing(shares * np.exp(error))
        else:
            weights = np.exp(gap)
            spacing = kernel.weights.spacing(weights * np.exp(error))
            step = spacing * (shares / np.where(weights > 0, weights, 1.0))
    return np.where((shares > 0) & (kernel.normalised | (gap < 0)), step, 0.0)


def _largest_error(head: Head, kernel: Kernel, tile: Tile, i: slice, gap: _Floats) -> _Floats:
    """Bound of |delta|: every rounding at its largest."""
    unit, half, d = kernel.accumulate.unit, kernel.softmax.unit, head.q.shape[-1]
    terms = (min(d, kernel.run) / kernel.lanes + kernel.lanes + d / kernel.run + 1) * unit
    terms = terms / (1 - terms) if terms < 1 else math.inf
    found = abs(head.scale) * terms * _norms(head, tile, i) + unit * (
        np.abs(tile.logits) + np.abs(tile.capped) + 2 * np.abs(tile.scores)
    )
    found = found + half * (2 * np.abs(gap) + 3) + unit * kernel.exp
    if kernel.scores is not None:
        for number, factor in _rounded(head, tile, 1.0):
            found = found + np.abs(factor) * kernel.scores.spacing(number) / 2
            found = np.where(np.abs(number) > kernel.scores.largest, math.inf, found)
    return np.asarray(found)
