"""Pullbacks: slopes, laws, array libraries, automatic differentiation."""

from functools import partial
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from threadpoolctl import threadpool_limits

import refattn
from refattn import sampled_key_attention, sampling, softmax_attention
from refattn.engine import signed_back
from refattn.gradients import Gradients, vjp
from tests.cases import CASES, LARA, LOCAL, RFA, agrees, differentiable, pulled, those
from tests.conftest import Host

BOTH = pytest.mark.parametrize("causal", [False, True])
every_case = those("vjp")
FEW = [x for x in CASES if x.split()[0] in ("local", "eva", "second", "sampled")]
FEW = [x for x in FEW if "drawn" not in x]
D, D_V = 3, 2


def names(*some):
    return pytest.mark.parametrize("name", some)


def plain(rng, n, m, heads=()):
    shapes = ((n, D), (m, D), (m, D_V))
    return {x: rng.standard_normal((*heads, *y)) for x, y in zip("qkv", shapes, strict=True)}


# --- slopes of formulas ---------------------------------------------------------------------------


SIZES = [(1, 1), (3, 9), (9, 3), (65, 65), (200, 131), (131, 330), (331, 70)]


@pytest.mark.sweep(4)
@pytest.mark.long("sampled keys", "sampled keys alike", "(331, 70)", "False+(131, 330)")
@pytest.mark.parametrize("size", SIZES, ids=str)
@BOTH
@names(
    *("softmax", "rfa positive", "rfa trigonometric", "lara own", "lara balance", "linear"),
    *("linear relu", *FEW),
)
def test_slopes_of_many_tokens(name, causal, size):
    """Past leaves and steps of the causal forms, ragged ends, queries before the first key."""
    if causal and "causal" in CASES[name].lacks:
        pytest.skip("it does not take it")
    seed = 4 + 2 * SIZES.index(size) + causal  # which draw every window
    case, arrays, options, rng = differentiable(name, "none", *size, "none", causal, seed)
    agrees(case.fn, case.formula, arrays, options, rng, each=False)


GAUGE = np.eye(D) + 0.2 * np.random.default_rng(0).standard_normal((4, D, D))
GAUGED = {"proposal": sampling.Gaussian(np.zeros(D), gauge=GAUGE), "rng": 0}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        (RFA, {"square_norms": (1.0, 1.0)}),
        (RFA, {"square_norms": (1.0, 1.0), "features": "trigonometric"}),
        (RFA, {"num_features": 6, **GAUGED}),
        (LARA, {"num_proposals": 3, **GAUGED}),
        (LOCAL, {"window": (2, 1), "num_features": 5, **GAUGED}),
    ],
)
def test_slopes_of_what_has_no_formula_of_its_own(name, options):
    """Without norms, and in gauges of heads."""
    rng, fn = np.random.default_rng(0), getattr(refattn, name)
    arrays = plain(rng, 11, 13, (4,))
    if "proposal" not in options:
        arrays["omega"], arrays["log_weight"] = rng.standard_normal((6, D)), rng.standard_normal(6)
        arrays |= {x: arrays[x][:2] for x in "kv"}
    elif name != LOCAL:
        arrays["q"] = arrays["q"][0]  # of which heads with gauges of their own make four
    agrees(fn, fn, arrays, options, rng)


# --- laws -----------------------------------------------------------------------------------------


@pytest.mark.sweep(5)
@every_case
def test_what_is_hidden_takes_nothing(name):
    """Masked and future keys, with numbers of any size in them, and queries that see no key."""
    case, arrays, options, rng = differentiable(name, "grouped", 11, 13)
    options["mask"] = np.arange(13) != 5
    d_out = rng.standard_normal(case.fn(**arrays, **options).shape)
    clean = pulled(case.fn, arrays, d_out, **options)
    for value in (np.nan, np.inf, -np.inf, 1e30, np.finfo(float).max):
        arrays["k"][..., 5, :], arrays["v"][..., 5, :] = value, value
        found = pulled(case.fn, arrays, d_out, **options)
        for which, x in found.items():
            np.testing.assert_array_equal(x, clean[which])
    assert not found["k"][..., 5, :].any()
    assert not found["v"][..., 5, :].any()
    if "causal" in case.lacks:
        return
    case, arrays, options, rng = differentiable(name, "grouped", 13, 11, causal=True)
    d_out = rng.standard_normal(case.fn(**arrays, **options).shape)
    found = pulled(case.fn, arrays, d_out, **options)
    # LARA makes proposals of all queries.
    assert not found["q"][..., :2, :].any() or name.startswith("lara")
    assert all(np.isfinite(x).all() for x in found.values())
    d_out[..., 6:, :] = 0.0  # queries 2 to 5 see keys 0 to 3
    found = pulled(case.fn, arrays, d_out, **options)
    assert not found["v"][..., 4:, :].any()
    assert not found["k"][..., 4:, :].any()


@names("softmax", "rfa positive", "linear", "rfa trigonometric")
def test_nan_goes_where_it_is_seen(name):
    """A query takes its own cotangent, and those of the keys that it sees; the future none."""
    case, arrays, options, rng = differentiable(name, n=150, m=150, causal=True)
    d_out = rng.standard_normal(arrays["v"].shape)
    clean = pulled(case.fn, arrays, d_out, **options)["q"]
    for t in (149, 100, 70):
        arrays["k"][t:], arrays["v"][t:] = np.nan, np.inf
        found = pulled(case.fn, arrays, d_out, **options)["q"]
        np.testing.assert_allclose(found[:t], clean[:t], rtol=1e-9, atol=1e-12)
    if name == "rfa trigonometric":
        return
    case, arrays, options, _ = differentiable(name, n=6, m=6, causal=True)
    arrays["q"][1] = np.nan
    found = pulled(case.fn, arrays, np.ones(arrays["v"].shape), **options)
    for x, rows in (("q", [1]), ("k", [0, 1]), ("v", [0, 1])):
        assert np.flatnonzero(np.isnan(found[x]).any(-1)).tolist() == rows, x


@pytest.mark.sweep(3)
@every_case
def test_no_keys_no_queries_and_none_seen(name):
    lacks = CASES[name].lacks
    for n, m in ((0, 3), (3, 0), (0, 0), (11, 13)):
        if ("no-tokens" in lacks and 0 in (n, m)) or ("no-keys" in lacks and m == 0):
            continue
        case, arrays, options, _ = differentiable(name, "grouped", n, m)
        options["mask"] = np.zeros(m, bool)
        d_out = np.ones(case.fn(**arrays, **options).shape)
        some = [{}, {"mask": np.zeros((n, m), bool)}][: 1 + ("rows" not in lacks)]
        some += [{"mask": None}] * (0 in (n, m))
        some += [{"causal": True}] * ("causal" not in lacks)
        for more in some:
            for which, x in pulled(case.fn, arrays, d_out, **options | more).items():
                assert x.shape == arrays[which].shape
                assert not x.any()


def test_laws_of_exact_attention():
    rng = np.random.default_rng(0)
    arrays = plain(rng, 11, 13, (4,)) | {"bias": rng.standard_normal((4, 11, 13))}
    d_out = rng.standard_normal((4, 11, D_V))
    found = pulled(softmax_attention, arrays, d_out, causal=True)
    # A shift of all keys, or of a row of scores, moves nothing.
    np.testing.assert_allclose(np.sum(found["bias"], -1), 0.0, atol=1e-14)
    # Scores are of degree 1 in queries and in keys.
    np.testing.assert_allclose(*(np.sum(found[x] * arrays[x], (-1, -2)) for x in "qk"), atol=1e-13)
    assert not found["bias"][:, ~np.tri(11, 13, 2, dtype=bool)].any()
    # The same cotangent for constant values takes nothing but values.
    arrays["v"] = np.ones((4, 13, D_V))
    found = pulled(softmax_attention, arrays, d_out, causal=True)
    for x in ("q", "k", "bias"):
        np.testing.assert_allclose(found[x], 0.0, atol=1e-14)
    np.testing.assert_allclose(np.sum(found["v"], -2), np.sum(d_out, -2))


@pytest.mark.sweep(2)
@every_case
def test_pullbacks_are_linear_in_cotangents(name):
    case, arrays, options, rng = differentiable(name, "grouped", 11, 13)
    a, b = rng.standard_normal((2, *case.fn(**arrays, **options).shape))
    whole, *parts = (pulled(case.fn, arrays, x, **options) for x in (a - 2 * b, a, b))
    for which, x in whole.items():
        want = parts[0][which] - 2 * parts[1][which]
        np.testing.assert_allclose(x, want, rtol=1e-9, atol=1e-11 * (1 + np.max(np.abs(want))))


@pytest.mark.sweep(3)
@those("vjp", "formula")
def test_broadcast_axes_are_summed(name):
    """What heads share takes the sum of what copies for each of them take."""
    case, arrays, options, rng = differentiable(name, n=11, m=13)
    copies = {x: np.broadcast_to(y, (2, 3, *y.shape)).copy() for x, y in arrays.items()}
    d_out = rng.standard_normal((2, 3, 11, arrays["v"].shape[-1]))
    for own in ({"q"}, {"k"}, {"k", "v"}, {"omega", "v"}):  # the arrays that heads do not share
        if not own <= {*arrays}:
            continue
        apart = {x: rng.standard_normal(copies[x].shape) for x in sorted(own)}
        if name == "linear relu":
            apart = {x: np.abs(y) for x, y in apart.items()}
        each = pulled(case.fn, copies | apart, d_out, **options)
        for x, y in pulled(case.fn, arrays | apart, d_out, **options).items():
            want = each[x] if x in own else np.sum(each[x], (0, 1))
            atol = 1e-10 * np.max(np.abs(want), initial=1)
            np.testing.assert_allclose(y, want, rtol=1e-8, atol=atol)


def test_places_of_one_key_are_added():
    """A sample with a key many times weighs it as often, and its cotangents are the sums."""
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal(shape) for shape in ((5, D), (3, D), (3, D_V)))
    d_out, indices = rng.standard_normal((5, D_V)), rng.integers(0, 3, (5, 400))
    found = vjp(sampled_key_attention, q, k, v, indices=indices)[1](d_out)
    count = np.stack([np.bincount(row, minlength=3) for row in indices])
    want = vjp(softmax_attention, q, k, v, bias=np.log(count))[1](d_out)
    for x, y in zip(found[:3], want[:3], strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-13)


def test_the_cotangent_of_normalisers_alone_gives_weights_and_both_add_up():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(shape) for shape in ((5, 3), (7, 3), (7, 2)))
    (_, lse), pullback = vjp(refattn.attend, q, k, v, causal=True)
    np.testing.assert_array_equal(lse, refattn.attend(q, k, v, causal=True).lse)
    weights = np.exp(np.where(np.tri(5, 7, 2, dtype=bool), q @ k.T, -np.inf) - lse[:, None])
    d_lse, d_out = rng.standard_normal(5), rng.standard_normal((5, 2))
    of_lse, of_out = pullback((None, d_lse)), pullback((d_out, None))
    np.testing.assert_allclose(of_lse.q, (d_lse[:, None] * weights) @ k, atol=1e-14)
    assert not of_lse.v.any()
    of_both = pullback((d_out, d_lse))
    for a, b, c in zip(of_lse[:3], of_out[:3], of_both[:3], strict=True):
        np.testing.assert_allclose(a + b, c, atol=1e-14)


@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.sampled_from([1e-150, 1e-20, 1.0, 30.0, 1e3, 1e5]),
    causal=st.booleans(),
    name=st.sampled_from(["softmax", "rfa positive", "rfa hyperbolic", "linear"]),
)
def test_cotangents_are_finite_wherever_results_are(seed, size, causal, name):
    n, m = (int(x) for x in np.random.default_rng(seed).integers(1, 40, 2))
    where = (name, "none", n, m, "none", causal, seed)
    case, arrays, options, rng = differentiable(*where, size=size)
    out = vjp(case.fn, **arrays, **options)[0]
    assume(np.isfinite(out).all())  # features of elu may all underflow
    for which, x in pulled(case.fn, arrays, rng.standard_normal(out.shape), **options).items():
        assert np.isfinite(x).all(), which


@BOTH
@names("softmax", "rfa positive", "is", "lara balance", "linear")
def test_longdouble_stays_longdouble(name, causal):
    long = np.dtype(np.longdouble)
    case, arrays, options, rng = differentiable(name, "grouped", causal=causal, dtype=long)
    d_out = rng.standard_normal(case.fn(**arrays, **options).shape)
    got = pulled(case.fn, arrays, d_out.astype(long), **options)
    low = {x: y.astype(float) for x, y in arrays.items()}
    want = pulled(case.fn, low, d_out, **options)
    for x, y in got.items():
        assert y.dtype == long
        np.testing.assert_allclose(y.astype(float), want[x], rtol=1e-9, atol=1e-12)


@pytest.mark.sweep(3)
@pytest.mark.long("softmax+False")
@BOTH
@names("softmax", "rfa positive", "linear")
def test_threads_and_repetition_leave_every_bit(name, causal):
    case, arrays, options, rng = differentiable(name, "grouped", 700, 700, causal=causal)
    d_out, found = rng.standard_normal(case.fn(**arrays, **options).shape), []
    for count in (1, 2, 3):
        with threadpool_limits(count, user_api="blas"):
            found.append(pulled(case.fn, arrays, d_out, **options))
    for other in found[1:]:
        for x, y in other.items():
            np.testing.assert_array_equal(y, found[0][x])


@BOTH
@names("softmax", "rfa positive", "rfa trigonometric", "is", "lara drawn")
def test_outputs_may_be_written_to(name, causal):
    """What the pullback needs it keeps for itself."""
    case, arrays, options, rng = differentiable(name, n=300, m=300, causal=causal)
    d_out = rng.standard_normal(arrays["v"].shape)
    out, pullback = vjp(case.fn, **arrays, **options)
    want = vjp(case.fn, **arrays, **options)[1](d_out)
    out += 1.0
    for x, y in zip(pullback(d_out), want, strict=True):
        assert (x is None and y is None) or np.array_equal(x, y)


def test_options_may_be_bound_to_the_function():
    arrays, fn = plain(np.random.default_rng(0), 11, 13), softmax_attention
    d_out = np.ones((11, D_V))
    want = vjp(fn, **arrays, scale=np.float64(0.2), causal=True)[1](d_out)
    got = vjp(partial(partial(fn, scale=0.5, causal=True), scale=0.2), **arrays)[1](d_out)
    assert isinstance(got, Gradients)
    np.testing.assert_array_equal(got.q, want.q)


# --- libraries ------------------------------------------------------------------------------------


@pytest.mark.sweep(6)
@pytest.mark.soak("queries, centres", "linear taylor", "mean of ratios")
@pytest.mark.long("jax", "dask", "array_api_strict")
@BOTH
@names(
    *("softmax", "rfa positive", "rfa trigonometric", "is", "mean of ratios", "lara own"),
    *("lara balance", "lara query-over-queries, centres", "linear", "linear taylor"),
    *("sampled keys", "local", "eva", "eva mean", "second order"),
)
def test_every_library_agrees_with_numpy(backend, name, causal):
    if causal and "causal" in CASES[name].lacks:
        pytest.skip("it does not take it")
    n, m = (40, 45) if name not in FEW else (6, 9) if backend.name == "dask" else (20, 25)
    case, arrays, options, rng = differentiable(name, "grouped", n, m, "keys", causal)
    d_out = rng.standard_normal(case.fn(**arrays, **options).shape)
    want = pulled(case.fn, arrays, d_out, **options)

    def pull(q, k, v, d_out, **given):
        return vjp(case.fn, q, k, v, **given)[1](d_out)

    held = {x: Host(y) if x in ("indices", "centres") else y for x, y in options.items()}
    got = backend.call(pull, **arrays, d_out=d_out, **held)
    for which, x in want.items():
        np.testing.assert_allclose(getattr(got, which), x, rtol=1e-9, atol=1e-11)


TRACED = ("softmax", "rfa positive", "rfa trigonometric", "is", "lara balance")


@pytest.mark.sweep(4)
@BOTH
@pytest.mark.parametrize(
    ("name", "seen"),
    [
        *((name, None) for name, case in CASES.items() if "vjp" not in case.lacks),
        *product(TRACED, (3, 0)),  # of ten keys
    ],
)
def test_torch_differentiates(torch, name, causal, seen):
    """The functions and formulas by automatic differentiation, and pullbacks of tensors."""
    if causal and "causal" in CASES[name].lacks:
        pytest.skip("it does not take it")
    case, arrays, options, rng = differentiable(name, "grouped", 9, 10, causal=causal)
    options |= {} if seen is None else {"mask": np.arange(10) < seen}
    d_out = rng.standard_normal(case.fn(**arrays, **options).shape)
    want = pulled(case.fn, arrays, d_out, **options)
    named = {x: torch.tensor(y) if isinstance(y, np.ndarray) else y for x, y in options.items()}
    for function in {case.fn} if "formula" in case.lacks else {case.fn, case.formula}:
        given = {x: torch.tensor(y, requires_grad=True) for x, y in arrays.items()}
        (function(**given, **named) * torch.tensor(d_out)).sum().backward()
        for x, y in given.items():
            own = np.zeros(y.shape) if y.grad is None else y.grad.numpy()
            np.testing.assert_allclose(own, want[x], rtol=1e-8, atol=1e-10)
    held = {x: torch.tensor(y) for x, y in arrays.items()}
    for x, y in pulled(case.fn, held, torch.tensor(d_out), **named).items():
        np.testing.assert_allclose(y.numpy(), want[x], rtol=1e-8, atol=1e-10)


@pytest.mark.sweep(3)
@BOTH
@names("softmax", "rfa positive", "rfa trigonometric", "linear")
def test_torch_differentiates_twice(torch, name, causal):
    case, arrays, options, _ = differentiable(name, n=3, m=4, causal=causal)
    given = [torch.tensor(x, requires_grad=True) for x in arrays.values()]

    def attention(*tensors):
        return case.fn(**dict(zip(arrays, tensors, strict=True)), **options)

    assert torch.autograd.gradcheck(attention, given)
    assert torch.autograd.gradgradcheck(attention, given)


@pytest.mark.long
@BOTH
@names(*TRACED, "rfa hyperbolic", "linear")
def test_jax_differentiates(jax, name, causal):
    """Under grad, vmap over heads and jit; and where an array that is traced has no device."""
    case, arrays, options, rng = differentiable(name, n=9, m=10, causal=causal)
    arrays = {x: y + 0.1 * rng.standard_normal((4, *y.shape)) for x, y in arrays.items()}
    d_out = rng.standard_normal((4, 9, arrays["v"].shape[-1]))
    want = pulled(case.fn, arrays, d_out, **options)

    def loss(given, d_out):
        return jax.numpy.sum(case.fn(**given, **options) * d_out)

    losses, got = jax.jit(jax.vmap(jax.value_and_grad(loss)))(arrays, d_out)
    np.testing.assert_allclose(losses.sum(), np.sum(case.fn(**arrays, **options) * d_out))
    rest = {x: jax.numpy.asarray(y) for x, y in arrays.items()}
    got["q beside concrete arrays"] = jax.grad(lambda q: loss(rest | {"q": q}, d_out))(rest["q"])
    for x, y in got.items():
        np.testing.assert_allclose(y, want[x.split()[0]], rtol=1e-8, atol=1e-10)


@pytest.mark.long
@those("vjp", "formula")
def test_jax_differentiates_the_formula(jax, name):
    """And pullbacks of JAX's arrays agree."""
    case, arrays, options, rng = differentiable(name, n=11, m=13)
    d_out = rng.standard_normal((11, arrays["v"].shape[-1]))
    want = pulled(case.fn, arrays, d_out, **options)
    named = {
        x: jax.numpy.asarray(y) if isinstance(y, np.ndarray) else y for x, y in options.items()
    }

    def loss(given):
        return jax.numpy.sum(case.formula(**given, **named) * d_out)

    held = {x: jax.numpy.asarray(y) for x, y in arrays.items()}
    for found in (jax.grad(loss)(held), pulled(case.fn, held, jax.numpy.asarray(d_out), **named)):
        for x, y in found.items():
            np.testing.assert_allclose(y, want[x], rtol=1e-8, atol=1e-10)


def test_leaves_of_tokens_without_heads(monkeypatch):
    """Where pairs are evaluated one by one, in libraries other than NumPy, and a few at a time."""
    xp = pytest.importorskip("array_api_strict")
    monkeypatch.setattr(signed_back, "block_shape", lambda *_: (1, 1))  # one at a time
    case, arrays, options, rng = differentiable("rfa positive", "none", n=20, m=20, causal=True)
    d_out = rng.standard_normal(arrays["v"].shape)
    want = pulled(case.fn, arrays, d_out, **options)
    held = {x: xp.asarray(y) for x, y in arrays.items()}
    got = pulled(case.fn, held, xp.asarray(d_out), **options)
    for x, y in want.items():
        np.testing.assert_allclose(np.asarray(got[x]), y, rtol=1e-9, atol=1e-11)


def test_causal_lara_of_an_empty_batch():
    q, k, v = np.ones((3, 0, 4, 2))
    options = {"num_proposals": 2, "causal": True, "rng": 0}
    out, pullback = vjp(refattn.linear_randomized_attention, q, k, v, **options)
    assert [x.shape for x in (out, *pullback(out)[:3])] == [(0, 4, 2)] * 4
