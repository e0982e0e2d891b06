"""Golden vectors as files: three formats hold the same, with a manifest of what was written."""

import hashlib
import json
import re
import subprocess
import sys

import numpy as np
import pytest

from refattn.judge import vectors
from refattn.judge.vectors import writing
from refattn.judge.vectors.cases import SCHEMA, is_exact
from refattn.registry import ESTIMATORS, register
from tests.judge.vectors.running import error, package


def test_formats_hold_the_same(folders, every):
    for kind in ("npz", "safetensors"):
        for a, b in zip(every, vectors.load(folders[kind]), strict=True):
            for part in ("id", "flags", "arguments", "tolerance"):
                assert getattr(a, part) == getattr(b, part)
            for part in ("inputs", "expected", "expected_low", "size"):
                x, y = getattr(a, part), getattr(b, part)
                assert x.keys() == y.keys()
                for name in x:
                    np.testing.assert_array_equal(x[name], y[name], strict=True)


def test_manifest_lists_all_files(folders):
    for kind, folder in folders.items():
        manifest = json.loads((folder / f"manifest-{kind}.json").read_text())
        there = {path.name: path.read_bytes() for path in folder.iterdir()}
        assert set(manifest["files"]) | {f"manifest-{kind}.json"} == set(there)
        assert sum(map(len, there.values())) < 7_000_000
        for name, entry in manifest["files"].items():
            assert entry["bytes"] == len(there[name])
            assert entry["sha256"] == hashlib.sha256(there[name]).hexdigest()
        count = sum(entry.get("numberOfTests", 0) for entry in manifest["files"].values())
        assert count == len(vectors.load(folder))


def test_documents_are_of_the_schema_and_estimator_of_their_file(folders, every):
    for name in vectors.FILES:
        document = json.loads((folders["json"] / f"{name}.json").read_text())
        assert document["schemaVersion"] == 3
        assert f"{name}-".startswith(f"{document['estimator']}-")
    assert len(every) == len({case.id for case in every}) > 80


def test_numbers_keep_the_contract(every):
    """Inputs are numbers of the dtype, and allowed errors are 16 eps (1 + largest exponent)."""
    for case in every:
        for name, x in case.inputs.items():
            assert x.dtype.kind == ("i" if name == "indices" else "b" if x.dtype == bool else "f")
            assert np.all(np.isfinite(x))
            assert is_exact(x, case.dtype)
        for name, x in case.expected.items():
            assert np.all(np.isfinite(x)) or "EMPTY_ROW" in case.flags
            assert np.all(np.isfinite(case.expected_low[name]))
            assert np.broadcast_shapes(x.shape, case.size[name].shape) == x.shape
        eps = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-23, "float64": 2.0**-52}
        for dtype, allowed in case.tolerance.items():
            assert allowed == 16 * eps[dtype] * (1 + case.cond)
            assert all(is_exact(x, dtype) for x in case.inputs.values())
        assert (case.result == "acceptable") == ("EPS" in case.flags)


@pytest.mark.long
def test_identical_bytes_in_another_process(folders, tmp_path):
    code = (
        "import sys; from refattn.judge import vectors\n"
        "for kind in vectors.FORMATS: vectors.write(sys.argv[1] + '/' + kind, format=kind)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=300)
    for kind, folder in folders.items():
        written = {path.name: path.read_bytes() for path in (tmp_path / kind).iterdir()}
        assert written == {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def documents(folders, monkeypatch):
    """What is written: two files in place of all."""
    names = ("moments", "softmax-conventions")
    found = {name: json.loads((folders["json"] / f"{name}.json").read_text()) for name in names}
    monkeypatch.setattr(writing, "documents", lambda _: found)


def test_other_files_are_left_alone(tmp_path, documents):
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / "moments.json").write_text("old")
    vectors.write(tmp_path)
    assert (tmp_path / "mine.txt").read_text() == "mine"
    assert json.loads((tmp_path / "moments.json").read_text())["estimator"] == "moments"
    assert not list(tmp_path.glob(".*"))
    vectors.write(tmp_path, format="npz")
    assert vectors.lint(tmp_path) == ["mine.txt: is in no manifest"]
    with pytest.raises(ValueError, match="`directory` must hold vectors of one format"):
        vectors.load(tmp_path)
    assert len(vectors.load(tmp_path, format="npz")) == len(vectors.load(tmp_path, format="json"))


def test_one_estimator_alone(tmp_path, folders):
    """Its files are those that are written with all others."""
    for path in vectors.write(tmp_path, estimator="moments"):
        if path.name.startswith(("moments", "vectors.schema")):
            assert path.read_bytes() == (folders["json"] / path.name).read_bytes()
    assert vectors.lint(tmp_path) == []
    assert {x.estimator for x in vectors.load(tmp_path)} == {"moments"}
    assert "One file for each estimator: moments. " in (tmp_path / "README.md").read_text()
    (header,) = vectors.export(tmp_path / "c", format="c", estimator="moments")
    assert "softmax" not in header.read_text()


def test_estimators_one_after_another_in_one_folder(tmp_path):
    """README and manifests are of all of them, in whatever formats; damage is still found."""
    for name, kind in (("kernel", "json"), ("moments", "json"), ("ra", "npz")):
        vectors.write(tmp_path, estimator=name, format=kind)
    assert vectors.lint(tmp_path) == []
    assert " estimator: kernel, moments, ra. " in (tmp_path / "README.md").read_text()
    path = tmp_path / "kernel.json"
    path.write_text(path.read_text() + " ")
    vectors.write(tmp_path, estimator="moments")
    assert any(x.startswith("kernel.json: does not have") for x in vectors.lint(tmp_path))


@pytest.mark.long
def test_command_line(tmp_path, monkeypatch, documents, command):
    out = tmp_path / "out"
    assert command(out, "--check")[0] == 1
    for kind in vectors.FORMATS:
        status, said = command(out, "--format", kind)
        assert status == 0, said
        assert re.search(r": \d+ vectors in 5 files, \d+ kB\n", said)
    status, said = command(out, "--check")
    assert (status, "no problems" in said) == (0, True)
    path = out / "moments.json"
    path.write_text(path.read_text().replace('"numberOfTests": ', '"numberOfTests": 9', 1))
    status, said = command(out, "--check")
    assert (status, "moments.json: does not have the SHA" in said) == (1, True)
    assert command(path)[0] == 2  # a file
    monkeypatch.setitem(sys.modules, "safetensors", None)
    status, said = command(out, "--check")
    assert status == 2
    assert "reading .safetensors needs `pip install 'refattn[vectors]'`" in said


MISSING = {
    "mpmath": ("write(folder)", "refattn.judge.conformance.truth.digits needs"),
    "safetensors": ("load(folder)", "reading .safetensors needs"),
}


@pytest.mark.parametrize(
    "name", ["safetensors", *(pytest.param(x, marks=pytest.mark.long) for x in list(MISSING)[:1])]
)
def test_what_is_not_installed_is_said(name, folders):
    call, words = MISSING[name]
    code = (
        f"import sys; sys.modules[{name!r}] = None; folder = sys.argv[1]\n"
        "from refattn.judge import vectors\n"
        f"try: vectors.{call}\n"
        "except ModuleNotFoundError as error: print(error)\n"
    )
    command = [sys.executable, "-c", code, str(folders["safetensors"])]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == f"{words} `pip install 'refattn[vectors]'`\n"


@pytest.mark.long
def test_an_estimator_of_another_package_has_a_file(folders, tmp_path, monkeypatch):
    """With cases by its traits; all other files stay as they are."""
    monkeypatch.setattr(ESTIMATORS, "_records", dict(ESTIMATORS))
    second = ESTIMATORS["second-order"]
    register(second._replace(name="chunky", fn=second.naive, vjp=None, source=("a note",)))
    assert "chunky" in vectors.ESTIMATORS
    vectors.write(tmp_path)
    assert vectors.lint(tmp_path) == []
    added, apart = {"chunky.json"}, {"README.md", SCHEMA.name, writing.manifest_name("json")}
    assert {x.name for x in tmp_path.iterdir()} == added | {
        x.name for x in folders["json"].iterdir()
    }
    for path in folders["json"].iterdir():
        assert path.name in apart or path.read_bytes() == (tmp_path / path.name).read_bytes()
    document = json.loads((tmp_path / "chunky.json").read_text())
    assert [group["source"] for group in document["testGroups"]] == [["a note"]]
    cases = [case for case in vectors.load(tmp_path) if case.estimator == "chunky"]
    assert len(cases) > 10
    assert all(error(case, package("chunky")) <= 1 for case in cases)
