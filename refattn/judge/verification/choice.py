"""Choose the profiles to try for a storage type, from the tightest to the loosest."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..mistakes.defects.catalogue import Mutant
from ..rounding.formats import FORMATS
from ..rounding.profiles import (
    CHUNKS,
    LINEAR,
    NARROW_SUMS,
    OF_BACKWARD,
    PROFILES,
    Profile,
    profile_of,
)
from .findings import Part

ProfileChoice = str | Profile | Sequence[str] | None

# The tightest first: of profiles between which numbers do not decide, the first is tried first.
_NARROW_PROFILES = ("math", "flash", "upcast", "flash-fast", "eager", "eager-narrow")
_ALL_TF32 = tuple(x for x in PROFILES if x.startswith("tf32"))
_UNROUNDED = ("math", "recomputed", "serial")  # all but the result in float32
_WIDE_PROFILES = (*_UNROUNDED, "flash", *_ALL_TF32)
_DOUBLE_PROFILES = ("math64", "recomputed64", "serial64")

_SUFFIX = re.compile(r"(-cast)?(-by-head)?(@.*)?$")

_OF_MAXIMA = ("math-maximum", "flash-maximum")
BACKWARD_PROFILES: Mapping[bool, Sequence[str]] = {  # whether the type is narrow
    True: (
        *_NARROW_PROFILES[:4],
        *OF_BACKWARD,
        *_OF_MAXIMA,
        "eager-upcast",
        *_NARROW_PROFILES[4:],
    ),
    False: (*_WIDE_PROFILES, _OF_MAXIMA[0]),
}


# What may be the profiles of one kernel, forward and backward: those of a row. They have scores in
# common: kept in float32 or wider, rounded step by step, of TF32, of 8 bits or of float16. Weights
# may be rounded in one pass and kept in the other, before they are divided by their sum or after,
# as in a fused kernel beside a backward pass step by step.
FAMILIES = (
    (
        "math",
        "serial",
        "flash",
        "upcast",
        "flash-fast",
        "flash-lazy",
        "recomputed",
        *OF_BACKWARD,
        *_OF_MAXIMA,
        *_DOUBLE_PROFILES,
    ),
    ("eager", "eager-narrow", "eager-upcast"),
    _ALL_TF32,
    ("fp8", "fp8-eager"),
    ("fp8-weights", "fp8-weights-eager"),
    ("half-sums", "half-sums-eager"),
)


def may_be_one(forward: str | None, backward: str | None) -> bool:
    """Tell whether a kernel may have one profile forward and another backward; None is any.

    Units, types that caches are cast to, and sums over heads may be those of one pass.
    """
    # A profile that is in no family is one of its own.
    names = [_SUFFIX.sub("", x) for x in (forward, backward) if x is not None]
    families = [next((y for y in FAMILIES if x in y), x) for x in names]
    return len({*families}) < 2


def add_by_head(profile: ProfileChoice) -> ProfileChoice:
    """Let profiles round gradients by query head, too, where these share keys."""
    if profile is None or isinstance(profile, Profile):
        return profile
    names = [profile] if isinstance(profile, str) else profile
    return [x for name in names for x in (name, f"{name}-by-head") if x == name or x in PROFILES]


def usual_profiles(dtype: str, wide: bool = False) -> Sequence[str]:
    """Name the profiles to try for a storage type, from the tightest.

    An output in a wide type shows how a kernel in float32 sums.
    """
    if dtype == "float64":
        return _DOUBLE_PROFILES
    names = _NARROW_PROFILES if is_narrow(dtype) else _WIDE_PROFILES
    return _put_unrounded_first(names) if wide else names


def backward_profiles(dtype: str, wide: bool = False) -> Sequence[str]:
    """Name the profiles to try for gradients, from the tightest."""
    names = BACKWARD_PROFILES[is_narrow(dtype)]
    return _put_unrounded_first(names) if wide else names


def _put_unrounded_first(names: Sequence[str]) -> Sequence[str]:
    """Put the profiles first that round nothing but the result."""
    return [*_UNROUNDED, *(x for x in names if x not in _UNROUNDED)]


def chunked_profiles(dtype: str, kept: str) -> Sequence[str]:
    """Name the profiles to try for a recurrence that keeps states of a type, the usual one first.

    States that are rounded to a narrow type between chunks are tried only if that is their type.
    """
    if is_narrow(dtype):
        names = ["chunk-64", "chunk-64-eager", *(f"chunk-{x}" for x in CHUNKS[1:])]
        rounded = [f"{x}-states" for x in names if kept == dtype]
        return [*names, "chunk-64-math", *rounded]
    return [f"chunk-{x}-math{'64' * (dtype == 'float64')}" for x in CHUNKS]


def linear_profiles(dtype: str, wide: bool) -> Sequence[str]:
    """Name the profiles to try for attention that is linear in a feature map."""
    return [*usual_profiles(dtype, wide), *(LINEAR if is_narrow(dtype) else ())]


def profiles_of_kind(kind: str, dtype: str, kept: str, wide: bool) -> ProfileChoice:
    """Name the profiles to try for what is no softmax attention; None for that."""
    if kind == "recurrent":
        return chunked_profiles(dtype, kept)
    if kind == "map":
        return linear_profiles(dtype, wide)
    if kind == "text":  # whose law is derived: without what units of hardware do
        narrow = ("flash", "eager") if is_narrow(dtype) else ()
        return ["math", "recomputed", *narrow]
    return None


class Request(NamedTuple):
    """The storage type, the profiles that are tried, the level, and whether all rows are."""

    dtype: str
    profile: ProfileChoice = None
    alpha: float = 1e-6
    everything: bool = False
    hardware: str | None = None
    explain: bool = True  # whether to search for causes
    strict: bool = False  # whether to demand sums in float32
    mistakes: Sequence[Mutant] = ()  # rows of the user's, that the search tries

    def of_gradients(self, parts: Mapping[str, Part]) -> Request:
        """Name the profiles to try for gradients."""
        wide = any(not is_narrow(x.numbers.out_dtype) for x in parts.values())
        names = backward_profiles(self.dtype, wide) if self.profile is None else self.profile
        shared = any(x.problem.shares_keys for x in parts.values())
        return self._replace(profile=add_by_head(names) if shared else names)

    def of_merge(self, part: Part) -> Request:
        """Name the profiles to try if this is a merge: its scores are given, and not rounded."""
        if "part_sizes" not in part.problem.first or isinstance(self.profile, str | Profile):
            return self
        wide = not is_narrow(part.numbers.out_dtype)
        names = self.profile or usual_profiles(self.dtype, wide)
        return self._replace(profile=[x for x in names if profile_of(x).scores is None])


def choose_for(part: Part, asked: Request) -> dict[str, Profile]:
    """Choose the profiles to try for a part, and those that only speak against others."""
    (problem, numbers), dtype, profile = part, asked.dtype, asked.profile
    if profile is None:
        wide = not is_narrow(numbers.out_dtype)
        profile = profiles_of_kind(problem.kind, dtype, problem.kept, wide)
    chosen = choose_profiles(dtype, numbers.out_dtype, profile)
    # At a scale that is a power of 2 some profiles round the same: one of them is enough.
    chosen = {x: y for x, y in chosen.items() if len(chosen) < 2 or y.differs(problem.scale)}
    if asked.strict and problem.gradient is not None and is_narrow(dtype):
        chosen |= choose_profiles(dtype, numbers.out_dtype, [*NARROW_SUMS])
    if not problem.shares_keys:  # the same profile by two names
        chosen = {x: y._replace(by_head=False) for x, y in chosen.items()}
    if problem.gradient is not None and problem.gradient.of == "dq":  # a sum over keys alone
        one = {x: y.parts and (y.parts[1], y.parts[1]) for x, y in chosen.items()}
        chosen = {x: y._replace(parts=one[x]) for x, y in chosen.items()}
    return chosen


def has_wide_sums(profile: Profile, dtype: str) -> bool:
    """Tell whether all sums of a profile are in float32 or wider."""
    to = profile.roundings(dtype)
    sums = [to.accumulate, to.softmax, to.states]
    sums += [to.out] if to.parts or to.by_head else []
    narrow = to.unit is not None and to.unit.narrow
    return not narrow and all(x is None or x.digits >= FORMATS["float32"].digits for x in sums)


def fused_profile(dtype: str) -> str:
    """Name the profile of a usual fused kernel for a storage type."""
    return {"float64": "math64", "float32": "math"}.get(dtype, "flash")


def is_narrow(dtype: str) -> bool:
    return FORMATS[dtype].digits <= FORMATS["float16"].digits


def choose_profiles(dtype: str, out_dtype: str, profile: ProfileChoice) -> dict[str, Profile]:
    """Choose the profiles to try, from the tightest, with the type of the output."""
    if isinstance(profile, str | Profile) or not isinstance(profile, tuple | list | None):
        name = profile if isinstance(profile, str) else "given"
        chosen = {name: profile_of(profile)}
    else:
        names = profile or usual_profiles(dtype, not is_narrow(out_dtype))
        chosen = {x: profile_of(x) for x in names}
    return {
        # An output may be in a wider type than the inputs: then it is rounded to that.
        name: x._replace(out=out_dtype) if x.out == "storage" else x
        for name, x in chosen.items()
    }
