"""The golden vectors, written once for all processes of a run."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from refattn.conformance import vectors
from refattn.conformance.vectors import cases, checking, solving, writing
from refattn.conformance.vectors.reading import tests_of


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """A folder for each format, not to be changed."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # that of all processes
    root = root / "vectors"
    found = {kind: root / kind for kind in vectors.FORMATS}
    done = root / "done"
    try:
        root.mkdir()
    except FileExistsError:  # another process writes them
        end = time.monotonic() + 600
        while not done.exists():
            assert time.monotonic() < end, "the process that writes the vectors has died"
            time.sleep(0.2)
        for name in vectors.FILES:
            document = json.loads((found["json"] / f"{name}.json").read_text())
            solving._SOLVED.update({test["id"]: test for test in tests_of(document)})
    else:
        for kind, folder in found.items():
            vectors.write(folder, format=kind)
        done.touch()
    return found


@pytest.fixture(scope="session")
def every(folders):
    return vectors.load(folders["json"])


@pytest.fixture
def few(folders, tmp_path):
    """Make a folder of some files, to be changed, with a manifest of these alone."""

    def made(kind, *names, target=None):
        target = tmp_path / "few" if target is None else Path(target)
        target.mkdir(exist_ok=True)
        listing = writing.manifest_name(kind)
        manifest = json.loads((folders[kind] / listing).read_text())
        kept = {"README.md", cases.SCHEMA.name, *(f"{name}.{kind}" for name in names)}
        manifest["files"] = {x: y for x, y in manifest["files"].items() if x in kept}
        for name in manifest["files"]:
            shutil.copy(folders[kind] / name, target)
        (target / listing).write_bytes(writing.sealed(manifest))
        return target

    return made


@pytest.fixture
def command(monkeypatch):
    """Run `refattn vectors`, which solves nothing first and evaluates nothing again."""
    from tests.cli.running import run

    monkeypatch.setattr(solving, "all_recipes", list)
    monkeypatch.setattr(checking, "_lint_again", lambda *case: ())

    def command(*words):
        done = run("vectors", *words)
        return done.exit_code, done.output

    return command
