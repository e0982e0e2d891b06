"""A process for the candidate: its end is a failure, and no result changes."""

import ctypes
import multiprocessing
import os
import time

import pytest

from refattn.conformance import check
from tests.conformance.candidates import infinite, pasted, plain, single, writing

SOFTMAX = {"estimator": "softmax", "rng": 0, "isolate": True}


def crashing(q, k, v):
    if k.shape[-2] == 1:
        ctypes.string_at(0)
    return plain(q, k, v)


def leaving(q, k, v):
    os._exit(0)


def hanging(q, k, v):
    time.sleep(100)


def contiguous_only(q, k, v):
    return plain(q, k, v) if q.flags.c_contiguous else v


@pytest.mark.long
@pytest.mark.skipif(os.name != "posix", reason="signals as of POSIX")
def test_a_crash_is_a_failure_of_the_check_that_ran():
    report = check(crashing, checks=["contract", "reference_values", "value_length"], **SOFTMAX)
    assert [(r.check, r.status) for r in report.results] == [
        ("contract", "PASS"),
        ("reference_values", "FAIL"),
    ]
    assert report.results[1].severity == "contract"
    assert report.results[1].got == "the process ended by SIGSEGV (signal 11)"
    assert report.not_tried["value_length"] == "the candidate crashed"
    script = report.results[1].reproducer
    assert "isolate=True" in script
    again = pasted(f"if __name__ == '__main__':\n    exec({script!r})")
    assert "the process ended by SIGSEGV (signal 11)" in again.stdout


def test_an_exit_is_a_failure_whatever_its_status():
    report = check(leaving, checks=["contract"], **SOFTMAX)
    assert report.results[0].summary == "expected a result; got the process ended with status 0"


@pytest.mark.long
def test_a_candidate_that_hangs_is_ended_with_its_process():
    report = check(hanging, checks=["contract"], time_limit=0.3, **SOFTMAX)
    assert report.results[0].summary == "expected an answer within 0.3 s; got none"
    assert not multiprocessing.active_children()


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
