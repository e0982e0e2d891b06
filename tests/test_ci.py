"""What is run before a change lands: the README's command, then what that skipped."""

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

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
def test_what_is_long_without_saying_so_fails(ci, run, pytester, monkeypatch):
    monkeypatch.setenv("CI", "true") if ci else monkeypatch.delenv("CI", raising=False)
    result = run(pytester.makepyfile(test_wrong=WRONG))
    lines = [line.split()[:2] for line in result.outlines if line.startswith(("FAILED ", "ERROR "))]
    failed = {test.split("::")[1] for _, test in lines if "::" in test}
    slow = {"test_slow", "test_fixture_is_slow"} if ci else set()
    assert failed == {"test_mark_has_a_hyphen[as-tall]"} | slow
    assert run("--full", "test_wrong.py").parseoutcomes()["passed"] == 5 - len(slow)


def test_some_of_a_sweep_are_run_and_what_is_long_by_two_words_is_not(run, pytester):
    path = pytester.makepyfile(test_partly=PARTLY)
    names = [x.split("::")[1].split("[")[0] for x in run(path).outlines if x.startswith("PASSED ")]
    assert names.count("test_both") == 3
    assert 16 < names.count("test_many") < 48  # half, by the checksums of their names
    run("--full", path).assert_outcomes(passed=68)
