"""Verdicts where a standard stream is closed, or where nobody reads it: the status is theirs."""

import json
import os
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

import refattn
from refattn import cli
from refattn.cli import progress
from tests.cli.commands import LINES
from tests.cli.running import process, run

pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="pipes and closed files as of POSIX"),
    pytest.mark.usefixtures("here"),
]
CHECK = LINES["check"]


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ("verify right.npz", 0, "PASS: "),
        ("verify wrong.npz", 1, "FAIL: "),
        ("compare right.npz --features 4", 0, "mean of v"),
        ("compare right.npz --target 0.1 --features 4", 0, "recommended"),
        ("tolerance right.npz --dtype float16 --profile flash", 0, "needs: "),
        (CHECK, 0, "PASS: "),
    ],
)
def test_a_closed_standard_error(forked, words, status, said):
    done = forked(*words.split(), err="closed")
    assert (done.returncode, said in done.stdout) == (status, True), done.stdout


@pytest.mark.parametrize(
    ("words", "status"),
    [
        ("verify right.npz", 0),
        ("verify wrong.npz", 1),
        ("verify right.npz wrong.npz --format json", 1),
        ("compare right.npz --features 4", 0),
        (CHECK, 0),
        ("check --list", 0),
        ("check --list-specs", 0),
        ("vectors missing --check", 1),
        ("--help", 141),
    ],
)
def test_results_that_nobody_reads(forked, words, status):
    assert forked(*words.split(), out="unread") == (status, "", "")


@pytest.mark.long
def test_streams_of_a_process_of_its_own():
    """As in the tables above, but the interpreter begins with them."""
    assert process("verify", "wrong.npz", out="unread") == (1, "", "")
    assert process("verify", "wrong.npz", err="closed").returncode == 1
    assert process(*CHECK.split(), err="closed").returncode == 0


def test_files_are_written_though_nobody_reads(forked):
    assert forked("verify", "wrong.npz", "--json", "out.json", out="unread").returncode == 1
    assert '"FAIL"' in Path("out.json").read_text()


@pytest.mark.long
def test_lines_beside_the_results_that_nobody_reads():
    x = np.random.default_rng(0).standard_normal((9, 4, 8)).astype(np.float32)
    np.savez("heads.npz", q=x, k=x, v=x, out=refattn.softmax_attention(x, x, x))
    done = process("verify", "heads.npz", err="unread")  # of more heads than tokens
    assert (done.returncode, done.stdout[:9]) == (0, "heads.npz")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("words", ["verify right.npz", "check --list"])
def test_what_cannot_be_written_is_an_error(forked, words):
    done = forked(*words.split(), out="full")
    assert done.returncode == 2
    assert done.stderr.startswith("Error: ")
    assert done.stderr.endswith("No space left on device\n")


def test_an_interrupt_is_no_verdict(monkeypatch):
    words, opened = ["verify", "right.npz"], "refattn.files.tensors.open_tensors"
    monkeypatch.setattr(opened, Mock(side_effect=KeyboardInterrupt))
    done = run(*words)
    assert (done.exit_code, done.stderr) == (130, "Aborted: nothing was found until now\n")
    given = dict.fromkeys("qkv", np.ones((1, 8, 4))), np.array_equal
    monkeypatch.setattr("refattn.judge.audits.runs._find", lambda *_: (lambda: given, None))
    monkeypatch.setattr("refattn.judge.audits.study._try", Mock(side_effect=KeyboardInterrupt))
    done = run("audit", "inputs:of")
    assert (done.exit_code, done.stderr) == (130, "Aborted!\n")
    assert "that were still to be tried" in done.stdout  # what was found until then


def test_an_interrupted_file_has_the_verdict_that_is_known(monkeypatch):
    causes = "refattn.judge.verification.judging.explain"
    monkeypatch.setattr(causes, Mock(side_effect=KeyboardInterrupt))
    done = run("verify", "right.npz", "--scale", "0.7", "--json", "found.json")
    assert (done.exit_code, done.stderr) == (130, "Aborted!\n")
    assert "\nFAIL: no correct kernel" in done.stdout
    assert "\n  interrupted\n" in done.stdout
    assert json.loads(Path("found.json").read_text("utf-8"))["verdict"] == "FAIL"


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        (lambda *_, **__: 1 // 0, "ZeroDivisionError: "),
        (lambda *_, **__: np.ones((2, 3)) @ np.ones(2), "ValueError: matmul: "),
        (lambda *_, **__: np.ones(2) + None, "TypeError: unsupported operand"),
        (lambda *_, **__: [].index(0), "ValueError: 0 is not in list"),
    ],
)
def test_a_mistake_of_the_package_is_none_of_its_users(mistake, said, monkeypatch, capsys):
    """It has a status of its own, and says so; what the package raises itself has not."""
    monkeypatch.setattr("refattn.files.tensors.open_tensors", mistake)
    for words in (["verify", "right.npz"], ["verify", "right.npz", "right.npz"]):
        monkeypatch.setattr(sys, "argv", ["refattn", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        error = capsys.readouterr().err
        assert ended.value.code == 70
        assert "Traceback" in error
        assert said in error
        assert "this is a mistake of refattn" in error


def test_work_without_a_standard_error(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    with progress.Work("Working") as work:
        assert list(work.track([1, 2])) == [1, 2]
