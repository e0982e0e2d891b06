"""Kernels that read keys, values, masks and rows otherwise: named, each in words of its numbers."""

from functools import partial

import numpy as np

from tests.judge.mistakes.causes.kernels import (
    BF16,
    ahead,
    draw,
    f32,
    fused,
    hide,
    named,
    scores,
    unnamed,
)

N, D = 64, 32
Q, K, V, _ = draw(61, heads=4, n=N, d=D)
S, FAR, J = scores(Q, K), ahead(N, N), np.arange(N)
I, CAUSAL = J[:, None], FAR <= 0  # noqa: E741
RIGHT, LSE = fused(hide(S, CAUSAL), V)
HIT = np.random.default_rng(62).random((4, N, 1)) < 0.3
BLOCKS = np.random.default_rng(63).random((8, 8)) < 0.5
BLOCKS |= np.eye(8, dtype=bool)
MASKS = np.array([40, 22, 30, 11])[:, None, None] > J  # of each member
HADAMARD = np.array([[(-1) ** (i & j).bit_count() for i in range(D)] for j in range(D)]) / D**0.5


def attend(s=S, v=V, seen=True):
    return fused(hide(s, seen), v)[0]


def tiled(mask, size=8):
    return np.repeat(np.repeat(mask, size, 0), size, 1)


def ring(size):
    slots = (N - 1 - J[:size]) // size * size + J[:size]
    return attend(scores(Q, K[:, slots]), V[:, slots], J[:size] <= I)


def padded():
    """As if a mask cut rows of the last tile: 16 of its 32 keys are there, others have score 0."""
    some, s = (np.pad(x[:, :48], ((0, 0), (0, 16), (0, 0))) for x in (K, V))
    return attend(scores(Q, some), s, (J < 32) | (I % 32 < 16))


def step(size, by):
    """Values of blocks of keys that begin so many rows apart."""
    return attend(v=V[:, by * (J // size) + J % size])


LOST = np.arange(D) % 10 < 7  # channels; those that are there
BIAS = np.random.default_rng(66).integers(-8, 9, (4, N, N)) / 4
SHORT = {"k": K[:, :48], "v": V[:, :48], "mask": np.random.default_rng(67).random((N, 48)) < 0.4}
LENGTHS, STARTS = (16, 37, 11), [0, 16, 53, 64]


def masked(size=None, row=48):
    """As if a mask of 48 keys had rows of another length, or an index that wraps."""
    flat = np.pad(SHORT["mask"], ((0, 0), (0, row - 48))).ravel()
    read = np.resize(flat[:size], (N, 48))
    return attend(S[..., :48], V[:, :48], read), SHORT


def few_channels(right=False, window=(None, None)):
    """Scores of few channels, in which a window may be too long by 1 as well."""
    left = N if window[0] is None else window[0] + (not right)
    s = scores(Q * (LOST | right), K)
    return attend(s, seen=(FAR <= 0) & (-left <= FAR)), {"causal": True, "window": window}


def lose_keys(right=False):
    """Rows have the bias of the first of their 32, and the last keys are lost."""
    bias = BIAS if right else BIAS[:, J // 32 * 32]
    return attend(S + bias, seen=(J < 56) | right), {"bias": BIAS}


def pack(right=False):
    """Log normalisers of packed sequences that are read as if they were padded."""
    of = np.repeat(np.arange(3), LENGTHS)
    out, lse = fused(hide(S, CAUSAL & (of == of[:, None])), V)
    at = (of * 4 + np.arange(4)[:, None]) * max(LENGTHS) + J - np.repeat(STARTS[:3], LENGTHS)
    read = np.pad(lse.ravel(), (0, 4 * N))[at]
    out, *arrays = (np.swapaxes(x, 0, 1) for x in (out, Q, K, V))
    options = {"causal": True, "cu_seqlens": STARTS, "lse": lse if right else read}
    return out, dict(zip("qkv", arrays, strict=True)) | options


def reweigh():
    """Weights of a tile of 16 keys, which takes rows of more than 32 columns to tell."""
    q, k, v, _ = draw(64, heads=4, n=N, d=2 * D)
    s = scores(q, k)
    out, _ = fused(np.where(HIT & (J >= 48), 0.2 * np.sin(9 * s), s), v)
    return out, {"q": q, "k": k, "v": v}


CASES = {
    "query i sees all keys but i + 1 to i + 8": lambda: (
        attend(seen=(FAR <= 0) | (FAR > 8)), {"causal": True}),
    "query i sees all keys up to its own but i - 15 to i - 1": lambda: (
        attend(seen=(FAR < -15) | (FAR == 0)), {"window": (15, 0)}),
    "a ring of 24 slots": lambda: (ring(24), {"window": (23, 0)}),
    "query i has the mask of query i // 2": lambda: (
        attend(seen=tiled(BLOCKS[np.arange(8) // 2])), {"mask": tiled(BLOCKS)}),
    "is read with stride 64 for queries, not 0": lambda: (
        attend(seen=np.stack([MASKS[(J + x) % 4, 0] for x in range(4)])), {"mask": MASKS}),
    "the last tile of keys is cut by rows": lambda: (padded(), {"k": K[:, :48], "v": V[:, :48]}),
    "values, or the output, are mixed by the": lambda: (BF16(attend() @ HADAMARD), {}),
    "queries, or keys, are mixed by the": lambda: (attend(scores(Q, BF16(K @ HADAMARD))), {}),
    "factors of their own: 0.5 (column 1), 2 (column 2)": lambda: (
        attend() * 2.0 ** (np.arange(D) % 3 - 1)[::-1], {}),
    "0.5 times its own and 0.5 times row i - 1": lambda: (
        BF16((attend()[:, np.maximum(J - 1, 0)] + attend()) / 2), {}),
    "values 32 to 63 are those of 16 to 47": lambda: (step(32, 16), {}),
    "the other key of each pair: keys 32 to 63": lambda: (attend(v=V[:, J ^ (J >= 32)]), {}),
    "a key counts twice in each wrong row": lambda: (
        attend(S + np.log(2) * (HIT & (FAR == 0)), seen=CAUSAL), {"causal": True}),
    "key 63 counts twice": lambda: (attend(S + np.log(2) * (HIT & (J == N - 1))), {}),
    "weights of keys 48 to 63 are others in each wrong row": reweigh,
    "if channels 7 to 9 of each 10 of q, or of k, do not enter the scores$": few_channels,
    "do not enter the scores, and the window reaches 20 keys": lambda: few_channels(
        window=(19, 0)),
    "in the scores: 0.5 (channel 3), 1.5 (channel 17), 3 (channel 18)": lambda: (
        attend(scores(Q * np.array([1] * 3 + [0.5] + [1] * 13 + [1.5, 3] + [1] * 13), K)), {}),
    "the mask is read at a linear index, 48 i + j, that wraps at 2048": lambda: masked(2048),
    "rows of 48 numbers, where they are padded to 77": lambda: masked(row=77),
    "query i has the bias of query 32 (i // 32), and keys 56 to 63 are left out": lose_keys,
}  # fmt: skip


def merged():
    """The output is the merge of parts with log normalisers of other rows."""
    parts = slice(40), slice(40, N)
    lse = np.stack([fused(S[..., j], V[:, j])[1] for j in parts])
    outs = [np.exp(S[..., j] - x[..., None]) @ V[:, j] for j, x in zip(parts, lse, strict=True)]
    lse = np.roll(lse, 1, -1)
    weights = np.exp(lse - np.logaddexp.reduce(lse, 0))
    out = np.sum(weights[..., None] * outs, 0)
    return out, {"part_out": f32(outs), "part_lse": lse, "part_keys": [0, 40, N]}


def one_more():
    """Stale numbers, with their log normalisers, that are no mean of values of the keys."""
    stale = np.random.default_rng(64).standard_normal((4, N, D)) / 2
    out, lse = fused(hide(S, np.abs(FAR) < 8), V)
    more = np.logaddexp(lse, lse - 1)
    out = np.exp(lse - more)[..., None] * out + np.exp(lse - 1 - more)[..., None] * stale
    return out, {"lse": more, "window": (7, 7)}


CASES |= {
    "parts are merged as they are given... lse is that of query i - 1": merged,
    "agrees if another part, with 0.27": one_more,
    "lse is packed, (heads, 64), and read as padded, (sequences, heads, 37)": pack,
    "lse is that of query i xor 7": lambda: (RIGHT, {"lse": LSE[:, J ^ 7], "causal": True}),
    "lse is that of query i + 1 (cyclically), but only in queries 32 to 63": lambda: (
        RIGHT, {"lse": LSE[:, (J + (J >= 32)) % N], "causal": True}),
}  # fmt: skip


def given(make):
    out, options = make()
    return {"q": Q, "k": K, "v": V} | options | {"out": BF16(out)}


test_what_is_read_otherwise = named({x: (partial(given, y), x) for x, y in CASES.items()})

test_their_right_twins = unnamed({
    f"right {i}": (partial(given, partial(x, **y)), "") for i, (x, y) in enumerate((
        (few_channels, {"right": True}), (few_channels, {"right": True, "window": (19, 0)}),
        (masked, {}), (lose_keys, {"right": True}), (pack, {"right": True}),
    ))
})  # fmt: skip
