"""Cases: the uses of a candidate, choices of them in which any few meet, and inputs that use it so.

One use at a time says little about two: a path of its own for one query may forget the mask, and
heads in groups may read the frequencies of the first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import numpy as np
import numpy.typing as npt

from ..candidate.adapter import Adapter
from ..candidate.failures import Refusal
from ..candidate.limits import Arrays, Keywords
from .trials import CheckRun

Mask = npt.NDArray[np.bool_]
_Lead = tuple[int, ...]  # leading axes

SECONDS = {"quick": 15.0, "full": 60.0}  # several times what fast candidates take
OPTIONS = ("window", "softcap", "sinks", "bias", "lse")
_TRIES = 16  # rows of which the one is taken that covers most


def covering(
    levels: Mapping[str, tuple[Any, ...]],
    rng: np.random.Generator,
    strength: int = 3,
    paired: Collection[str] = (),
) -> Iterator[dict[str, Any]]:
    """Yield choices of levels in which any few factors have all of their levels.

    As many as `strength` says, or two if one of them is `paired`. The first has the first level of
    each. Each other begins with levels that are still missing, and the best of some is taken: far
    fewer than all choices.
    """
    names, choices = list(levels), [range(len(x)) for x in levels.values()]
    most = range(1, min(strength, len(names)) + 1)
    subsets = [s for size in most for s in combinations(range(len(names)), size)]
    subsets = [s for s in subsets if len(s) <= 2 or not {names[i] for i in s} & set(paired)]
    missing = {(s, x) for s in subsets for x in product(*(choices[i] for i in s))}

    def new(row: list[int]) -> list[Any]:
        choices_of_row = ((s, tuple(row[i] for i in s)) for s in subsets)
        return [each for each in choices_of_row if each in missing]

    row = [0] * len(names)
    while missing:
        missing.difference_update(new(row))
        yield {name: levels[name][i] for name, i in zip(names, row, strict=True)}
        order, tries = sorted(missing), []
        for _ in range(min(_TRIES, len(order))):
            subset, values = order[rng.integers(len(order))]
            guess = [int(rng.integers(len(x))) for x in choices]
            for i, value in zip(subset, values, strict=True):
                guess[i] = value
            tries.append(guess)
        row = max(tries, key=lambda guess: len(new(guess)), default=row)


def _mask_of_some(rng: np.random.Generator, *shape: int) -> Mask:
    """Return a random mask of which every query sees the first key."""
    mask = rng.random(shape) < 0.6
    mask[..., 0] = True
    return mask


def _mask_of_padding(rng: np.random.Generator, lead: _Lead, n: int, m: int) -> Mask:
    """Return keys that are there, all of them in the first member of the batch."""
    mask = _mask_of_some(rng, lead[0], *[1] * len(lead[1:]), 1, m)
    mask[0] = True
    return mask


def _mask_of_each(rng: np.random.Generator, lead: _Lead, n: int, m: int) -> Mask:
    """Draw a mask for each query of each head; in the first head all queries have one."""
    mask = _mask_of_some(rng, *lead, n, m)
    first = mask.reshape(-1, n, m)[0]
    first[:] = first[:1]
    return mask


_MASKS: Mapping[str, Callable[[np.random.Generator, _Lead, int, int], Mask]] = {
    "pairs": lambda rng, lead, n, m: _mask_of_some(rng, n, m),
    "keys": lambda rng, lead, n, m: _mask_of_some(rng, m),
    "row": lambda rng, lead, n, m: _mask_of_some(rng, 1, m),
    "queries": lambda rng, lead, n, m: np.repeat(rng.random((n, 1)) < 0.7, m, axis=1),
    "heads": lambda rng, lead, n, m: _mask_of_some(rng, *lead[-1:], n, m),
    "padding": _mask_of_padding,
    "all": _mask_of_each,
}


_WINDOWS = ((2, 0), (0, 1), (70, 3), (3, None), (None, 2))
_BIASES: Mapping[str, Callable[[_Lead, int, int], tuple[int, ...]]] = {
    "pairs": lambda lead, n, m: (n, m),
    "keys": lambda lead, n, m: (1, m),
    "heads": lambda lead, n, m: (*lead[-1:], n, m),
    "all": lambda lead, n, m: (*lead, n, m),
    "heads of keys": lambda lead, n, m: (*lead[-1:], 1, m),
    "batch": lambda lead, n, m: (lead[0], *[1] * len(lead[1:]), n, m),
    "padding": lambda lead, n, m: (lead[0], *[1] * len(lead[1:]), 1, m),
    "first keys hidden": lambda lead, n, m: (n, m),
}


def levels(adapter: Adapter) -> dict[str, tuple[Any, ...]]:
    """Return the uses of a candidate, the plainest first."""
    some = adapter.lead(2, 4)
    masks = [
        name
        for name in _MASKS
        if (some or name not in ("heads", "padding", "all"))
        and (name != "queries" or adapter["empty_rows"] != "undefined")
    ]
    causal = adapter.masks_future
    biases = [x for x in _BIASES if some or x in ("pairs", "keys", "first keys hidden")]
    fewer = adapter["empty_rows"] == "undefined" or not adapter.can("mask")  # of keys
    of_options = {  # OPTIONS
        "window": (None, *_WINDOWS),
        "softcap": (None, 2.0),
        "sinks": (None, "moderate", "far"),
        "bias": (None, *biases),
        "lse": (False, True),
    }
    # Keys of each query are of each head as well.
    indices = adapter.drawn_keyword == "indices" and not adapter.has("per-query")
    own = indices or adapter.can("omega", "omega_per_head")  # of heads, what they share otherwise
    return {
        "n": (5, 1, 70),
        "more": (0,)
        if adapter["self_attention"] or adapter.has("recurrent")
        else (0, 4, 130)
        if fewer
        else (0, 4, 130, -3),
        "mask": (None, *(masks if adapter.can("mask") else [])),
        "causal": (True,) if adapter["causal_only"] else (False, True) if causal else (False,),
        "d_v": (None,) if adapter["same_value_size"] else (None, 1, 7),
        "groups": (None, 2, 1) if adapter.grouped else (None,),
        "own": (False, True) if own else (False,),
        **{name: x for name, x in of_options.items() if adapter.can(name)},
    }


def in_time(
    t: CheckRun,
    cases: Iterable[dict[str, Any]],
    called: str,
    seconds: Mapping[str, float] = SECONDS,
) -> Iterator[dict[str, Any]]:
    """Yield cases until the time is over, and report how many are left."""
    end, cases = time.monotonic() + seconds[t.level], list(cases)
    for i, case in enumerate(cases):
        if time.monotonic() > end:
            t.untried.append(f"{len(cases) - i} of {len(cases)} {called}, for lack of time")
            return
        yield case


def layouts(t: CheckRun, names: Sequence[str], *kinds: str) -> Iterator[dict[str, str]]:
    """Yield layouts in memory of arrays with these names: all alike, and each alone."""
    # A reversed view has negative strides, which torch does not have.
    backwards = ["reversed"] if t.adapter["library"] == "numpy" else []
    for layout, some in product((*kinds, *backwards), (names, *([name] for name in names))):
        yield dict.fromkeys(some, layout)


def growing(
    t: CheckRun, cases: Sequence[Any], seconds: Mapping[str, float], left: str, least: int = 0
) -> Iterator[Any]:
    """Yield cases by size until the time is over, as if it grew with the pairs, above `least`.

    What is `left` names the first of the others, and says how many come after it.
    """
    end, rate = time.monotonic() + seconds[t.level], 0.0
    for i, case in enumerate(cases):
        began = time.monotonic()
        # What would not be back in time is not begun.
        if began + rate * case.pairs > end:
            larger = len(cases) - i - 1
            rest = f" and {larger} larger ones" if larger else ""
            t.untried.append(f"{left.format(case, rest)}, for lack of time")
            return
        yield case
        # Small cases take their time for other things than pairs.
        if case.pairs > least:
            rate = (time.monotonic() - began) / case.pairs


def try_cases(
    t: CheckRun,
    cases: Iterable[dict[str, Any]],
    compare: Callable[..., None],
    seconds: Mapping[str, float] = SECONDS,
) -> None:
    """Compare each case, as far as time allows; two of mask, bias and causal may be refused."""
    refused = set[frozenset[str]]()
    for case in in_time(t, cases, "uses together", seconds):
        arrays, options = problem_of(t, case)
        try:
            compare(arrays, **options)
        except Refusal:
            some = frozenset(name for name in ("bias", "causal", "mask") if case.get(name))
            if len(some) < 2:
                raise
            t.since, refused = None, refused | {some}
    for some in sorted(refused, key=sorted):
        # A refusal of two is not told again for three.
        if not any(fewer < some for fewer in refused):
            t.untried.append(f"{' and '.join(sorted(some))} together, which the function rejects")


def problem_of(t: CheckRun, case: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return inputs that use a candidate in these ways."""
    adapter, lead, samples = t.adapter, t.adapter.lead(2, 4), 5
    n, m, d = t.fit(case["n"], max(1, case["n"] + case["more"]), 4)
    arrays, options = t.problem(n, m, d, samples, lead=lead, d_v=case["d_v"], groups=case["groups"])
    if case["own"]:
        options |= t.of_heads(arrays, options)
    if case["mask"] is not None:
        options["mask"] = _MASKS[case["mask"]](t.rng, lead, n, m)
    options |= {name: case[name] for name in ("causal", "window", "softcap") if case.get(name)}
    if case.get("sinks"):
        options["sinks"] = sinks = t.normal(*arrays[0].shape[-3:-2], size=2.0)
        if case["sinks"] == "far":
            # Sinks that weigh nothing, and such as leave nothing to the keys.
            options["sinks"] = np.where(sinks < -1, -np.inf, np.where(sinks > 1, 1000.0, sinks))
    if "mask" in options and (adapter["empty_rows"] == "undefined" or "sinks" in options):
        options["mask"] = seeing(adapter, n, m, options)
    if case.get("bias"):
        options["bias"] = bias = t.normal(*_BIASES[case["bias"]](lead, n, m), size=2.0)
        if case["bias"] == "first keys hidden":
            bias[:, : 2 * m // 3] = -np.inf
            seen = np.broadcast_to(adapter.visible(n, m, options), (*lead, n, m))
            none = ~np.any(seen & np.isfinite(bias), -1)
            # A bias of -inf on all visible keys leaves a row empty, which is another check.
            bias[np.any(none.reshape(-1, n), 0)] = 0.0
    if case.get("lse") and "sinks" not in options:
        options["return_lse"] = True
    return arrays, options


def seeing(adapter: Adapter, n: int, m: int, options: Keywords) -> Mask:
    """Return the mask without the rows of queries that would see no key."""
    empty = ~np.any(adapter.visible(n, m, options), -1, keepdims=True)
    mask: Mask = options["mask"] | empty
    return mask


def without_empty_rows(adapter: Adapter, arrays: Arrays, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options, whose mask leaves each query a key unless others are to get 0."""
    if "mask" not in options or adapter["empty_rows"] == "zero":
        return options
    n, m = (x.shape[-2] for x in arrays[:2])
    return options | {"mask": seeing(adapter, n, m, options)}
