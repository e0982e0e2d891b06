"""The causal machine: nothing of the future, whatever its numbers, in leaves, steps and loops."""

import numpy as np
import pytest
from scipy.special import logsumexp

from refattn import (
    Attended,
    linear_attention,
    linear_randomized_attention,
    naive,
    random_feature_attention,
)
from refattn.engine import causal as engine_causal
from refattn.engine import halves, positive, signed
from tests import reference
from tests.engine.causal_cases import CAUSAL
from tests.problems import draw

NUMBERS = (np.nan, np.inf, -np.inf, 1e300, -1e300, 5e-324, 1e-200, 0.0, -0.0, 1.0, 1e3, 70.0)
EDITS = {
    **{str(x): lambda y, _, x=x: x for x in (*NUMBERS, np.finfo(float).max)},
    "mixed": lambda x, rng: rng.choice([1e3, -1e3, np.nan, np.inf, 0.0], x.shape),
    "signs": lambda x, rng: rng.choice([-40.0, 40.0], x.shape),
    "powers": lambda x, rng: 2.0 ** rng.integers(-1000, 1000, x.shape),
    "fresh": lambda x, rng: rng.standard_normal(x.shape),
    "scaled": lambda x, _: 1e5 * x,
    "reversed": lambda x, _: x[::-1],
    "one nan": lambda x, _: np.where(np.arange(x.size).reshape(x.shape) == 0, np.nan, x),
}


def edited(arrays, t, edit, which):
    """Change the tokens from t on of some of q, k and v."""
    rng, changed = np.random.default_rng(t), [x.copy() for x in arrays]
    for i in which:
        changed[i][t:] = EDITS[edit](arrays[i][t:], rng)
    return changed


@pytest.mark.sweep(12)
@pytest.mark.long("0.0", "1.0", "70.0", "1000.0", "scaled", "reversed", "one nan", "powers", "inf")
@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("edit", EDITS)
def test_the_future_leaves_every_bit(name, edit):
    rng = np.random.default_rng(0)
    for n, cuts in ((7, (1, 3, 6)), (290, (48, 95, 96, 97, 145, 192, 193, 289))):
        arrays = [rng.standard_normal((n, size)) for size in (3, 3, 2)]
        before = CAUSAL[name](*arrays)
        for t, which in zip(cuts, [(0, 1, 2), (1,), (2,)] * 3, strict=False):
            after = CAUSAL[name](*edited(arrays, t, edit, which))
            np.testing.assert_array_equal(after[:t], before[:t])


@pytest.mark.sweep(3)
@pytest.mark.long("jax", "dask")
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of Dask, once it computes
@pytest.mark.parametrize("edit", ["nan", "mixed"])
@pytest.mark.parametrize("name", ["rfa", "lara", "linear signed"])
def test_the_future_leaves_every_bit_on_backends(backend, name, edit):
    arrays = [np.random.default_rng(0).standard_normal((70, size)) for size in (3, 3, 2)]
    before = backend.call(CAUSAL[name], *arrays)
    for t in (1, 16, 47, 48, 69):
        after = backend.call(CAUSAL[name], *edited(arrays, t, edit, (0, 1, 2)))
        np.testing.assert_array_equal(after[:t], before[:t])


@pytest.mark.parametrize("n", [2000, 4100])
def test_the_last_of_many_tokens_leaves_every_bit(n):
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, n, 3))
    before = linear_attention(q, k, v, causal=True)
    for edit in (np.nan, 1e200, -np.inf):
        k[-1] = edit
        np.testing.assert_array_equal(linear_attention(q, k, v, causal=True)[:-1], before[:-1])


def test_states_are_added_as_a_tree():
    """As many sums in turn as the number of steps has binary digits."""
    depth = engine_causal.Seen((0, 0), lambda a, b: (a[0] + b[0], 1 + max(a[1], b[1])))
    for count in range(1, 1025):
        depth.add((1, 0))
        total, deepest = depth.state
        assert total == count
        assert deepest <= 2 * count.bit_length()


@pytest.mark.long("131072", "262145", "(0.7, 0.63)", "rfa")
@pytest.mark.parametrize("n", [2**12, 60_000, 2**17, 2**18 + 1])
@pytest.mark.parametrize("values", [(0.7, 0.63), (1 / 3, 0.3), (1.0, 0.1)], ids=str)
@pytest.mark.parametrize("name", ["rfa", "linear"])
def test_sums_of_many_values_lose_few_digits(name, n, values, dtype):
    """A state is the sum of few sums, of which each is the sum of few."""
    q, v = np.zeros((n, 3), dtype), np.full((n, 1), values[0], dtype)
    v[1::2] = values[1]
    got = CAUSAL[name](q, q, v)
    count, (odd, even) = np.arange(1, n + 1)[:, None], v[:2].astype(np.longdouble)
    want = ((count + 1) // 2 * odd + count // 2 * even) / count
    eps = float(np.finfo(dtype).eps) * float(odd[0])
    assert float(np.max(np.abs(got - want))) <= reference.CONTRACT * eps


def test_many_leaves_after_a_long_past():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((length, 3)) for length in (700, 1400, 1400))
    for _ in range(2):
        got, want = (f(q, k, v, causal=True) for f in (linear_attention, naive.linear_attention))
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-12)
        k[:100] = 1e200  # a past that is scaled, and leaves that are not


@pytest.mark.sweep(2)
@pytest.mark.long("jax")
@pytest.mark.parametrize(("n", "m"), [(600, 600), (520, 530), (530, 520)])
def test_causal_steps_on_backends(backend, n, m):
    """More tokens than one step holds, in libraries whose steps are longer than NumPy's."""
    if backend.name in ("numpy-readonly", "dask"):
        pytest.skip("as NumPy, or slow")
    rng = np.random.default_rng(n)
    q, k, v, omega = draw(rng, n, 3), draw(rng, m, 3), draw(rng, m, 2), draw(rng, 4, 3)
    mask = rng.random(m) < 0.7
    for function, options in (
        (random_feature_attention, {"omega": omega}),
        (random_feature_attention, {"omega": omega, "log_weight": draw(rng, 4), "mask": mask}),
        (linear_randomized_attention, {"num_proposals": 12, "rng": 1, "mask": mask}),
    ):
        got = backend.call(function, q, k, v, causal=True, **options)
        want = function(q, k, v, causal=True, **options)
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-11)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("n", "m"), [(50, 61), (61, 50)])
@pytest.mark.parametrize("name", ["rfa", "rfa weighted", "lara", "linear", "linear signed"])
def test_many_steps_of_many_leaves(backend, name, n, m, monkeypatch):
    """Of 8 tokens, in other libraries than NumPy: what is past counts once, what is to come not."""
    if backend.name in ("numpy", "numpy-readonly", "jax", "dask"):
        pytest.skip("has leaves of its own, or is slow")
    monkeypatch.setattr(engine_causal, "_LEAVES", 3)
    monkeypatch.setattr(engine_causal, "_LEAF", 8)
    rng = np.random.default_rng(n)
    arrays = [draw(rng, 2, *x) for x in ((n, 3), (m, 3), (m, 2))]
    mask = rng.random((2, 1, m)) < 0.7
    mask[0, 0, 8:24] = False  # whole leaves
    got = backend.call(CAUSAL[name], *arrays, mask=mask)
    np.testing.assert_allclose(got, CAUSAL[name](*arrays, mask=mask), rtol=1e-12, atol=1e-12)
    if name != "lara":  # whose frequencies are drawn by chunks
        edits = [x.copy() for x in arrays]
        for x, edit in zip(edits, (1e3, np.nan, np.inf), strict=True):
            x[..., -20:, :] = edit
        late = backend.call(CAUSAL[name], *edits, mask=mask)
        np.testing.assert_array_equal(late[:, : n - 20], got[:, : n - 20])


@pytest.mark.parametrize("size", [1, 100, 1e4])
def test_pairs_of_halves_are_those_of_all_samples(size):
    rng = np.random.default_rng(0)
    x, y = (size * draw(rng, 2, 3, 16, 5) for _ in range(2))
    products, visible = draw(rng, 2, 3, 16, 16), np.tril(np.ones((16, 16), bool))
    known = np.sort(rng.random((3, 16, 5)) < 0.7, axis=-2)
    known[..., :2] = True
    y[..., 9, 4] = np.where(known[:, 9, 4], y[..., 9, 4], np.nan)

    def logs(known):
        pairs = x[..., :, None, :] + y[..., None, :, :]
        return np.where(known & visible[:, :, None], pairs, -np.inf)

    with np.errstate(all="ignore"):
        got = halves.log_kernel(x, y, known, np)
        want = logsumexp(logs(known[..., :, None, :]), axis=-1)
        most = np.max(want, axis=-1, keepdims=True)
        got, want = (np.where(visible, np.exp(z - most), 0.0) for z in (got, want))
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-15 * (1 + 10 * size))
        y = np.where(np.isnan(y), 0.0, y)
        x -= logsumexp(logs(True), axis=(-2, -1))[..., None]
        weights = np.exp(logs(True))
        got = halves.to_queries(x, y, products, np), *halves.to_keys(x, y, products, np)
    moved = weights * products[..., None]
    want = np.sum(moved, axis=-2), np.sum(moved, axis=-3), np.sum(weights, axis=-1)
    for a, b in zip(got, want, strict=True):
        a = np.where(visible, a, 0.0) if a.shape[-1] == 16 else a
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-15 * (1 + 10 * size))


@pytest.mark.long
@pytest.mark.parametrize("name", ["rfa", "linear"])
@pytest.mark.parametrize(("n", "m", "masked"), [(2300, 1100, True), (6300, 6400, False)])
def test_many_steps_of_a_library_that_traces(jax, name, n, m, masked):
    """Steps beyond the first, filled up at both ends."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(s) for s in ((2, 2, n, 3), (2, 1, m, 3), (1, m, 2)))
    options = {"mask": rng.random(m) < 0.7} if masked else {}
    want = CAUSAL[name](q, k, v, **options)
    moved = {key: jax.numpy.asarray(x) for key, x in options.items()}
    run = jax.jit(lambda *arrays: CAUSAL[name](*arrays, **moved))
    got = run(*map(jax.numpy.asarray, (q, k, v)))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-12)


def test_steps_of_a_loop_are_filled_up_at_both_ends(monkeypatch):
    """As in a library that traces, here one step after the other, of 8 tokens."""

    def loop(step, state, items):
        done = []
        for i in range(len(items[0])):
            state, out = step(state, tuple(None if x is None else x[i] for x in items))
            done.append(out)
        return Attended(*map(np.stack, zip(*done, strict=True)))

    monkeypatch.setattr(engine_causal, "traced_once", lambda x: True)
    monkeypatch.setattr(engine_causal, "loop", loop)
    monkeypatch.setattr(positive.Positive, "step", lambda self, q, lead: (2, 4))
    rng = np.random.default_rng(0)
    for n, m in ((23, 11), (23, 40), (30, 30)):
        arrays = [draw(rng, 2, *x) for x in ((n, 3), (m, 3), (m, 2))]
        for mask in (None, rng.random((1, m)) < 0.7):
            options = {"omega": draw(rng, 4, 3), "mask": mask, "causal": True}
            want = naive.random_feature_attention(*arrays, **options)
            got = random_feature_attention(*arrays, **options)
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-13)


@pytest.mark.long("rfa")
@pytest.mark.parametrize("name", ["rfa", "linear"])
def test_a_loop_is_traced_once(name):
    jax = pytest.importorskip("jax")
    for n in (4096, 65_536):
        x = jax.ShapeDtypeStruct((n, 3), np.float32)
        assert jax.jit(CAUSAL[name]).lower(x, x, x).as_text().count("\n") < 3000


@pytest.mark.long
@pytest.mark.parametrize(("name", "without"), [("rfa", 433), ("lara", 1101)])
def test_few_programs_are_compiled(jax, name, without):
    """Outside `jax.jit`, the first call compiles each operation for each shape.

    Less than half of what it compiles `without` steps of one shape.
    """
    jax.clear_caches()  # else it depends on what ran before
    counts = []

    def listen(event, seconds, **_):
        if event.endswith("backend_compile_duration"):
            counts[-1] += 1

    rng = np.random.default_rng(0)
    options = {"omega": draw(rng, 7, 5)} if name == "rfa" else {"num_proposals": 7, "rng": 1}
    function = random_feature_attention if name == "rfa" else linear_randomized_attention
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for n in (153, 1503):  # in one step, in two
            counts.append(0)
            arrays = (jax.numpy.asarray(draw(rng, n, size)) for size in (5, 5, 3))
            function(*arrays, causal=True, **options)
    finally:
        jax.monitoring.clear_event_listeners()
    assert 0 < min(counts) <= max(counts) < without / 2, counts


@pytest.mark.long("dask", "jax")
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # of Dask, once it computes
def test_largest_values_of_past_and_present(backend, dtype):
    zeros, v = np.zeros((200, 2), dtype), np.full((200, 1), np.finfo(dtype).max, dtype)
    options = {"omega": np.zeros((3, 2), dtype), "causal": True}
    got = backend.call(random_feature_attention, zeros, zeros, v, **options)
    np.testing.assert_allclose(got, v, rtol=16 * np.finfo(dtype).eps)


@pytest.mark.parametrize("name", CAUSAL)
def test_nothing_is_computed_in_another_dtype(name, monkeypatch):
    dtypes = set()
    finish = {kind: kind.finish for kind in (positive.Positive, signed.Signed)}
    for kind, function in finish.items():

        def watched(own, found, function=function):
            dtypes.update(x.dtype for x in found)
            return function(own, found)

        monkeypatch.setattr(kind, "finish", watched)
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((2, 130, size)).astype(np.float32) for size in (3, 3, 2)]
    arrays[1][0] *= 30  # far
    CAUSAL[name](*arrays)
    assert dtypes == {np.dtype(np.float32)}
