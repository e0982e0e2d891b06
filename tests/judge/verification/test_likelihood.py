"""Which profile is likeliest, and that a right one is surely less likely with a small chance."""

import math

import numpy as np
import pytest
from scipy import stats

from refattn.judge import verify
from refattn.judge.rounding import PROFILES
from refattn.judge.rounding.covariance import covariance, spared_variance
from refattn.judge.rounding.formats import FORMATS
from refattn.judge.rounding.problems import pose_arrays
from refattn.judge.verification.choice import (
    BACKWARD_PROFILES,
    FAMILIES,
    may_be_one,
    usual_profiles,
)
from refattn.judge.verification.findings import Numbers
from refattn.judge.verification.likelihood import compare
from tests.judge.rounding.rounded import BF16, dump, dump_gradients, interval, made, of_heads
from validation import level_numbers

NAMES = ("flash", "eager", "eager-narrow")


def arrays(seed, n=96, m=64, d=16, heads=2, size=2, dtype="bfloat16"):
    rng, to = np.random.default_rng(seed), FORMATS[dtype].round
    return tuple(to(size * rng.standard_normal((heads, x, d))) for x in (n, m, m))


def compared(given, names=NAMES, **options):
    """How likely profiles are."""
    problem, dtype = pose_arrays(*(given[x] for x in "qkv"), **options), given["dtype"]
    numbers = Numbers(given["out"].__getitem__, dtype)
    return compare(problem, numbers, dtype, {x: PROFILES[x] for x in names})


@pytest.mark.parametrize("name", NAMES)
def test_the_likeliest_profile_is_that_of_the_kernel(name):
    fits = compared(dump(name, *arrays(0), "bfloat16"))
    assert next(iter(fits)) == name
    assert fits[name].log_p == 0
    for other, fit in fits.items():  # the tighter are beyond their bounds, or fit worse
        assert other == name or fit.against > 0
    if name == "flash":
        assert max(fits["eager"].log_p, fits["eager-narrow"].log_p) < math.log(1e-3)


@pytest.mark.parametrize("draws", [8, pytest.param(200, marks=pytest.mark.long)])
def test_errors_of_a_profile_are_surely_less_likely_at_its_level(draws):
    """Gaussian errors of eager, whose columns are all the same: a false alarm has 1e-9 at most."""
    rng, names = np.random.default_rng(3), {x: PROFILES[x] for x in NAMES}
    q, k, v = (x[:1, :24, :4] for x in arrays(1))
    problem = pose_arrays(q, k, v)
    rows = problem.analyse((0,), PROFILES["eager"].roundings("bfloat16"), slice(0, 24))
    p = []
    for _ in range(draws):
        out = rows.out + rows.std * rng.standard_normal((24, 1))
        numbers = Numbers(out[None].__getitem__, "bfloat16")
        p.append(compare(problem, numbers, "bfloat16", names)["eager"].log_p)
    p = np.exp(p)
    for level in (0.05, 0.001):
        assert np.sum(p <= level) <= stats.binom.ppf(1 - 1e-9, draws, level)


@pytest.mark.parametrize(
    ("name", "dtype", "sizes", "rows", "units"),
    [
        ("flash", "bfloat16", (96, 128, 32, 2, 1), 1, 4),
        *(("eager", x, (96, 128, 32, 2, 1), 2, 4) for x in ("bfloat16", "float16")),
        pytest.param("flash", "bfloat16", (2048, 2048, 64, 8, 1), 16, 2, marks=pytest.mark.long),
    ],
)
@pytest.mark.usefixtures("verdict_alone")
def test_few_wrong_rows_do_not_hide_that_another_profile_is_likelier(
    name, dtype, sizes, rows, units
):
    """All other rows fit one profile: a looser one, with softmax in rounded steps, is no reason."""
    given, wrong = dump(name, *arrays(16, *sizes, dtype=dtype), dtype), np.s_[1, 40 : 40 + rows]
    assert verify(**given).profile == name
    to = FORMATS[dtype]
    given["out"][wrong] = to.round(given["out"][wrong] * (1 + units * to.unit))
    if rows < 16:
        assert verify(**given, profile="eager-narrow").verdict == "PASS"
    found = verify(**given)
    assert found.verdict == "FAIL"
    assert found.rows
    assert {x for x, _ in found.rows} <= {(1, 40 + x) for x in range(rows)}


@pytest.mark.long
def test_one_wrong_head_does_not_hide_that_another_profile_is_likelier():
    """The three others fit flash: of scores to 40, eager takes a scale that is off by 2^-7."""
    rng, scale = np.random.default_rng(11), 64**-0.5
    q, k, v = (BF16(rng.standard_normal((4, 96, 64))) for _ in range(3))
    given = dump("flash", BF16(10 * q), k, v, "bfloat16")
    wrong = dump("flash", BF16(10 * q), k, v, "bfloat16", scale=scale * 1.008)["out"]
    assert verify(**given).profile == "flash"
    given["out"][2] = wrong[2]
    assert verify(**given, profile="eager", explain=False).verdict == "PASS"
    found = verify(**given, explain=False)
    assert (found.verdict, {at[0] for at, _ in found.rows}) == ("FAIL", {2})
    given["out"][1] = wrong[1]
    assert ", heads 1, 2" in verify(**given, profile="flash").suspects[0].text


def test_a_sharper_profile_that_does_not_explain_the_others_is_no_evidence():
    """Float32 with an exponential between those of math and tf32; and an lse of a fast one."""
    q, k, v = (2 * x.astype(np.float32) for x in arrays(2))
    out, lse = of_heads("flash", q, k, v, "float32")
    off = 1 + 2.0**-20 * np.random.default_rng(4).standard_normal(out.shape)
    off[:, ::4] = 1 + 8 * (off[:, ::4] - 1)
    off = (off * out).astype(np.float32)
    found = verify(q=q, k=k, v=v, out=off, profile=("math", "tf32"))
    assert (found.verdict, found.profile) == ("PASS", "tf32")
    assert found.trials["math"] < found.alpha
    q, k, v = BF16(q / 16), BF16(k), BF16(v)
    out, lse = of_heads("math", q, k, v, "bfloat16")
    given = {"q": q, "k": k, "v": v, "out": out, "dtype": "bfloat16", "alpha": 0.05}
    assert verify(**given, lse=lse).profile == "math"
    found = verify(**given, lse=(lse + 2e-6).astype(np.float32), profile=("math", "flash"))
    assert (found.verdict, found.profile) == ("PASS", "flash")


def test_roundings_that_move_nothing_are_no_evidence():
    """Scores that are small integers are rounded in one row of eight: eager looks like flash."""
    rng = np.random.default_rng(5)
    q, k = (rng.integers(-2, 3, (2, x, 16)) * 1.0 for x in (256, 64))
    q[:, ::9] *= 37
    given = dump("eager", q, k, BF16(rng.standard_normal((2, 64, 16))), "bfloat16")
    assert compared(given, ("upcast", "eager"))["eager"].log_p > math.log(0.01)
    found = verify(**given)
    assert (found.profile, found.trials["flash"] < found.alpha) == ("eager", True)


def test_scores_that_the_type_holds_are_not_moved_in_any_column():
    """Small integers: some columns would show scores that move, and others weights that do."""
    draw = np.random.default_rng(15).integers
    q, k, v = (x * draw(-3, 4, (4, y, 64)) * 1.0 for x, y in ((3, 33), (1, 136), (1, 136)))
    fits = compared(dump("eager", q, k, v, "float16"), ("upcast", "eager"))
    assert fits["upcast"].explains
    assert fits["eager"].log_p > math.log(0.01)


@pytest.mark.usefixtures("verdict_alone")
def test_a_gradient_that_is_right_passes_beside_those_that_are_wrong():
    arrays = (BF16(np.random.default_rng(x).standard_normal((2, 64, 16))) for x in range(4))
    given = dump_gradients("flash", *arrays, "bfloat16")
    found = verify(**given | {x: BF16(0.5 * given[x]) for x in ("dk", "dv")})
    assert {x: y.verdict for x, y in found.parts.items()} == {
        "out": "PASS", "dq": "PASS", "dk": "FAIL", "dv": "FAIL"
    }  # fmt: skip
    assert found.parts["dq"].profile.startswith("flash")


def test_rounded_gradients_are_those_of_the_rows_that_are_looked_at():
    """Of more rows than are compared, by profiles of which one rounds what it is given."""
    q, k, v, g = np.random.default_rng(6).standard_normal((4, 8, 48, 8)).astype(np.float32)
    given = dump_gradients("recomputed", q, k[:2, :15], v[:2, :15], g, "float32")
    assert verify(**given).parts["dq"].profile == "recomputed"


def test_log_normalisers_of_which_nothing_is_known():
    """Scores beyond a thousand, of which narrow steps of a softmax leave nothing."""
    rng, half = np.random.default_rng(7), FORMATS["float16"].round
    q, k = 3.0 * rng.integers(-3, 4, (1, 9, 64)), 1.0 * rng.integers(-3, 4, (1, 512, 64))
    v = half(rng.standard_normal((1, 512, 8)))
    out, lse = of_heads("flash", q, k, v, "float16", scale=0.8662460069089962)
    given = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "scale": 0.8662460069089962}
    assert verify(**given, dtype="float16", profile="eager-narrow").verdict != "FAIL"


def test_evidence_is_that_of_profiles_that_explain_all_parts():
    """Gradients in keys that are rounded by query head: math explains dq alone."""
    q, k, v, g = (BF16(np.random.default_rng(x).standard_normal((4, 48, 16))) for x in range(4))
    found = verify(**dump_gradients("math", q, k[:2], v[:2], g, "bfloat16"))
    assert found.verdict == "PASS"
    assert found.parts["dk"].trials["math"] < found.alpha


def test_a_row_of_zeros_is_wrong_where_each_of_its_columns_may_be():
    """Scores near -450 of which bfloat16 has every other: eager allows each zero, not all."""
    q, k, v = (BF16(np.random.default_rng(x).standard_normal((1, 64, 64))) for x in range(3))
    k[..., 0], q[..., 0] = 60, 0
    q[0, 5, 0] = -60
    given = dump("flash", q, k, v, "bfloat16")
    right = verify(**given)
    assert (right.verdict, right.idle) == ("PASS", 0)
    given["out"][0, 5] = 0
    found = verify(**given)
    assert (found.verdict, [x for x, _ in found.rows]) == ("FAIL", [(0, 5)])


def test_weights_that_were_the_largest_so_far_are_not_rounded():
    """One key comes first with a large weight, a later one has a larger, and values of 0."""
    rng, to = np.random.default_rng(11), FORMATS["tfloat32"].round
    q = to(np.stack([rng.uniform(20, 30, 48), rng.uniform(2, 6, 48)], -1))[None]
    k, v = to(rng.standard_normal((1, 48, 2)) / 9), to(rng.standard_normal((1, 48, 8)))
    k[0, 3], k[0, 40], v[0, 40] = (1, 0), (1, 1), 0
    given = dump("tf32", q, k, v, "float32", scale=1.0)
    fits = compared(given, ("math", "tf32"), scale=1.0)
    assert fits["tf32"].against > 100  # errors are those of float32
    assert fits["tf32"].log_p == 0


@pytest.mark.parametrize("masked", [False, True])
def test_the_variance_of_weights_that_may_have_been_the_largest(masked):
    rng, roundings = np.random.default_rng(12), PROFILES["flash"].roundings("bfloat16")
    q, k, v = (rng.standard_normal((1, x, 3)) for x in (5, 70, 70))
    mask = rng.random((5, 70)) < (0.5 if masked else 2)
    problem = pose_arrays(q, k, v, mask=mask)
    head, i = problem.head((0,)), slice(0, 5)
    scores = np.where(mask, q[0] @ k[0].T / math.sqrt(3), -math.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    steps = np.where(weights < 1, roundings.weights.spacing(weights), 0) / weights.sum(-1)[:, None]
    expected = np.zeros((5, 3))
    for a in range(0, 70, 16):
        at = a + np.argmax(scores[:, a : a + 16], -1)
        expected += np.square(steps[np.arange(5), at, None] * v[0, at]) / 12
    found = spared_variance(head, roundings, i, problem.analyse((0,), roundings, i))
    every = np.where(np.isfinite(scores), steps, 0) ** 2 @ v[0] ** 2 / 12
    np.testing.assert_allclose(found, (expected, every), rtol=1e-12)


def test_profiles_that_one_kernel_may_have():
    """Every profile is in one family, and a file in one type is judged by those of two at most."""
    every = [x for family in FAMILIES for x in family]
    assert len(every) == len({*every})
    plain = {x for x in PROFILES if not x.endswith(("-cast", "-by-head"))}
    assert {*every} == plain
    for dtype in ("bfloat16", "float32", "float64"):
        names = {*usual_profiles(dtype), *BACKWARD_PROFILES[dtype == "bfloat16"]}
        assert len([x for x in FAMILIES if names & {*x}]) <= 2
    assert may_be_one("flash", "upcast")
    assert may_be_one("flash-cast@hopper", "flash-64-by-head")
    assert not may_be_one("flash", "eager-by-head")
    assert not may_be_one("math", "tf32@ampere")
    assert may_be_one(None, "eager")
    assert may_be_one("given", "given")


LONG = pytest.mark.long
PAIRS = [  # forward, backward, and whether one kernel may do both
    ("flash", "eager", False), ("flash", "upcast", True), ("math", "flash-32", True),
    ("math", "eager-narrow", False), ("upcast", "eager", False), ("eager", "upcast", False),
    ("eager", "eager-narrow", True), ("eager", "eager-upcast", True),
]  # fmt: skip


def of_kernels(forward, backward):
    """Inputs, the output of one kernel, and the gradients of another."""
    draw = np.random.default_rng(13).standard_normal
    arrays = [BF16(x * draw((2, 64, 32))) for x in (1.5, 1.5, 1, 1)]
    given, other = (dump_gradients(x, *arrays, "bfloat16") for x in (backward, forward))
    return given | {"out": other["out"]}


@pytest.mark.long("upcast", "32", "narrow")
@pytest.mark.parametrize("name", sorted({x for _, x, _ in PAIRS}))
def test_output_and_gradients_of_one_kernel_pass(name):
    assert verify(**of_kernels(name, name)).verdict == "PASS"


@pytest.mark.parametrize(
    ("forward", "backward", "right"),
    [PAIRS[0], *(pytest.param(*x, marks=pytest.mark.long) for x in PAIRS[1:])],
)
@pytest.mark.usefixtures("verdict_alone")
def test_output_and_gradients_are_of_one_kernel(forward, backward, right):
    found = verify(**of_kernels(forward, backward))
    assert found.verdict == ("PASS" if right else "FAIL"), str(found)
    assert right or "no kernel has both" in str(found)


@pytest.mark.parametrize("one", ["eager", "flash"])
def test_an_output_of_which_little_is_known_takes_the_family_of_the_gradients(one):
    """One key has nearly all of the weight: any profile explains the output."""
    draw = np.random.default_rng(14).standard_normal
    arrays = (BF16(x * draw((2, 24, 16))) for x in (4, 4, 1, 1))
    found = verify(**dump_gradients(one, *arrays, "bfloat16"))
    assert found.verdict != "FAIL", str(found)
    assert may_be_one(found.parts["out"].profile, found.parts["dq"].profile)


@pytest.mark.parametrize("name", ["eager", "eager-narrow", "upcast"])
def test_errors_of_known_digits_are_as_large_as_their_law_says(name):
    """Their mean square is 1 within 1e-9 of chance, so that much smaller ones are another's."""
    q, k, v = (BF16(np.random.default_rng(17 + x).standard_normal((2, 96, 32))) for x in range(3))
    numbers = Numbers(of_heads(name, q, k, v, "bfloat16")[0].__getitem__, "bfloat16")
    looks, names = {}, {x: PROFILES[x]._replace(out="bfloat16") for x in (name, "math")}
    compare(pose_arrays(q, k, v), numbers, "bfloat16", names, looks=looks)
    found, squares = looks[names[name]], []
    problem, roundings = pose_arrays(q, k, v), names[name].roundings("bfloat16")
    for h in range(2):
        i = slice(0, 96)
        rows = problem.analyse((h,), roundings, i)
        law = np.add(*covariance(problem.head((h,)), roundings, i, rows, np.eye(32), worst=False))
        error = rows.errors(numbers.out((h,)))[:, :, None]
        squares.append(np.swapaxes(error, 1, 2) @ np.linalg.solve(law, error) / 32)
    low, high = interval(len(found.squares))
    assert low < np.mean(squares) < high
    assert np.all((found.least > 0.25) & (found.least <= 1))
    assert np.median(found.least) > 0.9


def test_profiles_with_units_have_the_others_beside_them():
    """All rows but few are as in float32: products that are split in three lose more."""
    q, k, v = (np.random.default_rng(20 + x).standard_normal((2, 64, 32)) for x in range(3))
    q, k, v = (x.astype(np.float32) for x in (q, k, v))
    out = of_heads("math", q, k, v, "float32")[0].astype(np.float32)
    out[1, 20:28] += 24 * np.spacing(np.abs(out[1, 20:28]))
    alone = verify(q=q, k=k, v=v, out=out, profile="flash", hardware="hopper")
    assert alone.verdict == "PASS"
    found = verify(q=q, k=k, v=v, out=out, profile=("math", "flash"))
    assert found.trials["flash@hopper"] < found.alpha


def test_what_wrong_rows_say_is_no_more_than_what_a_right_row_says():
    """Of the likeliest profile: 10 wrong rows of 96 fit another, and all others this one."""
    given = dump("eager", *arrays(18, 96, 128, 32, 1, 1), "bfloat16")
    given["out"][0, :10] = BF16(given["out"][0, :10] * (1 + 2.0**-5))
    assert next(iter(compared(given))) == "eager"


@pytest.mark.parametrize("name", ["eager", "eager-upcast"])
def test_whether_a_backward_pass_has_weights_as_they_were_rounded_is_told(name):
    """Of values far from 0, of which D leaves little: the law of the other is far off."""
    to, draw = FORMATS["float16"].round, np.random.default_rng(0).standard_normal
    q, k, v, d_out = (to(draw((4, 33, 16))) for _ in range(4))
    given = dump_gradients(name, q, k, to(np.abs(v) + 5), d_out, "float16", causal=True)
    found = verify(**given, explain=False)
    assert (found.verdict, found.parts["dq"].profile) == ("PASS", name)


@pytest.mark.parametrize("name", ["eager", pytest.param("upcast", marks=pytest.mark.long)])
def test_gradients_of_equal_values_tell_no_profile(name):
    """Terms of dq and dk cancel, and so do their roundings: a tighter profile is no likelier."""
    q, k, v, d_out = (BF16(x) for x in np.random.default_rng(1).standard_normal((4, 2, 32, 16)))
    q, v = q / 4, np.repeat(BF16(v[:, :1] + 0.5), 32, 1)
    found = made(name, q, k, v, d_out, "bfloat16")
    given = {"q": q, "k": k, "v": v, "d_out": d_out, "dtype": "bfloat16", "explain": False}
    assert verify(**given, **found).verdict == "UNDERPOWERED"
    assert verify(**given, **found | {"dv": 1.02 * found["dv"]}).parts["dv"].verdict == "FAIL"


@pytest.mark.parametrize(
    "seed", [4002501, pytest.param(4003980, marks=LONG), pytest.param(3005521, marks=LONG), 5001593]
)
def test_rows_whose_terms_cancel_tell_no_profile(seed):
    """Where one weight is nearly 1, roundings in float32 are left; of two keys all are one."""
    words, given = level_numbers.draw_file(seed)
    assert words.startswith("eager")
    assert verify(**given, explain=False).verdict != "FAIL"


def test_columns_that_no_rounding_moves_say_nothing_of_weights():
    """Of normalised weights near 1 roundings to nearest leave little: the law must know that.

    In columns where these meet equal values errors of sums are all there is, as large as usual.
    """
    words, given = level_numbers.draw_file(2002909)
    assert "tf32-scaled-eager float32" in words
    assert verify(**given, explain=False).verdict == "PASS"


@pytest.mark.parametrize("seed", [0, *(pytest.param(x, marks=LONG) for x in (1, 2, 3))])
def test_roundings_of_two_keys_are_one(seed):
    """Derivatives to their scores have the sum 0: numbers that fit too well tell no profile."""
    to, draw = FORMATS["float16"].round, np.random.default_rng(seed).standard_normal
    q, k, v, d_out = (to(draw(x)) for x in ((2, 40, 32), (2, 1, 32), (2, 2, 32), (2, 40, 32)))
    k = to(k + 0.05 * draw((2, 2, 32)))
    given = dump_gradients("eager-upcast", q, k, v, d_out, "float16")
    assert verify(**given, explain=False).verdict != "FAIL"
