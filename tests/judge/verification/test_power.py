"""Simulations of the tests of a trial: levels are kept, and sizes that are said to be seen are.

Each draw has its seed in its name; a right level fails with probability 1e-9 at most.
"""

import math

import numpy as np
import pytest
from scipy import stats

from refattn.judge.rounding import PROFILES, problems
from refattn.judge.rounding.covariance import bound_covariance
from refattn.judge.rounding.formats import FORMATS
from refattn.judge.rounding.roundings import BIAS
from refattn.judge.verification.directions import SCORE_CHANGES, list_tangents, sum_factor
from refattn.judge.verification.evidence import Evidence
from refattn.judge.verification.findings import Numbers
from refattn.judge.verification.looks import Look
from refattn.judge.verification.trial import attempt
from tests.judge.rounding.rounded import ALARM

ALPHA = 1e-6
ALL = slice(0, 64)
CHANGES = {"scale": SCORE_CHANGES["scale"]}


def of_arrays(seed, heads, n, m, d=3, **options):
    rng, to = np.random.default_rng(seed), FORMATS["bfloat16"].round
    q, k, v = (to(rng.standard_normal((heads, *x))) for x in ((n, d), (m, d), (m, 2)))
    return rng, problems.pose_arrays(q, k, v, **options), (q, k, v)


def tried(problem, profile, out, alpha=ALPHA):
    weights = np.ones((math.prod(problem.lead), problem.shape[0]))
    numbers = Numbers(out.__getitem__, "float32")
    return attempt(problem, "bfloat16", profile, "flash", numbers, alpha, Look(weights))


@pytest.mark.parametrize("seed", [1])
@pytest.mark.parametrize("name", ["factor", "scale", "epsilon"])
def test_a_defect_of_the_detectable_size_is_seen_half_of_the_times(name, seed):
    """What is common to all errors goes against the defect, as it may; errors are Gaussian.

    A little less than half: two tests are tried, and the defect is in the sum of the squares.
    """
    profile, draws, n = PROFILES["flash"], 400, 1000
    rng, problem, _ = of_arrays(seed, 1, n, 8)
    rows = problem.analyse((0,), profile.roundings("bfloat16"), slice(0, n), CHANGES)
    one = tried(problem, profile, rows.out[None])
    steep = dict(list_tangents(problem, (0,), slice(0, n), rows))[name]
    g = np.sum(np.square(steep / rows.std), -1)
    slack = np.sum(np.abs(steep) * rows.slack / rows.std**2, -1)
    t = one.detectable[name] * g - slack + np.sqrt(g) * rng.standard_normal((draws, n))
    zero = np.zeros_like(t)
    p = Evidence.of(t, zero, g + zero, slack + zero, np.ones(n)).test().log_p
    seen = int(np.sum(p <= math.log(ALPHA / len(one.tests))))
    far, need = (math.sqrt(2 * math.log(x * len(one.tests) / ALPHA)) for x in (2, 4))
    chance = stats.norm.cdf(far / math.sqrt(1 + far**2 * np.sum(g * g) / np.sum(g) ** 2) - need)
    assert 0.2 < chance < 0.5
    least, most = (stats.binom.ppf(x, draws, chance) for x in (ALARM / 2, 1 - ALARM / 2))
    assert least <= seen <= most


@pytest.mark.parametrize("name", ["math", "eager"])
def test_a_factor_of_few_rows_is_seen_by_the_variance_of_their_sum(name):
    """The signs of four rows are no evidence, but nine standard deviations of their sum are."""
    profile, at = PROFILES[name]._replace(out=None), slice(44, 48)
    _, problem, _ = of_arrays(5, 2, 64, 40)
    rows = problem.analyse((1,), profile.roundings("bfloat16"), at, CHANGES)
    out = np.stack([problem.analyse((h,), profile.roundings("bfloat16"), ALL).out for h in (0, 1)])
    about = problem, (1,), at, rows
    known = sum_factor(*about, Numbers(out.__getitem__, "float32"), profile.roundings("bfloat16"))
    weights = rows.out / np.square(rows.std)
    covariances = bound_covariance(problem.head((1,)), profile.roundings("bfloat16"), at, rows)
    expected = np.einsum("ic,icd,id", weights, covariances, weights)
    assert (known.t, known.variance) == (0, pytest.approx(expected))
    size = (9 * math.sqrt(known.variance) + known.slack) / known.g
    found = {}
    for number, factor in enumerate((0, size)):
        wrong = out.copy()
        wrong[1, at] *= 1 + factor
        found[number] = {x.name: x.adjusted for x in tried(problem, profile, wrong).tests}
    assert found[0].get("factor of few rows", 1.0) == 1.0
    assert found[1]["factor of few rows"] < ALPHA < found[1]["factor of a tile"]


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("causal", [False, True])
def test_errors_that_kernels_have_in_common_are_no_evidence(causal, sign):
    """Of keys of which the value is 0 neither: what they are missed by is in the mean only."""
    profile = PROFILES["math"]._replace(out=None)
    _, _, (q, k, v) = of_arrays(3, 2, 200, 5)
    v = np.abs(v) * (np.arange(5) > 0)[:, None]
    problem = problems.pose_arrays(q, k, v, causal=causal)
    roundings = profile.roundings("bfloat16")
    rows = [problem.analyse((h,), roundings, slice(0, 200), CHANGES) for h in range(2)]
    out = np.stack([x.out + sign * (x.slack - x.of_weights) for x in rows])
    for h, x in enumerate(rows):  # of exponentials, those that move the result most along a factor
        s = problem.scale * q[h] @ k[h].T
        p = np.where(np.tri(200, 5, -195) if causal else True, np.exp(s - x.lse[:, None]), 0.0)
        apart = v[h] - x.out[:, None, :]
        toward = np.sign(np.sum(apart * (x.out / x.std**2)[:, None, :], -1))
        size = np.where(p == np.max(p, -1, keepdims=True), 1.0, BIAS) * roundings.accumulate.unit
        out[h] += sign * np.sum((toward * size * p)[:, :, None] * apart, 1)
    for x in tried(problem, profile, out).tests:
        assert x.p_value == pytest.approx(1.0), x.name


def test_the_same_roundings_in_all_rows_are_no_evidence():
    """Queries that differ by less than a rounding, and weights over a maximum that was before."""
    to = FORMATS["bfloat16"]
    _, _, (_, k, v) = of_arrays(5, 1, 1, 9)
    q = 1 + 1e-6 * np.arange(300)[None, :, None] * np.ones(3)
    problem = problems.pose_arrays(q, k, v)
    s = 3**-0.5 * q[0] @ k[0].T
    w = np.exp(s - np.max(s, -1, keepdims=True))
    out = to.round(w * 1.4) / 1.4 @ v[0] / np.sum(w, -1, keepdims=True)
    found = tried(problem, PROFILES["flash"]._replace(out=None), out[None])
    assert not found.rejected(ALPHA)
    assert (found.known, found.powered) == (0, False)
