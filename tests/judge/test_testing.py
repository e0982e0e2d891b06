"""What the package has for tests of kernels: cases, an assertion and fixtures of pytest."""

import os
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

import refattn
from refattn import judge, softmax_attention, testing
from refattn.judge import pytest_plugin
from tests.judge.conformance.candidates import BY_NAME

ROOT = Path(refattn.__file__).parent.parent


# Plain functions


@pytest.mark.sweep(6)
@pytest.mark.long("sample")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("case", testing.CASES)
def test_cases_are_finite_and_exact_attention_passes(case, dtype):
    q, k, v = testing.draw_qkv(case, dtype=dtype)
    held = "float32" if dtype == "bfloat16" else dtype
    assert {str(x.dtype) for x in (q, k, v)} == {held}
    assert all(np.all(np.isfinite(x)) for x in (q, k, v))
    exact = softmax_attention(*(x.astype(np.float64) for x in (q, k, v)))
    assert np.all(np.isfinite(exact))
    testing.assert_attention_close(exact.astype(held), q, k, v, dtype=dtype)  # and warns of nothing


def first_key_twice(q, k, v):
    k, v = (np.concat([x[..., :1, :], x], -2) for x in (k, v))
    return softmax_attention(q, k, v)


SEEN = {  # in which cases a wrong kernel fails, for certain
    BY_NAME["softmax-overflow"].fn: "large shifted negative outlier",
    BY_NAME["softmax-scale-missing"].fn: "sample normal large shifted negative",
    first_key_twice: "sample normal shifted negative equal",
}


@pytest.mark.sweep(8)
@pytest.mark.long("sample", "large")
@pytest.mark.parametrize(("wrong", "case"), [(f, x) for f in SEEN for x in SEEN[f].split()])
@pytest.mark.usefixtures("verdict_alone")
def test_cases_tell_wrong_kernels(wrong, case):
    q, k, v = testing.draw_qkv(case)
    with np.errstate(all="ignore"):
        out = wrong(q, k, v)
    with pytest.raises(AssertionError, match="FAIL"):
        testing.assert_attention_close(out, q, k, v)


@pytest.mark.long
@pytest.mark.usefixtures("verdict_alone")
def test_options_and_pairs_go_to_verify():
    q, k, v = testing.draw_qkv(shape=(2, 40, 16))
    mask = np.arange(40) % 3 > 0
    options = {"causal": True, "mask": mask, "scale": 0.1, "window": (9, 0), "softcap": 20.0}
    found = refattn.attend(q, k, v, **options)
    testing.assert_attention_close(found, q, k, v, **options)
    testing.assert_attention_close(list(found), q, k, v, **options)
    with pytest.raises(AssertionError, match="FAIL"):
        testing.assert_attention_close((found.out, found.lse + 1e-3), q, k, v, **options)
    with pytest.raises(AssertionError, match="FAIL"):
        testing.assert_attention_close(found.out, q, k, v)


@pytest.mark.long
def test_tokens_may_come_before_heads():
    """As in flash-attention, whose log normalisers have heads first; gradients too."""
    q, k, v = testing.draw_qkv(shape=(2, 40, 16))
    out, pullback = refattn.vjp(refattn.softmax_attention, q, k, v, causal=True)
    back = {"d_out": out, "dq": pullback(out).q, "dk": pullback(out).k}
    lse = refattn.attend(q, k, v, causal=True, scale=0.25).lse
    turned = [np.swapaxes(x, -2, -3) for x in (out, q, k, v, *back.values())]
    for some in (lse, lse.T, lse.T[..., None]):
        given = dict(zip(back, turned[4:], strict=True)) if some is lse else {}
        testing.assert_attention_close(
            (turned[0], some), *turned[1:4], causal=True, layout="bnhd", **given
        )
    testing.assert_attention_close(*turned[:4], causal=True, layout="bnhd")
    with pytest.raises(AssertionError, match=r"the arrays look transposed: .* layout='bnhd'"):
        testing.assert_attention_close(*turned[:4], causal=True)


def test_a_verdict_that_says_little_is_a_warning():
    q, k, v = testing.draw_qkv(shape=(2, 40, 16))
    for end in (0, 1):
        some = np.zeros_like(v)[:, :end]
        with pytest.warns(UserWarning, match=r"UNDERPOWERED: .*would also pass") as found:
            testing.assert_attention_close(some, q[:, :end], k, np.zeros_like(v))
        assert found[0].filename == __file__


def test_shapes_and_draws():
    for case in testing.CASES:
        assert {x.shape for x in testing.draw_qkv(case, shape=(1, 3, 5, 2))} == {(1, 3, 5, 2)}
    a, b, c = (testing.draw_qkv("normal", rng=i)[0] for i in (0, 0, 1))
    np.testing.assert_array_equal(a, b)
    assert np.all(a != c)
    np.testing.assert_array_equal(testing.draw_qkv()[2], refattn.load_sample()[2])


# The fixtures


def test_the_project_names_the_fixtures_as_a_plugin():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["entry-points"]["pytest11"] == {"refattn": "refattn.judge.pytest_plugin"}
    assert import_module("refattn.judge.pytest_plugin") is pytest_plugin


def run(folder, source, *words):
    """Run pytest on a file in a project where the package, of this checkout, is installed."""
    info = folder / "installed" / "refattn_here-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: refattn-here\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[pytest11]\nrefattn = refattn.judge.pytest_plugin\n")
    (folder / "project").mkdir()
    (folder / "project" / "test_mine.py").write_text(source)
    path = os.pathsep.join([str(info.parent), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-W", "error", *words],
        cwd=folder / "project", env={**os.environ, "PYTHONPATH": path, "PYTEST_ADDOPTS": ""},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stderr == ""
    return done.stdout


@pytest.mark.long
def test_a_project_has_the_fixtures(tmp_path):
    said = run(
        tmp_path,
        """
import numpy as np
import pytest
from refattn import softmax_attention
from refattn.testing import CASES, assert_attention_close

seen = []

def test_every_case(qkv):
    seen.append(1)
    q, k, v = qkv
    assert q.dtype == np.float32
    assert_attention_close(softmax_attention(q, k, v), q, k, v)

def test_all_were_there():
    assert len(seen) == len(CASES) > 5

@pytest.mark.parametrize("qkv_dtype", ["float16", "float64"])
@pytest.mark.parametrize("qkv_shape", [(3, 8, 4), (16, 16)])
@pytest.mark.parametrize("qkv", ["shifted"], indirect=True)
def test_chosen(qkv, qkv_dtype, qkv_shape):
    assert [(x.shape, x.dtype) for x in qkv] == 3 * [(qkv_shape, qkv_dtype)]

class TestOwn:
    @pytest.fixture
    def qkv_shape(self):
        return 5, 2

    def test_own_shape(self, qkv):
        assert qkv[0].shape == (5, 2)

def test_wrong(qkv):
    q, k, v = qkv
    assert_attention_close(softmax_attention(q, k, v) * np.float32(1.01), q, k, v)
""",
    )
    assert "7 failed, 19 passed" in said
    assert "AssertionError: FAIL: no correct kernel in float32 gives such numbers" in said
    assert "> " in said
    assert "assert_close(" not in said  # the traceback ends at the line of the test


def test_the_module_that_users_name_says_how_to_use_it():
    assert "-p no:refattn" in testing.__doc__
    assert testing.assert_attention_close is judge.testing.assert_attention_close


def test_a_project_that_uses_none_pays_nothing(tmp_path):
    """Nothing but the names of the cases is imported, and a fixture of the name goes before."""
    said = run(
        tmp_path,
        """
import sys
import pytest

LIGHT = [f"refattn{x}" for x in ("", "._version", ".arrays", ".arrays.lazy", ".judge", 
".judge.pytest_plugin", ".typing")]
LOADED = sorted(x for x in sys.modules if x.partition(".")[0] in ("refattn", "numpy", "scipy"))

@pytest.fixture
def qkv():
    return "mine"

def test_own(qkv, pytestconfig):
    assert pytestconfig.pluginmanager.has_plugin("refattn")
    assert qkv == "mine"

def test_light():
    assert LOADED == LIGHT
""",
        *("-p", "no:hypothesispytest", "-p", "no:xdist"),
    )
    assert "2 passed" in said


@pytest.mark.long
def test_the_fixtures_can_be_switched_off(tmp_path):
    said = run(tmp_path, "def test_it(qkv): pass\n", "-p", "no:refattn")
    assert "fixture 'qkv' not found" in said
