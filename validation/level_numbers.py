"""The measured level of `refattn.verify`: how often it fails what is right.

Run as ``python -m validation.level_numbers --runs 1500``. Right outputs and gradients are drawn of
emulated kernels, over profiles, units that cut sums, types, sizes, options and values, and no
profile is named. Some are in float64, some have keys and values in 8 bits with scales. Beside the
profiles there are kernels between two of them, and exact results that are rounded once. Each run
has a seed of its own, so that a failure can be drawn again: ``--first``. There may be alpha
failures a run. Where all profiles that were tried have small p-values, the file is judged again at
larger levels. The exit status is 1 if a run fails at 1e-6.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

import refattn
from refattn.judge.rounding.formats import FORMATS
from refattn.judge.rounding.hardware import UNITS
from refattn.judge.rounding.profiles import LINEAR
from refattn.judge.verification.choice import BACKWARD_PROFILES, is_narrow, usual_profiles

from . import plotting, results

cutting: Any = import_module("tests.judge.rounding.cutting")
rounded: Any = import_module("tests.judge.rounding.rounded")
doubles: Any = import_module("tests.judge.verification.test_float64")
caches: Any = import_module("tests.judge.verification.test_types")
estimators: Any = import_module("tests.judge.rounding.estimators")
linear: Any = import_module("tests.judge.rounding.test_linear")
recurrences: Any = import_module("tests.judge.verification.test_recurrent")
ALPHAS = (1e-6, 0.001, 0.01, 0.05)
PAIRS = 2**18  # of queries and keys
_ENOUGH = 100  # files with a kind of test that is drawn
NARROW = ("bfloat16", "float16")
EIGHT_BITS = ("float8_e4m3fn", "float8_e5m2", "int8")
VALUES = ("normal", "one sign", "mostly one", "integers")
CUT = {x: UNITS[x][0] for x in ("volta", "ampere", "hopper")}
Draw = dict[str, Any]


def exact(case: Any, dtype: str) -> tuple[Any, None]:
    """Round the exact result once."""
    return rounded.stepwise(case, rounded.Steps(out=FORMATS[dtype].round)), None


def between(case: Any, dtype: str) -> tuple[Any, None]:
    """Take an exponential between those of math and of tf32, and one that is exact at 0."""

    def off(x: Any) -> Any:
        return x * (1 + 2.0**-21 * np.cos(1e3 * x))

    return rounded.stepwise(case, rounded.Steps(softmax=off, out=FORMATS[dtype].round)), None


def cut(case: Any, dtype: str, unit: str) -> tuple[Any, None]:
    """Sum as a matrix unit does."""
    return cutting.flash(case, dtype, CUT[unit]), None


SUMS = {"online": rounded.online, "serial": "serial", "math": "math", "recomputed": "recomputed"}
MORE_KERNELS = {
    "exact": exact,
    "between": between,
    **{f"flash@{x}": partial(cut, unit=x) for x in CUT},
}
OUTPUTS = [
    *((x, y) for y in (*NARROW, "float32") for x in usual_profiles(y) if x in rounded.KERNELS),
    *((x, y) for y in (*NARROW, "float32") for x in ("exact", "between")),
    *((f"flash@{x}", y) for x in CUT for y in NARROW),
]
GRADIENTS = [
    (x, y)
    for y in (*NARROW, "float32")
    for x in BACKWARD_PROFILES[is_narrow(y)]
    if x in rounded.BACKWARD
]


def draw_values(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> Any:
    """Draw numbers of one kind."""
    if kind == "one sign":
        return rng.uniform(0.5, 1, shape)
    if kind == "integers":
        return rng.integers(-3, 4, shape) * 1.0
    return rng.standard_normal(shape) + 3 * (kind == "mostly one")


def draw_options(rng: np.random.Generator, heads: int, n: int, m: int, single: bool) -> Draw:
    """Draw options, most of them absent."""
    given: Draw = {"causal": bool(rng.random() < 0.4)}
    makers: dict[str, Callable[[], Any]] = {
        "scale": lambda: float(rng.uniform(0.05, 1)),
        "mask": lambda: rng.random((n, m)) < rng.choice([0.3, 0.9]),
        "window": lambda: (int(rng.integers(0, m + 1)), int(rng.integers(0, 20))),
        "softcap": lambda: float(rng.uniform(2, 30)),
        "sinks": lambda: FORMATS["float32"].round(rng.standard_normal(heads)),
        "bias": lambda: FORMATS["bfloat16"].round(rng.standard_normal((n, m))),
    }
    if single:  # the emulated unit has scores of its own
        return given
    return given | {x: make() for x, make in makers.items() if rng.random() < 0.12}


def draw_double(rng: np.random.Generator) -> tuple[str, Draw]:
    """Draw a file in float64."""
    name = str(rng.choice([*doubles.KERNELS]))
    n, m, d, d_v = (int(2 ** rng.uniform(0, x)) for x in (6, 9, 6, 6))
    causal, size = bool(rng.random() < 0.4) and n <= m, float(rng.choice([0.3, 1.0, 3.0]))
    q, k = (size * rng.standard_normal((2, x, d)) for x in (n, m))
    v = draw_values(rng, str(rng.choice(VALUES)), (2, m, d_v))
    out = doubles.KERNELS[name](q, k, v, causal=causal)
    words = f"{name} float64 {n} x {m} x {d}, {d_v}, q and k times {size:g}, causal {causal}"
    return words, {"q": q, "k": k, "v": v, "out": out, "causal": causal}


def draw_cache(rng: np.random.Generator) -> tuple[str, Draw]:
    """Draw a file with keys and values in 8 bits."""
    types = [str(rng.choice(x)) for x in (NARROW, EIGHT_BITS, [*caches.SHARES])]
    name, cast = str(rng.choice(usual_profiles(types[0]))), bool(rng.random() < 0.5)
    words = f"{name} of a cache, {' '.join(types)}, cast {cast}"
    return words, caches.cache(*types, name=name, cast=cast, seed=int(rng.integers(2**31)))


def draw_cut_gradients(rng: np.random.Generator) -> tuple[str, Draw]:
    """Draw gradients of heads that may share keys, whose sums a matrix unit cuts."""
    unit, dtype, kind = (str(rng.choice(x)) for x in ([*CUT], NARROW, VALUES))
    share, m, d = (
        int(rng.choice([1, 1, 2, 4])),
        int(2 ** rng.uniform(4, 9)),
        int(rng.choice([8, 32])),
    )
    n, to, causal = int(min(m, 2 ** rng.uniform(0, 7))), FORMATS[dtype], bool(rng.random() < 0.4)
    q, k, v, g = (
        to.round(draw_values(rng, x, (heads, rows, d)))
        for x, heads, rows in (("", share, n), ("", 1, m), (kind, 1, m), ("", share, n))
    )
    heads = [
        cutting.backward(rounded.Case(q[h], k[0], v[0], causal=causal), g[h], dtype, CUT[unit])
        for h in range(share)
    ]
    got = {x: np.stack([head[x] for head in heads]) for x in heads[0]}
    got |= {x: to.round(np.sum(got[x], 0, keepdims=True)) for x in ("dk", "dv")}
    words = f"gradients@{unit} {dtype} {share}/1 x {n} x {m} x {d}, {kind}, causal {causal}"
    return words, {"q": q, "k": k, "v": v, "d_out": g, "dtype": dtype, "causal": causal, **got}


def draw_sums(rng: np.random.Generator) -> tuple[str, Draw]:
    """Draw a file in float32 of narrow numbers or not, with many keys that are added in turn."""
    inputs, name = str(rng.choice([*NARROW, "float32"])), str(rng.choice([*SUMS]))
    to, size, mean = FORMATS[inputs], float(rng.choice([0.3, 1.0, 3.0, 8.0])), int(rng.choice(3))
    m, n, d = int(2 ** rng.uniform(10, 12)), int(rng.integers(1, 24)), int(rng.choice([8, 32]))
    q, k, v = (to.round(rng.standard_normal((2, x, d))) for x in (n, m, m))
    q, v = to.round(size * q), to.round(v + mean)
    out, lse = rounded.of_heads(SUMS[name], q, k, v, "float32")
    given = {"out": out.astype(np.float32)} | ({} if lse is None else {"lse": lse})
    types = dict(zip("qkv", (caches.stored(x, inputs) for x in (q, k, v)), strict=True))
    words = f"{name} float32 of {inputs}, 2 x {n} x {m} x {d}, v + {mean}, q times {size:g}"
    return words, types | given


def draw_steps(rng: np.random.Generator) -> tuple[str, Draw]:
    """Draw linear attention step by step, or a recurrence."""
    seed, causal = int(rng.integers(2**31)), bool(rng.random() < 0.5)
    form, dtype = str(rng.choice([*LINEAR, "eager-narrow"])), str(rng.choice(NARROW))
    kind, mean = int(rng.choice(3)), float(rng.choice([0, 2]))
    if kind == 0:
        size = int(rng.choice([8, 16, 32, 64]))
        return f"gated delta rule in steps, d {size}", recurrences.of_operands(seed, size)
    if kind == 1:
        return f"drifting sums of log decays, mean {mean:g}", recurrences.drifting(seed, mean)
    return f"{form} {dtype}, causal {causal}", linear.by_steps(form, dtype, causal, mean, seed=seed)


def draw_estimator(rng: np.random.Generator) -> tuple[str, Draw]:
    """Draw a file of an estimator whose law is derived from its text."""
    name, dtype = (
        str(rng.choice(estimators.NAMES)),
        str(rng.choice([*NARROW, "float32", "float32"])),
    )
    style, causal = str(rng.choice([*estimators.STYLES[dtype]])), bool(rng.random() < 0.4)
    n, m, d, d_v, samples = (
        int(2 ** rng.uniform(*x)) for x in ((0, 5), (1, 6), (1, 5), (1, 5), (0, 5))
    )
    count, large = int(rng.integers(1, 5)), float(rng.choice([0.3, 1.0, 3.0]))
    sizes: Draw = {
        "n": min(n, m),
        "m": m,
        "d": d,
        "d_v": d_v,
        "window": int(rng.integers(1, m + 1)),
    }
    sizes |= {"samples": count * samples, "count": count, "large": large}
    seed = int(rng.integers(2**31))
    given = estimators.draw(name, style, dtype, seed, causal=causal, **sizes)
    return f"{name} {dtype} {style}, causal {causal}, {sizes}", given


def draw_file(seed: int) -> tuple[str, Draw]:
    """Draw a right file, and say what it is."""
    rng = np.random.default_rng(seed)
    more = [draw_double, draw_cache, draw_cut_gradients, draw_sums, draw_steps, draw_estimator]
    draw = [*more, *[draw_usual] * 7][seed % 13]
    return draw(rng)


def draw_usual(rng: np.random.Generator) -> tuple[str, Draw]:
    """Draw a file in one type of up to 32 bits, of any profile and with any options."""
    backward = rng.random() < 0.3
    name, dtype = (GRADIENTS if backward else OUTPUTS)[
        rng.integers(len(GRADIENTS if backward else OUTPUTS))
    ]
    share, kv = int(rng.choice([1, 1, 2, 4])), int(rng.integers(1, 3))
    m = int(2 ** rng.uniform(0, 8 if backward else 11))
    n = int(min(2 ** rng.uniform(0, 8), max(1, PAIRS // (share * kv * m))))
    n = min(n, 48) if name == "serial" or backward or "@" in name else n
    m = min(m, 300) if name == "serial" else m
    d, d_v, kind = *(int(x) for x in rng.choice([8, 16, 32, 64], 2)), str(rng.choice(VALUES))
    to, size = FORMATS[dtype], rng.choice([0.3, 1.0, 3.0])
    q = to.round(
        size * draw_values(rng, "integers" if kind == "integers" else "", (share * kv, n, d))
    )
    k = to.round(draw_values(rng, "integers" if kind == "integers" else "", (kv, m, d)))
    v = to.round(draw_values(rng, kind, (kv, m, d_v)))
    options = draw_options(rng, share * kv, n, m, "@" in name)
    words = f"{name} {dtype} {share * kv}/{kv} x {n} x {m} x {d}, {d_v}, {kind}, q times {size:g}, "
    words += " ".join(x for x, y in options.items() if y is not False)
    with np.errstate(all="ignore"):
        if backward:
            g = to.round(rng.standard_normal((share * kv, n, d_v)))
            by_head = [False, True, "each"][rng.integers(3)]
            words += f", by head {by_head}"
            found = rounded.made(name, q, k, v, g, dtype, by_head=by_head, **options)
            got: Draw = {"d_out": g} | found
        else:
            kernel = MORE_KERNELS.get(name, name)
            out, lse = rounded.of_heads(kernel, q, k, v, dtype, **options)
            got = {"out": out} | ({} if lse is None or rng.random() < 0.5 else {"lse": lse})
    return words, {"q": q, "k": k, "v": v, "dtype": dtype, **got, **options}


def smallest(verdict: Any) -> float:
    """Return the p-value of a file: of the parts, each by the profile that explains it best."""
    parts = [*verdict.parts.values()] if verdict.parts else [verdict]
    return min(1.0, min(max(x.trials.values(), default=1.0) for x in parts) * len(parts))


def judge(given: Draw) -> tuple[str, int, Any]:
    """Judge a file: the verdict at 1e-6, at how many levels it fails, and by what explains it best.

    A profile that explains it at 1e-6 is not always that of the kernel: others are tried where it
    would fail at a larger level.
    """
    first = found = refattn.verify(**given, alpha=ALPHAS[0])
    levels = 0
    for alpha in reversed(ALPHAS):
        if smallest(found) > alpha and found.verdict != "FAIL":
            break
        again = refattn.verify(**given, alpha=alpha)
        if again.verdict != "FAIL":
            found = again
            break
        levels += 1
    return first.verdict, levels, found


def smallest_by_kind(verdict: Any) -> dict[str, float]:
    """Return the smallest p-value of each kind of test, by Bonferroni, of a file that passes."""
    found: dict[str, list[float]] = {}
    for of, part in (verdict.parts or {verdict.of: verdict}).items():
        for test in part.tests:
            about = "outputs" if of in ("out", "state") else "gradients"
            found.setdefault(f"{about}: {test.name}", []).append(test.p_value)
    return {x: min(1.0, len(p) * min(p)) for x, p in found.items()}


def draw_figure(runs: Sequence[Draw]) -> Any:
    """Draw how often the p-values of right files are at most x: bounds say, at most x."""
    figure, ((axes,),) = plotting.panels()
    grid = np.geomspace(1 / len(runs), 1, 200)
    kinds = Counter(x for run in runs for x in run["p"])
    kinds = Counter({x: count for x, count in kinds.items() if count >= _ENOUGH})
    for kind, count in kinds.items():
        p = np.sort([run["p"][kind] for run in runs if kind in run["p"]])
        axes.plot(grid, np.searchsorted(p, grid, "right") / count, color=plotting.PALE, lw=1)
    least = np.sort([run["least"] for run in runs])
    shares = np.searchsorted(least, grid, "right") / len(runs)
    axes.plot(grid, shares, color=plotting.COLOURS[0], lw=2, label="smallest of a file, corrected")
    axes.plot([], [], color=plotting.PALE, label=f"each of {len(kinds)} kinds of tests")
    axes.plot(grid, grid, color=plotting.INK, lw=1, ls="--", label="uniform: at most alpha fail")
    axes.set(xscale="log", yscale="log", xlim=(grid[0], 1), ylim=(0.5 / len(runs), 1.5))
    axes.set(xlabel="p", ylabel=f"share of {len(runs):,} right files with a p-value at most p")
    axes.legend()
    return figure


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Measure the level of refattn.verify.")
    parser.add_argument("--runs", type=int, default=1500)
    parser.add_argument("--first", type=int, default=0, help="seed of the first run")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so many")
    parser.add_argument("--save", type=Path, help="add a line of JSON for each run")
    parser.add_argument("--figure", nargs="+", type=Path, help="draw saved runs, and run nothing")
    return parser.parse_args()


def main() -> int:
    """Draw and judge files, and print what failed."""
    asked = parse_arguments()
    if asked.figure:
        path, *saved = asked.figure
        runs = [json.loads(x) for file in saved for x in file.read_text("utf-8").splitlines()]
        results.write(path.parent, {path.name: ("p-values of right files", draw_figure(runs))})
        return 0
    warnings.simplefilter("ignore")
    start, least, verdicts, alarms, count = time.monotonic(), 1.0, Counter[str](), [0] * 4, 0
    for seed in range(asked.first, asked.first + asked.runs):
        if time.monotonic() - start > asked.seconds:
            break
        words, given = draw_file(seed)
        verdict, levels, found = judge(given)
        p = smallest(found)
        count, least = count + 1, min(least, p)
        verdicts[verdict] += 1
        for at in range(levels):
            alarms[-1 - at] += 1
        if levels:
            print(f"{seed}: {verdict}, p {p:.2g}, {words}", flush=True)
        if asked.save:
            about = {"seed": seed, "verdict": verdict, "least": p, "p": smallest_by_kind(found)}
            with asked.save.open("a", encoding="utf-8") as file:
                file.write(json.dumps(about) + "\n")
    print(f"{count} runs from {asked.first}, {time.monotonic() - start:.0f} s: {dict(verdicts)}")
    for alpha, failed in zip(ALPHAS, alarms, strict=True):
        print(f"alpha {alpha:g}: {failed} false alarms, at most {alpha * count:.3g} expected")
    print(f"smallest p-value {least:.2g}, at least {1 / (count + 1):.2g} expected")
    return int(verdicts["FAIL"] > 0)


if __name__ == "__main__":
    sys.exit(main())
