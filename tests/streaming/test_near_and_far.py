"""Decoding states of near keys and the rest: any split into steps is the whole sequence."""

import pickle
from dataclasses import fields, replace
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import refattn
from refattn import softmax_attention, streaming
from refattn.arrays.library import array_namespace
from refattn.registry import ESTIMATORS
from refattn.streaming import EvaState, LocalState, SecondOrderState
from tests.conftest import Host

OMEGA = np.random.default_rng(9).standard_normal((40, 3))
WEIGHT = np.random.default_rng(8).standard_normal(5)

# How a state starts, with a window, and what it decodes.
CASES = {
    "mean": (
        lambda w: partial(EvaState.init, window=w, sampled=False),
        lambda w, m: partial(refattn.eva_attention, window=w, sampled=False),
    ),
    "published": (
        lambda w: partial(EvaState.init, window=w, rng=3, log_size=False, scale=0.4),
        lambda w, m: partial(refattn.eva_attention, window=w, rng=3, log_size=False, scale=0.4),
    ),
    "given": (
        lambda w: partial(EvaState.init, window=w, omega=OMEGA),
        lambda w, m: partial(refattn.eva_attention, window=w, omega=OMEGA[: -(-m // w)]),
    ),
    "second": (
        lambda w: partial(SecondOrderState.init, window=w, scale=0.4),
        lambda w, m: partial(refattn.second_order_attention, window=w, scale=0.4),
    ),
    "local": (
        lambda w: partial(
            LocalState.init, window=w - 1, omega=OMEGA[:5], log_weight=WEIGHT, scale=0.4
        ),
        lambda w, m: lambda q, k, v, **kw: local(q, k, v, window=(w - 1, 2), scale=0.4, **kw),
    ),
}
CHUNKED = [name for name in CASES if name != "local"]


def local(q, k, v, *, window, **options):
    """Local features at importance weights, which that function draws itself: by their copies."""
    arranged = refattn.estimators.near_and_far.arranged(
        q, k, v, omega=OMEGA[:5], log_weight=WEIGHT, scale=options["scale"], causal=True,
        coupling="iid",
    )  # fmt: skip
    return arranged.ungroup(
        refattn.estimators.near_and_far.attend_locally(arranged, window, True).done.out
    )


def draw(seed, m, heads=4, groups=2, size=1.0):
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((h, m, d)) for h, d in ((heads, 3), (groups, 3), (groups, 2)))
    return size * q, size * k, v


def grown(state, name, q, k, v):
    return state.update(k, v, q) if name in ("mean", "published") else state.update(k, v)


def started(name, window, q, k, v):
    init = CASES[name][0](window)
    return init(k, v, q=q) if name in ("mean", "published") else init(k, v)


def in_steps(name, window, q, k, v, cuts):
    """Results of tokens from the first cut on, and those of the last token of each step."""
    first = slice(0, cuts[0])
    state = started(name, window, q[:, first, :], k[:, first, :], v[:, first, :])
    blocks, last = [], []
    for start, stop in pairwise(cuts):
        some = slice(start, stop)
        own = q[:, some, :], k[:, some, :], v[:, some, :]
        blocks.append(state.read_causal(*own))
        state = grown(state, name, *own)
        last.append(state.read(q[:, stop - 1 : stop, :]))
    return blocks, last


def test_every_state_of_the_registry_is_here_or_there():
    states = {record.state for record in ESTIMATORS.values()} - {None}
    assert states == {getattr(streaming, x) for x in streaming.__all__ if x.endswith("State")}
    for name in ("eva", "eva-published", "eva-sampled"):
        assert ESTIMATORS[name].state is EvaState
    assert ESTIMATORS["second-order"].state is SecondOrderState
    assert ESTIMATORS["rfa-local"].state is LocalState


@pytest.mark.parametrize("name", CASES)
@given(st.data(), st.integers(0, 2**32), st.integers(1, 30), st.integers(1, 12))
@settings(max_examples=30)
def test_any_steps(name, data, seed, m, window):
    inner = data.draw(st.lists(st.integers(0, m), max_size=8))
    cuts = sorted({*inner, m}) if data.draw(st.booleans()) else list(range(m + 1))
    q, k, v = draw(seed, m)
    want = CASES[name][1](window, m)(q, k, v, causal=True)
    blocks, last = in_steps(name, window, q, k, v, cuts)
    if blocks:
        got = np.concatenate(blocks, -2)
        np.testing.assert_allclose(got, want[:, cuts[0] :], rtol=0, atol=1e-13)
    for stop, row in zip(cuts[1:], last, strict=True):
        np.testing.assert_allclose(row, want[:, stop - 1 : stop], rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [30.0, 1e4])
def test_steps_of_extreme_logits(name, size):
    """Scores of thousands to 1e8: the same keys win, step by step or at once."""
    q, k, v = draw(0, 20, size=size)
    want = CASES[name][1](4, 20)(q, k, v, causal=True)
    for cuts in ([0, *range(1, 21)], [3, 4, 11, 20]):
        blocks, last = in_steps(name, 4, q, k, v, cuts)
        got = np.concatenate(blocks, -2)
        assert np.all(np.isfinite(got))
        # eps times the largest exponent, of which 1e8 leave half the digits.
        atol = 2e-16 * (1 + 30 * size**2)
        np.testing.assert_allclose(got, want[:, cuts[0] :], rtol=0, atol=min(atol, 1e-6))
        np.testing.assert_allclose(last[-1], want[:, -1:], rtol=0, atol=min(atol, 1e-6))


@pytest.mark.parametrize("name", CASES)
def test_a_window_of_all_is_softmax(name):
    q, k, v = draw(1, 9)
    scale = None if name in ("mean", "given") else 0.4
    want = softmax_attention(q, k, v, causal=True, scale=scale)
    for window in (9, 2**63, 10**300):
        blocks, last = in_steps(name, window, q, k, v, [2, 3, 9])
        np.testing.assert_allclose(np.concatenate(blocks, -2), want[:, 2:], rtol=0, atol=1e-14)
        np.testing.assert_allclose(last[-1], want[:, -1:], rtol=0, atol=1e-14)


def test_equal_keys_are_summed_up_without_loss():
    """A closed identity: where the keys of a chunk are the same, so is softmax attention."""
    q, k, v = draw(2, 12)
    k = np.repeat(k[:, ::4], 4, axis=-2)
    want = softmax_attention(q, k, v, causal=True, scale=0.4)
    blocks, _ = in_steps("second", 4, q, k, v, [0, 5, 6, 12])
    np.testing.assert_allclose(np.concatenate(blocks, -2), want, rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", CHUNKED)
@given(st.integers(0, 2**32), st.integers(0, 3), st.integers(0, 9))
@settings(max_examples=20)
def test_merge_after_whole_chunks(name, seed, chunks, more):
    if name == "published":
        pytest.skip("each of two states has noise of its own")
    cut, window = 3 * chunks, 3
    q, k, v = draw(seed, cut + more + 1)
    a, b = slice(0, cut), slice(cut, cut + more)
    first = started(name, window, q[:, a], k[:, a], v[:, a])
    second = started(name, window, q[:, b], k[:, b], v[:, b])
    if name == "given":
        second = EvaState.init(k[:, b], v[:, b], window=window, omega=OMEGA[chunks:])
    merged = first.merge(second)
    whole = started(name, window, q[:, : cut + more], k[:, : cut + more], v[:, : cut + more])
    one = q[:, -1:], k[:, -1:], v[:, -1:]
    got = grown(merged, name, *one).read(one[0])
    want = grown(whole, name, *one).read(one[0])
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-13)


@given(st.integers(0, 2**32), st.integers(0, 9), st.integers(0, 9), st.integers(0, 6))
@settings(max_examples=30)
def test_merge_of_windows(seed, a, b, window):
    q, k, v = draw(seed, a + b)
    both = [
        started("local", window + 1, q[:, i], k[:, i], v[:, i])
        for i in (slice(0, a), slice(a, a + b))
    ]
    whole = started("local", window + 1, q, k, v)
    query = np.random.default_rng(seed).standard_normal((4, 2, 3))
    got, want = both[0].merge(both[1]).read(query), whole.read(query)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", CASES)
def test_size_is_that_of_a_window_and_summaries(name):
    q, k, v = draw(0, 30)
    numbers = {"second": 2 * (1 + 3) * (3 + 2), "local": 0}.get(name, 2 * 3 + 4 * 2)
    if name == "given":
        numbers = 2 * 3 + 2 * 2

    def size(m):
        state = started(name, 4, q[:, :m], k[:, :m], v[:, :m])
        if name == "local":
            assert state.near.k.shape[-2] <= 4
            return int(state.near.k.size + state.near.v.size + sum(map(np.size, state.far.samples)))
        held = [getattr(state, x.name) for x in fields(state) if x.name != "omega"]
        return sum(x.size for x in held if isinstance(x, np.ndarray))

    for m in range(4, 26):
        assert size(m + 4) - size(m) == numbers


@pytest.mark.parametrize("name", CASES)
def test_steps_leave_a_state_as_it_is(name):
    """Two steps from one state are the same, noise too; nothing follows arrays of the caller."""
    q, k, v = draw(0, 16)
    first, rest = slice(0, 5), slice(5, 16)
    state = started(name, 4, q[:, first], k[:, first], v[:, first])
    before = state.read(q[:, 4:5])
    own = [x[:, rest].copy() for x in (q, k, v)]
    blocks = [state.read_causal(*own) for _ in range(2)]
    states = [grown(state, name, *own) for _ in range(2)]
    reads = [x.read(q[:, -1:]) for x in states]
    np.testing.assert_array_equal(*blocks)
    np.testing.assert_array_equal(*reads)
    for x in (q, k, v, *own):
        x[...] = 7.0
    query = draw(0, 16)[0]
    np.testing.assert_array_equal(state.read(query[:, 4:5]), before)
    np.testing.assert_array_equal(states[0].read(query[:, -1:]), reads[0])
    copied = pickle.loads(pickle.dumps(states[0]))
    np.testing.assert_array_equal(copied.read(query[:, -1:]), reads[0])


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
    of = partial(EvaState.init, window=4, sampled=False)
    merged = of(k[:, a], v[:, a], q=q[:, 3:4]).merge(of(k[:, b], v[:, b], q=q[:, b]))
    got = merged.update(k[:, 10:], v[:, 10:], q[:, 10:]).read(q[:, 10:])
    want = refattn.eva_attention(q[:, 3:], k, v, window=4, sampled=False, causal=True)
    np.testing.assert_allclose(got, want[:, -1:], rtol=0, atol=1e-14)


def test_one_frequency_beside_a_window():
    q, k, v = draw(5, 9)
    want = refattn.local_random_feature_attention(
        q, k, v, window=(2, 0), omega=OMEGA[:1], causal=True
    )
    state = LocalState.init(k[:, :5], v[:, :5], window=2, omega=OMEGA[:1])
    got = state.read_causal(q[:, 5:], k[:, 5:], v[:, 5:])
    np.testing.assert_allclose(got, want[:, 5:], rtol=0, atol=1e-14)
    for t in range(5, 9):
        state = state.update(k[:, t : t + 1], v[:, t : t + 1])
        got = state.read(q[:, t : t + 1])
        np.testing.assert_allclose(got, want[:, t : t + 1], rtol=0, atol=1e-14)


def test_a_summary_too_late_is_noticed(monkeypatch):
    """A defect: the frequency of a chunk forgets the queries of earlier steps."""

    def forget(self, q, k):
        return of_queries(replace(self, total_query=0 * self.total_query, num_queries=0), q, k)

    of_queries = EvaState._of_queries
    monkeypatch.setattr(EvaState, "_of_queries", forget)
    q, k, v = draw(0, 12)
    want = refattn.eva_attention(q, k, v, window=4, sampled=False, causal=True)
    _, last = in_steps("mean", 4, q, k, v, list(range(13)))
    assert np.abs(last[-1] - want[:, -1:]).max() > 1e-3


def test_a_chunk_that_is_counted_twice_is_noticed(monkeypatch):
    """A defect: the summaries of the past are read twice."""
    far = SecondOrderState._far

    def twice(self, *args):
        found = far(self, *args)
        return found._replace(lse=found.lse + np.log(2))

    monkeypatch.setattr(SecondOrderState, "_far", twice)
    q, k, v = draw(0, 8)
    want = refattn.second_order_attention(q, k, v, window=4, causal=True, scale=0.4)
    blocks, _ = in_steps("second", 4, q, k, v, [0, 5, 8])
    assert np.abs(np.concatenate(blocks, -2) - want).max() > 1e-3


# --- libraries, what is empty, what is refused ----------------------------------------------------


@pytest.mark.long("jax", "dask")
@pytest.mark.parametrize("name", CASES)
def test_steps_on_backends(backend, dtype, name):
    q, k, v = (x.astype(dtype) for x in draw(0, 11))
    wide = [x.astype(np.float64) for x in (q, k, v)]
    want = CASES[name][1](4, 11)(*wide, causal=True)[:, 2:]

    def decode(q, k, v):
        blocks, last = in_steps(name, 4, q, k, v, [2, 3, 9, 11])
        return array_namespace(q).concat([*blocks, last[-1]], axis=-2)

    got = backend.call(decode, q, k, v)
    atol = 300 * float(np.finfo(dtype).eps)
    np.testing.assert_allclose(got[:, :-1], want, rtol=0, atol=atol)
    np.testing.assert_allclose(got[:, -1:], want[:, -1:], rtol=0, atol=atol)


def test_frequencies_on_a_backend(backend):
    q, k, v = draw(0, 7)

    def decode(q, k, v, omega):
        state = EvaState.init(k[:, :3, :], v[:, :3, :], window=2, omega=omega)
        return state.update(k[:, 3:, :], v[:, 3:, :]).read(q[:, 6:, :])

    want = refattn.eva_attention(q, k, v, window=2, omega=OMEGA[:4], causal=True)[:, 6:]
    for omega in (OMEGA[:4], Host(OMEGA[:4])):
        got = backend.call(decode, q, k, v, omega)
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", CASES)
def test_states_of_empty_axes(name):
    for heads in (0, 3):
        for m in (0, 2):
            for d_v in (0, 2):
                q, k, v = (np.ones((heads, m, d)) for d in (3, 3, d_v))
                state = started(name, 4, q, k, v)
                state = state.merge(started(name, 4, q[:, :0], k[:, :0], v[:, :0]))
                state = grown(state, name, q, k, v)
                for n in (0, 1):
                    out = state.read(np.ones((heads, n, 3)))
                    np.testing.assert_allclose(out, np.full((heads, n, d_v), float(m > 0)))
                assert state.read_causal(q[:, :0], k, v).shape == (heads, 0, d_v)


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda x: EvaState.init(x, x, window=2), ValueError, "`q` must be given"),
        (lambda x: EvaState.init(x, x, window=0, q=x), ValueError, "`window` must be a posit"),
        (lambda x: EvaState.init(x, x, window=2, q=x, sampled=1), TypeError, "`sampled`"),
        (
            lambda x: EvaState.init(x, x, window=2, omega=OMEGA[:2]),
            ValueError,
            "`omega` must have a frequency for each chunk, got 2 for 3 chunks",
        ),
        (
            lambda x: EvaState.init(x[:4], x[:4], window=2, omega=OMEGA[:2]).update(x, x),
            ValueError,
            "`omega` must have a frequency for each chunk, got 2 for 5 chunks",
        ),
        (
            lambda x: EvaState.init(x[:2], x[:2], window=2, q=x),
            ValueError,
            "`q` must have no more rows than `k`, .* got 5 and 2",
        ),
        (
            lambda x: EvaState.init(x, x, window=2, q=x).read(x[None]),
            ValueError,
            "`q` must have the leading axes of the first queries",
        ),
        (
            lambda x: EvaState.init(x, x, window=2, q=x).merge(EvaState.init(x, x, window=2, q=x)),
            ValueError,
            "`other` must come after whole chunks, of 2 keys each, got one after 1 keys",
        ),
        (
            lambda x: EvaState.init(x, x, window=5, q=x).merge(
                EvaState.init(x, x, window=5, omega=OMEGA)
            ),
            ValueError,
            "`other` must have frequencies that are given or drawn",
        ),
        (
            lambda x: SecondOrderState.init(x, x, window=2).merge(
                SecondOrderState.init(x, x, window=3)
            ),
            ValueError,
            "`other` must have the `window` of this state",
        ),
        (
            lambda x: SecondOrderState.init(x, x, window=2).read_causal(x, x[:2], x[:2]),
            ValueError,
            "`q` must have no more rows than `k`",
        ),
        (lambda x: SecondOrderState.init(x, x, window=2).update(x, x[:, :2]), ValueError, "`v`"),
        (lambda x: SecondOrderState.init(x, x, window=2).merge(3), TypeError, "`other` must be a"),
        (
            lambda x: SecondOrderState.init(x, x, window=2).read(x.astype("f4")),
            TypeError,
            "dtype of `q`, float32",
        ),
        (lambda x: LocalState.init(x, x, window=-1, omega=OMEGA), ValueError, "`window`"),
        (
            lambda x: LocalState.init(x, x, window=1, omega=OMEGA).merge(
                LocalState.init(x, x, window=2, omega=OMEGA)
            ),
            ValueError,
            "`other` must have the `window` of this state",
        ),
        (
            lambda x: LocalState.init(x, x, window=1, omega=OMEGA).merge(
                LocalState.init(x, x, window=1, omega=OMEGA + 1)
            ),
            ValueError,
            "`other` must have the `omega` of this state",
        ),
        (
            lambda x: LocalState.init(x, x, window=1, omega=OMEGA).read(x.astype("f4")),
            TypeError,
            "dtype",
        ),
    ],
)
def test_what_is_refused(call, error, said):
    with pytest.raises(error, match=said):
        call(np.ones((5, 3)))
