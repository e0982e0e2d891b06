"""Digits of softmax attention in float64: the search for hard inputs, and what libraries get."""

import json
from fractions import Fraction
from unittest.mock import Mock

import numpy as np
import pytest
from click.testing import CliRunner

from refattn.judge.vectors import hard, solving
from refattn.judge.vectors.hard import Hard
from validation import studies
from validation.digits import libraries, precision, search
from validation.digits.libraries import Library, Row

SMALL = [Hard("tie", 2, m=8, d=4, d_v=2), Hard("means", 3, m=6, d=4, d_v=2)]
LIBRARIES = {x.name: x for x in libraries.LIBRARIES}


def inputs(case):
    return [hard.recipe(case).inputs[name] for name in "qkv"]


def exact_output(case):
    """Numbers as text, with all their digits."""
    return solving.solved(hard.recipe(case))["expected"]["out"]["data"]


@pytest.mark.long("cancelling", "equal", "large", "means", "sink", "tie")
@pytest.mark.parametrize("family", hard.POWERS)
def test_search_finds_worse(family):
    start = Hard(family, 2, m=48, d=16)
    for relative in search.RELATIVE:
        found = search.climb(start, steps=40, relative=relative)
        assert found.start == start
        assert getattr(found.last, relative) > getattr(found.first, relative)
        assert found.best._replace(seed=0, width=0) == start
        assert search.WIDTHS[family][0] <= found.best.width <= search.WIDTHS[family][1]
    assert search.climb(start, steps=0).best == start


def test_search_is_deterministic():
    first, second, other = (search.climb(SMALL[0], steps=20, seed=seed) for seed in (0, 0, 1))
    assert first == second
    assert first.best != other.best


def test_lost_digits_are_those_of_exact_numbers():
    for case in SMALL:
        exact = np.array([float(x) for x in exact_output(case)])
        error = abs(search.plain(*inputs(case)).ravel() - exact) / abs(exact) * 2.0**53
        found = search.lost(case)
        assert found.output == pytest.approx(np.log10(error.max()), abs=0.01)
        assert found.median == pytest.approx(np.log10(np.median(error)), abs=0.01)
        assert found.terms <= found.output


def test_what_cannot_be_judged_is_refused(monkeypatch):
    monkeypatch.setattr(search, "_PROVEN", 0.0)
    with pytest.raises(ArithmeticError, match="bound of the exact output is too large"):
        search.lost(SMALL[0])
    found = search.climb(SMALL[0], steps=3)
    assert found.best == SMALL[0]
    assert found.last.output == -np.inf


def test_starts_are_where_the_winners_are_from():
    starts = list(search.starts())
    assert starts == [case._replace(seed=0, width=0) for case in hard.HARD_CASES]
    levels = {(x, 1 + i) for x, powers in hard.POWERS.items() for i in range(len(powers))}
    assert {(x.family, x.level) for x in starts} == levels
    for case in hard.HARD_CASES:
        assert search.WIDTHS[case.family][0] <= case.width <= search.WIDTHS[case.family][1]
        assert 0 <= case.seed < search.SEEDS


@pytest.mark.parametrize("family", hard.POWERS)
def test_winners_lose_more_than_starts(family):
    for start, best in zip(search.starts(), hard.HARD_CASES, strict=True):
        if start.family == family:
            assert search.lost(best).output > search.lost(start).output + 0.5


def test_search_command():
    found = CliRunner().invoke(search.main, ["--family", "large", "--steps", "2"])
    assert found.exit_code == 0
    _, _, first, _ = found.output.splitlines()
    assert first.startswith("| softmax-hard-large-level1-seed")


def test_digits_of_known_errors():
    case = SMALL[0]
    data = exact_output(case)
    exact = np.array([float(x) for x in data])
    assert min(libraries.digits(exact, case).output) > 15.9
    assert libraries.digits(exact * (1 + 1e-5), case).output == pytest.approx([5.0] * 4, abs=1e-6)
    assert libraries.digits(exact * 0, case).output == [0.0] * 4
    assert libraries.digits(exact * 1e9, case).output == [0.0] * 4
    assert libraries.digits(exact * np.nan, case) == ([0.0] * 4, [0.0] * 4)
    low = np.array([float(Fraction(x) - Fraction(y)) for x, y in zip(data, exact, strict=True)])
    assert libraries.digits((exact, low), case, "pairs").output == [30.0] * 4
    off = libraries.digits(exact * (1 + 1e-5), case)
    assert all(x > y for x, y in zip(off.terms, off.output, strict=True))  # terms cancel


def test_rows_and_table():
    ours = [LIBRARIES[name] for name in ("formula, NumPy", "refattn", "refattn.certified")]
    rows, skipped = libraries.measure(SMALL, ours)
    assert skipped == []
    places = [(one.name, case.family, case.level) for one in ours for case in SMALL]
    assert [(x.library, x.family, x.level) for x in rows] == places
    for row in rows:
        most = 30 if row.library == "refattn.certified" else 16
        assert 0 <= row.least <= row.median <= most
        assert row.least <= row.least_of_terms <= row.median_of_terms <= most
        assert row.median_of_terms > 18 or most == 16
        if most == 16:
            assert abs(row.median - (16 - 3 * row.level)) < 4
    missing = Library("mine", "numpy", Mock(side_effect=OSError("why")))
    sections, data = libraries.table(SMALL, [*ours, missing])
    assert data["rows"] == rows
    for section in sections[:2]:
        assert [tuple(x[:2]) for x in section.rows] == [("tie", 2), ("means", 3)]
        assert {*map(len, section.rows)} == {len(section.columns)} == {2 + len(ours)}
    assert sections[2].markdown().endswith("| mine | OSError('why') |\n")


def test_entries_of_a_level_are_pooled():
    cases = [SMALL[0], SMALL[0]._replace(seed=1)]
    (both,), _ = libraries.measure(cases, [LIBRARIES["refattn"]])
    each = [libraries.measure([case], [LIBRARIES["refattn"]])[0][0] for case in cases]
    assert both.least == min(x.least for x in each)
    assert each[0].least != each[1].least


def test_missing_and_failing_libraries_are_skipped():
    missing = Mock(side_effect=ModuleNotFoundError("no", name="nowhere"))
    failing = Mock(side_effect=OSError("no float64\nhere"))
    broken = [Library("a", "numpy", missing), Library("b", "numpy", lambda: failing)]
    rows, skipped = libraries.measure(SMALL, broken)
    assert rows == []
    assert skipped == [("a", "nowhere is not installed"), ("b", "OSError('no float64\\nhere')")]


@pytest.mark.parametrize(
    ("name", "d", "lower", "upper"),
    [
        ("torch", 8, 12, 17),
        ("torch, MATH", 8, 12, 17),
        ("jax", 16, 4, 7.5),  # the softmax is of float32, with x64 too
        ("onnxruntime", 16, 12, 17),  # float32 holds the root of the scale, 1/2 or 1/4
        ("onnxruntime", 256, 12, 17),
        ("onnxruntime", 8, 4, 10.5),  # the root is rounded to float32
    ],
)
def test_digits_of_other_libraries(name, d, lower, upper):
    pytest.importorskip(LIBRARIES[name].package)
    if name == "onnxruntime":
        pytest.importorskip("onnx")
    case = Hard("large", 1, m=16, d=d, d_v=2)
    assert lower < min(libraries.digits(LIBRARIES[name].load()(*inputs(case)), case).terms) < upper


def test_command(tmp_path, monkeypatch):
    row = Row("mine", "1.0", "tie", 1, 1.0, 2.0, 3.0, 4.0)
    monkeypatch.setattr(libraries, "measure", lambda *args: ([row], []))
    words = ["digits", "--only", "libraries", "--out", str(tmp_path)]
    found = CliRunner().invoke(studies.main, words)
    assert found.exit_code == 0, found.output
    text = (tmp_path / "digits.md").read_text()
    assert text.startswith("## digits relative to the output, least / median\n")
    assert "| tie | 1 | 1.0 / 2.0 |" in text
    data = json.loads((tmp_path / "digits.json").read_text())
    assert data["libraries"] == {"rows": [row._asdict()], "skipped": []}
    assert set(data) == {"environment", "libraries"}


@pytest.mark.long
def test_table_of_certificates():
    (section,), data = precision.certificates_table(1)
    assert len(data) == 90
    assert max(x["worst"] for x in data) < 0.01
    assert min(x["ratios"][0] for x in data) >= 1
    assert len(section.rows) == 6


def test_tables_of_functions_and_costs():
    _, data = precision.functions_table(64)
    assert {x.dtype for x in data} == {"float64", "float32"}
    assert max(x.units for x in data) < 1
    assert len(precision.costs_table(32, 64)[1]) == 4
