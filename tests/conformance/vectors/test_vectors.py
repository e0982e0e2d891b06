"""The golden vectors: the package meets them, planted mistakes do not, damage is found."""

import hashlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from refattn import (
    kernels,
    linear_attention,
    linear_randomized_attention,
    moments,
    random_feature_attention,
    randomized_attention,
    registry,
    sampled_key_attention,
    softmax_attention,
)
from refattn.conformance import vectors
from refattn.conformance.truth import exact
from refattn.conformance.vectors import checking, recipes, solving, writing

Folders = dict[str, Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    found = {kind: tmp_path_factory.mktemp(kind) for kind in vectors.FORMATS}
    for kind, folder in found.items():
        vectors.write(folder, format=kind)
    return found


@pytest.fixture(scope="module")
def every(folders):
    return vectors.load(folders["json"])


@pytest.fixture(scope="module")
def cases(every):
    """Those of files of estimators, without gradients."""
    plain = {recipe.id for recipe in recipes.all_recipes() if recipe.file == recipe.estimator}
    return [case for case in every if case.id in plain and "GRADIENT" not in case.flags]


# --- running a case ------------------------------------------------------------------------------


def package(estimator):
    """The package's own function, called with the inputs and arguments of a case by name."""

    def moments_of(x, ddof):
        m = moments.estimate(x, ddof=ddof)
        return {"mean": m.mean, "cov": m.cov}

    def linear(q, k, v, feature_map, **options):
        assert feature_map == "elu"
        return linear_attention(q, k, v, **options)

    functions = {
        "kernel": kernels.estimate,
        "lara": linear_randomized_attention,
        "linear": linear,
        "moments": moments_of,
        "ra": randomized_attention,
        "rfa": random_feature_attention,
        "sampled-keys": sampled_key_attention,  # that of the registry draws them
        "softmax": softmax_attention,
    }
    return functions.get(estimator) or registry.ESTIMATORS[estimator].fn


def units(case, function, dtype, tolerance):
    """Largest error over the tolerance; infinite for nan, a wrong shape or an exception."""
    inputs = {n: x.astype(dtype) if x.dtype.kind == "f" else x for n, x in case.inputs.items()}
    try:
        with np.errstate(all="ignore"):
            got = function(**inputs, **case.arguments)
    except (IndexError, TypeError, ValueError):
        return np.inf
    got, worst = got if isinstance(got, dict) else {"out": got}, 0.0
    for name, want in case.expected.items():
        value = np.asarray(got[name])
        if value.shape != want.shape or not np.all(np.isfinite(value)):
            return np.inf
        wide = np.longdouble
        error = np.abs(value.astype(wide) - want.astype(wide) - case.expected_low[name])
        bound = np.broadcast_to(tolerance * case.size[name], want.shape)
        if np.any(error[bound == 0] != 0):
            return np.inf
        worst = max(worst, float(np.max(error[bound > 0] / bound[bound > 0], initial=0)))
    return worst


def misses(case, function):
    """Whether an implementation misses the case in some dtype."""
    dtypes = [name for name in case.tolerance if name in ("float32", "float64")]
    return any(units(case, function, dtype, case.tolerance[dtype]) > 1 for dtype in dtypes)


def test_package_meets_every_vector(cases, record_accuracy):
    count = {"float32": 0, "float64": 0}
    for case in cases:
        for dtype in count:
            if dtype in case.tolerance:
                error = units(case, package(case.estimator), dtype, case.tolerance[dtype])
                record_accuracy(f"vectors, {case.estimator}", dtype, 16 * error)
                assert error <= 1, (case.id, dtype)
                count[dtype] += 1
    assert count["float64"] == len(cases)
    assert count["float32"] > 100


def test_package_meets_every_vector_in_longdouble(cases, record_accuracy):
    eps = float(np.finfo(np.longdouble).eps)
    if eps >= np.finfo(np.float64).eps:
        pytest.skip("longdouble is float64 here")
    for case in cases:
        tolerance = case.tolerance["float64"] * eps / 2.0**-52
        error = units(case, package(case.estimator), np.longdouble, tolerance)
        record_accuracy(f"vectors, {case.estimator}", "longdouble", 16 * error)
        assert error <= 1, case.id


def test_half_precision_can_meet_its_vectors(cases):
    # Arithmetic in float16 throughout, with a textbook softmax.
    half = [c for c in cases if "float16" in c.tolerance and c.estimator == "softmax"]
    assert len(half) >= 3
    for case in half:
        assert units(case, textbook_softmax, "float16", case.tolerance["float16"]) <= 1
        if "MASK" in case.flags or "CAUSAL" in case.flags:
            blind = without("mask", "causal")(textbook_softmax)
            assert units(case, blind, "float16", case.tolerance["float16"]) > 1
    assert sum("bfloat16" in c.tolerance for c in cases) >= 10


# --- textbook implementations, and mistakes planted in them --------------------------------------


def seen(q, k, mask, causal, diagonal=0, corner="last"):
    n, m = q.shape[-2], k.shape[-2]
    shift = {"last": m - n, "first": 0}[corner] + diagonal
    visible = np.tri(n, m, shift, dtype=bool) if causal else np.ones((n, m), bool)
    return visible if mask is None else visible & mask


def spread(k, q):
    """Key heads for each query head."""
    return k if k.ndim < 3 else np.repeat(k, q.shape[0] // k.shape[0], axis=0)


def textbook_softmax(
    q, k, v, scale, causal, mask=None, eps=0.0, shift=True, hide=-np.inf, clamp=np.inf, **where
):
    k, v, visible = spread(k, q), spread(v, q), seen(q, k, mask, causal, **where)
    factor = q.dtype.type(1 / np.sqrt(q.shape[-1]) if scale is None else scale)
    scores = np.where(visible, q @ np.swapaxes(k, -1, -2) * factor, q.dtype.type(hide))
    scores = np.clip(scores, None if hide == -np.inf else -np.inf, clamp)
    if shift:
        top = scores.max(-1, keepdims=True)
        scores = scores - np.where(np.isfinite(top), top, 0)
    weights = np.exp(scores)
    total = weights.sum(-1, keepdims=True) + q.dtype.type(eps)
    out = weights @ np.where(visible.any(-2)[..., None], v, 0)
    return out / np.where(visible.any(-1, keepdims=True) | (hide > -np.inf), total, 1)


def textbook_rfa(
    q,
    k,
    v,
    omega,
    scale,
    causal,
    features,
    mask=None,
    log_weight=0.0,
    key_norm=0.5,
    query_norm=0.5,
    eps=0.0,
    hidden_in_total=False,
    power=0.25,
    **where,
):
    """Without stabilisation."""
    k, v, visible = spread(k, q), spread(v, q), seen(q, k, mask, causal, **where)
    root = q.shape[-1] ** -power if scale is None else np.sqrt(scale)

    def phi(x, norm):
        x = x * q.dtype.type(root)
        product, half = x @ np.swapaxes(omega, -1, -2), norm * (x * x).sum(-1)[..., None]
        if features == "trigonometric":
            return np.concatenate([np.cos(product), np.sin(product)], -1) * np.exp(half)
        both = [product] if features == "positive" else [product, -product]
        return np.exp(np.concatenate(both, -1) - half) + q.dtype.type(eps)

    weight = np.tile(np.exp(log_weight) * np.ones_like(omega[..., 0]),
                     1 if features == "positive" else 2)  # fmt: skip
    kernel = (phi(q, query_norm) * weight[..., None, :]) @ np.swapaxes(phi(k, key_norm), -1, -2)
    shown = np.where(visible, kernel, 0)
    total = (kernel if hidden_in_total else shown).sum(-1, keepdims=True)
    return shown @ v / np.where(visible.any(-1, keepdims=True), total, 1)


def textbook_ra(q, k, v, omega, scale, eps=0.0, key_norm=0.5):
    """Without stabilisation."""
    k = k * q.dtype.type(q.shape[-1] ** -0.25 if scale is None else np.sqrt(scale))
    weights = np.exp(omega @ k.T - key_norm * (k * k).sum(-1)) + q.dtype.type(eps)
    return (weights @ v / weights.sum(-1, keepdims=True)).mean(-2)


def textbook_lara(q, k, v, omega, centres, scale, weighting, **where):
    """Without stabilisation."""
    assert weighting == "balance"
    density = np.exp(omega @ centres.T - (centres * centres).sum(-1) / 2).sum(-1)
    return textbook_rfa(q, k, v, omega, scale, False, "positive", None, -np.log(density), **where)


def textbook_linear(
    q, k, v, causal, feature_map, mask = None, naive = False,
    eps = 0.0, hidden_in_total = False, **where,
):  # fmt: skip
    k, v, visible = spread(k, q), spread(v, q), seen(q, k, mask, causal, **where)

    def phi(x):
        low = np.exp(np.minimum(x, 0))
        return np.where(x > 0, x + 1, (low - 1) + 1 if naive else low)

    kernel = phi(q) @ np.swapaxes(phi(k), -1, -2)
    shown = np.where(visible, kernel, 0)
    total = (kernel if hidden_in_total else shown).sum(-1, keepdims=True) + q.dtype.type(eps)
    return shown @ v / np.where(visible.any(-1, keepdims=True), total, 1)


def textbook_moments(x, ddof, one_pass=False, ones=0):
    n, mean = len(x), x.mean(0)
    if one_pass:
        cov = (x.T @ x / n - np.outer(mean, mean)) * x.dtype.type(n / (n - ddof))
    else:
        cov = (x - mean).T @ (x - mean) / (n - ddof + ones)
    return {"mean": mean, "cov": cov}


def without(*names):
    """Drop arguments on the way, as an implementation that ignores them does."""
    plain = {"causal": False} | dict.fromkeys(
        ("scale", "mask", "log_weight", "log_probability", "omega")
    )

    def wrap(function):
        return lambda **given: function(
            **{n: plain[n] if n in names else x for n, x in given.items()}
        )

    return wrap


def change(function, **edits):
    """Replace arguments by functions of all of them."""

    def run(**given):
        return function(**given | {n: e(given) for n, e in edits.items() if n in given})

    return run


def with_options(function, **options):
    return lambda **given: function(**given, **options)


def interleave(name):
    def pick(given):
        x, heads = given[name], given["q"].shape[0]
        return x if x.ndim < 3 else x[np.arange(heads) % x.shape[0]]

    return pick


def flipped_signs(given):
    """Rows with their first entry positive, as after a QR without its signs."""
    omega = given["omega"]
    return omega * np.where(omega[..., :1] < 0, -1, 1).astype(omega.dtype)


def transposed(given):
    omega = given["omega"]
    square = omega.shape[-1] == omega.shape[-2]
    return np.swapaxes(omega, -1, -2).copy() if square else omega


def swapped(function):
    """Attend with keys as queries where shapes allow, otherwise with the mean of the values."""
    return lambda **given: (
        function(**given) * 0 + spread(given["v"], given["q"]).mean(-2, keepdims=True)
    )


def squeezed(function):
    def run(**given):
        out = function(**given)
        return (
            {n: np.squeeze(x) for n, x in out.items()} if isinstance(out, dict) else out.squeeze()
        )

    return run


def wrong_kernel(x, y, omega, features, log_weight = 0.0,
                 norm = 0.5, total = 1.0, shift = True):  # fmt: skip
    """The kernel estimate outside the log domain, or with a part missing."""
    a, b = x @ omega.T, y @ omega.T
    left, right = norm * (x * x).sum(-1)[:, None], norm * (y * y).sum(-1)[:, None]
    weight = np.exp(log_weight)
    if features == "trigonometric":
        return ((np.exp(left) * np.exp(right)) * np.cos(a - b) * weight).mean(-1) * total
    term = np.exp(a - left) * np.exp(b - right)
    if features == "hyperbolic":
        term = (term + np.exp(-a - left) * np.exp(-b - right)) / 2
    return (term * weight).mean(-1) * total


def half_range(function, most=16):
    """Entries limited to what a narrow format was calibrated for."""
    return change(
        function, **{n: lambda g, n=n: np.clip(g[n], -most, most) for n in ("q", "k", "omega")}
    )


def first(name, axis):
    def pick(given):
        x = given[name]
        return x if x.ndim + axis < 0 else np.repeat(np.take(x, [0], axis), x.shape[axis], axis)

    return pick


def masked_values_only(function):
    """Hidden values are 0, but their keys keep a share of the weight."""

    def run(mask=None, **given):
        if mask is None:
            return function(**given)
        plain = function(**given | {"v": np.ones_like(given["v"])}, mask=mask)
        del plain
        rows = [
            function(**given | {"q": given["q"][i : i + 1], "v": given["v"] * np.reshape(
                np.broadcast_to(mask, (len(given["q"]), len(given["k"])))[i], (-1, 1))})
            for i in range(len(given["q"]))
        ]  # fmt: skip
        return np.concatenate(rows)

    return run


def once(function):
    """Keys that come twice in a sample count once."""

    def run(indices, log_probability, **given):
        again = np.tril(indices[..., :, None] == indices[..., None, :], -1).any(-1)
        log_p = np.where(again, np.inf, log_probability).astype(log_probability.dtype)
        return function(indices=indices, log_probability=log_p, **given)

    return run


NEAR = ("eva", "rfa-local", "second-order")
SPARSE = ("coreset", "sampled-keys", *NEAR)
OPTIONS = {"ALIBI", "BIAS", "CONVENTION", "DROPOUT", "HARD", "LSE", "SINKS", "SOFTCAP", "TILE"}
OPTIONS |= {"WINDOW"}
S, R, L = textbook_softmax, textbook_rfa, textbook_linear
M, K = textbook_moments, wrong_kernel
of = package
MUTANTS = [
    # flag, estimator, right implementation, the same with the mistake
    *(("BASIC", e, of(e), swapped(of(e))) for e in ("softmax", "rfa", "ra", "lara", "linear")),
    ("BASIC", "kernel", K, change(K, features=lambda g: "positive")),
    ("BASIC", "moments", M, with_options(M, ones=-1)),
    ("BASIC", "rfa", of("rfa"), without("log_weight")(of("rfa"))),
    *(("EXTREME", e, of(e), half_range(of(e))) for e in ("softmax", "rfa", "ra", "lara", "kernel")),
    ("EXTREME", "softmax", of("softmax"), with_options(S, clamp=50.0)),
    ("EXTREME", "moments", of("moments"), change(M, x=lambda g: np.clip(g["x"], -65504, 65504))),
    ("OVERFLOW", "softmax", S, with_options(S, shift=False)),
    ("OVERFLOW", "rfa", of("rfa"), with_options(R, query_norm=0.0, key_norm=0.0)),
    ("OVERFLOW", "rfa", of("rfa"), R),
    ("OVERFLOW", "kernel", of("kernel"), lambda **g: K(**{
        n: x.astype(np.float32) if isinstance(x, np.ndarray) else x for n, x in g.items()})),
    ("UNDERFLOW", "softmax", S, with_options(S, shift=False)),
    ("UNDERFLOW", "softmax", S, with_options(S, shift=False, eps=1e-12)),
    ("UNDERFLOW", "rfa", of("rfa"), R),
    ("UNDERFLOW", "kernel", of("kernel"), K),
    *(("MASK", e, of(e), without("mask")(of(e))) for e in ("softmax", "rfa", "linear")),
    *(("MASK", e, of(e), masked_values_only(of(e))) for e in ("softmax", "rfa", "linear")),
    ("MASK", "rfa", of("rfa"), with_options(R, hidden_in_total=True)),
    ("EMPTY_ROW", "softmax", S, with_options(S, hide=-1e9)),
    *(("EMPTY_ROW", e, of(e), without("mask", "causal")(of(e))) for e in ("rfa", "linear")),
    *(("CAUSAL", e, f, with_options(f, diagonal=d))
      for e, f in (("softmax", S), ("linear", L)) for d in (-1, 1)),
    *(("CAUSAL", "rfa", of("rfa"), with_options(R, diagonal=d)) for d in (-1, 1)),
    *(("CAUSAL", e, of(e), without("causal")(of(e))) for e in ("softmax", "rfa", "linear")),
    *(("CROSS", e, of(e), with_options(f, corner="first"))
      for e, f in (("softmax", S), ("rfa", R), ("linear", L))),
    *(("CROSS", e, of(e), change(of(e), k=lambda g: g["k"][: len(g["q"])],
                                 v=lambda g: g["v"][: len(g["q"])])) for e in ("ra", "lara")),
    *(("GQA", e, of(e), change(of(e), k=interleave("k"), v=interleave("v")))
      for e in ("softmax", "rfa", "linear")),
    ("EPS", "softmax", S, with_options(S, eps=1e-6)),
    ("EPS", "rfa", R, with_options(R, eps=1e-6)),
    ("EPS", "ra", textbook_ra, with_options(textbook_ra, eps=1e-6)),
    ("EPS", "lara", textbook_lara, with_options(textbook_lara, eps=1e-6)),
    *((flag, e, of(e), with_options(f, key_norm=norm))
      for e, f in (("ra", textbook_ra), ("lara", textbook_lara))
      for flag, norm in (("OVERFLOW", 0.0), ("UNDERFLOW", 0.5))),
    ("MISSING_NORM", "lara", textbook_lara, with_options(textbook_lara, key_norm=0.0)),
    ("EPS", "linear", L, with_options(L, eps=1e-6)),
    ("CANCELLATION", "moments", of("moments"), with_options(M, one_pass=True)),
    ("CANCELLATION", "linear", L, with_options(L, naive=True)),
    ("CANCELLATION", "rfa", of("rfa"), lambda **g: np.clip(of("rfa")(**g), g["v"].min(0),
                                                           g["v"].max(0))),
    *(("SCALING", e, of(e), without("scale")(of(e))) for e in ("softmax", "rfa", "ra", "lara")),
    *(("SCALING", e, of(e), change(of(e), scale=lambda g: 1 / g["q"].shape[-1]
       if g["scale"] is None else g["scale"] ** 2)) for e in ("softmax", "rfa", "ra", "lara")),
    *(("SCALING", e, of(e), change(of(e), scale=lambda g: g["q"].shape[-1] ** -0.25
       if g["scale"] is None else g["scale"] ** 0.5)) for e in ("softmax", "rfa", "ra", "lara")),
    ("SCALING", "moments", of("moments"), change(of("moments"), x=lambda g: g["x"] + 1e-6)),
    ("MISSING_NORM", "rfa", R, with_options(R, key_norm=0.0)),
    ("MISSING_NORM", "rfa", R, with_options(R, key_norm=1.0)),
    ("MISSING_NORM", "kernel", K, with_options(K, norm=0.0)),
    ("MISSING_NORM", "kernel", K, with_options(K, norm=1.0)),
    ("MISSING_NORM", "ra", of("ra"), change(of("ra"), k=lambda g: g["k"] / np.linalg.norm(
        g["k"], axis=-1, keepdims=True))),
    *(("HAAR", e, of(e), change(of(e), omega=f)) for e in ("rfa", "ra", "lara", "kernel")
      for f in (flipped_signs, transposed)),
    ("HAAR", "rfa", of("rfa"), change(of("rfa"), omega=lambda g: np.linalg.qr(g["omega"].T)[0].T
                                      if g["omega"].shape == (4, 4) else g["omega"])),
    ("NORMALISATION", "rfa", of("rfa"), with_options(R, hidden_in_total=True)),
    ("NORMALISATION", "linear", L, with_options(L, hidden_in_total=True)),
    ("NORMALISATION", "softmax", of("softmax"), masked_values_only(of("softmax"))),
    *(("NORMALISATION", e, of(e), lambda e=e, **g: of(e)(**g) * g["omega"].shape[-2])
      for e in ("ra", "lara")),
    ("NORMALISATION", "kernel", K, lambda **g: K(**g) * len(g["omega"])),
    ("NORMALISATION", "moments", M, with_options(M, ones=1)),
    ("SHARED_RANDOMNESS", "rfa", of("rfa"), change(of("rfa"), omega=first("omega", -3))),
    ("SHARED_RANDOMNESS", "ra", of("ra"), change(of("ra"), omega=first("omega", -3))),
    *(("DEGENERATE", e, of(e), squeezed(of(e))) for e in vectors.ESTIMATORS),
    *(("DIMENSION", e, of(e), change(of(e), scale=lambda g: g["v"].shape[-1] ** -0.5
       if g["scale"] is None else g["scale"])) for e in ("softmax", "rfa", "ra", "lara")),
    ("DIMENSION", "kernel", K, change(K, omega=lambda g: np.where(
        np.arange(g["omega"].shape[-1]) < 32, g["omega"], 0).astype(g["omega"].dtype))),
    ("DIMENSION", "linear", L, change(L, q=lambda g: np.where(
        np.arange(g["q"].shape[-1]) < 32, g["q"], 0).astype(g["q"].dtype))),
    ("DIMENSION", "moments", M, lambda **g: {
        n: x[..., :8] for n, x in M(**g).items()}),
    *(("BASIC", e, of(e), swapped(of(e))) for e in SPARSE),
    *(("EXTREME", e, of(e), half_range(of(e), 4)) for e in SPARSE),
    *(("SCALING", e, of(e), without("scale")(of(e))) for e in SPARSE),
    *(("SCALING", e, of(e), change(of(e), scale=lambda g: g["q"].shape[-1] ** -0.25
       if g["scale"] is None else g["scale"] ** 0.5)) for e in SPARSE),
    *(("MASK", e, of(e), without("mask")(of(e))) for e in SPARSE),
    *(("GQA", e, of(e), change(of(e), k=interleave("k"), v=interleave("v")))
      for e in SPARSE if e != "coreset"),
    *(("CAUSAL", e, of(e), without("causal")(of(e))) for e in NEAR),
    *(("CROSS", e, of(e), change(of(e), k=lambda g: g["k"][: len(g["q"])],
                                 v=lambda g: g["v"][: len(g["q"])])) for e in NEAR),
    ("EMPTY_ROW", "sampled-keys", of("sampled-keys"), without("mask")(of("sampled-keys"))),
    *(("SAMPLE", e, of(e), change(of(e), indices=lambda g: np.roll(g["indices"], 1) - 1))
      for e in ("coreset", "sampled-keys")),
    *(("SAMPLE", "sampled-keys", of("sampled-keys"), f(of("sampled-keys")))
      for f in (without("log_probability"), once)),
    ("BASIC", "sampled-keys", of("sampled-keys"), without("log_probability")(of("sampled-keys"))),
    ("BASIC", "eva", of("eva"), without("omega")(of("eva"))),
    *(("CHUNK", e, of(e), change(of(e), window=lambda g, by=by: g["window"] + by))
      for e in ("eva", "second-order") for by in (-1, 1)),
    ("CHUNK", "eva", of("eva"), change(of("eva"), log_size=lambda g: not g["log_size"])),
    *(("NEAR", "rfa-local", of("rfa-local"), change(of("rfa-local"), window=f)) for f in (
        lambda g: g["window"][::-1],
        lambda g: tuple(x and x - 1 for x in g["window"]),
        lambda g: tuple(x if x is None else x + 1 for x in g["window"]))),
    ("NEAR", "rfa-local", of("rfa-local"), lambda window, **g: softmax_attention(
        window=window, **{n: x for n, x in g.items() if n != "omega"})),
]  # fmt: skip


@pytest.mark.parametrize("index", range(len(MUTANTS)))
def test_flags_catch_what_they_name(index, cases):
    flag, estimator, right, wrong = MUTANTS[index]
    named = [c for c in cases if c.estimator == estimator and flag in c.flags]
    assert named
    caught = [c for c in named if misses(c, wrong)]
    assert caught
    for case in caught:
        assert not misses(case, right), "the mistake is what is caught"


def test_every_flag_of_every_estimator_has_a_mutant(cases):
    used = {(flag, c.estimator) for c in cases for flag in c.flags}
    planted = {(flag, estimator) for flag, estimator, _, _ in MUTANTS}
    assert planted == used
    assert {flag for flag, _ in used} == set(vectors.FLAGS) - {"GRADIENT", *OPTIONS}


# --- the files -----------------------------------------------------------------------------------


def test_formats_hold_the_same(folders, every):
    for kind in ("npz", "safetensors"):
        for a, b in zip(every, vectors.load(folders[kind]), strict=True):
            assert (a.id, a.flags, a.arguments, a.tolerance) == (
                b.id, b.flags, b.arguments, b.tolerance
            )  # fmt: skip
            for part in ("inputs", "expected", "expected_low", "size"):
                x, y = getattr(a, part), getattr(b, part)
                assert x.keys() == y.keys()
                for name in x:
                    assert x[name].dtype == y[name].dtype
                    np.testing.assert_array_equal(x[name], y[name], strict=True)


def test_size_and_number(folders, cases):
    for folder in folders.values():
        assert sum(path.stat().st_size for path in folder.iterdir()) < 7_000_000
    assert len(cases) == len({c.id for c in cases}) > 80


@pytest.mark.long
def test_identical_bytes_in_another_process(folders, tmp_path):
    code = (
        "import sys; from refattn.conformance import vectors\n"
        "for kind in vectors.FORMATS: vectors.write(sys.argv[1] + '/' + kind, format=kind)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=100)
    for kind, folder in folders.items():
        names = sorted(path.name for path in folder.iterdir())
        assert names == sorted(path.name for path in (tmp_path / kind).iterdir())
        for name in names:
            assert (folder / name).read_bytes() == (tmp_path / kind / name).read_bytes()


def test_other_files_are_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / "rfa.json").write_text("old")
    vectors.write(tmp_path)
    assert (tmp_path / "mine.txt").read_text() == "mine"
    assert json.loads((tmp_path / "rfa.json").read_text())["estimator"] == "rfa"
    assert not list(tmp_path.glob(".*"))
    vectors.write(tmp_path, format="npz")
    assert vectors.lint(tmp_path, fraction=0) == ["mine.txt: is in no manifest"]
    with pytest.raises(ValueError, match="`directory` must hold vectors of one format"):
        vectors.load(tmp_path)
    assert len(vectors.load(tmp_path, format="npz")) == len(vectors.load(tmp_path, format="json"))
    with pytest.raises(ValueError, match="`format` must be one of json, npz, safetensors, got 'x'"):
        vectors.write(tmp_path, format="x")
    with pytest.raises(ValueError, match="has none"):
        vectors.load(tmp_path / "nowhere")


def test_digits_that_are_not_determined_are_refused(monkeypatch):
    recipe = next(r for r in recipes.all_recipes() if r.id == "moments-basic-float64")
    monkeypatch.setattr(solving, "PRECISIONS", (20, 80))
    with pytest.raises(ValueError, match="is not determined to 30 digits"):
        solving.solved(recipe)


# --- damage --------------------------------------------------------------------------------------


def _edit_test(key, value):
    def edit(document):
        document["testGroups"][0]["tests"][0][key] = value

    return edit


def _first(document, *path):
    x = document["testGroups"][0]["tests"][0]
    for key in path:
        x = x[key]
    return x


def _set(path, index, value):
    def edit(document):
        _first(document, *path)[index] = value

    return edit


def _repeat(new_id):
    def edit(document):
        tests = document["testGroups"][0]["tests"]
        copy = json.loads(json.dumps(tests[0]))
        copy["id"] = new_id or copy["id"]
        tests.append(copy)
        document["numberOfTests"] += 1

    return edit


NO_MANIFEST = "manifest-json.json: is missing; vectors without one must be written again"
OUT, Q = ("expected", "out", "data"), ("inputs", "q", "data")
DAMAGE = {
    "unknown key": (_edit_test("surprise", 1), "Additional properties"),
    "missing key": (lambda d: _first(d).pop("comment"), "'comment' is a required property"),
    "few digits": (_set(OUT, 0, "1.5"), "does not match"),
    "not a hex float": (_set(Q, 0, "0.5"), "not valid under any"),
    "duplicate id": (_repeat(None), "id is used twice"),
    "duplicate content": (_repeat("other"), "the same inputs and arguments"),
    "count": (lambda d: d.update(numberOfTests=3), "numberOfTests is 3"),
    "undescribed flag": (lambda d: d["notes"].pop("BASIC"), "flag BASIC is not described"),
    "unused flag": (lambda d: d["notes"].update(ZERO=d["notes"]["BASIC"]), "described but not"),
    "inexact": (_set(Q, 0, (0.1).hex()), "q: is not exact in bfloat16"),
    "short data": (lambda d: _first(d, *Q).pop(), "cannot reshape"),
    "shape": (lambda d: _first(d, "inputs", "q").update(shape=[2, 8]), "head sizes"),
    "not finite": (_set(OUT, 0, "1." + "1" * 33 + "e+999"), "OverflowError|not finite"),
    "one digit": (lambda d: _first(d, *OUT).__setitem__(
        0, _first(d, *OUT)[0].replace("5", "6", 1)), "evaluated again gives other digits"),
    "tolerance": (lambda d: _first(d, "tolerance").update(float64=1e-9), "is not 16 eps"),
    "condition": (_edit_test("cond", 1.0), "is not 16 eps"),
    "input": (_set(Q, 0, (0.25).hex()), "evaluated again|cond"),
    "estimator": (lambda d: d.update(estimator="linear"), "estimator is 'linear'"),
    "result": (_edit_test("result", "acceptable"), "does not go with the flags"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_linter_finds_damage(damage, folders, tmp_path):
    edit, message = DAMAGE[damage]
    document = json.loads((folders["json"] / "softmax.json").read_text())
    del document["testGroups"][1:]  # gradients
    # The bfloat16 case comes first, so that its inputs can be inexact.
    tests = document["testGroups"][0]["tests"]
    used = {flag for test in tests for flag in test["flags"]}
    notes = {flag: note for flag, note in document["notes"].items() if flag in used}
    document.update(numberOfTests=len(tests), notes=notes)
    tests.sort(key=lambda test: test["id"] != "softmax-basic-bfloat16")
    path = tmp_path / "softmax.json"
    path.write_text(json.dumps(document))
    assert vectors.lint(tmp_path, fraction=0) == [NO_MANIFEST]
    edit(document)
    path.write_text(json.dumps(document))
    problems = vectors.lint(tmp_path, fraction=1)
    assert any(re.search(message, problem) for problem in problems), problems


def test_linter_finds_damaged_files(folders, tmp_path):
    assert vectors.lint(tmp_path) == [f"{tmp_path}: no vectors"]
    text = (folders["json"] / "ra.json").read_text()
    (tmp_path / "ra.json").write_text(text.replace('"package":', '"schema": "x", "package":', 1))
    assert "an object has a key twice" in vectors.lint(tmp_path)[1]
    (tmp_path / "ra.json").unlink()
    for kind in ("npz", "safetensors"):
        data = bytearray((folders[kind] / f"moments.{kind}").read_bytes())
        (tmp_path / f"moments.{kind}").write_bytes(data[:5000])
        assert "cannot be read" in vectors.lint(tmp_path)[1]
        with pytest.raises(ValueError, match="cannot read"):
            vectors.load(tmp_path)
        (tmp_path / f"moments.{kind}").unlink()
    with np.load(folders["npz"] / "moments.npz") as file:
        arrays = {name: file[name] for name in file.files}
    name = "moments-basic-float64.cov.expected"
    np.savez(tmp_path / "moments.npz", **arrays | {name: arrays[name] * (1 + 2.0**-40)})
    assert "other digits" in vectors.lint(tmp_path, fraction=1)[1]
    np.savez(tmp_path / "moments.npz", **arrays, stray=np.ones(2))
    assert "array stray belongs to no case" in vectors.lint(tmp_path, fraction=0)[1]
    np.savez(tmp_path / "moments.npz", **{n: x for n, x in arrays.items() if n != name})
    assert "KeyError" in vectors.lint(tmp_path, fraction=0)[1]
    pickled = np.empty(1, object)
    np.savez(tmp_path / "moments.npz", **arrays | {name: pickled})
    assert "cannot be read" in vectors.lint(tmp_path, fraction=0)[1]


def _damage_text(old, new):
    def edit(data):
        assert old.encode() in data
        return data.replace(old.encode(), new.encode(), 1)

    return edit


def _without_a_test(data):
    document = json.loads(data)
    del document["testGroups"][0]["tests"][0]
    document["numberOfTests"] -= 1
    return writing.to_json(document)


def _digit_after(key):
    """Change the first digit between 1 and 8 of the first number of a key."""

    def edit(data):
        start = data.index(f'"{key}": '.encode()) + len(key) + 4
        found = re.compile(rb"(?<=[\d.])[1-8]").search(data, start)
        assert found is not None
        at = found.start()
        return data[:at] + bytes([data[at] + 1]) + data[at + 1 :]

    return edit


CHANGES = {
    "file gone": ("ra.json", lambda data: None, "ra.json: is missing"),
    "readme gone": ("README.md", lambda data: None, "README.md: is missing"),
    "manifest gone": ("manifest-json.json", lambda data: None, NO_MANIFEST),
    "cut": ("ra.json", lambda data: data[:-100], "ra.json: has .* bytes, not the .* of manifest"),
    "cut to a document": ("ra.json", lambda data: data.rstrip(), "ra.json: has .* bytes"),
    "empty": ("ra.json", lambda data: b"", "ra.json: has 0 bytes"),
    "test gone": ("linear.json", _without_a_test, "linear.json: linear-basic-float64: is missing"),
    "comment": ("ra.json", _damage_text("order one", "order two"), "ra.json: does not have the S"),
    "input": ("ra.json", _digit_after("k"), "ra-basic-float64: out: evaluated again gives other"),
    "output": ("ra.json", _digit_after("expected"), "out: evaluated again gives other digits"),
    "tolerance": ("ra.json", _digit_after("float64"), "tolerance for float64 is not 16 eps"),
    "readme": ("README.md", _damage_text("16 eps", "17 eps"), "README.md: does not have the SHA"),
    "schema": (
        "vectors.schema.json", _damage_text("minLength", "maxLength"), "schema.json: does not have"
    ),
    "checksum": ("manifest-json.json", _digit_after("sha256"), "manifest-json.json: is not as it"),
    "count": (
        "manifest-json.json", _damage_text('"numberOfTests": ', '"numberOfTests": 1'),
        "manifest-json.json: is not as it was written",
    ),
    "name": (
        "manifest-json.json", _damage_text("ra-basic-float64", "ra-basic-float16"),
        "manifest-json.json: is not as it was written",
    ),
    "blank": ("manifest-json.json", lambda data: data + b" ", "manifest-json.json: is not as it"),
    "version": ("manifest-json.json", _damage_text("0.", "9."), "manifest-json.json: is not as it"),
    "manifest cut": ("manifest-json.json", lambda data: data[:99], "json.json: cannot be read"),
    "manifest of something": ("manifest-json.json", lambda data: b"{}", "json.json: : 'files' is"),
    "deep": ("ra.json", lambda data: b"[" * 100_000, "ra.json: cannot be read: .* nested too deep"),
    "deep manifest": ("manifest-json.json", lambda data: b"[" * 100_000, "nested too deeply"),
    "nan": ("ra.json", _damage_text('"cond": ', '"cond": NaN, "_": '), "NaN is not a number"),
    "digits": ("ra.json", _damage_text('"cond": ', f'"cond": {"9" * 400}, "_": '), "_.*unexpected"),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_named(change, folders, tmp_path):
    name, edit, message = CHANGES[change]
    folder = tmp_path / "vectors"
    shutil.copytree(folders["json"], folder)
    for path in folder.glob("*.json"):  # evaluated again where that is what finds it
        if path.stem not in ("ra", "linear", "vectors.schema", "manifest-json"):
            path.unlink()
    gone = {f"{path.name}: is missing" for path in folders["json"].iterdir()} - {
        f"{path.name}: is missing" for path in folder.iterdir()
    }
    assert set(vectors.lint(folder, fraction=0)) == gone
    path = folder / name
    data = edit(path.read_bytes())
    path.unlink()
    if data is not None:
        path.write_bytes(data)
    problems = set(vectors.lint(folder)) - gone
    assert any(re.search(message, problem) for problem in problems), problems


def test_every_case_is_evaluated_again(folders, tmp_path, monkeypatch):
    again = []
    monkeypatch.setattr(checking, "_lint_again", lambda case, *rest: again.append(case.id) or ())
    for kind in vectors.FORMATS:
        again.clear()
        assert vectors.lint(folders[kind]) == []
        assert again == [case.id for case in vectors.load(folders[kind])]


@pytest.mark.long("npz")
@pytest.mark.parametrize("kind", vectors.FORMATS)
def test_a_flipped_bit_anywhere_is_named(kind, folders, tmp_path):
    folder = tmp_path / "vectors"
    shutil.copytree(folders[kind], folder)
    rng = np.random.default_rng(0)
    for path in sorted(folder.iterdir()):
        if path.stem in ("kernel", "lara", "rfa", "softmax", "softmax-hard"):
            path.unlink()
    for path in sorted(folder.iterdir()):
        data = bytearray(path.read_bytes())
        data[rng.integers(len(data))] ^= 1 << int(rng.integers(8))
        whole = path.read_bytes()
        path.write_bytes(data)
        assert any(p.startswith(f"{path.name}: ") for p in vectors.lint(folder, fraction=0))
        path.write_bytes(whole)


def test_added_files_are_named(folders, tmp_path):
    folder = tmp_path / "vectors"
    shutil.copytree(folders["npz"], folder)
    (folder / "new.npz").write_bytes((folder / "ra.npz").read_bytes())
    (folder / ".ra.npz.part").write_bytes(b"")
    problems = vectors.lint(folder, fraction=0)
    assert problems == [f"{name}: is in no manifest" for name in (".ra.npz.part", "new.npz")]


def test_manifest(folders):
    for kind, folder in folders.items():
        manifest = json.loads((folder / f"manifest-{kind}.json").read_text())
        assert set(manifest["files"]) | {f"manifest-{kind}.json"} == {
            path.name for path in folder.iterdir()
        }
        for name, entry in manifest["files"].items():
            data = (folder / name).read_bytes()
            assert entry["bytes"] == len(data)
            assert entry["sha256"] == hashlib.sha256(data).hexdigest()
        count = sum(entry.get("numberOfTests", 0) for entry in manifest["files"].values())
        assert count == len(vectors.load(folder))


def test_numbers_that_are_too_large_are_unreadable(folders, tmp_path):
    text = (folders["json"] / "ra.json").read_text()
    for old, new in ((r'"shape": \[ \d+', f'"shape": [ {"9" * 400}'), (r'p[+-]\d+"', 'p+99999"')):
        (tmp_path / "ra.json").write_text(re.sub(old, new, text, count=1))
        with pytest.raises(ValueError, match=r"cannot read .*ra\.json"):
            vectors.load(tmp_path)
        assert any("ra-basic-float64: " in p for p in vectors.lint(tmp_path, fraction=0))


# --- the command line and the readers ------------------------------------------------------------


@pytest.mark.long
def test_command_line(tmp_path, monkeypatch):
    from click.testing import CliRunner

    from refattn.cli import commands

    folder = tmp_path / "out"

    def run(*arguments):
        return CliRunner().invoke(commands(), ["vectors", str(folder), *arguments])

    assert run("--check").exit_code == 1
    for kind in vectors.FORMATS:
        result = run("--format", kind)
        assert result.exit_code == 0, result.output
        assert re.search(r": \d+ vectors in 19 files, \d+ kB\n", result.output)
    result = run("--check")
    assert (result.exit_code, "no problems" in result.output) == (0, True)
    path = folder / "ra.json"
    path.write_text(path.read_text().replace('"numberOfTests": ', '"numberOfTests": 9', 1))
    result = run("--check")
    assert result.exit_code == 1
    assert "ra.json: numberOfTests" in result.output
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    result = run("--check")
    assert result.exit_code == 2
    assert "checking vectors needs `pip install 'refattn[vectors]'`" in result.output


@pytest.mark.long
@pytest.mark.parametrize(
    ("missing", "call", "message"),
    [
        ("mpmath", "write(folder)", "refattn.conformance.truth.exact needs"),
        ("jsonschema", "lint(folder)", "checking vectors needs"),
        ("safetensors", "load(folder)", "reading .safetensors needs"),
    ],
)
def test_missing_extra(missing, call, message, folders):
    code = (
        f"import sys; sys.modules[{missing!r}] = None; folder = sys.argv[1]\n"
        "from refattn.conformance import vectors\n"
        f"try: vectors.{call}\n"
        "except ModuleNotFoundError as error: print(error)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(folders["safetensors"])],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert result.stdout == f"{message} `pip install 'refattn[vectors]'`\n"


def _block(folder, language):
    return (folder / "README.md").read_text().split(f"```{language}\n")[1].split("```")[0]


def test_numpy_reader(folders):
    scope = {}
    exec(_block(folders["npz"], "python"), scope)
    failures, path = scope["failures"], folders["npz"] / "softmax.npz"

    def run(scale, **given):
        scale = float.fromhex(scale) if scale else None
        with np.errstate(all="ignore"):
            return softmax_attention(scale=scale, **given)

    assert list(failures(path, run)) == []
    assert list(failures(path, run, "float64")) == []
    ignored = set(failures(path, lambda scale, **given: run(None, **given)))
    assert ignored == {"softmax-scale-float32"}
    assert list(failures(folders["npz"] / "moments.npz", package("moments"))) == []


@pytest.mark.parametrize(
    ("file", "start"), [("rfa", "rfa-"), ("softmax-conventions", "softmax-convention-")]
)
def test_cpp_reader(file, start, folders, tmp_path, every):
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    includes = ("cstdint", "cstdio", "fstream", "sstream", "stdexcept", "string", "vector")
    source = "".join(f"#include <{name}>\n" for name in includes)
    source += _block(folders["safetensors"], "cpp")
    source += """
int main(int, char** argv) {
    for (char** name = argv + 2; *name; ++name)
        for (double x : read(argv[1], *name)) std::printf("%a\\n", x);
}
"""
    (tmp_path / "read.cpp").write_text(source)
    binary = str(tmp_path / "read")
    subprocess.run(
        [compiler, "-std=c++11", "-Wall", "-Wextra", "-Werror", "-o", binary,
         str(tmp_path / "read.cpp")], check=True, timeout=100,
    )  # fmt: skip
    estimator = start.partition("-")[0]
    few = [c for c in every if c.id.startswith(start) and c.estimator == estimator]
    names, want = [], []
    for case in few:
        names += [f"{case.id}.q", f"{case.id}.out.expected", f"{case.id}.out.expected_low"]
        parts = (case.inputs["q"], case.expected["out"], case.expected_low["out"])
        want += [x for part in parts for x in part.ravel().tolist()]
    path = str(folders["safetensors"] / f"{file}.safetensors")
    result = subprocess.run(
        [binary, path, *names], capture_output=True, text=True, check=True, timeout=60
    )
    got = [float.fromhex(line) for line in result.stdout.split()]
    np.testing.assert_array_equal(got, want)  # nan and infinities too
    short = tmp_path / "short"
    short.write_bytes(Path(path).read_bytes()[:-20_000])
    cut = subprocess.run([binary, str(short), names[-1]], capture_output=True, timeout=60)
    assert cut.returncode != 0
    missing = subprocess.run([binary, path, "nothing"], capture_output=True, timeout=60)
    assert missing.returncode != 0


# --- arbitrary precision -------------------------------------------------------------------------


def test_exact_numbers_keep_every_bit():
    x = np.longdouble(1) / 3
    assert exact.numbers([x])[0] - exact.numbers([float(x)])[0] == float(
        x - np.longdouble(float(x))
    )
    assert exact.numbers([np.inf])[0] == exact.context().inf
    with pytest.raises(ValueError, match="`features` must be positive, hyperbolic or trig"):
        exact.feature_map(exact.numbers(np.ones((1, 1))), exact.numbers(np.ones((1, 1))), "relu")
