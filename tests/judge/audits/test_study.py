"""What a comparison lets through, of comparisons whose answer is known."""

import json

import numpy as np
import pytest

from refattn import softmax_attention, testing
from refattn.judge.audits import outputs, study
from refattn.judge.mistakes.defects.catalogue import matters
from refattn.judge.rounding.formats import FORMATS
from tests.problems import draw

N, D = 24, 8


def qkv(rng=0, lead=(2,)):
    return [draw(np.random.default_rng((rng, i)), *lead, N, D) for i in range(3)]


def run(compare=lambda got, expected: True, *, dtype="bfloat16", lead=(2,), **options):
    q, k, v = qkv(lead=lead)
    return testing.audit(compare, q=q, k=k, v=v, dtype=dtype, **options)


@pytest.fixture
def few(monkeypatch):
    """A few bugs of each kind in place of the catalogue."""
    names = ("scale-missing", "causal-ahead", "plus-one", "short-log2e", "late-keys-dropped")
    every = [x for x in outputs.known("softmax") if x.name.removeprefix("softmax-") in names]
    monkeypatch.setattr(study, "known", lambda *_: every)


def test_a_comparison_that_always_passes(few):
    found = run(causal=True)
    assert found.accepts_correct
    assert not found.rejected
    assert found.blind == ["zeros", "mean of v", "v of the first key", "half the scale"]
    names = {"softmax-scale-missing", "softmax-causal-ahead", "softmax-plus-one"}
    assert {x.name for x in found.survivors} == names
    sizes = [x.relative_error for x in found.survivors]
    assert sizes == sorted(sizes, reverse=True)
    assert found.hidden == ["softmax-short-log2e"]  # three millionths, in bfloat16
    assert found.alike == ["softmax-late-keys-dropped"]  # of more than 1,024
    assert [*found.sizes.values()] == [1.0, 1.0, N, N]
    assert found.lines()[0].startswith("FAIL: this test accepts zeros, mean of v")
    found.untried.append("softmax-backward-delta-sign")
    short, every = (" ".join(found.lines(x)) for x in (False, True))
    counts = "1 that make no difference on these inputs, 1 of gradients, which were not tried"
    assert counts in short
    for name in (*found.alike, *found.hidden, *found.untried):
        assert name in every
        assert name not in short
    assert "which were not tried (backward): softmax-backward-delta-sign" in every
    assert json.loads(found.to_json())["survivors"] == list(found.tables()[0].rows)
    assert {x.name for x in found.tables()[0].columns} == {*study.Survivor._fields}


def test_a_comparison_that_never_passes(few):
    def compare(got, expected):
        raise AssertionError

    found = run(compare)
    assert not any((found.accepts_correct, found.survivors, found.blind))
    assert set(found.sizes.values()) == {0.0}
    assert "this test rejects a correct kernel" in found.lines()


def test_an_interruption_has_what_was_found(few):
    asked = []

    def compare(got, expected):
        asked.append(got)
        if len(asked) == 7:  # after the kernel itself, four trivial outputs and a bug
            raise KeyboardInterrupt
        return True

    with pytest.raises(study.Interrupted) as raised:
        run(compare, causal=True)
    found = raised.value.found
    assert len(found.survivors) == 1
    assert 2 <= len(found.left) <= 4  # and those that are not asked about
    bugs = {*found.left, *found.alike, *found.hidden, found.survivors[0].name}
    assert bugs == {x.name for x in study.known("softmax")}
    assert np.isnan([*found.sizes.values()]).all()
    lines = found.lines()
    assert f"{len(found.left)} that were still to be tried" in " ".join(lines)
    assert not any("largest error" in x or "only gradients" in x for x in lines)
    assert not run(causal=True).left


def test_numbers_of_a_survivor(few):
    """Against exact attention without the scale."""
    q, k, v = (FORMATS["bfloat16"].round(x) for x in qkv())
    exact, wrong = softmax_attention(q, k, v), softmax_attention(q, k, v, scale=1.0)
    found = run()
    bug = next(x for x in found.survivors if x.name == "softmax-scale-missing")
    error = np.abs(wrong - exact)
    atol, rtol = found.needed
    rows = np.mean((error > atol + rtol * np.abs(exact)).any(axis=-1))
    numbers = np.linalg.norm(error) / np.linalg.norm(exact), error.max(), rows
    mine = bug.relative_error, bug.largest_error, bug.rows
    np.testing.assert_allclose(mine, numbers, rtol=1e-12)
    assert bug.caught
    assert bug.kind == "scale"


def test_sizes_are_the_largest_that_pass(few):
    """In float64 an output times 1 + x passes up to x = .1, and no scores may change by so much."""

    def compare(got, expected):
        return bool(np.all(np.abs(got - expected) <= 0.1 * np.abs(expected)))

    found = run(compare, dtype="float64")
    assert found.sizes["output times"] == 2.0**-3.375  # of powers of the 8th root of 2
    assert found.sizes["last rows zero"] == 0 == found.sizes["last keys lost"]
    lost = run(lambda got, expected: np.sum(np.all(got == 0, -1)) <= 2 * 2, dtype="float64")
    assert lost.sizes["last rows zero"] == 2  # of both heads


def test_small_sizes_are_written_with_their_digits(few):
    found = run(lambda got, expected: np.allclose(got, expected, rtol=3e-4), dtype="float64")
    assert found.sizes["output times"] == 2.0**-11.75
    assert "largest error that passes: output times 1.0003" in found.lines()


def test_the_tolerance_that_is_needed(few):
    """A correct kernel passes it, and what else passes is not caught by it."""
    needed = run().needed
    found = run(lambda got, expected: np.allclose(got, expected, *needed[::-1]))
    assert found.accepts_correct
    assert not found.blind
    assert not any(x.caught for x in found.survivors)


def posed(dtype, rng=0, **options):
    return outputs.simulate_errors(outputs.pose_case(*qkv(rng), dtype=dtype, **options))


def test_tolerances_are_those_of_each_type_and_of_gradients(few):
    """They pass a correct kernel in all calls, and are no larger than each needs."""
    goes_back = outputs.add_gradients(posed("bfloat16"), FORMATS["bfloat16"].round(qkv(5)[0]))
    cases = [posed("float32"), posed("bfloat16", 1), goes_back]
    found = study.conclude(cases, lambda trial: True)
    names = {x: [*y] for x, y in found.tolerances.items()}
    assert names == {"float32": ["out"], "bfloat16": ["out", "dq", "dk", "dv"]}
    assert found.needed == found.tolerances["float32"]["out"]
    needs = [study._find_tolerances([case])[case.dtype] for case in cases]
    for case, need in zip(cases, needs, strict=True):
        for name, exact in case.exact.items():
            atol, rtol = found.tolerances[case.dtype][name]
            assert np.all(np.abs(case.write(exact, name) - exact) <= atol + rtol * np.abs(exact))
            assert need[name].atol <= atol
            assert need[name].rtol <= rtol
    assert found.needed == needs[0]["out"]


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_a_tolerance_is_of_the_size_of_the_type(few, dtype):
    (of,) = study._find_tolerances([posed(dtype)]).values()
    unit = FORMATS[dtype].unit
    assert unit / 8 < of["out"].atol < 256 * unit
    assert of["out"].rtol in (unit, 2 * unit, 4 * unit)


def test_a_bug_that_does_not_take_an_option_was_not_tried(few):
    """It is not said to make no difference; a window is a mask to it."""
    found = run(softcap=20.0)
    assert found.untried == ["softmax-plus-one"]
    assert "1 that refattn does not simulate with the kernel's options" in " ".join(found.lines())
    assert not run(window=(4, 0)).untried
    bug = next(x for x in study.known("softmax") if x.name == "softmax-plus-one")
    for window, below, above in (((4, 0), -4, 0), ((None, 2), -N, 2)):
        mask = np.tri(N, k=above, dtype=bool) & ~np.tri(N, k=below - 1, dtype=bool)
        same = [posed("float32", **x) for x in ({"window": window}, {"mask": mask})]
        np.testing.assert_array_equal(bug.compute(same[0]), bug.compute(same[1]))


@pytest.mark.parametrize("hidden", [0.0, np.nan])
def test_sums_by_products_are_those_of_the_formula(hidden):
    """For exact outputs, and bugs in what is summed; what hidden values hold has no part."""
    seen = np.random.default_rng(2).random((N, N)) < 0.8
    seen[:, 3] = False
    q, k, v = qkv()
    v[:, 3] = hidden
    case = outputs.pose_case(q, k, v, dtype="float64", mask=seen, causal=True)
    expected = softmax_attention(q, k, v, mask=seen, causal=True)
    np.testing.assert_allclose(case.exact["out"], expected, rtol=1e-12, atol=1e-14)
    bugs = {x.name: x.compute for x in outputs.known("softmax")}
    for name in ("softmax-mask-on-values", "softmax-causal-ahead"):
        plain = bugs[name].keywords["fn"](q=q, k=k, v=v, mask=seen, causal=True)
        np.testing.assert_allclose(bugs[name](case), plain, rtol=1e-12, atol=1e-14)
        assert np.abs(plain - expected).max() > 1e-3


def test_a_comparison_sees_the_library_of_the_queries(few):
    import array_api_strict as xp

    def compare(got, expected):
        assert type(got) is type(expected) is type(q)
        assert got.dtype == expected.dtype == xp.float32
        return True

    q, k, v = (xp.asarray(x, dtype=xp.float32) for x in qkv())
    assert testing.audit(compare, q=q, k=k, v=v).accepts_correct


def test_a_comparison_in_torch_has_a_wide_reference_and_takes_masks(torch, few):

    def compare(got, expected):
        assert (got.dtype, expected.dtype) == (torch.float16, torch.float32)
        return True

    q, k, v = (torch.from_numpy(x).half() for x in qkv())
    found = testing.audit(compare, q=q, k=k, v=v, mask=torch.ones(N, N, dtype=bool).tril())
    assert found.accepts_correct
    assert found.conventions == "mask"


@pytest.mark.sweep(5)
@pytest.mark.parametrize("estimator", ["linear", "rfa"])
def test_other_estimators(estimator):
    omega = np.random.default_rng(0).standard_normal((8, D))
    options = {"omega": omega} if estimator == "rfa" else {}
    options |= {"dtype": "float32", "lead": (), "estimator": estimator}
    found = run(lambda got, expected: False, **options)
    assert len(found.rejected) > 10
    assert all(x.startswith(estimator) for x in found.rejected)


def test_every_kind_has_bugs():
    kinds = {outputs.kind_of(x.name) for x in outputs.known("softmax")}
    assert kinds == {*outputs._KINDS_OF, "other"}


@pytest.mark.parametrize("estimator", ["softmax", "linear", "rfa"])
def test_bugs_of_options_that_are_not_used_make_no_difference(estimator):
    """So they need not be tried."""
    omega = {"omega": np.ones((8, D))} if estimator == "rfa" else {}
    case = outputs.pose_case(*qkv(), dtype="float64", estimator=estimator, **omega)
    bugs = [x for x in outputs.known(estimator) if not matters(x.name, {"scale"})]
    assert len(bugs) > 15
    for bug in bugs:
        np.testing.assert_allclose(bug.compute(case), case.exact["out"], 1e-12, err_msg=bug.name)


def test_masks_are_tried_with_sinks():
    """A mask that is added to the scores moves all of them, but not the sink."""
    case = outputs.pose_case(*qkv(), dtype="float64", sinks=np.zeros(2))
    bug = next(x for x in outputs.known("softmax") if x.name == "softmax-mask-as-integer")
    assert np.max(np.abs(bug.compute(case) - case.exact["out"])) > 1e-3
    assert matters(bug.name, {"sinks"})


def test_cases_are_ragged_and_repeat_with_their_seed():
    first, again = (list(testing.cases(7, count=40)) for _ in range(2))
    for x, y in zip(first, again, strict=True):
        for a, b in zip(x, y, strict=True):
            np.testing.assert_array_equal(a, b, strict=True)
            assert a.dtype == np.float32
    sizes = [q.shape[-2] for q, _, _ in first]
    assert len(set(sizes)) > 15
    assert all(q.shape[-2] <= k.shape[-2] for q, k, _ in first)
    amplitudes = [np.sqrt(np.mean(q**2)) for q, _, _ in first]
    assert min(amplitudes) < 0.5
    assert max(amplitudes) > 2
