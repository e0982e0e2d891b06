"""Pose the problem of an estimator that has a text, and derive the laws of its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from inspect import Parameter, signature
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ....arrays import checks, qkv
from ....arrays.heads import grouped_lead
from ....arrays.library import Doubles, to_host
from ....engine.scores import Band
from ....naive.doors import query_frequencies
from ..formats import widen
from ..problems import Index, Problem, hide_unseen, take_head
from ..roundings import Roundings, RowErrors
from ..states import ReadHead
from .law import RowLaw, derive, write_rows
from .texts import TEXTS, Query

_CACHED_HEADS = 64  # whose arrays are kept
_REPEATED = 4  # times as many numbers as different ones: steps may give equal numbers

_OF_EVERY_FORMULA = ("q", "k", "v", "scale", "mask", "causal")  # arguments of all formulas
_FLOAT_ARRAYS = ("omega", "log_weight", "centres")
_ARRAYS_OF_HEADS = ("mask", "indices", *_FLOAT_ARRAYS)
_WHAT_IS_NEEDED = {
    "omega": "frequencies (..., S, d), or (..., n, S, d) of each query",
    "window": "tokens of a chunk, or how far keys are near to the left and to the right",
    "indices": "keys (..., S)",
}

_DERIVED: WeakKeyDictionary[ReadHead, dict[Any, RowLaw]] = WeakKeyDictionary()


def pose_text(
    formula: Any,
    q: Any,
    k: Any,
    v: Any,
    given: Mapping[str, Any],
    *,
    name: str,
    scale: float | None = None,
    mask: Any = None,
    causal: bool = False,
) -> Problem:
    """Pose the problem of an estimator by its formula, with what else it takes by name."""
    q, k, v = (widen(x, y) for x, y in (("q", q), ("k", k), ("v", v)))
    numbers = {"q": q, "k": k, "v": v, "mask": None if mask is None else to_host(mask, None)}
    qkv.check(q, k, v, mask=numbers["mask"], causal=causal)
    own = {
        x: y.default for x, y in signature(formula).parameters.items() if x not in _OF_EVERY_FORMULA
    }
    for option, x in given.items():
        if x is not None and (option not in own or option == "bias"):  # of no text here
            raise ValueError(f"`{option}` must not be given for {name}, got {checks.describe(x)}.")
    values = own | dict(given) | numbers | {"causal": causal, "scale": scale}
    for option in (x for x, y in own.items() if y is Parameter.empty and given.get(x) is None):
        raise ValueError(
            f"`{option}` must be given for {name}: {_WHAT_IS_NEEDED[option]}, got None."
        )
    for option in (x for x in own if x in _FLOAT_ARRAYS and not isinstance(values[x], str | None)):
        values[option] = widen(option, values[option])
    for rule in formula.rules:
        values |= rule(**values)
    arrays = {
        x: values[x]
        for x in ("mask", *own)
        if x in _ARRAYS_OF_HEADS and not isinstance(values[x], str | None)
    }
    options = {x: values[x] for x in own if x not in _ARRAYS_OF_HEADS}
    lead, (n, m) = grouped_lead(q, k, v), (q.shape[-2], k.shape[-2])
    band, numbers = Band.of(m - n, causal, (None, None)), numbers | arrays

    @lru_cache(maxsize=_CACHED_HEADS)
    def read(index: Index) -> Mapping[str, Any]:
        of_head = {x: take_head(y, index, lead) for x, y in numbers.items() if y is not None}
        return hide_unseen(of_head, band)

    posed = Problem(
        lead,
        (n, m, v.shape[-1]),
        read,
        qkv.scale_or_default(values["scale"], q.shape[-1]),
        causal,
        (None, None),
        None,
        kind="text",
        record=name,
    )
    return posed._replace(derived=_Laws(formula, options))


def open_formula(fn: Any) -> tuple[Any, dict[str, Any]]:
    """Return the formula of a record, and the options that the record gives it."""
    return getattr(fn, "func", fn), dict(getattr(fn, "keywords", {}))


class _Laws:
    """The laws of rows of an estimator, by its formula and options."""

    def __init__(self, formula: Any, options: Mapping[str, Any]) -> None:
        self.formula, self.options = formula, options

    @property
    def settings(self) -> dict[str, Any]:
        """Options that differ from those that the formula has by default."""
        own = signature(self.formula).parameters
        return {
            x: y for x, y in self.options.items() if x != "bias" and own[x].default not in (y, None)
        }

    def __call__(
        self, problem: Problem, index: Index, roundings: Roundings, i: slice
    ) -> tuple[RowErrors, Doubles]:
        """Derive the laws of the queries i of a head, and the covariances of their columns."""
        known, rows = _DERIVED.setdefault(problem.read, {}), range(i.start, i.stop)
        before = roundings._replace(out=None)  # the same for all types of the output
        for at in (x for x in rows if (index, before, x) not in known):
            known[index, before, at] = self._derive(problem, index, before, at)
        return write_rows([known[index, before, at] for at in rows], roundings)

    def _derive(self, problem: Problem, index: Index, roundings: Roundings, at: int) -> RowLaw:
        x, (n, m, columns) = problem.read(index), problem.shape
        there = np.any(x["mask"], 0) if "mask" in x else np.ones(m, bool)
        seen = x["mask"][at] if "mask" in x else there
        if problem.causal:
            seen = seen & (np.arange(m) <= at + m - n)
        if not seen.any():
            none = np.zeros(columns)
            return RowLaw(none, np.zeros((columns, columns)), none, none)
        text, orders = TEXTS[self.formula]
        if roundings.fine:  # else what is rounded is known, but not in which order
            orders = ("pairs",) if roundings.of_log else ("samples",)
        query = Query(at, (n, m), seen, there, problem.causal, self.options, "")
        arrays = {name: y for name, y in x.items() if name != "mask"}
        arrays["root"] = np.full((1, 1), problem.scale**0.5)
        if query_frequencies in self.formula.rules and "omega" in x:
            arrays["omega"] = x["omega"][at].reshape(-1, x["q"].shape[-1])
        few = _REPEATED * len(np.unique(x["k"])) < x["k"].size
        tied = few or len(np.unique(x["k"], axis=0)) < m
        laws = []
        for order in orders:
            write = partial(_write_scaled, text, query._replace(order=order))
            laws.append(derive(write, arrays, roundings, tied))
        out, covariances, bounds, slacks = zip(*laws, strict=True)
        return RowLaw(out[0], sum(covariances), np.max(bounds, 0), np.max(slacks, 0))


def _write_scaled(
    write: Callable[..., Any], query: Query, q: Any, k: Any, v: Any, root: Any, **more: Any
) -> Any:
    """Write a text of queries and keys times the root of the scale."""
    return write(query, root * q, root * k, v, **more)
