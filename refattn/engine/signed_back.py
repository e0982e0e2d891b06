r"""Gradients of attention that is linear in features, in time linear in the tokens.

The kernel of query i and key j is :math:`\kappa_{ij} = \sum_s \phi_{is} \psi_{js}`, where features
are values times e^log. With :math:`G_i = [\bar g_i, -\delta_i] / Z_i`, the normaliser
:math:`Z_i = \sum_j \kappa_{ij}` and :math:`m_{ij} = G_i \cdot [v_j, 1]`,

.. math::
    \bar\phi_{is} = \sum_j m_{ij} \, \psi_{js}, \qquad
    \bar\psi_{js} = \sum_i m_{ij} \, \phi_{is}, \qquad
    \bar v_j = \sum_i \kappa_{ij} \, \bar g_i / Z_i

over the pairs that see each other. Keys are summed on the way forth, as in `engine.causal`, and
queries on the way back: each leaf reads the sums of what lies before it, and its own pairs
one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ..arrays.arithmetic import (
    exp_from,
    exp_of_sum,
    multiply,
    sum_of_products,
    sum_of_visible,
    times,
    with_ones,
)
from ..arrays.blocks import (
    WHOLE,
    add_part,
    block_shape,
    blocks,
    most_threads,
    part,
    some_heads,
    sum_to,
    tiles,
)
from ..arrays.library import (
    Array,
    array_namespace,
    as_written,
    device,
    fused,
    is_numpy_array,
    own_copy,
    untraced,
)
from ..arrays.threads import Sequencer, for_each
from ..features import Features
from ..numbers.tape import Traced, given, pull_to_steps
from .attend_back import pull_normaliser, zeros_of
from .causal import Seen, heads_at_once, leaf_shape, leaves, running, step_size, whole_leaves
from .hops import Keys, joined
from .scores import causal_mask
from .signed import FeatureMap, Signed, Totals, attend_by_sums, merge_totals

_AXES = (-3, -3)  # of leaves, in the two arrays of `Totals`
_LEAF_BACK = 64  # tokens of a leaf on NumPy
_SHARES = 4  # of the heads, at least, for threads
_KEPT = 2**20  # features of some heads that are kept on the way forth for the way back, at most


class PulledLinear(NamedTuple):
    """Cotangents of the arguments, and of what features are made of beside tokens."""

    q: Array
    keys: Keys
    parameters: tuple[Array, ...]


# What tokens take, and which parameters take what in which of their rows.
TakenByTokens = tuple[Array, list[tuple[int, slice, Array]]]
Give = Callable[[int, slice, Array], None]  # of which argument or parameter, to which rows


class Mapped(NamedTuple):
    """Features of tokens, values times e^log, and how their cotangents are pulled back.

    These are of log where there are no values, or of values at a fixed log.
    """

    values: Array | None  # (..., c, F), None for 1
    log: Array  # (..., c, F), or (..., c, 1) where the features of a token have one scale
    pull: Callable[[Array], TakenByTokens]
    xp: Any  # namespace of the arrays

    def over(self, base: Array, blind: Array) -> Mapped:
        """Divide features of queries by the scale of their normalisers; 0 where `blind`."""
        return self._replace(log=self.xp.where(blind, -math.inf, -base))

    def at_base_of(self, totals: Totals) -> Array:
        """Evaluate features at the base of sums."""
        factor = exp_of_sum(self.log, self.xp.matrix_transpose(totals.base), self.xp)
        return factor if self.values is None else self.values * factor

    def sums(self, x: Array) -> Totals:
        """Sum features times x, (..., F, w), with a base for each feature or one for all."""
        # Features with logs of their own have a base each: one for all would flush small ones.
        xp, base = self.xp, self.xp.max(self.log, axis=-2, keepdims=True)
        features = exp_from(self.log, base, xp)
        features = features if self.values is None else self.values * features
        return Totals(sum_of_products(xp.matrix_transpose(features), x), xp.matrix_transpose(base))

    def pull_pairs(self, x: Array, totals: Totals) -> Array:
        """Pull x, which the tokens bring to pairs with those that were summed, back to features."""
        moved = multiply(x, self.xp.matrix_transpose(totals.total))
        return _times_exp_of_sum(moved, self.log, self.xp.matrix_transpose(totals.base), self.xp)

    def pull_values(self, totals: Totals) -> Array:
        """Pull sums over queries back to the values of the keys."""
        return multiply(self.at_base_of(totals), totals.total[..., :-1])

    def cut(self, shape: tuple[int, int]) -> Mapped:
        """Cut tokens into leaves; what is missing has no features."""
        xp, log, missing = self.xp, self.log, math.prod(shape) - self.log.shape[-2]
        if missing:  # a log of 0, which `leaves` would fill in, is a feature of 1
            options = {"dtype": log.dtype, "device": device(log)}
            none = xp.full((*log.shape[:-2], missing, log.shape[-1]), -math.inf, **options)
            log = xp.concat([log, none], axis=-2)
        values = None if self.values is None else leaves(self.values, shape, xp)
        return self._replace(values=values, log=leaves(log, shape, xp))


@fused
def _times_exp_of_sum(x: Array, log: Array, base: Array, xp: Any) -> Array:
    """Multiply our own temporary `x` by e^(log + base)."""
    return times(x, xp.exp(log + base))


class SignedBack:
    """Features of either sign, traced; a scale of queries cancels."""

    bases = 1

    def __init__(self, arithmetic: Signed, arrays: tuple[Array, ...]) -> None:
        self.phi_q, self.phi_k = arithmetic.phi_q, arithmetic.phi_k
        self.width, self.splits, self.parameters = arithmetic.width, arithmetic.splits, arrays

    def _traced(
        self, phi: FeatureMap, x: Array, head: tuple[slice, ...]
    ) -> tuple[Features, Callable[..., TakenByTokens], bool]:
        """Map tokens; return how cotangents are pulled back, and whether log scales have any."""
        tokens = given(x, light=True)
        arrays = [given(some_heads(y, head), light=True) for y in self.parameters]
        mapped = values, log_scale = phi(tokens, tuple(arrays), None)

        def pull(*cotangents: Array | None) -> TakenByTokens:
            # Those of all heads, which may share these features.
            both = zip(cotangents, mapped, strict=True)
            summed = tuple(g if g is None else sum_to(g, y.shape) for g, y in both)
            found = pull_to_steps(mapped, summed, [tokens, *arrays])
            moved = [(i, WHOLE, found[y.step]) for i, y in enumerate(arrays) if y.step in found]
            return found.get(tokens.step, zeros_of(x)), moved

        moves = isinstance(log_scale, Traced) and log_scale.step.moves
        return Features(untraced(values), untraced(log_scale)), pull, moves

    def queries(self, q: Array, head: tuple[slice, ...], i: slice, xp: Any) -> Mapped:
        """Make features of queries, without their scale."""
        (values, _), pull, _ = self._traced(self.phi_q, q, head)
        return Mapped(values, xp.zeros_like(values[..., :1]), lambda x: pull(x, None), xp)

    def keys(self, k: Array, head: tuple[slice, ...], xp: Any) -> Mapped:
        """Make features of keys."""
        (values, log_scale), pull, moves = self._traced(self.phi_k, k, head)
        log = xp.zeros_like(values[..., :1]) if log_scale is None else log_scale[..., None]
        if not moves:
            return Mapped(values, log, lambda x: pull(x, None), xp)
        return Mapped(values, log, lambda x: pull(x, xp.sum(x * values, axis=-1)), xp)

    def scale(
        self, queries: Mapped, before: Totals, keys: Mapped | None, visible: Array | None
    ) -> tuple[Array, Array]:
        """Find minus the log scale of the normaliser of each query, and the inverse of the rest."""
        # The normaliser is summed again, as the forward pass returns the output only.
        xp, base = queries.xp, before.base
        if keys is not None:
            logs = xp.where(visible, xp.matrix_transpose(keys.log), -math.inf)
            base = xp.maximum(base, xp.max(logs, axis=-1, keepdims=True))
        blind = (base == -math.inf) | (queries.log == -math.inf)
        queries = queries.over(base, blind)
        mass = multiply(queries.at_base_of(before), before.total[..., -1:])
        if keys is not None:
            mass = mass + xp.sum(self.weights(queries, keys, visible), axis=-1, keepdims=True)
        return queries.log, _inverse(mass, blind, xp)

    def weights(self, queries: Mapped, keys: Mapped, visible: Array | None) -> Array:
        """Evaluate the kernels of pairs, 0 where hidden."""
        products = multiply(queries.values, queries.xp.matrix_transpose(keys.values))
        return _scale_pairs(queries, keys, products, visible)

    def to_queries(self, queries: Mapped, keys: Mapped, products: Array, visible: Array) -> Array:
        """Pull cotangents of pairs of a leaf back to the features of queries."""
        products = _scale_pairs(queries, keys, products, visible)
        return sum_of_visible(products, keys.values, visible, queries.xp, signed=True)

    def to_keys(
        self, queries: Mapped, keys: Mapped, products: Array, visible: Array
    ) -> tuple[Array, Array]:
        """Pull cotangents back to the features of keys; return also the weights of pairs."""
        turned = queries.xp.matrix_transpose
        products, seen = turned(_scale_pairs(queries, keys, products, visible)), turned(visible)
        moved = sum_of_visible(products, queries.values, seen, queries.xp, signed=True)
        return moved, self.weights(queries, keys, visible)


@fused
def _inverse(mass: Array, blind: Array, xp: Any) -> Array:
    """Invert the normaliser; 0 where no key is seen."""
    return xp.where(blind, 0.0, 1.0 / xp.where(blind, 1.0, mass))


def _scale_pairs(queries: Mapped, keys: Mapped, products: Array, visible: Array | None) -> Array:
    """Multiply pairs (..., c, c) by their e^log, 0 where hidden."""
    xp, x, y = queries.xp, queries.log, keys.log
    if is_numpy_array(products) and not (x.any() or y.any()):  # all scales are 1
        return xp.where(visible, products, 0.0)
    return _visible_pairs(products, x, xp.matrix_transpose(y), visible, xp)


@fused
def _visible_pairs(products: Array, x: Array, y: Array, visible: Array, xp: Any) -> Array:
    # Both are masked: the log so that e^log is finite, the product as 0 times nan would be nan.
    return xp.where(visible, products * xp.exp(xp.where(visible, x + y, -math.inf)), 0.0)


@attend_by_sums.pullback
def _pull_sums(
    out: Array,
    d_out: Array,
    q: Array,
    keys: Keys,
    arrays: tuple[Array, ...],
    arithmetic: Signed,
    causal: bool,
) -> dict[str, Any]:
    """Pull `linear_attention` back."""
    pulled = pull_linear(q, keys, SignedBack(arithmetic, arrays), out, d_out, causal=causal)
    return {"q": pulled.q, "keys": pulled.keys, "arrays": pulled.parameters}


@as_written
def pull_linear(
    q: Array,
    keys: Keys,
    arithmetic: Any,
    out: Array,
    d_out: Array | None,
    d_lse: Array | None = None,
    *,
    causal: bool,
) -> PulledLinear:
    """Pull cotangents of attention that is linear in features back.

    With a mask of each query's own, features are to be `SignedBack`.
    """
    xp = array_namespace(q)
    d_out = xp.zeros_like(out) if d_out is None else d_out
    if keys.differ:
        return _pull_in_pairs(q, keys, arithmetic, out, d_out, causal, xp)
    n, m, whole = q.shape[-2], keys.k.shape[-2], WHOLE
    lead = keys.lead(q, *arithmetic.parameters)
    total = [zeros_of(x) for x in (q, keys.k, keys.v, *arithmetic.parameters)]
    alone = [tuple(x.shape[:-2]) == lead for x in total]  # what belongs to one head each
    order = Sequencer()

    def pull_head(item: tuple[int, tuple[slice, ...]]) -> None:
        place, head = item
        # What several heads take is summed here, and written in the order of heads by `order`.
        sums: dict[Any, tuple[tuple[slice, ...], Array]] = {}

        def give(to: int, tokens: slice, x: Array) -> None:
            box = (*head, tokens if total[to].shape[-2] > 1 else whole, whole)
            if alone[to]:  # no other thread writes to this head
                total[to] = add_part(total[to], box, x)
                return
            x = sum_to(x, part(total[to], box).shape)
            at = (to, box[-2].start, box[-2].stop)
            sums[at] = (box, sums[at][1] + x if at in sums else x)

        def write() -> None:
            for (to, *_), (box, x) in sums.items():
                total[to] = add_part(total[to], box, x)

        q_h, out_h, d_out_h = (part(x, (*head, whole, whole)) for x in (q, out, d_out))
        d_lse_h = None if d_lse is None else part(d_lse, (*head, whole))
        bring = _cotangents(d_out_h, out_h, xp, d_lse_h)
        _Heads(arithmetic, head, (q_h, bring), keys.part(head), give, xp).pull(causal)
        order.add(place, write)

    most = most_threads(q, math.prod(lead) * (n + m) * arithmetic.width)
    for_each(lambda: pull_head, enumerate(_heads_at_once(lead, q, arithmetic)), most=most)
    return PulledLinear(total[0], Keys(total[1], total[2]), tuple(total[3:]))


def _cotangents(d_out: Array, out: Array, xp: Any, d_lse: Array | None = None) -> Array:
    """Join what queries bring to pairs but for the normaliser, [g_i, -delta_i]."""
    return xp.concat([d_out, -pull_normaliser(d_out, out, d_lse, xp)[..., None]], axis=-1)


def _heads_at_once(lead: tuple[int, ...], q: Array, arithmetic: Any) -> Iterator[tuple[slice, ...]]:
    """Cut heads as on the way forth, but whatever threads there are: their sums have one order."""
    shape = _step_shape(q, q.shape[-2], arithmetic)
    if not is_numpy_array(q) or not arithmetic.splits:
        return heads_at_once(lead, q, shape, arithmetic)
    fit = step_size(q) // (math.prod(shape) * arithmetic.width)
    return tiles(lead, min(math.prod(lead) // _SHARES, fit))


def _step_shape(like: Array, n: int, arithmetic: Any) -> tuple[int, int]:
    """Say how many leaves a step has, and tokens a leaf."""
    if not is_numpy_array(like):
        return whole_leaves(n, like)
    return leaf_shape(n, _LEAF_BACK, max(1, step_size(like) // (arithmetic.width * _LEAF_BACK)))


def _pull_in_pairs(
    q: Array, keys: Keys, arithmetic: SignedBack, out: Array, d_out: Array, causal: bool, xp: Any
) -> PulledLinear:
    """Evaluate all pairs, where each query sees other keys."""
    n, m = q.shape[-2], keys.k.shape[-2]
    k, v, lead = keys.k, keys.v, keys.lead(q)
    mask: Array = keys.mask
    total = [zeros_of(x) for x in (q, k, v, *arithmetic.parameters)]
    if m == 0:
        return PulledLinear(total[0], Keys(total[1], total[2]), tuple(total[3:]))
    head = tuple(slice(0, length) for length in lead)
    size = max(16, math.prod(block_shape(q)) // (block_shape(q)[0] * max(1, math.prod(lead))))

    def seen(i: slice, j: slice) -> Array:
        visible = mask[..., i, j]
        return visible & causal_mask(i, j, m - n, device(q), xp) if causal else visible

    # Keys that no query sees give nothing, not even nan.
    some = xp.matrix_transpose(xp.any(seen(slice(0, n), slice(0, m)), axis=-2, keepdims=True))
    k, v = _where_known(k, some, xp), xp.where(some, v, 0.0)
    ones, columns = with_ones(v, xp), list(blocks(0, m, size))

    def keys_of(j: slice) -> Mapped:
        return arithmetic.keys(k[..., j, :], head, xp)

    logs = [own_copy(keys_of(j).log, xp) for j in columns]  # the map may write to its memory again

    def give(to: int, tokens: slice, x: Array) -> None:
        total[to] = add_part(total[to], (*head, tokens, WHOLE), x)

    for i in blocks(0, n, size):
        # Three passes over the keys of a block of queries: the base, the normaliser, the pullback.
        queries, base = arithmetic.queries(q[..., i, :], head, i, xp), None
        for j, log in zip(columns, logs, strict=True):
            logs_j = xp.where(seen(i, j), xp.matrix_transpose(log), -math.inf)
            most = xp.max(logs_j, axis=-1, keepdims=True)
            base = most if base is None else xp.maximum(base, most)
        blind = base == -math.inf
        queries, mass = queries.over(base, blind), xp.zeros_like(base)
        for j in columns:
            weights = arithmetic.weights(queries, keys_of(j), seen(i, j))
            mass = mass + xp.sum(weights, axis=-1, keepdims=True)
        x = _cotangents(d_out[..., i, :], out[..., i, :], xp) * _inverse(mass, blind, xp)
        moved = xp.zeros_like(queries.values)
        for j in columns:
            keys_j, visible = keys_of(j), seen(i, j)
            products = multiply(x, xp.matrix_transpose(ones[..., j, :]))
            moved = moved + arithmetic.to_queries(queries, keys_j, products, visible)
            d_keys, weights = arithmetic.to_keys(queries, keys_j, products, visible)
            _give_taken(give, 1, j, keys_j.pull(d_keys))
            give(2, j, _sum_of_pairs(weights, visible, x[..., :-1], xp))
        _give_taken(give, 0, i, queries.pull(moved))
    return PulledLinear(total[0], Keys(total[1], total[2]), tuple(total[3:]))


def _give_taken(give: Give, to: int, tokens: slice, taken: TakenByTokens) -> None:
    """Give what the features of some tokens take: to the tokens and to the parameters."""
    d_tokens, of_parameters = taken
    give(to, tokens, d_tokens)
    for which, where, x in of_parameters:
        give(3 + which, where, x)


def _where_known(k: Array, seen: Array, xp: Any) -> Array:
    """Put 0 for hidden keys with infinite squares; maps may mix others with what is seen."""
    return xp.where(seen | xp.isfinite(k * k), k, 0.0)


def _sum_of_pairs(weights: Array, visible: Array, x: Array, xp: Any) -> Array:
    """Sum what keys get of the queries that see them."""
    turned = xp.matrix_transpose
    return sum_of_visible(turned(weights), x, turned(visible), xp, signed=True)


class _Heads:
    """Some heads, on the way forth and back."""

    def __init__(
        self,
        arithmetic: Any,
        head: tuple[slice, ...],
        queries: tuple[Array, Array],  # with what they bring to pairs
        keys: Keys,
        give: Give,
        xp: Any,
    ) -> None:
        self.arithmetic, self.head, self.give, self.xp = arithmetic, head, give, xp
        self.q, self.cotangents = queries
        k, v, self.mask, _ = keys  # half of the scale is in the features of keys
        self.lead = keys._replace(v=k).lead(*queries)
        if self.mask is not None:
            seen = xp.matrix_transpose(self.mask)
            k, v = _where_known(k, seen, xp), xp.where(seen, v, 0.0)
        self.k, self.ones = k, with_ones(v, xp)
        # By the first query of a step: scales of queries, and what need not be made again.
        self.scales: dict[int, tuple[Array, Array]] = {}
        self.kept: dict[int, _Step] = {}

    def pull(self, causal: bool) -> None:
        """Give the cotangents of everything."""
        n, m = self.q.shape[-2], self.k.shape[-2]
        first = max(0, m - n) if causal else m  # keys before the first query's own
        self.shift = m - n
        start = max(0, n - m) if causal else 0  # queries before see no key
        self.shape = _step_shape(self.q, n - start, self.arithmetic)
        size = math.prod(self.shape)
        steps, before = list(blocks(start, n, size)), list(blocks(0, first, size))
        # Sums over keys that lie before, [v_j, 1], and over queries that come later, G_i.
        past, later = Seen(self.nothing(), merge_totals), Seen(self.nothing(), merge_totals)
        for j in before:
            past.add(self.keys_of(j).sums(self.ones[..., j, :]))
        for i in steps:
            if causal:
                self.forth(i, past)
            else:  # all keys are in `past`, so that no query has pairs of its own
                queries = self.arithmetic.queries(self.q[..., i, :], self.head, i, self.xp)
                queries, x = self.scaled(queries, self.cotangents[..., i, :], i, past.state)
                moved = queries.pull_pairs(x, past.state)
                _give_taken(self.give, 0, i, queries.pull(moved))
                later.add(queries.sums(x))
        for i in reversed(steps) if causal else ():
            self.back(i, later)
        for j in before:  # all queries see these keys
            keys = self.keys_of(j)
            moved = keys.pull_pairs(self.ones[..., j, :], later.state)
            self.give_keys(j, keys, moved, keys.pull_values(later.state))

    def nothing(self) -> Totals:
        """Make sums over no tokens."""
        options = {"dtype": self.q.dtype, "device": device(self.q)}
        xp, width, w = self.xp, self.arithmetic.width, self.ones.shape[-1]
        return Totals(
            xp.zeros((*self.lead, width, w), **options),
            xp.full((*self.lead, self.arithmetic.bases, 1), -math.inf, **options),
        )

    def keys_of(self, j: slice) -> Mapped:
        """Make features of keys."""
        keys: Mapped = self.arithmetic.keys(self.k[..., j, :], self.head, self.xp)
        if self.mask is None:
            return keys
        seen, where = self.xp.matrix_transpose(self.mask[..., j]), self.xp.where
        values = None if keys.values is None else where(seen, keys.values, 0.0)
        return keys._replace(values=values, log=where(seen, keys.log, -math.inf))

    def scaled(
        self,
        queries: Mapped,
        x: Array,
        i: slice,
        before: Totals | None,
        keys: Mapped | None = None,
        visible: Array | None = None,
    ) -> tuple[Mapped, Array]:
        """Divide both by the normalisers, which are known on the way back."""
        if before is not None:
            self.scales[i.start] = self.arithmetic.scale(queries, before, keys, visible)
        if self.scales[i.start] is None:
            return queries, x
        shift, inverse = self.scales[i.start]
        return queries._replace(log=shift), x * inverse

    def forth(self, i: slice, past: Seen) -> None:
        """Let queries of a step read what is before them, which its keys are added to."""
        step, xp = self.step(i), self.xp
        features = 2 * math.prod(step.keys.log.shape[:-1]) * self.arithmetic.width
        if features * (len(self.kept) + 1) <= _KEPT:
            self.kept[i.start] = step
        sums = step.keys.sums(step.ones)
        before, after = running(merge_totals, past.state, sums, _AXES, xp)
        past.add(after)
        queries, x = self.scaled(step.queries, step.x, i, before, step.keys, step.visible)
        products = multiply(x, xp.matrix_transpose(step.ones))
        moved = queries.pull_pairs(x, before)
        moved = moved + self.arithmetic.to_queries(queries, step.keys, products, step.visible)
        moved = joined(moved, xp)[..., : i.stop - i.start, :]
        _give_taken(self.give, 0, i, queries.pull(moved))

    def back(self, i: slice, later: Seen) -> None:
        """Let keys of a step be read by its queries and by those after them."""
        xp, count = self.xp, i.stop - i.start
        step = self.kept.pop(i.start, None) or self.step(i)
        queries, x = self.scaled(step.queries, step.x, i, None)
        # Leaves from last to first: `running` gives what lies before, here what comes after.
        sums = Totals(*(xp.flip(y, axis=-3) for y in queries.sums(x)))
        after, before = running(merge_totals, later.state, sums, _AXES, xp)
        after = Totals(*(xp.flip(y, axis=-3) for y in after))
        later.add(before)
        products = multiply(x, xp.matrix_transpose(step.ones))
        moved, d_v = step.keys.pull_pairs(step.ones, after), step.keys.pull_values(after)
        more, weights = self.arithmetic.to_keys(queries, step.keys, products, step.visible)
        d_v = d_v + _sum_of_pairs(weights, step.visible, x[..., :-1], xp)
        j = slice(i.start + self.shift, i.stop + self.shift)
        moved, d_v = (joined(y, xp)[..., :count, :] for y in (moved + more, d_v))
        self.give_keys(j, step.keys, moved, d_v)

    def give_keys(self, j: slice, keys: Mapped, moved: Array, d_v: Array) -> None:
        """Give keys and values what they take; those that are hidden take nothing, not even nan."""
        if self.mask is not None:
            seen = self.xp.matrix_transpose(self.mask[..., j])
            moved, d_v = (self.xp.where(seen, x, 0.0) for x in (moved, d_v))
        _give_taken(self.give, 1, j, keys.pull(moved))
        self.give(2, j, d_v)

    def step(self, i: slice) -> _Step:
        """Cut queries of a step and their own keys into leaves."""
        j, shape, xp = slice(i.start + self.shift, i.stop + self.shift), self.shape, self.xp
        leaf = slice(0, shape[1])
        visible = causal_mask(leaf, leaf, 0, device(self.q), xp)
        if self.mask is not None:
            mask = leaves(xp.matrix_transpose(self.mask[..., j]), shape, xp)
            visible = visible & xp.matrix_transpose(mask)
        return _Step(
            self.arithmetic.queries(self.q[..., i, :], self.head, i, xp).cut(shape),
            leaves(self.cotangents[..., i, :], shape, xp),
            self.keys_of(j).cut(shape),
            leaves(self.ones[..., j, :], shape, xp),
            visible,
        )


class _Step(NamedTuple):
    """Tokens of a step in leaves (..., T, c)."""

    queries: Mapped
    x: Array  # what queries bring to pairs
    keys: Mapped
    ones: Array
    visible: Array
