"""Verdicts on estimators whose laws are derived from texts: kernels in other orders and types."""

import numpy as np
import pytest

from refattn import coreset_attention, verify
from refattn.judge.rounding.formats import FORMATS
from tests.cli.running import run
from tests.judge.rounding import estimators

WRONG = {
    "ra": {"norms": "|k|^2/2 is not subtracted", "sample": ""},
    "lara": {"centres": "", "sample": ""},
    "rfa-local": {"edge": "", "count": ""},
    "performer-relu": {"epsilon": "added to features of keys, not to those of queries"},
    "is": {"norms": ""},
    "eva": {"edge": "", "norms": "too much in their chunk"},
    "second-order": {"edge": "", "norms": "the variance of scores is not halved"},
}


@pytest.mark.sweep(5)
@pytest.mark.parametrize("causal", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", estimators.NAMES)
def test_a_right_kernel_passes_and_fits(name, causal):
    found = verify(**estimators.draw(name, "float32", "float32", 0, causal=causal))
    assert found.verdict == "PASS"
    assert 0.6 < found.z.rms < 1.15


@pytest.mark.sweep(6)
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.long)])
@pytest.mark.parametrize("style", ["sums", "operands", "steps"])
@pytest.mark.parametrize("name", estimators.NAMES)
def test_a_right_kernel_in_16_bits_passes(name, style, dtype):
    few = {"n": 6, "m": 10, "d": 4, "d_v": 4, "samples": 4, "count": 2}
    given = estimators.draw(name, style, dtype, 1, **few)
    assert verify(**given).verdict in ("PASS", "UNDERPOWERED")
    profile = {"sums": "math", "operands": "flash", "steps": "eager"}[style]
    assert verify(**given, profile=profile).z.rms < 1.4


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("name", "wrong"), [(x, y) for x in WRONG for y in WRONG[x]])
def test_a_wrong_kernel_fails_and_a_known_bug_is_named(name, wrong):
    words = WRONG[name][wrong]
    given = estimators.draw(name, "float32", "float32", 0, wrong=wrong)
    found = verify(**given, explain=bool(words))
    assert found.verdict == "FAIL"
    assert not words or words in found.suspects[0].text


def test_the_constant_of_relu_features_is_an_option():
    given = estimators.draw("performer-relu", "float32", "float32", 0, n=10, m=14)
    verdicts = [verify(**given, kernel_epsilon=x).verdict for x in (None, 0.001, 0.002)]
    assert verdicts == ["PASS", "PASS", "FAIL"]
    for name in ("rfa", "linear", "softmax", "ra"):
        with pytest.raises(ValueError, match="`kernel_epsilon` must not be given for "):
            verify(**given | {"estimator": name}, kernel_epsilon=0.001)


@pytest.mark.parametrize("name", estimators.NAMES)
def test_a_wrong_scale_fails(name):
    # With ReLU a scale is one of the constant that is added.
    few = {"n": 10, "m": 14, "scale": 1.1 if name == "performer-relu" else 1 + 1e-4}
    assert verify(**estimators.draw(name, "float32", "float32", 0, **few)).verdict == "FAIL"


@pytest.mark.parametrize("name", estimators.NAMES)
def test_one_wrong_row_is_named(name):
    given = estimators.draw(name, "float32", "float32", 0, n=10, m=14)
    given["out"][3] = np.float32(given["out"][3] * (1 + 1e-5))
    found = verify(**given)
    assert (found.verdict, [x for x, _ in found.rows]) == ("FAIL", [(3,)])
    assert "1 of 10 rows" in found.place


@pytest.mark.parametrize(("style", "profile"), [("sums", "math"), ("operands", "flash")])
def test_one_wrong_row_in_bfloat16_is_named(style, profile):
    given = estimators.draw("eva", style, "bfloat16", 0, n=8, m=12, d_v=16)
    given["out"][3] = FORMATS["bfloat16"].round(given["out"][3] * 1.06)
    assert [x for x, _ in verify(**given, profile=profile).rows] == [(3,)]


def test_one_key_for_many_samples_is_summed_alike():
    """A mean of equal numbers: those that are added in turn are rounded to the same side."""
    sizes = {"n": 2, "m": 2, "d_v": 28, "samples": 52, "causal": True}
    found = verify(**estimators.draw("ra", "float32", "float32", 1, **sizes))
    assert found.verdict != "FAIL"


def test_equal_keys_are_rounded_alike():
    given = estimators.draw("ra", "float32", "float32", 0)
    k, v, omega = np.repeat(given["k"][:3], 8, 0), np.repeat(given["v"][:3], 8, 0), given["omega"]
    out = estimators.ra(estimators.Steps(), given["q"], k, v, omega, 8**-0.5, False)
    assert verify(**given | {"k": k, "v": v, "out": out}).verdict == "PASS"


@pytest.mark.parametrize("wrong", ["", "last"])
def test_a_coreset_is_judged(wrong):
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 16, 4)).astype("f4")
    indices = np.array([0, 3, 7, 9, 12])
    out = coreset_attention(q, k, v, indices=indices[:-1] if wrong else indices)
    found = verify(q=q, k=k, v=v, out=out, estimator="coreset", indices=indices)
    assert found.verdict == ("FAIL" if wrong else "PASS")


def test_a_query_that_sees_no_key_gives_0():
    with np.errstate(invalid="ignore"):
        given = estimators.draw("is", "float32", "float32", 0, n=12, m=10, causal=True)
    given["out"][:2] = 0
    assert verify(**given).verdict == "PASS"
    given["out"][1] = 1
    assert verify(**given).verdict == "FAIL"


ERRORS = {
    "`omega` must be given for lara: frequencies": {"omega": None},
    "`indices` must not be given for lara": {"indices": np.arange(3)},
    "`sinks` must not be given for lara": {"sinks": np.zeros(1)},
    "multiple of the number of proposals": {"num_proposals": 3},
    "lara is judged in float32, float16, bfloat16 only, got float64": {"dtype": "float64"},
}


@pytest.mark.parametrize("words", ERRORS)
def test_a_wrong_argument_is_named(words):
    given = estimators.draw("lara", "float32", "float32", 0) | ERRORS[words]
    if given["dtype"] == "float64":
        given |= {x: given[x].astype("f8") for x in "qkv"}
    with pytest.raises(ValueError, match=words):
        verify(**given)


def test_a_file_is_judged(tmp_path):
    given = estimators.draw("eva", "float32", "float32", 0, n=10, m=12)
    arrays = {x: given[x].astype("f4") for x in ("q", "k", "v", "out")}
    np.savez(tmp_path / "eva.npz", **arrays)
    found = run("verify", tmp_path / "eva.npz", "--estimator", "eva", "--chunk", "6")
    assert found.exit_code == 0, found.output
    assert "eva, scale 0.353553, not causal, window 6" in found.output
    found = run("verify", tmp_path / "eva.npz", "--estimator", "eva", "--chunk", "5")
    assert found.exit_code == 1
