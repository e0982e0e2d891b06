"""What is run before a change lands: the README's command, then what that skipped."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

EXAMPLES = {
    "test_function.py": """
import pytest

def test_without():
    pass

def test_skips():
    pytest.importorskip("peer")

@pytest.fixture
def needs():
    pytest.importorskip("peer")

def test_fixture_skips(needs):
    pass

@pytest.mark.parametrize("name", ["sys", "peer"])
def test_one_case_skips(name):
    pytest.importorskip(name)

@pytest.mark.xfail(strict=True)
def test_known_to_fail():
    assert False

@pytest.mark.checks_more
def test_checks_more():
    pass

@pytest.mark.long
def test_long():
    pass

@pytest.mark.long("wide")
@pytest.mark.parametrize("size", ["wide", "narrow"])
def test_long_where_wide(size):
    pass
""",
    "test_module.py": """
import pytest

pytest.importorskip("peer")

def test_first():
    pass

def test_second():
    pass
""",
    "peers/peer.py": "",
}


@pytest.fixture
def examples(tmp_path):
    """A folder of tests, with the hooks of these."""
    for name, text in EXAMPLES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    shutil.copy(ROOT / "tests/conftest.py", tmp_path)
    return tmp_path


def run(folder, *options, **environment):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rA", "--strict-markers", *options],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_what_was_skipped_is_run_where_more_is_installed(examples):
    status, output = run(examples)
    assert status == 0, output
    assert "4 passed, 6 skipped, 1 xfailed in" in output.splitlines()[-1]
    status, output = run(examples, "--last-skipped", "--full", PYTHONPATH=str(examples / "peers"))
    assert status == 0, output
    passed = {line.split("::")[1] for line in output.splitlines() if line.startswith("PASSED ")}
    assert passed == {
        "test_skips",
        "test_fixture_skips",
        "test_one_case_skips[peer]",
        "test_checks_more",
        "test_long",
        "test_long_where_wide[wide]",
        "test_first",
        "test_second",
    }


def test_what_was_skipped_must_be_known(examples):
    for options in ([], ["-p", "no:cacheprovider"]):
        status, output = run(examples, "--last-skipped", *options)
        assert status == pytest.ExitCode.USAGE_ERROR
        assert "--last-skipped needs a run before it" in output
