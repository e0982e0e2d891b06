"""A process for the candidate: its end is a failure, and no result changes."""

import ctypes
import os

import pytest

from refattn.judge.conformance import check
from refattn.judge.conformance.candidate import isolation
from tests.judge.conformance.candidates import infinite, pasted, plain, single, writing

SOFTMAX = {"estimator": "softmax", "rng": 0, "isolate": True}


def crashing(q, k, v):
    if k.shape[-2] == 1:
        ctypes.string_at(0)
    return plain(q, k, v)


def contiguous_only(q, k, v):
    return plain(q, k, v) if q.flags.c_contiguous else v


def test_an_interrupt_ends_the_process_that_imports(monkeypatch):
    """Python would wait for it before it ends."""

    def interrupted(self, *asked):
        raise KeyboardInterrupt

    ended = []
    monkeypatch.setattr(isolation._Worker, "start", lambda self: None)
    monkeypatch.setattr(isolation._Worker, "ask", interrupted)
    monkeypatch.setattr(isolation._Worker, "end", lambda self: ended.append(self))
    with pytest.raises(KeyboardInterrupt):
        isolation.Elsewhere(len)
    assert len(ended) == 1


@pytest.mark.long
@pytest.mark.skipif(os.name != "posix", reason="signals as of POSIX")
def test_a_crash_is_a_failure_of_the_check_that_ran():
    report = check(crashing, checks=["contract", "reference_values", "value_length"], **SOFTMAX)
    assert [(r.check, r.status) for r in report.results] == [
        ("contract", "PASS"),
        ("reference_values", "FAIL"),
    ]
    assert report.results[1].severity == "contract"
    assert report.results[1].got == "none: the process ended by SIGSEGV (signal 11)"
    assert report.not_tried["value_length"] == "the candidate crashed"
    script = report.results[1].reproducer
    assert "isolate=True" in script
    again = pasted(f"if __name__ == '__main__':\n    exec({script!r})")
    assert "the process ended by SIGSEGV (signal 11)" in again.stdout


@pytest.mark.long
@pytest.mark.parametrize("fn", [contiguous_only, writing, single, infinite])
def test_a_process_of_its_own_changes_no_result(fn):
    names = ["contract", "reference_values", "memory_layouts"]
    apart, here = (
        check(fn, **SOFTMAX | {"checks": names, "isolate": isolate}).results
        for isolate in (True, False)
    )
    assert any(result.status == "FAIL" for result in here)
    for result in (*apart, *here):
        result.seconds, result.reproducer = 0.0, ""
    assert apart == here
