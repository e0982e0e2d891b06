"""A kernel in a test, and what stands for it: its arguments are read, and its output replaced."""

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

from ..arrays.library import Doubles, constant, is_array_api_obj
from ..rounding.formats import dtype_of, widen
from .outputs import (
    Case,
    Trial,
    add_gradients,
    on_host,
    pose_case,
    relative_error,
    simulate_errors,
    swap_heads,
)

_LARGEST_ERROR = 0.05  # relative, of an output that still counts as that of the formula
# What public code calls our arguments.
_WORDS = {
    "q": "query queries",
    "k": "key keys",
    "v": "value values",
    "causal": "is_causal",
    "scale": "sm_scale softmax_scale",
    "mask": "attn_mask attention_mask key_padding_mask padding_mask",
    "bias": "attn_bias",
    "window": "window_size",
    "softcap": "soft_cap logits_soft_cap",
    "sinks": "s_aux",
}
_NAMES = {word: name for name, words in _WORDS.items() for word in words.split()}
_READ_OPTIONS = ("causal", "scale", "mask", "bias", "window", "softcap", "sinks")


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
        arguments, tape = _name_arguments(self.kernel, args, kwargs), _Tape(self)
        names: dict[int, list[str]] = {}
        for name in "qkv":  # which may be one array
            names.setdefault(id(arguments[name]), []).append(f"d{name}")
        watched = {i: tape.watch(arguments[x[0][1]], x) for i, x in names.items()}
        args = tuple(watched.get(id(x), x) for x in args)
        kwargs = {name: watched.get(id(x), x) for name, x in kwargs.items()}
        result = self.kernel(*args, **kwargs)
        written = next((x for y in ("out", "o") if (x := arguments.get(y)) is not None), None)
        result = written if result is None else result
        out, *rest = result if isinstance(result, tuple | list) else (result,)
        tape.key, case = self._read(arguments, out)
        if self.trial is None or self.trial.backward is not None:
            out = tape.watch(out, [])
        else:
            wrong = case.swap(case.write(self.trial.compute(case)))
            out = tape.watch(out, [], constant(wrong, out))
            if written is not None:
                written[...] = out
        if isinstance(result, tuple | list):
            make = type(result)
            return make(out, *rest) if hasattr(result, "_fields") else make([out, *rest])
        return out

    def _read(self, arguments: dict[str, Any], out: Any) -> tuple[bytes, Case]:
        """Find the case that a call is."""
        numbers = {x: widen(x, arguments[x]) for x in "qkv"}
        given = {**dict(_options(arguments)), **self.declared}
        key = pickle.dumps((numbers, given, dtype_of(out, "out")))
        if key not in self.cases:
            self.cases[key] = _guess(numbers, given, out)
        return key, self.cases[key]


def _guess(numbers: Mapping[str, Doubles], given: dict[str, Any], out: Any) -> Case:
    """Find the way of reading a call that explains its output.

    Arguments may not say the layout, the scale or whether it is causal; a mask of padding may be
    true where keys are hidden.
    """
    got, dtype = widen("out", out), dtype_of(out, "out")
    if "scale" in given and np.isclose(given["scale"], numbers["q"].shape[-1] ** -0.5, rtol=1e-6):
        given["scale"] = None
    ways: dict[str, tuple[Any, ...]]
    ways = {"layout": ("bhnd", "bnhd"), "causal": (False, True), "scale": (None, 1.0)}
    ways = {x: (given[x],) if x in given else y for x, y in ways.items()}
    if "mask" in given:
        ways["mask"] = given["mask"], ~given["mask"]
    least, nearest, reason = np.inf, None, "there is no way"
    for way in product(*ways.values()):
        options: dict[str, Any] = {**given, **dict(zip(ways, way, strict=True))}
        swapped = options.pop("layout") == "bnhd" and got.ndim > 2
        q, k, v, expected = (swap_heads(x) if swapped else x for x in (*numbers.values(), got))
        try:
            case = pose_case(q, k, v, dtype=dtype, **options)
        except (TypeError, ValueError) as error:
            reason = str(error)
            continue
        exact = case.exact["out"]
        if exact.shape != expected.shape:
            continue
        with np.errstate(all="ignore"):
            errors = np.nan_to_num(expected - exact, posinf=0.0, neginf=0.0)
            off = relative_error(errors, exact)
        if off < least:
            least, nearest = off, replace(case, errors={"out": errors}, swapped=swapped)
    if nearest is None:
        raise Unclear(
            f"the kernel's arrays cannot be read ({reason}); give the comparison to "
            "refattn.testing.audit"
        )
    if least > _LARGEST_ERROR:
        raise Unclear(
            f"the kernel's output is not softmax attention of its first three arrays: it is "
            f"off by {least:.0%}; say --layout, --causal or --scale if they differ from what "
            "its arguments say, or give the comparison to refattn.testing.audit"
        )
    wide = dtype in ("float32", "float64")  # the errors of others hold the rounding of the output
    return nearest if wide else simulate_errors(nearest)


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
    found = {_NAMES.get(name.lower(), name.lower()): x for name, x in named.items()}
    if not {*"qkv"} <= {*found}:
        arrays = [x for x in (*args, *kwargs.values()) if is_array_api_obj(x) and x.ndim > 1]
        if len(arrays) < 3:
            raise Unclear(
                "the kernel must be called with arrays q, k and v; for others give the comparison "
                "to refattn.testing.audit"
            )
        found |= dict(zip("qkv", arrays, strict=False))
    return found


def _options(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Read the options of the formula."""
    for name in _READ_OPTIONS:
        x = arguments.get(name)
        if x is None:
            continue
        if name in ("mask", "bias", "sinks"):
            name = "bias" if name == "mask" and "bool" not in str(x.dtype) else name
            x = on_host(name, x)
        elif name == "window":
            left, right = (x - 1, 0) if isinstance(x, int) else x
            x = tuple(None if side is None or side < 0 else side for side in (left, right))
            if x == (None, None):
                continue
        elif name == "softcap" and not x:
            continue
        yield name, bool(x) if name == "causal" else x


class _Tape:
    """The backward pass of one call, in torch."""

    def __init__(self, of: Substitute) -> None:
        self.of, self.key = of, b""
        self.errors: dict[str, Doubles] = {}  # of gradients

    def watch(self, x: Any, names: Sequence[str], value: Any = None) -> Any:
        """Give an array other numbers, and see its derivative: without names, of the output."""
        value, back = x if value is None else value, self._back
        torch: Any = sys.modules.get("torch")
        if torch is None or not getattr(x, "requires_grad", False):
            return value

        class Watched(torch.autograd.Function):  # type: ignore[misc, name-defined, unused-ignore]
            @staticmethod
            def forward(ctx: Any, x: Any) -> Any:
                return value.detach().clone()

            @staticmethod
            def backward(ctx: Any, grad: Any) -> Any:
                return back(names, grad)

        return Watched.apply(x)

    def _back(self, names: Sequence[str], grad: Any) -> Any:
        """Take the derivative to the output, or replace that to inputs."""
        case, trial = self.of.cases[self.key], self.of.trial
        if not names:
            d_out = case.swap(widen("d_out", grad))
            if not case.goes_back:
                self.of.cases[self.key] = add_gradients(case, d_out)
            if trial is not None and trial.backward is not None:
                exact, wrong = case.go_back(d_out), case.go_back(d_out, trial.backward)
                self.errors = {x: wrong[x] - exact[x] for x in exact}
        elif self.errors:
            errors = np.sum([self.errors[x] for x in names], axis=0)
            grad = constant(widen("grad", grad) + case.swap(errors), grad)
        return grad
