"""How an implementation is called: arrays and options in, frequencies given or drawn."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from .....arrays.library import Array
from .....naive.few_keys import coreset_attention, sampled_key_attention
from .....naive.lara import linear_randomized_attention
from .....naive.linear import linear_attention, relu_feature_attention
from .....naive.near_and_far import (
    eva_attention,
    local_random_feature_attention,
    second_order_attention,
)
from .....naive.ra import randomized_attention
from .....naive.rfa import random_feature_attention
from .....naive.softmax import softmax_attention
from .....naive.terms import of_library, visible
from .draws import generator, of_kernel, of_proposals, of_target, shared
from .keys import KEYS, of_heads


@of_library
def call(
    q: Array,
    k: Array,
    v: Array,
    *,
    estimator: str,
    omega: Array | None = None,
    size: Any = None,
    seed: int | None = None,
    mask: Array | None = None,
    causal: bool = False,
    **options: Any,
) -> Array:
    """Call an estimator, at the frequencies given or drawn."""
    dtype = q.dtype
    if estimator in DRAWN and omega is None:
        seen = visible(q, k, mask=mask, causal=causal)
        omega = DRAWN[estimator](q, shared(q, k), seen, mask, size, generator(seed))
    if omega is not None:
        options["omega"] = omega
    if estimator in KEYS and "indices" not in options:
        rng = generator(seed)
        options |= of_heads(KEYS[estimator], q, shared(q, k), shared(q, v), size, rng)
    if causal:
        options["causal"] = True
    out = attention(estimator)(q, k, v, mask=mask, **options)
    return out.astype(dtype)


# Nothing here calls it: defects do.
def as_it_lies(x: Array) -> Array:
    """Read an array as it lies in memory, as if it were contiguous."""
    held = x if x.base is None else x.base
    if x.flags.c_contiguous or not held.flags.c_contiguous or held.size < x.size:
        return x
    return held.reshape(-1)[: x.size].reshape(x.shape)


# Takes the place of the function of this name in the printed formulas.
def check_arrays(min_ndim: int, **named: Array) -> Any:
    """Accept every array: the check of the formulas rejects half precision."""
    return np


def attention(estimator: str) -> Callable[..., Array]:
    """Return the formula of an estimator."""
    found: dict[str, Callable[..., Array]] = {
        "softmax": softmax_attention,
        "rfa": random_feature_attention,
        "ra": randomized_attention,
        "lara": linear_randomized_attention,
        "linear": linear_attention,
        "performer-relu": relu_feature_attention,
        "eva": eva_attention,
        "eva-sampled": eva_attention,
        "second-order": second_order_attention,
        "rfa-local": partial(local_random_feature_attention, window=(8, 8)),
        "coreset": coreset_attention,
    }
    return found.get(estimator, sampled_key_attention)


DRAWN = {
    **dict.fromkeys(("rfa", "rfa-local", "performer-relu"), of_kernel),
    "ra": of_target,
    "lara": of_proposals,
}
HELD: dict[Any, Array] = {}  # of an implementation, between its calls
