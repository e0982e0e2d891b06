"""Slips of kernels, written as loops: each is named, and its neighbours are not."""

import math

import numpy as np

from refattn.judge.rounding.formats import FORMATS
from tests.judge.mistakes.causes.kernels import (
    BF16,
    LOG2E,
    ahead,
    draw,
    fused,
    hide,
    in_tiles,
    named,
    posing,
    scores,
    unnamed,
)

N, M = 48, 80
Q, K, V, _ = draw(11, n=N, m=M)
Q = BF16(1.5 * Q)
S = scores(Q, K)
FAR, ROW, J = ahead(N, M), np.arange(N)[:, None], np.arange(M)
CAUSAL = FAR <= 0
MASK = np.random.default_rng(8).random((N, M)) < 0.7
BIAS = BF16(np.random.default_rng(9).standard_normal((N, M)))
SHOWN = np.arange(M) < 40
SINKS = np.array([1.0, 2.5])
CAPPED = BF16(6 * Q), K, V


given, attention = posing(Q, K, V)


def in_order(order, forget):
    """Tiles of 16 keys in some order; the sum and the maximum of the first may be forgotten."""
    out = np.zeros((2, N, 16))
    for head in range(2):
        for i in range(N):
            acc, total, top, count = np.zeros(16), 0.0, -math.inf, 0
            for j in order(np.arange(0, M, 16)):
                s = hide(S[head, i, j : j + 16], FAR[i, j : j + 16] <= 0)
                if np.max(s) == -math.inf:
                    continue
                again = forget and count == 1
                new = np.max(s) if again else max(top, np.max(s))
                shrink = 1.0 if again else math.exp(top - new)
                w = np.exp(s - new)
                total = np.sum(w) + (0.0 if again else shrink * total)
                acc, top, count = shrink * acc + BF16(w) @ V[head, j : j + 16], new, count + 1
            out[head, i] = acc / total
    return given(BF16(out), causal=True)


def cut(most):
    """Weights over the maximum of the tiles before are at most so large in the output."""
    top = np.max(S[..., :16], -1, keepdims=True)
    over = {"over": lambda old, new, kept: old, "late": True}
    return given(in_tiles(S, V, 16, start=top, most=most, **over))


def lagging(bits, most=math.inf, over_new=False):
    """The maximum is kept if it grows by a few bits; weights are over it, or over the new one."""
    keep = {"keep": lambda old, new: np.where(new - old > bits * math.log(2), new, old)}
    over = {"over": lambda old, new, kept: new if over_new else kept}
    return given(in_tiles(2 * S, V, 16, most=most, **keep, **over), (2 * Q, K, V))


def starting_at_zero():
    """Tiles of 16 keys, the last first; scores of a head are small where this one is hidden."""
    q, k = Q.copy(), K.copy()
    q[0, :, 0], k[0, :, 0] = 24, -24
    s = hide(scores(q, k), FAR <= 0)
    out, _ = fused(s, V)
    seen = FAR[:, 64] <= 0
    small = np.all(BF16(np.exp(s[0])) < 2.0**-126, -1)
    out[0, ~seen & small] = 0
    return given(out, (q, k, V), causal=True)


def summed_in_float16():
    """Some values are large, and so are sums of products; others lose digits."""
    v, half = V.copy(), FORMATS["float16"].round
    v[..., [3, 9]] += 4000
    v = BF16(v)
    out = in_tiles(S, v, 16, each=lambda x, _: half(x))
    out[1, :4, 0] += 0.2  # another error, of rows that hold numbers
    return given(out, (Q, K, v))


def vanishing(to):
    """The maximum starts at 0, and weights in a narrow type are nearly 0."""
    q, k = Q.copy(), K.copy()
    q[..., 0], k[..., 0] = 8, BF16(-46.5)
    s = scores(q, k)
    w = FORMATS["float32"].round(np.exp(np.minimum(s, 0)))
    total = np.sum(w, -1, keepdims=True)
    out = np.divide(FORMATS[to].round(w) @ V, total, where=total > 0, out=np.zeros((2, N, 16)))
    return given(BF16(out), (q, k, V))


def merged(weigh):
    """Outputs for the keys before the first query and for the others, by functions of lse."""
    parts = [(S[..., : M - N], V[:, : M - N]), (hide(S, CAUSAL)[..., M - N :], V[:, M - N :])]
    (x, a), (y, b) = (fused(*part) for part in parts)
    share = 1 / (1 + weigh(b - a))[..., None]
    return given(BF16(share * x + (1 - share) * y), causal=True)


def padded(count):
    s = np.concatenate([S, np.zeros((2, N, count))], -1)
    return given(fused(s, np.concatenate([V, np.zeros((2, count, 16))], 1))[0])


def padded_by(score):
    s = np.concatenate([S, np.full((2, N, 1), score)], -1)
    return given(fused(s, np.concatenate([V, np.zeros((2, 1, 16))], 1))[0])


def overflowing(most):
    """Scores beyond some make tanh NaN, in rows that have one."""
    q = CAPPED[0].copy()
    q[:, ::4] = BF16(np.linspace(5, 100, 12)[:, None] * q[:, ::4])
    s = scores(q, K)
    out, _ = fused(2 * np.tanh(s / 2), V)
    out[np.any(np.abs(s / 2) > most, -1)] = np.nan
    return given(out, (q, K, V), softcap=2.0)


def sinking(sinks, more):
    s = np.concatenate([S, (sinks + more)[..., None]], -1)
    return given(fused(s, np.pad(V, ((0, 0), (0, 1), (0, 0))))[0], sinks=SINKS)


def spoiled():
    """NaN in all rows that do not see all keys: those of the second batch member."""
    arrays = [np.stack([x, x[::-1]]) for x in (Q, K, V)]
    lengths = np.stack([SHOWN | True, SHOWN])[:, None, None]
    out, _ = fused(hide(scores(*arrays[:2]), lengths), arrays[2])
    out[1] = np.nan
    return given(out, arrays, mask=lengths)


def zeroed(rows):
    out, _ = fused(hide(S, SHOWN), V)
    return given(out * rows(ROW), mask=np.broadcast_to(SHOWN, (N, M)))


def strided(x, at):
    return x.reshape(-1)[np.minimum(at, x.size - 1)]


def tree(start, row):
    """Each query sees some of the last keys, which stand at the same places as the queries."""
    mask = MASK.copy()
    mask[:, : M - N] = True
    last = mask[:, M - N :]
    read = np.concatenate([mask[:, : M - N], strided(last, start + ROW * row + J[:N])], -1)
    return attention(hide(S, read), mask=mask)


def filled(score, size=16, left=None, lse=False):
    """Hidden keys have a score, in tiles that are computed."""
    seen = CAUSAL if left is None else CAUSAL & (-left <= FAR)
    tiles = np.zeros_like(seen)
    for i in range(0, N, size):
        for j in range(0, M, size):
            at = np.s_[i : i + size, j : j + size]
            tiles[at] = seen[at].any()
    out, of_rows = fused(hide(np.where(seen, S, score), tiles), V)
    options = {"causal": True} | ({} if left is None else {"window": (left, 0)})
    return given(out, **options, **({"lse": of_rows} if lse else {}))


TANH = scores(*CAPPED[:2]) / 8
CASES = {
    "one by one": (lambda: given(in_tiles(S, V, 1, 0, 0)),
        "the running sums are not rescaled when the maximum grows (one key"),
    "reset": (lambda: in_order(reversed, True),
        "restart in the second tile, the output does not (tiles of 16 keys, the last first)"),
    "reset, first first": (lambda: in_order(list, True),
        "restart in the second tile, the output does not (tiles of 16 keys)"),
    "cut weights": (lambda: cut(448 / 2**8), "earlier tiles (16 keys) are clipped at 448 / 2^8"),
    "kept maximum": (lambda: lagging(4, over_new=True),
        "is kept if it grows by 4 bits or less (16 keys), but weights are relative to the new one"),
    "cut over a kept maximum": (lambda: lagging(4, 448 / 2**8),
        "is kept if it grows by 4 bits or less (16 keys), and weights relative to it are clipped"),
    "hidden first": (starting_at_zero, "maximum is 0 after a first tile that is hidden"),
    "overflow of the output": (summed_in_float16, "the output overflows float16 before it is"),
    "vanishing": (lambda: vanishing("bfloat16"),
        "the running maximum starts at 0, so small weights vanish (weights in bfloat16)"),
    "base of lse": (lambda: merged(lambda x: np.exp(LOG2E * x)),
        "keys before the first query (0 to 31) and the other keys are merged with weights e^lse, "
        "where lse is in base 2"),
    "padding": (lambda: padded(19), "added to the sum of e^score (like that many keys"),
    "cap of nothing": (lambda: given(fused(TANH * np.tanh(TANH), V)[0], CAPPED, softcap=8.0),
        "the cap is (s / cap) tanh(s / cap), not cap tanh(s / cap)"),
    "cap that overflows": (lambda: overflowing(88.7), "computed from e^(s / cap) in float32"),
    "cap that overflows first": (lambda: overflowing(44.4), "computed from e^(2 s / cap) in float"),
    "sink of the row": (lambda: sinking(np.take(SINKS, ROW.T % 2), 0 * S[..., 0]),
        "in query i, head g of each 2 has the sink that is number i % 2"),
    "0 for hidden keys": (lambda: filled(0), "keys in tiles of 16 with a visible key have the sc"),
    "a number for hidden keys": (lambda: filled(-5.3, 32, 20),
        "hidden keys in tiles of 32 with a visible key have the score -5."),
    "a number that lse tells": (lambda: filled(-3.3, lse=True),
        "hidden keys in tiles of 16 with a visible key have the score -3.300"),
    "keys read as 0": (lambda: attention(hide(np.where(J < 64, S, 0) + BIAS, CAUSAL),
        V * (J < 64)[:, None], bias=BIAS, causal=True),
        "keys 64 to 79 are read as 0 (score 0, value 0)"),
    "NaN that is hidden": (spoiled, "keys or values that the mask hides are NaN, and 0 times NaN"),
    "mask of queries": (lambda: zeroed(lambda i: i < 40), "the mask of keys also hides queries"),
    "mask of other rows": (
        lambda: attention(hide(S, strided(MASK, ROW * N + J)), mask=MASK),
        f"the mask is read with rows of {N} numbers, not {M}"),
    "mask of one word of two": (lambda: tree(0, 32),
        f"the mask of the last {N} keys is read with rows of 32 numbers, not {N}"),
}  # fmt: skip
test_slips_are_named = named(CASES, ("cap of nothing",), profile="flash")


def spoiled_elsewhere():
    arrays = spoiled()
    arrays["out"][0, 0, :3] = np.nan
    return arrays


NEIGHBOURS = {
    "right in any order": (lambda: in_order(reversed, False), "restart"),
    "cut at less": (lambda: cut(1.2), "are cut at"),
    "other NaN": (spoiled_elsewhere, "the mask hides are NaN"),
    "zeros from elsewhere": (lambda: zeroed(lambda i: i < 30), "the mask of keys also hides"),
    "a mask from elsewhere": (lambda: tree(7, 32), "is read with"),
    "another mask": (lambda: attention(hide(S, ~MASK[::-1]), mask=MASK), "is read with"),
    "a sink that is small": (lambda: padded_by(-0.7), "the running maximum"),
}
test_slips_are_not_named_for_what_resembles_them = unnamed(NEIGHBOURS, profile="flash")
