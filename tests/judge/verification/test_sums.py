"""Kernels whose running sums are narrower than float32: what `accumulate` rejects."""

from functools import partial

import numpy as np
import pytest

from refattn.judge import verify
from refattn.judge.rounding.formats import FORMATS
from refattn.judge.rounding.profiles import EVERY_PROFILE, PROFILES
from refattn.judge.verification.choice import has_wide_sums
from tests.judge.rounding.rounded import dump, dump_gradients, flash, results

PARTS = ("out", "dq")


def fused(sums):
    """A forward and a backward pass in bfloat16 with running sums of a type, rounded by tile."""
    arrays = FORMATS["bfloat16"].round(np.random.default_rng(0).standard_normal((4, 1, 640, 64)))
    name = "flash" if sums == "float32" else "sums-64"
    given = dump_gradients(name, *arrays, "bfloat16")
    return given | {"out": dump(partial(flash, tile=64, sums=sums), *arrays[:3], "bfloat16")["out"]}


@pytest.mark.long("dq")
@pytest.mark.parametrize("of", PARTS)
def test_sums_in_bfloat16_fail_if_they_must_be_in_float32(of):
    """By default they pass as a kernel step by step; then the small print says that they would."""
    for sums, verdict in (("float32", "PASS"), ("bfloat16", "FAIL")):
        given = results(fused(sums), of) | {"explain": False}
        by_default, strict = verify(**given), verify(**given, accumulate="float32")
        assert (by_default.verdict, strict.verdict) == ("PASS", verdict)
        assert by_default.narrow_sums
        assert "sums in bfloat16 may also pass (--strict" in str(by_default)
        assert "in bfloat16 with sums in float32 gives such numbers" in str(strict)
        if verdict == "FAIL":
            words = "cause: some sums are narrower than float32: if they may be, this is a PASS"
            assert words in str(strict)
            assert [x.name for x in strict.suspects] == ["narrow sums"]
        else:
            assert not strict.narrow_sums


def test_profiles_whose_sums_are_narrow():
    narrow = {x for x, y in PROFILES.items() if not has_wide_sums(y, "bfloat16")}
    blocks = {f"flash-{x}" for x in (256, 64, 32)}
    assert {"eager-narrow", "half-sums", *blocks} < narrow
    assert not {"math", "flash", "flash-fast", "upcast", "eager", "tf32", "fp8"} & narrow
    assert all(has_wide_sums(PROFILES[x], "float32") for x in (*blocks, "eager-narrow"))
    assert not has_wide_sums(EVERY_PROFILE["chunk-64-states"], "float16")


def test_what_must_be_said_of_sums():
    x = np.zeros((1, 2, 2))
    given = dict.fromkeys(("q", "k", "v", "out"), x) | {"dtype": "bfloat16"}
    with pytest.raises(ValueError, match=r"`accumulate` must be one of .*float32.*, got 'half'"):
        verify(**given, accumulate="half")
    with pytest.raises(ValueError, match=r"with sums in float32 or wider, got 'eager-narrow'"):
        verify(**given, accumulate="float32", profile="eager-narrow")
