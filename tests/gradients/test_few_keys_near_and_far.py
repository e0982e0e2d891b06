"""Pullbacks of few keys, and of near and far, by the formulas: 50 digits, slopes, libraries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest

import refattn
from refattn import naive
from refattn.conformance import Adapter, check, checks_of
from refattn.conformance.truth import exact
from refattn.gradients import vjp
from tests import reference
from tests.conftest import Host
from tests.gradients.test_rules import pulled, slope
from tests.reference import CONTRACT

LONG = np.longdouble
N, M, D, D_V, S = 11, 13, 4, 3, 6


class Case(NamedTuple):
    """An estimator, its formula, and what both take for n queries and m keys."""

    fn: Callable[..., Any]
    formula: Callable[..., Any]
    given: Callable[..., dict[str, Any]] = lambda rng, n, m, lead: {}
    options: Mapping[str, Any] = MappingProxyType({})
    omega: Callable[[int], int] | None = None  # how many frequencies for m keys
    causal: bool = True
    each: bool = True  # whether queries may see different keys


def sample(each, weighted=True):
    def given(rng, n, m, lead):
        shape = (*(1,) * lead, n, S) if each else (S,)
        found = {"indices": rng.integers(0, m, shape)}
        return found | ({"log_probability": rng.standard_normal(shape)} if weighted else {})

    return Case(refattn.sampled_key_attention, naive.sampled_key_attention, given, {}, causal=False)


def local(*sides):
    return Case(
        refattn.local_random_feature_attention,
        naive.local_random_feature_attention,
        options={"window": sides},
        omega=lambda m: S,
    )


W = 4


def eva(given=False, **options):
    return Case(
        refattn.eva_attention,
        naive.eva_attention,
        options={"window": W, **options},
        omega=(lambda m: -(-m // W)) if given else None,
        each=False,
    )


CASES = {
    "local": local(2, 1),
    "local past": local(3, None),
    "local future": local(None, 0),
    "local all": local(None, None),
    "eva": eva(sampled=False),
    "eva published": eva(sampled=False, log_size=False),
    "eva given": eva(given=True),
    "second": Case(
        refattn.second_order_attention,
        naive.second_order_attention,
        options={"window": W},
        each=False,
    ),
    "sample": sample(False),
    "sample for each": sample(True),
    "sample of equals": sample(True, weighted=False),
}
MORE = [x for x in CASES if x not in ("local", "eva", "second", "sample", "sample for each")]
MASKS = {"none": None, "keys": (M,), "each": (4, N, M)}


def problem(case, rng, n=N, m=M, heads=(4, 2), size=0.5):
    """What is differentiated, and options."""
    outer, groups = ((h,) if heads else () for h in heads or (0, 0))
    arrays = {
        "q": size * rng.standard_normal((*outer, n, D)),
        "k": size * rng.standard_normal((*groups, m, D)) + 0.2,
        "v": rng.standard_normal((*groups, m, D_V)),
    }
    if case.omega is not None:
        arrays["omega"] = rng.standard_normal((case.omega(m), D))
    return arrays, {**case.options, **case.given(rng, n, m, len(outer))}


def of_formula(options):
    """Options that formulas have."""
    return {name: x for name, x in options.items() if name != "sampled"}


def agrees(case, arrays, options, rng):
    """The pullback and the slope of the formula along a random way of all arrays, and of each."""
    out, pullback = vjp(case.fn, **arrays, **options)
    np.testing.assert_array_equal(out, case.fn(**arrays, **options))
    d_out = rng.standard_normal(out.shape)
    found = pulled(case.fn, arrays, d_out, **options)
    assert pullback(d_out).k.tobytes() == found["k"].tobytes()  # it may be called again
    for moving in (*arrays, "all"):
        way = {x: rng.standard_normal(y.shape) * (moving in (x, "all")) for x, y in arrays.items()}
        want = slope(case.formula, arrays, way, d_out, **of_formula(options))
        got = sum(float(np.sum(found[x] * way[x])) for x in arrays)
        size = sum(float(np.sum(np.abs(found[x] * way[x]))) for x in arrays)
        assert abs(got - want) <= 1e-9 * (1 + size), (moving, got, want)


def skip_what_is_not_taken(case, causal, mask):
    if (causal and not case.causal) or (mask == "each" and not case.each):
        pytest.skip("it does not take it")


# --- against formulas -----------------------------------------------------------------------------


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_slopes_of_formulas(name, causal, mask):
    """Grouped heads, and more keys than queries or fewer."""
    case, rng = CASES[name], np.random.default_rng([len(name), causal, len(mask)])
    skip_what_is_not_taken(case, causal, mask)
    for n, m in ((N, M), (M, N)):
        arrays, options = problem(case, rng, n, m)
        options |= {"causal": True} if causal else {}
        if (shape := MASKS[mask]) is not None:
            shape = (m,) if mask == "keys" else (4, n, m)
            options["mask"] = rng.random(shape) < 0.7
        agrees(case, arrays, options, rng)


@pytest.mark.long(*MORE)
@pytest.mark.parametrize("name", CASES)
def test_slopes_of_many_tokens(name):
    """Past blocks, and queries before the first key."""
    case = CASES[name]
    for n, m in ((1, 1), (9, 3), (70, 330), (331, 70)):
        for causal in (False, True)[: 1 + case.causal]:
            rng = np.random.default_rng([n, m])
            arrays, options = problem(case, rng, n, m, heads=None)
            agrees(case, arrays, options | ({"causal": True} if causal else {}), rng)


# --- against 50 digits ----------------------------------------------------------------------------


def digits(case, options, visible):
    """The formula in 50 digits."""
    fixed = dict(options)
    if "indices" in fixed:
        fixed["indices"] = np.atleast_2d(fixed["indices"])
    formula = getattr(exact, case.fn.__name__)
    return partial(formula, visible=visible, **of_formula(fixed))


def units(got, want, arrays, most):
    """Errors over what they are sums of, in units of eps (1 + largest exponent)."""
    exponent = largest_exponent(arrays)
    return {x: reference.error(y, want[x], most[x], exponent) for x, y in got.items()}


def largest_exponent(arrays):
    """With the default scale 1 / 2 of vectors of 4 entries."""
    norm = {name: reference.norm(x) for name, x in arrays.items()}
    if "omega" not in arrays:
        return float(norm["q"] * norm["k"]) / 2
    root = 0.5**0.5
    return float(root * norm["omega"] * max(norm["q"], norm["k"]) + norm["k"] ** 2 / 4)


def sizes(case, arrays, options, d_out):
    """Largest sums of absolute terms, by the weights of pairs and how fast their logs may move."""
    wide = {name: np.asarray(x, LONG) for name, x in arrays.items()}
    norm = {name: reference.norm(x) for name, x in wide.items()}
    m, n = len(wide["k"]), len(wide["q"])
    weights = case.formula(**wide | {"v": np.eye(m, dtype=LONG)}, **of_formula(options))
    column = max(1.0, float(np.max(np.sum(weights, -2))))
    most = 2 * float(np.max(np.sum(np.abs(d_out), -1)) * np.max(np.abs(wide["v"])))
    way = norm["k"] / 2, norm["q"] / 2
    if "omega" in arrays:
        far = 0.5**0.5 * norm["omega"]
        way = max(way[0], far), max(way[1], far + norm["k"] / 2)
    return {
        "q": most * way[0],
        "k": most * column * way[1],
        "v": column * float(np.max(np.abs(d_out))),
        "omega": most * n * 0.5**0.5 * (norm["q"] + norm["k"]),
    }


@pytest.mark.soak("10.0")
@pytest.mark.parametrize("variant", ["full", "causal", "key mask", "mask"])
@pytest.mark.parametrize("size", [1.0, 10.0])
@pytest.mark.parametrize("name", CASES)
def test_accuracy(name, size, variant, dtype, record_accuracy):
    case, rng = CASES[name], np.random.default_rng([int(size), len(name), len(variant)])
    skip_what_is_not_taken(case, variant == "causal", "each" if variant == "mask" else "none")
    n, m = 4, 6
    arrays, options = problem(case, rng, n, m, heads=None, size=size)
    arrays = {x: y.astype(dtype) for x, y in arrays.items()}
    visible = True
    fixed = dict(options)
    if variant == "causal":
        options["causal"] = True
        if case.each:
            visible = exact.causal(n, m)
        else:
            fixed["causal"] = True
    elif variant != "full":
        shape = (n, m) if variant == "mask" else (m,)
        options["mask"] = visible = rng.random(shape) < 0.7
    d_out = rng.standard_normal((n, D_V)).astype(dtype)
    want = exact.gradients(digits(case, fixed, visible), d_out, **arrays)
    got = pulled(case.fn, arrays, d_out, **options)
    found = units(got, want, arrays, sizes(case, arrays, options, d_out))
    for which, error in found.items():
        record_accuracy(f"gradient {name}, {size:g}, {variant}, {which}", dtype, error)
        assert error <= CONTRACT, which


# --- laws -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_what_is_hidden_takes_nothing(name):
    """Masked keys, with nan in them."""
    case, rng = CASES[name], np.random.default_rng(0)
    arrays, options = problem(case, rng, heads=(2, 2))
    options["mask"] = np.arange(M) != 5
    d_out = rng.standard_normal((2, N, D_V))
    clean = pulled(case.fn, arrays, d_out, **options)
    arrays["k"][:, 5], arrays["v"][:, 5] = np.nan, np.nan
    found = pulled(case.fn, arrays, d_out, **options)
    for which, x in found.items():
        np.testing.assert_array_equal(x, clean[which])
    assert not found["k"][:, 5].any()
    assert not found["v"][:, 5].any()


@pytest.mark.parametrize("name", CASES)
def test_no_queries_and_none_seen(name):
    case, rng = CASES[name], np.random.default_rng(0)
    arrays, options = problem(case, rng, 0, 3)
    for x, y in pulled(case.fn, arrays, np.ones((4, 0, D_V)), **options).items():
        assert y.shape == arrays[x].shape
        assert not y.any()
    arrays, options = problem(case, rng)
    nothing = pulled(case.fn, arrays, np.ones((4, N, D_V)), **options, mask=np.zeros(M, bool))
    assert not any(x.any() for x in nothing.values())


@pytest.mark.parametrize("name", CASES)
def test_broadcast_axes_are_summed(name):
    """What heads share takes the sum of what copies for each of them take."""
    case, rng = CASES[name], np.random.default_rng(0)
    arrays, options = problem(case, rng, heads=None)
    options |= {x: y[None, None] for x, y in options.items() if np.ndim(y) == 2}  # of each query
    copies = {x: np.broadcast_to(y, (2, 3, *y.shape)).copy() for x, y in arrays.items()}
    d_out = rng.standard_normal((2, 3, N, D_V))
    for own in ("q", "k", "v", "omega"):
        if own not in arrays:
            continue
        some = {**copies, own: rng.standard_normal(copies[own].shape)}
        kept = {own, "v"} if own == "omega" else {own}  # frequencies have no heads of their own
        apart = pulled(case.fn, some, d_out, **options)
        given = arrays | {x: some[x] for x in kept}
        for x, y in pulled(case.fn, given, d_out, **options).items():
            want = apart[x] if x in kept else np.sum(apart[x], (0, 1))
            np.testing.assert_allclose(y, want, rtol=1e-8, atol=1e-11)


def test_places_of_one_key_are_added():
    """A sample with a key many times weighs it as often, and its cotangents are the sums."""
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal(shape) for shape in ((5, D), (3, D), (3, D_V)))
    d_out, indices = rng.standard_normal((5, D_V)), rng.integers(0, 3, (5, 400))
    found = vjp(refattn.sampled_key_attention, q, k, v, indices=indices)[1](d_out)
    count = np.stack([np.bincount(row, minlength=3) for row in indices])
    want = vjp(refattn.softmax_attention, q, k, v, bias=np.log(count))[1](d_out)
    for x, y in zip(found[:3], want[:3], strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-13)


# --- libraries ------------------------------------------------------------------------------------


class Parts(NamedTuple):
    """Cotangents of what there is."""

    q: Any
    k: Any
    v: Any
    omega: Any = None


@pytest.mark.soak("dask")
@pytest.mark.long("jax")
@pytest.mark.parametrize(
    "name", ["sample", "sample for each", "local", "eva", "eva given", "second"]
)
def test_backends(backend, name):
    case, rng = CASES[name], np.random.default_rng(0)
    arrays, options = problem(case, rng, 20, 25, heads=(2, 1))
    mask, d_out = rng.random(25) < 0.7, rng.standard_normal((2, 20, D_V))
    for causal in (False, True)[: 1 + case.causal]:
        more = {"causal": True} if causal else {}
        want = pulled(case.fn, arrays, d_out, mask=mask, **options, **more)

        def pull(q, k, v, d_out, **given):
            found = vjp(case.fn, q, k, v, **given)[1](d_out)
            return Parts(*(x for x in found if x is not None))

        held = {x: Host(y) if x == "indices" else y for x, y in options.items()}
        got = backend.call(pull, **arrays, d_out=d_out, mask=mask, **held, **more)
        for which, x in want.items():
            np.testing.assert_allclose(getattr(got, which), x, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", CASES)
def test_torch_differentiates_the_formula(name):
    torch = pytest.importorskip("torch")
    case, rng = CASES[name], np.random.default_rng(0)
    arrays, options = problem(case, rng)
    d_out = rng.standard_normal((4, N, D_V))
    for causal in (False, True)[: 1 + case.causal]:
        options |= {"causal": True} if causal else {}
        want = pulled(case.fn, arrays, d_out, **options)
        for function in (case.formula, case.fn):  # which torch differentiates too
            given = {x: torch.tensor(y, requires_grad=True) for x, y in arrays.items()}
            named = {
                x: torch.tensor(y) if isinstance(y, np.ndarray) else y
                for x, y in (of_formula(options) if function is case.formula else options).items()
            }
            (function(**given, **named) * torch.tensor(d_out)).sum().backward()
            for x, y in given.items():
                own = np.zeros(y.shape) if y.grad is None else y.grad.numpy()
                np.testing.assert_allclose(own, want[x], rtol=1e-8, atol=1e-10)


@pytest.mark.long(*MORE)
@pytest.mark.parametrize("name", CASES)
def test_jax_differentiates_the_formula(name):
    jax = pytest.importorskip("jax")
    jax.config.update("jax_enable_x64", True)
    case, rng = CASES[name], np.random.default_rng(0)
    arrays, options = problem(case, rng, heads=None)
    d_out = rng.standard_normal((N, D_V))
    want = pulled(case.fn, arrays, d_out, **options)

    def loss(given):
        return jax.numpy.sum(case.formula(**given, **of_formula(options)) * d_out)

    got = jax.jit(jax.grad(loss))({x: jax.numpy.asarray(y) for x, y in arrays.items()})
    for x, y in got.items():
        np.testing.assert_allclose(y, want[x], rtol=1e-8, atol=1e-10)


# --- conformance ----------------------------------------------------------------------------------


def with_pullback(fn, **fixed):
    """The package's own function, with `d_out`."""

    def attention(q, k, v, *, d_out=None, **options):
        if "seed" in options:
            options["rng"] = options.pop("seed")
        if d_out is None:
            return fn(q, k, v, **fixed, **options)
        out, pullback = vjp(fn, q, k, v, **fixed, **options)
        return (out, *pullback(d_out)[:3])

    return attention


def verdict(fn, estimator, *capabilities):
    adapter = Adapter(fn, estimator, ("vjp", *capabilities))
    names = [x.name for x in checks_of(adapter) if x.name.startswith("gradients")]
    return check(adapter, checks=names, rng=0)


def drawing(law):
    """A sample of keys, drawn first: a constant of the pullback."""

    def attention(q, k, v, *, num_keys, seed, d_out=None, **options):
        drawn = refattn.estimators.key_sampling.draw_keys(
            q, k, v, num_keys=num_keys, law=law, rng=seed, **options
        )
        fn = partial(refattn.sampled_key_attention, **drawn._asdict(), **options)
        return with_pullback(fn)(q, k, v, d_out=d_out)

    return attention


OWN = {
    "rfa-local": (
        refattn.local_random_feature_attention,
        {"window": (8, 8)},
        ("mask", "causal", "gqa", "omega", "omega_per_head"),
    ),
    "eva": (refattn.eva_attention, {"sampled": False}, ("causal", "gqa")),
    "eva-published": (
        refattn.eva_attention,
        {"sampled": False, "log_size": False},
        ("causal", "gqa"),
    ),
    "eva-sampled": (refattn.eva_attention, {}, ("causal", "gqa")),
    "second-order": (refattn.second_order_attention, {}, ("causal", "gqa")),
}


@pytest.mark.long("published")
@pytest.mark.parametrize("name", OWN)
def test_conformance_of_near_and_far(name):
    fn, fixed, capabilities = OWN[name]
    report = verdict(with_pullback(fn, **fixed), name, *capabilities)
    assert report.verdict == "PASS", report


@pytest.mark.parametrize("law", ["uniform", "softmax"])
def test_conformance_of_samples(law):
    report = verdict(drawing(law), f"sampled-{law}", "gqa")
    assert report.verdict == "PASS", report


# --- what is given --------------------------------------------------------------------------------


def test_coresets_have_none():
    x = np.ones((3, 2))
    for fn in (refattn.coreset_attention, partial(refattn.coreset_attention, num_keys=2)):
        with pytest.raises(TypeError, match="got `coreset_attention`, which has no pullback"):
            vjp(fn, x, x, x)


def test_local_features_are_positive():
    """What the function does not take its pullback does not take either."""
    x, fn = np.ones((3, 2)), refattn.local_random_feature_attention
    for more in ({"features": "trigonometric"}, {"log_weight": np.ones(3)}):
        with pytest.raises(TypeError, match="unexpected keyword"):
            vjp(fn, x, x, x, window=(1, 1), omega=x, **more)


def test_drawn_frequencies_of_summaries_move_with_the_means():
    """Those of local random features do not."""
    rng = np.random.default_rng(2)
    arrays, _ = problem(CASES["eva"], rng)
    for fn, options in (
        (refattn.eva_attention, {"window": W, "rng": 1}),
        (refattn.eva_attention, {"window": W, "rng": 1, "causal": True, "scale": 0.3}),
        (refattn.local_random_feature_attention, {"window": (2, 1), "num_features": 5, "rng": 1}),
    ):
        agrees(Case(fn, fn), arrays, options, rng)


def test_gauges_of_local_features():
    rng = np.random.default_rng(3)
    arrays, _ = problem(CASES["local all"], rng, heads=(4, 4))
    del arrays["omega"]
    gauge = np.eye(D) + 0.2 * rng.standard_normal((4, D, D))
    proposal = refattn.sampling.Gaussian(np.zeros(D), gauge=gauge)
    options = {"window": (2, 1), "num_features": 5, "proposal": proposal, "rng": 1}
    fn = refattn.local_random_feature_attention
    agrees(Case(fn, fn), arrays, options, rng)
