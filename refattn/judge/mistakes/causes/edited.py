"""Rows of the catalogue as alternatives: what the formula with their edits gives for a problem."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from ....arrays.library import Doubles
from ...rounding.problems import Index, Problem
from ..defects.catalogue import Mutant, matters, wrong
from ..defects.edits import BY_PRODUCTS, Edited
from ..text import Edit
from .sampled import Alternative, Result, Rows

_USERS_PAIRS, _OWN_PAIRS = 2**24, 2**16  # of queries and keys, at most, of which a text is run
_LOG = logging.getLogger(__name__)
_LEFT_OF_ERROR = 0.02  # of the error, that a row may leave which is its cause
_KEPT_HEADS = 16  # of which what a text gives is kept
_USUAL = {"window": (None, None), "softcap": None, "causal": False}  # options not passed
_KEPT = "lse"  # in the state of an implementation
# A text returns the output only: its log normalisers are those of its softmax.
_KEEPS = (
    Edit(
        "softmax",
        "    return xp.exp(scores - finite(log_total))",
        f'    HELD["{_KEPT}"] = log_total\n    return xp.exp(scores - finite(log_total))',
    ),
)


def list_edited(
    problem: Problem, rows: Iterable[Mutant], of_user: bool = False
) -> Iterator[Alternative]:
    """List kernels that compute by an edited text, if heads are small enough."""
    for row in rows:
        heads = EditedHeads(problem, row.fn, of_user=of_user)
        if row.estimator == problem.called and row.fn.over != "backward" and heads.are_small:
            text = as_clause(row.effect)
            if problem.packed is not None:  # whose mask none but the sequences make
                text = text.replace("the mask", "the mask of sequences")
            yield Alternative(text, problem, answer=heads.attend)


def known_rows(problem: Problem) -> Iterator[Mutant]:
    """List the package's own rows that can make a difference, but those of draws."""
    options = {x for x, y in _USUAL.items() if getattr(problem, x) != y} | {*problem.first}
    for row in wrong():
        fixed = "dropout" not in (row.fn.over, row.fn.block)
        if fixed and row.estimator == problem.called and matters(row.name, options):
            yield row


def list_like(problem: Problem, read: Callable[[Index], Doubles]) -> Iterator[str]:
    """Say which rows give nearly what was read, of an estimator whose law is derived."""
    if not (heads := [*np.ndindex(problem.lead)]):
        return
    got = [read(x) for x in heads]
    right = _run_all(EditedHeads(problem, Edited(problem.record, problem.record)), heads)
    for row in known_rows(problem) if right else ():
        like = _run_all(EditedHeads(problem, row.fn), heads)
        if like and _apart_by(got, like) < _LEFT_OF_ERROR * _apart_by(got, right):
            yield as_clause(row.effect)


def _run_all(text: EditedHeads, heads: Sequence[Index]) -> list[Doubles]:
    """Run a text for some heads; nothing where it fails, or would take long."""
    if not text.are_small or text.fn.over == "backward":
        return []
    try:
        return [text.of_all()[0][0][x] if text.whole else text.of_head(x)[0][0] for x in heads]
    except ValueError:
        return []


def _apart_by(a: Sequence[Doubles], b: Sequence[Doubles]) -> float:
    return math.sqrt(sum(float(np.sum(np.square(x - y))) for x, y in zip(a, b, strict=True)))


def as_clause(effect: str) -> str:
    """Write a sentence as a clause, which goes on after "agrees if"."""
    first = effect[:1].lower() if re.match(r"(A|[A-Z][a-z]+)\b", effect) else effect[:1]
    return f"{first}{effect[1:].removesuffix('.')}"


class EditedHeads:
    """What an edited text gives for a head, of it alone or, if calls are edited, of all heads."""

    def __init__(
        self,
        problem: Problem,
        fn: Edited,
        d_out: Callable[[Index], Doubles] | None = None,
        of_user: bool = False,
    ) -> None:
        self.of_user, self.said = of_user, False  # whether a failure is to be said, and was
        self.problem, self.fn, self.d_out = problem, fn.joined(BY_PRODUCTS).joined(_KEEPS), d_out
        self.whole = fn.changes_calls or (d_out is not None and problem.key_heads is not None)
        self.of_head = lru_cache(maxsize=_KEPT_HEADS)(self._run)
        self.of_all = lru_cache(maxsize=1)(partial(self._run, None))

    @property
    def are_small(self) -> bool:
        """Whether so few pairs of queries and keys are computed at once that the text is run."""
        n, m, _ = self.problem.shape
        pairs = n * m * (math.prod(self.problem.lead) if self.whole else 1)
        return pairs <= (_USERS_PAIRS if self.of_user else _OWN_PAIRS)

    def attend(self, rows: Rows) -> Result:
        """Compute some rows of a head; log normalisers are right if the text has none."""
        (out,), lse = self.of_all() if self.whole else self.of_head(rows.at)
        at, i = rows.at if self.whole else (), rows.queries
        if lse is None:
            return Alternative("", self.problem).result(rows)._replace(out=out[at][i])
        return Result(out[at][i], lse[at][i], np.full(len(i), math.nan))  # no text says the maxima

    def pull(self, of: str, index: Index, heads: Sequence[Index]) -> Doubles:
        """Compute the gradient of a head, in which these query heads have a part."""
        number = ("out", "dq", "dk", "dv").index(of)
        if not self.whole:
            return np.asarray(sum(self.of_head(x)[0][number] for x in heads))
        every = self.of_all()[0][number]
        if of != "dq" and self.problem.key_heads is not None:
            return np.asarray(every[index])
        return np.asarray(sum(every[x] for x in heads))

    def _run(self, at: Index | None) -> tuple[tuple[Doubles, ...], Doubles | None]:
        """Run the text for a head, or for all; whatever goes wrong in it is an error of a value."""
        problem, arrays = self.problem, _gather(self.problem, at)
        options = {x: getattr(problem, x) for x, y in _USUAL.items() if getattr(problem, x) != y}
        options |= getattr(problem.derived, "settings", {})
        if not math.isclose(problem.scale, arrays["q"].shape[-1] ** -0.5, rel_tol=1e-15):
            options["scale"] = problem.scale
        q, k, v = (arrays[x] for x in "qkv")
        shapes = [(*q.shape[:-1], v.shape[-1])]
        if self.d_out is not None:
            heads = [*np.ndindex(problem.lead)] if at is None else [at]
            options["d_out"] = np.reshape([self.d_out(x) for x in heads], shapes[0])
            shapes += [q.shape, k.shape, v.shape]
        held = self.fn.space()["HELD"]
        held.pop(_KEPT, None)
        try:
            found = self.fn(**arrays, **options)
            found = found if isinstance(found, tuple) else (found,)
            found = tuple(np.asarray(x, np.float64) for x in found)
        except Exception as error:
            if self.of_user and not self.said:
                _LOG.warning("the mistake %s could not be tried: %r", self.fn.block, error)
                self.said = True
            raise ValueError(f"{self.fn.block} fails: {error!r}") from error
        if [x.shape for x in found] != shapes:
            raise ValueError(f"{self.fn.block} gives other shapes than {shapes}.")
        lse = held.pop(_KEPT, None)
        known = lse is not None and lse.size == math.prod(shapes[0][:-1])
        return found, lse.reshape(shapes[0][:-1]) if known else None


def _gather(problem: Problem, at: Index | None) -> dict[str, Any]:
    """Copy the arrays of a head, or of all heads in the shapes of a call, as texts write there."""
    lead, heads = ((), [at]) if at is not None else (problem.lead, [*np.ndindex(problem.lead)])
    read = [problem.read(x) for x in heads]
    names = [x for x in (*"qkv", "mask", "bias") if x in read[0]] + ["sinks"] * problem.has_sinks
    names += ["omega"] * (problem.kind == "text" and "omega" in read[0])
    arrays = {x: np.reshape([y[x] for y in read], (*lead, *read[0][x].shape)) for x in names}
    if "omega" in arrays and arrays["omega"].shape[-1] > (d := arrays["q"].shape[-1]):
        arrays["omega"] = arrays["omega"].reshape(*arrays["q"].shape[:-1], -1, d)  # of each query
    if problem.has_sinks:
        arrays["sinks"] = arrays["sinks"].reshape(lead)
    if lead and problem.key_heads is not None:
        share = lead[-1] // problem.key_heads
        arrays |= {x: arrays[x][..., ::share, :, :].copy() for x in "kv"}
    return arrays
