r"""Predict the rounding errors of the gradients of softmax attention, and bound them.

With the weights :math:`p_{ij}` and the derivative :math:`g` with respect to the output,

.. math:: t_{ij} = g_i \cdot v_j, \qquad D_i = g_i \cdot \mathrm{out}_i, \qquad
    \bar s_{ij} = p_{ij} (t_{ij} - D_i), \qquad
    \bar q_i = c \sum_j \bar s_{ij} k_j, \quad \bar k_j = c \sum_i \bar s_{ij} q_i, \quad
    \bar v_j = \sum_i p_{ij} g_i

for scores :math:`s = c\, q \cdot k`. With a cap, :math:`s = b \tanh x` for
:math:`x = c\, q \cdot k / b`, derivatives to scores are multiplied by its slope first:

.. math:: \tilde s_{ij} = \bar s_{ij} (1 - \tau_{ij}^2), \qquad \tau_{ij} = \tanh x_{ij}, \qquad
    \bar q_i = c \sum_j \tilde s_{ij} k_j .

An error of :math:`\tau` moves the weight by :math:`b\, \delta\tau` and the slope by
:math:`-2 \tau \delta\tau`: together :math:`p (1 - \tau^2)` by
:math:`p (1 - \tau^2 - 2 \tau / b)\, b\, \delta\tau`. The square and the difference are rounded,
too, and so may be the quotient that :math:`\tau` is taken from: where :math:`|\tau|` is near 1 all
cancels but these,

.. math:: \operatorname{Var} \delta(1 - \tau^2) = \sigma_u^2 (9 \tau^4 + (1 - \tau^2)^2) .

A sink is a key of 0 with the value 0, of which :math:`D` and the sum of the weights know.

A backward pass computes the weights again from the log
normalisers, or keeps them as they were rounded; it rounds p before the sum for v and
:math:`\bar s` before those for q and k, to the type to which a forward pass rounds weights. It
takes D from the output, which is rounded, or, where scores are rounded, from weights and products:
then D and the sum of the weights are rounded to the type of the softmax.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np

from ...arrays.blocks import blocks
from ...arrays.library import Doubles
from .formats import Format
from .hardware import CutSum, allow, cut_error, split_error
from .head import scan_tile
from .roundings import (
    BIAS,
    CONSTANTS,
    RMS,
    WORST,
    Roundings,
    RowErrors,
    expect_loss,
    round_bound,
    sum_error,
    walk,
)
from .saved import (
    BLOCK_QUERIES,
    RUN_STEPS,
    BackwardHead,
    Saved,
    multiply_slope,
    share_tile,
    unscale_rows,
)
from .score_gradients import PairErrors, analyse_pairs, round_scaled, scaled_spacing
from .shares import sum_products

_TOKENS = BLOCK_QUERIES, 256  # queries and keys whose pairs are analysed at a time
_SURE_OF_NOISE = 3.0  # standard deviations of what is rounded
_BELOW_ALL = 2.0**-80  # of the sizes of a sum, which no float64 has beside it
_SURE_OF_GRADIENTS = 4.0  # standard deviations beyond which roundings are tied to each other


class _GradientSum:
    """Some rows of a gradient: sums over tokens, with what their law and bound are made of."""

    def __init__(
        self,
        backs: Sequence[tuple[BackwardHead, Saved]],
        roundings: Roundings,
        of: str,
        rows: slice,
        directions: Doubles | None = None,
    ) -> None:
        back, saved = backs[0]
        self.of, self.rows, self.roundings = of, rows, roundings
        self.scale = 1.0 if of == "dv" else back.head.scale
        # Equal tokens have equal errors: a sum of g of them has g times the variance of g others.
        copies = saved.key_copies if of == "dq" else saved.copies
        self.copies = float(np.max(copies, initial=1.0))
        rounded = roundings.weights if of == "dv" else roundings.d_scores
        self.dropped = rounded if rounded is not None and rounded.truncated else None
        shape = rows.stop - rows.start, back.terms(of).shape[-1]
        unit = None if rounded is None else roundings.unit
        self.cuts = None if unit is None else CutSum(unit, *shape)
        self.directions = np.zeros((shape[1], 0)) if directions is None else directions
        r = self.directions.shape[1]
        self.total, self.near, self.sizes, self.variance = (np.zeros(shape) for _ in range(4))
        self.shared = np.zeros((len(self.total), r, r))
        self.own, self.running, self.moved = (np.zeros(shape) for _ in range(3))
        self.flushed, self.known = np.zeros(shape), np.zeros(shape)
        self.rounded, self.again = np.zeros(shape), np.zeros(shape)  # by head, and sums of heads
        self.before: Any = (0.0, 0.0, 0.0)  # total, near and moved, of the heads before
        self.terms = self.heads = 0
        self.by_head = of != "dq" and roundings.by_head and len(backs) > 1
        # Squares of running sums have a part in variances, or in those of sums of rows that share
        # errors.
        shares = of != "dq" and not (roundings.delta_of_out and back.out is not None)
        self.walks = roundings.scores_matter or shares
        has_sinks = any(x.head.sink is not None for x, _ in backs)
        names = list_directions(of, back.head.softcap is not None, has_sinks)
        self.tangents = {x: np.zeros(shape) for x in names}  # derivatives to known defects

    def add_squares(self, variances: Doubles, y: Doubles) -> None:
        """Add squares of y (b, columns) with variances (rows, b), and products along directions."""
        self.variance += variances @ np.square(y)
        self.shared += sum_products(variances, self.directions.T @ y.T)

    def add_products(self, x: Doubles, y: Doubles) -> None:
        """Add products of two vectors of each row likewise, half of them each way."""
        self.variance += x * y
        x, y = x @ self.directions, y @ self.directions
        products = x[:, :, None] * (y[:, None, :] / 2)
        self.shared += products + np.swapaxes(products, 1, 2)

    def add(
        self,
        x: Doubles,
        near: Doubles,
        bound: Doubles,
        flushed: Doubles,
        y: Doubles,
        to: Format | None,
    ) -> None:
        """Add products of x (rows, b) with y (b, columns) to a sum that is rounded first."""
        if to is not None and self.terms:  # a running sum that is written after each block
            total, nearest, moved = self._since()
            self.own += np.square(scaled_spacing(to, total, self.scale)) / 12
            self.moved += scaled_spacing(to, np.abs(total) + moved, self.scale) / 2
            self.near += round_scaled(to, nearest, self.scale) - nearest
            self.restart()
        # Running sums matter only beside errors of scores; else all terms are one step.
        for at in blocks(0, len(y), RUN_STEPS if self.roundings.scores_matter else len(y)):
            last = self.total + x[:, at] @ y[at]
            if self.walks:
                squares = np.square(x[:, at]) @ np.square(y[at])
                lanes, steps = self.roundings.lanes, at.stop - at.start
                walked = walk(self.total, last, squares, steps, lanes)
                self.running += self.copies * (walked + squares)
            self.total = last
        sizes, tiny = np.abs(y), self.roundings.accumulate.tiny
        size = np.abs(x) @ sizes
        self.near += near @ y
        if self.dropped is not None:
            self.known -= expect_loss(self.dropped, x) @ y
        if self.cuts is not None:
            self.cuts.add(near, y)
        self.sizes += size
        lost = np.minimum(len(y) * tiny, size)  # if products below the smallest number become 0
        most = np.max(flushed, initial=0.0) * np.sum(sizes, 0)
        lost += most if np.all(most <= _BELOW_ALL * size) else flushed @ sizes
        self.flushed += lost
        self.moved += bound @ sizes + lost
        self.terms += len(y)

    def _since(self) -> list[Doubles]:
        """Return what the heads that are not closed have brought to the total, near and moved."""
        now = self.total, self.near, self.moved
        return [x - y for x, y in zip(now, self.before, strict=True)]

    def close_head(self, to: Format) -> None:
        r"""Round what one head brings, and the sum of it and those before if they are two or more.

        .. math:: \frac{1}{12} \sum_h h(\bar k_h)^2 \quad\text{and}\quad
            \frac{1}{12} \sum_{1 < h < H} h(\bar k_1 + \dots + \bar k_h)^2

        with the distance h of neighbouring numbers. Not all kernels round the sums.
        """
        total, near, moved = self._since()
        self.rounded += np.square(scaled_spacing(to, total, self.scale)) / 12
        self.moved += scaled_spacing(to, np.abs(total) + moved, self.scale) / 2
        self.near += round_scaled(to, near, self.scale) - near
        if self.heads > 1:
            earlier, _, off = self.before
            self.again += np.square(scaled_spacing(to, earlier, self.scale)) / 12
            self.moved += scaled_spacing(to, np.abs(earlier) + off, self.scale) / 2
        self.before = self.total.copy(), self.near.copy(), self.moved.copy()
        self.heads += 1

    def restart(self) -> None:
        """Begin another sum in the unit, that is added to those before."""
        if self.cuts is not None:
            self.cuts.restart()

    def add_pairs(
        self, x: PairErrors, back: BackwardHead, saved: Saved, i: slice, j: slice
    ) -> None:
        """Add what some queries and keys bring to it."""
        head, of, roundings = back.head, self.of, self.roundings
        y = back.terms(of)[j if of == "dq" else i]
        turn: Callable[[Doubles], Doubles] = np.asarray if of == "dq" else np.transpose
        numbers = x.s, x.near_s, x.s_bound, x.s_flushed
        if of == "dq":
            variances = _vary_queries(self, x, saved, i, y, saved.key_copies[j])
        elif of == "dk":
            variances = _vary_keys(x, saved, roundings, i)
        else:
            shared = (saved.scores_variance + saved.lse_variance)[i, None]
            variances = x.p_variance + x.p * x.p * (x.log_variance + shared)
            variances = saved.copies[i, None] * variances
            numbers = x.p, x.near_p, x.p_bound, x.p_flushed
        self.add_squares(turn(variances), y)
        # A running sum may be written after some tokens; a sink adds 0.
        to = None if roundings.parts is None or head.is_sink(j) else roundings.out
        terms, near, bound, flushed = map(turn, numbers)
        self.add(terms, near, bound, flushed, y, to)
        for name, steep in _list_tangents(x, back, saved, roundings, i, of, self.tangents):
            self.tangents[name] += turn(steep) @ y
        if of == "dk":  # of which each query has another D; for dq it is a factor
            d = multiply_slope(x.p, x.slope).T
            self.tangents["delta"] -= d @ (saved.delta[i, None] * y)
            self.known -= d @ (saved.delta_shift[i, None] * y)

    def end_head(self, saved: Saved) -> None:
        """Add what all tokens of a head have in common."""
        rows = self.rows
        if self.of == "dq":
            mean = saved.mean[rows]
            self.add_products(saved.delta_variance[rows, None] * mean, mean)
            # All terms of a query have one log normaliser: its error multiplies the sum.
            common = saved.lse_variance + saved.scores_variance
            self.add_products(common[rows, None] * self.total, self.total)
            self.tangents["delta"] -= saved.delta[rows, None] * mean
            self.known -= saved.delta_shift[rows, None] * mean
        if self.by_head and self.roundings.out is not None:
            self.close_head(self.roundings.out)


def list_directions(of: str, has_cap: bool, has_sinks: bool) -> list[str]:
    """Name the defects that have a derivative."""
    common = ["scale"] + ["lost sink"] * has_sinks
    return common if of == "dv" else [*common, "delta"] + ["cap"] * has_cap


def exact_gradient(
    backs: Sequence[tuple[BackwardHead, Saved]],
    of: str,
    rows: slice,
    thin: int = 1,
    to: Callable[[Doubles], Doubles] = np.asarray,
    step: int = _TOKENS[1],
) -> Doubles:
    """Compute the exact gradient of some queries or keys, or one whose running sums are rounded."""
    gradient = np.zeros((rows.stop - rows.start, backs[0][0].terms(of).shape[-1]))
    for back, saved in backs:
        head = back.head
        for at in blocks(0, head.keys if of == "dq" else len(head.q), step):
            at = slice(at.stop - -(-(at.stop - at.start) // thin), at.stop)
            i, j = (rows, at) if of == "dq" else (at, rows)
            tile = scan_tile(head, i, j)
            if tile is not None:
                p, _ = share_tile(tile, saved.lse[i])
                if of == "dv":
                    gradient = to(gradient + to(p).T @ back.d_out[i])
                    continue
                t = back.d_out[i] @ head.v[j].T
                s = to(p * (t - saved.delta[i, None]) * tile.slope)
                gradient = to(gradient + (s @ head.k[j] if of == "dq" else s.T @ head.q[i]))
    return gradient if of == "dv" else backs[0][0].head.scale * gradient


def list_sources(
    backs: Sequence[BackwardHead], roundings: Roundings, of: str, rows: slice
) -> list[Doubles]:
    """List what makes some rows of the gradient: rows with the same have the same roundings.

    Rows of dq whose derivatives are equal share the roundings of g . v, whatever their queries are.
    """
    head = backs[0].head
    k, v = head.k[: head.keys], head.v[: head.keys]
    if of != "dq":
        return [np.concatenate([k[rows], v[rows]], -1) if of == "dk" else k[rows]]
    q, d_out = head.q[rows], backs[0].d_out[rows]
    sources = [np.concatenate([q, d_out], -1)]
    if roundings.products_matter:
        values = np.full((len(d_out), 1), zlib.crc32(v.tobytes()), np.float64)
        sources.append(np.concatenate([unscale_rows(d_out), values], -1))
    return sources


def analyse_gradient(
    backs: Sequence[tuple[BackwardHead, Saved]],
    roundings: Roundings,
    of: str,
    rows: slice,
    directions: Doubles | None = None,
    worst: bool = False,
) -> RowErrors:
    """Say what a backward pass that rounds like this may give for some queries or keys.

    Several heads share keys and values; their gradients are sums over all of them. If directions
    are given, the covariances of each row along them are found, too.
    """
    cut = list(blocks(rows.start, rows.stop, BLOCK_QUERIES)) or [rows]
    parts = [_GradientSum(backs, roundings, of, i, directions) for i in cut]
    for part in parts:  # one after another: pairs of its rows with some tokens stay in the cache
        for back, saved in backs:
            _add_head(back, saved, roundings, [part], worst)
    return RowErrors.join([_close_sum(x) for x in parts])


def analyse_gradients(
    backs: Sequence[tuple[BackwardHead, Saved]], roundings: Roundings, names: Sequence[str]
) -> Iterator[tuple[str, int, slice, RowErrors]]:
    """Say the same of all rows of several gradients, of which each pair of tokens is analysed once.

    The gradients in queries come by head, with the number of this head; those in keys are sums over
    heads. Running sums must not be rounded after some tokens, which may be more or fewer than here.
    """
    size, tokens = _TOKENS
    cut = [(of, j) for of in names if of != "dq" for j in blocks(0, backs[0][0].head.keys, tokens)]
    of_keys = [_GradientSum(backs, roundings, of, j) for of, j in cut]
    for number, (back, saved) in enumerate(backs):
        queries = blocks(0, len(back.head.q), size) if "dq" in names else ()
        of_queries = [_GradientSum([(back, saved)], roundings, "dq", i) for i in queries]
        _add_head(back, saved, roundings, [*of_queries, *of_keys])
        yield from (("dq", number, x.rows, _close_sum(x)) for x in of_queries)
    yield from ((x.of, 0, x.rows, _close_sum(x)) for x in of_keys)


def _add_head(
    back: BackwardHead,
    saved: Saved,
    roundings: Roundings,
    parts: Sequence[_GradientSum],
    worst: bool = False,
) -> None:
    """Add the pairs of a head to rows of gradients; those of all that there are, or of one."""
    names, sizes = {x.of for x in parts}, roundings.parts or _TOKENS
    of = parts[0].of if len(names) == 1 else ""
    queries, keys = ([x.rows for x in parts] for _ in range(2))
    if of != "dq":  # no block has weights of two that were saved
        saved_blocks = blocks(0, len(back.head.q), BLOCK_QUERIES)
        queries = [i for x in saved_blocks for i in blocks(x.start, x.stop, sizes[0])]
    if of in ("dq", ""):
        keys = [*back.head.blocks(sizes[1])]
    for part in parts:
        part.restart()  # a unit adds the products of one head
    for i, j in product(queries, keys):
        x = analyse_pairs(back, saved, roundings, i, j, of)
        if x is None:
            continue
        x = x.with_known_digits(roundings) if worst else x
        for part in parts:
            if part.rows == (i if part.of == "dq" else j):
                part.add_pairs(x, back, saved, i, j)
    for part in parts:
        part.end_head(saved)


def _odds_without_sink(back: BackwardHead, saved: Saved, i: slice) -> Doubles:
    """Return what weights gain, over themselves, if the sink has no part in their sum."""
    if back.head.sink is None:
        return np.zeros((i.stop - i.start, 1))
    # 1 / (1 - p) - 1 for the sink's weight p = e^(sink - lse).
    odds = 1 / np.expm1(saved.lse[i, None] - back.head.sink)
    return np.where(np.isfinite(odds), odds, 0.0)


def _list_tangents(
    x: PairErrors,
    back: BackwardHead,
    saved: Saved,
    roundings: Roundings,
    i: slice,
    of: str,
    names: Collection[str],
) -> Iterator[tuple[str, Doubles]]:
    """List what weights or derivatives to scores gain: by the scale, a flat cap, a lost sink."""
    if of == "dv":
        yield "scale", x.p_scale
        if "lost sink" in names:
            yield "lost sink", x.p * _odds_without_sink(back, saved, i)
        return
    delta = saved.delta[i, None]
    yield "scale", x.s_scale
    if "cap" in names:
        yield "cap", x.p * (x.t - delta) * (1 - np.asarray(x.slope))
    if "lost sink" in names:  # D, too, if it is made of weights
        odds = _odds_without_sink(back, saved, i)
        more = 0.0 if roundings.delta_of_out else (1 + odds) * odds * delta
        yield "lost sink", (odds * (x.t - delta) - more) * x.p * x.slope


def _vary_queries(
    sum_: _GradientSum, x: PairErrors, saved: Saved, i: slice, k: Doubles, copies: Doubles
) -> Doubles:
    """Return variances of terms of dq; add those of D, if it is made of weights, to the sum."""
    roundings = sum_.roundings
    mean, apart = saved.mean[i], x.t - saved.delta[i, None]
    variances = copies * x.s_variance
    more: Doubles | float = x.p * x.p * x.t_variance
    for variance, factor in x.moves():
        moved = np.square(apart)
        moved *= variance
        moved += more
        moved *= copies
        more = 0.0
        variances += multiply_slope(moved, np.square(factor))
        if not roundings.delta_of_out:  # D moves with weights and products: k - mean, not k
            whole, part = np.sum(moved, -1, keepdims=True), (moved * factor) @ k
            sum_.add_products(whole * mean - 2 * part, mean)
    if roundings.kept:
        rounding = copies * x.p_variance
        sum_.add_squares(rounding * np.square(apart * x.slope), k)
        if not roundings.delta_of_out:
            both, again = rounding * x.t * apart * x.slope, rounding * x.t * x.t
            whole, part = np.sum(again, -1, keepdims=True), both @ k
            sum_.add_products(whole * mean - 2 * part, mean)
    return variances


def _vary_keys(x: PairErrors, saved: Saved, roundings: Roundings, i: slice) -> Doubles:
    """Return variances of terms of dk."""
    # All keys of a query share its normaliser and D, so rows of dk are not independent; here is the
    # variance of each. `variance_along` has those of sums over rows.
    apart = x.t - saved.delta[i, None]
    common, times = (saved.scores_variance + saved.lse_variance)[i, None], saved.products[i, None]
    products, shared = times * x.t_variance, times * saved.shared_variance[i, None]
    variances = np.square(apart)
    variances *= common if x.cap_variance is not None else x.log_variance + common
    variances += products
    variances += saved.delta_variance[i, None] + shared
    if not roundings.delta_of_out:
        # D is a sum of these weights and products, too: their own part in it cancels in part.
        variances += saved.moved_variance[i, None] - 2 * x.p * products
    for _ in range(2):
        variances *= x.p
    if roundings.kept:
        variances += x.p_variance * apart * apart
        if not roundings.delta_of_out:
            variances -= 2 * x.p_variance * x.p * x.t * apart
    variances = multiply_slope(variances, np.square(x.slope))
    variances += x.s_variance
    if x.cap_variance is not None:
        for variance, factor in x.moves():
            variances += variance * np.square(apart * factor)
    variances *= saved.copies[i, None]
    return np.maximum(variances, 0.0, out=variances)


def _close_sum(sum_: _GradientSum) -> RowErrors:
    """Multiply the sums by the scale, round them, and return their law."""
    tangents = sum_.tangents
    if sum_.of != "dv":  # the factor c before the sum, beside the scores
        tangents["scale"] = tangents["scale"] + sum_.total
    roundings, scale = sum_.roundings, sum_.scale
    unit = roundings.accumulate.unit
    variance = sum_.variance + sum_.own
    if roundings.scores_matter:
        variance = variance + (RMS * unit) ** 2 * (sum_.running + sum_.total * sum_.total)
    else:  # a trifle: each running sum taken as large as the last
        variance = variance + (RMS * unit * sum_.total) ** 2 * max(sum_.terms, 1) * sum_.copies
    total, near = scale * sum_.total, scale * sum_.near
    rest = scale * np.where(np.isfinite(sum_.known), sum_.known, 0.0)
    shift: Doubles | float = 0.0
    if sum_.cuts is not None:
        shift, variance = scale * sum_.cuts.shift, variance + sum_.cuts.variance
    variance = scale * scale * np.maximum(variance, 0.0)
    # Spacings by head are known, and need no WORST. Sums of heads are rounded by some kernels only:
    # no part of the standard deviation, but of what tests must allow.
    worst = WORST**2 * variance + scale * scale * (sum_.rounded + sum_.again)
    variance += scale * scale * sum_.rounded
    gamma = sum_error(roundings, sum_.terms, 2) + 2 * unit + cut_error(roundings.unit, sum_.terms)
    tiny = roundings.accumulate.tiny
    bound = np.minimum(np.abs(total), tiny) + abs(scale) * (
        sum_.moved + gamma * (sum_.sizes + sum_.moved)
    )
    most = (sum_.sizes + sum_.moved) * (1 + gamma)
    bound = (
        np.where(most > roundings.accumulate.largest, math.inf, bound)
        + np.abs(shift)
        + np.abs(rest)
    )
    # As for the output: where roundings to nearest add up to so much they are tied, and there is no
    # standard deviation.
    loose = ~(np.abs(near - total - rest) <= _SURE_OF_GRADIENTS * np.sqrt(variance))
    near = near + shift
    spacing = np.zeros_like(total)
    if roundings.out is not None:
        spacing = roundings.out.spacing(total + rest)
        # Where terms cancel, what is rounded is noise: its spacing is that of numbers as large.
        variance, worst = (
            x
            + np.square(roundings.out.spacing(np.maximum(np.abs(total + rest), y * np.sqrt(x))))
            / 12
            for x, y in ((variance, 1.0), (worst, _SURE_OF_NOISE))
        )
        bound, near = round_bound(roundings.out, total, bound), roundings.out.round(near)
    loose |= np.isinf(bound) | ~np.isfinite(near)
    near = np.where(loose, total + shift, near)
    std, least = (np.where(~loose & (x > 0), np.sqrt(x), math.inf) for x in (variance, worst))
    # What `variance_along` does not have: errors in one element only, if sums of rows need it.
    apart = (RMS * unit * scale) ** 2 * (sum_.running + sum_.total * sum_.total) + spacing**2 / 12
    apart += scale * scale * (sum_.rounded + sum_.again)
    # What the exponentials and the constants have in common.
    slack = abs(scale) * (roundings.exp * BIAS * sum_.sizes + CONSTANTS * np.abs(tangents["scale"]))
    slack = unit * (slack + CONSTANTS * np.abs(total))
    split = abs(scale) * sum(np.abs(x) for x in tangents.values())
    slack += split_error(roundings.score_unit) * (split + np.abs(total))
    slack += abs(scale) * sum_.flushed + np.where(np.abs(total) < tiny, np.abs(total), 0.0)
    slack += allow(roundings.unit, shift)
    none, steep = np.zeros(len(total)), {name: scale * x for name, x in tangents.items()}
    rows = (total, none, none, near, std, least, bound, none, none, none, spacing, slack, steep)
    shared = np.concatenate([sum_.variance, sum_.shared.reshape(len(total), -1)], -1)
    law = RowErrors(*rows, shared=scale**2 * shared, rest=rest, shift=shift)
    return law._replace(apart=apart) if sum_.walks else law
