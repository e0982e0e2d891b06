"""What estimators take, checked and in the library of the queries."""

from __future__ import annotations

from typing import Any, get_args

from .. import sampling
from ..arrays import checks, frequencies, proposals, qkv
from ..arrays.library import Array
from ..typing import Coupling

__all__ = ["change_gauge", "check", "exactly_one", "given_or_drawn"]


def change_gauge(q: Array, k: Array, v: Array, proposal: Any) -> tuple[Array, Array]:
    """Queries and keys in the gauge of the proposal, if it has one; its batch must fit."""
    if isinstance(proposal, sampling.Gaussian | sampling.Mixture):
        proposals.batch("proposal", proposal.lead, qkv.lead(q, k, v))
    if not isinstance(proposal, sampling.Gaussian):
        return q, k
    return proposal.change_gauge(q, k)


def check(
    q: Array, k: Array, v: Array, scale: Any, mask: Array | None, causal: Any
) -> tuple[float | None, Array | None]:
    """Check what every estimator takes; return the scale and the mask (..., n or 1, m)."""
    qkv.check(q, k, v, mask=mask, causal=causal)
    scale = checks.real("scale", scale, positive=True, optional=True, like=q)
    return scale, qkv.key_rows(mask, k)


def exactly_one(**options: Any) -> None:
    (a, b), given = options, [x for x in options.values() if x is not None]
    if len(given) != 1:
        got = "both" if given else "neither"
        raise ValueError(f"Exactly one of `{a}` and `{b}` must be given, got {got}.")


def given_or_drawn(
    like: Array,
    lead: tuple[int, ...],
    omega: Any,
    log_weight: Any,
    *,
    coupling: Coupling,
    proposal: Any,
    rng: Any,
    **size: Any,
) -> tuple[Array, Array]:
    """Frequencies and log weights, given or drawn, as arrays of the library of `like`."""
    checks.choice("coupling", coupling, get_args(Coupling))
    exactly_one(omega=omega, **size)
    if log_weight is not None and omega is None:
        raise ValueError("`log_weight` must come with the `omega` it weighs, got no `omega`.")
    if omega is not None and proposal is not None:
        raise ValueError("`proposal` must not come with `omega`: give `log_weight` instead.")
    if omega is None:
        ((name, count),) = size.items()
        checks.length(name, count, like.shape[-1])
        omega, log_weight = sampling.draw(
            count, like.shape[-1], coupling=coupling, proposal=proposal, rng=rng
        )
    return frequencies.shared(omega, log_weight, like, lead)
