"""What attention costs, in time and in memory, with random features and without: reference 000."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from refattn import random_feature_attention, sampling, softmax_attention
from validation import plotting, suite

from ._clock import exponent, linear_form, peak, rounds

BETWEEN = 1.5  # halfway between linear and quadratic
HALF = 0.5  # halfway between constant and linear
D, R = 64, 64
PARAMETERS = {"L": "length", "r": "r", "D": "d"}  # of `forms`, by axis
REPEATS = {"tiny": 1, "quick": 5, "full": 11}
TOP = {"tiny": 8, "quick": 11, "full": 12}  # sequences of dense forms have up to 3 * 2^top
LINEAR, DENSE = ("textbook, random features", "refattn, random features"), ("textbook", "refattn")


def textbook_features(q: Any, k: Any, v: Any, omega: Any) -> Any:
    """Positive features, all in memory."""
    phi_q, phi_k = (np.exp(x @ omega.T - np.sum(x * x, axis=-1, keepdims=True) / 2) for x in (q, k))
    return linear_form(phi_q, phi_k, v)


def textbook_softmax(q: Any, k: Any, v: Any) -> Any:
    """Softmax attention, the matrix of weights in memory."""
    scores = q @ k.T
    scores -= np.max(scores, axis=-1, keepdims=True)
    weights = np.exp(scores)
    return (weights @ v) / np.sum(weights, axis=-1, keepdims=True)


def forms(length: int, d: int, r: int, dense: bool) -> dict[str, Callable[[], Any]]:
    """Calls of the two forms on arrays of that size, in single precision."""
    rng = np.random.default_rng(5)
    q, k, v = (0.5 * rng.standard_normal((3, length, d))).astype(np.float32)
    if dense:
        return {
            DENSE[0]: partial(textbook_softmax, q, k, v),
            DENSE[1]: partial(softmax_attention, q, k, v, scale=1.0),
        }
    omega = sampling.draw(r, d, rng=6).omega.astype(np.float32)
    return {
        LINEAR[0]: partial(textbook_features, q, k, v, omega),
        LINEAR[1]: partial(random_feature_attention, q, k, v, omega=omega, scale=1.0),
    }


def tasks(level: str) -> suite.Tasks:
    """Time over each size and memory over the length."""
    top, repeats = TOP[level], REPEATS[level]
    dense = [3 * 2**p for p in range(top - 3, top + 1)]
    linear = [3 * 2**p for p in range(top - 3, top + 4, 2)]
    longer = [3 * 2**p for p in range(top, top + 4)]
    across = [16, 64, 256]
    return [
        {"axis": "L", "sizes": dense, "dense": True, "repeats": repeats},
        {"axis": "L", "sizes": linear, "dense": False, "repeats": repeats},
        {"axis": "r", "sizes": across, "dense": False, "repeats": repeats, "length": 2 * 2**top},
        {"axis": "D", "sizes": across, "dense": False, "repeats": repeats, "length": 2 * 2**top},
        {"axis": "D", "sizes": across, "dense": True, "repeats": repeats, "length": 2**top},
        {"axis": "L", "sizes": dense, "dense": True, "repeats": 0},
        {"axis": "L", "sizes": longer, "dense": False, "repeats": 0},
    ]


def run(
    rng: Any, axis: str, sizes: Sequence[int], dense: bool, repeats: int, length: int = 0
) -> dict[str, Any]:
    """Seconds, or MiB where nothing is repeated, of each form and size."""
    shape = {"length": length, "d": D, "r": R}
    calls = {size: forms(dense=dense, **shape | {PARAMETERS[axis]: size}) for size in sizes}
    times = rounds(calls, repeats) if repeats else {}
    values = {name: np.median(each, axis=0).tolist() for name, each in times.items()}
    if not repeats:  # without the result, L x D, which every form returns
        values = {
            name: [peak(calls[size][name]) - 4 * size * D / 2**20 for size in sizes]
            for name in calls[sizes[0]]
        }
    unit = "s" if repeats else "MiB"
    return {"axis": axis, "unit": unit, "sizes": list(sizes), "values": values, "rounds": times}


def judge(results: suite.Results) -> suite.Findings:
    """Exponents against the middle between two claims."""
    evidence: suite.Evidence = defaultdict(list)
    found = {}
    for r in results:
        for name, values in r["values"].items():
            slope = exponent(r["sizes"], np.maximum(values, 1e-9))
            found[r["unit"], r["axis"], name] = slope
            label, linear = f"{name}: exponent of {r['axis']}", name in LINEAR
            row = (label, slope, BETWEEN)
            kind: Callable[..., suite.Piece] = suite.Compared
            if r["unit"] == "s":
                key = "time" if linear else "dense time"
                each = np.array([exponent(r["sizes"], times) for times in r["rounds"][name]])
                if r["axis"] == "L" and not linear:  # from the middle of 1 and 2 to that of 2 and 3
                    row, each = (f"{label}, from 2", abs(slope - 2), HALF), abs(each - 2)
                spread = max(0.0, row[1] - float(np.min(each))) if len(each) > 1 else math.inf
                kind = partial(suite.Timed, spread=spread)
            elif "refattn" in name:
                key, row = "memory of refattn", (label, slope, HALF)
            elif linear:
                key = "memory"
            else:
                key, row = "dense memory", (f"2 - {label}", 2 - slope, 2 - BETWEEN)
            evidence[key].append(kind(*row))
    time, space = (
        [found[unit, "L", name] for name in (LINEAR[0], LINEAR[1], DENSE[0])]
        for unit in ("s", "MiB")
    )
    remark = (
        f"Time grows as L to the power {time[0]:.2f} (textbook) and {time[1]:.2f} (refattn) with "
        f"random features and {time[2]:.2f} without, as the reference says; memory beside "
        f"arguments and result as {space[0]:.2f} and {space[2]:.2f} in the textbook forms, and as "
        f"{space[1]:.2f} in refattn, which works in blocks."
    )
    return suite.Findings(evidence, {"runs": list(results)}, remark)


def plot(data: dict[str, Any]) -> Any:
    """Time and memory over the length, with lines of exponent 1 and 2."""
    figure, ((left, right),) = plotting.panels(1, 2, size=(8.4, 3.8))
    colours = dict(zip((*LINEAR, *DENSE), plotting.COLOURS, strict=False))
    for axes, unit, label in (
        (left, "s", "seconds"),
        (right, "MiB", "MiB beside arguments and result"),
    ):
        for r in data["runs"]:
            if r["axis"] != "L" or r["unit"] != unit:
                continue
            for name, values in r["values"].items():
                title = name if name in LINEAR else f"{name}, softmax"
                values = np.maximum(values, 1e-3 if unit == "MiB" else 1e-9)
                axes.plot(r["sizes"], values, "o-", color=colours[name], label=title)
            name = LINEAR[0] if LINEAR[0] in r["values"] else DENSE[0]
            power = 1 if name in LINEAR else 2
            sizes = np.array(r["sizes"], dtype=float)
            line = r["values"][name][-1] * (sizes / sizes[-1]) ** power
            axes.plot(sizes, line, ":", color=plotting.INK, label=f"exponent {power}")
        axes.set(xscale="log", yscale="log", xlabel=f"length L (D = {D}, r = {R})", ylabel=label)
        axes.legend(fontsize=7)
    return figure


ALONE = True
