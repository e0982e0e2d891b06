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
        certified,
        compare,
        conformance,
        diagnostics,
        distributed,
        estimators,
        features,
        gradients,
        kernels,
        moments,
        naive,
        packed,
        profile,
        registry,
        rounding,
        sampling,
        stats,
        streaming,
        testing,
        theory,
        typing,
        verification,
    )
    from .attention import Attended, attend, merge, softmax_attention
    from .estimators.few_keys import coreset_attention, sampled_key_attention
    from .estimators.lara import linear_randomized_attention
    from .estimators.linear import linear_attention
    from .estimators.near_and_far import (
        eva_attention,
        local_random_feature_attention,
        second_order_attention,
    )
    from .estimators.ra import mean_of_ratios_attention, randomized_attention
    from .estimators.rfa import importance_sampled_attention, random_feature_attention
    from .files.sample import load_sample
    from .gradients.rules import Gradients, vjp
    from .verification.verdict import Verdict, verify

_HOME = {
    "Attended": "attention",
    "Gradients": "gradients",
    "attend": "attention",
    "coreset_attention": "estimators",
    "eva_attention": "estimators",
    "local_random_feature_attention": "estimators",
    "sampled_key_attention": "estimators",
    "second_order_attention": "estimators",
    "importance_sampled_attention": "estimators",
    "linear_attention": "estimators",
    "linear_randomized_attention": "estimators",
    "mean_of_ratios_attention": "estimators",
    "load_sample": "files.sample",
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
    "certified",
    "compare",
    "conformance",
    "coreset_attention",
    "diagnostics",
    "distributed",
    "estimators",
    "eva_attention",
    "features",
    "gradients",
    "importance_sampled_attention",
    "kernels",
    "linear_attention",
    "linear_randomized_attention",
    "load_sample",
    "local_random_feature_attention",
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
    "sampled_key_attention",
    "sampling",
    "second_order_attention",
    "softmax_attention",
    "stats",
    "streaming",
    "testing",
    "theory",
    "typing",
    "verification",
    "verify",
    "vjp",
]


if not TYPE_CHECKING:  # type checkers know the names above, and no others

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name in _HOME:
            return getattr(import_module(f".{_HOME[name]}", __name__), name)
        return import_module(f".{name}", __name__)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
