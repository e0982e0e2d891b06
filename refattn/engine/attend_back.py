r"""Gradients of softmax attention, in blocks of scores; arguments are trusted.

With weights :math:`p_{ij} = e^{s_{ij} - \mathrm{lse}_i}` and cotangents :math:`\bar g` of the
output and :math:`\bar\ell` of the log normaliser,

.. math::
    \bar s_{ij} = p_{ij} \, (\bar g_i \cdot v_j - \delta_i), \qquad
    \delta_i = \bar g_i \cdot \mathrm{out}_i - \bar\ell_i, \qquad
    \bar v_j = \sum_i p_{ij} \, \bar g_i

and all else follows from :math:`\bar s`. The weights are computed again, block after block, from
the log normalisers; each block of them serves all sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ..arrays.arithmetic import (
    Workspace,
    add,
    exp_less,
    finite,
    less,
    multiply,
    sum_of_visible,
    times,
    workspace,
)
from ..arrays.blocks import (
    WHOLE,
    add_part,
    block_shape,
    blocks,
    most_threads,
    part,
    room,
    sum_to,
    tiles,
)
from ..arrays.library import Array, array_namespace, device, own_copy
from ..arrays.threads import Sequencer, for_each
from .attend import Attended, attend_in_blocks
from .chunks import attend_in_bands
from .scores import Scores, cap_scores, slope_of_cap

_ROWS, _COLUMNS = 8, 8  # blocks of which sums are made before these are added to the result


class _Cotangents(NamedTuple):
    """What one change of the result takes of each argument, with the shape of that argument."""

    q: Array
    k: Array
    v: Array
    bias: Array | None = None
    sinks: Array | None = None


class _Addends(NamedTuple):
    """What some queries and keys bring to the sums, for all leading axes."""

    q: Array  # (..., rows, d)
    k: Array  # (..., columns, d)
    v: Array  # (..., columns, d_v)
    scores: Array  # (..., rows, columns)


def zeros_of(x: Array) -> Array:
    """Make a buffer for the cotangent of an array."""
    xp = array_namespace(x)
    return xp.zeros(x.shape, dtype=x.dtype, device=device(x))


@attend_in_bands.pullback
@attend_in_blocks.pullback
def pull_attend(
    done: Attended, cotangents: Any, q: Array, k: Array, v: Array, scores: Scores, **more: Any
) -> dict[str, Any]:
    """Pull cotangents of `attend` back, from what it returned.

    Arguments that are broadcast get the sum over what they are repeated for.
    """
    xp, (d_out, d_lse) = array_namespace(q, k, v), cotangents
    d_out = xp.zeros_like(done.out) if d_out is None else d_out
    n, m = q.shape[-2], k.shape[-2]
    scale, bias, mask, _, _, softcap, sinks, dropout, slopes, _ = scores
    if mask is not None and mask.ndim < 2:
        mask = xp.broadcast_to(mask, (1, m))
    band = scores.band(n, m)
    lead = done.lse.shape[:-1]
    rows, columns = block_shape(q, n, m)
    budget = room(q, n, m)
    rows, columns = max(1, min(n, rows)), max(1, min(m, columns))
    total = _Cotangents(*(None if x is None else zeros_of(x) for x in (q, k, v, bias)))

    def of_block(box: tuple[slice, ...], j: slice, memory: Workspace | None) -> _Addends:
        head, i = box[:-1], box[-1]
        q_i, g = (part(x, (*box, WHOLE)) for x in (q, d_out))
        out, lse = part(done.out, (*box, WHOLE)), part(done.lse, box)[..., None]
        delta = pull_normaliser(g, out, None if d_lse is None else part(d_lse, box), xp)[..., None]
        k_j, v_j = (part(x, (*head, j, WHOLE)) for x in (k, v))
        q_i = q_i if scale is None else q_i * scale
        scores = multiply(q_i, xp.matrix_transpose(k_j), memory, "scores")
        steep = None  # slope of the cap, before the scores are overwritten
        if softcap is not None:
            steep, scores = slope_of_cap(scores, softcap, xp), cap_scores(scores, softcap, xp)
        if bias is not None:
            scores = add(scores, part(bias, (*box, j)))
        if slopes is not None:
            scores = add(scores, band.alibi(slopes, box, j, xp))
        masked = None if mask is None else part(mask, (*box, j))
        visible = band.visible(i, j, device(q), xp, masked)
        if visible is not None:
            scores = xp.where(visible, scores, -math.inf)
        # Normalised at once, by what the forward pass returned: no maximum, no second pass.
        weights = exp_less(scores, lse, xp)
        d_weights = multiply(g, xp.matrix_transpose(v_j), memory, "d_scores")
        kept = weights
        if dropout is not None:
            factor = part(dropout, (*box, j))
            d_weights, kept = xp.where(factor == 0, 0.0, d_weights * factor), weights * factor
        d_scores = times(less(d_weights, delta), weights)
        if visible is not None:  # nan in what is hidden goes no further
            kept, d_scores = (xp.where(visible, x, 0.0) for x in (kept, d_scores))
        d_products = d_scores  # the bias is added after the cap, and takes `d_scores`
        if steep is not None:  # of what is hidden it may be nan
            d_products = d_scores * (steep if visible is None else xp.where(visible, steep, 0.0))
        turned = xp.matrix_transpose
        by_key = None if visible is None else turned(visible)
        d_q = sum_of_visible(d_products, k_j, visible, xp, memory, signed=True)
        d_k = sum_of_visible(turned(d_products), q_i, by_key, xp, memory, signed=True)
        d_v = sum_of_visible(turned(kept), g, by_key, xp, memory, signed=True)
        return _Addends(d_q if scale is None else d_q * scale, d_k, d_v, d_scores)

    most = most_threads(q, math.prod(lead) * n * m)
    heads = budget // (rows * columns * min(4, most or 1))  # small ones together, but for threads

    # Squares of 8 x 8 blocks: each thread adds up what its square gives to q, k and v, and then
    # writes once to the totals that all share.
    def items() -> Iterator[tuple[int, tuple[slice, ...], slice, slice]]:
        place = 0
        for head in tiles(lead, heads):
            for i in blocks(0, n, rows * _ROWS):
                seen = band.keys(i, slice(0, m), columns)
                for j in blocks(seen.start, seen.stop, columns * _COLUMNS):
                    yield place, head, i, j
                    place += 1

    order = Sequencer()  # totals are written in one order, whatever threads there are

    def worker() -> Callable[[Any], None]:
        memory = workspace(q)

        def pull(item: tuple[int, tuple[slice, ...], slice, slice]) -> None:
            place, head, queries, keys = item
            sums: dict[tuple[str, int, int], Array] = {}
            d_bias: list[tuple[tuple[slice, ...], Array]] = []

            def gather(name: str, tokens: slice, x: Array, like: Array) -> None:
                x = sum_to(x, (*part(like, (*head, tokens, WHOLE)).shape[:-2], *x.shape[-2:]))
                at = (name, tokens.start, tokens.stop)
                sums[at] = add(sums[at], x) if at in sums else x

            for i in blocks(queries.start, queries.stop, rows):
                seen = band.keys(i, keys, columns)
                for j in blocks(seen.start, seen.stop, columns):
                    found = of_block((*head, i), j, memory)
                    gather("q", i, found.q, q)
                    gather("k", j, found.k, k)
                    gather("v", j, found.v, v)
                    if bias is not None:
                        box = (*head, i, j)
                        d_scores = sum_to(found.scores, part(bias, box).shape)
                        d_bias.append((box, own_copy(d_scores, xp)))  # lies in `memory`

            def write() -> None:
                nonlocal total
                for (name, start, stop), x in sums.items():
                    box = (*head, slice(start, stop), WHOLE)
                    buffer = add_part(getattr(total, name), box, x)
                    total = total._replace(**{name: buffer})
                for box, x in d_bias:
                    total = total._replace(bias=add_part(total.bias, box, x))

            order.add(place, write)

        return pull

    for_each(worker, items(), most=most)
    if sinks is not None:
        total = total._replace(sinks=_pull_sinks(sinks, done, d_out, d_lse, xp))
    nothing = Scores._make([None] * len(Scores._fields))
    of_scores = nothing._replace(bias=total.bias, sinks=total.sinks)
    return {"q": total.q, "k": total.k, "v": total.v, "scores": of_scores}


def pull_normaliser(d_out: Array, out: Array, d_lse: Array | None, xp: Any) -> Array:
    """Pull the output back to minus the log normaliser of each query."""
    delta = xp.sum(d_out * out, axis=-1)
    return delta if d_lse is None else delta - d_lse


def _pull_sinks(sinks: Array, done: Attended, d_out: Array, d_lse: Array | None, xp: Any) -> Array:
    """Pull cotangents of sinks, keys whose value is 0, back."""
    # Of the pullback of a score, the term with the value is 0: -weight * delta is left.
    weights = xp.exp(sinks[..., 0] - finite(done.lse, xp))
    d_sinks = xp.where(weights == 0, 0.0, -weights * pull_normaliser(d_out, done.out, d_lse, xp))
    return sum_to(d_sinks[..., None], sinks.shape)
