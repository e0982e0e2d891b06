"""Why gradients fail: backward passes that go wrong, each tested on some rows of all parts.

A backward pass is given the output and the log normalisers of the forward pass. An alternative
changes what it computes again from these, its sums, or the heads that have part in them; or, where
no output was given or the output fails, the whole problem.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import permutations, product
from typing import Any, NamedTuple

import numpy as np

from ....arrays.blocks import blocks
from ....arrays.library import Doubles
from ...rounding.head import attend_rows, scan_tile
from ...rounding.problems import Gradient, Index, Problem
from ...rounding.profiles import Profile
from ...rounding.saved import BackwardHead
from ...verification.findings import Part
from .alternatives import list_alternatives
from .fitted import list_counted
from .heads import list_other_heads
from .sampled import Alternative, Rows
from .slips import LOST_TILES, attend_by, hide_tile, list_parts, score_all, take_sink
from .wrong_rows import (
    FAR,
    Sample,
    Sampled,
    compare_outputs,
    differ,
    divide,
    find_columns,
    find_near,
    find_tiles,
    finite,
    list_wrong,
    measure_unit,
    row_sizes,
    set_apart,
    stay_wrong,
    thin,
)

_HEADS, _WRONG_ROWS, _RIGHT_ROWS = 3, 24, 12  # that are taken
_MAY_CANCEL, _LOOKED_AGAIN = 1e4, 64  # what is beyond it where terms cancel, and rows, at most
_MOST_TILES = 8  # of keys or queries, of a size
_LOOKED, _MOST_HEADS = 2**22, 16  # pairs, and heads, at most, among which wrong rows are found
_FEW_SHARE = 0.5  # of the error of few rows, at most, where a candidate is left out


class Kept(NamedTuple):
    """What the forward pass leaves: lse, D = d_out . out, and the largest scores."""

    lse: Doubles
    delta: Doubles
    top: Doubles


Lookup = Callable[[Index], tuple[BackwardHead, Kept]]  # what a head is computed from


def count_once(heads: Sequence[Index]) -> list[tuple[Index, float]]:
    """Sum over all heads."""
    return [(x, 1.0) for x in heads]


class Candidate(NamedTuple):
    """A backward pass that may be what a kernel did."""

    text: str  # what is so, after "agrees if"
    number: int = -1  # of an alternative of the forward pass; -1 for the problem as it was given
    own: bool = False  # whether the alternative gives the log normalisers and D, too
    # Change what a head is computed from, and choose the query heads that are summed, how often.
    change: Callable[[BackwardHead, Kept], tuple[BackwardHead, Kept]] = lambda x, y: (x, y)
    share: Callable[[Sequence[Index]], Sequence[tuple[Index, float]]] = count_once
    of: str = ""  # name of the gradient that was written by mistake
    to: str = ""  # and of that in whose place it is
    read: Callable[[Lookup, Index], tuple[BackwardHead, Kept]] = lambda look, at: look(at)
    scores: Callable[[Doubles], Doubles] = lambda x: x  # of the backward pass
    added: Mapping[tuple[str, Index], Doubles] = {}  # to each row, by gradient and head
    answer: Callable[[str, Index, Sequence[Index]], Doubles] | None = None  # of all of a head


def list_candidates(gradient: Gradient, own: bool) -> Iterator[Candidate]:
    """List backward passes that go wrong, the plainest first."""
    for number, x in enumerate(_list_forward(gradient)):
        share = _share_like(x, gradient)
        if own:
            yield Candidate(x.text, number, True, share=share)
        words = f"in the backward pass {x.text} (lse and out are right)"
        yield Candidate(words, number, share=share)
    yield from _list_undivided(gradient)
    d, d_v = gradient.forward.first["q"].shape[-1], gradient.forward.shape[2]
    widths = sorted({x for x in (d, 16, 32, 64, 128, 256, d_v - 1, d_v // 2) if 0 < x < d_v})
    for width in widths:
        text = f"columns {width} to {d_v - 1} of v are left out of d_out . v"
        yield Candidate(text, change=partial(_cut_columns, width=width))
        text = f"columns {width} to {d_v - 1} are left out of D = d_out . out"
        yield Candidate(text, change=partial(_cut_delta, width=width))
    yield Candidate(
        "D = d_out . out is left out", change=lambda x, y: (x, y._replace(delta=0 * y.delta))
    )
    for words, by in (("the query before", 1), ("the next query", -1)):
        yield Candidate(
            f"D = d_out . out is read from {words}", change=partial(_roll, name="delta", by=by)
        )
        yield Candidate(f"lse is read from {words}", change=partial(_roll, name="lse", by=by))
        yield Candidate(f"d_out is read from {words}", change=partial(_roll_derivatives, by=by))
    for text, factor in (
        ("lse is in base 2, but weights are e^(score - lse)", math.log2(math.e)),
        ("lse is in base e, but weights are 2^(log2(e) score - lse)", math.log(2)),
    ):
        yield Candidate(text, change=partial(_rescale_lse, factor=factor))
    text = "weights are not divided by their sum: lse is the largest score"
    yield Candidate(text, change=lambda x, y: (x, y._replace(lse=y.top)))
    for those, edges in list_parts(gradient.forward):
        for said, names in _OF_PARTS.items():
            change = partial(_keep_parts, edges=edges, names=names)
            yield Candidate(f"in the backward pass {said} of {those}", change=change)
    text = "weights are divided twice by their sum"
    yield Candidate(text, change=lambda x, y: (x, y._replace(lse=2 * y.lse - y.top)))
    if gradient.forward.has_sinks:
        text = "in the backward pass the sink is ignored: weights are normalised without it"
        yield Candidate(text, change=_normalise_without_sink)
    called = {"d_out": "d_out", "delta": "D = d_out . out", "lse": "lse"}
    for (words, whose), name in product(list_other_heads(gradient.forward), called):
        text = f"{called[name]} is read from {words}"
        yield Candidate(text, read=partial(read_moved, name, partial(_move, whose)))
    yield from _list_weighed_queries(gradient)
    most = max(map(len, gradient.heads.values()), default=1)
    keys = gradient.forward.key_heads
    if most > 1 and keys is not None:
        text = f"key head g sums the gradients of query heads h with h % {keys} = g"
        yield Candidate(text, share=partial(_deal, keys=keys))
    if most > 1:
        text = "the gradient is the mean over query heads that share a key head, not the sum"
        yield Candidate(text, share=lambda x: [(y, 1 / len(x)) for y in x])
        for i in range(most):
            at = f"query head {i} of {most} that share a key head"
            for words, own_part, rest in (
                (f"only {at} counts", 1.0, 0.0),
                (f"{at} is left out", 0.0, 1.0),
                (f"{at} counts twice", 2.0, 1.0),
            ):
                weigh = partial(_weigh_heads, at=i, own=own_part, rest=rest)
                yield Candidate(words, share=weigh)
    n, m, _ = gradient.forward.shape
    for one, other in permutations(("dq", "dk", "dv"), 2) if n == m and most == 1 else ():
        yield Candidate(f"{one} is {other}", of=other, to=one)


def list_recomputed(gradient: Gradient) -> Iterator[Candidate]:
    """List backward passes that compute a wrong forward pass again, with its log normalisers."""
    for number, x in enumerate(_list_forward(gradient)):
        words = f"in the backward pass, which computes the forward pass again, {x.text}"
        yield Candidate(words, number, True, share=_share_like(x, gradient))


def _share_like(x: Alternative, gradient: Gradient) -> Callable[..., list[tuple[Index, float]]]:
    """Sum over the query heads that share a key head in an alternative."""
    if "uses key head" not in x.text:
        return count_once
    assert gradient.forward.key_heads is not None
    return partial(_deal, keys=gradient.forward.key_heads)


def _list_undivided(gradient: Gradient) -> Iterator[Candidate]:
    """List gradients that sum keys, or queries, which are not divided by their norms there."""
    for x, called, to in (("k", "keys", "dq"), ("q", "queries", "dk")):
        if f"{x}_norm" in gradient.forward.first:
            text = f"{to} sums {called} that are not divided by their norms"
            yield Candidate(text, to=to, read=partial(_sum_undivided, gradient.forward, to))


def _sum_undivided(forward: Problem, to: str, look: Lookup, at: Index) -> tuple[BackwardHead, Kept]:
    """Multiply derivatives of scores, p (d_out . v - D), by the norms of keys, or of queries."""
    (x, y), arrays = look(at), forward.read(at)
    if to == "dk":
        norm = arrays["q_norm"]
        return x._replace(d_out=norm * x.d_out), y._replace(delta=norm[:, 0] * y.delta)
    norm = arrays["k_norm"]
    head = x.head._replace(v=norm * x.head.v)
    return x._replace(head=head), y._replace(delta=y.delta[:, None] * norm[:, 0])


_OF_PARTS = {
    "weights are normalised in each": ("lse",),
    "weights and D = d_out . out are those in each": ("lse", "delta"),
    "D = d_out . out is that of the output in each": ("delta",),
}


def _keep_parts(
    x: BackwardHead, y: Kept, edges: Sequence[int], names: Sequence[str]
) -> tuple[BackwardHead, Kept]:
    """Let each key have the log normalisers, D or both of its part of the keys."""
    s = score_all(x.head)
    found: dict[str, list[Doubles]] = {"lse": [], "delta": []}
    for j in map(slice, edges, [*edges[1:], x.head.keys]):
        part = attend_by(s[:, j], x.head.v[j])
        numbers = {"lse": part.lse, "delta": np.sum(x.d_out * finite(part.out), -1)}
        for name in names:
            found[name].append(np.repeat(numbers[name][:, None], j.stop - j.start, -1))
    return x, y._replace(**{name: np.concatenate(found[name], -1) for name in names})


def _list_forward(gradient: Gradient) -> list[Alternative]:
    """List alternatives of the forward pass that a backward pass may compute again."""
    forward = gradient.forward
    lost = [hide_tile(forward, j) for j in _list_tiles(forward.shape[1])]
    groups = "uses key head"  # of others than these, gradients have other sums
    dealt = f"query head h {groups} h % {forward.key_heads}"
    usual = [x for x in list_alternatives(forward) if x.move is None]
    return [*(x for x in usual if groups not in x.text or x.text == dealt), *lost]


def _list_tiles(length: int) -> list[slice]:
    """List tiles that may be lost; of the smaller ones the first and the last."""
    tiles = []
    for size in (x for x in LOST_TILES if x < length):
        some = list(blocks(0, length, size))
        tiles += some if len(some) <= _MOST_TILES else [some[0], some[-1]]
    return tiles


def _list_weighed_queries(gradient: Gradient) -> Iterator[Candidate]:
    if gradient.of != "dq":
        for i in _list_tiles(gradient.forward.shape[0]):
            for words, by in (("are left out", math.inf), ("count twice", -math.log(2))):
                text = f"queries {i.start} to {i.stop - 1} {words}"
                yield Candidate(text, change=partial(_weigh_queries, tile=i, by=by))


def _weigh_queries(x: BackwardHead, y: Kept, tile: slice, by: float) -> tuple[BackwardHead, Kept]:
    """Let queries count otherwise: e^-by times."""
    lse = y.lse.copy()
    # Weights are e^(score - lse).
    lse[tile] += by
    return x, y._replace(lse=lse)


def _cut_columns(x: BackwardHead, y: Kept, width: int) -> tuple[BackwardHead, Kept]:
    kept = np.arange(x.head.v.shape[-1]) < width
    return x._replace(head=x.head._replace(v=np.where(kept, x.head.v, 0.0))), y


def _cut_delta(x: BackwardHead, y: Kept, width: int) -> tuple[BackwardHead, Kept]:
    assert x.out is not None
    return x, y._replace(delta=np.sum((x.d_out * x.out)[:, :width], -1))


def _roll(x: BackwardHead, y: Kept, name: str, by: int) -> tuple[BackwardHead, Kept]:
    return x, y._replace(**{name: np.roll(getattr(y, name), by)})


def _roll_derivatives(x: BackwardHead, y: Kept, by: int) -> tuple[BackwardHead, Kept]:
    d_out = np.roll(x.d_out, by, 0)
    delta = y.delta if x.out is None else np.sum(d_out * x.out, -1)
    return x._replace(d_out=d_out), y._replace(delta=delta)


def _move(whose: Callable[[Index], Index], index: Index) -> tuple[Index, int]:
    return whose(index), 0


def read_moved(
    name: str, source: Callable[[Index], tuple[Index, int]], look: Lookup, at: Index
) -> tuple[BackwardHead, Kept]:
    """Read "delta", "lse" or "d_out" of another head, of queries that stand later."""
    (back, kept), (other, shift) = look(at), source(at)
    if (other, shift) == (at, 0):
        return back, kept
    theirs, left = look(other)
    if name == "d_out":
        delta = np.sum(theirs.d_out * back.out, -1) if back.out is not None else kept.delta
        return back._replace(d_out=theirs.d_out), kept._replace(delta=delta)
    return back, kept._replace(**{name: shift_rows(getattr(left, name), shift)})


def shift_rows(x: Doubles, by: int) -> Doubles:
    """Take the numbers that stand so many places later; 0 beyond the last, or before the first."""
    at = np.arange(len(x)) + by
    return np.where((at >= 0) & (at < len(x)), x[np.clip(at, 0, len(x) - 1)], 0.0)


def _normalise_without_sink(x: BackwardHead, y: Kept) -> tuple[BackwardHead, Kept]:
    return x, y._replace(lse=take_sink(y.lse, x.head.sink))


def _rescale_lse(x: BackwardHead, y: Kept, factor: float) -> tuple[BackwardHead, Kept]:
    return x, y._replace(lse=factor * y.lse)


def _weigh_heads(
    heads: Sequence[Index], at: int, own: float, rest: float
) -> list[tuple[Index, float]]:
    return [(x, own if i == at else rest) for i, x in enumerate(heads)]


def _deal(heads: Sequence[Index], keys: int) -> list[tuple[Index, float]]:
    share = len(heads)
    # Query heads that share a key head lie `keys` heads apart, not one after another.
    return [((*x[:-1], x[-1] % share * keys + x[-1] // share), 1.0) for x in heads]


def compute_gradient(
    back: BackwardHead, kept: Kept, of: str, scores: Callable[[Doubles], Doubles] = lambda x: x
) -> Doubles:
    """Compute a gradient from log normalisers and D that may be those of another problem."""
    head, g, keys = back.head, back.d_out, slice(0, back.head.keys)
    tile = scan_tile(head, slice(0, len(head.q)), keys)
    k, v = head.k[keys], head.v[keys]
    if tile is None:
        return np.zeros(
            ((head.q if of == "dq" else k).shape[0], (g if of == "dv" else k).shape[-1])
        )
    with np.errstate(all="ignore"):
        # Where no key is seen lse is -inf, and all weights are 0.
        lse = np.where(np.isfinite(kept.lse), kept.lse, math.inf).reshape(len(kept.lse), -1)
        delta = kept.delta.reshape(len(lse), -1)
        p = np.exp(scores(tile.scores) - lse)
        p = p if tile.visible is None else np.where(tile.visible, p, 0.0)
        if of == "dv":
            return np.asarray(p.T @ g)
        s = head.scale * p * (g @ v.T - delta) * tile.slope
        return np.asarray(s @ k if of == "dq" else s.T @ head.q)


class Backward:
    """The parts of one backward pass, with what they are computed from."""

    def __init__(
        self,
        parts: Mapping[str, Part],
        profile: Profile,
        dtype: str,
        where: Mapping[str, Index],
        strange_alone: Collection[str] = (),
    ) -> None:
        read = {name: x.problem.read_by(profile).gradient for name, x in parts.items()}
        self.gradients = {name: x for name, x in read.items() if x is not None}
        self.from_out = profile.delta == "out"
        self.known: dict[tuple[Index, int, bool], tuple[BackwardHead, Kept]] = {}
        self.forward = _list_forward(next(iter(self.gradients.values())))
        self.samples = {
            name: self._draw(name, x, profile, dtype, where[name], name in strange_alone)
            for name, x in parts.items()
        }

    def keep(
        self, of: str, index: Index, number: int = -1, own: bool = False
    ) -> tuple[BackwardHead, Kept]:
        """Compute what the forward pass leaves, of the problem or of an alternative."""
        # Without `own` the forward pass is right: one entry serves all such alternatives.
        key = index, number if own else -1, own
        if key not in self.known:
            gradient = self.gradients[of]
            head, (d_out, out) = gradient.forward.head(index), gradient.derivatives(index)
            n = len(head.q)
            if own:
                rows = Rows(index, np.arange(n), np.arange(head.keys))
                result = self.forward[number].result(rows)
            else:
                result = attend_rows(head, slice(0, n), None)
            # D is made of the output that was written if the profile reads it, and else of the
            # exact one.
            used = out if out is not None and self.from_out and not own else result.out
            used = np.where(np.isfinite(used), used, 0.0)
            kept = Kept(result.lse, np.sum(d_out * used, -1), result.top)
            self.known[key] = BackwardHead(head, d_out, used), kept
        return self.known[key]

    def predict(self, one: Candidate, of: str, index: Index, some: Any) -> Doubles:
        """Compute a gradient for some rows of a head."""
        gradient = self.gradients[of]
        wanted = one.of or of
        if one.answer is not None:
            return np.asarray(one.answer(wanted, index, gradient.heads[index])[some])
        total: Any = one.added.get((of, index), 0.0)
        look = partial(self.keep, of, number=one.number, own=one.own)
        share = count_once if wanted == "dq" else one.share  # each query has one head
        for head, weight in share(gradient.heads[index]):
            if not weight:
                continue
            back, kept = one.change(*one.read(look, head))
            alternative = self.forward[one.number] if one.number >= 0 else None
            all_rows, keys = np.arange(len(back.head.q)), np.arange(back.head.keys)
            rows = Rows(head, some, keys) if wanted == "dq" else Rows(head, all_rows, some)
            problem = alternative or Alternative("", gradient.forward)
            taken = problem.head(rows)
            if one.number < 0 and taken.v.shape == back.head.v[rows.keys].shape:
                # A candidate may have changed the values.
                taken = taken._replace(v=back.head.v[rows.keys])
            i = rows.queries
            again = BackwardHead(taken, back.d_out[i], None)
            # Parts of the keys may have their own.
            left = Kept(*(x[i] if x.ndim == 1 else x[np.ix_(i, rows.keys)] for x in kept))
            total = total + weight * compute_gradient(again, left, wanted, one.scores)
        return np.asarray(total)

    def list_counted(self, part: Part) -> Iterator[Candidate]:
        """List backward passes in which tiles of keys count otherwise in dq, by its wrong rows."""
        forward, sample = self.gradients["dq"].forward, self.samples["dq"]

        def columns(x: Sampled, size: int) -> Doubles:
            back, kept = self.keep("dq", x.rows.at, -1, False)
            i = x.rows.queries
            some = Kept(kept.lse[i], kept.delta[i], kept.top[i])
            tiles = []
            for j in blocks(0, back.head.keys, size):
                head = Alternative("", forward).head(Rows(x.rows.at, i, np.arange(j.start, j.stop)))
                tiles.append(compute_gradient(BackwardHead(head, back.d_out[i], None), some, "dq"))
            sums = np.stack([*tiles, -x.got], -1)
            return divide(sums, (sample.unit * row_sizes(np.sum(sums[..., :-1], -1)))[..., None])

        wrong = list_wrong(part.problem, part.numbers, sample.wrong)
        for x in list_counted(forward, wrong, columns, find_tiles(sample.wrong)):
            self.forward.append(x)
            yield Candidate(f"in the backward pass {x.text}", len(self.forward) - 1)

    def find_left(self, one: Candidate, of: str, part: Part) -> tuple[list[Index], int]:
        """Find wrong rows, of so many, that a candidate leaves wrong."""
        left: list[Index] = []
        count, sample = 0, self.samples[of]
        for x in list_wrong(part.problem, part.numbers, sample.wrong):
            at, i = x.rows.at, x.rows.queries
            out, given = (self.predict(y, of, at, i) for y in (one, Candidate("")))
            off = stay_wrong(x.got, out, given, sample.unit)
            left += [(*at, int(row)) for row in i[off]]
            count += len(off)
        return left, count

    def may_hold(self, one: Candidate, of: str, sample: Sample, given: Sequence[Doubles]) -> bool:
        """Tell whether a candidate explains enough of a few rows to be computed for others."""
        outs = [self.predict(one, of, x.rows.at, x.rows.queries) for x in sample.heads]
        same = all(x.shape == y.shape for x, y in zip(outs, given, strict=True))
        return same and compare_outputs(sample, outs, given).share > _FEW_SHARE

    def _draw(
        self,
        name: str,
        part: Part,
        profile: Profile,
        dtype: str,
        where: Index,
        strange_alone: bool,
    ) -> Sample:
        """Take wrong rows of some heads, one of them that of the worst element, and right ones.

        Rows with NaN or infinity may be the only wrong ones.
        """
        problem, given = part.problem, Candidate("")
        worst = problem.number(where[:-2]) if where else 0
        read = problem.read_by(profile)
        unit = measure_unit(read, profile, dtype)
        heads, n = [*np.ndindex(problem.lead)], problem.shape[0]
        far, taken = np.full((len(heads), n), np.nan), []
        columns, strange = np.zeros((2, problem.shape[2]), bool), np.zeros(far.shape, bool)
        looked = int(np.clip(_LOOKED // max(n * problem.shape[1], 1), _HEADS, _MOST_HEADS))
        spread = {*np.linspace(0, len(heads) - 1, looked).astype(int).tolist(), worst}
        for at in sorted(spread):
            index = heads[at]
            exact = self.predict(given, name, index, np.arange(n))
            got = part.numbers.out(index)
            error = differ(got, exact)
            strange[at] = ~np.isfinite(np.sum(error, -1))
            z = np.abs(divide(error, unit * row_sizes(exact)))
            most = np.max(z, -1, initial=0.0)
            doubtful = np.flatnonzero((most > FAR) & (most < _MAY_CANCEL))
            for row in thin(doubtful, _LOOKED_AGAIN):
                law = read.analyse(index, profile.roundings(dtype), slice(row, row + 1))
                z[row] = np.minimum(z[row], np.abs(divide(got[row] - exact[row], law.std[0])))
            far[at] = np.max(z, -1, initial=0.0)
            columns |= find_columns(z, strange[at])
        count = int(np.sum(~np.isnan(far)))
        if strange_alone:
            far, columns[0] = np.where(strange | (far <= FAR), far, np.nan), False
        far, of_others = set_apart(far, strange, columns)
        wrong = far > FAR
        near = find_near(wrong, problem)
        order = sorted(spread, key=lambda x: (-int(wrong[x].sum()), x))
        right = [x for x in order if not wrong[x].any()]
        for at in [*[x for x in order if wrong[x].any()][:_HEADS], *right[:_HEADS]]:
            bad, good = np.flatnonzero(wrong[at]), np.flatnonzero(far[at] <= FAR)
            inside = np.flatnonzero(near[at] & (far[at] <= FAR))
            right_rows = (*thin(good, _RIGHT_ROWS), *thin(inside, _RIGHT_ROWS))
            some = {*thin(bad, _WRONG_ROWS), *right_rows}
            rows = Rows(heads[at], np.array(sorted(some)), np.arange(0))
            if some:
                mark = wrong[at, rows.queries] if wrong.any() else np.ones(len(some), bool)
                i = rows.queries
                taken.append(Sampled(rows, part.numbers.out(heads[at])[i], None, mark, near[at, i]))
        return Sample(taken, unit, wrong, of_others, count)
