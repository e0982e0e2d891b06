"""The tests of a trial against the same, number by number; directions are changes of the output."""

import math
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

from refattn import softmax_attention, verify
from refattn.judge.rounding import PROFILES, problems
from refattn.judge.rounding.covariance import bound_covariance, variance_along
from refattn.judge.rounding.formats import FORMATS
from refattn.judge.rounding.roundings import WORST
from refattn.judge.verification import judging, trial
from refattn.judge.verification.directions import PLAIN_DIRECTIONS, list_changes
from refattn.judge.verification.evidence import Estimate
from refattn.judge.verification.findings import Numbers, Suspect
from refattn.judge.verification.head_sums import row_weights
from refattn.judge.verification.looks import Look
from refattn.judge.verification.trial import attempt
from tests.judge.rounding import rounded
from tests.judge.rounding.slow import BENFORD, EDGE
from tests.judge.verification import slow

BF16 = FORMATS["bfloat16"]
HEADS, N, M, COLUMNS = 2, 40, 6, 2


class Given(SimpleNamespace):
    """Two heads, with what a kernel gave: the exact result and noise of about the right size."""

    def __init__(self, causal=False, softcap=None, name="flash", wrong=1.0, seed=0):
        rng = np.random.default_rng(seed)
        q, k, v = (
            BF16.round(rng.standard_normal((HEADS, *x)))
            for x in ((N, 3), (M + causal * N, 3), (M + causal * N, 2))
        )
        self.arrays, self.options = (q, k, v), {"causal": causal, "softcap": softcap}
        self.problem = problems.pose_arrays(q, k, v, **self.options)
        self.kernel, self.profile = PROFILES[name].roundings("bfloat16"), PROFILES[name]
        changes, every = list_changes(self.problem), slice(0, N)
        self.rows = [self.problem.analyse((h,), self.kernel, every, changes) for h in range(HEADS)]
        exact = np.stack([x.out for x in self.rows])
        std = np.stack([x.std for x in self.rows])
        most = 0.9 * np.stack([x.bound for x in self.rows])
        error = (wrong - 1) * exact + 1.4 * std * rng.standard_normal(exact.shape)
        self.got = exact + np.clip(error, -most, most)
        lse = np.stack([x.lse for x in self.rows])
        most = 0.9 * np.stack([x.lse_bound for x in self.rows])
        self.lse = FORMATS["float32"].round(lse + most * rng.uniform(-1, 1, lse.shape))
        self.weights = rng.choice([0.5, 1.0], (HEADS, N))
        self.numbers = Numbers(self.got.__getitem__, "bfloat16", self.lse.__getitem__)

    def tried(self, alpha=1e-6):
        return attempt(
            self.problem, "bfloat16", self.profile, "flash", self.numbers, alpha, Look(self.weights)
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
            yield "temperature", slope(lambda x: self.attention(h, lambda s: s * (1 + x)))
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
        if name in PLAIN_DIRECTIONS:
            found[3] += self.of_exponentials(h, i, steep[i] / rows.std[i] ** 2)
        return found

    def of_exponentials(self, h, i, along):
        """What they add to the slack of a sum, less what they add to those of its columns."""
        rows, (q, k, v) = self.rows[h], (x[h] for x in self.arrays)
        s = 3**-0.5 * k @ q[i]
        cap, moved, less = self.options["softcap"], along @ rows.out[i], 0.0
        s = s if cap is None else cap * np.tanh(s / cap)
        for j in range(i + 1 + len(k) - N if self.options["causal"] else len(k)):
            p, off = math.exp(s[j] - rows.lse[i]), abs(along @ v[j] - moved)
            largest = s[j] >= rows.top[i] - 1e-12
            rounded = largest and self.kernel.weights is not None  # to 1
            less += p * (abs(moved) if rounded else off if largest else off / 16)
        unit = self.kernel.exp * self.kernel.accumulate.unit
        return unit * less - np.sum(np.abs(along) * rows.of_weights[i])

    def known(self, name, sums, at):
        """P-value and size by the covariance of the columns of each row, with the box as slack."""
        total, own, slack, variance = 0.0, 0.0, 0.0, 0.0
        for h, i in at:
            t, u, _, common = sums[h, i]
            rows, w = self.rows[h], self.weights[h, i]
            along = {**rows.tangents, "factor": rows.out}[name][i] / rows.std[i] ** 2
            law = bound_covariance(self.problem.head((h,)), self.kernel, slice(0, N), rows)[i]
            total, own, slack = total + w * t, own + w * u, slack + w * common
            variance += w * along @ law @ along
        share = min(max(total / own, 0.0), 1.0) if own else 0.0
        beyond = max(abs(total - share * own) - slack, 0.0)
        size = sum(self.weights[x] * sums[x][2] for x in at)
        p = min(1.0, 2 * math.exp(-(beyond**2) / variance / 2))
        return p, lambda t: (t * math.sqrt(variance) + slack) / size

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

            def p_of(at, name=name):
                p = surer(name, at)[2]
                if name not in PLAIN_DIRECTIONS:
                    return p
                return slow.many(min(p, given.known(name, sums[name], at)[0]), 2)

            found[name] = p_of(every)
            found[f"{name} of a head"] = slow.many(min(map(p_of, each)), HEADS)
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


@pytest.mark.sweep(6)
@pytest.mark.parametrize(
    ("causal", "softcap", "name"),
    [(False, None, "flash"), (True, None, "math"), (False, 3.0, "math"), (True, 3.0, "flash")],
)
def test_a_trial_number_by_number(causal, softcap, name, monkeypatch):
    given = Given(causal, softcap, name, wrong=1.004)
    monkeypatch.setattr(trial, "_keep_telling", list)
    monkeypatch.setattr(trial, "is_doubtful", lambda *_: True)
    monkeypatch.setattr(trial, "_NEEDS_NO_OTHER", -math.inf)
    for other in ("_test_rows", "_test_loud_factors"):  # which have tests of their own
        monkeypatch.setattr(trial, other, lambda *_: [])
    tried = given.tried(alpha=0.999)
    p, told, sums = expected(given)
    of_trial = {x.name: x.p_value for x in tried.tests if x.name != "row"}  # see test_joint
    assert of_trial.keys() == p.keys()
    for name, value in p.items():
        log_p = max(math.log(value), -700) if value else -700
        assert math.log(of_trial[name]) == pytest.approx(log_p, rel=1e-4, abs=1e-6), name
    adjusted = slow.holm([x.p_value for x in tried.tests])
    assert [x.adjusted for x in tried.tests] == pytest.approx(adjusted)
    suspects = {x.name: x for x in tried.suspects}
    for name in told.keys() & suspects.keys():
        found = suspects[name]
        assert (found.estimate, found.error) == pytest.approx(told[name][:2], rel=1e-4), name
    t = math.sqrt(2 * math.log(2 * len(tried.tests) / 0.999))
    sizes = dict(tried.detectable)
    of_heads = [[sums["factor"][x] for x in at] for at in in_tiles(N)]
    g, slack = (np.median([sum(x[a] for x in rows) for rows in of_heads]) for a in (2, 3))
    assert sizes.pop("head") == pytest.approx((t * math.sqrt(g) + slack) / g, rel=1e-4)
    if of_row := sizes.pop("lse of a row", None):  # one of four tests of each row
        far = math.sqrt(2 * math.log(8 * HEADS * N * len(tried.tests) / 0.999))
        off = (x[3] / x[2] + WORST * far / math.sqrt(x[2]) for x in sums["lse"].values())
        assert of_row == pytest.approx(np.median([*off]), rel=1e-4)
    for name, size in sizes.items():
        g, slack = (sum(x[a] for x in sums[name].values()) for a in (2, 3))
        least = (t * math.sqrt(g) + slack) / g
        if name in PLAIN_DIRECTIONS:
            every = [*product(range(HEADS), range(N))]
            least = min(least, given.known(name, sums[name], every)[1](t))
        assert size == pytest.approx(least, rel=1e-4), name
    assert sizes.keys() == told.keys() - {"key", "key of a head"}


@pytest.mark.parametrize("of", ["out", "lse"])
@pytest.mark.parametrize(("size", "p"), [(1 - 1e-5, 1), (1 + 1e-5, 0)])
def test_an_error_is_beyond_its_bound_or_it_is_not(of, size, p):
    given = Given(name="math")
    if of == "out":
        given.got[1, 7, 1] = given.rows[1].out[7, 1] - size * given.rows[1].bound[7, 1]
    else:
        step = float(FORMATS["float32"].spacing(given.rows[1].lse[7]))
        given.lse[1, 7] = given.rows[1].lse[7] + size * (given.rows[1].lse_bound[7] + step / 2)
    found = {x.name: x.p_value for x in given.tried().tests}
    assert found["bound" if of == "out" else "bound of lse"] == pytest.approx(p)


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_power_is_that_against_an_output_that_is_1_percent_too_large(share):
    """Few rows, of which some count for one, are too few for directions, not for mean squares."""
    given = Given()
    given.weights *= share
    tried = given.tried()
    assert tried.detectable == {}
    strength = []
    for x in given.rows:  # less what the tests subtract: own roundings, and what is common
        off, own = 0.01 * np.abs(x.out), np.sign(x.out) * (x.nearest - x.out)
        beyond = np.maximum(off - np.maximum(own, 0.0) - x.slack, 0.0)
        strength.append(float(np.mean(np.square(beyond / x.worst))))
    p = slow.chernoff(sum(strength) / HEADS, math.floor(np.sum(given.weights)))
    assert 1e-290 < p < 1e-20
    for factor, powered in ((0.99, False), (1.01, True)):
        assert given.tried(alpha=factor * p * len(tried.tests)).powered == powered


def test_directions_tell_sizes_from_twice_as_many_rows_as_they_need():
    given = Given()
    count = len(given.tried().tests)
    for rows, told in ((0.99, False), (1.01, True)):
        alpha = 2 * count * math.exp(-np.sum(given.weights) / 2 / rows / 2)
        assert bool(given.tried(alpha=alpha).detectable) == told


def test_rows_that_are_the_same_count_for_one():
    """The same queries, or other queries with the same exact results."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, 6, 3))
    q[0, 3:] = q[0, 0]
    q[1, 4], q[1, 5] = q[0, 1], -0.0
    q[1, 3] = 0.0
    k[1], v[1] = k[0], v[0]
    roundings = PROFILES["flash"].roundings("bfloat16")
    weights = row_weights(problems.pose_arrays(q, k, v), roundings)
    expected = [[1 / 4, 1 / 2, 1, 1 / 4, 1 / 4, 1 / 4], [1, 1, 1, 1 / 2, 1 / 2, 1 / 2]]
    np.testing.assert_allclose(weights, expected)
    alike = row_weights(problems.pose_arrays(q, 0 * k, v), roundings)
    np.testing.assert_allclose(alike, np.full((2, 6), 1 / 12))
    problem = problems.pose_arrays(q, k, v)
    of = problems.pose_gradients(problem, {"dv": v.shape}, q.__getitem__, None, "float64")["dv"]
    np.testing.assert_allclose(row_weights(of, roundings), np.full((2, 6), 1 / 2))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("size", [1e60, 1e300])
@pytest.mark.usefixtures("verdict_alone")
def test_numbers_that_float32_cannot_hold(size):
    """Rows that differ count each for themselves, and nothing overflows."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 6, 3))
    v = size * v
    weights = row_weights(problems.pose_arrays(q, k, v), PROFILES["math"].roundings("float64"))
    np.testing.assert_array_equal(weights, np.ones((2, 6)))
    out = softmax_attention(q, k, v)
    assert verify(q=q, k=k, v=v, out=out).verdict != "FAIL"
    out[0, 3] *= 1.0001
    assert verify(q=q, k=k, v=v, out=out).verdict == "FAIL"


@pytest.mark.parametrize(("name", "shared"), [("math", True), ("upcast", True), ("flash", False)])
def test_rows_with_the_same_products_count_for_one_where_these_matter(name, shared):
    """Rows of d_out but for signs and powers of 2, in heads with the same values."""
    rng = np.random.default_rng(0)
    q, k, v, g = (BF16.round(x) for x in rng.standard_normal((4, 3, 6, 3)))
    g[0, 0, 0] = 0.0
    g[0, 3:] = g[0, 0] * np.array([[-1], [2], [0.25]])
    g[1, 1], g[2, 0], v[1] = -g[0, 1], g[0, 2], v[0]
    problem = problems.pose_arrays(q, k, v)
    of = problems.pose_gradients(problem, {"dq": q.shape}, g.__getitem__, None, "bfloat16")["dq"]
    expected = np.ones((3, 6))
    if shared:
        expected[0, [0, 3, 4, 5]], expected[[0, 1], 1] = 1 / 4, 1 / 2
    weights = row_weights(of, PROFILES[name].roundings("bfloat16"))
    np.testing.assert_allclose(weights, expected)


def test_suspects_that_explain_half_as_much_as_the_first_are_told():
    def suspect(name, explained):
        return Suspect(name, 0.0, 0.0, 0.0, explained, "")

    found = trial._keep_telling(
        [suspect(*x) for x in (("a", 0.7), ("b", 0.41), ("c", 0.39), ("a of a head", 0.8))]
    )
    assert [(x.name, x.explained) for x in found] == [("a of a head", 0.8), ("b", 0.41)]


@pytest.mark.parametrize("of", ["dk", "dv"])
def test_sums_of_gradients_along_a_direction(of):
    """Of one head, of which the rows have errors in common: their variance is that of the law."""
    rng = np.random.default_rng(1)
    q, k, v, g = (BF16.round(rng.standard_normal((12, 4))) for _ in range(4))
    roundings = PROFILES["eager"].roundings("bfloat16")
    problem = problems.pose_arrays(q, k, v)
    one = problems.pose_gradients(problem, {of: (12, 4)}, lambda _: g, None, "bfloat16")[of]
    rows = one.analyse((), roundings, slice(0, 12))
    numbers = Numbers(lambda _: rows.nearest, "bfloat16")
    tried = attempt(one, "bfloat16", PROFILES["eager"], "", numbers, 1e-6, Look(np.ones((1, 12))))
    t = math.sqrt(2 * math.log(2 * len(tried.tests) / 1e-6))
    assert {"factor", "scale"} <= tried.detectable.keys()
    steep = {**rows.tangents, "factor": rows.out, "truncated": np.sign(rows.out) * rows.spacing / 2}
    for name, size in tried.detectable.items():
        x = np.where(np.isfinite(rows.std), steep[name], 0.0)
        w = x / np.where(np.isfinite(rows.std), rows.std, 1.0) ** 2
        along = variance_along(one.gradient.saved((), roundings), roundings, of, w)
        variance = EDGE / BENFORD * (along + np.sum(w * w * rows.apart))
        slack = np.sum(np.abs(w) * rows.slack)
        assert size == pytest.approx((t * math.sqrt(variance) + slack) / np.sum(w * x)), name


def test_a_head_whose_rows_depend_counts_for_one_row():
    """Whatever the number of its rows, in the mean square of each column."""
    rng, heads, n, columns = np.random.default_rng(2), 3, 12, 4
    q, k, v, g = (BF16.round(rng.standard_normal((heads, n, columns))) for _ in range(4))
    roundings = PROFILES["eager"].roundings("bfloat16")
    problem = problems.pose_arrays(q, k, v)
    of = problems.pose_gradients(problem, {"dv": v.shape}, g.__getitem__, None, "bfloat16")["dv"]
    rows = [of.analyse((h,), roundings, slice(0, n)) for h in range(heads)]
    error = [3.0 * x.std * rng.standard_normal(x.std.shape) for x in rows]
    numbers = Numbers(lambda index: rows[index[0]].out + error[index[0]], "bfloat16")
    weights = np.array([[1.0], [0.5], [0.5]]) * np.ones((1, n))
    tried = attempt(of, "bfloat16", PROFILES["eager"], "", numbers, 1e-6, Look(weights))
    means = np.zeros(columns)
    for x, e, w in zip(rows, error, weights[:, 0], strict=True):
        own = x.nearest - x.out
        near = np.clip(e, np.minimum(own, 0) - x.slack, np.maximum(own, 0) + x.slack)
        means += w * np.mean(((e - near) / x.worst) ** 2, 0) / np.sum(weights[:, 0])
    found = next(x for x in tried.tests if x.name == "mean square of columns")
    p = min(slow.chernoff(mean, np.sum(weights[:, 0])) for mean in means)
    assert found.statistic == pytest.approx(max(means))
    assert found.p_value == pytest.approx(slow.many(p, columns))


def test_heads_with_a_defect_of_one_size_are_put_together():
    """Heads without the defect are left out; if all have it, no head is named."""
    g, error = np.array([4.0, 1.0, 2.0, 1.0]), np.full(4, 0.01)

    def pooled(*values):
        tried = Estimate(np.array(values), error, np.zeros(4), np.zeros(4))
        heads, *found = trial._pool_heads(tried, g, 1)
        return heads.tolist(), found

    heads, (size, of_size, total) = pooled(0.01, 0.50, 0.53, 0.9)
    assert (heads, total) == ([1, 2], 3.0)
    assert size == pytest.approx((0.50 + 2 * 0.53) / 3)
    assert of_size == pytest.approx(0.01 * 5**0.5 / 3)
    assert pooled(0.5, 0.5, 0.5, 0.5) == ([1], [0.5, 0.01, 1.0])
    assert pooled(0.0, 0.02, 0.02, 0.0)[0] == [1]


@pytest.mark.parametrize("by_head", [True, False])
def test_one_sweep_serves_all_gradients(monkeypatch, by_head):
    """A verdict is that of a sweep for each, also where gradients are rounded by query head."""
    rng, sweep_pairs, done = np.random.default_rng(3), judging.sweep_pairs, []
    q, k, v, g = (BF16.round(rng.standard_normal((h, 8, 4))) for h in (2, 1, 1, 2))
    found = rounded.made("flash", q, k, v, g, "bfloat16", by_head=by_head)
    some = {
        "q": q,
        "k": k,
        "v": v,
        "d_out": g,
        "dtype": "bfloat16",
        "profile": "flash",
        "explain": False,
    }

    def sweep(*of):
        done.append(sweep_pairs(*of))
        return done[-1]

    monkeypatch.setattr(judging, "_accepts_narrow_sums", lambda *of: False)
    verdicts = []
    for way in (sweep, lambda *of: False):
        monkeypatch.setattr(judging, "sweep_pairs", way)
        verdicts.append(verify(**some, **found))
    together, apart = ({x: y.tests for x, y in verdict.parts.items()} for verdict in verdicts)
    assert done == [True]
    np.testing.assert_equal(together, apart)
    assert verdicts[0].verdict == verdicts[1].verdict != "FAIL"
