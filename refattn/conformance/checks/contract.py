"""Checks of the contract: what a call takes and returns, repeatability, and seeds."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..candidate.failures import Failure
from .trials import CheckRun, add_check, again, attends, ways_to_call


@add_check(claim="takes and returns what it says, and the same twice at one seed")
def contract(t: CheckRun) -> None:
    """Library, dtype and shape of the result, arguments left alone, repeatability."""
    for sizes in ((), (2,), (2, 3)):
        n, m, _ = t.fit(5, 5, 4)  # with a mask and without it the same keys, for what is drawn
        arrays, frequencies = t.problem(n, m, 4, 4, lead=t.adapter.lead(*sizes))
        if t.adapter.has("pairs"):
            arrays = tuple(x[0] for x in arrays)
        for options in ways_to_call(t, frequencies):
            first = t.call(*arrays, strict=True, **options)
            second = t.call(*arrays, **options)
            allowed = again(t, arrays, options)
            t.equal(second, first, (allowed, allowed) if isinstance(first, tuple) else allowed)
            if t.adapter.can("mask"):
                seen = np.ones((*arrays[0].shape[:-1], m), dtype=bool)
                t.equal(t.call(*arrays, strict=True, **options, mask=seen), first, allowed)
                seen[..., ::2] = False
                t.call(*arrays, strict=True, **options, mask=seen)
            if t.adapter.can("causal") and (not t.adapter.has("proposals") or "seed" in options):
                t.call(*arrays, strict=True, **options, causal=True)
    if attends(t.adapter) and t.adapter.draws:  # of few keys, all near, nothing may be drawn
        arrays, options = t.problem(*t.fit(5, 40, 4), 4)[0], t.options(4)
        first = t.call(*arrays, **options)
        t.equal(t.call(*arrays, **options), first, again(t, arrays, options))


@add_check(
    "random",
    "seeds-differ",
    claim="the result depends on the seed, and two seeds never give the same",
    draws=True,
)
def seeds(t: CheckRun) -> None:
    """Seeds that are typed, in a row, and apart by powers of 2; each the same twice."""
    few = t.adapter.half  # equal results may be chance
    arrays, _ = t.problem(3, 9, 8)
    options = t.options(2)
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
        for head in (out[index] for index in np.ndindex(*lead)):
            _refuse_repeat(seed_of, head, seed)
