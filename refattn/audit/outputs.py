"""What correct and wrong kernels give for some inputs."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator, Mapping
from functools import cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from ..arrays import checks
from ..arrays.library import Doubles, is_array_api_obj, to_host
from ..arrays.stored import mask_of_members
from ..conformance.defects.catalogue import right, wrong
from ..conformance.defects.edits import Edited
from ..features import elu_features
from ..rounding.formats import FORMATS, dtype_of, widen
from ..rounding.problems import CALLED, Index, Problem, pose_arrays, sweep
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


class Case(NamedTuple):
    """The inputs of a kernel, with what a correct one gives.

    Attributes
    ----------
    arrays, options : dict
        q, k and v in float64, heads before tokens, and what else the formula takes.
    estimator, dtype : str
        What is computed, and the type of the output.
    exact : array
        The exact output.
    errors : array
        What a correct kernel adds to it before its output is rounded.
    problem : Problem
        The same, for what is known of roundings.
    """

    arrays: Mapping[str, Doubles]
    options: Mapping[str, Any]
    estimator: str
    dtype: str
    exact: Doubles
    errors: Doubles
    problem: Problem

    def attend(self, **changes: Any) -> Doubles:
        """Compute the formula with other arrays or options."""
        out: Doubles = _definition(self.estimator)(**{**self.arrays, **self.options, **changes})
        return out

    def write(self, out: Doubles) -> Doubles:
        """Round an output as a kernel with the errors of a correct one writes it; 0 stays 0."""
        with np.errstate(all="ignore"):
            return FORMATS[self.dtype].round(np.where(out == 0, out, out + self.errors))

    def call(self, fn: Callable[..., Any], **more: Any) -> Any:
        """Call an implementation with copies of the arrays: a bug may write to its arguments."""
        arguments = {**self.arrays, **self.options, **more}
        return fn(**{x: y.copy() if hasattr(y, "copy") else y for x, y in arguments.items()})

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
        Gives (out, dq, dk, dv) for a case and the derivative to the output.
    """

    name: str
    kind: str
    effect: str
    compute: Callable[[Case], Doubles]
    backward: Edited | None = None


@cache
def _definition(name: str) -> Edited:
    return next(x.fn for x in right() if x.name == name)


def gradient_errors(
    case: Case, trial: Trial, d_out: Doubles
) -> tuple[dict[str, Doubles], dict[str, Doubles]]:
    """Return how far gradients in q, k and v are off, and the exact ones."""
    assert trial.backward is not None
    exact = case.call(_definition(f"{case.estimator}-{_BACKWARD}"), d_out=d_out)[1:]
    found = case.call(trial.backward, d_out=d_out)[1:]
    errors = (x - y for x, y in zip(found, exact, strict=True))
    return dict(zip("qkv", errors, strict=True)), dict(zip("qkv", exact, strict=True))


def pose_case(
    q: Any, k: Any, v: Any, *, dtype: str | None = None, estimator: str = "softmax", **options: Any
) -> Case:
    """Check arrays and options, and compute the exact output."""
    checks.choice("estimator", estimator, CALLED.values())
    dtype = dtype_of(q) if dtype is None else dtype
    checks.choice("dtype", dtype, [x for x in FORMATS if x != "tfloat32"])
    arrays = {x: FORMATS[dtype].round(widen(x, y)) for x, y in zip("qkv", (q, k, v), strict=True)}
    options = {x: _on_host(x, y) for x, y in options.items() if y is not None}
    if "mask" in options:
        options["mask"] = mask_of_members(options["mask"], *arrays.values())
    of_map = {"feature_map": elu_features} if estimator == CALLED["map"] else {}
    given: dict[str, Any] = {**arrays, **options, **of_map}
    problem = pose_arrays(**given)
    if CALLED[problem.kind] != estimator:
        raise ValueError("`omega` must be given for rfa, and for no other estimator.")
    exact = _definition(estimator)(**arrays, **options)
    return Case(arrays, MappingProxyType(options), estimator, dtype, exact, 0 * exact, problem)


def _on_host(name: str, x: Any) -> Any:
    """Bring an option to NumPy if it is an array."""
    if not is_array_api_obj(x):
        return x
    return to_host(x, None) if name == "mask" else widen(name, x)


def simulate_errors(case: Case) -> Case:
    """Give a case the errors of a usual kernel before its output is rounded."""
    errors = np.zeros_like(case.exact)

    def write(index: Index, i: slice, rows: RowErrors) -> None:
        at: Any = (*index, i)
        errors[at] = rows.nearest - rows.out

    profile = PROFILES[fused_profile(case.dtype)]._replace(out=None)
    sweep(case.problem, case.dtype, profile, write)
    return case._replace(errors=errors)


def trivial() -> Iterator[Trial]:
    """List trivial outputs, which every test should reject."""

    def no_scores(case: Case, **changes: Any) -> Doubles:
        return case.attend(q=np.zeros_like(case.arrays["q"]), **changes)

    def first_value(case: Case) -> Doubles:
        first = np.arange(case.arrays["k"].shape[-2]) == 0
        return no_scores(case, mask=case.see(first[None]))

    def halve(case: Case) -> Doubles:
        q = case.arrays["q"]
        return case.attend(q=q / 2)

    outputs: Mapping[str, Callable[[Case], Doubles]] = {
        "zeros": lambda case: np.zeros_like(case.exact),
        "mean of v": no_scores,
        "v of the first key": first_value,
        "half the scale": halve,
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
            kind = next((k for k, words in _KINDS_OF.items() if re.search(words, x.name)), "other")
            back = x.fn if kind == _BACKWARD else None
            compute = _right if back else partial(_wrong, x.fn)
            yield Trial(x.name, kind, x.effect, compute, back)


def _right(case: Case) -> Doubles:
    return case.exact


def _wrong(fn: Edited, case: Case) -> Doubles:
    return np.asarray(case.call(fn), np.float64)


# Bugs of a size: from 0 to 1, or up to the number of keys or rows.
def scale_output(size: float, case: Case) -> Doubles:
    return (1 + size) * case.exact


def scale_scores(size: float, case: Case) -> Doubles:
    return case.attend(q=(1 + size) * case.arrays["q"])


def lose_keys(size: float, case: Case) -> Doubles:
    m = case.arrays["k"].shape[-2]
    return case.attend(mask=case.see(np.arange(m)[None] < m - size))


def lose_rows(size: float, case: Case) -> Doubles:
    n = case.exact.shape[-2]
    return np.where(np.arange(n)[:, None] < n - size, case.exact, 0.0)


FACTORS = {"output times": scale_output, "scores times": scale_scores}
COUNTS = {"last keys lost": lose_keys, "last rows zero": lose_rows}
