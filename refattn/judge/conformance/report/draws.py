"""Say what is wrong with frequencies that were recovered, and with estimates of a kernel."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ....arrays.library import Floats
from ..checks.recovery import FAR_OFF, frequency_moments
from ..checks.trials import CheckRun

_A_THOUSANDTH = 1e-3
_OF_LENGTH: dict[str, Callable[[int], float]] = {  # of frequencies, by the length d of a vector
    "1/sqrt(2)": lambda d: 0.5**0.5,
    "sqrt(2)": lambda d: 2**0.5,
    "1/2": lambda d: 0.5,
    "2": lambda d: 2.0,
    "2 pi": lambda d: 2 * math.pi,
    "1/(2 pi)": lambda d: 0.5 / math.pi,
    "d^(1/4)": lambda d: d**0.25,
    "d^(-1/4)": lambda d: d**-0.25,
    "sqrt(d)": lambda d: d**0.5,
    "1/sqrt(d)": lambda d: d**-0.5,
}
_COUNTS_OF_FEATURES = (1, 2, 4)  # numbers of features
_POINTS, _LENGTH = 24, 3  # pairs of vectors, and their length


def name_frequencies(trials: Sequence[CheckRun]) -> list[str]:
    """Say that all frequencies that were recovered have one norm, or are x times too large."""
    found = [t.omega for t in trials if t.omega is not None and len(t.omega) > 1]
    # Those that are the same for all seeds say nothing.
    found = [
        x for x in found if np.max(np.ptp(np.abs(x), axis=0)) > _A_THOUSANDTH * np.max(np.abs(x))
    ]
    for omega in found:
        d, norms = omega.shape[-1], np.linalg.norm(omega, axis=-1)
        size = float(np.mean(norms))
        if d > 1 and np.ptp(norms) <= _A_THOUSANDTH * size:
            if abs(size - math.sqrt(d)) <= _A_THOUSANDTH * size:
                meant = "if that is meant: --estimator rfa-regularised"
                return [
                    f"every frequency has norm sqrt(d), as if coupling is regularised ({meant})"
                ]
            more = "multiply each by the norm of a normal vector of its own"
            return [f"coupling is wrong: every frequency has norm {size:.3g}: {more}"]
    sizes = [_size_of(x) for x in found]
    pairs = [*zip(sizes, found, strict=True)]
    if not pairs or any(_is_normal(x) or not _is_normal(x / c) for c, x in pairs):
        return []
    names = [
        x for x, of in _OF_LENGTH.items() if all(_is_normal(y / of(y.shape[-1])) for y in found)
    ]
    words = f", near {names[0]}" if len(names) == 1 else ""
    error = sizes[0] / math.sqrt(2 * found[0].size)
    return [f"frequencies are N(0, I) times {sizes[0]:.3g} ± {error:.1g}{words}"]


def _size_of(omega: Floats) -> float:
    return float(np.sqrt(np.mean(omega * omega)))


def _is_normal(omega: Floats) -> bool:
    """Tell whether no moment is far from that of N(0, I)."""
    return all(
        abs(np.mean(x) - want) <= FAR_OFF * math.sqrt(variance / len(x))
        for _, x, want, variance in frequency_moments(omega)
    )


def name_factor_of_kernel(t: CheckRun) -> Iterator[str]:
    """Say which factor estimates of a kernel have whatever the frequencies.

    At x = y = 0 the estimate is 1, with any number of features. Of one feature, with the norms of
    waves, log k(x, x) = |x|^2, and of a positive one log k(x, y) k(-x, -y) = -|x|^2 - |y|^2.
    """
    if not t.adapter.has("pairs"):
        return
    d = t.fit(1, 1, _LENGTH)[2]
    options = {size: t.options(size) for size in _COUNTS_OF_FEATURES}
    seed = {x: y for x, y in options[1].items() if x == "seed"}  # a factor may be of the seed
    options = {size: x | seed for size, x in options.items()}
    zero = np.zeros((1, d))
    at_zero = [float(t.call(zero, zero, **x)[0]) for x in options.values()]
    if np.ptp(at_zero) > _A_THOUSANDTH * max(map(abs, at_zero)):
        few = " / ".join(f"{x:.3g}" for x in at_zero)
        twice = np.allclose(at_zero, 1 / np.asarray(_COUNTS_OF_FEATURES), rtol=_A_THOUSANDTH)
        more = ": they are divided by the number of features twice" if twice else ""
        yield f"estimates at x = y = 0 should be 1; with 1 / 2 / 4 features they are {few}{more}"
        return
    x, y = (t.normal(_POINTS, d, size=0.5) for _ in "xy")
    waves = t.adapter.waves
    pairs = [(x, x)] * 2 if waves else [(x, y), (-x, -y)]
    found = [t.call(*z, **options[1]) for z in pairs]
    again = t.call(zero, zero, **t.options(1))
    if abs(again[0] - at_zero[0]) > _A_THOUSANDTH * abs(at_zero[0]):
        return
    if np.min(found) <= 0:
        return
    half = np.sum(np.log(np.asarray(found, float)), axis=0) / 2
    names = {"|x|^2": np.sum(x * x, -1), "|y|^2": np.sum(y * y, -1), "x . y": np.sum(x * y, -1)}
    names = {"|x|^2": names["|x|^2"]} if waves else names
    terms = np.stack([np.ones(_POINTS), *names.values()], -1)
    want = np.asarray([0.0, 1.0] if waves else [0.0, -0.5, -0.5, 0.0])
    fit, *_ = np.linalg.lstsq(terms, half, rcond=None)
    off = np.round(fit - want, 6)
    if np.any(off) and np.max(np.abs(terms @ fit - half)) <= 1e-6:  # as `off` is rounded
        power = " ".join(f"{x:+.3g} {name}" for name, x in zip(names, off[1:], strict=True) if x)
        first = f"{math.exp(off[0]):.3g}" if off[0] or not power else ""
        what = " times ".join(filter(None, (first, f"e^({power})" if power else "")))
        where = " at x = y" * waves + f" (d = {d})" * bool(power)
        yield f"every estimate{where} has a factor of {what} that it should not have"
