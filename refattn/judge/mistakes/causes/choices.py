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
from .sampled import Alternative, Seen


def _set_column(at: int, x: Any, _: int) -> Any:
    return np.where(np.arange(x.shape[1]) == at % x.shape[1], np.minimum(x, 0), x)


_TWICE = "a key that is chosen twice counts twice"
_MERGED_HEADS = 64  # whose parts are read with other strides
_CHOICE_SIZES = [2**x for x in range(8)]  # of blocks of queries, and of what is left out
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
    "key 0 is read in place of the first key of each choice": partial(_set_column, 0),
    "key 0 is read in place of the last key of each choice": partial(_set_column, -1),
}
_CUT_CHOICES: Mapping[str, Callable[[int], slice]] = {
    "the last {} of each choice {} left out": lambda size: slice(-size),
    "the first {} of each choice {} left out": lambda size: slice(size, None),
    "only the first {} of each choice {} read": slice,
}
# What may rank keys: other vectors of queries and of keys.
_RANKINGS: Mapping[str, Callable[[Any, Any], tuple[Any, Any]]] = {
    "the keys with the smallest scores are chosen": lambda q, k: (-q, k),
    "keys are ranked by vectors in float8_e4m3fn": (
        lambda q, k: (FORMATS["float8_e4m3fn"].round(q), FORMATS["float8_e4m3fn"].round(k))
    ),
    "keys are ranked by scores over their norms": (
        lambda q, k: (q, k / np.linalg.norm(k, axis=-1, keepdims=True))
    ),
    "each query has the choice of the query before it": lambda q, k: (np.roll(q, 1, 0), k),
    "each query has the choice of the next query": lambda q, k: (np.roll(q, -1, 0), k),
    "each key is ranked by the vector of the key before it": lambda q, k: (q, np.roll(k, 1, 0)),
    "each key is ranked by the vector of the next key": lambda q, k: (q, np.roll(k, -1, 0)),
}


def list_choices(problem: Problem) -> Iterator[Alternative]:
    """List wrong readings of the keys that queries chose, with other masks or without them."""
    every, (n, m, _) = [problem.read(x)["indices"] for x in np.ndindex(problem.lead)], problem.shape
    readings, count = dict(_CHOICES), every[0].shape[-1] if every else 0
    for text, size in product(_CUT_CHOICES, sorted({*_CHOICE_SIZES, count // 2})):
        if 0 < size < count:
            many = (f"{size} keys", "are") if size > 1 else ("key", "is")
            cut = partial(_take_places, _CUT_CHOICES[text](size))
            readings[text.format(*many)] = cut
    for size in (x for x in _CHOICE_SIZES[1:] if x < n):
        text = f"blocks of {size} queries have the keys that the first of them chose"
        readings[text] = partial(_take_first_choice, size)
    changes: dict[str, Callable[[Index], Any]] = {
        text: partial(_change_choices, problem, change) for text, change in readings.items()
    }
    for words, at in list_head_rules(problem):
        text = f"each query uses as many of its choices as the same query of {words} has"
        changes[text] = partial(_cut_choices, problem, at)
    alone = problem._replace(causal=False, window=(None, None))
    banded = problem.causal or problem.window != (None, None)
    for text, of_head in changes.items():
        if text != _TWICE and all(
            np.array_equal(of_head(at), x)
            for at, x in zip(np.ndindex(problem.lead), every, strict=True)
        ):
            continue  # it would be the cause of what happens to keys that are chosen twice
        often = partial(_count_chosen, of_head, m)
        for other in [alone, *[problem] * banded]:
            seen = other.replaced("mask", partial(_show_counted, often))
            yield Alternative(text, seen.replaced("bias", partial(_add_counted, often)))


# The choice of another head is what its own queries and keys rank.
_WHOSE_CHOICE = {
    "index_q is": ["index_q"],
    "index_k is": ["index_k"],
    "indices are": ["index_q", "index_k"],
}


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


def _rank_otherwise(
    problem: Problem, rank: Callable[[Any, Any], tuple[Any, Any]], index: Index
) -> Mapping[str, Any]:
    arrays = problem.read(index)
    q, k = rank(arrays["index_q"], arrays["index_k"])
    return {**arrays, "index_q": q, "index_k": k}


def _rank_by_means(size: int, q: Any, k: Any) -> tuple[Any, Any]:
    return np.repeat(np.mean(q.reshape(-1, size, q.shape[-1]), 1), size, 0), k


def _take_places(places: slice, x: Any, _: int) -> Any:
    return x[:, places]


def _take_first_choice(size: int, x: Any, _: int) -> Any:
    """Give the rows of each block what its first row has."""
    return x[np.arange(len(x)) // size * size]


def _change_choices(problem: Problem, change: Callable[[Any, int], Any], index: Index) -> Any:
    return change(problem.read(index)["indices"], problem.shape[1])


def _cut_choices(problem: Problem, at: Callable[[Index], Index], index: Index) -> Any:
    """Leave out choices past as many as another head has."""
    own, other = (problem.read(x)["indices"] for x in (index, at(index)))
    count = np.sum(other >= 0, -1, keepdims=True)
    return np.where(np.arange(own.shape[1]) < count, own, -1)


def _count_chosen(change: Callable[[Index], Any], m: int, index: Index) -> Any:
    """Count how often each query reads each key, (queries, keys)."""
    return np.stack([np.bincount(x[(x >= 0) & (x < m)], minlength=m) for x in change(index)])


def _show_counted(count: Callable[[Index], Any], index: Index, _: Any) -> Seen:
    return np.asarray(count(index) > 0)


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


def list_merges(problem: Problem) -> Iterator[Alternative]:
    """List wrong weights of parts, which are given by the bias."""
    sizes = problem.first["part_sizes"]
    merges = dict(_MERGES)
    for part, one in enumerate(np.eye(len(sizes))):
        merges[f"part {part} counts twice"] = partial(_weigh_part, one * math.log(2))
        merges[f"part {part} is left out"] = partial(_weigh_part, np.where(one, -math.inf, 0.0))
        merges[f"part {part} has the lse of the merge"] = partial(_take_merged, one)
        merges[f"lse of part {part} is in base 2"] = partial(_change_base, one)
    for pair in combinations(range(len(sizes)), 2):
        text = f"parts {pair[0]} and {pair[1]} have each other's weights"
        merges[text] = partial(_exchange_parts, pair)
    for text, change in merges.items():
        yield Alternative(text, problem.replaced("bias", partial(_change_weights, change, sizes)))
    every = np.ones(len(sizes), bool)
    which = {"the parts": every}
    which |= {f"part {x}": np.arange(len(sizes)) == x for x in range(len(sizes))}
    few = problem.lead and problem.lead[-1] > 1 and math.prod(problem.lead) <= _MERGED_HEADS
    for (called, some), (words, turn) in product(which.items(), TURNED.items() if few else ()):
        text = f"lse of {called} is read with the strides of {words}"
        turned = partial(_turn_parts, problem, some, turn)
        yield Alternative(text, problem.replaced("bias", turned))


def _take_merged(one: Any, lse: Any, _: Any) -> Any:
    return np.where(one, np.logaddexp.reduce(lse, 1)[:, None], lse)


def _change_base(one: Any, lse: Any, _: Any) -> Any:
    return np.where(one, math.log2(math.e) * lse, lse)


def _turn_parts(
    problem: Problem, some: Any, turn: Callable[[Any], Any], index: Index, bias: Any
) -> Any:
    """Read the log normalisers of some parts, of (heads, rows), with other strides."""
    heads = ((*index[:-1], h) for h in range(problem.lead[-1]))
    every = np.stack([problem.read(x)["bias"][0].reshape(len(bias), -1) for x in heads])
    found = np.where(some, turn(every)[index[-1]], every[index[-1]])
    return np.broadcast_to(found.reshape(1, -1), bias.shape)


def _weigh_part(log: Any, lse: Any, _: Any) -> Any:
    return lse + log


def _exchange_parts(pair: tuple[int, int], lse: Any, _: Any) -> Any:
    order = np.arange(lse.shape[1])
    order[[*pair]] = pair[::-1]
    return lse[:, order]


def _change_weights(change: Callable[[Any, Any], Any], sizes: Any, _: Index, bias: Any) -> Any:
    """Change the log normalisers of all parts, which are those of each row of the bias."""
    with np.errstate(all="ignore"):  # logs of 0
        found = change(bias[0].reshape(len(bias), -1), sizes)
    return np.broadcast_to(np.reshape(found, (1, -1)), bias.shape)
