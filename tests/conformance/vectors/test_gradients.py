"""Golden vectors of gradients."""

import numpy as np
import pytest

from refattn.conformance import vectors
from refattn.conformance.vectors import Convention
from refattn.conformance.vectors.cases import GRADIENTS
from tests.conformance.vectors.running import error, of_file, only, package
from tests.conformance.vectors.translating import under
from tests.problems import slope

AFTER_BIAS = Convention("softcap", "after-bias")


@pytest.fixture(scope="module")
def cases(every):
    plain = of_file(every, *vectors.ESTIMATORS)
    return [case for case in plain if "d_out" in case.inputs]


def test_gradients_that_the_package_does_not_have(every):
    """By central differences: of proposals, and of a cap after the bias."""
    back, cap = [case for case in every if "d_out" in case.inputs], {"softcap": "after-bias"}
    chosen = [(c, c.inputs, under(cap)) for c in back if c.convention == AFTER_BIAS]
    chosen += [
        (case, ["centres"], package("lara"))
        for case in back
        if "d_centres" in case.expected and "EXTREME" not in case.flags
    ]
    assert len(chosen) > 6
    for case, names, run in chosen:
        given = {**case.inputs, **case.arguments}
        d_out = given.pop("d_out")
        for name in {*names} - {"d_out"}:
            x, part = given[name], GRADIENTS[name]
            way = np.cos(np.arange(x.size, dtype=np.longdouble)).reshape(x.shape)
            rest = {key: value for key, value in given.items() if key != name}
            got = slope(lambda run=run, **x: run(**x)["out"], {name: x}, {name: way}, d_out, **rest)
            most = 1e-8 * np.max(case.size[part]) * way.size
            assert abs(got - np.sum(case.expected[part] * way)) <= most, (case.id, name)


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


def test_every_gradient_counts(cases):
    """Each is missed if it is left out, but that of the queries of RA, which is 0."""
    for case in cases:
        for name in set(case.expected) - {"out", "lse"}:
            zero = {name: np.zeros_like(case.expected[name])}
            lost = error(only(case, name), lambda zero=zero, **x: zero, "float64", 1e-3) > 1
            assert lost or "BASIC" not in case.flags or (case.estimator, name) == ("ra", "dq")


def test_names_of_gradients_go_with_what_is_given(every):
    for case in every:
        back = "d_out" in case.inputs
        assert case.group.endswith("-gradients") == ("GRADIENT" in case.flags) == back
        assert ("dq" in case.expected) == back
        assert set(case.expected) - {"out", "lse", "mean", "cov"} <= set(GRADIENTS.values())
