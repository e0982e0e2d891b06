"""The table of cases, text/cases.txt, which says how to read it, and how its rows are drawn."""

from __future__ import annotations

import re
from ast import literal_eval
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ...registry import ESTIMATORS
from ...registry.record import Estimator
from .cases import DTYPE_FACTS, Convention, read_text
from .drawing import INPUTS, Drawn, Inputs, Recipe, round_to_single

_TRUE = {"causal": "causal", "lse": "return_lse"}  # arguments, by the words for them
_IN_FULL = {"indices": np.int64, "mask": np.bool_}  # inputs that are in the table


class Row(NamedTuple):
    """What the table says of one case."""

    kinds: tuple[str, ...]
    name: str
    flags: tuple[str, ...]
    comment: str
    words: tuple[str, ...]
    needs: frozenset[str]


@cache
def rows() -> tuple[Row, ...]:
    """Read the table."""
    found, shorthands = list[Row](), dict[str, str]()
    kinds, usual = list[str](), ""
    for line in read_text("cases.txt").splitlines():
        if line.startswith("["):
            head, _, usual = line[1:].partition("]")
            kinds = head.split()
        elif " | " in line and not line.startswith("#"):
            *cells, parts = line.split(" | ")
            for part in parts.split(";"):
                words = " ".join(shorthands.get(x, x) for x in f"{usual} {part}".split())
                found += _rows_by_dtype(kinds, cells, words.split())
        elif " = " in line:
            name, _, shorthands[name] = line.partition(" = ")
    return tuple(found)


def _rows_by_dtype(kinds: list[str], cells: list[str], words: list[str]) -> Iterator[Row]:
    name, flags, comment = cells
    needs = {x.removeprefix("needs=") for x in words if x.startswith("needs=")}
    others = [x for x in words if not (x in DTYPE_FACTS or x.startswith("needs="))]
    for dtype in [x for x in words if x in DTYPE_FACTS] or ["float32"]:
        given = (*others, f"dtype={dtype!r}")
        yield Row(tuple(kinds), name, tuple(flags.split()), comment, given, frozenset(needs))


def group_name(convention: Convention) -> str:
    """Return the type of its group, and the start of the ids in it.

    Examples
    --------
    >>> group_name(Convention("default_scale", "1/sqrt(d)"))
    'convention-default-scale-1-over-sqrt-d'
    """
    value = convention.value.replace("-inf", "minus inf").replace("/", " over ")
    words = re.findall("[a-z0-9]+", f"convention {convention.option} {value}")
    return "-".join(words)


def draw(kind: str, row: Row, convention: Convention | None = None) -> Recipe:
    """Draw the case of a row; its id has the name of the row or, in a file, all words."""
    estimator, features = kind.partition("/")[0].partition(":")[::2]
    record, (drawn, arguments, more) = ESTIMATORS[estimator], _read(row.words)
    pulled = bool(drawn.cotangents)
    if "/" in kind:
        name = row.name if convention is None else group_name(convention)
        words = (*_argument_words(name, drawn, arguments), *more, *_size_words(drawn))
        label = "-".join(dict.fromkeys([estimator, *words]))
        group = "-".join([estimator, *name.split()])
        flags = (*["CONVENTION"] * bool(convention), *row.flags, *["GRADIENT"] * pulled)
    else:
        group = kind.replace(":", "-")
        label = "-".join([group, *["gradient"] * pulled, row.name, drawn.dtype])
        flags = (*["GRADIENT"] * pulled, *row.flags)
    inputs = Inputs(label, drawn)
    for name in _names_of_inputs(record, drawn):
        inputs[name] = inputs.draw(name, drawn.shape(name, per_query=record.has("per-query")))
    inputs |= {x: np.array(arguments.pop(x), t) for x, t in _IN_FULL.items() if x in arguments}
    for word in more:
        inputs |= INPUTS[word](inputs)
    return Recipe(
        id=label,
        estimator=estimator,
        comment=row.comment,
        flags=flags,
        arguments=_usual_arguments(record, features) | arguments,
        dtype=drawn.dtype,
        inputs={name: round_to_single(x, drawn.dtype) for name, x in inputs.items()},
        file=kind.replace("/", "-") if "/" in kind else estimator,
        group=group + "-gradients" * pulled,
        convention=convention,
    )


def _read(words: tuple[str, ...]) -> tuple[Drawn, dict[str, Any], list[str]]:
    """Return what is drawn, arguments and fixed inputs, and words for more inputs."""
    sizes, given, more = dict[str, Any](), dict[str, Any](), []
    for word in words:
        name, equals, value = word.partition("=")
        if name in Drawn.__dataclass_fields__:
            sizes[name] = literal_eval(value)
        elif equals:
            given[name] = literal_eval(value)
        elif name in _TRUE:
            given[_TRUE[name]] = True
        elif name.startswith("d_"):
            sizes["cotangents"] = tuple(dict.fromkeys((*sizes.get("cotangents", ()), name)))
        elif name in INPUTS:
            more.append(name)
        else:
            sizes["n"], sizes["m"] = map(int, name.split("x"))
    return Drawn(**sizes), given, more


def _names_of_inputs(record: Estimator, drawn: Drawn) -> Iterator[str]:
    """Yield what an estimator takes, and the cotangents."""
    yield from record.arrays
    yield from ("omega",) if record.has("random-features") or record.has("per-query") else ()
    yield from drawn.cotangents
    yield from ("omega", "centres") if record.has("proposals") else ()


def _usual_arguments(record: Estimator, features: str) -> dict[str, Any]:
    """Return the arguments of all cases of an estimator."""
    usual = dict(getattr(record.naive, "keywords", {}))  # of a `functools.partial`
    usual |= {"features": features} if features else {}
    usual |= {"weighting": "balance"} if record.has("proposals") else {}
    usual |= {"feature_map": "elu"} if record.has("feature-map") else {}
    usual |= {"scale": None} if record.takes("scale") else {}
    return usual | ({"causal": False} if hides_keys(record) else {})


def hides_keys(record: Estimator) -> bool:
    """Return whether cases may hide keys: not where proposals are of all that are there."""
    return record.takes("causal") and not (record.has("target") or record.has("proposals"))


def _argument_words(name: str, drawn: Drawn, arguments: dict[str, Any]) -> Iterator[str]:
    yield from ("gradient",) if drawn.cotangents else ()
    yield from name.split()
    for side, keys in zip(("left", "right"), arguments.get("window", (None, None)), strict=True):
        yield from (f"{side}{keys}",) if keys is not None else ()
    yield from ("causal",) if "causal" in arguments else ()
    for argument, word in (("softcap", "cap"), ("scale", "scale"), ("dropout_p", "p")):
        if argument in arguments:
            yield f"{word}{arguments[argument]:g}".replace(".", "p")
    yield from ("lse",) if "return_lse" in arguments or "d_lse" in drawn.cotangents else ()


def _size_words(drawn: Drawn) -> Iterator[str]:
    """Yield the shapes, sizes and dtype in words."""
    yield from (f"h{heads}" for heads in drawn.heads)
    yield from (f"g{heads}" for heads in drawn.key_heads)
    yield from (f"n{drawn.n}", f"m{drawn.m}", f"d{drawn.d}", f"dv{drawn.d_v}")
    yield from (f"size{drawn.size:g}".replace(".", "p"),) if drawn.size is not None else ()
    yield drawn.dtype
