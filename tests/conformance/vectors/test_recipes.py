"""Vectors of estimators: each flag catches the mistakes it names."""

from functools import partial

import numpy as np
import pytest

import refattn
from refattn.conformance import vectors
from refattn.conformance.defects import MUTANTS, VARIANTS
from refattn.conformance.vectors import recipes, solving
from tests.conformance.vectors.running import (
    catalogued,
    changed,
    error,
    forward,
    missed,
    of_file,
    package,
    spoilt,
    takes,
    without,
)

CATALOGUE = {m.name: m for m in (*VARIANTS, *MUTANTS)}


@pytest.fixture(scope="module")
def cases(every):
    return forward(of_file(every, *vectors.ESTIMATORS))


def test_half_precision_can_meet_its_vectors(cases):
    """Arithmetic in float16 throughout."""
    half = [c for c in cases if "float16" in c.tolerance and c.estimator == "softmax"]
    narrow = catalogued(CATALOGUE["softmax"])
    assert len(half) >= 3
    for case in half:
        assert error(case, narrow, "float16") <= 1
        if "MASK" in case.flags or "CAUSAL" in case.flags:
            assert error(case, without(narrow, "mask", "causal"), "float16") > 1
    assert sum("bfloat16" in c.tolerance for c in cases) >= 10


# --- mistakes -------------------------------------------------------------------------------------


def unstable(
    q, k, v, omega, scale, causal=False, mask=None, centres=None, weighting=None,
    features="positive", log_weight=0.0, eps=0.0, norm=0.5, hidden=False,
):  # fmt: skip
    """Attention by positive features as they are written, without a maximum."""
    assert features == "positive"
    if centres is not None:
        log_weight = -np.log(np.exp(omega @ centres.T - (centres * centres).sum(-1) / 2).sum(-1))
    root = q.dtype.type(q.shape[-1] ** -0.25 if scale is None else np.sqrt(scale))
    q, k = q * root, k * root
    seen = refattn.naive.visible(q, k, mask=mask, causal=causal)

    def phi(x):
        square = np.sum(x * x, axis=-1, keepdims=True)
        return np.exp(x @ omega.swapaxes(-1, -2) - norm * square) + q.dtype.type(eps)

    if omega.ndim > 2 and q.ndim == 2:  # frequencies of each query: a mean of ratios
        weights = phi(k).swapaxes(-1, -2)
        return np.mean(weights @ v / weights.sum(-1, keepdims=True), -2)
    kernel = (phi(q) * np.exp(log_weight)) @ phi(k).swapaxes(-1, -2)
    total = np.sum(kernel if hidden else np.where(seen, kernel, 0), -1, keepdims=True)
    return np.where(seen, kernel, 0) @ v / np.where(np.any(seen, -1, keepdims=True), total, 1)


def top_left(x):
    """A causal mask of the first keys, with the mask that there is."""
    seen = np.tri(x["q"].shape[-2], x["k"].shape[-2], dtype=bool)
    return seen if x.get("mask") is None else seen & x["mask"]


def interleaved(name):
    def pick(x):
        heads = x["q"].shape[0] if x["q"].ndim > 2 else 1
        return x[name] if x[name].ndim < 3 else x[name][np.arange(heads) % x[name].shape[0]]

    return pick


def first_head(x):
    """Frequencies of the first head for all."""
    omega = x["omega"]
    return omega if omega.ndim < 3 else np.repeat(omega[:1], len(omega), axis=0)


def some(name, count):
    """The first entries of an argument, zeros for others."""
    return lambda x: np.where(np.arange(x[name].shape[-1]) < count, x[name], 0).astype(
        x[name].dtype
    )


def power(of):
    """Another scale by default, and the same power of one that is given."""
    return lambda x: x["q"].shape[-1] ** -of if x["scale"] is None else x["scale"] ** (2 * of)


def limited(run, most):
    """Entries limited to what a narrow format was calibrated for."""
    names = ("q", "k", "omega")
    return changed(run, **{n: lambda x, n=n: np.clip(x[n], -most, most) for n in names})


def fewer_keys(run):
    """No more keys than queries."""
    return changed(run, **{n: lambda x, n=n: x[n][: len(x["q"])] for n in "kv"})


def flipped(x):
    """Rows with their first entry positive, as after a QR without its signs."""
    return x["omega"] * np.where(x["omega"][..., :1] < 0, -1, 1).astype(x["omega"].dtype)


def transposed(x):
    square = x["omega"].shape[-1] == x["omega"].shape[-2]
    return np.swapaxes(x["omega"], -1, -2).copy() if square else x["omega"]


def squeezed(x, given):
    return np.squeeze(x)


def times_count(x, given):
    return x * given["omega"].shape[-2]


def unit_keys(x):
    return x["k"] / np.linalg.norm(x["k"], axis=-1, keepdims=True)


def once(x):
    """Log probabilities in which keys that come twice in a sample count once."""
    indices, log_p = x["indices"], x["log_probability"]
    again = np.tril(indices[..., :, None] == indices[..., None, :], -1).any(-1)
    return np.where(again, np.inf, log_p).astype(log_p.dtype)


def features_apart(x, y, omega, features):
    """A kernel as a mean of products of features, each rounded on its own."""
    zero, of = np.zeros_like(x), package("kernel")
    products = [
        of(x=x, y=zero, omega=w, features=features)["out"]
        * of(x=zero, y=y, omega=w, features=features)["out"]
        for w in omega[:, None]
    ]
    return np.mean(products, 0)


def single(x):
    return {n: y.astype(np.float32) if isinstance(y, np.ndarray) else y for n, y in x.items()}


P = {e: package(e) for e in vectors.ESTIMATORS}
DENSE, DRAWN = ("softmax", "rfa", "linear"), ("rfa", "ra", "lara")
SCALED, NEAR = ("softmax", *DRAWN), ("eva", "rfa-local", "second-order")
SPARSE = ("coreset", "sampled-keys", *NEAR)
MISTAKES = [  # flag, estimator, and a mistake, or the name of one in the catalogue
    *(("BASIC", e, f"{e}-root-twice") for e in DRAWN),
    ("BASIC", "softmax", "softmax-base-two"),
    ("BASIC", "linear", "linear-exponential"),
    ("BASIC", "kernel", "kernel-norm-unsquared"),
    ("BASIC", "moments", "moments-ddof-0"),
    ("BASIC", "rfa", without(P["rfa"], "log_weight")),
    ("BASIC", "sampled-keys", without(P["sampled-keys"], "log_probability")),
    ("BASIC", "eva", without(P["eva"], "omega")),
    *(("BASIC", e, changed(P[e], scale=lambda x: 1.0)) for e in SPARSE),
    *(("EXTREME", e, limited(P[e], 16)) for e in (*SCALED, "kernel")),
    *(("EXTREME", e, limited(P[e], 4)) for e in SPARSE),
    ("EXTREME", "softmax", "softmax-clipped"),
    ("EXTREME", "moments", changed(P["moments"], x=lambda x: np.clip(x["x"], -65504, 65504))),
    *((flag, "softmax", "softmax-overflow") for flag in ("OVERFLOW", "UNDERFLOW")),
    *((flag, "rfa", "rfa-overflow") for flag in ("OVERFLOW", "UNDERFLOW")),
    *((flag, e, unstable) for flag in ("OVERFLOW", "UNDERFLOW") for e in DRAWN),
    ("OVERFLOW", "kernel", lambda **x: P["kernel"](**single(x))),
    ("UNDERFLOW", "kernel", features_apart),
    *(("MASK", e, without(P[e], "mask")) for e in (*DENSE, *SPARSE)),
    *(("MASK", e, f"{e}-mask-on-values") for e in DENSE),
    ("EMPTY_ROW", "softmax", "softmax-mask-minus-1e9"),
    *(("EMPTY_ROW", e, without(P[e], "mask", "causal")) for e in ("rfa", "linear")),
    ("EMPTY_ROW", "sampled-keys", without(P["sampled-keys"], "mask")),
    *(("CAUSAL", e, f"{e}-causal-{way}") for e in DENSE for way in ("strict", "ahead")),
    *(("CAUSAL", e, without(P[e], "causal")) for e in (*DENSE, *NEAR)),
    *(("CROSS", e, lambda e=e, **x: P[e](**x | {"mask": top_left(x), "causal": False}))
      for e in DENSE),
    *(("CROSS", e, fewer_keys(P[e])) for e in ("ra", "lara", *NEAR)),
    *(("GQA", e, changed(P[e], k=interleaved("k"), v=interleaved("v")))
      for e in (*DENSE, "sampled-keys", *NEAR)),
    ("EPS", "softmax", "softmax-epsilon"),
    *(("EPS", e, partial(unstable, eps=1e-6)) for e in DRAWN),
    ("EPS", "linear", "linear-absolute-epsilon"),
    ("CANCELLATION", "moments", "moments-one-pass"),
    ("CANCELLATION", "linear", "linear-elu-cancels"),
    ("CANCELLATION", "rfa", spoilt(P["rfa"], out=lambda out, x: np.clip(
        out, x["v"].min(0), x["v"].max(0)))),
    *(("SCALING", e, without(P[e], "scale")) for e in (*SCALED, *SPARSE)),
    *(("SCALING", e, changed(P[e], scale=power(0.25))) for e in (*SCALED, *SPARSE)),
    *(("SCALING", e, changed(P[e], scale=power(1.0))) for e in SCALED),
    ("SCALING", "moments", changed(P["moments"], x=lambda x: x["x"] + 1e-6)),
    *(("MISSING_NORM", e, f"{e}-key-norm-dropped") for e in DRAWN),
    ("MISSING_NORM", "rfa", "rfa-key-norm-whole"),
    *(("MISSING_NORM", "kernel", f"kernel-{x}") for x in ("norm-of-y-dropped", "whole-norm")),
    ("MISSING_NORM", "ra", changed(P["ra"], k=unit_keys)),
    *(("HAAR", e, changed(P[e], omega=f)) for e in (*DRAWN, "kernel")
      for f in (flipped, transposed)),
    ("HAAR", "rfa", changed(P["rfa"], omega=lambda x: np.linalg.qr(x["omega"].T)[0].T
                            if x["omega"].shape == (4, 4) else x["omega"])),
    ("NORMALISATION", "rfa", partial(unstable, hidden=True)),
    *(("NORMALISATION", e, f"{e}-mask-on-values") for e in DENSE),
    *(("NORMALISATION", e, spoilt(P[e], out=times_count)) for e in ("ra", "lara", "kernel")),
    ("NORMALISATION", "moments", "moments-mean-over-n-minus-1"),
    *(("SHARED_RANDOMNESS", e, changed(P[e], omega=first_head)) for e in ("rfa", "ra")),
    *(("DEGENERATE", e, spoilt(P[e], out=squeezed, cov=squeezed)) for e in vectors.ESTIMATORS),
    *(("DIMENSION", e, changed(P[e], scale=lambda x: x["v"].shape[-1] ** -0.5
       if x["scale"] is None else x["scale"])) for e in SCALED),
    ("DIMENSION", "kernel", changed(P["kernel"], omega=some("omega", 32))),
    ("DIMENSION", "linear", changed(P["linear"], q=some("q", 32))),
    ("DIMENSION", "moments", spoilt(P["moments"], mean=lambda x, given: x[:8])),
    *(("SAMPLE", e, changed(P[e], indices=lambda x: abs(x["indices"] - 1)))
      for e in ("coreset", "sampled-keys")),
    ("SAMPLE", "sampled-keys", without(P["sampled-keys"], "log_probability")),
    ("SAMPLE", "sampled-keys", changed(P["sampled-keys"], log_probability=once)),
    *(("CHUNK", e, changed(P[e], window=lambda x, by=by: x["window"] + by))
      for e in ("eva", "second-order") for by in (-1, 1)),
    ("CHUNK", "eva", changed(P["eva"], log_size=lambda x: not x["log_size"])),
    *(("NEAR", "rfa-local", changed(P["rfa-local"], window=f)) for f in (
        lambda x: x["window"][::-1],
        lambda x: tuple(n and n - 1 for n in x["window"]),
        lambda x: tuple(n if n is None else n + 1 for n in x["window"]))),
    ("NEAR", "rfa-local", lambda omega, **x: P["softmax"](**x)),
]  # fmt: skip


@pytest.mark.parametrize("index", range(len(MISTAKES)))
def test_flags_catch_what_they_name(index, cases):
    flag, estimator, wrong = MISTAKES[index]
    right = P[estimator]
    named = [c for c in cases if c.estimator == estimator and flag in c.flags]
    if isinstance(wrong, str):
        wrong = catalogued(CATALOGUE[wrong])
        right = right if estimator == "moments" else catalogued(CATALOGUE[estimator])
        named = [c for c in named if takes(c)]
    elif wrong is unstable or isinstance(wrong, partial):
        named = [c for c in named if c.arguments.get("features", "positive") == "positive"]
        right = unstable if isinstance(wrong, partial) else right
    caught = [c for c in named if missed(c, wrong)]
    assert caught
    for case in caught:
        assert not missed(case, right), "the mistake is what is caught"


def test_every_flag_of_every_estimator_has_a_mistake(cases):
    used = {(flag, c.estimator) for c in cases for flag in c.flags}
    assert {(flag, estimator) for flag, estimator, _ in MISTAKES} == used
    others = {"GRADIENT", "ALIBI", "BIAS", "CONVENTION", "DROPOUT", "HARD", "LSE", "SINKS"}
    others |= {"SOFTCAP", "TILE", "WINDOW"}
    assert {flag for flag, _ in used} == set(vectors.FLAGS) - others


def test_digits_that_are_not_determined_are_refused(monkeypatch):
    recipe = next(r for r in recipes.all_recipes() if r.id == "moments-basic-float64")
    monkeypatch.setattr(solving, "PRECISIONS", (20, 80))
    with pytest.raises(ValueError, match="is not determined to 30 digits"):
        solving.solved(recipe)
