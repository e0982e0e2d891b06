"""Attention functions with pullbacks, their formulas, and problems for both."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import refattn
from refattn import features, naive
from refattn.gradients import vjp
from tests.problems import slope

SOFTMAX, RFA = refattn.softmax_attention, refattn.random_feature_attention
IS, RA = refattn.importance_sampled_attention, refattn.randomized_attention
MEAN, LARA = refattn.mean_of_ratios_attention, refattn.linear_randomized_attention
LINEAR, ATTEND = refattn.linear_attention, refattn.attend
LOCAL, EVA = refattn.local_random_feature_attention, refattn.eva_attention
SECOND, SAMPLED = refattn.second_order_attention, refattn.sampled_key_attention
LONG = np.longdouble

N, M, D, D_V, S, C, W = 11, 13, 4, 3, 6, 3, 4
WAVES = np.random.default_rng(9).standard_normal((5, D))


class Case(NamedTuple):
    """A function, its formula, and what it takes beside q, k and v.

    `shapes` are those of more arrays that are differentiated, of m keys if it is a function, and
    `draw` gives options that depend on the problem.
    """

    fn: Callable[..., Any]
    formula: Callable[..., Any]
    shapes: Any
    options: dict
    draw: Callable[..., dict]
    causal: bool
    each: bool  # whether queries may see different keys
    positive: bool  # whether queries and keys have to be

    def takes(self, causal, mask):
        """LARA has one mask or the other."""
        each = mask == "each"
        both = each and causal and self.fn is LARA
        return (self.causal or not causal) and (self.each or not each) and not both


def case(fn, shapes=None, *, formula=None, causal=True, each=True, positive=False, **options):
    draw = options.pop("draw", lambda rng, n, m, lead: {})
    formula = formula or getattr(naive, fn.__name__)
    return Case(fn, formula, shapes or {}, options, draw, causal, each, positive)


def lara(weighting, shapes=None, **options):
    """The function itself is the formula of frequencies that move with the proposals."""
    own = {"formula": LARA} if "rng" in options else {}
    causal = "query" not in weighting
    return case(LARA, shapes, causal=causal, num_proposals=C, weighting=weighting, **own, **options)


def linear(feature_map, **options):
    return case(LINEAR, formula=LINEAR, feature_map=feature_map, **options)


def sample(*, each, weighted=True):
    def draw(rng, n, m, lead):
        shape = (*(1,) * lead, n, S) if each else (S,)
        found = {"indices": rng.integers(0, m, shape)}
        return found | ({"log_probability": rng.standard_normal(shape)} if weighted else {})

    return case(SAMPLED, draw=draw, causal=False)


OMEGA, TWICE = {"omega": (S, D)}, {"omega": (2 * C, D)}
WEIGHTED = {**OMEGA, "log_weight": (S,)}
CASES = {
    "softmax": case(SOFTMAX, scale=0.3),
    "softmax window": case(SOFTMAX, window=(5, 2)),
    "softmax capped": case(SOFTMAX, softcap=0.7, scale=2.0),
    "softmax sinks": case(SOFTMAX, {"sinks": ()}, window=(300, None), softcap=2.0),
    "positive": case(RFA, WEIGHTED, features="positive"),
    "hyperbolic": case(RFA, WEIGHTED, features="hyperbolic"),
    "trigonometric": case(RFA, WEIGHTED, features="trigonometric"),
    "one log weight": case(RFA, {**OMEGA, "log_weight": (1,)}),
    "importance": case(IS, WEIGHTED),
    "mean of ratios": case(MEAN, OMEGA),
    **{f"lara {x}": lara(x, TWICE) for x in ("own", "balance", "query", "query-over-queries")},
    "lara centres": case(LARA, {"omega": (C, D)}, centres=0.5 * WAVES[:C], causal=False),
    "lara drawn own": lara("own", rng=3),
    "lara drawn pairs": lara("balance", rng=3, antithetic=True),
    "lara drawn query": lara("query", rng=3),
    "lara drawn over queries": lara("query-over-queries", rng=3, beta=0.5),
    "linear elu": linear(features.elu_features),
    "linear elu of slope": linear(partial(features.elu_features, alpha=0.2)),
    "linear relu": linear(features.relu_features, positive=True),
    "linear taylor": linear(partial(features.taylor_features, degree=4)),
    "linear polynomial": linear(partial(features.polynomial_features, degree=4)),
    "linear positive": linear(partial(features.positive_features, omega=WAVES)),
    "linear hyperbolic": linear(partial(features.hyperbolic_features, omega=WAVES)),
    "linear waves": linear(partial(features.trigonometric_features, omega=0.3 * WAVES)),
    "linear norms": linear(partial(features.positive_features, omega=WAVES, square_norm=1.0)),
    "local": case(LOCAL, OMEGA, window=(2, 1)),
    "local past": case(LOCAL, OMEGA, window=(3, None)),
    "local future": case(LOCAL, OMEGA, window=(None, 0)),
    "local all": case(LOCAL, OMEGA, window=(None, None)),
    "eva": case(EVA, window=W, sampled=False, each=False),
    "eva published": case(EVA, window=W, sampled=False, log_size=False, each=False),
    "eva given": case(EVA, lambda m: {"omega": (-(-m // W), D)}, window=W, each=False),
    "second": case(SECOND, window=W, each=False),
    "sample": sample(each=False),
    "sample for each": sample(each=True),
    "sample of equals": sample(each=True, weighted=False),
}
FEW = [x for x in CASES if x.split()[0] in ("local", "eva", "second", "sample")]


def problem(case, rng, n=N, m=M, *, heads=(4, 2), dtype=np.float64, size=0.5):
    """Arrays that are differentiated, by name, and options."""
    outer, groups = ((h,) if heads else () for h in heads or (0, 0))
    arrays = {
        "q": size * rng.standard_normal((*outer, n, D)),
        "k": size * rng.standard_normal((*groups, m, D)),
        "v": rng.standard_normal((*groups, m, D_V)),
    }
    shapes = case.shapes(m) if callable(case.shapes) else case.shapes
    arrays |= {name: np.asarray(rng.standard_normal(x)) for name, x in shapes.items()}
    if case.positive:
        arrays |= {name: np.abs(arrays[name]) for name in "qk"}
    arrays = {name: x.astype(dtype) for name, x in arrays.items()}
    return arrays, case.options | case.draw(rng, n, m, len(outer))


def of_formula(options):
    """Options that formulas have."""
    return {name: x for name, x in options.items() if name != "sampled"}


def pulled(fn, arrays, d_out, **options):
    """Cotangents by name, of all that were given."""
    found = vjp(fn, **arrays, **options)[1](d_out)._asdict()
    assert {name for name, x in found.items() if x is not None} == set(arrays)
    return {name: x for name, x in found.items() if x is not None}


def agrees(fn, formula, arrays, options, rng, *, each=False):
    """The pullback and the slope of the formula, along a random way of all arrays, and of each."""
    out, pullback = vjp(fn, **arrays, **options)
    np.testing.assert_array_equal(out, fn(**arrays, **options))
    d_out = rng.standard_normal(out.shape)
    found = pulled(fn, arrays, d_out, **options)
    assert pullback(d_out).k.tobytes() == found["k"].tobytes()  # it may be called again
    for moving in (*arrays, "all") if each else ("all",):
        way = {x: rng.standard_normal(y.shape) * (moving in (x, "all")) for x, y in arrays.items()}
        want = slope(formula, arrays, way, d_out, **of_formula(options))
        got = sum(float(np.sum(found[x] * way[x])) for x in arrays)
        size = sum(float(np.sum(np.abs(found[x] * way[x]))) for x in arrays)
        assert abs(got - want) <= 1e-9 * (1 + size), (moving, got, want)
    return found
