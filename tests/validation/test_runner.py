"""The validation suite: verdicts, runner and command line."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from refattn import stats
from tests.validation.claims import run as run_claim
from validation import __main__ as cli
from validation import runner, sources, suite
from validation.suite import (
    HOLDS,
    REFUTED,
    UNDERPOWERED,
    Claim,
    Compared,
    Findings,
    Shown,
    Statement,
)

ROOT = Path(__file__).parents[2]
FAST = ["proposition_1", "lara_cases", "mean_of_ratios", "moments"]


class Here(Executor):
    """An executor that does everything at once, in this thread."""

    def submit(self, fn, /, *args, **kwargs):
        future = Future()
        future.set_result(fn(*args, **kwargs))
        return future


def example(**options):
    """A claim with three tasks, whose results are sums of random numbers."""
    given = {
        "title": "An example",
        "source": "999",
        "statements": {"s": Statement("It is so.")},
        "method": "None.",
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


def verdict(evidence, level=1e-6):
    one = suite.record(example(name="e"), Findings({"s": evidence}, {}), level)
    json.dumps(one, allow_nan=False)
    return str(one["statements"][0]["verdict"])


@pytest.mark.parametrize(
    ("evidence", "expected"),
    [
        ([suite.Tested("t", 0.5)], HOLDS),
        ([suite.Tested("t", 1e-6)], REFUTED),
        ([suite.Tested("t", 1.1e-6)], HOLDS),
        ([suite.Tested("t", 0.6e-6), suite.Tested("u", 0.5)], HOLDS),  # Holm: 1.2e-6
        ([suite.Tested("t", 0.5, lambda level: 0.2, 0.1)], UNDERPOWERED),
        ([suite.Tested("t", 0.5, lambda level: 0.2, 0.3)], HOLDS),
        ([suite.Tested("t", 1e-9, lambda level: 0.2, 0.1)], REFUTED),
        ([Shown("s", 1e-7)], HOLDS),
        ([Shown("s", 1e-5)], UNDERPOWERED),
        ([Shown("s", 1.0, 1e-9)], REFUTED),
        ([Shown("s", 1e-9), Shown("t", 1e-3)], UNDERPOWERED),
        ([Compared("c", 1.0, 1.0)], HOLDS),
        ([Compared("c", 1.1, 1.0)], REFUTED),
        ([Compared("c", float("inf"), 1.0), suite.Tested("t", 0.5)], REFUTED),
        ([Compared("c", 0.0, 0.0), Shown("s", 1e-3)], UNDERPOWERED),
    ],
)
def test_verdicts(evidence, expected):
    assert verdict(evidence) == expected


def test_what_is_not_a_number_is_no_evidence():
    with pytest.raises(ValueError, match="c is not a number"):
        verdict([Compared("c", float("nan"), 1.0)])


def test_a_detectable_discrepancy_is_at_the_level_that_each_test_may_have():
    levels = []
    tested = suite.Tested("t", 0.5, lambda level: levels.append(level) or 0.1, 0.2)
    assert verdict([tested, suite.Tested("u", 0.5)], 1e-6) == HOLDS
    assert levels == [5e-7]


def test_the_level_of_all_statements_together():
    count = sum(len(c.statements) for c in suite.claims().values())
    assert suite.alpha() * count == pytest.approx(suite.ALPHA)


def test_evidence_is_for_the_statements_of_the_claim():
    with pytest.raises(ValueError, match="other"):
        suite.record(example(name="e"), Findings({"other": []}, {}), 0.1)
    with pytest.raises(ValueError, match="evidence"):
        suite.record(example(name="e"), Findings({"s": []}, {}), 0.1)


def test_false_alarms_of_a_statement():
    rng = np.random.default_rng(0)
    level, runs = 0.05, 1000
    alarms = 0
    for _ in range(runs):
        evidence = [suite.Tested(f"t{i}", float(p)) for i, p in enumerate(rng.random(20))]
        alarms += verdict(evidence, level) == REFUTED
    assert stats.clopper_pearson(alarms, runs, 1 - 1e-6)[0] <= level  # wrong once in 2e6 seeds


@pytest.mark.long(
    "lara_consistent",
    "distributions",
    "orthogonal_against_iid",
    "variance_laws",
    "cost",
    "linear_time",
)
@pytest.mark.parametrize("name", suite.claims())
def test_every_claim_at_a_tiny_level(name):
    claim = suite.claims()[name]
    if missing := suite.missing(claim.needs):
        pytest.skip(f"needs {', '.join(missing)}")
    one = run_claim(name)
    json.dumps(one, allow_nan=False)
    for s in one["statements"]:
        if not claim.alone and s["expected"] == HOLDS:  # a clock may say anything
            assert s["verdict"] != REFUTED, s["number"]
        assert s["text"].strip()
    assert claim.title.strip()
    assert claim.method.strip()
    assert claim.source.startswith(("000", "001", "002", "003", "004", "arXiv:"))
    for plot in filter(None, [claim.plot, *(e.plot for e in claim.errata)]):
        figure = plot(json.loads(json.dumps(one["data"])))
        assert figure.axes


def test_every_random_number_follows_from_the_seed_whatever_runs_it(examples, tmp_path):
    def go(executor, names, seed=3):
        with executor:
            records = runner.run(
                names, executor, level="tiny", seed=seed, results=tmp_path / "r.jsonl"
            )
        return {r["claim"]: r["data"] for r in records}

    here = go(Here(), ["one", "two"])
    assert here["one"] != here["two"]
    assert go(ThreadPoolExecutor(3), ["two", "one"]) == here
    assert go(Here(), ["two"]) == {"two": here["two"]}
    assert go(Here(), ["one"], seed=4)["one"] != here["one"]


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2])
def test_processes_find_what_one_thread_finds(workers, tmp_path, request):
    out = tmp_path / "out"
    process = suite_process(["--out", str(out), "--workers", str(workers), *FAST])
    process.communicate(timeout=300)
    _, records = runner.read(out / "results.jsonl")
    found = {r["claim"]: (r["statements"], r["data"]) for r in records}
    assert set(found) == set(FAST)
    for name in FAST:
        one = json.loads(json.dumps(run_claim(name)))
        ps = [[e.get("p") for e in s["evidence"]] for s in found[name][0]]
        assert ps == [[e.get("p") for e in s["evidence"]] for s in one["statements"]]
        assert found[name][1] == one["data"]


def suite_process(arguments):
    command = [sys.executable, "-m", "validation", "--level", "tiny", *arguments]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.long
def test_a_killed_run_is_resumed(tmp_path):
    claims = suite.claims().items()
    names = [name for name, c in claims if not c.alone and not suite.missing(c.needs)]
    results = tmp_path / "results.jsonl"
    process = suite_process(["--out", str(tmp_path), "--workers", "1", *names])
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
    process = suite_process(["--out", str(tmp_path), "--workers", "2", "--resume", *names])
    _, error = process.communicate(timeout=300)
    assert process.returncode in (0, 1), error
    lines = results.read_text().splitlines()
    assert lines[: len(kept)] == kept
    assert sorted(json.loads(line)["claim"] for line in lines[1:]) == sorted(names)


def test_resume_keeps_what_is_done_and_runs_what_failed(examples, tmp_path, monkeypatch):
    results = tmp_path / "r.jsonl"
    calls = []

    def fails(rng, factor):
        calls.append(factor)
        raise RuntimeError("no <luck>")

    examples["two"] = example(name="two", run=fails)

    def go(**options):
        names = ["one", "two"]
        return runner.run(names, Here(), level="tiny", seed=1, results=results, **options)

    first = go()
    assert "no <luck>" in first[1]["error"]
    assert runner.unexpected(first) == ["two: RuntimeError: no <luck>"]
    assert len(calls) == 3
    again = go(resume=True)
    assert again[0] == first[0]
    assert len(calls) == 6
    examples["two"] = example(name="two")
    examples["one"] = example(name="one", run=fails)
    assert "error" not in go(resume=True)[1]
    assert len(calls) == 6
    assert [r["claim"] for r in runner.read(results)[1]] == ["one", "two"]
    with pytest.raises(ValueError, match="seed 1, not 2"):
        runner.run(["one"], Here(), level="tiny", seed=2, results=results, resume=True)
    with pytest.raises(ValueError, match="level 'tiny', not 'quick'"):
        runner.run(["one"], Here(), level="quick", seed=1, results=results, resume=True)


def test_each_claim_is_written_when_it_ends(examples, tmp_path):
    results = tmp_path / "r.jsonl"
    seen = []

    def look(rng, factor):
        seen.append([r["claim"] for r in runner.read(results)[1]])
        return 0.0

    examples["two"] = example(name="two", run=look, alone=True)
    runner.run(["two", "one"], Here(), level="tiny", seed=1, results=results)
    assert seen == [["one"]] * 3  # what is timed comes last


def test_what_is_judged_wrongly_is_an_error_of_that_claim_alone(examples, tmp_path):
    for broken in (
        lambda results: Findings({}, {}),
        lambda results: Findings({"s": [Compared("c", 0, 1)]}, {"x": float("nan")}),
        lambda results: 1 / 0,
    ):
        examples["one"] = example(name="one", judge=broken)
        records = runner.run(
            ["one", "two"], Here(), level="tiny", seed=0, results=tmp_path / "r.jsonl"
        )
        assert "error" in records[0]
        assert records[1]["statements"][0]["verdict"] == HOLDS


def test_the_exit_status_says_whether_every_verdict_is_as_expected(examples, tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "ProcessPoolExecutor", lambda *_: ThreadPoolExecutor(2))

    def invoke(*arguments):
        return CliRunner().invoke(cli.main, [*arguments, "--out", str(tmp_path / "o")])

    assert invoke().exit_code == 0
    examples["two"] = example(
        name="two", statements={"s": Statement("It is not so.", expected=REFUTED)}
    )
    result = invoke()
    assert result.exit_code == 1
    assert "two, s: HOLDS, expected REFUTED" in result.output
    assert invoke("one").exit_code == 0
    assert invoke("--resume", "--seed", "5").exit_code == 2
    assert invoke("--resume", "one", "two").exit_code == 1
    assert invoke("--vary-seed", "one").exit_code == 0
    settings, _ = runner.read(tmp_path / "o" / "results.jsonl")
    assert settings["seed"] > 5


def test_a_claim_without_what_it_needs_is_left_out_and_that_said(examples, tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "ProcessPoolExecutor", lambda *_: ThreadPoolExecutor(2))
    examples["two"] = example(name="two", needs=("json", "no_such_module"))
    result = CliRunner().invoke(cli.main, ["--out", str(tmp_path)])
    assert result.exit_code == 0
    assert "left out: two needs no_such_module" in result.output
    assert [one["claim"] for one in runner.read(tmp_path / "results.jsonl")[1]] == ["one"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no_such"], "Unknown claim 'no_such'"),
        (["--level", "huge"], "huge"),
        (["--workers", "0"], "--workers"),
        (["--seed", "-1"], "--seed"),
        (["--vary-seed", "--resume"], "--vary-seed"),
    ],
)
def test_unusable_arguments(arguments, said, tmp_path):
    result = CliRunner().invoke(cli.main, [*arguments, "--out", str(tmp_path / "o")])
    assert result.exit_code == 2
    assert said in result.output


@pytest.mark.parametrize("text", ["hello\n", "5\n", "[]\n", '{"level": "quick"}\n'])
def test_a_file_that_is_no_file_of_results(text, tmp_path):
    (tmp_path / "results.jsonl").write_text(text)
    result = CliRunner().invoke(cli.main, ["--resume", "--out", str(tmp_path), FAST[0]])
    assert result.exit_code == 2
    assert "is not a file of results" in result.output


@pytest.mark.parametrize("record", ["7", "{}", '{"claim": "one"}'])
def test_a_record_that_is_none(record, examples, tmp_path):
    results = tmp_path / "r.jsonl"
    results.write_text(json.dumps(runner.settings("tiny", 0)) + f"\n{record}\n")
    with pytest.raises(ValueError, match="is not a file of results"):
        runner.run(["one"], Here(), level="tiny", seed=0, results=results, resume=True)


def test_two_runs_do_not_write_to_one_file(examples, tmp_path):
    pytest.importorskip("fcntl")
    options = {"level": "tiny", "results": tmp_path / "r.jsonl"}

    def again(rng, factor):
        runner.run(["one"], Here(), seed=1, **options)
        return 0.0

    examples["two"] = example(name="two", run=again)
    (record,) = runner.run(["two"], Here(), seed=0, **options)
    assert "another run writes to" in record["error"]
    assert runner.read(options["results"])[0]["seed"] == 0


def test_results_of_other_code_are_not_resumed(examples, tmp_path, monkeypatch):
    options = {"level": "tiny", "seed": 0, "results": tmp_path / "r.jsonl"}
    runner.run(["one"], Here(), **options)
    monkeypatch.setattr(runner, "_code", lambda: "other")
    with pytest.raises(ValueError, match="it was made with code"):
        runner.run(["one"], Here(), resume=True, **options)


def test_a_result_that_does_not_come_back_is_an_error_of_its_claim(examples, tmp_path):
    class Loses(Here):
        def submit(self, fn, /, *args, **kwargs):
            future = super().submit(fn, *args, **kwargs)
            if args[0] == "one":
                future = Future()
                future.set_exception(SystemExit(3))
            return future

    records = runner.run(
        ["one", "two"], Loses(), level="tiny", seed=0, results=tmp_path / "r.jsonl"
    )
    assert "SystemExit: 3" in records[0]["error"]
    assert "error" not in records[1]


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_workers_end_with_a_killed_run(tmp_path):
    process = suite_process(["--out", str(tmp_path), "--workers", "2"])
    deadline = time.monotonic() + 60
    workers = []
    while len(workers) < 3 and time.monotonic() < deadline and process.poll() is None:
        listed = subprocess.run(
            ["ps", "--ppid", str(process.pid), "-o", "pid="], capture_output=True, text=True
        )
        workers = [int(pid) for pid in listed.stdout.split()]
        time.sleep(0.05)
    time.sleep(1.0)  # they have started
    process.kill()
    process.communicate(timeout=60)

    def alive(pid):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return False
        return state != "Z"

    while any(map(alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(workers) >= 3
    assert not any(map(alive, workers))


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
