"""Wrong readings of the keys that queries chose, and wrong weights of parts that are merged."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import combinations, product
from typing import Any

import numpy as np

from ....arrays.library import Doubles
from ...rounding.formats import FORMATS
from ...rounding.problems import Index, Problem
from ..operators.maps import list_head_rules
from ..operators.strides import TURNED
from .sampled import Alternative

_TWICE = "a key that is chosen twice counts twice"
_MERGED_HEADS = 64  # whose parts are read with other strides
_CHOICE_SIZES = [2**x for x in range(8)]  # of blocks of queries, and of what is left out
_TO_8_BITS = FORMATS["float8_e4m3fn"].round
# What kernels may read in place of the keys that queries chose, (queries, S), of so many keys.
_CHOICES: Mapping[str, Callable[[Any, int], Any]] = {
    _TWICE: lambda x, _: x,
    "-1 in the indices is read as the last key": lambda x, m: np.where(x < 0, m - 1, x),
    "-1 in the indices is read as key 0": lambda x, _: np.where(x < 0, 0, x),
    "-1 in the indices is read as the first key of the choice": (
        lambda x, _: np.where(x < 0, x[:, :1], x)
    ),
    "each query has the keys that the query before it chose": lambda x, _: np.roll(x, 1, 0),
    "each query has the keys that the next query chose": lambda x, _: np.roll(x, -1, 0),
    "all queries have the keys that the first query chose": lambda x, _: 0 * x + x[:1],
    "the key before each chosen key is read": lambda x, _: np.where(x < 0, x, np.maximum(x - 1, 0)),
    "the key after each chosen key is read": (
        lambda x, m: np.where(x < 0, x, np.minimum(x + 1, m - 1))
    ),
    "the place of each key in the choice is read as the key": (
        lambda x, _: np.where(x < 0, x, np.arange(x.shape[1]))
    ),
    "key 0 is read in place of the first key of each choice": (
        lambda x, _: np.where(np.arange(x.shape[1]) == 0, np.minimum(x, 0), x)
    ),
    "key 0 is read in place of the last key of each choice": (
        lambda x, _: np.where(np.arange(x.shape[1]) == x.shape[1] - 1, np.minimum(x, 0), x)
    ),
}
_CUT_CHOICES: Mapping[str, Callable[[int], slice]] = {
    "the last {} of each choice {} left out": lambda size: slice(-size),
    "the first {} of each choice {} left out": lambda size: slice(size, None),
    "only the first {} of each choice {} read": slice,
}
# What may rank keys: other vectors of queries and of keys.
_RANKINGS: Mapping[str, Callable[[Any, Any], tuple[Any, Any]]] = {
    "the keys with the smallest scores are chosen": lambda q, k: (-q, k),
    "keys are ranked by vectors in float8_e4m3fn": lambda q, k: (_TO_8_BITS(q), _TO_8_BITS(k)),
    "keys are ranked by scores over their norms": (
        lambda q, k: (q, k / np.linalg.norm(k, axis=-1, keepdims=True))
    ),
    "each query has the choice of the query before it": lambda q, k: (np.roll(q, 1, 0), k),
    "each query has the choice of the next query": lambda q, k: (np.roll(q, -1, 0), k),
    "each key is ranked by the vector of the key before it": lambda q, k: (q, np.roll(k, 1, 0)),
    "each key is ranked by the vector of the next key": lambda q, k: (q, np.roll(k, -1, 0)),
}
# The choice of another head is what its own queries and keys rank.
_WHOSE_CHOICE = {
    "index_q is": ["index_q"],
    "index_k is": ["index_k"],
    "indices are": ["index_q", "index_k"],
}


def list_choices(problem: Problem) -> Iterator[Alternative]:
    """List wrong readings of the keys that queries chose, with other masks or without them."""
    (n, m, _), heads = problem.shape, [*np.ndindex(problem.lead)]
    every = {x: problem.read(x)["indices"] for x in heads}
    readings, count = dict(_CHOICES), every[heads[0]].shape[-1] if heads else 0
    for text, size in product(_CUT_CHOICES, sorted({*_CHOICE_SIZES, count // 2})):
        if 0 < size < count:
            many = (f"{size} keys", "are") if size > 1 else ("key", "is")
            some = _CUT_CHOICES[text](size)
            readings[text.format(*many)] = partial(lambda some, x, _: x[:, some], some)
    for size in (x for x in _CHOICE_SIZES[1:] if x < n):
        text = f"blocks of {size} queries have the keys that the first of them chose"
        readings[text] = partial(lambda size, x, _: x[np.arange(len(x)) // size * size], size)
    chosen: dict[str, Callable[[Index], Any]] = {
        text: partial(lambda change, x: change(every[x], m), change)
        for text, change in readings.items()
    }
    for words, at in list_head_rules(problem):
        text = f"each query uses as many of its choices as the same query of {words} has"
        chosen[text] = partial(_cut_choices, every, at)
    alone = problem._replace(causal=False, window=(None, None))
    banded = problem.causal or problem.window != (None, None)
    for text, of in chosen.items():
        # Else it would be the cause of what happens to keys that are chosen twice.
        if text == _TWICE or not all(np.array_equal(of(x), every[x]) for x in heads):
            often = partial(_count_chosen, of, m)
            for other in [alone, *[problem] * banded]:
                seen = other.replaced("mask", partial(lambda often, x, _: often(x) > 0, often))
                yield Alternative(text, seen.replaced("bias", partial(_add_counted, often)))


def _cut_choices(every: Mapping[Index, Any], at: Callable[[Index], Index], index: Index) -> Any:
    """Leave out choices past as many as another head has."""
    own, count = every[index], np.sum(every[at(index)] >= 0, -1, keepdims=True)
    return np.where(np.arange(own.shape[1]) < count, own, -1)


def list_rankings(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """List problems of which the best keys may have been chosen by mistake."""
    ranks = dict(_RANKINGS)
    for size in (x for x in _CHOICE_SIZES[1:] if not problem.shape[0] % x):
        ranks[f"keys are ranked by the means of {size} queries"] = partial(_rank_by_means, size)
    for text, rank in ranks.items():
        yield text, problem._replace(read=partial(_rank_otherwise, problem, rank))
    for words, at in list_head_rules(problem):
        for text, names in _WHOSE_CHOICE.items():
            yield f"{text} read from {words}", problem.with_arrays_of(names, at)


def _rank_by_means(size: int, q: Any, k: Any) -> tuple[Any, Any]:
    return np.repeat(np.mean(q.reshape(-1, size, q.shape[-1]), 1), size, 0), k


def _rank_otherwise(
    problem: Problem, rank: Callable[[Any, Any], tuple[Any, Any]], index: Index
) -> Mapping[str, Any]:
    arrays = problem.read(index)
    q, k = rank(arrays["index_q"], arrays["index_k"])
    return {**arrays, "index_q": q, "index_k": k}


def _count_chosen(of: Callable[[Index], Any], m: int, index: Index) -> Any:
    """Count how often each query reads each key, (queries, keys)."""
    rows = (x[(x >= 0) & (x < m)] for x in of(index))
    return np.stack([np.bincount(x, minlength=m) for x in rows])


def _add_counted(count: Callable[[Index], Any], index: Index, bias: Any) -> Any:
    """Add logs of counts to the bias, as the weights of keys count so often."""
    return np.log(np.maximum(count(index), 1)) + (0.0 if bias is None else bias)


def _merge_first(lse: Doubles, _: Any) -> Doubles:
    """Return logs of the weights of a running merge whose log normaliser is that of part 0."""
    shares = 1 / (1 + np.exp(lse[:, :1] - lse[:, 1:]))
    kept = np.cumprod(np.pad(1 - shares, ((0, 0), (0, 1)), constant_values=1.0)[:, ::-1], 1)
    return np.log(np.pad(shares, ((0, 0), (1, 0)), constant_values=1.0) * kept[:, ::-1])


# What a merge may take for log normalisers of parts, (queries, parts), of so many keys each.
_MERGES: Mapping[str, Callable[[Any, Any], Any]] = {
    "each part has the weight of the next part": lambda x, _: np.roll(x, -1, 1),
    "each part has the weight of the part before": lambda x, _: np.roll(x, 1, 1),
    "parts have weights in reverse order": lambda x, _: x[:, ::-1],
    "lse of the parts is that of the query before": lambda x, _: np.roll(x, 1, 0),
    "lse of the parts is that of the next query": lambda x, _: np.roll(x, -1, 0),
    "weights of parts are their numbers of keys": lambda x, keys: 0 * np.exp(x) + np.log(keys),
    "weights of parts are lse, not e^lse": lambda x, _: np.log(np.maximum(x, 0)),
    "only the part with the largest lse is used": (
        lambda x, _: np.where(x < np.max(x, 1, keepdims=True), -math.inf, x)
    ),
    "the running lse of the merge is never updated": _merge_first,
}
_OF_PART: Mapping[str, Callable[[Any], Any]] = {  # what its lse is taken to be
    "part {} counts twice": lambda x: x + math.log(2),
    "part {} is left out": lambda x: np.full_like(x, -math.inf),
    "part {} has the lse of the merge": lambda x: np.logaddexp.reduce(x, 1)[:, None] + 0 * x,
    "lse of part {} is in base 2": lambda x: math.log2(math.e) * x,
}


def list_merges(problem: Problem) -> Iterator[Alternative]:
    """List wrong weights of parts, which are given by the bias."""
    sizes = problem.first["part_sizes"]
    merges, places = dict(_MERGES), np.arange(len(sizes))
    for part, (text, of) in product(places.tolist(), _OF_PART.items()):
        merges[text.format(part)] = partial(
            lambda part, of, x, _: np.where(places == part, of(x), x), part, of
        )
    for pair in combinations(places.tolist(), 2):
        text = f"parts {pair[0]} and {pair[1]} have each other's weights"
        order = places.copy()
        order[[*pair]] = pair[::-1]
        merges[text] = partial(lambda order, x, _: x[:, order], order)
    for text, change in merges.items():
        yield Alternative(text, problem.replaced("bias", partial(_change_weights, change, sizes)))
    which = {"the parts": places >= 0} | {f"part {x}": places == x for x in places.tolist()}
    few = problem.lead and problem.lead[-1] > 1 and math.prod(problem.lead) <= _MERGED_HEADS
    for (called, some), (words, turn) in product(which.items(), TURNED.items() if few else ()):
        text = f"lse of {called} is read with the strides of {words}"
        turned = partial(_turn_parts, problem, some, turn)
        yield Alternative(text, problem.replaced("bias", turned))


def _turn_parts(
    problem: Problem, some: Any, turn: Callable[[Any], Any], index: Index, bias: Any
) -> Any:
    """Read the log normalisers of some parts, of (heads, rows), with other strides."""
    heads = ((*index[:-1], h) for h in range(problem.lead[-1]))
    every = np.stack([problem.read(x)["bias"][0].reshape(len(bias), -1) for x in heads])
    found = np.where(some, turn(every)[index[-1]], every[index[-1]])
    return np.broadcast_to(found.reshape(1, -1), bias.shape)


def _change_weights(change: Callable[[Any, Any], Any], sizes: Any, _: Index, bias: Any) -> Any:
    """Change the log normalisers of all parts, which are those of each row of the bias."""
    with np.errstate(all="ignore"):  # logs of 0
        found = change(bias[0].reshape(len(bias), -1), sizes)
    return np.broadcast_to(np.reshape(found, (1, -1)), bias.shape)
