"""`refattn verify`: verdicts on files, what is printed and drawn, and one line for bad input."""

import json
import math
import re
import shutil
import subprocess

import numpy as np
import pytest

import refattn
from refattn import naive, verification
from refattn.features import elu_features
from refattn.files.tensors import open_tensors
from refattn.rounding import predict
from refattn.rounding.formats import FORMATS
from refattn.verification import given as verification_given
from refattn.verification import verdict as verification_verdict
from tests.cli import running
from tests.cli.running import loads
from tests.rounding.rounded import made
from tests.validation import guide_blocks

pytest.importorskip("rich")
save_file = pytest.importorskip("safetensors.numpy").save_file
ml_dtypes = pytest.importorskip("ml_dtypes")

GUIDE = guide_blocks.page("numbers")


def run(*args):
    return running.run("verify", *args)


def fails(*args):
    result = run(*args)
    assert result.exit_code == 2, result.output
    *usage, line = result.stderr.splitlines()
    assert line.startswith("Error: ")
    assert not usage or usage[0] == "Usage: refattn verify [OPTIONS] FILE..."
    return str(line)


def report(folder, *args):
    result = run(*args, "--json", folder / "report.json")
    assert result.exit_code in (0, 1, 3), result.output
    assert result.stderr == ""
    return loads((folder / "report.json").read_text())


def save(path, arrays, dtype="bfloat16"):
    """Write arrays as a kernel holds them; the mask as it is."""
    to = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    given = {n: x if x.dtype == bool else x.astype(to) for n, x in arrays.items()}
    if path.suffix == ".npz":
        np.savez(path, **given)
    else:
        save_file({n: np.ascontiguousarray(x) for n, x in given.items()}, path)
    return path


FLASH = ("--profile", "flash")
M = 64  # keys
WITHOUT = np.arange(M) != 37


def sample(dtype="bfloat16", n=M):
    q, k, v = (FORMATS[dtype].round(x[1, :4]) for x in refattn.load_sample())
    return q[:, -n:], k[:, -M:], v[:, -M:]


def problem(dtype="bfloat16", n=M, **options):
    """Queries, keys and values, and the exact output, rounded."""
    q, k, v = sample(dtype, n=n)
    return {"q": q, "k": k, "v": v, "out": naive.softmax_attention(q, k, v, **options)}


@pytest.fixture
def right(tmp_path):
    return save(tmp_path / "right.safetensors", problem())


@pytest.fixture
def wrong(tmp_path):
    return save(tmp_path / "wrong.safetensors", problem(mask=WITHOUT))


@pytest.fixture
def small(tmp_path):
    q, k, v = (x[:1, :1] * (i < 2) for i, x in enumerate(sample()))
    out = naive.softmax_attention(q, k, v)
    return save(tmp_path / "small.safetensors", {"q": q, "k": k, "v": v, "out": out})


def test_a_correct_output_passes(right):
    result = run(right)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    shapes = ", ".join(f"{x} (4, 64, 32)" for x in ("q", "k", "v", "out"))
    assert lines[0] == f"right.safetensors: {shapes}, bfloat16"
    assert lines[1] == "softmax, scale 0.176777, not causal"
    assert lines[2].startswith("PASS: a correct kernel in bfloat16 gives such numbers (profile")
    assert result.stderr == ""


def test_a_lost_key_fails_and_is_named(tmp_path, wrong):
    result = run(wrong)
    assert result.exit_code == 1
    assert "\nFAIL: no correct kernel in bfloat16" in result.stdout
    assert re.search(r"9\d\.\d%  key 37 is missing: (0\.99|1)", result.stdout)
    found = report(tmp_path, wrong)
    assert (found["verdict"], found["profile"]) == ("FAIL", None)
    assert found["suspects"][0]["name"].startswith("key")
    assert found["suspects"][0]["estimate"] == pytest.approx(1, abs=0.02)


def test_the_same_is_said_from_python(tmp_path, wrong):
    arrays = {n: x.astype(ml_dtypes.bfloat16).astype(float) for n, x in problem().items()}
    out = problem(mask=WITHOUT)["out"].astype(ml_dtypes.bfloat16).astype(float)
    verdict = refattn.verify(**(arrays | {"out": out}), dtype="bfloat16", profile="flash")
    expected, found = json.loads(verdict.to_json()), report(tmp_path, wrong, *FLASH)
    for name in expected.keys() - {"seconds"}:
        assert found[name] == expected[name], name


def test_what_the_report_holds(tmp_path, right):
    found = report(tmp_path, right, "--window", "20,3", *FLASH)
    assert found["file"] == "right.safetensors"
    assert found["shapes"]["out"] == [4, 64, 32]
    assert set(found["dtypes"].values()) == {"bfloat16"}
    assert (found["estimator"], found["causal"], found["softcap"]) == ("softmax", False, None)
    assert (found["window"], found["scale"]) == ([20, 3], pytest.approx(32**-0.5))
    assert set(verification.Verdict._fields) <= set(found)
    assert found["verdict"] == "FAIL"


def test_several_files(tmp_path, right, wrong, small):
    for files, status in (((right, right), 0), ((right, wrong, small), 1), ((small, right), 3)):
        result = run(*files, *FLASH)
        assert result.exit_code == status
        parts = result.stdout.split("\n\n")
        assert [x.partition(":")[0] for x in parts] == [x.name for x in files]
    found = report(tmp_path, right, wrong, small, *FLASH)
    assert [x["verdict"] for x in found] == ["PASS", "FAIL", "UNDERPOWERED"]
    words = "`--plot` must come with one FILE, got 2"
    assert words in fails(right, wrong, "--plot", tmp_path / "x.png")
    (tmp_path / "bad.npz").write_bytes(b"")
    result = run(right, tmp_path / "bad.npz", wrong, *FLASH)
    assert result.exit_code == 2
    assert result.stdout.splitlines()[0].startswith("right.safetensors: ")
    assert result.stderr.startswith("Error: bad.npz: ")


BIAS = np.linspace(-1, 1, M * 50).reshape(50, M)
SEEN = np.arange(M) % 3 > 0
CONVENTIONS = {  # and the words of the command
    "causal": ({"causal": True}, "--causal"),
    "scale": ({"scale": 0.1}, "--scale 0.1"),
    "window": ({"window": (20, 3)}, "--window 20,3"),
    "left": ({"window": (20, None)}, "--window 20,"),
    "right": ({"window": (None, 0)}, "--window ,0"),
    "softcap": ({"softcap": 5.0}, "--softcap 5"),
    "mask": ({"mask": SEEN}, ""),
    "bias": ({"bias": FORMATS["bfloat16"].round(BIAS)}, ""),
    "sinks": ({"sinks": np.array([-1.0, 1.0, 2.0, 3.5])}, ""),
    "all": (
        {"causal": True, "scale": 0.2, "window": (50, 1), "softcap": 9.0, "mask": SEEN},
        "--causal --scale 0.2 --window 50,1 --softcap 9",
    ),
}


@pytest.mark.parametrize("name", CONVENTIONS)
def test_conventions(tmp_path, name):
    options, words = CONVENTIONS[name]
    arrays = problem(n=50, **options)
    more = {x: options[x] for x in ("mask", "bias", "sinks") if x in options}
    path = save(tmp_path / "file.safetensors", arrays | more)
    result = run(path, *words.split())
    assert result.exit_code == 0, result.stdout
    without = save(tmp_path / "without.safetensors", arrays) if more else path
    assert run(without, *FLASH).exit_code == 1


def test_layouts(tmp_path, wrong):
    arrays = {n: np.swapaxes(x, 0, 1) for n, x in problem(mask=WITHOUT).items()}
    swapped = save(tmp_path / "swapped.safetensors", arrays)
    found = report(tmp_path, swapped, "--layout", "bnhd", *FLASH)
    expected = report(tmp_path, wrong, *FLASH)
    for name in ("verdict", "z", "tests", "suspects"):
        assert found[name] == expected[name]


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_wide_arrays_of_narrow_numbers(tmp_path, suffix, wrong):
    arrays = {n: FORMATS["bfloat16"].round(x) for n, x in problem(mask=WITHOUT).items()}
    path = save(tmp_path / f"wide.{suffix}", arrays, "float32")
    found = report(tmp_path, path, "--dtype", "bfloat16", *FLASH)
    expected = report(tmp_path, wrong, *FLASH)
    assert found["z"]["rms"] == pytest.approx(expected["z"]["rms"])  # threads add in any order
    for name in ("verdict", "dtype", "out_dtype"):
        assert found[name] == expected[name]
    assert [x["name"] for x in found["tests"]] == [x["name"] for x in expected["tests"]]
    assert [x["text"] for x in found["suspects"]] == [x["text"] for x in expected["suspects"]]


def test_an_output_in_a_wider_type(tmp_path):
    arrays = problem()
    narrow = {x: arrays[x].astype(ml_dtypes.bfloat16) for x in "qkv"}
    for out, dtype in (
        (arrays["out"].astype(np.float32), "float32"),
        (arrays["out"].astype(ml_dtypes.bfloat16).astype(np.float32), "bfloat16"),
    ):
        save_file(narrow | {"out": out}, tmp_path / "file.safetensors")
        found = report(tmp_path, tmp_path / "file.safetensors", "--profile", "math")
        assert (found["verdict"], found["out_dtype"]) == ("PASS", dtype)


def test_lse_is_judged(tmp_path):
    arrays = problem("float32")
    scores = arrays["q"] @ np.swapaxes(arrays["k"], -1, -2) * 32**-0.5
    lse = np.log(np.sum(np.exp(scores), -1))
    path = tmp_path / "file.safetensors"
    result = run(save(path, arrays | {"lse": lse}, "float32"))
    assert result.exit_code == 0
    assert "lse (4, 64)" in result.stdout
    result = run(save(path, arrays | {"lse": lse + 0.001}, "float32"))
    assert result.exit_code == 1
    assert "lse is 0.001 ± " in result.stdout  # not by the profile that rounds queries


@pytest.fixture
def features(tmp_path):
    """Files of random features and of linear attention, and what they may not hold."""
    q, k, v = (0.3 * x[1, :, -M:].astype(float) for x in refattn.load_sample())
    omega = np.random.default_rng(0).normal(size=(24, 32)).astype(np.float32).astype(float)
    weights = elu_features(q) @ np.swapaxes(elu_features(k), -1, -2)
    arrays = {"q": q, "k": k, "v": v, "out": weights @ v / np.sum(weights, -1, keepdims=True)}
    rfa = {"out": naive.random_feature_attention(q, k, v, omega=omega), "omega": omega}
    for name, more in {
        "rfa": rfa,
        "linear": {},
        "mask": {"mask": np.ones((M, M), bool)},
        "bias": {"bias": np.zeros((M, M))},
        "sinks": {"sinks": np.zeros(4)},
    }.items():
        save(tmp_path / f"{name}.safetensors", arrays | more, "float32")
    return tmp_path


def test_random_features_and_linear_attention(features):
    rfa, linear = (features / f"{x}.safetensors" for x in ("rfa", "linear"))
    result = run(rfa, "--estimator", "rfa")
    assert result.exit_code in (0, 3), result.stdout
    assert "\nrfa, scale 0.176777, not causal\n" in result.stdout
    result = run(rfa, "--profile", "math")
    assert result.exit_code == 1
    assert "\nomega is not used: it is for --estimator rfa\n" in result.stdout
    assert run(linear, "--estimator", "linear").exit_code in (0, 3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("linear --estimator rfa", "`omega` must be in FILE for rfa"),
        ("linear --estimator linear --window 1,1", "`window` must not be given for linear"),
        ("linear --estimator linear --softcap 1", "`softcap` must not be given for linear"),
        ("mask --estimator linear", "`mask` must be of keys, (..., 1, m), for linear"),
        ("bias --estimator linear", "`bias` must not be given for linear"),
        ("sinks --estimator linear", "`sinks` must not be given for linear"),
    ],
)
def test_what_an_estimator_does_not_take(features, words, message):
    name, *words = words.split()
    assert message in fails(features / f"{name}.safetensors", *words)


def test_what_is_not_read_is_said(tmp_path):
    arrays = problem()
    out = arrays["out"]
    more = {"d_out": out, "spare": out}
    result = run(save(tmp_path / "file.safetensors", arrays | more), "--profile", "math")
    assert result.exit_code == 0
    assert "\nd_out is not used: there is no dq, dk or dv\nnot read: spare\n" in result.stdout


@pytest.mark.long("bnhd")
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
def test_gradients(tmp_path, layout):
    arrays = {x: y[:2] for x, y in problem().items()}
    d_out = np.random.default_rng(0).standard_normal(arrays["out"].shape)
    arrays["d_out"] = FORMATS["bfloat16"].round(d_out)
    arrays |= made("flash", *(arrays[x] for x in ("q", "k", "v", "d_out")), "bfloat16")

    def saved(name, left_out=(), **changed):
        given = {x: y for x, y in (arrays | changed).items() if x not in left_out}
        if layout == "bnhd":
            given = {x: np.swapaxes(y, 0, 1) for x, y in given.items()}
        return save(tmp_path / name, given)

    words = ("--layout", layout, *FLASH)
    result = run(saved("right.safetensors"), *words)
    assert result.exit_code == 0, result.stdout
    assert "\nPASS: out PASS, dq PASS, dk PASS, dv PASS\n" in result.stdout
    wrong = saved("wrong.safetensors", dk=np.roll(arrays["dk"], 1, 0))
    result = run(wrong, *words, "--plot", tmp_path / "x.png", "--json", tmp_path / "x.json")
    assert result.exit_code == 1
    assert "\nFAIL: out PASS, dq PASS, dk FAIL, dv PASS\n" in result.stdout
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"
    told = json.loads((tmp_path / "x.json").read_text("utf-8"))
    assert [*told["parts"]] == ["out", "dq", "dk", "dv"]
    assert (told["verdict"], told["of"], told["parts"]["dv"]["verdict"]) == ("FAIL", "dk", "PASS")
    assert told["alpha"] == 1e-6
    assert [x["alpha"] for x in told["parts"].values()] == [1e-6 / 4] * 4
    alone = saved("alone.safetensors", ("out", "dq", "dv"))
    assert "\nPASS: dk PASS\n" in run(alone, *words).stdout
    message = fails(alone, *words, "--estimator", "linear")
    assert "gradients are judged for softmax only, got linear" in message


def of_file(path, profile):
    """What is judged, its numbers, and the verdict."""
    tensors = open_tensors(path)
    found = verification_given.of_tensors(tensors)
    numbers = verification_verdict.parts_of(tensors, found)["out"].numbers
    return tensors, found, numbers, verification.judge(found, numbers, "bfloat16", profile)


@pytest.mark.parametrize("profile", ["flash", "fp8", None])
def test_z_of_heads_and_rows(profile, tmp_path):
    path = save(tmp_path / "file.safetensors", problem(n=40))
    tensors, found, numbers, verdict = of_file(path, profile)
    squares, counts = verification_verdict.z_by_row(found, numbers, "bfloat16", verdict.by)
    assert squares.shape == counts.shape == (4, 40)
    assert math.sqrt(np.sum(squares) / np.sum(counts)) == pytest.approx(verdict.z.rms)
    z = verification_verdict.z_of_head(found, numbers, "bfloat16", verdict.by, (2,))
    np.testing.assert_allclose(np.nansum(z * z, -1), squares[2])
    if profile == "flash":
        arrays = [np.stack([tensors.read(x, (h,)) for h in range(4)]) for x in ("q", "k", "v")]
        law = predict(*arrays, dtype="bfloat16", profile="flash")
        expected = (tensors.read("out", (2,)) - law.out[2]) / law.std[2]
        np.testing.assert_allclose(z, expected, rtol=1e-9, atol=1e-9)


def test_the_largest_z_is_that_of_the_figure(wrong):
    _, found, numbers, verdict = of_file(wrong, "flash")
    *head, row, column = verdict.z.where
    z = np.abs(verification_verdict.z_of_head(found, numbers, "bfloat16", verdict.by, tuple(head)))
    assert np.nanmax(z) == z[row, column] == pytest.approx(verdict.z.largest)


@pytest.mark.long
def test_pictures(tmp_path, right, wrong, small):
    pytest.importorskip("matplotlib")
    for path in (right, wrong, small):
        picture = tmp_path / f"{path.stem}.png"
        assert run(path, "--plot", picture).exit_code in (0, 1, 3)
        assert picture.read_bytes()[:4] == b"\x89PNG"
    q = np.ones((1100, 1))  # no law, and more queries than are drawn
    path = save(tmp_path / "one.safetensors", {"q": q, "k": q[:1], "v": q[:1], "out": q})
    assert run(path, "--plot", tmp_path / "one.png").exit_code in (0, 3)
    path = save(tmp_path / "nan.safetensors", {"q": q, "k": q, "v": q, "out": np.nan * q})
    assert run(path, "--plot", tmp_path / "nan.png").exit_code == 1
    empty = {"q": q[:0], "k": q, "v": q, "out": q[:0]}
    path = save(tmp_path / "empty.safetensors", empty)
    assert run(path).exit_code == 3
    assert "nothing to draw" in fails(path, "--plot", tmp_path / "empty.png")


def test_one_block_of_heads_is_in_memory(right, monkeypatch):
    tensors = open_tensors(right)
    read, asked = tensors.read, []

    def counted(name, head):
        asked.append((name, head))
        return read(name, head)

    monkeypatch.setattr(tensors, "read", counted)
    found = verification_given.of_tensors(tensors)
    for index in np.ndindex(found.lead):
        for _ in range(3):
            assert set(found.read(index)) == {"q", "k", "v"}
    assert sorted(asked) == [(x, (h,)) for x in ("k", "q", "v") for h in range(4)]


@pytest.mark.parametrize("shape", [(0, 5, 2), (5, 0, 2), (5, 5, 0), (0, 0, 0)])
@pytest.mark.parametrize("lead", [(), (2,), (0,)])
def test_empty_arrays(tmp_path, shape, lead):
    n, m, d_v = shape
    arrays = {"q": np.ones((*lead, n, 2)), "k": np.ones((*lead, m, 2))}
    arrays |= {"v": np.ones((*lead, m, d_v)), "out": np.zeros((*lead, n, d_v))}
    path = save(tmp_path / "file.safetensors", arrays)
    for words in ([], ["--causal"], ["--window", "1,1"], ["--estimator", "linear"]):
        result = run(path, *words)
        assert result.exit_code in (0, 3), result.output


def test_a_batch_of_none(tmp_path):
    path, x = tmp_path / "file.safetensors", np.ones((0, 4, 32, 16), ml_dtypes.bfloat16)
    save_file({"q": x, "k": x, "v": x, "out": x.astype(np.float32)}, path)  # of several tiles
    result = run(path)
    assert (result.exit_code, result.stderr) == (3, "")
    assert "\nUNDERPOWERED: " in result.stdout
    assert report(tmp_path, path)["out_dtype"] == "float32"


DAMAGED = {  # what is done to the arrays or to the file, and what is said of it
    "no q": (lambda x: x.pop("q"), "FILE must hold"),
    "no out": (lambda x: x.pop("out"), "`out`, `dq`, `dk` or `dv` must be in FILE, to be judged"),
    "d_out alone": (lambda x: {"dq": x["out"]}, "`dq` must come with `d_out`"),
    "out shape": (
        lambda x: {"out": x["out"][:, 1:]},
        r"`out` must have shape \(4, 64, 32\), .* got shape \(4, 63, 32\)",
    ),
    "k shape": (lambda x: {"k": x["k"][..., 1:]}, "`q` and `k` must have last axes of one length"),
    "lse shape": (lambda x: {"lse": x["out"][..., 0, 0]}, r"`lse` must have shape \(4, 64\)"),
    "mask shape": (lambda x: {"mask": np.ones((5, M), bool)}, "`mask` must"),
    "mask dtype": (lambda x: {"mask": np.ones((M, M), "f4")}, "`mask` must have dtype bool"),
    "q nan": (
        lambda x: {"q": x["q"] * x["q"].dtype.type(np.nan)},
        "`q` must be finite, got nan at",
    ),
    "mixed": (
        lambda x: {"k": x["k"].astype("f4")},
        "`k` must have the dtype of `q`, bfloat16, got float32",
    ),
    "integers": (lambda x: {"out": x["out"].astype("i4")}, "`out` must have dtype .*, got I32"),
    "truncated": (lambda data: data[:-100], "cannot read"),
    "empty": (lambda data: b"", "cannot read"),
    "header": (lambda data: data[:8] + b"?" + data[9:], "cannot read"),
}


@pytest.mark.parametrize("how", DAMAGED)
def test_damaged_files(tmp_path, how):
    change, message = DAMAGED[how]
    arrays, path = problem(n=M), tmp_path / "file.safetensors"
    arrays = {n: x.astype(ml_dtypes.bfloat16) for n, x in arrays.items()}
    of_bytes = how in ("truncated", "empty", "header")
    more = {} if of_bytes else change(arrays)
    arrays |= more if isinstance(more, dict) else {}
    save_file({n: np.ascontiguousarray(x) for n, x in arrays.items()}, path)
    if of_bytes:
        path.write_bytes(change(path.read_bytes()))
    assert re.search(message, fails(path))


WINDOWS = ("1", "1,2,3", "-1,2", "a,b", "1;2", "")
OF_WINDOW = "--window must be LEFT,RIGHT, two numbers of keys"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("nothing.npz", "does not exist"),
        ("file.bin", "FILE must end in .npz or .safetensors"),
        ("", "Missing argument"),
        ("right.safetensors --profile x", "--profile must be of math, serial, flash, "),
        ("right.safetensors --dtype int8", "--dtype must be of bfloat16, float16, "),
        ("right.safetensors --dtype float16", "`dtype` must be bfloat16, the dtype of `q`"),
        ("right.safetensors --layout nbhd", "--layout must be of bhnd, bnhd, got 'nbhd'"),
        ("right.safetensors --estimator lara", "--estimator must be of softmax, rfa, linear"),
        *((f"right.safetensors --alpha={x}", "`alpha` must be ") for x in (0, 1, -0.5, "nan")),
        *((f"right.safetensors --window={x}", OF_WINDOW) for x in WINDOWS),
        *((f"right.safetensors --softcap={x}", "`softcap` must be a po") for x in (0, -1, "nan")),
        ("right.safetensors --scale=nan", "`scale` must be a finite real number"),
        ("right.safetensors --json right.safetensors", "must end in .json"),
        ("right.safetensors --plot right.safetensors", "must end in .png"),
        ("wide.npz --dtype bfloat16", "`q` must hold bfloat16 numbers only"),
    ],
)
def test_bad_options(tmp_path, right, words, message, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(right, "file.bin")
    save(tmp_path / "wide.npz", {x: y + 1e-4 for x, y in problem(n=4).items()}, "float32")
    assert message in fails(*words.split())


@pytest.mark.parametrize("judged", [False, pytest.param(True, marks=pytest.mark.long)])
def test_the_program_in_c(judged, tmp_path):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    code = GUIDE.split("```c\n")[1].split("```")[0]
    (tmp_path / "dump.c").write_text(code)
    command = [compiler, "-std=c99", "-O1", "-Wall", "-Wextra", "-Werror", "dump.c"]
    subprocess.run([*command, "-o", "dump", "-lm"], cwd=tmp_path, check=True, timeout=60)
    subprocess.run([tmp_path / "dump"], cwd=tmp_path, check=True, timeout=60)
    shapes = open_tensors(tmp_path / "dump.safetensors").shapes
    assert shapes == dict.fromkeys(("q", "k", "v", "out"), (4, 256, 64))
    if judged:
        result = run(tmp_path / "dump.safetensors")
        assert result.exit_code == 0, result.stdout
        assert "out (4, 256, 64), float32\n" in result.stdout


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_the_lines_that_write_a_file(library, tmp_path, monkeypatch):
    """Those in the help are those in the guide, and write what they say."""
    array = pytest.importorskip(f"{library}.numpy" if library == "jax" else library)
    monkeypatch.chdir(tmp_path)
    parts = GUIDE.split("```py\n")[1:]
    code = parts[library == "jax"].split("```")[0]
    shown = run("--help").stdout
    assert all(f"  {line}\n" in shown for line in code.splitlines() if line)
    wide = {name: array.asarray(x.astype(np.float32)) for name, x in problem().items()}
    to = (lambda x: x.astype(array.bfloat16)) if library == "jax" else array.Tensor.bfloat16
    given = {name: to(x) for name, x in wide.items()}
    exec(code, given)
    assert run("dump.safetensors").exit_code == 0
    assert open_tensors("dump.safetensors").dtype == "bfloat16"
