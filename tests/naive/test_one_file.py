"""The formulas as one file: it needs nothing of the package, and gives the same numbers."""

import ast
import hashlib
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import refattn
from refattn import naive
from refattn.naive import one_file
from tests.formulas import CALLS, MASK, OMEGA, K, Q, V

HEADS = np.stack([Q, K]), K[None], V[None]
EVERY = {name: ((Q, K, V), calls[-1]) for name, calls in CALLS.items()} | {
    "softmax_attention": (HEADS, CALLS["softmax_attention"][-1]),
    "elu_plus_one": ((Q,), {}),
    "kernel_estimate": ((Q, K, OMEGA), {"features": "trigonometric"}),
    "mean_and_covariance": ((Q,), {}),
    "visible": ((Q, K), {"mask": MASK, "causal": True}),
}
RUN = """
import sys
sys.modules["refattn"] = sys.modules["array_api_compat"] = None  # neither can be imported
sys.path.insert(0, sys.argv[1])
import pickle
import numpy as np
import naive
with open(sys.argv[1] + "/calls", "rb") as file:
    calls = pickle.load(file)
out = {name: getattr(naive, name)(*args, **options) for name, (args, options) in calls.items()}
out = {name: x if isinstance(x, tuple) else (x,) for name, x in out.items()}
out = {f"{name} {i}": y for name, x in out.items() for i, y in enumerate(x)}
np.savez(sys.argv[1] + "/out.npz", **out)
try:
    naive.softmax_attention(np.ones((4, 3)), np.ones((4, 3)), np.ones((3, 3)))
except ValueError as error:
    print(error)
import doctest
print(doctest.testmod(naive))
"""


def results(fn, name):
    """What a formula gives, one or several arrays."""
    args, options = EVERY[name]
    found = fn(*args, **options)
    return found if isinstance(found, tuple) else (found,)


def alone(tmp_path, text):
    """What the file gives in a process that has none of the package."""
    (tmp_path / "naive.py").write_text(text, encoding="ascii")
    (tmp_path / "calls").write_bytes(pickle.dumps(EVERY))
    command = [sys.executable, "-I", "-W", "error", "-c", RUN, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return np.load(tmp_path / "out.npz"), done.stdout


def printed(*names):
    command = [sys.executable, "-m", "refattn.naive", *names]
    root = Path(refattn.__file__).parent.parent
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=root)


def test_the_file_alone_gives_the_same_numbers(tmp_path):
    assert {*EVERY} == {*naive.__all__}
    done = printed()
    assert (done.returncode, done.stderr) == (0, "")
    found, said = alone(tmp_path, done.stdout)
    for name in EVERY:
        for i, want in enumerate(results(getattr(naive, name), name)):
            np.testing.assert_array_equal(found[f"{name} {i}"], want, err_msg=name)
            assert found[f"{name} {i}"].dtype == want.dtype
    assert said.startswith("`k` and `v` must have next-to-last axes of one length")
    assert "TestResults(failed=0, attempted=" in said
    assert "attempted=0" not in said


@pytest.fixture(scope="module")
def everything():
    return one_file.formulas()


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", naive.__all__)
def test_a_single_formula_takes_what_it_needs_only(name, everything):
    text = one_file.formulas([name])
    assert len(text) < len(everything)
    assert f'__all__ = ["{name}"]' in text
    others = {*naive.__all__} - {name, "visible", "elu_plus_one"}
    assert not others & {x.name for x in ast.parse(text).body if isinstance(x, ast.FunctionDef)}
    scope = {"__name__": "vendored"}
    exec(compile(text, "vendored.py", "exec"), scope)
    for x, y in zip(*(results(f, name) for f in (scope[name], getattr(naive, name))), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("name", ["random_feature_attention", "linear_randomized_attention"])
def test_a_formula_that_is_named_is_the_first_definition(name):
    tree = ast.parse(one_file.formulas([name]))
    defined = [x.name for x in tree.body if isinstance(x, ast.FunctionDef | ast.ClassDef)]
    assert defined[0] == name


def test_the_header_names_version_and_licence_and_has_the_checksum():
    text = one_file.formulas(["visible"])
    head, body = text.splitlines(keepends=True)[:4], "".join(text.splitlines(keepends=True)[4:])
    assert refattn.__version__ in head[0]
    assert "BSD-3-Clause" in head[1]
    assert "`python -m refattn.naive visible`" in head[2]
    assert head[3].split()[-1] == hashlib.sha256(body.encode("ascii")).hexdigest()
    assert text == printed("visible").stdout == one_file.formulas(["visible"])


def test_the_file_imports_the_standard_library_and_numpy_only():
    tree = ast.parse(one_file.formulas())
    taken = {x.module for x in ast.walk(tree) if isinstance(x, ast.ImportFrom)}
    taken |= {a.name for x in ast.walk(tree) if isinstance(x, ast.Import) for a in x.names}
    assert all(isinstance(x, str) for x in taken)
    assert taken - {*sys.stdlib_module_names, "collections.abc"} == {"array_api_compat", "numpy"}
    names = [x.name for x in tree.body if isinstance(x, ast.FunctionDef | ast.ClassDef)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("options", [["--isolated"], ["--config=pyproject.toml", "--ignore=E501"]])
def test_the_file_is_clean(options, tmp_path):
    pytest.importorskip("ruff")
    root = Path(refattn.__file__).parent.parent
    for i, text in enumerate([one_file.formulas(), one_file.formulas(["linear_attention"])]):
        path = tmp_path / f"vendored_{i}.py"
        path.write_text(text, encoding="ascii")
        command = [sys.executable, "-m", "ruff", "check", "--no-cache", *options, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=60)
        assert done.returncode == 0, done.stdout


def test_names_that_are_not_there_are_refused():
    with pytest.raises(ValueError, match='`names` must be one of "coreset_'):
        one_file.formulas(["flash"])
    done = printed("flash")
    assert done.returncode == 2
    assert "got 'flash'" in done.stderr
    assert done.stdout == ""


@pytest.mark.long("jax.numpy")
@pytest.mark.parametrize("library", ["array_api_strict", "jax.numpy", "torch"])
def test_arrays_of_other_libraries(library):
    xp = pytest.importorskip(library)
    scope = {"__name__": "vendored"}
    exec(compile(one_file.formulas(), "vendored.py", "exec"), scope)
    x = {name: xp.asarray(np.float32(value)) for name, value in zip("qkv", (Q, K, V), strict=True)}
    for name in ("softmax_attention", "second_order_attention", "eva_attention"):
        options = {} if name == "softmax_attention" else {"window": 2}
        found, want = (module(**x, **options) for module in (scope[name], getattr(naive, name)))
        assert type(found) is type(want)
        np.testing.assert_array_equal(np.asarray(found), np.asarray(want))


@pytest.mark.long
def test_without_docstrings_it_is_the_same():
    """As `python -OO` runs, for defects and 50 digits are made of it."""
    code = "from refattn.naive import one_file; print(one_file.formulas(), end='')"
    command = [sys.executable, "-OO", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == one_file.formulas()
