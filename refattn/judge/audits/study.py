"""Find which known bugs, trivial outputs and errors of a given size a comparison lets through."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from itertools import groupby
from math import floor, inf, log10, nan
from typing import Any, NamedTuple

import numpy as np

from ...arrays.library import array_namespace, constant, device
from ...arrays.shown import held
from ...arrays.tables import Column, Table, digits
from ...arrays.threads import Interrupted
from ...arrays.words import check_keywords, keyword_names, portable, to_json
from ..mistakes.defects.catalogue import matters
from ..rounding.formats import FORMATS
from ..rounding.problems import pose_arrays
from ..verification.choice import fused_profile
from ..verification.door import verify
from ..verification.tolerances import Allowance, measure_needs
from .outputs import (
    Case,
    Trial,
    kind_of,
    known,
    pose_case,
    relative_error,
    simulate_errors,
    sized,
    trivial,
)

_NO_DIFFERENCE = 1e-9  # of the largest number: what differs less is no bug on these inputs
_BELOW_ROUNDING = 1 / 16  # of the unit of a type: errors that nothing can tell from rounding
_NOT_COUNTED = ("hidden", "alike", "untried")

Passes = Callable[[Trial | None], bool]
Tolerances = dict[str, dict[str, Allowance]]


class Survivor(NamedTuple):
    """A bug that passes.

    Attributes
    ----------
    name : str
        Its name, which `refattn explain` explains.
    relative_error : float
        Norm of its error over that of the exact output.
    kind : str
        Kind of the bug: scale, mask, head, block lost, normaliser, backward, or other.
    largest_error, rows : float
        The largest error of an element, and the share of rows that have an error above the
        tolerance that a correct kernel needs.
    caught : bool
        Whether that tolerance rejects the bug.
    effect : str
        Its effect in a sentence.
    """

    name: str
    relative_error: float
    kind: str
    largest_error: float
    rows: float
    caught: bool
    effect: str


@held("survivors", "blind", "accepts_correct", "needed")
class Audit(NamedTuple):
    """The known bugs and trivial outputs that a comparison accepts.

    Attributes
    ----------
    survivors : list of Survivor
        Bugs of the catalogue that pass although their errors are larger than a correct kernel's,
        the largest error first.
    blind : list of str
        Trivial outputs that pass: "zeros", "mean of v", "v of the first key",
        "half the scale".
    accepts_correct : bool
        Whether a correct kernel passes.
    rejected : list of str
        Bugs that fail.
    hidden, alike : list of str
        Bugs that no test, not even `refattn.verify`, can tell from a correct kernel's errors; and
        bugs that make no difference on these inputs.
    untried : list of str
        Bugs of gradients if the test computes none, and bugs that refattn does not simulate with
        the kernel's options.
    left : list of str
        Bugs that were still to be tried when the audit was interrupted.
    sizes : dict
        The largest size of a bug that passes: a factor 1 + x on the output or on all scores, and
        the number of keys lost at the end or of rows of zeros. 0 if all are rejected, NaN if the
        audit was interrupted before it tried them.
    needed : Allowance
        The tolerance (atol, rtol) that the output of a correct kernel needs, in the dtype of the
        largest call.
    tolerances : dict
        For each dtype, a dict with the tolerance for "out" and, if the test computes gradients,
        for "dq", "dk" and "dv". Each is enough for all calls in that dtype.
    estimator, dtype : str
        What the kernel computes, and the dtype of its output.
    shapes : dict
        Shapes of q, k and v, of the largest call.
    conventions : str
        Options of the calls to the kernel, in words.
    """

    survivors: list[Survivor]
    blind: list[str]
    accepts_correct: bool
    rejected: list[str]
    hidden: list[str]
    alike: list[str]
    untried: list[str]
    left: list[str]
    sizes: dict[str, float]
    needed: Allowance
    tolerances: Tolerances
    estimator: str
    dtype: str
    shapes: dict[str, tuple[int, ...]]
    conventions: str

    def tables(self) -> tuple[Table]:
        """Give the survivors as rows."""
        columns = [
            *(Column("name"), Column("kind"), Column("relative_error", digits)),
            *(Column("largest_error", digits, drop=2), Column("rows", "{:.1%}".format, drop=3)),
            Column(
                "caught",
                lambda x: "yes" if x else "no",
                "whether the needed tolerance rejects it; rows: share of rows it rejects",
            ),
            Column("effect", None),
        ]
        return (Table("survivors", [portable(x) for x in self.survivors], columns),)

    def to_json(self) -> str:
        """Write all of it as JSON."""
        return to_json(self)

    def lines(self, verbose: bool = False) -> list[str]:
        """Describe the results and what to do.

        With `verbose` also name the bugs of `hidden`, `alike`, `untried` and `left`.
        """
        return [*self._count(verbose), *self._describe_sizes(), *self._advise()]

    def _count(self, verbose: bool) -> Iterator[str]:
        """Count bugs by what became of them."""
        if not self.accepts_correct:
            yield "this test rejects a correct kernel"
        if self.blind:
            yield f"FAIL: this test accepts {', '.join(self.blind)}"
        count = len(self.survivors)
        yield f"{count} of {count + len(self.rejected)} known bugs pass"
        if not self.sizes:
            yield "only gradients are compared: bugs of the output were not tried"
            if not self._goes_back():
                yield "bugs of gradients are simulated with the options mask and causal only"
        backward = [x for x in self.untried if kind_of(x) == "backward"]
        reasons = {
            "that make no difference on these inputs": self.alike,
            "of gradients, which were not tried": backward,
            "that refattn does not simulate with the kernel's options": [
                x for x in self.untried if x not in backward
            ],
            "that cannot be told from a correct kernel's errors": self.hidden,
            "that were still to be tried": self.left,
        }
        counts = [f"{len(names)} {reason}" for reason, names in reasons.items() if names]
        if counts:
            yield f"not counted: {', '.join(counts)}"
        for reason, names in reasons.items() if verbose else ():
            for kind, group in groupby(sorted(names, key=kind_of), kind_of):
                yield f"  bugs {reason} ({kind}): {', '.join(group)}"

    def _goes_back(self) -> bool:
        return any("dq" in x for x in self.tolerances.values())

    def _describe_sizes(self) -> Iterator[str]:
        """Write the sizes that pass."""
        for name, size in self.sizes.items():
            if size > 0 and name.endswith("times"):
                places = max(4, 1 - floor(log10(size)))  # also of a size below .0005
                factor = "any factor up to 2" if size == 1 else f"{1 + size:.{places}g}"
                yield f"largest error that passes: {name} {factor}"
            elif size > 0:
                yield f"largest error that passes: {name}: {size:.0f}"

    def _advise(self) -> Iterator[str]:
        """Say which tolerances and inputs would show more."""
        count, caught = len(self.survivors), sum(x.caught for x in self.survivors)
        tolerances = [
            " ".join([dtype] * (len(self.tolerances) > 1) + [name] * self._goes_back())
            + f" atol {digits(atol)}, rtol {digits(rtol)}"
            for dtype, needed in self.tolerances.items()
            for name, (atol, rtol) in needed.items()
            if self.sizes or name != "out"
        ]
        if caught:
            text = "; ".join(x.strip() for x in tolerances)
            yield f"use {text} (needed on these inputs): this rejects {caught} of {count}"
        if caught < count or self.blind:
            yield "refattn.testing.assert_attention_close needs no tolerance and rejects all"
        n, m = self.shapes["q"][-2], self.shapes["k"][-2]
        if {"mean of v", "half the scale"} == {*self.blind}:
            yield "change the inputs: larger q, so that weights differ from each other"
        if any("tail" in x for x in self.alike) and n % 4 == 0 and m % 4 == 0:
            yield "change the inputs: lengths that no block size divides, such as 509"
        if any("gqa" in x for x in self.alike) and len(self.shapes["q"]) > 2:
            yield "change the inputs: fewer heads of k and v than of q, if the kernel supports them"


def audit(
    compare: Callable[[Any, Any], Any],
    *,
    q: Any,
    k: Any,
    v: Any,
    dtype: str | None = None,
    estimator: str = "softmax",
    track: Callable[[Sequence[Any]], Iterable[Any]] = iter,
    **options: Any,
) -> Audit:
    """List the known bugs that a comparison of an output with the expected output accepts.

    `compare` is called for each known bug with two outputs: that of a kernel that has the bug
    and otherwise rounds as a correct kernel does, and the exact output.

    Parameters
    ----------
    compare : callable
        ``compare(got, expected)`` returns whether the output passes, or raises an AssertionError if
        it does not. `got` is rounded to `dtype`, an array of the library of `q`; in NumPy, which
        has no bfloat16, such numbers are in float32. `expected` is float32, or float64 if `dtype`
        is float64.
    q, k, v : arrays, shapes (..., n, d), (..., m, d) and (..., m, d_v)
        Inputs of the kernel; they are rounded to `dtype` first.
    dtype : str, optional
        The dtype of the kernel's arrays, that of `q` by default.
    estimator : {"softmax", "rfa", "linear"}
        What the kernel computes.
    track : callable
        Wraps the sequence of trials, for example to show progress.
    **options
        As for `refattn.verify`: `causal`, `mask`, `scale`, `bias`, `window`, `softcap`, `sinks`, or
        `omega` and `log_weight`.

    Returns
    -------
    Audit
        The bugs that pass, with their errors, and the tolerance that a correct kernel needs.

    Raises
    ------
    TypeError, ValueError
        If an argument is unusable.
    KeyboardInterrupt
        If it is interrupted; its attribute `found` is the audit until then.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import testing
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 8, 4))
    >>> def compare(got, expected):
    ...     return np.allclose(got, expected, atol=1.0)
    >>> testing.audit(compare, q=q, k=k, v=v, dtype="bfloat16").blind
    ['mean of v', 'half the scale']
    """
    if not callable(compare):
        raise TypeError(f"`compare` must be callable, got {type(compare).__name__}.")
    check_keywords("audit", options, keyword_names(pose_arrays) or [])
    case = simulate_errors(pose_case(q, k, v, dtype=dtype, estimator=estimator, **options))
    wide = "float64" if case.dtype == "float64" else "float32"
    expected = array_namespace(q).asarray(case.exact["out"].astype(wide), device=device(q))
    narrow = case.dtype if case.dtype == "float16" else wide  # NumPy has no bfloat16
    like = np.empty(0, narrow) if isinstance(q, np.ndarray) else q

    def passes(trial: Trial | None) -> bool:
        out = case.exact["out"] if trial is None else trial.compute(case)
        try:
            answer = compare(constant(case.write(out), like), expected)
        except AssertionError:
            return False
        return answer is None or bool(answer)

    return conclude([case], passes, track=track)


def conclude(
    cases: Sequence[Case], passes: Passes, *, track: Callable[[Sequence[Any]], Iterable[Any]] = iter
) -> Audit:
    """Try the trivial outputs, the catalogue, and bugs of a size.

    An interruption raises what was found until then.
    """
    case = max(cases, key=lambda x: x.exact["out"].size)
    tolerances = _find_tolerances(cases)
    correct, accepted = passes(None), {x.name: passes(x) for x in trivial()}
    # Else only gradients are compared.
    forward = not any(x.goes_back for x in cases) or not all(accepted.values())
    bugs = [x for x in known(case.estimator) if forward or x.backward is not None]
    found: dict[str, Survivor | str] = {x.name: "alike" for x in bugs}
    options = {name for x in cases for name, y in x.options.items() if y is not False}
    bugs = [x for x in bugs if matters(x.name, options)]
    found |= {x.name: "left" for x in bugs}
    ladders = sized(case) if forward else {}
    sizes = dict.fromkeys(ladders, nan)
    interrupted = False

    def attempt(bug: Trial) -> None:
        found[bug.name] = _try(cases, tolerances, bug, passes)

    def climb(name: str) -> None:
        make, of = ladders[name]
        count = bisect_left(of, True, key=lambda x: not passes(Trial(name, partial(make, x))))
        sizes[name] = float(of[count - 1]) if count else 0.0

    # In an order in which the first jobs predict the time of the rest.
    shuffled = [partial(attempt, bugs[i]) for i in np.random.default_rng(0).permutation(len(bugs))]
    try:
        for job in track([*shuffled, *(partial(climb, x) for x in ladders)]):
            job()
    except KeyboardInterrupt:
        interrupted = True
    survivors = [x for x in found.values() if isinstance(x, Survivor)]
    outcomes = ("rejected", *_NOT_COUNTED, "left")
    audited = Audit(
        sorted(survivors, key=lambda x: -x.relative_error),
        [name for name, passed in accepted.items() if passed and forward],
        correct,
        **{x: [name for name, y in found.items() if y == x] for x in outcomes},
        sizes=sizes,
        needed=tolerances[case.dtype]["out"],
        tolerances=tolerances,
        estimator=case.estimator,
        dtype=" and ".join(dict.fromkeys([case.dtype, *tolerances])),
        shapes={x: y.shape for x, y in case.arrays.items()},
        conventions=" / ".join(dict.fromkeys(map(_describe, cases))),
    )
    if interrupted:
        raise Interrupted(audited)
    return audited


def _find_tolerances(cases: Sequence[Case]) -> Tolerances:
    """Find what a correct kernel needs in all calls."""
    found: Tolerances = {}
    for case in cases:
        of = found.setdefault(case.dtype, {})
        for name, problem in case.problems.items():
            need = next(measure_needs(problem, case.dtype, fused_profile(case.dtype))).pair
            of[name] = Allowance(*map(max, need, of.get(name, need)))
    return found


def _describe(case: Case) -> str:
    """Write the options of a call."""
    words = (
        name if x is True or isinstance(x, np.ndarray) else f"{name} {x}"
        for name, x in case.options.items()
        if x is not False
    )
    return ", ".join(words) or "no options"


def _try(
    cases: Sequence[Case], tolerances: Tolerances, bug: Trial, passes: Passes
) -> Survivor | str:
    """Try a bug: what passes is returned with its errors in the call where they are largest."""
    bug = bug._replace(compute=cache(bug.compute))
    found = [_measure(x, tolerances[x.dtype], bug) for x in cases]
    wrong = [x for x in found if isinstance(x, Survivor)]
    if not wrong:
        return next(x for x in _NOT_COUNTED if x in found)
    return max(wrong, key=lambda x: x.relative_error) if passes(bug) else "rejected"


def _measure(case: Case, needed: dict[str, Allowance], trial: Trial) -> Survivor | str:
    """Measure how wrong a result is, or say that it is not, or that nothing can tell."""
    if trial.backward is not None and case.d_out is None:
        return "untried"
    try:
        results = case.give(trial)
    except Exception:  # of the bug: it cannot be called so
        return "untried"
    written = {x: case.write(y, x) for x, y in results.items()}
    exact, sizes = case.exact, {x: np.abs(case.exact[x]) for x in results}
    allowed = {x: needed[x].atol + needed[x].rtol * y for x, y in sizes.items()}
    errors, off = (
        {x: np.nan_to_num(np.abs(z - exact[x]), nan=inf, posinf=inf) for x, z in y.items()}
        for y in (results, written)
    )
    caught = any(bool(np.any(off[x] > allowed[x])) for x in results)
    rows = np.concatenate([(errors[x] > allowed[x]).any(axis=-1).ravel() for x in results])
    error, size = (np.concatenate([*map(np.ravel, x.values())]) for x in (errors, sizes))
    largest, relative = float(np.max(error, initial=0.0)), relative_error(error, size)
    if largest <= _NO_DIFFERENCE * float(np.max(size, initial=0.0)):
        return "alike"
    if not caught and relative <= _BELOW_ROUNDING * FORMATS[case.dtype].unit:
        return "hidden"
    given = {**case.arrays, **case.options, **written, "dtype": case.dtype}
    given |= {"d_out": case.d_out} if "dq" in written else {}
    if not caught and verify(**given, estimator=case.estimator).verdict != "FAIL":
        return "hidden"
    numbers = relative, kind_of(trial.name), largest, float(np.mean(rows)), caught
    return Survivor(trial.name, *numbers, trial.effect)
