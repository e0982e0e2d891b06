"""Outputs with their log normalisers, and the errors allowed in both."""

from __future__ import annotations

import numpy as np

from ....arrays.library import Floats
from ....attention import attend
from ..candidate.adapter import Adapter
from ..candidate.limits import Arrays, Keywords
from .allowed import CONTRACT, allowed_error, largest_exponent, of_function, terms


def with_normalisers(
    adapter: Adapter, arrays: Arrays, options: Keywords
) -> tuple[tuple[Floats, Floats], tuple[float, float]]:
    """Return output and log normalisers in extended precision, and the errors allowed."""
    options = {name: x for name, x in options.items() if name != "return_lse"}
    want = of_function(adapter, attend, arrays, options)
    unit = CONTRACT[adapter["dtype"]] * adapter.eps
    unit *= 1 + largest_exponent(adapter, arrays, options)
    # Errors of lse are relative to it, and absolute where it is small.
    size = 1 + float(np.max(np.abs(want.lse), where=np.isfinite(want.lse), initial=0.0))
    added = terms(adapter, arrays[1].shape[-2]) * size  # keys may be added one by one
    return (want.out, want.lse), (allowed_error(adapter, arrays, options, want.out), unit + added)
