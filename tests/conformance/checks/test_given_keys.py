"""Candidates that are given what they would draw: keys by their indices, frequencies of chunks."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import refattn
from refattn import conformance, vjp
from refattn.conformance import Adapter, check, checks_of
from refattn.conformance.checks.identities import Trial
from refattn.conformance.defects import given
from refattn.conformance.truth.reference import reference
from refattn.conformance.truth.solves import condition_of_solve

KILLS = json.loads(
    (Path(conformance.__file__).parent / "verdict" / "kills.json").read_text("utf-8")
)
MUTANTS = [m for catalogue in given.CATALOGUES.values() for m in catalogue.mutants]
VARIANTS = [m for catalogue in given.CATALOGUES.values() for m in catalogue.variants]
FREE = ("gqa", "indices_only")
NAMES = ["coreset", "sampled-uniform", "sampled-norms", "sampled-softmax"]

by_name = pytest.mark.parametrize("entry", MUTANTS, ids=lambda m: m.name)


def package(name):
    """The package's function, which has no way to draw a sample."""
    return refattn.coreset_attention if name == "coreset" else refattn.sampled_key_attention


def passes(fn, name, capabilities, **tags):
    report = check(fn, estimator=name, capabilities=capabilities, tags=tags, rng=1)
    assert report.verdict == "PASS", str(report)


@by_name
def test_defects_are_rejected_at_another_seed(entry):
    candidate = Adapter(entry.fn, entry.estimator, entry.capabilities, entry.tags, entry.name)
    name = KILLS[entry.estimator][entry.name][-1]
    report = check(candidate, checks=[name], rng=1)
    assert report.verdict == "FAIL", str(report)
    assert report.results[0].reproducer


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("entry", VARIANTS, ids=lambda m: m.name)
def test_correct_variants_pass(entry, dtype):
    passes(entry.fn, entry.estimator, entry.capabilities, dtype=dtype)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_own_functions_pass(name, dtype):
    passes(package(name), name, FREE, dtype=dtype)


LIMITS = {
    "sizes": {"head_sizes": "8,64", "multiple_of": 4, "same_value_size": True},
    "tokens": {"self_attention": True, "multiple_of": 4},
    "layout": {"layout": "bnhd", "scale": 0.25},
}


def limited(fn, **limits):
    """The function within limits, in which it is asked nothing else."""

    def attention(q, k, v, **options):
        assert q.shape[-1] in limits.get("head_sizes", q.shape[-1:])
        assert q.shape[-2] % 4 == 0
        assert k.shape[-2] % 4 == 0
        return fn(q, k, v, **options)

    return attention


@pytest.mark.long("tokens")
@pytest.mark.parametrize("limit", ["sizes", "tokens"])
@pytest.mark.parametrize("name", NAMES)
def test_limits(name, limit):
    sizes = {"head_sizes": (8, 64)} if limit == "sizes" else {}
    candidate = Adapter(limited(package(name), **sizes), name, FREE, LIMITS[limit])
    names = [x.name for x in checks_of(candidate) if x.name != "large_sizes"]  # which take long
    report = check(candidate, checks=names, rng=1)
    assert report.verdict == "PASS", str(report)


@pytest.mark.parametrize("name", [*NAMES, "eva-sampled"])
def test_layouts(name):
    def attention(q, k, v, **options):
        fn = refattn.eva_attention if name == "eva-sampled" else package(name)
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
        return fn(q, k, v, scale=0.25, **options).swapaxes(1, 2)

    able = ("omega_only", "omega_per_head", "causal") if name == "eva-sampled" else FREE
    passes(attention, name, able, **LIMITS["layout"])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ["coreset", "sampled-softmax"])
def test_torch(name, dtype):
    """Written in torch: keys are gathered, for which indices must be long integers."""
    torch = pytest.importorskip("torch")

    def sample(q, k, v, *, indices, log_probability):
        lead = torch.broadcast_shapes(q.shape[:-2], indices.shape[:-2])
        at = indices.expand(*lead, *indices.shape[-2:])
        scores = q.shape[-1] ** -0.5 * q @ k.mT
        p = torch.softmax(scores.gather(-1, at) - log_probability, -1)
        return torch.zeros_like(scores).scatter_add(-1, at, p.expand(at.shape)) @ v

    def coreset(q, k, v, *, indices):
        root = q.shape[-1] ** -0.25
        q, k = root * q, root * (k - k.mean(-2, keepdim=True))
        at = indices.expand(*k.shape[:-2], indices.shape[-1])[..., None]
        chosen = k.gather(-2, at.expand(*at.shape[:-1], k.shape[-1]))
        w = torch.linalg.solve((chosen @ chosen.mT).exp(), (chosen @ k.mT).exp())
        p = torch.softmax(q @ chosen.mT, -1)
        return p @ (w @ v) / (p @ w).sum(-1, keepdim=True)

    fn = coreset if name == "coreset" else sample
    passes(fn, name, ["indices_only"], dtype=dtype, library="torch")


def with_pullback(fn):
    def attention(*arrays, d_out=None, **options):
        if d_out is None:
            return fn(*arrays, **options)
        out, pullback = vjp(fn, *arrays, **options)
        return (out, *pullback(d_out)[:3])

    return attention


@pytest.mark.parametrize("name", ["sampled-uniform", "sampled-softmax", "eva-sampled"])
def test_gradients_at_what_is_given(name):
    able = (*FREE, "vjp")
    fn = refattn.sampled_key_attention
    if name == "eva-sampled":
        fn, able = refattn.eva_attention, ("gqa", "causal", "omega_only", "omega_per_head", "vjp")
    candidate = Adapter(with_pullback(fn), name, able)
    names = [x.name for x in checks_of(candidate) if x.name.startswith("gradients")]
    assert {"gradients", "gradients_together", "gradients_are_slopes"} <= set(names)
    report = check(candidate, checks=names, rng=0)
    assert report.verdict == "PASS", str(report)


def test_gradients_of_samples_that_are_wrong_are_rejected():
    right = with_pullback(refattn.sampled_key_attention)

    def once(q, k, v, **options):
        """What a key takes of its places is not added."""
        found = right(q, k, v, **options)
        if "d_out" not in options:
            return found
        counts = np.sum(options["indices"][..., None] == np.arange(k.shape[-2]), -2)
        return (*found[:3], found[3] / np.maximum(counts, 1)[..., None])

    report = check(once, estimator="sampled-uniform", capabilities=["indices_only", "vjp"], rng=0)
    failed = {r.check for r in report.results if r.status == "FAIL"}
    assert "gradients" in failed
    assert all(name.startswith("gradients") for name in failed)


@pytest.mark.parametrize("name", ["coreset", "sampled-uniform"])
def test_what_draws_takes_indices_too(name):
    fn = refattn.registry.ESTIMATORS[name].fn
    names = ["contract", "reference_values", "weighted_mean", "calls_apart", "all_keys"]
    candidate = Adapter(fn, name, ["indices", "gqa"])
    assert {"own_law", *names} <= {x.name for x in checks_of(candidate)}
    report = check(candidate, checks=names, rng=0)
    assert report.verdict == "PASS", str(report)
    names = [x.name for x in checks_of(Adapter(fn, name))]
    assert not {"reference_values", "all_keys"} & set(names)


def test_limits_of_the_verdict():
    fn = refattn.sampled_key_attention
    report = check(Adapter(fn, "sampled-norms", ["indices_only"]), checks=["all_keys"])
    assert report.limits == {"indices_only": "how keys are drawn is not its own"}
    with pytest.raises(ValueError, match="where they are given"):
        Adapter(fn, "sampled-norms", ["indices_only"], {"fixed_frequencies": True})


def test_candidates_in_half_precision_are_not_said_to_be_right():
    """The tolerance of a solve is all of the result there."""
    report = check(
        lambda q, k, v, indices: 0 * q, estimator="coreset", capabilities=["indices_only"],
        tags={"dtype": "float16"}, checks=["order_of_given_keys"],
    )  # fmt: skip
    assert report.verdict == "UNDERPOWERED", str(report)


# The tolerance of coresets.


def solved(q, k, v, indices, kind):
    """A coreset in float32 throughout, each by other steps; NumPy solves in float64."""
    linalg = pytest.importorskip("scipy.linalg")
    q, k, v = (np.asarray(x, np.float32) for x in (q, k, v))
    root = np.float32(q.shape[-1] ** -0.25)
    q, k = root * q, root * k
    k = k - k.mean(-2, keepdims=True)
    chosen = k[indices]
    h, to_keys = np.exp(chosen @ chosen.T), np.exp(chosen @ k.T)
    weights = {
        "elimination": lambda: linalg.solve(h, to_keys, assume_a="gen"),
        "cholesky": lambda: linalg.solve(h, to_keys, assume_a="pos"),
        "inverse": lambda: linalg.inv(h) @ to_keys,
        "orthogonal": lambda: linalg.solve_triangular((qr := linalg.qr(h))[1], qr[0].T @ to_keys),
    }[kind]()
    assert weights.dtype == np.float32
    scores = q @ chosen.T
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return p @ (weights @ v) / (p @ weights).sum(-1, keepdims=True)


@pytest.mark.long("inverse", "orthogonal")
@pytest.mark.parametrize("kind", ["elimination", "cholesky", "inverse", "orthogonal"])
def test_correct_coresets_in_float32_stay_far_below_the_tolerance(kind):
    """And it stays far below the values: a few thousandths of them for few keys."""
    adapter = Adapter(partial(solved, kind=kind), "coreset", ["indices_only"], {"dtype": "float32"})
    worst, small = 0.0, []
    for seed in range(20):
        t = Trial(adapter, "tolerance", seed)
        for n, m, d, samples, size in (
            *((3, 5, 4, 3, 1.0), (33, 33, 16, 65, 1.0), (6, 9, 5, 7, 0.3), (6, 9, 5, 7, 1.5)),
            *((24, 300, 16, 129, 1.0), (24, 300, 16, 9, 1.0), (4, 6, 128, 3, 1.0)),
        ):
            arrays, options = t.problem(n, m, d, samples, size=size)
            want, allowed = reference(adapter, arrays, options)
            off = np.max(np.abs(adapter.fn(*arrays, **options) - want))
            worst = max(worst, float(off) / allowed)
            if samples < 10 and size <= 1:
                small.append(allowed / np.max(np.linalg.norm(arrays[2], axis=-1)))
    assert worst < 0.1
    assert np.median(small) < 3e-3


def test_condition_of_a_solve():
    """What perturbed kernels do is below it, and keys that come near each other raise it."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((n, 3)) for n in (4, 9, 9))
    at = np.array([5, 0, 7])
    conditions = []
    for near in (1.0, 1e-1, 1e-2):
        k[0] = k[5] + near
        conditions.append(condition_of_solve(q, k, v, at))
        mean = k - k.mean(0)
        chosen = mean[at]
        h, to_keys, p = np.exp(chosen @ chosen.T), np.exp(chosen @ mean.T), np.exp(q @ chosen.T)

        def result(*kernels, v=v):
            own, other, shares = kernels
            weights = shares @ np.linalg.solve(own, other)
            return weights @ v / weights.sum(-1, keepdims=True)

        delta, exact = 1e-9, result(h, to_keys, p)
        for _ in range(20):
            moved = [x * (1 + delta * rng.choice([-1.0, 1.0], x.shape)) for x in (h, to_keys, p)]
            off = np.max(np.abs(result(*moved) - exact)) / delta
            assert off <= 1.01 * conditions[-1] * np.max(np.linalg.norm(v, axis=-1))
    assert conditions[0] < conditions[1] < conditions[2]
    k[0] = k[5]
    assert condition_of_solve(q, k, v, at) > 1e14
