"""Reference implementation of random-feature attention for every array library.

Submodules load when first used: ``refattn.sampling`` is there without being imported at start.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._version import __version__ as __version__

if TYPE_CHECKING:
    from . import (
        adapt,
        attention,
        compare,
        conformance,
        diagnostics,
        distributed,
        estimators,
        features,
        gradients,
        kernels,
        lara,
        linear,
        moments,
        naive,
        packed,
        profile,
        registry,
        rounding,
        sampling,
        stats,
        streaming,
        theory,
        tolerance,
        verification,
    )
    from ._sample import load_sample
    from .attention import Attended, attend, merge, softmax_attention
    from .estimators import (
        importance_sampled_attention,
        mean_of_ratios_attention,
        random_feature_attention,
        randomized_attention,
    )
    from .gradients import Gradients, vjp
    from .lara import linear_randomized_attention
    from .linear import linear_attention
    from .verification import Verdict, verify

_HOME = {
    "Attended": "attention",
    "Gradients": "gradients",
    "attend": "attention",
    "importance_sampled_attention": "estimators",
    "linear_attention": "linear",
    "linear_randomized_attention": "lara",
    "mean_of_ratios_attention": "estimators",
    "load_sample": "_sample",
    "merge": "attention",
    "random_feature_attention": "estimators",
    "randomized_attention": "estimators",
    "softmax_attention": "attention",
    "Verdict": "verification",
    "verify": "verification",
    "vjp": "gradients",
}

__all__ = [
    "Attended",
    "Gradients",
    "Verdict",
    "adapt",
    "attend",
    "attention",
    "compare",
    "conformance",
    "diagnostics",
    "distributed",
    "estimators",
    "features",
    "gradients",
    "importance_sampled_attention",
    "kernels",
    "lara",
    "linear",
    "linear_attention",
    "linear_randomized_attention",
    "load_sample",
    "mean_of_ratios_attention",
    "merge",
    "moments",
    "naive",
    "packed",
    "profile",
    "random_feature_attention",
    "randomized_attention",
    "registry",
    "rounding",
    "sampling",
    "softmax_attention",
    "stats",
    "streaming",
    "theory",
    "tolerance",
    "verification",
    "verify",
    "vjp",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _HOME:
        return getattr(import_module(f".{_HOME[name]}", __name__), name)
    return import_module(f".{name}", __name__)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
