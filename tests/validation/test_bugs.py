"""What was found in public implementations: the runner, and that the page is of its results."""

import json
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import refattn
from validation import results as kept
from validation import studies
from validation.bugs import record, runner
from validation.bugs.record import Candidate, Finding, Number, Reading, Tried

VERSIONS = {"here": "1.2", "mended": "2.0"}
BUGS = Path(runner.__file__).parent


def half(q, k, v):
    return refattn.softmax_attention(q, k, v) / 2


def version(name):
    if name not in VERSIONS:
        raise metadata.PackageNotFoundError(name)
    return VERSIONS[name]


@pytest.fixture(autouse=True)
def versions(monkeypatch):
    monkeypatch.setattr(runner.metadata, "version", version)


def measured(value):
    return lambda: (Number("a | b", value, "0", 0.1), Number("to explain", 0.0, "0"))


def finding(name="one", package="here", value=0.5, **more):
    return Finding(name, package, "wrong", "because", "so", measured(value), **more)


def collected(*entries, earlier=None, **more):
    said = []
    results = runner.run(entries, earlier or {}, say=said.append, **more)
    return json.loads(kept.to_json(results)), said


def test_what_reproduces_is_written():
    one = finding(note="documented")
    results, said = collected(one)
    (entry,) = results.values()
    assert entry["version"] == "1.2"
    assert entry["numbers"][0] == {"what": "a | b", "value": 0.5, "right": "0", "bound": 0.1}
    assert said == ["executed: one: here 1.2"]
    page = runner.render(results, [one], [])
    assert "### here: wrong" in page
    assert "Executed: 1 entries in 1 packages." in page
    assert r"| a \| b | 0.5 | 0 |" in page
    assert "**Note.** documented" in page
    results, _ = collected(finding(value=float("nan")))  # which is wrong, too
    assert results["one"]["numbers"][0]["value"] is None
    assert "| not finite |" in runner.render(results, [one], [])


def tried(value):
    return Tried("two", "here", "right", measured(value))


MENDED = finding(package="mended")
GONE = "removed: one: no longer reproduces with mended 2.0"
ABSENT = "skipped: one: absent is not installed"
KEPT = f"{ABSENT}; the entry of version 1.2 is kept"
UNUSABLE = "skipped: one: here does not run: ZeroDivisionError: division by zero"
NOT_FREE = "removed: two: is no longer free of findings with here 1.2"


@pytest.mark.parametrize(
    ("entry", "before", "left", "words"),
    [
        (finding(package="mended", value=0.05), MENDED, [], GONE),
        (finding(package="mended", value=0.1), MENDED, [], GONE),
        (finding(package="absent"), None, [], ABSENT),
        (finding(package="absent"), finding(), ["one"], KEPT),
        (finding()._replace(measure=lambda: 1 / 0), None, [], UNUSABLE),
        (tried(0.05), None, ["two"], "executed: two: here 1.2"),
        (tried(0.5), None, [], NOT_FREE),
        (tried(float("nan")), None, [], NOT_FREE),
    ],
)
def test_what_comes_of_an_entry(entry, before, left, words):
    earlier = collected(before)[0] if before else {}
    results, said = collected(entry, earlier=earlier)
    assert [*results] == left
    assert said[0] == words
    assert words != GONE or "bound 0.1" in said[1]
    assert words != KEPT or results == earlier


def test_only_the_entries_that_are_named_are_run():
    before, _ = collected(finding("one"), finding("two"))
    entries = finding("one", value=0.0), finding("two")
    results, said = collected(*entries, earlier=before, only=["two"])
    assert [*results] == ["one", "two"]
    assert said == ["executed: two: here 1.2"]


def test_what_was_read_is_marked():
    reading = Reading("three", "who/what", "a/b.py", "0123456789abcdef", "title", "because", "so")
    page = runner.render({}, [], [reading])
    assert "*Not executed. Read in [a/b.py](https://github.com/who/what/blob/" in page
    assert "Read, not executed: 1." in page


@pytest.mark.long
def test_the_check_must_fail_too():
    name = f"{__name__}:half"
    wrong = Candidate(name, "softmax", ("reference_values",), tags={"layout": "bhnd"})
    right = Candidate("refattn:softmax_attention", "softmax", ("reference_values",))
    entries = finding(candidate=wrong), finding("two", candidate=right)
    results, _ = collected(*entries)
    (entry,) = results.values()
    line = f"refattn check {name} --estimator softmax --tag layout=bhnd --check reference_values"
    assert (entry["check"]["verdict"], entry["check"]["command"]) == ("FAIL", line)
    assert f"$ {line}\nFAIL\n  FAIL reference_values: expected" in runner.render(
        results, entries, []
    )


def test_the_page_is_of_its_results_and_of_the_entries_of_the_script():
    bundled = kept.read(BUGS / "bugs.json")
    assert (BUGS / "README.md").read_text("utf-8") == runner.render(bundled)
    assert [*bundled] == [x.name for x in runner.ENTRIES if x.name in bundled]
    names = [x.name for x in runner.ENTRIES]
    assert len(set(names)) == len(names)
    entries = {x.name: x for x in runner.ENTRIES}
    for name, written in bundled.items():
        candidate = entries[name].candidate
        command = runner.command(candidate) if candidate else None
        assert (written["check"] or {}).get("command") == command


def test_the_command_line(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "ENTRIES", (finding(),))
    invoke = CliRunner().invoke
    shown = invoke(studies.main, ["bugs", "--out", str(tmp_path)], catch_exceptions=False)
    assert shown.stdout == "executed: one: here 1.2\n"
    assert [*kept.read(tmp_path / "bugs.json")] == ["one"]
    assert "Executed: 1 entries in 1 packages." in (tmp_path / "README.md").read_text()
    assert invoke(studies.main, ["bugs", "--list"]).output == "one\n"
    assert invoke(studies.main, ["bugs", "two"]).exit_code == 2


def test_inputs_are_those_that_are_named():
    q, k, v = record.normal(2.0, d=8, n=16)
    assert q.shape == k.shape == v.shape == (1, 4, 16, 8)
    assert record.error(record.exact(q, k, v), refattn.softmax_attention(q, k, v)) < 1e-6
    assert record.error(np.full(3, 1.1), np.ones(3)) == pytest.approx(0.1)


@pytest.mark.long
@pytest.mark.parametrize("entry", runner.ENTRIES, ids=lambda x: x.name)
def test_entries_hold_where_their_package_is(entry, monkeypatch):
    monkeypatch.undo()
    results, said = collected(entry)
    if not results:
        assert said[0].startswith("skipped"), said
        pytest.skip(said[0])
