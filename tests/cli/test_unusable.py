"""What no command can use: exit status 2 and one clear line, no traceback and no results.

A row of `unusable.txt` is `words of the command | words of the line`; what is in braces is
evaluated, and anything may stand for ` ... `. What functions refuse is in `bad_arguments.txt`.
"""

import shlex
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from refattn.cli.options import COMMON
from tests.cli.running import run

LINES = Path(__file__).with_name("unusable.txt").read_text("utf-8").splitlines()
CONTENTS = {
    "notes.txt": b"",
    "text.npz": b"q,k,v\n1,2,3\n",
    "broken.py": b"1 / 0",
    "no-reason": b"mask\n",
    "twice": b"mask: a\nmask: b\n",
    "unknown": b"maks: a\n",
    "binary": b"\xff\xfe",
}


@pytest.fixture
def folder(here):
    for name, content in CONTENTS.items():
        (here / name).write_bytes(content)
    whole = (here / "qkv.npz").read_bytes()
    (here / "half.npz").write_bytes(whole[: len(whole) // 2])
    x = np.ones((2, 24, 8), np.float32)
    np.savez("no-heads.npz", q=x[:, :0], k=x, v=x)
    np.savez("q.npz", q=x)
    np.savez("qk.npz", q=x, k=x)
    np.savez("wide.npz", q=np.eye(3) * 1e200, k=np.ones((4, 3)))
    more = {"bias": np.zeros((24, 24)), "sinks": x[:, 0, 0], "mask": np.eye(24) > 0}
    for name, array in more.items():
        np.savez(f"{name}.npz", q=x, k=x, v=x, out=x, **{name: array})
    return here


def refused(*words):
    """The line that a command ends with."""
    result = run(*words)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    *usage, line = result.stderr.splitlines()
    assert line.startswith("Error: ")
    assert not usage or usage[0].startswith(f"Usage: refattn {words[0]} [OPTIONS] ")
    return line


@pytest.mark.sweep(12)
@pytest.mark.parametrize("row", [x for x in LINES if not x.startswith("#")])
def test_unusable(folder, row):
    command, words = eval(f'f"""{row}"""', {"COMMON": COMMON}).split(" | ")
    line, position = refused(*shlex.split(command)), 0
    for part in words.split(" ... "):
        position = line.find(part, position) + len(part)
        assert position >= len(part), line
    assert ("Did you mean" in line) is ("Did you mean" in words)


@pytest.mark.parametrize(("option", "suffix"), [("--json", ".json"), ("--plot", ".png")])
def test_outputs_are_checked_before_the_work(here, monkeypatch, option, suffix):
    monkeypatch.setattr("refattn.compare.measured.measure", None)
    (here / f"folder{suffix}").mkdir()
    (here / "file").write_text("")
    for place in ("nowhere/out", "folder", "file/out"):
        line = refused("compare", "qkv.npz", option, f"{place}{suffix}")
        assert "cannot write to" in line
    before = (here / "qkv.npz").read_bytes()
    assert f"must end in {suffix}" in refused("compare", option, "qkv.npz")
    assert (here / "qkv.npz").read_bytes() == before


def test_a_failure_to_write_comes_after_the_results(here, monkeypatch):
    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(Path, "write_text", full)
    result = run("compare", "qkv.npz", "--features", 2, "--json", "out.json")
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: cannot write the results: ")
    assert "No space left on device" in result.stderr
