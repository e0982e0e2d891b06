"""Error control over many tests."""

import itertools

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from refattn.judge import stats


@given(st.lists(st.floats(0, 1) | st.sampled_from([0.0, 0.01, 0.5, 1.0]), min_size=1, max_size=6))
def test_holm_by_closed_testing(p):
    """A null is rejected if Bonferroni rejects every set of nulls that holds it."""
    sets = [c for r in range(len(p)) for c in itertools.combinations(range(len(p)), r + 1)]
    expected = [
        max(min(1.0, len(c) * min(p[j] for j in c)) for c in sets if i in c) for i in range(len(p))
    ]
    np.testing.assert_allclose(stats.holm(p), expected, rtol=1e-12)
    assert stats.suite_p(p) == pytest.approx(np.min(stats.holm(p)))


def test_clopper_pearson():
    for k, n in ((0, 10), (3, 10), (10, 10), (7, 2000)):
        low, high = stats.clopper_pearson(k, n, 0.95)
        tails = scipy.stats.binom.sf(k - 1, n, low), scipy.stats.binom.cdf(k, n, high)
        assert tails[0] == (pytest.approx(0.025) if k > 0 else 1)
        assert tails[1] == (pytest.approx(0.025) if k < n else 1)
