"""Right candidates pass: the package's functions, other ways to compute them, other conventions.

`right_candidates.txt` is the table of them, beside the variants of the catalogue. In each run they
are tried by some cheap checks, with --full by all that apply, or those named in the table.
"""

# ruff: noqa: F401 (the table names them)
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

import refattn
from refattn import kernels, moments, naive, sampling, vjp
from refattn.conformance import check, checks_of
from refattn.conformance.checks import uses
from refattn.conformance.defects import VARIANTS
from refattn.conformance.verdict import runner
from refattn.estimators.key_sampling import draw_keys
from refattn.features import elu_features, relu_features
from refattn.registry import ESTIMATORS
from tests.conformance.candidates import (
    OF_OPTIONS,
    attending,
    catalogued,
    declared,
    dropping,
    emptied,
    features,
    local,
    of,
    performer,
    pulled,
    rows,
    selecting,
)

CHEAP = (
    *("contract", "value_length", "large_logits", "query_without_keys", "mean_over_frequencies"),
    *("one_frequency", "batches_of_rows", "order_of_given_keys", "soft_caps", "weights_of_sinks"),
    *("gradients", "log_normalisers", "same_bits", "factors_of_dropout"),
)


def kernel(x, y, *, num_features=None, seed=None, omega=None):
    omega = sampling.draw(num_features, x.shape[-1], rng=seed).omega if omega is None else omega
    return kernels.estimate(x, y, omega)


def rfa_of_moments(q, k, v, *, mean=None, cov=None, **options):
    proposal = None if mean is None else sampling.Gaussian(mean, cov)
    options["rng"] = options.pop("seed")
    return refattn.random_feature_attention(q, k, v, proposal=proposal, **options)


RFA, LARA = refattn.random_feature_attention, refattn.linear_randomized_attention
RA, LINEAR = refattn.randomized_attention, refattn.linear_attention
SAMPLED = refattn.sampled_key_attention
waves = partial(RFA, features="trigonometric")
relu = partial(LINEAR, feature_map=relu_features)


def own(name):
    return ESTIMATORS[name].fn


def given_keys(name):
    return refattn.coreset_attention if name == "coreset" else SAMPLED


# Those that take some problems only, and are asked no others.


def only(condition):
    if not condition:
        raise ValueError("not taken")


def limited(taken, fn=refattn.softmax_attention, **fixed):
    def attention(q, k, v, **options):
        only(taken(q, k, v))
        return fn(q, k, v, **options, **fixed)

    return attention


def size(q, k, v):
    return q.shape[-1] in (64, 128)


def multiple(q, k, v, of=64):
    return q.shape[-2] % of == 0 == k.shape[-2] % of


def square(q, k, v):
    return q.shape[-2] == k.shape[-2]


def same_length(q, k, v):
    return q.shape[-1] == v.shape[-1]


def everything(q, k, v):
    return size(q, k, v) and multiple(q, k, v) and square(q, k, v) and same_length(q, k, v)


def small(q, k, v):
    k = np.repeat(k, q.shape[-3] // k.shape[-3], -3) if k.ndim > 2 else k
    with np.errstate(invalid="ignore"):
        logits = np.abs(q @ np.swapaxes(k, -1, -2)) / np.sqrt(q.shape[-1])
    return np.nanmax(logits, initial=0.0) <= 20


def of_size(d):
    return lambda q, k, v: q.shape[-1] == d


def seeded(fn):
    """With `seed` for `rng`."""
    return lambda *arrays, seed, **options: fn(*arrays, rng=seed, **options)


def shifted(q, k, v, *, num_features, seed, mean=None, cov=None):
    only(q.shape[-1] == 16)
    omega = np.random.default_rng(seed).standard_normal((num_features, 16))
    if mean is not None:
        omega = mean + omega @ np.linalg.cholesky(cov).T
    return RFA(q, k, v, omega=omega)


def causal_ra(q, k, v, **options):
    only(q.shape[-1] == 8)
    given = {"rng" if name == "seed" else name: x for name, x in options.items()}
    return RA(q, k, v, causal=True, **given)


def top_left(q, k, v):
    """Always causal, aligned at the first token."""
    return refattn.softmax_attention(q, k, v, mask=np.tri(q.shape[-2], k.shape[-2], dtype=bool))


def summaries(causal_always=False, top_left=False):
    """EVA that is causal always, or aligned at the first token."""

    def attention(q, k, v, *, causal=False, **options):
        n, m = q.shape[-2], k.shape[-2]
        if top_left and causal and n < m:
            k, v = k[..., :n, :], v[..., :n, :]
        if top_left and causal and n > m:
            k, v = (np.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, n - m), (0, 0)]) for x in (k, v))
            options["mask"] = np.arange(n) < m
        causal = causal or causal_always
        return refattn.eva_attention(q, k, v, sampled=False, causal=causal, **options)

    return attention


fours = partial(multiple, of=4)
eights = partial(multiple, of=8)
# Those of which some checks are made: options, log normalisers, gradients, bits, dropout.


def turned(fn, **fixed):
    def attention(q, k, v, **options):
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
        return fn(q, k, v, **fixed, **options).swapaxes(1, 2)

    return attention


def by_rows(q, k, v):
    """Each query by itself, with sums whose order depends on nothing else."""
    out = np.empty((*q.shape[:-1], v.shape[-1]), q.dtype)
    for at in np.ndindex(q.shape[:-1]):
        scores = (k[at[:-1]] * q[at]).sum(-1) * q.shape[-1] ** -0.5
        weights = np.exp(scores - scores.max())
        out[at] = (weights[:, None] * v[at[:-1]]).sum(0) / weights.sum()
    return out


def ra_with_epsilon(q, k, v, *, num_samples, seed):
    omega = sampling.draw_target(q, k, num_samples=num_samples, rng=seed)
    y = k * q.shape[-1] ** -0.25
    score = omega @ y[..., None, :, :].mT - np.sum(y * y, -1)[..., None, None, :] / 2
    weight = np.exp(score - np.max(score, -1, keepdims=True)) + 1e-12
    return np.mean(weight / np.sum(weight, -1, keepdims=True), -2) @ v


def half_waves(q, k, v, *, omega, causal=False):
    """Of some thousand queries at one seed, one has a mean of 78,539.7 by its formula."""
    wide = (x.astype(np.float64) for x in (q, k, v))
    options = {"features": "trigonometric", "omega": omega, "causal": causal}
    return naive.random_feature_attention(*wide, **options).astype(np.float16)


def half_moments(x):
    wide = x.astype(np.float64)
    return moments.estimate(wide).mean.astype(x.dtype), moments.estimate(wide).cov.astype(x.dtype)


def in_float32(q, k, v):
    wide = (x.astype(np.float32) for x in (q, k, v))
    return naive.softmax_attention(*wide).astype(q.dtype)


def with_epsilon(q, k, v, *, d_out=None):
    """Linear attention with an epsilon in the normaliser."""
    a, b = elu_features(q), elu_features(k)
    kernel = a @ b.mT
    total = kernel.sum(-1, keepdims=True) + 1e-6
    out = kernel @ v / total
    if d_out is None:
        return out
    pairs = (d_out @ v.mT - (d_out * out).sum(-1, keepdims=True)) / total
    dq, dk = (np.exp(np.minimum(x, 0)) * y for x, y in ((q, pairs @ b), (k, pairs.mT @ a)))
    return (out, dq, dk, (kernel / total).mT @ d_out)


def nan_where_empty(q, k, v, *, mask=None, d_out=None):
    mask = np.ones((q.shape[-2], k.shape[-2]), bool) if mask is None else mask
    out, pullback = vjp(refattn.softmax_attention, q, k, v, mask=mask)
    seen = np.any(mask, -1)[..., None]
    out = np.where(seen, out, np.nan)
    if d_out is None:
        return out
    return (out, *(np.where(np.all(seen), x, np.nan) for x in pullback(d_out)[:3]))


def drawing(estimator):
    """A sample of keys, drawn first: a constant of the pullback."""

    def attention(q, k, v, *, num_keys, seed, d_out=None, **options):
        law = estimator.removeprefix("sampled-")
        drawn = draw_keys(q, k, v, num_keys=num_keys, law=law, rng=seed, **options)
        return pulled(SAMPLED)(q, k, v, d_out=d_out, **drawn._asdict(), **options)

    return attention


base_2 = attending(
    of_lse=lambda lse, *_: lse / np.log(2.0),
    of_back=lambda d_lse, _: None if d_lse is None else d_lse / np.log(2.0),
)


def in_fours(q, k, v):
    return q.shape[-1] in (8, 64) and same_length(q, k, v) and fours(q, k, v)


def square_in_fours(q, k, v):
    return square(q, k, v) and fours(q, k, v)


class Row(NamedTuple):
    """A candidate, what is said of it, and of which kind it is."""

    name: str
    adapter: Any
    checks: tuple
    words: set
    kind: str


def catalogue():
    """Other ways to compute the same: at few seeds, so without power."""
    for m in VARIANTS:
        soak = {"soak"} if m.name.endswith(LONGEST) else set()
        yield Row(m.name, catalogued(m.name), (), soak, "other")
        adapter = catalogued(m.name, dtype="float32")
        if "indices_only" in m.capabilities or m.name == "eva-sampled":
            yield Row(f"{m.name} in float32, catalogued", adapter, (), set(), "other")
        if "vjp" in m.capabilities:
            yield Row(f"gradients of {m.name} in float32", adapter, ("gradients",), set(), "other")


LONGEST = (
    *("-of-weights", "-by-blocks", "-upcast", "-online", "-simplex", "-reversed", "-gumbel-max"),
    *("-orthogonal", "-trigonometric"),
)


def table():
    kind = ""
    for name, *rest in rows("right_candidates.txt"):
        if not rest:
            kind = name.strip("[]")
            continue
        fn, words, *checks = rest
        checks = tuple(checks[0].split()) if checks else ()
        checks = OF_OPTIONS if checks == ("options",) else checks
        name, *marks = name.split(" (")
        yield Row(name, declared(fn, words, globals()), checks, {x[:-1] for x in marks}, kind)


ROWS = [*table(), *catalogue()]


def cases():
    for row in ROWS:
        cheap = [pytest.mark.long] * ("dear" in row.words)
        longest = pytest.mark.soak if "soak" in row.words else pytest.mark.long
        yield pytest.param(row, "cheap", marks=cheap, id=f"{row.name}-cheap")
        yield pytest.param(row, "all", marks=longest, id=f"{row.name}-all")


@pytest.mark.parametrize(("row", "extent"), [*cases()])
def test_right_candidates_pass(row, extent, monkeypatch):
    """Laws have few seeds: of functions of the package as many as their power needs."""
    monkeypatch.setitem(runner.LEVELS, "quick", 100 if row.kind == "other" else 500)
    monkeypatch.setattr(runner, "_not_tried", lambda *_: {})
    names = [x.name for x in checks_of(row.adapter) if x.name.startswith(row.checks or ("",))]
    if extent == "cheap":
        names = [x for x in names if x in CHEAP][:3] or names[:1]
    report = check(row.adapter, checks=names, rng=1)
    power = row.kind in ("own", "part")
    assert report.verdict in ("PASS", "PASS" if power else "UNDERPOWERED"), str(report)
    assert {r.check for r in report.results} | set(report.not_tried) >= set(names)
    for r in report.results:
        assert r.error is not None or r.p is not None or r.status != "PASS"
        if row.kind == "own":
            assert all(r.detectable[key] <= target for key, target in r.target.items())


@pytest.mark.soak
def test_checks_of_a_batch_of_vectors_one_by_one(monkeypatch):
    monkeypatch.setitem(runner.LEVELS, "quick", 500)

    def single(x, y, *, num_features, seed):
        if x.ndim != 1:
            raise ValueError("one vector at a time")
        return kernel(x, y, num_features=num_features, seed=seed)

    names = ["frequency_law", "recovered_values"]
    report = check(of(single, "kernel"), checks=names, time_limit=600)
    assert report.verdict == "PASS", str(report)


def test_a_whole_run_passes(monkeypatch):
    monkeypatch.setattr(uses, "_SIZES", [x for x in uses._SIZES if x.n * x.m < 2**11])
    adapter = of(refattn.softmax_attention, "softmax")
    report = check(adapter, rng=0)
    assert report.verdict == "PASS", str(report)
    assert [r.check for r in report.results] == [x.name for x in checks_of(adapter)]


@pytest.mark.parametrize(
    "row",
    [pytest.param(x, id=x.name) for x in ROWS if x.kind == "limited" and "idle" not in x.words],
)
def test_undeclared_it_fails(row):
    """Else the declaration would be idle, and the test above with it."""
    kept = {k: x for k, x in row.adapter.declared.items() if k in ("causal_only", "coupling")}
    adapter = of(row.adapter.fn, row.adapter.estimator, *row.adapter.capabilities, **kept)
    first = ["contract", "reference_values", "query_without_keys", "value_length", "large_logits"]
    names = [x.name for x in checks_of(adapter) if x.name in first]
    assert check(adapter, checks=names).verdict == "FAIL"
