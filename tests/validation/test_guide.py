"""The pages of the guide: their blocks run, and print what is shown."""

import re

import pytest

from refattn.rounding import PROFILES
from tests.validation import guide_blocks
from tests.validation.guide_blocks import GUIDE, difference

OUTPUTS = {"choose": 1, "ci": 5, "gradients": 2, "index": 1, "numbers": 2, "performer": 1} | {
    "questions": 1,
    "streaming": 5,
    "tolerances": 1,
    "verdicts": 2,
}  # that are compared


@pytest.mark.docs("choose", "ci", "gradients", "index", "numbers", "performer", "tolerances")
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


def test_every_profile_is_in_the_table_of_numbers():
    first = [x.split("|")[1] for x in guide_blocks.page("numbers").splitlines() if x[:3] == "| `"]
    assert sorted(re.findall("`(.*?)`", "".join(first))) == sorted(PROFILES)


def test_the_glossary_is_in_order():
    words = re.findall(r"^\| ([^|]+) \|", guide_blocks.page("glossary"), re.MULTILINE)[1:]
    assert {"tolerance", "tolerated"} <= {*words}
    assert words == sorted(words, key=str.casefold)


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("a 1.00\n...\nd\n", "a 1.01\nb\nc\nd\n"),
        ("...\nc  2.0\n...\n", "a\nb\nc 2.01\nd\n"),
        ("an error of 0.024, 1.5 s", "an error of 0.0241, 27 s"),
        (
            "estimator  seconds  ±\nra            0.12  3\n",
            "estimator  seconds  ±\nra            117.  3\n",
        ),
    ],
)
def test_likeness_is_seen(shown, printed):
    assert not difference(shown, printed)


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("an error of 0.024", "an error of 0.03"),
        ("an error of 0.024", "the error of 0.024"),
        ("a\n...\nc\n", "a\nb\nc\nd\n"),  # something after the last line
        ("b\n...\n", "a\nb\n"),  # something before the first
        ("a\nc\n", "a\nb\nc\n"),
        ("a\nb\n", "a\n"),
        ("", "a\n"),
        (
            "estimator  seconds  ±\nra            0.12  3\n",
            "estimator  seconds  ±\nra            0.12  4\n",
        ),
    ],
)
def test_differences_are_seen(shown, printed):
    assert difference(shown, printed)
