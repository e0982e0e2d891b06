"""Declarations of a candidate, from `tags.toml`: capabilities, and tags with their values."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Mapping
from importlib import resources
from types import MappingProxyType
from typing import Any

import numpy as np

from ....arrays import checks
from ....registry import Estimator

LISTING = "refattn check --list"  # prints all names, of which errors list some
COMMON = (
    *("softmax", "rfa", "performer", "ra", "lara"),
    *("eva", "linear", "coreset", "snis", "kernel"),
)

_TABLES = tomllib.loads(resources.files(__package__).joinpath("tags.toml").read_text("utf-8"))


def _words(table: str) -> Mapping[str, str]:
    """Return a table of texts; where a line ends in them makes no difference."""
    rows = _TABLES[table].items()
    values = {name: ", ".join(some) for name, some in _TABLES["values"].items()}
    return MappingProxyType(
        {x: " ".join(text.split()).replace("{values}", values.get(x, "")) for x, text in rows}
    )


CAPABILITIES, TAGS, LIMITS = map(_words, ("capabilities", "tags", "limits"))
CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {name: tuple(some) for name, some in _TABLES["values"].items()}
)
TAGGED_DTYPES, LIBRARIES, LAYOUTS = (CHOICES[x] for x in ("dtype", "library", "layout"))

_POSITIVE = ("scale", "max_logit", "kernel_epsilon")  # with 0 rows of ReLU may be undefined
_TRUE_OR_FALSE = ("self_attention", "causal_only", "same_value_size", "fixed_frequencies")


# Conventions of recurrences.
OF_RECURRENCES = ("beta", "decay", "error", "keys", "own_write", "read")


# Limits of attention only.
_OF_TOKENS = ("multiple_of", "self_attention", "causal_only", "same_value_size", "empty_rows")


DEFAULTS: Mapping[str, Any] = MappingProxyType(
    # The first value of each tag is its default.
    {name: options[0] for name, options in CHOICES.items()}
    | dict.fromkeys(_TRUE_OR_FALSE, False)
    | dict.fromkeys(("scale", "device", "layout", "head_sizes", "max_logit"))
    | {"epsilon": 0.0, "kernel_epsilon": 1e-3, "ddof": 1, "multiple_of": 1}
)


_OF_BITS = ("batch_invariant", "deterministic")


# What may be given of what an estimator draws: results are numbers then, and need no seed.
DRAWN_KEYWORDS = ("omega", "indices")


def draws_something(record: Estimator, options: Iterable[str]) -> bool:
    """Return whether something is drawn in a call with these options."""
    return record.has("random") and not set(DRAWN_KEYWORDS) & set(options)


def possible(record: Estimator) -> list[str]:
    """List the capabilities that implementations of an estimator may have."""
    bits = _OF_BITS if len(record.arrays) == 3 else ()
    only = [only_of(name) for name in DRAWN_KEYWORDS if record.takes(name)]
    return [name for name in CAPABILITIES if name in (*record.options, *bits, *only)]


def only_of(name: str) -> str:
    """Return the capability of what is called with this keyword, and in no other way."""
    return f"{name}_only"


def refuse_limits(record: Estimator, capabilities: Iterable[str], tags: Mapping[str, Any]) -> None:
    """Refuse limits that an estimator cannot have."""
    if len(record.arrays) < 3:
        for tag in _OF_TOKENS:
            if tags[tag] != DEFAULTS[tag]:
                raise ValueError(
                    f"`tags[{tag!r}]` must be left out for {record.name}, got {tags[tag]!r}."
                )
    if record.has("rows") and tags["head_sizes"] is not None:
        raise ValueError(f"`tags['head_sizes']` must be left out for {record.name}.")
    drawn_outside = {*DRAWN_KEYWORDS, *map(only_of, DRAWN_KEYWORDS)} & set(capabilities)
    if tags["fixed_frequencies"] and (drawn_outside or not record.has("random")):
        raise ValueError(
            "`tags['fixed_frequencies']` must be left out where no frequencies are drawn, or "
            f"where they are given, got {tags['fixed_frequencies']!r}."
        )
    # Reference gradients are those of the recurrence with its usual conventions.
    if "vjp" in capabilities and any(tags[x] != DEFAULTS[x] for x in OF_RECURRENCES):
        raise ValueError(
            "`capabilities` must leave out 'vjp' with one of the tags "
            f"{', '.join(OF_RECURRENCES)}: there are no reference gradients."
        )
    if tags["causal_only"] and not record.takes("causal"):
        raise ValueError(f"`tags['causal_only']` must be left out for {record.name}.")


def write_tag(value: Any) -> str:
    """Return the value of a tag as on the command line."""
    if isinstance(value, tuple) and len(value) > 4:
        # Many head sizes are a range.
        return f"{value[0]},{value[1]},...,{value[-1]}"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def parse_tag(name: str, value: Any) -> Any:
    """Return the value of a tag, from its text where it is one."""
    if name in _TRUE_OR_FALSE:
        return _parse_truth(name, value)
    if name == "head_sizes":
        return _parse_sizes(value)
    if name in CHOICES:
        if not (name == "layout" and value in (None, "None")):
            checks.choice(f"tags[{name!r}]", value, CHOICES[name])
        return None if value == "None" else value
    if name == "device":
        return value
    if value is None or (name == "scale" and value == "None"):
        # None is a value of these two: 1/sqrt(d), and no limit.
        optional = name in ("scale", "max_logit")
        return None if optional else checks.real(f"tags[{name!r}]", value)
    if name == "ddof":
        # True is 1 to Python.
        if isinstance(value, bool) or value not in (0, 1, "0", "1"):
            raise ValueError(f"`tags['ddof']` must be 0 or 1, got {_brief(value)}.")
        return int(value)
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(f"`tags[{name!r}]` must be a finite number, got {_brief(value)}.")
        value = number
    number = checks.real(f"tags[{name!r}]", value, positive=name in _POSITIVE)
    if name == "multiple_of":
        if number < 1 or number != int(number):
            raise ValueError(f"`tags['multiple_of']` must be a positive integer, got {value!r}.")
        return int(number)
    if number < 0:
        raise ValueError(f"`tags[{name!r}]` must be at least 0, got {value!r}.")
    return float(number)


def _parse_truth(name: str, value: Any) -> bool:
    words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if not isinstance(value, bool) and str(value).lower() not in words:
        raise ValueError(f"`tags[{name!r}]` must be true or false, got {_brief(value)}.")
    return words[str(value).lower()]


def _parse_sizes(value: Any) -> tuple[int, ...] | None:
    """Parse head sizes: a number, several, or text separated by commas."""
    if value is None:
        return None
    words = value.split(",") if isinstance(value, str) else value
    try:
        sizes = tuple(int(size) for size in (words if np.iterable(words) else (words,)))
    except (TypeError, ValueError):
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise ValueError(f"`tags['head_sizes']` must be positive integers, got {_brief(value)}.")
    return tuple(sorted(set(sizes)))


def _brief(value: Any) -> str:
    """Shorten a value that was received: digits may be thousands."""
    if isinstance(value, int) and abs(value) >= 10**40:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
