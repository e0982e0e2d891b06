"""`refattn same`: two files, of which one may have more rows, or results only."""

import numpy as np
import pytest

from tests.cli import running
from tests.cli.running import loads
from tests.judge.runs.test_comparing import K, Q, V, split_kv


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    q, k, v = (np.stack([2 * x, x]) for x in (Q, K, V))
    wrong = np.stack([split_kv(4, (q[0], k[0], v[0])), split_kv(4, (q[1], k[1], v[1]))])
    wrong[1, 2, 17] = wrong[1, 2, 16]
    np.savez("two.npz", q=q, k=k, v=v, out=wrong)
    np.savez("one.npz", q=q[1:], k=k[1:], v=v[1:], out=split_kv(4, (q[1], k[1], v[1]))[None])
    np.savez("outs.npz", out=wrong)
    np.savez("others.npz", q=4 * q, k=k, v=v, out=wrong)


def same(*words):
    return running.run("same", *words, "--dtype", "bfloat16")


@pytest.mark.long
def test_a_row_that_changes_when_a_batch_member_is_added():
    result = same("two.npz", "one.npz", "--no-cause")
    assert (result.exit_code, result.stderr) == (1, "")
    lines = result.stdout.splitlines()
    assert [x[:11] for x in lines if ".npz" in x] == ["A: two.npz:", "B: one.npz:"]
    assert "FAIL: no correct kernel gives A" in lines
    assert "  differ: 1 of 256 rows with equal inputs: head (1, 2), query 17" in lines
    assert "  only in one file, so not compared: heads (0, 0), (0, 1), (0, 2), (0, 3) of A" in lines
    assert "  B alone: PASS (profile flash)" in lines
    found = loads(same("one.npz", "two.npz", "--no-cause", "--format", "json").stdout)
    assert (found["wrong"], found["rows"][0][0]) == ("B", [0, 2, 17])
    rows = same("two.npz", "one.npz", "--no-cause", "--format", "csv").stdout.splitlines()
    assert rows[1].startswith("FAIL,False,A,256,1,")
    assert '"1,2,17"' in rows[1]


def test_results_for_the_inputs_of_another_file():
    result = same("two.npz", "outs.npz")
    assert result.exit_code == 0
    assert "PASS: bitwise equal in all 512 rows with equal inputs" in result.stdout


def test_exit_status_of_what_cannot_be_compared():
    result = same("two.npz", "others.npz")
    assert result.exit_code == 2
    assert "A and B must have a row with equal inputs" in result.stderr
    result = same("outs.npz", "two.npz")
    assert result.exit_code == 2
    assert "must hold arrays q, k and v" in result.stderr
