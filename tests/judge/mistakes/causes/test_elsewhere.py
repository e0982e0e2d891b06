"""Inputs, tiles and rows that are taken from elsewhere, or changed first: each is named."""

from functools import partial

import numpy as np

from refattn.judge.rounding.formats import FORMATS
from tests.judge.mistakes.causes.kernels import (
    BF16,
    ahead,
    draw,
    fused,
    hide,
    named,
    posing,
    scores,
    unnamed,
)

N = 96
Q, K, V, _ = draw(41, heads=3, n=N)
S, FAR, J = scores(Q, K), ahead(N, N), np.arange(N)
CAUSAL = hide(S, FAR <= 0)
BIAS = BF16(np.random.default_rng(42).standard_normal((N, N)))
SCALES = np.repeat(np.array([0.5, 2.0, 1.0, 0.25, 1.5, 0.75]), 16)[:, None]
LATE = np.concatenate([SCALES[:16], SCALES[:-16]])
E4M3, CUT = (FORMATS[x].round for x in ("float8_e4m3fn", "tfloat32-truncated"))


given, attention = posing(Q, K, V)


def rotated(x, base=1e4, turn=1):
    """Halves of the columns are turned by angles."""
    a, b = np.split(x, 2, -1)
    z = (a + 1j * b) * np.exp(1j * turn * J[:, None] * base ** (-np.arange(8) / 8))
    return BF16(np.concatenate([z.real, z.imag], -1))


def take(x, other, j):
    x = x.copy()
    x[:, j] = other
    return x


def spilled(factor):
    """The last tile has 12 queries too many."""
    out = fused(CAUSAL, V)[0]
    out[1:, :12] = fused(factor * scores(Q[1:, :12], K[:-1]), V[:-1])[0]
    return given(out, causal=True)


def cut():
    arrays = [np.float32(x) for x in np.random.default_rng(5).standard_normal((3, 3, N, 16))]
    q, k, v = map(CUT, arrays)
    w = np.exp(scores(q, k))
    out = np.float32(w @ v / np.sum(w, -1, keepdims=True))
    return dict(zip("qkv", arrays, strict=True)) | {"out": out, "dtype": "float32"}


def scaled(of_k, of_v):
    k, v = E4M3(K), E4M3(V)
    options = {"k_scale": SCALES[None], "v_scale": SCALES[None]}
    return given(fused(scores(Q, of_k * k), of_v * v)[0], (Q, k, v), **options)


def padded(mask, used):
    """Batch members of several lengths, with the mask that is declared and the one that is used."""
    out = fused(hide(S, used), V)[0]
    return given(out[:, None], [x[:, None] for x in (Q, K, V)], mask=mask[:, None])


LENGTHS = np.array([96, 80, 61])[:, None, None]


def of_lengths(level, length=LENGTHS):
    """Causal attention whose last query is level with some key."""
    return (length > J) & (J[:, None] + level - N >= J)


def of_eight(order):
    q, k, v, _ = draw(7, heads=8, n=48)
    return given(fused(scores(q, k[order]), v)[0], (q, k, v))


EIGHT = {
    "other heads: head 0 from head 1, ... (and 4 more heads)": [1, 0, 3, 2, 5, 4, 7, 6],
    "the next head": [1, 2, 3, 4, 5, 6, 7, 0],
    "the first head": [0] * 8,
}


CASES = {
    "one diagonal": (lambda: padded(of_lengths(LENGTHS), of_lengths(96)),
        "query i sees keys up to i, but none after the last of the mask"),
    "diagonals of others": (lambda: padded(of_lengths(LENGTHS + 10),
        of_lengths(np.roll(LENGTHS, -1, 0) + 10)),
        "query i sees keys up to i - 6 in batch member 0, i - 25 in batch member 1, i + 10 in"),
    "diagonals of their own": (
        lambda: padded(of_lengths(LENGTHS), of_lengths(LENGTHS // 2 * 3 - 40)),
        "the mask ends 8 keys too late in batch member 0, 11 keys too early in batch member 2"),
    "lengths of others": (lambda: padded(of_lengths(N, LENGTHS - 9),
        of_lengths(N, np.roll(LENGTHS, 1, 0) - 9)),
        "the mask is read from the batch member before"),
    "rotated twice": (lambda: attention(hide(scores(rotated(Q), rotated(K)), FAR <= 0),
        causal=True), "queries and keys are rotated (RoPE) once more, by base 10000 in halves"),
    "rows beyond the end": (lambda: spilled(1), "rows 96 to 107 of a head, past its end, "
        "overwrite the first rows of the next head (their q is read from the next head)"),
    "empty rows beyond the end": (lambda: spilled(0), "(their q is 0)"),
    "v is k": (lambda: attention(CAUSAL, take(V, K[:, 32:64], slice(32, 64)), causal=True),
        "k is used as v, but only for keys 32 to 63"),
    "v of the tile before": (lambda: attention(S, take(V, V[:, 32:48], slice(48, 64))),
        "tiles are read from elsewhere: values 48 to 63 are those of 32 to 47"),
    "cut": (cut, "queries, keys and values are cut to TF32, not rounded, first"),
    "late v_scale": (lambda: scaled(SCALES, LATE), "key j has the v_scale of key j - 16"),
    "a bias of keys": (lambda: attention(S + 0.05 * np.random.default_rng(0).standard_normal(N)),
        "a bias by j is added to the scores, -0.1"),
    "one row of the bias": (lambda: attention(hide(S + BIAS[:1], FAR <= 0), bias=BIAS,
        causal=True), "query i has the bias of query 0"),
    **{x: (lambda order=order: of_eight(order), f"agrees if keys are read from {x}$")
        for x, order in EIGHT.items()},
    "averaged": (lambda: given(np.mean(fused(S, V)[0][[[0, 1, 2], [1, 0, 2]]], 0)),
        "outputs are added: head 0 is 0.5 times head 0 + 0.5 times head 1, head 1 is 0.5"),
}  # fmt: skip
FAST = ("rotated twice", "v is k", "one row of the bias", "averaged")
test_what_is_from_elsewhere_is_named = named(CASES, FAST)
NONE = {
    "values of nowhere": lambda: attention(
        S, take(V, V[:, np.random.default_rng(8).permutation(np.arange(32, 64))], slice(32, 64))
    ),
    "rotated by another base": lambda: attention(scores(rotated(Q, 30.0), rotated(K, 30.0))),
    "a row of another bias": lambda: attention(S + BIAS[:, :1].T, bias=BIAS),
    "first rows of nowhere": lambda: given(
        take(fused(S, V)[0], V[:, 63:51:-1] * np.roll(V[:, 12:24], 5, -1), slice(12))
    ),
    "noise": lambda: given(fused(S, V)[0] + 0.1 * V),
    # All errors are small, but those of roundings are not alike in all rows.
    "values times numbers": lambda: attention(
        S, V * (1 + 0.01 * np.random.default_rng(9).standard_normal((N, 1)))
    ),
    "a power": lambda: given(np.float32((x := fused(S, V)[0]) * np.abs(x) ** 0.02)),
}
test_nothing_is_named_that_is_not_there = unnamed({x: (y, "agrees if") for x, y in NONE.items()})
ROLLED = np.roll(V, -1, 1)
SHARES = {
    "too large": 1.3 * ROLLED,
    "of two": ROLLED + np.roll(V, 1, 1) - V,
    "less": 2 * V - ROLLED,
}
test_no_key_counts_more_than_wholly_or_less_than_nothing = unnamed(
    {x: (partial(attention, CAUSAL, y, causal=True), "of its weight") for x, y in SHARES.items()}
)
