"""Right kernels of approximate attention, one head each, in usual orders and arithmetics."""

from typing import NamedTuple

import numpy as np

from refattn.judge.rounding.formats import FORMATS

single = np.float32


class Steps(NamedTuple):
    """What a kernel rounds each step to, what it rounds operands of products to, and its output."""

    step: str = "float32"
    operands: str = "float32"
    out: str = "float32"

    def r(self, x):
        return FORMATS[self.step].round(x).astype(single)

    def mm(self, a, b):
        a, b = (FORMATS[self.operands].round(x).astype(single) for x in (a, b))
        return self.r(a @ b)

    def exp(self, x):
        return self.r(np.exp(self.r(x), dtype=single))

    def sum(self, x, axis=-1):
        return self.r(np.sum(x, axis=axis, keepdims=True, dtype=single))

    def half(self, k):
        return self.r(self.sum(self.r(k * k)).mT / single(2))

    def rooted(self, x, scale):
        return self.r(single(scale**0.5) * x)


STYLES = {
    "float32": {"float32": Steps()},
    **{
        x: {"sums": Steps(out=x), "operands": Steps("float32", x, x), "steps": Steps(x, x, x)}
        for x in ("bfloat16", "float16")
    },
}


def seen_keys(n, m, causal):
    return np.tril(np.ones((n, m), bool), m - n) if causal else np.ones((n, m), bool)


def mean(s, scores, v, seen):
    """Softmax attention: weights over the largest, divided after the product with the values."""
    top = np.max(np.where(seen, scores, -np.inf), -1, keepdims=True)
    w = np.where(seen, s.exp(np.where(seen, scores - top, 0)), single(0))
    return s.r(s.mm(w, v) / s.sum(w))


def features(s, q, k, v, omega, log_weight=0.0, seen=None):
    """Sum over keys, then over samples: features of queries and of keys, over their largest."""
    of_q, of_k = s.r(s.mm(q, omega.T) + log_weight), s.r(s.mm(k, omega.T) - s.half(k).T)
    of_q = s.exp(of_q - np.max(of_q, -1, keepdims=True))
    of_k = s.exp(of_k - np.max(of_k))
    if seen is None or seen.all():
        return s.r(s.mm(of_q, s.mm(of_k.T, v)) / s.mm(of_q, s.sum(of_k.T)))
    pairs = np.where(seen, s.mm(of_q, of_k.T), single(0))
    return s.r(s.mm(pairs, v) / s.sum(pairs))


def ra(s, q, k, v, omega, scale, causal, wrong=""):
    k = s.rooted(k, scale)
    half = 0 * s.half(k) if wrong == "norms" else s.half(k)
    seen, rows = seen_keys(len(q), len(k), causal), []
    for i in range(len(q)):
        samples = mean(s, s.r(s.mm(omega[i], k.T) - half), v, seen[i])
        samples = samples[1:] if wrong == "sample" else samples
        rows.append(s.r(s.sum(samples, 0)[0] / single(len(samples))))
    return np.stack(rows)


def lara(s, q, k, v, omega, scale, causal, count, wrong=""):
    q, k = s.rooted(q, scale), s.rooted(k, scale)
    n, m = len(q), len(k)
    of_q = np.arange(n) * count // n
    of_k = np.arange(n - m, n) * count // n if causal else np.arange(m) * count // m

    def means(x, of):
        cut = (np.arange(count)[:, None] == of).astype(single)
        return s.r(s.r(cut @ x) / np.maximum(cut.sum(1, keepdims=True), 1))

    centres = s.r(means(q, of_q) + means(k, of_k))
    if causal:
        centres = np.concatenate([0 * centres[:1], centres[:-1]])
    if wrong == "centres":
        centres = centres * single(1 + 1e-3)
    ratio = s.r(s.mm(omega, centres.T) - s.half(centres))  # (S, C)
    rows = []
    for i in range(n):
        there = np.arange(count) <= of_q[i] if causal else np.ones(count, bool)
        top = np.max(np.where(there, ratio, -np.inf), -1, keepdims=True)
        total = s.sum(np.where(there, s.exp(np.where(there, ratio - top, 0)), single(0)))
        log_weight = -s.r(top + s.r(np.log(total)))[:, 0]
        some = np.repeat(there, len(omega) // count)
        if wrong == "sample":
            some[-1] = False
        seen = seen_keys(n, m, causal)[i]
        rows.append(features(s, q[i : i + 1], k[seen], v[seen], omega[some], log_weight[some])[0])
    return np.stack(rows)


def local(s, q, k, v, omega, scale, causal, window, wrong=""):
    q, k = s.rooted(q, scale), s.rooted(k, scale)
    n, m = len(q), len(k)
    ahead = np.arange(m) - (np.arange(n)[:, None] + m - n)
    near = (ahead >= -window[0]) & (ahead <= window[1] + (wrong == "edge"))
    seen = seen_keys(n, m, causal)
    of_q = s.r(s.mm(q, omega.T) - s.half(q).T)  # (n, S)
    of_k = s.r(s.mm(k, omega.T) - s.half(k).T)
    top = np.maximum(np.max(of_q, -1, keepdims=True) + np.max(of_k), 0)
    weights = s.exp(s.mm(q, k.T) - top)
    far = s.mm(s.exp(of_q - np.max(of_q, -1, keepdims=True)), s.exp(of_k - np.max(of_k)).T)
    far = s.r(
        far * s.exp(np.max(of_q, -1, keepdims=True) + np.max(of_k) - top) / single(len(omega))
    )
    if wrong == "count":
        far = s.r(far * single(len(omega) / (len(omega) - 1)))
    weights = np.where(near, weights, far) * seen
    return s.r(s.mm(weights, v) / s.sum(weights))


def projections(s, q, k, v, omega, scale, causal, wrong=""):
    phi, psi = (
        s.r(s.r(np.maximum(s.mm(s.rooted(x, scale), omega.T), 0)) + single(0.001)) for x in (q, k)
    )
    if wrong == "epsilon":
        phi = s.r(phi - single(0.001))
    pairs = s.mm(phi, psi.T) * seen_keys(len(q), len(k), causal)
    return s.r(s.mm(pairs, v) / s.sum(pairs))


def importance(s, q, k, v, omega, scale, causal, wrong=""):
    seen = seen_keys(len(q), len(k), causal)
    scores = s.r(single(scale) * s.mm(q, k.T))
    top = np.max(np.where(seen, scores, -np.inf), -1, keepdims=True)
    total = s.sum(np.where(seen, s.exp(np.where(seen, scores - top, 0)), single(0)))
    q, k = s.rooted(q, scale), s.rooted(k, scale)
    of_q = s.r(s.mm(q, omega.T) - (0 if wrong == "norms" else s.half(q).T))
    most = np.max(of_q, -1, keepdims=True)
    of_k = s.r(s.mm(k, omega.T) - s.half(k).T)
    pairs = s.mm(s.exp(of_q - most), s.exp(of_k - np.max(of_k)).T) * seen
    factor = s.r(s.exp(most + np.max(of_k) - top) / s.r(single(len(omega)) * total))
    return s.r(s.mm(pairs, v) * factor)


def chunks(s, q, k, v, scale, causal, window, kind, omega=None, wrong=""):
    """EVA and second order: near keys, and each other chunk by a summary."""
    q, k = s.rooted(q, scale), s.rooted(k, scale)
    n, m = len(q), len(k)
    of_k, of_q = np.arange(m) // window, (np.arange(n) + m - n) // window
    count = -(-m // window)
    if wrong == "edge":
        of_k = np.minimum((np.arange(m) + 1) // window, count - 1)
    size = np.array([np.sum(of_k == c) for c in range(count)])
    k_mean = np.stack([s.r(s.sum(k[of_k == c], 0)[0] / size[c]) for c in range(count)])
    values, scores = [], s.r(s.mm(q, k_mean.T) + np.log(size).astype(single))
    for c in range(count):
        kc, vc = k[of_k == c], v[of_k == c]
        if kind == "eva":
            own = q[of_q == c]
            at = k_mean[c] if not len(own) else s.r(s.r(s.sum(own, 0)[0] / len(own)) + k_mean[c])
            at = omega[c] if omega is not None else at
            half = 0 * s.half(kc) if wrong == "norms" else s.half(kc)
            f = mean(s, s.r(s.mm(at[None], kc.T) - half), vc, np.ones(len(kc), bool))
            values.append(np.broadcast_to(f, (n, v.shape[1])))
        else:
            v_mean, apart = s.r(s.sum(vc, 0) / size[c]), s.r(kc - k_mean[c])
            along = s.mm(q, s.r(s.mm(apart.T, apart) / size[c]))
            scores[:, c] = s.r(
                scores[:, c] + s.sum(s.r(along * q))[:, 0] / (1 if wrong == "norms" else 2)
            )
            values.append(s.r(v_mean + s.mm(q, s.r(s.mm(apart.T, s.r(vc - v_mean)) / size[c]))))
    near = seen_keys(n, m, causal) & (of_k == of_q[:, None])
    far = np.arange(count) < of_q[:, None] if causal else np.arange(count) != of_q[:, None]
    rows = [
        mean(
            s,
            np.append(s.mm(q[i : i + 1], k.T)[0], scores[i])[None],
            np.concatenate([v, np.stack(values)[:, i]]),
            np.append(near[i], far[i]),
        )[0]
        for i in range(n)
    ]
    return np.stack(rows)


def draw(name, style, dtype, seed, **changes):
    """Draw a file of a right kernel, or of a wrong one, as `verify` takes it."""
    size = {"n": 24, "m": 29, "d": 8, "d_v": 8, "samples": 8, "count": 4, "window": 6, "large": 1.0}
    size |= {x: changes.pop(x) for x in [*changes] if x in size}
    causal, wrong, factor = (
        changes.pop(x, y) for x, y in (("causal", False), ("wrong", ""), ("scale", 1.0))
    )
    rng, s, to = np.random.default_rng(seed), STYLES[dtype][style], FORMATS[dtype].round
    n, m, d = size["n"], size["m"], size["d"]
    q, k, v = (
        to(x * rng.standard_normal(y)).astype(single)
        for x, y in ((size["large"], (n, d)), (1, (m, d)), (1, (m, size["d_v"])))
    )
    omega = rng.standard_normal((n, size["samples"], d)).astype(single)
    given = {"q": q, "k": k, "v": v, "estimator": name, "dtype": dtype, "causal": causal}
    rest = {"scale": factor * d**-0.5, "causal": causal, "wrong": wrong}
    if name == "ra":
        given |= {"omega": omega, "out": ra(s, q, k, v, omega, **rest)}
    elif name in KERNELS:
        more = {"lara": {"count": size["count"]}, "rfa-local": {"window": (3, 2)}}.get(name, {})
        kernel = KERNELS[name]
        out = kernel(s, q, k, v, omega[0], **rest, **more)
        more = {"num_proposals": more["count"]} if name == "lara" else more
        given |= {"omega": omega[0], "out": out, **more}
    else:
        rest |= {"window": size["window"], "kind": name}
        given |= {"window": size["window"], "out": chunks(s, q, k, v, **rest)}
    given["out"] = FORMATS[s.out].round(given["out"])
    return given


KERNELS = {"lara": lara, "rfa-local": local, "performer-relu": projections, "is": importance}
NAMES = ("ra", *KERNELS, "eva", "second-order")
