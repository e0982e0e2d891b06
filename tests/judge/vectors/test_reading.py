"""The readers in the README of the golden vectors, in Python and C++."""

import shutil
import subprocess

import numpy as np
import pytest

from refattn.judge import vectors
from refattn.judge.vectors import Convention, table
from refattn.judge.vectors.cases import GRADIENTS
from tests.judge.vectors.running import forward, package
from tests.judge.vectors.translating import PACKAGE, under


def block(folder, language):
    return (folder / "README.md").read_text().split(f"```{language}\n")[1].split("```")[0]


@pytest.fixture(scope="module")
def failures(folders):
    """The reader in Python: ids of cases of a file that a function does not meet."""
    scope = {}
    exec(block(folders["npz"], "python"), scope)

    def failures(name, run, *more, **options):
        path = folders["npz"] / f"{name}.npz"
        return list(scope["failures"](path, quiet(run), *more, **options))

    return failures


def quiet(run):
    """With numbers as numbers, and the output alone where a case has no gradients."""

    def numbers(**given):
        for name in ("scale", "softcap", "dropout_p"):
            if given.get(name) is not None:
                given[name] = float.fromhex(given[name])
        with np.errstate(all="ignore"):
            found = run(**given)
        return found["out"] if isinstance(found, dict) and list(found) == ["out"] else found

    return numbers


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ["softmax", "moments", "softmax-options", "softmax-tiles"])
def test_the_package_fails_at_nothing(name, dtype, failures):
    run = package(name.partition("-")[0])
    assert failures(name, run, dtype) == []
    assert failures(name, run, dtype, gradients=True) == []


def test_an_ignored_scale_fails(failures):
    run = package("softmax")
    assert failures("softmax", lambda scale, **x: run(scale=None, **x)) == ["softmax-scale-float32"]


def test_vectors_with_gradients_are_skipped_unless_asked_for(folders, failures):
    assert all(f"`{name}`" in (folders["npz"] / "README.md").read_text() for name in
               GRADIENTS.values())  # fmt: skip
    run = package("softmax")

    def wrong(**given):
        return given.pop("d_out") if "d_out" in given else run(**given)

    assert failures("softmax", wrong) == []
    found = set(failures("softmax", wrong, gradients=True))
    assert len(found) > 10
    assert all("-gradient-" in name for name in found)


def test_groups_can_be_picked(failures, folders):
    mine = [f"softmax-{table.group_name(Convention(*x))}" for x in PACKAGE.items()]
    run = under({"causal": PACKAGE["causal"]})

    def asked(return_lse=False, **given):
        found = run(**given)
        return found if return_lse else found["out"]

    assert failures("softmax-conventions", asked, groups=mine) == []
    others = set(failures("softmax-conventions", asked))
    kinds = {case.id: case.group for case in forward(vectors.load(folders["npz"]))}
    assert {kinds[name] for name in others} == {
        group for group in kinds.values() if "convention" in group and group not in mine
    }


MAIN = """
int main(int, char** argv) {
    for (char** name = argv + 2; *name; ++name)
        for (double x : read(argv[1], *name)) std::printf("%a\\n", x);
}
"""


@pytest.fixture(scope="module")
def reader(folders, tmp_path_factory):
    """The reader in C++, as a program that prints arrays of a file."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    includes = ("cstdint", "cstdio", "fstream", "sstream", "stdexcept", "string", "vector")
    source = "".join(f"#include <{name}>\n" for name in includes)
    folder = tmp_path_factory.mktemp("reader")
    (folder / "read.cpp").write_text(source + block(folders["safetensors"], "cpp") + MAIN)
    flags = ["-std=c++11", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(
        [compiler, *flags, "-o", "read", "read.cpp"], cwd=folder, check=True, timeout=100
    )
    return lambda *words: subprocess.run(
        [str(folder / "read"), *map(str, words)], capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    ("file", "start"), [("rfa", "rfa-"), ("softmax-conventions", "softmax-convention-")]
)
def test_cpp_reader(file, start, folders, tmp_path, every, reader):
    estimator = start.partition("-")[0]
    names, want = [], []
    for case in every:
        if case.id.startswith(start) and case.estimator == estimator:
            names += [f"{case.id}.q", f"{case.id}.out.expected", f"{case.id}.out.expected_low"]
            parts = (case.inputs["q"], case.expected["out"], case.expected_low["out"])
            want += [x for part in parts for x in part.ravel().tolist()]
    path = folders["safetensors"] / f"{file}.safetensors"
    done = reader(path, *names)
    assert done.returncode == 0
    got = [float.fromhex(line) for line in done.stdout.split()]
    np.testing.assert_array_equal(got, want)  # nan and infinities too
    (tmp_path / "short").write_bytes(path.read_bytes()[:-20_000])
    assert reader(tmp_path / "short", names[-1]).returncode != 0
    assert reader(path, "nothing").returncode != 0
