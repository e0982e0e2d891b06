"""The forms that refattn is timed against.

NumPy forms are functions of arrays. Those of other packages are made by a function that imports the
package and converts the arrays, which takes no part in the time, and returns the call; it raises
`Missing` where the package is not there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

Call = Callable[[], Any]

_CHUNK = 128  # tokens a step of the causal forms


class Missing(Exception):
    """A peer that cannot be measured here, and why."""


def load(module: str, package: str) -> Any:
    """Import a module of an optional package, without what it warns of."""
    if find_spec(module.partition(".")[0]) is None:
        raise Missing(f"not installed: pip install {package}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return import_module(module)
    except Exception as error:
        raise Missing(f"{package} does not import: {error}") from None


# --- NumPy, as the formulas are written down: all in memory, and they overflow for large q and k -
#
# What is linear in the tokens is of NumPy or torch. Complex arrays are taken too: `oracles.slopes`.


def by_features(phi_q: Any, phi_k: Any, v: Any) -> Any:
    """Attention whose kernel is the product of features."""
    return phi_q @ (_t(phi_k) @ v) / (phi_q @ phi_k.sum(-2)[..., None])


def by_features_causal(phi_q: Any, phi_k: Any, v: Any, xp: Any = np) -> Any:
    """Causal attention by features: the sums over past chunks, and the pairs within each."""
    ones = xp.ones_like(v[..., :1])
    v = xp.concatenate([v, ones], -1)
    # torch splits in one step, whose way back is one too; that of a slice fills the whole array.
    steps = range(_CHUNK, v.shape[-2], _CHUNK) if xp is np else _CHUNK
    chunks = zip(*(xp.split(x, steps, -2) for x in (phi_q, phi_k, v)), strict=True)
    total, parts = 0.0, []
    for i, (q_i, k_i, v_i) in enumerate(chunks):
        present = xp.tril(q_i @ _t(k_i)) @ v_i
        parts.append(present if i == 0 else present + q_i @ total)
        total = total + _t(k_i) @ v_i
    out = xp.concatenate(parts, -2)
    return out[..., :-1] / out[..., -1:]


def positive(x: np.ndarray, omega: np.ndarray) -> np.ndarray:
    """Positive features."""
    x = x * x.shape[-1] ** -0.25
    return np.asarray(np.exp(x @ _t(omega) - _half_square_norm(x)[..., None]))


def trigonometric(x: np.ndarray, omega: np.ndarray) -> np.ndarray:
    """Trigonometric features."""
    x = x * x.shape[-1] ** -0.25
    product, half = x @ _t(omega), _half_square_norm(x)[..., None]
    return np.asarray(np.concatenate([np.cos(product), np.sin(product)], axis=-1) * np.exp(half))


def textbook(
    phi: Callable[..., Any], q: Any, k: Any, v: Any, *omega: Any, causal: bool = False
) -> Any:
    """Attention by features of queries and keys."""
    form = by_features_causal if causal else by_features
    return form(phi(q, *omega), phi(k, *omega), v)


def textbook_softmax(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool = False
) -> np.ndarray:
    """Exact attention."""
    scores = q @ _t(k) * q.shape[-1] ** -0.5
    if causal:
        future = np.arange(k.shape[-2]) > np.arange(q.shape[-2])[:, None]
        np.copyto(scores, -np.inf, where=future)
    return np.asarray(_softmax(scores) @ v)


def textbook_linear_randomized(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, omega: np.ndarray
) -> np.ndarray:
    """LARA with as many equal chunks as frequencies, and the balance heuristic."""
    centres = chunk_centres(q, k, omega.shape[-2])
    mixture = np.exp(omega @ _t(centres) - _half_square_norm(centres)[..., None, :]).sum(axis=-1)
    phi_q, phi_k = positive(q, omega) / mixture[..., None, :], positive(k, omega)
    return np.asarray(by_features(phi_q, phi_k, v))


def chunk_centres(q: np.ndarray, k: np.ndarray, count: int) -> np.ndarray:
    """Sums of the mean query and the mean key of each of `count` equal chunks."""
    shape = (*q.shape[:-2], count, -1, q.shape[-1])
    means = (x.reshape(shape).mean(axis=-2) for x in (q, k))
    return np.asarray(q.shape[-1] ** -0.25 * sum(means))


def textbook_randomized(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, omega: np.ndarray
) -> np.ndarray:
    """Randomized attention with frequencies (..., n, S, d)."""
    return np.asarray(_ratios(omega, k[..., None, :, :]).mean(axis=-2) @ v)


def textbook_mean_of_ratios(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, omega: np.ndarray
) -> np.ndarray:
    """Mean of the ratios of single features."""
    mean = _ratios(omega, k).mean(axis=-2, keepdims=True) @ v
    return np.broadcast_to(mean, (*q.shape[:-1], v.shape[-1])).copy()


def textbook_importance_sampled(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, omega: np.ndarray
) -> np.ndarray:
    """Importance sampling with the exact normaliser."""
    exact = np.exp(q @ _t(k) * q.shape[-1] ** -0.5).sum(axis=-1, keepdims=True)
    total = positive(q, omega) @ (_t(positive(k, omega)) @ v)
    return np.asarray(total / omega.shape[-2] / exact)


def _ratios(omega: np.ndarray, k: np.ndarray) -> np.ndarray:
    k = k * k.shape[-1] ** -0.25
    return _softmax(omega @ _t(k) - _half_square_norm(k)[..., None, :])


def _softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def _half_square_norm(x: np.ndarray) -> np.ndarray:
    return np.asarray(np.sum(x * x, axis=-1) / 2)


def _t(x: Any) -> Any:
    return x.swapaxes(-1, -2)


# --- torch ---------------------------------------------------------------------------------------


def torch_softmax(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool = False) -> Call:
    """Exact attention by torch's own function."""
    torch, tensors = _torch(q, k, v)
    return partial(sdpa, torch, *tensors, causal=causal)


def torch_performer(q: np.ndarray, k: np.ndarray, v: np.ndarray, omega: np.ndarray) -> Call:
    """Performer attention."""
    _, tensors = _torch(q, k, v, omega)
    return partial(performer, *tensors)


def torch_performer_causal(q: np.ndarray, k: np.ndarray, v: np.ndarray, omega: np.ndarray) -> Call:
    """Causal Performer attention, chunk by chunk."""
    torch, (q, k, v, omega) = _torch(q, k, v, omega)
    return lambda: by_features_causal(*_performer_features(q, k, omega), v, torch)


def torch_linear(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool = False) -> Call:
    """Linear attention with elu + 1, if causal chunk by chunk."""
    torch, (q, k, v) = _torch(q, k, v)
    elu = torch.nn.functional.elu
    form = partial(by_features_causal, xp=torch) if causal else by_features
    return lambda: form(elu(q) + 1, elu(k) + 1, v)


def torch_pullback(
    form: Callable[..., Call],
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    d_out: np.ndarray,
    *others: np.ndarray,
    both: bool = False,
) -> Call:
    """The way back of a form above by autograd; from one way forth, unless `both` are wanted."""
    torch, (cotangent, *tensors) = _torch(d_out, q, k, v)
    inputs = [x.detach().requires_grad_() for x in tensors]
    forth = form(*inputs, *others)
    back = partial(torch.autograd.grad, inputs=inputs, grad_outputs=cotangent)
    if both:
        return lambda: back(forth())
    return partial(back, forth(), retain_graph=True)


def sdpa(torch: Any, q: Any, k: Any, v: Any, *, causal: bool = False) -> Any:
    """Exact attention of tensors by torch, whose fast form wants a batch of heads."""
    attention = torch.nn.functional.scaled_dot_product_attention
    return attention(q[None], k[None], v[None], is_causal=causal)[0]


def performer(q: Any, k: Any, v: Any, omega: Any) -> Any:
    """Performer attention of tensors: features below their maximum, plus a constant."""
    return by_features(*_performer_features(q, k, omega), v)


def _torch(*arrays: np.ndarray) -> tuple[Any, list[Any]]:
    torch = load("torch", "torch")
    return torch, [torch.as_tensor(x) for x in arrays]


def _performer_features(q: Any, k: Any, omega: Any) -> tuple[Any, Any]:
    return _performer(q, omega, -1), _performer(k, omega, (-2, -1))


def _performer(x: Any, omega: Any, axes: Any, epsilon: float = 1e-4) -> Any:
    x = x * x.shape[-1] ** -0.25
    exponent = x @ omega.mT
    largest = exponent.amax(axes, keepdim=True).detach()  # a constant, as in performer-pytorch
    half = (x * x).sum(-1, keepdim=True) / 2
    return omega.shape[-2] ** -0.5 * ((exponent - half - largest).exp() + epsilon)


# --- packages over torch; they expect one more axis, the batch -----------------------------------


def performer_pytorch(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, omega: np.ndarray, causal: bool = False
) -> Call:
    """Performer attention of performer-pytorch; if causal, the form without CUDA code."""
    _, (q, k, v, omega) = _torch(q[None], k[None], v[None], omega)
    package = load("performer_pytorch.performer_pytorch", "performer-pytorch")
    phi = partial(package.softmax_kernel, projection_matrix=omega)
    name = "causal_linear_attention_noncuda" if causal else "linear_attention"
    attention = getattr(package, name)
    return lambda: attention(phi(q, is_query=True), phi(k, is_query=False), v)[0]


def fast_transformers_linear(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Call:
    """Linear attention with elu + 1 of pytorch-fast-transformers; heads come after tokens."""
    attention = load("fast_transformers.attention", "pytorch-fast-transformers")
    masking = load("fast_transformers.masking", "pytorch-fast-transformers")
    torch, tensors = _torch(*(np.ascontiguousarray(x.swapaxes(0, 1)[None]) for x in (q, k, v)))
    n, d = q.shape[-2:]
    everything = masking.FullMask(n), *2 * [masking.LengthMask(torch.tensor([n]))]
    form = attention.LinearAttention(d)
    return lambda: form(*tensors, *everything)[0].transpose(0, 1)
