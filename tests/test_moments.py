"""Mean and covariance of rows, against exact arithmetic and against their exact laws."""

import math
import tracemalloc
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refattn import moments
from refattn.engine import scatter
from refattn.moments import Moments, estimate, estimate_chunks, merge, shrink, shrinkage_intensity
from tests import reference
from tests.problems import draw, seeds
from tests.reference import CONTRACT, mp


class Pair(NamedTuple):
    """Moments without the integers, which a backend does not carry."""

    mean: Any
    cov: Any


def arrays(m):
    return Pair(m.mean, m.cov)


# --- against 50-digit arithmetic ---------------------------------------------------------------


def units(got, x, spread=None):
    """Error of moments of rows (N, d) in units of the contract, infinite for nan.

    `spread` replaces 1 + z where rows are not seen in the order of `x`.
    """
    mean, cov = reference.formulas().mean_and_covariance(x)
    sd = np.array([mp.sqrt(cov[i, i]) for i in range(len(mean))])
    if spread is None:
        spread = 1 + abs(reference.exact(x[0]) - mean) / np.where(sd == 0, 1, sd)
    else:
        spread = np.full(len(mean), spread, object)
    eps = mp.mpf(float(np.finfo(x.dtype).eps))
    if not (np.all(np.isfinite(got.mean)) and np.all(np.isfinite(got.cov))):
        return math.inf
    both = np.maximum(spread[:, None], spread) * sd[:, None] * sd
    worst = mp.mpf(0)
    for x, want, size in ((got.mean, mean, abs(mean) + spread * sd), (got.cov, cov, both)):
        error = abs(reference.exact(x) - want)
        assert np.all(error[size == 0] == 0)
        worst = max([worst, *(error[size != 0] / size[size != 0] / eps)])
    return float(worst)


def naive(x):
    """The defect: E[x x'] - E[x] E[x]'."""
    n, mean = len(x), x.mean(0)
    return Pair(mean, (x.T @ x / n - np.outer(mean, mean)) * (n / (n - 1)))


def with_leading_digits(digits, dtype, n=201):
    """Rows that share that many leading digits, as in the SmLs data of NIST StRD."""
    rng = np.random.default_rng(digits)
    tenths = rng.integers(3, 6, (n, 3)) / 10 + 0.01 * rng.standard_normal((n, 3))
    return (10.0 ** (digits - 1) + tenths).astype(dtype)


@pytest.mark.parametrize(
    ("digits", "name"),
    [(k, "float64") for k in (0, 3, 6, 9, 13)] + [(k, "float32") for k in (0, 3, 6)],
)
def test_constant_leading_digits(digits, name, record_accuracy):
    x = with_leading_digits(digits, name)
    worst = units(estimate(x), x)
    record_accuracy(f"moments.estimate, {digits} constant leading digits", name, worst)
    assert worst <= CONTRACT
    if digits >= 3:
        assert units(naive(x), x) > 10 * CONTRACT  # the test sees the defect it is for


@pytest.mark.long("outlier first")
@pytest.mark.parametrize("name", ["float32", "float64", "longdouble"])
@pytest.mark.parametrize("case", ["noise", "sorted", "equal terms", "outlier first", "scales"])
def test_accuracy(case, name, record_accuracy):
    rng = np.random.default_rng(len(case))
    x = rng.standard_normal((1500, 2)) + 1.0
    if case == "sorted":
        x = np.sort(x, axis=0)
    elif case == "equal terms":
        x = np.where(np.arange(1500)[:, None] % 2, 0.1, -0.3) + np.zeros(2)
    elif case == "outlier first":
        x[0] = 1e6
    elif case == "scales":
        x = x * np.array([1e-12, 1e12])
    x = x.astype(name)
    if name == "longdouble":  # 50-digit numbers are made from float64
        x = x.astype(np.float64).astype(name)
    m = estimate(x)
    assert m.mean.dtype == m.cov.dtype == x.dtype
    if name == "longdouble":
        m = Moments(m.count, m.mean.astype(np.float64), m.cov.astype(np.float64))
        worst = units(m, x.astype(np.float64))
        assert worst <= 1.0  # but for the last rounding to float64, right
        return
    worst = units(m, x)
    record_accuracy(f"moments.estimate, {case}", name, worst)
    assert worst <= CONTRACT


@pytest.mark.long("many blocks")
@pytest.mark.parametrize("case", ["equal terms", "many blocks"])
def test_error_does_not_grow_with_the_rows(case, monkeypatch):
    # Adding equal terms in turn has an error of thousands of eps, joining blocks in turn of tens.
    n = 2**19
    if case == "equal terms":
        x = np.where(np.arange(n)[:, None] % 2, np.float32(0.1), np.float32(-0.3))
    else:
        monkeypatch.setattr(scatter, "block_shape", lambda x: (8, 4))
        x = draw(np.random.default_rng(0), n, 1, dtype=np.float32) + np.float32(1.0)
        x[0] = 20.0
    m, y = estimate(x), x.astype(np.float64)  # float64 is exact enough here
    mean, sd = np.mean(y), np.std(y, ddof=1)
    spread = 1 + abs(y[0, 0] - mean) / sd
    eps = float(np.finfo(np.float32).eps)
    assert abs(m.cov[0, 0] - sd**2) <= CONTRACT * eps * sd**2  # stricter than the contract
    assert abs(m.mean[0] - mean) <= CONTRACT * eps * (abs(mean) + spread * sd)


@pytest.mark.parametrize(
    ("mean", "step", "digits_of_sd"),
    [(10000002.0, 1.0, 14.5), (1.2, 0.1, 14.0), (1000000.2, 0.1, 9.0), (10000000.2, 0.1, 8.0)],
)
def test_strd_numacc(mean, step, digits_of_sd):
    """NIST StRD NumAcc1 to 4: certified mean and standard deviation of the decimal data.

    What is lost beyond 15 digits is the rounding of the data to binary, not of the algorithm.
    """
    pairs = 1 if step == 1.0 else 500
    x = np.array([mean, *[mean - step, mean + step] * pairs])
    m = estimate(x[:, None])
    sd = math.sqrt(m.cov[0, 0])
    assert m.mean[0] == pytest.approx(mean, rel=1e-15)
    assert -math.log10(max(abs(sd - step) / step, 1e-15)) >= digits_of_sd
    assert units(m, x[:, None]) <= CONTRACT


def test_near_singular_covariance():
    x = draw(np.random.default_rng(0), 300, 1) * np.array([1.0, 1.0])
    x[:, 1] += 3e-5 * draw(np.random.default_rng(1), 300)
    m = estimate(x)
    assert units(m, x) <= CONTRACT
    _, cov = reference.formulas().mean_and_covariance(x)
    want = mp.eigsy(mp.matrix(cov.tolist()), eigvals_only=True)
    condition = float(max(want) / min(want))
    assert 1e9 < condition < 1e10
    assert moments.summary(m).condition == pytest.approx(condition, rel=1e-5)
    assert np.linalg.eigvalsh(m.cov)[0] > 0


def test_easy_case_equals_numpy(dtype):
    x = draw(np.random.default_rng(2), 50, 4, dtype=dtype)
    for ddof in (0, 1):
        m = estimate(x, ddof=ddof)
        assert (m.count, m.ddof) == (50, ddof)
        rtol = 20 * np.finfo(dtype).eps
        np.testing.assert_allclose(m.mean, x.mean(0), rtol=0, atol=rtol)
        np.testing.assert_allclose(m.cov, np.cov(x.T, ddof=ddof), rtol=0, atol=10 * rtol)


# --- chunks, blocks and merging ----------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 7, 64, 150, 1000])
@pytest.mark.parametrize("digits", [0, 9])
def test_block_size_does_not_matter(size, digits, monkeypatch):
    x = with_leading_digits(digits, np.float64)
    assert units(estimate_chunks(x[i : i + size] for i in range(0, len(x), size)), x) <= CONTRACT
    monkeypatch.setattr(scatter, "block_shape", lambda x: (size, 3))
    assert units(estimate(x), x) <= CONTRACT


@given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.sampled_from([0, 6, 13]), seeds)
def test_order_of_chunks_does_not_matter(lengths, digits, seed):
    rng = np.random.default_rng(seed)
    x = with_leading_digits(digits, np.float64, n=sum(lengths) + 2)
    chunks = np.split(x, np.cumsum(lengths))
    spread = 3 + math.sqrt(len(x))  # no row is further than sqrt(N - 1) deviations from the mean
    for _ in range(3):
        m = estimate_chunks(chunks)
        assert m.count == len(x)
        assert units(m, x, spread) <= CONTRACT
        chunks = [chunks[i] for i in rng.permutation(len(chunks))]


def test_chunks_may_share_a_buffer_and_are_taken_one_at_a_time():
    x = draw(np.random.default_rng(3), 2, 12, 3)
    buffer = np.empty((2, 4, 3))
    taken = []

    def read():
        for i in range(3):
            taken.append(i)
            buffer[...] = x[:, 4 * i : 4 * i + 4]
            yield buffer

    m, want = estimate_chunks(read()), estimate(x)
    assert taken == [0, 1, 2]
    np.testing.assert_allclose(m.mean, want.mean, rtol=1e-12)
    np.testing.assert_allclose(m.cov, want.cov, rtol=1e-12)


@given(st.tuples(*[st.integers(0, 9)] * 3), st.sampled_from([0, 1]), seeds)
def test_merge_is_associative_and_commutative(lengths, ddof, seed):
    rng = np.random.default_rng(seed)
    sets = [draw(rng, 2, n, 3) + 5.0 for n in lengths]
    a, b, c = (estimate(x, ddof=ddof) for x in sets)
    want = estimate(np.concatenate(sets, axis=-2), ddof=ddof)
    nothing = estimate(np.empty((2, 0, 3)), ddof=ddof)
    for got in (merge(merge(a, b), c), merge(a, merge(b, c)), merge(merge(c, a), b)):
        assert (got.count, got.ddof) == (want.count, ddof)
        np.testing.assert_allclose(got.mean, want.mean, rtol=1e-13)
        np.testing.assert_allclose(got.cov, want.cov, rtol=1e-12, atol=1e-12)
        np.testing.assert_array_equal(got.cov, np.swapaxes(got.cov, -1, -2))
    for got in (merge(a, nothing), merge(nothing, a)):
        assert got.count == a.count
        np.testing.assert_array_equal(got.mean, a.mean)
        np.testing.assert_allclose(got.cov, a.cov, rtol=1e-15)


def test_merge_with_many_equal_digits_loses_what_it_says():
    x = with_leading_digits(6, np.float64)
    halves = merge(estimate(x[:100]), estimate(x[100:]))
    mean, cov = reference.formulas().mean_and_covariance(x)
    offset = float(max(abs(m) / mp.sqrt(cov[i, i]) for i, m in enumerate(mean)))
    assert units(halves, x, 1 + offset) <= CONTRACT


# --- axes, few rows, special values ------------------------------------------------------------


@pytest.mark.parametrize(
    "axis", [0, 1, 2, -2, -3, -4, (0, -2), (-2, 0), (0, 1), (0, 1, 2), (1,), (np.int64(2), 1)]
)
def test_axes(axis, monkeypatch):
    x = draw(np.random.default_rng(4), 4, 3, 5, 2)
    axes = sorted(i % 4 for i in (axis if isinstance(axis, tuple) else (axis,)))
    moved = np.moveaxis(x, axes, range(-1 - len(axes), -1))
    rows = moved.reshape((*moved.shape[: 3 - len(axes)], -1, 2))
    want = estimate(rows)
    for budget in (1000, 3, 1):
        monkeypatch.setattr(scatter, "block_shape", lambda x, budget=budget: (budget, 20))
        m = estimate(x, axis=axis)
        assert m.count == rows.shape[-2]
        np.testing.assert_allclose(m.mean, want.mean, rtol=1e-13)
        np.testing.assert_allclose(m.cov, want.cov, rtol=1e-12, atol=1e-14)
        m = estimate_chunks(np.array_split(x, 2, axis=axes[0]), axis=axis)
        np.testing.assert_allclose(m.cov, want.cov, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("ddof", [0, 1])
def test_no_row_and_one_row(ddof):
    none = estimate(np.empty((2, 0, 3)), ddof=ddof)
    assert none.count == 0
    np.testing.assert_array_equal(none.mean, np.full((2, 3), np.nan))
    np.testing.assert_array_equal(none.cov, np.full((2, 3, 3), np.nan))
    row = draw(np.random.default_rng(5), 2, 1, 3)
    one = estimate(row, ddof=ddof)
    np.testing.assert_array_equal(one.mean, row[:, 0])
    np.testing.assert_array_equal(one.cov, np.full((2, 3, 3), 0.0 if ddof == 0 else np.nan))
    for m in (none, one):
        assert shrink(m).cov.shape == (2, 3, 3)
        assert not moments.summary(m).enough
        np.testing.assert_array_equal(shrinkage_intensity(m), np.zeros(2))
        np.testing.assert_array_equal(shrink(m).cov, m.cov)
    assert np.all(np.isnan(moments.summary(estimate(row)).eigenvalues))


@pytest.mark.parametrize("value", [0.1, 1e8 + 0.1, -1e300, 0.0])
def test_constant_rows(value, monkeypatch):
    x = np.full((37, 3), value)
    monkeypatch.setattr(scatter, "block_shape", lambda x: (5, 3))
    m = estimate(x)
    np.testing.assert_array_equal(m.mean, x[0])
    np.testing.assert_array_equal(m.cov, np.zeros((3, 3)))
    np.testing.assert_array_equal(merge(m, m).cov, np.zeros((3, 3)))
    np.testing.assert_array_equal(shrink(m).cov, np.zeros((3, 3)))
    assert shrinkage_intensity(m) == 1.0
    s = moments.summary(m)
    assert s.trace == 0
    assert np.isnan(s.condition)
    assert np.isnan(s.effective_rank)


def test_large_and_small_values(dtype):
    # The sum of the squares overflows, their mean does not.
    size = math.sqrt(float(np.finfo(dtype).max)) / 2
    x = (np.where(np.arange(4000) % 2, 1.0, -1.0) * size).astype(dtype)[:, None]
    np.testing.assert_allclose(estimate(x).cov / size / size, 4000 / 3999, rtol=1e-5)
    m = shrink(Moments(4, np.zeros(2, dtype), np.diag([3.0, 1.0]).astype(dtype) * dtype.type(size)))
    np.testing.assert_allclose(np.trace(m.cov), 4 * size, rtol=1e-5)
    tiny = dtype.type(np.finfo(dtype).smallest_normal * 1e4)
    m = Moments(100, np.zeros(2, dtype), np.diag([3.0, 1.0]).astype(dtype))
    np.testing.assert_allclose(
        shrinkage_intensity(m._replace(cov=m.cov * tiny)), shrinkage_intensity(m), rtol=1e-5
    )


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("row", [0, 3])
def test_nan_stays_in_its_head_and_feature(value, row):
    x = draw(np.random.default_rng(6), 3, 9, 4)
    clean = estimate(x)
    x[1, row, 2] = value
    with np.errstate(invalid="ignore"):  # inf - inf
        m = estimate(x)
    bad = np.zeros((3, 4), bool)
    bad[1, 2] = True
    both = bad[:, :, None] | bad[:, None, :]
    np.testing.assert_array_equal(np.isfinite(m.mean), ~bad)
    np.testing.assert_array_equal(np.isnan(m.cov), both)
    np.testing.assert_allclose(m.mean[~bad], clean.mean[~bad], rtol=1e-12)
    np.testing.assert_allclose(m.cov[~both], clean.cov[~both], rtol=1e-12)
    heads = [False, True, False]
    np.testing.assert_array_equal(np.isnan(shrinkage_intensity(m)), heads)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(np.isnan(moments.mean_plus_trace(m)), heads)
    s = moments.summary(m)
    for field in (s.eigenvalues[:, 0], s.condition, s.effective_rank, s.mean_norm, s.trace):
        np.testing.assert_array_equal(~np.isfinite(field), heads)


# --- every array library -----------------------------------------------------------------------


@pytest.mark.long("float32", "jax", "dask")
@pytest.mark.parametrize("axis", [-2, 0, (0, -2)])
def test_backends_agree(backend, dtype, axis):
    x, y = draw(np.random.default_rng(7), 2, 3, 6, 5, dtype=dtype) + dtype.type(3.0)
    atol = 100 * float(np.finfo(dtype).eps)

    def check(got, want):
        np.testing.assert_allclose(got.mean, want.mean, rtol=0, atol=atol)
        np.testing.assert_allclose(got.cov, want.cov, rtol=0, atol=atol)
        fused = 4 * np.finfo(dtype).eps if backend.name == "jax" else 0
        np.testing.assert_allclose(got.cov, np.swapaxes(got.cov, -1, -2), rtol=0, atol=fused)

    for ddof in (0, 1):
        got = backend.call(lambda x, **kw: arrays(estimate(x, **kw)), x, axis=axis, ddof=ddof)
        check(got, estimate(x, axis=axis, ddof=ddof))
    want = estimate_chunks([x, y], axis=axis)
    for join in (
        lambda x, y: estimate_chunks(iter([x, y]), axis=axis),
        lambda x, y: merge(estimate(x, axis=axis), estimate(y, axis=axis)),
    ):
        check(backend.call(lambda x, y, join=join: arrays(join(x, y)), x, y), want)
    empty = backend.call(lambda x: arrays(estimate(x)), np.empty((2, 0, 3), dtype))
    assert np.all(np.isnan(empty.mean))
    assert empty.cov.shape == (2, 3, 3)
    one = backend.call(lambda x: arrays(estimate(x[:1, ...])), x[0])
    assert np.all(np.isnan(one.cov))


@pytest.mark.long("jax")
def test_synthetic_rows(backend, dtype):
    """Rows are the mean and standard normal rows times a root of the covariance."""
    m = estimate(draw(np.random.default_rng(9), 2, 3, 5, dtype=dtype))  # singular
    m.cov[1, 0, 0] = np.nan
    x = moments.draw(Moments(3, backend.array(m.mean), backend.array(m.cov)), 40, rng=1)
    x = backend.check(x, dtype)
    z = np.random.default_rng(1).standard_normal((2, 40, 5))
    root = np.linalg.lstsq(z[0], x[0] - m.mean[0])[0]
    np.testing.assert_allclose(root.T @ root, m.cov[0], rtol=0, atol=50 * np.finfo(dtype).eps)
    np.testing.assert_allclose(m.mean[0] + z[0] @ root, x[0], atol=50 * np.finfo(dtype).eps)
    assert np.all(np.isnan(x[1]))


@pytest.mark.long("jax")
def test_backends_agree_on_what_follows(backend, dtype):
    m = estimate(draw(np.random.default_rng(8), 2, 5, 4, dtype=dtype))
    rtol = 100 * float(np.finfo(dtype).eps)
    for function in (shrinkage_intensity, moments.mean_only, moments.mean_plus_trace):
        got = backend.call(lambda a, b, f=function: f(Moments(5, a, b)), m.mean, m.cov)
        np.testing.assert_allclose(got, function(m), rtol=rtol)
    got = backend.call(lambda a, b: shrink(Moments(5, a, b)).cov, m.mean, m.cov)
    np.testing.assert_allclose(got, shrink(m).cov, rtol=rtol, atol=rtol)
    s = moments.summary(Moments(5, backend.array(m.mean), backend.array(m.cov)))
    for field, want in zip(s[3:], moments.summary(m)[3:], strict=True):
        assert isinstance(field, np.ndarray)
        assert field.dtype == np.float64
        np.testing.assert_allclose(field, want, rtol=1e-3)


# --- memory ------------------------------------------------------------------------------------


def test_memory_does_not_grow_with_a_file(tmp_path):
    peaks = []
    for megabytes in (16, 64):
        n = megabytes * 2**20 // (64 * 4)
        file = np.memmap(tmp_path / f"{megabytes}.bin", np.float32, "w+", shape=(n, 64))
        for i in range(0, n, 2**14):
            file[i : i + 2**14] = np.arange(2**14, dtype=np.float32)[:, None] % 7
        del file
        x = np.memmap(tmp_path / f"{megabytes}.bin", np.float32, "r", shape=(n, 64))
        tracemalloc.start()
        try:
            m = estimate(x)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
        assert type(m.mean) is type(m.cov) is np.ndarray
        np.testing.assert_allclose(m.cov, 4.0, rtol=1e-3)
    assert peaks[1] < 1e7
    assert peaks[1] < 1.1 * peaks[0]


def test_memory_does_not_grow_with_a_stream():
    chunk = 2**20
    tracemalloc.start()
    try:
        m = estimate_chunks(np.full((chunk // 512, 64), float(i)) for i in range(40))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert m.count == 40 * chunk // 512
    np.testing.assert_allclose(m.mean, 19.5, rtol=1e-14)
    assert peak < 8 * chunk


# --- shrinkage ---------------------------------------------------------------------------------


def test_covariance_given_with_fewer_than_two_rows_stays():
    for count in (0, 1):
        for cov in (np.eye(3) + 1.0, np.ones((1, 1))):
            m = Moments(count, np.zeros(len(cov)), cov)
            assert shrinkage_intensity(m) == 0.0
            np.testing.assert_array_equal(shrink(m).cov, cov)


@pytest.mark.parametrize(
    ("n", "d"), [(2, 1), (2, 2), (2, 3), (5, 3), (12, 4), (100, 2), (7, 1), (4, 12)]
)
@pytest.mark.parametrize("spread", [0.0, 2.0])
def test_intensity_against_mpmath(n, d, spread, dtype):
    sizes = np.arange(1, d + 1, dtype=dtype) ** dtype.type(spread)
    m = estimate(draw(np.random.default_rng([n, d]), n, d, dtype=dtype) * sizes)
    cov = reference.exact(m.cov)
    trace, squares = cov.trace(), (cov @ cov).trace()
    if d == 1:
        assert shrinkage_intensity(m) == 1.0
        return
    top = (1 - mp.mpf(2) / d) * squares + trace**2
    want = min(mp.mpf(1), top / ((n - 1 + 1 - mp.mpf(2) / d) * (squares - trace**2 / d)))
    assert want < 1 or spread == 0 or n < 5  # at 1 nothing would be seen
    np.testing.assert_allclose(shrinkage_intensity(m), float(want), rtol=50 * np.finfo(dtype).eps)
    other = m._replace(cov=m.cov * dtype.type((n - 1) / n), ddof=0)
    np.testing.assert_allclose(shrinkage_intensity(other), float(want), rtol=1e-5)
    shrunk = shrink(m)
    assert (shrunk.count, shrunk.ddof) == (n, 1)
    np.testing.assert_array_equal(shrunk.mean, m.mean)
    target = (1 - want) * cov + want * trace / d * np.eye(d, dtype=int)
    atol = 20 * float(np.finfo(dtype).eps * trace)
    np.testing.assert_allclose(shrunk.cov, target.astype(float), rtol=0, atol=atol)
    heads = m._replace(mean=np.stack([[m.mean] * 3] * 2), cov=np.stack([[m.cov] * 3] * 2))
    batch = shrinkage_intensity(heads)
    np.testing.assert_array_equal(batch, np.full((2, 3), shrinkage_intensity(m)))


@pytest.mark.parametrize("n", [2, 3, 10, 31])
def test_shrunk_covariance_of_few_rows_is_positive_definite(n, dtype):
    m = estimate(draw(np.random.default_rng(n), 4, n, 32, dtype=dtype))
    s, shrunk = moments.summary(m), moments.summary(shrink(m))
    assert not s.enough
    assert np.all(s.condition > 1e4)
    assert np.all(s.effective_rank < n)
    assert np.all(shrunk.eigenvalues[:, -1] > 1e-3 * s.trace / 32)
    np.testing.assert_allclose(shrunk.trace, s.trace, rtol=1e-5)


# --- what follows from moments -----------------------------------------------------------------


def test_summary():
    cov = np.stack([np.diag([1.0, 4.0, 0.0]), 2.0 * np.eye(3)])
    s = moments.summary(Moments(10, np.array([[1.0, 2.0, 2.0], [0.0, 0.0, 0.0]]), cov))
    assert (s.count, s.advised_count, s.enough) == (10, 9, True)
    np.testing.assert_allclose(s.eigenvalues, [[4.0, 1.0, 0.0], [2.0, 2.0, 2.0]])
    np.testing.assert_array_equal(s.condition, [np.inf, 1.0])
    entropy = -(0.8 * math.log(0.8) + 0.2 * math.log(0.2))
    np.testing.assert_allclose(s.effective_rank, [math.exp(entropy), 3.0])
    np.testing.assert_allclose(s.mean_norm, [3.0, 0.0])
    np.testing.assert_allclose(s.trace, [5.0, 6.0])
    assert moments.summary(Moments(9, np.ones(3), np.eye(3))).enough is False


def test_norm_approximations_disagree():
    x = draw(np.random.default_rng(9), 2, 50, 3) + 1.0
    m = estimate(x, ddof=0)
    squares = np.mean(np.sum(x**2, -1), -1)
    np.testing.assert_allclose(moments.mean_plus_trace(m), squares, rtol=1e-13)
    np.testing.assert_allclose(moments.mean_only(m), np.sum(m.mean**2, -1), rtol=1e-13)
    assert np.all(moments.mean_only(m) < 0.8 * squares)
