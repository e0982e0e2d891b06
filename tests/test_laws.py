"""Laws that every attention function of the package keeps: a table of cases, a test for each law.

A new estimator is one row of `CASES`. The laws:

- the engine gives what the formula (`refattn.naive`) gives, at any shapes, masks and dtypes;
- both are right to the accuracy contract, against 50-digit arithmetic;
- every array library agrees with NumPy in float32 and float64, and keeps library, dtype and device;
- what a query does not see changes no bit of its result; hiding keys is deleting them;
- grouped heads are repeated heads, and leading axes broadcast;
- axes may be empty; values that are all the same are returned;
- a scale multiplies queries and keys by its root;
- `vjp` pulls back what difference quotients of the formula in extended precision say;
- a decoding state, token by token and in parts, gives what the whole sequence gives.
"""

from functools import partial
from itertools import pairwise, product
from typing import Any, NamedTuple

import numpy as np
import pytest

import refattn
from refattn import features, naive, registry, streaming, vjp
from refattn.attention import Alibi
from refattn.conformance.truth import exact
from refattn.estimators import lara
from refattn.gradients import Gradients
from tests import reference
from tests.conftest import Host
from tests.problems import (
    LEADS,
    Problem,
    coreset_atol,
    draw,
    exponent,
    is_atol,
    lara_atol,
    largest,
    linear_atol,
    make,
    near_and_far_atol,
    problems,
    rfa_atol,
    rfa_tolerance,
    second_order_atol,
    slope,
    softmax_atol,
    trigonometric_atol,
    values_atol,
    with_norm,
)
from tests.reference import CONTRACT, mp


class Case(NamedTuple):
    """An attention function of the engine, its formula, and what else the laws need.

    `draw` gives the options for a problem, and `atol` what two answers within the accuracy contract
    may differ by. `digits` computes 50 digits of one head, and `state` starts decoding. `lacks` has
    words: "causal", "rows" (a mask for each query), "causal-rows", "deletion" (a key that is hidden
    keeps its place), "mean", "scale", "vjp", "no-keys", "no-tokens", "formula" (of its own), and
    "values" (leading axes of values alone: other frequencies are drawn).
    """

    fn: Any
    formula: Any
    draw: Any
    atol: Any
    digits: Any = None
    state: Any = None
    lacks: tuple = ()

    def takes(self, p):
        mask, causal = p.options.get("mask"), p.options.get("causal", False)
        rows = mask is not None and mask.shape[-2:-1] not in ((), (1,))
        found = {"causal": causal, "rows": rows, "causal-rows": causal and rows}
        return not any(found[x] for x in self.lacks if x in found)


# --- options that are drawn -----------------------------------------------------------------------


def heads_or_none(p):
    return p.lead[-1:] if p.rng.random() < 0.5 else ()


def frequencies(p):
    lead, count = heads_or_none(p), p.rng.integers(1, 5)
    omega = draw(p.rng, *lead, count, p.q.shape[-1])
    return {"omega": omega, "log_weight": draw(p.rng, count)}


def just(**options):
    return lambda p: {**options}


def frequencies_for(features):
    return lambda p: {**frequencies(p), "features": features}


def omega_only(p):
    return {"omega": frequencies(p)["omega"]}


def own_frequencies(p):
    return {"omega": draw(p.rng, *heads_or_none(p), p.q.shape[-2], 2, p.q.shape[-1])}


def proposals(weighting, centred=False):
    def options(p):
        (n, d), m = p.q.shape[-2:], p.k.shape[-2]
        count, repeats = p.rng.integers(1, min(n, m, 4) + 1), p.rng.integers(1, 3)
        omega = draw(p.rng, *heads_or_none(p), count * repeats, d)
        chosen = {"omega": omega, "weighting": weighting}
        if "query" in weighting:
            chosen["beta"] = 0.7
        if centred:
            return {**chosen, "centres": draw(p.rng, count, d)}
        return {**chosen, "num_proposals": int(count)}

    return options


def sides(p):
    every = [(2, 1), (0, 0), (None, 1), (3, None), (None, None), (500, 0), (0, 500)]
    return every[p.rng.integers(len(every))]


def scores(*names):
    """Options of exact attention, of each query head or of all."""

    def options(p):
        n, m, dtype = p.q.shape[-2], p.k.shape[-2], p.q.dtype
        heads = heads_or_none(p)
        every = {
            "bias": draw(p.rng, *heads, n, m, dtype=dtype),
            "window": sides(p),
            "softcap": 1.5,
            "sinks": np.asarray(draw(p.rng, *heads, dtype=dtype)),
            "slopes": np.asarray(p.rng.random(heads).astype(dtype)),
            "dropout": ((p.rng.random((*heads, n, m)) < 0.8) / 0.8).astype(dtype),
        }
        return {x: every[x] for x in names}

    return options


def positive_map(p):
    """Features that have a scale."""
    omega = draw(p.rng, 3, p.q.shape[-1], dtype=p.q.dtype)
    return {"feature_map": partial(features.positive_features, omega=omega)}


def map_atol(p, options):
    omega = options["feature_map"].keywords["omega"]
    return (1 + exponent(p.q, p.k, omega, 1.0)) * values_atol(p)


def pivots(p):
    m = p.k.shape[-2]
    return {"indices": p.rng.permutation(m)[: max(1, m // 2)]}


def samples(p):
    m, shape = p.k.shape[-2], (*p.lead, p.q.shape[-2], 3) if p.rng.random() < 0.5 else (3,)
    return {"indices": p.rng.integers(0, m, shape), "log_probability": draw(p.rng, *shape)}


def chunks(p):
    return {"window": int(p.rng.integers(1, 6))}


def chunks_with_frequencies(p):
    count = -(-p.k.shape[-2] // (window := chunks(p)["window"]))
    return {"window": window, "omega": draw(p.rng, count, p.q.shape[-1])}


# --- 50 digits ------------------------------------------------------------------------------------


def at(function, *names, **fixed):
    """A function of 50 digits, with those of the options that it takes by these names."""

    def digits(p, options):
        some = {x: options[x] for x in names if x in options}
        return function(*p.arrays, **some, visible=p.visible, **fixed)

    return digits


def digits_of_softmax(p, options):
    seen = p.visible & naive.visible(p.q, p.k, window=options.get("window"))
    names = {"bias": "bias", "softcap": "softcap", "dropout": "dropout", "sinks": "sink"}
    some = {names[x]: y for x, y in options.items() if x in names}
    return exact.softmax_attention(*p.arrays, visible=seen, **some)


digits_of_rfa = at(exact.random_feature_attention, "omega", "log_weight", "features")


def digits_of_chunks(function, p, options):
    mask, causal = p.options.get("mask", True), p.options.get("causal", False)
    some = {x: y for x, y in options.items() if x != "sampled"}
    return function(*p.arrays, mask, causal=causal, **some)


def states(p, omega):
    """f(omega_s) and log sum_j xi(k_j, omega_s) over visible keys, for each query."""
    keys = exact.numbers(p.k) * reference.root(None, p.q.shape[-1])
    logs = (exact.numbers(omega) @ keys.T - (keys**2).sum(-1)[None] / 2).astype(object)
    return [
        reference.weighted_mean(logs, exact.numbers(p.v), np.broadcast_to(seen, logs.shape))
        for seen in p.visible
    ]


def digits_of_mean_of_ratios(p, options):
    return np.stack([f.mean(0) for f, _ in states(p, options["omega"])])


def weighted(p, omega, log_weights):
    """Self-normalised mean over s of f(omega_s), and the log of the sum of its weights."""
    q = exact.numbers(p.q) * reference.root(None, p.q.shape[-1])
    rows = []
    for i, (f, log_z) in enumerate(states(p, omega)):
        if not p.visible[i].any():
            rows.append((f[0], log_z[0]))  # 0 and -inf
            continue
        logs = (exact.numbers(omega) @ q[i] + log_z + log_weights[i])[None]
        out, lse = reference.weighted_mean(logs, f, np.ones(logs.shape, bool))
        rows.append((out[0], lse[0]))
    return rows


def digits_of_importance_sampling(p, options):
    omega, count = options["omega"], len(options["omega"])
    weights = exact.numbers(np.broadcast_to(options["log_weight"], (len(p.q), count)))
    scale = reference.root(None, p.q.shape[-1]) ** 2
    total = reference.attend(*p.arrays, 0.0, p.visible, scale)[1]
    rows = []
    for i, (out, lse) in enumerate(weighted(p, omega, weights)):
        ratio = lse - (exact.numbers(p.q[i]) ** 2).sum() * scale / 2 - total[i]
        rows.append(out * mp.exp(ratio) / count if p.visible[i].any() else out)
    return np.stack(rows)


def digits_of_lara(p, options):
    """At given centres, a frequency or more of each: log alpha' (n, C) of reference 003."""
    omega, centres, weighting = (options[x] for x in ("omega", "centres", "weighting"))
    n, count = len(p.q), len(centres)
    own = np.arange(len(omega)) // (len(omega) // count)
    omega_, centres = exact.numbers(omega), exact.numbers(centres)
    ratio = omega_ @ centres.T - (centres**2).sum(-1)[None, :] / 2
    mix = np.array([mp.log(sum(mp.exp(x) for x in row)) for row in ratio], dtype=object)
    mine = ratio[np.arange(len(own)), own]
    if weighting == "own":
        weights = np.tile(-mine, (n, 1))
    elif weighting == "balance":
        weights = np.tile(-mix, (n, 1))
    else:
        q = exact.numbers(p.q) * reference.root(None, p.q.shape[-1])
        means = np.stack([q[np.arange(n) * count // n == c].mean(0) for c in range(count)])
        t = np.array([[mp.exp(x) for x in row] for row in q @ means.T], dtype=object)
        t = t / t.sum(axis=1 if weighting == "query" else 0, keepdims=True)
        t = (t - t.mean(1, keepdims=True)) * mp.mpf(options["beta"])
        alpha = np.array([mp.exp(x) for x in mine - mix], dtype=object) + t[:, own]
        log_alpha = [[mp.log(a) if a > 0 else -mp.inf for a in row] for row in alpha]
        weights = np.array(log_alpha, dtype=object) - mine
    return np.stack([out for out, _ in weighted(p, omega, weights)])


# --- the table ------------------------------------------------------------------------------------


def case(name, draw, atol, digits=None, state=None, lacks=""):
    """The function of the engine and the formula of this name."""
    words = tuple(lacks.split())
    return Case(getattr(refattn, name), getattr(naive, name), draw, atol, digits, state, words)


def sloped(*names, lacks=""):
    """Exact attention by slopes of alibi: arrays of their own, as the laws of libraries need."""

    def with_bias(fn):
        return lambda *arrays, slopes, **options: fn(*arrays, bias=Alibi(slopes), **options)

    plain = case(SOFTMAX, scores("slopes", *names), softmax_atol, lacks=f"vjp deletion {lacks}")
    return plain._replace(fn=with_bias(plain.fn), formula=with_bias(plain.formula))


def drawn(name, lacks="", **options):
    """What draws its frequencies itself, which has no formula of its own."""
    fn = getattr(refattn, name)
    return Case(fn, fn, just(**options), drawn_atol, lacks=("formula", *lacks.split()))


def drawn_atol(p, options):
    omega = np.full((1, p.q.shape[-1]), 4.0)  # longer than most, with centres
    return 100 * rfa_tolerance(p.q, p.k, omega) * largest(p.v)


def positive_state(k, v, features, **options):
    return streaming.PositiveState.init(k, v, **options)


def local_state(k, v, window, omega):
    return streaming.LocalState.init(k, v, window=window[0], omega=omega)


def mean_of_chunks(**options):
    """EVA at the means of chunks: the formula has no other."""
    found = case(EVA, lambda p: {**chunks(p), **options, "sampled": False}, near_and_far_atol,
                 partial(digits_of_chunks, exact.eva_attention), lacks="rows deletion")  # fmt: skip
    formula = found.formula
    return found._replace(formula=lambda *arrays, sampled, **options: formula(*arrays, **options))


SOFTMAX, RFA, LINEAR = "softmax_attention", "random_feature_attention", "linear_attention"
IS, RA, MEAN = "importance_sampled_attention", "randomized_attention", "mean_of_ratios_attention"
LARA, EVA, SECOND = "linear_randomized_attention", "eva_attention", "second_order_attention"
CORESET, SAMPLE = "coreset_attention", "sampled_key_attention"
LOCAL = "local_random_feature_attention"
SLOPE = partial(features.elu_features, alpha=0.1)
TAYLOR = partial(features.taylor_features, degree=2)
SOFTMAX_STATE, LINEAR_STATE = streaming.SoftmaxState.init, streaming.LinearState.init

# fmt: off
CASES = {
    "softmax": case(SOFTMAX, scores(), softmax_atol, digits_of_softmax, SOFTMAX_STATE),
    "softmax bias": case(SOFTMAX, scores("bias"), softmax_atol, digits_of_softmax),
    "softmax capped": case(SOFTMAX, scores("softcap", "bias"), softmax_atol, digits_of_softmax),
    "softmax window": case(SOFTMAX, scores("window"), softmax_atol, digits_of_softmax,
                           lacks="deletion mean"),
    "softmax sinks": case(SOFTMAX, scores("sinks", "softcap"), softmax_atol, digits_of_softmax,
                          lacks="mean"),
    "softmax dropout": case(SOFTMAX, scores("dropout"), softmax_atol, digits_of_softmax,
                            lacks="deletion mean"),
    "softmax alibi": sloped(),
    "softmax all": sloped("window", "softcap", "sinks", "dropout", lacks="mean"),
    "rfa positive": case(RFA, frequencies_for("positive"), rfa_atol, digits_of_rfa, positive_state),
    "rfa hyperbolic": case(RFA, frequencies_for("hyperbolic"), rfa_atol, digits_of_rfa),
    "rfa trigonometric": case(RFA, frequencies_for("trigonometric"), trigonometric_atol,
                              digits_of_rfa),
    "rfa drawn": drawn(RFA, num_features=3, rng=1),
    "is": case(IS, frequencies, is_atol, digits_of_importance_sampling, lacks="mean"),
    "ra": case(RA, own_frequencies, rfa_atol, at(exact.randomized_attention, "omega")),
    "ra drawn": drawn(RA, "vjp values", num_samples=2, rng=1),
    "mean of ratios": case(MEAN, omega_only, rfa_atol, digits_of_mean_of_ratios),
    "mean of ratios drawn": drawn(MEAN, num_samples=2, rng=1),
    **{f"lara {x}": case(LARA, proposals(x), lara_atol, lacks="causal-rows no-tokens")
       for x in ("balance", "own")},
    **{f"lara {x}, centres": case(LARA, proposals(x, centred=True), lara_atol, digits_of_lara,
                                  lacks="causal no-tokens") for x in lara.WEIGHTINGS},
    "lara drawn": drawn(LARA, "causal-rows no-tokens", num_proposals=2, rng=1),
    "lara drawn pairs": drawn(LARA, "causal no-tokens", num_proposals=2, rng=1, antithetic=True,
                              weighting="query"),
    "linear": case(LINEAR, just(), linear_atol, at(exact.linear_attention), LINEAR_STATE, "scale"),
    "linear elu of slope": case(LINEAR, just(feature_map=SLOPE), linear_atol, None, LINEAR_STATE,
                                "scale"),
    "linear taylor": case(LINEAR, just(feature_map=TAYLOR), linear_atol, None, LINEAR_STATE,
                          "scale"),
    "linear positive": case(LINEAR, positive_map, map_atol, None, LINEAR_STATE, "scale"),
    "coreset": case(CORESET, pivots, coreset_atol, lacks="causal rows deletion vjp no-keys"),
    "sampled keys": case(SAMPLE, samples, near_and_far_atol,
                         at(exact.sampled_key_attention, "indices", "log_probability"),
                         lacks="causal deletion no-keys"),
    "eva": case(EVA, chunks_with_frequencies, near_and_far_atol,
                partial(digits_of_chunks, exact.eva_attention), streaming.EvaState.init,
                "rows deletion"),
    "eva mean": mean_of_chunks(),
    "eva published": mean_of_chunks(log_size=False),
    "eva drawn": drawn(EVA, "rows deletion", window=2, rng=1),
    "second order": case(SECOND, chunks, second_order_atol,
                         partial(digits_of_chunks, exact.second_order_attention),
                         streaming.SecondOrderState.init, "rows deletion"),
    "local": case(LOCAL, lambda p: {"window": sides(p), **omega_only(p)}, near_and_far_atol,
                  at(exact.local_random_feature_attention, "omega", "window"), local_state,
                  "deletion"),
}
# fmt: on


def those(*words):
    """Cases that lack none of these."""
    names = [x for x, case in CASES.items() if not {*words} & {*case.lacks}]
    return pytest.mark.parametrize("name", names)


def assert_close(got, want, atol):
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    off = np.abs(got.astype(np.float64) - want)
    assert np.all((off <= atol) | np.isinf(atol)), f"off by {np.max(off / atol):.3g} tolerances"


def prepared(name, lead="none", n=5, m=7, mask="none", causal=False, seed=0, dtype=np.float64, d=3):
    """A case, a problem, and its options; causal or with a mask of rows where the case takes it."""
    case, fewer = CASES[name], "keys" if mask == "rows" else mask
    for some in ((mask, causal), (mask, False), (fewer, causal), (fewer, False)):
        p = make(lead, n, m, *some, seed, np.dtype(dtype), d)
        if case.takes(p):
            break
    return case, p, case.draw(p)


# --- the laws -------------------------------------------------------------------------------------


def test_every_attention_function_has_a_row():
    functions = {getattr(refattn, x) for x in refattn.__all__ if x.endswith("_attention")}
    assert functions <= {case.fn for case in CASES.values()}


@those()
def test_tolerances_are_small(name):
    """In float64, with norms of about 1: what is as large as the values, any answer keeps."""
    for causal in (False, True):
        case, p, options = prepared(name, causal=causal)
        assert largest(case.atol(p, options)) < 1e-8 * largest(p.v)


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


@pytest.mark.long("jax", "dask", "shape5", "shape6", "shape8", "shape9")
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


SIZES = [(3, 1.0), (1, 10.0), (64, 100.0), (2, 1e3)]
MORE = [*product((1, 2, 64), (1e-3, 1.0, 10.0, 100.0, 1e3))]
VARIANTS = [  # queries, keys, mask, causal
    (5, 7, "none", False), (8, 3, "none", True), (4, 9, "none", True), (6, 6, "keys", True),
    (5, 7, "keys", False), (5, 7, "rows", False), (5, 7, "rows", True),
]  # fmt: skip


@pytest.mark.parametrize(
    ("d", "size"),
    [*SIZES, *(pytest.param(*x, marks=pytest.mark.long) for x in MORE if x not in SIZES)],
)
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
            units = float(CONTRACT * np.max(np.abs(exact.numbers(got) - want)) / atol)
            assert units <= CONTRACT, (function, VARIANTS[seed])
        record_accuracy(f"{name}, {mask}{causal * ', causal'}, norms {size:g}", dtype, units)


@pytest.mark.long("jax", "dask")
@those()
def test_every_library_agrees_with_numpy(backend, dtype, name):
    """Options as arrays of NumPy and of the library; the engine and the formula."""
    for seed, (lead, n, m, mask, causal, wrap) in enumerate(
        [("grouped", 4, 6, "heads", True, Host), ("broadcast", 5, 3, "rows", False, np.asarray)]
    ):
        case, p, options = prepared(name, lead, n, m, mask, causal, seed, dtype)
        drawn = {x for x, y in options.items() if isinstance(y, np.ndarray) and y.dtype != dtype}
        given = options | {x: wrap(options[x]) for x in drawn | {"omega"} & {*options}}
        want = case.fn(*p.arrays, **options, **p.options)
        for function in {case.fn, case.formula} if seed else {case.fn}:
            got = backend.call(function, *p.arrays, **given, **p.options)
            assert_close(got, want, case.atol(p, options))


EDITS = (np.nan, np.inf, -np.inf, 1e300, 1e3, -1e3, 0.0)


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


@pytest.mark.long("jax", "dask", "coreset")
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


@pytest.mark.parametrize("mask", ["none", "heads", "rows"])
@pytest.mark.parametrize("causal", [False, True])
@those("vjp")
def test_pullbacks_agree_with_difference_quotients(name, causal, mask):
    """Of queries, keys, values and what else was given, each alone and all at once."""
    case, p, options = prepared(name, "grouped", 5, 7, mask, causal)
    arrays = {"q": p.q / 2, "k": p.k / 2, "v": p.v}
    for x in {*Gradients._fields} & {*options}:
        arrays[x] = options.pop(x)
    options = {**options, **p.options}
    out, pullback = vjp(case.fn, **arrays, **options)
    np.testing.assert_array_equal(out, case.fn(**arrays, **options))
    d_out = p.rng.standard_normal(out.shape)
    found = {x: y for x, y in pullback(d_out)._asdict().items() if y is not None}
    assert {*found} == {*arrays}
    for moving in (*arrays, "all"):
        way = {
            x: p.rng.standard_normal(y.shape) * (moving in (x, "all")) for x, y in arrays.items()
        }
        want = slope(case.formula, arrays, way, d_out, **options)
        terms = [np.sum(found[x] * way[x]) for x in arrays]
        size = sum(float(np.sum(np.abs(found[x] * way[x]))) for x in arrays)
        assert abs(sum(terms) - want) <= 1e-9 * (1 + size), moving


@pytest.mark.parametrize("name", [x for x, case in CASES.items() if case.state])
def test_decoding_in_steps_is_the_whole_sequence(name):
    """Token by token and in parts, from no tokens or some; columns of values may be none."""
    for seed, cuts in enumerate([range(10), (0, 4, 6, 9), (3, 4, 9), (0, 9)]):
        case, p, options = prepared(name, "values" if seed % 2 else "none", 9, 9, seed=seed)
        want = case.fn(*p.arrays, **options, causal=True)
        state = case.state(p.k[: cuts[0]], p.v[..., : cuts[0], :], **options)
        for start, stop in pairwise(cuts):
            state = state.update(p.k[start:stop], p.v[..., start:stop, :])
            got = state.read(p.q[stop - 1 : stop])
            np.testing.assert_allclose(got, want[..., stop - 1 : stop, :], rtol=0, atol=1e-12)


@pytest.mark.long("jax", "dask")
@pytest.mark.parametrize("name", ["softmax", "rfa positive", "linear"])
def test_states_of_empty_axes(backend, name):
    """A state merged with one of no keys, and read by queries; 0 if there are no keys at all."""
    case, _, options = prepared(name)
    backend.jit = lambda run: run

    def decode(q, k, v):
        init = partial(case.state, **options)
        return init(k, v).merge(init(k[..., :0, :], v[..., :0, :])).update(k, v).read(q)

    def read_causal(q, k, v):
        return case.state(k, v, **options).read_causal(q, k, v)

    for heads, n, m, d_v in product((0, 3), repeat=4):
        arrays = [np.ones((heads, *x)) for x in ((n, 3), (m, 3), (m, d_v))]
        for function in (decode, read_causal)[: 1 + (name == "rfa positive")]:
            out = backend.call(function, *arrays)
            np.testing.assert_allclose(out, np.full((heads, n, d_v), float(m > 0)), rtol=1e-12)


TRACED = ("softmax", "rfa positive", "rfa trigonometric", "is", "lara balance")


@pytest.mark.long
@pytest.mark.parametrize("name", TRACED)
def test_jax_differentiates_and_maps(name):
    """Arrays being traced have no device: they work beside concrete ones."""
    jax = pytest.importorskip("jax")
    jax.config.update("jax_enable_x64", True)
    case, p, options = prepared(name, n=5, m=5, causal=name == "rfa positive")
    q, step = jax.numpy.asarray(p.q / 2), 1e-6 * p.rng.standard_normal(p.q.shape)

    def function(q):
        return case.fn(q, *map(jax.numpy.asarray, p.arrays[1:]), **options, **p.options)

    gradient = jax.grad(lambda q: function(q).sum())(q)
    difference = function(q + step).sum() - function(q - step).sum()
    np.testing.assert_allclose(2 * (gradient * step).sum(), difference, rtol=1e-5)
    batch = jax.numpy.stack([q, q / 2])
    want = jax.numpy.stack([function(x) for x in batch])
    np.testing.assert_allclose(jax.vmap(function)(batch), want, atol=1e-12)


@pytest.mark.parametrize("name", TRACED)
@pytest.mark.parametrize("empty", [False, True])
def test_torch_differentiates(name, empty):
    torch = pytest.importorskip("torch")
    case, p, options = prepared(name, n=5, m=5)
    k, v = (torch.asarray(x) for x in p.arrays[1:])
    mask = torch.asarray(np.arange(5) < (0 if empty else 3))
    q = torch.asarray(p.q / 2).requires_grad_(True)
    case.fn(q, k, v, mask=mask, **options).sum().backward()
    assert bool(torch.all(torch.isfinite(q.grad)))
    step = 1e-6 * torch.asarray(p.rng.standard_normal(p.q.shape))
    with torch.no_grad():
        ends = (case.fn(x, k, v, mask=mask, **options).sum() for x in (q + step, q - step))
        difference = next(ends) - next(ends)
        np.testing.assert_allclose(2 * (q.grad * step).sum(), difference, rtol=1e-4, atol=1e-15)


@pytest.mark.parametrize("name", TRACED)
def test_torch_autocast_changes_nothing(name):
    torch = pytest.importorskip("torch")
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
