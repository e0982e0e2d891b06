"""Which rows are looked at: all heads, both ends, a fixed draw; of small problems all."""

from itertools import pairwise

import numpy as np
import pytest

from refattn import naive, softmax_attention, vjp
from refattn.judge.rounding import PROFILES
from refattn.judge.rounding.problems import pose_arrays, pose_gradients
from refattn.judge.verification import judging, looks, verify
from refattn.judge.verification.findings import Numbers, Part
from refattn.judge.verification.judging import judge, judge_all
from tests.judge.rounding.rounded import BF16


def posed(heads=3, n=1000, m=40):
    rng = np.random.default_rng(0)
    q, k, v = (BF16(rng.standard_normal((heads, x, 4))) for x in (n, m, m))
    return (q, k, v), pose_arrays(q, k, v)


@pytest.fixture
def tried(monkeypatch):
    """How many rows each attempt to explain numbers had."""
    rows, attempt = [], judging.attempt

    def counted(problem, *rest):
        rows.append(looks.count_rows(problem.items()))
        return attempt(problem, *rest)

    monkeypatch.setattr(judging, "attempt", counted)
    return rows


def test_small_problems_are_looked_at_as_a_whole():
    _, problem = posed()
    assert looks.choose_blocks(problem) == tuple(problem.items())
    assert looks.split_directions(looks.choose_blocks(problem), 40) == (tuple(problem.items()), ())
    assert looks.choose_screened(problem) == ()


@pytest.mark.parametrize("share", [0.3, 0.8])
def test_every_head_gives_both_ends_and_rows_between(share, monkeypatch):
    _, problem = posed()
    monkeypatch.setattr(looks, "MOST_PAIRS", int(share * 3 * 1000 * 40))
    found = looks.choose_blocks(problem)
    assert found == looks.choose_blocks(problem)  # the draw is fixed
    assert looks.choose_blocks(problem, everything=True) == tuple(problem.items())
    assert looks.count_rows(found) / 3000 == pytest.approx(share, abs=0.1)
    for head in range(3):
        rows = [i for x, i in found if x == (head,)]
        assert (rows[0].start, rows[-1].stop) == (0, 1000)
        assert all(x.stop <= y.start for x, y in pairwise(rows))
    between = [{i.start for x, i in found if x == (h,)} for h in range(3)]
    assert between[0] != between[1]


@pytest.mark.usefixtures("verdict_alone")
def test_what_is_seen_of_part_of_the_rows_is_said(monkeypatch):
    """A wrong scale in all heads fails, and one of the rows that are not looked at does not."""
    (q, k, v), problem = posed()
    monkeypatch.setattr(looks, "MOST_PAIRS", 3 * 1000 * 12)
    rows = [i for _, i in looks.choose_blocks(problem)]
    left = next(x for x in range(1000) if not any(i.start <= x < i.stop for i in rows))
    out = BF16(naive.softmax_attention(q, k, v))
    given = {"q": q, "k": k, "v": v, "dtype": "bfloat16", "profile": "math"}
    found = verify(**given, out=out)
    assert found.verdict == "PASS"
    assert 0.2 < found.looked_at < 0.4
    assert f"tested {found.looked_at:.1%} of the rows" in str(found)
    assert verify(**given, out=out, scale=0.51).verdict == "FAIL"
    out[:, left] = 0
    assert verify(**given, out=out).verdict == "PASS"
    whole = verify(**given, out=out, everything=True)
    assert (whole.verdict, whole.looked_at) == ("FAIL", 1.0)


def test_gradients_of_some_queries_are_those_of_all():
    (q, *_), problem = posed(2, 600)
    g = BF16(np.random.default_rng(1).standard_normal(q.shape))
    of = pose_gradients(problem, {"dq": q.shape}, g.__getitem__, None, "bfloat16")["dq"]
    roundings = PROFILES["flash"].roundings("bfloat16")
    i = slice(320, 384)
    some = of.looked_at([((1,), i)]).analyse((1,), roundings, i)
    for x, y in zip(some[:8], of.analyse((1,), roundings, i)[:8], strict=True):
        np.testing.assert_array_equal(x, y)


def test_the_loudest_blocks_are_chosen():
    _, problem = posed(2, 512)
    squares = np.zeros((2, 512))
    squares[1, 300] = 9.0
    assert looks.choose_loud(tuple(problem.items()), squares, problem) == ()
    wide = problem._replace(shape=(512, 2**14, 4))
    assert looks.choose_loud(tuple(problem.items()), squares, wide) == (((1,), slice(256, 512)),)
    merged = np.sum(squares, -1, keepdims=True)  # of rows that have roundings in common
    assert looks.choose_loud(tuple(problem.items()), merged, wide) == ()


@pytest.mark.usefixtures("verdict_alone")
def test_a_profile_that_some_rows_rule_out_is_not_tried_on_all(tried, monkeypatch):
    (q, k, v), problem = posed(2, 1024)
    monkeypatch.setattr(looks, "_SCREENED_PAIRS", 256 * 40)
    out = BF16(1.02 * naive.softmax_attention(q, k, v))
    found = judge(problem, Numbers(out.__getitem__, "bfloat16"), "bfloat16", ("flash", "upcast"))
    assert found.verdict == "FAIL"
    assert tried.count(2048) == 1  # that whose tests are told
    assert {*found.trials} == {"flash", "upcast"}
    assert max(found.trials.values()) < 1e-6


@pytest.mark.long
@pytest.mark.parametrize("where", ["nowhere", "everywhere", "in a row"])
def test_numbers_that_are_wrong_everywhere_are_measured_by_some_rows(where, monkeypatch):
    """A wrong row is looked for in all, and a right file has the same tests as without a glance."""
    (q, k, v), problem = posed(2, 2048)
    monkeypatch.setattr(looks, "_SCREENED_PAIRS", 256 * 40)
    monkeypatch.setattr(looks, "ALL_DIRECTIONS", 1024 * 40)
    out = BF16((1.02 if where == "everywhere" else 1.0) * naive.softmax_attention(q, k, v))
    if where == "in a row":
        out[1, 1000] = 0
    judged = problem, Numbers(out.__getitem__, "bfloat16"), "bfloat16", ("math", "upcast")
    found, whole = judge(*judged), judge(*judged, everything=True)
    assert found.verdict == whole.verdict == ("PASS" if where == "nowhere" else "FAIL")
    assert found.looked_at == (0.25 if where == "everywhere" else 1.0)
    assert ("tested 25.0% of the rows" in str(found)) is (where == "everywhere")
    if where == "nowhere":
        monkeypatch.setattr(judging, "choose_glanced", lambda problem: ())
        assert found.tests == judge(*judged).tests


@pytest.mark.long
def test_wrong_gradients_are_tried_on_all_rows_once(tried):
    """Other profiles are ruled out by some rows of one head."""
    (q, k, v), problem = posed(2, 1024)
    g = BF16(np.random.default_rng(1).standard_normal(q.shape))
    dq = vjp(softmax_attention, q, k, v)[1](g).q
    of = pose_gradients(problem, {"dq": q.shape}, g.__getitem__, None, "bfloat16")["dq"]
    for factor, verdict in ((1.0, "PASS"), (1.005, "FAIL")):
        got = BF16(factor * dq)
        part = {"dq": Part(of, Numbers(got.__getitem__, "bfloat16"))}
        found = judge_all(part, "bfloat16", ("math", "flash", "upcast"), hardware="ieee")
        assert found.verdict == verdict
        assert tried.count(2048) == 1
        assert (512 in tried) is (verdict == "FAIL")  # a glance, which right rows are spared
        tried.clear()
