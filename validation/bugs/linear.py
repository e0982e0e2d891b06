"""Linear attention: linear-attention-transformer, fla-core, taylor-series-linear-attention."""

from __future__ import annotations

from typing import Any

import numpy as np

import refattn

from ..benchmarks.peers import load
from .record import Floats, Number, error, exact, real, taking

_TOKENS_FIRST = {"library": "torch", "dtype": "float32", "layout": "bnhd"}


def _transformer() -> Any:
    return load(
        "linear_attention_transformer.linear_attention_transformer", "linear-attention-transformer"
    )


def _tensors(*arrays: Floats) -> list[Any]:
    torch = load("torch", "torch")
    return [torch.asarray(x.copy()) for x in arrays]


def _softmax(x: Floats) -> Floats:
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def _sums() -> tuple[Number, ...]:
    q, k = _tensors(*real()[:2])
    package, ones = _transformer(), np.ones_like(real()[2])
    plain = package.linear_attn(q, k, *_tensors(ones))
    causal = package.causal_linear_attn(q, k, *_tensors(ones), bucket_size=1)
    return (
        Number(
            "1 minus the output for values that are all 1, not causal, real tensors, d = 32",
            1 - float(plain.mean()),
            "0: weights sum to 1",
            0.5,
        ),
        Number("the same, causal", abs(1 - float(causal.mean())), "0"),
    )


def _shifted() -> tuple[Number, ...]:
    q, k, v = real()
    numbers = []
    for shift in (0, -10, 90):
        phi_q, phi_k = _softmax(q.astype(float)), np.exp(k.astype(float))
        weights = np.tril(phi_q @ phi_k.swapaxes(-1, -2))
        want = weights @ v / weights.sum(axis=-1, keepdims=True)
        got = _transformer().causal_linear_attn(
            *_tensors(q, k + np.float32(shift), v), bucket_size=1
        )
        numbers.append(
            Number(
                f"error of causal attention, real tensors, {shift} added to all keys",
                error(got, want),
                "below 1e-5: a shift of all keys cancels",
                1e-3 if shift else None,
            )
        )
    return tuple(numbers)


def _overwritten() -> tuple[Number, ...]:
    q, k, v = _tensors(*real())
    torch = load("torch", "torch")
    kept = k.clone(), v.clone()
    _transformer().linear_attn(q, k, v, kv_mask=torch.arange(128).expand(2, 128) < 64)
    changed = sum(int((a != b).sum()) for a, b in zip((k, v), kept, strict=True))
    return (
        Number(
            "share of the elements of the caller's k and v that changed, half of the keys masked, "
            "real tensors",
            changed / (2 * k.numel()),
            "0",
            0.0,
        ),
    )


# --- fla-core ------------------------------------------------------------------------------------


def elu(q: Any, k: Any, v: Any, *, causal: bool = True) -> Any:
    """Causal linear attention of fla-core in chunks, with elu + 1."""
    torch = load("torch", "torch")
    naive = load("fla.ops.linear_attn.naive", "flash-linear-attention triton")
    room = (0, 0, 0, 0, 0, -q.shape[1] % 64)
    phi_q, phi_k, padded = (torch.nn.functional.pad(x, room) for x in (_phi(q), _phi(k), v))
    return naive.naive_chunk_linear_attn(phi_q, phi_k, padded, normalize=True)[:, : q.shape[1]]


def recurrent(q: Any, k: Any, v: Any, *, causal: bool = True) -> Any:
    """The same, one token after the other."""
    naive = load("fla.ops.linear_attn.naive", "flash-linear-attention triton")
    return naive.naive_recurrent_linear_attn(_phi(q), _phi(k), v, normalize=True)[0]


def _phi(x: Any) -> Any:
    """elu + 1 without cancellation, as layers of fla-core have it since 0.6."""
    torch = load("torch", "torch")
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


def _swapped(*arrays: Floats) -> list[Any]:
    return _tensors(*(x.swapaxes(1, 2) for x in arrays))


def _tiny() -> tuple[Number, ...]:
    numbers = []
    q, k, v = real()
    for shift in (0, -12, -15):
        x, y = q + np.float32(shift), k + np.float32(shift)
        want = refattn.linear_attention(*(a.astype(float) for a in (x, y, v)), causal=True)
        got = elu(*_swapped(x, y, v)).swapaxes(1, 2)
        numbers.append(
            Number(
                f"error of elu + 1, causal, real tensors, {shift} added to q and k",
                error(got, want),
                "below 1e-5, rounding",
                1e-5 if shift < -12 else None,
            )
        )
    return tuple(numbers)


def _window() -> tuple[Number, ...]:
    naive = load("fla.ops.attn.naive", "flash-linear-attention triton")
    q, k, v = real()
    got = naive.naive_parallel_attn(*_swapped(q, k, v), window_size=16, causal=False)[0]
    causal = naive.naive_parallel_attn(*_swapped(q, k, v), window_size=16)[0]
    return (
        Number(
            "error against attention to keys i - 15 to i, window_size=16 with causal=False, real "
            "tensors",
            error(got.swapaxes(1, 2), exact(q, k, v, causal=True, window=(15, 0))),
            "below 1e-5, rounding",
            0.05,
        ),
        Number(
            "error of the same call, compared with attention to all keys",
            error(got.swapaxes(1, 2), exact(q, k, v)),
            "",
        ),
        Number(
            "error with causal=True",
            error(causal.swapaxes(1, 2), exact(q, k, v, causal=True, window=(15, 0))),
            "below 1e-5, rounding",
        ),
    )


# --- nothing found -------------------------------------------------------------------------------


def _chunks() -> tuple[Number, ...]:
    q, k, v = real()
    want = refattn.linear_attention(*(x.astype(float) for x in (q, k, v)), causal=True)
    return tuple(
        Number(
            f"error of the {words} form, causal, real tensors",
            error(form(*_swapped(q, k, v)).swapaxes(1, 2), want),
            "below 1e-5, rounding",
            1e-5,
        )
        for words, form in (("chunked", elu), ("recurrent", recurrent))
    )


def _taylor() -> tuple[Number, ...]:
    torch = load("torch", "torch")
    package = load("taylor_series_linear_attention", "taylor-series-linear-attention")
    q, k, v = real()
    layer = package.TaylorSeriesLinearAttn(384, dim_head=32, heads=4)
    layer.to_q[0], layer.to_kv[0] = taking(torch, (0, 1), 128, 3)
    layer.to_kv[0] = torch.nn.Linear(384, 256, bias=False)
    layer.to_kv[0].weight = torch.nn.Parameter(torch.eye(384)[128:])
    layer.to_out = torch.nn.Identity()
    flat = [x.transpose(0, 2, 1, 3).reshape(2, 128, 128) for x in (q, k, v)]
    with torch.no_grad():
        out = layer(torch.asarray(np.concatenate(flat, axis=-1)))
    scores = q.astype(float) @ k.astype(float).swapaxes(-1, -2) * 32**-0.5
    weights = 1 + scores + scores**2 / 2
    return (
        Number(
            "error against weights 1 + s + s^2 / 2, real tensors",
            error(
                out.reshape(2, 128, 4, 32).transpose(1, 2),
                weights @ v / weights.sum(axis=-1, keepdims=True),
            ),
            "below 1e-5, rounding",
            1e-5,
        ),
    )
