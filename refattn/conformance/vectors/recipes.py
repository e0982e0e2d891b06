"""The cases: what is drawn, and what of it is replaced to catch a mistake."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import numpy as np

from ... import registry
from ...arrays.library import Floats
from . import conventional, hard, options, sparse
from .drawing import Drawn, Recipe, draw

__all__ = ["all_recipes"]

_Edit = Callable[[dict[str, Floats]], dict[str, Any]]


_USUAL = Drawn()
_small = partial(Drawn, n=3, m=4, d=3, d_v=2, count=3, cotangents=("d_out",))  # for gradients


def _unchanged(x: dict[str, Floats]) -> dict[str, Any]:
    return {}


def _probes(d: int) -> Floats:
    """Plus and minus e_i and (1, ..., 1)."""
    rows = np.concatenate([np.eye(d), np.ones((1, d))])
    return np.concatenate([rows, -rows])


def _both_signs(omega: Floats) -> Floats:
    """Make the first entries of rows of alternating sign, so that a lost sign shows."""
    signs = np.where(np.arange(omega.shape[-2]) % 2, 1.0, -1.0)
    return np.concatenate([abs(omega[..., :1]) * signs[:, None], omega[..., 1:]], axis=-1)


def _attention(
    kind: str,
    name: str,
    flags: str,
    comment: str,
    drawn: Drawn = _USUAL,
    *,
    edit: _Edit = _unchanged,
    **arguments: Any,
) -> Recipe:
    """Draw q, k, v and what the estimator takes besides; `edit` replaces some of it."""
    estimator, _, features = kind.partition("-")
    record = registry.ESTIMATORS[estimator]
    d, count, dtype = drawn.d, drawn.count, drawn.dtype
    label = f"{kind}-{name}-{dtype}"
    size = drawn.plain if drawn.size is None else drawn.size
    shapes: dict[str, tuple[int, ...]] = {
        "q": (*drawn.heads, drawn.n, d),
        "k": (*drawn.key_heads, drawn.m, d),
        "v": (*drawn.key_heads, drawn.m, drawn.d_v),
    }
    if record.has("random-features"):
        shapes["omega"] = (*drawn.omega_heads, count, d)
        arguments["features"] = features
    if record.has("per-query"):
        shapes["omega"] = (drawn.n, count, d)
    cotangents = {"d_out": (*drawn.heads, drawn.n, drawn.d_v), "d_lse": (*drawn.heads, drawn.n)}
    shapes |= {key: cotangents[key] for key in drawn.cotangents}
    if record.has("proposals"):
        shapes |= {"omega": (count, d), "centres": (count, d)}
        arguments["weighting"] = "balance"
    if record.has("feature-map"):
        arguments["feature_map"] = "elu"
    if record.takes("scale"):
        arguments.setdefault("scale", None)
    if not (record.has("target") or record.has("proposals")):  # of the keys that are seen
        arguments.setdefault("causal", False)
    x = {
        key: draw(f"{label}/{key}", shape, dtype, size if key in "qk" else drawn.plain)
        for key, shape in shapes.items()
    }
    for key, value in edit(x).items():
        fitted = np.float64 if dtype == "float64" else np.float32
        x[key] = value if value.dtype == bool else value.astype(fitted).astype(np.float64)
    group = kind + "-gradients" * bool(drawn.cotangents)
    words = tuple(flags.split())
    return Recipe(label, estimator, comment, words, arguments, dtype, x, estimator, group)


def _mask(*shape: int) -> Floats:
    """A mask that hides every third and every fifth key, differently for each query."""
    index = np.arange(math.prod(shape)).reshape(shape)
    return np.asarray((index % 3 != 1) & (index % 5 != 3))


def _hide_huge(x: dict[str, Floats]) -> dict[str, Any]:
    mask = np.arange(x["k"].shape[-2]) % 3 != 1
    huge = np.where(mask[:, None], 1.0, 2.0**40)
    return {"mask": mask, "k": x["k"] * huge, "v": x["v"] * huge}


def _empty_row(x: dict[str, Floats]) -> dict[str, Any]:
    mask = _mask(x["q"].shape[-2], x["k"].shape[-2])
    mask[1] = False
    return {"mask": mask}


def _constant(masked: bool, x: dict[str, Floats]) -> dict[str, Any]:
    mask = {"mask": _mask(x["q"].shape[-2], x["k"].shape[-2])} if masked else {}
    return {"v": np.ones_like(x["v"]), **mask}


def _common(kind: str, *, masked: bool) -> Iterator[Recipe]:
    """Cases for every kind of attention."""
    case = partial(_attention, kind)
    for dtype in ("float64", "float32", "bfloat16"):
        yield case("basic", "BASIC", "Plain inputs of order one.", Drawn(dtype=dtype))
    if registry.ESTIMATORS[kind.partition("-")[0]].takes("scale"):
        yield case("scale", "SCALING", "The scale is given.", scale=0.75)
        yield case(
            "d9", "SCALING DIMENSION", "Default scale 1/3, not a power of 2.", Drawn(d=9, size=1.0)
        )
    yield case("cross", "CROSS", "2 queries, 9 keys.", Drawn(n=2, m=9))
    yield case("one-key", "DEGENERATE", "The output is the only value.", Drawn(m=1, n=3))
    yield case(
        "equal-keys",
        "DEGENERATE",
        "The output is the mean of the values.",
        edit=lambda x: {"k": np.repeat(x["k"][:1], 6, 0)},
    )
    yield case("d1", "DIMENSION DEGENERATE", "Head size 1, one query.", Drawn(d=1, n=1, d_v=2))
    yield case("d64", "DIMENSION", "Head size 64.", Drawn(d=64, n=2, m=5, d_v=2, count=3, size=0.5))
    yield case(
        "constant",
        "NORMALISATION",
        "All values are 1, and so is the output.",
        Drawn(dtype="float64"),
        edit=partial(_constant, masked),
    )
    yield case(
        "eps", "EPS", "Seen if a constant of 1e-6 is added.", Drawn(size=4.0, dtype="float64")
    )


def _masked(kind: str) -> Iterator[Recipe]:
    """Cases for kinds with masks, causal form and grouped heads."""
    case = partial(_attention, kind)
    yield case(
        "mask", "MASK", "A mask of its own for each query.", edit=lambda x: {"mask": _mask(4, 6)}
    )
    yield case(
        "key-mask",
        "MASK",
        "The same keys are hidden from all queries.",
        Drawn(dtype="bfloat16"),
        edit=lambda x: {"mask": _mask(6)},
    )
    yield case(
        "hidden-huge", "MASK", "Hidden keys and values have entries near 2^40.", edit=_hide_huge
    )
    yield case(
        "empty-row",
        "EMPTY_ROW MASK",
        "Query 1 sees no key.",
        Drawn(dtype="float64"),
        edit=_empty_row,
    )
    yield case("causal", "CAUSAL", "As many queries as keys.", Drawn(n=6), causal=True)
    yield case(
        "causal-half",
        "CAUSAL",
        "The same, for half precision.",
        Drawn(n=5, m=5, dtype="bfloat16"),
        causal=True,
    )
    yield case("causal-cross", "CAUSAL CROSS", "The last query sees every key.", causal=True)
    yield case(
        "causal-empty",
        "CAUSAL CROSS EMPTY_ROW",
        "The first 3 queries see no key.",
        Drawn(n=6, m=3),
        causal=True,
    )
    yield case(
        "causal-mask",
        "CAUSAL MASK",
        "Causal, with a mask.",
        Drawn(n=6, dtype="float64"),
        edit=lambda x: {"mask": _mask(6, 6)},
        causal=True,
    )
    yield case(
        "gqa", "GQA", "4 query heads, 2 key heads.", Drawn(heads=(4,), key_heads=(2,), n=2, m=4)
    )
    yield case(
        "gqa-causal",
        "GQA CAUSAL",
        "6 query heads, 3 key heads, causal.",
        Drawn(heads=(6,), key_heads=(3,), n=2, m=2, d=2, d_v=2, count=3),
        causal=True,
    )


def _softmax() -> Iterator[Recipe]:
    case = partial(_attention, "softmax")
    yield from _common("softmax", masked=True)
    yield from _masked("softmax")
    for dtype in ("float64", "float32"):
        yield case(
            "extreme",
            "EXTREME OVERFLOW",
            "Scores to 1e4 of both signs.",
            Drawn(size=64.0, dtype=dtype),
        )
        yield case(
            "overflow",
            "OVERFLOW",
            "All scores near 1800.",
            Drawn(size=0.25, dtype=dtype),
            edit=lambda x: {"q": x["q"] + 30, "k": x["k"] + 30},
        )
        yield case(
            "underflow",
            "UNDERFLOW",
            "All scores near -1800.",
            Drawn(size=0.25, dtype=dtype),
            edit=lambda x: {"q": x["q"] + 30, "k": x["k"] - 30},
        )


def _lengths(x: dict[str, Floats]) -> dict[str, Any]:
    """Keys in nearly one direction, of lengths from 1/4 to 4."""
    lengths = 2.0 ** (np.arange(x["k"].shape[-2]) % 5 - 2)
    return {"k": (np.ones_like(x["k"]) + x["k"] / 16) * lengths[:, None] / 2}


def _random(
    kind: str, dtypes: tuple[str, ...] = ("float64", "float32"), longest: float = 64.0
) -> Iterator[Recipe]:
    """Cases for estimators with frequencies."""
    case = partial(_attention, kind)
    for dtype in dtypes:
        yield case(
            "lengths",
            "MISSING_NORM",
            "Keys of very different length.",
            Drawn(dtype=dtype),
            edit=_lengths,
        )
        yield case(
            "long",
            "OVERFLOW UNDERFLOW EXTREME",
            "Exponents to thousands of both signs.",
            Drawn(size=longest, dtype=dtype),
        )
    yield case("one-sample", "DEGENERATE", "One frequency.", Drawn(count=1))


def _haar(kind: str) -> Iterator[Recipe]:
    yield _attention(
        kind,
        "probes",
        "HAAR",
        "Queries and keys at the probes, as many frequencies as d.",
        Drawn(n=10, m=10, count=4, d_v=2),
        edit=lambda x: {"q": _probes(4), "k": _probes(4), "omega": _both_signs(x["omega"])},
    )


def _rfa() -> Iterator[Recipe]:
    case = partial(_attention, "rfa-positive")
    yield from _common("rfa-positive", masked=True)
    yield from _masked("rfa-positive")
    yield from _random("rfa-positive")
    yield from _haar("rfa-positive")
    yield case(
        "weights",
        "BASIC",
        "Frequencies with log weights.",
        edit=lambda x: {"log_weight": x["omega"][:, 0] * 2},
    )
    yield case(
        "heads",
        "SHARED_RANDOMNESS",
        "Frequencies of its own for each head.",
        Drawn(heads=(3,), key_heads=(3,), omega_heads=(3,), n=2, m=4),
    )
    for kind, longest in (("rfa-hyperbolic", 64.0), ("rfa-trigonometric", 32.0)):
        case = partial(_attention, kind)
        for dtype in ("float64", "float32", "bfloat16"):
            yield case("basic", "BASIC", "Plain inputs of order one.", Drawn(dtype=dtype))
        yield case("scale", "SCALING", "The scale is given.", scale=0.75)
        yield case("mask", "MASK", "A mask.", edit=lambda x: {"mask": _mask(4, 6)})
        yield case("causal", "CAUSAL", "As many queries as keys.", Drawn(n=6), causal=True)
        yield from _random(kind, ("float64",), longest)
        yield from _haar(kind)
    yield case(
        "signed",
        "CANCELLATION",
        "Terms of both signs nearly cancel in the normaliser.",
        Drawn(dtype="float64"),
        edit=lambda x: {"k": -x["q"][[0, 1, 2, 3, 0, 1]]},
    )


def _ra() -> Iterator[Recipe]:
    yield from _common("ra", masked=False)
    yield from _random("ra")
    yield _attention(
        "ra",
        "queries",
        "SHARED_RANDOMNESS",
        "Frequencies of its own for each query.",
        Drawn(n=6, count=2),
    )
    yield _attention(
        "ra",
        "probes",
        "HAAR",
        "Keys at the probes, as many frequencies as d.",
        Drawn(n=2, m=10, count=4, d_v=2),
        edit=lambda x: {"k": _probes(4), "omega": _both_signs(x["omega"])},
    )


def _lara() -> Iterator[Recipe]:
    yield from _common("lara", masked=False)
    yield from _random("lara")
    yield from _haar("lara")
    yield _attention(
        "lara",
        "pairs",
        "BASIC",
        "Two frequencies for each of three centres.",
        Drawn(count=6),
        edit=lambda x: {"centres": x["centres"][:3]},
    )


def _linear() -> Iterator[Recipe]:
    yield from _common("linear", masked=True)
    yield from _masked("linear")
    for dtype in ("float64", "float32"):
        yield _attention(
            "linear",
            "negative",
            "CANCELLATION",
            "Entries near -20: elu + 1 is e^x.",
            Drawn(dtype=dtype),
            edit=lambda x: {"q": x["q"] / 2 - 20, "k": x["k"] / 2 - 20},
        )


def _near(x: dict[str, Floats]) -> dict[str, Any]:
    return {"v": 1 + x["v"] / 1024}


def _pulled(kind: str) -> Iterator[Recipe]:
    """Cases with gradients for every kind of attention."""
    case, small = partial(_attention, kind), _small
    record = registry.ESTIMATORS[kind.partition("-")[0]]
    for dtype in ("float64", "float32", "bfloat16"):
        comment = "Plain inputs and cotangents of order one."
        yield case("gradient-basic", "GRADIENT BASIC", comment, small(dtype=dtype))
    if record.takes("scale"):
        yield case("gradient-scale", "GRADIENT SCALING", "The scale is given.", small(), scale=0.75)
    yield case("gradient-cross", "GRADIENT CROSS", "2 queries, 5 keys.", small(n=2, m=5))
    yield case("gradient-one-key", "GRADIENT DEGENERATE", "The only key moves nothing.", small(m=1))
    yield case(
        "gradient-equal-keys",
        "GRADIENT DEGENERATE",
        "No query moves the weights of keys that are equal.",
        small(),
        edit=lambda x: {"k": np.repeat(x["k"][:1], 4, 0)},
    )
    yield case(
        "gradient-constant",
        "GRADIENT NORMALISATION",
        "All values are 1: only they have gradients.",
        small(),
        edit=partial(_constant, False),
    )
    yield case(
        "gradient-near",
        "GRADIENT CANCELLATION",
        "Values share three digits, which cancel but for those of values.",
        small(),
        edit=_near,
    )
    if record.has("random"):
        yield case(
            "gradient-lengths",
            "GRADIENT MISSING_NORM",
            "Keys of very different length.",
            small(),
            edit=_lengths,
        )
    if record.takes("scale"):
        yield case(
            "gradient-long",
            "GRADIENT EXTREME",
            "Exponents to hundreds of both signs: most weights vanish.",
            small(size=16.0),
        )


def _pulled_masked(kind: str) -> Iterator[Recipe]:
    """Cases with gradients for kinds with masks, causal form and grouped heads."""
    case, small = partial(_attention, kind), _small
    yield case(
        "gradient-mask",
        "GRADIENT MASK",
        "A mask of its own for each query.",
        small(),
        edit=lambda x: {"mask": _mask(3, 4)},
    )
    yield case(
        "gradient-one-query",
        "GRADIENT MASK DEGENERATE",
        "One query, with a mask.",
        small(n=1, m=5),
        edit=lambda x: {"mask": _mask(1, 5)},
    )
    yield case(
        "gradient-hidden-huge",
        "GRADIENT MASK",
        "Hidden keys and values have entries near 2^40, and gradient 0.",
        small(m=5),
        edit=_hide_huge,
    )
    yield case(
        "gradient-empty-row",
        "GRADIENT EMPTY_ROW MASK",
        "Query 1 sees no key: its gradient is 0, and it adds to no other.",
        small(),
        edit=_empty_row,
    )
    yield case(
        "gradient-causal", "GRADIENT CAUSAL", "As many queries as keys.", small(n=4), causal=True
    )
    yield case(
        "gradient-causal-cross",
        "GRADIENT CAUSAL CROSS",
        "The last query sees every key.",
        small(n=2),
        causal=True,
    )
    yield case(
        "gradient-causal-empty",
        "GRADIENT CAUSAL CROSS EMPTY_ROW",
        "The first 2 queries see no key: their gradients are 0.",
        small(n=4, m=2),
        causal=True,
    )
    yield case(
        "gradient-causal-mask",
        "GRADIENT CAUSAL MASK",
        "Causal, with a mask.",
        small(n=4),
        edit=lambda x: {"mask": _mask(4, 4)},
        causal=True,
    )
    grouped = partial(small, heads=(4,), key_heads=(2,), n=2, m=2, d=2, d_v=1, count=2)
    comment = "Keys and values have the sum over the 2 query heads of each."
    yield case("gradient-gqa", "GRADIENT GQA", comment, grouped())
    yield case("gradient-gqa-causal", "GRADIENT GQA CAUSAL", comment, grouped(m=3), causal=True)


def _pulled_softmax() -> Iterator[Recipe]:
    case, small = partial(_attention, "softmax"), _small
    yield from _pulled("softmax")
    yield from _pulled_masked("softmax")
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


def _pulled_rfa() -> Iterator[Recipe]:
    case, small = partial(_attention, "rfa-positive"), _small
    yield from _pulled("rfa-positive")
    yield from _pulled_masked("rfa-positive")
    yield case(
        "gradient-weights",
        "GRADIENT BASIC",
        "Frequencies with log weights, which have a gradient.",
        small(),
        edit=lambda x: {"log_weight": x["omega"][:, 0] * 2},
    )
    yield case(
        "gradient-heads",
        "GRADIENT SHARED_RANDOMNESS",
        "Frequencies of its own for each head.",
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
    for kind in ("rfa-hyperbolic", "rfa-trigonometric"):
        case, small = partial(_attention, kind), partial(_small, size=1.0)
        for dtype in ("float64", "float32"):
            yield case(
                "gradient-basic",
                "GRADIENT BASIC",
                "Plain inputs and cotangents.",
                small(dtype=dtype),
            )
        yield case("gradient-scale", "GRADIENT SCALING", "The scale is given.", small(), scale=0.75)
        yield case(
            "gradient-causal",
            "GRADIENT CAUSAL",
            "As many queries as keys.",
            small(n=4),
            causal=True,
        )


def _pulled_by_samples() -> Iterator[Recipe]:
    for kind in ("ra", "lara"):
        yield from _pulled(kind)
    yield _attention(
        "lara",
        "gradient-pairs",
        "GRADIENT BASIC",
        "Two frequencies for each of two centres.",
        _small(count=4),
        edit=lambda x: {"centres": x["centres"][:2]},
    )


def _pulled_linear() -> Iterator[Recipe]:
    yield from _pulled("linear")
    yield from _pulled_masked("linear")
    yield _attention(
        "linear",
        "gradient-negative",
        "GRADIENT CANCELLATION",
        "Entries near -20: elu + 1 is e^x, and so is its slope.",
        _small(),
        edit=lambda x: {"q": x["q"] / 2 - 20, "k": x["k"] / 2 - 20},
    )


def _kernel() -> Iterator[Recipe]:
    def case(
        features: str,
        name: str,
        flags: str,
        comment: str,
        drawn: Drawn = _USUAL,
        *,
        edit: _Edit = _unchanged,
    ) -> Recipe:
        label = f"kernel-{features}-{name}-{drawn.dtype}"
        rows, size = drawn.n, 1.0 if drawn.size is None else drawn.size
        x = {
            key: draw(f"{label}/{key}", (length, drawn.d), drawn.dtype, width)
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
            yield case(
                features,
                "basic",
                "BASIC",
                "Plain inputs of order one.",
                Drawn(dtype=dtype, size=1.0 if dtype != "bfloat16" else 0.5),
            )
        yield case(
            features,
            "probes",
            "HAAR",
            "Both vectors at the probes, as many frequencies as d.",
            Drawn(count=4),
            edit=lambda x: {
                "x": _probes(4),
                "y": np.roll(_probes(4), 1, 0),
                "omega": _both_signs(x["omega"]),
            },
        )
        yield case(
            features,
            "zero",
            "NORMALISATION",
            "exp(0) is estimated without error.",
            edit=lambda x: {"x": 0 * x["x"], "y": 0 * x["y"]},
        )
        yield case(
            features,
            "one",
            "DEGENERATE",
            "One pair, one frequency, head size 1.",
            Drawn(d=1, count=1, n=1),
        )
    yield case(
        "positive",
        "lengths",
        "MISSING_NORM",
        "Vectors of lengths from 1/4 to 4.",
        Drawn(size=2.0),
        edit=lambda x: {"y": x["y"] * 2.0 ** np.arange(-2, 2)[:, None]},
    )
    yield case("positive", "d64", "DIMENSION", "Head size 64.", Drawn(d=64, size=0.25))
    yield case(
        "positive",
        "far",
        "OVERFLOW UNDERFLOW EXTREME",
        "Each factor over- or underflows and their product does not: y is close to -x.",
        Drawn(size=2.0),
        edit=lambda x: {"omega": x["omega"] * 512, "y": x["y"] / 1024 - x["x"]},
    )
    yield case(
        "trigonometric",
        "far",
        "OVERFLOW EXTREME",
        "The factor exp(|x|^2/2) is beyond float32.",
        Drawn(size=2.0, dtype="float64"),
        edit=lambda x: {"x": x["x"] / 8 + 8, "y": x["y"] / 8 + 8},
    )
    yield case(
        "positive",
        "weights",
        "BASIC",
        "Frequencies with log weights.",
        edit=lambda x: {"log_weight": x["omega"][:, 0]},
    )


def _moments() -> Iterator[Recipe]:
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
        x = edit(draw(f"{label}/x", (rows, d), dtype, 2.0))
        x = x if dtype == "float64" else x.astype(np.float32).astype(np.float64)
        words, name = tuple(flags.split()), "moments"
        return Recipe(label, name, comment, words, {"ddof": 1}, dtype, {"x": x}, name, name)

    for dtype in ("float64", "float32", "bfloat16"):
        yield case("basic", "BASIC", "Plain rows.", dtype=dtype)
    yield case("offset", "CANCELLATION", "Four leading digits are shared.", lambda x: x + 4096)
    yield case(
        "offset",
        "CANCELLATION",
        "Nine leading digits are shared.",
        lambda x: x + 2.0**30,
        dtype="float64",
    )
    yield case("three", "NORMALISATION", "Three rows: N - 1 and N differ clearly.", rows=3)
    yield case("two", "DEGENERATE", "Two rows, covariance of rank 1.", rows=2)
    yield case(
        "equal",
        "DEGENERATE",
        "Rows all equal: covariance exactly 0.",
        lambda x: np.repeat(x[:1], 8, 0),
        dtype="bfloat16",
    )
    yield case("d1", "DIMENSION DEGENERATE", "One feature.", d=1)
    yield case("wide", "DIMENSION", "More features than rows.", rows=4, d=12)
    yield case(
        "scales",
        "EXTREME SCALING",
        "Features of sizes from 2^-30 to 2^30.",
        lambda x: x * np.array([2.0**-30, 1.0, 2.0**30]),
    )


@cache
def all_recipes() -> tuple[Recipe, ...]:
    parts: tuple[Iterator[Recipe], ...] = (
        _kernel(),
        _lara(),
        _linear(),
        _moments(),
        _ra(),
        _rfa(),
        _softmax(),
    )
    parts += (_pulled_by_samples(), _pulled_linear(), _pulled_rfa(), _pulled_softmax())
    parts += (options.recipes(), options.tiles(), conventional.recipes(), hard.recipes())
    parts += (sparse.recipes(),)
    return tuple(recipe for part in parts for recipe in part)
