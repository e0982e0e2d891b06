"""Pullbacks: against 50-digit arithmetic, finite differences, automatic differentiation, laws."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import refattn
from refattn import features, naive, sampling
from refattn.conformance.truth import exact
from refattn.gradients import Gradients, vjp
from tests import reference
from tests.reference import CONTRACT

SOFTMAX, RFA = refattn.softmax_attention, refattn.random_feature_attention
IS, RA = refattn.importance_sampled_attention, refattn.randomized_attention
MEAN, LARA = refattn.mean_of_ratios_attention, refattn.linear_randomized_attention
LINEAR, ATTEND = refattn.linear_attention, refattn.attend
LONG = np.longdouble


class Case(NamedTuple):
    """An attention function, its formula, and the shapes of what it takes beside q, k and v."""

    fn: Callable[..., Any]
    formula: Callable[..., Any]
    shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    options: Mapping[str, Any] = MappingProxyType({})
    causal: bool = True
    positive: bool = False  # whether queries and keys have to be


D, S, C = 4, 6, 3
WAVES = np.random.default_rng(9).standard_normal((5, D))


def rfa(kind):
    shapes = {"omega": (S, D), "log_weight": (S,)}
    return Case(RFA, naive.random_feature_attention, shapes, {"features": kind})


def lara(weighting):
    given, causal = {"num_proposals": C, "weighting": weighting}, "query" not in weighting
    shapes = {"omega": (2 * C, D)}
    return Case(LARA, naive.linear_randomized_attention, shapes, given, causal)


def linear(feature_map, *, positive=False):
    return Case(LINEAR, LINEAR, {}, {"feature_map": feature_map}, True, positive)


def drawn(**options):
    """Frequencies that move with the proposals: the function itself is the formula."""
    given = {"num_proposals": C, "rng": 3, **options}
    return Case(LARA, LARA, {}, given, options.get("weighting", "own") in ("own", "balance"))


CASES = {
    "softmax": Case(SOFTMAX, naive.softmax_attention, {}, {"scale": 0.3}),
    "softmax window": Case(SOFTMAX, naive.softmax_attention, {}, {"window": (5, 2)}),
    "softmax capped": Case(SOFTMAX, naive.softmax_attention, {}, {"softcap": 0.7, "scale": 2.0}),
    "softmax sinks": Case(
        SOFTMAX, naive.softmax_attention, {"sinks": ()}, {"window": (300, None), "softcap": 2.0}
    ),
    "positive": rfa("positive"),
    "hyperbolic": rfa("hyperbolic"),
    "trigonometric": rfa("trigonometric"),
    "one log weight": Case(
        RFA, naive.random_feature_attention, {"omega": (S, D), "log_weight": (1,)}
    ),
    "importance": Case(
        IS, naive.importance_sampled_attention, {"omega": (S, D), "log_weight": (S,)}
    ),
    "mean of ratios": Case(MEAN, naive.mean_of_ratios_attention, {"omega": (S, D)}),
    **{f"lara {x}": lara(x) for x in ("own", "balance", "query", "query-over-queries")},
    "lara centres": Case(
        LARA,
        naive.linear_randomized_attention,
        {"omega": (C, D)},
        {"centres": 0.5 * WAVES[:C]},
        False,
    ),
    "lara drawn own": drawn(weighting="own"),
    "lara drawn pairs": drawn(weighting="balance", antithetic=True),
    "lara drawn query": drawn(weighting="query"),
    "lara drawn over queries": drawn(weighting="query-over-queries", beta=0.5),
    "linear elu": linear(features.elu_features),
    "linear elu of slope": linear(partial(features.elu_features, alpha=0.2)),
    "linear relu": linear(features.relu_features, positive=True),
    "linear taylor": linear(partial(features.taylor_features, degree=4)),
    "linear polynomial": linear(partial(features.polynomial_features, degree=4)),
    "linear positive": linear(partial(features.positive_features, omega=WAVES)),
    "linear hyperbolic": linear(partial(features.hyperbolic_features, omega=WAVES)),
    "linear waves": linear(partial(features.trigonometric_features, omega=0.3 * WAVES)),
    "linear norms": linear(partial(features.positive_features, omega=WAVES, square_norm=1.0)),
}
MASKS = {"none": None, "keys": (13,), "each": (4, 11, 13)}


def problem(case, rng, n=11, m=13, *, heads=(4, 2), dtype=np.float64, size=0.5):
    """Queries, keys and values, with what else the case takes."""
    outer, groups = ((h,) if heads else () for h in heads or (0, 0))
    arrays = {
        "q": size * rng.standard_normal((*outer, n, D)),
        "k": size * rng.standard_normal((*groups, m, D)),
        "v": rng.standard_normal((*groups, m, 3)),
        **{name: np.asarray(rng.standard_normal(x)) for name, x in case.shapes.items()},
    }
    if case.positive:
        arrays |= {name: np.abs(arrays[name]) for name in "qk"}
    return {name: x.astype(dtype) for name, x in arrays.items()}


def pulled(fn, arrays, d_out, **options):
    """Cotangents by name, of all that were given."""
    found = vjp(fn, **arrays, **options)[1](d_out)._asdict()
    assert {name for name, x in found.items() if x is not None} == set(arrays)
    return {name: x for name, x in found.items() if x is not None}


def slope(formula, arrays, way, d_out, **options):
    """Derivative of the weighted output along a way, in extended precision."""
    step, total = LONG(2.0**-18), LONG(0)
    for i, weight in ((1, 8), (2, -1)):  # the error is of the fourth order
        for sign in (1, -1):
            moved = {
                name: x.astype(LONG) + sign * i * step * way[name] for name, x in arrays.items()
            }
            total += sign * weight * np.sum(formula(**moved, **options) * d_out)
    return float(total / (12 * step))


# --- against finite differences of the formulas ---------------------------------------------------


@pytest.mark.long("keys")
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_slopes_of_formulas(name, causal, mask):
    """Grouped heads, more keys than queries, frequencies that heads share."""
    case, rng = CASES[name], np.random.default_rng([len(name), causal, len(mask)])
    if causal and (not case.causal or (case.fn is LARA and mask == "each")):
        pytest.skip("LARA does not take it")
    arrays, options = problem(case, rng), dict(case.options)
    options |= {"causal": True} if causal else {}
    shape = MASKS[mask]
    if shape is not None:
        options["mask"] = rng.random(shape) < 0.7
    out, pullback = vjp(case.fn, **arrays, **options)
    np.testing.assert_array_equal(out, case.fn(**arrays, **options))
    d_out = rng.standard_normal(out.shape)
    found = pulled(case.fn, arrays, d_out, **options)
    assert pullback(d_out).q.tobytes() == found["q"].tobytes()  # it may be called again
    for moving in (*arrays, "all"):
        way = {x: rng.standard_normal(y.shape) * (moving in (x, "all")) for x, y in arrays.items()}
        want = slope(case.formula, arrays, way, d_out, **options)
        got = sum(float(np.sum(found[x] * way[x])) for x in arrays)
        size = sum(float(np.sum(np.abs(found[x] * way[x]))) for x in arrays)
        assert abs(got - want) <= 1e-9 * (1 + size), (moving, got, want)


@pytest.mark.parametrize(("n", "m"), [(1, 1), (3, 9), (9, 3), (65, 65), (200, 131), (131, 330)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "name", ["softmax", "positive", "trigonometric", "lara own", "lara balance", "linear elu"]
)
def test_slopes_of_many_tokens(name, causal, n, m):
    """Past leaves and steps of the causal forms, ragged ends, queries before the first key."""
    case, rng = CASES[name], np.random.default_rng([n, m, causal])
    options = {**case.options, "causal": causal}
    if "num_proposals" in options:
        options["num_proposals"] = min(n, m, C)
    arrays = problem(case, rng, n, m, heads=None)
    if "num_proposals" in options:
        arrays["omega"] = rng.standard_normal((2 * options["num_proposals"], D))
    d_out = rng.standard_normal((n, 3))
    found = pulled(case.fn, arrays, d_out, **options)
    way = {x: rng.standard_normal(y.shape) for x, y in arrays.items()}
    want = slope(case.formula, arrays, way, d_out, **options)
    got = sum(float(np.sum(found[x] * way[x])) for x in arrays)
    size = sum(float(np.sum(np.abs(found[x] * way[x]))) for x in arrays)
    assert abs(got - want) <= 1e-9 * (1 + size)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", ["none", "keys", "each"])
def test_slopes_of_randomized_attention(causal, mask):
    rng = np.random.default_rng(2)
    arrays = problem(CASES["softmax"], rng)
    arrays["omega"] = rng.standard_normal((4, 11, S, D))
    options = {"causal": causal}
    if MASKS[mask] is not None:
        options["mask"] = rng.random(MASKS[mask]) < 0.7
    d_out = rng.standard_normal((4, 11, 3))
    found = pulled(RA, arrays, d_out, **options)
    assert not found["q"].any()  # queries matter by their frequencies only
    way = {x: rng.standard_normal(y.shape) for x, y in arrays.items()}
    want = slope(naive.randomized_attention, arrays, way, d_out, **options)
    assert abs(sum(np.sum(found[x] * way[x]) for x in arrays) - want) <= 1e-9


def test_slopes_in_a_gauge():
    rng = np.random.default_rng(0)
    gauge = np.eye(D) + 0.2 * rng.standard_normal((4, D, D))
    proposal = sampling.Gaussian(np.zeros(D), gauge=gauge)
    arrays = problem(CASES["softmax"], rng, heads=(4, 4))
    arrays["q"] = arrays["q"][0]  # of which heads with gauges of their own make four
    options = {"num_features": S, "proposal": proposal, "rng": 0}
    d_out = rng.standard_normal((4, 11, 3))
    found = pulled(RFA, arrays, d_out, **options)
    way = {x: rng.standard_normal(y.shape) for x, y in arrays.items()}
    want = slope(RFA, arrays, way, d_out, **options)
    assert abs(sum(np.sum(found[x] * way[x]) for x in arrays) - want) <= 1e-9
    options = {"num_proposals": C, "proposal": proposal, "rng": 0}
    found = pulled(LARA, arrays, d_out, **options)
    want = slope(LARA, arrays, way, d_out, **options)
    assert abs(sum(np.sum(found[x] * way[x]) for x in arrays) - want) <= 1e-9


@pytest.mark.parametrize("feature", ["positive", "trigonometric"])
def test_slopes_without_norms(feature):
    rng = np.random.default_rng(0)
    arrays = problem(CASES["positive"], rng)
    options = {"features": feature, "square_norms": (1.0, 1.0)}
    d_out = rng.standard_normal((4, 11, 3))
    found = pulled(RFA, arrays, d_out, **options)
    way = {x: rng.standard_normal(y.shape) for x, y in arrays.items()}
    want = slope(RFA, arrays, way, d_out, **options)
    assert abs(sum(np.sum(found[x] * way[x]) for x in arrays) - want) <= 1e-9


# --- against 50-digit arithmetic ------------------------------------------------------------------


class Sizes(NamedTuple):
    """What cotangents are sums of, at most: of each argument the largest sum of absolute terms."""

    q: float
    k: float
    v: float
    omega: float = 0.0
    log_weight: float = 0.0
    bias: float = 0.0


def sizes(arrays, d_out, weights, scale):
    """Of pairs with these weights, whose logs move by vectors that are no longer than these."""
    wide = {name: np.asarray(x, LONG) for name, x in arrays.items()}
    most = 2 * float(np.max(np.sum(np.abs(d_out), -1)) * np.max(np.abs(wide["v"])))
    column = float(np.max(np.sum(np.abs(weights), -2)))
    length = {name: reference.norm(x) for name, x in wide.items() if x.ndim > 1}
    values = column * float(np.max(np.abs(d_out)))
    root, n = scale**0.5, d_out.shape[-2]
    if "omega" not in arrays:
        by_q, by_k = scale * length["k"], scale * length["q"]
        return Sizes(most * by_q, most * column * by_k, values, bias=most)
    by_k = root * length["omega"] + scale * length["k"]
    by_omega = n * root * (length["q"] + length["k"])
    return Sizes(
        most * root * length["omega"], most * column * by_k, values, most * by_omega, most * n
    )


def exponent(arrays, scale):
    norm = {name: reference.norm(x) for name, x in arrays.items() if x.ndim > 1}
    if "omega" not in arrays:
        return float(scale * norm["q"] * norm["k"])
    root = scale**0.5
    return float(root * norm["omega"] * max(norm["q"], norm["k"]) + scale * norm["k"] ** 2 / 2)


@pytest.mark.long("10.0")
@pytest.mark.parametrize("variant", ["full", "causal", "key mask", "mask"])
@pytest.mark.parametrize("size", [1.0, 10.0, 100.0])
@pytest.mark.parametrize("name", ["softmax", "positive", "hyperbolic"])
def test_accuracy(name, size, variant, dtype, record_accuracy):
    """Logits up to 1e4, where most weights are 0 and some 1."""
    case, rng = CASES[name], np.random.default_rng([int(size), len(name), len(variant)])
    n, m, scale = 4, 6, 0.5
    arrays = problem(case, rng, n, m, heads=None, dtype=dtype, size=size)
    options = {**case.options, "scale": scale}
    visible = np.ones((n, m), bool)
    if variant == "causal":
        options["causal"], visible = True, exact.causal(n, m)
    elif variant != "full":
        options["mask"] = visible = rng.random((n, m) if variant == "mask" else (1, m)) < 0.6
    d_out = rng.standard_normal((n, 3)).astype(dtype)
    formula = exact.softmax_attention if name == "softmax" else exact.random_feature_attention
    fixed = {k: x for k, x in options.items() if k in ("features", "scale")}
    want = exact.gradients(partial(formula, visible=visible, **fixed), d_out, **arrays)
    got = pulled(case.fn, arrays, d_out, **options)
    wide = {x: np.asarray(y, LONG) for x, y in arrays.items()} | {"v": np.eye(m, dtype=LONG)}
    most = sizes(arrays, d_out, case.formula(**wide, **options), scale)
    for which, x in got.items():
        units = reference.error(x, want[which], getattr(most, which), exponent(arrays, scale))
        record_accuracy(f"gradient {name}, {size:g}, {variant}, {which}", dtype, units)
        assert units <= CONTRACT


@pytest.mark.parametrize("name", ["ra", "lara", "linear", "trigonometric"])
def test_accuracy_of_others(name):
    """At ordinary sizes: errors are of the size of eps."""
    rng = np.random.default_rng(0)
    arrays = problem(CASES["softmax"], rng, 4, 6, heads=None)
    fn, formula, options, more = {
        "ra": (RA, exact.randomized_attention, {}, {"omega": (4, S, D)}),
        "lara": (LARA, exact.linear_randomized_attention, {}, {"omega": (C, D)}),
        "linear": (LINEAR, exact.linear_attention, {}, {}),
        "trigonometric": (
            RFA,
            partial(exact.random_feature_attention, features="trigonometric"),
            {"features": "trigonometric"},
            {"omega": (S, D)},
        ),
    }[name]
    arrays |= {x: 0.5 * rng.standard_normal(shape) for x, shape in more.items()}
    fixed = {"centres": WAVES[:C]} if name == "lara" else {}
    d_out = rng.standard_normal((4, 3))
    want = exact.gradients(partial(formula, **fixed), d_out, **arrays)
    got = pulled(fn, arrays, d_out, **options, **fixed)
    for which, x in got.items():
        size = float(max(map(abs, want[which].ravel()))) or 1.0
        assert reference.error(x, want[which], size, 0.0) <= CONTRACT


@pytest.mark.long("float32")
@pytest.mark.parametrize("n", [700, 2300])
@pytest.mark.parametrize("causal", [False, True])
def test_accuracy_of_many_tokens(causal, n, dtype):
    """Past blocks and groups of blocks, with nearly equal weights, against extended precision."""
    rng, m = np.random.default_rng(n), 9000 if n == 700 else 2300
    q, k = (0.01 * rng.standard_normal((x, 8)).astype(dtype) for x in (n, m))
    v, d_out = (1 + 0.1 * rng.standard_normal((x, 4)).astype(dtype) for x in (m, n))
    options = {"causal": causal, "scale": 1.0}
    got = pulled(SOFTMAX, {"q": q, "k": k, "v": v}, d_out, **options)
    wide = {"q": q.astype(LONG), "k": k.astype(LONG), "v": v.astype(LONG)}
    want = dense(**wide, d_out=d_out.astype(LONG), causal=causal)
    weights = softmax_weights(wide["q"], wide["k"], causal)
    most = sizes(wide, d_out, weights, 1.0)
    unit = CONTRACT * float(np.finfo(dtype).eps) * (1 + exponent(wide, 1.0))
    for name, x in got.items():
        assert np.max(np.abs(x - want[name])) <= unit * getattr(most, name), name


def softmax_weights(q, k, causal):
    scores = q @ k.T
    if causal:
        scores = np.where(np.tri(len(q), len(k), len(k) - len(q), dtype=bool), scores, -np.inf)
    weights = np.exp(scores - np.max(scores, -1, keepdims=True))
    return weights / np.sum(weights, -1, keepdims=True)


def dense(q, k, v, d_out, causal):
    """The pullback of exact attention as its formula is written."""
    p = softmax_weights(q, k, causal)
    t = d_out @ v.T
    s = p * (t - np.sum(p * t, -1, keepdims=True))
    return {"q": s @ k, "k": s.T @ q, "v": p.T @ d_out}


# --- laws -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_what_is_hidden_takes_nothing(name):
    """Masked and future keys, with nan in them, and queries that see no key."""
    case, rng = CASES[name], np.random.default_rng(0)
    arrays = problem(case, rng, heads=(2, 2))
    mask = np.arange(13) != 5
    d_out = rng.standard_normal((2, 11, 3))
    clean = pulled(case.fn, arrays, d_out, **case.options, mask=mask)
    arrays["k"][:, 5], arrays["v"][:, 5] = np.nan, np.nan
    found = pulled(case.fn, arrays, d_out, **case.options, mask=mask)
    for which, x in found.items():
        np.testing.assert_array_equal(x, clean[which])
    assert not found["k"][:, 5].any()
    assert not found["v"][:, 5].any()
    if not case.causal:
        return
    arrays = problem(case, rng, 13, 11, heads=(2, 2))
    d_out = rng.standard_normal((2, 13, 3))
    found = pulled(case.fn, arrays, d_out, **case.options, causal=True)
    assert not found["q"][:, :2].any() or case.fn is LARA  # it makes proposals of all queries
    assert all(np.isfinite(x).all() for x in found.values())
    last = d_out.copy()
    last[:, 6:] = 0.0  # queries 2 to 5 see keys 0 to 3
    found = pulled(case.fn, arrays, last, **case.options, causal=True)
    assert not found["v"][:, 4:].any()
    assert not found["k"][:, 4:].any()


@pytest.mark.parametrize("name", ["softmax", "positive", "linear elu", "trigonometric"])
def test_nan_of_the_future_goes_no_further(name):
    case, rng = CASES[name], np.random.default_rng(0)
    arrays = problem(case, rng, 150, 150, heads=None)
    d_out = rng.standard_normal((150, 3))
    clean = pulled(case.fn, arrays, d_out, **case.options, causal=True)["q"]
    for t in (149, 100, 70):
        arrays["k"][t:], arrays["v"][t:] = np.nan, np.inf
        found = pulled(case.fn, arrays, d_out, **case.options, causal=True)["q"]
        np.testing.assert_allclose(found[:t], clean[:t], rtol=1e-9, atol=1e-12)


def test_no_keys_and_no_queries():
    for case in CASES.values():
        for n, m in ((0, 3), (3, 0), (0, 0)):
            if case.fn is LARA and "centres" not in case.options:
                continue  # chunks of no tokens
            arrays = problem(case, np.random.default_rng(0), n, m)
            found = pulled(case.fn, arrays, np.ones((4, n, 3)), **case.options)
            for name, x in found.items():
                assert x.shape == arrays[name].shape
                assert not x.any()


def test_laws_of_exact_attention():
    rng = np.random.default_rng(0)
    arrays = problem(CASES["softmax"], rng, heads=(4, 4))
    arrays["bias"] = rng.standard_normal((4, 11, 13))
    d_out = rng.standard_normal((4, 11, 3))
    found = pulled(SOFTMAX, arrays, d_out, causal=True)
    # A shift of all keys, or of a row of scores, moves nothing.
    np.testing.assert_allclose(np.sum(found["bias"], -1), 0.0, atol=1e-14)
    # Scores are of degree 1 in queries and in keys.
    np.testing.assert_allclose(*(np.sum(found[x] * arrays[x], (-1, -2)) for x in "qk"), atol=1e-13)
    assert not found["bias"][:, ~np.tri(11, 13, 2, dtype=bool)].any()
    # The same cotangent for constant values takes nothing but values.
    arrays["v"] = np.ones((4, 13, 3))
    found = pulled(SOFTMAX, arrays, d_out, causal=True)
    for x in ("q", "k", "bias"):
        np.testing.assert_allclose(found[x], 0.0, atol=1e-14)
    np.testing.assert_allclose(np.sum(found["v"], -2), np.sum(d_out, -2))


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_linear_in_cotangents(name):
    case, rng = CASES[name], np.random.default_rng(0)
    arrays = problem(case, rng)
    a, b = rng.standard_normal((2, 4, 11, 3))
    whole, *parts = (pulled(case.fn, arrays, x, **case.options) for x in (a - 2 * b, a, b))
    for which, x in whole.items():
        want = parts[0][which] - 2 * parts[1][which]
        np.testing.assert_allclose(x, want, rtol=1e-9, atol=1e-11 * (1 + np.max(np.abs(want))))


@pytest.mark.parametrize("name", CASES)
def test_broadcast_axes_are_summed(name):
    """What heads share takes the sum of what copies for each of them take."""
    case, rng = CASES[name], np.random.default_rng(0)
    if "rng" in case.options:
        pytest.skip("copies would draw others")
    arrays = problem(case, rng, heads=None)
    copies = {x: np.broadcast_to(y, (2, 3, *y.shape)).copy() for x, y in arrays.items()}
    d_out = rng.standard_normal((2, 3, 11, 3))
    for own in ("q", "kv", "v"):  # what is not shared
        for name in own:
            copies[name] = rng.standard_normal(copies[name].shape)
            if case.positive:
                copies[name] = np.abs(copies[name])
        apart = pulled(case.fn, copies, d_out, **case.options)
        given = {x: copies[x] if x in own else arrays[x] for x in arrays}
        broadcast_agrees(pulled(case.fn, given, d_out, **case.options), apart, own)
        for name in own:
            copies[name] = np.broadcast_to(arrays[name], copies[name].shape).copy()


def broadcast_agrees(shared, apart, own):
    for x, y in shared.items():
        want = apart[x] if x in own else np.sum(apart[x], (0, 1))
        np.testing.assert_allclose(y, want, rtol=1e-8, atol=1e-10 * np.max(np.abs(want), initial=1))


def test_normalisers():
    """The cotangent of lse alone gives weights, and both add up."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(shape) for shape in ((5, 3), (7, 3), (7, 2)))
    (_, lse), pullback = vjp(ATTEND, q, k, v, causal=True)
    np.testing.assert_array_equal(lse, ATTEND(q, k, v, causal=True).lse)
    weights = np.exp(np.where(np.tri(5, 7, 2, dtype=bool), q @ k.T, -np.inf) - lse[:, None])
    d_lse, d_out = rng.standard_normal(5), rng.standard_normal((5, 2))
    of_lse, of_out = pullback((None, d_lse)), pullback((d_out, None))
    np.testing.assert_allclose(of_lse.q, (d_lse[:, None] * weights) @ k, atol=1e-14)
    assert not of_lse.v.any()
    of_both = pullback((d_out, d_lse))
    for a, b, c in zip(of_lse[:3], of_out[:3], of_both[:3], strict=True):
        np.testing.assert_allclose(a + b, c, atol=1e-14)


@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.sampled_from([1e-150, 1e-20, 1.0, 30.0, 1e3, 1e5]),
    causal=st.booleans(),
    name=st.sampled_from(["softmax", "positive", "hyperbolic", "linear elu"]),
)
def test_finite_wherever_they_are(seed, size, causal, name):
    case, rng = CASES[name], np.random.default_rng(seed)
    n, m = (int(x) for x in rng.integers(1, 40, 2))
    arrays = problem(case, rng, n, m, heads=None, size=min(size, 1e150))
    out = vjp(case.fn, **arrays, **case.options, causal=causal)[0]
    assume(np.isfinite(out).all())  # features of elu may all underflow
    found = pulled(case.fn, arrays, rng.standard_normal(out.shape), **case.options, causal=causal)
    for name, x in found.items():
        assert np.isfinite(x).all(), name


# --- libraries ------------------------------------------------------------------------------------


@pytest.mark.soak("queries", "linear taylor", "mean of ratios")
@pytest.mark.long("jax", "dask", "array_api_strict")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        "softmax",
        "positive",
        "trigonometric",
        "importance",
        "mean of ratios",
        "lara own",
        "lara balance",
        "lara query-over-queries",
        "linear elu",
        "linear taylor",
    ],
)
def test_backends(backend, name, causal):
    case, rng = CASES[name], np.random.default_rng(0)
    if causal and not case.causal:
        pytest.skip("LARA does not take it")
    arrays = problem(case, rng, 40, 45, heads=(2, 1))
    options = {**case.options, "causal": causal}
    d_out = rng.standard_normal((2, 40, 3))
    want = pulled(case.fn, arrays, d_out, **options)

    def pull(q, k, v, d_out, **given):
        found = vjp(case.fn, q, k, v, **given, **options)[1](d_out)
        return Parts(*(x for x in found if x is not None))

    got = backend.call(pull, **arrays, d_out=d_out)
    for which, x in want.items():
        np.testing.assert_allclose(getattr(got, which), x, rtol=1e-9, atol=1e-11)


class Parts(NamedTuple):
    """Cotangents of what there is."""

    q: Any
    k: Any
    v: Any
    omega: Any = None
    log_weight: Any = None


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_torch_differentiates(name, causal):
    """The functions themselves, by automatic differentiation."""
    torch = pytest.importorskip("torch")
    case, rng = CASES[name], np.random.default_rng(0)
    if causal and not case.causal:
        pytest.skip("LARA does not take it")
    arrays = problem(case, rng, 9, 10)
    options = {**case.options, "causal": causal}
    d_out = rng.standard_normal((4, 9, 3))
    want = pulled(case.fn, arrays, d_out, **options)
    given = {x: torch.tensor(y, requires_grad=True) for x, y in arrays.items()}
    if "centres" in options:
        options["centres"] = torch.tensor(options["centres"])
    (case.fn(**given, **options) * torch.tensor(d_out)).sum().backward()
    for x, y in given.items():
        own = np.zeros(y.shape) if y.grad is None else y.grad.numpy()
        np.testing.assert_allclose(own, want[x], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["softmax", "positive", "trigonometric", "linear elu"])
def test_torch_differentiates_twice(name, causal):
    torch = pytest.importorskip("torch")
    case, rng = CASES[name], np.random.default_rng(0)
    arrays = problem(case, rng, 3, 4, heads=None)
    names = list(arrays)
    given = [torch.tensor(x, requires_grad=True) for x in arrays.values()]

    def attention(*tensors):
        named = dict(zip(names, tensors, strict=True))
        return case.fn(**named, **case.options, causal=causal)

    assert torch.autograd.gradcheck(attention, given)
    assert torch.autograd.gradgradcheck(attention, given)


@pytest.mark.long("hyperbolic", "trigonometric", "lara balance", "linear elu")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "name", ["softmax", "positive", "hyperbolic", "trigonometric", "lara balance", "linear elu"]
)
def test_jax_differentiates(name, causal):
    """Under grad, vmap over heads and jit."""
    jax = pytest.importorskip("jax")
    jax.config.update("jax_enable_x64", True)
    case, rng = CASES[name], np.random.default_rng(0)
    arrays = problem(case, rng, 9, 10, heads=(4, 4))
    arrays |= {x: rng.standard_normal((4, *y.shape)) for x, y in arrays.items() if y.ndim < 3}
    d_out = rng.standard_normal((4, 9, 3))
    options = {**case.options, "causal": causal}
    want = pulled(case.fn, arrays, d_out, **options)

    def loss(given, d_out):
        return jax.numpy.sum(case.fn(**given, **options) * d_out)

    got = jax.jit(jax.vmap(jax.grad(loss)))(arrays, d_out)
    for x, y in got.items():
        np.testing.assert_allclose(y, want[x], rtol=1e-8, atol=1e-10)


# --- what is given --------------------------------------------------------------------------------


def test_maps_with_a_pullback_of_their_own():
    """Squares, as an array and as features with a scale."""

    def square(x):
        return x * x

    def scaled(x):
        return features.Features(x * x, np.log(1 + np.sum(x * x, -1)))

    square.vjp = lambda x: (square(x), lambda cotangent: 2 * x * cotangent)  # type: ignore[attr-defined]

    def scaled_vjp(x):
        def pull(d_values, d_log):
            own = 2 * x * d_values
            if d_log is None:
                return own
            return own + (d_log / (1 + np.sum(x * x, -1)))[..., None] * 2 * x

        return scaled(x), pull

    scaled.vjp = scaled_vjp  # type: ignore[attr-defined]
    for feature_map in (square, scaled):
        case = linear(feature_map)
        for causal in (False, True):
            rng = np.random.default_rng(0)
            arrays = problem(case, rng, heads=None)
            d_out = rng.standard_normal((11, 3))
            found = pulled(LINEAR, arrays, d_out, **case.options, causal=causal)
            way = {x: rng.standard_normal(y.shape) for x, y in arrays.items()}
            want = slope(LINEAR, arrays, way, d_out, **case.options, causal=causal)
            assert abs(sum(np.sum(found[x] * way[x]) for x in arrays) - want) <= 1e-9


def test_threads_and_repetition_leave_every_bit():
    from threadpoolctl import threadpool_limits

    rng = np.random.default_rng(0)
    arrays = problem(CASES["positive"], rng, 700, 700, heads=(4, 2))
    d_out = rng.standard_normal((4, 700, 3))
    for fn, names in ((SOFTMAX, "qkv"), (RFA, list(arrays)), (LINEAR, "qkv")):
        some = {x: arrays[x] for x in names}
        for causal in (False, True):
            found = []
            for count in (1, 2, 3):
                with threadpool_limits(count, user_api="blas"):
                    found.append(pulled(fn, some, d_out, causal=causal))
            for other in found[1:]:
                for x, y in other.items():
                    np.testing.assert_array_equal(y, found[0][x])


def test_outputs_and_memory_of_maps_may_be_written_to():
    """What the pullback needs it keeps for itself."""
    rng = np.random.default_rng(0)
    held = np.empty((300, D))

    def into_memory(x):
        room = held[: x.shape[-2]]
        return np.exp(x, out=room)

    into_memory.vjp = lambda x: (into_memory(x), lambda c: np.exp(x) * c)  # type: ignore[attr-defined]
    arrays = problem(CASES["positive"], rng, 300, 300, heads=None)
    d_out = rng.standard_normal((300, 3))
    for fn, names, options in (
        (SOFTMAX, "qkv", {}),
        (RFA, list(arrays), {}),
        (RFA, list(arrays), {"features": "trigonometric"}),
        (IS, list(arrays), {}),
        (LARA, "qkv", {"num_proposals": 4, "rng": 0}),
        (LINEAR, "qkv", {"feature_map": into_memory}),
    ):
        for causal in (False, True):
            some = {x: arrays[x] for x in names}
            out, pullback = vjp(fn, **some, **options, causal=causal)
            want = vjp(fn, **some, **options, causal=causal)[1](d_out)
            out += 1.0
            for x, y in zip(pullback(d_out), want, strict=True):
                assert (x is None and y is None) or np.array_equal(x, y)
    case = linear(into_memory)
    found = pulled(LINEAR, {x: arrays[x] for x in "qkv"}, d_out, **case.options, causal=True)
    exact_map = linear(partial(features.positive_features, omega=np.eye(D), square_norm=0.0))
    want = pulled(LINEAR, {x: arrays[x] for x in "qkv"}, d_out, **exact_map.options, causal=True)
    for x, y in found.items():
        np.testing.assert_allclose(y, want[x], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "name", ["softmax", "positive", "importance", "lara balance", "linear elu"]
)
def test_extended_precision(name, causal):
    case = CASES[name]
    arrays = problem(case, np.random.default_rng(0), dtype=LONG)
    d_out = np.random.default_rng(1).standard_normal((4, 11, 3))
    got = pulled(case.fn, arrays, d_out.astype(LONG), **case.options, causal=causal)
    low = {x: y.astype(float) for x, y in arrays.items()}
    want = pulled(case.fn, low, d_out, **case.options, causal=causal)
    for x, y in got.items():
        assert y.dtype == LONG
        np.testing.assert_allclose(y.astype(float), want[x], rtol=1e-9, atol=1e-12)


def test_nan_goes_where_it_is_seen():
    """A query that is nan takes its own cotangent, and those of the keys that it sees."""
    rng = np.random.default_rng(0)
    for name in ("softmax", "positive", "linear elu"):
        arrays = problem(CASES[name], rng, 6, 6, heads=None)
        arrays["q"][1] = np.nan
        found = pulled(CASES[name].fn, arrays, np.ones((6, 3)), **CASES[name].options, causal=True)
        for x, rows in (("q", [1]), ("k", [0, 1]), ("v", [0, 1])):
            assert np.flatnonzero(np.isnan(found[x]).any(-1)).tolist() == rows, (name, x)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_features_that_nearly_underflow(dtype):
    """Of elu below where its exponential is normal: finite, and right to what it holds."""
    low = {"float32": -95.0, "float64": -720.0}[dtype]
    arrays = problem(CASES["linear elu"], np.random.default_rng(0), 4, 5, heads=None, dtype=dtype)
    arrays["q"][1], arrays["k"][2] = low, low
    d_out = np.ones((4, 3), dtype)
    found = pulled(LINEAR, arrays, d_out)
    wide = {x: y.astype(LONG) for x, y in arrays.items()}
    want = pulled(LINEAR, wide, d_out.astype(LONG))
    for x, y in found.items():
        np.testing.assert_allclose(y, want[x].astype(float), rtol=1e-2, atol=1e-5)


def test_maps_that_mix_heads_see_what_is_masked():
    def mixed(x):
        return np.exp(x + 0.3 * np.roll(x, 1, axis=-3))

    def pull(x):
        def back(c):
            c = c * mixed(x)
            return c + 0.3 * np.roll(c, -1, axis=-3)

        return mixed(x), back

    mixed.vjp = pull  # type: ignore[attr-defined]
    rng = np.random.default_rng(0)
    case = linear(mixed)
    arrays = problem(case, rng, heads=(3, 3))
    mask = rng.random((3, 1, 13)) < 0.7
    d_out = rng.standard_normal((3, 11, 3))
    found = pulled(LINEAR, arrays, d_out, **case.options, mask=mask)
    way = {x: rng.standard_normal(y.shape) for x, y in arrays.items()}
    want = slope(LINEAR, arrays, way, d_out, **case.options, mask=mask)
    assert abs(sum(np.sum(found[x] * way[x]) for x in arrays) - want) <= 1e-9


def test_functions_with_options():
    rng = np.random.default_rng(0)
    arrays = problem(CASES["softmax"], rng)
    d_out = np.ones((4, 11, 3))
    want = vjp(SOFTMAX, **arrays, scale=0.2, causal=True)[1](d_out)
    got = vjp(partial(partial(SOFTMAX, scale=0.5, causal=True), scale=0.2), **arrays)[1](d_out)
    assert isinstance(got, Gradients)
    np.testing.assert_array_equal(got.q, want.q)


def test_bad_input():
    arrays = problem(CASES["softmax"], np.random.default_rng(0))
    d_out = np.ones((4, 11, 3))
    pullback = vjp(SOFTMAX, **arrays)[1]
    for wrong, error, words in (
        (d_out[0], ValueError, r"`d_out` must have the shape of the result, \(4, 11, 3\)"),
        (d_out.astype(np.float32), TypeError, "`d_out` must have the dtype of the result"),
        ([1.0], TypeError, "`d_out`"),
        (None, TypeError, "`d_out`"),
    ):
        with pytest.raises(error, match=words):
            pullback(wrong)
    with pytest.raises(TypeError, match="`cotangents` must be a pair"):
        vjp(ATTEND, **arrays)[1](d_out)
    with pytest.raises(TypeError, match="`d_lse` must have the dtype"):
        vjp(ATTEND, **arrays)[1]((None, np.ones((4, 11), np.float32)))
    for fn in (np.sum, None, [], naive.softmax_attention):
        with pytest.raises(
            TypeError, match="`fn` must be one of attend, eva_attention, importance"
        ):
            vjp(fn, **arrays)
    with pytest.raises(TypeError, match="`fn` must have options by keyword only"):
        vjp(partial(SOFTMAX, arrays["q"]), **arrays)
    with pytest.raises(ValueError, match="`omega` must be given"):
        vjp(RA, **arrays, num_samples=3)
    with pytest.raises(TypeError, match="`omega` must be an array"):
        vjp(IS, **arrays, omega=None)
    with pytest.raises(TypeError, match="`feature_map` must have a pullback"):
        vjp(LINEAR, **arrays, feature_map=np.cosh)

    def square(x):
        return x * x

    for wrong, error in ((lambda c: None, TypeError), (lambda c: c[..., :1], ValueError)):
        square.vjp = lambda x, back=wrong: (x * x, back)  # type: ignore[attr-defined]
        with pytest.raises(error, match=r"`feature_map\.vjp` must"):
            vjp(LINEAR, **arrays, feature_map=square)[1](d_out)
    with pytest.raises(TypeError, match="unexpected keyword"):
        vjp(SOFTMAX, **arrays, omega=1)
