"""Outputs that say nothing: that they pass is said, and a verdict by them is no PASS."""

import numpy as np
import pytest

from refattn.rounding.formats import FORMATS
from refattn.verification import verify
from tests.rounding.rounded import of_heads
from tests.verification.test_verdict import BF16, sample


def judged(q, k, v, **options):
    out, _ = of_heads("flash", q, k, v, "bfloat16", **options)
    return verify(q=q, k=k, v=v, out=out, dtype="bfloat16", profile="flash", **options)


@pytest.mark.parametrize("causal", [False, True])
def test_trained_tensors_are_not_blind(causal):
    found = judged(*sample([0, 5]), causal=causal)
    assert (found.verdict, found.blind) == ("PASS", ())


def test_the_mean_of_values_where_scores_are_small():
    q, k, v = sample([0, 5])
    found = judged(BF16(1e-4 * q), k, v)
    assert found.verdict == "UNDERPOWERED"
    assert found.blind == ("mean of v", "half the scale")
    assert "UNDERPOWERED: mean of v would not have been rejected" in str(found)
    words = "on these inputs mean of v and half the scale would pass as well: give larger q or k"
    assert words in str(found)


def test_zeros_where_values_are_0():
    q, k, v = sample([0])
    found = judged(q, k, 0 * v)
    assert {"zeros", "mean of v"} <= {*found.blind}
    assert found.verdict == "UNDERPOWERED"


@pytest.mark.parametrize(
    ("n", "softcap", "verdict"), [(64, 40.0, "UNDERPOWERED"), (128, 50.0, "FAIL")]
)
def test_an_option_that_is_ignored_is_named(n, softcap, verdict):
    """Scores of up to 5 under a cap: eager may allow more than that changes, of a few rows."""
    q, k, v = (BF16(np.random.default_rng(x).standard_normal((1, n, 128))) for x in range(3))
    out, _ = of_heads("flash", q, k, v, "bfloat16")
    found = verify(q=q, k=k, v=v, out=out, dtype="bfloat16", softcap=softcap)
    assert found.verdict == verdict
    words = {
        "UNDERPOWERED": "a kernel that ignores the soft cap would not have been rejected",
        "FAIL": "there is no soft cap",
    }
    assert words[verdict] in str(found)
    assert verify(q=q, k=k, v=v, out=out, dtype="bfloat16").verdict == "PASS"


def test_keys_that_no_query_sees_may_be_lost():
    q, k, v = sample([0, 5])
    mask = np.broadcast_to(np.arange(128) < 60, (128, 128))
    found = judged(q, k, v, mask=mask)
    assert (found.verdict, found.blind) == ("PASS", ("the last keys lost",))


def test_power_is_less_what_the_tests_subtract():
    """8-bit numbers: their slack hides 1 %."""
    to = FORMATS["float8_e4m3fn"].round
    rng = np.random.default_rng(0)
    q, k, v = (to(rng.standard_normal((2, x, 64))) for x in (64, 512, 512))
    q, v = 2 * q, to(1 + 0.3 * v)
    s = q @ k.swapaxes(1, 2) / 8
    p = np.exp(s - s.max(-1, keepdims=True))
    out = BF16(p @ v / p.sum(-1, keepdims=True))
    found = verify(q=q, k=k, v=v, out=out, dtype="float8_e4m3fn", profile="flash")
    assert found.detectable["factor"] > 0.01
    assert found.verdict == "UNDERPOWERED"
