"""EVA, second-order summaries and local random features against 50 digits, on every backend."""

import math
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import refattn
from refattn import naive, softmax_attention, streaming
from refattn.conformance.truth import exact
from tests.conftest import Host

CHUNKED = {
    "eva": (
        partial(refattn.eva_attention, sampled=False),
        naive.eva_attention,
        exact.eva_attention,
    ),
    "published": (
        partial(refattn.eva_attention, sampled=False, log_size=False),
        partial(naive.eva_attention, log_size=False),
        partial(exact.eva_attention, log_size=False),
    ),
    "second": (
        refattn.second_order_attention,
        naive.second_order_attention,
        exact.second_order_attention,
    ),
}
SIDES = [(2, 1), (0, 0), (None, 1), (3, None), (None, None), (500, 0), (0, 500)]


def problem(seed, n, m, d=3, d_v=2, size=1.0):
    rng = np.random.default_rng(seed)
    q, k = (size * rng.standard_normal((rows, d)) for rows in (n, m))
    return q, k + 0.5, rng.standard_normal((m, d_v)), rng


def units(got, want, q, k, v, dtype=np.float64):
    """Error in units of eps (1 + largest exponent) of the largest value."""
    exponent = (np.linalg.norm(q, axis=-1).max() + np.linalg.norm(k, axis=-1).max()) ** 2
    unit = float(np.finfo(dtype).eps) * (1 + exponent) * np.abs(v).max()
    return float(np.max(np.abs(np.asarray(got - want, float)), initial=0.0)) / unit


# --- the formulas ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHUNKED)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("n", "m", "window"), [(5, 5, 2), (3, 8, 3), (8, 3, 2), (4, 9, 1), (6, 6, 9)]
)
def test_chunks_agree_with_50_digits(name, causal, n, m, window, record_accuracy):
    engine, formula, digits = CHUNKED[name]
    q, k, v, rng = problem(n + m, n, m)
    for mask in (None, np.arange(m) != 1, rng.random(m) < 0.5):
        options = {"window": window, "causal": causal}
        want = digits(q, k, v, True if mask is None else mask, **options)
        for function in (engine, formula):
            got = function(q, k, v, mask=mask, **options)
            error = units(got, want, q, k, v)
            assert error < 16, function
        record_accuracy(f"{name}", np.float64, error)


def test_summaries_at_given_frequencies():
    q, k, v, rng = problem(0, 7, 9)
    omega = rng.standard_normal((3, 3))
    options = {"window": 4, "omega": omega}
    want = exact.eva_attention(q, k, v, **options)
    for function in (refattn.eva_attention, naive.eva_attention):
        assert units(function(q, k, v, **options), want, q, k, v) < 16


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
        for function in CHUNKED[name][:2]:
            want = function(q, k, v, window=max(n, m) + 3, causal=causal)
            for window in (2**31, 2**63, 10**300):
                got = function(q, k, v, window=window, causal=causal)
                np.testing.assert_allclose(got, want, rtol=0, atol=1e-13)


def test_values_of_several_heads_have_the_same_keys():
    rng = np.random.default_rng(7)
    q, k, v = (rng.standard_normal(s) for s in ((7, 3), (7, 3), (2, 7, 2)))
    for engine, formula, _ in CHUNKED.values():
        for function in (engine, formula):
            want = np.stack([function(q, k, x, window=3) for x in v])
            np.testing.assert_allclose(function(q, k, v, window=3), want, rtol=0, atol=1e-13)


@pytest.mark.parametrize("sides", SIDES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("n", "m"), [(6, 6), (3, 8), (8, 3)])
def test_local_features_agree_with_50_digits(n, m, causal, sides):
    q, k, v, rng = problem(n, n, m)
    omega = rng.standard_normal((4, 3))
    for mask in (np.ones((n, m), bool), rng.random(m) < 0.5, rng.random((n, m)) < 0.5):
        visible = np.broadcast_to(mask, (n, m)) & (np.tri(n, m, m - n, dtype=bool) | (not causal))
        want = exact.local_random_feature_attention(q, k, v, omega, visible, window=sides)
        for function in (
            refattn.local_random_feature_attention,
            naive.local_random_feature_attention,
        ):
            got = function(q, k, v, omega=omega, mask=mask, causal=causal, window=sides)
            assert units(got, want, q, k, v) < 16, function


@given(
    st.integers(0, 2**32),
    st.integers(0, 70),
    st.integers(0, 150),
    st.integers(1, 200),
    st.booleans(),
    st.booleans(),
)
def test_engine_and_formula_at_any_size(seed, n, m, window, causal, masked):
    q, k, v, rng = problem(seed, n, m)
    mask = rng.random(m) < 0.7 if masked else None
    for engine, formula, _ in CHUNKED.values():
        got = engine(q, k, v, window=window, mask=mask, causal=causal)
        want = formula(q, k, v, window=window, mask=mask, causal=causal)
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-11)
    options = {"omega": rng.standard_normal((5, 3)), "mask": mask, "causal": causal}
    sides = (window, m // 3)
    got = refattn.local_random_feature_attention(q, k, v, window=sides, **options)
    want = naive.local_random_feature_attention(q, k, v, window=sides, **options)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-11)


@pytest.mark.parametrize("causal", [False, True])
def test_exact_in_their_limits(causal):
    """All tokens in one chunk or window; and one key to a chunk, which sums up nothing."""
    q, k, v, rng = problem(3, 40, 50)
    want = softmax_attention(q, k, v, causal=causal)
    for window in (50, 77, 1):
        for engine, _, _ in list(CHUNKED.values()):
            assert units(engine(q, k, v, window=window, causal=causal), want, q, k, v) < 16
    for sides in ((None, None), (50, 50), (50, None)):
        got = refattn.local_random_feature_attention(
            q, k, v, omega=rng.standard_normal((2, 3)), window=sides, causal=causal
        )
        assert units(got, want, q, k, v) < 16


def test_equal_keys_are_summed_up_without_loss():
    """The keys of a chunk are the same: with its size it counts for what it holds."""
    rng = np.random.default_rng(0)
    q, v = rng.standard_normal((12, 3)), rng.standard_normal((12, 2))
    k = np.repeat(rng.standard_normal((3, 3)), 4, axis=0)
    want = softmax_attention(q, k, v)
    for function in (refattn.eva_attention, refattn.second_order_attention):
        assert units(function(q, k, v, window=4), want, q, k, v) < 16
    published = refattn.eva_attention(q, k, v, window=4, log_size=False)
    assert np.abs(published - want).max() > 0.1


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
    q, k, _, rng = problem(5, 3, 12, size=0.7)
    v, sums = np.ones((12, 1)), []
    kernel = np.exp(q @ k.T / math.sqrt(3))
    far = np.abs(np.arange(12) - np.arange(3)[:, None] - 9) > 2
    for _ in range(400):
        omega = rng.standard_normal((50, 3))
        root = 3**-0.25
        phi_q, phi_k = (
            np.exp(root * x @ omega.T - root**2 * np.sum(x * x, -1, keepdims=True) / 2)
            for x in (q, k)
        )
        estimate = np.where(far, phi_q @ phi_k.T / 50, kernel)
        v_rows = rng.standard_normal((12, 1))
        got = refattn.local_random_feature_attention(q, k, v_rows, omega=omega, window=(2, 2))
        np.testing.assert_allclose(got, estimate @ v_rows / (estimate @ v), rtol=1e-10, atol=1e-12)
        sums.append(estimate.sum(-1))
    error = np.std(sums, 0) / 20
    assert np.all(np.abs(np.mean(sums, 0) - kernel.sum(-1)) < 8 * error)


# --- libraries, heads, what is hidden -------------------------------------------------------------


@pytest.mark.long("dask", "jax")
@pytest.mark.parametrize("causal", [False, True])
def test_backends_agree(backend, dtype, causal):
    rng = np.random.default_rng(2)
    q, k, v = (
        rng.standard_normal(s).astype(dtype) for s in ((2, 4, 9, 3), (2, 2, 11, 3), (2, 2, 11, 2))
    )
    omega = rng.standard_normal((4, 3, 3))
    wide = [x.astype(np.float64) for x in (q, k, v)]
    atol = 300 * float(np.finfo(dtype).eps)
    mask = rng.random((2, 1, 1, 11)) < 0.8
    common = {"mask": mask, "causal": causal}
    for function, options in (
        (refattn.eva_attention, {"window": 4, "rng": 1}),
        (refattn.eva_attention, {"window": 4, "omega": Host(omega)}),
        (refattn.second_order_attention, {"window": 4}),
        (refattn.local_random_feature_attention, {"window": (2, 1), "omega": Host(omega)}),
    ):
        plain = {k: getattr(x, "value", x) for k, x in options.items()}
        want = function(*wide, **plain, **common)
        got = backend.call(function, q, k, v, **options, **common)
        np.testing.assert_allclose(got, want, rtol=0, atol=atol)


@pytest.mark.parametrize("name", [*CHUNKED, "local"])
def test_heads_share_keys_and_hidden_keys_do_not_exist(name):
    rng = np.random.default_rng(4)
    q, k, v = (rng.standard_normal(s) for s in ((6, 10, 3), (2, 12, 3), (2, 12, 2)))
    if name == "local":
        omega = rng.standard_normal((5, 3))
        function = partial(refattn.local_random_feature_attention, omega=omega, window=(3, 3))
    else:
        function = partial(CHUNKED[name][0], window=5)
    mask = rng.random(12) < 0.6
    want = function(q, k, v, mask=mask)
    each = function(q, np.repeat(k, 3, 0), np.repeat(v, 3, 0), mask=mask)
    np.testing.assert_array_equal(want, each)
    hidden_k, hidden_v = k.copy(), v.copy()
    hidden_k[:, ~mask], hidden_v[:, ~mask] = np.nan, np.inf
    np.testing.assert_array_equal(function(q, hidden_k, hidden_v, mask=mask), want)
    np.testing.assert_array_equal(function(q, k, v, mask=np.zeros(12, bool)), 0 * want)


@pytest.mark.parametrize("name", [*CHUNKED, "local"])
def test_later_tokens_change_nothing(name):
    rng = np.random.default_rng(6)
    q, k, v = (rng.standard_normal((20, d)) for d in (3, 3, 2))
    if name == "local":
        omega = rng.standard_normal((5, 3))
        function = partial(refattn.local_random_feature_attention, omega=omega, window=(3, 3))
    else:
        function = partial(CHUNKED[name][0], window=4)
    want = function(q, k, v, causal=True)
    q[13:], k[13:], v[13:] = 30.0, np.nan, np.inf
    np.testing.assert_array_equal(function(q, k, v, causal=True)[:12], want[:12])


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (
            lambda x: refattn.eva_attention(x, x, x, window=0),
            ValueError,
            "`window` must be a posit",
        ),
        (
            lambda x: refattn.eva_attention(x, x, x, window=2.0),
            TypeError,
            "`window` must be a posit",
        ),
        (
            lambda x: refattn.eva_attention(x, x, x, window=2, omega=x),
            ValueError,
            r"`omega` must have shape \(..., C, d\) = \(..., 3, 3\)",
        ),
        (
            lambda x: refattn.second_order_attention(x, x, x, window=2, mask=np.eye(5) > 0),
            ValueError,
            "`mask` must be the same for all queries",
        ),
        (
            lambda x: refattn.eva_attention(x, x, x, window=2, sampled=1),
            TypeError,
            "`sampled` must be",
        ),
        (
            lambda x: refattn.local_random_feature_attention(x, x, x, window=3, omega=x),
            ValueError,
            "`window` must be a pair",
        ),
        (
            lambda x: refattn.local_random_feature_attention(x, x, x, window=(1, 1)),
            ValueError,
            "Exactly one of `omega` and `num_features`",
        ),
    ],
)
def test_what_is_refused(call, error, said):
    with pytest.raises(error, match=said):
        call(np.ones((5, 3)))
