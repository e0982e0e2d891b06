"""Golden vectors of options and conventions: the package meets them, neighbours do not."""

import json
import re
from functools import partial

import numpy as np
import pytest

from refattn import attend, attention, naive, softmax_attention, vjp
from refattn.conformance import CONVENTIONS, vectors
from refattn.conformance.conventions import OPTIONS, Run
from refattn.conformance.vectors import Convention, conventional, hard, meanings, recipes
from refattn.conformance.vectors.cases import GRADIENTS
from tests.conformance.vectors.test_vectors import units
from tests.libraries import driver

FILES = {recipe.id: recipe.file for recipe in recipes.all_recipes()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("vectors")
    for kind in ("json", "npz"):
        vectors.write(found / kind, format=kind)
    return found


@pytest.fixture(scope="module")
def every(folder):
    return vectors.load(folder / "json")


def of_file(every, *names):
    return [case for case in every if FILES[case.id] in names]


@pytest.fixture(scope="module")
def options(every):
    """Of all options and tiles, with gradients and without: the package's conventions."""
    return of_file(every, "softmax-options", "softmax-tiles")


@pytest.fixture(scope="module")
def hard_cases(every):
    return of_file(every, "softmax-hard")


@pytest.fixture(scope="module")
def conventions(every):
    return of_file(every, "softmax-conventions")


# --- a textbook in which every option and convention can be chosen --------------------------------


PACKAGE = {
    "causal": "bottom-right",
    "window": "inclusive, bottom-right",
    "empty_rows": "zero",
    "softcap": "before-bias",
    "mask": "seen",
    "default_scale": "1/sqrt(d)",
    "groups": "contiguous",
    "lse": "e",
    "lse_empty": "-inf",
    "dropout": "1/(1-p)",
    "past": "behind",
}


def row_sees(i, n, m, past, causal, window, said):
    """Which keys query i sees, key by key."""
    corner = {"top-left": 0, "bottom-right": m - n, "behind": past}
    style, corner_of_window = said["window"].split(", ")
    own = i + corner[said["past"] if past else said["causal"]]
    middle, seen = i + corner[corner_of_window], []
    for j in range(m):
        left, right = (None, None) if window is None else window
        if left is not None and style == "exclusive":
            left -= 1
        inside = left is None or j >= middle - left
        inside &= right is None or j <= middle + right
        seen.append(bool(inside and (not causal or j <= own)))
    return seen


def of_head(h, x):
    return x[h] if np.ndim(x) > 2 else x


def textbook(
    q,
    k,
    v,
    *,
    scale,
    causal,
    window=None,
    softcap=None,
    mask=True,
    bias=0.0,
    sinks=None,
    slopes=None,
    dropout=1.0,
    keep=None,
    dropout_p=0.0,
    past_k=None,
    past_v=None,
    return_lse=False,
    wrong="",
    said=None,
):
    """Exact attention as it is read: dense, one head after the other, with what is `said`.

    `wrong` names a mistake.
    """
    said = PACKAGE | (said or {})
    past = 0 if past_k is None else past_k.shape[-2]
    if past:
        k, v = np.concatenate([past_k, k], -2), np.concatenate([past_v, v], -2)
    heads, groups = (x.shape[0] if x.ndim > 2 else 1 for x in (q, k))
    n, m, d = q.shape[-2], k.shape[-2], q.shape[-1]
    factor = {"1/sqrt(d)": d**-0.5, "1/d": 1 / d, "1": 1.0}[said["default_scale"]]
    factor = q.dtype.type(factor if scale is None else scale)
    if keep is not None:
        dropout = keep / (1 - dropout_p) if said["dropout"] == "1/(1-p)" else keep
    seen = np.array([row_sees(i, n, m, past, causal, window, said) for i in range(n)])
    seen = seen & (mask if said["mask"] == "seen" else ~np.asarray(mask))
    outs, logs = [], []
    for h in range(heads):
        g = h * groups // heads if said["groups"] == "contiguous" else h % groups
        one = partial(of_head, h)
        qh, kh, vh = one(q), of_head(g, k), of_head(g, v)
        scores = qh @ kh.T * (factor if wrong != "no scale" else 1)
        added = one(bias) * (factor if wrong == "scaled bias" else 1)
        if slopes is not None:
            distance = np.arange(m) - np.arange(n)[:, None] - (m - n) * (wrong != "top-left alibi")
            distance = distance if wrong == "signed alibi" else abs(distance)
            slope = slopes[0] if wrong == "one slope" else slopes[h]
            added = added - slope * distance.astype(q.dtype)
        if softcap is None:
            scores = scores + added
        elif said["softcap"] == "before-bias":
            scores = softcap * np.tanh(scores / softcap) + added
        else:
            scores = softcap * np.tanh((scores + added) / softcap)
        scores = np.where(one(seen), scores, -np.inf).astype(q.dtype)
        sink = -np.inf if sinks is None else sinks if np.ndim(sinks) == 0 else sinks[h]
        if wrong == "scaled sink":
            sink = sink * factor
        if wrong == "sink of another head" and np.ndim(sinks):
            sink = sinks[h - 1]
        total = np.logaddexp(np.logaddexp.reduce(scores, -1), q.dtype.type(sink))
        weights = np.exp(scores - np.where(np.isfinite(total), total, 0)[:, None])
        kept = weights * one(dropout)
        if wrong == "dropout normalised":
            kept = kept / np.maximum(kept.sum(-1, keepdims=True), 1e-9)
        out = kept @ np.where(one(seen).any(0)[:, None], vh, 0)
        empty = np.isneginf(total)
        out[empty] = {"zero": 0, "nan": np.nan, "mean": vh.mean(0)}[said["empty_rows"]]
        if wrong == "lse without sink":
            total = np.logaddexp.reduce(scores, -1)
        if wrong == "lse without maximum":
            total = total - np.where(empty, 0, scores.max(-1))
        total = total / np.log(q.dtype.type(2)) if said["lse"] == "2" else total
        total[empty] = np.inf if said["lse_empty"] == "inf" else -np.inf
        if wrong == "finite lse":
            total[empty] = np.finfo(np.float32).min
        outs.append(out)
        logs.append(total)
    shape = (*q.shape[:-1], v.shape[-1])
    found = {"out": np.reshape(outs, shape).astype(q.dtype)}
    return found | ({"lse": np.reshape(logs, shape[:-1])} if return_lse else {})


def error(case, function, dtype="float64"):
    """Largest error over the tolerance; what is not finite must be the same."""
    holes = {name: ~np.isfinite(x) for name, x in case.expected.items()}
    same = True

    def run(**given):
        nonlocal same
        with np.errstate(all="ignore"):
            found = function(**given)
        found = found if isinstance(found, dict) else {"out": found}
        found = {name: np.array(found[name]) for name in case.expected}
        for name, x in found.items():
            if x.shape == holes[name].shape:
                want = case.expected[name]
                same &= np.array_equal(x[holes[name]], want[holes[name]], equal_nan=True)
                x[holes[name]] = 0
        return found

    plain = {name: np.where(holes[name], 0, x) for name, x in case.expected.items()}
    got = units(case._replace(expected=plain), run, dtype, case.tolerance[dtype])
    return got if same else np.inf


def told(case):
    return {} if case.convention is None else {case.convention.option: case.convention.value}


def forward(cases):
    return [case for case in cases if "d_out" not in case.inputs]


# --- the package ---------------------------------------------------------------------------------


def arguments(given):
    """Those of the package for the inputs of a case."""
    given = dict(given)
    if "slopes" in given:
        given["bias"] = attention.alibi(given.pop("slopes"))
    return given


def by(function):
    return lambda return_lse=False, **given: function(**arguments(given))


def by_attend(scale, return_lse=False, **given):
    q = given["q"]
    done = attend(**arguments(given), scale=q.shape[-1] ** -0.5 if scale is None else scale)
    return done._asdict()


def by_vjp(d_out, d_lse=None, **given):
    if d_lse is None:
        out, pullback = vjp(softmax_attention, **arguments(given))
        found, pulled = {"out": out}, pullback(d_out)
    else:
        scale = given.pop("scale")
        scale = given["q"].shape[-1] ** -0.5 if scale is None else scale
        done, pullback = vjp(attend, **arguments(given), scale=scale)
        found, pulled = done._asdict(), pullback((d_out, d_lse))
    return found | {GRADIENTS[name]: x for name, x in pulled._asdict().items() if name in GRADIENTS}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("function", [softmax_attention, naive.softmax_attention, attend])
def test_package_meets_every_option(function, dtype, options, record_accuracy):
    run = by_attend if function is attend else by(function)
    for case in forward(options):
        if dtype in case.tolerance:
            few = case if function is attend else only(case, "out")
            off = error(few, run, dtype)
            record_accuracy(f"vectors, options, {function.__module__}", dtype, 16 * off)
            assert off <= 1, case.id


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_package_meets_every_gradient(dtype, options):
    chosen = [c for c in options if "d_out" in c.inputs and dtype in c.tolerance]
    assert len(chosen) > 15
    for case in chosen:
        assert error(case, by_vjp, dtype) <= 1, case.id
    assert {"d_bias", "d_sinks", "lse"} < {name for c in chosen for name in c.expected}


def only(case, *names):
    return case._replace(expected={name: case.expected[name] for name in names})


def under_the_package(given, said):
    """Inputs with the same meaning under the package's conventions."""
    given, q = dict(given), given["q"]
    past = given.get("past_k", np.empty((0, 1))).shape[-2]
    if past:
        for name in "kv":
            given[name] = np.concatenate([given.pop(f"past_{name}"), given[name]], -2)
    n, m = q.shape[-2], given["k"].shape[-2]
    if {"causal", "window", "past"} & said.keys():
        causal, window = given.pop("causal"), given.pop("window", None)
        rows = [row_sees(i, n, m, past, causal, window, PACKAGE | said) for i in range(n)]
        given |= {"causal": False, "mask": np.array(rows)}
    if said.get("mask") == "hidden":
        given["mask"] = ~given["mask"]
    if "default_scale" in said:
        given["scale"] = {"1/sqrt(d)": None, "1/d": 1 / q.shape[-1], "1": 1.0}[
            said["default_scale"]
        ]
    if said.get("groups") == "interleaved":
        for name in "kv":
            given[name] = np.concatenate([given[name]] * (len(q) // len(given[name])))
    if "keep" in given:
        kept = 1 - given.pop("dropout_p")
        factor = 1 / kept if said["dropout"] == "1/(1-p)" else 1.0
        given["dropout"] = (given.pop("keep") * factor).astype(q.dtype)
    return given


def after(found, v, said):
    """Results of the package as under another convention."""
    found = {name: np.array(x) for name, x in found.items()}
    empty = np.isneginf(found["lse"])
    rows = {"mean": v.mean(-2), "nan": np.nan}
    found["out"][empty] = rows.get(said.get("empty_rows", ""), found["out"][empty])
    if said.get("lse") == "2":
        found["lse"] /= np.log(2)
    if said.get("lse_empty") == "inf":
        found["lse"][empty] = np.inf
    return found


def test_package_meets_every_convention(conventions):
    """But the cap after the bias, which it does not have."""
    for case in forward(conventions):
        said = told(case)
        if said == {"softcap": "after-bias"}:
            continue

        def run(said=said, **given):
            return after(by_attend(**under_the_package(given, said)), given["v"], said)

        for dtype in {"float32", "float64"} & case.tolerance.keys():
            assert error(case, run, dtype) <= 1, (case.id, dtype)


def test_package_meets_gradients_of_conventions(conventions):
    chosen = [c for c in conventions if "d_out" in c.inputs]
    assert {c.convention.option for c in chosen if c.convention} == {"causal", "window", "softcap"}
    for case in chosen:
        if told(case) != {"softcap": "after-bias"}:
            run = partial(_pulled_under, told(case))
            assert error(case, run) <= 1, case.id


def _pulled_under(said, **given):
    return by_vjp(**under_the_package(given, said))


def test_gradients_of_a_cap_after_the_bias(conventions):
    """By central differences of the textbook."""
    (case,) = (
        c for c in conventions if "d_out" in c.inputs and told(c) == {"softcap": "after-bias"}
    )
    x = {name: value.astype(np.longdouble) for name, value in case.inputs.items()}
    d_out, h = x.pop("d_out"), np.longdouble(2) ** -16
    for name in x:
        way = np.cos(np.arange(x[name].size, dtype=np.longdouble)).reshape(x[name].shape)
        up, down = (
            textbook(**x | {name: x[name] + s * way}, **case.arguments, said=told(case))["out"]
            for s in (h, -h)
        )
        want = np.sum(case.expected[GRADIENTS[name]] * way)
        size = np.max(case.size[GRADIENTS[name]]) * way.size
        assert abs(np.sum(d_out * (up - down)) / (2 * h) - want) <= 1e-8 * size, name


# --- the textbook, and its neighbours -------------------------------------------------------------


def test_textbook_meets_all(options, conventions):
    for case in forward([*options, *conventions]):
        assert error(case, partial(textbook, said=told(case))) <= 1, case.id


def test_every_value_of_every_option_has_a_group(conventions):
    found = {case.convention for case in conventions}
    wanted = {
        Convention(option, value)
        for option in PACKAGE
        for value in OPTIONS[option].values
        if value not in conventional.WITHOUT
    }
    assert found == wanted
    assert set(conventional.WITHOUT) == {"none", "refused", "undefined", "finite"}
    assert {c.value for c in found if c.option == "lse_empty"} == {"-inf", "inf"}
    # What has no group says nothing of numbers that all kernels could be given.
    others = {"layout", "hidden", "float_mask", "same_value_size", "head_sizes"}
    assert set(OPTIONS) - set(PACKAGE) == others


@pytest.mark.parametrize("option", PACKAGE)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_other_convention_fails(option, dtype, conventions):
    """In each group some case has other numbers under each other value."""
    groups = {}
    for case in forward(conventions):
        if case.convention is not None and case.convention.option == option:
            groups.setdefault(case.convention.value, []).append(case)
    assert len(groups) >= 2
    for value, cases in groups.items():
        for other in groups:
            run = partial(textbook, said={option: other})
            fails = any(error(case, run, dtype) > 1 for case in cases)
            assert fails == (other != value), (value, other)


def moved(by):
    """The textbook with another window."""

    def run(window=None, **given):
        if window is not None:
            window = tuple(
                None if keys is None else max(keys + step, -9)
                for keys, step in zip(window, by, strict=True)
            )
        return textbook(window=window, **given)

    return run


def without(name):
    return lambda **given: textbook(**{x: y for x, y in given.items() if x != name})


def cut(name, count):
    """Queries or keys in tiles of `count`, of which the last is lost if it is not whole."""

    def run(**given):
        n, m = given["q"].shape[-2], given["k"].shape[-2]
        if name == "q":
            found = textbook(**given)
            found["out"][..., n // count * count :, :] = 0
            return found
        mask = np.broadcast_to(np.arange(m) < m // count * count, (n, m))
        return textbook(**given, mask=mask)

    return run


MISTAKES = [
    *(("WINDOW", moved(step)) for step in ((-1, 0), (1, 0), (0, -1), (0, 1))),
    ("WINDOW", without("window")),
    ("WINDOW", partial(textbook, said={"window": "exclusive, bottom-right"})),
    ("SOFTCAP", without("softcap")),
    ("SOFTCAP", partial(textbook, wrong="no scale")),
    ("SINKS", without("sinks")),
    ("SINKS", partial(textbook, wrong="scaled sink")),
    ("SINKS", partial(textbook, wrong="sink of another head")),
    ("BIAS", without("bias")),
    ("BIAS", partial(textbook, wrong="scaled bias")),
    ("ALIBI", without("slopes")),
    *(("ALIBI", partial(textbook, wrong=x)) for x in ("one slope", "signed alibi")),
    ("ALIBI", partial(textbook, wrong="top-left alibi")),
    ("DROPOUT", without("dropout")),
    ("DROPOUT", partial(textbook, wrong="dropout normalised")),
    *(("LSE", partial(textbook, wrong=f"lse without {x}")) for x in ("sink", "maximum")),
    ("LSE", partial(textbook, wrong="finite lse")),
    *(("TILE", cut(name, count)) for name in "qk" for count in (16, 32, 64, 128)),
    ("TILE", partial(textbook, said={"causal": "top-left"})),
    ("TILE", partial(textbook, said={"window": "inclusive, top-left"})),
]  # fmt: skip


@pytest.mark.parametrize("index", range(len(MISTAKES)))
def test_flags_catch_what_they_name(index, options):
    flag, wrong = MISTAKES[index]
    named = [case for case in forward(options) if flag in case.flags]
    for dtype in ("float32", "float64"):
        assert any(error(c, wrong, dtype) > 1 for c in named if dtype in c.tolerance)


def test_every_flag_of_options_has_a_mistake(options, every):
    known = {flag for case in every if FILES[case.id] == "softmax" for flag in case.flags}
    used = {flag for case in options for flag in case.flags} - known
    assert used == {flag for flag, _ in MISTAKES}
    assert used | known | {"CONVENTION"} <= set(vectors.FLAGS)


def test_edges_of_tiles(options):
    tiles = [case for case in options if "TILE" in case.flags]
    sides = {x.shape[-2] for case in tiles for name, x in case.inputs.items() if name in "qk"}
    powers = {power + step for power in (16, 32, 64, 128) for step in (-1, 0, 1)}
    assert sides == powers | {1, 255, 257}
    squares = {(c.group, c.inputs["q"].shape[-2]) for c in tiles
               if c.inputs["q"].shape == c.inputs["k"].shape}  # fmt: skip
    assert squares == {(f"softmax-tile-{x}", n) for x in ("causal", "window") for n in powers}


# --- hard inputs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [softmax_attention, naive.softmax_attention, attend])
def test_package_meets_hard_cases(function, hard_cases, record_accuracy):
    run = by_attend if function is attend else by(function)
    assert len(hard_cases) == len(hard.CASES)
    for case in hard_cases:
        off = error(case, run)
        record_accuracy(f"vectors, hard, {function.__module__}", "float64", 16 * off)
        assert off <= 1, case.id


def narrowed(*names):
    """A dense softmax with some of its steps in float32."""

    def cast(name, x):
        return x.astype(np.float32).astype(x.dtype) if name in names else x

    def run(q, k, v, scale, causal):
        scores = cast("scores", q @ k.T * q.shape[-1] ** -0.5)
        weights = cast("weights", np.exp(scores - scores.max(-1, keepdims=True)))
        return cast("weights", weights / weights.sum(-1, keepdims=True)) @ cast("values", v)

    return run


def test_hard_cases_catch_narrow_steps(hard_cases):
    assert all(
        case.flags == ("HARD",) and set(case.tolerance) == {"float64"} for case in hard_cases
    )
    assert all(error(case, narrowed()) <= 1 for case in hard_cases)
    for names in ("scores", "weights", "values"):
        caught = {case.id.split("-")[2] for case in hard_cases if error(case, narrowed(names)) > 1}
        assert caught >= CAUGHT[names], names


CAUGHT = {
    "scores": {"cancelling", "large", "means", "sink", "tie", "values"},
    "weights": {"cancelling", "large", "means", "tie", "values"},
    "values": {"cancelling", "equal", "large", "means", "tie", "values"},
}


def test_levels_say_how_many_digits_are_lost(hard_cases):
    """Of the median entry, in a plain evaluation: about 3 a level."""
    for case, known in zip(hard_cases, hard.CASES, strict=True):
        got = narrowed()(**case.inputs, **case.arguments)
        off = abs(got - case.expected["out"] - case.expected_low["out"])
        digits = np.log10(np.median(off / abs(case.expected["out"])) * 2.0**53)
        assert case.id == known.label
        assert 3 * known.level - 2 <= digits <= 3 * known.level + 2, case.id


def planted(**edits):
    """Gradients of the package, some of them changed."""

    def run(**given):
        found = by_vjp(**given)
        return found | {name: e(found[name], given) for name, e in edits.items() if name in found}

    return run


BACKWARD = {
    "cap is passed straight": ("softmax-softcap-gradients", lambda **x: by_vjp(**x) | {
        name: y for name, y in by_vjp(**x | {"softcap": 1e9}).items() if name != "out"}),
    "sinks of another sign": ("softmax-sinks-gradients", planted(d_sinks=lambda g, x: -g)),
    "sinks not summed": (
        "softmax-sinks-gradients", planted(d_sinks=lambda g, x: g / x["q"].shape[-2])),
    "bias scaled": ("softmax-bias-gradients", planted(d_bias=lambda g, x: 0.25 * g)),
    "bias of one head": (
        "softmax-bias-gradients",
        planted(d_bias=lambda g, x: g / x["q"].shape[0] if x["q"].ndim > g.ndim else g)),
    "window forgotten": ("softmax-window-gradients", lambda **x: by_vjp(**x | {"window": None})),
    "slopes forgotten": (
        "softmax-alibi-gradients", lambda **x: by_vjp(**x | {"slopes": 0 * x["slopes"]})),
    "dropout forgotten": (
        "softmax-dropout-gradients", lambda **x: by_vjp(**x) | {
            "dq": by_vjp(**x | {"dropout": 0 * x["dropout"] + 1})["dq"]}),
    "lse dropped": ("softmax-lse-gradients", lambda **x: by_vjp(**x | {"d_lse": 0 * x["d_lse"]})),
    "all but one": ("softmax-combined-gradients", planted(d_sinks=lambda g, x: g * 1.0001)),
}  # fmt: skip


@pytest.mark.parametrize("name", BACKWARD)
def test_gradients_catch_mistakes(name, options):
    group, wrong = BACKWARD[name]
    chosen = [case for case in options if case.group == group]
    assert any(error(case, wrong) > 1 for case in chosen)


# --- libraries ------------------------------------------------------------------------------------


def by_library(name, case, given):
    """A driver's result for a case, by the names of its outputs."""
    q, k, v = (given[x][(None,) * (4 - given[x].ndim)] for x in "qkv")
    (output,), d_v, more = case.expected, v.shape[-1], {}
    if CONVENTIONS[name].cells["same_value_size"].value:
        v = np.concatenate([v, np.zeros((*v.shape[:-1], q.shape[-1] - d_v), v.dtype)], -1)
    more = {x: given[x] for x in ("mask", "window", "softcap") if x in given}
    if given["causal"]:
        more["causal"] = True
    if "bias" in given:
        more["mask"] = given["bias"][None, None]
    if "past_k" in given:
        more["past"] = [given[f"past_{x}"][None, None] for x in "kv"]
    if output == "lse":
        more["lse"] = True
    out = np.asarray(driver(name).call(q, k, v, **more))
    out = out if output == "lse" else out[..., :d_v]
    return {output: out.reshape(case.expected[output].shape)}


def askable(case, name):
    """Drivers have no scale; one has windows of causal attention only."""
    right = case.arguments.get("window", (0, 0))[1]
    return case.arguments["scale"] is None and (name != "hf-eager" or right == 0)


OPTIONS_OF_DRIVERS = sorted(PACKAGE.keys() - {"dropout"})  # what is dropped is not for us to say
HERE = [
    (name, option)
    for name, row in CONVENTIONS.items()
    for option in OPTIONS_OF_DRIVERS
    if option in row.cells
    and isinstance(row.cells[option].source, Run)
    and row.cells[option].value not in conventional.WITHOUT
]


@pytest.mark.parametrize(("name", "option"), HERE)
def test_libraries_meet_their_groups(name, option, conventions):
    """The group that names a library holds for it, and no other group of the option."""
    driver(name)  # or skip
    groups = {}
    for case in forward(conventions):
        if case.convention is not None and case.convention.option == option and askable(case, name):
            groups.setdefault(case.convention.value, []).append(case)
    met = []
    for value, cases in groups.items():
        few = [only(case, "lse" if "lse" in case.expected else "out") for case in cases]
        if all(error(c, lambda c=c, **x: by_library(name, c, x), "float32") <= 1 for c in few):
            met.append(value)
    assert met == [CONVENTIONS[name].cells[option].value]


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


# --- ids, sources and conventions in the files ----------------------------------------------------


def test_ids_never_change_their_meaning(every):
    """A new id is added to ids.json; what is there stays, also of cases that are no more."""
    known = meanings.known()
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


def test_ids_say_what_was_drawn():
    """No two cases of options are drawn from the same words, so that none shares its inputs."""
    of_options = [r for r in recipes.all_recipes() if r.file != r.estimator]
    for recipe in of_options:
        q, k, v = (recipe.inputs[x] for x in "qkv")
        words = recipe.id.split("-")
        assert {f"n{q.shape[-2]}", f"m{k.shape[-2]}", f"d{q.shape[-1]}", f"dv{v.shape[-1]}"} <= set(
            words
        )
        assert words[-1] == recipe.dtype
        for side, keys in zip(
            ("left", "right"), recipe.arguments.get("window", (None, None)), strict=True
        ):
            assert (f"{side}{keys}" in words) == (keys is not None)
        assert ("causal" in words) >= recipe.arguments["causal"]
        assert ("gradient" in words) == ("d_out" in recipe.inputs)
        assert ("lse" in words) >= ("d_lse" in recipe.inputs)


def test_groups_carry_their_convention_and_libraries(folder):
    document = json.loads((folder / "json" / "softmax-conventions.json").read_text())
    for group in document["testGroups"]:
        said = group["convention"]
        have = {
            name
            for name, row in CONVENTIONS.items()
            if said["option"] in row.cells and row.cells[said["option"]].value == said["value"]
        }
        assert set(said["libraries"]) == have
        for name in have:
            source = CONVENTIONS[name].cells[said["option"]].source
            assert f"{name}, {CONVENTIONS[name].version}: {source}" in group["source"]
    named = {x["convention"]["option"]: x["convention"]["libraries"] for x in document["testGroups"]
             if x["convention"]["value"] == "top-left"}  # fmt: skip
    assert named == {"causal": [
        "jax-dpa", "keras", "onnx-23", "onnx-24", "onnx-25", "onnxruntime", "torch-sdpa", "xformers"
    ], "past": []
    }  # fmt: skip


def test_every_group_has_a_source(folder):
    for path in (folder / "json").glob("*.json"):
        for group in json.loads(path.read_text()).get("testGroups", ()):
            assert group["source"]
            assert ("convention" in group) == (path.stem == "softmax-conventions")
            assert (group["type"].endswith("-gradients")) == ("the chain rule" in " ".join(
                group["source"]))  # fmt: skip


def _group(**edits):
    return lambda group: group.update(edits)


DAMAGE = {
    "source gone": (lambda g: g.pop("source"), "'source' is a required property"),
    "no source": (_group(source=[]), r"source: \[\] "),
    "another source": (_group(source=["a book"]), "source is not where the group is from"),
    "a library more": (
        lambda g: g["convention"]["libraries"].append("mine"), "libraries are not those of the"
    ),
    "another value": (
        lambda g: g["convention"].update(value="bottom-right"), "is the id of other inputs"
    ),
    "no convention": (lambda g: g.pop("convention"), "is the id of other inputs"),
    "unknown value": (
        lambda g: g["convention"].update(value="middle"), "causal 'middle' is not a convention"
    ),
    "unknown option": (
        lambda g: g["convention"].update(option="corner"), "corner 'top-left' is not a conv"
    ),
    "window": (
        lambda g: g["tests"][0]["arguments"].update(window=[1, None]), "is the id of other inputs"
    ),
    "half a window": (lambda g: g["tests"][0]["arguments"].update(window=[1]), "window: .*short"),
    "nan": (
        lambda g: g["tests"][0]["expected"]["out"]["data"].__setitem__(0, "nan"), "not finite"
    ),
    "sinks": (
        lambda g: g["tests"][0]["inputs"].update(sinks={"shape": [1], "data": ["0x0.0p+0"]}),
        r"shape \(1,\) of sinks is not that of the heads",
    ),
    "bias": (
        lambda g: g["tests"][0]["inputs"].update(bias={"shape": [1, 1, 1], "data": ["0x0.0p+0"]}),
        r"shape \(1, 1, 1\) of bias does not fit",
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_linter_finds_damage(damage, folder, tmp_path):
    edit, message = DAMAGE[damage]
    document = json.loads((folder / "json" / "softmax-conventions.json").read_text())
    (group,) = (
        g for g in document["testGroups"] if g["type"] == "softmax-convention-causal-top-left"
    )
    used = {flag for test in group["tests"] for flag in test["flags"]}
    notes = {flag: note for flag, note in document["notes"].items() if flag in used}
    document.update(testGroups=[group], numberOfTests=len(group["tests"]), notes=notes)
    path = tmp_path / "softmax-conventions.json"
    path.write_text(json.dumps(document))
    assert len(vectors.lint(tmp_path)) == 1  # no manifest
    edit(group)
    path.write_text(json.dumps(document))
    problems = vectors.lint(tmp_path)
    assert any(re.search(message, problem) for problem in problems), problems


def test_numpy_reader_picks_groups(folder):
    text, scope = (folder / "npz" / "README.md").read_text(), {}
    exec(text.split("```python\n")[1].split("```")[0], scope)
    failures = scope["failures"]

    def run(scale, softcap=None, dropout_p=None, **given):
        for name, x in (("softcap", softcap), ("dropout_p", dropout_p)):
            given |= {} if x is None else {name: float.fromhex(x)}
        with np.errstate(all="ignore"):
            return textbook(scale=scale and float.fromhex(scale), **given)

    for dtype in ("float32", "float64"):
        for name in ("softmax-options", "softmax-tiles"):
            assert list(failures(folder / "npz" / f"{name}.npz", run, dtype)) == []
    path = folder / "npz" / "softmax-conventions.npz"
    mine = [f"softmax-{conventional.group_name(Convention(*x))}" for x in PACKAGE.items()]
    assert list(failures(path, run, groups=mine)) == []
    others = set(failures(path, run))
    kinds = {case.id: case.group for case in vectors.load(folder / "npz")}
    assert {kinds[name] for name in others} == {
        group for group in kinds.values()
        if "convention" in group and group not in mine and not group.endswith("-gradients")
    }  # fmt: skip
