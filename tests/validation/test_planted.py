"""Bugs planted in the package: each is a change of its text as it is, and its claim notices."""

import ast
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

import refattn
from validation import planted, suite

ROOT = Path(refattn.__file__).parents[1]
BUGS = list(planted.bugs())


def test_every_bug_is_a_change_of_the_text():
    for bug in BUGS:
        assert bug.claim in suite.claims()
        source = ROOT.joinpath(*bug.module.split(".")).with_suffix(".py").read_text("utf-8")
        ast.parse(bug.plant(source))
    assert len({(x.name, x.claim) for x in BUGS}) == len(BUGS)


@pytest.mark.long
@pytest.mark.parametrize("bug", BUGS, ids=[f"{x.claim}: {x.name}" for x in BUGS])
def test_its_claim_notices(bug):
    with ProcessPoolExecutor(1, get_context("spawn")) as fresh:  # it must not have imported refattn
        found, _ = fresh.submit(planted.noticed, bug).result()
    assert found
