"""Scripts of failures run elsewhere, and show the failure until it is mended."""

import functools
import re
import sys
from types import ModuleType

import numpy as np
import pytest

from refattn.judge.conformance import Adapter, Failure, check
from tests.judge.conformance import candidates
from tests.judge.conformance.candidates import catalogued, emptied, of, pasted, pulled, unscaled


def script(fn, estimator, name, **options):
    adapter = fn if isinstance(fn, Adapter) else of(fn, estimator)
    (result,) = check(adapter, rng=0, checks=[name], **options).results
    assert result.status == "FAIL"
    return result.reproducer


def shown(text):
    """What a script shows of the failure: an error that is too large, an exception, a report."""
    result = pasted(text)
    last = (result.stderr.strip() or result.stdout.strip()).splitlines()[-1]
    for error, allowed in re.findall(r"error (\S+) allowed (\S+)", result.stdout):
        assert float(error) > float(allowed)
        return "an error"
    if "Failure: " in last:
        return last
    if result.stdout.startswith("FAIL: "):
        return "a report"
    assert "inf" in result.stdout or "nan" in result.stdout, result
    return "nothing finite"


SHOWN = """\
unscaled      | softmax | reference_values | fn = unscaled | an error
unscaled      | softmax | value_length     | fn = unscaled | an error
uncentred     | moments | reference_values |               | an error
uncentred     | moments | large_mean       |               | an error
infinite      | softmax | contract         |               | nothing finite
mixed_queries | softmax | queries_apart    | rng=0         | a report
seedless      | rfa     | seeds            |               | a report
exiting       | softmax | contract         |               | a report
single        | softmax | contract         | strict=True)  | float32
writing       | softmax | contract         | strict=True)  | other numbers in it
listed        | softmax | contract         | strict=True)  | a list"""


@pytest.mark.long
@pytest.mark.parametrize("row", SHOWN.splitlines())
def test_scripts_show_the_failure(row):
    """Comparisons of calls run the check again; misbehaviour raises."""
    fn, estimator, name, words, what = (x.strip() for x in row.split("|"))
    text = script(getattr(candidates, fn), estimator, name)
    assert words in text
    assert what in shown(text)


@pytest.mark.long
def test_scripts_of_laws_have_the_level_of_the_run():
    text = script(candidates.wide, "rfa", "feature_sums", level="full", alpha=1e-3)
    assert "rng=0, level='full', alpha=0.001)" in text
    assert shown(text) == "a report"


def test_scripts_of_a_law_run_it_again():
    text = script(catalogued("kernel-uniform"), None, "frequency_pairs")
    assert "checks=['frequency_pairs'], rng=0" in text


@pytest.mark.long
@pytest.mark.parametrize("name", ["instance", "instance.method", "unnamed"])
def test_scripts_find_the_candidate_by_its_source(name):
    adapter = Adapter(unscaled, "softmax", source=f"{candidates.__name__}:{name}")
    text = script(adapter, "softmax", "value_length")
    assert f"fn = {name}\n" in text
    assert shown(text) == "an error"


@pytest.mark.parametrize(
    "fn",
    [
        candidates.instance,
        candidates.instance.method,
        candidates.unnamed,
        functools.partial(unscaled),
    ],
    ids=lambda x: type(x).__name__,
)
def test_scripts_of_what_has_no_name_leave_a_gap(fn):
    assert "fn = ...  # the callable under test" in script(fn, "softmax", "value_length")


def status(text):
    """The exit status of a script."""
    try:
        exec(text, {"__name__": "__main__"})
    except SystemExit as end:
        return int(end.code) if isinstance(end.code, int) else 1
    except Failure:
        return 1
    return 0


SLOPES, LINEAR = "gradients_are_slopes", "gradients_are_linear"
DEFECTS = {
    "not finite": (lambda out, q, k, v: (out, q, k * np.nan, v), ("gradients", LINEAR, SLOPES)),
    "an exception": (lambda out, q, k, v: {}[len(out)], ("gradients", SLOPES)),
    "a shape": (lambda out, q, k, v: (out, q, np.swapaxes(k, -1, -2), v), ("gradients", LINEAR)),
    "too few": (lambda out, q, k, v: (q, k, v), ("gradients", LINEAR)),
    "twice": (lambda out, q, k, v: (out, q, 2 * k, v), ("gradients", SLOPES)),
    "signs": (lambda out, q, k, v: (out, q, k, np.sign(v)), ("gradients_of_means", LINEAR, SLOPES)),
}


@pytest.mark.long("signs", "twice")
@pytest.mark.parametrize("name", DEFECTS)
def test_scripts_show_a_mistake_until_it_is_mended(name, monkeypatch):
    defect, checks = DEFECTS[name]
    wrong, right = pulled(change=lambda found, given: defect(*found)), pulled()
    show_until_mended(monkeypatch, wrong, right, ("vjp",), checks)


def show_until_mended(monkeypatch, wrong, right, capabilities, checks):
    module = ModuleType("under_repair")
    monkeypatch.setitem(sys.modules, "under_repair", module)
    adapter = Adapter(wrong, "softmax", capabilities, source="under_repair:attention")
    report = check(adapter, checks=checks, rng=0)
    for module.attention, failed in ((wrong, 1), (right, 0)):
        for result in report.results:
            assert status(result.reproducer) == failed, (result.check, result.reproducer)
    return report.results


def leaking(found, given):
    """Products of a weight of 0 with a masked key."""
    found[2] = found[2] + 0 * given["k"]


def test_scripts_hold_numbers_that_are_not_finite(monkeypatch):
    names = ["gradients_of_hidden_nonsense"]
    (result,) = show_until_mended(
        monkeypatch, pulled(change=leaking), pulled(), ["mask", "vjp"], names
    )
    assert result.summary == "expected finite numbers in dk; got 4 of 28 that are NaN or infinite"
    assert "np.nan" in result.reproducer


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("out", (lambda out: out * np.nan,)), ("lse", (lambda out: 0 * out, np.nan))],
)
def test_scripts_of_infinite_normalisers_end_well_once_mended(name, wrong, monkeypatch):
    (result,) = show_until_mended(
        monkeypatch,
        emptied(*wrong),
        emptied(lambda out: 0 * out),
        ["mask", "lse"],
        ["normaliser_without_keys"],
    )
    assert f"finite numbers in {name};" in result.summary


@pytest.mark.long
def test_the_part_that_is_wrong_is_shown():
    """Of no cotangent too, where the last comparison before was of another part."""

    def change(found, given):
        if not np.any(given["d_out"]):
            found[2] = found[2] + 1

    adapter = of(pulled(change=change), "softmax", "vjp", same_value_size=True)
    assert "got = got[2]" in script(adapter, None, "gradients")
