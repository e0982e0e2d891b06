"""What a candidate is compared with, and how far from it an honest evaluation may be."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import features, kernels, naive
from .adapter import Adapter

__all__ = ["CONTRACT", "black_box", "of_rows", "reference", "tolerance"]

Floats = npt.NDArray[Any]

# In error <= C eps (1 + largest exponent). Evaluations that round every operation and add in turn
# stay below a tenth of it on sums of a few terms (tests/test_conformance.py); the rest is for long
# sums, which are not checked in the halves.
CONTRACT = {"float64": 4.0, "float32": 4.0, "float16": 2.0, "bfloat16": 2.0}


def reference(
    adapter: Adapter, arrays: tuple[Floats, ...], options: dict[str, Any]
) -> tuple[Any, Any]:
    """What the estimator gives in extended precision, and how far from it a candidate may be."""
    if adapter.has("rows"):
        return of_rows(adapter, np.asarray(arrays[0], np.longdouble))
    return _formula(adapter, arrays, options), tolerance(adapter, arrays, options)


def _formula(
    adapter: Adapter,
    arrays: tuple[Floats, ...],
    options: dict[str, Any],
    dtype: Any = np.longdouble,
) -> Any:
    """The estimator as it is written, in extended precision, with the conventions declared."""
    wide = tuple(np.asarray(x, dtype) for x in arrays)
    given = {
        k: np.asarray(x, dtype) if k in ("omega", "centres") else x for k, x in options.items()
    }
    if given.get("causal") and adapter["causal"] == "top-left":
        n, m = (x.shape[-2] for x in wide[:2])
        given["mask"] = np.tri(n, m, dtype=bool) & given.get("mask", True)
        del given["causal"]
    if adapter.record.takes("scale"):
        given["scale"] = adapter.root(wide[0].shape[-1]) ** 2
    for trait, tag in _DECLARED.items():
        if adapter.has(trait):
            given[tag] = adapter[tag]
    if adapter.has("feature-map"):
        given["feature_map"] = _FEATURE_MAPS[adapter["feature_map"]]
    return adapter.record.naive(*wide, **given)


# Tags that are options of the formula, where the estimator has a trait.
_DECLARED = {"random-features": "features", "proposals": "weighting"}


_FEATURE_MAPS = {"elu": naive.elu_plus_one, "relu": features.relu_features}


def of_rows(adapter: Adapter, x: Floats) -> tuple[Any, Any]:
    """Mean and covariance; deviations off by delta move the latter by 2 delta sigma + delta^2."""
    want = adapter.record.naive(x, ddof=adapter["ddof"])
    unit = (CONTRACT[adapter["dtype"]] + math.sqrt(x.shape[-2])) * adapter.eps  # running sums
    off = unit * float(np.max(np.abs(x)))
    spread = float(np.max(np.abs(want.cov)))
    return (want.mean, want.cov), (off, unit * spread + 2 * off * math.sqrt(spread) + off**2)


def tolerance(
    adapter: Adapter, arrays: tuple[Floats, ...], options: dict[str, Any], got: Any = 0.0
) -> float:
    """Allowed error, C eps (1 + largest exponent) times the largest value, and declared epsilons.

    The exponents are those that an evaluation of the formulas in the log domain meets. Where the
    frequencies are the candidate's own, their length is taken as that of a long Gaussian vector,
    and the size of a kernel estimate from what it gave.
    """
    unit = CONTRACT[adapter["dtype"]] * adapter.eps
    d = arrays[0].shape[-1]
    a, b = (adapter.root(d) * np.asarray(x, float) for x in arrays[:2])
    x, y = _norm(a), _norm(b)
    w = _norm(options["omega"]) if "omega" in options else math.sqrt(d) + 5
    if "omega" not in options and not adapter.has("random-features"):
        w += x + y  # they may lie about q + k
    if adapter.has("pairs"):
        exponent = w * (x + y) + (x * x + y * y) / 2
        size = float(np.max(np.abs(got)))
        if "omega" in options and adapter["features"] != "trigonometric":
            omega = np.asarray(options["omega"], float)
            size = float(np.max(kernels.estimate(a, b, omega, features=adapter["features"])))
        elif adapter["features"] == "trigonometric":
            size = math.exp((x * x + y * y) / 2)
        feature = math.exp(min(w * max(x, y), 700.0))
        return unit * (1 + exponent) * size + float(adapter["epsilon"]) * (2 * feature + size)
    exponent = x * y
    if adapter.has("feature-map"):
        exponent = max(x, y)
    elif adapter.has("random"):
        exponent = w * (y if adapter.has("per-query") else max(x, y)) + y * y / 2
    if "centres" in options:
        mu = _norm(options["centres"])
        exponent = max(exponent, w * mu + mu * mu / 2)
    condition = 1.0
    if adapter.has("random-features") and adapter["features"] == "trigonometric":
        if "omega" not in options:
            return math.inf
        condition = _cancellation(a, b, options)
    elif not adapter.has("mean", "positive"):
        condition = max(1.0, _condition(adapter, arrays, options))
    return _norm(arrays[2]) * (
        condition * unit * (1 + exponent) + _declared(adapter, a, b, options)
    )


def _condition(adapter: Adapter, arrays: tuple[Floats, ...], options: dict[str, Any]) -> float:
    """How many eps of the largest value an honest evaluation may lose, as measured near by.

    A mean with positive weights loses a few, but for the exponents. Of other estimators the formula
    is evaluated in two precisions; one that gives its frequencies to nobody, at one seed, is
    evaluated at arguments that differ in the last digits of single precision.
    """
    rng, drawn = np.random.default_rng(0), adapter.has("random") and "omega" not in options
    dtype = np.dtype("float64" if adapter["dtype"] == "float64" else "float32")
    h = 2.0**-20

    def near() -> tuple[tuple[Floats, ...], dict[str, Any]]:
        def moved(x: Any) -> Floats:
            y: Floats = np.asarray(x, float) * (1 + h * rng.choice([-1.0, 1.0], np.shape(x)))
            return y if drawn else y.astype(dtype)

        given = {k: moved(x) if k in ("omega", "centres") else x for k, x in options.items()}
        return tuple(map(moved, arrays)), given

    def apart() -> Floats:
        x, given = near()
        if drawn:
            return (black_box(adapter, x, given) - black_box(adapter, *near())) / (2 * h)
        low = _formula(adapter, x, given, dtype)
        lost: Floats = np.asarray(low - _formula(adapter, x, given)) / np.finfo(dtype).eps
        return lost

    most = max(float(np.max(np.abs(apart()), initial=0.0)) for _ in range(4))
    return most / max(_norm(arrays[2]), 1e-300)


def black_box(adapter: Adapter, arrays: tuple[Floats, ...], options: dict[str, Any]) -> Floats:
    """What the registered function gives at a seed."""
    given = {"rng": options.get("seed", 0), **{k: x for k, x in options.items() if k != "seed"}}
    if adapter.record.takes("scale"):
        given["scale"] = adapter.root(arrays[0].shape[-1]) ** 2
    return np.asarray(adapter.record.fn(*arrays, **given), float)


def _cancellation(q: Floats, k: Floats, options: dict[str, Any]) -> float:
    """Largest ratio of the sum of absolute terms to the normaliser of trigonometric features."""
    omega = np.asarray(options["omega"], float)
    estimate = kernels.estimate(
        q[..., :, None, :], k[..., None, :, :], omega, features="trigonometric"
    )
    most = np.exp((np.sum(q * q, -1)[..., :, None] + np.sum(k * k, -1)[..., None, :]) / 2)
    seen = _visible(q, k, options)
    normaliser = np.abs(np.sum(np.where(seen, estimate, 0.0), -1))
    total = np.sum(np.where(seen, most, 0.0), -1)
    return float(np.max(total / np.where(total == 0, 1.0, normaliser)))


def _visible(q: Floats, k: Floats, options: dict[str, Any]) -> Any:
    n, m = q.shape[-2], k.shape[-2]
    seen = options.get("mask", True)
    return np.asarray(seen) & np.tri(n, m, m - n, dtype=bool) if options.get("causal") else seen


def _declared(adapter: Adapter, q: Floats, k: Floats, options: dict[str, Any]) -> float:
    """Relative error that the declared epsilon may cause, on every feature and every normaliser.

    Features are taken as stabilised by the largest omega . x of a query, and of all keys.
    """
    epsilon = adapter["epsilon"]
    if not epsilon or q.shape[:-2] != k.shape[:-2]:
        return float(epsilon)
    if adapter.has("feature-map"):
        phi = _FEATURE_MAPS[adapter["feature_map"]]
        normaliser = np.sum(phi(q) @ np.swapaxes(phi(k), -1, -2), -1)
        return float(epsilon / max(np.min(normaliser), 1e-300))
    if "omega" not in options or adapter.has("per-query"):
        return float(epsilon)
    omega = np.asarray(options["omega"], float)
    a, b = q @ omega.T, k @ omega.T
    a = np.exp(a - np.max(a, -1, keepdims=True) - np.sum(q * q, -1, keepdims=True) / 2)
    b = np.exp(b - np.max(b, (-1, -2), keepdims=True) - np.sum(k * k, -1, keepdims=True) / 2)
    added = (
        epsilon * (k.shape[-2] * np.sum(a, -1) + np.sum(b, (-1, -2))[..., None])
        + epsilon**2 * omega.shape[-2] * k.shape[-2]
    )
    normaliser = np.sum(a * np.sum(b, -2)[..., None, :], -1)
    return float(min(np.max(2 * added / np.maximum(normaliser, 1e-300)), 1e300))


def _norm(x: Any) -> float:
    """Largest length of a row."""
    x = np.asarray(x, float)
    return float(np.max(np.sqrt(np.sum(x * x, -1)), initial=0.0))
