"""Verdicts on kernels whose matrix units cut sums: right ones pass, and the unit is named."""

import math
import re
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from refattn import verify
from refattn.judge.rounding import PROFILES, hardware
from refattn.judge.rounding.formats import FORMATS
from refattn.judge.rounding.problems import pose_arrays
from refattn.judge.rounding.profiles import profile_of
from refattn.judge.verification import findings, judging, tolerances, units
from refattn.judge.verification.findings import Numbers
from refattn.judge.verification.units import ShiftFit, compare_shift, list_units
from tests.judge.rounding.cutting import flash, product, split_backward
from tests.judge.rounding.rounded import Case
from tests.judge.rounding.test_hardware import PAIRS, VALUES, numbers

SEEN = ("hopper", "float8_e4m3fn", "one sign", 24, 512)  # rounded sums in `flash` are no reason


def made(name, dtype, values, n, m, scale=1.0, by=1.0):
    """Queries, keys, values and the output of a kernel that may be wrong."""
    q, k, v = numbers(n, m, dtype, values, columns=32)
    unit = None if name is None else hardware.unit_for(name, FORMATS[dtype])
    to = "bfloat16" if dtype.startswith("float8") else dtype
    case = Case(q, k, v, scale=scale * q.shape[-1] ** -0.5)
    out = FORMATS[to].round(by * flash(case, dtype, unit, out="float32"))
    held = ml_dtypes.bfloat16 if to == "bfloat16" else np.float32
    return {"q": q, "k": k, "v": v, "out": out.astype(held), "dtype": dtype}


def test_a_unit_is_named_where_rounded_sums_explain_nothing():
    found = verify(**made(*SEEN), profile="flash", alpha=0.01)
    assert (found.verdict, found.profile, found.hardware) == ("PASS", "flash", "hopper")
    assert found.trials["flash"] <= found.alpha < found.trials["flash@hopper"]
    assert "(profile flash@hopper)" in str(found)
    (words,) = [x for x in found.remarks if "truncated" in x]
    start, seen, predicted, _ = re.split(r": results are | % too small, predicted | %", words)
    assert start == "sums are truncated by tensor cores of Hopper or Ada"
    assert float(predicted) > 0
    assert abs(float(seen) / float(predicted) - 1) < hardware.SLACK


def test_units_are_tried_where_a_looser_profile_is_less_likely():
    """Or where nothing is known by it, or it hardly passes."""
    q, k, v, out = (made(*SEEN)[x] for x in ("q", "k", "v", "out"))
    case = judging._Case(
        findings.Part(pose_arrays(q, k, v), Numbers(lambda _: out.astype(float), "bfloat16")),
        judging.Request(SEEN[1], ("flash", "eager-narrow"), 0.01, False),
    )
    for against, known, p, doubtful in (
        (0.0, 1.0, 1.0, False),
        (0.0, 1.0, 1e-4, True),
        (2.0, 1.0, 1.0, True),
        (0.0, 0.0, 1.0, True),
    ):
        case.trials["flash"] = SimpleNamespace(known=known, tests=[SimpleNamespace(adjusted=p)])
        case.fits["flash"] = SimpleNamespace(against=against)
        assert case.is_doubtful("flash") == doubtful
    case.fits.clear()
    assert case.is_doubtful("flash")


@pytest.mark.long("float16")
@pytest.mark.parametrize(
    ("name", "dtype", "n", "m"),
    [("hopper", "float8_e4m3fn", 24, 512), ("volta", "float16", 64, 4096)],
)
@pytest.mark.usefixtures("verdict_alone")
def test_hardware_that_is_said(name, dtype, n, m):
    given = made(name, dtype, "one sign", n, m)
    found = verify(**given, hardware=name, profile="flash", alpha=0.01)
    assert (found.verdict, found.hardware) == ("PASS", name)
    assert list(found.trials) == [f"flash@{name}"]
    assert verify(**given, profile=f"flash@{name}").hardware == name
    found = verify(**given, hardware="ieee", profile="flash", alpha=0.01)
    assert (found.verdict, found.hardware, list(found.trials)) == ("FAIL", None, ["flash"])
    with pytest.raises(ValueError, match="`hardware` must name hardware of ieee, hopper"):
        verify(**given, hardware="tpu")


def test_units_are_tried_only_after_rounded_sums(monkeypatch):
    given = made(None, "bfloat16", "one sign", 16, 64)
    found = verify(**given, profile="flash@hopper")
    assert found.verdict != "FAIL"
    assert not [x for x in found.remarks if "truncated" in x]  # numbers do not show it
    monkeypatch.setattr(judging, "list_units", lambda *_: pytest.fail("tried"))
    found = verify(**given)
    assert (found.verdict, found.hardware) == ("PASS", None)
    given["out"] = FORMATS["bfloat16"].round(1.1 * given["out"])
    assert verify(**given, hardware="ieee").verdict == "FAIL"


@pytest.mark.usefixtures("verdict_alone")
def test_units_that_cannot_explain_errors_are_not_tried():
    """An output that is too large, and one of few keys, of which units lose nothing."""
    for m, by in ((256, 1.01), (32, 0.99)):
        found = verify(**made(None, "float16", "one sign", 24, m, by=by), profile="flash")
        assert (found.verdict, list(found.trials)) == ("FAIL", ["flash"])


def test_agreement_of_a_fit():
    right = ShiftFit(1.0, 0.01, 0.01, True, -1e-4, -1e-4)
    assert right.agrees
    assert right._replace(share=1.4).agrees
    assert right._replace(share=0.4, error=0.1).agrees
    assert not right._replace(share=0.4).agrees
    assert not right._replace(share=1.6).agrees
    assert not right._replace(least=1.1).agrees
    assert not right._replace(apart=0.6).agrees


def test_a_fit_by_the_formulas():
    q, k, v = (made(*SEEN)[x] for x in "qkv")
    problem, profile = pose_arrays(q, k, v), profile_of("flash@hopper")
    rows = problem.analyse((), profile.roundings(SEEN[1]), slice(0, len(q)))
    share = 1.25
    got = rows.out + share * rows.shift
    fit = compare_shift(problem, Numbers(lambda _: got, "float32"), SEEN[1], profile)
    assert math.isclose(fit.share, share, rel_tol=1e-9)
    w = rows.shift / rows.std
    assert math.isclose(fit.least, 1 / math.sqrt(np.sum(w * w)), rel_tol=1e-9)
    square = np.mean(np.square(0.25 * w))
    assert math.isclose(fit.error, math.sqrt(square) * fit.least, rel_tol=1e-9)
    along = np.sum(rows.shift * rows.out / rows.std**2) / np.sum(np.square(rows.out / rows.std))
    assert math.isclose(fit.predicted, along, rel_tol=1e-9)
    assert math.isclose(fit.measured, share * along, rel_tol=1e-9)
    assert fit.possible
    numbers_of = Numbers(lambda _: rows.out + rows.shift + 9 * rows.std, "float32")
    assert not compare_shift(problem, numbers_of, SEEN[1], profile).possible
    assert compare_shift(problem, numbers_of, SEEN[1], PROFILES["flash"]) is None


def test_units_of_no_profile():
    """Float32 storage and linear attention have none."""
    q, k, v = numbers(8, 16, "float32")
    problem, some = pose_arrays(q, k, v), Numbers(lambda _: v[:8], "float32")
    assert list_units(problem, some, "float32", {"math": PROFILES["math"]}) == []
    linear = pose_arrays(q, k, v, feature_map=np.exp)
    assert list_units(linear, some, "float16", {"flash": PROFILES["flash"]}) == []
    assert units.on_hardware({"flash": PROFILES["flash"]}, "ieee") == {"flash": PROFILES["flash"]}


@pytest.mark.long
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize(("name", "dtype"), PAIRS)
@pytest.mark.parametrize("m", [512, 4096, 16384, 32768])
def test_right_kernels_pass(m, name, dtype, values):
    """With the unit that is said; and with that which is found, if rounded sums are no reason."""
    given = made(name, dtype, values, 64, m)
    assert verify(**given, hardware=name, profile="flash").verdict != "FAIL"
    found = verify(**given, profile="flash")
    assert found.verdict != "FAIL"
    if found.hardware is not None:
        tried = hardware.unit_for(found.hardware, FORMATS[dtype])
        assert tried == hardware.unit_for(name, FORMATS[dtype])


@pytest.mark.long
@pytest.mark.parametrize("name", ["ampere", "hopper"])
@pytest.mark.parametrize("wrong", [{"scale": 1.06}, {"by": 0.9994}])
@pytest.mark.parametrize("profile", ["flash", None])
def test_wrong_kernels_fail(name, wrong, profile):
    """At 16,384 keys, where a right kernel of the unit passes by it, not by a looser profile."""
    given = (made(name, "bfloat16", "one sign", 256, 16384, **x) for x in ({}, wrong))
    right, wrong = (verify(**x, profile=profile) for x in given)
    assert (right.verdict, right.hardware, wrong.verdict) == ("PASS", name, "FAIL")


@pytest.mark.long
def test_gradients_of_a_unit():
    """dv of one sign, in 8 bits: rounded sums do not explain it, and the unit does."""
    dtype, to = "float8_e4m3fn", FORMATS["float8_e4m3fn"]
    q, k, v = numbers(1024, 32, dtype)
    g = to.round(np.random.default_rng(1).uniform(0.5, 1, (1024, 16)))
    s = q @ k.T / 4
    p = np.exp(s - s.max(-1, keepdims=True))
    p = to.round(p / p.sum(-1, keepdims=True))
    dv = FORMATS["bfloat16"].round(product(p.T, g, hardware.UNITS["hopper"][1]))
    given = {"q": q, "k": k, "v": v, "d_out": g, "dv": dv.astype(ml_dtypes.bfloat16)}
    found = verify(**given, dtype=dtype, profile="flash")
    assert (found.verdict, found.hardware) == ("PASS", "hopper")
    assert verify(**given, dtype=dtype, profile="flash", hardware="ieee").verdict == "FAIL"


@pytest.mark.long
def test_products_of_float32_in_three_of_tf32():
    """All are 2^-21 too small, in scores, values and gradients; what is too large fails."""
    q, k, v = numbers(64, 512, "float32", "one sign", columns=32)
    g = np.random.default_rng(5).standard_normal((64, 32)).astype(np.float32)
    given, case = {"q": q, "k": k, "v": v, "dtype": "float32"}, Case(q, k, v)
    found = split_backward(case, g)
    out = flash(case, "float32", hardware.unit_for("hopper", FORMATS["float32"]))
    for off, verdict in ((0.0, "PASS"), (4e-6, "FAIL")):
        assert verify(**given, out=(1 + off) * out).verdict == verdict
        for name in ("dq", "dk", "dv"):
            got = verify(**given | {"d_out": g} | found | {name: (1 + 5 * off) * found[name]})
            assert got.parts[name].verdict == verdict, str(got)
    right = verify(**given, out=out, hardware="hopper")
    assert (right.verdict, right.profile) == ("PASS", "flash")
    assert any("split in three by tensor cores of Ampere and later" in x for x in right.remarks)


def test_tolerances_have_the_drift():
    """Twice the drift of an output is more than what rounding moves it by."""
    given = made("volta", "float16", "one sign", 8, 512)
    arrays = [given[x] for x in "qkv"]
    plain, cut = (
        next(tolerances.measure_needs(pose_arrays(*arrays), "float16", x))
        for x in ("flash", "flash@volta")
    )
    units = (None, hardware.UNITS["volta"][0])
    exact, got = (flash(Case(*arrays), "float16", x, out="float32") for x in units)
    drift = np.sum((got - exact) * exact) / np.sum(exact * exact)
    assert plain.drift == 0
    assert abs(cut.drift / drift - 1) < hardware.SLACK
    assert (cut.atol > plain.atol, cut.proven > plain.proven) == (True, True)


@pytest.mark.long
def test_a_study_on_hardware():
    given = made("ampere", "float16", "one sign", 8, 256)
    del given["out"]
    found = tolerances.tolerance(**given, hardware="ampere")
    assert found.hardware == "ampere"
    assert {x.profile for x in found.needs} >= {"math", "flash@ampere", "eager@ampere"}
    assert found.profile == "flash@ampere"
    assert found.power[0].verdict != "FAIL"
    first, _ = found.tables()
    assert "drift" in [x.name for x in first.columns]
