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
        few_keys,
        gradients,
        kernels,
        key_sampling,
        lara,
        linear,
        moments,
        naive,
        near_and_far,
        packed,
        profile,
        registry,
        rounding,
        sampling,
        stats,
        streaming,
        testing,
        theory,
        tolerance,
        typing,
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
    from .few_keys import coreset_attention, sampled_key_attention
    from .gradients import Gradients, vjp
    from .lara import linear_randomized_attention
    from .linear import linear_attention
    from .near_and_far import (
        eva_attention,
        local_random_feature_attention,
        second_order_attention,
    )
    from .verification import Verdict, verify

_HOME = {
    "Attended": "attention",
    "Gradients": "gradients",
    "attend": "attention",
    "coreset_attention": "few_keys",
    "eva_attention": "near_and_far",
    "local_random_feature_attention": "near_and_far",
    "sampled_key_attention": "few_keys",
    "second_order_attention": "near_and_far",
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
    "certified",
    "compare",
    "conformance",
    "coreset_attention",
    "diagnostics",
    "distributed",
    "estimators",
    "eva_attention",
    "features",
    "few_keys",
    "gradients",
    "importance_sampled_attention",
    "kernels",
    "key_sampling",
    "lara",
    "linear",
    "linear_attention",
    "linear_randomized_attention",
    "load_sample",
    "local_random_feature_attention",
    "mean_of_ratios_attention",
    "merge",
    "moments",
    "naive",
    "near_and_far",
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
    "tolerance",
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
