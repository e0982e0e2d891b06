"""Checks of the last bit, where it is declared: equal calls, and queries in any company."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..candidate.adapter import Adapter
from ..candidate.limits import Keywords
from .trials import CheckRun, add_check, attends, comparable, evaluated

_REPEATS = 8
_BIT_SIZES = ((5, 7, 4), (64, 64, 8), (129, 300, 64), (512, 512, 64))


def _bit_problems(t: CheckRun) -> Iterator[tuple[tuple[int, int, int], dict[str, Any], int | None]]:
    """Yield sizes, plain, with keys that are masked, causal, and with fewer key heads."""
    causal = t.adapter.masks_future
    for size in _BIT_SIZES:
        n, m, d = t.fit(*size)
        yield (n, m, d), {}, None
        if t.adapter.can("mask"):
            yield (n, m, d), {"mask": np.arange(m) % 3 != 1}, None
        if causal:
            yield (n, m, d), {"causal": True}, None
        if t.adapter.grouped:
            yield (n, m, d), {}, 1


def _options_of(t: CheckRun, frequencies: Keywords) -> dict[str, Any]:
    """Return the options of calls that are repeated."""
    return t.adapter.settled | (frequencies if evaluated(t.adapter) else t.options(5))


@add_check(
    claim="the same call has the same bits",
    needs=lambda adapter: attends(adapter) and adapter.can("deterministic"),
)
def same_bits(t: CheckRun) -> None:
    """Many times, of gradients too, and with other calls between."""
    for size, more, groups in _bit_problems(t):
        arrays, frequencies = t.problem(*size, 5, lead=t.adapter.lead(1, 2), groups=groups)
        options = _options_of(t, frequencies) | more
        if t.adapter.can("vjp"):
            options["d_out"] = t.normal(*arrays[0].shape[:-1], arrays[2].shape[-1])
        first = t.call(*arrays, **options)
        for _ in range(_REPEATS):
            got = t.call(*arrays, **options)
            t.equal(got, first, (0.0,) * 4 if isinstance(got, tuple) else 0.0)
        t.call(*(2 * x for x in arrays), **options)
        got = t.call(*arrays, **options)
        t.equal(got, first, (0.0,) * 4 if isinstance(got, tuple) else 0.0)


def _is_apart(adapter: Adapter) -> bool:
    alike = not (adapter.has("per-query") or adapter.has("proposals") or adapter["causal_only"])
    return comparable(adapter) and adapter.has("queries-apart") and alike


@add_check(
    "queries-apart",
    claim="a query has the same bits in any company",
    needs=lambda adapter: _is_apart(adapter) and adapter.can("batch_invariant"),
)
def same_bits_in_any_batch(t: CheckRun) -> None:
    """Alone, with some others, in another order; a head alone, and in another batch."""
    for (n, m, d), more, groups in _bit_problems(t):
        if more.get("causal"):  # whose queries have places
            continue
        lead = t.adapter.lead(3, 2)
        (q, k, v), frequencies = t.problem(n, m, d, 5, lead=lead, groups=groups)
        options = _options_of(t, frequencies) | more
        whole = t.call(q, k, v, **options)
        order = t.rng.permutation(n)
        t.equal(t.call(q[..., order, :], k, v, **options), whole[..., order, :], 0.0)
        if not t.adapter["self_attention"]:
            for rows in (slice(0, 1), slice(n // 2, n // 2 + 3), slice(n - 1, n)):
                got = t.call(q[..., rows, :], k, v, **options)
                t.equal(got, whole[..., rows, :], 0.0)
        for part in (slice(0, 1), slice(1, len(q))):
            if lead:
                got = t.call(*(x[part] for x in (q, k, v)), **options)
                t.equal(got, whole[part], 0.0)
