"""Kernels that go wrong between the scores and the result, and wrong log normalisers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from ....arrays.blocks import blocks
from ....arrays.library import Doubles
from ...rounding.formats import FORMATS, Format
from ...rounding.head import SoftmaxHead, scan_tile
from ...rounding.problems import Problem
from .sampled import Alternative, Place, Result, Seen, attend, pad_sum, show_band
from .wrong_rows import finite

TILE_SIZES = (16, 32, 64, 128, 256)  # keys that kernels take at a time
_ODD_TILES = (48, 96, 1)  # the same, more seldom
PARTS = (2, 3, 4, 6, 8, 16)
_PART_SIZES = (64, 128, 256, 512, 1024)  # keys of each part but the last
LOST_TILES = TILE_SIZES[::-1]
_LAGS = (8, 4, 2, 1)  # bits by which a maximum may grow before sums are rescaled
_MOST_SCORE = 300.0  # of other keys, less the log normaliser: then their weights stay finite
_LOG_OF_ZERO = math.log(2.0**-149)  # the exponential of what is below is 0 in float32
_LOG_OF_MOST = math.log(FORMATS["float32"].largest)  # and infinite above


def list_slips(problem: Problem) -> Iterator[Alternative]:
    """List kernels that compute in the wrong way."""
    keys = problem.shape[1]
    for size in (x for x in (*TILE_SIZES, *_ODD_TILES) if x < keys):
        for (words, of_sum, of_out), (how, power) in product(_RUNNING, _RESCALED.items()):
            if power == _FROM_BEFORE and keys <= 2 * size:  # the first tile is lost, no more
                continue
            text = f"{words} {how} when the maximum grows ({_name_tiles(size)})"
            power_of_sum, power_of_out = (power if x else 1 for x in (of_sum, of_out))
            compute = partial(attend_in_tiles, size=size, of_sum=power_of_sum, of_out=power_of_out)
            yield Alternative(text, problem, compute=compute)
    for size in (x for x in TILE_SIZES if x < keys):
        for words, turn in (("", 1), (", the last first", -1)):
            text = "the running maximum and sum restart in the second tile, the output does not"
            again = partial(_restart, size=size, turn=turn)
            yield Alternative(f"{text} (tiles of {size} keys{words})", problem, compute=again)
        text = (
            f"the last tile of {size} keys that a query sees is not rescaled from its own maximum"
        )
        own = partial(_keep_last_maximum, size=size)
        yield Alternative(f"{text} to that of all", problem, compute=own)
        for words, often in (("", 0), (", and at the end", 1)):
            divided = partial(_divide_at_tiles, size=size, often=often)
            text = f"the output is divided by the running sum after each tile of {size} keys{words}"
            yield Alternative(text, problem, compute=divided)
        text = f"weights of each tile of {size} keys are divided by the running sum up to it"
        early = partial(_divide_by_running, size=size)
        yield Alternative(f"{text}, not by that of all", problem, compute=early)
        # 448 is the largest number of float8_e4m3fn: weights that are stored times 2^8 leave its
        # range above 448 / 2^8.
        past = f"weights relative to the maximum of earlier tiles ({size} keys)"
        text = f"{past} are clipped at 448 / 2^8"
        yield Alternative(text, problem, compute=partial(_cut_weights, size=size, most=448 / 2**8))
        for bits in _LAGS:
            old = f"the old maximum is kept if it grows by {bits} bits or less ({size} keys), "
            text = f"{old}and weights relative to it are clipped at 448 / 2^8"
            cut = partial(_cut_weights, size=size, most=448 / 2**8, bits=bits)
            yield Alternative(text, problem, compute=cut)
            text = f"{old}but weights are relative to the new one"
            yield Alternative(text, problem, compute=partial(_keep_maximum, size=size, bits=bits))
        text = f"the output overflows float16 before it is divided (tiles of {size} keys)"
        yield Alternative(text, problem, compute=partial(_overflow_in_tiles, size=size))
    for called, edges in list_parts(problem):
        for words, weigh in (MERGED_PARTS | _SUMS).items():
            merge = partial(merge_parts, edges=edges, weigh=weigh, is_mean=words in MERGED_PARTS)
            yield Alternative(f"{called} are merged {words}", problem, compute=merge)
    # A maximum may start at a number instead of -inf, and that may be above all scores.
    before = "-5e4 for q . k before the scale"
    banded = problem.causal or problem.window != (None, None) or "mask" in problem.first
    # Only what hides keys can hide a whole first tile.
    sizes = [x for x in TILE_SIZES if x < keys and banded]
    for size, turn, name in product(sizes, (1, -1), ("bfloat16", "float16")):
        text = "the running maximum is 0 after a first tile that is hidden, so small weights vanish"
        text += f" (tiles of {size} keys{', the last first' * (turn < 0)}; weights in {name})"
        start = partial(_start_if_hidden, size=size, turn=turn, to=FORMATS[name])
        yield Alternative(text, problem, compute=start)
    for words, least in (("0", 0.0), ("-5e4", -5e4), (before, -5e4 * problem.scale)):
        text = f"the running maximum starts at {words}, so small weights vanish"
        yield Alternative(text, problem, compute=partial(attend_from, least=least))
        for name in ("float16", "bfloat16") if not least else ():
            rounded = partial(attend_from, least=least, to=FORMATS[name])
            yield Alternative(f"{text} (weights in {name})", problem, compute=rounded)
    for name in ("float32", "float16"):
        words = f"no maximum is subtracted, and e^score overflows {name}"
        yield Alternative(words, problem, compute=partial(attend_plainly, to=FORMATS[name]))
    for words, factor in _RESULT_FACTORS.items():
        yield Alternative(words, problem, compute=partial(_rescale_rows, factor=factor))
    yield Alternative("weights are the scores themselves (no softmax)", problem, compute=_linear)
    yield Alternative("q . k overflows float16 (beyond 65504)", problem, compute=_overflow)
    if problem.has_sinks:
        text = "e^sink is added to the sum of e^(score - largest score), not e^(sink - largest)"
        yield Alternative(text, problem, compute=_add_sink_to_shifted)
    if problem.softcap is not None:
        without = problem._replace(softcap=None)
        for words, cap in _CAPS.items():
            change = partial(_map_scores, change=partial(cap, problem.softcap))
            yield Alternative(words, without, compute=change)
        twice = partial(_cap_twice, cap=problem.softcap)
        yield Alternative("the cap is applied before and after the mask", problem, compute=twice)
        capped = partial(_map_scores, change=partial(_cap_scores, problem.softcap))
        if "bias" in problem.first:
            after = partial(capped, with_bias=True)
            yield Alternative("the cap is applied after the bias", without, compute=after)
        if problem.has_sinks:
            also = partial(capped, with_sink=True)
            yield Alternative("the sink is also capped", without, compute=also)
    for size in (x for x in TILE_SIZES if x < keys):
        text = "the maximum is taken per tile, and the factor of the earlier sums overflows"
        again = partial(_reset_maximum, size=size)
        yield Alternative(f"{text} float32 (tiles of {size} keys)", problem, compute=again)
    for size in (128, 256):
        yield Alternative(
            f"the sum of the weights stays at {size}, as sums of ones in 8 bits do",
            problem,
            compute=partial(_saturate, most=float(size)),
        )


def _name_tiles(size: int) -> str:
    return f"tiles of {size} keys" if size > 1 else "one key at a time"


def score_all(head: SoftmaxHead) -> Doubles:
    """Compute the scores of all queries and keys; -inf where a key is hidden."""
    found = []
    for j in head.blocks(len(head.k) or 1):
        tile = scan_tile(head, slice(0, len(head.q)), j)
        shape = len(head.q), j.stop - j.start
        if tile is None:
            found.append(np.full(shape, -math.inf))
        elif tile.visible is None:
            found.append(np.broadcast_to(tile.scores, shape))
        else:
            found.append(np.where(tile.visible, tile.scores, -math.inf))
    return np.concatenate(found, -1) if found else np.zeros((len(head.q), 0))


def _over(scores: Doubles, top: Doubles) -> Doubles:
    """Compute weights over the largest, of a row or for each key."""
    safe = np.where(np.isfinite(top), top, 0.0)
    return np.asarray(np.exp(scores - safe.reshape(len(scores), -1)))


def _weigh_scores(scores: Doubles) -> tuple[Doubles, Doubles]:
    """Compute weights over the largest, and the largest scores."""
    top = np.max(scores, -1, initial=-math.inf)
    return _over(scores, top), top


def weigh_keys(head: SoftmaxHead, lse: Doubles | None = None) -> Doubles:
    """Compute weights of keys, (queries, keys), with log normalisers of their own or of others."""
    own = attend(head).lse if lse is None else lse
    return np.exp(np.minimum(score_all(head)[:, : head.keys] - own[:, None], _MOST_SCORE))


def weigh_with_hidden(head: SoftmaxHead) -> tuple[Result, Doubles]:
    """Compute the result, and weights over its sums of all keys, of hidden ones, too."""
    exact = attend(head)
    return exact, weigh_keys(head._replace(mask=None), exact.lse)


def attend_by(scores: Doubles, v: Doubles) -> Result:
    """Compute the mean of the values by these scores."""
    w, top = _weigh_scores(scores)
    return _result(w @ v, np.sum(w, -1), top)


def _result(out: Doubles, total: Doubles, top: Doubles) -> Result:
    divisor = np.where(total == 0, 1.0, total)[:, None]
    with np.errstate(all="ignore"):
        return Result(out / divisor, np.log(total) + np.where(np.isfinite(top), top, 0.0), top)


_RUNNING = (  # what is rescaled in a wrong way: the sum, the output
    ("the running sums are", True, True),
    ("the running output is", False, True),
    ("the running sum of the weights is", True, False),
)
_FROM_BEFORE = 2
_RESCALED = {  # power of the right factor by which it is multiplied, or another factor
    "not rescaled": 0,
    "divided, not multiplied, by e^(old - new maximum)": -1,
    "rescaled from the maximum one tile before the old one": _FROM_BEFORE,
}


def attend_in_tiles(head: SoftmaxHead, size: int, of_sum: int, of_out: int) -> Result:
    """Sum in tiles of keys; sums are multiplied by a power of the factor when the maximum grows."""
    s = score_all(head)
    tops = np.maximum.accumulate(_find_tops(s, size), -1)
    last, own = tops[:, -1:], _of_keys(tops, s, size)
    # Weights whose factor e^(old - new maximum) is applied (1), left out (0) or inverted (-1).
    w = {1: _over(s, last), 0: _over(s, own)}
    if -1 in (of_sum, of_out):
        w[-1] = _over(s, 2 * finite(own) - finite(last))
    if _FROM_BEFORE in (of_sum, of_out):
        before = np.pad(tops[:, :-1], ((0, 0), (1, 0)), constant_values=-math.inf)
        more = before - finite(before[:, -1:])  # of factors to the last tile, which has none
        more[:, -1] = 0.0
        w[_FROM_BEFORE] = w[1] * _of_keys(np.exp(more), s, size)
    return _result(w[of_out] @ head.v, np.sum(w[of_sum], -1), tops[:, -1])


def _find_tops(s: Doubles, size: int) -> Doubles:
    """Find the largest score in each tile, (rows, tiles)."""
    return np.asarray(np.maximum.reduceat(s, np.arange(0, s.shape[-1], size), -1))


def _of_keys(x: Doubles, s: Doubles, size: int) -> Doubles:
    """Repeat numbers of tiles (rows, tiles) for each key, as scores are."""
    return np.asarray(np.repeat(x, size, -1)[:, : s.shape[-1]])


def _restart(head: SoftmaxHead, size: int, turn: int) -> Result:
    """Forget the maximum and the sum of the first tile that a query sees, but not its output."""
    s = score_all(head)
    tops = _find_tops(s, size)
    number = np.repeat(np.arange(tops.shape[-1])[::turn], size)[: s.shape[-1]]
    tops, rows = tops[:, ::turn], np.arange(len(s))
    first = np.argmax(np.isfinite(tops), -1)
    own, other = tops[rows, first], tops[rows, np.minimum(first + 1, tops.shape[-1] - 1)]
    twice = np.isfinite(other) & (first + 1 < tops.shape[-1])
    forgotten = twice[:, None] & (number == first[:, None])
    late = np.where(forgotten, -math.inf, s)
    top = np.max(late, -1, initial=-math.inf)
    # What the first tile added to the output is not rescaled from its maximum to the second.
    moved = np.where(twice, finite(other) - finite(own), 0.0)[:, None]
    return _result(
        _over(np.where(forgotten, s + moved, s), top) @ head.v, np.sum(_over(late, top), -1), top
    )


def _keep_last_maximum(head: SoftmaxHead, size: int) -> Result:
    """Let weights of the tile of the last key that a query sees be relative to its maximum."""
    s = score_all(head)
    keys = s[:, : head.keys]
    last = head.keys - 1 - np.argmax(np.isfinite(keys[:, ::-1]), -1)
    at_end = np.arange(s.shape[-1]) // size == last[:, None] // size
    at_end &= np.arange(s.shape[-1]) < head.keys
    top = np.max(s, -1, initial=-math.inf)
    own = np.max(np.where(at_end, s, -math.inf), -1, initial=-math.inf)
    return attend_by(s + np.where(at_end, finite(top - own)[:, None], 0.0), head.v)


def _divide_at_tiles(head: SoftmaxHead, size: int, often: int) -> Result:
    """Divide the sum of the values by that of the weights after each tile, and so often after."""
    s = score_all(head)
    starts = np.arange(0, s.shape[-1], size)
    tops = np.maximum.accumulate(_find_tops(s, size), -1)
    # Logs of the running sums, over their maxima: what earlier sums are divided by.
    total = np.logaddexp.accumulate(np.logaddexp.reduceat(s, starts, -1), -1) - finite(tops)
    by = np.where(np.isfinite(total), total, 0.0)
    later = np.cumsum(by[:, ::-1], -1)[:, ::-1] + often * by[:, -1:]
    return attend(head)._replace(
        out=np.exp(s - finite(tops[:, -1:]) - _of_keys(later, s, size)) @ head.v
    )


def _divide_by_running(head: SoftmaxHead, size: int) -> Result:
    """Divide weights by the sum of those up to their tile."""
    s = score_all(head)
    tiles = np.logaddexp.reduceat(s, np.arange(0, s.shape[-1], size), -1)
    total = _of_keys(np.logaddexp.accumulate(tiles, -1), s, size)
    return attend(head)._replace(out=np.exp(s - finite(total)) @ head.v)


def _keep_tops(tops: Doubles, bits: float) -> tuple[Doubles, Doubles]:
    """Return the running maximum of each tile, and that which is kept if it grows by a few bits."""
    new, kept = tops.copy(), tops.copy()
    for t in range(1, tops.shape[-1]):
        new[:, t] = np.maximum(kept[:, t - 1], tops[:, t])
        grown = new[:, t] > kept[:, t - 1] + bits * math.log(2)
        kept[:, t] = np.where(grown, new[:, t], kept[:, t - 1])
    return new, kept


def _keep_maximum(head: SoftmaxHead, size: int, bits: float) -> Result:
    """Sum in tiles of keys over a maximum that is kept; weights are over the new one."""
    s = score_all(head)
    new, kept = _keep_tops(_find_tops(s, size), bits)
    w = _over(s + _of_keys(finite(kept - new), s, size), kept[:, -1])
    return _result(w @ head.v, np.sum(w, -1), kept[:, -1])


def _cut_weights(head: SoftmaxHead, size: int, most: float, bits: float | None = None) -> Result:
    """Cut weights over a maximum that is one tile late, or kept, in the output alone."""
    s = score_all(head)
    tops = np.maximum.accumulate(_find_tops(s, size), -1)
    late = np.concatenate([tops[:, :1], tops[:, :-1]], -1)
    late = late if bits is None else _keep_tops(_find_tops(s, size), bits)[1]
    limit = _of_keys(late, s, size) + math.log(most)
    # Before the first visible tile there is no maximum to be relative to.
    limit = np.where(np.isfinite(limit), limit, math.inf)
    out = _over(np.minimum(s, limit), tops[:, -1]) @ head.v
    return _result(out, np.sum(_over(s, tops[:, -1]), -1), tops[:, -1])


def list_parts(problem: Problem) -> Iterator[tuple[str, tuple[int, ...]]]:
    """List parts of the keys that may be merged, with the first key of each."""
    n, m, _ = problem.shape
    for parts in (x for x in PARTS if x < m):
        yield f"{parts} parts of the keys", tuple(range(0, m, -(-m // parts)))
    for size in (x for x in _PART_SIZES if x < m and (m % x or m // x not in PARTS)):
        yield f"parts of {size} keys", tuple(range(0, m, size))
    if 1 < n < m:
        yield f"keys before the first query (0 to {m - n - 1}) and the other keys", (0, m - n)


def merge_parts(
    head: SoftmaxHead, edges: Sequence[int], weigh: Callable[..., Doubles], is_mean: bool
) -> Result:
    """Merge parts of the keys with weights by their normalisers and maxima."""
    s = score_all(head)
    found: list[Result] = []
    for j in map(slice, edges, [*edges[1:], s.shape[-1]]):
        top = np.max(s[:, j], -1)
        w = _over(s[:, j], top)
        found.append(_result(w @ head.v[j], np.sum(w, -1), top))
    outs, lse, tops = (np.stack(x) for x in zip(*found, strict=True))
    weights = weigh(lse, tops)
    weights = weights / np.sum(weights, 0) if is_mean else weights
    return attend(head)._replace(out=np.sum(weights[..., None] * outs, 0))


MERGED_PARTS: dict[str, Callable[[Doubles, Doubles], Doubles]] = {
    "with equal weights": lambda lse, top: np.where(np.isfinite(lse), 1.0, 0.0),
    "with weights e^(largest score), not e^lse": lambda lse, top: np.exp(top - np.max(top, 0)),
    "with weights 2^lse, not e^lse": lambda lse, top: np.exp2(lse - np.max(lse, 0)),
    "with weights e^lse, where lse is in base 2": lambda lse, top: np.exp(
        math.log2(math.e) * (lse - np.max(lse, 0))
    ),
    "with weights lse, not e^lse": lambda lse, top: finite(lse),
    "with weights e^(lse - largest score), not e^lse": lambda lse, top: np.exp(finite(lse - top)),
}
_SUMS: dict[str, Callable[[Doubles, Doubles], Doubles]] = {
    "without weights: outputs are added": lambda lse, top: np.where(np.isfinite(lse), 1.0, 0.0),
    "and divided by their number, not by the sum of their weights": lambda lse, top: (
        np.exp(lse - np.max(lse, 0)) / len(lse)
    ),
    "and not divided by the sum of their weights": lambda lse, top: np.exp(lse - np.max(lse, 0)),
}

_RESULT_FACTORS: Mapping[str, Callable[[Result, Any], Doubles]] = {
    "the output is not divided by the sum of the weights": lambda x, _: np.exp(x.lse - x.top),
    "the output is not divided by the sum of e^score": lambda x, _: np.exp(x.lse),
    "the output is divided twice by the sum of the weights": lambda x, _: np.exp(x.top - x.lse),
    "the output is divided by the number of keys, not by the sum of the weights": (
        lambda x, count: np.exp(x.lse - x.top) / count
    ),
    "the output is also divided by the number of keys": lambda x, count: 1 / count,
}


def _rescale_rows(head: SoftmaxHead, factor: Callable[[Result, Any], Doubles]) -> Result:
    """Multiply each row by what is wrong in its normaliser."""
    x = attend(head)
    count = np.full(len(head.q), head.keys) if head.mask is None else np.sum(head.mask, -1)
    by = np.where(np.isfinite(x.lse), factor(x, np.maximum(count, 1)), 0.0)
    return x._replace(out=x.out * by[:, None])


def _linear(head: SoftmaxHead) -> Result:
    s = score_all(head)
    return attend(head)._replace(out=np.where(np.isfinite(s), s, 0.0) @ head.v)


def attend_from(head: SoftmaxHead, least: float, to: Format | None = None) -> Result:
    """Start the maximum at a number: weights of float32 below it vanish, or are rounded after."""
    s = score_all(head)
    top = np.maximum(np.max(s, -1, initial=-math.inf), least)
    w = np.where(s - top[:, None] < _LOG_OF_ZERO, 0.0, np.exp(s - top[:, None]))
    kept = w if to is None else np.where(w < to.tiny, to.round(w), w)  # small ones are coarse
    return _result(kept @ head.v, np.sum(w, -1), top)


def _start_if_hidden(head: SoftmaxHead, size: int, turn: int, to: Format) -> Result:
    """Start the maximum at 0 where a query does not see the first tile."""
    hidden = np.isneginf(_find_tops(score_all(head), size)[:, ::turn][:, 0])
    x, low = attend(head), attend_from(head, 0.0, to)
    out = np.where(hidden[:, None], low.out, x.out)
    return x._replace(out=out, lse=np.where(hidden, low.lse, x.lse))


def attend_plainly(head: SoftmaxHead, to: Format) -> Result:
    """Subtract no maximum."""
    s = score_all(head)
    largest, least = math.log(to.largest), math.log(to.tiny * to.unit)
    w = np.where(s > largest, math.inf, np.where(s < least, 0.0, np.exp(np.minimum(s, largest))))
    total = np.sum(w, -1)
    total = np.where(total > to.largest, math.inf, total)
    lost = np.any(np.isinf(w), -1, keepdims=True)
    out = np.where(lost, math.nan, np.where(lost, 0.0, w) @ head.v)
    return _result(out, total, 0 * total)


def _reset_maximum(head: SoftmaxHead, size: int) -> Result:
    """Rescale sums from the maximum of one tile to that of the next: NaN where e^x overflows."""
    s, exact = score_all(head), attend(head)
    tops = _find_tops(s, size)
    sums = np.logaddexp.accumulate(
        np.logaddexp.reduceat(s, np.arange(0, s.shape[-1], size), -1), -1
    )
    # What may overflow: the factor e^(old - new maximum), or the sums that it has rescaled.
    moved = np.maximum(tops[:, :-1] - tops[:, 1:], sums[:, 1:] - tops[:, 1:])
    seen = np.isfinite(tops[:, :-1]) & np.isfinite(tops[:, 1:])
    lost = np.any(seen & (moved > _LOG_OF_MOST), -1)
    out = np.where(lost[:, None], math.nan, exact.out)
    return exact._replace(out=out, lse=np.where(lost, math.nan, exact.lse))


def _overflow(head: SoftmaxHead) -> Result:
    """Let products beyond float16 be infinite: NaN where a key has infinity, not -infinity."""
    products = head.q @ head.k[: head.keys].T * np.sign(head.scale)
    hidden = np.zeros_like(products, bool) if head.mask is None else ~head.mask
    most = FORMATS["float16"].largest
    exact = attend(head._replace(mask=~hidden & (products > -most)))
    lost = np.any(~hidden & (products > most), -1, keepdims=True)
    return exact._replace(out=np.where(lost, math.nan, exact.out))


def _overflow_in_tiles(head: SoftmaxHead, size: int) -> Result:
    """Sum the output in float16, by tiles of keys, and divide it by the sum of the weights."""
    exact, to = attend(head), FORMATS["float16"]
    # Weights are at most 1: a sum that is smaller even so cannot overflow.
    if np.max(np.abs(head.v), initial=0.0) * len(head.k) <= to.largest:
        return exact
    s = score_all(head)
    tops = np.maximum.accumulate(_find_tops(s, size), -1)
    out, last = 0 * exact.out, tops[:, :1]
    for j, top in zip(blocks(0, s.shape[-1], size), tops.T[..., None], strict=True):
        out = to.round(out * np.exp(finite(last - top)) + _over(s[:, j], top) @ head.v[j])
        last = top
    return exact._replace(out=np.where(np.isfinite(out), exact.out, out))


def _add_sink_to_shifted(head: SoftmaxHead) -> Result:
    """Add the weight of the sink as if the largest score of the keys were 0."""
    x = attend(head._replace(k=head.k[: head.keys], v=head.v[: head.keys], sink=None))
    return x if head.sink is None else pad_sum(x, head.sink + x.top, -math.inf)


_OVERFLOWS = "the cap overflows: tanh(s / cap) is computed from"
_CAPS: Mapping[str, Callable[[float, Doubles], Doubles]] = {
    "the cap is s tanh(s / cap), not cap tanh(s / cap)": lambda cap, s: s * np.tanh(s / cap),
    "the cap is tanh(s / cap), not multiplied by cap": lambda cap, s: np.tanh(s / cap),
    "the cap is (s / cap) tanh(s / cap), not cap tanh(s / cap)": (
        lambda cap, s: s / cap * np.tanh(s / cap)
    ),
    "the cap is cap tanh(s), with s not divided by cap": lambda cap, s: cap * np.tanh(s),
    "scores are clipped at the cap, without tanh": lambda cap, s: np.clip(s, -cap, cap),
    "the cap is applied twice": lambda cap, s: cap * np.tanh(np.tanh(s / cap)),
    f"{_OVERFLOWS} e^(s / cap) in float32": lambda cap, s: _cap_below(_LOG_OF_MOST, cap, s),
    f"{_OVERFLOWS} e^(2 s / cap) in float32": lambda cap, s: _cap_below(_LOG_OF_MOST / 2, cap, s),
}


def _cap_below(most: float, cap: float, s: Doubles) -> Doubles:
    return np.where(np.abs(s) > most * cap, math.nan, _cap_scores(cap, s))


def _cap_scores(cap: float, s: Doubles) -> Doubles:
    return cap * np.tanh(s / cap)


def _map_scores(
    head: SoftmaxHead,
    change: Callable[[Doubles], Doubles],
    with_bias: bool = False,
    with_sink: bool = False,
) -> Result:
    """Change scores of keys before their bias is added, or with it; and the sink, if this is so."""
    whole = score_all(head)
    bare = whole if with_bias else score_all(head._replace(bias=None))
    changes = np.isfinite(whole) & (with_sink | (np.arange(whole.shape[-1]) < head.keys))
    # The difference of both scores is the bias, which is added after the change.
    return attend_by(np.where(changes, whole - bare + change(finite(bare)), whole), head.v)


def _cap_twice(head: SoftmaxHead, cap: float) -> Result:
    """Cap scores, hide keys, and cap again: hidden keys have the score -cap."""
    s = score_all(head).copy()
    keys = slice(0, head.keys)
    s[:, keys] = _cap_scores(cap, s[:, keys])
    return attend_by(s, head.v)


def _saturate(head: SoftmaxHead, most: float) -> Result:
    w, top = _weigh_scores(score_all(head))
    return _result(w @ head.v, np.minimum(np.sum(w, -1), most), top)


def hide_tile(problem: Problem, j: slice) -> Alternative:
    """Hide a tile of keys from all queries."""
    band = show_band(problem)

    def seen(x: Place) -> Seen:
        return np.asarray(band(x) & ((x.j < j.start) | (x.j >= j.stop)))

    return Alternative(name_keys(j, "are left out"), problem, seen)


def name_keys(j: slice, words: str, one: str = "key", several: str = "keys") -> str:
    """Say something of one key, or of several."""
    if j.stop - j.start > 1:
        return f"{several} {j.start} to {j.stop - 1} {words}"
    return f"{one} {j.start} {words.replace('count', 'counts', 1).replace('are', 'is', 1)}"


def weigh_with_zeros(head: SoftmaxHead) -> tuple[Doubles, Doubles, Doubles]:
    """Compute weights, those if all keys were 0, and the largest scores."""
    w, top = _weigh_scores(score_all(head))
    return w, _over(score_all(head._replace(k=np.zeros_like(head.k))), top), top


def leave_without_tile(head: SoftmaxHead, j: slice, loss: tuple[float, float, float]) -> Result:
    w, zero, top = weigh_with_zeros(head)
    of_sum, of_out, of_zero = loss
    out = w @ head.v + of_out * (w[:, j] @ head.v[j])
    more = of_sum * np.sum(w[:, j], -1) + of_zero * np.sum(zero[:, j], -1)
    return _result(out, np.sum(w, -1) + more, top)


LOSSES: Mapping[str, tuple[float, float, float]] = {  # of weights in both sums; and of zeros
    "are left out": (-1.0, -1.0, 0.0),
    "count twice": (1.0, 1.0, 0.0),
    "count in the sum of the weights only": (0.0, -1.0, 0.0),
    "are read as 0 (score 0, value 0)": (-1.0, -1.0, 1.0),
}

NORMALISERS: Mapping[str, Callable[[Result, float | None], Any]] = {
    "in base 2 (multiplied by log2(e))": lambda x, _: x.lse * math.log2(math.e),
    "multiplied by ln(2)": lambda x, _: x.lse * math.log(2),
    "negated": lambda x, _: -x.lse,
    "the largest score": lambda x, _: x.top,
    "the log of the sum alone, without the largest score": lambda x, _: x.lse - x.top,
    "the log of the sum without the sink": lambda x, sink: take_sink(x.lse, sink),
    "the sum itself, not its logarithm": lambda x, _: np.exp(x.lse),
    "in base 10": lambda x, _: x.lse / math.log(10),
    "twice as large": lambda x, _: 2 * x.lse,
    "the running maximum where all weights vanish": lambda x, _: np.where(
        np.isneginf(x.lse), x.top, x.lse
    ),
    "the largest score in base 2 plus the log of the sum in base e": lambda x, _: (
        x.lse + (math.log2(math.e) - 1) * x.top
    ),
    "the largest score plus the log of the sum in base 2": lambda x, _: (
        x.lse + (math.log2(math.e) - 1) * (x.lse - x.top)
    ),
}


def fit_normalisers(
    pairs: Sequence[tuple[Doubles, Doubles]],
) -> Iterator[tuple[str, Callable[[Result, float | None], Any]]]:
    """Fit a factor of log normalisers, if one number that is added to all does not fit better."""
    got, exact = np.concatenate([np.zeros((2, 0)), *map(np.stack, pairs)], -1)
    known = np.isfinite(got) & np.isfinite(exact)
    got, exact = got[known], exact[known]
    if size := float(exact @ exact):
        c = float(got @ exact) / size
        # A factor is named only if it leaves less than a common offset does.
        if np.sum(np.square(got - c * exact)) < np.var(got - exact) * len(got):
            yield f"{c:.5g} times what it should be", lambda x, _: c * x.lse


def take_sink(lse: Doubles, sink: float | None) -> Doubles:
    if sink is None:
        return lse
    return np.asarray(lse + np.log1p(-np.exp(np.minimum(sink - lse, 0.0))))
