"""The measured level of `refattn.conformance.check`: how often it rejects what is right.

Run as ``python validation/level.py``. The candidates are the package's estimators with every tag
alone and some in pairs, the correct implementations of the catalogue of defects, functions of other
libraries and with other conventions, and some that take less than all problems.
Each is checked at seeds of its own, so that the runs are independent. A run alarms at level alpha
if an identity fails, or if the smallest p-value of its laws is at most alpha after Holm's
correction. There may be alpha alarms a run; the upper limit is that of Clopper and Pearson, of one
side. The exit status is 1 if a run alarms at 1e-6.

A law has 100 seeds here, which lowers the power of its test and not its level, and one run in ten
makes the check of large sizes. Candidates whose library is missing are left out, and named.
"""

from __future__ import annotations

import argparse
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache, partial, wraps
from importlib import import_module
from importlib.util import find_spec
from itertools import groupby, product
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
from array_api_compat import array_namespace
from threadpoolctl import threadpool_limits

from refattn import conformance, estimators, features, kernels, moments, naive, sampling
from refattn.attention import attend
from refattn.estimators import lara
from refattn.judge import stats
from refattn.judge.conformance.candidate.tags import CHOICES, OF_RECURRENCES, TAGGED_DTYPES
from refattn.judge.conformance.conventions import SPECS
from refattn.judge.conformance.truth.recurrences import declared_formula
from refattn.judge.mistakes.defects import VARIANTS
from refattn.registry import ESTIMATORS, Estimator
from refattn.typing import Coupling, Features

Array = Any
Call = Callable[..., Any]

ALPHAS = (0.05, 0.01, 0.001, 1e-6)
CONFIDENCE = 0.99  # of the upper limit
LAW_SEEDS = 100
RARE, EVERY = "large_sizes", 10


# The package's estimators.

VALUES: Mapping[str, tuple[Any, ...]] = {
    "features": tuple(kernels.FEATURES),
    "coupling": ("iid", "orthogonal", "simplex", "antithetic", "sobol", "halton"),
    "weighting": tuple(lara.WEIGHTINGS),
    "feature_map": ("elu", "relu"),
    "dtype": TAGGED_DTYPES,
    "layout": ("nd", "hnd", "bhnd", "bnhd"),
    "scale": (0.3,),
    "ddof": (0,),
}
TAGS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "softmax": (("dtype",), ("layout",), ("scale",)),
    "kernel": (("features",), ("coupling",), ("dtype",)),
    "rfa": (("features", "coupling"), ("dtype", "features"), ("layout",), ("scale",)),
    "ra": (("dtype",), ("layout",), ("scale",)),
    "lara": (("weighting", "dtype"), ("layout",), ("scale",)),
    "linear": (("feature_map",), ("dtype",), ("layout",)),
    "moments": (("dtype",), ("ddof",)),
}
DEFAULTS = ("positive", "iid", "balance", "elu", "float64")


def coupled_kernel(
    x: Array,
    y: Array,
    *,
    omega: Array = None,
    num_features: int = 1,
    seed: int = 0,
    coupling: Coupling = "iid",
    features: Features = "positive",
) -> Array:
    """Kernel estimates at frequencies that may be coupled."""
    if omega is None:
        omega = sampling.draw(num_features, x.shape[-1], coupling=coupling, rng=seed).omega
    return kernels.estimate(x, y, omega, features=features)


def importance_sampled(
    q: Array,
    k: Array,
    v: Array,
    *,
    omega: Array = None,
    num_samples: int = 1,
    seed: int = 0,
    **seen: Any,
) -> Array:
    """Importance sampling at frequencies that are given or standard normal."""
    if omega is None:
        omega = sampling.draw(num_samples, q.shape[-1], rng=seed).omega
    return estimators.importance_sampled_attention(q, k, v, omega=omega, **seen)


OTHERS: Mapping[str, Call] = {"kernel": coupled_kernel, "is": importance_sampled}


def in_float32(fn: Call) -> Call:
    """The halves, in single precision within."""

    @wraps(fn)
    def rounded(*arrays: Array, **options: Any) -> Any:
        xp, half = array_namespace(*arrays), arrays[0].dtype
        given = {k: _wide(x, xp) if k in ("omega", "centres") else x for k, x in options.items()}
        out = fn(*(_wide(x, xp) for x in arrays), **given)
        if isinstance(out, moments.Moments):
            return xp.astype(out.mean, half), xp.astype(out.cov, half)
        return xp.astype(out, half)

    return rounded


def _wide(x: Array, xp: Any) -> Array:
    return xp.astype(x, xp.float32)


def heads_third(fn: Call) -> Call:
    """Attention of (b, n, h, d) arrays."""

    @wraps(fn)
    def attention(*arrays: Array, **options: Any) -> Array:
        return np.swapaxes(fn(*(np.swapaxes(x, 1, 2) for x in arrays), **options), 1, 2)

    return attention


def own(record: Estimator, tags: Mapping[str, Any], *, omega: bool) -> conformance.Adapter:
    """An estimator of the package as a candidate, as a black box or with frequencies."""
    options = {k: x for k, x in tags.items() if k not in ("feature_map", "dtype", "layout")}
    if tags.get("feature_map") == "relu":
        options["feature_map"] = features.relu_features
    fn: Call = partial(OTHERS.get(record.name, record.fn), **options)
    if tags.get("dtype", "").endswith("float16"):
        fn = in_float32(fn)
    if tags.get("layout") == "bnhd":
        fn = heads_third(fn)
    more = {"centres": "chunks"} if record.has("proposals") else {}
    if tags.get("dtype") == "bfloat16":
        more["library"] = "torch"
    able = {"mask", "causal", "initial_state"} | (
        {"gqa"} if "h" in tags.get("layout", "h") else set()
    )
    able |= {"omega", "omega_per_head"} if omega else set()
    if tags.get("weighting", "").startswith("query"):
        able.discard("causal")
    words = [record.name, *(f"{k}={x}" for k, x in tags.items()), *["omega"] * omega]
    able &= {*record.options}
    return conformance.Adapter(fn, record.name, able, {**tags, **more}, " ".join(words))


def ways(record: Estimator, tags: Mapping[str, Any]) -> tuple[bool, ...]:
    """Without frequencies and with them; to save time one tag with them, and pairs without."""
    if len(tags) > 1 or not record.takes("omega"):
        return (False,)
    return (True,) if tags else (False, True)


def of_package() -> Iterator[conformance.Adapter]:
    """Every estimator as it is, and those of `TAGS` with other tags."""
    varied = [
        (ESTIMATORS[name], {k: x for k, x in zip(tags, values, strict=True) if x not in DEFAULTS})
        for name, choices in TAGS.items()
        for tags in choices
        for values in product(*(VALUES[tag] for tag in tags))
    ]
    for record, tags in [*((x, {}) for x in ESTIMATORS.values()), *varied]:
        for omega in ways(record, tags):
            yield own(record, tags, omega=omega)


def of_recurrences() -> Iterator[conformance.Adapter]:
    """Each convention of recurrences, in chunks: the reference goes token by token."""
    name, able = "gated-delta-rule", ("gqa", "initial_state")
    for tag, value in ((x, y) for x in OF_RECURRENCES for y in CHOICES[x][1:]):
        fn = declared_formula(conformance.Adapter(len, name, (), {tag: value}), chunks=True)
        fn = of_factors(fn) if tag == "decay" else fn
        yield conformance.Adapter(fn, name, able, {tag: value}, f"{name} {tag}={value}")


def of_factors(fn: Call) -> Call:
    """A recurrence that takes decays as factors."""
    return lambda *arrays, log_decay, **more: fn(*arrays, log_decay=np.log(log_decay), **more)


# Other libraries, conventions and epsilons, over `naive` where it has the formula.


def softmax_options(
    q: Array,
    k: Array,
    v: Array,
    *,
    window: tuple[int | None, int | None] = (None, None),
    dropout: float = 0.0,
    seed: int = 0,
    return_lse: bool = False,
    **options: Any,
) -> Any:
    """All that kernels take: windows whose left side counts a query's own key, lse of base 2."""
    n, m = q.shape[-2], k.shape[-2]
    left, right = (np.inf if x is None else x for x in window)
    ahead = np.arange(m) - np.arange(n)[:, None]
    options["mask"] = options.get("mask", True) & (-left < ahead) & (ahead <= right)
    lead = np.broadcast_shapes(q.shape[:-2], k.shape[:-2])
    kept = np.random.default_rng(seed).random((*lead, n, m)) >= dropout
    factors = np.asarray(kept / (1 - dropout), q.dtype)
    out = naive.softmax_attention(q, k, v, dropout=factors, **options)
    if not return_lse:
        return out
    known = {name: x for name, x in options.items() if name != "sinks"}
    return out, attend(q, k, v, scale=q.shape[-1] ** -0.5, **known).lse / np.log(2)


def softmax_empty(q: Array, k: Array, v: Array, *, value: Call, **seen: Any) -> Array:
    """Queries that see no key get something else than 0."""
    some = naive.visible(q, k, **seen).any(-1, keepdims=True)
    return np.where(some, naive.softmax_attention(q, k, v, **seen), value(v))


def softmax_torch(q: Array, k: Array, v: Array, *, causal: bool = False) -> Array:
    """PyTorch's own, with the heads third."""
    sdpa = import_module("torch").nn.functional.scaled_dot_product_attention
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return sdpa(q, k, v, is_causal=causal).transpose(1, 2)


def softmax_jax(q: Array, k: Array, v: Array, *, mask: Array = None, causal: bool = False) -> Array:
    """JAX's own, compiled."""
    return _compiled()(q, k, v, mask=mask, is_causal=causal)


@lru_cache
def _compiled() -> Call:
    import jax

    return jax.jit(jax.nn.dot_product_attention, static_argnames="is_causal")


@lru_cache(maxsize=64)
def _cached(seed: int, count: int, d: int) -> Array:
    return np.random.default_rng(seed).standard_normal((count, d))


def rfa_cached(q: Array, k: Array, v: Array, *, num_features: int, seed: int, **seen: Any) -> Array:
    """Frequencies are kept for the next call."""
    omega = _cached(seed, num_features, q.shape[-1])
    return naive.random_feature_attention(q, k, v, omega=omega, **seen)


def rfa_of_moments(
    q: Array,
    k: Array,
    v: Array,
    *,
    num_features: int,
    seed: int,
    mean: Array = 0.0,
    cov: Array = None,
) -> Array:
    """Frequencies drawn from N(mean, cov), weighted by the standard normal density over theirs."""
    z = np.random.default_rng(seed).standard_normal((num_features, q.shape[-1]))
    omega = mean + (z if cov is None else z @ np.linalg.cholesky(cov).T)
    log_weight = (np.sum(z * z, -1) - np.sum(omega * omega, -1)) / 2
    return naive.random_feature_attention(q, k, v, omega=omega, log_weight=log_weight)


def rfa_torch(q: Array, k: Array, v: Array, *, num_features: int, seed: int) -> Array:
    """With the heads third, and PyTorch's random numbers."""
    torch = import_module("torch")
    generator = torch.Generator().manual_seed(seed)
    omega = torch.randn(num_features, q.shape[-1], generator=generator, dtype=q.dtype)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return naive.random_feature_attention(q, k, v, omega=omega).transpose(1, 2)


def kernel_jax(x: Array, y: Array, *, num_features: int, seed: int) -> Array:
    """The mean of exponentials, with JAX's random numbers, compiled."""
    return _compiled_kernel()(x, y, num_features=num_features, seed=seed)


@lru_cache
def _compiled_kernel() -> Call:
    import jax

    def estimate(x: Array, y: Array, num_features: int, seed: int) -> Array:
        omega = jax.random.normal(jax.random.key(seed), (num_features, x.shape[-1]), x.dtype)
        half = ((x * x).sum(-1) + (y * y).sum(-1)) / 2
        return jax.numpy.exp((x + y) @ omega.T - half[..., None]).mean(-1)

    return jax.jit(estimate, static_argnames="num_features")


def transposed(x: Array) -> Array:
    """The last two axes exchanged."""
    return np.swapaxes(x, -1, -2)


def exponentials(scores: Array, seen: Array = True) -> Array:
    """e^scores over the largest, 0 where hidden."""
    scores = np.where(seen, scores, -np.inf)
    top = np.max(scores, -1, keepdims=True)
    return np.exp(scores - np.where(np.isinf(top), 0, top))


def mean_of_values(weights: Array, v: Array, epsilon: float) -> Array:
    """The weighted mean with an epsilon in its normaliser, 0 without weights."""
    total = np.sum(weights, -1, keepdims=True) + epsilon
    return weights @ v / np.where(total == 0, 1, total)


def log_features(x: Array, omega: Array) -> Array:
    """omega . x - |x|^2 / 2 in kernel coordinates, (..., n, S)."""
    x = x * x.shape[-1] ** -0.25
    return x @ transposed(omega) - np.sum(x * x, -1, keepdims=True) / 2


def softmax_epsilon(q: Array, k: Array, v: Array, *, epsilon: float, **seen: Any) -> Array:
    """An epsilon in the normaliser."""
    scores = q @ transposed(k) * q.shape[-1] ** -0.5
    return mean_of_values(exponentials(scores, naive.visible(q, k, **seen)), v, epsilon)


def linear_epsilon(q: Array, k: Array, v: Array, **options: Any) -> Array:
    """Linear attention, with an epsilon."""
    return by_features(naive.elu_plus_one(q), naive.elu_plus_one(k), v, **options)


def performer(
    q: Array,
    k: Array,
    v: Array,
    *,
    omega: Array = None,
    num_features: int = 1,
    seed: int = 0,
    **options: Any,
) -> Array:
    """Features over their largest, with an epsilon."""
    omega = _cached(seed, num_features, q.shape[-1]) if omega is None else omega
    log_q, log_k = (log_features(x, omega.astype(q.dtype)) for x in (q, k))
    phi_q = np.exp(log_q - log_q.max(-1, keepdims=True))
    phi_k = np.exp(log_k - log_k.max((-1, -2), keepdims=True))
    return by_features(phi_q, phi_k, v, **options)


def by_features(
    phi_q: Array,
    phi_k: Array,
    v: Array,
    *,
    in_features: float = 0.0,
    in_normaliser: float = 0.0,
    **seen: Any,
) -> Array:
    """All weights at once, from features of queries and of keys."""
    kernel = (phi_q + in_features) @ transposed(phi_k + in_features)
    weights = np.where(naive.visible(phi_q, phi_k, **seen), kernel, 0)
    return mean_of_values(weights, v, in_normaliser)


def ra_epsilon(
    q: Array, k: Array, v: Array, *, num_samples: int, seed: int, in_normaliser: float
) -> Array:
    """An epsilon in the normaliser of each sample."""
    omega = sampling.draw_target(q, k, num_samples=num_samples, rng=seed)
    weights = exponentials(transposed(log_features(k[..., None, :, :], omega)))
    return np.mean(mean_of_values(weights, v[..., None, :, :], in_normaliser), -2)


SEES = ("mask", "causal")
FINITE = {"hidden": "finite"}
FLOAT32 = {"dtype": "float32"}
Style = tuple[Call, str, Sequence[str], Mapping[str, Any]]

TAKEN = (*SEES, "window", "softcap", "sinks", "bias", "dropout", "lse")
OPTIONS = {"window": "exclusive, top-left", "lse_base": "2", **FINITE}
SDPA = {**SPECS["torch-sdpa"], "layout": "bnhd"}
DPA = {**SPECS["jax-dpa"], "same_value_size": True, **FINITE}

STYLES: Mapping[str, Style] = {
    "softmax with options": (softmax_options, "softmax", TAKEN, OPTIONS),
    "softmax of torch": (softmax_torch, "softmax", ("causal",), SDPA),
    "softmax of jax": (softmax_jax, "softmax", SEES, DPA),
    "RFA with cached frequencies": (rfa_cached, "rfa", SEES, FINITE),
    "RFA with moments": (rfa_of_moments, "rfa", ("moments",), {}),
    "RFA in torch": (rfa_torch, "rfa", (), {"library": "torch", "layout": "bnhd"}),
    "kernel in jax": (kernel_jax, "kernel", (), {"library": "jax"} | FLOAT32),
}


def of_styles() -> Iterator[conformance.Adapter]:
    """Other libraries and conventions, and the correct ones of the catalogue of defects."""
    for name, style in STYLES.items():
        yield conformance.Adapter(*style, name)
    for x in VARIANTS:
        tags = dict(x.tags) | ({"centres": "chunks"} if x.estimator == "lara" else {})
        yield conformance.Adapter(x.fn, x.estimator, x.capabilities, tags, f"catalogue {x.name}")


WITH_EPSILON: Sequence[tuple[Call, str, tuple[str, ...]]] = (
    (linear_epsilon, "linear", ()),
    (performer, "rfa", ()),
    (performer, "rfa", ("omega",)),
)


def with_epsilon() -> Iterator[conformance.Adapter]:
    """An epsilon in features or normalisers, declared."""
    for epsilon, dtype in product((1e-12, 1e-6, 1e-4), ("float64", "float32")):
        tags = {"epsilon": epsilon, "dtype": dtype} | FINITE
        words = f"epsilon={epsilon:g} dtype={dtype}"
        fn: Call = partial(softmax_epsilon, epsilon=epsilon)
        yield conformance.Adapter(fn, "softmax", SEES, tags, f"softmax_epsilon {words}")
        for place, (fn, estimator, more) in product(("in_features", "in_normaliser"), WITH_EPSILON):
            name = " ".join((fn.__name__, place, words, *more))
            fn = partial(fn, **{place: epsilon})
            yield conformance.Adapter(fn, estimator, (*SEES, *more), tags, name)
        fn = partial(ra_epsilon, in_normaliser=epsilon)
        tags = {x: tags[x] for x in ("epsilon", "dtype")}
        yield conformance.Adapter(fn, "ra", (), tags, f"ra_epsilon in_normaliser {words}")
        fn = partial(estimators.relu_feature_attention, kernel_epsilon=epsilon)
        tags = {"kernel_epsilon": epsilon, "dtype": dtype}
        name = f"relu_feature_attention kernel_{words}"
        yield conformance.Adapter(fn, "performer-relu", (*SEES, "omega"), tags, name)


# Candidates that raise outside of what they declare.


def only(rule: Callable[[Array, Array, Array], bool], fn: Call = naive.softmax_attention) -> Call:
    """Attention that takes some problems only."""

    @wraps(fn)
    def limited(q: Array, k: Array, v: Array, **options: Any) -> Array:
        if not rule(q, k, v):
            raise ValueError("not taken")
        return fn(q, k, v, **options)

    return limited


def small(q: Array, k: Array, v: Array) -> bool:
    """Logits up to 20."""
    return bool(np.max(np.abs(q @ transposed(k)), initial=0.0) <= 20 * q.shape[-1] ** 0.5)


def blocks_of_64(q: Array, k: Array, v: Array) -> bool:
    """Numbers of tokens that blocks of 64 fill."""
    return bool(q.shape[-2] % 64 == 0 and k.shape[-2] % 64 == 0)


def square(q: Array, k: Array, v: Array) -> bool:
    """As many queries as keys."""
    return bool(q.shape[-2] == k.shape[-2])


def same_length(q: Array, k: Array, v: Array) -> bool:
    """Values as long as keys."""
    return bool(q.shape[-1] == v.shape[-1])


def of_length(*lengths: int) -> Callable[[Array, Array, Array], bool]:
    """Queries of these lengths."""
    return lambda q, k, v: q.shape[-1] in lengths


EIGHT = of_length(8)
RA, LARA = estimators.randomized_attention, estimators.linear_randomized_attention
CAUSAL = partial(naive.softmax_attention, causal=True)
NAN, MEAN, ANY = (
    partial(softmax_empty, value=value)
    for value in (lambda v: np.nan, lambda v: v.mean(-2, keepdims=True), lambda v: 3.0)
)
RFA, FROZEN = naive.random_feature_attention, partial(rfa_cached, num_features=32, seed=0)
OF_EIGHT = only(EIGHT, rfa_cached)
OF_ONE_SET = {"fixed_frequencies": True, "head_sizes": 8}
SQUARE_OF_EIGHT = {"self_attention": True, "head_sizes": 8}

LIMITED: Mapping[str, Style] = {
    "head sizes": (only(of_length(64, 128)), "softmax", SEES, {"head_sizes": (64, 128)}),
    "multiples of 64": (only(blocks_of_64), "softmax", SEES, {"multiple_of": 64}),
    "self-attention": (only(square), "softmax", SEES, {"self_attention": True}),
    "causal only": (CAUSAL, "softmax", ["mask"], {"causal_only": True}),
    "values as long as keys": (only(same_length), "softmax", SEES, {"same_value_size": True}),
    "small logits": (only(small), "softmax", SEES, {"max_logit": 20}),
    "NaN for empty rows": (NAN, "softmax", SEES, {"empty_rows": "nan"}),
    "mean for empty rows": (MEAN, "softmax", SEES, {"empty_rows": "mean"}),
    "anything for empty rows": (ANY, "softmax", SEES, {"empty_rows": "undefined"}),
    "RFA with one set of frequencies": (only(EIGHT, FROZEN), "rfa", SEES, OF_ONE_SET),
    "RFA at given frequencies": (RFA, "rfa", (*SEES, "omega_only"), {}),
    "RFA in self-attention of one size": (only(square, OF_EIGHT), "rfa", SEES, SQUARE_OF_EIGHT),
    "RA of one size": (only(EIGHT, RA), "ra", ("omega",), {"head_sizes": 8}),
    "LARA in self-attention": (only(square, LARA), "lara", (), {"self_attention": True}),
}


def of_limits() -> Iterator[conformance.Adapter]:
    """Candidates with constraint tags."""
    for name, (fn, estimator, capabilities, tags) in LIMITED.items():
        yield conformance.Adapter(fn, estimator, capabilities, {**tags, **FINITE}, name)


CANDIDATES: Mapping[str, conformance.Adapter] = {
    str(adapter.name): adapter
    for family in (of_package, of_recurrences, of_styles, with_epsilon, of_limits)
    for adapter in family()
}


# Runs.


class Run(NamedTuple):
    """What one run of the checks found."""

    candidate: str
    seed: int
    smallest: float  # p-value of its laws, after Holm's correction
    failures: tuple[str, ...]  # checks, with what they say
    seconds: float

    def alarms(self, alpha: float) -> bool:
        """Whether it rejects its candidate at this level."""
        return bool(self.failures) or self.smallest <= alpha


def missing(adapter: conformance.Adapter) -> bool:
    """Whether the library of a candidate is not installed."""
    return find_spec(adapter["library"]) is None


def run(job: tuple[str, int]) -> Run:
    """Check a candidate at one of its seeds."""
    name, i = job
    adapter = CANDIDATES[name]
    seed = zlib.crc32(name.encode()) + i
    names = [x.name for x in conformance.checks_of(adapter) if x.name != RARE or i % EVERY == 0]
    start = time.process_time()
    with threadpool_limits(1), patch.dict(conformance.LEVELS, quick=LAW_SEEDS):
        report = conformance.check(adapter, rng=seed, checks=names)
    adjusted = [x.adjusted for x in report.results if x.adjusted is not None]
    failures = tuple(f"{x.check}: {x.summary}" for x in report.results if x.status == "FAIL")
    return Run(name, seed, min(adjusted, default=1.0), failures, time.process_time() - start)


def table(runs: Sequence[Run]) -> str:
    """Alarms of each candidate and of all, in Markdown, then what failed."""
    rows = [["candidate", "runs", *(f"alarms at {alpha:g}" for alpha in ALPHAS)]]
    rows.append(["---", *["---:"] * (len(rows[0]) - 1)])
    rows += [[name, *_counts([*group])] for name, group in groupby(runs, lambda x: x.candidate)]
    rows.append(["**all**", *_counts(runs)])
    rows.append(["alarms expected, at most", "", *(f"{alpha * len(runs):.3g}" for alpha in ALPHAS)])
    limits = (upper_limit(sum(x.alarms(alpha) for x in runs), len(runs)) for alpha in ALPHAS)
    rows.append([f"share, {CONFIDENCE:.0%} upper limit", "", *(f"{x:.2g}" for x in limits)])
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    failed = [f"- {x.candidate}, seed {x.seed}, {text}" for x in runs for text in x.failures]
    return "\n".join([*lines, "", "Failures:", "", *(failed or ["- none"]), ""])


def _counts(runs: Sequence[Run]) -> list[str]:
    return [str(len(runs)), *(str(sum(x.alarms(alpha) for x in runs)) for alpha in ALPHAS)]


def upper_limit(count: int, n: int) -> float:
    """Largest probability that makes so few alarms in n runs no less likely than 1 %."""
    return stats.clopper_pearson(count, n, 2 * CONFIDENCE - 1)[1]


def main(words: Sequence[str] | None = None) -> int:
    """Check, print, and say whether a correct candidate failed."""
    parser = argparse.ArgumentParser(
        description="Measure how often correct implementations are rejected."
    )
    parser.add_argument("--seeds", type=int, default=50, help="of each candidate")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--output", type=Path, help="write the table")
    parser.add_argument("names", nargs="*", help="candidates whose name has one of these in it")
    options = parser.parse_args(words)
    for number in ("seeds", "workers"):
        if getattr(options, number) < 1:
            parser.error(f"--{number} must be at least 1, got {getattr(options, number)}")
    for name in options.names:
        if not any(name in x for x in CANDIDATES):
            parser.error(f"names must be parts of names of candidates, got {name!r}")
    chosen = [x for x in CANDIDATES if not options.names or any(n in x for n in options.names)]
    left_out = [x for x in chosen if missing(CANDIDATES[x])]
    jobs = [(x, i) for x in chosen if x not in left_out for i in range(options.seeds)]
    if not jobs:
        parser.error(f"every candidate that was named needs a library: {', '.join(left_out)}")
    runs: list[Run] = []
    with ProcessPoolExecutor(options.workers) as pool:
        for name, group in groupby(pool.map(run, jobs, chunksize=EVERY), lambda x: x.candidate):
            runs += group
            words = ", ".join(_counts([x for x in runs if x.candidate == name])[1:])
            print(f"{name}: alarms {words}", file=sys.stderr, flush=True)  # it takes an hour or two
    found = table(runs)
    print(found)
    print(f"left out, for want of their library: {', '.join(left_out) or 'none'}")
    print(f"{len(runs)} runs, {sum(x.seconds for x in runs):.0f} s of processor time")
    if options.output:
        options.output.write_text(found, encoding="utf-8")
    return int(any(x.alarms(ALPHAS[-1]) for x in runs))


if __name__ == "__main__":
    sys.exit(main())
