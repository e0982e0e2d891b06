"""Gradients of `recurrent_attention` and of the layers that are special cases of it."""

from __future__ import annotations

from typing import Any, cast

from ..arrays import tokens
from ..arrays.blocks import put, sum_to
from ..arrays.library import Array, array_namespace
from ..arrays.tokens import RecurrenceOptions
from ..engine.recurrent import recur
from ..engine.recurrent_back import pull_recur
from ..estimators.recurrent import prepare_recurrence
from .rules import Gradients


def vjp_recurrent(q: Array, k: Array, v: Array, **options: Any) -> Any:
    """Pull `recurrent_attention` back, and layers whose options are among its own."""
    given = RecurrenceOptions(**options)
    inputs = prepare_recurrence(q, k, v, given)
    out, last = recur(*inputs[:4])
    result, xp, grouped = inputs.ungroup(out, last), inputs.xp, inputs.steps.q.ndim > q.ndim
    g, removal, write, state, *_ = given
    wide = g is not None and g.ndim == max(x.ndim for x in (q, k, v))

    def fit(x: Array, argument: Array | None, core: int = 2) -> Array | None:
        """Sum a cotangent over what the argument is repeated along."""
        if argument is None:
            return None
        x = xp.sum(x, axis=-3) if grouped else x
        return xp.reshape(sum_to(x, (*argument.shape, *(1,) * (2 - core))), argument.shape)

    def pullback(cotangents: Any) -> Gradients:
        d_out, d_state = cotangents
        d_out = xp.zeros_like(out) if d_out is None else xp.reshape(d_out, out.shape)
        d_last = xp.zeros_like(last)
        if d_state is not None:  # of one of the states that queries share
            box = tuple(slice(i, i + 1) if isinstance(i, int) else i for i in inputs.first)
            d_last = put(d_last, box, d_state[..., None, :, :] if grouped else d_state)
        x, first = pull_recur(*inputs[:3], d_out, d_last, xp)
        d_write = xp.sum(x.v * inputs.v, axis=-1, keepdims=True)
        d_q = xp.reshape(inputs.scale * x.q, (*result.out.shape[:-1], q.shape[-1]))
        return Gradients(
            sum_to(d_q, q.shape),
            fit(x.k, k),
            fit(x.v if write is None else inputs.write * x.v, v),
            log_decay=fit(x.log_decay, g, 2 if wide else 1),
            removal=removal and tuple(map(fit, (x.a, x.b), removal)),
            write=fit(d_write, write, 1),
            initial_state=fit(first, state),
        )

    return result, pullback


def vjp_retention(q: Array, k: Array, v: Array, *, decay: Any, **options: Any) -> Any:
    """Pull `retention` back; the cotangent of a decay of 0 is nan."""
    log_decay = tokens.log_decay_of_heads(q, k, v, decay)
    out, pull = vjp_recurrent(q, k, v, log_decay=log_decay, **options)

    def pullback(cotangents: Any) -> Gradients:
        pulled: Gradients = pull(cotangents)
        d_gamma, d_decay = cast(Array, pulled.log_decay)[..., 0], None
        if hasattr(decay, "shape"):
            d_decay = sum_to(d_gamma, decay.shape) / decay
        return pulled._replace(log_decay=None, decay=d_decay)

    return out, pullback


def vjp_delta(
    q: Array, k: Array, v: Array, *, beta: Array, log_decay: Array | None = None, **options: Any
) -> Any:
    """Pull a delta rule back, whose keys and rates are in the removal too."""
    gates = tokens.delta_gates(q, k, v, beta, log_decay)
    out, pull = vjp_recurrent(q, k, v, **gates, **options)
    (_, shared), rate, later = tokens.share_heads(q, k, v), beta[..., None], gates["removal"][1]
    xp, growth = array_namespace(k), cast(Array, 1.0)
    if log_decay is not None:
        g = log_decay[..., None] if log_decay.ndim < max(x.ndim for x in (q, k, v)) else log_decay
        growth = xp.exp(g)

    def pullback(cotangents: Any) -> Gradients:
        pulled: Gradients = pull(cotangents)
        d_a, d_b = cast(tuple[Array, Array], pulled.removal)
        d_k = pulled.k + sum_to(growth * d_b, k.shape) - sum_to(rate * d_a, k.shape)
        d_beta = pulled.write - sum_to(xp.sum(shared * d_a, axis=-1), beta.shape)
        d_g = pulled.log_decay
        if log_decay is not None:
            d_g = d_g + xp.reshape(sum_to(later * d_b, g.shape), log_decay.shape)
        return pulled._replace(k=d_k, log_decay=d_g, removal=None, write=None, beta=d_beta)

    return out, pullback
