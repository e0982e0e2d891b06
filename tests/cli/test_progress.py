"""Announced times, and warnings beside the results."""

import time

import pytest

from refattn.cli import options, progress
from tests.cli.commands import LINES
from tests.cli.running import run


def test_more_heads_than_tokens_are_warned_of(capsys):
    for heads, warned in ((8, False), (9, True)):
        options.many_heads(heads, 8, "bhnd")
        assert ("--layout bnhd" in capsys.readouterr().err) is warned


def test_long_work_is_announced_once(capsys):
    assert progress.LONG == 10  # seconds, as the guide says
    with progress.Work("Working") as work:
        work.estimated(9.9)
        work.estimated(100.0)
    assert capsys.readouterr() == ("", "")
    with progress.Work("Working") as work:
        work.estimated(7000.0)
        work.estimated(8000.0)
    assert capsys.readouterr() == ("", "estimated time: about 1.2e+02 min\n")


def test_no_time_is_estimated_where_parts_do_not_tell_it(capsys, monkeypatch):
    clock = iter(range(0, 10_000, 20))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    with progress.Work("Working") as work:
        work.estimate_nothing()
        assert list(work.track(range(5))) == list(range(5))
    assert capsys.readouterr().err == ""


def test_the_rest_is_estimated_from_what_is_done(capsys, monkeypatch):
    clock = iter(range(0, 10_000, 20))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    with progress.Work("Working") as work:
        assert list(work.track(range(5))) == list(range(5))
    assert capsys.readouterr().err.splitlines()[0] == "estimated time: about 100 s"


def test_work_is_told_of_though_no_part_ends(capsys, monkeypatch):
    """Soon, and then now and then: parts are counted forwards only."""
    assert progress.FIRST < 2
    monkeypatch.setattr(progress, "FIRST", 0.01)
    monkeypatch.setattr(progress, "_EVERY", 0.01)
    with progress.Work("Working") as work:
        told = []
        for total, done in ((0, 0), (2, 1), (2, 2), (2, 3)):
            work.expect(total)
            work.done = done
            capsys.readouterr()
            time.sleep(0.2)
            told.append(capsys.readouterr().err.splitlines()[-1].split(" after")[0])
    assert [x.removeprefix("Working: ") for x in told] == [
        "not yet done",
        "1 of 2",
        "2 of 2",
        "not yet done",
    ]


@pytest.mark.long("tolerance")
@pytest.mark.parametrize("name", ["compare", "measure", "tolerance"])
def test_commands_announce_their_time(here, monkeypatch, name):
    monkeypatch.setattr(progress, "LONG", -1.0)
    result = run(*LINES[name].split())
    lines = result.stderr.splitlines()
    if name in ("compare", "measure"):  # from what takes no time to estimate
        assert lines.pop(0).startswith("estimated time: over ")
    assert lines[0].startswith("estimated time: about "), result.stderr


def test_checks_announce_their_time(monkeypatch, capfd):
    monkeypatch.setattr(progress, "_SOON", -1.0)
    assert run(*LINES["check"].split()).exit_code == 0
    assert "time limit: 2 min (--time-limit sets it)\n" in capfd.readouterr().err


def test_vectors_announce_their_time(monkeypatch):
    pytest.importorskip("mpmath")
    from refattn.judge.vectors import recipes, solving

    for name in ("LONG", "_SOON"):
        monkeypatch.setattr(progress, name, -1.0)
    seen = []
    monkeypatch.setattr(solving, "_once", lambda recipe: seen.append(recipe.id))
    monkeypatch.setattr(solving, "documents", dict)
    with progress.Work("Solving") as work:
        solving.prepare(work.track)
    assert sorted(seen) == sorted(recipe.id for recipe in recipes.all_recipes())
    assert work.announced
