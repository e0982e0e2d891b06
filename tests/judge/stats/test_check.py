"""Samples that are bad, extreme or constant; what every test returns."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refattn.judge import stats
from tests.judge.stats.cases import uniform

ONE_SAMPLE = {
    "ks": lambda x: stats.ks(x, uniform),
    "normal_mean": stats.normal_mean,
    "normal_scale": stats.normal_scale,
    "chi2": lambda x: stats.chi2(x, 2),
    "hoeffding": lambda x: stats.hoeffding(x, 0.5),
    "bernstein": lambda x: stats.bernstein(x, 0.5, 0.1),
    "empirical_bernstein": lambda x: stats.empirical_bernstein(x, 0.5),
    "betting": lambda x: stats.betting(x, 0.5),
    "catoni": lambda x: stats.catoni(x, 0.5, 0.1),
    "dkwm_two_sample": lambda x: stats.dkwm_two_sample(x, [0.5] * 100_000),
}


ANY_SIZE = ("normal_mean", "normal_scale", "catoni", "ks")


@pytest.mark.parametrize("name", ONE_SAMPLE)
def test_bad_samples(name):
    for x in ([0.1, math.nan, 0.2], [0.1, math.inf], [], [[0.1, 0.2]], 0.3):
        with pytest.raises(ValueError, match=r"`[xz]` must"):
            ONE_SAMPLE[name](x)
    for x in (["a", "b"], [1j, 0j], None):
        with pytest.raises(TypeError, match=r"`[xz]` must"):
            ONE_SAMPLE[name](x)


@pytest.mark.sweep(3)
@pytest.mark.long("0.9")
@pytest.mark.parametrize("name", ONE_SAMPLE)
@pytest.mark.parametrize("value", [0.0, 0.9, 1.0])
def test_a_million_equal_values_are_rejected(name, value):
    p = ONE_SAMPLE[name](np.full(1_000_000, value))
    assert 0 <= p < 1e-100 or (name, value) in {("normal_mean", 0.0), ("normal_scale", 1.0)}


@given(st.lists(st.floats(0, 1), min_size=2, max_size=30), st.sampled_from(sorted(ONE_SAMPLE)))
@settings(deadline=None)
def test_p_values_are_probabilities(x, name):
    p = ONE_SAMPLE[name](x)
    assert isinstance(p, float)
    assert 0 <= p <= 1


@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=2, max_size=30),
    st.sampled_from(ANY_SIZE),
)
@settings(deadline=None)
def test_extremes_are_probabilities(x, name):
    assert 0 <= ONE_SAMPLE[name](x) <= 1


@pytest.mark.parametrize("name", ["normal_mean", "normal_scale", "catoni"])
def test_huge_samples_have_tiny_p(name):
    assert ONE_SAMPLE[name]([1.7e308] * 30 + [-1e308] * 10) < 1e-6


def test_public_functions_document_themselves():
    for name in stats.__all__:
        value = getattr(stats, name)
        if not isinstance(value, type):
            for section in ("Parameters", "Returns", "References", "Examples", ">>>"):
                assert section in (value.__doc__ or ""), f"{name} has no {section}"
