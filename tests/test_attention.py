"""attend, merge and softmax_attention."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import logsumexp

from refattn import Attended, attend, merge, naive, softmax_attention
from refattn.arrays.library import norm_bound
from refattn.engine import kernel
from refattn.engine.kernel import _may_be_near, _near, _reach
from tests import reference
from tests.reference import CONTRACT


def draw(rng, *shape, dtype=np.float64, size=1.0):
    return (size * rng.standard_normal(shape)).astype(dtype)


def with_norm(x, length):
    norms = np.sqrt(np.sum(x.astype(np.float64) ** 2, -1, keepdims=True))
    return (x / norms * length).astype(x.dtype)


def tolerance(q, k, scale=1.0):
    """Twice the contract: both sides of a comparison are rounded."""
    exponent = abs(scale) * reference.norm(q) * reference.norm(k)
    return 2 * CONTRACT * float(np.finfo(q.dtype).eps) * (1 + exponent)


sizes = st.integers(1, 7)
seeds = st.integers(0, 2**32 - 1)
magnitudes = st.sampled_from([1e-8, 0.1, 1.0, 10.0, 100.0])
dtypes = st.sampled_from([np.float32, np.float64])


@pytest.fixture(autouse=True, scope="module")
def few_queries_too():
    """Let small problems, too, do without a maximum where they can."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "_NEAR_ROWS", 1)
        yield


# --- against 50-digit arithmetic ---------------------------------------------------------------

CASES = {
    "logits of order 1": (1.0, 1.0),
    "logits to 1e4": (100.0, 100.0),
    "norms 1e3, logits to 1e4": (1e3, 10.0),
    "norms 1e-3": (1e-3, 1e-3),
}


@pytest.mark.parametrize("d", [1, 2, 64])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("variant", ["full", "causal", "masked", "biased"])
def test_attend_accuracy(case, d, variant, dtype, record_accuracy):
    rng = np.random.default_rng([d, len(case), len(variant)])
    n, m = 6, 8
    norm_q, norm_k = CASES[case]
    q = with_norm(draw(rng, n, d, dtype=dtype), norm_q)
    k = with_norm(draw(rng, m, d, dtype=dtype), norm_k)
    v = draw(rng, m, 3, dtype=dtype)
    options = {}
    visible = True
    bias = 0.0
    if variant == "causal":
        options["causal"], visible = True, np.tri(n, m, m - n, dtype=bool)
    if variant == "masked":
        options["mask"] = visible = rng.random((n, m)) < 0.4
    if variant == "biased":
        options["bias"] = bias = draw(rng, n, m, dtype=dtype, size=10.0)
    for block in (None, (4, 3)):
        got = kernel.attend(q, k, v, block=block, **options)
        want = reference.attend(q, k, v, bias, visible)
        exponent = norm_q * norm_k + float(np.max(np.abs(bias)))
        seen = np.isfinite(got.lse)
        np.testing.assert_array_equal(seen, np.broadcast_to(visible, (n, m)).any(-1))
        np.testing.assert_array_equal(got.out[~seen], 0)
        worst = max(
            reference.error(got.out, want[0], np.abs(v).max(), exponent),
            reference.error(got.lse[seen], want[1][seen], 1, exponent),
        )
        record_accuracy(f"attend, {variant}, {case}", dtype, worst)
        assert worst <= CONTRACT


@pytest.mark.parametrize(
    ("name", "q", "k"),
    [
        ("one key", [[3.0, 4.0]], [[1.0, -2.0]]),
        ("equal keys", [[3.0, 4.0], [-1e3, 10.0]], [[7.0, -3.0]] * 5),
        ("opposite keys at 1e4", [[1e2, 0.0]], [[1e2, 0.0], [-1e2, 0.0]]),
        ("all scores -1e4", [[1e2, 0.0]], [[-1e2, 0.0], [-1e2, 1.0]]),
    ],
)
def test_attend_accuracy_special(name, q, k, dtype, record_accuracy):
    q, k = np.array(q, dtype), np.array(k, dtype)
    v = draw(np.random.default_rng(1), k.shape[0], 2, dtype=dtype)
    got, want = attend(q, k, v), reference.attend(q, k, v)
    exponent = reference.norm(q) * reference.norm(k)
    worst = max(
        reference.error(got.out, want[0], np.abs(v).max(), exponent),
        reference.error(got.lse, want[1], 1, exponent),
    )
    record_accuracy(f"attend, {name}", dtype, worst)
    assert worst <= CONTRACT


def test_longdouble_keeps_its_digits(record_accuracy):
    rng = np.random.default_rng(5)
    q, k, v = draw(rng, 4, 7), draw(rng, 5, 7), draw(rng, 5, 2)
    got = softmax_attention(*(x.astype(np.longdouble) for x in (q, k, v)))
    want = reference.attend(q, k, v, scale=1 / reference.mp.sqrt(7))[0]
    eps = float(np.finfo(np.longdouble).eps)
    difference = [
        abs(reference.mp.mpf(float(a)) + reference.mp.mpf(float(a - np.longdouble(float(a)))) - b)
        for a, b in zip(got.ravel(), want.ravel(), strict=True)
    ]
    units = float(max(difference)) / (eps * (1 + reference.norm(q) * reference.norm(k)))
    record_accuracy("softmax_attention", "longdouble", units)
    assert units <= CONTRACT


def rounded_one_way(terms, center, dtype):
    """Numbers near `center` of which each rounds their running sum down, by almost half a unit."""
    near = (center * (1 + 1e-3 * np.random.default_rng(0).random(2000))).astype(dtype)
    chosen, total = np.empty(terms, dtype), dtype.type(0)
    for j in range(terms):
        exact = np.longdouble(total) + near.astype(np.longdouble)
        sums = exact.astype(dtype)
        i = int(np.argmax((exact - sums) / np.spacing(sums)))
        chosen[j], total = near[i], sums[i]
    return chosen


@pytest.mark.parametrize("d", [64, 85, 160, 256, 1024, 4096])
def test_accuracy_at_every_head_size(d, dtype, record_accuracy):
    # Products of nearly equal terms: the rounding errors of a long sum all have one sign.
    rows = [
        np.full(d, 0.2, dtype),
        *(np.resize(rounded_one_way(t, 0.75, dtype), d) for t in (48, 64, d)),
    ]
    for row in rows:
        want = reference.mp.fsum(reference.exact(row))
        for n, m in ((2, 1), (1, 2), (2, 2), (16, 16), (300, 70)):
            q, k = np.ones((n, d), dtype), np.broadcast_to(row, (m, d))
            got = attend(q, k, np.ones((m, 1), dtype))
            exponent = reference.norm(q) * reference.norm(k)
            units = max(
                reference.error(got.lse[:1], np.array([want + reference.mp.log(m)]), 1, exponent),
                reference.error(got.out[:1], reference.exact(np.ones((1, 1))), 1, exponent),
            )
            record_accuracy(f"attend, d = {d}, nearly equal terms", dtype, units)
            assert units <= CONTRACT


@pytest.mark.parametrize("d", [86, 128])
def test_accuracy_of_products_that_are_not_cut(d, dtype):
    # Half the errors of the worst sum of d terms, 3 d / 16, is more than C only by design.
    row = rounded_one_way(d, 0.75, dtype)
    k = np.broadcast_to(row, (16, d))
    got = attend(np.ones((16, d), dtype), k, np.ones((16, 1), dtype)).lse[:1]
    want = reference.mp.fsum(reference.exact(row)) + reference.mp.log(16)
    exponent = d**0.5 * reference.norm(k)
    assert reference.error(got, np.array([want]), 1, exponent) <= 3 * d / 16 + 1
    same = np.full((16, d), 0.2, dtype)
    want = reference.mp.fsum(reference.exact(same[0]) ** 2) + reference.mp.log(16)
    got = attend(same, same, same[:, :1]).lse[:1]
    units = reference.error(got, np.array([want]), 1, reference.norm(same) ** 2)
    assert units <= CONTRACT


@pytest.mark.parametrize("d", [48, 64, 128, 129, 256, 1024, 4096])
def test_no_vectors_exceed_the_bound_of_a_sum(d, dtype):
    # One term of 1024, and others of half its last place and a little more: each rounds it up.
    half = 1024 * float(np.finfo(dtype).eps) / 2
    row = np.full((70, d), np.sqrt(1.05 * half), dtype)
    row[:, 0] = 32
    terms = reference.exact(row[0]) ** 2
    want = np.array([reference.mp.fsum(terms) + reference.mp.log(70)])
    got = attend(row, row, row[:, :1]).lse[:1]
    units = reference.error(got, want, 1, float(sum(terms)))
    assert units <= (d / 2 if d <= 128 else 64)
    if d == 128:
        assert units > 3 * d / 16  # there are such vectors


@pytest.mark.parametrize("m", [1024, 3904, 4112, 7944])
@pytest.mark.parametrize("terms", [48, 64])
def test_accuracy_of_values_chosen_against_it(m, terms, dtype, record_accuracy):
    # At these m numpy.sum of m equal weights, too, is off by two units and more.
    zeros, row = np.zeros((8, 1), dtype), None
    for center in (0.55, 0.62, 0.7, 0.78, 0.9):
        row = np.resize(rounded_one_way(terms, center, dtype), m)
        v = np.repeat(row[:, None], 16, axis=1)
        got = attend(zeros, np.zeros((m, 1), dtype), v).out[:1, :1]
        want = np.array([[reference.mp.fsum(reference.exact(row)) / m]])
        units = reference.error(got, want, np.max(row), 0)
        record_accuracy("attend, values chosen against it", dtype, units)
        assert units <= CONTRACT


@pytest.mark.parametrize("largest", [1.0, 0.999, 0.5, 1e-300, 5e-324])
def test_extreme_values_stay_finite(largest, dtype):
    # Sums of the values overflow; their mean does not.
    size = np.finfo(dtype).max if largest > 1e-3 else 1.0
    v = np.full((5000, 2), dtype.type(largest * float(size)), dtype)
    q, k = np.zeros((3, 2), dtype), np.zeros((5000, 2), dtype)
    out = attend(q, k, v).out
    assert np.all(np.isfinite(out))
    tiny, eps = float(np.finfo(dtype).smallest_subnormal), float(np.finfo(dtype).eps)
    with np.errstate(over="ignore"):  # of the tolerance itself
        np.testing.assert_allclose(out, v[:3], rtol=CONTRACT * eps, atol=tiny)
    both = merge(attend(q, k, v), attend(q, -k, v)).out
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(both, v[:3], rtol=CONTRACT * eps, atol=tiny)


@pytest.mark.parametrize("m", [1000, 4047, 30_000, 2**20])
@pytest.mark.parametrize("value", [0.999, 0.7, 1.7589990022820636])
def test_many_equal_values(m, value, dtype, record_accuracy):
    # Rounding errors of equal terms have one sign for long.
    v = np.full((m, 4), value, dtype)
    rng = np.random.default_rng(0)
    for size in (0.0, 1.0):
        q, k = draw(rng, 3, 2, dtype=dtype, size=size), draw(rng, m, 2, dtype=dtype, size=size)
        got = attend(q, k, v).out
        exponent = reference.norm(q) * reference.norm(k)
        units = reference.error(got, reference.exact(v[:3]), value, exponent)
        record_accuracy(f"attend, {m} equal values", dtype, units)
        assert units <= CONTRACT


def near_equal_values(m, terms, center, dtype):
    """Values that, added in turn in sums of `terms`, are rounded up by almost half a unit each."""
    values, total = np.full(m, center, dtype), dtype.type(0)
    for j in range(m):
        if j % terms == 0:
            total = dtype.type(0)
        unit = float(np.spacing(total + values[j]))
        odd = dtype.type(center // unit * unit + unit / 2 + float(np.spacing(values[j])))
        if total > 0 and abs(odd - center) < 0.01 * center:
            values[j] = odd
        total += values[j]
    return values


@pytest.mark.parametrize("terms", [32, 48, 64, 96, 128, 2000])
@pytest.mark.parametrize("m", [96, 1000, 1536])
def test_many_nearly_equal_values(m, terms, dtype, record_accuracy):
    worst = 0.0
    for center in (0.78, 0.86, 0.9, 0.95):
        v = near_equal_values(m, terms, center, dtype)
        q, k = np.zeros((3, 1), dtype), np.zeros((m, 1), dtype)
        got = attend(q, k, v[:, None].repeat(8, 1)).out
        want = np.full((1, 1), sum(reference.exact(v)) / m)
        worst = max(worst, reference.error(got[:1, :1], want, float(v.max()), 0))
    record_accuracy(f"attend, {m} values equal but for rounding, {terms}", dtype, worst)
    assert worst <= CONTRACT


# --- conventions ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "m"), [(4, 4), (3, 5), (5, 3), (1, 4), (4, 0), (0, 4), (0, 0)])
def test_causal_is_bottom_right(n, m):
    rng = np.random.default_rng(n * 10 + m)
    q, k, v = draw(rng, 2, n, 3), draw(rng, 2, m, 3), draw(rng, 2, m, 2)
    got = attend(q, k, v, causal=True)
    visible = np.array([[j <= i + m - n for j in range(m)] for i in range(n)], bool).reshape(n, m)
    want = attend(q, k, v, mask=visible)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-14)


def test_no_key_gives_the_identity_of_merge():
    rng = np.random.default_rng(0)
    q, k, v = draw(rng, 2, 3, 4), draw(rng, 2, 5, 4), draw(rng, 2, 5, 6)
    for empty in (
        attend(q, k, v, mask=np.zeros((3, 5), bool)),
        attend(q, k[:, :0], v[:, :0]),
        attend(q, k, v, bias=np.full((3, 5), -np.inf)),
    ):
        np.testing.assert_array_equal(empty.out, np.zeros((2, 3, 6)))
        np.testing.assert_array_equal(empty.lse, np.full((2, 3), -np.inf))
        some = attend(q, k, v)
        for merged in (merge(empty, some), merge(some, empty)):
            np.testing.assert_allclose(merged.out, some.out, rtol=1e-15)
            np.testing.assert_allclose(merged.lse, some.lse, rtol=1e-15)
        np.testing.assert_array_equal(merge(empty, empty).lse, empty.lse)


@pytest.mark.parametrize(("heads", "groups"), [(8, 2), (6, 6), (6, 1), (1, 3), (4, 4)])
def test_grouped_heads_are_contiguous(heads, groups):
    rng = np.random.default_rng(heads)
    q, k, v = draw(rng, 2, heads, 5, 3), draw(rng, 2, groups, 7, 3), draw(rng, 2, groups, 7, 2)
    mask = rng.random((2, heads, 5, 7)) < 0.8
    mask[..., 0] = True
    if heads == 1:
        mask = mask[:, :1]
    got = softmax_attention(q, k, v, mask=mask, causal=True)
    for h in range(max(heads, groups)):
        g = h // (heads // groups) if heads >= groups else h
        visible = mask[:, min(h, heads - 1)] & np.tri(5, 7, 2, dtype=bool)
        want = naive.softmax_attention(q[:, min(h, heads - 1)], k[:, g], v[:, g], mask=visible)
        np.testing.assert_allclose(got[:, h], want, atol=1e-13)


def test_leading_axes_broadcast():
    rng = np.random.default_rng(3)
    q, k, v = draw(rng, 3, 1, 4, 2), draw(rng, 5, 6, 2), draw(rng, 2, 3, 5, 6, 7)
    mask, bias = rng.random((5, 1, 6)) < 0.7, draw(rng, 3, 1, 1, 6)
    got = attend(q, k, v, mask=mask, bias=bias)
    full = (2, 3, 5)
    want = attend(
        np.broadcast_to(q, (*full, 4, 2)),
        np.broadcast_to(k, (*full, 6, 2)),
        v,
        mask=np.broadcast_to(mask, (*full, 4, 6)),
        bias=np.broadcast_to(bias, (*full, 4, 6)),
    )
    np.testing.assert_allclose(got.out, want.out, atol=1e-14)
    np.testing.assert_allclose(got.lse, want.lse, atol=1e-14)


def test_hidden_nan_does_not_reach_the_result():
    rng = np.random.default_rng(0)
    q, k, v = draw(rng, 6, 3), draw(rng, 6, 3), draw(rng, 6, 2)
    clean = attend(q, k, v, causal=True)
    for value in (np.nan, np.inf, -np.inf, 1e300):
        for spoiled in (0, 1):
            arrays = [k.copy(), v.copy()]
            arrays[spoiled][4] = value
            with np.errstate(invalid="ignore"):  # NumPy reports inf * 0 in the hidden scores
                got = attend(q, *arrays, causal=True)
            np.testing.assert_array_equal(got.out[:4], clean.out[:4])
            np.testing.assert_array_equal(got.lse[:4], clean.lse[:4])
            if np.isnan(value):
                assert np.all(np.isnan(got.out[4:]))
    q[2] = np.nan
    got = attend(q, k, v)
    np.testing.assert_array_equal(np.isnan(got.lse), np.arange(6) == 2)


# --- where the scores are known to be small, and no maximum is taken ------------------------------


@pytest.fixture(params=["subnormals", "flushed to zero"])
def subnormals(request):
    """With a processor set to flush subnormal numbers to 0 too, as other libraries may leave it."""
    if request.param == "subnormals":
        yield
        return
    torch = pytest.importorskip("torch")
    if not torch.set_flush_denormal(True):
        pytest.skip("the processor cannot flush subnormal numbers")
    yield
    torch.set_flush_denormal(False)


@pytest.mark.long("1048576")
@pytest.mark.usefixtures("subnormals")
@pytest.mark.parametrize("m", [4, 300, 2**15, 2**20])
def test_sums_with_and_without_maximum_add(m, dtype, record_accuracy):
    # m keys of one score, which needs no maximum if it is small enough, and a block of one key of a
    # larger score and about the same weight, for which the factor between them may have no digits.
    mp, worst = reference.mp, 0.0
    highest = -float(np.log(np.finfo(dtype).smallest_normal))
    q, v = np.ones((1, 1), dtype), np.repeat(np.eye(2, dtype=dtype), [m, 1], 0)
    for first in np.linspace(0.4, 1, 20) * highest:
        for gap in (-30.0, 0.0, 2.0, 6.0):
            k = np.repeat(np.array([[first], [first + np.log(m) + gap]], dtype), [m, 1], 0)
            got = kernel.attend(q, k, v, block=(1, m))
            scores = [mp.log(m) + mp.mpf(float(k[0, 0])), mp.mpf(float(k[-1, 0]))]
            lse = max(scores) + mp.log(sum(mp.exp(x - max(scores)) for x in scores))
            want = np.array([[mp.exp(x - lse) for x in scores]])
            exponent = float(np.max(k))
            worst = max(
                worst,
                reference.error(got.out, want, 1, exponent),
                reference.error(got.lse, np.array([lse]), 1, exponent),
            )
    record_accuracy(f"attend, {m} keys that may need no maximum", dtype, worst)
    assert worst <= CONTRACT


def test_large_bias_of_small_scores(dtype):
    q, k, v = np.zeros((3, 1), dtype), np.zeros((4, 1), dtype), np.eye(4, dtype=dtype)
    bias = np.array([[900.0] * 4, [-900.0] * 4, [-np.inf, 900, -900, 900]], dtype)
    seen = np.array([[1, 1, 1, 1], [1, 1, 1, 1], [0, 1, 0, 1]])
    want = (seen / seen.sum(-1, keepdims=True), bias.max(-1) + np.log(seen.sum(-1)))
    for row in range(3):
        keys = kernel.attend(q[:1], k, v, key_bias=lambda _, row=row: bias[row])
        whole = attend(q, k, v, bias=bias)
        for got in (Attended(keys.out, keys.lse), Attended(*(x[row : row + 1] for x in whole))):
            np.testing.assert_allclose(got.out[0], want[0][row], rtol=1e-4, atol=0)
            np.testing.assert_allclose(got.lse[0], want[1][row], rtol=1e-4)


@pytest.mark.parametrize("share", [0.999, 1e-10, 1e-30])
@pytest.mark.parametrize("score", [-60.0, -40.0, 40.0, 60.0])
def test_each_column_of_values_keeps_its_digits(share, score, dtype):
    # Weights may be as large as e^60, or as small, and values as large as any number, or as small.
    limits = np.finfo(dtype)
    smallest = 10 * 2000 * limits.smallest_normal  # that keeps its digits, as documented
    sizes = [1.0, limits.max * dtype.type(share), smallest / dtype.type(share), 0.0]
    v = np.ones((2000, 1), dtype) * np.array(sizes, dtype)
    v[::2] *= dtype.type(0.5)
    for columns in ([0], [1], [2], [3], [0, 1], [0, 2], [1, 2, 3]):
        for k in (np.full((2000, 1), score, dtype), np.full((2000, 1), -score, dtype)):
            got = attend(np.ones((2, 1), dtype), k, v[:, columns]).out
            want = np.array(sizes)[columns] * 0.75
            rtol = CONTRACT * float(limits.eps) * (1 + abs(score))
            np.testing.assert_allclose(got.astype(np.float64), [want, want], rtol=rtol, atol=0)


@pytest.mark.usefixtures("subnormals")
@pytest.mark.parametrize("sign", [1, -1])
def test_squares_of_queries_that_vanish(sign, dtype):
    # The scores are 1.9 sqrt(d), although the squares of the queries are below all normal numbers,
    # and the values as large or small as scores of 0 allow.
    limits, d = np.finfo(dtype), 128
    small = dtype.type(0.97 * np.sqrt(limits.smallest_normal))
    size = 1.9 / (float(small) * np.sqrt(d))
    q, k = np.full((1, d), small, dtype), np.full((2, d), sign * size, dtype)
    largest = 0.9 * float(limits.eps) / float(limits.smallest_normal) / 16
    for value in (1.0, largest, 1 / largest):
        got = attend(q, k, np.full((2, 1), value, dtype))
        rtol = CONTRACT * float(limits.eps) * (1 + np.sqrt(d))
        np.testing.assert_allclose(got.out, [[dtype.type(value)]], rtol=rtol, atol=0)
        lse = sign * d * float(small) * float(dtype.type(size)) + np.log(2)
        np.testing.assert_allclose(got.lse, [lse], atol=rtol)


exponents = st.integers(-30, 30).map(lambda x: 10.0**x)


@given(seeds, exponents, exponents, exponents, st.sampled_from([0.0, 1e-3, 1e3]), dtypes)
def test_near_scores_are_small(seed, size_q, size_k, size_v, size_b, dtype):
    rng, limits = np.random.default_rng(seed), np.finfo(dtype)
    n, m, d = (int(x) for x in rng.integers(1, 40, 3))
    q, k = draw(rng, n, d, dtype=dtype, size=size_q), draw(rng, m, d, dtype=dtype, size=size_k)
    v, b = draw(rng, m, 3, dtype=dtype, size=size_v), draw(rng, 1, m, dtype=dtype, size=size_b)
    v[:, rng.integers(3)] *= rng.integers(2)
    with np.errstate(all="ignore"):
        near = _near(norm_bound(q), _reach(k, b, v), m)
        assert near.shape == (n, 1)
        wide = np.longdouble
        worst = np.abs(q.astype(wide) @ k.astype(wide).T + b).max(-1)
    seen = worst[near[:, 0]]
    columns = np.abs(v.astype(wide)).max(0)
    for largest in (1, *columns[columns > 0]):
        assert np.all(seen + np.log(wide(m)) + np.log(wide(largest)) < np.log(wide(limits.max)))
        assert np.all(np.log(wide(largest)) - seen > np.log(wide(limits.smallest_normal)))


def test_usual_scores_need_no_maximum(dtype):
    rng = np.random.default_rng(0)
    q, k, v = (draw(rng, 2, 100, 64, dtype=dtype) for _ in range(3))
    v[..., 3] = 0
    assert np.all(_near(norm_bound(q / dtype.type(8)), _reach(k, None, v), 10**6))
    assert _may_be_near(q, v)
    assert not _may_be_near(q, v[..., :0])  # nothing to look at
    assert attend(q, k, v[..., :0]).out.shape == (2, 100, 0)


@pytest.mark.parametrize("big", [0, 1, 4, 5])
def test_each_block_of_keys_reaches_as_far_as_it_does(big, dtype):
    """One head of one block has scores that need a maximum: where it is, nothing else is."""
    rng = np.random.default_rng(big)
    q, k, v = (draw(rng, 2, 3, n, 4, dtype=dtype) for n in (9, 40, 40))
    head, j = divmod(big, 3), slice(8 * (big % 5), 8 * (big % 5) + 8)
    k[(*head, j)] *= 1e4
    v[(*head, j)] *= 1e-30
    got = kernel.attend(q, k, v, block=(4, 8))
    wide = [x.astype(np.longdouble) for x in (q, k, v)]
    want = naive.softmax_attention(*wide, scale=1.0)
    bound = tolerance(q, k)
    np.testing.assert_array_less(np.abs(got.out - want), bound * np.max(np.abs(v)))
    lse = np.asarray(logsumexp(wide[0] @ wide[1].mT, axis=-1))
    np.testing.assert_array_less(np.abs(got.lse - lse), bound * (1 + np.abs(lse)))


def test_blocks_of_keys_are_looked_at_once(monkeypatch):
    """Once for all queries, and for all query heads that share a key head."""
    calls = []
    monkeypatch.setattr(kernel, "_reach", lambda *x: calls.append(0) or _reach(*x))
    q, k, v = (np.ones((heads, 4, 40, 2)) for heads in (3, 1, 1))
    kernel.attend(q, k, v, block=(8, 10))
    assert len(calls) <= 2 * 4 * 4  # each block of a head; two threads may come at once


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_a_query_does_not_touch_others(value, dtype):
    rng = np.random.default_rng(3)
    q, k, v = (draw(rng, *shape, dtype=dtype) for shape in ((150, 4), (300, 4), (300, 2)))
    before = attend(q, k, v)
    q[7] = value
    with np.errstate(invalid="ignore"):
        after = attend(q, k, v)
    others = np.arange(150) != 7
    np.testing.assert_array_equal(before.out[others], after.out[others])
    np.testing.assert_array_equal(before.lse[others], after.lse[others])


def test_lengths_that_overflow_are_not_reported(dtype):
    # Warnings are errors here. The scores are 2, the squares of the queries overflow.
    size = np.sqrt(np.finfo(dtype).max) * dtype.type(16)
    q, k = np.full((1, 2), size, dtype), np.full((3, 2), 1 / size, dtype)
    got = attend(q, k, np.ones((3, 1), dtype))
    np.testing.assert_allclose(got.lse, 2 + np.log(3), rtol=1e-6)


# --- identities ----------------------------------------------------------------------------------


@st.composite
def problems(draw_):
    rng = np.random.default_rng(draw_(seeds))
    n, m, d, d_v = (draw_(sizes) for _ in range(4))
    lead = tuple(draw_(st.lists(st.integers(1, 3), max_size=2)))
    size, dtype = draw_(magnitudes), draw_(dtypes)
    shapes = (*lead, n, d), (*lead, m, d), (*lead, m, d_v)
    q, k, v = (draw(rng, *shape, dtype=dtype, size=size) for shape in shapes)
    return q, k, v / max(size, 1)


@given(problems())
def test_constant_values_give_the_constant(problem):
    q, k, v = problem
    constant = np.broadcast_to(v[..., :1, :], v.shape)
    got = attend(q, k, constant).out
    want = np.broadcast_to(v[..., :1, :], got.shape)
    eps = CONTRACT * float(np.finfo(q.dtype).eps)
    np.testing.assert_allclose(got, want, rtol=eps, atol=0)


@given(problems(), seeds)
def test_order_of_keys_does_not_matter(problem, seed):
    q, k, v = problem
    order = np.random.default_rng(seed).permutation(k.shape[-2])
    a, b = attend(q, k, v), attend(q, k[..., order, :], v[..., order, :])
    size = np.abs(v).max()
    np.testing.assert_allclose(a.out, b.out, rtol=0, atol=tolerance(q, k) * size)
    np.testing.assert_allclose(a.lse, b.lse, rtol=0, atol=tolerance(q, k))


@given(problems(), seeds)
def test_joint_rotation_and_shift_of_keys(problem, seed):
    q, k, v = (x.astype(np.float64) for x in problem)
    rng = np.random.default_rng(seed)
    rotation = np.linalg.qr(draw(rng, q.shape[-1], q.shape[-1]))[0]
    shift = draw(rng, q.shape[-1])
    a = attend(q, k, v).out
    atol = 2 * tolerance(q, np.concatenate([k, k + shift], -2)) * np.abs(v).max()
    np.testing.assert_allclose(attend(q @ rotation, k @ rotation, v).out, a, rtol=0, atol=atol)
    np.testing.assert_allclose(attend(q, k + shift, v).out, a, rtol=0, atol=atol)


@given(problems(), st.floats(0.01, 5))
def test_scale_multiplies_the_scores(problem, scale):
    q, k, v = (x.astype(np.float64) for x in problem)
    a, b = attend(q, k, v, scale=scale), attend(scale * q, k, v)
    np.testing.assert_allclose(a.out, b.out, rtol=0, atol=tolerance(scale * q, k) * np.abs(v).max())
    np.testing.assert_allclose(
        softmax_attention(q, k, v, scale=scale), a.out, rtol=0, atol=tolerance(scale * q, k)
    )


@given(problems(), st.lists(st.integers(0, 7), max_size=3), seeds)
def test_merge_agrees_with_one_pass(problem, cuts, seed):
    q, k, v = problem
    m = k.shape[-2]
    edges = [0, *sorted(min(c, m) for c in cuts), m]
    parts = [attend(q, k[..., i:j, :], v[..., i:j, :]) for i, j in pairwise(edges)]
    np.random.default_rng(seed).shuffle(parts)
    left = right = Attended(*parts[0])
    for p in parts[1:]:
        left, right = merge(left, p), merge(p, right)
    whole = attend(q, k, v)
    for merged in (left, right):
        atol = len(edges) * tolerance(q, k)
        np.testing.assert_allclose(merged.out, whole.out, rtol=0, atol=atol * np.abs(v).max())
        np.testing.assert_allclose(merged.lse, whole.lse, rtol=0, atol=atol)


@given(problems())
def test_merge_is_associative_and_commutative(problem):
    q, k, v = problem
    a, b, c = (attend(q, s * k, t * v) for s, t in ((1, 1), (-1, 2), (0.5, -1)))
    atol = 4 * tolerance(q, k)
    for x, y in ((merge(merge(a, b), c), merge(a, merge(b, c))), (merge(a, b), merge(b, a))):
        np.testing.assert_allclose(x.out, y.out, rtol=0, atol=2 * atol * np.abs(v).max())
        np.testing.assert_allclose(x.lse, y.lse, rtol=0, atol=atol)


@given(problems(), st.tuples(sizes, sizes), st.booleans())
def test_block_size_does_not_matter(problem, block, causal):
    q, k, v = problem
    a, b = (
        kernel.attend(q, k, v, causal=causal, block=block),
        kernel.attend(q, k, v, causal=causal),
    )
    np.testing.assert_allclose(a.out, b.out, rtol=0, atol=tolerance(q, k) * np.abs(v).max())
    np.testing.assert_allclose(a.lse, b.lse, rtol=0, atol=tolerance(q, k))


@given(st.integers(2, 40), st.integers(1, 39), seeds, st.sampled_from([None, (5, 3), (16, 16)]))
def test_editing_the_future_changes_nothing(n, t, seed, block):
    t = min(t, n - 1)
    rng = np.random.default_rng(seed)
    q, k, v = draw(rng, 2, n, 3), draw(rng, 2, n, 3), draw(rng, 2, n, 2)
    before = kernel.attend(q, k, v, causal=True, block=block)
    for x in (q, k, v):
        x[:, t:] = rng.choice([1e3, -1e3, np.nan, np.inf, 0.0], x[:, t:].shape)
    with np.errstate(all="ignore"):
        after = kernel.attend(q, k, v, causal=True, block=block)
    np.testing.assert_array_equal(before.out[:, :t], after.out[:, :t])
    np.testing.assert_array_equal(before.lse[:, :t], after.lse[:, :t])


@given(problems(), seeds)
def test_masking_equals_deleting(problem, seed):
    q, k, v = problem
    kept = np.random.default_rng(seed).random(k.shape[-2]) < 0.6
    k[..., ~kept, :], v[..., ~kept, :] = np.nan, np.nan
    a = attend(q, k, v, mask=kept)
    b = attend(q, k[..., kept, :], v[..., kept, :])
    if kept.any():
        atol = tolerance(q, k[..., kept, :])
        np.testing.assert_allclose(a.out, b.out, rtol=0, atol=atol * np.abs(v[..., kept, :]).max())
        np.testing.assert_allclose(a.lse, b.lse, rtol=0, atol=atol)
    else:
        np.testing.assert_array_equal(a.out, b.out)


# --- every array library --------------------------------------------------------------------------


@pytest.mark.long("jax", "dask")
@pytest.mark.parametrize("options", ["plain", "causal", "mask"])
@pytest.mark.parametrize(
    ("n", "m", "d", "d_v"),
    [
        (1, 48, 1, 0),
        (3, 49, 129, 1),
        (2, 64, 8, 0),
        (5, 130, 130, 70),
        (8200, 2, 1, 1),
        (2, 8300, 2, 3),
        (520, 2100, 200, 2),
    ],
)
def test_backends_agree_beyond_every_block(backend, options, n, m, d, d_v):
    # Terms of one product, rows in cache, rows and columns of a block: on NumPy and elsewhere.
    rng, dtype = np.random.default_rng(0), np.dtype(np.float32)
    q, k, v = (draw(rng, *shape, dtype=dtype) for shape in ((n, d), (m, d), (m, d_v)))
    kwargs = {"causal": options == "causal"}
    if options == "mask":
        kwargs["mask"] = rng.random((n, m)) < 0.7
    got = backend.call(softmax_attention, q, k, v, **kwargs)
    assert got.shape == (n, d_v)
    want = naive.softmax_attention(*(x.astype(np.float64) for x in (q, k, v)), **kwargs)
    atol = tolerance(q, k, d**-0.5) * np.max(np.abs(v), initial=0)
    np.testing.assert_allclose(got, want, rtol=0, atol=atol)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of Dask, which computes later
@pytest.mark.parametrize("weight", ["some", "underflows"])
def test_infinite_values_with_a_mask_of_true(backend, dtype, weight):
    # What is seen counts as without a mask, column by column; what is hidden does not count.
    q, k = np.ones((3, 1), dtype), np.zeros((5, 1), dtype)
    if weight == "underflows":
        k[:4] = -1e4
    v = np.array(
        [[np.inf, 1, 1, -np.inf, np.nan, 1], [np.inf, 1, -np.inf, 1, 1, 2], *[[1.0] * 6] * 3], dtype
    )
    plain = backend.call(attend, q, k, v).out
    got = backend.call(attend, q, k, v, mask=np.ones((3, 5), bool)).out
    np.testing.assert_array_equal(got, plain)
    if weight == "some":
        np.testing.assert_array_equal(got[0, [0, 2, 3]], [np.inf, -np.inf, -np.inf])
        assert np.all(np.isfinite(got[:, [1, 5]]))
    mask = np.array([[1, 1, 1, 1, 1], [0, 1, 1, 1, 1], [0, 0, 1, 1, 1]], bool)
    got = backend.call(attend, q, k, v, mask=mask).out
    np.testing.assert_array_equal(got[0], plain[0])
    np.testing.assert_array_equal(got[2], np.ones(6))
    want = backend.call(attend, q[1:2], k[1:], v[1:]).out[0]
    np.testing.assert_allclose(got[1], want, rtol=1e-6)
    nonzero = backend.call(attend, q, k, v, causal=True).out
    np.testing.assert_array_equal(nonzero[2], plain[2])


def test_no_warning_of_what_is_hidden_or_documented(dtype):
    # Warnings are errors in these tests.
    huge = np.finfo(dtype).max
    q, v = np.ones((2, 3), dtype), np.ones((4, 2), dtype)
    mask = np.array([True, True, False, False])
    for extreme in (np.inf, -np.inf, np.nan, huge):
        k = np.ones((4, 3), dtype)
        k[2:] = extreme
        np.testing.assert_array_equal(attend(q, k, v, mask=mask).out, np.ones((2, 2)))
        out = attend(q[:, :1], k[:, :1], v, bias=np.array([0, 0, -np.inf, -np.inf], dtype)).out
        assert np.all(np.isnan(out) == bool(np.isnan(extreme) or extreme == np.inf))
    far = np.array([[0.0], [800.0]], dtype)
    np.testing.assert_array_equal(attend(q[:, :1], far, v[:2], causal=True).out, np.ones((2, 2)))
    assert np.all(np.isnan(attend(q * huge, q * huge, v[:2]).out))


def test_torch_autocast_changes_nothing():
    torch = pytest.importorskip("torch")
    x = torch.asarray(draw(np.random.default_rng(0), 64, 64, dtype=np.dtype(np.float32)))
    want = attend(x, x, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = attend(x, x, x)
        joined = merge(got, want)
        assert (x @ x).dtype == torch.bfloat16  # it is on again
    assert torch.equal(got.out, want.out)
    assert torch.equal(joined.out, merge(want, want).out)


@pytest.mark.long("float32")
@pytest.mark.parametrize("options", ["plain", "causal", "mask", "bias", "groups"])
def test_backends_agree(backend, dtype, options):
    rng = np.random.default_rng(0)
    heads = 2 if options == "groups" else 4
    q = draw(rng, 2, 4, 5, 3, dtype=dtype)
    k, v = draw(rng, 2, heads, 6, 3, dtype=dtype), draw(rng, 2, heads, 6, 2, dtype=dtype)
    kwargs = {}
    if options == "causal":
        kwargs["causal"] = True
    if options == "mask":
        kwargs["mask"] = rng.random((2, 1, 5, 6)) < 0.5
        kwargs["mask"][0, 0, 0] = False
    if options == "bias":
        kwargs["bias"] = draw(rng, 4, 1, 6, dtype=dtype)
    atol = tolerance(q, k)
    want = attend(q, k, v, scale=0.5, **kwargs)
    got = backend.call(attend, q, k, v, scale=0.5, **kwargs)
    np.testing.assert_allclose(got.out, want.out, rtol=0, atol=atol)
    np.testing.assert_allclose(got.lse, want.lse, rtol=0, atol=atol)
    got = backend.call(softmax_attention, q, k, v, **kwargs)
    np.testing.assert_allclose(got, softmax_attention(q, k, v, **kwargs), rtol=0, atol=atol)


def test_merge_on_backends(backend, dtype):
    rng = np.random.default_rng(0)
    a = draw(rng, 2, 3, 4, dtype=dtype), draw(rng, 2, 3, dtype=dtype)
    b = draw(rng, 2, 3, 4, dtype=dtype), draw(rng, 2, 3, dtype=dtype)
    a[1][0, 0] = -np.inf

    def merged(*arrays):
        return merge(Attended(*arrays[:2]), Attended(*arrays[2:]))

    got, want = backend.call(merged, *a, *b), merged(*a, *b)
    np.testing.assert_allclose(got.out, want.out, rtol=0, atol=tolerance(a[0], b[0]))
    np.testing.assert_allclose(got.lse, want.lse, rtol=0, atol=tolerance(a[0], b[0]))
