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
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from ....arrays.blocks import blocks
from ....arrays.library import Doubles
from ...rounding.head import Tile, attend_rows, scan_tile
from ...rounding.problems import Gradient, Index, Problem
from ...rounding.profiles import Profile
from ...rounding.saved import BackwardHead
from ...verification.findings import Part
from ..operators.maps import list_head_rules
from ..operators.sums import PartTerms, stack_terms
from .alternatives import list_alternatives
from .heads import list_by_rules
from .sampled import Alternative, Result, Rows
from .sequences import list_later_queries
from .slips import TILE_SIZES, attend_by, list_parts, score_all
from .wrong_rows import (
    Comparison,
    Sample,
    Sampled,
    compare_outputs,
    draw_sample,
    finite,
    list_left,
    list_wrong,
    stay_wrong,
)


class Kept(NamedTuple):
    """What the forward pass leaves: lse, D = d_out . out, and the largest scores."""

    lse: Doubles
    delta: Doubles
    top: Doubles


HeadPass = tuple[BackwardHead, Kept]
Lookup = Callable[[Index], HeadPass]  # what a head is computed from
OfHead = Callable[[Index], Doubles]  # d_out
Take = Callable[[OfHead, Index], Doubles]  # what a head reads of that of all
Shares = Sequence[tuple[Index, float]]  # how often query heads are summed


def count_once(heads: Sequence[Index]) -> Shares:
    """Sum over all heads."""
    return [(x, 1.0) for x in heads]


class Candidate(NamedTuple):
    """A backward pass that may be what a kernel did."""

    text: str  # what is so, after "agrees if"
    number: int = -1  # of an alternative of the forward pass; -1 for the problem as it was given
    own: Sequence[str] = ()  # "lse", "delta": what the alternative gives, too
    # Change what a head is computed from, and choose the query heads that are summed, how often.
    change: Callable[[BackwardHead, Kept], HeadPass] = lambda x, y: (x, y)
    share: Callable[[Sequence[Index]], Shares] = count_once
    of: str = ""  # name of the gradient that was written by mistake
    to: str = ""  # and of that in whose place it is
    read: Callable[[Lookup, Index], HeadPass] = lambda look, at: look(at)
    tile: Callable[[Tile], Tile] = lambda x: x  # scores of the backward pass, and their slopes
    added: Mapping[tuple[str, Index], Doubles] = {}  # to each row, by gradient and head
    answer: Callable[[str, Index, Sequence[Index]], Doubles] | None = None  # of all of a head
    fitted: bool = False  # whether it has a number that is fitted


def list_candidates(gradient: Gradient, own: bool) -> Iterator[Candidate]:
    """List backward passes that go wrong, the plainest first."""
    forward, keys = gradient.forward, gradient.forward.key_heads
    n, m, _ = forward.shape
    for number, x in enumerate(_list_forward(gradient)):
        share = share_like(x, gradient)
        if own:
            yield Candidate(x.text, number, LSE_AND_DELTA, share=share)
        words = f"in the backward pass {x.text} (lse and out are right)"
        yield Candidate(words, number, share=share)
        if "sink" in x.text:
            words = f"in the backward pass weights are normalised as if {x.text}"
            yield Candidate(words, number, LSE_AND_DELTA[:1])
    yield from _list_undivided(gradient)
    for (those, edges), (said, names) in product(list_parts(forward), _OF_PARTS.items()):
        change = partial(_keep_parts, edges=edges, names=names)
        yield Candidate(f"in the backward pass {said} of {those}", change=change)
    places: dict[str, Take] = {
        x: partial(lambda rule, get, at: get(rule(at)), y) for x, y in list_head_rules(forward)
    }
    for words, take in {**_BESIDE, **places}.items():
        yield Candidate(f"d_out is read from {words}", read=partial(_read_derivatives, take))
    for words, change_slope in _SLOPES.items() if forward.softcap is not None else ():
        yield Candidate(f"the derivative of the soft cap is {words}", tile=change_slope)
    for text, (name, kept) in _OTHERWISE.items():
        change = partial(lambda name, of, x, y: (x, y._replace(**{name: of(y)})), name, kept)
        yield Candidate(text, change=change)
    for size in (x for x in (1, *TILE_SIZES) if x < n and gradient.of != "dq"):
        last = f"tile of {size} queries" if size > 1 else "query"
        text = f"of the queries that see a key, only the last {last} counts in its sum"
        yield Candidate(text, change=partial(_keep_last, size))
    most = max(map(len, gradient.heads.values()), default=1)
    if most > 1:
        if keys is not None:
            text = f"key head g sums the gradients of query heads h with h % {keys} = g"
            yield Candidate(text, share=partial(_deal, keys=keys))
        text = "the gradient is the mean over query heads that share a key head, not the sum"
        yield Candidate(text, share=lambda x: [(y, 1 / len(x)) for y in x])
    for one, other in permutations(("dq", "dk", "dv"), 2) if n == m and most == 1 else ():
        yield Candidate(f"{one} is {other}", of=other, to=one)


def share_like(x: Alternative, gradient: Gradient) -> Callable[[Sequence[Index]], Shares]:
    """Sum over the query heads that share a key head in an alternative."""
    keys = gradient.forward.key_heads
    return partial(_deal, keys=keys) if x.dealt and keys else count_once


def _list_undivided(gradient: Gradient) -> Iterator[Candidate]:
    """List gradients that sum keys, or queries, which are not divided by their norms there."""
    for x, called, to in (("k", "keys", "dq"), ("q", "queries", "dk")):
        if f"{x}_norm" in gradient.forward.first:
            text = f"{to} sums {called} that are not divided by their norms"
            yield Candidate(text, to=to, read=partial(_sum_undivided, gradient.forward, to))


def _sum_undivided(forward: Problem, to: str, look: Lookup, at: Index) -> HeadPass:
    """Multiply derivatives of scores, p (d_out . v - D), by the norms of keys, or of queries."""
    (x, y), arrays = look(at), forward.read(at)
    if to == "dk":
        norm = arrays["q_norm"]
        return x._replace(d_out=norm * x.d_out), y._replace(delta=norm[:, 0] * y.delta)
    norm = arrays["k_norm"]
    head = x.head._replace(v=norm * x.head.v)
    return x._replace(head=head), y._replace(delta=y.delta[:, None] * norm[:, 0])


LSE_AND_DELTA = "lse", "delta"
_OF_PARTS = {
    "weights are normalised in each": ("lse",),
    "weights and D = d_out . out are those in each": ("lse", "delta"),
    "D = d_out . out is that of the output in each": ("delta",),
}


def _keep_parts(x: BackwardHead, y: Kept, edges: Sequence[int], names: Sequence[str]) -> HeadPass:
    """Let each key have the log normalisers, D or both of its part of the keys."""
    s = score_all(x.head)
    found: dict[str, list[Doubles]] = {"lse": [], "delta": []}
    for j in map(slice, edges, [*edges[1:], x.head.keys]):
        part = attend_by(s[:, j], x.head.v[j])
        numbers = {"lse": part.lse, "delta": np.sum(x.d_out * finite(part.out), -1)}
        for name in names:
            found[name].append(np.repeat(numbers[name][:, None], j.stop - j.start, -1))
    return x, y._replace(**{name: np.concatenate(found[name], -1) for name in names})


_OTHERWISE: Mapping[str, tuple[str, Callable[[Kept], Doubles]]] = {
    "D = d_out . out is left out": ("delta", lambda y: 0 * y.delta),
    "lse is in base 2, but weights are e^(score - lse)": ("lse", lambda y: y.lse / math.log(2)),
    "lse is in base e, but weights are 2^(log2(e) score - lse)": (
        "lse",
        lambda y: y.lse * math.log(2),
    ),
    "weights are not divided by their sum: lse is the largest score": ("lse", lambda y: y.top),
    "weights are divided twice by their sum": ("lse", lambda y: 2 * y.lse - y.top),
}
_SLOPES: Mapping[str, Callable[[Tile], Tile]] = {
    "left out": lambda x: x._replace(slope=1.0),
    "applied twice": lambda x: x._replace(slope=np.square(x.slope)),
    "1 - tanh, not 1 - tanh^2": lambda x: x._replace(slope=1 - np.asarray(x.ratio)),
}
_BESIDE: Mapping[str, Take] = {
    "the query before": lambda get, at: np.roll(get(at), 1, 0),
    "the next query": lambda get, at: np.roll(get(at), -1, 0),
}


def _list_forward(gradient: Gradient) -> list[Alternative]:
    """List alternatives of the forward pass that a backward pass may compute again."""
    forward = gradient.forward
    usual = (x for x in (*list_alternatives(forward), *list_by_rules(forward)) if x.move is None)
    return [*usual, *list_later_queries(forward)]


def _keep_last(size: int, x: BackwardHead, y: Kept) -> HeadPass:
    """Let each key have the last tile of queries that sees it, and no other."""
    seen = np.isfinite(score_all(x.head)[:, : x.head.keys])
    tile = np.arange(len(seen))[:, None] // size
    last = np.max(np.where(seen, tile, -1), 0, initial=-1)
    return x, y._replace(lse=np.where(tile == last, y.lse[:, None], math.inf))


def raise_lse(by: Doubles, x: BackwardHead, y: Kept) -> HeadPass:
    """Raise log normalisers of queries or, by (1, keys), of their weights."""
    return x, y._replace(lse=y.lse + by if by.ndim == 1 else y.lse[:, None] + by)


def _read_derivatives(take: Take, look: Lookup, at: Index) -> HeadPass:
    """Read d_out of a head as `take` says, from those of all heads; D is made of it as well."""
    back, kept = look(at)
    d_out = take(lambda index: look(index)[0].d_out, at)
    delta = kept.delta if back.out is None else np.sum(d_out * back.out, -1)
    return back._replace(d_out=d_out), kept._replace(delta=delta)


def _deal(heads: Sequence[Index], keys: int) -> Shares:
    share = len(heads)
    # Query heads that share a key head lie `keys` heads apart, not one after another.
    return [((*x[:-1], x[-1] % share * keys + x[-1] // share), 1.0) for x in heads]


def compute_gradient(
    back: BackwardHead, kept: Kept, of: str, change: Callable[[Tile], Tile] = lambda x: x
) -> Doubles:
    """Compute a gradient from log normalisers and D that may be those of another problem."""
    weights, rows = factor_gradient(back, kept, of, change)
    return weights @ rows


def factor_gradient(
    back: BackwardHead, kept: Kept, of: str, change: Callable[[Tile], Tile] = lambda x: x
) -> tuple[Doubles, Doubles]:
    """Return the two factors of a gradient, which is a sum over keys (dq) or queries."""
    head, g, keys = back.head, back.d_out, slice(0, back.head.keys)
    tile = scan_tile(head, slice(0, len(head.q)), keys)
    k, v = head.k[keys], head.v[keys]
    rows = {"dq": k, "dk": head.q, "dv": g}[of]
    if tile is None:
        return np.zeros((len(head.q if of == "dq" else k), len(rows))), rows
    with np.errstate(all="ignore"):
        # Where no key is seen lse is -inf, and all weights are 0.
        lse = np.where(np.isfinite(kept.lse), kept.lse, math.inf).reshape(len(kept.lse), -1)
        delta, tile = kept.delta.reshape(len(lse), -1), change(tile)
        p = np.exp(tile.scores - lse)
        p = p if tile.visible is None else np.where(tile.visible, p, 0.0)
        if of == "dv":
            return p.T, rows
        s = head.scale * p * (g @ v.T - delta) * tile.slope
        return (s if of == "dq" else s.T), rows


class Backward:
    """The parts of one backward pass, with what they are computed from, and samples of each."""

    def __init__(
        self,
        parts: Mapping[str, Part],
        failed: Mapping[str, Index],
        profile: Profile,
        dtype: str,
        strange_alone: Collection[str] = (),
        rows: Mapping[str, Sequence[Index]] = MappingProxyType({}),
    ) -> None:
        self.parts, self.failed = parts, failed
        read = {name: x.problem.read_by(profile) for name, x in parts.items()}
        self.gradients = {name: x.gradient for name, x in read.items() if x.gradient is not None}
        self.first = self.gradients[max(parts, key=lambda of: of != "dq")]
        self.from_out = profile.delta == "out"
        self.known: dict[tuple[Index, int, Sequence[str]], HeadPass] = {}
        self.forward = _list_forward(next(iter(self.gradients.values())))
        self.samples = {
            name: draw_sample(
                read[name],
                x.numbers,
                profile,
                dtype,
                failed.get(name, ()),
                name in strange_alone,
                partial(self._compute, name),
                rows.get(name, ()),
            )
            for name, x in parts.items()
        }

    def _compute(self, of: str, index: Index, i: slice) -> Result:
        out = self.predict(Candidate(""), of, index, np.arange(i.start, i.stop))
        return Result(out, np.zeros(len(out)), np.zeros(len(out)))

    def list_wrong(self, of: str) -> list[Sampled]:
        """List all wrong rows of a part by head or, of many, some of them."""
        part = self.parts[of]
        return list_wrong(part.problem, part.numbers, self.samples[of].wrong)

    def keep(self, of: str, index: Index, number: int = -1, own: Sequence[str] = ()) -> HeadPass:
        """Compute what the forward pass leaves, of the problem or, if `own`, of an alternative."""
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
            back = BackwardHead(head, d_out, used)
            kept = Kept(result.lse, np.sum(d_out * used, -1), result.top)
            if own and "delta" not in own:
                back, right = self.keep(of, index)
                kept = kept._replace(delta=right.delta)
            self.known[key] = back, kept
        return self.known[key]

    def predict(self, one: Candidate, of: str, index: Index, some: Any) -> Doubles:
        """Compute a gradient for some rows of a head."""
        if one.answer is not None:
            return np.asarray(
                one.answer(one.of or of, index, self.gradients[of].heads[index])[some]
            )
        total: Any = one.added[of, index][some] if (of, index) in one.added else 0.0
        for weights, rows in self.list_factors(one, of, index, some):
            total = total + weights @ rows
        return np.asarray(total)

    def list_factors(
        self, one: Candidate, of: str, index: Index, some: Any
    ) -> Iterator[tuple[Doubles, Doubles]]:
        """List the two factors of some rows of a gradient for each query head with a part in it."""
        gradient = self.gradients[of]
        wanted = one.of or of
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
            factors = factor_gradient(again, left, wanted, one.tile)
            yield weight * factors[0], factors[1]

    def sum_tiles(
        self, of: str, x: Sampled, size: int, by: int = 0, one: Candidate | None = None
    ) -> Doubles:
        """Sum over tiles of keys, or of queries, what each adds to rows: (tiles, rows, columns).

        Or what its weights times the rows of the tile add that is so many tiles later; 0 beyond.
        """
        total: Any = 0.0
        for weights, rows in self.list_factors(one or Candidate(""), of, x.rows.at, x.rows.queries):
            at = np.arange(len(rows)) + by * size
            inside = (at >= 0) & (at < len(rows))
            rows = np.where(inside[:, None], rows[at % len(rows)], 0.0)
            tiles = blocks(0, len(rows), size)
            total = total + np.stack([weights[:, j] @ rows[j] for j in tiles])
        return np.asarray(total)

    def stack_ways(self, ways: Sequence[Candidate], of: str, some: Sequence[Sampled]) -> PartTerms:
        """Stack what candidates give for some rows, and these rows, as in `stack_terms`."""

        def compute(x: Sampled) -> PartTerms:
            at, i = x.rows.at, x.rows.queries
            return np.stack([self.predict(one, of, at, i) for one in ways]), x.got

        return stack_terms(some, self.samples[of].unit, compute)

    def find_left(self, one: Candidate, of: str) -> tuple[list[Index], int]:
        """Find wrong rows, of so many, that a candidate leaves wrong."""

        def stays(x: Sampled) -> Any:
            ways = (one, Candidate(""))
            out, given = (self.predict(y, of, x.rows.at, x.rows.queries) for y in ways)
            return stay_wrong(x.got, out, given, self.samples[of].unit)

        return list_left(self.list_wrong(of), stays)

    def predict_all(self, one: Candidate, of: str, sample: Sample) -> list[Doubles]:
        """Compute a gradient for the rows of a sample."""
        return [self.predict(one, of, x.rows.at, x.rows.queries) for x in sample.heads]

    def predict_samples(self, of: str) -> list[Doubles]:
        """Compute what is right in the rows of a sample."""
        return self.predict_all(Candidate(""), of, self.samples[of])

    def compare(
        self, one: Candidate, of: str, sample: Sample, given: Sequence[Doubles]
    ) -> Comparison | None:
        """Compare a candidate with what is right for some rows; None if its shape is another."""
        outs = self.predict_all(one, of, sample)
        same = all(x.shape == y.shape for x, y in zip(outs, given, strict=True))
        return compare_outputs(sample, outs, given) if same else None
