"""Pages of keys that are others, and weights that are lost at random: found by fits."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

import refattn
from refattn.judge import verify
from refattn.judge.mistakes.causes.places import as_suspect
from refattn.judge.mistakes.causes.reasons import order_suspects, tidy_fits
from refattn.judge.verification import Suspect
from tests.judge.mistakes.causes.kernels import BF16, draw, fused, hide, named, scores, unnamed

N, M = 32, 96
BATCH = [x.reshape(2, 2, *x.shape[1:]) for x in draw(31, heads=4, n=N, m=M)[:3]]
CAUSAL = np.arange(M) <= np.arange(N)[:, None] + M - N
J = np.arange(M)


def given(k, v, q=BATCH[0], **options):
    """Numbers by other arrays than those that are said."""
    out, _ = fused(hide(scores(q, k), CAUSAL if options else True), v)
    return dict(zip("qkv", BATCH, strict=True)) | {"out": out} | options


def paged(tile, at, **options):
    """A tile of keys of the second member is that of the first."""
    k, v = (x.copy() for x in BATCH[1:])
    for x in (k, v):
        x[1, :, tile] = x[0, :, at]
    return given(k, v, **options)


def counted(keys):
    return given(BATCH[1][:, :, keys], BATCH[2][:, :, keys])


def dropped(p, factor=None, seed=1, n=64, size=4.0):
    """Weights of sharp rows are 0 with probability p, and the others larger."""
    q, k, v, _ = draw(32, heads=2, n=n, m=n, d=32, size=size)
    s = scores(q, k)
    w = np.exp(s - np.max(s, -1, keepdims=True))
    w = w / np.sum(w, -1, keepdims=True)
    kept = np.random.default_rng(seed).random(w.shape) >= p
    factor = 1 / (1 - p) if factor is None else factor
    return {"q": q, "k": k, "v": v, "out": BF16(w * kept * factor @ v)}


def values_alone():
    v = BATCH[2].copy()
    v[1, :, 32:64] = v[0, :, 32:64]
    return given(BATCH[1], v)


def counted_in_a_head():
    """In parts of the keys, of one of two heads."""
    q, k, v = (x[:1, :, :1] if x is BATCH[0] else x[:1] for x in BATCH)
    s = scores(q, k) + np.log(2) * (np.arange(2)[:, None, None] == 1) * (J // 32 == 2)
    return {"q": q, "k": k, "v": v, "out": fused(s, v)[0]}


def of_queries(order):
    """Those of the second member are others."""
    flat = np.swapaxes(BATCH[0], 0, 1).reshape(2, -1, 16)
    return given(*BATCH[1:], q=np.stack([flat[:, :N], flat[:, order]]))


def of_nowhere():
    k, v = (x.copy() for x in BATCH[1:])
    k[1, :, 32:64], v[1, :, 32:64] = (np.flip(x[1, :, 32:64], -1) for x in (k, v))
    return given(k, v)


def stale(rows):
    q, k, v, _ = draw(33, n=64)
    out, _ = fused(scores(q, k), v)
    out[:, rows] = BF16(np.random.default_rng(3).standard_normal(out.shape))[:, rows]
    return {"q": q, "k": k, "v": v, "out": out}


UNLIKE = "numbers have nothing to do with the exact ones"
HEADS = "agrees if tiles are read from elsewhere: in head (1, 0) "
PAGES = {
    "a page": (lambda: paged(slice(80, 96), slice(80, 96), causal=True), f"{HEADS}keys and values "
        "80 to 95 are those of 80 to 95 of head (0, 0), in head (1, 1) keys"),
    "two pages": (lambda: paged(slice(32, 64), slice(32, 64), causal=True), f"{HEADS}keys and "
        "values 32 to 63 are those of 32 to 63 of head (0, 0), in head (1, 1) keys"),
    "elsewhere": (lambda: paged(slice(32, 64), slice(64, 96)),
        "keys and values 32 to 63 are those of 64 to 95 of head (0, 1)"),
    "values": (values_alone, f"{HEADS}values 32 to 63 are those of 32 to 63 of head (0, 0)"),
    "three times": (lambda: counted(np.concatenate([J, J[:32], J[:32]])),
        "agrees if keys 0 to 31 count 3 times$"),
    "twice in a head": (counted_in_a_head, "agrees if keys 64 to 95 count twice"),
    "a query later": (lambda: of_queries(slice(1, N + 1)), "agrees if queries are read from "
        "elsewhere: head (1, 0) from query 1 of head (0, 0) on, head (1, 1) from query 1 of head "
        "(0, 1) on$"),
    "a tile that was never written": (lambda: stale(slice(48, 64)), f"queries 48 to 63: {UNLIKE}: "
        "the last tile was never written (stale), or computed from something else$"),
    "tiles that were never written": (lambda: stale(slice(16, 32)),
        f"queries 16 to 31: {UNLIKE}: these tiles"),
    "part of a tile": (lambda: stale(slice(52, 64)),
        f"queries 52 to 63: {UNLIKE}... never written (stale), or computed from something else"),
}  # fmt: skip
test_pages_of_other_heads = named(PAGES, profile="flash")
NO_PAGES = {
    "keys of nowhere": (of_nowhere, ""),
    "queries in no order": (
        lambda: of_queries(np.random.default_rng(4).permutation(N)),
        "elsewhere",
    ),
}
test_what_is_no_page = unnamed(NO_PAGES, profile="flash")


def small(how):
    """Many small weights: of each row others are lost, or of all rows the same, or all are off."""
    q, k, v, _ = draw(35, heads=4, n=128, d=32)
    w = np.exp(scores(q, k))
    w = w / np.sum(w, -1, keepdims=True)
    rng = np.random.default_rng(6)
    kept = rng.random((4, 1 if how == "the same keys" else 128, 128)) >= 0.1
    if how == "noise":
        kept = 0.9 + 0.3 * rng.standard_normal(w.shape)
    total = np.sum(w * kept, -1, keepdims=True) if how == "hidden" else 0.9
    return {"q": q, "k": k, "v": v, "out": BF16(w * kept / total @ v)}


def hidden(seen):
    """The sum of the weights is of those that are kept, so each row has a factor of its own."""
    q, k, v, _ = draw(32, heads=2, n=64, d=32, size=4.0)
    s = hide(scores(q, k), seen(np.random.default_rng(5)))
    return {"q": q, "k": k, "v": v, "out": fused(s, v)[0]}


DROPOUT = {
    "dropout": (lambda: small("dropout"), "agrees if dropout is on: "),
    "hidden": (lambda: small("hidden"), "agrees if dropout is on or keys are hidden at random: "),
}  # fmt: skip
test_dropout_of_small_weights = named(DROPOUT, profile="flash")
RATES = {f"{p} of small": partial(dropped, p, n=128, size=1.0) for p in (0.02, 0.3, 0.5)}
test_dropout_of_any_rate = named(
    {x: (y, "agrees if dropout is on") for x, y in RATES.items()}, profile="flash"
)
NO_DROPOUT = {
    **{x: lambda x=x: small(x) for x in ("the same keys", "noise")},
    **{f"others {x} times": lambda x=x: dropped(0.1, x) for x in (1.0, 1.5)},
    "hidden keys": lambda: hidden(lambda rng: rng.random((2, 64, 64)) > 0.1),
    "hidden in all rows": lambda: hidden(lambda rng: rng.random((2, 1, 64)) > 0.1),
    "hidden ends": lambda: hidden(lambda rng: np.arange(64) <= rng.integers(48, 64, (64, 1))),
}
test_what_is_no_dropout = unnamed(
    {x: (y, "dropout") for x, y in NO_DROPOUT.items()}, profile="flash"
)


@pytest.mark.long
@pytest.mark.parametrize("p", [0.1, 0.3])
def test_dropout_is_named(p):
    found = verify(**dropped(p), dtype="bfloat16", profile="flash")
    text = found.suspects[0].text
    assert text.endswith(f"are 0, the others {1 / (1 - p):.3g} times as large")
    share = float(text.removeprefix("agrees if dropout is on: about ").partition("%")[0])
    assert abs(share - 100 * p) < 6  # five standard errors of some 500 weights


def test_a_fit_comes_before_a_cause_that_explains_less():
    fit = as_suspect("the scale is 1.06 ± 0.01 times the declared scale", 1.0, "scale")
    for share in (0.8, 1.0):
        cause = as_suspect("agrees if parts are merged otherwise", share)
        assert order_suspects([cause], [fit]) == ([cause, fit] if share == 1 else [fit, cause])
        assert order_suspects([cause], []) == [cause]


def test_a_derivative_that_leaves_much_is_no_cause():
    z = SimpleNamespace(rms=1e4)
    for share in (0.91, 0.995):
        fit = Suspect("slope", -1.13, 0.01, 0.0, share, "scores fall by 1.13")
        verdict = SimpleNamespace(z=z, suspects=[fit], shape=(4, 64, 16))
        assert len(tidy_fits(verdict, "out")) == (share > 0.99)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("seed", [0, 2])
@pytest.mark.parametrize("factor", [0.99, 1.01, 2.0])
def test_a_factor_in_float32_is_none_of_what_explains_less(seed, factor):
    """What is left of it is slack of the tests; e^sink in the normaliser explains 96 %."""
    q, k, v = np.random.default_rng(seed).standard_normal((3, 2, 64, 16)).astype(np.float32)
    out = refattn.softmax_attention(q, k, v) * np.float32(factor)
    (suspect,) = refattn.verify(q=q, k=k, v=v, out=out).suspects
    assert suspect.name == "factor"
    assert suspect.estimate == pytest.approx(factor - 1, rel=1e-5)


@pytest.mark.parametrize("scale", [1.1, 0.9])
def test_a_number_is_fitted_in_float64(scale):
    """Where each start is further off than rounding by more than any error is said to be."""
    q, k, v = (np.asarray(x, np.float64)[0, :1] for x in BATCH)
    out, _ = refattn.attend(q, k, v, scale=scale * q.shape[-1] ** -0.5)[:2]
    verdict = verify(q=q, k=k, v=v, out=out, dtype="float64")
    assert verdict.suspects[0].text.startswith(f"agrees if the scale is {scale:.9f} ± ")
