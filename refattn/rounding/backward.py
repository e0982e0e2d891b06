r"""The law and the bound of the rounding errors of the gradients of softmax attention.

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
takes D from the output, which is rounded, or, where scores are rounded, from weights and products.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..arrays.blocks import blocks
from ..arrays.library import Doubles
from . import softmax
from .formats import Format
from .softmax import BIAS, CONSTANTS, RMS, WORST, Head, Kernel, Rows

__all__ = [
    "Backward",
    "Saved",
    "analyse",
    "directions",
    "exact",
    "given",
    "prepare",
    "variance_along",
]


_QUERIES = 256  # of a block
_TOKENS = 256  # that are added at a time
_STEPS = 16  # tokens between running sums that are known, if they matter
_SURE = 4.0  # standard deviations beyond which roundings are tied to each other


class Backward(NamedTuple):
    """A head, the derivative to its output, and the output that the backward pass is given."""

    head: Head
    d_out: Doubles
    out: Doubles | None


class Saved(NamedTuple):
    """What is known of the queries of a head before gradients are summed.

    Attributes
    ----------
    lse, top, delta : arrays, (n,)
        Log normalisers, largest scores and D, exact.
    near_delta : array, (n,)
        D as roundings to nearest make it.
    delta_variance, shared_variance, delta_bound : arrays, (n,)
        Of the sums of D, of what weights and products bring to it, and of all.
    scores_variance, moved_variance : arrays, (n,)
        Of the sums over keys of p times errors of scores, and of these times t - D.
    lse_variance, lse_bound : arrays, (n,)
        Of log normalisers.
    logit, moved_logit : arrays, (n,)
        Weighted means of what the log of the scale makes of scores, and of it times t - D.
    copies, key_copies : arrays, (n,) and (m,)
        How many queries, and keys, are the same: their weights have the same errors.
    products : array, (n,)
        How many times more queries, at most, have the same errors of products g . v.
    mean : array, (n, d)
        Weighted means of the keys, times the slope of the cap.
    own : list
        Weights with the roundings of the profile, of each block of queries.
    """

    lse: Doubles
    top: Doubles
    delta: Doubles
    near_delta: Doubles
    delta_variance: Doubles
    shared_variance: Doubles
    delta_bound: Doubles
    scores_variance: Doubles
    moved_variance: Doubles
    lse_variance: Doubles
    lse_bound: Doubles
    logit: Doubles
    moved_logit: Doubles
    copies: Doubles
    key_copies: Doubles
    products: Doubles
    mean: Doubles
    own: list[softmax.Own]


class _Pairs(NamedTuple):
    """Queries and keys, (queries, keys) each.

    Attributes
    ----------
    p, t, s : arrays
        Weights, products of g and v, and derivatives to the scores before the cap.
    slope, bent : arrays
        Of the cap; and what its product with the weight changes by, over the weight, with the
        capped score.
    p_scale, s_scale : arrays
        What a change of the logarithm of the scale makes of p and s, by the scores.
    log_variance, cap_variance : arrays
        Relative variance of a weight before it is rounded, and the part that bends the slope of a
        cap, if there is one.
    p_variance, t_variance, s_variance : arrays
        Of the roundings of each.
    near_p, near_s : arrays
        As roundings to nearest make them.
    p_bound, s_bound : arrays
        What errors do not exceed.
    p_flushed, s_flushed : arrays
        What is lost where numbers below the smallest normal one are flushed to 0; and what errors
        of slopes may have in common.
    """

    p: Doubles
    t: Doubles
    s: Doubles
    slope: Doubles | float
    bent: Doubles | float
    p_scale: Doubles
    s_scale: Doubles
    log_variance: Doubles
    cap_variance: Doubles | None
    p_variance: Doubles
    t_variance: Doubles
    s_variance: Doubles
    near_p: Doubles
    near_s: Doubles
    p_bound: Doubles
    s_bound: Doubles
    p_flushed: Doubles
    s_flushed: Doubles

    def moves(self) -> Iterator[tuple[Doubles, Doubles | float]]:
        """Variances of weights before they are rounded, and what these move in place of slopes."""
        size = self.p * self.p
        if self.cap_variance is None:
            yield size * self.log_variance, self.slope
        else:
            yield size * (self.log_variance - self.cap_variance), self.slope
            yield size * self.cap_variance, self.bent


def _spacing(to: Format, x: Doubles, scale: float) -> Doubles:
    """Distance of the numbers that x may become if it is rounded after a multiplication."""
    if scale == 0:
        return np.zeros_like(x)
    found: Doubles = to.spacing(scale * x) / abs(scale)
    return found


def _round(to: Format, x: Doubles, scale: float) -> Doubles:
    """Round to nearest after a multiplication, which is undone."""
    return x if scale == 0 else to.round(scale * x) / scale


def _gamma(terms: float, kernel: Kernel) -> float:
    """Largest relative error of a sum of so many terms that is rounded twice more."""
    return softmax.gamma(kernel, terms, 2)


def _most(p: Doubles, logs: Doubles, epsilon: Doubles) -> Doubles:
    """How far weights may move if their logarithms do by epsilon."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.where(p > 0, p * np.expm1(epsilon), np.exp(logs + epsilon))


def _shares(tile: softmax.Tile, lse: Doubles) -> tuple[Doubles, Doubles]:
    """Weights, and their logs."""
    logs = np.minimum(tile.scores - np.where(np.isfinite(lse), lse, math.inf)[:, None], 0.0)
    if tile.visible is not None:
        logs = np.where(tile.visible, logs, -math.inf)
    return np.exp(logs), logs


def _gap(tile: softmax.Tile, kernel: Kernel, lse: Doubles, top: Doubles) -> Doubles:
    """Arguments of the exponentials: differences to the log normaliser, or to the largest score."""
    least = (lse if kernel.delta_of_out else top)[:, None]
    seen = np.isfinite(least) if tile.visible is None else tile.visible
    return np.where(seen, np.minimum(tile.scores - least, 0.0), 0.0)


def _products(back: Backward, kernel: Kernel, i: slice, j: slice) -> tuple[Any, Any, Any]:
    """Products g . v, their variance but for a last rounding, and their bound."""
    g, v = back.d_out[i], back.head.v[j]
    t = g @ v.T
    d_v = v.shape[-1]
    sizes = np.sqrt(np.sum(g * g, -1))[:, None] * np.sqrt(np.sum(v * v, -1))
    bound = _gamma(d_v, kernel) * sizes
    # Of a difference of nearly equal numbers all the rest is these.
    variance: Any = np.zeros_like(t)
    run = np.zeros_like(t)
    for at in blocks(0, d_v, _STEPS if kernel.scores_matter else d_v):
        last = run + g[:, at] @ v[:, at].T
        squares = np.square(g[:, at]) @ np.square(v[:, at]).T
        steps = at.stop - at.start
        variance += softmax.walk(run, last, squares, steps, kernel.lanes) + squares
        run = last
    variance = (RMS * kernel.accumulate.unit) ** 2 * variance
    bound = bound + d_v * kernel.accumulate.tiny
    bound = np.where(sizes > kernel.accumulate.largest, math.inf, bound)
    if kernel.d_weights is not None:
        variance = variance + np.square(kernel.d_weights.spacing(t)) / 12
        most = np.abs(t) + bound
        bound = bound + kernel.d_weights.spacing(most) / 2
        bound = np.where(most > kernel.d_weights.largest, math.inf, bound)
    return t, variance, bound


def prepare(back: Backward, kernel: Kernel) -> Saved:
    """Look at all pairs of a head once."""
    head, n = back.head, back.head.q.shape[0]
    counts = {"copies": _copies(head.q), "key_copies": _copies(head.k)}
    counts["products"] = np.maximum(_copies(_unscaled(back.d_out)) / counts["copies"], 1.0)
    names = [x for x in Saved._fields if x not in (*counts, "mean", "own")]
    found = {x: np.zeros(n) for x in names}
    mean, own_weights = np.zeros(head.q.shape), []
    for i in blocks(0, n, _QUERIES):
        exact = softmax.attend(head, i, None)
        own = softmax.Own(head, kernel, i, exact)
        own_weights.append(own)
        delta = np.sum(back.d_out[i] * exact.out, -1)
        spread, log_variance, moved, near, variance, shared, bound, run = np.zeros(
            (8, i.stop - i.start)
        )
        logit, moved_logit, sizes = np.zeros((3, i.stop - i.start))
        if kernel.delta_of_out:
            near, variance, bound = _of_output(back, kernel, i)
        for tile in softmax.tiles(head, i, _QUERIES):
            j = tile.keys
            p, logs = _shares(tile, exact.lse)
            finite = _gap(tile, kernel, exact.lse, exact.top)
            mean[i] += (p * tile.slope) @ head.k[j]
            noise = p * p * softmax.relative_variance(head, kernel, tile, i, finite)
            epsilon = softmax.largest_error(head, kernel, tile, i, finite)
            most = _most(p, logs, epsilon)
            spread += np.sum(most, -1)
            t, t_variance, t_bound = _products(back, kernel, i, j)
            apart = t - delta[:, None]
            log_variance += np.sum(noise, -1)
            moved += np.sum(noise * apart * apart, -1)
            risen = tile.logits * tile.slope
            logit += np.sum(p * risen, -1)
            moved_logit += np.sum(p * apart * risen, -1)
            if not kernel.delta_of_out:
                near_t = t if kernel.d_weights is None else kernel.d_weights.round(t)
                near += np.sum(own.weights(tile, rounded=kernel.kept) * near_t, -1)
                shared += np.sum(p * p * t_variance, -1)
                variance += (RMS * kernel.accumulate.unit) ** 2 * _running(p * t, run)
                run = run + np.sum(p * t, -1)
                width: Any = 0.0
                if kernel.kept:
                    assert kernel.weights is not None
                    rounding = np.square(kernel.weights.spacing(p)) / 12 * (p > 0)
                    shared += np.sum(rounding * t * t, -1)
                    width = kernel.weights.unit * (p + most) + kernel.weights.spacing(0.0)
                bound += np.sum((p + most + width) * t_bound + (most + width) * np.abs(t), -1)
                sizes += np.sum(p * np.abs(t), -1)
        unit, gamma = kernel.accumulate.unit, _gamma(len(head.k), kernel)
        size = (
            np.where(np.isfinite(exact.lse), np.abs(exact.lse), 0.0)
            + 1
            + math.log(max(1, len(head.k)))
        )
        lse_bound = np.log1p(spread) + (gamma + 4 * unit * size)
        if not kernel.delta_of_out:  # of its sum, and of the normaliser, which moves all weights
            for factor in (gamma, np.expm1(lse_bound)):
                bound += factor * (sizes + bound)
        row = {
            "lse": exact.lse,
            "top": exact.top,
            "delta": delta,
            "near_delta": near,
            "logit": logit,
            "moved_logit": moved_logit,
            "delta_variance": variance,
            "shared_variance": shared,
            "delta_bound": bound,
            "scores_variance": log_variance,
            "moved_variance": moved,
            "lse_variance": (RMS * unit * (size if kernel.delta_of_out else 2.0)) ** 2,
            "lse_bound": lse_bound,
        }
        for name in names:
            found[name][i] = row[name]
    return Saved(**found, **counts, mean=mean, own=own_weights)


def _unscaled(x: Doubles) -> Doubles:
    """Divide rows by the sign and power of 2 of their first number: roundings stay the same."""
    if not x.size:
        return x
    first = np.take_along_axis(x, np.argmax(x != 0, -1)[:, None], -1)
    return x * np.copysign(np.ldexp(1.0, -np.frexp(first)[1]), first)


def _copies(x: Doubles) -> Doubles:
    """How often each row is there."""
    _, which, counts = np.unique(x, axis=0, return_inverse=True, return_counts=True)
    found: Doubles = counts[which.reshape(-1)].astype(np.float64)
    return found


def _running(x: Doubles, first: Doubles | float = 0.0) -> Doubles:
    """Sum of the squares of terms and of their running sums, along the last axis."""
    sums = np.cumsum(x, -1) + (first if isinstance(first, float) else first[:, None])
    found: Doubles = np.sum(x * x + sums * sums, -1)
    return found


def _of_output(back: Backward, kernel: Kernel, i: slice) -> tuple[Doubles, Doubles, Doubles]:
    """D of an output: as roundings to nearest make it, variance and bound of the rest."""
    g, head = back.d_out[i], back.head
    rows = softmax.analyse(head, kernel, i)
    if back.out is None:
        known = np.where(np.isfinite(rows.std), rows.std, rows.bound)
        near, variance = np.sum(g * rows.nearest, -1), np.sum(np.square(g * known), -1)
        bound = np.sum(np.abs(g) * rows.bound, -1)
        out = rows.nearest
    else:
        out = back.out[i]
        near, variance = np.sum(g * out, -1), np.zeros(len(g))
        bound = np.abs(np.sum(g * (out - rows.out), -1))
        bound += np.sum(np.abs(g) * rows.bound, -1)  # where another was read, not yet rounded
    sizes = np.sum(np.abs(g * out), -1)
    unit, d_v = kernel.accumulate.unit, g.shape[-1]
    variance = variance + (RMS * unit) ** 2 * _running(g * out)
    return near, variance, bound + _gamma(d_v, kernel) * sizes


def _pairs(back: Backward, saved: Saved, kernel: Kernel, i: slice, j: slice) -> _Pairs | None:
    """All of some queries and keys; None if no query sees one."""
    head = back.head
    tile = softmax.tile_of(head, i, j)
    if tile is None:
        return None
    p, logs = _shares(tile, saved.lse[i])
    finite = _gap(tile, kernel, saved.lse[i], saved.top[i])
    relative = softmax.relative_variance(head, kernel, tile, i, finite)
    t, t_variance, t_bound = _products(back, kernel, i, j)
    apart = t - saved.delta[i, None]
    s = p * apart
    unit = kernel.accumulate.unit
    epsilon = softmax.largest_error(head, kernel, tile, i, finite) + saved.lse_bound[i, None]
    p_bound = _most(p, logs, epsilon)
    own = saved.own[i.start // _QUERIES].part(i)
    raw = own.weights(tile, rounded=False)
    near_p, p_variance, rounded_bound = raw, np.zeros_like(p), p_bound
    if kernel.weights is not None:
        near_p = kernel.weights.round(raw)
        p_variance = np.where(p > 0, np.square(kernel.weights.spacing(p)) / 12, 0.0)
        rounded_bound = p_bound + kernel.weights.unit * (p + p_bound) + kernel.weights.spacing(0.0)
    used_bound = rounded_bound if kernel.kept else p_bound
    near_t = t if kernel.d_weights is None else kernel.d_weights.round(t)
    near_s = (near_p if kernel.kept else raw) * (near_t - saved.near_delta[i, None])
    off = t_bound + np.abs(saved.delta_bound[i, None])
    s_bound = (p + used_bound) * off + used_bound * np.abs(apart)
    s_bound = s_bound * (1 + 8 * unit) + 8 * unit * np.abs(s)
    # Of the product, and of the difference: where it cancels, nothing else is left.
    s_variance = (RMS * unit * p) ** 2 * (np.square(t) + np.square(saved.delta[i, None]))
    found = _Derivative(s, near_s, s_variance, s_bound)
    to, (before, after) = kernel.d_scores, _roundings(head, kernel)
    if to is not None:
        for by in before:
            found = found.rounded(to, by)
    if head.softcap is not None:
        most = softmax.cap_error(head, kernel, tile, i, finite)
        found = found.times(tile, own.slope(tile), most, unit)
    if to is not None:
        for by in after:
            found = found.rounded(to, by)
    s = found.s
    hidden, tiny = p == 0, kernel.accumulate.tiny
    p_flushed = np.where(p < tiny, p, 0.0)
    s_flushed = np.where(np.abs(s) < tiny, np.abs(s), 0.0) + p_flushed * np.abs(apart)
    s_flushed += 2 * back.d_out.shape[-1] * tiny * p
    # A tanh that is 1, its errors of one sign, and its square, which rounds down: u in common.
    s_flushed += unit * p * np.abs(apart) * np.square(tile.ratio)
    turned = 0.0 if head.softcap is None else 2 * tile.ratio / head.softcap
    risen = tile.logits * tile.slope
    p_scale = p * (risen - saved.logit[i, None])
    s_scale = (p_scale * apart - p * saved.moved_logit[i, None]) * tile.slope
    return _Pairs(
        p,
        t,
        s,
        tile.slope,
        tile.slope - turned,
        p_scale,
        s_scale - p * apart * turned * risen,
        relative,
        None if head.softcap is None else softmax.cap_variance(head, kernel, tile, i),
        p_variance,
        np.where(hidden, 0.0, t_variance),
        np.where(hidden, 0.0, found.variance),
        np.where(hidden, 0.0, near_p),
        np.where(hidden, 0.0, found.near),
        rounded_bound + p_flushed,
        found.bound + s_flushed,
        p_flushed,
        s_flushed,
    )


class _Derivative(NamedTuple):
    """Derivatives to scores: exact, as roundings to nearest make them, variance and bound."""

    s: Doubles
    near: Doubles
    variance: Doubles
    bound: Doubles

    def rounded(self, to: Format, by: float) -> _Derivative:
        """Rounded after a multiplication, which is undone."""
        most = np.abs(self.s) + self.bound
        variance = np.where(self.s != 0, np.square(_spacing(to, self.s, by)) / 12, 0.0)
        bound = self.bound + _spacing(to, most, by) / 2
        bound = np.where(abs(by) * most > to.largest, math.inf, bound)
        return _Derivative(self.s, _round(to, self.near, by), self.variance + variance, bound)

    def times(
        self, tile: softmax.Tile, near: Doubles | float, most: Doubles, unit: float
    ) -> _Derivative:
        """Times the slope of the cap, of which roundings to nearest and the largest error are."""
        slope, ratio = tile.slope, np.square(tile.ratio)
        rounding = (RMS * unit) ** 2 * (9 * np.square(ratio) + 2 * np.square(slope))
        variance = self.variance * np.square(slope) + np.square(self.s) * rounding
        bound = (self.bound * (slope + most) + np.abs(self.s) * most) * (1 + 4 * unit)
        bound = np.where(self.bound < math.inf, bound + 4 * unit * np.abs(self.s * slope), math.inf)
        return _Derivative(self.s * slope, self.near * near, variance, bound)


def _roundings(head: Head, kernel: Kernel) -> tuple[list[float], list[float]]:
    """By what derivatives to scores are multiplied when they are rounded, before the slope, after.

    Once, before a product with queries or keys. Step by step, arrays are multiplied by the cap, the
    slope, and the scale, and divided by the cap.
    """
    cap = head.softcap
    if not kernel.kept:
        return ([], [1.0]) if cap is not None else ([1.0], [])
    after = [] if softmax.is_power_of_two(head.scale) else [head.scale]
    if cap is None:
        return [1.0], after
    if softmax.is_power_of_two(cap):
        return [1.0], [1.0, *after]
    return [1.0, cap], [cap, 1.0, *after]


class _Sum:
    """A sum of products over tokens, with what its law and bound are made of."""

    def __init__(
        self, rows: int, columns: int, kernel: Kernel, scale: float, copies: float
    ) -> None:
        self.kernel, self.scale = kernel, scale
        self.copies = copies  # of a term, at most: they are rounded alike
        shape = rows, columns
        self.total, self.near, self.sizes = (np.zeros(shape) for _ in range(3))
        self.variance, self.running, self.moved = (np.zeros(shape) for _ in range(3))
        self.flushed = np.zeros(shape)
        self.terms = 0

    def add(
        self,
        x: Doubles,
        near: Doubles,
        bound: Doubles,
        flushed: Doubles,
        y: Doubles,
        to: Format | None,
    ) -> None:
        """Products of x (rows, b) with y (b, columns), added to a sum that is rounded first."""
        if to is not None and self.terms:
            self.variance += np.square(_spacing(to, self.total, self.scale)) / 12
            self.moved += _spacing(to, np.abs(self.total) + self.moved, self.scale) / 2
            self.near = _round(to, self.near, self.scale)
        for at in blocks(0, len(y), _STEPS if self.kernel.scores_matter else len(y)):
            last = self.total + x[:, at] @ y[at]
            squares = np.square(x[:, at]) @ np.square(y[at])
            lanes, steps = self.kernel.lanes, at.stop - at.start
            walked = softmax.walk(self.total, last, squares, steps, lanes)
            self.running += self.copies * (walked + squares)
            self.total = last
        sizes, tiny = np.abs(y), self.kernel.accumulate.tiny
        self.near += near @ y
        self.sizes += np.abs(x) @ sizes
        lost = flushed @ sizes + np.minimum(len(y) * tiny, np.abs(x) @ sizes)
        self.flushed += lost
        self.moved += bound @ sizes + lost
        self.terms += len(y)


def directions(of: str, has_cap: bool, has_sinks: bool) -> list[str]:
    """Names of defects that have a derivative."""
    common = ["scale"] + ["lost sink"] * has_sinks
    return common if of == "dv" else [*common, "delta"] + ["cap"] * has_cap


def exact(backs: Sequence[tuple[Backward, Saved]], of: str, rows: slice) -> Doubles:
    """The exact gradient of some queries or keys."""
    found = np.zeros((rows.stop - rows.start, _columns(backs[0][0], of)))
    for back, saved in backs:
        head = back.head
        for at in blocks(0, head.keys if of == "dq" else len(head.q), _TOKENS):
            i, j = (rows, at) if of == "dq" else (at, rows)
            tile = softmax.tile_of(head, i, j)
            if tile is not None:
                p, _ = _shares(tile, saved.lse[i])
                if of == "dv":
                    found += p.T @ back.d_out[i]
                    continue
                t = back.d_out[i] @ head.v[j].T
                s = head.scale * p * (t - saved.delta[i, None]) * tile.slope
                found += s @ head.k[j] if of == "dq" else s.T @ head.q[i]
    return found


def given(backs: Sequence[Backward], kernel: Kernel, of: str, rows: slice) -> list[Doubles]:
    """What makes some rows of the gradient: rows with the same have the same roundings.

    Rows of dq whose derivatives are equal share the roundings of g . v, whatever their queries are.
    """
    head = backs[0].head
    k, v = head.k[: head.keys], head.v[: head.keys]
    if of != "dq":
        return [np.concatenate([k[rows], v[rows]], -1) if of == "dk" else k[rows]]
    q, d_out = head.q[rows], backs[0].d_out[rows]
    found = [np.concatenate([q, d_out], -1)]
    if kernel.products_matter:
        values = np.full((len(d_out), 1), zlib.crc32(v.tobytes()), np.float64)
        found.append(np.concatenate([_unscaled(d_out), values], -1))
    return found


def variance_along(
    backs: Sequence[tuple[Backward, Saved]], kernel: Kernel, of: str, w: Doubles
) -> float:
    r"""Variance of the sum over keys and columns of w times errors of dk or dv, w (m, columns).

    With :math:`y_{ij} = c\, q_i \cdot w_j` the sum for dk is that of :math:`\bar s_{ij} y_{ij}`, in
    which y is what values are for the output: one query moves its weights for all keys.
    """
    total = 0.0
    for back, saved in backs:
        head = back.head
        rows = back.d_out if of == "dv" else head.scale * head.q
        columns = np.concatenate([w, np.zeros((len(head.k) - len(w), w.shape[-1]))]).T
        for i in blocks(0, len(head.q), _QUERIES):
            mean, moved = np.zeros((2, i.stop - i.start, 1))
            for j in head.blocks(_TOKENS):
                tile = softmax.tile_of(head, i, j)
                if tile is not None:
                    p, _ = _shares(tile, saved.lse[i])
                    y = rows[i] @ columns[:, j] * (1.0 if of == "dv" else tile.slope)
                    s = p * (back.d_out[i] @ head.v[j].T - saved.delta[i, None])
                    mean += np.sum(p * y, -1, keepdims=True)
                    moved += np.sum(s * y, -1, keepdims=True)
            for j in head.blocks(_TOKENS):
                x = _pairs(back, saved, kernel, i, j)
                if x is None:
                    continue
                y, size = rows[i] @ columns[:, j], x.p * x.p
                apart = x.t - saved.delta[i, None]
                about = 0.0 if kernel.delta_of_out else mean
                if of == "dv":
                    found = x.p_variance * y * y + size * x.log_variance * np.square(y - about)
                else:
                    off = 0.0 if kernel.delta_of_out else moved
                    found = x.s_variance * y * y
                    for variance, factor in x.moves():
                        found += variance * np.square(apart * (factor * y - about) - off)
                    products = saved.products[i, None] * x.t_variance
                    found += size * products * np.square(x.slope * y - about)
                    if kernel.kept:
                        found += x.p_variance * np.square(apart * x.slope * y - x.t * mean)
                total += float(np.sum(saved.copies[i, None] * found))
            common = mean if of == "dv" else moved
            shared = saved.lse_variance[i]
            if kernel.delta_of_out:
                shared = shared + saved.scores_variance[i]
            total += float(np.sum(saved.copies[i] * shared * np.square(common[:, 0])))
            if of == "dk":
                own = saved.copies[i] * saved.delta_variance[i]
                total += float(np.sum(own * np.square(mean[:, 0])))
    return total


def _steps(kernel: Kernel, of: str) -> tuple[int, Format | None]:
    """Tokens of a block, and what the sum is rounded to after each."""
    if kernel.parts is None:
        return _TOKENS, None
    return kernel.parts[of == "dq"], kernel.out


def analyse(backs: Sequence[tuple[Backward, Saved]], kernel: Kernel, of: str, rows: slice) -> Rows:
    """Say what a backward pass that rounds like this may give for some queries or keys.

    Several heads share keys and values; their gradients are sums over all of them.
    """
    scale = 1.0 if of == "dv" else backs[0][0].head.scale
    columns = _columns(backs[0][0], of)
    copies = backs[0][1].key_copies if of == "dq" else backs[0][1].copies
    most = float(np.max(copies, initial=1.0))
    sum_ = _Sum(rows.stop - rows.start, columns, kernel, scale, most)
    softcap = backs[0][0].head.softcap
    has_sinks = any(back.head.sink is not None for back, _ in backs)
    names = directions(of, softcap is not None, has_sinks)
    tangents = {x: np.zeros_like(sum_.total) for x in names}
    size, to = _steps(kernel, of)
    for back, saved in backs:
        head = back.head
        if of == "dq":
            for j in head.blocks(size):
                x = _pairs(back, saved, kernel, rows, j)
                if x is not None:
                    rounded = None if head.is_sink(j) else to  # a sink adds 0
                    _add_to_queries(sum_, x, saved, rows, head.k[j], copies[j], rounded)
                    tangents["scale"] += x.s_scale @ head.k[j]
                    if softcap is not None:
                        tangents["cap"] += _flat(x, saved, rows) @ head.k[j]
                    if has_sinks:
                        tangents["lost sink"] += _lost(x, back, saved, kernel, rows) @ head.k[j]
            mean, d = saved.mean[rows], saved.delta[rows, None]
            sum_.variance += saved.delta_variance[rows, None] * mean * mean
            common = saved.lse_variance + saved.scores_variance
            sum_.variance += common[rows, None] * sum_.total * sum_.total
            tangents["delta"] -= d * mean
        else:
            for i in _query_blocks(head.q.shape[0], size):
                x = _pairs(back, saved, kernel, i, rows)
                if x is not None:
                    (_add_to_keys if of == "dk" else _add_to_values)(sum_, x, back, saved, i, to)
                    if of == "dv":
                        tangents["scale"] += x.p_scale.T @ back.d_out[i]
                        if has_sinks:
                            odds = _odds(back, saved, i)
                            tangents["lost sink"] += (x.p * odds).T @ back.d_out[i]
                    else:
                        tangents["scale"] += x.s_scale.T @ head.q[i]
                        d = x.p * x.slope * saved.delta[i, None]
                        tangents["delta"] -= d.T @ head.q[i]
                        if softcap is not None:
                            tangents["cap"] += _flat(x, saved, i).T @ head.q[i]
                        if has_sinks:
                            lost = _lost(x, back, saved, kernel, i)
                            tangents["lost sink"] += lost.T @ head.q[i]
    if of != "dv":
        tangents["scale"] += sum_.total
    return _rows(sum_, tangents)


def _flat(x: _Pairs, saved: Saved, i: slice) -> Doubles:
    """What derivatives to scores have too much of where a cap has no slope."""
    return np.asarray(x.p * (x.t - saved.delta[i, None]) * (1 - np.asarray(x.slope)))


def _odds(back: Backward, saved: Saved, i: slice) -> Doubles:
    """What weights gain, over themselves, where the sink has no part in their sum."""
    if back.head.sink is None:
        return np.zeros((i.stop - i.start, 1))
    odds = 1 / np.expm1(saved.lse[i, None] - back.head.sink)
    return np.where(np.isfinite(odds), odds, 0.0)


def _lost(x: _Pairs, back: Backward, saved: Saved, kernel: Kernel, i: slice) -> Doubles:
    """What derivatives to scores gain without the sink; so does D, if it is made of weights."""
    odds, delta = _odds(back, saved, i), saved.delta[i, None]
    more = 0.0 if kernel.delta_of_out else (1 + odds) * odds * delta
    return np.asarray((odds * (x.t - delta) - more) * x.p * x.slope)


def _query_blocks(n: int, size: int) -> Iterator[slice]:
    """Blocks of so many queries, cut where the weights of others begin."""
    for i in blocks(0, n, _QUERIES):
        yield from blocks(i.start, i.stop, size)


def _columns(back: Backward, of: str) -> int:
    columns: int = (back.head.v if of == "dv" else back.head.q).shape[-1]
    return columns


def _add_to_queries(
    sum_: _Sum,
    x: _Pairs,
    saved: Saved,
    i: slice,
    k: Doubles,
    copies: Doubles,
    to: Format | None,
) -> None:
    """Errors of weights, and of D where it is made of them; keys of which there are copies."""
    kernel = sum_.kernel
    mean, apart = saved.mean[i], x.t - saved.delta[i, None]
    squares = k * k
    sum_.variance += (copies * x.s_variance) @ squares
    more = x.p * x.p * x.t_variance
    for variance, factor in x.moves():
        moved, more = copies * (variance * apart * apart + more), np.zeros_like(more)
        sum_.variance += (moved * np.square(factor)) @ squares
        if not kernel.delta_of_out:  # D moves with weights and products: k - mean, not k
            whole, part = np.sum(moved, -1, keepdims=True), (moved * factor) @ k
            sum_.variance += mean * mean * whole - 2 * mean * part
    if kernel.kept:
        own = copies * x.p_variance
        sum_.variance += (own * np.square(apart * x.slope)) @ squares
        both, again = own * x.t * apart * x.slope, own * x.t * x.t
        sum_.variance += mean * mean * np.sum(again, -1, keepdims=True) - 2 * mean * (both @ k)
    sum_.add(x.s, x.near_s, x.s_bound, x.s_flushed, k, to)


def _add_to_keys(
    sum_: _Sum, x: _Pairs, back: Backward, saved: Saved, i: slice, to: Format | None
) -> None:
    q, kernel = back.head.q[i], sum_.kernel
    apart = x.t - saved.delta[i, None]
    size = x.p * x.p
    found = size * apart * apart * (saved.scores_variance + saved.lse_variance)[i, None]
    times = saved.products[i, None]
    products, shared = times * x.t_variance, times * saved.shared_variance[i, None]
    found += size * (products + (saved.delta_variance[i, None] + shared))
    if kernel.kept:
        found += x.p_variance * (apart * apart - 2 * x.p * x.t * apart)
    if not kernel.delta_of_out:
        found += size * (saved.moved_variance[i, None] - 2 * x.p * products)
    found = x.s_variance + found * np.square(x.slope)
    for variance, factor in x.moves():
        found += variance * np.square(apart * factor)
    found = saved.copies[i, None] * found
    sum_.variance += np.maximum(found, 0.0).T @ (q * q)
    sum_.add(x.s.T, x.near_s.T, x.s_bound.T, x.s_flushed.T, q, to)


def _add_to_values(
    sum_: _Sum, x: _Pairs, back: Backward, saved: Saved, i: slice, to: Format | None
) -> None:
    g = back.d_out[i]
    shared = (saved.scores_variance + saved.lse_variance)[i, None]
    found = x.p_variance + x.p * x.p * (x.log_variance + shared)
    sum_.variance += (saved.copies[i, None] * found).T @ (g * g)
    sum_.add(x.p.T, x.near_p.T, x.p_bound.T, x.p_flushed.T, g, to)


def _rows(sum_: _Sum, tangents: dict[str, Doubles]) -> Rows:
    """The law of the sums, times the scale, and rounded."""
    kernel, scale = sum_.kernel, sum_.scale
    unit = kernel.accumulate.unit
    variance = sum_.variance
    if kernel.scores_matter:
        variance = variance + (RMS * unit) ** 2 * (sum_.running + sum_.total * sum_.total)
    else:
        variance = variance + (RMS * unit * sum_.total) ** 2 * max(sum_.terms, 1) * sum_.copies
    total, near = scale * sum_.total, scale * sum_.near
    variance = scale * scale * np.maximum(variance, 0.0)
    gamma = _gamma(sum_.terms, kernel) + 2 * unit
    tiny = kernel.accumulate.tiny
    bound = np.minimum(np.abs(total), tiny) + abs(scale) * (
        sum_.moved + gamma * (sum_.sizes + sum_.moved)
    )
    most = (sum_.sizes + sum_.moved) * (1 + gamma)
    bound = np.where(most > kernel.accumulate.largest, math.inf, bound)
    worst = WORST**2 * variance
    loose = np.abs(near - total) > _SURE * np.sqrt(variance)
    spacing = np.zeros_like(total)
    if kernel.out is not None:
        spacing = kernel.out.spacing(total)
        variance, worst = (x + np.square(spacing) / 12 for x in (variance, worst))
        bound = bound + kernel.out.spacing(np.abs(total) + bound) / 2
        near = kernel.out.round(near)
        bound = np.where(np.abs(total) + bound > kernel.out.largest, math.inf, bound)
    loose |= np.isinf(bound) | ~np.isfinite(near)
    near = np.where(loose, total, near)
    std, least = (np.where(~loose & (x > 0), np.sqrt(x), math.inf) for x in (variance, worst))
    apart = (RMS * unit * scale) ** 2 * (sum_.running + sum_.total * sum_.total) + spacing**2 / 12
    # What the exponentials and the constants have in common.
    slack = abs(scale) * (kernel.exp * BIAS * sum_.sizes + CONSTANTS * np.abs(tangents["scale"]))
    slack = unit * (slack + CONSTANTS * np.abs(total))
    slack += abs(scale) * sum_.flushed + np.where(np.abs(total) < tiny, np.abs(total), 0.0)
    none = np.zeros(len(total))
    return Rows(
        total,
        none,
        none,
        near,
        std,
        least,
        bound,
        none,
        none,
        none,
        spacing,
        slack,
        {name: scale * x for name, x in tangents.items()},
        apart,
    )
