"""Whole tests, run again with kernels that are replaced."""

import sys

import numpy as np
import pytest

from refattn.judge.audits import kernels, outputs, runs, study
from refattn.naive.softmax import softmax_attention
from tests.cli.running import run
from tests.judge.audits.test_study import few, qkv  # noqa: F401  # a fixture
from tests.problems import draw

KERNEL = """
import numpy as np
from refattn.naive.softmax import softmax_attention

def flash(q, k, v):
    return softmax_attention(q, k, v)

class Kernels:
    static = staticmethod(lambda q, k, v: softmax_attention(q, k, v))
    of_class = classmethod(lambda cls, q, k, v: cls.static(q, k, v))

def draw():
    return np.random.default_rng(0).standard_normal((3, 2, 24, 8))

def close(kernel, *qkv):
    return np.allclose(kernel(*qkv), softmax_attention(*qkv), atol=.05)

def given():
    return dict(zip("qkv", draw())), lambda got, expected: np.allclose(got, expected, atol=.05)

def wrong(q, k, v):
    return v[..., ::-1]

def check():
    return close(flash, *draw())
"""
TEST = """
import pytest
from {name} import Kernels, close, draw, flash, wrong

@pytest.fixture(scope="module", params=[1.0, 2.0])
def qkv(request):
    return [request.param * x for x in draw()]

def test_close(qkv):
    assert close(flash, *qkv)

def test_nothing():
    assert flash(*draw()).shape == (2, 24, 8)

def test_fails():
    assert not close(flash, *draw())

def test_wrong():
    wrong(*draw())

def test_without_a_kernel():
    pass

def test_in_parts(subtests):
    for factor in (1.0, 2.0):
        with subtests.test(factor=factor):
            q, k, v = draw()
            assert close(flash, factor * q, k, v)

@pytest.mark.parametrize("name", ["static", "of_class"])
def test_method(name):
    assert close(getattr(Kernels(), name), *draw())
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A kernel with its tests, under a name of its own."""
    name = f"kernels_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(KERNEL)
    (tmp_path / f"test_{name}.py").write_text(TEST.format(name=name))
    (tmp_path / "script.py").write_text(f"from {name} import *\nassert close(flash, *draw())")
    monkeypatch.chdir(tmp_path)
    yield name
    for module in [x for x in sys.modules if x.endswith(name)]:
        del sys.modules[module]


def long(*values, **options):
    return pytest.param(*values, marks=[pytest.mark.long, *options.values()])


@pytest.mark.parametrize(
    ("test", "kernel"),
    [
        *(("script.py", "flash"), ("{}:check", "flash"), ("{}:given", None)),
        long("test_{}.py::test_close", "flash"),
        long("test_{}.py::test_method[static]", "Kernels.static"),
        long("test_{}.py::test_method[of_class]", "Kernels.of_class"),
        long(
            *("test_{}.py::test_in_parts", "flash"),
            skip=pytest.mark.skipif(pytest.version_tuple < (9,), reason="pytest has no subtests"),
        ),
    ],
)
def test_a_test_of_each_form(few, folder, test, kernel):  # noqa: F811
    found = runs.audit_test(test.format(folder), kernel and f"{folder}:{kernel}", {})
    assert not found.blind
    assert found.accepts_correct
    assert {*found.rejected} == {"softmax-scale-missing", "softmax-plus-one"}
    assert [x.name for x in found.survivors] == ["softmax-short-log2e"]  # in float64
    assert {*found.alike} == {"softmax-late-keys-dropped", "softmax-causal-ahead"}
    assert sys.modules[folder].flash.__name__ == "flash"  # it is back


def test_a_strict_audit_fails_if_a_bug_passes(few, folder):  # noqa: F811
    words = "audit", "script.py", "--kernel", f"{folder}:flash"
    assert run(*words).exit_code == 0
    done = run(*words, "--strict")
    assert done.exit_code == 1
    assert "1 of 3 known bugs pass" in done.stdout


def test_a_test_that_looks_at_shapes_only(few, folder):  # noqa: F811
    found = runs.audit_test(f"test_{folder}.py::test_nothing", f"{folder}:flash", {})
    assert len(found.blind) == 4
    assert not found.rejected


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("test", "kernel", "words"),
    [
        ("test_{}.py::test_fails", "{}:flash", "TEST must pass as it is; it fails: assert"),
        ("test_{}.py::test_without_a_kernel", "{}:flash", "TEST must call the kernel"),
        ("test_{}.py::test_missing", "{}:flash", "TEST must be a test of pytest"),
        ("{}:check", "{}:missing", "--kernel must be MODULE:FUNCTION"),
        ("{}:missing", "{}:flash", "TEST must be MODULE:FUNCTION"),
        ("{}:check", None, "--kernel MODULE:FUNCTION must name the kernel"),
        ("test_{}.py::test_wrong", "{}:wrong", "is not softmax attention of its first three arra"),
        ("{}:check", "{}:draw", "must be called with arrays q, k and v; for others"),
    ],
)
def test_unusable(folder, test, kernel, words):
    with pytest.raises(ValueError, match=words):
        runs.audit_test(test.format(folder), kernel and kernel.format(folder), {})


@pytest.mark.sweep(4)
@pytest.mark.parametrize("test", ["test_{}.py::test_nothing", "{}:check"])
@pytest.mark.parametrize("late", [False, True])
def test_an_interruption_is_no_error_of_the_test(few, folder, test, late, monkeypatch):  # noqa: F811
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(study, "_try" if late else "_find_tolerances", interrupt)
    with pytest.raises(KeyboardInterrupt) as raised:
        runs.audit_test(test.format(folder), f"{folder}:flash", {})
    assert isinstance(raised.value, study.Interrupted) is late  # else nothing was found yet
    assert not late or len(raised.value.found.left) == 4


def test_an_interruption_while_tests_are_collected(folder, tmp_path):
    (tmp_path / "test_interrupted.py").write_text("raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        runs.audit_test("test_interrupted.py::test_x", f"{folder}:flash", {})


# --- how a call is read ---------------------------------------------------------------------------


def swapped(x):
    return np.swapaxes(x, -2, -3)


def trial(name):
    return next(x for x in (*outputs.trivial(), *outputs.known("softmax")) if x.name == name)


def read(kernel, *args, **kwargs):
    """The case that a call is taken for, and what the kernel and a kernel of zeros return."""
    substitute = kernels.Substitute(kernel, {})
    out = substitute(*args, **kwargs)
    substitute.trial = trial("zeros")
    zeros = substitute(*args, **kwargs)
    (case,) = substitute.cases.values()
    return case, out, zeros


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 1.0])
@pytest.mark.parametrize("layout", [lambda x: x, swapped], ids=["bhnd", "bnhd"])
def test_what_is_not_said_is_found(causal, scale, layout):
    def kernel(a, b, c):
        return layout(softmax_attention(*map(layout, (a, b, c)), causal=causal, scale=scale))

    case, out, zeros = read(kernel, *map(layout, qkv()))
    expected = softmax_attention(*qkv(), causal=causal, scale=scale)
    np.testing.assert_allclose(case.exact["out"], expected, rtol=1e-12, atol=1e-14)
    assert np.abs(zeros).max() < 1e-14 < np.abs(out).max()


def test_options_go_by_the_names_of_the_field():
    def kernel(
        query, key, value, attn_mask=None, is_causal=False, sm_scale=None, window_size=(-1, -1)
    ):
        window = tuple(None if x < 0 else x for x in window_size)
        name = "mask" if attn_mask.dtype == bool else "bias"
        options = {name: attn_mask, "causal": is_causal, "scale": sm_scale, "window": window}
        return softmax_attention(query, key, value, **options), "statistics"

    q, k, v = qkv()
    rng = np.random.default_rng(0)
    for mask in (rng.random((24, 24)) < 0.8, draw(rng, 24, 24)):
        options = {"attn_mask": mask, "is_causal": True, "sm_scale": 0.2, "window_size": (4, -1)}
        case, (out, rest), (_, still) = read(kernel, value=v, key=k, query=q, **options)
        np.testing.assert_allclose(case.exact["out"], out, rtol=1e-12, atol=1e-14)
        assert rest == still == "statistics"
        assert case.options["window"] == (4, None)


@pytest.mark.parametrize("hides", [False, True])
def test_masks_of_padding_are_read_either_way(hides):
    def kernel(q, k, v, key_padding_mask):
        return softmax_attention(q, k, v, mask=(key_padding_mask ^ hides)[:, None, None, :])

    mask = np.arange(24) < np.array([[20], [15]])
    case, out, _ = read(kernel, *(x[:, None] for x in qkv()), mask ^ hides)
    np.testing.assert_allclose(case.exact["out"], out, rtol=1e-12, atol=1e-14)


def test_calls_of_other_types_and_options_are_apart():
    """Also if masks differ where their repr has dots, or the options are no arguments."""

    def kernel(q, k, v, mask, dtype):
        return softmax_attention(q, k, v, mask=mask, **hidden).astype(dtype)

    q, k, v = (np.tile(np.round(x), (1, 2, 1)) for x in qkv())
    masks = np.ones((2, 48, 48), bool)
    masks[1, 20, 20] = False
    substitute = kernels.Substitute(kernel, {})
    calls = [(masks[i], dtype) for i, dtype in ((0, "float32"), (1, "float32"), (0, "float16"))]
    hidden = {}
    for causal in (False, True):
        hidden["causal"] = causal
        for call in calls:
            substitute(q, k, v, *call)
    found = [(x.dtype, x.options["causal"]) for x in substitute.cases.values()]
    assert found == [(dtype, causal) for causal in (False, True) for _, dtype in calls]


@pytest.mark.parametrize("answer", [True, None])
def test_outputs_that_are_written_and_methods(answer):
    class Kernel:
        def attend(self, q, k, v, out):
            out[...] = softmax_attention(q, k, v)
            return answer and out

    q, k, v = qkv()
    written = np.empty_like(v)
    Kernel.attend = substitute = kernels.Substitute(Kernel.attend, {})
    returned = Kernel().attend(q, k, v, out=written)
    np.testing.assert_array_equal(returned, softmax_attention(q, k, v))
    substitute.trial = trial("zeros")
    assert not Kernel().attend(q, k, v, out=written).any()
    assert not written.any()


# --- gradients ------------------------------------------------------------------------------------


@pytest.fixture
def attention():
    """Attention of torch, with what stands for it."""
    torch = pytest.importorskip("torch")
    return kernels.Substitute(torch.nn.functional.scaled_dot_product_attention, {}), torch


def leaves(torch):
    return [torch.from_numpy(x).requires_grad_() for x in qkv()]


@pytest.mark.parametrize("shared", [False, True])
def test_gradients_are_replaced(attention, shared):
    """In torch, with the kernel's own errors; summed if one tensor is q, k and v."""
    substitute, torch = attention
    bug = trial("softmax-backward-delta-sign")
    arrays = leaves(torch)[: 1 if shared else 3]
    d_out = torch.from_numpy(draw(np.random.default_rng(5), *arrays[0].shape))

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


def test_gradients_that_pass_are_listed(attention, monkeypatch):
    substitute, torch = attention
    bugs = [x for x in outputs.known("softmax") if "backward-scale" in x.name]
    monkeypatch.setattr(study, "known", lambda *_: bugs)

    def largest():
        q, k, v = leaves(torch)
        return torch.autograd.grad(substitute(q, k, v).square().sum(), q)[0].abs().max().item()

    found = runs._study(substitute, iter, [lambda: "" if largest() < np.inf else "large"])
    assert not found.blind  # outputs are not compared
    assert "only gradients are compared: bugs of the output were not tried" in found.lines()
    assert {x.name for x in found.survivors} == {x.name for x in bugs}
    assert all(x.caught for x in found.survivors)
    (line,) = (x for x in found.lines() if x.startswith("use "))
    assert ["dq" in line, "dk" in line, "dv" in line, "out" in line] == [True] * 3 + [False]
    substitute.trial = None
    most = 1.5 * largest()
    found = runs._study(substitute, iter, [lambda: "" if largest() < most else "large"])
    assert "softmax-backward-scale-missing-in-dq" in found.rejected
    assert "softmax-backward-scale-missing-in-dk" not in found.rejected


def test_gradients_of_a_kernel_with_other_options_are_called_untried(attention):
    substitute, torch = attention

    def differentiate():
        q, k, v = leaves(torch)
        out = substitute(q, k, v, scale=1.0)
        return "" if torch.autograd.grad(out.sum(), q)[0].shape == q.shape else "no"

    found = runs._study(substitute, iter, [differentiate])
    assert not found.blind
    assert not found.survivors
    assert "bugs of gradients are simulated with the options mask and causal only" in found.lines()
