"""Checks of recurrences: identities that hold whatever the conventions are, states and decays.

Chunks end at multiples of powers of 2, so that sequences go past those.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np

from ....arrays.library import Floats
from ..candidate.adapter import Adapter
from ..candidate.gates import LOGS, at_tokens, draw_gates
from ..candidate.limits import Arrays, Keywords
from ..candidate.tags import DEFAULTS, OF_RECURRENCES
from ..truth.allowed import reference
from .gradients import compare_gradients
from .trials import CheckRun, add_check, add_condition, same_within

_LENGTHS = (5, 70, 150)
_FORGOTTEN = -1e3  # a log decay that leaves nothing


def _some(
    t: CheckRun, arrays: Arrays, options: Keywords, tokens: Iterable[int]
) -> tuple[Arrays, dict[str, Any]]:
    """Return the problem of some tokens."""
    rows: Any = list(tokens)
    return tuple(x[..., rows, :] for x in arrays), at_tokens(t.adapter.record, options, rows)


def _cuts(t: CheckRun, n: int) -> list[int]:
    """Return places near the ends of chunks, and of the sequence, where it may be cut."""
    # Near both ends, and about 64 and 128, where chunks may end.
    unit, near = t.adapter["multiple_of"], {1, 2, n - 1, 63, 64, 65, 128}
    return sorted({x for i in near if 0 < (x := i // unit * unit) < n})


def _draw_state(t: CheckRun, arrays: Arrays) -> Floats:
    """Draw a state."""
    (*lead, _, d), d_v = arrays[1].shape, arrays[2].shape[-1]
    return t.normal(*lead, d, d_v)


@add_check
def tokens_one_by_one(t: CheckRun) -> None:
    """Call with the first tokens only; with states also token by token."""
    unit = t.adapter["multiple_of"]
    for n in _LENGTHS:
        arrays, options = t.problem(n, n, 4, lead=t.adapter.lead(1, 2))
        n = arrays[0].shape[-2]
        out, allowed = t.call(*arrays, **options), same_within(t, arrays, options)
        for stop in _cuts(t, n):
            some, more = _some(t, arrays, options, range(stop))
            t.equal(t.call(*some, **more)[...], out[..., :stop, :], allowed)
        if t.adapter.can("initial_state"):
            # A chunk is the least that a candidate with `multiple_of` takes.
            rows, state = [], 0 * _draw_state(t, arrays)
            for i in range(0, n, unit):
                some, more = _some(t, arrays, options, range(i, i + unit))
                row, state = t.call(*some, **more, initial_state=state)
                rows.append(row)
            t.equal(np.concatenate(rows, -2), out, 2 * allowed, "token by token")


@add_check
def later_tokens_unseen(t: CheckRun) -> None:
    """Reverse all later tokens with their gates, and make their values larger."""
    for n in _LENGTHS:
        arrays, options = t.problem(n, n, 4)
        out, allowed = t.call(*arrays, **options), same_within(t, arrays, options)
        for stop in _cuts(t, len(out)):
            order = [*range(stop), *reversed(range(stop, len(out)))]
            (q, k, v), more = _some(t, arrays, options, order)
            # Larger values show a leak that rounding might hide.
            v[stop:] *= 8
            t.equal(t.call(q, k, v, **more)[:stop], out[:stop], allowed)


@add_check
def grouped_values(t: CheckRun) -> None:
    """Try four heads of values with two of queries and keys, and six with three."""
    for heads, groups in ((4, 2), (6, 3)):
        (q, k, v), _ = t.problem(5, 5, 4, lead=t.adapter.lead(2, groups))
        shared = np.repeat(k, heads // groups, -3)
        v, options = t.normal(*shared.shape[:-1], v.shape[-1]), draw_gates(t.adapter, t.rng, shared)
        t.compare(q, k, v, **options)
        if t.adapter.can("vjp"):
            compare_gradients(t, (q, k, v), **options, d_out=t.normal(*v.shape))


@add_condition
def cuts(adapter: Adapter) -> bool:
    """Return whether sequences can be cut: by offsets, or by a decay that leaves nothing."""
    usual = all(adapter[tag] == DEFAULTS[tag] for tag in OF_RECURRENCES if tag != "decay")
    forgets = usual and any(word in LOGS for word in adapter.record.gates.values())
    return adapter.can("offsets") or forgets


@add_check
def packed_apart(t: CheckRun) -> None:
    """Separate three sequences by offsets, if these are declared, or by decays of e^-1000."""
    words, unit = t.adapter.record.gates.items(), t.adapter["multiple_of"]
    for lengths in ((2, 1, 3), (70, 3, 64)):
        ends = np.cumsum([0, *(-(-n // unit) * unit for n in lengths)])
        whole, options = t.problem(int(ends[-1]), 1, 4)
        more: dict[str, Any] = {"offsets": ends} if t.adapter.can("offsets") else {}
        for name, word in () if more else words:
            if word in LOGS:
                options[name][ends[1:-1]] = _FORGOTTEN
            elif word == "pair":  # whose decay is in its second half
                options[name][ends[1:-1], options[name].shape[-1] // 2 :] = 0.0
        parts = (_some(t, whole, options, range(*x)) for x in pairwise(ends))
        apart = [t.call(*some, **gates) for some, gates in parts]
        out, allowed = t.call(*whole, **options, **more), same_within(t, whole, options)
        t.equal(out, np.concatenate(apart), allowed)


@add_check
def state_handed_over(t: CheckRun) -> None:
    """Pass the state after the first tokens to a call with the rest; also pass a state of 0."""
    for n in _LENGTHS:
        arrays, options = t.problem(n, n, 4, lead=t.adapter.lead(1, 2))
        n, state = arrays[0].shape[-2], _draw_state(t, arrays)
        want = t.call(*arrays, **options, initial_state=state)
        _, allowed = reference(t.adapter, arrays, options | {"initial_state": state})
        # The whole, and two parts of which the second goes on from a rounded state.
        more = tuple(3 * x for x in allowed)
        for cut in _cuts(t, n):
            (first, gates), (rest, others) = (
                _some(t, arrays, options, x) for x in (range(cut), range(cut, n))
            )
            early, half = t.call(*first, **gates, initial_state=state)
            late, last = t.call(*rest, **others, initial_state=half)
            t.equal(np.concatenate([early, late], -2), want[0], more[0])
            t.equal(last[...], want[1], more[1], "state")
        out, _ = t.call(*arrays, **options, initial_state=0 * state)
        t.equal(t.call(*arrays, **options), out, more[0])


@add_check
def states(t: CheckRun) -> None:
    """Compare results and last states with the reference, for small and large initial states."""
    for n, lead in ((1, ()), (5, ()), (6, (2, 3)), (70, (2,))):
        for d_v in (None,) if t.adapter["same_value_size"] else (None, 3):
            arrays, options = t.problem(n, n, 4, lead=t.adapter.lead(*lead), d_v=d_v)
            # An initial state of 0 is the usual one; a large one shows what is lost of it.
            for size in (1.0, 0.0, 16.0):
                first = t.adapter.exact(size * _draw_state(t, arrays))
                t.compare(*arrays, **options, initial_state=first)


@add_condition
def decays(adapter: Adapter) -> bool:
    """Return whether a state decays by what is passed."""
    return bool({*LOGS, "head"} & {*adapter.record.gates.values()})


@add_check
def extreme_decays(t: CheckRun) -> None:
    """Try some tokens that forget all or nearly all, and states that never decay."""
    words = t.adapter.record.gates.items()
    for n, share in ((5, 0.3), (70, 0.0), (70, 0.1), (70, 1.0), (150, 0.02)):
        arrays, options = t.problem(n, n, 4, lead=t.adapter.lead(2))
        for name, word in words:
            far = t.rng.random(options[name].shape) < share
            if word == "head":
                options[name] = t.adapter.exact(np.where(far, 2.0**-20, 1.0))
            elif word in LOGS:
                # With a share of 0 nothing ever decays.
                usual = options[name] if 0 < share < 1 else 0.0
                options[name] = np.where(
                    far, t.rng.choice([_FORGOTTEN, -30.0, -90.0], far.shape), usual
                )
                options[name] = t.adapter.exact(options[name])
        t.compare(*arrays, **options)
