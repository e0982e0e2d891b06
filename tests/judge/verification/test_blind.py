"""Outputs that say nothing: that they pass is said, and a verdict by them is no PASS."""

import math

import numpy as np
import pytest

from refattn import naive
from refattn.judge.rounding.formats import FORMATS
from refattn.judge.verification import blind, verify
from tests.judge.rounding.rounded import BF16, dump
from tests.judge.verification.test_verdict import sample

HALF = FORMATS["float16"].round


def judged(q, k, v, **options):
    return verify(**dump("flash", q, k, v, "bfloat16", **options), profile="flash")


MEAN, HALF_SCALE, LAST = "mean of v", "half the scale", "the last keys lost"
SAME = f"{MEAN} (the right result here: all keys are the same)"
FEW = {"mask": np.broadcast_to(np.arange(128) < 60, (128, 128))}
# Arrays and options, what would also pass, and what is said of it; a * is UNDERPOWERED.
CASES = {
    "trained": (lambda q, k, v: (q, k, v), {}, (), ""),
    "trained, causal": (lambda q, k, v: (q, k, v), {"causal": True}, (), ""),
    "keys that no query sees": (lambda q, k, v: (q, k, v), FEW, (LAST,), ""),
    "equal keys": (lambda q, k, v: (q, k[:, [0] * 128], v), {}, (SAME, HALF_SCALE),
        "also pass: use keys that differ"),
    "* small scores": (lambda q, k, v: (BF16(1e-4 * q), k, v), {}, (MEAN, HALF_SCALE),
        "mean of v and half the scale would also pass: use q and k with scores"),
    "* keys of 0": (lambda q, k, v: (q, 0 * k, v), {}, (MEAN, HALF_SCALE), "use q and k with"),
    "* values of 0": (lambda q, k, v: (q, k, 0 * v), {}, ("zeros", MEAN, HALF_SCALE, LAST), ""),
    "* equal values": (lambda q, k, v: (q, k, v[:, [0] * 128]), {}, (MEAN, HALF_SCALE, LAST),
        "would also pass: use values that differ from key to key\n"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_would_also_pass_is_said(name):
    change, options, blind, words = CASES[name]
    found = judged(*change(*sample()), **options)
    assert (found.verdict, found.blind) == ("UNDERPOWERED" if "*" in name else "PASS", blind)
    assert words in str(found)
    if name == "* equal values":
        assert "v is the same for all keys: any weights give the same output\n" in str(found)
        assert "larger q" not in str(found)


@pytest.mark.sweep(6)
@pytest.mark.parametrize(("n", "softcap"), [(64, 40.0), (128, 50.0)])
def test_an_option_that_is_ignored_is_named(n, softcap):
    """Scores of up to 5 under a cap: each column alone might be of eager, a row is not."""
    q, k, v = (BF16(np.random.default_rng(x).standard_normal((1, n, 128))) for x in range(3))
    given = dump("flash", q, k, v, "bfloat16")
    found = verify(**given, softcap=softcap)
    assert found.verdict == "FAIL"
    assert "there is no soft cap" in str(found)
    assert verify(**given).verdict == "PASS"


def test_power_is_less_what_the_tests_subtract():
    """8-bit numbers: their slack hides 1 %."""
    to = FORMATS["float8_e4m3fn"].round
    rng = np.random.default_rng(0)
    q, k, v = (to(rng.standard_normal((2, x, 64))) for x in (64, 512, 512))
    q, v = 2 * q, to(1 + 0.3 * v)
    out = BF16(naive.softmax_attention(q, k, v))
    found = verify(q=q, k=k, v=v, out=out, dtype="float8_e4m3fn", profile="flash")
    assert found.detectable["factor"] > 0.01
    assert found.verdict == "UNDERPOWERED"


def stepwise_half(q, k, v, seen, hidden=-math.inf, bias=0.0):
    """Step by step in float16, but for scores in float32 if keys are hidden by a number."""
    narrow = HALF if hidden == -math.inf else np.float32
    with np.errstate(all="ignore"):
        s = narrow(narrow(q @ k.swapaxes(-1, -2)) * 0.25) + bias
        s = np.where(seen, s, hidden)
        w = np.exp(s - np.max(s, -1, keepdims=True))
        return HALF(HALF(w / np.sum(w, -1, keepdims=True)) @ v)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("score", "4 of these rows hold the output if hidden keys have the score -10000"),
        ("zeros", "4 of these rows hold 0"),
        ("mean", "4 of these rows hold the mean of all values"),
        ("overflow", "4 of these rows hold NaN or infinity: q . k is up to "),
    ],
)
def test_what_rows_hold_of_which_nothing_is_known(how, words):
    """Scores of visible keys near -10000, of which float16 has every eighth, or beyond 65504."""
    q, k, v = (HALF(np.random.default_rng(x).standard_normal((1, 48, 16))) for x in range(3))
    seen, bias, rows = np.tri(48, dtype=bool), np.zeros((48, 48)), slice(10, 14)
    if how == "overflow":
        q[0, rows], k[0, ::2] = HALF(9000 * q[0, rows]), HALF(9 * k[0, ::2])
        out = stepwise_half(q, k, v, seen)
    else:
        bias[rows] = -1e4
        out = stepwise_half(q, k, v, seen, -1e4, bias)
    if how in ("zeros", "mean"):
        out[0, rows] = 0 if how == "zeros" else HALF(np.mean(v[0], 0))
    found = verify(q=q, k=k, v=v, out=out, causal=True, bias=bias, dtype="float16", profile="eager")
    assert found.verdict == "UNDERPOWERED"
    assert words in str(found)
    if how == "overflow":
        assert "and float16 ends at 65504" in str(found)


@pytest.mark.sweep(12)
@pytest.mark.parametrize("options", ["", "causal", "mask", "bias", "sinks"])
@pytest.mark.parametrize("same", ["nothing", "zeros", "no queries", "keys", "values"])
def test_outputs_that_are_right_by_their_arrays_would_pass(same, options, monkeypatch):
    """What is not computed for equal arrays is what all tests find."""
    rng = np.random.default_rng(8)
    q, k, v = (BF16(rng.standard_normal((2, x, 8))) for x in (24, 40, 40))
    changed = {
        "zeros": lambda: (0 * q, 0 * k, 0 * v),
        "no queries": lambda: (0 * q, k, v),
        "keys": lambda: (q, k[:, :1].repeat(40, 1), v),
        "values": lambda: (q, k, v[:, :1].repeat(40, 1)),
    }
    arrays = changed.get(same, lambda: (q, k, v))()
    given = {
        "causal": {"causal": True},
        "mask": {"mask": np.tri(24, 40, 20, dtype=bool)},
        "bias": {"bias": BF16(rng.standard_normal((24, 40)))},
        "sinks": {"sinks": np.array([0.5, 1.0])},
    }.get(options, {})
    found = judged(*arrays, **given).blind
    monkeypatch.setattr(blind, "_is_exact", lambda name, problem, index: False)
    assert found == judged(*arrays, **given).blind
