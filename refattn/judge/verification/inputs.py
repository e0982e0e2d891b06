"""Read queries, keys and values of a call, and find the type that each was rounded to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np

from ...arrays import checks
from ...arrays.library import Doubles, to_host
from ...arrays.stored import (
    EIGHT_BITS,
    INTEGER,
    NARROW,
    SCALES,
    expand_scale,
    holds_nearly_all,
    list_types,
    storage_type,
)
from ..rounding.formats import FORMATS, STORED, check_all_hold, dtype_of, widen
from ..rounding.profiles import PROFILES
from .choice import ProfileChoice, backward_profiles, is_narrow, usual_profiles
from .findings import Part

_CAST = "-cast"


class Inputs(NamedTuple):
    """Queries, keys and values as numbers, and the types of these, of the output and of weights."""

    numbers: Mapping[str, Doubles]  # in float64, times their scales
    types: Mapping[str, str]  # by name; that of the output only where it was given
    unchecked: Mapping[str, str]  # of which it is to be checked that arrays hold no other numbers
    storage: str  # what kernels round weights to
    scales: Mapping[str, Doubles]  # that the numbers were multiplied by, with all axes


def read_inputs(
    arrays: Mapping[str, Any],
    results: Mapping[str, Any],
    dtype: Any,
    scales: Mapping[str, Any],
    lay_out: Callable[[dict[str, Any]], Mapping[str, Any]] = dict,
) -> Inputs:
    """Read q, k and v of any types, with types that were said, and multiply them by scales.

    Types that were not said are told by the output and `d_out`, too.

    Keys in pages are laid out before, and so are scales of pages.
    """
    own = {name: _own_type(name, x) for name, x in arrays.items()}
    given = {x: to_host(y) if own[x] == INTEGER else widen(x, y) for x, y in arrays.items()}
    for name, called in SCALES.items():
        if (scale := scales[name]) is not None:
            one = isinstance(scale, float | int)
            given[called] = np.asarray(scale, np.float64) if one else widen(called, scale)
    laid_out = lay_out(given)
    raw = {name: laid_out[name] for name in arrays}
    types = list_types(dtype, FORMATS)
    if isinstance(dtype, str):  # of wider arrays: an 8-bit cache is one
        types |= {name: own[name] for name in "kv" if own[name] in EIGHT_BITS}
    if dtype is None and "out" in results:
        widened = raw | {x: widen(x, y) for x, y in results.items()}
        types |= assume_narrow(own | {x: dtype_of(y, x) for x, y in results.items()}, widened)
    types = own | types
    unchecked = {name: types[name] for name in arrays if types[name] != own[name]}
    numbers, factors = {**raw}, dict[str, Doubles]()
    for name, called in SCALES.items():
        if called not in laid_out:
            continue
        if name in unchecked:
            # Before the scale: products with it are no numbers of the type.
            check_all_hold(name, raw[name], (), unchecked.pop(name))
        factor = expand_scale(name, laid_out[called], raw[name].shape)
        numbers[name] = raw[name] * factor
        factors[name] = np.broadcast_to(factor, raw[name].shape)
    return Inputs(numbers, types, unchecked, storage_type(types), factors)


def _own_type(name: str, x: Any) -> str:
    checks.is_array(name, x)
    is_integer = str(x.dtype).removeprefix("torch.") == INTEGER
    return INTEGER if is_integer else dtype_of(x, name)


def assume_narrow(own: Mapping[str, str], arrays: Mapping[str, Doubles]) -> dict[str, str]:
    """Find wide arrays that hold only numbers of a narrow type, and give them that type.

    It is the type of the output if queries hold its numbers; keys and values get it where they hold
    them, too. If the output is wide, all arrays must hold numbers of a narrow type; a few rows of
    the output may differ.
    """
    # Arrays that were computed in float32 have digits that a narrow type lacks, all but surely.
    wide = not is_narrow(own["out"])
    for name in NARROW if wide else (own["out"],):
        to = STORED[name]
        held = {
            x: name
            for x, y in arrays.items()
            if STORED[own[x]].digits > to.digits
            and (np.all(to.holds(y)) or (x == "out" and holds_nearly_all(to.holds(y))))
        }
        enough = len(held) == len(arrays) and all(x.size for x in arrays.values())
        if "q" in held and (enough or not wide):
            return {x: name for x in held if x in "qkv"}
    return {}


def name_profiles(
    profile: ProfileChoice,
    kind: str,
    types: Mapping[str, str],
    storage: str,
    scaled: bool,
    parts: Mapping[str, Part],
) -> ProfileChoice:
    """Return the profile that was asked for, or name those to try; None are the usual ones.

    If keys or values have more digits than weights are rounded to, kernels multiply them as they
    are, or round them to the storage type first. A wide result is not rounded to the storage type.
    """
    if profile is not None or kind in ("recurrent", "text"):
        return profile
    digits = STORED[storage].digits
    wider = scaled or any(STORED[types[name]].digits > digits for name in "kv")
    if not wider or not is_narrow(storage):
        return None
    wide = any(not is_narrow(x.numbers.out_dtype) for x in parts.values())
    names = (usual_profiles if [*parts] == ["out"] else backward_profiles)(storage, wide)
    return [x for name in names for x in (name, name + _CAST) if x in PROFILES]


def narrowest(x: Doubles, dtype: str, stored: str) -> str:
    """Return the storage type if it holds the numbers, else the type they are stored in."""
    if widest(stored, dtype) == dtype:
        return stored
    return dtype if x.size and np.all(FORMATS[dtype].holds(x)) else stored


def type_of_states(states: Mapping[Any, Doubles], own: Mapping[str, str], storage: str) -> str:
    """Return the type that a recurrence keeps its state in, by the first of some states.

    That is the type of its array if the array of queries has a narrow type, or if the storage type
    does not hold all states. Else it may be narrower than arrays that hold everything.
    """
    if not states:
        return ""
    told = is_narrow(own["q"]) or not all(
        np.all(FORMATS[storage].holds(x)) for x in states.values()
    )
    name = next(iter(states))
    return own[name] if told else narrowest(states[name], storage, own[name])


def widest(one: str, other: str) -> str:
    """Return which of two types has more digits."""
    return max(other, one, key=lambda x: FORMATS[x].digits)


def unlimited(window: Any) -> Any:
    """Take -1, which flash-attention writes for a side without limit, for None."""
    if not isinstance(window, tuple | list):
        return window
    return tuple(None if isinstance(side, Integral) and side == -1 else side for side in window)
