"""Causes that others look like: the plainest is named first, and what cannot be told apart is said.

Each is not named where its neighbours are what is wrong.
"""

import math

import numpy as np
import pytest

from refattn.judge import verify
from refattn.judge.rounding.formats import FORMATS
from tests.judge.mistakes.causes.kernels import BF16, ahead, draw, fused, hide, scores

pytestmark = pytest.mark.long
N = 64
Q, K, V, _ = draw()
S, FAR, J = scores(Q, K), ahead(N, N), np.arange(N)
FIRST = J % 32
E4M3 = FORMATS["float8_e4m3fn"].round
HEADS = draw(7, heads=6, n=32)[:3]


def cause(out, arrays=(Q, K, V), **options):
    """The first cause."""
    given = dict(zip("qkv", arrays, strict=True)) | {"out": out} | options
    found = verify(**given, dtype="bfloat16", profile="flash")
    assert found.verdict == "FAIL"
    return found.suspects[0].text if found.suspects else ""


def test_keys_that_are_missing_come_before_copies_of_the_others():
    """Copies have the weights of the keys that they are of; log normalisers tell them apart."""
    out, lse = fused(S[..., FIRST], V[:, FIRST])
    assert cause(out) == "agrees if keys 32 to 63 are left out"
    assert cause(out, lse=lse).startswith("agrees if row j % 32 of k and v is used for key j")
    assert cause(out, lse=lse - math.log(2)) == "agrees if keys 32 to 63 are left out"


@pytest.mark.parametrize(
    ("causal", "left", "right", "words"),
    [
        (True, 9, 0, "9 keys to the left"),
        (False, 9, 0, "9 keys to the left and 0 to the right"),
        (False, 9, 64, "9 keys to the left"),
        (False, 64, 9, "9 keys to the right"),
        (False, 9, 9, "9 keys to both sides"),
        (False, 9, 7, "9 keys to the left and 7 to the right"),
        (False, 2, 30, "2 keys to the left and 30 to the right"),
    ],
)
def test_a_window_that_is_not_declared(causal, left, right, words):
    out, lse = fused(hide(S, (-left <= FAR) & (right >= FAR)), V)
    text = f"agrees if there is a window of {words}"
    assert cause(out, causal=causal) == cause(out, causal=causal, lse=lse) == text


def test_scales_of_tokens_are_compared_where_there_are_as_many():
    """More keys than queries: keys cannot have the scales of queries."""
    q, k, v, _ = draw(3, n=32, m=48)
    by_query, by_key = np.linspace(0.5, 1, 32), np.linspace(1, 2, 48)
    stored = E4M3(q / by_query[:, None]), E4M3(k / by_key[:, None]), v
    out = fused(scores(by_query[:, None] * stored[0], stored[1]), v)[0]
    given = {"q_scale": by_query[None, :, None], "k_scale": by_key[None, :, None]}
    assert cause(out, stored, **given) == "agrees if k_scale is not applied"
    stored = *stored[:2], E4M3(v / by_key[:, None])
    out = fused(scores(by_query[:, None] * stored[0], stored[1]), stored[2])[0]
    given["v_scale"] = given["k_scale"]
    assert cause(out, stored, **given) == "agrees if k_scale and v_scale are not applied"


def overflowing(most, least):
    """Scores of head 1 fall from `most` to `least` from tile to tile; its rows are NaN."""
    q, k = Q.copy(), K.copy()
    q[1], k[1] = 4 * np.eye(16)[0], 0
    k[1, :, 0] = BF16(np.where(J < 32, most, least))
    out = fused(scores(q, k), V)[0]
    out[1] = math.nan
    return cause(out, (q, k, V))


@pytest.mark.parametrize("most", [60, 100])
def test_a_maximum_that_is_reset(most):
    """NaN does not tell it from one that is left out where scores are as large as they fall."""
    reset = "the maximum is taken per tile, and the factor of the earlier sums overflows"
    found = overflowing(most, most - 120)
    plain = f"no maximum is subtracted, and e^score overflows float{16 if most < 88 else 32}"
    assert found == f"agrees if {reset} float32, or {plain} (NaN does not tell which)"
    assert reset not in overflowing(100, 40)


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ([0, 3, 1, 4, 2, 5], "head 1 from head 3, head 2 from head 1, "
         "head 3 from head 4, head 4 from head 2, "
         "as if heads in order (2, 3) were written as (3, 2)"),
        ([0, 2, 1, 3, 4, 5], "head 1 from head 2, head 2 from head 1"),
    ],
)  # fmt: skip
def test_log_normalisers_of_other_heads(order, words):
    """Not if they are so in all heads but one, or are as far for another reason."""
    out, lse = fused(scores(*HEADS[:2]), HEADS[2])
    moved = lse[order]
    assert cause(out, HEADS, lse=moved) == f"agrees if lse is that of other heads: {words}"
    moved[2] += 0.01
    assert cause(out, HEADS, lse=moved) == ""
    assert cause(out, HEADS, lse=np.roll(lse, 3, -1)) == ""
