"""Windows of each convention, and uses together: every few of them meet, in few cases."""

from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refattn.judge.conformance.candidate.tags import CHOICES
from refattn.judge.conformance.checks.cases import covering
from tests.judge.conformance.candidates import (
    OF_OPTIONS,
    SEES,
    at_first_token,
    attending,
    checked,
    of,
)

WINDOWS = CHOICES["window"]


def moved(tag, corner):
    """A window as a mask, where the tag says that it lies, and causal at a corner."""

    def before(options, q, k):
        n, m = q.shape[-2], k.shape[-2]
        if "window" in options:
            left, right = options.pop("window")
            ahead = np.arange(m) - np.arange(n)[:, None] - (0 if "top-left" in tag else m - n)
            least = -np.inf if left is None else ("exclusive" in tag) - left
            seen = (ahead >= least) & (ahead <= (np.inf if right is None else right))
            options["mask"] = seen & options.get("mask", True)
        return options if corner == "bottom-right" else at_first_token(q, k, None, options)[-1]

    return attending(before)


@pytest.mark.long("all", "top", "inclusive, top", "inclusive, bottom", "exclusive, bottom")
@pytest.mark.parametrize("extent", ["windows", "all"])
@pytest.mark.parametrize("tag", WINDOWS)
@pytest.mark.parametrize("corner", ["bottom-right", "top-left"])
def test_windows_of_each_convention(tag, corner, extent):
    """Each passes as what it is declared to be, and is told what it is in place of another."""
    fn = moved(tag, corner)
    names = OF_OPTIONS if extent == "all" else ("windows",)
    others = [x for x in WINDOWS if x != tag]
    right = of(fn, "softmax", *SEES, "window", window=tag, causal=corner)
    assert checked(right, *names).verdict == "PASS"
    for other in others if extent == "all" else others[:1]:
        adapter = of(fn, "softmax", *SEES, "window", window=other, causal=corner)
        report = checked(adapter, *names)
        assert report.verdict == "FAIL"
        (words,) = report.diagnosis
        assert words.endswith(f"except that window is {tag}")


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.integers(1, 4), st.integers(0, 99))
@settings(max_examples=40)
def test_every_few_levels_meet(sizes, strength, seed):
    levels = {f"factor {i}": tuple(range(size)) for i, size in enumerate(sizes)}
    rows = list(covering(levels, np.random.default_rng(seed), strength))
    assert rows[0] == dict.fromkeys(levels, 0)
    assert len(rows) <= np.prod(sizes)
    for names in combinations(levels, min(strength, len(levels))):
        met = {tuple(row[name] for name in names) for row in rows}
        assert met == set(product(*(levels[name] for name in names)))


def test_few_cases_cover_many():
    levels = {str(i): tuple(range(size)) for i, size in enumerate((3, 3, 8, 2, 3, 3, 2))}
    rows = list(covering(levels, np.random.default_rng(0)))
    assert 72 <= len(rows) <= 150  # of 2,592; 72 have all of the three longest factors
