"""Golden vectors of options and tiles: mistakes miss them."""

import numpy as np
import pytest

from refattn.conformance import vectors
from refattn.conformance.defects import MUTANTS
from refattn.conformance.vectors import recipes
from tests.conformance.candidates import BY_NAME
from tests.conformance.vectors import running
from tests.conformance.vectors.running import forward, missed, of_file, package, spoilt, without
from tests.conformance.vectors.translating import PACKAGE, row_sees, under
from tests.libraries import driver


@pytest.fixture(scope="module")
def options(every):
    """Of all options and tiles, with gradients and without: the package's conventions."""
    return of_file(every, "softmax-options", "softmax-tiles")


P = package("softmax")


def other_distance(of):
    """Slopes times a function of the places of queries and keys, and how many there are."""

    def run(slopes, q, k, **given):
        n, m = q.shape[-2], k.shape[-2]
        distance = of(np.arange(n)[:, None], np.arange(m), n, m)
        bias = -slopes[:, None, None] * distance.astype(q.dtype)
        return P(q=q, k=k, bias=bias, **given)

    return run


def cut(name, count):
    """Queries or keys in tiles of `count`, of which the last is lost if it is not whole."""

    def whole(x):
        return np.arange(len(x)) < len(x) // count * count

    if name == "q":
        return spoilt(P, out=lambda out, x: np.where(whole(out)[:, None], out, 0))
    return lambda **x: P(**x, mask=whole(x["k"]))


def lse_without_maximum(lse, x):
    k = np.repeat(x["k"], len(x["q"]) // len(x["k"]), axis=0) if x["q"].ndim > 2 else x["k"]
    top = np.max(x["q"] @ k.swapaxes(-1, -2), -1) * x["q"].shape[-1] ** -0.5
    return lse - np.where(np.isfinite(lse), top, 0)


def normalised(out, x):
    return out / np.maximum(P(**x | {"v": np.ones_like(x["v"][..., :1])})["out"], 1e-9)


MISTAKES = [  # other options have those of the catalogue
    ("ALIBI", running.changed(P, slopes=lambda x: 0 * x["slopes"])),
    ("ALIBI", running.changed(P, slopes=lambda x: 0 * x["slopes"] + x["slopes"][0])),
    ("ALIBI", other_distance(lambda i, j, n, m: j - i - (m - n))),
    ("ALIBI", other_distance(lambda i, j, n, m: abs(j - i))),
    ("DROPOUT", without(P, "dropout")),
    ("DROPOUT", spoilt(P, out=normalised)),
    ("LSE", spoilt(P, lse=lambda lse, x: without(P, "sinks")(**x)["lse"])),
    ("LSE", spoilt(P, lse=lse_without_maximum)),
    ("LSE", spoilt(P, lse=lambda lse, x: np.maximum(lse, np.finfo(np.float32).min))),
    *(("TILE", cut(name, count)) for name in "qk" for count in (16, 32, 64, 128)),
    ("TILE", under({"causal": "top-left"})),
    ("TILE", under({"window": "inclusive, top-left"})),
    ("WINDOW", under({"window": "exclusive, bottom-right"})),
]


@pytest.mark.parametrize("index", range(len(MISTAKES)))
def test_flags_catch_what_they_name(index, options):
    flag, wrong = MISTAKES[index]
    named = [case for case in forward(options) if flag in case.flags]
    for dtype in ("float32", "float64"):
        assert any(missed(c, wrong, (dtype,)) for c in named)


DEFECTS = [m for m in MUTANTS if "sinks" in m.capabilities and "vjp" not in m.capabilities]
TOO_SMALL = {  # those of the catalogue that no vector can show, with what it would take
    "softmax-sink-for-each-block": "sinks and more than 64 keys",
    "softmax-bias-of-first-batch": "a batch of heads",
}


def plain(cases):
    """Those without what implementations of the catalogue do not take."""
    others = {"slopes", "dropout", "return_lse"}
    return [
        case
        for case in forward(cases)
        if case.arguments["scale"] is None and not others & {*case.inputs, *case.arguments}
    ]


def test_another_style_meets_them(options):
    right = running.catalogued(BY_NAME["softmax-options"])
    assert not any(missed(case, right) for case in plain(options))


@pytest.mark.parametrize("entry", DEFECTS, ids=lambda m: m.name)
def test_defects_miss_some(entry, options):
    """Of the flag that has the name of the option."""
    flag = entry.name.split("-")[1].upper().replace("SINK", "SINKS").replace("SINKSS", "SINKS")
    chosen = [case for case in plain(options) if {flag, "TILE"} & {*case.flags}]
    caught = any(missed(case, running.catalogued(entry)) for case in chosen)
    assert caught != (entry.name in TOO_SMALL)


def test_every_flag_of_options_has_a_mistake(options, every):
    known = {flag for case in every if running.FILES[case.id] == "softmax" for flag in case.flags}
    used = {flag for case in options for flag in case.flags} - known
    assert used == {flag for flag, _ in MISTAKES} | {"SOFTCAP", "SINKS", "BIAS"}
    assert used | known | {"CONVENTION"} <= set(vectors.FLAGS)


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
            assert running.error(case, run, "float32") <= 1, case.id
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
