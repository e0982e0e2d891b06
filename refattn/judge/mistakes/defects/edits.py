"""A defect is an edit of a formula: what to take out of one of its functions, and what to put in.

The text is the file that `python -m refattn.naive` prints, then how an implementation is called and
how it draws (`texts/contract.py`, `texts/draws.py`), and perhaps one more of `texts` over both, or
another law of frequencies: of two definitions of a name the later one counts.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from typing import Any

import numpy as np

from ..text import Edit, cut, edited, names_read, run, statements

_FOLDER = resources.files(__package__)
_CALLS = ("draws", "keys", "kernel", "contract")
_UNDER = dict.fromkeys(("online", "direct"), ("stabilised",))  # the other texts that one stands on
TEXT_LAWS = ("orthogonal", "simplex")  # laws of `texts/draws.py`
OVER_FORMULAS = ("backward", "direct", "dropout", "online", "stabilised", *TEXT_LAWS)
_COUNTS = ("num_features", "num_samples", "num_proposals", "num_keys")
RECURRENCES = (
    *("retention", "gated-linear-attention", "state-space-duality", "delta-rule"),
    *("gated-delta-rule", "kimi-delta-attention", "rwkv7"),
)
_DIRECT = {  # functions of the text that are called as they are
    "kernel": "kernel",
    "moments": "mean_and_covariance",
    **{name: name.replace("-", "_") for name in RECURRENCES},
}

# The same sum without an array of (n, d, m) numbers, for values that are finite.
BY_PRODUCTS = (
    Edit(
        "weighted_sum",
        "weights[..., None, :] * xp.matrix_transpose(v)[..., None, :, :]",
        "xp.where(seen, weights, 0.0) @ v",
    ),
    Edit("weighted_sum", "xp.sum(xp.where(seen[..., None, :], terms, 0.0), axis=-1)", "terms"),
)


@cache
def text(over: str = "") -> dict[str, str]:
    """Return the statements of the formulas, the contract and perhaps a text over them, by name."""
    found = dict(statements())
    texts = () if over in ("", *TEXT_LAWS) else (*_UNDER.get(over, ()), over)
    for name in (*_CALLS, *texts):
        found |= cut(_FOLDER.joinpath("texts", f"{name}.py").read_text("utf-8"))
    if over in TEXT_LAWS:
        # A coupling needs no text of its own: one word of the law of frequencies differs.
        found |= edited(found, [Edit("law", "normal", over)])
    return found


@cache
def _calling() -> frozenset[str]:
    """Functions that call an implementation: no formula, and of no use to a reader."""
    source = _FOLDER.joinpath("texts", "contract.py").read_text("utf-8")
    return frozenset(cut(source)) | {"group_heads"}


@dataclass(frozen=True)
class Edited:
    """An implementation of an estimator: the text with its edits, run when it is first called."""

    block: str = field(compare=False)  # the row that it is of
    estimator: str
    over: str = ""  # the text over the formulas, if any
    edits: tuple[Edit, ...] = ()
    features: str = ""  # where they are not the positive ones

    def joined(self, more: Iterable[Edit]) -> Edited:
        """Return the implementation with more edits, or as it is where these cannot be made."""
        other = replace(self, edits=(*self.edits, *more))
        try:
            other.sources()
        except ValueError:  # what they would change is changed already
            return self
        return other

    def try_out(self) -> None:
        """Run the definitions of the text; what is no Python is an error of a value."""
        self.sources()
        try:
            self.space()
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise ValueError(f"{self.block}: the edited text must run, got {what}") from None

    @property
    def changes_calls(self) -> bool:
        """Whether what differs is how the formula is called, not the formula."""
        return not _calling().isdisjoint(x.function for x in self.edits)

    def sources(self) -> dict[str, str]:
        """Return the functions that are changed."""
        try:
            return edited(text(self.over), self.edits)
        except ValueError as error:
            raise ValueError(f"{self.block}: {error}") from None

    def right(self) -> dict[str, str]:
        """Return the functions that are changed, as they should be."""
        return {name: text(self.over)[name] for name in self.sources()}

    def diff(self) -> dict[str, list[str]]:
        """Return the changed lines of each function: `-` as it should be, `+` as it is."""
        right = self.right()
        return {name: _changed(right[name], x) for name, x in self.sources().items()}

    def shown(self, most: int = 3) -> str:
        """Return the change for a reader: a function and a few lines, or nothing.

        Nothing where more than one function is changed, or more lines, or what calls the formula.
        """
        diff = self.diff()
        name, lines = next(iter(diff.items()), ("", []))
        if len(diff) != 1 or len(lines) > most or name in _calling():
            return ""
        return "\n".join([f"in {name} (- right, + like yours):", *(f"  {line}" for line in lines)])

    def space(self) -> dict[str, Any]:
        """Return the functions of the text with its edits; they run at the first call."""
        return _space(self)

    def __call__(self, *arrays: Any, **options: Any) -> Any:
        space = self.space()
        if self.features:
            options["features"] = self.features
        with np.errstate(all="ignore"):
            if self.estimator in _DIRECT:
                return space[_DIRECT[self.estimator]](*arrays, **options)
            arrays += tuple(options.pop(name) for name in ("q", "k", "v") if name in options)
            sizes = [options.pop(name, None) for name in _COUNTS]
            size = next((x for x in sizes if x is not None), None)
            call = space["call"]
            if "d_out" in options:
                call = space.get("backward", call)
            return call(*arrays, estimator=self.estimator, size=size, **options)


@cache
def _space(edited: Edited) -> dict[str, Any]:
    """Run the text with edits, for each estimator by itself, as a defect may keep a state."""
    texts = _without_others(edited.over, edited.estimator)
    own = {"HELD": texts["HELD"]} | edited.sources()
    return run(texts, own, _unedited(edited.over))


@cache
def _unedited(over: str) -> dict[str, Any]:
    return run(text(over))


@cache
def _without_others(over: str, estimator: str) -> dict[str, str]:
    """Return the statements but the formulas of other estimators, which need not run again."""
    texts, formula = text(over), _unedited(over)["attention"](estimator)
    own = _DIRECT.get(estimator, getattr(formula, "func", formula).__name__)
    others = {x for x, y in texts.items() if "@formula(" in y and x != own}
    others -= {z for x, y in texts.items() if x != "attention" for z in names_read(y)}
    return {x: y for x, y in texts.items() if x not in others}


def _changed(before: str, after: str) -> list[str]:
    """Return the lines that differ, with the least indent that keeps their shape."""
    pairs = difflib.ndiff(before.splitlines(), after.splitlines())
    lines = [x for x in pairs if x[0] in "+-" and x[2:].strip()]
    least = min((len(x[2:]) - len(x[2:].lstrip()) for x in lines), default=0)
    return [f"{x[0]} {x[2 + least :]}" for x in lines]
