"""Windows, caps, sinks, dropout and slopes of exact attention: limits, digits and gradients."""

import itertools
import math
from functools import partial

import mpmath
import numpy as np
import pytest
from scipy.special import logsumexp

from refattn import attend, merge, naive, softmax_attention, vjp
from refattn.attention import Alibi, alibi
from refattn.engine.scores import Band
from refattn.judge.conformance.truth import digits
from refattn.streaming import SoftmaxState
from tests.numbers.test_tape import pulled
from tests.problems import draw, largest
from tests.reference import CONTRACT


def given_options(rng, n, m, *names, dtype=np.float64):
    """Some of the options, of four heads."""
    every = {
        "softcap": 1.5,
        "sinks": draw(rng, 4, dtype=dtype),
        "bias": draw(rng, 4, n, m, dtype=dtype),
        "alibi": Alibi(rng.random(4).astype(dtype)),
        "mask": rng.random((n, m)) < 0.7,
        "dropout": ((rng.random((4, n, m)) < 0.8) / 0.8).astype(dtype),
    }
    return {"bias" if x == "alibi" else x: every[x] for x in names}


def tensors(rng, n, m):
    """Four heads of queries, two of keys and values."""
    return draw(rng, 4, n, 3), draw(rng, 2, m, 3), draw(rng, 2, m, 2)


@pytest.mark.long("1300", "2500", "513")
@pytest.mark.parametrize(("n", "m"), [(260, 140), (1300, 700), (513, 1025), (1025, 2500)])
@pytest.mark.parametrize("window", [(0, 0), (300, 20), (None, 600), (1100, 0), (10, None)])
def test_windows_of_many_tokens(window, n, m):
    """Past the ends of blocks of queries and of keys, which a window skips."""
    rng = np.random.default_rng([n, m])
    q, k, v = tensors(rng, n, m)
    options = given_options(rng, n, m, "softcap", "sinks", "alibi")
    for chosen in ({}, options, {"causal": True, "sinks": options["sinks"]}):
        got = attend(q, k, v, scale=0.5, window=window, **chosen)
        want = naive.softmax_attention(q, k, v, scale=0.5, window=window, **chosen)
        np.testing.assert_allclose(got.out, want, rtol=0, atol=2e-11)
        want = log_normaliser(q, k, 0.5, window=window, **chosen)
        np.testing.assert_allclose(got.lse, want, rtol=0, atol=2e-11)


def log_normaliser(q, k, scale, *, softcap=None, sinks=None, bias=None, window, causal=False):
    scores = scale * q @ np.repeat(k, 2, 0).mT
    scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
    n, m = scores.shape[-2:]
    if bias is not None:
        apart = np.abs(np.arange(n)[:, None] + m - n - np.arange(m))
        scores -= bias.slopes[:, None, None] * apart
    seen = naive.visible(q, k, causal=causal, window=window)
    sinks = np.full(4, -np.inf) if sinks is None else sinks
    sinks = np.broadcast_to(sinks[:, None, None], (4, n, 1))
    with np.errstate(divide="ignore"):
        return logsumexp(np.concatenate([np.where(seen, scores, -np.inf), sinks], -1), axis=-1)


def test_what_a_window_hides_is_not_read():
    rng = np.random.default_rng(0)
    q, k, v = (draw(rng, 600, 4) for _ in range(3))
    want = softmax_attention(q, k, v, window=(50, 0))
    dirty_k, dirty_v = k.copy(), v.copy()
    dirty_k[:100], dirty_v[:100] = np.nan, np.inf
    got = softmax_attention(q, dirty_k, dirty_v, window=(50, 0))
    np.testing.assert_array_equal(got[150:], want[150:])
    assert not np.isfinite(got[:100]).any()


NAMES = ("softcap", "sinks", "mask", "dropout", "bias", "alibi")


@pytest.mark.parametrize("names", [(), *itertools.combinations(NAMES, 2)])
@pytest.mark.parametrize("causal", [False, True])
def test_gradients(names, causal):
    """Of the output and of lse, against difference quotients in extended precision."""
    rng = np.random.default_rng([len(names), causal])
    arrays = dict(zip("qkv", tensors(rng, 9, 12), strict=True))
    options = given_options(rng, 9, 12, *names) | {"window": (4, 1), "causal": causal}
    wide = options | {"scale": 0.7}
    for name, x in options.items():
        if isinstance(x, Alibi):
            wide[name] = Alibi(x.slopes.astype(np.longdouble))
        elif name == "dropout":
            wide[name] = x.astype(np.longdouble)
        elif name in ("sinks", "bias"):
            arrays[name] = wide.pop(name)
    options = {name: x for name, x in options.items() if name not in arrays}
    d_out, d_lse = draw(rng, 4, 9, 2), draw(rng, 4, 9)
    done, pullback = vjp(attend, **arrays, **options, scale=0.7)
    found = {name: x for name, x in pullback((d_out, d_lse))._asdict().items() if x is not None}
    assert set(found) == set(arrays)
    ways = {name: draw(rng, *x.shape) for name, x in arrays.items()}
    step = np.longdouble(2.0**-16)

    def loss(at):
        moved = {x: y.astype(np.longdouble) + at * step * ways[x] for x, y in arrays.items()}
        out, lse = attend(**moved, **wide)
        return np.sum(out * d_out) + np.sum(np.where(done.lse > -np.inf, lse, 0) * d_lse)

    want = (8 * (loss(1) - loss(-1)) - (loss(2) - loss(-2))) / (12 * step)
    got = sum(np.sum(found[name] * way) for name, way in ways.items())
    np.testing.assert_allclose(got, float(want), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("size", [1.0, 30.0])
def test_fifty_digits(size, dtype, record_accuracy):
    """Outputs, normalisers and gradients with a bias, a cap, a sink and a window."""
    rng = np.random.default_rng(int(size))
    shapes = {"q": (5, 3), "k": (6, 3), "v": (6, 2), "bias": (5, 6), "sinks": ()}
    arrays = {x: np.asarray(draw(rng, *shape, dtype=dtype)) for x, shape in shapes.items()}
    arrays |= {x: size * arrays[x] for x in "qk"}
    d_out, d_lse = draw(rng, 5, 2, dtype=dtype), draw(rng, 5, dtype=dtype)
    options = {"scale": 0.5, "softcap": 3.0}
    done, pullback = vjp(attend, **arrays, **options, window=(3, 1))
    seen = naive.visible(arrays["q"], arrays["k"], window=(3, 1))

    def both(q, k, v, bias, sinks):
        return np.column_stack(digits.attend(q, k, v, bias=bias, sinks=sinks, mask=seen, **options))

    cotangent = np.column_stack([d_out, d_lse])
    want, gradients = digits.pull_back(both, cotangent, **arrays)
    eps = float(np.finfo(dtype).eps)
    exponent = 3.0 + largest(arrays["bias"]) + largest(arrays["sinks"])
    exponent += 0.5 * size**2 * 30  # what is capped was rounded before
    got = np.column_stack([done.out, done.lse])
    worst = largest((got - want).astype(float)) / (eps * (1 + exponent))
    record_accuracy("options of exact attention", np.dtype(dtype).name, worst)
    assert worst <= CONTRACT
    for name, x in pullback((d_out, d_lse))._asdict().items():
        if x is not None:
            error = largest(np.asarray(np.asarray(x) - gradients[name], float))
            most = 40 * size * max(1.0, largest(gradients[name].astype(float)))
            assert error <= CONTRACT * eps * (1 + exponent) * most, name


def test_sinks():
    """One more key whose value is 0; a result without keys is that of the sink."""
    rng = np.random.default_rng(0)
    q, k, v = tensors(rng, 5, 7)
    sinks = draw(rng, 4)
    done = attend(q, k, v, sinks=sinks)
    plain = attend(q, k, v)
    np.testing.assert_allclose(done.lse, np.logaddexp(plain.lse, sinks[:, None]), rtol=1e-14)
    share = np.exp(plain.lse - done.lse)[..., None]
    np.testing.assert_allclose(done.out, plain.out * share, rtol=1e-12, atol=1e-15)
    nothing = attend(q, k, v, sinks=sinks, mask=np.zeros(7, bool))
    np.testing.assert_array_equal(nothing.out, 0)
    np.testing.assert_allclose(nothing.lse, np.broadcast_to(sinks[:, None], (4, 5)), rtol=1e-15)
    parts = attend(q, k[:, :3], v[:, :3], sinks=sinks), attend(q, k[:, 3:], v[:, 3:])
    np.testing.assert_allclose(merge(*parts).out, done.out, rtol=1e-12, atol=1e-15)


def test_given_dropout():
    """Weights that were dropped hide what their values hold, and leave the normaliser."""
    rng = np.random.default_rng(0)
    q, k, v = tensors(rng, 5, 7)
    kept = rng.random((4, 5, 7)) < 0.6
    got = attend(q, k, v, dropout=kept / 0.6)
    np.testing.assert_array_equal(got.lse, attend(q, k, v).lse)
    np.testing.assert_array_equal(attend(q, k, v, dropout=np.ones(7)).out, attend(q, k, v).out)
    v[:, 3], kept[..., 3] = np.inf, False
    assert np.isfinite(attend(q, k, v, dropout=kept / 0.6).out).all()


@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (2, 1)}, {"mask": True}])
def test_values_reach_those_queries_that_see_and_keep_them(options, value):
    rng = np.random.default_rng(1)
    (q, k, v), ahead = tensors(rng, 5, 7), np.arange(7) - np.arange(5)[:, None] - 2
    kept, mask = rng.random((2, 4, 5, 7)) < 0.5
    options = options | {"mask": mask} if "mask" in options else options
    seen = mask if "mask" in options else np.ones_like(kept)
    left, right = options.get("window", (9, 0 if "causal" in options else 9))
    seen = seen & (ahead >= -left) & (ahead <= right)
    k, v = (np.repeat(x, 2, 0) for x in (k, v))
    before = attend(q, k, v, dropout=kept / 0.5, **options)
    want = np.where(seen, q @ np.swapaxes(k, -1, -2), -np.inf)
    with np.errstate(invalid="ignore"):
        weights = np.nan_to_num(np.exp(want - before.lse[..., None]))
    np.testing.assert_allclose(before.out, weights * kept / 0.5 @ v, rtol=1e-12, atol=1e-15)
    v[:, 3, 0] = value
    with np.errstate(invalid="ignore"):
        after = attend(q, k, v, dropout=kept / 0.5, **options)
    np.testing.assert_array_equal(np.isfinite(after.out[..., 0]), ~(seen & kept)[..., 3])
    for x, y in ((after.out[..., 1:], before.out[..., 1:]), (after.lse, before.lse)):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-15)


def test_every_option_is_a_limit():
    """Windows that hide nothing, caps far away, sinks of -inf, slopes 0 and no dropout."""
    rng = np.random.default_rng(0)
    q, k, v = tensors(rng, 6, 8)
    want = softmax_attention(q, k, v)
    for options in (
        {"window": (8, 8)},
        {"window": (None, None)},
        {"window": [7, 7]},
        {"sinks": np.full(4, -np.inf)},
        {"bias": alibi(np.zeros(4))},
        {"dropout": np.ones((6, 8))},
    ):
        np.testing.assert_array_equal(softmax_attention(q, k, v, **options), want)
    np.testing.assert_allclose(softmax_attention(q, k, v, softcap=1e9), want, rtol=1e-12)
    causal = softmax_attention(q, k, v, causal=True)
    np.testing.assert_array_equal(softmax_attention(q, k, v, window=(None, 0)), causal)
    np.testing.assert_array_equal(softmax_attention(q, k, v, window=(None, 5), causal=True), causal)


@pytest.mark.parametrize("window", [None, 0, 3, 40])
def test_decoding(window):
    """Token by token, in parts that are merged, and with no more keys than the window holds."""
    rng = np.random.default_rng(0)
    q, k, v = tensors(rng, 30, 30)
    more = {"softcap": 2.0, "sinks": draw(rng, 4)}
    left = None if window is None else (window, 0)
    want = softmax_attention(q, k, v, causal=True, window=left, **more)
    state = SoftmaxState.init(k[:, :0], v[:, :0], window=window, **more)
    for i in range(30):
        state = state.update(k[:, i : i + 1], v[:, i : i + 1])
        got = state.read(q[:, i : i + 1])
        np.testing.assert_allclose(got[:, 0], want[:, i], rtol=1e-12, atol=1e-14)
        assert state.k.shape[-2] == min(i, 29 if window is None else window) + 1
    first, second, third = (
        SoftmaxState.init(k[:, i:j], v[:, i:j], window=window, **more)
        for i, j in ((0, 9), (9, 11), (11, 30))
    )
    for merged in (first.merge(second).merge(third), first.merge(second.merge(third))):
        np.testing.assert_array_equal(merged.k, state.k)


@pytest.mark.long("jax", "dask")
def test_extreme_caps(backend):
    """A cap that is far above all scores is none, and one far below leaves no scores."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((5, 4)).astype(np.float32) for _ in range(3))
    arrays = [backend.array(x) for x in (q, k, v)]
    free, flat = softmax_attention(q, k, v), softmax_attention(0 * q, k, v)
    for cap, want in (
        *((10.0**p, free) for p in (20, 30, 37, 38, 39, 100, 300)),
        *((10.0**-p, flat) for p in (20, 37, 38, 40, 46, 100, 310)),
    ):
        for fn in (softmax_attention, naive.softmax_attention):
            got = backend.numpy(fn(*arrays, softcap=cap))
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_caps_in_extended_precision():
    """All digits of longdouble, by another formula of tanh, of caps that are no powers of 2."""
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((8, 4)).astype(np.longdouble) for _ in range(3))
    for cap in (3.0, np.longdouble(1) / 3, 0.7):
        scores = q @ k.T / 2
        scores = cap * -np.expm1(-2 * scores / cap) / (1 + np.exp(-2 * scores / cap))
        weights = np.exp(scores)
        want = weights @ v / np.sum(weights, -1, keepdims=True)
        for fn in (softmax_attention, naive.softmax_attention):
            error = np.max(np.abs(fn(q, k, v, softcap=cap) - want))
            assert error < 64 * np.finfo(np.longdouble).eps


def test_slopes_of_far_scores():
    """1 / cosh^2 has all its digits where tanh is 1."""
    for ratio in (20.0, 25.0, 60.0, 300.0):
        q, k, v = np.array([[ratio]]), np.array([[1.0], [0.0]]), np.array([[1.0], [0.0]])
        weight = 1 / (1 + math.exp(-1.0))
        want = weight * (1 - weight) * 4 * math.exp(-2 * ratio)
        _, pullback = vjp(softmax_attention, q, k, v, softcap=1.0, scale=1.0)
        np.testing.assert_allclose(pullback(np.ones((1, 1))).q, [[want]], rtol=1e-12)


def test_cap_in_50_digits():
    """By exponentials of 60 digits, of a cap that is no power of 2; and its slope."""
    with mpmath.workdps(60):
        for cap in (3.0, 0.1, np.float32(0.1)):
            for score in (0.5, -4.0, 9.0):
                most = mpmath.mpf(float(cap))
                grown = mpmath.exp(2 * mpmath.mpf(score) / most)
                want = most * (grown - 1) / (grown + 1)
                q, one = np.array([[score]]), np.ones((1, 1))
                (got,) = digits.attend(q, one, one, scale=1.0, softcap=float(cap))[1]
                assert abs(got - want) < 1e-48 * abs(want)
    attention = partial(digits.formulas().softmax_attention, scale=1.0)
    with pytest.raises(ValueError, match="`softcap` must be a positive"):
        attention(one, one, one, softcap=0.0)
    far, pair = np.array([[60.0]]), np.array([[1.0], [0.0]])
    attended = partial(attention, softcap=1.0)
    got = digits.pull_back(attended, np.ones((1, 1)), q=far, k=pair, v=pair)[1]["q"][0, 0]
    weight = 1 / (1 + math.exp(-1.0))
    assert float(got) == pytest.approx(4 * weight * (1 - weight) * math.exp(-120.0), rel=1e-12)


@pytest.mark.long("jax", "dask")
def test_windows_beyond_integers(backend):
    rng = np.random.default_rng(2)
    q, k, v = (backend.array(rng.standard_normal((n, 2))) for n in (3, 5, 5))
    want = backend.numpy(softmax_attention(q, k, v, window=(None, 1)))
    for far in (2**31, 2**40, 2**63, 10**300):
        for fn in (softmax_attention, naive.softmax_attention):
            got = backend.numpy(fn(q, k, v, window=(far, 1)))
            np.testing.assert_allclose(got, want, rtol=1e-12)


@pytest.mark.parametrize("name", ["dropout", "bias"])
def test_options_past_the_first_block(name):
    """Of queries and keys past every block, forth and back, as the steps of the formula say."""
    rng, n, m = np.random.default_rng(3), 1100, 1070
    arrays, d_out = [rng.standard_normal((x, 2)) for x in (n, m, m)], rng.standard_normal((n, 2))
    every = {"bias": alibi(np.array(0.05)), "dropout": (rng.random((n, m)) < 0.5) * 2.0}
    options = {name: every[name]}
    out, pullback = vjp(softmax_attention, *arrays, **options)
    want, cotangents = pulled(partial(naive.softmax_attention, **options), arrays, d_out)
    np.testing.assert_allclose(out, want, rtol=1e-12, atol=1e-12)
    for x, y in zip(pullback(d_out)[:3], cotangents, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-12)


def test_gradients_of_what_is_not_there():
    """A sink of -inf without keys has no gradient, nor a dropped weight of an infinite value."""
    q, k, v = np.ones((2, 2)), np.ones((3, 2)), np.ones((3, 1))
    mask = np.array([[True], [False]])
    options = {"sinks": np.array(-np.inf), "mask": mask & np.ones(3, dtype=bool)}
    found = vjp(softmax_attention, q, k, v, **options)[1](np.ones((2, 1)))
    assert found.sinks == 0
    assert all(np.all(np.isfinite(x)) for x in found[:3])
    v[1] = np.inf
    found = vjp(softmax_attention, q, k, v, sinks=np.array(-np.inf))[1](np.ones((2, 1)))
    assert found.sinks == 0
    out, pullback = vjp(softmax_attention, q, k, v, dropout=np.array([1.5, 0.0, 1.5]))
    np.testing.assert_allclose(out, 1.0)
    found = pullback(np.ones((2, 1)))
    assert all(np.all(np.isfinite(x)) for x in found[:3])


def test_blocks_are_masked_where_a_window_hides_a_pair_of_them():
    """And nowhere else."""
    for shift, left, right in itertools.product((-2, 0, 3), (None, 0, 2), (None, 0, 1)):
        band = Band(shift, left, right)
        for i, j in itertools.product(((0, 3), (2, 4), (5, 6)), ((0, 2), (1, 4), (3, 9))):
            ahead = np.arange(*j) - np.arange(*i)[:, None] - shift
            want = (ahead <= (99 if right is None else right)) & (
                ahead >= -(99 if left is None else left)
            )
            found = band.visible(slice(*i), slice(*j), None, np)
            assert want.all() if found is None else np.array_equal(found, want)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_times_a_weight_of_0_is_nan(value):
    """As it is written, where a key is seen; beside a mask, which counts them."""
    q, bias, v = np.zeros((1, 1)), np.array([0.0, -1e4]), np.array([[1.0], [value]])
    for mask in (None, np.ones(2, bool)):
        assert np.isnan(attend(q, np.zeros((2, 1)), v, bias=bias, mask=mask).out).all()
    assert attend(q, np.zeros((2, 1)), v, bias=bias, mask=np.array([True, False])).out == 1.0
