"""Attention functions with pullbacks, their formulas, and problems for both."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

import refattn
from refattn import features, naive
from refattn.gradients import vjp

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

    `shapes` gives the shapes of more arrays that are differentiated, for m keys, and `draw` options
    that depend on the problem.
    """

    fn: Callable[..., Any]
    formula: Callable[..., Any]
    shapes: Callable[[int], dict] = lambda m: {}
    options: Mapping = MappingProxyType({})
    draw: Callable[..., dict] = lambda rng, n, m, lead: {}
    causal: bool = True
    each: bool = True  # whether queries may see different keys
    positive: bool = False  # whether queries and keys have to be

    def takes(self, causal, mask):
        """LARA has one mask or the other."""
        each = mask == "each"
        both = each and causal and self.fn is LARA
        return (self.causal or not causal) and (self.each or not each) and not both


def formula_of(fn):
    return getattr(naive, fn.__name__)


def sizes(**shapes):
    return lambda m: shapes


FREQUENCIES = sizes(omega=(S, D), log_weight=(S,))


def softmax(**options):
    more = sizes(sinks=()) if options.pop("sinks", False) else sizes()
    return Case(SOFTMAX, formula_of(SOFTMAX), more, options)


def rfa(**options):
    return Case(RFA, formula_of(RFA), FREQUENCIES, options)


def lara(weighting):
    options, causal = {"num_proposals": C, "weighting": weighting}, "query" not in weighting
    return Case(LARA, formula_of(LARA), sizes(omega=(2 * C, D)), options, causal=causal)


def drawn(**options):
    """Frequencies that move with the proposals: the function itself is the formula."""
    options, causal = {"num_proposals": C, "rng": 3, **options}, "query" not in options["weighting"]
    return Case(LARA, LARA, options=options, causal=causal)


def linear(feature_map, *, positive=False):
    return Case(LINEAR, LINEAR, options={"feature_map": feature_map}, positive=positive)


def local(*sides):
    return Case(LOCAL, formula_of(LOCAL), sizes(omega=(S, D)), {"window": sides})


def eva(**options):
    return Case(EVA, formula_of(EVA), options={"window": W, **options}, each=False)


def sample(*, each, weighted=True):
    def draw(rng, n, m, lead):
        shape = (*(1,) * lead, n, S) if each else (S,)
        found = {"indices": rng.integers(0, m, shape)}
        return found | ({"log_probability": rng.standard_normal(shape)} if weighted else {})

    return Case(SAMPLED, formula_of(SAMPLED), draw=draw, causal=False)


CASES = {
    "softmax": softmax(scale=0.3),
    "softmax window": softmax(window=(5, 2)),
    "softmax capped": softmax(softcap=0.7, scale=2.0),
    "softmax sinks": softmax(sinks=True, window=(300, None), softcap=2.0),
    "positive": rfa(features="positive"),
    "hyperbolic": rfa(features="hyperbolic"),
    "trigonometric": rfa(features="trigonometric"),
    "one log weight": rfa()._replace(shapes=sizes(omega=(S, D), log_weight=(1,))),
    "importance": Case(IS, formula_of(IS), FREQUENCIES),
    "mean of ratios": Case(MEAN, formula_of(MEAN), sizes(omega=(S, D))),
    **{f"lara {x}": lara(x) for x in ("own", "balance", "query", "query-over-queries")},
    "lara centres": Case(
        LARA, formula_of(LARA), sizes(omega=(C, D)), {"centres": 0.5 * WAVES[:C]}, causal=False
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
    "local": local(2, 1),
    "local past": local(3, None),
    "local future": local(None, 0),
    "local all": local(None, None),
    "eva": eva(sampled=False),
    "eva published": eva(sampled=False, log_size=False),
    "eva given": eva()._replace(shapes=lambda m: {"omega": (-(-m // W), D)}),
    "second": Case(SECOND, formula_of(SECOND), options={"window": W}, each=False),
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
        **{name: np.asarray(rng.standard_normal(x)) for name, x in case.shapes(m).items()},
    }
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


def slope(formula, arrays, way, d_out, **options):
    """Derivative of the weighted output along a way, in extended precision."""
    step, total = LONG(2.0**-18), LONG(0)
    for i, weight in ((1, 8), (2, -1)):  # the error is of the fourth order
        for sign in (1, -1):
            moved = {x: y.astype(LONG) + sign * i * step * way[x] for x, y in arrays.items()}
            total += sign * weight * np.sum(formula(**moved, **options) * d_out)
    return float(total / (12 * step))


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
