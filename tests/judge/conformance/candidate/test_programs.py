"""Candidates that are programs, started for each call, with files of arrays."""

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from refattn.judge.conformance import Subprocess, check
from tests.judge.conformance.candidates import OF_OPTIONS, OPTIONS, SEES, checked, failures, of

posix = pytest.mark.skipif(os.name != "posix", reason="signals as of POSIX")


def python(code, *words):
    return [sys.executable, "-c", code, *words]


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    path = tmp_path_factory.mktemp("c") / "attention"
    source = Path(__file__).with_name("attention.c")
    subprocess.run([compiler, "-O2", "-o", path, source, "-lm"], check=True)
    return str(path)


FAILING = {
    "": "",
    "unstable": "extreme_logits weighted_mean future_unseen",
    "strict": "causal causal_cross uses_together large_sizes",
}


@pytest.mark.long
@pytest.mark.parametrize("defect", FAILING)
def test_a_program_in_c(program, defect):
    fn = Subprocess(f"{program} {defect} {{input}} {{output}}")
    report = check(of(fn, "softmax", "causal", layout="nd"), rng=0)
    assert failures(report) == {*FAILING[defect].split()}, str(report)
    if defect:
        script = next(r.reproducer for r in report.results if r.reproducer)
        assert f"Subprocess(['{program}'" in script


# Exact attention with its options and gradients, or moments, in Python.
PYTHON = """
import sys
from importlib import import_module
import numpy as np, refattn

npz = sys.argv[1] == "npz"

def answer(source, target):
    given = dict(np.load(source) if npz else import_module("safetensors.numpy").load_file(source))
    if "x" in given:
        found = refattn.moments.estimate(given["x"])._asdict()
    else:
        q, k, v = (given.pop(name) for name in "qkv")
        lse, d_out = given.pop("return_lse", False), given.pop("d_out", None)
        if "window" in given:
            given["window"] = tuple(None if x < 0 else int(x) for x in given["window"])
        for name, kind in (("causal", bool), ("softcap", float)):
            given |= {name: kind(given[name])} if name in given else {}
        if "mask" in given:
            given["mask"] = given["mask"].astype(bool)
        out, back = refattn.vjp(refattn.attend, q, k, v, scale=q.shape[-1] ** -0.5, **given)
        found = {"out": out.out} | ({"lse": out.lse} if lse else {})
        if d_out is not None:
            dq, dk, dv = back((d_out, None))[:3]
            found |= {"dq": dq, "dk": dk, "dv": dv}
    if npz:
        np.savez(target, **found)
    else:
        import_module("safetensors.numpy").save_file(found, target)

answer(*sys.argv[2:])
"""


@contextlib.contextmanager
def in_python(folder, form="npz", code=PYTHON, **more):
    path = folder / "program.py"
    path.write_text(code, encoding="utf-8")
    run = Subprocess([sys.executable, str(path), form], format=form, **more)
    with contextlib.closing(run) as fn:
        yield fn


@pytest.mark.long
@pytest.mark.parametrize("moments", [False, True])
def test_a_program_with_npz_files(tmp_path, moments):
    with in_python(tmp_path, **({"names": ("x",)} if moments else {})) as fn:
        adapter = of(fn, "moments" if moments else "softmax")
        report = check(adapter, checks=["contract"], rng=0)
    assert report.verdict == "PASS", str(report)


@pytest.mark.soak
def test_a_program_with_options(tmp_path):
    """A side of a window that has no limit is -1 in the file."""
    with in_python(tmp_path) as fn:
        report = checked(of(fn, "softmax", *SEES, *OPTIONS, "lse"), *OF_OPTIONS)
    assert report.verdict == "PASS", report


@pytest.mark.long
@pytest.mark.parametrize("form", ["npz", "safetensors"])
def test_a_program_writes_gradients(form, tmp_path):
    if form == "safetensors":
        pytest.importorskip("safetensors")
    for code, verdict in ((PYTHON, "PASS"), (PYTHON.replace('"dk": dk', '"dk": 2 * dk'), "FAIL")):
        with in_python(tmp_path, form, code) as fn:
            adapter = of(fn, "softmax", "vjp", same_value_size=True)
            report = check(adapter, checks=["gradients"], rng=0)
        assert report.verdict == verdict, report


@pytest.mark.long
def test_a_program_without_gradients(tmp_path):
    with in_python(tmp_path, code=PYTHON.replace("d_out is not None", "False")) as fn:
        report = check(of(fn, "softmax", "vjp"), checks=["gradients"], rng=0)
    assert report.results[0].got == "RuntimeError: the program wrote ['out'] and not `dq`"


def test_programs_that_write_dtypes_numpy_does_not_have():
    pytest.importorskip("safetensors")
    code = (
        "import json, sys\n"
        "head = {'out': {'dtype': 'F8_E4M3', 'shape': [2, 2], 'data_offsets': [0, 4]}}\n"
        "text = json.dumps(head).encode()\n"
        "open(sys.argv[2], 'wb').write(len(text).to_bytes(8, 'little') + text + bytes(4))\n"
    )
    run = Subprocess(python(code), format="safetensors")
    with pytest.raises(RuntimeError, match=r"`out` must have a dtype that NumPy has.* got F8_E4M3"):
        run(*np.ones((3, 2, 2)))


def test_programs_and_their_words():
    code = "import sys, numpy as np; np.savez(sys.argv[2], **{sys.argv[3]: np.eye(2)})"
    words = python(code, "{input}", "{output}")
    run = Subprocess([*words, "out"], format="npz", timeout=1e300)
    np.testing.assert_array_equal(run(*np.ones((3, 2, 2))), np.eye(2))
    run = Subprocess([*words, "mean"], format="npz", names=("x",))
    with pytest.raises(RuntimeError, match=r"the program wrote \['mean'\] and not `cov`"):
        run(np.ones((2, 2)))


def test_programs_of_recurrences_write_states_and_gradients_of_gates():
    code = (
        "import sys, numpy as np\n"
        "x = dict(np.load(sys.argv[1]))\n"
        "more = {('d' if k in 'qkv' else 'd_') + k: x[k] for k in x if k != 'd_out'}\n"
        "np.savez(sys.argv[2], out=x['q'], state=3 * x['q'], **more)\n"
    )
    run, q = Subprocess(python(code), format="npz"), np.ones((2, 2))
    out, state = run(q, q, q, initial_state=q)
    np.testing.assert_array_equal(state, 3 * out)
    *_, d_removal, d_beta = run(q, q, q, removal=(q, 2 * q), beta=q[0], d_out=q)
    np.testing.assert_array_equal(d_removal, (q, 2 * q))
    assert isinstance(d_removal, tuple)
    assert d_beta.shape == (2,)


@pytest.mark.parametrize("format", ["npz", "safetensors"])
def test_programs_get_scalars_without_axes(tmp_path, format):
    if format == "safetensors":
        pytest.importorskip("safetensors")
    kept = tmp_path / f"kept.{format}"
    code = f"import shutil, sys; shutil.copy(sys.argv[1], {str(kept)!r})"
    run = Subprocess(python(code), format=format)
    q = np.ones((4, 3, 2))[:, ::2]
    with pytest.raises(RuntimeError, match="wrote no readable result"):
        run(
            *(q, q, q),
            num_features=2,
            seed=5,
            causal=True,
            mask=np.ones((2, 2), bool),
            window=(2, None),
            softcap=1.0,
            bias=np.ones((2, 2), np.float32),
        )
    found = run._read(str(kept))
    assert {name: (x.shape, str(x.dtype)) for name, x in found.items()} == {
        **dict.fromkeys("qkv", ((4, 2, 2), "float64")),
        **dict.fromkeys(("num_features", "seed", "causal"), ((), "int64")),
        "mask": ((2, 2), "uint8"),
        "window": ((2,), "int64"),
        "softcap": ((), "float64"),
        "bias": ((2, 2), "float32"),
    }
    assert found["window"].tolist() == [2, -1]
    assert found["seed"] == 5


@posix
def test_a_crash_of_a_program_is_a_failure():
    run = Subprocess(python("import ctypes; ctypes.string_at(0)"), format="npz")
    report = check(run, estimator="softmax", rng=0, checks=["contract", "value_length"])
    contract = report.results[0]
    assert (contract.status, contract.severity) == ("FAIL", "contract")
    assert contract.got.startswith("RuntimeError: the program ended by SIGSEGV (signal 11)")
    assert "; the command was " in contract.got
    assert contract.got.endswith(" '{input}' '{output}', with q, k, v in the file")
    assert "Subprocess([" in contract.reproducer
