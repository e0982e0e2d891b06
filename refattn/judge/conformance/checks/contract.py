"""Checks of the contract: what a call takes and returns, seeds, memory, and equal calls.

Where it is declared equal to the last bit: the same call, and a query in any company.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ....registry import ESTIMATORS
from ..candidate.failures import Failure, Unrepeatable
from .cases import layouts
from .trials import CheckRun, add_check, again, attends, comparable_ways, ways_to_call


@add_check
def contract(t: CheckRun) -> None:
    """Test library, dtype and shape of the result, that it repeats, and that no input changes."""
    for sizes in ((), (2,), (2, 3)):
        n, m, _ = t.fit(5, 5, 4)  # with a mask and without it the same keys, for what is drawn
        arrays, frequencies = t.problem(n, m, 4, 4, lead=t.adapter.lead(*sizes))
        if t.adapter.has("pairs"):
            arrays = tuple(x[0] for x in arrays)
        for options in ways_to_call(t, frequencies):
            first = t.call(*arrays, strict=True, **options)
            second = t.call(*arrays, **options)
            allowed = again(t, arrays, options)
            try:
                t.equal(second, first, allowed)
            except Failure:
                if "seed" not in options:
                    raise Unrepeatable("equal results of equal calls", _differing(t)) from None
                raise
            if t.adapter.can("mask"):
                seen = np.ones((*arrays[0].shape[:-1], m), dtype=bool)
                t.equal(t.call(*arrays, strict=True, **options, mask=seen), first, allowed)
                # A mask that hides something is taken too; what comes of it is for other checks.
                seen[..., ::2] = False
                t.call(*arrays, strict=True, **options, mask=seen)
            if t.adapter.can("causal") and (not t.adapter.has("proposals") or "seed" in options):
                t.call(*arrays, strict=True, **options, causal=True)
    if attends(t.adapter) and t.adapter.draws:  # of few keys, all near, nothing may be drawn
        arrays, options = t.problem(*t.fit(5, 40, 4), 4)[0], t.options(4)
        first = t.call(*arrays, **options)
        t.equal(t.call(*arrays, **options), first, again(t, arrays, options))


def _differing(t: CheckRun) -> str:
    """Say what results that differ may mean, and which estimators are random."""
    record, known = t.adapter.record, dict.fromkeys(ESTIMATORS.values())
    random = [x.name for x in known if x.has("random") and x.function is record.function]
    other = f"; --estimator {' or '.join(random)} draws" * bool(random)
    return f"results that differ: the function draws random numbers, or is wrong{other}"


@add_check
def seeds(t: CheckRun) -> None:
    """Call twice with each of many seeds, some of them consecutive and some powers of 2 apart."""
    few = t.adapter.half  # equal results may be chance
    arrays, _ = t.problem(3, 9, 8)
    options = t.options(2)
    # The seeds that people type, and those that a generator may confuse.
    start = options.pop("seed")
    typed = [0, 1, 42, 2**31 - 1]
    near = [] if few else [*range(start, start + 32), *(start ^ 2**j for j in range(5, 31))]
    seed_of: dict[bytes, int] = {}
    for seed in [*typed, *near]:
        got = t.call(*arrays, **options, seed=seed)
        _refuse_repeat(seed_of, got, seed)
        if seed in typed:
            allowed = again(t, arrays, options)
            t.equal(t.call(*arrays, **options, seed=seed), got, allowed)
    t.error = t.error or 0.0
    if not few and t.adapter.lead(2, 3):
        _seeds_of_heads(t, start)


def _refuse_repeat(seed_of: dict[bytes, int], got: Any, seed: int) -> None:
    """Fail if another seed has given the same."""
    other = seed_of.setdefault(np.asarray(got).tobytes(), seed)
    if other != seed:
        raise Failure(f"different results for seeds {other} and {seed}", "the same bit for bit")


def _seeds_of_heads(t: CheckRun, start: int) -> None:
    """Check that equal heads get other results at other seeds, of one another too."""
    arrays, _ = t.problem(3, 9, 8)
    lead = t.adapter.lead(2, 3)
    arrays = tuple(np.broadcast_to(x, (*lead, *x.shape)).copy() for x in arrays)
    options, seed_of = t.options(2), dict[bytes, int]()
    for seed in range(start, start + 8):
        out = t.call(*arrays, **(options | {"seed": seed}))
        # Heads are equal: equal results mean that they share their draws.
        for head in (out[index] for index in np.ndindex(*lead)):
            _refuse_repeat(seed_of, head, seed)


@add_check
def memory_layouts(t: CheckRun) -> None:
    """Try transposed, sliced, reversed and read-only arrays, and tokens before heads."""
    arrays, frequencies = t.problem(5, 6, 4, 4, lead=t.adapter.lead(2, 3))
    for options in comparable_ways(t, frequencies):
        if t.adapter.can("mask") and attends(t.adapter):
            options = options | {"mask": np.arange(5)[:, None] >= np.arange(6) - 2}
        out = t.call(*arrays, **options)
        allowed = again(t, arrays, options)
        given_arrays = [name for name, x in options.items() if isinstance(x, np.ndarray)]
        names = [*t.adapter.record.arrays, *given_arrays]
        for memory in layouts(t, names, "transposed", "sliced", "read-only", "heads inside"):
            t.equal(t.call(*arrays, **options, memory=memory), out, allowed)


@add_check
def calls_apart(t: CheckRun) -> None:
    """Make calls of other sizes in between, then repeat the first."""
    for causal in (False, True) if t.adapter.can("causal") else (False,):
        seen: dict[str, Any] = {"causal": True} if causal else {}
        n, m, d = t.fit(6, 7, 4)
        first, frequencies = t.problem(n, m, d, 4)
        ways = comparable_ways(t, frequencies)
        for options in ways[-1:] if causal and t.adapter.has("proposals") else ways:
            kept = t.call(*first, **options, **seen)
            before, allowed = np.array(kept), again(t, first, options | seen)
            for n, m, d, samples in ((6, 7, 4, 4), (6, 9, 4, 3), (4, 9, 4, 7), (6, 6, 5, 4)):
                n, m, d = t.fit(n, m, d)
                count = samples if t.adapter.has("unlimited-size") else min(samples, n, m)
                other, more = t.problem(n, m, d, count)
                if "seed" in options:
                    more = options | t.adapter.record.sized(count)
                t.call(*other, **more, **seen)
            t.case = None
            # An earlier result may be a buffer that later calls write to.
            t.equal(kept, before, 0.0)
            t.equal(t.call(*first, **options, **seen), before, allowed)


_REPEATS = 8
_BIT_SIZES = ((5, 7, 4), (64, 64, 8), (129, 300, 64), (512, 512, 64))


def _bit_problems(t: CheckRun) -> Iterator[tuple[tuple[int, int, int], dict[str, Any], int | None]]:
    """Yield sizes, plain, with keys that are masked, causal, and with fewer key heads."""
    for size in (t.fit(*size) for size in _BIT_SIZES):
        yield size, {}, None
        if t.adapter.can("mask"):
            yield size, {"mask": np.arange(size[1]) % 3 != 1}, None
        if t.adapter.masks_future:
            yield size, {"causal": True}, None
        if t.adapter.grouped:
            yield size, {}, 1


@add_check
def same_bits(t: CheckRun) -> None:
    """Repeat a call many times, also for gradients, with other calls in between."""
    for size, more, groups in _bit_problems(t):
        arrays, frequencies = t.problem(*size, 5, lead=t.adapter.lead(1, 2), groups=groups)
        options = t.given_or_drawn(frequencies, 5) | more
        if t.adapter.can("vjp"):
            options["d_out"] = t.cotangent(arrays)
        first = t.call(*arrays, **options)
        for _ in range(_REPEATS):
            t.equal(t.call(*arrays, **options), first, 0.0)
        # Other numbers in between, that a cache might return.
        t.call(*(2 * x for x in arrays), **options)
        t.equal(t.call(*arrays, **options), first, 0.0)


@add_check
def same_bits_in_any_batch(t: CheckRun) -> None:
    """Pass a query alone, with others and reordered; pass a head alone and in another batch."""
    for (n, m, d), more, groups in _bit_problems(t):
        if more.get("causal"):  # whose queries have places
            continue
        lead = t.adapter.lead(3, 2)
        (q, k, v), frequencies = t.problem(n, m, d, 5, lead=lead, groups=groups)
        options = t.given_or_drawn(frequencies, 5) | more
        whole = t.call(q, k, v, **options)
        order = t.rng.permutation(n)
        t.equal(t.call(q[..., order, :], k, v, **options), whole[..., order, :], 0.0)
        if not t.adapter["self_attention"]:
            for rows in (slice(0, 1), slice(n // 2, n // 2 + 3), slice(n - 1, n)):
                t.equal(t.call(q[..., rows, :], k, v, **options), whole[..., rows, :], 0.0)
        for part in (slice(0, 1), slice(1, len(q))) if lead else ():
            t.equal(t.call(*(x[part] for x in (q, k, v)), **options), whole[part], 0.0)
