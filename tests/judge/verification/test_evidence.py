"""The inequalities behind verdicts: in plain Python, and their levels over many draws."""

import math

import numpy as np
import pytest
from scipy import stats

from refattn import verify
from refattn.judge.verification.evidence import Evidence, Known, Tally, log_chernoff, symmetric_test
from tests.judge.verification import slow


def alarms(log_p, level):
    """Whether there are no more p-values below a level than there may be, but for 10^-9."""
    found = int(np.sum(log_p <= math.log(level)))
    return found <= stats.binom.ppf(1 - 1e-9, log_p.size, level)


def rows_of(seed, own, slack):
    """Twelve rows with a direction of all sizes and a defect of half a standard deviation."""
    rng = np.random.default_rng(seed)
    g = rng.random(12) * 10.0 ** rng.integers(-2, 3, 12)
    g[3] = 0.0
    u = own * np.sqrt(g) * rng.standard_normal(12)
    t = 0.7 * u + np.sqrt(g) * (0.5 + rng.standard_normal(12))
    return [t, u, g, slack * np.sqrt(g) * rng.random(12)], rng.choice([0.5, 1.0], 12)


@pytest.mark.parametrize("own", [0.0, 0.5, 5.0])
@pytest.mark.parametrize("slack", [0.0, 0.1])
def test_sums_along_a_direction_row_by_row(own, slack):
    for seed in range(5):
        rows, weights = rows_of(seed, own, slack)
        listed = list(zip(*rows, strict=True))
        for found, expected in (
            (symmetric_test(Tally.of(*rows, weights)), slow.symmetric(listed, weights)),
            (Evidence.of(*rows, weights).test(), slow.surer(listed, weights)),
        ):
            value, error, p, statistic = expected
            assert (found.value, found.error) == pytest.approx((value, error))
            assert (found.log_p, found.statistic) == pytest.approx((math.log(p), statistic))


@pytest.mark.parametrize("heads", [1, 3])
def test_sums_of_known_variance(heads):
    rng = np.random.default_rng(1)
    t, u, g, slack, variance = rng.random((5, heads)) * [[9], [1], [4], [1], [2]]
    found = Known(t, u, g, slack, variance).over(0).test()
    share = min(sum(t) / sum(u), 1.0)
    left, std = sum(t) - share * sum(u), math.sqrt(sum(variance))
    beyond = max(abs(left) - sum(slack), 0.0) / std
    assert (found.value, found.error) == pytest.approx((left / sum(g), std / sum(g)))
    assert found.log_p == pytest.approx(min(0.0, math.log(2) - beyond**2 / 2))
    assert found.statistic == pytest.approx(beyond)
    none = Known(t, u, 0 * g, slack, 0 * variance).over(0).test()
    assert (none.value, none.error, none.log_p, none.statistic) == (0, math.inf, 0, 0)


def test_mean_squares():
    for square, rows in ((1.7, 12.0), (0.9, 5.0), (3.0, 7.6), (3.0, 0.4), (2.0, 3 - 2.0**-30)):
        assert log_chernoff(square, rows) == pytest.approx(math.log(slow.chernoff(square, rows)))
    assert log_chernoff(4.0, 0.5) == 0  # less than a row says nothing
    assert log_chernoff(4.0, 2.999) == log_chernoff(4.0, 2)


@pytest.mark.long("5")
@pytest.mark.parametrize("spread", [0.0, 2.0])
@pytest.mark.parametrize("copies", [1, 5])
def test_symmetric_test_keeps_its_level(spread, copies):
    """Whatever the variances, with a part of a deterministic error, and with copies of rows."""
    rng = np.random.default_rng(0)
    size = (20_000, 12)
    own = rng.standard_normal(size) * (rng.random(size) < 0.5)
    noise = (rng.random(size) - 0.5) * np.exp(spread * rng.standard_normal(size))
    for share in (0.0, 0.4, 1.0):
        t, u, g, slack = (
            np.repeat(x, copies, -1) for x in (share * own + noise, own, own**2 + 1, 0 * own)
        )
        found = symmetric_test(Tally.of(t, u, g, slack, np.full(t.shape, 1 / copies)))
        for level in (0.05, 0.01, 0.001):
            assert alarms(found.log_p, level)


def test_symmetric_test_measures():
    rng = np.random.default_rng(1)
    g = rng.random((500, 400)) + 0.5
    t = 0.3 * g + rng.standard_normal(g.shape) * np.sqrt(g)
    found = symmetric_test(Tally.of(t, 0 * t, g, 0 * t, np.ones_like(t)))
    z = (found.value - 0.3) / found.error
    assert abs(np.mean(z)) < 6 / math.sqrt(z.size)
    assert 0.8 < np.std(z) < 1.2
    assert (found.log_p < math.log(0.01)).mean() > 0.9


@pytest.mark.long("7")
@pytest.mark.parametrize("columns", [1, 7])
@pytest.mark.parametrize("copies", [1, 3])
def test_mean_squares_keep_their_level(columns, copies):
    """Of uniform numbers, of normal ones, and of rows with the same number in every column."""
    rng = np.random.default_rng(2)
    for rows in (1, 4, 30):
        size = (20_000, rows, columns)
        for z in (
            math.sqrt(12) * (rng.random(size) - 0.5),
            rng.standard_normal(size),
            np.broadcast_to(rng.standard_normal((20_000, rows, 1)), size),
        ):
            square = np.repeat(np.mean(z * z, -1), copies, -1).mean(-1)
            for level in (0.05, 0.01, 0.001):
                assert alarms(log_chernoff(square, rows), level)


def test_an_infinite_mean_square_is_as_unlikely_as_can_be():
    assert -math.inf < log_chernoff(math.inf, 1) <= log_chernoff(2.0**99, 1) < -(2.0**90)
    out = np.ones((2, 8, 4))
    out[0, 0, 0] = 1e200
    q = np.random.default_rng(0).standard_normal((2, 8, 4))
    assert verify(q=q, k=q, v=q, out=out).verdict == "FAIL"
