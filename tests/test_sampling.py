"""The laws of the drawn frequencies.

Every statistical test here has an exact null distribution and a total false-alarm probability of
at most ALPHA by the union bound. The seed is fixed, so that a run is repeatable.
"""

from functools import partial

import numpy as np
import pytest
from scipy.linalg import qr, sqrtm
from scipy.special import ndtr, ndtri
from scipy.stats import beta, multivariate_normal, norm

import refattn
from refattn import sampling
from refattn.engine import targets
from refattn.judge import stats

ALPHA = 1e-6
SEED = 20240607
UNBIASED = sorted({*sampling.COUPLINGS} - sampling.BIASED_COUPLINGS)


def probes(d):
    """Unit vectors e_i, -e_i and (1, ..., 1), -(1, ..., 1) over sqrt(d): shape (2 d + 2, d)."""
    axes = np.concatenate([np.eye(d), np.full((1, d), d**-0.5)])
    return np.concatenate([axes, -axes])


def gaussian_p_value(z):
    """P-value of the hypothesis that z (one column a probe) has iid N(0, 1) entries a column."""
    tests = (stats.normal_mean, stats.normal_scale, lambda x: stats.ks(x, ndtr))
    return stats.suite_p([test(x) for x in z.T for test in tests])


def unsigned(num_samples, d, rng):
    """The defect: Q of a bare QR decomposition, without the signs of diag R."""
    q = qr(rng.standard_normal((d, d)))[0]
    return q[:num_samples] * np.sqrt(rng.chisquare(d, (num_samples, 1)))


def sampler(coupling):
    return lambda s, d, rng: sampling.draw(s, d, coupling=coupling, rng=rng).omega


def blocks(sampler, s, d, draws=4000):
    """Independent blocks, (draws, s, d)."""
    rng = np.random.default_rng(SEED)
    return np.stack([sampler(s, d, rng) for _ in range(draws)])


def block_p_value(sampler, d):
    """P-value of the hypothesis that every row of a block is N(0, I), along all probes.

    Rows of one block depend on each other; Bonferroni over rows needs no independence.
    """
    rows = np.moveaxis(blocks(sampler, d, d) @ probes(d).T, 1, 0)
    return stats.suite_p([gaussian_p_value(z) for z in rows])


@pytest.mark.sweep(3)
@pytest.mark.soak("halton", "sobol")
@pytest.mark.long("halton", "sobol", "16", "simplex", "orthogonal")
@pytest.mark.parametrize("d", [2, 3, 4, 16])
@pytest.mark.parametrize("coupling", [*UNBIASED, "unsigned"])
def test_each_frequency_is_standard_normal_and_missing_signs_are_seen(coupling, d):
    found = block_p_value(unsigned if coupling == "unsigned" else sampler(coupling), d)
    assert found < ALPHA if coupling == "unsigned" else found > ALPHA


def haar_p_value(sampler, d, draws):
    """P-value of the hypothesis that the directions of a block are a Haar matrix Q.

    For fixed unit u and v, (1 + u.Qv) / 2 is Beta((d - 1)/2, (d - 1)/2), and the sign of det Q is
    a fair coin; Bonferroni over pairs of probes.
    """
    matrices = blocks(sampler, d, d, draws)
    matrices /= np.linalg.norm(matrices, axis=-1, keepdims=True)
    law = beta((d - 1) / 2, (d - 1) / 2)
    products = (probes(d) @ matrices @ probes(d).T).reshape(draws, -1)
    p = [stats.ks(np.clip((1 + x) / 2, 0, 1), law.cdf) for x in products.T]
    p.append(stats.binomial(int(np.sum(np.linalg.det(matrices) < 0)), draws, 0.5))
    return stats.suite_p(p)


@pytest.mark.long("3", "4")
@pytest.mark.parametrize("d", [2, 3, 4])
def test_directions_of_a_block_are_haar_and_missing_signs_are_seen(d):
    assert haar_p_value(sampler("orthogonal"), d, 4000) > ALPHA
    assert haar_p_value(unsigned, d, 4000) < ALPHA


@pytest.mark.parametrize(("num_samples", "d"), [(4, 4), (11, 4), (3, 4), (5, 1), (1, 7)])
def test_orthogonal_blocks(num_samples, d):
    omega, log_weight = sampling.draw(num_samples, d, coupling="orthogonal", rng=SEED)
    assert omega.shape == (num_samples, d)
    np.testing.assert_array_equal(log_weight, np.zeros(num_samples))
    unit = omega / np.linalg.norm(omega, axis=-1, keepdims=True)
    for start in range(0, num_samples, d):
        block = unit[start : start + d]
        np.testing.assert_allclose(block @ block.T, np.eye(len(block)), atol=1e-14)


def test_blocks_are_independent():
    # omega_1 . omega_{d+1} / |omega_1| is N(0, 1) when the blocks are independent.
    d = 3
    omega = blocks(sampler("orthogonal"), d + 1, d)
    z = np.sum(omega[:, 0] * omega[:, d], -1) / np.linalg.norm(omega[:, 0], axis=-1)
    assert gaussian_p_value(z[:, None]) > ALPHA


def test_simplex_geometry():
    for d in (1, 2, 3, 7):
        rows = sampling._simplex_directions(d)
        cosine = -1 / (d - 1) if d > 1 else 0.0
        want = np.where(np.eye(d, dtype=bool), 1.0, cosine)
        np.testing.assert_allclose(rows @ rows.T, want, atol=1e-14)
        omega = sampling.draw(d, d, coupling="simplex", rng=SEED).omega
        unit = omega / np.linalg.norm(omega, axis=-1, keepdims=True)
        np.testing.assert_allclose(unit @ unit.T, want, atol=1e-13)


def test_couplings_by_construction():
    omega = sampling.draw(7, 3, coupling="antithetic", rng=SEED).omega
    np.testing.assert_array_equal(omega[4:], -omega[:3])
    omega = sampling.draw(7, 3, coupling="regularised", rng=SEED).omega
    np.testing.assert_allclose(np.linalg.norm(omega, axis=-1), np.sqrt(3.0))
    assert {"regularised", "sorf"} == sampling.BIASED_COUPLINGS
    for d, size in ((4, 4), (3, 4), (1, 1)):
        omega = sampling.draw(2 * size, d, coupling="sorf", rng=SEED).omega
        gram = omega[:size].T @ omega[:size]  # of columns, which are orthogonal for any d
        np.testing.assert_allclose(gram, size * np.eye(d), atol=1e-14)
        assert size < 4 or np.any(omega[:size] != omega[size:])
    for coupling, radius in (("sobol", 0.02), ("halton", 0.06)):
        # Scrambled points fill the cube more evenly than iid points, whose discrepancy is ~ 0.06:
        # by Sobol's construction each of 256 equal slices of each axis holds exactly one point.
        omega = sampling.draw(256, 3, coupling=coupling, rng=SEED).omega
        uniform = ndtr(omega)
        assert np.max(np.abs(np.sort(uniform, 0) - (np.arange(256) + 0.5)[:, None] / 256)) < radius
        if coupling == "sobol":
            slices = np.sort(np.floor(256 * uniform), 0)
            np.testing.assert_array_equal(slices, np.arange(256)[:, None] + np.zeros(3))


COV = np.array([[2.0, 0.6], [0.6, 0.9]])
PROPOSALS = {
    "shifted": sampling.Gaussian([1.0, -2.0]),
    "gaussian": sampling.Gaussian([1.0, -2.0], COV),
    "mixture": sampling.Mixture(
        [sampling.Gaussian([2.0, 0.0]), sampling.Gaussian([-1.0, 1.0], COV)], [3.0, 1.0]
    ),
}


@pytest.mark.parametrize("name", PROPOSALS)
def test_log_weights_are_log_density_ratios(name):
    omega, log_weight = sampling.draw(50, 2, proposal=PROPOSALS[name], rng=SEED)
    normal = multivariate_normal
    log_q = {
        "shifted": normal([1.0, -2.0]).logpdf,
        "gaussian": normal([1.0, -2.0], COV).logpdf,
        "mixture": lambda w: np.log(
            0.75 * normal([2.0, 0.0]).pdf(w) + 0.25 * normal([-1.0, 1.0], COV).pdf(w)
        ),
    }[name](omega)
    np.testing.assert_allclose(PROPOSALS[name].log_density(omega), log_q, atol=1e-12)
    want = normal(np.zeros(2)).logpdf(omega) - log_q
    np.testing.assert_allclose(log_weight, want, atol=1e-12)


@pytest.mark.parametrize("coupling", sampling.COUPLINGS)
def test_a_covariance_turns_frequencies_by_its_symmetric_root(coupling):
    options = {"coupling": coupling, "rng": SEED}
    cov = np.eye(3) + np.cov(np.random.default_rng(SEED).standard_normal((3, 9)))
    plain = sampling.draw(5, 3, **options).omega
    got = sampling.draw(5, 3, proposal=sampling.Gaussian([1.0, -2.0, 0.5], cov), **options).omega
    np.testing.assert_allclose(got, [1.0, -2.0, 0.5] + plain @ sqrtm(cov), rtol=0, atol=1e-12)


def test_draws_from_a_mixture():
    many = sampling.Mixture([sampling.Gaussian(np.full(4, float(i))) for i in range(100)])
    assert sampling.draw(3, 4, proposal=many, rng=0).omega.shape == (3, 4)
    # The distribution function along an axis is exact; wrong weights (1:1) are seen.
    omega = sampling.draw(4000, 2, proposal=PROPOSALS["mixture"], rng=SEED).omega

    def cdf(weight):
        return lambda x: weight * ndtr(x - 2) + (1 - weight) * ndtr((x + 1) / np.sqrt(2))

    assert stats.ks(omega[:, 0], cdf(0.75)) > ALPHA
    assert stats.ks(omega[:, 0], cdf(0.5)) < ALPHA


def test_batches_of_proposals():
    mean = np.arange(12.0).reshape(2, 3, 2)
    omega, log_weight = sampling.draw(5, 2, proposal=sampling.Gaussian(mean, COV), rng=SEED)
    assert omega.shape == (2, 3, 5, 2)
    for head in np.ndindex(2, 3):
        one = sampling.Gaussian(mean[head], COV)
        np.testing.assert_allclose(log_weight[head], one.log_ratio(omega[head]), atol=1e-12)
    noise = omega - mean[..., None, :]
    assert np.unique(noise).size == noise.size  # independent noise for each head
    mixture = sampling.Mixture([sampling.Gaussian(mean), sampling.Gaussian(np.zeros(2))])
    assert sampling.draw(5, 2, proposal=mixture, rng=SEED).omega.shape == (2, 3, 5, 2)


def test_infinite_variance_is_announced():
    narrow = sampling.Gaussian([0.0, 0.0], 0.5 * np.eye(2))
    with pytest.warns(sampling.InfiniteVarianceWarning, match="`proposal` is not above I/2"):
        sampling.draw(3, 2, proposal=narrow, rng=0)
    sampling.draw(3, 2, proposal=sampling.Mixture([narrow, sampling.Gaussian(np.zeros(2))]), rng=0)


@pytest.mark.parametrize("differentiated", [False, True])
def test_infinite_variance_is_announced_at_the_line_of_the_caller(differentiated):
    narrow, q = sampling.Gaussian([0.0, 0.0], 0.5 * np.eye(2)), np.ones((3, 2))
    call = refattn.random_feature_attention
    call = partial(refattn.vjp, call) if differentiated else call
    with pytest.warns(sampling.InfiniteVarianceWarning) as told:
        call(q, q, q, num_features=2, proposal=narrow, rng=0)
    assert {x.filename for x in told} == {__file__}


# --- exact draws from the target of randomized attention ----------------------------------------


def target_p_values(omega, q, k, pi):
    """Rosenblatt: given the coordinates before it, each has a mixture law; its u is uniform.

    omega (N, d) are iid from sum_j pi_j N(q + k_j, I) under the hypothesis. Then all N d values u
    are iid uniform, so their normal quantiles are iid N(0, 1).
    """
    share = np.broadcast_to(pi, (len(omega), len(pi)))
    u = []
    for c in range(omega.shape[-1]):
        z = omega[:, c, None] - (q + k)[None, :, c]
        u.append(np.sum(share * ndtr(z), -1))
        share = share * norm.pdf(z)
        share = share / share.sum(-1, keepdims=True)
    return gaussian_p_value(ndtri(np.stack(u, -1)))


@pytest.mark.parametrize("variant", ["full", "causal", "mask"])
def test_target_has_the_law_of_the_mixture(variant):
    rng = np.random.default_rng(SEED)
    n, m, d, draws = 3, 5, 2, 4000
    q, k = rng.standard_normal((n, d)), 2 * rng.standard_normal((m, d))
    visible = np.ones((n, m), bool)
    kwargs = {}
    if variant == "causal":
        kwargs["causal"], visible = True, np.tri(n, m, m - n, dtype=bool)
    if variant == "mask":
        kwargs["mask"] = visible = np.array(
            [[1, 0, 1, 1, 0], [0, 1, 0, 0, 0], [0, 0, 0, 1, 1]], bool
        )
    omega = sampling.draw_target(q, k, num_samples=draws, rng=SEED, scale=1.0, **kwargs)
    for i in range(n):
        pi = np.where(visible[i], np.exp(k @ q[i]), 0.0)
        pi /= pi.sum()
        assert target_p_values(omega[i], q[i], k, pi) > ALPHA
        if variant == "full":  # defects: one component left out, or a single matched Gaussian
            short = np.where(np.arange(m) == np.argsort(pi)[-2], 0.0, pi)
            assert target_p_values(omega[i], q[i], k, short / short.sum()) < ALPHA


def test_target_is_drawn_block_by_block(monkeypatch):
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 4, 6, 3)), rng.standard_normal((2, 2, 9, 3))
    whole = sampling.draw_target(q, k, num_samples=3, rng=1)
    monkeypatch.setattr(targets, "block_shape", lambda q: (4, 2))
    np.testing.assert_allclose(sampling.draw_target(q, k, num_samples=3, rng=1), whole, atol=1e-14)
    wide = sampling.draw_target(q, np.repeat(k, 2, 1), num_samples=3, rng=1)
    np.testing.assert_allclose(wide, whole, atol=1e-14)


def test_target_without_keys_is_centred_at_the_query():
    q, k = np.full((2, 3), 5.0), np.ones((4, 3))
    z = np.random.default_rng(0)
    z.random((2, 2))
    want = 5.0 + z.standard_normal((2, 2, 3))
    got = sampling.draw_target(q, k, num_samples=2, rng=0, scale=1.0, mask=np.zeros(4, bool))
    np.testing.assert_allclose(got, want)
    assert sampling.draw_target(q, k[:0], num_samples=2, rng=0).shape == (2, 2, 3)


def test_target_shows_nan_that_is_seen_alone():
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((5, 3)), rng.standard_normal((5, 3))
    want = sampling.draw_target(q, k, num_samples=4, rng=0, causal=True)
    for hidden in (slice(3, None), (3, 0)):
        bad = k.copy()
        bad[hidden] = np.nan
        got = sampling.draw_target(q, bad, num_samples=4, rng=0, causal=True)
        np.testing.assert_array_equal(got[:3], want[:3])
        np.testing.assert_array_equal(np.isnan(got).all((-1, -2)), [False] * 3 + [True] * 2)


@pytest.mark.long("jax", "dask")
@pytest.mark.parametrize("options", ["plain", "causal", "mask"])
def test_target_on_backends(backend, dtype, options):
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal(s).astype(dtype) for s in ((2, 5, 3), (1, 7, 3)))
    kwargs = {"causal": True} if options == "causal" else {}
    if options == "mask":
        kwargs["mask"] = rng.random((2, 5, 7)) < 0.6
    got = backend.call(sampling.draw_target, q, k, num_samples=3, rng=1, **kwargs)
    # The same components whatever the library and the dtype: float32 values, drawn in float64.
    want = sampling.draw_target(
        q.astype(np.float64), k.astype(np.float64), num_samples=3, rng=1, **kwargs
    )
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 if dtype == np.float32 else 1e-13)


@pytest.mark.long("mask", "plain", "array_api_strict")
@pytest.mark.parametrize("options", ["plain", "causal", "mask"])
@pytest.mark.parametrize("library", ["jax", "array_api_strict"])
def test_target_where_there_is_no_float64(library, options):
    # Every key is NumPy's, of so many that float32 would take another here and there.
    xp = pytest.importorskip("jax.numpy" if library == "jax" else library)
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal(s).astype(np.float32) for s in ((4, 20, 8), (2, 20_000, 8)))
    kwargs = {"causal": True} if options == "causal" else {}
    mask = rng.random((4, 20, 20_000)) < 0.6
    if options == "mask":
        kwargs["mask"] = mask
    want = sampling.draw_target(q, k, num_samples=50, rng=1, **kwargs)
    if library == "jax":
        with pytest.importorskip("jax").enable_x64(False):
            kwargs = {name: xp.asarray(x) if name == "mask" else x for name, x in kwargs.items()}
            got = sampling.draw_target(
                xp.asarray(q), xp.asarray(k), num_samples=50, rng=1, **kwargs
            )
            assert isinstance(got, xp.ndarray)
    else:
        device = xp.Device("no_float64")
        q, k = (xp.asarray(x, device=device) for x in (q, k))
        if options == "mask":
            kwargs["mask"] = xp.asarray(mask, device=device)
        got = sampling.draw_target(q, k, num_samples=50, rng=1, **kwargs)
        assert got.device == device
        got = xp.asarray(got, device=xp.Device("CPU_DEVICE"))
    np.testing.assert_array_equal(np.asarray(got), want)
    assert want.dtype == np.float32


def test_keys_of_float32_are_those_of_float64():
    # Sums of 20,000 equal shares in float32 would take other keys.
    q, k = np.zeros((1, 1), np.float32), np.arange(20_000, dtype=np.float32)[:, None]
    options = {"num_samples": 500, "rng": 1, "scale": 1.0}
    want = sampling.draw_target(q.astype(float), k.astype(float), **options)
    np.testing.assert_allclose(sampling.draw_target(q, k, **options), want, rtol=0, atol=0.01)


class AlmostOne(np.random.Generator):
    """Uniform numbers that are 1 in float32."""

    def random(self, shape):
        return np.full(shape, 1 - 1e-9)


def test_target_of_traced_arrays_without_float64():
    """Some key is drawn, too, where uniform numbers round to 1."""
    jax = pytest.importorskip("jax")
    rng, noise = np.random.default_rng(0), np.random.default_rng(0).standard_normal((1, 2, 1))
    q, k = (rng.standard_normal(s).astype(np.float32) for s in ((5, 3), (7, 3)))
    last = np.zeros((1, 1), np.float32), np.float32([[1], [2], [3]])
    for arrays, seed, want in (
        ((q, k), 1, sampling.draw_target(q, k, num_samples=2, rng=1, scale=1.0)),
        (last, AlmostOne(np.random.PCG64(0)), 3 + noise),
    ):
        draw = partial(sampling.draw_target, num_samples=2, rng=seed, scale=1.0)
        with jax.enable_x64(False):
            got = jax.jit(draw)(*arrays)
        np.testing.assert_allclose(np.asarray(got), want, rtol=0, atol=1e-5)


def test_weights_of_a_mixture_have_no_unit():
    rng = np.random.default_rng(0)
    parts = [sampling.Gaussian(rng.standard_normal(2)) for _ in range(3)]
    want = sampling.Mixture(parts, [1.0, 0.5, 0.25]).weights
    np.testing.assert_array_equal(want, np.array([4, 2, 1]) / 7)
    for unit in (2.0**1023, 2.0**-1072):
        mixture = sampling.Mixture(parts, np.array([1.0, 0.5, 0.25]) * unit)
        np.testing.assert_array_equal(mixture.weights, want)
        assert np.all(np.isfinite(sampling.draw(9, 2, proposal=mixture, rng=0).log_weight))


@pytest.mark.parametrize("coupling", sampling.COUPLINGS)
def test_repeatable(coupling):
    a, b = (sampling.draw(9, 4, coupling=coupling, rng=1).omega for _ in range(2))
    np.testing.assert_array_equal(a, b)
    assert a.dtype == np.float64
    generator = np.random.default_rng(1)
    np.testing.assert_array_equal(a, sampling.draw(9, 4, coupling=coupling, rng=generator).omega)
    assert np.any(a != sampling.draw(9, 4, coupling=coupling, rng=generator).omega)
