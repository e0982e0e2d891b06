"""Analyse what a backward pass knows of each query (D, its normaliser) before it sums gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...arrays.blocks import WHOLE, blocks
from ...arrays.library import Doubles
from .head import NearestWeights, ScoredRows, SoftmaxHead, Tile, attend_rows, scan_tiles
from .roundings import RMS, Roundings, round_bound, sum_error, sum_running_products, walk
from .shares import OFF, TileShares, find_log_errors, narrow_head
from .softmax import ErrorSums, analyse_softmax, begin_bound, size_of_log
from .ties import count_equal, mark_equal
from .weight_errors import bound_products

BLOCK_QUERIES = 256  # of a block
_SMALL = 2.0**-10  # logs whose exponentials are a sum of few powers
_OF_BLOCKS = "mean", "weights", "residuals", "single"
_OF_LARGEST, _OF_OTHERS = 4 / 3, 4.0  # times a variance that both have
RUN_STEPS = 16  # tokens between running sums that are known, if they matter


class BackwardHead(NamedTuple):
    """A head, the derivative to its output, and the output that the backward pass is given.

    The derivative is that of the products with values and weights, which may be rounded.
    """

    head: SoftmaxHead
    d_out: Doubles
    out: Doubles | None
    given: Doubles | None = None  # the derivative before it was rounded

    def derivative_of_delta(self, roundings: Roundings) -> Doubles:
        """Return what D is made of: the derivative as given, if D is taken from the output."""
        return self.d_out if self.given is None or not roundings.delta_of_out else self.given

    def terms(self, of: str) -> Doubles:
        """Return what a gradient is a sum of, with weights or derivatives to scores."""
        return {"dq": self.head.k, "dk": self.head.q, "dv": self.d_out}[of]


class Residuals(NamedTuple):
    """What rounding leaves of derivatives to running maxima of some queries, by query and key."""

    rows: npt.NDArray[np.int64]
    keys: npt.NDArray[np.int64]  # that may have been the largest so far
    variances: Doubles
    bounds: Doubles

    def part(self, i: slice, j: slice) -> Doubles:
        """Return variances and bounds of some queries and keys, (2, queries, keys)."""
        found = np.zeros((2, i.stop - i.start, j.stop - j.start))
        here = (i.start <= self.rows) & (self.rows < i.stop)
        here &= (j.start <= self.keys) & (self.keys < j.stop)
        at = self.rows[here] - i.start, self.keys[here] - j.start
        found[(slice(None), *at)] = self.variances[here], self.bounds[here]
        return found


class Saved(NamedTuple):
    """What is known of the queries of a head, (n,), before gradients are summed."""

    lse: Doubles  # exact
    top: Doubles  # largest scores
    delta: Doubles  # D, exact
    near_delta: Doubles  # D as roundings to nearest make it
    delta_shift: Doubles  # known beforehand: D of the output that was given, less the exact D
    delta_variance: Doubles  # of the sums of D
    shared_variance: Doubles  # of what weights and products bring to it
    delta_bound: Doubles  # of all
    scores_variance: Doubles  # of the sums over keys of p times errors of scores
    moved_variance: Doubles  # and of these times t - D
    lse_variance: Doubles
    lse_bound: Doubles
    logit: Doubles  # weighted mean of what the log of the scale makes of scores
    moved_logit: Doubles  # and of it times t - D
    copies: Doubles  # how many queries are the same: their weights have the same errors
    key_copies: Doubles  # how many keys are, (m,)
    products: Doubles  # how many times more queries, at most, share the errors of products g . v
    mean: Doubles  # (n, d), weighted means of the keys, times the slope of the cap
    weights: list[Any]  # `NearestWeights` of each block of queries that is looked at, or None
    residuals: list[Residuals | None]  # of each of these blocks, if maxima are differentiated
    single: SoftmaxHead | None = None  # the head in float32, where that is enough for errors


def forget_gradients(roundings: Roundings) -> Roundings:
    """Leave out what a kernel rounds later than what is saved."""
    roundings = roundings._replace(parts=None, by_head=False, d_scores=None, scaled=False)
    return roundings._replace(again=False, d_weights=None) if roundings.delta_of_out else roundings


def move_weights(p: Doubles, logs: Doubles, epsilon: Doubles) -> Doubles:
    """Return how far weights may move if their logarithms do by epsilon."""
    with np.errstate(over="ignore", invalid="ignore"):
        if np.max(epsilon, initial=0.0) < _SMALL:  # to x^5
            most = 1 + epsilon / 4
            for terms in (3, 2):
                most *= epsilon / terms
                most += 1
            most *= epsilon
        else:
            most = np.expm1(epsilon)
        most *= p
        if not np.min(p, initial=1.0) > 0:
            gone = p == 0
            most[gone] = np.exp(logs + epsilon)[gone]
        return most


def multiply_slope(x: Doubles, slope: Doubles | float) -> Doubles:
    """Multiply by the slope of a cap, or a power of it, which is 1 without a cap."""
    return x if np.ndim(slope) == 0 and slope == 1 else x * slope


def share_tile(tile: Tile, lse: Doubles) -> tuple[Doubles, Doubles]:
    """Return the weights of a tile, and their logs."""
    logs = tile.scores - np.where(np.isfinite(lse), lse, math.inf)[:, None]
    np.minimum(logs, 0.0, out=logs)
    if tile.visible is not None:
        logs[~tile.visible] = -math.inf
    return np.exp(logs), logs


def take_gaps(tile: Tile, roundings: Roundings, logs: Doubles, top: Doubles) -> Doubles:
    """Take logs of weights, or scores less the largest: the arguments of the exponentials."""
    # If D is of the output, a backward pass has only log normalisers of the forward pass.
    gaps = logs if roundings.delta_of_out else np.minimum(tile.scores - top[:, None], 0.0)
    hidden = np.isneginf(logs)
    return np.where(hidden, 0.0, gaps) if hidden.any() else gaps


def multiply_values(
    back: BackwardHead, roundings: Roundings, i: slice, j: slice
) -> tuple[Any, Any, Any]:
    """Multiply g . v; return the variance but for a last rounding, and the bound, too."""
    g, v = back.d_out[i], back.head.v[j]
    t = g @ v.T
    d_v = v.shape[-1]
    bound = bound_products(roundings, g, v, 2)
    # Of a difference of nearly equal numbers all the rest is these.
    steps = RUN_STEPS if roundings.scores_matter else max(d_v, 1)
    variance: Any = (
        sum_running_products(g, v, t, steps, roundings.lanes) if d_v else np.zeros_like(t)
    )
    variance *= (RMS * roundings.accumulate.unit) ** 2
    bound += d_v * roundings.accumulate.tiny
    if roundings.d_weights is not None:
        variance = variance + np.square(roundings.d_weights.spacing(t)) / 12
        most = np.abs(t) + bound
        bound = bound + roundings.d_weights.spacing(most) / 2
        bound = np.where(most > roundings.d_weights.largest, math.inf, bound)
    return t, variance, bound


def save_queries(
    back: BackwardHead,
    roundings: Roundings,
    rows: slice = WHOLE,
    known: dict[Any, Any] | None = None,
    saved: Saved | None = None,
) -> Saved:
    """Analyse all pairs of a head once, or of the blocks with some queries that are not saved yet.

    What is the same for all roundings is taken from what is known, or added.
    """
    head, n = back.head, back.head.q.shape[0]
    known = {} if known is None else known
    if "counts" not in known:
        known["counts"] = _count_twins(back)
    saved = saved or _begin(back, roundings, known["counts"])
    mean, single = saved.mean, saved.single
    start, stop, _ = rows.indices(n)
    for number, i in enumerate(blocks(0, n, BLOCK_QUERIES)):
        if saved.weights[number] is not None or i.stop <= start or stop <= i.start:
            continue
        if i.start not in known:
            known[i.start] = attend_rows(head, i, None)
        exact = known[i.start]
        nearest = NearestWeights(head, roundings, i, exact)
        delta = np.sum(back.derivative_of_delta(roundings)[i] * exact.out, -1)
        spread, log_variance, moved, near, variance, shared, bound, run = np.zeros(
            (8, i.stop - i.start)
        )
        logit, moved_logit, sizes = np.zeros((3, i.stop - i.start))
        reads = roundings.delta_of_out and back.out is not None and not roundings.unrounded
        sums = begin_bound(head, roundings, i, exact) if reads else None
        maxima = _RunningMaxima(back, roundings, i, exact) if roundings.maximum else None
        for tile in scan_tiles(head, i, BLOCK_QUERIES):
            j = tile.keys
            p, logs = share_tile(tile, exact.lse)
            finite = take_gaps(tile, roundings, logs, exact.top)
            mean[i] += multiply_slope(p, tile.slope) @ head.k[j]
            relative, epsilon = find_log_errors(head, single, roundings, tile, i, finite)
            if sums is not None:
                shares = TileShares.of_shares(tile, p, finite)
                sums.add_shares(roundings, head.v[j], shares, _since_top(roundings, epsilon, exact))
            noise = p * p * relative
            most = move_weights(p, logs, epsilon)
            spread += np.sum(most, -1)
            if roundings.delta_of_out and maxima is None:
                t = back.d_out[i] @ head.v[j].T
            else:
                t, t_variance, t_bound = multiply_values(back, roundings, i, j)
            if maxima is not None:
                maxima.add(tile, (p, most), (logs, epsilon), (t, t_variance, t_bound))
            apart = t - delta[:, None]
            log_variance += np.sum(noise, -1)
            moved += np.einsum("ij,ij->i", noise * apart, apart)
            risen = p * multiply_slope(tile.logits, tile.slope)
            logit += np.sum(risen, -1)
            moved_logit += np.einsum("ij,ij->i", risen, apart)
            if not roundings.delta_of_out:
                near_t = t if roundings.d_weights is None else roundings.d_weights.round(t)
                near += np.sum(nearest.weights(tile, rounded=roundings.kept) * near_t, -1)
                shared += np.sum(p * p * t_variance, -1)
                variance += (RMS * roundings.accumulate.unit) ** 2 * _sum_running_squares(
                    p * t, run
                )
                run = run + np.sum(p * t, -1)
                width: Any = 0.0
                if roundings.kept:
                    assert roundings.weights is not None
                    rounding = np.square(roundings.weights.spacing(p)) / 12 * (p > 0)
                    shared += np.sum(rounding * t * t, -1)
                    width = roundings.weights.unit * (p + most) + roundings.weights.spacing(0.0)
                bound += np.sum((p + most + width) * t_bound + (most + width) * np.abs(t), -1)
                sizes += np.sum(p * np.abs(t), -1)
        if roundings.delta_of_out:
            near, variance, bound = _take_delta_from_output(back, roundings, i, exact, sums)
        unit, gamma = roundings.accumulate.unit, sum_error(roundings, len(head.k), 2)
        size = size_of_log(exact.lse, len(head.k))
        lse_bound = np.log1p(spread) + (gamma + 4 * unit * size)
        # Weights are e^(s - lse), and lse is rounded; or are divided by a sum: two roundings.
        of_log = unit * size if roundings.delta_of_out else max(2 * unit, roundings.softmax.unit)
        if not roundings.delta_of_out:  # of its sum, and of the normaliser, which moves all weights
            for factor in (gamma, np.expm1(lse_bound)):
                bound += factor * (sizes + bound)
            if roundings.softmax.unit > unit:  # D is rounded to it, and moves with the normaliser
                variance += np.square(roundings.softmax.spacing(delta)) / 12
                variance += np.square(RMS * of_log * delta)
                bound += roundings.softmax.spacing(np.abs(delta) + bound) / 2
                near = roundings.softmax.round(near)
        if maxima is not None:
            of_terms = 0.0 if roundings.delta_of_out else variance
            saved.residuals[number], variance = maxima.find(of_terms, bound)
        row = {
            "lse": exact.lse,
            "top": exact.top,
            "delta": delta,
            "near_delta": near,
            "delta_shift": near - delta if roundings.reads_output and back.out is not None else 0.0,
            "logit": logit,
            "moved_logit": moved_logit,
            "delta_variance": variance,
            "shared_variance": shared,
            "delta_bound": bound,
            "scores_variance": log_variance,
            "moved_variance": moved,
            "lse_variance": (RMS * of_log) ** 2,
            "lse_bound": lse_bound,
        }
        for name, x in row.items():
            getattr(saved, name)[i] = x
        saved.weights[number] = nearest
    return saved


def _begin(back: BackwardHead, roundings: Roundings, counts: Mapping[str, Doubles]) -> Saved:
    """Make room for what is saved of a head; no block of queries is there yet."""
    n = len(back.head.q)
    names = [x for x in Saved._fields if x not in (*counts, *_OF_BLOCKS)]
    none = [None for _ in blocks(0, n, BLOCK_QUERIES)]
    return Saved(
        **{x: np.zeros(n) for x in names},
        **counts,
        mean=np.zeros(back.head.q.shape),
        weights=[*none],
        residuals=[*none],
        single=narrow_head(back.head, roundings),
    )


class _RunningMaxima:
    r"""Errors of the derivatives to the running maxima of some queries, key by key.

    Weights are over their sum, so the derivative to a maximum is 0; differentiated like all else it
    is :math:`r = \sum_j \bar s_j` with rounded terms, which is taken from the key that was the
    largest. Errors of weights move :math:`D` too, and cancel. What is left is

    .. math:: r = \sum_j p_j\, \delta t_j + \sum_j \delta_j - \delta D ,

    with the roundings :math:`\delta_j` of a product and a difference, those of the sum, and
    :math:`\delta D` of the sums that the output, its normaliser and :math:`D` are. A maximum over
    blocks of keys changes at most at keys that are larger than all before. The maximum that lasts
    over some blocks has what their keys leave, and the sums before the first of them and the last:
    at most what is there before a key that is surely larger. A term of a key j has a part in
    :math:`\bar s_j`, and in r with the other sign; so has :math:`\delta D` in all. As
    :math:`(x - y)(x - y)^T \preceq (1 + 1/c)\, x x^T + (1 + c)\, y y^T`, both have twice the
    variance of a term, and 4/3 and 4 times that of D.
    """

    def __init__(
        self, back: BackwardHead, roundings: Roundings, i: slice, exact: ScoredRows
    ) -> None:
        self.head, self.roundings, self.i = back.head, roundings, i
        self.g, self.unit = back.d_out[i], roundings.accumulate.unit
        self.delta = np.sum(self.g * exact.out, -1)[:, None]
        rows = len(self.g)
        self.sums = np.zeros((rows, back.head.v.shape[-1]))  # of p v
        self.mass, self.left, self.low, self.high = np.zeros((4, rows, 1))  # sums of p, of s
        # The last sum of D, over columns.
        last = (RMS * self.unit) ** 2 * _sum_running_squares(self.g * exact.out)
        self.last, self.of_sums = last, np.zeros(rows)
        self.off, self.sizes = np.zeros((2, rows))
        self.parts = [(np.zeros((rows, 0)),) * 4]  # of no key
        self.keys = [np.zeros(0, np.int64)]

    def add(
        self,
        tile: Tile,
        weights: tuple[Doubles, Doubles],
        logs: tuple[Doubles, Doubles],
        products: tuple[Doubles, Doubles, Doubles],
    ) -> None:
        """Add keys, with bounds of weights and their logs, and variances of products."""
        (p, most), (log, epsilon), (t, t_variance, t_bound) = weights, logs, products
        factor, s = (RMS * self.unit) ** 2, p * (t - self.delta)
        own = factor * (np.square(p * t) + np.square(p * self.delta))
        variance = 2 * (p * p * t_variance + own)
        of_delta = np.zeros_like(p)
        if self.roundings.weights is not None and not self.roundings.kept:  # D is of these
            of_delta += np.square(self.roundings.weights.spacing(p) * t) * (p > 0) / 12
        # Of the sums of weights, by which D is divided, and of terms: in any of the blocks.
        mass, left = self.mass + np.cumsum(p, -1), self.left + np.cumsum(s, -1)
        of_delta += factor * np.square(self.delta) * (mass * mass + p * p)
        low, high = (
            f(np.concatenate([x, left], -1), -1)[:, 1:]
            for f, x in (
                (np.minimum.accumulate, self.low),
                (np.maximum.accumulate, self.high),
            )
        )
        # Of the sums of weights times values, in steps, and of their products with g.
        v, before = self.head.v[tile.keys], np.zeros_like(p)
        for at in blocks(0, len(v), RUN_STEPS):
            last = self.sums + p[:, at] @ v[at]
            squares, steps = np.square(p[:, at]) @ np.square(v[at]), at.stop - at.start
            walked = walk(self.sums, last, squares, steps, self.roundings.lanes) + squares
            of_delta[:, at.start] += factor * np.sum(np.square(self.g) * walked, -1)
            self.sums, end = last, mass[:, at.stop - 1] * self.delta[:, 0]
            before[:, at.stop - 1] = factor * (_sum_running_squares(self.g * last) + end * end)
        self.of_sums += np.sum(of_delta, -1)
        variance += _OF_LARGEST * of_delta + factor * np.square(high - low)
        self.mass, self.left, self.low, self.high = (x[:, -1:] for x in (mass, left, low, high))
        sizes = p * (np.abs(t) + np.abs(self.delta))
        self.off += np.sum((p + most) * t_bound + most * np.abs(t - self.delta), -1)
        norms = (np.sqrt(np.einsum("ij,ij->i", x, x)) for x in (self.g, v))
        self.sizes += np.sum(sizes + p * np.multiply.outer(*norms), -1)
        if tile.is_sink:  # which the maximum may leave out
            log = log - math.inf
        self.keys.append(np.arange(tile.keys.start, tile.keys.stop))
        self.parts.append((log - epsilon, log + epsilon, variance, before))

    def find(self, of_terms: Doubles | float, delta_bound: Doubles) -> tuple[Residuals, Doubles]:
        """Find what may be left at keys that may have been the largest so far, and the share of D.

        D may also be a sum of weights times derivatives, with this variance.
        """
        low, high, variance, before = (np.concatenate(x, -1) for x in zip(*self.parts, strict=True))
        rows, m = high.shape
        none = np.full((rows, 1), -math.inf)
        earlier, most = (
            np.maximum.accumulate(np.concatenate([none, x], -1), -1)[:, :-1] for x in (low, high)
        )
        # Up to the first key after it that is larger for sure; the last one has D and all sums.
        after = np.where(low > most, np.arange(m), m)
        after = np.concatenate([after, np.full((rows, 1), m)], -1)[:, :0:-1]
        places = np.nonzero((high >= earlier) & np.isfinite(high))
        until = np.minimum.accumulate(after, -1)[:, ::-1][places]
        sums = np.cumsum(variance, -1) + 4 * np.maximum.accumulate(before, -1)
        whole = self.last + np.maximum(of_terms, self.of_sums)
        some = sums[places[0], until - 1]
        some += _OF_LARGEST * np.where(until == m, (whole - self.of_sums)[places[0]], 0.0)
        gamma = sum_error(self.roundings, m + self.g.shape[-1], 16)
        bound = 2 * (self.off + 2 * delta_bound + gamma * (self.sizes + self.off))
        keys = np.concatenate(self.keys)[places[1]]
        return Residuals(places[0] + self.i.start, keys, some, bound[places[0]]), (
            _OF_OTHERS * whole
        )


def unscale_rows(x: Doubles) -> Doubles:
    """Divide rows by the sign and power of 2 of their first number: roundings stay the same."""
    if not x.size:
        return x
    first = np.take_along_axis(x, np.argmax(x != 0, -1)[:, None], -1)
    return x * np.copysign(np.ldexp(1.0, -np.frexp(first)[1]), first)


def _count_twins(back: BackwardHead) -> dict[str, Doubles]:
    """Count copies of queries, of keys, and of derivatives for a query."""
    rows = back.head.q, back.head.k, unscale_rows(back.d_out)
    copies, keys, products = (count_equal(mark_equal(x)).astype(np.float64) for x in rows)
    products = np.maximum(products / copies, 1.0)
    return {"copies": copies, "key_copies": keys, "products": products}


def _sum_running_squares(x: Doubles, first: Doubles | float = 0.0) -> Doubles:
    """Sum the squares of terms and of their running sums, along the last axis."""
    sums = np.cumsum(x, -1) + (first if isinstance(first, float) else first[:, None])
    squares: Doubles = np.sum(x * x + sums * sums, -1)
    return squares


def _since_top(roundings: Roundings, epsilon: Doubles, exact: ScoredRows) -> Doubles:
    """Bound errors of logs of weights over the largest by those of logs of weights over the sum."""
    size = np.where(np.isfinite(exact.lse), exact.lse - exact.top, 0.0)[:, None]
    size *= 2 * roundings.softmax.unit * (1 if epsilon.dtype == np.float64 else 1 + OFF)
    return np.subtract(epsilon, size, dtype=epsilon.dtype)


def _take_delta_from_output(
    back: BackwardHead, roundings: Roundings, i: slice, exact: ScoredRows, sums: ErrorSums | None
) -> tuple[Doubles, Doubles, Doubles]:
    """Take D from an output: as roundings to nearest make it, variance and bound of the rest."""
    g, head = back.derivative_of_delta(roundings)[i], back.head
    if roundings.unrounded:
        roundings = roundings._replace(out=None)
    if back.out is None or roundings.unrounded:
        rows = analyse_softmax(head, roundings, i)
        known = np.where(np.isfinite(rows.std), rows.std, rows.bound)
        near, variance = np.sum(g * rows.nearest, -1), np.sum(np.square(g * known), -1)
        bound = np.sum(np.abs(g) * rows.bound, -1)
        out = rows.nearest
    else:
        out = back.out[i]
        near, variance = np.sum(g * out, -1), np.zeros(len(g))
        if sums is None:
            found = analyse_softmax(head, roundings, i)
            true, most = found.out, found.bound
        else:
            true = exact.out
            most = round_bound(roundings.out, true, sums.bound(head, roundings, true))
        bound = np.abs(np.sum(g * (out - true), -1))
        bound += np.sum(np.abs(g) * most, -1)  # where another was read, not yet rounded
    sizes = np.sum(np.abs(g * out), -1)
    unit, d_v = roundings.accumulate.unit, g.shape[-1]
    variance = variance + (RMS * unit) ** 2 * _sum_running_squares(g * out)
    return near, variance, bound + sum_error(roundings, d_v, 2) * sizes
