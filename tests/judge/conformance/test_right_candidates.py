"""Right candidates pass: the package's functions, other ways to compute them, other conventions.

`right_candidates.txt` is the table of them, beside the variants of the catalogue. In each run they
are tried by some cheap checks, with --full by all that apply, or those named in the table.
"""

from collections import namedtuple

import pytest

import refattn
from refattn.judge.conformance import check, checks_of
from refattn.judge.conformance.checks import sizes
from refattn.judge.conformance.report import runner
from refattn.judge.mistakes.defects import VARIANTS
from tests.judge.conformance.candidates import OF_OPTIONS, catalogued, declared, kernel, of, rows

CHEAP = (
    *("contract", "value_length", "large_logits", "query_without_keys", "mean_over_frequencies"),
    *("one_frequency", "batches_of_rows", "order_of_given_keys", "soft_caps", "weights_of_sinks"),
    *("gradients", "log_normalisers", "same_bits", "factors_of_dropout"),
)


Row = namedtuple("Row", "name adapter checks words kind")


def catalogue():
    """Other ways to compute the same: at few seeds, so without power."""
    for m in VARIANTS:
        soak = {"soak"} if m.name.endswith(LONGEST) else set()
        yield Row(m.name, catalogued(m.name), (), soak, "other")
        adapter = catalogued(m.name, dtype="float32")
        if "indices_only" in m.capabilities or m.name == "eva-sampled":
            yield Row(f"{m.name} in float32, catalogued", adapter, (), set(), "other")
        if "vjp" in m.capabilities:
            yield Row(f"gradients of {m.name} in float32", adapter, ("gradients",), set(), "other")


LONGEST = (
    *("-of-weights", "-by-blocks", "-upcast", "-online", "-simplex", "-reversed", "-gumbel-max"),
    *("-orthogonal", "-trigonometric"),
)


def table():
    kind = ""
    for name, *rest in rows("conformance/right_candidates.txt"):
        if not rest:
            kind = name.strip("[]")
            continue
        fn, words, *checks = rest
        checks = tuple(checks[0].split()) if checks else ()
        checks = OF_OPTIONS if checks == ("options",) else checks
        name, *marks = name.split(" (")
        yield Row(name, declared(fn, words), checks, {x[:-1] for x in marks}, kind)


ROWS = [*table(), *catalogue()]


def cases():
    for row in ROWS:
        cheap = [pytest.mark.long] * ("dear" in row.words)
        longest = pytest.mark.soak if "soak" in row.words else pytest.mark.long
        yield pytest.param(row, "cheap", marks=cheap, id=f"{row.name}-cheap")
        yield pytest.param(row, "all", marks=longest, id=f"{row.name}-all")


@pytest.mark.sweep(6)
@pytest.mark.long("waves in float16")
@pytest.mark.parametrize(("row", "extent"), [*cases()])
@pytest.mark.usefixtures("briefly")
def test_right_candidates_pass(row, extent, monkeypatch):
    """Laws have few seeds: of functions of the package as many as their power needs."""
    monkeypatch.setitem(runner.LEVELS, "quick", 100 if row.kind == "other" else 500)
    names = [x.name for x in checks_of(row.adapter) if x.name.startswith(row.checks or ("",))]
    if extent == "cheap":
        names = [x for x in names if x in CHEAP][:3] or names[:1]
    report = check(row.adapter, checks=names, rng=1)
    power = row.kind in ("own", "part")
    assert report.verdict in ("PASS", "PASS" if power else "UNDERPOWERED"), str(report)
    assert {r.check for r in report.results} | set(report.not_tried) >= set(names)
    for r in report.results:
        assert r.error is not None or r.p is not None or r.status != "PASS"
        if row.kind == "own":
            assert all(r.detectable[key] <= target for key, target in r.target.items())


@pytest.mark.soak
def test_checks_of_a_batch_of_vectors_one_by_one(monkeypatch):
    monkeypatch.setitem(runner.LEVELS, "quick", 500)

    def single(x, y, *, num_features, seed):
        if x.ndim != 1:
            raise ValueError("one vector at a time")
        return kernel(x, y, num_features=num_features, seed=seed)

    names = ["frequency_law", "recovered_values"]
    report = check(of(single, "kernel"), checks=names, time_limit=600)
    assert report.verdict == "PASS", str(report)


def test_a_whole_run_passes(monkeypatch):
    monkeypatch.setattr(sizes, "_LARGE", [x for x in sizes._LARGE if x.n * x.m < 2**11])
    adapter = of(refattn.softmax_attention, "softmax")
    report = check(adapter, rng=0)
    assert report.verdict == "PASS", str(report)
    assert [r.check for r in report.results] == [x.name for x in checks_of(adapter)]


@pytest.mark.long(
    "undefined", "epsilon of feature", "epsilon of normaliser", "mean", "nan", "square"
)
@pytest.mark.parametrize(
    "row",
    [pytest.param(x, id=x.name) for x in ROWS if x.kind == "limited" and "idle" not in x.words],
)
@pytest.mark.usefixtures("briefly")
def test_undeclared_it_fails(row):
    """Else the declaration would be idle, and the test above with it."""
    kept = {k: x for k, x in row.adapter.declared.items() if k in ("causal_only", "coupling")}
    adapter = of(row.adapter.fn, row.adapter.estimator, *row.adapter.capabilities, **kept)
    first = ["contract", "reference_values", "query_without_keys", "value_length", "large_logits"]
    names = [x.name for x in checks_of(adapter) if x.name in first]
    assert check(adapter, checks=names).verdict == "FAIL"
