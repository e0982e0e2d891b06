"""The law and the bound of rounding errors, against kernels that round step by step."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import refattn
from refattn import naive
from refattn.features import elu_features
from refattn.judge.rounding import PROFILES, Profile, predict, softmax
from refattn.judge.rounding.formats import FORMATS
from refattn.judge.rounding.head import certify_rows, scan_tile
from refattn.judge.rounding.problems import pose_arrays
from refattn.judge.rounding.roundings import WORST, walk
from refattn.judge.rounding.softmax import ErrorSums, analyse_softmax
from refattn.judge.rounding.weight_errors import cap_error
from refattn.judge.verification.directions import SCORE_CHANGES
from tests.judge.rounding import slow
from tests.judge.rounding.rounded import (
    ALARM,
    DTYPES,
    EXACT,
    SINKS,
    Case,
    Nearest,
    Noise,
    Steps,
    f32,
    flash,
    interval,
    linear,
    of_heads,
    online,
    positive_features,
    ratio,
    stepwise,
)


def numbers(shape, dtype, seed=0, heads=1, shared=1):
    n, m, d, d_v = shape
    rng, to = np.random.default_rng(seed), FORMATS[dtype]
    sizes = ((heads, n, d), (heads // shared, m, d), (heads // shared, m, d_v))
    return [to.round(rng.standard_normal(size)) for size in sizes]


def one_head(*args, **options):
    return [x[0] for x in numbers(*args, **options)]


def within(name, q, k, v, dtype, **options):
    """What is predicted of a kernel, whose errors are below their bounds."""
    with np.errstate(all="ignore"):
        out, _ = of_heads(name, q, k, v, dtype, **options)
    found = predict(q, k, v, dtype=dtype, profile=name, **options)
    assert ratio(out - found.out, found.bound) <= 1, (name, dtype)
    return found


def layouts(n, m, seed):
    rng = np.random.default_rng(seed)
    return {
        "plain": {},
        "mask": {"mask": rng.random((n, m)) < 0.7},
        "causal": {"causal": True},
        "bias": {"bias": FORMATS["bfloat16"].round(rng.standard_normal((n, m)))},
        "softcap": {"softcap": 3.0},
        "window": {"window": (5, 2)},
        "sink": {"sinks": FORMATS["bfloat16"].round(rng.normal(1, 2, ()))},
        "scale": {"scale": 0.3},
        "all": {
            "mask": rng.random((n, m)) < 0.8,
            "causal": True,
            "bias": FORMATS["bfloat16"].round(rng.standard_normal((n, m))),
            "softcap": 5.0,
            "window": (9, None),
            "sinks": FORMATS["bfloat16"].round(rng.normal(0, 3, ())),
        },
    }


@pytest.mark.parametrize("layout", layouts(1, 1, 0))
@pytest.mark.parametrize(("n", "m"), [(7, 90), (70, 9), (300, 33)])
def test_exact(layout, n, m):
    q, k, v = numbers((n, m, 5, 3), "bfloat16", heads=4, shared=2)
    options = layouts(n, m, 1)[layout]
    found = predict(q, k, v, dtype="bfloat16", **options)
    np.testing.assert_allclose(
        found.out, naive.softmax_attention(q, k, v, **options), rtol=1e-12, atol=1e-13
    )
    _, lse = refattn.attend(q, k, v, **{"scale": 5**-0.5} | options)
    np.testing.assert_allclose(found.lse, lse, rtol=1e-12, atol=1e-13)


def test_a_bias_of_minus_infinity_is_a_mask():
    q, k, v = numbers((20, 30, 4, 3), "bfloat16")
    mask = np.random.default_rng(0).random((20, 30)) < 0.5
    mask[3] = False
    bias, other = np.where(mask, np.linspace(-1, 1, 30), -np.inf), np.arange(30) % 4 > 0
    finite = np.where(mask, bias, 7.0)
    for some, said in (({}, mask), ({"mask": other}, mask & other)):
        both = predict(q, k, v, dtype="bfloat16", bias=bias, **some)
        one = predict(q, k, v, dtype="bfloat16", bias=finite, mask=said)
        for x, y in zip(both, one, strict=True):
            np.testing.assert_array_equal(x, y)


@given(st.lists(st.integers(-9, 9), min_size=1, max_size=6), st.integers(-9, 9))
def test_walk_is_the_mean_over_all_orders(terms, first):
    orders = list(itertools.permutations(terms))
    squares = np.square(first + np.cumsum(orders, -1)).sum(-1)
    total, square = first + sum(terms), sum(x * x for x in terms)
    found = walk(float(first), float(total), float(square), len(terms), 1)
    assert found == pytest.approx(float(squares.mean()), rel=1e-9, abs=1e-9)
    line, bridge = ((0.0, 2.0 * len(terms), 4.0 * len(terms)), (0.0, 0.0, 3.0))  # each in 4 lanes
    for one, share in ((line, 16), (bridge, 4)):  # sums are shared, or walks are shorter
        alone, four = (walk(*one, len(terms), lanes) for lanes in (1, 4))
        assert alone == pytest.approx(share * four)


STEEP = {"scale": SCORE_CHANGES["scale"]}
SLOW = ("math", "serial", "flash", "flash-fast", "upcast", "eager", "eager-narrow", "half-sums")
OF_SLOW = {
    "plain": {},
    "causal": {"causal": True, "scale": 0.5},
    "cap": {"softcap": 3.0},
    "cap of a power of two": {"softcap": 2.0, "scale": -0.3},
    "sink": {"sinks": np.asarray(0.75)},
    "all": {"bias": 1.0, "softcap": 3.0, "sinks": np.asarray(0.5), "window": (1, 1)},
    "tiny": {"of_values": 2.0**-130},
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("options", OF_SLOW)
@pytest.mark.parametrize("out", [None, "storage"])
@pytest.mark.parametrize("name", SLOW)
def test_variance_and_bound_term_by_term(name, out, options):
    q, k, v = one_head((3, 5, 3, 2), "bfloat16", seed=21)
    given = dict(OF_SLOW[options])
    v = v * given.pop("of_values", 1.0)
    if "bias" in given:
        given["bias"] = numbers((3, 5, 5, 1), "bfloat16", seed=22)[0][0]
    case = Case(q, k, v, **given)
    roundings = PROFILES[name]._replace(out=out).roundings("bfloat16")
    problem = pose_arrays(q, k, v, **case.options)
    rows = analyse_softmax(problem.head(()), roundings, slice(0, 3), STEEP)
    for i in range(3):
        for field, expected in vars(slow.row(case, roundings, i)).items():
            rtol = 3e-4 if "bound" in field else 1e-7  # (1 + x) x is taken for e^x - 1, as a bound
            atol = 1e-14 if field == "out" and options != "tiny" else 0.0
            np.testing.assert_allclose(getattr(rows, field)[i], expected, rtol, atol, err_msg=field)


@pytest.mark.parametrize("cap", [3.0, 0.005])
@pytest.mark.parametrize("name", ["math", "eager"])
def test_the_bound_of_the_slope_of_a_cap_term_by_term(name, cap):
    q, k, v = one_head((3, 5, 3, 2), "bfloat16", seed=21)
    case = Case(q, k, v, softcap=cap)
    roundings = PROFILES[name].roundings("bfloat16")
    every = np.s_[0:3]
    head = pose_arrays(q, k, v, **case.options).head(())
    tile = scan_tile(head, every, slice(0, 5))
    found = cap_error(head, roundings, tile, every, np.zeros((3, 5)))
    for i, j in np.ndindex(3, 5):
        key = slow.key_of(case, roundings, i, j)
        assert found[i, j] == pytest.approx(slow.slope_bound(case, roundings, key))


def test_weights_of_the_size_of_the_smallest_numbers_term_by_term():
    """Of 8 bits, below 4 spacings of the subnormal numbers: what they lose may be common to all."""
    q, k, v = one_head((4, 6, 3, 2), "bfloat16", seed=24)
    case, roundings = Case(3 * q, k, v), PROFILES["fp8-weights"].roundings("bfloat16")
    rows = analyse_softmax(pose_arrays(*case[:3]).head(()), roundings, slice(0, 4), STEEP)
    for i in range(4):
        found = slow.row(case, roundings, i)
        assert rows.bound[i] == pytest.approx(found.bound, rel=1e-4)
        assert rows.slack[i] == pytest.approx(found.slack)
        known = np.isfinite(rows.std[i])
        assert rows.worst[i][known] == pytest.approx(np.array(found.worst)[known])


def test_results_in_pairs_of_some_queries():
    q, k, v = one_head((9, 12, 3, 2), "bfloat16", seed=26)
    options = {x: y for x, y in layouts(9, 12, 2)["all"].items() if x != "sinks"}
    head = pose_arrays(q, k, v, **options).head(())
    whole, some = (certify_rows(head, slice(*x))[:2] for x in ((0, 9), (3, 7)))
    for x, y in zip(some, whole, strict=True):
        np.testing.assert_allclose(x.hi, y.hi[3:7], rtol=1e-15)


@pytest.mark.parametrize(("queries", "known"), [(16, True), (17, False)])
def test_roundings_are_tied_where_more_than_16_queries_have_the_same(queries, known):
    """Sums over rows of errors are as much larger as there are equal rows."""
    q, k, v = one_head((1, 9, 4, 2), "bfloat16", seed=23)
    found = predict(np.repeat(q, queries, 0), k, v, dtype="bfloat16", profile="flash")
    assert (np.isfinite(found.std) == known).all()


@pytest.mark.parametrize(("gap", "known"), [(3.97, False), (4.03, True)])
def test_weights_within_4_units_of_the_largest_are_tied(gap, known):
    q, k, v = np.ones((1, 1)), np.array([[0.0], [-gap * 2.0**-8]]), np.array([[1.0], [-1.0]])
    roundings = PROFILES["flash"]._replace(out=None).roundings("bfloat16")
    rows = analyse_softmax(pose_arrays(q, k, v, scale=1.0).head(()), roundings, slice(0, 1))
    assert np.isfinite(rows.std).all() == known


def test_errors_beyond_5_standard_deviations_have_no_law(monkeypatch):
    """160 keys with nearly two weights, of which all are rounded alike; none of them are equal."""
    rng = np.random.default_rng(25)
    roundings = PROFILES["flash"]._replace(out=None).roundings("bfloat16")
    k = np.array([[0.0]] + [[-1.0]] * 80 + [[-1.7]] * 80) - 1e-12 * np.arange(161.0)[:, None]
    problem = pose_arrays(rng.uniform(0.5, 1, (15, 1)), k, np.sign(k + 0.5), scale=1.0)
    found = analyse_softmax(problem.head(()), roundings, slice(0, 15))
    monkeypatch.setattr(softmax, "SURE", math.inf)
    every = analyse_softmax(problem.head(()), roundings, slice(0, 15))
    far = np.abs(every.nearest - every.out) > 5 * every.std
    assert 2 < far.sum() < 13
    np.testing.assert_array_equal(np.isinf(found.std), far)


@pytest.mark.parametrize("kind", ["noise", "nearest"])
def test_sums(kind):
    """Leading digits of sums are not known: between those that are least and most favourable."""
    to, rng = FORMATS["float16"], np.random.default_rng(8)
    profile = Profile(**EXACT | {"accumulate": "float16"})
    q, k, v = one_head((1500, 40, 12, 2), "bfloat16", seed=9)
    out = stepwise(
        Case(q, k, v, 0.3), Steps(sums=Noise(to, rng) if kind == "noise" else Nearest(to))
    )
    found = predict(q, k, v, dtype="bfloat16", profile=profile, scale=0.3)
    mean = np.mean(np.square((out - found.out) / found.std))
    lower, upper = interval(len(q))
    assert lower * WORST**2 / 4 < mean < upper * WORST**2


@pytest.mark.parametrize(
    ("dtype", "profile", "sinks", "mean", "off"),
    [
        ("bfloat16", "flash", SINKS, 0.0, 1.0),
        ("float16", "flash", SINKS, 0.0, 1.0),
        ("float32", "math", np.full(4, 30.0), 4.0, WORST**2),  # e^30 is not of a gap
    ],
)
def test_a_sink_need_not_be_in_the_maximum(dtype, profile, sinks, mean, off):
    """The largest weight is 1 then, and is not rounded: the law is for those that round it."""
    q, k, v = numbers((250, 100, 32, 8), dtype, seed=17, heads=4)
    v = FORMATS[dtype].round(v + mean)
    cases = [Case(*x, sinks=float(s)) for *x, s in zip(q, k, v, sinks, strict=True)]
    out = np.stack([flash(x, dtype, sink_first=False)[0] for x in cases])
    found = predict(q, k, v, dtype=dtype, profile=profile, sinks=sinks)
    z = (out - found.out) / found.std
    assert np.mean(z * z) < interval(1000)[1] * off
    assert ratio(out - found.out, found.bound) <= 1


def test_a_sink_of_minus_infinity_is_none():
    q, k, v = numbers((30, 40, 8, 3), "bfloat16", seed=18, heads=4)
    with_sinks = predict(q, k, v, dtype="bfloat16", sinks=np.full(4, -np.inf))
    for x, y in zip(with_sinks, predict(q, k, v, dtype="bfloat16"), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("sink", [None, 2.0])
def test_a_query_that_sees_a_sink_or_nothing(sink):
    q, k, v = numbers((6, 5, 3, 2), "bfloat16")
    mask = np.broadcast_to(np.arange(6)[:, None] > 2, (6, 5))
    sinks = None if sink is None else np.asarray(sink)
    found = predict(q, k, v, dtype="bfloat16", mask=mask, sinks=sinks)
    assert (found.out[:, :3] == 0).all()
    assert (found.lse[:, :3] == (-np.inf if sink is None else sink)).all()
    assert (found.bound[:, :3] < 1e-30).all()


def check_bound(name, dtype, seed):
    """Elements that were compared with their bound, of random shapes, layouts and sizes."""
    rng = np.random.default_rng(seed)
    n, m = (int(x) for x in np.exp(rng.uniform(0, math.log(130), 2)))
    d, d_v = (int(x) for x in np.exp(rng.uniform(0, math.log(65), 2)))
    if name.startswith("half-sums"):
        n, m, d, d_v = min(n, 40), min(m, 40), min(d, 24), min(d_v, 16)
    q, k, v = numbers((n, m, d, d_v), dtype, seed, heads=2, shared=int(rng.integers(1, 3)))
    to, sizes = FORMATS[dtype], np.exp(rng.normal(0, [1.5, 1, 4]))
    q, k, v = (to.round(np.clip(x * y, -9e3, 9e3)) for x, y in zip((q, k, v), sizes, strict=True))
    of_layouts = list(layouts(n, m, seed).values())
    return within(name, q, k, v, dtype, **of_layouts[seed % len(of_layouts)]).out.size


@pytest.mark.long("eager", "weights", "serial", "math", "flash")
@pytest.mark.parametrize("seeds", [24, pytest.param(200, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", DTYPES)
def test_bound(name, seeds):
    for dtype in DTYPES[name]:
        first = 0 if seeds == 24 else 1000
        assert sum(check_bound(name, dtype, first + x) for x in range(seeds)) > 160 * seeds


@pytest.mark.long("True")
@pytest.mark.parametrize("normalised", [False, True])
def test_two_keys_with_every_weight_of_a_binade(normalised):
    """Rounding to nearest of every gap near which a weight of 8 digits lies: the bound is exact."""
    to = FORMATS["bfloat16"]
    weights = np.concatenate([0.5 + (np.arange(128) + f) / 256 for f in (0, 0.25, 0.5, 0.75)])
    gaps = np.log(weights)
    worst = 0.0
    for x in gaps[:: 1 if normalised else 4]:
        q, k = np.array([[1.0]]), np.array([[0.0], [to.round(x)]])
        v = np.array([[1.0, 0.0], [-1.0, 1.0]])
        profile = Profile(weights="storage", normalised=normalised, **EXACT)
        found = predict(q, k, v, dtype="bfloat16", profile=profile, scale=1.0)
        out = stepwise(Case(q, k, v, 1.0), Steps(weights=Nearest(to), normalised=normalised))
        worst = max(worst, ratio(out - found.out, found.bound))
    assert 0.25 < worst <= 1


def extremes():
    rng = np.random.default_rng(11)
    q, k, v = numbers((30, 40, 8, 4), "bfloat16", seed=12, heads=2)
    to = FORMATS["bfloat16"].round
    return {
        "one key": (q, k[:, :1], v[:, :1]),
        "equal keys": (q, np.repeat(k[:, :1], 40, 1), v),
        "equal queries": (np.repeat(q[:, :1], 30, 1), k, v),
        "weight of 1": (to(q * 100), k, v),
        "huge": (to(q * 2.0**40), to(k * 2.0**40), to(v * 2.0**60)),
        "tiny": (to(q * 2.0**-40), k, to(v * 2.0**-60)),
        "subnormal": (q, k, to(v * 2.0**-130)),
        "zeros": (q, k, 0 * v),
        "no queries": (0 * q, k, v),
        "sizes": (q, k, to(v * np.array([1e-20, 1e20])[:, None, None])),
        "few": (q, k[:, rng.integers(0, 3, 40)], v),
    }


@pytest.mark.sweep(8)
@pytest.mark.parametrize("name", [x for x in DTYPES if x not in ("fp8", "fp8-eager")])
@pytest.mark.parametrize("case", extremes())
def test_extremes(name, case):
    dtype, arrays = DTYPES[name][0], extremes()[case]
    with np.errstate(all="ignore"):
        q, k, v = (FORMATS[dtype].round(x) for x in arrays)
    if not all(np.isfinite(x).all() for x in (q, k, v)):
        pytest.skip("there are no such numbers in float16")
    found = within(name, q, k, v, dtype)
    assert (found.std > 0).all()
    if case in ("one key", "zeros"):
        np.testing.assert_array_equal(found.out, np.broadcast_to(v[:, :1], found.out.shape))


@pytest.mark.parametrize("of_queries", [1.0, 3e3])
@pytest.mark.parametrize("size", [1e-7, 1e-6, 1e-3, 1e3, 3e4])
@pytest.mark.parametrize("name", ["math", "flash", "eager", "half-sums"])
def test_float16_at_its_ends(name, size, of_queries):
    q, k, v = numbers((30, 60, 8, 4), "float16", seed=13)
    q, v = (FORMATS["float16"].round(x) for x in (of_queries * q, np.clip(v * size, -65504, 65504)))
    within(name, q, k, v, "float16")


def test_scores_that_overflow_have_no_bound():
    q, k, v = (np.full((1, 2, 1), x) for x in (300.0, 300.0, 1.0))
    assert np.isinf(predict(q, k, v, dtype="float16", profile="eager").bound).all()
    assert np.isfinite(predict(q, k, v, dtype="float16", profile="flash").bound).all()


def test_the_least_bias_is_no_overflow():
    q, k, v = numbers((20, 30, 4, 3), "bfloat16")
    bias = np.where(np.tri(20, 30, 10) == 0, -FORMATS["bfloat16"].largest, 0.0)
    for name in ("flash", "eager", "eager-narrow"):
        found = within(name, q, k, v, "bfloat16", bias=bias)
        assert np.isfinite(found.std).mean() > 0.9
        assert np.max(found.bound) < 1


MAPS = {"elu": elu_features, "relu": lambda x: np.maximum(x, 0), "rfa": None}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", MAPS)
def test_linear(kind, causal, dtype):
    narrow, squares, rng = dtype != "float32", [], np.random.default_rng(14)
    mask = None if causal else (rng.random(50) < 0.8)[None]
    for seed in range(20):
        q, k, v = one_head((20, 50, 8, 4), dtype, seed)
        case, options = Case(q, k, v, mask=mask, causal=causal), {"feature_map": MAPS[kind]}
        if kind == "rfa":
            drawn = rng.standard_normal((32, 8)), rng.standard_normal(32) / 4
            omega, weight = (x.astype(f32).astype(float) for x in drawn)
            out = positive_features(case, omega, weight, dtype, narrow)
            options = {"omega": omega, "log_weight": weight}
        else:
            out = linear(case, MAPS[kind], dtype, narrow)
        profile = "flash" if narrow else "math"
        found = predict(q, k, v, dtype=dtype, profile=profile, mask=mask, causal=causal, **options)
        assert ratio(out - found.out, found.bound) <= 1
        z = ((out - found.out) / found.std)[np.isfinite(found.std)]
        squares.append(np.mean(z * z))
    assert np.mean(squares) < interval(20)[1] * WORST**2  # rows of a head share errors


def test_runs_are_added_to_the_sum_of_those_before():
    """Each addition is rounded relative to what it gives: 2, then 2 + 3."""
    law = ErrorSums(1, 1, 9, PROFILES["flash"].roundings("bfloat16"))
    for run in (2.0, 3.0):
        law.run = np.array([[run, 0.0]])
        law.close()
    assert law.runs.tolist() == [[5.0, 0.0]]
    assert law.running.tolist() == [[2.0**2 + 5.0**2, 0.0]]


@pytest.mark.parametrize("size", [0.3, 1.0, 3.0, 8.0])
@pytest.mark.parametrize("mean", [0.0, 2.0])
def test_sums_of_weights_that_are_added_in_turn_move_whole_rows(mean, size):
    """The error along the output, of rows that are independent, has the variance that is claimed.

    Without the sum of the weights the mean square is 1.9 and more for values with a mean.
    """
    q, k, v = one_head((300, 1024, 16, 4), "float32", seed=27)
    case = Case(size * q, k, v + mean)
    out, _ = online(case, "float32")
    rows = pose_arrays(*case[:3]).analyse((), PROFILES["serial"].roundings("float32"), np.s_[0:300])
    z = (out - rows.out) / rows.std
    lower, upper = interval(300)
    assert lower / 2 < np.mean(z * z) < upper  # values with a mean and a large weight: half
    # What is too small to be added is allowed for: without that the mean of all rows has it.
    moved = np.sign(out - rows.out) * np.maximum(np.abs(out - rows.out) - rows.slack, 0) / rows.std
    assert abs(np.mean(moved)) < math.sqrt(2 * math.log(2 / ALARM) / 300)


def test_a_sum_moves_by_what_is_added_at_most():
    """One key has nearly all the weight, the others less than half of the last digit of the sum."""
    m = 500
    k = np.concatenate([[[0.0]], -20 + np.linspace(0, 1e-6, m)[:, None]])  # of which none are equal
    problem = pose_arrays(np.ones((1, 1)), k, np.ones((m + 1, 1)), scale=1.0)
    rows = problem.analyse((), PROFILES["serial"].roundings("float32"), np.s_[0:1])
    tiny = math.exp(-20.0)
    assert rows.normaliser < 70 * 2.0**-48  # of the first tile; all of them would have 500
    assert rows.lse_slack == pytest.approx(2.0**-24 + m * tiny, rel=0.01)  # of e^0, and all of them


def test_exponentials_of_0_are_no_noise_where_all_keys_are_equal():
    """All of them have the same error: it is slack, times the values; others have a sixteenth."""
    v = np.random.default_rng(6).standard_normal((300, 3))
    head = pose_arrays(np.zeros((5, 4)), np.zeros((300, 4)), v).head(())
    found = analyse_softmax(head, PROFILES["math"].roundings("float32"), slice(0, 5))
    sizes = np.mean(np.abs(v), 0) + np.abs(np.mean(v, 0))
    np.testing.assert_allclose(found.slack[0], 2.0**-24 * (17 / 16) * sizes, rtol=1e-12)


def test_a_weight_that_is_rounded_to_0_is_off_by_itself():
    """Of e^-600 the spacing of float16 is 1e252 times it, whose square overflows."""
    q, v = np.ones((1, 1)), np.ones((3, 1))
    found = []
    for last in (-600.0, -1.0):
        problem = pose_arrays(q, np.array([[0.0], [-1.0], [last]]), v)
        roundings = PROFILES["eager-narrow"].roundings("float16")
        found.append(analyse_softmax(problem.head(()), roundings, slice(0, 1)).lse_std[0])
    assert 0 < found[0] < found[1]
