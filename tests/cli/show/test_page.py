"""Pages of any width: tables fit, the least important columns are left out, no word is broken."""

import io
import re
import sys

import pytest

from refattn.arrays import tables
from refattn.arrays.tables import Column
from refattn.cli.show import page
from tests.cli.commands import LINES, output
from tests.cli.running import run

pytestmark = pytest.mark.usefixtures("here")


def grid(row, keys=1, **drop):
    columns = [Column(name, drop=drop.get(name, 0)) for name in row]
    return page.Grid(tables.Table("", [row], columns, keys))


@pytest.mark.long("tolerance")
@pytest.mark.parametrize("name", ["compare", "advice", "measure", "tolerance"])
def test_tables_fit_the_page(name):
    wide = output(name, width=300)
    assert "left out at this width" not in wide
    rest = "left out at this width: names (--format csv has all)"

    def words(text):
        parts = re.findall(r"[^\s\d─_]+", text)  # names are broken at underscores
        return {x for word in parts if len(x := word.strip(",")) > 2}

    for width in (36, 40, 60, 80):
        narrow = output(name, width=width)
        assert max(map(len, narrow.splitlines())) <= width
        assert width < 80 or words(narrow) <= words(wide) | words(rest)  # none is broken
        if name == "compare" and width < 60:  # rows are told by samples too
            heads = [x.split()[:2] for x in narrow.splitlines() if x.startswith("estimator")]
            assert len(heads) > 1
            assert all(x == ["estimator", "samples"] for x in heads)


def test_the_least_important_columns_are_left_out():
    table = grid({"a": 1, "bb": 2, "ccc": 3, "dd": 4}, bb=1, dd=1, ccc=2)
    assert table.fitting(17) == [0, 1, 2, 3]  # 1 + 2 + 3 + 2, and three gaps of 3
    assert table.fitting(16) == [0, 2]
    assert table.fitting(1) == [0]
    assert table.parts(9, range(4)) == [[0, 1], [0, 2], [0, 3]]
    assert [len(line) for line in table.drawn(range(4)).splitlines()] == [17] * 3
    narrow, wide = (output("compare", width=x) for x in (80, 120))
    assert "left out at this width: error_worst, worst_head (--format csv has all)\n" in narrow
    assert "worst" not in narrow.partition("left out")[0]
    assert "error_worst   worst_head   seconds" in wide


def test_names_are_broken_before_columns_are_left_out():
    table = tables.Table("", [{"a": 1, "mean_of_b": 2.0}], [Column("a"), Column("mean_of_b")])
    lines = page.Grid(table, broken=True).drawn([0, 1]).splitlines()
    assert [x.strip() for x in lines[:3]] == ["mean_", "of_", "a       b"]
    assert page.Grid(table).drawn([0, 1]).splitlines()[0] == "a   mean_of_b"


def test_tables_that_are_still_too_wide_are_split():
    narrow, wide = (output("compare", "--per-head", width=width) for width in (40, 200))
    cells = {x for line in narrow.split("\n\n", 1)[1].splitlines() for x in line.split()[1:]}
    assert {"rfa-iid@4", "lara-balance@4"} <= cells
    assert len(re.findall("^head", narrow, re.M)) > len(re.findall("^head", wide, re.M)) == 1
    table = grid({"a b": "x", "S": 1, "cccc": 2, "dddd": 3, "eeee": 4}, keys=2, eeee=1)
    kept = table.fitting(19)
    assert table.parts(26, kept) == [[0, 1, 2, 3]]
    assert table.parts(14, kept) == [[0, 1, 2], [0, 1, 3]]


@pytest.mark.long
@pytest.mark.long("60", "80")
@pytest.mark.parametrize("width", [40, 60, 80])
def test_verdicts_fit_the_page(width):
    text = run("verify", "wrong.npz", width=width).stdout
    assert max(map(len, text.splitlines())) <= width
    start = text[text.index("FAIL: ") :].splitlines()
    assert start[1].startswith("  ")  # what goes on is indented
    naive = "check refattn.naive:rfa --estimator softmax --check contract --in-process"
    for words in (LINES["check"], naive, "check --list", "check --list-specs"):
        lines = run(*words.split(), width=width).stdout.splitlines()
        whole = run(*words.split(), width=300).stdout
        assert max(map(len, lines), default=0) <= width or width == 40, words
        assert {x for line in lines for x in line.split()} <= {*whole.split()}  # none is broken


def test_where_lines_are_broken(monkeypatch):
    terminal = io.StringIO()
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(sys, "stdout", terminal)
    assert page.limit() is None
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    assert page.limit() == page.width()
    monkeypatch.setattr(sys, "stdout", None)
    assert page.limit() is None
    monkeypatch.setenv("COLUMNS", "33")
    assert page.limit() == 33
    assert page.hanging("  one two three", 9) == "  one two\n      three"
    assert page.hanging("x" * 50 + " y", None) == "x" * 50 + " y"
    text = run("verify", "wrong.npz", "--verbose", width=None).stdout  # in a pipe
    assert re.search(r"^  48 rows of 32 elements, .*; alpha 1e-06, \d+ tests, \S+ s$", text, re.M)


def test_characters_of_markdown_and_csv_are_escaped():
    markdown = output("advice", "--format", "markdown")
    assert "| N(0, I) |" in markdown
    assert "||" not in markdown
    table = tables.Table("", [{"a": "x|y"}], [Column("a")])
    assert page.Grid(table).markdown().endswith("| x\\|y |\n")
    table = tables.Table("", [{"a": "x\x1b[31m"}], [Column("a")])
    assert page.to_csv([table]) == "a\nx\\x1b[31m\n"
