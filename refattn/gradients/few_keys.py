"""The pullback of attention to samples of keys: what a key takes of each of its places is added."""

from __future__ import annotations

from ..arrays.blocks import WHOLE, add_part, part
from ..arrays.library import Array, add_rows, array_namespace, as_written
from ..engine import kernel_back
from ..engine.hops import joined
from ..engine.kernel import Attended
from ..engine.kernel_back import Cotangents, zeros_of
from ..estimators.few_keys import Inputs, Sample

__all__ = ["pull"]


@as_written
def pull(found: Inputs, done: Attended, d_out: Array) -> Cotangents:
    """Pull `few_keys.attend_samples`, which returned `done`, back."""
    q, k, v, _, indices, *_ = found.sample
    total = Cotangents(*map(zeros_of, (q, k, v)))
    if found.shared:
        box = tuple(slice(0, length) for length in (*found.lead, q.shape[-2]))
        return _added(total, box, _pull(found.sample, done, d_out))
    # As many places at once as there are keys: sums over keys take no more time than those.
    for box, sample in found.each(at_least=-(-k.shape[-2] // max(1, indices.shape[-1]))):
        out, g = (part(x, (*box, WHOLE))[..., None, :] for x in (done.out, d_out))
        own = _pull(sample, Attended(out, part(done.lse, box)[..., None]), g, several=True)
        total = _added(total, box, own._replace(q=own.q[..., 0, :]))
    return total


def _pull(sample: Sample, done: Attended, d_out: Array, *, several: bool = False) -> Cotangents:
    """Cotangents of queries and of all keys: what `several` samples take is added."""
    k, v, options = sample.taken()
    found = kernel_back.pull_attend(sample.q, k, v, done, d_out, **options)

    def added(rows: Array) -> Array:
        xp = array_namespace(rows)
        at = xp.broadcast_to(sample.indices[..., 0, :], rows.shape[:-1])
        if several:
            rows, at = joined(rows, xp), joined(at[..., None], xp)[..., 0]
        return add_rows(rows, at, sample.k.shape[-2], xp)

    return Cotangents(found.q, added(found.k), added(found.v))


def _added(total: Cotangents, box: tuple[slice, ...], own: Cotangents) -> Cotangents:
    """Add what some queries and all keys take."""
    keys = (*box[:-1], WHOLE, WHOLE)
    return Cotangents(
        add_part(total.q, (*box, WHOLE), own.q),
        add_part(total.k, keys, own.k),
        add_part(total.v, keys, own.v),
    )
