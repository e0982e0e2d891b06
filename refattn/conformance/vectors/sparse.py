"""Cases of attention to few keys, and to near keys exactly and to what stands for far ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ...arrays.library import Floats
from .drawing import Drawn, Recipe, draw_inputs, hide_some

_USUAL, _CHUNKS = Drawn(), Drawn(n=7, m=7)
_DOUBLE, _FAR = Drawn(dtype="float64"), Drawn(size=32.0, dtype="float64")
_NOT_SO_FAR = replace(_FAR, size=8.0)
_GROUPED_FEW = Drawn(heads=(4,), key_heads=(2,), n=3, m=5, d_v=2, count=3)
_DTYPES = ("float64", "float32", "bfloat16")


def _case(
    estimator: str,
    name: str,
    flags: str,
    comment: str,
    drawn: Drawn = _USUAL,
    *,
    fixed: dict[str, Floats] | None = None,
    shapes: dict[str, tuple[int, ...]] | None = None,
    **arguments: Any,
) -> Recipe:
    """Draw q, k, v and arrays of other `shapes`, beside what is `fixed`."""
    label = f"{estimator}-{name}-{drawn.dtype}"
    x = draw_inputs(label, drawn, drawn.shapes("q", "k", "v") | (shapes or {})) | (fixed or {})
    words, arguments = tuple(flags.split()), {"scale": None} | arguments
    return Recipe(label, estimator, comment, words, arguments, drawn.dtype, x, estimator, estimator)


def _index_rows(*rows: list[int]) -> Floats:
    """Return indices of one sample, or of those of queries."""
    return np.array(rows[0] if len(rows) == 1 else rows, np.int64)


def _of_queries(drawn: Drawn) -> Floats:
    """Return keys of each query that lie apart, `count` of them."""
    rows = np.arange(np.prod([*drawn.heads, drawn.n])).reshape(*drawn.heads, drawn.n, 1)
    return np.asarray((rows + 2 * np.arange(drawn.count)) % drawn.m, np.int64)


def cases_of_coresets(name: str) -> Iterator[Recipe]:
    case = partial(_case, name)
    some = {"indices": _index_rows([4, 1, 2])}
    for dtype in _DTYPES:
        yield case("basic", "BASIC", "3 of 6 keys.", Drawn(dtype=dtype), fixed=some)
    yield case("scale", "SCALING", "The scale is given.", fixed=some, scale=0.75)
    hidden = {"indices": _index_rows([4, 0, 2]), "mask": hide_some(6)}
    comment = "Of the 3 keys one is hidden, and counts as not there; so do 2 of the others."
    yield case("mask", "MASK", comment, fixed=hidden)
    every = {"indices": _index_rows([3, 5, 0, 4, 2, 1])}
    for dtype in ("float64", "float32"):
        comment = "All keys in another order: exact attention."
        yield case("all", "SAMPLE", comment, Drawn(dtype=dtype), fixed=every)
    comment = "One query, and one key that stands for all."
    yield case("one", "DEGENERATE", comment, Drawn(n=1), fixed={"indices": _index_rows([2])})
    comment = "Exponents to hundreds of both signs: keys are nearly at right angles."
    yield case("long", "EXTREME", comment, _NOT_SO_FAR, fixed=some)


def cases_of_samples(estimator: str) -> Iterator[Recipe]:
    def case(name: str, flags: str, comment: str, drawn: Drawn, **options: Any) -> Recipe:
        fixed = {"indices": _of_queries(drawn)} | options.pop("fixed", {})
        shapes = {"log_probability": fixed["indices"].shape}
        return _case(estimator, name, flags, comment, drawn, fixed=fixed, shapes=shapes, **options)

    few = Drawn(count=3)
    for dtype in _DTYPES:
        comment = "3 keys for each query, with probabilities."
        yield case("basic", "BASIC", comment, replace(few, dtype=dtype))
    shared = {"indices": _index_rows([5, 0, 3])}
    yield case("shared", "SAMPLE", "The same keys for all queries.", few, fixed=shared)
    twice = {"indices": _index_rows([0, 0, 4], [1, 5, 1], [2, 2, 2], [3, 4, 3])}
    yield case("repeated", "SAMPLE", "Keys that come twice count twice.", few, fixed=twice)
    every = replace(_DOUBLE, count=6)
    equal = {
        "indices": np.tile(_index_rows([3, 5, 0, 4, 2, 1]), (4, 1)),
        "log_probability": np.zeros((4, 6)),
    }
    yield case("all", "SAMPLE", "All keys, once each: exact attention.", every, fixed=equal)
    yield case("scale", "SCALING", "The scale is given.", few, scale=0.75)
    comment = "Some keys of samples are hidden, others for each query."
    yield case("mask", "MASK", comment, few, fixed={"mask": hide_some(4, 6)})
    empty = {"mask": hide_some(4, 6) & (np.arange(4) != 1)[:, None]}
    comment = "Query 1 sees no key of its sample: its output is 0."
    yield case("empty-row", "MASK EMPTY_ROW", comment, few, fixed=empty)
    one = Drawn(n=1, count=1)
    yield case("one", "DEGENERATE", "One key: the output is its value.", one)
    yield case("gqa", "GQA", "4 query heads with samples of their own, 2 key heads.", _GROUPED_FEW)
    yield case("long", "EXTREME", "Scores to thousands.", replace(_FAR, count=3))


def cases_of_chunks(estimator: str, far: Drawn = _NOT_SO_FAR, **options: Any) -> Iterator[Recipe]:
    """Yield cases of estimators with chunks; `options` are of all of them."""

    def case(name: str, flags: str, comment: str, drawn: Drawn = _USUAL, **more: Any) -> Recipe:
        return _case(estimator, name, flags, comment, drawn, **{"causal": False} | options | more)

    for dtype in _DTYPES:
        yield case("basic", "BASIC", "Chunks of 2 keys.", Drawn(dtype=dtype), window=2)
    yield case("uneven", "CHUNK", "The last chunk has 1 key of 3.", _CHUNKS, window=3)
    comment = "Queries are level with the last keys."
    yield case("cross", "CHUNK CROSS", comment, Drawn(n=4, m=8), window=3)
    comment = "One chunk holds all keys: exact attention."
    yield case("one-chunk", "CHUNK", comment, window=9)
    yield case("scale", "SCALING", "The scale is given.", window=2, scale=0.75)
    mask = {"mask": np.array([True, False, True, False, False, True, True])}
    comment = "Hidden keys, among them all of a chunk."
    yield case("mask", "MASK", comment, _CHUNKS, fixed=mask, window=2)
    yield case("causal", "CAUSAL", "As many queries as keys.", _CHUNKS, window=3, causal=True)
    comment = "The last query sees every key."
    yield case("causal-cross", "CAUSAL CROSS", comment, Drawn(n=4, m=7), window=3, causal=True)
    comment = "Causal, with hidden keys."
    drawn = replace(_CHUNKS, dtype="float64")
    yield case("causal-mask", "CAUSAL MASK", comment, drawn, fixed=mask, window=2, causal=True)
    yield case("one", "DEGENERATE", "One query.", Drawn(n=1), window=2)
    yield case("gqa", "GQA", "4 query heads, 2 key heads.", _GROUPED_FEW, window=2)
    yield case("long", "EXTREME", "Exponents to thousands of both signs.", far, window=2)


def cases_of_eva(name: str) -> Iterator[Recipe]:
    yield from cases_of_chunks(name, _FAR, log_size=True)
    case = partial(_case, name, causal=False)
    comment = "Each chunk counts as one key, as published."
    yield case("published", "CHUNK", comment, _CHUNKS, window=3, log_size=False)
    comment = "A frequency is given for each chunk."
    shapes: dict[str, tuple[int, ...]] = {"omega": (3, 4)}
    for dtype in ("float64", "float32"):
        drawn = replace(_CHUNKS, dtype=dtype)
        yield case("omega", "BASIC", comment, drawn, shapes=shapes, window=3, log_size=True)


def cases_of_windows(estimator: str) -> Iterator[Recipe]:
    def case(name: str, flags: str, comment: str, drawn: Drawn = _USUAL, **options: Any) -> Recipe:
        usual: dict[str, Any] = {"window": (1, 1), "causal": False}
        shapes: dict[str, tuple[int, ...]] = {"omega": (drawn.count, drawn.d)}
        return _case(estimator, name, flags, comment, drawn, shapes=shapes, **usual | options)

    for dtype in _DTYPES:
        comment = "One near key on each side."
        yield case("basic", "BASIC", comment, Drawn(n=6, dtype=dtype))
    comment = "2 near keys on the left, none on the right."
    yield case("left", "NEAR", comment, Drawn(n=6), window=(2, 0))
    yield case("open", "NEAR", "All keys on the left are near.", Drawn(n=6), window=(None, 0))
    comment = "All keys are near: exact attention."
    yield case("all", "NEAR", comment, _DOUBLE, window=(9, 9))
    comment = "Windows are level with the last keys."
    yield case("cross", "NEAR CROSS", comment, Drawn(n=3, m=7))
    yield case("scale", "SCALING", "The scale is given.", scale=0.75)
    yield case("mask", "MASK", "Near and far keys are hidden.", fixed={"mask": hide_some(4, 6)})
    yield case("causal", "CAUSAL", "As many queries as keys.", Drawn(n=6), causal=True)
    comment = "The last query sees every key."
    yield case("causal-cross", "CAUSAL CROSS", comment, Drawn(n=3, m=7), causal=True)
    yield case("one", "DEGENERATE", "One query, one frequency.", Drawn(n=1, count=1))
    yield case("gqa", "GQA", "4 query heads, 2 key heads.", _GROUPED_FEW)
    yield case("long", "EXTREME", "Exponents to thousands of both signs.", _FAR)
