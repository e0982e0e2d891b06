"""Equal keys: their errors may be one, or some of them, and the law allows for each."""

import numpy as np
import pytest

from refattn.judge.rounding import PROFILES, covariance, softmax
from refattn.judge.rounding.covariance import bound_covariance
from refattn.judge.rounding.head import scan_tile
from refattn.judge.rounding.problems import pose_arrays
from refattn.judge.rounding.roundings import WORST
from refattn.judge.rounding.ties import find_ties
from refattn.judge.rounding.weight_errors import relative_variance
from tests.judge.rounding.rounded import BF16

ROWS = slice(0, 6)


def posed(same_values, **options):
    """40 keys, of which 12 are one and 9 another."""
    rng = np.random.default_rng(2)
    q, k, v = (BF16(rng.standard_normal((x, 8))) for x in (6, 40, 40))
    for group in (np.arange(5, 17), np.arange(3, 30, 3) + 10):
        k[group] = k[group[-1]]
        if same_values:
            v[group] = v[group[-1]]
    return pose_arrays(q, k, v, **options)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (7, 3)}])
@pytest.mark.parametrize("same_values", [False, True])
def test_keys_that_are_equal_are_counted_among_those_that_are_seen(same_values, options):
    head = posed(same_values, **options).head(())
    k, v = head.k, head.v
    equal = (k[:, None] == k).all(-1)
    terms = equal & (v[:, None] == v).all(-1)
    seen = head.visible(ROWS, slice(0, 40))
    seen = np.ones((6, 40), bool) if seen is None else seen
    found = find_ties(head, ROWS)
    for counts, alike in ((found.weights, equal), (found.terms, terms)):
        expected = (seen[:, None, :] & alike).sum(-1)
        where = seen if counts.shape == seen.shape else seen[:1]
        np.testing.assert_array_equal(counts[where], expected[: len(where)][where])
    assert found.new.sum() == len(np.unique(k, axis=0))
    np.testing.assert_array_equal(k[found.new][:, 0], list(dict.fromkeys(k[:, 0].tolist())))


def test_keys_that_differ_are_no_ties_nor_are_those_that_no_query_sees_together():
    rng = np.random.default_rng(3)
    q, k = rng.standard_normal((2, 8, 4))
    assert find_ties(pose_arrays(q, k, k).head(()), slice(0, 8)) is None
    k[6] = k[1]
    mask = np.ones((8, 8), bool)
    mask[:4, 1] = mask[4:, 6] = False
    assert find_ties(pose_arrays(q, k, k).head(()), slice(0, 8)).most == 2
    assert find_ties(pose_arrays(q, k, k, mask=mask).head(()), slice(0, 8)) is None


def test_keys_with_equal_marks_are_told_apart():
    """Two keys may have one mark, a sum of products with cosines, though they differ."""
    k = np.zeros((5, 2))
    k[1:3, 0], k[3:, 0] = 1.0, 1e20
    k[4, 1] = 1.0
    found = find_ties(pose_arrays(np.ones((1, 2)), k, k).head(()), slice(0, 1))
    np.testing.assert_array_equal(found.weights, [[1, 2, 2, 1, 1]])


def test_a_sink_is_no_key_of_zeros():
    q, k = np.ones((2, 4)), np.zeros((3, 4))
    found = find_ties(pose_arrays(q, k, k, sinks=np.zeros(())).head(()), slice(0, 2))
    np.testing.assert_array_equal(found.weights, [[3, 3, 3, 1]])


@pytest.mark.parametrize(
    ("name", "same_values"),
    [("flash", False), ("flash", True), ("upcast", False), ("upcast", True), ("math", True)],
)
def test_the_covariance_holds_for_all_parts_of_equal_keys(name, same_values, monkeypatch):
    """Errors of keys in one part are one error, for any parts: that of all keys, too."""
    problem, rng = posed(same_values), np.random.default_rng(4)
    roundings = PROFILES[name]._replace(out=None).roundings("bfloat16")
    head = problem.head(())

    def law():
        rows = problem.analyse((), roundings, ROWS)
        return rows, bound_covariance(head, roundings, ROWS, rows)

    rows, found = law()
    monkeypatch.setattr(softmax, "find_ties", lambda head, i: None)
    monkeypatch.setattr(covariance, "find_ties", lambda head, i: None)
    apart = law()
    tile = scan_tile(head, ROWS, slice(0, 40))
    gap = tile.scores - rows.top[:, None]
    p = np.exp(tile.scores - rows.lse[:, None])
    # Weights are rounded in units of the storage type; or scores and exponentials in float32 are.
    noise = relative_variance(head, roundings, tile, ROWS, gap) * WORST**2
    unit = {"flash": 2.0**-8 / 3**0.5, "upcast": 2.0**-9 / 3**0.5}.get(name, np.sqrt(noise))
    x_of_keys = p * (p < p.max(-1, keepdims=True)) * unit
    of_key = np.unique(head.k, axis=0, return_inverse=True)[1].ravel()
    broken = 0
    for parts in (1, 2, 3, 40):
        cell = of_key * parts + rng.integers(0, parts, len(of_key))
        for row, (size, out) in enumerate(zip(x_of_keys, rows.out, strict=True)):
            x = size[:, None] * (head.v - (out if name == "math" else 0))
            sums = np.zeros((cell.max() + 1, 8))
            np.add.at(sums, cell, x)
            drawn = sums.T @ sums
            least = np.linalg.eigvalsh(found[row] - drawn)[0]
            assert least > -1e-6 * np.max(drawn)
            assert np.all(np.square(rows.worst[row]) > np.diag(drawn) * (1 - 1e-6))
            broken += np.linalg.eigvalsh(apart[1][row] - drawn)[0] < -1e-3 * np.max(drawn)
    assert broken > 3  # the law of keys that differ does not hold
