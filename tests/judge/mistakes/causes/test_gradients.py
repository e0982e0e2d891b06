"""What is fitted to wrong gradients: heads in sums, one more vector, other strides, and roundings.

Each is named where it is what is wrong, and not where its neighbours are.
"""

import re

import numpy as np
import pytest

from refattn.judge import verify
from refattn.judge.rounding.formats import FORMATS
from tests.judge.mistakes.causes.kernels import BF16, backward, draw, named, unnamed

pytestmark = pytest.mark.long
SAME = draw(2, heads=4, n=40)
GROUPS = [x[:2] if i in (1, 2) else x for i, x in enumerate(draw(3, heads=8, n=40))]
SHARED = [x[:2] if i in (1, 2) else x for i, x in enumerate(draw(2, heads=4))]
LARGE = draw(5, n=40, size=12.0)
NOISE = np.random.default_rng(1).standard_normal


def weighed(*weights):
    """Gradients of key heads as sums over all query heads, each so many times."""
    q, k, v, g = GROUPS
    each = backward(q, np.repeat(k, 4, 0), np.repeat(v, 4, 0), g)
    sums = {x: BF16(np.tensordot(np.array(weights), each[x], 1)) for x in ("dk", "dv")}
    return backward(*GROUPS) | sums


def of_half_heads():
    seen = np.ones((8, 40, 40), bool)
    seen[1::2, :10] = False
    return backward(*GROUPS, seen_back=seen)


def added(vectors):
    """Gradients in values to whose rows vectors are added."""
    found = backward(*SAME)
    return found | {"dv": BF16(found["dv"] + vectors)}


def of_next_head():
    """As a tile of 16 queries has it that is not cut."""
    sums = np.zeros((4, 1, 16))
    sums[:3, 0] = np.sum(SAME[3][1:, :8], 1)
    return added(sums)


def other_delta(rows, change):
    """D of some rows is changed."""

    def changed(delta):
        mixed = delta.copy()
        mixed[rows] = change(delta)[rows]
        return mixed

    return backward(*SAME, delta=changed)


def of_numbers(name, change):
    return backward(*SAME, **{name: lambda x: change(x).reshape(x.shape)})


def rounded(name, noise=False):
    """The backward pass rounds scores, or has errors as large that are no roundings."""
    (q, k, v, g), to = LARGE, FORMATS[name]
    k = BF16(k + 8 * (name == "float16"))
    size = np.max(np.abs(to.spacing(q @ np.swapaxes(k, 1, 2) / 4)))
    noises = size * (np.random.default_rng(2).random((2, 40, 40)) - 0.5)
    return backward(q, k, v, g, scores=(lambda s: s + noises) if noise else to.round)


OTHER = 10 * NOISE((4, 40, 1))
D, VECTOR = "D = d_out . out is", "the same vector is added to dv of all keys of a head"
TURNED = {
    "(heads, rows), not (rows, heads)": lambda x: np.swapaxes(x.reshape(4, 40), 0, 1),
    "(rows, heads), not (heads, rows)": lambda x: np.swapaxes(x.reshape(40, 4), 0, 1),
}
NAMED = (("delta", "dq", D), ("lse", "dv", "lse is"))
# What is done, where it shows, and the cause.
CASES = {
    "left out": (lambda: weighed([1, 0, 1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 1, 0, 1, 0]), "dk dv",
        "query heads h with h % 4 = 1 or 3 are left out"),
    "twice": (lambda: weighed([1, 0, 2, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 0, 2, 1]), "dk dv",
        "query heads h with h % 4 = 1 are left out and "
        "query heads h with h % 4 = 2 count twice"),
    "others": (lambda: weighed([1, 1, 0, 1, 1, 0, 0, 0], [0, 0, 0, 0, 1, 1, 1, 1]), "dk dv",
        "the gradient of key head 0 sums query heads 0, 1, 3, 4"),
    "next head": (of_next_head, "dv", f"{VECTOR}: the sum of d_out over queries 0 to 7 of the next "
        "head, as if the last tile of 16 queries ran past query 39"),
    "vectors": (lambda: added(OTHER[:, :1] * NOISE(16)), "dv", VECTOR),
    "other numbers": (lambda: backward(*SAME, delta=lambda x: x + OTHER * np.isin(
        np.arange(4), [0, 2])[:, None, None] * (np.arange(40) // 8 == 1)[:, None]), "dq dk",
        f"{D} another number in heads 0, 2, queries 8 to 15"),
    "none of a tile": (lambda: other_delta(np.s_[:, 8:16], lambda x: 0 * x), "dq dk",
        f"{D} left out in queries 8 to 15"),
    "twice in all": (lambda: other_delta(np.s_[:], lambda x: 2 * x), "dq dk",
        f"{D} multiplied by 2$"),
    "some rows": (lambda: other_delta(np.s_[:, 3::5], lambda x: 1.5 * x), "dq dk",
        f"{D} multiplied by 1.5 in queries 3 to 38 in steps of 5"),
    "elsewhere": (lambda: other_delta(np.s_[:, 9:30], lambda x: np.roll(x, 1, 1)), "dq dk",
        f"{D} read elsewhere: queries 9 to 29 read those of queries 8 to 28"),
    "none of a row": (lambda: other_delta(np.s_[1, 20], lambda x: 0 * x), "dq dk",
        f"{D} left out in head 1, query 20"),
    "half of a row": (lambda: other_delta(np.s_[1, 20], lambda x: x / 2), "dq dk",
        f"{D} multiplied by 0.5"),
    **{f"{x} in {y}": (lambda x=x, turn=turn: of_numbers(x, turn), part, f"{words} read with the "
        f"strides of {y}") for x, part, words in NAMED for y, turn in TURNED.items()},
    **{x: (lambda x=x: rounded(x), "dq", "in the backward pass q . k is (or scores are) rounded to "
        f"{x}") for x in ("float16", "bfloat16")},
}  # fmt: skip
test_causes_are_named = named({x: (y, z, of) for x, (y, of, z) in CASES.items()}, profile="flash")


MIXED = np.random.default_rng(3).permutation(160)
NEIGHBOURS = {  # what resembles them, and is not to be named
    "half of heads": (lambda: weighed([1, 0.5, 1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 1, 0.5, 1, 0]),
        "dk", "a"),
    "heads of half the queries": (of_half_heads, "dk", "a"),
    "vectors of tiles": (lambda: added(np.repeat(OTHER[:, ::8] * NOISE(16), 8, 1)), "dv", "a"),
    "no strides": (lambda: of_numbers("delta", lambda x: x.ravel()[MIXED]), "dq", "strides"),
    "no strides of lse": (lambda: of_numbers("lse", lambda x: x.ravel()[MIXED]), "dv", "strides"),
    "noise in a tile": (lambda: (x := CASES["other numbers"][0]()) | {"dq": BF16(
        x["dq"] + (np.arange(40) // 8 == 1)[:, None] * NOISE((4, 40, 16)))}, "dq", "another num"),
    "noise in a row": (lambda: (x := backward(*SAME)) | {"dq": BF16(x["dq"] + 0.1 * (np.arange(
        160).reshape(4, 40, 1) == 60) * NOISE(16))}, "dq", "D = "),
    "noise in float16": (lambda: rounded("float16", True), "dq", "rounded"),
    "noise in bfloat16": (lambda: rounded("bfloat16", True), "dq", "rounded"),
}  # fmt: skip
test_causes_are_not_named_for_what_resembles_them = unnamed(
    {x: (y, z, of) for x, (y, of, z) in NEIGHBOURS.items()}, profile="flash"
)


def test_a_common_factor_of_all_gradients():
    """It is found by a profile that explains the rest, with none given; and no roundings are."""
    found = verify(**backward(*SHARED, lse=lambda x: x - 0.01)).parts
    for part in ("dq", "dk", "dv"):
        (factor,) = found[part].suspects
        assert factor.name == "factor"
        assert re.match(rf"{part} is 1\.0(10|099)\S* ± \S+ times", factor.text)


def test_a_common_factor_beside_another_error_is_not_the_cause():
    wrong = backward(*SHARED, lse=lambda x: x - 0.01)
    wrong["dv"] = BF16(wrong["dv"] * (1 + 0.01 * NOISE(wrong["dv"].shape)))
    del wrong["dq"], wrong["dk"]
    found = verify(**wrong).parts["dv"]
    assert found.verdict == "FAIL"
    assert "factor" not in [x.name for x in found.suspects]


def test_rows_of_right_heads_do_not_make_a_cause_partial():
    """They have the roundings of a fused kernel, more than those of a profile without any."""
    q, k, v, g = draw(2, heads=4, n=64, d=32)
    k, v = k[:2], v[:2]
    seen = np.tri(64, dtype=bool)
    wrong = backward(q, *(np.tile(x, (2, 1, 1)) for x in (k, v)), g, seen=seen)
    wrong |= {x: BF16(wrong[x][:2] + wrong[x][2:]) for x in ("dk", "dv")}
    found = verify(**wrong | {"k": k, "v": v}, causal=True).parts["dq"]
    assert (
        found.suspects[0].text
        == "agrees if keys and values are read from key head h % 2 for query head h"
    )


def test_rows_that_have_vectors_of_their_own():
    """Nor are they said to be stale, as they are like the exact ones but for these."""
    arrays = added(np.repeat(10 * NOISE((4, 5, 16)), 8, 1))
    only = np.zeros((4, 40, 16))
    only[1] = 10 * NOISE(16) + 0.2 * NOISE((40, 16))
    found = verify(**added(only), profile="flash").parts["dv"]
    words = (
        "head 1: numbers are like the exact ones if each head's mean row is subtracted from both"
    )
    assert words in found.remarks
    arrays["dv"][1] = BF16(NOISE((40, 16)))
    arrays["dv"][[0, 2, 3]] = backward(*SAME)["dv"][[0, 2, 3]]
    remarks = verify(**arrays, profile="flash").parts["dv"].remarks
    assert any("never written (stale)" in x for x in remarks)
