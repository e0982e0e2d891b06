"""Attention in pairs: against 60 digits, whether bounds hold, and where nothing is proven."""

import math
from fractions import Fraction
from functools import partial

import numpy as np
import pytest

import refattn
from refattn import certified
from refattn.certified.blocks import PairedAttention, attend_in_pairs, pull_back_in_pairs
from refattn.engine.scores import Scores
from refattn.judge.conformance.truth import digits
from refattn.numbers.pairs import to_pairs
from refattn.numbers.slices import sliced_error, sliced_products

DPS = 60


def number(x):
    """The exact value of a pair."""
    return digits.numbers(x.hi, dps=DPS) + digits.numbers(x.lo, dps=DPS)


def least_ratio(bound, error):
    """The least of bound over error."""
    pairs = zip(np.ravel(bound), np.ravel(error), strict=True)
    return min((float(b / e) for b, e in pairs if e), default=math.inf)


def holds(got, out, lse=None):
    """Whether results are within their bounds."""
    held = least_ratio(got.error, abs(number(got.out) - out)) >= 1
    return held and (lse is None or least_ratio(got.lse_error, abs(number(got.lse) - lse)) >= 1)


def seen_by(n, m, *, causal=False, window=(None, None), mask=True, bias=0.0, **_):
    """What each query sees."""
    ahead = np.arange(m) - np.arange(n)[:, None] - (m - n)
    left, right = (math.inf if x is None else x for x in window)
    seen = (ahead >= -left) & (ahead <= min(right, 0 if causal else math.inf))
    return seen & mask & (np.asarray(bias) > -np.inf)


def reference(q, k, v, **options):
    """One head of attention to 60 digits, with the scale of softmax attention."""
    bias = np.asarray(options.get("bias", 0.0))
    given = {x: options[x] for x in ("scale", "softcap", "sinks") if x in options}
    given |= {"bias": np.where(np.isfinite(bias), bias, 0.0)}
    return digits.attend(q, k, v, mask=seen_by(len(q), len(k), **options), dps=DPS, **given)


def tensors(rng, n, m, d, d_v, logit, *lead):
    """Queries, keys and values of which the largest logit is known."""
    q, k, v = (rng.standard_normal((*lead, *shape)) for shape in ((n, d), (m, d), (m, d_v)))
    return [q, k * (logit / np.abs(q @ k.swapaxes(-1, -2) / d**0.5).max()), v]


CASES = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (3, 1)},
    "softcap": {"softcap": 30.0},
    "small softcap": {"softcap": 1.5, "causal": True},
    "sink": {"sinks": np.asarray(1.25)},
    "scale": {"scale": 0.3},
    "mask": {"mask": np.random.default_rng(5).random((7, 33)) < 0.6},
    "bias": {"bias": np.random.default_rng(6).standard_normal((7, 33)) * 10},
    "hidden by bias": {"bias": np.where(np.arange(33) % 3, 0.1, -np.inf)},
    "key mask": {"mask": np.arange(33) % 4 > 0, "causal": True},
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("logit", [0.01, 3.0, 500.0, 1e5])
@pytest.mark.parametrize("case", CASES)
def test_against_60_digits(case, logit):
    q, k, v = tensors(np.random.default_rng(1), 7, 33, 24, 3, logit)
    for x in (q, k, v):
        x.flags.writeable = False  # nobody is written to
    got = certified.softmax_attention(q, k, v, **CASES[case])
    assert holds(got, *reference(q, k, v, **CASES[case]))
    assert (got.error <= 2.0**-60 * np.abs(v).max()).all()
    assert (got.lse_error <= 2.0**-60 * (1 + np.abs(got.lse.hi))).all()
    assert (got.out.hi == got.out.hi + got.out.lo).all()


def apart(x, y):
    """How far pairs are from each other."""
    return abs((x.hi - y.hi) + (x.lo - y.lo))


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 300, 2), (1, 1100, 1), (150, 9, 4)])
@pytest.mark.parametrize("d", [pytest.param(64, id="64"), pytest.param(256, id="wide")])
@pytest.mark.long("wide", "shape2")
def test_sizes(shape, d):
    n, m, d_v = shape
    q, k, v = tensors(np.random.default_rng(2), n, m, d, d_v, 20.0)
    got = certified.softmax_attention(q, k, v, causal=n > 1)
    for i in {0, n - 1} if n > m else {0, n // 2, n - 1}:
        reach = m - n + i + 1 if n > 1 else m
        if reach <= 0:
            assert (got.out.hi[i] == 0).all()
            assert got.lse.hi[i] == -math.inf
            assert got.error[i].max() == got.lse_error[i] == 0
            continue
        out, _ = reference(q[i : i + 1], k[:reach], v[:reach])
        row = certified.Pair(got.out.hi[i], got.out.lo[i])
        assert least_ratio(got.error[i], abs(number(row) - out[0])) >= 1
        assert (got.error[i] <= 2.0**-60).all()


def test_heads_in_groups_and_batches():
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal(x) for x in ((2, 4, 5, 8), (2, 2, 9, 8), (2, 2, 9, 3)))
    sinks, bias = rng.standard_normal(4), rng.standard_normal((4, 1, 9))
    got = certified.softmax_attention(q, k, v, sinks=sinks, bias=bias, causal=True)
    for b, h in np.ndindex(2, 4):
        options = {"sinks": sinks[h], "bias": bias[h], "causal": True}
        out, _ = reference(q[b, h], k[b, h // 2], v[b, h // 2], **options)
        own = certified.Pair(*(x[b, h] for x in got.out))
        assert least_ratio(got.error[b, h], abs(number(own) - out)) >= 1
    assert (got.error <= 2.0**-60 * np.abs(v).max()).all()


def test_alibi_is_the_product_of_the_numbers():
    rng = np.random.default_rng(4)
    q, k, v = tensors(rng, 6, 8, 4, 2, 5.0)
    slope = np.asarray(0.1)
    got = certified.attend(q, k, v, bias=refattn.attention.alibi(slope))
    distance = np.abs(np.arange(6)[:, None] + 2 - np.arange(8))
    bias = -digits.numbers(slope, dps=DPS) * distance
    assert holds(got, *digits.attend(q, k, v, bias=bias, scale=1.0, dps=DPS))
    assert (got.error < 2.0**-60).all()


def test_pairs_in():
    rng = np.random.default_rng(5)
    parts = [rng.standard_normal((4, 6)) for _ in range(3)]
    q, k, v = (certified.Pair(x, x * 2.0**-55 * rng.random(x.shape)) for x in parts)
    bias = certified.Pair(np.full((4, 4), 0.3), np.full((4, 4), 2.0**-60))
    got = certified.attend(q, k, v, bias=bias)
    assert holds(
        got, *digits.attend(*map(number, (q, k, v)), bias=number(bias), scale=1.0, dps=DPS)
    )
    alone = certified.attend(q.hi, k.hi, v.hi, bias=bias.hi)
    assert (apart(got.out, alone.out) > 100 * got.error).any()  # what the low parts say is seen
    whole = tensors(rng, 4, 6, 5, 2, 20.0)
    rough = [x.astype(np.float32).astype(np.float64) for x in whole]  # low parts of any size
    got = certified.attend(*(certified.Pair(x, y - x) for x, y in zip(rough, whole, strict=True)))
    assert holds(got, *digits.attend(*whole, scale=1.0, dps=DPS))


CHANGED = {
    "float32": lambda *x: [y.astype(np.float32) for y in x],
    "values of all sizes": lambda q, k, v: (q, k, v * 10.0 ** np.linspace(-20, 20, 9)[:, None]),
    **{f"q times {x:g}": lambda q, k, v, x=x: (q * x, k, v) for x in (1e9, 1e80, 1e160, 1e300)},
}
for _size in (1e-310, 1e-200, 1e200, 1e305):
    CHANGED[f"v times {_size:g}"] = lambda q, k, v, x=_size: (q, k, v * x)
    CHANGED[f"q times {_size:g}, k over it"] = lambda q, k, v, x=_size: (
        (q * x, k / max(x, 1e-290), v)
    )


@pytest.mark.parametrize("change", CHANGED)
def test_bounds_hold_for_any_sizes(change):
    """Bounds also hold where no digit is left: they are large there."""
    q, k, v = CHANGED[change](*tensors(np.random.default_rng(6), 4, 9, 8, 2, 10.0))
    got = certified.softmax_attention(q, k, v)
    assert got.out.hi.dtype == np.float64
    assert holds(got, *reference(q, k, v))


@pytest.mark.parametrize("features", ["positive", "hyperbolic"])
@pytest.mark.parametrize("size", [0.3, 3.0, 30.0])
def test_random_features(features, size):
    rng = np.random.default_rng(7)
    q, k, v = (rng.standard_normal(x) * s for x, s in (((4, 6), size), ((9, 6), size), ((9, 2), 1)))
    options = {"omega": rng.standard_normal((5, 6)), "log_weight": rng.standard_normal(5)}
    options |= {"features": features, "mask": np.arange(9) % 3 > 0}
    got = certified.random_feature_attention(q, k, v, **options)
    assert holds(got, digits.formulas(DPS).random_feature_attention(q, k, v, **options))
    assert (got.error <= 2.0**-55 * np.abs(v).max()).all()


def test_correct_rounding():
    rng = np.random.default_rng(8)
    q, k, v = tensors(rng, 9, 40, 16, 8, 8.0)
    rounded = certified.softmax_attention(q, k, v).rounded()
    out, _ = reference(q, k, v)
    nearest = np.vectorize(float)(out)
    assert (rounded.out[rounded.proven] == nearest[rounded.proven]).all()
    assert rounded.proven.mean() > 0.9


def test_ties_are_not_proven():
    both = certified.Pair(np.asarray([1.0, 1.0]), np.asarray([2.0**-53, 2.0**-54]))
    found = certified.Certified(both, both, np.full(2, 2.0**-70), np.zeros(2)).rounded()
    assert found.proven.tolist() == [False, True]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_what_is_not_finite_is_not_certified(bad, where):
    rng = np.random.default_rng(9)
    named = dict(zip("qkv", tensors(rng, 6, 6, 4, 2, 2.0), strict=True))
    whole = certified.softmax_attention(**named, causal=True)
    named[where] = named[where].copy()
    named[where][3, 1] = bad
    got = certified.softmax_attention(**named, causal=True)
    reached = np.arange(6) == 3 if where == "q" else np.arange(6) >= 3
    columns = [1] if where == "v" else [0, 1]  # other values have their sums, and the weights too
    assert (got.error[reached][:, columns] == np.inf).all()
    assert (np.isinf(got.lse_error[reached]) == (where != "v")).all()
    wanted = refattn.softmax_attention(**named, causal=True)
    np.testing.assert_array_equal(got.out.hi[reached][:, columns], wanted[reached][:, columns])
    for x, y in zip(got.out, whole.out, strict=True):
        np.testing.assert_array_equal(x[~reached], y[~reached])
    np.testing.assert_allclose(got.error[~reached], whole.error[~reached], rtol=1e-7)


def test_hidden_keys_do_not_count():
    rng = np.random.default_rng(10)
    q, k, v = tensors(rng, 5, 9, 4, 2, 2.0)
    mask = np.arange(9) != 4
    whole = certified.softmax_attention(q, np.delete(k, 4, 0), np.delete(v, 4, 0))
    for bad in (np.nan, np.inf, 1e300):
        k[4] = v[4] = bad
        got = certified.softmax_attention(q, k, v, mask=mask)
        assert (got.error <= 2.0**-60 * 4).all()
        np.testing.assert_array_equal(got.rounded().out, whole.rounded().out)


def test_blocks_and_spans(monkeypatch):
    """Bounds of results by other blocks hold for both."""
    rng = np.random.default_rng(14)
    q, k, v = tensors(rng, 70, 3000, 8, 3, 9.0)
    one = certified.softmax_attention(q, k, v, window=(2500, 100))
    monkeypatch.setattr("refattn.certified.blocks._QUERIES", (3, 13))
    other = certified.softmax_attention(q, k, v, window=(2500, 100))
    assert (apart(one.out, other.out) <= one.error + other.error).all()
    assert (one.error < 2.0**-60).all()


@pytest.mark.sweep(3)
@pytest.mark.parametrize("library", ["torch", "array_api_strict", "jax"])
@pytest.mark.long("jax")
def test_other_libraries(library):
    xp = pytest.importorskip("jax.numpy" if library == "jax" else library)
    if library == "jax":
        import jax

        jax.config.update("jax_enable_x64", True)
    rng = np.random.default_rng(16)
    given = tensors(rng, 3, 5, 8, 2, 9.0)
    wanted = certified.softmax_attention(*given, causal=True)
    got = certified.softmax_attention(*(xp.asarray(x) for x in given), causal=True)
    found, error = certified.Pair(*map(np.asarray, got.out)), np.asarray(got.error)
    assert (apart(found, wanted.out) <= error + wanted.error).all()
    assert (error < 2.0**-60).all()


def test_under_jit_it_says_why(jax):
    x = np.ones((2, 2))
    with pytest.raises(RuntimeError, match="must read arrays of float64"):
        jax.jit(lambda q: certified.softmax_attention(q, q, q).out.hi)(x)


def coarse(*args, exact_products=sliced_products):
    """Products as an accelerator rounds them, to float32."""
    for x in exact_products(*args):
        yield x.astype(np.float32).astype(np.float64)


@pytest.mark.long("<lambda>", "None")
@pytest.mark.parametrize(
    ("name", "wrong", "words"),
    [
        ("two_sum", lambda a, b: certified.Pair(a + b, 0 * a), "sums in pairs have errors"),
        ("two_product", lambda a, b: certified.Pair(a * b, 0 * a), "products in pairs have errors"),
        ("sliced_products", coarse, "products of matrices"),
        ("", None, None),
    ],
)
def test_self_test_finds_what_breaks_it(name, wrong, words, monkeypatch):
    if name:
        monkeypatch.setattr(f"refattn.certified.assumptions.{name}", wrong)
    found = certified.self_test()
    assert any(words in x for x in found) if name else found == []


def test_what_fails_the_test_is_refused(monkeypatch):
    failures = {("array_api_compat.numpy", "cpu"): ["e^x"]}
    monkeypatch.setattr("refattn.certified.assumptions._FAILURES", failures)
    x = np.ones((2, 2))
    with pytest.raises(RuntimeError, match=r"needs sums and products .*: e\^x"):
        certified.attend(x, x, x)


GRADIENTS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (2, 1)},
    "mask": {"mask": np.random.default_rng(20).random((5, 9)) < 0.5},
    "empty": {"mask": np.arange(5)[:, None] > 1},
    "bias and sink": {"bias": np.linspace(-3, 3, 9), "sinks": np.asarray(0.5)},
}


def pulled(q, k, v, d_out, scale=None, **options):
    """Gradients to 60 digits, by the rules of calculus."""
    given = {x: options[x] for x in ("bias", "sinks") if x in options}
    seen = seen_by(len(q), len(k), **options)
    function = partial(digits.formulas(DPS).softmax_attention, scale=scale, mask=seen, **given)
    return digits.pull_back(function, d_out, dps=DPS, q=q, k=k, v=v)[1]


@pytest.mark.parametrize("logit", [1.0, 300.0])
@pytest.mark.parametrize("case", GRADIENTS)
def test_gradients_against_60_digits(case, logit):
    rng = np.random.default_rng(21)
    q, k, v = tensors(rng, 5, 9, 4, 3, logit)
    d_out = rng.standard_normal((5, 3))
    got = certified.softmax_gradients(q, k, v, d_out, **GRADIENTS[case])
    want = pulled(q, k, v, d_out, **GRADIENTS[case])
    sizes = {"q": np.abs(k).max(), "k": np.abs(q).max(), "v": 1.0}
    for name, found in got._asdict().items():
        assert least_ratio(found.error, abs(number(found.value) - want[name])) >= 1
        assert (found.error <= 2.0**-54 * sizes[name]).all()


def test_gradients_of_groups_are_summed():
    rng = np.random.default_rng(22)
    q, k, v = (rng.standard_normal(x) for x in ((2, 4, 5, 3), (2, 2, 6, 3), (2, 1, 6, 2)))
    d_out = rng.standard_normal((2, 4, 5, 2))
    got = certified.softmax_gradients(q, k, v, d_out, causal=True)
    _, pullback = refattn.vjp(refattn.softmax_attention, q, k, v, causal=True)
    for found, want in zip(got, pullback(d_out)[:3], strict=True):
        assert found.value.hi.shape == want.shape
        np.testing.assert_allclose(found.value.hi, want, rtol=1e-12, atol=1e-14)
        assert (found.error < 2.0**-54).all()


def test_gradients_of_many_tokens():
    """Past every span and block, against values and keys that were moved."""
    rng = np.random.default_rng(23)
    q, k, v = tensors(rng, 1100, 1300, 4, 2, 5.0)
    d_out = rng.standard_normal((1100, 2))
    got = certified.softmax_gradients(q, k, v, d_out, causal=True)
    total = certified.Pair(*(x.sum(0, keepdims=True) for x in (got.v.value.hi, got.v.value.lo)))
    seen = number(certified.Pair(total.hi, total.lo))[0]
    exact_sum = digits.numbers(d_out, dps=DPS).sum(0)  # weights of each query sum to 1
    assert np.abs((seen - exact_sum).astype(float)).max() < 1e-11
    _, pullback = refattn.vjp(refattn.softmax_attention, q, k, v, causal=True)
    for found, want in zip(got, pullback(d_out)[:3], strict=True):
        np.testing.assert_allclose(found.value.hi, want, rtol=1e-11, atol=1e-13)
        assert (found.error < 2.0**-50).all()


def test_gradients_of_what_is_not_finite_are_not_certified():
    rng = np.random.default_rng(24)
    q, k, v = tensors(rng, 4, 4, 3, 2, 1.0)
    v[2, 0] = np.nan
    got = certified.softmax_gradients(q, k, v, np.ones((4, 2)), causal=True)
    assert (got.q.error[2:] == np.inf).all()
    assert np.isfinite(got.q.error[:2]).all()
    empty = certified.softmax_gradients(q[:0], k, v, np.ones((0, 2)))
    assert empty.q.value.hi.shape == (0, 3)
    assert (empty.k.value.hi == 0).all()


def test_samples_whose_terms_overflow_are_not_certified():
    given = (np.asarray([[x]]) for x in (1.0, 1e100, 1.0))
    got = certified.random_feature_attention(*given, omega=np.asarray([[-1e250]]), scale=1)
    assert (got.error == np.inf).all()


def test_hidden_keys_have_no_part_in_bounds_of_random_features():
    rng = np.random.default_rng(31)
    q, k, v = tensors(rng, 3, 6, 4, 2, 2.0)
    omega, mask = rng.standard_normal((5, 4)), np.arange(6) != 2
    k[2], v[2] = 1e300, np.nan
    got = certified.random_feature_attention(q, k, v, omega=omega, mask=mask)
    assert (got.error < 2.0**-58).all()
    without = [-np.inf, 0.0, 0.0, 0.0, 0.0]
    got = certified.random_feature_attention(
        q, k, v, omega=omega, mask=mask, log_weight=np.asarray(without)
    )
    rest = certified.random_feature_attention(q, k, v, omega=omega[1:], mask=mask)
    assert (apart(got.out, rest.out) <= got.error + rest.error).all()
    assert (got.error < 2.0**-58).all()


def test_errors_of_samples_come_through_where_their_values_cancel():
    """To 2^-53 of their terms, of which the errors are larger than those of what is left."""
    rng = np.random.default_rng(35)
    q, k, omega = (rng.standard_normal((x, 3)) for x in (2, 2, 1))
    p1, p2 = np.exp(k @ (3**-0.25 * omega[0]) - np.sum(k * k, -1) / 2 / 3**0.5)
    v = np.asarray([[p2], [-p1]])
    got = certified.random_feature_attention(q, k, v, omega=omega)
    assert holds(got, digits.formulas(DPS).random_feature_attention(q, k, v, omega=omega))
    assert (abs(got.out.hi) < 1e-15).all()
    assert (got.error < 2.0**-60).all()


def test_errors_of_samples_are_handed_on(monkeypatch):
    """Roundings of |k|^2 / 2, of log normalisers of samples, and of what is added to them."""
    calls = []

    def recorded(problem):
        calls.append((problem, attend_in_pairs(problem)))
        return calls[-1][1]

    monkeypatch.setattr("refattn.certified.attention.attend_in_pairs", recorded)
    rng = np.random.default_rng(36)
    q, k, v, omega = (rng.standard_normal((x, 3)) for x in (2, 5, 5, 4))
    got = certified.random_feature_attention(q, k, v, omega=omega)
    (first, (f, log_z)), (second, _) = calls
    assert (first.scores.bias.e > 0).all()
    assert (second.scores.bias.e >= log_z.e.T).all()
    assert (second.v.e >= f.e).all()
    assert (got.lse_error >= log_z.e.min()).all()


def test_the_root_of_a_scale_of_random_features_has_all_digits():
    rng = np.random.default_rng(37)
    q, k, v, omega = (rng.standard_normal((x, 3)) for x in (2, 5, 5, 4))
    got = certified.random_feature_attention(q, k, v, omega=omega, scale=0.3)
    want = digits.formulas(DPS).random_feature_attention(q, k, v, omega=omega, scale=0.3)
    assert holds(got, want)
    assert (got.error < 2.0**-58).all()


def test_scores_of_a_large_scale_have_as_many_digits():
    q, k, v = tensors(np.random.default_rng(39), 4, 9, 8, 2, 20.0)
    plain = certified.attend(q, k, v)
    scaled = certified.attend(q * 2.0**-30, k, v, scale=2.0**30)
    assert (scaled.error <= 2 * plain.error).all()


@pytest.mark.parametrize("scale", [7.0, -7.0, -1e-5, 1e-5, 1e-300, 5e-324])
def test_bounds_of_gradients_are_scaled(scale):
    rng = np.random.default_rng(32)
    q, k, v = (rng.standard_normal(x) for x in ((3, 2), (4, 2), (4, 2)))
    d_out = rng.standard_normal((3, 2))
    got = certified.softmax_gradients(q, k, v, d_out, scale=scale)
    plain = certified.softmax_gradients(q, k, v, d_out, scale=1.0)
    want = pulled(q, k, v, d_out, scale)
    for name, found in got._asdict().items():
        assert least_ratio(found.error, abs(number(found.value) - want[name])) >= 1
        assert (found.error <= 2.0**-54 * max(1, abs(scale))).all()
    if 1e-5 <= scale <= 7:
        smallest = scale * min(x.error.min() for x in plain[:2]) / 20
        assert min(x.error.min() for x in got[:2]) > smallest


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_hidden_keys_and_queries_that_see_none_have_no_part_in_gradients(bad):
    rng = np.random.default_rng(11)
    q, k, v = tensors(rng, 5, 9, 4, 2, 2.0)
    d_out = rng.standard_normal((5, 2))
    mask = (np.arange(9) != 4) & (np.arange(5) != 2)[:, None]
    rest, others = np.arange(9) != 4, np.arange(5) != 2
    want = certified.softmax_gradients(q[others], k[rest], v[rest], d_out[others])
    k[4] = v[4] = bad
    got = certified.softmax_gradients(q, k, v, d_out, mask=mask)
    for found, expected, own in zip(got, want, (others, rest, rest), strict=True):
        mine = certified.Pair(*(x[own] for x in found.value))
        assert (apart(mine, expected.value) <= found.error[own] + expected.error).all()
        assert (found.error <= 2.0**-50).all()
        assert (found.value.hi[~own] == 0).all()


def test_gradients_of_huge_arguments_have_no_finite_bound():
    one = np.ones((1, 1))
    found = certified.softmax_gradients(
        0 * one, np.asarray([[1e279], [-1e279]]), np.asarray([[1e24], [0.0]]), one, scale=0.5
    )
    assert (found.q.error == np.inf).all()
    rng = np.random.default_rng(33)
    q, k = rng.standard_normal((2, 1, 4))
    assert (certified.softmax_gradients(q, k * 1e204, one, one).v.error == np.inf).all()
    none = certified.softmax_gradients(q, k, one[:, :0], one[:, :0])
    assert none.q.value.hi.tolist() == [[0.0] * 4]


def test_scales_keep_their_digits():
    q, k = np.asarray([[50.0]]), np.asarray([[0.0], [1.0]])
    for scale in (Fraction(1, 3), np.longdouble(1) / 3):
        got = certified.attend(q, k, k, scale=scale)
        value = digits.context(DPS).mpf(1) / 3
        if not isinstance(scale, Fraction):
            value = digits.numbers(np.asarray([scale]), dps=DPS)[0]
        assert holds(got, *digits.attend(q, k, k, scale=value, dps=DPS))


def test_errors_of_arguments_come_through():
    """What values and biases are wrong by is in the bound, in full."""
    rng = np.random.default_rng(34)
    q, k = (to_pairs(rng.standard_normal((3, 2))) for _ in range(2))
    one, zero = np.ones((3, 2)), np.zeros((3, 3))
    out, _ = attend_in_pairs(PairedAttention(q, k, to_pairs(one, 1e-3 * one), Scores()))
    assert (out.e >= 1e-3).all()
    bias = to_pairs(zero, zero + 1e-3)
    out, lse = attend_in_pairs(PairedAttention(q, k, to_pairs(one), Scores(bias=bias)))
    assert (out.e >= 1.99e-3).all()  # through both sums, as all values are 1
    assert (lse.e >= 0.99e-3).all()


def test_errors_of_weights_are_in_those_that_values_and_gradients_inherit():
    """Of a key of little weight, whose exponent may be larger while all others are smaller."""
    zero, bias = np.zeros((2, 1)), np.asarray([[-5.0, 0.0]])

    def problem(off, v_error):
        scores = Scores(bias=to_pairs(bias, np.full((1, 2), off)))
        return PairedAttention(to_pairs(zero[:1]), to_pairs(zero), to_pairs(zero, v_error), scores)

    most, p = 1 / (1 + math.exp(5 - 0.2)), 1 / (1 + math.exp(5))
    out, _ = attend_in_pairs(problem(0.1, np.asarray([[1.0], [0.0]])))
    assert (out.e >= most).all()
    _, _, dv = pull_back_in_pairs(problem(1e-3, zero), to_pairs(np.ones((1, 1))))
    assert dv.e[0] >= 1.98e-3 * p


def test_bound_of_slices_is_that_of_the_formula():
    u = 2.0**-53
    for count, bits, levels in ((64, 23, 3), (4096, 20, 4), (8, 25, 2)):
        terms = levels * count * u / (1 - levels * count * u)
        most = terms * count * (levels + 2) * max(2.0 ** (-bits * (levels - 1)), 2.0**-51)
        assert sliced_error(count, bits, levels) >= most


@pytest.mark.parametrize(
    "shape", [((2,), (2,), (2,)), ((), (), (2,)), ((2,), (), ()), ((), (2,), ())]
)
def test_leading_axes_of_some_arrays(shape):
    """Heads may have a few arrays in common: each is as if it was alone."""
    rng = np.random.default_rng(8)
    arrays = [rng.standard_normal((*x, n, 4)) for x, n in zip(shape, (3, 5, 5), strict=True)]
    omega, d_out = rng.standard_normal((6, 4)), rng.standard_normal((2, 3, 4))

    def results(q, k, v, d_out):
        return [
            certified.softmax_attention(q, k, v),
            certified.random_feature_attention(q, k, v, omega=omega),
            certified.softmax_gradients(q, k, v, d_out),
        ]

    *both, gradients = results(*arrays, d_out)
    for h in range(2):
        one = [x[h] if x.ndim == 3 else x for x in arrays]
        *alone, gradients_alone = results(*one, d_out[h])
        for found, expected in zip(both, alone, strict=True):
            np.testing.assert_array_equal(found.out.hi[h], expected.out.hi)
            np.testing.assert_array_equal(found.out.lo[h], expected.out.lo)
            assert np.all(found.error[h] <= 2 * expected.error)
        for x, found, expected in zip(arrays, gradients, gradients_alone, strict=False):
            if x.ndim == 3:
                np.testing.assert_allclose(found.value.hi[h], expected.value.hi, rtol=1e-15)


def test_bounds_hold_where_weights_underflow():
    """A sink above all scores, and values of 1e-200."""
    rng = np.random.default_rng(40)
    q, k, v = tensors(rng, 3, 5, 2, 2, 300.0)
    v[2:] *= 1e-200
    d_out = rng.standard_normal((3, 2))
    for sink in (-50.0, 700.0, 3e11):
        options = {"sinks": np.asarray(sink), "causal": True}
        assert holds(
            certified.softmax_attention(q, k, v, **options), *reference(q, k, v, **options)
        )
        found = certified.softmax_gradients(q, k, v, d_out, **options)
        want = pulled(q, k, v, d_out, **options)
        for name, x in found._asdict().items():
            assert least_ratio(x.error, abs(number(x.value) - want[name])) >= 1
