"""The GPU benchmark, with NumPy and torch on the CPU in the place of CuPy and torch on a GPU."""

import json
import sys
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest

pytest.importorskip("rich")
testing = pytest.importorskip("click.testing")

from validation.benchmarks import gpu, timing  # noqa: E402

SHAPE = (2, 96, 8)


def peak(form):
    return np.asarray(form()).nbytes if form else 0


@pytest.fixture
def host():
    return gpu.Device(np, timing.wall, peak, {"device": "host"})


def run(device, out, **options):
    settings = {"shapes": [SHAPE], "features": 16, "repeats": 2, "blocks": True}
    found = gpu.run(device, out, **{**settings, **options})
    assert json.loads(out.read_text("utf-8")) == json.loads(json.dumps(found))
    return found


def test_everything_is_measured(torch, host, tmp_path):
    device = replace(host, torch=torch, share=torch.from_numpy)
    found = run(device, tmp_path / "gpu.json")
    assert len(found["comparisons"]) == 2 * len(gpu.METHODS)
    for one in found["comparisons"]:
        forms = one["forms"]
        assert ("torch" in forms) == (gpu.METHODS[one["method"]].theirs is not None)
        assert all(len(form["seconds"]) == 2 for form in forms.values())
        assert set(one["ratios"]) == set(forms) - {"refattn"}
        assert forms["refattn"]["error_eps"] < 200
        assert forms["refattn"]["peak"] > 0
    exact = {x["dtype"]: x["forms"] for x in found["comparisons"] if x["method"] == "exact"}
    assert exact["float64"]["torch"]["error_eps"] < 200
    features = [x["forms"] for x in found["comparisons"] if x["method"] == "random features"]
    eps = np.finfo(np.float64).eps
    assert 0 < features[1]["torch"]["error_eps"] * eps < 0.5  # what is added to the features
    steps = {"random features, causal": len(gpu.STEPS)}
    blocks = dict.fromkeys(("exact", "random features"), len(gpu.BLOCKS))
    assert {x["method"]: len(x["medians"]) for x in found["blocks"]} == blocks | steps
    assert len(list(gpu.tables(found))) == 2


def test_without_torch_or_memory(host, tmp_path):
    found = run(host, tmp_path / "gpu.json", blocks=False)
    assert all(set(x["forms"]) == {"refattn", "roofline"} for x in found["comparisons"])
    full = replace(host, peak=Mock(side_effect=MemoryError))
    found = run(full, tmp_path / "gpu.json", blocks=False)
    for one in found["comparisons"]:
        assert one["forms"]["refattn"] == {"missing": "out of memory"}
        assert "ratios" not in one
    assert list(gpu.tables(found))


def test_a_wrong_result_shows(host, monkeypatch):
    exact = gpu.METHODS["exact"]
    wrong = replace(exact, theirs=lambda torch, q, k, v, omega: v)
    monkeypatch.setitem(gpu.METHODS, "exact", wrong)
    forms = gpu.compare(replace(host, torch=np), "exact", SHAPE, 16, "float64", 1)["forms"]
    assert forms["torch"]["error_eps"] > 1e12


def test_roofline_in_parts(monkeypatch):
    products = []

    class Counting:
        def __getattr__(self, name):
            return getattr(np, name)

        def matmul(self, x, y, out=None):
            products.append(x.shape[0] * x.shape[1] * x.shape[2] * y.shape[2])
            return np.matmul(x, y, out=out)

    q, k, v = np.random.default_rng(0).standard_normal((3, *SHAPE))
    for scores in (2**28, 96 * 40, 1):
        products.clear()
        monkeypatch.setattr(gpu, "SCORES", scores)
        gpu.roofline(Counting(), [(q, k, v)])
        assert sum(products) == 2 * 2 * 96 * 96 * 8


def test_command_line(host, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "cuda", lambda: host)
    out = tmp_path / "gpu.json"
    options = ["--size", "1x70x4", "--features", "8", "--repeats", "1"]
    done = testing.CliRunner().invoke(gpu.main, [*options, "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert json.loads(out.read_text("utf-8"))["comparisons"][0]["shape"] == [1, 70, 4]
    done = testing.CliRunner().invoke(gpu.main, ["--size", "8x8192"])
    assert done.exit_code == 2
    assert "must be heads x tokens x head size" in done.output


def test_without_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    done = testing.CliRunner().invoke(gpu.main, [])
    said = "Error: CuPy not installed: pip install 'refattn[cupy]'\n"
    assert (done.exit_code, done.output) == (2, said)
