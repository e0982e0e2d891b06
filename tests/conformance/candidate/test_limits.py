"""What a candidate is declared to take is all that it is asked, and all of it is asked."""

import numpy as np
import pytest

import refattn
from refattn.conformance import CHECKS, SPECS, TAGS, check
from refattn.conformance.candidate.failures import Beyond
from tests.conformance.candidates import SEES, attending, limited, multiple, of, small

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("name", SPECS)
def test_bundles_are_of_known_tags(name):
    assert set(SPECS[name]) <= set(TAGS)
    of(len, "softmax", **SPECS[name])


def test_what_the_limits_leave_is_compared():
    """Logits are made small enough; every check with ordinary numbers is made."""
    adapter = of(limited(small), "softmax", *SEES, max_logit=20)
    names = ["reference_values", "large_logits", "mask", "causal", "grouped_heads", "value_length"]
    report = check(adapter, checks=names)
    assert [r.check for r in report.results if r.status == "PASS"] == [
        name for name in CHECKS if name in names
    ]


@pytest.mark.parametrize("corner", ["top-left", "bottom-right"])
def test_causal_attention_is_not_moved(corner):
    """Tokens that are added must leave the alignment, or nothing is asked."""
    q, k, v = (RNG.standard_normal((n, 4)) for n in (7, 4, 4))
    adapter = of(refattn.softmax_attention, "softmax", "causal", multiple_of=8, causal=corner)
    with pytest.raises(Beyond, match="multiple_of"):
        adapter(q, k, v, causal=True)


def test_logits_of_every_head_count():
    adapter = of(refattn.softmax_attention, "softmax", "gqa", max_logit=10)
    q, k = np.ones((4, 2, 4)), np.ones((2, 3, 4))
    k[1] *= 30
    with pytest.raises(Beyond, match="max_logit"):
        adapter(q, k, np.ones((2, 3, 4)))


@pytest.mark.long("29")
@pytest.mark.parametrize("seeds", [1, 29])
def test_sums_of_keys_that_come_many_times(seeds):
    """Five keys come 64 times each to a kernel of blocks, which adds them in turn."""

    def running(q, k, v):
        scores = np.einsum("...id,...jd->...ij", q, k) / np.sqrt(q.shape[-1])
        weights = np.exp(scores - np.max(scores, -1, keepdims=True))
        return np.einsum("...ij,...jv->...iv", weights, v) / np.sum(weights, -1, keepdims=True)

    adapter = of(limited(multiple(64), running), "softmax", multiple_of=64)
    for seed in range(seeds):
        report = check(adapter, rng=30 - seeds + seed, checks=["value_length"])
        assert report.verdict == "PASS", (seed, report)


def test_limits_of_windows_are_in_the_report():
    adapter = of(attending(), "softmax", *SEES, "window", multiple_of=8)
    assert check(adapter, checks=["windows"]).limits == {
        "multiple_of=8": "no other number of tokens was asked"
    }
