"""Decoding states: any split of a sequence into steps gives what the whole gives."""

import pickle
from dataclasses import fields, replace
from functools import partial
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import refattn
from refattn import features, streaming
from refattn.arrays.library import array_namespace, as_written
from refattn.registry import ESTIMATORS
from refattn.streaming import EvaState, LinearState, PositiveState
from tests.streaming import cases
from tests.streaming.cases import CASES, CHUNKED, OMEGA, PLAIN, WEIGHT, WEIGHTED, draw, in_steps

every_state = pytest.mark.parametrize("name", CASES)
plain_states = pytest.mark.parametrize("name", PLAIN)
seeds = st.integers(0, 2**32)


def test_every_state_of_the_registry_is_here():
    states = {record.state for record in ESTIMATORS.values()} - {None}
    assert states == {getattr(streaming, x) for x in streaming.__all__ if x.endswith("State")}
    assert states == {type(case.start(3, *draw(0, 2))) for case in CASES.values()}
    for name in ("eva", "eva-published", "eva-sampled"):
        assert ESTIMATORS[name].state is EvaState
    assert ESTIMATORS["second-order"].state is streaming.SecondOrderState
    assert ESTIMATORS["rfa-local"].state is streaming.LocalState


@pytest.mark.sweep(2)
@pytest.mark.long("mean", "local", "local of one")
@pytest.mark.parametrize("most", [9, pytest.param(30, marks=pytest.mark.long)])
@every_state
@given(st.data(), seeds, st.integers(1, 12))
def test_any_steps_give_what_the_whole_gives(name, most, data, seed, window):
    """With heads that share keys."""
    m = data.draw(st.integers(1, most))
    inner = data.draw(st.lists(st.integers(0, m), max_size=8))
    cuts = sorted({*inner, m}) if data.draw(st.booleans()) else list(range(m + 1))
    q, k, v = draw(seed, m)
    want = CASES[name].whole(window, m)(q, k, v, causal=True)
    blocks, last = in_steps(name, window, q, k, v, cuts)
    if blocks:
        got = np.concatenate(blocks, -2)
        np.testing.assert_allclose(got, want[:, cuts[0] :], rtol=0, atol=1e-13)
    for stop, row in zip(cuts[1:], last, strict=True):
        np.testing.assert_allclose(row, want[:, stop - 1 : stop], rtol=0, atol=1e-13)


@given(st.integers(0, 9), st.integers(1, 70), st.integers(0, 5), seeds)
def test_a_prompt_gives_the_causal_attention_of_its_last_queries(prefix, n, more, seed):
    """Queries of new tokens, or of the last of them."""
    case = CASES["positive"]
    q, k, v = draw(seed, prefix + n + more)
    state = case.start(None, q, k[:, :prefix], v[:, :prefix])
    got = state.read_causal(q[:, -n:], k[:, prefix:], v[:, prefix:])
    want = case.whole(None, None)(q[:, -n:], k, v, causal=True)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-11)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", [x for x in CASES if x != "published"])  # noise of each state
@given(seeds, st.integers(0, 9), st.integers(0, 9), st.integers(1, 7))
def test_merged_states_are_the_whole(name, seed, first, more, window):
    """Those of chunks after whole ones."""
    case = CASES[name]
    cut = window * (first // 3) if name in CHUNKED else first
    q, k, v = draw(seed, cut + more + 1)
    one, whole = slice(cut + more, None), slice(0, cut + more)

    def started(some):
        return case.start(window, q[:, some], k[:, some], v[:, some])

    a, b = started(slice(0, cut)), started(slice(cut, cut + more))
    if name == "given":
        rest = slice(cut, cut + more)
        b = EvaState.init(k[:, rest], v[:, rest], window=window, omega=OMEGA[first // 3 :])
    want = case.step(started(whole), q[:, one], k[:, one], v[:, one]).read(q[:, one])
    got = case.step(a.merge(b), q[:, one], k[:, one], v[:, one]).read(q[:, one])
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-13)
    if name in PLAIN:
        want = case.whole(None, None)(q, k[:, whole], v[:, whole])
        for merged in (a.merge(b), b.merge(a)):
            np.testing.assert_allclose(merged.read(q), want, rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", [x for x in CASES if x != "softmax"])
def test_states_grow_by_their_summaries_only(name):
    """A chunk of 4 adds the sums of its summary; local and plain features have one state."""
    q, k, v = draw(0, 30)
    more = {"second": 2 * (1 + 3) * (3 + 2), "given": 2 * 3 + 2 * 2}
    more |= dict.fromkeys(("mean", "published"), 2 * 3 + 4 * 2)

    def size(m):
        state = CASES[name].start(4, q[:, :m], k[:, :m], v[:, :m])
        if name.startswith("local"):
            assert state.near.k.shape[-2] <= 4
            return int(state.near.k.size + state.near.v.size + sum(map(np.size, state.far.samples)))
        if name in PLAIN:
            kept = {"positive": "samples", "recurrent": "state"}.get(name, "sums")
            return sum(np.size(x) for x in getattr(state, kept))
        held = [getattr(state, x.name) for x in fields(state) if x.name != "omega"]
        return sum(x.size for x in held if isinstance(x, np.ndarray))

    for m in range(4, 26):
        assert size(m + 4) - size(m) == more.get(name, 0)


@every_state
def test_steps_leave_a_state_as_it_was(name):
    """Two steps from one state are the same, noise too, and so are their pickles."""
    q, k, v = draw(0, 16)
    case, first, rest = CASES[name], slice(0, 5), slice(5, 16)
    state = case.start(4, q[:, first], k[:, first], v[:, first])
    before = state.read(q[:, 4:5])
    own = [x[:, rest] for x in (q, k, v)]
    if hasattr(state, "read_causal"):
        np.testing.assert_array_equal(*(state.read_causal(*own) for _ in range(2)))
    states = [case.step(state, *own) for _ in range(2)]
    copied = pickle.loads(pickle.dumps(states[0]))
    want, *reads = (x.read(q[:, -1:]) for x in (*states, copied))
    for read in reads:
        np.testing.assert_array_equal(read, want)
    np.testing.assert_array_equal(state.read(q[:, 4:5]), before)


@pytest.mark.parametrize(
    "backend", ["numpy", "torch", "array_api_strict", "cupy"], indirect=True
)  # whose arrays may be written to
@every_state
def test_states_do_not_change_with_the_arrays_of_the_caller(backend, name):
    case, query = CASES[name], backend.array(draw(1, 6)[0])
    arrays = [backend.array(x) for x in draw(0, 6)]
    more = {}
    if name == "positive":
        more = {x: backend.array(y) for x, y in WEIGHTED.items()}
        state = PositiveState.init(*arrays[1:], **more)
    else:
        state = case.start(4, *arrays)
    states = state, case.step(state, *arrays)
    before = [backend.numpy(x.read(query)).copy() for x in states]
    for x in (*arrays, *more.values()):
        x[...] = 7.0
    after = [backend.numpy(x.read(query)) for x in states]
    np.testing.assert_array_equal(before, after)


@pytest.mark.sweep(6)
@pytest.mark.long("jax", "dask")
@every_state
def test_every_library_agrees_with_numpy(backend, dtype, name):
    """Steps of two kinds of values, and where states have no chunks their merger with one more."""
    q, k, v = (x.astype(dtype) for x in draw(0, 11))
    v = np.stack([v, 1 - 2 * v])
    wide = [x.astype(np.float64) for x in (q, k, v)]
    case = CASES[name]
    want = case.whole(4, 11)(*wide, causal=True)

    def decode(q, k, v):
        blocks, last = in_steps(name, 4, q, k, v, [2, 3, 9, 11])
        found = [*(blocks or last), last[-1]]
        if name not in CHUNKED:
            a, b = (case.start(4, q[:, i, :], k[:, i, :], v[..., i, :]) for i in (PART, REST))
            found.append(a.merge(b).read(q[:, 10:, :]))
        return as_written(array_namespace(q).concat)(tuple(found), axis=-2)

    rows = [*range(2, 11)] if name not in PLAIN or name == "positive" else [2, 8, 10]
    rows += [10] * (1 if name in CHUNKED else 2)
    got = backend.call(decode, q, k, v)
    atol = 300 * float(np.finfo(dtype).eps)
    np.testing.assert_allclose(got, want[..., rows, :], rtol=0, atol=atol)


PART, REST = slice(0, 5), slice(5, 11)


@pytest.mark.sweep(6)
@pytest.mark.long("jax", "dask", "readonly")
@every_state
def test_axes_may_be_empty(backend, name):
    """A state merged with one of no keys, and read by queries; 0 if there are no keys at all."""
    case, backend.jit = CASES[name], lambda run: run

    def decode(new, q, k, v):
        state = case.start(4, q, k, v)
        nothing = case.start(4, *(x[:, :0, :] for x in (q, k, v)))
        return case.step(state.merge(nothing), q, k, v).read(new)

    def prompt(q, k, v):
        return case.start(4, q, k, v).read_causal(q[:, :0, :], k, v)

    for heads, m, d_v in product((0, 3), (0, 2), (0, 2)):
        arrays = [np.ones((heads, m, d)) for d in (3, 3, d_v)]
        for n in (0, 1):
            out = backend.call(decode, np.ones((heads, n, 3)), *arrays)
            want = 0.7 * 3 * 2 * m if name == "recurrent" else float(m > 0)  # a sum; a mean
            np.testing.assert_allclose(out, np.full((heads, n, d_v), want), rtol=1e-12)
        # Dask cannot cut arrays without elements into chunks.
        chunks = backend.name == "dask" and name in CHUNKED
        if name == "positive" or (name not in PLAIN and not chunks):
            assert backend.call(prompt, *arrays).shape == (heads, 0, d_v)


# --- what states refuse ---------------------------------------------------------------------------


@plain_states
def test_a_forgotten_token_axis(name):
    """k[:, i] without the token axis would be read as tokens of one head."""
    init = CASES[name].init(None)
    k, v = np.ones((2, 9, 3)), np.ones((2, 9, 4))
    for state in (init(k, v), init(k[:, :0], v[:, :0])):
        assert state.lead == (2,)
        for wrong in ((k[:, 0], v[:, 0]), (k[:1], v[:1]), (k[None], v[None])):
            with pytest.raises(ValueError, match=r"leading axes of the state, \(2,\), got shapes"):
                state.update(*wrong)
            with pytest.raises(ValueError, match="must have the"):
                state.merge(init(*wrong))
            if isinstance(state, PositiveState):
                with pytest.raises(ValueError, match="leading axes of the state"):
                    state.read_causal(k, *wrong)
        assert state.update(k[:, :1], v[:, :1]).lead == (2,)


@plain_states
@pytest.mark.parametrize("d", [1, 2, 4])
def test_keys_of_another_length(name, d):
    init, k, other = CASES[name].init(None), np.ones((4, 3)), np.ones((4, d))
    state, said = init(k, k), f"must have the last axis of the state, 3, got {d}"
    with pytest.raises(ValueError, match=f"`k` {said}"):
        state.update(other, k)
    with pytest.raises(ValueError, match=f"`v` {said}"):
        state.update(k, other)
    with pytest.raises(ValueError, match="`q`"):
        state.read(other)
    if name in ("elu", "slope", "taylor"):
        with pytest.raises(ValueError, match="`other` must have the `d` of this state"):
            init(k[:, :1], k).merge(state)


@pytest.mark.long("dask", "jax")
@plain_states
def test_queries_that_do_not_fit(backend, name):
    k, q = backend.array(np.ones((2, 4, 3))), backend.array(np.ones((5, 4, 3)))
    with pytest.raises(ValueError, match="leading axes that broadcast"):
        CASES[name].init(None)(k, k).read(q)


@pytest.mark.long("jax", "dask")
def test_log_weights_must_agree(backend):
    """Shapes and dtypes of all arrays are compared, and the values of NumPy's."""
    k, omega, weight = (backend.array(x) for x in (np.ones((4, 3)), OMEGA[:5], WEIGHT))
    init = partial(PositiveState.init, k, k)
    host, plain = init(omega=OMEGA[:5], log_weight=WEIGHT), init(omega=OMEGA[:5])
    for a, b in ((host, plain), (plain, host)):
        with pytest.raises(ValueError, match="`other` must have the `log_weight` of this state"):
            a.merge(b)
    zero = init(omega=OMEGA[:5], log_weight=np.zeros(5))
    assert plain.merge(zero).samples.out.shape == (5, 3)
    given = init(omega=omega, log_weight=weight)
    assert host.merge(given).samples.out.shape == given.merge(host).samples.out.shape
    for other in (
        init(omega=omega[:2, ...]),
        init(omega=omega, log_weight=weight[:1]),
        init(omega=backend.array(OMEGA[:5].astype("f4"))),
    ):
        with pytest.raises(ValueError, match=r"`other` must have the `(omega|log_weight)`"):
            given.merge(other)


def degree_and_shift(x, shift, degree, options=()):
    return features.taylor_features(x + shift, degree=degree)


def test_pickled_states_merge_if_their_feature_maps_are_the_same():
    """Also where the feature map is a partial of a function, which equals itself only."""
    q, k, v = draw(0, 4)
    shift = np.random.default_rng(0).standard_normal(3)

    def phi(shift=shift, **options):
        return partial(partial(degree_and_shift, shift=shift), **{"degree": 2, **options})

    for feature_map in (phi(), phi(shift=shift.copy()), phi(options=[1, {"a": (2.0, shift)}])):
        state = LinearState.init(k, v, feature_map=feature_map)
        merged = state.merge(pickle.loads(pickle.dumps(state)))
        np.testing.assert_allclose(merged.read(q), state.read(q), rtol=0, atol=1e-14)
    state = LinearState.init(k, v, feature_map=phi())
    for other in (
        *(phi(degree=3), phi(shift=shift + 1), phi(shift=shift[:1]), phi(shift=0.0)),
        *(phi(options=[1]), partial(degree_and_shift, shift=shift), cases.taylor),
    ):
        with pytest.raises(ValueError, match="`feature_map` of this state"):
            state.merge(replace(state, feature_map=other))
    for name in ("positive", "softmax"):
        kept = CASES[name].start(None, q, k, v)
        merged = kept.merge(pickle.loads(pickle.dumps(kept)))
        np.testing.assert_allclose(merged.read(q), kept.read(q), rtol=0, atol=1e-14)


# --- results that are written ---------------------------------------------------------------------


@given(st.integers(0, 9), st.integers(0, 9), st.integers(1, 4), st.booleans(), seeds)
def test_written_in_chunks(n, m, chunk, causal, seed):
    (q, _, _), (_, k, v) = draw(seed, n), draw(seed, m)
    out, options = np.full((4, n, 2), np.nan), {"causal": causal, "scale": 0.7}
    options |= WEIGHTED
    write = streaming.write_random_feature_attention
    assert write(out, q, k, v, **options, chunk=chunk) is out
    want = refattn.random_feature_attention(q, k, v, **options)
    np.testing.assert_allclose(out, want, rtol=0, atol=1e-11)


def test_written_to_a_memory_map(tmp_path):
    arrays = np.random.default_rng(0).standard_normal((3, 2, 50, 3)).astype(np.float32)
    for i, x in enumerate(arrays):
        np.save(tmp_path / f"{i}.npy", x)
    maps = [np.load(tmp_path / f"{i}.npy", mmap_mode="r") for i in range(3)]
    options = {"mode": "w+", "dtype": np.float32, "shape": (2, 50, 3)}
    out = np.lib.format.open_memmap(tmp_path / "out.npy", **options)
    omega = OMEGA[:5].astype(np.float32)
    write = streaming.write_random_feature_attention
    write(out, *maps, omega=omega, causal=True, chunk=16).flush()
    want = refattn.random_feature_attention(*arrays, omega=omega, causal=True)
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), want, rtol=0, atol=1e-5)
