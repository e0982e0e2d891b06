"""Vectors catch mistakes: each flag those that it names, and defects of the catalogue."""

import itertools

import numpy as np
import pytest

import refattn
from refattn.judge import vectors
from refattn.judge.mistakes.defects import MUTANTS, VARIANTS
from tests.judge.conformance.candidates import BY_NAME, rows
from tests.judge.vectors import running, translating
from tests.judge.vectors.running import catalogued, changed, forward, missed, package, spoilt

DTYPES = ("float32", "float64")


def chosen(flag, kind, every):
    """Cases of an estimator, perhaps with features, or of options, that have the flag."""
    cases = running.of_file(every, *vectors.ESTIMATORS)
    if flag == "GRADIENT":
        estimator, _, features = kind.partition("-")
        return [case for case in every if case.group == f"softmax-{kind}-gradients"] or [
            running.of_package(case)
            for case in cases
            if "d_out" in case.inputs
            and case.estimator == estimator
            and case.arguments.get("features", "positive") == (features or "positive")
        ]
    if kind == "options":
        cases = running.of_options(every)
    return [c for c in forward(cases) if kind in ("options", c.estimator) and flag in c.flags]


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


def other_distance(run, of):
    """Slopes times a function of the places of queries and keys, and how many there are."""

    def wrong(slopes, q, k, **given):
        n, m = q.shape[-2], k.shape[-2]
        distance = of(np.arange(n)[:, None], np.arange(m), n, m)
        bias = -slopes[:, None, None] * distance.astype(q.dtype)
        return run(q=q, k=k, bias=bias, **given)

    return wrong


def cut(run, name, count):
    """Queries or keys in tiles of `count`, of which the last is lost if it is not whole."""

    def whole(x):
        return np.arange(len(x)) < len(x) // count * count

    if name == "q":
        return spoilt(run, out=lambda out, x: np.where(whole(out)[:, None], out, 0))
    return lambda **x: run(**x, mask=whole(x["k"]))


def lse_without_maximum(lse, x):
    k = np.repeat(x["k"], len(x["q"]) // len(x["k"]), axis=0) if x["q"].ndim > 2 else x["k"]
    top = np.max(x["q"] @ k.swapaxes(-1, -2), -1) * x["q"].shape[-1] ** -0.5
    return lse - np.where(np.isfinite(lse), top, 0)


def normalised(out, x):
    return out / np.maximum(
        package("softmax")(**x | {"v": np.ones_like(x["v"][..., :1])})["out"], 1e-9
    )


def detached_density(omega, centres, weighting, **x):
    """Weights of LARA are constants on the way back."""
    density = np.exp(omega @ centres.T - np.sum(centres * centres, -1) / 2).sum(-1)
    return package("rfa")(omega=omega, log_weight=-np.log(density), **x)


def root(x):
    d = x["q"].shape[-1]
    return d**-0.25 if x["scale"] is None else x["scale"] ** 0.5


def mistakes():
    for flags, kinds, mistake in rows("vectors/mistakes.txt"):
        kinds = vectors.ESTIMATORS if kinds == "ESTIMATORS" else kinds.split()
        yield from itertools.product(flags.split(), kinds, [mistake])


@pytest.mark.sweep(6)
@pytest.mark.parametrize(("flag", "kind", "mistake"), [*mistakes()])
def test_flags_catch_what_they_name(flag, kind, mistake, every):
    named = chosen(flag, kind, every)
    right = package(named[0].estimator)
    wrong = eval(
        mistake, {**vars(running), **vars(translating), **globals(), "e": kind, "run": right}
    )
    if isinstance(wrong, str):
        wrong = catalogued(BY_NAME[wrong])
        right = right if kind == "moments" else catalogued(BY_NAME[kind])
        named = [c for c in named if running.takes(c)]
    elif "unstable" in mistake:
        named = [c for c in named if c.arguments.get("features", "positive") == "positive"]
        right = unstable if wrong is not unstable else right
    if flag == "GRADIENT":
        assert any(missed(c, wrong) for c in named)
        return
    caught = [c for c in named if missed(c, wrong)]
    assert caught
    for dtype in DTYPES if kind == "options" else ():
        assert any(missed(c, wrong, (dtype,)) for c in caught)
    for case in caught:
        assert not missed(case, right), "the mistake is what is caught"


def test_every_flag_has_a_mistake(every):
    cases = forward(running.of_file(every, *vectors.ESTIMATORS))
    of_estimators = {(flag, c.estimator) for c in cases for flag in c.flags}
    flags = {flag for flag, _ in of_estimators}
    of_options = {flag for c in running.of_options(every) for flag in c.flags} - flags
    others = {"BIAS", "GRADIENT", "SINKS", "SOFTCAP"}  # their mistakes are in the catalogue
    known = {(flag, kind) for flag, kind, _ in mistakes() if flag != "GRADIENT"}
    assert known == of_estimators | {(flag, "options") for flag in of_options - others}
    assert flags | of_options == set(vectors.FLAGS) - {"CONVENTION", "HARD"}


# --- the catalogue --------------------------------------------------------------------------------


RIGHT = [m for m in VARIANTS if "vjp" in m.capabilities or m.name == "softmax-options"]
WRONG = [
    m
    for m in MUTANTS
    if {"vjp", "sinks"} & {*m.capabilities} and not {"vjp", "dropout"} <= {*m.capabilities}
]
TOO_SMALL = {  # what no vector can show, with what it would take
    "last-block-of-queries-lost": "more than 64 queries",
    "last-block-of-keys-lost": "more than 64 keys",
    "blocks-overwrite": "more than 128 queries",
    "diagonal-twice": "more than 100 queries",
    "first-of-batch": "a batch of heads",
    "sink-for-each-block": "sinks and more than 64 keys",
    "bias-of-first-batch": "a batch of heads",
}


def given_to(entry, every, flag=""):
    """Cases that an implementation of the catalogue takes: gradients, or options with the flag."""
    if "vjp" in entry.capabilities:
        cases = running.of_file(every, *vectors.ESTIMATORS)
        cases = [c for c in cases if "d_out" in c.inputs and c.estimator == entry.estimator]
        return [running.only(c, "out", "dq", "dk", "dv") for c in cases if running.takes(c)]
    return [
        c
        for c in forward(running.of_options(every))
        if running.takes(c)
        and not {"slopes", "dropout", "return_lse"} & {*c.inputs, *c.arguments}
        and {flag, "TILE"} & {"", *c.flags}
    ]


@pytest.mark.parametrize("entry", RIGHT, ids=lambda m: m.name)
def test_other_styles_meet_them(entry, every):
    cases = given_to(entry, every)
    assert len(cases) >= 15
    for case in cases:
        assert not missed(case, catalogued(entry)), case.id


@pytest.mark.sweep(4)
@pytest.mark.parametrize("entry", WRONG, ids=lambda m: m.name)
def test_defects_miss_some(entry, every):
    """A defect of an option fails cases whose flag is named after the option."""
    name = entry.name.partition("-backward-" if "vjp" in entry.capabilities else "-")[2]
    flag = {"SINK": "SINKS"}.get(word := name.partition("-")[0].upper(), word)
    cases = given_to(entry, every, flag)
    for dtype in DTYPES:
        caught = any(missed(case, catalogued(entry), (dtype,)) for case in cases)
        assert caught != (name in TOO_SMALL or (name, dtype) == ("short-log2e", "float32"))
