"""Failures of tests: the first of a cause is told, others are counted, and scripts are files."""

from pathlib import Path

import numpy as np
import pytest

from refattn.judge.conformance import Adapter, Report, Result, Subprocess
from refattn.judge.conformance.checks.trials import Call, CheckRun
from refattn.judge.conformance.report.failures import Failures
from refattn.judge.conformance.report.refusals import name_layout
from refattn.judge.conformance.report.reproduce import reproducer


def report(check, got="ValueError: no; called as fn(q)", diagnosis=(), script="print(1)\n"):
    result = Result(check, "", "identity", "FAIL", "formula", "a result", got, reproducer=script)
    return Report("mine", "softmax", (), {}, "quick", 1e-6, 7, [result], diagnosis=[*diagnosis])


def test_the_first_failure_of_a_cause_is_told_and_others_are_counted():
    told = Failures("mine")
    first = told.describe(report("contract"))
    *_, name, script = first.splitlines()
    assert name == "refattn explain contract"
    path = Path(script.removeprefix("script: ").removesuffix(" (inputs are of seed 7)"))
    assert path.read_text("utf-8") == "print(1)\n"
    path.unlink()
    for count, check in enumerate(("causal", "masks"), 1):
        words = told.describe(report(check, "ValueError: no"))
        assert words.endswith(f"like contract, which was told ({count} more so far)")
    other = told.describe(report("windows", "0.5, off by 1", ["cause: no scale"]))
    assert "script: " in other
    assert "like windows" in told.describe(report("biases", "0.25, off by 2", ["cause: no scale"]))


def test_without_a_folder_for_files_the_seed_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    assert Failures("mine").describe(report("contract")).endswith("\nseed 7")


def unpacking(q, k, v):
    _, _, d = q.shape
    s = q @ np.swapaxes(k, -1, -2) / np.sqrt(d)
    w = np.exp(s - s.max(-1, keepdims=True))
    return w @ v / w.sum(-1, keepdims=True)


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (unpacking, "; the call works with --tag layout=hnd or --tag layout=bnd"),
        (lambda q, k, v: q.nothing, ""),
    ],
)
def test_layouts_in_which_a_refused_call_works_are_tried(fn, words):
    trial = CheckRun(Adapter(fn, "softmax"), "contract", 0)
    trial.case = Call(tuple(trial.normal(5, 4) for _ in range(3)), {})
    assert name_layout(trial) == words


def test_scripts_have_no_arrays_of_many_numbers():
    trial = CheckRun(Adapter(unpacking, "softmax"), "all_keys", 0)
    for n, alone in ((5, True), (500, False)):
        trial.case = Call(tuple(trial.normal(n, 4) for _ in range(3)), {})
        text = reproducer(trial, Result("all_keys", "", "identity", "FAIL"), {"rng": 0})
        assert ("np.array([[" in text) is alone
        assert ("checks=['all_keys'], rng=0" in text) is not alone
        assert len(text) < 3000


def test_programs_are_named_by_the_file_that_they_run():
    name = Path(__file__).name
    assert Subprocess(["python3", "-O", __file__]).__qualname__ == f"python3 {name}"
    assert Subprocess("./attention --fast").__qualname__ == "attention"
