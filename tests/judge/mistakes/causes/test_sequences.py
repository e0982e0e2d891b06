"""Wrong kernels for sequences one after another: what they mistake is named."""

from functools import partial

import numpy as np
import pytest

from refattn.files.tensors import open_tensors
from refattn.judge import verify
from refattn.judge.mistakes.causes.alternatives import list_alternatives
from refattn.judge.mistakes.causes.sampled import Rows
from refattn.judge.verification.reading import pose_tensors
from tests.judge.mistakes.causes.kernels import BF16, backward, fused, hide, named, scores, unnamed

OF_Q, OF_K = np.cumsum([0, 13, 5, 22, 9]), np.cumsum([0, 17, 5, 30, 12])
N, M = OF_Q[-1], OF_K[-1]
ROW, J = np.arange(N)[:, None], np.arange(M)
AT = np.repeat(np.arange(4), np.diff(OF_Q))
BEGIN, END = OF_K[:-1], OF_K[1:]
LEVEL = END - OF_Q[1:]  # how far a sequence's last key is ahead of its last query
START = BEGIN - OF_Q[:-1]
LONGEST = START + np.max(np.diff(OF_K)) - np.max(np.diff(OF_Q))
SLOPES = np.array([0.5, 0.25])[:, None, None]


def see(first=BEGIN, last=END, level=None, at=AT):
    """Show keys of a sequence from the first to the last, none of them ahead if a level is given.

    All but the sequences of queries are by sequence, or one number.
    """
    first, last = (np.broadcast_to(x, 4)[at, None] for x in (first, last))
    seen = (first <= J) & (last > J)
    return seen if level is None else seen & (ROW + np.broadcast_to(level, 4)[at, None] >= J)


def sequences_of(offsets, tokens):
    return np.maximum(np.searchsorted(offsets[:-1], tokens, "right") - 1, 0)


def far(level):
    return np.abs(J - ROW - np.broadcast_to(level, 4)[AT, None])


def draw():
    rng = np.random.default_rng(4)
    return (BF16(rng.standard_normal((h, x, 16))) for h, x in ((2, N), (1, M), (1, M)))


Q, K, V = draw()
UNRELATED = "numbers have nothing to do with the exact ones"


def given(out, arrays=None, offsets=(OF_Q, OF_K)):
    """Arrays of sequences one after another, tokens before heads, and where each begins."""
    arrays = {"out": out} | dict(zip("qkv", arrays or (Q, K, V), strict=True))
    arrays = {x: np.swapaxes(y, 0, 1) for x, y in arrays.items()}
    return arrays | dict(zip(("cu_seqlens_q", "cu_seqlens_k"), offsets, strict=True))


def judged(out, causal=False, arrays=None, offsets=(OF_Q, OF_K), **more):
    more |= {"causal": causal, "dtype": "bfloat16", "profile": "flash"}
    return verify(**given(out, arrays, offsets), **more)


@pytest.fixture
def posed(tmp_path):
    """Write a file with `cu_seqlens`, and pose its problem."""

    def pose(out, causal, *about):
        np.savez(tmp_path / "x.npz", **given(out, *about))
        return pose_tensors(open_tensors(tmp_path / "x.npz", dtype="bfloat16"), causal=causal)

    return pose


def attend(seen, bias=0.0):
    """Attend, with 0 for queries that see no key."""
    return np.nan_to_num(fused(hide(scores(Q, K) + bias, seen), V)[0])


def test_a_cap_after_the_mask_shows_hidden_keys_of_the_own_sequence():
    """Rows that lose most of their weight are no exact rows times a number."""
    capped = 2 * np.tanh(scores(Q, K) / 2)
    seen = hide(np.where(see(level=LEVEL), capped, -2.0), see())
    words = "hidden keys have the score -cap (the cap is applied after the mask)"
    found = judged(fused(seen, V)[0], causal=True, softcap=2.0)
    assert found.suspects[0].text == f"agrees if {words}"
    assert "times a number" not in str(found)


@pytest.mark.parametrize("longest", [22, 30])
def test_the_simplest_that_sees_the_same_comes_first(posed, longest):
    """If q and k are as long, counts by the longest lengths are those from the first keys."""
    offsets = np.cumsum([0, 13, 5, longest, 9]), np.cumsum([0, 17, 5, longest, 12])
    rng, of_k = np.random.default_rng(5), offsets[1]
    q, k, v = (BF16(rng.standard_normal((1, x[-1], 4))) for x in (*offsets, of_k))
    problem = posed(q, True, (q, k, v), offsets)
    at = np.repeat(np.arange(4), np.diff(offsets[0]))
    ahead = np.arange(of_k[-1]) - of_k[at, None]
    seen = (ahead >= 0) & (ahead <= (np.arange(len(at)) - offsets[0][at])[:, None])
    rows = Rows((0,), np.arange(len(at)), np.arange(of_k[-1]))
    heads = ((x.text, x.head(rows).mask) for x in list_alternatives(problem))
    same = (text for text, mask in heads if np.all(seen == (True if mask is None else mask)))
    assert next(same) == (
        "the causal mask is aligned to the first key of each sequence, not to the last"
    )


def said(out, causal=False, arrays=None, offsets=(OF_Q, OF_K), **more):
    return given(out, arrays, offsets) | {"causal": causal} | more


def in_some(number, causal):
    """Other sequences in a tile of rows are right; so are their log normalisers."""
    right = see(level=LEVEL if causal else None)
    wrong = see() if causal else see(np.append(0, BEGIN[:-1]))
    seen = np.where(np.isin(AT, number)[:, None], wrong, right)
    out, lse = fused(hide(scores(Q, K), seen), V)
    return said(np.nan_to_num(out), causal, lse=lse.astype(np.float32))


def of_small_offsets():
    """Those of keys are 1 too small, not those of queries: few rows tell."""
    rng = np.random.default_rng(3)
    offsets = np.cumsum([0, 70, 33, 101, 52])
    q, k, v = (BF16(rng.standard_normal((x, 256, 16))) for x in (4, 1, 1))
    at, of_keys = (
        sequences_of(x, np.arange(256)) for x in (offsets, offsets - (offsets % 256 > 0))
    )
    out = fused(hide(scores(q, k), at[:, None] == of_keys), v)[0]
    return said(out, False, (q, k, v), (offsets, offsets))


def of_three(begin, value=None):
    """Causal, of sequences of which the first keys are given; one row of each may be a number."""
    offsets, rng = np.cumsum([0, 24, 40, 30]), np.random.default_rng(6)
    arrays = q, k, v = [BF16(rng.standard_normal((1, offsets[-1], 16))) for _ in "qkv"]
    row = np.arange(offsets[-1])[:, None]
    out = fused(hide(scores(q, k), (begin(offsets, row) <= row.T) & (row >= row.T)), v)[0]
    if value is not None:
        out[:, offsets[:-1]] = value
    return said(np.nan_to_num(out), True, arrays, (offsets, offsets))


def without_entry(offsets, row):
    """Rows of one sequence see those before it, which has many causes; the others are right."""
    few = np.delete(offsets, 1)
    return few[sequences_of(few, row)]


def after_first(offsets, row):
    """First queries see no key: they are 0 by this, and not any number."""
    return offsets[sequences_of(offsets, row)] + 1


def biased(level):
    bias = (-SLOPES * far(LEVEL)).astype(np.float32)
    return said(attend(see(), -SLOPES * far(level)), bias=bias)


NOT_CAUSAL = "agrees if attention is not causal, but only in"
CASES = {
    "one is not causal": (lambda: in_some(2, True), f"{NOT_CAUSAL}...(sequence 2)$"),
    "two are not causal": (lambda: in_some([0, 3], True), f"{NOT_CAUSAL}...(sequences 0 and 3)$"),
    "one sees more": (lambda: in_some(2, False), "agrees if a sequence also sees the keys of the "
        "sequence before it, but only in...(sequence 2)$"),
    "offsets of one": (lambda: said(attend(np.where((AT == 2)[:, None], see(BEGIN + 3, END + 3),
        see()))), "agrees if offsets of k and v are 3 too large, but only in ... (sequence 2)$"),
    "small offsets": (of_small_offsets, "agrees if cu_seqlens of k and v are 1 too small$"),
    "an entry": (lambda: of_three(without_entry),
        "agrees if entry 1 of cu_seqlens (24) is left out$"),
    "rows that see none": (lambda: of_three(after_first, 0.0),
        "agrees if a sequence does not see its first key$"),
    "rows that see none, and hold a number": (lambda: of_three(after_first, 0.5),
        "agrees in part if all entries of cu_seqlens but the last are 1 too large"),
    "bias from 0": (lambda: biased(0), "the bias is aligned to the start of the buffer"),
    "bias to the end": (lambda: biased(M - N), "the bias is aligned to the end of the buffer"),
    "bias of the longest": (lambda: biased(LONGEST),
        "the bias is aligned by the longest lengths"),
}  # fmt: skip
test_causes_are_named = named(CASES, profile="flash")


@pytest.mark.long
@pytest.mark.parametrize("causal", [False, True])
def test_right_numbers_pass(causal):
    assert judged(attend(see(level=LEVEL if causal else None)), causal).verdict == "PASS"


@pytest.mark.long
@pytest.mark.parametrize("value", ["zero", "stale"])
def test_a_sequence_that_is_skipped(value):
    """They are all 0, or were never written."""
    out = attend(see())
    other = BF16(np.random.default_rng(3).standard_normal(out.shape))
    out[:, AT == 2] = 0 if value == "zero" else other[:, AT == 2]
    found = judged(out)
    where = "queries 18 to 39 (sequence 2)"
    assert where in found.place
    words = {"zero": "all numbers are 0", "stale": UNRELATED}[value]
    assert f"{where}: {words}" in " ".join([*found.remarks, *(x.text for x in found.suspects)])


@pytest.mark.long
def test_no_cause_is_named_for_another_defect():
    """Rows of numbers of another kind in two sequences."""
    out = attend(see())
    out[:, 15:25] = BF16(np.random.default_rng(3).standard_normal((10, 16)))
    words = f"queries 15 to 24 (sequences 1 to 2): {UNRELATED}"
    assert all(x.text.startswith(words) for x in judged(out).suspects)


LENGTHS, SIZE, FEW = np.array([21, 40, 11]), 16, 4
TABLE = np.array([[4, 1, 0], [2, 7, 3], [6, 0, 0]])


def in_blocks():
    """Queries of three members, and keys and values in blocks that lie in any order."""
    rng = np.random.default_rng(6)
    q, k, v = (BF16(rng.standard_normal(x)) for x in ((3, FEW, 2, 16), *[(8, SIZE, 1, 16)] * 2))
    k[5] = np.nan
    return q, k, v


def attend_blocks(table=TABLE, lengths=LENGTHS, level=None, padded=1):
    """Attend; the last query sees the last key, or queries see keys up to a level."""
    q, k, v = in_blocks()
    out = np.zeros(q.shape)
    for b, (row, length) in enumerate(zip(table, lengths, strict=True)):
        keys, values = (x[row].reshape(1, -1, 16) for x in (k, v))
        j, last = np.arange(keys.shape[1]), LENGTHS[b] - FEW if level is None else level[b]
        s = scores(np.swapaxes(q[b], 0, 1), keys)
        s = hide(s, (j < length) & (j <= np.arange(FEW)[:, None] + last))
        more = -length % padded
        s = np.concatenate([s, np.zeros((2, FEW, more))], -1)
        values = np.concatenate([values, np.zeros((1, more, 16))], 1)
        out[b] = np.swapaxes(fused(s, values)[0], 0, 1)
    return out


FULL = np.full(3, 99)
BLOCKS = {
    "whole blocks": ({"lengths": -(-LENGTHS // 16) * 16, "level": FULL},
        "lengths of sequences are rounded up to multiples of 16 keys"),
    "padded": ({"level": FULL, "padded": 16}, "...of each sequence are padded to a"),
    "other blocks": ({"table": np.roll(TABLE, 1, 0), "level": FULL},
        "keys and values are read from the batch member before"),
    "mixed blocks": ({"table": np.array([[4, 1, 0], [4, 7, 6], [6, 0, 0]]), "level": FULL},
        "...block 4 in place of 2 (entry 0 of batch member 1), block 6 in place of 3 (entry 2 of"),
    "blocks in another order": ({"table": np.array([[4, 1, 0], [2, 3, 7], [6, 0, 0]]),
        "level": FULL}, "...block 3 in place of 7 (entry 1 of batch member 1), block 7 in"),
}  # fmt: skip


def given_blocks(out, lengths=LENGTHS, causal=False):
    q, k, v = in_blocks()
    more = {"block_table": TABLE, "cache_seqlens": lengths, "causal": causal}
    return {"q": q, "k": k, "v": v, "out": out} | more


def padding_of_nan(*members):
    """The last block of the sequence in the middle is full."""
    lengths = np.array([21, 48, 11])
    out = attend_blocks(lengths=lengths, level=FULL)
    out[[*members]] = np.nan
    return given_blocks(out, lengths)


NAN = "unused slots of the last block of a sequence are NaN, and 0 times NaN is NaN"
test_causes_with_keys_in_blocks = named(
    {x: (partial(lambda y: given_blocks(attend_blocks(**y)), how), f"agrees if {words}")
        for x, (how, words) in BLOCKS.items()}
    | {"slots": (partial(padding_of_nan, 0, 2), f"agrees if {NAN}$")},
    ("whole blocks",), profile="flash",
)  # fmt: skip
test_causes_in_blocks_are_not_named_for_what_resembles_them = unnamed(
    {
        "right blocks": (lambda: given_blocks(attend_blocks(), causal=True), ""),
        "other slots": (partial(padding_of_nan, 0, 1), NAN),
    },
    profile="flash",
)


@pytest.mark.long
@pytest.mark.parametrize("part", ["out", "dq"])
def test_rows_of_zeros_have_no_cause_that_hides_all_their_keys(part):
    arrays = backward(Q, K, V, BF16(Q[:, ::-1]), seen=see(level=LEVEL))
    arrays[part][:, OF_Q[1] :] = 0.0  # the first sequence alone was written
    more = {x: np.swapaxes(arrays[x], 0, 1) for x in ("d_out", "dq")} if part == "dq" else {}
    found = judged(arrays["out"], True, **more)
    assert "all numbers are 0, as if they were never computed" in str(found)
    assert "offsets" not in str(found)
