"""The benchmarks at tiny sizes: what they write, and what they would notice."""

import json
import math
import platform
import time
from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest
from click.testing import CliRunner

import refattn
from refattn import naive
from validation.benchmarks import (
    cases,
    estimators,
    gradients,
    imports,
    memory,
    oracles,
    peers,
    report,
    scaling,
    settings,
    targets,
    timing,
)
from validation.benchmarks.__main__ import SECTIONS, main
from validation.benchmarks.child import run_python
from validation.benchmarks.roofline import PIECES

TINY = settings.Sizes(
    d=8, features=16, checked=5, samples=3, many_heads=2,
    linear=(2, 64), quadratic=(2, 48), dense=(1, 16), backward=(2, 48),
    lengths=(64, 128, 256), exact_up_to=64, fitted_from=64,
    counts=(4, 8, 16), counts_fitted_from=4, counts_length=32,
    memory_lengths=(64, 512), exact_memory_lengths=(64,),
)  # fmt: skip


def invoke(output, *more):
    """Run the command at tiny sizes."""
    options = ["--quick", "--pause", "0", "--repeats", "2", "--output", str(output)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "QUICK", TINY)
        return CliRunner().invoke(main, [*options, *more], catch_exceptions=False)


@pytest.fixture
def run(tmp_path):
    return partial(invoke, tmp_path)


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Where one run has compared the estimators and their pullbacks with their peers."""
    directory = tmp_path_factory.mktemp("benchmarks")
    result = invoke(directory, "--only", "estimators", "--only", "gradients")
    assert result.exit_code == 0, result.output
    return directory


def written(directory):
    return json.loads((directory / "benchmarks.json").read_text())


def case(*forms):
    return cases.Case("example", "float64", {"n": 2}, forms)


def form(name, value):
    return cases.Form(name, lambda: lambda: np.array(value), lambda: np.array(RIGHT))


RIGHT, OFF = [[1.0], [2.0]], [[1.0], [2.0 + 1e-9]]


@pytest.mark.checks_more
@pytest.mark.parametrize("section", [estimators, gradients])
def test_forms_agree_with_their_oracles(compared, section):
    records = written(compared)["sections"][section.__name__.rpartition(".")[-1]]
    assert len(records) == 2 * len(section.CASES)
    assert {record["forms"][0]["name"] for record in records} == {"refattn"}
    for one in (x for record in records for x in record["forms"] if "missing" not in x):
        assert one["error"] <= one["bound"]
        assert (one["wrong"], len(one["seconds"])) == (False, 2)
    page = (compared / "benchmarks.md").read_text("utf-8")
    assert "| RFA, positive, heads 2, tokens 64, d 8, S 16 | refattn |" in page
    assert (compared / "figures/ratios.svg").stat().st_size > 0


def test_ways_back_are_compared(compared):
    back, both = (f"refattn{x}" for x in (gradients.PULLBACK, gradients.BOTH))
    for record in written(compared)["sections"]["gradients"]:
        found = {(x["form"], x["to"]): x for x in record["ratios"]}
        seconds = {x["name"]: x["seconds"] for x in record["forms"] if "seconds" in x}
        assert {(back, "refattn"), (both, "refattn")} <= set(found)
        for (form, to), one in found.items():
            known = form in seconds and to in seconds
            ratio = timing.ratio(seconds[form], seconds[to]).median if known else None
            assert one["measured"] == ratio
    page = (compared / "benchmarks.md").read_text("utf-8")
    assert "| RFA, positive | refattn, pullback | torch Performer, pullback |" in page


def test_a_wrong_way_back_is_flagged(run, monkeypatch):
    def halved(*args):
        of_q, of_k, of_v = right(*args)
        return of_q, of_k / 2, of_v

    right = oracles.slopes
    monkeypatch.setattr(gradients, "CASES", (gradients._exact,))
    monkeypatch.setattr(oracles, "slopes", halved)
    result = run("--only", "gradients")
    assert result.exit_code == 1
    assert "wrong: exact attention, float32: refattn, pullback" in result.output
    assert "wrong: exact attention, float32: refattn\n" not in result.output


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_one_wrong_token_shows_in_a_way_back(dtype):
    inputs = gradients.Inputs(TINY, dtype, np.random.default_rng(0))
    record = cases.measure(gradients._exact(inputs), 1, pause=0.0)
    bound = record["forms"][1]["bound"]
    form = partial(oracles.by_head, peers.textbook_softmax)
    want = oracles.slopes(form, inputs.arrays, inputs.d_out, inputs.directions)
    found = refattn.vjp(refattn.softmax_attention, *inputs.arrays)[1](inputs.d_out)[:3]
    for i in range(3):
        wrong = [x.copy() for x in found]
        wrong[i][..., -1, :] *= 0.99
        errors = map(cases.relative_error, oracles.along(wrong, inputs.directions), want)
        assert [error > bound for error in errors] == [j == i for j in range(3)]


def test_peers_of_torch_are_measured(compared):
    pytest.importorskip("torch")
    results = written(compared)
    forms = [one for x in results["sections"].values() for record in x for one in record["forms"]]
    timed = {one["name"] for one in forms if "seconds" in one}
    known = {estimators.SDPA, estimators.TORCH, "torch"}
    assert timed >= known | {x + gradients.PULLBACK for x in known}
    met = {(t["target"], t["dtype"]): t["met"] for t in results["targets"]}
    assert len(met) == 2 * 9  # seven ratios of estimators and two of pullbacks, in two dtypes
    assert None not in met.values()


def test_peers_that_are_missing_are_named(run, tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    result = run("--only", "estimators")
    assert result.exit_code == 0
    notes = [line for line in result.output.splitlines() if line.startswith("not measured, ")]
    packages = ["torch", "pytorch-fast-transformers"]
    assert [note.split(": ")[1] for note in notes] == [f"pip install {x}" for x in packages]
    assert f"{estimators.EXACT}: {estimators.SDPA}; " in notes[0]
    results = written(tmp_path)
    forms = [one for x in results["sections"]["estimators"] for one in x["forms"]]
    missing = {one["name"]: one["missing"] for one in forms if "missing" in one}
    for name, package in zip(("performer-pytorch", packages[1]), packages, strict=True):
        assert missing[name] == f"not installed: pip install {package}"
    assert {t["met"] for t in results["targets"] if "torch" in t["target"]} == {None}


@pytest.mark.long
@pytest.mark.checks_more
def test_other_sections(run, tmp_path):
    names = [name for name in SECTIONS if name not in ("estimators", "gradients")]
    result = run(*(word for name in names for word in ("--only", name)), "--threads", "1")
    assert result.exit_code == 0, result.output
    results = written(tmp_path)
    assert list(results["sections"]) == names
    assert results["settings"]["threads"] == 1
    roofline, length = results["sections"]["roofline"], results["sections"]["scaling"][0]
    names = [one["name"] for one in roofline[0]["forms"]]
    assert names[:3] == ["refattn", "roofline, whole arrays", "roofline, in cache"]
    assert names[3:] == [f"roofline, in cache, {piece}" for piece in PIECES]
    assert length["case"] == scaling.LENGTH
    curves = {one["name"]: one for one in length["forms"]}
    assert curves[estimators.RFA]["at"] == [64, 128, 256]
    assert math.isfinite(curves[estimators.RFA]["exponent"]["value"])
    assert curves[estimators.EXACT]["at"] == [64]
    assert curves[estimators.EXACT]["exponent"] is None
    held = results["sections"]["memory"]
    kinds = {memory.RFA, memory.RFA_BACK, memory.STREAMED, memory.EXACT, memory.EXACT_BACK}
    assert {record["case"] for record in held} == kinds
    assert all(record["bytes"] is None or record["bytes"] < 2**26 for record in held)
    (seconds,) = results["sections"]["imports"]
    assert all(0 < s < 60 for one in seconds["forms"] for s in one["seconds"])
    assert {path.stem for path in (tmp_path / "figures").iterdir()} == {"tokens", "samples"}


@pytest.mark.skipif(memory.resident()[1] is None, reason="memory cannot be read here")
def test_memory_counts_what_is_held_for_a_moment():
    _, read = memory.resident()
    assert read is not None
    before = read()
    with memory._sampled(read) as samples:
        for _ in range(3):
            held = np.ones(2**25)  # more than what is kept for reuse, or freed meanwhile
            time.sleep(0.02)  # the thread that reads gets its turn, on a busy machine too
            del held
    assert max(samples) - before > 0.9 * 2**28


@pytest.mark.parametrize("value", [OFF, [[1.0], [np.nan]], [[1.0, 2.0]]])
def test_a_wrong_form_is_flagged_and_not_timed(value):
    record = cases.measure(case(form("a", RIGHT), form("b", value)), 2, pause=0.0)
    right, wrong = record["forms"]
    assert (right["wrong"], wrong["wrong"]) == (False, True)
    assert "seconds" not in wrong
    assert cases.compare(record, "b") is None
    (table,) = report._tables("estimators", [record])
    assert [row[-1].endswith("WRONG") for row in table.rows] == [False, True]
    json.dumps(record, allow_nan=False)


@pytest.mark.checks_more
@pytest.mark.parametrize("peers_are_missing", [False, True])
def test_the_command_fails_if_refattn_is_wrong(peers_are_missing, run, tmp_path, monkeypatch):
    if peers_are_missing:
        monkeypatch.setattr(peers, "find_spec", lambda name: None)
    monkeypatch.setattr(estimators, "CASES", (estimators._exact, estimators._positive))
    wrong = partial(naive.random_feature_attention, log_weight=np.arange(16.0))
    monkeypatch.setattr(naive, "random_feature_attention", wrong)
    result = run("--only", "estimators")
    assert result.exit_code == 1
    assert "wrong: RFA, positive, float32: refattn" in result.output
    assert "wrong: exact attention" not in result.output
    records = written(tmp_path)["sections"]["estimators"]
    wrong = [one for x in records for one in x["forms"] if x["case"] == estimators.RFA]
    assert not peers_are_missing or not any("seconds" in one for one in wrong)  # nothing to time
    assert timing.alternate({}, 3, pause=0.0) == {}


def test_a_peer_that_fails_is_not_measured():
    fails = Mock(side_effect=RuntimeError("no such kernel"))
    peer = cases.Form("peer", lambda: fails, lambda: np.zeros((2, 1)))
    record = cases.measure(case(form("a", RIGHT), peer), 1, pause=0.0)
    assert record["forms"][1]["missing"] == "fails: no such kernel"
    with pytest.raises(RuntimeError, match="no such kernel"):
        cases.measure(case(cases.Form("a", lambda: fails, peer.oracle, ours=True)), 1, pause=0.0)
    record = {"case": "a", "kind": "not available: pip install psutil", "bytes": None}
    assert report.not_measured({"memory": [record, record]}) == {record["kind"]: ["a"]}


def test_forms_run_in_turn_after_a_round_to_warm_up():
    order = []

    def timer(call):
        call()
        return float(len(order))

    forms = {name: partial(order.append, name) for name in "ab"}
    seconds = timing.alternate(forms, 2, pause=0.0, timer=timer)
    assert order == list("abbaab")
    assert seconds == {"a": [4.0, 5.0], "b": [3.0, 6.0]}


def test_ratios_are_of_times_of_the_same_round():
    # The machine is three times as slow in the second round, and ten times in the third.
    assert timing.ratio([2.0, 6.0, 20.0], [1.0, 3.0, 10.0]) == (2.0, 2.0, 2.0)
    lower, median, upper = timing.ratio([1.0, 2.0, 3.0, 4.0, 50.0], [1.0] * 5)
    assert (lower, median, upper) == (2.0, 3.0, 4.0)


@pytest.mark.parametrize("power", [1.0, 1.05, 2.0])
def test_exponents_of_power_laws(power):
    sizes = [2**i for i in range(14, 21)]
    fitted = timing.exponent(sizes, [3e-6 * n**power for n in sizes])
    assert fitted.value == pytest.approx(power, abs=1e-9)
    assert fitted.error < 1e-6
    small = [[100.0], [100.0], *([x**power] for x in (4, 8, 16))]  # and the rest too few
    assert scaling.fit([1, 2, 4, 8, 16], small, 4)["value"] == pytest.approx(power)
    assert scaling.fit([1, 2, 4, 8, 16], small, 8) is None


def test_standard_errors_of_exponents():
    rng, sizes = np.random.default_rng(0), 2.0 ** np.arange(14, 21)
    fits = [timing.exponent(sizes, sizes * np.exp(0.1 * rng.normal(size=7))) for _ in range(500)]
    spread = np.std([fit.value for fit in fits])
    assert np.sqrt(np.mean([fit.error**2 for fit in fits])) == pytest.approx(spread, rel=0.15)


def test_targets_are_met_or_not():
    def record(name, ours, theirs):
        forms = [{"name": "refattn", "seconds": [ours]}, {"name": name, "seconds": [theirs]}]
        return {"case": estimators.RFA, "dtype": "float32", "sizes": {}, "forms": forms}

    def judged(theirs):
        (target,) = targets.judge({"estimators": [record(estimators.TORCH, 1.0, theirs)]})
        return target["measured"], target["met"]

    assert judged(3.0) == (3.0, True)
    assert judged(2.9) == (2.9, False)
    assert targets.judge({"estimators": [record("other", 1.0, 9.0)]})[0]["met"] is None


def test_sections_of_others_are_shown(tmp_path):
    record = cases.measure(case(form("a", RIGHT), form("b", RIGHT)), 2, pause=0.0)
    given = settings.Settings(TINY, repeats=2, pause=0.0, threads=1, seed=0)
    results = report.collect(given, {"gpu": [record]})
    assert results["targets"] == []
    report.write(results, tmp_path)
    assert "## gpu, float64" in (tmp_path / "benchmarks.md").read_text("utf-8")


def test_import_times_are_those_of_outermost_imports():
    log = """import time: self [us] | cumulative | imported package
import time:       100 |        100 | site
import time:      1000 |       2000 |   numpy
import time:       500 |       2500 | refattn
import time:        10 |         10 |   refattn.kernels
import time:       300 |       1500 | refattn.estimators
"""
    assert imports.total(log, "refattn") == pytest.approx(4e-3)
    assert imports.total(log, "numpy") == 0


@pytest.mark.long("True")
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
@pytest.mark.parametrize("held", [False, True])
def test_large_arrays_are_new_memory(held):
    """Whatever was freed before, each page of an array is mapped anew."""
    script = f"""
import resource, numpy as np
from validation.benchmarks import environment
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.empty(2**23, np.uint8)[::4096] = 1
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
if {held}:
    for _ in range(4):
        faults()
assert environment.map_large_arrays()
small = [np.ones(3 * 2**20, np.uint8) for _ in range(16)]
del small
print(min(faults() for _ in range(4)))
"""
    pages = 2**23 // 4096
    assert int(run_python("-c", script).stdout) >= pages // 512  # mapped in pieces of up to 2 MiB
