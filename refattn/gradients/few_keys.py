"""Gradients of attention to samples of keys, added up for keys that were drawn more than once."""

from __future__ import annotations

from typing import Any

from ..arrays.blocks import WHOLE, add_part, part
from ..arrays.library import Array, add_rows, as_written
from ..engine import attend_back
from ..engine.attend import Attended
from ..engine.attend_back import Cotangents, zeros_of
from ..engine.hops import joined
from ..estimators.few_keys import KeysOfQueries, SampledKeyInputs, attend_samples, prepare_samples
from .rules import Sources, with_pullback


def vjp_sampled_keys(q: Array, k: Array, v: Array, **options: Any) -> Any:
    """Pull `sampled_key_attention` back at given samples."""
    inputs = prepare_samples(q, k, v, **options)
    sources, done = Sources(q, k, v, inputs.sample.xp), attend_samples(inputs)

    def pull(d_out: Array) -> Any:
        return _pull_samples(inputs, done, d_out)[:3]

    return with_pullback(done.out, inputs.ungroup, sources, pull)


@as_written
def _pull_samples(inputs: SampledKeyInputs, done: Attended, d_out: Array) -> Cotangents:
    """Pull `few_keys.attend_samples`, which returned `done`, back."""
    q, k, v, _, indices, *_ = inputs.sample
    total = Cotangents(*map(zeros_of, (q, k, v)))
    if inputs.shared:
        box = tuple(slice(0, length) for length in (*inputs.lead, q.shape[-2]))
        return _add_box(total, box, _pull_sample(inputs.sample, done, d_out))
    # As many places at once as there are keys: sums over keys take no more time than those.
    for box, sample in inputs.each(at_least=-(-k.shape[-2] // max(1, indices.shape[-1]))):
        out, g = (part(x, (*box, WHOLE))[..., None, :] for x in (done.out, d_out))
        done_i = Attended(out, part(done.lse, box)[..., None])
        pulled = _pull_sample(sample, done_i, g, several=True)
        total = _add_box(total, box, pulled._replace(q=pulled.q[..., 0, :]))
    return total


def _pull_sample(
    sample: KeysOfQueries, done: Attended, d_out: Array, *, several: bool = False
) -> Cotangents:
    """Return cotangents of queries and of all keys: what `several` samples take is added."""
    k, v, scores = sample.taken()
    pulled = attend_back.pull_attend(sample.q, k, v, done, d_out, scores=scores)

    def add(rows: Array) -> Array:
        at = sample.xp.broadcast_to(sample.indices[..., 0, :], rows.shape[:-1])
        if several:
            rows, at = joined(rows, sample.xp), joined(at[..., None], sample.xp)[..., 0]
        return add_rows(rows, at, sample.k.shape[-2], sample.xp)

    return Cotangents(pulled.q, add(pulled.k), add(pulled.v))


def _add_box(total: Cotangents, box: tuple[slice, ...], taken: Cotangents) -> Cotangents:
    """Add what some queries and all keys take."""
    keys = (*box[:-1], WHOLE, WHOLE)
    return Cotangents(
        add_part(total.q, (*box, WHOLE), taken.q),
        add_part(total.k, keys, taken.k),
        add_part(total.v, keys, taken.v),
    )
