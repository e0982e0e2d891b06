"""How far work is, limits of time, and warnings beside the results."""

import time

from refattn.cli import options, progress
from tests.cli.commands import LINES
from tests.cli.running import run


def test_more_heads_than_tokens_are_warned_of(capsys):
    for heads, warned in ((8, False), (9, True)):
        options.many_heads(heads, 8, "bhnd")
        assert ("--layout bnhd" in capsys.readouterr().err) is warned


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


def test_checks_announce_their_limit_of_time(monkeypatch, capfd):
    monkeypatch.setattr(progress, "_SOON", -1.0)
    assert run(*LINES["check"].split()).exit_code == 0
    assert "time limit: 2 min (--time-limit sets it)\n" in capfd.readouterr().err
