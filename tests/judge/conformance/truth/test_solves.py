"""The allowed error of coresets: what roundings of a solve may do."""

from functools import partial

import numpy as np
import pytest

from refattn.judge.conformance.checks.trials import CheckRun
from refattn.judge.conformance.truth.allowed import reference
from refattn.judge.conformance.truth.solves import condition_of_solve, errors_of_pullback
from tests.judge.conformance.candidates import of


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


@pytest.mark.long("20", "inverse", "orthogonal", "elimination")
@pytest.mark.parametrize("seeds", [1, 20])
@pytest.mark.parametrize("kind", ["elimination", "cholesky", "inverse", "orthogonal"])
def test_correct_coresets_in_float32_stay_far_below_the_allowed_error(kind, seeds):
    """And it stays far below the values: a few thousandths of them for few keys."""
    adapter = of(partial(solved, kind=kind), "coreset", "indices_only", dtype="float32")
    worst, small = 0.0, []
    for seed in range(seeds):
        t = CheckRun(adapter, "allowed", seed)
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


def cotangents(forth, back, arrays, at, g):
    """Result and cotangents of a coreset, of kernels h_JJ, h_JK and e^(q . k) forth and back."""
    (own, near, shares), (own_back, near_back, shares_back) = forth, back
    q, k, v = arrays
    values = np.concatenate([v, np.ones_like(v[:, :1])], -1)
    x = np.linalg.solve(own, near @ values)
    sums = shares @ x
    out = sums[:, :-1] / sums[:, -1:]
    g = np.concatenate([g, -np.sum(g * out, -1, keepdims=True)], -1) / sums[:, -1:]
    y = np.linalg.solve(own_back, shares_back.T @ g)
    of_shares, of_near = shares_back * (g @ x.T), near_back * (y @ values.T)
    of_own = -own_back * (y @ x.T)
    dk = of_near.T @ k[at]
    dk[at] += of_shares.T @ q + of_near @ k + (of_own + of_own.T) @ k[at]
    return out, of_shares @ k[at], dk - np.mean(dk, 0), (near_back.T @ y)[:, :-1]


@pytest.mark.parametrize("near", [1.0, 1e-2])
def test_errors_of_a_pullback_of_a_solve(near):
    """What perturbed kernels do is below them, and not far below unless two keys are near."""
    rng = np.random.default_rng(1)
    q, k, v, g = (rng.standard_normal((n, 3)) for n in (4, 9, 9, 4))
    at, delta, worst = np.array([5, 0, 7]), 1e-9, np.zeros(4)
    k[0] = k[5] + near
    k = k - np.mean(k, 0)
    kernels = [np.exp(x @ y.T) for x, y in ((k[at], k[at]), (k[at], k), (q, k[at]))]
    exact = cotangents(kernels, kernels, (q, k, v), at, g)
    most = errors_of_pullback(q, k, v, at, np.abs(g))
    for _ in range(100):
        moved = (
            [x * (1 + delta * rng.choice([-1.0, 1.0], x.shape)) for x in kernels] for _ in range(2)
        )
        found = cotangents(*moved, (q, k, v), at, g)
        off = [np.max(np.abs(x - y)) / delta for x, y in zip(found, exact, strict=True)]
        worst = np.maximum(worst, np.divide(off, most))
    assert np.all(worst < 1)
    assert near < 1 or np.all(worst > 1e-4)
    k[0] = k[5]
    assert np.min(errors_of_pullback(q, k, v, at, np.abs(g))) > 1e10
