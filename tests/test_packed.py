"""Packed sequences and paged keys: attention of each sequence by itself."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.linalg import block_diag

import refattn
from refattn import naive, packed
from refattn.attention import Attended
from tests.problems import draw

D, D_V = 3, 2
SIDE = st.none() | st.integers(0, 6)
SIZES = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=4)


def offsets(sizes):
    return [0, *np.cumsum(sizes).tolist()]


def ends(sizes):
    """Offsets of sequences of (n, m) tokens."""
    n, m = zip(*sizes, strict=True)
    return {"q_offsets": offsets(n), "k_offsets": offsets(m)}


def tensors(rng, sizes, heads=4, groups=2):
    """Packed q, k and v of sequences of (n, m) tokens."""
    n, m = np.sum(sizes, axis=0, dtype=int).tolist()
    return draw(rng, n, heads, D), draw(rng, m, groups, D), draw(rng, m, groups, D_V)


def heads_first(x):
    return np.ascontiguousarray(np.swapaxes(x, 0, 1))


def block_diagonal(sizes, **options):
    """Which packed query sees which packed key, of its own sequence, whose ends are level."""
    own = [naive.visible(np.ones((n, 1)), np.ones((m, 1)), **options) for n, m in sizes]
    own = [np.ones(size, bool) if x is None else x for size, x in zip(sizes, own, strict=True)]
    return block_diag(*own).astype(bool)


def close(got, want):
    """One array, or out and lse."""
    for x, y in zip(got, want, strict=True) if isinstance(want, tuple) else [(got, want)]:
        assert x.shape == y.shape
        assert x.dtype == y.dtype
        np.testing.assert_allclose(x, y, rtol=0, atol=64 * np.finfo(x.dtype).eps)


@st.composite
def problems(draws):
    """Sequences, some of them empty, and options."""
    sizes, heads = draws(SIZES), draws(st.sampled_from([(1, 1), (3, 3), (4, 2), (3, 1)]))
    rng = np.random.default_rng(draws(st.integers(0, 99)))
    options = {
        "causal": draws(st.booleans()),
        "window": draws(st.none() | st.tuples(SIDE, SIDE)),
        "softcap": draws(st.none() | st.just(0.8)),
        "sinks": draws(st.none() | st.just(draw(rng, heads[0]))),
    }
    return sizes, tensors(rng, sizes, *heads), options


def dense(sizes, arrays, *, causal, window, **options):
    """The formula of one problem with a block-diagonal mask, in the layout of packed results."""
    options["mask"] = block_diagonal(sizes, causal=causal, window=window)
    q, k, v = map(heads_first, arrays)
    out = naive.softmax_attention(q, k, v, scale=1.0, **options)
    return Attended(heads_first(out), refattn.attend(q, k, v, **options).lse)


@given(problems())
def test_packed_sequences_are_one_problem_with_a_block_diagonal_mask(problem):
    sizes, arrays, options = problem
    got = packed.varlen(refattn.attend, *arrays, **ends(sizes), **options)
    want = dense(sizes, arrays, **options)
    assert isinstance(got, Attended)
    close(got, want)


def paginate(rng, lengths, size, *arrays):
    """Packed tokens in pages of any order, and their table; all that is not used is poison."""
    needed = [-(-m // size) for m in lengths]
    order = rng.permutation(sum(needed) + 2)
    table = rng.choice([-1, 10**6, 0], (len(lengths), max(needed) + 1))
    pages = [np.full((len(order), size, *x.shape[1:]), np.nan) for x in arrays]
    for s, (start, first) in enumerate(zip(offsets(lengths), offsets(needed)[:-1], strict=False)):
        table[s, : needed[s]] = order[first : first + needed[s]]
        for held, x in zip(pages, arrays, strict=True):
            for j in range(lengths[s]):
                held[table[s, j // size], j % size] = x[start + j]
    return pages, table


@given(problems(), st.integers(1, 4), st.integers(0, 99))
def test_paged_keys_are_contiguous_keys(problem, size, seed):
    """Whatever the rest of the pages, and of the table, holds."""
    sizes, (q, k, v), options = problem
    rng, lengths = np.random.default_rng(seed), [m for _, m in sizes]
    pages, table = paginate(rng, lengths, size, k, v)
    q = draw(rng, len(sizes), 3, q.shape[1], D)
    got = packed.paged(refattn.attend, q, *pages, block_table=table, lengths=lengths, **options)
    want = dense([(3, m) for m in lengths], (np.concatenate(q), k, v), **options)
    assert isinstance(got, Attended)
    lse = np.stack(np.split(want.lse, len(sizes), axis=1))
    close(got, Attended(want.out.reshape(got.out.shape), lse))


def test_sequences_share_pages():
    """A common beginning is held once."""
    rng = np.random.default_rng(0)
    q, k, v = draw(rng, 2, 1, 4, D), draw(rng, 3, 2, 2, D), draw(rng, 3, 2, 2, D_V)
    got = packed.paged(refattn.attend, q, k, v, block_table=[[0, 1], [0, 2]], lengths=[4, 3])
    for s, rows in enumerate(([0, 1], [0, 2])):
        own = (heads_first(np.concatenate(x[rows])[: 4 - s]) for x in (k, v))
        want = refattn.attend(heads_first(q[s]), *own)
        close((got.out[s], got.lse[s]), (heads_first(want.out), want.lse))


OMEGA = np.random.default_rng(1).standard_normal((5, D))


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (refattn.softmax_attention, {"causal": True}),
        (refattn.random_feature_attention, {"omega": OMEGA, "causal": True}),
        (refattn.random_feature_attention, {"num_features": 4, "rng": 3}),
        (refattn.randomized_attention, {"num_samples": 4, "rng": 3}),
        (refattn.linear_attention, {"causal": True}),
        (refattn.linear_randomized_attention, {"num_proposals": 2, "rng": 3}),
        (naive.softmax_attention, {"softcap": 0.8}),
        (lambda q, k, v: (v[:, :1] + q[..., :1], q[..., 1] + k.shape[1]), {}),
    ],
)
def test_any_function_is_called_once_for_each_sequence(function, options):
    sizes = [(4, 5), (3, 2), (2, 4)]
    rng = np.random.default_rng(0)
    q, k, v = tensors(rng, sizes, 2, 2)
    at = ends(sizes)
    want = []
    for s in range(3):
        i, j = (slice(*at[x][s : s + 2]) for x in at)
        found = function(*map(heads_first, (q[i], k[j], v[j])), **options)
        want.append(found if isinstance(found, tuple) else (found,))
    got = packed.varlen(function, q, k, v, **at, **options)
    assert isinstance(got, tuple) == (len(want[0]) == 2)
    out, *lse = got if isinstance(got, tuple) else (got,)
    close(out, np.concatenate([heads_first(x[0]) for x in want]))
    if lse:
        close(lse[0], np.concatenate([x[1] for x in want], axis=1))
    if isinstance(options.get("rng"), int):
        return
    pages, table = paginate(rng, [5, 2, 4], 3, k, v)
    q = np.stack([q[x : x + 2] for x in at["q_offsets"][:-1]])
    paged = packed.paged(function, q, *pages, block_table=table, lengths=[5, 2, 4], **options)
    at = {"q_offsets": [0, 2, 4, 6], "k_offsets": [0, 5, 7, 11]}
    same = packed.varlen(function, np.concatenate(q), k, v, **at, **options)
    if lse:
        close(paged.lse, np.stack(np.split(same.lse, 3, axis=1)))
        paged, same = paged.out, same.out
    close(np.concatenate(paged), same)


def test_an_integer_seeds_every_sequence_and_a_generator_goes_on():
    q = np.tile(draw(np.random.default_rng(0), 3, 1, D), (2, 1, 1))
    at = ends([(3, 3), (3, 3)])
    call = partial(packed.varlen, refattn.random_feature_attention, q, q, q, **at, num_features=4)
    first, second = np.split(call(rng=3), 2)
    np.testing.assert_array_equal(first, second)
    first, second = np.split(call(rng=np.random.default_rng(3)), 2)
    assert not np.any(first == second)


@pytest.mark.long("jax", "dask")
def test_every_library_agrees_with_numpy(backend, dtype):
    sizes = [(2, 3), (0, 2), (1, 0), (2, 4)]
    rng, lengths = np.random.default_rng(0), [m for _, m in sizes]
    q, k, v = (x.astype(dtype) for x in tensors(rng, sizes))
    options = {"causal": True, "sinks": draw(rng, 4, dtype=dtype)}
    want = packed.varlen(refattn.attend, q, k, v, **ends(sizes), **options)
    got = backend.call(packed.varlen, refattn.attend, q, k, v, **ends(sizes), **options)
    close(got, want)
    got = backend.call(
        packed.varlen, refattn.softmax_attention, q, k, v, **ends(sizes), scale=1.0, **options
    )
    close(got, want.out)

    pages, table = paginate(rng, lengths, 2, k, v)
    q, *pages = draw(rng, 4, 2, 4, D, dtype=dtype), *(x.astype(dtype) for x in pages)
    more = {"block_table": table.tolist(), "lengths": lengths, **options}
    want = packed.paged(refattn.attend, q, *pages, **more)
    assert np.all(np.isfinite(want.out))
    got = backend.call(packed.paged, refattn.attend, q, *pages, **more)
    close(got, want)


@pytest.mark.long("jax", "dask")
@pytest.mark.parametrize("convert", [tuple, np.int32, np.uint64, "array"])
def test_offsets_and_tables_may_be_of_any_kind(backend, convert):
    def kind(x):
        if convert == "array":
            return backend.array(np.asarray(x))
        return tuple(x) if convert is tuple else np.asarray(x, convert)

    def first(q, k, v):
        return q + k[:, :1, :] * v[:, -1:, :1]

    q, k, v = map(backend.array, tensors(np.random.default_rng(0), [(2, 3), (1, 2)], 2, 2))
    at = {"q_offsets": [0, 2, 3], "k_offsets": [0, 3, 5]}
    pages = [x[:4, None, ...] for x in (k, v)]
    more = {"block_table": [[3, 0], [1, 1]], "lengths": [2, 1]}
    for call, options in (
        (partial(packed.varlen, first, q, k, v), at),
        (partial(packed.paged, first, q[:2, None, ...], *pages), more),
    ):
        got, want = (call(**{x: to(y) for x, y in options.items()}) for to in (kind, list))
        np.testing.assert_array_equal(backend.numpy(got), backend.numpy(want))


@given(problems(), st.integers(0, 99))
def test_gradients_of_sequences_are_those_of_the_dense_problem(problem, seed):
    sizes, arrays, options = problem
    rng, pullbacks = np.random.default_rng(seed), []

    def forward(*args, **options):
        out, pullback = refattn.vjp(refattn.attend, *args, **options)
        pullbacks.append(pullback)
        return out

    out = packed.varlen(forward, *arrays, **ends(sizes), **options)
    d_out, d_lse = draw(rng, *out.out.shape), draw(rng, *out.lse.shape)
    at = ends(sizes)["q_offsets"]
    found = [
        pullback((heads_first(d_out[i:j]), d_lse[:, i:j]))
        for pullback, i, j in zip(pullbacks, at, at[1:], strict=False)
    ]

    mask = block_diagonal(sizes, causal=options.pop("causal"), window=options.pop("window"))
    q, k, v = map(heads_first, arrays)
    _, pullback = refattn.vjp(refattn.attend, q, k, v, mask=mask, **options)
    want = pullback((heads_first(d_out), d_lse))
    for name in ("q", "k", "v"):
        parts = [getattr(x, name) for x in found]
        np.testing.assert_allclose(
            np.concatenate(parts, axis=1), getattr(want, name), rtol=0, atol=1e-12
        )
    if options["sinks"] is not None:
        total = sum(x.sinks for x in found)
        np.testing.assert_allclose(total, want.sinks, rtol=0, atol=1e-12)


def test_other_dtypes_are_for_the_function_to_judge():
    x = np.ones((2, 1, 1), np.float16)
    got = packed.varlen(lambda q, k, v: q + v, x, x, x, q_offsets=[0, 2], k_offsets=[0, 2])
    assert got.dtype == np.float16
