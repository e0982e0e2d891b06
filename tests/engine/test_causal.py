"""The causal machine: nothing of the future, whatever its numbers, and no digit lost on the way."""

import operator
from functools import partial

import numpy as np
import pytest

import refattn
from refattn import linear_attention, linear_randomized_attention, naive, random_feature_attention
from refattn.arrays.library import Workspace
from refattn.engine import causal as engine_causal
from refattn.engine import positive, signed
from refattn.features import elu_features, relu_features, taylor_features
from tests import reference

OMEGA = np.random.default_rng(5).standard_normal((7, 3))
RFA = partial(random_feature_attention, causal=True, omega=OMEGA)
LARA = partial(linear_randomized_attention, causal=True, rng=1)
LINEAR = partial(linear_attention, causal=True)

CAUSAL = {
    "rfa": RFA,
    "rfa hyperbolic": partial(RFA, features="hyperbolic"),
    "rfa trigonometric": partial(RFA, features="trigonometric"),
    "rfa weighted": partial(RFA, log_weight=np.array([-np.inf, 0.0, 40.0, -3.0, 0.0, -90.0, 1.0])),
    "rfa norms": partial(RFA, square_norms=(0.0, 1.0)),
    "lara": partial(LARA, num_proposals=5),
    "lara own": partial(LARA, num_proposals=5, weighting="own"),
    "lara antithetic": partial(LARA, num_proposals=5, antithetic=True),
    "lara given": partial(LARA, num_proposals=7, omega=OMEGA, rng=None),
    "linear": LINEAR,
    "linear relu": partial(LINEAR, feature_map=relu_features),
    "linear alpha": partial(LINEAR, feature_map=partial(elu_features, alpha=0.1)),
    "linear signed": partial(LINEAR, feature_map=lambda x: x),
    "linear taylor": partial(LINEAR, feature_map=partial(taylor_features, degree=2)),
}

EDITS = {
    "nan": lambda x, _: np.nan,
    "inf": lambda x, _: np.inf,
    "-inf": lambda x, _: -np.inf,
    "1e300": lambda x, _: 1e300,
    "-1e300": lambda x, _: -1e300,
    "largest": lambda x, _: np.finfo(x.dtype).max,
    "smallest": lambda x, _: np.finfo(x.dtype).smallest_subnormal,
    "1e-200": lambda x, _: 1e-200,
    "zero": lambda x, _: 0.0,
    "-0": lambda x, _: -0.0,
    "one": lambda x, _: 1.0,
    "thousand": lambda x, _: 1e3,
    "seventy": lambda x, _: 70.0,
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


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0, 1e3, 1e4])
@pytest.mark.parametrize("spread", [0.0, 25.0, 60.0])
def test_accuracy_of_near_and_far(dtype, scale, spread):
    """Exponents on both sides of what is near, and values of e^+-spread in columns of their own."""
    rng = np.random.default_rng(0)
    n, d, num_features = 130, 3, 5
    norms = np.exp(rng.uniform(-3, 1, (2, n, 1)))
    q, k = (norms * rng.standard_normal((2, n, d))).astype(dtype)
    size = np.exp(spread * np.array([-1.0, 0.0, 1.0])).astype(dtype)
    v = rng.standard_normal((n, 3)).astype(dtype) * size
    v[::7] = 0
    omega = rng.standard_normal((num_features, d)).astype(dtype)
    got = random_feature_attention(q, k, v, omega=omega, scale=scale, causal=True)
    wide = [x.astype(np.longdouble) for x in (q, k, v)]
    want = naive.random_feature_attention(*wide, omega=omega, scale=scale, causal=True)
    root = scale**0.5
    norm = root * float(np.max(np.linalg.norm(omega, axis=-1)))
    key = float(np.max(np.linalg.norm(k, axis=-1)))
    exponent = norm * float(np.max(np.linalg.norm(q, axis=-1))) + norm * key + scale * key**2 / 2
    unit = float(np.finfo(dtype).eps) * (1 + exponent)
    error = np.max(np.abs(got - want), axis=0) / np.max(np.abs(v), axis=0)
    assert np.all(error <= reference.CONTRACT * unit)


def test_pairs_that_lose_digits_are_evaluated_anew(monkeypatch):
    """Features of a query and of a key that are large in different places, against 50 digits."""
    anew = []
    log_sum_exp = positive.log_sum_exp
    monkeypatch.setattr(positive, "log_sum_exp", lambda x: anew.append(len(x)) or log_sum_exp(x))
    for reach in (30.0, 300.0, 360.0, 700.0):
        q, k = np.array([[reach], [-reach], [1.0]]), np.array([[-reach], [reach], [reach]])
        v, omega = np.array([[1.0], [-2.0], [3.0]]), np.array([[1.0], [-1.0], [0.5]])
        got = random_feature_attention(q, k, v, omega=omega, scale=1.0, causal=True)
        wide = [reference.exact(x) for x in (q, k, v)]
        want = reference.random_feature_attention(
            *wide, reference.exact(omega), visible=np.tri(3, dtype=bool)
        )
        assert reference.error(got, want, 3, 3 * reach + reach**2 / 2) <= reference.CONTRACT
    assert anew


def test_states_are_added_as_a_tree():
    """As many sums in turn as the number of chunks has binary digits."""
    depth = engine_causal.Seen((0, 0), lambda a, b: (a[0] + b[0], 1 + max(a[1], b[1])))
    for count in range(1, 1025):
        depth.add((1, 0))
        total, deepest = depth.state
        assert total == count
        assert deepest <= 2 * count.bit_length()


def test_many_tokens_add_few_rounding_errors():
    n = 60_000
    q, k, v = (
        np.zeros((n, 1), np.float32),
        np.zeros((n, 1), np.float32),
        np.ones((n, 1), np.float32),
    )
    v[1::2] = 0.1
    omega = np.zeros((2, 1), np.float32)
    want = np.cumsum(v.astype(np.float64)) / np.arange(1, n + 1)
    bound = reference.CONTRACT * float(np.finfo(np.float32).eps)
    for got in (
        random_feature_attention(q, k, v, omega=omega, causal=True),
        linear_attention(q, k, v, causal=True),
    ):
        assert np.max(np.abs(got[:, 0] - want)) <= bound


def test_maps_of_heads_get_all_of_them():
    """A map may hold arrays of each head."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 9, 120, 4))
    scales = rng.uniform(1, 2, (9, 1, 1))
    for causal in (False, True):
        got = linear_attention(q, k, v, feature_map=lambda x: np.exp(scales * x), causal=causal)
        for h in range(9):
            own = linear_attention(
                q[h], k[h], v[h], feature_map=lambda x, h=h: np.exp(scales[h] * x), causal=causal
            )
            np.testing.assert_allclose(got[h], own, rtol=1e-12)


@pytest.mark.long
@pytest.mark.parametrize("name", ["rfa", "linear"])
@pytest.mark.parametrize(("n", "m", "masked"), [(2300, 1100, True), (6300, 6400, False)])
def test_many_steps_of_a_library_that_traces(name, n, m, masked):
    """Steps beyond the first, filled up at both ends."""
    jax = pytest.importorskip("jax")
    jax.config.update("jax_enable_x64", True)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(s) for s in ((2, 2, n, 3), (2, 1, m, 3), (1, m, 2)))
    options = {"mask": rng.random(m) < 0.7} if masked else {}
    want = CAUSAL[name](q, k, v, **options)
    moved = {key: jax.numpy.asarray(x) for key, x in options.items()}
    got = jax.jit(lambda *arrays: CAUSAL[name](*arrays, **moved))(
        *map(jax.numpy.asarray, (q, k, v))
    )
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-12)


def test_a_loop_is_traced_once():
    jax = pytest.importorskip("jax")
    lines = []
    for n in (4096, 65_536):
        x = jax.ShapeDtypeStruct((n, 3), np.float32)
        for name in ("rfa", "linear"):
            lines.append(jax.jit(CAUSAL[name]).lower(x, x, x).as_text().count("\n"))
    assert max(lines) < 3000, lines


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # of Dask, once it computes
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_largest_values_of_past_and_present(backend, dtype):
    largest = np.finfo(dtype).max
    q, k, v = (
        np.zeros((200, 2), dtype),
        np.zeros((200, 2), dtype),
        np.full((200, 1), largest, dtype),
    )
    omega = np.zeros((3, 2), dtype)
    got = backend.call(random_feature_attention, q, k, v, omega=omega, causal=True)
    np.testing.assert_allclose(got, v, rtol=16 * np.finfo(dtype).eps)


@pytest.mark.parametrize("name", CAUSAL)
def test_nothing_is_computed_in_another_dtype(name, monkeypatch):
    dtypes = set()
    finish = {kind: kind.finish for kind in (positive.Exponential, signed.Signed)}
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


def test_longdouble_near_and_far():
    """Values that only longdouble holds are neither near nor lost."""
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 130, 2)).astype(np.longdouble) * np.array([1, 60])[:, None, None]
    for power in ("1e1200", "1e4900", "1e-4900"):
        v = rng.standard_normal((130, 2)).astype(np.longdouble) * np.longdouble(power)
        omega = np.array([[300.0, 0.0], [0.0, -1.0]])
        got = random_feature_attention(q, k, v, omega=omega, scale=1.0, causal=True)
        want = naive.random_feature_attention(q, k, v, omega=omega, scale=1.0, causal=True)
        size, exponent = np.max(np.abs(v)), 300 * (np.max(np.abs(q)) + np.max(np.abs(k))) * 2
        bound = reference.CONTRACT * np.finfo(np.longdouble).eps * (1 + exponent)
        assert np.max(np.abs(got - want)) / size <= bound


def test_infinite_features_warn_of_nothing():
    q, k, v = np.full((3, 2), np.inf), np.ones((3, 2)), np.ones((3, 1))
    assert np.isnan(linear_attention(q, k, v)).all()


# --- axes that only some arguments have, many leaves, maps of one array ---------------------------


@pytest.mark.parametrize("n", [20, 100, 150])
@pytest.mark.parametrize("extreme", [False, True])
def test_axes_that_keys_lack(n, extreme):
    """Of queries, masks and frequencies, with features that are scaled and that are not."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.standard_normal(shape)

    def keys(*lead):
        k = normal(*lead, n, 5)
        k[..., -1, :] = 1e200 if extreme else k[..., -1, :]  # scaled, and the last only
        return k

    padding = np.arange(n) > n // 3
    linear = ("linear_attention", {})
    scaled = ("linear_attention", {"feature_map": partial(taylor_features, degree=2)})

    def waves(*lead):
        return "random_feature_attention", {
            "omega": normal(*lead, 4, 5), "features": "trigonometric"
        }  # fmt: skip

    cases = [
        (linear, (3, n, 5), (), {"mask": np.broadcast_to(padding, (3, 1, n))}),
        (linear, (8, 4, n, 5), (8, 1), {"mask": np.broadcast_to(padding, (8, 4, 1, n))}),
    ]
    if not extreme:
        cases += [
            (scaled, (2, n, 5), (), {"mask": np.ones((2, 1, n), bool)}),
            (waves(3), (3, n, 5), (), {}),
            (waves(16), (16, n, 5), (8,), {}),
        ]
    for (name, options), shape, lead, mask in cases:
        q, k, v = normal(*shape), keys(*lead), normal(*lead, n, 3)
        got, want = (
            getattr(module, name)(q, k, v, causal=True, **options, **mask)
            for module in (refattn, naive)
        )
        scale = np.max(np.abs(want[..., :-1, :]), initial=1.0)
        np.testing.assert_allclose(got[..., :-1, :], want[..., :-1, :], rtol=0, atol=1e-10 * scale)


def test_values_of_heads_with_keys_of_one():
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 100, 5))
    v, mask = rng.standard_normal((3, 100, 5)), rng.random((3, 1, 100)) < 0.8
    mask[..., 0] = True
    got, want = (
        f(q, k, v, mask=mask, causal=True) for f in (linear_attention, naive.linear_attention)
    )
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-12)


def test_many_leaves_after_a_long_past():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((length, 3)) for length in (1500, 3000, 3000))
    for _ in range(2):
        got, want = (f(q, k, v, causal=True) for f in (linear_attention, naive.linear_attention))
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-12)
        k[:100] = 1e200  # a past that is scaled, and leaves that are not


@pytest.mark.parametrize("n", [2000, 4100])
def test_the_last_of_many_tokens_leaves_every_bit(n):
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, n, 3))
    before = linear_attention(q, k, v, causal=True)
    for edit in (np.nan, 1e200, -np.inf):
        k[-1] = edit
        np.testing.assert_array_equal(linear_attention(q, k, v, causal=True)[:-1], before[:-1])


def test_exponents_that_are_near_on_one_side_only():
    """Products of two features, each of which is a number, underflow."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((60, 1)) + shift for shift in (-30.0, -20.0, 0.0))
    options = {"omega": np.array([[13.0], [12.5]]), "scale": 1.0, "causal": True}
    got = random_feature_attention(q, k, v, **options)
    want = naive.random_feature_attention(*(x.astype(np.longdouble) for x in (q, k, v)), **options)
    bound = reference.CONTRACT * np.finfo(float).eps * (1 + 13 * 60 + 300)
    assert np.max(np.abs(got - want)) / np.max(np.abs(v)) <= bound


def test_a_query_without_a_positive_part_has_no_mean():
    q, k, v = np.full((60, 2), -1.0), np.ones((60, 2)), np.ones((60, 1))
    for causal in (False, True):
        with np.errstate(all="ignore"):
            got = linear_attention(q, k, v, feature_map=relu_features, causal=causal)
        assert np.isnan(got).all()


@pytest.mark.parametrize("n", [10, 48, 96, 150])
def test_a_map_may_return_the_same_array_at_each_call(n):
    room = {}

    def into_one(x):
        values = room.setdefault(x.shape, np.empty(x.shape))
        values[...] = np.exp(x)
        return values

    q, k, v = np.random.default_rng(0).standard_normal((3, n, 4))
    full = np.tri(n, dtype=bool)
    for options in ({}, {"causal": True}, {"mask": full}, {"mask": full, "causal": True}):
        got, want = (
            linear_attention(q, k, v, feature_map=f, **options) for f in (into_one, np.exp)
        )
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", [2**12, 2**17, 2**18 + 1])
@pytest.mark.parametrize("value", [0.7, 1 / 3])
def test_sums_of_many_nearly_equal_values_lose_few_digits(n, value, dtype):
    """A state is the sum of few sums, of which each is the sum of few."""
    q, v = np.zeros((n, 1), dtype), np.full((n, 1), value, dtype)
    v[1::2] *= dtype(0.9)
    got = linear_attention(q, q, v, causal=True)
    count, (odd, even) = np.arange(1, n + 1)[:, None], v[:2].astype(np.longdouble)
    want = ((count + 1) // 2 * odd + count // 2 * even) / count
    eps = float(np.finfo(dtype).eps) * float(odd[0])
    assert float(np.max(np.abs(got - want))) <= reference.CONTRACT * eps


@pytest.mark.parametrize("count", [1, 6, 7, 8, 14, 15, 48, 49, 50, 343, 344, 2402])
def test_sums_of_arrays_are_those_of_states(count):
    """To the bit, since a base that is needed later must not change what is there."""
    rng = np.random.default_rng(count)
    first, own = rng.standard_normal((2, 3, 4)), rng.standard_normal((2, count, 3, 4))
    want, last = signed._in_groups(operator.add, first, [own[:, t] for t in range(count)])
    got, total = signed._sums_in_groups(first, own.copy(), Workspace())
    np.testing.assert_array_equal(got, np.stack(want, axis=1))
    np.testing.assert_array_equal(total, last)
    np.testing.assert_allclose(total, own.sum(axis=1), rtol=1e-10, atol=1e-10)
