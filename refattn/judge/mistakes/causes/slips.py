"""Kernels that go wrong between the scores and the result, and wrong log normalisers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import product
from typing import Any

import numpy as np

from ....arrays.blocks import blocks
from ....arrays.library import Doubles
from ...rounding.formats import FORMATS, Format
from ...rounding.head import SoftmaxHead, scan_tile
from ...rounding.problems import Problem
from ..text import Edit
from .sampled import Alternative, Place, Result, Seen, attend, pad_sum, show_band
from .wrong_rows import finite

TILE_SIZES = (16, 32, 64, 128, 256)  # keys that kernels take at a time
_ODD_TILES = (48, 96, 1)  # the same, more seldom
PARTS = (2, 3, 4, 6, 8, 16)
_PART_SIZES = (64, 128, 256, 512, 1024)  # keys of each part but the last
_LAGS = (8, 4, 2, 1)  # bits by which a maximum may grow before sums are rescaled
_MOST_SCORE = 300.0  # of other keys, less the log normaliser: then their weights stay finite
_LOG_OF_ZERO = math.log(2.0**-149)  # the exponential of what is below is 0 in float32
_LOG_OF_MOST = math.log(FORMATS["float32"].largest)  # and infinite above


def list_slips(problem: Problem) -> Iterator[Alternative]:
    """List kernels that compute in the wrong way."""
    keys = problem.shape[1]
    for size, (words, edits) in product((*TILE_SIZES, *_ODD_TILES), _list_edits(keys).items()):
        # The sums from before the first tile are 0: two tiles of which the first is lost, no more.
        few = _BEFORE in words and keys <= 2 * size
        if size < keys and not few and (size in TILE_SIZES or "when the maximum grows" in words):
            text = words.format(size).replace("tiles of 1 keys", "one key at a time")
            tiles = partial(
                attend_in_tiles, size=size, edits=edits, turn=-1 if _LAST in words else 1
            )
            yield Alternative(text, problem, compute=tiles)
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
    for size in (128, 256):
        yield Alternative(
            f"the sum of the weights stays at {size}, as sums of ones in 8 bits do",
            problem,
            compute=partial(_saturate, most=float(size)),
        )


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


# A running softmax, in which mistakes are edits. Sums are 0 before a tile that has a visible key.
_TILES = """
def attend(s, v, size, turn):
    top = before = np.full((len(s), 1), -np.inf)
    total, out, seen = np.zeros((len(s), 1)), np.zeros((len(s), v.shape[-1])), 0
    for j in [*blocks(0, s.shape[-1], size)][::turn]:
        own = np.max(s[:, j], -1, keepdims=True)
        old, new = top, np.maximum(top, own)
        base, shrink = new, exp(old - new)
        w = exp(s[:, j] - base)
        total = shrink * total + np.sum(w, -1, keepdims=True)
        out = shrink * out + w @ v[j]
        before, top, seen = old, new, seen + (own > -np.inf)
    return out / some(total), np.log(total) + some(top, 0), top
"""
_SUM, _OUT, _QUOTIENT = "shrink * total", "shrink * out", "out / some(total)"
_NEW, _ADDED, _FACTOR = "np.maximum(top, own)", "shrink * out + w @ v[j]", "exp(old - new)"
_BEFORE, _LAST = "one tile before the old one", ", the last first"
_RUNNING = {  # what is rescaled in a wrong way
    "the running sums are": (_SUM, _OUT),
    "the running output is": (_OUT,),
    "the running sum of the weights is": (_SUM,),
}
_RESCALED = {  # by what it is multiplied
    "not rescaled": "1",
    "divided, not multiplied, by e^(old - new maximum)": "1 / some(shrink)",
    f"rescaled from the maximum {_BEFORE}": "exp(before - new)",
}
_RESTARTED = "(seen == 1) & (own > -np.inf)"
_KEPT = "np.where(np.maximum(top, own) > top + {bits} * math.log(2), np.maximum(top, own), top)"
_CLIPPED = "shrink * out + np.minimum(exp(s[:, j] - {}), 1.75) * exp({} - new) @ v[j]"
Edits = tuple[tuple[str, str], ...]


@cache
def _list_edits(keys: int) -> Mapping[str, Edits]:
    """List mistakes of a running softmax in tiles of so many keys: words, and edits of the text."""
    found: dict[str, Edits] = {
        f"{words} {how} when the maximum grows (tiles of {{}} keys)": tuple(
            (x, x.replace("shrink", factor)) for x in lines
        )
        for (words, lines), (how, factor) in product(_RUNNING.items(), _RESCALED.items())
    }
    restart = "the running maximum and sum restart in the second tile, the output does not"
    again = (
        (_NEW, f"np.where({_RESTARTED}, own, {_NEW})"),
        (_SUM, f"np.where({_RESTARTED}, 0, {_SUM})"),
        (_OUT, f"np.where({_RESTARTED}, 1, shrink) * out"),
    )
    found |= {f"{restart} (tiles of {{}} keys{x})": again for x in ("", _LAST)}
    late = f"np.isfinite(s[:, j.stop : {keys}]).any(-1, keepdims=True)"
    text = "the last tile of {} keys that a query sees is not rescaled from its own maximum"
    found[f"{text} to that of all"] = (
        ("base, shrink = new", f"base, shrink = np.where({late}, new, own)"),
    )
    text = "the output is divided by the running sum after each tile of {} keys"
    divided = (_ADDED, f"({_ADDED}) / some(total)")
    found |= {text: (divided, (_QUOTIENT, "out")), f"{text}, and at the end": (divided,)}
    text = "weights of each tile of {} keys are divided by the running sum up to it"
    found[f"{text}, not by that of all"] = (
        (_ADDED, "out + w / some(total) @ v[j]"),
        (_QUOTIENT, "out"),
    )
    # 448 is the largest number of float8_e4m3fn: weights that are stored times 2^8 leave its
    # range above 448 / 2^8.
    cut, first = "are clipped at 448 / 2^8", "np.where(np.isfinite(old), old, new)"
    text = f"weights relative to the maximum of earlier tiles ({{}} keys) {cut}"
    found[text] = ((_ADDED, _CLIPPED.format(first, first)),)
    for bits in _LAGS:
        old, kept = (
            f"the old maximum is kept if it grows by {bits} bits or less ({{}} keys), ",
            _KEPT,
        )
        lag = (_NEW, kept.format(bits=bits))
        found[f"{old}and weights relative to it {cut}"] = (
            lag,
            (_ADDED, _CLIPPED.format("new", "new")),
        )
        found[f"{old}but weights are relative to the new one"] = (
            lag,
            ("base, shrink = new", ("base, shrink = np.maximum(top, own)")),
        )
    text = "the output overflows float16 before it is divided (tiles of {} keys)"
    found[text] = ((_ADDED, f"within({_ADDED}, 65504)"),)
    text = "the maximum is taken per tile, and the factor of the earlier sums overflows float32"
    found[f"{text} (tiles of {{}} keys)"] = (
        (_NEW, "np.where(own > -np.inf, own, top)"),
        (_FACTOR, f"within({_FACTOR}, MOST)"),
        (_SUM, f"within({_SUM}, MOST)"),
    )
    return found


@cache
def _edit_tiles(edits: Edits) -> Callable[..., tuple[Doubles, Doubles, Doubles]]:
    """Return the running softmax with some edits."""
    text = _TILES
    for old, new in edits:
        text = Edit("attend", old, new).apply(text)
    space: dict[str, Any] = {"np": np, "math": math, "blocks": blocks}
    # The difference of two maxima of no keys is NaN; what is beyond the range of a type as well.
    space["exp"] = lambda x: np.where(np.isnan(x), 0.0, np.exp(x))
    space["some"] = lambda x, other=1.0: np.where((x == 0) | np.isinf(x), other, x)
    space["within"] = lambda x, most: np.where(np.abs(x) > most, math.nan, x)
    space["MOST"] = FORMATS["float32"].largest
    exec(text, space)
    attend_so: Callable[..., tuple[Doubles, Doubles, Doubles]] = space["attend"]
    return attend_so


def attend_in_tiles(head: SoftmaxHead, size: int, edits: Edits, turn: int) -> Result:
    """Sum in tiles of keys by the running softmax with some edits."""
    with np.errstate(all="ignore"):
        out, lse, top = _edit_tiles(edits)(score_all(head), head.v, size, turn)
    return Result(out, lse[:, 0], top[:, 0])


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
    s = score_all(head)
    first = [*blocks(0, s.shape[-1], size)][::turn][0]
    hidden = np.isneginf(np.max(s[:, first], -1))
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


def _overflow(head: SoftmaxHead) -> Result:
    """Let products beyond float16 be infinite: NaN where a key has infinity, not -infinity."""
    products = head.q @ head.k[: head.keys].T * np.sign(head.scale)
    hidden = np.zeros_like(products, bool) if head.mask is None else ~head.mask
    most = FORMATS["float16"].largest
    exact = attend(head._replace(mask=~hidden & (products > -most)))
    lost = np.any(~hidden & (products > most), -1, keepdims=True)
    return exact._replace(out=np.where(lost, math.nan, exact.out))


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
