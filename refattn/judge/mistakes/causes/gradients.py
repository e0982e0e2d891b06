"""Search for the backward pass that explains gradients that failed; some are fitted to them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, product
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from ....arrays.library import Doubles
from ....arrays.words import place
from ...rounding.formats import FORMATS, Format
from ...rounding.head import Tile
from ...rounding.problems import Gradient, Index
from ...rounding.profiles import Profile
from ...rounding.saved import BackwardHead
from ...verification.empty_rows import find_unseen
from ...verification.findings import ONLY_IN, Part, Suspect
from ..defects.catalogue import Mutant
from ..operators.backward_places import (
    list_limited,
    list_moved_terms,
    list_of_tiles,
    list_regrouped,
    list_weighed,
)
from ..operators.intervals import find_interval
from ..operators.maps import write_shift
from ..operators.tiles import describe_keys
from .backward import (
    LENT,
    LSE_AND_DELTA,
    Backward,
    Candidate,
    HeadPass,
    Kept,
    Lookup,
    OfHead,
    compute_gradient,
    factor_gradient,
    list_candidates,
    raise_lse,
    read_elsewhere,
    share_like,
    shift_rows,
)
from .edited import EditedHeads, as_clause, known_rows
from .places import list_places
from .sampled import Alternative, Rows
from .slips import name_keys, score_all
from .suspects import as_suspect, say_what_is_left
from .wrong_rows import (
    Comparison,
    Sample,
    Sampled,
    are_zero,
    differ,
    divide,
    fit_number,
    row_sizes,
    thin,
)

_SQUARE, _SHARE, _LIKE = 9.0, 0.95, 0.8  # of z, at most; of the error, and of the change, at least
_CANCELLED, _SURE = 2500.0, 0.9995  # the same where terms may cancel
_FEW_ROWS, _FEW_SHARE = 8, 0.5  # by which candidates are left out: share of their error
_PAIRS = 2**21  # of queries and keys of a head, at most, for new log normalisers
_FEWEST_ROWS = 8  # of a head, to which numbers are fitted
_OFF_TIMES = 0.05  # of the size of a vector, that another is off
_PADS = (16, 32, 64, 128)  # to which queries may be padded
_SOLVED, _FEWEST_MOVED = 64, 8  # rows, at most and at least, of which numbers are computed
_MOVED, _NEAR_MOVED = 0.9, 6.0  # share of them that are moved, and how near
_MOST_HEADS, _HEADS_MOVED = 16, 8  # among which these are found, and of which
_ANY, _ONE_KEY = "another number", 0.8  # weight of a key, at least, whose errors are those of D
_READ_PAIRS = 2**22  # of queries and keys of all heads, at most, that are read otherwise


class Held(NamedTuple):
    """A candidate that holds in some parts."""

    candidate: Candidate
    parts: set[str]
    everywhere: bool  # whether these are all that failed, and it changes no others
    off: float  # log of the mean square of z that it leaves, on average
    local: bool  # whether it holds in the wrong rows alone


def _take_largest(sample: Sample, given: Sequence[Doubles]) -> tuple[Sample, list[Doubles]]:
    """Take the rows of a head whose errors are largest, and what is right there."""
    sizes = []
    for x, right in zip(sample.heads, given, strict=True):
        z = divide(differ(x.got, right), sample.unit * row_sizes(right))
        sizes.append(np.where(x.wrong, np.sum(z * z, -1), -1.0))
    at = max(range(len(sizes)), key=lambda x: float(np.max(sizes[x])), default=0)
    rows = [np.sort(np.argsort(-x)[:_FEW_ROWS]) for x in sizes[at : at + 1]]
    heads = [x.take(i) for x, i in zip(sample.heads[at:], rows, strict=False)]
    return sample._replace(heads=heads), [x[i] for x, i in zip(given[at:], rows, strict=False)]


def explain_backward(
    parts: Mapping[str, Part],
    failed: Mapping[str, Index],
    profile: Profile,
    dtype: str,
    own: bool,
    strange_alone: Collection[str] = (),
    mistakes: Sequence[Mutant] = (),
    rows: Mapping[str, Sequence[Index]] = MappingProxyType({}),
) -> tuple[dict[str, list[Suspect]], dict[str, Sample], dict[str, list[Doubles]]]:
    """Return alternatives that explain the gradients that failed, samples, and what is right there.

    Each that failed has the place of its worst element; of some, only rows with NaN or infinity
    are wrong, of others only these `rows`.
    """
    back = Backward(parts, failed, profile, dtype, strange_alone, rows)
    given = {of: back.predict_samples(of) for of in back.samples}
    found: list[Held] = []
    few = {of: _take_largest(back.samples[of], given[of]) for of in failed}
    zero = {of for of in failed if are_zero(back.samples[of])}
    n, m, _ = back.first.forward.shape
    listings = [*_LISTINGS, *(() if own else [_list_recomputed])]

    # Fits are tried only until one cause holds in all parts, in right rows and parts as well.
    def is_open() -> bool:
        return all(x.local or not x.everywhere or x.parts != {*failed} for x in found)

    some = (x for x in listings if is_open())
    lost = (x for listing in some for x in listing(back) if is_open())
    mine = list_edited_backward(back, mistakes, of_user=True)
    for one in chain(mine, list_candidates(back.first, own), lost):
        if one.own and n * m > _PAIRS and {*parts} != {"dq"}:
            continue
        first = (back.compare(one, of, *x) for of, x in few.items())
        if not any(x is not None and x.share > _FEW_SHARE for x in first):
            continue
        holding, harmless, off, local = set(), True, 0.0, False
        for of, sample in back.samples.items():
            measured = back.compare(one, of, sample, given[of]) if one.to in ("", of) else None
            if measured is None:
                continue
            if of in failed:
                held = measured.everywhere or measured.near
                if held and _is_near(measured) and measured.likeness > _LIKE:
                    holding.add(of)
                    off += math.log(max(measured.square, 1.0))
                    local |= not measured.everywhere
            # A candidate that spoils a gradient that passed is not the cause in all parts.
            elif measured.changed and measured.likeness < _LIKE:
                harmless = False
        everywhere = harmless and holding == {*failed}
        # Zeros alone tell of no cause but that they were never written: any loss of all keys fits.
        holding -= set() if everywhere and holding - zero else zero
        # A fitted number is that of all parts that failed, or of none.
        if holding and (everywhere or "±" not in one.text):
            found.append(Held(one, holding, everywhere, off / len(holding), local))
    return _name(found, back), back.samples, given


def _is_near(x: Comparison) -> bool:
    """Tell whether roundings may be what is left; those of large terms that cancel are larger."""
    if x.square < _SQUARE:
        return x.share > _SHARE
    return x.share > _SURE and x.square < _CANCELLED


def _name(found: Sequence[Held], back: Backward) -> dict[str, list[Suspect]]:
    """Name what holds for all parts, or for as many as there are."""
    order = sorted(found, key=_rank_held)
    named: dict[str, list[Suspect]] = {}
    for of in back.failed:
        for x in [x for x in order if of in x.parts][:1]:
            # If others fail that it does not explain, the same mistake may still be in them.
            alone = x.parts == {*back.failed} and not (x.everywhere or x.candidate.to)
            only = [] if not alone or len(back.parts) == 1 else [" and ".join(sorted(x.parts))]
            only += list_places(back.parts[of].problem, back.samples[of]) if x.local else ()
            words = ONLY_IN * bool(only) + ", ".join(only)
            suspect = as_suspect(f"agrees if {x.candidate.text}{words}")
            named[of] = [say_what_is_left(suspect, *back.find_left(x.candidate, of))]
    return named


def _rank_held(x: Held) -> tuple[Any, ...]:
    """Put plain causes first; another problem that holds in some rows is less plain than a loss."""
    other = x.local and x.candidate.number >= 0
    return not x.everywhere, -len(x.parts), x.local, round(x.off, 0), other


def list_edited_backward(
    back: Backward, rows: Iterable[Mutant], of_user: bool = False
) -> Iterator[Candidate]:
    """List backward passes that compute by an edited text, if heads are small enough."""
    forward, derivatives = back.first.forward, back.first.derivatives
    for row in rows:
        heads = EditedHeads(forward, row.fn, lambda x: derivatives(x)[0], of_user)
        if row.fn.over == "backward" and row.estimator == forward.called and heads.are_small:
            one = Candidate(as_clause(row.effect), answer=heads.pull)
            try:  # it may not take the options, or fail in any way
                for of, sample in back.samples.items():
                    back.predict_all(one, of, sample)
            except ValueError:
                continue
            yield one


def _list_known(back: Backward) -> Iterator[Candidate]:
    """List the package's own rows of backward passes."""
    yield from list_edited_backward(back, known_rows(back.first.forward))


def _list_masked(back: Backward) -> Iterator[Candidate]:
    """List the backward pass that sees hidden keys, or misses some: by rows of dk or dv."""
    forward, of = back.first.forward, next((x for x in ("dv", "dk") if x in back.failed), "")
    if "mask" not in forward.first or not of:
        return
    changed: dict[Index, tuple[Any, Any]] = {}
    for at, heads in back.gradients[of].heads.items():
        got = np.any(back.parts[of].numbers.out(at) != 0, -1)
        # A row that is not 0 is of a key that some query saw.
        unseen = np.all([find_unseen(forward, x) for x in heads], 0)
        kept = got | unseen | ("dq" not in back.failed)  # else it may never have been written
        if np.any(got & unseen) or not kept.all():
            changed |= dict.fromkeys(heads, (got & unseen, kept))
    if changed:
        every = [_describe_changed(*x) for x in changed.values()]
        more = f" in head {place(next(iter(changed)))} (and others in {len(changed) - 1} more)"
        alike = len(changed) == math.prod(forward.lead) and len({*every}) == 1
        text = f"{every[0]}{more * (not alike)}"
        back.forward.append(
            Alternative(text, forward.replaced("mask", partial(_show_changed, changed)))
        )
        text = f"the backward pass {text} (lse and out are right)"
        yield Candidate(text, len(back.forward) - 1)


def _describe_changed(more: Any, kept: Any) -> str:
    parts = (more, "sees hidden {}"), (~kept, "does not see {}")
    return " and ".join(words.format(describe_keys(x)) for x, words in parts if x.any())


def _show_changed(changed: Mapping[Index, tuple[Any, Any]], at: Index, mask: Any) -> Any:
    more, kept = changed.get(at, (False, True))
    return (mask | more) & kept


def _list_recomputed(back: Backward) -> Iterator[Candidate]:
    """List backward passes that compute a wrong forward pass again, with its log normalisers."""
    for number, x in ((i, x) for i, x in enumerate(back.forward) if x.text):
        words = f"in the backward pass, which computes the forward pass again, {x.text}"
        yield Candidate(words, number, LSE_AND_DELTA, share=share_like(x, back.first))


def _list_lost(back: Backward) -> Iterator[Candidate]:
    """List gradients in whose sums queries one after another are lost, or count twice."""
    n = back.first.forward.shape[0]
    for of in (x for x in ("dv", "dk") if x in back.failed):
        few, rights = _take_largest(back.samples[of], back.predict_samples(of))
        x, right = few.heads[0].take(few.heads[0].wrong), rights[0][few.heads[0].wrong]
        terms: Any = np.zeros((len(x.got), n, right.shape[-1] + 1))
        for head in back.gradients[of].heads[x.rows.at] if len(x.got) else ():
            held, kept = back.keep(of, head)
            rows = Rows(head, np.arange(n), x.rows.queries)
            some = held._replace(head=Alternative("", back.first.forward).head(rows))
            weights, vectors = factor_gradient(some, kept, of)
            terms[..., 1:] += weights[..., None] * vectors
        whole = np.concatenate([np.ones((len(right), 1)), right], -1)
        sizes = back.samples[of].unit * row_sizes(right)
        for words, times in _QUERIES_COUNT.items() if len(x.got) else ():
            sums = np.pad(np.cumsum(times * terms, 1), ((0, 0), (1, 0), (0, 0)))
            _, i = find_interval(whole, sums, x.got, sizes)
            # Weights are e^(score - lse).
            lost = (np.arange(n) >= i.start) & (np.arange(n) < i.stop)
            by = np.where(lost, math.inf if times < 0 else -math.log(2), 0.0)
            if not lost.all():  # else it is a factor
                text = name_keys(i, words, "query", "queries")
                yield Candidate(text, change=partial(raise_lse, by))


_QUERIES_COUNT = {"are left out": -1.0, "count twice": 1.0}


def _list_added_rows(back: Backward) -> Iterator[Candidate]:
    """List gradients to whose rows, in each head, one and the same vector is added."""
    for of in back.failed:
        added: dict[tuple[str, Index], Doubles] = {}
        for x in back.list_wrong(of):
            error = differ(x.got, back.predict(Candidate(""), of, x.rows.at, x.rows.queries))
            # If one vector is added to all rows it is the mean of their errors.
            vector = np.mean(error, 0)
            z = divide(error - vector, back.samples[of].unit * row_sizes(x.got))
            if len(error) < _FEWEST_ROWS or not np.mean(z * z) < _SQUARE:
                added = {}
                break
            added[of, x.rows.at] = vector
        if added:
            rows = back.parts[of].problem.rows
            text = f"the same vector is added to {of} of all {rows} of a head"
            yield Candidate(text + _describe_added(back, of, added), added=added)


def _describe_added(back: Backward, of: str, added: Mapping[tuple[str, Index], Doubles]) -> str:
    """Say if it is the sum of the first rows of d_out of the next head, as a tile would have it."""
    gradient = back.gradients[of]
    lead, n = gradient.forward.lead, gradient.forward.shape[0]
    heads = [*np.ndindex(lead)]
    steps = {"head": 1, "batch member": lead[-1] if lead else 1}
    for size, (words, step) in product(_PADS if of == "dv" else (), steps.items()):
        off, count = [], -n % size
        for (_, at), vector in added.items():
            next_head = heads[(heads.index(gradient.heads[at][-1]) + step) % len(heads)]
            right = np.sum(gradient.derivatives(next_head)[0][:count], 0) - vector
            off.append(np.max(np.abs(right)) / np.sqrt(np.mean(np.square(vector))))
        if count and max(off) < _OFF_TIMES:
            return (
                f": the sum of d_out over queries 0 to {count - 1} of the next {words}, as if "
                f"the last tile of {size} queries ran past query {n - 1}"
            )
    return ""


def _list_other_strides(back: Backward) -> Iterator[Candidate]:
    """List backward passes that read D or lse, or what D is made of, with other strides."""
    forward = back.first.forward
    n, m, _ = forward.shape
    if not forward.lead or forward.lead[-1] == 1 or math.prod(forward.lead) * n * m > _READ_PAIRS:
        return
    for (name, called), (words, take) in product(_OF_QUERIES.items(), _STRIDES.items()):
        read = partial(read_elsewhere, name, partial(_take_turned, forward.lead[-1], take))
        yield Candidate(f"{called} is read with the strides of {words}", read=read)


def _take_turned(heads: int, turn: Callable[[Doubles], Doubles], get: OfHead, at: Index) -> Doubles:
    """Take numbers of a head from those of all heads, (heads, rows)."""
    return np.asarray(turn(np.stack([get((*at[:-1], h)) for h in range(heads)]))[at[-1]])


_OF_QUERIES = {x: LENT[x] for x in ("delta", "lse")}
_STRIDES: Mapping[str, Callable[[Doubles], Doubles]] = {
    "(heads, rows), not (rows, heads)": lambda x: x.T.reshape(x.shape),
    "(rows, heads), not (heads, rows)": lambda x: x.reshape(x.shape[::-1]).T,
}


def _list_shifted(back: Backward) -> Iterator[Candidate]:
    """List backward passes that read D or lse of other queries, by its wrong rows of dq."""
    forward = back.first.forward
    if "dq" not in back.failed or math.prod(forward.shape[:2]) > _PAIRS:
        return
    heads = [*np.ndindex(forward.lead)][:_MOST_HEADS]
    for name, called in _OF_QUERIES.items():
        found: dict[Index, tuple[Index, int]] = {}
        for x in back.list_wrong("dq")[:_HEADS_MOVED]:
            values, errors = _solve_for(back, name, x)
            theirs = {y: getattr(back.keep("dq", y)[1], name) for y in heads}
            near = find_shift(x.rows.queries, values, errors, theirs)
            if near is None:
                found = {}
                break
            found |= {x.rows.at: near} if near != (x.rows.at, 0) else {}
        if found:
            words = ", ".join(
                f"in head {place(x)} from query {write_shift('i', by)} of head {place(y)}"
                for x, (y, by) in found.items()
            )
            text = f"{called} of query i is read from another query (0 beyond the last): {words}"
            yield Candidate(text, read=partial(read_elsewhere, name, partial(_take_shifted, found)))


def _take_shifted(found: Mapping[Index, tuple[Index, int]], get: OfHead, at: Index) -> Doubles:
    other, by = found.get(at, (at, 0))
    return shift_rows(get(other), by)


def find_shift(
    queries: Any, values: Doubles, errors: Doubles, theirs: Mapping[Index, Doubles]
) -> tuple[Index, int] | None:
    """Find the head, and how many queries later, of which numbers of some queries are."""
    known = np.isfinite(errors)
    if np.sum(known) < max(_FEWEST_MOVED, _MOVED * len(queries)):
        return None
    some = thin(np.flatnonzero(known), _SOLVED)
    i, values, errors = queries[some], values[some], errors[some]
    best, found = 0.0, None
    for head, x in theirs.items():
        padded = np.concatenate([np.zeros(len(x)), x, np.zeros(len(x))])
        shifts = np.arange(-(len(x) // 2), len(x) // 2 + 1)  # most are not beyond the ends
        near = np.zeros(len(shifts))
        for row, value, error in zip(i, values, errors, strict=True):
            near += np.abs(padded[len(x) + row + shifts] - value) < _NEAR_MOVED * error
        if near.max() > best:
            best, found = near.max(), (head, int(shifts[near.argmax()]))
    return found if best >= _MOVED * len(some) else None


def _solve_for(back: Backward, name: str, x: Sampled) -> tuple[Doubles, Doubles]:
    """Compute D or lse from wrong rows of dq, and their standard deviations.

    These are infinite where no number explains the row.
    """
    held, kept = back.keep("dq", x.rows.at)
    i = x.rows.queries
    keys = np.arange(held.head.keys)
    head = Alternative("", back.gradients["dq"].forward).head(x.rows._replace(keys=keys))

    def of_delta(delta: Doubles) -> Doubles:
        some = Kept(kept.lse[i], delta, kept.top[i])
        return compute_gradient(BackwardHead(head, held.d_out[i], None), some, "dq")

    delta = kept.delta[i]
    # Gradients are linear in D and in e^-lse: a row tells the number by least squares.
    exact, slope = of_delta(delta), of_delta(delta + 1) - of_delta(delta)
    if name == "lse":
        exact, slope = 0 * exact, exact
    size = np.maximum(np.sum(slope * slope, -1), 1e-300)
    number = np.sum((x.got - exact) * slope, -1) / size
    std = back.samples["dq"].unit * row_sizes(x.got)
    left = divide(x.got - exact - number[:, None] * slope, std)
    error = np.sqrt(np.sum(np.square(slope * std), -1)) / size
    error = np.where(np.mean(left * left, -1) < _SQUARE, error, math.inf)
    if name == "delta":
        return delta + number, error
    with np.errstate(all="ignore"):
        return kept.lse[i] - np.log(number), np.where(number > 0, error / number, math.inf)


def _list_rounded_scores(back: Backward) -> Iterator[Candidate]:
    """List backward passes that round scores which the forward pass does not."""
    forward = back.first.forward
    scale = forward.scale
    by = {"scores are": 1.0, "q . k is": scale}
    if forward.softcap is not None or "bias" in forward.first or not scale:
        del by["q . k is"]
    elif math.frexp(scale)[0] == 0.5:  # a power of 2
        by = {"q . k is (or scores are)": scale}
    # D is that of the profile or, if a kernel computes the weights again, of the output.
    reads: Any = Candidate("").read, partial(_take_delta_of_out, back.first)
    for name, (words, factor), read in product(("bfloat16", "float16"), by.items(), reads):
        text = f"in the backward pass {words} rounded to {name}"
        yield Candidate(text, read=read, tile=partial(_round_scores, FORMATS[name], factor))


def _take_delta_of_out(gradient: Gradient, look: Lookup, at: Index) -> HeadPass:
    """Make D of the output that was written."""
    (back, kept), (d_out, out) = look(at), gradient.derivatives(at)
    return back, kept if out is None else kept._replace(delta=np.sum(d_out * out, -1))


def _round_scores(to: Format, by: float, tile: Tile) -> Tile:
    return tile._replace(scores=by * to.round(tile.scores / by))


def _list_solved(back: Backward) -> Iterator[Candidate]:
    """List the backward pass with another D in some rows, those of dq that one number explains."""
    n, m, _ = back.first.forward.shape
    if "dq" not in back.failed or n * m > _PAIRS:
        return
    problem, found, solved = back.parts["dq"].problem, {}, [np.zeros((8, 0))]
    for x in back.list_wrong("dq") if problem.shape[2] >= _FEWEST_ROWS else ():
        values, errors = _solve_for(back, "delta", x)
        found[x.rows.at] = x.rows.queries, values
        (held, kept), i = back.keep("dq", x.rows.at), x.rows.queries
        sinks = score_all(held.head)[i, held.head.keys :] - kept.lse[i, None]
        of_keys = 1 - np.sum(np.exp(sinks), -1)
        near = [np.roll(kept.delta, by)[i] for by in (0, 1, -1)]
        by_sinks, top = [near[0] / of_keys, near[0] * of_keys], np.exp(kept.top - kept.lse)[i]
        solved.append(np.stack([top, values, errors, *near, *by_sinks]))
    top, values, errors, *near = np.concatenate(solved, -1)
    if not len(values) or not np.all(np.isfinite(errors)):
        return
    named = _relate(values / errors, near / errors)
    # Where one key has nearly all of the weight, any error of it is as of another D.
    if named == _ANY and np.median(top) > _ONE_KEY:
        return
    rows = back.samples["dq"]._replace(columns=np.ones(0, bool))  # D is of whole rows
    where = ", ".join(list_places(problem, rows))
    text = f"D = d_out . out is {named} in {where or 'all rows'}"
    yield Candidate(text, read=partial(read_elsewhere, "delta", partial(_take_solved, found)))


def _relate(values: Doubles, near: Doubles) -> str:
    """Say if numbers are 0, those of queries beside theirs, or the right ones times one number."""
    factor = float(np.sum(near[0] * values) / max(np.sum(near[0] * near[0]), 1e-300))
    related = {
        "left out": 0 * values,
        "that of the query before": near[1],
        "that of the next query": near[2],
        f"multiplied by {factor:.3g}": factor * near[0],
        "divided by 1 - the weight of the sink": near[3],
        "multiplied by 1 - the weight of the sink": near[4],
    }
    for name, x in related.items():
        if np.mean(np.square(values - x)) < _SQUARE and name != "multiplied by 1":
            return name
    return _ANY


def _take_solved(found: Mapping[Index, tuple[Any, Doubles]], get: OfHead, at: Index) -> Doubles:
    """Take numbers that were found for some rows."""
    numbers: Any = get(at).copy()
    rows, values = found.get(at, ([], 0.0))
    numbers[rows] = values
    return np.asarray(numbers)


def _list_rescaled(back: Backward) -> Iterator[Candidate]:
    """List the backward pass with another scale, which is fitted to some wrong rows."""
    forward, one = back.first.forward, Candidate("", len(back.forward))
    of, sample = next((x, back.samples[x]) for x in back.failed)
    few = [x.take(np.flatnonzero(x.wrong)[:_FEW_ROWS]) for x in sample.heads[:1]]
    if not (forward.scale and any(len(x.got) for x in few)):
        return
    if math.prod(forward.shape[:2]) > _PAIRS:
        return
    back.forward.append(Alternative("", forward))

    def compute(c: float) -> list[Doubles]:
        back.forward[one.number] = Alternative("", forward._replace(scale=c * forward.scale))
        return back.predict_all(one, of, sample._replace(heads=few))

    got = [x.got for x in few]
    if (fitted := fit_number(compute, got, got, sample.unit, _SCALES)) is not None:
        compute(fitted[0])
        words = f"the scale is {fitted[0]:.4f} ± {fitted[1]:.1g} times the declared scale"
        yield one._replace(text=f"in the backward pass {words} (lse and out are right)")


_SCALES = (0.25, 0.5, 0.8, 1.25, 2.0, 4.0)  # where a fit starts
_LISTINGS: tuple[Callable[[Backward], Iterator[Candidate]], ...] = (
    _list_masked,
    list_weighed,
    _list_lost,
    Backward.list_counted,
    _list_rescaled,
    _list_shifted,
    _list_other_strides,
    _list_rounded_scores,
    list_regrouped,
    list_limited,
    list_of_tiles,
    _list_added_rows,
    list_moved_terms,
    _list_solved,
    _list_known,
)
