"""What units take from sums, against sums that are cut step by step."""

import numpy as np
import pytest

from refattn.judge.rounding import PROFILES, Profile, hardware
from refattn.judge.rounding.formats import FORMATS
from refattn.judge.rounding.hardware import SLACK, UNITS, CutSum, Unit
from refattn.judge.rounding.problems import pose_arrays
from refattn.judge.rounding.profiles import profile_of
from refattn.judge.rounding.softmax import analyse_softmax
from tests.judge.rounding.cutting import add_group, flash, product
from tests.judge.rounding.rounded import Case, gradient, ratio

HOPPER, EIGHT, HOPPER_32 = UNITS["hopper"]
PAIRS = [
    *((x, y) for x in ("volta", "ampere", "hopper") for y in ("float16", "bfloat16")),
    ("hopper", "float8_e4m3fn"),
    ("hopper-promoted", "float8_e4m3fn"),
]
VALUES = {
    "both signs": lambda rng, shape: rng.standard_normal(shape),
    "one sign": lambda rng, shape: rng.uniform(0.5, 1, shape),
    "mostly one": lambda rng, shape: 3 + rng.standard_normal(shape),
    "negative": lambda rng, shape: -rng.uniform(0.5, 1, shape),
}


def unit_of(name, dtype):
    return hardware.unit_for(name, FORMATS[dtype])


def numbers(n, m, dtype, values="one sign", columns=16, d=16, seed=0):
    rng, to = np.random.default_rng(seed), FORMATS[dtype]
    q, k = rng.standard_normal((n, d)), rng.standard_normal((m, d))
    return [to.round(x) for x in (q, k, VALUES[values](rng, (m, columns)))]


# --- the emulator, and the units ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("total", "terms", "aligned", "kept", "expected"),
    [
        (0.0, [1.0, 1 / 16], 3, 3, 1.0),  # below the last digit of the largest
        (0.0, [1.0, 3 / 16], 3, 3, 1 + 1 / 8),
        (0.0, [-1.0, -3 / 16], 3, 3, -1 - 1 / 8),  # towards zero, not down
        (8.0, [0.9, 0.9, 0.9], 3, 3, 8.0),  # each alone, although together they count
        (-8.0, [7.5], 3, 3, -1.0),  # before they cancel
        (1.75, [1.75], 3, 3, 3.5),
        (1.75, [1.75], 3, 1, 3.0),  # the sum is in the next binade
        (0.0, [1.0, 7 / 8], 3, 2, 1.75),
        (1.0, [16 * 2.0**-25], 25, 23, 1 + 2.0**-21),
        (1.0, [2.0**-25] * 15, 25, 23, 1 + 3 * 2.0**-23),  # 15 quarters of the last digit
        (1.0, [2.0**-25] * 8, 24, 23, 1.0),
        (1.0, [0.0], 25, 23, 1.0),
        (0.0, [0.0, 0.0], 25, 23, 0.0),
    ],
)
def test_a_group_by_hand(total, terms, aligned, kept, expected):
    assert add_group(np.array(total), np.array(terms), aligned, kept) == expected
    negative = add_group(np.array(-total), -np.array(terms), aligned, kept)
    assert negative == -expected


def test_sums_of_few_digits_are_exact():
    """Integers below 2^13 need no more than 13 binary digits after the leading one."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(-3, 4, (5, 200)) * 1.0, rng.integers(-3, 4, (200, 6)) * 1.0
    cuts = CutSum(EIGHT, 5, 6)
    cuts.add(x, y)
    for unit in (HOPPER, EIGHT, UNITS["ampere"][0]):
        np.testing.assert_array_equal(product(x, y, unit), x @ y)
    np.testing.assert_array_equal(cuts.shift, 0.0)
    np.testing.assert_array_equal(cuts.variance, 0.0)
    np.testing.assert_array_equal(cuts.total, x @ y)


UNITS_OF = {  # hardware and a type
    HOPPER: [("hopper", "float16"), ("blackwell", "bfloat16")],
    EIGHT: [("hopper", "float8_e4m3fn"), ("ada", "float8_e5m2")],
    HOPPER_32: [("hopper", "tfloat32"), ("hopper", "tfloat32-truncated")],
    None: [(None, "float16"), ("ieee", "float16"), ("hopper", "float64"), ("volta", "float32"),
        ("ampere", "float8_e4m3fn")],
}  # fmt: skip


def test_units_of_formats():
    assert (Unit(16, 25, 23), Unit(32, 13, 13), Unit(8, 25, 23)) == (HOPPER, EIGHT, HOPPER_32)
    assert all(unit_of(*x) == unit for unit, some in UNITS_OF.items() for x in some)
    assert unit_of("hopper", "float32").split
    assert hardware.name_units(HOPPER) == "Hopper or Blackwell"
    assert hardware.name_units(EIGHT) == "Hopper or Ada"
    assert hardware.name_units(EIGHT._replace(run=128)) == "Hopper promoted"
    assert hardware.name_units(UNITS["ada"][0]) == "Ampere or Turing or Ada"


def test_profiles_with_hardware():
    assert profile_of("flash@hopper") == PROFILES["flash"]._replace(accumulator="hopper")
    roundings = profile_of("flash@hopper").roundings("float8_e4m3fn")
    assert (roundings.unit, roundings.score_unit) == (EIGHT, EIGHT)
    roundings = profile_of("fp8-weights@hopper").roundings("bfloat16")
    assert (roundings.unit, roundings.score_unit) == (EIGHT, HOPPER)
    assert profile_of("math@hopper").roundings("bfloat16").unit is None
    assert profile_of("flash@ieee").roundings("bfloat16") == PROFILES["flash"].roundings("bfloat16")
    for wrong in ("flash@", "flash@tpu", Profile(accumulator="tpu")):
        with pytest.raises(ValueError, match="must name hardware of ieee, hopper"):
            profile_of(wrong)
    with pytest.raises(ValueError, match="a Profile or one of math"):
        profile_of("flush@hopper")


# --- the law --------------------------------------------------------------------------------------


def weights_and_values(dtype, values, m, rows=16, columns=24, sharp=1.0):
    rng, to = np.random.default_rng(m), FORMATS[dtype]
    scores = sharp * rng.standard_normal((rows, m))
    weights = to.round(np.exp(scores - scores.max(-1, keepdims=True)))
    return weights, to.round(VALUES[values](rng, (m, columns)))


def cut_in_runs(x, y, unit):
    size = unit.run or len(y)
    return sum(product(x[:, i : i + size], y[i : i + size], unit) for i in range(0, len(y), size))


def expected_cut(x, y, unit):
    found = CutSum(unit, len(x), y.shape[1])
    for at in range(0, len(y), 64):
        found.add(x[:, at : at + 64], y[at : at + 64])
    return found


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize(("name", "dtype"), PAIRS)
@pytest.mark.parametrize(
    "m", [512, *(pytest.param(m, marks=pytest.mark.long) for m in (2048, 8192, 32768))]
)
def test_expected_losses_are_those_of_sums_that_are_cut(m, name, dtype, values):
    """To half of the slack for values of one sign; and what is left has the variance.

    Of both signs losses are as random as signs: those of digits that are cut are left.
    """
    unit = unit_of(name, dtype)
    x, y = weights_and_values(dtype, values, m)
    exact = x @ y
    lost, found = cut_in_runs(x, y, unit) - exact, expected_cut(x, y, unit)
    rest = lost - found.shift
    assert np.mean(rest * rest) < 2 * np.mean(found.variance)
    if values == "both signs":
        assert np.sum(rest * rest) < np.sum(lost * lost)
    else:
        assert np.all(found.shift * np.sign(exact) <= 0)
        assert abs(np.sum(found.shift) / np.sum(lost) - 1) < SLACK / 2


@pytest.mark.parametrize("sharp", [3.0, pytest.param(9.0, marks=pytest.mark.long)])
@pytest.mark.parametrize(("name", "dtype"), [("hopper", "bfloat16"), ("ampere", "float16")])
def test_expected_losses_of_weights_of_many_sizes(name, dtype, sharp):
    unit = unit_of(name, dtype)
    x, y = weights_and_values(dtype, "one sign", 1024 if sharp < 9 else 8192, sharp=sharp)
    lost = cut_in_runs(x, y, unit) - x @ y
    assert abs(np.sum(expected_cut(x, y, unit).shift) / np.sum(lost) - 1) < SLACK


@pytest.mark.parametrize("values", ["one sign", "mostly one"])
def test_scales_of_8_bit_numbers_are_not_in_the_unit(values):
    """Values are numbers of 8 bits over a scale: what a unit loses is of the numbers."""
    to, (x, y) = FORMATS["float8_e4m3fn"], weights_and_values("float8_e4m3fn", values, 512)
    scale = 448 / 3.7
    lost = (product(x, y, EIGHT) - x @ y) / scale
    shift = expected_cut(x, y / scale, EIGHT).shift
    np.testing.assert_allclose(shift, expected_cut(x, y, EIGHT).shift / scale, rtol=1e-9)
    assert abs(np.sum(shift) / np.sum(lost) - 1) < SLACK / 2
    assert to.holds(y / scale / hardware.find_scale(y / scale)).all()
    assert hardware.find_scale(y / scale + 1e-6 * np.arange(24)) == 1.0
    assert hardware.find_scale(np.zeros((2, 2))) == 1.0


@pytest.mark.parametrize("name", ["volta", "ampere", "hopper", "eight", "promoted"])
def test_bound_of_losses(name):
    """At digits that lose most: all below the last digit of a unit."""
    units = {x: UNITS[x][0] for x in ("volta", "ampere", "hopper")}
    unit = (units | {"eight": EIGHT, "promoted": UNITS["hopper-promoted"][1]})[name]
    m = 20 * unit.group
    x, y = np.full((1, m), 1 - 2.0**-20), np.full((m, 1), (1 - 2.0**-20) * 2.0**-unit.aligned)
    y[:: unit.run or m] = 1.5
    lost, size = (x @ y - cut_in_runs(x, y, unit)).item(), (x @ y).item()
    assert 0.5 * unit.bound(m) / 2 < lost / size <= unit.bound(m)
    assert unit.bound(10**9) == (2.0 if unit.run is None else unit.bound(unit.run))
    assert hardware.cut_error(None, m) == 0.0


# --- results and gradients ------------------------------------------------------------------------


@pytest.mark.parametrize("tile", [64, 2**20])
@pytest.mark.long("causal", "mask")
@pytest.mark.parametrize("layout", ["plain", "causal", "mask", "sink"])
@pytest.mark.parametrize(
    ("name", "dtype"), [("hopper", "float8_e4m3fn"), ("volta", "float16"), ("ampere", "bfloat16")]
)
def test_shift_of_the_output_of_a_kernel(name, dtype, layout, tile):
    """Rows of few keys lose nothing; hidden keys have no part in a sum."""
    n, m = (256, 256) if layout == "causal" else (32, 512)
    q, k, v = numbers(n, m, dtype)
    options = {
        "plain": {},
        "causal": {"causal": True},
        "mask": {"mask": np.random.default_rng(1).random((n, m)) < 0.7},
        "sink": {"sinks": 1.5},
    }[layout]
    if layout == "sink":
        k, v = (np.concatenate([x, 0 * x[:1]]) for x in (k, v))
        options = {"bias": np.concatenate([np.zeros((n, m)), np.full((n, 1), 1.5)], -1)}
    case, profile = Case(q, k, v, **options), profile_of(f"flash@{name}")
    problem = pose_arrays(q, k, v, **options)
    rows = analyse_softmax(problem.head(()), profile.roundings(dtype), slice(0, n))
    unit = unit_of(name, dtype)
    cut, whole = (flash(case, dtype, x, tile=tile, out="float32") for x in (unit, None))
    lost = cut - whole
    assert abs(np.sum(rows.shift) / np.sum(lost) - 1) < SLACK * (1 if dtype != "bfloat16" else 2)
    assert ratio(cut - rows.out, rows.bound) <= 1
    plain = analyse_softmax(problem.head(()), PROFILES["flash"].roundings(dtype), slice(0, n))
    assert np.all(rows.bound > plain.bound)
    atol = 1e-12 * np.max(np.abs(rows.shift))  # slacks are sums, of which a difference is taken
    added = rows.slack - plain.slack
    np.testing.assert_allclose(added, SLACK * np.abs(rows.shift), rtol=1e-6, atol=atol)
    np.testing.assert_array_equal(rows.errors(cut), cut - rows.out - rows.shift)


@pytest.mark.parametrize("of", ["dq", "dk", "dv"])
@pytest.mark.parametrize(("name", "dtype"), [("volta", "float16"), ("hopper", "float8_e4m3fn")])
def test_shift_of_gradients(name, dtype, of):
    """What is left is less than half, also where terms have both signs."""
    unit, to = unit_of(name, dtype), FORMATS[dtype]
    n, m = (32, 512) if of == "dq" else (512, 32)
    q, k, v = numbers(n, m, dtype, "both signs")
    q, k = np.abs(q), np.abs(k)
    g = to.round(np.random.default_rng(1).uniform(0.5, 1, v[:1].shape) * np.ones((n, 1)))
    s = q @ k.T / 4
    p = np.exp(s - s.max(-1, keepdims=True))
    p = p / p.sum(-1, keepdims=True)
    t = g @ v.T
    ds = to.round(p * (t - np.sum(p * t, -1, keepdims=True)))
    x, y, scale = {"dq": (ds, k, 0.25), "dk": (ds.T, q, 0.25), "dv": (to.round(p).T, g, 1.0)}[of]
    lost = scale * (product(x, y, unit) - x @ y)
    roundings = profile_of(f"flash@{name}")._replace(out=None, delta="weights").roundings(dtype)
    rows = gradient(of, q, k, v, g, dtype, scale=0.25).analyse((), roundings, slice(0, len(x)))
    if of == "dv":  # terms of one sign
        assert abs(np.sum(rows.shift) / np.sum(lost) - 1) < SLACK
    assert np.sum(np.square(lost - rows.shift)) < 0.5 * np.sum(lost * lost)


def test_gradients_begin_again_after_parts():
    """With blocks of 32 queries no sum is longer than that."""
    q, k, v = numbers(512, 4, "float16")
    g = FORMATS["float16"].round(np.random.default_rng(1).uniform(0.5, 1, v[:1].shape))
    g = g * np.ones((512, 1))
    shifts = {}
    for name in ("flash-fast", "flash-32"):
        roundings = profile_of(f"{name}@volta").roundings("float16")
        problem = gradient("dv", q, k, v, g, "float16")
        shifts[name] = np.sum(problem.analyse((), roundings, slice(0, 4)).shift)
    assert shifts["flash-fast"] < 4 * shifts["flash-32"] < 0
