"""`refattn verify`: verdicts on files, what is printed and drawn, and one line for bad input."""

import json
import math
import re
import shutil
import subprocess

import numpy as np
import pytest

import refattn
from refattn import cli, naive, verification
from refattn.features import elu_features
from refattn.files.tensors import open_tensors
from refattn.rounding import predict
from refattn.rounding.formats import FORMATS
from refattn.verification import given as verification_given
from refattn.verification import verdict as verification_verdict
from tests.rounding.rounded import Case, backward
from tests.validation import guide_blocks

pytest.importorskip("rich")
pytest.importorskip("safetensors")
ml_dtypes = pytest.importorskip("ml_dtypes")
testing = pytest.importorskip("click.testing")

WIDE = {"COLUMNS": "200"}  # tables have all columns

Arrays = dict[str, np.ndarray]
GUIDE = guide_blocks.page("numbers")


def run(*args):
    return testing.CliRunner().invoke(cli.commands(), ["verify", *map(str, args)], env=WIDE)


def fails(*args):
    result = run(*args)
    assert result.exit_code == 2, result.output
    *usage, line = result.stderr.splitlines()
    assert line.startswith("Error: ")
    assert not usage or usage[0] == "Usage: refattn verify [OPTIONS] FILE..."
    return str(line)


def report(folder, *args):
    path = folder / "report.json"
    result = run(*args, "--json", path)
    assert result.exit_code in (0, 1, 3), result.output
    assert result.stderr == ""

    def refuse(token):
        raise AssertionError(f"{token} is not JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


def number_type(name):
    return getattr(ml_dtypes, name) if name == "bfloat16" else np.dtype(name)


def save(path, arrays, dtype="bfloat16"):
    """Write arrays as a kernel holds them; the mask as it is."""
    given = {n: x if x.dtype == bool else x.astype(number_type(dtype)) for n, x in arrays.items()}
    given = {n: np.ascontiguousarray(x) for n, x in given.items()}
    if path.suffix == ".npz":
        np.savez(path, **given)
    else:
        from safetensors.numpy import save_file

        save_file(given, path)
    return path


def sample(dtype="bfloat16", heads=4, n=128):
    q, k, v = (FORMATS[dtype].round(x[1, :heads]) for x in refattn.load_sample())
    return q[:, -n:], k, v


def problem(dtype="bfloat16", n=128, **options):
    """Queries, keys and values, and the exact output, rounded."""
    q, k, v = sample(dtype, n=n)
    return {"q": q, "k": k, "v": v, "out": naive.softmax_attention(q, k, v, **options)}


@pytest.fixture
def right(tmp_path):
    return save(tmp_path / "right.safetensors", problem())


@pytest.fixture
def wrong(tmp_path):
    mask = np.ones((128, 128), bool)
    mask[:, 77] = False
    return save(tmp_path / "wrong.safetensors", problem(mask=mask))


@pytest.fixture
def small(tmp_path):
    q, k, v = (x[:1, :1] * (i < 2) for i, x in enumerate(sample()))
    out = naive.softmax_attention(q, k, v)
    return save(tmp_path / "small.safetensors", {"q": q, "k": k, "v": v, "out": out})


def test_a_correct_output_passes(right):
    result = run(right)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    shapes = ", ".join(f"{x} (4, 128, 32)" for x in ("q", "k", "v", "out"))
    assert lines[0] == f"right.safetensors: {shapes}, bfloat16"
    assert lines[1] == "softmax, scale 0.176777, not causal"
    assert lines[2].startswith("PASS: a correct kernel in bfloat16 gives such numbers (profile")
    assert result.stderr == ""


def test_a_lost_key_fails_and_is_named(tmp_path, wrong):
    result = run(wrong)
    assert result.exit_code == 1
    assert "\nFAIL: no correct kernel in bfloat16" in result.stdout
    assert re.search(r"9\d\.\d%  key 77 is missing: (0\.99|1)", result.stdout)
    found = report(tmp_path, wrong)
    assert (found["verdict"], found["profile"]) == ("FAIL", None)
    assert found["suspects"][0]["name"].startswith("key")
    assert found["suspects"][0]["estimate"] == pytest.approx(1, abs=0.02)


def test_one_tile_is_found(tmp_path):
    arrays = problem()
    arrays["out"][2, 64:80] *= 1.03
    result = run(save(tmp_path / "tile.safetensors", arrays), "--profile", "flash")
    assert result.exit_code == 1
    assert "head 2, queries 64 to 79" in result.stdout


def test_the_same_is_said_from_python(tmp_path, wrong):
    arrays = {n: x.astype(ml_dtypes.bfloat16).astype(float) for n, x in problem().items()}
    mask = np.ones((128, 128), bool)
    mask[:, 77] = False
    out = problem(mask=mask)["out"].astype(ml_dtypes.bfloat16).astype(float)
    verdict = refattn.verify(**(arrays | {"out": out}), dtype="bfloat16")
    expected, found = json.loads(verdict.to_json()), report(tmp_path, wrong)
    for name in expected.keys() - {"seconds"}:
        assert found[name] == expected[name], name


def test_what_the_report_holds(tmp_path, right):
    found = report(tmp_path, right, "--window", "20,3")
    assert found["file"] == "right.safetensors"
    assert found["shapes"]["out"] == [4, 128, 32]
    assert set(found["dtypes"].values()) == {"bfloat16"}
    assert (found["estimator"], found["causal"], found["softcap"]) == ("softmax", False, None)
    assert (found["window"], found["scale"]) == ([20, 3], pytest.approx(32**-0.5))
    assert set(verification.Verdict._fields) <= set(found)
    assert found["verdict"] == "FAIL"


def test_several_files(tmp_path, right, wrong, small):
    for files, status in (
        ((right, right), 0),
        ((right, wrong, small), 1),
        ((right, small), 3),
        ((small,), 3),
    ):
        result = run(*files)
        assert result.exit_code == status
        parts = result.stdout.split("\n\n")
        assert [x.partition(":")[0] for x in parts] == [x.name for x in files]
    found = report(tmp_path, right, wrong, small)
    assert [x["verdict"] for x in found] == ["PASS", "FAIL", "UNDERPOWERED"]
    assert "`--plot` must come with one FILE, got 2" in fails(
        right, wrong, "--plot", tmp_path / "x.png"
    )
    (tmp_path / "bad.npz").write_bytes(b"")
    result = run(right, tmp_path / "bad.npz", wrong)
    assert result.exit_code == 2
    assert result.stdout.splitlines()[0].startswith("right.safetensors: ")
    assert result.stderr.startswith("Error: bad.npz: ")


BIAS = np.linspace(-1, 1, 128 * 100).reshape(100, 128)
SEEN = np.arange(128) % 3 > 0
CONVENTIONS = {
    "causal": ({"causal": True}, ["--causal"]),
    "scale": ({"scale": 0.1}, ["--scale", 0.1]),
    "window": ({"window": (20, 3)}, ["--window", "20,3"]),
    "left": ({"window": (20, None)}, ["--window", "20,"]),
    "right": ({"window": (None, 0)}, ["--window", ",0"]),
    "softcap": ({"softcap": 5.0}, ["--softcap", 5]),
    "mask": ({"mask": SEEN}, []),
    "bias": ({"bias": BIAS}, []),
    "sinks": ({"sinks": np.array([-1.0, 1.0, 2.0, 3.5])}, []),
    "all": (
        {"causal": True, "scale": 0.2, "window": (50, 1), "softcap": 9.0, "mask": SEEN},
        ["--causal", "--scale", 0.2, "--window", "50,1", "--softcap", 9],
    ),
}


@pytest.mark.parametrize("name", CONVENTIONS)
def test_conventions(tmp_path, name):
    options, words = CONVENTIONS[name]
    options = {x: FORMATS["bfloat16"].round(y) if x == "bias" else y for x, y in options.items()}
    arrays = problem(n=100, **options)
    more = {x: options[x] for x in ("mask", "bias", "sinks") if x in options}
    path = save(tmp_path / "file.safetensors", arrays | more)
    result = run(path, *words)
    assert result.exit_code == 0, result.stdout
    without = save(tmp_path / "without.safetensors", arrays) if more else path
    assert run(without).exit_code == 1


def test_layouts(tmp_path, wrong):
    tensors = open_tensors(wrong)
    arrays = {n: np.stack([tensors.read(n, x) for x in tensors.heads()], 1) for n in tensors.shapes}
    found = report(tmp_path, save(tmp_path / "swapped.safetensors", arrays), "--layout", "bnhd")
    expected = report(tmp_path, wrong)
    for name in ("verdict", "z", "tests", "suspects"):
        assert found[name] == expected[name]


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_wide_arrays_of_narrow_numbers(tmp_path, suffix, wrong):
    tensors = open_tensors(wrong)
    arrays = {n: np.stack([tensors.read(n, x) for x in tensors.heads()]) for n in tensors.shapes}
    path = save(tmp_path / f"wide.{suffix}", arrays, "float32")
    found = report(tmp_path, path, "--dtype", "bfloat16")
    expected = report(tmp_path, wrong)
    assert found["z"]["rms"] == pytest.approx(expected["z"]["rms"])  # threads add in any order
    for name in ("verdict", "dtype", "out_dtype"):
        assert found[name] == expected[name]
    assert [x["name"] for x in found["tests"]] == [x["name"] for x in expected["tests"]]
    assert [x["text"] for x in found["suspects"]] == [x["text"] for x in expected["suspects"]]


def test_an_output_in_a_wider_type(tmp_path):
    from safetensors.numpy import save_file

    arrays = problem()
    narrow = {x: arrays[x].astype(ml_dtypes.bfloat16) for x in "qkv"}
    for out, dtype in (
        (arrays["out"].astype(np.float32), "float32"),
        (arrays["out"].astype(ml_dtypes.bfloat16).astype(np.float32), "bfloat16"),
    ):
        save_file(narrow | {"out": out}, tmp_path / "file.safetensors")
        found = report(tmp_path, tmp_path / "file.safetensors")
        assert (found["verdict"], found["out_dtype"]) == ("PASS", dtype)


def test_grouped_heads(tmp_path):
    q, k, v = sample()
    k, v = k[:2], v[:2]
    out = naive.softmax_attention(q, np.repeat(k, 2, 0), np.repeat(v, 2, 0))
    arrays = {"q": q, "k": k, "v": v, "out": out}
    assert run(save(tmp_path / "file.safetensors", arrays)).exit_code == 0
    arrays["out"] = out[[1, 0, 2, 3]]
    assert run(save(tmp_path / "file.safetensors", arrays)).exit_code == 1
    arrays["out"] = naive.softmax_attention(q, np.tile(k, (2, 1, 1)), np.tile(v, (2, 1, 1)))
    result = run(save(tmp_path / "file.safetensors", arrays))
    assert "\n    100.0%  agrees if query head h shares key head h % 2\n" in result.stdout


def test_lse_is_judged(tmp_path):
    arrays = problem("float32")
    scores = arrays["q"] @ np.swapaxes(arrays["k"], -1, -2) * 32**-0.5
    lse = np.log(np.sum(np.exp(scores), -1))
    path = tmp_path / "file.safetensors"
    result = run(save(path, arrays | {"lse": lse}, "float32"))
    assert result.exit_code == 0
    assert "lse (4, 128)" in result.stdout
    result = run(save(path, arrays | {"lse": lse + 0.001}, "float32"))
    assert result.exit_code == 1
    assert "lse is 0.001 ± " in result.stdout  # not by the profile that rounds queries


def test_random_features_and_linear_attention(tmp_path):
    q, k, v = (0.3 * x for x in refattn.load_sample())
    arrays = {"q": q[1], "k": k[1], "v": v[1]}
    omega = np.random.default_rng(0).normal(size=(24, 32)).astype(np.float32)
    path = tmp_path / "file.safetensors"
    wide = [x.astype(float) for x in arrays.values()]
    out = naive.random_feature_attention(*wide, omega=omega.astype(float))
    save(path, arrays | {"out": out, "omega": omega}, "float32")
    result = run(path, "--estimator", "rfa")
    assert result.exit_code in (0, 3), result.stdout
    assert "\nrfa, scale 0.176777, not causal\n" in result.stdout
    result = run(path)
    assert result.exit_code == 1
    assert "\nomega is not used: it is for --estimator rfa\n" in result.stdout
    q, k, v = wide
    weights = elu_features(q) @ np.swapaxes(elu_features(k), -1, -2)
    out = weights @ v / np.sum(weights, -1, keepdims=True)
    save(path, arrays | {"out": out}, "float32")
    assert run(path, "--estimator", "linear").exit_code in (0, 3)
    assert "`omega` must be in FILE for rfa" in fails(path, "--estimator", "rfa")
    assert "`window` must not be given for linear" in fails(
        path, "--estimator", "linear", "--window", "1,1"
    )
    assert "`softcap` must not be given for linear" in fails(
        path, "--estimator", "linear", "--softcap", "1"
    )
    mask = np.ones((128, 128), bool)
    masked = save(tmp_path / "masked.safetensors", arrays | {"out": out, "mask": mask}, "float32")
    assert "`mask` must be of keys, (..., 1, m), for linear" in fails(
        masked, "--estimator", "linear"
    )
    bias = np.zeros((128, 128))
    biased = save(tmp_path / "biased.safetensors", arrays | {"out": out, "bias": bias}, "float32")
    assert "`bias` must not be given for linear" in fails(biased, "--estimator", "linear")
    sinks = save(tmp_path / "sinks.safetensors", arrays | {"sinks": np.zeros(4)}, "float32")
    assert "`sinks` must not be given for linear" in fails(sinks, "--estimator", "linear")


def test_what_is_not_read_is_said(tmp_path):
    arrays = problem()
    out = arrays["out"]
    more = {"d_out": out, "spare": out}
    result = run(save(tmp_path / "file.safetensors", arrays | more))
    assert result.exit_code == 0
    assert "\nd_out is not used: there is no dq, dk or dv\nnot read: spare\n" in result.stdout


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
def test_gradients(tmp_path, layout):
    arrays = {x: np.asarray(y, np.float64) for x, y in problem().items()}
    d_out = np.random.default_rng(0).standard_normal(arrays["out"].shape)
    arrays["d_out"] = FORMATS["bfloat16"].round(d_out)
    names = ("q", "k", "v", "d_out")
    found = [
        backward("flash", Case(q, k, v), g, "bfloat16")
        for q, k, v, g in zip(*(arrays[x] for x in names), strict=True)
    ]
    arrays |= {
        x: np.stack(y)
        for x, y in zip(("out", "dq", "dk", "dv"), zip(*found, strict=True), strict=True)
    }

    def saved(name, **changed):
        given = {x: np.asarray(y, np.float32) for x, y in (arrays | changed).items()}
        if layout == "bnhd":
            given = {x: np.swapaxes(y, 0, 1) for x, y in given.items()}
        return save(tmp_path / name, given)

    words = ("--layout", layout)
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
    del arrays["out"], arrays["dq"], arrays["dv"]
    result = run(saved("alone.safetensors"), *words)
    assert "\nPASS: dk PASS\n" in result.stdout
    message = fails(saved("linear.safetensors"), *words, "--estimator", "linear")
    assert "gradients are judged for softmax only, got linear" in message


def test_plain_defects_have_plain_words(tmp_path):
    arrays = problem()
    path = tmp_path / "file.safetensors"
    result = run(save(path, arrays | {"out": 0 * arrays["out"]}))
    assert (result.exit_code, "the output is 0 everywhere" in result.stdout) == (1, True)
    arrays["out"][1, 7, 3] = math.nan
    picture = tmp_path / "x.png"
    result = run(save(path, arrays), "--plot", picture)
    assert result.exit_code == 1
    assert "1 of 512 rows hold NaN or infinity, the first is (1, 7)" in result.stdout
    assert picture.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("profile", ["flash", "fp8", None])
def test_z_of_heads_and_rows(profile, right):
    tensors = open_tensors(right)
    found = verification_given.of_tensors(tensors)
    numbers = verification_verdict.parts_of(tensors, found)["out"].numbers
    verdict = verification.judge(found, numbers, "bfloat16", profile)
    squares, counts = verification_verdict.z_by_row(found, numbers, "bfloat16", verdict.by)
    assert squares.shape == counts.shape == (4, 128)
    assert math.sqrt(np.sum(squares) / np.sum(counts)) == pytest.approx(verdict.z.rms)
    z = verification_verdict.z_of_head(found, numbers, "bfloat16", verdict.by, (2,))
    np.testing.assert_allclose(np.nansum(z * z, -1), squares[2])
    if profile == "flash":
        arrays = [np.stack([tensors.read(x, (h,)) for h in range(4)]) for x in ("q", "k", "v")]
        law = predict(*arrays, dtype="bfloat16", profile="flash")
        expected = (tensors.read("out", (2,)) - law.out[2]) / law.std[2]
        np.testing.assert_allclose(z, expected, rtol=1e-9, atol=1e-9)


def test_the_largest_z_is_that_of_the_figure(wrong):
    tensors = open_tensors(wrong)
    found = verification_given.of_tensors(tensors)
    numbers = verification_verdict.parts_of(tensors, found)["out"].numbers
    verdict = verification.judge(found, numbers, "bfloat16")
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
    arrays = dict.fromkeys(("q", "k", "v", "out"), np.ones((0, 4, 32, 16)))  # of several tiles
    result = run(save(tmp_path / "file.safetensors", arrays))
    assert (result.exit_code, result.stderr) == (3, "")
    assert "UNDERPOWERED: " in result.stdout


def damaged():
    """What is done to a file, and what is said of it."""
    yield "no q", "FILE must hold"
    yield "no out", "`out`, `dq`, `dk` or `dv` must be in FILE, to be judged"
    yield "d_out alone", "`dq` must come with `d_out`"
    yield "out shape", r"`out` must have shape \(4, 128, 32\), .* got shape \(4, 127, 32\)"
    yield "k shape", "`q` and `k` must have last axes of one length"
    yield "lse shape", r"`lse` must have shape \(4, 128\)"
    yield "mask shape", "`mask` must"
    yield "mask dtype", "`mask` must have dtype bool"
    yield "q nan", "`q` must be finite, got nan at index"
    yield "mixed", "`k` must have the dtype of `q`, bfloat16, got float32"
    yield "integers", "`out` must have dtype .*, got I32"
    yield "truncated", "cannot read"
    yield "empty", "cannot read"
    yield "header", "cannot read"
    yield "suffix", "FILE must end in .npz or .safetensors"


@pytest.mark.parametrize(("how", "message"), list(damaged()))
def test_damaged_files(tmp_path, how, message):
    from safetensors.numpy import save_file

    arrays = {n: x.astype(ml_dtypes.bfloat16) for n, x in problem().items()}
    out = arrays["out"]
    changes = {
        "d_out alone": {"dq": out},
        "out shape": {"out": out[:, 1:]},
        "k shape": {"k": arrays["k"][..., 1:]},
        "lse shape": {"lse": out[..., 0, 0]},
        "mask shape": {"mask": np.ones((5, 128), bool)},
        "mask dtype": {"mask": np.ones((128, 128), np.float32)},
        "q nan": {"q": np.where(np.arange(32) == 3, np.nan, arrays["q"]).astype(out.dtype)},
        "mixed": {"k": arrays["k"].astype(np.float32)},
        "integers": {"out": out.astype(np.int32)},
    }
    arrays |= changes.get(how, {})
    arrays.pop({"no q": "q", "no out": "out"}.get(how, ""), None)
    path = tmp_path / "file.safetensors"
    save_file({n: np.ascontiguousarray(x) for n, x in arrays.items()}, path)
    data = path.read_bytes()
    changed = {"truncated": data[:-100], "empty": b"", "header": data[:8] + b"?" + data[9:]}
    path.write_bytes(changed.get(how, data))
    if how == "suffix":
        path = path.rename(tmp_path / "file.bin")
    assert re.search(message, fails(path))


def test_bad_options(tmp_path, right):
    assert "does not exist" in fails(tmp_path / "nothing.npz")
    assert "Missing argument" in fails()
    assert "--profile must be of math, serial, flash, " in fails(right, "--profile", "x")
    assert "--dtype must be of bfloat16, float16, " in fails(right, "--dtype", "int8")
    assert "`dtype` must be bfloat16, the dtype of `q`" in fails(right, "--dtype", "float16")
    assert "--layout must be of bhnd, bnhd, got 'nbhd'" in fails(right, "--layout", "nbhd")
    assert "--estimator must be of softmax, rfa, linear" in fails(right, "--estimator", "lara")
    for alpha in (0, 1, -0.5, "nan"):
        assert "`alpha` must be " in fails(right, f"--alpha={alpha}")
    for window in ("1", "1,2,3", "-1,2", "a,b", "1;2", ""):
        assert "--window must be LEFT,RIGHT, two numbers of keys" in fails(
            right, f"--window={window}"
        )
    for cap in (0, -1, "nan"):
        assert "`softcap` must be a positive finite" in fails(right, f"--softcap={cap}")
    assert "`scale` must be a finite real number" in fails(right, "--scale=nan")
    assert "must end in .json" in fails(right, "--json", right)
    assert "must end in .png" in fails(right, "--plot", right)
    float32 = save(tmp_path / "wide.npz", {x: y + 1e-4 for x, y in problem().items()}, "float32")
    assert "`q` must hold bfloat16 numbers only" in fails(float32, "--dtype", "bfloat16")


def test_the_program_in_c(tmp_path):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    code = GUIDE.split("```c\n")[1].split("```")[0]
    (tmp_path / "dump.c").write_text(code)
    command = [compiler, "-std=c99", "-O1", "-Wall", "-Wextra", "-Werror", "dump.c"]
    subprocess.run([*command, "-o", "dump", "-lm"], cwd=tmp_path, check=True, timeout=60)
    subprocess.run([tmp_path / "dump"], cwd=tmp_path, check=True, timeout=60)
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
    given = {
        name: array.asarray(x.astype(np.float32)).astype(array.bfloat16)
        if library == "jax"
        else array.asarray(x.astype(np.float32)).to(array.bfloat16)
        for name, x in problem().items()
    }
    exec(code, given)
    assert run("dump.safetensors").exit_code == 0
    assert open_tensors("dump.safetensors").dtype == "bfloat16"
