"""Biases by lag: transforms of long tiles, the law of their errors, and what is lost without it."""

import numpy as np
import pytest

import refattn
from refattn import linear_attention, naive, random_feature_attention
from refattn.engine import lags
from tests.cases import agrees, assert_close, differentiable, prepared
from tests.problems import draw, eps

NAMES = ["rfa lags", "rfa waves, lags", "linear lags"]


@pytest.fixture
def transforms(monkeypatch):
    """Short tiles are transformed, too, if they are straight enough: the lengths of these."""
    made, convolve = [], lags._convolve
    monkeypatch.setattr(lags, "_HALVING", 0.0)
    for name in ("_LEAF_TOKENS", "_TRACED_TOKENS"):
        monkeypatch.setattr(lags, name, 16)
    monkeypatch.setattr(
        lags, "_convolve", lambda x, y, *rest: made.append(x.shape[-1]) or convolve(x, y, *rest)
    )
    return made


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_transforms_are_the_formula(transforms, name, causal):
    for seed, (lead, n, m) in enumerate([("grouped", 40, 55), ("none", 55, 40)]):
        case, p, options = prepared(name, lead, n, m, "keys", causal, seed)
        options["bias"] = np.clip(options["bias"], -0.5, 0.5)  # straight enough in float64
        got, want = (f(*p.arrays, **options, **p.options) for f in (case.fn, case.formula))
        assert_close(got, want, 4 * case.atol(p, options))
        if name != "rfa waves, lags":  # the control: lags in reverse order
            other = case.fn(*p.arrays, **{**options, "bias": options["bias"][..., ::-1]})
            assert np.max(np.abs(other - want)) > 1e-3
    assert max(transforms) >= 39


@pytest.mark.long("jax", "dask", "readonly")
def test_libraries_transform_or_do_not(transforms, backend, dtype):
    if backend.name == "cupy" and not hasattr(backend.xp.fft, "rfft"):
        pytest.skip("what stands in for CuPy has no Fourier transforms")
    case, p, options = prepared("rfa lags", "grouped", 21, 21, "keys", True, dtype=dtype)
    options["bias"] = np.clip(options["bias"], -0.5, 0.5)
    want = case.formula(*p.arrays, **options, **p.options)
    got = backend.call(case.fn, *p.arrays, **options, **p.options)
    assert_close(got, want, case.atol(p, options))
    assert bool(transforms) == (backend.name not in ("array_api_strict", "dask"))


@pytest.mark.parametrize("name", NAMES)
def test_pullbacks_of_transforms(transforms, name):
    case, arrays, options, rng = differentiable(name, "none", 41, 40, size=0.3)
    arrays["bias"] = np.clip(arrays["bias"], -0.5, 0.5)
    agrees(case.fn, case.formula, arrays, options, rng, each=False)
    assert transforms


def shapes(count):
    """Biases of relative positions, by lags from -count to count."""
    lag = np.arange(-count, count + 1)
    noise = np.random.default_rng(0).standard_normal(lag.shape)
    return {
        "none": 0.0 * lag,
        "a slope": -0.5 * np.abs(lag),
        "a steep slope": -3.0 * np.abs(lag),
        "a logarithm": -np.log1p(np.abs(lag)),
        "noise": noise,
        "large noise": 100 * noise,
        "a bell": -(lag**2) / 50,
        "a window": np.where(np.abs(lag) < 20, 0.0, -np.inf),
    }


@pytest.mark.parametrize("size", [1.0, 60.0])
@pytest.mark.parametrize("name", shapes(1))
def test_rows_have_digits_whatever_keys_and_biases_are(transforms, name, size, dtype):
    """Relative to the absolute terms of each row, where kernels and biases are both extreme."""
    rng, n = np.random.default_rng(1), 60
    bias = shapes(n - 1)[name].astype(dtype)
    q, k, omega = draw(rng, n, 4, size=size), draw(rng, n, 4, size=size), draw(rng, 3, 4)
    v = draw(rng, n, 2) * 10.0 ** rng.integers(-3, 4, (n, 1))
    arrays = [x.astype(dtype) for x in (q, k, v)]
    wide = [x.astype(np.longdouble) for x in arrays]
    exponent = 4 * size**2 * 4 + np.max(np.abs(bias[np.isfinite(bias)]))
    for fn, formula, options in (
        (random_feature_attention, naive.random_feature_attention, {"omega": omega}),
        (linear_attention, naive.linear_attention, {}),
    ):
        got = fn(*arrays, bias=bias, **options)
        want, whole = (
            formula(*wide[:2], x, bias=bias.astype(np.longdouble), **options)
            for x in (wide[2], np.abs(wide[2]))
        )
        assert np.max(np.abs(got - want) / whole) <= 16 * eps(arrays[0]) * (1 + exponent)


def test_the_error_of_a_transform_is_relative_to_rows_up_to_the_range_of_the_bias(monkeypatch):
    """About eps e^r sqrt(log2 n): one large key, read with a weight of e^-r by some queries."""
    n, rng = 512, np.random.default_rng(2)
    for spread in (0.0, 8.0, 16.0):
        x = np.zeros(n)
        x[0] = 1.0  # all other keys are 0, of which no row has a sum
        by_lag = np.exp(spread * rng.uniform(-1, 0, 2 * n - 1))
        got = lags.toeplitz(by_lag, x, np)
        off = np.max(np.abs(got / by_lag[n - 1 :: -1] - 1)) / np.finfo(float).eps
        assert off <= 4 * np.exp(spread) * np.log2(2 * n) ** 0.5
        assert off >= 0.01 * np.exp(spread) * (spread > 0)  # and digits are lost
    monkeypatch.setattr(lags, "_HALVING", 0.0)
    monkeypatch.setattr(lags, "_is_straight", lambda *_: True)  # as where values are not looked at
    monkeypatch.setattr(lags, "_LEAF_TOKENS", 16)
    spoilt = test_rows_have_digits_whatever_keys_and_biases_are
    with pytest.raises(AssertionError):
        spoilt(None, "large noise", 1.0, np.dtype(np.float64))


@pytest.mark.parametrize("causal", [False, True])
def test_a_bias_that_falls_ever_faster_has_no_line(transforms, monkeypatch, causal):
    """Which would lie far above it: rows have digits where values are not looked at, too."""
    monkeypatch.setattr(lags, "_is_straight", lambda *_: True)
    rng, n = np.random.default_rng(4), 64
    q, k, v, omega = draw(rng, n, 3), draw(rng, n, 3), draw(rng, n, 2), draw(rng, 2, 3)
    given = {"omega": omega, "bias": -(np.arange(1.0 - n, n) ** 2), "causal": causal}
    got, want = (x.random_feature_attention(q, k, v, **given) for x in (refattn, naive))
    assert_close(got, want, 1e-12)
    assert transforms


def test_a_nan_reaches_rows_that_see_it_alone(transforms):
    n, rng = 60, np.random.default_rng(3)
    q, k, v, omega = draw(rng, n, 3), draw(rng, n, 3), draw(rng, n, 2), draw(rng, 2, 3)
    lag = np.abs(np.arange(1 - n, n))
    for bias, causal in ((np.where(lag < 5, 0.0, -np.inf), False), (-0.1 * lag, True)):
        want = random_feature_attention(q, k, v, omega=omega, bias=bias, causal=causal)
        for name in ("k", "v"):
            x = {"k": k.copy(), "v": v.copy()}
            x[name][50] = np.nan
            got = random_feature_attention(q, **x, omega=omega, bias=bias, causal=causal)
            seen = np.arange(n) >= 50 if causal else np.abs(np.arange(n) - 50) < 5
            assert np.all(np.isnan(got[seen]))
            np.testing.assert_array_equal(got[~seen], want[~seen])
