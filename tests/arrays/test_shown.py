"""How results look: short, with no array of many numbers, and safe in a page."""

import pickle
from dataclasses import is_dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest

import refattn
from refattn.arrays.shown import held, short
from refattn.judge.verification import tolerances
from tests.pages import Page

RNG = np.random.default_rng(0)
Q, K, V = RNG.standard_normal((3, 2, 128, 8)).astype(np.float32)
SINGLE = [x[:, :16] for x in (Q, K, V)]
DOUBLE = [x.astype(np.float64) for x in SINGLE]
SMALL = [x[:1, :8] for x in DOUBLE]
OMEGA = RNG.standard_normal((16, 8))

HELD = {
    "Attended": lambda: refattn.attend(Q, K, V),
    "Certified": lambda: refattn.certified.softmax_attention(*SMALL),
    "Comparison": lambda: refattn.compare.measure(*DOUBLE, estimators=["ra"], sizes=[2], draws=2),
    "EvaState": lambda: refattn.streaming.EvaState.init(K, V, window=8, q=Q),
    "Features": lambda: refattn.features.positive_features(Q, OMEGA),
    "Gaussian": lambda: refattn.sampling.Gaussian(np.zeros(8), np.eye(8)),
    "Gradients": lambda: refattn.vjp(refattn.softmax_attention, Q, K, V)[1](V),
    "KeySample": lambda: refattn.estimators.key_sampling.draw_keys(Q, K, V, num_keys=20, rng=0),
    "Law": lambda: refattn.theory.attention_law(*DOUBLE, num_features=4),
    "LocalState": lambda: refattn.streaming.LocalState.init(K, V, window=8, omega=OMEGA),
    "Moments": lambda: refattn.moments.estimate(Q),
    "Pair": lambda: refattn.certified.softmax_attention(*SMALL).out,
    "Prediction": lambda: refattn.rounding.predict(Q, K, V, dtype="float32"),
    "Advice": lambda: refattn.compare.study(*DOUBLE, sizes=[4]),
    "Report": lambda: refattn.conformance.Report("<b>", "rfa", (), {}, "quick", 1e-6, 0, []),
    "Rounded": lambda: refattn.certified.softmax_attention(*SMALL).rounded(),
    "Samples": lambda: refattn.sampling.draw(64, 8, rng=0),
    "SecondOrderState": lambda: refattn.streaming.SecondOrderState.init(K, V, window=8),
    "SoftmaxState": lambda: refattn.streaming.SoftmaxState.init(K, V),
    "Summary": lambda: refattn.moments.summary(refattn.moments.estimate(Q)),
    "Tolerance": lambda: tolerances.tolerance(*SINGLE, dtype="float16"),
    "Verdict": lambda: refattn.verify(q=Q, k=K, v=V, out=refattn.softmax_attention(Q, K, V)),
}


@pytest.mark.sweep(2)
@pytest.mark.long("Tolerance", "Certified")
@pytest.mark.parametrize("name", HELD)
def test_results_are_short(name):
    found = HELD[name]()
    assert type(found).__name__ == name
    text = repr(found)
    assert text.startswith((f"{name}(", f"<{name} "))
    assert len(text) < 1500
    assert "\n" not in text or "array(" in text
    page = found._repr_html_()
    if name == "Report":
        assert "<b>" not in page
        return
    cells = cells_of(page)
    names = list(found.__dataclass_fields__ if is_dataclass(found) else found._fields)
    assert cells[::2] == names
    assert cells[1::2] == [short(getattr(found, x)) for x in names]
    for array in (x for x in vars_of(found) if isinstance(x, np.ndarray) and x.size > 12):
        assert f"{array.dtype} {array.shape}" in page
        assert not [x for x in ("...", "[[") if x in short(array)]


def cells_of(page):
    return [text for tags, text in Page(page).texts if tags[-1] in ("th", "td")]


def vars_of(found):
    return [*vars(found).values()] if is_dataclass(found) else [*found]


def test_results_stay_tuples():
    found = refattn.attend(Q, K, V)
    assert repr(found).count("<float32 (2, 128") == 2
    assert isinstance(found, tuple)
    assert found._fields == ("out", "lse")
    assert type(pickle.loads(pickle.dumps(found))) is refattn.Attended
    small = refattn.attend(np.zeros((1, 2)), np.ones((1, 2)), np.array([[2.0]]))
    assert repr(small) == "Attended(out=array([[2.]]), lse=array([0.]))"


def test_a_verdict_begins_with_the_verdict():
    assert repr(HELD["Verdict"]()).startswith("Verdict(verdict='PASS', profile='math', dtype=")


@held("first")
class Strange(NamedTuple):
    first: str
    second: Any


def test_text_is_escaped():
    found = Strange("<script>&\x1b", {"<i>": ["</td>", None, 1.5]})
    assert repr(found) == "Strange(first='<script>&\\x1b', ...)"
    page = found._repr_html_()
    assert not [x for x in ("<script>", "<i>", "\x1b") if x in page]
    assert cells_of(page)[1::2] == ["'<script>&\\x1b'", "{'<i>': ['</td>', None, 1.5]}"]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (np.array([[1.0, np.nan]] * 8), "<float64 (8, 2), 1 to 1, 8 nan>"),
        (np.full(20, np.nan), "<float64 (20,), 20 nan>"),
        (np.arange(20) % 2 == 0, "<bool (20,)>"),
        (np.zeros((0, 3)), "array([], shape=(0, 3), dtype=float64)"),
        ("x" * 500, repr("x" * 100 + "...")),
        ({i: i for i in range(9)}, "<dict of 9: 0, 1, 2, ...>"),
        ([np.zeros(99), 1.0], "<list of 2 float and ndarray>"),
        ((1, None), "(1, None)"),
        ((), "()"),
    ],
)
def test_short_values(value, shown):
    assert short(value) == shown


@pytest.mark.parametrize("library", ["torch", "jax.numpy", "dask.array", "array_api_strict"])
def test_nothing_is_computed_to_show_arrays_of_other_libraries(library):
    xp = pytest.importorskip(library)
    found = refattn.Attended(xp.zeros((2, 64, 4), dtype=xp.float32), xp.zeros((2, 64)))
    assert "<float32 (2, 64, 4)>" in repr(found)
    assert "<float32 (2, 64, 4)>" in found._repr_html_().replace("&lt;", "<").replace("&gt;", ">")


def test_traced_values_can_be_shown():
    jax = pytest.importorskip("jax")

    def trace(x):
        assert "float32 (2, 64, 4)" in repr(refattn.Attended(x, x))
        return x

    jax.jit(trace)(np.zeros((2, 64, 4), np.float32))
