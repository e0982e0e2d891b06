"""Between the checks and a callable: layouts, dtypes, names, what is no result, and limits."""

import math
import re
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import refattn
from refattn.judge.conformance import CHECKS, Adapter, Failure, check, checks_of
from refattn.judge.conformance.candidate.failures import Beyond
from refattn.judge.conformance.candidate.libraries import lay_out
from refattn.judge.conformance.candidate.limits import largest_logit, leaving_out, shrink
from tests.judge.conformance.candidates import (
    SEES,
    attending,
    limited,
    multiple,
    of,
    plain,
    result,
    small,
    textbook_lara,
    textbook_performer,
    uncentred,
)


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
    y = lay_out(x, layout)
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


def test_masks_of_one_axis_are_not_for_those_who_refuse_them():
    def attention(q, k, v, *, mask=None):
        assert mask is None or mask.ndim > 1
        return refattn.softmax_attention(q, k, v, mask=mask)

    verdicts = [
        check(of(attention, "softmax", "mask", mask_axes=axes), checks=["mask_broadcasts"]).verdict
        for axes in ("1", "2")
    ]
    assert verdicts == ["FAIL", "PASS"]


@pytest.mark.parametrize(
    ("dtype", "length", "words"),
    [
        ("float64", 40.0, "max_logit=300 "),
        ("float32", 40.0, "max_logit=40 "),
        ("float64", 10.0, "max_logit=45 "),
        ("float64", np.inf, ""),
    ],
)
def test_the_limit_that_is_suggested_leaves_out_all_sizes_that_overflow(dtype, length, words):
    q, k = np.zeros((1, 1)), np.full((1, 1), length)
    got = leaving_out(of(len, "rfa", dtype=dtype), (q, k))
    assert words in got
    assert ("max_logit" in got) == bool(words)


@pytest.mark.usefixtures("briefly")
def test_what_the_limits_leave_is_compared():
    """Logits are made small enough; every check with ordinary numbers is made."""
    adapter = of(limited(small), "softmax", *SEES, max_logit=20)
    names = ["reference_values", "large_logits", "mask", "causal", "grouped_heads", "value_length"]
    report = check(adapter, checks=names)
    assert [r.check for r in report.results if r.status == "PASS"] == [
        name for name in CHECKS if name in names
    ]


def squares_forgotten(x, omega):
    return x @ np.swapaxes(omega, -1, -2)


TEXTBOOK = {"rfa": textbook_performer, "lara": textbook_lara}
DEFECTS = {
    "rfa": partial(textbook_performer, power=squares_forgotten),
    "lara": partial(textbook_lara, less=0),
}
LIMITS = pytest.mark.parametrize(("dtype", "most"), [("float64", 300), ("float32", 40)])


@pytest.mark.long("float64")
@LIMITS
@pytest.mark.parametrize("estimator", TEXTBOOK)
@pytest.mark.usefixtures("briefly")
def test_features_that_overflow_are_right_within_the_limit(estimator, dtype, most):
    """Keys are as long as `max_logit` lets them be, and a defect shows there."""
    tags = {"dtype": dtype, "max_logit": most}
    names = ["extreme_logits", "weighted_mean"]
    right = of(TEXTBOOK[estimator], estimator, "omega", **tags)
    assert check(right, checks=names).verdict == "PASS"
    wrong = of(DEFECTS[estimator], estimator, "omega", **tags)
    assert result(wrong, "value_length").status == "FAIL"


@LIMITS
@pytest.mark.parametrize("estimator", TEXTBOOK)
def test_a_failure_at_extreme_inputs_says_how_long_they_are(estimator, dtype, most):
    wide = result(of(TEXTBOOK[estimator], estimator, "omega", dtype=dtype), "weighted_mean")
    assert (wide.status, wide.severity) == ("FAIL", "range")
    length = float(re.search(r"keys of norm ([\d.]+)", wide.got)[1])
    assert length / 4**0.25 > math.sqrt(most)  # d is 4


@given(st.floats(0.1, 1e4), st.floats(0.0, 1e3), st.floats(0.0, 1e3))
def test_shorter_vectors_are_within_the_limit(most, x, y):
    """Features bound (|q|^2 + |k|^2) / 2, which bounds |q . k|: exact attention, that only."""
    q, k = np.full((3, 4), x), np.full((2, 4), -y)
    rfa, exact = (of(len, name, max_logit=most) for name in ("rfa", "softmax"))
    assert largest_logit(rfa, (q, k)) == pytest.approx(x * x + y * y)
    assert largest_logit(exact, (q, k)) == pytest.approx(2 * x * y)
    for adapter in (rfa, exact):
        factor = shrink(adapter, q, k)
        assert factor == 1.0 or largest_logit(adapter, (factor * q, factor * k)) < most
        assert factor < 1.0 or largest_logit(adapter, (q, k)) <= most


@pytest.mark.parametrize("corner", ["top-left", "bottom-right"])
def test_causal_attention_is_not_moved(corner):
    """Padding tokens must keep queries and keys aligned; otherwise the candidate is not called."""
    q, k, v = (np.ones((n, 4)) for n in (7, 4, 4))
    adapter = of(refattn.softmax_attention, "softmax", "causal", multiple_of=8, causal=corner)
    with pytest.raises(Beyond, match="multiple_of"):
        adapter(q, k, v, causal=True)


def test_logits_of_every_head_count():
    adapter = of(refattn.softmax_attention, "softmax", "gqa", max_logit=10)
    q, k = np.ones((4, 2, 4)), np.ones((2, 3, 4))
    k[1] *= 30
    with pytest.raises(Beyond, match="max_logit"):
        adapter(q, k, np.ones((2, 3, 4)))


@pytest.mark.long("29")
@pytest.mark.parametrize("seeds", [1, 29])
def test_sums_of_keys_that_come_many_times(seeds):
    """Five keys come 64 times each to a kernel of blocks, which adds them in turn."""

    def running(q, k, v):
        scores = np.einsum("...id,...jd->...ij", q, k) / np.sqrt(q.shape[-1])
        weights = np.exp(scores - np.max(scores, -1, keepdims=True))
        return np.einsum("...ij,...jv->...iv", weights, v) / np.sum(weights, -1, keepdims=True)

    adapter = of(limited(multiple(64), running), "softmax", multiple_of=64)
    for seed in range(seeds):
        report = check(adapter, rng=30 - seeds + seed, checks=["value_length"])
        assert report.verdict == "PASS", (seed, report)


def test_limits_of_windows_are_in_the_report():
    adapter = of(attending(), "softmax", *SEES, "window", multiple_of=8)
    assert check(adapter, checks=["windows"]).limits == {
        "multiple_of=8": "no other number of tokens was tested"
    }


def test_names_of_couplings_are_rfa_with_that_tag():
    """Explicit tags win, and the checks are the same."""
    fn = refattn.random_feature_attention
    tagged = Adapter(fn, "rfa", tags={"coupling": "orthogonal"})
    for name in ("rfa-orthogonal", "performer", "favor"):
        named = Adapter(fn, name)
        assert named.record is tagged.record
        assert named.tags == tagged.tags
        assert [*checks_of(named)] == [*checks_of(tagged)]
        assert Adapter(fn, name, tags={"coupling": "iid"})["coupling"] == "iid"
    assert Adapter(fn, "rfa-sobol")["coupling"] == "sobol"
    assert Adapter(fn, "rfa-regularised").record.name == "rfa-regularised"  # of another law
