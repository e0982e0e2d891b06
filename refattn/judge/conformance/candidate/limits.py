"""What a candidate is declared to take, and how problems of other sizes are put within that.

A problem that a candidate does not take becomes one that it does, of which the answer is a part,
exactly: coordinates without features change no inner product, keys that all come r times no mean,
and queries, hidden keys and keys of the future may be added freely. What no such step brings within
the limits is not asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ....arrays.library import Floats
from .failures import Beyond, Failure
from .gates import of_head

Function = Callable[..., Any]
Arrays = tuple[Floats, ...]
Keywords = dict[str, Any]

_USUAL_LOGIT = {"float64": 300.0, "float16": 5.0}
_FAR_BELOW = -1e4  # where elu + 1 and ReLU are 0, in every dtype
_OF_FREQUENCIES = ("omega", "centres", "mean", "cov")  # options whose last axis is d
_QUERY_AXES = {"omega": -3, "indices": -2, "log_probability": -2}  # axes where each has its own


def fitted(adapter: Any, call: Function, arrays: Arrays, options: Keywords) -> Any:
    """Call with a problem within the limits, and take the part that was asked for."""
    most = adapter["max_logit"]
    if most and len(arrays) > 1 and largest_logit(adapter, arrays) > most:
        raise Beyond("max_logit")
    if adapter.has("local"):
        options = in_place(adapter, arrays, options)
    if adapter.has("recurrent"):  # whose problems are made as they are taken
        return _leave_out_settled(adapter, call, arrays, options)
    if {"d_out", "return_lse"} & set(options):  # whose sizes are those of a problem as it is
        got = _leave_out_settled(adapter, call, arrays, options)
        if "d_out" in options:
            return got
        return _settle_empty_rows(adapter, lambda *_: got[0], arrays, options), got[1]
    # Each step wraps those before it: the last one sees the problem as it was asked.
    for step in (
        _leave_out_settled,
        _settle_empty_rows,
        _pad_coordinates,
        _add_tokens,
        _ask_one_by_one,
        _split_values,
    ):
        call = partial(step, adapter, call)
    return call(arrays, options)


def in_place(adapter: Any, arrays: Any, options: Keywords) -> Keywords:
    """Return the options of a check that leaves tokens in place, or raise Beyond.

    Where only causal attention is had, all questions are about it.
    """
    n, m = (int(x.shape[-2]) for x in arrays[:2])
    if adapter["causal_only"] and not options.get("causal"):
        if n > m:  # queries that would see no key
            raise Beyond("causal_only")
        options = options | {"causal": True}
    if options.get("causal"):
        if adapter["causal"] == "top-left" and n != m:
            raise Beyond("causal")
    elif tokens(adapter, n, m) != (n, m):
        raise Beyond("self_attention" if adapter["self_attention"] else "multiple_of")
    return options


def head_size(adapter: Any, d: int) -> int:
    """Return the least head size that is taken and has room for d coordinates."""
    sizes = [size for size in adapter["head_sizes"] or (d,) if size >= d]
    if not sizes:
        raise Beyond("head_sizes")
    return int(min(sizes))


def nearest_head_size(adapter: Any, d: int) -> int:
    """Return the least head size with room for d coordinates, or the largest that is taken."""
    return head_size(adapter, min(d, max(adapter["head_sizes"] or (d,))))


def tokens(adapter: Any, n: int, m: int) -> tuple[int, int]:
    """Return the least numbers of queries and keys that are taken and not below these."""
    if adapter["self_attention"] or adapter.has("recurrent"):
        n = m = max(n, m)
    return _next_multiple(adapter, n), _next_multiple(adapter, m)


def largest_logit(adapter: Any, arrays: Arrays) -> float:
    """Return the largest |scale q . k|, hidden ones too; of features, scale (|q|^2 + |k|^2) / 2.

    The latter is at least as large. Features of queries and keys have factors e^(-scale |q|^2 / 2)
    and e^(-scale |k|^2 / 2), which cancel from a ratio but may underflow before.
    """
    q, k = (adapter.root(x.shape[-1]) * np.asarray(x, float) for x in arrays[:2])
    if not adapter.has("exact"):
        return (_longest(q) ** 2 + _longest(k) ** 2) / 2
    with np.errstate(all="ignore"):
        logits = q @ np.swapaxes(repeated(k, q), -1, -2)
    return float(np.max(np.abs(np.nan_to_num(logits, posinf=np.inf, neginf=-np.inf)), initial=0.0))


def shrink(adapter: Any, q: Floats, k: Floats) -> float:
    """Return the factor on queries and keys that brings them within `max_logit`."""
    most = adapter["max_logit"]
    largest = largest_logit(adapter, (q, k)) if most else 0.0
    # By less than is needed, as rounding to the dtype comes after.
    return math.sqrt(0.9 * most / largest) if most and largest > most else 1.0


def sizes(adapter: Any, arrays: Arrays) -> str:
    """Give the largest norms of queries and keys.

    >>> from refattn.judge.conformance import Adapter
    >>> arrays = np.ones((2, 4)), np.full((3, 4), 55.0)
    >>> sizes(Adapter(len, "rfa"), arrays) + leaving_out(Adapter(len, "rfa"), arrays)
    'queries of norm 2 and keys of norm 110 (a tag max_logit=300 leaves them out)'
    """
    words = [
        f"{name} of norm {_longest(np.asarray(x, float)):.3g}"
        for name, x in zip(("queries", "keys"), arrays, strict=False)
    ]
    return " and ".join(words)


def leaving_out(adapter: Any, arrays: Arrays) -> str:
    """Name a `max_logit` that leaves such queries and keys out.

    Exponentials of the usual value, 300 in float64, are well within the range of the dtype.
    """
    largest, usual = largest_logit(adapter, arrays), _USUAL_LOGIT.get(adapter["dtype"], 40.0)
    if not math.isfinite(largest):  # of masked numbers: no size is the reason
        return ""
    return f" (a tag max_logit={min(usual, 0.9 * largest):.3g} leaves them out)"


def _longest(x: Floats) -> float:
    """Return the norm of the longest vector without NaN."""
    with np.errstate(all="ignore"):
        lengths = np.nan_to_num(np.linalg.norm(x, axis=-1), posinf=np.inf)
    return float(np.max(lengths, initial=0.0))


def _next_multiple(adapter: Any, count: int) -> int:
    """Return the next multiple that is taken."""
    unit = int(adapter["multiple_of"])
    return -(-count // unit) * unit


def _leave_out_settled(adapter: Any, call: Function, arrays: Arrays, options: Keywords) -> Any:
    """Leave out what a candidate has settled, and give masks its axes; the innermost step."""
    # Its frequencies are made beforehand: it takes neither a seed nor their number.
    settled = {"seed", adapter.record.size} if adapter["fixed_frequencies"] else set()
    if adapter["causal_only"] and "causal" not in adapter.capabilities:
        settled.add("causal")
    if adapter["mask_axes"] == "2" and "mask" in options:
        options = options | {"mask": np.atleast_2d(options["mask"])}
    return call(*arrays, **{k: x for k, x in options.items() if k not in settled})


def _settle_empty_rows(adapter: Any, call: Function, arrays: Arrays, options: Keywords) -> Any:
    """Turn NaN or the mean of all values into 0 where a query sees no key."""
    got = call(arrays, options)
    convention = adapter["empty_rows"]
    if (
        convention == "zero"
        # A sink is a key that every query sees.
        or "sinks" in options
        or not {"mask", "causal", "window"} & set(options)
    ):
        return got
    n, m = (x.shape[-2] for x in arrays[:2])
    seen = np.broadcast_to(adapter.visible(n, m, options), (*got.shape[:-2], n, m))
    empty = ~np.any(seen, -1)[..., None]
    if convention == "nan":
        wrong = int(np.sum(empty & ~np.isnan(got)))
        if wrong:
            raise Failure("NaN for queries that see no key", f"{wrong} numbers")
        return np.where(empty, 0.0, got)
    mean = np.mean(np.asarray(arrays[2], float), -2, keepdims=True)
    # With the mean taken off, the row is 0 as in the other conventions.
    return got - np.where(empty, repeated(mean, got), 0.0)


def _pad_coordinates(adapter: Any, call: Function, arrays: Arrays, options: Keywords) -> Any:
    """Add coordinates of 0 to queries, keys and frequencies."""
    if adapter["head_sizes"] is None:
        return call(arrays, options)
    d = arrays[0].shape[-1]
    room = head_size(adapter, d) - d
    if not room:
        return call(arrays, options)
    more = {k: _pad_last(x, room) for k, x in options.items() if k in _OF_FREQUENCIES}
    if "cov" in options:
        # Added coordinates are independent of the others: the law of these stays the same.
        cov = np.eye(d + room)
        cov[:d, :d] = options["cov"]
        more["cov"] = cov
    padded = [_pad_last(x, room) for x in arrays[:2]]
    if adapter.has("feature-map"):  # whose features of 0 are not 0, but those of this are
        padded[1][..., d:] = _FAR_BELOW
    return call((*padded, *arrays[2:]), options | more)


def _split_values(adapter: Any, call: Function, arrays: Arrays, options: Keywords) -> Any:
    """Call with as many columns of the values at a time as queries have coordinates."""
    if not adapter["same_value_size"]:
        return call(arrays, options)
    q, k, v = arrays
    d, d_v = head_size(adapter, q.shape[-1]), v.shape[-1]
    parts = [v[..., i : i + d] for i in range(0, d_v, d)]
    outs = [call((q, k, _pad_last(part, d - part.shape[-1])), options) for part in parts]
    return np.concatenate(outs, -1)[..., :d_v]


def _ask_one_by_one(adapter: Any, call: Function, arrays: Arrays, options: Keywords) -> Any:
    """Ask for each query alone, as the last, if only causal attention is taken."""
    if not adapter["causal_only"] or options.get("causal"):
        return call(arrays, options)
    if "window" in options:  # which moves with the query
        raise Beyond("causal_only")
    q, k, v = arrays
    # One query may be too few to be cut into as many chunks as there are samples.
    chunks = adapter.record.size is not None and not adapter.has("unlimited-size")
    square = adapter["self_attention"] or adapter["causal"] == "top-left" or chunks
    rows = k.shape[-2] if square else 1
    outs = []
    for i in range(q.shape[-2]):
        alone_options = {name: _take_row(x, i, name) for name, x in options.items()}
        alone = np.repeat(q[..., i : i + 1, :], rows, -2)
        alone_options |= for_queries(adapter, options, np.full(rows, i))
        outs.append(call((alone, k, v), alone_options | {"causal": True})[..., -1:, :])
    return np.concatenate(outs, -2)


def _take_row(x: Any, i: int, name: str) -> Any:
    """Take an option of one query."""
    if name in ("mask", "bias") and np.ndim(x) > 1 and x.shape[-2] != 1:
        return x[..., i : i + 1, :]
    return x


def for_queries(adapter: Any, options: Keywords, rows: Any) -> Keywords:
    """Take frequencies or keys of some queries, where each has its own."""
    axes = _QUERY_AXES.items() if adapter.has("per-query") else ()
    return {name: np.take(options[name], rows, axis) for name, axis in axes if name in options}


def for_heads(adapter: Any, options: Keywords, index: tuple[int, ...]) -> Keywords:
    """Take gates of one head, or frequencies or keys of one, where each query has its own."""
    if adapter.has("recurrent"):
        return of_head(adapter.record, options, index)
    names = _QUERY_AXES if adapter.has("per-query") else ()
    return {name: options[name][index] for name in names if name in options}


def _add_tokens(adapter: Any, call: Function, arrays: Arrays, options: Keywords) -> Any:
    """Add queries like the last, and keys that are hidden or in the future, or repeat all."""
    if adapter["multiple_of"] == 1 and not adapter["self_attention"]:
        return call(arrays, options)
    q, k, v = arrays
    n, m = q.shape[-2], k.shape[-2]
    times = copies(adapter, n, m, options)
    if options.get("causal"):
        rows, columns = _add_causal_tokens(adapter, n, m)
    elif "mask" in options:
        rows, columns = tokens(adapter, n, m)
    else:
        if times > 1 and "sinks" in options:  # which would weigh less
            raise Beyond("multiple_of")
        k, v = (np.repeat(x, times, -2) for x in (k, v))
        rows, columns = tokens(adapter, n, m * times)
    if {"window", "bias"} & set(options) and (rows, columns) != (n, m):
        raise Beyond("self_attention" if adapter["self_attention"] else "multiple_of")
    q = _repeat_last(q, rows - n)
    k, v = (_repeat_last(x, columns - x.shape[-2]) for x in (k, v))
    more: Keywords = {}
    if "mask" in options:
        mask = options["mask"]
        hidden = np.zeros((*mask.shape[:-1], columns - m), dtype=bool)
        mask = np.concatenate([mask, hidden], -1)
        # A mask of one row is that of all queries, and stays so.
        tall = mask.ndim > 1 and mask.shape[-2] == n
        more["mask"] = _repeat_last(mask, rows - n) if tall else mask
    more |= for_queries(adapter, options, np.minimum(np.arange(rows), n - 1))
    if "indices" in options:  # the first of the copies of a key
        more["indices"] = times * (options | more)["indices"]
    return call((q, k, v), options | more)[..., :n, :]


def copies(adapter: Any, n: int, m: int, options: Keywords) -> int:
    """Return how many times all keys are repeated, where no others can be hidden."""
    if options.get("causal") or "mask" in options:
        return 1
    most = n + int(adapter["multiple_of"])
    # The least number of copies that makes a length which is taken.
    return next(r for r in range(1, most + 1) if tokens(adapter, n, m * r)[1] == m * r)


def _add_causal_tokens(adapter: Any, n: int, m: int) -> tuple[int, int]:
    """Return numbers of tokens that leave causal attention of the first as it is."""
    rows, columns = tokens(adapter, n, m)
    aligned = rows - n == columns - m  # at the end, if as many queries are added as keys
    if not (n <= m or columns == m if adapter["causal"] == "top-left" else aligned):
        raise Beyond("self_attention" if adapter["self_attention"] else "multiple_of")
    return rows, columns


def repeated(k: Floats, q: Floats) -> Floats:
    """Repeat heads of keys for the heads of queries that share them."""
    if k.ndim > 2 and q.ndim == k.ndim and q.shape[-3] != k.shape[-3]:
        return np.repeat(k, q.shape[-3] // k.shape[-3], -3)
    return k


def _pad_last(x: Any, room: int) -> Floats:
    """Add zeros after the last axis."""
    return np.pad(np.asarray(x), [(0, 0)] * (np.ndim(x) - 1) + [(0, room)])


def _repeat_last(x: Any, room: int) -> Any:
    """Repeat the last row of the last axis but one."""
    if not room:
        return x
    return np.concatenate([x, np.repeat(x[..., -1:, :], room, -2)], -2)
