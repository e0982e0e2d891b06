"""Pullbacks: slopes of formulas, laws, array libraries, automatic differentiation."""

from functools import partial

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from threadpoolctl import threadpool_limits

import refattn
from refattn import sampling
from refattn.gradients import Gradients, vjp
from tests.conftest import Host
from tests.gradients.cases import (
    CASES,
    D_V,
    EVA,
    FEW,
    LARA,
    LOCAL,
    LONG,
    RFA,
    SAMPLED,
    SOFTMAX,
    C,
    D,
    M,
    N,
    S,
    W,
    agrees,
    of_formula,
    problem,
    pulled,
)

MASKS = {"none": None, "keys": lambda n, m: (m,), "each": lambda n, m: (4, n, m)}
BOTH = pytest.mark.parametrize("causal", [False, True])
every_case = pytest.mark.parametrize("name", CASES)


def case_of(name, causal=False, mask="none"):
    if not CASES[name].takes(causal, mask):
        pytest.skip("it does not take it")
    return CASES[name]


# --- slopes of formulas ---------------------------------------------------------------------------


LAWS = {  # of which `tests/test_laws.py` has the slopes
    *("softmax", "softmax window", "softmax capped", "softmax sinks", "positive", "hyperbolic"),
    *("trigonometric", "importance", "mean of ratios", "lara own", "lara balance", "lara query"),
    *("lara query-over-queries", "lara centres", "lara drawn own", "linear elu"),
    *("linear elu of slope", "linear taylor", "sample for each", "eva given", "second", "local"),
}


@pytest.mark.parametrize("mask", MASKS)
@BOTH
@pytest.mark.parametrize("name", [x for x in CASES if x not in LAWS])
def test_slopes_of_formulas(name, causal, mask):
    """Grouped heads, frequencies that heads share, and more keys than queries or fewer."""
    case, rng = case_of(name, causal, mask), np.random.default_rng([len(name), causal, len(mask)])
    n, m = (M, N) if causal else (N, M)
    arrays, options = problem(case, rng, n, m)
    options |= {"causal": True} if causal else {}
    if MASKS[mask] is not None:
        options["mask"] = rng.random(MASKS[mask](n, m)) < 0.7
    agrees(case.fn, case.formula, arrays, options, rng, each=True)


MANY = ["softmax", "positive", "trigonometric", "lara own", "lara balance", "linear elu", *FEW]


@pytest.mark.long("sample for each", "sample of equals")
@pytest.mark.parametrize(
    ("n", "m"), [(1, 1), (3, 9), (9, 3), (65, 65), (200, 131), (131, 330), (331, 70)]
)
@BOTH
@pytest.mark.parametrize("name", MANY)
def test_slopes_of_many_tokens(name, causal, n, m):
    """Past leaves and steps of the causal forms, ragged ends, queries before the first key."""
    case, rng = case_of(name, causal), np.random.default_rng([n, m, causal])
    options = {"causal": causal} if case.causal else {}
    if case.fn is LARA:
        count = min(n, m, C)
        case = case._replace(shapes={"omega": (2 * count, D)})
        options["num_proposals"] = count
    arrays, own = problem(case, rng, n, m, heads=None)
    agrees(case.fn, case.formula, arrays, own | options, rng)


GAUGE = np.eye(D) + 0.2 * np.random.default_rng(0).standard_normal((4, D, D))
GAUGED = {"proposal": sampling.Gaussian(np.zeros(D), gauge=GAUGE), "rng": 0}
BESIDE = {"window": (2, 1), "num_features": 5, "rng": 1}


@pytest.mark.parametrize(
    ("fn", "arrays", "options"),
    [
        (RFA, "positive", {"square_norms": (1.0, 1.0)}),
        (RFA, "positive", {"square_norms": (1.0, 1.0), "features": "trigonometric"}),
        (RFA, "softmax", {"num_features": S, **GAUGED}),
        (LARA, "softmax", {"num_proposals": C, **GAUGED}),
        (LOCAL, "softmax", {**BESIDE, **GAUGED}),
        (LOCAL, "softmax", BESIDE),
        (EVA, "softmax", {"window": W, "rng": 1}),
        (EVA, "softmax", {"window": W, "rng": 1, "causal": True, "scale": 0.3}),
    ],
)
def test_slopes_of_what_has_no_formula_of_its_own(fn, arrays, options):
    """Without norms, in gauges of heads, and with frequencies that are drawn at means of chunks."""
    rng, gauged = np.random.default_rng(0), "proposal" in options
    arrays, _ = problem(CASES[arrays], rng, heads=(4, 4 if gauged else 2))
    if gauged and fn is not LOCAL:
        arrays["q"] = arrays["q"][0]  # of which heads with gauges of their own make four
    agrees(fn, fn, arrays, options, rng, each=True)


# --- laws -----------------------------------------------------------------------------------------


@every_case
def test_what_is_hidden_takes_nothing(name):
    """Masked and future keys, with nan in them, and queries that see no key."""
    case, rng = CASES[name], np.random.default_rng(0)
    arrays, options = problem(case, rng, heads=(2, 2))
    options["mask"] = np.arange(M) != 5
    d_out = rng.standard_normal((2, N, D_V))
    clean = pulled(case.fn, arrays, d_out, **options)
    arrays["k"][:, 5], arrays["v"][:, 5] = np.nan, np.nan
    found = pulled(case.fn, arrays, d_out, **options)
    for which, x in found.items():
        np.testing.assert_array_equal(x, clean[which])
    assert not found["k"][:, 5].any()
    assert not found["v"][:, 5].any()
    if not case.causal:
        return
    arrays, options = problem(case, rng, M, N, heads=(2, 2))
    d_out = rng.standard_normal((2, M, D_V))
    found = pulled(case.fn, arrays, d_out, **options, causal=True)
    # LARA makes proposals of all queries.
    assert not found["q"][:, :2].any() or case.fn is LARA
    assert all(np.isfinite(x).all() for x in found.values())
    d_out[:, 6:] = 0.0  # queries 2 to 5 see keys 0 to 3
    found = pulled(case.fn, arrays, d_out, **options, causal=True)
    assert not found["v"][:, 4:].any()
    assert not found["k"][:, 4:].any()


@pytest.mark.parametrize("name", ["softmax", "positive", "linear elu", "trigonometric"])
def test_nan_goes_where_it_is_seen(name):
    """A query takes its own cotangent, and those of the keys that it sees; the future none."""
    case, rng = CASES[name], np.random.default_rng(0)
    arrays, options = problem(case, rng, 150, 150, heads=None)
    d_out = rng.standard_normal((150, D_V))
    clean = pulled(case.fn, arrays, d_out, **options, causal=True)["q"]
    for t in (149, 100, 70):
        arrays["k"][t:], arrays["v"][t:] = np.nan, np.inf
        found = pulled(case.fn, arrays, d_out, **options, causal=True)["q"]
        np.testing.assert_allclose(found[:t], clean[:t], rtol=1e-9, atol=1e-12)
    if name == "trigonometric":
        return
    arrays, options = problem(case, rng, 6, 6, heads=None)
    arrays["q"][1] = np.nan
    found = pulled(case.fn, arrays, np.ones((6, D_V)), **options, causal=True)
    for x, rows in (("q", [1]), ("k", [0, 1]), ("v", [0, 1])):
        assert np.flatnonzero(np.isnan(found[x]).any(-1)).tolist() == rows, x


@every_case
def test_no_keys_no_queries_and_none_seen(name):
    case, rng = CASES[name], np.random.default_rng(0)
    problems = [((0, 3), {}), ((3, 0), {}), ((0, 0), {}), ((N, M), {"mask": np.zeros(M, bool)})]
    for (n, m), more in problems:
        if (case.fn is LARA and "centres" not in case.options) and 0 in (n, m):
            continue  # chunks of no tokens
        if case.fn is SAMPLED and m == 0:
            continue  # no key to sample
        arrays, options = problem(case, rng, n, m)
        found = pulled(case.fn, arrays, np.ones((4, n, D_V)), **options, **more)
        for which, x in found.items():
            assert x.shape == arrays[which].shape
            assert not x.any()


def test_laws_of_exact_attention():
    rng = np.random.default_rng(0)
    arrays, _ = problem(CASES["softmax"], rng, heads=(4, 4))
    arrays["bias"] = rng.standard_normal((4, N, M))
    d_out = rng.standard_normal((4, N, D_V))
    found = pulled(SOFTMAX, arrays, d_out, causal=True)
    # A shift of all keys, or of a row of scores, moves nothing.
    np.testing.assert_allclose(np.sum(found["bias"], -1), 0.0, atol=1e-14)
    # Scores are of degree 1 in queries and in keys.
    np.testing.assert_allclose(*(np.sum(found[x] * arrays[x], (-1, -2)) for x in "qk"), atol=1e-13)
    assert not found["bias"][:, ~np.tri(N, M, 2, dtype=bool)].any()
    # The same cotangent for constant values takes nothing but values.
    arrays["v"] = np.ones((4, M, D_V))
    found = pulled(SOFTMAX, arrays, d_out, causal=True)
    for x in ("q", "k", "bias"):
        np.testing.assert_allclose(found[x], 0.0, atol=1e-14)
    np.testing.assert_allclose(np.sum(found["v"], -2), np.sum(d_out, -2))


@every_case
def test_pullbacks_are_linear_in_cotangents(name):
    case, rng = CASES[name], np.random.default_rng(0)
    arrays, options = problem(case, rng)
    a, b = rng.standard_normal((2, 4, N, D_V))
    whole, *parts = (pulled(case.fn, arrays, x, **options) for x in (a - 2 * b, a, b))
    for which, x in whole.items():
        want = parts[0][which] - 2 * parts[1][which]
        np.testing.assert_allclose(x, want, rtol=1e-9, atol=1e-11 * (1 + np.max(np.abs(want))))


@pytest.mark.parametrize("name", [x for x, case in CASES.items() if "rng" not in case.options])
def test_broadcast_axes_are_summed(name):
    """What heads share takes the sum of what copies for each of them take."""
    case, rng = CASES[name], np.random.default_rng(0)
    arrays, options = problem(case, rng, heads=None)
    if case.fn is SAMPLED:
        options |= {x: y[None, None] for x, y in options.items() if y.ndim == 2}  # of each query
    copies = {x: np.broadcast_to(y, (2, 3, *y.shape)).copy() for x, y in arrays.items()}
    d_out = rng.standard_normal((2, 3, N, D_V))
    for own in ({"q"}, {"k"}, {"k", "v"}, {"omega", "v"}):  # the arrays that heads do not share
        if not own <= {*arrays}:
            continue
        drawn = {x: rng.standard_normal(copies[x].shape) for x in sorted(own)}
        if case.positive:
            drawn = {x: np.abs(y) for x, y in drawn.items()}
        apart = pulled(case.fn, copies | drawn, d_out, **options)
        for x, y in pulled(case.fn, arrays | drawn, d_out, **options).items():
            want = apart[x] if x in own else np.sum(apart[x], (0, 1))
            atol = 1e-10 * np.max(np.abs(want), initial=1)
            np.testing.assert_allclose(y, want, rtol=1e-8, atol=atol)


def test_places_of_one_key_are_added():
    """A sample with a key many times weighs it as often, and its cotangents are the sums."""
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal(shape) for shape in ((5, D), (3, D), (3, D_V)))
    d_out, indices = rng.standard_normal((5, D_V)), rng.integers(0, 3, (5, 400))
    found = vjp(SAMPLED, q, k, v, indices=indices)[1](d_out)
    count = np.stack([np.bincount(row, minlength=3) for row in indices])
    want = vjp(SOFTMAX, q, k, v, bias=np.log(count))[1](d_out)
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
    name=st.sampled_from(["softmax", "positive", "hyperbolic", "linear elu"]),
)
def test_cotangents_are_finite_wherever_results_are(seed, size, causal, name):
    case, rng = CASES[name], np.random.default_rng(seed)
    n, m = (int(x) for x in rng.integers(1, 40, 2))
    arrays, options = problem(case, rng, n, m, heads=None, size=size)
    out = vjp(case.fn, **arrays, **options, causal=causal)[0]
    assume(np.isfinite(out).all())  # features of elu may all underflow
    found = pulled(case.fn, arrays, rng.standard_normal(out.shape), **options, causal=causal)
    for which, x in found.items():
        assert np.isfinite(x).all(), which


@BOTH
@pytest.mark.parametrize(
    "name", ["softmax", "positive", "importance", "lara balance", "linear elu"]
)
def test_longdouble_stays_longdouble(name, causal):
    case = CASES[name]
    arrays, options = problem(case, np.random.default_rng(0), dtype=LONG)
    d_out = np.random.default_rng(1).standard_normal((4, N, D_V))
    got = pulled(case.fn, arrays, d_out.astype(LONG), **options, causal=causal)
    low = {x: y.astype(float) for x, y in arrays.items()}
    want = pulled(case.fn, low, d_out, **options, causal=causal)
    for x, y in got.items():
        assert y.dtype == LONG
        np.testing.assert_allclose(y.astype(float), want[x], rtol=1e-9, atol=1e-12)


@BOTH
@pytest.mark.parametrize("name", ["softmax", "positive", "linear elu"])
def test_threads_and_repetition_leave_every_bit(name, causal):
    case, rng, found = CASES[name], np.random.default_rng(0), []
    arrays, options = problem(case, rng, 700, 700, heads=(4, 2))
    d_out = rng.standard_normal((4, 700, D_V))
    for count in (1, 2, 3):
        with threadpool_limits(count, user_api="blas"):
            found.append(pulled(case.fn, arrays, d_out, **options, causal=causal))
    for other in found[1:]:
        for x, y in other.items():
            np.testing.assert_array_equal(y, found[0][x])


@BOTH
@pytest.mark.parametrize(
    "name", ["softmax", "positive", "trigonometric", "importance", "lara drawn own"]
)
def test_outputs_may_be_written_to(name, causal):
    """What the pullback needs it keeps for itself."""
    case, rng = CASES[name], np.random.default_rng(0)
    arrays, options = problem(case, rng, 300, 300, heads=None)
    d_out = rng.standard_normal((300, D_V))
    out, pullback = vjp(case.fn, **arrays, **options, causal=causal)
    want = vjp(case.fn, **arrays, **options, causal=causal)[1](d_out)
    out += 1.0
    for x, y in zip(pullback(d_out), want, strict=True):
        assert (x is None and y is None) or np.array_equal(x, y)


def test_options_may_be_bound_to_the_function():
    arrays, _ = problem(CASES["softmax"], np.random.default_rng(0))
    d_out = np.ones((4, N, D_V))
    want = vjp(SOFTMAX, **arrays, scale=0.2, causal=True)[1](d_out)
    got = vjp(partial(partial(SOFTMAX, scale=0.5, causal=True), scale=0.2), **arrays)[1](d_out)
    assert isinstance(got, Gradients)
    np.testing.assert_array_equal(got.q, want.q)


# --- libraries ------------------------------------------------------------------------------------


@pytest.mark.soak("queries", "linear taylor", "mean of ratios")
@pytest.mark.long("jax", "dask", "array_api_strict")
@BOTH
@pytest.mark.parametrize(
    "name",
    [
        *("softmax", "positive", "trigonometric", "importance", "mean of ratios", "lara own"),
        *("lara balance", "lara query-over-queries", "linear elu", "linear taylor"),
        *("sample", "sample for each", "local", "eva", "eva given", "second"),
    ],
)
def test_every_library_agrees_with_numpy(backend, name, causal):
    case, rng = case_of(name, causal), np.random.default_rng(0)
    n, m = (40, 45) if name not in FEW else (6, 9) if backend.name == "dask" else (20, 25)
    arrays, options = problem(case, rng, n, m, heads=(2, 1))
    options |= {"causal": True} if causal else {}
    d_out, mask = rng.standard_normal((2, n, D_V)), rng.random(m) < 0.7
    want = pulled(case.fn, arrays, d_out, mask=mask, **options)

    def pull(q, k, v, d_out, **given):
        return vjp(case.fn, q, k, v, **given)[1](d_out)

    held = {x: Host(y) if x == "indices" else y for x, y in options.items()}
    got = backend.call(pull, **arrays, d_out=d_out, mask=mask, **held)
    for which, x in want.items():
        np.testing.assert_allclose(getattr(got, which), x, rtol=1e-9, atol=1e-11)


@BOTH
@every_case
def test_torch_differentiates(name, causal):
    """The functions themselves, and formulas of few keys, by automatic differentiation."""
    torch = pytest.importorskip("torch")
    case, rng = case_of(name, causal), np.random.default_rng(0)
    arrays, options = problem(case, rng, 9, 10)
    options |= {"causal": True} if causal else {}
    d_out = rng.standard_normal((4, 9, D_V))
    want = pulled(case.fn, arrays, d_out, **options)
    for function in {case.fn, case.formula} if name in FEW else {case.fn}:
        given = {x: torch.tensor(y, requires_grad=True) for x, y in arrays.items()}
        named = of_formula(options) if function is case.formula else options
        named = {x: torch.tensor(y) if isinstance(y, np.ndarray) else y for x, y in named.items()}
        (function(**given, **named) * torch.tensor(d_out)).sum().backward()
        for x, y in given.items():
            own = np.zeros(y.shape) if y.grad is None else y.grad.numpy()
            np.testing.assert_allclose(own, want[x], rtol=1e-8, atol=1e-10)


@BOTH
@pytest.mark.parametrize("name", ["softmax", "positive", "trigonometric", "linear elu"])
def test_torch_differentiates_twice(name, causal):
    torch = pytest.importorskip("torch")
    case = CASES[name]
    arrays, options = problem(case, np.random.default_rng(0), 3, 4, heads=None)
    given = [torch.tensor(x, requires_grad=True) for x in arrays.values()]

    def attention(*tensors):
        return case.fn(**dict(zip(arrays, tensors, strict=True)), **options, causal=causal)

    assert torch.autograd.gradcheck(attention, given)
    assert torch.autograd.gradgradcheck(attention, given)


IN_JAX = ["softmax", "positive", "hyperbolic", "trigonometric", "lara balance", "linear elu"]


@pytest.mark.long("True", *IN_JAX[1:])
@BOTH
@pytest.mark.parametrize("name", IN_JAX)
def test_jax_differentiates(name, causal):
    """Under grad, vmap over heads and jit."""
    jax = pytest.importorskip("jax")
    jax.config.update("jax_enable_x64", True)
    case, rng = CASES[name], np.random.default_rng(0)
    arrays, options = problem(case, rng, 9, 10, heads=(4, 4))
    arrays |= {x: rng.standard_normal((4, *y.shape)) for x, y in arrays.items() if y.ndim < 3}
    d_out = rng.standard_normal((4, 9, D_V))
    options |= {"causal": causal}
    want = pulled(case.fn, arrays, d_out, **options)

    def loss(given, d_out):
        return jax.numpy.sum(case.fn(**given, **options) * d_out)

    got = jax.jit(jax.vmap(jax.grad(loss)))(arrays, d_out)
    for x, y in got.items():
        np.testing.assert_allclose(y, want[x], rtol=1e-8, atol=1e-10)


@pytest.mark.long
@pytest.mark.parametrize("name", FEW)
def test_jax_differentiates_the_formula(name):
    jax = pytest.importorskip("jax")
    jax.config.update("jax_enable_x64", True)
    case, rng = CASES[name], np.random.default_rng(0)
    arrays, options = problem(case, rng, heads=None)
    d_out = rng.standard_normal((N, D_V))
    want = pulled(case.fn, arrays, d_out, **options)

    def loss(given):
        return jax.numpy.sum(case.formula(**given, **of_formula(options)) * d_out)

    got = jax.jit(jax.grad(loss))({x: jax.numpy.asarray(y) for x, y in arrays.items()})
    for x, y in got.items():
        np.testing.assert_allclose(y, want[x], rtol=1e-8, atol=1e-10)
