"""`refattn verify`: verdicts on files, and what is printed and drawn."""

import json
import math
import shutil
import subprocess
import sys
from html import unescape
from pathlib import Path

import numpy as np
import pytest

import refattn
from refattn import naive
from refattn.features import elu_features
from refattn.files.tensors import open_tensors
from refattn.judge import verification
from refattn.judge.rounding import predict
from refattn.judge.rounding.formats import FORMATS
from refattn.judge.verification.reading import pose_tensors, read_parts
from refattn.judge.verification.z_scores import z_by_row, z_of_head
from tests.cli import running
from tests.cli.running import loads
from tests.cli.test_unusable import refused
from tests.judge.rounding.rounded import made
from tests.judge.verification.test_units import made as cut_made
from tests.validation import guide_blocks

save_file = pytest.importorskip("safetensors.numpy").save_file
ml_dtypes = pytest.importorskip("ml_dtypes")

GUIDE = guide_blocks.page("numbers")
FLASH = " --profile flash"
HEADS, M = 2, 64  # and keys
WITHOUT = np.arange(M) != 37


def run(words):
    return running.run("verify", *words.split())


def report(words):
    result = run(f"{words} --format json")
    assert result.exit_code in (0, 1, 3), result.output
    assert result.stderr == ""
    return loads(result.stdout)


def save(name, arrays, dtype="bfloat16", kept=""):
    """Write arrays as a kernel holds them; the mask, and one more, as they are."""
    to = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    given = {n: x if x.dtype == bool or n == kept else x.astype(to) for n, x in arrays.items()}
    if name.endswith(".npz"):
        np.savez(name, **given)
    else:
        save_file({n: np.ascontiguousarray(x) for n, x in given.items()}, name)
    return name


def sample(dtype="bfloat16", n=M):
    q, k, v = (FORMATS[dtype].round(x[1, :HEADS]) for x in refattn.load_sample())
    return q[:, -n:], k[:, -M:], v[:, -M:]


def problem(dtype="bfloat16", n=M, **options):
    """Queries, keys and values, and the exact output, rounded."""
    q, k, v = sample(dtype, n=n)
    return {"q": q, "k": k, "v": v, "out": naive.softmax_attention(q, k, v, **options)}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Files that are right, wrong, and of too few numbers to say, where the process is."""
    monkeypatch.chdir(tmp_path)
    q, k, v = (x[:1, :1] * (i < 2) for i, x in enumerate(sample()))
    save("right.safetensors", problem())
    save("wrong.safetensors", problem(mask=WITHOUT))
    small = {"q": q, "k": k, "v": v, "out": naive.softmax_attention(q, k, v)}
    save("small.safetensors", small)


def test_a_correct_output_passes():
    result = run("right.safetensors")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    shapes = ", ".join(f"{x} (2, 64, 32)" for x in ("q", "k", "v", "out"))
    assert lines[0] == f"right.safetensors: {shapes}, bfloat16"
    assert lines[1] == "softmax, scale 0.176777, not causal"
    assert lines[2].startswith("PASS: a correct kernel in bfloat16 gives such numbers (profile")


def test_a_page_has_the_report(monkeypatch):
    printed = run("wrong.safetensors --html out.html --no-cause").stdout
    page = Path("out.html").read_text("utf-8")
    assert "<title>FAIL: wrong.safetensors</title>" in page
    text = unescape(page)
    assert all(x.strip() in text for x in printed.splitlines())
    assert "cannot write" in run("right.safetensors --html no_such/out.html").stderr
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert (
        "--html needs `pip install 'refattn[cli]'`" in run("right.safetensors --html x.html").stderr
    )


def test_a_lost_key_fails_and_is_named():
    result = run("wrong.safetensors")
    assert result.exit_code == 1
    assert "\nFAIL: no correct kernel in bfloat16" in result.stdout
    assert "cause: key 37 is left out (explains 100 % of the error)" in result.stdout
    assert len(result.stdout.splitlines()) <= 14  # of which 2 are what was read
    verbose = run("wrong.safetensors --verbose").stdout
    assert len(verbose.splitlines()) > len(result.stdout.splitlines())
    found = report("wrong.safetensors")
    assert (found["verdict"], found["profile"]) == ("FAIL", None)
    (measured,) = (x for x in found["suspects"] if x["name"].startswith("key"))
    assert measured["estimate"] == pytest.approx(1, abs=0.02)


def test_mistakes_are_read_from_a_file():
    """Whatever is wrong with it, as with any other argument."""
    row = "@ visible\n- seen = seen & mask\n+ seen = seen & (mask | missing)\n"
    Path("fails.diff").write_text(f"fails: softmax\nThis one cannot run.\n{row}", "utf-8")
    known = run("wrong.safetensors").stdout
    assert run("wrong.safetensors --mistakes fails.diff").stdout == known
    Path("bad.diff").write_text(f"bad: softmax\nBad.\n{row.replace('seen & m', 'x', 1)}", "utf-8")
    result = run("wrong.safetensors --mistakes bad.diff")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "bad.diff: bad: `visible` has 'seen = xask' 0 times, not once." in result.stderr
    assert run("wrong.safetensors --mistakes none.diff").exit_code == 2


def test_the_same_is_said_from_python():
    arrays = {n: x.astype(ml_dtypes.bfloat16).astype(float) for n, x in problem().items()}
    out = problem(mask=WITHOUT)["out"].astype(ml_dtypes.bfloat16).astype(float)
    verdict = refattn.verify(**(arrays | {"out": out}), dtype="bfloat16", profile="flash")
    expected, found = json.loads(verdict.to_json()), report("wrong.safetensors" + FLASH)
    for name in expected.keys() - {"seconds"}:
        assert found[name] == expected[name], name


def test_what_the_report_holds():
    found = report("right.safetensors --window 20,3" + FLASH)
    assert found["shapes"]["out"] == [2, 64, 32]
    assert set(found["dtypes"].values()) == {"bfloat16"}
    assert (found["estimator"], found["causal"], found["softcap"]) == ("softmax", False, None)
    assert (found["window"], found["scale"]) == ([20, 3], pytest.approx(32**-0.5))
    assert found["verdict"] == "FAIL"


@pytest.mark.usefixtures("verdict_alone")
def test_several_files():
    def line(names):
        return " ".join(f"{x}.safetensors" for x in names.split()) + FLASH

    for names, status in (("right right", 0), ("right wrong small", 1), ("small right", 3)):
        result = run(line(names))
        assert result.exit_code == status
        parts = result.stdout.split("\n\n")
        assert [x.partition(".")[0] for x in parts] == names.split()
    found = report(line("right wrong small"))
    assert [x["verdict"] for x in found] == ["PASS", "FAIL", "UNDERPOWERED"]
    Path("bad.npz").touch()
    result = run(line("right") + " bad.npz wrong.safetensors")
    assert result.exit_code == 2
    assert result.stdout.splitlines()[0].startswith("right.safetensors: ")
    assert result.stderr.startswith("Error: bad.npz: ")


BIAS = np.linspace(-1, 1, M * 50).reshape(50, M)
SEEN = np.arange(M) % 3 > 0
CONVENTIONS = [
    ({"window": (20, None)}, "--window 20,"),
    ({"window": (None, 0)}, "--window ,0"),
    ({"bias": FORMATS["bfloat16"].round(BIAS)}, ""),
    ({"sinks": np.array([-1.0, 2.0])}, ""),
    (
        {"causal": True, "scale": 0.2, "window": (50, 1), "softcap": 9.0, "mask": SEEN},
        "--causal --scale 0.2 --window 50,1 --softcap 9",
    ),
]


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("options", "words"), CONVENTIONS)
@pytest.mark.usefixtures("verdict_alone")
def test_conventions(options, words):
    arrays = problem(n=50, **options)
    more = {x: options[x] for x in ("mask", "bias", "sinks") if x in options}
    result = run(save("file.safetensors", arrays | more) + f" {words}")
    assert result.exit_code == 0, result.stdout
    assert run(save("file.safetensors", arrays) + FLASH).exit_code == 1


@pytest.mark.long("npz")
@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_wide_arrays_of_narrow_numbers(suffix):
    arrays = {n: FORMATS["bfloat16"].round(x) for n, x in problem(mask=WITHOUT).items()}
    found = report(save(f"wide.{suffix}", arrays, "float32") + " --dtype bfloat16" + FLASH)
    expected = report("wrong.safetensors" + FLASH)
    assert found["z"]["rms"] == pytest.approx(expected["z"]["rms"])  # threads add in any order
    for name in ("verdict", "dtype", "out_dtype"):
        assert found[name] == expected[name]
    for name, key in (("tests", "name"), ("suspects", "text")):
        assert [x[key] for x in found[name]] == [x[key] for x in expected[name]]


def test_an_output_in_a_wider_type():
    arrays = problem()
    narrow = {x: arrays[x].astype(ml_dtypes.bfloat16) for x in "qkv"}
    for out, dtype in (
        (arrays["out"].astype(np.float32), "float32"),
        (arrays["out"].astype(ml_dtypes.bfloat16).astype(np.float32), "bfloat16"),
    ):
        save_file(narrow | {"out": out}, "file.safetensors")
        found = report("file.safetensors --profile math")
        assert (found["verdict"], found["out_dtype"]) == ("PASS", dtype)


@pytest.mark.usefixtures("verdict_alone")
def test_random_features_and_linear_attention():
    q, k, v = (0.3 * x[1, :, -M:].astype(float) for x in refattn.load_sample())
    omega = np.random.default_rng(0).normal(size=(24, 32)).astype(np.float32).astype(float)
    arrays = {"q": q, "k": k, "v": v, "omega": omega}
    arrays["out"] = naive.random_feature_attention(q, k, v, omega=omega)
    save("rfa.safetensors", arrays, "float32")
    result = run("rfa.safetensors --estimator rfa")
    assert result.exit_code in (0, 3), result.stdout
    assert "\nrfa, scale 0.176777, not causal\n" in result.stdout
    result = run("rfa.safetensors --profile math")
    assert result.exit_code == 1
    assert "\nomega is not used: it is for --estimator rfa\n" in result.stdout
    out = naive.linear_attention(q, k, v, feature_map=elu_features)
    path = save("linear.safetensors", {"q": q, "k": k, "v": v, "out": out}, "float32")
    assert run(f"{path} --estimator linear").exit_code in (0, 3)


def test_what_is_not_read_is_said():
    arrays = problem()
    more = dict.fromkeys(("d_out", "spare"), arrays["out"])
    result = run(save("file.safetensors", arrays | more) + " --profile math")
    assert result.exit_code == 0
    assert "\nd_out is not used: there is no dq, dk or dv\nnot read: spare\n" in result.stdout


@pytest.mark.long("bnhd")
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.usefixtures("verdict_alone")
def test_gradients(layout):
    arrays = problem()
    d_out = np.random.default_rng(0).standard_normal(arrays["out"].shape)
    arrays["d_out"] = FORMATS["bfloat16"].round(d_out)
    arrays |= made("flash", *(arrays[x] for x in ("q", "k", "v", "d_out")), "bfloat16")

    def saved(left_out=(), **changed):
        given = {x: y for x, y in (arrays | changed).items() if x not in left_out}
        if layout == "bnhd":
            given = {x: np.swapaxes(y, 0, 1) for x, y in given.items()}
        return save("file.safetensors", given) + f" --layout {layout}" + FLASH

    result = run(saved())
    assert result.exit_code == 0, result.stdout
    assert "\nPASS: out PASS, dq PASS, dk PASS, dv PASS\n" in result.stdout
    result = run(saved(dk=np.roll(arrays["dk"], 1, 0)) + " --plot x.png --json x.json")
    assert result.exit_code == 1
    assert "\nFAIL: out PASS, dq PASS, dk FAIL, dv PASS\n" in result.stdout
    assert Path("x.png").read_bytes()[:4] == b"\x89PNG"
    told = loads(Path("x.json").read_text("utf-8"))
    assert (told["verdict"], told["of"], told["parts"]["dv"]["verdict"]) == ("FAIL", "dk", "PASS")
    assert told["alpha"] == 1e-6
    parts = {name: x["alpha"] for name, x in told["parts"].items()}
    assert parts == dict.fromkeys(("out", "dq", "dk", "dv"), 1e-6 / 4)
    alone = saved(("out", "dq", "dv"))
    assert "\nPASS: dk PASS\n" in run(alone).stdout
    message = refused("verify", *alone.split(), "--estimator", "linear")
    assert "gradients are judged for softmax and recurrences only, got linear" in message


@pytest.mark.long
def test_hardware_in_words():
    """`flash` with rounded sums does not give these numbers, with those of Hopper it does."""
    arrays = cut_made("hopper", "float8_e4m3fn", "one sign", 48, 512)
    del arrays["dtype"]
    with_type = " --dtype float8_e4m3fn --profile flash"
    words = save("file.safetensors", arrays, "float32", kept="out") + with_type
    result = run(f"{words} --json x.json")
    assert result.exit_code == 0, result.stdout
    assert "\n  sums are truncated by tensor cores of Hopper or Ada: results are " in result.stdout
    assert loads(Path("x.json").read_text("utf-8"))["hardware"] == "hopper"
    assert run(f"{words} --hardware ieee").exit_code == 1
    assert run(f"{words}@hopper").exit_code == 0
    message = refused("verify", *words.split(), "--hardware", "hoper")
    assert "--hardware must be one of ieee, hopper" in message


def of_file(name, profile):
    """What is judged, its numbers, and the verdict."""
    tensors = open_tensors(Path(f"{name}.safetensors"))
    found = pose_tensors(tensors)
    numbers = read_parts(tensors, found)["out"].numbers
    return tensors, found, numbers, verification.judge(found, numbers, "bfloat16", profile)


@pytest.mark.parametrize("profile", ["flash", "fp8", None])
@pytest.mark.usefixtures("verdict_alone")
def test_z_of_heads_and_rows(profile):
    """Of fewer queries than keys."""
    save("fewer.safetensors", problem(n=40))
    tensors, found, numbers, verdict = of_file("fewer", profile)
    squares, counts = z_by_row(found, numbers, "bfloat16", verdict.by)
    assert squares.shape == counts.shape == (HEADS, 40)
    assert math.sqrt(np.sum(squares) / np.sum(counts)) == pytest.approx(verdict.z.rms)
    z = z_of_head(found, numbers, "bfloat16", verdict.by, (1,))
    np.testing.assert_allclose(np.nansum(z * z, -1), squares[1])
    if profile == "flash":
        arrays = [np.stack([tensors.read(x, (h,)) for h in range(HEADS)]) for x in ("q", "k", "v")]
        law = predict(*arrays, dtype="bfloat16", profile="flash")
        expected = (tensors.read("out", (1,)) - law.out[1]) / law.std[1]
        np.testing.assert_allclose(z, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("verdict_alone")
def test_the_largest_z_is_that_of_the_figure():
    _, found, numbers, verdict = of_file("wrong", "flash")
    *head, row, column = verdict.z.where
    z = np.abs(z_of_head(found, numbers, "bfloat16", verdict.by, tuple(head)))
    assert np.nanmax(z) == z[row, column] == pytest.approx(verdict.z.largest)


@pytest.mark.long
def test_pictures():
    pytest.importorskip("matplotlib")
    q = np.ones((1100, 1))  # no law, and more queries than are drawn
    save("one.safetensors", {"q": q, "k": q[:1], "v": q[:1], "out": q})
    save("nan.safetensors", {"q": q, "k": q, "v": q, "out": np.nan * q})
    status = {"right": 0, "wrong": 1, "small": 3, "one": 3, "nan": 1}
    for name, expected in status.items():
        assert run(f"{name}.safetensors --plot {name}.png").exit_code == expected, name
        assert Path(f"{name}.png").read_bytes()[:4] == b"\x89PNG"
    path = save("empty.safetensors", {"q": q[:0], "k": q, "v": q, "out": q[:0]})
    assert run(path).exit_code == 3
    result = run(f"{path} --plot empty.png")
    assert result.exit_code == 2
    assert "nothing to draw" in result.stderr


def test_one_block_of_heads_is_in_memory(monkeypatch):
    tensors = open_tensors(Path("right.safetensors"))
    read, asked = tensors.read, []
    monkeypatch.setattr(tensors, "read", lambda *args: asked.append(args) or read(*args))
    found = pose_tensors(tensors)
    for index in np.ndindex(found.lead):
        for _ in range(3):
            assert set(found.read(index)) == {"q", "k", "v"}
    assert sorted(asked) == [(x, (h,)) for x in ("k", "q", "v") for h in range(HEADS)]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("shape", [(0, 5, 2), (5, 0, 2), (5, 5, 0), (0, 0, 0)])
@pytest.mark.parametrize("lead", [(), (2,), (0,)])
def test_empty_arrays(shape, lead):
    n, m, d_v = shape
    arrays = {"q": np.ones((*lead, n, 2)), "k": np.ones((*lead, m, 2))}
    arrays |= {"v": np.ones((*lead, m, d_v)), "out": np.zeros((*lead, n, d_v))}
    path = save("file.safetensors", arrays)
    for words in ("", " --causal", " --window 1,1", " --estimator linear"):
        result = run(path + words)
        assert result.exit_code in (0, 3), result.output


def test_a_batch_of_none():
    x = np.ones((0, 4, 32, 16), ml_dtypes.bfloat16)  # of several tiles
    save_file({"q": x, "k": x, "v": x, "out": x.astype(np.float32)}, "file.safetensors")
    result = run("file.safetensors")
    assert (result.exit_code, result.stderr) == (3, "")
    assert "\nUNDERPOWERED: " in result.stdout
    assert report("file.safetensors")["out_dtype"] == "float32"


@pytest.mark.parametrize("judged", [False, pytest.param(True, marks=pytest.mark.long)])
def test_the_program_in_c(judged):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    Path("dump.c").write_text(GUIDE.split("```c\n")[1].split("```")[0])
    command = [compiler, "-std=c99", "-O1", "-Wall", "-Wextra", "-Werror", "dump.c"]
    subprocess.run([*command, "-o", "dump", "-lm"], check=True, timeout=60)
    subprocess.run(["./dump"], check=True, timeout=60)
    shapes = open_tensors(Path("dump.safetensors")).shapes
    assert shapes == dict.fromkeys(("q", "k", "v", "out"), (4, 256, 64))
    if judged:
        result = run("dump.safetensors")
        assert result.exit_code == 0, result.stdout
        assert "out (4, 256, 64), float32\n" in result.stdout


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_the_lines_that_write_a_file(library):
    """Those in the help are those in the guide, and write what they say."""
    array = pytest.importorskip(f"{library}.numpy" if library == "jax" else library)
    code = GUIDE.split("```py\n")[1 + (library == "jax")].split("```")[0]
    shown = run("--help").stdout
    assert all(f"  {line}\n" in shown for line in code.splitlines() if line)
    wide = {name: array.asarray(x.astype(np.float32)) for name, x in problem().items()}
    to = (lambda x: x.astype(array.bfloat16)) if library == "jax" else array.Tensor.bfloat16
    exec(code, {name: to(x) for name, x in wide.items()})
    assert run("dump.safetensors").exit_code == 0
    assert open_tensors(Path("dump.safetensors")).dtype == "bfloat16"


@pytest.mark.usefixtures("verdict_alone")
def test_names_that_were_not_read_are_repeated_beside_a_failure():
    """They may say what the kernel did: a table of blocks, a mask by another name."""
    arrays = problem("float32") | {"key_mask": np.ones(M, bool)}
    for factor, times in ((1.0, 1), (1.01, 2)):
        result = run(save("x.npz", arrays | {"out": factor * arrays["out"]}, "float32"))
        assert result.exit_code == (times == 2)
        assert result.stdout.count("key_mask") == times


@pytest.mark.usefixtures("verdict_alone")
def test_scales_of_8_bits_that_are_left_out_are_asked_for():
    arrays, factors = problem("float8_e4m3fn"), {"k": 0.5, "v": 2.0}
    stored = {x: y.astype(np.float32) for x, y in arrays.items()}
    stored |= {x: (stored[x] / y).astype(ml_dtypes.float8_e4m3fn) for x, y in factors.items()}
    words = "  k, v: 8 bits without a scale; if the kernel uses scales, add k_scale, v_scale\n"
    scales = {f"{x}_scale": np.float32(y) for x, y in factors.items()}
    for more, asked in (({}, True), (scales, False)):
        save_file({x: np.ascontiguousarray(y) for x, y in (stored | more).items()}, "x.safetensors")
        assert (words in run("x.safetensors --profile math").stdout) == asked


def test_hidden_keys_of_a_file_may_hold_anything():
    """As in arrays of Python: what a query sees must be finite."""
    arrays = problem("float32") | {"mask": np.broadcast_to(WITHOUT, (HEADS, M, M))}
    arrays["out"] = naive.softmax_attention(*(arrays[x] for x in "qkv"), mask=arrays["mask"])
    arrays["k"], arrays["v"] = (np.where(WITHOUT[:, None], arrays[x], np.nan) for x in "kv")
    assert run(save("x.npz", arrays, "float32") + " --profile math").exit_code == 0
    arrays["k"][1, 3, 2] = np.inf
    message = refused("verify", save("x.npz", arrays, "float32"))
    assert "`k` must be finite where a query sees it, got inf at row 3, column 2" in message


def test_packed_sequences_in_words():
    """Each sequence is causal; packed arrays have one layout, so none is suggested."""
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((x, 8, 4)).astype(np.float32) for x in (4, 6, 6))
    parts = [(q[:1], k[:2], v[:2]), (q[1:], k[2:], v[2:])]
    outs = (naive.softmax_attention(*(np.swapaxes(y, 0, 1) for y in x), causal=True) for x in parts)
    out = np.swapaxes(np.concatenate(list(outs), 1), 0, 1)
    arrays = {"q": q, "k": k, "v": v, "out": np.ascontiguousarray(out)}
    save_file(arrays | {"cu_seqlens_q": np.array([0, 1, 4]), "cu_seqlens_k": np.array([0, 2, 6])},
        "x.safetensors")  # fmt: skip
    result = run("x.safetensors --causal --window 2,0")
    second = result.stdout.splitlines()[1]
    shapes = "2 sequences, each by itself, shapes with heads before tokens"
    assert second == f"softmax, scale 0.5, causal, window 2,0, {shapes}"
    assert "mask" not in result.output
    assert "transposed" not in result.output
    assert report("x.safetensors --causal")["causal"]


@pytest.mark.sweep(4)
@pytest.mark.parametrize("wrong", ["", "wrong row", "noise"])
def test_the_layout_is_the_first_cause_where_it_explains_the_error(wrong):
    """Transposed, the right output passes, a wrong one is much nearer, and noise is no nearer."""
    rng = np.random.default_rng(4)
    q, k, v = (rng.standard_normal((1, 4, 12, 16)).astype(np.float32) for _ in "qkv")
    out = refattn.softmax_attention(q, k, v)
    out[:, :, 0] *= 1.0001 if wrong == "wrong row" else 1.0
    out = rng.standard_normal(out.shape) if wrong == "noise" else out
    arrays = {"q": q, "k": k, "v": v, "out": out}
    save("x.npz", {x: np.swapaxes(y, 1, 2) for x, y in arrays.items()}, "float32")
    result = run("x.npz")
    assert result.exit_code == 1
    line = "  cause: the arrays look transposed: pass --layout bnhd (explains "
    assert (line in result.stdout) == (wrong != "noise")
    assert ("  or: " in result.stdout) <= (wrong != "")
    assert ("  next: pass that option" in result.stdout) == (wrong != "noise")


def test_float32_arrays_that_hold_bfloat16_numbers_are_said_to():
    q, k, v = sample()
    out = FORMATS["bfloat16"].round(refattn.softmax_attention(q, k, v))
    result = run(save("x.npz", {"q": q, "k": k, "v": v, "out": out}, "float32"))
    assert result.exit_code == 0
    introduction = " ".join(result.stdout.splitlines()[:3])
    assert "bfloat16 (float32 arrays that hold bfloat16 numbers) softmax" in introduction


def test_causes_may_be_left_out():
    arrays = problem()
    arrays["out"] = 1.02 * arrays["out"]
    save("x.safetensors", arrays)
    for option, said in (("", "1.02"), (" --no-cause", "causes were not searched for")):
        done = run(f"x.safetensors --profile flash{option}")
        assert done.exit_code == 1
        assert said in done.output
