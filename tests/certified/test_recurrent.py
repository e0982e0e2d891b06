"""The recurrence in pairs: against 60 digits, how small bounds are, and where nothing is proven."""

import numpy as np
import pytest

from refattn import certified, recurrent_attention
from refattn.certified import recurrent
from refattn.judge.conformance.truth import digits
from refattn.numbers.pairs import to_pairs
from tests.certified.test_certified import DPS, least_ratio, number
from tests.estimators.test_recurrent import LAYERS, as_recurrence, inputs

N, D, D_V = 12, 4, 3


def problem(layer):
    """One head of a layer, as the recurrence takes it."""
    (q, k, v), gates = inputs(layer, N, heads=(1, 1), d=D, d_v=D_V)
    return (q, k, v), as_recurrence(layer, k, gates) | {"initial_state": np.ones((1, D, D_V))}


def holds(got, want):
    return all(
        least_ratio(x.error, abs(number(x.value) - y)) >= 1 for x, y in zip(got, want, strict=True)
    )


@pytest.mark.parametrize("read", ["after", "before"])
@pytest.mark.parametrize("layer", LAYERS)
def test_against_60_digits(layer, read):
    r"""Within the bound, and not if a key moves by its rounding.

    Where norms are at most 1, of a state with columns of 1-norm s, and |k|, |b| <= 1, |a| <= 2, n
    tokens add at most n (2^-69 s + (d + 10) 2^-103 (s + 2 sqrt(d) s + sqrt(d) |w v|)).
    """
    (q, k, v), options = problem(layer)
    formula = digits.formulas(DPS).recurrent_attention
    got = certified.recurrent_attention(q, k, v, **options, read=read)
    assert holds(got, formula(q, k, v, **options, read=read))
    moved = k * (1 + 2.0**-52 * (np.arange(N) == N - 2)[:, None])
    assert not holds(got, formula(q, moved, v, **options, read=read))
    ones = [np.broadcast_to(x, q.shape) for x in np.eye(D)]  # queries that read rows of all states
    rows = [recurrent_attention(x, k, v, **options, scale=1.0).out for x in ones]
    s, written = max(D, np.abs(rows).sum(0).max()), 2 * np.abs(v).max()
    roundings = (D + 10) * 2.0**-103 * ((1 + 2 * D**0.5) * s + D**0.5 * written)
    most = N * ((2.0**-69 * s if "log_decay" in options else 0) + roundings)
    assert got.state.error.max() <= 1.001 * most
    assert (got.out.error <= np.abs(q / 2).sum(-1)[..., None] * (1.001 * most + roundings)).all()


def test_errors_are_multiplied_by_the_norm():
    """Of the token's matrix, also where the removal amplifies, to the roundings of the norm."""
    (_, k, v), options = problem("kimi_delta_attention")
    g, (_, b), row = options["log_decay"], options["removal"], slice(1)
    state = to_pairs(np.ones((1, D, D_V)), np.full((1, D, D_V), 1e-3))
    for size in (-3.0, -1.0, 0.0, 1.0):
        norm = np.linalg.norm(np.diag(np.exp(g[0, 0])) + size * np.outer(k[0, 0], b[0, 0]), 2)
        x = (to_pairs(y[:, row]) for y in (k, v, g, size * k, b, np.ones((1, N, 1))))
        after = recurrent._change(recurrent._Tokens(*x), state, np).e
        np.testing.assert_allclose(after, 1e-3 * norm, rtol=1e-8)
        assert (after >= 1e-3 * norm).all()
    read = recurrent._read_row(to_pairs(k[:, row]), state, np)
    assert (read.e >= 1e-3 * np.abs(k[0, 0]).sum()).all()


@pytest.mark.parametrize(
    ("name", "bad"), [("k", np.nan), ("log_decay", 1.5), ("v", np.nan), ("v", 1e305)]
)
def test_what_is_not_finite_is_not_certified(name, bad):
    """From the token on, and with values in their column alone."""
    (q, k, v), options = problem("rwkv7")
    given = {"q": q, "k": k, "v": v, **options}
    whole = certified.recurrent_attention(**given)
    given[name] = given[name].copy()
    given[name][0, 7, 1] = bad
    got, wanted = certified.recurrent_attention(**given), recurrent_attention(**given)
    spoilt = (np.arange(N) >= 7)[None, :, None] & ((np.arange(D_V) == 1) | (name != "v"))
    np.testing.assert_array_equal(np.isinf(got.out.error), spoilt)
    np.testing.assert_array_equal(np.isinf(got.state.error[:, :1]), spoilt[:, -1:])
    np.testing.assert_array_equal(got.out.value.hi[spoilt], wanted.out[spoilt])
    np.testing.assert_array_equal(got.out.value.lo[~spoilt], whole.out.value.lo[~spoilt])


@pytest.mark.parametrize(
    ("library", "heads"),
    [("numpy", (1, 3)), ("numpy", (4, 1)), ("array_api_strict", (4, 2)), ("torch", (4, 2))],
)
def test_heads_in_groups_on_every_library(library, heads):
    xp = pytest.importorskip(library)
    arrays, gates = inputs("rwkv7", 5, np.float32, heads=heads)
    q, k, v, g, a, b = (xp.asarray(x) for x in (*arrays, *gates.values()))
    got = certified.recurrent_attention(q, k, v, log_decay=g, removal=(a, b))
    wide = [x.astype(np.float64) for x in (*arrays, *gates.values())]
    want = recurrent_attention(*wide[:3], log_decay=wide[3], removal=tuple(wide[4:]))
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(x.value.hi), y, rtol=1e-13, atol=1e-14)
        assert (np.asarray(x.error) < 2.0**-60).all()
