"""`refattn check`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

pytest.importorskip("click")

from click.testing import CliRunner

from refattn import cli

CANDIDATES = """
import refattn

def right(q, k, v, mask=None):
    return refattn.softmax_attention(q, k, v, mask=mask)

def wrong(q, k, v, mask=None):
    return refattn.softmax_attention(q, k, v, mask=mask, scale=1.0)

class Names:
    inner = staticmethod(right)

number = 3
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "candidates_under_test.py").write_text(CANDIDATES, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    sys.modules.pop("candidates_under_test", None)
    return tmp_path


def run(*words: str) -> Any:
    return CliRunner().invoke(cli.commands(), ["check", *words])


def softmax(name: str, *words: str) -> Any:
    return run(f"candidates_under_test:{name}", "--estimator", "softmax", "--seed", "0", *words)


def test_pass(here: Path) -> None:
    for name in ("right", "Names.inner"):
        result = softmax(name, "--capability", "mask")
        assert result.exit_code == 0, result.output
        assert result.output.startswith("PASS: ")
        assert "mask_broadcasts" in result.output


def test_own_functions_as_they_stand() -> None:
    words = ("--estimator", "rfa", "--capability", "omega", "--check", "reference_values")
    result = run("refattn:random_feature_attention", *words, "--seed", "1")
    assert result.exit_code == 0, result.output


def test_fail_with_reports(here: Path) -> None:
    result = softmax("wrong", "--json", "out.json", "--junit", "out.xml", "--reproducers")
    assert result.exit_code == 1
    assert "FAIL          reference_values" in result.output
    assert "softmax-scale-missing (the same numbers)" in result.output
    assert "from candidates_under_test import wrong" in result.output
    content = json.loads((here / "out.json").read_text("utf-8"))
    assert content["verdict"] == "FAIL"
    assert ElementTree.parse(here / "out.xml").getroot().get("failures") != "0"


def test_json_on_standard_output(here: Path) -> None:
    result = softmax("right", "--json")
    assert json.loads(result.output)["verdict"] == "PASS"


def test_underpowered_has_a_status_of_its_own(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from refattn.conformance import runner

    monkeypatch.setitem(runner._BUDGET, "quick", 0.01)
    words = ("--estimator", "rfa", "--check", "frequency_law", "--time-limit", "60")
    result = run("refattn:random_feature_attention", *words)
    assert result.exit_code == 3, result.output


def test_expected_failures(here: Path) -> None:
    failing = [line.split()[1] for line in softmax("wrong").output.splitlines() if " FAIL " in line]
    text = "# known\n\n" + "".join(f"{name}: scale is 1  # see there\n" for name in failing)
    (here / "xfails").write_text(text, encoding="utf-8")
    assert softmax("wrong", "--xfails", "xfails").exit_code == 0
    stale = softmax("right", "--xfails", "xfails")
    assert stale.exit_code == 1
    assert "passed, though a failure was expected: scale is 1" in stale.output


def test_a_program(here: Path) -> None:
    script = here / "program.py"
    script.write_text(
        "import sys, numpy as np, refattn\n"
        "given = np.load(sys.argv[1])\n"
        "np.savez(sys.argv[2], out=refattn.softmax_attention(*(given[n] for n in 'qkv')))\n",
        encoding="utf-8",
    )
    words = ("--subprocess", "npz", "--estimator", "softmax", "--check", "value_length")
    result = run(f"{sys.executable} {script}", *words)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("candidates_under_test",), "MODULE:CALLABLE"),
        (("no_such_module:f",), "cannot import"),
        (("candidates_under_test:none",), "cannot import"),
        (("broken:f",), "importing 'broken' failed: ZeroDivisionError"),
        (("candidates_under_test:number",), "callable"),
        (("candidates_under_test:right", "--capability", "omega"), "capabilities"),
        (("candidates_under_test:right", "--tag", "scale"), "KEY=VALUE"),
        (("candidates_under_test:right", "--tag", "scale=x"), "scale"),
        (("candidates_under_test:right", "--alpha", "2"), "alpha"),
        (("candidates_under_test:right", "--check", "nothing"), "checks"),
        (("candidates_under_test:right", "--xfails", "bad"), "check: reason"),
        (("candidates_under_test:right", "--xfails", "twice"), "second time"),
        (("candidates_under_test:right", "--xfails", "unknown"), "expected_failures"),
        (("candidates_under_test:right", "--json", "x.txt"), ".json"),
    ],
)
def test_unusable_arguments(here: Path, words: tuple[str, ...], text: str) -> None:
    (here / "broken.py").write_text("1 / 0", encoding="utf-8")
    (here / "bad").write_text("mask\n", encoding="utf-8")
    (here / "twice").write_text("mask: a\nmask: b\n", encoding="utf-8")
    (here / "unknown").write_text("maks: a\n", encoding="utf-8")
    result = run(*words, "--estimator", "softmax")
    assert result.exit_code == 2, result.output
    assert text in result.output


def test_the_estimator_must_be_named() -> None:
    assert run("refattn:softmax_attention").exit_code == 2
    assert run("refattn:softmax_attention", "--estimator", "sofmax").exit_code == 2


def test_a_candidate_hanging_in_compiled_code_does_not_abort_the_exit(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "hanging.py").write_text(
        """\
import torch

def softmax(q, k, v):
    while True:
        try:
            x = torch.ones(300, 300)
            for _ in range(10_000):
                x = torch.sigmoid(x @ x)
        except BaseException:
            pass
"""
    )
    arguments = "check hanging:softmax --estimator softmax --check contract --json -"
    arguments += " --time-limit 0.5"
    code = f"import sys; from refattn.cli import main; sys.argv[1:] = {arguments.split()}; main()"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 1, run.stderr
    assert json.loads(run.stdout)["verdict"] == "FAIL"
