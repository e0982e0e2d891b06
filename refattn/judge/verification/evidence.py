r"""Tests: bounds on the probability that a correct kernel has such sums of errors over rows.

`verify` compares what a kernel gave with what `judge.rounding` says of a correct one. With
:math:`e` the error, :math:`\sigma` its standard deviation and :math:`D` what rounding to nearest
alone makes of the exact result, six kinds of statements are tried, each of which a correct kernel
violates with a probability that is bounded:

* no error exceeds its proven bound, whatever the roundings are;
* roundings are independent of each other: then each error is sub-Gaussian about
  :math:`\kappa D` for a :math:`\kappa \in [0, 1]`, which is 0 where noise before a rounding hides
  what it does to the exact number, and :math:`P(|e - \kappa D| > t \sigma) \le 2 e^{-t^2/2}`;
* for the mean square of N rows, of which the columns may depend on each other in any way,
  :math:`P(\overline{z^2} > x) \le (x e^{1 - x})^{N/2}`, by Jensen and Chernoff;
* the columns of one row of softmax attention depend on each other as their covariance C says:
  then :math:`P(e^T C^{-1} e > x r) \le (x e^{1 - x})^{r/2}` for its r columns (`joint`), and one
  wrong row is seen among many;
* so do sums T of all columns of a few directions u that are known before, the scale, the
  temperature and a factor of the output (`directions`): their variance is :math:`u^T C u`, and they
  are about :math:`\kappa T_D`, so that :math:`P(|T - \kappa T_D| > t \sigma) \le 2 e^{-t^2/2}`;
* errors of rows are symmetric and independent: then a sum over the rows of any fixed combinations
  of them, over the root of the sum of their squares, exceeds t with probability at most
  :math:`e^{-t^2/2}` (Efron), whatever their variances are. With the derivative of the output to a
  defect as weights this is a test for it, and it measures its size.

Rows with the same query, or the same exact result, are rounded alike: g of them have weights 1 / g,
and count for one. By Jensen and Cauchy both statements about rows hold for that, too.

Gradients are judged in the same way. Those in keys and values have rows that are not independent
where errors of scores, or of the sum of d_out * out, move the weights of one query for all keys.
Then the statements on rows are made on heads, and sums along a direction have a known variance:
:math:`P(|T - \kappa T_D| > t \sigma) \le 2 e^{-t^2/2}`.

    Efron, Student's t-test under symmetry conditions, Journal of the American Statistical
    Association 64(328), 1969.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from ...arrays.library import Doubles

# Of mean squares: larger ones are no likelier, and their squares may overflow.
_BEYOND_ALL = 2.0**100
_FEW_HAVE_ALL = 8.0  # rows have all of the weight
_LAW_WANTED = 4.0  # standard deviations from which on the law of a sum is computed


class DirectionSums(NamedTuple):
    """Of each row (..., n), sums over its columns along one direction."""

    errors: Doubles
    nearest: Doubles  # of what rounding to nearest makes of the exact numbers
    size: Doubles  # of the direction itself: what the errors are if the defect has size 1
    slack: Doubles  # of what errors of a correct kernel may have in common, at most


class Tally(NamedTuple):
    """Weighted sums over rows, of T, U, G, L of `DirectionSums`, and of TT, TU, UU, TG, UG, GG."""

    t: Any
    u: Any
    g: Any
    slack: Any
    tt: Any
    tu: Any
    uu: Any
    tg: Any
    ug: Any
    gg: Any

    @classmethod
    def of(cls, t: Any, u: Any, g: Any, slack: Any, weights: Any, axis: int = -1) -> Tally:
        """Sum over an axis."""
        weighted = t, u, g, slack
        if not np.all(weights == 1):
            weighted = (*(weights * x for x in weighted),)
        to, tu, tg, _ = weighted
        pairs = ((to, t), (to, u), (tu, u), (to, g), (tu, g), (tg, g))
        first = (np.sum(x, axis=axis) for x in weighted)
        return cls(*first, *(_sum_products(x, y, axis) for x, y in pairs))

    def over(self, axis: int) -> Tally:
        """Sum over one more axis."""
        return Tally(*(np.sum(x, axis=axis) for x in self))


def _sum_products(x: Any, y: Any, axis: int) -> Any:
    """Sum products over an axis."""
    return np.einsum("ij,ij->j", x, y) if (x.ndim, axis) == (2, 0) else np.sum(x * y, axis=axis)


def evenly(t: Any, u: Any, g: Any, slack: Any) -> tuple[Any, Any, Any, Any]:
    """Divide the rows of a direction by their standard deviations: none outweighs the others."""
    # sqrt(g) is the standard deviation of T if columns are independent. The test is valid with any
    # weights that do not depend on the errors.
    factor = np.sqrt(g if np.min(g, initial=1.0) > 0 else np.where(g > 0, g, math.inf))
    factor = np.divide(1.0, factor, out=factor if np.ndim(factor) else None)
    return t * factor, u * factor, g * factor, slack * factor


class Evidence(NamedTuple):
    """Sums over rows with the weights that are best if errors are Gaussian, and evenly.

    Where few rows have nearly all of the weight they alone are no evidence of symmetric errors.
    """

    best: Tally
    even: Tally

    @property
    def g(self) -> Any:
        """Sum of the squares of the direction."""
        return self.best.g

    @classmethod
    def of(cls, t: Any, u: Any, g: Any, slack: Any, weights: Any, axis: int = -1) -> Evidence:
        """Sum over an axis what `DirectionSums` holds."""
        even = Tally.of(*evenly(t, u, g, slack), weights, axis=axis)
        return cls(Tally.of(t, u, g, slack, weights, axis), even)

    def over(self, axis: int) -> Evidence:
        """Sum over one more axis."""
        return Evidence(self.best.over(axis), self.even.over(axis))

    def add(self, other: Evidence, at: Any) -> None:
        """Add to some of the entries."""
        for mine, new in zip((*self.best, *self.even), (*other.best, *other.even), strict=True):
            mine[at] += new

    def test(self) -> Estimate:
        """Estimate the size by the best weights, and take the surer of the two tests."""
        # The surer of two: their p-values add up, by Bonferroni.
        best, even = symmetric_test(self.best), symmetric_test(self.even)
        return Estimate(
            best.value,
            best.error,
            np.minimum(np.minimum(best.log_p, even.log_p) + math.log(2), 0.0),
            np.maximum(best.statistic, even.statistic),
        )


class Known(NamedTuple):
    """Sums of `DirectionSums` over heads, of which the variance of the errors is known.

    They are sub-Gaussian with it, about a share of what rounding the exact numbers gives.
    """

    t: Any
    u: Any
    g: Any
    slack: Any
    variance: Any

    def over(self, axis: int) -> Known:
        """Sum over an axis."""
        return Known(*(np.sum(x, axis=axis) for x in self))

    def add_to(self, other: Estimate) -> Estimate:
        """Take the surer of two tests: their p-values add up, by Bonferroni."""
        mine = self.test()
        surer = mine.log_p < other.log_p
        return other._replace(
            log_p=np.minimum(np.where(surer, mine.log_p, other.log_p) + math.log(2), 0.0),
            statistic=np.where(surer, mine.statistic, other.statistic),
        )

    def test(self) -> Estimate:
        r"""Test by :math:`P(|\sum_i T_i| > t \sigma) \le 2 e^{-t^2/2}`."""
        t, u, g, slack, variance = (np.asarray(x, np.float64) for x in self)
        total, std = _remove_rounding(t, u)[0], np.sqrt(variance)
        known = (std > 0) & np.isfinite(std)  # nothing is tested without
        return Estimate.of(total, np.where(known, std, 0.0), std, g, slack)


def is_doubtful(t: Any, g: Any) -> Any:
    """Tell whether sums over rows, along the last axis, are so large that their law is wanted.

    They are beside what they are if columns are independent, and beside those of random signs:
    few rows cannot exceed the root of their number.
    """
    total, squares = np.abs(np.sum(t, -1)), np.sum(t * t, -1)
    root = np.sum(g, -1) / np.sqrt(np.maximum(np.sum(g * g, -1), 1e-300))  # of the rows that count
    least = np.minimum(_LAW_WANTED, root / 2)
    return (total > _LAW_WANTED * np.sqrt(np.sum(g, -1))) & (total > least * np.sqrt(squares))


class Estimate(NamedTuple):
    """Size of a defect, its standard error, and the log of a bound on how likely 0 is."""

    value: Any
    error: Any
    log_p: Any
    statistic: Any

    @classmethod
    def of(cls, total: Any, root: Any, std: Any, g: Any, slack: Any) -> Estimate:
        """Divide sums by a root, for the test, and by the square of the direction, for the size."""
        # What errors may have in common is no evidence, at its most. The size is the coefficient
        # T / G of a regression on the direction.
        beyond = np.maximum(np.abs(total) - slack, 0.0)
        statistic = np.where(root > 0, beyond / np.where(root > 0, root, 1.0), 0.0)
        size = np.where(g > 0, g, 1.0)
        log_p = np.minimum(math.log(2) - statistic**2 / 2, 0.0)
        value, error = np.where(g > 0, total / size, 0.0), np.where(g > 0, std / size, math.inf)
        return cls(value, error, log_p, statistic)


def symmetric_test(rows: Tally) -> Estimate:
    r"""Test that errors have no part in a direction, whatever their variances.

    .. math:: P\Big(\Big|\sum_i T_i\Big| > t \sqrt{\textstyle\sum_i T_i^2}\Big) \le 2 e^{-t^2 / 2}

    for independent symmetric T_i: the errors of rows but for the share, between 0 and 1, of what
    rounding the exact numbers gives that makes the sum least, and for what they may have in common.
    """
    t, u, g, slack, tt, tu, uu, tg, ug, gg = (np.asarray(x, np.float64) for x in rows)
    total, share = _remove_rounding(t, u)
    # Given |T_i| only the signs are random, and by Hoeffding sums of them are sub-Gaussian with the
    # variance sum T_i^2: so no predicted variance has a part in it (Efron).
    root = np.sqrt(np.maximum(tt - 2 * share * tu + share * share * uu, 0.0))
    value = np.where(g > 0, total / np.where(g > 0, g, 1.0), 0.0)
    # For the standard error of the size: squares of what the size leaves of each T.
    rest = root * root - 2 * value * (tg - share * ug) + value * value * gg
    # Few rows leave little by themselves: each has a variance of g, if columns are independent.
    few = _FEW_HAVE_ALL * gg > g * g
    rest = rest + np.where(few, gg / np.where(few, g, 1.0), 0.0)
    return Estimate.of(total, root, np.sqrt(np.maximum(rest, 0.0)), g, slack)


def _remove_rounding(t: Doubles, u: Doubles) -> tuple[Doubles, Doubles]:
    """Subtract the share of the roundings that leaves the smallest sums; return that share too."""
    # Errors are symmetric about an unknown share of the rounding: the share is taken that speaks
    # most for the kernel.
    share = np.clip(np.where(u == 0, 0.0, t / np.where(u == 0, 1.0, u)), 0.0, 1.0)
    return t - share * u, share


def log_quadratic(total: float, variances: Any) -> float:
    r"""Bound the log of the probability that a sum of squares is so large.

    .. math:: P\Big(\sum_k z_k^2 > x\Big) \le e^{-\lambda x / 2}
        \prod_k (1 - \lambda \mu_k)^{-1/2}, \quad 0 \le \lambda < 1 / \max_k \mu_k

    for sub-Gaussian z with a covariance whose eigenvalues are at most these.
    """
    most = float(np.max(variances, initial=0.0))
    if not 0 < most < math.inf:
        return 0.0
    # Each lambda gives a bound (Markov of e^(lambda sum / 2)), so the least of some is one, too.
    shares = np.linspace(0, 1, 64, endpoint=False)[:, None] / most
    logs = -shares[:, 0] * total / 2 - np.sum(np.log1p(-shares * variances.reshape(1, -1)), -1) / 2
    return float(np.min(logs))


def log_chernoff(square: Any, rows: Any) -> Any:
    r"""Bound the log of the probability that the mean square of so many rows is so large.

    .. math:: P(\overline{z^2} > x) \le (x e^{1 - x})^{N / 2}

    for independent rows, each the mean of squares of sub-Gaussian numbers of variance 1; or for a
    weighted mean, of which no row has more than that share.
    """
    # A sum of weights 1 / g may be just below a whole number: 2^-20 makes up for its roundings. A
    # mean square below 1, which is the variance at the most, is no evidence.
    x = np.clip(square, 1.0, _BEYOND_ALL)
    return np.floor(rows + 2.0**-20) / 2 * (np.log(x) + 1 - x)
