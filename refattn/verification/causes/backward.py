"""Why gradients fail: backward passes that go wrong, each tested on some rows of all parts.

A backward pass is given the output and the log normalisers of the forward pass. An alternative
changes what it computes again from these, its sums, or the heads that have part in them; or, where
no output was given or the output fails, the whole problem.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from ...arrays.blocks import blocks
from ...arrays.library import Doubles
from ...rounding.head import attend_rows, scan_tile
from ...rounding.problems import Gradient, Index
from ...rounding.profiles import Profile
from ...rounding.saved import BackwardHead
from ..findings import Part, Suspect
from .alternatives import list_alternatives
from .fitted import list_counted
from .output import as_suspect, say_what_is_left
from .places import list_places
from .sampled import Alternative, Rows
from .slips import LOST_TILES, hide_tile
from .wrong_rows import (
    FAR,
    Comparison,
    Sample,
    Sampled,
    compare_outputs,
    differ,
    divide,
    find_columns,
    find_near,
    find_tiles,
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
_PAIRS = 2**21  # of queries and keys of a head, at most, for new log normalisers
_SQUARE, _SHARE, _LIKE = 9.0, 0.95, 0.8  # of z, at most; of the error, and of the change, at least
_CANCELLED, _SURE = 2500.0, 0.9995  # the same where terms may cancel
_FEW_ROWS, _FEW_SHARE = 8, 0.5  # rows by which candidates are left out, and share of their error


class Kept(NamedTuple):
    """What the forward pass leaves: lse, D = d_out . out, and the largest scores."""

    lse: Doubles
    delta: Doubles
    top: Doubles


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
    of: str = ""  # name of the gradient that was written here by mistake


class Held(NamedTuple):
    """A candidate that holds in some parts."""

    candidate: Candidate
    parts: set[str]
    everywhere: bool  # whether these are all that failed, and it changes no others
    off: float  # log of the mean square of z that it leaves, on average
    local: bool  # whether it holds in the wrong rows alone


def list_candidates(gradient: Gradient, own: bool) -> Iterator[Candidate]:
    """List backward passes that go wrong, the plainest first."""
    for number, x in enumerate(_list_forward(gradient)):
        share = count_once
        if "shares key head" in x.text:
            assert gradient.forward.key_heads is not None
            share = partial(_deal, keys=gradient.forward.key_heads)
        if own:
            yield Candidate(x.text, number, True, share=share)
        words = f"in the backward pass {x.text} (with lse and out of the forward pass)"
        yield Candidate(words, number, share=share)
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
            f"D = d_out . out is that of {words}", change=partial(_roll, name="delta", by=by)
        )
        yield Candidate(f"lse is that of {words}", change=partial(_roll, name="lse", by=by))
    for words, factor in (("2", math.log2(math.e)), ("e, and is read to base 2", math.log(2))):
        text = f"lse is read as a logarithm to base {words}"
        yield Candidate(text, change=partial(_rescale_lse, factor=factor))
    text = "weights are not divided by their sum: lse is the largest score"
    yield Candidate(text, change=lambda x, y: (x, y._replace(lse=y.top)))
    text = "weights are divided twice by their sum"
    yield Candidate(text, change=lambda x, y: (x, y._replace(lse=2 * y.lse - y.top)))
    yield from _list_lost_queries(gradient)
    most = max(map(len, gradient.heads.values()), default=1)
    keys = gradient.forward.key_heads
    if most > 1 and keys is not None:
        text = f"the gradient is a sum over the query heads h of which h % {keys} is the key head"
        yield Candidate(text, share=partial(_deal, keys=keys))
    if most > 1:
        text = "the gradient is a mean over the query heads that share a key head, not their sum"
        yield Candidate(text, share=lambda x: [(y, 1 / len(x)) for y in x])
        for i in range(most):
            at = f"query head {i} of {most} that share a key head"
            for words, own_part, rest in (
                (f"only {at} has part", 1.0, 0.0),
                (f"{at} is left out", 0.0, 1.0),
                (f"{at} counts twice", 2.0, 1.0),
            ):
                weigh = partial(_weigh_heads, at=i, own=own_part, rest=rest)
                yield Candidate(words, share=weigh)
    n, m, _ = gradient.forward.shape
    for other in ("dq", "dk", "dv"):
        if other != gradient.of and n == m and most == 1:
            yield Candidate(f"{gradient.of} is {other}", of=other)


def _list_forward(gradient: Gradient) -> list[Alternative]:
    """List alternatives of the forward pass that a backward pass may compute again."""
    forward = gradient.forward
    lost = [hide_tile(forward, j) for j in _list_tiles(forward.shape[1])]
    groups = "shares key head"  # of others than these, gradients have other sums
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


def _list_lost_queries(gradient: Gradient) -> Iterator[Candidate]:
    if gradient.of != "dq":
        for i in _list_tiles(gradient.forward.shape[0]):
            text = f"queries {i.start} to {i.stop - 1} are left out"
            yield Candidate(text, change=partial(_lose_queries, tile=i))


def _lose_queries(x: BackwardHead, y: Kept, tile: slice) -> tuple[BackwardHead, Kept]:
    kept = np.ones(len(y.lse), bool)
    kept[tile] = False
    lse = np.where(kept, y.lse, math.inf)
    return x, y._replace(lse=lse)


def _cut_columns(x: BackwardHead, y: Kept, width: int) -> tuple[BackwardHead, Kept]:
    kept = np.arange(x.head.v.shape[-1]) < width
    return x._replace(head=x.head._replace(v=np.where(kept, x.head.v, 0.0))), y


def _cut_delta(x: BackwardHead, y: Kept, width: int) -> tuple[BackwardHead, Kept]:
    assert x.out is not None
    return x, y._replace(delta=np.sum((x.d_out * x.out)[:, :width], -1))


def _roll(x: BackwardHead, y: Kept, name: str, by: int) -> tuple[BackwardHead, Kept]:
    return x, y._replace(**{name: np.roll(getattr(y, name), by)})


def _rescale_lse(x: BackwardHead, y: Kept, factor: float) -> tuple[BackwardHead, Kept]:
    return x, y._replace(lse=factor * y.lse)


def _weigh_heads(
    heads: Sequence[Index], at: int, own: float, rest: float
) -> list[tuple[Index, float]]:
    return [(x, own if i == at else rest) for i, x in enumerate(heads)]


def _deal(heads: Sequence[Index], keys: int) -> list[tuple[Index, float]]:
    share = len(heads)
    return [((*x[:-1], x[-1] % share * keys + x[-1] // share), 1.0) for x in heads]


def compute_gradient(back: BackwardHead, kept: Kept, of: str) -> Doubles:
    """Compute a gradient from log normalisers and D that may be those of another problem."""
    head, g, keys = back.head, back.d_out, slice(0, back.head.keys)
    tile = scan_tile(head, slice(0, len(head.q)), keys)
    k, v = head.k[keys], head.v[keys]
    if tile is None:
        return np.zeros(
            ((head.q if of == "dq" else k).shape[0], (g if of == "dv" else k).shape[-1])
        )
    with np.errstate(all="ignore"):
        lse = np.where(np.isfinite(kept.lse), kept.lse, math.inf)[:, None]
        p = np.exp(tile.scores - lse)
        p = p if tile.visible is None else np.where(tile.visible, p, 0.0)
        if of == "dv":
            return np.asarray(p.T @ g)
        s = head.scale * p * (g @ v.T - kept.delta[:, None]) * tile.slope
        return np.asarray(s @ k if of == "dq" else s.T @ head.q)


class Backward:
    """The parts of one backward pass, with what they are computed from."""

    def __init__(
        self, parts: Mapping[str, Part], profile: Profile, dtype: str, where: Mapping[str, Index]
    ) -> None:
        read = {name: x.problem.read_by(profile).gradient for name, x in parts.items()}
        self.gradients = {name: x for name, x in read.items() if x is not None}
        self.from_out = profile.delta == "out"
        self.known: dict[tuple[Index, int, bool], tuple[BackwardHead, Kept]] = {}
        self.forward = _list_forward(next(iter(self.gradients.values())))
        self.samples = {
            name: self._draw(name, x, profile, dtype, where[name]) for name, x in parts.items()
        }

    def _keep(self, of: str, index: Index, number: int, own: bool) -> tuple[BackwardHead, Kept]:
        """Compute what the forward pass leaves, of the problem or of an alternative."""
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
            used = out if out is not None and self.from_out and not own else result.out
            used = np.where(np.isfinite(used), used, 0.0)
            kept = Kept(result.lse, np.sum(d_out * used, -1), result.top)
            self.known[key] = BackwardHead(head, d_out, used), kept
        return self.known[key]

    def predict(self, one: Candidate, of: str, index: Index, some: Any) -> Doubles:
        """Compute a gradient for some rows of a head."""
        gradient = self.gradients[of]
        wanted = one.of or of
        total: Any = 0.0
        share = count_once if wanted == "dq" else one.share  # each query has one head
        for head, weight in share(gradient.heads[index]):
            if not weight:
                continue
            back, kept = one.change(*self._keep(of, head, one.number, one.own))
            alternative = self.forward[one.number] if one.number >= 0 else None
            all_rows, keys = np.arange(len(back.head.q)), np.arange(back.head.keys)
            rows = Rows(head, some, keys) if wanted == "dq" else Rows(head, all_rows, some)
            problem = alternative or Alternative("", gradient.forward)
            taken = problem.head(rows)
            if one.number < 0 and taken.v.shape == back.head.v[rows.keys].shape:
                taken = taken._replace(v=back.head.v[rows.keys])
            i = rows.queries
            again = BackwardHead(taken, back.d_out[i], None)
            left = Kept(kept.lse[i], kept.delta[i], kept.top[i])
            total = total + weight * compute_gradient(again, left, wanted)
        return np.asarray(total)

    def list_counted(self, part: Part) -> Iterator[Candidate]:
        """List backward passes in which tiles of keys count otherwise in dq, by its wrong rows."""
        forward, sample = self.gradients["dq"].forward, self.samples["dq"]

        def columns(x: Sampled, size: int) -> Doubles:
            back, kept = self._keep("dq", x.rows.at, -1, False)
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

    def _draw(self, name: str, part: Part, profile: Profile, dtype: str, where: Index) -> Sample:
        """Take wrong rows of some heads, one of them that of the worst element, and right ones."""
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
                law = read.analyse(index, profile.kernel(dtype), slice(row, row + 1))
                z[row] = np.minimum(z[row], np.abs(divide(got[row] - exact[row], law.std[0])))
            far[at] = np.max(z, -1, initial=0.0)
            columns |= find_columns(z, strange[at])
        count = int(np.sum(~np.isnan(far)))
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
    parts: Mapping[str, Part], failed: Mapping[str, Index], profile: Profile, dtype: str, own: bool
) -> tuple[dict[str, list[Suspect]], dict[str, Sample], dict[str, list[Doubles]]]:
    """Return alternatives that explain the gradients that failed, samples, and what is right there.

    Each that failed has the place of its worst element.
    """
    back = Backward(parts, profile, dtype, {**dict.fromkeys(parts, ()), **failed})
    given = {
        of: [back.predict(Candidate(""), of, x.rows.at, x.rows.queries) for x in sample.heads]
        for of, sample in back.samples.items()
    }
    found: list[Held] = []
    few = {of: _take_largest(back.samples[of], given[of]) for of in failed}
    first = back.gradients[max(parts, key=lambda of: of != "dq")]
    n, m, _ = first.forward.shape
    lost = (x for x in (back.list_counted(parts["dq"]) if "dq" in failed else ()) if not found)
    for one in chain(list_candidates(first, own), lost):
        if one.own and n * m > _PAIRS and {*parts} != {"dq"}:
            continue
        if not any(back.may_hold(one, of, *x) for of, x in few.items()):
            continue
        holding, harmless, off, local = set(), True, 0.0, False
        for of, sample in back.samples.items():
            if one.of and (of != first.of or one.of == of):
                continue
            outs = [back.predict(one, of, x.rows.at, x.rows.queries) for x in sample.heads]
            if any(x.shape != y.shape for x, y in zip(outs, given[of], strict=True)):
                continue
            measured = compare_outputs(sample, outs, given[of])
            if of in failed:
                if (
                    _is_near(measured)
                    and measured.likeness > _LIKE
                    and (measured.everywhere or measured.near)
                ):
                    holding.add(of)
                    off += math.log(max(measured.square, 1.0))
                    local |= not measured.everywhere
            elif measured.changed:
                harmless = False
        if holding:
            everywhere = harmless and holding == {*failed}
            found.append(Held(one, holding, everywhere, off / len(holding), local))
    return _name(found, back, parts, [*failed]), back.samples, given


def _is_near(x: Comparison) -> bool:
    """Tell whether roundings may be what is left; those of large terms that cancel are larger."""
    if x.square < _SQUARE:
        return x.share > _SHARE
    return x.share > _SURE and x.square < _CANCELLED


def _name(
    found: Sequence[Held], back: Backward, parts: Mapping[str, Part], failed: Sequence[str]
) -> dict[str, list[Suspect]]:
    """Name what holds for all parts, or for as many as there are."""
    order = sorted(found, key=lambda x: (not x.everywhere, -len(x.parts), x.local, round(x.off, 0)))
    named: dict[str, list[Suspect]] = {}
    for of in failed:
        for x in [x for x in order if of in x.parts][:1]:
            only = [] if x.everywhere or len(parts) == 1 else [" and ".join(sorted(x.parts))]
            only += list_places(parts[of].problem, back.samples[of]) if x.local else ()
            alone = ", but only in " * bool(only) + ", ".join(only)
            suspect = as_suspect(f"agrees if {x.candidate.text}{alone}")
            named[of] = [say_what_is_left(suspect, *back.find_left(x.candidate, of, parts[of]))]
    return named
