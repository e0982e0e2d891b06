"""Whole tests, run again with kernels that are replaced."""

import sys
from functools import partial

import numpy as np
import pytest

from refattn.audit import kernels, outputs, runs, study
from refattn.naive.softmax import softmax_attention
from tests.audit.test_study import few, qkv  # noqa: F401  # a fixture
from tests.problems import draw

KERNEL = """
import numpy as np
from refattn.naive.softmax import softmax_attention

def flash(q, k, v, causal=False):
    return softmax_attention(q, k, v, causal=causal)

class Kernels:
    @staticmethod
    def static(q, k, v):
        return softmax_attention(q, k, v)

    @classmethod
    def of_class(cls, q, k, v):
        return cls.static(q, k, v)

def reference(q, k, v):
    return softmax_attention(q, k, v)

def draw():
    return np.random.default_rng(0).standard_normal((3, 2, 24, 8))
"""
TEST = """
import numpy as np
import pytest
from {name} import Kernels, draw, flash, reference

@pytest.fixture(scope="module", params=[1.0, 2.0])
def qkv(request):
    return [request.param * x for x in draw()]

def test_close(qkv):
    assert np.allclose(flash(*qkv), reference(*qkv), atol=.05)

def test_nothing(qkv):
    assert flash(*qkv).shape == qkv[0].shape

def test_fails(qkv):
    assert not np.allclose(flash(*qkv), reference(*qkv))

def test_without_a_kernel():
    pass

def test_in_parts(subtests):
    for factor in (1.0, 2.0):
        with subtests.test(factor=factor):
            q, k, v = draw()
            assert np.allclose(flash(factor * q, k, v), reference(factor * q, k, v), atol=.05)

@pytest.mark.parametrize("name", ["static", "of_class"])
def test_method(name):
    assert np.allclose(getattr(Kernels(), name)(*draw()), reference(*draw()), atol=.05)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch, request):
    """A kernel with its tests, under a name of its own."""
    name = f"kernels_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(KERNEL)
    (tmp_path / f"test_{name}.py").write_text(TEST.format(name=name))
    (tmp_path / "script.py").write_text(
        f"from {name} import *\nassert abs(flash(*draw()) - reference(*draw())).max() < .05"
    )
    (tmp_path / f"given_{name}.py").write_text(
        f"import numpy as np\nfrom {name} import *\n"
        "def given():\n"
        "    return dict(zip('qkv', draw())), lambda x, y: np.allclose(x, y, atol=.05)\n"
        "def check():\n    assert np.allclose(flash(*draw()), reference(*draw()), atol=.05)\n"
    )
    monkeypatch.chdir(tmp_path)
    yield name
    for module in [x for x in sys.modules if x.endswith(name)]:
        del sys.modules[module]


@pytest.mark.parametrize(
    "test",
    [
        pytest.param("test_{}.py::test_close", marks=pytest.mark.long),
        *("script.py", "given_{}:check"),
    ],
)
def test_a_test_of_each_form(few, folder, test):  # noqa: F811
    found = runs.audit_test(test.format(folder), f"{folder}:flash", {})
    assert not found.blind
    assert found.accepts_correct
    assert {*found.rejected} == {"softmax-scale-missing", "softmax-plus-one"}
    assert [x.name for x in found.survivors] == ["softmax-short-log2e"]  # in float64
    assert {*found.alike} == {"softmax-late-keys-dropped", "softmax-causal-ahead"}
    assert sys.modules[folder].flash.__name__ == "flash"  # it is back


@pytest.mark.long
@pytest.mark.parametrize(
    ("test", "kernel"),
    [
        pytest.param(
            *("test_in_parts", "flash"),
            marks=pytest.mark.skipif(pytest.version_tuple < (9,), reason="pytest has no subtests"),
        ),
        ("test_method[static]", "Kernels.static"),
        ("test_method[of_class]", "Kernels.of_class"),
    ],
)
def test_parts_of_tests_and_methods_that_take_no_instance(few, folder, test, kernel):  # noqa: F811
    found = runs.audit_test(f"test_{folder}.py::{test}", f"{folder}:{kernel}", {})
    assert not found.blind
    assert {*found.rejected} == {"softmax-scale-missing", "softmax-plus-one"}


def test_a_function_that_gives_inputs_and_a_comparison(few, folder):  # noqa: F811
    found = runs.audit_test(f"given_{folder}:given", None, {})
    assert len(found.rejected) == 2
    assert not found.blind


def test_a_test_that_looks_at_shapes_only(few, folder):  # noqa: F811
    found = runs.audit_test(f"test_{folder}.py::test_nothing", f"{folder}:flash", {})
    assert len(found.blind) == 4
    assert not found.rejected


@pytest.mark.parametrize(
    ("test", "kernel", "words"),
    [
        (
            "test_{}.py::test_fails",
            "{}:flash",
            "TEST must pass as it is; it fails: assert",
        ),
        ("test_{}.py::test_without_a_kernel", "{}:flash", "TEST must call the kernel"),
        ("test_{}.py::test_missing", "{}:flash", "TEST must be a test of pytest"),
        ("given_{}:check", "{}:missing", "--kernel must be MODULE:FUNCTION"),
        ("given_{}:missing", "{}:flash", "TEST must be MODULE:FUNCTION"),
        ("given_{}:check", None, "--kernel MODULE:FUNCTION must say what TEST calls"),
    ],
)
def test_unusable(folder, test, kernel, words):
    with pytest.raises(ValueError, match=words):
        runs.audit_test(test.format(folder), kernel and kernel.format(folder), {})


# --- how a call is read ---------------------------------------------------------------------------


def swapped(x):
    return np.swapaxes(x, -2, -3)


def read(kernel, *args, **kwargs):
    """The case that a call is taken for."""
    substitute = kernels.Substitute(kernel, {})
    out = substitute(*args, **kwargs)
    (case,) = substitute.cases.values()
    return case, out, substitute


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 1.0])
@pytest.mark.parametrize("layout", [lambda x: x, swapped], ids=["bhnd", "bnhd"])
def test_what_is_not_said_is_found(causal, scale, layout):
    def kernel(a, b, c):
        return layout(softmax_attention(*map(layout, (a, b, c)), causal=causal, scale=scale))

    q, k, v = qkv()
    case, out, substitute = read(kernel, *map(layout, (q, k, v)))
    expected = softmax_attention(q, k, v, causal=causal, scale=scale)
    np.testing.assert_allclose(case.exact["out"], expected, rtol=1e-12, atol=1e-14)
    substitute.trial = next(x for x in outputs.trivial() if x.name == "zeros")
    assert np.abs(substitute(*map(layout, (q, k, v)))).max() < 1e-14 < np.abs(out).max()


def test_options_go_by_the_names_of_the_field():
    def kernel(
        query, key, value, attn_mask=None, is_causal=False, sm_scale=None, window_size=(-1, -1)
    ):
        window = tuple(None if x < 0 else x for x in window_size)
        window = None if window == (None, None) else window
        bias = attn_mask if attn_mask is not None and attn_mask.dtype != bool else None
        mask = attn_mask if bias is None else None
        out = softmax_attention(
            query, key, value, bias=bias, mask=mask, causal=is_causal, scale=sm_scale, window=window
        )
        return out, "statistics"

    q, k, v = qkv()
    rng = np.random.default_rng(0)
    for mask in (rng.random((24, 24)) < 0.8, draw(rng, 24, 24)):
        options = {"attn_mask": mask, "is_causal": True, "sm_scale": 0.2, "window_size": (4, -1)}
        case, (out, rest), _ = read(kernel, value=v, key=k, query=q, **options)
        np.testing.assert_allclose(case.exact["out"], out, rtol=1e-12, atol=1e-14)
        assert rest == "statistics"
        assert case.options["window"] == (4, None)


@pytest.mark.parametrize("hides", [False, True])
def test_masks_of_padding_are_read_either_way(hides):
    def kernel(q, k, v, key_padding_mask):
        mask = ~key_padding_mask if hides else key_padding_mask
        return softmax_attention(q, k, v, mask=mask[:, None, None, :])

    q, k, v = (x[:, None] for x in qkv())
    mask = np.arange(24) < np.array([[20], [15]])
    case, out, _ = read(kernel, q, k, v, ~mask if hides else mask)
    np.testing.assert_allclose(case.exact["out"], out, rtol=1e-12, atol=1e-14)


def test_calls_of_other_types_and_masks_are_apart():
    """Also if all numbers are the same, and masks differ where their repr has dots."""

    def kernel(q, k, v, mask, dtype):
        return softmax_attention(q, k, v, mask=mask).astype(dtype)

    q, k, v = (np.tile(np.round(x), (1, 2, 1)) for x in qkv())
    masks = np.ones((2, 48, 48), bool)
    masks[1, 20, 20] = False
    substitute = kernels.Substitute(kernel, {})
    for mask, dtype in ((masks[0], "float32"), (masks[1], "float32"), (masks[0], "float16")):
        substitute(q, k, v, mask, dtype)
    assert [x.dtype for x in substitute.cases.values()] == ["float32", "float32", "float16"]


def test_outputs_that_are_written_and_methods():
    class Kernel:
        def attend(self, q, k, v, out=None):
            out = np.empty_like(v) if out is None else out
            out[...] = softmax_attention(q, k, v)
            return self.answer and out

    q, k, v = qkv()
    for answer in (True, None):
        substitute = kernels.Substitute(Kernel.attend, {})
        kernel = type("Replaced", (Kernel,), {"attend": substitute, "answer": answer})()
        out = np.empty_like(v)
        returned = kernel.attend(q, k, v, out=out)
        np.testing.assert_array_equal(returned, softmax_attention(q, k, v))
        substitute.trial = next(x for x in outputs.trivial() if x.name == "zeros")
        assert not kernel.attend(q, k, v, out=out).any()
        assert not out.any()


def test_other_functions_are_refused():
    q, k, v = qkv()
    with pytest.raises(kernels.Unclear, match="is not softmax attention of its first three arrays"):
        read(lambda q, k, v: v[..., ::-1], q, k, v)
    with pytest.raises(kernels.Unclear, match="must be called with arrays q, k and v; for others"):
        read(lambda x: x, q)


@pytest.mark.parametrize("shared", [False, True])
def test_gradients_are_replaced(shared):
    """In torch, with the kernel's own errors; summed if one tensor is q, k and v."""
    torch = pytest.importorskip("torch")
    bug = next(x for x in outputs.known("softmax", ()) if x.name == "softmax-backward-delta-sign")
    arrays = [torch.from_numpy(x).requires_grad_() for x in qkv()]
    arrays = arrays[:1] if shared else arrays
    d_out = torch.from_numpy(draw(np.random.default_rng(5), *arrays[0].shape))
    substitute = kernels.Substitute(torch.nn.functional.scaled_dot_product_attention, {})

    def differentiate():
        out = substitute(*(arrays * 3)[:3])
        return [x.numpy() for x in torch.autograd.grad(out, arrays, d_out)]

    right = differentiate()
    substitute.trial = bug
    wrong = differentiate()
    (case,) = substitute.cases.values()
    expected = [[x[name] for name in ("dq", "dk", "dv")] for x in (case.exact, case.give(bug))]
    for found, arrays in zip((right, wrong), expected, strict=True):
        for x, y in zip(found, [sum(arrays)] if shared else arrays, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-12)
    assert max(np.abs(x - y).max() for x, y in zip(right, wrong, strict=True)) > 0.1


def test_gradients_that_pass_are_listed(monkeypatch):
    torch = pytest.importorskip("torch")
    substitute = kernels.Substitute(torch.nn.functional.scaled_dot_product_attention, {})
    bugs = [x for x in outputs.known("softmax", ()) if "backward-scale" in x.name]
    monkeypatch.setattr(study, "known", lambda *_: bugs)

    def largest():
        q, k, v = (torch.from_numpy(x).requires_grad_() for x in qkv())
        return torch.autograd.grad(substitute(q, k, v).square().sum(), q)[0].abs().max().item()

    found = runs._study(substitute, iter, [lambda: "" if largest() < np.inf else "large"])
    assert not found.blind  # outputs are not compared
    assert "only gradients are compared: bugs of the output were not tried" in found.lines()
    assert {x.name for x in found.survivors} == {x.name for x in bugs}
    assert all(x.caught for x in found.survivors)
    (line,) = (x for x in found.lines() if x.startswith("instead: "))
    assert ["dq" in line, "dk" in line, "dv" in line, "out" in line] == [True] * 3 + [False]
    substitute.trial = None
    most = 1.5 * largest()
    found = runs._study(substitute, iter, [lambda: "" if largest() < most else "large"])
    assert "softmax-backward-scale-missing-in-dq" in found.rejected
    assert "softmax-backward-scale-missing-in-dk" not in found.rejected


def test_gradients_of_a_kernel_with_other_options_are_called_untried():
    torch = pytest.importorskip("torch")
    kernel = partial(torch.nn.functional.scaled_dot_product_attention, scale=1.0)
    substitute = kernels.Substitute(kernel, {"scale": 1.0})

    def differentiate():
        q, k, v = (torch.from_numpy(x).requires_grad_() for x in qkv())
        return "" if torch.autograd.grad(substitute(q, k, v).sum(), q)[0].shape == q.shape else "no"

    found = runs._study(substitute, iter, [differentiate])
    assert not found.blind
    assert not found.survivors
    assert "bugs of gradients take no options but mask and causal" in found.lines()
