"""Estimators against exact attention: errors of each draw, times, what is skipped."""

import numpy as np
import pytest

from refattn import compare, random_feature_attention, randomized_attention, softmax_attention
from refattn.arrays.threads import Interrupted
from refattn.compare import measured
from refattn.registry import DEFAULT, ESTIMATORS


@pytest.fixture
def qkv():
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 6, 4))
    return (q, *rng.standard_normal((2, 2, 7, 4)))


def errors(found):
    return {(row.estimator, row.samples): row.errors for row in found.rows}


def test_an_interruption_has_what_was_measured(qkv):
    def track(cases):
        yield from cases[:3]
        raise KeyboardInterrupt

    names = ["eva", "rfa-iid", "ra"]
    with pytest.raises(Interrupted) as raised:
        compare.measure(*qkv, estimators=names, sizes=[2, 4], draws=1, track=track)
    found = raised.value.found
    assert [(x.estimator, x.samples) for x in found.rows[2:]] == [
        *(("eva", 2), ("eva", 4), ("rfa-iid", 2))
    ]
    assert measured.listed(found.skipped) == (
        "S = 4 of rfa-iid (the comparison was interrupted); S = 2, 4 of ra (the comparison was "
        "interrupted)"
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.25])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_errors_are_those_of_direct_evaluation(qkv, capsys, causal, scale, dtype):
    q, k, v = (x.astype(dtype) for x in qkv)
    options = {"scale": scale, "causal": causal}
    names, seen = ["rfa-iid", "rfa-orthogonal"] + ["ra"] * (not causal), []

    def track(cases):
        seen.append(len(cases))
        return cases

    found = compare.measure(
        *(q, k, v), estimators=names, sizes=[2, 6], draws=2, seed=7, track=track, **options
    )
    exact = softmax_attention(*(x.astype(float) for x in (q, k, v)), **options)
    expected = {("exact", None): [softmax_attention(q, k, v, **options)] * 2}
    sees = np.tri(6, 7, 1) if causal else np.ones((6, 7))
    expected["mean of v", None] = [sees / sees.sum(-1, keepdims=True) @ v.astype(float)]
    for name in names:
        for samples in (2, 6):
            rngs = [np.random.SeedSequence(7, spawn_key=(samples, draw)) for draw in range(2)]
            if name == "ra":
                more = {"num_samples": samples, "scale": scale}
                drawn = [randomized_attention(q, k, v, rng=x, **more) for x in rngs]
            else:
                more = {"num_features": samples, "coupling": name[4:], **options}
                drawn = [random_feature_attention(q, k, v, rng=x, **more) for x in rngs]
            expected[name, samples] = drawn
    got, size = errors(found), np.linalg.norm(exact, axis=(1, 2))
    assert list(got) == list(expected)
    for key, estimates in expected.items():
        direct = [np.linalg.norm(x - exact, axis=(1, 2)) / size for x in estimates]
        np.testing.assert_allclose(got[key], direct, rtol=1e-6, atol=1e-15)
    for row in found.rows:
        np.testing.assert_allclose(row.per_head, np.mean(row.errors, 0))
        assert row.worst_head == (int(np.argmax(row.per_head)),)
    for row in found.rows[2:]:
        assert row.standard_error == pytest.approx(np.std(np.mean(row.errors, 1), ddof=1) / 2**0.5)
        assert row.seconds > 0
    assert (found.scale, found.causal) == (scale or 0.5, causal)
    assert (found.seed, found.draws, seen) == (7, 2, [2 * len(names)])
    assert capsys.readouterr() == ("", "")


def test_numbers_depend_on_the_seed_and_on_nothing_else_that_is_selected(qkv):
    full, again = (errors(compare.measure(*qkv, sizes=[2, 4], seed=1)) for _ in range(2))
    for key, x in full.items():
        np.testing.assert_array_equal(x, again[key])
    name = DEFAULT[1]
    part = errors(compare.measure(*qkv, estimators=[name], sizes=[4], draws=2, seed=1))
    np.testing.assert_array_equal(part[name, 4], full[name, 4][:2])
    other = errors(compare.measure(*qkv, estimators=[name], sizes=[4], seed=2))[name, 4]
    draws = full[name, 4]
    assert all(np.all(x != y) for x, y in ((draws, other), (draws[0], draws[1])))


def test_arrays_of_other_libraries_are_measured_by_numpy(qkv, torch):
    tensors = [torch.tensor(x) for x in qkv]
    found, same = (compare.measure(*x, estimators=["rfa-iid"], sizes=[8]) for x in (qkv, tensors))
    for row, other in zip(found.rows, same.rows, strict=True):
        np.testing.assert_array_equal(row.errors, other.errors)
    assert compare.study(*tensors[:2]).advised == compare.study(*qkv[:2]).advised


def test_one_head_and_grouped_heads(qkv):
    q, k, v = qkv
    options = {"sizes": [2], "draws": 1}
    assert compare.measure(q[0], k[0], v[0], **options).rows[0].worst_head == ()
    grouped = compare.measure(np.tile(q, (2, 1, 1)), k, v, **options)
    assert all(row.per_head.shape == (4,) for row in grouped.rows)


def test_sizes_may_come_one_by_one(qkv):
    found = compare.measure(*qkv, estimators=["rfa"], sizes=iter([2, 4]), draws=1)
    assert [row.samples for row in found.rows[2:]] == [2, 4]


def test_refusals_are_said(qkv):
    found = compare.measure(*qkv, estimators=["lara", "lara-own", "rfa"], sizes=[2, 9, 11], draws=1)
    assert [(x.estimator, x.samples) for x in found.skipped] == [
        (name, s) for name in ("lara-balance", "lara-own") for s in (9, 11)
    ]
    assert len(found.rows) == 2 + 2 + 3
    assert found.skipped[0].label == "lara-balance with S = 9"
    said = "S = 9, 11 of lara-balance, lara-own (more than the 6 queries or 7 keys)"
    assert measured.listed(found.skipped) == said


def rows(**errors):
    """A comparison with an error for each S = 1, 2, ... of each name, besides one of 0.5."""
    plain = [("exact", None, 0.0), ("mean of v", None, 0.5)]
    some = [(x, i, y) for x, each in errors.items() for i, y in enumerate(each, 1)]
    all_rows = [compare.Row(x, s, np.full((1, 2), y), 1.0) for x, s, y in plain + some]
    return compare.Comparison(all_rows, [], 1.0, False, 0, 1)


@pytest.mark.parametrize(
    ("errors", "said"),
    [
        ({"a": [0.6, 0.5]}, "no estimator beats"),
        ({"a": [0.6, 0.5], "ra": [0.4, 0.3]}, "only ra beats"),
        ({"a": [0.6, 0.4], "ra": [0.4, 0.3], "c": [0.9]}, "only a from S = 2 and ra beat"),
        ({"a": [0.1], "b": [0.2], "c": [0.3, 0.6]}, "a, b and c from S = 1 beat"),
        ({"a": [np.nan]}, "no estimator beats"),
    ],
)
def test_a_comparison_ends_with_what_it_means(errors, said):
    assert rows(**errors).conclusion == f"On these tensors {said} the mean of v."


def test_what_chance_explains_is_no_win():
    """Of two draws of errors 0.4 and 0.58 the mean is below 0.5, by less than its spread."""
    found = rows(a=[0.4, 0.3])
    for apart, said in (
        (0.0, "a beats the mean of v."),
        (0.18, "a from S = 2 beats the mean of v."),
    ):
        errors = np.array([[0.4, 0.4], [0.4 + apart, 0.4 + apart]])
        first = found.rows[2]._replace(errors=errors)
        text = found._replace(rows=[*found.rows[:2], first, found.rows[3]], draws=2).conclusion
        assert text.startswith(f"On these tensors {said}")
        assert text.endswith(" a at S = 1 is within two standard errors of it.") == (apart > 0)


def test_what_is_slow_is_skipped(qkv):
    """By the products of the formula, so that the table does not depend on the machine."""
    options = {"estimators": ["ra", "rfa"], "sizes": [2, 3, 5], "draws": 1}
    found = compare.measure(*qkv, **options, slowest=3)
    assert [(x.estimator, x.samples) for x in found.skipped] == [("ra", 5)]
    assert "over 3 times the multiply-adds of exact attention" in measured.listed(found.skipped)
    assert [x.samples for x in found.rows[2:]] == [2, 3, 2, 3, 5]
    assert compare.measure(*qkv, **options).skipped == []


def test_few_queries_see_what_they_saw(qkv):
    """Causal attention on some of the queries is that of those of all."""
    q, k, v = (np.tile(x, (1, 4, 1)) for x in qkv)
    posed = measured.pose(q, k, v, causal=True)
    few = measured.on_some(posed, 5)
    np.testing.assert_array_equal(few.taken, [0, 6, 12, 17, 23])
    whole, found = (measured._evaluate_draw(x, ESTIMATORS["is"], 8, 0) for x in (posed, few))
    np.testing.assert_allclose(found, whole[:, few.taken])


def test_tolerated_errors_are_of_estimators_and_need_no_other_package():
    found = compare.tolerated()
    assert set(found.errors) <= set(compare.names())
    assert set(DEFAULT) <= set(found.errors)
    assert all(error > 0 for error in found.errors.values())
    assert set(compare.names()) == {x.name for x in ESTIMATORS.values() if x.approximates}
    orthogonal = ESTIMATORS["rfa-orthogonal"]
    assert all(ESTIMATORS[name] is orthogonal for name in ("performer", "favor"))
    assert ESTIMATORS["snis"] is ESTIMATORS["rfa"] is ESTIMATORS["rfa-iid"]
