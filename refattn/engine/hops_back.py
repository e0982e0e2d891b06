r"""Gradients of two hops of attention, composed as the hops are.

With :math:`(f, \log Z)` what samples have seen of the keys, the second hop takes cotangents of
:math:`f` and, by its bias, of :math:`\log Z + \log w`; the first takes these on to the keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..arrays.blocks import WHOLE, add_part, part, sum_to
from ..arrays.library import Array, array_namespace, as_written
from . import attend_back
from .attend import Attended
from .attend_back import Cotangents, zeros_of
from .hops import Keys, Samples, joined, lead_of_each, sample, tiles_of_queries
from .positive_back import PositiveBack
from .scores import Scores
from .signed_back import pull_linear


class PulledHops(NamedTuple):
    """Cotangents of what two hops are made of, each with the shape of its array."""

    q: Array
    k: Array
    v: Array
    omega: Array
    log_weight: Array


class Taken(NamedTuple):
    """What the second hop takes of some queries, of samples and of what these have seen."""

    q: Array | None
    omega: Array | None
    log_weight: Array | None
    f: Array
    log_z: Array | None


@as_written
def pull_two_hops(
    q: Array,
    samples: Samples,
    keys: Keys,
    causal: bool,
    done: Attended,
    d_out: Array,
    d_lse: Array | None = None,
) -> PulledHops:
    """Pull cotangents of `positive.two_hops`, which returned `done`, back."""
    omega, log_weight = samples
    if keys.differ:
        of_each = Samples(omega[..., None, :, :], log_weight)
        pulled = pull_per_query(pull_read_of_each(done, d_out, d_lse), q, of_each, keys, causal)
        return pulled._replace(omega=pulled.omega[..., 0, :, :])
    if causal:
        arithmetic = PositiveBack(omega, log_weight, done.lse, keys.half)
        linear = pull_linear(q, keys, arithmetic, done.out, d_out, d_lse, causal=True)
        return PulledHops(*linear[:3], *linear.parameters)
    states = sample(omega, keys)  # computed again: it is small beside what it was made of
    second = pull_read(q, samples, states, done, d_out, d_lse)
    # log Z and log w enter the second hop by their sum only, so that both have its cotangent.
    d_bias: Array = second.bias
    d_log_z = sum_to(array_namespace(q).sum(d_bias, axis=-2), states.lse.shape)
    first = pull_sample(omega, keys, states, second.v, d_log_z)
    d_omega = first.q + second.k  # frequencies are queries of one hop and keys of the other
    return PulledHops(second.q, first.k, first.v, d_omega, sum_to(d_bias, log_weight.shape))


def pull_read(
    q: Array,
    samples: Samples,
    states: Attended,
    done: Attended,
    d_out: Array,
    d_lse: Array | None = None,
) -> Cotangents:
    """Pull the second hop back: `v` is of the states, `bias` of log Z + log w for each query."""
    bias = states.lse[..., None, :] + samples.log_weight
    scores = Scores(bias=bias)
    return attend_back.pull_attend(q, samples.omega, states.out, done, d_out, d_lse, scores)


def pull_sample(
    omega: Array, keys: Keys, states: Attended, d_f: Array, d_log_z: Array | None
) -> Cotangents:
    """Pull the first hop back: `q` is of frequencies."""
    scores, arrays = Scores(mask=keys.mask), (omega, keys.k, keys.v)
    return attend_back.pull_attend(*arrays, states, d_f, d_log_z, scores, half=keys.half)


def pull_read_of_each(done: Attended, d_out: Array, d_lse: Array | None) -> Any:
    """Pull the second hop of queries with samples of their own back."""

    def pull(box: tuple[slice, ...], q: Array, samples: Samples, states: Attended) -> Taken:
        samples = Samples(samples.omega, samples.log_weight[..., None, :])
        out, g = (part(x, (*box, WHOLE))[..., None, :] for x in (done.out, d_out))
        lse = part(done.lse, box)[..., None]
        d_lse_i = None if d_lse is None else part(d_lse, box)[..., None]
        second = pull_read(q[..., None, :], samples, states, Attended(out, lse), g, d_lse_i)
        d_bias: Array = second.bias
        d_log = d_bias[..., 0, :]
        d_log_z = sum_to(d_log, states.lse.shape)
        return Taken(second.q[..., 0, :], second.k, d_log, second.v, d_log_z)

    return pull


def pull_per_query(
    taken_by: Callable[[tuple[slice, ...], Array, Samples, Attended], Taken],
    q: Array,
    samples: Samples,
    keys: Keys,
    causal: bool,
) -> PulledHops:
    """Pull `positive.per_query` back, with the second hop of some queries as `taken_by` has it."""
    xp, (num_samples, d), d_v = array_namespace(q), samples.omega.shape[-2:], keys.v.shape[-1]
    total = PulledHops(*map(zeros_of, (q, keys.k, keys.v, *samples)))
    lead = lead_of_each(q, samples, keys)
    for box, some, flat, seen in tiles_of_queries(q, samples, keys, causal, lead, xp):
        head = box[:-1]
        # Cotangents of rows are wanted for each head, also where heads share the frequencies.
        shape = (*(s.stop - s.start for s in box), num_samples)
        flat = xp.broadcast_to(flat, (*shape[:-2], *flat.shape[-2:]))
        states = sample(flat, seen)
        of_each = Attended(xp.reshape(states.out, (*shape, d_v)), xp.reshape(states.lse, shape))
        taken = taken_by(box, part(q, (*box, WHOLE)), some, of_each)
        d_f = joined(xp.broadcast_to(taken.f, (*shape, d_v)), xp)
        d_log_z = None if taken.log_z is None else xp.reshape(taken.log_z, states.lse.shape)
        first = pull_sample(flat, seen, states, d_f, d_log_z)
        tokens = (*box, WHOLE)
        d_omega = add_part(total.omega, (*tokens, WHOLE), xp.reshape(first.q, (*shape, d)))
        if taken.omega is not None:
            d_omega = add_part(d_omega, (*tokens, WHOLE), taken.omega)
        total = PulledHops(
            total.q if taken.q is None else add_part(total.q, tokens, taken.q),
            add_part(total.k, (*head, WHOLE, WHOLE), first.k),
            add_part(total.v, (*head, WHOLE, WHOLE), first.v),
            d_omega,
            total.log_weight
            if taken.log_weight is None
            else add_part(total.log_weight, tokens, taken.log_weight),
        )
    return total
