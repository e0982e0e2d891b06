"""The formulas as they are written, against the engine, 50 digits and closed forms."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import expit

import refattn
from refattn import features, naive
from refattn.estimators import lara, rfa
from tests import reference
from tests.conftest import Host
from tests.estimators.test_rfa import exponent, tolerance
from tests.reference import CONTRACT
from tests.test_attention import draw, seeds, sizes, with_norm
from tests.test_attention import tolerance as softmax_tolerance

# --- problems, and what rounding may do to their answers ------------------------------------------

LEADS = {  # of queries, keys and values
    "none": ((), (), ()),
    "broadcast": ((2, 3), (3,), (2, 1)),
    "values": ((), (), (2,)),
    "grouped": ((2, 6), (2, 3), (3,)),
    "shared": ((4,), (1,), (1,)),
}
MASKS = ("none", "keys", "rows", "heads")
DTYPES = (np.float32, np.float64)


@dataclass
class Problem:
    """Queries, keys and values, what each query sees and how to draw more."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    options: dict[str, Any]
    rng: np.random.Generator

    @property
    def lead(self):
        shapes = [x.shape[:-2] for x in (self.q, self.k, self.v)]
        heads = [1 if len(s) == 0 else s[-1] for s in shapes]
        if heads[0] > max(heads[1:]) > 1:
            shapes = [(*s[:-1], heads[0]) for s in shapes]
        return np.broadcast_shapes(*shapes)

    @property
    def visible(self):
        n, m = self.q.shape[-2], self.k.shape[-2]
        past = np.tri(n, m, m - n, dtype=bool) if self.options.get("causal") else True
        shape = (*self.lead, n, m)
        return np.broadcast_to(past & np.asarray(self.options.get("mask", True)), shape)

    def wide(self, x):
        """In float64, with a head for each query head."""
        heads = (1, *self.lead)[-1]
        if x.ndim > 2 and x.shape[-3] not in (1, heads):
            x = np.repeat(x, heads // x.shape[-3], axis=-3)
        return np.broadcast_to(x.astype(np.float64), (*self.lead, *x.shape[-2:]))


def make(lead, n, m, mask, causal, seed, dtype):
    rng = np.random.default_rng(seed)
    d, d_v = rng.integers(1, 5, 2)
    q, k, v = (
        draw(rng, *shape, rows, width, dtype=dtype)
        for shape, rows, width in zip(LEADS[lead], (n, m, m), (d, d, d_v), strict=True)
    )
    options = {"causal": True} if causal else {}
    heads = (1, *LEADS[lead][0])[-1]
    shape = {"none": None, "keys": (m,), "rows": (n, m), "heads": (heads, 1, m)}[mask]
    if lead == "none" and mask == "heads":
        shape = (1, m)
    if shape is not None:
        options["mask"] = rng.random(shape) < 0.6
    return Problem(q, k, v, options, rng)


problems = given(
    st.builds(
        make,
        st.sampled_from(sorted(LEADS)),
        sizes,
        sizes,
        st.sampled_from(MASKS),
        st.booleans(),
        seeds,
        st.sampled_from(DTYPES),
    )
)


@dataclass
class Case:
    """One estimator: the engine's function and the formula, with options for a problem.

    `atol` is what two answers within the accuracy contract may differ by.
    """

    engine: Callable[..., Any]
    formula: Callable[..., Any]
    draw: Callable[[Problem], dict[str, Any]]
    atol: Callable[..., Any]


def heads_or_none(p):
    return p.lead[-1:] if p.rng.random() < 0.5 else ()


def frequencies(p):
    lead, (count, d) = heads_or_none(p), (p.rng.integers(1, 5), p.q.shape[-1])
    log_weight = draw(p.rng, count)
    return {"omega": draw(p.rng, *lead, count, d), "log_weight": log_weight}


def largest(v):
    return float(np.max(np.abs(v), initial=0))


def rfa_atol(p, options):
    return tolerance(p.q, p.k, options["omega"]) * largest(p.v)


def is_atol(p, options):
    """As for RFA, times the estimated over the exact normaliser, whose exponents count too."""
    ratio = naive.importance_sampled_attention(
        *(p.wide(x) for x in (p.q, p.k, np.ones_like(p.v[..., :1]))), **options, **p.options
    )
    norm_q, norm_k = (reference.norm(x) for x in (p.q, p.k))
    root = float(reference.root(None, p.q.shape[-1]))
    extra = root**2 * norm_q * (norm_q / 2 + norm_k) + largest(options["log_weight"])
    eps = float(np.finfo(p.q.dtype).eps)
    units = 1 + exponent(p.q, p.k, options["omega"]) + extra
    return 2 * CONTRACT * eps * units * ratio * largest(p.v)


def trigonometric_atol(p, options):
    """Relative to the sums of absolute terms; infinite where the normaliser has no digits."""
    root = float(reference.root(None, p.q.shape[-1]))
    q, k = root * p.wide(p.q), root * p.wide(p.k)
    omega = np.swapaxes(options["omega"].astype(np.float64), -1, -2)
    size = np.where(p.visible, np.exp(np.sum(k * k, -1) / 2)[..., None, :], 0)
    angle = (q @ omega)[..., :, None, :] - (k @ omega)[..., None, :, :]
    weight = np.exp(options["log_weight"])
    total = np.abs(np.sum(size * np.sum(weight * np.cos(angle), -1), -1, keepdims=True))
    terms = np.sum(size, -1, keepdims=True) * np.sum(weight)
    seen = np.any(p.visible, -1, keepdims=True)
    unit = tolerance(p.q, p.k, options["omega"])
    lost = np.where(seen, unit * terms / np.where(seen, np.maximum(total, 1e-300), 1), 0)
    # |num/den - num'/den'| <= lost (|v| + |num/den|) / (1 - lost), |num/den| <= |v| terms/total
    return np.where(lost < 0.5, 2 * lost * (1 + lost / unit) * largest(p.v), np.inf)


def own_frequencies(p):
    return {"omega": draw(p.rng, *heads_or_none(p), p.q.shape[-2], 2, p.q.shape[-1])}


def proposals(weighting, centred):
    def options(p):
        (n, d), m = p.q.shape[-2:], p.k.shape[-2]
        count, repeats = p.rng.integers(1, min(n, m) + 1), p.rng.integers(1, 3)
        omega = draw(p.rng, *heads_or_none(p), count * repeats, d)
        chosen = {"omega": omega, "weighting": weighting}
        if "query" in weighting:
            chosen["beta"] = 0.7
        if centred:
            return {**chosen, "centres": draw(p.rng, count, d)}
        return {**chosen, "num_proposals": int(count)}

    return options


def lara_atol(p, options):
    """Centres have exponents too; alpha cancels where it is near 0, its own size is the measure."""
    root = float(reference.root(None, p.q.shape[-1]))
    centre = root * (reference.norm(p.q) + reference.norm(p.k))
    if "centres" in options:
        centre = reference.norm(options["centres"])
    units = 1 + exponent(p.q, p.k, options["omega"])
    units += centre * reference.norm(options["omega"]) + centre**2
    if "query" in options["weighting"]:
        units += (root * reference.norm(p.q)) ** 2
        units /= min(1.0, smallest_alpha(root * p.wide(p.q), **options))
    return 2 * CONTRACT * float(np.finfo(p.q.dtype).eps) * units * largest(p.v)


def smallest_alpha(q, *, omega, centres, weighting, beta):
    """Smallest |B_s + beta (t_ic - mean_c t_ic)|, at the given centres."""
    (count, samples), n = (centres.shape[-2], omega.shape[-2]), q.shape[-2]
    own = np.arange(samples) // (samples // count)
    log_ratio = omega @ centres.T - np.sum(centres**2, -1) / 2
    share = np.exp(log_ratio - np.logaddexp.reduce(log_ratio, -1, keepdims=True))
    balance = np.take_along_axis(share, np.broadcast_to(own[:, None], (*share.shape[:-1], 1)), -1)
    chunk = np.arange(n) * count // n
    q_mean = np.stack([q[..., chunk == c, :].mean(-2) for c in range(count)], axis=-2)
    t = np.exp(q @ np.swapaxes(q_mean, -1, -2))
    t = t / t.sum(-1 if weighting == "query" else -2, keepdims=True)
    t = (t - t.mean(-1, keepdims=True))[..., own]
    return float(np.min(np.abs(balance[..., None, :, 0] + beta * t)))


def linear_atol(p, options):
    return 2 * CONTRACT * float(np.finfo(p.q.dtype).eps) * largest(p.v)


def biases(p):
    shape = (*heads_or_none(p), p.q.shape[-2], p.k.shape[-2])
    return {"bias": draw(p.rng, *shape, dtype=p.q.dtype)}


def softmax_atol(p, options):
    units = largest(options["bias"]) * linear_atol(p, options)
    return softmax_tolerance(p.q, p.k, p.q.shape[-1] ** -0.5) * largest(p.v) + units


CASES = {
    "softmax": Case(refattn.softmax_attention, naive.softmax_attention, biases, softmax_atol),
    **{
        f"rfa {name}": Case(
            refattn.random_feature_attention,
            naive.random_feature_attention,
            lambda p, name=name: {**frequencies(p), "features": name},
            trigonometric_atol if name == "trigonometric" else rfa_atol,
        )
        for name in rfa.FEATURES
    },
    "is": Case(
        refattn.importance_sampled_attention,
        naive.importance_sampled_attention,
        frequencies,
        is_atol,
    ),
    "ra": Case(refattn.randomized_attention, naive.randomized_attention, own_frequencies, rfa_atol),
    "mean of ratios": Case(
        refattn.mean_of_ratios_attention,
        naive.mean_of_ratios_attention,
        lambda p: {"omega": frequencies(p)["omega"]},
        rfa_atol,
    ),
    **{
        f"lara {name}{', centres' if centred else ''}": Case(
            refattn.linear_randomized_attention,
            naive.linear_randomized_attention,
            proposals(name, centred),
            lara_atol,
        )
        for name in lara.WEIGHTINGS
        for centred in (False, True)
        if centred or "query" not in name
    },
    "linear": Case(refattn.linear_attention, naive.linear_attention, lambda p: {}, linear_atol),
}


def fits(name, p):
    """Causal LARA makes its own proposals, of keys that are the same for all queries."""
    if "lara" not in name or "causal" not in p.options:
        return True
    general = "mask" in p.options and p.options["mask"].shape[-2:-1] not in ((), (1,))
    return not (general or "centres" in name or "query" in name)


def assert_close(got, want, atol):
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    off = np.abs(got.astype(np.float64) - want)
    assert np.all((off <= atol) | np.isinf(atol)), f"off by {np.max(off / atol):.3g} tolerances"


# --- against the engine ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
@problems
def test_agrees_with_the_engine(name, p):
    if not fits(name, p):
        return
    case = CASES[name]
    options = case.draw(p)
    got, want = (f(p.q, p.k, p.v, **options, **p.options) for f in (case.formula, case.engine))
    assert_close(got, want, case.atol(p, options))
    empty = ~np.any(p.visible, axis=-1)
    np.testing.assert_array_equal(got[empty], 0)


@pytest.mark.long("jax", "dask")
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_engine_on_every_backend(backend, dtype, name):
    for seed, (lead, n, m, mask, causal, wrap) in enumerate(
        [("grouped", 4, 6, "heads", True, Host), ("broadcast", 5, 3, "rows", False, np.asarray)]
    ):
        p = make(lead, n, m, mask, causal, seed, dtype)
        if not fits(name, p):
            p = make(lead, n, m, mask, False, seed, dtype)
        case = CASES[name]
        options = case.draw(p)
        given = {
            key: wrap(x) if isinstance(x, np.ndarray) and key != "bias" else x
            for key, x in options.items()
        }
        got = backend.call(case.formula, p.q, p.k, p.v, **given, **p.options)
        want = case.engine(p.q, p.k, p.v, **options, **p.options)
        assert_close(got, want, case.atol(p, options))


@problems
def test_linear_attention_of_features_with_a_scale(p):
    omega = draw(p.rng, 3, p.q.shape[-1], dtype=p.q.dtype)

    def phi(x):
        return features.positive_features(x, omega)

    got, want = (
        f(p.q, p.k, p.v, feature_map=phi, **p.options)
        for f in (naive.linear_attention, refattn.linear_attention)
    )
    scale_1 = 2 * CONTRACT * float(np.finfo(p.q.dtype).eps) * (1 + exponent(p.q, p.k, omega, 1.0))
    assert_close(got, want, scale_1 * largest(p.v))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("n", "m"), [(3, 0), (0, 3), (3, 1), (1, 3)])
def test_few_queries_and_keys(name, n, m):
    if "lara" in name and 0 in (n, m):
        return  # there are no chunks
    p = make("none", n, m, "keys", False, 0, np.float64)
    case = CASES[name]
    options = case.draw(p)
    got = case.formula(p.q, p.k, p.v, **options, **p.options)
    want = case.engine(p.q, p.k, p.v, **options, **p.options)
    assert_close(got, want, 0.0 if 0 in (n, m) else case.atol(p, options))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("causal", [False, True])
def test_what_is_hidden_reaches_nothing(name, causal):
    p = make("none", 6, 7, "keys", causal, 3, np.float64)
    if not fits(name, p):
        return
    options = CASES[name].draw(p)
    want = CASES[name].formula(p.q, p.k, p.v, **options, **p.options)
    for value in (np.nan, np.inf, 1e300):
        k, v = p.k.copy(), p.v.copy()
        hidden = ~np.any(p.visible, axis=-2)
        assert np.any(hidden)
        k[hidden] = v[hidden] = value
        got = CASES[name].formula(p.q, k, v, **options, **p.options)
        np.testing.assert_array_equal(got, want)
        if causal:  # the last key is the last query's alone
            v[-1] = value
            got = CASES[name].formula(p.q, k, v, **options, **p.options)
            np.testing.assert_array_equal(got[:-1], want[:-1])


@pytest.mark.parametrize("scale", [0.3, 2.0])
def test_scale(scale):
    for name in ("softmax", "rfa positive", "is", "ra", "lara balance"):
        p = make("none", 4, 5, "none", False, 0, np.float64)
        options = CASES[name].draw(p)
        got, want = (
            f(p.q, p.k, p.v, **options, scale=scale)
            for f in (CASES[name].formula, CASES[name].engine)
        )
        p.q, p.k = p.q * 2**0.5, p.k * 2**0.5  # the tolerances know the default scale only
        assert_close(got, want, 2 * CASES[name].atol(p, options))


def test_overflowing_keys_are_not_hidden():
    x, v = np.full((4, 4), 1e30, np.float32), np.ones((4, 1), np.float32)
    assert np.all(np.isnan(naive.random_feature_attention(x, x, v, omega=np.ones((2, 4)))))


# --- against 50 digits ----------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["full", "causal", "key mask", "mask"])
@pytest.mark.parametrize("size", [1.0, 10.0, 100.0])
@pytest.mark.parametrize("d", [1, 3, 64])
def test_accuracy(d, size, variant, dtype, record_accuracy):
    rng = np.random.default_rng([d, int(size), len(variant)])
    n, m = 5, 7
    q, k = (with_norm(draw(rng, rows, d, dtype=dtype), size) for rows in (n, m))
    v, omega, own = (draw(rng, *shape, dtype=dtype) for shape in ((m, 2), (6, d), (n, 2, d)))
    visible = np.ones((n, m), bool)
    options = {"causal": True} if variant == "causal" else {}
    if variant == "causal":
        visible = np.tri(n, m, m - n, dtype=bool)
    if "mask" in variant:
        options["mask"] = rng.random(m if variant == "key mask" else (n, m)) < 0.6
        visible = visible & options["mask"]

    def check(name, got, want, top):
        units = reference.error(got, want, largest(v), top)
        record_accuracy(f"naive {name}, {variant}, norms {size:g}", dtype, units)
        assert units <= CONTRACT, name

    want = reference.attend(q, k, v, 0.0, visible, reference.root(None, d) ** 2)[0]
    top = reference.norm(q) * reference.norm(k) / d**0.5
    check("softmax", naive.softmax_attention(q, k, v, **options), want, top)
    log_weight = draw(rng, 6, dtype=dtype)
    want = reference.random_feature_attention(q, k, v, omega, log_weight, visible)
    got = naive.random_feature_attention(q, k, v, omega=omega, log_weight=log_weight, **options)
    check("rfa", got, want, exponent(q, k, omega))
    want = reference.randomized_attention(q, k, v, own, visible)
    got = naive.randomized_attention(q, k, v, omega=own, **options)
    check("ra", got, want, exponent(q, k, own))


# --- closed forms of what exact attention may have besides ---------------------------------------


@pytest.mark.parametrize("window", [(0, 0), (2, 1), (None, 1), (1, None), (None, None), (40, 40)])
@pytest.mark.parametrize("causal", [False, True])
@given(sizes, sizes)
def test_window(window, causal, n, m):
    # Of equal scores the result is the middle of what is seen, here of keys from low to high.
    v = np.arange(m, dtype=float)[:, None]
    got = naive.softmax_attention(np.ones((n, 1)), 0 * v, v, window=window, causal=causal)
    left, right = window
    for i in range(n):
        level = i + m - n
        low = 0 if left is None else max(0, level - left)
        high = m - 1 if right is None else min(m - 1, level + right)
        if causal:
            high = min(high, level)
        want = (low + high) / 2 if low <= high else 0.0
        assert got[i, 0] == pytest.approx(want, rel=1e-14, abs=1e-14)


def test_window_and_mask():
    v = np.eye(4)
    got = naive.softmax_attention(
        np.zeros((4, 1)), np.zeros((4, 1)), v, window=(1, 0), mask=np.arange(4) != 1
    )
    np.testing.assert_allclose(got, [[1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0.5, 0.5]])


@pytest.mark.parametrize("softcap", [0.5, 3.0, 50.0])
def test_softcap(softcap):
    # Two keys of scores s and 0 and values 1 and 0: the logistic function of the capped score, and
    # of the bias, which is not capped.
    s = np.linspace(-100, 100, 9)[:, None]
    keys, values = np.array([[1.0], [0.0]]), np.array([[1.0], [0.0]])
    for bias in (0.0, 7.0):
        got = naive.softmax_attention(
            s, keys, values, scale=2.0, softcap=softcap, bias=np.array([bias, 0.0])
        )
        want = expit(softcap * np.tanh(2 * s / softcap) + bias)
        np.testing.assert_allclose(got, want, rtol=1e-12 * (1 + softcap))
    plain = naive.softmax_attention(s / 100, keys, values)
    capped = naive.softmax_attention(s / 100, keys, values, softcap=1e8)
    np.testing.assert_allclose(capped, plain, rtol=1e-14)  # c tanh(s/c) = s - s^3 / 3c^2


@given(sizes, seeds)
def test_sinks(m, seed):
    # Keys of score 0: sum of values over m + e^sink.
    rng = np.random.default_rng(seed)
    q, k = np.zeros((2, 6, 3, 2)), draw(rng, 2, 3, m, 2)
    v, sinks = draw(rng, 3, m, 4), draw(rng, 6, size=3.0)
    got = naive.softmax_attention(q, k, v, sinks=sinks)
    values = np.repeat(np.sum(v, -2), 2, axis=0)  # of the key head of each query head
    want = values / (m + np.exp(sinks))[:, None]
    np.testing.assert_allclose(
        got, np.broadcast_to(want[:, None, :], got.shape), rtol=1e-13, atol=1e-14
    )


def test_a_sink_is_a_key_of_value_0():
    rng = np.random.default_rng(0)
    q, k, v, sinks = draw(rng, 4, 5, 3), draw(rng, 4, 7, 3), draw(rng, 4, 7, 2), draw(rng, 4)
    nothing = np.zeros((4, 1, 3))
    bias = np.concatenate([np.zeros((4, 5, 7)), np.tile(sinks[:, None, None], (5, 1))], -1)
    want = refattn.softmax_attention(
        q, np.concatenate([k, nothing], -2), np.concatenate([v, nothing[..., :2]], -2), bias=bias
    )
    np.testing.assert_allclose(naive.softmax_attention(q, k, v, sinks=sinks), want, atol=1e-14)
    without = naive.softmax_attention(q, k, v)
    same = naive.softmax_attention(q, k, v, sinks=np.full(4, -np.inf))
    np.testing.assert_allclose(same, without, rtol=1e-14)
    np.testing.assert_array_equal(naive.softmax_attention(q, k, v, sinks=np.full(4, 1e4)), 0)
    hidden = naive.softmax_attention(q, k, v, sinks=sinks, mask=np.zeros(7, bool))
    np.testing.assert_array_equal(hidden, 0)


def test_options_of_exact_attention_on_every_backend(backend, dtype):
    rng = np.random.default_rng(0)
    q, k, v = draw(rng, 2, 4, 5, 3), draw(rng, 2, 7, 3), draw(rng, 2, 7, 2)
    q, k, v, sinks = (x.astype(dtype) for x in (q, k, v, draw(rng, 4)))
    options = {"window": (2, 1), "softcap": 2.0}
    want = naive.softmax_attention(*(x.astype(float) for x in (q, k, v)), sinks=sinks, **options)
    for given_sinks in (Host(sinks), sinks):
        got = backend.call(naive.softmax_attention, q, k, v, sinks=given_sinks, **options)
        atol = softmax_tolerance(q, k, 3**-0.5) + largest(sinks) * CONTRACT * np.finfo(dtype).eps
        np.testing.assert_allclose(got, want, rtol=0, atol=atol * largest(v))


# --- on its own -----------------------------------------------------------------------------------


def test_shares_nothing_with_the_engine():
    folder = Path(naive.__file__).parent
    inside = {path.stem for path in folder.glob("*.py")}
    names = set()
    modules = set()
    for path in set(folder.glob("*.py")) - {
        *folder.glob("__main__.py"),
        *folder.glob("one_file*.py"),
    }:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module in inside:
                assert node.level == 1
            elif isinstance(node, ast.ImportFrom):
                modules.add(node.module)
                names |= {alias.name for alias in node.names} if node.level else set()
            elif isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
    assert modules == {
        "__future__",
        "collections.abc",
        "typing",
        "arrays",
        "arrays.library",
        "arrays.heads",
    }
    assert names == {
        "math",
        "checks",
        "Alibi",
        "Array",
        "ArrayT",
        "Features",
        "Weighting",
        "array_namespace",
        "as_written",
        "broadcast_lead",
        "constant",
        "device",
        "group_heads",
    }


Q = np.ones((4, 3))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: naive.softmax_attention(Q, Q, Q, mask=np.ones((4, 4))),
            TypeError,
            "`mask` must have dtype bool",
        ),
        (
            lambda: naive.random_feature_attention(Q, Q, Q, omega=Q, features="cubic"),
            ValueError,
            "`features` must be one of .*, got 'cubic'",
        ),
        (
            lambda: naive.random_feature_attention(Q, Q, Q, omega=Q, scale=-1.0),
            ValueError,
            "`scale` must be a positive finite real number",
        ),
        (
            lambda: naive.linear_randomized_attention(Q, Q, Q, omega=Q, weighting="best"),
            ValueError,
            "`weighting` must be one of .*, got 'best'",
        ),
        (
            lambda: naive.linear_randomized_attention(Q, Q, Q, omega=Q, num_proposals=3),
            ValueError,
            "`omega` must hold a multiple of the number of proposals, 3, got 4 frequencies",
        ),
        (
            lambda: naive.linear_randomized_attention(Q, Q, Q, omega=Q, centres=Q, causal=True),
            ValueError,
            "`centres` must be None with `causal`",
        ),
        (
            lambda: naive.randomized_attention(Q, Q, Q, omega=Q),
            ValueError,
            "`omega` must have shape",
        ),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()
