"""Estimators against exact attention, as a function: numbers, refusals, silence."""

import numpy as np
import pytest

from refattn import compare, randomized_attention, softmax_attention
from refattn.registry import DEFAULT


@pytest.fixture
def qkv():
    return np.random.default_rng(0).standard_normal((3, 2, 6, 4))


def test_rows_are_those_of_direct_evaluation(qkv, capsys):
    seen = []

    def track(cases):
        seen.append(len(cases))
        return cases

    found = compare.measure(*qkv, estimators=["ra"], sizes=[3, 5], draws=2, seed=4, track=track)
    assert seen == [2]
    names = [(row.estimator, row.samples) for row in found.rows]
    assert names == [("exact", None), ("mean of v", None), ("ra", 3), ("ra", 5)]
    exact = softmax_attention(*qkv)
    for row in found.rows[2:]:
        for draw in range(2):
            rng = np.random.SeedSequence(4, spawn_key=(row.samples, draw))
            estimate = randomized_attention(*qkv, num_samples=row.samples, rng=rng)
            error = np.linalg.norm(estimate - exact, axis=(1, 2)) / np.linalg.norm(
                exact, axis=(1, 2)
            )
            np.testing.assert_allclose(row.errors[draw], error, rtol=1e-12)
        assert row.per_head.shape == (2,)
        assert row.worst_head == (int(np.argmax(row.per_head)),)
    assert (found.scale, found.causal, found.seed, found.draws) == (0.5, False, 4, 2)
    assert capsys.readouterr() == ("", "")


def test_what_refuses_is_said(qkv):
    found = compare.measure(*qkv, estimators=["lara", "rfa"], sizes=[2, 9], draws=1)
    assert [(x.estimator, x.samples) for x in found.skipped] == [("lara-balance", 9)]
    assert found.skipped[0].label == "lara-balance with S = 9"
    with pytest.raises(ValueError, match="lara-balance with S = 9: The number of proposals must"):
        compare.measure(*qkv, estimators=["lara"], sizes=[9])
    with pytest.raises(ValueError, match="rfa-adapted does not take `causal`"):
        compare.measure(*qkv, estimators=["rfa-adapted"], causal=True)


def test_tolerated_errors_are_of_estimators_and_need_no_other_package():
    found = compare.tolerated()
    assert set(found.errors) <= set(compare.names())
    assert set(DEFAULT) <= set(found.errors)
    assert all(error > 0 for error in found.errors.values())


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"estimators": ["softmax"]}, "`estimators` must be of rfa-.*, got 'softmax'"),
        ({"estimators": "none"}, "`estimators` must be of rfa-.*, got 'none'"),
        ({"sizes": [0]}, "`sizes` must be a positive integer"),
        ({"draws": 0}, "`draws` must be a positive integer"),
        ({"seed": -1}, "`seed` must be"),
        ({"scale": 0.0}, "`scale` must be a positive"),
    ],
)
def test_bad_arguments(qkv, changes, text):
    with pytest.raises(ValueError, match=text):
        compare.measure(*qkv, **changes)
