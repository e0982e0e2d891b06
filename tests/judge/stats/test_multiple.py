"""Error control over many tests, and in sequence."""

import itertools

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from refattn.judge import stats
from tests.judge.stats.cases import DECISIONS, LEVEL


@given(st.lists(st.floats(0, 1) | st.sampled_from([0.0, 0.01, 0.5, 1.0]), min_size=1, max_size=6))
def test_holm_by_closed_testing(p):
    """A null is rejected if Bonferroni rejects every set of nulls that holds it."""
    sets = [c for r in range(len(p)) for c in itertools.combinations(range(len(p)), r + 1)]
    expected = [
        max(min(1.0, len(c) * min(p[j] for j in c)) for c in sets if i in c) for i in range(len(p))
    ]
    np.testing.assert_allclose(stats.holm(p), expected, rtol=1e-12)
    assert stats.suite_p(p) == pytest.approx(np.min(stats.holm(p)))


@pytest.mark.long("301")
@pytest.mark.parametrize(("planted", "seed"), [(1.0, 300), (0.5, 301)])
def test_level_of_the_sequential_test(planted, seed):
    """Uniform p-values reject with probability alpha exactly; halved ones do more often."""
    runs, alpha = 5000, 0.05
    root = np.random.SeedSequence(seed)
    rejected = sum(
        stats.gandy_scott(lambda n, rng: planted * rng.random(), alpha=alpha, rng=root).rejected
        for _ in range(runs)
    )
    low, high = stats.clopper_pearson(rejected, runs, 1 - LEVEL / DECISIONS)
    assert (low <= alpha <= high) == (planted == 1)


def test_the_sequential_test_is_logged():
    scripted = iter([0.2, 0.3, 0.001])
    beta = 0.05 / 3
    gamma = beta ** (1 / 3)
    result = stats.gandy_scott(lambda n, rng: next(scripted), alpha=0.05, steps=3, size=10, rng=1)
    assert beta < 0.2 <= gamma + beta
    assert result.rejected
    assert result.p_values == (0.2, 0.3, 0.001)
    assert result.sizes == (10, 40, 40)
    assert len({seed.spawn_key for seed in result.seeds}) == 3

    def pvalue(n, rng):
        return 0.5 * stats.normal_mean(rng.standard_normal(n))

    result = stats.gandy_scott(pvalue, alpha=0.5, rng=np.random.default_rng(3))
    for p, n, seed in zip(result.p_values, result.sizes, result.seeds, strict=True):
        assert pvalue(n, np.random.default_rng(seed)) == p
        again = np.random.SeedSequence(seed.entropy, spawn_key=seed.spawn_key)
        assert pvalue(n, np.random.default_rng(again)) == p
    assert not stats.gandy_scott(lambda n, rng: 1.0).rejected
    last = stats.gandy_scott(lambda n, rng: 0.3, alpha=0.01, steps=1, rng=0)
    assert not last.rejected
    assert len(last.p_values) == 1


def test_clopper_pearson():
    for k, n in ((0, 10), (3, 10), (10, 10), (7, 2000)):
        low, high = stats.clopper_pearson(k, n, 0.95)
        tails = scipy.stats.binom.sf(k - 1, n, low), scipy.stats.binom.cdf(k, n, high)
        assert tails[0] == (pytest.approx(0.025) if k > 0 else 1)
        assert tails[1] == (pytest.approx(0.025) if k < n else 1)
