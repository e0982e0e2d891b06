"""The pages of the guide: their blocks run, and print what is shown."""

import operator
import re

import pytest

import refattn
from refattn.judge.mistakes.defects import MUTANTS
from refattn.judge.rounding import PROFILES
from refattn.judge.rounding.hardware import UNITS
from refattn.judge.rounding.profiles import LINEAR
from tests.validation import guide_blocks
from tests.validation.guide_blocks import GUIDE, difference

OUTPUTS = {  # that are compared
    "audit": 2, "choose": 1, "ci": 5, "cite": 1, "extend": 4, "gradients": 2, "index": 1,
    "mistakes": 1, "numbers": 2, "performer": 1, "questions": 1, "recurrences": 1, "streaming": 5,
    "tolerances": 1, "verdicts": 2,
}  # fmt: skip


@pytest.mark.docs(
    *("audit", "choose", "ci", "extend", "gradients", "index", "numbers", "performer"),
    *("tolerances",),
)
@pytest.mark.parametrize("name", sorted(path.stem for path in GUIDE.glob("*.md")))
def test_pages_show_what_is_printed(name, tmp_path, monkeypatch):
    for module in ("click", "rich", "safetensors", "ml_dtypes"):
        pytest.importorskip(module)
    monkeypatch.chdir(tmp_path)
    compared = 0
    for run in guide_blocks.runs(guide_blocks.page(name), tmp_path):
        assert not difference(run.shown, run.printed), run.code
        compared += bool(run.shown)
    assert compared == OUTPUTS.get(name, 0)


def test_every_profile_and_unit_is_in_the_tables_of_numbers():
    tables = re.findall(r"\| (?:profile|hardware) .*\n(?:\|.*\n)+", guide_blocks.page("numbers"))
    first = [x.split("|")[1] for x in "".join(tables).splitlines() if x[:3] == "| `"]
    listed = {*re.findall("`(.*?)`", "".join(first))}
    every = {*PROFILES, *LINEAR, *UNITS}
    assert listed <= every
    named = (x for x in every if not x.endswith(("-cast", "-by-head")))
    assert {*named} <= listed


def test_names_in_the_table_of_functions_exist():
    lines = guide_blocks.page("where").splitlines()
    cells = " ".join(line.split(" | ")[-1] for line in lines if line.endswith("` |"))
    names = re.findall(r"`([a-z][\w.]*)[(`]", cells)
    assert "features.positive_features" in names
    assert "testing.assert_attention_close" in names
    for name in names:
        assert callable(operator.attrgetter(name)(refattn))


def test_pages_agree_on_the_number_of_known_bugs():
    back = sum("vjp" in x.capabilities for x in MUTANTS)
    assert f"{len(MUTANTS)} known bugs, {back} of them" in " ".join(guide_blocks.page("ci").split())
    assert f"{len(MUTANTS)} known bugs" in guide_blocks.page("verdicts")
    assert f"{len(MUTANTS)} known bugs" in (GUIDE.parents[2] / "CHANGELOG.md").read_text("utf-8")


def test_the_glossary_is_in_order():
    words = re.findall(r"^\| ([^|]+) \|", guide_blocks.page("glossary"), re.MULTILINE)[1:]
    assert {"tolerance", "tolerated"} <= {*words}
    assert words == sorted(words, key=str.casefold)


HEAD = "estimator  seconds  ±\n"


@pytest.mark.parametrize(
    ("like", "shown", "printed"),
    [
        (True, "a 1.00\n...\nd\n", "a 1.01\nb\nc\nd\n"),
        (True, "...\nc  2.0\n...\n", "a\nb\nc 2.01\nd\n"),
        (True, "an error of 0.024, 1.5 s", "an error of 0.0241, 27 s"),
        (True, HEAD + "ra            0.12  3\n", HEAD + "ra            117.  3\n"),
        (False, HEAD + "ra            0.12  3\n", HEAD + "ra            0.12  4\n"),
        (False, "an error of 0.024", "an error of 0.03"),
        (False, "an error of 0.024", "the error of 0.024"),
        (False, "a\n...\nc\n", "a\nb\nc\nd\n"),  # something after the last line
        (False, "b\n...\n", "a\nb\n"),  # something before the first
        (False, "a\nc\n", "a\nb\nc\n"),
        (False, "a\nb\n", "a\n"),
        (False, "", "a\n"),
    ],
)
def test_likeness_and_differences_are_seen(like, shown, printed):
    assert (not difference(shown, printed)) is like
