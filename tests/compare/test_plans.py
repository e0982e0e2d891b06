"""What is measured, as functions: numbers, and that nothing is printed."""

import numpy as np
import pytest

from refattn import compare, registry
from refattn.compare import advice, plans


@pytest.fixture
def qkv():
    """Two heads whose values differ little, so that RFA needs few features."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 64, 8))
    return 0.7 * q, 0.7 * k, 1 + v


def test_search_doubles_until_the_target(qkv, capsys):
    seen = []

    def track(names):
        seen.extend(names)
        return names

    planned = compare.plan(*qkv, estimators=["ra", "rfa"], target=0.1, draws=3, seed=5)
    assert (planned.heads, planned.queries, planned.most) == ([(0,), (1,)], 32, 256)
    found = compare.search(planned, track=track)
    assert seen == ["ra", "rfa-iid"]
    q, k, v = qkv
    part = q[:, np.linspace(0, 63, 32).round().astype(int)]  # for what takes n m S
    for candidate, queries in zip(found.candidates, (part, q), strict=True):
        sizes = [row.samples for row in candidate.steps]
        assert sizes == [2**i for i in range(len(sizes))]
        measured = compare.measure(
            queries, k, v, estimators=[candidate.estimator], sizes=sizes, draws=3, seed=5
        )
        means = [np.mean(row.errors) for row in candidate.steps]
        np.testing.assert_allclose(means, [np.mean(row.errors) for row in measured.rows[2:]])
        assert candidate.reached
        assert means[-1] <= 0.1 < min(means[:-1])
        row = candidate.steps[-1]
        by_draw = row.errors.mean(axis=1)
        assert row.standard_error == pytest.approx(np.std(by_draw, ddof=1) / 3**0.5)
        assert found.standard_error(row) == row.standard_error  # all heads
    assert capsys.readouterr() == ("", "")


def test_fewer_do_than_a_law_says_where_it_does_not_hold(qkv):
    """Why S by the law and the S from which it holds are told apart."""
    laws = compare.study(*qkv, target=0.1)
    found = compare.search(compare.plan(*qkv, estimators=["rfa"], target=0.1)).candidates[0]
    assert found.reached
    assert found.choice.num_features is not None
    for said in (laws.by_law, laws.holds_from):
        assert found.choice.num_features < np.min(said["rfa"]) / 10


def test_any_estimator_of_the_registry(qkv, monkeypatch):
    """What has no size is measured once; what takes any number of queries, up to that of tokens."""

    def mean(q, k, v, *, scale=None):
        return 0 * q + np.mean(v, axis=-2, keepdims=True)

    def picky(q, k, v, *, num, scale=None):
        if num > 2:
            raise ValueError("only two")
        return mean(q, k, v)

    records = registry.ESTIMATORS
    record = registry.Estimator("uniform", mean, mean, options=("scale",), traits=())
    monkeypatch.setitem(records._records, "uniform", record)
    monkeypatch.setitem(
        records._records, "picky", record._replace(name="picky", fn=picky, size="num")
    )
    assert {"uniform", "picky"} < set(compare.plan(*qkv, most=1).problems)
    planned = compare.plan(*qkv, estimators=["uniform", "picky", "lara"], target=1e-9)
    uniform, picked, lara = compare.search(planned).candidates
    assert [row.samples for row in uniform.steps] == [None]
    assert uniform.steps[0].errors.shape == (1, 2)  # no draws
    assert uniform.choice.num_features is None
    assert ([row.samples for row in picked.steps], picked.reason) == ([1, 2], "only two")
    assert (lara.steps[-1].samples, lara.reached, lara.reason) == (64, False, "")
    assert compare.search(planned).ranking == [(advice.EXACT, None, 1.0)]
    planned = compare.plan(*qkv, estimators=["uniform"], target=1e9)
    assert {x.estimator for x in compare.search(planned).ranking} == {"uniform", advice.EXACT}


def test_samples_of_keys_are_bounded_by_keys_alone(qkv):
    q, k, v = qkv
    names = ["coreset", "sampled-uniform", "lara"]
    planned = compare.plan(q[:, :4], k, v, estimators=names, target=1e-9, draws=2)
    coreset, sampled, lara = compare.search(planned).candidates
    for found in (coreset, sampled):  # with all keys they are exact, to rounding
        assert (found.steps[-1].samples, found.reason) == (64, "")
    assert coreset.reached
    assert (lara.steps[-1].samples, lara.reason) == (4, "")


def test_heads_are_taken_as_far_as_they_are_small(qkv, monkeypatch):
    q, k, v = (np.repeat(x, 3, axis=0) for x in qkv)
    monkeypatch.setattr(plans, "PAIRS", 3 * 64 * 64)
    assert compare.plan(q, k, v, estimators=["rfa"], most=1).heads == [(0,), (2,), (5,)]
    found = compare.search(compare.plan(q, k, v, estimators=["rfa"], most=1))
    row = found.candidates[0].steps[0]
    choice = np.var(row.per_head, ddof=1) / 3 * (1 - 3 / 6)
    assert found.standard_error(row) == pytest.approx((row.standard_error**2 + choice) ** 0.5)
    monkeypatch.setattr(plans, "PAIRS", 1)
    found = compare.search(compare.plan(q, k, v, estimators=["rfa"], most=1))
    assert np.isnan(found.standard_error(found.candidates[0].steps[0]))
    assert compare.plan(q, k, v, estimators=["rfa"], most=1).heads == [(0,)]
    grouped = compare.plan(q, k[:2], v[:2], estimators=["rfa"], most=1)
    np.testing.assert_array_equal(grouped.problems["rfa-iid"].k[0], k[0])


def test_windows_of_chunks_in_the_order_of_their_terms():
    """One key to a chunk is exact: it would reach every target at once, at no gain."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((70, 3)) for _ in range(3))
    for target, sizes in ((10.0, [8]), (1e-9, [8, 16, 4, 32, 2])):
        planned = compare.plan(q, k, v, estimators=["eva", "second-order"], target=target)
        for candidate in compare.search(planned).candidates:
            assert [step.samples for step in candidate.steps] == sizes
            assert candidate.reached == (target > 1)
