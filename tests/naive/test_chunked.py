"""Chunked forms are their dense formulas and what the engine computes, whatever the chunks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import refattn
from refattn import naive
from tests.problems import draw, sizes

chunks = st.integers(1, 40)
WEIGHTINGS = [(w, False) for w in ("balance", "own", "query", "query-over-queries")]
WEIGHTINGS += [("balance", True), ("own", True)]


def problem(rng, n, m, masked):
    """Two heads of queries that share keys, and values up to which sums are good to 1e-13."""
    arrays = draw(rng, 2, n, 3), draw(rng, 1, m, 3), draw(rng, 2, m, 2)
    return arrays, rng.random(m) < 0.7 if masked else None


@given(sizes, sizes, chunks, st.booleans())
def test_causal_rfa_in_chunks_is_the_dense_formula(n, m, chunk, masked):
    rng = np.random.default_rng(n + 100 * m)
    arrays, mask = problem(rng, n, m, masked)
    options = {"omega": 2 * draw(rng, 4, 3), "log_weight": draw(rng, 4), "mask": mask}
    got = naive.chunked_random_feature_attention(*arrays, chunk=chunk, **options)
    want = naive.random_feature_attention(*arrays, causal=True, **options)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-13)


@pytest.mark.parametrize(("weighting", "causal"), WEIGHTINGS)
@given(sizes, sizes, chunks, st.booleans())
def test_lara_in_chunks_is_the_dense_formula(weighting, causal, n, m, chunk, masked):
    rng = np.random.default_rng(n + 100 * m)
    arrays, mask = problem(rng, n, m, masked)
    options = {"weighting": weighting, "causal": causal, "mask": mask}
    options |= {"omega": 2 * draw(rng, 6, 3), "num_proposals": 3}
    got = naive.chunked_linear_randomized_attention(*arrays, chunk=chunk, **options)
    want = naive.linear_randomized_attention(*arrays, **options)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("n", "m"), [(128, 128), (130, 130), (70, 201), (201, 70)])
@pytest.mark.parametrize("size", [1, 30])
def test_chunked_forms_are_what_the_engine_computes(n, m, size):
    """Past the chunk of 64, also where it does not divide the tokens; logits up to 1e3."""
    rng = np.random.default_rng(n)
    (q, k, v), mask = problem(rng, n, m, True)
    omega = draw(rng, 6, 3)
    q, k = size * q, size * k
    for got, want in (
        (
            naive.chunked_random_feature_attention(q, k, v, omega=omega, mask=mask),
            refattn.random_feature_attention(q, k, v, omega=omega, mask=mask, causal=True),
        ),
        *(
            (
                naive.chunked_linear_randomized_attention(q, k, v, **options),
                refattn.linear_randomized_attention(q, k, v, **options),
            )
            for causal in (False, True)
            for options in [{"omega": omega, "num_proposals": 3, "mask": mask, "causal": causal}]
        ),
    ):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-13 * size**2)


def test_what_is_hidden_or_later_changes_no_bit():
    rng = np.random.default_rng(0)
    (q, k, v), omega = problem(rng, 30, 30, False)[0], draw(rng, 6, 3)
    mask = np.arange(30) != 3

    def both():
        rfa = naive.chunked_random_feature_attention(q, k, v, omega=omega, mask=mask, chunk=8)
        lara = naive.chunked_linear_randomized_attention(
            q, k, v, omega=omega, num_proposals=2, mask=mask, causal=True, chunk=8
        )
        return np.stack([rfa, lara])[..., :20, :]

    before = both()
    for x in (k, v):
        x[:, [3, *range(20, 30)]] = np.nan
    np.testing.assert_array_equal(both(), before)
