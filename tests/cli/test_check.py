"""`refattn check`: its statuses and reports, and what becomes of them if a candidate ends all."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from refattn.judge.conformance.report import runner
from tests.cli.running import ENV, gone, process, run, shown

pytestmark = pytest.mark.usefixtures("here")
posix = pytest.mark.skipif(os.name != "posix", reason="signals, pipes and terminals as of POSIX")


def softmax(name, *words):
    target = f"candidates_under_test:{name}"
    given = ("--estimator", "softmax", "--seed", "0", "--in-process")
    return run("check", target, *given, *words)


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("candidates_under_test:right", "softmax --check mask_broadcasts --capability mask"),
        ("candidates_under_test:Names.inner", "softmax --check mask_broadcasts --capability mask"),
        ("refattn:random_feature_attention", "rfa --check reference_values --capability omega"),
        ("refattn:random_feature_attention", "snis --check contract"),
        ("refattn:random_feature_attention", "favor --check contract"),
    ],
)
def test_pass(name, words):
    given = "--in-process", "--seed", 0, "--estimator", *words.split()
    text = shown("check", name, *given)
    assert text.startswith("PASS: ")
    assert "1 check passed" in text
    text = shown("check", name, "--verbose", *given)
    assert f"PASS          {words.split()[2]}" in text


@pytest.mark.long
def test_softmax_is_guessed():
    """Of a function of three arrays alone, which is said; of others the estimator must be named."""
    words = ("--check", "contract", "--capability", "mask", "--in-process")
    done = run("check", "candidates_under_test:right", *words)
    assert done.exit_code == 0
    assert done.stderr.startswith("checked as softmax, because it needs only q, k, v")
    done = run("check", "refattn:random_feature_attention", "--check", "contract")
    assert done.exit_code == 2
    assert "`--estimator` must be given: softmax, rfa, performer, ..." in done.stderr


def test_typos_get_a_suggestion():
    for option, typo, like in (
        ("--spec", "torch-spda", "torch-sdpa"),
        ("--check", "refrence_values", "reference_values"),
        ("--estimator", "perfomer", "performer"),
        ("--tag", "cuasal=top-left", "causal"),
    ):
        done = softmax("right", option, typo)
        assert done.exit_code == 2
        assert f"Did you mean {like}" in done.stderr
        assert "... (all: refattn check --list)" in done.stderr
        assert len(done.stderr) < 300, done.stderr


def test_fail_with_reports():
    words = ("--json", "out.json", "--reproducers")
    result = softmax("wrong", "--check", "reference_values", *words)
    assert result.exit_code == 1
    assert "FAIL          reference_values" in result.output
    assert "not run: not declared, or not requested (--verbose lists them" in result.output
    assert "softmax-scale-missing (the same numbers)" in result.output
    assert "from candidates_under_test import wrong" in result.output
    assert json.loads(Path("out.json").read_text("utf-8"))["verdict"] == "FAIL"


def test_underpowered_has_a_status_of_its_own(monkeypatch):
    monkeypatch.setitem(runner._BUDGET, "quick", 0.01)
    words = ("--estimator", "rfa", "--check", "frequency_law", "--time-limit", "60")
    result = run("check", "refattn:random_feature_attention", *words)
    assert result.exit_code == 3, result.output


@pytest.mark.long("braces")
@pytest.mark.parametrize("form", ["words", "braces"])
def test_a_program(form):
    code = (
        "import sys, numpy as np, refattn; given = dict(np.load(sys.argv[1])); kept = {}; "
        "np.savez(sys.argv[2], out=refattn.softmax_attention(**{n: given[n] for n in 'qkv'}))"
    )
    Path("program.py").write_text(code, "utf-8")
    named = {"words": "program.py", "braces": f'-c "{code}" {{input}} {{output}}'}[form]
    words = ("--subprocess", "npz", "--estimator", "softmax", "--check", "value_length")
    shown("check", f"{sys.executable} {named}", *words)


@pytest.mark.parametrize("seconds", ["1e-9", "1e10", "1e300"])
def test_time_limits_of_any_size(seconds):
    some = () if seconds == "1e-9" else ("--check", "contract")
    result = softmax("right", "--time-limit", seconds, *some)
    assert result.exit_code in ((0,) if some else (1, 3))


def test_list_of_specs():
    output = shown("check", "--list-specs", width=None)
    assert "  top-left: torch-sdpa, jax-dpa, onnx-23, " in output
    assert "  bottom-right: flash-attn-2*, flash-attn-3*\n" in output
    assert "  * read in Dao-AILab/flash-attention v2.8.3, hopper/mask.h\n" in output
    assert output.endswith(
        "tests/judge/conformance/test_conventions.py, 42 read in source files (*)\n"
    )


def test_diagnosis_of_a_spec():
    words = ("--spec", "onnx-24", "--capability", "mask", "--check", "reference_values")
    result = softmax("wrong", *words)
    assert result.exit_code == 1
    lines = result.output.splitlines()
    assert "  matches spec onnx-23, onnx-24, onnxruntime except that scale is 1" in lines
    assert "--list-specs" in shown("check", "--help")


@posix
@pytest.mark.long
def test_the_module_of_a_candidate_may_register_its_estimator(forked):
    """The report has the name by which it was asked for."""
    Path("own.py").write_text(
        "import refattn\nfrom refattn.registry import Estimator, register\n"
        "fn = lambda q, k, v: refattn.softmax_attention(q, k, v)\n"
        "register(Estimator('own', fn, refattn.naive.softmax_attention, traits=['normalised']))\n",
        "utf-8",
    )
    done = forked("check", "own:fn", "--estimator", "own", "--check", "contract")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("PASS: fn as own (")
    assert "imported  the process that judges the candidate imported its module" in done.stdout
    assert "got 'owns'" in forked("check", "own:fn", "--estimator", "owns").stderr


@pytest.mark.long
def test_a_candidate_hanging_in_compiled_code_does_not_abort_the_exit():
    pytest.importorskip("torch")
    text = """\
import torch

def fn(q, k, v):
    while True:
        try:
            x = torch.ones(300, 300)
            for _ in range(10_000):
                x = torch.sigmoid(x @ x)
        except BaseException:
            pass
"""
    words = ("--check", "contract", *JSON, "--time-limit", "0.5")
    done = ended(process, text, *words)
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["verdict"] == "FAIL"


# --- a process of its own: no status but that of the report


JSON = ("--format", "json")
RIGHT = "import refattn\ndef fn(q, k, v):\n    return refattn.softmax_attention(q, k, v)\n"
WRONG = RIGHT.replace("k, v)\n", "k, v, scale=1.0)\n").replace("q, k, v, scale=1.0):", "q, k, v):")
ENDS = {
    "exit": ("import sys; sys.exit(0)", "failed: SystemExit: 0"),
    "interrupt": ("raise KeyboardInterrupt", "failed: KeyboardInterrupt"),
    "generator": ("raise GeneratorExit", "failed: GeneratorExit"),
    "base": ("class Odd(BaseException): pass\nraise Odd('odd')", "failed: Odd: odd"),
    "attribute": ("import sys\ndef __getattr__(name): sys.exit(0)", "failed: SystemExit: 0"),
    "name": (
        "import sys\nclass Fn:\n    def __getattr__(self, name): sys.exit(0)\n"
        "    def __call__(self, q, k, v): pass\nfn = Fn()",
        "ended by SystemExit, without a verdict",
    ),
    "crash": (
        "import ctypes\ndef fn(q, k, v): ctypes.string_at(0)",
        "the process ended by SIGSEGV (signal 11) before the report was printed",
    ),
    "hard exit": ("import os; os._exit(0)", "the process ended with status 0 before"),
    "hard exit in a call": (
        "import os\ndef fn(q, k, v): os._exit(0)",
        "the process ended with status 0 before",
    ),
    "hard exit in a thread": (
        "import os, threading, time\n"
        "threading.Thread(target=lambda: os._exit(0)).start()\ntime.sleep(10)",
        "the process ended with status 0 before",
    ),
}


def ended(how, text, *words, target="ending:fn", **options):
    """Check a candidate by `process`, or in a fork, in the process that judges it or another."""
    Path("ending.py").write_text(text, "utf-8")
    here = () if {"--isolate", "--subprocess"} & {*words} else ("--in-process",)
    given = ("--estimator", "softmax", "--check", "value_length", "--seed", "0", *here, *words)
    return how("check", target, *given, **options)


@pytest.mark.parametrize(
    "end", ["exit", pytest.param("crash", marks=posix), *(end for end in ENDS if " " in end)]
)
def test_an_end_before_the_report_is_unusable(forked, end):
    text, message = ENDS[end]
    done = ended(forked, text)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@posix
def test_an_interrupt_prints_the_checks_until_then():
    text = (
        "import os, signal, time, refattn\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a job of a shell ignores it\n"
        "def fn(q, k, v):\n    if q.shape[-1] == v.shape[-1]:\n"
        "        return refattn.softmax_attention(q, k, v)\n"
        "    os.kill(os.getpid(), signal.SIGINT); time.sleep(1)"
    )
    result = ended(run, text, "--check", "contract", "--check", "reference_values", "--verbose")
    assert result.exit_code == 3
    assert "interrupted after" in result.output
    assert "too slow" not in result.output
    assert "PASS" in result.output
    assert "UNDERPOWERED: " in result.output


@pytest.mark.parametrize("end", ["exit", "interrupt", "base", "attribute", "name"])
def test_an_end_is_unusable_in_this_process_too(end):
    result = ended(run, ENDS[end][0])
    assert result.exit_code == 2
    assert ENDS[end][1] in result.output


@pytest.mark.parametrize(
    "raised", ["SystemExit(0)", "KeyboardInterrupt", "BaseException('odd')", "GeneratorExit"]
)
def test_an_end_in_a_call_is_a_failure(raised):
    result = ended(run, f"def fn(q, k, v):\n    raise {raised}\n", "--check", "contract")
    assert result.exit_code == 1
    assert result.output.startswith("FAIL: ")


@pytest.mark.long("words1")
@pytest.mark.parametrize("words", [(), JSON])
def test_what_an_isolated_candidate_prints_is_kept(forked, words):
    text = RIGHT.replace("    return", "    print('printed')\n    return")
    done = ended(forked, text, "--isolate", *words)
    assert done.returncode == 0, done.stderr
    assert "printed" in (done.stderr if words else done.stdout)
    assert not words or json.loads(done.stdout)["verdict"] == "PASS"


HANGS = "import os, time\n{}open('id', 'w').write(str(os.getpid())); time.sleep(100)\n"


@posix
@pytest.mark.long("subprocess")
@pytest.mark.parametrize("words", ["isolate", "subprocess"])
def test_a_hanging_candidate_fails_and_is_ended(forked, words):
    target, options = "ending:fn", ["--time-limit", "12", "--check", "contract"]
    if words == "isolate":
        options += ["--isolate"]
    else:
        target = f"{sys.executable} ending.py"
        options += ["--subprocess", "npz"]
    text = HANGS.format("def fn(q, k, v): " if words == "isolate" else "")
    done = ended(forked, text, *options, target=target)
    assert done.returncode == 1, done.stderr
    assert re.search(r"expected an answer within [\d.]+ s; got none", done.stdout)
    assert gone(int(Path("id").read_text()))


@posix
@pytest.mark.long
def test_the_limit_of_time_bounds_the_import_too(forked):
    text = "import refattn, time; time.sleep(3)\ndef fn(*x):\n    time.sleep(3)\n"
    text += "    return refattn.softmax_attention(*x)\n"
    start = time.monotonic()
    done = ended(forked, text, "--isolate", "--time-limit", "8")
    assert 4 < time.monotonic() - start < 12  # with the time that it takes to end
    assert done.returncode == 3
    assert "too slow: " in done.stdout


@posix
@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("phase", ["start", "import", "call"])
def test_a_signal_ends_a_check_soon(phase, number):
    """Sent to all its processes, as a terminal does."""
    Path("ending.py").write_text(HANGS.format("def fn(q, k, v): " * (phase == "call")), "utf-8")
    words = [sys.executable, "-m", "refattn", "check", "ending:fn", "--estimator", "softmax"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True}
    with subprocess.Popen(words, env=ENV, encoding="utf-8", **pipes) as running:
        if phase == "start":
            time.sleep(0.7)
        else:
            while not Path("id").exists() or not Path("id").read_text():
                time.sleep(0.05)
        os.killpg(running.pid, number)
        try:
            out, err = running.communicate(timeout=10)
        finally:
            running.kill()
    assert "Traceback" not in err
    assert running.returncode == 3 if phase == "call" else running.returncode in (2, 130)
    assert "interrupted after 0 calls" in out if phase == "call" else not out
    assert phase == "start" or gone(int(Path("id").read_text()))


@posix
@pytest.mark.long("True")
@pytest.mark.parametrize("isolate", [False, True])
def test_a_killed_command_leaves_nothing_behind(isolate):
    Path("ending.py").write_text(HANGS.format("def fn(q, k, v): " if isolate else ""), "utf-8")
    words = [sys.executable, "-m", "refattn", "check", "ending:fn", "--estimator", "softmax"]
    with subprocess.Popen([*words, *["--isolate"][:isolate]], env=ENV) as running:
        while not Path("id").exists() or not Path("id").read_text():
            time.sleep(0.05)
        running.kill()
    assert gone(int(Path("id").read_text()))


@posix
def test_the_running_check_is_named_on_a_terminal_only(forked):
    pty = pytest.importorskip("pty")
    slow = RIGHT.replace("    return", "    import time; time.sleep(0.01)\n    return")
    silent = ended(forked, slow)
    assert silent.stderr == ""
    ours, theirs = pty.openpty()
    lost = "import sys; sys.stderr.close()\n" + slow
    seen = ended(forked, lost, "--check", "contract", err=os.ttyname(theirs))
    os.close(theirs)
    with open(ours, "rb", closefd=True) as terminal:
        text = terminal.read1(2**16).decode()
    assert seen.returncode == 0
    assert "check 1 of 2: contract" in text
    assert "check 2 of 2: value_length" in text
    assert seen.stdout.splitlines()[0] == silent.stdout.splitlines()[0]


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    "before",
    [
        "import atexit, os; atexit.register(os._exit, 0)",
        "import sys; sys.exit = lambda *status: None",
        "import sys; sys.stdout = open('elsewhere', 'w')",
        "import sys; sys.stdout = sys.stderr = None",
        "import sys; sys.stdout.close()",
        "import io, sys; sys.stdout = io.TextIOWrapper(sys.stdout.detach())",
        "import os; os.close(1)",
        "import threading; threading.Thread(target=threading.Event().wait).start()",
    ],
)
def test_the_report_and_its_status_come_out(forked, before):
    right = ended(forked, f"{before}\n{RIGHT}", *JSON)
    assert (right.returncode, json.loads(right.stdout)["verdict"]) == (0, "PASS"), right.stderr
    wrong = ended(forked, f"{before}\n{WRONG}")
    assert (wrong.returncode, wrong.stdout[:6]) == (1, "FAIL: "), wrong.stderr


@pytest.mark.long("process")
@pytest.mark.parametrize("how", ["fork", "process"])
def test_the_status_of_a_report_stands_if_the_end_is_violent(forked, how):
    text = "import atexit, os, signal\natexit.register(os.kill, os.getpid(), signal.SIGABRT)\n"
    own = forked if how == "fork" else process
    assert [ended(own, text + x).returncode for x in (RIGHT, WRONG)] == [0, 1]


@posix
@pytest.mark.parametrize("words", [(), JSON])
def test_a_report_that_nobody_reads(forked, words):
    done = ended(forked, RIGHT, *words, out="closed")
    assert done.returncode == 2
    assert "standard output is closed" in done.stderr
    done = ended(forked, RIGHT, *words, out="unread")
    assert (done.returncode, done.stderr) == (0, "")  # the verdict was known


STRANGE = """
def fn(q, k, v):
    raise ValueError("bad \\udcff\\x00\\x1b[31m\\x9b\\ufffe name")

globals()["f\\x01\\udc80n"] = fn
"""


@pytest.mark.long("process")
@pytest.mark.parametrize("how", ["fork", "process"])
def test_strange_characters_are_escaped(forked, how):
    words = ("--json", "out.json", "--reproducers")
    own = forked if how == "fork" else partial(process, env={"PYTHONIOENCODING": "utf-8:strict"})
    done = ended(own, STRANGE, *words, target="ending:f\x01\udc80n")
    name, said = "f\\x01\\udc80n", "bad \\udcff\\x00\\x1b[31m\\x9b\\ufffe name"
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith(f"FAIL: {name} as softmax")
    assert f"got ValueError: {said}" in done.stdout
    content = json.loads(Path("out.json").read_text("utf-8"))
    assert content["name"] == name
    assert content["results"][0]["got"] == f"ValueError: {said}"


@pytest.mark.long
def test_an_encoding_without_the_characters():
    text = RIGHT + "\u4e2d = fn\n"
    done = ended(process, text, target="ending:\u4e2d", env={"PYTHONIOENCODING": "latin-1"})
    assert (done.returncode, done.stdout[:13]) == (0, "PASS: \\u4e2d "), done


def test_reports_go_where_the_caller_is(forked, here):
    (here / "elsewhere").mkdir()
    away = "import os; os.chdir('elsewhere')\n"
    done = ended(forked, away + RIGHT, "--json", "out.json", "--html", "out.html")
    assert done.returncode == 0, done.stderr
    assert sorted(x.name for x in here.glob("out.*")) == ["out.html", "out.json"]
    assert not list((here / "elsewhere").iterdir())
