"""Inputs that are changed before they are multiplied: rounded, scaled, rotated, or chosen."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from itertools import combinations, permutations, product
from typing import Any

import numpy as np
import numpy.typing as npt

from ....arrays.library import Doubles
from ...rounding.formats import FORMATS, Format
from ...rounding.norms import NORMALISED, NORMALISED_TYPES, divide_rows, list_norms
from ...rounding.problems import Index, Problem
from ..operators.maps import list_head_rules
from ..operators.strides import TURNED
from .sampled import Alternative
from .slips import TILE_SIZES

_CALLED = {"q": "queries", "k": "keys", "v": "values"}
_ANGLE_BASES = (1e4, 5e5, 1e6)  # of the angles of positions
_TURNED = {"queries and keys": "qk", "keys": "k", "queries": "q"}
_NARROW = {  # what is done to inputs
    "cut to TF32, not rounded,": "tfloat32-truncated",
    "rounded to TF32": "tfloat32",
    "rounded to float16": "float16",
    "rounded to bfloat16": "bfloat16",
    "rounded to float8_e4m3fn": "float8_e4m3fn",
    "rounded to float8_e5m2": "float8_e5m2",
    "cut to float8_e4m3fn, not rounded,": "float8_e4m3fn",
    "cut to float8_e5m2, not rounded,": "float8_e5m2",
}
_TO_LARGEST = {"row": -1, "head": None}  # of which axis the largest number is
_FORMS_OF_NORM = {"norms": 0, "root mean squares": -1}  # which of the forms of a norm

# Columns of a scale, in blocks of a size, and of numbers of which two are in a byte.
_OTHER_BLOCKS: dict[str, Callable[[Any, int], Any]] = {
    "the next block": lambda x, size: np.roll(x, -size, 1),
    "the block before": lambda x, size: np.roll(x, size, 1),
    "the first block": lambda x, size: x[:, :size].repeat(x.shape[1] // size, 1),
}
_BYTE_ORDERS: dict[str, Callable[[Any], Any]] = {
    "have columns 2 i and 2 i + 1 exchanged, as by the order of two numbers in a byte": (
        lambda i: i ^ 1
    ),
    "have columns 2 i and 2 i + 1 in place of i and i + d / 2": lambda i: i.reshape(-1, 2).T,
    "have columns i and i + d / 2 in place of 2 i and 2 i + 1": lambda i: i.reshape(2, -1).T,
}
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


def change_arrays(problem: Problem, names: str, change: Callable[..., Any]) -> Problem:
    """Change some arrays of a problem, by the name of each."""
    for x in names:
        problem = problem.replaced(x, partial(change, name=x))
    return problem


def list_scales(problem: Problem) -> Iterator[Alternative]:
    """List scales of 8-bit arrays that are left out, used twice, or those of other arrays."""
    given = "".join(x for x in "qkv" if f"{x}_scale" in problem.first)

    def scale(index: Index, x: Any, own: str, power: int = 0, other: str = "") -> Any:
        """Multiply by a power of the own scale, and by that of another array."""
        arrays = problem.read(index)
        x = x * arrays[f"{own}_scale"] ** power
        return x * arrays[f"{other}_scale"] if other else x

    def scale_by_block(index: Index, x: Any, name: str, move: Callable[[Any, int], Any]) -> Any:
        """Take the scale of another block of columns, if there are some."""
        own = problem.read(index)[f"{name}_scale"]
        size = math.gcd(own.shape[1], *(1 + np.flatnonzero(np.any(np.diff(own), 0))).tolist())
        return x / own * move(own, size)

    def reorder(index: Index, x: Any, name: str, order: Callable[[Any], Any]) -> Any:
        """Put the columns of an even number in another order, before the scale."""
        own, d = problem.read(index)[f"{name}_scale"], x.shape[1]
        return x if d % 2 else (x / own)[:, order(np.arange(d)).ravel()] * own

    changes: dict[str, Callable[..., Any]] = {
        "not applied": lambda at, x, name: scale(at, x, name, -1),
        "applied twice": lambda at, x, name: scale(at, x, name, 1),
    }
    for words, move in _OTHER_BLOCKS.items():
        changes[f"that of {words} of columns"] = partial(scale_by_block, move=move)
    for names in map("".join, (x for size in (3, 2, 1) for x in combinations(given, size))):
        called = f"{' and '.join(f'{x}_scale' for x in names)} {'are' if names[1:] else 'is'}"
        for words, change in changes.items():
            yield Alternative(f"{called} {words}", change_arrays(problem, names, change))
        for words, order in _BYTE_ORDERS.items():
            moved = change_arrays(problem, names, partial(reorder, order=order))
            yield Alternative(f"{' and '.join(_CALLED[x] for x in names)} {words}", moved)
    may_scale = {
        (x, y): all(
            a in (1, b)
            for a, b in zip(problem.first[f"{y}_scale"].shape, problem.first[x].shape, strict=True)
        )
        for x, y in permutations(given, 2)
    }
    for x, y in (z for z, may in may_scale.items() if may):
        scaled = problem.replaced(x, partial(scale, own=x, power=-1, other=y))
        text = f"{_CALLED[x]} are multiplied by {y}_scale, not by {x}_scale"
        yield Alternative(text, scaled)
        text = f"{_CALLED[x]} are also multiplied by {y}_scale"
        yield Alternative(text, problem.replaced(x, partial(scale, own=x, other=y)))
        # An exchange is the same in both orders: named once.
        if x < y and may_scale[y, x]:
            both = scaled.replaced(y, partial(scale, own=y, power=-1, other=x))
            yield Alternative(f"{x}_scale and {y}_scale are exchanged", both)


def list_undivided(problem: Problem) -> Iterator[Alternative]:
    """List queries and keys that are not divided by their norms."""
    for names in (x for x in NORMALISED if all(f"{y}_norm" in problem.first for y in x)):
        undivided = change_arrays(
            problem, names, lambda at, x, name: x * problem.read(at)[f"{name}_norm"]
        )
        what = " and ".join(_CALLED[x] for x in names)
        yield Alternative(f"{what} are not divided by their norms", undivided)


def list_narrow(problem: Problem) -> Iterator[Alternative]:
    """List arrays that are rounded to another type before they are multiplied."""
    scales = {"": 1.0, " and log2(e)": math.log2(math.e)} if problem.scale else {}
    for name, to in ((x, FORMATS[y]._replace(truncated="cut" in x)) for x, y in _NARROW.items()):
        # Numbers stored with no more digits than TF32 are not changed by it.
        if "TF32" in name and FORMATS[problem.storage].digits <= to.digits:
            continue
        for arrays in ("qkv", "kv", "v", "k", "q"):
            words = " and ".join(_CALLED[x] for x in arrays[-2:])
            words = f"queries, {words}" if len(arrays) == 3 else words
            rounded = change_arrays(problem, arrays, partial(_round, to))
            yield Alternative(f"{words} are {name} first", rounded)
        in_8_bits = ("qk", *"qkv") if to.has_8_bits and not to.truncated else ()
        for (of, axis), arrays in product(_TO_LARGEST.items(), in_8_bits):
            rounded = change_arrays(problem, arrays, partial(_round_scaled, to, axis))
            words = " and ".join(_CALLED[x] for x in arrays)
            text = f"{words}, scaled by the largest number of each {of}, are {name} first"
            yield Alternative(text, rounded)
        # The scale, and log2(e) for exponentials to base 2, may be multiplied into q or k
        # beforehand.
        for (words, factor), x in product(scales.items(), "qk" if not to.has_8_bits else ""):
            text = f"{_CALLED[x]} times the scale{words} are {name} first"
            by_scale = partial(_round, to, by=factor * problem.scale)
            yield Alternative(text, problem.replaced(x, by_scale))


def list_normalised(problem: Problem) -> Iterator[Alternative]:
    """List queries and keys that are divided by their norms, and perhaps rounded."""
    forms, to = list_norms(), FORMATS[problem.storage]
    for names, (called, form) in product(NORMALISED, _FORMS_OF_NORM.items()):
        divided = divide_rows(problem, names, forms[form])
        what = " and ".join(_CALLED[x] for x in names)
        option = f" (--normalise {names})" * (problem.storage in NORMALISED_TYPES)
        words = f"{what} are divided by their {called}{{}}{option}"
        yield Alternative(words.format(""), divided)
        rounded = change_arrays(divided, names, partial(_round, to))
        yield Alternative(words.format(" and rounded"), rounded)


def list_smoothed(problem: Problem) -> Iterator[Alternative]:
    """List queries and values whose mean was taken off before, and is not added back as it was."""
    n, m, _ = problem.shape
    for size in (*(x for x in TILE_SIZES if x < n), n) if problem.packed is None else ():
        where = f" in tiles of {size}" * (size < n)
        changes = {"is taken off them, and not added back": False}
        changes |= {"is that of the first tile": True} if size < n else {}
        for words, first in changes.items():
            moved = problem.replaced("q", partial(_move_means, size=size, first=first))
            yield Alternative(f"the mean of queries{where} {words}", moved)
    moved = problem.replaced("v", partial(_move_means, size=m, first=False))
    yield Alternative("the mean of values is taken off them, and not added back", moved)


def _move_means(_: Index, x: Doubles, size: int, first: bool) -> Doubles:
    starts = np.arange(0, len(x), size)
    sums = np.add.reduceat(x, starts, 0)
    means = sums / np.minimum(size, len(x) - starts)[:, None]
    back = means[:1] if first else 0.0  # what is added again
    return x - np.repeat(means - back, size, 0)[: len(x)]


def _round(to: Format, _: Index, x: Any, name: str = "", by: float = 1.0) -> Any:
    return to.round(x * by) / by


def list_rotated(problem: Problem) -> Iterator[Alternative]:
    """List queries and keys that are rotated by their positions, or back; the last are level."""
    (n, m, _), d = problem.shape, problem.first["q"].shape[-1]
    if d % 2 or problem.packed is not None:
        return
    for turn, called, base, of in product((1, -1), _TURNED, _ANGLE_BASES, ("halves", "pairs")):
        rotate = partial(_rotate_columns, start=m - n, base=base, pairs=of == "pairs", turn=turn)
        moved = change_arrays(problem, _TURNED[called], rotate)
        words = "rotated (RoPE) once more" if turn > 0 else "not rotated (RoPE)"
        yield Alternative(f"{called} are {words}, by base {base:g} in {of} of the columns", moved)


def list_mixed_columns(problem: Problem) -> Iterator[Alternative]:
    """List queries or values whose columns are multiplied by the Hadamard matrix."""
    # The matrix is symmetric: that queries are multiplied by it says the same as that keys are.
    for name, called in {"q": "queries, or keys,", "v": "values, or the output,"}.items():
        d = problem.first[name].shape[-1]
        for size in (2**x for x in range(2, d.bit_length()) if d % 2**x == 0):
            signs = [[(-1) ** (i & j).bit_count() for i in range(size)] for j in range(size)]
            matrix = np.array(signs) / math.sqrt(size)
            where = f" in blocks of {size}" * (size < d)
            text = f"columns of {called} are mixed by the Hadamard matrix{where}"
            mix = partial(
                lambda y, _, x: (x.reshape(len(x), -1, len(y)) @ y).reshape(x.shape), matrix
            )
            yield Alternative(text, problem.replaced(name, mix))


def _rotate_columns(
    _: Index, x: Doubles, name: str, start: int, base: float, pairs: bool, turn: int
) -> Doubles:
    """Multiply columns, two of them as a complex number, by e^(i position base^(-2 c / d))."""
    # A pair of columns that turn together is c and c + d / 2 (halves), or 2 c and 2 c + 1.
    two = [x[:, ::2], x[:, 1::2]] if pairs else np.split(x, 2, -1)
    factors = _compute_turns(*x.shape, start if name == "q" else 0, base)
    turned = (two[0] + 1j * two[1]) * (factors if turn > 0 else factors.conj())
    return np.stack([turned.real, turned.imag], -1 if pairs else -2).reshape(x.shape)


@lru_cache(maxsize=2 * len(_ANGLE_BASES))
def _compute_turns(n: int, d: int, start: int, base: float) -> npt.NDArray[np.complex128]:
    angles = (start + np.arange(n))[:, None] * base ** (-np.arange(0, d, 2) / d)
    return np.asarray(np.exp(1j * angles))


def _round_scaled(to: Format, axis: int | None, _: Index, x: Any, name: str) -> Any:
    """Round numbers so that the largest is the largest of a type."""
    unit = np.max(np.abs(x), axis, initial=0, keepdims=True) / to.largest
    return to.round(x / np.where(unit > 0, unit, 1)) * unit


# --- keys that queries chose, and parts that are merged -------------------------------------------


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
