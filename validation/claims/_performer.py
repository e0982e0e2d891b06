"""What the claims of reference 001 share: the inputs and frequencies of its published code.

Its figures come from github.com/teddykoker/performer, which the post links.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from refattn import kernels, sampling
from refattn.typing import Coupling, Features
from validation import plotting, suite

TARGET = 0.05  # of the scale; means that are to be told apart differ by 0.12 and more

MEAN = "mean of the values"


def mean_cosine(
    name: str, x: Any, square: float, count: int = 1, factor: float = 1.0
) -> suite.Tested:
    """Evidence that E cos(omega . D), |D|^2 = square, is e^(-square / 2), or that times a factor.

    Each x is the mean of cosines at as many frequencies from N(0, I) as counted.
    """
    mean, variance = math.exp(-square / 2) * factor, (1 - math.exp(-square)) ** 2 / 2 / count
    return suite.empirical_bernstein(name, x, mean, variance, TARGET, "of the scale", low=-1.0)


def kernel_errors(
    rng: np.random.Generator, draws: int, d: int, x: Any, y: Any, coupling: Coupling, kind: Features
) -> Any:
    """Squared errors over the squared kernel of pairs, from sets of d frequencies."""
    omega = np.stack([sampling.draw(d, d, coupling=coupling, rng=rng).omega for _ in range(draws)])
    ratio = kernels.estimate(x, y, omega[:, None], features=kind) / kernels.softmax_kernel(x, y)
    return (ratio - 1) ** 2


def published_inputs(rng: np.random.Generator, length: int, d: int, temperature: float) -> Any:
    """Queries, keys and values, all N(0, temperature^2)."""
    return temperature * rng.standard_normal((3, length, d))


def published_frequencies(count: int, d: int, rng: np.random.Generator) -> Any:
    """Orthogonal frequencies as in the published code: all of length sqrt(d / count).

    The law N(0, I) has lengths near sqrt(d). The factor is as if sums over frequencies were
    normalised here; phi does so already.
    """
    squares = [np.linalg.qr(rng.standard_normal((d, d)))[0].T for _ in range(-(-count // d))]
    return np.vstack(squares)[:count] / math.sqrt(count / d)


def curve(axes: Any, name: str, sizes: Any, moments: Any, dashes: str = "-") -> None:
    """Draw errors by number of frequencies: means, and a standard deviation to both sides."""
    mean, sd, *_ = moments
    style = {"linestyle": "--", "color": plotting.INK} if name == MEAN else {"linestyle": dashes}
    (line,) = axes.plot(sizes, mean, marker="o", markersize=3, label=name, **style)
    low = np.maximum(mean - sd, 0.1 * mean)  # the axis is logarithmic
    axes.fill_between(sizes, low, mean + sd, color=line.get_color(), alpha=0.15)


def small(sizes: Any, means: Mapping[str, Any]) -> Any:
    """Make a small figure of mean errors by number of frequencies; the last is that of MEAN."""
    figure, axes = plotting.small()
    *_, last = means
    for label, mean in means.items():
        style = {"linestyle": "--", "color": plotting.INK} if label == last else {"marker": "o"}
        axes.plot(sizes, mean, markersize=3, label=label, **style)
    axes.set(yscale="log", xlabel="frequencies R", ylabel="squared error")
    plotting.key(axes)
    return figure
