"""A kernel in a test, and what stands for it: its arguments are read, and its output replaced."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from ..arrays.library import Doubles, constant, is_array_api_obj, to_host
from ..rounding.formats import dtype_of, widen
from .outputs import Case, Trial, gradient_errors, pose_case, simulate_errors

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
    """Stands for a kernel: calls it, and gives what a wrong one would have given.

    Parameters
    ----------
    kernel : callable
        The kernel.
    declared : mapping
        Options of the formula that are known: `layout`, `causal`, `scale`.

    Attributes
    ----------
    trial : Trial or None
        The bug whose output the test gets; None for the kernel's own.
    cases : list of Case
        What it was called with, each once.
    has_gradients : bool
        Whether somebody went back through it.
    """

    def __init__(self, kernel: Callable[..., Any], declared: Mapping[str, Any]) -> None:
        self.kernel, self.declared = kernel, declared
        self.trial: Trial | None = None
        self.cases: list[Case] = []
        self.has_gradients = False
        self._found: dict[bytes, tuple[Case, bool]] = {}

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Stand for a method, too."""
        return self if instance is None else partial(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tapes, arguments = _Tapes(self), _arguments(self.kernel, args, kwargs)
        tapped = tapes.tap({x: arguments[x] for x in "qkv"})
        args = tuple(tapped.get(id(x), x) for x in args)
        kwargs = {name: tapped.get(id(x), x) for name, x in kwargs.items()}
        result = self.kernel(*args, **kwargs)
        written = next((x for y in ("out", "o") if (x := arguments.get(y)) is not None), None)
        result = written if result is None else result
        out = result[0] if isinstance(result, tuple | list) else result
        case, swapped = self._read(arguments, out)
        tapes.case, tapes.swapped = case, swapped
        numbers = None
        if self.trial is not None and self.trial.backward is None:
            numbers = _swap(case.write(self.trial.compute(case)), swapped)
        replaced = tapes.replace(out, numbers)
        if numbers is not None and written is not None:
            written[...] = replaced
        if isinstance(result, tuple | list):
            rest = [replaced, *result[1:]]
            return type(result)(*rest) if hasattr(result, "_fields") else type(result)(rest)
        return replaced

    def _read(self, arguments: dict[str, Any], out: Any) -> tuple[Case, bool]:
        """Find the case that a call is, among the ways in which it may be read."""
        numbers = {x: widen(x, arguments[x]) for x in "qkv"}
        key = (
            b"".join(x.tobytes() for x in numbers.values())
            + repr({x: arguments.get(x) for x in _READ_OPTIONS}).encode()
        )
        if key not in self._found:
            self._found[key] = self._guess(numbers, arguments, out)
            self.cases.append(self._found[key][0])
        return self._found[key]

    def _guess(
        self, numbers: dict[str, Doubles], arguments: dict[str, Any], out: Any
    ) -> tuple[Case, bool]:
        got, dtype = widen("out", out), dtype_of(out, "out")
        given = {**dict(_options(arguments)), **self.declared}
        usual = numbers["q"].shape[-1] ** -0.5
        if "scale" in given and np.isclose(given["scale"], usual, rtol=1e-6):
            given["scale"] = None
        # What the arguments do not determine; a mask of padding may be true where keys are hidden.
        ways: dict[str, tuple[Any, ...]]
        ways = {"layout": ("bhnd", "bnhd"), "causal": (False, True), "scale": (None, 1.0)}
        ways = {x: (given[x],) if x in given else y for x, y in ways.items()}
        if "mask" in given:
            ways["mask"] = given["mask"], ~given["mask"]
        least, nearest, reason = np.inf, None, "there is no way"
        for way in product(*ways.values()):
            options: dict[str, Any] = {**given, **dict(zip(ways, way, strict=True))}
            swapped = options.pop("layout") == "bnhd" and got.ndim > 2
            q, k, v, expected = (_swap(x, swapped) for x in (*numbers.values(), got))
            try:
                case = pose_case(q, k, v, dtype=dtype, **options)
            except (TypeError, ValueError) as error:
                reason = str(error)
                continue
            if case.exact.shape != expected.shape:
                continue
            with np.errstate(all="ignore"):
                errors = np.nan_to_num(expected - case.exact, posinf=0.0, neginf=0.0)
                off = float(np.sqrt(np.sum(errors**2) / (np.sum(case.exact**2) or 1.0)))
            if off < least:
                least, nearest = off, (case._replace(errors=errors), swapped)
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
        if dtype not in ("float32", "float64"):  # these errors hold the rounding of the output
            nearest = simulate_errors(nearest[0]), nearest[1]
        return nearest


def _ours(name: str) -> str:
    """Return what we call an argument."""
    return _NAMES.get(name.lower(), name.lower())


def _swap(x: Doubles, swapped: bool) -> Doubles:
    """Exchange the axes of heads and tokens."""
    return np.ascontiguousarray(np.swapaxes(x, -2, -3)) if swapped else x


def _arguments(
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
    found = {_ours(name): x for name, x in named.items()}
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
            x = to_host(x, None) if name == "mask" else widen(name, x)
        elif name == "window":
            left, right = (x - 1, 0) if isinstance(x, int) else x
            x = tuple(None if side is None or side < 0 else side for side in (left, right))
            if x == (None, None):
                continue
        elif name == "softcap" and not x:
            continue
        yield name, bool(x) if name == "causal" else x


class _Tapes:
    """The way back of one call, in torch: the derivative to the output, and of q, k and v."""

    def __init__(self, of: Substitute) -> None:
        self.of = of
        self.case: Case | None = None
        self.swapped = False
        self.grads: dict[str, Doubles] = {}

    def tap(self, arrays: Mapping[str, Any]) -> dict[int, Any]:
        """Return by identity what to hand on in place of q, k and v: their derivatives come by."""
        names: dict[int, list[str]] = {}
        for name, x in arrays.items():
            names.setdefault(id(x), []).append(name)
        return {id(x): self._through(x, names[id(x)], x) for x in arrays.values()}

    def replace(self, out: Any, numbers: Doubles | None) -> Any:
        """Give an output other numbers."""
        value = out if numbers is None else constant(numbers, out)
        return self._through(out, [], value)

    def _through(self, x: Any, names: Sequence[str], value: Any) -> Any:
        """Give an array other numbers, and see its derivative: without names, of the output."""
        torch: Any = sys.modules.get("torch")
        if torch is None or not getattr(x, "requires_grad", False):
            return value
        tapes = self

        class Through(torch.autograd.Function):  # type: ignore[misc, name-defined, unused-ignore]
            @staticmethod
            def forward(ctx: Any, x: Any) -> Any:
                return value.detach().clone()

            @staticmethod
            def backward(ctx: Any, grad: Any) -> Any:
                return tapes.back(names, grad)

        return Through.apply(x)

    def back(self, names: Sequence[str], grad: Any) -> Any:
        """Take the derivative to the output, or replace that to inputs."""
        self.of.has_gradients = True
        trial, case = self.of.trial, self.case
        if trial is None or trial.backward is None or case is None:
            return grad
        if not names:
            self.grads = gradient_errors(case, trial, _swap(widen("d_out", grad), self.swapped))[0]
        elif self.grads:
            errors = np.sum([self.grads[x] for x in names], axis=0)
            grad = constant(widen("grad", grad) + _swap(errors, self.swapped), grad)
        return grad
