"""Result types of certified functions: pairs of floats with error bounds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..arrays.library import Array, as_written
from ..arrays.shown import held
from ..numbers.doubled import Pair


@held()
class Rounded(NamedTuple):
    """A result rounded to float64.

    Attributes
    ----------
    out : array, shape (..., n, d_v)
        The nearest float64 to each number that was computed.
    proven : array of bool, shape (..., n, d_v)
        Where it is also the nearest to the exact number: all numbers within the error bound round
        to the same number (Ziv's test).
    """

    out: Array
    proven: Array


@held()
@dataclass(frozen=True)
class Certified:
    """Attention in pairs of float64, with a proven error bound. It unpacks to (out, lse, error).

    Attributes
    ----------
    out : Pair
        The output, arrays of shape (..., n, d_v), float64.
    lse : Pair
        Log normalisers, arrays of shape (..., n).
    error : array, shape (..., n, d_v)
        A bound on the distance of out.hi + out.lo from the exact number; infinity where nothing is
        proven.
    lse_error : array, shape (..., n)
        The same for `lse`.
    """

    out: Pair
    lse: Pair
    error: Array
    lse_error: Array

    def __iter__(self) -> Iterator[Any]:
        yield from (self.out, self.lse, self.error)

    @as_written
    def rounded(self) -> Rounded:
        """Round to float64, and mark where that is proven to be the nearest to the exact number."""
        (hi, lo), error = self.out, self.error * (1 + 2.0**-50)
        up, down = ((lo + x) + abs(lo) * s for x, s in ((error, 2.0**-50), (-error, -(2.0**-50))))
        return Rounded(hi, (hi + up == hi) & (hi + down == hi))


@held()
class Bound(NamedTuple):
    """Numbers in pairs of float64, and a bound on their errors."""

    value: Pair
    error: Array


@held()
class Gradients(NamedTuple):
    """Gradients in pairs of float64, with proven bounds on their errors.

    Attributes
    ----------
    q, k, v : Bound
        `value`, a pair of arrays of the shape of the argument, and `error`: the exact number is no
        further than this from value.hi + value.lo, infinity where nothing was proven.
    """

    q: Bound
    k: Bound
    v: Bound


for _result in (Rounded, Certified, Bound, Gradients):
    _result.__module__ = "refattn.certified"  # where users find them, and so do pickles
