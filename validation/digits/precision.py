"""What `refattn.certified` is worth: its errors, bounds and cost, and what it says of others."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import refattn
from refattn import certified, sampling
from refattn.judge.conformance.truth import digits

from ..results import Section

_Array = npt.NDArray[Any]
_DPS = 60
_UNIT = 2.0**-53
_LOGITS = (0.1, 3.0, 30.0, 500.0, 1e4, 1e5)
_SIZES = (8, 64, 256)
_KINDS = ("plain", "causal", "mask", "grouped", "options")


class Certificate(NamedTuple):
    """Errors of certified attention in one case."""

    kind: str  # what was attended with
    d: int
    logit: float  # the largest
    worst: float  # error of hi + lo over the exact number, in units of 2^-53
    mean: float
    ratios: _Array  # bound over error, of every number of which the error is not 0
    proven: float  # share of the numbers that are proven to be rounded correctly


def _case(kind: str, d: int, logit: float, rng: Any) -> tuple[list[_Array], dict[str, Any]]:
    """Arguments and options."""
    n, m, heads = 3, 20, (2 if kind == "grouped" else 1)
    shapes = ((heads, n, d), (1, m, d), (1, m, 4))
    q, k, v = (rng.standard_normal(shape) for shape in shapes)
    k = k * (logit / np.abs(q @ k.swapaxes(-1, -2) * d**-0.5).max())
    options: dict[str, Any] = {}
    if kind == "causal":
        options = {"causal": True}
    elif kind == "mask":
        options = {"mask": rng.random((n, m)) < 0.6}
    elif kind == "options":
        options = {"softcap": 30.0, "sinks": np.asarray(0.5), "window": (7, None)}
    return [q, k, v], options


def certificates(seeds: int = 3, seed: int = 0) -> Iterator[Certificate]:
    """Compare certified attention with 60 digits, over kinds, head sizes and logits."""
    grid = product(range(seeds), _KINDS, _SIZES, _LOGITS)
    for number, (_, kind, d, logit) in enumerate(grid):
        rng = np.random.default_rng((seed, number))
        arrays, options = _case(kind, d, logit, rng)
        found = certified.softmax_attention(*arrays, **options)
        want = digits.formulas(_DPS).softmax_attention(*arrays, **options)
        got = digits.numbers(found.out.hi, dps=_DPS) + digits.numbers(found.out.lo, dps=_DPS)
        off = np.abs(got - want).astype(float)
        relative = (off / np.abs(want).astype(float))[np.abs(want) > 0] / _UNIT
        ratios = (found.error / np.where(off > 0, off, np.nan)).ravel()
        yield Certificate(
            kind,
            d,
            logit,
            float(relative.max(initial=0.0)),
            float(relative.mean()) if relative.size else 0.0,
            ratios[~np.isnan(ratios)],
            float(found.rounded().proven.mean()),
        )


class Own(NamedTuple):
    """Error of a function of the package at a real size."""

    name: str
    dtype: str
    error: float  # over the largest value
    units: float  # of eps (1 + the largest exponent)
    bound: float  # of the reference, over the largest value


def own_functions(n: int = 4096, d: int = 64, seed: int = 0) -> Iterator[Own]:
    """Errors of exact and of random-feature attention of n tokens, against pairs."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((n, d)) for _ in range(3))
    omega, _ = sampling.draw(256, d, rng=seed)
    plain: dict[str, Any] = {}
    causal = {"causal": True}
    cases: list[tuple[str, str, float, dict[str, Any]]] = [
        ("softmax", "softmax_attention", 1.0, plain),
        ("softmax, causal", "softmax_attention", 1.0, causal),
        ("softmax, logits to 600", "softmax_attention", 30.0, plain),
        ("softmax, logits to 1e4", "softmax_attention", 1500.0, plain),
        ("rfa", "random_feature_attention", 1.0, {"omega": omega}),
        (
            "rfa, hyperbolic",
            "random_feature_attention",
            1.0,
            {"omega": omega, "features": "hyperbolic"},
        ),
    ]
    for dtype in (np.float64, np.float32):
        for name, function, size, options in cases:
            given = [np.asarray(x, dtype) for x in (q * size, k, v)]
            options = {
                key: np.asarray(x, dtype) if key == "omega" else x for key, x in options.items()
            }
            got = getattr(refattn, function)(*given, **options)
            want = getattr(certified, function)(*given, **options)
            off = np.abs((got - want.out.hi) - want.out.lo).max()
            wide = [np.asarray(x, float) for x in given]
            top = np.abs(wide[2]).max()
            scale = d**-0.5
            lengths = [np.linalg.norm(x, axis=-1).max() for x in wide[:2]]
            exponent = scale * lengths[0] * lengths[1]
            if "omega" in options:
                frequencies = np.linalg.norm(np.asarray(options["omega"], float), axis=-1).max()
                exponent = scale**0.5 * frequencies * max(lengths) + scale * max(lengths) ** 2 / 2
            unit = float(np.finfo(dtype).eps) * (1 + exponent)
            yield Own(
                name,
                np.dtype(dtype).name,
                float(off / top),
                float(off / top / unit),
                float(want.error.max() / top),
            )


class Cost(NamedTuple):
    """Time and memory of a certified function beside the function in float64."""

    name: str
    seconds: float
    ratio: float
    nanoseconds: float  # for a score
    memory: float  # MiB beside arguments and result


def costs(n: int = 4096, tokens: int = 8192, repeats: int = 3, seed: int = 0) -> Iterator[Cost]:
    """Times in turn, of which ratios are medians, and peaks of memory."""
    rng = np.random.default_rng(seed)
    q, k, v, g = (rng.standard_normal((n, 64)) for _ in range(4))
    long = [rng.standard_normal((tokens, 64)) for _ in range(3)]
    omega, _ = sampling.draw(256, 64, rng=seed)

    def pulled() -> Any:
        out, pullback = refattn.vjp(refattn.softmax_attention, q, k, v)
        return out, pullback(g)

    forms: list[tuple[str, int, Callable[[], Any], Callable[[], Any]]] = [
        (
            f"softmax, {n} tokens",
            n * n,
            lambda: certified.softmax_attention(q, k, v),
            lambda: refattn.softmax_attention(q, k, v),
        ),
        (
            f"softmax, {n} tokens, causal",
            n * n // 2,
            lambda: certified.softmax_attention(q, k, v, causal=True),
            lambda: refattn.softmax_attention(q, k, v, causal=True),
        ),
        (
            f"rfa, {tokens} tokens, 256 features",
            2 * tokens * 256,
            lambda: certified.random_feature_attention(*long, omega=omega),
            lambda: refattn.random_feature_attention(*long, omega=omega),
        ),
        (
            f"gradients, {n} tokens",
            n * n,
            lambda: certified.softmax_gradients(q, k, v, g),
            pulled,
        ),
    ]
    for name, scores, ours, plain in forms:
        times = [(_seconds(ours), min(_seconds(plain) for _ in range(2))) for _ in range(repeats)]
        seconds = float(np.median([x for x, _ in times]))
        ratio = float(np.median([x / y for x, y in times]))
        yield Cost(name, seconds, ratio, seconds / scores * 1e9, _peak(ours))


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _peak(call: Callable[[], Any]) -> float:
    """MiB beside the result."""
    tracemalloc.start()
    result = call()
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del result
    return (peak - kept) / 2**20


def certificates_table(seeds: int = 3) -> tuple[list[Section], Any]:
    """Errors of certified attention against 60 digits, in units of 2^-53 of the number."""
    found = list(certificates(seeds))
    columns = ["kind", "cases", "worst", "mean", "least ratio", "median ratio", "proven"]
    rows = []
    for kind in ("all", *_KINDS):
        own = [x for x in found if kind in ("all", x.kind)]
        ratios = np.concatenate([x.ratios for x in own])
        errors = max(x.worst for x in own), np.mean([x.mean for x in own])
        proven = f"{np.mean([x.proven for x in own]):.2%}"
        numbers = (*errors, ratios.min(), np.median(ratios))
        rows.append([kind, len(own), *(f"{x:.2g}" for x in numbers), proven])
    data = [
        x._asdict() | {"ratios": [float(x.ratios.min(initial=1e300)), len(x.ratios)]} for x in found
    ]
    return [Section("certified", columns, rows)], data


def functions_table(n: int = 4096) -> tuple[list[Section], Any]:
    """Errors of functions of the package at a real size, against pairs."""
    found = list(own_functions(n))
    return [Section.of("refattn", found)], found


def costs_table(n: int = 4096, tokens: int = 8192) -> tuple[list[Section], Any]:
    """Time and memory beside those in float64."""
    found = list(costs(n, tokens))
    return [Section.of("cost", found)], found
