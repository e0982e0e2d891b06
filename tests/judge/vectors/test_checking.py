"""The linter of golden vectors finds nothing in what is written, and any damage."""

import json
import re

import numpy as np
import pytest

from refattn.judge import vectors
from refattn.judge.vectors import recipes, writing
from refattn.judge.vectors.reading import read_vectors

EVERY = [pytest.param(kind, vectors.FILES, marks=pytest.mark.long) for kind in vectors.FORMATS]


@pytest.mark.parametrize(
    ("kind", "names"), [*((kind, ("moments", "ra")) for kind in vectors.FORMATS), *EVERY]
)
def test_nothing_is_wrong_with_what_is_written(kind, names, few):
    """Nor does the schema refuse it; all flags are described."""
    jsonschema, folder, manifests = pytest.importorskip("jsonschema"), few(kind, *names), {}
    assert vectors.lint(folder) == []
    schema = recipes.schema()
    manifests["$ref"], manifests["$defs"] = "#/$defs/manifest", schema["$defs"]
    listing = json.loads((folder / writing.manifest_name(kind)).read_text())
    jsonschema.Draft202012Validator(manifests).validate(listing)
    for name in names:
        content, _ = read_vectors(kind, folder / f"{name}.{kind}")
        jsonschema.Draft202012Validator(schema).validate(content)
        tests = [test for group in content["testGroups"] for test in group["tests"]]
        assert content["numberOfTests"] == len(tests)
        assert {*content["notes"]} == {flag for test in tests for flag in test["flags"]}


# --- a change to a document -----------------------------------------------------------------------


def document(folder, file, group, *ids):
    """A file with some of the tests of one of its groups."""
    found = json.loads((folder / f"{file}.json").read_text())
    (group,) = (x for x in found["testGroups"] if x["type"] == group)
    tests = {test["id"]: test for test in group["tests"]}
    group["tests"] = [tests[name] for name in ids] or [*tests.values()]
    return found | {"testGroups": [group]}


GONE = object()
TOP_LEFT = "softmax-convention-causal-top-left"
DOCUMENTS = {
    "softmax": ("softmax", "softmax", "softmax-basic-bfloat16", "softmax-scale-float32"),
    "gradient": ("softmax", "softmax-gradients", "softmax-gradient-basic-float32"),
    "convention": ("softmax-conventions", TOP_LEFT),
}
Q, OUT, GRADIENTS = "test inputs q data", "test expected out data", "test expected"
ONE = {"shape": [1], "data": ["0x0.0p+0"]}
DAMAGE = [  # which document, what of it, and what becomes of that
    ("softmax", f"{Q} 0", (0.25).hex()),
    ("softmax", Q, lambda x: x[1:]),
    ("softmax", "test inputs q shape", [2, 8]),
    ("softmax", f"{OUT} 0", lambda x: x.replace("5", "6", 1)),
    ("softmax", f"{OUT} 0", "nan"),
    ("softmax", "test tolerance float64", 1e-9),
    ("softmax", "test cond", 1.0),
    ("softmax", "test result", "acceptable"),
    ("softmax", "test flags", ["ZERO"]),
    ("softmax", "test comment", "another"),
    ("gradient", "test inputs d_out", GONE),
    ("gradient", f"{GRADIENTS} dk", GONE),
    ("gradient", "test inputs d_out data", lambda x: x[::-1]),
    ("gradient", f"{GRADIENTS} dv data", lambda x: x[::-1]),
    ("gradient", f"{GRADIENTS} dq size data", [1.0] * 3),
    ("convention", "group source", ["a book"]),
    ("convention", "group convention libraries", lambda x: [*x, "mine"]),
    ("convention", "group convention value", "bottom-right"),
    ("convention", "group convention", GONE),
    ("convention", "test arguments window", [1, None]),
    ("convention", "test inputs sinks", ONE),
]
REFUSED = [  # and the words of the schema
    ("softmax", "test surprise", 1, "Additional properties"),
    ("softmax", "test comment", GONE, "'comment' is a required property"),
    ("softmax", f"{OUT} 0", "1.5", "does not match"),
    ("softmax", f"{Q} 0", "0.5", "not valid under any"),
    ("softmax", "schemaVersion", 2, "3 was expected"),
    ("gradient", GRADIENTS, lambda x: x | {"d_mask": x["dq"]}, "Additional prop"),
    ("convention", "group source", GONE, "'source' is a required property"),
    ("convention", "group source", [], r"\[\] "),
    ("convention", "test arguments window", [1], "short"),
]


def damaged(whole, place, value):
    """Change a part of a document."""
    group = whole["testGroups"][0]
    start, *keys = place.split()
    at = {"group": group, "test": group["tests"][0]}.get(start)
    if at is None:
        at, keys = whole, [start, *keys]
    *keys, last = (int(key) if key.isdigit() else key for key in keys)
    for key in keys:
        at = at[key]
    if value is GONE:
        del at[last]
    else:
        at[last] = value(at[last]) if callable(value) else value
    return whole


@pytest.mark.parametrize(("kind", "place", "value"), DAMAGE)
def test_linter_finds_damage(kind, place, value, folders, tmp_path):
    """Whatever a manifest says, here none: by a new evaluation of the case."""
    whole = document(folders["json"], *DOCUMENTS[kind])
    path = tmp_path / f"{DOCUMENTS[kind][0]}.json"
    path.write_text(json.dumps(whole))
    assert vectors.lint(tmp_path) == [NO_MANIFEST]
    names = [test["id"] for test in whole["testGroups"][0]["tests"]]
    path.write_text(json.dumps(damaged(whole, place, value)))
    wrong = sorted(names) if place.startswith("group") else names[:1]
    assert vectors.lint(tmp_path) == [NO_MANIFEST, *(f"{path.name}: {x}: {AGAIN}" for x in wrong)]


@pytest.mark.parametrize(("kind", "place", "value", "words"), REFUSED)
def test_the_schema_refuses_damage(kind, place, value, words, folders):
    jsonschema = pytest.importorskip("jsonschema")
    whole = damaged(document(folders["json"], *DOCUMENTS[kind]), place, value)
    found = jsonschema.Draft202012Validator(recipes.schema()).iter_errors(whole)
    assert any(re.search(words, error.message) for error in found)


# --- a change to a file ---------------------------------------------------------------------------


def replaced(old, new):
    def edit(data):
        assert old.encode() in data
        return data.replace(old.encode(), new.encode(), 1)

    return edit


def digit_after(key):
    """Change the first digit between 1 and 8 of the first number of a key."""

    def edit(data):
        start = data.index(f'"{key}": '.encode()) + len(key) + 4
        at = re.compile(rb"(?<=[\d.])[1-8]").search(data, start).start()
        return data[:at] + bytes([data[at] + 1]) + data[at + 1 :]

    return edit


NO_MANIFEST = "manifest-json.json: is missing: write the vectors again"
LISTING, AS_IT = "manifest-json.json", "manifest-json.json: is not as it was written"
AGAIN, SUM = "is not what a new evaluation gives", "does not have the SHA-256 of manifest-json.json"
CHANGES = {
    "added": ("new.json", lambda data: b"{}", "new.json: is in no manifest"),
    "part": (".ra.npz.part", lambda data: b"", r"\.ra\.npz\.part: is in no manifest"),
    "gone": ("ra.json", lambda data: None, "ra.json: is missing"),
    "readme-gone": ("README.md", lambda data: None, "README.md: is missing"),
    "manifest-gone": (LISTING, lambda data: None, NO_MANIFEST),
    "cut": ("ra.json", lambda data: data[:-100], f"ra.json: {SUM}"),
    "stripped": ("ra.json", lambda data: data.rstrip(), f"ra.json: {SUM}"),
    "empty": ("ra.json", lambda data: b"", "ra.json: cannot be read"),
    "input": ("ra.json", digit_after("k"), f"ra-basic-float64: {AGAIN}"),
    "output": ("ra.json", digit_after("expected"), f"ra-.*: {AGAIN}"),
    "tolerance": ("ra.json", digit_after("float64"), f"ra-.*: {AGAIN}"),
    "id": ("ra.json", replaced("ra-basic-float64", "ra-basic-float61"), f"float61: {AGAIN}"),
    "readme": ("README.md", replaced("16 eps", "17 eps"), f"README.md: {SUM}"),
    "checksum": (LISTING, digit_after("sha256"), AS_IT),
    "blank": (LISTING, lambda data: data + b" ", AS_IT),
    "version": (LISTING, replaced("0.", "9."), AS_IT),
    "manifest-cut": (LISTING, lambda data: data[:99], "json.json: cannot be read"),
    "another-manifest": (LISTING, lambda data: b"{}", "json.json: cannot be read"),
    "another-file": ("ra.json", lambda data: b"[3]", "ra.json: cannot be read"),
    "deep": ("ra.json", lambda data: b"[" * 100_000, "ra.json: cannot be read: .* nested too deep"),
    "deep-manifest": (LISTING, lambda data: b"[" * 100_000, "nested too deeply"),
    "nan": ("ra.json", replaced('"cond": ', '"cond": NaN, "_": '), "NaN is not a number"),
    "twice": ("ra.json", replaced('"package":', '"schema": "", "package":'), "an object has a key"),
}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_named(change, few):
    name, edit, words = CHANGES[change]
    folder = few("json", "ra")
    path = folder / name
    data = edit(path.read_bytes() if path.exists() else b"")
    path.unlink(missing_ok=True)
    if data is not None:
        path.write_bytes(data)
    problems = vectors.lint(folder)
    assert any(re.search(words, problem) for problem in problems), problems


NEW = "moments-basic-float64.cov.expected"
ARRAYS = {
    "digits": ({NEW: lambda x: x * (1 + 2.0**-40)}, f"moments.npz: {NEW}: {AGAIN}"),
    "more": ({"stray": lambda x: np.ones(2)}, f"moments.npz: stray: {AGAIN}"),
    "gone": ({NEW: None}, f"moments.npz: {NEW}: {AGAIN}"),
    "pickled": ({NEW: lambda x: np.empty(1, object)}, "moments.npz: cannot be read"),
}


@pytest.mark.parametrize("change", ARRAYS)
def test_a_change_to_an_array_is_named(change, folders, tmp_path):
    edits, words = ARRAYS[change]
    with np.load(folders["npz"] / "moments.npz") as file:
        arrays = {name: file[name] for name in file.files}
    for name, edit in edits.items():
        old = arrays.pop(name, None)
        arrays |= {} if edit is None else {name: edit(old)}
    np.savez(tmp_path / "moments.npz", **arrays)
    _, problem = vectors.lint(tmp_path)
    assert problem.startswith(words)


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_a_file_that_is_cut_cannot_be_read(kind, few, tmp_path):
    assert vectors.lint(tmp_path) == [f"{tmp_path}: no vectors"]
    path = few(kind, "moments") / f"moments.{kind}"
    path.write_bytes(path.read_bytes()[:5000])
    assert any("cannot be read" in problem for problem in vectors.lint(path.parent))
    with pytest.raises(ValueError, match="cannot read"):
        vectors.load(path.parent)


FEW = ("moments", "README.md", "manifest")
MOST = [pytest.param(x, marks=pytest.mark.long) for x in vectors.FILES if x not in FEW]


@pytest.mark.parametrize("kind", vectors.FORMATS)
@pytest.mark.parametrize("name", [*FEW, *MOST])
def test_a_flipped_bit_anywhere_is_named(kind, name, few):
    folder = few(kind, name if name in vectors.FILES else "moments")
    (path,) = folder.glob(f"{name}.*" if name in vectors.FILES else f"{name}*")
    data, rng = bytearray(path.read_bytes()), np.random.default_rng(0)
    for _ in range(3):
        bit, at = 1 << int(rng.integers(8)), rng.integers(len(data))
        data[at] ^= bit
        path.write_bytes(data)
        assert any(p.startswith(f"{path.name}: ") for p in vectors.lint(folder))
        data[at] ^= bit


def test_numbers_that_are_too_large_are_unreadable(few):
    path = few("json", "ra") / "ra.json"
    text = path.read_text()
    for old, new in ((r'"shape": \[ \d+', f'"shape": [ {"9" * 400}'), (r'p[+-]\d+"', 'p+99999"')):
        path.write_text(re.sub(old, new, text, count=1))
        with pytest.raises(ValueError, match=r"cannot read .*ra\.json"):
            vectors.load(path.parent)
        assert f"ra.json: ra-basic-float64: {AGAIN}" in vectors.lint(path.parent)
