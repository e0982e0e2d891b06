"""Weights that are another function of a score than its exponential, or are rounded before sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product

import numpy as np
import numpy.typing as npt

from ....arrays.library import Doubles
from ...rounding.formats import FORMATS
from ...rounding.head import SoftmaxHead
from ...rounding.problems import Problem
from ...verification.findings import Numbers
from ..causes.sampled import Alternative, Result, Rows, attend, take_rows
from ..causes.slips import TILE_SIZES, attend_by, score_all
from ..causes.wrong_rows import finite

_PAIRS_OF_LOST, _CHANCE_OF_ORDER = 2**22, 14.0  # of queries and keys; log of one over a chance
_OF_X = "e^x of a score less the largest is"
_FIRST_POWERS = (8.0, 32.0, 128.0, 512.0)  # n of (1 + x / n)^n, where fits begin
_FIRST_ENDS = (2.0, 4.0, 8.0, 16.0)  # of x, below which it is clamped, likewise
_TERMS_OF_SERIES = (3, 4, 5, 6)  # of the series of e^x
_TABLE_STEPS = tuple(2**x for x in range(2, 8))  # of x, between two numbers
_EXPONENT_SHIFTS = {
    "": 0.0,
    " less 0.045": 0.045,
    " less 0.058": 486411 / 2**23,
}  # of the exponent of 2
_NO_POWER = ", not e^score"
_OF_SCORES: Mapping[str, Callable[[Doubles], Doubles]] = {
    "1 / (1 + e^-score)": lambda s: 1 / (1 + np.exp(-s)),
    "log(1 + e^score)": lambda s: np.logaddexp(s, 0.0),
    "max(score, 0)": lambda s: np.maximum(s, 0.0),
    "max(score, 0)^2": lambda s: np.maximum(s, 0.0) ** 2,
    "score^2": np.square,
    "|score|": np.abs,
    "the scores": lambda s: s,
}
_NARROW_WEIGHTS = ("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16")


def list_weights(problem: Problem) -> Iterator[Alternative]:
    """List kernels whose weights are other functions of x, a score less the largest.

    The exponential of a kernel may be a power, a part of its series, a line between powers of 2
    (the bits of a float32 are nearly the logarithm of the number, Schraudolph 1999) or a table.
    """
    for text, weigh in _list_exponentials():
        yield Alternative(text, problem, compute=partial(_attend_with, weigh=weigh))
    for text, weigh in _list_roundings():
        for words, too in (("before they are added, too", True), ("but not in their sum", False)):
            compute = partial(_attend_with, weigh=weigh, too=too)
            yield Alternative(f"{text} {words}", problem, compute=compute)
    for name, weigh in _OF_SCORES.items():
        compute = partial(_attend_with, weigh=weigh, of_scores=True)
        yield Alternative(f"weights are {name}{_NO_POWER}", problem, compute=compute)


def list_rounded_by_tiles(problem: Problem) -> Iterator[Alternative]:
    """List kernels whose weights over the running maximum are rounded to 8 bits."""
    sizes = [x for x in TILE_SIZES if x < problem.shape[1]]
    for name, size in product(_NARROW_WEIGHTS[:2], sizes):
        for words, too in (("before they are added, too", True), ("but not in their sum", False)):
            compute = partial(_round_by_tiles, to=FORMATS[name].round, size=size, too=too)
            text = f"weights are rounded to {name} (tiles of {size} keys) {words}"
            yield Alternative(text, problem, compute=compute)


def _round_by_tiles(
    head: SoftmaxHead, to: Callable[[Doubles], Doubles], size: int, too: bool
) -> Result:
    """Round weights over the largest up to each tile, and rescale them to the largest of all."""
    s = score_all(head)
    tops = np.maximum.accumulate(np.maximum.reduceat(s, np.arange(0, s.shape[-1], size), -1), -1)
    own = np.repeat(finite(tops), size, -1)[:, : s.shape[-1]]
    w = to(np.exp(s - own)) * np.exp(own - finite(tops[:, -1:]))
    exact = attend(head)
    total = np.sum(w, -1) if too else np.exp(exact.lse - finite(tops[:, -1]))
    return exact._replace(out=w @ head.v / np.where(total == 0, 1.0, total)[:, None])


def list_powers(
    problem: Problem,
) -> Iterator[tuple[str, Callable[[float], Alternative], tuple[float, ...]]]:
    """List the power that is nearly the exponential, whose number is fitted."""

    def power(n: float) -> Alternative:
        weigh = partial(_raise_to_power, n=max(n, 1.0))
        return Alternative("", problem, compute=partial(_attend_with, weigh=weigh))

    def clamp(least: float) -> Alternative:
        def weigh(x: Doubles) -> Doubles:
            return np.exp(np.maximum(x, -abs(least)))

        return Alternative("", problem, compute=partial(_attend_with, weigh=weigh))

    def clip(end: float) -> Alternative:
        # Above or below, as the end has a sign.
        ends = (end, math.inf) if end < 0 else (-math.inf, end)
        return Alternative("", problem, compute=partial(_attend_between, ends=ends))

    yield f"{_OF_X} (1 + x / n)^n with n = {{}}", power, _FIRST_POWERS
    yield "scores are no larger than {}", clip, _FIRST_ENDS
    yield "scores are no less than {}", clip, tuple(-x for x in _FIRST_ENDS)
    yield f"{_OF_X} no less than e^-{{}}", clamp, _FIRST_ENDS


def is_of_weights(text: str) -> bool:
    """Tell whether a cause is another function in the place of the exponential."""
    return _OF_X in text or _NO_POWER in text


def rounds_weights(text: str) -> bool:
    """Tell whether a cause is a coarse rounding of weights."""
    return "weights are rounded to" in text or "weights over the largest are rounded" in text


def _attend_between(head: SoftmaxHead, ends: tuple[float, float]) -> Result:
    s = score_all(head)
    return attend_by(np.where(np.isfinite(s), np.clip(s, *ends), s), head.v)


def _raise_to_power(x: Doubles, n: float) -> Doubles:
    return np.asarray(np.maximum(1 + x / n, 0.0) ** n)


def _list_exponentials() -> Iterator[tuple[str, Callable[[Doubles], Doubles]]]:
    for words, shift in _EXPONENT_SHIFTS.items():
        text = f"{_OF_X} linear between powers of 2, at x log2(e){words}"
        yield text, partial(_between_powers, shift=shift)
    for count in _TERMS_OF_SERIES:
        for words, least in (("", -math.inf), (", and 0 where that is negative", 0.0)):
            text = f"{_OF_X} the sum of the first {count} terms of its series{words}"
            yield text, partial(_sum_series, count=count, least=least)
    for n in _TABLE_STEPS:
        for words, to in (("nearest", np.rint), ("next lower", np.floor)):
            text = f"{_OF_X} that of the {words} multiple of 1 / {n}"
            yield text, partial(_exp_of_table, n=n, to=to)


def _list_roundings() -> Iterator[tuple[str, Callable[[Doubles], Doubles]]]:
    for name in _NARROW_WEIGHTS:
        to = FORMATS[name]
        yield f"weights are rounded to {name}", partial(_store_weights, to=to.round)
    for n in (255, 127):
        text = f"weights over the largest are rounded to multiples of 1 / {n}"
        yield text, partial(_store_weights, to=np.rint, n=n)


def _exp_of_table(x: Doubles, n: int, to: Callable[[Doubles], Doubles]) -> Doubles:
    return np.asarray(np.exp(to(n * x) / n))


def _store_weights(x: Doubles, to: Callable[[Doubles], Doubles], n: int = 1) -> Doubles:
    return to(n * np.exp(x)) / n


def _between_powers(x: Doubles, shift: float) -> Doubles:
    y = x * math.log2(math.e) - shift
    low = np.floor(y)
    return np.asarray(np.exp2(low) * (1 + y - low))


def _sum_series(x: Doubles, count: int, least: float) -> Doubles:
    terms = (x**i / math.factorial(i) for i in range(count))
    return np.maximum(sum(terms, np.zeros_like(x)), least)


def _attend_with(
    head: SoftmaxHead,
    weigh: Callable[[Doubles], Doubles],
    too: bool = True,
    of_scores: bool = False,
) -> Result:
    """Compute the mean of the values by weights of scores less the largest, in their sum too.

    Or they are of the scores as they are.
    """
    s = score_all(head)
    top = np.max(s, -1, initial=-math.inf)
    base = np.where(np.isfinite(top) & (not of_scores), top, 0.0)
    x = s if of_scores else np.minimum(s - base[:, None], 0.0)
    seen = np.isfinite(x)
    w = np.where(seen, weigh(np.where(seen, x, 0.0)), 0.0)
    total = np.sum(w if too else np.where(seen, np.exp(x), 0.0), -1)
    out = w @ head.v / np.where(total == 0, 1.0, total)[:, None]
    return Result(out, np.log(total) + base, top)


def say_what_overflows(problem: Problem, numbers: Numbers) -> str:
    """Say by which exponent rows that are lost, NaN, infinite or 0, are told from all others."""
    if math.prod(problem.lead) * math.prod(problem.shape[:2]) > _PAIRS_OF_LOST:
        return ""
    (n, m, _), found, lost = problem.shape, list[Doubles](), list[npt.NDArray[np.bool_]]()
    for index in np.ndindex(problem.lead):
        s = score_all(take_rows(problem, Rows(index, np.arange(n), np.arange(m))))
        out = numbers.out(index)
        lse = 0.0 if numbers.lse is None else numbers.lse(index)
        lost.append(~np.isfinite(np.sum(out, -1) + lse) | ~np.any(out, -1))
        top = np.max(s[:, :m], -1, initial=-math.inf)
        first, second = (np.logaddexp.reduce(x, -1) for x in (s[:, : m // 2], s[:, m // 2 : m]))
        sink = np.max(s[:, m:], -1, initial=-math.inf)
        with np.errstate(invalid="ignore"):
            found.append(np.stack([top, second - first, first - second, sink - top], -1))
    here, sizes = np.concatenate(lost), np.concatenate(found)
    count = np.sum(here)
    # In any order of so many rows the lost ones are the first with this chance.
    ways = math.lgamma(len(here) + 1) - math.lgamma(count + 1) - math.lgamma(len(here) - count + 1)
    for name, x in zip(_EXPONENTS, sizes.T, strict=True):
        least, most = np.min(x[here], initial=math.inf), np.max(x[~here], initial=-math.inf)
        if ways > _CHANCE_OF_ORDER and most < least < math.inf and least > _OVERFLOW_AT["float16"]:
            to = [y for y, z in _OVERFLOW_AT.items() if least >= z][-1]
            text = f": they are all rows in which {name} is above {most:.4g}, and no others"
            return f"{text}, as if e^x of it overflows (in {to} above {_OVERFLOW_AT[to]:.3g})"
    return ""


_EXPONENTS = (
    "the largest score",
    "the lse of the second half of the keys less that of the first",
    "the lse of the first half of the keys less that of the second",
    "the sink less the largest score",
)
_OVERFLOW_AT = {x: math.log(FORMATS[x].largest) for x in ("float16", "float32")}  # exponents
