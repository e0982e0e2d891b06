"""What is fitted to wrong gradients: heads in sums, one more vector, other strides, and roundings.

Each is named where it is what is wrong, and not where its neighbours are.
"""

import re

import numpy as np
import pytest

from refattn.judge import verify
from refattn.judge.rounding.formats import FORMATS
from tests.judge.mistakes.causes.kernels import BF16, backward, draw

pytestmark = pytest.mark.long
SAME = draw(2, heads=4, n=40)
GROUPS = [x[:2] if i in (1, 2) else x for i, x in enumerate(draw(3, heads=8, n=40))]
SHARED = [x[:2] if i in (1, 2) else x for i, x in enumerate(draw(2, heads=4))]
LARGE = draw(5, n=40, size=12.0)
NOISE = np.random.default_rng(1).standard_normal


def cause(arrays, part, **options):
    """The first cause of a gradient that fails."""
    found = verify(**arrays, profile="flash", **options).parts[part]
    assert found.verdict == "FAIL"
    return found.suspects[0].text if found.suspects else ""


def weighed(weights, part="dk"):
    """Gradients of key heads as sums over all query heads, each so many times."""
    q, k, v, g = GROUPS
    each = backward(q, np.repeat(k, 4, 0), np.repeat(v, 4, 0), g)
    sums = {x: BF16(np.tensordot(np.array(weights), each[x], 1)) for x in ("dk", "dv")}
    return cause(backward(*GROUPS) | sums, part)


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ([[1, 0, 1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 1, 0, 1, 0]],
         "query heads h with h % 4 = 1 or 3 are left out"),
        ([[1, 0, 2, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 0, 2, 1]],
         "query heads h with h % 4 = 1 are left out and "
         "query heads h with h % 4 = 2 count twice"),
        ([[1, 1, 0, 1, 1, 0, 0, 0], [0, 0, 0, 0, 1, 1, 1, 1]],
         "the gradient of key head 0 sums query heads 0, 1, 3, 4"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("part", ["dk", "dv"])
def test_query_heads_that_reach_keys(weights, words, part):
    assert weighed(weights, part) == f"agrees if {words}"


def test_query_heads_that_count_in_part_are_not_left_out():
    """Times 1/2, or of which the first queries are lost."""
    assert weighed([[1, 0.5, 1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 1, 0.5, 1, 0]]) == ""
    seen = np.ones((8, 40, 40), bool)
    seen[1::2, :10] = False
    assert cause(backward(*GROUPS, seen_back=seen), "dk") == ""


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


def added(vectors):
    """Gradients in values to whose rows vectors are added."""
    found = backward(*SAME)
    return found | {"dv": BF16(found["dv"] + vectors)}


def test_a_vector_that_is_added_to_all_rows():
    """Of the next head, as a tile of 16 queries that is not cut has it, or of none."""
    sums = np.zeros((4, 1, 16))
    sums[:3, 0] = np.sum(SAME[3][1:, :8], 1)
    text = "agrees if the same vector is added to dv of all keys of a head"
    next_head = "the sum of d_out over queries 0 to 7 of the next head, as if the last tile of 16"
    arrays = added(sums)
    assert cause(arrays, "dv") == f"{text}: {next_head} queries ran past query 39"
    assert cause(added(10 * NOISE((4, 1, 16))), "dv") == text


def test_rows_that_have_vectors_of_their_own():
    """Nor are they said to be stale, as they are like the exact ones but for these."""
    by_tile = np.repeat(10 * NOISE((4, 5, 16)), 8, 1)
    arrays = added(by_tile)
    assert cause(arrays, "dv") == ""
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


TURNED = {
    "(heads, rows), not (rows, heads)": lambda x: np.swapaxes(x, 0, 1).reshape(x.shape),
    "(rows, heads), not (heads, rows)": lambda x: np.swapaxes(x.reshape(40, 4, -1), 0, 1),
}


@pytest.mark.parametrize("words", TURNED)
@pytest.mark.parametrize(
    ("name", "called", "part"), [("delta", "D = d_out . out", "dq"), ("lse", "lse", "dv")]
)
def test_numbers_of_rows_that_are_read_with_other_strides(name, called, part, words):
    arrays = backward(*SAME, **{name: lambda x: TURNED[words](x).reshape(x.shape)})
    text = f"agrees if {called} is read with the strides of {words}"
    assert cause(arrays, part).startswith(text)
    mixed = np.random.default_rng(3).permutation(160)
    arrays = backward(*SAME, **{name: lambda x: x.ravel()[mixed].reshape(x.shape)})
    assert "strides" not in cause(arrays, part)


def test_numbers_of_rows_that_are_others():
    """D of some queries is of nowhere, and so are dq and dk; not where rows have other errors."""
    other = np.zeros((4, 40, 1))
    other[[0, 2], 8:16] = NOISE((2, 8, 1))
    arrays = backward(*SAME, delta=lambda x: x + other)
    text = "agrees if D = d_out . out is another number in heads 0, 2, queries 8 to 15"
    assert [cause(arrays, x) for x in ("dq", "dk")] == [text, text]
    arrays["dq"] = BF16(arrays["dq"] + 0.1 * other * NOISE(16))
    assert "another number" not in cause(arrays, "dq")


@pytest.mark.parametrize(
    ("rows", "change", "words"),
    [
        (slice(8, 16), lambda x: 0 * x, "left out in queries 8 to 15"),
        (slice(None), lambda x: 2 * x, "multiplied by 2 in all rows"),
        (
            slice(3, None, 5),
            lambda x: 1.5 * x,
            "multiplied by 1.5 in queries 3 to 38 in steps of 5",
        ),
        (
            slice(9, 30),
            lambda x: np.roll(x, 1, 1),
            "read elsewhere: queries 9 to 29 read those of queries 8 to 28",
        ),
    ],
)
def test_numbers_of_rows_that_are_right_but_for_one_number(rows, change, words):
    """Both dq and dk have the same cause, without `but only in`."""

    def changed(delta):
        mixed = delta.copy()
        mixed[:, rows] = change(delta)[:, rows]
        return mixed

    arrays = backward(*SAME, delta=changed)
    for of in ("dq", "dk"):
        assert cause(arrays, of).startswith(f"agrees if D = d_out . out is {words}")


@pytest.mark.parametrize(("factor", "words"), [(0.0, "left out"), (0.5, "multiplied by 0.5")])
def test_a_number_of_one_row_that_is_another(factor, words):
    """It explains all of the row of dq and what dk has of it, but no other error of a row."""
    wrong = np.ones((4, 40, 1))
    wrong[1, 20] = factor
    arrays = backward(*SAME, delta=lambda x: wrong * x)
    for of in ("dq", "dk"):
        found = cause(arrays, of)
        assert found.startswith(f"agrees if D = d_out . out is {words}")
        assert found.endswith(" in head 1, query 20")
    arrays = backward(*SAME)
    arrays["dq"][1, 20] = BF16(arrays["dq"][1, 20] + 0.1 * NOISE(16))
    assert "D = " not in cause(arrays, "dq")


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_scores_that_are_rounded_in_the_backward_pass_alone(name):
    q, k, v, g = LARGE
    k = BF16(k + 8 * (name == "float16"))
    to = FORMATS[name]
    text = f"agrees if in the backward pass q . k is (or scores are) rounded to {name}"
    assert cause(backward(q, k, v, g, scores=to.round), "dq").startswith(text)
    size = np.max(np.abs(to.spacing(LARGE[0] @ np.swapaxes(k, 1, 2) / 4)))
    noise = size * (np.random.default_rng(2).random((2, 40, 40)) - 0.5)
    assert "rounded" not in cause(backward(q, k, v, g, scores=lambda s: s + noise), "dq")
