"""Verdicts on gradients: right backward passes pass, wrong ones do not, and bounds hold."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from refattn import verify
from refattn.judge.conformance.truth import digits
from refattn.judge.rounding import PROFILES, problems, saved
from refattn.judge.rounding.backward import (
    _close_sum,
    _GradientSum,
    analyse_gradient,
    analyse_gradients,
)
from refattn.judge.rounding.covariance import gradient_covariance, variance_along
from refattn.judge.rounding.formats import FORMATS
from refattn.judge.rounding.head import attend_rows
from refattn.judge.rounding.roundings import WORST
from refattn.judge.rounding.saved import BackwardHead, multiply_values, save_queries
from refattn.judge.rounding.score_gradients import _ScoreGradient, analyse_pairs
from refattn.judge.rounding.shares import OFF
from refattn.judge.rounding.softmax import analyse_softmax
from refattn.judge.verification.choice import BACKWARD_PROFILES, is_narrow
from tests.judge.rounding import slow
from tests.judge.rounding.rounded import (
    BACKWARD,
    DTYPES,
    SINKS,
    Case,
    Noise,
    Wrong,
    dump_gradients,
    flash,
    gradient,
    interval,
    made,
    results,
)  # fmt: skip

NAMES = ("dq", "dk", "dv")


def numbers(rng, dtype, *shape, size=1.0):
    return FORMATS[dtype].round(size * rng.standard_normal(shape))


def arrays(seed, dtype, heads, n, m, d, d_v=None, *, shared=1):
    """Queries, keys, values and derivatives to the output."""
    rng, d_v = np.random.default_rng(seed), d if d_v is None else d_v
    q, k = (numbers(rng, dtype, x, y, d, size=1.5) for x, y in ((heads, n), (heads // shared, m)))
    return [q, k, numbers(rng, dtype, heads // shared, m, d_v), numbers(rng, dtype, heads, n, d_v)]


def one_head(seed, dtype, *sizes):
    return [x[0] for x in arrays(seed, dtype, 1, *sizes)]


def of_digits(rng):
    cap, sinks = {"softcap": 1.5}, {"sinks": np.asarray(-0.4)}
    bias = {"bias": numbers(rng, "float32", 4, 3)}
    return {
        "plain": {},
        "causal": {"causal": True},  # the first query sees no key
        "window": {"window": (1, 0)},
        "mask": {"mask": rng.random((4, 3)) < 0.6},
        "bias": bias,
        "cap": cap,
        "small cap": {"softcap": 0.02},  # slopes down to 1e-90: 1 - tanh^2 has no digits left
        "sink": {"sinks": np.asarray(0.7)},
        "cap, sink and bias": cap | sinks | bias,
    }


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", of_digits(np.random.default_rng(0)))
def test_exact_gradients_against_50_digits(name, options):
    rng = np.random.default_rng(3)
    q, k, v, g = one_head(rng, "float32", 4, 3, 2)
    given = of_digits(rng)[options]
    case, dps = Case(q, k, v, **given), 400 if options == "small cap" else 60
    some = {x: given[x] for x in ("bias", "sinks") if x in given}
    attention = partial(digits.formulas(dps).softmax_attention, mask=case.seen(), **some)
    attention = partial(attention, softcap=case.softcap)
    pulled = digits.pull_back(attention, g, dps=dps, q=q, k=k, v=v)[1]
    expected = pulled[name[1]].astype(float)
    of, roundings = gradient(name, q, k, v, g, **given), PROFILES["math"].roundings("float32")
    rows, found = (f((), roundings, slice(0, of.shape[0])) for f in (of.analyse, of.exact))
    scale = max(1.0, np.max(np.abs(expected)))
    if options == "small cap":
        np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-300)
    np.testing.assert_allclose(rows.out, expected, rtol=0, atol=1e-14 * scale)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-14 * scale)


USES = {
    "plain": ((2, 64, 64, 16), {}),
    "causal": ((2, 60, 60, 16), {"causal": True}),
    "cross": ((2, 40, 77, 12), {}),
    "fewer keys": ((2, 60, 24, 16), {"causal": True}),
    "window": ((2, 50, 50, 16), {"window": (9, 4)}),
    "large scale": ((2, 40, 40, 16), {"scale": 3.0}),
    "small scale": ((2, 40, 40, 16), {"scale": 1e-4}),
    "one key": ((2, 40, 1, 16), {}),
    "few": ((2, 3, 2, 4), {}),
    "values": ((2, 50, 40, 8, 40), {}),
}
OF_EXACT = {
    "plain": {},
    "causal": {"causal": True},
    "sinks": {"sinks": SINKS},
    "cap": {"softcap": 3.0},
    "cap of a power of two": {"softcap": 2.0},
    "both": {"softcap": 2.5, "sinks": SINKS, "causal": True},
}
OF_UNITS = [x for x in BACKWARD if x.startswith(("tf32", "fp8", "half", "serial"))]
NARROW = [x for x in BACKWARD if x not in ("recomputed", *OF_UNITS)]
MADE = [(x, y) for x in NARROW for y in ("bfloat16", "float16")]
MADE += [(x, "float32") for x in ("math", "recomputed", "math-maximum")]
MADE += [(x, DTYPES[x][0]) for x in OF_UNITS]
CHEAP = [("flash", "bfloat16"), ("recomputed", "float32")]
of_each = pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(*x, id=f"{x}"[1:-1], marks=[] if x in CHEAP else [pytest.mark.long])
        for x in MADE
    ],
)


@pytest.mark.sweep(6)
@pytest.mark.long("searched")
@pytest.mark.parametrize("profile", ["named", "searched"])
@of_each
@pytest.mark.parametrize("use", USES)
def test_right_backward_passes(use, name, dtype, profile):
    if profile == "searched" and name not in BACKWARD_PROFILES[is_narrow(dtype)]:
        pytest.skip("it is tried if it is named")
    shape, options = USES[use]
    given = dump_gradients(name, *arrays(len(use), dtype, *shape), dtype, **options)
    verdict = verify(**given, profile=name if profile == "named" else None)
    assert verdict.verdict != "FAIL", str(verdict)


@pytest.mark.sweep(6)
@of_each
@pytest.mark.parametrize("options", OF_EXACT)
def test_laws_of_right_backward_passes(options, name, dtype):
    """Sizes of errors, with sinks and caps; a slope of a cap cancels, or rounds to 0."""
    given = arrays(14, dtype, 4, 64, 64, 32)
    verdict = verify(**dump_gradients(name, *given, dtype, **OF_EXACT[options]), profile=name)
    coarse = name.startswith(("fp8", "half-sums"))
    # Terms that two keys have count twice there, and spacings of weights are the widest.
    least = 0.7 / np.sqrt(2 if name.endswith("maximum") else 1)
    assert verdict.verdict in ("PASS", *["UNDERPOWERED"] * coarse), str(verdict)
    for x, part in verdict.parts.items():
        assert part.alpha == 1e-6 / 4
        if coarse:  # errors of sums are their size, and their law that of errors that are small
            assert 0.3 < part.z.rms < 1.8
            continue
        bound = next(x for x in part.tests if x.name == "bound")
        assert (0.0 if dtype == "float32" or x == "out" else 0.01) < bound.statistic <= 1
        if dtype != "float32" and options != "causal":
            assert least < part.z.rms < 1.3, str(part)
    if dtype != "float32" and not coarse:
        lower, upper = interval(1000)
        assert lower < verdict.parts["out"].z.rms ** 2 < upper


OF_MEAN = ["flash-scaled", "flash-again", "flash-unrounded"]


@pytest.mark.parametrize(
    "name", ["flash", *(pytest.param(x, marks=pytest.mark.long) for x in OF_MEAN)]
)
def test_values_with_a_mean_and_the_output_that_was_read(name):
    """D of the output that was given is known: errors of D are in no standard deviation.

    Here they are several times all others. The four profiles tell each other apart, in 4,096 rows.
    """
    q, k, v, g = arrays(17, "bfloat16", 2, 256, 256, 24)
    v = FORMATS["bfloat16"].round(0.75 + v / 16)
    verdict = verify(**dump_gradients(name, q, k, v, g, "bfloat16"))
    assert verdict.verdict == "PASS", str(verdict)
    lower, upper = interval(512)
    for part in ("dq", "dk"):
        profile = verdict.parts[part].profile.replace("-fast", "")
        assert profile == name, str(verdict)
        assert verdict.parts[part].known > 0.99
        assert lower < verdict.parts[part].z.rms ** 2 < upper


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.usefixtures("verdict_alone")
def test_values_with_a_mean_and_a_narrow_softmax(dtype):
    """D is rounded, and so is the sum of the weights, which D moves with: most of t - D is these.

    Without them dk in bfloat16 fails along D, p 7e-20; D that counts 1.01 times still fails.
    """
    q, k, v, g = arrays(1, dtype, 2, 48, 64, 16)
    q, v = FORMATS[dtype].round(q / 4), FORMATS[dtype].round(v + 3)
    for wrong, expected in ((1.0, "PASS"), (1.01, "FAIL")):
        given = dump_gradients("eager-narrow", q, k, v, g, dtype, Wrong(delta=wrong))
        part = verify(**results(given, "dk"), profile="eager-narrow").parts["dk"]
        assert part.verdict == expected, str(part)
        assert wrong != 1 or 0.7 < part.z.rms < 1.3


@pytest.mark.sweep(9)
@pytest.mark.parametrize("cap", [None, 1.0, 3.0, 30.0])
@pytest.mark.parametrize("name", ["math", pytest.param("recomputed", marks=pytest.mark.long)])
def test_sinks_and_caps_of_large_scores(name, cap):
    """A small cap: 1 - tanh^2 cancels, and what is left is 0 where it rounds to 1."""
    q, *rest = arrays(15, "float32", 4, 60, 60, 16)
    q = FORMATS["float32"].round(3 * q)
    given = dump_gradients(name, q, *rest, "float32", softcap=cap, sinks=SINKS)
    verdict = verify(**given, profile=name)
    assert verdict.verdict == "PASS", str(verdict)


@pytest.mark.usefixtures("verdict_alone")
def test_masks_biases_and_grouped_heads():
    rng = np.random.default_rng(2)
    q, k, v, g = arrays(rng, "bfloat16", 4, 60, 60, 16, shared=2)
    options = {"mask": rng.random((60, 60)) < 0.7, "bias": numbers(rng, "bfloat16", 60, 60)}
    options["mask"][7] = False
    given = dump_gradients("math", q, k, v, g, "bfloat16", **options)
    assert verify(**given, profile="math").verdict == "PASS"
    half = dump_gradients("math", q[::2], k, v, g[::2], "bfloat16", **options)
    assert verify(**half, profile="math").verdict == "PASS"
    wrong = {x: half[x] for x in ("dk", "dv")}  # no sum over the heads of a group
    verdict = verify(**results(given) | wrong, profile="math")
    assert [x.verdict for x in verdict.parts.values()] == ["FAIL", "FAIL"]


def test_sums_over_heads_that_share_keys():
    q, k, v, g = arrays(2, "float32", 6, 60, 50, 16, shared=3)
    verdict = verify(**dump_gradients("math", q, k, v, g, "float32"))
    assert verdict.verdict == "PASS", str(verdict)
    one = dump_gradients("math", q, k[:1], v[:1], g, "float32")
    two = made("math", q, *(np.broadcast_to(x[:1], x.shape) for x in (k, v)), g, "float32")
    sums = {x: np.sum(two[x], 0, keepdims=True) for x in ("dk", "dv")}  # over a batch
    verdict = verify(**results(one) | sums)
    assert verdict.verdict == "PASS", str(verdict)


def of_group(seed, name, share, by_head, dtype="bfloat16", n=48):
    """Query heads that share one head of keys, and gradients by how they are added."""
    given = arrays(seed, dtype, share, n, n, 32, shared=share)
    return dump_gradients(name, *given, dtype, by_head=by_head)


@pytest.mark.parametrize("share", [2, 8])
@pytest.mark.parametrize("by_head", [False, True, "each"])
def test_gradients_of_heads_that_share_keys_may_be_rounded_before_they_are_added(share, by_head):
    """Each alone and the sum, or also all sums between, whose variance is allowed for.

    Of 48 rows by 32 columns, whose roundings are independent: a mean square is within a tenth.
    """
    found = of_group(7, "math", share, by_head)
    q, k, v, g = (found[x] for x in ("q", "k", "v", "d_out"))

    def analysed(name, heads):
        problem = problems.pose_arrays(q[heads], k, v)
        of = {"dk": k.shape}
        of = problems.pose_gradients(problem, of, g[heads].__getitem__, None, "float64")
        return of["dk"].analyse((0,), PROFILES[name].roundings("bfloat16"), slice(0, 48))

    rows = [analysed(x, slice(0, share)) for x in ("math", "math-by-head")]
    std = rows[bool(by_head)].std if by_head != "each" or share == 2 else rows[1].worst
    assert np.mean(np.square((found["dk"][0] - rows[0].out) / std)) == pytest.approx(1, abs=0.1)
    if share == 8:
        to, alone = FORMATS["bfloat16"], np.stack([analysed("math", [h]).out for h in range(8)])
        sums = np.cumsum(alone, 0)
        rounded = np.sum(slow.uniform(to.spacing(alone)), 0)
        more = np.sum(slow.uniform(to.spacing(sums[1:-1])), 0)
        once, twice = rows
        clear = np.abs(once.out) > 4 * twice.worst  # else noise is rounded, of more spacing
        for x, of_heads in (("std", rounded), ("worst", rounded + more)):
            squares = [getattr(y, x)[clear] ** 2 for y in (once, twice)]
            np.testing.assert_allclose(np.subtract(*squares[::-1]), of_heads[clear], rtol=1e-6)
        assert np.all(np.abs(found["dk"][0] - once.out) <= twice.bound)


@pytest.mark.sweep(5)
@pytest.mark.long("searched", "each")
@pytest.mark.parametrize("profile", ["named", "searched"])
@pytest.mark.parametrize("by_head", [True, "each"])
@pytest.mark.parametrize("name", ["math", "flash", "flash-32", "upcast", "eager", "eager-narrow"])
def test_kernels_that_repeat_keys_and_add_rounded_gradients_pass(name, by_head, profile):
    given = of_group(8, name, 8, by_head, n=64 if profile == "searched" else 32)
    verdict = verify(**given, profile=name if profile == "named" else None)
    assert verdict.verdict != "FAIL", str(verdict)
    if profile == "named" and name in ("math", "flash", "upcast"):  # others round more than that
        assert verdict.parts["dk"].profile == f"{name}-by-head"


@pytest.mark.long("flash", "upcast", "eager", "0")
@pytest.mark.parametrize("counts", [0, 2])
@pytest.mark.parametrize("name", ["math", "flash", "upcast", "eager"])
@pytest.mark.usefixtures("verdict_alone")
def test_a_head_of_a_group_that_is_dropped_or_counted_twice_fails(name, counts):
    given = of_group(9, name, 4, True, n=32)
    q, k, v, g = (given[x] for x in ("q", "k", "v", "d_out"))
    alone = made(name, q[:1], k, v, g[:1], "bfloat16")
    for x in ("dk", "dv"):
        given[x] = FORMATS["bfloat16"].round(given[x] + (counts - 1) * alone[x])
        verdict = verify(**results(given, x), profile=name)
        assert verdict.verdict == "FAIL", str(verdict)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("by", ["ratio", "capped", "cosh"])
def test_slopes_as_kernels_compute_them(by, dtype):
    """1 - t^2 of the tanh, or of the capped score over the cap, in float32; and 1 / cosh^2."""
    given, cap = arrays(16, dtype, 2, 150, 150, 16), float(np.float32(2.7))
    given = dump_gradients("math", *given, dtype, Wrong(slope=by), softcap=cap)
    verdict = verify(**results(given, "dq", "dk"), profile="math")
    assert verdict.verdict == "PASS", str(verdict)


@pytest.mark.parametrize("of", ["dq", "dk"])
@pytest.mark.parametrize("by", ["ratio", "capped", "cosh"])
def test_slopes_where_all_cancels(by, of):
    """Two scores at 4 to 6 caps, in float32: slopes of 1e-3 to 1e-5 with errors of 1e-7."""
    rng, to, cap = np.random.default_rng(17), FORMATS["float32"].round, float(np.float32(1.3))
    q = to(1.6 + 0.15 * rng.standard_normal((2, 500, 16)))
    k = to(np.array([[1], [-1]]) + 0.1 * rng.standard_normal((2, 2, 16)))
    given = (q, k, numbers(rng, "float32", 2, 2, 8), numbers(rng, "float32", 2, 500, 8))
    given = dump_gradients("math", *given, "float32", Wrong(slope=by), softcap=cap)
    verdict = verify(**results(given, of), profile="math").parts[of]
    bound = next(x for x in verdict.tests if x.name == "bound")
    assert verdict.verdict != "FAIL", str(verdict)
    assert bound.statistic <= 1
    # The mean square of 1,000 rows is below 1.32 WORST^2, but for a probability of 1e-9.
    assert verdict.z.rms < 1.15 * WORST


WRONG = {
    "dq a bit too large": (Wrong(dq=1.002), {}, {"dq"}),
    "dk too large": (Wrong(dk=1.01), {}, {"dk"}),
    "dv too large": (Wrong(dv=1.01), {}, {"dv"}),
    "scale twice": (Wrong(dq=0.2, dk=0.2), {}, {"dq", "dk"}),
    "D left out": (Wrong(delta=0.0), {}, {"dq", "dk"}),
    "D a bit too small": (Wrong(delta=0.97), {}, {"dq"}),
    "D of another row": (Wrong(no_norm=True), {}, {"dq", "dk"}),
    "another scale": (Wrong(scale=1.01), {}, {"dq"}),
    "causal edge": (Wrong(shift=1), {"causal": True}, {"dq", "dk", "dv"}),
    "no causal edge": (Wrong(shift=1000), {"causal": True}, {"dq", "dk", "dv"}),
    "mask forgotten": (Wrong(seen=True), {"mask": "random"}, {"dq", "dk", "dv"}),
    "the last row lost": (Wrong(lost=1), {}, {"dq", "dk", "dv"}),
    "truncated": (Wrong(truncated=True), {}, {"dq"}),
    "no sink": (Wrong(no_sink=True), {"sinks": SINKS[1:]}, {"dq", "dk", "dv"}),
    "no slope of the cap": (Wrong(flat=True), {"softcap": 5.0}, {"dq", "dk"}),
    "slope at the capped score": (Wrong(late=True), {"softcap": 5.0}, {"dq", "dk"}),
}


EVERY_WAY = [(x, y) for x in ("flash", "math") for y in WRONG]
EVERY_WAY.remove(("math", "another scale"))  # it has its weights of the forward pass
FEW_WAYS = ("dq a bit too large", "dk too large", "dv too large", "D left out", "the last row lost")
EVERY_WAY += [(x, y) for x in ("tf32", "tf32-eager") for y in FEW_WAYS]
EVERY_WAY += [(x, FEW_WAYS[i]) for x in ("math-maximum", "flash-maximum") for i in (0, 1, 2, 4)]


@pytest.mark.sweep(12)
@pytest.mark.long("math")
@pytest.mark.parametrize(("name", "defect"), EVERY_WAY)
@pytest.mark.usefixtures("verdict_alone")
def test_wrong_backward_passes_fail(name, defect):
    wrong, options, expected = WRONG[defect]
    if "mask" in options:
        options = {"mask": np.random.default_rng(5).random((64, 64)) < 0.7}
    dtype = "float32" if "tf32" in name or name == "math-maximum" else "bfloat16"
    given = dump_gradients(name, *arrays(5, dtype, 3, 64, 64, 24), dtype, wrong, **options)
    verdict = verify(**given, profile=name)
    off = {x for x, y in verdict.parts.items() if y.verdict == "FAIL"}
    assert off == expected if "too large" in defect else off >= expected, str(verdict)
    assert verdict.parts["out"].verdict == "PASS"
    assert verdict.verdict == "FAIL"
    assert verdict.of in expected


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("wrong", "name", "size", "options"),
    [
        (Wrong(dq=1.002), "factor", 0.002, {}),
        (Wrong(delta=0.98), "delta", -0.02, {}),
        (Wrong(flat=True), "cap", 1.0, {"softcap": 5.0}),
        (Wrong(no_sink=True), "lost sink", 1.0, {"sinks": np.full(2, 2.0)}),
    ],
)
def test_defects_are_named_and_measured(wrong, name, size, options):
    given = arrays(6, "bfloat16", 2, 64, 64, 32)
    given = dump_gradients("flash", *given, "bfloat16", wrong, **options)
    given = results(given, "dq", *["out"] * ("sinks" in options))
    suspects = verify(**given, profile="flash").parts["dq"].suspects
    suspect = next(x for x in suspects if x.name == name)
    assert suspects[0] is suspect or size == 1 or "multiplied by 0.98" in suspects[0].text
    # The derivative to a large defect is not the defect: its size has no error.
    assert np.isnan(suspect.error) == (size == 1)
    error = 0.002 if size == 1 else 6 * suspect.error
    assert abs(suspect.estimate - size) < error < abs(size)
    assert next(x.name for x in suspects if x.name != "convention") == name


@pytest.mark.sweep(2)
@pytest.mark.long("1.3")
@pytest.mark.parametrize("softcap", [None, 1.3])
@pytest.mark.parametrize("sink", [None, 1.0])
@pytest.mark.parametrize("of", NAMES)
def test_the_variance_of_a_sum_over_keys(of, sink, softcap):
    """Weights that are moved by errors of scores: all keys of a query move, and slopes.

    Keys have a mean, which does not move with the weights: D moves, too.
    """
    rng = np.random.default_rng(8)
    q, k, v, g = one_head(rng, "float64", 20, 30, 6)
    k = k + 2 * (of == "dq")
    roundings = PROFILES["eager"].roundings("bfloat16")
    sinks = None if sink is None else np.asarray(sink)
    one = gradient(of, q, k, v, g, softcap=softcap, sinks=sinks)
    saved = one.gradient.saved((), roundings._replace(out=None))
    w = rng.standard_normal(k.shape)
    if of == "dq":
        rows = analyse_gradient(saved, roundings._replace(out=None), of, slice(0, 20))
        expected = np.square(rows.std)
    else:
        expected, double = variance_along(saved, roundings, of, np.stack([w, -2 * w]))
        np.testing.assert_allclose(double, 4 * expected)
        np.testing.assert_allclose(expected, variance_along(saved, roundings, of, w))
    total, noise = [], Noise(FORMATS["bfloat16"], rng)
    for _ in range(2000):
        scores = noise(noise(q @ k.T) * 6**-0.5)
        if softcap is not None:
            ratio = noise(np.tanh(noise(scores / softcap)))
            scores = noise(softcap * ratio)
        p = np.exp(scores)
        p = noise(p / (p.sum(-1, keepdims=True) + (0 if sink is None else np.exp(sink))))
        t = noise(g @ v.T)
        ds = noise(p * (t - np.sum(p * t, -1, keepdims=True)))
        if softcap is not None:
            ds = noise(noise(noise(ds * softcap) * (1 - ratio**2)) / softcap)
        ds = noise(ds * 6**-0.5)
        found = {"dq": ds @ k, "dk": ds.T @ q, "dv": p.T @ g}[of]
        total.append(found if of == "dq" else np.sum(w * found))
    # The relative error of a variance of 2,000 Gaussian numbers is 3.2 %. For dq the law takes what
    # moves the sum of the weights for independent of what moves each: it is too large by that.
    found = np.mean(np.var(total, 0) / expected)
    assert (0.7 if of == "dq" else 0.8) < found < 1.2


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("of", NAMES)
def test_the_variance_of_each_element(of, kept):
    """Of weights, kept or not, and products that are rounded: 1,500 draws, within 5 %."""
    rng, to = np.random.default_rng(19), FORMATS["bfloat16"]
    q, k, v, g = one_head(rng, "float64", 20, 3, 6)
    one = gradient(of, q, k, v, g)
    profile = PROFILES["upcast"]._replace(scores="float32" if kept else None, out=None)
    rows = one.analyse((), profile.roundings("bfloat16"), slice(0, one.shape[0]))

    def noise(x):
        return x + to.spacing(x) * (rng.random((1500, *x.shape)) - 0.5)

    p = np.exp(q @ k.T * 6**-0.5)
    p = p / p.sum(-1, keepdims=True)
    t, rounded = noise(g @ v.T), noise(p)
    p = rounded if kept else p
    ds = p * (t - np.sum(p * t, -1, keepdims=True)) * 6**-0.5
    found = {"dq": ds @ k, "dk": ds.swapaxes(1, 2) @ q, "dv": rounded.swapaxes(1, 2) @ g}[of]
    assert 0.95 < np.mean(np.var(found, 0) / rows.std**2) < 1.05
    # Along directions, too: all columns of a row move together, by the tokens.
    along, every = rng.standard_normal((6, 2)), slice(0, one.shape[0])
    rest = profile.roundings("bfloat16"), of, every
    saved = one.gradient.saved((), rest[0])
    law, spread = analyse_gradient(saved, *rest, along), []
    covariances = np.add(*gradient_covariance(law, along))
    for drawn, expected in zip((found @ along).swapaxes(0, 1), covariances, strict=True):
        spread.append(np.linalg.eigvals(np.linalg.solve(expected, np.cov(drawn.T))).real)
    assert 0.95 < np.mean(spread) < 1.05
    assert np.max(spread) < 1.4


@pytest.mark.parametrize("of", NAMES)
@pytest.mark.parametrize("name", ["flash", "eager", "flash-32", "math"])
@np.errstate(all="ignore")
def test_covariances_along_columns_are_variances(of, name):
    """Known digits make the largest variances smaller, and never those of unknown ones."""
    q, k, v, g = np.random.default_rng(7).standard_normal((4, 40, 5))
    roundings, rows = PROFILES[name].roundings("bfloat16"), slice(3, 9)
    one = gradient(of, q, k=k, v=v, g=g, causal=True)
    law, saved = one.analyse((), roundings, rows), one.gradient.saved((), roundings)
    of_rows = saved, roundings, of, rows, np.eye(5)
    parts = (gradient_covariance(analyse_gradient(*of_rows, x), np.eye(5), x) for x in (0, 1))
    usual, most = (np.diagonal(np.add(*x), axis1=1, axis2=2) for x in parts)
    np.testing.assert_allclose(usual, law.std**2, rtol=1e-5)
    known = np.isfinite(most)
    assert np.mean(known) > 0.8
    assert np.all((most <= law.worst**2 * (1 + 1e-5))[known])
    assert np.all((most >= law.std**2)[known])
    if name == "math":
        np.testing.assert_allclose(most, law.worst**2, rtol=1e-5)


@pytest.mark.parametrize("name", ["flash", "eager"])
@pytest.mark.parametrize("of", ["dk", "dv"])
def test_queries_that_are_the_same_have_the_same_errors(of, name):
    """A sum over three copies of each has nine times the variance."""
    rng = np.random.default_rng(20)
    roundings = PROFILES[name]._replace(out=None).roundings("bfloat16")
    q, k, v, g = one_head(rng, "float64", 7, 5, 4)
    found = []
    for copies in (1, 3):
        queries, derivatives = (np.repeat(x, copies, 0) for x in (q, g))
        saved = gradient(of, queries, k, v, derivatives).gradient.saved((), roundings)
        found.append(variance_along(saved, roundings, of, v))
    assert found[1] == pytest.approx(9 * found[0])


@pytest.mark.parametrize("softcap", [None, 1.3])
@pytest.mark.parametrize("of", NAMES)
def test_directions_are_what_a_lost_sink_changes_and_the_derivative_to_the_scale(of, softcap):
    given = one_head(22, "float32", 6, 5, 4)
    given = dict(zip("qkvg", given, strict=True)) | {"softcap": softcap}
    sink, none = (gradient(of, **given, sinks=x) for x in (np.asarray(0.7), None))
    roundings, all_rows, h = PROFILES["math"].roundings("float32"), slice(0, sink.shape[0]), 1e-5
    rows = sink.analyse((), roundings, all_rows)
    change = none.exact((), roundings, all_rows) - rows.out
    np.testing.assert_allclose(rows.tangents["lost sink"], change, atol=1e-12)
    own, less, more = (gradient(of, **given, scale=0.6 * (1 + x)) for x in (0.0, -h, h))
    slope = (more.exact((), roundings, all_rows) - less.exact((), roundings, all_rows)) / (2 * h)
    found = own.analyse((), roundings, all_rows).tangents["scale"]
    np.testing.assert_allclose(found, slope, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", ["math", "flash", "eager"])
def test_keys_that_are_hidden_have_no_part(name):
    """But for sums of more terms, of which these are 0."""
    q, k, v, g = one_head(21, "float16", 6, 9, 4)
    few, roundings = {"k": k[:5], "v": v[:5]}, PROFILES[name].roundings("float16")
    hidden, none = (
        gradient("dq", q, **x, g=g).gradient.saved((), roundings)[0][1]
        for x in ({"k": k, "v": v, "mask": np.arange(9) < 5}, few)
    )
    for field in ("near_delta", "shared_variance", "scores_variance", "moved_variance", "mean"):
        np.testing.assert_allclose(getattr(hidden, field), getattr(none, field), rtol=1e-12)


def sum_of(kernel, scale, steep=0.0, **fields):
    one = np.ones((1, 1))
    saved = gradient("dv", one, one, one, one).gradient.saved((), kernel)
    found = _GradientSum(saved, kernel, "dv", slice(0, 1))
    found.scale, found.copies = scale, 3.0  # of three copies of each term
    found.tangents = {"scale": np.array([[steep]])}
    for name, x in fields.items():
        setattr(found, name, x if name == "terms" else np.array([[x]]))
    return found


@pytest.mark.parametrize("name", ["math", "flash", "eager"])
def test_law_and_bound_of_a_sum_by_the_formula(name):
    """A sum of terms, times the scale, and rounded."""
    roundings, c, u = PROFILES[name].roundings("bfloat16"), -0.7, 2.0**-24
    x = {"total": 0.9, "near": 0.91, "sizes": 3.0, "running": 2.0}
    x |= {"variance": 1e-4, "moved": 0.02, "flushed": 1e-5, "terms": 40}
    rows = _close_sum(sum_of(roundings, c, 0.3, **x))
    walked = 2.0 + 0.9**2 if roundings.scores_matter else 3 * 40 * 0.9**2
    variance = c * c * (1e-4 + slow.BENFORD * u * u * walked)
    step = slow.step(roundings.out, c * 0.9)
    assert rows.std**2 == pytest.approx(variance + slow.uniform(step))
    assert rows.worst**2 == pytest.approx(slow.EDGE / slow.BENFORD * variance + slow.uniform(step))
    gamma = slow.gamma(roundings, 40, 2) + 2 * u
    bound = abs(c) * (0.02 + gamma * 3.02) + 2.0**-126
    assert rows.bound == pytest.approx(bound + slow.step(roundings.out, 0.63 + bound) / 2)
    exp = {"math": 1.0, "flash": 32.0, "eager": 1.0}[name]
    common = 0.7 * (exp / 16 * 3.0 + 3 * 0.3) + 3 * 0.63  # exponentials, constants, and the factor
    assert rows.slack == pytest.approx(u * common + 0.7 * 1e-5)
    alone = slow.BENFORD * (u * c) ** 2 * (2.0 + 0.9**2)
    assert rows.apart == pytest.approx(alone + slow.uniform(step))
    fine = sum_of(roundings._replace(out=None), c, 0.3, **x | {"variance": 1e-14, "near": 0.9})
    rows = _close_sum(fine)
    expected = c * c * (1e-14 + slow.BENFORD * u * u * walked)
    np.testing.assert_allclose(rows.std**2, expected, rtol=1e-6)
    np.testing.assert_allclose(rows.apart, alone)


@pytest.mark.parametrize(("of", "fewer"), [("dq", False), ("dk", True), ("dv", True)])
def test_gradients_of_keys_are_rounded_after_some_queries(of, fewer):
    """32 of 64 of them, which those of queries, sums over 64 keys, do not know of."""
    q, k, v, g = np.random.default_rng(0).standard_normal((4, 64, 4))
    std, whole = (
        gradient(of, q, k=k, v=v, g=g)
        .analyse((), PROFILES[x].roundings("bfloat16"), slice(0, 64))
        .std
        for x in ("flash-32", "flash-64")
    )
    assert np.all(std > whole) if fewer else np.array_equal(std, whole)


@pytest.mark.parametrize(("off", "known"), [(3.9, True), (4.1, False)])
def test_sums_beyond_4_standard_deviations_have_no_law(off, known):
    roundings = PROFILES["flash"].roundings("bfloat16")
    sum_ = sum_of(roundings, 2.0, total=1.0, near=1 + off * 0.01, variance=1e-4, terms=1)
    rows = _close_sum(sum_)
    assert np.isfinite(rows.std).all() == known


def test_running_sums_are_rounded_before_more_is_added():
    """Each at the spacing of the sum times the scale; at the most with what it is off by."""
    roundings = PROFILES["flash-32"].roundings("bfloat16")
    to = FORMATS["bfloat16"]
    one = np.ones((1, 1))
    sum_ = sum_of(roundings, 2.0, total=0.99, near=0.99, moved=0.02, terms=1)
    sum_.add(one, one, 0 * one, 0 * one, one, to)
    assert sum_.near.item() == to.round(1.98) / 2 + 1
    assert sum_.own.item() == pytest.approx(slow.uniform(slow.step(to, 1.98) / 2))
    assert sum_.moved.item() == pytest.approx(0.02 + slow.step(to, 2.02) / 4, rel=1e-6)


def test_the_bound_of_a_product_is_that_of_all_errors_at_their_largest():
    """(p + e) (t - D + e') - p (t - D), and of D, of which the sum is rounded, too."""
    rng, cut = np.random.default_rng(18), np.s_[0:8]
    q, k, v, g = one_head(rng, "bfloat16", 8, 8, 4)
    profile = PROFILES["eager"]._replace(d_scores=None)
    roundings = profile.roundings("bfloat16")
    [(back, saved)] = gradient("dq", q, k, v, g).gradient.saved((), roundings)
    x = analyse_pairs(back, saved, roundings, cut, cut)
    t, _, t_bound = multiply_values(back, roundings, cut, cut)
    of_sum = slow.gamma(roundings, 4, 2) * np.outer(*(np.sqrt(np.sum(y * y, -1)) for y in (g, v)))
    of_sum += 4 * 2.0**-126
    expected = of_sum + FORMATS["bfloat16"].spacing(np.abs(t) + of_sum) / 2
    np.testing.assert_allclose(t_bound, expected, rtol=1e-12)
    off, error = t_bound + saved.delta_bound[:, None], x.p_bound - x.p_flushed
    apart = np.abs(x.t - saved.delta[:, None])
    most = (x.p + error) * (apart + off) - x.p * apart
    assert np.all(x.s_bound >= most)
    np.testing.assert_allclose(x.s_bound, most, rtol=1e-4)
    largest = np.sum((x.p + error) * (np.abs(x.t) + t_bound), -1) * (
        1 + slow.gamma(roundings, 8, 2)
    )
    found = saved.delta_bound + np.sum(x.p * np.abs(x.t), -1)
    np.testing.assert_allclose(found, largest, rtol=1e-12)


@pytest.mark.parametrize("given", [False, True])
def test_law_and_bound_of_d_out_times_the_output(given):
    """An output that is not given has errors of its own, each column for itself."""
    rng, u, to = np.random.default_rng(23), 2.0**-24, FORMATS["bfloat16"]
    roundings = PROFILES["flash"].roundings("bfloat16")
    q, k, v, g = one_head(rng, "bfloat16", 3, 5, 4)
    case = Case(q, k, v)
    rows = [slow.row(case, roundings, i) for i in range(3)]
    exact_out, std, most = (
        np.array([getattr(x, y) for x in rows]) for y in ("out", "std", "bound")
    )
    out = to.round(1.1 * exact_out) if given else to.round(flash(case, "bfloat16")[0])
    head = problems.pose_arrays(q, k, v).head(())
    saved = save_queries(BackwardHead(head, g, out if given else None), roundings)
    np.testing.assert_allclose(saved.delta, np.sum(g * exact_out, -1), rtol=1e-12)
    np.testing.assert_allclose(saved.near_delta, np.sum(g * out, -1), rtol=1e-12)
    terms = g * out
    walked = np.sum(terms**2 + np.cumsum(terms, -1) ** 2, -1)
    variance = (0 if given else np.sum((g * std) ** 2, -1)) + slow.BENFORD * u * u * walked
    np.testing.assert_allclose(saved.delta_variance, variance, rtol=1e-7)
    bound = np.sum(np.abs(g) * most, -1) + slow.gamma(roundings, 4, 2) * np.sum(np.abs(terms), -1)
    bound += given * np.abs(np.sum(g * (out - exact_out), -1))
    np.testing.assert_allclose(saved.delta_bound, bound, rtol=1e-7)
    assert not saved.shared_variance.any()


def test_d_out_times_an_output_without_a_law():
    """Values whose products are subnormal numbers: errors are taken to be at their bounds."""
    rng, roundings = np.random.default_rng(25), PROFILES["recomputed"].roundings("float32")
    q, k, v, g = one_head(rng, "float32", 3, 5, 4)
    head = problems.pose_arrays(q, k, v * 1e-44).head(())
    rows = analyse_softmax(head, roundings, slice(0, 3))
    saved = save_queries(BackwardHead(head, g, None), roundings)
    assert np.isinf(rows.std).all()
    np.testing.assert_allclose(saved.delta_variance, np.sum((g * rows.bound) ** 2, -1), rtol=1e-6)


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": (40, 3)}, {"sinks": SINKS[:1]}]
)
@pytest.mark.parametrize("profile", ["flash", "flash-fast"])
def test_the_output_that_gives_d_is_bounded_as_a_forward_pass_is(profile, options, monkeypatch):
    roundings, rng = PROFILES[profile].roundings("bfloat16"), np.random.default_rng(31)
    q, k, v, g = arrays(rng, "bfloat16", 1, 110, 110, 8)  # in float32
    head = problems.pose_arrays(q, k, v, **options).head((0,))
    back, known = BackwardHead(head, g[0], roundings.out.round(g[0])), {}
    first, again = (
        save_queries(back, roundings, known=known) for _ in range(2)
    )  # exact: known then
    monkeypatch.setattr(saved, "begin_bound", lambda *_: None)  # by a scan of its own
    want = save_queries(back, roundings).delta_bound
    kept = np.abs(np.sum(g[0] * (back.out - known[0].out), -1))  # is the same in both
    for x in (first, again):
        np.testing.assert_allclose(x.delta_bound - kept, want - kept, rtol=4 * OFF)


def with_and_without_rounding(of):
    """A gradient of arrays in float32, and of the same in TF32."""
    given = one_head(24, "float32", 4, 4, 3)
    rounded = [FORMATS["tfloat32"].round(x) for x in given]
    out = given[-1] + 0.1
    posed = [
        problems.pose_gradients(
            problems.pose_arrays(q, k, v), {of: (4, 3)}, lambda _, g=g: g, lambda _: out, "float64"
        )[of]
        for q, k, v, g in (given, rounded)
    ]
    return given[-1], rounded[-1], out, posed


@pytest.mark.parametrize("of", NAMES)
def test_d_out_is_rounded_in_products_only(of):
    """The sum of d_out * out is taken of both as they are given."""
    g, rounded, out, (whole, _) = with_and_without_rounding(of)
    profile = PROFILES["tf32"]
    [(back, saved)] = whole.read_by(profile).gradient.saved((), profile.roundings("float32"))
    exact = attend_rows(back.head, slice(0, 4), None).out
    np.testing.assert_array_equal(back.d_out, rounded)
    np.testing.assert_array_equal(saved.delta, np.sum(g * exact, -1))
    np.testing.assert_allclose(saved.near_delta, np.sum(g * out, -1), rtol=1e-12)


@pytest.mark.parametrize("of", NAMES)
def test_profiles_round_derivatives_to_the_output_too(of):
    """And what weights and products make of them."""
    _, _, _, (whole, again) = with_and_without_rounding(of)
    roundings, all_rows = PROFILES["tf32-eager"].roundings("float32"), slice(0, 4)
    found = whole.read_by(PROFILES["tf32-eager"]).analyse((), roundings, all_rows)
    expected = again.analyse((), roundings, all_rows)
    np.testing.assert_array_equal(found.out, expected.out)
    np.testing.assert_array_equal(found.nearest, expected.nearest)
    np.testing.assert_array_equal(found.bound, expected.bound)


def test_the_bound_holds_where_the_normaliser_moves_the_sum_of_d_out_and_out():
    """Scores that are rounded by half a spacing, up or down; a key of little weight is off most."""
    q, v, g = np.ones((1, 1, 2)), np.array([[[1.0], [0.0], [0.0]]]), np.ones((1, 1, 1))
    k = FORMATS["bfloat16"].round([[[17.5, 0.0632], [20.5, 0.0618], [16.5, 0.0632]]])
    found = made("eager", q, k, v, g, "bfloat16", scale=1.0)["dk"][0]
    of, kernel = gradient("dk", q[0], k[0], v[0], g[0], scale=1.0), PROFILES["eager"]
    rows = of.analyse((), kernel.roundings("bfloat16"), slice(0, 3))
    assert np.all(np.abs(found - rows.out) <= rows.bound)


@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.999])
def test_errors_of_a_slope_of_a_cap(ratio):
    """Var(1 - r^2) = u^2 (9 r^4 + (1 - r^2)^2) / (8 ln 2), and of the product as much again."""
    u, slope = 2.0**-24, 1 - ratio**2
    tile = SimpleNamespace(slope=np.array(slope), ratio=np.array(ratio))
    given = _ScoreGradient(*map(np.array, (0.7, 0.71, 1e-15, 1e-4)))
    found = given.times(tile, 0.9 * slope, np.array(1e-3), u)
    assert (found.s, found.near) == pytest.approx((0.7 * slope, 0.71 * 0.9 * slope))
    square = u * u * slow.BENFORD * (9 * ratio**4 + 2 * slope**2)
    np.testing.assert_allclose(found.variance, 1e-15 * slope**2 + 0.49 * square)
    bound = 1e-4 * (slope + 1e-3) + 0.7e-3  # and of both products
    assert found.bound == pytest.approx(bound * (1 + 4 * u) + 4 * u * 0.7 * slope, rel=1e-12)


KINDS = ["fused", "math", "eager", "cap", "sink", "both", "sink, less the maximum"]
KINDS += ["expanded keys", "indexed keys"]  # in float32 they are as math


@pytest.mark.sweep(3)
@pytest.mark.soak("float16")
@pytest.mark.long("False", "float16", "expanded keys", "indexed keys")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_torch(kind, dtype, causal):
    """Some models subtract the maximum in the storage type, before the softmax.

    Autograd adds the gradients of an expanded array at once, and of an indexed one by one.
    """
    torch = pytest.importorskip("torch")
    from torch.nn.attention import SDPBackend, sdpa_kernel

    given = arrays(9, dtype, 4, 130, 130, 32, shared=4 if "keys" in kind else 1)
    q, k, v, g = (torch.tensor(x[None]).to(getattr(torch, dtype)) for x in given)
    for x in (q, k, v):
        x.requires_grad_()
    k4, v4 = (x[:, [0] * 4] if "indexed" in kind else x.expand(q.shape) for x in (k, v))
    options = {}
    if kind in ("fused", "math") or "keys" in kind:
        backend = SDPBackend.FLASH_ATTENTION if kind == "fused" else SDPBackend.MATH
        with sdpa_kernel(backend):
            out = torch.nn.functional.scaled_dot_product_attention(q, k4, v4, is_causal=causal)
    else:
        s = (q @ k.transpose(-1, -2)) * 32**-0.5
        if kind in ("cap", "both"):
            options["softcap"] = 3.0
            s = torch.tanh(s / 3.0) * 3.0
        if causal:
            s = s.masked_fill(torch.ones(130, 130).triu(1).bool(), -torch.inf)
        if kind not in ("eager", "cap"):
            options["sinks"] = torch.tensor(SINKS).to(q.dtype)
            s = torch.cat([s, options["sinks"][:, None, None].expand(1, 4, 130, 1)], -1)
            if kind == "sink, less the maximum":
                s = s - s.max(-1, keepdim=True).values
        out = torch.softmax(s, -1)[..., :130] @ v
    out.backward(g)
    found = {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}
    given = dict(zip("qkv", (x.detach() for x in (q, k, v)), strict=True)) | options
    verdict = verify(**given, d_out=g, causal=causal, **found)
    assert verdict.verdict == "PASS", str(verdict)


@pytest.mark.long("False", "float16", "float32")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_jax(dtype, causal):
    jax = pytest.importorskip("jax")
    given = arrays(9, dtype, 2, 48, 48, 16)
    arguments = (jax.numpy.asarray(x.swapaxes(0, 1)[None], dtype) for x in given)

    def both(q, k, v, g):
        attention = partial(jax.nn.dot_product_attention, is_causal=causal)
        out, pullback = jax.vjp(attention, q, k, v)
        return out, *pullback(g)

    both = both if dtype == "float16" else jax.jit(both)  # which XLA has not on a CPU
    found = dict(zip(("out", *NAMES), both(*arguments), strict=True))
    found = {x: np.asarray(y, np.float64)[0].swapaxes(0, 1) for x, y in found.items()}
    given = dict(zip(("q", "k", "v", "d_out"), given, strict=True)) | found
    profile = None if dtype == "float32" else "eager"
    verdict = verify(**given, dtype=dtype, causal=causal, profile=profile)
    assert verdict.verdict == "PASS", str(verdict)


@pytest.mark.usefixtures("verdict_alone")
def test_gradients_without_the_output():
    given = dump_gradients("flash", *arrays(4, "bfloat16", 4, 64, 64, 32), "bfloat16")
    verdict = verify(**results(given, *NAMES), profile="flash", alpha=3e-5)
    assert verdict.verdict == "PASS"
    assert [(x, y.alpha) for x, y in verdict.parts.items()] == [(x, 1e-5) for x in NAMES]
    given["dq"] = 1.05 * given["dq"]
    assert verify(**results(given, "dq"), profile="flash").parts["dq"].verdict == "FAIL"


def test_the_wrong_sharing_of_keys_is_named():
    """Query head h with key head h % 2, forward and back, and sums over those heads."""
    q, k, v, g = arrays(4, "bfloat16", 6, 24, 24, 16, shared=3)
    order = [0, 2, 4, 1, 3, 5]  # heads of key 0, then those of key 1
    found = made("flash", q[order], k, v, g[order], "bfloat16")
    found |= {x: found[x][np.argsort(order)] for x in ("out", "dq")}
    verdict = verify(q=q, k=k, v=v, d_out=g, **found, dtype="bfloat16", profile="flash")
    words = "agrees if keys and values are read from key head h % 2 for query head h"
    for part in verdict.parts.values():
        assert part.verdict == "FAIL"
        assert part.suspects[0].text.startswith(words)


def test_every_profile_that_rounds_weights_has_a_twin_step_by_step():
    """Fused kernels divide by the sum at the end, others before weights are rounded."""
    twins = {"flash": "upcast", "flash-fast": "upcast"}
    of_types = ("tf32", "tf32-scaled", "tf32-truncated", "fp8-weights", "fp8", "half-sums")
    twins |= {x: f"{x}-eager" for x in of_types}
    fused = {x for x, y in PROFILES.items() if y.weights is not None and not y.normalised}
    fused = {x for x in fused if PROFILES[x].inputs != "storage" and not PROFILES[x].by_head}
    assert fused == set(twins) | {x for x in BACKWARD if x[:6] == "flash-"}
    for name, twin in twins.items():
        one, other = PROFILES[name], PROFILES[twin]
        assert other.normalised
        assert other.delta == "weights"
        assert (one.weights, one.inputs, one.scores) == (other.weights, other.inputs, other.scores)


def test_cutting_a_difference_that_cancels():
    """One key: t - D is what reading v and d_out in fewer digits leaves, and has few digits itself.

    So cutting it loses less than half a spacing on average.
    """
    rng, to = np.random.default_rng(1), FORMATS["float32"].round
    q, g = (to(rng.standard_normal((8, 48, x))) for x in (16, 8))
    k, v = to(rng.standard_normal((2, 1, 16))), to(rng.uniform(0.5, 1, (2, 1, 8)))
    given = dump_gradients("tf32-truncated", q, k, v, g, "float32")
    assert verify(**given).parts["dq"].verdict == "PASS"
    given["dq"] = to(given["dq"] * 1.01)
    assert verify(**given).parts["dq"].verdict == "FAIL"


@pytest.mark.parametrize("seed", [3, 4, 5])
def test_a_scale_of_a_power_of_two_rounds_what_becomes_subnormal(seed):
    """One query of long keys: most derivatives to scores are a few of the smallest numbers."""
    q, *rest = arrays(seed, "float16", 2, 1, 160, 16)
    given = dump_gradients("eager", FORMATS["float16"].round(2 * q), *rest, "float16")
    assert verify(**given, explain=False).parts["dk"].verdict != "FAIL"


HARD = {
    "weights below the smallest normal number": (24, 12.0, 1.0),
    "queries that are alike": (20, 1.0, 0.0),
    "overflow of g v": (16, 1.0, 1e4),
    "derivatives that are all but 0": (16, 1.0, 1e-37),
}


@pytest.mark.long("recomputed", "eager", *[x for x in HARD if "overflow" not in x])
@pytest.mark.parametrize("how", HARD)
@pytest.mark.parametrize("name", ["math", "recomputed", "eager"])
def test_hard_cases(name, how):
    d, size, of_g = HARD[how]
    dtype = "float16" if name == "eager" else "float32"
    q, k, v, g = arrays(11, dtype, 3, 250, 60, d)
    q, k = (FORMATS[dtype].round(size / 1.5 * x) for x in (q, k))
    g = FORMATS[dtype].round(of_g * g)
    if how == "queries that are alike":
        q[:], g[:] = q[:, :1], 1
    with np.errstate(all="ignore"):
        verdict = verify(**dump_gradients(name, q, k, v, g, dtype))
    assert verdict.verdict != "FAIL", str(verdict)


def of_equal_rows(how, seed):
    """Float32, values of which the sums cancel, and rows of d_out with the same products."""
    rng, n = np.random.default_rng(seed), 120
    q, k, v, g = arrays(rng, "float32", 2, n, 40, 64)
    q, k = (FORMATS["float32"].round(x / 3) for x in (q, k))
    v = np.abs(v) * np.where(np.arange(64) < 32, 1, -1)
    g[:] = {
        "powers": lambda: np.where(rng.random(n) < 0.5, 1, -2)[:, None],
        "groups": lambda: np.where(np.arange(n) < n // 2, 1.0, 0.75)[:, None],
        "one row": lambda: np.abs(g[:, :1]),
    }.get(how, lambda: 1)()
    return np.abs(q) if how == "queries of one sign" else q, k, v, g


@pytest.mark.sweep(2)
@pytest.mark.long("ones+2", "ones+12", "ones+13", "ones+20")
@pytest.mark.parametrize(
    ("how", "of", "seed"),
    [
        *(("ones", "dq", x) for x in (2, 11, 12, 13, 20)),
        ("powers", "dq", 11),
        ("groups", "dq", 20),
        ("one row", "dq", 11),
        ("powers", "dk", 11),
        ("queries of one sign", "dk", 1),
    ],
)
@pytest.mark.usefixtures("verdict_alone")
def test_rows_with_the_same_products_share_their_roundings(how, of, seed):
    """The products of equal rows of d_out with the values are rounded in the same way."""
    given = results(dump_gradients("math", *of_equal_rows(how, seed), "float32"), of)
    verdict = verify(**given, profile="math")
    assert verdict.verdict == "PASS", str(verdict)
    given[of] = FORMATS["float32"].round(1.01 * given[of])
    assert verify(**given, profile="math").verdict == "FAIL"


@pytest.mark.sweep(2)
@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "dtype"), [("math-maximum", "float32"), ("flash-maximum", "bfloat16")]
)
@pytest.mark.parametrize("block", [64, 2**40])
@pytest.mark.parametrize("options", [{"causal": True}, {"softcap": 3.0}], ids=str)
def test_running_maxima_may_be_differentiated(name, dtype, block, options):
    """No other profile has what is left of the derivative to a maximum of all keys in bfloat16."""
    given = arrays(17, dtype, 2, 96, 96, 16)
    given = dump_gradients(name, *given, dtype, block=block, **options)
    verdict = verify(**given)
    assert verdict.verdict == "PASS", str(verdict)
    if dtype == "bfloat16" and "causal" in options and block > 96:
        others = [x for x in BACKWARD_PROFILES[True] if not x.endswith("maximum")]
        assert verify(**given, profile=others).parts["dq"].verdict == "FAIL"


@pytest.mark.sweep(5)
@pytest.mark.parametrize(("scale", "seed"), [(1e-6, 6), (1e-5, 0), (1e-4, 2)])
def test_weights_over_a_running_maximum_that_are_1_after_rounding(scale, seed):
    """Their errors are known and no noise: along the scale and the factor of dv, p below 4e-10."""
    given = arrays(seed, "bfloat16", 2, 40, 40, 16)
    given = dump_gradients("flash-maximum", *given, "bfloat16", scale=scale)
    verdict = verify(**given, profile="flash-maximum")
    assert verdict.verdict != "FAIL", str(verdict)
    given["dv"] = FORMATS["bfloat16"].round(1.02 * given["dv"])
    assert verify(**given, profile="flash-maximum").verdict == "FAIL"


def test_maxima_that_last_have_what_the_keys_until_a_larger_one_leave():
    """Residuals of a row of four keys, of which the first, the third and the last are largest."""
    rng = np.random.default_rng(3)
    q, k = np.ones((1, 1)), np.array([[0.0], [-1.0], [1.0], [4.0]])
    v, g = rng.standard_normal((4, 8)), rng.standard_normal((1, 8))
    of = gradient("dq", q, k, v, g)
    roundings = PROFILES["math-maximum"].roundings("float32")
    [(_, found)] = of.gradient.saved((), roundings)
    left = found.residuals[0]
    assert left.keys.tolist() == [0, 2, 3]
    first, second, last = left.variances
    assert 0 < first < second < last
    # With later keys gone the last one left has all that sums have; others are as they were.
    short = gradient("dq", q, k[:3], v[:3], g)
    assert short.gradient.saved((), roundings)[0][1].residuals[0].keys.tolist() == [0, 2]
    variances, bounds = left.part(slice(0, 1), slice(2, 4))
    np.testing.assert_array_equal(variances, [[second, last]])
    assert np.all(bounds > np.sqrt(variances))


def test_no_heads_and_no_tokens():
    for shape in ((0, 5, 4), (2, 0, 4)):
        x = np.zeros(shape, np.float32)
        verdict = verify(**dict.fromkeys(("q", "k", "v", "out", "d_out", *NAMES), x))
        assert verdict.verdict == "UNDERPOWERED"


@pytest.mark.long("32", "upcast", "eager")
@pytest.mark.parametrize("name", ["math", "flash-32", "upcast", "eager"])
def test_one_profile_explains_all_gradients(name):
    shape = (2, 64, 64, 32) if name == "math" else (4, 128, 128, 32)
    verdict = verify(**dump_gradients(name, *arrays(12, "bfloat16", *shape), "bfloat16"))
    assert {verdict.parts[x].profile for x in NAMES} == {name}


def test_maxima_of_queries_that_see_no_key():
    """The first block of queries is before all keys."""
    given = arrays(0, "float32", 1, 300, 8, 4)
    given = dump_gradients("math", *given, "float32", causal=True)
    assert verify(**given, profile="math-maximum").verdict == "PASS"


@pytest.mark.parametrize("name", ["flash", "eager", "math-maximum"])
@np.errstate(all="ignore")
def test_queries_are_saved_block_by_block_in_any_order(name):
    """No other block is computed, and each is what it is if all are."""
    q, k, v, g = np.random.default_rng(11).standard_normal((4, 300, 5))
    head = problems.pose_arrays(q, k, v, causal=True).head(())
    back, roundings = BackwardHead(head, g, None), PROFILES[name].roundings("bfloat16")
    found = save_queries(back, roundings, slice(290, 300))
    assert [x is None for x in found.weights] == [True, False]
    assert not found.lse[:256].any()
    found = save_queries(back, roundings, slice(3, 4), saved=found)
    for x, y in zip(found, save_queries(back, roundings), strict=True):
        if isinstance(y, np.ndarray):
            np.testing.assert_array_equal(x, y)


@np.errstate(all="ignore")
@pytest.mark.parametrize("name", ["math", "eager", "flash-maximum", "flash-fast-by-head"])
def test_laws_of_all_gradients_are_found_together(name):
    """Each as it is found alone, from two blocks of queries of heads that share keys."""
    q, k, v, g = arrays(31, "bfloat16", 4, 260, 20, 4, shared=2)
    shapes, roundings = {"dq": q.shape, "dk": k.shape}, PROFILES[name].roundings("bfloat16")
    forward = problems.pose_arrays(q, k, v, scale=0.03, sinks=np.linspace(-1, 1, 4))
    posed = problems.pose_gradients(
        forward, shapes | {"dv": v.shape}, lambda x: g[x], None, "bfloat16"
    )
    of_keys, found = posed["dk"].gradient, 0
    for index, heads in of_keys.heads.items():
        saved = of_keys.saved(index, roundings)
        for of, number, i, law in analyse_gradients(saved, roundings, NAMES):
            alone = posed[of].analyse(heads[number] if of == "dq" else index, roundings, i)
            np.testing.assert_equal(law._asdict(), alone._asdict())
            found += law.out.size
    assert found == sum(x.size for x in (q, k, v))
