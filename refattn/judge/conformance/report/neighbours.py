"""Find the convention that a candidate follows instead of the declared one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..candidate.adapter import Adapter
from ..candidate.failures import Beyond, Failure
from ..candidate.isolation import InvertedMasks
from ..candidate.limits import Arrays, Keywords, head_size, nearest_head_size
from ..candidate.tags import CHOICES, OF_RECURRENCES
from ..checks.trials import Check, CheckRun, attends, evaluated
from ..conventions import SPECS
from ..truth.allowed import reference

Question = tuple[Arrays, Keywords]

_SWAPPED = {"hnd": "nhd", "nhd": "hnd", "bhnd": "bnhd", "bnhd": "bhnd"}


class _Neighbour(NamedTuple):
    """A candidate as it is, declared otherwise, and how calls of it are turned."""

    option: str
    value: str
    adapter: Adapter
    turn: Callable[[Callable[..., Any], Question], Any] | None = None


def diagnose(trial: CheckRun, failed: Sequence[Check] = ()) -> list[str]:
    """Name the convention under which the candidate would be right, if there is one.

    Change one declared convention, then try each of `SPECS`, then each of these with one change.
    The checks that failed must pass with it as well: small problems may leave room for other bugs.

    Examples
    --------
    >>> import refattn
    >>> adapter = Adapter(refattn.softmax_attention, "softmax", ["causal"], {"causal": "top-left"})
    >>> diagnose(CheckRun(adapter, "diagnosis", 0))
    ['matches your declaration except that causal is bottom-right']
    """
    adapter = trial.adapter
    if not attends(adapter) or not evaluated(adapter):
        return []
    problems = list(_problems(trial))

    def holds(x: _Neighbour, base: Adapter) -> bool:
        narrow = x.option != "dtype" or _is_rounded(trial, base, problems[0])
        return narrow and _agrees(trial, x, problems) and _passes(trial, x, failed)

    # Small problems do not show what is wrong: no convention can be told by them.
    if _agrees(trial, _Neighbour("", "", adapter), problems):
        return []
    declared, *specs = _bases(adapter)
    if changes := _find_change(*declared, holds):
        return changes
    for name, base in specs:
        if holds(_Neighbour("", "", base), base):
            return [f"matches {name}"]
    return next(filter(None, (_find_change(*spec, holds) for spec in specs)), [])


def _find_change(
    name: str, base: Adapter, holds: Callable[[_Neighbour, Adapter], bool]
) -> list[str]:
    """Find the one convention that has to change for the candidate to be right."""
    values: dict[str, str] = {}
    for x in _neighbours(base):
        # One value of each option: the first is the plainest.
        if x.option not in values and holds(x, base):
            values[x.option] = x.value
    if "dtype" in values:  # a limit, not a convention
        values["dtype"] += f" (if that is meant: --tag dtype={values['dtype']})"
    return [f"matches {name} except that {option} is {value}" for option, value in values.items()]


def _bases(adapter: Adapter) -> Iterator[tuple[str, Adapter]]:
    """Yield what is declared, and then the conventions of each well-known function."""
    same = [name for name, tags in SPECS.items() if dict(tags) == adapter.declared]
    yield f"spec {', '.join(same)}" if same else "your declaration", adapter
    if adapter.has("recurrent"):
        return
    names: dict[tuple[Any, ...], list[str]] = {}
    asked = ("hidden", "causal", "empty_rows", *(["window"] if adapter.can("window") else []))
    for name, tags in SPECS.items():
        values_of_spec = tuple(tags.get(tag, CHOICES[tag][0]) for tag in asked)
        names.setdefault((*values_of_spec, tags.get("layout", adapter["layout"])), []).append(name)
    # What may be hidden in one may be hidden in the next.
    for values, some in sorted(names.items(), key=lambda x: CHOICES["hidden"].index(x[0][0])):
        other = _declare(adapter, dict(zip((*asked, "layout"), values, strict=True)))
        if other.tags != adapter.tags:
            yield f"spec {', '.join(some)}", other


def _declare(adapter: Adapter, tags: Mapping[str, Any]) -> Adapter:
    return replace(adapter, tags={**(adapter.tags or {}), **tags})


def _neighbours(adapter: Adapter) -> Iterator[_Neighbour]:
    """Yield candidates with one convention changed."""
    seen = {
        "causal": ("causal",),
        "window": ("window",),
        "empty_rows": ("mask", "causal"),
        "hidden": ("mask",),
    }
    # A convention shows only where an option is taken that it is about.
    for tag, able in seen.items():
        if any(adapter.can(x) for x in able):
            for value in CHOICES[tag]:
                if value not in (adapter[tag], "undefined"):
                    yield _Neighbour(tag, value, _declare(adapter, {tag: value}))
    if adapter.has("random-features"):
        for value in CHOICES["features"]:
            if value != adapter["features"]:
                yield _Neighbour("features", value, _declare(adapter, {"features": value}))
    if adapter["layout"] in _SWAPPED:
        value = _SWAPPED[adapter["layout"]]
        yield _Neighbour("layout", value, _declare(adapter, {"layout": value}))
    if adapter.record.takes("scale"):
        d = head_size(adapter, nearest_head_size(adapter, 6))
        for value, scale, turn in (
            ("1/sqrt(d)", None, None),
            ("1", 1.0, None),
            ("1/d", 1 / d, _call),  # of this d: not for checks
        ):
            if scale != adapter["scale"]:
                yield _Neighbour("scale", value, _declare(adapter, {"scale": scale}), turn)
    forward = replace(adapter, capabilities={*adapter.capabilities} - {"vjp"})  # as the tags need
    for tag in OF_RECURRENCES if adapter.has("recurrent") else ():
        for value in (x for x in CHOICES[tag] if x != adapter[tag]):
            text = f"{value} (if that is meant: --tag {tag}={value}, without --capability vjp)"
            words = text if adapter.can("vjp") else value
            yield _Neighbour(tag, words, _declare(forward, {tag: value}))
    if adapter["dtype"] == "float64":
        yield _Neighbour("dtype", "float32", _declare(adapter, {"dtype": "float32"}))
    if adapter.can("mask"):
        # No tag says so: the candidate itself is called otherwise.
        inverted = replace(adapter, fn=InvertedMasks(adapter.fn))
        yield _Neighbour("mask", "inverted (True hides a key)", inverted)
    if adapter.can("gqa") and not adapter.has("per-query"):
        words = "interleaved (query head h uses key head h % G)"
        yield _Neighbour("gqa", words, adapter, _interleave)


def _call(call: Callable[..., Any], problem: Question) -> Any:
    return call(*problem[0], **problem[1])


def _interleave(call: Callable[..., Any], problem: Question) -> Any:
    """Order query heads so that head h % G comes out of h // (H / G)."""
    (q, k, v), options = problem
    if q.ndim < 3 or q.shape[-3] == k.shape[-3]:
        return call(q, k, v, **options)
    groups, place = k.shape[-3], np.arange(q.shape[-3])
    order = place % groups * (q.shape[-3] // groups) + place // groups
    out = call(q[..., order, :, :], k, v, **options)
    return out[..., np.argsort(order), :, :]


def _problems(t: CheckRun) -> Iterator[Question]:
    """Yield small problems that tell conventions apart, the simplest first."""
    adapter = t.adapter
    (n, m, d), lead = t.fit(3, 5, nearest_head_size(adapter, 6)), adapter.lead(2, 2)
    arrays, options = t.problem(n, m, d, 4, lead=lead)
    yield arrays, options
    if adapter.can("causal") and not adapter.has("proposals"):
        yield arrays, options | {"causal": True}
    more = {"window": (1, 1), "softcap": 1.0, "sinks": t.normal(*lead[-1:]), "bias": t.normal(n, m)}
    for name, x in more.items():
        if adapter.can(name):
            yield arrays, options | {name: x}
    if adapter.can("mask"):
        mask = t.rng.random((n, m)) < 0.5
        # Each query sees a key, and has one that is hidden.
        mask[:, 0], mask[:, 1] = True, False
        yield arrays, options | {"mask": mask}
        if adapter["empty_rows"] != "undefined":
            empty = mask.copy()
            empty[1] = False
            yield arrays, options | {"mask": empty}
    if adapter.can("gqa") and len(lead) > 0:
        arrays, options = t.problem(n, m, d, 4, lead=(*lead[:-1], 4), groups=2)
        yield arrays, options


def _agrees(t: CheckRun, other: _Neighbour, problems: list[Question]) -> bool:
    """Return whether a candidate is right in all problems under the conventions of a neighbour."""
    t.adapter = other.adapter
    for arrays, options in problems:
        want, allowed = reference(other.adapter, arrays, options)
        try:
            got = (other.turn or _call)(t.call, (_hidden(other.adapter, arrays, options), options))
        except (Failure, Beyond):
            return False
        if got.shape != want.shape or not np.all(np.abs(got - want) <= 2 * allowed):
            return False
    return True


def _is_rounded(t: CheckRun, adapter: Adapter, problem: Question) -> bool:
    """Return whether errors change with the last digits of float32, as roundings do, but no bug."""
    t.adapter, errors = adapter, []
    for factor in (1.0, 1.0 + 2.0**-20):
        arrays = tuple(x * factor for x in problem[0])
        want, _ = reference(adapter, arrays, problem[1])
        try:
            errors.append(t.call(*arrays, **problem[1]) - want)
        except (Failure, Beyond):
            return False
    return bool(np.max(np.abs(errors[1] - errors[0])) > 0.1 * np.max(np.abs(errors[0])))


def _passes(t: CheckRun, other: _Neighbour, checks: Sequence[Check]) -> bool:
    """Return whether a candidate passes checks under the conventions of a neighbour.

    They are not run if calls have to be turned, or if a convention is for a head size alone; and
    only those that can be made under these conventions.
    """
    for item in () if other.turn else (x for x in checks if x.applies(other.adapter)):
        t.adapter, t.name = other.adapter, item.name
        t.__post_init__()  # the random numbers of that check
        try:
            item.run(t)
        except Beyond:
            continue
        except Failure:
            return False
    return True


def _hidden(adapter: Adapter, arrays: Any, options: Keywords) -> Arrays:
    """Put NaN into the second key and value, unless a query sees no key and so may use them."""
    q, k, v = (x.copy() for x in arrays)
    if np.all(np.any(options.get("mask", False), -1)) and adapter["hidden"] != "finite":
        k[..., 1, :] = np.nan
        if adapter["hidden"] == "any":
            v[..., 1, :] = np.nan
    return q, k, v
