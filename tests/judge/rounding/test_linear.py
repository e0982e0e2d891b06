"""Attention that is linear in features: the law and the bound term by term, in plain Python."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from refattn import verify
from refattn.features import elu_features
from refattn.judge.rounding import PROFILES, Profile, linear, problems
from refattn.judge.rounding.formats import FORMATS
from refattn.judge.rounding.linear import analyse_linear
from refattn.judge.rounding.profiles import LINEAR
from tests.judge.rounding.slow import BENFORD, EDGE, running, step, uniform


def stored(value, of_value, variance, most, to):
    """A feature of which a multiple is rounded to a type."""
    if to is None or float(to.round(of_value)) == of_value:
        return SimpleNamespace(value=value, variance=variance, most=most)
    relative = step(to, of_value) / of_value
    tie = 2 * abs(float(to.round(of_value)) - of_value) == step(to, of_value)
    variance += relative**2 / 4 if tie else uniform(relative)
    return SimpleNamespace(value=value, variance=variance, most=most + math.log1p(relative / 2))


def of_elu(x, kernel):
    """Features elu(x) + 1 of which both steps are rounded."""
    u, to = kernel.accumulate.unit, kernel.weights
    for row in x.tolist():
        features = []
        for y in row:
            value, variance, most = math.exp(min(y, 0.0)) + max(y, 0.0), 4 * BENFORD * u * u, 0.0
            stored_value = value
            if y < 0:
                relative = step(to, math.expm1(y)) / value
                variance, most = variance + uniform(relative), math.log1p(relative / 2)
                stored_value = float(to.round(math.expm1(y))) + 1
            features.append(stored(value, stored_value, variance, most + (kernel.exp + 4) * u, to))
        yield features


def of_map(x, kernel, feature_map):
    u = kernel.accumulate.unit
    for row in x:
        yield [
            stored(y, y, 4 * BENFORD * u * u if y else 0.0, (kernel.exp + 4) * u, kernel.weights)
            for y in map(float, feature_map(row))
        ]


def exponents(x, omega, log_weight, kernel, is_key):
    """Exponents of a row of queries or keys, with variances and bounds of their errors."""
    u, h, d = kernel.accumulate.unit, kernel.softmax.unit, len(x)
    half = sum(y * y for y in x) / 2 if is_key else 0.0
    for w, weight in zip(omega.tolist(), log_weight, strict=True):
        terms = [y * z for y, z in zip(x, w, strict=True)]
        e = sum(terms) - half + (weight if is_key else 0.0)
        sums = running(terms) + half**2 * (d / 3 + 2) + 2 * e * e
        variance = BENFORD * (u * u * sums + h * h * (e * e + 1))
        most = (d + 4) * u * (math.hypot(*x) * math.hypot(*w) + half)
        most += (h + u) * (4 * abs(e) + 4) + kernel.exp * u
        if kernel.scores is not None:
            s = kernel.scores.unit
            variance, most = variance + BENFORD * (s * e) ** 2, most + 1.01 * s * abs(e)
        yield SimpleNamespace(exponent=e, variance=variance, most=most)


def of_frequencies(q, k, omega, log_weight, scale, kernel):
    """Features of queries and keys, over the largest of a query and of all keys."""
    q, k = (math.sqrt(scale) * x for x in (q, k))
    queries = [[*exponents(x.tolist(), omega, log_weight, kernel, False)] for x in q]
    keys = [[*exponents(x.tolist(), omega, log_weight, kernel, True)] for x in k]
    largest = max(x.exponent for row in keys for x in row)
    tops = [max(row[s].exponent for row in keys) for s in range(len(omega))]

    def features(row, of_value, of_stored):
        return [
            stored(
                math.exp(x.exponent - y),
                math.exp(x.exponent - z),
                x.variance,
                x.most,
                kernel.weights,
            )
            for x, y, z in zip(row, of_value, of_stored, strict=True)
        ]

    of_queries = []
    for row in queries:
        high = max(x.exponent + y for x, y in zip(row, tops, strict=True))
        own = [max(x.exponent for x in row)] * len(row)
        of_queries.append(features(row, [high - y for y in tops], own))
    return of_queries, [features(row, tops, [largest] * len(row)) for row in keys]


def steps_of(query, keys, v, out, kernel):
    """What rounding products, sums and weights adds: a variance, units, and what is lost near 0."""
    products = [sum(x.value * y.value for x, y in zip(query, key, strict=True)) for key in keys]
    mass, variance, units, lost = sum(products), 0.0, 0.0, [0.0, 0.0]
    sizes = [sum(map(abs, v)), len(v)]
    sums = kernel.softmax if kernel.softmax.unit > kernel.accumulate.unit else None
    normalised = kernel.normalised and kernel.scores is not None
    if sums is not None:
        units += sums.unit
        lost = [x + step(sums, 0.0) / 2 for x in lost]
        variance += uniform(step(sums, mass) / mass) * out * out
        variance += 0.0 if normalised else uniform(step(sums, out * mass) / mass)
    rounded = [(kernel.scores, 1.0, out)] * (kernel.scores is not None)
    rounded += [(kernel.weights, mass, 0.0)] * normalised
    for to, size, about in rounded:
        units += to.unit
        lost = [x + y * size * step(to, 0.0) / 2 for x, y in zip(lost, sizes, strict=True)]
        for x, y in zip(products, v, strict=True):
            variance += uniform(step(to, x / size) * size / mass) * (y - about) ** 2 if x else 0.0
    return SimpleNamespace(variance=variance, units=units, lost=[2 * x / mass for x in lost])


def walk_of(terms, query, mass, kernel):
    """Squares of running sums, without their terms: over keys, over runs, and over features."""
    walked, products = 0.0, [x.value * sum(y) / mass for x, y in zip(query, terms, strict=True)]
    for x, y in zip(query, terms, strict=True):
        runs = sum(y) ** 2 * max(1, len(y) / kernel.run)
        walked += (x.value / mass) ** 2 * (running(y) - sum(z * z for z in y) + runs)
    return walked + running(products) - sum(x * x for x in products)


def row_of(query, keys, v, kernel, of_map=False):
    """What `analyse_linear` says of a query, of keys in one run."""
    u, m, size = kernel.accumulate.unit, len(keys), len(query)
    assert m <= kernel.run
    found = SimpleNamespace(out=[], std=[], worst=[], bound=[], slack=[])
    z = [sum(key[s].value for key in keys) for s in range(size)]
    mass = sum(x.value * y for x, y in zip(query, z, strict=True))
    k = m + m / kernel.run + size + 4
    k = k * u + (0.0 if kernel.states is None else 1.01 * kernel.states.unit)
    by_steps = of_map and (kernel.scores is not None or kernel.softmax.unit > u)
    if by_steps:
        k += steps_of(query, keys, v.T.tolist()[0], 0.0, kernel).units
    of_sums = k / (1 - k)

    def off(values):
        """The largest error of a sum over features and keys, and its size."""
        moved = total = 0.0
        for s, x in enumerate(query):
            grown = x.value / mass * math.exp(x.most)
            for key, y in zip(keys, values, strict=True):
                moved += grown * key[s].value * math.expm1(key[s].most) * abs(y)
                moved += (grown - x.value / mass) * key[s].value * abs(y)
                total += x.value / mass * key[s].value * abs(y)
        return moved + of_sums * (total + moved), total

    z_terms = [[key[s].value for key in keys] for s in range(size)]
    for values in v.T.tolist():
        terms = [
            [key[s].value * y for key, y in zip(keys, values, strict=True)] for s in range(size)
        ]
        states = [sum(x) for x in terms]
        out = sum(x.value * y for x, y in zip(query, states, strict=True)) / mass
        # Running sums of the normaliser, and of those with a value.
        of_mass, of_values = (walk_of(x, query, mass, kernel) for x in (z_terms, terms))
        variance, walked = 0.0, (3 + of_mass) * out * out + of_values
        for s, x in enumerate(query):
            share = (x.value / mass) ** 2
            variance += share * x.variance * (states[s] - z[s] * out) ** 2
            for key, y in zip(keys, values, strict=True):
                variance += share * key[s].value ** 2 * key[s].variance * (y - out) ** 2
            if kernel.states is not None:
                narrow = BENFORD * kernel.states.unit**2
                variance += narrow * share * (states[s] ** 2 + (z[s] * out) ** 2)
        variance += BENFORD * u * u * walked
        worst = EDGE / BENFORD * variance
        (error, sizes), (of_mass, _) = off(values), off([1.0] * m)
        if by_steps:
            steps = steps_of(query, keys, values, out, kernel)
            variance, worst = variance + steps.variance, worst + steps.variance
            error, of_mass = error + steps.lost[0], of_mass + steps.lost[1]
        bound = (error + abs(out) * of_mass) / (1 - of_mass)
        bound += 4 * u * (abs(out) + bound)
        if kernel.out is not None:
            variance, worst = (x + uniform(step(kernel.out, out)) for x in (variance, worst))
            bound += step(kernel.out, abs(out) + bound) / 2
        found.out.append(out)
        found.std.append(math.sqrt(variance))
        found.worst.append(math.sqrt(worst))
        found.bound.append(bound)
        found.slack.append((kernel.exp / 16 + 4) * u * (sizes + abs(out)))
    return found


TRIED = {
    "math": PROFILES["math"]._replace(out=None),
    "flash": PROFILES["flash"],
    "states": PROFILES["flash"]._replace(states="storage", out=None),
    "scores": Profile(scores="storage", weights="storage", exp=3.0, softmax="float16"),
    **LINEAR,
    "eager-narrow": PROFILES["eager-narrow"],
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["map", "elu", "frequencies"])
@pytest.mark.parametrize("name", TRIED)
def test_law_and_bound_term_by_term(name, kind, causal):
    rng, roundings = np.random.default_rng(1), TRIED[name].roundings("bfloat16")
    q, k, v = (FORMATS["bfloat16"].round(rng.standard_normal(x)) for x in ((4, 2), (4, 2), (4, 2)))
    omega, log_weight = rng.standard_normal((3, 2)), rng.standard_normal(3)
    given = {"omega": omega, "log_weight": log_weight, "scale": 0.7}
    if kind == "map":
        given = {"feature_map": lambda x: np.maximum(x, 0.0) + 0.25 * (x > -0.5)}
        queries, keys = ([*of_map(x, roundings, given["feature_map"])] for x in (q, k))
    elif kind == "elu":
        given = {"feature_map": elu_features}
        by_steps = roundings.scores is not None or roundings.softmax.unit > 2.0**-24
        queries, keys = (
            [*(of_elu(x, roundings) if by_steps else of_map(x, roundings, elu_features))]
            for x in (q, k)
        )
    else:
        queries, keys = of_frequencies(q, k, omega, log_weight, 0.7, roundings)
    problem = problems.pose_arrays(q, k, v, causal=causal, **given)
    rows = analyse_linear(problem.features((), roundings), roundings, slice(0, 4))
    for i in range(4):
        none = [SimpleNamespace(value=0.0, variance=0.0, most=0.0)] * len(keys[0])
        seen = [none if causal and j > i else key for j, key in enumerate(keys)]
        expected = row_of(queries[i], seen, v, roundings, kind != "frequencies")
        for field, x in vars(expected).items():
            np.testing.assert_allclose(getattr(rows, field)[i], x, rtol=1e-7, err_msg=field)


def test_errors_beyond_5_standard_deviations_have_no_law(monkeypatch):
    """Forty keys with two features, of which all are rounded alike."""
    rng = np.random.default_rng(2)
    roundings = PROFILES["flash"]._replace(out=None).roundings("bfloat16")
    k = np.concatenate([np.full((20, 60), x) for x in (0.3, 0.7)]) * rng.uniform(1, 1.1, 60)
    found, far = [], []
    for key in k.T[:, :, None]:
        given = (np.ones((1, 1)), key, np.repeat([[1.0], [-1.0]], 20, 0))
        problem = problems.pose_arrays(*given, feature_map=np.abs)
        rows = analyse_linear(problem.features((), roundings), roundings, slice(0, 1))
        found.append(bool(np.isinf(rows.std).item()))
        with monkeypatch.context() as patched:
            patched.setattr(linear, "SURE", math.inf)
            rows = analyse_linear(problem.features((), roundings), roundings, slice(0, 1))
        far.append(bool((np.abs(rows.nearest - rows.out) > 5 * rows.std).item()))
    assert 5 < sum(far) < 55
    assert found == far


@pytest.mark.parametrize("to", ["float8_e4m3fn", "float8_e5m2"])
def test_numbers_of_8_bits_are_scaled_to_their_range(to):
    """Of all heads together: the largest becomes the largest of the type."""
    rng, form = np.random.default_rng(3), FORMATS[to]
    q, k, v = rng.standard_normal((3, 2, 5, 4)) * [[[[1e-3]]], [[[1.0]]], [[[1e3]]]]
    problem = problems.pose_arrays(q, k, v).rounded(form)
    for name, x in {"q": q, "k": k, "v": v}.items():
        factor = form.largest / np.max(np.abs(x))
        for h in range(2):
            np.testing.assert_array_equal(
                problem.read((h,))[name], form.round(x[h] * factor) / factor
            )


def by_steps(form, dtype, causal, mean, wrong=None, seed=4):
    """Heads whose features, products or sums over keys, sums and quotients are rounded."""
    rng, to = np.random.default_rng(seed), FORMATS[dtype]
    q, k, v = (to.round(rng.standard_normal((2, 64, 16))) for _ in range(3))
    v = to.round(v + mean)

    def features(x):
        return to.round(to.round(np.where(x < 0, np.expm1(x), x)) + 1)

    phi, psi = features(q), features(k)
    signed = np.concatenate([v, np.ones((*v.shape[:2], 1))], -1)
    seen = np.tril(np.ones((64, 64))) if causal else np.ones((64, 64))
    if wrong == "edge":
        seen = np.tril(seen, -1) if causal else seen * (np.arange(64) < 63)
    if form == "linear-states":
        states = np.einsum("ij,hjs,hjc->hisc", seen, psi, signed)
        sums = to.round(np.einsum("his,hisc->hic", phi, to.round(states)))
    else:
        products = to.round(phi @ np.swapaxes(psi, -1, -2)) * seen
        sums = to.round(products @ signed)
        if form == "eager-narrow":
            weights = to.round(products / np.maximum(sums[..., -1:], 1e-30))
            sums = np.concatenate([to.round(weights @ v), np.ones((2, 64, 1))], -1)
    out = to.round(sums[..., :-1] / np.where(sums[..., -1:] > 0, sums[..., -1:], 1.0))
    out = out * (1.02 if wrong == "factor" else 1.0)
    return {"q": q, "k": k, "v": v, "dtype": dtype, "causal": causal, "estimator": "linear"} | {
        "out": to.round(out)
    }


@pytest.mark.sweep(6)
@pytest.mark.parametrize("form", ["linear-eager", "linear-states", "eager-narrow"])
@pytest.mark.parametrize("mean", [0.0, 2.0])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_kernels_that_round_step_by_step(dtype, causal, mean, form):
    given = by_steps(form, dtype, causal, mean)
    own = verify(**given, profile=form)
    assert own.verdict != "FAIL"
    assert 0.85 < own.z.rms < 1.15
    assert verify(**given).verdict != "FAIL"


@pytest.mark.parametrize("seed", range(3))
def test_a_level_at_which_another_profile_is_tried_first(seed):
    """Rows of features have no joint law, and the worst rows of flash say nothing by one."""
    given = by_steps("linear-states", "float16", True, 0.0, seed=seed)
    assert verify(**given, alpha=0.01).verdict != "FAIL"


@pytest.mark.sweep(6)
@pytest.mark.parametrize("form", ["linear-eager", "linear-states", "eager-narrow"])
@pytest.mark.parametrize("wrong", ["edge", "factor"])
def test_wrong_kernels_that_round_step_by_step(wrong, form):
    given = by_steps(form, "float16", True, 2.0, wrong)
    assert verify(**given).verdict == "FAIL"
