"""Directions that are known before errors are: their variance, their slack, and what they see."""

from functools import partial

import numpy as np
import pytest

from refattn import verify
from refattn.judge.rounding import PROFILES
from refattn.judge.rounding.covariance import bound_covariance, common_along
from refattn.judge.rounding.formats import FORMATS
from refattn.judge.rounding.problems import pose_arrays
from refattn.judge.verification import trial
from refattn.judge.verification.directions import SCORE_CHANGES, bound_along
from refattn.judge.verification.evidence import is_doubtful
from refattn.judge.verification.findings import Numbers
from tests.judge.rounding.rounded import E4M3, Case, flash, of_heads

TYPES = {"fp8-weights": (E4M3, "bfloat16")}  # of the arrays, and of the output


def made(name, seed, factor=1.0, n=32, m=512, d=32, heads=2):
    """A file of a kernel whose scale is off by a factor."""
    rng, (stored, to) = np.random.default_rng(seed), TYPES.get(name, ("bfloat16",) * 2)
    q, k, v = (FORMATS[stored].round(rng.standard_normal((heads, x, d))) for x in (n, m, m))
    out, _ = of_heads(name, q, k, v, to, scale=factor * d**-0.5)
    return {"q": q, "k": k, "v": v, "out": out, "dtype": dict.fromkeys("qkv", stored) | {"out": to}}


@pytest.mark.parametrize(("factor", "known"), [(1.0, True), (1.03, True), (1.03, False)])
def test_a_wrong_scale_of_8_bits_is_seen_along_its_direction(factor, known, monkeypatch):
    """Weights of few spacings may all be rounded down, so that every element is within that."""
    if not known:
        monkeypatch.setattr(trial, "_list_doubtful", lambda errors: [])
    given = made("fp8-weights", 0, factor, n=16, m=1536, heads=1)
    found = verify(**given, profile="fp8-weights", hardware="ieee")
    assert (found.verdict == "FAIL") == (known and factor > 1)
    if found.verdict == "FAIL":
        assert next(x.name for x in found.tests if x.adjusted <= 1e-6) == "scale"
        assert "the scale is 1.03" in found.suspects[0].text
        assert found.detectable["scale"] < factor - 1


def test_a_temperature_is_told_from_the_scale_where_there_is_a_cap():
    rng = np.random.default_rng(0)
    q, k, v = (FORMATS["bfloat16"].round(rng.standard_normal((1, x, 16))) for x in (64, 96, 96))
    s = 3 * np.tanh(q[0] @ (2 * k[0]).T / 4 / 3)
    p = np.exp(1.02 * s)
    out = FORMATS["bfloat16"].round(p @ v[0] / p.sum(-1, keepdims=True))[None]
    found = verify(q=q, k=2 * k, v=v, out=out, dtype="bfloat16", softcap=3.0, profile="flash")
    assert (found.verdict, found.suspects[0].name) == ("FAIL", "temperature")
    assert found.suspects[0].estimate == pytest.approx(0.02, abs=1e-3)


@pytest.mark.parametrize("counts", [0, 1])
def test_a_bias_that_is_smaller_than_roundings_of_scores_is_told_by_its_direction(counts):
    """Without it errors of scores are as large as those of `eager`, and no single row is wrong."""
    rng, to = np.random.default_rng(0), FORMATS["bfloat16"].round
    q, k, v = (to(rng.standard_normal((4, 96, 32))) for _ in range(3))
    bias = to(0.003 * rng.standard_normal((96, 96)))
    bias[5, :40] = -np.inf
    out, _ = of_heads("flash", q, k, v, "bfloat16", bias=np.where(counts | (bias < -1), bias, 0))
    found = verify(q=q, k=k, v=v, out=out, dtype="bfloat16", bias=bias)
    assert found.verdict == ("PASS" if counts else "FAIL")
    if not counts:
        assert "bias" in found.suspects[0].text


@pytest.mark.parametrize("name", ["flash", "eager", "math"])
def test_variances_along_directions_of_each_row(name):
    """Those of the covariance of all columns; slack is that of weights, and column by column."""
    given, roundings = made(name, 1, n=6, m=48, d=8), PROFILES[name].roundings("bfloat16")
    problem = pose_arrays(*(given[x] for x in "qkv"))
    numbers = Numbers(given["out"].__getitem__, "bfloat16")
    laws = bound_along(problem, numbers, "bfloat16", PROFILES[name], ["scale", "factor"])
    every, changes = slice(0, 6), {"scale": SCORE_CHANGES["scale"]}
    for h in range(2):
        rows = problem.analyse((h,), roundings, every, changes)
        covariances = bound_covariance(problem.head((h,)), roundings, every, rows)
        for of, steep in (("scale", rows.tangents["scale"]), ("factor", rows.out)):
            along = steep / rows.std**2
            variance = np.einsum("ic,icd,id->i", along, covariances, along)
            np.testing.assert_allclose(laws[of][0][h], variance, rtol=1e-9)
            rest = rows.slack - rows.of_weights
            slack = common_along(problem.head((h,)), roundings, every, rows, along[:, :, None])
            slack = slack[:, 0] + np.sum(np.abs(along) * rest, -1)
            np.testing.assert_allclose(laws[of][1][h], slack)
            assert np.all(slack <= np.sum(np.abs(along) * rows.slack, -1))


@pytest.mark.parametrize("tile", [8, 32, 256])
def test_weights_of_few_spacings_move_sums_by_no_more(tile):
    """Whatever the running maximum was: here keys come from the smallest score to the largest."""
    rng, roundings = np.random.default_rng(tile), PROFILES["fp8-weights"].roundings("bfloat16")
    q, k, v = (FORMATS[E4M3].round(rng.standard_normal((x, 16))) for x in (9, 256, 256))
    q = 2 * q
    k = k[np.argsort(q[0] @ k.T)]
    problem, every = pose_arrays(q, k, v), slice(0, 9)
    rows, head = problem.analyse((), roundings, every), problem.head(())
    along = rng.standard_normal((9, 16, 5))
    slack = common_along(head, roundings, every, rows, along)
    got, _ = flash(Case(q, k, v), "float32", weights=E4M3, tile=tile)
    off = np.einsum("icr,ic->ir", along, got - rows.out)
    small = np.einsum("icr,ic->ir", np.abs(along), rows.slack)
    assert np.all(slack < small / 2)
    covariances = bound_covariance(head, roundings, every, rows)
    law = np.einsum("icr,icd,idr->ir", along, covariances, along)
    # What is larger is rounded at random, and at 8 standard deviations by no right kernel.
    assert np.all(np.abs(off) < slack + 8 * np.sqrt(law))
    assert np.any(np.abs(off) > 0.02 * slack)


def test_sums_are_doubtful_by_their_size_and_by_their_signs():
    one = np.ones(100)
    assert is_doubtful(5 * one / 10, one)  # 5 standard deviations, all of one sign
    assert not is_doubtful(3 * one / 10, one)
    assert not is_doubtful(5 * one / 10 * np.where(np.arange(100) % 2, 30, -29), one)
    assert is_doubtful(np.array([5.0]), np.array([1.0]))  # one row has one sign
    assert not is_doubtful(np.zeros(0), np.zeros(0))


def fast(seed, dtype="bfloat16", out="float32", lag=-1.0, sizes=(1, 48, 64, 32), **options):
    """Rounded weights by a fast exponential, whose e^0 is off, with log normalisers.

    The maximum may be too small by such a power of 2.
    """
    rng, to, (size, n, m, d) = np.random.default_rng(seed), FORMATS[dtype].round, sizes
    heads, off = (2, 2.0**-15) if lag < 0 else (4, 2.0**-14)
    q, k, v = (to(x * rng.standard_normal((heads, y, d))) for x, y in ((size, n), (1, m), (1, m)))
    kernel = partial(flash, base2=True, fast=off, lag=lag, out=out)
    got, lse = of_heads(kernel, q, k, v, dtype, **options)
    given = {
        "q": q,
        "k": k,
        "v": v,
        "out": got,
        "dtype": dict.fromkeys("qkv", dtype) | {"out": out},
    }
    return given | options | ({"lse": lse} if lag < 0 else {}) | {"explain": False}


@pytest.mark.parametrize("tokens", [16, pytest.param(256, marks=pytest.mark.long)])
@pytest.mark.parametrize("causal", [False, True])
def test_a_fast_exponential_is_right(tokens, causal):
    """Where one key has all the weight, nothing but the error of e^0 is left of a row."""
    sizes = (1, min(tokens, 128) if causal else tokens, 128, 32)
    given = fast(1, sizes=sizes, causal=causal)
    assert verify(**given).verdict == "PASS"
    assert verify(**given, profile="flash-fast").verdict == "PASS"


@pytest.mark.parametrize(("dtype", "out"), [("bfloat16", "bfloat16"), ("float16", "float32")])
@pytest.mark.parametrize("seed", [0, *(pytest.param(x, marks=pytest.mark.long) for x in (1, 2, 3))])
def test_a_maximum_that_lags_is_right(seed, dtype, out):
    """The largest weight need not be 1 then, and is rounded: in many rows most of the error."""
    given = fast(seed, dtype, out, 8.0, (3, 48, 64, 32))
    assert verify(**given, profile="flash-lazy").verdict == "PASS"


def test_beside_a_maximum_that_lags_errors_are_seen():
    """Weights above 2^8, and a row that is off by two spacings."""
    far = fast(0, "float16", "float32", 14.0, (8, 48, 64, 32))
    assert verify(**far, profile="flash-lazy").verdict == "FAIL"
    given = fast(0, "bfloat16", "bfloat16", 8.0, (3, 48, 64, 32))
    given["out"][2, 7] = FORMATS["bfloat16"].round(given["out"][2, 7] * (1 + 2.0**-6))
    assert verify(**given, profile="flash-lazy").rows[0][0] == (2, 7)


def test_a_failure_asks_whether_the_maximum_lags():
    """Few wrong rows, by another profile: it is for the user to say so."""
    given = fast(6, "float16", "float32", 4.0, (6, 48, 256, 16))
    found = verify(**given)
    assert (found.verdict, found.remarks[1][:28]) == ("FAIL", "with profile flash-lazy this")
    given["out"] = FORMATS["float32"].round(given["out"] * 1.05)
    assert "flash-lazy" not in str(verify(**given))


def test_what_a_fast_exponential_cannot_do():
    """Errors of one sign average out in a normaliser, and move the output by no factor."""
    given, single = fast(2, sizes=(1, 96, 128, 32)), FORMATS["float32"].round
    assert verify(**given | {"lse": single(given["lse"] + 1e-4)}).verdict == "FAIL"
    exact, _ = of_heads("math", *(given[x] for x in "qkv"), "float32")
    given |= {"out": exact, "lse": None}
    assert verify(**given).profile == "math"
    given["out"] = single(exact * (1 + 2e-4))
    assert verify(**given).verdict == "FAIL"
