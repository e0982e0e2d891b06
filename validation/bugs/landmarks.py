"""Nyström attention: nystrom-attention, and Nyströmformer in transformers."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

from ..benchmarks.peers import load
from .record import Number, error, real, taking


def nystrom(q: Any, k: Any, v: Any, *, landmarks: int = 8, mask: Any = None) -> Any:
    """The layer of nystrom-attention without weights of its own, on heads before tokens."""
    torch, (b, h, n, d) = load("torch", "torch"), q.shape
    package = load("nystrom_attention", "nystrom-attention")
    layer = package.NystromAttention(
        3 * h * d, dim_head=d, heads=h, num_landmarks=landmarks, residual=False
    )
    layer.to_qkv = torch.nn.Identity()
    layer.to_out = torch.nn.Identity()
    x = torch.cat([y.transpose(1, 2).reshape(b, n, h * d) for y in (q, k, v)], -1)
    with torch.no_grad():
        return layer(x, mask=mask).reshape(b, n, h, d).transpose(1, 2)


def _batch() -> tuple[Number, ...]:
    torch = load("torch", "torch")
    arrays = [torch.asarray(x) for x in real()]
    numbers = []
    for landmarks in (64, 16):
        both = nystrom(*arrays, landmarks=landmarks)
        alone = torch.cat(
            [nystrom(*(x[i : i + 1] for x in arrays), landmarks=landmarks) for i in range(2)]
        )
        numbers.append(
            Number(
                f"change of outputs when the two members of a batch are called one by one, "
                f"relative, real tensors, {landmarks} landmarks",
                error(both, alone),
                "below 1e-5, rounding",
                1e-3,
            )
        )
    return tuple(numbers)


def _padding() -> tuple[Number, ...]:
    torch = load("torch", "torch")
    arrays = [torch.asarray(x) for x in real()]
    everything = torch.ones(2, 128, dtype=torch.bool)
    plain, masked = (nystrom(*arrays, landmarks=48, mask=x) for x in (None, everything))
    return (
        Number(
            "error of a call without a mask, compared with a call whose mask is all True, real "
            "tensors, 128 tokens, 48 landmarks",
            error(plain, masked),
            "below 1e-5, rounding",
            1e-3,
        ),
    )


def _transformers(landmarks: int) -> Any:
    """A layer of Nyströmformer for 128 tokens, without its convolution."""
    torch = load("torch", "torch")
    models = load("transformers.models.nystromformer.modeling_nystromformer", "transformers")
    layer = models.NystromformerSelfAttention(_configuration(landmarks)).eval()
    layer.query, layer.key, layer.value = taking(torch, range(3), 128, 3)
    layer.conv_kernel_size = None
    return layer


def _configuration(landmarks: int, **options: Any) -> Any:
    return load("transformers", "transformers").NystromformerConfig(
        hidden_size=128,
        num_attention_heads=4,
        num_landmarks=landmarks,
        segment_means_seq_len=128,
        attention_probs_dropout_prob=0.0,
        **options,
    )


def _side_by_side() -> Any:
    torch = load("torch", "torch")
    flat = [x.transpose(0, 2, 1, 3).reshape(2, 128, 128) for x in real()]
    return torch.asarray(np.concatenate(flat, axis=-1))


def _transformers_mask() -> tuple[Number, ...]:
    torch = load("torch", "torch")
    x = _side_by_side()
    mask = torch.zeros(2, 1, 1, 128)
    mask[..., 96:] = torch.finfo(torch.float32).min
    edited = copy.deepcopy(x)
    edited[:, 96:] = x[:, 95:96]
    numbers = []
    with torch.no_grad():
        for landmarks, words, bound in ((32, "", 1e-3), (128, ", its exact form", None)):
            layer = _transformers(landmarks)
            before, after = (layer(y, mask)[0][:, :96] for y in (x, edited))
            numbers.append(
                Number(
                    "change of the outputs of 96 unmasked tokens when the 32 masked ones are "
                    f"replaced, relative, real tensors, {landmarks} landmarks{words}",
                    error(after, before),
                    "0: these tokens do not see the masked ones",
                    bound,
                )
            )
    return tuple(numbers)


def _transformers_batch() -> tuple[Number, ...]:
    torch = load("torch", "torch")
    x, numbers = _side_by_side(), []
    with torch.no_grad():
        for landmarks in (64, 32):
            layer = _transformers(landmarks)
            both = layer(x)[0]
            alone = torch.cat([layer(x[i : i + 1])[0] for i in range(2)])
            numbers.append(
                Number(
                    f"change of outputs when the two members of a batch are called one by one, "
                    f"relative, real tensors, {landmarks} landmarks",
                    error(both, alone),
                    "below 1e-5, rounding",
                    1e-3,
                )
            )
    return tuple(numbers)


def _transformers_option() -> tuple[Number, ...]:
    models = load("transformers.models.nystromformer.modeling_nystromformer", "transformers")
    try:
        models.NystromformerSelfAttention(_configuration(32, inv_coeff_init_option=True))
    except (TypeError, AttributeError) as reason:
        raised, words = 1.0, f"{type(reason).__name__}: {reason}"
    else:
        raised, words = 0.0, "nothing"
    return (Number(f"exceptions from making a layer with the option; {words}", raised, "0", 0.5),)
