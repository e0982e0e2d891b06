"""All cases, those of kernels and of moments among them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np

from ... import registry
from ...arrays.library import Floats
from ...registry.record import load
from .cases import SCHEMA
from .conventional import convention_recipes
from .drawing import Drawn, Edit, Recipe, draw_stream, unchanged
from .estimators import (
    USUAL_DRAW,
    cases_of_all,
    cases_of_lara,
    cases_of_linear,
    cases_of_ra,
    cases_of_rfa,
    cases_of_softmax,
    cases_with_masks,
    probe,
    show_signs,
)
from .hard import hard_recipes
from .options import option_recipes, tile_recipes
from .pulled import (
    pulled_lara,
    pulled_linear,
    pulled_of_all,
    pulled_rfa,
    pulled_softmax,
    pulled_with_masks,
)
from .sparse import cases_of_chunks


def cases_of_kernels(name: str) -> Iterator[Recipe]:
    def case(
        features: str,
        name: str,
        flags: str,
        comment: str,
        drawn: Drawn = USUAL_DRAW,
        *,
        edit: Edit = unchanged,
    ) -> Recipe:
        label = f"kernel-{features}-{name}-{drawn.dtype}"
        rows, size = drawn.n, 1.0 if drawn.size is None else drawn.size
        x = {
            key: draw_stream(f"{label}/{key}", (length, drawn.d), drawn.dtype, width)
            for key, length, width in (
                ("x", rows, size),
                ("y", rows, size),
                ("omega", drawn.count, 2.0),
            )
        }
        x |= {key: value.astype(np.float32).astype(float) for key, value in edit(x).items()}
        words, arguments, group = tuple(flags.split()), {"features": features}, f"kernel-{features}"
        return Recipe(label, "kernel", comment, words, arguments, drawn.dtype, x, "kernel", group)

    for features in ("positive", "hyperbolic", "trigonometric"):
        for dtype in ("float64", "float32", "bfloat16"):
            comment = "Plain inputs of order one."
            yield case(
                features,
                "basic",
                "BASIC",
                comment,
                Drawn(dtype=dtype, size=1.0 if dtype != "bfloat16" else 0.5),
            )
        yield case(
            features,
            "probes",
            "HAAR",
            "Both vectors at the probes, as many frequencies as d.",
            Drawn(count=4),
            edit=lambda x: {
                "x": probe(4),
                "y": np.roll(probe(4), 1, 0),
                "omega": show_signs(x["omega"]),
            },
        )
        comment = "exp(0) is estimated without error."
        yield case(
            features,
            "zero",
            "NORMALISATION",
            comment,
            edit=lambda x: {"x": 0 * x["x"], "y": 0 * x["y"]},
        )
        comment = "One pair, one frequency, head size 1."
        yield case(features, "one", "DEGENERATE", comment, Drawn(d=1, count=1, n=1))
    comment = "Vectors of lengths from 1/4 to 4."
    yield case(
        "positive",
        "lengths",
        "MISSING_NORM",
        comment,
        Drawn(size=2.0),
        edit=lambda x: {"y": x["y"] * 2.0 ** np.arange(-2, 2)[:, None]},
    )
    yield case("positive", "d64", "DIMENSION", "Head size 64.", Drawn(d=64, size=0.25))
    comment = "Each factor over- or underflows and their product does not: y is close to -x."
    yield case(
        "positive",
        "far",
        "OVERFLOW UNDERFLOW EXTREME",
        comment,
        Drawn(size=2.0),
        edit=lambda x: {"omega": x["omega"] * 512, "y": x["y"] / 1024 - x["x"]},
    )
    comment = "The factor exp(|x|^2/2) is beyond float32."
    yield case(
        "trigonometric",
        "far",
        "OVERFLOW EXTREME",
        comment,
        Drawn(size=2.0, dtype="float64"),
        edit=lambda x: {"x": x["x"] / 8 + 8, "y": x["y"] / 8 + 8},
    )
    comment = "Frequencies with log weights."
    yield case(
        "positive", "weights", "BASIC", comment, edit=lambda x: {"log_weight": x["omega"][:, 0]}
    )


def cases_of_moments(name: str) -> Iterator[Recipe]:
    def case(
        name: str,
        flags: str,
        comment: str,
        edit: Callable[[Floats], Floats] = lambda x: x,
        *,
        dtype: str = "float32",
        rows: int = 9,
        d: int = 3,
    ) -> Recipe:
        label = f"moments-{name}-{dtype}"
        x = edit(draw_stream(f"{label}/x", (rows, d), dtype, 2.0))
        x = x if dtype == "float64" else x.astype(np.float32).astype(np.float64)
        words, name = tuple(flags.split()), "moments"
        return Recipe(label, name, comment, words, {"ddof": 1}, dtype, {"x": x}, name, name)

    for dtype in ("float64", "float32", "bfloat16"):
        yield case("basic", "BASIC", "Plain rows.", dtype=dtype)
    yield case("offset", "CANCELLATION", "Four leading digits are shared.", lambda x: x + 4096)
    comment = "Nine leading digits are shared."
    yield case("offset", "CANCELLATION", comment, lambda x: x + 2.0**30, dtype="float64")
    yield case("three", "NORMALISATION", "Three rows: N - 1 and N differ clearly.", rows=3)
    yield case("two", "DEGENERATE", "Two rows, covariance of rank 1.", rows=2)
    comment = "Rows all equal: covariance exactly 0."
    yield case("equal", "DEGENERATE", comment, lambda x: np.repeat(x[:1], 8, 0), dtype="bfloat16")
    yield case("d1", "DIMENSION DEGENERATE", "One feature.", d=1)
    yield case("wide", "DIMENSION", "More features than rows.", rows=4, d=12)
    comment = "Features of sizes from 2^-30 to 2^30."
    yield case(
        "scales", "EXTREME SCALING", comment, lambda x: x * np.array([2.0**-30, 1.0, 2.0**30])
    )


def usual(name: str, *, masked: bool = True) -> Iterator[Recipe]:
    """Yield the cases of an estimator that takes q, k and v, by its traits and options.

    A name may have features after a colon.
    """
    record = registry.ESTIMATORS[name.partition(":")[0]]
    if record.has("chunked"):
        yield from cases_of_chunks(name)
        return
    masked = masked and record.takes("mask", "causal", "gqa")
    yield from cases_of_all(name, masked=masked)
    yield from cases_with_masks(name) if masked else ()
    if record.takes("vjp"):
        yield from pulled_of_all(name)
        yield from pulled_with_masks(name) if masked else ()


def of_softmax(name: str) -> Iterator[Recipe]:
    yield from usual(name)
    for part in (cases_of_softmax, pulled_softmax, option_recipes, tile_recipes):
        yield from part()
    yield from (*convention_recipes(), *hard_recipes())


def of_rfa(name: str) -> Iterator[Recipe]:
    yield from (*usual(f"{name}:positive"), *cases_of_rfa(), *pulled_rfa())


def of_ra(name: str) -> Iterator[Recipe]:
    yield from (*usual(name, masked=False), *cases_of_ra())


def of_lara(name: str) -> Iterator[Recipe]:
    yield from (*usual(name, masked=False), *cases_of_lara(), *pulled_lara())


def of_linear(name: str) -> Iterator[Recipe]:
    yield from (*usual(name), *cases_of_linear(), *pulled_linear())


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
    return tuple(recipe for name, vectors in named for recipe in _recipes(vectors, name))


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
