"""Kernels whose running sums are narrower than float32: what `accumulate` rejects."""

import math

import numpy as np
import pytest

from refattn.judge import verify
from refattn.judge.rounding.formats import FORMATS
from refattn.judge.rounding.profiles import EVERY_PROFILE, PROFILES
from refattn.judge.verification.choice import has_wide_sums

ROUND = {"float32": np.float32, "bfloat16": FORMATS["bfloat16"].round}
HEADS, TOKENS, SIZE, TILE = 1, 640, 64, 64
ARRAYS = {"out": "qkv", "dq": ("q", "k", "v", "d_out")}


def fused(seed, sums):
    """Attention in bfloat16, and dq, with running sums of a type that are rounded by tile."""
    to, narrow = ROUND[sums], ROUND["bfloat16"]
    rng = np.random.default_rng(seed)
    q, k, v, g = narrow(rng.standard_normal((4, HEADS, TOKENS, SIZE)))
    scores = np.swapaxes(k, -1, -2)
    scores = (q @ scores / math.sqrt(SIZE)).astype(np.float32).astype(np.float64)
    p = np.exp(scores - np.max(scores, -1, keepdims=True))
    total = np.sum(p, -1, keepdims=True)
    out, dq = 0.0, 0.0
    for j in range(0, TOKENS, TILE):
        part = slice(j, j + TILE)
        out = to(out + narrow(p[..., part]) @ v[:, part])
    out = narrow(out / total)
    exact = p / total @ v
    for j in range(0, TOKENS, TILE):
        part = slice(j, j + TILE)
        ds = p[..., part] / total * (g @ np.swapaxes(v[:, part], -1, -2))
        ds -= p[..., part] / total * np.sum(g * exact, -1, keepdims=True)
        dq = to(dq + narrow(ds) @ k[:, part])
    found = {"q": q, "k": k, "v": v, "d_out": g, "out": out, "dq": narrow(dq / math.sqrt(SIZE))}
    return {x: np.asarray(y, np.float32) for x, y in found.items()}


@pytest.mark.long("dq")
@pytest.mark.parametrize("of", ARRAYS)
def test_sums_in_bfloat16_fail_if_they_must_be_in_float32(of):
    """By default they pass as a kernel step by step; then the small print says that they would."""
    for sums, verdict in (("float32", "PASS"), ("bfloat16", "FAIL")):
        arrays = fused(0, sums)
        given = {x: arrays[x] for x in (*ARRAYS[of], of)} | {"dtype": "bfloat16", "explain": False}
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
    arrays = fused(0, "float32")
    given = {x: arrays[x][:, :8] for x in ("q", "k", "v", "out")} | {"dtype": "bfloat16"}
    with pytest.raises(ValueError, match=r"`accumulate` must be one of .*float32.*, got 'half'"):
        verify(**given, accumulate="half")
    with pytest.raises(ValueError, match=r"with sums in float32 or wider, got 'eager-narrow'"):
        verify(**given, accumulate="float32", profile="eager-narrow")
