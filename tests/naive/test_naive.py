"""Closed forms of exact attention as it is written, and that the formulas share nothing."""

import ast
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from scipy.special import expit

import refattn
from refattn import naive
from tests.problems import draw, seeds, sizes


@pytest.mark.parametrize("window", [(0, 0), (2, 1), (None, 1), (1, None), (None, None), (40, 40)])
@pytest.mark.parametrize("causal", [False, True])
@given(sizes, sizes)
def test_a_window_of_equal_scores_has_the_middle_of_its_values(window, causal, n, m):
    # Of equal scores the result is the middle of what is seen, here of keys from low to high.
    v = np.arange(m, dtype=float)[:, None]
    got = naive.softmax_attention(np.ones((n, 1)), 0 * v, v, window=window, causal=causal)
    left, right = window
    for i in range(n):
        level = i + m - n
        low = 0 if left is None else max(0, level - left)
        high = m - 1 if right is None else min(m - 1, level + right)
        if causal:
            high = min(high, level)
        want = (low + high) / 2 if low <= high else 0.0
        assert got[i, 0] == pytest.approx(want, rel=1e-14, abs=1e-14)


def test_a_window_and_a_mask_hide():
    v = np.eye(4)
    got = naive.softmax_attention(
        np.zeros((4, 1)), np.zeros((4, 1)), v, window=(1, 0), mask=np.arange(4) != 1
    )
    np.testing.assert_allclose(got, [[1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0.5, 0.5]])


@pytest.mark.parametrize("softcap", [0.5, 3.0, 50.0])
def test_a_cap_of_two_keys_is_a_logistic_function(softcap):
    # Two keys of scores s and 0 and values 1 and 0: the logistic function of the capped score, and
    # of the bias, which is not capped.
    s = np.linspace(-100, 100, 9)[:, None]
    keys, values = np.array([[1.0], [0.0]]), np.array([[1.0], [0.0]])
    for bias in (0.0, 7.0):
        got = naive.softmax_attention(
            s, keys, values, scale=2.0, softcap=softcap, bias=np.array([bias, 0.0])
        )
        want = expit(softcap * np.tanh(2 * s / softcap) + bias)
        np.testing.assert_allclose(got, want, rtol=1e-12 * (1 + softcap))
    plain = naive.softmax_attention(s / 100, keys, values)
    capped = naive.softmax_attention(s / 100, keys, values, softcap=1e8)
    np.testing.assert_allclose(capped, plain, rtol=1e-14)  # c tanh(s/c) = s - s^3 / 3c^2


@given(sizes, seeds)
def test_sinks_add_to_the_normaliser(m, seed):
    # Keys of score 0: sum of values over m + e^sink.
    rng = np.random.default_rng(seed)
    q, k = np.zeros((2, 6, 3, 2)), draw(rng, 2, 3, m, 2)
    v, sinks = draw(rng, 3, m, 4), draw(rng, 6, size=3.0)
    got = naive.softmax_attention(q, k, v, sinks=sinks)
    values = np.repeat(np.sum(v, -2), 2, axis=0)  # of the key head of each query head
    want = values / (m + np.exp(sinks))[:, None]
    np.testing.assert_allclose(
        got, np.broadcast_to(want[:, None, :], got.shape), rtol=1e-13, atol=1e-14
    )


def test_a_sink_is_a_key_of_value_0():
    rng = np.random.default_rng(0)
    q, k, v, sinks = draw(rng, 4, 5, 3), draw(rng, 4, 7, 3), draw(rng, 4, 7, 2), draw(rng, 4)
    nothing = np.zeros((4, 1, 3))
    bias = np.concatenate([np.zeros((4, 5, 7)), np.tile(sinks[:, None, None], (5, 1))], -1)
    want = refattn.softmax_attention(
        q, np.concatenate([k, nothing], -2), np.concatenate([v, nothing[..., :2]], -2), bias=bias
    )
    np.testing.assert_allclose(naive.softmax_attention(q, k, v, sinks=sinks), want, atol=1e-14)
    without = naive.softmax_attention(q, k, v)
    same = naive.softmax_attention(q, k, v, sinks=np.full(4, -np.inf))
    np.testing.assert_allclose(same, without, rtol=1e-14)
    np.testing.assert_array_equal(naive.softmax_attention(q, k, v, sinks=np.full(4, 1e4)), 0)
    hidden = naive.softmax_attention(q, k, v, sinks=sinks, mask=np.zeros(7, bool))
    np.testing.assert_array_equal(hidden, 0)


def test_formulas_share_nothing_with_the_engine():
    folder = Path(naive.__file__).parent
    inside = {path.stem for path in folder.glob("*.py")}
    names, modules = set(), set()
    others = {*folder.glob("__main__.py"), *folder.glob("one_file*.py")}
    for path in {*folder.glob("*.py")} - others:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module in inside:
                assert node.level == 1
            elif isinstance(node, ast.ImportFrom):
                modules.add(node.module)
                names |= {alias.name for alias in node.names} if node.level else set()
            elif isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
    assert modules == {
        *("__future__", "collections.abc", "typing", "arrays", "arrays.library", "arrays.heads")
    }
    assert names == {
        *("math", "checks", "Alibi", "Array", "ArrayT", "Features", "Weighting", "group_heads"),
        *("array_namespace", "as_written", "broadcast_lead", "constant", "device"),
    }
