"""The package meets every golden vector, in every dtype; hard ones and ids are what they say."""

import re

import numpy as np
import pytest

from refattn import attend, naive
from refattn.judge import vectors
from refattn.judge.vectors import Convention, hard, recipes, solving
from refattn.judge.vectors.cases import GRADIENTS
from tests.judge.conformance.candidates import BY_NAME
from tests.judge.vectors import meanings, running
from tests.judge.vectors.running import error, forward, of_file, only, package, without
from tests.judge.vectors.translating import PACKAGE, row_sees, under
from tests.libraries import driver
from tests.problems import slope

DTYPES = pytest.mark.parametrize("dtype", ["float32", "float64", "longdouble"])
AFTER_BIAS = Convention("softcap", "after-bias")


def checked(case, run, dtype, record_accuracy, most=1.0):
    """Compare, if the case has a tolerance for the dtype; that of longdouble follows."""
    known = "float64" if dtype == "longdouble" else dtype
    if known in case.tolerance:
        ratio = float(np.finfo(dtype).eps / np.finfo(known).eps)
        off = error(case, run, np.dtype(dtype), case.tolerance[known] * ratio)
        record_accuracy(f"vectors, {case.group}", dtype, 16 * off)
        assert off <= most, case.id


@pytest.mark.sweep(6)
@DTYPES
@pytest.mark.parametrize("name", vectors.FILES)
def test_package_meets_every_vector(name, dtype, every, record_accuracy):
    for case in of_file(every, name):
        run, most = package(case.estimator), 1.0
        if "d_out" in case.inputs:
            most = 0.2 if name in vectors.ESTIMATORS else 1.0
            case = only(case, *(x for x in case.expected if x != "d_centres"))  # of no pullback
        if case.convention is not None:
            run = under({case.convention.option: case.convention.value})
            if dtype == "longdouble" or ("d_out" in case.inputs and case.convention == AFTER_BIAS):
                continue
        checked(case, run, dtype, record_accuracy, most)


@DTYPES
@pytest.mark.parametrize("function", [naive.softmax_attention, attend])
def test_other_functions_meet_vectors_of_softmax(function, dtype, every, record_accuracy):
    files = ("softmax-options", "softmax-tiles", "softmax-hard")
    for case in forward(of_file(every, *files)):
        run = package("softmax", function)
        checked(only(case, "out"), lambda return_lse=False, run=run, **x: run(**x), dtype,
                record_accuracy)  # fmt: skip


def test_there_are_enough_cases(every):
    plain, back = forward(every), [case for case in every if "d_out" in case.inputs]
    assert sum("float32" in case.tolerance for case in of_file(plain, *vectors.ESTIMATORS)) > 100
    assert all("float64" in case.tolerance for case in of_file(plain, *vectors.ESTIMATORS))
    for dtype in ("float32", "float64"):
        chosen = [case for case in back if dtype in case.tolerance]
        assert len(of_file(chosen, *vectors.ESTIMATORS)) > 50
        options = of_file(chosen, "softmax-options", "softmax-tiles")
        assert len(options) > 15
        names = {name for case in options for name in case.expected}
        assert {"d_bias", "d_sinks", "lse"} < names
    said = {case.convention.option for case in back if case.convention is not None}
    assert said == {"causal", "window", "softcap"}


def narrowed(*names):
    """A dense softmax with some of its steps in float32."""

    def cast(name, x):
        return x.astype(np.float32).astype(x.dtype) if name in names else x

    def run(q, k, v, scale, causal):
        scores = cast("scores", q @ k.T * q.shape[-1] ** -0.5)
        weights = cast("weights", np.exp(scores - scores.max(-1, keepdims=True)))
        return cast("weights", weights / weights.sum(-1, keepdims=True)) @ cast("values", v)

    return run


CAUGHT = {
    "scores": {"cancelling", "large", "means", "sink", "tie", "values"},
    "weights": {"cancelling", "large", "means", "tie", "values"},
    "values": {"cancelling", "equal", "large", "means", "tie", "values"},
}


@pytest.mark.parametrize("step", CAUGHT)
def test_hard_cases_catch_narrow_steps(step, every):
    cases = of_file(every, "softmax-hard")
    assert all(error(case, narrowed()) <= 1 for case in cases)
    assert all(c.flags == ("HARD",) and set(c.tolerance) == {"float64"} for c in cases)
    caught = {case.id.split("-")[2] for case in cases if error(case, narrowed(step)) > 1}
    assert caught >= CAUGHT[step]


def test_levels_say_how_many_digits_are_lost(every):
    """Of the median entry, in a plain evaluation: about 3 a level."""

    def product(x, y):  # a BLAS sums in another order on each processor
        return np.sum(x[:, None] * np.ascontiguousarray(y.T), -1)

    def attend(q, k, v, scale, causal):
        scores = product(q, k.T) * q.shape[-1] ** -0.5
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return product(weights / weights.sum(-1, keepdims=True), v)

    cases = of_file(every, "softmax-hard")
    for case, known in zip(cases, hard.HARD_CASES, strict=True):
        got = attend(**case.inputs, **case.arguments)
        off = abs(got - case.expected["out"] - case.expected_low["out"])
        digits = np.log10(np.median(off / abs(case.expected["out"])) * 2.0**53)
        assert case.id == known.label
        assert 3 * known.level - 2 <= digits <= 3 * known.level + 2, case.id


def test_ids_never_change_their_meaning(every):
    """A new id is added to ids.json; what is there stays, also of cases that are no more."""
    known = meanings.known_meanings()
    assert {case.id: meanings.meaning(case) for case in every}.items() <= known.items()
    assert len(set(known.values())) == len(known)
    assert all(re.fullmatch("[0-9a-f]{64}", x) for x in known.values())


def test_meanings_see_everything(every):
    (case,) = (c for c in every if c.id == "softmax-window-left1-right0-n6-m6-d4-dv3-float32")
    q = case.inputs["q"].copy()
    q[0, 0] = np.nextafter(q[0, 0], 9)
    others = [
        case._replace(inputs=case.inputs | {"q": q}),
        case._replace(inputs=case.inputs | {"q": case.inputs["q"].reshape(8, 3)}),
        case._replace(inputs=case.inputs | {"mask": np.ones(6, bool)}),
        case._replace(arguments=case.arguments | {"window": (1, 1)}),
        case._replace(convention=Convention("window", "inclusive, top-left")),
        case._replace(convention=Convention("window", "exclusive, top-left")),
    ]
    assert len({meanings.meaning(x) for x in (case, *others)}) == 1 + len(others)
    same = case._replace(comment="", flags=(), cond=0.0, group="")
    assert meanings.meaning(same) == meanings.meaning(case)


def test_edges_of_tiles():
    tiles = [x for x in running.of_options(recipes.all_recipes()) if "TILE" in x.flags]
    sides = {x.shape[-2] for case in tiles for name, x in case.inputs.items() if name in "qk"}
    powers = {power + step for power in (16, 32, 64, 128) for step in (-1, 0, 1)}
    assert sides == powers | {1, 255, 257}
    squares = {(c.group, c.inputs["q"].shape[-2]) for c in tiles
               if c.inputs["q"].shape == c.inputs["k"].shape}  # fmt: skip
    assert squares == {(f"softmax-tile-{x}", n) for x in ("causal", "window") for n in powers}


@pytest.mark.long
def test_torch_meets_what_a_float_mask_can_say(every):
    """Windows, causal attention, biases, slopes and grouped heads, by what is added to scores."""
    call, count = driver("torch-sdpa").call, 0

    def run(causal, window=None, scale=None, **given):
        q, k, v = (given[x][(None,) * (4 - given[x].ndim)] for x in "qkv")
        n, m = q.shape[-2], k.shape[-2]
        rows = np.array([row_sees(i, n, m, 0, causal, window, PACKAGE) for i in range(n)])
        added = given.get("bias", np.zeros((n, m), q.dtype))
        if "slopes" in given:
            distance = abs(np.arange(m) - np.arange(n)[:, None] - (m - n))
            added = -given["slopes"][:, None, None] * distance
        added = np.where(rows & given.get("mask", True), added, -np.inf).astype(q.dtype)
        out = call(q, k, v, mask=added[(None,) * (4 - added.ndim)])
        return out.reshape(*given["q"].shape[:-1], v.shape[-1])

    for case in forward(running.of_options(every)):
        others = {"softcap", "return_lse"} & case.arguments.keys()
        others |= {"sinks", "dropout"} & case.inputs.keys()
        if not others and case.arguments["scale"] is None and "float32" in case.tolerance:
            assert error(case, run, "float32") <= 1, case.id
            count += 1
    assert count > 60


def test_ids_say_what_was_drawn():
    """No two cases of options are drawn from the same words, so that none shares its inputs."""
    for recipe in (r for r in recipes.all_recipes() if r.file != r.estimator):
        q, k, v = (recipe.inputs[x] for x in "qkv")
        words, (left, right) = recipe.id.split("-"), recipe.arguments.get("window", (None, None))
        sizes = {"n": q.shape[-2], "m": k.shape[-2], "d": q.shape[-1], "dv": v.shape[-1]}
        assert {f"{name}{size}" for name, size in sizes.items()} <= set(words)
        assert words[-1] == recipe.dtype
        assert (f"left{left}" in words) == (left is not None)
        assert (f"right{right}" in words) == (right is not None)
        assert ("causal" in words) >= recipe.arguments["causal"]
        assert ("gradient" in words) == ("d_out" in recipe.inputs)
        assert ("lse" in words) >= ("d_lse" in recipe.inputs)


def test_half_precision_can_meet_its_vectors(every):
    """Arithmetic in float16 throughout."""
    cases = forward(of_file(every, *vectors.ESTIMATORS))
    half = [c for c in cases if "float16" in c.tolerance and c.estimator == "softmax"]
    narrow = running.catalogued(BY_NAME["softmax"])
    assert len(half) >= 3
    for case in half:
        assert error(case, narrow, "float16") <= 1
        if "MASK" in case.flags or "CAUSAL" in case.flags:
            assert error(case, without(narrow, "mask", "causal"), "float16") > 1
    assert sum("bfloat16" in c.tolerance for c in cases) >= 10


def test_digits_that_are_not_determined_are_refused(monkeypatch):
    recipe = next(r for r in recipes.all_recipes() if r.id == "moments-basic-float64")
    monkeypatch.setattr(solving, "PRECISIONS", (20, 80))
    with pytest.raises(ValueError, match="is not determined to 30 digits"):
        solving.solved(recipe)


@pytest.fixture(scope="module")
def back(every):
    plain = of_file(every, *vectors.ESTIMATORS)
    return [case for case in plain if "d_out" in case.inputs]


def test_gradients_that_the_package_does_not_have(every):
    """By central differences: of proposals, and of a cap after the bias."""
    cap, back = {"softcap": "after-bias"}, [case for case in every if "d_out" in case.inputs]
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


def test_what_nothing_moves_is_exactly_0(back):
    for case in back:
        mask = np.atleast_2d(case.inputs.get("mask", True))
        for name, hidden in (("dk", ~mask.any(-2)), ("dv", ~mask.any(-2)), ("dq", ~mask.any(-1))):
            x, size = case.expected[name], case.size[name]
            rows = np.broadcast_to(hidden, x.shape[-2:-1])
            assert not x[..., rows, :].any()
            assert not np.broadcast_to(size, x.shape)[..., rows, :].any()
        if {"constant", "one-key"} & set(case.id.split("-gradient-")[1].rsplit("-", 1)[:1]):
            moved = {name for name, x in case.expected.items() if x.any()}
            assert moved <= {"out", "lse", "dv"}
    assert sum(not np.all(c.size["dk"]) for c in back) >= 3


def test_every_gradient_counts(back):
    """Each is missed if it is left out, but that of the queries of RA, which is 0."""
    for case in back:
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


def test_all_cases_are_solved_once(monkeypatch):
    seen = []
    monkeypatch.setattr(solving, "_once", lambda recipe: seen.append(recipe.id))
    solving.prepare()
    assert sorted(seen) == sorted(recipe.id for recipe in recipes.all_recipes())
