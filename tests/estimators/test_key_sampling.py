"""Keys chosen at random: their laws, and that every library chooses the same."""

import tracemalloc

import numpy as np
import pytest
from scipy import stats

from refattn import sampled_key_attention, softmax_attention
from refattn.estimators import key_sampling
from refattn.estimators.key_sampling import draw_keys, draw_pivots
from refattn.typing import KEY_LAWS

# --- pivots ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("pivots", key_sampling.PIVOTS)
def test_pivots_have_their_law(pivots):
    """Pairs of first and second pivots of four keys: chi-square, false alarm 1e-9."""
    k, draws = np.random.default_rng(0).standard_normal((4, 2)), 20_000
    x = k - k.mean(0)
    gram = np.exp(x @ x.T)
    if pivots == "gaussian":
        root = np.sqrt(np.diag(gram))
        gram = gram / root[:, None] / root
    law = np.zeros((4, 4))
    for i in range(4):
        left = np.diag(gram) - gram[:, i] ** 2 / gram[i, i]
        left[i] = 0
        law[i] = gram[i, i] / np.trace(gram) * left / left.sum()
    many = np.broadcast_to(k, (draws, 4, 2))
    first, second = draw_pivots(many, num_keys=2, pivots=pivots, rng=1, scale=1.0).T
    counts = np.zeros((4, 4))
    np.add.at(counts, (first, second), 1)
    some = law > 0
    assert counts[~some].sum() == 0
    assert stats.chisquare(counts[some], draws * law[some]).pvalue > 1e-9


def test_pivots_are_seen_and_differ_while_there_are_such():
    rng = np.random.default_rng(2)
    k, mask = rng.standard_normal((3, 20, 4)), rng.random((3, 1, 20)) < 0.5
    found = draw_pivots(k, num_keys=20, rng=0, mask=mask)
    for indices, seen in zip(found, mask[:, 0], strict=True):
        some = seen.sum()
        assert sorted(indices[:some]) == list(np.flatnonzero(seen))
    k[:, ~mask[0, 0]] = np.nan
    assert np.isfinite(draw_pivots(k, num_keys=3, rng=0, mask=mask[:1])).all()


def test_pivots_where_some_keys_are_much_longer():
    """Of e^(k . k') the longest come first: beyond the range of float64, the others still come."""
    k = np.array([[0.0], [1.0], [2.0], [60.0], [-1.0], [60.0]])
    found = draw_pivots(k, num_keys=5, pivots="exponential", rng=0, scale=1.0)
    assert sorted(np.where(found == 5, 3, found)) == [0, 1, 2, 3, 4]
    # Nor do those that differ from the chosen by rounding alone, however long, come before them.
    rng = np.random.default_rng(0)
    k = np.concatenate([np.array([0.0, 1.0]), *(x + rng.normal(0, 0.01, 20) for x in (60, -60))])
    found = draw_pivots(k[:, None], num_keys=16, pivots="exponential", rng=0, scale=1.0)
    assert {0, 1} < set(found.tolist())


@pytest.mark.long("dask", "jax")
@pytest.mark.parametrize("pivots", key_sampling.PIVOTS)
def test_every_library_chooses_the_same_pivots(backend, pivots):
    """Also where no key is left that differs from the chosen, and then any may come."""
    rng = np.random.default_rng(13)
    k, mask = 2 * rng.standard_normal((2, 72, 8)), rng.random((2, 1, 72)) < 0.95
    k[1, 36:] = k[1, :36]
    options = {"num_keys": 70, "pivots": pivots, "rng": 0}
    want = draw_pivots(k, mask=mask, **options)
    arrays = backend.array(k), backend.array(mask)
    with backend.guard():
        got = draw_pivots(arrays[0], mask=arrays[1], **options)
    for x, y, seen, keys in zip(backend.numpy(got), want, mask[:, 0], k, strict=True):
        some = len(np.unique(keys[seen], axis=0))
        np.testing.assert_array_equal(x[:some], y[:some])


# --- samples --------------------------------------------------------------------------------------


@pytest.mark.parametrize("law", ["uniform", "norms"])
@pytest.mark.parametrize("count", [1, 3, 7])
def test_keys_are_drawn_as_often_as_said(law, count):
    """Frequencies against the inclusion probabilities; binomial, false alarm 1e-9 for each key."""
    rng = np.random.default_rng(3)
    v = rng.standard_normal((7, 2)) * np.array([[9.0], [0.0], *5 * [[1.0]]])
    draws, seen = 4000, np.zeros(7)
    many = np.broadcast_to(v, (draws, 7, 2))
    indices, log_p = draw_keys(many[:, :1], many, many, num_keys=count, law=law, rng=4)
    np.add.at(seen, indices.ravel(), 1)
    p = np.full(7, np.nan)
    p[indices.ravel()] = np.exp(log_p.ravel())
    share = np.ones(7) if law == "uniform" else 1 / 7 + (v**2).sum(-1) / (v**2).sum()
    assert np.nansum(p) == pytest.approx(count)
    cut = p > 1 - 1e-12
    np.testing.assert_allclose(p[~cut] / share[~cut], (p[~cut] / share[~cut])[:1].max(initial=0))
    for j in range(7):
        assert stats.binomtest(int(seen[j]), draws, min(1.0, p[j])).pvalue > 1e-9
    assert all(len(set(row)) == count for row in indices)  # without replacement


@pytest.mark.parametrize("law", KEY_LAWS)
def test_sums_of_samples_are_unbiased(law):
    """Mean of sum_J e^(q . k) v / p over 4,000 draws; 8 standard errors, 1e-14."""
    rng = np.random.default_rng(7)
    q, k, v = rng.standard_normal((1, 2)), rng.standard_normal((9, 2)), rng.standard_normal((9, 1))
    wide = [np.broadcast_to(x, (4000, *x.shape)) for x in (q, k, v)]
    indices, log_p = draw_keys(*wide, num_keys=3, law=law, rng=8)
    term = (np.exp(q @ k.T / np.sqrt(2))[0] * v[:, 0])[indices]
    found = np.sum(term / np.exp(log_p), axis=-1).ravel()
    want = (np.exp(q @ k.T / np.sqrt(2)) @ v)[0, 0]
    assert abs(found.mean() - want) < 8 * found.std() / np.sqrt(4000)


def test_values_of_any_size():
    rng = np.random.default_rng(12)
    q, k, v = (rng.standard_normal((2, 9, 3)) for _ in range(3))
    want = draw_keys(q, k, v, num_keys=4, law="norms", rng=0)
    for size in (2.0**600, 2.0**-600):
        found = draw_keys(q, k, size * v, num_keys=4, law="norms", rng=0)
        for got, x in zip(found, want, strict=True):
            np.testing.assert_array_equal(got, x)


@pytest.mark.long
def test_the_largest_number_below_one_finds_a_key():
    """In float32 without float64 it is rounded to 1."""
    jax = pytest.importorskip("jax")

    class Last(np.random.Generator):
        def random(self, *args, **kwargs):
            return np.full(args[0], 1 - 2.0**-53)

    rng = Last(np.random.PCG64())
    x = np.arange(6.0, dtype=np.float32)[:, None]
    mask = np.arange(6) < 4
    with jax.enable_x64(False):
        q, seen = jax.numpy.asarray(x), jax.numpy.asarray(mask)
        assert draw_pivots(q, num_keys=1, rng=rng, mask=seen)[0] == 3
        found = draw_keys(q, q, q, num_keys=1, law="softmax", rng=rng, mask=seen)
    assert set(np.ravel(found.indices).tolist()) == {3}


def test_many_places_take_little_memory():
    """Not all pairs of places and keys at once, which are 2^26."""
    x = np.zeros((2**16, 1))
    draw_keys(x[:1], x, x, num_keys=1, rng=0)
    for law in ("uniform", "norms"):
        tracemalloc.start()
        draw_keys(x[:1], x, x, num_keys=2**10, law=law, rng=0)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert most < 32 * 2**20


def test_empty_places_are_not_seen():
    rng = np.random.default_rng(10)
    q, k, v = (rng.standard_normal((6, 3)) for _ in range(3))
    mask = np.array([True, False, False, True, False, False])
    want = softmax_attention(q, k, v, mask=mask)
    for law in ("uniform", "norms"):
        drawn = draw_keys(q, k, v, num_keys=4, law=law, rng=0, mask=mask)
        got = sampled_key_attention(q, k, v, **drawn._asdict(), mask=mask)
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-14)
    drawn = draw_keys(q, k, v, num_keys=4, law="softmax", rng=0, mask=mask)
    assert set(np.unique(drawn.indices)) == {0, 3}
    of_each = np.ones((6, 6), bool)
    of_each[1] = False
    drawn = draw_keys(q, k, v, num_keys=4, law="softmax", rng=0, mask=of_each)
    np.testing.assert_array_equal(np.isinf(drawn.log_probability), ~of_each[:, :4])
    got = sampled_key_attention(q, k, v, **drawn._asdict())
    np.testing.assert_array_equal(got[1], 0)
    assert np.isfinite(got).all()


@pytest.mark.long("dask", "jax")
def test_every_library_chooses_the_same(backend, dtype):
    rng = np.random.default_rng(11)
    q, k, v = (rng.standard_normal((2, 8, 3)).astype(dtype) for _ in range(3))

    def chosen(q, k, v, law):
        drawn = draw_keys(q, k, v, num_keys=3, law=law, rng=1)
        return sampled_key_attention(q, k, v, **drawn._asdict())

    for law in KEY_LAWS:
        want = chosen(*(x.astype(np.float64) for x in (q, k, v)), law)
        got = backend.call(chosen, q, k, v, law)
        np.testing.assert_allclose(got, want, rtol=0, atol=300 * float(np.finfo(dtype).eps))
