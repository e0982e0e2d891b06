"""The formulas as one file: it needs nothing of the package, and gives the same numbers."""

import ast
import hashlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import refattn
from refattn import naive
from refattn.naive import one_file

Q, K, V = np.random.default_rng(0).standard_normal((3, 2, 6, 4))
OMEGA = np.random.default_rng(1).standard_normal((6, 4))
MASK = np.arange(6) != 2
X = {"q": Q, "k": K[:1], "v": V[:1], "omega": OMEGA, "mask": MASK, "bias": Q @ Q.mT}
X |= {"beta": Q[..., 0] ** 2 / 4, "g": -(K**2), "a": K / 4, "b": -K, "first": Q[:, :4]}

# Calls of formulas, as text, so that both modules run the same; of q, k and v alone by default.
CALLS = dict.fromkeys(naive.__all__, "(q, k, v)") | {
    "chunked_linear_randomized_attention": "(q, k, v, omega=omega, num_proposals=3, chunk=4)",
    "chunked_random_feature_attention": "(q, k, v, omega=omega, mask=mask, chunk=4)",
    "delta_rule": "(q, k, v, beta=beta, initial_state=first).out",
    "gated_delta_rule": "(q, k, v, beta=beta, log_decay=g[..., 0]).state",
    "gated_linear_attention": "(q, k, v, log_decay=g).out",
    "kimi_delta_attention": "(q, k, v, beta=beta, log_decay=g).out",
    "recurrent_attention": '(q, k, v, log_decay=g, removal=(a, b), write=beta, read="before").out',
    "retention": "(q, k, v, decay=0.5).out",
    "rwkv7": "(q, k, v, log_decay=g, removal=(a, b)).state",
    "state_space_duality": "(q, k, v, log_decay=g[..., 0], write=beta).out",
    "coreset_attention": "(q, k, v, indices=[0, 3, 5], mask=mask)",
    "elu_plus_one": "(q)",
    "eva_attention": "(q, k, v, window=2, causal=True)",
    "importance_sampled_attention": "(q, k, v, omega=omega, mask=mask)",
    "kernel_estimate": '(q, k, omega, features="trigonometric")',
    "linear_attention": "(q, k, v, mask=mask)",
    "linear_randomized_attention": '(q, k, v, omega=omega, num_proposals=3, weighting="query")',
    "local_random_feature_attention": "(q, k, v, window=(1, 0), omega=omega)",
    "mean_and_covariance": "(q)[1]",
    "mean_of_ratios_attention": "(q, k, v, omega=omega, causal=True)",
    "random_feature_attention": '(q, k, v, omega=omega, features="hyperbolic", scale=0.3)',
    "randomized_attention": "(q, k, v, omega=q[..., None, :] + omega)",
    "sampled_key_attention": "(q, k, v, indices=[0, 3, 3], log_probability=omega[0, :3])",
    "second_order_attention": "(q, k, v, window=2)",
    "softmax_attention": "(q, k, v, bias=bias, softcap=2.0, window=(2, None), sinks=q[0, 0, :1])",
    "visible": "(q, k, mask=mask, causal=True)",
}
RUN = """
import sys
sys.modules["refattn"] = sys.modules["array_api_compat"] = None  # neither can be imported
sys.path.insert(0, sys.argv[1])
import numpy as np
import naive
x = np.load(sys.argv[1] + "/x.npz")
out = {name: eval(f"naive.{name}{call}", {"naive": naive}, dict(x)) for name, call in %s.items()}
np.savez(sys.argv[1] + "/out.npz", **out)
try:
    naive.softmax_attention(x["q"], x["k"], x["v"][:, :3])
except ValueError as error:
    print(error)
import doctest
print(doctest.testmod(naive))
"""


def alone(tmp_path, text, calls):
    """What the file gives in a process that has none of the package."""
    (tmp_path / "naive.py").write_text(text, encoding="ascii")
    np.savez(tmp_path / "x.npz", **X)
    command = [sys.executable, "-I", "-W", "error", "-c", RUN % calls, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return np.load(tmp_path / "out.npz"), done.stdout


def printed(*names):
    command = [sys.executable, "-m", "refattn.naive", *names]
    root = Path(refattn.__file__).parent.parent
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=root)


def test_the_file_alone_gives_the_same_numbers(tmp_path):
    assert list(CALLS) == naive.__all__
    done = printed()
    assert (done.returncode, done.stderr) == (0, "")
    found, said = alone(tmp_path, done.stdout, CALLS)
    for name, call in CALLS.items():
        want = eval(f"naive.{name}{call}", {"naive": naive}, dict(X))
        np.testing.assert_array_equal(found[name], want, err_msg=name)
        assert found[name].dtype == want.dtype
    assert said.startswith("`k` and `v` must have next-to-last axes of one length")
    assert "TestResults(failed=0, attempted=" in said
    assert "attempted=0" not in said


@pytest.fixture(scope="module")
def everything():
    return one_file.formulas()


@pytest.mark.parametrize("name", naive.__all__)
def test_a_single_formula_takes_what_it_needs_only(name, everything):
    text = one_file.formulas([name])
    assert len(text) < len(everything)
    assert f'__all__ = ["{name}"]' in text
    others = {*naive.__all__} - {name, "visible", "elu_plus_one"}
    assert not others & {x.name for x in ast.parse(text).body if isinstance(x, ast.FunctionDef)}
    want = eval(f"naive.{name}{CALLS[name]}", {"naive": naive}, dict(X))
    scope = {"__name__": "vendored"}
    exec(compile(text, "vendored.py", "exec"), scope)
    np.testing.assert_array_equal(eval(f"{name}{CALLS[name]}", scope, dict(X)), want)


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
    with pytest.raises(ValueError, match='`names` must be one of "chunked_'):
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
