"""Check the arguments of the formulas, and give heads that share keys an axis of their own."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast, get_args

from ..arrays import checks, frequencies, key_samples, qkv, tokens
from ..arrays.heads import Alibi, group_heads, grouped_lead
from ..arrays.library import Array, array_namespace, as_written, constant, is_array_api_obj
from ..typing import Features, Recurrent, Weighting
from .terms import by_lag, distances, of_library

_Equation = TypeVar("_Equation", bound=Callable[..., Any])


def formula(
    *rules: Callable[..., dict[str, Any]], first: Callable[..., dict[str, Any]] | None = None
) -> Callable[[_Equation], _Equation]:
    """Decorate an equation to be given checked arguments, in which all heads broadcast.

    A rule takes the arguments by name, checks some of them, and returns what the equation is given
    in their place. The first one is that of attention if it is None. `rules` are an attribute.
    """

    def decorate(equation: _Equation) -> _Equation:
        signature, run = inspect.signature(equation), of_library(equation)

        @as_written
        @wraps(equation)
        def door(*args: Any, **kwargs: Any) -> Any:
            call = signature.bind(*args, **kwargs)
            call.apply_defaults()
            values = call.arguments
            axes = getattr(values["q"], "ndim", 0)  # what is no array is for the rules
            for rule in (first or _attention, *rules):
                values |= rule(**values)
            names = [name for name, x in values.items() if is_array_api_obj(x)]
            arrays, ungroup = group_heads(*(values[name] for name in names))
            values |= dict(zip(names, arrays, strict=True))
            out = run(*call.args, **call.kwargs)
            if not isinstance(out, tuple):
                return ungroup(out)
            grouped = values["q"].ndim > axes
            return Recurrent(ungroup(out[0]), out[1][..., 0, :, :] if grouped else out[1])

        door.rules = rules  # type: ignore[attr-defined]
        return cast(_Equation, door)

    return decorate


def _attention(
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None = None,
    causal: bool = False,
    dropout: Array | None = None,
    **_: Any,
) -> dict[str, Any]:
    qkv.check(q, k, v, mask=mask, causal=causal, dropout=dropout)
    return {}


def lags(q: Array, k: Array, v: Array, bias: Array | None, **_: Any) -> dict[str, Any]:
    """A bias by lag, as one of each query and key; 0 by default."""
    if bias is None:
        return {"bias": 0.0}
    return {"bias": of_library(by_lag)(qkv.bias_by_lag(bias, q, k, v), q, k)}


def any_scale(q: Array, scale: Any, **_: Any) -> dict[str, Any]:
    """Any factor on the scores, 1 / sqrt(d) by default."""
    factor = checks.real("scale", scale, optional=True, like=q)
    return {"scale": constant(q.shape[-1], q) ** -0.5 if factor is None else factor}


def positive_scale(q: Array, scale: Any, **_: Any) -> dict[str, Any]:
    """A factor on the scores whose root brings queries and keys to kernel coordinates."""
    return {"scale": checks.real("scale", scale, positive=True, optional=True, like=q)}


def score_options(
    q: Array, k: Array, v: Array, bias: Any, softcap: Any, sinks: Any, **_: Any
) -> dict[str, Any]:
    """What is done to the scores of exact attention."""
    qkv.check(q, k, v, bias=None if isinstance(bias, Alibi) else bias)
    if isinstance(bias, Alibi):
        slopes = qkv.of_heads("slopes", constant(bias.slopes, q), q, k, v)
        bias = -slopes * of_library(distances)(q, k)
    if sinks is not None:
        sinks = qkv.of_heads("sinks", constant(sinks, q), q, k, v)
    return {"bias": bias, "softcap": qkv.softcap(softcap, q), "sinks": sinks}


def features_of_rows(feature_map: Any, **_: Any) -> dict[str, Any]:
    """A function that makes features of queries and keys."""
    checks.function("feature_map", feature_map)
    return {}


def added_to_features(q: Array, kernel_epsilon: Any, **_: Any) -> dict[str, Any]:
    """A number that is added to all features, which stay at least 0."""
    return {"kernel_epsilon": checks.at_least_zero("kernel_epsilon", kernel_epsilon, like=q)}


def named_features(features: Any, **_: Any) -> dict[str, Any]:
    """The name of random features."""
    checks.choice("features", features, get_args(Features))
    return {}


def shared_frequencies(
    q: Array, k: Array, v: Array, omega: Any, log_weight: Any = None, **_: Any
) -> dict[str, Any]:
    """Frequencies (..., S, d) with log weights (..., 1, S)."""
    omega, log_weight = frequencies.shared(omega, log_weight, q, grouped_lead(q, k, v))
    return {"omega": omega, "log_weight": log_weight[..., None, :]}


def query_frequencies(q: Array, k: Array, v: Array, omega: Any, **_: Any) -> dict[str, Any]:
    """Frequencies of each query, (..., n, S d): heads are the third axis from the end."""
    if frequencies.at_means(omega):
        return {}
    omega = frequencies.of_queries(omega, q, grouped_lead(q, k, v))
    rows = (*omega.shape[:-2], math.prod(omega.shape[-2:]))
    return {"omega": array_namespace(omega).reshape(omega, rows)}


def proposals(
    q: Array,
    k: Array,
    v: Array,
    omega: Any,
    num_proposals: int | None,
    centres: Any,
    weighting: Any,
    beta: Any,
    mask: Array | None,
    causal: bool,
    **_: Any,
) -> dict[str, Any]:
    """Proposals of LARA and their weights."""
    checks.choice("weighting", weighting, get_args(Weighting))
    beta = checks.real("beta", beta, like=q)
    outer, mask, samples = grouped_lead(q, k, v), qkv.key_rows(mask, k), None
    if not frequencies.at_means(omega):
        omega, _ = frequencies.shared(omega, None, q, outer)
        samples = omega.shape[-2]
    if causal:
        frequencies.causal_proposals(centres, weighting, mask)
    if centres is not None:
        centres, _ = frequencies.shared(centres, None, q, outer, name="centres")
        num_proposals = centres.shape[-2]
    if num_proposals is not None:
        checks.positive_integer("num_proposals", num_proposals)
    count = samples if num_proposals is None else num_proposals
    if count is None:
        raise ValueError(
            '`num_proposals` or `centres` must be given with `omega="mean"`, got neither.'
        )
    if samples is not None:
        frequencies.samples_of_each(samples, count)
    return {"omega": omega, "num_proposals": count, "centres": centres, "beta": beta, "mask": mask}


def chunks(
    q: Array, k: Array, v: Array, window: Any, mask: Array | None, omega: Any = "mean", **more: Any
) -> dict[str, Any]:
    """Chunks of at most as many keys as there are tokens, with a frequency for each."""
    checks.flag("log_size", more.get("log_size", True))
    mask, (window, count) = qkv.one_row(mask, k), qkv.cut_evenly("window", window, q, k)
    if not frequencies.at_means(omega):
        omega = frequencies.of_chunks(omega, count, q, grouped_lead(q, k, v))
    return {"window": window, "mask": mask, "omega": omega}


def near_keys(window: Any, **_: Any) -> dict[str, Any]:
    """How far a query sees keys exactly, to the left and to the right."""
    return {"window": qkv.window(window)}


def key_indices(
    q: Array, k: Array, v: Array, indices: Any, mask: Array | None, **_: Any
) -> dict[str, Any]:
    """Indices of keys, (..., S, 1)."""
    indices = key_samples.check_indices(indices, q, k, v)
    return {"indices": indices[..., None], "mask": qkv.one_row(mask, k)}


def sampled_keys(
    q: Array, k: Array, v: Array, indices: Any, log_probability: Any, **_: Any
) -> dict[str, Any]:
    """Indices of the keys of each query, (..., n or 1, S), and how often each is expected."""
    indices, log_p = key_samples.check_samples(indices, log_probability, q, k, v)
    return {"indices": indices, "log_probability": log_p}


def gates(q: Array, k: Array, v: Array, **options: Any) -> dict[str, Any]:
    """What tokens do, arrays (..., n, .), with a removal as [a, b], and the state before them."""
    whole, own = (q, k, v), tokens.RecurrenceOptions._fields
    taken = tokens.RecurrenceOptions(**{x: y for x, y in options.items() if x in own})
    q, k, given, scale, xp = tokens.check(*whole, taken)
    values = {"q": q, "k": k, "scale": scale}
    values |= {"log_decay": given.log_decay, "initial_state": given.state}
    pair = [xp.zeros_like(k) if x is None else x for x in (given.a, given.b)]
    values["removal"] = xp.concat(xp.broadcast_arrays(*pair), axis=-1)
    values["write"] = xp.ones_like(k[..., :1]) if given.write is None else given.write
    if "beta" in options:
        values["beta"] = tokens.of_tokens("beta", options["beta"], whole)
    if "decay" in options:
        values["decay"] = qkv.per_head("decay", options["decay"], k)[..., None, None]
    return values
