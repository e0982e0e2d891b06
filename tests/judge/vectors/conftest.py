"""The golden vectors, written once for all processes of a run."""

import json
import os
import pickle
import shutil
import time

import pytest

from refattn.judge import vectors
from refattn.judge.vectors import cases, recipes, solving, writing

PARTS = 16


def claims(path):
    """Whether this process is the first to make the folder."""
    try:
        path.mkdir()
    except FileExistsError:
        return False
    return True


def wait_for(paths):
    """Until other processes have written them."""
    end = time.monotonic() + 600
    while not all(path.exists() for path in paths):
        assert time.monotonic() < end, "a process that writes the vectors has died"
        time.sleep(0.1)


def chosen(config):
    """All recipes, or one in five of those of tiles, which take a third of the time."""
    whole = any(config.getoption(x) not in (None, False) for x in ("full", "soak", "turn"))
    every = enumerate(recipes.all_recipes())
    return tuple(x for i, x in every if whole or x.file != "softmax-tiles" or i % 5 == 0)


def solve_together(root, every):
    """Solve recipes, each in the first process that comes to its part."""
    parts = [every[i::PARTS] for i in range(PARTS)]
    written = [root / f"{i}.pickle" for i in range(PARTS)]
    for i, part in enumerate(parts):
        if claims(root / str(i)):
            found = {recipe.id: solving.solved(recipe) for recipe in part}
            (root / f"{i}.part").write_bytes(pickle.dumps(found))
            (root / f"{i}.part").rename(written[i])
    wait_for(written)
    for path in written:
        solving._SOLVED.update(pickle.loads(path.read_bytes()))


@pytest.fixture(scope="session")
def folders(tmp_path_factory, pytestconfig):
    """A folder for each format, not to be changed."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # that of all processes
    root = root / "vectors"
    root.mkdir(exist_ok=True)
    every = chosen(pytestconfig)
    solve_together(root, every)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solving, "recipes_of", lambda _: every)
        for kind in vectors.FORMATS:
            if claims(making := root / f"{kind} in the making"):
                vectors.write(making / kind, format=kind)
                (making / kind).rename(root / kind)
    found = {kind: root / kind for kind in vectors.FORMATS}
    wait_for(found.values())
    return found


@pytest.fixture(scope="session")
def every(folders):
    return vectors.load(folders["json"])


@pytest.fixture
def few(folders, tmp_path):
    """Make a folder of some files, to be changed, with a manifest of these alone."""

    def made(kind, *names):
        target = tmp_path / "few"
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
    """Run `refattn vectors`, which solves nothing first."""
    from tests.cli.running import run

    monkeypatch.setattr(solving, "recipes_of", lambda _: [])

    def command(*words):
        done = run("vectors", *words)
        return done.exit_code, done.output

    return command
