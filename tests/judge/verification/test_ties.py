"""Verdicts on keys that are equal: padding tokens, tokens that come again, few distinct keys."""

from functools import partial

import numpy as np
import pytest

from refattn.judge import verify
from refattn.judge.rounding import PROFILES, covariance, softmax
from refattn.judge.rounding.covariance import spared_variance
from refattn.judge.rounding.formats import FORMATS
from refattn.judge.rounding.head import scan_tile
from refattn.judge.rounding.problems import pose_arrays
from refattn.judge.rounding.weight_errors import relative_variance
from tests.judge.rounding.rounded import BF16, dump, flash, of_heads

N, M, D = 64, 512, 32


def repeat(kind, seed=0):
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((2, x, D)) for x in (N, M, M))
    if kind == "padding":
        k[:, -128:], v[:, -128:] = k[:, -1:], v[:, -1:]
    elif kind == "padding of one head":
        k[1, -128:], v[1, -128:] = k[1, -1:], v[1, -1:]
    elif kind == "zeros":
        k[:, -128:] = 0
    elif kind == "runs":
        k, v = (np.repeat(x[:, : M // 32], 32, 1) for x in (k, v))
    elif kind == "codebook":
        code = rng.integers(0, 16, M)
        k, v = k[:, code], v[:, code]
    return q, k, v


def formula(q, k, v, seen=True):
    s = q @ k.swapaxes(-1, -2) * q.dtype.type(D**-0.5)
    s = np.where(seen, s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    return p @ v / p.sum(-1, keepdims=True)


def of_name(name, dtype):
    """A kernel with roundings: sums in the order of their terms, or weights over a maximum."""
    return lambda q, k, v, seen=True: of_heads(
        name, q, k, v, dtype, mask=np.broadcast_to(seen, (N, k.shape[1]))
    )[0]


fused = of_name(partial(flash, tile=64), "bfloat16")
KERNELS = {
    "formula": (formula, np.float32),
    "formula in float64": (formula, np.float64),
    "term by term": (of_name("serial", "float32"), np.float32),
    "fused": (fused, np.float32),
}
KINDS = ["padding", "padding of one head", "zeros", "runs", "codebook"]


def judged(name, kind, padded=0, factor=1.0, **options):
    """Judge a kernel that sees the last key so often more, and has one row times a factor."""
    kernel, dtype = KERNELS[name]
    narrow = {"dtype": "bfloat16"} if kernel is fused else {}
    to = BF16 if narrow else np.asarray
    q, k, v = (to(x).astype(dtype) for x in repeat(kind))
    seen = np.tri(N, M, M - N, dtype=bool) if options.get("causal") else options.get("mask", True)
    more = (np.concatenate([x, *padded * [x[:, -1:]]], 1) for x in (k, v))
    out = kernel(q, *more, seen=seen)
    out[1, 5] *= factor
    return verify(q=q, k=k, v=v, out=to(out).astype(dtype), **narrow, **options)


@pytest.mark.sweep(12)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", KERNELS)
def test_right_kernels_pass(name, kind):
    found = judged(name, kind)
    assert found.verdict == "PASS", str(found)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("options", ["causal", "mask"])
@pytest.mark.parametrize("name", KERNELS)
def test_right_kernels_pass_where_queries_see_some_of_the_keys(name, options):
    given = {"causal": True} if options == "causal" else {}
    if options == "mask":
        given["mask"] = np.random.default_rng(1).random((N, M)) < 0.5
    found = judged(name, "padding", **given)
    assert found.verdict == "PASS", str(found)


@pytest.mark.sweep(6)
@pytest.mark.parametrize(
    ("name", "kind", "profile"),
    [
        ("formula in float64", "padding", "math64"),
        ("formula in float64", "runs", "math64"),
        ("term by term", "padding", "serial"),
        ("term by term", "codebook", "serial"),
    ],
)
def test_they_fail_where_all_keys_are_taken_for_different(name, kind, profile, monkeypatch):
    assert judged(name, kind, profile=profile).verdict == "PASS"
    monkeypatch.setattr(softmax, "find_ties", lambda head, i: None)
    monkeypatch.setattr(covariance, "find_ties", lambda head, i: None)
    found = judged(name, kind, profile=profile)
    assert found.verdict != "PASS", str(found)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "kind", "change"),
    [
        *((x, y, z) for x in [*KERNELS][:3] for y in ("padding", "zeros") for z in ("key", "row")),
        ("formula", "codebook", "row"),
        ("fused", "runs", "row"),
        ("fused", "codebook", "row"),
        ("fused", "padding", "key"),
    ],
)
def test_wrong_kernels_fail(name, kind, change):
    # Few distinct keys: errors that may all be equal allow a row as much as the report says.
    factor = 1 + 2.0 ** (-5 if (name, kind) in [("fused", "runs"), ("fused", "codebook")] else -7)
    wrong = {"padded": 1} if change == "key" else {"factor": factor}
    found = judged(name, kind, **wrong)
    assert found.verdict == "FAIL", str(found)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("copies", [4, 8])
def test_weights_that_are_equal_and_exact_are_no_evidence_against_a_profile(copies, dtype):
    """Of four equal keys that have all the weight, each has 1/4: nothing is rounded."""
    rng, to = np.random.default_rng(0), FORMATS[dtype].round
    q, k, v = (to(rng.standard_normal((1, x, 8))) for x in (130, 16 // copies, 16))
    q, k = to(5 * q), np.repeat(k, copies, 1)
    found = verify(**dump("eager", q, k, v, dtype))
    assert (found.verdict, found.by) == ("PASS", "eager")


def test_keys_with_equal_scores_may_be_spared_all_of_their_variance():
    """Of keys that are 0, 1 or -1, which differ: their roundings may be one, or none."""
    rng, roundings = np.random.default_rng(10), PROFILES["eager"].roundings("bfloat16")
    q, k = (rng.integers(-1, 2, (1, x, 16)) * 1.0 for x in (5, 24))
    v = rng.standard_normal((1, 24, 3))
    head, i = (problem := pose_arrays(q, k, v)).head((0,)), slice(0, 5)
    spared, whole = spared_variance(head, roundings, i, problem.analyse((0,), roundings, i))
    scores = q[0] @ k[0].T
    alone = np.sum(scores[:, :, None] == scores[:, None, :], -1) == 1
    tile = scan_tile(head, i, slice(0, 24))
    gap = tile.scores - tile.scores.max(-1, keepdims=True)
    p = np.exp(gap) / np.exp(gap).sum(-1, keepdims=True)
    variance = np.square(roundings.weights.spacing(p)) / 12
    variance += p * p * relative_variance(head, roundings, tile, i, gap)
    assert 0 < alone.sum() < alone.size
    np.testing.assert_allclose(whole, variance @ np.square(v[0]), rtol=1e-9)
    np.testing.assert_allclose(whole - spared, (variance * alone) @ np.square(v[0]), atol=1e-12)


@pytest.mark.parametrize("equal", [True, False])
def test_of_equal_largest_weights_all_but_one_may_lose_a_step(equal):
    """Their scores may differ in the last bit: a weight just below 1 is truncated to 1 - 2^-11."""
    to = FORMATS["tfloat32-truncated"].round
    rng = np.random.default_rng(2)
    q, k, v = (to(rng.standard_normal((64, 16))) for _ in range(3))
    q, v = q + 1.0, to(np.abs(v) + 1)
    k[9] = k[41] = 3.0  # of the largest score for each query
    if not equal:
        k[41] = 0.0
    s = q @ k.T / 4
    w = np.exp(s - np.max(s, -1, keepdims=True))
    narrow = to(w)
    narrow[:, 9] -= 2.0**-11
    out = (narrow @ v / np.sum(w, -1, keepdims=True)).astype(np.float32)
    found = verify(q=q, k=k, v=v, out=out, dtype="float32", profile="tf32-truncated", explain=False)
    assert (found.verdict == "FAIL") != equal
