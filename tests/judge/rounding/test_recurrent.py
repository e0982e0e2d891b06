"""The law of a recurrence: each rounding of a chunked kernel by itself, and what passes on."""

import numpy as np
import pytest

from refattn import vjp
from refattn.judge.rounding import Profile
from refattn.judge.rounding.layers import pose_recurrence
from refattn.judge.rounding.roundings import RMS
from refattn.judge.rounding.states import give
from refattn.registry import ESTIMATORS
from refattn.registry.record import load

GATES = {
    "rate": lambda rng, k: rng.uniform(0.1, 0.9, k.shape[:-1]),
    "log": lambda rng, k: -rng.uniform(0, 0.3, k.shape[:-1]),
    "logs": lambda rng, k: -rng.uniform(0, 0.3, k.shape),
    "factor": lambda rng, k: rng.uniform(0.5, 1, k.shape[:-1]),
    "head": lambda rng, k: rng.uniform(0.8, 1, k.shape[0]),
    "pair": lambda rng, k: (-0.3 * k, k + 0.1),
}


@pytest.mark.parametrize(
    "name", sorted({x.name for x in ESTIMATORS.values() if x.has("recurrent")})
)
def test_results_and_gradients_are_those_of_the_function(name):
    rng, record = np.random.default_rng(1), ESTIMATORS[name]
    q, k = rng.standard_normal((2, 2, 19, 3)) / 2
    v, d_out = rng.standard_normal((2, 2, 19, 4))
    gates = {x: GATES[kind](rng, k) for x, kind in record.gates.items()}
    gates["initial_state"] = rng.standard_normal((2, 3, 4))
    result, pull = vjp(record.function, q, k, v, **gates)
    pulled = pull((d_out, None))
    expected = {"out": result.out, "state": result.state}
    expected |= {"dq": pulled.q, "dk": pulled.k, "dv": pulled.v}
    problems = pose_recurrence(q, k, v, gates, record=name, d_out=d_out)
    assert {"out", "state", "dv"} <= {*problems}
    for of, x in problems.items():
        for h in range(2):
            got = give(x.read, (h,), x.scale, x.of)
            np.testing.assert_allclose(got, expected[of][h], atol=1e-12, err_msg=of)


@pytest.mark.parametrize("name", ["gated-delta-rule", "gla"])
def test_digits_that_float64_leaves_out(name):
    """A kernel in float64 is judged by the result in long double."""
    rng, record = np.random.default_rng(4), ESTIMATORS[name]
    q, k, v = rng.standard_normal((3, 1, 70, 3)) / 2
    gates = {x: GATES[kind](rng, k) for x, kind in record.gates.items()}
    problem = pose_recurrence(q, k, v, gates, record=name)["out"]
    rows = problem.recurrence((0,), Profile(accumulate="float64", run=64).roundings("float64")).rows
    wide = {x: np.longdouble(y) for x, y in gates.items()}
    exact = load(record.naive)(*map(np.longdouble, (q, k, v)), **wide).out[0]
    np.testing.assert_allclose(rows.out + np.longdouble(rows.rest), exact, atol=1e-18)
    assert np.max(np.abs(rows.rest)) > 1e-18


class Chunked:
    """A kernel in float64 that multiplies what it rounds by 1, or by a bit more once."""

    def __init__(self, moved=-1, step=0.0):
        self.moved, self.step, self.count = moved, step, 0

    def rounded(self, x):
        factor, at = np.ones(x.size), self.moved - self.count
        if 0 <= at < x.size:
            factor[at] += self.step
        self.count += x.size
        return x * factor.reshape(x.shape)

    def __call__(self, q, k, v, g, beta, c):
        state, rows = np.zeros((k.shape[1], v.shape[1])), []
        for i in (slice(s, s + c) for s in range(0, len(q), c)):
            sums = np.cumsum(g[i])[:, None]
            decay = np.tril(np.exp(sums - sums.T))
            read, y = self.rounded(state), v[i]
            if beta is not None:
                b = beta[i, None]
                inverse = np.linalg.inv(np.eye(c) + np.tril(b * (k[i] @ k[i].T) * decay, -1))
                y = inverse @ (b * y) - self.rounded(inverse @ (b * np.exp(sums) * k[i])) @ read
            y, pairs = self.rounded(y), self.rounded((q[i] @ k[i].T) * decay)
            rows.append(np.exp(sums) * (q[i] @ read) + pairs @ y)
            state = np.exp(sums[-1]) * state + self.rounded(np.exp(sums[-1] - sums) * k[i]).T @ y
        return np.concatenate([*rows, state])


@pytest.mark.parametrize("removes", [False, True])
def test_variances_and_dependence_by_the_derivative_to_each_rounding(removes):
    """The variance is a sum of squares; rows depend as the largest eigenvalue says."""
    rng, c = np.random.default_rng(2), 4
    q, k, v = rng.standard_normal((3, 16, 3))
    v, g, beta = v[:, :1], -rng.uniform(0, 0.3, 16), rng.uniform(0.2, 0.8, 16)
    gates = {"log_decay": g} | ({"beta": beta / np.sum(k * k, -1)} if removes else {})
    count = Chunked()
    given = (q, k, v, g, gates.get("beta"), c)
    exact = count(*given)
    step, columns = 1e-6, []
    for moved in range(count.count):
        columns.append((Chunked(moved, step)(*given) - exact)[:, 0] / step)
    unit = RMS * 2.0**-8
    covariance = unit**2 * np.transpose(columns) @ columns
    roundings = Profile(weights="bfloat16", accumulate="float64", out=None, run=c).roundings(
        "bfloat16"
    )
    problems = pose_recurrence(q, k, v, gates, record="", scale=1.0)
    for of, some in (("out", slice(16)), ("state", slice(16, None))):
        found = problems[of].recurrence((), roundings)
        part = covariance[some, some]
        std = np.sqrt(np.diag(part))
        np.testing.assert_allclose(found.rows.out[:, 0], exact[some, 0], atol=1e-12)
        np.testing.assert_allclose(found.rows.std[:, 0], std, rtol=1e-4)
        assert np.all(found.rows.bound[:, 0] > 2 * unit / RMS * np.abs(columns).sum(0)[some])
        most = np.linalg.eigvalsh(part / np.outer(std, std))[-1]
        assert most <= found.dependence <= 1.3 * most or found.dependence == len(std)


def test_rows_of_a_chunk_share_the_errors_of_sums_of_log_decays():
    rng, roundings = np.random.default_rng(3), Profile(run=64, out=None).roundings("float32")
    q, k, v = rng.standard_normal((3, 64, 8))
    few, many = (
        pose_recurrence(q, k, v, {"log_decay": np.full(64, g)}, record="")["out"].recurrence(
            (), roundings
        )
        for g in (-1e-3, -0.5)
    )
    assert many.dependence > 4 * few.dependence
