"""Verdicts on numbers that are right or wrong, and tolerances."""

import functools
import math
import tempfile
from pathlib import Path
from unittest.mock import patch

import numpy as np

from refattn import features
from refattn.files.tensors import open_tensors
from refattn.judge.rounding import PROFILES, predict
from refattn.judge.rounding.formats import FORMATS
from refattn.judge.rounding.problems import pose_arrays, pose_gradients
from refattn.judge.verification import judge, judging, verify
from refattn.judge.verification import tolerances as tolerance_module
from refattn.judge.verification.choice import BACKWARD_PROFILES, choose_profiles, is_narrow
from refattn.judge.verification.findings import Numbers
from refattn.judge.verification.reading import pose_tensors, read_parts
from refattn.judge.verification.z_scores import z_by_row, z_of_head
from tests.files import problems as files
from tests.recorded.problems import KERNELS, SINKS, coarse, draw, hidden, qkv, seen

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
    "scale of 1": ({"scale": 0.75}, "bfloat16", "flash", {"scale": 1.0}, 1.0),
    "scale of 1 / d": ({}, "bfloat16", "flash", {"scale": 0.25}, 1.0),
    "sink by the scale": ({"sinks": SINKS}, "bfloat16", "flash", {"sinks": SINKS / 2}, 1.0),
    "sink of 2": (
        {"sinks": SINKS}, "bfloat16", "flash", {"sinks": SINKS * math.log2(math.e)}, 1.0
    ),
    "inverted": ({"mask": seen(40, 36)}, "bfloat16", "flash", {"mask": ~seen(40, 36)}, 1.0),
    "no mask": ({"mask": seen(40, 36)}, "bfloat16", "flash", {"mask": None}, 1.0),
    "left": ({"window": (6, 3)}, "bfloat16", "flash", {"window": (7, 3)}, 1.0),
    "one more": ({}, "bfloat16", "flash", {"mask": np.tri(40, 36, -3, dtype=bool)}, 1.0),
    "one less": ({}, "bfloat16", "flash", {"mask": np.tri(40, 36, -5, dtype=bool)}, 1.0),
    "first": (
        {"causal": True}, "bfloat16", "flash",
        {"causal": False, "mask": np.tri(40, 36, dtype=bool)}, 1.0,
    ),
    "features": (
        {"omega": draw(6, 5, 4, size=0.5), "scale": 0.5}, "bfloat16", "flash", {"scale": 0.75}, 1.0
    ),
    "map": ({"feature_map": features.elu_features}, "bfloat16", "flash", {}, 1.0),
    "nan": ({}, "bfloat16", "flash", {}, np.where(np.arange(40)[:, None] == 3, np.nan, 1.0)),
    "zero": ({}, "bfloat16", "flash", {}, 0.0),
}  # fmt: skip


def without_reasons(case):
    """Leave out the search for causes, which takes most of the time of numbers that fail."""

    @functools.wraps(case)
    def run():
        forward = {"explain": lambda problem, numbers, verdict, *_: verdict}
        backward = {"explain_gradients": lambda parts, verdicts, *_: dict(verdicts)}
        with patch.multiple(judging, **forward, **backward):
            return [*case()]

    return run


@without_reasons
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
        yield f"{name}, z", z_by_row(problem, numbers, dtype, profile or "math")
        yield f"{name}, z of head", z_of_head(problem, numbers, dtype, profile or "fp8", (1,))
        yield f"{name}, words", str(verdict._replace(seconds=0.0))


def choices():
    for dtype in FORMATS:
        chosen = choose_profiles(dtype, "float32", None)
        back = choose_profiles(dtype, dtype, BACKWARD_PROFILES[is_narrow(dtype)])
        one = choose_profiles(dtype, dtype, PROFILES["math"])
        yield dtype, [" ".join(x) for x in (chosen, back, one)]
        yield f"{dtype}, out", [str(x.out) for x in chosen.values()]


@without_reasons
def profiles():
    q, k, v = qkv((2,), n=20, m=24, share=2)
    problem = pose_arrays(q, k, v, causal=True, window=(9, None))
    noise = 2.0**-9 * draw(9, 2, 20, 3)
    for name, profile in PROFILES.items():
        yield f"{name} of bfloat16", profile.roundings("bfloat16")
        law = predict(q, k, v, dtype="bfloat16", profile=name, causal=True, window=(9, None))
        yield name, law
        numbers = Numbers(FORMATS["bfloat16"].round(law.out + noise).__getitem__, "bfloat16")
        yield f"{name}, verdict", judge(problem, numbers, "bfloat16", name, 0.05)


TRIED = None, "flash-32", "eager"  # by gradients of which one is wrong


@without_reasons
def backward():
    """Gradients with noise of 2^-9, of which one is wrong."""
    q, k, v = qkv((4,), n=24, m=20, share=2)
    to = FORMATS["bfloat16"].round
    for name, options in {
        "plain": {"causal": True},
        "cap": {"softcap": 2.0, "sinks": np.array([1.0, 0.0, 2.0, -1.0]), "scale": 0.75},
    }.items():
        problem = pose_arrays(q, k, v, **options)
        law = predict(q, k, v, dtype="bfloat16", **options)
        out, d_out = to(law.out), draw(11, *law.out.shape)
        arrays = {"q": q, "k": k, "v": v, "out": out, "d_out": d_out}
        arrays["lse"] = FORMATS["float32"].round(law.lse + 1e-6)
        shapes = {"dq": q.shape, "dk": k.shape, "dv": v.shape}
        posed = pose_gradients(problem, shapes, d_out.__getitem__, None, "float64")
        got = {x: np.empty(y) for x, y in shapes.items()}
        for of, one in posed.items():
            for index in np.ndindex(one.lead):
                got[of][index] = one.exact(index, KERNELS["double"], slice(0, one.shape[0]))
            got[of] = to(got[of] * (1 + 2.0**-9 * draw(12, *got[of].shape)))
        for wrong in ("", "dk"):
            given = got | {x: to(1.25 * got[x]) for x in [wrong] if x}
            for profile in (TRIED if wrong else ("recomputed", "upcast"))[name == "cap" :]:
                given |= arrays | options | {"dtype": "bfloat16", "profile": profile}
                found = verify(**given, alpha=0.05)
                yield f"{name} {wrong} {profile}", found
                words = {x: y._replace(seconds=0.0) for x, y in found.parts.items()}
                yield f"{name} {wrong} {profile}, words", str(found._replace(parts=words))


@without_reasons
def tolerances():
    q, k, v = qkv((2,), n=18, m=20)
    options = {"causal": True, "window": (9, None), "softcap": 3.0, "sinks": SINKS, "scale": 0.5}
    options |= {"mask": seen(18, 20), "bias": draw(5, 18, 20)}
    problem = pose_arrays(q, k, v, **options)
    yield "all", tolerance_module.find_tolerance(problem, "bfloat16", profile="flash")
    yield "usual", tolerance_module.USUAL


def more_tolerances():
    q, k, v = qkv((2,), n=18, m=20)
    one = {"q": q[0, :9], "k": k[0], "v": v[0]}
    yield "plain", tolerance_module.tolerance(**one, dtype="float16", profile="eager", atol=1e-3)


def of_files():
    """Arrays that mean nothing, in files."""
    with tempfile.TemporaryDirectory() as folder:
        for suffix in files.SUFFIXES:
            dtype = "float32" if suffix == "npz" else "bfloat16"
            arrays = files.problem(dtype, (1, 4), 2)
            arrays |= {"out": files.problem()["out"][:1, :4], "lse": files.problem()["lse"][:1, :4]}
            for estimator, options in {
                "softmax": {"causal": True, "window": (2, 1), "softcap": 2.0, "scale": -0.5},
                "rfa": {"features": "hyperbolic"},
                "linear": {},
            }.items():
                if estimator != "softmax":
                    unused = ("bias", "sinks", "dq", "dk", "dv")
                    arrays = {x: y for x, y in arrays.items() if x not in unused}
                    arrays["mask"] = arrays["mask"][:, :, :1]
                tensors = open_tensors(files.save(Path(folder), suffix, arrays))
                place = f"{suffix} {estimator}"
                yield place, [tensors.dtypes, tensors.shapes, str(tensors.lead)]
                problem = pose_tensors(tensors, estimator=estimator, **options)
                yield f"{place}, problem", problem._replace(read=None, feature_map=None)
                for index in [(0, 0), (0, 3)]:
                    yield f"{place} {index}", problem.read(index)
                for name, (one, numbers) in read_parts(tensors, problem).items():
                    types = [numbers.out_dtype, numbers.lse_dtype, str(numbers.lse is None)]
                    yield f"{place} {name}, types", types
                    yield f"{place} {name}", judge(one, numbers, dtype, "tf32", 0.05)
