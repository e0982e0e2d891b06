"""Gradients of attention by positive random features: the arithmetic for `signed_back`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..arrays.arithmetic import (
    add,
    exp,
    finite,
    flush_small,
    multiply,
    square_norm,
    sum_of_products,
    times,
)
from ..arrays.blocks import WHOLE, block_shape, blocks, part, some_heads
from ..arrays.library import Array, fused, is_numpy_array
from . import halves
from .attend import Attended
from .hops import Keys, Samples
from .positive import attend_causally
from .signed_back import Mapped, TakenByTokens, pull_linear

# Exponents of factors are a quarter of the largest, at most; those of longdouble are no floats.
_LARGEST_EXPONENTS = {"float32": 22.0, "float64": 177.0}


class PositiveBack:
    """Positive features: e^(omega . q + log_weight - lse) and e^(omega . k - half |k|^2).

    Their sums over keys and samples are 1 for each query.
    """

    splits = True

    def __init__(self, omega: Array, log_weight: Array, lse: Array, half: Array | None) -> None:
        self.omega, self.log_weight, self.lse, self.half = omega, log_weight, lse, half
        self.width = self.bases = omega.shape[-2]
        self.parameters = (omega, log_weight)

    def queries(self, q: Array, head: tuple[slice, ...], i: slice, xp: Any) -> Mapped:
        """Make features of queries."""
        omega = some_heads(self.omega, head)
        lse = part(self.lse, (*head, i))[..., None]
        log = add(multiply(q, xp.matrix_transpose(omega)), self.weights(head, i))
        # Less the normaliser of the forward pass: features of a query with all keys sum to 1.
        log = _less_normaliser(log, lse, xp)

        def pull(cotangent: Array) -> TakenByTokens:
            d_omega = sum_of_products(xp.matrix_transpose(cotangent), q)
            return multiply(cotangent, omega), [(0, WHOLE, d_omega), *self.taken(i, cotangent)]

        return Mapped(None, log, pull, xp)

    def weights(self, head: tuple[slice, ...], i: slice) -> Array:
        """Take the log weights of the samples for some queries."""
        return part(self.log_weight, (*head, i, WHOLE))

    def taken(self, i: slice, cotangent: Array) -> list[tuple[int, slice, Array]]:
        """Say what the log weights take."""
        return [(1, i, cotangent)]

    def keys(self, k: Array, head: tuple[slice, ...], xp: Any) -> Mapped:
        """Make features of keys."""
        omega = some_heads(self.omega, head)
        log = multiply(k, xp.matrix_transpose(omega))
        if self.half is not None:
            log = add(log, -self.half * square_norm(k)[..., None])

        def pull(cotangent: Array) -> TakenByTokens:
            d_omega = sum_of_products(xp.matrix_transpose(cotangent), k)
            d_k = multiply(cotangent, omega)
            if self.half is not None:
                d_k = d_k - 2 * self.half * xp.sum(cotangent, axis=-1, keepdims=True) * k
            return d_k, [(0, WHOLE, d_omega)]

        return Mapped(None, log, pull, xp)

    def scale(self, *_: Any) -> None:
        """Leave the scale of the features of queries as it is: `queries` has divided by it."""

    def to_queries(self, queries: Mapped, keys: Mapped, products: Array, visible: Array) -> Array:
        """Pull cotangents of pairs of a leaf back to the features of queries."""
        xp, products = queries.xp, queries.xp.where(visible, products, 0.0)
        if not is_numpy_array(products):
            return halves.to_queries(queries.log, keys.log, products, xp)
        # By products of matrices if no factor is large, else triple by triple, at most 1 each.
        factors = _factors(queries, keys)
        if factors is not None:
            x, y = factors
            return times(multiply(products, y), x)

        def some(i: slice) -> Array:
            return xp.sum(_triples(queries, keys, visible, i) * products[..., i, :, None], axis=-2)

        return xp.concat([some(i) for i in _few_rows(queries, keys)], axis=-2)

    def to_keys(
        self, queries: Mapped, keys: Mapped, products: Array, visible: Array
    ) -> tuple[Array, Array]:
        """Pull cotangents back to the features of keys; return also the weights of pairs."""
        xp, products = queries.xp, queries.xp.where(visible, products, 0.0)
        if not is_numpy_array(products):
            moved, weights = halves.to_keys(queries.log, keys.log, products, xp)
            return moved, xp.where(visible, weights, 0.0)
        factors = _factors(queries, keys)
        if factors is not None:
            x, y = factors
            weights = multiply(x, xp.matrix_transpose(y))
            moved = times(multiply(xp.matrix_transpose(products), x), y)
            return moved, xp.where(visible, weights, 0.0)
        moved, weights = xp.zeros_like(queries.log + keys.log), []
        for i in _few_rows(queries, keys):
            triples = _triples(queries, keys, visible, i)
            moved = moved + xp.sum(triples * products[..., i, :, None], axis=-3)
            weights.append(xp.sum(triples, axis=-1))
        return moved, xp.concat(weights, axis=-2)


@fused
def _less_normaliser(log: Array, lse: Array, xp: Any) -> Array:
    return xp.where(lse == -math.inf, -math.inf, add(log, -finite(lse, xp)))


@attend_causally.pullback
def _pull_causal(
    done: Attended, cotangents: Any, q: Array, samples: Samples, keys: Keys, xp: Any
) -> dict[str, Any]:
    """Pull causal attention by positive features back."""
    arithmetic = PositiveBack(*samples, done.lse, keys.half)
    pulled = pull_linear(q, keys, arithmetic, done.out, *cotangents, causal=True)
    return {"q": pulled.q, "keys": pulled.keys, "samples": Samples(*pulled.parameters)}


def _factors(queries: Mapped, keys: Mapped) -> tuple[Array, Array] | None:
    """Evaluate factors of queries and of keys where none of them is large."""
    log, xp = queries.log, queries.xp
    # A base for each sample, over the whole leaf. It cancels, but where a later key has a far
    # larger feature than those that a query sees, the factor of the query is large.
    base = xp.max(keys.log, axis=-2, keepdims=True)
    base = xp.where(base == -math.inf, 0.0, base)
    exponent = log + base
    # What a factor of keys loses below the smallest number is that over the root of the largest.
    if not exponent.max() <= _LARGEST_EXPONENTS.get(str(log.dtype), 2500.0):
        return None
    return exp(flush_small(exponent, xp), xp), exp(flush_small(keys.log - base, xp), xp)


def _triples(queries: Mapped, keys: Mapped, visible: Array, i: slice) -> Array:
    """Evaluate the weights of pairs and samples, (..., rows, c, S)."""
    xp, logs = queries.xp, queries.log[..., i, None, :] + keys.log[..., None, :, :]
    return xp.exp(xp.where(visible[..., i, :, None], logs, -math.inf))


def _few_rows(queries: Mapped, keys: Mapped) -> Iterator[slice]:
    """Cut queries into as many at once as their triples fit a block."""
    c, size = queries.log.shape[-2:]
    lead = np.broadcast_shapes(*(tuple(x.log.shape[:-2]) for x in (queries, keys)))
    row = max(1, math.prod(lead) * c * size)
    return blocks(0, c, max(1, math.prod(block_shape(queries.log)) // row))
