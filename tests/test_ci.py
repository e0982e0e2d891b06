"""What is run before a change lands, and what contributors are told to run."""

import re
import tomllib
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parent.parent
in_a_clone = pytest.mark.skipif(
    not (ROOT / ".ci").is_dir(), reason="a source distribution has no files for contributors"
)

FUNCTIONS = """
import pytest

def test_without(): pass
def test_skips(): pytest.importorskip("peer")

@pytest.fixture
def needs(): pytest.importorskip("peer")
def test_fixture_skips(needs): pass

@pytest.mark.parametrize("name", ["sys", "peer"])
def test_one_case_skips(name): pytest.importorskip(name)

@pytest.mark.xfail(strict=True)
def test_known_to_fail(): assert False
@pytest.mark.checks_more
def test_checks_more(): pass
@pytest.mark.long
def test_long(): pass
@pytest.mark.long("wide")
@pytest.mark.parametrize("size", ["wide", "narrow"])
def test_long_where_wide(size): pass
"""
MODULE = """
import pytest
pytest.importorskip("peer")

def test_first(): pass
def test_second(): pass
"""
WRONG = """
import pytest, time

def work():
    end = time.process_time() + 0.08
    while time.process_time() < end: pass

@pytest.fixture
def slow(): work()
@pytest.fixture(scope="module")
def shared(): work()

def test_slow(): work()
def test_fixture_is_slow(slow): pass
def test_fixture_is_shared(shared): pass
@pytest.mark.long("slow")
@pytest.mark.parametrize("size", ["slow", "fast"])
def test_slow_and_marked(size): work() if size == "slow" else None
@pytest.mark.long("wide", "as-tall")
@pytest.mark.parametrize("size", ["wide", "as-tall"])
def test_mark_has_a_hyphen(size): pass
"""

PARTLY = """
import pytest

@pytest.mark.sweep(2)
@pytest.mark.parametrize("number", range(64))
def test_many(number): pass
@pytest.mark.long("wide+tall")
@pytest.mark.parametrize("width", ["wide", "narrow"])
@pytest.mark.parametrize("height", ["tall", "low"])
def test_both(width, height): pass
"""


@pytest.fixture
def run(pytester):
    """Run a folder of tests with the hooks of these."""
    pytester.makepyfile(test_function=FUNCTIONS, test_module=MODULE)
    hooks = Path(__file__).with_name("conftest.py").read_text("utf-8")
    hooks = hooks.replace("\nLIMIT = 2.0\n", "\nLIMIT = 0.05\n")
    pytester.makeconftest(hooks.replace("importlib.import_module(name)", "pass"))
    return lambda *options: pytester.runpytest_inprocess("-rA", "--strict-markers", *options)


def test_what_was_skipped_is_run_where_more_is_installed(run, pytester, monkeypatch):
    first = run()
    first.assert_outcomes(passed=4, skipped=4, xfailed=1, deselected=2)
    first.stdout.fnmatch_lines(["2 long cases were left out: --full and --soak run them"])
    (pytester.mkdir("peers") / "peer.py").touch()
    monkeypatch.syspath_prepend(pytester.path / "peers")
    result = run("--last-skipped", "--full")
    passed = {line.split("::")[1] for line in result.outlines if line.startswith("PASSED ")}
    assert passed == {
        *("test_skips", "test_fixture_skips", "test_one_case_skips[peer]", "test_checks_more"),
        *("test_long", "test_long_where_wide[wide]", "test_first", "test_second"),
    }
    assert result.ret == 0


@pytest.mark.parametrize("options", [[], ["-p", "no:cacheprovider"]])
def test_what_was_skipped_must_be_known(options, run):
    result = run("--last-skipped", *options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "--last-skipped needs a run before it" in result.stderr.str()


@pytest.mark.long("True")
@pytest.mark.parametrize("ci", [False, True])
def test_what_is_long_without_saying_so_is_named(ci, run, pytester, monkeypatch):
    """It does not fail: what a clock says depends on what else the cores do."""
    monkeypatch.setenv("CI", "true") if ci else monkeypatch.delenv("CI", raising=False)
    result = run(pytester.makepyfile(test_wrong=WRONG))
    slow = {x.split("::")[1].split(":")[0] for x in result.outlines if x.startswith("SLOW ")}
    assert slow == ({"test_slow", "test_fixture_is_slow"} if ci else set())
    lines = [line.split()[:2] for line in result.outlines if line.startswith(("FAILED ", "ERROR "))]
    failed = {test.split("::")[1] for _, test in lines if "::" in test}
    assert failed == {"test_mark_has_a_hyphen[as-tall]"}
    assert run("--full", "test_wrong.py").parseoutcomes()["passed"] == 5


def test_some_of_a_sweep_are_run_and_what_is_long_by_two_words_is_not(run, pytester):
    path = pytester.makepyfile(test_partly=PARTLY)
    names = [x.split("::")[1].split("[")[0] for x in run(path).outlines if x.startswith("PASSED ")]
    assert names.count("test_both") == 3
    assert 16 < names.count("test_many") < 48  # half, by the checksums of their names
    run("--full", path).assert_outcomes(passed=68)


def read(path):
    return (ROOT / path).read_text("utf-8")


def parsed(path):
    return pytest.importorskip("yaml").safe_load(read(path))


@in_a_clone
def test_what_contributors_are_told_of_is_there():
    text = read(".github/CONTRIBUTING.md").replace("NAME", "proposition_1")
    code = re.findall(r"```console\n(.*?)```|`([^`\n]+)`", text, flags=re.DOTALL)
    words = " ".join(block or span for block, span in code).split()
    paths = {x for x in words if re.fullmatch(r"[\w.]+/[\w./]*|\w+\.(md|cff)", x)}
    paths = {x for x in paths if not x.startswith(".venv/")}
    paths |= {f".github/{x}" for x in re.findall(r"\]\(([^)]+)\)", text)}
    assert len(paths) > 40
    assert [x for x in sorted(paths) if not (ROOT / x).exists()] == []
    modules = {x for option, x in pairwise(words) if option == "-m"}
    assert {"pytest", "tests.recorded", "validation"} <= modules
    assert [x for x in modules - {"build"} if find_spec(x) is None] == []


@in_a_clone
def test_the_workflow_runs_what_is_run_here():
    jobs = parsed(".github/workflows/ci.yml")["jobs"]
    steps = [step for job in jobs.values() for step in job["steps"]]
    for action in (x["uses"] for x in steps if "uses" in x):
        assert re.fullmatch(r"actions/(checkout|setup-python)@v\d+", action)
    whole, newcomer = (x["run"].strip().splitlines() for x in steps if "run" in x)
    assert whole == ["bash .ci/run"]
    assert newcomer[0] in read(".ci/run").splitlines()  # it finds the command in the README
    least = tomllib.loads(read("pyproject.toml"))["project"]["requires-python"]
    assert f">={jobs['newcomer']['strategy']['matrix']['python'][0]}" == least


@in_a_clone
def test_what_runs_before_a_commit_is_what_the_extra_installs():
    (local,) = parsed(".pre-commit-config.yaml")["repos"]
    programs = {hook["entry"].split()[0].removeprefix(".venv/bin/") for hook in local["hooks"]}
    extras = tomllib.loads(read("pyproject.toml"))["project"]["optional-dependencies"]
    assert programs == {x.partition(">=")[0] for x in extras["lint"]} - {"refattn[test]"}
    for hook in local["hooks"]:
        assert hook["entry"].partition(" --force")[0].removeprefix(".venv/bin/") in read(".ci/run")


@in_a_clone
def test_forms_of_issues_have_what_github_needs():
    forms = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    assert [x.stem for x in forms] == ["bug", "config", "missing", "wrong_verdict"]
    for path in (x for x in forms if x.stem != "config"):
        form = parsed(path)
        assert {"name", "description", "body"} <= set(form)
        ids = [x["id"] for x in form["body"]]
        assert len(ids) == len(set(ids))
        for field in form["body"]:
            assert field["type"] in ("dropdown", "input", "textarea")
            assert field["attributes"]["label"]
            assert field["validations"] == {"required": True}
