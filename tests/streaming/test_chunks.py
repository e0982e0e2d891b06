"""States of a window and summaries of the rest: what only they have."""

from functools import partial

import numpy as np
import pytest

import refattn
from refattn import softmax_attention
from refattn.streaming import EvaState
from tests.conftest import Host
from tests.streaming.cases import CASES, OMEGA, WINDOWED, draw, in_steps

every_state = pytest.mark.parametrize("name", WINDOWED)


@pytest.mark.sweep(2)
@every_state
@pytest.mark.parametrize("size", [30.0, 1e4])
def test_steps_of_extreme_logits(name, size):
    """Scores of thousands to 1e8: the same keys win, step by step or at once."""
    q, k, v = draw(0, 20, size=size)
    want = CASES[name].whole(4, 20)(q, k, v, causal=True)
    for cuts in ([0, *range(1, 21)], [3, 4, 11, 20]):
        blocks, last = in_steps(name, 4, q, k, v, cuts)
        got = np.concatenate(blocks, -2)
        assert np.all(np.isfinite(got))
        # eps times the largest exponent, of which 1e8 leave half the digits.
        atol = 2e-16 * (1 + 30 * size**2)
        np.testing.assert_allclose(got, want[:, cuts[0] :], rtol=0, atol=min(atol, 1e-6))
        np.testing.assert_allclose(last[-1], want[:, -1:], rtol=0, atol=min(atol, 1e-6))


@every_state
def test_a_window_of_all_is_softmax(name):
    q, k, v = draw(1, 9)
    scale = None if name in ("mean", "given", "local of one") else 0.4
    want = softmax_attention(q, k, v, causal=True, scale=scale)
    for window in (9, 2**63, 10**300):
        blocks, last = in_steps(name, window, q, k, v, [2, 3, 9])
        np.testing.assert_allclose(np.concatenate(blocks, -2), want[:, 2:], rtol=0, atol=1e-14)
        np.testing.assert_allclose(last[-1], want[:, -1:], rtol=0, atol=1e-14)


def test_a_generator_is_left_where_it_was():
    q, k, v = draw(0, 9)
    rng = np.random.default_rng(5)
    state = EvaState.init(k, v, q=q, window=2, rng=rng)
    assert rng.bit_generator.state == np.random.default_rng(5).bit_generator.state
    want = refattn.eva_attention(q, k, v, window=2, rng=5, causal=True)
    np.testing.assert_allclose(state.read(q[:, -1:]), want[:, -1:], rtol=0, atol=1e-14)


def test_tokens_without_queries():
    """Queries of the last tokens only, as of a sequence with fewer queries than keys."""
    q, k, v = draw(3, 13)
    for n in range(8):
        own = q[:, 13 - n :]
        want = refattn.eva_attention(own, k, v, window=4, rng=1, causal=True)
        state = EvaState.init(k[:, :5], v[:, :5], q=q[:, :0], window=4, rng=1)
        got = state.read_causal(own, k[:, 5:], v[:, 5:])
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-14)
        after = state.update(k[:, 5:12], v[:, 5:12], q[:, 13 - n : 12] if n else q[:, :0])
        if n:
            got = after.read_causal(q[:, 12:], k[:, 12:], v[:, 12:])
            np.testing.assert_allclose(got, want[:, -1:], rtol=0, atol=1e-14)


def test_merge_after_a_chunk_with_fewer_queries_than_keys():
    q, k, v = draw(4, 11)
    a, b = slice(0, 4), slice(4, 10)
    of = partial(EvaState.init, window=4, omega="mean")
    merged = of(k[:, a], v[:, a], q=q[:, 3:4]).merge(of(k[:, b], v[:, b], q=q[:, b]))
    got = merged.update(k[:, 10:], v[:, 10:], q[:, 10:]).read(q[:, 10:])
    want = refattn.eva_attention(q[:, 3:], k, v, window=4, omega="mean", causal=True)
    np.testing.assert_allclose(got, want[:, -1:], rtol=0, atol=1e-14)


@pytest.mark.long("jax", "dask")
def test_frequencies_on_a_backend(backend):
    q, k, v = draw(0, 7)

    def decode(q, k, v, omega):
        state = EvaState.init(k[:, :3, :], v[:, :3, :], window=2, omega=omega)
        return state.update(k[:, 3:, :], v[:, 3:, :]).read(q[:, 6:, :])

    want = refattn.eva_attention(q, k, v, window=2, omega=OMEGA[:4], causal=True)[:, 6:]
    for omega in (OMEGA[:4], Host(OMEGA[:4])):
        got = backend.call(decode, q, k, v, omega)
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-13)
