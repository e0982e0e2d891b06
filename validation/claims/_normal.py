r"""What many standard normal draws must be, told in units of the kernel that they estimate.

With s = |x + y| and z = omega . (x + y) / s the estimate of one frequency is :math:`e^{s z - s^2 /
2}` times the kernel. Its mean, 1, is the integral of N(z; s, 1): draws between a and b make the
share Phi(b - s) - Phi(a - s) of it. So a mean, a standard deviation and a number of draws that are
off by what is detected here change the kernel by what is told. What no draws exclude are rare ones
that are larger than all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from scipy import special

from refattn.judge import stats
from validation import suite

EDGES = (-math.inf, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0)
FEW = 30  # draws expected above an edge; others count with those below
TARGETS = {"entries": 0.15, "mixed": 0.5}  # shares of the kernel that may go unseen


class Tally(NamedTuple):
    """The size, sum and sum of squares of draws, and how many are above each edge."""

    size: int
    total: float
    square: float
    above: Any


def tally(z: Any) -> Tally:
    """Count draws, which need not be kept."""
    above = [int(np.count_nonzero(z > edge)) for edge in EDGES]
    return Tally(z.size, float(np.sum(z)), float(np.vdot(z, z)), above)


def in_frames(omega: Any) -> dict[str, Tally]:
    """Count the entries of frequencies (..., d), and a sum of all entries of each."""
    mix = np.linspace(1.0, 2.0, omega.shape[-1])
    return {"entries": tally(omega), "mixed": tally(omega @ mix / np.linalg.norm(mix))}


def laws(parts: Sequence[dict[str, Tally]], s: float, name: str = "") -> Iterator[suite.Tested]:
    """Test that draws in each frame are N(0, 1), for a kernel with |x + y| = s."""
    for frame, target in TARGETS.items():
        yield from _law(f"{name}{frame}", [x[frame] for x in parts], s, target)


def _law(name: str, some: Sequence[Tally], s: float, target: float) -> Iterator[suite.Tested]:
    size, total, square = (sum(x) for x in list(zip(*some, strict=True))[:3])
    detects, unit = suite.detects, f"of the kernel at |x + y| = {s:.2g}"
    shift, spread = detects(stats.normal_mean, size), detects(stats.chi2, 1, df=size)
    p = stats.normal_mean([total / math.sqrt(size)])
    yield suite.Tested(f"{name}, mean", p, lambda a: math.expm1(s * shift(a)), target / 3, unit)
    of_scale = lambda a: math.expm1(s * s / 2 * math.expm1(spread(a)))  # noqa: E731
    yield suite.Tested(f"{name}, scale", stats.chi2([square], size), of_scale, target / 3, unit)
    edges = [edge for edge in EDGES if size * special.ndtr(-edge) > FEW]
    counts = -np.diff([*np.sum([x.above for x in some], axis=0)[: len(edges)], 0])
    parts, shares = (-np.diff([*special.ndtr(at - np.array(edges)), 0.0]) for at in (0.0, s))
    names = [f"{a:g} to {b:g}" for a, b in pairwise([*edges, math.inf])]
    for between, count, part, share in zip(names, counts, parts, shares, strict=True):
        found, p = detects(stats.binomial, size, p=part), stats.binomial(int(count), size, part)
        of_share = lambda a, f=share / part, g=found: f * g(a)  # noqa: E731
        yield suite.Tested(f"{name}, draws from {between}", p, of_share, target, unit)
