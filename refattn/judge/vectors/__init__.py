"""Golden vectors: inputs with exact bits and outputs to thirty digits, for any language.

`write` puts one file an estimator into a directory, and four more of exact attention: its options,
edges of tiles, inputs on which float64 loses digits, and the conventions in which libraries differ.
`load` reads them back, and `lint` says where they are not what a new evaluation gives. A case is
named after the mistakes that it catches (its flags).

Inputs come from a raw PCG64 stream, seeded with the CRC-32 of their name and rounded to few bits,
or are small integers. Outputs come from `judge.conformance.truth.digits` with 50 and with 80
digits, which must agree; where a case has a cotangent `d_out`, so do gradients, of the same
formulas by the rules of calculus. Nothing depends on the time or the machine: two runs give
identical bytes. A manifest has the checksum of every file and the names of its cases. A name means
the same case for good. The layout of the files follows that of Project Wycheproof.
"""

from __future__ import annotations

from typing import Any

from . import recipes
from .cases import FLAGS, FORMATS, Case, Convention
from .checking import lint
from .exporting import export
from .reading import load
from .writing import write

__all__ = [
    "ESTIMATORS",
    "FILES",
    "FLAGS",
    "FORMATS",
    "Case",
    "Convention",
    "export",
    "lint",
    "load",
    "write",
]


def __getattr__(name: str) -> Any:
    """Look for the names that follow from the records, which others may add."""
    if name in ("ESTIMATORS", "FILES"):
        return recipes.estimators() if name == "ESTIMATORS" else recipes.files()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__dir__ = __all__.copy
