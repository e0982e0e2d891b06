"""What moments promise, as functions: numbers, and that nothing is printed."""

import math

import numpy as np
import pytest

from refattn import adapt, compare, moments, softmax_attention, theory
from refattn.compare import advice


@pytest.fixture
def arrays():
    """Three heads whose laws are well within their regime at hundreds of features."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 3, 40, 3)) * 0.5
    return q[:, :30], k, v + 2.0


@pytest.mark.parametrize("scale", [None, 0.4])
@pytest.mark.parametrize("shrink", [False, True])
def test_moments_are_those_of_direct_evaluation(arrays, scale, shrink):
    found = compare.study(*arrays[:2], scale=scale, shrink=shrink)
    q, k = (math.sqrt(scale or 3**-0.5) * x for x in arrays[:2])
    of = {"q": moments.estimate(q), "k": moments.estimate(k)}
    if shrink:
        of = {name: moments.shrink(m) for name, m in of.items()}
    for name, m in of.items():
        summary = moments.summary(m)
        for part in ("mean_norm", "trace", "condition", "effective_rank"):
            expected = getattr(summary, part)
            np.testing.assert_allclose(found.table[f"{part}_{name}"], expected, rtol=1e-10)
        np.testing.assert_allclose(found.eigenvalues[name], summary.eigenvalues, rtol=1e-10)
    squares = np.sum((q[:, :, None] + k[:, None]) ** 2, -1).reshape(3, -1)
    for percent in (5, 50, 95):
        expected = np.percentile(squares, percent, axis=-1)
        np.testing.assert_allclose(found.table[f"quantile_{percent}"], expected, rtol=1e-12)
    proposals = {
        "N(0, I)": None,
        "OPRF": adapt.oprf(**of, scale=1.0),
        "SDERF": adapt.sderf(**of, scale=1.0),
        "Gaussian": adapt.optimal_gaussian(**of, scale=1.0),
        "fit": adapt.fit(**of, scale=1.0),
    }
    assert list(found.excess) == list(proposals)
    for name, proposal in proposals.items():
        expected = adapt.expected_log_excess(of["q"], of["k"], proposal, scale=1.0)
        np.testing.assert_allclose(found.excess[name], expected, rtol=1e-9)


def law_at(name, samples, q, k, v, scale, fit):
    if name == "ra":
        return theory.randomized_attention_law(q, k, v, num_samples=samples, scale=scale)
    law = theory.importance_sampling_law if name == "is" else theory.attention_law
    proposal = fit if name == "rfa-adapted" else None
    return law(q, k, v, num_features=samples, scale=scale, proposal=proposal)


@pytest.mark.parametrize("scale", [None, 0.4])
@pytest.mark.parametrize("name", compare.advice.LAWS)
def test_predictions_are_those_of_the_laws(arrays, name, scale):
    fit = adapt.fit(*arrays[:2], scale=scale)
    exact = softmax_attention(*arrays, scale=scale)
    found = compare.study(*arrays, sizes=[4, 400], target=0.03, scale=scale)
    assert list(found.error) == ["rfa", "rfa-adapted", "is", "ra"]

    def law_and_error(samples):
        law = law_at(name, int(max(samples, 1)), *arrays, scale, fit)
        return law, theory.relative_error(law, exact)

    for i, s in enumerate((4, 400)):
        law, error = law_and_error(s)
        np.testing.assert_allclose(found.error[name][i], error, rtol=1e-9)
        np.testing.assert_allclose(found.inside[name][i], law.in_regime.mean(-1))
        said = error.mean() if np.all(law.in_regime) else math.nan
        assert found.predictions(name)[i] == pytest.approx(said, nan_ok=True)
    for head, s in np.ndenumerate(found.by_law[name]):
        assert law_and_error(s)[1][head] <= 0.03
        assert s == 1 or law_and_error(s - 1)[1][head] > 0.03
    for head, s in np.ndenumerate(found.holds_from[name]):
        assert np.all(law_and_error(s)[0].in_regime[head])
        assert s == 1 or not np.all(law_and_error(s - 1)[0].in_regime[head])
    assert name != "ra" or np.all(found.holds_from[name] == 1)


def test_costs_and_promises(arrays, capsys):
    found = compare.study(*arrays, target=0.05)
    needed = theory.num_features_for(0.05, *arrays)
    assert np.all(found.by_law["rfa"] <= needed)
    assert np.all(found.promised("rfa") >= needed)
    assert found.cost("rfa", 6.0) == 6 * (30 + 40) / 1200
    assert found.cost("ra", 6.0) == 6
    assert found.heads == [(0,), (1,), (2,)]
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("factor", "target", "start"), [(0.1, 0.2, "rfa"), (1, 1e-4, "exact")])
def test_the_cheapest_that_a_law_promises_is_recommended(arrays, factor, target, start):
    q, k, v = arrays
    found = compare.study(factor * q, factor * k, v, target=target)
    for head in found.heads:
        costs = {x: found.cost(x, float(found.promised(x)[head])) for x in ("rfa", "rfa-adapted")}
        best = min(costs, key=lambda x: costs[x])
        expected = (compare.advice.EXACT, None, 1.0)
        if costs[best] < 1:
            expected = (best, found.promised(best)[head], pytest.approx(costs[best]))
        assert found.recommended(head) == expected
    assert any(found.recommended(head).estimator.startswith(start) for head in found.heads)


def test_any_target(arrays):
    for target in (1e100, 1e300):
        assert all(np.all(x == 1) for x in compare.study(*arrays, target=target).by_law.values())
    found = compare.study(*arrays, target=1e-300)
    assert {found.recommended(head).estimator for head in found.heads} == {compare.advice.EXACT}


def test_outside_the_regime_there_is_no_prediction():
    qkv = 20 * np.random.default_rng(0).standard_normal((3, 8, 4))
    found = compare.study(*qkv, sizes=[4])
    assert np.isnan(found.predictions("rfa")[0])
    assert not np.isfinite(found.by_law["rfa"])
    assert found.recommended(()).estimator == compare.advice.EXACT


def test_grouped_heads_are_those_of_repeated_keys(arrays):
    q = np.random.default_rng(1).standard_normal((2, 6, 30, 3)) * 0.4
    _, k, v = arrays
    seen = compare.study(q, k, v, sizes=[512])
    assert seen.heads == [(i, j) for i in range(2) for j in range(6)]
    fit = adapt.fit(q, k)  # shared by the heads that share keys
    k, v = (np.repeat(x, 2, axis=0) for x in (k, v))
    other = compare.study(q, k, v, sizes=[512])
    for name in seen.table:
        np.testing.assert_allclose(seen.table[name], other.table[name], rtol=1e-12)
    exact = softmax_attention(q, k, v)
    law = theory.attention_law(q, k, v, num_features=512, proposal=fit)
    error = theory.relative_error(law, exact)
    np.testing.assert_allclose(seen.error["rfa-adapted"][0], error, rtol=1e-9)
    law = theory.attention_law(q, k, v, num_features=1, proposal=fit)
    expected = theory.attention.features_to_reach(0.1, law, exact)
    np.testing.assert_array_equal(seen.by_law["rfa-adapted"], expected)


def test_heads_that_broadcast(arrays):
    q, k, v = arrays
    seen, one = compare.study(q[0], k, v), compare.study(q[0], k[0], v[0])
    assert (seen.heads, one.heads) == ([(0,), (1,), (2,)], [()])
    for name, x in one.table.items():
        np.testing.assert_allclose(x, seen.table[name][0])
    assert one.recommended(()) == seen.recommended((0,))


@pytest.mark.parametrize("rows", [1, 30])
@pytest.mark.parametrize("keys", [1, 40])
def test_one_row_and_constant_queries(arrays, rows, keys):
    found = compare.study(np.ones((rows, 3)), arrays[1][0, :keys], arrays[2][0, :keys])
    assert np.isnan(found.table["effective_rank_q"])  # of no variation
    assert all(np.isfinite(x) for x in found.excess.values())
    assert keys > 1 or found.by_law["ra"] == 1


def test_laws_of_some_queries(arrays, monkeypatch):
    monkeypatch.setattr(advice, "LAW_QUERIES", 3)
    q, k, v = arrays
    found = compare.study(q, k, v, sizes=[4000])
    few = q[:, [0, 14, 29]]
    law = theory.randomized_attention_law(few, k, v, num_samples=1)
    error = theory.relative_error(law, softmax_attention(few, k, v))
    assert found.queries == 3
    np.testing.assert_array_equal(found.by_law["ra"], np.ceil((error / 0.1) ** 2))
    np.testing.assert_allclose(found.error["ra"][0], error / 4000**0.5)
    spread = np.linalg.norm(error * found.spread["ra"]) / (2 * 3 * 4000**0.5)
    assert found.standard_errors("ra") == pytest.approx([spread])
    for error, spread in ((math.inf, 0.0), (1e300, 1.0)):  # warnings are errors here
        far = found._replace(error={"rfa": np.array([error])}, spread={"rfa": np.array(spread)})
        assert not math.isfinite(far.standard_errors("rfa")[0])
    np.testing.assert_array_equal(advice._spaced(np.arange(9), 3), [0, 4, 8])
    np.testing.assert_array_equal(advice._spaced(np.arange(3), 3), [0, 1, 2])
    monkeypatch.setattr(advice, "LAW_QUERIES", 30)  # the bound itself is not exceeded
    assert compare.study(q, k, v).queries == 30


def test_the_standard_error_of_some_queries():
    """It is that of random choices; 2000 of them, so known to 2%, and it is of first order."""
    rng = np.random.default_rng(0)
    variance, exact = rng.gamma(2.0, size=(400, 2)), 2 + rng.standard_normal((400, 2))
    law = theory.Law(np.zeros_like(variance), variance, np.ones(400))
    assert advice._spread_of_queries(law, exact, 400) == 0
    ratios, spreads = [], []
    for _ in range(2000):
        i = rng.choice(400, 100, replace=False)
        ratios.append(variance[i].sum() / np.sum(exact[i] ** 2))
        part = theory.Law(law.bias[i], variance[i], law.ess[i])
        spreads.append(advice._spread_of_queries(part, exact[i], 400))
    want = np.std(ratios) / np.mean(ratios)
    assert np.mean(spreads) == pytest.approx(want, rel=0.1)


def test_without_values():
    q, k = np.random.default_rng(0).standard_normal((2, 12, 3))
    found = compare.study(q, k)
    assert found.error == found.by_law == found.holds_from == {}
    assert found.heads == [()]


def test_the_error_of_the_mean_of_the_values(arrays):
    q, k, v = arrays
    exact = softmax_attention(q, k, v)
    gap = np.mean(v, axis=-2, keepdims=True) - exact
    error = np.linalg.norm(gap, axis=(-2, -1)) / np.linalg.norm(exact, axis=(-2, -1))
    np.testing.assert_allclose(compare.study(q, k, v).error_of_mean, error, rtol=1e-12)
    assert np.isnan(compare.study(q, k).error_of_mean).all()
