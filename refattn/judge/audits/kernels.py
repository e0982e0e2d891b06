"""Stand in for a kernel inside a test: read the arguments of its calls, and replace its output."""

from __future__ import annotations

import inspect
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from ...arrays.library import Doubles, constant, is_array_api_obj
from ...arrays.words import ELSEWHERE
from ..rounding.formats import dtype_of, widen
from .outputs import Case, Trial, add_gradients, on_host, pose_case, simulate_errors, swap_heads

_LARGEST_ERROR = 0.05  # relative, of an output that still counts as that of the formula
_OPTIONS = ("causal", "scale", "mask", "bias", "window", "softcap", "sinks")


class Unclear(ValueError):
    """The kernel's output is not that of the formula as far as its call can be read."""


class Substitute:
    """Stands for a kernel: calls it, and returns what a wrong kernel would have returned.

    Options of the formula that are known, `layout`, `causal` and `scale`, may be declared.
    """

    def __init__(self, kernel: Callable[..., Any], declared: Mapping[str, Any]) -> None:
        self.kernel, self.declared = kernel, declared
        self.trial: Trial | None = None  # whose output the test gets; None for the kernel's own
        self.cases: dict[bytes, Case] = {}  # each call once

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Stand for a method, too."""
        return self if instance is None else partial(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arguments, errors = _name_arguments(self.kernel, args, kwargs), dict[str, Doubles]()

        def spoil(names: Sequence[str], grad: Any) -> Any:
            if not errors:
                return grad
            return constant(widen("grad", grad) + sum(errors[x] for x in names), grad)

        inputs = [(f"d{x}", arguments[x]) for x in "qkv"]  # which may be one array
        names = {id(x): [name for name, y in inputs if y is x] for _, x in inputs}
        watched = {id(x): _watch(x, x, partial(spoil, names[id(x)])) for _, x in inputs}
        args = tuple(watched.get(id(x), x) for x in args)
        kwargs = {name: watched.get(id(x), x) for name, x in kwargs.items()}
        result = self.kernel(*args, **kwargs)
        written = arguments.get("out")
        result = written if result is None else result
        out, *rest = result if isinstance(result, tuple | list) else (result,)
        key, case = self._read(arguments, out)
        wrong = out
        if self.trial is not None and self.trial.backward is None:
            wrong = constant(case.swap(case.write(self.trial.compute(case))), out)
            if written is not None:
                written[...] = wrong
        out = _watch(out, wrong, partial(self._go_back, key, errors))
        if isinstance(result, tuple | list):
            return getattr(type(result), "_make", type(result))([out, *rest])
        return out

    def _read(self, arguments: dict[str, Any], out: Any) -> tuple[bytes, Case]:
        """Find the case that a call is."""
        numbers, got = {x: widen(x, arguments[x]) for x in "qkv"}, widen("out", out)
        given = {**dict(_options(arguments)), **self.declared}
        key = pickle.dumps((numbers, given, dtype_of(out, "out")))
        while key in self.cases and self.cases[key].distance(got) > _LARGEST_ERROR:
            key += b"'"  # options that are no arguments, such as attributes of a module, differ
        if key not in self.cases:
            self.cases[key] = _guess(numbers, given, got, dtype_of(out, "out"))
        return key, self.cases[key]

    def _go_back(self, key: bytes, errors: dict[str, Doubles], grad: Any) -> Any:
        """Read the derivative to the output, and find what a wrong kernel adds to gradients."""
        case, trial = self.cases[key], self.trial
        d_out = case.swap(widen("d_out", grad))
        if not case.goes_back:
            self.cases[key] = add_gradients(case, d_out)
        if trial is not None and trial.backward is not None:
            exact, wrong = case.go_back(d_out), case.go_back(d_out, trial.backward)
            errors.update({x: case.swap(wrong[x] - exact[x]) for x in exact})
        return grad


def _watch(x: Any, value: Any, back: Callable[[Any], Any]) -> Any:
    """Give an array of torch other numbers, and change its derivative."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not getattr(x, "requires_grad", False):
        return value

    class Watched(torch.autograd.Function):  # type: ignore[misc, name-defined, unused-ignore]
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return value.detach().clone()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return back(grad)

    return Watched.apply(x)


def _guess(numbers: Mapping[str, Doubles], given: dict[str, Any], got: Doubles, dtype: str) -> Case:
    """Find the way of reading a call that explains its output.

    Arguments may not say the layout, the scale or whether it is causal; a mask of padding may be
    true where keys are hidden.
    """
    if "scale" in given and np.isclose(given["scale"], numbers["q"].shape[-1] ** -0.5, rtol=1e-6):
        given["scale"] = None
    ways: dict[str, tuple[Any, ...]]
    ways = {"layout": ("bhnd", "bnhd"), "causal": (False, True), "scale": (None, 1.0)}
    ways = {x: (given[x],) if x in given else y for x, y in ways.items()}
    if "mask" in given:
        ways["mask"] = given["mask"], ~given["mask"]
    cases, reason = [], "it has another shape"
    for way in product(*ways.values()):
        options: dict[str, Any] = {**given, **dict(zip(ways, way, strict=True))}
        swapped = options.pop("layout") == "bnhd" and got.ndim > 2
        arrays = map(swap_heads, numbers.values()) if swapped else numbers.values()
        try:
            case = replace(pose_case(*arrays, dtype=dtype, **options), swapped=swapped)
        except (TypeError, ValueError) as error:
            reason = str(error)
            continue
        if case.swap(got).shape == case.exact["out"].shape:
            cases.append(case)
    nearest = min(cases, key=lambda x: x.distance(got), default=None)
    if nearest is not None:
        reason = f"it is off by {nearest.distance(got):.0%}"
    if nearest is None or nearest.distance(got) > _LARGEST_ERROR:
        raise Unclear(
            "the kernel's output is not softmax attention of its first three arrays: "
            f"{reason}; set --layout, --causal or --scale if its arguments do not set them, or "
            "pass the comparison to refattn.audit"
        )
    wide = dtype in ("float32", "float64")  # the errors of others hold the rounding of the output
    own = replace(nearest, errors={"out": nearest.subtract(got)})
    return own if wide else simulate_errors(nearest)


def _name_arguments(
    kernel: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Name the arguments of a call in our words; q, k and v are the first three arrays."""
    try:
        bound = inspect.signature(kernel).bind(*args, **kwargs)
        bound.apply_defaults()
        named = {x: y for x, y in bound.arguments.items() if x not in ("args", "kwargs")}
        named |= bound.arguments.get("kwargs", {})
    except (TypeError, ValueError):  # of compiled functions
        named = {f"_{i}": x for i, x in enumerate(args)} | dict(kwargs)
    found = {ELSEWHERE.get(name.lower(), name.lower()): x for name, x in named.items()}
    if not {*"qkv"} <= {*found}:
        arrays = [x for x in (*args, *kwargs.values()) if is_array_api_obj(x) and x.ndim > 1]
        if len(arrays) < 3:
            raise Unclear(
                "the kernel must be called with arrays q, k and v; for others pass the comparison "
                "to refattn.audit"
            )
        found |= dict(zip("qkv", arrays, strict=False))
    return found


def _options(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Read the options of the formula."""
    for name in _OPTIONS:
        x = arguments.get(name)
        if name == "window" and x is not None:
            left, right = (x - 1, 0) if isinstance(x, int) else x
            sides = tuple(None if side is None or side < 0 else side for side in (left, right))
            x = None if sides == (None, None) else sides
        if x is None or (name == "softcap" and not x):
            continue
        if name in ("mask", "bias", "sinks"):
            name = "bias" if name == "mask" and "bool" not in str(x.dtype) else name
            x = on_host(name, x)
        yield name, bool(x) if name == "causal" else x
