"""Coresets and samples of keys: 50 digits, limits, and indices of every kind."""

import numpy as np
import pytest

from refattn import coreset_attention, naive, sampled_key_attention, softmax_attention
from refattn.estimators import key_sampling
from refattn.judge.conformance.truth.digits import formulas
from refattn.typing import KEY_LAWS
from tests.estimators.problems import problem, units


def condition(k, indices, mask=None):
    """Root of the condition of the Gaussian kernel of J, and the number of keys there."""
    chosen = k[indices] / k.shape[-1] ** 0.25
    if mask is not None:
        chosen = chosen[mask[indices]]
    gram = np.exp(-(np.linalg.norm(chosen[:, None] - chosen, axis=-1) ** 2) / 2)
    return float(np.sqrt(np.linalg.cond(gram))) * len(chosen)


@pytest.mark.parametrize("size", [0.1, 1.0, 4.0])
@pytest.mark.parametrize(
    ("n", "m", "count"), [(4, 9, 1), (4, 9, 5), (6, 12, 11), (3, 7, 7), (1, 1, 1)]
)
def test_coreset_agrees_with_50_digits(n, m, count, size, record_accuracy):
    """To C eps (1 + largest exponent) S sqrt(cond g) of the sum of the absolute terms."""
    q, k, v, rng = problem(m, n, m, size=size)
    indices = rng.permutation(m)[:count]
    mask = np.arange(m) != indices[-1] if count > 1 else None
    for given_mask in (None, mask):
        want = formulas().coreset_attention(q, k, v, indices=indices, mask=given_mask)
        terms = absolute_terms(q, k, v, indices, given_mask)
        allowed = 4 * condition(k, indices, given_mask) * terms
        for function in (coreset_attention, naive.coreset_attention):
            got = function(q, k, v, indices=indices, mask=given_mask)
            error = units(got, want, q, k, v)
            assert error < allowed, function
        record_accuracy("coreset", np.float64, error / allowed)


@pytest.mark.parametrize(
    ("size", "most"), [(0.1, 2e-5), (0.03, 2e-4), (0.01, 1.5e-3), (0.003, 1.2e-2)]
)
def test_coreset_of_keys_that_are_near(size, most):
    """What the docstring says of float32 and float64, which has digits for them."""
    errors = {np.float32: 0.0, np.float64: 0.0}
    for seed in range(6):
        rng = np.random.default_rng(seed)
        k = size * rng.standard_normal((12, 3))
        q, v = rng.standard_normal((4, 3)), rng.standard_normal((12, 2))
        arrays = [x.astype(np.float32) for x in (q, k, v)]
        wide = [x.astype(np.float64) for x in arrays]
        indices = rng.permutation(12)[:6]
        want = np.asarray(formulas().coreset_attention(*wide, indices=indices), float)
        terms = absolute_terms(*wide, indices)
        for dtype, tokens in ((np.float32, arrays), (np.float64, wide)):
            got = coreset_attention(*tokens, indices=indices)
            errors[dtype] = max(errors[dtype], float(np.abs(got - want).max()))
            allowed = 4 * condition(wide[1], indices) * terms
            assert units(got, want, *wide, dtype) < allowed
    assert most / 4 < errors[np.float32] < most
    assert errors[np.float64] < 1e-10


def absolute_terms(q, k, v, indices, mask=None):
    """Sum of the absolute terms of numerator and denominator over the denominator, at least 1."""
    m = len(k)
    weights = formulas().coreset_attention(q, k, np.eye(m), indices=indices, mask=mask)
    size = np.abs(np.asarray(weights, float)).sum(-1).max()
    root = k.shape[-1] ** -0.25
    seen = np.ones(m, bool) if mask is None else mask
    x = root * (k - k[seen].mean(0))
    carried = np.exp(root * q @ x[indices].T)
    gram = np.exp(x[indices] @ x[indices].T)
    some = seen[indices]
    w = np.linalg.pinv(gram[np.ix_(some, some)]) @ np.exp(x[indices][some] @ x[seen].T)
    total = carried[:, some] @ w
    apart = carried[:, some] @ np.abs(w)
    return float(max(1.0, size, (apart.sum(-1) / np.abs(total.sum(-1))).max()))


def test_all_keys_are_exact_attention_however_near_they_are():
    rng = np.random.default_rng(0)
    q, v = rng.standard_normal((5, 3)), rng.standard_normal((40, 2))
    for apart in (1.0, 1e-2, 1e-4):
        k = rng.standard_normal(3) + apart * rng.standard_normal((40, 3))
        got = coreset_attention(q, k, v, indices=rng.permutation(40))
        # Those nearer than rounding are one: an error of the order of the root of S eps.
        assert units(got, softmax_attention(q, k, v), q, k, v) < (16 if apart == 1 else 1e8)


def test_equal_and_hidden_keys_of_a_coreset_count_once():
    q, k, v, _ = problem(1, 5, 8)
    k[5], mask = k[2], np.arange(8) != 3
    want = coreset_attention(q, k, v, indices=np.array([2, 0]), mask=mask)
    for indices in ([2, 0, 2], [2, 0, 5], [2, 0, 3], [2, 2, 0]):
        for function in (coreset_attention, naive.coreset_attention):
            got = function(q, k, v, indices=np.array(indices), mask=mask)
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-12)
    nothing = coreset_attention(q, k, v, indices=[3], mask=mask)
    np.testing.assert_array_equal(nothing, 0 * want)


def test_far_keys_leave_each_key_its_own():
    """Where keys are at right angles only J counts; in float32 exponents are beyond its range."""
    rng = np.random.default_rng(3)
    k = 60.0 * np.eye(4) + 0.01 * rng.standard_normal((4, 4))
    q, v = 60.0 * np.eye(4)[:2], rng.standard_normal((4, 2))
    for dtype in (np.float64, np.float32):
        arrays = (x.astype(dtype) for x in (q, k, v))
        got = coreset_attention(*arrays, indices=np.array([0, 1]))
        np.testing.assert_allclose(got, v[:2], rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("size", [1.0, 10.0, 100.0])
def test_one_key_answers_what_it_reads_as_a_query(dtype, size):
    """J of one key s: softmax attention of the query k_s less the mean, whatever the query."""
    q, k, v = (x.astype(dtype) for x in problem(9, 4, 12, size=size)[:3])
    k -= k.mean(0)
    for s in range(12):
        got = coreset_attention(q, k, v, indices=[s])
        want = softmax_attention(*(x.astype(np.float64) for x in (k[s : s + 1], k, v)))
        assert units(got, want, k, k, v, dtype) < 16


def test_what_is_not_finite_stays_in_its_column():
    q, k, v, _ = problem(10, 4, 9)
    want = coreset_attention(q, k, v, indices=[0, 4, 2])
    for j in (1, 4):  # in J and not
        for value in (np.nan, np.inf):
            spoilt = v.copy()
            spoilt[j, 0] = value
            got = coreset_attention(q, k, spoilt, indices=[0, 4, 2])
            assert not np.isfinite(got[:, 0]).any()
            np.testing.assert_allclose(got[:, 1], want[:, 1], rtol=0, atol=1e-13)


def test_indices_may_be_of_query_heads_or_of_key_heads():
    rng = np.random.default_rng(8)
    q, k, v = (rng.standard_normal(s) for s in ((6, 10, 3), (2, 12, 3), (2, 12, 2)))
    for heads in (2, 6):
        pivots = np.stack([rng.permutation(12)[:4] for _ in range(heads)])
        for function, indices in (
            (coreset_attention, pivots),
            (sampled_key_attention, rng.integers(0, 12, (heads, 4))),
        ):
            each = np.repeat(indices, 6 // heads, 0)
            want = function(q, np.repeat(k, 3, 0), np.repeat(v, 3, 0), indices=each)
            got = function(q, k, v, indices=indices)
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-13)


def test_drawn_for_key_heads():
    """What is drawn is of a shape that is taken, with a mask of each query head too."""
    rng = np.random.default_rng(11)
    q, k, v = (rng.standard_normal(s) for s in ((6, 5, 3), (2, 9, 3), (2, 9, 2)))
    for pivots in key_sampling.PIVOTS:
        indices = key_sampling.draw_pivots(k, num_keys=4, pivots=pivots, rng=0)
        got = coreset_attention(q, k, v, num_keys=4, pivots=pivots, rng=0)
        np.testing.assert_array_equal(got, coreset_attention(q, k, v, indices=indices))
        of_head = {"num_keys": 4, "pivots": pivots, "rng": 0, "mask": rng.random((6, 1, 9)) < 0.8}
        want = coreset_attention(q, np.repeat(k, 3, 0), np.repeat(v, 3, 0), **of_head)
        np.testing.assert_allclose(coreset_attention(q, k, v, **of_head), want, rtol=0, atol=1e-12)
    for law in KEY_LAWS:
        for mask in (None, rng.random((6, 1, 9)) < 0.8):
            options = {"num_keys": 4, "law": law, "rng": 0, "mask": mask}
            drawn = key_sampling.draw_keys(q, k, v, **options)
            each = key_sampling.draw_keys(q, np.repeat(k, 3, 0), np.repeat(v, 3, 0), **options)
            assert drawn.indices.shape == each.indices.shape
            if law == "softmax" or mask is not None:  # else those of one key head are the same
                np.testing.assert_array_equal(drawn.indices, each.indices)
            sampled_key_attention(q, k, v, **drawn._asdict(), mask=mask)


def test_indices_of_any_kind_of_integer(torch):
    q, k, v, _ = problem(12, 4, 300)
    want = coreset_attention(q, k, v, indices=[0, 100, 7])
    for dtype in (torch.int8, torch.uint8, torch.int64):
        arrays = (torch.asarray(x) for x in (q, k, v))
        got = coreset_attention(*arrays, indices=torch.asarray([0, 100, 7], dtype=dtype))
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-12)


def test_lists_of_indices_of_each_head():
    q, k, v, _ = problem(13, 4, 9)
    options = {"log_probability": np.array([[0.5], [0.25]])}
    for function in (sampled_key_attention, naive.sampled_key_attention):
        got = function(np.stack([q, q]), k, v, indices=[[3], [2]], **options)
        np.testing.assert_allclose(got, np.stack([np.tile(v[j], (4, 1)) for j in (3, 2)]))


X = np.ones((5, 3))


@pytest.mark.parametrize("bad", [[0, 5], [-1, 2]])
def test_indices_that_are_not_of_keys(backend, bad):
    """On every library where they have values."""
    if backend.name == "dask":
        pytest.skip("has no values yet")
    x, indices = backend.array(X), backend.array(np.array(bad))
    words = rf"`indices` must be from 0 to 4, got {min(bad)} to"
    for function in (coreset_attention, sampled_key_attention):
        with pytest.raises(ValueError, match=words):
            function(x, x, x, indices=indices)


@pytest.mark.long("coreset_attention")
@pytest.mark.parametrize("function", [coreset_attention, sampled_key_attention])
def test_indices_while_jax_traces(function):
    jax = pytest.importorskip("jax")
    x = jax.numpy.asarray(X)
    run = jax.jit(lambda indices: function(x, x, x, indices=indices))
    np.testing.assert_allclose(run(jax.numpy.asarray([0, 2])), X, rtol=1e-6)
