"""The kernel of exact attention: digits whatever its blocks, and where it takes no maximum."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import logsumexp

from refattn import Attended, attend, merge, naive, softmax_attention
from refattn.engine import attend as blocks
from refattn.engine.attend import _bounded, _may_be_bounded, _reach, norm_bound
from refattn.engine.scores import Scores
from tests import reference
from tests.problems import draw, dtypes, seeds, tolerance, with_norm
from tests.reference import CONTRACT


@pytest.fixture(autouse=True, scope="module")
def few_queries_too():
    """Let small problems, too, do without a maximum where they can."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "_BOUNDED_ROWS", 1)
        yield


# --- against 50-digit arithmetic ------------------------------------------------------------------


def units(got, want, size, exponent):
    """Error of outputs and of log normalisers, in units of the contract."""
    return max(
        reference.error(got.out, want[0], size, exponent),
        reference.error(got.lse, want[1], 1, exponent),
    )


@pytest.mark.sweep(2)
@pytest.mark.parametrize("d", [1, 2, 64])
@pytest.mark.parametrize("norms", [(1.0, 1.0), (100.0, 100.0), (1e3, 10.0), (1e-3, 1e-3)])
@pytest.mark.parametrize("variant", ["full", "causal", "mask", "bias"])
def test_outputs_and_log_normalisers(norms, d, variant, dtype, record_accuracy):
    rng, n, m = np.random.default_rng([d, int(norms[0]), len(variant)]), 6, 8
    q, k = (with_norm(draw(rng, x, d, dtype=dtype), y) for x, y in zip((n, m), norms, strict=True))
    v, visible, bias = draw(rng, m, 3, dtype=dtype), np.ones((n, m), bool), np.zeros((n, m), dtype)
    if variant == "causal":
        visible = np.tri(n, m, m - n, dtype=bool)
    if variant == "mask":
        visible = rng.random((n, m)) < 0.4
    if variant == "bias":
        bias = draw(rng, n, m, dtype=dtype, size=10.0)
    options = {"full": {}, "causal": {"causal": True}, "mask": {"mask": visible}}
    want = reference.attend(q, k, v, scale=1.0, bias=bias, mask=visible)
    seen = visible.any(-1)
    for block in (None, (4, 3)):
        got = blocks.attend(q, k, v, Scores(**options.get(variant, {"bias": bias})), block=block)
        np.testing.assert_array_equal(np.isfinite(got.lse), seen)
        np.testing.assert_array_equal(got.out[~seen], 0)
        some = Attended(got.out[seen], got.lse[seen])
        exponent = norms[0] * norms[1] + float(np.max(np.abs(bias)))
        worst = units(some, [x[seen] for x in want], np.abs(v).max(), exponent)
        record_accuracy(f"attend, {variant}, norms {norms}", dtype, worst)
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
def test_keys_that_are_equal_opposite_or_far(name, q, k, dtype, record_accuracy):
    q, k = np.array(q, dtype), np.array(k, dtype)
    v = draw(np.random.default_rng(1), k.shape[0], 2, dtype=dtype)
    exponent = reference.norm(q) * reference.norm(k)
    want = reference.attend(q, k, v, scale=1.0)
    worst = units(attend(q, k, v), want, np.abs(v).max(), exponent)
    record_accuracy(f"attend, {name}", dtype, worst)
    assert worst <= CONTRACT


def test_longdouble_keeps_its_digits(record_accuracy):
    rng = np.random.default_rng(5)
    q, k, v = draw(rng, 4, 7), draw(rng, 5, 7), draw(rng, 5, 2)
    got = softmax_attention(*(x.astype(np.longdouble) for x in (q, k, v)))
    want = reference.attend(q, k, v, scale=1 / reference.mp.sqrt(7))[0]
    exponent = reference.norm(q) * reference.norm(k)
    worst = float(np.max(np.abs(reference.exact(got) - want)))
    worst /= float(np.finfo(np.longdouble).eps) * (1 + exponent)
    record_accuracy("softmax_attention", "longdouble", worst)
    assert worst <= CONTRACT


# --- sums chosen against it: all rounding errors have one sign ------------------------------------


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


def units_of_a_product(x, y, n, m, exponent=None):
    """Of n queries x and m keys y: the log normaliser, and outputs, which are 1."""
    q, k = np.broadcast_to(x, (n, len(x))), np.broadcast_to(y, (m, len(y)))
    got = attend(q, k, np.ones((m, 1), x.dtype))
    product = reference.mp.fsum(reference.exact(x) * reference.exact(y))
    want = reference.exact(np.ones((1, 1))), np.array([product + reference.mp.log(m)])
    exponent = reference.norm(q) * reference.norm(k) if exponent is None else exponent
    return units(Attended(got.out[:1], got.lse[:1]), want, 1, exponent)


@pytest.mark.long("1024", "4096", "256")
@pytest.mark.parametrize("d", [64, 85, 160, 256, 1024, 4096])
def test_products_of_nearly_equal_terms(d, dtype, record_accuracy):
    rows = [np.resize(rounded_one_way(t, 0.75, dtype), d) for t in (48, 64, d)]
    for row in (np.full(d, 0.2, dtype), *rows):
        for n, m in ((2, 1), (1, 2), (2, 2), (16, 16), (300, 70)):
            worst = units_of_a_product(np.ones(d, dtype), row, n, m)
            record_accuracy(f"attend, d = {d}, nearly equal terms", dtype, worst)
            assert worst <= CONTRACT


@pytest.mark.parametrize("d", [86, 128])
def test_products_that_are_not_cut(d, dtype):
    # Half the errors of the worst sum of d terms, 3 d / 16, is more than C only by design.
    ones, row = np.ones(d, dtype), rounded_one_way(d, 0.75, dtype)
    assert units_of_a_product(ones, row, 16, 16) <= 3 * d / 16 + 1
    same = np.full(d, 0.2, dtype)
    assert units_of_a_product(same, same, 16, 16) <= CONTRACT


@pytest.mark.parametrize("d", [48, 64, 128, 129, 256, 1024, 4096])
def test_no_vectors_exceed_the_bound_of_a_sum(d, dtype):
    # One term of 1024, and others of half its last place and a little more: each rounds it up.
    half = 1024 * float(np.finfo(dtype).eps) / 2
    row = np.full(d, np.sqrt(1.05 * half), dtype)
    row[0] = 32
    worst = units_of_a_product(row, row, 70, 70, float(sum(reference.exact(row) ** 2)))
    assert worst <= (d / 2 if d <= 128 else 64)
    if d == 128:
        assert worst > 3 * d / 16  # there are such vectors


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


def units_of_a_mean(values):
    """Of equal scores, with the values in 16 columns."""
    m, zeros = len(values), np.zeros((8, 1), values.dtype)
    v = np.repeat(values[:, None], 16, axis=1)
    got = attend(zeros, np.zeros((m, 1), values.dtype), v).out[:1, :1]
    want = np.array([[reference.mp.fsum(reference.exact(values)) / m]])
    return reference.error(got, want, float(np.max(values)), 0)


@pytest.mark.sweep(2)
@pytest.mark.long("7944")
@pytest.mark.parametrize("m", [1024, 3904, 4112, 7944])
@pytest.mark.parametrize("terms", [48, 64])
def test_means_of_values_that_round_one_way(m, terms, dtype, record_accuracy):
    # At these m numpy.sum of m equal weights, too, is off by two units and more.
    for center in (0.55, 0.62, 0.7, 0.78, 0.9):
        worst = units_of_a_mean(np.resize(rounded_one_way(terms, center, dtype), m))
        record_accuracy("attend, values chosen against it", dtype, worst)
        assert worst <= CONTRACT


@pytest.mark.sweep(2)
@pytest.mark.parametrize("terms", [32, 48, 64, 96, 128, 2000])
@pytest.mark.parametrize("m", [96, 1000, 1536])
def test_means_of_nearly_equal_values(m, terms, dtype, record_accuracy):
    for center in (0.78, 0.86, 0.9, 0.95):
        worst = units_of_a_mean(near_equal_values(m, terms, center, dtype))
        record_accuracy(f"attend, {m} values equal but for rounding, {terms}", dtype, worst)
        assert worst <= CONTRACT


@pytest.mark.long("1048576")
@pytest.mark.parametrize("m", [1000, 4047, 30_000, 2**20])
@pytest.mark.parametrize("value", [0.999, 0.7, 1.7589990022820636])
def test_means_of_equal_values(m, value, dtype, record_accuracy):
    v, rng = np.full((m, 4), value, dtype), np.random.default_rng(0)
    for size in (0.0, 1.0):
        q, k = draw(rng, 3, 2, dtype=dtype, size=size), draw(rng, m, 2, dtype=dtype, size=size)
        exponent = reference.norm(q) * reference.norm(k)
        worst = reference.error(attend(q, k, v).out, reference.exact(v[:3]), value, exponent)
        record_accuracy(f"attend, {m} equal values", dtype, worst)
        assert worst <= CONTRACT


@pytest.mark.parametrize("m", [64, 400, 512])  # as NumPy sums them, and in products of 64 with ones
def test_sums_of_weights_do_not_round_against_those_of_values(m, dtype):
    """Sums of 64 equal terms in turn are off by 8 eps: those of weights are not added so."""
    scores = np.linspace(0, np.log(2), 400).astype(dtype)[:, None]
    values = (1 + np.random.default_rng(0).random(64)).astype(dtype)
    out = attend(scores, np.ones((m, 1), dtype), np.repeat(values[None], m, 0)).out
    worst = np.max(np.abs(out.astype(np.longdouble) / values - 1)) / np.finfo(dtype).eps
    assert worst <= 12


@pytest.mark.parametrize("largest", [1.0, 0.999, 0.5, 1e-300, 5e-324])
def test_means_of_extreme_values_are_finite(largest, dtype):
    # Sums of the values overflow; their mean does not.
    size = np.finfo(dtype).max if largest > 1e-3 else 1.0
    v = np.full((5000, 2), dtype.type(largest * float(size)), dtype)
    q, k = np.zeros((3, 2), dtype), np.zeros((5000, 2), dtype)
    rtol, atol = CONTRACT * float(np.finfo(dtype).eps), float(np.finfo(dtype).smallest_subnormal)
    for got in (attend(q, k, v), merge(attend(q, k, v), attend(q, -k, v))):
        assert np.all(np.isfinite(got.out))
        with np.errstate(over="ignore"):  # of the tolerance itself
            np.testing.assert_allclose(got.out, v[:3], rtol=rtol, atol=atol)


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
            got = blocks.attend(q, k, v, block=(1, m))
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
        keys = blocks.attend(q[:1], k, v, key_bias=lambda _, row=row: bias[row])
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
        near = _bounded(norm_bound(q, np), _reach(k, b, v, np), m)
        assert near.shape == (n, 1)
        wide = np.longdouble
        worst = np.abs(q.astype(wide) @ k.astype(wide).T + b).max(-1)
    seen = worst[near[:, 0]]
    columns = np.abs(v.astype(wide)).max(0)
    for largest in (1, *columns[columns > 0]):
        assert np.all(seen + np.log(wide(m)) + np.log(wide(largest)) < np.log(wide(limits.max)))
        assert np.all(np.log(wide(largest)) - seen > np.log(wide(limits.smallest_normal)))


@pytest.mark.parametrize("m", [1, 300, 2**20])
def test_how_far_scores_may_reach_without_a_maximum(m, dtype):
    """e^r (2 m)^2 <= eps / tiny: sums of m terms are added to others whose mass is 1 / (2 m)."""
    limits, one = np.finfo(dtype), np.ones((1, 1), dtype)
    most = np.log(float(limits.eps) / float(limits.smallest_normal) / (2 * m) ** 2)
    norms = np.array([[most * 0.9999], [most * 1.0001]], dtype)
    np.testing.assert_array_equal(_bounded(norms, _reach(one, None, one, np), m), [[True], [False]])


def test_usual_scores_need_no_maximum(dtype):
    rng = np.random.default_rng(0)
    q, k, v = (draw(rng, 2, 100, 64, dtype=dtype) for _ in range(3))
    v[..., 3] = 0
    assert np.all(_bounded(norm_bound(q / dtype.type(8), np), _reach(k, None, v, np), 10**6))
    assert _may_be_bounded(q, v)
    assert not _may_be_bounded(q, v[..., :0])  # nothing to look at
    assert attend(q, k, v[..., :0]).out.shape == (2, 100, 0)


@pytest.mark.parametrize("big", [0, 1, 4, 5])
def test_each_block_of_keys_reaches_as_far_as_it_does(big, dtype):
    """One head of one block has scores that need a maximum: where it is, nothing else is."""
    rng = np.random.default_rng(big)
    q, k, v = (draw(rng, 2, 3, n, 4, dtype=dtype) for n in (9, 40, 40))
    head, j = divmod(big, 3), slice(8 * (big % 5), 8 * (big % 5) + 8)
    k[(*head, j)] *= 1e4
    v[(*head, j)] *= 1e-30
    got = blocks.attend(q, k, v, block=(4, 8))
    wide = [x.astype(np.longdouble) for x in (q, k, v)]
    want = naive.softmax_attention(*wide, scale=1.0)
    bound = tolerance(q, k)
    np.testing.assert_array_less(np.abs(got.out - want), bound * np.max(np.abs(v)))
    lse = np.asarray(logsumexp(wide[0] @ wide[1].mT, axis=-1))
    np.testing.assert_array_less(np.abs(got.lse - lse), bound * (1 + np.abs(lse)))


def test_blocks_of_keys_are_looked_at_once(monkeypatch):
    """Once for all queries, and for all query heads that share a key head."""
    calls = []
    monkeypatch.setattr(blocks, "_reach", lambda *x: calls.append(0) or _reach(*x))
    q, k, v = (np.ones((heads, 4, 40, 2)) for heads in (3, 1, 1))
    blocks.attend(q, k, v, block=(8, 10))
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


# --- blocks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [(2, 3), (5, 3), (16, 16)])
@pytest.mark.parametrize("causal", [False, True])
def test_block_size_does_not_matter(block, causal):
    """Nor does the future, in blocks of any size: it changes not a bit."""
    for n, m, seed in ((1, 7, 0), (7, 5, 1), (40, 40, 2)):
        rng = np.random.default_rng(seed)
        arrays = [draw(rng, 2, *x) for x in ((n, 3), (m, 3), (m, 2))]
        scores = Scores(causal=causal)
        got, want = blocks.attend(*arrays, scores, block=block), blocks.attend(*arrays, scores)
        atol = tolerance(*arrays[:2]) * np.abs(arrays[2]).max()
        np.testing.assert_allclose(got.out, want.out, rtol=0, atol=atol)
        np.testing.assert_allclose(got.lse, want.lse, rtol=0, atol=atol)
    for t in (1, 5, 17, 39) if causal else ():
        after = [x.copy() for x in arrays]
        for x in after:
            x[:, t:] = rng.choice([1e3, -1e3, np.nan, np.inf, 0.0], x[:, t:].shape)
        with np.errstate(all="ignore"):
            edited = blocks.attend(*after, scores, block=block)
        np.testing.assert_array_equal(edited.out[:, :t], got.out[:, :t])
        np.testing.assert_array_equal(edited.lse[:, :t], got.lse[:, :t])
