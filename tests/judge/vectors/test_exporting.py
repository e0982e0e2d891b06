"""Golden vectors for other test suites: what is written can be run there, and is right."""

import json
import shutil
import subprocess
from contextlib import suppress

import numpy as np
import pytest

from refattn.judge import vectors
from refattn.judge.vectors import exporting
from tests.judge.vectors.running import of_file

PROGRAM = r"""
#include <stdio.h>
#include <string.h>
#include "refattn_vectors.h"

static const refattn_tensor *find(const refattn_tensor *x, int count, const char *name) {
    for (int i = 0; i < count; i++)
        if (!strcmp(x[i].name, name)) return x + i;
    return 0;
}

int main(void) {
    for (int c = 0; c < REFATTN_CASES; c++) {
        const refattn_case *r = refattn_cases + c;
        const refattn_tensor *q = find(r->input, r->inputs, "q");
        const refattn_tensor *k = find(r->input, r->inputs, "k");
        const refattn_tensor *v = find(r->input, r->inputs, "v");
        const refattn_tensor *b = find(r->input, r->inputs, "bias");
        const refattn_tensor *z = find(r->input, r->inputs, "sinks");
        if (strcmp(r->estimator, "softmax") || r->inputs != 3 + !!b + !!z || q->axes != 2) continue;
        if (strcmp(r->output[0].name, "out") || *r->option) continue;
        int n = q->shape[0], d = q->shape[1], m = k->shape[0], d_v = v->shape[1];
        double scale = isnan(r->scale) ? 1 / sqrt(d) : r->scale, worst = 0;
        for (int i = 0; i < n; i++) {
            double s[512], top = z ? z->data[0] : -INFINITY, sum = 0;
            int first = r->left < 0 ? 0 : i + m - n - r->left, last = m;
            if (r->causal) last = i + m - n + 1;
            if (r->right >= 0 && i + m - n + r->right + 1 < last) last = i + m - n + r->right + 1;
            if (first < 0) first = 0;
            if (last > m) last = m;
            for (int j = first; j < last; j++) {
                s[j] = 0;
                for (int a = 0; a < d; a++) s[j] += q->data[i * d + a] * k->data[j * d + a];
                s[j] *= scale;
                if (r->softcap > 0) s[j] = r->softcap * tanh(s[j] / r->softcap);
                if (b) s[j] += b->data[i * m + j];
                if (s[j] > top) top = s[j];
            }
            if (z) sum = exp(z->data[0] - top);
            for (int j = first; j < last; j++) sum += exp(s[j] - top);
            for (int a = 0; a < d_v; a++) {
                double out = 0;
                for (int j = first; j < last; j++) out += exp(s[j] - top) * v->data[j * d_v + a];
                out = first < last ? out / sum : 0;
                double off = fabs(out - r->output[0].data[i * d_v + a]);
                off /= r->tolerance_float64 * r->output[0].size[i * d_v + a];
                if (!(off <= worst)) worst = off;
            }
        }
        printf("%s %.3g\n", r->id, worst);
    }
    return 0;
}
"""


FEW = ("softmax-options", "softmax-conventions")
SETS = pytest.mark.parametrize(
    "names", [FEW, pytest.param(vectors.FILES, marks=pytest.mark.long)], ids=["few", "all"]
)


@pytest.fixture
def documents(names, folders, monkeypatch):
    """What is exported: some files, or all."""
    found = {name: json.loads((folders["json"] / f"{name}.json").read_text()) for name in names}
    monkeypatch.setattr(exporting, "documents", lambda _: found)


@SETS
def test_a_program_in_c_meets_them(names, documents, tmp_path):
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler")
    assert [p.name for p in vectors.export(tmp_path, format="c")] == ["refattn_vectors.h"]
    (tmp_path / "run.c").write_text(PROGRAM)
    flags = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-Wno-unused-const-variable"]
    command = [compiler, *flags, "run.c", "-o", "run", "-lm"]
    subprocess.run(command, cwd=tmp_path, check=True)
    output = subprocess.run([str(tmp_path / "run")], check=True, capture_output=True, text=True)
    found = dict(line.split() for line in output.stdout.splitlines())
    assert len(found) >= (80 if names == vectors.FILES else 30)
    for part in ("window", "softcap", "sinks"):
        assert any(f"-{part}-" in name for name in found)
    assert all(float(x) <= 1 for x in found.values()), found


@SETS
def test_header_has_every_case_and_is_the_same_bytes(documents, names, every, tmp_path):
    (path,), (other,) = (vectors.export(tmp_path / x, format="c") for x in "ab")
    text = path.read_text("ascii")
    assert other.read_bytes() == path.read_bytes()
    for case in of_file(every, *names):
        assert f'{{"{case.id}", "{case.estimator}"' in text


# --- ONNX -----------------------------------------------------------------------------------------


def read(path):
    onnx = pytest.importorskip("onnx")
    return onnx.numpy_helper.to_array(onnx.TensorProto.FromString(path.read_bytes()))


@pytest.mark.parametrize("names", [vectors.FILES], ids=["all"])
def test_models_of_onnx(names, documents, every, tmp_path):
    """ONNX's own reference gives what they expect, and so does ONNX Runtime, where it is there."""
    onnx = pytest.importorskip("onnx")
    reference = pytest.importorskip("onnx.reference")
    vectors.export(tmp_path, format="onnx")
    folders = sorted(path.parent for path in tmp_path.glob("*/model.onnx"))
    ids = " ".join(folder.name for folder in folders)
    there = ("window", "softcap", "bias", "tile", "causal-top-left", "past-behind", "mask-seen")
    none = ("causal-bottom-right", "sinks", "alibi", "lse", "dropout", "past-bottom-right")
    assert {part for part in (*there, *none) if f"-{part}-" in ids} == set(there)
    assert len(folders) >= 80
    cases = {case.id: case for case in every}
    for folder in folders:
        model, case = onnx.load(folder / "model.onnx"), cases[folder.name]
        onnx.checker.check_model(model)
        data, inputs = folder / "test_data_set_0", [x.name for x in model.graph.input]
        feeds = {name: read(data / f"input_{i}.pb") for i, name in enumerate(inputs)}
        want = read(data / "output_0.pb")
        allowed = case.tolerance[want.dtype.name] * case.size["out"]
        runs = [(reference.ReferenceEvaluator(model).run(None, feeds)[0], allowed)]
        with suppress(ModuleNotFoundError):
            import onnxruntime

            if model.opset_import[0].version <= 24:  # it has no windows
                session = onnxruntime.InferenceSession(
                    (folder / "model.onnx").read_bytes(), providers=["CPUExecutionProvider"]
                )
                single = max(2.0**-23 / np.finfo(want.dtype).eps, 1.0)  # its scale, in doubles too
                runs.append((session.run(None, feeds)[0], single * allowed))
        for got, most in runs:
            assert np.all(np.abs(got - want) <= most), folder.name


def test_an_estimator_that_onnx_cannot_express(tmp_path):
    pytest.importorskip("onnx")
    with pytest.raises(ValueError, match="must be softmax for format onnx, got 'moments'"):
        vectors.export(tmp_path / "golden", format="onnx", estimator="moments")
    assert not list(tmp_path.iterdir())
