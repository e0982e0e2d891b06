"""The measured level of `refattn.conformance.check`: how often it rejects what is right.

Run as ``python validation/level.py``. The candidates are the package's estimators with every tag
alone and some in pairs, implementations in other styles, and some that take less than all problems.
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
from scipy import special
from threadpoolctl import threadpool_limits

from refattn import conformance, estimators, features, kernels, moments, sampling, stats
from refattn.conformance.candidate.tags import TAGGED_DTYPES
from refattn.conformance.conventions import SPECS
from refattn.conformance.defects import VARIANTS
from refattn.estimators import lara
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
    able = {"mask", "causal"} | ({"gqa"} if "h" in tags.get("layout", "h") else set())
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


# Other styles: each is written from its definition, and calls nothing of the package.


def visible(q: Array, k: Array, mask: Array, causal: bool) -> Array:
    """Which query sees which key, (..., n, m)."""
    n, m = q.shape[-2], k.shape[-2]
    return np.tri(n, m, m - n if causal else m, dtype=bool) & mask


def transposed(x: Array) -> Array:
    """The last two axes exchanged."""
    return np.swapaxes(x, -1, -2)


def logits(q: Array, k: Array) -> Array:
    """Scaled inner products."""
    return q @ transposed(k) * q.shape[-1] ** -0.5


def mean_of_values(weights: Array, v: Array, epsilon: float = 0.0) -> Array:
    """The weighted mean, 0 without weights."""
    total = np.sum(weights, -1, keepdims=True) + epsilon
    return weights @ v / np.where(total == 0, 1, total)


def exponentials(scores: Array, seen: Array = True) -> Array:
    """e^scores over the largest, 0 where hidden."""
    scores = np.where(seen, scores, -np.inf)
    top = np.max(scores, -1, keepdims=True)
    return np.exp(scores - np.where(np.isinf(top), 0, top))


def coordinates(*arrays: Array) -> list[Array]:
    """Kernel coordinates."""
    return [x * x.shape[-1] ** -0.25 for x in arrays]


def frequencies(omega: Array, count: Any, seed: Any, like: Array) -> Array:
    """Those given, or standard normal ones."""
    if omega is None:
        omega = np.random.default_rng(seed).standard_normal((count, like.shape[-1]))
    return np.asarray(omega, like.dtype)


def log_features(x: Array, omega: Array) -> Array:
    """omega . x - |x|^2 / 2, (..., n, S)."""
    return x @ transposed(omega) - np.sum(x * x, -1, keepdims=True) / 2


def elu_plus_one(x: Array) -> Array:
    """The feature map of linear attention."""
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def softmax_streamed(
    q: Array, k: Array, v: Array, *, mask: Array = True, causal: bool = False
) -> Array:
    """Four keys at a time, with a running maximum."""
    scores = np.where(visible(q, k, mask, causal), logits(q, k), -np.inf)
    top, total, sums = np.full((*q.shape[:-1], 1), -np.inf, q.dtype), 0.0, 0.0
    for j in range(0, k.shape[-2], 4):
        part = scores[..., j : j + 4]
        base = np.maximum(top, np.max(part, -1, keepdims=True))
        finite = np.where(np.isinf(base), 0, base)
        shrink, weights = np.exp(top - finite), np.exp(part - finite)
        total = total * shrink + np.sum(weights, -1, keepdims=True)
        sums = sums * shrink + weights @ v[..., j : j + 4, :]
        top = base
    return sums / np.where(total == 0, 1, total)


def softmax_einsum(
    q: Array, k: Array, v: Array, *, mask: Array = True, causal: bool = False
) -> Array:
    """Sums over named axes."""
    scores = np.einsum("...id,...jd->...ij", q, k) / np.sqrt(q.shape[-1], dtype=q.dtype)
    weights = exponentials(scores, visible(q, k, mask, causal))
    total = np.einsum("...ij->...i", weights)[..., None]
    return np.einsum("...ij,...jv->...iv", weights, v) / np.where(total == 0, 1, total)


def softmax_loops(
    q: Array, k: Array, v: Array, *, mask: Array = True, causal: bool = False
) -> Array:
    """Query by query; what it does not see is not touched."""
    seen = np.broadcast_to(visible(q, k, mask, causal), (*q.shape[:-1], k.shape[-2]))
    out = np.zeros((*q.shape[:-1], v.shape[-1]), q.dtype)
    for *head, i in np.ndindex(q.shape[:-1]):
        keys = seen[*head, i]
        if keys.any():
            scores = k[*head][keys] @ q[*head, i] / np.sqrt(q.shape[-1], dtype=q.dtype)
            out[*head, i] = special.softmax(scores) @ v[*head][keys]
    return out


def softmax_bias(
    q: Array, k: Array, v: Array, *, mask: Array = True, causal: bool = False
) -> Array:
    """Minus infinity is added where a key is hidden."""
    bias = np.where(visible(q, k, mask, causal), 0, -np.inf)
    return np.nan_to_num(special.softmax(logits(q, k) + bias, -1)) @ v


def softmax_wide(q: Array, k: Array, v: Array, **options: Any) -> Array:
    """Sums in double precision, rounded at the end."""
    return softmax_einsum(*(x.astype(np.float64) for x in (q, k, v)), **options).astype(q.dtype)


def softmax_epsilon(
    q: Array, k: Array, v: Array, *, epsilon: float, mask: Array = True, causal: bool = False
) -> Array:
    """An epsilon in the normaliser."""
    return mean_of_values(exponentials(logits(q, k), visible(q, k, mask, causal)), v, epsilon)


def softmax_empty(
    q: Array, k: Array, v: Array, *, value: Call, mask: Array = True, causal: bool = False
) -> Array:
    """Queries that see no key get something else than 0."""
    seen = visible(q, k, mask, causal).any(-1, keepdims=True)
    return np.where(seen, softmax_einsum(q, k, v, mask=mask, causal=causal), value(v))


def softmax_options(
    q: Array,
    k: Array,
    v: Array,
    *,
    mask: Array = True,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    softcap: float | None = None,
    sinks: Array | None = None,
    bias: Array = 0,
    dropout: float = 0.0,
    seed: int = 0,
    return_lse: bool = False,
) -> Any:
    """All that kernels take: windows whose left side counts a query's own key, a sink as a key."""
    n, m = q.shape[-2], k.shape[-2]
    left, right = (np.inf if x is None else x for x in window)
    ahead = np.arange(m) - np.arange(n)[:, None]
    seen = visible(q, k, mask, causal) & (-left < ahead) & (ahead <= right)
    scores = logits(q, k)
    scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
    scores = np.where(seen, scores + bias, -np.inf)
    lse = np.logaddexp2.reduce(scores / np.log(2), -1)
    if sinks is not None:
        sink = np.broadcast_to(np.asarray(sinks)[..., None, None], (*scores.shape[:-1], 1))
        scores = np.concatenate([scores, sink.astype(scores.dtype)], -1)
    weights = exponentials(scores)
    total = np.sum(weights, -1, keepdims=True)
    weights = weights[..., :m] / np.where(total == 0, 1, total)
    kept = np.random.default_rng(seed).random(weights.shape) >= dropout
    out = (weights * kept / (1 - dropout)).astype(q.dtype) @ v
    return (out, lse) if return_lse else out


def softmax_torch(q: Array, k: Array, v: Array, *, causal: bool = False) -> Array:
    """PyTorch's own, with the heads third."""
    attend = import_module("torch").nn.functional.scaled_dot_product_attention
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return attend(q, k, v, is_causal=causal).transpose(1, 2)


def softmax_jax(q: Array, k: Array, v: Array, *, mask: Array = None, causal: bool = False) -> Array:
    """JAX's own, compiled."""
    return _compiled()(q, k, v, mask=mask, is_causal=causal)


@lru_cache
def _compiled() -> Call:
    import jax

    return jax.jit(jax.nn.dot_product_attention, static_argnames="is_causal")


def log_kernel(log_q: Array, log_k: Array) -> Array:
    """Of every pair, from the logarithms of features."""
    return special.logsumexp(log_q[..., :, None, :] + log_k[..., None, :, :], -1)


def rfa_logs(
    q: Array,
    k: Array,
    v: Array,
    *,
    omega: Array = None,
    num_features: int | None = None,
    seed: int | None = None,
    mask: Array = True,
    causal: bool = False,
) -> Array:
    """Logarithms of the estimated kernel as the scores of a softmax."""
    q, k = coordinates(q, k)
    omega = frequencies(omega, num_features, seed, q)
    log_q, log_k = log_features(q, omega), log_features(k, omega)
    scores = log_kernel(log_q, log_k)
    return mean_of_values(exponentials(scores, visible(q, k, mask, causal)), v)


@lru_cache(maxsize=64)
def _cached(seed: int, count: int, d: int) -> Array:
    return np.random.default_rng(seed).standard_normal((count, d))


def rfa_cached(q: Array, k: Array, v: Array, *, num_features: int, seed: int, **seen: Any) -> Array:
    """Frequencies are kept for the next call."""
    return rfa_logs(q, k, v, omega=_cached(seed, num_features, q.shape[-1]), **seen)


def rfa_recurrent(
    q: Array,
    k: Array,
    v: Array,
    *,
    omega: Array = None,
    num_features: int | None = None,
    seed: int | None = None,
    causal: bool = False,
) -> Array:
    """Key after key, with a running base for each frequency."""
    q, k = coordinates(q, k)
    omega = frequencies(omega, num_features, seed, q)
    log_q, log_k = log_features(q, omega), log_features(k, omega)
    n, m = q.shape[-2], k.shape[-2]
    base = np.full_like(log_k[..., 0, :], -np.inf)
    total, sums = np.zeros_like(base), np.zeros((*base.shape, v.shape[-1]), q.dtype)
    out, read = np.zeros((*q.shape[:-1], v.shape[-1]), q.dtype), 0
    for i in range(n):
        while read < (i + m - n + 1 if causal else m):
            raised = np.maximum(base, log_k[..., read, :])
            shrink, feature = np.exp(base - raised), np.exp(log_k[..., read, :] - raised)
            total = total * shrink + feature
            sums = sums * shrink[..., None] + feature[..., None] * v[..., read, None, :]
            base, read = raised, read + 1
        if read:
            weights = exponentials(log_q[..., i, :] + base)
            scaled = weights / np.sum(weights * total, -1, keepdims=True)
            out[..., i, :] = (scaled[..., None, :] @ sums)[..., 0, :]
    return out


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
    q, k = coordinates(q, k)
    z = np.random.default_rng(seed).standard_normal((num_features, q.shape[-1]))
    root = np.linalg.cholesky(np.eye(q.shape[-1]) if cov is None else cov)
    omega = mean + z @ root.T
    log_weight = (np.sum(z * z, -1) - np.sum(omega * omega, -1)) / 2
    log_q, log_k = log_features(q, omega) + log_weight, log_features(k, omega)
    scores = log_kernel(log_q, log_k)
    return mean_of_values(exponentials(scores), v)


def performer(
    q: Array,
    k: Array,
    v: Array,
    *,
    omega: Array = None,
    num_features: int | None = None,
    seed: int | None = None,
    mask: Array = True,
    causal: bool = False,
    in_features: float = 0.0,
    in_normaliser: float = 0.0,
) -> Array:
    """Features over their largest, with an epsilon."""
    q, k = coordinates(q, k)
    omega = frequencies(omega, num_features, seed, q)
    log_q, log_k = log_features(q, omega), log_features(k, omega)
    phi_q = np.exp(log_q - log_q.max(-1, keepdims=True)) + in_features
    phi_k = np.exp(log_k - log_k.max((-1, -2), keepdims=True)) + in_features
    weights = np.where(visible(q, k, mask, causal), phi_q @ transposed(phi_k), 0)
    return mean_of_values(weights, v, in_normaliser)


def rfa_torch(q: Array, k: Array, v: Array, *, num_features: int, seed: int) -> Array:
    """With the heads third, and PyTorch's random numbers."""
    torch = import_module("torch")
    generator = torch.Generator().manual_seed(seed)
    omega = torch.randn(num_features, q.shape[-1], generator=generator, dtype=q.dtype)
    q, k = coordinates(q.transpose(1, 2), k.transpose(1, 2))
    log_q, log_k = q @ omega.T, k @ omega.T - (k * k).sum(-1, keepdim=True) / 2
    scores = torch.logsumexp(log_q[..., :, None, :] + log_k[..., None, :, :], -1)
    return (torch.softmax(scores, -1) @ v.transpose(1, 2)).transpose(1, 2)


def ra_mixture(
    q: Array,
    k: Array,
    v: Array,
    *,
    omega: Array = None,
    num_samples: Any = None,
    seed: int | None = None,
    in_normaliser: float = 0.0,
) -> Array:
    """A key drawn by its weight, then a Gaussian about the sum of it and the query."""
    q, k = coordinates(q, k)
    if omega is None:
        rng = np.random.default_rng(seed)
        share = special.softmax(q @ transposed(k), -1)
        omega = np.empty((*q.shape[:-1], num_samples, q.shape[-1]), q.dtype)
        for *head, i in np.ndindex(q.shape[:-1]):
            pick = rng.choice(k.shape[-2], num_samples, p=share[*head, i])
            noise = rng.standard_normal((num_samples, q.shape[-1]))
            omega[*head, i] = q[*head, i] + k[*head][pick] + noise
    scores = transposed(log_features(k[..., None, :, :], omega))
    return np.mean(mean_of_values(exponentials(scores), v[..., None, :, :], in_normaliser), -2)


def chunk_means(x: Array, count: int) -> Array:
    """Means of contiguous chunks; row i is of chunk floor(i count / n)."""
    chunk = np.arange(x.shape[-2]) * count // x.shape[-2]
    return np.stack([x[..., chunk == c, :].mean(-2) for c in range(count)], -2)


def lara_chunks(
    q: Array,
    k: Array,
    v: Array,
    *,
    omega: Array = None,
    centres: Array = None,
    num_proposals: int | None = None,
    seed: int | None = None,
) -> Array:
    """Unit Gaussians about sums of chunk means, weighted by the density of their mixture."""
    q, k = coordinates(q, k)
    if omega is None:
        assert num_proposals is not None
        centres = chunk_means(q, num_proposals) + chunk_means(k, num_proposals)
        omega = centres + np.random.default_rng(seed).standard_normal(centres.shape)
    log_weight = -special.logsumexp(log_features(centres, omega), -2)
    log_q = log_features(q, omega) + log_weight[..., None, :]
    scores = log_q[..., :, None, :] + log_features(k, omega)[..., None, :, :]
    return mean_of_values(exponentials(special.logsumexp(scores, -1)), v)


def linear_recurrent(q: Array, k: Array, v: Array, *, causal: bool = False) -> Array:
    """Key after key."""
    n, m = q.shape[-2], k.shape[-2]
    phi_q, phi_k = elu_plus_one(q), elu_plus_one(k)
    total = np.zeros((*k.shape[:-2], k.shape[-1]), q.dtype)
    sums = np.zeros((*total.shape, v.shape[-1]), q.dtype)
    out, read = np.zeros((*q.shape[:-1], v.shape[-1]), q.dtype), 0
    for i in range(n):
        while read < (i + m - n + 1 if causal else m):
            total = total + phi_k[..., read, :]
            sums = sums + phi_k[..., read, :, None] * v[..., read, None, :]
            read += 1
        if read:
            feature = phi_q[..., i, :]
            out[..., i, :] = (feature[..., None, :] @ sums)[..., 0, :]
            out[..., i, :] /= np.sum(feature * total, -1, keepdims=True)
    return out


def linear_epsilon(
    q: Array,
    k: Array,
    v: Array,
    *,
    mask: Array = True,
    causal: bool = False,
    in_features: float = 0.0,
    in_normaliser: float = 0.0,
) -> Array:
    """All weights at once, with an epsilon."""
    phi_q, phi_k = elu_plus_one(q) + in_features, elu_plus_one(k) + in_features
    weights = np.where(visible(q, k, mask, causal), phi_q @ transposed(phi_k), 0)
    return mean_of_values(weights, v, in_normaliser)


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


def moments_two_pass(x: Array) -> tuple[Array, Array]:
    """Deviations from the mean, after it."""
    mean = x.mean(-2)
    about = x - mean[..., None, :]
    return mean, transposed(about) @ about / (x.shape[-2] - 1)


def moments_welford(x: Array) -> tuple[Array, Array]:
    """Row after row."""
    mean, scatter = np.zeros_like(x[..., 0, :]), np.zeros_like(transposed(x) @ x)
    for i in range(x.shape[-2]):
        before = x[..., i, :] - mean
        mean = mean + before / (i + 1)
        scatter = scatter + before[..., :, None] * (x[..., i, :] - mean)[..., None, :]
    return mean, scatter / (x.shape[-2] - 1)


SEES = ("mask", "causal")
FINITE = {"hidden": "finite"}
FLOAT32 = {"dtype": "float32"}
FLOAT16 = {"dtype": "float16"}
Style = tuple[Call, str, Sequence[str], Mapping[str, Any]]

STYLES: Mapping[str, Style] = {
    "softmax in chunks of keys": (softmax_streamed, "softmax", SEES, FINITE),
    "softmax by einsum": (softmax_einsum, "softmax", SEES, FINITE),
    "softmax in loops": (softmax_loops, "softmax", SEES, {}),
    "softmax with a bias": (softmax_bias, "softmax", SEES, FINITE),
    "softmax with options": (
        softmax_options,
        "softmax",
        (*SEES, "window", "softcap", "sinks", "bias", "dropout", "lse"),
        {"window": "exclusive, top-left", "lse_base": "2", **FINITE},
    ),
    "softmax summed in float64": (softmax_wide, "softmax", SEES, FINITE | FLOAT32),
    "softmax in float16 summed in float64": (softmax_wide, "softmax", SEES, FINITE | FLOAT16),
    "softmax of torch": (
        softmax_torch,
        "softmax",
        ("causal",),
        {**SPECS["torch-sdpa"], "layout": "bnhd"},
    ),
    "softmax of jax": (
        softmax_jax,
        "softmax",
        SEES,
        {**SPECS["jax-dpa"], "same_value_size": True, **FINITE},
    ),
    "RFA in logs": (rfa_logs, "rfa", SEES, FINITE),
    "RFA in logs omega": (rfa_logs, "rfa", (*SEES, "omega", "omega_per_head"), FINITE),
    "RFA with cached frequencies": (rfa_cached, "rfa", SEES, FINITE),
    "RFA recurrent": (rfa_recurrent, "rfa", ("causal",), {}),
    "RFA recurrent omega": (rfa_recurrent, "rfa", ("causal", "omega"), {}),
    "RFA with moments": (rfa_of_moments, "rfa", ("moments",), {}),
    "RFA in torch": (rfa_torch, "rfa", (), {"library": "torch", "layout": "bnhd"}),
    "RA of a mixture": (ra_mixture, "ra", (), {}),
    "RA of a mixture omega": (ra_mixture, "ra", ("omega",), {}),
    "LARA of chunks": (lara_chunks, "lara", (), {"centres": "chunks"}),
    "LARA of chunks omega": (lara_chunks, "lara", ("omega",), {"centres": "chunks"}),
    "linear recurrent": (linear_recurrent, "linear", ("causal",), {}),
    "kernel in jax": (kernel_jax, "kernel", (), {"library": "jax"} | FLOAT32),
    "moments in two passes": (moments_two_pass, "moments", (), {}),
    "moments by Welford": (moments_welford, "moments", (), {}),
}


def of_styles() -> Iterator[conformance.Adapter]:
    """Implementations of others, and the correct ones of the catalogue of defects."""
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
        fn = partial(ra_mixture, in_normaliser=epsilon)
        tags = {x: tags[x] for x in ("epsilon", "dtype")}
        yield conformance.Adapter(fn, "ra", (), tags, f"ra_mixture in_normaliser {words}")


# Candidates that raise outside of what they declare.


def only(rule: Callable[[Array, Array, Array], bool], fn: Call = softmax_einsum) -> Call:
    """Attention that takes some problems only."""

    @wraps(fn)
    def limited(q: Array, k: Array, v: Array, **options: Any) -> Array:
        if not rule(q, k, v):
            raise ValueError("not taken")
        return fn(q, k, v, **options)

    return limited


def small(q: Array, k: Array, v: Array) -> bool:
    """Logits up to 20."""
    return bool(np.max(np.abs(logits(q, k)), initial=0.0) <= 20)


def blocks_of_64(q: Array, k: Array, v: Array) -> bool:
    """Numbers of tokens that blocks of 64 fill."""
    return bool(q.shape[-2] % 64 == 0 and k.shape[-2] % 64 == 0)


def square(q: Array, k: Array, v: Array) -> bool:
    """As many queries as keys."""
    return bool(q.shape[-2] == k.shape[-2])


def same_length(q: Array, k: Array, v: Array) -> bool:
    """Values as long as keys."""
    return bool(q.shape[-1] == v.shape[-1])


def eight(q: Array, k: Array, v: Array) -> bool:
    """Queries of length 8."""
    return bool(q.shape[-1] == 8)


def rfa_frozen(q: Array, k: Array, v: Array, **seen: Any) -> Array:
    """The same frequencies for ever."""
    return rfa_logs(q, k, v, omega=_cached(0, 32, q.shape[-1]), **seen)


def rfa_given(q: Array, k: Array, v: Array, *, omega: Array, **seen: Any) -> Array:
    """Frequencies are always given."""
    return rfa_logs(q, k, v, omega=omega, **seen)


LIMITED: Mapping[str, Style] = {
    "head sizes": (
        only(lambda q, k, v: q.shape[-1] in (64, 128)),
        "softmax",
        SEES,
        {"head_sizes": (64, 128)},
    ),
    "multiples of 64": (only(blocks_of_64), "softmax", SEES, {"multiple_of": 64}),
    "self-attention": (only(square), "softmax", SEES, {"self_attention": True}),
    "causal only": (
        partial(softmax_einsum, causal=True),
        "softmax",
        ["mask"],
        {"causal_only": True},
    ),
    "values as long as keys": (only(same_length), "softmax", SEES, {"same_value_size": True}),
    "small logits": (only(small), "softmax", SEES, {"max_logit": 20}),
    "NaN for empty rows": (
        partial(softmax_empty, value=lambda v: np.nan),
        "softmax",
        SEES,
        {"empty_rows": "nan"},
    ),
    "mean for empty rows": (
        partial(softmax_empty, value=lambda v: v.mean(-2, keepdims=True)),
        "softmax",
        SEES,
        {"empty_rows": "mean"},
    ),
    "anything for empty rows": (
        partial(softmax_empty, value=lambda v: 3.0),
        "softmax",
        SEES,
        {"empty_rows": "undefined"},
    ),
    "RFA with one set of frequencies": (
        only(eight, rfa_frozen),
        "rfa",
        SEES,
        {"fixed_frequencies": True, "head_sizes": 8},
    ),
    "RFA at given frequencies": (rfa_given, "rfa", (*SEES, "omega_only"), {}),
    "RFA in self-attention of one size": (
        only(lambda *arrays: eight(*arrays) and square(*arrays), rfa_logs),
        "rfa",
        SEES,
        {"self_attention": True, "head_sizes": 8},
    ),
    "RA of one size": (only(eight, ra_mixture), "ra", ("omega",), {"head_sizes": 8}),
    "LARA in self-attention": (only(square, lara_chunks), "lara", (), {"self_attention": True}),
}


def of_limits() -> Iterator[conformance.Adapter]:
    """Candidates with constraint tags."""
    for name, (fn, estimator, capabilities, tags) in LIMITED.items():
        yield conformance.Adapter(fn, estimator, capabilities, {**tags, **FINITE}, name)


CANDIDATES: Mapping[str, conformance.Adapter] = {
    str(adapter.name): adapter
    for family in (of_package, of_styles, with_epsilon, of_limits)
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
    parser = argparse.ArgumentParser(description="Measure how often what is right is rejected.")
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
