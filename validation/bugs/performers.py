"""Performers: performer-pytorch, torch-geometric, srf-attention, darkformer-pytorch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

import refattn

from ..benchmarks.peers import load
from .record import Floats, Number, error, exact, normal, real, taking

_TORCH = {"library": "torch", "dtype": "float32", "layout": "bhnd"}
_SETS = 4000  # of frequencies, for means of kernel estimates


# --- performer-pytorch ---------------------------------------------------------------------------


def performer_kernel(x: Any, y: Any, *, num_features: int, seed: int) -> Any:
    """Positive features of the softmax kernel, at the frequencies that performer-pytorch draws."""
    omega = _frequencies(num_features, x.shape[-1], seed)
    return refattn.kernels.estimate(x, y, omega)


def performer_given(q: Any, k: Any, v: Any, *, omega: Any) -> Any:
    """Attention of performer-pytorch at given frequencies."""
    package, phi_q, phi_k = _features(q, k, omega)
    return package.linear_attention(phi_q, phi_k, v)


def performer_causal(q: Any, k: Any, v: Any, *, omega: Any, causal: bool = False) -> Any:
    """The same, causal by the form without CUDA code."""
    package, phi_q, phi_k = _features(q, k, omega)
    return package.causal_linear_attention_noncuda(phi_q, phi_k, v)


def performer_masked(q: Any, k: Any, v: Any, *, mask: Any = None) -> Any:
    """Its layer with masked keys, one query at a time since it takes a mask of keys only."""
    return _by_query(_performer_layer(q.shape), q, k, v, mask)


def _performer() -> Any:
    return load("performer_pytorch.performer_pytorch", "performer-pytorch")


def _frequencies(count: int, d: int, seed: int) -> Floats:
    torch = load("torch", "torch")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return np.asarray(_performer().gaussian_orthogonal_random_matrix(count, d))


def _features(q: Any, k: Any, omega: Any, **options: Any) -> tuple[Any, Any, Any]:
    package = _performer()
    phi_q = package.softmax_kernel(q, projection_matrix=omega, is_query=True, **options)
    phi_k = package.softmax_kernel(k, projection_matrix=omega, is_query=False, **options)
    return package, phi_q, phi_k


def _performer_layer(shape: Any) -> Any:
    """Its layer without weights of its own: queries, keys and values lie side by side."""
    torch, (_, h, _, d) = load("torch", "torch"), shape
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = _performer().SelfAttention(h * d, heads=h, dim_head=d, nb_features=4 * d)
    layer.to_q, layer.to_k, layer.to_v = taking(torch, range(3), h * d, 3)
    layer.to_out = torch.nn.Identity()
    return lambda x, mask: layer(x, mask=mask)


def _by_query(layer: Any, q: Any, k: Any, v: Any, mask: Any) -> Any:
    """Results of a layer that takes a mask of keys, where each query has a mask of its own."""
    torch, (b, h, n, d) = load("torch", "torch"), q.shape
    if k.shape != q.shape or v.shape != q.shape:
        raise ValueError("`q`, `k` and `v` must have one shape, as this layer has one input")
    x = torch.cat([y.transpose(1, 2).reshape(b, n, h * d) for y in (q, k, v)], -1)
    seen = torch.ones(b, h, n, n, dtype=torch.bool) if mask is None else mask
    seen = seen.expand(b, h, n, n)
    out = torch.empty_like(q)
    with torch.no_grad():
        for a, j, i in np.ndindex(b, h, n):
            row = layer(x[a : a + 1].clone(), seen[a : a + 1, j, i])
            out[a, j, i] = row.reshape(n, h, d)[i, j]
    return out


def _many(draw: Callable[[int, int, int], Floats], d: int) -> Floats:
    """Sets of d frequencies, 16 from a call."""
    return np.concatenate([draw(16 * d, d, seed) for seed in range(_SETS // 16)]).astype(float)


def _haar() -> tuple[Number, ...]:
    numbers = []
    for d in (4, 16, 64):
        omega = _many(_frequencies, d).reshape(_SETS, d, d)
        x = np.full(d, d**-0.5)
        estimates = np.exp(2 * omega @ x - 1).mean(axis=-1) / math.e
        numbers.append(
            Number(
                f"relative bias (absolute value) of the mean of {_SETS} estimates of exp(x . x); "
                f"x = (1, ..., 1)/sqrt({d})",
                abs(float(estimates.mean()) - 1),
                f"0 ± {float(estimates.std()) * _SETS**-0.5:.2g} (standard error)",
                6 * float(estimates.std()) * _SETS**-0.5,
            )
        )
    q, k, v = real()
    omega = _many(_frequencies, 32)[: 2**14]
    haar = refattn.sampling.draw(2**14, 32, coupling="orthogonal", rng=0).omega
    got, floor = (refattn.random_feature_attention(q, k, v, omega=w) for w in (omega, haar))
    numbers.append(
        Number(
            "error of 16,384 features at its frequencies, compared with exact attention, real "
            "tensors",
            error(got, exact(q, k, v)),
            f"{error(floor, exact(q, k, v)):.2g}, with as many Haar-distributed frequencies",
        )
    )
    return tuple(numbers)


def _epsilon() -> tuple[Number, ...]:
    torch = load("torch", "torch")
    numbers = []
    cases = [("real tensors", real())]
    cases += [(f"normal q and k of std {s}, d = 64, n = 512", normal(s)) for s in (0.5, 1.0, 1.5)]
    for name, (q, k, v) in cases:
        omega = _frequencies(4 * q.shape[-1], q.shape[-1], 0)
        tensors = [torch.asarray(x) for x in (q, k, v)]
        with torch.no_grad():
            got = performer_given(*tensors, omega=torch.asarray(omega))
        want = refattn.random_feature_attention(
            *(x.astype(float) for x in (q, k, v)), omega=omega.astype(float)
        )
        mean = np.broadcast_to(v.mean(axis=-2, keepdims=True), v.shape)
        numbers += [
            Number(
                f"error against the same formula and frequencies without the constant, {name}",
                error(got, want),
                "below 1e-5, rounding",
                1e-3,
            ),
            Number(
                f"distance from the plain mean of v, relative to that mean, {name}",
                error(got, mean),
                f"{error(want, mean):.2g}",
            ),
        ]
    return tuple(numbers)


def _future() -> tuple[Number, ...]:
    torch = load("torch", "torch")
    q, k, v = (torch.asarray(x) for x in real())
    omega = torch.asarray(_frequencies(128, 32, 0))
    edited = k.clone()
    edited[..., -1, :] *= 2
    with torch.no_grad():
        before, after = (performer_causal(q, x, v, omega=omega)[..., :-1, :] for x in (k, edited))
    return (
        Number(
            "change of the outputs of queries 0 to 126 when key 127 is doubled, relative, "
            "real tensors",
            error(after, before),
            "0: these queries do not see the key",
            1e-3,
        ),
    )


def _mask_of_values(layer: Any, q: Floats, k: Floats, v: Floats) -> tuple[Number, ...]:
    """Half of the keys masked, against a call without them."""
    torch = load("torch", "torch")
    b, h, n, d = q.shape
    ones = np.ones_like(v)
    mask = torch.arange(n).expand(b, n) < n // 2

    def of(values: Floats, tokens: int, seen: Any) -> Any:
        flat = [x.transpose(0, 2, 1, 3).reshape(b, n, h * d)[:, :tokens] for x in (q, k, values)]
        with torch.no_grad():
            return layer(torch.asarray(np.concatenate(flat, axis=-1)), seen)[:, : n // 2]

    return (
        Number(
            "outputs for values that are all 1, mean over queries, half of the keys masked, real "
            "tensors",
            float(of(ones, n, mask).mean()),
            "1: weights sum to 1",
        ),
        Number(
            "error of the outputs of unmasked tokens, compared with a call with only these tokens",
            error(of(v, n, mask), of(v, n // 2, None)),
            "below 1e-5, rounding",
            0.05,
        ),
    )


def _performer_mask() -> tuple[Number, ...]:
    return _mask_of_values(_performer_layer((2, 4, 128, 32)), *real())


# --- torch-geometric -----------------------------------------------------------------------------


def geometric_masked(q: Any, k: Any, v: Any, *, mask: Any = None) -> Any:
    """The layer of torch-geometric with masked keys, one query at a time."""
    return _by_query(_geometric_layer(q.shape), q, k, v, mask)


def _geometric_layer(shape: Any) -> Any:
    torch, (_, h, _, d) = load("torch", "torch"), shape
    package = load("torch_geometric.nn.attention", "torch-geometric")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = package.PerformerAttention(h * d, h, head_channels=d)
    layer.q, layer.k, layer.v = taking(torch, range(3), h * d, 3)
    layer.attn_out = torch.nn.Identity()

    def call(x: Any, mask: Any) -> Any:
        return layer(x, mask)

    return call


def _geometric_mask() -> tuple[Number, ...]:
    return _mask_of_values(_geometric_layer((2, 4, 128, 32)), *real())


# --- srf-attention -------------------------------------------------------------------------------


def srf_kernel(x: Any, y: Any, *, num_features: int, seed: int) -> Any:
    """Positive features of the softmax kernel, at the frequencies that srf-attention draws."""
    return refattn.kernels.estimate(x, y, _simplex(num_features, x.shape[-1], seed))


def _simplex(count: int, d: int, seed: int) -> Floats:
    torch, package = load("torch", "torch"), load("srf_attention", "srf-attention")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return np.asarray(package.simplex_random_matrix(count, d))


def _norms() -> tuple[Number, ...]:
    d = 32
    omega = _many(_simplex, d).reshape(_SETS, d, d)
    x = np.full(d, 0.5 * d**-0.5)
    kernel = float(np.exp(2 * omega @ x - x @ x).mean() / np.exp(x @ x))
    q, k, v = real()
    simplex = refattn.sampling.draw(2**14, d, coupling="simplex", rng=0).omega
    got, floor = (
        refattn.random_feature_attention(q, k, v, omega=w)
        for w in (omega.reshape(-1, d)[: 2**14], simplex)
    )
    return (
        Number(
            f"mean square length of a frequency divided by d, {_SETS} sets, d = {d}",
            float((omega**2).sum(axis=-1).mean() / d),
            "1",
        ),
        Number(
            "relative bias (absolute value) of estimates of exp(x . y); x = y, |x| = 1/2",
            abs(kernel - 1),
            "below 0.01, 6 standard errors",
            0.02,
        ),
        Number(
            "error of 16,384 features at its frequencies, compared with exact attention, real "
            "tensors",
            error(got, exact(q, k, v)),
            f"{error(floor, exact(q, k, v)):.2g}, with as many simplex frequencies of right length",
        ),
    )


def _srf_options() -> tuple[Number, ...]:
    torch, package = load("torch", "torch"), load("srf_attention", "srf-attention")
    arrays = [torch.asarray(x) for x in real()]
    refused = []
    for features, redraw in ((64, False), (None, True)):
        layer = package.Attention(32, causal=False, n_features=features)
        layer.redraw_on_call_(redraw)
        try:
            layer(*arrays, mode="train", attn_fn="torch")
        except (RuntimeError, TypeError) as reason:
            refused.append(type(reason).__name__)
    return (
        Number(
            "exceptions from two options, n_features=64 with d = 32 and redraw_on_call_(): "
            + ", ".join(refused),
            float(len(refused)),
            "0",
            1.0,
        ),
    )


# --- darkformer-pytorch --------------------------------------------------------------------------


def darkformer(q: Any, k: Any, v: Any, *, num_features: int, seed: int) -> Any:
    """Attention of darkformer-pytorch with the geometry that it starts with, the identity."""
    torch = load("torch", "torch")
    package = load("darkformer_pytorch", "darkformer-pytorch")
    layer = package.DarkformerKernelAttention(
        q.shape[-1], q.shape[1], num_features=num_features, projection_seed=seed
    )
    with torch.no_grad():
        return layer.eval()(q, k, v)


def _largest_score(q: Floats, k: Floats) -> float:
    return float(np.abs(q @ k.swapaxes(-1, -2)).max() / math.sqrt(q.shape[-1]))


def _underflow() -> tuple[Number, ...]:
    torch = load("torch", "torch")
    numbers = []
    for factor in (1, 6, 12, 24):
        q, k, v = real()
        q, k = factor * q, factor * k
        out = darkformer(*map(torch.asarray, (q, k, v)), num_features=128, seed=0)
        numbers.append(
            Number(
                f"share of queries whose output is all 0, real tensors, q and k times "
                f"{factor} (largest score {_largest_score(q, k):.0f}), 128 features",
                float((out == 0).all(dim=-1).double().mean()),
                "0: an output is a mean of values",
                0.0 if factor > 6 else None,
            )
        )
    return tuple(numbers)


def _unbiased() -> tuple[Number, ...]:
    """Its own frequencies, of which estimates of the kernel are right on average."""
    torch = load("torch", "torch")
    package = load("darkformer_pytorch", "darkformer-pytorch")
    d = 16
    omega = np.stack(
        [
            np.asarray(
                package.DataAwareRandomFeatures(d, 1, d, projection_seed=seed).projection_matrix
            )
            for seed in range(_SETS)
        ]
    ).astype(float)
    x = np.full(d, d**-0.5)
    estimates = np.exp(2 * omega @ x - 1).mean(axis=-1) / math.e
    q, k, v = real()
    got = darkformer(*map(torch.asarray, (q, k, v)), num_features=128, seed=0)
    layer = package.DataAwareRandomFeatures(32, 4, 128, projection_seed=0)
    want = refattn.random_feature_attention(
        *(y.astype(float) for y in (q, k, v)),
        omega=np.asarray(layer.projection_matrix, dtype=float),
    )
    return (
        Number(
            "bias of the mean estimate of exp(x . x), in standard errors; x = (1, ..., 1)/4",
            abs(float(estimates.mean()) - 1) / (float(estimates.std()) * _SETS**-0.5),
            "below 6",
            6.0,
        ),
        Number(
            "error against the same formula at the same frequencies, real tensors",
            error(got, want),
            "below 1e-5, rounding",
            1e-5,
        ),
    )
