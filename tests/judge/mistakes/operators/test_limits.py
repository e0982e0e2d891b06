"""Keys that queries see by mistake, or do not: limits are found, and none where there is none."""

from functools import partial

import numpy as np
import pytest

from refattn.judge import verify

from refattn.judge.mistakes.operators import limits  # isort: skip  (after `verify`)
from tests.judge.mistakes.causes.kernels import ahead, draw, fused, hide, named, scores, unnamed

N = 64
Q, K, V, _ = draw(21, n=N)
FAR, ROW, J = ahead(N, N), np.arange(N)[:, None], np.arange(N)
CAUSAL = FAR <= 0
MASK = np.random.default_rng(3).random((N, N)) < 0.6
SOME = (np.arange(2)[:, None, None] == 1) & (ROW // 16 % 2 == 1) & (ROW % 32 != 23)
FEW = draw(22, n=48, m=80)[:3]
BLOCK = np.arange(48)[:, None] // 16 * 16 + 32  # its first query, in places of keys


def given(seen, arrays=(Q, K, V), **options):
    q, k, v = arrays
    return {"q": q, "k": k, "v": v, "out": fused(hide(scores(q, k), seen), v)[0]} | options


def in_ring():
    """Of 40 keys the newest are hidden, from the one on at which the ring wrapped."""
    arrays, own = draw(35, n=8, m=40, d=64)[:3], np.arange(8)[:, None] + 32
    j = np.arange(40)
    return given((j <= own) & ((j < 19) | (j > own - 13)), arrays, causal=True, window=(31, 0))


def zeroed(made):
    made["out"][1, :32] = 0
    return made


def twice_in_a_sequence():
    """Two sequences of 16 queries with 40 and 24 cached keys, of which 24 count twice."""
    q, k, v, _ = draw(33, n=32, m=96)
    offsets = np.array([0, 16, 32]), np.array([0, 56, 96])
    of_query, of_key = (np.searchsorted(x, np.arange(x[-1]), "right") - 1 for x in offsets)
    own = np.arange(32) - offsets[0][of_query] + np.diff(offsets[1])[of_query] - 16
    near = np.arange(96) - offsets[1][of_key] <= own[:, None]
    s = hide(scores(q, k), (of_query[:, None] == of_key) & near)
    s[:, 16:, :80] += np.log(2)
    made = {"q": q, "k": k, "v": v, "out": fused(s, v)[0]}
    made = {x: np.swapaxes(y, 0, 1) for x, y in made.items()} | {"causal": True}
    return made | {"cu_seqlens_q": offsets[0], "cu_seqlens_k": offsets[1]}


def of_members(mask, seen):
    mask, seen = (x[:, None] for x in (mask, seen))
    arrays = [x.reshape(3, 2, N, 16) for x in draw(31, heads=6, n=N)[:3]]
    made = given(seen, arrays, mask=mask)
    return made | {"out": np.nan_to_num(made["out"])}


PADS = np.array([3, 7, 13])[:, None, None]
PADDED = (FAR <= 0) & (J >= PADS)
CHUNKED = PADDED & ((J - PADS) // 16 == (ROW - PADS) // 16)
ROWS = np.random.default_rng(5).random((3, N, N)) < 0.7
# Of members of a batch with padding before their keys: what is named, the mask, and what is seen.
OF_MEMBERS = {
    "the mask is ignored, and attention is causal, but only in queries 50 to 63": (
        PADDED, np.where(ROW >= 50, FAR <= 0, PADDED)),
    "the window of query i starts at 16 (i // 16) in batch members 1, 2": (
        CHUNKED, np.where(PADS > 3, PADDED & (J // 16 == ROW // 16), CHUNKED)),
    "the mask is read from the first batch member": (
        PADDED, np.broadcast_to(PADDED[:1], (3, N, N))),
    "the mask is read from the next batch member": (
        ROWS, np.where(ROW >= 32, np.roll(ROWS, -1, 0), ROWS)),
}  # fmt: skip
# The keys that are seen, what is said, and what is to be named.
CASES = {
    "masked in the last tile": (
        lambda: given(CAUSAL | (J <= ROW // 32 * 32 + 23), causal=True),
        "queries of a block of 32 also see the keys up to query 23 of the block"),
    "loop too short": (lambda: given(CAUSAL & (J <= ROW // 32 * 32 + 15), causal=True),
        "queries of a block of 32 see only keys up to query 15 of the block"),
    "block of queries": (
        lambda: given((ahead(48, 80) <= 0) & (np.arange(80) <= BLOCK + 11), FEW, causal=True),
        "queries of a block of 16 see only keys up to query 11 of the block"),
    "window without causal": (
        lambda: given((FAR >= -20) & (J <= ROW // 16 * 16 + 15), window=(20, 0)),
        "queries of a block of 16 see all keys of the block"),
    "in some rows": (
        lambda: given(np.where(SOME, J <= ROW // 32 * 32 + 31, CAUSAL), causal=True),
        "queries of a block of 16 see all keys of the block, but only in the wrong rows"),
    "window by blocks": (
        lambda: given((FAR <= 0) & (J >= ROW // 16 * 16 - 20), window=(20, 0)),
        "windows of a block of 16 queries start no later than the window of query 0 of the block"),
    "window that starts late": (
        lambda: given((FAR <= 0) & (J >= ROW // 8 * 8 - 13), window=(20, 0)),
        "windows of a block of 8 queries start no earlier than the window of query 7 of the block"),
    "windows by tiles": (lambda: given((FAR <= 0) & (J >= (ROW - 20) // 16 * 16), window=(20, 0)),
        "windows start at the previous multiple of 16 keys, not at their own key"),
    "windows by later tiles": (
        lambda: given((FAR <= 0) & (J >= -((20 - ROW) // 16 * 16)), window=(20, 0)),
        "windows start at the next multiple of 16 keys, not at their own key"),
    "window of cached keys": (
        lambda: given((ahead(48, 80) <= 0) & ((ahead(48, 80) >= -20) | (np.arange(80) >= 32)), FEW,
            causal=True, window=(20, 0)),
        "the window is not applied to keys 32 and later"),
    "window of later keys": (lambda: given((FAR > 0) & (FAR <= 16), window=(15, 15)),
        "query i sees keys from i + 1 up to i + 16, and no others"),
    "window of earlier keys": (lambda: given((FAR < -1) & (FAR >= -12), window=(20, 0)),
        "query i sees keys from i - 12 up to i - 2, and no others"),
    "window ahead": (lambda: given((ahead(48, 80) >= -30) & (ahead(48, 80) < -5), FEW),
        "query i sees keys from i + 2 up to i + 26, and no others"),
    "mask that is inverted": (lambda: given(FAR > 0, causal=True),
        "query i sees keys from i + 1, and no others"),
    "mask that ends": (lambda: given(MASK | (J >= 40), mask=MASK), "keys 40 to 63 are not masked"),
    "in rows that are no tiles": (
        lambda: given(np.where(ROW % 3 == 1, J <= ROW // 32 * 32 + 31, CAUSAL), causal=True),
        "agrees if queries of a block of 32 see all keys of the block, but only in queries"),
    "in the order of a ring": (in_ring,
        "query 0 not key 19 and also key 0; query 1 not keys 19 to 20 and also keys 0 to 1"),
    "rows of zeros": (lambda: zeroed(given(CAUSAL, causal=True)),
        "head 1, queries 0 to 31: all numbers are 0, as if they were never computed$"),
    "twice in a sequence": (twice_in_a_sequence, "keys 56 to 79 count twice"),
    **{x: (partial(of_members, *y), f"agrees if {x}") for x, y in OF_MEMBERS.items()},
    "mask that begins": (lambda: given(MASK | (J < 16), mask=MASK), "keys 0 to 15 are not masked"),
}  # fmt: skip
test_limits_are_named = named(CASES, ("loop too short",), profile="flash")


def test_a_shift_to_the_last_key():
    far = np.ones((2, 4))
    far[[0, 1], [2, 3]] = 0.0
    assert limits._choose_shift(far, np.arange(2)) == (2, 0.0)


def of_own(seed):
    """Each query lacks keys of its own."""
    more = np.random.default_rng(seed).integers(1, 12, (N, 1))
    return given(FAR - more <= 0, causal=True)


def of_other_values():
    """More is wrong than what a query sees."""
    arrays = given(CAUSAL & (J <= ROW // 32 * 32 + 15), causal=True)
    return arrays | {"out": np.where(ROW % 2, arrays["out"], V)}


NONE = {"own limits": lambda: of_own(0), "others": lambda: of_own(1), "values": of_other_values}
test_none_is_named_where_none_is = unnamed(
    {x: (y, "block") for x, y in NONE.items()}, profile="flash"
)


@pytest.mark.long
@pytest.mark.parametrize("members", [1, 24])
def test_ends_of_masks_of_many_batch_members(members):
    """Those of all of them are fitted; one number for all is said once."""
    rng = np.random.default_rng(5)
    arrays = [x.reshape(members, 2, N, 16) for x in draw(23, heads=2 * members, n=N)[:3]]
    lengths = rng.integers(30, 50, members)[:, None, None, None]
    for late in (3 + 0 * lengths, rng.integers(2, 9, lengths.shape)):
        mask = np.broadcast_to(lengths > J, (members, 1, N, N))
        seen = np.broadcast_to(lengths + late > J, mask.shape)
        text = verify(**given(seen, arrays), mask=mask, dtype="bfloat16").suspects[0].text
        if members > 1:
            assert text.startswith(f"agrees if the mask ends {late[0, 0, 0, 0]} keys too late")
            assert text.endswith(" and so on (20 more)" if np.ptp(late) else "too late")
        else:
            assert f"to {lengths[0, 0, 0, 0] + late[0, 0, 0, 0] - 1}" in text
