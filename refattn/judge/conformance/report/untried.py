"""Name the checks that were not run, and what has to be declared for each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import combinations
from typing import Any

from ..candidate.adapter import Adapter
from ..candidate.tags import CAPABILITIES, DEFAULTS, write_tag
from ..checks.trials import CHECKS
from .report import LEFT_OUT


def not_tried(adapter: Adapter, chosen: Iterable[str]) -> dict[str, str]:
    """Return checks of such estimators that were not made, and why."""
    left = [item for item in CHECKS.values() if item.name not in set(chosen)]
    more, reasons = list(_with_more(adapter)), {}
    for item in (item for item in left if adapter.has(*item.traits)):
        if item.applies(adapter):
            reasons[item.name] = LEFT_OUT
        elif adapter.has("random") and not adapter.draws and item.of_draws:
            reasons[item.name] = "needs frequencies of its own for each seed"
        # The first that is enough: one more word is tried before two.
        elif needed := next((words for words, other in more if item.applies(other)), ""):
            reasons[item.name] = f"needs {needed}"
    return reasons


# Tags without which, or with another value of which, more checks may apply.
_LIMITING = (
    *("dtype", "epsilon", "features", "coupling", "layout", "weighting"),
    *("self_attention", "causal_only", "same_value_size", "multiple_of", "empty_rows"),
)


def _with_more(adapter: Adapter) -> Iterator[tuple[str, Adapter]]:
    """Yield what else may be declared, one or two at a time, as on the command line."""
    tags: dict[str, Any] = dict(adapter.tags or {})
    more: list[tuple[str, set[str], dict[str, Any]]] = [
        (f"--capability {name}", {name}, {})
        for name in sorted({*adapter.record.options} & {*CAPABILITIES} - {*adapter.capabilities})
    ]
    for name in _LIMITING:
        value = DEFAULTS[name]
        if tags[name] != value:
            more.append((f"--tag {name}={write_tag(value)}", set(), {name: value}))
    for count in (1, 2):
        for some in combinations(more, count):
            capabilities = set(adapter.capabilities).union(*(can for _, can, _ in some))
            changed = tags | {name: value for _, _, tag in some for name, value in tag.items()}
            words = " and ".join(words for words, _, _ in some)
            # Some words exclude each other.
            with suppress(TypeError, ValueError):
                yield words, Adapter(adapter.fn, adapter.estimator, capabilities, changed)
