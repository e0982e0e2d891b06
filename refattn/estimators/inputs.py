"""Arguments of estimators, checked and in the library of the queries."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, get_args

from .. import sampling
from ..arrays import checks, frequencies, qkv
from ..arrays.blocks import WHOLE, buffers, put, tiles
from ..arrays.heads import group_heads
from ..arrays.library import Array
from ..typing import Coupling

_HEADS = 16  # at once, which threads share


class Options(NamedTuple):
    """What estimators take beside queries, keys and values; no estimator takes all of it."""

    scale: float | None = None
    mask: Array | None = None  # of bool, broadcasting to (..., n, m)
    causal: bool = False
    omega: Any = None  # (..., S, d), or (..., n, S, d) if each query has its own
    log_weight: Any = None  # (..., S)
    num_features: int | None = None
    num_samples: int | None = None
    coupling: Coupling = "iid"
    proposal: Any = None
    rng: Any = None


def change_gauge(q: Array, k: Array, proposal: Any, lead: tuple[int, ...]) -> tuple[Array, Array]:
    """Put queries and keys into the gauge of the proposal, if it has one; its batch must fit."""
    if isinstance(proposal, sampling.Gaussian | sampling.Mixture):
        frequencies.batch("proposal", proposal.lead, lead)
    if not isinstance(proposal, sampling.Gaussian):
        return q, k
    return proposal.change_gauge(q, k)


def check_call(
    q: Array, k: Array, v: Array, options: Options
) -> tuple[float | None, Array | None, tuple[int, ...], Any]:
    """Check what every estimator takes; return scale, mask (..., n or 1, m), lead and namespace."""
    xp, lead = qkv.check(q, k, v, mask=options.mask, causal=options.causal)
    scale = checks.real("scale", options.scale, positive=True, optional=True, like=q)
    return scale, qkv.key_rows(options.mask, k), lead, xp


def group_lags(bias: Array, q: Array, k: Array, v: Array, mask: Array | None) -> Array:
    """Check a bias by lag, and return it in groups of heads, (..., 1, n + m - 1)."""
    (*_, bias), _ = group_heads(q, k, v, qkv.bias_by_lag(bias, q, k, v, mask))
    return bias


def open_partials(fn: Any) -> tuple[Any, dict[str, Any]]:
    """Return the function within partials, and the options that they give by keyword."""
    options: dict[str, Any] = {}
    while isinstance(fn, partial) and not fn.args:
        fn, options = fn.func, {**fn.keywords, **options}
    return fn, options


def exactly_one(**options: Any) -> None:
    """Check that one of two options is not None."""
    (a, b), count = options, sum(x is not None for x in options.values())
    if count != 1:
        got = "both" if count else "neither"
        raise ValueError(f"Exactly one of `{a}` and `{b}` must be given, got {got}.")


def choose_frequencies(
    options: Options, size: str, like: Array, lead: tuple[int, ...]
) -> tuple[Array, Array]:
    """Return the frequencies and log weights of a call, or draw them, in the library of `like`.

    How many are drawn is in the option named `size`.
    """
    *_, omega, log_weight, _, _, coupling, proposal, rng = options
    count = getattr(options, size)
    checks.choice("coupling", coupling, get_args(Coupling))
    exactly_one(**{"omega": omega, size: count})
    if log_weight is not None and omega is None:
        raise ValueError("`log_weight` must come with the `omega` it weighs, got no `omega`.")
    if omega is not None and proposal is not None:
        raise ValueError("`proposal` must not come with `omega`: give `log_weight` instead.")
    if omega is None:
        d = like.shape[-1]
        checks.length(size, count, d)
        if isinstance(proposal, sampling.Gaussian):  # q and k are in its gauge already
            proposal = sampling.Gaussian(proposal.mean, proposal.cov)
        omega, log_weight = sampling.draw(count, d, coupling=coupling, proposal=proposal, rng=rng)
    return frequencies.shared(omega, log_weight, like, lead)


def in_heads(inputs: Any, run: Callable[[Any], Array], q: Array, v: Array, xp: Any) -> Array:
    """Call `run` for a few heads of the inputs at a time: what it makes on the way is of these."""
    lead = inputs.lead
    if math.prod(lead) <= _HEADS or not v.shape[-1]:
        return run(inputs)
    out, _ = buffers(q, v, lead, xp)
    for head in tiles(lead, _HEADS):
        out = put(out, (*head, WHOLE, WHOLE), run(inputs.part(head)))
    return out
