"""Cases of estimators: what is drawn, and what of it is replaced to catch a mistake."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from ... import registry
from ...arrays.library import Floats
from .drawing import Drawn, Edit, Recipe, draw_inputs, hide_some, round_to_single, unchanged

USUAL_DRAW = Drawn()


def probe(d: int) -> Floats:
    """Return plus and minus e_i and (1, ..., 1)."""
    rows = np.concatenate([np.eye(d), np.ones((1, d))])
    return np.concatenate([rows, -rows])


def show_signs(omega: Floats) -> Floats:
    """Make the first entries of rows of alternating sign, so that a lost sign shows."""
    signs = np.where(np.arange(omega.shape[-2]) % 2, 1.0, -1.0)
    return np.concatenate([abs(omega[..., :1]) * signs[:, None], omega[..., 1:]], axis=-1)


def draw_case(
    kind: str,
    name: str,
    flags: str,
    comment: str,
    drawn: Drawn = USUAL_DRAW,
    *,
    edit: Edit = unchanged,
    **arguments: Any,
) -> Recipe:
    """Draw q, k, v and what the estimator takes besides; `edit` replaces some of it.

    The kind is the name of the estimator, and after a colon that of its features.
    """
    estimator, _, features = kind.partition(":")
    record, kind = registry.ESTIMATORS[estimator], kind.replace(":", "-")
    d, count, dtype = drawn.d, drawn.count, drawn.dtype
    label, shapes = f"{kind}-{name}-{dtype}", drawn.shapes("q", "k", "v")
    if record.has("random-features"):
        shapes["omega"] = (*drawn.omega_heads, count, d)
        arguments |= {"features": features} if features else {}
    if record.has("per-query"):
        shapes["omega"] = (drawn.n, count, d)
    shapes |= drawn.shapes(*drawn.cotangents)
    if record.has("proposals"):
        shapes |= {"omega": (count, d), "centres": (count, d)}
        arguments["weighting"] = "balance"
    if record.has("feature-map"):
        arguments["feature_map"] = "elu"
    if record.takes("scale"):
        arguments.setdefault("scale", None)
    if not (record.has("target") or record.has("proposals")):  # of the keys that are seen
        arguments.setdefault("causal", False)
    x = draw_inputs(label, drawn, shapes)
    x |= {key: round_to_single(value, dtype) for key, value in edit(x).items()}
    group = kind + "-gradients" * bool(drawn.cotangents)
    words = tuple(flags.split())
    return Recipe(label, estimator, comment, words, arguments, dtype, x, estimator, group)


def hide_huge(x: dict[str, Floats]) -> dict[str, Any]:
    mask = np.arange(x["k"].shape[-2]) % 3 != 1
    huge = np.where(mask[:, None], 1.0, 2.0**40)
    return {"mask": mask, "k": x["k"] * huge, "v": x["v"] * huge}


def empty_row(x: dict[str, Floats]) -> dict[str, Any]:
    mask = hide_some(x["q"].shape[-2], x["k"].shape[-2])
    mask[1] = False
    return {"mask": mask}


def make_constant(masked: bool, x: dict[str, Floats]) -> dict[str, Any]:
    mask = {"mask": hide_some(x["q"].shape[-2], x["k"].shape[-2])} if masked else {}
    return {"v": np.ones_like(x["v"]), **mask}


def cases_of_all(kind: str, *, masked: bool) -> Iterator[Recipe]:
    """Yield cases for every kind of attention."""
    case = partial(draw_case, kind)
    for dtype in ("float64", "float32", "bfloat16"):
        yield case("basic", "BASIC", "Plain inputs of order one.", Drawn(dtype=dtype))
    if registry.ESTIMATORS[kind.partition(":")[0]].takes("scale"):
        yield case("scale", "SCALING", "The scale is given.", scale=0.75)
        yield case(
            "d9", "SCALING DIMENSION", "Default scale 1/3, not a power of 2.", Drawn(d=9, size=1.0)
        )
    yield case("cross", "CROSS", "2 queries, 9 keys.", Drawn(n=2, m=9))
    yield case("one-key", "DEGENERATE", "The output is the only value.", Drawn(m=1, n=3))
    comment = "The output is the mean of the values."
    yield case(
        "equal-keys", "DEGENERATE", comment, edit=lambda x: {"k": np.repeat(x["k"][:1], 6, 0)}
    )
    yield case("d1", "DIMENSION DEGENERATE", "Head size 1, one query.", Drawn(d=1, n=1, d_v=2))
    yield case("d64", "DIMENSION", "Head size 64.", Drawn(d=64, n=2, m=5, d_v=2, count=3, size=0.5))
    comment = "All values are 1, and so is the output."
    yield case(
        "constant",
        "NORMALISATION",
        comment,
        Drawn(dtype="float64"),
        edit=partial(make_constant, masked),
    )
    yield case(
        "eps", "EPS", "Seen if a constant of 1e-6 is added.", Drawn(size=4.0, dtype="float64")
    )


def cases_with_masks(kind: str) -> Iterator[Recipe]:
    """Yield cases for kinds with masks, causal form and grouped heads."""
    case = partial(draw_case, kind)
    comment = "A mask of its own for each query."
    yield case("mask", "MASK", comment, edit=lambda x: {"mask": hide_some(4, 6)})
    comment = "The same keys are hidden from all queries."
    yield case(
        "key-mask", "MASK", comment, Drawn(dtype="bfloat16"), edit=lambda x: {"mask": hide_some(6)}
    )
    yield case(
        "hidden-huge", "MASK", "Hidden keys and values have entries near 2^40.", edit=hide_huge
    )
    comment = "Query 1 sees no key."
    yield case("empty-row", "EMPTY_ROW MASK", comment, Drawn(dtype="float64"), edit=empty_row)
    yield case("causal", "CAUSAL", "As many queries as keys.", Drawn(n=6), causal=True)
    comment = "The same, for half precision."
    yield case("causal-half", "CAUSAL", comment, Drawn(n=5, m=5, dtype="bfloat16"), causal=True)
    yield case("causal-cross", "CAUSAL CROSS", "The last query sees every key.", causal=True)
    comment = "The first 3 queries see no key."
    yield case("causal-empty", "CAUSAL CROSS EMPTY_ROW", comment, Drawn(n=6, m=3), causal=True)
    comment = "Causal, with a mask."
    yield case(
        "causal-mask",
        "CAUSAL MASK",
        comment,
        Drawn(n=6, dtype="float64"),
        edit=lambda x: {"mask": hide_some(6, 6)},
        causal=True,
    )
    yield case(
        "gqa", "GQA", "4 query heads, 2 key heads.", Drawn(heads=(4,), key_heads=(2,), n=2, m=4)
    )
    comment = "6 query heads, 3 key heads, causal."
    yield case(
        "gqa-causal",
        "GQA CAUSAL",
        comment,
        Drawn(heads=(6,), key_heads=(3,), n=2, m=2, d=2, d_v=2, count=3),
        causal=True,
    )


def cases_of_softmax() -> Iterator[Recipe]:
    case = partial(draw_case, "softmax")
    for dtype in ("float64", "float32"):
        comment = "Scores to 1e4 of both signs."
        yield case("extreme", "EXTREME OVERFLOW", comment, Drawn(size=64.0, dtype=dtype))
        comment = "All scores near 1800."
        yield case(
            "overflow",
            "OVERFLOW",
            comment,
            Drawn(size=0.25, dtype=dtype),
            edit=lambda x: {"q": x["q"] + 30, "k": x["k"] + 30},
        )
        comment = "All scores near -1800."
        yield case(
            "underflow",
            "UNDERFLOW",
            comment,
            Drawn(size=0.25, dtype=dtype),
            edit=lambda x: {"q": x["q"] + 30, "k": x["k"] - 30},
        )


def stretch(x: dict[str, Floats]) -> dict[str, Any]:
    """Return keys in nearly one direction, of lengths from 1/4 to 4."""
    lengths = 2.0 ** (np.arange(x["k"].shape[-2]) % 5 - 2)
    return {"k": (np.ones_like(x["k"]) + x["k"] / 16) * lengths[:, None] / 2}


def _cases_with_frequencies(
    kind: str, dtypes: tuple[str, ...] = ("float64", "float32"), longest: float = 64.0
) -> Iterator[Recipe]:
    """Yield cases for estimators with frequencies."""
    case = partial(draw_case, kind)
    for dtype in dtypes:
        comment = "Keys of very different length."
        yield case("lengths", "MISSING_NORM", comment, Drawn(dtype=dtype), edit=stretch)
        comment = "Exponents to thousands of both signs."
        yield case("long", "OVERFLOW UNDERFLOW EXTREME", comment, Drawn(size=longest, dtype=dtype))
    yield case("one-sample", "DEGENERATE", "One frequency.", Drawn(count=1))


def _cases_at_probes(kind: str) -> Iterator[Recipe]:
    comment = "Queries and keys at the probes, as many frequencies as d."
    yield draw_case(
        kind,
        "probes",
        "HAAR",
        comment,
        Drawn(n=10, m=10, count=4, d_v=2),
        edit=lambda x: {"q": probe(4), "k": probe(4), "omega": show_signs(x["omega"])},
    )


def cases_of_rfa() -> Iterator[Recipe]:
    case = partial(draw_case, "rfa:positive")
    yield from _cases_with_frequencies("rfa:positive")
    yield from _cases_at_probes("rfa:positive")
    comment = "Frequencies with log weights."
    yield case("weights", "BASIC", comment, edit=lambda x: {"log_weight": x["omega"][:, 0] * 2})
    comment = "Frequencies of its own for each head."
    yield case(
        "heads",
        "SHARED_RANDOMNESS",
        comment,
        Drawn(heads=(3,), key_heads=(3,), omega_heads=(3,), n=2, m=4),
    )
    for kind, longest in (("rfa:hyperbolic", 64.0), ("rfa:trigonometric", 32.0)):
        case = partial(draw_case, kind)
        for dtype in ("float64", "float32", "bfloat16"):
            yield case("basic", "BASIC", "Plain inputs of order one.", Drawn(dtype=dtype))
        yield case("scale", "SCALING", "The scale is given.", scale=0.75)
        yield case("mask", "MASK", "A mask.", edit=lambda x: {"mask": hide_some(4, 6)})
        yield case("causal", "CAUSAL", "As many queries as keys.", Drawn(n=6), causal=True)
        yield from _cases_with_frequencies(kind, ("float64",), longest)
        yield from _cases_at_probes(kind)
    comment = "Terms of both signs nearly cancel in the normaliser."
    yield case(
        "signed",
        "CANCELLATION",
        comment,
        Drawn(dtype="float64"),
        edit=lambda x: {"k": -x["q"][[0, 1, 2, 3, 0, 1]]},
    )


def cases_of_ra() -> Iterator[Recipe]:
    yield from _cases_with_frequencies("ra")
    comment = "Frequencies of its own for each query."
    yield draw_case("ra", "queries", "SHARED_RANDOMNESS", comment, Drawn(n=6, count=2))
    comment = "Keys at the probes, as many frequencies as d."
    yield draw_case(
        "ra",
        "probes",
        "HAAR",
        comment,
        Drawn(n=2, m=10, count=4, d_v=2),
        edit=lambda x: {"k": probe(4), "omega": show_signs(x["omega"])},
    )


def cases_of_lara() -> Iterator[Recipe]:
    yield from _cases_with_frequencies("lara")
    yield from _cases_at_probes("lara")
    comment = "Two frequencies for each of three centres."
    yield draw_case(
        "lara",
        "pairs",
        "BASIC",
        comment,
        Drawn(count=6),
        edit=lambda x: {"centres": x["centres"][:3]},
    )


def cases_of_linear() -> Iterator[Recipe]:
    for dtype in ("float64", "float32"):
        comment = "Entries near -20: elu + 1 is e^x."
        yield draw_case(
            "linear",
            "negative",
            "CANCELLATION",
            comment,
            Drawn(dtype=dtype),
            edit=lambda x: {"q": x["q"] / 2 - 20, "k": x["k"] / 2 - 20},
        )
