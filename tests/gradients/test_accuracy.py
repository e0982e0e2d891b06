"""Pullbacks against 50-digit arithmetic, and of many tokens against extended precision."""

from functools import partial

import numpy as np
import pytest

import refattn
from refattn.judge.conformance.truth import digits
from tests import reference
from tests.cases import CASES, LARA, LINEAR, RA, RFA, differentiable, pulled
from tests.gradients.test_rules import FEW
from tests.reference import CONTRACT

LONG = np.longdouble


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


SIZES = [
    *(
        (name, size)
        for name in ("softmax", "rfa positive", "rfa hyperbolic")
        for size in (1.0, 10.0, 100.0)
    ),
    *((name, size) for name in FEW for size in (1.0, 10.0)),
]


@pytest.mark.sweep(4)
@pytest.mark.long("10.0")
@pytest.mark.parametrize("variant", ["full", "causal", "key mask", "mask"])
@pytest.mark.parametrize(("name", "size"), SIZES)
def test_accuracy(name, size, variant, dtype, record_accuracy):
    """Logits up to 1e4, where most weights are 0 and some 1."""
    n, m, causal, lacks = 4, 6, variant == "causal", CASES[name].lacks
    if (causal and "causal" in lacks) or (variant == "mask" and "rows" in lacks):
        pytest.skip("it does not take it")
    mask = {"key mask": "keys", "mask": "rows"}.get(variant, "none")
    seed = [int(size), len(name), len(variant)]
    where = (name, "none", n, m, mask, causal, seed, dtype, 4)
    case, arrays, options, rng = differentiable(*where, size=size)
    fixed = {x: y for x, y in options.items() if x != "sampled"}
    d_out = rng.standard_normal((n, arrays["v"].shape[-1])).astype(dtype)
    formula = partial(getattr(digits.formulas(), case.fn.__name__), **fixed)
    want = digits.pull_back(formula, d_out, **arrays)[1]
    got = pulled(case.fn, arrays, d_out, **options)
    wide = {x: np.asarray(y, LONG) for x, y in arrays.items()} | {"v": np.eye(m, dtype=LONG)}
    weights = case.formula(**wide, **options)
    few = name in FEW
    near, least = few or name == "softmax", float(few)
    most = most_of(arrays, d_out, weights, scale=0.5, near=near, least=least)
    for which, x in got.items():
        units = reference.error(x, want[which], most[which], exponent(arrays, 0.5))
        record_accuracy(f"gradient {name}, {size:g}, {variant}, {which}", dtype, units)
        assert units <= CONTRACT, which


@pytest.mark.parametrize(
    ("name", "shape", "options"),
    [
        (RA, (4, 6, 3), {}),
        (LARA, (3, 3), {"centres": np.random.default_rng(9).standard_normal((3, 3))}),
        (LINEAR, None, {}),
        (RFA, (6, 3), {"features": "trigonometric"}),
    ],
)
def test_accuracy_of_others(name, shape, options):
    """At ordinary sizes: errors are of the size of eps."""
    _, arrays, _, rng = differentiable("softmax", n=4, m=6)
    if shape is not None:
        arrays["omega"] = 0.5 * rng.standard_normal(shape)
    d_out = rng.standard_normal((4, arrays["v"].shape[-1]))
    formula = partial(getattr(digits.formulas(), name), **options)
    want = digits.pull_back(formula, d_out, **arrays)[1]
    for which, x in pulled(getattr(refattn, name), arrays, d_out, **options).items():
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
    got = pulled(
        refattn.softmax_attention, {"q": q, "k": k, "v": v}, d_out, causal=causal, scale=1.0
    )
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
