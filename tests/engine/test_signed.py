"""Sums of signed features: axes that keys lack, maps of users, and groups of states."""

import operator
from functools import partial

import numpy as np
import pytest

import refattn
from refattn import linear_attention, naive
from refattn.arrays.library import Workspace
from refattn.engine import signed
from refattn.features import relu_features, taylor_features


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
@pytest.mark.parametrize("extreme", [False, True])
def test_axes_that_keys_lack(n, extreme):
    """Of queries, masks and frequencies, with features that are scaled and that are not."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.standard_normal(shape)

    def keys(*lead):
        k = normal(*lead, n, 5)
        k[..., -1, :] = 1e200 if extreme else k[..., -1, :]  # scaled, and the last only
        return k

    padding = np.arange(n) > n // 3
    linear = ("linear_attention", {})
    scaled = ("linear_attention", {"feature_map": partial(taylor_features, degree=2)})

    def waves(*lead):
        return "random_feature_attention", {
            "omega": normal(*lead, 4, 5), "features": "trigonometric"
        }  # fmt: skip

    cases = [
        (linear, (3, n, 5), (), {"mask": np.broadcast_to(padding, (3, 1, n))}),
        (linear, (8, 4, n, 5), (8, 1), {"mask": np.broadcast_to(padding, (8, 4, 1, n))}),
    ]
    if not extreme:
        cases += [
            (scaled, (2, n, 5), (), {"mask": np.ones((2, 1, n), bool)}),
            (waves(3), (3, n, 5), (), {}),
            (waves(16), (16, n, 5), (8,), {}),
        ]
    for (name, options), shape, lead, mask in cases:
        q, k, v = normal(*shape), keys(*lead), normal(*lead, n, 3)
        got, want = (
            getattr(module, name)(q, k, v, causal=True, **options, **mask)
            for module in (refattn, naive)
        )
        scale = np.max(np.abs(want[..., :-1, :]), initial=1.0)
        np.testing.assert_allclose(got[..., :-1, :], want[..., :-1, :], rtol=0, atol=1e-10 * scale)


def test_values_of_heads_with_keys_of_one():
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 100, 5))
    v, mask = rng.standard_normal((3, 100, 5)), rng.random((3, 1, 100)) < 0.8
    mask[..., 0] = True
    got, want = (
        f(q, k, v, mask=mask, causal=True) for f in (linear_attention, naive.linear_attention)
    )
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-12)


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
