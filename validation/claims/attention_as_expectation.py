r"""Reference 003, softmax attention as an expectation of random feature attention.

Sums over equidistant points integrate analytic functions that vanish at infinity with an error
that falls exponentially in 1 / step; Gauss-Hermite nodes, a polynomial rule, are slow where keys
are far apart. Two keys in any dimension leave an integral over one, the logit of f_n.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import numpy as np
from scipy import special

import refattn
from refattn import sampling
from validation import suite

EPS = float(np.finfo(float).eps)
UNIT = "eps (1 + exponents)"
BOUND = 4.0
REPEATS = {"tiny": 1, "quick": 5, "full": 50}
LENGTHS = {1: (0.5, 1.0, 2.0, 4.0), 2: (0.5, 1.0, 2.0)}  # of keys, by d
REACH = 9.5  # the mass outside is below eps
KEYS = 5
STEPS = (4.0, 2.0, 1.0, 0.5, 0.25, 0.125, 0.0625)


def tasks(level: str) -> suite.Tasks:
    """Grids in one and two dimensions, two keys in more, and responsibilities."""
    grids = [
        {"kind": "grid", "d": d, "length": length, "repeats": REPEATS[level] if d == 1 else 1}
        for d, lengths in LENGTHS.items()
        for length in (lengths if level != "tiny" else lengths[:1])
    ]
    return [
        *grids,
        {"kind": "two keys", "d": 64, "length": 1.0, "repeats": 4 * REPEATS[level]},
        {"kind": "responsibilities", "d": 16, "length": 1.0, "repeats": 4 * REPEATS[level]},
    ]


def target(q: Any, k: Any) -> sampling.Mixture:
    """Make the density p_n of one query."""
    return sampling.Mixture([sampling.Gaussian(q + key) for key in k], special.softmax(k @ q))


def f(omega: Any, q: Any, k: Any, v: Any) -> Any:
    """Evaluate f_n at each row of omega."""
    queries = np.broadcast_to(q, omega.shape)
    return refattn.randomized_attention(queries, k, v, omega=omega[:, None], scale=1.0)


def run(rng: np.random.Generator, kind: str, d: int, length: float, repeats: int) -> dict[str, Any]:
    """Largest errors over random queries and keys, in units of eps (1 + exponents)."""
    each = {"grid": grid, "two keys": two_keys, "responsibilities": responsibilities}[kind]
    found = [each(rng, d, length) for _ in range(repeats)]
    worst = {k: max(one[k] for one in found) for k in found[0]}
    return {"kind": kind, "d": d, "length": length, **worst}


def draw(rng: np.random.Generator, d: int, length: float, keys: int) -> tuple[Any, Any]:
    """Make a query, and keys of about the length given, in d dimensions."""
    q = rng.standard_normal(d) / math.sqrt(d)
    return q, length * rng.standard_normal((keys, d)) / math.sqrt(d)


def grid(rng: np.random.Generator, d: int, length: float) -> dict[str, Any]:
    """Integral of p_n f_n, and of p_n, over a grid, its step halved until two agree."""
    q, k = draw(rng, d, length, KEYS)
    v = rng.standard_normal((KEYS, 2))
    exact = refattn.softmax_attention(q[None], k, v, scale=1.0)[0]
    centres = q + k
    far = REACH + float(np.max(np.linalg.norm(centres, axis=-1)))
    unit = EPS * (1 + far * (np.linalg.norm(q) + np.max(np.linalg.norm(k, axis=-1))))
    allowed = BOUND * float(unit * np.max(np.abs(v)))
    before = None
    for step in STEPS:
        axes = [np.arange(np.min(c) - REACH, np.max(c) + REACH + step, step) for c in centres.T]
        omega = np.stack([x.ravel() for x in np.meshgrid(*axes)], -1)
        mass = step**d * np.exp(target(q, k).log_density(omega))
        total = mass @ f(omega, q, k, v)
        agree = before is not None and float(np.max(np.abs(total - before))) <= allowed
        if agree:
            break
        before = total
    error = float(np.max(np.abs(total - exact))) / allowed * BOUND if agree else math.inf
    return {"error": error, "mass": abs(float(np.sum(mass)) - 1) / float(unit)}


def two_keys(rng: np.random.Generator, d: int, length: float) -> dict[str, Any]:
    """Attention to the first of two keys as the mean of a sigmoid of normal variables."""
    q, k = draw(rng, d, length * rng.uniform(0.2, 3.0), 2)
    gap = k[0] - k[1]
    pi = refattn.softmax_attention(q[None], k, np.eye(2), scale=1.0)[0]
    sd = np.linalg.norm(gap)
    means = (q + k) @ gap - (k[0] @ k[0] - k[1] @ k[1]) / 2
    z, step = np.linspace(-REACH, REACH, 761, retstep=True)
    weight = step * np.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    total = float(pi @ (special.expit(means[:, None] + sd * z) @ weight))
    unit = EPS * (1 + float(np.max(np.abs(means)) + REACH * sd))
    return {"error": abs(total - float(pi[0])) / unit}


def responsibilities(rng: np.random.Generator, d: int, length: float) -> dict[str, Any]:
    """Weights of randomized attention against Bayes' rule for the mixture."""
    q, k = draw(rng, d, length * rng.uniform(0.2, 3.0), 8)
    omega = sampling.draw_target(q[None], k, num_samples=32, rng=rng, scale=1.0)[0]
    logs = np.stack([sampling.Gaussian(q + key).log_density(omega) for key in k], -1)
    want = special.softmax(logs + k @ q, -1)
    far = np.max(np.linalg.norm(omega, axis=-1)) + np.max(np.linalg.norm(q + k, axis=-1))
    got = f(omega, q, k, np.eye(len(k)))
    return {"error": float(np.max(np.abs(got - want)) / (EPS * (1 + far**2)))}


def judge(results: suite.Results) -> suite.Findings:
    """All is arithmetic."""
    found: dict[str, list[Any]] = defaultdict(list)
    for r in results:
        if r["kind"] == "grid":
            name = f"grid, d = {r['d']}, keys of length {r['length']:g}"
            found["expectation"].append(suite.Compared(name, r["error"], BOUND, UNIT))
            found["density"].append(suite.Compared(name, r["mass"], BOUND, UNIT))
        else:
            name = "expectation" if r["kind"] == "two keys" else "responsibilities"
            label = f"{r['kind']}, d = {r['d']}"
            found[name].append(suite.Compared(label, r["error"], BOUND, UNIT))
    worst = max(e.value for e in found["expectation"])
    remark = (
        "Softmax attention is the expectation that the text states: integrals agree to "
        f"{worst:.2g} {UNIT}, in one and two dimensions and for two keys in 64."
    )
    return suite.Findings(found, {}, remark)
