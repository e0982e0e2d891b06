"""Decoding states: token by token equals the parallel form."""

import pickle
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refattn import features, linear_attention, random_feature_attention, softmax_attention
from refattn.streaming import (
    LinearState,
    PositiveState,
    SoftmaxState,
    write_random_feature_attention,
)
from tests.test_attention import draw, seeds

OMEGA = np.random.default_rng(9).standard_normal((5, 3))
WEIGHT = np.random.default_rng(8).standard_normal(5)


def taylor(x):
    return features.taylor_features(x, degree=2)


CASES = {
    "softmax": (
        lambda k, v: SoftmaxState.init(k, v, scale=0.7),
        lambda q, k, v, **kw: softmax_attention(q, k, v, scale=0.7, **kw),
    ),
    "positive": (
        lambda k, v: PositiveState.init(k, v, omega=OMEGA, log_weight=WEIGHT, scale=0.7),
        lambda q, k, v, **kw: random_feature_attention(
            q, k, v, omega=OMEGA, log_weight=WEIGHT, scale=0.7, **kw
        ),
    ),
    "elu": (LinearState.init, linear_attention),
    "taylor": (
        lambda k, v: LinearState.init(k, v, feature_map=taylor),
        lambda q, k, v, **kw: linear_attention(q, k, v, feature_map=taylor, **kw),
    ),
}


@pytest.mark.parametrize("name", CASES)
@given(st.integers(0, 5), st.integers(1, 40), seeds)
def test_token_by_token_is_causal_attention(name, prefix, n, seed):
    init, parallel = CASES[name]
    rng = np.random.default_rng(seed)
    m = prefix + n
    q, k, v = draw(rng, 2, n, 3), draw(rng, 2, m, 3), draw(rng, 2, m, 4)
    state = init(k[:, :prefix], v[:, :prefix])
    rows = []
    for i in range(n):
        j = slice(prefix + i, prefix + i + 1)
        state = state.update(k[:, j], v[:, j])
        rows.append(state.read(q[:, i : i + 1]))
    want = parallel(q, k, v, causal=True)
    np.testing.assert_allclose(np.concatenate(rows, -2), want, rtol=0, atol=1e-11)


@given(st.integers(0, 9), st.integers(1, 70), st.integers(0, 5), seeds)
def test_a_long_prompt_in_chunks(prefix, n, more, seed):
    """Queries of new tokens, or of the last of them."""
    init, parallel = CASES["positive"]
    rng = np.random.default_rng(seed)
    m = n + more
    q, k, v = draw(rng, 4, n, 3), draw(rng, 2, prefix + m, 3), draw(rng, 2, prefix + m, 4)
    state = init(k[:, :prefix], v[:, :prefix])
    got = state.read_causal(q, k[:, prefix:], v[:, prefix:])
    want = parallel(q, k, v, causal=True)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-11)


@given(st.integers(0, 9), st.integers(0, 9), st.integers(1, 4), st.booleans(), seeds)
def test_written_in_chunks(n, m, chunk, causal, seed):
    _, parallel = CASES["positive"]
    rng = np.random.default_rng(seed)
    q, k, v = draw(rng, 4, n, 3), draw(rng, 2, m, 3), draw(rng, 2, m, 5)
    out = np.full((4, n, 5), np.nan)
    got = write_random_feature_attention(
        out, q, k, v, omega=OMEGA, log_weight=WEIGHT, scale=0.7, causal=causal, chunk=chunk
    )
    assert got is out
    np.testing.assert_allclose(out, parallel(q, k, v, causal=causal), rtol=0, atol=1e-11)


def test_written_to_a_memory_map(tmp_path):
    rng = np.random.default_rng(0)
    arrays = [draw(rng, 2, 50, 3, dtype=np.dtype("float32")) for _ in range(3)]
    for i, x in enumerate(arrays):
        np.save(tmp_path / f"{i}.npy", x)
    maps = [np.load(tmp_path / f"{i}.npy", mmap_mode="r") for i in range(3)]
    options = {"mode": "w+", "dtype": np.float32, "shape": (2, 50, 3)}
    out = np.lib.format.open_memmap(tmp_path / "out.npy", **options)
    omega = OMEGA.astype(np.float32)
    write_random_feature_attention(out, *maps, omega=omega, causal=True, chunk=16).flush()
    want = random_feature_attention(*arrays, omega=omega, causal=True)
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"out": [0.0]}, TypeError, "`out` must be a writable NumPy array of float64, got list"),
        ({"out": np.empty((4, 3), "f4")}, TypeError, "of float64, got float32, writable"),
        ({"out": np.broadcast_to(0.0, (4, 3))}, TypeError, "got float64, not writable"),
        ({"out": np.empty((3, 3))}, ValueError, r"`out` must have shape \(4, 3\), got \(3, 3\)"),
        ({"chunk": 0}, ValueError, "`chunk`"),
        ({"chunk": 1.5}, TypeError, "`chunk`"),
        ({"omega": OMEGA[:, :2]}, ValueError, "`omega`"),
    ],
)
def test_bad_input_of_writing(change, error, said):
    x = np.ones((4, 3))
    options = {"out": np.empty((4, 3)), "omega": OMEGA} | change
    with pytest.raises(error, match=said):
        write_random_feature_attention(options.pop("out"), x, x, x, **options)


def test_a_long_prompt_of_other_values():
    x = np.ones((4, 3))
    with pytest.raises(ValueError, match="`v` must have the last axis of the state, 3, got 2"):
        PositiveState.init(x, x, omega=OMEGA).read_causal(x, x, x[:, :2])


@pytest.mark.parametrize("name", CASES)
@given(st.integers(0, 9), st.integers(0, 9), seeds)
def test_merge_of_states(name, a, b, seed):
    init, parallel = CASES[name]
    rng = np.random.default_rng(seed)
    q, k, v = draw(rng, 3, 3), draw(rng, a + b, 3), draw(rng, a + b, 2)
    merged = init(k[:a], v[:a]).merge(init(k[a:], v[a:]))
    np.testing.assert_allclose(merged.read(q), parallel(q, k, v), rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", ["positive", "elu", "taylor"])
def test_state_size_does_not_depend_on_the_tokens(name):
    rng = np.random.default_rng(0)
    k, v = draw(rng, 100, 3), draw(rng, 100, 2)
    init = CASES[name][0]

    def size(state):
        parts = state.samples if isinstance(state, PositiveState) else state.sums
        return sum(x.size for x in parts)

    assert size(init(k, v)) == size(init(k[:1], v[:1])) == size(init(k[:1], v[:1]).update(k, v))


@pytest.mark.parametrize("name", CASES)
def test_grouped_heads(name):
    init, parallel = CASES[name]
    rng = np.random.default_rng(0)
    q, k, v = draw(rng, 6, 4, 3), draw(rng, 2, 9, 3), draw(rng, 2, 9, 2)
    state = init(k[:, :4], v[:, :4]).update(k[:, 4:], v[:, 4:])
    want = parallel(q, np.repeat(k, 3, 0), np.repeat(v, 3, 0))
    np.testing.assert_allclose(state.read(q), want, rtol=0, atol=1e-12)


@pytest.mark.long("jax", "dask")
@pytest.mark.parametrize("name", CASES)
def test_states_on_backends(backend, dtype, name):
    init, _ = CASES[name]
    rng = np.random.default_rng(0)
    q, k, v = (draw(rng, 2, 6, 3, dtype=dtype) for _ in range(3))

    def decode(q, k, v):
        state = init(k[:, :2, :], v[:, :2, :]).update(k[:, 2:4, :], v[:, 2:4, :])
        return state.merge(init(k[:, 4:, :], v[:, 4:, :])).read(q)

    got, want = backend.call(decode, q, k, v), decode(q, k, v)
    np.testing.assert_allclose(got, want, atol=1e-4 if dtype == np.float32 else 1e-12)


def test_bad_input():
    k = np.ones((4, 3))
    with pytest.raises(ValueError, match=r"`k` and `v` must have next-to-last axes"):
        SoftmaxState.init(k, k[:2])
    with pytest.raises(ValueError, match=r"`omega` must have shape \(\.\.\., S, 3\)"):
        PositiveState.init(k, k, omega=np.ones((2, 4)))
    with pytest.raises(TypeError, match=r"`state` must have the dtype of `q`, float32"):
        PositiveState.init(k, k, omega=OMEGA).read(k.astype(np.float32))
    with pytest.raises(TypeError, match=r"`state` must have the dtype of `q`, float32"):
        LinearState.init(k, k).read(k.astype(np.float32))


def test_states_that_do_not_fit():
    k = np.ones((4, 3))
    states = {
        "softmax": SoftmaxState.init(k, k),
        "positive": PositiveState.init(k, k, omega=OMEGA),
        "linear": LinearState.init(k, k),
    }
    for state in states.values():
        with pytest.raises(TypeError, match="`other` must be a"):
            state.merge(3)
        with pytest.raises(TypeError, match="must have the dtype of"):
            state.update(k.astype(np.float32), k.astype(np.float32))
        with pytest.raises(ValueError, match="must h"):
            state.update(k, k[:, :2])
    with pytest.raises(ValueError, match="`other` must have the `omega` of this state"):
        states["positive"].merge(PositiveState.init(k, k, omega=OMEGA + 1))
    with pytest.raises(ValueError, match="`other` must have the `scale` of this state"):
        states["softmax"].merge(SoftmaxState.init(k, k, scale=2.0))
    with pytest.raises(ValueError, match="`other` must have the `feature_map` of this state"):
        states["linear"].merge(LinearState.init(k, k, feature_map=taylor))
    with pytest.raises(ValueError, match="`q` and `k` must have last axes"):
        states["positive"].read(k[:, :2])


# --- what states refuse, and what they own -------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_a_forgotten_token_axis(name):
    """k[:, i] without the token axis would be read as tokens of one head."""
    init, _ = CASES[name]
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


@pytest.mark.parametrize("name", CASES)
def test_keys_of_another_length(name):
    init, _ = CASES[name]
    k = np.ones((4, 3))
    state = init(k, k)
    for d in (1, 2, 4):
        other = np.ones((4, d))
        with pytest.raises(
            ValueError, match=f"`k` must have the last axis of the state, 3, got {d}"
        ):
            state.update(other, k)
        with pytest.raises(
            ValueError, match=f"`v` must have the last axis of the state, 3, got {d}"
        ):
            state.update(k, other)
        with pytest.raises(ValueError, match="`q`"):
            state.read(other)
    if name in ("elu", "taylor"):
        one = init(k[:, :1], k)
        with pytest.raises(ValueError, match="`other` must have the `d` of this state"):
            one.merge(state)
        with pytest.raises(ValueError, match="`k` must have the last axis of the state, 1, got 3"):
            one.update(k, k)


@pytest.mark.long("dask", "jax")
def test_queries_that_do_not_fit(backend):
    k, q = backend.array(np.ones((2, 4, 3))), backend.array(np.ones((5, 4, 3)))
    for init, _ in CASES.values():
        with pytest.raises(ValueError, match="leading axes that broadcast"):
            init(k, k).read(q)


@pytest.mark.long("jax")
def test_log_weights_must_agree(backend):
    """Shapes and dtypes of all arrays are compared, and the values of NumPy's."""
    k = backend.array(np.ones((4, 3)))
    host = PositiveState.init(k, k, omega=OMEGA, log_weight=WEIGHT)
    plain = PositiveState.init(k, k, omega=OMEGA)
    for a, b in ((host, plain), (plain, host)):
        with pytest.raises(ValueError, match="`other` must have the `log_weight` of this state"):
            a.merge(b)
    zero = PositiveState.init(k, k, omega=OMEGA, log_weight=np.zeros(5))
    assert plain.merge(zero).samples.out.shape == (5, 3)
    given = PositiveState.init(k, k, omega=backend.array(OMEGA), log_weight=backend.array(WEIGHT))
    assert host.merge(given).samples.out.shape == given.merge(host).samples.out.shape
    fewer = PositiveState.init(k, k, omega=backend.array(OMEGA[:2]))
    short = PositiveState.init(
        k, k, omega=backend.array(OMEGA), log_weight=backend.array(WEIGHT[:1])
    )
    single = PositiveState.init(k, k, omega=backend.array(OMEGA.astype("f4")))
    for other in (fewer, short, single):
        with pytest.raises(ValueError, match=r"`other` must have the `(omega|log_weight)`"):
            given.merge(other)


@given(st.integers(0, 9), st.integers(0, 9), seeds)
def test_merge_is_commutative(a, b, seed):
    rng = np.random.default_rng(seed)
    q, k, v = draw(rng, 3, 3), draw(rng, a + b, 3), draw(rng, a + b, 2)
    for init, _ in CASES.values():
        first, second = init(k[:a], v[:a]), init(k[a:], v[a:])
        want = first.merge(second).read(q)
        np.testing.assert_allclose(second.merge(first).read(q), want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_states_do_not_change_with_the_arrays_of_the_caller(backend, name):
    if backend.name not in ("numpy", "torch", "array_api_strict", "cupy"):
        pytest.skip("arrays are not written to")
    q, k, v = (backend.array(x) for x in np.random.default_rng(0).standard_normal((3, 6, 3)))
    omega, weight = backend.array(OMEGA), backend.array(WEIGHT)
    init = CASES[name][0]
    if name == "positive":

        def init(k, v):
            return PositiveState.init(k, v, omega=omega, log_weight=weight)

    state = init(k, v)
    grown = state.update(k, v)
    before = [backend.numpy(x.read(q)).copy() for x in (state, grown)]
    for x in (k, v, omega, weight):
        x[...] = 7.0
    after = [backend.numpy(x.read(q)) for x in (state, grown)]
    np.testing.assert_array_equal(before, after)


def degree_and_shift(x, shift, degree, options=()):
    return features.taylor_features(x + shift, degree=degree)


def test_pickled_states_merge():
    """Also where the feature map is a partial of a function, which equals itself only."""
    rng = np.random.default_rng(0)
    q, k, v = draw(rng, 2, 3), draw(rng, 4, 3), draw(rng, 4, 2)
    shift = draw(rng, 3)

    def phi(shift=shift, **options):
        return partial(partial(degree_and_shift, shift=shift), **{"degree": 2, **options})

    same = [phi(), phi(shift=shift.copy()), phi(options=[1, {"a": (2.0, shift)}])]
    for feature_map in same:
        state = LinearState.init(k, v, feature_map=feature_map)
        merged = state.merge(pickle.loads(pickle.dumps(state)))
        np.testing.assert_allclose(merged.read(q), state.read(q), rtol=0, atol=1e-14)
    state = LinearState.init(k, v, feature_map=phi())
    for other in (
        phi(degree=3),
        phi(shift=shift + 1),
        phi(shift=shift[:1]),
        phi(shift=0.0),
        phi(options=[1]),
        partial(degree_and_shift, shift=shift),
        taylor,
    ):
        different = replace(state, feature_map=other)
        with pytest.raises(ValueError, match="`feature_map` of this state"):
            state.merge(different)
    positive = PositiveState.init(k, v, omega=OMEGA, log_weight=WEIGHT)
    for kept in (positive, SoftmaxState.init(k, v)):
        merged = kept.merge(pickle.loads(pickle.dumps(kept)))
        np.testing.assert_allclose(merged.read(q), kept.read(q), rtol=0, atol=1e-14)
