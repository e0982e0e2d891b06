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
from collections.abc import Callable, Iterator, Sequence
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

_SUM_TOKENS = 256  # that are added at a time
_CACHED_ROWS = 128  # whose pairs with these are analysed at a time
_SURE_OF_NOISE = 3.0  # standard deviations of what is rounded
_SURE_OF_GRADIENTS = 4.0  # standard deviations beyond which roundings are tied to each other


class _GradientSum:
    """A sum of products over tokens, with what its law and bound are made of."""

    def __init__(
        self,
        rows: int,
        columns: int,
        roundings: Roundings,
        scale: float,
        copies: float,
        rounded: Format | None = None,
        directions: Doubles | None = None,
    ) -> None:
        self.roundings, self.scale = roundings, scale
        self.directions = np.zeros((columns, 0)) if directions is None else directions
        self.dropped = rounded if rounded is not None and rounded.truncated else None
        unit = None if rounded is None else roundings.unit
        self.copies = copies  # of a term, at most: they are rounded alike
        shape, r = (rows, columns), self.directions.shape[1]
        self.total, self.near, self.sizes, self.variance = (np.zeros(shape) for _ in range(4))
        self.shared = np.zeros((rows, r, r))
        self.own, self.running, self.moved = (np.zeros(shape) for _ in range(3))
        self.flushed, self.known = np.zeros(shape), np.zeros(shape)
        self.rounded, self.again = np.zeros(shape), np.zeros(shape)  # by head, and sums of heads
        self.before: Any = (0.0, 0.0, 0.0)  # total, near and moved, of the heads before
        self.terms = self.heads = 0
        self.walks = True  # whether squares of running sums are found
        self.cuts = None if unit is None else CutSum(unit, rows, columns)

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
        if flushed.any():
            lost += flushed @ sizes
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
    step: int = _SUM_TOKENS,
) -> Doubles:
    """Compute the exact gradient of some queries or keys, or one whose running sums are rounded."""
    gradient = np.zeros((rows.stop - rows.start, backs[0][0].count_columns(of)))
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


def variance_along(
    backs: Sequence[tuple[BackwardHead, Saved]], roundings: Roundings, of: str, w: Doubles
) -> Any:
    r"""Return the variances (...) of sums of w (..., m, columns) times errors of dk or dv.

    With :math:`y_{ij} = c\, q_i \cdot w_j` the sum for dk is that of :math:`\bar s_{ij} y_{ij}`, in
    which y is what values are for the output: one query moves its weights for all keys.
    """
    along = w.reshape(-1, *w.shape[-2:])
    total = np.zeros(len(along))
    for back, saved in backs:
        head = back.head
        rows = back.d_out if of == "dv" else head.scale * head.q
        unseen = ((0, len(head.k) - head.keys), (0, 0))
        columns = [np.pad(x, unseen).T for x in along]
        for i in blocks(0, len(head.q), BLOCK_QUERIES):
            means, moves = np.zeros((2, len(along), i.stop - i.start, 1))
            # Twice over the keys: the means of a row, which errors are about, need all of them.
            for j in head.blocks(_SUM_TOKENS):
                tile = scan_tile(head, i, j)
                if tile is not None:
                    p, _ = share_tile(tile, saved.lse[i])
                    s = p * (back.d_out[i] @ head.v[j].T - saved.delta[i, None])
                    for column, mean, moved in zip(columns, means, moves, strict=True):
                        y = rows[i] @ column[:, j] * (1.0 if of == "dv" else tile.slope)
                        mean += np.sum(p * y, -1, keepdims=True)
                        moved += np.sum(s * y, -1, keepdims=True)
            for j in head.blocks(_SUM_TOKENS):
                x = analyse_pairs(back, saved, roundings, i, j, of)
                if x is None:
                    continue
                for number, (mean, moved) in enumerate(zip(means, moves, strict=True)):
                    y, about = (
                        rows[i] @ columns[number][:, j],
                        0.0 if roundings.delta_of_out else mean,
                    )
                    if of == "dv":
                        variances = x.p * x.p * x.log_variance * np.square(y - about)
                        variances += x.p_variance * y * y
                    else:
                        variances = _variances_of_scores(x, y, saved, roundings, i, mean, moved)
                    total[number] += float(np.sum(saved.copies[i, None] * variances))
            # One error of a log normaliser, or of D, has a part in all terms of its query.
            common = np.square(means if of == "dv" else moves)[..., 0]
            shared = saved.lse_variance[i]
            if roundings.delta_of_out:
                shared = shared + saved.scores_variance[i]
            total += np.sum(saved.copies[i] * shared * common, -1)
            if of == "dk":
                variance_of_delta = saved.copies[i] * saved.delta_variance[i]
                total += np.sum(variance_of_delta * np.square(means)[..., 0], -1)
    return total.reshape(w.shape[:-2])[()]


def _variances_of_scores(
    x: PairErrors,
    y: Doubles,
    saved: Saved,
    roundings: Roundings,
    i: slice,
    mean: Doubles,
    moved: Doubles,
) -> Doubles:
    """Return the variances of derivatives to scores times y, with what they do to D."""
    # An error d of the log of p_j moves p_j (t_j - D) y_j, and, if D and the normaliser are sums of
    # these weights, both of them: by p_j d [(t_j - D) (y_j - mean) - moved] in all, with mean and
    # moved the sums of p y and s y. An error d of t_j moves it by p_j d (y_j - mean).
    about, off = (0.0, 0.0) if roundings.delta_of_out else (mean, moved)
    apart = x.t - saved.delta[i, None]
    variances = x.s_variance * y * y
    for variance, factor in x.moves():
        variances += variance * np.square(apart * (factor * y - about) - off)
    products = saved.products[i, None] * x.t_variance
    variances += x.p * x.p * products * np.square(x.slope * y - about)
    if roundings.kept:  # rounded after the division: the normaliser stays, D moves by t_j
        variances += x.p_variance * np.square(apart * x.slope * y - x.t * about)
    return variances


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
    cut = list(blocks(rows.start, rows.stop, _CACHED_ROWS)) or [rows]
    sums = (_sum_rows(backs, roundings, of, i, directions, worst) for i in cut)
    return RowErrors.join([_close_sum(*x) for x in sums])


def gradient_covariance(
    law: RowErrors, directions: Doubles, worst: bool = False
) -> tuple[Doubles, Doubles]:
    r"""Return the covariances along directions (columns, r) of a law that was found with them.

    They are (rows, r, r), in two parts. Errors of weights and products move all columns of a row,
    by the tokens: where a variance is a sum of :math:`\sigma_{ij}^2 k_{jc}^2`, the covariance is
    that of :math:`\sigma_{ij}^2 k_j k_j^T`. What else the variances have is each column's own.
    """
    found, r = (WORST if worst else 1.0) ** 2 * np.asarray(law.shared), directions.shape[1]
    variances, together = np.split(found, [len(directions)], -1)
    return together.reshape(-1, r, r), law.own_covariance(variances, directions, worst)


def list_terms(backs: Sequence[BackwardHead], of: str) -> Doubles:
    """List what rows of the gradient are sums of: keys, queries, or derivatives to the output."""
    tokens = [{"dq": x.head.k, "dk": x.head.q, "dv": x.d_out}[of] for x in backs]
    return np.concatenate(tokens)


def _sum_rows(
    backs: Sequence[tuple[BackwardHead, Saved]],
    roundings: Roundings,
    of: str,
    rows: slice,
    directions: Doubles | None = None,
    worst: bool = False,
) -> tuple[_GradientSum, dict[str, Doubles]]:
    """Sum what so few rows are made of that pairs of them with some tokens are held in the cache.

    Return also the derivatives of the sum to known defects.
    """
    scale = 1.0 if of == "dv" else backs[0][0].head.scale
    columns = backs[0][0].count_columns(of)
    copies = backs[0][1].key_copies if of == "dq" else backs[0][1].copies
    # Equal tokens have equal errors: a sum of g of them has g times the variance of g others.
    most = float(np.max(copies, initial=1.0))
    rounded = roundings.weights if of == "dv" else roundings.d_scores
    shape = rows.stop - rows.start, columns
    sum_ = _GradientSum(*shape, roundings, scale, most, rounded, directions)
    # They have a part in variances, or in those of sums of rows that share errors.
    shares = of != "dq" and not (roundings.delta_of_out and backs[0][0].out is not None)
    sum_.walks = roundings.scores_matter or shares
    has_sinks = any(back.head.sink is not None for back, _ in backs)
    names = list_directions(of, backs[0][0].head.softcap is not None, has_sinks)
    tangents = {x: np.zeros_like(sum_.total) for x in names}
    size, to = _SUM_TOKENS, None  # tokens of a block, and what the sum is rounded to after each
    if roundings.parts is not None:
        size, to = roundings.parts[of == "dq"], roundings.out

    def pairs(back: BackwardHead, saved: Saved, i: slice, j: slice) -> PairErrors | None:
        x = analyse_pairs(back, saved, roundings, i, j, of)
        return x.with_known_digits(roundings) if worst and x is not None else x

    for back, saved in backs:
        head = back.head
        sum_.restart()  # a unit adds the products of one head
        if of == "dq":
            for j in head.blocks(size):
                x = pairs(back, saved, rows, j)
                if x is not None:
                    rounded = None if head.is_sink(j) else to  # a sink adds 0
                    _add_to_queries(sum_, x, saved, rows, head.k[j], copies[j], rounded)
                    for name, y in _list_tangents(x, back, saved, roundings, rows, names):
                        tangents[name] += y @ head.k[j]
            mean, d = saved.mean[rows], saved.delta[rows, None]
            sum_.add_products(saved.delta_variance[rows, None] * mean, mean)
            # All terms of a query have one log normaliser: its error multiplies the sum.
            common = saved.lse_variance + saved.scores_variance
            sum_.add_products(common[rows, None] * sum_.total, sum_.total)
            tangents["delta"] -= d * mean
            sum_.known -= saved.delta_shift[rows, None] * mean
        else:
            saved_blocks = blocks(0, len(head.q), BLOCK_QUERIES)  # no block has weights of two
            for i in (y for x in saved_blocks for y in blocks(x.start, x.stop, size)):
                x = pairs(back, saved, i, rows)
                if x is not None:
                    (_add_to_keys if of == "dk" else _add_to_values)(sum_, x, back, saved, i, to)
                    if of == "dv":
                        tangents["scale"] += x.p_scale.T @ back.d_out[i]
                        if has_sinks:
                            odds = _odds_without_sink(back, saved, i)
                            tangents["lost sink"] += (x.p * odds).T @ back.d_out[i]
                    else:
                        d = multiply_slope(x.p, x.slope).T
                        tangents["delta"] -= d @ (saved.delta[i, None] * head.q[i])
                        sum_.known -= d @ (saved.delta_shift[i, None] * head.q[i])
                        for name, y in _list_tangents(x, back, saved, roundings, i, names):
                            tangents[name] += y.T @ head.q[i]
            if roundings.by_head and roundings.out is not None and len(backs) > 1:
                sum_.close_head(roundings.out)
    if of != "dv":  # the factor c before the sum, beside the scores
        tangents["scale"] += sum_.total
    return sum_, tangents


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
    names: Sequence[str],
) -> Iterator[tuple[str, Doubles]]:
    """List what derivatives to scores gain: by the scale, a cap of no slope, and a lost sink."""
    delta = saved.delta[i, None]
    yield "scale", x.s_scale
    if "cap" in names:
        yield "cap", x.p * (x.t - delta) * (1 - np.asarray(x.slope))
    if "lost sink" in names:  # D, too, if it is made of weights
        odds = _odds_without_sink(back, saved, i)
        more = 0.0 if roundings.delta_of_out else (1 + odds) * odds * delta
        yield "lost sink", (odds * (x.t - delta) - more) * x.p * x.slope


def _add_to_queries(
    sum_: _GradientSum,
    x: PairErrors,
    saved: Saved,
    i: slice,
    k: Doubles,
    copies: Doubles,
    to: Format | None,
) -> None:
    """Add errors of weights, and of D if it is made of them; keys may have copies."""
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
    sum_.add_squares(variances, k)
    sum_.add(x.s, x.near_s, x.s_bound, x.s_flushed, k, to)


def _add_to_keys(
    sum_: _GradientSum, x: PairErrors, back: BackwardHead, saved: Saved, i: slice, to: Format | None
) -> None:
    q, roundings = back.head.q[i], sum_.roundings
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
    sum_.add_squares(np.maximum(variances, 0.0, out=variances).T, q)
    sum_.add(x.s.T, x.near_s.T, x.s_bound.T, x.s_flushed.T, q, to)


def _add_to_values(
    sum_: _GradientSum, x: PairErrors, back: BackwardHead, saved: Saved, i: slice, to: Format | None
) -> None:
    g = back.d_out[i]
    shared = (saved.scores_variance + saved.lse_variance)[i, None]
    variances = x.p_variance + x.p * x.p * (x.log_variance + shared)
    sum_.add_squares((saved.copies[i, None] * variances).T, g)
    sum_.add(x.p.T, x.near_p.T, x.p_bound.T, x.p_flushed.T, g, to)


def _close_sum(sum_: _GradientSum, tangents: dict[str, Doubles]) -> RowErrors:
    """Multiply the sums by the scale, round them, and return their law."""
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
            x + np.square(roundings.out.spacing(np.hypot(total + rest, y * np.sqrt(x)))) / 12
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
