"""Checks of frequencies that are given, and of the features made of them."""

from __future__ import annotations

import numpy as np

from ..candidate.failures import Failure
from ..truth.reference import reference
from .trials import CheckRun, add_check, same_within, ways_to_call


@add_check(
    "random-features",
    "normalised",
    claim="with one frequency queries cancel from the ratio",
    needs=lambda adapter: adapter["features"] == "positive" and not adapter["fixed_frequencies"],
)
def one_frequency(t: CheckRun) -> None:
    """At S = 1 the result is the same for every query."""
    (q, k, v), frequencies = t.problem(6, 7, 4, 1)
    for options in ways_to_call(t, frequencies, 1):
        out = t.call(q, k, v, **options)
        t.equal(out, np.broadcast_to(out[:1], out.shape), same_within(t, (q, k, v), options))


@add_check("frequency-mean", claim="the estimate is the mean over frequencies", needs="omega")
def mean_over_frequencies(t: CheckRun) -> None:
    """Frequencies in another order, and each of them twice, give the same."""
    arrays, options = t.problem(4, 6, 4, 6)
    axis = -2
    omega = options["omega"]
    out = t.call(*arrays, omega=omega)
    allowed = same_within(t, arrays, options)
    t.equal(t.call(*arrays, omega=np.flip(omega, axis).copy()), out, allowed)
    t.equal(t.call(*arrays, omega=np.concatenate([omega, omega], axis)), out, allowed)


@add_check(
    "pairs", claim="features of x times features of y are the estimate", needs="omega feature_map"
)
def feature_products(t: CheckRun) -> None:
    """Products of the exposed features, the same map for both sides."""
    for d, samples in ((1, 1), (3, 4), (8, 33)):
        (x, y), options = t.problem(5, 5, d, samples)
        want, allowed = reference(t.adapter, (x, y), options)
        a, b = (t.call(z, **options) for z in (x, y))
        if a.shape != b.shape or a.shape[:-1] != x.shape[:-1]:
            raise Failure("features of shape (5, F)", f"shape {a.shape}")
        t.equal(np.sum(a * b, -1), want, allowed)
