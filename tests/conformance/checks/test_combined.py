"""Uses together: every three of them are tried, by few cases, and what is right passes."""

import subprocess
import sys
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import refattn
from refattn import sampling
from refattn.conformance import CHECKS, Adapter, check
from refattn.conformance.candidate.adapter import _in_memory
from refattn.conformance.checks.combined import covering

TRI = {"mask", "causal"}


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.integers(1, 4), st.integers(0, 99))
@settings(max_examples=40)
def test_every_few_levels_meet(sizes, strength, seed):
    levels = {f"factor {i}": tuple(range(size)) for i, size in enumerate(sizes)}
    rows = list(covering(levels, np.random.default_rng(seed), strength))
    assert rows[0] == dict.fromkeys(levels, 0)
    assert len(rows) <= np.prod(sizes)
    for names in combinations(levels, min(strength, len(levels))):
        met = {tuple(row[name] for name in names) for row in rows}
        assert met == set(product(*(levels[name] for name in names)))


def test_few_cases_cover_many():
    levels = {str(i): tuple(range(size)) for i, size in enumerate((3, 3, 8, 2, 3, 3, 2))}
    rows = list(covering(levels, np.random.default_rng(0)))
    assert 72 <= len(rows) <= 150  # of 2,592; 72 have all of the three longest factors


def test_a_mask_with_causal_may_be_refused():
    def either(q, k, v, mask=None, causal=False):
        if mask is not None and causal:
            raise ValueError("one or the other")
        return refattn.softmax_attention(q, k, v, mask=mask, causal=causal)

    report = check(either, estimator="softmax", capabilities=TRI, checks=["uses_together"])
    assert report.verdict == "PASS"
    assert "causal and mask together" in report.not_tried["uses_together"]


def performer(epsilon, whole):
    """Positive features with a constant added, stabilised by the largest of a query or of all."""

    def attention(q, k, v, *, num_features, seed):
        omega = np.random.default_rng(seed).standard_normal((num_features, q.shape[-1]))

        def features(x, axes):
            x = x * x.shape[-1] ** -0.25
            score = x @ omega.T
            half = np.sum(x * x, -1, keepdims=True) / 2
            return np.exp(score - half - np.max(score, axes, keepdims=True)) + epsilon

        a, b = features(q, (-2, -1) if whole else (-1,)), features(k, (-2, -1))
        return a @ (b.mT @ v) / (a @ np.sum(b, -2)[..., None])

    return attention


@pytest.mark.long("09", "15", "True")  # of the exponent
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("epsilon", [1e-9, 1e-12, 1e-15])
def test_small_epsilons_are_no_defect(epsilon, whole):
    tags = {"epsilon": epsilon}
    names = ["contract", "weighted_mean", "one_function", "feature_sums", "frequency_law"]
    report = check(performer(epsilon, whole), estimator="rfa", tags=tags, checks=names)
    assert report.verdict != "FAIL"
    adapter = Adapter(performer(epsilon, whole), "rfa", (), tags)
    assert not CHECKS["long_vectors"].applies(adapter)
    assert CHECKS["long_vectors"].applies(Adapter(performer(0.0, whole), "rfa"))


@pytest.mark.parametrize("epsilon", [1e-5, 1e-3])
def test_epsilons_not_declared_are_defects(epsilon):
    report = check(performer(epsilon, True), estimator="rfa", checks=["one_function"])
    assert report.verdict == "FAIL"


def test_targets_are_recovered_where_nothing_is_added():
    def added(q, k, v, *, num_samples, seed):
        omega = sampling.draw_target(q, k, num_samples=num_samples, rng=seed)
        scale = q.shape[-1] ** -0.25
        y = k * scale
        score = omega @ y[..., None, :, :].mT - np.sum(y * y, -1)[..., None, None, :] / 2
        weight = np.exp(score - np.max(score, -1, keepdims=True)) + 1e-12
        weight /= np.sum(weight, -1, keepdims=True)
        return np.mean(weight, -2) @ v

    names = {"target_law", "masked_target_law", "causal_target_law"}
    for epsilon in (0.0, 1e-12):
        adapter = Adapter(added, "ra", TRI, {"epsilon": epsilon})
        assert {name for name in names if CHECKS[name].applies(adapter)} == (
            set() if epsilon else names
        )
    report = check(added, estimator="ra", tags={"epsilon": 1e-12}, checks=["mean_of_samples"])
    assert report.verdict == "PASS"


def test_moments_in_half_precision_can_pass():
    def moments(x):
        wide = x.astype(np.float64)
        mean = np.mean(wide, -2)
        centred = wide - mean[..., None, :]
        cov = centred.mT @ centred / (x.shape[-2] - 1)
        return mean.astype(x.dtype), cov.astype(x.dtype)

    assert check(moments, estimator="moments", tags={"dtype": "float16"}).verdict == "PASS"


@pytest.mark.parametrize("layout", ["transposed", "sliced", "heads inside", "reversed"])
@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 3, 4, 5)])
def test_layouts_hold_the_same_numbers(shape, layout):
    x = np.arange(np.prod(shape), dtype=float).reshape(shape)
    y = _in_memory(x, layout)
    np.testing.assert_array_equal(x, y)
    assert y.strides != x.strides


def test_nothing_is_said_of_what_was_not_tried():
    def small_only(q, k, v):
        weights = np.exp(q @ k.mT * q.shape[-1] ** -0.5)
        return weights @ v / np.sum(weights, -1, keepdims=True)

    report = check(small_only, estimator="softmax", checks=["extreme_logits"])
    assert report.verdict == "FAIL"
    assert "right at ordinary inputs" not in str(report)
    report = check(small_only, estimator="softmax", checks=["extreme_logits", "reference_values"])
    assert "right at ordinary inputs, as far as was tried" in str(report)


def test_the_package_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "refattn", "--version"], capture_output=True, text=True, check=True
    )
    assert refattn.__version__ in done.stdout
