"""A folder with a file of each kind that the tests of commands read."""

import shutil
import sys

import numpy as np
import pytest

import refattn
from refattn import naive
from tests.cli import running

CANDIDATES = """
import refattn

def right(q, k, v, mask=None):
    return refattn.softmax_attention(q, k, v, mask=mask)

def wrong(q, k, v, mask=None):
    return refattn.softmax_attention(q, k, v, mask=mask, scale=1.0)

class Names:
    inner = staticmethod(right)

number = 3
"""


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """The files, written once: two heads of a sentence encoder, and the result for them."""
    folder = tmp_path_factory.mktemp("files")
    q, k, v = (np.ascontiguousarray(x[1, :2, :24]) for x in refattn.load_sample())
    out = naive.softmax_attention(*(x.astype(float) for x in (q, k, v))).astype(np.float32)
    arrays = {"q": q, "k": k, "v": v, "out": out}
    np.savez(folder / "qkv.npz", q=q, k=k, v=v)
    np.savez(folder / "right.npz", **arrays)
    np.savez(folder / "wrong.npz", **arrays | {"out": out * np.float32(1.01)})
    np.savez(folder / "swapped.npz", **{x: np.swapaxes(y, 0, 1) for x, y in arrays.items()})
    np.savez(folder / "flat.npz", q=q[0], k=k[0], v=v[0])
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 24, 3)) / 2
    np.savez(folder / "easy.npz", q=q, k=k, v=v + 2)  # where laws hold
    (folder / "candidates_under_test.py").write_text(CANDIDATES, "utf-8")
    save_file = pytest.importorskip("safetensors.numpy").save_file
    save_file(arrays, folder / "dump.safetensors")
    return folder


@pytest.fixture(autouse=True)
def no_lines_of_progress(request, monkeypatch):
    """What is printed beside results does not depend on the time that they take."""
    if request.module.__name__ != "tests.cli.test_progress":
        monkeypatch.setattr("refattn.cli.progress.FIRST", 600.0)


@pytest.fixture
def here(files, tmp_path, monkeypatch):
    """A copy of them as the current directory, from which modules are imported too."""
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture(scope="session")
def forked(tmp_path_factory):
    """`running.process`, in forks of one process where that is safe."""
    if sys.platform != "linux":
        yield running.process
    else:
        forks = running.Forks(tmp_path_factory.mktemp("streams"))
        yield forks
        forks.close()
