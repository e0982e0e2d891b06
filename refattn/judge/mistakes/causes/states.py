"""Mistakes of recurrences, each written as a change of the arguments of the right one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, product
from typing import Any, NamedTuple

import numpy as np

from ....arrays.library import Doubles
from ....arrays.words import name_row, place
from ...rounding.formats import FORMATS
from ...rounding.problems import Index, Problem
from ...rounding.roundings import Roundings
from ...rounding.states import TokenArrays, give, is_delta
from ...verification.findings import ONLY_IN, Finding, Numbers, Suspect, name_heads
from ..operators.disturbed import list_fitted_decays, list_wrong_states
from ..operators.handed_on import CHUNK_SIZES, list_handed_on
from ..operators.maps import HeadRule, list_heads_read
from .places import as_suspect, by_row, describe_factors
from .wrong_rows import row_sizes

_CLIPS = (4, 5, 8, 10, 15, 16, 20, 30, 32, 40, 50, 60, 64, 80, 88)  # of exponents
_WORST_HEADS = 4  # heads that are looked at, those with the largest errors
_MOST_HEADS, _MOST_TOKENS = 16, 1024  # heads that are exchanged, tokens that each round the state
_FAR_LEFT = 0.25  # largest share of the squared error that a cause may leave
_MOST_BY_FACTORS = 0.99  # of the squared error, at least, if each row has a factor
_SURE = 1e-6  # p-value, at most, of digits that a cause is seen by
_SQUARE = 4.0  # largest mean square of z if a cause holds
_AS_PREDICTED = (
    1.6  # median of mean squares of z of rows, at most, if the state is rounded at each token
)
_SMALL = 0.01  # of a factor, or its distance from 1: below it, that counts as 0
_ON_GRID = 2.0**-20  # relative distance of an exact number from a narrow one that it is taken for

_KEPT = "the state is kept in"
_STARTED = "the initial state is multiplied by {}"
_EARLY = {"late": False}  # removes from the state before its decay

Change = Callable[[TokenArrays], dict[str, Any]]


class Cause(NamedTuple):
    """Another recurrence that a kernel may have computed, and how its result may lie."""

    text: str  # what is so, after "agrees if"
    problem: Problem
    view: Callable[[Doubles], Doubles] = np.asarray  # of what was given
    rows: slice = slice(None)  # of the exact result, which the view shows
    adds: Callable[[Index], Doubles] | None = None  # to it, by head

    def take(self, got: Doubles, index: Index) -> Doubles:
        """Take what was given, without what is added."""
        return self.view(got if self.adds is None else got - self.adds(index))


def _scale(x: TokenArrays, **factors: float) -> dict[str, Any]:
    return {name: factor * x[name] for name, factor in factors.items() if name in x}


def _take_keys(x: TokenArrays, k: Doubles) -> dict[str, Any]:
    """Take other keys, from which a delta rule also removes."""
    return {"k": k} | ({"a": -x["write"] * k, "b": k} if is_delta(x) else {})


def _take_factors(x: TokenArrays, write: Doubles) -> dict[str, Any]:
    """Take other factors on what is written and, by a delta rule, on what is removed."""
    return {"write": write} | ({"a": -write * x["k"]} if is_delta(x) else {})


def _shift(x: TokenArrays, names: Sequence[str], by: int, removes: bool = True) -> dict[str, Any]:
    """Take arrays of other tokens, 0 beyond the ends; a delta rule may also remove by these."""
    wide = {name: np.pad(x[name], ((1, 1), (0, 0))) for name in names}
    moved = {name: y[1 + by : len(y) - 1 + by] for name, y in wide.items()}
    if removes and is_delta(x) and {"k", "write"} & moved.keys():
        y = {**x, **moved}
        moved |= {"a": -y["write"] * y["k"], "b": y["k"]}
    return moved


def _list_shifts(called: str, *names: str, removes: bool = True) -> dict[str, Change]:
    shift, beside = partial(_shift, names=names, removes=removes), ("next token", "token before")
    return {
        f"each token uses the {called} of the {words}": partial(shift, by=by)
        for words, by in zip(beside, (1, -1), strict=True)
    }


def _normalise(x: TokenArrays, names: str) -> dict[str, Any]:
    """Divide queries, keys or both by their lengths."""
    unit = {y: x[y] / np.maximum(np.linalg.norm(x[y], axis=-1, keepdims=True), 1e-12) for y in "qk"}
    of_keys = _take_keys(x, unit["k"]) if "k" in names else {}
    return of_keys | ({"q": unit["q"]} if "q" in names else {})


def _multiply_keys(x: TokenArrays, factor: Any) -> dict[str, Any]:
    """Multiply everything that is written, including what is removed."""
    return {name: factor * x[name] for name in ("k", "a") if name in x}


def _decay_write(x: TokenArrays) -> dict[str, Any]:
    return _multiply_keys(x, np.exp(x["log_decay"]))


def _leave_out(x: TokenArrays, size: int) -> dict[str, Any]:
    """Leave out the tokens of the last chunk."""
    n, names = len(x["q"]), ("q", "k", "v", "a", "b", "d_out", "log_decay")
    kept = (np.arange(n) < (n - 1) // size * size)[:, None]
    return {name: np.where(kept, x[name], 0.0) for name in names if name in x}


def _lose_last(x: TokenArrays, size: int) -> dict[str, Any]:
    """Leave out what the last token of each full chunk writes and removes."""
    kept = (np.arange(len(x["q"])) % size < size - 1)[:, None]
    return _multiply_keys(x, kept)


def _hand_nothing_on(x: TokenArrays, size: int, start: int = 1) -> dict[str, Any]:
    """Start each chunk with an empty state, those from this token on."""
    i = np.arange(len(x["q"]))[:, None]
    # A decay of e^-inf empties the state.
    first = (i % size == 0) & (i >= start)
    removed = {"b": np.where(first, 0.0, x["b"])} if "b" in x else {}
    return {"log_decay": np.where(first, -math.inf, x["log_decay"])} | removed


def _keep_at_chunks(x: TokenArrays, size: int) -> dict[str, Any]:
    first = np.arange(len(x["q"]))[:, None] % size == 0
    return {"log_decay": np.where(first, 0.0, x["log_decay"])}


def _round_decays(x: TokenArrays, words: str, form: str) -> dict[str, Any]:
    """Round decays, or their logarithms, and factors to a type, those that words name."""
    to, g = FORMATS[form].round, x["log_decay"]
    with np.errstate(divide="ignore"):
        rounded = np.log(to(np.exp(g))) if "e^g" in words else to(g) if "log" in words else g
    factors = _take_factors(x, to(x["write"])) if "beta" in words or "factor" in words else {}
    return {"log_decay": rounded, **factors}


def _restart_sums(x: TokenArrays, chunk: int, size: int) -> dict[str, Any]:
    """Take off what decayed in the tokens before, where a part of a chunk begins."""
    g = x["log_decay"]
    starts = np.arange(0, len(g), size)
    lost = np.zeros_like(g)
    lost[starts[1:]] = np.add.reduceat(g, starts, 0)[:-1]
    lost[::chunk] = 0.0
    return {"log_decay": g - lost}


def _list_rounded(*called: str) -> dict[str, Change]:
    forms = product(called, ("bfloat16", "float16"))
    return {f"{x} rounded to {y}": partial(_round_decays, words=x, form=y) for x, y in forms}


def _clip(x: TokenArrays, size: int, most: float) -> dict[str, Any]:
    """Divide keys by decays from the start of a chunk, of which none is below e^-most."""
    g = x["log_decay"]
    sums = np.concatenate([np.cumsum(g[i : i + size], 0) for i in range(0, len(g), size)])
    return _multiply_keys(x, np.exp(np.minimum(sums + most, 0.0)))


_CAUSES: Mapping[str, Mapping[str, Change]] = {  # by what an estimator must have
    "tokens": {
        "a query reads the state before its token's decay and write": lambda x: {"before": True},
        **{
            f"{text} of {c}{more}": partial(change, size=c)
            for text, more, change in (
                ("the last chunk", " is left out", _leave_out),
                ("the last token of each chunk", " is not written to the state", _lose_last),
                ("no state is passed on between chunks", "", _hand_nothing_on),
                ("the first token of each chunk", " does not decay the state", _keep_at_chunks),
            )
            for c in CHUNK_SIZES
        },
        **{
            f"{words} normalised to length 1": partial(_normalise, names=names)
            for words, names in (("q is", "q"), ("k is", "k"), ("q and k are", "qk"))
        },
        **_list_shifts("query", "q"),
        **_list_shifts("key", "k"),
        **_list_shifts("value", "v"),
        **_list_shifts("key and value", "k", "v"),
    },
    "state": {
        "the state stays the initial one": partial(_scale, log_decay=0.0, write=0.0, a=0.0),
        "the initial state is ignored": partial(_scale, initial_state=0.0),
        **{
            f"neither the initial state nor the states between chunks of {c} are used": partial(
                _hand_nothing_on, size=c, start=0
            )
            for c in CHUNK_SIZES
        },
    },
    "square": {
        "the initial state is transposed": lambda x: {"initial_state": x["initial_state"].T}
    },
    "decay": {
        **_list_shifts("decay", "log_decay"),
        "the decay of a token also applies to its own write": _decay_write,
        "the decay of a token also applies to its own value": lambda x: {
            "k": np.exp(x["log_decay"]) * x["k"]
        },
        **_list_rounded("decays e^g are", "log decays are"),
        **{
            f"the sum of log decays in chunks of {c} restarts after each {size} tokens": partial(
                _restart_sums, chunk=c, size=size
            )
            for c, size in product(CHUNK_SIZES, (32, 16, 64))
            if size < c
        },
        "nothing decays": partial(_scale, log_decay=0.0),
        "log decays are read as logarithms to base 2": partial(_scale, log_decay=math.log(2)),
        "log decays are multiplied by log2(e)": partial(_scale, log_decay=1 / math.log(2)),
        "log decays are doubled": partial(_scale, log_decay=2.0),
        "log decays are halved": partial(_scale, log_decay=0.5),
        "all coordinates have the decay of the first": lambda x: {
            "log_decay": x["log_decay"][:, :1]
        },
        "all coordinates have their mean log decay": lambda x: {
            "log_decay": np.mean(x["log_decay"], -1, keepdims=True)
        },
        **{
            f"e^-(sum of log decays in a chunk of {c}) is clipped at e^{most}": partial(
                _clip, size=c, most=most
            )
            for c in (*CHUNK_SIZES, 256)
            for most in _CLIPS
        },
    },
    "late": {
        "the decay applies to the state after the write": lambda x: _decay_write(x) | _EARLY,
        "the decay is applied after the error is computed": lambda x: _EARLY,
    },
    "removal": {
        "nothing is removed": partial(_scale, a=0.0),
        "the removal has the wrong sign": partial(_scale, a=-1.0),
        "removal_a and removal_b are swapped": lambda x: {"a": x["b"], "b": x["a"]},
    },
    "pair": {**_list_shifts("removal_a", "a"), **_list_shifts("removal_b", "b")},
    "decay and delta": _list_rounded("decays e^g and beta are", "log decays and beta are"),
    "delta": {
        **_list_rounded("beta is"),
        "beta also multiplies the state in the error": lambda x: {"a": x["write"] * x["a"]},
        "beta is missing in the removal": lambda x: {"a": -x["k"]},
        "beta is missing": lambda x: {"a": -x["k"], "write": 1 + 0 * x["write"]},
        "beta is doubled": partial(_scale, a=2.0, write=2.0),
        "beta is halved": partial(_scale, a=0.5, write=0.5),
        **_list_shifts("beta", "write"),
        "beta is the sigmoid of beta": lambda x: _take_factors(x, 1 / (1 + np.exp(-x["write"]))),
        "beta is squared": lambda x: {"a": x["write"] * x["a"], "write": np.square(x["write"])},
    },
    "write": {
        **_list_rounded("the factor on v is"),
        **_list_shifts("factor on v", "write", removes=False),
        "log decays are multiplied by the factor on v": lambda x: {
            "log_decay": x["write"] * x["log_decay"]
        },
        "the factor on v is missing": lambda x: {"write": 1 + 0 * x["write"]},
        "the factor on v is used twice": lambda x: {"write": np.square(x["write"])},
    },
}


# What may be read from another head, by the arrays of both.
_OF_HEADS: Mapping[str, Callable[[TokenArrays, TokenArrays], dict[str, Any]]] = {
    "all arrays are": lambda x, y: dict(y),
    "decays are": lambda x, y: {"log_decay": y["log_decay"]},
    "factors are": lambda x, y: _take_factors(x, y["write"]),
    "q is": lambda x, y: {"q": y["q"]},
    "k is": lambda x, y: _take_keys(x, y["k"]),
    "q and k are": lambda x, y: {"q": y["q"], **_take_keys(x, y["k"])},
    "v is": lambda x, y: {"v": y["v"]},
    "initial states are": lambda x, y: {"initial_state": y["initial_state"]},
}


def list_states(problem: Problem) -> Iterator[Cause]:
    """List recurrences that this one may be taken for, the plainest first."""
    x, heads = problem.first, [problem.read(x) for x in np.ndindex(problem.lead)]
    d, d_v = x["initial_state"].shape
    decays, starts = (any(np.any(y[z]) for y in heads) for z in ("log_decay", "initial_state"))
    there = {"tokens": True, "decay": decays, "late": decays and x.get("late"), "state": starts}
    there |= {"square": starts and d == d_v, "removal": "a" in x, "delta": is_delta(x)}
    there["decay and delta"] = decays and there["delta"]
    there["pair"] = "a" in x and not np.array_equal(x["b"], x["k"])
    there |= {"write": any(np.any(y["write"] != 1) for y in heads)}
    for needed in (y for y in _CAUSES if there[y]):
        for text, change in _CAUSES[needed].items():
            size = getattr(change, "keywords", {}).get("size", 0)
            if size < len(x["q"]) or needed not in ("tokens", "state"):  # a chunk passes nothing on
                read = partial(lambda z, at: {**(y := problem.read(at)), **z(y)}, change)
                yield Cause(text, problem._replace(read=read))
    for words, scale in (("1", 1.0), (f"1 / sqrt({d})", d**-0.5), (f"1 / {d}", 1 / d)):
        if not math.isclose(scale, problem.scale):
            yield Cause(f"the scale is {words}", problem._replace(scale=scale))
    for text, adds in list_handed_on(problem):
        yield Cause(text, problem, adds=adds)
    if problem.of == "out" and "a" not in x and len(x["q"]) <= _MOST_TOKENS:
        for words, sign in _LATER.items():
            text = f"attention is not causal: keys j > i count {words}"
            yield Cause(text, problem, adds=partial(_see_later, problem, sign))
        text = "a query does not see its own token (the state before its write)"
        yield Cause(text, problem, adds=partial(_hide_own, problem))
    if problem.of == "state" and d == d_v:
        yield Cause("the last state is transposed", problem, np.transpose)
    if problem.of == "state" or len(x["q"]) < 2:
        return
    early, late, result = slice(None, -1), slice(1, None), f"each row holds {problem.result} of the"
    yield Cause(f"{result} token before", problem, lambda x: x[late], early)
    yield Cause(f"{result} next token", problem, lambda x: x[early], late)


_LATER = {"decay^(j - i) times": -1.0, "without decay": 0.0, "decay^(i - j) times": 1.0}


def _hide_own(problem: Problem, index: Index) -> Doubles:
    """Take away what each token adds to its own result."""
    x = problem.read(index)
    products = np.sum(problem.scale * x["q"] * x["k"], -1, keepdims=True)
    return np.asarray(-products * x["write"] * x["v"])


def _see_later(problem: Problem, sign: float, index: Index) -> Doubles:
    """Sum over the keys after each query, with decays to a power of the distance."""
    x = problem.read(index)
    i = np.arange(len(x["q"]))
    total = np.cumsum(x["log_decay"], 0)
    q, values = problem.scale * x["q"], x["write"] * x["v"]
    later = i[:, None] < i
    if total.shape[-1] == 1:
        far = np.where(later, total[:, 0] - total, 0.0)
        w = (q @ x["k"].T) * np.exp(-sign * far)
    else:  # each coordinate has its own
        far = np.where(later[..., None], total - total[:, None], 0.0)
        w = np.einsum("ic,jc,ijc->ij", q, x["k"], np.exp(-sign * far))
    return np.asarray(np.where(later, w, 0.0) @ values)


def _list_exchanged(problem: Problem, got: Mapping[Index, Doubles], count: int) -> Iterator[Cause]:
    """List arrays that may be read from other heads or batch members, of so many wrong heads."""
    if not 1 < max(problem.lead, default=1) <= _MOST_HEADS:
        return
    every = [*np.ndindex(problem.lead)]
    for words, take in _OF_HEADS.items():
        far: dict[Index, dict[Index | None, float]] = {}
        for index, out in got.items():
            others = [x for x in every if x[:-1] == index[:-1] or x[-1] == index[-1]]
            ways = {x: Cause("", _take_from(problem, take, {index: x}.get)) for x in others}
            far[index] = {x: _distance(one, index, out) for x, one in ways.items()}
        for whose, to, named in list_heads_read(problem, far):
            more = f" (and {count - len(far)} more heads)" if named and len(far) < count else ""
            yield Cause(f"{words} read from {whose}{more}", _take_from(problem, take, to))


def _take_from(problem: Problem, take: Any, to: HeadRule) -> Problem:
    """Read for a head what another has."""

    def read(index: Index) -> TokenArrays:
        x = problem.read(index)
        return {**x, **take(x, problem.read(to(index)))}

    return problem._replace(read=read)


def _distance(one: Cause, index: Index, got: Doubles) -> float:
    """Return the squared distance from the exact result of a head."""
    problem = one.problem
    with np.errstate(all="ignore"):
        exact = give(problem.read, index, problem.scale, problem.of)
        off = float(np.sum(np.square(one.take(got, index) - exact[one.rows])))
    return off if math.isfinite(off) else math.inf


def find_coarse_state(problem: Problem, numbers: Numbers) -> Finding | None:
    """Test whether a last state holds numbers of a narrower type only, as no wide sums do.

    Each number that the exact state is not near to is one of them with probability 1/2 at most.
    """
    if problem.of != "state" or 0 in (*problem.lead, *problem.shape):
        return None
    heads, digits = [*np.ndindex(problem.lead)], FORMATS[numbers.out_dtype].digits
    got = np.stack([numbers.out(x) for x in heads])
    for form in ("bfloat16", "float16"):
        to = FORMATS[form]
        if to.digits < digits and np.all(to.holds(got)):
            exact = np.stack([give(problem.read, x, problem.scale, problem.of) for x in heads])
            off = np.abs(to.round(exact) - exact) > _ON_GRID * np.abs(exact)
            count, words = len(np.unique(got[off])), f"all numbers are {form}"
            p = 2.0**-count
            where = f"{words}, in an array of {numbers.out_dtype}"
            return Finding("digits of the state", p, p, count, where)
    return None


def explain_states(problem: Problem, numbers: Numbers, roundings: Roundings) -> Iterator[Suspect]:
    """Name what explains nearly all of the errors of some heads, the nearest first."""
    every = {x: numbers.out(x) for x in np.ndindex(problem.lead)}
    if not any(np.any(x) for x in every.values()):
        yield as_suspect("all numbers are 0, as if they were never computed")
        return
    coarse = find_coarse_state(problem, numbers)
    if coarse is not None and coarse.p_value < _SURE:
        yield as_suspect(f"agrees if the last state is rounded: {coarse.where}")
    right = Cause("", problem)
    squares = {x: _mean_square(right, {x: out}, roundings) for x, out in every.items()}
    wrong = [x for x in every if not squares[x] <= _SQUARE] or [*every]
    errors = {x: _distance(right, x, every[x]) for x in wrong}
    worst = sorted(wrong, key=lambda x: -errors[x])[:_WORST_HEADS]
    got, rest = {x: every[x] for x in worst}, [x for x in every if x not in errors][:_WORST_HEADS]
    square = max(squares[x] for x in worst)
    numbered = np.array([problem.number(x) for x in wrong])
    most, near = _FAR_LEFT * sum(errors[x] for x in worst), list[tuple[float, str]]()
    holding: list[tuple[float, str]] = []
    if not 0 < most < math.inf:  # squares of such numbers are beyond the range of float64
        return
    plain = (
        *list_states(problem),
        *_list_exchanged(problem, got, len(wrong)),
        *_list_started(problem, got),
    )

    def fit() -> Iterator[Cause]:
        if not holding:
            # A state with fewer digits is no other recurrence: its errors are predicted, and must
            # then be as large as those that were found.
            holding.extend(_list_narrow(problem, got, roundings, square))
        for listing in (list_wrong_states, list_fitted_decays):
            for text, adds in () if holding else listing(problem, got, roundings):
                yield Cause(text, problem, adds=adds)

    for one in chain(plain, fit()):
        off = 0.0
        # A cause that has left too much is computed for no further head.
        for x in (y for y in worst if off < most):
            off += _distance(one, x, got[x])
        if off < most:
            left = _mean_square(one, got, roundings)
            holds = left < min(_SQUARE, square / 4)
            # Right heads that the cause would change show that it is not in all of them.
            alone = (
                rest and not _mean_square(one, {x: every[x] for x in rest}, roundings) <= _SQUARE
            )
            text = f"{one.text}{ONLY_IN}{name_heads(problem, numbered)}" if alone else one.text
            near.append((off, text))
            holding += [(left, text)] if holds else []
    least = min(holding, default=(0.0, ""))[0]
    for left, text in holding:
        if left <= 1.5 * max(least, 1.0):
            yield as_suspect(f"agrees if {text}")
    if holding:
        return
    off, text = min(near, default=(most, ""))
    share = 1 - _FAR_LEFT * off / most
    factors = [x for x in _list_factors(problem, got, most) if x.explained > share or not near]
    yield from factors
    if near and not factors:
        yield as_suspect(f"agrees in part if {text}", share, "convention in part")


def _list_narrow(
    problem: Problem, got: Mapping[Index, Doubles], roundings: Roundings, square: float
) -> Iterator[tuple[float, str]]:
    """Name the type of states by which errors are as large as they are, if there is one."""
    right, rounded = Cause("", problem), []
    for size in (x for x in (64, 16, 1) if x > 1 or problem.shape[1] <= _MOST_TOKENS):
        for form in ("bfloat16", "float16"):
            narrow = roundings._replace(states=FORMATS[form], run=size)
            lefts = [_mean_square(right, {x: out}, narrow) for x, out in got.items()]
            where = f"chunks of about {size} tokens" if size > 1 else "tokens"
            left = max(lefts, key=_far_from_1)
            rounded.append((left, f"{_KEPT} {form} between {where}", narrow))
    left, text, narrow = min(rounded, key=lambda x: _far_from_1(x[0]))
    if not 1 / _SQUARE < left < min(_SQUARE, square / 2):
        return
    if narrow.run == 1:
        # What a token writes may be rounded instead: errors are then smaller in most rows.
        for x, out in got.items():
            rows = problem.recurrence(x, narrow).rows
            usual = np.median(np.mean(np.square(rows.errors(out) / rows.std), -1))
            if not 1 / _AS_PREDICTED < usual < _AS_PREDICTED:
                return
    yield left, text


def keep_common(suspects: Mapping[str, Sequence[Suspect]]) -> dict[str, list[Suspect]]:
    """Leave out that a state is narrow where the output and the state do not both show it."""

    def kept(x: Suspect) -> str:
        return x.text.partition(_KEPT)[2].partition(" between ")[0]

    every = [{kept(x) for x in suspects[part]} for part in ("out", "state") if part in suspects]
    common = {""}.union(set.intersection(*every) if every else ())
    return {name: [x for x in y if kept(x) in common] for name, y in suspects.items()}


def _far_from_1(square: float) -> float:
    return abs(math.log(max(square, 1e-300)))


def _list_started(problem: Problem, got: Mapping[Index, Doubles]) -> Iterator[Cause]:
    """List the recurrence whose initial states are multiplied by a number, of each head or of all.

    Numbers are fitted: results are linear in initial states.
    """
    without, factors = _take_started(problem, {}, 0.0), dict[Index, float]()
    for x, out in got.items():
        exact, rest = (give(y.read, x, y.scale, y.of) for y in (problem, without))
        size = float(np.sum(np.square(exact - rest)))
        factors[x] = float(np.sum((out - rest) * (exact - rest))) / size if size else 0.0
    found = np.array([*factors.values()])
    if not np.all(np.isfinite(found)) or np.any(np.abs(found) <= _SMALL):
        return
    mean = float(np.mean(found))
    started = sum(np.any(problem.read(x)["initial_state"]) for x in np.ndindex(problem.lead))
    if (len(found) > 1 or started == 1) and np.ptp(found) <= _SMALL * abs(mean):
        yield Cause(_STARTED.format(f"{mean:.4g}"), _take_started(problem, {}, mean))
        return
    words = ", ".join(f"{c:.4g} in head {place(x)}" for x, c in sorted(factors.items()))
    yield Cause(_STARTED.format(f"a number of each head: {words}"), _take_started(problem, factors))


def _take_started(problem: Problem, factors: Mapping[Index, float], rest: float = 1.0) -> Problem:
    def read(index: Index) -> TokenArrays:
        x = problem.read(index)
        return {**x, **_scale(x, initial_state=factors.get(index, rest))}

    return problem._replace(read=read)


def _list_factors(problem: Problem, got: Mapping[Index, Doubles], most: float) -> Iterator[Suspect]:
    """Say that each row is the exact row times a number, as if norms of queries differ."""
    exact = [give(problem.read, x, problem.scale, problem.of) for x in got]
    x, y = np.concatenate([*got.values()]), np.concatenate(exact)
    factors = by_row(x, y)
    off = np.flatnonzero(np.abs(factors - 1) > _SMALL)
    few = 2 * len(off) < len(factors)
    used = np.where(np.abs(factors - 1) > _SMALL, factors, 1.0) if few else factors
    share = 1 - _FAR_LEFT * float(np.sum(np.square(x - used[:, None] * y))) / most
    if share < _MOST_BY_FACTORS or np.min(factors) < 0:
        return
    text = describe_factors(factors[off] if few else factors)
    if few:
        rows = [(*index, i) for index, out in got.items() for i in range(len(out))]
        first = name_row(min(rows[x] for x in off))
        text = f"{len(off)} of {len(rows)} rows, the first is {first}: {text}"
    elif np.ptp(factors) < _SMALL * np.max(factors):
        text = f"numbers are {np.median(factors):.4g} times what they should be"
    elif problem.of == "out":
        text += ": look at the norm of q"
    yield as_suspect(text, share, "seen")


def _mean_square(one: Cause, got: Mapping[Index, Doubles], roundings: Roundings) -> float:
    """Return the mean square of z of some heads."""
    squares = []
    for index, out in got.items():
        rows = one.problem.recurrence(index, roundings).rows.take(one.rows)
        taken = one.take(out, index)
        # What is added makes numbers larger, and their roundings.
        unit = np.median(rows.std / np.maximum(row_sizes(rows.out), 1e-300))
        std = np.maximum(rows.std, unit * row_sizes(one.view(out))) if one.adds else rows.std
        squares.append(np.mean(np.square(rows.errors(taken) / std)))
    return float(np.mean(squares)) if np.all(np.isfinite(squares)) else math.inf
