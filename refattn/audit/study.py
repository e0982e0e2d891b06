"""What a comparison lets through: the catalogue, outputs that say nothing, and bugs of a size."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from math import inf, nan
from typing import Any, NamedTuple

import numpy as np

from ..arrays.library import Doubles, array_namespace, constant, device
from ..arrays.shown import held
from ..arrays.tables import Column, Table, digits
from ..arrays.words import portable, to_json
from ..rounding.formats import FORMATS
from ..verification.choice import fused_profile
from ..verification.door import verify
from ..verification.tolerance import Allowance, measure_needs
from .outputs import (
    COUNTS,
    FACTORS,
    Case,
    Trial,
    gradient_errors,
    known,
    pose_case,
    simulate_errors,
    trivial,
)

_NO_DIFFERENCE = 1e-9  # of the largest number: what differs less is no bug on these inputs
_BELOW_ROUNDING = 1 / 16  # of the unit of a type: errors that nothing can tell from rounding
_GROWING = [2.0 ** (i / 8) for i in range(-112, 1)]

Passes = Callable[[Trial | None], bool]


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
        The largest error of an element, and the share of rows with one that a correct kernel's
        tolerance does not allow.
    caught : bool or None
        Whether that tolerance rejects it; None for gradients, for which there is none.
    effect : str
        Its effect in a sentence.
    """

    name: str
    relative_error: float
    kind: str
    largest_error: float
    rows: float
    caught: bool | None
    effect: str


@held("survivors", "blind", "accepts_correct", "needed")
class Audit(NamedTuple):
    """What a comparison lets through.

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
    sizes : dict
        The largest size of a bug that passes: a factor 1 + x on the output or on all scores, and
        the number of keys lost at the end or of rows of zeros. 0 if all are rejected.
    needed : Allowance
        The tolerance (atol, rtol) that a correct kernel needs in the largest call.
    estimator, dtype : str
        What the kernel computes, and the type of its output.
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
    sizes: dict[str, float]
    needed: Allowance
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
                "by the tolerance that is needed; rows: share with an error above it",
            ),
            Column("effect", None),
        ]
        return (Table("survivors", [portable(x) for x in self.survivors], columns),)

    def to_json(self) -> str:
        """Write all of it as JSON."""
        return to_json(self)

    def lines(self) -> list[str]:
        """Say what was found, and what to do."""
        count, tried = len(self.survivors), len(self.survivors) + len(self.rejected)
        found = [f"{count} of {tried} known bugs pass"]
        if self.blind:
            found.insert(0, f"FAIL: this test accepts {', '.join(self.blind)}")
        if not self.accepts_correct:
            found.insert(0, "this test rejects a correct kernel")
        if not self.sizes:
            found.append("only gradients are compared: bugs of the output were not tried")
        found.append(
            f"not counted: {len(self.alike)} that make no difference on these inputs, and "
            f"{len(self.hidden)} that cannot be told from a correct kernel's errors"
        )
        found += [f"also passes: {x}" for x in self._describe_sizes()]
        atol, rtol = self.needed
        caught = sum(x.caught is True for x in self.survivors)
        if caught:
            found.append(
                f"instead: atol {digits(atol)}, rtol {digits(rtol)}, what a correct kernel needs "
                f"on these inputs, rejects {caught} of the {count}"
            )
        if self.sizes and (caught < count or self.blind):
            found.append(
                "assert_attention_close of refattn.testing takes no tolerance and rejects all"
            )
        return [*found, *self._advise()]

    def _describe_sizes(self) -> Iterator[str]:
        """Write the sizes that pass."""
        for name, size in self.sizes.items():
            if size == 1.0 and name in FACTORS:
                yield f"{name} any factor up to 2"
            elif size:
                yield f"{name} {1 + size:.4g}" if name in FACTORS else f"{name}: {size:.0f}"

    def _advise(self) -> Iterator[str]:
        """Say which inputs would show more."""
        n, m = self.shapes["q"][-2], self.shapes["k"][-2]
        if {"mean of v", "half the scale"} == {*self.blind}:
            yield "inputs: larger q, so that weights differ from each other"
        if any("tail" in x for x in self.alike) and n % 4 == 0 and m % 4 == 0:
            yield "inputs: lengths that no block size divides, such as 509"
        if any("gqa" in x for x in self.alike) and len(self.shapes["q"]) > 2:
            yield "inputs: fewer heads of k and v than of q, if the kernel takes them"


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
    """List the known bugs that a comparison of an output with the expected one lets through.

    `compare` is called with the output of each known bug, with the roundings of a correct kernel,
    and with the exact output.

    Parameters
    ----------
    compare : callable
        ``compare(got, expected)`` returns whether the output passes, or nothing and raises an
        AssertionError. `got` has the numbers of `dtype`, and the library of `q`; bfloat16 is
        float32 in NumPy. `expected` is float32, or float64 for that dtype.
    q, k, v : arrays, shapes (..., n, d), (..., m, d) and (..., m, d_v)
        Inputs of the kernel; they are rounded to `dtype` first.
    dtype : str, optional
        The type of the kernel's arrays, that of `q` by default.
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
        The bugs that pass, and the tolerance that would reject them.

    Raises
    ------
    TypeError, ValueError
        If an argument is unusable.

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
    case = simulate_errors(pose_case(q, k, v, dtype=dtype, estimator=estimator, **options))
    write, expected = _for_user(q, case)

    def passes(trial: Trial | None) -> bool:
        out = case.exact if trial is None else trial.compute(case)
        try:
            answer = compare(write(case.write(out)), expected)
        except AssertionError:
            return False
        return answer is None or bool(answer)

    return conclude([case], passes, track=track)


def _for_user(q: Any, case: Case) -> tuple[Callable[[Doubles], Any], Any]:
    """Return what brings an output to the library of `q`, and what is expected there."""
    wide = "float64" if case.dtype == "float64" else "float32"
    if isinstance(q, np.ndarray):
        narrow = case.dtype if case.dtype == "float16" else wide
        return lambda out: out.astype(narrow), case.exact.astype(wide)
    xp = array_namespace(q)
    expected = xp.asarray(case.exact.astype(wide), device=device(q))
    return lambda out: constant(out, q), expected


def conclude(
    cases: Sequence[Case],
    passes: Passes,
    *,
    gradients: bool = False,
    track: Callable[[Sequence[Any]], Iterable[Any]] = iter,
) -> Audit:
    """Try the trivial outputs, the catalogue, and bugs of a size."""
    case = max(cases, key=lambda x: x.exact.size)
    needs = [measure_needs(x.problem, x.dtype, fused_profile(x.dtype)) for x in cases]
    needed = [next(x).pair for x in needs]
    correct = passes(None)
    accepted = {x.name: passes(x) for x in trivial()}
    blind = [name for name, passed in accepted.items() if passed]
    forward = not gradients or not all(accepted.values())  # else only gradients are compared
    survivors: list[Survivor] = []
    names: dict[str, list[str]] = {"rejected": [], "hidden": [], "alike": []}
    options = {name for x in cases for name in x.options}
    for bug in track(list(known(case.estimator, options))):
        trial = bug._replace(compute=_remembered(bug.compute))
        if trial.backward is None and not forward:
            continue
        found = [_measure(*x, trial, gradients) for x in zip(cases, needed, strict=True)]
        wrong = [x for x in found if isinstance(x, Survivor)]
        if not wrong:
            names["hidden" if "hidden" in found else "alike"].append(trial.name)
        elif passes(trial):
            survivors.append(max(wrong, key=lambda x: x.relative_error))
        else:
            names["rejected"].append(trial.name)
    survivors.sort(key=lambda x: -x.relative_error)
    return Audit(
        survivors,
        blind if forward else [],
        correct,
        **names,
        sizes=_find_sizes(case, passes) if forward else {},
        needed=needed[cases.index(case)],
        estimator=case.estimator,
        dtype=" and ".join(dict.fromkeys([case.dtype, *(x.dtype for x in cases)])),
        shapes={x: y.shape for x, y in case.arrays.items()},
        conventions=" / ".join(dict.fromkeys(map(_describe, cases))),
    )


def _describe(case: Case) -> str:
    """Write the options of a call."""
    words = (
        name if x is True or isinstance(x, np.ndarray) else f"{name} {x}"
        for name, x in case.options.items()
        if x is not False
    )
    return ", ".join(words) or "no options"


def _remembered(compute: Callable[[Case], Doubles]) -> Callable[[Case], Doubles]:
    """Compute once for each case."""
    found: dict[int, Doubles] = {}

    def look(case: Case) -> Doubles:
        if id(case) not in found:
            found[id(case)] = compute(case)
        return found[id(case)]

    return look


def _measure(case: Case, needed: Allowance, trial: Trial, gradients: bool) -> Survivor | str:
    """Measure how wrong an output is, or say that it is not, or that nothing can tell."""
    if trial.backward is not None:
        return _measure_gradients(case, trial) if gradients else "alike"
    try:
        out = trial.compute(case)
    except Exception:  # of the bug: it cannot be called so
        return "alike"
    size, allowed = np.abs(case.exact), needed.atol + needed.rtol * np.abs(case.exact)
    written = case.write(out)
    error, off = (
        np.nan_to_num(np.abs(x - case.exact), nan=inf, posinf=inf) for x in (out, written)
    )
    largest, above = float(np.max(error, initial=0.0)), error > allowed
    if largest <= _NO_DIFFERENCE * float(np.max(size, initial=0.0)):
        return "alike"
    relative, caught = _relative_error(error, size), bool(np.any(off > allowed))
    small = relative <= _BELOW_ROUNDING * FORMATS[case.dtype].unit
    if not caught and (small or _verdict(case, written) != "FAIL"):
        return "hidden"
    rows = float(np.mean(above.any(axis=-1)))
    return Survivor(trial.name, relative, trial.kind, largest, rows, caught, trial.effect)


def _verdict(case: Case, written: Doubles) -> str:
    arrays: dict[str, Any] = {**case.arrays, **case.options}
    return verify(**arrays, out=written, dtype=case.dtype, estimator=case.estimator).verdict


def _relative_error(error: Doubles, size: Doubles) -> float:
    return float(np.sqrt(np.sum(error**2) / (np.sum(size**2) or 1.0)))


def _measure_gradients(case: Case, trial: Trial) -> Survivor | str:
    """The same of gradients, for derivatives to the output drawn at random."""
    d_out = np.random.default_rng(0).standard_normal(case.exact.shape)
    try:
        errors, exact = gradient_errors(case, trial, d_out)
    except Exception:  # of the bug, or of an option that it does not take
        return "alike"
    error, size = (np.concatenate([x.ravel() for x in y.values()]) for y in (errors, exact))
    error = np.nan_to_num(np.abs(error), nan=inf, posinf=inf)
    relative = _relative_error(error, size)
    if relative <= FORMATS[case.dtype].unit:
        return "alike" if relative <= _NO_DIFFERENCE else "hidden"
    largest = float(np.max(error, initial=0.0))
    return Survivor(trial.name, relative, trial.kind, largest, nan, None, trial.effect)


def _find_sizes(case: Case, passes: Passes) -> dict[str, float]:
    """Find the largest size that passes of each bug with one."""
    lengths = (case.arrays["k"].shape[-2], case.exact.shape[-2])
    steps: dict[str, tuple[Any, Sequence[float]]] = {x: (y, _GROWING) for x, y in FACTORS.items()}
    for (name, make), length in zip(COUNTS.items(), lengths, strict=True):
        steps[name] = make, range(1, length + 1)
    sizes = {}
    for name, (make, of) in steps.items():
        bugs = [Trial(name, "size", "", partial(make, size)) for size in of]
        first = bisect.bisect_left(bugs, True, key=lambda bug: not passes(bug))
        sizes[name] = float(of[first - 1]) if first else 0.0
    return sizes
