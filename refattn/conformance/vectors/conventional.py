"""Cases of exact attention where libraries disagree: one group for each value of an option."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from ..conventions import OPTIONS
from .cases import Convention
from .drawing import Drawn, Recipe
from .options import case

# Values that fix no number, and what they are instead.
WITHOUT = {
    "none": "the library has no such argument",
    "refused": "an error",
    "undefined": "any number",
    "finite": "about the least float, which depends on the dtype",
}
_SQUARE, _WIDE, _TALL = Drawn(n=5, m=5), Drawn(n=3, m=5), Drawn(n=5, m=3)
_SIX_HEADS = Drawn(heads=(6,), key_heads=(2,), n=2, m=4, d_v=2)
_FEW_WITH_COTANGENT = Drawn(n=3, m=5, d=2, d_v=2, cotangents=("d_out",))


def group_name(convention: Convention) -> str:
    """Return the type of its group, and the start of the ids in it.

    Examples
    --------
    >>> from refattn.conformance.vectors.cases import Convention
    >>> group_name(Convention("default_scale", "1/sqrt(d)"))
    'convention-default-scale-1-over-sqrt-d'
    """
    value = convention.value.replace("-inf", "minus inf").replace("/", " over ")
    words = re.findall("[a-z0-9]+", f"convention {convention.option} {value}")
    return "-".join(words)


def convention_recipes() -> Iterator[Recipe]:
    """Yield cases of one option each; all else is as in the package."""
    for option, cases in _CASES.items():
        for value in OPTIONS[option].values:
            if value not in WITHOUT:
                yield from cases(Convention(option, value))


def _of(convention: Convention, flags: str, comment: str) -> partial[Recipe]:
    """Make the function that draws the cases of a group."""
    name = group_name(convention)
    return partial(
        case,
        name,
        f"CONVENTION {flags}",
        comment,
        file="softmax-conventions",
        convention=convention,
    )


def _vary_causal(convention: Convention) -> Iterator[Recipe]:
    of = _of(convention, "CAUSAL CROSS", "Causal, with other numbers of queries and keys.")
    for drawn in (_WIDE, replace(_WIDE, n=2, m=7), _FEW_WITH_COTANGENT):
        yield of(drawn=drawn, causal=True)
    if convention.value == "top-left":
        yield of(drawn=_TALL, causal=True)
    else:
        of = _of(convention, "CAUSAL CROSS EMPTY_ROW", "The first 2 queries see no key.")
        yield of(drawn=_TALL, causal=True)


def _vary_window(convention: Convention) -> Iterator[Recipe]:
    of = _of(convention, "WINDOW", "As many queries as keys.")
    yield of(drawn=_SQUARE, window=(2, 0))
    of = _of(convention, "WINDOW CROSS", "Other numbers of queries and keys.")
    for n, m, window in ((3, 6, (2, 0)), (3, 6, (2, 1)), (5, 4, (3, 1))):
        yield of(drawn=Drawn(n=n, m=m), window=window)
    yield of(drawn=_FEW_WITH_COTANGENT, window=(2, 1))


def _vary_empty_rows(convention: Convention) -> Iterator[Recipe]:
    of = _of(convention, "MASK EMPTY_ROW", "Query 1 sees no key.")
    for drawn in (_SQUARE, _WIDE):
        yield of("emptyrow", drawn)


def _vary_softcap(convention: Convention) -> Iterator[Recipe]:
    of = _of(convention, "SOFTCAP BIAS", "A cap and a bias.")
    for more, drawn in (("bias", _SQUARE), ("bias1024", _SQUARE), ("bias", _FEW_WITH_COTANGENT)):
        yield of(more, drawn, softcap=1.0)


def _vary_mask(convention: Convention) -> Iterator[Recipe]:
    of = _of(convention, "MASK", "A mask; every query sees some keys and others not.")
    for drawn in (_SQUARE, _WIDE):
        yield of("mask", drawn)


def _vary_scale(convention: Convention) -> Iterator[Recipe]:
    of = _of(convention, "SCALING", "No scale is given.")
    for d in (4, 9):
        yield of(drawn=Drawn(d=d, size=1.0))


def _vary_groups(convention: Convention) -> Iterator[Recipe]:
    of = _of(convention, "GQA", "Query heads share key heads.")
    for drawn in (_SIX_HEADS, replace(_SIX_HEADS, heads=(4,))):
        yield of(drawn=drawn)


def _vary_lse(convention: Convention) -> Iterator[Recipe]:
    yield _of(convention, "LSE", "The log normaliser.")(drawn=_SQUARE, return_lse=True)
    of = _of(convention, "LSE SCALING BIAS", "Of scaled, biased scores.")
    yield of("bias", _WIDE, return_lse=True, scale=0.75)


def _vary_empty_lse(convention: Convention) -> Iterator[Recipe]:
    of = _of(convention, "LSE MASK EMPTY_ROW", "Query 1 sees no key.")
    for drawn in (_SQUARE, _WIDE):
        yield of("emptyrow", drawn, return_lse=True)


def _vary_dropout(convention: Convention) -> Iterator[Recipe]:
    of = _of(convention, "DROPOUT", "Which weights are kept is given, and p.")
    for drawn, p in ((_SQUARE, 0.25), (_WIDE, 0.5)):
        yield of("keep", drawn, dropout_p=p)


def _vary_past(convention: Convention) -> Iterator[Recipe]:
    of = _of(convention, "CAUSAL CROSS", "Causal, with 4 keys before those that are given.")
    for n, m in ((3, 2), (2, 5)):
        yield of("past4", Drawn(n=n, m=m), causal=True)


_CASES: dict[str, Callable[[Convention], Iterator[Recipe]]] = {
    "causal": _vary_causal,
    "empty_rows": _vary_empty_rows,
    "mask": _vary_mask,
    "default_scale": _vary_scale,
    "groups": _vary_groups,
    "softcap": _vary_softcap,
    "window": _vary_window,
    "lse": _vary_lse,
    "lse_empty": _vary_empty_lse,
    "dropout": _vary_dropout,
    "past": _vary_past,
}
