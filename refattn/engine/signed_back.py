r"""The pullback of attention that is linear in features, in time linear in the tokens.

The kernel of query i and key j is :math:`\kappa_{ij} = \sum_s \phi_{is} \psi_{js}`, where features
are values times e^log. With :math:`G_i = [\bar g_i, -\delta_i] / Z_i`, the normaliser
:math:`Z_i = \sum_j \kappa_{ij}` and :math:`m_{ij} = G_i \cdot [v_j, 1]`,

.. math::
    \bar\phi_{is} = \sum_j m_{ij} \, \psi_{js}, \qquad
    \bar\psi_{js} = \sum_i m_{ij} \, \phi_{is}, \qquad
    \bar v_j = \sum_i \kappa_{ij} \, \bar g_i / Z_i

over the pairs that see each other. Keys are summed on the way forth, as in `engine.hops`, and
queries on the way back: each step reads the sums of what lies before it, and its own pairs
one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ..arrays.blocks import WHOLE, add_part, block_shape, blocks, most_threads, part, sum_to, tiles
from ..arrays.heads import broadcast_lead
from ..arrays.library import (
    Array,
    add,
    array_namespace,
    as_written,
    cut,
    device,
    exp,
    is_numpy_array,
    square_norm,
    times,
)
from ..arrays.products import multiply, sum_of_products
from ..arrays.threads import InOrder, for_each
from ..features import Features
from .causal import Seen, chunk_size, heads_at_once, leaf_shape, leaves, running
from .hops import Keys, joined
from .kernel import finite, sum_of_visible
from .kernel_back import zeros_of
from .positive import with_ones
from .scores import causal_mask
from .signed import Totals, merge_totals

__all__ = ["Exponential", "Featured", "Pulled", "attend"]

_AXES = (-3, -3)  # of leaves, in sums
_LEAF, _OTHER_LEAF = 64, 16  # tokens of a leaf on NumPy, and elsewhere
# Exponents of factors are a quarter of the largest, at most; those of longdouble are no floats.
_LARGEST = {"float32": 22.0, "float64": 177.0}
_SHARES = 4  # of the heads, at least, for threads


class Pulled(NamedTuple):
    """Cotangents of the arguments, and of what features are made of beside tokens."""

    q: Array
    k: Array
    v: Array
    parameters: tuple[Array, ...]


# What is added to which parameter, and to which of its rows.
Addend = tuple[int, slice, Array]


class Rows(NamedTuple):
    """Features of tokens, values times e^log, and how their cotangents are pulled back.

    These are of log where there are no values, or of values at a given log.
    """

    values: Array | None  # (..., c, F), None for 1
    log: Array  # (..., c, F), or (..., c, 1) where the features of a token have one scale
    pull: Callable[[Array], tuple[Array, list[Addend]]]


class Exponential:
    """Positive features: e^(omega . q + log_weight - lse) and e^(omega . k - half |k|^2).

    Their sums over keys and samples are 1 for each query.
    """

    splits = True

    def __init__(self, omega: Array, log_weight: Array, lse: Array, half: Array | None) -> None:
        self.omega, self.log_weight, self.lse, self.half = omega, log_weight, lse, half
        self.width = self.bases = omega.shape[-2]
        self.parameters = (omega, log_weight)

    def queries(self, q: Array, head: tuple[slice, ...], i: slice) -> Rows:
        """Features of queries."""
        xp = array_namespace(q)
        omega = part(self.omega, (*head, WHOLE, WHOLE))
        lse = part(self.lse, (*head, i))[..., None]
        log = add(multiply(q, xp.matrix_transpose(omega)), self.weights(head, i))
        log = xp.where(lse == -math.inf, -math.inf, add(log, -finite(lse, xp)))

        def pull(cotangent: Array) -> tuple[Array, list[Addend]]:
            d_omega = sum_of_products(xp.matrix_transpose(cotangent), q)
            return multiply(cotangent, omega), [(0, WHOLE, d_omega), *self.taken(i, cotangent)]

        return Rows(None, log, pull)

    def weights(self, head: tuple[slice, ...], i: slice) -> Array:
        """Log weights of the samples for some queries."""
        return part(self.log_weight, (*head, i, WHOLE))

    def taken(self, i: slice, cotangent: Array) -> list[Addend]:
        """What these take."""
        return [(1, i, cotangent)]

    def keys(self, k: Array, head: tuple[slice, ...]) -> Rows:
        """Features of keys."""
        xp, omega = array_namespace(k), part(self.omega, (*head, WHOLE, WHOLE))
        log = multiply(k, xp.matrix_transpose(omega))
        if self.half is not None:
            log = add(log, -self.half * square_norm(k)[..., None])

        def pull(cotangent: Array) -> tuple[Array, list[Addend]]:
            d_omega = sum_of_products(xp.matrix_transpose(cotangent), k)
            d_k = multiply(cotangent, omega)
            if self.half is not None:
                d_k = d_k - 2 * self.half * xp.sum(cotangent, axis=-1, keepdims=True) * k
            return d_k, [(0, WHOLE, d_omega)]

        return Rows(None, log, pull)

    def scale(self, rows: Rows, before: Totals, keys: Rows | None, visible: Array | None) -> None:
        """Features of queries have their scale."""

    def to_queries(self, queries: Rows, keys: Rows, products: Array, visible: Array) -> Array:
        """Cotangents of the features of queries, from those of pairs of a leaf."""
        xp, factors = array_namespace(products), _factors(queries, keys)
        products = xp.where(visible, products, 0.0)
        if factors is not None:
            x, y = factors
            return times(multiply(products, y), x)

        def some(i: slice) -> Array:
            own = _triples(queries, keys, visible, i)
            return xp.sum(own * products[..., i, :, None], axis=-2)

        return xp.concat([some(i) for i in _few_rows(queries, keys)], axis=-2)

    def to_keys(
        self, queries: Rows, keys: Rows, products: Array, visible: Array
    ) -> tuple[Array, Array]:
        """Cotangents of the features of keys, and the weights of pairs."""
        xp, factors = array_namespace(products), _factors(queries, keys)
        products = xp.where(visible, products, 0.0)
        if factors is not None:
            x, y = factors
            weights = multiply(x, xp.matrix_transpose(y))
            moved = times(multiply(xp.matrix_transpose(products), x), y)
            return moved, xp.where(visible, weights, 0.0)
        found, weights = xp.zeros_like(queries.log + keys.log), []
        for i in _few_rows(queries, keys):
            own = _triples(queries, keys, visible, i)
            found = found + xp.sum(own * products[..., i, :, None], axis=-3)
            weights.append(xp.sum(own, axis=-1))
        return found, xp.concat(weights, axis=-2)


def _factors(queries: Rows, keys: Rows) -> tuple[Array, Array] | None:
    """Factors of queries and of keys, on NumPy where none of them is large."""
    log = queries.log
    if not is_numpy_array(log):
        return None
    xp = array_namespace(log)
    base = finite(xp.max(keys.log, axis=-2, keepdims=True), xp)
    exponent, limits = log + base, xp.finfo(log.dtype)
    most, least = _LARGEST.get(str(log.dtype), 2500.0), float(limits.smallest_normal)
    # What a factor of keys loses below the smallest number is that over the root of the largest.
    if not exponent.max() <= most:
        return None
    tiny = math.log(least) if least else -math.inf  # 0 for longdouble
    return exp(cut(exponent, tiny)), exp(cut(keys.log - base, tiny))


def _triples(queries: Rows, keys: Rows, visible: Array, i: slice) -> Array:
    """Weights of pairs and samples, (..., rows, c, S)."""
    xp = array_namespace(visible)
    logs = queries.log[..., i, None, :] + keys.log[..., None, :, :]
    return xp.exp(xp.where(visible[..., i, :, None], logs, -math.inf))


def _few_rows(queries: Rows, keys: Rows) -> Iterator[slice]:
    """As many queries at once as their triples fit a block."""
    (c, size), lead = queries.log.shape[-2:], broadcast_lead(queries.log, keys.log)
    row = max(1, math.prod(lead) * c * size)
    return blocks(0, c, max(1, math.prod(block_shape(queries.log)) // row))


# How features of tokens are pulled back: cotangents of values, and of log scales if these matter.
Pull = Callable[[Array, Array | None], tuple[Array, list[Addend]]]
FeatureMap = Callable[[Array, tuple[slice, ...]], tuple[Features, Pull]]


class Featured:
    """Features of either sign, of any map that has a pullback; a scale of queries cancels."""

    bases = 1

    def __init__(
        self,
        phi_q: FeatureMap,
        phi_k: FeatureMap,
        width: int,
        parameters: tuple[Array, ...] = (),
        *,
        splits: bool = True,
    ) -> None:
        self.phi_q, self.phi_k, self.width, self.splits = phi_q, phi_k, width, splits
        self.parameters = parameters

    def queries(self, q: Array, head: tuple[slice, ...], i: slice) -> Rows:
        """Features of queries, without their scale."""
        (values, _), pull = self.phi_q(q, head)
        xp = array_namespace(values)
        if not self.splits:  # a map may write the features of keys where it has written these
            values = xp.asarray(values, copy=True)
        return Rows(values, xp.zeros_like(values[..., :1]), lambda x: pull(x, None))

    def keys(self, k: Array, head: tuple[slice, ...]) -> Rows:
        """Features of keys."""
        (values, log_scale), pull = self.phi_k(k, head)
        xp = array_namespace(values)
        return Rows(values, log_scale[..., None], lambda x: pull(x, xp.sum(x * values, axis=-1)))

    def scale(
        self, rows: Rows, before: Totals, keys: Rows | None, visible: Array | None
    ) -> tuple[Array, Array]:
        """Scale of the normaliser of each query, as minus its log, and the inverse of the rest."""
        xp = array_namespace(rows.log)
        base = before.base
        if keys is not None:
            logs = xp.where(visible, xp.matrix_transpose(keys.log), -math.inf)
            base = xp.maximum(base, xp.max(logs, axis=-1, keepdims=True))
        none = (base == -math.inf) | (rows.log == -math.inf)
        rows = _over(rows, base, none)
        mass = multiply(rows.values * _factor(rows, before), before.total[..., -1:])
        if keys is not None:
            mass = mass + xp.sum(self.weights(rows, keys, visible), axis=-1, keepdims=True)
        return rows.log, _inverse(mass, none)

    def weights(self, queries: Rows, keys: Rows, visible: Array | None) -> Array:
        """Kernels of pairs, 0 where hidden."""
        xp = array_namespace(queries.values)
        products = multiply(queries.values, xp.matrix_transpose(keys.values))
        return xp.where(visible, products * _scales(queries, keys, visible), 0.0)

    def to_queries(self, queries: Rows, keys: Rows, products: Array, visible: Array) -> Array:
        """Cotangents of the features of queries, from those of pairs of a leaf."""
        products = _moved(queries, keys, products, visible)
        return sum_of_visible(products, keys.values, visible, signed=True)

    def to_keys(
        self, queries: Rows, keys: Rows, products: Array, visible: Array
    ) -> tuple[Array, Array]:
        """Cotangents of the features of keys, and the weights of pairs."""
        xp = array_namespace(products)
        products, seen = (
            xp.matrix_transpose(x) for x in (_moved(queries, keys, products, visible), visible)
        )
        moved = sum_of_visible(products, queries.values, seen, signed=True)
        return moved, self.weights(queries, keys, visible)


def _over(rows: Rows, base: Array, none: Array) -> Rows:
    """Features of queries over the scale of their normalisers; none where no key is seen."""
    return rows._replace(log=array_namespace(base).where(none, -math.inf, -base))


def _inverse(mass: Array, none: Array) -> Array:
    """1 over the normaliser, 0 where no key is seen."""
    xp = array_namespace(mass)
    return xp.where(none, 0.0, 1.0 / xp.where(none, 1.0, mass))


def _scales(queries: Rows, keys: Rows, visible: Array | None) -> Array:
    """e^log of pairs, (..., c, c)."""
    xp = array_namespace(queries.log)
    return xp.exp(xp.where(visible, queries.log + xp.matrix_transpose(keys.log), -math.inf))


def _moved(queries: Rows, keys: Rows, products: Array, visible: Array) -> Array:
    return array_namespace(products).where(visible, products * _scales(queries, keys, visible), 0.0)


def _factor(rows: Rows, totals: Totals) -> Array:
    """What features are times at the base of sums."""
    xp = array_namespace(rows.log)
    return xp.exp(rows.log + xp.matrix_transpose(totals.base))


def _sums(rows: Rows, x: Array) -> Totals:
    """Sums of features times x, (..., F, w), with a base for each feature or one for all."""
    xp = array_namespace(x)
    base = xp.max(rows.log, axis=-2, keepdims=True)
    features = xp.exp(rows.log - finite(base, xp))
    features = features if rows.values is None else rows.values * features
    return Totals(sum_of_products(xp.matrix_transpose(features), x), xp.matrix_transpose(base))


def _moved_by(rows: Rows, x: Array, totals: Totals) -> Array:
    """Cotangents of features of tokens that bring x to pairs with those that were summed."""
    moved = multiply(x, array_namespace(x).matrix_transpose(totals.total))
    return times(moved, _factor(rows, totals))


def _values_of(rows: Rows, totals: Totals) -> Array:
    """Cotangents of the values of keys, from sums over queries."""
    factor = _factor(rows, totals)
    features = factor if rows.values is None else rows.values * factor
    return multiply(features, totals.total[..., :-1])


def _padded(rows: Rows, shape: tuple[int, int]) -> Rows:
    """Cut tokens into leaves; what is missing has no features."""
    log, missing = rows.log, math.prod(shape) - rows.log.shape[-2]
    if missing:
        xp, none = array_namespace(log), (*log.shape[:-2], missing, log.shape[-1])
        options = {"dtype": log.dtype, "device": device(log)}
        log = xp.concat([log, xp.full(none, -math.inf, **options)], axis=-2)
    values = None if rows.values is None else leaves(rows.values, shape)
    return Rows(values, leaves(log, shape), rows.pull)


@as_written
def attend(
    q: Array,
    keys: Keys,
    arithmetic: Any,
    out: Array,
    d_out: Array,
    d_lse: Array | None = None,
    *,
    causal: bool,
) -> Pulled:
    """Pull cotangents of attention that is linear in features back.

    With a mask of each query's own, features are to be `Featured`.
    """
    if keys.differ:
        return _attend_in_pairs(q, keys, arithmetic, out, d_out, causal)
    n, m, whole = q.shape[-2], keys.k.shape[-2], WHOLE
    lead = broadcast_lead(q, keys.k, keys.v, keys.mask, *arithmetic.parameters)
    total = [zeros_of(x) for x in (q, keys.k, keys.v, *arithmetic.parameters)]
    alone = [tuple(x.shape[:-2]) == lead for x in total]  # what belongs to one head each
    order = InOrder()

    def pull_head(item: tuple[int, tuple[slice, ...]]) -> None:
        place, head = item
        sums: dict[Any, tuple[tuple[slice, ...], Array]] = {}

        def give(to: int, tokens: slice, x: Array) -> None:
            box = (*head, tokens if total[to].shape[-2] > 1 else whole, whole)
            if alone[to]:
                total[to] = add_part(total[to], box, x)
                return
            x = sum_to(x, part(total[to], box).shape)
            at = (to, box[-2].start, box[-2].stop)
            sums[at] = (box, sums[at][1] + x if at in sums else x)

        def write() -> None:
            for (to, *_), (box, x) in sums.items():
                total[to] = add_part(total[to], box, x)

        q_h, out_h, d_out_h = (part(x, (*head, whole, whole)) for x in (q, out, d_out))
        bring = _cotangents(d_out_h, out_h, None if d_lse is None else part(d_lse, (*head, whole)))
        _Heads(arithmetic, head, q_h, keys.part(head), bring, give).pull(causal)
        order.add(place, write)

    most = most_threads(q, math.prod(lead) * (n + m) * arithmetic.width)
    for_each(lambda: pull_head, enumerate(_heads_at_once(lead, q, arithmetic)), most=most)
    q_bar, k_bar, v_bar, *parameters = total
    return Pulled(q_bar, k_bar, v_bar, tuple(parameters))


def _cotangents(d_out: Array, out: Array, d_lse: Array | None = None) -> Array:
    """What queries bring to pairs but for the normaliser, [g_i, -delta_i]."""
    xp = array_namespace(out)
    delta = xp.sum(d_out * out, axis=-1)
    delta = delta if d_lse is None else delta - d_lse
    return xp.concat([d_out, -delta[..., None]], axis=-1)


def _heads_at_once(lead: tuple[int, ...], q: Array, arithmetic: Any) -> Iterator[tuple[slice, ...]]:
    """As the way forth has them, but whatever threads there are: sums over heads have one order."""
    shape = _shape(q, q.shape[-2], arithmetic)
    if not is_numpy_array(q) or not arithmetic.splits:
        return heads_at_once(lead, q, shape, arithmetic)
    fit = chunk_size(q) // (math.prod(shape) * arithmetic.width)
    return tiles(lead, min(math.prod(lead) // _SHARES, fit))


def _shape(like: Array, n: int, arithmetic: Any) -> tuple[int, int]:
    """Leaves of a step, and tokens of a leaf."""
    if not is_numpy_array(like):
        return leaf_shape(n, _OTHER_LEAF)
    return leaf_shape(n, _LEAF, max(1, chunk_size(like) // (arithmetic.width * _LEAF)))


def _attend_in_pairs(
    q: Array, keys: Keys, arithmetic: Featured, out: Array, d_out: Array, causal: bool
) -> Pulled:
    """The same where each query sees other keys: all pairs are evaluated."""
    xp, n, m = array_namespace(q), q.shape[-2], keys.k.shape[-2]
    k, v, lead = keys.k, keys.v, broadcast_lead(q, keys.k, keys.v, keys.mask)
    mask: Array = keys.mask
    total = [zeros_of(x) for x in (q, k, v, *arithmetic.parameters)]
    head = tuple(slice(0, length) for length in lead)
    size = max(16, math.prod(block_shape(q)) // (block_shape(q)[0] * max(1, math.prod(lead))))

    def seen(i: slice, j: slice) -> Array:
        visible = mask[..., i, j]
        return visible & causal_mask(i, j, m - n, device(q), xp) if causal else visible

    some = xp.matrix_transpose(xp.any(seen(slice(0, n), slice(0, m)), axis=-2, keepdims=True))
    k, v = (_where_known(x, some) for x in (k, v))
    ones, columns = with_ones(v), list(blocks(0, m, size))
    logs = [xp.asarray(arithmetic.keys(k[..., j, :], head).log, copy=True) for j in columns]

    def give(to: int, tokens: slice, x: Array) -> None:
        total[to] = add_part(total[to], (*head, tokens, WHOLE), x)

    def pulled(to: int, tokens: slice, rows: Rows, x: Array) -> None:
        d_x, more = rows.pull(x)
        give(to, tokens, d_x)
        for which, where, value in more:
            give(3 + which, where, value)

    for i in blocks(0, n, size):
        rows, base = arithmetic.queries(q[..., i, :], head, i), None
        for j, log in zip(columns, logs, strict=True):
            own = xp.where(seen(i, j), xp.matrix_transpose(log), -math.inf)
            own = xp.max(own, axis=-1, keepdims=True)
            base = own if base is None else xp.maximum(base, own)
        none = base == -math.inf
        rows, mass = _over(rows, base, none), xp.zeros_like(base)
        for j in columns:
            weights = arithmetic.weights(rows, arithmetic.keys(k[..., j, :], head), seen(i, j))
            mass = mass + xp.sum(weights, axis=-1, keepdims=True)
        x = _cotangents(d_out[..., i, :], out[..., i, :]) * _inverse(mass, none)
        moved = xp.zeros_like(rows.values)
        for j in columns:
            some_keys, visible = arithmetic.keys(k[..., j, :], head), seen(i, j)
            products = multiply(x, xp.matrix_transpose(ones[..., j, :]))
            moved = moved + arithmetic.to_queries(rows, some_keys, products, visible)
            d_keys, weights = arithmetic.to_keys(rows, some_keys, products, visible)
            pulled(1, j, some_keys, d_keys)
            give(2, j, _sum_of_pairs(weights, visible, x[..., :-1]))
        pulled(0, i, rows, moved)
    q_bar, k_bar, v_bar, *parameters = total
    return Pulled(q_bar, k_bar, v_bar, tuple(parameters))


def _where_known(x: Array, seen: Array) -> Array:
    """Keys or values with 0 for what is not finite and not seen: it goes no further."""
    xp = array_namespace(x)
    return xp.where(seen | xp.isfinite(x), x, 0.0)


def _sum_of_pairs(weights: Array, visible: Array, x: Array) -> Array:
    """What keys get of the queries that see them."""
    turned = array_namespace(x).matrix_transpose
    return sum_of_visible(turned(weights), x, turned(visible), signed=True)


class _Heads:
    """Some heads, on the way forth and back."""

    def __init__(
        self,
        arithmetic: Any,
        head: tuple[slice, ...],
        q: Array,
        keys: Keys,
        cotangents: Array,
        give: Callable[[int, slice, Array], None],
    ) -> None:
        xp = array_namespace(q)
        self.arithmetic, self.head, self.q, self.give = arithmetic, head, q, give
        k, v, self.mask, _ = keys
        if self.mask is not None:
            k, v = (_where_known(x, xp.matrix_transpose(self.mask)) for x in (k, v))
        self.k, self.ones = k, with_ones(v)
        self.cotangents = cotangents
        self.lead = broadcast_lead(q, k, cotangents, self.mask)
        self.scales: dict[int, tuple[Array, Array]] = {}  # of queries, by the first of a step

    def pull(self, causal: bool) -> None:
        """Give the cotangents of everything."""
        n, m = self.q.shape[-2], self.k.shape[-2]
        first = max(0, m - n) if causal else m  # keys before the first query's own
        self.shift = m - n
        start = max(0, n - m) if causal else 0  # queries before see no key
        self.shape = _shape(self.q, n - start, self.arithmetic)
        size = math.prod(self.shape)
        steps, before = list(blocks(start, n, size)), list(blocks(0, first, size))
        past, later = Seen(self.nothing(), merge_totals), Seen(self.nothing(), merge_totals)
        for j in before:
            past.add(_sums(self.keys_of(j), self.ones[..., j, :]))
        for i in steps:
            if causal:
                self.forth(i, past)
            else:
                rows, x = self.queries_of(i, past.state)
                self.to_queries(rows, i, _moved_by(rows, x, past.state))
                later.add(_sums(rows, x))
        for i in reversed(steps) if causal else ():
            self.back(i, later)
        for j in before:
            rows = self.keys_of(j)
            moved = _moved_by(rows, self.ones[..., j, :], later.state)
            self.to_keys(rows, j, moved, _values_of(rows, later.state))

    def nothing(self) -> Totals:
        """Sums over no tokens."""
        options = {"dtype": self.q.dtype, "device": device(self.q)}
        xp, width, w = array_namespace(self.q), self.arithmetic.width, self.ones.shape[-1]
        return Totals(
            xp.zeros((*self.lead, width, w), **options),
            xp.full((*self.lead, self.arithmetic.bases, 1), -math.inf, **options),
        )

    def keys_of(self, j: slice) -> Rows:
        """Features of keys."""
        rows: Rows = self.arithmetic.keys(self.k[..., j, :], self.head)
        if self.mask is None:
            return rows
        xp = array_namespace(rows.log)
        seen = xp.matrix_transpose(self.mask[..., j])
        return rows._replace(log=xp.where(seen, rows.log, -math.inf))

    def queries_of(self, i: slice, before: Totals) -> tuple[Rows, Array]:
        """Features of queries, and what they bring to pairs."""
        rows = self.arithmetic.queries(self.q[..., i, :], self.head, i)
        return self.scaled(rows, self.cotangents[..., i, :], i, before)

    def scaled(
        self,
        rows: Rows,
        x: Array,
        i: slice,
        before: Totals | None,
        keys: Rows | None = None,
        visible: Array | None = None,
    ) -> tuple[Rows, Array]:
        """The same over the normalisers, which are known on the way back."""
        if before is not None:
            self.scales[i.start] = self.arithmetic.scale(rows, before, keys, visible)
        if self.scales[i.start] is None:
            return rows, x
        shift, inverse = self.scales[i.start]
        return rows._replace(log=shift), x * inverse

    def to_queries(self, rows: Rows, i: slice, cotangent: Array) -> None:
        """Give what the features of some queries take."""
        d_q, more = rows.pull(cotangent)
        self.give(0, i, d_q)
        self.to_parameters(more)

    def to_keys(self, rows: Rows, j: slice, cotangent: Array, d_v: Array) -> None:
        """Give what the features and the values of some keys take."""
        d_k, more = rows.pull(cotangent)
        self.give(1, j, d_k)
        self.give(2, j, d_v)
        self.to_parameters(more)

    def to_parameters(self, more: list[Addend]) -> None:
        for which, tokens, x in more:
            self.give(3 + which, tokens, x)

    def forth(self, i: slice, past: Seen) -> None:
        """Queries of a step read what is before them, which its keys are added to."""
        own = self.step(i)
        before, after = running(merge_totals, past.state, _sums(own.keys, own.ones), _AXES)
        past.add(after)
        queries, x = self.scaled(own.queries, own.x, i, before, own.keys, own.visible)
        products = multiply(x, array_namespace(x).matrix_transpose(own.ones))
        moved = _moved_by(queries, x, before)
        moved = moved + self.arithmetic.to_queries(queries, own.keys, products, own.visible)
        self.to_queries(queries, i, joined(moved)[..., : i.stop - i.start, :])

    def back(self, i: slice, later: Seen) -> None:
        """Keys of a step are read by its queries and by those after them."""
        xp, own, count = array_namespace(self.q), self.step(i), i.stop - i.start
        queries, x = self.scaled(own.queries, own.x, i, None)
        sums = Totals(*(xp.flip(y, axis=-3) for y in _sums(queries, x)))
        after, before = running(merge_totals, later.state, sums, _AXES)
        after = Totals(*(xp.flip(y, axis=-3) for y in after))
        later.add(before)
        products = multiply(x, xp.matrix_transpose(own.ones))
        moved, d_v = _moved_by(own.keys, own.ones, after), _values_of(own.keys, after)
        more, weights = self.arithmetic.to_keys(queries, own.keys, products, own.visible)
        d_v = d_v + _sum_of_pairs(weights, own.visible, x[..., :-1])
        j = slice(i.start + self.shift, i.stop + self.shift)
        self.to_keys(own.keys, j, *(joined(y)[..., :count, :] for y in (moved + more, d_v)))

    def step(self, i: slice) -> _Step:
        """Queries of a step and their own keys, in leaves."""
        j, c = slice(i.start + self.shift, i.stop + self.shift), self.shape[1]
        visible = causal_mask(slice(0, c), slice(0, c), 0, device(self.q), array_namespace(self.q))
        if self.mask is not None:
            xp = array_namespace(self.q)
            mask = leaves(xp.matrix_transpose(self.mask[..., j]), self.shape)
            visible = visible & xp.matrix_transpose(mask)
        return _Step(
            _padded(self.arithmetic.queries(self.q[..., i, :], self.head, i), self.shape),
            leaves(self.cotangents[..., i, :], self.shape),
            _padded(self.keys_of(j), self.shape),
            leaves(self.ones[..., j, :], self.shape),
            visible,
        )


class _Step(NamedTuple):
    """Tokens of a step in leaves (..., T, c)."""

    queries: Rows
    x: Array  # what queries bring to pairs
    keys: Rows
    ones: Array
    visible: Array
