"""A candidate of another convention is told which."""

import functools
import json
import time

import pytest

import refattn
from refattn import naive
from refattn.judge.conformance import check, checks_of
from tests.judge.conformance.candidates import declared, rows

CHECKS = ("query_without_keys", "causal_cross", "grouped_heads", "hidden_nonsense")


@pytest.mark.sweep(6)
@pytest.mark.parametrize(("fn", "words", "like"), [*rows("conformance/report/diagnoses.txt")])
def test_diagnosis(fn, words, like):
    adapter = declared(fn, words)
    names = [x.name for x in checks_of(adapter) if x.name in CHECKS] or ["reference_values"]
    report = check(adapter, checks=names)
    assert report.verdict == "FAIL"
    assert report.diagnosis == ([f"matches {like}"] if like else [])
    assert f"\n  matches {like}\n" in str(report) or not like
    assert json.loads(report.to_json())["diagnosis"] == report.diagnosis


@pytest.mark.long
def test_diagnosis_of_an_isolated_candidate():
    """Another process calls it; what the page says is the same."""
    pytest.importorskip("jinja2")
    report = check(
        refattn.softmax_attention,
        estimator="softmax",
        capabilities=["causal"],
        tags={"causal": "top-left"},
        checks=["causal_cross"],
        isolate=True,
    )
    words = "matches your declaration except that causal is bottom-right"
    assert report.diagnosis == [words]
    assert f"<p>{words}</p>" in report.to_html()


def test_diagnosis_within_its_time():
    """A candidate that hangs where it is asked more than a check asks is not waited for."""

    def slow(q, k, v):
        time.sleep(0.3)
        return naive.softmax_attention(q, k, v, scale=1.0)

    start = time.monotonic()
    assert verdict(slow, time_limit=1.0)[0] == "FAIL"
    assert time.monotonic() - start < 5


def verdict(fn, estimator="softmax", able=(), checks=("reference_values",), **options):
    report = check(fn, estimator=estimator, capabilities=able, checks=checks, **options)
    return report.verdict, report.diagnosis


def test_no_diagnosis_of_what_is_right():
    assert verdict(refattn.softmax_attention) == ("PASS", [])


def without_late_keys(q, k, v, **options):
    """Leave out keys from 128 on: small problems do not show it."""
    return naive.softmax_attention(q, k[..., :128, :], v[..., :128, :], **options)


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "words"),
    [({"scale": 1.0}, "the scale is 1"), ({}, "keys 128 to 1099 are left out")],
)
def test_a_convention_is_named_if_the_checks_pass_with_it(options, words):
    """Small problems show only the wrong scale of the first; large ones fail with any scale.

    So it is no convention that is named, but the cause of wrong numbers in the plainest call.
    """
    fn = functools.partial(without_late_keys, **options)
    found = verdict(fn, checks=("reference_values", "rounding_errors"), tags={"dtype": "float32"})
    assert found == ("FAIL", [f"cause: {words}"])


@pytest.mark.long
@pytest.mark.long("32")
@pytest.mark.parametrize(("tile", "first"), [(16, 176), (32, 160)])
def test_keys_after_whole_tiles_are_a_cause(tile, first):
    def in_whole_tiles(q, k, v):
        m = k.shape[-2] // tile * tile
        return refattn.softmax_attention(q, k[..., :m, :], v[..., :m, :])

    found = verdict(in_whole_tiles, checks=("rounding_errors",), tags={"dtype": "float32"})
    assert found == ("FAIL", [f"cause: keys {first} to 190 are left out"])
