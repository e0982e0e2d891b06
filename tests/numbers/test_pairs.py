"""Pairs with bounds: every operation against exact fractions or 60 digits, with hard numbers."""

import math
import operator
from fractions import Fraction

import mpmath
import numpy as np
import pytest

from refattn.naive import terms
from refattn.numbers import pairs, products
from refattn.numbers.doubled import Pair
from refattn.numbers.paired import Truth
from refattn.numbers.pairs import to_pairs
from refattn.numbers.slices import sliced_error

XP = to_pairs(np.zeros(1)).space
MP = mpmath.mp.clone()
MP.dps = 60


@pytest.fixture(autouse=True)
def _as_in_formulas():
    with np.errstate(all="ignore"):
        yield


def hard(rng, n, low=-1070, high=1020):
    """Numbers of all sizes, with low parts, and exact ones anywhere within their errors."""
    size = 2.0 ** rng.uniform(low, high, n)
    hi = rng.choice([-1.0, 1.0], n) * size * rng.uniform(1, 2, n)
    hi[: n // 8] = np.round(hi[: n // 8] / size[: n // 8] * 4) * size[: n // 8]  # few bits
    lo = hi * rng.uniform(-1, 1, n) * 2.0**-53 * rng.choice([0.0, 1.0], n)
    error = size * 2.0 ** rng.uniform(-130, -3, n) * rng.choice([0.0, 1.0], n)
    x = to_pairs(Pair(hi, lo), error)
    ends = rng.choice([-1.0, 0.0, 1.0], n) * rng.choice([1.0, 0.9], n)
    return x, exact(x) + [Fraction(t) * Fraction(e) for t, e in zip(ends, x.e, strict=True)]


def exact(x):
    """The numbers hi + lo, as fractions."""
    both = zip(np.ravel(x.hi), np.ravel(x.lo), strict=True)
    return np.array([Fraction(h) + Fraction(z) for h, z in both], object)


def near(x, size, rng):
    """Numbers that nearly cancel with others, and their exact values."""
    hi = -x.hi * (1 + rng.choice([0.0, 2.0**-52, 2.0**-40, 2.0**-3], x.size))
    y = to_pairs(Pair(hi, hi * 2.0**-54), x.e * size)
    return y, exact(y)


def number(x):
    """A fraction with 60 digits."""
    return MP.mpf(x.numerator) / x.denominator if isinstance(x, Fraction) else x


def of_digits(function):
    return lambda *x: [function(*map(number, y)) for y in zip(*x, strict=True)]


def logaddexp(x, y):
    return MP.log(MP.exp(x) + MP.exp(y))


# The function of pairs, the exact one, and the exponents of its arguments.
OPERATIONS = {
    "add": (XP.add, lambda x, y: x + y, (-1070, 1020)),
    "cancelling": (XP.add, lambda x, y: x + y, (-1000, 1000)),
    "subtract": (XP.subtract, lambda x, y: x - y, (-1070, 1020)),
    "multiply": (XP.multiply, lambda x, y: x * y, (-1070, 1020)),
    "multiply, ordinary": (XP.multiply, lambda x, y: x * y, (-300, 300)),
    "divide": (XP.divide, lambda x, y: x / y, (-1070, 1020)),
    "divide, ordinary": (XP.divide, lambda x, y: x / y, (-300, 300)),
    "maximum": (XP.maximum, lambda x, y: np.maximum(x, y), (-1000, 1000)),
    "minimum": (XP.minimum, lambda x, y: np.minimum(x, y), (-3, 3)),
    "logaddexp": (XP.logaddexp, of_digits(logaddexp), (-20, 9)),
    "negative": (XP.negative, lambda x: -x, (-1070, 1020)),
    "abs": (XP.abs, lambda x: abs(x), (-1070, 1020)),
    "sqrt": (lambda x: XP.sqrt(XP.abs(x)), of_digits(lambda x: MP.sqrt(abs(x))), (-1070, 1020)),
    "power -1/4": (lambda x: abs(x) ** -0.25, of_digits(lambda x: abs(x) ** -0.25), (-900, 900)),
    "exp": (XP.exp, of_digits(MP.exp), (-60, 9.4)),
    "log": (lambda x: XP.log(XP.abs(x)), of_digits(lambda x: MP.log(abs(x))), (-990, 990)),
    "log near 1": (
        lambda x: XP.log(XP.add(x, 1.0)), of_digits(lambda x: MP.log(1 + x)), (-70, -3)
    ),
    "cos": (XP.cos, of_digits(MP.cos), (-60, 13)),
    "sin": (XP.sin, of_digits(MP.sin), (-60, 12)),
    "tanh": (XP.tanh, of_digits(MP.tanh), (-60, 9)),
}  # fmt: skip
TWO = {"add", "cancelling", "subtract", "maximum", "minimum", "logaddexp"} | {
    x for x in OPERATIONS if x.startswith(("multiply", "divide"))
}


def distances(name, seed=1, n=300):
    """Distance over bound, where there is one."""
    function, truth, (low, high) = OPERATIONS[name]
    rng = np.random.default_rng(seed)
    arguments = [hard(rng, n, low, high) for _ in range(1 + (name in TWO))]
    if name in ("cancelling", "maximum", "minimum"):
        arguments[1] = near(arguments[0][0], 0.0 if name == "cancelling" else 1.0, rng)
        if name != "cancelling":
            arguments[1] = XP.negative(arguments[1][0]), -arguments[1][1]
    found = function(*(x for x, _ in arguments))
    want = truth(*(x for _, x in arguments))
    ratios = []
    for h, z, e, y in zip(found.hi, found.lo, found.e, want, strict=True):
        if e < math.inf:
            off = abs(MP.mpf(h) + MP.mpf(z) - number(y))
            if isinstance(y, Fraction):
                off = number(abs(Fraction(h) + Fraction(z) - y))
            ratios.append(float(off / MP.mpf(e)) if e > 0 else (0.0 if off == 0 else math.inf))
    return np.array(ratios), found


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_are_within_their_bounds(name):
    ratios, _ = distances(name)
    assert ratios.max() <= 1 + 1e-9  # of arguments at the ends of their bounds
    assert ratios.max() > 0.5 or name.startswith("log")
    assert len(ratios) > 100


def one_operation(name, seed=2, n=500):
    """Distance over bound with operands without error, of ordinary size."""
    rng = np.random.default_rng(seed)
    x, y = (
        to_pairs(Pair(z, z * rng.uniform(-1, 1, n) * 2.0**-53))
        for z in rng.uniform(1, 2, (2, n)) * rng.choice([-1, 1], (2, n))
    )
    if name in ("sqrt", "log"):
        x = XP.abs(x)
    rule = {"add": operator.add, "multiply": operator.mul, "divide": operator.truediv}.get(name)
    found = getattr(XP, name)(*((x, y) if rule else (x,)))
    if rule:
        want = map(number, rule(exact(x), exact(y)))
    else:
        want = (getattr(MP, name)(number(z)) for z in exact(x))
    off = [abs(number(z) - w) for z, w in zip(exact(found), want, strict=True)]
    return max(float(o / MP.mpf(e)) for o, e in zip(off, found.e, strict=True)), found


CONSTANTS = {
    "add": ("U2", 2.0**-109),
    "multiply": ("U2", 2.0**-109),
    "divide": ("U2", 2.0**-109),
    "sqrt": ("U2", 2.0**-111),
    "exp": ("EXP_ROUNDING", 2.0**-73),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_wrong_constant_is_caught(name, monkeypatch):
    """Bounds of single operations are near their errors: a few times less, and they fail."""
    right, found = one_operation(name)
    assert right <= 1
    assert found.e.max() <= 2.0 ** (-66 if name == "exp" else -100) * np.abs(found.hi).max()
    monkeypatch.setattr(pairs, *CONSTANTS[name])
    assert one_operation(name)[0] > 1


def test_what_operands_are_off_by_is_caught(monkeypatch):
    """An error that is not handed on, in any argument."""
    for name, place in (("add", 1), ("multiply", 0), ("divide", 1)):
        x = [to_pairs(np.asarray([3.0])), to_pairs(np.asarray([2.0]))]
        x[place] = to_pairs(np.asarray([5.0]), np.asarray([0.5]))
        rule = {"add": operator.add, "multiply": operator.mul, "divide": operator.truediv}[name]
        found = getattr(XP, name)(*x)
        for end in (4.5, 5.5):
            values = [float(y.hi[0]) for y in x]
            values[place] = end
            assert abs(rule(*values) - found.hi[0]) <= found.e[0] * (1 + 1e-12)


def matrices(rng, spread):
    """Two matrices with errors, of rows and columns of different sizes, and exact products."""
    x, xs = hard(rng, 3 * 40, -spread, spread)
    y, ys = hard(rng, 40 * 2, -spread, spread)
    x, y = XP.reshape(x, (3, 40)), XP.reshape(y, (40, 2))
    return x, y, xs, xs.reshape(3, 40) @ ys.reshape(40, 2)


def within(found, want):
    known = np.ravel(found.e) < math.inf
    hi, lo, e = (np.ravel(x)[known] for x in (*found.pair, found.e))
    off = abs(exact(Pair(hi, lo)) - np.ravel(want)[known])
    return all(o <= Fraction(x) for o, x in zip(off, e, strict=True))


@pytest.mark.parametrize("spread", [1, 30, 400, 1000])
def test_products_of_matrices_are_within_their_bounds(spread):
    rng = np.random.default_rng(3)
    x, y, ends, want = matrices(rng, spread)
    assert within(XP.matmul(x, y), want)
    rows = x[..., None, :] * XP.matrix_transpose(y)[..., None, :, :]
    assert rows.of[0] == "products"
    assert within(XP.sum(rows, axis=-1), want)
    assert within(XP.sum(x, axis=-1), [sum(r) for r in ends.reshape(3, 40)])
    assert within(XP.sum(x, axis=0), ends.reshape(3, 40).sum(0))
    assert within(XP.mean(x, axis=1), ends.reshape(3, 40).sum(1) / 40)


def test_a_matrix_times_itself_has_the_errors_of_both():
    x = to_pairs(np.full((2, 3), 1e-3), np.full((2, 3), 1.0))
    assert (XP.matmul(x, XP.matrix_transpose(x)).e >= 3 * 1.001**2 - 3e-6).all()


def test_fewer_slices_are_caught(monkeypatch):
    """The bound of slices is not far above what they lose: 2^-90 of the terms."""
    rng = np.random.default_rng(4)
    x, y = (to_pairs(rng.standard_normal(s)) for s in ((20, 64), (64, 20)))
    found = XP.matmul(x, y)
    assert found.e.max() < 2.0**-75
    want = exact(x).reshape(20, 64) @ exact(y).reshape(64, 20)
    assert within(found, want)
    monkeypatch.setattr(products, "sliced_error", lambda *x: sliced_error(*x[:1], 23, 3))
    monkeypatch.setattr(products, "_LEVELS", 2)
    x, y = (to_pairs(z.hi) for z in (x, y))
    assert not within(XP.matmul(x, y), want)


def test_hidden_numbers_have_no_part_in_sums():
    rng = np.random.default_rng(5)
    weights, values = rng.random((4, 6)), rng.standard_normal((6, 3))
    seen, average = np.tril(np.ones((4, 6), bool)), terms.of_library(terms.weighted_sum)
    for bad in (1e5, 1e30, 1e305, math.nan, math.inf):
        values[3, 1], values[4:] = bad, bad
        found = average(to_pairs(weights), to_pairs(values), seen)
        clean = np.where(np.isfinite(values), values, 0.0)
        want = [
            exact(to_pairs(w * s)) @ exact(to_pairs(clean)).reshape(6, 3)
            for w, s in zip(weights, seen, strict=True)
        ]
        assert within(found, want)
        assert (found.e[:3] < 2.0**-60).all()
        assert np.isfinite(found.e[3, [0, 2]]).all() or bad == 1e305
        assert np.isinf(found.e[3, 1]) or math.isfinite(bad)


def test_the_largest_is_any_that_may_be():
    x = to_pairs(np.asarray([[1.0, 1.0 - 2.0**-10, 0.0]]), np.asarray([[0.0, 0.01, 0.5]]))
    found = XP.max(x, axis=-1)
    assert found.hi[0] == 1.0
    assert 0.01 - 2.0**-10 <= found.e[0] < 0.0091
    tie = to_pairs(Pair(np.asarray([1.0, 1.0]), np.asarray([-(2.0**-60), 2.0**-60])))
    largest = XP.max(tie, axis=0)
    assert largest.lo == 2.0**-60
    assert largest.e < 2.0**-100
    none = XP.max(to_pairs(np.asarray([-math.inf, -math.inf])), axis=-1)
    assert (none.hi, none.e) == (-math.inf, 0.0)


def test_comparisons_that_errors_leave_open_have_no_bound():
    x = to_pairs(np.asarray([1.0, 2.0, 3.0]), np.asarray([0.0, 0.5, 0.5]))
    over = x > 2.25
    assert isinstance(over, Truth)
    chosen = XP.where(over, x, 0.0)
    assert np.isinf(chosen.e).tolist() == [False, True, False]
    assert np.isinf(XP.where(~over & (x > 0.0), 1.0, 0.0).e).tolist() == [False, True, False]
    assert (XP.where(x > 0.0, x, 0.0).e == x.e).all()
    assert isinstance(to_pairs(np.asarray([math.nan])) > 0.0, Truth)
    low = to_pairs(Pair(np.asarray([1.0]), np.asarray([2.0**-60])))
    assert (low > 1.0).all()


@pytest.mark.parametrize("x", [0.0, -math.inf])
def test_what_is_exact_has_no_error(x):
    """Zeros and infinities, as hidden keys have them."""
    x = to_pairs(np.asarray([x]), np.zeros(1))
    for found in (XP.exp(x), XP.add(x, 1.0), XP.multiply(XP.exp(x), 0.0)):
        assert found.e[0] <= 2.0**-68
    hidden = XP.exp(to_pairs(np.asarray([-math.inf])))
    assert (hidden.hi, hidden.e) == (0.0, 0.0)
    assert XP.log(hidden).hi == -math.inf
    assert XP.log(hidden).e == 0
    assert np.isinf(XP.log(to_pairs(np.zeros(1), np.asarray([1e-300]))).e).all()


def test_overflow_has_no_bound():
    big = to_pairs(np.asarray([1e300]))
    for found in (big * big, big * 1e9 + big, XP.exp(big), XP.divide(big, 0.0), XP.log(-big)):
        assert np.isinf(found.e).all()


def test_functions_that_are_not_in_the_table_are_named():
    x = to_pairs(np.ones((2, 2)))
    for use, words in (
        (lambda: XP.sinh(x), "`sinh`"),
        (lambda: x**3, "a power of 3"),
        (lambda: x * np.ones(2), "an array of floats"),
        (lambda: XP.sum(x), "`sum` but along one axis"),
        (lambda: XP.full((2,), x[0, 0]), "`full`"),
    ):
        with pytest.raises(TypeError, match=words):
            use()


def test_exponentials_of_rows_are_computed_once():
    """e^(x - t) by e^(x - s): within the bounds, and errors of s and of t = s + r cancel."""
    rng = np.random.default_rng(6)
    x = to_pairs(rng.standard_normal((3, 40)), np.full((3, 40), 1e-25))
    s = XP.max(x, axis=-1, keepdims=True)
    first = XP.exp(x - s)
    total = XP.sum(first, axis=-1, keepdims=True)
    t = s + XP.log(total)
    second = XP.exp(x - t)
    assert second.of[0] == "scaled"
    direct = XP.exp(XP.add(x, XP.negative(to_pairs(Pair(*t.pair), t.e))))
    apart = abs((second.hi - direct.hi) + (second.lo - direct.lo))
    assert (apart <= second.e + direct.e).all()
    assert (XP.sum(second, axis=-1).e <= 2.0**-66 + 6e-25).all()


@pytest.mark.parametrize("rows", [slice(0, 1500), slice(1024, 2100), slice(7, 1100)])
def test_products_with_some_rows_are_cut_from_those_with_all(rows, monkeypatch):
    """To the bit, as factors of what is kept and of what is summed; what was made is not again."""
    rng = np.random.default_rng(7)
    q, every = rng.standard_normal((3, 8)), to_pairs(rng.standard_normal((2100, 8)))
    some, fresh = every.rows(rows), to_pairs(every.hi[rows])
    weights, average = (
        to_pairs(rng.random((3, len(fresh.hi)))),
        terms.of_library(terms.weighted_sum),
    )
    seen, turn = np.ones((1, len(fresh.hi)), bool), XP.matrix_transpose
    for x, y in (
        (XP.matmul(to_pairs(q), turn(some)), XP.matmul(to_pairs(q), turn(fresh))),
        (average(weights, some, seen), average(weights, fresh, seen)),
    ):
        np.testing.assert_array_equal(x.parts, y.parts)
    monkeypatch.setattr(products, "facing", lambda *_: pytest.fail("slices are made again"))
    XP.matmul(to_pairs(q), turn(every.rows(slice(3, 90))))


def test_bounds_that_underflow_are_not_0():
    """Of products of what may differ from 0, also where rows are balanced."""
    tiny, one = np.full((1, 2), 1e-300), np.ones((1, 2))
    zero = to_pairs(0 * one, tiny)
    assert (XP.multiply(zero, zero).e > 0).all()
    assert (XP.multiply(to_pairs(tiny), to_pairs(tiny)).e > 0).all()
    assert (XP.divide(zero, to_pairs(1e300 * one)).e > 0).all()
    assert (XP.matmul(zero, XP.matrix_transpose(to_pairs(tiny))).e > 0).all()
    average = terms.of_library(terms.weighted_sum)
    values = to_pairs(np.asarray([[1e-204], [1e-260]]))
    for weights in (zero, to_pairs(tiny)):
        assert (average(weights, values, np.ones((1, 2), bool)).e > 0).all()
    assert (average(to_pairs(0 * one), values, np.ones((1, 2), bool)).e == 0).all()
