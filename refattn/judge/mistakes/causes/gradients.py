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
from ...rounding.formats import FORMATS
from ...rounding.head import scan_tile
from ...rounding.problems import Gradient, Index
from ...rounding.profiles import Profile
from ...rounding.saved import BackwardHead
from ...verification.empty_rows import find_unseen
from ...verification.findings import ONLY_IN, Part, Suspect, describe_span, name_heads, name_span
from ..defects.catalogue import Mutant
from ..operators import backward_counts, backward_places
from ..operators.backward_counts import COUNTS
from ..operators.intervals import find_interval
from ..operators.sums import describe_keys, fit_counts
from .backward import (
    LSE_AND_DELTA,
    Backward,
    Candidate,
    HeadPass,
    Lookup,
    Shares,
    compute_gradient,
    count_once,
    list_candidates,
    raise_lse,
    share_like,
)
from .edited import EditedHeads, as_clause, known_rows
from .places import as_suspect, list_places, say_what_is_left
from .sampled import Alternative
from .slips import name_keys
from .wrong_rows import (
    Comparison,
    Sample,
    Sampled,
    are_zero,
    differ,
    divide,
    fit_number,
    row_sizes,
)

_SQUARE, _SHARE, _LIKE = 9.0, 0.95, 0.8  # of z, at most; of the error, and of the change, at least
_CANCELLED, _SURE = 2500.0, 0.9995  # the same where terms may cancel
_OFF_ONCE, _SURELY_OFF = 0.005, 6.0  # of times; standard errors
_FEW_ROWS, _FEW_SHARE = 8, 0.5  # by which candidates are left out: share of their error
_PAIRS = 2**21  # of queries and keys of a head, at most, for new log normalisers
_FEWEST_ROWS = 8  # of a head, to which numbers are fitted
_OFF_TIMES = 0.05  # of the size of a vector, that another is off
_PADS = (16, 32, 64, 128)  # to which queries may be padded
_ROWS_OF_DQ, _MOST_REGROUPED = 8, 16  # of a head; heads that may use any key head
_MOST_QUERY_HEADS, _OFTENEST = 16, 4  # that count, and how often
_ABOVE_NOISE, _IN_SPAN = 1.5, 0.1  # of a singular value; and what is left of a row in a space


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
        # A fitted number, or a type that loosens roundings, is that of all parts that failed.
        if holding and (everywhere or not (one.fitted or "rounded to" in one.text)):
            found.append(Held(one, holding, everywhere, off / len(holding), local))
    return _name(found, back), back.samples, given


def _is_near(x: Comparison) -> bool:
    """Tell whether roundings may be what is left; those of large terms that cancel are larger.

    What a candidate changes is in the error once, not nearly once, as what is like it would be.
    """
    if abs(x.times - 1) > _OFF_ONCE + _SURELY_OFF * x.error:
        return False
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
        usual = False, True
        shown = forward.replaced(
            "mask", lambda at, x: (x | changed.get(at, usual)[0]) & changed.get(at, usual)[1]
        )
        back.forward.append(Alternative(text, shown))
        text = f"the backward pass {text} (lse and out are right)"
        yield Candidate(text, len(back.forward) - 1)


def _describe_changed(more: Any, kept: Any) -> str:
    parts = (more, "sees hidden {}"), (~kept, "does not see {}")
    return " and ".join(words.format(describe_keys(x)) for x, words in parts if x.any())


def _list_recomputed(back: Backward) -> Iterator[Candidate]:
    """List backward passes that compute a wrong forward pass again, with its log normalisers."""
    for number, x in ((i, x) for i, x in enumerate(back.forward) if x.text):
        words = f"in the backward pass, which computes the forward pass again, {x.text}"
        yield Candidate(words, number, LSE_AND_DELTA, share=share_like(x, back.first))


def _list_lost(back: Backward) -> Iterator[Candidate]:
    """List gradients in whose sums queries, or keys, one after another are lost, or count twice."""
    n, m, _ = back.first.forward.shape
    for of in sorted(back.failed):  # dk, dq, dv
        few, rights = _take_largest(back.samples[of], back.predict_samples(of))
        x, right = few.heads[0].take(few.heads[0].wrong), rights[0][few.heads[0].wrong]
        count, called = (m, ("key", "keys")) if of == "dq" else (n, ("query", "queries"))
        terms: Any = np.zeros((len(x.got), count, right.shape[-1] + 1))
        factors = back.list_factors(Candidate(""), of, x.rows.at, x.rows.queries)
        for weights, vectors in factors if len(x.got) else ():
            terms[..., 1:] += weights[..., None] * vectors
        whole = np.concatenate([np.ones((len(right), 1)), right], -1)
        sizes = back.samples[of].unit * row_sizes(right)
        for words, times in _QUERIES_COUNT.items() if len(x.got) else ():
            sums = np.pad(np.cumsum(times * terms, 1), ((0, 0), (1, 0), (0, 0)))
            _, i = find_interval(whole, sums, x.got, sizes)
            lost = (np.arange(count) >= i.start) & (np.arange(count) < i.stop)
            # Weights are e^(score - lse).
            by = np.where(lost, math.inf if times < 0 else -math.log(2), 0.0)
            if not lost.all():  # else it is a factor
                text = name_keys(i, words, *called)
                one = Candidate(text, change=partial(raise_lse, by if of != "dq" else by[None]))
                yield one
                if of != "dv":
                    text = f"{text} in derivatives of scores (dv is right)"
                    yield Candidate(text, answer=partial(_lose_derivatives, back, one))


def _lose_derivatives(
    back: Backward, one: Candidate, of: str, index: Index, _: Sequence[Index]
) -> Doubles:
    """Compute dq and dk as a candidate does, and dv rightly."""
    rows = np.arange(back.parts[of].problem.shape[0])
    return back.predict(Candidate("") if of == "dv" else one, of, index, rows)


_QUERIES_COUNT = {"are left out": -1.0, "count twice": 1.0}


def _list_weighed(back: Backward) -> Iterator[Candidate]:
    """List gradients in which other query heads than those of a key head count, and how often."""
    for of in (x for x in ("dv", "dk") if x in back.failed):
        heads = back.gradients[of].heads
        if max(map(len, heads.values()), default=1) == 1:
            return
        some = [x.few(backward_places.FITTED_ROWS) for x in back.list_wrong(of)]
        fitted = {x.rows.at: _fit_times(back, of, x) for x in some}
        counts = {at: x for at, x in fitted.items() if x is not None}
        if len(counts) < len(fitted):
            return
        if counts:
            by_first = {heads[at][0]: [*x.items()] for at, x in counts.items()}
            yield Candidate(
                _describe_weights(heads, counts),
                share=partial(lambda y, x: y.get(x[0], count_once(x)), by_first),
            )
            return


def _fit_times(back: Backward, of: str, x: Sampled) -> dict[Index, int] | None:
    """Fit how often each query head of a batch member counts in a sum over some; 0 is left out."""
    own = back.gradients[of].heads[x.rows.at]
    forward = back.gradients[of].forward
    heads, (n, m, _) = forward.lead[-1], forward.shape
    few = heads <= _MOST_QUERY_HEADS and heads * n * m <= backward_places.GROUPED_PAIRS
    every = [(*own[0][:-1], h) for h in range(heads)] if few else own

    # What each head would give alone.
    alone = [Candidate("", share=partial(_take_head, y)) for y in every]
    counts = fit_counts(*back.stack_ways(alone, of, [x]), [y in own for y in every], _OFTENEST)
    return None if counts is None else {y: int(c) for y, c in zip(every, counts, strict=True) if c}


def _take_head(head: Index, _: object) -> Shares:
    return [(head, 1.0)]


def _describe_weights(
    heads: Mapping[Index, Sequence[Index]], counts: Mapping[Index, Mapping[Index, int]]
) -> str:
    """Say which query heads count, by their place in each group if that is the same in all."""
    within = [[x.get(y, 0) for y in heads[at]] for at, x in counts.items()]
    alone = all({*x} <= {*heads[at]} for at, x in counts.items())
    if alone and len(counts) == len(heads) and all(x == within[0] for x in within):
        count = len(within[0])
        places = {c: np.flatnonzero(np.equal(within[0], c)) for c in COUNTS}
        words = []
        for c, these in places.items():
            if 0 < len(these) < count:
                which = describe_span(these).replace(" and ", " or ")
                words.append(f"query heads h with h % {count} = {which} {COUNTS[c]}")
            elif len(these):
                words.append(f"all query heads {COUNTS[c]}")
        return " and ".join(words)
    at, first = next(iter(counts.items()))
    more = f" (and {len(counts) - 1} more key heads are wrong)" if len(counts) > 1 else ""
    which = ", ".join(place(x) + f" ({c} times)" * (c > 1) for x, c in first.items()) or "none"
    return f"the gradient of key head {place(at)} sums query heads {which}{more}"


def _list_regrouped(back: Backward) -> Iterator[Candidate]:
    """List the backward pass whose query heads use other key heads, or none, by rows of dq."""
    forward = back.first.forward
    keys, count = forward.key_heads, forward.lead[-1] if forward.lead else 1
    if "dq" not in back.failed or not keys or keys == count:
        return
    share, heads = count // keys, [*np.ndindex(forward.lead)]
    wrong = [x.take(slice(_ROWS_OF_DQ)) for x in back.list_wrong("dq")]
    # A key head goes by the name of its first query head.
    own = {x: (*x[:-1], x[-1] // share * share) for x in heads}
    every = heads[::share] if len(heads) <= _MOST_REGROUPED else []
    for words, saved in (("", False), (", with the weights of the forward pass", True)):
        used: dict[Index, Index | None] = {**own}
        for x in wrong:
            at, off = x.rows.at, dict[Index, float]()
            for g in every or sorted({own[y] for y in heads if y[:-1] == at[:-1]}):
                out = _regroup(back, {at: g}, saved, "dq", at, [at])
                z = divide(differ(x.got, out[x.rows.queries]), row_sizes(x.got))
                off[g] = float(np.sum(np.square(z)))
            used[at] = min(off, key=off.__getitem__) if np.any(x.got) else None
        moved = {x: g for x, g in used.items() if g != own[x]}
        across = any(g is not None and g[:-1] != x[:-1] for x, g in moved.items())
        said = dict[str, list[Index]]()
        for at, g in moved.items():
            of = f" of batch member {place(g[:-1])}" if g and across else ""
            said.setdefault(f"key head {g[-1] // share}{of}" if g else "no key head", []).append(at)
        if said:
            each = [
                f"{words_of} by {name_heads(forward, np.array([forward.number(z) for z in y]))}"
                if across
                else f"{words_of} by {name_span('query heads', np.unique([z[-1] for z in y]))}"
                for words_of, y in said.items()
            ]
            text = f"in the backward pass a wrong key head is used: {', '.join(each)}{words}"
            yield Candidate(text, answer=partial(_regroup, back, used, saved))


def _regroup(
    back: Backward,
    used: Mapping[Index, Index | None],
    saved: bool,
    of: str,
    index: Index,
    heads: Sequence[Index],
) -> Doubles:
    """Compute a gradient whose query heads use key heads, with weights of these or `saved` ones."""
    total = np.zeros(back.parts[of].problem.shape[::2])
    for h, g in used.items():
        if g is None or (h if of == "dq" else g) != heads[0]:
            continue
        (held, kept), (other, _) = (back.keep(of, x) for x in (h, g))
        own = scan_tile(held.head, slice(0, len(held.head.q)), slice(0, held.head.keys))
        head = held.head._replace(k=other.head.k, v=other.head.v)
        again = BackwardHead(head, held.d_out, None)
        put = partial(lambda own, x: x._replace(scores=own.scores) if saved else x, own)
        total += compute_gradient(again, kept, of, put)
    return total


def _list_padded(back: Backward) -> Iterator[Candidate]:
    """List the backward pass whose sums have rows past the last query, which are not hidden.

    Errors are sums over these rows: a matrix of as many singular values, whose span has no row of a
    head, as whatever else is added would have.
    """
    forward, added, past = back.first.forward, dict[tuple[str, Index], Doubles](), set[int]()
    n, both = forward.shape[0], ("dk", "dv")
    if not {*both} <= {*back.failed}:
        return
    for of, x in ((y, x) for y in both for x in back.list_wrong(y)):
        heads = back.gradients[of].heads[x.rows.at]
        error = differ(x.got, back.predict(Candidate(""), of, x.rows.at, x.rows.queries))
        std = back.samples[of].unit * np.sqrt(np.mean(np.square(row_sizes(x.got)), -1))
        if not np.all(np.isfinite(error)) or not len(error):
            return
        u, sizes, span = np.linalg.svd(error / std[:, None], full_matrices=False)
        count = int(np.sum(sizes > _ABOVE_NOISE * sum(map(math.sqrt, error.shape))))
        pad = next((y for y in _PADS if len(heads) * (-n % y) == count), 0)
        if not 0 < count < min(error.shape) - 2 or not pad:
            return
        kept = [back.keep(of, y)[0] for y in np.ndindex(forward.lead)]
        # Rows of any head, and of the other array that is as wide, may be what is added.
        rows = [y.d_out if of == "dv" else y.head.q for y in kept]
        rows += [y.head.v if of == "dv" else y.head.k for y in kept]
        every = np.concatenate(rows)
        rest = every - every @ span[:count].T @ span[:count]
        own = np.sum(rest * rest, -1) < _IN_SPAN**2 * np.sum(every * every, -1)
        if np.any(own):
            return
        added[of, x.rows.at] = np.zeros((back.parts[of].problem.shape[0], error.shape[1]))
        added[of, x.rows.at][x.rows.queries] = std[:, None] * (
            u[:, :count] * sizes[:count] @ span[:count]
        )
        past |= {-n % pad}
    if len(past) == 1:
        more = past.pop()
        text = f"dk and dv also sum {more} rows past the last query of each head, not hidden, "
        yield Candidate(f"{text}as if {n} queries were padded to {n + more}", added=added)


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
            shape = back.parts[of].problem.shape[0], len(vector)
            added[of, x.rows.at] = np.broadcast_to(vector, shape)
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
            right = np.sum(gradient.derivatives(next_head)[0][:count], 0) - vector[0]
            off.append(np.max(np.abs(right)) / np.sqrt(np.mean(np.square(vector[0]))))
        if count and max(off) < _OFF_TIMES:
            return (
                f": the sum of d_out over queries 0 to {count - 1} of the next {words}, as if "
                f"the last tile of {size} queries ran past query {n - 1}"
            )
    return ""


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
        rounded = partial(
            lambda to, by, x: x._replace(scores=by * to.round(x.scores / by)), FORMATS[name], factor
        )
        yield Candidate(text, read=read, tile=rounded)


def _take_delta_of_out(gradient: Gradient, look: Lookup, at: Index) -> HeadPass:
    """Make D of the output that was written."""
    (back, kept), (d_out, out) = look(at), gradient.derivatives(at)
    return back, kept if out is None else kept._replace(delta=np.sum(d_out * out, -1))


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
        yield one._replace(
            text=f"in the backward pass {words} (lse and out are right)", fitted=True
        )


_SCALES = (0.25, 0.5, 0.8, 1.25, 2.0, 4.0)  # where a fit starts
_LISTINGS: tuple[Callable[[Backward], Iterator[Candidate]], ...] = (
    _list_masked,
    _list_weighed,
    _list_lost,
    backward_counts.list_tiles_counted,
    _list_rescaled,
    backward_places.list_read_elsewhere,
    _list_rounded_scores,
    _list_regrouped,
    backward_places.list_limited,
    backward_counts.list_columns_counted,
    backward_counts.list_chunks_seen,
    partial(backward_places.list_other_numbers, related=True),
    backward_places.list_of_tiles,
    _list_added_rows,
    _list_padded,
    backward_counts.list_transposed,
    backward_places.list_moved_terms,
    lambda back: list_edited_backward(back, known_rows(back.first.forward)),
    # Of each row: what has no such number comes first.
    partial(backward_places.list_other_numbers, related=False),
    backward_counts.list_other_normalisers,
)
