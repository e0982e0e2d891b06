"""Floating-point formats against the types of NumPy and ml_dtypes, number by number."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refattn.judge.rounding.formats import FORMATS

ml_dtypes = pytest.importorskip("ml_dtypes")

TYPES = {
    "float16": np.dtype("float16"),
    "float32": np.dtype("float32"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
SHORT = [name for name in TYPES if name != "float32"]


def every(name):
    """All finite numbers of a type of 8 or 16 bits."""
    bits = np.arange(2 ** (8 * TYPES[name].itemsize), dtype=f"u{TYPES[name].itemsize}")
    with np.errstate(invalid="ignore"):
        found = bits.view(TYPES[name]).astype(np.float64)
    return np.unique(found[np.isfinite(found)])


def cast(name, x):
    """Rounded by the type; float64 goes to bfloat16 in one step only where that is exact."""
    with np.errstate(over="ignore", invalid="ignore"):
        found = x.astype(TYPES[name]).astype(np.float64)
    return np.where(np.isnan(found) & ~np.isnan(x), np.copysign(np.inf, x), found)


@pytest.mark.parametrize("name", SHORT)
def test_numbers_are_held_and_kept(name):
    x, to = every(name), FORMATS[name]
    np.testing.assert_array_equal(to.round(x), x)
    assert to.holds(x).all()
    assert x.max() == to.largest
    assert not to.holds(x[1:] * (1 + to.unit / 2)).all()


@pytest.mark.parametrize("name", SHORT)
def test_ties_and_what_is_beside_them(name):
    x, to = every(name), FORMATS[name]
    middle = (x[1:] + x[:-1]) / 2
    for y in (middle, np.nextafter(middle, math.inf), np.nextafter(middle, -math.inf)):
        found = to.round(y)
        assert (np.abs(found - y) <= np.diff(x) / 2).all()
        assert np.isin(found, x).all()
    np.testing.assert_array_equal(to.round(np.nextafter(middle, math.inf)), x[1:])
    np.testing.assert_array_equal(to.round(np.nextafter(middle, -math.inf)), x[:-1])
    even = to.round(middle) / np.diff(x) / 2
    np.testing.assert_array_equal(even, np.rint(even))


@pytest.mark.parametrize("name", SHORT)
def test_spacing(name):
    x, to = every(name), FORMATS[name]
    x = x[x >= 0]
    np.testing.assert_array_equal(to.spacing(x[:-1]), np.diff(x))
    np.testing.assert_array_equal(to.spacing(-x), to.spacing(x))
    normal = x[x >= 2.0**to.least]
    assert (to.spacing(normal) / 2 <= to.unit * normal).all()


@pytest.mark.parametrize("name", TYPES)
def test_random_numbers(name):
    """Of float64, which is rounded once; ml_dtypes rounds to float32 first."""
    rng, to = np.random.default_rng(0), FORMATS[name]
    exponents = rng.uniform(to.least - to.digits - 2, math.log2(to.largest) + 1, 100_000)
    x = rng.choice([-1.0, 1.0], exponents.size) * 2**exponents
    x = x if name in ("float16", "float32") else FORMATS["float32"].round(x)
    np.testing.assert_array_equal(to.round(x), cast(name, x))


@given(st.floats())
def test_float64_is_kept(x):
    np.testing.assert_array_equal(FORMATS["float64"].round(x), x)


@pytest.mark.parametrize("name", FORMATS)
def test_limits(name):
    to = FORMATS[name]
    for sign in (-1.0, 1.0):
        assert to.round(sign * math.inf) == sign * math.inf
        assert math.copysign(1, float(to.round(sign * 0.0))) == sign
    assert np.isnan(to.round(math.nan))
    assert to.holds([math.nan, math.inf, 0.0]).all()
    if name != "float64":
        assert to.round(to.largest * (1 + 2.0**-30)) == to.largest
        assert to.round(to.largest * (1 + 2 * to.unit)) == math.inf


def test_tfloat32_is_float32_with_the_digits_of_float16():
    x = np.random.default_rng(2).standard_normal(10_000)
    np.testing.assert_array_equal(
        FORMATS["tfloat32"].round(x), FORMATS["float16"].round(x * 16) / 16
    )
