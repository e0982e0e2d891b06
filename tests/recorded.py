"""Numbers that small problems have, so that a change of any of them is noticed.

`python -m tests.recorded` records them again in `recorded.json.gz` and prints which changed. The
commit must say why: a number is recorded once it is known to be right. What is here are bounds,
standard deviations, statistics and words of verdicts, of which other tests assert what holds for
all problems. Problems are small and of numbers with few digits, of which sums of products are exact
in any order, and formats are so coarse that every term of a formula counts.
"""

import gzip
import json
import math
import re
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path

import numpy as np

from refattn import adapt, certified, diagnostics, moments, sampling, stats, theory
from refattn.arrays.heads import Alibi
from refattn.profile import advice
from refattn.registry import ESTIMATORS
from refattn.sampling import Gaussian
from refattn.typing import KEY_LAWS
from refattn.features import elu_features
from refattn.files.tensors import open_tensors
from refattn.rounding import PROFILES, Profile, predict
from refattn.rounding.backward import variance_along
from refattn.rounding.formats import FORMATS, Format
from refattn.rounding.problems import pose_arrays, pose_gradients
from refattn.rounding.roundings import Roundings, sum_error, walk
from refattn.verification import judge, tolerance, verify
from refattn.verification.findings import Finding, Numbers, Suspect
from refattn.verification.reading import pose_tensors, read_parts
from tests.files import problems as files
from tests.stats import cases as designs

FILE = Path(__file__).with_name("recorded.json.gz")
MOST = 5  # numbers of an array: sums of those that are so far from each other

CASES = {}


def case(function):
    """A function that yields names and results."""
    CASES[function.__name__] = function
    return function


# --- numbers and words of results -----------------------------------------------------------------


def flat(x, name=""):
    """Names with numbers or words in them."""
    if isinstance(x, str | None):
        yield name, few_digits(str(x))
    elif isinstance(x, Mapping):
        for key, y in x.items():
            yield from flat(y, f"{name}.{key}")
    elif isinstance(x, Finding):
        name = f"{name.rpartition('.')[0]}.{x.name}"  # their order is that of p-values
        yield f"{name}, words", few_digits(x.where)
        yield name, [log(x.p_value), log(x.adjusted), x.statistic]
    elif isinstance(x, Suspect):
        yield f"{name}, words", few_digits(f"{x.name} {x.text}")
        yield name, [x.estimate, x.error, log(x.adjusted), x.explained]
    elif name.endswith(".trials"):
        yield f"{name}, words", " ".join(x)
        yield name, [log(y) for y in x.values()]
    elif is_dataclass(x):
        yield from flat({y.name: getattr(x, y.name) for y in fields(x)}, name)
    elif hasattr(x, "_asdict"):
        yield from flat({k: y for k, y in x._asdict().items() if k != "seconds"}, name)
    elif isinstance(x, list | tuple) and not all(isinstance(y, int | float) for y in x):
        for i, y in enumerate(x):
            yield from flat(y, f"{name}.{i}")
    else:
        yield name, folded(np.asarray(x))


def few_digits(words):
    """Words with four digits of each number, without its error; what is 0 but for roundings is 0."""
    number = r"-?\d+(\.\d+)?(e-?\d+)?"
    words = re.sub(f" ± {number}", "", words)
    return re.sub(number, lambda x: f"{float(x[0]) if abs(float(x[0])) > 1e-12 else 0:.4g}", words)


def log(p):
    """p-values are compared in logs."""
    return math.log(max(p, 1e-300)) if p == p else p


def folded(x):
    """A list of at most `MOST` numbers: weighted sums of the finite ones, and of where others are."""
    x = np.asarray(x, np.float64).ravel()
    if x.size <= MOST:
        return x.tolist()
    weights = 1 + np.arange(x.size) * 0.618 % 1
    codes = np.where(np.isnan(x), 3.0, np.where(np.isinf(x), np.sign(x) + 2.5, 0.0))
    parts = [np.where(codes == 0, x, 0.0), *[codes] * bool(codes.any())]
    cuts = [np.pad(weights * y, (0, -x.size % MOST)).reshape(-1, MOST).sum(0) for y in parts]
    return [*np.concatenate(cuts).tolist(), x.size]


def results(name):
    """Names of results of a case, with numbers or words."""
    found = {}
    with np.errstate(all="ignore"):
        for place, x in flat(dict(CASES[name]())):
            assert found.setdefault(place, x) is x or isinstance(x, list), place
            found[place] = x
    return found


# Sums are of float64, to 2^-53; errors of outputs in float32 are known to 2^-29 of them, and so are
# z and what verdicts are made of. Certified bounds are sums of what is not negative.
RTOL = {"verdicts": 1e-6, "certified_errors": 1e-12}


def different(got, want, rtol=1e-9):
    """Tell whether words or numbers differ by more than another order of sums makes them."""
    if not isinstance(got, list) or not isinstance(want, list):
        return got != want
    if len(got) != len(want):
        return True
    x, y = (np.array(z, np.float64) for z in (got, want))
    atol = rtol / 1000 * np.max(np.abs(y[np.isfinite(y)]), initial=0.0)  # of what cancels
    return not np.allclose(x, y, rtol=rtol, atol=atol, equal_nan=True)


def changes(name, found, want):
    """List the places of a case where results are others."""
    places = sorted({*found, *want})
    return [x for x in places if different(found.get(x), want.get(x), RTOL.get(name, 1e-9))]


# --- problems -------------------------------------------------------------------------------------


def draw(seed, *shape, size=1.0, step=8):
    return size * np.rint(step * np.random.default_rng(seed).standard_normal(shape)) / step


def qkv(lead=(), n=9, m=11, d=4, d_v=3, share=1, size=1.0):
    keys = (*lead[:-1], lead[-1] // share) if lead else ()
    return draw(0, *lead, n, d), draw(1, *keys, m, d), draw(2, *keys, m, d_v, size=size)


def seen(n, m):
    return np.random.default_rng(3).random((n, m)) < 0.7


def hidden(n, m):
    return np.where(np.random.default_rng(4).random((n, m)) < 0.8, draw(5, n, m), -np.inf)


SINKS = np.array([-1.0, 2.5])
OPTIONS = {  # arguments of `qkv`, and options
    "plain": ({}, {}),
    "fewer keys": ({"n": 12, "m": 7}, {"causal": True, "scale": -0.75}),
    "window": ({}, {"causal": True, "window": (3, 1), "scale": 0.5}),
    "cap": ({}, {"softcap": 2.5, "scale": 0.3}),
    "cap of 2": ({}, {"softcap": 2.0, "bias": hidden(9, 11)}),
    "sinks": ({"lead": (2,), "share": 2}, {"sinks": SINKS, "window": (None, 2)}),
    "all": (
        {"lead": (2,)},
        {
            "bias": hidden(9, 11), "mask": seen(9, 11), "sinks": SINKS, "softcap": 3.0,
            "scale": 0.9, "causal": True, "window": (6, None),
        },
    ),
    "many keys": ({"n": 5, "m": 150, "d": 9}, {"causal": True}),
    "small": ({"size": 2.0**-128}, {}),
    "large": ({"size": 2.0**126}, {"scale": 2.0}),
    "equal": ({"n": 4, "m": 40, "d": 1}, {"scale": 2.0**-14}),
}  # fmt: skip


def coarse(digits, least=-126):
    return Format(digits, least, (2 - 2.0**-8) * 2.0**127)


PLAIN = Roundings(
    scores=None, weights=None, softmax=coarse(12), accumulate=coarse(13), out=coarse(11), lanes=1,
    normalised=False, run=256, states=None, exp=3.0, d_weights=None, d_scores=None,
    delta_of_out=False, parts=None,
)  # fmt: skip
KERNELS = {
    "fine": PLAIN._replace(lanes=2, run=64, states=coarse(12)),
    "recomputed": PLAIN._replace(delta_of_out=True, out=None),
    "fused": PLAIN._replace(
        weights=coarse(10, -14), d_scores=coarse(10), delta_of_out=True, parts=(4, 6), run=64
    ),
    "fast": PLAIN._replace(weights=coarse(8), accumulate=coarse(24), delta_of_out=True),
    "upcast": PLAIN._replace(weights=coarse(10), normalised=True, d_weights=coarse(11, -14)),
    "eager": PLAIN._replace(
        scores=coarse(12), weights=coarse(10), softmax=coarse(11), normalised=True,
        d_weights=coarse(12), d_scores=coarse(11), lanes=4,
    ),
    "half": PLAIN._replace(scores=coarse(11, -14), weights=coarse(9, -14), accumulate=coarse(12, -14)),
    "double": PLAIN._replace(accumulate=FORMATS["float64"], softmax=FORMATS["float64"]),
}  # fmt: skip
VERDICTS = {  # options, dtype, profile, what the kernel takes instead, and a factor on the result
    "right": ({}, "bfloat16", None, {}, 1.0),
    "causal": ({"causal": True, "share": 2}, "bfloat16", None, {}, 1.0),
    "wide": ({"scale": 0.75}, "float32", None, {}, 1.0),
    "double": ({}, "float64", None, {}, 1.0),
    "scale": ({"scale": 0.75}, "bfloat16", None, {"scale": 0.5}, 1.0),
    "edge": ({"causal": True, "share": 2}, "bfloat16", None, {"causal": False}, 1.0),
    "window": ({"window": (6, 3)}, "bfloat16", None, {"window": (6, 2)}, 1.0),
    "cap": ({"softcap": 4.0, "sinks": SINKS}, "float16", "flash", {"softcap": None}, 1.0),
    "sinks": ({"sinks": SINKS}, "bfloat16", "upcast", {"sinks": SINKS + math.log(2)}, 1.0),
    "bias": (
        {"bias": hidden(40, 36), "mask": seen(40, 36)}, "bfloat16", "flash", {"bias": None}, 1.0
    ),
    "factor": ({"causal": True, "bias": hidden(40, 36)}, "bfloat16", "flash", {}, 1.02),
    "features": (
        {"omega": draw(6, 5, 4, size=0.5), "scale": 0.5}, "bfloat16", "flash", {"scale": 0.75}, 1.0
    ),
    "map": ({"feature_map": elu_features}, "bfloat16", "flash", {}, 1.0),
}  # fmt: skip
CHANGES = {"scale": lambda head, tile, i: tile.logits * tile.slope}


@case
def output():
    for name, (sizes, options) in OPTIONS.items():
        q, k, v = qkv(**sizes)
        problem = pose_arrays(q, k, v, **options)
        for kernel, roundings in KERNELS.items():
            for index in np.ndindex(problem.lead):
                i = slice(len(q[index]) // 4, q.shape[-2])
                rows = problem.analyse(index, roundings, i, CHANGES)
                if kernel == "double":  # whether errors have a law depends on the last digits
                    rows = rows._replace(std=0.0, worst=0.0)
                yield f"{name}, {kernel}, {index}", rows


@case
def gradients():
    for name, (sizes, options) in OPTIONS.items():
        q, k, v = qkv(**sizes)
        problem = pose_arrays(q, k, v, **options)
        d_out = draw(6, *problem.lead, *q.shape[-2:-1], v.shape[-1])
        d_out[..., 1, :] = 2 * d_out[..., 0, :]
        outs = [draw(7, *d_out.shape), None]
        for number, (kernel, roundings) in enumerate([*KERNELS.items()][:-1]):
            out = outs[number % 2]
            posed = pose_gradients(
                problem, {"dq": q.shape, "dk": k.shape, "dv": v.shape}, d_out.__getitem__,
                None if out is None else out.__getitem__, "float64",
            )
            for of, one in posed.items():
                index, i = (0,) * len(one.lead), slice(0, one.shape[0])
                rows = one.analyse(index, roundings, i)
                place = f"{name}, {kernel}, {of}"
                yield place, rows
                saved = one.gradient.saved(index, roundings)
                yield f"{place}, exact", one.exact(index, roundings, i)
                yield f"{place}, sources", one.list_sources(index, roundings, i)
                if of != "dq":
                    w = draw(8, *rows.out.shape)
                    yield f"{place}, along", variance_along(saved, roundings, of, w)


@case
def features():
    q, k, v = qkv(n=12, m=10)
    omega, log_weight = draw(6, 5, 4, size=0.5), draw(7, 5, size=0.25)
    for name, options in {
        "positive": {"omega": omega, "log_weight": log_weight, "scale": 0.5},
        "hyperbolic": {"omega": omega, "features": "hyperbolic", "causal": True},
        "map": {"feature_map": elu_features, "mask": seen(1, 10)},
        "causal map": {"feature_map": lambda x: np.maximum(x, 0.0), "causal": True},
        "masked": {"omega": omega, "mask": seen(1, 10), "causal": True},
    }.items():
        problem = pose_arrays(q, k, v, **options)
        for kernel, roundings in KERNELS.items():
            yield f"{name}, {kernel}", problem.analyse((), roundings, slice(1, 12))


@case
def verdicts():
    """Outputs with noise of half a standard deviation, of kernels that are right or wrong."""
    for name, (options, dtype, profile, wrong, factor) in VERDICTS.items():
        q, k, v = qkv((2,), n=40, m=36, share=options.pop("share", 1))
        problem = pose_arrays(q, k, v, **options)
        law = predict(q, k, v, dtype=dtype, **options)
        got = predict(q, k, v, dtype=dtype, **options | wrong)
        noise = np.clip(np.nan_to_num(law.std, posinf=0.0), 0, 1) * draw(9, *law.std.shape)
        to = coarse(34) if dtype == "float64" else FORMATS[dtype]
        out = to.round(factor * got.out + noise / 2)
        lse = FORMATS["float32"].round(got.lse + 1e-6 * draw(10, *law.lse.shape))
        numbers = Numbers(out.__getitem__, dtype, lse.__getitem__ if problem.is_mean else None)
        verdict = judge(problem, numbers, dtype, profile, 0.05)
        yield name, verdict
        yield f"{name}, words", str(verdict._replace(seconds=0.0))


@case
def profiles():
    q, k, v = qkv((2,), n=20, m=24, share=2)
    problem = pose_arrays(q, k, v, causal=True, window=(9, None))
    noise = 2.0**-9 * draw(9, 2, 20, 3)
    for name, profile in PROFILES.items():
        yield f"{name} of bfloat16", profile.kernel("bfloat16")
        law = predict(q, k, v, dtype="bfloat16", profile=name, causal=True, window=(9, None))
        yield name, law
        numbers = Numbers(FORMATS["bfloat16"].round(law.out + noise).__getitem__, "bfloat16")
        yield f"{name}, verdict", judge(problem, numbers, "bfloat16", name, 0.05)


@case
def backward():
    """Gradients with noise of 2^-9, of which one is wrong."""
    q, k, v = qkv((4,), n=24, m=20, share=2)
    to = FORMATS["bfloat16"].round
    for name, options in {
        "plain": {"causal": True},
        "cap": {"softcap": 2.0, "sinks": np.array([1.0, 0.0, 2.0, -1.0]), "scale": 0.75},
    }.items():
        problem = pose_arrays(q, k, v, **options)
        out = to(predict(q, k, v, dtype="bfloat16", **options).out)
        d_out = draw(11, *out.shape)
        shapes = {"dq": q.shape, "dk": k.shape, "dv": v.shape}
        posed = pose_gradients(problem, shapes, d_out.__getitem__, None, "float64")
        got = {x: np.empty(y) for x, y in shapes.items()}
        for of, one in posed.items():
            for index in np.ndindex(one.lead):
                got[of][index] = one.exact(index, KERNELS["double"], slice(0, one.shape[0]))
            got[of] = to(got[of] * (1 + 2.0**-9 * draw(12, *got[of].shape)))
        for wrong in ("", "dk"):
            given = got | {x: to(1.25 * got[x]) for x in [wrong] if x}
            for profile in (None, "flash-32", "eager") if wrong else ("recomputed", "upcast"):
                found = verify(
                    q=q, k=k, v=v, out=out, d_out=d_out, **given, **options, dtype="bfloat16",
                    profile=profile, alpha=0.05,
                )
                yield f"{name} {wrong} {profile}", found
                words = {x: y._replace(seconds=0.0) for x, y in found.parts.items()}
                yield f"{name} {wrong} {profile}, words", str(found._replace(parts=words))


@case
def tolerances():
    q, k, v = qkv((2,), n=18, m=20)
    options = {"causal": True, "window": (9, None), "softcap": 3.0, "sinks": SINKS, "scale": 0.5}
    options |= {"mask": seen(18, 20), "bias": draw(5, 18, 20)}
    problem = pose_arrays(q, k, v, **options)
    yield "all", tolerance.study_problem(problem, "bfloat16", profile="flash")
    yield "plain", tolerance.study(q, k, v, dtype="float16", profile="eager", atol=1e-3)


@case
def of_files():
    """Arrays that mean nothing, in files."""
    with tempfile.TemporaryDirectory() as folder:
        for suffix in files.SUFFIXES:
            arrays = files.problem("float32", key_heads=3)
            path = files.save(Path(folder), suffix, arrays)
            tensors = open_tensors(path)
            yield suffix, [tensors.dtypes, tensors.shapes, str(tensors.lead), str(tensors.others)]
            for estimator, options in {
                "softmax": {"causal": True, "window": (2, 1), "softcap": 2.0, "scale": -0.5},
                "rfa": {"features": "hyperbolic"},
                "linear": {},
            }.items():
                if estimator != "softmax":
                    arrays = {x: y for x, y in arrays.items() if x not in ("bias", "sinks")}
                    arrays["mask"] = arrays["mask"][:, :, :1]
                    tensors = open_tensors(files.save(Path(folder), suffix, arrays))
                problem = pose_tensors(tensors, estimator=estimator, **options)
                parts = read_parts(tensors, problem) if estimator == "softmax" else {}
                for index in [(0, 0), (1, 4)]:
                    yield f"{suffix} {estimator} {index}", problem.read(index)
                for name, (one, numbers) in parts.items():
                    yield f"{suffix} {name}", judge(one, numbers, "float32", "tf32", 0.05)


@case
def formats():
    x = np.array([0.0, 1.0, -1.5, 3e-5, 1e-7, 1e-41, 65504.0, 65520.0, 447.0, 470.0, 3e38, -3.39e38])
    for name, to in FORMATS.items():
        yield name, [to, to.spacing(x), to.round(x), to.holds(x)]
    for number, (run, lanes) in enumerate([(256, 1), (16, 4), (2**40, 3)]):
        kernel = PLAIN._replace(run=run, lanes=lanes)
        yield f"sums {number}", [sum_error(kernel, x, 2) for x in (1, 20, 300, 10**5)]
        yield f"walk {number}", [walk(0.5, y, 9.0, 7, lanes) for y in (0.25, -3.0, 40.0)]


# --- the rest of the package ----------------------------------------------------------------------


@case
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
            yield f"{name}, gradients", [
                x.error for x in certified.softmax_gradients(q / 3, k / 3, v, d_out, **options)
            ]
    q, k, v = qkv((2,), n=6, m=9)
    omega, log_weight = draw(6, 5, 4) / 3, draw(7, 5) / 3
    options = {"omega": omega, "log_weight": log_weight, "scale": 0.75}
    found = certified.random_feature_attention(q, k, v, **options)
    yield "features", [found.out.hi, found.error]


@case
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
    yield "sequential", stats.gandy_scott(lambda n, rng: rng.random(), size=20, rng=0)[:3]
    yield "cdf", stats.lognormal_sum_cdf(np.array([0.5, 1.0, 3.0]), 0.7)


@case
def laws():
    q, k, v = qkv((2,), n=5, m=6, d=3)
    q, k = q / 2, k / 3
    law = Gaussian(np.array([0.1, 0.0, -0.2]), np.diag([1.5, 0.8, 1.0]))
    for proposal in (None, law):
        options = {"proposal": proposal, "scale": 0.5, "mask": seen(5, 6)}
        for name in ("attention_law", "importance_sampling_law"):
            found = getattr(theory, name)(q, k, v, num_features=7, **options)
            yield f"{name} {proposal is None}", found
        yield f"gradient {proposal is None}", theory.gradient_law(
            q, k, v, draw(6, 2, 5, 3), num_features=7, **options
        )
        yield f"size {proposal is None}", theory.num_features_for(0.1, q, k, v, **options)
    yield "ra", theory.randomized_attention_law(q, k, v, num_samples=5, causal=True)
    for name in KEY_LAWS:
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
        yield f"{kind} size", theory.num_features_for_kernel(0.1, x, y, features=kind)
        norms = theory.log_norm_approximation_bias(x, y, 0.9, 1.2, features=kind)
        yield f"{kind} norms", norms
    yield "second", theory.log_second_moment(x, y)


@case
def estimators():
    """Every estimator with the options it takes, and its gradients."""
    q, k, v = qkv((2,), n=8, m=8, share=1)
    q, k = q / 2, k / 2
    for record in dict.fromkeys(ESTIMATORS.values()):
        if record.arrays != ("q", "k", "v"):
            continue
        ways = {"plain": {}, "scale": {"scale": 0.75}, "causal": {"causal": True}}
        ways |= {"mask": {"mask": seen(1, 8)}, "window": {"window": (2, 1)}, "softcap": {"softcap": 2.0}}
        ways |= {"sinks": {"sinks": SINKS}, "bias": {"bias": hidden(8, 8)}}
        for name, options in ways.items():
            if name != "plain" and not record.takes(name):
                continue
            options = options | record.sized(4) | ({"rng": 0} if record.has("random") else {})
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    yield f"{record.name} {name}", record.fn(q, k, v, **options)
                except (TypeError, ValueError) as error:
                    yield f"{record.name} {name}", str(error)


def head_of(m):
    return moments.Moments(m.count, m.mean[0], m.cov[0])


@case
def rest():
    q, k, v = qkv((2,), n=30, m=32)
    q, k = q / 2 + 0.5, k / 3 - 0.25
    a, b = moments.estimate(q), moments.estimate(k, ddof=0)
    yield "moments", [a, b, moments.merge(a, a), moments.shrink(a), moments.shrinkage_intensity(a)]
    yield "summary", [moments.summary(a), moments.mean_only(a), moments.mean_plus_trace(b)]
    for name in ("oprf", "sderf", "saderf", "optimal_gaussian"):
        fitted = getattr(adapt, name)(head_of(a), head_of(b))
        yield name, fitted
        yield f"{name} excess", adapt.expected_log_excess(head_of(a), head_of(b), fitted)
    yield "fit", adapt.fit(q, k, scale=0.75)
    yield "gauge", adapt.gauge(a.cov, b.cov)
    yield "assess", adapt.assess(q, k, v, num_features=16, rng=0)
    omega = draw(6, 12, 4)
    weights = diagnostics.log_weights(q, k, omega=omega)
    yield "diagnostics", [weights, diagnostics.effective_sample_size(weights)]
    for name in ("iid", "orthogonal", "antithetic", "simplex"):
        yield f"draw {name}", sampling.draw(6, 4, coupling=name, rng=0)
    yield "target", sampling.draw_target(q, k, num_samples=3, rng=0, causal=True)
    yield "advice", advice.study(q, k, v, sizes=(4, 16), shrink=True)


# --- what is recorded -----------------------------------------------------------------------------


def recorded():
    return json.loads(gzip.decompress(FILE.read_bytes()))


def main():
    old = recorded() if FILE.exists() else {}
    new = {name: results(name) for name in CASES}
    for name, found in new.items():
        changed = changes(name, found, old.get(name, {}))
        print(f"{name}: {len(changed)} of {len(found)} changed", *changed[:20], sep="\n  ")
    digits = json.loads(json.dumps(new), parse_float=lambda x: float(f"{float(x):.14g}"))
    FILE.write_bytes(gzip.compress(json.dumps(digits, separators=(",", ":")).encode(), mtime=0))


if __name__ == "__main__":
    main()
