"""All cases: those of the table, and those of `hard`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from ... import naive, registry
from ...arrays import checks
from ...registry.record import Estimator, load
from ..conformance.conventions import OPTIONS
from .cases import SCHEMA, Convention
from .drawing import Recipe
from .hard import HARD_CASES, recipe
from .table import Row, draw, hides_keys, rows

# Values that fix no number, and what they are instead.
WITHOUT = {
    "none": "the library has no such argument",
    "refused": "an error",
    "undefined": "any number",
    "finite": "about the lowest float, which depends on the dtype",
}


def own(name: str, *others: str) -> Iterator[Recipe]:
    """Yield the cases of an estimator in sections that name it, or one of the other kinds."""
    record = registry.ESTIMATORS[name]
    has = {*record.options, *record.traits}
    for row in (row for row in rows() if row.needs <= has):
        for kind in row.kinds:
            if kind in others:
                yield draw(name, row)
            elif re.split("[:/]", kind)[0] == name:
                yield from _of_row(kind, row)


def _of_row(kind: str, row: Row) -> Iterator[Recipe]:
    """Yield the case of a row; a row of conventions has one for each value of its option."""
    if not kind.endswith("/conventions"):
        yield draw(kind, row)
        return
    option, _, only = row.name.partition(":")
    for value in OPTIONS[option].values:
        if value not in WITHOUT and only in ("", value):
            yield draw(kind, row, Convention(option, value))


def usual(name: str) -> Iterator[Recipe]:
    """Yield the cases of an estimator that takes q, k and v, by its traits and options."""
    record = registry.ESTIMATORS[name]
    masked = hides_keys(record) and record.takes("mask", "gqa")
    whole = ("all", "masked" if masked else "unmasked")
    return own(name, *(("chunked",) if record.has("chunked") else whole))


def of_softmax(name: str) -> Iterator[Recipe]:
    """Yield the cases of exact attention, hard ones too."""
    yield from (*own(name), *map(recipe, HARD_CASES))


@cache
def _recipes(vectors: Any, name: str) -> tuple[Recipe, ...]:
    try:
        return tuple(load(vectors)(name))
    except Exception as error:
        got = f"{type(error).__name__}: {error}"
        raise ValueError(f"`vectors` of {name} must give recipes, got {got}") from error


def all_recipes() -> tuple[Recipe, ...]:
    """Return the recipes of all records, each under the first alias of its estimator, or its name.

    They are drawn once, in the order of these names.
    """
    records = {x.name: x for x in registry.ESTIMATORS.values() if x.vectors is not None}.values()
    named = sorted(((*x.aliases, x.name)[0], x.vectors) for x in records)
    found = tuple(recipe for name, vectors in named for recipe in _recipes(vectors, name))
    for record in records:
        _check_formula(record)
    return found


def recipes_of(estimator: str | None = None) -> list[Recipe]:
    """Return the recipes of an estimator, by default of all."""
    if estimator is not None:
        checks.choice("estimator", estimator, estimators())
    return [x for x in all_recipes() if estimator in (None, x.estimator)]


def _check_formula(record: Estimator) -> None:
    """Check that the text of the formula is known: that of another package has no 50 digits."""
    formula = getattr(record.naive, "func", record.naive)  # of a `functools.partial`
    name = getattr(formula, "__name__", repr(formula))
    if record.arrays == ("q", "k", "v") and getattr(naive, name, None) is not formula:
        raise ValueError(
            f"`naive` of {record.name} must be a formula of refattn.naive, as it has `vectors`, "
            f"got {name} of {formula.__module__}."
        )


def estimators() -> tuple[str, ...]:
    """Name the estimators that have vectors."""
    return tuple(sorted({recipe.estimator for recipe in all_recipes()}))


def files() -> tuple[str, ...]:
    """Name the files; exact attention has several.

    Beside its own what libraries disagree on, what loses digits, its options, and edges of tiles.
    """
    return tuple(sorted({recipe.file for recipe in all_recipes()}))


def estimator_of(file: str) -> str:
    """Return the estimator that a file is of: the longest name that it starts with.

    Examples
    --------
    >>> estimator_of("softmax-tiles"), estimator_of("rfa-local"), estimator_of("surprise")
    ('softmax', 'rfa-local', '')
    """
    named = (name for name in estimators() if f"{file}-".startswith(f"{name}-"))
    return max(named, key=len, default="")


def schema() -> dict[str, Any]:
    """Return the schema of files, with the names of these estimators."""
    document: dict[str, Any] = json.loads(SCHEMA.read_text("utf-8"))
    document["properties"]["estimator"]["enum"] = list(estimators())
    return document
