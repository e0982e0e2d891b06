"""Sums of a backward pass whose tiles add terms of other rows or columns: named, and no others."""

import numpy as np
import pytest

from refattn.judge import verify
from tests.judge.mistakes.causes.kernels import BF16, backward, draw, hide, scores

N, D = 96, 32
Q, K, V, G = draw(41, n=N, d=D)
RIGHT = backward(Q, K, V, G)
ROW = np.arange(N)


def list_terms(part, size, seen=True):
    """What tiles of keys (dq) or of queries add to each row: (tiles, heads, rows, columns)."""
    s = hide(scores(Q, K), seen)
    p = np.exp(s - np.max(s, -1, keepdims=True))
    p /= np.sum(p, -1, keepdims=True)
    ds = D**-0.5 * p * (G @ V.mT - np.sum(G * RIGHT["out"], -1, keepdims=True))
    weights, rows = {"dq": (ds, K), "dk": (ds.mT, Q), "dv": (p.mT, G)}[part]
    tiles = [slice(x, x + size) for x in range(0, N, size)]
    return np.stack([weights[..., x] @ rows[:, x] for x in tiles])


def shift(x, by):
    """Rows that stand so many places later; 0 beyond the last."""
    return np.concatenate([x[:, by:], 0 * x[:, :by]], 1)


def late_half(terms):
    wrong = (ROW % 16 >= 8) & (ROW < 80)
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
    w = np.exp(scores(Q, K))
    terms[2] = (w / np.sum(w, -1, keepdims=True)).mT[..., 64:] @ G[:, :32]
    return terms


CASES = {
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


@pytest.mark.long
@pytest.mark.parametrize("words", CASES)
def test_terms_of_other_rows_and_columns(words):
    part, change = CASES[words]
    terms = list_terms(part, 32)
    assert verify(**RIGHT | {part: BF16(np.sum(terms, 0))}).verdict == "PASS"
    found = verify(**RIGHT | {part: BF16(np.sum(change(terms), 0))}).parts[part]
    assert words in found.suspects[0].text


@pytest.mark.long
@pytest.mark.parametrize("part", ["dq", "dk", "dv"])
def test_terms_that_count_in_part_are_no_others(part):
    terms = list_terms(part, 32)
    terms[1] = 0.4 * terms[1] + 0.6 * shift(terms[1], 16)
    found = verify(**RIGHT | {part: BF16(np.sum(terms, 0))}).parts[part]
    assert found.verdict == "FAIL"
    assert not any("what they should add" in x.text for x in found.suspects)
