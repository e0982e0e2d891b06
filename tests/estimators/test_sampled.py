"""Importance sampling, randomized attention and LARA."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import expit, roots_hermitenorm
from scipy.stats import multivariate_normal

from refattn import (
    diagnostics,
    importance_sampled_attention,
    linear_randomized_attention,
    mean_of_ratios_attention,
    random_feature_attention,
    randomized_attention,
    sampling,
    softmax_attention,
)
from refattn.engine import hops, positive
from refattn.estimators import lara
from tests import reference
from tests.conftest import Host
from tests.estimators.test_rfa import exponent, tolerance
from tests.reference import CONTRACT, exact, mp
from tests.test_attention import draw, seeds, sizes, with_norm

WEIGHTINGS = lara.WEIGHTINGS


# --- 50-digit forms, straight from the definitions -----------------------------------------------


def mp_states(k, v, omega, visible, root):
    """f(omega_s) and log sum_j xi(k_j, omega_s) over visible keys."""
    scores = exact(omega) @ (exact(k) * root).T - ((exact(k) * root) ** 2).sum(-1)[None, :] / 2
    return reference.weighted_mean(scores, exact(v), np.broadcast_to(visible, scores.shape))


def mp_weighted(q, omega, f, log_z, log_weight, root):
    """Self-normalised mean of f under the log weights (n, S)."""
    scores = (exact(q) * root) @ exact(omega).T + log_z[None, :] + log_weight
    return reference.weighted_mean(scores, f, np.ones(scores.shape, bool))


def mp_lara_weights(q, q_mean, omega, centres, weighting):
    """Log alpha' (n, C) of reference 003 in 50 digits."""
    n, count = q.shape[0], centres.shape[0]
    ratio = omega @ centres.T - (centres**2).sum(-1)[None, :] / 2
    own = np.diagonal(ratio)
    mix = np.array([mp.log(sum(mp.exp(x) for x in row)) for row in ratio], dtype=object)
    if weighting == "own":
        return np.tile(-own, (n, 1))
    if weighting == "balance":
        return np.tile(-mix + mp.log(count), (n, 1))
    t = np.array([[mp.exp(x) for x in row] for row in q @ q_mean.T], dtype=object)
    t = t / t.sum(axis=1 if weighting == "query" else 0, keepdims=True)
    alpha = np.array([mp.exp(x) for x in own - mix], dtype=object) + t - t.mean(1, keepdims=True)
    log_alpha = [[mp.log(a) if a > 0 else -mp.inf for a in row] for row in alpha]
    return np.array(log_alpha, dtype=object) - own


@pytest.mark.parametrize("variant", ["full", "key mask", "mask", "causal"])
@pytest.mark.parametrize("size", [0.5, 3.0, 30.0])
def test_accuracy(size, variant, dtype, record_accuracy):
    rng = np.random.default_rng([int(10 * size), len(variant)])
    n, m, d, count = 6, 8, 3, 4
    q, k = draw(rng, n, d, dtype=dtype), draw(rng, m, d, dtype=dtype)
    q, k, v = with_norm(q, size), with_norm(k, size), draw(rng, m, 2, dtype=dtype)
    omega = draw(rng, count, d, dtype=dtype)
    root = reference.root(None, d)
    options = {}
    visible = np.ones((n, m), bool)
    if variant == "causal":
        options["causal"], visible = True, np.tri(n, m, m - n, dtype=bool)
    if variant == "key mask":
        options["mask"] = rng.random(m) < 0.7
        visible = visible & options["mask"]
    if variant == "mask":
        options["mask"] = visible = rng.random((n, m)) < 0.7
        visible[:, 0] = True
    top, size_v = exponent(q, k, omega), np.abs(v).max()

    def record(name, got, want, size=size_v, top=top):
        units = reference.error(got, want, size, top)
        record_accuracy(f"{name}, {variant}, norms {size_q:g}", dtype, units)
        assert units <= CONTRACT, name

    size_q = size
    # Randomized attention and the mean of ratios.
    own = draw(rng, n, 2, d, dtype=dtype)
    want = reference.randomized_attention(q, k, v, own, visible)
    got = randomized_attention(q, k, v, omega=own, **options)
    record("ra", got, want, top=exponent(q, k, own))
    want = np.stack([mp_states(k, v, omega, visible[i], root)[0].mean(0) for i in range(n)])
    record("mean of ratios", mean_of_ratios_attention(q, k, v, omega=omega, **options), want)
    # Importance sampling.
    log_weight = draw(rng, count, dtype=dtype)
    rows = []
    for i in range(n):
        f, log_z = mp_states(k, v, omega, visible[i], root)
        out, lse = mp_weighted(q[i : i + 1], omega, f, log_z, exact(log_weight)[None], root)
        _, total = reference.attend(q[i : i + 1], k, v, 0.0, visible[i], root**2)
        norm = (exact(q[i]) ** 2).sum() * root**2 / 2
        rows.append(out[0] * mp.exp(lse[0] - norm - total[0]) / count)
    want = np.stack(rows)
    got = importance_sampled_attention(q, k, v, omega=omega, log_weight=log_weight, **options)
    scale = max(abs(x) for x in want.ravel())
    if 1e-30 < scale < 1e30:
        extra = float(root**2) * size * size * 2
        record("is", got, want, scale * mp.mpf(1), top + extra)
    # LARA at given frequencies and centres.
    if variant == "causal":
        return
    centres = draw(rng, count, d, dtype=dtype)
    chunk = [[i for i in range(n) if i * count // n == c] for c in range(count)]
    q_mean = np.stack([(exact(q[c]) * root).mean(0) for c in chunk])
    for weighting in WEIGHTINGS:
        weights = mp_lara_weights(exact(q) * root, q_mean, exact(omega), exact(centres), weighting)
        rows = []
        for i in range(n):
            f, log_z = mp_states(k, v, omega, visible[i], root)
            rows.append(mp_weighted(q[i : i + 1], omega, f, log_z, weights[i : i + 1], root)[0][0])
        got = linear_randomized_attention(
            q, k, v, omega=omega, centres=centres, weighting=weighting, **options
        )
        lengths = reference.norm(centres) * reference.norm(omega) + reference.norm(centres) ** 2
        if "query" in weighting:  # alpha cancels where it is near 0: its own size is the measure
            lengths += size**2 / min(
                1.0,
                *(
                    float(abs(mp.exp(w + o)))
                    for row in weights
                    for w, o in zip(row, np.diagonal(exact(omega) @ exact(centres).T), strict=True)
                    if w > -mp.inf
                ),
            )
        record(f"lara {weighting}", got, np.stack(rows), top=top + lengths)


# --- RA: unbiased, by quadrature and by a one-dimensional identity -------------------------------


def ra_single(q, k, v, omega):
    """f_i(omega) for many omega (N, d) of one query: shape (N, d_v)."""
    queries = np.broadcast_to(q, (len(omega), q.shape[-1]))
    return randomized_attention(queries, k, v, omega=omega[:, None, :], scale=1.0)


@pytest.mark.parametrize(
    ("d", "nodes", "size", "tolerance_"),
    [(1, 80, 1.0, 1e-13), (2, 50, 0.7, 1e-12), (3, 36, 0.35, 1e-11)],
)
def test_ra_expectation_is_softmax_attention(d, nodes, size, tolerance_):
    # E under p of f, each Gaussian component by a tensor Gauss-Hermite rule. The control: under
    # N(0, I), as in eq. (12) of reference 002, the expectation is far off.
    rng = np.random.default_rng(d)
    q, k, v = draw(rng, 1, d, size=size), draw(rng, 4, d, size=size), draw(rng, 4, 2)
    x, w = roots_hermitenorm(nodes)
    w = w / w.sum()
    grid = np.stack(np.meshgrid(*[x] * d, indexing="ij"), -1).reshape(-1, d)
    weight = np.prod(np.stack(np.meshgrid(*[w] * d, indexing="ij"), -1), -1).ravel()
    pi = np.exp(k @ q[0])
    pi /= pi.sum()
    mean = sum(
        p * (weight @ ra_single(q, k, v, grid + q + k_j)) for p, k_j in zip(pi, k, strict=True)
    )
    want = softmax_attention(q, k, v, scale=1.0)[0]
    np.testing.assert_allclose(mean, want, rtol=0, atol=tolerance_)
    biased = weight @ ra_single(q, k, v, grid)
    assert np.max(np.abs(biased - want)) > 1e-3


@pytest.mark.parametrize("d", [2, 8, 64])
def test_ra_with_two_keys_in_any_dimension(d):
    # With two keys and v = (1, 0), f is the logistic function of a scalar that is normal under
    # each component: E f = sum_j pi_j E sigmoid(N(mu_j, sigma^2)) = pi_1.
    rng = np.random.default_rng(d)
    q, k = draw(rng, 1, d, size=d**-0.5), draw(rng, 2, d, size=0.5 * d**-0.5)
    delta = k[0] - k[1]
    sigma = np.linalg.norm(delta)
    pi = np.exp(k @ q[0])
    pi /= pi.sum()
    x, w = roots_hermitenorm(100)
    w = w / w.sum()
    gap = (np.sum(k[0] ** 2) - np.sum(k[1] ** 2)) / 2
    want = sum(
        p * (w @ expit((q[0] + k_j) @ delta - gap + sigma * x))
        for p, k_j in zip(pi, k, strict=True)
    )
    assert abs(want - pi[0]) < 1e-11
    # The function itself is f on the line through the mean of each component.
    line = sum(
        p * (w @ ra_single(q, k, np.array([[1.0], [0.0]]), q + k_j + x[:, None] * delta / sigma))
        for p, k_j in zip(pi, k, strict=True)
    )
    np.testing.assert_allclose(line, pi[0], rtol=0, atol=1e-11)


@pytest.mark.parametrize("d", [1, 4, 64])
def test_f_is_the_posterior_of_the_mixture(d):
    # With v = I, f_i(omega) is the probability of each component of p_i given omega.
    rng = np.random.default_rng(d)
    n, m = 3, 5
    q, k, omega = (draw(rng, *s, size=d**-0.25) for s in ((n, d), (m, d), (n, 1, d)))
    got = randomized_attention(q, k, np.eye(m), omega=omega, scale=1.0)
    for i in range(n):
        log_joint = k @ q[i] + [multivariate_normal(q[i] + k_j).logpdf(omega[i, 0]) for k_j in k]
        joint = np.exp(log_joint - log_joint.max())
        np.testing.assert_allclose(got[i], joint / joint.sum(), rtol=0, atol=1e-12)


def test_ra_does_not_change_when_keys_shift():
    rng = np.random.default_rng(0)
    q, k, v, shift = draw(rng, 4, 3), draw(rng, 6, 3), draw(rng, 6, 2), draw(rng, 3)
    a = randomized_attention(q, k, v, num_samples=3, rng=5, scale=1.0)
    b = randomized_attention(q, k + shift, v, num_samples=3, rng=5, scale=1.0)
    np.testing.assert_allclose(a, b, atol=1e-12)
    omega = draw(rng, 8, 3)
    a, b = (random_feature_attention(q, x, v, omega=omega) for x in (k, k + shift))
    assert np.max(np.abs(a - b)) > 0.01  # RFA does


# --- RFA = SNIS, IS, and the special cases of LARA -----------------------------------------------


@given(sizes, sizes, sizes, sizes, seeds)
def test_rfa_is_self_normalised_importance_sampling(n, m, d, count, seed):
    rng = np.random.default_rng(seed)
    q, k, v, omega = draw(rng, n, d), draw(rng, m, d), draw(rng, m, 2), draw(rng, count, d)
    root = d**-0.25
    # p_i(omega) / N(omega; 0, I) from the mixture density itself.
    log_pi = (q * root) @ (k * root).T
    log_pi -= np.logaddexp.reduce(log_pi, -1)[:, None]
    means = root * (q[:, None] + k[None])  # (n, m, d)
    log_ratio = omega @ np.swapaxes(means, -1, -2) - np.sum(means**2, -1)[:, None] / 2
    log_ratio = np.logaddexp.reduce(log_pi[:, None, :] + log_ratio, -1)  # (n, S)
    f = randomized_attention(q, k, v @ np.eye(2), omega=np.broadcast_to(omega[:1], (n, 1, d)))
    f = np.stack(
        [randomized_attention(q, k, v, omega=np.broadcast_to(w, (n, 1, d))) for w in omega], axis=1
    )  # (n, S, d_v)
    weight = np.exp(log_ratio - log_ratio.max(-1, keepdims=True))
    snis = np.sum(weight[..., None] * f, 1) / weight.sum(-1)[:, None]
    atol = tolerance(q, k, omega) * np.abs(v).max()
    rfa = random_feature_attention(q, k, v, omega=omega)
    np.testing.assert_allclose(rfa, snis, rtol=0, atol=atol)
    is_ = np.mean(np.exp(log_ratio)[..., None] * f, 1)
    got = importance_sampled_attention(q, k, v, omega=omega)
    np.testing.assert_allclose(got, is_, rtol=100 * atol, atol=100 * atol)
    log_w = diagnostics.log_weights(q, k, omega=omega)
    np.testing.assert_allclose(
        log_w,
        log_ratio - np.logaddexp.reduce(log_ratio, -1)[:, None],
        rtol=0,
        atol=10 * atol + 1e-12,
    )


def test_importance_sampling_is_unbiased_by_quadrature():
    rng = np.random.default_rng(1)
    q, k, v = draw(rng, 3, 1, size=0.7), draw(rng, 4, 1, size=0.7), draw(rng, 4, 2)
    x, w = roots_hermitenorm(80)
    w = w / w.sum()
    # Each node is one frequency; the weight of its node makes the mean over frequencies a rule.
    log_weight = np.log(w * len(x))
    got = importance_sampled_attention(q, k, v, omega=x[:, None], log_weight=log_weight, scale=1.0)
    np.testing.assert_allclose(got, softmax_attention(q, k, v, scale=1.0), atol=1e-13)


@pytest.mark.parametrize("weighting", WEIGHTINGS[:2])
def test_lara_with_standard_proposals_is_rfa(weighting):
    rng = np.random.default_rng(0)
    q, k, v, omega = draw(rng, 4, 3), draw(rng, 6, 3), draw(rng, 6, 2), draw(rng, 5, 3)
    want = random_feature_attention(q, k, v, omega=omega)
    got = linear_randomized_attention(
        q, k, v, omega=omega, centres=np.zeros((5, 3)), weighting=weighting
    )
    np.testing.assert_allclose(got, want, atol=1e-14)
    one = [sampling.Gaussian(np.zeros(3))]
    got = linear_randomized_attention(q, k, v, omega=omega, centres=one, weighting=weighting)
    np.testing.assert_allclose(got, want, atol=1e-14)


def test_lara_with_delta_weights_is_ra():
    # alpha_ic = 1 if i = c else 0, one sample of p_i for each query.
    rng = np.random.default_rng(0)
    q, k, v = draw(rng, 4, 3), draw(rng, 6, 3), draw(rng, 6, 2)
    omega = sampling.draw_target(q, k, num_samples=1, rng=1)
    delta = np.where(np.eye(4, dtype=bool), 0.0, -np.inf)
    keys = hops.Keys(k, v, half=0.5 * 3.0**-0.5)
    lara = positive.two_hops(q, hops.Samples(3.0**-0.25 * omega[:, 0], delta), keys, False).out
    np.testing.assert_allclose(lara, randomized_attention(q, k, v, omega=omega), atol=1e-14)


def test_lara_takes_the_means_of_chunks():
    rng = np.random.default_rng(0)
    q, k, v = draw(rng, 2, 11, 3), draw(rng, 2, 14, 3), draw(rng, 2, 14, 2)
    root, count = 3.0**-0.25, 4
    chunks = [
        [[i for i in range(n) if i * count // n == c] for c in range(count)] for n in (11, 14)
    ]
    centres = root * np.stack(
        [q[:, a].mean(1) + k[:, b].mean(1) for a, b in zip(*chunks, strict=True)], axis=1
    )
    omega = draw(rng, 2, count, 3)
    for weighting in WEIGHTINGS:
        kwargs = {"omega": omega, "weighting": weighting}
        got = linear_randomized_attention(q, k, v, num_proposals=count, **kwargs)
        want = linear_randomized_attention(q, k, v, centres=centres, **kwargs)
        np.testing.assert_allclose(got, want, atol=1e-13)
    drawn = linear_randomized_attention(q, k, v, num_proposals=count, rng=3)
    z = np.random.default_rng(3).standard_normal((2, count, 3))
    want = linear_randomized_attention(q, k, v, centres=centres, omega=centres + z)
    np.testing.assert_allclose(drawn, want, atol=1e-13)
    pairs = np.stack([centres + z, centres - z], axis=2).reshape(2, 2 * count, 3)
    drawn = linear_randomized_attention(q, k, v, num_proposals=count, rng=3, antithetic=True)
    want = linear_randomized_attention(q, k, v, centres=centres, omega=pairs)
    np.testing.assert_allclose(drawn, want, atol=1e-13)
    gaussians = [sampling.Gaussian(centres[:, c]) for c in range(count)]
    drawn = linear_randomized_attention(q, k, v, centres=gaussians, rng=3, antithetic=True)
    np.testing.assert_allclose(drawn, want, atol=1e-13)


def test_lara_with_general_gaussians():
    # Balance weights are the density of the equal mixture: LARA is then RFA with a mixture.
    rng = np.random.default_rng(0)
    q, k, v, omega = draw(rng, 4, 3), draw(rng, 6, 3), draw(rng, 6, 2), draw(rng, 5, 3)
    covs = [np.eye(3) + a[:, None] * a for a in draw(rng, 5, 3)]
    proposals = [sampling.Gaussian(m, c) for m, c in zip(draw(rng, 5, 3), covs, strict=True)]
    got = linear_randomized_attention(q, k, v, omega=omega, centres=proposals)
    log_weight = sampling.Mixture(proposals).log_ratio(omega)
    want = random_feature_attention(q, k, v, omega=omega, log_weight=log_weight)
    np.testing.assert_allclose(got, want, atol=1e-13)
    got = linear_randomized_attention(q, k, v, omega=omega, centres=proposals, weighting="own")
    own = [p.log_ratio(omega[c : c + 1])[0] for c, p in enumerate(proposals)]
    want = random_feature_attention(q, k, v, omega=omega, log_weight=np.array(own))
    np.testing.assert_allclose(got, want, atol=1e-13)


def slow_causal_lara(q, k, v, noise, count, weighting, mask):
    """Causal LARA query by query: the proposals of its chunk, then plain SNIS over its keys."""
    n, d = q.shape
    shift = k.shape[0] - n
    root = d**-0.25
    edges = [-(-t * n // count) for t in range(count + 1)]
    out = np.zeros((n, v.shape[-1]))
    for i in range(n):
        t = max(c for c in range(count) if edges[c] <= i)
        centres = [np.zeros(d)]
        for c in range(t):
            own = [
                j for j in range(max(0, edges[c] + shift), max(0, edges[c + 1] + shift)) if mask[j]
            ]
            k_mean = k[own].mean(0) if own else np.zeros(d)
            centres.append(root * (q[edges[c] : edges[c + 1]].mean(0) + k_mean))
        centres = np.array(centres)
        omega = centres + noise[: t + 1]
        ratio = omega @ centres.T - np.sum(centres**2, -1) / 2
        log_weight = -np.diagonal(ratio)
        if weighting == "balance":
            log_weight = -np.logaddexp.reduce(ratio, -1)
        seen = [j for j in range(min(len(k), i + shift + 1)) if mask[j]]
        if seen:
            out[i] = random_feature_attention(
                q[i : i + 1], k[seen], v[seen], omega=omega, log_weight=log_weight
            )[0]
    return out


@pytest.mark.parametrize(
    ("n", "m", "count"),
    [
        *((20, 20, 5), (40, 43, 3), (23, 17, 4), (9, 9, 9), (7, 7, 1)),
        *((300, 300, 7), (260, 300, 100), (300, 140, 37)),  # several steps
    ],
)
@pytest.mark.parametrize("weighting", ["own", "balance"])
@pytest.mark.parametrize("masked", [False, True])
def test_causal_lara(n, m, count, weighting, masked):
    rng = np.random.default_rng(n)
    q, k, v = draw(rng, n, 3), draw(rng, m, 3), draw(rng, m, 2)
    mask = rng.random(m) < 0.7 if masked else np.ones(m, bool)
    got = linear_randomized_attention(
        q,
        k,
        v,
        num_proposals=count,
        rng=8,
        weighting=weighting,
        causal=True,
        mask=mask if masked else None,
    )
    noise = np.random.default_rng(8).standard_normal((count, 3))
    want = slow_causal_lara(q, k, v, noise, count, weighting, mask)
    np.testing.assert_allclose(got, want, atol=1e-12)


@pytest.mark.parametrize("repeats", [1, 2])
def test_causal_lara_of_several_samples(repeats):
    """At given frequencies, S / C of each proposal: duplicates of a sample change nothing."""
    rng = np.random.default_rng(repeats)
    q, k, v, omega = draw(rng, 2, 200, 3), draw(rng, 200, 3), draw(rng, 200, 2), draw(rng, 9, 3)
    options = {"num_proposals": 9, "causal": True}
    for weighting in ("own", "balance"):
        options["weighting"] = weighting
        want = linear_randomized_attention(q, k, v, omega=omega, **options)
        twice = np.repeat(omega, repeats, 0)
        got = linear_randomized_attention(q, k, v, omega=twice, **options)
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-12)


@pytest.mark.long("jax")
@pytest.mark.parametrize(("n", "m"), [(600, 600), (520, 530), (530, 520)])
def test_causal_steps_on_backends(backend, n, m):
    """More tokens than one step holds, in libraries whose steps are longer than NumPy's."""
    if backend.name in ("numpy-readonly", "dask"):
        pytest.skip("as NumPy, or slow")
    rng = np.random.default_rng(n)
    q, k, v, omega = draw(rng, n, 3), draw(rng, m, 3), draw(rng, m, 2), draw(rng, 4, 3)
    mask = rng.random(m) < 0.7
    for function, options in (
        (random_feature_attention, {"omega": omega}),
        (random_feature_attention, {"omega": omega, "log_weight": draw(rng, 4), "mask": mask}),
        (linear_randomized_attention, {"num_proposals": 12, "rng": 1, "mask": mask}),
    ):
        got = backend.call(function, q, k, v, causal=True, **options)
        want = function(q, k, v, causal=True, **options)
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-11)


@pytest.mark.long
@pytest.mark.parametrize(("name", "most"), [("rfa", 200), ("lara", 300)])
def test_few_programs_are_compiled(name, most):
    """Outside `jax.jit`, the first call compiles each operation for each shape."""
    jax = pytest.importorskip("jax")
    jax.config.update("jax_enable_x64", True)
    counts = []

    def listen(event, seconds, **_):
        if event.endswith("backend_compile_duration"):
            counts[-1] += 1

    rng = np.random.default_rng(0)
    options = {"omega": draw(rng, 7, 5)} if name == "rfa" else {"num_proposals": 7, "rng": 1}
    function = random_feature_attention if name == "rfa" else linear_randomized_attention
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for n in (153, 1503):  # in one step, in two
            counts.append(0)
            arrays = (jax.numpy.asarray(draw(rng, n, size)) for size in (5, 5, 3))
            function(*arrays, causal=True, **options)
    finally:
        jax.monitoring.clear_event_listeners()
    assert 0 < min(counts) <= max(counts) <= most, counts  # without steps of one shape 433, 1101


@pytest.mark.parametrize("weighting", ["own", "balance"])
@pytest.mark.parametrize("given_omega", [False, True])
def test_any_argument_of_causal_lara_may_have_the_heads(weighting, given_omega):
    rng = np.random.default_rng(0)
    full = {
        "q": draw(rng, 2, 6, 3),
        "k": draw(rng, 2, 7, 3),
        "v": draw(rng, 2, 7, 2),
        "mask": rng.random((2, 1, 7)) < 0.7,
    }
    if given_omega:
        full["omega"] = draw(rng, 2, 3, 3)
    for name in full:  # the one that has them
        some = {key: x if key in (name, "v") else x[0] for key, x in full.items()}
        options = {"num_proposals": 3, "rng": 1, "weighting": weighting, "causal": True}
        q, k, v = (some.pop(key) for key in "qkv")
        got = linear_randomized_attention(q, k, v, **some, **options)
        wide = {key: x if key in (name, "v") else np.stack([x, x]) for key, x in some.items()}
        q, k = (x if x.ndim > 2 else np.stack([x, x]) for x in (q, k))
        want = linear_randomized_attention(q, k, v, **wide, **options)
        np.testing.assert_allclose(got, want, atol=1e-13, err_msg=name)


# --- causality, masks, groups --------------------------------------------------------------------

CAUSAL = {
    "ra": lambda *a, **b: randomized_attention(*a, num_samples=2, rng=1, **b),
    "is": lambda *a, **b: importance_sampled_attention(
        *a, omega=sampling.draw(3, 3, rng=1).omega, **b
    ),
    "mean of ratios": lambda *a, **b: mean_of_ratios_attention(*a, num_samples=2, rng=1, **b),
    "trigonometric": lambda *a, **b: random_feature_attention(
        *a, num_features=3, features="trigonometric", rng=1, **b
    ),
    "hyperbolic": lambda *a, **b: random_feature_attention(
        *a, num_features=3, features="hyperbolic", rng=1, **b
    ),
    "lara own": lambda *a, **b: linear_randomized_attention(
        *a, num_proposals=5, rng=1, weighting="own", **b
    ),
    "lara balance": lambda *a, **b: linear_randomized_attention(*a, num_proposals=5, rng=1, **b),
}
MASKED = {
    **CAUSAL,
    "lara query": lambda *a, **b: linear_randomized_attention(
        *a, num_proposals=2, rng=1, weighting="query", **b
    ),
    "lara query-over-queries": lambda *a, **b: linear_randomized_attention(
        *a, num_proposals=2, rng=1, weighting="query-over-queries", **b
    ),
    "lara balance": lambda *a, **b: linear_randomized_attention(*a, num_proposals=2, rng=1, **b),
    "lara own": lambda *a, **b: linear_randomized_attention(
        *a, num_proposals=2, rng=1, weighting="own", **b
    ),
}


@pytest.mark.parametrize("name", CAUSAL)
@given(st.integers(5, 150), st.integers(1, 149), seeds)
def test_editing_the_future_changes_nothing(name, n, t, seed):
    t = min(t, n - 1)
    rng = np.random.default_rng(seed)
    q, k, v = draw(rng, n, 3), draw(rng, n, 3), draw(rng, n, 2)
    before = CAUSAL[name](q, k, v, causal=True)
    for x in (q, k, v):
        x[t:] = rng.choice([1e3, -1e3, np.nan, np.inf, 0.0], x[t:].shape)
    with np.errstate(all="ignore"):
        after = CAUSAL[name](q, k, v, causal=True)
    np.testing.assert_array_equal(before[:t], after[:t])


@pytest.mark.parametrize("name", MASKED)
@given(st.integers(2, 9), st.integers(2, 9), seeds)
def test_masking_equals_deleting(name, n, m, seed):
    rng = np.random.default_rng(seed)
    q, k, v = draw(rng, n, 3), draw(rng, m, 3), draw(rng, m, 2)
    kept = rng.random(m) < 0.6
    kept[:2] = True  # as many keys as proposals
    want = MASKED[name](q, k[kept], v[kept])
    k[~kept], v[~kept] = np.nan, np.nan
    for mask in (kept, np.broadcast_to(kept, (n, m))):
        got = MASKED[name](q, k, v, mask=mask)
        if name == "trigonometric":  # normalisers may be near 0: compare well-conditioned rows
            fine = np.max(np.abs(want), -1) < 10
            got, expected = got[fine], want[fine]
            np.testing.assert_allclose(got, expected, atol=1e-9)
        else:
            np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", MASKED)
def test_grouped_heads(name):
    rng = np.random.default_rng(0)
    q, k, v = draw(rng, 2, 6, 9, 3), draw(rng, 2, 2, 9, 3), draw(rng, 2, 2, 9, 2)
    wide_k, wide_v = np.repeat(k, 3, 1), np.repeat(v, 3, 1)
    mask = rng.random((2, 6, 1, 9)) < 0.7
    mask[..., :3] = True
    full = rng.random((6, 9, 9)) < 0.7
    full[..., :3] = True
    for kwargs in ({}, {"mask": mask}, {"mask": full}):
        got = MASKED[name](q, k, v, **kwargs)
        np.testing.assert_allclose(got, MASKED[name](q, wide_k, wide_v, **kwargs), atol=1e-9)
    if name in CAUSAL:
        got = MASKED[name](q, k, v, causal=True)
        np.testing.assert_allclose(got, MASKED[name](q, wide_k, wide_v, causal=True), atol=1e-9)


@pytest.mark.parametrize("name", MASKED)
def test_constant_values_and_one_key(name):
    if name == "is":
        return  # not a mean of values
    rng = np.random.default_rng(0)
    q, k = draw(rng, 6, 3), draw(rng, 7, 3)
    out = MASKED[name](q, k, np.full((7, 2), 3.0))
    np.testing.assert_allclose(out, 3.0, rtol=1e-11)


# --- every array library -------------------------------------------------------------------------


@pytest.mark.long("jax", "dask")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, options) for name in sorted(MASKED) for options in ("plain", "mask")),
        *((name, "causal") for name in sorted(CAUSAL)),
    ],
)
def test_backends_agree(backend, name, options, dtype):
    rng = np.random.default_rng(0)
    q, k = draw(rng, 2, 6, 3, dtype=dtype), draw(rng, 1, 7, 3, dtype=dtype)
    v = draw(rng, 1, 7, 2, dtype=dtype)
    kwargs = {"causal": True} if options == "causal" else {}
    if options == "mask":
        kwargs["mask"] = np.arange(7) != 4
    want = MASKED[name](q, k, v, **kwargs)
    got = backend.call(MASKED[name], q, k, v, **kwargs)
    rtol = 1e-3 if dtype == np.float32 else 1e-10
    np.testing.assert_allclose(got, want, rtol=rtol, atol=rtol)


@pytest.mark.long("array_api_strict", "jax", "dask")
def test_given_frequencies_on_backends(backend, dtype):
    rng = np.random.default_rng(0)
    q, k, v = (draw(rng, 2, 6, 3, dtype=dtype) for _ in range(3))
    own, omega, centres = draw(rng, 6, 2, 3), draw(rng, 4, 3), draw(rng, 4, 3)
    atol = 1e-4 if dtype == np.float32 else 1e-12
    for wrap in (Host, lambda x: x):
        got = backend.call(randomized_attention, q, k, v, omega=wrap(own))
        want = randomized_attention(q, k, v, omega=own)
        np.testing.assert_allclose(got, want, atol=atol)
        got = backend.call(
            linear_randomized_attention, q, k, v, omega=wrap(omega), centres=wrap(centres)
        )
        want = linear_randomized_attention(q, k, v, omega=omega, centres=centres)
        np.testing.assert_allclose(got, want, atol=atol)
        got = backend.call(
            importance_sampled_attention, q, k, v, omega=wrap(omega), log_weight=wrap(omega[:, 0])
        )
        want = importance_sampled_attention(q, k, v, omega=omega, log_weight=omega[:, 0])
        np.testing.assert_allclose(got, want, rtol=atol, atol=atol)


Q = np.ones((4, 3))


@pytest.mark.parametrize(
    ("function", "kwargs", "error", "message"),
    [
        (randomized_attention, {}, ValueError, "`omega` and `num_samples` .* got neither"),
        (randomized_attention, {"num_samples": 0}, ValueError, "`num_samples` must be a positive"),
        (
            randomized_attention,
            {"omega": np.ones((2, 3))},
            ValueError,
            r"`omega` must have shape \(\.\.\., n, S, d\) = \(\.\.\., 4, S, 3\) .* got \(2, 3\)",
        ),
        (randomized_attention, {"omega": np.ones((5, 2, 3))}, ValueError, r"got \(5, 2, 3\)"),
        (
            randomized_attention,
            {"omega": np.ones((2, 4, 2, 3))},
            ValueError,
            r"`omega` must broadcast to \(\.\.\., n, S, d\) = \(4, 2, 3\)",
        ),
        (mean_of_ratios_attention, {}, ValueError, "`omega` and `num_samples` .* got neither"),
        (importance_sampled_attention, {"omega": None}, TypeError, "`omega` must be an array"),
        (
            linear_randomized_attention,
            {},
            ValueError,
            "One of `num_proposals`, `centres` and `omega` must be given, got none",
        ),
        (
            linear_randomized_attention,
            {"num_proposals": 5},
            ValueError,
            "at most the numbers of queries and keys, 4 and 4, .* got 5",
        ),
        (
            linear_randomized_attention,
            {"num_proposals": 2.0},
            TypeError,
            "`num_proposals` must be a positive integer, got 2.0",
        ),
        (
            linear_randomized_attention,
            {"num_proposals": 2, "centres": np.ones((3, 3))},
            ValueError,
            "`num_proposals` must be the number of `centres`, 3, got 2",
        ),
        (
            linear_randomized_attention,
            {"centres": np.ones((2, 4))},
            ValueError,
            r"`centres` must have shape \(\.\.\., S, 3\) .* got \(2, 4\)",
        ),
        (
            linear_randomized_attention,
            {"centres": [1.0]},
            TypeError,
            "`centres` must hold Gaussian proposals only, got float",
        ),
        (
            linear_randomized_attention,
            {"omega": np.ones((5, 3)), "centres": np.ones((2, 3))},
            ValueError,
            "`omega` must hold a multiple of the number of proposals, 2, got 5 frequencies",
        ),
        (
            linear_randomized_attention,
            {"omega": np.ones((2, 3)), "antithetic": True},
            ValueError,
            "`antithetic` must be False when `omega` is given",
        ),
        (
            linear_randomized_attention,
            {"num_proposals": 2, "weighting": "best"},
            ValueError,
            "`weighting` must be one of \"balance\", .*, got 'best'",
        ),
        (
            linear_randomized_attention,
            {"num_proposals": 2, "beta": np.nan},
            ValueError,
            "`beta` must be a finite real number, got nan",
        ),
        (
            linear_randomized_attention,
            {"num_proposals": 2, "antithetic": 1},
            TypeError,
            "`antithetic` must be True or False, got 1",
        ),
        (
            linear_randomized_attention,
            {"centres": np.ones((2, 3)), "causal": True},
            ValueError,
            "`centres` must be None with `causal`",
        ),
        (
            linear_randomized_attention,
            {"num_proposals": 2, "causal": True, "weighting": "query"},
            ValueError,
            '`weighting` must be "balance" or "own" with `causal`, got \'query\'',
        ),
        (
            linear_randomized_attention,
            {"num_proposals": 2, "causal": True, "mask": np.ones((4, 4), bool)},
            ValueError,
            "`mask` must be the same for all queries",
        ),
        (
            random_feature_attention,
            {"omega": np.ones((2, 3)), "proposal": sampling.Gaussian(np.zeros(3))},
            ValueError,
            "`proposal` must not come with `omega`",
        ),
    ],
)
def test_bad_input(function, kwargs, error, message):
    with pytest.raises(error, match=message):
        function(Q, Q, Q, **kwargs)


# --- corners -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (6, 1)])
def test_masks_broadcast_along_keys(name, shape):
    rng = np.random.default_rng(0)
    q, k, v = draw(rng, 6, 3), draw(rng, 6, 3), draw(rng, 6, 2)
    for value in (True, False):
        mask = np.full(shape, value)
        for causal in (False, True)[: 1 + (name in CAUSAL)]:
            options = {"causal": True} if causal else {}
            if causal and "lara" in name and shape == (6, 1):
                continue  # a mask of each query's own
            got = MASKED[name](q, k, v, mask=mask, **options)
            want = MASKED[name](q, k, v, **options) if value else np.zeros((6, 2))
            np.testing.assert_allclose(got, want, atol=1e-11)


def test_large_values_do_not_overflow():
    one, v = np.ones((3, 1)), np.full((3, 1), 1.5e308)
    for out in (
        randomized_attention(one, one, v, num_samples=3, rng=0),
        mean_of_ratios_attention(one, one, v, num_samples=3, rng=0),
        linear_randomized_attention(one, one, v, num_proposals=2, rng=0),
        random_feature_attention(one, one, v, num_features=3, rng=0),
    ):
        np.testing.assert_allclose(out, v, rtol=1e-13)
    zero = np.zeros((1, 1))
    got = importance_sampled_attention(
        zero, zero, np.array([[1e-200]]), omega=zero, log_weight=np.array([750.0])
    )
    np.testing.assert_allclose(np.log(got), 750 - 200 * np.log(10), rtol=1e-13)
    got = importance_sampled_attention(zero, zero, zero, omega=zero, log_weight=np.array([750.0]))
    np.testing.assert_array_equal(got, zero)


def test_overflowing_keys_are_not_hidden_in_causal_attention():
    k, v = np.array([[1e20], [0.0]], np.float32), np.array([[1.0], [2.0]], np.float32)
    with np.errstate(all="ignore"):
        out = random_feature_attention(0 * k, k, v, omega=np.zeros((1, 1)), causal=True)
    assert np.all(np.isnan(out))


def test_gaussians_must_fit_the_heads():
    q = np.ones((40, 4))
    wrong = {
        r"`centres` must broadcast to \(\.\.\., d\) = \(4,\)": [sampling.Gaussian(np.zeros(3))] * 2,
        r"`centres` must broadcast to .* = \(4,\), got shape \(2, 4\)": [
            sampling.Gaussian(np.zeros((2, 4)))
        ]
        * 2,
    }
    for message, centres in wrong.items():
        with pytest.raises(ValueError, match=message):
            linear_randomized_attention(q, q, q, centres=centres)
    with pytest.raises(ValueError, match=r"`centres` must have shape \(\.\.\., C, d\), got \(4,\)"):
        linear_randomized_attention(q, q, q, centres=np.zeros(4))
    fine = [sampling.Gaussian(np.zeros(4))] * 2
    with pytest.raises(ValueError, match=r"`omega` must broadcast .*, got shape \(3, 2, 4\)"):
        linear_randomized_attention(q, q, q, centres=fine, omega=np.zeros((3, 2, 4)))


@pytest.mark.long
def test_gradients_and_vectorisation_under_jax():
    # Arrays being traced have no device: mixing them with concrete ones must work.
    jax = pytest.importorskip("jax")
    jax.config.update("jax_enable_x64", True)
    rng = np.random.default_rng(0)
    q, k, v = (jax.numpy.asarray(draw(rng, 5, 3)) for _ in range(3))
    omega = jax.numpy.asarray(draw(rng, 4, 3))
    step = 1e-6 * jax.numpy.asarray(draw(rng, 5, 3))
    for name, function in {
        "softmax": lambda q: softmax_attention(q, k, v),
        "rfa": lambda q: random_feature_attention(q, k, v, omega=omega, causal=True),
        "trigonometric": lambda q: random_feature_attention(
            q, k, v, omega=0.1 * omega, features="trigonometric"
        ),
        "lara": lambda q: linear_randomized_attention(q, k, v, omega=omega),
    }.items():
        gradient = jax.grad(lambda q, f=function: f(q).sum())(q)
        slope = function(q + step).sum() - function(q - step).sum()
        np.testing.assert_allclose(2 * (gradient * step).sum(), slope, rtol=1e-5, err_msg=name)
        batch = jax.numpy.stack([q, 2 * q])
        want = jax.numpy.stack([function(x) for x in batch])
        np.testing.assert_allclose(jax.vmap(function)(batch), want, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("empty", [False, True])
def test_gradients_under_torch(empty):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    k, v, omega = (torch.asarray(draw(rng, 5, 3)) for _ in range(3))
    mask = torch.asarray(np.arange(5) < (0 if empty else 3))
    for function in (
        lambda q: softmax_attention(q, k, v, mask=mask),
        lambda q: random_feature_attention(q, k, v, omega=omega, mask=mask),
        lambda q: importance_sampled_attention(q, k, v, omega=omega, mask=mask),
    ):
        q = torch.asarray(draw(rng, 5, 3)).requires_grad_(True)
        function(q).sum().backward()
        assert bool(torch.all(torch.isfinite(q.grad)))
        step = 1e-6 * torch.asarray(draw(rng, 5, 3))
        with torch.no_grad():
            slope = function(q + step).sum() - function(q - step).sum()
            np.testing.assert_allclose(2 * (q.grad * step).sum(), slope, rtol=1e-4, atol=1e-15)
