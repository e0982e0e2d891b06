"""EVA, second-order summaries and local random features: limits, draws, values that overflow."""

import math
from functools import partial

import numpy as np
import pytest

import refattn
from refattn import naive, softmax_attention, streaming
from refattn.engine import chunks
from tests.estimators.problems import problem, units

CHUNKED = {
    "eva": (partial(refattn.eva_attention, omega="mean"), naive.eva_attention),
    "published": (
        partial(refattn.eva_attention, omega="mean", log_size=False),
        partial(naive.eva_attention, log_size=False),
    ),
    "second": (refattn.second_order_attention, naive.second_order_attention),
}


def test_drawn_frequencies_of_summaries():
    """Each chunk has its own, N(mean query + mean key, I) in kernel coordinates."""
    q, k, v, _ = problem(1, 8, 8)
    means = [x.reshape(4, 2, 3).mean(1) / 3**0.25 for x in (q, k)]
    omega = means[0] + means[1] + np.random.default_rng(5).standard_normal((4, 3))
    want = refattn.eva_attention(q, k, v, window=2, omega=omega)
    got = refattn.eva_attention(q, k, v, window=2, rng=5)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", CHUNKED)
@pytest.mark.parametrize(("n", "m"), [(5, 5), (7, 3), (2, 6), (3, 0), (0, 3)])
def test_a_window_of_more_than_all_tokens(name, n, m):
    """It takes no memory, and is that of one chunk; queries before the first key have another."""
    q, k, v, _ = problem(2, n, m)
    for causal in (False, True):
        for function in CHUNKED[name]:
            want = function(q, k, v, window=max(n, m) + 3, causal=causal)
            for window in (2**31, 2**63, 10**300):
                got = function(q, k, v, window=window, causal=causal)
                np.testing.assert_allclose(got, want, rtol=0, atol=1e-13)


@pytest.mark.parametrize("causal", [False, True])
def test_exact_in_their_limits(causal):
    """All tokens in one chunk or window; and one key to a chunk, which sums up nothing."""
    q, k, v, rng = problem(3, 40, 50)
    want = softmax_attention(q, k, v, causal=causal)
    for window in (50, 77, 1):
        for engine, _ in CHUNKED.values():
            assert units(engine(q, k, v, window=window, causal=causal), want, q, k, v) < 16
    for sides in ((None, None), (50, 50), (50, None)):
        got = refattn.local_random_feature_attention(
            q, k, v, omega=rng.standard_normal((2, 3)), window=sides, causal=causal
        )
        assert units(got, want, q, k, v) < 16


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_values_whose_sum_overflows(dtype):
    k = np.random.default_rng(3).standard_normal((8, 2)).astype(dtype)
    v = np.full((8, 1), 0.9 * np.finfo(dtype).max, dtype)
    eps = np.finfo(dtype).eps
    for function in (refattn.eva_attention, refattn.second_order_attention):
        for mask in (None, np.arange(8) % 3 < 2):
            np.testing.assert_allclose(function(k, k, v, window=4, mask=mask), v, rtol=32 * eps)
    state = streaming.SecondOrderState.init(k, v, window=4)
    np.testing.assert_allclose(state.read(k[:1]), v[:1], rtol=32 * eps)


def test_normal_keys_have_the_sums_of_second_order():
    """As the keys and values of a chunk become many and jointly normal, nothing is lost."""
    rng = np.random.default_rng(1)
    q, errors = 0.5 * rng.standard_normal((4, 2)), []
    turn = rng.standard_normal((2, 2))
    for m in (2**8, 2**16):
        k = rng.standard_normal((m, 2))
        v = k @ turn + rng.standard_normal((m, 2))
        want = softmax_attention(q, k, v, scale=1.0)
        # Queries are level with the last keys: the first chunk is far from all of them.
        far = np.concatenate([k, np.full((4, 2), 0.0)]), np.concatenate([v, np.zeros((4, 2))])
        mask = np.arange(m + 4) < m
        got = refattn.second_order_attention(q, *far, window=m, mask=mask, scale=1.0)
        errors.append(np.abs(got - want).max())
    assert errors[1] < 0.02 < 10 * errors[1] + 0.02
    assert errors[1] < errors[0]


def test_sums_of_local_features_are_unbiased():
    """The mean of the estimated normaliser over many draws; 8 standard errors, 1e-15."""
    q, k, v, rng = problem(5, 3, 12, size=0.7)
    omega, root = rng.standard_normal((400, 50, 3)), 3**-0.25
    kernel = np.exp(q @ k.T / math.sqrt(3))
    phi_q, phi_k = (
        np.exp(root * x @ omega.mT - root**2 * np.sum(x * x, -1, keepdims=True) / 2) for x in (q, k)
    )
    far = np.abs(np.arange(12) - np.arange(3)[:, None] - 9) > 2
    estimate = np.where(far, phi_q @ phi_k.mT / 50, kernel)
    sums = estimate.sum(-1)
    each = np.broadcast_to(q, (400, *q.shape))
    got = refattn.local_random_feature_attention(each, k, v, omega=omega, window=(2, 2))
    np.testing.assert_allclose(got, estimate @ v / sums[..., None], rtol=1e-10, atol=1e-12)
    assert np.all(np.abs(np.mean(sums, 0) - kernel.sum(-1)) < 8 * np.std(sums, 0) / 20)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("n", "m"), [(40, 40), (37, 45), (45, 37)])
@pytest.mark.parametrize(("sides", "causal"), [((3, 5), False), ((6, 0), True), ((0, 2), False)])
def test_narrow_windows_in_one_block(backend, n, m, sides, causal, monkeypatch):
    """Queries see keys of three chunks, in libraries other than NumPy; here of 8 tokens."""
    if backend.name in ("numpy", "numpy-readonly", "jax", "dask"):
        pytest.skip("has blocks of its own, or is slow")
    monkeypatch.setattr(chunks, "_SHORTEST", 8)
    rng = np.random.default_rng(n)
    q, k, v = (rng.standard_normal((2, *x)) for x in ((n, 3), (m, 3), (m, 2)))
    omega, mask = rng.standard_normal((7, 3)), rng.random((2, 1, m)) < 0.7
    local = refattn.local_random_feature_attention
    for options in ({}, {"mask": mask}):
        options |= {"window": sides, "omega": omega, "causal": causal}
        want = local(q, k, v, **options)
        got = backend.call(local, q, k, v, **options)
        np.testing.assert_allclose(got, want, rtol=1e-13, atol=1e-13)
