"""Time against the number of tokens and of samples, and the exponents fitted to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

import refattn

from .cases import Record
from .estimators import EXACT, LARA, RFA
from .settings import Settings
from .timing import alternate, exponent, quartiles

LENGTH, SAMPLES = "time against tokens", "time against samples"
LINEAR = "linear attention, elu + 1"
LAGS = "RFA with a bias by lag"  # in as much time as exact attention, up to long sequences

Calls = Mapping[tuple[str, int], Callable[[], Any]]


def run(settings: Settings) -> Iterator[Record]:
    """Time one head in float32, all sizes in the same rounds.

    A record has, beside ``"case"``, ``"dtype"`` and ``"sizes"``, ``"fitted_from"`` and ``"forms"``
    with ``"name"``, ``"at"`` (sizes), ``"seconds"`` (of each round, for each size) and
    ``"exponent"`` (value and standard error, or null).
    """
    sizes = settings.sizes
    rng = np.random.default_rng(settings.seed)
    length = max(*sizes.lengths, sizes.counts_length)
    q, k, v = (rng.standard_normal((length, sizes.d), dtype=np.float32) for _ in range(3))
    omega = rng.standard_normal((max(*sizes.counts, sizes.features), sizes.d), dtype=np.float32)
    size = {"heads": 1, "d": sizes.d}

    calls = {
        (name, n): partial(form, q[:n], k[:n], v[:n])
        for n in sizes.lengths
        for name, form in _forms(omega[: sizes.features]).items()
        if name not in (EXACT, LAGS) or n <= sizes.exact_up_to
    }
    yield _record(LENGTH, size | {"S": sizes.features}, calls, sizes.fitted_from, settings)

    q, k, v = (x[: sizes.counts_length] for x in (q, k, v))
    calls = {
        (name, count): partial(_forms(omega[:count])[name], q, k, v)
        for count in sizes.counts
        for name in (RFA, LARA)
    }
    size |= {"tokens": sizes.counts_length}
    yield _record(SAMPLES, size, calls, sizes.counts_fitted_from, settings)


def fit(
    at: Sequence[int], seconds: Sequence[Sequence[float]], start: int
) -> Mapping[str, float] | None:
    """Fit an exponent to the medians of the sizes from `start`, if these are three or more."""
    points = [(n, quartiles(s).median) for n, s in zip(at, seconds, strict=True) if n >= start]
    if len(points) < 3:
        return None
    return exponent(*zip(*points, strict=True))._asdict()


def _forms(omega: np.ndarray) -> dict[str, Callable[..., Any]]:
    lara = partial(refattn.linear_randomized_attention, num_proposals=len(omega))
    return {
        RFA: partial(refattn.random_feature_attention, omega=omega),
        LARA: partial(lara, omega=omega),
        LINEAR: refattn.linear_attention,
        LAGS: partial(_with_lags, omega),
        EXACT: refattn.softmax_attention,
    }


def _with_lags(omega: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    bias = -np.log1p(np.abs(np.arange(1 - len(q), len(q), dtype=q.dtype)))
    return refattn.random_feature_attention(q, k, v, omega=omega, bias=bias)


def _record(
    case: str, size: Mapping[str, int], calls: Calls, start: int, settings: Settings
) -> Record:
    seconds = alternate(calls, settings.repeats, pause=settings.pause)
    forms = []
    for name in dict.fromkeys(name for name, _ in calls):
        at = [n for form, n in calls if form == name]
        times = [seconds[name, n] for n in at]
        forms.append({"name": name, "at": at, "seconds": times, "exponent": fit(at, times, start)})
    return {
        "case": case,
        "dtype": "float32",
        "sizes": dict(size),
        "fitted_from": start,
        "forms": forms,
    }
