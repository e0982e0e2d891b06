"""`refattn check`."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from xml.etree import ElementTree

import pytest

pytest.importorskip("click")


from click.testing import CliRunner

from refattn import cli

long = partial(pytest.param, marks=pytest.mark.long)

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
def here(tmp_path, monkeypatch):
    (tmp_path / "candidates_under_test.py").write_text(CANDIDATES, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    sys.modules.pop("candidates_under_test", None)
    return tmp_path


def run(*words):
    return CliRunner().invoke(cli.commands(), ["check", *words])


def softmax(name, *words):
    return run(f"candidates_under_test:{name}", "--estimator", "softmax", "--seed", "0", *words)


def test_pass(here):
    for name in ("right", "Names.inner"):
        result = softmax(name, "--capability", "mask")
        assert result.exit_code == 0, result.output
        assert result.output.startswith("PASS: ")
        assert "mask_broadcasts" in result.output


def test_own_functions_as_they_stand():
    words = ("--estimator", "rfa", "--capability", "omega", "--check", "reference_values")
    result = run("refattn:random_feature_attention", *words, "--seed", "1")
    assert result.exit_code == 0, result.output


def test_fail_with_reports(here):
    result = softmax("wrong", "--json", "out.json", "--junit", "out.xml", "--reproducers")
    assert result.exit_code == 1
    assert "FAIL          reference_values" in result.output
    assert "softmax-scale-missing (the same numbers)" in result.output
    assert "from candidates_under_test import wrong" in result.output
    content = json.loads((here / "out.json").read_text("utf-8"))
    assert content["verdict"] == "FAIL"
    assert ElementTree.parse(here / "out.xml").getroot().get("failures") != "0"


def test_json_on_standard_output(here):
    result = softmax("right", "--json")
    assert json.loads(result.output)["verdict"] == "PASS"


def test_underpowered_has_a_status_of_its_own(here, monkeypatch):
    from refattn.conformance.verdict import runner

    monkeypatch.setitem(runner._BUDGET, "quick", 0.01)
    words = ("--estimator", "rfa", "--check", "frequency_law", "--time-limit", "60")
    result = run("refattn:random_feature_attention", *words)
    assert result.exit_code == 3, result.output


def test_expected_failures(here):
    failing = [line.split()[1] for line in softmax("wrong").output.splitlines() if " FAIL " in line]
    text = "# known\n\n" + "".join(f"{name}: scale is 1  # see there\n" for name in failing)
    (here / "xfails").write_text(text, encoding="utf-8")
    assert softmax("wrong", "--xfails", "xfails").exit_code == 0
    stale = softmax("right", "--xfails", "xfails")
    assert stale.exit_code == 1
    assert "passed, though a failure was expected: scale is 1" in stale.output


def test_a_program(here):
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
        (("candidates_under_test:right", "--seed", "9" * 400), "'--seed': must be at least 0 and"),
        (("candidates_under_test:right", "--seed", str(2**128)), "below 2**128"),
        (
            ("candidates_under_test:right", "--tag", "scale=" + "9" * 400),
            "a finite number, got '999",
        ),
        (
            ("candidates_under_test:right", "--tag", "ddof=" + "9" * 5000),
            "must be 0 or 1, got '999",
        ),
        (
            ("candidates_under_test:right", "--tag", "ddof=2"),
            "`tags['ddof']` must be 0 or 1, got '2'",
        ),
        (("candidates_under_test:right", "--xfails", "binary"), "cannot read 'binary'"),
        (("candidates_under_test:right", "--keep"), "`--keep` must come with --subprocess"),
        (("sh {input}", "--keep", "--subprocess", "npz"), "must leave out {input} and {output}"),
        (("sh", "--isolate", "--subprocess", "npz"), "`isolate` must be left out for"),
        (("no-such-program {input}", "--subprocess", "npz"), "no program 'no-such-program'"),
        (("program 'open", "--subprocess", "npz"), "`command` must be words as of a shell"),
    ],
)
def test_unusable_arguments(here, words, text):
    (here / "broken.py").write_text("1 / 0", encoding="utf-8")
    (here / "bad").write_text("mask\n", encoding="utf-8")
    (here / "twice").write_text("mask: a\nmask: b\n", encoding="utf-8")
    (here / "unknown").write_text("maks: a\n", encoding="utf-8")
    (here / "binary").write_bytes(b"\xff\xfe")
    result = run(*words, "--estimator", "softmax")
    assert result.exit_code == 2, result.output
    assert text in result.output


def test_the_estimator_must_be_named():
    assert run("refattn:softmax_attention").exit_code == 2
    assert run("refattn:softmax_attention", "--estimator", "sofmax").exit_code == 2


@pytest.mark.long
def test_a_candidate_hanging_in_compiled_code_does_not_abort_the_exit(tmp_path):
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


# A process of its own: no status but that of the report


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
    "main thread": (
        "import _thread, signal, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a job of a shell ignores it\n"
        "def fn(q, k, v): _thread.interrupt_main(); time.sleep(1)",
        "ended by KeyboardInterrupt, without a verdict",
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


def process(folder, text, *words, before=(), target="ending:fn", **options):
    (folder / "ending.py").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "refattn", "check", target, "--estimator", "softmax"]
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "timeout": 120}
    paths = os.pathsep.join(sys.path)
    given["env"] = {**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": ""}
    return subprocess.run(
        [*before, *command, "--check", "value_length", "--seed", "0", *words],
        cwd=folder,
        **given | options,
    )


@pytest.mark.parametrize("end", ["exit", *(end for end in ENDS if " " in end)])
def test_an_end_before_the_report_is_unusable(tmp_path, end):
    text, message = ENDS[end]
    result = process(tmp_path, text)
    assert result.returncode == 2
    assert result.stdout == ""
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def gone(process):
    """Whether a process ends within seconds; if not it is killed."""
    for _ in range(100):
        try:
            os.kill(process, 0)
            with open(f"/proc/{process}/stat") as file:
                if file.read().split()[2] == "Z":  # nobody waits for it here
                    return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.1)
    os.kill(process, signal.SIGKILL)
    return False


CRASH = "import ctypes\ndef fn(q, k, v): ctypes.string_at(0)"


@pytest.mark.long
@pytest.mark.skipif(os.name != "posix", reason="signals as of POSIX")
def test_a_crash_is_a_failure_in_a_process_of_its_own(tmp_path):
    result = process(tmp_path, CRASH, "--isolate")
    assert result.returncode == 1
    assert "FAIL          value_length  expected a result; got the process ended by SIGSEGV" in (
        result.stdout
    )
    assert result.stderr == ""
    unseen = process(tmp_path, CRASH)
    assert (unseen.returncode, unseen.stdout) == (2, "")
    assert "the process ended by SIGSEGV (signal 11) before the report was out" in unseen.stderr


def test_an_exit_in_a_call_is_a_failure_in_a_process_of_its_own(tmp_path):
    result = process(tmp_path, ENDS["hard exit in a call"][0], "--isolate")
    assert result.returncode == 1
    assert "got the process ended with status 0" in result.stdout


@pytest.mark.long("words1")
@pytest.mark.parametrize("words", [(), ("--json",)])
def test_what_an_isolated_candidate_prints_is_kept(tmp_path, words):
    text = RIGHT.replace("    return", "    print('printed')\n    return")
    result = process(tmp_path, text, "--isolate", *words)
    assert result.returncode == 0, result.stderr
    assert "printed" in (result.stderr if words else result.stdout)
    assert not words or json.loads(result.stdout)["verdict"] == "PASS"


HANGS = "import os, time\n{}open('id', 'w').write(str(os.getpid())); time.sleep(100)\n"


@pytest.mark.skipif(os.name != "posix", reason="signals as of POSIX")
@pytest.mark.long("subprocess", "keep")
@pytest.mark.parametrize("words", ["--isolate", "--subprocess", "--keep"])
def test_what_hangs_fails_and_is_ended(tmp_path, words):
    options = ("--time-limit", "3", "--check", "contract")
    if words == "--isolate":
        result = process(tmp_path, HANGS.format("def fn(q, k, v): "), "--isolate", *options)
    else:
        (tmp_path / "program.py").write_text(HANGS.format(""), encoding="utf-8")
        keep = ("--keep",) * (words == "--keep")
        given = ("--subprocess", "npz", *keep, *options)
        result = process(tmp_path, "", *given, target=f"{sys.executable} program.py")
    assert result.returncode == 1, result.stderr
    assert "expected an answer within 3 s; got none" in result.stdout
    assert gone(int((tmp_path / "id").read_text()))


@pytest.mark.skipif(os.name != "posix", reason="terminals as of POSIX")
def test_the_check_that_runs_is_named_on_a_terminal_only(tmp_path):
    pty = pytest.importorskip("pty")
    slow = RIGHT.replace("    return", "    import time; time.sleep(0.01)\n    return")
    silent = process(tmp_path, slow)
    assert silent.stderr == ""
    ours, theirs = pty.openpty()
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm"}
    lost = "import sys; sys.stderr.close()\n" + slow
    shown = process(tmp_path, lost, "--check", "contract", stderr=theirs, env=env)
    os.close(theirs)
    with open(ours, "rb", closefd=True) as terminal:
        text = terminal.read1(2**16).decode()
    assert shown.returncode == 0
    assert "check 1 of 2: contract" in text
    assert "check 2 of 2: value_length" in text
    assert shown.stdout.splitlines()[0] == silent.stdout.splitlines()[0]


@pytest.mark.parametrize("end", ["exit", "interrupt", "base", "attribute", "name"])
def test_an_end_is_unusable_in_this_process_too(here, end):
    (here / "ending_here.py").write_text(ENDS[end][0], encoding="utf-8")
    sys.modules.pop("ending_here", None)
    result = run("ending_here:fn", "--estimator", "softmax")
    assert result.exit_code == 2
    assert ENDS[end][1] in result.output


@pytest.mark.parametrize(
    "raised", ["SystemExit(0)", "KeyboardInterrupt()", "BaseException('odd')", "GeneratorExit()"]
)
def test_an_end_in_a_call_is_a_failure(here, raised):
    text = f"def fn(q, k, v):\n    raise {raised}\n"
    (here / "ending_in_calls.py").write_text(text, encoding="utf-8")
    sys.modules.pop("ending_in_calls", None)
    result = run("ending_in_calls:fn", "--estimator", "softmax")
    assert result.exit_code == 1
    assert result.output.startswith("FAIL: ")


@pytest.mark.parametrize(
    "before",
    [
        "import atexit, os; atexit.register(os._exit, 0)",
        long("import sys; sys.exit = lambda *status: None"),
        "import sys; sys.stdout = open('elsewhere', 'w')",
        long("import sys; sys.stdout = sys.stderr = None"),
        long("import sys; sys.stdout.close()"),
        long("import io, sys; sys.stdout = io.TextIOWrapper(sys.stdout.detach())"),
        long("import os; os.close(1)"),
    ],
)
def test_the_report_and_its_status_come_out(tmp_path, before):
    right = process(tmp_path, f"{before}\n{RIGHT}", "--json")
    assert (right.returncode, json.loads(right.stdout)["verdict"]) == (0, "PASS"), right.stderr
    wrong = process(tmp_path, f"{before}\n{WRONG}")
    assert (wrong.returncode, wrong.stdout[:6]) == (1, "FAIL: "), wrong.stderr


def test_the_status_of_a_report_stands_if_the_end_is_violent(tmp_path):
    text = "import atexit, os, signal\natexit.register(os.kill, os.getpid(), signal.SIGABRT)\n"
    assert process(tmp_path, text + RIGHT).returncode == 0
    assert process(tmp_path, text + WRONG).returncode == 1


@pytest.mark.skipif(os.name != "posix", reason="pipes and closed files as of POSIX")
@pytest.mark.long("words1")
@pytest.mark.parametrize("words", [(), ("--json",)])
def test_a_report_that_nobody_reads(tmp_path, words):
    closed = "standard output is closed"
    result = process(tmp_path, RIGHT, *words, before=("sh", "-c", 'exec "$@" >&-', "sh"))
    assert (result.returncode, closed in result.stderr) == (2, True), result.stderr
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as broken:
        result = process(tmp_path, RIGHT, *words, stdout=broken)
    assert (result.returncode, result.stderr) == (0, "")  # the verdict was known


@pytest.mark.skipif(os.name != "posix", reason="signals as of POSIX")
@pytest.mark.parametrize("isolate", [False, True])
def test_what_is_killed_leaves_nothing_behind(tmp_path, isolate):
    text = HANGS.format("def fn(q, k, v): " if isolate else "")
    (tmp_path / "ending.py").write_text(text, encoding="utf-8")
    words = [sys.executable, "-m", "refattn", "check", "ending:fn", "--estimator", "softmax"]
    with subprocess.Popen([*words, *["--isolate"][:isolate]], cwd=tmp_path) as running:
        while not (tmp_path / "id").exists() or not (tmp_path / "id").read_text():
            time.sleep(0.05)
        running.kill()
    assert gone(int((tmp_path / "id").read_text()))


# Text that candidates write


STRANGE = """
class Odd(Exception):
    def __str__(self):
        raise RuntimeError("no words")

def fn(q, k, v):
    raise ValueError("bad \\udcff\\x00\\x1b[31m\\x9b\\ufffe name")

fn.__qualname__ = "f\\x01\\udc80n"
"""


def test_strange_characters_are_escaped(tmp_path):
    words = ("--json", "out.json", "--junit", "out.xml", "--reproducers")
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PYTHONIOENCODING": "utf-8:strict",
    }
    result = process(tmp_path, STRANGE, *words, env=env)
    name, said = "f\\x01\\udc80n", "bad \\udcff\\x00\\x1b[31m\\x9b\\ufffe name"
    assert result.returncode == 1, result.stderr
    assert result.stdout.startswith(f"FAIL: {name} as softmax")
    assert f"got ValueError: {said}" in result.stdout
    content = json.loads((tmp_path / "out.json").read_text("utf-8"))
    assert content["name"] == name
    assert content["results"][0]["got"] == f"ValueError: {said}"
    root = ElementTree.parse(tmp_path / "out.xml").getroot()
    assert root.get("name") == f"refattn.conformance.softmax.{name}"
    assert said in root.findall("testcase/failure")[0].get("message", "")


def test_an_encoding_without_the_characters(tmp_path):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONIOENCODING": "latin-1"}
    result = process(tmp_path, RIGHT + "fn.__qualname__ = '\\u4e2d'\n", env=env)
    assert (result.returncode, result.stdout[:13]) == (0, "PASS: \\u4e2d "), result


# Time, and programs


def test_a_program_with_braces(here):
    code = (
        "import sys, numpy as np, refattn; given = dict(np.load(sys.argv[1])); kept = {}; "
        "np.savez(sys.argv[2], out=refattn.softmax_attention(**{n: given[n] for n in 'qkv'}))"
    )
    words = ("--subprocess", "npz", "--estimator", "softmax", "--check", "value_length")
    result = run(f'{sys.executable} -c "{code}" {{input}} {{output}}', *words)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("seconds", ["1e-9", "1e10", "1e300"])
def test_time_limits_of_any_size(here, seconds):
    result = softmax("right", "--time-limit", seconds)
    assert result.exit_code == 0 if seconds != "1e-9" else result.exit_code in (1, 3)


def test_reports_go_where_the_caller_is(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    away = "import os; os.chdir('elsewhere')\n"
    result = process(tmp_path, away + RIGHT, "--json", "out.json", "--junit", "out.xml")
    assert result.returncode == 0, result.stderr
    assert sorted(x.name for x in tmp_path.glob("out.*")) == ["out.json", "out.xml"]
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_thread_of_the_candidate_is_not_waited_for(tmp_path):
    endless = "import threading; threading.Thread(target=threading.Event().wait).start()\n"
    assert process(tmp_path, endless + RIGHT).returncode == 0


def test_list_of_specs():
    result = run("--list-specs")
    assert result.exit_code == 0
    assert "  top-left: torch-sdpa, jax-dpa, onnx-23, " in result.output
    assert "  bottom-right: flash-attn-2*, flash-attn-3*\n" in result.output
    assert "  * read in Dao-AILab/flash-attention v2.8.3, hopper/mask.h\n" in result.output
    assert result.output.endswith(
        "135 run by tests/conformance/test_conventions.py, 42 * read, not run\n"
    )


def test_diagnosis_of_a_spec(here):
    words = ("--spec", "onnx-24", "--capability", "mask", "--check", "reference_values")
    result = softmax("wrong", *words)
    assert result.exit_code == 1
    lines = result.output.splitlines()
    assert "  agrees with spec onnx-23, onnx-24, onnxruntime but for scale: 1" in lines
    assert "--list-specs" in run("--help").output
