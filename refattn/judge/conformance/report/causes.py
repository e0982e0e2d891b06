"""Let the search of `verify` find what a candidate computes instead of the right result.

The calls that fail are small, and many mistakes give the same numbers there. So the candidate is
called once more in each way in which it failed, with more numbers: what explains all of these, to
rounding, is the cause.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np

from ....arrays.library import Floats
from ....naive import softmax_attention
from ...verification.door import verify
from ...verification.findings import as_cause
from ..candidate.adapter import Adapter
from ..candidate.failures import Beyond, Failure
from ..candidate.limits import Arrays, Keywords
from ..checks.trials import Call, CheckRun, attends
from ..truth.allowed import of_function, pulled, reference
from ..truth.normalisers import with_normalisers

_ASKED_SIZES = (43, 75, 8)  # queries and keys, of no common tile, and coordinates
_ASKED_SAMPLES, _ASKED_LEAD, _KEY_HEADS_ASKED = 16, (1, 4), 2
_SEEN_BY_MASK = 0.7  # of the keys, by a mask
_WAYS = 2  # most sets of options, of calls that failed, for which a cause is searched
_HALVED = ("bias", "sinks", "initial_state", "d_lse", "log_probability")  # to see if they matter
_ALL_OF_ERROR = 0.999  # of the error, that a fitted size explains


class Asked(NamedTuple):
    """A call, its results, what should have come, and the error allowed in each."""

    case: Call
    got: tuple[Floats, ...]
    want: tuple[Floats, ...]
    allowed: tuple[float, ...]

    @property
    def wrong(self) -> list[int]:
        """The results that are wrong."""
        every = enumerate(zip(self.got, self.want, self.allowed, strict=True))
        return [i for i, (x, y, z) in every if not np.all(np.abs(x - y) <= 2 * z)]

    def is_given_by(self, fn: Adapter) -> bool:
        """Tell whether another function gives the same numbers, wrong and right ones."""
        try:
            found = _as_tuple(fn(*self.case.arrays, **self.case.options))
        except Exception:  # a known bug may be that it fails
            return False
        parts = zip(self.got, found, self.allowed, strict=True)
        return all(np.all(np.abs(x - y) <= 4 * z) for x, y, z in parts)


def way_of(case: Call) -> frozenset[str]:
    """Return what a call passes, by name, and whether heads share keys."""
    q, k, _ = case.arrays
    return frozenset({*case.options} | ({"gqa"} if q.shape[-3:-2] != k.shape[-3:-2] else set()))


def ask_again(trial: CheckRun, failed: Sequence[CheckRun]) -> list[Asked]:
    """Call a candidate in the ways in which it failed, the plainest first, with more numbers.

    A call that failed is used as it is if it is large, or if the candidate is right in the new one.
    """
    asked: dict[frozenset[str], Asked] = {}
    cases = [x.case for x in failed if x.case is not None]
    for case in sorted(cases, key=lambda x: len(x.options)):
        if len(asked) < _WAYS and way_of(case) not in asked and attends(trial.adapter):
            large = case.arrays[0].shape[-2] >= _ASKED_SIZES[0]
            both = [_draw_like(trial, case), case[:2]][:: -1 if large else 1]
            calls = (_ask_of(trial, *x) for x in both)
            found = next((x for x in calls if x is not None and x.wrong), None)
            asked |= {} if found is None else {way_of(case): found}
    return [*asked.values()]


def _ask_of(t: CheckRun, arrays: Arrays, options: Keywords) -> Asked | None:
    """Call a candidate, and find what should come; None if nothing is known of such a call."""
    with suppress(Failure, Beyond, TypeError, ValueError):  # a record may not have all of this
        want, allowed = _evaluation(options)(t.adapter, arrays, options)
        t.call(*arrays, **options)
        right = _as_tuple(want)
        most = allowed if isinstance(allowed, tuple) else (allowed,) * len(right)
        return Asked(Call(arrays, options), t.results, right, most)
    return None


def _as_tuple(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else (x,)


def _draw_like(t: CheckRun, case: Call) -> tuple[Arrays, Keywords]:
    """Draw a problem with the options of a call."""
    sizes, lead = t.fit(*_ASKED_SIZES), t.adapter.lead(*_ASKED_LEAD)
    groups = _KEY_HEADS_ASKED if "gqa" in way_of(case) else None
    arrays, options = t.problem(*sizes, _ASKED_SAMPLES, lead=lead, groups=groups)
    q, k, v = arrays
    n, m = q.shape[-2], k.shape[-2]
    draws: dict[str, Callable[[], Any]] = {
        # A mask of features is one of keys.
        "mask": lambda: _show_first(
            t.rng.random((n if t.adapter.has("exact") else 1, m)) < _SEEN_BY_MASK
        ),
        "bias": lambda: t.normal(n, m),
        "sinks": lambda: t.normal(*lead[-1:]),
        "initial_state": lambda: t.normal(*v.shape[:-2], k.shape[-1], v.shape[-1]),
        "d_out": lambda: t.cotangent(arrays),
    }
    more = {x: draws[x]() if x in draws else y for x, y in case.options.items()}
    return arrays, more | options


def _show_first(mask: Any) -> Any:
    mask[:, 0] = True
    return mask


def name_cause(
    trial: CheckRun, asked: Iterable[Asked], mistakes: str | os.PathLike[str] | None = None
) -> list[str]:
    """Return the cause that the search of `verify` finds in the plainest way that has one."""
    found = chain.from_iterable(_ask_verify(trial.adapter, one, mistakes) for one in asked)
    return [f"cause: {x}" for x in islice(found, 1)]


def name_ignored(t: CheckRun, failed: Sequence[CheckRun]) -> Iterator[str]:
    """Say what is ignored: a call that failed gives the same with another value of an option."""
    # What is left out may have the same value by default.
    others: dict[str, Callable[[Any], Any]] = {
        "causal": lambda x: False,
        "mask": np.ones_like,
        "window": lambda x: tuple(None if y is None else y + 1 for y in x),
        "offsets": lambda x: x[[0, -1]],
        "dropout": lambda x: 0.0,
        **dict.fromkeys(("softcap", *_HALVED), lambda x: x / 2),
        **dict.fromkeys(t.adapter.record.gates, lambda x: np.flip(x) / 2),
    }
    others.pop(t.adapter.record.size or "", None)
    cases = [x.case for x in failed if x.case is not None]
    cases.sort(key=lambda x: -x.arrays[0].size)  # a small call may not show what an option does
    for name in others:
        case = next((x for x in cases if name in x.options), None)
        if case is None:
            continue
        with suppress(Failure, Beyond, TypeError, ValueError):
            other = case.options | {name: others[name](case.options[name])}
            calls = [_as_tuple(t.call(*case.arrays, **x)) for x in (case.options, other)]
            same = all(map(np.array_equal, *calls))
            if same and _matters(t.adapter, name, case, other):
                beside = [f"`{x}`" for x in others if x in case.options and x != name]
                where = f", in calls with {' and '.join(beside)}" if beside else ""
                yield f"cause: `{name}` is ignored: results do not depend on it{where}"
                return


def _matters(adapter: Adapter, name: str, case: Call, other: Keywords) -> bool:
    """Tell whether results should depend on an option; keys that are hidden matter to softmax."""
    evaluate = _evaluation(case.options)
    with suppress(Exception):  # what is drawn is not known
        (want, allowed), (less, _) = (
            evaluate(adapter, case.arrays, x) for x in (case.options, other)
        )
        rows = zip(_as_tuple(want), _as_tuple(less), _as_tuple(allowed), strict=True)
        return any(np.any(np.abs(x - y) > 4 * z) for x, y, z in rows)
    if name not in ("mask", "causal"):
        return True
    seen = [{x: y for x, y in z.items() if x in ("mask", "causal")} for z in (case.options, other)]
    return not np.array_equal(*(softmax_attention(*case.arrays, **x) for x in seen))


def _evaluation(options: Keywords) -> Callable[..., Any]:
    """Return what evaluates the formula of a call with these options."""
    ways = {"d_out": pulled, "return_lse": with_normalisers}
    return next((x for name, x in ways.items() if name in options), reference)


def _ask_verify(
    adapter: Adapter, asked: Asked, mistakes: str | os.PathLike[str] | None
) -> list[str]:
    names = adapter.returns(asked.case.options)
    got = dict(zip(names, asked.got, strict=True))

    def judge(q: Floats, k: Floats, v: Floats, **options: Any) -> Any:
        # The scale as it was declared: the square of a root is not 1 / sqrt(d) to the last digit.
        named = {"scale": adapter["scale"]} if "scale" in options else {}
        named = {x: named.get(x, y) for x, y in options.items() if x != "return_lse"}
        return verify(
            **{"q": q, "k": k, "v": v, **named, **got},
            estimator=adapter.record.name,
            dtype=adapter["dtype"],
            empty_rows=adapter["empty_rows"],
            mistakes=mistakes,
        )

    # Not all that can be checked can be judged.
    with suppress(TypeError, ValueError):
        verdict = of_function(adapter, judge, *asked.case[:2], np.float64)
        # Coarser roundings may explain any error of their size.
        return [
            as_cause(x.text)
            for x in verdict.suspects
            if (x.name == "convention" or x.explained > _ALL_OF_ERROR)
            and not re.search("in part|precision is lost", x.text)
        ]
    return []
