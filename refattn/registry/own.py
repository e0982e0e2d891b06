"""Records of the estimators of the package."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from .. import attention, certified, kernels, moments, naive, recurrences, sampling, streaming
from ..arrays.library import Array
from ..estimators import few_keys, key_sampling, lara, linear, near_and_far, ra, rfa
from ..typing import KEY_LAWS, Features, KeyLaw
from .record import Estimator, register

# What a comparison shows unless told otherwise: one of each kind, and the best of its kind.
DEFAULT = (
    *("rfa-iid", "rfa-orthogonal", "rfa-adapted"),
    *("lara-balance", "lara-mean", "ra", "ra-mean", "eva"),
)

_VECTORS = "refattn.judge.vectors"  # which imports this
_NEAR_WINDOW = (8, 8)  # tokens on each side, half of the smallest block that pays
_SEES = ("scale", "mask", "causal", "gqa", "vjp")
_SAMPLE = ("scale", "gqa", "indices", "log_probability")
_DRAWS = ("random", "seeds-differ", "data-free")
_ROWS = ("unordered-keys", "queries-apart")  # a query sees a set of keys, and no other query
_MEAN = ("normalised", "nonnegative", "exponential")
_EVA = (*_MEAN, "local", "chunked")
_OMEGA = ("unlimited-size", "frequency-mean")
_RATE, _TOKENS, _COORDINATES = {"beta": "rate"}, {"log_decay": "log"}, {"log_decay": "logs"}
_SSD = {**_TOKENS, "write": "factor"}
_SHARED = (*_ROWS, *_DRAWS, *_OMEGA)  # of random features


def _kernel(
    x: Array,
    y: Array,
    *,
    omega: Array | None = None,
    num_features: int = 1,
    rng: Any = None,
    features: Features = "positive",
) -> Any:
    """Estimate the softmax kernel at frequencies that are passed or drawn."""
    if omega is None:
        omega = sampling.draw(num_features, x.shape[-1], rng=rng).omega
    return kernels.estimate(x, y, omega, features=features)


def _importance_sampled(
    q: Array, k: Array, v: Array, *, num_samples: int = 1, rng: Any = None, **options: Any
) -> Array:
    """Importance sampling at frequencies given, or drawn from N(0, I)."""
    if options.get("omega") is None:
        omega, log_weight = sampling.draw(num_samples, q.shape[-1], rng=rng)
        options |= {"omega": omega, "log_weight": log_weight}
    return rfa.importance_sampled_attention(q, k, v, **options)


def _adapted(
    fn: Callable[..., Array],
    q: Array,
    k: Array,
    v: Array,
    *,
    fitted_by: str,
    gauge_only: bool = False,
    rng: Any = None,
    **options: Any,
) -> Array:
    """The estimator with a proposal, or its gauge alone, that a function of `adapt` fits first."""
    from .. import adapt  # it imports SciPy

    if options.get("causal") or options.get("mask") is not None:
        raise ValueError(
            "`mask` and `causal` must not be given: the moments are of all queries and keys."
        )
    proposal = getattr(adapt, fitted_by)(q, k, scale=options.get("scale"))
    if gauge_only:
        mean, eye = 0.0 * proposal.mean, 0.0 * proposal.cov + np.eye(q.shape[-1])
        proposal = sampling.Gaussian(mean, eye, gauge=proposal.gauge)
    return fn(q, k, v, proposal=proposal, rng=rng, **options)


def _sampled(
    q: Array, k: Array, v: Array, *, law: KeyLaw, num_keys: int = 1, rng: Any = None, **options: Any
) -> Array:
    """Attention to a sample of keys, given or drawn first."""
    if options.get("indices") is None:
        options = {x: y for x, y in options.items() if x not in ("indices", "log_probability")}
        options["indices"], options["log_probability"] = key_sampling.draw_keys(
            q, k, v, num_keys=num_keys, law=law, rng=rng, **options
        )
    return few_keys.sampled_key_attention(q, k, v, **options)


_RFA = Estimator(
    "rfa-iid",
    rfa.random_feature_attention,
    naive.random_feature_attention,
    size="num_features",
    options=(*_SEES, "omega", "omega_per_head", "moments"),
    traits=(*_MEAN, *_SHARED, "random-features"),
    state=streaming.PositiveState,
    aliases=("rfa", "snis"),
    vectors=f"{_VECTORS}.recipes:own",
    source=("002: eqs. (9) and (10)", "003: RFA"),
)
_LARA = Estimator(
    "lara-balance",
    lara.linear_randomized_attention,
    naive.linear_randomized_attention,
    size="num_proposals",
    options=(*_SEES, "omega"),
    traits=(*_MEAN, *_ROWS, *_DRAWS, "proposals"),
    aliases=("lara",),
    vectors=f"{_VECTORS}.recipes:own",
    source=("003: LARA",),
)

_RA = Estimator(
    "ra",
    ra.randomized_attention,
    naive.randomized_attention,
    size="num_samples",
    options=(*_SEES, "omega"),
    traits=(
        *(*_MEAN, *_ROWS, "quadratic", "random", "seeds-differ"),
        *(*_OMEGA, "per-query", "target"),
    ),
    vectors=f"{_VECTORS}.recipes:own",
    source=("003: RA",),
)


def _variant(record: Estimator, name: str, **changes: Any) -> Estimator:
    """Another estimator of the same function."""
    return record._replace(**{"name": name, "aliases": (), "vectors": None} | changes)


def _coupled(coupling: str) -> Estimator:
    """RFA with frequencies that are not independent; biased ones are not N(0, I)."""
    marginal = () if coupling in sampling.BIASED_COUPLINGS else ("random-features",)
    return _variant(
        _RFA,
        f"rfa-{coupling}",
        aliases=("performer", "favor", "favor+") if coupling == "orthogonal" else (),
        fn=partial(_RFA.fn, coupling=coupling),
        options=(*_SEES, "omega", "omega_per_head"),
        traits=(*_MEAN, *_SHARED, *marginal),
    )


def _featured(name: str) -> Estimator:
    """RFA with features that are not positive, or not those of the theory."""
    weights = ("normalised", "trigonometric") if name == "trigonometric" else _MEAN
    return _variant(
        _RFA,
        f"rfa-{name}",
        fn=partial(_RFA.fn, features=name),
        naive=partial(_RFA.naive, features=name),
        options=(*_SEES, "omega", "omega_per_head"),
        traits=(*weights, *_SHARED),
        state=None,
    )


def _weighted(weighting: str) -> Estimator:
    """LARA with other weights."""
    return _variant(
        _LARA,
        f"lara-{weighting}",
        fn=partial(_LARA.fn, weighting=weighting),
        naive=partial(_LARA.naive, weighting=weighting),
        options=_SEES if weighting == "own" else ("scale", "mask", "gqa", "vjp"),
        traits=(*_MEAN, *_DRAWS),
    )


def _at_means(record: Estimator, name: str, **changes: Any) -> Estimator:
    """An estimator without random numbers: each frequency is the mean of its distribution."""
    return _variant(
        record,
        name,
        fn=partial(record.fn, omega="mean"),
        naive=partial(record.naive, omega="mean"),
        options=_SEES,
        source=(*record.source, "003: deterministic evaluation"),
        **changes,
    )


def _fitted(
    name: str, record: Estimator, fit: str = "fit", aliases: tuple[str, ...] = (), **changes: Any
) -> Estimator:
    """An estimator whose proposal is fitted to the queries and keys."""
    return _variant(
        record,
        name,
        fn=partial(_adapted, record.fn, fitted_by=fit, **changes),
        options=("scale",),
        traits=(*_MEAN, *_DRAWS, *({"unlimited-size"} & set(record.traits))),
        state=None,
        aliases=aliases,
        evaluate=record.fn,
    )


for _record in (
    Estimator(
        "softmax",
        attention.softmax_attention,
        naive.softmax_attention,
        options=(
            *_SEES,
            "lse",
            "d_lse",
            "window",
            "softcap",
            "sinks",
            "d_sinks",
            "bias",
            "d_bias",
            "dropout",
        ),
        traits=(*_MEAN, *_ROWS, "exact", "quadratic"),
        state=streaming.SoftmaxState,
        certified=certified.softmax_attention,
        vectors=f"{_VECTORS}.recipes:of_softmax",
        source=("000: Attention(Q, K, V)", "003: softmax attention"),
    ),
    Estimator(
        "kernel",
        _kernel,
        _kernel,
        size="num_features",
        options=("omega", "feature_map"),
        traits=("pairs", "exponential", *_DRAWS, *_OMEGA, "random-features"),
        vectors=f"{_VECTORS}.recipes:own",
    ),
    *(_RFA if name == "iid" else _coupled(name) for name in sampling.COUPLINGS),
    *(_featured(name) for name in kernels.FEATURES if name != "positive"),
    _fitted("rfa-adapted", _RFA),
    _fitted("rfa-oprf", _RFA, "oprf", ("oprf", "gerf", "favor++")),
    _fitted("rfa-sderf", _RFA, "sderf", ("sderf", "derf", "favor#")),
    _fitted("rfa-saderf", _RFA, "saderf", ("saderf",)),
    _fitted("rfa-cexp", _RFA, "saderf", ("cexp",), gauge_only=True),
    Estimator(
        "is",
        _importance_sampled,
        naive.importance_sampled_attention,
        size="num_samples",
        options=(*_SEES, "omega"),
        traits=(*_SHARED, "quadratic"),
        aliases=("importance-sampling",),
        evaluate=rfa.importance_sampled_attention,
    ),
    Estimator(
        "mean-of-ratios",
        ra.mean_of_ratios_attention,
        naive.mean_of_ratios_attention,
        size="num_samples",
        options=(*_SEES, "omega"),
        traits=(*_MEAN, *_SHARED),
    ),
    _RA,
    _at_means(_RA, "ra-mean", size=None, traits=(*_MEAN, *_ROWS, "quadratic")),
    *(_LARA if name == "balance" else _weighted(name) for name in lara.WEIGHTINGS),
    _at_means(_LARA, "lara-mean", traits=_MEAN),
    _fitted("lara-adapted", _LARA),
    *(
        Estimator(
            "coreset" if pivots == "gaussian" else f"coreset-{pivots}",
            partial(few_keys.coreset_attention, pivots=pivots),
            naive.coreset_attention,
            size="num_keys",
            options=("scale", "gqa", "vjp", "indices"),
            traits=("normalised", "queries-apart", "random", "linear-solve"),
            vectors=f"{_VECTORS}.recipes:own" if pivots == "gaussian" else None,
            source=("arXiv:2602.10056",),
        )
        for pivots in reversed(key_sampling.PIVOTS)
    ),
    *(
        Estimator(
            f"sampled-{law}",
            partial(_sampled, law=law),
            naive.sampled_key_attention,
            size="num_keys",
            # Norms of values make samples jump where values move.
            options=_SAMPLE if law == "norms" else (*_SAMPLE, "vjp"),
            traits=(
                *(*_MEAN, "queries-apart", "random"),
                *(("quadratic", "per-query") if law == "softmax" else ()),
            ),
            aliases=("sampled-keys",) if law == "uniform" else (),
            evaluate=few_keys.sampled_key_attention,
            vectors=f"{_VECTORS}.recipes:own" if law == "uniform" else None,
            source=("arXiv:2410.16179", "a ratio of Horvitz-Thompson estimates"),
        )
        for law in reversed(KEY_LAWS)
    ),
    *(
        Estimator(
            "eva" if log_size else "eva-published",
            partial(near_and_far.eva_attention, omega="mean", log_size=log_size),
            partial(naive.eva_attention, log_size=log_size),
            size="window",
            options=("scale", "causal", "gqa", "vjp"),
            traits=_EVA,
            state=streaming.EvaState,
            vectors=f"{_VECTORS}.recipes:own" if log_size else None,
            source=("Zheng et al., arXiv:2302.04542, and the number of keys in each chunk",),
        )
        for log_size in (True, False)
    ),
    Estimator(
        "eva-sampled",
        near_and_far.eva_attention,
        naive.eva_attention,
        size="window",
        options=("scale", "causal", "gqa", "vjp", "omega", "omega_per_head"),
        traits=(*_EVA, "random"),
        state=streaming.EvaState,
    ),
    Estimator(
        "second-order",
        near_and_far.second_order_attention,
        naive.second_order_attention,
        size="window",
        options=("scale", "causal", "gqa", "vjp"),
        traits=("normalised", "exponential", "local", "chunked"),
        state=streaming.SecondOrderState,
        vectors=f"{_VECTORS}.recipes:usual",
        source=("the moments of keys and values in place of those of a joint normal distribution",),
    ),
    Estimator(
        "rfa-local",
        partial(near_and_far.local_random_feature_attention, window=_NEAR_WINDOW),
        partial(naive.local_random_feature_attention, window=_NEAR_WINDOW),
        size="num_features",
        options=(*_SEES, "omega", "omega_per_head"),
        traits=(*_MEAN, "local", "random", "data-free", "unlimited-size"),
        state=streaming.LocalState,
        vectors=f"{_VECTORS}.recipes:own",
        source=("Chen et al., arXiv:2110.15343", "002: eqs. (9) and (10)"),
    ),
    Estimator(
        "linear",
        linear.linear_attention,
        naive.linear_attention,
        options=("mask", "causal", "gqa", "vjp"),
        traits=("normalised", "nonnegative", *_ROWS, "feature-map"),
        state=streaming.LinearState,
        vectors=f"{_VECTORS}.recipes:own",
        source=("004: kernel_attn and phi", "Katharopoulos et al., arXiv:2006.16236"),
    ),
    Estimator(
        "performer-relu",
        partial(linear.relu_feature_attention, coupling="orthogonal"),
        naive.relu_feature_attention,
        size="num_features",
        options=(*_SEES, "omega", "omega_per_head"),
        traits=("normalised", "nonnegative", *_SHARED, "projection"),
        aliases=("generalized-attention",),
        source=("Choromanski et al., arXiv:2009.14794, generalised attention",),
    ),
    *(
        Estimator(
            name.replace("_", "-"),
            getattr(recurrences, name),
            getattr(naive, name),
            options=("scale", "gqa", "gva", "vjp", "initial_state", "offsets", *gates),
            traits=("recurrent",),
            state=None if {"beta", "decay"} & {*gates} else streaming.RecurrentState,
            aliases=aliases,
            gates=gates,
            source=(f"arXiv:{paper}",),
        )
        for name, aliases, paper, gates in (
            ("retention", ("retnet",), "2307.08621", {"decay": "head"}),
            ("gated_linear_attention", ("gla",), "2312.06635", _COORDINATES),
            ("state_space_duality", ("ssd", "mamba-2"), "2405.21060", _SSD),
            ("delta_rule", ("deltanet",), "2406.06484", _RATE),
            ("gated_delta_rule", ("gated-deltanet",), "2412.06464", _RATE | _TOKENS),
            ("kimi_delta_attention", ("kda",), "2510.26692", _RATE | _COORDINATES),
            ("rwkv7", (), "2503.14456", _COORDINATES | {"removal": "pair"}),
        )
    ),
    Estimator(
        "moments",
        moments.estimate,
        moments.estimate,
        traits=("rows",),
        vectors=f"{_VECTORS}.recipes:own",
        source=("002: eqs. (1) and (2)",),
    ),
):
    register(_record)
