"""Vectors of estimators: the package meets them, and each flag catches the mistakes it names."""

import numpy as np
import pytest

import refattn
from refattn.conformance import vectors
from refattn.conformance.defects import MUTANTS, VARIANTS
from refattn.conformance.vectors import solving, recipes
from tests.conformance.vectors.running import (
    catalogued,
    changed,
    error,
    forward,
    missed,
    of_file,
    package,
    spoilt,
    takes,
    without,
)

CATALOGUE = {m.name: m for m in (*VARIANTS, *MUTANTS)}


@pytest.fixture(scope="module")
def cases(every):
    return forward(of_file(every, *vectors.ESTIMATORS))


@pytest.mark.parametrize("dtype", ["float32", "float64", "longdouble"])
def test_package_meets_every_vector(dtype, cases, record_accuracy):
    known = "float64" if dtype == "longdouble" else dtype
    if dtype == "longdouble" and np.finfo(np.longdouble).eps >= np.finfo(np.float64).eps:
        pytest.skip("longdouble is float64 here")
    chosen = [case for case in cases if known in case.tolerance]
    assert len(chosen) > 100 if dtype == "float32" else len(chosen) == len(cases)
    for case in chosen:
        tolerance = case.tolerance[known] * float(np.finfo(dtype).eps / np.finfo(known).eps)
        off = error(case, package(case.estimator), np.dtype(dtype), tolerance)
        record_accuracy(f"vectors, {case.estimator}", dtype, 16 * off)
        assert off <= 1, case.id


def test_half_precision_can_meet_its_vectors(cases):
    """Arithmetic in float16 throughout."""
    half = [c for c in cases if "float16" in c.tolerance and c.estimator == "softmax"]
    assert len(half) >= 3
    for case in half:
        plain = narrow_softmax if case.arguments["scale"] is None else None
        assert error(case, plain, "float16") <= 1
        if "MASK" in case.flags or "CAUSAL" in case.flags:
            assert error(case, without(plain, "mask", "causal"), "float16") > 1
    assert sum("bfloat16" in c.tolerance for c in cases) >= 10


narrow_softmax = catalogued(CATALOGUE["softmax"])


# --- mistakes -------------------------------------------------------------------------------------


def unstable(
    q, k, v, omega, scale, causal=False, mask=None, centres=None, weighting=None,
    features="positive", log_weight=0.0, eps=0.0, norm=0.5, hidden=False,
):  # fmt: skip
    """Attention by positive features as they are written, without a maximum."""
    assert features == "positive"
    if centres is not None:
        log_weight = -np.log(np.exp(omega @ centres.T - (centres * centres).sum(-1) / 2).sum(-1))
    root = q.dtype.type(q.shape[-1] ** -0.25 if scale is None else np.sqrt(scale))
    q, k = q * root, k * root
    seen = refattn.naive.visible(q, k, mask=mask, causal=causal)

    def phi(x):
        square = np.sum(x * x, axis=-1, keepdims=True)
        return np.exp(x @ omega.swapaxes(-1, -2) - norm * square) + q.dtype.type(eps)

    if omega.ndim > 2 and q.ndim == 2:  # frequencies of each query: a mean of ratios
        weights = phi(k).swapaxes(-1, -2)
        return np.mean(weights @ v / weights.sum(-1, keepdims=True), -2)
    kernel = (phi(q) * np.exp(log_weight)) @ phi(k).swapaxes(-1, -2)
    total = np.sum(kernel if hidden else np.where(seen, kernel, 0), -1, keepdims=True)
    return np.where(seen, kernel, 0) @ v / np.where(np.any(seen, -1, keepdims=True), total, 1)
