r"""The law and the bound of the rounding errors of softmax attention, for some queries of a head.

A kernel multiplies each weight :math:`e_{ij}` by :math:`e^{\delta_{ij}}`, with the errors of the
score and of the exponential, and adds :math:`\eta_{ij}` where it rounds the weight to a narrow
type before the second product. With :math:`p_{ij} = e_{ij} / \sum_j e_{ij}`, to first order,

.. math:: \delta \mathrm{out}_{ic} = \sum_j p_{ij} \, \delta_{ij} (v_{jc} - \mathrm{out}_{ic})
    + \sum_j \eta_{ij} v_{jc} + \text{sums} + \text{the rounding of the result}.

A sink is one more key, that every query sees and whose value is 0: it has part in the sum and in
the maximum, and its score is a number that the kernel was given.

A rounding to nearest moves a number by at most half of the distance of its neighbours h, and by
h / sqrt(12) in root mean square where nothing ties it to h. Where a number is not known that well,
and for its leading digits the law of Benford is taken, that is `RMS` units.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..arrays.blocks import blocks
from ..arrays.library import Doubles
from ..certified.forward import Arguments, Bounded, attend_with_bounds
from ..certified.pairs import Pair
from ..engine import kernel as engine_kernel
from ..engine.scores import Band, Options
from .formats import Format

__all__ = [
    "BIAS",
    "CONSTANTS",
    "RMS",
    "SURE",
    "WORST",
    "Head",
    "Kernel",
    "Own",
    "Rows",
    "Tile",
    "analyse",
    "attend",
    "cap_error",
    "cap_variance",
    "certified",
    "exact",
    "gamma",
    "is_power_of_two",
    "largest_error",
    "relative_variance",
    "tile_of",
    "tiles",
    "walk",
]


# Mean square of (h / sqrt(12)) / (u x) = 2^(1 - f) / sqrt(12) for x = 2^f, f uniform on [0, 1].
RMS = math.sqrt(1 / (8 * math.log(2)))
WORST = 1 / math.sqrt(3) / RMS  # for the least favourable digits
_KEYS = 64  # of a tile: as far apart are the running sums that are known
BIAS = 1 / 16  # of the largest error of an exponential, that its errors have in common
_TRIFLE = 2.0**10  # what is so much smaller need not be known to be exact
_WIDTH = 8  # coordinates between running sums of q . k that are known, if they matter
SURE = 5.0  # standard deviations beyond which roundings are tied to each other
_NEAR = 4  # units: weights nearer than that to each other, or to 1, are rounded together
_GONE = -700.0  # difference to the largest score of weights that are 0 in any precision
_ALIKE = 16  # roundings that may be the same before they are taken for tied
_FLUSHED = 4  # spacings of the smallest numbers: weights below that are rounded with a bias
_TILE = 16  # keys after which a running maximum may change, at the least
CONSTANTS = 3  # units by which the product of a scale and log2 e, both rounded, may be off


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
    d_weights: Format | None  # of a backward pass: derivatives to the weights
    d_scores: Format | None
    delta_of_out: bool  # whether D is taken from the output
    parts: tuple[int, int] | None  # queries and keys after which running sums are rounded

    @property
    def fine(self) -> bool:
        """Whether nothing but sums and elementary functions is rounded."""
        return self.scores is None and self.weights is None

    @property
    def kept(self) -> bool:
        """Whether a backward pass has the weights as they were rounded, not computed again."""
        return self.scores is not None and self.weights is not None

    @property
    def scores_matter(self) -> bool:
        """Whether the errors of scores and sums are more than a trifle beside those of weights."""
        if self.weights is None or self.scores is not None:
            return True
        return max(self.accumulate.unit, self.softmax.unit) * _TRIFLE > self.weights.unit

    @property
    def products_matter(self) -> bool:
        """Whether the errors of products of d_out and values are more than a trifle."""
        return self.scores_matter or self.d_weights is not None


class Head(NamedTuple):
    """Softmax attention of one head, in float64; a sink is a key of 0 at the end, with value 0."""

    q: Doubles
    k: Doubles
    v: Doubles
    scale: float
    bias: Doubles | None
    mask: npt.NDArray[np.bool_] | None
    causal: bool
    window: tuple[int | None, int | None]
    softcap: float | None
    sink: float | None = None

    def with_sink(self, sink: float) -> Head:
        """With a sink; one of -inf is none."""
        if sink == -math.inf:
            return self
        k, v = (np.concatenate([x, np.zeros((1, x.shape[-1]))]) for x in (self.k, self.v))
        return self._replace(k=k, v=v, sink=sink)

    @property
    def keys(self) -> int:
        """The number of keys without the sink."""
        return len(self.k) - (self.sink is not None)

    def blocks(self, size: int) -> Iterator[slice]:
        """Blocks of keys; the sink is alone, and the last."""
        yield from blocks(0, self.keys, size)
        yield from blocks(self.keys, self.k.shape[0], 1)

    def is_sink(self, j: slice) -> bool:
        """Whether a block of keys is the sink."""
        return self.sink is not None and j.start >= self.keys

    def visible(self, i: slice, j: slice) -> npt.NDArray[np.bool_] | None:
        """Which keys the queries see; None for all."""
        if self.is_sink(j):
            return None
        mask = None if self.mask is None else np.asarray(self.mask[i, j])
        band = Band.of(self.keys - self.q.shape[0], self.causal, self.window)
        seen: npt.NDArray[np.bool_] | None = band.visible(i, j, None, np, mask)
        return seen

    def ahead(self, i: slice, j: slice) -> npt.NDArray[np.int64]:
        """How far keys are ahead of queries, j - (i + m - n)."""
        if self.is_sink(j):
            return np.zeros((i.stop - i.start, 1), np.int64)
        shift = self.keys - self.q.shape[0]
        found: npt.NDArray[np.int64] = (
            np.arange(j.start, j.stop) - np.arange(i.start + shift, i.stop + shift)[:, None]
        )
        return found


class Tile(NamedTuple):
    """Scores of some queries and keys, with what they are made of."""

    keys: slice
    visible: npt.NDArray[np.bool_] | None
    products: Doubles  # q . k
    logits: Doubles  # times the scale
    ratio: Doubles | float  # capped scores over the cap; 0 if there is none
    capped: Doubles
    scores: Doubles
    slope: Doubles | float  # of the cap
    is_sink: bool = False


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
    lse_slack : array, (b,)
        How much of that may be the same for all, by the exponentials and by rounded constants.
    spacing : array, (b, d_v)
        Distance of the numbers that the result may be rounded to; 0 if it is not rounded.
    slack : array, (b, d_v)
        How much of the error may be the same for all, by the exponentials and rounded constants.
    tangents : dict of arrays, (b, d_v)
        Derivative of the result with respect to a change of the scores.
    apart : array, (b, d_v), or None
        Variance of what has no part in another element, of gradients.
    rest, lse_rest : arrays, (b, d_v) and (b,), or 0
        What float64 leaves of the exact result, where a kernel sums in float64 itself.
    """

    out: Doubles
    lse: Doubles
    top: Doubles
    nearest: Doubles
    std: Doubles
    worst: Doubles
    bound: Doubles
    lse_std: Doubles
    lse_bound: Doubles
    lse_slack: Doubles
    spacing: Doubles
    slack: Doubles
    tangents: dict[str, Doubles]
    apart: Doubles | None = None
    rest: Doubles | float = 0.0
    lse_rest: Doubles | float = 0.0

    def errors(self, got: Doubles) -> Doubles:
        """How far numbers are from the exact result."""
        found: Doubles = got - self.out - self.rest
        return found


def tiles(head: Head, i: slice, size: int = _KEYS) -> Iterator[Tile]:
    """Scores of the queries i with all keys."""
    for j in head.blocks(size):
        tile = tile_of(head, i, j)
        if tile is not None:
            yield tile


def tile_of(head: Head, i: slice, j: slice) -> Tile | None:
    """Scores of the queries i with the keys j; None if no query sees one."""
    visible = head.visible(i, j)
    if visible is not None and not visible.any():
        return None
    return _steps(head, i, j, visible, head.q[i] @ head.k[j].T)


def same(x: Doubles) -> Doubles:
    """Rounds nothing."""
    return x


def _steps(
    head: Head,
    i: slice,
    j: slice,
    visible: npt.NDArray[np.bool_] | None,
    products: Doubles,
    to: Callable[[Doubles], Doubles] = same,
) -> Tile:
    """The steps from q . k to scores, each result passed through `to`."""
    if head.is_sink(j):
        assert head.sink is not None
        return Tile(j, None, products, products, 0.0, products, products + head.sink, 0.0, True)
    products = to(products)
    logits = to(head.scale * products)
    capped: Doubles = logits
    ratio: Doubles | float = 0.0
    slope: Doubles | float = 1.0
    if head.softcap is not None:
        x = to(logits / head.softcap)
        ratio = to(np.tanh(x))
        capped, slope = to(head.softcap * ratio), _slope(x) if to is same else 1 - ratio * ratio
    scores = capped if head.bias is None else to(capped + head.bias[i, j])
    return Tile(j, visible, products, logits, ratio, capped, scores, slope)


def _slope(x: Doubles) -> Doubles:
    """1 - tanh(x)^2, where that cancels, too."""
    e = np.exp(-2 * np.abs(x))
    return np.asarray(4 * e / np.square(1 + e))


class _First(NamedTuple):
    """Sums over the keys of a profile's own weights, and the largest score, with the sink's."""

    out: Doubles
    lse: Doubles
    top: Doubles


def attend(head: Head, i: slice, to: Callable[[Doubles], Doubles] | None) -> _First:
    """Attention with scores that are exact, or rounded by `to`."""
    m, rows = head.k.shape[0], i.stop - i.start
    zero = np.zeros((1, 1))
    total = engine_kernel.Sums(zero, zero, zero - math.inf)
    top = np.full(rows, -math.inf)
    for tile in tiles(head, i, 16 * _KEYS):
        if to is not None:
            tile = _steps(head, i, tile.keys, tile.visible, tile.products, to)
        scores = np.array(np.broadcast_to(tile.scores, (rows, tile.scores.shape[-1])))
        seen = scores if tile.visible is None else np.where(tile.visible, scores, -math.inf)
        top = np.maximum(top, seen.max(-1))
        found = engine_kernel.sums(scores, head.v[tile.keys], tile.visible, m)
        total = engine_kernel.combine(total, found)
    out, lse = engine_kernel.normalise(total)
    shape = (rows, head.v.shape[-1])
    return _First(np.broadcast_to(out, shape), np.broadcast_to(lse, rows), top)


def relative_variance(head: Head, kernel: Kernel, tile: Tile, i: slice, gap: Doubles) -> Doubles:
    """Variance of delta, of the scores and of the exponential."""
    unit, half = (RMS * kernel.accumulate.unit) ** 2, (RMS * kernel.softmax.unit) ** 2
    found = cap_variance(head, kernel, tile, i)
    if head.bias is not None or tile.is_sink:  # which is multiplied by log2 e
        found = found + unit * np.square(tile.scores)
    found = found + half * np.square(gap)
    found += (kernel.exp * kernel.accumulate.unit / 2) ** 2 * (gap < 0)
    if head.softcap is not None:
        found += unit * np.square(tile.capped)
    if kernel.scores is not None:
        for number in _after(head, tile):
            found += np.square(kernel.scores.spacing(number)) / 12
    if kernel.softmax.unit > kernel.accumulate.unit:
        weight = np.exp(gap)
        step = kernel.softmax.spacing(weight) / np.where(weight > 0, weight, math.inf)
        found += np.square(step) / 12 * (gap < 0)
    return np.asarray(found)


def cap_variance(head: Head, kernel: Kernel, tile: Tile, i: slice) -> Doubles:
    r"""Variance of the capped score by errors of its tanh.

    They move the slope, too. For the capped score :math:`c\, \tau`, :math:`\tau = \tanh x`,

    .. math:: c^2 \operatorname{Var} \delta\tau
        = (1 - \tau^2)^2 \operatorname{Var} \delta(c x) + c^2 \sigma_\tau^2 .
    """
    unit = (RMS * kernel.accumulate.unit) ** 2
    logits = np.square(tile.logits) * (1 if head.softcap is None else 2)  # divided by the cap
    found = unit * (head.scale**2 * _running_products(head, kernel, tile, i) + logits)
    if kernel.scores is not None:
        for number, factor in _before(head, tile):
            found += np.square(factor * kernel.scores.spacing(number)) / 12
    found = found * np.square(tile.slope)
    if head.softcap is not None:
        found += unit * np.square(tile.capped)
        if kernel.scores is not None:
            found += np.square(head.softcap * kernel.scores.spacing(np.asarray(tile.ratio))) / 12
    return np.asarray(found)


def _before(head: Head, tile: Tile) -> Iterator[tuple[Doubles, float]]:
    """What is rounded before the cap, and the derivative of the logit to it."""
    if tile.is_sink:
        return
    if not is_power_of_two(head.scale):
        yield tile.products, head.scale
    yield tile.logits, 1.0
    if head.softcap is not None and not is_power_of_two(head.softcap):
        yield tile.logits / head.softcap, head.softcap


def _after(head: Head, tile: Tile) -> Iterator[Doubles]:
    """What is rounded after the tanh of the cap."""
    if tile.is_sink:
        return
    if head.softcap is not None and not is_power_of_two(head.softcap):
        yield tile.capped
    if head.bias is not None:
        yield tile.scores


def is_power_of_two(x: float) -> bool:
    """Whether nothing is rounded in a multiplication; so it is by 0."""
    return abs(math.frexp(x)[0]) in (0.0, 0.5)


def _running_products(head: Head, kernel: Kernel, tile: Tile, i: slice) -> Doubles:
    """Sum of the squares of the products in q . k, and of their running sums."""
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
        squares = np.square(x) @ np.square(y).T
        found += walk(first, last, squares, x.shape[-1], kernel.lanes) + squares
        first = last
    return found


def _norms(head: Head, tile: Tile, i: slice) -> Doubles:
    """Norms of queries times norms of keys."""
    q, k = (np.sqrt(np.sum(np.square(x), -1)) for x in (head.q[i], head.k[tile.keys]))
    found: Doubles = q[:, None] * k
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


def gamma(kernel: Kernel, terms: float, more: float) -> float:
    """Largest relative error of a sum of so many terms, with so many roundings more."""
    steps = min(terms, kernel.run) / kernel.lanes + kernel.lanes + terms / kernel.run + more
    found = steps * kernel.accumulate.unit
    return found / (1 - found) if found < 1 else math.inf


def exact(head: Head, i: slice) -> Doubles:
    """The exact result for the queries i, rounded to float64."""
    return attend(head, i, None).out


def certified(head: Head, i: slice) -> Bounded:
    """The exact result for the queries i in pairs, with a proven bound of its error."""
    keys = slice(0, head.keys)
    bias, mask = (None if x is None else np.atleast_2d(x) for x in (head.bias, head.mask))
    bias, mask = (x if x is None or len(x) == 1 else x[i] for x in (bias, mask))
    shift = head.keys - len(head.q) + i.start  # of these queries
    sink = None if head.sink is None else np.full((1, 1), head.sink)
    return attend_with_bounds(
        Arguments.of_arrays(
            head.q[i],
            head.k[keys],
            head.v[keys],
            bias,
            mask=mask,
            causal=head.causal,
            options=Options(head.window, shift, head.softcap, sink),
            scale=Pair(np.asarray(head.scale), np.asarray(0.0)),
        )
    )


def analyse(
    head: Head,
    kernel: Kernel,
    i: slice,
    changes: Mapping[str, Callable[[Head, Tile, slice], Any]] = MappingProxyType({}),
) -> Rows:
    """Say what a kernel that rounds like this may give for the queries i."""
    exact = attend(head, i, None)
    own = Own(head, kernel, i, exact)
    rows, d_v = exact.out.shape
    law = _Law(rows, d_v, head.k.shape[0], kernel)
    steep = {name: np.zeros((rows, d_v + 1)) for name in changes}
    nearest = np.zeros((rows, d_v))
    top, log = (np.where(np.isfinite(x), x, 0.0)[:, None] for x in (exact.top, exact.lse))
    law.whole = np.where(np.isfinite(exact.top)[:, None], np.exp(top - log), 1e-300)
    for tile in tiles(head, i):
        v = head.v[tile.keys]
        gap = np.minimum(tile.scores - top, 0.0)
        if tile.visible is not None:
            gap = np.where(tile.visible, gap, -math.inf)
        weights = np.exp(gap)
        shares = weights * law.whole
        law.add(head, kernel, tile, i, _Shares(gap, weights, shares), v)
        nearest += own.weights(tile) @ v
        with_ones = np.concatenate([v, np.ones((v.shape[0], 1))], -1)
        for name, change in changes.items():
            steep[name] += (shares * change(head, tile, i)) @ with_ones
    variance, least_favourable, bound = law.result(head, kernel, exact.out)
    std, worst = np.sqrt(variance), np.sqrt(least_favourable)
    tangents = {name: x[:, :-1] - x[:, -1:] * exact.out for name, x in steep.items()}
    loose = (np.abs(nearest - exact.out) > SURE * std) | law.tied(kernel)[:, None]
    loose |= law.lost(kernel)
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
    drift = CONSTANTS * np.abs(steep.get("scale", np.zeros((rows, d_v + 1))))
    slack = kernel.exp * law.common(exact.out)
    if "scale" in tangents:
        slack = slack + CONSTANTS * np.abs(tangents["scale"])
    flushed = law.flushed[:, :-1] + law.flushed[:, -1:] * np.abs(exact.out)
    lse_slack = kernel.exp + drift[:, -1] + 2 * np.abs(log[:, 0])
    out, lse = Pair(exact.out, 0.0), Pair(exact.lse, 0.0)
    if kernel.accumulate.unit <= np.finfo(np.float64).eps / 2:
        out, lse, *_ = certified(head, i)
        nearest = out.hi if kernel.out is None else kernel.out.round(out.hi)
    return Rows(
        out.hi,
        lse.hi,
        exact.top,
        nearest,
        std,
        worst,
        bound,
        lse_std,
        lse_bound,
        kernel.accumulate.unit * lse_slack,
        spacing,
        kernel.accumulate.unit * slack + flushed,
        tangents,
        rest=out.lo,
        lse_rest=lse.lo,
    )


class Own:
    """Weights over their sum, with the roundings of the profile to nearest."""

    def __init__(self, head: Head, kernel: Kernel, i: slice, exact: _First) -> None:
        self.head, self.kernel, self.i = head, kernel, i
        to = kernel.scores
        self.first = exact if to is None else attend(head, i, to.round)
        self.top = np.where(np.isfinite(self.first.top), self.first.top, 0.0)[:, None]
        self.narrow = kernel.softmax.unit > kernel.accumulate.unit
        lse = np.where(np.isfinite(self.first.lse), self.first.lse, 0.0)[:, None]
        total = np.exp(lse - self.top)
        if self.narrow:
            total = np.zeros_like(total)
            for tile in tiles(head, i):
                total += np.sum(np.exp(self._logs(tile)), -1, keepdims=True)
            total = kernel.softmax.round(total)
        self.total = np.where(total > 0, total, 1.0)

    def part(self, i: slice) -> Own:
        """The same for some of the queries."""
        found, at = copy(self), slice(i.start - self.i.start, i.stop - self.i.start)
        found.i, found.top, found.total = i, self.top[at], self.total[at]
        return found

    def _tile(self, tile: Tile) -> Tile:
        """Scores with their roundings."""
        if self.kernel.scores is None:
            return tile
        to = self.kernel.scores.round
        return _steps(self.head, self.i, tile.keys, tile.visible, tile.products, to)

    def slope(self, tile: Tile) -> Doubles | float:
        """The slope of the cap, of a tanh that was rounded."""
        return self._tile(tile).slope

    def _logs(self, tile: Tile) -> Doubles:
        """Logs of the weights over the largest."""
        tile = self._tile(tile)
        gap = np.minimum(tile.scores - self.top, 0.0)
        if self.narrow:
            with np.errstate(divide="ignore"):
                to = self.kernel.softmax.round
                gap = np.log(to(np.exp(to(gap))))
        return gap if tile.visible is None else np.where(tile.visible, gap, -math.inf)

    def weights(self, tile: Tile, rounded: bool = True) -> Doubles:
        """The weights of a tile, rounded where the profile does."""
        weights, to = np.exp(self._logs(tile)), self.kernel.weights
        if to is None or not rounded:
            return np.asarray(weights / self.total)
        if self.kernel.normalised:
            return to.round(weights / self.total)
        return to.round(weights) / self.total


class _Shares(NamedTuple):
    """Weights of a tile.

    Attributes
    ----------
    gap : array
        Differences to the largest score, -inf where hidden.
    weights, shares : arrays
        e^gap, and these over their sum.
    """

    gap: Doubles
    weights: Doubles
    shares: Doubles


class _Law:
    """Sums over the keys that the variance and the bound are made of."""

    def __init__(self, rows: int, d_v: int, m: int, kernel: Kernel) -> None:
        self.scores = np.zeros((rows, 2 * d_v + 1))  # p^2 var(delta) times v^2, v and 1
        self.weights = np.zeros((rows, d_v))  # var(eta) v^2
        self.wider = np.zeros((rows, d_v))  # how much more at the least favourable digits
        self.near = np.zeros((rows, 4))  # p^2 times 1, gap and gap^2, and p^4
        self.keys = 0
        self.together = self.alone = 0.0  # squares of roundings, summed over rows first or not
        self.lattice = False
        self.running = np.zeros((rows, d_v))  # squares of p v and of their running sums
        self.run, self.runs, self.steps = np.zeros((rows, d_v)), np.zeros((rows, d_v)), 0
        self.relative = np.zeros(rows)  # p^2 var(delta)
        self.moved = np.zeros((rows, d_v))  # the largest errors of p, and of their sum, times |v|
        self.shift = np.zeros((rows, 1))  # p (e^epsilon - 1)
        self.least = np.zeros((rows, 1))  # the sum of the weights, at least
        self.whole = np.full((rows, 1), 1e-300)  # the share of a weight of 1
        self.flushed = np.zeros((rows, d_v + 1))  # half the last spacing times |v| and 1
        self.sizes = np.zeros((rows, d_v))  # p |v|
        self.top = np.zeros((rows, d_v + 1))  # p |v| and p of the largest weights
        self.gamma = gamma(kernel, m, 2 + 2 * m / _TILE)  # with changes of a running maximum

    def add(
        self, head: Head, kernel: Kernel, tile: Tile, i: slice, of: _Shares, v: Doubles
    ) -> None:
        """Add the keys of a tile."""
        gap, _, shares = of
        finite = gap if tile.visible is None else np.where(tile.visible, gap, 0.0)
        squares, sizes = v * v, np.abs(v)
        noise = shares * shares * relative_variance(head, kernel, tile, i, finite)
        self.relative += np.sum(noise, -1)
        most, least = _moved(
            shares, finite, self.whole, largest_error(head, kernel, tile, i, finite)
        )
        if tile.visible is not None:
            most = np.where(tile.visible, most, 0.0)
        self.least += np.sum(least, -1, keepdims=True)
        self.shift += np.sum(most, -1, keepdims=True)
        self.sizes += shares @ sizes
        row, key = np.nonzero(gap == 0)
        top = shares[row, key, None]
        np.add.at(self.top, row, np.concatenate([top * sizes[key], top], -1))
        if kernel.weights is not None:
            most = most + _largest_rounding(kernel, of, self.whole, shares + most)
            variance = self._weights(kernel, of, squares)
            if not kernel.scores_matter:
                variance = variance + noise
            self.weights += variance @ squares
        else:
            rounded = (shares > 0) & (gap < 0)
            self._spread(np.where(rounded, shares * shares, 0.0), np.where(rounded, gap, 0.0))
        self.moved += most @ sizes
        self.keys += v.shape[0]
        if kernel.scores_matter:
            with_ones = np.concatenate([squares, v, np.ones((v.shape[0], 1))], -1)
            self.scores += noise @ with_ones
            steps, last = v.shape[0], self.run + shares @ v
            terms = (shares * shares) @ squares
            self.running += walk(self.run, last, terms, steps, kernel.lanes) + terms
            self.run, self.steps = last, self.steps + steps
            if self.steps >= kernel.run:
                self.close()

    def _weights(self, kernel: Kernel, of: _Shares, squares: Doubles) -> Doubles:
        """Variance of the rounding of the weights: over their sum, or over the largest, exactly 1.

        A running maximum may be another than the last when a weight is rounded, and digits, too.
        """
        to, (gap, weights, shares) = kernel.weights, of
        assert to is not None
        if kernel.normalised:
            return np.where(shares > 0, np.square(to.spacing(shares)) / 12, 0.0)
        rounded = (shares > 0) & (gap < 0)
        of_one = np.where(rounded, self.whole, 0.0)
        step = to.spacing(weights) * of_one
        widest = np.where(rounded, np.maximum(step, 2 * to.unit * shares), 0.0)
        self.wider += ((widest * widest - step * step) / 12) @ squares
        last = to.spacing(0.0)
        flushed = np.where(weights < _FLUSHED * last, of_one * last / 2, 0.0)
        if np.any(flushed):
            ones = np.ones((len(squares), 1))
            self.flushed += flushed @ np.concatenate([np.sqrt(squares), ones], -1)
        size, gap = np.where(rounded, shares * shares, 0.0), np.where(rounded, gap, 0.0)
        residual = of_one * (to.round(weights) - weights)
        self.together += np.sum(np.square(np.sum(residual, 0)))
        self.alone += np.sum(np.square(residual))
        if self.keys == 0:
            self.lattice = _few(gap[rounded & (weights > last)])
        self._spread(size, gap)
        return step * step / 12

    def _spread(self, size: Doubles, gap: Doubles) -> None:
        """How far weights are from each other and from the largest."""
        self.near += np.stack([np.sum(size * x, -1) for x in (1.0, gap, gap * gap, size)], -1)

    def lost(self, kernel: Kernel) -> npt.NDArray[np.bool_]:
        """Whether products are as small as the smallest numbers of the sums."""
        smallest = kernel.accumulate.spacing(0.0) * (1.0 if kernel.normalised else self.whole)
        found: npt.NDArray[np.bool_] = self.sizes < 8 * max(self.keys, 1) * smallest
        return found & (self.sizes > 0)

    def tied(self, kernel: Kernel) -> npt.NDArray[np.bool_]:
        """Whether weights are rounded alike, or their sums.

        They are where they are near to each other or to the largest, where they take few values, or
        where queries are nearly the same.
        """
        zeroth, first, second, fourth = self.near.T
        total = np.where(zeroth > 0, zeroth, 1.0)
        unit = (kernel.weights or kernel.accumulate).unit  # of sums, where weights are as they are
        square, mean = second / total, first / total
        limit = (_NEAR * unit) ** 2
        many = zeroth * zeroth > 8 * fourth
        found: npt.NDArray[np.bool_] = (zeroth > 0) & (
            (square < limit) | (many & (square - mean * mean < limit))
        )
        return found | (self.together > _ALIKE * self.alone) | self.lattice

    def close(self) -> None:
        """End a run of the sum over the keys: it is added to those before."""
        self.runs += self.run
        self.running += np.square(self.runs)
        self.run, self.steps = np.zeros_like(self.run), 0

    def common(self, out: Doubles) -> Doubles:
        """What errors of exponentials of one sign add up to, over their size.

        That of e^0 is always the same, and of others it averages to `BIAS` at most.
        """
        found: Doubles = BIAS * (self.sizes + np.abs(out))
        return found + self.top[:, :-1] + np.abs(out) * self.top[:, -1:]

    def of_lse(self, head: Head, kernel: Kernel, lse: Doubles) -> tuple[Doubles, Doubles]:
        """Standard deviation and bound of the log normaliser."""
        m, unit = head.k.shape[0], kernel.accumulate.unit
        size = np.where(np.isfinite(lse), np.abs(lse), 0.0) + 1 + math.log(max(m, 1))
        std = np.sqrt(self.relative + (RMS * unit) ** 2 * (m / 3 + 2 * size * size))
        spread = self.shift[:, 0] / np.where(self.least > 0, self.least, 1.0)[:, 0]
        return std, np.log1p(spread) + (m + 4) * unit + 4 * unit * size

    def result(self, head: Head, kernel: Kernel, out: Doubles) -> tuple[Doubles, Doubles, Doubles]:
        """Variance, that at the least favourable digits, and bound, but for the last rounding."""
        if self.steps:
            self.close()
        unit, half, d_v = kernel.accumulate.unit, kernel.softmax.unit, out.shape[-1]
        squares, first, zeroth = np.split(self.scores, [d_v, 2 * d_v], -1)
        scores = np.maximum(squares - 2 * out * first + out * out * zeroth, 0.0)
        running = self.running if kernel.scores_matter else out * out * head.k.shape[0]
        sums = (RMS * unit) ** 2 * (running + out * out) + (RMS * half * out) ** 2
        variance = scores + self.weights + sums
        # Sums in the range of subnormal numbers, and beyond the largest.
        accumulate, m = kernel.accumulate, head.k.shape[0]
        whole = 1.0 if kernel.normalised else self.whole
        last = m * accumulate.spacing(0.0) * whole
        variance = variance + np.where(np.abs(out) * unit < last, last * last / (12 * m), 0.0)
        known = self.weights if kernel.scores is None else scores + self.weights
        worst = known + WORST**2 * (variance - known) + self.wider
        least = np.where(self.least > 0, self.least, 1.0)
        error = self.moved + self.gamma * (self.sizes + self.moved) + last / 2
        bound = (error + np.abs(out) * self.shift) / least
        bound += (2 * self.gamma + 4 * half) * (np.abs(out) + bound)
        reach = (self.sizes + self.moved) * (1 + self.gamma) / whole
        bound = np.where(reach > accumulate.largest, math.inf, bound)
        return variance, worst, bound


def _few(x: Doubles) -> bool:
    """Whether many numbers have few values."""
    return x.size > _KEYS * _ALIKE and np.unique(np.round(x * 2.0**20)).size * _ALIKE < x.size


def _moved(
    shares: Doubles, gap: Doubles, whole: Doubles, epsilon: Doubles
) -> tuple[Doubles, Doubles]:
    """How far shares may move if their logarithms do by epsilon, and what is left at the least."""
    if np.max(epsilon, initial=0.0) < 2.0**-10:  # e^x - 1 <= x (1 + x) and e^-x >= 1 - x
        most, least = shares * (epsilon * (1 + epsilon)), shares * (1 - epsilon)
    else:
        with np.errstate(over="ignore", invalid="ignore"):
            most, least = shares * np.expm1(epsilon), shares * np.exp(-epsilon)
    gone = shares == 0
    if gone.any():
        with np.errstate(over="ignore", invalid="ignore"):
            most = np.where(gone, np.exp(gap + epsilon) * whole, most)
    return most, least


def _largest_rounding(kernel: Kernel, of: _Shares, whole: Doubles, shares: Doubles) -> Doubles:
    """Bound of |eta|: of shares with their errors, and over any maximum that was before."""
    assert kernel.weights is not None
    least: Any = 2.0 ** (kernel.weights.least - kernel.weights.digits)
    if not kernel.normalised:  # in shares, the largest of which is not 1
        least = least * whole
    rounded = ~np.isneginf(of.gap) & (of.shares < 1)
    return np.where(rounded, kernel.weights.unit * shares + least, 0.0)


def largest_error(head: Head, kernel: Kernel, tile: Tile, i: slice, gap: Doubles) -> Doubles:
    """Bound of |delta|: every rounding at its largest."""
    unit, half = kernel.accumulate.unit, kernel.softmax.unit
    found = _logit_error(head, kernel, tile, i, gap) + unit * 2 * np.abs(tile.scores)
    if head.softcap is not None:
        found = found + 6 * unit * np.abs(tile.capped)
    if kernel.scores is not None:
        if head.softcap is not None:
            found = found + head.softcap * kernel.scores.spacing(np.asarray(tile.ratio)) / 2
        for number in _after(head, tile):
            found = _rounded(kernel.scores, found, number, 1.0, gap)
    # Changes of a running maximum, each with an exponential.
    changes = head.k.shape[0] / _TILE
    found = found + half * (2 * (np.abs(gap) + found) + 3) + unit * kernel.exp
    return np.asarray(found + changes * (half * (kernel.exp + 1) + unit))


def cap_error(head: Head, kernel: Kernel, tile: Tile, i: slice, gap: Doubles) -> Doubles:
    r"""Bound of the error of the slope :math:`1 - \tau^2` of the cap, :math:`\tau = \tanh x`.

    The derivative of its logarithm is :math:`2 |\tau| \le 2`, and the error :math:`\eta` of a tanh
    moves it by :math:`\eta (2 |\tau| + \eta)`:

    .. math:: |\delta(1 - \tau^2)| \le (1 - \tau^2) (e^{2 |\delta x|} - 1)
        + 2 \eta (1 + \eta) + 2 u .

    Kernels may take the tanh, or the capped score over the cap: :math:`\eta` has both.
    """
    if head.softcap is None or tile.is_sink:
        return np.zeros_like(tile.logits)
    unit = kernel.accumulate.unit
    moved = _logit_error(head, kernel, tile, i, gap) / head.softcap
    off = 6 * unit * np.abs(tile.ratio)
    if kernel.scores is not None:
        off = off + kernel.scores.spacing(np.asarray(tile.ratio)) / 2
        off = off + kernel.scores.spacing(tile.capped) / (2 * head.softcap)
    known = moved < 1
    found = tile.slope * np.expm1(2 * np.where(known, moved, 0.0)) + 2 * off * (1 + off) + 2 * unit
    return np.where(known, np.minimum(found, 1.0), 1.0)


def _logit_error(head: Head, kernel: Kernel, tile: Tile, i: slice, gap: Doubles) -> Doubles:
    """Bound of the error of the scores before the cap."""
    unit, d = kernel.accumulate.unit, head.q.shape[-1]
    terms = gamma(kernel, d, 1)
    least = d * 2.0 ** (kernel.accumulate.least - kernel.accumulate.digits)
    norms = _norms(head, tile, i)
    norms = np.where(norms > kernel.accumulate.largest, math.inf, norms)
    found = abs(head.scale) * (terms * norms + least) + unit * 2 * np.abs(tile.logits)
    if kernel.scores is not None:
        for number, factor in _before(head, tile):
            found = _rounded(kernel.scores, found, number, factor, gap)
    return np.asarray(found)


def _rounded(to: Format, error: Doubles, number: Doubles, factor: float, gap: Doubles) -> Doubles:
    """The largest error of what has the factor for derivative to a number that is rounded."""
    reach = np.abs(number) + error / np.abs(factor)  # with the errors before
    found = error + np.abs(factor) * to.spacing(reach) / 2
    beyond = (reach > to.largest) & ((number > 0) | (gap > _GONE))
    return np.where(beyond, math.inf, found)
