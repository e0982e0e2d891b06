"""Right candidates pass: the package's functions, other ways to compute them, other conventions.

In each run by some cheap checks, with --full by all that apply, or those named in the table.
"""

from functools import partial

import numpy as np
import pytest

import refattn
from refattn import kernels, moments, naive, sampling, vjp
from refattn.conformance import check, checks_of
from refattn.conformance.checks import uses
from refattn.conformance.defects import VARIANTS
from refattn.conformance.verdict import runner
from refattn.features import elu_features, relu_features
from refattn.registry import ESTIMATORS
from tests.conformance.candidates import (
    BACK,
    OF_OPTIONS,
    OPTIONS,
    SEES,
    attending,
    catalogued,
    dropping,
    emptied,
    features,
    local,
    of,
    performer,
    pulled,
    selecting,
)

CHEAP = (
    *("contract", "value_length", "large_logits", "query_without_keys", "mean_over_frequencies"),
    *("one_frequency", "batches_of_rows", "order_of_given_keys", "soft_caps", "weights_of_sinks"),
    *("gradients", "log_normalisers", "same_bits", "factors_of_dropout"),
)
DEAR = ("rows alone", "bits of RA", "everything")  # by any check


# The package's functions, with the power that laws need.


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

OWN = {
    "softmax": of(refattn.softmax_attention, "softmax", *SEES),
    "linear": of(LINEAR, "linear", *SEES),
    "linear-relu": of(relu, "linear", feature_map="relu"),
    "moments": of(moments.estimate, "moments"),
    "moments-0": of(partial(moments.estimate, ddof=0), "moments", ddof="0"),
    "kernel": of(kernel, "kernel", "omega"),
    "rfa": of(RFA, "rfa", "omega", "omega_per_head", *SEES),
    "rfa-scale": of(partial(RFA, scale=0.4), "rfa", "omega", "causal", scale=0.4),
    "rfa-moments": of(rfa_of_moments, "rfa", "moments"),
    "rfa-drawn": of(waves, "rfa", "mask", "causal", features="trigonometric"),
    "ra": of(RA, "ra", "omega", *SEES),
    "lara": of(LARA, "lara", "omega", *SEES, centres="chunks"),
    "lara-query": of(
        partial(LARA, weighting="query"), "lara", "omega", "mask", weighting="query",
        centres="chunks",
    ),
}  # fmt: skip
OWN |= {
    f"rfa-{name}": of(partial(RFA, coupling=name), "rfa", coupling=name)
    for name in ("orthogonal", "antithetic")
}
OWN |= {
    f"rfa-{name}": of(partial(RFA, features=name), "rfa", "omega", "mask", features=name)
    for name in ("hyperbolic", "trigonometric")
}
OWN["rfa-trigonometric-gqa"] = of(waves, "rfa", "omega", *SEES, features="trigonometric")
OWN |= {
    f"{name}-float32": of(OWN[name].fn, name, *OWN[name].capabilities, **OWN[name].declared,
                          dtype="float32")
    for name in ("softmax", "linear", "moments", "kernel", "rfa", "lara")
}  # fmt: skip
OWN |= {
    name: of(ESTIMATORS[name].fn, name, *capabilities)
    for name, capabilities in {
        "eva": ("causal", "gqa"),
        "eva-sampled": ("causal", "gqa"),
        "second-order": ("causal", "gqa"),
        "rfa-local": ("omega", "omega_per_head", *SEES),
        "coreset": ("gqa",),
        "sampled-norms": ("gqa",),
    }.items()
}
KEYS = ("coreset", "sampled-uniform", "sampled-norms", "sampled-softmax")
FREE = ("gqa", "indices_only")


def given_keys(name):
    return refattn.coreset_attention if name == "coreset" else SAMPLED


GIVEN = {
    f"{name}-indices-{dtype}": of(given_keys(name), name, *FREE, dtype=dtype)
    for name in KEYS
    for dtype in ("float32", "float64")
}
OWN |= GIVEN
SOAK = (
    *("rfa-scale", "rfa-antithetic", "eva-sampled", "second-order", "coreset", "sampled-norms"),
    *("softmax-backward-of-weights", "rfa-backward-of-weights", "linear-backward-of-weights"),
    *("softmax-backward-by-blocks", "rfa-backward-by-blocks", "linear-backward-by-blocks"),
    *("softmax-upcast", "rfa-upcast", "lara-upcast", "softmax-online", "rfa-online", "eva-online"),
    *("kernel-simplex", "rfa-simplex", "kernel-reversed", "rfa-reversed", "ra-gumbel-max"),
    *("kernel-orthogonal", "rfa-orthogonal-variant", "rfa-trigonometric-variant"),
    *("kernel-trigonometric", "sizes", "multiple", "omega only", "orthogonal"),
    *("moments of frequencies", "logits", "square", "mean", "undefined", "causal LARA", "LARA"),
    *("elu", "causal RA"),
)


# Other ways to compute the same, in the words of the catalogue: at few seeds, so without power.

OTHER = {f"{m.name}-variant" if m.name in OWN else m.name: catalogued(m.name) for m in VARIANTS}
OTHER |= {
    f"{m.name}-float32": catalogued(m.name, dtype="float32")
    for m in VARIANTS
    if "indices_only" in m.capabilities or m.name == "eva-sampled"
}


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


def at_omega(q, k, v, omega, **options):
    return RFA(q, k, v, omega=omega, **options)


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


always = limited(lambda q, k, v: True, causal=True)
fours = partial(multiple, of=4)
eights = partial(multiple, of=8)
frozen = limited(of_size(8), RFA, omega=np.random.default_rng(0).standard_normal((32, 8)))
LIMITED = {
    "sizes": of(limited(size), "softmax", *SEES, head_sizes=(64, 128)),
    "multiple": of(limited(multiple), "softmax", *SEES, multiple_of=64),
    "square": of(limited(square), "softmax", *SEES, self_attention=True),
    "same length": of(limited(same_length), "softmax", *SEES, same_value_size=True),
    "causal": of(always, "softmax", "mask", "gqa", causal_only=True),
    "everything": of(
        limited(everything, causal=True), "softmax", "mask", head_sizes="64,128",
        multiple_of="64", self_attention="true", same_value_size="true", causal_only="true",
    ),
    "nan": of(emptied(lambda v: np.nan), "softmax", *SEES[:2], empty_rows="nan"),
    "mean": of(emptied(lambda v: v), "softmax", *SEES[:2], empty_rows="mean"),
    "undefined": of(emptied(lambda v: 3.0), "softmax", *SEES[:2], empty_rows="undefined"),
    "logits": of(limited(small), "softmax", *SEES, max_logit=20),
    "omega only": of(at_omega, "rfa", *SEES, "omega_only", "omega_per_head"),
    "frozen": of(frozen, "rfa", *SEES, fixed_frequencies=True, head_sizes=8),
    "orthogonal": of(
        seeded(limited(of_size(16), RFA, coupling="orthogonal")), "rfa", *SEES, head_sizes=16,
        coupling="orthogonal",
    ),
    "elu": of(limited(of_size(16), LINEAR), "linear", *SEES, head_sizes=16),
    "moments of frequencies": of(shifted, "rfa", "moments", head_sizes=16),
    "LARA": of(seeded(limited(eights, LARA)), "lara", "mask", multiple_of=8),
    "causal LARA": of(seeded(partial(LARA, causal=True)), "lara", causal_only=True),
    "top-left": of(top_left, "softmax", causal_only=True, causal="top-left"),
    "causal RA": of(
        causal_ra, "ra", "omega", causal_only=True, self_attention=True, head_sizes=8
    ),
    "causal window": of(local(causal=True), "rfa-local", "omega", "mask", causal_only=True),
    "window in fours": of(limited(fours, local()), "rfa-local", "omega", "causal", multiple_of=4),
    "causal chunks": of(summaries(causal_always=True), "eva", "causal", causal_only=True),
    "chunks at the corner": of(summaries(top_left=True), "eva", "causal", causal="top-left"),
}  # fmt: skip
LIMITED |= {
    f"epsilon of {place}{' drawn' * drawn}": of(
        performer(**{place: 1e-6}), "rfa", *() if drawn else ("omega", "mask", "causal"),
        epsilon=1e-6, hidden="finite",
    )
    for place in ("feature", "normaliser")
    for drawn in (False, True)
}  # fmt: skip
LIMITED |= {
    f"{name} in {limit}": of(limited(taken, given_keys(name)), name, *FREE, **tags)
    for name in KEYS
    for limit, taken, tags in (
        (
            "sizes",
            lambda q, k, v: q.shape[-1] in (8, 64) and same_length(q, k, v) and fours(q, k, v),
            {"head_sizes": "8,64", "multiple_of": 4, "same_value_size": True},
        ),
        (
            "tokens",
            lambda q, k, v: square(q, k, v) and fours(q, k, v),
            {"self_attention": True, "multiple_of": 4},
        ),
    )
}  # fmt: skip


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


def either(q, k, v, **options):
    """As a library that takes a mask or a bias."""
    only(not {"mask", "bias"} <= set(options))
    return refattn.softmax_attention(q, k, v, **options)


def without_infinite_caps(options):
    return {k: x for k, x in options.items() if not (k == "softcap" and x == np.inf)}


WITH_OPTIONS = (*SEES, *OPTIONS, *BACK)
base_2 = attending(
    of_lse=lambda lse, *_: lse / np.log(2.0),
    of_back=lambda d_lse, _: None if d_lse is None else d_lse / np.log(2.0),
)
LAYOUTS = (
    {"layout": "bhnd"},
    {"layout": "bnd"},
    {"layout": "nd"},
    {"layout": "hnd", "empty_rows": "undefined"},
    {"head_sizes": (8,), "same_value_size": True},
    {"multiple_of": 8},
    {"multiple_of": 8, "self_attention": True},
    {"causal_only": True},
    {"max_logit": 20.0},
)
LSE = ("log_normalisers", "normaliser_without_keys", "merged_parts", "gradients_of_normalisers")
DROPOUT = ("factors_of_dropout", "law_of_dropout", "gradients_of_dropout")
PART = {
    **{
        f"options in {tags}": (
            of(attending(), "softmax",
               *(x for x in WITH_OPTIONS if x != "gqa" or "h" in tags.get("layout", "h")), **tags),
            OF_OPTIONS,
        )
        for tags in LAYOUTS
    },
    **{
        f"options of {dtype}": (
            of(attending(), "softmax", *WITH_OPTIONS, "lse", "d_lse", dtype=dtype), OF_OPTIONS
        )
        for dtype in ("float32", "float64")
    },
    **{
        f"lse of {dtype}": (
            of(fn, "softmax", *SEES, "vjp", "lse", "d_lse", dtype=dtype, **tags), LSE
        )
        for dtype in ("float32", "float64")
        for fn, tags in ((attending(), {}), (base_2, {"lse_base": "2"}))
    },
    "tokens before heads": (
        of(attending(axes=(0, 2, 1, 3)), "softmax", *SEES, *OPTIONS, layout="bnhd"), OF_OPTIONS
    ),
    "nan with options": (
        of(emptied(lambda v: np.nan), "softmax", *SEES, *OPTIONS, empty_rows="nan"), OF_OPTIONS
    ),
    "mean with options": (
        of(emptied(lambda v: v), "softmax", *SEES, *OPTIONS, empty_rows="mean"), OF_OPTIONS
    ),
    **{
        f"{name} with lse and dropout": (
            of(emptied(value, of_lse=-1e38), "softmax", *SEES, "window", "lse", "dropout",
               empty_rows=name),
            OF_OPTIONS,
        )
        for name, value in (("nan", lambda v: np.nan), ("mean", lambda v: v))
    },
    **{
        f"dropout in {x}": (of(dropping(), "softmax", "dropout", "vjp", layout=x), DROPOUT)
        for x in ("nd", "bnd", "hnd", None)
    },
    "dropout in all uses": (of(dropping(), "softmax", *SEES, "dropout", "vjp"), DROPOUT[2:]),
    "a mask or a bias": (of(either, "softmax", *SEES, *OPTIONS), OF_OPTIONS),
    "few exponents": (of(attending(), "softmax", "vjp", max_logit=2.0), ("gradients_of_large",)),
    "rows alone": (of(by_rows, "softmax", "batch_invariant"), ("same_bits_in_any_batch",)),
    "bits": (of(refattn.softmax_attention, "softmax", "deterministic"), ("same_bits",)),
    "bits of RA": (of(RA, "ra", "omega_only", "deterministic", "batch_invariant"), ("same_bits",)),
    "RA with an epsilon": (
        of(ra_with_epsilon, "ra", epsilon=1e-12), ("mean_of_samples",)
    ),
    **{
        f"epsilon {x:g} at the {place}": (
            of(performer(feature=x, axes=axes), "rfa", epsilon=x),
            ("contract", "weighted_mean", "one_function", "feature_sums", "frequency_law"),
        )
        for x in (1e-9, 1e-12, 1e-15)
        for place, axes in (("query", (-1,)), ("largest", (-2, -1)))
    },
    "features in float32": (
        of(features(), "rfa", dtype="float32"), ("one_function", "long_vectors")
    ),
    "features that are fixed": (
        of(features(omega=np.random.default_rng(3).standard_normal((40, 8))), "rfa",
           fixed_frequencies=True, head_sizes=8),
        ("one_function",),
    ),
    "waves in float16": (
        of(half_waves, "rfa", "omega_only", "causal", features="trigonometric", dtype="float16"),
        ("causal",),
    ),
    "moments in float16": (of(half_moments, "moments", dtype="float16"), ()),
    "sums in float16": (of(in_float32, "softmax", dtype="float16"), ("long_half_sums",)),
    "finite values": (
        of(selecting, "softmax", "mask", hidden="finite-values"), ("hidden_nonsense",)
    ),
    **{
        f"gradients of {name} in {dtype}": (
            of(pulled(fn), estimator, "vjp", *SEES, *more, dtype=dtype, **tags), ("gradients",)
        )
        for dtype in ("float32", "float64")
        for name, fn, estimator, more, tags in (
            ("softmax", refattn.softmax_attention, "softmax", (), {}),
            ("rfa", RFA, "rfa", ("omega", "omega_per_head"), {}),
            ("rfa drawn", RFA, "rfa", (), {}),
            ("ra", RA, "ra", ("omega_only",), {}),
            ("lara", LARA, "lara", ("omega",), {}),
            ("is", refattn.importance_sampled_attention, "is", ("omega_only",), {}),
            ("ratios", refattn.mean_of_ratios_attention, "mean-of-ratios", ("omega",), {}),
            ("linear", LINEAR, "linear", (), {}),
            ("relu", relu, "linear", (), {"feature_map": "relu"}),
        )
    },
    **{
        f"gradients of {m.name} in float32": (catalogued(m.name, dtype="float32"), ("gradients",))
        for m in VARIANTS
        if "vjp" in m.capabilities
    },
    "gradients of an epsilon": (of(with_epsilon, "linear", "vjp", epsilon=1e-6), ("gradients",)),
    "gradients of nan": (
        of(nan_where_empty, "softmax", "vjp", "mask", empty_rows="nan"), ("gradients",)
    ),
    "gradients of LARA drawn": (of(pulled(LARA), "lara", "vjp"), ("gradients",)),
    "gradients of waves drawn": (of(pulled(waves), "rfa-trigonometric", "vjp"), ("gradients",)),
    **{
        f"gradients at keys of {name}": (of(pulled(SAMPLED), name, *FREE, "vjp"), ("gradients",))
        for name in ("sampled-uniform", "sampled-softmax")
    },
    "gradients at frequencies of EVA": (
        of(pulled(refattn.eva_attention), "eva-sampled", "gqa", "causal", "omega_only",
           "omega_per_head", "vjp"),
        ("gradients",),
    ),
    **{
        f"{name} of tokens before heads": (
            of(turned(given_keys(name), scale=0.25), name, *FREE, layout="bnhd",
               scale=0.25),
            (),
        )
        for name in KEYS
    },
    "EVA of tokens before heads": (
        of(turned(refattn.eva_attention, scale=0.25), "eva-sampled", "omega_only",
           "omega_per_head", "causal", layout="bnhd", scale=0.25),
        (),
    ),
    **{
        f"{name} that draws or is given": (
            of(ESTIMATORS[name].fn, name, "indices", "gqa"),
            ("contract", "reference_values", "weighted_mean", "calls_apart", "all_keys"),
        )
        for name in ("coreset", "sampled-uniform")
    },
}  # fmt: skip


ROWS = {
    **{name: (adapter, ()) for name, adapter in (OWN | OTHER | LIMITED).items()},
    **PART,
}


def cases():
    for name in ROWS:
        yield pytest.param(name, "cheap", marks=[pytest.mark.long] * (name in DEAR))
        yield pytest.param(
            name, "all", marks=pytest.mark.soak if name in SOAK else pytest.mark.long
        )


@pytest.mark.parametrize(("name", "extent"), [*cases()])
def test_right_candidates_pass(name, extent, monkeypatch):
    """Laws have few seeds: of functions of the package as many as their power needs."""
    monkeypatch.setitem(runner.LEVELS, "quick", 100 if name in OTHER else 500)
    monkeypatch.setattr(runner, "_not_tried", lambda *_: {})
    adapter, first = ROWS[name]
    names = [x.name for x in checks_of(adapter) if x.name.startswith(first or ("",))]
    if extent == "cheap":
        names = [x for x in names if x in CHEAP][:3] or names[:1]
    report = check(adapter, checks=names, rng=1)
    powerless = name in OTHER or name in LIMITED or "epsilon" in name
    assert report.verdict in ("PASS", "UNDERPOWERED" if powerless else "PASS"), str(report)
    assert {r.check for r in report.results} | set(report.not_tried) >= set(names)
    for r in report.results:
        assert r.error is not None or r.p is not None or r.status != "PASS"
        if name in OWN:
            assert all(r.detectable[key] <= target for key, target in r.target.items())


def test_a_whole_run_passes(monkeypatch):
    monkeypatch.setattr(uses, "_SIZES", [x for x in uses._SIZES if x.n * x.m < 2**13])
    adapter = of(refattn.softmax_attention, "softmax", "mask")
    report = check(adapter, rng=0)
    assert report.verdict == "PASS", str(report)
    assert [r.check for r in report.results] == [x.name for x in checks_of(adapter)]


# Those that take a call without what they declare, and give another result or none is wrong.
IDLE = (
    *("causal", "omega only", "causal LARA", "top-left", "causal window", "causal chunks"),
    *("chunks at the corner", "epsilon of feature drawn", "epsilon of normaliser drawn"),
)


@pytest.mark.parametrize("name", [n for n in LIMITED if n not in IDLE])
def test_undeclared_it_fails(name):
    """Else the declaration would be idle, and the test above with it."""
    adapter = LIMITED[name]
    first = ["contract", "reference_values", "query_without_keys", "value_length", "large_logits"]
    kept = {k: x for k, x in adapter.declared.items() if k in ("causal_only", "coupling")}
    adapter = of(adapter.fn, adapter.estimator, *adapter.capabilities, **kept)
    names = [c.name for c in checks_of(adapter) if c.name in first]
    assert check(adapter, checks=names).verdict == "FAIL"
