"""Means of contiguous chunks of tokens, whose lengths differ by at most 1."""

from itertools import pairwise

import numpy as np
import pytest

from refattn.arrays import blocks
from refattn.arrays.library import array_namespace
from refattn.estimators.token_chunks import mean_of_chunks


@pytest.mark.parametrize(
    ("n", "count"),
    [(12, 4), (13, 5), *(pytest.param(*x, marks=pytest.mark.long) for x in ((300, 4), (301, 2)))],
)
def test_means_of_chunks(backend, n, count, monkeypatch):
    monkeypatch.setattr(blocks, "_OTHER_BLOCK", (4, 8))  # some chunks at a time
    x = np.random.default_rng(0).standard_normal((2, n, 3))
    got = backend.call(lambda x: mean_of_chunks(x, count, None, array_namespace(x)), x)
    edges = [-(-c * n // count) for c in range(count + 1)]
    want = [np.mean(x[:, i:j], axis=1) for i, j in pairwise(edges)]
    np.testing.assert_allclose(got, np.stack(want, axis=1), rtol=0, atol=1e-14)


def test_means_of_no_rows_are_0(backend):
    got = backend.call(lambda x: mean_of_chunks(x, 2, None, array_namespace(x)), np.ones((2, 0, 3)))
    assert np.array_equal(got, np.zeros((2, 2, 3)))
