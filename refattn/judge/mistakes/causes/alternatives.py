"""Problems that kernels often compute by mistake, grouped by what differs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from ....engine.scores import Reach
from ...rounding.head import SoftmaxHead
from ...rounding.problems import Index, Problem
from ..operators.arrays import list_row_strides, read_rows_at
from ..operators.strides import PADDED_TO, list_overlapping, list_strides
from .changed_inputs import list_choices, list_merges, list_narrow, list_scales, list_undivided
from .sampled import Alternative, Bias, Place, Result, Rows, Seen, attend, pad_sum, show_band
from .sequences import fill_tiles, list_packed, one_sequence, within_sequences
from .wrong_rows import thin

_BLOCKS = (2, 4, 8, 16, 32, 64, 128)  # of causal attention by blocks
_KEY_BLOCKS = (16, 32, 64, 128, 256, 512, 1024)  # of each of which a kernel may add the sink
_WRAPS = [2**x for x in range(4, 17)]  # where places may start again from 0
_WRAPPED: Mapping[str, Callable[..., Place]] = {
    "queries": lambda x, size: x._replace(i=x.i % size),
    "keys": lambda x, size: x._replace(j=x.j % size),
    "queries and keys": lambda x, size: x._replace(i=x.i % size, j=x.j % size),
}
_MASKS_READ = 16  # heads whose masks may tell lengths
_COMPARED_ROWS = 64  # of each head, in which biases are compared
_LOG2E = math.log2(math.e)
_WITHOUT = {  # an option that was given
    "soft cap": "there is no soft cap",
    "bias": "the bias is ignored",
    "mask": "the mask is ignored",
    "sinks": "there is no sink",
    "causal mask": "attention is not causal",
    "window": "there is no window",
}


def list_alternatives(problem: Problem) -> Iterator[Alternative]:
    """List problems and kernels that this one may be taken for, the plainest first."""
    yield from list_packed(problem)
    yield from _list_options(problem)
    if problem.kind == "scores":
        yield from _list_visible(problem)
        yield from _list_masks(problem)
        yield from _list_places(problem)


def _list_options(problem: Problem) -> Iterator[Alternative]:
    """List the same problem with another option, each one that is given left out first."""
    arrays = problem.first
    d, m = arrays["q"].shape[-1], problem.shape[1]
    for name, other in problem.leave_out():
        # Sequences in one buffer have these of their own: `list_packed` changes them.
        if problem.packed is None or name not in ("mask", "causal mask", "window"):
            yield Alternative(_WITHOUT[name], other)
        for names, less in _leave_out_more(other, name):
            yield Alternative(" and ".join(_WITHOUT[x] for x in (name, *names)), less)
    if not problem.causal and problem.packed is None:
        yield Alternative("attention is causal", problem._replace(causal=True))
    scales = {
        f"1 / sqrt({d})": d**-0.5,
        "0: all weights are equal": 0.0,
        "1": 1.0,
        f"1 / {d}": 1 / d,
        "squared (used twice)": problem.scale**2,
        "multiplied by log2(e) once more": problem.scale * _LOG2E,
        "multiplied by ln(2) (log2(e) is left out)": problem.scale / _LOG2E,
        "multiplied by the log of the number of keys": problem.scale * math.log(max(m, 2)),
    }
    if (heads := (problem.lead or (1,))[-1]) > 1:
        scales[f"1 / sqrt({heads} x {d}), that of all heads together"] = (heads * d) ** -0.5
    for words, scale in scales.items():
        if not math.isclose(scale, problem.scale):
            yield Alternative(f"the scale is {words}", problem._replace(scale=scale))
    late = partial(_scale_output, scale=problem.scale)
    text = "the scale multiplies the weights, after the softmax, and not the scores"
    yield Alternative(text, problem._replace(scale=1.0), compute=late)
    if problem.softcap is not None:
        # scale * (cap * tanh(q . k / cap)) is a cap of scale * cap on scores that are scaled.
        words = "the cap is applied before the scale"
        yield Alternative(words, problem._replace(softcap=problem.softcap * problem.scale))
    if "mask" in arrays and problem.packed is None:
        text = "the mask is inverted"
        yield Alternative(text, problem.replaced("mask", lambda _, x: np.logical_not(x)))
    if problem.has_sinks:
        sinks: dict[str, Callable[..., Any]] = {
            "is also multiplied by the scale": lambda _, x: problem.scale * x,
            "is multiplied by log2(e) once more": lambda _, x: _LOG2E * x,
            "is multiplied by ln(2) (log2(e) is left out)": lambda _, x: x / _LOG2E,
            "counts twice": lambda _, x: x + math.log(2),
            "is 0: 1 is added to the sum of e^score": lambda _, x: 0 * x,
        }
        for size in (x for x in _KEY_BLOCKS if 2 * x < m):
            count = -(-m // size)
            words = f"counts {count} times, as if once for each block of {size} keys"
            sinks[words] = partial(lambda by, _, x: x + math.log(by), count)
        for words, change in sinks.items():
            yield Alternative(f"the sink {words}", problem.replaced("sinks", change))


def list_halves(problem: Problem) -> Iterator[Alternative]:
    """List kernels that leave options out of one sum alone: of the weights, or of the values."""
    right = Alternative("", problem)
    for name, less in problem.leave_out():
        for names, other in ((), less), *_leave_out_more(less, name):
            words = " and ".join(_WITHOUT[x] for x in (name, *names))
            both = right, Alternative("", other)
            for x, (of_values, of_weights) in enumerate((both[::-1], both)):
                where = ("values, not of the weights", "weights, not of the values")[x]
                answer = partial(_divide_sums, of_values, of_weights)
                yield Alternative(f"{words} in the sum of the {where}", problem, answer=answer)


def _divide_sums(of_values: Alternative, of_weights: Alternative, rows: Rows) -> Result:
    """Divide the sum of the values by one problem by the sum of the weights by another."""
    x, y = of_values.result(rows), of_weights.result(rows)
    with np.errstate(invalid="ignore"):
        return y._replace(out=x.out * np.exp(x.lse - y.lse)[:, None])


def _leave_out_more(problem: Problem, after: str) -> Iterator[tuple[tuple[str, ...], Problem]]:
    """Leave out more options, of those that come after one, in all ways."""
    order = [*_WITHOUT]
    for name, other in problem.leave_out():
        if order.index(name) > order.index(after):
            yield (name,), other
            yield from (((name, *x), y) for x, y in _leave_out_more(other, name))


def list_added(problem: Problem) -> Iterator[Alternative]:
    """List sums of weights in which there is more than the weights of the keys."""
    if problem.has_sinks:
        return
    # The 1 is posed as a sink, in whose place none may be.
    added = problem._replace(has_sinks=True).replaced("sinks", lambda *_: np.zeros((1, 1)))
    yield Alternative("1 is added to the sum of e^score (like one more key with score 0)", added)


def _list_visible(problem: Problem) -> Iterator[Alternative]:
    """List what queries may see by their place."""
    # What is a rule of places in one sequence is one in each of several.
    if problem.packed is not None:
        for one in _list_visible(one_sequence(problem)):
            yield within_sequences(problem, one)
        return
    (n, m, _), (left, right), band = problem.shape, problem.window, show_band(problem)
    is_causal = problem.causal or right == 0
    rules: dict[str, Callable[[Place], Seen]] = {}
    windows: dict[str, Reach] = {}
    # Without a limit on the right, attention may be causal as it is, or by mistake.
    reach = "" if is_causal else "attention is causal, but "
    if left is not None and right is not None:
        one_sided: dict[str, Reach] = {"left": (None, right), "right": (left, None)}
        for words, window in one_sided.items():
            text = f"the window has no limit on the {words}"
            yield Alternative(text, problem._replace(window=window))
    if right is None:
        ends = {"a query also sees the next key": 1, "a query does not see its last key": -1}
        if n != m:
            words = "the causal mask is aligned to the"
            ends[f"{words} first key (query i sees key j if j <= i)"] = n - m
            ends[f"{words} middle key"] = -((m - n) // 2)
        for text, end in ends.items():
            rules[reach + text] = partial(_show_reach, left=left, end=end)
    if right in (None, 0):
        for size in (x for x in _BLOCKS if (m - n) // x < (m - 1) // x):  # blocks, not one
            theirs = {"all keys of the block": size - 1, "only the keys before the block": -1}
            for words, end in theirs.items():
                text = f"{reach}queries of a block of {size} see {words}"
                rules[text] = partial(_show_reach, left=left, end=end, size=size)
    for side, words in ((left, "left"), (right, "right")):
        for to in (side - 1, side + 1) if side is not None else ():
            text = f"the window reaches {to} keys to the {words}, not {side}"
            windows |= {text: (to, right) if words == "left" else (left, to)} if to >= 0 else {}
    for size in (x for x in _WRAPS if (is_causal or left is not None) and x < max(n, m)):
        for words, wrap in _WRAPPED.items():
            text = f"positions of {words} are taken modulo {size}"
            rules[text] = partial(lambda wrap, size, x: band(wrap(x, size=size)), wrap, size)
    if left is not None or right is not None:
        text = "all queries have the window of the last query"
        rules[text] = lambda x: band(x._replace(i=0 * x.i + x.n - 1))
        text = "the window is aligned to the first key, not to the last"
        rules |= {text: lambda x: band(x._replace(n=x.m))} if n != m else {}
    if left is not None:
        free = show_band(problem._replace(window=(None, right)))
        text = "the windows of all queries start where that of the {} query does"
        rules[text.format("first")] = lambda x: free(x) & (x.j >= x.m - x.n - left)
        rules[text.format("last")] = lambda x: free(x) & (x.j >= x.m - 1 - left)
    for text, seen in rules.items():
        yield Alternative(text, problem, seen)
    for text, window in windows.items():
        yield Alternative(text, problem._replace(window=window))


def _show_reach(x: Place, left: int | None, end: int, size: int = 1) -> Seen:
    """Show keys up to so many after the first that is level with a block of queries."""
    level = x.i + x.m - x.n
    seen: Seen = x.j <= level // size * size + end
    return seen if left is None else seen & (x.ahead >= -left)


def _list_masks(problem: Problem) -> Iterator[Alternative]:
    """List what may be done with a mask or a bias, and a bias that is not given."""
    arrays = problem.first
    n, m, _ = problem.shape
    for name in ("mask", "bias"):
        if name not in arrays or (name == "mask" and problem.packed is not None):
            continue
        if name == "bias":
            negative = problem.replaced("bias", lambda _, x: np.where(np.isinf(x), x, -x))
            yield Alternative("the bias has the wrong sign", negative)
        if n == m:
            text = f"the {name} is transposed"
            yield Alternative(text, problem.replaced(name, lambda _, x: x.T))
    if "indices" in arrays:
        yield from list_choices(problem)
    if "part_sizes" in arrays:
        yield from list_merges(problem)
    if "mask" in arrays and problem.packed is None:  # that of sequences is none of the user's
        # A mask that shows all queries the first keys tells how long sequences are.
        heads = thin([*np.ndindex(problem.lead)], _MASKS_READ)
        of_keys = all(_tells_length(problem.read(x)["mask"]) for x in heads)
        text = "lengths in the mask are rounded up to multiples of {} keys"
        text = text if of_keys else "a tile of {} keys is seen whole if the mask shows one of them"
        for size in PADDED_TO:
            yield Alternative(
                text.format(size), problem.replaced("mask", partial(fill_tiles, size=size))
            )
            for words, fill in _WHOLE_BLOCKS.items() if not of_keys else ():
                blocks = partial(fill_tiles, size=size, rows=size, fill=fill)
                text_of = f"the mask is applied by blocks of {size} queries and keys: {words}"
                yield Alternative(text_of, problem.replaced("mask", blocks))
        # Without a sink scores count up to a constant: -1 for visible keys is 1 for hidden ones.
        for words, c in (("0 (hidden) and 1", 1.0), ("1 (hidden) and 0", -1.0)):
            add = partial(
                lambda c, at, x: c * problem.read(at)["mask"] + (0.0 if x is None else x), c
            )
            added = problem.without("mask").replaced("bias", add)
            yield Alternative(f"the mask is added to scores as {words}", added)
    if "bias" in arrays:
        text = "the bias is also multiplied by the scale"
        yield Alternative(text, problem, bias=lambda _, at, x: problem.scale * np.asarray(x))
        yield from _list_bias_tiles(problem)
    for words, power in SLOPES.items():
        slopes = partial(_slope_of_head, problem, power)
        # Where the bias is such slopes times a number, that number is fitted.
        if not _is_multiple(problem, slopes):  # of which the factor is fitted
            text = f"the bias is ALiBi with slopes 2^{words}"
            yield Alternative(text, problem, bias=slopes)


_WHOLE_BLOCKS = {
    "all keys of a block are seen if some are": np.logical_or,
    "keys of a block are seen only if all are": np.logical_and,
}


def _scale_output(head: SoftmaxHead, scale: float) -> Result:
    x = attend(head)
    return x._replace(out=scale * x.out)


def _tells_length(mask: Seen) -> bool:
    """Tell whether a mask, (queries, keys), shows all queries so many of the first keys."""
    return bool(np.all(mask == mask[:1]) and np.all(mask[:1, 1:] <= mask[:1, :-1]))


def _list_bias_tiles(problem: Problem) -> Iterator[Alternative]:
    """List biases of which a tile, of so many queries and keys, is used for all."""
    for size in (x for x in PADDED_TO if x < problem.shape[0]):
        text = f"the bias is read as if positions of queries and keys were taken modulo {size}"
        read = partial(
            lambda size, x, at, _: problem.read(at)["bias"][x.i % size, x.j % size], size
        )
        yield Alternative(text, problem, bias=read)


# ALiBi has slopes 2^(-8 h / heads) with h from 1, and a rule of its own (the last row) for numbers
# of heads that are no powers of 2.
SLOPES: Mapping[str, Callable[[int, int], float]] = {
    "(-8 h / heads), h from 1": lambda h, heads: -8 * (h + 1) / heads,
    "(-8 h / heads), h from 0": lambda h, heads: -8 * h / heads,
    "(-8 h / heads), h from the last head": lambda h, heads: -8 * (heads - h) / heads,
    "-h, h from 1": lambda h, _: -(h + 1),
    "(-8 h / c) in c heads, a power of 2, then odd h / 2": lambda h, heads: _power_of(h, heads),
}


def _power_of(h: int, heads: int) -> float:
    """Return the power of 2 of a slope as ALiBi has it for any number of heads."""
    closest = 1 << (heads.bit_length() - 1)
    return -8 * (h + 1) / closest if h < closest else -4 * (2 * (h - closest) + 1) / closest


def _slope_of_head(
    problem: Problem, power: Callable[[int, int], float], x: Place, index: Index, _: Any
) -> Any:
    heads = problem.lead[-1] if problem.lead else 1
    return -float(np.exp2(power(index[-1] if index else 0, heads))) * np.abs(x.ahead)


def _is_multiple(problem: Problem, other: Bias) -> bool:
    """Tell whether the bias of a problem is another times one number, in some rows of all heads."""
    ratios = []
    n, m, _ = problem.shape
    i = np.arange(0, n, max(1, n // _COMPARED_ROWS))
    for index in np.ndindex(problem.lead):
        mine = problem.read(index).get("bias")
        if mine is None:
            return False
        mine, theirs = mine[i], other(Place(i[:, None], np.arange(m), n, m, None), index, None)
        seen = np.isfinite(mine) & (theirs != 0)
        ratios.append(mine[seen] / theirs[seen])
    every = np.concatenate(ratios)
    return every.size > 0 and bool(np.ptp(every) <= 1e-2 * np.abs(every[0]))


def list_families(
    problem: Problem,
) -> Iterator[tuple[str, Callable[[float], Alternative], tuple[float, ...]]]:
    """List kernels with a number that is fitted, with its name and where fits start."""
    yield (
        "the scale is {} times the declared scale",
        lambda c: Alternative("", problem._replace(scale=c * problem.scale)),
        (-1.0, 0.25, 0.5, 1.0, 2.0, 4.0),
    )
    pads = (1.0, 8.0, 64.0, 512.0, 4096.0)
    text = "{} is added to the sum of e^score (like that many keys with score 0 and value 0)"
    yield text, lambda c: Alternative("", problem, compute=partial(_pad, count=c)), pads
    n, m, _ = problem.shape
    # The last query is level with the last key: query i is at position i + m - n.
    log_of_place = np.log(np.maximum(np.arange(n) + m - n, 0) + 1)[:, None]

    def multiply(factors: Any, name: str = "q") -> Alternative:
        return Alternative("", problem.replaced(name, lambda _, x: factors * x))

    if problem.packed is None:
        text = "scores are multiplied by {} times the log of the position of the query, from 1"
        yield text, lambda c: multiply(c * log_of_place), (0.2, 1.0)
        text = "scores are multiplied by log(position of the query) / log({}) if this is above 1"
        starts = tuple(2.0**x for x in range(4, max(5, m.bit_length())))
        yield text, lambda c: multiply(np.maximum(log_of_place / math.log(c), 1.0)), starts
    caps: tuple[float, ...] = (5.0, 15.0, 30.0, 50.0, 100.0)
    if problem.softcap is not None:
        caps = tuple(x * problem.softcap for x in (0.25, 0.5, 1.0, 2.0, 4.0))
    yield "the soft cap is {}", lambda c: Alternative("", problem._replace(softcap=c)), caps
    if "bias" in problem.first:
        yield (
            "the bias is multiplied by {}",
            lambda c: Alternative("", problem, bias=lambda _, at, x: c * np.asarray(x)),
            (-1.0, 0.5, 1.0, 2.0, 4.0),
        )
    if problem.has_sinks:
        starts = (-1.0, 0.25, 0.5, 1.0, 2.0, 4.0)
        yield "each sink is multiplied by {}", lambda c: multiply(c, "sinks"), starts


def _pad(head: SoftmaxHead, count: float) -> Result:
    """Add so many keys of score 0 and value 0: one at least, as fewer could be any error."""
    x = attend(head)
    return pad_sum(x, np.full(x.lse.shape, math.log(max(count, 1.0))))


def _list_places(problem: Problem) -> Iterator[Alternative]:
    """List other heads, queries and keys that may be read."""
    n, m, _ = problem.shape
    for words, by in (("the query before", -1), ("the next query", 1)):

        def of_query(rows: Rows, by: int = by) -> Rows:
            return rows._replace(queries=np.clip(rows.queries + by, 0, n - 1))

        yield Alternative(f"each row holds the output of {words}", problem, move=of_query)
    for size in (x for x in _WRAPS if x < max(n, m)):
        for names, key in (("q", "query i"), ("kv", "key j")):
            text = f"row {key[-1]} % {size} of {' and '.join(names)} is used for {key}"
            # Copies of the first keys have the weights of these alone.
            again = read_rows_at(problem, names, partial(lambda size, x: x % size, size))
            yield Alternative(text, again, plain=names == "q")
    if len(problem.lead) and problem.lead[-1] > 1:
        # Keys alone: with their values as well, only the order of the sum would change.
        reverse = problem.replaced("k", lambda _, x: x[::-1])
        yield Alternative("keys are read in reverse order", reverse)
    d, d_v = (problem.first[x].shape[-1] for x in "kv")
    reads = {"q and k are swapped": {"q": "k", "k": "q"}} if n == m else {}
    reads |= {"k is used as v": {"v": "k"}, "v is used as k": {"k": "v"}} if d == d_v else {}
    for text, others in reads.items():
        yield Alternative(text, problem._replace(read=partial(_rename, problem, others)))
    yield from _list_across(problem)
    yield from list_overlapping(problem)
    for width in sorted({x for x in (16, 32, 64, 128, 256) if x < d}):
        cut = partial(lambda width, _, x: np.where(np.arange(d) < width, x, 0.0), width)
        text = f"q . k sums the first {width} channels only"
        yield Alternative(text, problem.replaced("q", cut))
    for size in (x for x in PADDED_TO if x < m):
        for words, factor in (("log2(e)", _LOG2E), ("the scale", problem.scale)):
            # A factor on keys is one on their scores.
            grow = partial(
                lambda size, by, _, x: x * (by ** (np.arange(m) // size))[:, None], size, factor
            )
            text = f"the scale is multiplied by {words} again for each tile of {size} keys"
            yield Alternative(text, problem.replaced("k", grow))
    yield from list_strides(problem)
    yield from list_row_strides(problem)
    yield from list_narrow(problem)
    yield from list_scales(problem)
    yield from list_undivided(problem)


def _list_across(problem: Problem) -> Iterator[Alternative]:
    """List kernels that take the tokens for the heads, or the batch members: axes are confused."""
    if problem.packed is not None or problem.shape[0] != problem.shape[1]:
        return
    for axis, length in enumerate(problem.lead):
        if length > 1:
            one = "heads" if axis == len(problem.lead) - 1 else "batch members"
            text = f"attention runs over the {one} of the same token, not over the tokens of a head"
            yield Alternative(text, problem, answer=partial(_attend_across, problem, axis))


def _attend_across(problem: Problem, axis: int, rows: Rows) -> Result:
    """Let the tokens of a head see those of all heads, or batch members, in the same place."""
    at, own, i = rows.at, problem.read(rows.at), rows.queries
    last = axis == len(at) - 1
    shared = problem.lead[-1] // problem.key_heads if last and problem.key_heads else 1
    every = [
        problem.read((*at[:axis], x, *at[axis + 1 :])) for x in range(0, problem.lead[axis], shared)
    ]
    k, v = (np.stack([x[name][i] for x in every], 1) for name in "kv")
    s = problem.scale * np.sum(own["q"][i][:, None] * k, -1)
    lse = np.logaddexp.reduce(s, -1)
    out = np.sum(np.exp(s - lse[:, None])[..., None] * v, 1)
    return Result(out, lse, np.max(s, -1))


def _rename(problem: Problem, names: Mapping[str, str], index: Index) -> Mapping[str, Any]:
    """Read arrays in the place of others."""
    arrays = problem.read(index)
    return {**arrays, **{x: arrays[y] for x, y in names.items()}}
