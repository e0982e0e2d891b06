"""What estimators take, checked and in the library of the queries."""

from __future__ import annotations

from inspect import signature
from typing import Any, get_args

from .. import sampling
from ..arrays import checks, frequencies, proposals, qkv
from ..arrays.library import Array
from ..typing import Coupling

__all__ = ["arguments", "change_gauge", "check", "exactly_one", "given_or_drawn"]


def arguments(fn: Any, *args: Any, **options: Any) -> dict[str, Any]:
    """Arguments of a call by name, with those that `fn` takes by default."""
    call = signature(fn).bind(*args, **options)
    call.apply_defaults()
    return call.arguments


def change_gauge(q: Array, k: Array, v: Array, proposal: Any) -> tuple[Array, Array]:
    """Queries and keys in the gauge of the proposal, if it has one; its batch must fit."""
    if isinstance(proposal, sampling.Gaussian | sampling.Mixture):
        proposals.batch("proposal", proposal.lead, qkv.lead(q, k, v))
    if not isinstance(proposal, sampling.Gaussian):
        return q, k
    return proposal.change_gauge(q, k)


def check(given: dict[str, Any]) -> tuple[Array, Array, Array, float | None, Array | None]:
    """Check what every estimator takes; return q, k, v, scale and the mask (..., n or 1, m)."""
    q, k, v, mask = (given[name] for name in ("q", "k", "v", "mask"))
    qkv.check(q, k, v, mask=mask, causal=given.get("causal", False))
    scale = checks.real("scale", given["scale"], positive=True, optional=True, like=q)
    return q, k, v, scale, qkv.key_rows(mask, k)


def exactly_one(**options: Any) -> None:
    (a, b), given = options, [x for x in options.values() if x is not None]
    if len(given) != 1:
        got = "both" if given else "neither"
        raise ValueError(f"Exactly one of `{a}` and `{b}` must be given, got {got}.")


def given_or_drawn(
    given: dict[str, Any], size: str, like: Array, lead: tuple[int, ...]
) -> tuple[Array, Array]:
    """Frequencies and log weights, given or drawn, as arrays of the library of `like`.

    How many are drawn is in the argument named `size`.
    """
    omega, log_weight, proposal = (given.get(x) for x in ("omega", "log_weight", "proposal"))
    coupling: Any = given.get("coupling", "iid")
    count: Any = given.get(size)
    checks.choice("coupling", coupling, get_args(Coupling))
    exactly_one(**{"omega": omega, size: count})
    if log_weight is not None and omega is None:
        raise ValueError("`log_weight` must come with the `omega` it weighs, got no `omega`.")
    if omega is not None and proposal is not None:
        raise ValueError("`proposal` must not come with `omega`: give `log_weight` instead.")
    if omega is None:
        d = like.shape[-1]
        checks.length(size, count, d)
        law = {"coupling": coupling, "proposal": proposal, "rng": given["rng"]}
        omega, log_weight = sampling.draw(count, d, **law)
    return frequencies.shared(omega, log_weight, like, lead)
