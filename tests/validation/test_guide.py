"""The pages of the guide: their blocks run, and print what is shown."""

import re

import pytest

from refattn.rounding import PROFILES
from tests.validation import guide_blocks
from tests.validation.guide_blocks import GUIDE, difference, same

PAGES = sorted(path.stem for path in GUIDE.glob("*.md"))
SHOWN = {  # how many outputs are compared in short runs
    "choose": 1,
    "ci": 2,
    "gradients": 1,
    "index": 1,
    "numbers": 2,
    "performer": 1,
    "questions": 1,
    "streaming": 5,
    "tolerances": 1,
    "verdicts": 2,
}


def try_page(name, folder, monkeypatch, *, long):
    for module in ("click", "rich", "safetensors", "ml_dtypes"):
        pytest.importorskip(module)
    monkeypatch.chdir(folder)
    compared = 0
    for run in guide_blocks.runs(guide_blocks.page(name), folder, long=long):
        assert not difference(run.shown, run.printed), run.code
        compared += bool(run.shown)
    return compared


@pytest.mark.parametrize("name", PAGES)
def test_pages_show_what_is_printed(name, tmp_path, monkeypatch):
    assert try_page(name, tmp_path, monkeypatch, long=False) == SHOWN.get(name, 0)


def test_every_profile_is_in_the_table_of_numbers():
    lines = (GUIDE / "numbers.md").read_text("utf-8").splitlines()
    first = [x.split("|")[1] for x in lines if x.startswith("| `")]
    assert sorted(re.findall("`(.*?)`", "".join(first))) == sorted(PROFILES)


@pytest.mark.long
@pytest.mark.parametrize(("name", "more"), [("ci", 3), ("gradients", 1)])
def test_the_longer_blocks(name, more, tmp_path, monkeypatch):
    assert try_page(name, tmp_path, monkeypatch, long=True) == SHOWN[name] + more


def test_the_glossary_is_in_order():
    words = re.findall(r"^\| ([^|]+) \|", guide_blocks.page("glossary"), re.MULTILINE)[1:]
    assert {"tolerance", "tolerated"} <= {*words}
    assert words == sorted(words, key=str.casefold)


def test_differences_are_seen():
    assert same("error 0.024, 1.5 s", "error 0.0241, 27 s")
    assert not same("error 0.024", "error 0.03")
    assert not same("an error 0.024", "the error 0.024")
    assert not difference("a\n...\nd\n", "a\nb\nc\nd\n")
    assert not difference("...\nc\n...\n", "a\nb\nc\nd\n")
    assert difference("a\n...\nc\n", "a\nb\nc\nd\n")  # something after the last line
    assert difference("b\n...\n", "a\nb\n")  # something before the first
    assert difference("a\nc\n", "a\nb\nc\n")
    assert difference("", "a\n")
