"""The linter of golden vectors finds nothing in what is written, and any damage."""

import json
import re

import numpy as np
import pytest

from refattn.judge import vectors
from refattn.judge.vectors import checking, writing

EVERY = [pytest.param(kind, vectors.FILES, marks=pytest.mark.long) for kind in vectors.FORMATS]


@pytest.mark.parametrize(
    ("kind", "names"), [*((kind, ("moments", "ra")) for kind in vectors.FORMATS), *EVERY]
)
def test_every_case_is_evaluated_again(kind, names, few, monkeypatch):
    again, folder = [], few(kind, *names)
    monkeypatch.setattr(checking, "_lint_again", lambda case, *rest: again.append(case.id) or ())
    assert vectors.lint(folder) == []
    assert again == [case.id for case in vectors.load(folder)]


# --- a change to a document -----------------------------------------------------------------------


def document(folder, file, group, *ids):
    """A file with some of the tests of one of its groups."""
    found = json.loads((folder / f"{file}.json").read_text())
    (group,) = (x for x in found["testGroups"] if x["type"] == group)
    tests = {test["id"]: test for test in group["tests"]}
    group["tests"] = [tests[name] for name in ids] or [*tests.values()]
    used = {flag for test in group["tests"] for flag in test["flags"]}
    notes = {flag: note for flag, note in found["notes"].items() if flag in used}
    return found | {
        "testGroups": [group], "numberOfTests": len(group["tests"]), "notes": notes
    }  # fmt: skip


GONE = object()
TOP_LEFT = "softmax-convention-causal-top-left"
DOCUMENTS = {
    "softmax": ("softmax", "softmax", "softmax-basic-bfloat16", "softmax-scale-float32"),
    "gradient": ("softmax", "softmax-gradients", "softmax-gradient-basic-float32"),
    "convention": ("softmax-conventions", TOP_LEFT),
}
Q, OUT, GRADIENTS = "test inputs q data", "test expected out data", "test expected"
ONE = {"shape": [1], "data": ["0x0.0p+0"]}
DAMAGE = [  # which document, what of it, what becomes of that, and the words of the linter
    ("softmax", "test surprise", 1, "Additional properties"),
    ("softmax", "test comment", GONE, "'comment' is a required property"),
    ("softmax", f"{OUT} 0", "1.5", "does not match"),
    ("softmax", f"{Q} 0", "0.5", "not valid under any"),
    ("softmax", "group tests", lambda x: [*x, x[0]], "id is used twice"),
    ("softmax", "group tests", lambda x: [*x, x[0] | {"id": "other"}], "the same inputs and argum"),
    ("softmax", "numberOfTests", 3, "numberOfTests is 3"),
    ("softmax", "notes BASIC", GONE, "flag BASIC is not described"),
    ("softmax", "notes", lambda x: x | {"ZERO": x["BASIC"]}, "described but not"),
    ("softmax", f"{Q} 0", (0.1).hex(), "q: is not exact in bfloat16"),
    ("softmax", Q, lambda x: x[1:], "cannot reshape"),
    ("softmax", "test inputs q shape", [2, 8], "head sizes"),
    ("softmax", f"{OUT} 0", "1." + "1" * 33 + "e+999", "OverflowError|not finite"),
    (
        "softmax",
        f"{OUT} 0",
        lambda x: x.replace("5", "6", 1),
        "a new evaluation gives other digits",
    ),
    ("softmax", "test tolerance float64", 1e-9, "is not 16 eps"),
    ("softmax", "test cond", 1.0, "is not 16 eps"),
    ("softmax", f"{Q} 0", (0.25).hex(), "a new evaluation|cond"),
    ("softmax", "estimator", "linear", "estimator is 'linear'"),
    ("softmax", "test result", "acceptable", "does not go with the flags"),
    ("softmax", "schemaVersion", 2, "schemaVersion: 3 was expected"),
    ("gradient", "test inputs d_out", GONE, "do not follow from the inputs"),
    ("gradient", "test inputs d_out shape", [2, 3], r"\(2, 3\) of d_out is not"),
    ("gradient", f"{GRADIENTS} dk", GONE, "do not follow from the inputs"),
    ("gradient", f"{GRADIENTS} dk shape", [3, 4], "do not agree|do not follow"),
    ("gradient", GRADIENTS, lambda x: x | {"d_mask": x["dq"]}, "Additional prop"),
    ("gradient", "test inputs d_out data", lambda x: x[::-1], "d[qkv]: a new evaluation gives oth"),
    ("gradient", f"{GRADIENTS} dv data", lambda x: x[::-1], "dv: a new evaluation gives other dig"),
    ("gradient", f"{GRADIENTS} dq size data", [1.0] * 3, "dq: a new evaluation"),
    ("convention", "group source", GONE, "'source' is a required property"),
    ("convention", "group source", [], r"source: \[\] "),
    ("convention", "group source", ["a book"], "source does not name the sources of the group"),
    ("convention", "group convention libraries", lambda x: [*x, "mine"], "libraries are not those"),
    ("convention", "group convention value", "bottom-right", "is the id of other inputs"),
    ("convention", "group convention", GONE, "is the id of other inputs"),
    ("convention", "group convention value", "middle", "causal 'middle' is not a convention"),
    ("convention", "group convention option", "corner", "corner 'top-left' is not a conv"),
    ("convention", "test arguments window", [1, None], "is the id of other inputs"),
    ("convention", "test arguments window", [1], "window: .*short"),
    ("convention", f"{OUT} 0", "nan", "not finite"),
    ("convention", "test inputs sinks", ONE, r"shape \(1,\) of sinks is not that of the heads"),
    ("convention", "test inputs bias", ONE | {"shape": [1, 1, 1]}, r"\(1, 1, 1\) of bias does not"),
]


@pytest.mark.parametrize(("kind", "place", "value", "words"), DAMAGE)
def test_linter_finds_damage(kind, place, value, words, folders, tmp_path):
    whole = document(folders["json"], *DOCUMENTS[kind])
    path = tmp_path / f"{DOCUMENTS[kind][0]}.json"
    path.write_text(json.dumps(whole))
    assert vectors.lint(tmp_path, fraction=0) == [NO_MANIFEST]
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
        whole["numberOfTests"] += "tests" in place
    path.write_text(json.dumps(whole))
    problems = vectors.lint(tmp_path)
    assert any(re.search(words, problem) for problem in problems), problems


# --- a change to a file ---------------------------------------------------------------------------


def replaced(old, new):
    def edit(data):
        assert old.encode() in data
        return data.replace(old.encode(), new.encode(), 1)

    return edit


def without_a_test(data):
    found = json.loads(data)
    del found["testGroups"][0]["tests"][0]
    found["numberOfTests"] -= 1
    return writing.to_json(found)


def digit_after(key):
    """Change the first digit between 1 and 8 of the first number of a key."""

    def edit(data):
        start = data.index(f'"{key}": '.encode()) + len(key) + 4
        at = re.compile(rb"(?<=[\d.])[1-8]").search(data, start).start()
        return data[:at] + bytes([data[at] + 1]) + data[at + 1 :]

    return edit


NO_MANIFEST = "manifest-json.json: is missing: write the vectors again"
LISTING, AS_IT = "manifest-json.json", "manifest-json.json: is not as it was written"
AGAIN = "a new evaluation gives other digits"
CHANGES = {
    "added": ("new.json", lambda data: b"{}", "new.json: is in no manifest"),
    "part": (".ra.npz.part", lambda data: b"", r"\.ra\.npz\.part: is in no manifest"),
    "gone": ("ra.json", lambda data: None, "ra.json: is missing"),
    "readme-gone": ("README.md", lambda data: None, "README.md: is missing"),
    "manifest-gone": (LISTING, lambda data: None, NO_MANIFEST),
    "cut": ("ra.json", lambda data: data[:-100], "ra.json: has .* bytes, not the .* of manifest"),
    "stripped": ("ra.json", lambda data: data.rstrip(), "ra.json: has .* bytes"),
    "empty": ("ra.json", lambda data: b"", "ra.json: has 0 bytes"),
    "test-gone": ("ra.json", without_a_test, "ra.json: ra-basic-float64: is missing"),
    "comment": ("ra.json", replaced("order one", "order two"), "ra.json: does not have the S"),
    "input": ("ra.json", digit_after("k"), f"ra-basic-float64: out: {AGAIN}"),
    "output": ("ra.json", digit_after("expected"), f"out: {AGAIN}"),
    "tolerance": ("ra.json", digit_after("float64"), "tolerance for float64 is not 16 eps"),
    "readme": ("README.md", replaced("16 eps", "17 eps"), "README.md: does not have the SHA"),
    "schema": ("vectors.schema.json", replaced("minLength", "maxLength"), "schema.json: does not"),
    "checksum": (LISTING, digit_after("sha256"), AS_IT),
    "count": (LISTING, replaced('"numberOfTests": ', '"numberOfTests": 1'), AS_IT),
    "name": (LISTING, replaced("ra-basic-float64", "ra-basic-float16"), AS_IT),
    "blank": (LISTING, lambda data: data + b" ", AS_IT),
    "version": (LISTING, replaced("0.", "9."), AS_IT),
    "manifest-cut": (LISTING, lambda data: data[:99], "json.json: cannot be read"),
    "another-manifest": (LISTING, lambda data: b"{}", "json.json: : 'files' is"),
    "deep": ("ra.json", lambda data: b"[" * 100_000, "ra.json: cannot be read: .* nested too deep"),
    "deep-manifest": (LISTING, lambda data: b"[" * 100_000, "nested too deeply"),
    "nan": ("ra.json", replaced('"cond": ', '"cond": NaN, "_": '), "NaN is not a number"),
    "digits": ("ra.json", replaced('"cond": ', f'"cond": {"9" * 400}, "_": '), "_.*unexpected"),
    "twice": ("ra.json", replaced('"package":', '"schema": "", "package":'), "an object has a key"),
}


@pytest.mark.sweep(4)
@pytest.mark.long("input", "output")
@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_named(change, few):
    name, edit, words = CHANGES[change]
    folder = few("json", "ra")
    path = folder / name
    data = edit(path.read_bytes() if path.exists() else b"")
    path.unlink(missing_ok=True)
    if data is not None:
        path.write_bytes(data)
    problems = vectors.lint(folder, fraction=AGAIN in words)
    assert any(re.search(words, problem) for problem in problems), problems


NEW = "moments-basic-float64.cov.expected"
ARRAYS = {
    "digits": ({NEW: lambda x: x * (1 + 2.0**-40)}, "other digits"),
    "more": ({"stray": lambda x: np.ones(2)}, "array stray belongs to no case"),
    "gone": ({NEW: None}, "KeyError"),
    "pickled": ({NEW: lambda x: np.empty(1, object)}, "cannot be read"),
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
    assert any(words in x for x in vectors.lint(tmp_path, fraction=change == "digits"))


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
        assert any(p.startswith(f"{path.name}: ") for p in vectors.lint(folder, fraction=0))
        data[at] ^= bit


def test_numbers_that_are_too_large_are_unreadable(few):
    path = few("json", "ra") / "ra.json"
    text = path.read_text()
    for old, new in ((r'"shape": \[ \d+', f'"shape": [ {"9" * 400}'), (r'p[+-]\d+"', 'p+99999"')):
        path.write_text(re.sub(old, new, text, count=1))
        with pytest.raises(ValueError, match=r"cannot read .*ra\.json"):
            vectors.load(path.parent)
        assert any("ra-basic-float64: " in p for p in vectors.lint(path.parent, fraction=0))
