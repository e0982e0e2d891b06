"""Cases of estimators with gradients."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from ... import registry
from ...arrays.library import Floats
from .drawing import Drawn, Recipe, hide_some
from .estimators import draw_case, empty_row, hide_huge, make_constant, stretch

_small = partial(Drawn, n=3, m=4, d=3, d_v=2, count=3, cotangents=("d_out",))  # for gradients


def _share_digits(x: dict[str, Floats]) -> dict[str, Any]:
    return {"v": 1 + x["v"] / 1024}


def pulled_of_all(kind: str) -> Iterator[Recipe]:
    """Yield cases with gradients for every kind of attention."""
    case, small = partial(draw_case, kind), _small
    record = registry.ESTIMATORS[kind.partition(":")[0]]
    for dtype in ("float64", "float32", "bfloat16"):
        comment = "Plain inputs and cotangents of order one."
        yield case("gradient-basic", "GRADIENT BASIC", comment, small(dtype=dtype))
    if record.takes("scale"):
        yield case("gradient-scale", "GRADIENT SCALING", "The scale is given.", small(), scale=0.75)
    yield case("gradient-cross", "GRADIENT CROSS", "2 queries, 5 keys.", small(n=2, m=5))
    yield case("gradient-one-key", "GRADIENT DEGENERATE", "The only key moves nothing.", small(m=1))
    comment = "No query moves the weights of keys that are equal."
    yield case(
        "gradient-equal-keys",
        "GRADIENT DEGENERATE",
        comment,
        small(),
        edit=lambda x: {"k": np.repeat(x["k"][:1], 4, 0)},
    )
    comment = "All values are 1: only they have gradients."
    yield case(
        "gradient-constant",
        "GRADIENT NORMALISATION",
        comment,
        small(),
        edit=partial(make_constant, False),
    )
    comment = "Values share three digits, which cancel but for those of values."
    yield case("gradient-near", "GRADIENT CANCELLATION", comment, small(), edit=_share_digits)
    if record.has("random"):
        comment = "Keys of very different length."
        yield case("gradient-lengths", "GRADIENT MISSING_NORM", comment, small(), edit=stretch)
    if record.takes("scale"):
        comment = "Exponents to hundreds of both signs: most weights vanish."
        yield case("gradient-long", "GRADIENT EXTREME", comment, small(size=16.0))


def pulled_with_masks(kind: str) -> Iterator[Recipe]:
    """Yield cases with gradients for kinds with masks, causal form and grouped heads."""
    case, small = partial(draw_case, kind), _small
    comment = "A mask of its own for each query."
    yield case(
        "gradient-mask", "GRADIENT MASK", comment, small(), edit=lambda x: {"mask": hide_some(3, 4)}
    )
    comment = "One query, with a mask."
    yield case(
        "gradient-one-query",
        "GRADIENT MASK DEGENERATE",
        comment,
        small(n=1, m=5),
        edit=lambda x: {"mask": hide_some(1, 5)},
    )
    comment = "Hidden keys and values have entries near 2^40, and gradient 0."
    yield case("gradient-hidden-huge", "GRADIENT MASK", comment, small(m=5), edit=hide_huge)
    comment = "Query 1 sees no key: its gradient is 0, and it adds to no other."
    yield case("gradient-empty-row", "GRADIENT EMPTY_ROW MASK", comment, small(), edit=empty_row)
    yield case(
        "gradient-causal", "GRADIENT CAUSAL", "As many queries as keys.", small(n=4), causal=True
    )
    comment = "The last query sees every key."
    yield case("gradient-causal-cross", "GRADIENT CAUSAL CROSS", comment, small(n=2), causal=True)
    comment = "The first 2 queries see no key: their gradients are 0."
    yield case(
        "gradient-causal-empty",
        "GRADIENT CAUSAL CROSS EMPTY_ROW",
        comment,
        small(n=4, m=2),
        causal=True,
    )
    comment = "Causal, with a mask."
    yield case(
        "gradient-causal-mask",
        "GRADIENT CAUSAL MASK",
        comment,
        small(n=4),
        edit=lambda x: {"mask": hide_some(4, 4)},
        causal=True,
    )
    grouped = partial(small, heads=(4,), key_heads=(2,), n=2, m=2, d=2, d_v=1, count=2)
    comment = "Keys and values have the sum over the 2 query heads of each."
    yield case("gradient-gqa", "GRADIENT GQA", comment, grouped())
    yield case("gradient-gqa-causal", "GRADIENT GQA CAUSAL", comment, grouped(m=3), causal=True)


def pulled_softmax() -> Iterator[Recipe]:
    case, small = partial(draw_case, "softmax"), _small
    with_lse = partial(small, cotangents=("d_out", "d_lse"))
    comment = "A cotangent of the log normaliser too."
    for dtype in ("float64", "float32"):
        yield case("gradient-lse", "GRADIENT BASIC", comment, with_lse(dtype=dtype))
    yield case("gradient-lse-causal", "GRADIENT CAUSAL", comment, with_lse(n=4), causal=True)
    yield case("gradient-lse-scale", "GRADIENT SCALING", comment, with_lse(), scale=0.75)
    for name, sign in (("overflow", 1), ("underflow", -1)):
        yield case(
            f"gradient-{name}",
            f"GRADIENT {name.upper()}",
            f"All scores near {sign * 1600}.",
            small(size=0.25),
            edit=lambda x, sign=sign: {"q": x["q"] + 30, "k": sign * (x["k"] + 30)},  # type: ignore[misc]
        )


def pulled_rfa() -> Iterator[Recipe]:
    case, small = partial(draw_case, "rfa:positive"), _small
    comment = "Frequencies with log weights, which have a gradient."
    yield case(
        "gradient-weights",
        "GRADIENT BASIC",
        comment,
        small(),
        edit=lambda x: {"log_weight": x["omega"][:, 0] * 2},
    )
    comment = "Frequencies of its own for each head."
    yield case(
        "gradient-heads",
        "GRADIENT SHARED_RANDOMNESS",
        comment,
        small(heads=(2,), key_heads=(2,), omega_heads=(2,), n=2, m=2, d=2, d_v=1, count=2),
    )
    for name, sign in (("overflow", 1), ("underflow", -1)):
        yield case(
            f"gradient-{name}",
            f"GRADIENT {name.upper()}",
            f"Exponents of queries near {sign * 1200}.",
            small(size=0.25),
            edit=lambda x, sign=sign: {"q": x["q"] + sign * 512, "omega": 1 + x["omega"] / 64},  # type: ignore[misc]
        )
    for kind in ("rfa:hyperbolic", "rfa:trigonometric"):
        case, small = partial(draw_case, kind), partial(_small, size=1.0)
        for dtype in ("float64", "float32"):
            comment = "Plain inputs and cotangents."
            yield case("gradient-basic", "GRADIENT BASIC", comment, small(dtype=dtype))
        yield case("gradient-scale", "GRADIENT SCALING", "The scale is given.", small(), scale=0.75)
        comment = "As many queries as keys."
        yield case("gradient-causal", "GRADIENT CAUSAL", comment, small(n=4), causal=True)


def pulled_lara() -> Iterator[Recipe]:
    comment = "Two frequencies for each of two centres."
    yield draw_case(
        "lara",
        "gradient-pairs",
        "GRADIENT BASIC",
        comment,
        _small(count=4),
        edit=lambda x: {"centres": x["centres"][:2]},
    )


def pulled_linear() -> Iterator[Recipe]:
    comment = "Entries near -20: elu + 1 is e^x, and so is its slope."
    yield draw_case(
        "linear",
        "gradient-negative",
        "GRADIENT CANCELLATION",
        comment,
        _small(),
        edit=lambda x: {"q": x["q"] / 2 - 20, "k": x["k"] / 2 - 20},
    )
