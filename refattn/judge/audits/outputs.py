"""Compute what correct and wrong kernels give for the inputs of a test."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from ...arrays import checks
from ...arrays.library import Doubles, is_array_api_obj, to_host
from ...arrays.stored import mask_of_members
from ...features import elu_features
from ..mistakes.causes.sampled import show_distances
from ..mistakes.defects.catalogue import right, wrong
from ..mistakes.defects.edits import BY_PRODUCTS, Edited
from ..rounding.formats import FORMATS, dtype_of, widen
from ..rounding.problems import CALLED, Index, Problem, pose_arrays, pose_gradients, sweep
from ..rounding.profiles import PROFILES
from ..rounding.roundings import RowErrors
from ..verification.choice import fused_profile

_BACKWARD = "backward"
# Kinds of bugs by their names, the first that fits.
_KINDS_OF = {
    _BACKWARD: "-backward-|-behind$",
    "head": "head|group|gqa|batch|interleaved|padding-of-the-first",
    "mask": "mask|causal|window|padding|hidden|empty|unmasked",
    "block lost": "tail|late|dropped|top-four|stride|rescaled",
    "normaliser": "epsilon|plus-one|padded-blocks|sink|sums|over-queries|weights|series|normalis",
    "scale": "scale|base|log2e|cosine|cap|clipped|scores|maximum|overflow",
}
_GROWING = [2.0 ** (i / 8) for i in range(-112, 1)]


@dataclass(frozen=True, eq=False)
class Case:
    """The inputs of a kernel, with its results by name: "out", and perhaps "dq", "dk" and "dv"."""

    arrays: Mapping[str, Doubles]  # q, k and v, heads before tokens
    options: Mapping[str, Any]  # of the formula
    estimator: str
    dtype: str  # of the output
    problems: Mapping[str, Problem]  # of which each result is the solution
    exact: Mapping[str, Doubles]
    errors: Mapping[str, Doubles]  # of a correct kernel, before its results are rounded
    swapped: bool = False  # whether tokens come before heads in the kernel's own arrays
    d_out: Doubles | None = None  # the derivative to the output, if there are gradients
    goes_back: bool = False  # whether the test asks for gradients, which some options do not have

    def attend(self, fn: Edited | None = None, **changes: Any) -> Doubles:
        """Compute the formula, or what a bug makes of it, also of other arrays or options."""
        return np.asarray(self._call(fn or _definition(self.estimator), **changes), np.float64)

    def go_back(self, d_out: Doubles | None, fn: Edited | None = None) -> dict[str, Doubles]:
        """Compute the gradients, or what a bug makes of them."""
        fn = fn or _definition(f"{self.estimator}-{_BACKWARD}")
        return dict(zip(("dq", "dk", "dv"), self._call(fn, d_out=d_out)[1:], strict=True))

    def give(self, trial: Trial) -> dict[str, Doubles]:
        """Compute what a wrong kernel returns, before it is rounded: the output, or gradients."""
        if trial.backward is None:
            return {"out": trial.compute(self)}
        return self.go_back(self.d_out, trial.backward)

    def _call(self, fn: Edited, **changes: Any) -> Any:
        """Call an implementation with copies of the arrays: a bug may write to its arguments."""
        finite = all(np.isfinite(x).all() for x in self.arrays.values())
        arguments = {**self.arrays, **self.options, **changes}
        copies = {x: y.copy() if hasattr(y, "copy") else y for x, y in arguments.items()}
        fn = fn.joined(BY_PRODUCTS) if finite else fn
        try:
            return fn(**copies)
        except TypeError:
            if "window" not in copies:
                raise
            n, m = (self.arrays[x].shape[-2] for x in "qk")  # the formula takes no window: a mask
            ahead = np.arange(m) - np.arange(m - n, m)[:, None]
            seen = show_distances(ahead, False, copies.pop("window"))
            copies["mask"] = copies.get("mask", True) & seen
            return fn(**copies)

    def write(self, out: Doubles, name: str = "out") -> Doubles:
        """Round a result as a kernel with the errors of a correct one writes it; 0 stays 0."""
        with np.errstate(all="ignore"):
            return FORMATS[self.dtype].round(np.where(out == 0, out, out + self.errors[name]))

    def swap(self, x: Doubles) -> Doubles:
        """Exchange heads and tokens if the kernel's arrays have them in the other order."""
        return swap_heads(x) if self.swapped else x

    def subtract(self, got: Doubles) -> Doubles:
        """Return the finite errors of the kernel's output, in its own layout."""
        with np.errstate(all="ignore"):
            return np.nan_to_num(self.swap(got) - self.exact["out"], posinf=0.0, neginf=0.0)

    def distance(self, got: Doubles) -> float:
        """Return the relative error of the kernel's output."""
        return relative_error(self.subtract(got), self.exact["out"])

    def see_first(self, count: float) -> Any:
        """Hide all keys but the first, in a mask."""
        seen = np.arange(self.arrays["k"].shape[-2])[None] < count
        return seen & self.options.get("mask", True)


class Trial(NamedTuple):
    """An output, or the gradients of a backward pass, that a test should reject."""

    name: str
    compute: Callable[[Case], Doubles]  # the output
    backward: Edited | None = None  # gives (out, dq, dk, dv)
    effect: str = ""  # in a sentence


@cache
def _definition(name: str) -> Edited:
    return next(x.fn for x in right() if x.name == name)


def swap_heads(x: Doubles) -> Doubles:
    return np.ascontiguousarray(np.swapaxes(x, -2, -3))


def relative_error(error: Doubles, exact: Doubles) -> float:
    """Return the norm of an error over that of the exact numbers."""
    return float(np.sqrt(np.sum(error**2) / (np.sum(exact**2) or 1.0)))


def pose_case(
    q: Any, k: Any, v: Any, *, dtype: str | None = None, estimator: str = "softmax", **options: Any
) -> Case:
    """Check arrays and options, and compute the exact output."""
    checks.choice("estimator", estimator, CALLED.values())
    dtype = dtype_of(q) if dtype is None else dtype
    checks.choice("dtype", dtype, [x for x in FORMATS if not x.startswith("tfloat32")])
    arrays = {x: FORMATS[dtype].round(widen(x, y)) for x, y in zip("qkv", (q, k, v), strict=True)}
    options = {x: on_host(x, y) for x, y in options.items() if y is not None}
    if "mask" in options:
        options["mask"] = mask_of_members(options["mask"], *arrays.values())
    of_map = {"feature_map": elu_features} if estimator == CALLED["map"] else {}
    given: dict[str, Any] = {**arrays, **options, **of_map}
    problem = pose_arrays(**given)
    if CALLED[problem.kind] != estimator:
        raise ValueError("`omega` must be given for rfa, and for no other estimator.")
    case = Case(arrays, options, estimator, dtype, {"out": problem}, {}, {})
    exact = case.attend()
    return replace(case, exact={"out": exact}, errors={"out": np.zeros_like(exact)})


def on_host(name: str, x: Any) -> Any:
    """Bring an option to NumPy if it is an array."""
    if not is_array_api_obj(x):
        return x
    return to_host(x, None) if name == "mask" else widen(name, x)


def add_gradients(case: Case, d_out: Doubles) -> Case:
    """Add the gradients for a derivative with respect to the output, if bugs take the options."""
    if not case.options.keys() <= {"mask", "causal"}:
        return replace(case, goes_back=True)
    read = case.write(case.exact["out"]).__getitem__
    shapes = {f"d{x}": y.shape for x, y in case.arrays.items()}
    problems = pose_gradients(case.problems["out"], shapes, d_out.__getitem__, read, case.dtype)
    errors = {**case.errors, **{x: _simulate_rounding(y, case.dtype) for x, y in problems.items()}}
    exact = {**case.exact, **case.go_back(d_out)}
    problems = {**case.problems, **problems}
    case = replace(case, d_out=d_out, goes_back=True)
    return replace(case, problems=problems, exact=exact, errors=errors)


def simulate_errors(case: Case) -> Case:
    """Give a case the errors of a usual kernel before its output is rounded."""
    return replace(case, errors={"out": _simulate_rounding(case.problems["out"], case.dtype)})


def _simulate_rounding(problem: Problem, dtype: str) -> Doubles:
    errors = np.zeros((*problem.lead, problem.shape[0], problem.shape[2]))

    def write(index: Index, i: slice, rows: RowErrors) -> None:
        at: Any = (*index, i)
        errors[at] = rows.nearest - rows.out

    sweep(problem, dtype, PROFILES[fused_profile(dtype)]._replace(out=None), write)
    return errors


def trivial() -> list[Trial]:
    """List trivial outputs, which every test should reject."""

    def no_scores(case: Case, **changes: Any) -> Doubles:
        return case.attend(q=np.zeros_like(case.arrays["q"]), **changes)

    outputs: Mapping[str, Callable[[Case], Doubles]] = {
        "zeros": lambda case: np.zeros_like(case.exact["out"]),
        "mean of v": no_scores,
        "v of the first key": lambda case: no_scores(case, mask=case.see_first(1)),
        "half the scale": lambda case: case.attend(q=case.arrays["q"] / 2),
    }
    return [Trial(*x) for x in outputs.items()]


def known(estimator: str) -> Iterator[Trial]:
    """List the known bugs, but those of random numbers."""
    for x in wrong():
        random = x.fn.over == "dropout" or x.name == f"{estimator}-dropout"
        if x.estimator == estimator and not random:
            back = x.fn if kind_of(x.name) == _BACKWARD else None
            yield Trial(x.name, partial(Case.attend, fn=x.fn), back, x.effect)


def kind_of(name: str) -> str:
    """Return the kind of a bug: what it gets wrong."""
    return next((kind for kind, words in _KINDS_OF.items() if re.search(words, name)), "other")


def sized(case: Case) -> dict[str, tuple[Callable[[float, Case], Doubles], Sequence[float]]]:
    """List bugs of a size, with the sizes for a case, from the smallest."""

    def lose_rows(count: float, case: Case) -> Doubles:
        out = case.exact["out"]
        return out * (np.arange(out.shape[-2])[::-1, None] >= count)

    return {
        "output times": (lambda x, case: (1 + x) * case.exact["out"], _GROWING),
        "scores times": (lambda x, case: case.attend(q=(1 + x) * case.arrays["q"]), _GROWING),
        "last keys lost": (
            lambda x, case: case.attend(mask=case.see_first(case.problems["out"].shape[1] - x)),
            range(1, case.problems["out"].shape[1] + 1),
        ),
        "last rows zero": (lose_rows, range(1, case.exact["out"].shape[-2] + 1)),
    }
