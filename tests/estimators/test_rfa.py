"""Random-feature attention and the registry of estimators."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import refattn
from refattn import (
    estimators,
    importance_sampled_attention,
    kernels,
    naive,
    random_feature_attention,
    registry,
    sampling,
    softmax_attention,
)
from tests import reference
from tests.conftest import Host
from tests.reference import CONTRACT
from tests.test_attention import draw, seeds, sizes, with_norm


def exponent(q, k, omega, scale=None):
    """Largest exponent of the two hops, in kernel coordinates."""
    root = float(reference.root(scale, q.shape[-1]))
    length = reference.norm(omega)
    norm_q, norm_k = root * reference.norm(q), root * reference.norm(k)
    return length * max(norm_q, norm_k) + norm_k**2 / 2


def tolerance(q, k, omega):
    return 2 * CONTRACT * float(np.finfo(q.dtype).eps) * (1 + exponent(q, k, omega))


# --- against 50-digit arithmetic and a slow formulation ------------------------------------------


@pytest.mark.parametrize("d", [1, 2, 64])
@pytest.mark.parametrize(
    ("case", "norm_q", "norm_k"),
    [
        ("norms 1", 1.0, 1.0),
        ("norms 10", 10.0, 10.0),
        ("norms 100, features underflow", 100.0, 100.0),
        ("norms 1e3, features underflow", 1e3, 1e3),
    ],
)
@pytest.mark.parametrize(
    "variant", ["full", "causal", "key mask", "mask", "causal mask", "weights"]
)
def test_accuracy(case, norm_q, norm_k, d, variant, dtype, record_accuracy):
    rng = np.random.default_rng([d, len(case), len(variant)])
    n, m, num_features = 5, 7, 6
    q = with_norm(draw(rng, n, d, dtype=dtype), norm_q)
    k = with_norm(draw(rng, m, d, dtype=dtype), norm_k)
    v = draw(rng, m, 2, dtype=dtype)
    omega = draw(rng, num_features, d, dtype=dtype)
    options = {}
    visible = True
    log_weight = 0.0
    if "causal" in variant:
        options["causal"], visible = True, np.tri(n, m, m - n, dtype=bool)
    if variant == "key mask":
        options["mask"] = visible = rng.random(m) < 0.5
    elif "mask" in variant:
        options["mask"] = rng.random((n, m)) < 0.5
        visible = visible & options["mask"]
    if variant == "weights":
        options["log_weight"] = log_weight = draw(rng, num_features, dtype=dtype)
    got = random_feature_attention(q, k, v, omega=omega, **options)
    want = reference.random_feature_attention(q, k, v, omega, log_weight, visible)
    worst = reference.error(got, want, np.abs(v).max(), exponent(q, k, omega))
    record_accuracy(f"rfa, {variant}, {case}", dtype, worst)
    assert worst <= CONTRACT


@pytest.mark.parametrize("share", [0.5, 0.7, 0.9, 1.0, 1.1, 1.5, 8.0])
@pytest.mark.parametrize("weighted", [False, True])
def test_accuracy_where_products_of_features_underflow(share, weighted, dtype, record_accuracy):
    # The sample at which a query's feature is largest is one at which those of the keys are least:
    # e^-reach of the largest terms is left in a pair, near the underflow threshold and beyond.
    rng = np.random.default_rng(int(10 * share))
    n = m = 9
    reach = -share * float(np.log(np.finfo(dtype).smallest_normal))
    omega = np.array([[4.0, 0.1], [-4.0, 0.2], [0.0, 1.0]], dtype)
    sign = np.where(np.arange(m) % 3 == 1, 1, -1)[:, None]  # some pairs agree, some are opposite
    size = reach / 8
    q = (np.array([[size, 0.3]]) * sign + 0.01 * draw(rng, n, 2)).astype(dtype)
    k = (np.array([[-size, 0.2]]) * np.roll(sign, 1) + 0.01 * draw(rng, m, 2)).astype(dtype)
    v, log_weight = draw(rng, m, 2, dtype=dtype), np.array([0.0, -1.0, -400.0 * weighted], dtype)
    options = {"omega": omega, "log_weight": log_weight, "scale": 1.0, "causal": True}
    got = random_feature_attention(q, k, v, **options)
    visible = np.tri(n, m, dtype=bool)
    want = reference.random_feature_attention(q, k, v, omega, log_weight, visible, scale=1.0)
    largest = exponent(q, k, omega, 1.0) + float(np.abs(log_weight).max())
    worst = reference.error(got, want, np.abs(v).max(), largest)
    record_accuracy(f"rfa, causal, opposite peaks, {share} of the range", dtype, worst)
    assert worst <= CONTRACT


@pytest.mark.parametrize(("n", "m"), [(300, 300), (140, 155), (155, 140), (1, 33), (129, 128)])
@pytest.mark.parametrize("masked", [False, True])
def test_causal_agrees_with_the_slow_formulation(n, m, masked):
    rng = np.random.default_rng(n + m)
    q, k, v = draw(rng, 2, n, 3), draw(rng, 2, m, 3), draw(rng, 2, m, 2)
    omega = sampling.draw(5, 3, rng=rng).omega
    mask = None
    if masked:
        mask = rng.random((2, 1, m)) < 0.7
        mask[..., : max(1, m - n + 1)] = True
    got = random_feature_attention(q, k, v, omega=omega, mask=mask, causal=True)
    np.testing.assert_array_equal(got[:, : max(0, n - m)], 0)
    want = naive.random_feature_attention(q, k, v, omega=omega, mask=mask, causal=True)
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance(q, k, omega))
    visible = np.broadcast_to(naive.visible(q, k, mask=mask, causal=True), (2, n, m))
    dense = random_feature_attention(q, k, v, omega=omega, mask=visible)
    np.testing.assert_allclose(got, dense, rtol=0, atol=tolerance(q, k, omega))


@given(sizes, sizes, sizes, sizes, seeds, st.sampled_from([np.float32, np.float64]))
def test_agrees_with_the_slow_formulation(n, m, d, num_features, seed, dtype):
    rng = np.random.default_rng(seed)
    q, k = draw(rng, 2, 3, n, d, dtype=dtype), draw(rng, 3, m, d, dtype=dtype)
    v = draw(rng, 2, 1, m, 4, dtype=dtype)
    omega = draw(rng, 3, num_features, d, dtype=dtype)
    got = random_feature_attention(q, k, v, omega=omega)
    wide = (x.astype(np.float64) for x in (q, k, v))
    want = naive.random_feature_attention(*wide, omega=omega)
    atol = tolerance(q, k, omega) * np.abs(v).max()
    np.testing.assert_allclose(got, want, rtol=0, atol=atol)


# --- identities ----------------------------------------------------------------------------------


def test_one_frequency_ignores_the_queries():
    rng = np.random.default_rng(0)
    k, v, omega = draw(rng, 6, 3), draw(rng, 6, 2), draw(rng, 1, 3)
    a, b = (random_feature_attention(draw(rng, 4, 3), k, v, omega=omega) for _ in range(2))
    np.testing.assert_allclose(a, b, atol=1e-14)
    omega = draw(rng, 5, 3)
    a, b = (random_feature_attention(draw(rng, 4, 3), k, v, omega=omega) for _ in range(2))
    assert np.max(np.abs(a - b)) > 0.01  # the control: with five they matter


@given(sizes, sizes, sizes, seeds, st.booleans())
def test_metamorphic(n, m, d, seed, causal):
    rng = np.random.default_rng(seed)
    q, k, v, omega = draw(rng, n, d), draw(rng, m, d), draw(rng, m, 2), draw(rng, 4, d)

    def rfa(q, k, v, omega):
        return random_feature_attention(q, k, v, omega=omega, causal=causal)

    out = rfa(q, k, v, omega)
    atol = 2 * tolerance(q, k, omega) * np.abs(v).max()
    seen = slice(max(0, n - m), None) if causal else slice(None)
    ones = rfa(q, k, np.full_like(v, 3.0), omega)[seen]
    np.testing.assert_allclose(ones, 3.0, rtol=1e-14)
    rotation = sampling.draw(d, d, coupling="orthogonal", rng=rng).omega
    rotation /= np.linalg.norm(rotation, axis=-1, keepdims=True)
    rotated = rfa(q @ rotation, k @ rotation, v, omega @ rotation)
    np.testing.assert_allclose(rotated, out, rtol=0, atol=atol)
    np.testing.assert_allclose(rfa(q, k, v, omega[::-1]), out, rtol=0, atol=atol)
    np.testing.assert_allclose(rfa(q, k[:1].repeat(m, 0), v, omega)[-1], v.mean(0), atol=atol)
    if not causal:
        order = rng.permutation(m)
        np.testing.assert_allclose(rfa(q, k[order], v[order], omega), out, rtol=0, atol=atol)
    single = rfa(q, k[:1], v[:1], omega)[-1]
    np.testing.assert_allclose(single, v[0], rtol=1e-14)


@pytest.mark.parametrize("masked", [False, True])
@given(st.integers(2, 300), st.integers(1, 299), seeds)
def test_editing_the_future_changes_nothing(masked, n, t, seed):
    t = min(t, n - 1)
    rng = np.random.default_rng(seed)
    q, k, v = draw(rng, n, 3), draw(rng, n, 3), draw(rng, n, 2)
    omega = draw(rng, 4, 3)
    mask = rng.random((1, n)) < 0.8 if masked else None
    before = random_feature_attention(q, k, v, omega=omega, mask=mask, causal=True)
    for x in (q, k, v):
        x[t:] = rng.choice([1e3, -1e3, np.nan, np.inf, 0.0], x[t:].shape)
    with np.errstate(all="ignore"):
        after = random_feature_attention(q, k, v, omega=omega, mask=mask, causal=True)
    np.testing.assert_array_equal(before[:t], after[:t])


@given(sizes, sizes, seeds, st.booleans())
def test_masking_equals_deleting(n, m, seed, causal):
    rng = np.random.default_rng(seed)
    q, k, v, omega = draw(rng, n, 3), draw(rng, m, 3), draw(rng, m, 2), draw(rng, 4, 3)
    kept = rng.random(m) < 0.6
    want = random_feature_attention(q, k[kept], v[kept], omega=omega)
    atol = tolerance(q, k, omega) * np.abs(v).max()
    k[~kept], v[~kept] = np.nan, np.nan
    got = random_feature_attention(q, k, v, omega=omega, mask=kept)
    np.testing.assert_allclose(got, want, rtol=0, atol=atol)
    rows = np.broadcast_to(kept, (n, m))
    got = random_feature_attention(q, k, v, omega=omega, mask=rows)
    np.testing.assert_allclose(got, want, rtol=0, atol=atol)


def test_overflowing_keys_are_not_hidden():
    x, v = np.full((4, 4), 1e30, np.float32), np.ones((4, 1), np.float32)
    with np.errstate(all="ignore"):
        assert np.all(np.isnan(random_feature_attention(x, x, v, omega=np.ones((2, 4)))))


def test_grouped_heads():
    rng = np.random.default_rng(0)
    q, k, v = draw(rng, 2, 6, 40, 3), draw(rng, 2, 2, 40, 3), draw(rng, 2, 2, 40, 2)
    wide_k, wide_v = np.repeat(k, 3, 1), np.repeat(v, 3, 1)
    mask = rng.random((2, 6, 1, 40)) < 0.7
    full = rng.random((6, 40, 40)) < 0.7
    for omega in (draw(rng, 5, 3), draw(rng, 6, 5, 3), draw(rng, 2, 1, 5, 3)):
        for kwargs in ({}, {"causal": True}, {"mask": mask, "causal": True}, {"mask": full}):
            got = random_feature_attention(q, k, v, omega=omega, **kwargs)
            want = random_feature_attention(q, wide_k, wide_v, omega=omega, **kwargs)
            np.testing.assert_allclose(got, want, atol=1e-13)


def test_scale_is_applied_to_the_arguments():
    rng = np.random.default_rng(0)
    q, k, v, omega = draw(rng, 4, 3), draw(rng, 5, 3), draw(rng, 5, 2), draw(rng, 6, 3)
    got = random_feature_attention(2 * q, 2 * k, v, omega=omega, scale=0.25)
    want = random_feature_attention(q, k, v, omega=omega, scale=1.0)
    np.testing.assert_allclose(got, want, atol=1e-14)


@pytest.mark.parametrize("coupling", sampling.COUPLINGS)
def test_drawing_is_evaluating_at_drawn_frequencies(coupling):
    rng = np.random.default_rng(0)
    q, k, v = draw(rng, 4, 3), draw(rng, 5, 3), draw(rng, 5, 2)
    got = random_feature_attention(q, k, v, num_features=7, coupling=coupling, rng=42)
    omega = sampling.draw(7, 3, coupling=coupling, rng=42).omega
    np.testing.assert_array_equal(got, random_feature_attention(q, k, v, omega=omega))
    assert np.any(got != random_feature_attention(q, k, v, num_features=7, rng=43))


def test_error_falls_as_features_grow():
    # A fixed draw, not evidence: the error of 2^14 features is far below that of 2^4.
    rng = np.random.default_rng(0)
    q, k, v = draw(rng, 20, 4), draw(rng, 30, 4), draw(rng, 30, 2)
    exact = softmax_attention(q, k, v)
    errors = [
        np.linalg.norm(random_feature_attention(q, k, v, num_features=s, rng=1) - exact)
        for s in (2**4, 2**14)
    ]
    assert errors[1] < errors[0] / 4


# --- every array library, the registry, bad input ---------------------------------------------


@pytest.mark.long
def test_masked_chunks_without_wide_integers():
    jax = pytest.importorskip("jax")
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((9, 3)).astype(np.float32) for _ in range(3))
    mask = rng.random((1, 9)) < 0.7
    with jax.enable_x64(False):  # a warning of truncated integers would be an error
        arrays = (jax.numpy.asarray(x) for x in (q, k, v))
        seen = jax.numpy.asarray(mask)
        got = refattn.linear_randomized_attention(*arrays, num_proposals=3, rng=0, mask=seen)
    want = refattn.linear_randomized_attention(q, k, v, num_proposals=3, rng=0, mask=mask)
    np.testing.assert_allclose(np.asarray(got), want, atol=1e-5)


@pytest.mark.long("float32")
@pytest.mark.parametrize("options", ["plain", "causal", "key mask", "mask", "groups"])
def test_backends_agree(backend, dtype, options):
    rng = np.random.default_rng(0)
    heads = 1 if options == "groups" else 2
    q = draw(rng, 2, 20, 3, dtype=dtype)
    k, v = draw(rng, heads, 22, 3, dtype=dtype), draw(rng, heads, 22, 2, dtype=dtype)
    omega, log_weight = draw(rng, 4, 3), draw(rng, 4)
    kwargs = {"causal": options in ("causal", "key mask")}
    if "mask" in options:
        kwargs["mask"] = rng.random((2, 1 if options == "key mask" else 20, 22)) < 0.5
    want = random_feature_attention(q, k, v, omega=omega, log_weight=log_weight, **kwargs)
    atol = tolerance(q, k, omega) * np.abs(v).max()
    for given_omega, given_weight in ((Host(omega), Host(log_weight)), (omega, log_weight)):
        got = backend.call(
            random_feature_attention, q, k, v, omega=given_omega, log_weight=given_weight, **kwargs
        )
        np.testing.assert_allclose(got, want, rtol=0, atol=atol)


@pytest.mark.long("jax", "dask")
def test_same_seed_same_frequencies_everywhere(backend, dtype):
    rng = np.random.default_rng(0)
    q, k, v = (draw(rng, 5, 3, dtype=dtype) for _ in range(3))
    for name, record in registry.ESTIMATORS.items():
        fitted = name.endswith(("-adapted", "-saderf"))
        if fitted or not (record.approximates and record.has("random")):
            continue  # those fitted read values: see test_adapt.py
        options = {**record.sized(4), "rng": 7}
        want = record.fn(*(x.astype(np.float64) for x in (q, k, v)), **options)
        got = backend.call(record.fn, q, k, v, **options)
        omega = sampling.draw(4, 3, rng=7).omega
        np.testing.assert_allclose(got, want, rtol=0, atol=4 * tolerance(q, k, omega), err_msg=name)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({}, ValueError, "Exactly one of `omega` and `num_features` must be given, got neither"),
        (
            {"omega": np.ones((2, 3)), "num_features": 2},
            ValueError,
            "Exactly one of `omega` and `num_features` must be given, got both",
        ),
        ({"num_features": 0}, ValueError, "`num_features` must be a positive integer, got 0"),
        ({"num_features": 2.0}, TypeError, "`num_features` must be a positive integer, got 2.0"),
        ({"num_features": True}, TypeError, "`num_features` must be a positive integer, got True"),
        (
            {"num_features": 2, "log_weight": np.ones(2)},
            ValueError,
            "`log_weight` must come with the `omega`",
        ),
        (
            {"num_features": 2, "features": "cubic"},
            ValueError,
            "`features` must be one of .*\"positive\".*, got 'cubic'",
        ),
        (
            {"num_features": 2, "coupling": "qr"},
            ValueError,
            r"`coupling` must be one of .*\"iid\".*, got 'qr'",
        ),
        ({"omega": [[1.0]]}, TypeError, "`omega` must be an array .*, got list"),
        (
            {"omega": np.ones((2, 4))},
            ValueError,
            r"`omega` must have shape \(\.\.\., S, 3\) with S >= 1, got \(2, 4\)",
        ),
        ({"omega": np.ones((0, 3))}, ValueError, r"S >= 1, got \(0, 3\)"),
        ({"omega": np.ones((5, 2, 3))}, ValueError, r"`omega` must broadcast to \(\.\.\., S, d\)"),
        ({"omega": np.ones((2, 3), int)}, TypeError, "`omega` must have a real floating dtype"),
        (
            {"omega": np.ones((2, 3)), "log_weight": np.ones(3)},
            ValueError,
            r"`log_weight` must broadcast to \(\.\.\., S\) = \(2,\), got shape \(3,\)",
        ),
        ({"num_features": 2, "scale": 0.0}, ValueError, "`scale` must be a positive finite real"),
        ({"num_features": 2, "scale": -1}, ValueError, "`scale` must be a positive finite real"),
        ({"num_features": 2, "scale": "1"}, TypeError, "`scale` must be a positive .*, got '1' of"),
    ],
)
def test_bad_input(change, error, message):
    q = np.ones((4, 3))
    with pytest.raises(error, match=message):
        random_feature_attention(q, q, q, **change)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_other_features(weighted, causal):
    rng = np.random.default_rng(0)
    q, k, v, omega = draw(rng, 2, 6, 3), draw(rng, 2, 7, 3), draw(rng, 2, 7, 2), draw(rng, 20, 3)
    log_weight = draw(rng, 20) if weighted else None
    visible = np.tri(6, 7, 1, dtype=bool) if causal else np.ones((6, 7), bool)
    root = 3.0**-0.25
    for name in ("positive", "hyperbolic", "trigonometric"):
        weights = kernels.estimate(
            root * q[:, :, None], root * k[:, None], omega, features=name, log_weight=log_weight
        )
        weights = np.where(visible, weights, 0.0)
        want = weights @ v / weights.sum(-1, keepdims=True)
        got = random_feature_attention(
            q, k, v, omega=omega, features=name, log_weight=log_weight, causal=causal
        )
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rows", [0, 1])
def test_no_queries_with_a_mask(causal, rows):
    q, k, v = np.ones((3, 0, 3)), np.ones((3, 4, 3)), np.ones((3, 4, 2))
    mask, omega = np.ones((rows, 4), bool), np.ones((4, 3))
    for attention in (random_feature_attention, estimators.importance_sampled_attention):
        assert attention(q, k, v, omega=omega, mask=mask, causal=causal).shape == (3, 0, 2)


# --- sizes past every block, warnings, autocast ---------------------------------------------------


@pytest.mark.long("jax", "dask")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("n", "m", "d", "d_v", "num_features"),
    [
        (3, 64, 8, 0, 4),
        (130, 130, 130, 3, 50),
        (2, 2100, 3, 1, 65),
        (1100, 20, 2, 70, 3),
        (700, 700, 2, 2, 130),
    ],
)
def test_backends_beyond_every_block(backend, causal, n, m, d, d_v, num_features):
    rng, dtype = np.random.default_rng(0), np.dtype(np.float32)
    q, k, v = (draw(rng, *shape, dtype=dtype) for shape in ((n, d), (m, d), (m, d_v)))
    omega = draw(rng, num_features, d, dtype=dtype)
    got = backend.call(random_feature_attention, q, k, v, omega=omega, causal=causal)
    wide = [x.astype(np.float64) for x in (q, k, v)]
    want = random_feature_attention(*wide, omega=omega, causal=causal)
    atol = tolerance(q, k, omega) * np.max(np.abs(v), initial=0)
    np.testing.assert_allclose(got, want, rtol=0, atol=atol)
    if m <= 300:  # against the formula, where it is not too large
        some = slice(0, 60)
        mask = np.tri(n, m, m - n, dtype=bool)[some] if causal else None
        slow = naive.random_feature_attention(wide[0][some], *wide[1:], omega=omega, mask=mask)
        np.testing.assert_allclose(want[some], slow, rtol=0, atol=atol)
    if not causal:
        got = backend.call(importance_sampled_attention, q, k, v, omega=omega)
        want = importance_sampled_attention(*wide, omega=omega)
        size = atol * max(1.0, np.max(np.abs(want), initial=0))
        np.testing.assert_allclose(got, want, rtol=0, atol=size)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [160, 256, 1024, 4096])
def test_accuracy_at_every_head_size(d, causal, dtype, record_accuracy):
    # Nearly equal terms in every product: all rounding errors of a long sum have one sign.
    q = k = np.full((3, d), 0.2 * d**0.25 * (64 / d) ** 0.5, dtype)
    omega = np.full((2, d), 0.9, dtype)
    v = draw(np.random.default_rng(0), 3, 2, dtype=dtype)
    got = random_feature_attention(q, k, v, omega=omega, causal=causal)
    want = reference.random_feature_attention(
        q, k, v, omega, visible=np.tri(3, dtype=bool) if causal else True
    )
    units = reference.error(got, want, np.abs(v).max(), exponent(q, k, omega))
    record_accuracy(f"RFA, d = {d}, equal terms", dtype, units)
    assert units <= CONTRACT


@pytest.mark.parametrize("features", ["positive", "trigonometric"])
def test_nothing_warns_of_what_is_hidden(features, dtype):
    # Warnings are errors in these tests.
    q, k, v = np.ones((2, 3), dtype), np.ones((4, 3), dtype), np.ones((4, 2), dtype)
    omega = np.ones((3, 3), dtype)
    mask = np.array([True, True, False, False])
    for extreme in (np.inf, np.nan, np.finfo(dtype).max):
        k[2:] = extreme
        for seen in (mask, np.broadcast_to(mask, (2, 4))):
            got = random_feature_attention(q, k, v, omega=omega, features=features, mask=seen)
            np.testing.assert_allclose(got, np.ones((2, 2)), rtol=1e-5)


def test_torch_autocast_changes_nothing():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    x = torch.asarray(draw(rng, 64, 64, dtype=np.dtype(np.float32)))
    omega = draw(rng, 32, 64)
    for causal in (False, True):
        for features in kernels.FEATURES:
            options = {"omega": omega, "features": features, "causal": causal}
            want = random_feature_attention(x, x, x, **options)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                got = random_feature_attention(x, x, x, **options)
            assert torch.equal(got, want)


@pytest.mark.parametrize("num_samples", [3, 11, 20, 49, 100])
def test_means_of_the_largest_values_are_finite(num_samples, dtype):
    largest = np.finfo(dtype).max
    q, k, v = np.zeros((2, 1), dtype), np.zeros((50, 1), dtype), np.full((50, 1), largest, dtype)
    for function in (refattn.randomized_attention, refattn.mean_of_ratios_attention):
        got = function(q, k, v, num_samples=num_samples, rng=0)
        np.testing.assert_allclose(got / largest, 1, rtol=1e-6)
