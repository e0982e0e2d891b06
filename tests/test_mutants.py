"""The correct variants agree with the package, and every mutant does what its entry says."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import refattn
from refattn import kernels
from refattn.conformance import mutants
from refattn.conformance.mutants import MUTANTS, VARIANTS, Mutant

BY_NAME = {m.name: m for m in (*VARIANTS, *MUTANTS)}
BASE = {m.name: m for m in VARIANTS if m.name == m.estimator}
COUNT = {"rfa": "num_features", "ra": "num_samples", "lara": "num_proposals"}
SIZE = 4  # frequencies, samples or proposals; divides no length below

each = pytest.mark.parametrize("entry", (*VARIANTS, *MUTANTS), ids=lambda m: m.name)


def tokens(*shape: int, seed: int = 0, dtype: str = "float64") -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def frequencies(estimator: str, lead: tuple[int, ...], n: int, d: int) -> dict[str, Any]:
    """The keywords that make an estimator deterministic."""
    if estimator == "ra":
        return {"omega": tokens(*lead, n, SIZE, d, seed=5)}
    drawn = {"omega": tokens(*lead, SIZE, d, seed=5)}
    return {**drawn, "centres": tokens(*lead, SIZE, d, seed=6)} if estimator == "lara" else drawn


def probes(estimator: str, has: tuple[str, ...]) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments, deterministic and seeded, that exercise the capabilities of an entry."""
    if estimator == "moments":
        for x in (tokens(2, 7, 3), tokens(7, 3) + np.arange(3), tokens(50, 3) + 1e5):
            yield (x,), {}
        return
    if estimator == "kernel":
        for x, y in ((tokens(7, 3), tokens(7, 3, seed=1)), (tokens(3) * 5, tokens(3, seed=1) * 5)):
            yield (x, y), {"num_features": 5, "seed": 17}
            if "omega" in has:
                yield (x, y), {"omega": tokens(5, 3, seed=5)}
        return
    for args, options in attention_probes(has):
        n, d = args[0].shape[-2:]
        if estimator not in COUNT:
            yield args, options
            continue
        yield args, {**options, COUNT[estimator]: SIZE, "seed": 17}
        if "omega" in has:
            lead = (args[0].shape[0],) if args[0].ndim == 3 else ()
            yield args, {**options, **frequencies(estimator, lead, n, d)}


def attention_probes(has: tuple[str, ...]) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    q, k, v = (tokens(4, 13, 6, seed=s) for s in range(3))
    mask = tokens(13, 13, seed=3) > 0
    yield (q, k, v[..., :5]), {}
    for size in (-30.0, 300.0):
        yield (size * q[0], 3 * k[0] * np.arange(13)[:, None] / 13, v[0]), {}
    if "mask" in has:
        mask[2] = False
        yield (q, k, v), {"mask": mask}
        yield (5000 * q, k, v), {"mask": mask}
        hidden = np.arange(13) == 4
        yield (q, k, np.where(hidden[:, None], np.nan, v)), {"mask": ~hidden}
    if "causal" in has:
        yield (q, k, v), {"causal": True}
        yield (q, 30 * k, v), {"causal": True}
        yield (q[:, :5], k[:, :9], v[:, :9]), {"causal": True}
        if "mask" in has:
            yield (q, k, v), {"causal": True, "mask": mask}
    if "gqa" in has:
        yield (q, k[:2], v[:2]), {}


def same(a: Any, b: Any, tolerance: float) -> bool:
    """Equal but for rounding, over all parts, with NaN in the same places."""
    a, b = (x if isinstance(x, tuple) else (x,) for x in (a, b))
    return all(
        np.shape(x) == np.shape(y)
        and np.allclose(x, y, rtol=tolerance, atol=tolerance * np.nanmax(np.abs(y)), equal_nan=True)
        for x, y in zip(a, b, strict=True)
    )


def test_catalogue() -> None:
    names = [m.name for m in (*VARIANTS, *MUTANTS)]
    assert len(set(names)) == len(names)
    least = {"softmax": 10, "kernel": 12, "rfa": 20, "ra": 8, "lara": 6, "linear": 6, "moments": 6}
    for estimator, count in least.items():
        assert sum(m.estimator == estimator for m in MUTANTS) >= count
        assert estimator in BASE
    for m in (*VARIANTS, *MUTANTS):
        assert m.name.split("-")[0] == m.estimator
        assert set(m.capabilities) <= {"omega", "mask", "causal", "gqa"}
        assert m.effect.endswith(".")


@each
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_contract(entry: Mutant, dtype: str) -> None:
    """Every entry takes the arguments it claims, and returns their shape and dtype."""
    if entry.estimator == "moments":
        mean, covariance = entry.fn(tokens(2, 5, 3, dtype=dtype))
        assert mean.dtype == covariance.dtype == dtype
        if entry.name != "moments-transposed":
            assert mean.shape == (2, 3)
            assert covariance.shape == (2, 3, 3)
        return
    if entry.estimator == "kernel":
        x, y = tokens(5, 1, 3, dtype=dtype), tokens(4, 3, dtype=dtype)
        for size in (1, 5):
            out = entry.fn(x, y, num_features=size, seed=3)
            assert out.shape == (5, 4)
            assert out.dtype == dtype
        assert entry.fn(x[0, 0], y[0], num_features=2, seed=0).shape == ()
        return
    count = COUNT.get(entry.estimator)
    for lead in ((), (4,), (2, 4)):
        q, k = tokens(*lead, 9, 6, dtype=dtype), tokens(*lead, 9, 6, dtype=dtype)
        v = tokens(*lead, 9, 5, dtype=dtype)
        if lead and "gqa" in entry.capabilities:
            k, v = k[..., :2, :, :], v[..., :2, :, :]
        ways: list[dict[str, Any]] = [{count: s, "seed": 1} for s in (1, 3)] if count else [{}]
        if "omega" in entry.capabilities:
            ways.append(frequencies(entry.estimator, lead, 9, 6))
        for way in ways:
            options = dict(way)
            if "mask" in entry.capabilities:
                options["mask"] = np.arange(9) < 7
            if "causal" in entry.capabilities:
                options["causal"] = True
            out = entry.fn(q, k, v, **options)
            assert out.shape == (*lead, 9, 5)
            assert out.dtype == dtype


def package(estimator: str) -> Any:
    """The package's function, called as the contract says."""
    return {
        "softmax": refattn.softmax_attention,
        "linear": refattn.linear_attention,
        "rfa": refattn.random_feature_attention,
        "ra": refattn.randomized_attention,
        "lara": refattn.linear_randomized_attention,
    }[estimator]


@pytest.mark.parametrize("entry", VARIANTS, ids=lambda m: m.name)
def test_variants_agree_with_the_package(entry: Mutant) -> None:
    for args, options in probes(entry.estimator, entry.capabilities):
        if entry.estimator == "moments":
            (x,) = args
            want: Any = (x.mean(-2), np.vectorize(np.cov, signature="(d,n)->(d,d)")(x.mT))
        elif entry.estimator == "kernel":
            if "seed" in options:
                continue
            x, y = (np.atleast_2d(z)[:, None] for z in args)
            want = kernels.estimate(x, y, **options).reshape(args[0].shape[:-1])
        elif "seed" in options:
            if entry.estimator != "lara":
                continue  # the package draws in another order
            given = {key: x for key, x in options.items() if key != "seed"}
            want = package("lara")(*args, rng=options["seed"], **given)
        else:
            want = package(entry.estimator)(*args, **options)
        assert same(entry.fn(*args, **options), want, 1e-9)  # exponents go up to 1e5


@pytest.mark.parametrize(
    "entry",
    [m for m in MUTANTS if not m.name.endswith("precision-choice")],
    ids=lambda m: m.name,
)
def test_mutants_differ(entry: Mutant) -> None:
    """By more than rounding from the correct variant on the same arguments, seeds included."""
    base = BASE[entry.estimator].fn
    assert any(
        not same(entry.fn(*args, **options), base(*args, **options), 1e-9)
        for args, options in probes(entry.estimator, entry.capabilities)
    )


@pytest.mark.parametrize("entry", MUTANTS, ids=lambda m: m.name)
def test_seed(entry: Mutant) -> None:
    """The same seed gives the same result and another a different one, but for the seed mutants."""
    if entry.estimator not in ("kernel", *COUNT):
        return
    count = {COUNT.get(entry.estimator, "num_features"): 3}
    args = [tokens(9, 4, seed=s) for s in range(2 if entry.estimator == "kernel" else 3)]
    outs = [entry.fn(*args, **count, seed=seed) for seed in (1, 1, 2, 17)]
    short = entry.name.removeprefix(f"{entry.estimator}-")
    assert np.array_equal(outs[0], outs[1]) == (short not in ("seed-ignored", "dropout"))
    deterministic = ("seed-constant", "noise-dropped", "exact", "rademacher", "causal-bucket-excluded")
    if short not in deterministic and entry.name not in ("lara-noise-dropped", "ra-greedy"):
        assert not np.array_equal(outs[0], outs[2])
        assert np.array_equal(outs[0], outs[3]) == (short == "seed-mod-16")
