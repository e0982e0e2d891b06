"""`same`: two outputs of split kernels in bfloat16, of which some merge their parts wrongly."""

import json
import math

import numpy as np
import pytest

import refattn
from refattn.judge import same
from refattn.judge.rounding.problems import pose_arrays
from refattn.judge.runs.comparing import KernelRun, compare_runs
from refattn.judge.runs.matching import mark_inputs, match_rows
from refattn.judge.verification.findings import Numbers, Part
from refattn.judge.verification.joint import RowBox
from tests.judge.rounding.rounded import FORMATS

f32 = np.float32
bf16 = FORMATS["bfloat16"].round
N = 64


Q, K, V = (bf16(x[0, :, :N]) for x in refattn.load_sample())
GIVEN = {"q": Q, "k": K, "v": V, "dtype": "bfloat16"}


def split_kv(splits, arrays=(Q, K, V), *, combine="right", seen=None):
    """Decode as kernels with split keys do: a softmax of each split, merged by their lse.

    It may forget to weigh the splits of a row ("stale"), or read the row before ("shifted").
    """
    (q, k, v), o, lse = arrays, [], []
    for part in np.array_split(np.arange(N), splits):
        s = (q.astype(f32) @ k[:, part].astype(f32).swapaxes(-1, -2)) * f32(q.shape[-1] ** -0.5)
        if seen is not None:
            s = np.where(seen[..., part], s, f32(-np.inf))
        top = np.maximum(s.max(-1, keepdims=True), f32(-1e30))
        p = np.exp(s - top)
        total = p.sum(-1, keepdims=True)
        some = np.where(total > 0, total, f32(1))
        o.append(bf16(p).astype(f32) @ v[:, part].astype(f32) / some)
        lse.append(np.where(total > 0, top + np.log(some), f32(-np.inf)))
    weight = np.exp(np.stack(lse) - np.logaddexp.reduce(lse))
    if combine == "stale":
        weight[:, 1, 3] = 1 / splits
    if combine == "shifted":
        weight[:, 2, 17] = weight[:, 2, 16]
    return bf16(np.sum(weight * np.stack(o), 0))


def test_no_bit_differs():
    out = split_kv(4)
    found = same(out, out, **GIVEN, bitwise=True)
    assert (found.verdict, found.equal, found.compared, found.rows) == ("PASS", True, 4 * N, ())
    assert str(found).startswith("PASS: bitwise equal in all 256 rows with equal inputs")


def test_other_splits_are_two_runs_of_one_right_kernel():
    a, b = (split_kv(x) for x in (2, 7))
    found = same(a, b, **GIVEN)
    assert (found.verdict, found.equal, found.rows, found.wrong) == ("PASS", False, (), "")
    assert 0 < found.differing <= found.compared
    assert abs(found.worst.got - found.worst.exact) <= found.worst.allowed
    exact = same(a, b, **GIVEN, bitwise=True)
    assert exact.verdict == "FAIL"
    assert "allows none" in str(exact)
    text = json.loads(found.to_json())
    assert (text["verdict"], text["a"]["verdict"]) == ("PASS", "PASS")


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("combine", "at"), [("stale", (1, 3)), ("shifted", (2, 17))])
def test_a_wrong_merge_is_named(combine, at):
    given = GIVEN | {"explain": False}
    a, b = split_kv(4), split_kv(4, combine=combine)
    found = same(a, b, **given)
    assert (found.verdict, found.wrong, found.differing) == ("FAIL", "B", 1)
    assert [x for x, _ in found.rows] == [at]
    assert found.worst.where[:2] == at
    assert f"head {at[0]}, row {at[1]}" in str(found)
    assert same(b, a, **given).wrong == "A"


def test_rows_are_matched_by_what_they_are_computed_of():
    """Batch members are added, queries, keys that nobody sees; heads are in another order."""
    causal = np.tril(np.ones((N, N), bool))
    out = split_kv(4, seen=causal)

    def part(out, q=Q, k=K, v=V):
        problem = pose_arrays(q, k, v, causal=True)._replace(storage="bfloat16")
        return Part(problem, Numbers(out.__getitem__, "bfloat16"))

    def compared(other, whole):
        runs = KernelRun(one, "bfloat16"), KernelRun(other, "bfloat16")
        return compare_runs(runs, 1e-6, whole, ())

    one, turned = part(out), part(out[::-1], Q[::-1], K[::-1], V[::-1])
    match = match_rows(one, turned)
    assert np.array_equal(match.partner[0], 3 * N + np.arange(N))
    assert not match.differs.any()
    shorter = part(out[:, :40], *(x[:, :40] for x in (Q, K, V)))
    match = match_rows(one, shorter)
    assert np.array_equal(match.partner >= 0, np.broadcast_to(np.arange(N) < 40, (4, N)))
    assert not match.only_b.any()
    # A key that is another one is seen by the queries from there on.
    moved = part(out, k=np.where(np.arange(N)[:, None] == 30, 0, K))
    same_marks = mark_inputs(one.problem) == mark_inputs(moved.problem)
    assert np.array_equal(same_marks, np.broadcast_to(np.arange(N) < 30, (4, N)))
    found = compared(shorter, True)
    assert found.verdict == "PASS"
    assert found.added == "queries 40 to 63 of A"
    with pytest.raises(ValueError, match="equal inputs"):
        compared(part(out, Q + 1), False)


@pytest.mark.long
def test_outputs_that_pass_alone_may_be_too_far_apart():
    """One row of each is off by as much, in opposite directions."""
    prediction = refattn.rounding.predict(Q, K, V, dtype="bfloat16", profile="flash")
    rng = np.random.default_rng(0)
    sign = np.where(rng.random(Q.shape[-1]) < 0.5, -1.0, 1.0)
    right, words = split_kv(1), set()
    for size in (1.0, 2.0, 2.5, 3.0, 3.5, 4.0, 8.0):
        a, b = right.copy(), right.copy()
        a[1, 3] = bf16(prediction.out[1, 3] + size * prediction.std[1, 3] * sign)
        b[1, 3] = bf16(prediction.out[1, 3] - size * prediction.std[1, 3] * sign)
        found = same(a, b, **GIVEN, profile="flash", explain=False)
        words.add((found.verdict, found.wrong))
    assert words >= {("PASS", ""), ("FAIL", ""), ("FAIL", "A and B")}


def test_covariances_of_a_difference_add_up():
    """Mean squares of Gaussian errors are 1, and without the sum they would be 2."""
    rng, rows, columns = np.random.default_rng(1), 4000, 8
    factors = rng.standard_normal((2, columns, columns))
    boxes = []
    for factor in factors:
        errors = rng.standard_normal((rows, columns)) @ factor.T
        none, covariance = (
            np.zeros((rows, columns)),
            np.broadcast_to(factor @ factor.T, (rows, 8, 8)),
        )
        boxes.append(RowBox(np.ones(rows, bool), errors, none, none, covariance))
    squares, log_p = boxes[0].less(boxes[1]).test()
    # chi^2 over its columns: a mean of so many is off by t sqrt(2 / (rows columns)).
    assert abs(np.mean(squares) - 1) < 6 * math.sqrt(2 / (rows * columns))
    assert np.min(log_p) > math.log(1e-9 / rows)
    wide = boxes[0]._replace(low=boxes[0].low - 1e3, high=boxes[0].high + 1e3)
    assert not np.any(wide.less(boxes[1]).test()[0])
    unknown = boxes[0]._replace(known=np.zeros(rows, bool))
    assert not np.any(unknown.less(boxes[1]).test()[1])


def test_nan_in_one_of_them():
    a, b = split_kv(2), split_kv(3)
    b[0, 5, 7] = np.nan
    found = same(a, b, **GIVEN, explain=False)
    assert (found.verdict, found.wrong, found.worst.where) == ("FAIL", "B", (0, 5, 7))
