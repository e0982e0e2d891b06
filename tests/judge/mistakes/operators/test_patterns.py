"""What weights count by: rank, size, score, place. Each is named, and no other is."""

from functools import partial

import numpy as np
import pytest

from refattn.judge.mistakes.causes.sampled import Rows
from refattn.judge.mistakes.causes.wrong_rows import Sampled
from refattn.judge.mistakes.operators.patterns import list_cuts, list_patterns, list_row_scales
from refattn.judge.rounding import problems
from refattn.judge.rounding.formats import FORMATS
from refattn.judge.verification.findings import Numbers
from tests.judge.mistakes.causes.kernels import named

HEADS, N, M, D = 2, 64, 80, 32
BF16 = FORMATS["bfloat16"].round
Q, V = (BF16(x) for x in np.random.default_rng(90).standard_normal((2, HEADS, M, D)))
Q, K = Q[:, :N], BF16(np.random.default_rng(91).standard_normal((HEADS, M, D)))
S = Q @ np.swapaxes(K, -1, -2) / D**0.5
ROW, J = np.arange(N)[:, None], np.arange(M)
P = np.exp(S) / np.sum(np.exp(S), -1, keepdims=True)
NORMS = np.sum(K * K, -1)[:, None]
TABLE = np.random.default_rng(92).standard_normal((HEADS, N + M))
WINDOW = {"causal": True, "window": (15, 0)}


def keep(shown, in_sum=False):
    w = P * shown
    return w @ V / (1 if in_sum else np.sum(w, -1, keepdims=True))


def weigh(factor):
    return keep(np.exp(factor) * np.ones_like(P))


LARGEST = np.argsort(np.argsort(-P, -1), -1)
AHEAD = J - ROW - (M - N)
CASES = {
    "rank": (keep(LARGEST < 12), {}, "only the 12 largest scores of each row count"),
    "weight": (keep(P > 0.01), {}, "weights below 0.01 of their sum are left out"),
    "in the sum": (keep(P > 0.01, True), {},
        "weights below 0.01 of their sum are left out, but count in the sum"),
    "score": (keep(S > -0.5), {}, "scores below -0.5"),
    "distance": (keep(np.exp(S - np.max(S, -1, keepdims=True)) > np.exp(-3)), {},
        "scores more than 3 below the largest"),
    "key norms": (weigh(-0.05 * NORMS), {}, "-0.05 times |k|^2 is added to the scores"),
    "keys": (keep(np.where((J < 8) | (J > 75), 2, np.where(J == 40, 0, 1))), {},
        "keys 0 to 7, 76 to 79 count twice and key 40 does not count"),
    "dilated": (keep((AHEAD <= 0) & (AHEAD >= -30) & (AHEAD % 2 == 0)), WINDOW,
        "keys 1 to 15 in steps of 2 before the query do not count and "
        "keys 16 to 30 in steps of 2 before the query are seen"),
    "slopes": (weigh(np.array([-0.02, -0.04])[:, None, None] * (ROW - J)), {},
        "0.02 times j is added to the scores in head 0; 0.04 times j is added to the"),
    "table": (weigh(np.where(AHEAD > -30, 0, TABLE[:, N + J - ROW])), {},
        "a bias by (i - j) is added to the scores, -2.8 to 3.3, where that is 30 to 47, 49"),
}  # fmt: skip


def found(out, listing, **options):
    problem = problems.pose_arrays(Q, K, V, **options)
    rows, every = np.arange(N), np.ones(N, bool)
    got = [Sampled(Rows((h,), rows, J), BF16(out[h]), None, every, every) for h in range(HEADS)]
    return [*listing(problem, got, 2.0**-9)]


@pytest.mark.parametrize("case", CASES)
def test_what_weights_count_by_is_named(case):
    out, options, words = CASES[case]
    first = [y for x in (list_cuts, list_patterns) for y in found(out, x, **options)]
    assert words in first[0].text
    for h in range(HEADS):
        again = first[0].result(Rows((h,), np.arange(N), J)).out
        np.testing.assert_allclose(again, out[h], rtol=0, atol=2.0**-7 * np.max(np.abs(out)))


@pytest.mark.parametrize(
    "out",
    [
        np.mean(P, 0) @ V,  # weights of another head, too
        P @ V + Q / 8,
        keep(np.ones_like(P)) * 1.1,
        keep(np.random.default_rng(93).random(P.shape) < 0.8),  # dropped by chance
    ],
    ids=["heads", "added", "factor", "dropout"],
)
def test_what_is_no_pattern_is_not_named(out):
    assert not [y for x in (list_cuts, list_patterns) for y in found(out, x)]


def given(out, options):
    return {"q": Q, "k": K, "v": V, "out": BF16(out)} | options


test_verdicts_name_what_weights_count_by = named(
    {x: (partial(given, *y[:2]), y[2]) for x, y in CASES.items()}
)


SCALES = {
    "tile": (np.where((ROW >= 16) & (ROW < 32), 0.5, 1.0), "0.5 times in queries 16 to 31"),
    "line": (1 / (1 + ROW / 64), "scores of query i are 1 / (1 + 0.0156 i) times as large"),
    "chance": (
        np.exp(0.3 * np.random.default_rng(94).standard_normal((HEADS, N, 1))),
        "scores have a factor of their own in each wrong row, 0.4",
    ),
}


@pytest.mark.parametrize("case", SCALES)
def test_factors_of_the_scores_of_rows(case):
    factor, words = SCALES[case]
    w = np.exp(factor * S)
    out = BF16(w @ V / np.sum(w, -1, keepdims=True))
    wrong = np.any(np.abs(out - keep(1.0)) > 2.0**-5, -1)
    got = [
        Sampled(Rows((h,), np.flatnonzero(x), J), out[h][x], None, x[x], x[x])
        for h, x in enumerate(wrong)
    ]
    problem = problems.pose_arrays(Q, K, V)
    numbers = Numbers(lambda at: out[at], "bfloat16")
    (found_one,) = list_row_scales(problem, got, 2.0**-9, numbers)
    assert words in found_one.text
    other = [x._replace(got=x.got + 2.0**-4 * Q[x.rows.at][x.rows.queries]) for x in got]
    assert not [*list_row_scales(problem, other, 2.0**-9, numbers)]
