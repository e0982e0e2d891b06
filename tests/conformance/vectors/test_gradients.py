"""Golden vectors of gradients: mistakes on the way back miss them."""

import numpy as np
import pytest

import refattn
from refattn.conformance import vectors
from refattn.conformance.defects import MUTANTS, VARIANTS
from refattn.conformance.vectors.cases import GRADIENTS
from tests.conformance.candidates import rows
from tests.conformance.vectors import running
from tests.conformance.vectors.running import catalogued, missed, of_file, only, package

LONG = np.longdouble
BACK = [m for m in MUTANTS if "vjp" in m.capabilities and "dropout" not in m.capabilities]
RIGHT = {m.name: m for m in VARIANTS if "vjp" in m.capabilities}
# Defects of the catalogue that no vector can show, with what it would take.
TOO_SMALL = {
    "last-block-of-queries-lost": "more than 64 queries",
    "last-block-of-keys-lost": "more than 64 keys",
    "blocks-overwrite": "more than 128 queries",
    "diagonal-twice": "more than 100 queries",
    "first-of-batch": "a batch of heads",
}


@pytest.fixture(scope="module")
def cases(every):
    plain = of_file(every, *vectors.ESTIMATORS)
    return [case for case in plain if "d_out" in case.inputs]


def of_package(case):
    """Without the gradient of proposals, which the package does not return."""
    return only(case, *(name for name in case.expected if name != "d_centres"))


def test_gradients_of_proposals(cases):
    """By central differences along some way."""
    chosen = [c for c in cases if "d_centres" in c.expected and "EXTREME" not in c.flags]
    assert len(chosen) > 5
    for case in chosen:
        x = {name: value.astype(LONG) for name, value in case.inputs.items()}
        d_out, centres, h = x.pop("d_out"), x.pop("centres"), LONG(2) ** -16
        way = np.cos(np.arange(centres.size, dtype=LONG)).reshape(centres.shape)
        up, down = (
            refattn.linear_randomized_attention(**x, **case.arguments, centres=centres + s * way)
            for s in (h, -h)
        )
        want = np.sum(case.expected["d_centres"] * way)
        size = float(np.max(case.size["d_centres"]))
        assert abs(np.sum(d_out * (up - down)) / (2 * h) - want) <= 1e-6 * size, case.id


def test_what_nothing_moves_is_exactly_0(cases):
    for case in cases:
        mask = np.atleast_2d(case.inputs.get("mask", True))
        for name, hidden in (("dk", ~mask.any(-2)), ("dv", ~mask.any(-2)), ("dq", ~mask.any(-1))):
            x, size = case.expected[name], case.size[name]
            rows = np.broadcast_to(hidden, x.shape[-2:-1])
            assert not x[..., rows, :].any()
            assert not np.broadcast_to(size, x.shape)[..., rows, :].any()
        if {"constant", "one-key"} & set(case.id.split("-gradient-")[1].rsplit("-", 1)[:1]):
            moved = {name for name, x in case.expected.items() if x.any()}
            assert moved <= {"out", "lse", "dv"}
    assert sum(not np.all(c.size["dk"]) for c in cases) >= 3


# --- mistakes -------------------------------------------------------------------------------------


def of_estimator(cases, entry):
    chosen = [case for case in cases if case.estimator == entry.estimator and running.takes(case)]
    return [only(case, "out", "dq", "dk", "dv") for case in chosen]


@pytest.mark.parametrize("name", RIGHT)
def test_other_styles_meet_them(name, cases):
    chosen = of_estimator(cases, RIGHT[name])
    assert len(chosen) >= 15
    for case in chosen:
        assert not missed(case, catalogued(RIGHT[name])), case.id


@pytest.mark.parametrize("entry", BACK, ids=lambda m: m.name)
def test_defects_miss_some(entry, cases):
    name, chosen = entry.name.partition("-backward-")[2], of_estimator(cases, entry)
    for dtype in ("float32", "float64"):
        caught = any(missed(case, catalogued(entry), (dtype,)) for case in chosen)
        assert caught != (name in TOO_SMALL or (name, dtype) == ("short-log2e", "float32"))


def detached_density(omega, centres, weighting, **x):
    """Weights of LARA are constants on the way back."""
    density = np.exp(omega @ centres.T - np.sum(centres * centres, -1) / 2).sum(-1)
    return package("rfa")(omega=omega, log_weight=-np.log(density), **x)


def root(x):
    d = x["q"].shape[-1]
    return d**-0.25 if x["scale"] is None else x["scale"] ** 0.5


MISTAKES = [
    (kind, mistake)
    for kinds, mistake in rows("vectors/mistakes_on_the_way_back.txt")
    for kind in kinds.split()
]


@pytest.mark.parametrize(("kind", "mistake"), MISTAKES)
def test_planted_mistakes_miss_some(kind, mistake, cases, every):
    estimator, _, features = kind.partition("-")
    chosen = [case for case in every if case.group == f"softmax-{kind}-gradients"] or [
        of_package(case)
        for case in cases
        if case.estimator == estimator
        and case.arguments.get("features", "positive") == (features or "positive")
    ]
    run = package(chosen[0].estimator)
    wrong = eval(mistake, {**vars(running), **globals(), "run": run})
    assert any(missed(case, wrong) for case in chosen)


def test_every_gradient_counts(cases):
    """Each is missed if it is left out, but that of the queries of RA, which is 0."""
    for case in cases:
        for name in set(case.expected) - {"out", "lse"}:
            zero = {name: np.zeros_like(case.expected[name])}
            lost = running.error(only(case, name), lambda zero=zero, **x: zero, "float64", 1e-3) > 1
            assert lost or "BASIC" not in case.flags or (case.estimator, name) == ("ra", "dq")


def test_names_of_gradients_go_with_what_is_given(every):
    for case in every:
        back = "d_out" in case.inputs
        assert case.group.endswith("-gradients") == ("GRADIENT" in case.flags) == back
        assert ("dq" in case.expected) == back
        assert set(case.expected) - {"out", "lse", "mean", "cov"} <= set(GRADIENTS.values())
