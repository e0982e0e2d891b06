"""The mutants of a file, and the cases that reach each of its lines."""

import json
import random

import pytest

from tests import mutants

SOURCE = """
TABLE = (
    (1, 2),
    (3, 4),
)
def function(x):
    return (x +
            6)
"""


def test_lines_without_instructions_belong_to_their_statement():
    assert mutants.first_lines(SOURCE) == {3: 2, 4: 2, 5: 2}


@pytest.mark.parametrize("path", ["../refattn/nothing", "../refattn/nothing.py", "mutants.py"])
def test_paths_are_of_modules(path, monkeypatch):
    monkeypatch.chdir(mutants.ROOT / "tests")
    with pytest.raises(SystemExit, match="is no module of refattn"):
        mutants.chosen(path, 1, random.Random(0))


def test_paths_are_from_the_folder_or_the_root_of_all(monkeypatch):
    monkeypatch.chdir(mutants.ROOT / "tests")
    for path in (
        "../refattn/judge/stats/exact.py",
        str(mutants.ROOT / "refattn/judge/stats/exact.py"),
    ):
        (found,) = mutants.chosen(path, 1, random.Random(0))
        assert found.file == "refattn/judge/stats/exact.py"


def test_a_line_that_is_gone_is_named(tmp_path):
    one = {"file": "refattn/moments.py", "line": 1, "before": "gone", "after": "x"}
    (tmp_path / "some.json").write_text(json.dumps([one]))
    with pytest.raises(SystemExit, match=r"refattn/moments\.py has no line 'gone'"):
        mutants.chosen(str(tmp_path / "some.json"), 1, None)
