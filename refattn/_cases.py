"""Names of the cases of `refattn.testing`, which pytest needs before there are arrays."""

from __future__ import annotations

from typing import Literal, get_args

__all__ = ["CASES", "DTYPES", "Case", "Dtype"]

Case = Literal["sample", "normal", "large", "shifted", "negative", "equal", "outlier"]
CASES: tuple[Case, ...] = get_args(Case)

Dtype = Literal["bfloat16", "float16", "float32", "float64"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
