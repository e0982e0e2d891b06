"""Between the checks and a callable: layouts, dtypes, names, and what is no result."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refattn.conformance import Adapter, Failure, check
from refattn.conformance.candidate.adapter import _in_memory
from tests.conformance.candidates import of, plain, uncentred


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
def test_bfloat16_rounding(numbers):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = np.array(numbers, np.float32)
    x = x[np.abs(x) < 3e38]
    adapter = of(plain, "softmax", dtype="bfloat16")
    np.testing.assert_array_equal(adapter.exact(x), x.astype(ml_dtypes.bfloat16).astype(float))


@pytest.mark.parametrize("layout", [None, "nd", "hnd", "nhd", "bnd", "bhnd", "bnhd"])
def test_layouts_go_there_and_back(layout):
    seen = []

    def fn(q, k, v):
        seen.append(q.shape)
        return q + 0 * v[..., :1, :1]

    adapter = of(fn, "softmax", layout=layout)
    q, k, v = np.random.default_rng(0).standard_normal((3, *adapter.lead(2, 3), 5, 4))
    np.testing.assert_array_equal(adapter(q, k, v), q)
    sizes = dict(zip([axis for axis in "bhnd" if axis in (layout or "bhnd")], q.shape, strict=True))
    assert seen[0] == tuple(sizes[axis] for axis in layout or "bhnd")


@pytest.mark.parametrize("layout", ["transposed", "sliced", "heads inside", "reversed"])
@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 3, 4, 5)])
def test_layouts_in_memory_hold_the_same_numbers(shape, layout):
    x = np.arange(np.prod(shape), dtype=float).reshape(shape)
    y = _in_memory(x, layout)
    np.testing.assert_array_equal(x, y)
    assert y.strides != x.strides


class Quantity(np.ndarray):
    """An array with a unit, which is lost with its type."""


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda x: np.ma.MaskedArray(x, True), "a plain array; got a MaskedArray"),
        (lambda x: np.ma.MaskedArray(x), "a plain array; got a MaskedArray"),
        (lambda x: np.ma.masked, "a plain array; got a MaskedConstant"),
        (lambda x: x.view(np.matrix), "a plain array; got a matrix"),
        (lambda x: x.view(np.recarray), "a plain array; got a recarray"),
        (lambda x: x.view(Quantity), "a plain array; got a Quantity"),
        (lambda x: x + 0j, "complex"),
        (lambda x: x.astype(object), "dtype object|of dtype object|; got object"),
        (lambda x: x.astype(str), "<U32"),
        (lambda x: x.astype([("re", float)]), "re"),
        (lambda x: x.astype("m8[s]"), "timedelta64"),
        (lambda x: x[0, 0], "array|shape"),
        (lambda x: None, "an array of numpy|real numbers"),
    ],
)
def test_what_is_no_plain_array_of_real_numbers_fails(change, text, strict):
    x = np.ones((2, 2))
    with pytest.raises(Failure, match=text):
        of(lambda q, k, v: change(plain(q, k, v)))(x, x, x, strict=strict)
    if "plain" in text or text == "complex":
        moments = of(lambda x: tuple(change(np.atleast_2d(y)) for y in uncentred(x)), "moments")
        with pytest.raises(Failure, match=text):
            moments(x, strict=strict)


def test_other_plain_arrays_pass(tmp_path):
    x = np.ones((2, 2))

    def mapped(x):
        out = np.memmap(tmp_path / "x", x.dtype, "w+", shape=x.shape)
        out[:] = x
        return out

    def read_only(x):
        x.flags.writeable = False
        return x[:]

    for change in (mapped, read_only, np.asfortranarray):
        of(lambda q, k, v, c=change: c(plain(q, k, v)))(x, x, x, strict=True)


class Proxy:
    """Answers whatever it is asked for, and takes anything."""

    __signature__ = property(lambda self: 1 / 0)

    def __getattr__(self, name):
        if name == "__qualname__":
            return self
        raise AttributeError(name)

    def __call__(self, q, k, v):
        return plain(q, k, v)


def test_names_are_strings():
    assert of(Proxy()).name == "Proxy"
    assert check(Proxy(), estimator="softmax", rng=0, checks=["contract"]).verdict == "PASS"


def test_conventions_of_windows_are_declared():
    tag = "exclusive, top-left"
    assert Adapter(len, "softmax", ["window"], {"window": tag}).declared == {"window": tag}
