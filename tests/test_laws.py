"""Laws that every attention function of the package keeps: a table of cases, a test for each law.

A new estimator is one row of `CASES` in `cases.py`. The laws:

- the engine gives what the formula (`refattn.naive`) gives, at any shapes, masks and dtypes;
- both are right to the accuracy contract, against 50-digit arithmetic;
- every array library agrees with NumPy in float32 and float64, and keeps library, dtype and device;
- what a query does not see changes no bit of its result; hiding keys is deleting them;
- grouped heads are repeated heads, and leading axes broadcast;
- axes may be empty; values that are all the same are returned;
- a scale multiplies queries and keys by its root;
- `vjp` pulls back what difference quotients of the formula in extended precision say.

What else pullbacks keep is in `gradients`, and what decoding states do in `streaming`.
"""

from itertools import product

import numpy as np
import pytest

import refattn
from refattn import registry, vjp
from refattn.judge.conformance.truth import digits
from tests.cases import CASES, agrees, assert_close, differentiable, prepared, those
from tests.conftest import Host
from tests.problems import LEADS, Problem, draw, largest, make, problems, with_norm
from tests.reference import CONTRACT


def test_every_attention_function_has_a_row():
    functions = {getattr(refattn, x) for x in refattn.__all__ if x.endswith("_attention")}
    of_their_own = {refattn.recurrent_attention}  # it returns a state, and averages no values
    assert functions - of_their_own <= {case.fn for case in CASES.values()}


@those()
def test_tolerances_are_small(name):
    """In float64, with norms of about 1: what is as large as the values, any answer keeps."""
    for causal in (False, True):
        case, p, options = prepared(name, causal=causal)
        assert largest(case.atol(p, options)) < 1e-8 * largest(p.v)


@pytest.mark.sweep(3)
@those("formula")
@problems
def test_the_engine_agrees_with_the_formula(name, p):
    case = CASES[name]
    if not case.takes(p):
        return
    options = case.draw(p)
    got, want = (f(*p.arrays, **options, **p.options) for f in (case.formula, case.fn))
    assert_close(got, want, case.atol(p, options))
    np.testing.assert_array_equal(got[~np.any(p.visible, axis=-1)], 0)


MANY = [  # leading axes, queries, keys, causal
    *(("none", 140, 155, True), ("grouped", 155, 140, True), ("values", 129, 128, True)),
    *(("keys", 3, 150, True), ("broadcast", 1, 133, False), ("shared", 129, 128, False)),
]


@pytest.mark.sweep(12)
@pytest.mark.long("keys")
@pytest.mark.parametrize("mask", ["none", "keys", "heads"])
@those("formula")
def test_the_engine_agrees_with_the_formula_of_many_tokens(name, mask):
    """Past the first leaves, chunks and steps, with ragged ends, and queries before all keys."""
    for seed, (lead, n, m, causal) in enumerate(MANY):
        case, p, options = prepared(name, lead, n, m, mask, causal, seed)
        got, want = (f(*p.arrays, **options, **p.options) for f in (case.formula, case.fn))
        assert_close(got, want, case.atol(p, options))


BEYOND = [  # queries, keys, head size, columns of values, features
    *((1, 48, 1, 0, 4), (3, 49, 129, 1, 4), (2, 64, 8, 0, 4), (5, 130, 130, 70, 50)),
    *((8200, 2, 1, 1, 3), (2, 8300, 2, 3, 65), (520, 2100, 200, 2, 3), (1100, 20, 2, 70, 3)),
    *((130, 130, 130, 3, 50), (700, 700, 2, 2, 130)),
]


@pytest.mark.sweep(4)
@pytest.mark.long("jax", "dask", "readonly", "shape5", "shape6", "shape8", "shape9")
@pytest.mark.parametrize("shape", BEYOND)
@pytest.mark.parametrize("name", ["softmax", "rfa positive", "is"])
def test_libraries_agree_beyond_every_block(backend, name, shape):
    """Terms of a product, rows in cache, rows and columns of a block, features of a chunk."""
    n, m, d, d_v, count = shape
    for seed, (mask, causal) in enumerate([("none", False), ("none", True), ("rows", False)]):
        case, p, options = prepared(name, "none", n, m, mask, causal, seed, np.float32, d)
        p.v = draw(p.rng, m, d_v, dtype=p.q.dtype)
        if "omega" in options:
            options = {**options, "omega": draw(p.rng, count, d), "log_weight": draw(p.rng, count)}
        got = backend.call(case.fn, *p.arrays, **options, **p.options)
        want = case.formula(*(x.astype(float) for x in p.arrays), **options, **p.options)
        np.testing.assert_allclose(got, want, rtol=0, atol=largest(case.atol(p, options)))


LEAVES = [(3, 1.0), (1, 10.0), (64, 100.0), (2, 1e3)]
MORE = [*product((1, 2, 64), (1e-3, 1.0, 10.0, 100.0, 1e3))]
VARIANTS = [  # queries, keys, mask, causal
    (5, 7, "none", False), (8, 3, "none", True), (4, 9, "none", True), (6, 6, "keys", True),
    (5, 7, "keys", False), (5, 7, "rows", False), (5, 7, "rows", True),
]  # fmt: skip


@pytest.mark.sweep(8)
@pytest.mark.parametrize(
    ("d", "size"),
    [*LEAVES, *(pytest.param(*x, marks=pytest.mark.long) for x in MORE if x not in LEAVES)],
)
@pytest.mark.long("float32+64", "second order+64")
@pytest.mark.parametrize("name", [x for x, case in CASES.items() if case.digits])
def test_digits(name, d, size, dtype, record_accuracy):
    """Against 50-digit arithmetic, in units of eps (1 + largest exponent)."""
    case = CASES[name]
    for seed, (n, m, mask, causal) in enumerate(VARIANTS):
        p = make("none", n, m, mask, causal, [d, int(size), seed], dtype, d)
        if not case.takes(p):
            continue
        p = Problem(with_norm(p.q, size), with_norm(p.k, size), p.v, p.options, p.rng)
        options = case.draw(p)
        atol = np.max(case.atol(p, options)) / 2
        if not 1e-30 < atol < 1e30:  # no digits are left
            continue
        want = case.digits(p, options)
        for function in (case.formula, case.fn):
            got = function(*p.arrays, **options, **p.options)
            assert got.dtype == dtype
            units = float(CONTRACT * np.max(np.abs(digits.numbers(got) - want)) / atol)
            assert units <= CONTRACT, (function, VARIANTS[seed])
        record_accuracy(f"{name}, {mask}{causal * ', causal'}, norms {size:g}", dtype, units)


@pytest.mark.sweep(4)
@pytest.mark.long("jax", "dask", "readonly+float32")
@those()
def test_every_library_agrees_with_numpy(backend, dtype, name):
    """Options as arrays of NumPy and of the library; the engine and the formula."""
    for seed, (lead, n, m, mask, causal, wrap) in enumerate(
        [("grouped", 4, 6, "heads", True, Host), ("broadcast", 5, 3, "rows", False, np.asarray)]
    ):
        case, p, options = prepared(name, lead, n, m, mask, causal, seed, dtype)
        arrays = {x: y for x, y in options.items() if isinstance(y, np.ndarray)}
        drawn = {x for x, y in arrays.items() if x == "omega" or y.dtype != dtype}
        given = options | {x: wrap(options[x]) for x in drawn}
        want = case.fn(*p.arrays, **options, **p.options)
        for function in {case.fn, case.formula} if seed else {case.fn}:
            got = backend.call(function, *p.arrays, **given, **p.options)
            assert_close(got, want, case.atol(p, options))


EDITS = (np.nan, np.inf, -np.inf, 1e300, 1e3, -1e3, 0.0)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("masked", [False, True])
@those("causal")
def test_the_future_changes_nothing(name, masked):
    """Not a bit of the results before an edit of queries, keys and values."""
    for n, cuts in ((7, range(1, 7)), (150, (1, 47, 48, 96, 97, 149))):
        case, p, options = prepared(name, n=n, m=n, mask="keys" if masked else "none", causal=True)
        if masked:
            p.options["mask"][:] = p.rng.random(n) < 0.8
            p.options["mask"][:2] = True
        before = case.fn(*p.arrays, **options, **p.options)
        for t in cuts:
            after = [x.copy() for x in p.arrays]
            for x in after:
                x[t:] = p.rng.choice(EDITS, x[t:].shape)
            with np.errstate(all="ignore"):
                after = case.fn(*after, **options, **p.options)
            np.testing.assert_array_equal(after[:t], before[:t])


@pytest.mark.sweep(8)
@pytest.mark.parametrize("causal", [False, True])
@those()
def test_what_is_hidden_reaches_nothing(name, causal, dtype):
    """And no warning comes of it, which would be an error here; rows without keys are 0."""
    for mask in ("keys", "rows"):
        case, p, options = prepared(name, n=6, mask=mask, causal=causal, seed=3, dtype=dtype)
        p.options["mask"][..., [1, 4]] = False
        p.options["mask"][..., [0, 2]] = True
        nothing = {**p.options, "mask": np.zeros_like(p.options["mask"])}
        for function in (case.fn, case.formula):
            want = function(*p.arrays, **options, **p.options)
            for value in (np.nan, np.inf, -np.inf, np.finfo(dtype).max):
                k, v = p.k.copy(), p.v.copy()
                k[[1, 4]] = v[[1, 4]] = value
                np.testing.assert_array_equal(function(p.q, k, v, **options, **p.options), want)
            np.testing.assert_array_equal(function(*p.arrays, **options, **nothing), 0)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (6, 1)], ids=str)
@those()
def test_masks_broadcast_along_keys(name, shape):
    """A mask of True is none, and one of False gives 0."""
    for causal in (False, True):
        case, p, options = prepared(name, n=6, m=6, causal=causal)
        want = case.fn(*p.arrays, **options, **p.options)
        for value in (True, False):
            p.options["mask"] = np.full(shape, value)
            if case.takes(p):
                got = case.fn(*p.arrays, **options, **p.options)
                assert_close(got, want * value, case.atol(p, options))


@pytest.mark.sweep(4)
@pytest.mark.parametrize("seed", range(6))
@those("deletion")
def test_masking_keys_is_deleting_them(name, seed):
    n, m = (4, 6) if seed % 2 else (7, 9)
    case, p, options = prepared(name, n=n, m=m, seed=seed)
    kept = p.rng.random(m) < 0.6
    kept[:4] = True  # as many as there are proposals
    deleted = Problem(p.q, p.k[kept], p.v[kept], {}, p.rng)
    own = {x: y[..., kept] if x == "bias" else y for x, y in options.items()}
    want = case.fn(*deleted.arrays, **own)
    p.k[~kept] = p.v[~kept] = np.nan
    masks = [kept, kept[None]] + [np.tile(kept, (n, 1))] * ("rows" not in case.lacks)
    for mask in masks:
        got = case.fn(*p.arrays, **options, mask=mask)
        assert_close(got, want, case.atol(deleted, own))


@pytest.mark.sweep(6)
@pytest.mark.parametrize("lead", [x for x in LEADS if x != "none"])
@those()
def test_heads_are_repeated_and_axes_broadcast(name, lead):
    if lead in CASES[name].lacks:
        pytest.skip("other frequencies are drawn")
    for seed, (mask, causal) in enumerate(product(("none", "heads", "rows"), (False, True))):
        case, p, options = prepared(name, lead, 5, 7, mask, causal, seed)
        if mask == "heads":
            p.options["mask"][..., :4] = True
        got = case.fn(*p.arrays, **options, **p.options)
        want = case.fn(*map(p.each, p.arrays), **options, **p.options)
        assert_close(got, want, case.atol(p, options))


@pytest.mark.sweep(12)
@pytest.mark.long("jax", "dask", "readonly", "coreset")
@those()
def test_axes_may_be_empty(backend, name):
    """No heads, queries, keys or columns of values: the shape, and 0 where no key is seen."""
    case = CASES[name]
    backend.jit = lambda run: run  # each shape would be compiled
    lazy = backend.name in ("jax", "dask", "array_api_strict")
    for heads, n, m, d_v in (*product((0, 3), repeat=4), (0, 3, 300, 0), (0, 3, 300, 3)):
        if 0 not in (heads, n, m, d_v) or (lazy and (heads, n, m, d_v).count(0) > 2):
            continue
        lost = {*("no-keys",) * (m == 0), *("no-tokens",) * (0 in (n, m))}
        arrays = [np.ones((heads, *x)) for x in ((n, 3), (m, 3), (m, d_v))]
        for mask, causal in product(("none", "rows", "keys")[: 3 - lazy], (False, True)):
            chosen = make("none", n, m, mask, causal, 0, np.float64)
            p = Problem(*arrays, chosen.options, chosen.rng)
            if not case.takes(p) or lost & {*case.lacks}:
                continue
            options = case.draw(p)
            if backend.name == "dask" and "window" in options:
                continue  # no array of Dask without elements is cut into chunks of any size
            out = backend.call(case.fn, *p.arrays, **options, **p.options)
            assert out.shape == (heads, n, d_v)
            assert np.all(np.isfinite(out))
            assert np.all(out[~p.visible.any(-1)] == 0)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("mask", ["none", "keys"])
@pytest.mark.parametrize("causal", [False, True])
@those("mean")
def test_values_that_are_all_the_same_are_returned(name, causal, mask):
    for lead in LEADS:
        case, p, options = prepared(name, lead, 6, 7, mask, causal)
        p.v[...] = p.v[..., :1, :]
        if mask == "keys":
            p.options["mask"][...] = np.arange(7) > 0
        got = case.fn(*p.arrays, **options, **p.options)
        want = np.where(p.visible.any(-1)[..., None], p.each(p.v)[..., :1, :], 0)
        assert_close(got, want, case.atol(p, options))


@pytest.mark.parametrize("scale", [0.3, 2.0])
@those("scale")
def test_a_scale_multiplies_queries_and_keys_by_its_root(name, scale):
    case, p, options = prepared(name)
    moved = Problem(scale**0.5 * p.q, scale**0.5 * p.k, p.v, {}, p.rng)
    size = (scale * 3**0.5) ** 0.5  # tolerances know the default scale only
    atol = 2 * case.atol(Problem(size * p.q, size * p.k, p.v, {}, p.rng), options)
    for function in (case.fn, case.formula):
        got = function(*p.arrays, **options, scale=scale)
        assert_close(got, function(*moved.arrays, **options, scale=1.0), atol)
        got = function(*p.arrays, **options, scale=3.0**-0.5)
        assert_close(got, function(*p.arrays, **options), atol)


@pytest.mark.sweep(12)
@pytest.mark.long("True+heads", "False+rows")
@pytest.mark.parametrize("mask", ["none", "heads", "rows"])
@pytest.mark.parametrize("causal", [False, True])
@those("vjp")
def test_pullbacks_agree_with_difference_quotients(name, causal, mask):
    """Of queries, keys, values and what else was given, each alone and all at once."""
    case, arrays, options, rng = differentiable(name, "grouped", 5, 7, mask, causal)
    if causal and "scale" not in case.lacks:
        options["scale"] = 0.3
    agrees(case.fn, case.formula, arrays, options, rng)


PAST_A_LEAF = [  # leading axes, queries, keys, mask, causal: within a leaf, and past it
    *(("none", 5, 7, "none", False), ("grouped", 140, 155, "keys", True)),
    *(("none", 150, 150, "rows", False), ("values", 257, 129, "none", True)),
]


@pytest.mark.sweep(4)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@those("vjp")
def test_vjp_returns_the_bits_of_the_function(name, dtype):
    """A step on the tape computes what it computes off it: no other form, scale or order."""
    for where in PAST_A_LEAF:
        case, arrays, options, _ = differentiable(name, *where, dtype=dtype)
        got, want = vjp(case.fn, **arrays, **options)[0], case.fn(**arrays, **options)
        np.testing.assert_array_equal(got, want)


TRACED = ("softmax", "rfa positive", "rfa trigonometric", "is", "lara balance")


@pytest.mark.parametrize("name", TRACED)
def test_torch_autocast_changes_nothing(torch, name):
    case, p, options = prepared(name, n=64, m=64, dtype=np.float32, causal=name == "rfa positive")
    arrays = [torch.asarray(x) for x in p.arrays]
    want = case.fn(*arrays, **options, **p.options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = case.fn(*arrays, **options, **p.options)
    assert torch.equal(got, want)


@pytest.mark.parametrize("name", [x for x, r in registry.ESTIMATORS.items() if r.approximates])
def test_estimators_of_the_registry_take_no_heads(name):
    """What is fitted to queries and keys, too: there are no moments then, and no results."""
    record, x = registry.ESTIMATORS[name], np.ones((0, 6, 4))
    options = record.sized(2) | ({"rng": 0} if record.has("random") else {})
    assert record.fn(x, x, x, **options).shape == (0, 6, 4)
