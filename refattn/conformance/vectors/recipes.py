"""All cases, those of kernels and of moments among them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import numpy as np

from ...arrays.library import Floats
from .conventional import convention_recipes
from .drawing import Drawn, Edit, Recipe, draw_stream, unchanged
from .estimators import (
    USUAL_DRAW,
    cases_of_lara,
    cases_of_linear,
    cases_of_ra,
    cases_of_rfa,
    cases_of_softmax,
    probe,
    show_signs,
)
from .hard import hard_recipes
from .options import option_recipes, tile_recipes
from .pulled import pulled_by_samples, pulled_linear, pulled_rfa, pulled_softmax
from .sparse import sparse_recipes


def _cases_of_kernels() -> Iterator[Recipe]:
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


def _cases_of_moments() -> Iterator[Recipe]:
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


@cache
def all_recipes() -> tuple[Recipe, ...]:
    parts: tuple[Iterator[Recipe], ...] = (
        _cases_of_kernels(),
        cases_of_lara(),
        cases_of_linear(),
        _cases_of_moments(),
        cases_of_ra(),
        cases_of_rfa(),
        cases_of_softmax(),
    )
    parts += (pulled_by_samples(), pulled_linear(), pulled_rfa(), pulled_softmax())
    parts += (option_recipes(), tile_recipes(), convention_recipes(), hard_recipes())
    parts += (sparse_recipes(),)
    return tuple(recipe for part in parts for recipe in part)
