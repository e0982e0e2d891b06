"""Golden vectors of conventions: each group is met under its own convention, and no other."""

import json
from functools import partial

import numpy as np
import pytest

from refattn.judge.conformance import CONVENTIONS
from refattn.judge.conformance.conventions import OPTIONS, Run
from refattn.judge.vectors import Convention, recipes
from tests.judge.vectors.running import error, forward, of_file, only
from tests.judge.vectors.translating import PACKAGE, under
from tests.libraries import driver


@pytest.fixture(scope="module")
def conventions(every):
    return of_file(every, "softmax-conventions")


def groups_of(option, cases):
    """Cases by the value of the option, of those that have it."""
    found = {}
    for case in forward(cases):
        if case.convention is not None and case.convention.option == option:
            found.setdefault(case.convention.value, []).append(case)
    return found


def test_every_value_of_every_option_has_a_group(conventions):
    found = {case.convention for case in conventions}
    wanted = {
        Convention(option, value)
        for option in PACKAGE
        for value in OPTIONS[option].values
        if value not in recipes.WITHOUT
    }
    assert found == wanted
    assert set(recipes.WITHOUT) == {"none", "refused", "undefined", "finite"}
    assert {c.value for c in found if c.option == "lse_empty"} == {"-inf", "inf"}
    # What has no group says nothing of numbers that all kernels could be given.
    others = {"layout", "hidden", "float_mask", "same_value_size", "head_sizes"}
    assert set(OPTIONS) - set(PACKAGE) == others


@pytest.mark.parametrize("option", PACKAGE)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_other_convention_fails(option, dtype, conventions):
    """In each group some case has other numbers under each other value."""
    groups = groups_of(option, conventions)
    assert len(groups) >= 2
    for value, cases in groups.items():
        for other in groups:
            fails = any(error(case, under({option: other}), dtype) > 1 for case in cases)
            assert fails == (other != value), (value, other)


def batched(x):
    return x[(None,) * (4 - x.ndim)]


def by_library(name, **given):
    """A driver's result for what a case gives; drivers have no scale."""
    q, k, v = (batched(given[x]) for x in "qkv")
    if CONVENTIONS[name].cells["same_value_size"].value:
        v = np.concatenate([v, np.zeros((*v.shape[:-1], q.shape[-1] - v.shape[-1]), v.dtype)], -1)
    options = {x: given[x] for x in ("mask", "window", "softcap") if x in given}
    if "bias" in given:
        options["mask"] = batched(given["bias"])
    if "past_k" in given:
        options["past"] = [batched(given[f"past_{x}"]) for x in "kv"]
    for said, word in (("causal", "causal"), ("return_lse", "lse")):
        options |= {word: True} if given.get(said) else {}
    out = np.asarray(driver(name).call(q, k, v, **options))
    out = out.reshape(*given["q"].shape[:-1], *out.shape[3:])
    return {"lse": out} if "lse" in options else {"out": out[..., : given["v"].shape[-1]]}


LIBRARIES = [
    (name, option)
    for name, row in CONVENTIONS.items()
    for option in sorted(PACKAGE.keys() - {"dropout"})  # what is dropped is not for us to say
    if option in row.cells
    and isinstance(row.cells[option].source, Run)
    and row.cells[option].value not in recipes.WITHOUT
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "option"), LIBRARIES)
def test_libraries_meet_their_groups(name, option, conventions):
    """The group that names a library holds for it, and no other group of the option."""
    driver(name)  # or skip
    met = []
    for value, cases in groups_of(option, conventions).items():
        few = [
            only(case, "lse" if "lse" in case.expected else "out")
            for case in cases
            if case.arguments["scale"] is None
            and (name != "hf-eager" or case.arguments.get("window", (0, 0))[1] == 0)
        ]
        if all(error(case, partial(by_library, name), "float32") <= 1 for case in few):
            met.append(value)
    assert met == [CONVENTIONS[name].cells[option].value]


def test_groups_carry_their_convention_and_libraries(folders):
    document = json.loads((folders["json"] / "softmax-conventions.json").read_text())
    top_left = {}
    for group in document["testGroups"]:
        said = group["convention"]
        option, value, libraries = said["option"], said["value"], said["libraries"]
        cells = {
            name: row.cells[option]
            for name, row in CONVENTIONS.items()
            if option in row.cells and row.cells[option].value == value
        }
        assert set(libraries) == set(cells)
        for name, cell in cells.items():
            assert f"{name}, {CONVENTIONS[name].version}: {cell.source}" in group["source"]
        if value == "top-left":
            top_left[option] = libraries
    names = "jax-dpa keras onnx-23 onnx-24 onnx-25 onnxruntime torch-sdpa xformers"
    assert top_left == {"causal": names.split(), "past": []}


def test_every_group_has_a_source(folders):
    for path in folders["json"].glob("*.json"):
        for group in json.loads(path.read_text()).get("testGroups", ()):
            assert group["source"]
            assert ("convention" in group) == (path.stem == "softmax-conventions")
            chained = "the chain rule" in " ".join(group["source"])
            assert group["type"].endswith("-gradients") == chained
