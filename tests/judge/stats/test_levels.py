"""Levels and powers of every test, by simulation; planted defects must be seen."""

import numpy as np
import pytest
import scipy.stats

from refattn.judge import stats
from tests.judge.stats.cases import DECISIONS, DEFECTS, DESIGNS, EXACT, LEVEL, NULLS, RUNS


def too_many(seed, name, p_value):
    """P-values of super-uniformity at three levels, and of uniformity where p is exact."""
    rng = np.random.default_rng(seed)
    runs = RUNS.get(name, 2000)
    p = np.array([p_value(rng) for _ in range(runs)]).reshape(runs, -1)
    assert np.all((p >= 0) & (p <= 1))
    out = []
    for column in p.T:
        for a in (0.05, 0.01, 0.001):
            out.append(at_least(np.sum(column <= a), runs, a))
        if name in EXACT:
            out.append(scipy.stats.kstest(column, "uniform").pvalue)
    return out


def at_least(count, runs, rate):
    """P(K >= count) for K binomial."""
    return float(scipy.stats.binom.sf(count - 1, runs, rate))


@pytest.mark.sweep(8)
@pytest.mark.long("binomial", "gaussian_estimates", "gaussian_estimates, each", "ks", "ks, rounded")
@pytest.mark.parametrize(("seed", "name"), list(enumerate(NULLS)))
def test_p_values_are_sound(seed, name):
    assert min(too_many(seed, name, NULLS[name])) > LEVEL / DECISIONS


@pytest.mark.sweep(2)
@pytest.mark.long("ddof 0 for 1", "ddof 0 for 1, pooled", "ks without the rounding")
@pytest.mark.parametrize(("seed", "name"), list(enumerate(DEFECTS, 100)))
def test_planted_defects_are_unsound(seed, name):
    assert min(too_many(seed, name, DEFECTS[name])) < LEVEL / DECISIONS


@pytest.mark.sweep(6)
@pytest.mark.long("binomial", "dkwm_two_sample", "hotelling", "ks", "ks, rounded")
@pytest.mark.parametrize(("seed", "name"), list(enumerate(DESIGNS, 200)))
def test_what_is_said_to_be_detected_is(seed, name):
    test, (p_value, n, parameters) = name.split(",")[0], DESIGNS[name]
    rates = {"alpha": 0.05, "beta": 0.1}
    delta = stats.min_discrepancy(getattr(stats, test), n, **rates, **parameters)

    def p_of_missed(at):
        rng = np.random.default_rng(seed)
        misses = sum(p_value(rng, at) > 0.05 for _ in range(2000))
        return at_least(misses, 2000, 0.1)

    assert p_of_missed(delta) > LEVEL / DECISIONS
    if test != "empirical_bernstein":  # no law on [0, 1] is that far below
        assert p_of_missed(-delta) > LEVEL / DECISIONS
    assert p_of_missed(delta / 8) < LEVEL / DECISIONS  # the defect
