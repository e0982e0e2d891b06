"""`refattn tolerance`: what is needed, what passes, and a test that has no tolerance."""

import json
import math
import re

import numpy as np
import pytest

import refattn
from refattn import naive
from refattn.judge.rounding import PROFILES, problems
from refattn.judge.rounding.formats import FORMATS
from refattn.judge.testing import assert_attention_close
from refattn.judge.verification import tolerances
from refattn.judge.verification.choice import usual_profiles
from tests.cli.running import run
from tests.validation import guide_blocks


def sample(dtype="bfloat16", n=48, m=128, heads=3):
    q, k, v = (FORMATS[dtype].round(x[1, :heads]) for x in refattn.load_sample())
    return q[:, -n:], k[:, -m:], v[:, -m:]


@pytest.fixture
def few(monkeypatch):
    """Of the catalogue only no defect, and some that are named."""
    whole = tolerances.catalogue

    def chosen(*names):
        names = {"none", *names}
        monkeypatch.setattr(
            tolerances,
            "catalogue",
            lambda x: (y for y in whole(x) if f"{y[0]} {y[1]}".strip() in names),
        )

    return chosen


def rows_of(arrays, dtype, profile, **options):
    """What is known of all elements."""
    problem = problems.pose_arrays(*arrays, **options)
    shape = (*problem.lead, problem.shape[0], problem.shape[2])
    found = {x: np.empty(shape) for x in ("out", "nearest", "worst", "bound", "slack", "std")}

    def add(index, i, rows):
        for name, x in found.items():
            x[(*index, i)] = getattr(rows, name)

    problems.sweep(problem, dtype, PROFILES[profile], add)
    return found


def chance(x, atol, rtol=0.0):
    """Largest probability that a correct kernel exceeds a tolerance."""
    allowed = atol + rtol * np.abs(x["out"])
    distance = np.maximum(allowed - np.abs(x["nearest"] - x["out"]) - x["slack"], 0)
    tails = np.minimum(2 * np.exp(-np.square(distance / x["worst"]) / 2), 1)
    return float(np.sum(np.where(allowed >= x["bound"], 0, tails)))


OF_NEEDS = [(x, y) for x in ("bfloat16", "float16", "float32") for y in usual_profiles(x)]


@pytest.mark.parametrize(("dtype", "name"), [x for x in OF_NEEDS if x[1] != "tf32"])
def test_the_smallest_tolerance(dtype, name):
    """A correct kernel exceeds it with a probability of 1e-6, and a smaller one more often."""
    arrays = sample(dtype, 24, 64)
    whole, *heads = tolerances.measure_needs(problems.pose_arrays(*arrays), dtype, name)
    assert [x.head for x in (whole, *heads)] == [None, (0,), (1,), (2,)]
    every = rows_of(arrays, dtype, name)
    for need in (whole, *heads):
        law = every if need.head is None else {x: y[need.head] for x, y in every.items()}
        assert need.proven == pytest.approx(np.max(law["bound"]))
        for (atol, rtol), share in (((need.atol, 0.0), 0.98), (need.pair, 0.97)):
            assert chance(law, 1.0001 * atol, rtol) <= 1e-6
            assert chance(law, share * atol, rtol) > 1e-6 or atol == need.proven
        atol, rtol = need.proven_pair
        assert np.max(law["bound"] - rtol * np.abs(law["out"])) == pytest.approx(atol)
        error, size = np.abs(law["nearest"] - law["out"]), np.abs(law["out"])
        assert np.all(error <= need.atol)
        assert np.all(error <= need.pair.atol + need.pair.rtol * size)
    assert whole.proven == max(x.proven for x in heads)
    largest = max(x.atol for x in heads)
    assert (1 - 1e-8) * largest <= whole.atol <= min(1.5 * largest, whole.proven)


@pytest.mark.parametrize("units", [1, 2, 4])
def test_the_relative_tolerance_is_the_one_that_allows_least(units):
    """That with which a small and a large element need the same, by the law or by the bound."""
    unit, size, std = 2.0**-8, np.array([2.0, 6.0]), np.full(2, 1e-30)
    off, bound = (unit * np.array([x, x + 4 * y]) for x, y in ((20, units), (40, 4 / units)))
    elements = tolerances._ElementErrors(size, off, std, bound, 0 * off)
    need = tolerances._need_of("", None, elements, unit)
    assert need.pair == pytest.approx((unit * (20 - 2 * units), unit * units))
    assert need.proven_pair == pytest.approx((unit * (40 - 8 / units), unit * 4 / units))
    assert (need.atol, need.proven) == pytest.approx((off[1], bound[1]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_torch_gives_is_within(dtype):
    torch = pytest.importorskip("torch")
    arrays = sample(dtype)
    narrow = [torch.tensor(x).to(getattr(torch, dtype)) for x in arrays]
    got = torch.nn.functional.scaled_dot_product_attention(*narrow).double().numpy()
    exact = naive.softmax_attention(*arrays)
    for need in tolerances.measure_needs(problems.pose_arrays(*arrays), dtype, "flash"):
        error, size = np.abs(got - exact), np.abs(exact)
        if need.head is not None:
            error, size = error[need.head], size[need.head]
        assert np.all(error <= need.atol)
        assert np.all(error <= need.pair.atol + need.pair.rtol * size)
        assert np.max(error) > need.atol / 4  # and it is not much more than that


def test_the_usual_tolerances_are_those_of_torch():
    """Those of the table in the documentation of torch.testing.assert_close."""
    table = {"float16": (1e-3, 1e-5), "bfloat16": (1.6e-2, 1e-5), "float32": (1.3e-6, 1e-5)}
    assert {x: (rtol, atol) for x, (atol, rtol) in tolerances.USUAL.items()} == table
    torch = pytest.importorskip("torch")
    for name, pair in tolerances.USUAL.items():
        rtol, atol = torch.testing._comparison.default_tolerances(getattr(torch, name))
        assert pair == (atol, rtol)


@pytest.mark.parametrize(
    ("given", "pair"),
    [
        ({}, (1e-5, 1.6e-2)),
        ({"atol": 0.1}, (0.1, 0)),
        ({"rtol": 0.1}, (0, 0.1)),
        ({"atol": 0.2, "rtol": 0.3}, (0.2, 0.3)),
    ],
)
def test_what_is_given(given, pair, few):
    few()
    arrays = sample(n=16)
    found = tolerances.tolerance(*arrays, dtype="bfloat16", profile="flash", **given)
    assert found.given == pair
    exact = naive.softmax_attention(*arrays)
    got = rows_of(arrays, "bfloat16", "flash")["nearest"]
    ratio = np.max(np.abs(got - exact) / (pair[0] + pair[1] * np.abs(exact)))
    assert found.power[0].given == pytest.approx(ratio, rel=1e-6)


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.usefixtures("verdict_alone")
def test_power(whole, few):
    if not whole:
        few("scale times 1.01", "output times 1.001")
    profile = {} if whole else {"profile": "flash"}
    found = tolerances.tolerance(*sample(n=64), dtype="bfloat16", causal=True, **profile)
    assert (found.dtype, found.profile, found.lead, found.rows) == ("bfloat16", "flash", (3,), 64)
    if whole:
        profiles = [x.profile for x in found.needs if x.head is None]
        assert profiles == list(usual_profiles("bfloat16"))
    none, *_ = found.power
    assert (none.defect, none.verdict, none.suspect) == ("none", "PASS", "")
    assert none.ours <= 1
    assert all(x.verdict == ("FAIL" if x.ours > 1 else x.verdict) for x in found.power)
    rows = {f"{x.defect} {x.size}".strip(): x for x in found.power}
    assert len(rows) == len(found.power)
    assert {x.verdict for x in found.power} == {"PASS", "FAIL"}
    assert rows["scale times 1.01"].verdict == "FAIL"
    assert "the scale is 1.0" in rows["scale times 1.01"].suspect
    # Seen by the verdict, and not by any tolerance that a correct kernel is within.
    assert rows["output times 1.001"].ours < 1
    assert rows["output times 1.001"].verdict == "FAIL"


def truth(name, size, arrays, options):
    """What a defect gives, written down."""
    q, k, v = arrays
    n, m = q.shape[-2], k.shape[-2]
    by, keys = float(size) if size else math.nan, np.arange(m)
    ahead = keys - np.arange(m - n, m)[:, None]
    seen = ahead <= 0 if options.get("causal") else np.ones((n, m), bool)
    scores = 32**-0.5 * q @ np.swapaxes(k, -1, -2)
    if name == "not rescaled: blocks of keys of":
        grown = np.maximum.accumulate(np.where(seen, scores, -math.inf), -1)
        top = grown[..., np.minimum((keys // int(by) + 1) * int(by), m) - 1]
        scores = scores - np.where(np.isfinite(top), top, 0.0)
    scores, seen = {
        "scale times": lambda: (by * scores, seen),
        "log2(e) as": lambda: (by * math.log(2) * scores, seen),
        "lost: key": lambda: (scores, seen & (keys != by)),
        "counted twice: key": lambda: (scores + np.where(keys == by, math.log(2), 0.0), seen),
        "causal edge moved by": lambda: (scores, ahead <= by),
        "softcap of": lambda: (by * np.tanh(scores / by), seen),
        "ALiBi slope of": lambda: (scores + by * ahead, seen),
    }.get(name, lambda: (scores, seen))()
    scores = np.where(seen, scores, -math.inf)
    weights = np.exp(scores - np.max(scores, -1, keepdims=True))
    added = by if name == "added to the normaliser" else 0.0
    out = weights @ v / (np.sum(weights, -1, keepdims=True) + added)
    rows = int(name.split()[0]) if name.endswith("queries of a head times") else 0
    out[0, :rows] *= by if rows else 1
    return out * by if name == "output times" else out


@pytest.mark.long("False")
@pytest.mark.parametrize("causal", [False, True])
def test_defects_are_what_they_say(causal):
    arrays, options = sample("float32", 40, 80), {"causal": causal}
    problem = problems.pose_arrays(*arrays, **options)
    for defect in tolerances.catalogue(problem):
        exact, got = tolerances._simulate(problem, defect, "float32", PROFILES["math"])
        np.testing.assert_allclose(exact, naive.softmax_attention(*arrays, **options), atol=1e-12)
        if defect.weights:
            expected = rows_of(arrays, "float32", "fp8-weights", **options)["nearest"]
        else:
            expected = truth(defect.name, defect.size, arrays, options)
        np.testing.assert_allclose(got, expected, rtol=2.0**-22, atol=1e-7, err_msg=str(defect[:2]))
        if "truncated" in defect.name:
            assert np.all(np.abs(got) <= np.abs(exact))
            assert np.any(got != rows_of(arrays, "float32", "math", **options)["nearest"])


@pytest.mark.parametrize(
    ("profile", "off"), [("math", 2.0**-24), ("tf32", 2.0**-11), ("fp8", 2.0**-4)]
)
def test_what_is_exact_is_of_the_inputs_as_they_are(profile, off):
    """What a profile rounds first is an error of its kernel."""
    arrays = sample("float32", 8, 24)
    problem = problems.pose_arrays(*arrays, scale=0.3)
    none = next(tolerances.catalogue(problem))
    exact, got = tolerances._simulate(problem, none, "float32", PROFILES[profile])
    np.testing.assert_allclose(exact, naive.softmax_attention(*arrays, scale=0.3), atol=1e-12)
    assert off / 10 < np.max(np.abs(got - exact)) < 10 * off
    law = rows_of(arrays, "float32", profile, scale=0.3)
    np.testing.assert_array_equal(got, FORMATS["float32"].round(law["nearest"]))


def test_errors_over_what_is_allowed():
    """By one number alone, whatever its sign; one without an error is within any tolerance."""
    exact, pair = np.array([[2.0, -4.0, 0.0]]), tolerances.Allowance(0.5, 0.25)
    excess, nothing = tolerances._largest_excess, tolerances.Allowance(0.0, 0.0)
    for at, error, ratio in ((0, 0.5, 0.5), (0, -3.0, 3.0), (1, 3.0, 2.0), (2, -0.25, 0.5)):
        got = exact.copy()
        got[0, at] += error
        assert (excess(got, exact, pair), excess(got, exact, nothing)) == (ratio, math.inf)
        got[0, at] = math.nan
        assert excess(got, exact, pair) == math.inf
    assert excess(exact, exact, nothing) == excess(exact[:0], exact[:0], pair) == 0


def test_defects_of_what_was_asked_for():
    seen = np.arange(64) < 50
    bias = np.linspace(-1, 1, 64)
    arrays = sample("float32", 24, 64)
    options = {"window": (9, 3), "softcap": 5.0, "mask": seen, "bias": bias}
    problem = problems.pose_arrays(*arrays, **options)
    found = {x.name: x for x in tolerances.catalogue(problem)}
    for name, changed in {
        "window ends early, by": {"window": (8, 3)},
        "softcap left out": {"softcap": None},
        "mask left out": {"mask": None},
        "bias left out": {"bias": None},
    }.items():
        _, got = tolerances._simulate(problem, found[name], "float32", PROFILES["math"])
        expected = naive.softmax_attention(*arrays, **(options | changed))
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-7)
    assert "causal edge moved by" not in found
    one = problems.pose_arrays(*(x[:, :1] for x in arrays))
    assert not any("key" in x.name for x in tolerances.catalogue(one))


def test_the_last_queries_of_some_heads_stand_for_all():
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, 6, 200, 4)) for _ in range(3))
    options = {"causal": True, "mask": rng.random((200, 200)) < 0.9}
    options["bias"] = rng.normal(size=(200, 200))
    problem = problems.pose_arrays(q, k, v, **options)
    part, rows = tolerances._choose_part(problem)
    assert (part.lead, rows, part.shape) == ((6,), 170, (170, 200, 4))
    flat = naive.softmax_attention(q, k, v, **options).reshape(12, 200, 4)
    none = next(tolerances.catalogue(part))
    exact, _ = tolerances._simulate(part, none, "float32", PROFILES["math"])
    np.testing.assert_allclose(exact, flat[::2, -170:], atol=1e-12)
    few = problems.pose_arrays(*(x[:, :1] for x in (q, k, v)))
    assert tolerances._choose_part(few) == (few, 200)  # all, as they are
    long = problems.pose_arrays(np.zeros((2, 600, 4)), k[0, :2], v[0, :2])
    part, rows = tolerances._choose_part(long)
    assert (part.lead, rows, part.shape) == ((2,), 512, (512, 200, 4))


@pytest.mark.usefixtures("verdict_alone")
def test_arrays_are_rounded_first(few):
    few("output times 1.003")
    q, k, v = (x[1, :1, :16] for x in refattn.load_sample())
    narrow = [FORMATS["float16"].round(x) for x in (q, k, v)]
    found, expected = (
        tolerances.tolerance(*x, dtype="float16", profile="flash") for x in ((q, k, v), narrow)
    )
    assert found == expected


def save(path, arrays, dtype=np.float32, **more):
    np.savez(path, **{n: x.astype(dtype) for n, x in zip("qkv", arrays, strict=True)}, **more)
    return path


@pytest.mark.long
def test_the_command_says_what_the_function_returns(tmp_path, few):
    few("lost: key 0", "output times 1.003", "causal edge moved by +1")
    arrays = sample("float32", n=32)
    path = save(tmp_path / "file.npz", arrays)
    words = ["--dtype", "float16", "--profile", "flash", "--atol", "0.001", "--rtol", "0.01"]
    words += ["--causal", "--verbose", "--json", tmp_path / "out.json"]
    result = run("tolerance", path, *words)
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "out.json").read_text())
    options = {"profile": "flash", "atol": 1e-3, "rtol": 1e-2, "causal": True}
    expected = tolerances.tolerance(*arrays, dtype="float16", **options)
    assert found["ours"] == expected.ours._asdict()
    assert found["given"] == {"atol": 1e-3, "rtol": 1e-2}
    assert [x["atol"] for x in found["needs"]] == [x.atol for x in expected.needs]
    assert [x["head"] for x in found["needs"]] == [None, [0], [1], [2]]
    assert [x["given"] for x in found["power"]] == [x.given for x in expected.power]
    assert found["file"] == "file.npz"
    lines = result.stdout.splitlines()
    assert lines[0].endswith("v (3, 128, 32), float32 rounded to float16")
    assert lines[1] == "softmax, scale 0.176777, causal"
    assert "given: atol 0.00100, rtol 0.0100" in lines
    for row in expected.power:
        start = f"{re.escape(row.defect)} {{2,}}{re.escape(row.size)}"
        (line,) = (x for x in lines if re.match(f"{start} {{2,}}", x))
        passes = [x for x in line.split() if x in ("passes", "fails")]
        assert passes == ["passes" if x <= 1 else "fails" for x in (row.given, row.ours)]
        assert row.verdict in line
        assert line.endswith(row.suspect or row.verdict)


@pytest.mark.long
def test_the_guide_shows_what_the_command_prints():
    page = guide_blocks.page("tolerances")
    shown = page.split("On the bundled data, `--verbose` prints:\n\n```\n")[1].split("```")[0]
    result = run("tolerance", "--dtype", "bfloat16", "--verbose")
    assert result.exit_code == 0, result.output
    assert not guide_blocks.difference(f"...\n{shown}", result.stdout, atol=1e-5)


@pytest.mark.usefixtures("verdict_alone")
def test_the_type_of_the_file_and_its_mask(tmp_path, few):
    defects = ("mask left out", "softcap left out", "window ends early, by 1")
    few(*defects)
    arrays, mask = sample("float16", n=16, heads=1), np.arange(128) < 100
    path = save(tmp_path / "file.npz", arrays, np.float16, mask=mask)
    words = ["--profile", "flash", "--window", "60,", "--softcap", "20", "--verbose"]
    result = run("tolerance", path, *words)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].endswith("mask (128,) bool, others float16")
    assert lines[1] == "softmax, scale 0.176777, not causal, window 60,, softcap 20, with mask"
    for words in defects:
        assert any(" ".join(x.split()).startswith(f"{words} ") for x in lines)


@pytest.mark.long
def test_a_wider_type_than_was_meant_is_noticed():
    got = FORMATS["bfloat16"].round(naive.softmax_attention(*sample(heads=1)))
    assert_attention_close(got, *sample(heads=1))  # the output holds bfloat16 numbers, too
    question = r"numbers\n  q, k and v hold only bfloat16 numbers: is .* of the kernel\?\n  cause"
    with pytest.raises(AssertionError, match=question):
        assert_attention_close(got * (1 + 2.0**-20), *sample(heads=1))
    narrow = sample("float16", heads=1)
    got = naive.softmax_attention(*narrow) + 1
    with pytest.raises(AssertionError, match="q, k and v hold only float16 numbers"):
        assert_attention_close(got, *narrow, dtype="float32")
    with pytest.raises(AssertionError) as caught:
        assert_attention_close(got, *narrow, dtype="float16")
    assert "hold numbers of" not in str(caught.value)
