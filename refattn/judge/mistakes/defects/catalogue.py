"""The rows of the catalogue: what is known of each implementation, right or wrong, and its edits.

A row of `rows/*.diff` is a block of lines:

    causal-ahead: softmax rfa ra linear        name: estimators [over TEXT]
    A token sees the next one.                 the effect, of any number of lines
    seen: ...                                  where it was met; also tags:, only: and lacks:
    @ visible: (ahead <= 0) => (ahead <= 1)    a function of the text, or several; what occurs
                                               exactly once after its docstring, and the new text

New text that is long is in lines below that begin with `+`. So is the old text if it is of several
lines, or begins or ends with a space, in lines that begin with `-` below `@ visible`.
Each of the estimators has an entry, with all the capabilities that it has over this text, those
named by `only:`, or all but those named by `lacks:`. A file may begin with an `only:` for all of
its rows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from functools import cache
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from ..text import Edit
from .edits import OVER_FORMULAS, RECURRENCES, TEXT_LAWS, Edited

_NO_TAGS: Mapping[str, Any] = MappingProxyType({})
_OF_ALL = ("mask", "causal", "gqa")
# What each definition is able to take. An entry claims all of it, or what its row says.
_ABLE = {
    "softmax": _OF_ALL,
    "rfa": ("omega", *_OF_ALL),
    "ra": ("omega", *_OF_ALL),
    "lara": ("omega", "mask", "gqa"),
    "linear": _OF_ALL,
    "performer-relu": ("omega", *_OF_ALL),
    "kernel": ("omega",),
    "eva": ("causal", "gqa"),
    "second-order": ("causal", "gqa"),
    "eva-sampled": ("causal", "gqa", "omega_only", "omega_per_head"),
    "rfa-local": ("omega", "omega_per_head", *_OF_ALL),
    **dict.fromkeys(("coreset", "sampled-uniform", "sampled-norms", "sampled-softmax"), ("gqa",)),
    "moments": (),
    **dict.fromkeys(RECURRENCES, ("gqa", "initial_state")),
}
# The same over the text `backward`, which returns gradients.
_ABLE_BACK = {
    "softmax": (*_OF_ALL, "vjp"),
    "rfa": ("omega_only", *_OF_ALL, "vjp"),
    "linear": (*_OF_ALL, "vjp"),
}
_TAGS = {
    "lara": {"weighting": "balance"},
    "linear": {"feature_map": "elu"},
    "performer-relu": {"coupling": "iid"},
}
# The options without which a mistake makes no difference, by the first word of its name.
_NEEDS = {x: {x} for x in ("bias", "sinks", "softcap", "window")} | {"sink": {"sinks"}}
_NEEDS |= {x: {"mask", "causal", "window", "bias", "sinks"} for x in ("mask", "causal")}
_RIGHT = "right.diff"
_KEYS = ("seen", "tags", "only", "lacks")


class Mutant(NamedTuple):
    """An implementation under test; `capabilities` are the optional keywords `fn` understands.

    `effect` is what a user sees, `seen` where the mistake has been met, `tags` what is claimed.
    """

    name: str
    estimator: str
    fn: Edited
    capabilities: tuple[str, ...]
    effect: str
    seen: str = ""
    tags: Mapping[str, Any] = _NO_TAGS

    def shown(self) -> str:
        """Return the change for a reader, or nothing."""
        return self.fn.shown()


def matters(name: str, options: AbstractSet[str]) -> bool:
    """Tell whether a mistake can make a difference with these options."""
    needs = _NEEDS.get(name.split("-")[1])
    return needs is None or bool(needs & options)


@cache
def wrong() -> tuple[Mutant, ...]:
    """Return all defects."""
    files = resources.files(__package__).joinpath("rows").iterdir()
    texts = {x.name: x.read_text("utf-8") for x in files if x.name.endswith(".diff")}
    return tuple(x for name in sorted({*texts} - {_RIGHT}) for x in read(texts[name]))


@cache
def right() -> tuple[Mutant, ...]:
    """Return the definition of each estimator, which is the text without edits, and variants."""
    text = resources.files(__package__).joinpath("rows", _RIGHT).read_text("utf-8")
    definitions = (
        Mutant(x, x, Edited(x, x), able, "The definition.", tags=_TAGS.get(x, _NO_TAGS))
        for x, able in _ABLE.items()
    )
    return (*definitions, *read(text))


def read_mistakes(path: str | os.PathLike[str]) -> tuple[Mutant, ...]:
    """Read a file of rows, and run each text; an error names the file, the row and the rule."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"`mistakes` must be a path, got {path!r}.")
    try:
        found = tuple(read(Path(path).read_text("utf-8")))
        for row in found:
            _demand(row.fn.block, "change a function", bool(row.fn.edits), "no edit")
            row.fn.try_out()
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    if not found:
        raise ValueError(f"{path}: a file of mistakes must have a row, got none.")
    return found


def read(source: str) -> Iterator[Mutant]:
    """Read a file of rows, and yield an entry for each estimator that a block names."""
    every: list[str] = []
    for block in source.split("\n\n"):
        lines = [x for x in block.splitlines() if x and x[0] != "#"]
        if lines and lines[0].startswith("only: "):
            every = lines.pop(0)[6:].split()
        if lines:
            yield from _entries(lines, every)


def _entries(lines: list[str], every: list[str]) -> Iterator[Mutant]:
    name, _, of = lines[0].partition(": ")
    of, _, over = of.partition(" over ")
    able_of = _ABLE_BACK if over == "backward" else _ABLE
    _demand(name, "begin with `name: estimators`", bool(of), lines[0])
    for estimator in of.split():
        _demand(name, f"be of {', '.join(able_of)}", estimator in able_of, estimator)
    _demand(
        name, f"be over {', '.join(OVER_FORMULAS)}, or none", over in ("", *OVER_FORMULAS), over
    )
    first = next((i for i, x in enumerate(lines) if x.startswith("@ ")), len(lines))
    about = dict.fromkeys(_KEYS, "")
    effect = []
    for line in lines[1:first]:
        key, _, value = line.partition(": ")
        if key in about:
            about[key] = value
        else:
            effect.append(line)
    _demand(name, "say its effect in a sentence", bool(effect), lines[1:first])
    edits = tuple(_edits(name, lines[first:]))
    tags = {"coupling": over} if over in TEXT_LAWS else {}
    tags |= dict(x.split("=") for x in about["tags"].split())
    only = about["only"].split() or every
    for estimator in of.split():
        able = able_of[estimator]
        foreign = {*only} - {*_ABLE["rfa"]}  # claimed whatever the estimator has
        has = tuple(x for x in only if x in able or x in foreign) if only else able
        yield Mutant(
            f"{estimator}-{name}",
            estimator,
            Edited(name, estimator, over, edits, tags.get("features", "")),
            tuple(x for x in has if x not in about["lacks"].split()),
            " ".join(effect),
            about["seen"],
            _TAGS.get(estimator, {}) | tags,
        )


def _demand(name: str, rule: str, holds: bool, got: object) -> None:
    if not holds:
        raise ValueError(f"{name}: a row must {rule}, got {got!r}.")


def _edits(name: str, lines: list[str]) -> Iterator[Edit]:
    """Read changes: a `-` after a `+` begins another one, of the same function."""
    function, old, new = "", list[str](), list[str]()
    for line in [*lines, "@ "]:
        _demand(name, "change lines that begin with @, - or +", line[0] in "@-+", line)
        if (new and line[0] == "-") or ((old or new) and line[0] == "@"):
            yield from (Edit(x, "\n".join(old), "\n".join(new)) for x in function.split())
            old, new = [], []
        if line[0] == "@":
            function, _, change = line[2:].partition(": ")
            old, new = [], []
            if change:
                before, arrow, after = change.partition(" => ")
                old, new = [before], [after] if arrow else []
        else:
            (old if line[0] == "-" else new).append(line[2:])
