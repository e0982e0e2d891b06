"""What randomized attention, LARA, RFA and softmax attention cost, by reference 003 on a GPU.

Here attention alone is timed, on one thread, with one sample of RA for each query, in the forms of
`refattn` and, where two quadratic forms are compared, as they are written down. `refattn` draws
exactly and evaluates any number of samples, in blocks, and so costs more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from refattn import estimators, linear_randomized_attention, softmax_attention
from validation import plotting, suite

from ._clock import exponent, peak, seconds

D, C = 64, 64
ROWS = 128  # at once, so that what is timed is not the making of large arrays
BETWEEN = 1.5  # halfway between linear and quadratic
HALF = 0.5  # from 2 to the middle of 1 and 2, and of 2 and 3; and "much faster"
MARGINAL = math.sqrt(0.1)  # between a tenth, and all, the overhead of RA over softmax attention
ROOT = math.sqrt(2.0)  # in ratios, halfway between no difference and twice
DENSE, LINEAR = {"tiny": (96, 192), "quick": (768, 1536, 3072), "full": (1024, 2048, 4096)}, 4
REPEATS = {"tiny": 1, "quick": 3, "full": 7}
SOFTMAX, RA, RFA, BALANCE, QUERY = "softmax", "RA", "RFA", "LARA, balance", "LARA, query"
TEXTBOOK = {SOFTMAX: "textbook softmax", RA: "textbook RA"}


def textbook_weights(scores: Any) -> Any:
    """Softmax over the last axis."""
    weights = np.exp(scores - np.max(scores, axis=-1, keepdims=True))
    return weights / np.sum(weights, axis=-1, keepdims=True)


def textbook_softmax(q: Any, k: Any, v: Any, at_once: int = ROWS) -> Any:
    """Softmax attention, some rows of the matrix of weights at once."""
    return np.concatenate(
        [textbook_weights(q[i : i + at_once] @ k.T) @ v for i in range(0, len(q), at_once)]
    )


def textbook_randomized(
    q: Any, k: Any, v: Any, rng: np.random.Generator, at_once: int = ROWS
) -> Any:
    """RA: a key drawn from each row of weights, noise, and the weights of its frequency."""
    half_norms = np.sum(k * k, -1) / 2
    out = []
    for i in range(0, len(q), at_once):
        rows = q[i : i + at_once]
        total = np.cumsum(textbook_weights(rows @ k.T), axis=-1)
        drawn = np.sum(total < rng.random((len(rows), 1)) * total[:, -1:], axis=-1)
        omega = rows + k[drawn] + rng.standard_normal(rows.shape)
        out.append(textbook_weights(omega @ k.T - half_norms) @ v)
    return np.concatenate(out)


def forms(rng: np.random.Generator, n: int, c: int, dense: bool) -> dict[str, Callable[..., Any]]:
    """Calls on n queries and keys: the linear forms, or all that are compared with softmax."""
    q, k, v = rng.standard_normal((3, n, D)) / D**0.25
    lara = partial(linear_randomized_attention, q, k, v, num_proposals=c, rng=rng, scale=1.0)
    omega = rng.standard_normal((c, D))
    calls: dict[str, Callable[..., Any]] = {
        RFA: partial(estimators.random_feature_attention, q, k, v, omega=omega, scale=1.0),
        BALANCE: partial(lara, weighting="balance"),
        QUERY: partial(lara, weighting="query"),
    }
    if dense:
        options: dict[str, Any] = {"num_samples": 1, "rng": rng, "scale": 1.0}
        calls |= {
            SOFTMAX: partial(softmax_attention, q, k, v, scale=1.0),
            RA: partial(estimators.randomized_attention, q, k, v, **options),
            TEXTBOOK[SOFTMAX]: partial(textbook_softmax, q, k, v),
            TEXTBOOK[RA]: partial(textbook_randomized, q, k, v, rng),
        }
    return calls


def tasks(level: str) -> suite.Tasks:
    """All forms over N, the linear ones over greater N, and over C."""
    dense, repeats = DENSE[level], REPEATS[level]
    top = LINEAR * dense[-1]
    return [
        {"axis": "N", "sizes": dense, "dense": True, "repeats": repeats},
        {"axis": "N", "sizes": (top // 8, top // 4, top // 2, top), "repeats": 2 * repeats + 1},
        {"axis": "C", "sizes": (16, 64, 256), "length": top // 2, "repeats": repeats},
        {"axis": "memory", "sizes": dense, "dense": True, "repeats": 0},
    ]


def run(
    rng: np.random.Generator,
    axis: str,
    sizes: Sequence[int],
    repeats: int,
    length: int = 0,
    dense: bool = False,
) -> dict[str, Any]:
    """Seconds of each form and size, or MiB, for all queries at once as written down."""
    shapes = {size: (length, size) if axis == "C" else (size, C) for size in sizes}
    calls = {size: forms(rng, *shape, dense) for size, shape in shapes.items()}
    if not repeats:
        whole = {
            n: {x: partial(f, at_once=n) for x, f in calls[n].items() if x in TEXTBOOK.values()}
            for n in sizes
        }
        memory = {x: [peak((calls[n] | whole[n])[x]) for n in sizes] for x in calls[sizes[0]]}
        return {"axis": axis, "sizes": list(sizes), "memory": memory}
    found = seconds(calls, repeats)
    return {"axis": axis, "dense": dense, "sizes": list(sizes), "seconds": found}


def judge(results: suite.Results) -> suite.Findings:
    """Exponents and ratios against the middle between two claims."""
    *results, held = results
    dense, linear = results[:2]
    slopes = {
        (r["axis"], name): exponent(r["sizes"], values)
        for r in results
        for name, values in r["seconds"].items()
    }
    last = {name: values[-1] for name, values in dense["seconds"].items()}

    # The middle of the ratios at all lengths: each alone is at the mercy of the machine.
    def ratio(r: Mapping[str, Any], name: str, other: str) -> float:
        return float(np.median(np.divide(r["seconds"][name], r["seconds"][other])))

    twice = ratio(dense, TEXTBOOK[RA], TEXTBOOK[SOFTMAX])
    ours = ratio(dense, RA, SOFTMAX)
    over = {name: ratio(linear, name, RFA) for name in (BALANCE, QUERY)}
    share = {name: (last[name] - last[RFA]) / last[SOFTMAX] for name in (BALANCE, QUERY)}
    evidence: suite.Evidence = {
        "RA quadratic": [
            suite.Timed(f"exponent of N, {name}, from 2", abs(slopes["N", name] - 2), HALF)
            for name in (RA, TEXTBOOK[RA])
        ],
        "LARA linear": [
            suite.Timed(f"exponent of {axis}, {name}", slopes[axis, name], BETWEEN)
            for axis in ("N", "C")
            for name in (BALANCE, QUERY)
        ],
        "twice": around("textbook RA / softmax", twice),
        "twice, refattn": around("RA / softmax", ours),
        "much faster": [
            suite.Timed(f"{name} / {other}", last[name] / last[other], HALF)
            for name in (BALANCE, QUERY)
            for other in (SOFTMAX, RA)
        ],
        "marginal": [
            suite.Timed(f"({name} - RFA) / softmax", value, MARGINAL)
            for name, value in share.items()
        ],
    }
    growth = {name: exponent(held["sizes"], x) for name, x in held["memory"].items()}
    evidence["memory"] = [
        *(
            suite.Compared(f"2 - {x}: exponent of N", 2 - growth[x], HALF)
            for x in TEXTBOOK.values()
        ),
        *(suite.Compared(f"{x}: exponent of N", growth[x], BETWEEN) for x in (RFA, BALANCE, QUERY)),
    ]
    n = dense["sizes"][-1]
    remark = (
        f"{n} tokens, one sample of RA for each query: RA takes {twice:.1f} times as long as "
        f"softmax attention as the two are written down, and {ours:.1f} times in refattn, where "
        f"softmax attention is faster. LARA ({C} proposals) takes "
        f"{last[BALANCE] / last[SOFTMAX]:.2g} (balance) and {last[QUERY] / last[SOFTMAX]:.2g} "
        f"(query) of softmax attention; and {over[BALANCE]:.2g} and {over[QUERY]:.2g} times as "
        f"long as RFA, an overhead of {share[BALANCE]:.2g} and {share[QUERY]:.2g} of softmax "
        "attention."
    )
    return suite.Findings(evidence, {"runs": list(results)}, remark)


def around(name: str, ratio: float) -> list[suite.Piece]:
    """Nearer to 2 than to 1 and to 4, in ratios."""
    return [
        suite.Timed(name, ratio, 2 * ROOT),
        suite.Timed(f"1 / ({name})", 1 / ratio, 1 / ROOT),
    ]


def plot(data: dict[str, Any]) -> Any:
    """Seconds against N and C."""
    figure, ((left, right),) = plotting.panels(1, 2, size=(8.4, 3.8))
    names = (SOFTMAX, RA, RFA, BALANCE, QUERY, *TEXTBOOK.values())
    colours = dict(zip(names, 2 * (*plotting.COLOURS,), strict=False))
    for r in data["runs"]:
        axes = left if r["axis"] == "N" else right
        for name, values in r["seconds"].items():
            label = None if r["axis"] == "N" and not r["dense"] else name
            dashes = "o--" if name in TEXTBOOK.values() else "o-"
            axes.loglog(r["sizes"], values, dashes, markersize=3, color=colours[name], label=label)
    left.set(xlabel=f"tokens N (D = {D}, C = {C})", ylabel="seconds")
    right.set(xlabel="proposals, or features, C")
    left.legend(fontsize=7)
    right.legend(fontsize=7)
    return figure


ALONE = True
