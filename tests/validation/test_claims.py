"""Claims: their verdicts are as expected, and change when what a claim is about is made wrong."""

import functools
import json
import pkgutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

pytest.importorskip("matplotlib")

import refattn
import validation.claims  # noqa: F401 - in the table
from refattn import estimators
from refattn.judge import stats
from tests.validation.conftest import run_claim
from validation import suite
from validation.claims import _clock, _ratios, attention_costs, cost, rfa_biased

TABLE = Path(__file__).with_name("claims.txt").read_text("utf-8").splitlines()


@pytest.fixture(autouse=True)
def one_thread():
    """As in the runner: threads cost more than they gain on small arrays."""
    with threadpool_limits(1):
        yield


# --- what replaces parts of the package -----------------------------------------------------------


def longer(draw, factor):
    def scaled(*args, **options):
        samples = draw(*args, **options)
        return samples._replace(omega=factor * samples.omega)

    return scaled


def paired(num_samples, d, **options):
    half = np.random.default_rng(options["rng"]).standard_normal((-(-num_samples // 2), d))
    both = np.stack([half, -half], 1).reshape(-1, d)[:num_samples]
    return refattn.sampling.Samples(both, np.zeros(num_samples))


def bare_factorisation(d, rng):
    return np.linalg.qr(rng.standard_normal((d, d)))[0]


def orthogonal(count, d, rng):
    return refattn.sampling.draw(count, d, coupling="orthogonal", rng=rng).omega


def noise(draw, factor):
    """Frequencies q_n + k_m with the noise scaled."""

    def scaled(targets, *rest):
        rng = SimpleNamespace(standard_normal=lambda x: factor * targets.rng.standard_normal(x))
        return draw(targets._replace(rng=rng), *rest)

    return scaled


def frequencies_of_the_target(q, k, v, *, omega, scale):
    """Frequencies of p_i, with which the refuted sentences would be true."""
    shape = (len(v), 1, *omega.shape[-2:])
    count = shape[0] * shape[2]
    drawn = refattn.sampling.draw_target(q, k, num_samples=count, rng=1, scale=scale)
    return refattn.randomized_attention(q, k, v, omega=drawn.reshape(shape), scale=scale)


def hyperbolic(estimate):
    """Kernels of hyperbolic features in the place of trigonometric ones."""
    names = {"trigonometric": "hyperbolic"}
    return lambda x, y, omega, *, features: estimate(
        x, y, omega, features=names.get(features, features)
    )


def without_norms(sample):
    """Features exp(omega . k) without -|k|^2/2."""
    return lambda omega, keys: sample(omega, keys._replace(half=None))


def one_head(arrays):
    return functools.cache(lambda: tuple(x[:, :1] for x in arrays()))


def exact(q, k, v, *, scale, **options):
    return refattn.softmax_attention(q, k, v, scale=scale)


def one_sample(q, k, v, *, scale, **options):
    """RA with one sample, whatever frequencies it is given."""
    return RANDOMIZED(q, k, v, num_samples=1, rng=1, scale=scale)


def one_key():
    """One sample, whatever their number."""
    rng = np.random.default_rng(0)

    def one(q, k, v, **options):
        share = np.exp(q[:1] @ k.T)[0]
        return v[rng.choice(len(k), size=len(q), p=share / share.sum())]

    return one


RANDOMIZED = estimators.randomized_attention


# --- the table ------------------------------------------------------------------------------------


def pairs(text):
    """Paths of what is replaced and by what, as text."""
    return [x.split(" = ", 1) for x in text.split("; ") if x]


def sizes(claim):
    prefix = f"> {claim} | "
    found = [x.removeprefix(prefix) for x in TABLE if x.startswith(prefix)]
    return [(f"validation.claims.{claim}.{path}", value) for path, value in pairs(*found or [""])]


def rows():
    for line in TABLE:
        if line and line[0] not in "#>":
            case, replaced, wanted = (x.strip() for x in line.split(" |"))
            name, level, *marks = case.split()
            what = ", ".join(path.rpartition(".")[2] for path, _ in pairs(replaced)) or "as it is"
            marks = [getattr(pytest.mark, x) for x in marks]
            yield pytest.param(name, level, replaced, wanted, id=f"{name}: {what}", marks=marks)


def find(path):
    """The object that holds what a path names, and its name or key there."""
    path, _, key = path.rstrip("]").partition("[")
    *modules, last = path.split(".")
    holder = pkgutil.resolve_name(".".join(modules))
    return (getattr(holder, last), key) if key else (holder, last)


def replace(patch, path, text):
    """Put the value of an expression where a path leads; a function gets a count of its calls."""
    holder, name = find(path)
    is_dict = isinstance(holder, dict)
    old = holder[name] if is_dict else getattr(holder, name)
    value, count = eval(text, {**globals(), "old": old}), [0]

    def counted(*args, **options):
        count[0] += 1
        return value(*args, **options)

    put = patch.setitem if is_dict else patch.setattr
    put(holder, name, counted if callable(value) else value)
    return count if callable(value) else None


def fits(verdict, wanted, expected):
    if wanted.startswith("not "):
        return verdict != wanted[4:]
    return verdict == (expected if wanted == "as expected" else wanted)


@pytest.mark.sweep(12)
@pytest.mark.parametrize(("name", "level", "replaced", "wanted"), [*rows()])
def test_verdicts_where_something_is_replaced(name, level, replaced, wanted, monkeypatch):
    calls = {path: replace(monkeypatch, path, text) for path, text in sizes(name) + pairs(replaced)}
    wanted = dict(x.rsplit(": ", 1) for x in wanted.split("; "))
    found = {s["name"]: s for s in run_claim(name, level)["statements"]}
    if rest := wanted.pop("the rest", None):
        wanted = dict.fromkeys(found, rest) | wanted
    for statement, words in wanted.items():
        s = found[statement]
        assert fits(s["verdict"], words, s["expected"]), (statement, s["number"])
    assert [0] not in calls.values(), f"not called: {calls}"


@pytest.mark.sweep(10)
@pytest.mark.long(
    *("approximation_error", "attention_costs", "chunk_summaries", "cost", "distributions"),
    *("few_keys", "lara_consistent", "linear_time", "orthogonal_against_iid"),
    *("orthogonal_variance", "positive_against_trigonometric", "variance_laws"),
)
@pytest.mark.parametrize("name", suite.claims())
def test_every_claim_at_a_tiny_level(name):
    claim = suite.claims()[name]
    if missing := suite.missing(claim.needs):
        pytest.skip(f"needs {', '.join(missing)}")
    record = run_claim(name)
    json.dumps(record, allow_nan=False)
    for s in record["statements"]:
        if not claim.alone and s["expected"] == suite.HOLDS:  # small sizes cost anything
            assert s["verdict"] != suite.REFUTED, s["number"]
        assert s["text"].strip()
    assert claim.alone == any(s["timed"] for s in record["statements"])
    assert claim.title.strip()
    assert claim.method.strip()
    assert claim.source.startswith(("000", "001", "002", "003", "004", "arXiv:"))
    for plot in filter(None, [claim.plot, *(e.plot for e in claim.errata)]):
        assert plot(json.loads(json.dumps(record["data"]))).axes


# --- what claims are computed with ----------------------------------------------------------------


def test_ratios_by_simulation():
    """Two laws with two values each: all sums of 3 + 3 draws counted."""
    groups = [
        _ratios.Group(np.array([0.25, 0.75]), np.array([0.5, 2.0]), np.array([0.0, 1.0])),
        _ratios.Group(np.array([0.5, 0.5]), np.array([1.0, 3.0]), np.array([0.3, 0.9])),
    ]
    sums = [(1.0, 0.0, 0.0)]
    for g in groups * 3:
        sums = [
            (p * r, a + w * f, b + w)
            for p, a, b in sums
            for r, w, f in zip(g.p, g.weight, g.value, strict=True)
        ]
    p, a, b = np.array(sums).T
    mean = np.sum(p * a / b)
    variance = np.sum(p * (a / b - mean) ** 2)
    np.testing.assert_allclose(_ratios.moments(groups, [3]), [(mean, variance)], rtol=1e-12)


def test_the_problem_is_softmax_attention():
    """The densities of the exact law are those of the package, of which RFA is the ratio."""
    problem = rfa_biased.PROBLEM
    q, k, v = rfa_biased.problem(1)
    omega = np.random.default_rng(0).standard_normal(5)
    got = estimators.random_feature_attention(q, k, v, omega=omega[:, None], scale=1.0)
    weight = np.exp(problem.log_weight(omega))
    want = weight @ problem.value(omega) / weight.sum()
    np.testing.assert_allclose(got, want, rtol=1e-13)


def test_textbook_forms_that_are_timed():
    """What stands for softmax attention and RA is that, whatever the number of rows."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 200, 4)) / 2
    want = refattn.softmax_attention(q, k, v, scale=1.0)
    np.testing.assert_allclose(attention_costs.textbook_softmax(q, k, v), want, rtol=1e-10)
    rng = np.random.default_rng(1)
    q, v = np.broadcast_to(q[:1], (30_000, 4)), np.eye(200)[:, :1]
    k[0] = 2 * q[0]  # a key that weighs
    out = attention_costs.textbook_randomized(q, k, v, rng)[:, 0]
    want = refattn.softmax_attention(q[:1], k, v, scale=1.0).item()
    assert stats.empirical_bernstein(out, want) > 1e-8


@pytest.mark.parametrize(
    ("exponents", "verdict"),
    [
        ((2, 2, 2), suite.HOLDS),
        ((3, 1, 2), suite.HOLDS),
        ((3, 3, 3), suite.REFUTED),
        ((1, 1, 1), suite.REFUTED),
        ((3, 2, 3), suite.UNDERPOWERED),
        ((1, 2, 1), suite.UNDERPOWERED),
        ((3,), suite.UNDERPOWERED),
    ],
)
def test_a_clock_refutes_what_every_round_refutes(exponents, verdict):
    """Exponents of softmax attention in L; all other numbers are as the claim has them."""
    results = []
    for task in cost.tasks("tiny"):
        axis, sizes = task["axis"], np.array(task["sizes"], float)
        unit, names = (
            ("s" if task["repeats"] else "MiB"),
            cost.DENSE if task["dense"] else cost.LINEAR,
        )
        rounds, values = {}, {}
        for name in names:
            powers = exponents if name in cost.DENSE and axis == "L" else (1,)
            if unit == "MiB":
                powers = (0,) if "refattn" in name else (2,) if name in cost.DENSE else (1,)
            rounds[name] = [(sizes**power).tolist() for power in powers]
            values[name] = np.median(rounds[name], axis=0).tolist()
        results.append(
            {"axis": axis, "unit": unit, "sizes": list(sizes), "values": values, "rounds": rounds}
        )
    record = suite.record(suite.claims()["cost"], cost.judge(results), 1e-6)
    found = {s["name"]: s["verdict"] for s in record["statements"]}
    assert found.pop("dense time") == verdict
    assert set(found.values()) == {suite.HOLDS}


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    "name", ["attention_costs", pytest.param("cost", marks=pytest.mark.long), "linear_time"]
)
def test_what_changes_with_the_clock_is_timed(name, monkeypatch):
    def statements(spread):
        durations = np.random.default_rng(0).lognormal(sigma=spread, size=1000)
        readings = iter(np.cumsum(durations))
        monkeypatch.setattr(_clock, "time", SimpleNamespace(perf_counter=lambda: next(readings)))
        return {s["name"]: s for s in run_claim(name)["statements"]}

    even, uneven = statements(0.0), statements(3.0)
    for statement, s in even.items():
        values = [[e["value"] for e in x["evidence"]] for x in (s, uneven[statement])]
        assert s["timed"] != np.allclose(*values, rtol=0, atol=0.1), statement


@pytest.mark.long
def test_memory_of_random_features():
    """The part of the claim that does not depend on the clock."""
    memory = [task for task in cost.tasks("tiny") if not task["repeats"]]
    results = [cost.run(np.random.default_rng(0), **task)["values"] for task in memory]
    assert results[0]["textbook"][-1] > 10 * results[0]["textbook"][0]
    assert results[0]["refattn"][-1] < 4 * results[0]["refattn"][0]
    textbook, ours = (results[1][name] for name in cost.LINEAR)
    assert textbook[-1] > 4 * textbook[0]
    assert ours[-1] < 2 * ours[0]
