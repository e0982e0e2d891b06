"""Backward passes that are wrong in places are named, and right ones are not."""

from functools import partial

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
    scores,
    unnamed,
)

pytestmark = pytest.mark.long
N = 64
Q, K, V, G = draw(71, n=N)
J, CAUSAL = np.arange(N), ahead(N, N) <= 0
ROW = J[:, None]


OUT = fused(scores(Q, K), V)[0]


def late(x):
    """Rows 16 places later, with 0 before them."""
    return np.concatenate([0 * x[:, :16], x[:, :-16]], 1)


def of_tiles(there):
    """D is left out for some keys alone: one part of dq, and rows of dk."""
    return backward(Q, K, V, G, of_scores=lambda p, t, delta: p * (t - np.where(there, 0, delta)))


def capped(slope):
    """Scores are capped at 1; their derivative is what `slope` makes of the right one."""
    right = 1 - np.tanh(scores(Q, K)) ** 2
    of_scores = lambda p, t, delta: p * (t - delta) * slope(right)  # noqa: E731
    return backward(Q, K, V, G, forward=np.tanh, of_scores=of_scores) | {"softcap": 1.0}


def read_apart(size):
    """Rows of v begin as far apart as those of k, which are shorter."""
    q, k = Q[..., :size], K[..., :size]
    read = V.reshape(2, -1)[:, size * J[:, None] + np.arange(16)]
    return backward(q, k, V, G, values=lambda _: read)


CASES = {
    "limits": (
        lambda: backward(Q, K, V, G, CAUSAL, seen_back=ROW // 4 * 4 + (ROW % 4 // 2) >= J)
        | {"causal": True},
        "in the backward pass in blocks of 8 limits are permuted: query i sees keys up to 8 "),
    "limits by blocks": (
        lambda: backward(Q, K, V, G, CAUSAL, seen_back=ROW // 16 * 16 + 15 >= J) | {"causal": True},
        "in the backward pass queries of a block of 16 see all keys of the block"),
    "D of some keys": (lambda: of_tiles((J // 16) % 2 == 1),
        "D = d_out . out is left out, but only for keys 16 to 31 of each 32"),
    "D of some queries": (lambda: of_tiles(ROW // 16 == 1), "D = d_out . out is left out"),
    "slope of the cap": (lambda: capped(lambda x: 1.0),
        "the derivative of the soft cap is left out"),
    "slope of some keys": (lambda: capped(lambda x: np.where(J >= 32, 1.0, x)),
        "the derivative of the soft cap is left out, but only for keys 32 to 63"),
    "slope twice": (lambda: capped(np.square), "the derivative of the soft cap is applied twice"),
    "rows of v": (lambda: read_apart(12), "rows of v begin 12 numbers apart, not 16"),
    "lse and D of rows before": (lambda: backward(Q, K, V, G, lse=late, delta=late),
        "lse and D = d_out . out are read elsewhere: queries 0 to 15 read 0, queries 16 to 63 read "
        "those of queries 0 to 47"),
    "d_out of D": (lambda: backward(Q, K, V, G, delta=lambda _: np.sum(late(G) * OUT, -1,
        keepdims=True)), "d_out in D = d_out . out is read elsewhere: queries 0 to 15 read 0"),
    "sum of out": (lambda: backward(Q, K, V, G, delta=lambda _: np.sum(OUT, -1, keepdims=True)),
        "D = d_out . out is the sum of out$"),
    "some columns": (lambda: backward(Q, K, V, G, delta=lambda _: np.sum((G * OUT)[..., ::2], -1,
        keepdims=True)), "D = d_out . out is the sum over columns 0 to 14 in steps of 2 alone"),
}  # fmt: skip


test_what_is_wrong_in_dq = named({x: (*y, "dq") for x, y in CASES.items()}, profile="flash")


def test_none_is_named_that_is_not_there():
    """Nor in errors that have no cause."""
    arrays = capped(lambda x: x)
    assert verify(**arrays, profile="flash").verdict == "PASS"
    noise = np.random.default_rng(72).standard_normal(arrays["dq"].shape)
    found = verify(**arrays | {"dq": BF16(arrays["dq"] + 0.2 * noise)}, profile="flash")
    assert not [x.text for x in found.parts["dq"].suspects if "agrees if" in x.text]


@pytest.mark.parametrize("more", [4, 7])
def test_rows_past_the_last_query(more):
    """They are named if padding makes them, and if they are in the sums of no known query."""
    n = N - more
    q, k, v, g = Q[:, :n], K, V, G[:, :n]
    right, past = backward(q, k, v, g), backward(*draw(73, n=more, m=N)[:1], k, v, G[:, n:])
    arrays = right | {x: BF16(right[x] + past[x]) for x in ("dk", "dv")}
    found = verify(**arrays).parts["dv"].suspects[0].text
    assert found.startswith(f"agrees if dk and dv also sum {more} rows past the last query")
    for heads in (0, 1):  # rows of the own head, or of the next one
        rows, slopes = (np.roll(x[:, :more], heads, 0) for x in (q, g))
        known = backward(rows, k, v, slopes)
        arrays = right | {x: BF16(right[x] + known[x]) for x in ("dk", "dv")}
        assert not any("past" in x.text for x in verify(**arrays).parts["dv"].suspects)


# --- terms of other rows and columns --------------------------------------------------------------

LONG = draw(41, n=96, d=32)
RIGHT, PLACE = backward(*LONG), np.arange(96)


def list_terms(part, size, seen=True):
    """What tiles of keys (dq) or of queries add to each row: (tiles, heads, rows, columns)."""
    q, k, v, g = LONG
    s = hide(scores(q, k), seen)
    p = np.exp(s - np.max(s, -1, keepdims=True))
    p /= np.sum(p, -1, keepdims=True)
    ds = 32**-0.5 * p * (g @ v.mT - np.sum(g * RIGHT["out"], -1, keepdims=True))
    weights, rows = {"dq": (ds, k), "dk": (ds.mT, q), "dv": (p.mT, g)}[part]
    tiles = [slice(x, x + size) for x in range(0, 96, size)]
    return np.stack([weights[..., x] @ rows[:, x] for x in tiles])


def shift(x, by):
    """Rows that stand so many places later; 0 beyond the last."""
    return np.concatenate([x[:, by:], 0 * x[:, :by]], 1)


def late_half(terms):
    wrong = (PLACE % 16 >= 8) & (PLACE < 80)
    terms[1][:, wrong] = shift(terms[1], 16)[:, wrong]
    return terms


def tile_of_others(terms):
    terms[0][:, 32:64] = terms[0][:, :32]
    return terms


def other_columns(terms):
    terms[1][..., 16:24] = terms[2][..., :8]
    return terms


def next_row(terms):
    terms[1] += shift(terms[2], 1)
    return terms


def weights_of_others(terms):
    w = np.exp(scores(*LONG[:2]))
    terms[2] = (w / np.sum(w, -1, keepdims=True)).mT[..., 64:] @ LONG[3][:, :32]
    return terms


def made_of(part, change):
    return RIGHT | {part: BF16(np.sum(change(list_terms(part, 32)), 0))}


def in_part(terms):
    terms[1] = 0.4 * terms[1] + 0.6 * shift(terms[1], 16)
    return terms


TERMS = {
    "in dv, in the sums of all keys, queries 64 to 95 add their weights times the rows of d_out 64 "
    "earlier": ("dv", weights_of_others),
    "in dq, in the sums of queries 8 to 79 whose index % 16 is 8 to 15, keys 32 to 63 add what "
    "they should add to the queries 16 later": ("dq", late_half),
    "in dv, in the sums of keys 32 to 63, queries 0 to 31 add what they should add to the keys 32 "
    "earlier": ("dv", tile_of_others),
    "in dk, in the sums of columns 16 to 23, queries 32 to 63 are left out and queries 64 to 95 "
    "also add what they should add to the columns 16 earlier": ("dk", other_columns),
    "queries 64 to 95 also add what they should add to the keys 1 later": ("dk", next_row),
}
test_terms_of_other_rows_and_columns = named(
    {x[:40]: (partial(made_of, *y), x, y[0]) for x, y in TERMS.items()}
)
test_terms_that_count_in_part_are_no_others = unnamed(
    {x: (partial(made_of, x, in_part), "what they should add", x) for x in ("dq", "dk", "dv")}
)


@pytest.mark.parametrize("part", ["dq", "dk", "dv"])
def test_terms_add_up(part):
    assert verify(**made_of(part, lambda x: x)).verdict == "PASS"
