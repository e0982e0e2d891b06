"""The command line: numbers against direct evaluation, and one clear line for bad input."""

import importlib
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from refattn import __version__, cli, random_feature_attention, registry, softmax_attention
from refattn.compare import tolerated
from refattn.files import sample
from refattn.registry import DEFAULT

pytest.importorskip("rich")
testing = pytest.importorskip("click.testing")

WIDE = {"COLUMNS": "200"}  # tables have all columns
_commands = importlib.import_module("refattn.cli.compare")

ESTIMATORS = dict.fromkeys(x.name for x in registry.ESTIMATORS.values() if x.approximates)
FIRST, SECOND = DEFAULT[:2]


def stand_in(monkeypatch, name, fn):
    """Put another function in the place of an estimator."""
    records = registry.ESTIMATORS
    monkeypatch.setitem(records._records, name, records[name]._replace(fn=fn))


def refattn(*args):
    return testing.CliRunner().invoke(cli.commands(), [str(arg) for arg in args], env=WIDE)


def compare(*args):
    result = refattn("compare", *args)
    assert result.exit_code == 0, result.output
    known = re.compile(r"(?:skipped|estimated time|read as float32): |\w+: \d+ of \d+ after ")
    assert all(map(known.match, result.stderr.splitlines()))
    return result.stdout


def report(folder, *args):
    path = folder / "report.json"
    compare(*args, "--json", path)

    def refuse(token):
        raise AssertionError(f"{token} is not JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


def errors(report):
    return {
        (x["estimator"], x["samples"]): np.array(x["error_per_draw"]) for x in report["results"]
    }


def relative(estimate, exact):
    return np.sqrt(np.sum((estimate - exact) ** 2, (-2, -1)) / np.sum(exact**2, (-2, -1)))


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 3, 6, 4))
    k, v = rng.standard_normal((2, 2, 3, 7, 4))
    return {"q": q, "k": k, "v": v}


@pytest.fixture
def npz(tmp_path, arrays):
    path = tmp_path / "[qkv].npz"
    np.savez(path, **arrays, other=np.array("ignored"))
    return path


@pytest.mark.long
def test_default_data():
    lines = compare().splitlines()
    assert lines[0].startswith("minilm_zen128_slice.npz: q (2, 4, 128, 32)")
    assert "float32" in lines[0]
    assert lines[1].startswith("scale 0.176777, not causal, seed 0, draws 3")
    assert " ".join(lines[2].split()) == (
        "estimator S mean error ± worst head which seconds ratio tolerated"
    )
    assert "; tolerated: mean error in all layers of all-MiniLM-L6" in lines[-1]
    rows = [line.split() for line in lines[4:-1]]
    assert rows[0][0] == "exact"
    assert rows[0][-1] == "1.00"
    assert rows[1][:3] == ["mean", "of", "v"]
    expected = [(name, str(s)) for name in DEFAULT for s in (8, 32, 128, 512)]
    expected = [(name, s) for name, s in expected if not ("lara" in name and s == "512")]
    assert [tuple(row[:2]) for row in rows[2:]] == expected
    assert max(map(len, lines[:-1])) <= 100
    assert not any("…" in line for line in lines)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.25])
@pytest.mark.parametrize("dtype", [None, "float32"])
def test_errors_are_those_of_direct_evaluation(tmp_path, npz, arrays, causal, scale, dtype):
    args = ["--causal"] * causal + ([] if scale is None else ["--scale", scale])
    args += [] if dtype is None else ["--dtype", dtype]
    seen = report(tmp_path, npz, "--features", "6,2", "--seed", 7, "--draws", 2, *args)
    q, k, v = (x.astype(dtype or "float64") for x in arrays.values())
    exact = softmax_attention(*(x.astype("float64") for x in (q, k, v)), scale=scale, causal=causal)
    expected = {("exact", None): [softmax_attention(q, k, v, scale=scale, causal=causal)] * 2}
    mask = np.tri(6, 7, 1) if causal else np.ones((6, 7))
    expected["mean of v", None] = [mask / mask.sum(-1, keepdims=True) @ arrays["v"]]
    for samples in (2, 6):
        for coupling in ("iid", "orthogonal"):
            expected[f"rfa-{coupling}", samples] = [
                random_feature_attention(
                    *(q, k, v),
                    num_features=samples,
                    coupling=coupling,
                    rng=np.random.SeedSequence(7, spawn_key=(samples, draw)),
                    scale=scale,
                    causal=causal,
                )
                for draw in range(2)
            ]
    found = errors(seen)
    for key, estimates in expected.items():
        direct = [relative(estimate, exact) for estimate in estimates]
        np.testing.assert_allclose(found[key], direct, rtol=1e-6, atol=1e-15)
    assert seen["dtype"] == (dtype or "float64")
    assert seen["scale"] == (scale or 0.5)
    assert seen["causal"] is causal


def test_json(tmp_path, npz):
    seen = report(tmp_path, npz, "--features", 4)
    assert {key: value for key, value in seen.items() if key != "results"} == {
        "refattn": __version__,
        "numpy": np.__version__,
        "file": "[qkv].npz",
        "shapes": {"q": [2, 3, 6, 4], "k": [2, 3, 7, 4], "v": [2, 3, 7, 4]},
        "dtype": "float64",
        "scale": 0.5,
        "causal": False,
        "seed": 0,
        "draws": 3,
        "skipped": [],
        "tolerated": {x: y for x, y in tolerated()._asdict().items() if x != "errors"},
    }
    limits = tolerated().errors
    for row in seen["results"]:
        assert row["error_tolerated"] == limits.get(row["estimator"])
    exact, mean_of_v, *rest = seen["results"]
    assert exact["ratio"] == 1
    assert mean_of_v["seconds"] is mean_of_v["ratio"] is None
    for row in (exact, *rest):
        assert row["ratio"] == pytest.approx(row["seconds"] / exact["seconds"])
        assert np.shape(row["error_per_draw"]) == (3, 2, 3)
    for row in seen["results"]:
        per_head = np.array(row["error_per_head"])
        np.testing.assert_allclose(per_head, np.mean(row["error_per_draw"], 0))
        assert row["error_mean"] == pytest.approx(per_head.mean())
        assert row["error_worst"] == per_head.max() == per_head[tuple(row["worst_head"])]


def test_json_is_strict_where_an_estimate_overflows(tmp_path, monkeypatch, npz):
    stand_in(monkeypatch, FIRST, lambda q, k, v, **options: np.inf * v[..., :6, :])
    row = report(tmp_path, npz, "--features", 4)["results"][2]
    assert row["estimator"] == FIRST
    assert row["error_mean"] is row["error_worst"] is row["error_per_head"][0][0] is None


def test_seeds(tmp_path, npz):
    first, again, other = (
        errors(report(tmp_path, npz, "--features", "2,4", "--seed", seed)) for seed in (1, 1, 2)
    )
    for key in first:
        np.testing.assert_array_equal(first[key], again[key])
    assert np.all(first[FIRST, 2] != other[FIRST, 2])
    draws = first[FIRST, 2]
    assert np.all(draws[0] != draws[1])
    assert np.all(draws[1] != draws[2])


def test_numbers_do_not_depend_on_what_else_is_selected(tmp_path, npz):
    full = errors(report(tmp_path, npz, "--features", "2,4,8"))
    some = errors(
        report(
            tmp_path, npz, "--features", "8,2", "--estimators", f"{SECOND}, {SECOND}", "--draws", 2
        )
    )
    assert list(some)[2:] == [(SECOND, 2), (SECOND, 8)]
    for key in list(some)[2:]:
        np.testing.assert_array_equal(some[key], full[key][:2])


def test_safetensors(tmp_path, npz, arrays):
    numpy = pytest.importorskip("safetensors.numpy")
    path = tmp_path / "qkv.safetensors"
    numpy.save_file({**arrays, "other": np.zeros(1, dtype=np.int8)}, path)
    a, b = (errors(report(tmp_path, file, "--features", 2)) for file in (npz, path))
    assert list(a) == list(b)
    for key in a:
        np.testing.assert_array_equal(a[key], b[key])


@pytest.mark.parametrize("options", [(), ("--dtype", "float32")])
@pytest.mark.parametrize(("suffix", "dtype"), [("npz", "float16"), ("safetensors", "bfloat16")])
def test_narrow_dtypes_are_widened(tmp_path, arrays, suffix, dtype, options):
    narrow, single = tmp_path / f"narrow.{suffix}", tmp_path / "single.npz"
    if dtype == "float16":
        arrays = {name: x.astype(dtype) for name, x in arrays.items()}
        np.savez(narrow, **arrays)
    else:
        ml_dtypes = pytest.importorskip("ml_dtypes")
        save_file = pytest.importorskip("safetensors.numpy").save_file
        arrays = {name: x.astype(ml_dtypes.bfloat16) for name, x in arrays.items()}
        save_file(arrays, narrow)
    np.savez(single, **{name: x.astype(np.float32) for name, x in arrays.items()})
    result = refattn("compare", narrow, "--features", 2, *options)
    assert result.stderr == ("" if options else f"read as float32: the file has {dtype}\n")
    a, b = (report(tmp_path, file, "--features", 2, *options) for file in (narrow, single))
    assert a["dtype"] == "float32"
    np.testing.assert_array_equal(errors(a)[FIRST, 2], errors(b)[FIRST, 2])


def test_per_head(npz):
    lines = compare(npz, "--features", "2,4", "--estimators", FIRST, "--per-head").splitlines()
    start = lines.index("") + 1
    assert lines[start].split() == f"head exact mean of v {FIRST}@2 {FIRST}@4".split()
    heads = [line.split()[0] for line in lines[start + 2 :]]
    assert heads == ["0,0", "0,1", "0,2", "1,0", "1,1", "1,2"]


def test_one_head_and_grouped_heads(tmp_path, arrays):
    path = tmp_path / "qkv.npz"
    np.savez(path, **{name: x[0, 0] for name, x in arrays.items()})
    lines = compare(path, "--features", 2, "--per-head", "--draws", 1).splitlines()
    assert lines[-1].startswith("-  ")
    one = report(tmp_path, path, "--features", 2)["results"][0]
    assert one["worst_head"] == []
    np.savez(path, q=np.tile(arrays["q"], (1, 2, 1, 1)), k=arrays["k"], v=arrays["v"])
    grouped = report(tmp_path, path, "--features", 2)["results"]
    assert all(np.shape(row["error_per_head"]) == (2, 6) for row in grouped)


def test_plot(tmp_path, npz):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.png"
    compare(npz, "--features", "2,4", "--plot", path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_plot_of_errors_that_are_zero_or_not_finite(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    path = tmp_path / "qkv.npz"
    np.savez(path, q=np.ones((3, 2)), k=np.ones((1, 2)), v=np.ones((1, 2)))
    compare(path, "--features", 1, "--plot", tmp_path / "zero.png")
    for name in ESTIMATORS:
        stand_in(monkeypatch, name, lambda q, k, v, **options: q * np.nan)
    compare(path, "--features", 1, "--plot", tmp_path / "nan.png")


def test_version_and_help():
    assert refattn("--version").stdout == f"refattn, version {__version__}\n"
    text = refattn("compare", "--help").stdout
    text = "".join(text.split())
    assert all(name in text for name in ESTIMATORS)


# --- bad input: exit status 2, one clear line, no traceback ---------------------------------------


def fails(*args):
    result = refattn("compare", *args)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    *usage, line = result.stderr.splitlines()
    assert line.startswith("Error: ")
    assert not usage or usage[0] == "Usage: refattn compare [OPTIONS] [FILE]"
    return line


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": None}, "FILE must hold arrays q, k and v: .* has no k"),
        ({"q": None, "v": None}, "has no q and no v"),
        ({"q": np.ones(4)}, r"`q` must have at least 2 axes, got shape \(4,\)"),
        ({"k": np.ones((7, 5))}, "`q` and `k` must have last axes of one length"),
        ({"v": np.ones((8, 4))}, "`k` and `v` must have next-to-last axes of one length"),
        ({"k": np.ones((5, 3, 7, 4)), "v": np.ones((5, 3, 7, 4))}, "leading axes that broadcast"),
        ({"q": np.ones((6, 4), int)}, "`q` must have dtype .* got int64: cast it first"),
        ({"q": np.ones((6, 4), "float16")}, "`k` must have the dtype of `q`, float16, got float64"),
        ({"q": np.ones((6, 4), "complex128")}, "`q` must have dtype .* got complex128"),
        ({"q": np.ones((6, 4), "float32")}, "`k` must have the dtype of `q`, float32"),
        ({"q": np.full((6, 4), "a")}, "`q` must have dtype"),
        ({"q": np.full((6, 4), None)}, "cannot read .*Object arrays cannot be loaded"),
        ({"v": np.full((7, 4), np.nan)}, "`v` must be finite in float64, got NaN or infinity"),
        ({"k": np.full((7, 4), -np.inf)}, "`k` must be finite"),
        ({"v": np.zeros((7, 4))}, "exact attention must be finite and not all zero"),
        ({"q": np.ones((0, 4))}, "`q` must have at least one head and one row, got shape"),
        ({"q": np.ones((0, 3, 6, 4))}, "`q`, `k` and `v` must have leading axes"),
        ({"q": np.full((6, 4), 1e200), "k": np.full((7, 4), 1e200)}, "exact attention must be fin"),
    ],
)
def test_bad_arrays(tmp_path, arrays, changes, message):
    path = tmp_path / "bad.npz"
    np.savez(path, **{name: x for name, x in (arrays | changes).items() if x is not None})
    assert re.search(message, fails(path))


def test_longdouble_and_overflow_in_a_cast(tmp_path, arrays):
    path = tmp_path / "bad.npz"
    np.savez(path, **(arrays | {"k": np.full((7, 4), 1e200)}))
    assert "`k` must be finite in float32" in fails(path, "--dtype", "float32")
    if np.dtype(np.longdouble).itemsize > 8:
        np.savez(path, **{name: x.astype(np.longdouble) for name, x in arrays.items()})
        assert "`q` must have dtype float32 or float64, got float128" in fails(path)
        compare(path, "--dtype", "float64", "--features", 2)


def test_bad_files(tmp_path, npz, arrays):
    pytest.importorskip("safetensors")
    assert "does not exist" in fails(tmp_path / "nothing.npz")
    assert "is a directory" in fails(tmp_path)
    whole = npz.read_bytes()
    for name, content in {
        "truncated.npz": whole[: len(whole) // 2],
        "text.npz": b"q,k,v\n1,2,3\n",
        "empty.npz": b"",
        "array.npz": b"\x93NUMPY\x01\x00",
        "text.safetensors": b"q,k,v\n1,2,3\n",
        "empty.safetensors": b"",
        "npz.safetensors": whole,
    }.items():
        path = tmp_path / name
        path.write_bytes(content)
        assert f"cannot read {str(path)!r}: " in fails(path)
    corrupt = bytearray(whole)
    corrupt[len(whole) // 4] ^= 0xFF
    (tmp_path / "corrupt.npz").write_bytes(corrupt)
    assert "Bad CRC-32" in fails(tmp_path / "corrupt.npz")
    with zipfile.ZipFile(tmp_path / "bytes.npz", "w") as file:
        file.writestr("q", "1,2,3")
    assert "`q` is not an array" in fails(tmp_path / "bytes.npz", "--dtype", "float32")
    (tmp_path / "qkv.txt").write_text("")
    assert "FILE must end in .npz or .safetensors" in fails(tmp_path / "qkv.txt")


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "F8_E8M0", "F6_E2M3", "F4"])
def test_safetensors_of_dtypes_that_numpy_does_not_have(tmp_path, dtype):
    pytest.importorskip("safetensors", minversion="0.7")
    size = {"F6_E2M3": 6, "F4": 4}.get(dtype, 8)  # bytes of 8 numbers
    header = {
        name: {"dtype": dtype, "shape": [2, 4], "data_offsets": [i * size, (i + 1) * size]}
        for i, name in enumerate("kqv")
    }
    text = json.dumps(header).encode()
    path = tmp_path / "qkv.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(3 * size))
    message = f"`q` must have a dtype that NumPy has, or bfloat16, got {dtype}: cast it"
    assert message in fails(path)


@pytest.mark.parametrize("value", ["0", "-1", "8,0", "2.5", "many", "", "8,,32", "8,", "9" * 5000])
def test_bad_features(npz, value):
    assert "must be positive integers separated by commas" in fails(npz, "--features", value)


def test_bad_options(tmp_path, npz):
    assert f"must be all or of {', '.join(ESTIMATORS)}, got 'none'" in fails("--estimators", "none")
    assert "got ''" in fails("--estimators", "")
    assert "1<=x<=1000000" in fails("--draws", 0)
    assert "at least 0 and below 2**128, got -1" in fails("--seed", -1)
    assert "float16" in fails("--dtype", "float16")
    for scale in ("0", "-1", "nan", "inf"):
        assert "`scale` must be a positive finite real number" in fails(npz, f"--scale={scale}")
    assert f"{FIRST} with S = {10**15}: " in fails(npz, "--features", 10**15, "--estimators", FIRST)
    for count in (2**63, 10**400):
        assert "below 2**63, got" in fails(npz, "--features", count)


@pytest.mark.parametrize(("option", "suffix"), [("--json", ".json"), ("--plot", ".png")])
def test_outputs_are_checked_before_the_work(tmp_path, monkeypatch, npz, option, suffix):
    monkeypatch.setattr(_commands, "measure", None)
    (tmp_path / f"folder{suffix}").mkdir()
    (tmp_path / "file").write_text("")
    for place in ("nowhere/out", "folder", "file/out"):
        assert "cannot write to" in fails(npz, option, tmp_path / f"{place}{suffix}")
    before = npz.read_bytes()
    assert f"must end in {suffix}" in fails(option, npz)
    assert npz.read_bytes() == before


def test_failure_while_writing(npz, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    result = refattn("compare", npz, "--features", 2, "--json", tmp_path / "out.json")
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: cannot write the results: ")
    assert "No space left on device" in result.stderr


def test_missing_packages(tmp_path, monkeypatch, capsys):
    install = "needs `pip install 'refattn[cli]'`"
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert f"--plot {install}" in fails("--plot", tmp_path / "out.png")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    path = tmp_path / "qkv.safetensors"
    path.write_bytes(b"")
    assert f"reading .safetensors {install}" in fails(path)
    for name in ("rich", "click"):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(SystemExit) as exit:
            cli.main()
        assert exit.value.code == 2
        assert capsys.readouterr().err == f"refattn: error: the command line {install}\n"


def test_missing_sample(monkeypatch):
    monkeypatch.setattr(sample, "_NAME", "nothing.npz")
    assert "FILE must be given: the sample nothing.npz is not installed" in fails()


def test_process(npz):
    def run(*args):
        return subprocess.run(
            [sys.executable, "-W", "error", "-m", "refattn", "compare", str(npz), *args],
            capture_output=True,
            text=True,
            timeout=60,
            env={"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"},
        )

    good = run("--features", "2")
    assert good.returncode == 0, good.stderr
    assert good.stderr == ""
    assert good.stdout.isascii()
    bad = run("--scale=0")
    assert bad.returncode == 2
    assert bad.stdout == ""
    assert bad.stderr.startswith("Error: `scale` must be a positive")
    assert bad.stderr.count("\n") == 1


def test_what_an_estimator_refuses_is_skipped(tmp_path, npz):
    path = tmp_path / "out.json"
    words = ["--features", "2,9,11", "--estimators", "lara,lara-own,rfa-iid", "--json", path]
    result = refattn("compare", npz, *words)
    assert result.stderr == (
        "skipped: S = 9, 11 of lara-balance, lara-own (more than the 6 queries or 7 keys)\n"
    )
    seen = json.loads(path.read_text())
    assert [x["estimator"] for x in seen["skipped"]] == ["lara-balance"] * 2 + ["lara-own"] * 2
    assert len(seen["results"]) == 7


def test_the_whole_registry(npz):
    names = {
        line.split()[0]
        for line in compare(npz, "--features", 2, "--estimators", "all").splitlines()[4:]
    }
    assert set(ESTIMATORS) <= names
