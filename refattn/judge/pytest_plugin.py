"""Fixtures that pytest has where the package is installed: see `refattn.testing`.

pytest imports this in every project, so nothing here imports NumPy before a fixture is used.
"""

from __future__ import annotations

from typing import Any

import pytest

from ..typing import CASES, Dtype

__all__ = ["qkv", "qkv_dtype", "qkv_shape"]
__dir__ = __all__.copy


@pytest.fixture
def qkv_dtype() -> Dtype:
    """Type of `qkv`: bfloat16 (as float32), float16, float32 (the default) or float64."""
    return "float32"


@pytest.fixture
def qkv_shape() -> tuple[int, ...] | None:
    """Shape (..., n, d) of each of `qkv`; by default that of the case."""
    return None


@pytest.fixture(params=CASES)
def qkv(
    request: pytest.FixtureRequest, qkv_dtype: Dtype, qkv_shape: tuple[int, ...] | None
) -> tuple[Any, Any, Any]:
    """Queries, keys and values on which kernels often fail, as NumPy arrays, case by case."""
    from .testing import draw_qkv

    return draw_qkv(request.param, shape=qkv_shape, dtype=qkv_dtype)
