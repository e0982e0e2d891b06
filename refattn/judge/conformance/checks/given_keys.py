"""Checks of attention to a few keys, where these are given: cases that are known beforehand."""

from __future__ import annotations

from typing import Any

import numpy as np

from .... import naive
from ..candidate.adapter import Adapter
from ..candidate.limits import Keywords
from ..candidate.samples import draw_key_indices
from ..truth.allowed import allowed_error, of_function
from .trials import CheckRun, add_check, add_condition, compare_known


@add_condition
def given_keys(adapter: Adapter) -> bool:
    """Return whether it is given the keys that it attends to."""
    return adapter.drawn_keyword == "indices"


@add_condition
def sampled(adapter: Adapter) -> bool:
    """Return whether they are a sample, in which a key may come several times."""
    return adapter.record.takes("log_probability")


def _keys(t: CheckRun, n: int, *indices: int, log_p: Any = 0.0) -> dict[str, Any]:
    """Return options that give these keys to n queries, with log probabilities in a sample."""
    each = (n, len(indices)) if t.adapter.has("per-query") else (len(indices),)
    options: Keywords = {"indices": np.broadcast_to(indices, each).copy()}
    if sampled(t.adapter):
        options["log_probability"] = t.adapter.exact(np.broadcast_to(log_p, each))
    return options


@add_check
def all_keys(t: CheckRun) -> None:
    """Pass all keys, in order and reordered, with equal probabilities; one case has one key."""
    for n, m, d in ((2, 1, 2), (3, 2, 3), (4, 6, 8)):
        n, m, d = t.fit(n, m, d)
        arrays, _ = t.problem(n, m, d)
        want = of_function(t.adapter, naive.softmax_attention, arrays, {})
        # Equal probabilities cancel from the quotient, whatever they are.
        for order in (np.arange(m), t.rng.permutation(m)):
            compare_known(t, want, 0.0, *arrays, **_keys(t, n, *order, log_p=-0.5))


@add_check
def order_of_given_keys(t: CheckRun) -> None:
    """Reverse the indices, then reorder the keys."""
    n, m, d = t.fit(4, 9, 4)
    (q, k, v), options = t.problem(n, m, d, 4)
    out = t.call(q, k, v, **options)
    off = allowed_error(t.adapter, (q, k, v), options, out)
    backwards = {name: x[..., ::-1].copy() for name, x in options.items()}
    compare_known(t, out, off, q, k, v, **backwards)
    place = t.rng.permutation(m)  # of each key
    order = np.argsort(place)
    moved = options | {"indices": place[options["indices"]]}
    compare_known(t, out, off, q, k[order], v[order], **moved)


@add_check
def keys_of_heads(t: CheckRun) -> None:
    """Pass indices with the leading axes of the queries, and of heads that share keys."""
    for heads, groups in ((3, None), (4, 2)) if t.adapter.grouped else ((3, None),):
        lead = t.adapter.lead(2, heads)
        n, m, d = t.fit(5, 9, 4)
        t.compare_problem(n, m, d, 4, lead=lead, groups=groups, own=True)


@add_check
def keys_given_again(t: CheckRun) -> None:
    """Compare a key passed twice with one of half the probability; a common factor must cancel."""
    n, m, d = t.fit(4, 5, 4)
    arrays, _ = t.problem(n, m, d)
    first, second = -0.25, -1.5
    # Two draws of a key weigh as one of half the probability.
    once = _keys(t, n, 3, 1, log_p=(first - np.log(2), second))
    want = of_function(t.adapter, naive.sampled_key_attention, arrays, once)
    share = {"log_p": (second, first, first)}
    compare_known(t, want, 0.0, *arrays, **_keys(t, n, 1, 3, 3, **share))
    # A common factor of the probabilities cancels.
    share = {"log_p": (first - 4, second - 4, first - 4)}
    compare_known(t, want, 0.0, *arrays, **_keys(t, n, 3, 1, 3, **share))
    # One key alone has all the weight, however often it is given.
    value = np.broadcast_to(arrays[2][2], want.shape)
    compare_known(t, value, 0.0, *arrays, **_keys(t, n, 2, 2, 2, log_p=second))


@add_check
def any_probabilities(t: CheckRun) -> None:
    """Try probabilities down to e^-1000, which underflow, and above 1 (several draws expected)."""
    n, m, d = t.fit(4, 5, 4)
    (q, k, v), _ = t.problem(n, m, d)
    sample = draw_key_indices(t.adapter, t.rng, k, (), n, 4)
    for size in (-100.0, -1000.0, 1.5):
        log_p = t.adapter.exact(size + sample["log_probability"])
        t.compare(q, k, v, **sample | {"log_probability": log_p})


@add_check
def large_queries(t: CheckRun) -> None:
    """Multiply queries by 30 to 2,000, so that exponentials overflow."""
    n, m, d = t.fit(4, 9, 4)
    (q, k, v), options = t.problem(n, m, d, 3)
    for size in (30.0, 300.0, 2000.0):
        t.compare(t.adapter.exact(size * q), k, v, **options)


@add_check
def negative_normalisers(t: CheckRun) -> None:
    """Let near keys represent far keys: the weights sum to -3 to -5 times the largest weight."""
    n, m, d = t.fit(4, 4, 2)
    _, _, v = t.problem(n, m, d)[0]
    # All keys on one line: far ones are extrapolated from near ones.
    first = np.arange(d) == 0
    q, k = (
        t.adapter.exact(np.resize(x, size)[:, None] * first / t.adapter.root(d))
        for x, size in (((-2.0, -2.25, -1.75, -2.5), n), ((1.5, 1.0, -3.0, 3.0), m))
    )
    t.compare(q, k, v, **_keys(t, n, 0, 1))
