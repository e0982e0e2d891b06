"""Outputs of the cases to thirty digits, and what errors in them are relative to."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ...arrays.library import Floats
from .bounding import bounds
from .cases import (
    CONTRACT_FACTOR,
    DIGITS,
    DTYPE_FACTS,
    FLAGS,
    REALS,
    SCHEMA,
    VERSION,
    Case,
    is_exact,
)
from .drawing import Recipe
from .formulas import solve, truth
from .recipes import recipes_of
from .sources import libraries, sources

PRECISIONS = (50, 80)  # digits


def _decimal(low: Any, high: Any, size: float) -> str | None:
    """Return digits of a number that was evaluated twice, None where they do not agree.

    They must on 30 of its own digits, or on 45 of its size where terms of that size cancel: what is
    left has digits enough in the higher precision, or is 0.
    """
    mp = truth().context(PRECISIONS[-1])
    if not mp.isfinite(high):  # of a query that sees no key
        return str(float(high)) if str(low) == str(high) else None
    off, digit = abs(mp.mpf(low) - high), mp.mpf(10)
    agree = off <= digit**-30 * abs(high)
    if not (agree or off <= digit**-45 * size):
        return None
    if high == 0 or not (agree or abs(high) > digit**-40 * size):
        return "0.0"
    return str(mp.nstr(high, DIGITS, strip_zeros=False, min_fixed=0, max_fixed=0))


def _allowed_errors(
    inputs: dict[str, Floats], expected: Iterable[Floats], size: Iterable[Floats], cond: float
) -> dict[str, float]:
    """Return allowed errors for the dtypes that hold inputs and outputs and say something."""
    sizes = np.concatenate([x.ravel() for x in size])
    largest = max(float(np.max(np.abs(x), initial=0, where=np.isfinite(x))) for x in expected)
    smallest = float(np.min(sizes[sizes > 0], initial=math.inf))
    found = {}
    for dtype, (_, eps, tiny, huge) in DTYPE_FACTS.items():
        allowed = CONTRACT_FACTOR * eps * (1 + cond)
        fits = all(is_exact(x, dtype) for x in inputs.values())
        if fits and allowed < 1 and largest < huge and smallest >= 1e4 * tiny:
            found[dtype] = allowed
    return found


def solved(recipe: Recipe | Case) -> dict[str, Any]:
    """Solve a case: its entry in a file."""
    low, high = (solve(recipe, dps) for dps in PRECISIONS)
    cond, size = bounds(recipe, low)
    decimals: dict[str, list[str]] = {name: [] for name in high}
    for name, values in high.items():
        sizes = np.broadcast_to(size[name], values.shape)
        for a, b, s in zip(low[name].ravel(), values.ravel(), sizes.ravel(), strict=True):
            digits = _decimal(a, b, s)
            if digits is None:
                raise ValueError(f"{recipe.id}: {name} is not determined to 30 digits, {a}, {b}.")
            if not math.isfinite(float(digits)) and "EMPTY_ROW" not in recipe.flags:
                raise ValueError(f"{recipe.id}: {name} is {digits}.")
            if digits != "0.0" and s == 0:
                raise ValueError(f"{recipe.id}: {name} is too small to be a float64.")
            decimals[name].append(digits)
    rounded = [np.array([float(x) for x in digits]) for digits in decimals.values()]
    arguments = {
        name: write_hex(x) if name in REALS and x is not None else x
        for name, x in recipe.arguments.items()
    }
    if isinstance(arguments.get("window"), tuple):
        arguments["window"] = list(arguments["window"])
    return {
        "id": recipe.id,
        "comment": recipe.comment,
        "flags": list(recipe.flags),
        "arguments": arguments,
        "dtype": recipe.dtype,
        "inputs": {name: _tensor_entry(x) for name, x in recipe.inputs.items()},
        "expected": {
            name: {
                "shape": list(high[name].shape),
                "data": digits,
                "size": _tensor_entry(size[name], hexed=False),
            }
            for name, digits in decimals.items()
        },
        "cond": cond,
        "tolerance": _allowed_errors(recipe.inputs, rounded, size.values(), cond),
        "result": "acceptable" if "EPS" in recipe.flags else "valid",
    }


def _tensor_entry(x: Floats, hexed: bool = True) -> dict[str, Any]:
    data = x.ravel().tolist()
    if hexed and x.dtype.kind == "f":
        data = [write_hex(value) for value in data]
    return {"shape": list(x.shape), "data": data}


def write_hex(x: float) -> str:
    """Write a number in C99 hexadecimal, without zeros at the end.

    Examples
    --------
    >>> write_hex(-1.5), write_hex(0.0)
    ('-0x1.8p+0', '0x0.0p+0')
    """
    return re.sub(r"(\.[0-9a-f]+?)0+p", r"\1p", float(x).hex())


_SOLVED: dict[str, dict[str, Any]] = {}


def _once(recipe: Recipe) -> dict[str, Any]:
    if recipe.id not in _SOLVED:
        _SOLVED[recipe.id] = solved(recipe)
    return _SOLVED[recipe.id]


def prepare(
    track: Callable[[Sequence[Any]], Iterable[Any]] = iter, estimator: str | None = None
) -> None:
    """Solve all cases, which takes nearly all of the time that `write` and `export` need.

    `track` wraps the sequence of cases, for a bar of progress, say.
    """
    for case in track(recipes_of(estimator)):
        _once(case)


def documents(estimator: str | None = None) -> dict[str, Any]:
    """Return the content of every file by its name."""
    chosen = recipes_of(estimator)
    names = sorted({recipe.file for recipe in chosen})
    return {name: document([recipe for recipe in chosen if recipe.file == name]) for name in names}


def document(recipes: Sequence[Recipe]) -> dict[str, Any]:
    """Return the content of a file with these cases of one estimator."""
    from ... import __version__

    used = sorted({flag for recipe in recipes for flag in recipe.flags})
    groups: dict[str, Any] = {}
    for recipe in recipes:
        group = groups.setdefault(recipe.group, _group(recipe))
        group["tests"].append(_once(recipe))
    estimator = recipes[0].estimator
    return {
        "estimator": estimator,
        "generator": "refattn.judge.vectors",
        "header": [
            f"Golden vectors for the estimator {estimator}.",
            "Inputs are exact; |output - expected| <= tolerance * size must hold.",
        ],
        "notes": {
            flag: dict(zip(("bugType", "description", "effect"), FLAGS[flag], strict=True))
            for flag in used
        },
        "numberOfTests": len(recipes),
        "package": "refattn",
        "packageVersion": __version__,
        "schema": SCHEMA.name,
        "schemaVersion": VERSION,
        "testGroups": [groups[kind] for kind in sorted(groups)],
    }


def _group(recipe: Recipe) -> dict[str, Any]:
    """Make a group without tests: its subject, its source, and libraries of its convention."""
    name, said = recipe.group, recipe.convention
    group: dict[str, Any] = {"type": name, "source": sources(name, said), "tests": []}
    if said is not None:
        group["convention"] = said._asdict() | {"libraries": libraries(said)}
    return group
