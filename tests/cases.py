"""A table of attention functions: each with its formula, and what the tests of its laws need."""

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

import refattn
from refattn import features, naive
from refattn.attention import Alibi
from refattn.estimators import lara
from refattn.gradients import Gradients, vjp
from refattn.judge.conformance.truth.digits import formulas
from tests import problems
from tests.problems import draw, lara_atol, linear_atol, near_and_far_atol, rfa_atol, softmax_atol


class Case(NamedTuple):
    """An attention function of the engine, its formula, and what else the laws need.

    `draw` gives the options for a problem, and `atol` what two answers within the accuracy contract
    may differ by. `digits` computes 50 digits of one head. `lacks` names what it does not take,
    "causal", "rows" (a mask for each query), "causal-rows", "scale", "no-keys", "no-tokens" or
    "values" (leading axes of values alone: other frequencies are drawn), and what it has not:
    "mean" (weights that sum to 1), "vjp", a "formula" that is not itself, "digits" of that, and
    "deletion" (hiding a key is deleting it; elsewhere a hidden key keeps its place).
    """

    fn: Any
    formula: Any
    draw: Any
    atol: Any
    digits: Any = None
    lacks: tuple = ()

    def takes(self, p):
        mask, causal = p.options.get("mask"), p.options.get("causal", False)
        rows = mask is not None and mask.shape[-2:-1] not in ((), (1,))
        found = {"causal": causal, "rows": rows, "causal-rows": causal and rows}
        return not any(found[x] for x in self.lacks if x in found)


# --- options that are drawn -----------------------------------------------------------------------


def heads_or_none(p):
    return p.lead[-1:] if p.rng.random() < 0.5 else ()


def frequencies(p):
    lead, count = heads_or_none(p), p.rng.integers(1, 5)
    omega = draw(p.rng, *lead, count, p.q.shape[-1])
    return {"omega": omega, "log_weight": draw(p.rng, count)}


def just(**options):
    return lambda p: {**options}


def frequencies_for(features):
    return lambda p: {**frequencies(p), "features": features}


def with_lags(draw_rest):
    """The same with a bias by lag, of each query head or of all."""

    def options(p):
        lags = max(0, p.q.shape[-2] + p.k.shape[-2] - 1)
        return {**draw_rest(p), "bias": draw(p.rng, *heads_or_none(p), lags, dtype=p.q.dtype)}

    return options


def omega_only(p):
    return {"omega": frequencies(p)["omega"]}


def projection(p):
    """Frequencies of which few products, of small problems none, are near the kink of a ReLU."""
    tokens = np.concatenate([x.reshape(-1, p.q.shape[-1]) for x in (p.q, p.k)])
    for _ in range(20):
        omega = omega_only(p)
        products = tokens @ omega["omega"].reshape(-1, p.q.shape[-1]).T
        if np.min(np.abs(products), initial=1.0) > 1e-4:
            break
    return omega | {"kernel_epsilon": 0.125}


def own_frequencies(p):
    return {"omega": draw(p.rng, *heads_or_none(p), p.q.shape[-2], 2, p.q.shape[-1])}


def proposals(weighting, centred=False):
    def options(p):
        (n, d), m = p.q.shape[-2:], p.k.shape[-2]
        count, repeats = p.rng.integers(1, min(n, m, 4) + 1), p.rng.integers(1, 3)
        omega = draw(p.rng, *heads_or_none(p), count * repeats, d)
        chosen = {"omega": omega, "weighting": weighting}
        if "query" in weighting:
            chosen["beta"] = 0.7
        if centred:
            return {**chosen, "centres": draw(p.rng, count, d)}
        return {**chosen, "num_proposals": int(count)}

    return options


def at_means(draw, **options):
    """The same without frequencies: they are the means of their distributions."""
    return lambda p: {**draw(p), **options, "omega": "mean"}


def sides(p):
    every = [(2, 1), (0, 0), (None, 1), (3, None), (None, None), (500, 0), (0, 500)]
    return every[p.rng.integers(len(every))]


def scores(*names):
    """Options of exact attention, of each query head or of all."""

    def options(p):
        n, m, dtype = p.q.shape[-2], p.k.shape[-2], p.q.dtype
        heads = heads_or_none(p)
        every = {
            "bias": draw(p.rng, *heads, n, m, dtype=dtype),
            "window": sides(p),
            "softcap": 1.5,
            "sinks": np.asarray(draw(p.rng, *heads, dtype=dtype)),
            "slopes": np.asarray(p.rng.random(heads).astype(dtype)),
            "dropout": ((p.rng.random((*heads, n, m)) < 0.8) / 0.8).astype(dtype),
        }
        return {x: every[x] for x in names}

    return options


def mapped(name, **options):
    """Features that have a scale; those of waves are short, so that most sums are not near 0."""

    def feature_map(p):
        omega = draw(p.rng, 3, p.q.shape[-1], dtype=p.q.dtype)
        omega *= 0.3 if name == "trigonometric" else 1
        fn = getattr(features, f"{name}_features")
        return {"feature_map": partial(fn, omega=omega, **options)}

    return feature_map


def above_zero(p):
    """Features that are 0 below: queries and keys are made positive."""
    p.q[...], p.k[...] = np.abs(p.q), np.abs(p.k)
    return {"feature_map": features.relu_features}


def projected_atol(p, options):
    """Of features: a unit of the largest projection over the constant that is added to each."""
    longest = np.max(np.linalg.norm(p.wide(options["omega"]), axis=-1))
    largest = max(np.max(np.linalg.norm(p.wide(x), axis=-1), initial=0.0) for x in (p.q, p.k))
    return (1 + longest * largest / options["kernel_epsilon"]) * problems.values_atol(p)


def mapped_atol(p, options):
    """Relative to the sums of absolute products; infinite where features have few digits left."""
    phi = options["feature_map"]
    found = [phi(p.wide(x)) for x in (p.q, p.k)]
    q, k = (getattr(x, "values", x) for x in found)
    size = np.exp(getattr(found[1], "log_scale", np.zeros(k.shape[:-1])))[..., None, :]
    signed, whole = (
        np.sum(np.where(p.visible, size * (a @ np.swapaxes(b, -1, -2)), 0), -1, keepdims=True)
        for a, b in ((q, k), (np.abs(q), np.abs(k)))
    )
    lost = np.where(whole > 0, whole / np.maximum(np.abs(signed), 1e-300), 1)
    omega = phi.keywords["omega"] if hasattr(phi, "keywords") and "omega" in phi.keywords else None
    units = 4 if omega is None else 1 + problems.exponent(p.q, p.k, omega, 1.0)
    return np.where(lost < 1e3, lost**2 * units * problems.values_atol(p), np.inf)


def pivots(p):
    m = p.k.shape[-2]
    return {"indices": p.rng.permutation(m)[: max(1, m // 2)]}


def samples(p):
    m, shape = p.k.shape[-2], (*p.lead, p.q.shape[-2], 3) if p.rng.random() < 0.5 else (3,)
    return {"indices": p.rng.integers(0, m, shape), "log_probability": draw(p.rng, *shape)}


def chunks(p):
    return {"window": int(p.rng.integers(1, 6))}


def chunks_with_frequencies(p):
    count = -(-p.k.shape[-2] // (window := chunks(p)["window"]))
    return {"window": window, "omega": draw(p.rng, count, p.q.shape[-1])}


# --- 50 digits ------------------------------------------------------------------------------------


def digits_of(name, p, options):
    """The same formula in 50 digits."""
    return getattr(formulas(), name)(*p.arrays, **options, **p.options)


# --- the table ------------------------------------------------------------------------------------


def case(name, draw, atol, lacks=""):
    """The function of the engine and the formula of this name."""
    words = tuple(lacks.split())
    digits = None if "digits" in words else partial(digits_of, name)
    return Case(getattr(refattn, name), getattr(naive, name), draw, atol, digits, words)


def sloped(*names, lacks=""):
    """Exact attention by slopes of alibi: arrays of their own, as the laws of libraries need."""

    def with_bias(fn):
        return lambda *arrays, slopes, **options: fn(*arrays, bias=Alibi(slopes), **options)

    plain = case(
        SOFTMAX, scores("slopes", *names), softmax_atol, lacks=f"vjp deletion digits {lacks}"
    )
    return plain._replace(fn=with_bias(plain.fn), formula=with_bias(plain.formula))


def drawn(name, lacks="", **options):
    """A case that draws its own frequencies: the engine itself is its formula."""
    fn = getattr(refattn, name)
    return Case(fn, fn, just(**options), drawn_atol, lacks=("formula", *lacks.split()))


def drawn_atol(p, options):
    omega = np.full((1, p.q.shape[-1]), 4.0)  # longer than most, with centres
    return 100 * problems.rfa_tolerance(p.q, p.k, omega) * problems.largest(p.v)


SOFTMAX, RFA, LINEAR = "softmax_attention", "random_feature_attention", "linear_attention"
IS, RA, MEAN = "importance_sampled_attention", "randomized_attention", "mean_of_ratios_attention"
LARA, EVA, SECOND = "linear_randomized_attention", "eva_attention", "second_order_attention"
CORESET, SAMPLE = "coreset_attention", "sampled_key_attention"
LOCAL, RELU = "local_random_feature_attention", "relu_feature_attention"
SLOPE = partial(features.elu_features, alpha=0.1)
TAYLOR = partial(features.taylor_features, degree=2)
POLYNOMIAL = partial(features.polynomial_features, degree=4)

MAPPED = "scale digits"

# fmt: off
CASES = {
    "softmax": case(SOFTMAX, scores(), softmax_atol),
    "softmax bias": case(SOFTMAX, scores("bias"), softmax_atol),
    "softmax capped": case(SOFTMAX, scores("softcap", "bias"), softmax_atol),
    "softmax window": case(SOFTMAX, scores("window"), softmax_atol,
                           lacks="deletion mean"),
    "softmax sinks": case(SOFTMAX, scores("sinks", "softcap"), softmax_atol,
                          lacks="mean"),
    "softmax dropout": case(SOFTMAX, scores("dropout"), softmax_atol,
                            lacks="deletion mean"),
    "softmax alibi": sloped(),
    "softmax all": sloped("window", "softcap", "sinks", "dropout", lacks="mean"),
    "rfa positive": case(RFA, frequencies_for("positive"), rfa_atol),
    "rfa hyperbolic": case(RFA, frequencies_for("hyperbolic"), rfa_atol),
    "rfa trigonometric": case(RFA, frequencies_for("trigonometric"), problems.trigonometric_atol),
    "rfa lags": case(RFA, with_lags(frequencies), rfa_atol, lacks="rows deletion"),
    "rfa waves, lags": case(RFA, with_lags(frequencies_for("trigonometric")),
                            problems.trigonometric_atol, lacks="rows deletion"),
    "rfa drawn": drawn(RFA, num_features=3, rng=1),
    "rfa one weight": case(RFA, lambda p: omega_only(p) | {"log_weight": draw(p.rng, 1)}, rfa_atol,
                           "digits"),
    "is": case(IS, frequencies, problems.is_atol, lacks="mean"),
    "ra": case(RA, own_frequencies, rfa_atol),
    "ra mean": case(RA, at_means(just()), problems.target_mean_atol),
    "ra drawn": drawn(RA, "vjp values", num_samples=2, rng=1),
    "mean of ratios": case(MEAN, omega_only, rfa_atol),
    "mean of ratios drawn": drawn(MEAN, num_samples=2, rng=1),
    **{f"lara {x}": case(LARA, proposals(x), lara_atol, lacks="causal-rows no-tokens")
       for x in ("balance", "own")},
    **{f"lara {x}, centres": case(LARA, proposals(x, centred=True), lara_atol,
                                  lacks="causal no-tokens") for x in lara.WEIGHTINGS},
    "lara balance, means": case(LARA, at_means(proposals("balance")), lara_atol,
                                lacks="causal-rows no-tokens"),
    "lara query, means": case(LARA, at_means(proposals("query", centred=True)), lara_atol,
                              lacks="causal no-tokens"),
    "lara drawn": drawn(LARA, "causal-rows no-tokens", num_proposals=2, rng=1),
    "lara drawn pairs": drawn(LARA, "causal no-tokens", num_proposals=2, rng=1, antithetic=True,
                              weighting="query"),
    "lara drawn over queries": drawn(LARA, "causal no-tokens", num_proposals=2, rng=1, beta=0.5,
                                     weighting="query-over-queries"),
    "linear": case(LINEAR, just(), linear_atol, lacks="scale"),
    "linear lags": case(LINEAR, with_lags(just()), linear_atol, lacks="scale rows deletion"),
    "linear elu of slope": case(LINEAR, just(feature_map=SLOPE), linear_atol, lacks=MAPPED),
    "linear relu": case(LINEAR, above_zero, mapped_atol, lacks=MAPPED),
    "linear taylor": case(LINEAR, just(feature_map=TAYLOR), linear_atol, lacks=MAPPED),
    "linear polynomial": case(LINEAR, just(feature_map=POLYNOMIAL), mapped_atol, lacks=MAPPED),
    **{f"linear {x}": case(LINEAR, mapped(x), mapped_atol, lacks=MAPPED)
       for x in ("positive", "hyperbolic", "trigonometric")},
    "linear norms": case(LINEAR, mapped("positive", square_norm=1.0), mapped_atol, lacks=MAPPED),
    "linear projection": case(RELU, projection, projected_atol),
    "linear projection drawn": drawn(RELU, num_features=3, rng=1),
    "linear projection, lags": case(RELU, with_lags(projection), projected_atol,
                                    lacks="rows deletion"),
    "coreset": case(CORESET, pivots, problems.coreset_atol,
                    lacks="causal rows deletion no-keys digits"),
    "sampled keys": case(SAMPLE, samples, near_and_far_atol, lacks="causal deletion no-keys"),
    "sampled keys alike": case(SAMPLE, lambda p: {"indices": samples(p)["indices"]},
                               near_and_far_atol, lacks="causal deletion no-keys digits"),
    "eva": case(EVA, chunks_with_frequencies, near_and_far_atol, lacks="rows deletion"),
    "eva mean": case(EVA, at_means(chunks), near_and_far_atol, lacks="rows deletion"),
    "eva published": case(EVA, at_means(chunks, log_size=False), near_and_far_atol,
                          lacks="rows deletion"),
    "eva drawn": drawn(EVA, "rows deletion", window=2, rng=1),
    "second order": case(SECOND, chunks, problems.second_order_atol, lacks="rows deletion"),
    "local": case(LOCAL, lambda p: {"window": sides(p), **omega_only(p)}, near_and_far_atol,
                  lacks="deletion"),
    "local drawn": drawn(LOCAL, "deletion", window=(2, 1), num_features=3, rng=1),
}
# fmt: on


# Which differ from another row in what a slope is made of.
FOR_SLOPES = {
    *("rfa one weight", "lara drawn over queries", "linear relu", "linear polynomial"),
    *("linear hyperbolic", "linear trigonometric", "linear norms", "local drawn"),
    "sampled keys alike",
}


def those(*words):
    """Cases that lack none of these; those for slopes are long where slopes are not asked for."""
    names = [x for x, case in CASES.items() if not {*words} & {*case.lacks}]
    long = FOR_SLOPES if "vjp" not in words else ()
    marked = [pytest.param(x, marks=[pytest.mark.long] * (x in long)) for x in names]
    return pytest.mark.parametrize("name", marked)


def assert_close(got, want, atol):
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    off = np.abs(got.astype(np.float64) - want)
    assert np.all((off <= atol) | np.isinf(atol)), f"off by {np.max(off / atol):.3g} tolerances"


def prepared(name, lead="none", n=5, m=7, mask="none", causal=False, seed=0, dtype=np.float64, d=3):
    """A case, a problem, and its options; causal or with a mask of rows where the case takes it."""
    case, fewer = CASES[name], "keys" if mask == "rows" else mask
    for some in ((mask, causal), (mask, False), (fewer, causal), (fewer, False)):
        p = problems.make(lead, n, m, *some, seed, np.dtype(dtype), d)
        if case.takes(p):
            break
    return case, p, case.draw(p)


# --- derivatives ----------------------------------------------------------------------------------


def differentiable(name, *where, size=0.5, **more):
    """A case, what of its problem is differentiated, by name, its options, and a generator."""
    case, p, options = prepared(name, *where, **more)
    arrays = {"q": p.q.dtype.type(size) * p.q, "k": p.q.dtype.type(size) * p.k, "v": p.v}
    given = [x for x in Gradients._fields if isinstance(options.get(x), np.ndarray)]
    arrays |= {x: options.pop(x).astype(p.q.dtype) for x in given}
    return case, arrays, options | p.options, p.rng


def pulled(fn, arrays, d_out, **options):
    """Cotangents by name, of all that were given."""
    found = vjp(fn, **arrays, **options)[1](d_out)._asdict()
    found = {name: x for name, x in found.items() if x is not None}
    assert {*found} == {*arrays}
    return found


def agrees(fn, formula, arrays, options, rng, *, each=True):
    """The pullback and the slope of the formula, along a random way of all arrays, and of each."""
    out, pullback = vjp(fn, **arrays, **options)
    np.testing.assert_array_equal(out, fn(**arrays, **options))
    d_out = rng.standard_normal(out.shape)
    found = pulled(fn, arrays, d_out, **options)
    assert pullback(d_out).k.tobytes() == found["k"].tobytes()  # it may be called again
    for moving in (*arrays, "all") if each else ("all",):
        way = {x: rng.standard_normal(y.shape) * (moving in (x, "all")) for x, y in arrays.items()}
        want = problems.slope(formula, arrays, way, d_out, **options)
        got = sum(float(np.sum(found[x] * way[x])) for x in arrays)
        size = sum(float(np.sum(np.abs(found[x] * way[x]))) for x in arrays)
        assert abs(got - want) <= 1e-9 * (1 + size), (moving, got, want)
