"""Vectors of estimators: each flag catches the mistakes it names."""

import itertools

import numpy as np
import pytest

import refattn
from refattn.conformance import vectors
from refattn.conformance.vectors import recipes, solving
from tests.conformance.candidates import BY_NAME, rows
from tests.conformance.vectors import running
from tests.conformance.vectors.running import catalogued, changed, missed, package, takes


@pytest.fixture(scope="module")
def cases(every):
    return running.forward(running.of_file(every, *vectors.ESTIMATORS))


def test_half_precision_can_meet_its_vectors(cases):
    """Arithmetic in float16 throughout."""
    half = [c for c in cases if "float16" in c.tolerance and c.estimator == "softmax"]
    narrow = catalogued(BY_NAME["softmax"])
    assert len(half) >= 3
    for case in half:
        assert running.error(case, narrow, "float16") <= 1
        if "MASK" in case.flags or "CAUSAL" in case.flags:
            assert running.error(case, running.without(narrow, "mask", "causal"), "float16") > 1
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


def mistakes():
    for flags, estimators, mistake in rows("vectors/mistakes.txt"):
        named = vectors.ESTIMATORS if estimators == "ESTIMATORS" else estimators.split()
        yield from itertools.product(flags.split(), named, [mistake])


@pytest.mark.parametrize(("flag", "estimator", "mistake"), [*mistakes()])
def test_flags_catch_what_they_name(flag, estimator, mistake, cases):
    right = package(estimator)
    wrong = eval(mistake, {**vars(running), **globals(), "e": estimator, "run": right})
    named = [c for c in cases if c.estimator == estimator and flag in c.flags]
    if isinstance(wrong, str):
        wrong = catalogued(BY_NAME[wrong])
        right = right if estimator == "moments" else catalogued(BY_NAME[estimator])
        named = [c for c in named if takes(c)]
    elif "unstable" in mistake:
        named = [c for c in named if c.arguments.get("features", "positive") == "positive"]
        right = unstable if wrong is not unstable else right
    caught = [c for c in named if missed(c, wrong)]
    assert caught
    for case in caught:
        assert not missed(case, right), "the mistake is what is caught"


def test_every_flag_of_every_estimator_has_a_mistake(cases):
    used = {(flag, c.estimator) for c in cases for flag in c.flags}
    assert {(flag, estimator) for flag, estimator, _ in mistakes()} == used
    others = {"GRADIENT", "ALIBI", "BIAS", "CONVENTION", "DROPOUT", "HARD", "LSE", "SINKS"}
    others |= {"SOFTCAP", "TILE", "WINDOW"}
    assert {flag for flag, _ in used} == set(vectors.FLAGS) - others


def test_digits_that_are_not_determined_are_refused(monkeypatch):
    recipe = next(r for r in recipes.all_recipes() if r.id == "moments-basic-float64")
    monkeypatch.setattr(solving, "PRECISIONS", (20, 80))
    with pytest.raises(ValueError, match="is not determined to 30 digits"):
        solving.solved(recipe)
