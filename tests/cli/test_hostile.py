"""Candidates that reach for the verdict: they run in a process of their own, and never pass."""

import os
from pathlib import Path

import pytest

from tests.cli.running import process

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(os.name != "posix", reason="processes as of POSIX"),
]

WRONG = """
import numpy as np

def wrong(q, k, v):
    s = q @ np.swapaxes(k, -1, -2)
    p = np.exp(s - s.max(-1, keepdims=True))
    return (p @ v / p.sum(-1, keepdims=True)).astype(v.dtype)
"""
# What it does when it is imported, or in a call; then it is wrong.
HOSTILE = {
    "holds the interpreter": (
        "",
        "import collections, itertools; collections.deque(itertools.repeat(0, 10**11), maxlen=0)",
    ),
    "ends": ("", "import os; os._exit(0)"),
    "ends the one that asks": ("", "import os, signal; os.kill(os.getppid(), signal.SIGKILL)"),
    "writes to every file": (
        "",
        "import os\n    for n in range(3, 64):\n"
        "        try: os.write(n, b'0')\n        except OSError: pass\n    os._exit(0)",
    ),
    "a fork raises": ("", "import os\n    if not os.fork(): raise ValueError('fork')"),
    "a fork stays": ("", "import os, time\n    if not os.fork(): time.sleep(1000)"),
    "patches NumPy": (
        "np.all = np.any = lambda *a, **b: True\nnp.max = lambda *a, **b: 0.0\n"
        "np.abs = lambda x: 0 * np.asarray(x)",
        "",
    ),
    "patches the judge": (
        "import refattn.judge.conformance.report.report as r\n"
        "r.Report.verdict = property(lambda self: 'PASS')",
        "",
    ),
    "answers with code": (
        "import multiprocessing.connection as c, pickle\n"
        "class Code:\n    def __reduce__(self): return exec, ('import os; os._exit(0)',)\n"
        "c.Connection.send = lambda self, x: self.send_bytes(pickle.dumps((None, Code())))",
        "",
    ),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_no_hostile_candidate_passes(tmp_path, monkeypatch, what):
    monkeypatch.chdir(tmp_path)
    before, within = HOSTILE[what]
    fn = f"def fn(q, k, v):\n    {within or 'pass'}\n    return wrong(q, k, v)\n"
    text = f"{WRONG}\n{before}\n\n{fn}"
    Path("hostile.py").write_text(text, "utf-8")
    words = ("hostile:fn", "--estimator", "softmax", "--check", "reference_values")
    done = process("check", *words, "--time-limit", "12")
    ended = {"ends the one that asks": 2, "answers with code": (1, 2)}.get(what, 1)
    assert done.returncode in (ended if isinstance(ended, tuple) else (ended,)), done
    assert "PASS" not in done.stdout.partition("\n")[0]
    assert "mistake of refattn" not in done.stderr


def test_an_import_that_does_not_end(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("hostile.py").write_text("import time; time.sleep(1000)", "utf-8")
    done = process("check", "hostile:fn", "--estimator", "softmax", "--time-limit", "2")
    assert done.returncode == 2
    assert "importing it did not end within 22 s" in done.stderr


def test_in_process_says_what_it_does_not_see(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ("refattn:softmax_attention", "--estimator", "softmax", "--check", "contract")
    done = process("check", *words, "--in-process")
    assert done.returncode == 0
    assert "in-process" in done.stdout
    assert "is not seen" in done.stdout or "are not seen" in done.stdout
    assert "in-process" not in process("check", *words).stdout
