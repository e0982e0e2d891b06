"""Scales of arrays in 8 bits: what their shapes mean."""

import re

import numpy as np
import pytest

from refattn.arrays.stored import expand_scale, list_types, storage_type

B, H, N, D = 2, 3, 8, 4
SHAPES = {"bhnd": (B, H, N, D), "bnhd": (B, N, H, D)}
HEAD, TOKEN, WHOLE = np.s_[..., None, None], np.s_[..., None], np.s_[...]
MEANT = {  # in bhnd: shapes, and where axes are to be added
    (): WHOLE, (1,): WHOLE, (1, 1, 1, 1): WHOLE, (B, H): HEAD, (H,): HEAD, (B, H, 1): TOKEN,
    (B, H, 1, 1): WHOLE, (H, 1, 1): WHOLE, (B, H, N): TOKEN, (H, N): TOKEN, (B, H, N, 1): WHOLE,
    (B, H, N, D): WHOLE, (B, H, 1, D): WHOLE, (1, H, 1, D): WHOLE, (B, H, 4): TOKEN,
    (B, H, 2, 1): WHOLE, (B, H, N, 2): WHOLE,
}  # fmt: skip


def with_repeats(x):
    """Blocks of tokens and of columns, each as often as it is long."""
    for axis, length in ((-2, N), (-1, D)):
        if x.ndim == 4 and x.shape[axis] not in (1, length):
            x = np.repeat(x, length // x.shape[axis], axis)
    return np.broadcast_to(x, SHAPES["bhnd"])


@pytest.mark.parametrize("shape", MEANT, ids=str)
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
def test_scales_of_every_shape(shape, layout):
    """In bnhd those of tokens may have heads first, as there; those of all axes may not."""
    scale = 1.0 + np.arange(np.prod(shape, dtype=int)).reshape(shape)
    whole = with_repeats(scale[MEANT[shape]])
    if layout == "bnhd":
        whole = np.swapaxes(whole, 1, 2)
        if len(shape) == 4 or shape == (H, 1, 1):
            scale = np.swapaxes(scale, -3, -2)
    found = expand_scale("k", scale, SHAPES[layout], layout)
    np.testing.assert_array_equal(np.broadcast_to(found, SHAPES[layout]), whole)


def test_tokens_before_heads():
    scale = 1.0 + np.arange(B * N * H).reshape(B, N, H)
    found = expand_scale("k", scale, SHAPES["bnhd"], "bnhd")
    np.testing.assert_array_equal(found, scale[..., None])


def test_arrays_without_heads():
    scale = 1.0 + np.arange(N)
    np.testing.assert_array_equal(expand_scale("k", scale, (N, D)), scale[:, None])
    blocks = expand_scale("k", scale[:2], (N, D))
    np.testing.assert_array_equal(blocks[:, 0], np.repeat(scale[:2], N // 2))
    np.testing.assert_array_equal(expand_scale("k", scale[None, :D], (N, D)), scale[None, :D])


def test_scales_that_may_be_two_things():
    """As many heads as tokens: the numbers decide whether it makes a difference."""
    words = (
        "`k_scale` of shape (3,) may hold one for each token or one for each head: write it with "
        "all 3 axes of `k`"
    )
    with pytest.raises(ValueError, match=re.escape(words)):
        expand_scale("k", np.arange(3.0), (3, 3, 4))
    same = expand_scale("k", np.ones(3), (3, 3, 4))
    np.testing.assert_array_equal(np.broadcast_to(same, (3, 3, 4)), 1.0)


@pytest.mark.parametrize(
    ("types", "expected"),
    [
        ({"q": "bfloat16", "v": "int8"}, "bfloat16"),
        ({"q": "int8", "v": "float16", "out": "bfloat16"}, "float16"),
        ({"q": "int8", "v": "int8", "out": "bfloat16"}, "bfloat16"),
        ({"q": "int8", "v": "int8"}, "float32"),
        ({"q": "bfloat16", "weights": "float8_e4m3fn"}, "float8_e4m3fn"),
    ],
)
def test_what_weights_are_rounded_to(types, expected):
    assert storage_type(types) == expected


def test_types_by_array():
    assert list_types(None, ["float32"]) == {}
    assert list_types("float32", ["float32"]) == dict.fromkeys("qkv", "float32")
    assert list_types({"k": "int8", "out": "float32"}, ["float32"]) == {
        "k": "int8",
        "out": "float32",
    }
