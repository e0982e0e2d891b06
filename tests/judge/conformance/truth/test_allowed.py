"""What results are compared with, and how far from it they may be."""

import itertools
import tracemalloc
from functools import partial

import numpy as np
import pytest

import refattn
from refattn import naive
from refattn.judge.conformance.checks.trials import CheckRun
from refattn.judge.conformance.truth import allowed as truth
from tests.judge.conformance.candidates import of, pulled


def rounded(x, dtype):
    return of(len, "kernel", dtype=dtype).exact(x)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("estimator", ["softmax", "rfa", "performer-relu"])
def test_honest_evaluations_stay_within_the_allowed_error(estimator, dtype):
    """Every operation rounded to the dtype, sums in turn: within a fifth, and not far below."""
    near = partial(rounded, dtype=dtype)

    def total(x, axis):
        parts = np.moveaxis(x, axis, 0)
        result = parts[0]
        for part in parts[1:]:
            result = near(result + part)
        return result

    def dot(a, b):
        return total(near(a[..., :, None, :] * b[..., None, :, :]), -1)

    def softmax(q, k, v):
        scores = near(dot(q, k) * near(q.shape[-1] ** -0.5))
        weight = near(np.exp(near(scores - np.max(scores, -1, keepdims=True))))
        top = total(near(weight[..., None] * v[..., None, :, :]), -2)
        return near(top / total(weight, -1)[..., None])

    def rfa(q, k, v, *, omega):
        root = near(q.shape[-1] ** -0.25)
        q, k = near(root * q), near(root * k)
        a = dot(q, omega)
        b = near(dot(k, omega) - near(total(near(k * k), -1) / 2)[..., None])
        a = near(np.exp(near(a - np.max(a, -1, keepdims=True))))
        most = np.max(b, -2, keepdims=True)
        b = near(np.exp(near(b - most)))
        sums = total(near(b[..., None] * near(v[..., :, None, :])), -3)
        a = near(a * near(np.exp(near(most - np.max(most)))))
        top = total(near(a[..., None] * sums[..., None, :, :]), -2)
        return near(top / dot(a, total(b, -2)[..., None, :]))

    def relu(q, k, v, *, omega):
        root = near(q.shape[-1] ** -0.25)
        a, b = (np.maximum(dot(near(root * x), omega), 0.0) + near(1e-3) for x in (q, k))
        weights = dot(near(a), near(b))
        top = total(near(weights[..., None] * v[..., None, :, :]), -2)
        return near(top / total(weights, -1)[..., None])

    fn = {"softmax": softmax, "rfa": rfa, "performer-relu": relu}[estimator]
    t = CheckRun(of(fn, estimator, dtype=dtype), "test", 0, 50)
    worst = 0.0
    for seed, size in itertools.product(range(8), (0.3, 1.0, 2.0)):
        t.rng = np.random.default_rng(seed)
        arrays, options = t.problem(6, 8, 4, 8, size=size)
        want, allowed = truth.reference(t.adapter, arrays, options)
        worst = max(worst, float(np.max(np.abs(fn(*arrays, **options) - want))) / allowed)
    assert 0.01 < worst < 0.2


@pytest.mark.parametrize("name", ["rfa-trigonometric", "rfa"])
def test_allowed_errors_of_sums_that_cancel(name):
    """One visible key: the formula is exact there, and sums of features may all but vanish."""
    tags = {} if name == "rfa-trigonometric" else {"features": "trigonometric"}
    adapter = of(naive.random_feature_attention, name, "omega", "mask", **tags)
    rng, worst = np.random.default_rng(0), 0.0
    for _ in range(120):
        q, k, v = rng.standard_normal((3, 4, 5, 4))
        given = {"omega": rng.standard_normal((5, 4)), "mask": np.arange(5) == 2}
        want, allowed = truth.reference(adapter, (q, k, v), given)
        got = refattn.random_feature_attention(q, k, v, features="trigonometric", **given)
        error = float(np.max(np.abs(got - want)))
        assert error <= allowed
        worst = max(worst, error)
    assert worst > 1e-12  # as large as that


def test_allowed_errors_are_of_the_keys_that_queries_see():
    """Aligned at the first token, the first query sees one key, and that of a small feature."""
    q, k, v = np.zeros((2, 1)), np.array([[-8.0], [0.0], [0.0]]), np.ones((3, 1))

    def allowed(alignment):
        adapter = of(refattn.linear_attention, "linear", "causal", causal=alignment, epsilon=1e-6)
        seen = adapter.visible(2, 3, {"causal": True, "mask": np.array([True, True, False])})
        assert np.sum(seen, -1).tolist() == ([1, 2] if alignment == "top-left" else [2, 2])
        return truth.declared(adapter, (q, k, v), {"causal": True})

    assert allowed("top-left") == pytest.approx(2 * 2e-6 / np.exp(-8), rel=1e-2)
    assert allowed("bottom-right") == pytest.approx(2 * 4e-6, rel=1e-2)


@pytest.mark.parametrize("mask", [None, np.array([True, False, True]), np.ones((2, 3), bool)])
def test_allowed_errors_of_frequencies_of_each_query(mask):
    """The largest weight of a query is 1 for each of its frequencies, whatever it sees."""
    rng = np.random.default_rng(0)
    q, k, v = np.zeros((2, 1)), np.zeros((3, 1)), np.ones((3, 1))
    adapter = of(refattn.randomized_attention, "ra", "omega", "causal", epsilon=1e-6)
    options = {"omega": rng.standard_normal((2, 5, 1)), "causal": True}
    if mask is not None:
        options["mask"] = mask
    seen = np.sum(adapter.visible(2, 3, options), -1)
    # Each key adds an epsilon, and so does the sum of each frequency, of which there may be a mean.
    want = max((count + len(options["omega"])) / count for count in seen)
    assert truth.declared(adapter, (q, k, v), options) == pytest.approx(2e-6 * want)


@pytest.mark.parametrize("tenths", [1, 10])
def test_sums_of_many_terms_one_by_one(tenths):
    """Equal roundings of equal terms add up, to far more than C eps."""
    m = 2049
    q, k = np.ones((1, 1)), np.ones((m, 1))
    # In any order: larger terms first, then many small ones that are rounded alike.
    v = np.where(np.arange(m) < m // 2, tenths / 10, 1 / 3)[:, None].astype(np.float32)
    total, one = np.zeros(2, np.float32), np.float32(1)
    for x in v[:, 0]:
        total = total + np.array([x, one])
    adapter = of(len, "softmax", dtype="float32")
    want, allowed = truth.reference(adapter, (q, k, v), {})
    error = float(abs(total[0] / total[1] - want[0, 0]))
    unit = truth.CONTRACT["float32"] * adapter.eps * 2 * np.max(v)
    assert unit < error < allowed / 4
    assert allowed < 400 * unit


def test_memory_of_what_is_allowed():
    """Weights of many pairs, and not a product with them for each key."""
    rng = np.random.default_rng(0)
    n, m = 257, 513
    arrays = tuple(rng.standard_normal((x, 8)) for x in (n, m, m))
    tracemalloc.start()
    truth.pulled_rounding(of(pulled(), "softmax", "vjp"), arrays, {}, np.ones((n, 8)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50 * 8 * n * m
