"""Golden vectors of gradients: the package meets them, mistakes on the way back do not."""

import json
import re
from functools import partial

import numpy as np
import pytest

import refattn
from refattn import vjp
from refattn.conformance import vectors
from refattn.conformance.defects import MUTANTS, VARIANTS
from refattn.conformance.vectors import recipes
from refattn.conformance.vectors.cases import GRADIENTS
from tests.conformance.vectors.test_vectors import units

LONG = np.longdouble
BACK = [m for m in MUTANTS if "vjp" in m.capabilities and "dropout" not in m.capabilities]
RIGHT = {m.name: m for m in VARIANTS if "vjp" in m.capabilities}
FUNCTIONS = {
    "lara": refattn.linear_randomized_attention,
    "linear": refattn.linear_attention,
    "ra": refattn.randomized_attention,
    "rfa": refattn.random_feature_attention,
    "softmax": refattn.softmax_attention,
}
# Defects of the catalogue that no vector can show, with what it would take.
TOO_SMALL = {
    "last-block-of-queries-lost": "more than 64 queries",
    "last-block-of-keys-lost": "more than 64 keys",
    "blocks-overwrite": "more than 128 queries",
    "diagonal-twice": "more than 100 queries",
    "first-of-batch": "a batch of heads",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("vectors")
    for kind in ("json", "npz"):
        vectors.write(found / kind, format=kind)
    return found


@pytest.fixture(scope="module")
def cases(folder):
    plain = {recipe.id for recipe in recipes.all_recipes() if recipe.file == recipe.estimator}
    found = vectors.load(folder / "json")
    return [case for case in found if "d_out" in case.inputs and case.id in plain]


def package(estimator, d_out, d_lse=None, feature_map="elu", **given):
    """What the package gives, by the names of the vectors."""
    assert feature_map == "elu"
    if d_lse is None:
        out, pullback = vjp(FUNCTIONS[estimator], **given)
        found, pulled = {"out": out}, pullback(d_out)
    else:
        scale = given.pop("scale")
        scale = given["q"].dtype.type(given["q"].shape[-1]) ** -0.5 if scale is None else scale
        done, pullback = vjp(refattn.attend, scale=scale, **given)
        found, pulled = {"out": done.out, "lse": done.lse}, pullback((d_out, d_lse))
    named = ((GRADIENTS.get(name), x) for name, x in pulled._asdict().items())
    return found | {name: x for name, x in named if name is not None and x is not None}


def only(case, *names):
    """The case with some of its outputs."""
    return case._replace(expected={name: case.expected[name] for name in names})


def of_package(case):
    """Without the gradient of proposals, which the package does not return."""
    return only(case, *(name for name in case.expected if name != "d_centres"))


def missed(case, function, dtypes=("float32", "float64")):
    dtypes = tuple(name for name in dtypes if name in case.tolerance)
    return any(units(case, function, dtype, case.tolerance[dtype]) > 1 for dtype in dtypes)


# --- right ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64", "longdouble"])
def test_package_meets_every_vector(dtype, cases, record_accuracy):
    eps, known = float(np.finfo(dtype).eps), "float64" if dtype == "longdouble" else dtype
    chosen = [case for case in cases if known in case.tolerance]
    assert len(chosen) > 50
    for case in chosen:
        tolerance = case.tolerance[known] * eps / float(np.finfo(known).eps)
        run = partial(package, case.estimator)
        error = units(of_package(case), run, np.dtype(dtype), tolerance)
        record_accuracy(f"vectors of gradients, {case.estimator}", dtype, 16 * error)
        assert error <= 0.1, case.id


def test_gradients_of_proposals(cases):
    """By central differences along some way."""
    chosen = [c for c in cases if "d_centres" in c.expected and "EXTREME" not in c.flags]
    assert len(chosen) > 5
    for case in chosen:
        x = {name: value.astype(LONG) for name, value in case.inputs.items()}
        d_out, centres, h = x.pop("d_out"), x.pop("centres"), LONG(2) ** -16
        way = np.cos(np.arange(centres.size, dtype=LONG)).reshape(centres.shape)
        up, down = (
            FUNCTIONS["lara"](**x, **case.arguments, centres=centres + s * way) for s in (h, -h)
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
            assert not any(case.expected[name].any() for name in case.expected
                           if name not in ("out", "lse", "dv"))  # fmt: skip
    assert sum(not np.all(c.size["dk"]) for c in cases) >= 3


# --- mistakes ------------------------------------------------------------------------------------


def takes(case, estimator):
    """Whether the catalogue's implementations of an estimator take what the case gives."""
    plain = case.arguments.get("scale") is None and not {"d_lse", "log_weight"} & set(case.inputs)
    return plain and case.estimator == estimator and not is_signed(case)


def is_signed(case):
    return case.arguments.get("features", "positive") != "positive"


def of_catalogue(entry):
    def run(scale=None, features=None, feature_map=None, **given):
        return dict(zip(("out", "dq", "dk", "dv"), entry.fn(**given), strict=True))

    return run


@pytest.mark.parametrize("name", RIGHT)
def test_other_styles_meet_them(name, cases):
    chosen = [case for case in cases if takes(case, RIGHT[name].estimator)]
    assert len(chosen) >= 15
    for case in chosen:
        assert not missed(only(case, "out", "dq", "dk", "dv"), of_catalogue(RIGHT[name])), case.id


@pytest.mark.parametrize("entry", BACK, ids=lambda m: m.name)
def test_defects_miss_some(entry, cases):
    run, name = of_catalogue(entry), entry.name.partition("-backward-")[2]
    chosen = [only(c, "out", "dq", "dk", "dv") for c in cases if takes(c, entry.estimator)]
    for dtype in ("float32", "float64"):
        caught = any(missed(case, run, (dtype,)) for case in chosen)
        assert caught != (name in TOO_SMALL or (name, dtype) == ("short-log2e", "float32"))


def changed(**edits):
    """Replace some of what the package gives."""

    def wrap(run):
        def wrong(**given):
            found = run(**given)
            return found | {n: e(found[n], given) for n, e in edits.items() if n in found}

        return wrong

    return wrap


def given(**edits):
    """Take gradients at other arguments than the output."""

    def wrap(run):
        def wrong(**x):
            other = run(**x | {n: e(x) for n, e in edits.items() if n in x})
            return other | {n: y for n, y in run(**x).items() if n in ("out", "lse")}

        return wrong

    return wrap


def detached_density(run):
    """Weights of LARA are constants on the way back."""

    def wrong(omega, centres, weighting, **x):
        density = np.exp(omega @ centres.T - np.sum(centres * centres, -1) / 2).sum(-1)
        return package("rfa", omega=omega, log_weight=-np.log(density), **x)

    return wrong


def root(x):
    d = x["q"].shape[-1]
    return d**-0.25 if x["scale"] is None else x["scale"] ** 0.5


RANDOM = ("ra", "lara", "rfa", "rfa-hyperbolic", "rfa-trigonometric")
PLANTED = {
    "lse dropped": (("softmax",), given(d_lse=lambda x: 0 * x["d_lse"])),
    "lse alone": (
        ("softmax",),
        given(d_out=lambda x: 0 * x["d_out"] if "d_lse" in x else x["d_out"]),
    ),
    "lse of another sign": (("softmax",), given(d_lse=lambda x: -x["d_lse"])),
    "scale ignored": (("softmax", *RANDOM), given(scale=lambda x: None)),
    "scale of dk off": (("softmax", *RANDOM), changed(dk=lambda dk, x: dk * root(x) ** 2)),
    "scale of dq off": (("softmax", *RANDOM[1:]), changed(dq=lambda dq, x: dq / root(x) ** 2)),
    "root of frequencies": (RANDOM, changed(d_omega=lambda g, x: g * root(x))),
    "dk off": (("softmax", "linear", *RANDOM), changed(dk=lambda dk, x: dk * 1.0001)),
    "queries of RA": (("ra",), changed(dq=lambda dq, x: dq + 1e-6 * x["q"])),
    "samples not averaged": (("ra",), changed(d_omega=lambda g, x: g * g.shape[-2])),
    "samples averaged": (
        ("ra", "lara", "rfa"),
        changed(d_omega=lambda g, x: 0 * g + g.mean(-2, keepdims=True)),
    ),
    "density constant": (("lara",), detached_density),
    "weights, not their logs": (
        ("rfa",),
        changed(d_log_weight=lambda g, x: g * np.exp(-x["log_weight"])),
    ),
    "weights forgotten": (("rfa",), given(log_weight=lambda x: 0 * x["log_weight"])),
    "frequencies of the first head": (
        ("rfa",),
        changed(d_omega=lambda g, x: 0 * g + g[:1] if g.ndim > 2 else g),
    ),
    "frequencies not summed over heads": (
        ("rfa",),
        changed(d_omega=lambda g, x: g / len(x["q"]) if x["q"].ndim > g.ndim else g),
    ),
    "one sign of two": (("rfa-hyperbolic",), given(features=lambda x: "positive")),
    "waves for exponentials": (("rfa-trigonometric",), given(features=lambda x: "hyperbolic")),
    "causal forgotten": (RANDOM[2:], given(causal=lambda x: False)),
    "mask forgotten": (("softmax", "rfa", "linear"), given(mask=lambda x: x["mask"] | True)),
}


@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for name, (kinds, _) in PLANTED.items() for kind in kinds]
)
def test_planted_mistakes_miss_some(name, kind, cases):
    estimator, _, features = kind.partition("-")
    wrong = PLANTED[name][1](partial(package, estimator))
    chosen = [
        of_package(case)
        for case in cases
        if case.estimator == estimator
        and case.arguments.get("features", "positive") == (features or "positive")
    ]
    assert any(missed(case, wrong) for case in chosen)


def test_every_gradient_counts(cases):
    """Each is missed if it is left out, but that of the queries of RA, which is 0."""
    for case in cases:
        for name in set(case.expected) - {"out", "lse"}:
            zero = {name: np.zeros_like(case.expected[name])}
            lost = units(only(case, name), lambda zero=zero, **x: zero, "float64", 1e-3) > 1
            assert lost or "BASIC" not in case.flags or (case.estimator, name) == ("ra", "dq")


# --- the files -----------------------------------------------------------------------------------


def test_groups_and_versions(folder):
    for estimator in FUNCTIONS:
        document = json.loads((folder / "json" / f"{estimator}.json").read_text())
        assert document["schemaVersion"] == 3
        for group in document["testGroups"]:
            for test in group["tests"]:
                back = group["type"].endswith("-gradients")
                assert back == ("d_out" in test["inputs"]) == ("GRADIENT" in test["flags"])
                assert back == ("dq" in test["expected"])


def test_reader(folder):
    """Vectors with gradients are skipped unless they are asked for."""
    text, scope = (folder / "npz" / "README.md").read_text(), {}
    exec(text.split("```python\n")[1].split("```")[0], scope)
    assert all(f"`{name}`" in text for name in GRADIENTS.values())
    failures, path = scope["failures"], folder / "npz" / "softmax.npz"

    def run(scale, **given):
        scale = float.fromhex(scale) if scale else None
        with np.errstate(all="ignore"):
            if "d_out" in given:
                return package("softmax", scale=scale, **given)
            return refattn.softmax_attention(scale=scale, **given)

    for dtype in ("float32", "float64"):
        assert list(failures(path, run, dtype, gradients=True)) == []

    def wrong(**given):
        return given.pop("d_out") if "d_out" in given else run(**given)

    assert list(failures(path, wrong)) == []
    assert all("-gradient-" in name for name in failures(path, wrong, gradients=True))
    assert len(set(failures(path, wrong, gradients=True))) > 10


def _set(part, name, **entries):
    return lambda test: test[part][name].update(entries)


DAMAGE = {
    "no cotangent": (lambda t: t["inputs"].pop("d_out"), "do not follow from the inputs"),
    "turned cotangent": (_set("inputs", "d_out", shape=[2, 3]), r"\(2, 3\) of d_out is not"),
    "gradient gone": (lambda t: t["expected"].pop("dk"), "do not follow from the inputs"),
    "shape": (_set("expected", "dk", shape=[3, 4]), "do not agree|do not follow"),
    "unknown": (lambda t: t["expected"].update(d_mask=t["expected"]["dq"]), "Additional prop"),
    "another cotangent": (
        lambda t: t["inputs"]["d_out"]["data"].reverse(), "d[qkv]: evaluated again gives other"
    ),
    "digit": (
        lambda t: t["expected"]["dv"]["data"].reverse(), "dv: evaluated again gives other digits"
    ),
    "size": (
        lambda t: t["expected"]["dq"]["size"].update(data=[1.0] * 3), "dq: evaluated again"
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_linter_finds_damage(damage, folder, tmp_path):
    edit, message = DAMAGE[damage]
    document = json.loads((folder / "json" / "softmax.json").read_text())
    (group,) = (g for g in document["testGroups"] if g["type"] == "softmax-gradients")
    (test,) = (t for t in group["tests"] if t["id"] == "softmax-gradient-basic-float32")
    document["testGroups"], group["tests"], document["numberOfTests"] = [group], [test], 1
    edit(test)
    (tmp_path / "softmax.json").write_text(json.dumps(document))
    problems = vectors.lint(tmp_path)
    assert any(re.search(message, problem) for problem in problems), problems


def test_older_files_are_to_be_written_again(folder, tmp_path):
    text = (folder / "json" / "ra.json").read_text()
    (tmp_path / "ra.json").write_text(text.replace('"schemaVersion": 3', '"schemaVersion": 2'))
    assert "ra.json: schemaVersion: 3 was expected" in vectors.lint(tmp_path)
