"""The tests of a trial against the same, number by number; directions are changes of the output."""

import math
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

from refattn.rounding import PROFILES
from refattn.rounding import problem as rounding_problem
from refattn.rounding.formats import FORMATS
from refattn.verification import trial
from refattn.verification.trial import Numbers, attempt
from tests.rounding.slow import BENFORD, EDGE
from tests.verification import slow

BF16 = FORMATS["bfloat16"]
HEADS, N, M, COLUMNS = 2, 40, 6, 2


class Given(SimpleNamespace):
    """Two heads, with what a kernel gave: the exact result and noise of about the right size."""

    def __init__(self, causal=False, softcap=None, wrong=1.0, seed=0):
        rng = np.random.default_rng(seed)
        q, k, v = (
            BF16.round(rng.standard_normal((HEADS, *x)))
            for x in ((N, 3), (M + causal * N, 3), (M + causal * N, 2))
        )
        self.arrays, self.options = (q, k, v), {"causal": causal, "softcap": softcap}
        self.problem = rounding_problem.of_arrays(q, k, v, **self.options)
        self.kernel, self.profile = PROFILES["flash"].kernel("bfloat16"), PROFILES["flash"]
        changes = {x: f for x, f in trial._CHANGES.items() if x != "softcap" or softcap is None}
        self.rows = [
            self.problem.analyse((h,), self.kernel, slice(0, N), changes) for h in range(HEADS)
        ]
        exact = np.stack([x.out for x in self.rows])
        std = np.stack([x.std for x in self.rows])
        most = 0.9 * np.stack([x.bound for x in self.rows])
        error = (wrong - 1) * exact + 1.4 * std * rng.standard_normal(exact.shape)
        self.got = exact + np.clip(error, -most, most)
        lse = np.stack([x.lse for x in self.rows])
        self.lse = FORMATS["float32"].round(lse + 1e-6 * rng.standard_normal(lse.shape))
        self.weights = rng.choice([0.5, 1.0], (HEADS, N))
        self.numbers = Numbers(self.got.__getitem__, "bfloat16", self.lse.__getitem__)

    def tried(self, alpha=1e-6):
        return attempt(
            self.problem, "bfloat16", self.profile, "flash", self.numbers, alpha, self.weights
        )

    def attention(self, h, move=lambda s: s, seen=None, cap=None, more=0.0, of_largest=True):
        """A head with a change of the scores, of the keys, of the cap, or of the normaliser."""
        q, k, v = (x[h] for x in self.arrays)
        s = 3**-0.5 * q @ k.T
        cap = self.options["softcap"] if cap is None else cap
        s = move(s if cap is None else cap * np.tanh(s / cap))
        usual = np.tri(N, len(k), len(k) - N, dtype=bool) if self.options["causal"] else True
        w = np.where(usual if seen is None else seen, np.exp(s), 0.0)
        largest = np.max(w, -1, keepdims=True) if of_largest else 1.0
        return w @ v / (np.sum(w, -1, keepdims=True) + more * largest)

    def directions(self, h):
        """Changes of the output by defects, over their sizes."""
        out, (_, k, _) = self.attention(h), self.arrays
        m, e = k.shape[1], 1e-6
        ahead = np.arange(m) - np.arange(N)[:, None] - (m - N)
        s = 3**-0.5 * self.arrays[0][h] @ k[h].T

        def slope(f):
            return (f(e) - f(-e)) / (2 * e)

        cap = self.options["softcap"]
        if cap is None:
            yield "scale", slope(lambda x: self.attention(h, lambda s: s * (1 + x)))
            yield "softcap", (self.attention(h, cap=e**-0.5) - out) / e
        else:
            yield (
                "scale",
                slope(lambda x: self.attention(h, lambda _: cap * np.tanh(s * (1 + x) / cap))),
            )
        yield "slope", slope(lambda x: self.attention(h, lambda s: s + x * ahead))
        yield "factor", out
        yield "truncated", BF16.round(out) - np.sign(out) * BF16.spacing(out) / 2 - BF16.round(out)
        yield "epsilon", slope(lambda x: self.attention(h, more=x))
        yield "sink", slope(lambda x: self.attention(h, more=x, of_largest=False))
        if self.options["causal"]:
            yield "edge+1", self.attention(h, seen=ahead <= 1) - out
            yield "edge-1", self.attention(h, seen=ahead <= -1) - out
        for j in range(m):
            seen = (np.arange(m) != j) & ((ahead <= 0) | (not self.options["causal"]))
            yield f"key {j}", self.attention(h, seen=seen) - out

    def sums(self, h, i, name, steep):
        """T, U, G and slack of a row; that of keys by the inequality of Cauchy and Schwarz."""
        rows, found = self.rows[h], [0.0] * 4
        for c in range(COLUMNS):
            g, std, out = float(steep[i, c]), rows.std[i, c], rows.out[i, c]
            parts = (self.got[h, i, c] - out, rows.nearest[i, c] - out, g, rows.slack[i, c])
            for a, x in enumerate(parts):
                found[a] += (abs(g) if a == 3 else g) * x / std**2
        if name.startswith("key"):
            v, share = self.arrays[2][h, int(name[4:])], 0.0
            for c in range(COLUMNS):  # the change is share * (out - v)
                share = max(share, abs(steep[i, c] / (v[c] - rows.out[i, c])))
            slack = [rows.slack[i, c] / rows.std[i, c] ** 2 for c in range(COLUMNS)]
            about = sum(x * abs(y) for x, y in zip(slack, rows.out[i], strict=True))
            found[3] = share * (math.hypot(*slack) * math.hypot(*v) + about)
        return found

    def of_lse(self, h, i):
        rows, to = self.rows[h], FORMATS["float32"]
        exact, step = float(rows.lse[i]), float(to.spacing(rows.lse[i]))
        error, own = self.lse[h, i] - exact, float(to.round(exact)) - exact
        variance, slack = rows.lse_std[i] ** 2 + step**2 / 12, rows.lse_slack[i] + step / 2
        return [x / variance for x in (error, own, 1.0, slack)]


def in_tiles(size):
    return [
        [(h, i) for i in range(x, min(x + size, N))]
        for h in range(HEADS)
        for x in range(0, N, size)
    ]


def expected(given):
    """P-values of all that is tried, by name, and what sums along directions say, without keys."""
    every, each = [*product(range(HEADS), range(N))], in_tiles(N)
    rows, w = given.rows, {x: given.weights[x] for x in product(range(HEADS), range(N))}
    z = {}
    for h, i, c in product(range(HEADS), range(N), range(COLUMNS)):
        out, slack = rows[h].out[i, c], rows[h].slack[i, c]
        error, own = given.got[h, i, c] - out, rows[h].nearest[i, c] - out
        near = min(max(error, min(own, 0.0) - slack), max(own, 0.0) + slack)
        z[h, i, c] = (error - near) / rows[h].worst[i, c]

    def mean(at, columns=range(COLUMNS)):
        total = sum(w[x] for x in at)
        squares = [w[x] * z[*x, c] ** 2 for x in at for c in columns]
        return slow.chernoff(sum(squares) / len(columns) / total, total)

    largest = max(map(abs, z.values()))
    found = {
        "bound": 1.0,
        "largest z": slow.many(2 * math.exp(-(largest**2) / 2), len(z)),
        "mean square": mean(every),
        "mean square of heads": slow.many(min(map(mean, each)), HEADS),
        "mean square of columns": slow.many(min(mean(every, [c]) for c in range(2)), COLUMNS),
        "bound of lse": 1.0,
    }
    for size in (16, 32):
        p = [mean(x) for x in in_tiles(size)]
        found[f"mean square of tiles of {size}"] = slow.many(min(p), len(p))
    sums = {"lse": {x: given.of_lse(*x) for x in every}}
    for h in range(HEADS):
        for name, steep in given.directions(h):
            of = sums.setdefault(name, {})
            of |= {(h, i): given.sums(h, i, name, steep) for i in range(N)}
    squares = [
        w[x] * max(abs(t) - slack, 0.0) ** 2 / g * BENFORD / EDGE
        for x, (t, _, g, slack) in sums["lse"].items()
    ]
    total = sum(w.values())
    found["mean square of lse"] = slow.chernoff(sum(squares) / total, total)

    def surer(name, at):
        return slow.surer([sums[name][x] for x in at], [w[x] for x in at])

    told = {}
    for name in sums:
        if not name.startswith("key"):
            told[name] = surer(name, every)
            found[name] = told[name][2]
            found[f"{name} of a head"] = slow.many(min(surer(name, x)[2] for x in each), HEADS)
    tiles = []
    for at in in_tiles(16) + in_tiles(32):
        value, _, p, _ = surer("factor", at)
        tiles.append((value**2 * sum(w[x] * sums["factor"][x][2] for x in at), p))
    found["factor of a tile"] = slow.many(max(tiles)[1], len(tiles))
    for name, heads in (("key", [every]), ("key of a head", each)):
        keys = []
        for at, key in product(heads, [x for x in sums if x.startswith("key")]):
            value, error, p, _ = surer(key, at)
            explained = value**2 * sum(w[x] * sums[key][x][2] for x in at)
            keys.append((explained, value, error, p))
        _, *told[name], p = max(keys)
        found[name] = slow.many(p, len(keys))
    return found, told, sums


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_a_trial_number_by_number(causal, softcap, monkeypatch):
    given = Given(causal, softcap, wrong=1.004)
    monkeypatch.setattr(trial, "_telling", list)
    tried = given.tried(alpha=0.999)
    p, told, sums = expected(given)
    of_trial = {x.name: x.p_value for x in tried.tests}
    assert of_trial.keys() == p.keys()
    for name, value in p.items():
        assert of_trial[name] == pytest.approx(value, rel=1e-4), name
    adjusted = slow.holm([x.p_value for x in tried.tests])
    assert [x.adjusted for x in tried.tests] == pytest.approx(adjusted)
    suspects = {x.name: x for x in tried.suspects}
    for name in told.keys() & suspects.keys():
        found = suspects[name]
        assert (found.estimate, found.error) == pytest.approx(told[name][:2], rel=1e-4), name
    t = math.sqrt(2 * math.log(2 * len(tried.tests) / 0.999))
    for name, size in tried.detectable.items():
        g, slack = (sum(x[a] for x in sums[name].values()) for a in (2, 3))
        assert size == pytest.approx((t * math.sqrt(g) + slack) / g, rel=1e-4), name
    assert tried.detectable.keys() == told.keys() - {"key", "key of a head"}
