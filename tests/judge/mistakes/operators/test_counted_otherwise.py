"""Parts, tiles, pages and chunks that count, or are read, otherwise are told from the numbers."""

import numpy as np
import pytest

from refattn.judge import verify
from tests.judge.mistakes.causes.kernels import (
    BF16,
    ahead,
    backward,
    draw,
    fused,
    hide,
    named,
    posing,
    scores,
)

N = 96
Q, K, V, G = draw(91, n=N)
S, J, ROW = scores(Q, K), np.arange(N), np.arange(N)[:, None]
CAUSAL = ahead(N, N) <= 0
PAIRS = np.arange(2)


given, attention = posing(Q, K, V)


def merged(weigh, number):
    """Parts, right in themselves, with weights made of their normalisers and largest scores."""
    of, each = np.broadcast_to(number, (N,)), []
    for x in range(np.max(of) + 1):
        out, lse = fused(S[..., of == x], V[:, of == x])
        each.append((out, weigh(lse, np.max(S[..., of == x], -1))[..., None]))
    return given(sum(w * x for x, w in each) / sum(w for _, w in each))


def paged(read, n=4, lengths=(60, 37), size=4, causal=True, turned=False):
    """Sequences in pages, and what queries get from the places that `read` finds, by member.

    Pages (slots, heads) may be read as if they were (heads, slots).
    """
    rng = np.random.default_rng(92)
    q, k, v = (
        BF16(rng.standard_normal(x)) for x in ((2, n, 2, 32), *[(144 // size, size, 2, 32)] * 2)
    )
    table = rng.permutation(144 // size)[: 2 * (64 // size)].reshape(2, -1)
    out = np.zeros(q.shape)
    for member, length in enumerate(lengths):
        x = (y.reshape(-1, 2, size, 32).swapaxes(1, 2) if turned else y for y in (k, v))
        x = [np.concatenate([y.reshape(-1, 2, 32), np.zeros((1, 2, 32))]) for y in x]
        at = read(table[member], np.arange(length), member)
        kept = [np.swapaxes(y[at], 0, 1) for y in x]
        s = scores(np.swapaxes(q[member], 0, 1), kept[0])
        s = hide(s, ahead(n, len(at)) <= 0) if causal else s
        out[member] = np.swapaxes(fused(s, kept[1])[0], 0, 1)
    found = {"q": q, "k": k, "v": v, "out": out, "block_table": table, "causal": causal}
    return found | {"cache_seqlens": np.array(lengths), "dtype": "bfloat16"}


def moved(table, j, start, by, size=4):
    """Keys from one on are those some places later, and zeros past the last."""
    to = np.where(j >= start, j + by, j)
    return np.where(to < len(j), table[np.minimum(to, len(j) - 1) // size] * size + to % size, -1)


def scaled_by(read):
    """Scales of keys and values in 8 bits are read at other tokens."""
    rng = np.random.default_rng(93)
    size = np.exp(0.5 * rng.standard_normal((2, 2, N, 1))).astype(np.float32) / 64
    whole = rng.integers(-127, 128, (2, 2, N, 16))
    k, v = whole * np.where(read[:, None] >= 0, size[:, :, read], 0)
    arrays = {"q": Q, "k": whole[0].astype(np.int8), "v": whole[1].astype(np.int8)}
    out = fused(scores(Q, k), v)[0]
    return arrays | {"k_scale": size[0], "v_scale": size[1], "out": out, "dtype": "bfloat16"}


FORWARD = {
    "lse scaled twice": (
        lambda: merged(lambda lse, top: np.exp(lse - 0.75 * top), J // 24),
        "4 parts of the keys are merged with an lse in which the largest score counts 0.25 times "
        "(the scale)"),
    "parts in turn without their maximum": (
        lambda: merged(lambda lse, top: np.exp(lse - top), J // 16 % 3),
        "3 parts of the keys, to which blocks of 16 keys go in turn, are merged with weights "
        "e^(lse - largest score), not e^lse"),
    "parts with other weights": (
        lambda: merged(lambda lse, top: np.exp(lse) * (1.2 + np.sin(9 * lse)), J // 32),
        "tiles of 32 keys are added with other weights, in each row "),
    "part of a tile without scale": (
        lambda: attention(np.where(J % 16 >= 8, 4 * S, S)),
        "the scale is 1, but only for keys 8 to 15 of each 16"),
    "part of tiles masked late": (
        lambda: attention(hide(S, np.where(J // 16 % 3 == 1, J - 31, J) <= ROW), causal=True),
        "query i sees keys up to i + 31, but only for keys 16 to 31, 64 to 79"),
    "bias of distances": (
        lambda: attention(
            S + np.random.default_rng(94).standard_normal((2, 2 * N))[:, J - ROW + N]),
        "a bias by (i - j) is added to the scores, "),
    "numbers of pages": (lambda: paged(lambda t, j, _: t[j // 16] % 8 * 16 + j % 16, size=16),
        "numbers of blocks are taken modulo 8"),
    "size of pages": (
        lambda: paged(lambda t, j, _: t[j // 8] * 16 + j % 8, lengths=(32, 31), size=16),
        "blocks of 16 keys are read as blocks of 8: key j is key j % 8 of entry j // 8 of the "),
    "strides of pages": (
        lambda: paged(lambda t, j, _: t[j // 16] * 16 + j % 16, size=16, turned=True),
        "each block of the cache is read with the strides of (heads, rows), not (rows, heads)"),
    "page size taken as 1": (
        lambda: paged(lambda t, j, _: t[: -(-len(j) // 4)], n=1, causal=False),
        "blocks of 4 keys are read as blocks of 1"),
    "page size taken as 2": (
        lambda: paged(lambda t, j, _: np.minimum(2 * t[j // 2] + j % 2, 143), size=1),
        "blocks of 1 keys are read as blocks of 2: key j is key j % 2 of entry j // 2 of the "),
    "keys some places early": (
        lambda: paged(lambda t, j, c: moved(t, j, (16, 8)[c], 3), n=36, lengths=(60, 50)),
        "keys and values are those of the key 3 places later: keys 16 to 59 of batch member 0, "
        "keys 8 to 49 of batch member 1"),
    "scales of padded pages": (
        lambda: scaled_by(np.where(J % 40 < 32, J // 40 * 32 + J % 40, -1)),
        "key j has the k_scale and v_scale of key 32 (j // 40) + j % 40 where j % 40 < 32"),
}  # fmt: skip


test_what_is_wrong_in_the_output = named(FORWARD)


@pytest.mark.long
@pytest.mark.parametrize("lost", [np.nan, 0.0])
def test_what_overflows(lost):
    """Rows are lost where their largest score is above a number; or in any place."""
    top = 60 * np.max(S, -1, keepdims=True)
    for here, told in (
        (top > 130, True),
        (top[:, ::-1] > 130, False),
    ):
        x = given(np.where(here, lost, fused(60 * S, V)[0]), scale=15.0, dtype="bfloat16")
        text = verify(**x).suspects[0].text
        assert ("they are all rows in which the largest score is above 129" in text) == told


def of_pairs(shown):
    """The backward pass sees other pairs of queries and keys."""
    return backward(Q, K, V, G, CAUSAL, seen_back=shown) | {"causal": True}


def of_columns(kept, times=1.0):
    """Of d_out . v some columns count, and D so often."""
    return backward(Q, K, V, G, values=lambda v: kept * v, delta=lambda x: times * x)


def transposed():
    """Weights of tiles are not transposed in the sum of dv."""
    p = BF16(np.exp(S - fused(S, V)[1][..., None])).reshape(2, 3, 32, 3, 32)
    return BF16(p.transpose(0, 3, 2, 1, 4).reshape(S.shape) @ G)


BACKWARD = {
    "chunks of a ring": (
        lambda: of_pairs((J % 32 <= ROW % 32) & ((J // 32 + ROW // 32) % 3 != 1)),
        "in the backward pass chunks of 32 see others: queries 0 to 31 see keys 0 to 31, 64 to 95, "
        "of each chunk up to their own place in it; "),
    "first columns": (lambda: of_columns(np.arange(16) >= 8),
        "in the backward pass columns 0 to 7 are left out in d_out . v"),
    "columns and D": (
        lambda: of_columns(np.arange(16) < 12, 2.0),
        "columns 12 to 15 are left out in d_out . v and all columns count twice in D"),
    "transposed tiles": (
        lambda: backward(Q, K, V, G) | {"dv": transposed()},
        "weights of each tile of 32 queries and 32 keys are transposed"),
    "lse of some keys": (  # late queries have that of the other head against keys of two chunks
        lambda: backward(Q, K, V, G, scores=lambda s: s - (J >= 24) * (J < 72) * (ROW >= 72) * ROW
            / 50), "in the backward pass weights of keys 24 to 71 have another lse"),
}  # fmt: skip
test_what_is_wrong_in_the_backward_pass = named(
    {x: (*y, "dv" if x == "transposed tiles" else "dq") for x, y in BACKWARD.items()},
    profile="flash",
)
