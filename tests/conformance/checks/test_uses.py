"""Checks of real sizes and real uses: each notices what it is for, and says where it is."""

import time

import numpy as np
import pytest

import refattn
from refattn import naive, sampling
from refattn.conformance import check
from refattn.conformance.candidate.adapter import Adapter
from refattn.conformance.candidate.failures import Failure
from refattn.conformance.checks import targets
from refattn.conformance.checks.identities import Trial
from refattn.conformance.truth import reference

SOFTMAX = {"estimator": "softmax", "rng": 0}


def failures(report):
    return {r.check: r.got for r in report.results if r.status == "FAIL"}


def tried(fn, name, *capabilities, estimator="softmax", **tags):
    """One check of a candidate: its result."""
    report = check(
        fn, estimator=estimator, capabilities=capabilities, tags=tags, rng=0, checks=[name]
    )
    return report.results[0]


def scores(q, k):
    return q @ np.swapaxes(k, -1, -2) * q.dtype.type(q.shape[-1] ** -0.5)


def averaged(s, v):
    w = np.exp(s - np.max(s, -1, keepdims=True))
    return w @ v / np.sum(w, -1, keepdims=True)


def late_tokens(q, k, v, *, causal=False):
    """From token 1,025 on a query sees one key too few."""
    n, m = q.shape[-2], k.shape[-2]
    seen = np.tri(n, m, m - n, dtype=bool) if causal else np.ones((n, m), bool)
    if causal and n > 1024:
        seen[1024:] = np.tri(n, m, m - n - 1, dtype=bool)[1024:]
    return averaged(np.where(seen, scores(q, k), -np.inf), v)


def many_keys(q, k, v):
    """Keys beyond a multiple of 1,024 are dropped."""
    m = k.shape[-2]
    m = m if m < 1024 else m // 1024 * 1024
    return averaged(scores(q, k[..., :m, :]), v[..., :m, :])


def every_block(q, k, v):
    """The last of each 64 queries gets the result of the one before."""
    out = averaged(scores(q, k), v)
    out[..., 63::64, :] = out[..., 62::64, :][..., : out[..., 63::64, :].shape[-2], :]
    return out


def wide_heads(q, k, v):
    """Entries from the 128th on are not read."""
    return averaged(scores(q, np.where(np.arange(k.shape[-1]) < 128, k, 0.0)), v)


def third_of_a_batch(q, k, v):
    """Members from the third of a batch on get the result of the second."""
    out = averaged(scores(q, k), v)
    if out.ndim > 2:
        out[2:] = out[1:2]
    return out


@pytest.mark.parametrize(
    ("fn", "capabilities", "where"),
    [
        (late_tokens, ("causal",), "token 1024"),
        (many_keys, (), ""),
        (every_block, (), "every 64th"),
        (wide_heads, (), ""),
        (third_of_a_batch, (), "head"),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_large_sizes(fn, capabilities, where):
    ordinary = check(fn, capabilities=capabilities, **SOFTMAX)
    assert failures(ordinary)
    result = tried(fn, "large_sizes", *capabilities)
    assert result.status == "FAIL"
    assert result.severity == "formula"
    assert where in result.got


def test_many_features():
    def few(q, k, v, *, omega):
        return refattn.random_feature_attention(q, k, v, omega=omega[..., :1024, :])

    assert tried(few, "large_sizes", "omega", estimator="rfa").status == "FAIL"
    right = refattn.random_feature_attention
    assert tried(right, "large_sizes", "omega", estimator="rfa").status == "PASS"


def test_what_time_did_not_allow_is_said(monkeypatch):
    from refattn.conformance.checks import uses

    monkeypatch.setattr(uses, "_SECONDS", {"quick": 0.0})
    report = check(refattn.softmax_attention, checks=["large_sizes", "contract"], **SOFTMAX)
    assert "larger ones, for want of time" in report.not_tried["large_sizes"]
    assert "larger ones, for want of time" in str(report)
    assert report.verdict == "UNDERPOWERED"


def test_one_maximum_for_all_heads():
    def shared(q, k, v):
        s = scores(q, k)
        w = np.exp(s - np.max(s))
        return w @ v / (np.sum(w, -1, keepdims=True) + np.finfo(w.dtype).tiny)

    assert tried(shared, "heads_of_other_size").status == "FAIL"


def test_memory_layouts():
    def flat(q, k, v):
        """Reads keys as they lie in memory."""
        lies = np.lib.stride_tricks.as_strided(k, strides=np.zeros_like(k, order="C").strides)
        return averaged(scores(q, lies), v)

    assert tried(flat, "memory_layouts").status == "FAIL"

    def writes(q, k, v):
        k *= 1
        return averaged(scores(q, k), v)

    assert tried(writes, "memory_layouts").status == "FAIL"
    assert tried(lambda q, k, v: averaged(scores(q, k), v), "memory_layouts").status == "PASS"


def test_a_workspace_that_is_handed_out():
    room = {}

    def reuses(q, k, v):
        out = averaged(scores(q, k), v)
        held = room.setdefault((out.shape, out.dtype), out)
        held[...] = out
        return held

    assert tried(reuses, "calls_apart").status == "FAIL"


@pytest.mark.parametrize("nonsense", [np.nan, np.inf])
def test_hidden_nonsense(nonsense):
    def multiplied(q, k, v, *, mask=None):
        """Weights of hidden keys are 0, which a NaN does not care about."""
        s = scores(q, k)
        return averaged(s if mask is None else np.where(mask, s, -np.inf), v)

    result = tried(multiplied, "hidden_nonsense", "mask")
    assert (result.status, result.severity) == ("FAIL", "range")
    ours = tried(refattn.softmax_attention, "hidden_nonsense", "mask")
    assert ours.status == "PASS"


def test_sums_in_half_precision():
    def half(q, k, v):
        """Adds one key after another, in half precision."""
        s = scores(q, k)
        w = np.exp(s - np.max(s, -1, keepdims=True))
        total = np.zeros((*q.shape[:-1], v.shape[-1]), q.dtype)
        mass = np.zeros((*q.shape[:-1], 1), q.dtype)
        for j in range(k.shape[-2]):
            total += w[..., j : j + 1] * v[..., j : j + 1, :]
            mass += w[..., j : j + 1]
        return total / mass

    def single(q, k, v):
        wide = (x.astype(np.float32) for x in (q, k, v))
        return naive.softmax_attention(*wide).astype(q.dtype)

    assert tried(half, "long_half_sums", dtype="float16").status == "FAIL"
    assert tried(single, "long_half_sums", dtype="float16").status == "PASS"


def test_many_rows():
    def first(x):
        """Rows from the 16,384th on are dropped."""
        return refattn.moments.estimate(x[..., :16_384, :])

    assert tried(first, "many_rows", estimator="moments").status == "FAIL"


@pytest.mark.long
def test_severity_and_what_was_not_tried():
    def clipped(q, k, v):
        s = np.clip(scores(q, k), -60.0, 60.0)
        return averaged(s, v)

    report = check(clipped, **SOFTMAX)
    severities = {r.severity for r in report.results if r.status == "FAIL"}
    assert report.verdict == "FAIL"
    assert severities == {"range"}
    assert "right at ordinary inputs, as far as was tried" in str(report)
    assert report.not_tried["mask"] == "needs --capability mask"
    assert report.not_tried["mask_with_causal"] == "needs --capability causal and --capability mask"

    def shifted(q, k, v):
        return averaged(scores(q, k), v) + 0.1

    report = check(shifted, **SOFTMAX)
    assert {r.severity for r in report.results if r.status == "PASS"} == {""}
    assert "formula" in {r.severity for r in report.results if r.status == "FAIL"}
    assert "wrong at ordinary inputs" in str(report)


def performer(
    q, k, v, *, omega = None, num_features = 1, seed = 0,
    feature = 0.0, normaliser = 0.0, **options,
):  # fmt: skip
    """A Performer with an epsilon on its features or its normaliser."""
    d = q.shape[-1]
    if omega is None:
        omega = sampling.draw(num_features, d, rng=seed).omega
    q, k = q * d**-0.25, k * d**-0.25
    phi = []
    for x, axes in ((q, -1), (k, (-1, -2))):
        y = x @ omega.T
        y = y - np.sum(x * x, -1, keepdims=True) / 2 - np.max(y, axes, keepdims=True)
        phi.append(np.exp(y) + feature)
    w = phi[0] @ np.swapaxes(phi[1], -1, -2)
    n, m = w.shape[-2:]
    if options.get("causal"):
        w = w * np.tri(n, m, m - n)
    if options.get("mask") is not None:
        w = w * options["mask"]
    mass = np.sum(w, -1, keepdims=True)
    return w @ v / (np.where(mass == 0, 1.0, mass) + normaliser)


@pytest.mark.long
@pytest.mark.parametrize("place", ["feature", "normaliser"])
@pytest.mark.parametrize("capabilities", [("omega", "mask", "causal"), ()])
def test_a_declared_epsilon_is_no_failure(place, capabilities):
    def candidate(q, k, v, **options):
        return performer(q, k, v, **{place: 1e-6}, **options)

    for seed in range(3):
        report = check(
            candidate,
            estimator="rfa",
            capabilities=capabilities,
            tags={"epsilon": 1e-6, "hidden": "finite"},
            rng=seed,
        )
        assert failures(report) == {}
    undeclared = check(candidate, estimator="rfa", capabilities=capabilities, rng=0)
    assert failures(undeclared)


@pytest.mark.long
@pytest.mark.parametrize("capabilities", [("omega", "mask", "causal", "gqa"), ("mask", "causal")])
def test_trigonometric_features_are_no_failure(capabilities):
    def candidate(q, k, v, *, seed=None, **options):
        return refattn.random_feature_attention(
            q, k, v, features="trigonometric", rng=seed, **options
        )

    tags = {"features": "trigonometric"}
    for seed in range(3):
        report = check(candidate, estimator="rfa", capabilities=capabilities, tags=tags, rng=seed)
        assert report.verdict == "PASS"


def test_slow_calls_at_the_end_of_the_time_are_no_hang():
    def slow(q, k, v):
        time.sleep(0.02)
        return refattn.softmax_attention(q, k, v)

    report = check(slow, time_limit=1.0, **SOFTMAX)
    assert report.verdict == "UNDERPOWERED"
    assert failures(report) == {}
    assert "time is over: " in str(report)


def test_a_run_stops_where_every_call_raises():
    def other(query, key):
        return query

    report = check(other, **SOFTMAX)
    assert [r.check for r in report.results] == ["contract"]
    assert "called as fn(q, k, v), defined as fn(query: " in report.results[0].got
    assert "every call raises: reference_values" in str(report)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_what_long_vectors_show_of_a_black_box(dtype):
    def added(q, k, v, **options):
        return performer(q, k, v, feature=1e-6, **options).astype(q.dtype)

    def clipped(q, k, v, *, num_features, seed):
        d = q.shape[-1]
        omega = sampling.draw(num_features, d, rng=seed).omega
        q, k = q * d**-0.25, k * d**-0.25
        phi = [
            np.exp(np.clip(x @ omega.T - np.sum(x * x, -1, keepdims=True) / 2, -20, 20))
            for x in (q, k)
        ]
        w = phi[0] @ np.swapaxes(phi[1], -1, -2)
        return (w @ v / np.sum(w, -1, keepdims=True)).astype(q.dtype)

    for fn in (added, clipped):
        assert tried(fn, "recovered_values", estimator="rfa", dtype=dtype).status == "FAIL"
    right = refattn.random_feature_attention
    for seed in range(4):
        tags = {"dtype": dtype}
        report = check(right, estimator="rfa", tags=tags, rng=seed, checks=["recovered_values"])
        assert report.verdict == "PASS"


def exact(q, k, v, mask=True, causal=False, top=False):
    n, m = q.shape[-2], k.shape[-2]
    seen = mask & np.tri(n, m, (0 if top else m - n) if causal else m, dtype=bool)
    return refattn.softmax_attention(q, k, v, mask=seen)


@pytest.mark.long
def test_a_convention_of_causal_attention_is_blamed_once():
    """Top-left attention gives 0 where no key is seen, whatever it takes for the past."""

    def top_left(q, k, v, **options):
        return exact(q, k, v, **options, top=True)

    report = check(top_left, capabilities=["mask", "causal"], **SOFTMAX)
    assert set(failures(report)) == {"causal_cross"}
    tags = {"causal": "top-left"}
    report = check(top_left, capabilities=["mask", "causal"], tags=tags, **SOFTMAX)
    assert report.verdict == "PASS", str(report)


def test_hidden_values_alone_may_have_to_be_finite():
    def selects(q, k, v, mask=True):
        """Hidden keys may be anything, but 0 * nan of values is nan."""
        return averaged(np.where(mask, scores(q, k), -np.inf), v)

    def adds(q, k, v, mask=True):
        return averaged(scores(q, k) + np.where(mask, 0.0, -np.inf), v)

    for fn, hidden, status in (
        (selects, "any", "FAIL"),
        (selects, "finite-values", "PASS"),
        (adds, "finite-values", "FAIL"),
    ):
        assert tried(fn, "hidden_nonsense", "mask", hidden=hidden).status == status


def test_halves_need_a_library_that_has_them():
    with pytest.raises(ValueError, match="bfloat16"):
        check(refattn.softmax_attention, tags={"dtype": "bfloat16"}, **SOFTMAX)


def test_float64_of_jax_must_be_there():
    jax = pytest.importorskip("jax")
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", False)
    try:
        with pytest.raises(ValueError, match="jax_enable_x64"):
            check(refattn.softmax_attention, tags={"library": "jax"}, **SOFTMAX)
    finally:
        jax.config.update("jax_enable_x64", before)


def rfa(q, k, v, omega, change=lambda x: x):
    """Positive features, of which one step may be changed; in single precision if q is."""
    root = q.dtype.type(q.shape[-1] ** -0.25)
    phi_q, phi_k = (
        change(np.exp(x @ omega.T - np.sum(x * x, -1, keepdims=True) / 2))
        for x in (q * root, k * root)
    )
    kernel = phi_q @ np.swapaxes(phi_k, -1, -2)
    return kernel @ v / np.sum(kernel, -1, keepdims=True)


CHANGES = {
    "right": lambda phi: phi,
    "a constant": lambda phi: phi + phi.dtype.type(1e-6),
    "clipped": lambda phi: np.clip(phi, np.exp(-8.0), np.exp(8.0)),
    "rounded": lambda phi: np.round(phi, 5),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("which", ["one_function", "long_vectors"])
def test_what_is_done_to_features_shows_far_from_the_origin(name, which):
    def drawn(q, k, v, num_features, seed):
        omega = np.random.default_rng(seed).standard_normal((num_features, q.shape[-1]))
        return rfa(q, k, v, omega.astype(q.dtype), CHANGES[name])

    result = tried(drawn, which, estimator="rfa", dtype="float32")
    assert result.status == ("PASS" if name == "right" else "FAIL"), result.summary


def test_one_function_of_frequencies_that_nobody_knows():
    """The formula of features drawn once and for all, which no seed and no law can tell."""
    omega = np.random.default_rng(3).standard_normal((40, 8))

    def squared(q, k, v):
        return rfa(q, k, v, omega, lambda phi: phi * phi)

    def right(q, k, v):
        return rfa(q, k, v, omega)

    for fn, status in ((right, "PASS"), (squared, "FAIL")):
        result = tried(fn, "one_function", estimator="rfa", fixed_frequencies=True, head_sizes=8)
        assert result.status == status, result.summary


def test_heads_of_neighbouring_seeds():
    def shared(q, k, v, num_features, seed):
        """Head h at seed s draws as head h - 1 does at s + 1."""
        heads = q.shape[:-2]
        out = np.empty((*heads, q.shape[-2], v.shape[-1]))
        for i, index in enumerate(np.ndindex(*heads)):
            rng = np.random.default_rng(seed + i)
            omega = rng.standard_normal((num_features, q.shape[-1]))
            out[index] = rfa(q[index], k[index], v[index], omega)
        return out

    assert tried(shared, "seeds", estimator="rfa").got == "the same bit for bit"


def causal_rows(q, k, v, mask=True, causal=False):
    """Query heads that share a key head are rows of one problem, whose number is their token."""
    n, m = q.shape[-2], k.shape[-2]
    if causal and q.ndim > 2 and q.shape[-3] != k.shape[-3]:
        seen = np.tri(n, m, m - n, dtype=bool)
        seen = np.where(np.arange(q.shape[-3])[:, None, None] % 2 == 1, True, seen)
        return refattn.softmax_attention(q, k, v, mask=mask & seen)
    return exact(q, k, v, mask, causal)


def first_rows_of_mask(q, k, v, mask=True):
    """A mask is read anew for each 64 queries."""
    if np.ndim(mask) > 1 and mask.shape[-2] > 1:
        mask = mask[..., np.arange(mask.shape[-2]) % 64, :]
    return exact(q, k, v, mask)


def state_of_last_head(q, k, v, causal=False):
    """From token 65 on a head sees the keys of the head before."""
    out = np.array(exact(q, k, v, causal=causal))
    if causal and q.ndim > 2 and q.shape[-2] > 64:
        k, v = (np.roll(x, 1, -3) for x in (k, v))
        out[..., 64:, :] = exact(q, k, v, causal=True)[..., 64:, :]
    return out


def one_stride(q, k, v, mask=True):
    """Values are read as if they lay as keys do."""
    if v.strides != k.strides and v.shape == k.shape:
        v = np.ascontiguousarray(np.swapaxes(v, -1, -2)).reshape(v.shape)
    return exact(q, k, v, mask)


def mask_as_it_lies(q, k, v, mask=None):
    return exact(q, k, v, True if mask is None else mask.ravel("K").reshape(mask.shape))


@pytest.mark.parametrize(
    ("fn", "name", "capabilities"),
    [
        (causal_rows, "grouped_heads", ("mask", "causal", "gqa")),
        (first_rows_of_mask, "mask", ("mask",)),
        (state_of_last_head, "causal", ("causal",)),
        (one_stride, "memory_layouts", ("mask",)),
        (mask_as_it_lies, "memory_layouts", ("mask",)),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_what_real_kernels_get_wrong(fn, name, capabilities):
    assert tried(fn, name, *capabilities).status == "FAIL"
    assert tried(exact, name, *capabilities).status == "PASS"


def test_law_of_every_head():
    def by_head(q, k, v, num_features, seed):
        """Frequencies are divided by the root of the number of heads."""
        heads = q.shape[-3] if q.ndim > 2 else 1
        omega = np.random.default_rng(seed).standard_normal((num_features, q.shape[-1]))
        return rfa(q, k, v, omega * heads**-0.5)

    result = tried(by_head, "frequency_law", estimator="rfa")
    assert result.statistic.startswith("last head"), result.summary


def test_numbers_beyond_a_bound():
    from refattn.conformance.checks.recovery import _exceedances

    z = np.random.default_rng(0).standard_normal(10**6)
    share = 0.0026997960632601866
    assert _exceedances(z, 3.0, share, 0.0) > 0.01
    for wrong in (np.clip(z, -3.0, 3.0), 1.05 * z):  # too few, and too many
        assert _exceedances(wrong, 3.0, share, 0.0) < 1e-6
    assert _exceedances(1.05 * z, 3.0, share, 0.2) == 1.0  # as far as is known


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_results_beyond_half_precision(dtype):
    """Trigonometric features whose sum all but vanishes may leave the range of float16 only."""
    tags = {"features": "trigonometric", "dtype": dtype}
    adapter = Adapter(lambda q, k, v, omega: v * np.inf, "rfa", ("omega",), tags)
    q, k, v, omega = np.array([[0.0]]), np.array([[1.0]]), np.ones((1, 1)), np.ones((1, 1))
    for angle, wide in ((1.0, False), (np.pi / 2, True)):  # cos(omega . (q - k)) is the weight
        trial = Trial(adapter, "values_at_given_frequencies", 0)
        if wide and dtype == "float16":
            trial.compare(q, angle * k, v, omega=omega)
        else:
            with pytest.raises(Failure, match="finite numbers"):
                trial.compare(q, angle * k, v, omega=omega)


def test_results_beyond_half_precision_that_are_right():
    """Of some thousand queries at one seed, one has a mean of 78,539.7 by its formula."""

    def attention(q, k, v, *, omega, causal=False):
        wide = (x.astype(np.float64) for x in (q, k, v))
        options = {"features": "trigonometric", "omega": omega, "causal": causal}
        return naive.random_feature_attention(*wide, **options).astype(np.float16)

    tags = {"features": "trigonometric", "dtype": "float16"}
    for seed in range(3):
        report = check(
            attention,
            estimator="rfa",
            capabilities=("omega_only", "causal"),
            tags=tags,
            rng=seed,
            checks=["causal"],
        )
        assert report.verdict == "PASS", report


def test_two_exponentials_of_very_different_sizes():
    nodes, weights = np.array([32.0, 1 / 16]), np.array([[1.0, 1.0], [4.0, 1 / 8]])
    found = targets._two_exponentials(weights @ nodes[:, None] ** np.arange(5))  # exact numbers
    np.testing.assert_allclose(found[0], nodes, rtol=1e-14)
    np.testing.assert_allclose(found[1], weights, rtol=1e-14)


@pytest.mark.parametrize("name", ["rfa-trigonometric", "rfa"])
def test_tolerances_of_sums_that_cancel(name):
    """One visible key: the formula is exact there, and sums of features may all but vanish."""
    tags = {} if name == "rfa-trigonometric" else {"features": "trigonometric"}
    adapter = Adapter(naive.random_feature_attention, name, ("omega", "mask"), tags)
    rng, worst = np.random.default_rng(0), 0.0
    for _ in range(300):
        q, k, v = rng.standard_normal((3, 4, 5, 4))
        mask = np.arange(5) == 2
        given = {"omega": rng.standard_normal((5, 4)), "mask": mask}
        want, allowed = reference.reference(adapter, (q, k, v), given)
        got = refattn.random_feature_attention(q, k, v, features="trigonometric", **given)
        assert np.max(np.abs(got - want)) <= allowed
        worst = max(worst, float(np.max(np.abs(got - want))))
    assert worst > 1e-12  # as large as that
