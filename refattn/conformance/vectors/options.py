"""Cases of exact attention with its options, and at the edges of tiles.

The id of a case is made of all that it was drawn with, so that it cannot come to mean another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ...arrays.library import Floats
from .cases import Convention
from .drawing import Drawn, Recipe, draw_input, draw_inputs, round_to_single

_Drawing = Callable[..., Floats]


_SHARING = Drawn(heads=(4,), key_heads=(2,), n=3, m=4, d_v=2)
_FOUR = Drawn(heads=(4,), key_heads=(4,), n=3, m=4, d_v=2)
_SIX = Drawn(n=6)
_PULLED_BACK = Drawn(n=3, m=4, d=3, d_v=2, cotangents=("d_out",))


def _third(n: int, m: int) -> Floats:
    """Return a mask that hides about every third key, others for each query."""
    index = np.arange(n * m).reshape(n, m)
    return np.asarray((index % 3 != 1) & (index % 7 != 5))


def _empty(n: int, m: int) -> Floats:
    """Return the same, and query 1 sees nothing."""
    return np.asarray(_third(n, m) & (np.arange(n) != 1)[:, None])


# More inputs by the word for them in an id: of what was drawn, and a function that draws.
_MORE: dict[str, Callable[[Drawn, _Drawing], dict[str, Floats]]] = {
    "mask": lambda x, draw: {"mask": _third(x.n, x.m)},
    "emptyrow": lambda x, draw: {"mask": _empty(x.n, x.m)},
    "hidden": lambda x, draw: {"mask": ~_third(x.n, x.m)},
    "bias": lambda x, draw: {"bias": draw("bias", (x.n, x.m))},
    "headbias": lambda x, draw: {"bias": draw("bias", (*x.heads, x.n, x.m))},
    "bias1024": lambda x, draw: {"bias": 512 * draw("bias", (x.n, x.m))},
    "sinks": lambda x, draw: {"sinks": draw("sinks", x.heads)},
    "sinks32": lambda x, draw: {"sinks": 32 + draw("sinks", x.heads)},
    "sinksminus32": lambda x, draw: {"sinks": draw("sinks", x.heads) - 32},
    "slopes": lambda x, draw: {"slopes": 2.0 ** -(1 + np.arange(x.heads[0]))},
    "dropout2": lambda x, draw: {"dropout": 2.0 * _third(x.n, x.m)},
    "dropout4": lambda x, draw: {"dropout": 4.0 * (draw("dropout", (*x.heads, x.n, x.m)) > 0)},
    "keep": lambda x, draw: {"keep": _third(x.n, x.m)},
    "past4": lambda x, draw: {
        "past_k": draw("past_k", (*x.key_heads, 4, x.d)),
        "past_v": draw("past_v", (*x.key_heads, 4, x.d_v)),
    },
}


def case(
    group: str,
    flags: str,
    comment: str,
    more: str = "",
    drawn: Drawn | None = None,
    *,
    file: str = "softmax-options",
    convention: Convention | None = None,
    **arguments: Any,
) -> Recipe:
    """Draw q, k, v, cotangents, and what `more` has words for; its name says all of it."""
    drawn = Drawn() if drawn is None else drawn
    tile = ["tile"] * (file == "softmax-tiles")
    words = (*_argument_words(group, drawn, arguments), *more.split(), *_size_words(drawn))
    label = "-".join(dict.fromkeys(["softmax", *tile, *words]))
    x = draw_inputs(label, drawn, drawn.shapes("q", "k", "v", *drawn.cotangents))
    of = partial(draw_input, label, drawn)
    for word in more.split():
        x |= _MORE[word](drawn, of)
    return Recipe(
        id=label,
        estimator="softmax",
        comment=comment,
        flags=(*flags.split(), *["GRADIENT"] * bool(drawn.cotangents)),
        arguments={"scale": None, "causal": False} | arguments,
        dtype=drawn.dtype,
        inputs={name: round_to_single(value, drawn.dtype) for name, value in x.items()},
        file=file,
        group="-".join(["softmax", *tile, group]) + "-gradients" * bool(drawn.cotangents),
        convention=convention,
    )


def _argument_words(group: str, drawn: Drawn, arguments: dict[str, Any]) -> Iterator[str]:
    """Yield the arguments in words."""
    yield from ("gradient",) if drawn.cotangents else ()
    yield group
    for side, keys in zip(("left", "right"), arguments.get("window", (None, None)), strict=True):
        yield from (f"{side}{keys}",) if keys is not None else ()
    yield from ("causal",) if arguments.get("causal") else ()
    for name, word in (("softcap", "cap"), ("scale", "scale"), ("dropout_p", "p")):
        if arguments.get(name) is not None:
            yield f"{word}{arguments[name]:g}".replace(".", "p")
    yield from ("lse",) if arguments.get("return_lse") or "d_lse" in drawn.cotangents else ()


def _size_words(drawn: Drawn) -> Iterator[str]:
    """Yield the shapes, sizes and dtype in words."""
    yield from (f"h{heads}" for heads in drawn.heads)
    yield from (f"g{heads}" for heads in drawn.key_heads)
    yield from (f"n{drawn.n}", f"m{drawn.m}", f"d{drawn.d}", f"dv{drawn.d_v}")
    yield from (f"size{drawn.size:g}".replace(".", "p"),) if drawn.size is not None else ()
    yield drawn.dtype


def _with_window() -> Iterator[Recipe]:
    of = partial(case, "window")
    for dtype in ("float64", "float32", "bfloat16"):
        comment = "One key on the left of the query's own, none on its right."
        yield of("WINDOW", comment, drawn=Drawn(n=6, dtype=dtype), window=(1, 0))
    for n, m in ((6, 6), (3, 7), (2, 9)):
        comment = "Two keys on the left, one on the right."
        yield of("WINDOW", comment, drawn=Drawn(n=n, m=m), window=(2, 1))
    for window in ((2, None), (None, 1), (0, 0), (9, 9)):
        yield of("WINDOW", "Sides without a limit, of nothing, of all.", drawn=_SIX, window=window)
    comment = "More queries than keys: the first 2 see none."
    yield of("WINDOW EMPTY_ROW", comment, drawn=Drawn(n=6, m=3), window=(1, 1))
    for window in ((2, 3), (1, None), (None, 0)):
        comment = "Causal too, which cuts the right side."
        yield of("WINDOW CAUSAL", comment, drawn=_SIX, window=window, causal=True)
    comment = "Causal too, with fewer queries than keys."
    yield of("WINDOW CAUSAL", comment, drawn=Drawn(n=3, m=7), window=(2, 2), causal=True)
    yield of("WINDOW MASK", "With a mask.", "mask", Drawn(n=6, dtype="float64"), window=(3, 1))
    yield of("WINDOW GQA", "2 query heads share a key head.", drawn=_SHARING, window=(1, 1))


def _with_softcap() -> Iterator[Recipe]:
    of = partial(case, "softcap")
    for dtype in ("float64", "float32", "bfloat16"):
        yield of("SOFTCAP", "A cap among the scores.", drawn=Drawn(dtype=dtype), softcap=2.0)
    yield of(
        "SOFTCAP", "A cap of 50, and scores to hundreds.", drawn=Drawn(size=16.0), softcap=50.0
    )
    yield of("SOFTCAP SCALING", "The scale comes first.", softcap=2.0, scale=0.75)
    yield of("SOFTCAP BIAS", "The bias is not capped.", "bias", softcap=1.0)
    comment = "A bias far beyond the cap is not capped."
    yield of("SOFTCAP BIAS EXTREME", comment, "bias1024", softcap=1.0)
    yield of("SOFTCAP MASK", "What is hidden is not capped.", "mask", softcap=1.0)
    comment = "Neither bias nor mask is capped."
    yield of("SOFTCAP BIAS MASK", comment, "bias emptyrow", Drawn(dtype="float64"), softcap=1.0)
    yield of("SOFTCAP CAUSAL", "With causal attention.", drawn=_SIX, softcap=1.0, causal=True)
    yield of("SOFTCAP GQA", "2 query heads share a key head.", drawn=_SHARING, softcap=1.0)


def _with_sinks() -> Iterator[Recipe]:
    of = partial(case, "sinks", more="sinks")
    for dtype in ("float64", "float32", "bfloat16"):
        drawn = replace(_SHARING, dtype=dtype)
        yield of("SINKS GQA", "A sink for each of 4 heads, 2 of which share keys.", drawn=drawn)
    yield of("SINKS", "No axis of heads.")
    yield of("SINKS SCALING", "The sink is not scaled.", scale=0.25)
    yield of("SINKS CAUSAL", "With causal attention.", drawn=_SIX, causal=True)
    comment = "Query 1 sees the sink only: its output is 0."
    yield of("SINKS MASK", comment, more="sinks emptyrow", drawn=Drawn(dtype="float64"))
    comment = "The sink has nearly all of the weight: outputs are small."
    yield of("SINKS EXTREME", comment, more="sinks32", drawn=_FOUR)
    yield of("SINKS EXTREME", "The sink has no weight.", more="sinksminus32", drawn=_FOUR)


def _with_bias() -> Iterator[Recipe]:
    of = partial(case, "bias", more="bias")
    for dtype in ("float64", "float32", "bfloat16"):
        yield of("BIAS", "A bias for all pairs.", drawn=Drawn(dtype=dtype))
    yield of("BIAS SCALING", "The bias is not scaled.", scale=0.25)
    comment = "A bias of its own for each of 4 heads, 2 of which share keys."
    yield of("BIAS GQA", comment, more="headbias", drawn=_SHARING)
    yield of("BIAS GQA", "The same bias for all heads.", drawn=_SHARING)
    yield of("BIAS MASK", "With a mask.", more="bias mask")
    yield of("BIAS CAUSAL", "With causal attention.", drawn=_SIX, causal=True)
    yield of(
        "BIAS EXTREME", "Of both signs, to 1024.", more="bias1024", drawn=Drawn(dtype="float64")
    )


def _with_alibi() -> Iterator[Recipe]:
    of = partial(case, "alibi", more="slopes")
    for dtype in ("float64", "float32", "bfloat16"):
        yield of("ALIBI", "A slope for each of 4 heads.", drawn=replace(_FOUR, dtype=dtype))
    yield of("ALIBI CAUSAL", "With causal attention.", drawn=_FOUR, causal=True)
    comment = "Distances count from key i + m - n."
    yield of("ALIBI CROSS", comment, drawn=replace(_FOUR, n=2, m=6))
    yield of("ALIBI GQA SCALING", "2 query heads share a key head.", drawn=_SHARING, scale=0.25)


def _with_dropout() -> Iterator[Recipe]:
    of = partial(case, "dropout", more="dropout2")
    for dtype in ("float64", "float32", "bfloat16"):
        yield of("DROPOUT", "Factors 0 and 2, for p = 1/2.", drawn=Drawn(dtype=dtype))
    comment = "Factors 0 and 4, for p = 3/4, others for each head."
    yield of("DROPOUT GQA", comment, more="dropout4", drawn=_SHARING)
    yield of("DROPOUT MASK", "With a mask, under which all is dropped.", more="dropout2 mask")
    yield of("DROPOUT CAUSAL", "With causal attention.", drawn=_SIX, causal=True)


def _with_lse() -> Iterator[Recipe]:
    of = partial(case, "lse", return_lse=True)
    for dtype in ("float64", "float32", "bfloat16"):
        yield of("LSE", "Without options.", drawn=Drawn(dtype=dtype))
    yield of("LSE SCALING", "The scale is given.", scale=0.75)
    yield of("LSE MASK EMPTY_ROW", "Query 1 sees no key: -inf.", "emptyrow")
    comment = "The first 3 queries see no key: -inf."
    yield of("LSE CAUSAL EMPTY_ROW", comment, drawn=Drawn(n=6, m=3), causal=True)
    yield of("LSE SINKS GQA", "The sink counts.", "sinks", _SHARING)
    yield of("LSE SINKS MASK", "Query 1 sees the sink only.", "sinks emptyrow")
    yield of("LSE SOFTCAP BIAS", "Of capped scores, with the bias.", "bias", softcap=1.0)
    yield of("LSE WINDOW", "Over the window.", drawn=_SIX, window=(2, 1))
    yield of("LSE DROPOUT", "Dropped weights count.", "dropout2")
    yield of("LSE EXTREME", "Scores to 1e4.", drawn=Drawn(size=64.0, dtype="float64"))


def _with_all() -> Iterator[Recipe]:
    of = partial(case, "combined")
    flags = "WINDOW SINKS SOFTCAP GQA"
    all_four: dict[str, Any] = {"window": (3, 0), "softcap": 2.0}
    for dtype in ("float64", "float32", "bfloat16"):
        drawn = replace(_SHARING, n=5, m=6, dtype=dtype)
        yield of(flags, "Window, sinks, cap and grouped heads.", "sinks", drawn, **all_four)
    drawn = replace(_SHARING, n=5, m=6)
    yield of(f"{flags} CAUSAL", "Causal too.", "sinks", drawn, **all_four, causal=True)
    yield of(f"{flags} BIAS", "With a bias.", "sinks headbias", drawn, **all_four)
    yield of(f"{flags} MASK", "With a mask.", "sinks emptyrow", drawn, **all_four)
    yield of(f"{flags} ALIBI", "With slopes.", "sinks slopes", drawn, **all_four)
    yield of(f"{flags} DROPOUT", "With dropout.", "sinks dropout4", drawn, **all_four)
    comment = "With the log normaliser."
    yield of(f"{flags} LSE", comment, "sinks", drawn, **all_four, return_lse=True)
    comment = "All of it."
    yield of(
        f"{flags} BIAS MASK DROPOUT LSE CAUSAL SCALING",
        comment,
        "sinks headbias emptyrow dropout4",
        drawn,
        **all_four,
        causal=True,
        scale=0.75,
        return_lse=True,
    )
    comment = "Sinks and a window of 2 keys over one query: a step of decoding."
    yield of(flags, comment, "sinks", replace(_SHARING, n=1, m=6), window=(1, 0), softcap=2.0)


def _with_gradients() -> Iterator[Recipe]:
    """Yield cases with gradients, of bias and sinks too."""
    few, grouped = (_PULLED_BACK, replace(_SHARING, n=3, m=3, d=2, d_v=1, cotangents=("d_out",)))
    lse = ("d_out", "d_lse")
    for window, n, m in (((1, 0), 4, 4), ((1, 1), 2, 5), ((None, 0), 4, 2)):
        empty = " EMPTY_ROW" * (n > m)
        drawn = replace(few, n=n, m=m)
        yield case("window", f"WINDOW{empty}", "Of a window.", drawn=drawn, window=window)
    for dtype in ("float64", "float32"):
        drawn = replace(few, dtype=dtype)
        yield case("softcap", "SOFTCAP", "Of capped scores.", drawn=drawn, softcap=1.0)
    comment = "Of a bias beside capped scores."
    yield case("softcap", "SOFTCAP BIAS MASK", comment, "bias mask", few, softcap=1.0)
    yield case("sinks", "SINKS", "Of a sink, which has a gradient.", "sinks", few)
    comment = "Of the sinks of 4 heads."
    yield case("sinks", "SINKS GQA", comment, "sinks", grouped)
    comment = "Query 1 sees the sink only."
    yield case("sinks", "SINKS MASK", comment, "sinks emptyrow", few)
    yield case("bias", "BIAS", "Of a bias.", "bias", few)
    yield case(
        "bias", "BIAS SCALING", "The gradient of a bias is not scaled.", "bias", few, scale=0.25
    )
    comment = "Of a bias that all heads share: a sum over heads."
    yield case("bias", "BIAS GQA", comment, "bias", grouped)
    yield case(
        "bias", "BIAS GQA CAUSAL", "Of a bias for each head.", "headbias", grouped, causal=True
    )
    comment = "The gradient of a bias is 0 where a key is hidden."
    yield case("bias", "BIAS MASK", comment, "bias emptyrow", few)
    yield case("alibi", "ALIBI GQA", "With slopes, which are constants.", "slopes", grouped)
    comment = "Weights that are dropped move the others."
    yield case("dropout", "DROPOUT", comment, "dropout2", few)
    yield case("dropout", "DROPOUT GQA", comment, "dropout4", grouped)
    comment = "A cotangent of the log normaliser too."
    both = replace(few, cotangents=lse)
    yield case("lse", "LSE SINKS", comment, "sinks", both)
    yield case("lse", "LSE SOFTCAP BIAS", comment, "bias", both, softcap=1.0)
    yield case("lse", "LSE WINDOW MASK EMPTY_ROW", comment, "emptyrow", both, window=(2, 0))
    flags = "WINDOW SINKS SOFTCAP GQA"
    all_four: dict[str, Any] = {"window": (1, 0), "softcap": 2.0}
    for dtype in ("float64", "float32"):
        drawn = replace(grouped, dtype=dtype)
        comment = "Window, sinks, cap and grouped heads."
        yield case("combined", flags, comment, "sinks", drawn, **all_four)
    comment = "With a bias, dropout and a cotangent of the log normaliser."
    drawn, flags = replace(grouped, cotangents=lse), f"{flags} BIAS DROPOUT LSE CAUSAL"
    yield case(
        "combined", flags, comment, "sinks headbias dropout4", drawn, **all_four, causal=True
    )


def option_recipes() -> Iterator[Recipe]:
    """Yield cases for each option, of combinations, and of their gradients."""
    for part in (
        _with_window,
        _with_softcap,
        _with_sinks,
        _with_bias,
        _with_alibi,
        _with_dropout,
        _with_lse,
        _with_all,
        _with_gradients,
    ):
        yield from part()


def tile_recipes() -> Iterator[Recipe]:
    """Yield numbers of tokens about powers of two, where tiles of kernels end."""
    small = Drawn(d=2, d_v=1, dtype="bfloat16")
    of = partial(case, file="softmax-tiles")
    sides = [power + step for power in (16, 32, 64, 128) for step in (-1, 0, 1)]
    for n in sides:
        drawn = replace(small, n=n, m=n)
        yield of("causal", "TILE CAUSAL", "As many queries as keys.", drawn=drawn, causal=True)
        comment = "Windows that end about an edge."
        window = (15 + (n + 1) % 4, (n + 1) % 2) if n > 20 else (7, n % 2)
        yield of("window", "TILE WINDOW", comment, drawn=drawn, window=window)
    comment = "Fewer queries than keys."
    for n, m in ((15, 17), (16, 33), (31, 64), (63, 65), (17, 128), (33, 129), (16, 255), (1, 257)):
        drawn = replace(small, n=n, m=m)
        yield of("causal", "TILE CAUSAL CROSS", comment, drawn=drawn, causal=True)
    for n, m in ((17, 31), (32, 65), (15, 129), (65, 127), (17, 255), (16, 257)):
        drawn = replace(small, n=n, m=m)
        yield of("window", "TILE WINDOW CROSS", comment, drawn=drawn, window=(16, 1))
    comment = "More queries than keys: the first see none."
    for n, m in ((17, 15), (33, 16), (65, 63), (129, 17), (128, 33)):
        drawn = replace(small, n=n, m=m)
        yield of("causal", "TILE CAUSAL EMPTY_ROW", comment, drawn=drawn, causal=True)
