"""Records of what is rounded and of the errors of rows, and the size of rounded sums.

A rounding to nearest moves a number by at most half of the distance of its neighbours h, and by
h / sqrt(12) in root mean square where nothing ties it to h. Where a number is not known that well,
and for its leading digits the law of Benford is taken, that is `RMS` units.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...arrays.blocks import blocks
from ...arrays.library import Doubles
from .formats import FORMATS, Format
from .hardware import Unit

# Mean square of (h / sqrt(12)) / (u x) = 2^(1 - f) / sqrt(12) for x = 2^f, f uniform on [0, 1].
# f is uniform if leading digits follow the law of Benford.
RMS = math.sqrt(1 / (8 * math.log(2)))
# For the least favourable digits, x = 1: there h is widest for the size of x, 2 u / sqrt(12). The
# digits of given arrays are not random, so tests, which must hold for all digits, take this one.
WORST = 1 / math.sqrt(3) / RMS
_LEAST_OWN = 1e-6  # the least share of a column's variance that is independent of other columns
FINE = 32.0  # units: errors of exponentials that need not be told from each other
BIAS = 1 / 16  # of the largest error of an exponential, that its errors have in common
_TRIFLE = 2.0**10  # what is so much smaller need not be known to be exact
_OVER_NOISE = 16  # times the noise before it is the spacing of a result that hides the noise
_LEAST_NOISE = 2.0**-40  # variance over the square of a spacing: less is lost in float64
SURE = 5.0  # standard deviations beyond which roundings are tied to each other
_LAG = 2.0**-8  # of the largest weight is 1 where a maximum is kept, at the least
MAXIMUM_KEYS = 16  # keys after which a running maximum may change, at the least
CONSTANTS = 3  # units by which the product of a scale and log2 e, both rounded, may be off


class Roundings(NamedTuple):
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
    delta_of_out: bool  # whether D is taken from the output, and weights are computed again
    parts: tuple[int, int] | None  # queries and keys after which running sums are rounded
    unit: Unit | None = None  # that multiplies weights or derivatives; None rounds sums
    score_unit: Unit | None = None  # that multiplies queries and keys
    by_head: bool = False  # whether gradients of the query heads that share keys are rounded each
    unrounded: bool = False  # whether D is taken from the output before it was rounded
    again: bool = False  # whether weights that are computed again are rounded, and then used
    scaled: bool = False  # whether derivatives to scores are multiplied by the scale, then rounded
    maximum: bool = False  # whether running maxima are differentiated, too
    lags: bool = False  # whether weights may be over less than the largest score so far
    upcast: bool = False  # whether a backward pass has weights before they were rounded

    @property
    def fine(self) -> bool:
        """Whether nothing but sums and elementary functions is rounded."""
        return self.scores is None and self.weights is None

    def knows_digits(self, is_gradient: bool) -> bool:
        """Tell whether all but a trifle of the errors is of numbers whose digits are known.

        Weights over the largest so far are not; those of a backward pass are over their sum.
        """
        to, whole = self.weights, self.normalised or is_gradient
        return to is not None and whole and self.accumulate.unit * _TRIFLE < to.unit

    def find_lagging(self, share: Doubles) -> npt.NDArray[np.bool_] | None:
        """Tell in which queries the largest weight, of such a share, need not be 1; None for none.

        Fused kernels with a fast exponential may keep a maximum until a score is larger by 8 log 2.
        Weights are up to 2^8 then, and rounded, beside a weight of 1 of the key that the maximum is
        of: so all of them are at least 1 + 2^-8 times the largest.
        """
        return share * (1 + _LAG) <= 1 if self.lags else None

    @property
    def of_log(self) -> bool:
        """Whether weights are e^(score - log normaliser), forward too."""
        return self.fine and self.delta_of_out

    @property
    def stepwise(self) -> bool:
        """Whether a backward pass has the weights of the forward pass, step by step."""
        return self.scores is not None and self.weights is not None

    @property
    def kept(self) -> bool:
        """Whether a backward pass multiplies weights as they were rounded."""
        return (self.stepwise and not self.upcast) or self.again

    @property
    def reads_output(self) -> bool:
        """Whether a backward pass has the output as it was rounded."""
        return self.delta_of_out and not self.unrounded

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


class RowErrors(NamedTuple):
    """What is known of some queries: arrays (b, d_v), and (b,) of log normalisers and scores.

    The rest is what float64 leaves of the exact result, where a kernel sums in float64 itself; what
    is expected of digits that are dropped; and what the output that a backward pass was given adds
    to gradients.
    """

    out: Doubles  # the exact result
    lse: Doubles
    top: Doubles  # the largest score
    nearest: Doubles  # where every rounding of the profile but those of sums is to nearest
    std: Doubles  # standard deviation of the error; infinite where its law is not known
    worst: Doubles  # the same at the least favourable digits: the error is sub-Gaussian with it
    bound: Doubles  # what no error exceeds
    lse_std: Doubles  # of the log normaliser, before it is rounded itself
    lse_bound: Doubles
    lse_slack: Doubles  # how much of that may be the same for all, by exponentials and constants
    spacing: Doubles  # of the numbers that the result may be rounded to; 0 if it is not rounded
    slack: Doubles  # how much of the error may be the same for all, likewise
    tangents: dict[str, Doubles]  # derivatives of the result with respect to changes of the scores
    apart: Doubles | None = None  # variance of what has no part in another element, of gradients
    shared: Doubles | None = None  # of columns and products along directions, what tokens have part
    rest: Doubles | float = 0.0
    lse_rest: Doubles | float = 0.0
    shift: Doubles | float = 0.0  # what a unit that cuts sums is expected to add to the result
    normaliser: Doubles | float = 0.0  # relative variance of a sum of weights, a part of `std`
    of_weights: Doubles | float = 0.0  # how much of the slack is of exponentials, and few spacings

    def errors(self, got: Doubles) -> Doubles:
        """Return how far numbers are from the exact result, the rest and the shift of its unit."""
        errors: Doubles = got - self.out - self.rest - self.shift
        return errors

    def span_rounding(self) -> tuple[Doubles, Doubles]:
        """Return the interval of errors that are no evidence, for each element.

        The error is sub-Gaussian about kappa D, D the rounding to nearest and kappa in [0, 1],
        which nobody knows; and roundings may have so much in common.
        """
        rounding = self.errors(self.nearest)
        return np.minimum(rounding, 0.0) - self.slack, np.maximum(rounding, 0.0) + self.slack

    def before_rounding(self) -> Doubles:
        """Return the variance of errors before the result is rounded, at the least favourable."""
        squares = np.square(self.spacing)
        return np.maximum(np.square(self.worst) - squares / 12, _LEAST_NOISE * squares)

    def hidden(self) -> npt.NDArray[np.bool_]:
        """Tell in which rows noise is far below the spacing of the result, in most columns."""
        far = np.square(self.spacing) > _OVER_NOISE**2 * self.before_rounding()
        return np.asarray(np.sum(far, -1) > far.shape[-1] / 2)

    def own_covariance(self, shared: Doubles, directions: Doubles, worst: bool) -> Doubles:
        """Project on directions (..., d_v, r) what columns have beside shared variances (n, d_v).

        It is of each column alone: the rest of its largest variance, or of that of `std`. It is not
        finite where there is no law.
        """
        rest = np.square(self.worst if worst else self.std) - shared
        rest = np.maximum(rest, _LEAST_OWN * shared)
        own: Doubles = (np.swapaxes(directions, -1, -2) * rest[:, None, :]) @ directions
        return own

    def take(self, i: slice) -> RowErrors:
        """Take some rows."""
        parts: list[Any] = [x[i] if isinstance(x, np.ndarray) else x for x in self]
        return RowErrors(*parts)

    @classmethod
    def join(cls, parts: Sequence[RowErrors]) -> RowErrors:
        """Stack the rows of the parts; what is not an array is taken from the first part."""

        def below(x: Sequence[Any]) -> Any:
            if isinstance(x[0], dict):
                return {name: np.concatenate([y[name] for y in x]) for name in x[0]}
            return np.concatenate(x) if isinstance(x[0], np.ndarray) else x[0]

        return cls(*map(below, zip(*parts, strict=True)))


def round_bound(to: Format | None, out: Doubles, bound: Doubles) -> Doubles:
    """Add the rounding of the result to a bound."""
    if to is None:
        return bound
    bound = bound + to.spacing(np.abs(out) + bound) / 2  # of what is rounded: it has an error
    return np.where(np.abs(out) + bound > to.largest, math.inf, bound)


def expect_loss(to: Format, x: Doubles) -> Doubles:
    """Return what is dropped of numbers on average: half a spacing; of those above 1/2 it is known.

    A weight that is nearly 1 is 1, and loses nothing, or nearly a whole spacing.
    """
    known = x - to.round(FORMATS["float32"].round(x))  # kernels have weights in float32 first
    return np.where(np.abs(x) > 0.5, known, np.sign(x) * to.spacing(x) / 2)


def is_power_of_two(x: float) -> bool:
    """Tell whether a multiplication rounds nothing; 0 counts, too."""
    return abs(math.frexp(x)[0]) in (0.0, 0.5)


def walk(first: Any, last: Any, squares: Any, steps: int, lanes: int) -> Any:
    r"""Return the expected sum of squares of the running sums between two of them.

    Terms of which the sum of squares is known, in random order: the running sums are a line and a
    bridge, :math:`E S_t^2 = (a + t (b - a) / n)^2 + t (n - t) / (n (n - 1)) (Q - (b - a)^2 / n)`.
    With lanes, each holds a share.
    """
    # Errors of roundings grow with the running sums S_t, so variances with their squares. Over t,
    # sum (t / n)^2 = (n + 1)(2n + 1) / 6n, and sum t (n - t) / n (n - 1) = (n + 1) / 6.
    return _walk_line(first, last, steps, lanes) + squares * ((steps + 1) / (6 * lanes))


def _walk_line(first: Any, last: Any, steps: int, lanes: int) -> Any:
    """Return what is known of `walk` without the sum of squares of the terms."""
    goes_on = np.ndim(first) or first  # no sum begins here
    rise = last - first if goes_on else last
    squares = rise * rise
    squares *= (steps + 1) / (6 * steps) * ((2 * steps + 1) / lanes**2 - 1 / lanes)
    if goes_on:
        line = steps * last
        line += rise
        line *= first
        line /= lanes**2
        squares += line
    return squares


def running_squares(roundings: Roundings, m: int) -> float:
    """Sum squares of the running sums of m terms of one size, over that of the last."""
    run = min(roundings.run, m) or 1
    return run * run / (3 * max(m, 1)) + (m / (3 * run) if run < m else 0)


def sum_running_products(
    x: Doubles, y: Doubles, products: Doubles, width: int, lanes: int
) -> Doubles:
    """Sum squares of terms of products x . y, and of running sums: they are known after `width`."""
    parts = [*blocks(0, x.shape[-1], width)]
    of_term = np.concatenate([np.full(a.stop - a.start, a.stop - a.start) for a in parts])
    sums: Doubles = (np.square(x) * (1 + (of_term + 1) / (6 * lanes))) @ np.square(y).T
    first: Any = 0.0
    for at in parts:
        last = products
        if at.stop < x.shape[-1]:
            last = x[:, at] @ y[:, at].T
            last += first
        sums += _walk_line(first, last, at.stop - at.start, lanes)
        first = last
    return sums


def sum_error(roundings: Roundings, terms: float, more: float) -> float:
    """Bound the relative error of a sum of so many terms, with so many roundings more."""
    # Roundings that a term goes through one after another: in its lane, over lanes, and over runs.
    steps = (
        min(terms, roundings.run) / roundings.lanes + roundings.lanes + terms / roundings.run + more
    )
    # Higham's gamma: (1 + u)^n - 1 <= n u / (1 - n u), with all higher orders.
    bound = steps * roundings.accumulate.unit
    return bound / (1 - bound) if bound < 1 else math.inf
