"""Places and maps that are inferred: each mistake is named, and numbers of nowhere are not."""

import re
from functools import partial
from itertools import pairwise

import numpy as np
import pytest

from refattn import softmax_attention
from refattn.judge import verify
from refattn.judge.rounding.formats import FORMATS

from refattn.judge.mistakes.causes import trials  # isort: skip
from refattn.judge.mistakes.causes.sampled import Rows  # isort: skip
from refattn.judge.mistakes.causes.wrong_rows import Sampled  # isort: skip
from refattn.judge.mistakes.operators import intervals  # isort: skip
from tests.judge.mistakes.causes.kernels import (
    BF16,
    ahead,
    backward,
    draw,
    f32,
    fused,
    hide,
    in_tiles,
    named,
    scores,
    unnamed,
)

N = 96
Q, K, V, G = draw(51, heads=4, n=N)
S, J, FAR = scores(Q, K), np.arange(N), ahead(N, N)
ROW = J[:, None]
CAUSAL, HEAD = FAR <= 0, np.arange(4)[:, None, None]
BIAS = BF16(np.random.default_rng(52).standard_normal((4, N, N)))
SLOPES = 2.0 ** -(2 * np.arange(1, 5))[:, None]
MASK = J < 80


def given(s, v=V, factor=1, **options):
    out, lse = fused(s, v)
    more = options.pop("more_lse", None)
    arrays = {"q": Q, "k": K, "v": V, "out": BF16(factor * out), "dtype": "bfloat16"}
    return arrays | ({} if more is None else {"lse": lse + more}) | options


def seen(shown):
    return given(hide(S, shown), causal=True)


def merged(lost):
    """Weights of four parts are relative to the maximum of each, in some of them."""
    parts = S.reshape(4, N, 4, 24)
    own = np.max(parts, -1, keepdims=True)
    kept = np.where(lost, np.max(own, -2, keepdims=True) - own, 0)
    return given((parts + kept).reshape(S.shape))


def halves(of_values, of_weights):
    w = np.exp(S)
    out = (w * of_values) @ V / np.sum(w * of_weights, -1, keepdims=True)
    return given(S, mask=MASK) | {"out": BF16(out)}


def quantised(levels, axes):
    x = given(S)
    step = np.max(np.abs(x["out"]), axes, keepdims=True) / levels
    return x | {"out": BF16(np.rint(x["out"] / step) * step)}


def spoiled():
    out = given(hide(S, MASK), mask=MASK)["out"].copy()
    v = V.copy()
    v[:, 80:, 5:9] = out[..., 5:9] = np.nan
    return given(S, mask=MASK) | {"v": v, "out": out}


def memory(lay, count, stride=N):
    """Each head reads so many rows, which begin a stride after those of the head before."""
    k, v = (lay(x)[stride * HEAD[..., 0] + np.arange(count)] for x in (K, V))
    return scores(Q, k), v


def past_sequences():
    """Three sequences, one after another, of which each reads 8 rows too many."""
    cuts, pad = [0, 44, 70, N], ((0, 8), (0, 0))
    k, v = (np.pad(x.reshape(-1, 16), pad) for x in (K, V))
    out = []
    for a, b in pairwise(cuts):
        at = N * HEAD[..., 0] + np.arange(a, b + 8)
        out.append(fused(scores(Q[:, a:b], k[at]), v[at])[0])
    packed = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), np.array(cuts))
    arrays = given(S) | {"out": BF16(np.concatenate(out, 1))}
    return arrays | {x: np.swapaxes(arrays[x], 0, 1) for x in ("q", "k", "v", "out")} | packed


def padded(x, to):
    """Rows of an array are padded, and read as if they were not."""
    return np.pad(x, ((0, 0), (0, 0), (0, to - N))).reshape(4, -1)[:, : x[0].size].reshape(x.shape)


def paged(x):
    """Keys 0 to 31 of head 1 were written to head 0."""
    moved = x.copy()
    moved[:2, :32] = x[1, :32], 0 * x[1, :32]
    return moved


def in_turn(parts):
    """Part j % parts of the keys; log normalisers to base 2 are taken for natural ones."""
    own = np.log(np.sum(np.exp(S).reshape(4, N, -1, parts), 2))
    return given(S + (np.log2(np.e) - 1) * np.tile(own, N // parts))


def in_8_bits():
    out = in_tiles(2 * S, V, 32, round=FORMATS["float8_e4m3fn"].round)
    return given(2 * S) | {"q": 2 * Q, "out": out}


def smoothed(size):
    tiles = Q.reshape(4, -1, size, 16)
    means = np.mean(tiles, 2, keepdims=True)
    return given(scores((tiles - means + means[:, :1]).reshape(Q.shape), K))


def in_columns(wrong):
    """What is wrong is so in columns 8 to 15 alone."""
    return given(S) | {"out": np.concatenate([given(S)["out"][..., :8], wrong[..., 8:]], -1)}


def members(shown, mask):
    """Two batch members of two heads, with masks of their own."""
    q, k, v, s = (x.reshape(2, 2, *x.shape[1:]) for x in (Q, K, V, S))
    out, _ = fused(hide(s, shown[:, None, None]), v)
    mask = mask[:, None, None]
    return {"q": q, "k": k, "v": v, "out": BF16(out), "mask": mask, "dtype": "bfloat16"}


def chosen():
    """The first of the keys that a query chose is taken for key 0."""
    some = np.argsort(np.random.default_rng(54).random((4, N, N - 1)), -1)[..., :8] + 1
    read = np.where(np.arange(8) == 0, 0, some)
    shown = np.zeros((4, N, N), bool)
    np.put_along_axis(shown, read, True, -1)
    return given(hide(S, shown), indices=some.astype(np.int32))


def late():
    """One head of a retention is not causal."""
    decay = np.array([0.9, 0.95, 0.98, 0.99])
    w = decay[:, None, None] ** np.abs(FAR) * ((HEAD == 2) | CAUSAL)
    out = BF16(0.25 * (Q @ np.swapaxes(K, 1, 2)) * w @ V)
    arrays = {"q": Q, "k": K, "v": V, "out": out, "dtype": "bfloat16"}
    return arrays | {"decay": decay, "estimator": "retention"}


def by_sums(kept, weight=1.0):
    """Weights have factors, and are divided by the sum of those that are kept."""
    w = weight * np.exp(S)
    return given(S) | {"out": BF16(w @ V / (w @ np.broadcast_to(kept, (N, 16))))}


def stale():
    """Values of keys 32 to 63 meet the weights before them, over the maximum before."""
    top = np.maximum.accumulate(np.max(S.reshape(4, N, 3, 32), -1), -1)
    w = np.exp(S)
    w[..., 32:64] = np.exp(S[..., :32] + (top[..., 1] - top[..., 0])[..., None])
    return given(S) | {"out": BF16(w @ V / np.sum(np.exp(S), -1, keepdims=True))}


def exchanged():
    """Blocks of 8 by 8 numbers of the output are exchanged with those beside and below."""
    x = given(S)
    tiles = x["out"].reshape(4, 6, 2, 8, 2, 8)
    return x | {"out": np.swapaxes(tiles, 2, 4).reshape(4, N, 16)}


def unwritten():
    """Keys 20 to 24 are lost, and so are their rows."""
    x = seen(CAUSAL & ((J < 20) | (J > 24)))
    return x | {"out": np.where((J[:, None] >= 20) & (J[:, None] < 25), 0, x["out"])}


def overlapping(x):
    """Rows of 24 numbers are read as if they were 32."""
    flat = np.append(x.ravel(), np.zeros(8))
    return flat[24 * np.arange(x.size // 24)[:, None] + np.arange(32)].reshape(*x.shape[:-1], 32)


def padded_rows():
    q, k, v, _ = draw(55, heads=4, n=48, d=24)
    out, _ = fused(scores(overlapping(q), overlapping(k), 24**-0.5), v)
    return {"q": q, "k": k, "v": v, "out": out, "dtype": "bfloat16"}


def across():
    q, k, v = (np.swapaxes(x, 0, 1) for x in (Q, K, V))
    return given(S) | {"out": np.swapaxes(fused(scores(q, k), v)[0], 0, 1)}


def scaled():
    """The scale of values 24 to 47 of the second batch member is not applied."""
    q, k, v, s = (x.reshape(2, 2, *x.shape[1:]) for x in (Q, K, V, S))
    size = f32(np.abs(v).max(-1, keepdims=True) / 127)
    whole = np.rint(v / size)
    some = (np.arange(2)[:, None, None, None] == 1) & (J[:, None] >= 24) & (J[:, None] < 48)
    arrays = {"q": q, "k": k, "v": whole.astype(np.int8), "v_scale": size, "dtype": "bfloat16"}
    return arrays | {"out": fused(s, whole * np.where(some, 1.0, size))[0]}


def members_of(change):
    """New keys of two of three batch members are others."""
    q, k, v, _ = (x.reshape(3, 2, 48, 16) for x in draw(56, heads=6, n=48))
    return {
        "q": q,
        "k": k,
        "v": v,
        "out": fused(scores(q, change(k)), change(v))[0],
        "dtype": "bfloat16",
    }


def split():
    """Heads are split from (rows, heads) as if these were (heads, rows), and joined so."""
    q, k, v = (np.swapaxes(x, 0, 1).reshape(x.shape) for x in (Q, K, V))
    out, _ = fused(scores(q, k), v)
    return given(S) | {"out": np.swapaxes(out.reshape(N, 4, 16), 0, 1)}


def new_keys(lost):
    """Keys from 40, or 43, on are zeros in batch members 0 and 2."""
    return np.where((np.arange(48) >= np.array([40, 48, 43])[:, None])[:, None, :, None], 0, lost)


def late_slots():
    """Keys 36 and 37 are overwritten, and keys 30 and 31 are still there."""
    shown = ((J > 33) & (J != 36) & (J != 37)) | (J == 30) | (J == 31)
    out, _ = fused(hide(S[:, -1:], shown), V)
    return given(S) | {"q": Q[:, -1:], "out": out, "causal": True, "window": (61, 0)}


def by_running_sum(size):
    w = np.exp(S)
    total = np.cumsum(w.reshape(4, N, -1, size).sum(-1), -1)
    return given(S) | {"out": BF16((w / np.repeat(total, size, -1)) @ V)}


def documents():
    number = np.searchsorted([44, 70], J, "right")
    return number[:, None] == number


def of_blocks(rule):
    return np.repeat(np.repeat(rule(documents().reshape(3, 32, 3, 32), (1, 3)), 32, 0), 32, 1)


def lacking():
    """In each of two batch members the sum of the weights lacks the last keys of some length."""
    x = members(J < [[96], [96]], J < [[96], [96]])
    w = np.exp(S.reshape(2, 2, N, N))
    kept = (np.array([[64], [32]]) > J)[:, None, None]
    out = w @ V.reshape(2, 2, N, 16) / np.sum(w * kept, -1, keepdims=True)
    return x | {"out": BF16(out)}


def foreign_part():
    """Batch member 0 has no keys from 48 on; what member 1 has for these is merged as its own."""
    x = members(J < [[48], [96]], J < [[48], [96]])
    w = np.exp(S.reshape(2, 2, N, N))
    w[0, ..., 48:] = w[1, ..., 48:]
    v = V.reshape(2, 2, N, 16).copy()
    v[0, :, 48:] = v[1, :, 48:]
    return x | {"out": BF16(w @ v / np.sum(w, -1, keepdims=True))}


def strewn():
    """Each fourth column of each fourth row holds the number of another call."""
    x = given(S)
    other = np.random.default_rng(55).permutation(x["out"].ravel()).reshape(x["out"].shape)
    return x | {"out": np.where(np.arange(16) % 4 == ROW // 8 % 4, other, x["out"])}


def early():
    """From key 32 on the bias is read 16 numbers too early."""
    moved = np.roll(BIAS.reshape(4, -1), 16, 1).reshape(BIAS.shape)
    return given(S + np.where(J >= 32, moved, BIAS), bias=BIAS)


def in_parts():
    """dq and dk by weights of each part of the keys, D of all; dv is right."""
    parts = np.repeat(np.logaddexp.reduceat(S, [0, 48], -1), 48, -1)
    lost = parts - np.logaddexp.reduce(S, -1)[..., None]
    arrays = backward(Q, K, V, G, scores=lambda s: s - lost)
    return arrays | {"dv": backward(Q, K, V, G)["dv"]}


def in_float64(q, **options):
    out = softmax_attention(q, K, V, **options)
    return {"q": q, "k": K, "v": V, "out": out, "dtype": None}


def in_float32():
    p = np.exp(S.astype(f32) - np.max(S, -1, keepdims=True).astype(f32))
    out = (p / np.sum(p, -1, keepdims=True)).astype(float) @ (V + 1e-12)
    return {"q": Q + 1e-12, "k": K, "v": V + 1e-12, "out": out, "dtype": None}


def one_row(made):
    made["out"][1, 40] *= 1 + 1e-13
    return made


def of_float16():
    q, k, v, _ = (x + 0.001 for x in draw(54))
    q, k, v = (x.astype(f32) for x in (q, FORMATS["float16"].round(k), v))
    p = np.exp(scores(FORMATS["float16"].round(q), k.astype(float)))
    out = (p / np.sum(p, -1, keepdims=True) @ v.astype(float)).astype(f32)
    return {"q": q, "k": k, "v": v, "out": out, "dtype": None}


FLAT = BIAS[:, :, 0].ravel()
FOURS = J // 4 * 4 + J % 2 * 2 + J % 4 // 2
SPREAD = np.where((J >= 48) & (J < 64) | (J >= 80), J - 32, J)

CASES = {
    "a sum by remainder": (lambda: by_sums((J % 48 < 32)[:, None]),
        "the sum of the weights has keys 0 to 31 of each 48 only"),
    "a sum by remainder and column": (
        lambda: by_sums((J % 8 < 4)[:, None] == (np.arange(16) % 8 < 4)),
        "in columns between 0 and 11, the sum of the weights has keys 0 to 3 of each 8 "),
    "a class of weights": (
        lambda: by_sums(1, np.where((HEAD == 1) & (J % 32 < 16), np.exp(Q[..., :1]), 1)),
        "weights of keys 16 to 31 of each 32 have a factor of their own in each row, "),
    "a sum by member": (lacking,
        "the sum of the weights has keys 0 to 63 only in batch member 0 and the sum of the "),
    "part of another member": (foreign_part,
        "keys 48 to 95, of which a head sees none, are merged as those of the next batch member"),
    "order in fours": (lambda: given(hide(S, CAUSAL), V[:, FOURS], causal=True),
        "key j has the value of key j // 4 * 4 + (j % 2) * 2 + j % 4 // 2"),
    "tiles that late rows see": (lambda: given(hide(scores(Q, K[:, SPREAD]), CAUSAL), causal=True),
        "tiles are read from elsewhere: keys 48 to 63 are those of 16 to 31, keys 80 to 95 are "),
    "bias of keys from a place on": (early,
        "the bias is read 16 numbers too early, but only for keys 32 to 95"),
    "limit by the other end": (
        lambda: given(hide(S, (FAR >= -24) & (np.maximum(ROW // 16 * 16 - 24, 0) + 48 > J)),
            window=(24, None)),
        "query i sees keys up to 47 after the first key of query 16 (i // 16)"),
    "stale weights": (stale, "values of keys 32 to 63 meet the weights of the 32 keys before"),
    "exchanged blocks": (exchanged, "in head 0, columns 0 to 7 of queries 8 to 95 whose index % "
        "16 is 8 to 15 hold the numbers of columns 8 to 15 of queries 0 to 87 whose index"),
    "rows not written": (unwritten, "keys 20 to 24 are left out, and queries 20 to 24 are 0"),
    "overlapping rows": (padded_rows, "q . k also sums the first 8 channels of the next token"),
    "axes": (across, "attention runs over the heads of the same token"),
    "scale of some keys": (scaled, "v_scale is not applied: keys 24 to 47 of batch member 1"),
    "zeros of members": (lambda: members_of(new_keys),
        "keys and values are read as 0: keys 40 to 47 of batch member 0, keys 43 to 47 of batch "),
    "split heads": (split, "queries, keys, values and the output have the strides of (heads, "),
    "padded lse": (
        lambda: given(S) | {"lse": np.pad(fused(S, V)[1], ((0, 0), (0, 32))).ravel()[: 4 * N]
            .reshape(4, N)},
        "lse is read 96 by 96 rows, but heads are written 128 rows apart"),
    "unscaled tile": (lambda: given(np.where(J < 64, 1, 4) * S), "scores are not scaled: keys 64 "),
    "mask from a place on": (lambda: given(hide(S, np.roll(MASK, -23)), mask=MASK),
        "key j has the mask of key j + 23 (cyclically)"),
    "late slots": (late_slots,
        "hidden keys are seen: keys 30 to 31, and keys are left out: keys 36 to 37"),
    "stride of heads": (
        lambda: given(scores(Q, K.reshape(-1, 16)[64 * HEAD[..., 0] + J]),
            V.reshape(-1, 16)[64 * HEAD[..., 0] + J]),
        "keys and values are read from other rows of memory with heads before tokens: key j of "
        "query head h is row 64 h + j, not 96 h + j (head 1 from token 64 of key head 0 on)"),
    "rows past the end": (
        lambda: given(*memory(lambda x: np.pad(x.reshape(-1, 16), ((0, 32), (0, 0))), 128)),
        "32 keys past the end are also read: rows that follow in memory with heads before tokens "
        "(head 0 from token 0 of key head 1 on), 0 after the last"),
    "past the end of sequences": (
        past_sequences,
        "8 keys past the end are also read: rows that follow in memory with heads before tokens "
        "(head 0 of sequence 0 from token 44 of key head 0 on), 0 after the last"),
    "rows of tokens": (
        lambda: given(*memory(lambda x: x.swapaxes(0, 1).reshape(-1, 16)[: N + 3], N, 1)),
        "keys and values are read from other rows of memory with tokens before heads: key j of "
        "query head h is row h + j, not h + 4 j (head 0 from token 0 of key head 0 on)"),
    "stride of one number": (
        lambda: given(S + FLAT[(HEAD * N + ROW + J) % len(FLAT)],
            bias=np.repeat(BIAS[:, :, :1], N, -1)),
        "the bias, one number for each query, is read with stride 1 for keys, not 0"),
    "whole blocks": (
        lambda: given(hide(S, of_blocks(np.any)), mask=documents()),
        "the mask is applied by blocks of 32 queries and keys: all keys of a block are seen if"),
    "running sum": (
        lambda: by_running_sum(32),
        "weights of each tile of 32 keys are divided by the running sum up to it"),
    "rows of a group": (lambda: seen(J <= ROW // 3), "query i sees keys up to i // 3"),
    "bit of a row": (lambda: seen(J <= (ROW ^ 16)), "query i sees keys up to i xor 16"),
    "next chunk": (lambda: seen(J <= ROW // 32 * 32 + 63),
        "query i sees keys up to 32 (i // 32) + 63"),
    "rectangle": (lambda: seen(CAUSAL | ((HEAD == 1) & (ROW // 16 == 2) & (J >= 70) & (J < 82))),
        "keys 70 to 81 are not masked, but only in head 1, queries 32 to 47"),
    "one row": (lambda: seen(CAUSAL & ~((HEAD == 3) & (ROW == 80) & (J >= 20) & (J < 33))),
        "keys 20 to 32 are left out, but only in head 3, query 80"),
    "tile before": (lambda: given(scores(Q, K[:, J - 16 * (J // 16 % 2)])),
        "key j has the key of key j - 16 (j // 16 % 2)"),
    "ring": (lambda: given(scores(Q, K[:, np.where(J < 48, J, J - 32 * (J // 16 == 4))])),
        "tiles are read from elsewhere: keys 64 to 79 are those of 32 to 47"),
    "bias of eight": (lambda: given(S + BIAS[:, :, J // 8 * 8], bias=BIAS),
        "key j has the bias of key 8 (j // 8)"),
    "bias of rows": (lambda: given(S + BIAS[:, (J // 4 * 4)], bias=BIAS),
        "query i has the bias of query 4 (i // 4)"),
    "two options": (lambda: given(4 * S) | {"q": 4 * Q, "causal": True, "softcap": 5.0},
        "there is no soft cap and attention is not causal"),
    "slopes": (lambda: given(hide(S, CAUSAL), more_lse=SLOPES * J, causal=True),
        "lse is larger by the slope of the head (2^(-8 h / heads), h from 1) times the position i"),
    "one number a head": (
        lambda: given(S, more_lse=np.array([0, 0.5, 0, -0.2])[:, None]),
        "lse is larger by a number of each head, 0.5 in head 1, -0.2 in head 3"),
    "rescale": (lambda: merged((np.arange(4) == 1)[:, None]),
        "weights of 4 parts of the keys are not rescaled from their own maximum to that of all, "
        "but only for keys 24 to 47"),
    "divided": (lambda: given(S) | {"out": in_tiles(S, V, 32, each=lambda x, total: x / total)},
        "the output is divided by the running sum after each tile of 32 keys"),
    "values alone": (lambda: halves(1, MASK),
        "the mask is ignored in the sum of the values, not of the weights"),
    "weights alone": (lambda: halves(MASK, 1),
        "the mask is ignored in the sum of the weights, not of the values"),
    "steps": (lambda: quantised(127, (1, 2)),
        "each number of the output is a whole number of steps (254 of them)"),
    "steps of rows": (lambda: quantised(7, 2),
        "each number of the output is a whole number of steps (14 of them)"),
    "hidden NaN": (spoiled, "values of hidden keys 80 to 95 are NaN or infinite"),
    "stride of values": (
        lambda: given(S, V.reshape(-1, 16)[(HEAD[..., 0] * N + J + J % 32) % (4 * N)]),
        "key j has the value of key j + j % 32, past the end in the next head"),
    "padded rows": (lambda: given(S + padded(BIAS, 128), bias=BIAS),
        "the bias is read with rows of 96 numbers, where they are padded to 128"),
    "widths": (
        lambda: given(S, padded(V.swapaxes(1, 2), 128).swapaxes(1, 2)),
        "values lie in rows of 128 numbers (channels), and are read in rows of 96"),
    "columns": (lambda: given(S, V[..., np.arange(16) ^ 4]),
        "values have the columns of others: 0 to 3 of head 0 are 4 to 7 of 0, 4 to 7 of head 0"),
    "a page of zeros": (lambda: given(scores(Q, paged(K)), paged(V)),
        "tiles are read from elsewhere: in head 0 keys and values 0 to 31 are those of 0 to 31 of "
        "head 1, in head 1 keys and values 0 to 31 are 0"),
    "half of each tile": (lambda: seen(CAUSAL & (J % 32 < 16)),
        "keys 16 to 31 of each 32 are left out"),
    "over queries": (  # weights are divided by a sum of each key
        lambda: by_sums(1, 1 / np.sum(np.exp(S), -2, keepdims=True)),
        "a bias by j is added to the scores, "),
    "weights alone in tiles": (lambda: halves(J % 32 < 16, 1) | {"mask": None},
        "in each tile of 32 keys, weights of keys 16 to 31 count in the sum of the weights only"),
    "weights alone of a key": (lambda: halves(J != 95, 1) | {"mask": None},
        "key 95 counts in the sum of the weights only"),
    "a key": (lambda: seen(CAUSAL & (J != 50)), "key 50 is left out"),
    "in turn": (lambda: in_turn(4),
        "4 parts of the keys, to which keys go in turn, are merged with an lse in which the whole "
        "counts 1.44 times (log2(e))"),
    "in 8 bits": (in_8_bits, "weights are rounded to float8_e4m3fn (tiles of 32 keys) but not in"),
    "means of queries": (lambda: smoothed(32),
        "the mean of queries in tiles of 32 is that of the first tile"),
    "some columns": (lambda: in_columns(in_tiles(S, V, 32, of_out=0)),
        "the running output is not rescaled when the maximum grows (tiles of 32 keys), but only in "
        "columns 8 to 15"),
    "columns of zeros": (lambda: given(S, np.arange(16) // 8 * V, causal=True),
        "attention is not causal, and columns 0 to 7 are 0"),
    "negative bias": (lambda: given(S - BIAS, bias=BIAS), "the bias has the wrong sign"),
    "ends of masks": (lambda: members(J < [[63], [71]], J < [[60], [70]]),
        "the mask ends 3 keys too late in batch member 0, 1 key too late in batch member 1"),
    "rows of masks": (
        lambda: members((np.arange(2 * N) < 140).reshape(2, N), J < [[70], [70]]),
        "the masks of batch members are written with rows of 70 keys, not 96"),
    "first choice": (chosen, "key 0 is read in place of the first key of each choice"),
    "strewn": (strewn,
        "numbers where query // 8 % 4 = column % 4 are unlike the exact ones, as if they"),
    "rows of nowhere": (lambda: given(S) | {"out": np.where(ROW // 32 == 1, V[..., ::-1],
        given(S)["out"])}, "queries 32 to 63: numbers have nothing to do with the exact ones"),
    "parts of a backward pass": (in_parts,
        "agrees if in the backward pass weights are normalised in each of 2 parts of the keys",
        "dq dk"),
    "in float32": (in_float32, "agrees if the softmax, or all of it, is computed in "
        "float32$"),
    "nearly another scale": (lambda: in_float64(Q, scale=(1 + 1e-8) / 4),
        "the scale is 1.00000001"),
    "far less than float32 leaves": (lambda: one_row(in_float64(Q + 1e-12)),
        "the output is 1.0000000000001"),
    "formats that agree": (of_float16, "agrees if queries are rounded to ... float16"),
    "later keys": (late, "attention is not causal: keys j > i count decay^(j - i) times, but only"),
}  # fmt: skip
test_a_mistake_is_named_by_its_place = named(CASES, ("bit of a row",))


def test_the_first_of_two_spans_is_found_again_beside_the_second():
    """Keys 11 to 17 are lost, and 34 to 41 have larger scores."""
    rng = np.random.default_rng(83)
    v, s, j = rng.standard_normal((48, 16)), rng.standard_normal((3, 48)), np.arange(48)
    ways = [("lost", lambda _: (np.full_like(s, -np.inf), v)), ("larger", lambda _: (s + 2, v))]
    found = np.where((j > 33) & (j < 42), s + 2, np.where((j > 10) & (j < 18), -np.inf, s))
    got = np.exp(found) @ v / np.sum(np.exp(found), -1, keepdims=True)
    x = Sampled(Rows((0,), np.arange(3), j), got, None, np.ones(3, bool), np.ones(3, bool))
    read = intervals._find_spans(lambda _: (s, v), ways, [x], 1e-3)
    assert {y.words: y.keys for y in read} == {"lost": slice(11, 18), "larger": slice(34, 42)}


ORDER = np.random.default_rng(53).permutation(N)
NOWHERE = {
    "power": lambda: np.maximum(1 + S, 0.1) ** 2,
    "mixed heads": lambda: np.exp(S) + 0.4 * np.exp(np.roll(S, 1, 0)),
    "other keys": lambda: np.exp(scores(Q, K[..., ::-1])),
    "permuted": lambda: np.exp(S[..., ORDER]),
}


def weighed(w):
    return given(S) | {"out": BF16(w() @ V / np.sum(w(), -1, keepdims=True))}


test_no_place_is_named_that_is_not_there = unnamed(
    {x: (partial(weighed, y), "agrees if|^the scale is") for x, y in NOWHERE.items()}
)


@pytest.mark.long
def test_the_scale_of_a_backward_pass_is_one_for_all_parts():
    of_scores = lambda p, t, delta: 0.8 * p * (t - delta)  # noqa: E731
    found = verify(**backward(Q, K, V, G, scale=0.2, of_scores=of_scores)).parts
    for of in ("dq", "dk", "dv"):
        words = re.match(
            r"agrees if in the backward pass the scale is (\S+) ± ", found[of].suspects[0].text
        )
        assert abs(float(words[1]) - 0.8) < 1e-3


@pytest.mark.long
def test_an_error_of_a_cause_ends_no_verdict(monkeypatch):
    """And the causes after it are tried."""

    def fail(problem):
        raise ValueError("no cause")
        yield

    monkeypatch.setattr(trials, "_PLAIN_LISTS", (fail, *trials._PLAIN_LISTS))
    found = verify(**given(hide(S, CAUSAL)))
    assert found.suspects[0].text == "agrees if attention is causal"
