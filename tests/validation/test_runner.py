"""The validation suite: verdicts, runner and command line."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

from refattn.judge import stats
from tests.cli.running import gone
from tests.validation.conftest import run_claim
from validation import __main__ as cli
from validation import runner, sources, studies, suite
from validation.claims import _clock
from validation.suite import (
    HOLDS,
    REFUTED,
    UNDERPOWERED,
    Claim,
    Compared,
    Findings,
    Statement,
    Timed,
)
from validation.suite import Shown as shown
from validation.suite import Tested as tested

ROOT = Path(__file__).parents[2]
FAST = ["proposition_1", "lara_cases", "mean_of_ratios", "moments"]


def example(**options):
    """A claim with three tasks, whose results are sums of random numbers."""
    given = {"title": "An example", "source": "999", "method": "None."} | {
        "statements": {"s": Statement("It is so.")},
        "tasks": lambda level: [{"factor": i} for i in range(3)],
        "run": lambda rng, factor: float(factor * rng.standard_normal()),
        "judge": lambda results: Findings({"s": [Compared("c", 1.0, 2.0)]}, {"sums": results}),
    }
    return Claim(**given | options)


@pytest.fixture
def examples(monkeypatch):
    """Claims of these tests in place of those of the references."""
    found = {"one": example(name="one"), "two": example(name="two")}
    monkeypatch.setattr(suite, "claims", lambda: found)
    return found


@pytest.fixture
def results(tmp_path):
    return tmp_path / "results.jsonl"


@pytest.fixture
def go(results):
    """The runner in one thread, at level tiny and seed 0 unless others are given."""

    def run(*names, executor=ThreadPoolExecutor, level="tiny", seed=0, **options):
        with executor(1) as threads:
            options |= {"level": level, "seed": seed, "results": results}
            return runner.run([*names], threads, **options)

    return run


def verdict(evidence, level=1e-6):
    one = suite.record(example(name="e"), Findings({"s": evidence}, {}), level)
    json.dumps(one, allow_nan=False)
    return str(one["statements"][0]["verdict"])


@pytest.mark.parametrize(
    ("evidence", "expected"),
    [
        ([tested("t", 0.5)], HOLDS),
        ([tested("t", 1e-6)], REFUTED),
        ([tested("t", 1.1e-6)], HOLDS),
        ([tested("t", 0.6e-6), tested("u", 0.5)], HOLDS),  # Holm: 1.2e-6
        ([tested("t", 0.5, lambda level: 0.2, 0.1)], UNDERPOWERED),
        ([tested("t", 0.5, lambda level: 0.2, 0.3)], HOLDS),
        ([tested("t", 1e-9, lambda level: 0.2, 0.1)], REFUTED),
        ([shown("s", 1e-7)], HOLDS),
        ([shown("s", 1e-5)], UNDERPOWERED),
        ([shown("s", 1.0, 1e-9)], REFUTED),
        ([shown("s", 1e-9), shown("t", 1e-3)], UNDERPOWERED),
        ([Compared("c", 1.0, 1.0)], HOLDS),
        ([Compared("c", 1.1, 1.0)], REFUTED),
        ([Timed("c", 1.1, 1.0)], REFUTED),
        ([Timed("c", 1.1, 1.0, spread=0.05)], REFUTED),
        ([Timed("c", 1.1, 1.0, spread=0.2)], UNDERPOWERED),
        ([Compared("c", float("inf"), 1.0), tested("t", 0.5)], REFUTED),
        ([Compared("c", 0.0, 0.0), shown("s", 1e-3)], UNDERPOWERED),
    ],
)
def test_verdicts(evidence, expected):
    assert verdict(evidence) == expected


def test_what_is_no_evidence():
    strange = {"s": [Compared("c", float("nan"), 1.0)]}
    for evidence, words in ((strange, "c is not a number"), ({"o": []}, "o"), ({"s": []}, "evid")):
        with pytest.raises(ValueError, match=words):
            suite.record(example(name="e"), Findings(evidence, {}), 0.1)


def test_a_clock_and_arithmetic_are_no_evidence_for_one_statement():
    """Either the clock would decide an exit status, or it would excuse the arithmetic."""
    with pytest.raises(ValueError, match="a statement of its own"):
        verdict([Timed("t", 1.0, 2.0), Compared("c", 1.0, 2.0)])


def test_a_detectable_discrepancy_is_at_the_level_that_each_test_may_have():
    levels = []
    one = tested("t", 0.5, lambda level: levels.append(level) or 0.1, 0.2)
    assert verdict([one, tested("u", 0.5)], 1e-6) == HOLDS
    assert levels == [5e-7]


def test_false_alarms():
    count = sum(len(c.statements) for c in suite.claims().values())
    assert suite.alpha() * count == pytest.approx(suite.ALPHA)
    level, runs = 0.05, 1000  # of a statement
    ps = np.random.default_rng(0).random((runs, 20))
    found = [verdict([tested(f"t{i}", float(p)) for i, p in enumerate(x)], level) for x in ps]
    lower, _ = stats.clopper_pearson(found.count(REFUTED), runs, 1 - 1e-6)
    assert lower <= level  # wrong once in 2e6 seeds


def test_every_random_number_follows_from_the_seed_whatever_runs_it(examples, go):
    def data(*names, **options):
        return {r["claim"]: r["data"] for r in go(*names, **options)}

    here = data("one", "two")
    assert here["one"] != here["two"]
    assert data("two", "one", executor=lambda _: ThreadPoolExecutor(3)) == here
    assert data("two") == {"two": here["two"]}
    assert data("one", seed=4)["one"] != here["one"]


def test_resume_keeps_what_is_done_and_runs_what_failed(examples, go, results):
    calls = []

    def fails(rng, factor):
        calls.append(factor)
        raise RuntimeError("no <luck>")

    examples["two"] = example(name="two", run=fails)
    first = go("one", "two")
    assert "no <luck>" in first[1]["error"]
    assert runner.unexpected(first) == ["two: RuntimeError: no <luck>"]
    assert len(calls) == 3
    assert go("one", "two", resume=True)[0] == first[0]
    assert len(calls) == 6
    examples["two"] = example(name="two")
    examples["one"] = example(name="one", run=fails)
    assert "error" not in go("one", "two", resume=True)[1]
    assert len(calls) == 6
    assert [r["claim"] for r in runner.read(results)[1]] == ["one", "two"]


def test_what_is_not_resumed(examples, go, monkeypatch):
    go("one")
    with pytest.raises(ValueError, match="seed 0, not 2"):
        go("one", resume=True, seed=2)
    with pytest.raises(ValueError, match="level 'tiny', not 'quick'"):
        go("one", resume=True, level="quick")
    monkeypatch.setattr(runner, "_code", lambda: "other")
    with pytest.raises(ValueError, match="it was made with code"):
        go("one", resume=True)


def test_each_claim_is_written_when_it_ends(examples, go, results):
    seen = []

    def look(rng, factor):
        seen.append([r["claim"] for r in runner.read(results)[1]])
        return 0.0

    examples["two"] = example(name="two", run=look, alone=True)
    go("two", "one")
    assert seen == [["one"]] * 3  # what is timed comes last


@pytest.mark.parametrize(
    "judge",
    [
        lambda results: Findings({}, {}),
        lambda results: Findings({"s": [Compared("c", 0, 1)]}, {"x": float("nan")}),
        lambda results: 1 / 0,
    ],
)
def test_what_is_judged_wrongly_is_an_error_of_that_claim_alone(judge, examples, go):
    examples["one"] = example(name="one", judge=judge)
    one, two = go("one", "two")
    assert "error" in one
    assert two["statements"][0]["verdict"] == HOLDS


def test_a_result_that_does_not_come_back_is_an_error_of_its_claim(examples, go):
    class Loses(ThreadPoolExecutor):
        def submit(self, fn, name, *rest):
            return super().submit(*((sys.exit, 3) if name == "one" else (fn, name, *rest)))

    one, two = go("one", "two", executor=Loses)
    assert "SystemExit: 3" in one["error"]
    assert "error" not in two


SETTINGS = json.dumps(runner.settings("tiny", 0)) + "\n"
BROKEN = ["hello", "5", "[]", '{"level": "quick"}']
BROKEN += [SETTINGS + x for x in ("7", "{}", '{"claim": "one"}')]


@pytest.mark.parametrize("text", BROKEN)
def test_a_file_that_is_no_file_of_results(text, examples, go, results):
    results.write_text(f"{text}\n")
    with pytest.raises(ValueError, match="is not a file of results"):
        go("one", resume=True)


def test_two_runs_do_not_write_to_one_file(examples, go, results):
    pytest.importorskip("fcntl")
    examples["two"] = example(name="two", run=lambda rng, factor: go("one", seed=1))
    (record,) = go("two")
    assert "another run writes to" in record["error"]
    assert runner.read(results)[0]["seed"] == 0


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def out(tmp_path):
    return tmp_path / "o"


@pytest.fixture
def invoke(examples, out, monkeypatch):
    monkeypatch.setattr(cli, "ProcessPoolExecutor", lambda *_: ThreadPoolExecutor(2))
    return lambda *words: CliRunner().invoke(cli.main, [*words, "--out", str(out)])


def test_the_exit_status_says_whether_every_verdict_is_as_expected(examples, invoke, out):
    assert invoke().exit_code == 0
    statements = {"s": Statement("It is not so.", expected=REFUTED)}
    examples["two"] = example(name="two", statements=statements)
    result = invoke()
    assert result.exit_code == 1
    assert "two, s: HOLDS, expected REFUTED" in result.output
    assert invoke("one").exit_code == 0
    assert invoke("--resume", "--seed", "5").exit_code == 2
    assert invoke("--resume", "one", "two").exit_code == 1
    assert invoke("--vary-seed", "one").exit_code == 0
    assert runner.read(out / "results.jsonl")[0]["seed"] > 5
    (out / "results.jsonl").write_text("hello\n")
    result = invoke("--resume", "one")
    assert result.exit_code == 2
    assert "is not a file of results" in result.output


@pytest.mark.parametrize(
    ("kind", "status", "word", "mark"),
    [(Timed, 0, "timed here", "~"), (Compared, 1, "unexpected", "!")],
)
def test_a_slow_clock_is_reported_and_decides_no_exit_status(
    kind, status, word, mark, examples, invoke, out, monkeypatch
):
    readings = itertools.count(step=60.0)
    clock = SimpleNamespace(perf_counter=lambda: next(readings))
    monkeypatch.setattr(_clock, "time", clock)
    examples["two"] = example(
        name="two",
        alone=True,
        run=lambda rng, factor: _clock.seconds({1: {"call": lambda: None}}, 1)["call"][0],
        judge=lambda seconds: Findings({"s": [kind("call", max(seconds), 1.0, "s")]}, {}),
    )
    result = invoke()
    assert result.exit_code == status
    assert f"{word}: two, s: REFUTED, expected HOLDS (call: 60 s (at most 1))" in result.output
    assert f"\n{mark}  REFUTED  two  s  call: 60 s (at most 1)\n" in result.output
    (one,) = json.loads((out / "report.json").read_text("utf-8"))["claims"][1]["statements"]
    assert (one["verdict"], one["timed"]) == (REFUTED, kind is Timed)


def test_a_claim_without_what_it_needs_is_left_out(examples, invoke, out):
    examples["two"] = example(name="two", needs=("json", "no_such_module"))
    result = invoke()
    assert result.exit_code == 0
    assert "left out: two needs no_such_module" in result.output
    _, records = runner.read(out / "results.jsonl")
    assert [one["claim"] for one in records] == ["one"]


@pytest.mark.parametrize(
    ("main", "words", "said"),
    [
        (cli.main, "no_such", "Unknown claim 'no_such'"),
        (cli.main, "--level huge", "huge"),
        (cli.main, "--workers 0", "--workers"),
        (cli.main, "--seed -1", "--seed"),
        (cli.main, "--vary-seed --resume", "--vary-seed"),
        (studies.main, "model --estimators softmax", "--estimators must be all or of"),
        (studies.main, "model --features 0", "--features must be positive integers, got '0'"),
        (studies.main, "model --draws 0", "--draws"),
        (studies.main, "bugs none", "no entry is called 'none'"),
    ],
)
def test_unusable_arguments(main, words, said):
    result = CliRunner().invoke(main, words.split())
    assert result.exit_code == 2
    assert said in result.output


def test_the_list_of_claims():
    result = CliRunner().invoke(cli.main, ["--list"])
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.output.splitlines()] == list(suite.claims())


@pytest.mark.parametrize("file", ["validation/README.md", "validation/site/guide/verdicts.md"])
def test_the_documents_name_every_claim_once(file):
    text = (ROOT / file).read_text()
    for name, claim in suite.claims().items():
        rows = [line for line in text.splitlines() if f"claims/{name}.py)" in line]
        assert len(rows) == 1, name
        assert claim.title in rows[0]
        assert (claim.source if file == "README.md" else sources.named(claim.source)) in rows[0]


# --- processes ------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2])
def test_processes_find_what_one_thread_finds(workers, results, tmp_path):
    process = suite_process("--out", tmp_path, "--workers", workers, *FAST)
    process.communicate(timeout=300)
    _, records = runner.read(results)
    found = {r["claim"]: (r["statements"], r["data"]) for r in records}
    assert set(found) == set(FAST)
    for name in FAST:
        one = json.loads(json.dumps(run_claim(name)))
        ps = [[e.get("p") for e in s["evidence"]] for s in found[name][0]]
        assert ps == [[e.get("p") for e in s["evidence"]] for s in one["statements"]]
        assert found[name][1] == one["data"]


def suite_process(*arguments):
    command = [sys.executable, "-m", "validation", "--level", "tiny", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, start_new_session=True, **pipes)


@pytest.mark.long
def test_a_killed_run_is_resumed(results, tmp_path):
    claims = suite.claims().items()
    names = [name for name, c in claims if not c.alone and not suite.missing(c.needs)]
    process = suite_process("--out", tmp_path, "--workers", 1, *names)
    end = time.monotonic() + 120
    while time.monotonic() < end and process.poll() is None:
        if results.exists() and len(results.read_bytes().splitlines()) > 2:
            break
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    kept = results.read_text().splitlines()
    assert 3 <= len(kept) < len(names) + 1, "killed too late to show anything"
    results.write_text("\n".join(kept) + '\n{"claim": "cut sh')  # as a full disk would leave it
    process = suite_process("--out", tmp_path, "--workers", 2, "--resume", *names)
    _, error = process.communicate(timeout=300)
    assert process.returncode in (0, 1), error
    lines = results.read_text().splitlines()
    assert lines[: len(kept)] == kept
    assert sorted(json.loads(line)["claim"] for line in lines[1:]) == sorted(names)


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_workers_end_with_a_killed_run(tmp_path):
    process = suite_process("--out", tmp_path, "--workers", 2)
    deadline, workers = time.monotonic() + 60, []
    while len(workers) < 3 and time.monotonic() < deadline and process.poll() is None:
        command = ["ps", "--ppid", str(process.pid), "-o", "pid="]
        workers = subprocess.run(command, capture_output=True, text=True).stdout.split()
        time.sleep(0.05)
    time.sleep(1.0)  # they have started
    process.kill()
    process.communicate(timeout=60)
    assert len(workers) >= 3
    assert {gone(int(worker)) for worker in workers} == {True}
