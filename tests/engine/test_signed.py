"""Sums of signed features: axes that keys lack, maps of users, and groups of states."""

import operator

import numpy as np
import pytest

from refattn import linear_attention, naive, random_feature_attention
from refattn.arrays.arithmetic import Workspace
from refattn.engine import signed
from refattn.features import relu_features
from tests.problems import draw


def test_maps_of_heads_get_all_of_them():
    """A map may hold arrays of each head."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 9, 120, 4))
    scales = rng.uniform(1, 2, (9, 1, 1))
    for causal in (False, True):
        got = linear_attention(q, k, v, feature_map=lambda x: np.exp(scales * x), causal=causal)
        for h in range(9):
            own = linear_attention(
                q[h], k[h], v[h], feature_map=lambda x, h=h: np.exp(scales[h] * x), causal=causal
            )
            np.testing.assert_allclose(got[h], own, rtol=1e-12)


def test_infinite_features_warn_of_nothing():
    q, k, v = np.full((3, 2), np.inf), np.ones((3, 2)), np.ones((3, 1))
    assert np.isnan(linear_attention(q, k, v)).all()


@pytest.mark.parametrize("n", [20, 100, 150])
@pytest.mark.parametrize(("lead", "keys"), [((3,), ()), ((8, 4), (8, 1))])
def test_a_last_key_that_is_scaled_under_masks_of_heads(n, lead, keys):
    """Masks have axes that keys lack; features of the last key alone have a scale."""
    rng = np.random.default_rng(0)
    q, k, v = draw(rng, *lead, n, 5), draw(rng, *keys, n, 5), draw(rng, *keys, n, 3)
    k[..., -1, :] = 1e200
    mask = np.broadcast_to(np.arange(n) > n // 3, (*lead, 1, n))
    got, want = (
        f(q, k, v, causal=True, mask=mask)[..., :-1, :]
        for f in (linear_attention, naive.linear_attention)
    )
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-10 * max(1.0, np.max(np.abs(want))))


@pytest.mark.parametrize("options", [{"causal": True}, {"mask": np.tri(60, dtype=bool)}])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_features_of_a_hidden_key_reach_nothing(value, options):
    """Where a map gives a scale of 1 to whatever it is given, too."""
    rng = np.random.default_rng(0)
    q, k, v, omega = draw(rng, 60, 3), draw(rng, 60, 3), draw(rng, 60, 2), draw(rng, 4, 3)
    options = options | {"omega": omega, "features": "trigonometric", "square_norms": (1.0, 1.0)}
    want = random_feature_attention(q, k, v, **options)
    k[-1] = value
    got = random_feature_attention(q, k, v, **options)
    np.testing.assert_array_equal(got[:-1], want[:-1])
    assert np.isnan(got[-1]).all()


def test_a_query_without_a_positive_part_has_no_mean():
    q, k, v = np.full((60, 2), -1.0), np.ones((60, 2)), np.ones((60, 1))
    for causal in (False, True):
        with np.errstate(all="ignore"):
            got = linear_attention(q, k, v, feature_map=relu_features, causal=causal)
        assert np.isnan(got).all()


@pytest.mark.parametrize("n", [10, 48, 96, 150])
def test_a_map_may_return_the_same_array_at_each_call(n):
    room = {}

    def into_one(x):
        values = room.setdefault(x.shape, np.empty(x.shape))
        values[...] = np.exp(x)
        return values

    q, k, v = np.random.default_rng(0).standard_normal((3, n, 4))
    full = np.tri(n, dtype=bool)
    for options in ({}, {"causal": True}, {"mask": full}, {"mask": full, "causal": True}):
        got, want = (
            linear_attention(q, k, v, feature_map=f, **options) for f in (into_one, np.exp)
        )
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("count", [1, 6, 7, 8, 14, 15, 48, 49, 50, 343, 344, 2402])
def test_sums_of_arrays_are_those_of_states(count):
    """To the bit, since a base that is needed later must not change what is there."""
    rng = np.random.default_rng(count)
    first, own = rng.standard_normal((2, 3, 4)), rng.standard_normal((2, count, 3, 4))
    want, last = signed._in_groups(operator.add, first, [own[:, t] for t in range(count)])
    got, total = signed._sums_in_groups(first, own.copy(), Workspace())
    np.testing.assert_array_equal(got, np.stack(want, axis=1))
    np.testing.assert_array_equal(total, last)
    np.testing.assert_allclose(total, own.sum(axis=1), rtol=1e-10, atol=1e-10)
