"""Names of the cases of `refattn.testing`, which pytest needs before there are arrays."""

from __future__ import annotations

__all__ = ["CASES"]

CASES = ("sample", "normal", "large", "shifted", "negative", "equal", "outlier")
