"""attend, merge and softmax_attention: identities, what is infinite, and every library."""

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refattn import Attended, attend, merge
from tests.problems import draw, dtypes, magnitudes, seeds, sizes, tolerance


def test_no_key_gives_the_identity_of_merge():
    rng = np.random.default_rng(0)
    q, k, v = draw(rng, 2, 3, 4), draw(rng, 2, 5, 4), draw(rng, 2, 5, 6)
    for empty in (
        attend(q, k, v, mask=np.zeros((3, 5), bool)),
        attend(q, k[:, :0], v[:, :0]),
        attend(q, k, v, bias=np.full((3, 5), -np.inf)),
    ):
        np.testing.assert_array_equal(empty.out, np.zeros((2, 3, 6)))
        np.testing.assert_array_equal(empty.lse, np.full((2, 3), -np.inf))
        some = attend(q, k, v)
        for merged in (merge(empty, some), merge(some, empty)):
            np.testing.assert_allclose(merged.out, some.out, rtol=1e-15)
            np.testing.assert_allclose(merged.lse, some.lse, rtol=1e-15)
        np.testing.assert_array_equal(merge(empty, empty).lse, empty.lse)


@st.composite
def problems(draw_):
    rng = np.random.default_rng(draw_(seeds))
    n, m, d, d_v = (draw_(sizes) for _ in range(4))
    lead = tuple(draw_(st.lists(st.integers(1, 3), max_size=2)))
    size, dtype = draw_(magnitudes), draw_(dtypes)
    shapes = (*lead, n, d), (*lead, m, d), (*lead, m, d_v)
    q, k, v = (draw(rng, *shape, dtype=dtype, size=size) for shape in shapes)
    return q, k, v / max(size, 1)


@given(problems(), st.lists(st.integers(0, 7), max_size=3), seeds)
def test_merge_agrees_with_one_pass(problem, cuts, seed):
    q, k, v = problem
    m = k.shape[-2]
    edges = [0, *sorted(min(c, m) for c in cuts), m]
    parts = [attend(q, k[..., i:j, :], v[..., i:j, :]) for i, j in pairwise(edges)]
    np.random.default_rng(seed).shuffle(parts)
    left = right = Attended(*parts[0])
    for p in parts[1:]:
        left, right = merge(left, p), merge(p, right)
    whole = attend(q, k, v)
    for merged in (left, right):
        atol = len(edges) * tolerance(q, k)
        np.testing.assert_allclose(merged.out, whole.out, rtol=0, atol=atol * np.abs(v).max())
        np.testing.assert_allclose(merged.lse, whole.lse, rtol=0, atol=atol)


@pytest.mark.long("jax", "dask")
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of Dask, which computes later
@pytest.mark.parametrize("weight", ["some", "underflows"])
def test_infinite_values_with_a_mask_of_true(backend, dtype, weight):
    # What is seen counts as without a mask, column by column; what is hidden does not count.
    q, k = np.ones((3, 1), dtype), np.zeros((5, 1), dtype)
    if weight == "underflows":
        k[:4] = -1e4
    v = np.array(
        [[np.inf, 1, 1, -np.inf, np.nan, 1], [np.inf, 1, -np.inf, 1, 1, 2], *[[1.0] * 6] * 3], dtype
    )
    plain = backend.call(attend, q, k, v).out
    got = backend.call(attend, q, k, v, mask=np.ones((3, 5), bool)).out
    np.testing.assert_array_equal(got, plain)
    if weight == "some":
        np.testing.assert_array_equal(got[0, [0, 2, 3]], [np.inf, -np.inf, -np.inf])
        assert np.all(np.isfinite(got[:, [1, 5]]))
    mask = np.array([[1, 1, 1, 1, 1], [0, 1, 1, 1, 1], [0, 0, 1, 1, 1]], bool)
    got = backend.call(attend, q, k, v, mask=mask).out
    np.testing.assert_array_equal(got[0], plain[0])
    np.testing.assert_array_equal(got[2], np.ones(6))
    want = backend.call(attend, q[1:2], k[1:], v[1:]).out[0]
    np.testing.assert_allclose(got[1], want, rtol=1e-6)
    nonzero = backend.call(attend, q, k, v, causal=True).out
    np.testing.assert_array_equal(nonzero[2], plain[2])


def test_no_warning_of_what_is_hidden_or_documented(dtype):
    # Warnings are errors in these tests.
    huge = np.finfo(dtype).max
    q, v = np.ones((2, 3), dtype), np.ones((4, 2), dtype)
    mask = np.array([True, True, False, False])
    for extreme in (np.inf, -np.inf, np.nan, huge):
        k = np.ones((4, 3), dtype)
        k[2:] = extreme
        np.testing.assert_array_equal(attend(q, k, v, mask=mask).out, np.ones((2, 2)))
        out = attend(q[:, :1], k[:, :1], v, bias=np.array([0, 0, -np.inf, -np.inf], dtype)).out
        assert np.all(np.isnan(out) == bool(np.isnan(extreme) or extreme == np.inf))
    far = np.array([[0.0], [800.0]], dtype)
    np.testing.assert_array_equal(attend(q[:, :1], far, v[:2], causal=True).out, np.ones((2, 2)))
    assert np.all(np.isnan(attend(q * huge, q * huge, v[:2]).out))


def test_torch_autocast_changes_nothing(torch):
    x = torch.asarray(draw(np.random.default_rng(0), 64, 64, dtype=np.dtype(np.float32)))
    want = attend(x, x, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = attend(x, x, x)
        joined = merge(got, want)
        assert (x @ x).dtype == torch.bfloat16  # it is on again
    assert torch.equal(got.out, want.out)
    assert torch.equal(joined.out, merge(want, want).out)


@pytest.mark.long("dask", "jax")
def test_parts_merge_on_every_library(backend, dtype):
    """With a bias, and a query that sees no key of the first part."""
    rng = np.random.default_rng(0)
    q, k, v = (draw(rng, 2, *x, dtype=dtype) for x in ((4, 5, 3), (2, 6, 3), (2, 6, 2)))
    mask, bias = rng.random((2, 1, 5, 6)) < 0.5, draw(rng, 4, 1, 6, dtype=dtype)
    mask[0, 0, 0, :4] = False

    def run(q, k, v, mask, bias):
        first, second = (
            attend(q, k[..., i, :], v[..., i, :], mask=mask[..., i], bias=bias[..., i], scale=0.5)
            for i in (slice(0, 4), slice(4, 6))
        )
        return merge(first, second)

    got = backend.call(run, q, k, v, mask=mask, bias=bias)
    want = attend(q, k, v, mask=mask, bias=bias, scale=0.5)
    np.testing.assert_allclose(got.out, want.out, rtol=0, atol=2 * tolerance(q, k))
    np.testing.assert_allclose(got.lse, want.lse, rtol=0, atol=2 * tolerance(q, k))


def test_log_normalisers_have_heads_of_values():
    v = np.ones((2, 6, 4))
    for lead, size in product([(), (1,)], [1.0, 30.0]):  # with and without a maximum
        found = attend(np.full((*lead, 5, 3), size), np.full((*lead, 6, 3), size), v)
        assert (found.out.shape, found.lse.shape) == ((2, 5, 4), (2, 5))
        np.testing.assert_allclose(found.lse, 3 * size**2 + np.log(6))
