"""Inputs for implementations of the catalogue, and what they are compared with."""

import numpy as np

from refattn.judge.conformance import Adapter
from refattn.judge.conformance.candidate.gates import draw_gates, with_pairs
from refattn.registry import ESTIMATORS
from refattn.typing import KEY_LAWS

COUNT = {"rfa": "num_features", "ra": "num_samples", "lara": "num_proposals"}
SIZES = COUNT | {
    **dict.fromkeys(("rfa-local", "performer-relu"), "num_features"),
    **dict.fromkeys(("coreset", *(f"sampled-{law}" for law in KEY_LAWS)), "num_keys"),
}
CHUNKED = ("eva", "eva-sampled", "second-order")
SIZE = 4  # frequencies, samples or proposals; divides no length below


def tokens(*shape, seed=0, dtype="float64"):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def same(a, b, tolerance):
    """Equal but for rounding, over all parts, with NaN in the same places."""
    a, b = (x if isinstance(x, tuple) else (x,) for x in (a, b))
    return all(
        np.shape(x) == np.shape(y)
        and np.allclose(x, y, rtol=tolerance, atol=tolerance * np.nanmax(np.abs(y)), equal_nan=True)
        for x, y in zip(a, b, strict=True)
    )


def frequencies(estimator, lead, n, d, window=SIZE):
    """The keywords that make an estimator deterministic, for as many keys as queries."""
    if estimator in CHUNKED:
        return {"omega": tokens(*lead, -(-n // window), d, seed=5), "window": window}
    if ESTIMATORS[estimator].takes("indices"):
        shape = (*lead, *((n,) if estimator == "sampled-softmax" else ()), SIZE)
        indices = np.random.default_rng(5).integers(n, size=shape)
        if estimator == "coreset":
            return {"indices": (np.arange(SIZE)[::-1] * 2 + indices[..., :1]) % n}
        return {"indices": indices, "log_probability": np.log((indices + 1.0) / n)}
    if estimator == "ra":
        return {"omega": tokens(*lead, n, SIZE, d, seed=5)}
    drawn = {"omega": tokens(*lead, SIZE, d, seed=5)}
    return {**drawn, "centres": tokens(*lead, SIZE, d, seed=6)} if estimator == "lara" else drawn


def gates(estimator, k):
    """What tokens of a recurrence do beside keys and values."""
    record = ESTIMATORS[estimator]
    drawn = draw_gates(Adapter(len, estimator), np.random.default_rng(5), k)
    return with_pairs(record, {name: x.astype(k.dtype) for name, x in drawn.items()})


def ways(entry, lead):
    """Sizes and seeds, or frequencies or keys: what an entry may be called with."""
    own = frequencies(entry.estimator, lead, 9, 6) if entry.estimator in (*SIZES, *CHUNKED) else {}
    if "indices_only" in entry.capabilities:
        return [own]
    found = [{}]
    if count := SIZES.get(entry.estimator):
        found = [{count: size, "seed": 1} for size in (1, 3)]
    if entry.estimator in CHUNKED:
        found = [{"window": size} for size in (1, 4)]
        if "omega_only" in entry.capabilities:
            return [frequencies(entry.estimator, lead, 9, 6, size) for size in (1, 4)]
    return [*found, own] if "omega" in entry.capabilities else found


def probes(estimator, has):
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
        options = options | gates(estimator, args[1])
        if "vjp" in has:
            q, _, v = args
            if np.isnan(v).any():
                continue  # of which textbook gradients are NaN
            options = options | {"d_out": tokens(*q.shape[:-1], v.shape[-1], seed=7)}
        given = {"omega", "omega_only", "indices_only"} & set(has)
        if estimator not in SIZES and not given:
            yield args, options | ({"window": SIZE} if estimator in CHUNKED else {})
            continue
        if not {"omega_only", "indices_only"} & set(has):
            yield args, {**options, SIZES[estimator]: SIZE, "seed": 17}
        if given:
            lead = (args[0].shape[0],) if args[0].ndim == 3 else ()
            n = n if estimator == "ra" else args[1].shape[-2]
            yield args, {**options, **frequencies(estimator, lead, n, d)}


def attention_probes(has):
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
        yield (q[:, :5], k, v), {"causal": True}
        if "mask" in has:
            yield (q, k, v), {"causal": True, "mask": mask}
    if "gqa" in has:
        yield (q, k[:2], v[:2]), {}
    if "initial_state" in has:
        yield (q, k, v), {"initial_state": tokens(4, 6, 6, seed=9)}
    yield from option_probes(has, q, k, v)


def option_probes(has, q, k, v):
    grouped = (q, k[:2], v[:2])
    batch = tuple(np.stack([x, x[::-1]]) for x in (q, k, v))
    if "window" in has:
        for window in ((2, 1), (0, 0), (None, 2), (3, None)):
            yield (q, k, v), {"window": window}
            yield (q[:, :5], k, v), {"window": window, "causal": True}
        yield (q[:, :1], k, v), {"window": (3, 0)}
        longer = [np.tile(x, (1, 10, 1)) for x in (q, k, v)]
        yield tuple(longer), {"window": (70, 0)}
        yield (longer[0], *grouped[1:]), {"sinks": tokens(4, seed=8)}
        yield tuple(longer), {"sinks": tokens(4, seed=8)}
    if "softcap" in has:
        bias, mask = tokens(4, 13, 13, seed=9), tokens(13, 13, seed=3) > -1
        for size in (1.0, 10.0):
            yield (size * q, k, v), {"softcap": 1.5, "bias": bias, "mask": mask}
            yield grouped, {"softcap": 1.5, "sinks": 3 * tokens(4, seed=8)}
        yield grouped, {"bias": bias}
        yield batch, {"bias": tokens(2, 4, 13, 13, seed=9)}
    if "dropout" in has:
        for rate in (0.1, 0.5):
            for seed in (3, 4):
                yield (q, k, v), {"dropout": rate, "seed": seed}
        yield batch, {"dropout": 0.5, "seed": 3}
