"""Pullbacks against 50-digit arithmetic, and of many tokens against extended precision."""

from functools import partial

import numpy as np
import pytest

from refattn.conformance.truth import exact
from tests import reference
from tests.gradients.cases import (
    CASES,
    D_V,
    FEW,
    LARA,
    LINEAR,
    LONG,
    RA,
    RFA,
    SOFTMAX,
    WAVES,
    C,
    D,
    S,
    of_formula,
    problem,
    pulled,
)
from tests.reference import CONTRACT


def most_of(arrays, d_out, weights, *, scale, near, least=0.0):
    """What cotangents are sums of, at most: of each argument the largest sum of absolute terms.

    Of pairs with these weights, whose logs move by vectors that are no longer than these; `near` if
    some of them are exact, and `least` what the weights of a key add up to, at least.
    """
    wide = {name: np.asarray(x, LONG) for name, x in arrays.items()}
    norm = {name: reference.norm(x) for name, x in wide.items() if x.ndim > 1}
    most = 2 * float(np.max(np.sum(np.abs(d_out), -1)) * np.max(np.abs(wide["v"])))
    column, n = max(least, float(np.max(np.sum(np.abs(weights), -2)))), d_out.shape[-2]
    by_q, by_k = (scale * norm["k"], scale * norm["q"]) if near else (0.0, 0.0)
    if "omega" in arrays:
        far = scale**0.5 * norm["omega"]
        by_q, by_k = max(by_q, far), max(by_k, far + scale * norm["k"])
    return {
        "q": most * by_q,
        "k": most * column * by_k,
        "v": column * float(np.max(np.abs(d_out))),
        "omega": most * n * scale**0.5 * (norm["q"] + norm["k"]),
        "log_weight": most * n,
    }


def exponent(arrays, scale):
    norm = {name: reference.norm(x) for name, x in arrays.items() if x.ndim > 1}
    if "omega" not in arrays:
        return float(scale * norm["q"] * norm["k"])
    far = scale**0.5 * norm["omega"] * max(norm["q"], norm["k"])
    return float(far + scale * norm["k"] ** 2 / 2)


def digits_of(case, options):
    """The formula in 50 digits."""
    fixed = of_formula(options)
    if "indices" in fixed:
        fixed["indices"] = np.atleast_2d(fixed["indices"])
    return partial(getattr(exact, case.fn.__name__), **fixed)


SIZES = [
    *(
        (name, size)
        for name in ("softmax", "positive", "hyperbolic")
        for size in (1.0, 10.0, 100.0)
    ),
    *((name, size) for name in FEW for size in (1.0, 10.0)),
]


@pytest.mark.long("10.0", "local future")
@pytest.mark.parametrize("variant", ["full", "causal", "key mask", "mask"])
@pytest.mark.parametrize(("name", "size"), SIZES)
def test_accuracy(name, size, variant, dtype, record_accuracy):
    """Logits up to 1e4, where most weights are 0 and some 1."""
    case, n, m = CASES[name], 4, 6
    causal = variant == "causal"
    if not case.takes(causal, "each" if variant == "mask" else "none"):
        pytest.skip("it does not take it")
    rng = np.random.default_rng([int(size), len(name), len(variant)])
    arrays, options = problem(case, rng, n, m, heads=None, dtype=dtype, size=size)
    options.pop("scale", None)  # 1 / 2
    given, fixed = dict(options), dict(options, visible=True)
    if causal:
        given["causal"] = True
        fixed |= {"visible": exact.causal(n, m)} if case.each else {"causal": True}
    elif variant != "full":
        given["mask"] = rng.random((n, m) if variant == "mask" else (m,)) < 0.6
        fixed["visible"] = given["mask"]
    d_out = rng.standard_normal((n, D_V)).astype(dtype)
    want = exact.gradients(digits_of(case, fixed), d_out, **arrays)
    got = pulled(case.fn, arrays, d_out, **given)
    wide = {x: np.asarray(y, LONG) for x, y in arrays.items()} | {"v": np.eye(m, dtype=LONG)}
    weights = case.formula(**wide, **of_formula(given))
    few = name in FEW
    near, least = few or name == "softmax", float(few)
    most = most_of(arrays, d_out, weights, scale=0.5, near=near, least=least)
    for which, x in got.items():
        units = reference.error(x, want[which], most[which], exponent(arrays, 0.5))
        record_accuracy(f"gradient {name}, {size:g}, {variant}, {which}", dtype, units)
        assert units <= CONTRACT, which


@pytest.mark.parametrize(
    ("fn", "shape", "options"),
    [
        (RA, (4, S, D), {}),
        (LARA, (C, D), {"centres": WAVES[:C]}),
        (LINEAR, None, {}),
        (RFA, (S, D), {"features": "trigonometric"}),
    ],
)
def test_accuracy_of_others(fn, shape, options):
    """At ordinary sizes: errors are of the size of eps."""
    rng = np.random.default_rng(0)
    arrays, _ = problem(CASES["softmax"], rng, 4, 6, heads=None)
    if shape is not None:
        arrays["omega"] = 0.5 * rng.standard_normal(shape)
    d_out = rng.standard_normal((4, D_V))
    want = exact.gradients(partial(getattr(exact, fn.__name__), **options), d_out, **arrays)
    for which, x in pulled(fn, arrays, d_out, **options).items():
        size = float(max(map(abs, want[which].ravel()))) or 1.0
        assert reference.error(x, want[which], size, 0.0) <= CONTRACT


@pytest.mark.long("9000", "2300")
@pytest.mark.parametrize(("n", "m"), [(520, 1100), (700, 9000), (2300, 2300)])
@pytest.mark.parametrize("causal", [False, True])
def test_accuracy_of_many_tokens(causal, n, m, dtype):
    """Past blocks and groups of blocks, with nearly equal weights, against extended precision."""
    rng = np.random.default_rng(n)
    q, k = (0.01 * rng.standard_normal((x, 8)).astype(dtype) for x in (n, m))
    v, d_out = (1 + 0.1 * rng.standard_normal((x, 4)).astype(dtype) for x in (m, n))
    got = pulled(SOFTMAX, {"q": q, "k": k, "v": v}, d_out, causal=causal, scale=1.0)
    wide = {"q": q.astype(LONG), "k": k.astype(LONG), "v": v.astype(LONG)}
    weights, want = by_formula(**wide, d_out=d_out.astype(LONG), causal=causal)
    most = most_of(wide, d_out, weights, scale=1.0, near=True)
    unit = CONTRACT * float(np.finfo(dtype).eps) * (1 + exponent(wide, 1.0))
    for name, x in got.items():
        assert np.max(np.abs(x - want[name])) <= unit * most[name], name


def by_formula(q, k, v, d_out, causal):
    """Weights and the pullback of exact attention as its formula is written."""
    scores = q @ k.T
    if causal:
        scores = np.where(np.tri(len(q), len(k), len(k) - len(q), dtype=bool), scores, -np.inf)
    p = np.exp(scores - np.max(scores, -1, keepdims=True))
    p /= np.sum(p, -1, keepdims=True)
    t = d_out @ v.T
    s = p * (t - np.sum(p * t, -1, keepdims=True))
    return p, {"q": s @ k, "k": s.T @ q, "v": p.T @ d_out}
