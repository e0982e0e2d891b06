"""Bounds of certified attention, laws, statistics, and every estimator with its gradients."""

import warnings

import numpy as np

from refattn import (
    adapt,
    certified,
    compare,
    diagnostics,
    features,
    moments,
    packed,
    sampling,
    theory,
)
from refattn.arrays.heads import Alibi
from refattn.attention import softmax_attention
from refattn.compare import advice
from refattn.estimators.linear import linear_attention
from refattn.gradients import vjp
from refattn.judge import stats
from refattn.registry import ESTIMATORS
from tests.judge.stats import cases as designs
from tests.recorded.problems import OPTIONS, SINKS, draw, hidden, qkv, seen
from tests.recorded.results import log


def certified_errors():
    ways = OPTIONS | {
        "spans": ({"n": 3, "m": 2100, "d": 2}, {}),
        "subnormal": ({"size": 2.0**-1040}, {"scale": 0.75}),
        "large scores": ({}, {"scale": 200.0}),
        "large bias": ({}, {"bias": 2.0**50 * draw(5, 1, 11), "sinks": np.array(2.0**40)}),
        "slopes": ({"lead": (2,)}, {"bias": Alibi(np.array([0.5, 64.0]))}),
    }
    for name, (sizes, options) in ways.items():
        q, k, v = qkv(**sizes)
        found = certified.softmax_attention(q / 3, k / 3, v / 3, **options)
        yield name, [found.out.hi, found.lse.hi, found.error, found.lse_error]
        if "softcap" not in options:
            d_out = draw(6, *q.shape[:-1], v.shape[-1])
            yield (
                f"{name}, gradients",
                [x.error for x in certified.softmax_gradients(q / 3, k / 3, v, d_out, **options)],
            )
    q, k, v = qkv((2,), n=6, m=9)
    omega, log_weight = draw(6, 5, 4) / 3, draw(7, 5) / 3
    options = {"omega": omega, "log_weight": log_weight, "scale": 0.75}
    found = certified.random_feature_attention(q, k, v, **options)
    yield "features", [found.out.hi, found.error]
    lo, error = np.meshgrid(*[2.0**-55 * np.array([-4, -2.0, -1.0, 0.0, 1.0, 2.0, 4.0])] * 2)
    hi = np.ones(lo.shape)
    ones = certified.Certified(certified.Pair(hi, lo), None, np.abs(error), None)
    yield "rounded", [x.proven for x in [ones.rounded()]]


def statistics():
    for name, p in {**designs.NULLS, **designs.DEFECTS}.items():
        yield name, [log(float(y)) for y in np.ravel(p(np.random.default_rng(1)))]
    for name, (_, n, options) in designs.DESIGNS.items():
        test = getattr(stats, name.split(",")[0])
        least = stats.min_discrepancy(test, n, **options)
        yield f"{name}, least", [least, stats.min_samples(test, 2 * least, **options)]
    yield "interval", [stats.clopper_pearson(x, 20) for x in (0, 3, 20)]
    p = np.array([0.2, 1e-9, 0.03, 0.03, 1.0])
    yield "holm", [stats.holm(p), stats.suite_p(p)]


def laws():
    q, k, v = qkv((2,), n=5, m=6, d=3)
    q, k = q / 2, k / 3
    law = sampling.Gaussian(np.array([0.1, 0.0, -0.2]), np.diag([1.5, 0.8, 1.0]))
    for proposal in (None, law):
        options = {"proposal": proposal, "scale": 0.5, "mask": seen(5, 6)}
        for name in ("attention_law", "importance_sampling_law"):
            found = getattr(theory, name)(q, k, v, num_features=7, **options)
            yield f"{name} {proposal is None}", found
        yield (
            f"gradient {proposal is None}",
            theory.gradient_law(q, k, v, draw(6, 2, 5, 3), num_features=7, **options),
        )
        yield f"size {proposal is None}", theory.num_features_for(0.1, q, k, v, **options)
    yield "ra", theory.randomized_attention_law(q, k, v, num_samples=5, causal=True)
    for name in ("softmax", "uniform", "norms"):
        yield f"keys by {name}", theory.sampled_keys_law(q, k, v, num_samples=4, draws=name)
    x, y = q[0], k[0, :5]
    for kind in ("positive", "hyperbolic", "trigonometric"):
        for coupling in theory.COUPLINGS:
            for name in ("mean", "variance", "mse"):
                size = {} if name == "mean" else {"num_features": 7}
                options = {"features": kind, "coupling": coupling, **size}
                try:
                    found = getattr(theory, f"log_kernel_{name}")(x, y, **options)
                except ValueError as error:
                    found = str(error)
                yield f"{kind} {coupling} {name}", found
        norms = theory.log_norm_approximation_bias(x, y, 0.9, 1.2, features=kind)
        yield f"{kind} norms", norms
    yield "second", theory.log_second_moment(x, y)


WAYS = {
    "scale": {"scale": 0.75}, "causal": {"causal": True}, "mask": {"mask": seen(1, 8)},
    "window": {"window": (2, 1)}, "softcap": {"softcap": 2.0}, "sinks": {"sinks": SINKS},
    "bias": {"bias": hidden(8, 8)},
}  # fmt: skip


GATES = {  # of recurrences, for two heads of 8 tokens
    "head": np.array([0.5, 0.75]), "log": -np.abs(draw(7, 2, 8)), "logs": -np.abs(draw(7, 2, 8, 4)),
    "rate": draw(8, 2, 8) ** 2 / 4, "factor": draw(8, 2, 8) ** 2,
    "pair": (draw(9, 2, 8, 4) / 4, draw(10, 2, 8, 4) / 4),
}  # fmt: skip


def estimators():
    """Every estimator with the options it takes, and its gradients."""
    q, k, v = qkv((2,), n=8, m=8, share=1)
    q, k = q / 2, k / 2
    for record in dict.fromkeys(ESTIMATORS.values()):
        if record.arrays != ("q", "k", "v") or record.name == "is":  # which draws its own
            continue
        drawn = record.sized(4) | ({"rng": 0} if record.has("random") else {})
        given = drawn
        if record.takes("omega"):
            given = {"omega": draw(6, *(8,) * record.has("per-query"), 3, 4)}
            given |= record.sized(3) if record.has("chunked") else {}  # 3 chunks
        elif record.takes("indices"):
            given = {"indices": np.array([4, 0, 5])}
        elif record.gates:
            given = drawn = {x: GATES[kind] for x, kind in record.gates.items()}
        ways = {name: x | given for name, x in WAYS.items() if record.takes(name)}
        for name, options in ({"drawn": drawn, "given": given} | ways).items():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield f"{record.name} {name}", record.fn(q, k, v, **options)
                if name != "drawn" and record.differentiable and record.takes("vjp"):
                    _, pullback = vjp(record.differentiable, q, k, v, **options)
                    d_out = draw(6, *q.shape[:-1], 3)
                    d_out = (d_out, draw(11, 2, 4, 3)) if record.has("recurrent") else d_out
                    yield f"{record.name} {name}, gradients", pullback(d_out)


def head_of(m):
    return moments.Moments(m.count, m.mean[0], m.cov[0])


def rest():
    q, k, v = qkv((2,), n=30, m=32)
    q, k = q / 2 + 0.5, k / 3 - 0.25
    a, b = moments.estimate(q), moments.estimate(k, ddof=0)
    yield "moments", [a, b, moments.merge(a, a), moments.shrink(a), moments.shrinkage_intensity(a)]
    yield "summary", [moments.summary(a), moments.mean_only(a), moments.mean_plus_trace(b)]
    for name in ("oprf", "sderf", "saderf", "optimal_gaussian"):
        scale = None if name == "saderf" else 1.0
        fitted = getattr(adapt, name)(head_of(a), head_of(b), scale=scale)
        yield name, fitted
        yield f"{name} excess", adapt.expected_log_excess(head_of(a), head_of(b), fitted, scale=1.0)
    yield "fit", adapt.fit(q, k, scale=0.75)
    yield "gauge", adapt.gauge(a.cov, b.cov)
    omega = draw(6, 12, 4)
    weights = diagnostics.log_weights(q, k, omega=omega)
    yield "diagnostics", [weights, diagnostics.effective_sample_size(weights)]
    for name in ("iid", "orthogonal", "antithetic", "simplex"):
        yield f"draw {name}", sampling.draw(6, 4, coupling=name, rng=0)
    yield "target", sampling.draw_target(q, k, num_samples=3, rng=0, causal=True)
    x = np.array([-2.0, -0.5, 0.0, 0.25, 3.0])
    yield (
        "maps",
        [features.elu_features(x), features.elu_features(x, 0.5), features.relu_features(x)],
    )
    for way in (
        features.positive_features,
        features.hyperbolic_features,
        features.trigonometric_features,
    ):
        yield way.__name__, [way(q, omega), way(q, omega, square_norm=1.5)]
    yield (
        "taylor",
        [features.taylor_features(q, degree=3), features.polynomial_features(q, degree=2)],
    )
    for function in (features.relu_features, features.elu_features):
        zero = np.where(np.abs(q) < 0.3, 0.0, q)
        _, pullback = vjp(linear_attention, zero, k, v, feature_map=function, causal=True)
        yield f"{function.__name__} at 0", pullback(draw(6, 2, 30, 3))
    packed_q, packed_k, packed_v = (np.swapaxes(y, 0, 1) for y in (q, k, v))
    yield (
        "varlen",
        packed.varlen(
            softmax_attention,
            packed_q,
            packed_k,
            packed_v,
            q_offsets=[0, 7, 7, 30],
            k_offsets=[0, 12, 20, 32],
            causal=True,
        ),
    )
    rows = compare.measure(q, k, v, estimators=("rfa", "ra", "eva"), sizes=(4,), draws=2).rows
    yield "compare", [[x.errors, x.standard_error, x.worst_head] for x in rows]
    yield "advice", advice.study(q, k, v, sizes=(4, 16), shrink=True)
