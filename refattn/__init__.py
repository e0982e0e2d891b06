"""Reference implementation of random-feature attention for every array library.

Submodules load when first used: ``refattn.sampling`` is there without being imported at start.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import (
        adapt,
        attention,
        conformance,
        diagnostics,
        distributed,
        estimators,
        features,
        kernels,
        moments,
        sampling,
        stats,
        streaming,
        theory,
    )
    from ._sample import load_sample
    from .attention import Attended, attend, merge, softmax_attention
    from .estimators import (
        importance_sampled_attention,
        linear_randomized_attention,
        mean_of_ratios_attention,
        random_feature_attention,
        randomized_attention,
    )
    from .features import linear_attention

__version__ = "0.1.0"

_HOME = {
    "Attended": "attention",
    "attend": "attention",
    "importance_sampled_attention": "estimators",
    "linear_attention": "features",
    "linear_randomized_attention": "estimators",
    "mean_of_ratios_attention": "estimators",
    "load_sample": "_sample",
    "merge": "attention",
    "random_feature_attention": "estimators",
    "randomized_attention": "estimators",
    "softmax_attention": "attention",
}

__all__ = [
    "Attended",
    "adapt",
    "attend",
    "attention",
    "conformance",
    "diagnostics",
    "distributed",
    "estimators",
    "features",
    "importance_sampled_attention",
    "kernels",
    "linear_attention",
    "linear_randomized_attention",
    "load_sample",
    "mean_of_ratios_attention",
    "merge",
    "moments",
    "random_feature_attention",
    "randomized_attention",
    "sampling",
    "softmax_attention",
    "stats",
    "streaming",
    "theory",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _HOME:
        return getattr(import_module(f".{_HOME[name]}", __name__), name)
    return import_module(f".{name}", __name__)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
