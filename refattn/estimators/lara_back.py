"""Gradients of causal linear randomized attention: pullbacks of the steps that `lara` has."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..arrays.arithmetic import multiply, square_norm
from ..arrays.blocks import some_heads
from ..arrays.library import Array, device
from ..engine.attend import Attended
from ..engine.positive_back import PositiveBack
from ..engine.signed_back import pull_linear
from ..numbers.tape import given, pull_to_steps, space
from .lara import LaraInputs, attend_growing, past_centres, past_chunks, running_log_sum
from .token_chunks import chunk_of, tokens_of_means

_UNTOUCHED = LaraInputs._make([None] * len(LaraInputs._fields))


@past_centres.pullback
def _pull_centres(centres: Array, d_centres: Array, inputs: LaraInputs) -> dict[str, Any]:
    """Pull the means of the chunks before, of which the first has none, back to their tokens."""
    d_means = d_centres[..., 1:, :]
    d_q, d_k = (
        inputs.root * tokens_of_means(d_means, *pair, inputs.xp) for pair in past_chunks(inputs)
    )
    return {"inputs": _UNTOUCHED._replace(q=d_q, keys=inputs.keys._replace(k=d_k, v=None))}


@attend_growing.pullback
def _pull_growing(
    done: Attended, cotangents: Any, inputs: LaraInputs, centres: Array, omega: Array
) -> dict[str, Any]:
    """Pull causal attention back, to proposals through the weights of their samples."""
    centres, omega = given(centres), given(omega)
    scaled, log_weight = omega * inputs.root, _known_weights(inputs, centres, omega)
    arithmetic = _KnownSamples(inputs, scaled.x, log_weight.x, done.lse, inputs.keys.half)
    pulled = pull_linear(inputs.q, inputs.keys, arithmetic, done.out, *cotangents, causal=True)
    found = pull_to_steps((scaled, log_weight), pulled.parameters)
    given_inputs = _UNTOUCHED._replace(q=pulled.q, keys=pulled.keys)
    return {"inputs": given_inputs, "centres": found[centres.step], "omega": found[omega.step]}


def _known_weights(inputs: LaraInputs, centres: Array, omega: Array) -> Array:
    """Log weights of samples for the queries of each chunk, (..., C, S), which know some."""
    xp: Any = space(inputs.xp)
    count, _, weighting, _, _, repeats = inputs.options
    ratio = multiply(centres, xp.matrix_transpose(omega)) - square_norm(centres)[..., None] / 2
    chunk, proposal = np.arange(count)[:, None], np.arange(count * repeats) // repeats
    known, newest = (
        xp.asarray(x, device=device(inputs.q)) for x in (chunk >= proposal, chunk == proposal)
    )
    if weighting == "balance":
        log_weight = -running_log_sum(ratio, xp)
    else:
        log_weight = -xp.sum(xp.where(newest, ratio, 0.0), axis=-2, keepdims=True)
    return xp.where(known, log_weight, -math.inf)


class _KnownSamples(PositiveBack):
    """Features of queries, which know the samples of their chunk: weights (..., C, S)."""

    def __init__(self, inputs: LaraInputs, *arrays: Any) -> None:
        super().__init__(*arrays)
        self.xp = inputs.xp
        self.chunk = chunk_of(inputs.q.shape[-2], inputs.options.num_proposals)

    def weights(self, head: tuple[slice, ...], i: slice) -> Array:
        """Log weights of the samples for some queries."""
        rows = some_heads(self.log_weight, head)
        return self.xp.take(rows, self.xp.asarray(self.chunk[i], device=device(rows)), axis=-2)

    def taken(self, i: slice, cotangent: Array) -> list[Any]:
        """What these take, chunk by chunk."""
        chunk, addends = self.chunk[i], []
        for c in np.unique(chunk).tolist():
            start, stop = np.searchsorted(chunk, [c, c + 1]).tolist()
            total = self.xp.sum(cotangent[..., start:stop, :], axis=-2, keepdims=True)
            addends.append((1, slice(c, c + 1), total))
        return addends
