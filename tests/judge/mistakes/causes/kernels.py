"""Small inputs, a right kernel in bfloat16, and a backward pass of which parts can be wrong."""

import math
import re

import numpy as np
import pytest

from refattn.judge import verify
from refattn.judge.rounding.formats import FORMATS

BF16 = FORMATS["bfloat16"].round
f32 = np.float32


def draw(seed=0, heads=2, n=64, m=None, d=16, size=1.0):
    """Queries, keys, values and derivatives in bfloat16."""
    rng = np.random.default_rng(seed)
    shapes = ((n, d), (m or n, d), (m or n, d), (n, d))
    q, k, v, g = (BF16(rng.standard_normal((heads, *x))) for x in shapes)
    return BF16(size * q), k, v, g


def scores(q, k, scale=None):
    return (scale or q.shape[-1] ** -0.5) * q @ np.swapaxes(k, -1, -2)


def fused(s, v):
    """Weights over the largest are rounded, sums are not: the output, and log normalisers."""
    with np.errstate(all="ignore"):
        top = np.max(s, -1, keepdims=True)
        w = np.exp(s - top)
        total = np.sum(w, -1, keepdims=True)
        return BF16(BF16(w) @ v / total), FORMATS["float32"].round((top + np.log(total))[..., 0])


def hide(s, seen):
    return np.where(seen, s, -np.inf)


def ahead(n, m):
    """How far keys are ahead of queries."""
    return np.arange(m) - np.arange(n)[:, None] - (m - n)


def in_tiles(s, v, size, of_sum=1, of_out=1, **how):
    """A running maximum in tiles of keys; sums are rescaled to a power, perhaps of each tile.

    Or the maximum is kept by a rule, weights are cut or relative to another one, and the output is
    changed after each tile.
    """
    keep, over = how.get("keep", np.maximum), how.get("over", lambda old, new, kept: kept)
    top = how.get("start", np.full((*s.shape[:-1], 1), -np.inf))
    total, out = np.zeros_like(top), np.zeros((*s.shape[:-1], v.shape[-1]))
    for j in range(0, s.shape[-1], size):
        tile = s[..., j : j + size]
        new = np.maximum(top, np.max(tile, -1, keepdims=True))
        kept = keep(top, new)
        base, shrink = over(top, new, kept), np.exp(top - kept)
        w, back = np.exp(tile - base), np.exp(base - kept) if "late" in how else 1.0
        safe = np.where(shrink > 0, shrink, 1)  # 0 before the first tile, when sums are 0 as well
        powers = (x(j) if callable(x) else x for x in (of_sum, of_out))
        kept_sum, kept_out = (safe**x for x in powers)
        total = total * kept_sum + np.sum(w, -1, keepdims=True) * back
        more = how.get("round", BF16)(np.minimum(w, how.get("most", np.inf))) * back
        out = how.get("each", lambda x, _: x)(
            out * kept_out + more @ v[..., j : j + size, :], total
        )
        top = kept
    return BF16(out / total)


def posing(*own):
    """Make what poses an output, and scores, with a module's own queries, keys and values."""

    def given(out, arrays=own, **options):
        return dict(zip("qkv", arrays, strict=True)) | {"out": BF16(out)} | options

    def attention(s, v=own[2], **options):
        return given(fused(s, v)[0], **options)

    return given, attention


def parametrize(cases, fast=()):
    """Run a test for each case; all are long but those that are fast."""
    marks = ([] if x in fast else [pytest.mark.long] for x in cases)
    names = [pytest.param(x, marks=y) for x, y in zip(cases, marks, strict=True)]
    return pytest.mark.parametrize("name", names)


def judge_case(cases, name, usual):
    """Judge the arrays of a case; return the words of it, the verdict, and its parts that count."""
    make, words, *of = cases[name]
    found = verify(**{"dtype": "bfloat16"} | usual | make())
    parts = [found.parts[x] for x in of[0].split()] if of else [*found.parts.values()][:1]
    return words, found, parts or [found]


def says(words, text):
    """Whether a text has the words, in which ... stands for others, and $ for the end."""
    parts = words.removesuffix("$").split("...")
    return re.search(".*".join(map(re.escape, parts)) + "$" * words.endswith("$"), text)


def named(cases, fast=(), **usual):
    """Make the test that each case is named first, in the output or the parts that it is of."""

    @parametrize(cases, fast)
    def test(name):
        words, found, parts = judge_case(cases, name, usual)
        assert found.verdict == "FAIL"
        for part in parts:
            first, *more = part.suspects or found.suspects
            assert 0.9 < first.explained <= 1 or math.isnan(first.explained)
            assert says(words, first.text)
            in_part = "agrees in part"
            assert first.text.startswith(in_part) == words.startswith(in_part)
            others = [x[1] for x in cases.values() if not says(x[1].removesuffix("$"), words)]
            conventions = (x.text for x in more if x.name == "convention")
            assert not any(says(x, y) for x in others for y in (first.text, *conventions))

    return test


def unnamed(cases, fast=(), **usual):
    """Make the test that no cause with the words of a case, which it resembles, is named."""

    @parametrize(cases, fast)
    def test(name):
        words, found, parts = judge_case(cases, name, usual)
        assert (found.verdict == "PASS") == name.startswith("right")
        texts = [x.text for part in parts for x in part.suspects]
        assert not any(re.search(words, x) for x in texts if not x.startswith("agrees in part"))

    return test


def backward(q, k, v, g, seen=True, **wrong):
    """An output and its gradients, with what is wrong in the backward pass by name.

    `forward` changes scores in both passes, `of_scores` makes derivatives of weights, d_out . v, D.
    """
    forward = wrong.get("forward", lambda x: x)
    share, scale = len(q) // len(k), q.shape[-1] ** -0.5
    keys, values = (np.repeat(x, share, 0) for x in (k, v))
    s, summed = hide(forward(scores(q, keys)), seen), values
    if "sinks" in wrong:  # one key more, of value 0
        sinks = np.broadcast_to(wrong["sinks"][:, None, None], (len(q), q.shape[1], 1))
        s, summed = np.concatenate([s, sinks], -1), np.pad(values, ((0, 0), (0, 1), (0, 0)))
    out, lse = fused(s, summed)
    lse = wrong.get("lse", lambda x: x)(lse)
    s = wrong.get("scores", lambda x: x)(forward(scores(q, keys, wrong.get("scale"))))
    s = hide(s, wrong.get("seen_back", seen))
    p = np.exp(s - lse[..., None])
    t = g @ np.swapaxes(wrong.get("values", lambda x: x)(values), -1, -2)
    delta = wrong.get("delta", lambda x: x)(np.sum(g * out, -1, keepdims=True))
    ds = BF16(wrong.get("of_scores", lambda p, t, delta: p * (t - delta))(p, t, delta))

    def fold(x):
        heads = wrong.get("heads", slice(None))
        return np.sum(x.reshape(len(k), share, *x.shape[1:])[:, heads], 1)

    dq = scale * ds @ keys
    dk, dv = fold(scale * np.swapaxes(ds, -1, -2) @ q), fold(np.swapaxes(BF16(p), -1, -2) @ g)
    return {
        "q": q, "k": k, "v": v, "out": out, "d_out": g,
        "dq": BF16(dq), "dk": BF16(dk), "dv": BF16(dv), "dtype": "bfloat16",
    }  # fmt: skip


LOG2E = math.log2(math.e)
