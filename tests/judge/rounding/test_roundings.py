"""What single roundings do, made by the formats themselves: variances are met, bounds are reached.

Each draw has its seed in its name, and a right law fails with probability 1e-9 at most.
"""

import math

import numpy as np
import pytest
from scipy import stats

from refattn.judge.rounding import PROFILES, Profile, predict, problems
from refattn.judge.rounding.formats import FORMATS
from refattn.judge.rounding.roundings import RMS, WORST, sum_error
from refattn.judge.rounding.softmax import analyse_softmax
from tests.judge.rounding import slow
from tests.judge.rounding.rounded import (
    ALARM,
    EXACT,
    Case,
    Nearest,
    Noise,
    Steps,
    Stochastic,
    gradient,
    interval,
    stepwise,
)

DRAWS = 100_000


@pytest.mark.parametrize("seed", [1])
@pytest.mark.parametrize("name", ["bfloat16", "float16", "float8_e4m3fn"])
def test_a_rounding_to_nearest_is_uniform(name, seed):
    """Half of the errors are beyond a quarter of the spacing, and the mean square is h^2 / 12."""
    to, x = FORMATS[name], 2 ** np.random.default_rng(seed).uniform(-3, 3, DRAWS)
    error = (to.round(x) - x) / to.spacing(x)
    far = int(np.sum(np.abs(error) > 0.25))
    least, most = (stats.binom.ppf(p, DRAWS, 0.5) for p in (ALARM / 2, 1 - ALARM / 2))
    assert least <= far <= most
    off = math.sqrt(math.log(2 / ALARM) / (2 * DRAWS)) / 4  # Hoeffding: squares are up to 1 / 4
    assert abs(np.mean(error**2) - slow.uniform(1.0)) < off
    relative = (to.round(x) - x) / x / to.unit
    assert abs(np.mean(relative**2) - slow.BENFORD) < 4 * off
    assert math.isclose(RMS**2, slow.BENFORD, rel_tol=1e-6)
    assert math.isclose((WORST * RMS) ** 2, slow.EDGE)


STEPS = {
    "scores": (Profile(scores="storage", **EXACT), "scores"),
    "weights": (Profile(weights="storage", **EXACT), "weights"),
    "shares": (Profile(weights="storage", normalised=True, **EXACT), "weights"),
    "exponentials": (Profile(**EXACT | {"softmax": "storage"}), "softmax"),
    "result": (Profile(**EXACT | {"out": "storage"}), "out"),
}
OPTIONS = {
    "plain": {"scale": 0.3},
    "all": {"softcap": 5.0, "bias": np.array([[0.5, -0.25, 1.0]]), "sinks": np.asarray(0.75)},
}


@pytest.mark.long("noise", "stochastic", "all")
@pytest.mark.parametrize("seed", [2])
@pytest.mark.parametrize("kind", ["nearest", "noise", "stochastic"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("step", STEPS)
def test_each_rounding_has_its_variance(step, options, kind, seed):
    """That of uniform errors, and twice that where roundings are stochastic."""
    profile, name = STEPS[step]
    rng, to = np.random.default_rng(seed), FORMATS["bfloat16"]
    q = rng.standard_normal((DRAWS, 2))
    k, v = np.array([[1.0, 0.5], [-0.7, 1.1], [0.3, -1.3]]), np.array([[1.0], [-1.5], [2.25]])
    given = dict(OPTIONS[options])
    if step == "exponentials":  # of which no other rounding matters: small gaps, and a mean near 0
        q, k, v = rng.uniform(0.03, 0.06, (DRAWS, 1)), np.array([[0.0], [-1.0]]), np.eye(2)
        v = v @ [[1.0], [-1.0]]
        given = {"scale": 1.0}
    case = Case(q, k, v, **given)
    if case.bias is not None:
        case = case._replace(bias=np.broadcast_to(case.bias, (DRAWS, 3)))
    problem = problems.pose_arrays(q, k, v, **case.options)
    fine = FORMATS["float64"]._replace(digits=52)  # no result in pairs, which takes long
    roundings = profile.roundings("bfloat16")._replace(accumulate=fine)
    rows = analyse_softmax(problem.head(()), roundings, slice(0, DRAWS))
    made = {"nearest": Nearest(to), "noise": Noise(to, rng), "stochastic": Stochastic(to, rng)}
    steps = Steps(normalised=step == "shares")._replace(**{name: made[kind]})
    known = np.isfinite(rows.std)
    assert known.mean() > 0.95
    z = ((stepwise(case, steps) - rows.out) / rows.std)[known]
    lower, upper = interval(z.size)
    if kind == "stochastic" and options == "all":  # with the bias, sums are halves of a spacing
        lower = 0.85
    assert lower < np.mean(z * z) / (2 if kind == "stochastic" else 1) < upper


@pytest.mark.parametrize("run", [1, 50, 2**40])
def test_a_sum_that_is_rounded_up_each_time_is_within_gamma(run):
    """Terms of a little over half a spacing, in runs, of which the sums are added."""
    to = FORMATS["bfloat16"]
    roundings = PROFILES["math"]._replace(run=run, accumulate="bfloat16").roundings("bfloat16")
    half = to.spacing(1.0) / 2 * (1 + 2.0**-20)
    terms, total, part = [1.0] + [half] * 100, 0.0, 0.0
    for t, x in enumerate(terms):
        part = float(to.round(part + x))
        if t % run == run - 1 or t == len(terms) - 1:
            total, part = float(to.round(total + part)), 0.0
    error = abs(total / sum(terms) - 1)
    found = sum_error(roundings, len(terms), 0)
    assert 0.1 < error <= found == pytest.approx(slow.gamma(roundings, len(terms), 0))


def bounds_of(kind, values, profile):
    """The result and its bound, of two keys of which the values are the same in each column."""
    q, k = np.array([[0.5], [1.0]]), np.array([[0.25], [1.0]])
    v = np.broadcast_to(values, (2, len(values)))
    if kind in ("softmax", "linear"):
        given = {"feature_map": np.exp} if kind == "linear" else {}
        found = predict(q, k, v, dtype="float64", profile=profile, **given)
        return found.out, found.bound
    if kind == "dv":  # p g, of one query
        q, g = q[:1], 2 * values[None]
        given = (q, 0 * k, np.zeros((2, len(values))))
    else:  # c p (g v - D) k
        g, given = np.ones((1, 1)), (np.ones((1, len(values))), np.stack([0 * values, values]) * 4)
        given = (*given, np.array([[0.0], [1.0]]))
        if kind == "dk":
            given = (given[1][1:], 0 * given[1], given[2])
    of = gradient(kind, *given, g, scale=1.0)
    rows = of.analyse((), profile.roundings("bfloat16"), slice(0, of.shape[0]))
    return rows.out, rows.bound


@pytest.mark.parametrize("kind", ["softmax", "linear", "dq", "dk", "dv"])
def test_bounds_have_the_spacing_where_a_result_may_be(kind):
    """Results just below a power of 2, that errors may take beyond it: spacings are wider."""
    to, values = FORMATS["bfloat16"], 1 - 2.0**-6 * np.arange(1, 400) / 400
    profile = Profile(weights="float8_e4m3fn", d_scores="float8_e4m3fn", out=None)
    out, before = bounds_of(kind, values, profile)
    _, bound = bounds_of(kind, values, profile._replace(out="bfloat16"))
    reach = np.abs(out) + before
    np.testing.assert_allclose(bound, before + to.spacing(reach) / 2, rtol=1e-12)
    beyond = to.round(reach) - np.abs(out)
    assert np.all(beyond <= bound)
    assert np.any(beyond > before + to.spacing(out) / 2)
