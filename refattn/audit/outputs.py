"""What correct and wrong kernels give for some inputs."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from ..arrays import checks
from ..arrays.library import Doubles, is_array_api_obj, to_host
from ..arrays.stored import mask_of_members
from ..conformance.defects.catalogue import right, wrong
from ..conformance.defects.edits import Edited
from ..conformance.truth.text import Edit
from ..features import elu_features
from ..rounding.formats import FORMATS, dtype_of, widen
from ..rounding.problems import CALLED, Index, Problem, pose_arrays, pose_gradients, sweep
from ..rounding.profiles import PROFILES
from ..rounding.roundings import RowErrors
from ..verification.choice import fused_profile

_BACKWARD = "backward"
_NEEDS = {"bias": "bias", "sink": "sinks", "softcap": "softcap", "window": "window"}
# Kinds of bugs by their names, the first that fits.
_KINDS_OF = {
    _BACKWARD: "-backward-|-behind$",
    "head": "head|group|gqa|batch|interleaved|padding-of-the-first",
    "mask": "mask|causal|window|padding|hidden|empty|unmasked",
    "block lost": "tail|late|dropped|top-four|stride|rescaled",
    "normaliser": "epsilon|plus-one|padded-blocks|sink|sums|over-queries|weights|series|normalis",
    "scale": "scale|base|log2e|cosine|cap|clipped|scores|maximum|overflow",
}
# The same sum without an array of (n, d, m) numbers, for values that are finite.
_BY_PRODUCTS = (
    Edit(
        "weighted_sum",
        "weights[..., None, :] * xp.matrix_transpose(v)[..., None, :, :]",
        "xp.where(seen, weights, 0.0) @ v",
    ),
    Edit("weighted_sum", "xp.sum(xp.where(seen[..., None, :], terms, 0.0), axis=-1)", "terms"),
)


@dataclass(frozen=True, eq=False)
class Case:
    """The inputs of a kernel, with what a correct kernel returns.

    Attributes
    ----------
    arrays, options : dict
        q, k and v in float64, heads before tokens, and the other options of the formula.
    estimator, dtype : str
        What is computed, and the type of the output.
    problems, exact, errors : dict
        By result, "out" and perhaps "dq", "dk" and "dv": the formula as `rounding` takes it, the
        exact numbers, and what a correct kernel adds to these before they are rounded.
    swapped : bool
        Whether tokens come before heads in the kernel's own arrays.
    d_out : array or None
        The derivative with respect to the output, if there are gradients.
    """

    arrays: Mapping[str, Doubles]
    options: Mapping[str, Any]
    estimator: str
    dtype: str
    problems: Mapping[str, Problem]
    exact: Mapping[str, Doubles]
    errors: Mapping[str, Doubles]
    swapped: bool = False
    d_out: Doubles | None = None

    def attend(self, **changes: Any) -> Doubles:
        """Compute the formula with other arrays or options."""
        return np.asarray(self.call(_definition(self.estimator), **changes), np.float64)

    def write(self, out: Doubles, name: str = "out") -> Doubles:
        """Round a result as a kernel with the errors of a correct one writes it; 0 stays 0."""
        with np.errstate(all="ignore"):
            return FORMATS[self.dtype].round(np.where(out == 0, out, out + self.errors[name]))

    def call(self, fn: Edited, **changes: Any) -> Any:
        """Call an implementation with copies of the arrays: a bug may write to its arguments."""
        finite = all(np.isfinite(x).all() for x in self.arrays.values())
        arguments = {**self.arrays, **self.options, **changes}
        copies = {x: y.copy() if hasattr(y, "copy") else y for x, y in arguments.items()}
        return (_sum_by_products(fn) if finite else fn)(**copies)

    def give(self, trial: Trial) -> dict[str, Doubles]:
        """Compute what a wrong kernel returns, before it is rounded: the output, or gradients."""
        if trial.backward is None:
            return {"out": trial.compute(self)}
        return self.go_back(trial.backward, self.d_out)

    def go_back(self, fn: Edited, d_out: Doubles | None) -> dict[str, Doubles]:
        """Compute gradients."""
        return dict(zip(("dq", "dk", "dv"), self.call(fn, d_out=d_out)[1:], strict=True))

    def go_back_right(self, d_out: Doubles) -> dict[str, Doubles]:
        return self.go_back(_definition(f"{self.estimator}-{_BACKWARD}"), d_out)

    def swap(self, x: Doubles) -> Doubles:
        """Exchange heads and tokens if the kernel's arrays have them in the other order."""
        return swap_heads(x) if self.swapped else x

    def see(self, seen: Any) -> Any:
        """Add a mask of keys to that of the case."""
        mask = self.options.get("mask")
        return seen if mask is None else seen & mask


class Trial(NamedTuple):
    """An output, or the gradients of a backward pass, that a test should reject.

    Attributes
    ----------
    name, kind, effect : str
        The name of the bug, its kind, and its effect in a sentence.
    compute : callable
        Gives the output for a case.
    backward : Edited or None
        Gives (out, dq, dk, dv) in place of the right ones.
    """

    name: str
    kind: str
    effect: str
    compute: Callable[[Case], Doubles]
    backward: Edited | None = None


@cache
def _definition(name: str) -> Edited:
    return next(x.fn for x in right() if x.name == name)


@cache
def _sum_by_products(fn: Edited) -> Edited:
    quick = replace(fn, edits=(*fn.edits, *_BY_PRODUCTS))
    try:
        quick.sources()
    except ValueError:  # the bug is in that function
        return fn
    return quick


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
    checks.choice("dtype", dtype, [x for x in FORMATS if x != "tfloat32"])
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
    """Add the gradients for a derivative with respect to the output."""
    read = case.write(case.exact["out"]).__getitem__
    shapes = {f"d{x}": y.shape for x, y in case.arrays.items()}
    problems = pose_gradients(case.problems["out"], shapes, d_out.__getitem__, read, case.dtype)
    errors = {**case.errors, **{x: _simulate(y, case.dtype) for x, y in problems.items()}}
    exact = {**case.exact, **case.go_back_right(d_out)}
    problems = {**case.problems, **problems}
    return replace(case, problems=problems, exact=exact, errors=errors, d_out=d_out)


def simulate_errors(case: Case) -> Case:
    """Give a case the errors of a usual kernel before its output is rounded."""
    return replace(case, errors={"out": _simulate(case.problems["out"], case.dtype)})


def _simulate(problem: Problem, dtype: str) -> Doubles:
    errors = np.zeros((*problem.lead, problem.shape[0], problem.shape[2]))

    def write(index: Index, i: slice, rows: RowErrors) -> None:
        at: Any = (*index, i)
        errors[at] = rows.nearest - rows.out

    sweep(problem, dtype, PROFILES[fused_profile(dtype)]._replace(out=None), write)
    return errors


def trivial() -> Iterator[Trial]:
    """List trivial outputs, which every test should reject."""

    def no_scores(case: Case, **changes: Any) -> Doubles:
        return case.attend(q=np.zeros_like(case.arrays["q"]), **changes)

    def first_value(case: Case) -> Doubles:
        first = np.arange(case.arrays["k"].shape[-2]) == 0
        return no_scores(case, mask=case.see(first[None]))

    outputs: Mapping[str, Callable[[Case], Doubles]] = {
        "zeros": lambda case: np.zeros_like(case.exact["out"]),
        "mean of v": no_scores,
        "v of the first key": first_value,
        "half the scale": lambda case: case.attend(q=case.arrays["q"] / 2),
    }
    for name, compute in outputs.items():
        yield Trial(name, "trivial", "", compute)


def known(estimator: str, options: Container[str]) -> Iterator[Trial]:
    """List the known bugs, without bugs of options that are not used."""
    for x in wrong():
        option = _NEEDS.get(x.name.removeprefix(f"{estimator}-").partition("-")[0].rstrip("s"))
        there = option is None or option in options
        random = x.fn.over == "dropout" or x.name == f"{estimator}-dropout"
        if x.estimator == estimator and there and not random:
            kind = kind_of(x.name)
            back = x.fn if kind == _BACKWARD else None
            yield Trial(x.name, kind, x.effect, partial(_call, x.fn), back)


def kind_of(name: str) -> str:
    """Return the kind of a bug: what it gets wrong."""
    return next((kind for kind, words in _KINDS_OF.items() if re.search(words, name)), "other")


def _call(fn: Edited, case: Case) -> Doubles:
    return np.asarray(case.call(fn), np.float64)


# Bugs of a size: from 0 to 1, or up to the number of keys or rows.
def scale_output(size: float, case: Case) -> Doubles:
    return (1 + size) * case.exact["out"]


def scale_scores(size: float, case: Case) -> Doubles:
    return case.attend(q=(1 + size) * case.arrays["q"])


def lose_keys(size: float, case: Case) -> Doubles:
    m = case.arrays["k"].shape[-2]
    return case.attend(mask=case.see(np.arange(m)[None] < m - size))


def lose_rows(size: float, case: Case) -> Doubles:
    n = case.exact["out"].shape[-2]
    return np.where(np.arange(n)[:, None] < n - size, case.exact["out"], 0.0)


FACTORS = {"output times": scale_output, "scores times": scale_scores}
COUNTS = {"last keys lost": lose_keys, "last rows zero": lose_rows}
