"""Verdicts where a standard stream is closed, or where nobody reads it: the status is theirs."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import refattn
from refattn import cli
from refattn.cli import progress

pytest.importorskip("rich")
testing = pytest.importorskip("click.testing")

pytestmark = pytest.mark.skipif(os.name != "posix", reason="pipes and closed files as of POSIX")

CHECK = ("check", "refattn:softmax_attention", "--estimator", "softmax", "--check", "contract")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A folder with a file that passes, and one that fails."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 24, 8)).astype(np.float32)
    out = refattn.softmax_attention(q, k, v)
    np.savez(tmp_path / "right.npz", q=q, k=k, v=v, out=out)
    np.savez(tmp_path / "wrong.npz", q=q, k=k, v=v, out=out * np.float32(1.01))
    monkeypatch.chdir(tmp_path)


def run(*words, shell="", **options):
    before = ["sh", "-c", f'exec "$@" {shell}', "sh"] if shell else []
    return subprocess.run(
        [*before, sys.executable, "-m", "refattn", *words],
        env={**os.environ, "PYTHONPATH": str(Path(refattn.__file__).parent.parent)},
        encoding="utf-8",
        check=False,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
    )


@pytest.mark.long("profile", "tolerance")
@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (("verify", "right.npz"), 0, "PASS: "),
        (("verify", "wrong.npz"), 1, "FAIL: "),
        (("compare", "right.npz", "--features", "4"), 0, "mean of v"),
        (("profile", "right.npz", "--features", "4"), 0, "recommended"),
        (("tolerance", "right.npz"), 0, "needed: "),
        (CHECK, 0, "PASS: "),
    ],
    ids=lambda x: x[0] if isinstance(x, tuple) else None,
)
def test_a_closed_standard_error(words, status, said):
    done = run(*words, shell="2>&-")
    assert (done.returncode, said in done.stdout) == (status, True), done.stdout


def unheard(*words, stream="stdout"):
    """Run with a stream that goes to a pipe of which the other end is closed."""
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as broken:
        options = {stream: broken}
        return run(*words, **options)


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (("verify", "right.npz"), 0),
        (("verify", "wrong.npz"), 1),
        (("verify", "right.npz", "wrong.npz", "--format", "json"), 1),
        (("compare", "right.npz", "--features", "4"), 0),
        (CHECK, 0),
        (("check", "--list"), 0),
        (("check", "--list-specs"), 0),
        (("vectors", "missing", "--check"), 1),
        (("--help",), 141),
    ],
    ids=lambda x: "-".join(x[:2]) if isinstance(x, tuple) else None,
)
def test_what_nobody_reads(words, status):
    done = unheard(*words)
    assert (done.returncode, done.stderr) == (status, "")


def test_files_are_written_though_nobody_reads(tmp_path):
    assert unheard("verify", "wrong.npz", "--json", "out.json").returncode == 1
    assert '"FAIL"' in (tmp_path / "out.json").read_text()


def test_lines_beside_the_results_that_nobody_reads():
    x = np.random.default_rng(0).standard_normal((9, 4, 8)).astype(np.float32)
    np.savez("heads.npz", q=x, k=x, v=x, out=refattn.softmax_attention(x, x, x))
    done = unheard("verify", "heads.npz", stream="stderr")  # of more heads than tokens
    assert (done.returncode, done.stdout[:9]) == (0, "heads.npz")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("words", [("verify", "right.npz"), ("check", "--list")])
def test_what_cannot_be_written_is_an_error(words):
    with open("/dev/full", "w") as full:
        done = run(*words, stdout=full)
    assert done.returncode == 2
    assert done.stderr.startswith("Error: ")
    assert done.stderr.endswith("No space left on device\n")


def test_what_nobody_foresaw_is_no_verdict(monkeypatch, capsys):
    def fail(*_, **__):
        raise ZeroDivisionError("unforeseen")

    monkeypatch.setattr("refattn.cli.verify.open_tensors", fail)
    monkeypatch.setattr(sys, "argv", ["refattn", "verify", "right.npz"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "ZeroDivisionError: unforeseen" in capsys.readouterr().err


def test_an_interrupt_is_no_verdict(monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("refattn.cli.verify.open_tensors", interrupt)
    done = testing.CliRunner().invoke(cli.commands(), ["verify", "right.npz"])
    assert (done.exit_code, done.stderr) == (130, "Aborted!\n")


def test_work_without_a_standard_error(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    with progress.Work("Working") as work:
        assert list(work.track([1, 2])) == [1, 2]
