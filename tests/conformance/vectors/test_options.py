"""Golden vectors of options and tiles, and how vectors are made."""

import numpy as np
import pytest

from refattn.conformance import vectors
from refattn.conformance.vectors import recipes, solving
from tests.conformance.candidates import BY_NAME
from tests.conformance.vectors import running
from tests.conformance.vectors.running import catalogued, error, forward, without
from tests.conformance.vectors.translating import PACKAGE, row_sees
from tests.libraries import driver


@pytest.fixture(scope="module")
def options(every):
    return running.of_options(every)


def test_edges_of_tiles(options):
    tiles = [case for case in options if "TILE" in case.flags]
    sides = {x.shape[-2] for case in tiles for name, x in case.inputs.items() if name in "qk"}
    powers = {power + step for power in (16, 32, 64, 128) for step in (-1, 0, 1)}
    assert sides == powers | {1, 255, 257}
    squares = {(c.group, c.inputs["q"].shape[-2]) for c in tiles
               if c.inputs["q"].shape == c.inputs["k"].shape}  # fmt: skip
    assert squares == {(f"softmax-tile-{x}", n) for x in ("causal", "window") for n in powers}


@pytest.mark.long
def test_torch_meets_what_a_float_mask_can_say(options):
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

    for case in forward(options):
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
    cases = forward(running.of_file(every, *vectors.ESTIMATORS))
    half = [c for c in cases if "float16" in c.tolerance and c.estimator == "softmax"]
    narrow = catalogued(BY_NAME["softmax"])
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
