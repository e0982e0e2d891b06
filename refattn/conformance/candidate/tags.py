"""Declarations of a candidate: capabilities, and tags with their values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from ...arrays import checks
from ...registry import Estimator

LISTING = "refattn check --list"  # prints all names, of which errors list some
COMMON = (
    *("softmax", "rfa", "performer", "ra", "lara"),
    *("eva", "linear", "coreset", "snis", "kernel"),
)

# Options of an estimator that the checks know how to use.
CAPABILITIES: Mapping[str, str] = MappingProxyType(
    {
        "batch_invariant": "a query gives the same bits alone, in any batch and in any order",
        "bias": "bias=, floats (..., n, m), added to the scores",
        "causal": "causal=True: query i sees key j only if j <= i + m - n",
        "d_bias": "with bias and vjp: returns d_bias after dv",
        "d_lse": "with lse and vjp: takes d_lse=, the cotangent of lse, besides d_out=",
        "d_sinks": "with sinks and vjp: returns d_sinks after dv and d_bias",
        "deterministic": "repeating a call gives the same bits, also for gradients",
        "dropout": "dropout=p, seed=: keeps weights with probability 1 - p, and divides them by it",
        "feature_map": "a kernel called as fn(x, omega=omega) returns features",
        "gqa": "keys and values may have fewer heads; consecutive query heads share one",
        "indices": "indices=, the sampled keys (S,), or of each head; of sampled-softmax (n, S); "
        "for weighted samples also log_probability=, logs of how often each key is expected",
        "indices_only": "the same, but indices= must be passed: the function draws nothing itself",
        "lse": "return_lse=True: returns (out, lse), log normalisers (..., heads, n) without sinks",
        "mask": "mask=, boolean (..., n, m), True where a query sees a key",
        "moments": "mean= and cov= of the distribution of the frequencies",
        "omega": "omega=, frequencies (S, d); of RA (n, S, d), of LARA with centres=, of EVA "
        "(C, d) for C chunks",
        "omega_only": "the same, but omega= must be passed: the function draws nothing itself",
        "omega_per_head": "the frequencies may differ between heads",
        "sinks": "sinks=, (heads,): each query head has one more key with this score and value 0",
        "softcap": "softcap=c: scores are c tanh(score / c), before a bias is added",
        "vjp": "d_out=: returns (out, dq, dk, dv); torch and JAX differentiate the function itself",
        "window": "window=(left, right): a query sees this many keys before and after its own",
    }
)


TAGGED_DTYPES = ("float64", "float32", "float16", "bfloat16")


LIBRARIES = ("numpy", "torch", "jax", "cupy")


LAYOUTS = ("nd", "hnd", "nhd", "bnd", "bhnd", "bnhd")


TAGS: Mapping[str, str] = MappingProxyType(
    {
        "scale": "factor on q . k; None, the default, for 1/sqrt(d)",
        "coupling": "joint distribution of the frequencies, as in sampling.draw: iid (default), "
        "orthogonal, ...; the names performer and rfa-orthogonal imply orthogonal",
        "features": '"positive" (default), "hyperbolic" or "trigonometric"',
        "feature_map": 'of linear attention: "elu" (default) or "relu"',
        "weighting": 'of LARA: "balance" (default), "own", "query" or "query-over-queries"',
        "dtype": f"of the arrays: {', '.join(TAGGED_DTYPES)}; float64 by default",
        "library": f"of the arrays: {', '.join(LIBRARIES)}; numpy by default",
        "device": "of the arrays, as their library names it, such as cuda:0",
        "layout": f"axes, one of {', '.join(LAYOUTS)}; by default any leading axes, then n, d",
        "centres": '"chunks" if your LARA builds its proposals from chunk means as refattn does, '
        'otherwise "own"',
        "causal": '"bottom-right" (default) or "top-left": which keys a query sees if n != m',
        "lse_base": 'of the log normalisers: "e" (default) or "2"',
        "hidden": 'what masked keys and values may contain: "any" (default), also NaN; '
        '"finite-values", NaN in keys only; or "finite"',
        "epsilon": "what is added to features or normalisers; 0 by default",
        "ddof": "of the covariance: 0, or 1 by default",
        "head_sizes": "the only d that it supports, such as 64,128; any by default",
        "multiple_of": "what numbers of tokens must be multiples of; 1 by default",
        "self_attention": "true if there must be as many queries as keys",
        "causal_only": "true if every call is causal; causal=True is passed only if you declare "
        "the capability",
        "same_value_size": "true if values must be as long as queries and keys",
        "fixed_frequencies": "true if frequencies were drawn at construction: calls have no size "
        "or seed",
        "empty_rows": 'output of a query that sees no key: "zero" (default), "nan", "mean" or '
        '"undefined"',
        "max_logit": "the largest |scale q . k| that it supports; any by default",
        "window": 'which keys a window includes: "inclusive" counts keys besides the query\'s own, '
        '"exclusive" counts that key in left; and its alignment if n != m, "bottom-right" or '
        '"top-left"; "inclusive, bottom-right" by default',
    }
)


CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "coupling": ("iid", "orthogonal", "simplex", "antithetic", "sobol", "halton"),
        "features": ("positive", "hyperbolic", "trigonometric"),
        "feature_map": ("elu", "relu"),
        "weighting": ("balance", "own", "query", "query-over-queries"),
        "dtype": TAGGED_DTYPES,
        "library": LIBRARIES,
        "layout": LAYOUTS,
        "causal": ("bottom-right", "top-left"),
        "hidden": ("any", "finite-values", "finite"),
        "lse_base": ("e", "2"),
        "centres": ("own", "chunks"),
        "empty_rows": ("zero", "nan", "mean", "undefined"),
        "window": (
            "inclusive, bottom-right",
            "inclusive, top-left",
            "exclusive, bottom-right",
            "exclusive, top-left",
        ),
    }
)


_TRUE_OR_FALSE = ("self_attention", "causal_only", "same_value_size", "fixed_frequencies")


# Limits of attention only.
_OF_TOKENS = ("multiple_of", "self_attention", "causal_only", "same_value_size", "empty_rows")


DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {name: options[0] for name, options in CHOICES.items()}
    | dict.fromkeys(_TRUE_OR_FALSE, False)
    | dict.fromkeys(("scale", "device", "layout", "head_sizes", "max_logit"))
    | {"epsilon": 0.0, "ddof": 1, "multiple_of": 1}
)


_OF_BITS = ("batch_invariant", "deterministic")


# What may be given of what an estimator draws: results are numbers then, and need no seed.
DRAWN_KEYWORDS = ("omega", "indices")


# What a verdict does not cover where a tag or a capability says so.
LIMITS: Mapping[str, str] = MappingProxyType(
    {
        "indices_only": "drawing of keys was not tested",
        "omega_only": "drawing of frequencies was not tested",
        "hidden": "masked keys and values were finite",
        "epsilon": "errors that it may cause were allowed",
        "head_sizes": "no other length of queries and keys was tested",
        "multiple_of": "no other number of tokens was tested",
        "self_attention": "there were always as many queries as keys",
        "causal_only": "every call was causal",
        "same_value_size": "values were always as long as keys",
        "fixed_frequencies": "the distribution of its frequencies was not tested",
        "empty_rows": "queries that see no key were compared with this",
        "max_logit": "no larger inner product was tested",
    }
)


def draws_something(record: Estimator, options: Iterable[str]) -> bool:
    """Return whether something is drawn in a call with these options."""
    return record.has("random") and not set(DRAWN_KEYWORDS) & set(options)


def possible(record: Estimator) -> list[str]:
    """List the capabilities that implementations of an estimator may have."""
    bits = _OF_BITS if len(record.arrays) == 3 else ()
    only = [only_of(name) for name in DRAWN_KEYWORDS if record.takes(name)]
    return [name for name in CAPABILITIES if name in (*record.options, *bits, *only)]


def only_of(name: str) -> str:
    """Return the capability of what is called with this keyword, and in no other way."""
    return f"{name}_only"


def refuse_limits(record: Estimator, capabilities: Iterable[str], tags: Mapping[str, Any]) -> None:
    """Refuse limits that an estimator cannot have."""
    if len(record.arrays) < 3:
        for tag in _OF_TOKENS:
            if tags[tag] != DEFAULTS[tag]:
                raise ValueError(
                    f"`tags[{tag!r}]` must be left out for {record.name}, got {tags[tag]!r}."
                )
    if record.has("rows") and tags["head_sizes"] is not None:
        raise ValueError(f"`tags['head_sizes']` must be left out for {record.name}.")
    drawn_outside = {*DRAWN_KEYWORDS, *map(only_of, DRAWN_KEYWORDS)} & set(capabilities)
    if tags["fixed_frequencies"] and (drawn_outside or not record.has("random")):
        raise ValueError(
            "`tags['fixed_frequencies']` must be left out where no frequencies are drawn, or "
            f"where they are given, got {tags['fixed_frequencies']!r}."
        )
    if tags["causal_only"] and not record.takes("causal"):
        raise ValueError(f"`tags['causal_only']` must be left out for {record.name}.")


def write_tag(value: Any) -> str:
    """Return the value of a tag as on the command line."""
    if isinstance(value, tuple) and len(value) > 4:
        return f"{value[0]},{value[1]},...,{value[-1]}"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def parse_tag(name: str, value: Any) -> Any:
    """Return the value of a tag, from its text where it is one."""
    if name in _TRUE_OR_FALSE:
        return _parse_truth(name, value)
    if name == "head_sizes":
        return _parse_sizes(value)
    if name in CHOICES:
        if not (name == "layout" and value in (None, "None")):
            checks.choice(f"tags[{name!r}]", value, CHOICES[name])
        return None if value == "None" else value
    if name == "device":
        return value
    if value is None or (name == "scale" and value == "None"):
        return (
            None
            if name in ("scale", "device", "max_logit")
            else checks.real(f"tags[{name!r}]", value)
        )
    if name == "ddof":
        if isinstance(value, bool) or value not in (0, 1, "0", "1"):
            raise ValueError(f"`tags['ddof']` must be 0 or 1, got {_brief(value)}.")
        return int(value)
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(f"`tags[{name!r}]` must be a finite number, got {_brief(value)}.")
        value = number
    number = checks.real(f"tags[{name!r}]", value, positive=name in ("scale", "max_logit"))
    if name == "multiple_of":
        if number < 1 or number != int(number):
            raise ValueError(f"`tags['multiple_of']` must be a positive integer, got {value!r}.")
        return int(number)
    if number < 0:
        raise ValueError(f"`tags[{name!r}]` must be at least 0, got {value!r}.")
    return float(number)


def _parse_truth(name: str, value: Any) -> bool:
    words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if not isinstance(value, bool) and str(value).lower() not in words:
        raise ValueError(f"`tags[{name!r}]` must be true or false, got {_brief(value)}.")
    return words[str(value).lower()]


def _parse_sizes(value: Any) -> tuple[int, ...] | None:
    """Parse head sizes: a number, several, or text separated by commas."""
    if value is None:
        return None
    words = value.split(",") if isinstance(value, str) else value
    try:
        sizes = tuple(int(size) for size in (words if np.iterable(words) else (words,)))
    except (TypeError, ValueError):
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise ValueError(f"`tags['head_sizes']` must be positive integers, got {_brief(value)}.")
    return tuple(sorted(set(sizes)))


def _brief(value: Any) -> str:
    """Shorten a value that was received: digits may be thousands."""
    if isinstance(value, int) and abs(value) >= 10**40:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
