"""Floating-point formats: round numbers to them, and tell how far that moves a number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...arrays import checks
from ...arrays.library import Doubles, array_namespace, to_host
from ...arrays.words import name_element

_NUMPY_DTYPES = ("float16", "float32", "float64")
_EXPONENT = np.int64(0x7FF << 52)  # bits of a float64: without the others it is a power of two


def leading_power(x: Any) -> Doubles:
    """Return the power of two at or below |x|; 0 for 0."""
    bits = np.asarray(x, np.float64).view(np.int64) & _EXPONENT
    return np.asarray(bits.view(np.float64))


class Format(NamedTuple):
    """Binary floating-point numbers with subnormal ones, as far as float64 holds them.

    Attributes
    ----------
    digits : int
        Binary digits of a normal number, the leading one with them.
    least : int
        Exponent of the smallest normal number, 2^least.
    largest : float
        Largest finite number.
    truncated : bool
        Whether further digits are dropped; otherwise numbers are rounded to nearest.
    """

    digits: int
    least: int
    largest: float
    truncated: bool = False

    @property
    def unit(self) -> float:
        """Largest relative error of a rounding of a normal number: 2^-digits to nearest."""
        return 2.0 ** (self.truncated - self.digits)

    @property
    def has_8_bits(self) -> bool:
        """Whether these are floating-point numbers of 8 bits."""
        return self.digits <= 4

    @property
    def to_integers(self) -> Any:
        """What rounds multiples of the spacing."""
        return np.trunc if self.truncated else np.rint

    @property
    def tiny(self) -> float:
        """Smallest normal number: what is below may be flushed to 0."""
        return 2.0**self.least

    def spacing(self, x: Any) -> Doubles:
        """Return the distance of neighbouring numbers in the binade of x."""
        normal = leading_power(x)
        np.maximum(normal, 2.0**self.least, out=normal)
        normal *= 2.0 ** (1 - self.digits)
        return normal if normal.ndim else normal[()]

    def round(self, x: Any) -> Doubles:
        """Round to nearest, ties to even, or towards zero; what is too large becomes infinite."""
        if self.digits == 53:
            return np.asarray(x, np.float64)
        x = np.asarray(x, np.float64)
        most = self.largest / 2
        if np.max(x, initial=0.0) < most and np.min(x, initial=0.0) > -most:
            # The usual case, and the fast one: nothing rounds to infinity, and nothing is NaN.
            step = self.spacing(x)
            near = np.asarray(x / step)
            self.to_integers(near, out=near)
            near *= step
            return near
        step = self.spacing(np.where(np.isfinite(x), x, 0.0))
        nearest: Doubles = self.to_integers(x / step) * step
        return np.where(np.abs(nearest) > self.largest, np.copysign(np.inf, nearest), nearest)

    def holds(self, x: Any) -> npt.NDArray[np.bool_]:
        """Tell whether these are numbers of the format; infinities and NaN count as such."""
        x = np.asarray(x, np.float64)
        held_or_infinite: npt.NDArray[np.bool_] = (self.round(x) == x) | ~np.isfinite(x)
        return held_or_infinite


FORMATS: Mapping[str, Format] = {
    "float64": Format(53, -1022, float(np.finfo(np.float64).max)),
    "float32": Format(24, -126, float(np.finfo(np.float32).max)),
    # Digits of float16 and the range of float32.
    "tfloat32": Format(11, -126, (2 - 2.0**-10) * 2.0**127),
    "tfloat32-truncated": Format(11, -126, (2 - 2.0**-10) * 2.0**127, True),
    "float16": Format(11, -14, 65504.0),
    "bfloat16": Format(8, -126, (2 - 2.0**-7) * 2.0**127),
    "float8_e4m3fn": Format(4, -6, 448.0),  # it has no infinities, and in place of 480 NaN
    "float8_e5m2": Format(3, -14, 57344.0),
}

# Beside these, what arrays may be stored in: integers of 8 bits, as numbers a distance of 1 apart:
# below 2^7 all are subnormal.
STORED: Mapping[str, Format] = {**FORMATS, "int8": Format(8, 7, 128.0)}


def widen(name: str, x: Any) -> Doubles:
    """Convert numbers of any floating-point type to float64 on the host."""
    dtype = dtype_of(x, name)
    if not isinstance(x, np.ndarray):
        xp = array_namespace(x)
        # NumPy has no bfloat16 and no types of 8 bits; float32 holds all of their numbers.
        x = to_host(x if dtype in _NUMPY_DTYPES else xp.astype(x, xp.float32), None)
    return np.asarray(x, np.float64)


def dtype_of(x: Any, name: str = "q") -> str:
    """Return the name of a floating-point dtype."""
    checks.is_array(name, x)
    dtype = str(x.dtype).rpartition(".")[2]  # torch and others say where it is from
    if dtype not in FORMATS:
        known = ", ".join(name for name in FORMATS if not name.startswith("tfloat32"))
        raise TypeError(f"`{name}` must have one of the dtypes {known}, got {x.dtype}.")
    return dtype


def check_all_hold(name: str, x: Doubles, index: tuple[int, ...], dtype: str) -> None:
    """Check that the numbers of a head are of the storage type."""
    holds = STORED[dtype].holds(x)
    if not np.all(holds):
        at = np.argwhere(~holds)[0]
        raise ValueError(
            f"`{name}` must hold numbers of {dtype} only, got {float(x[tuple(at)])} at "
            f"{name_element((*index, *map(int, at)))}: round it first."
        )
