"""A candidate of another convention is told which."""

import json
import time

import numpy as np
import pytest

import refattn
from refattn import naive
from refattn.conformance import SPECS, Adapter, check, checks_of
from refattn.registry import ESTIMATORS

ABLE = ("mask", "causal", "gqa")
CHECKS = ("query_without_keys", "causal_cross", "grouped_heads", "hidden_nonsense")


def softmax(
    corner="bottom-right",
    empty=0.0,
    polarity=True,
    interleaved=False,
    spoilt=False,
    axes=None,
    **given,
):
    """Attention of these conventions; `empty` None is the mean of all values."""

    def attention(q, k, v, *, mask=None, causal=False):
        if axes is not None:
            q, k, v = (np.transpose(x, axes) for x in (q, k, v))
        if interleaved and q.ndim > 2:
            k, v = (
                np.tile(x, (*(1,) * (x.ndim - 3), q.shape[-3] // x.shape[-3], 1, 1)) for x in (k, v)
            )
        n, m = q.shape[-2], k.shape[-2]
        seen = np.ones((n, m), bool) if mask is None else mask == polarity
        if causal:
            seen = seen & np.tri(n, m, 0 if corner == "top-left" else m - n, dtype=bool)
        if spoilt:  # what is hidden is multiplied by 0
            k, v = (x + 0 * np.sum(x, -2, keepdims=True) for x in (k, v))
        scale = given.get("scale")
        scale = scale(q.shape[-1]) if callable(scale) else scale
        out = naive.softmax_attention(q, k, v, mask=seen, scale=scale)
        wide = naive.softmax_attention(0 * q, 0 * k, v) if empty is None else empty
        out = np.where(np.any(seen, -1)[..., None], out, wide).astype(q.dtype)
        return out if axes is None else np.transpose(out, np.argsort(axes))

    return attention


TURNED = {"layout": "bhnd"}
BNHD = (0, 2, 1, 3)
JAX = {"corner": "top-left", "empty": None, "spoilt": False, "axes": BNHD}

DIAGNOSES = {
    "top-left": ({"corner": "top-left"}, {}, "what is declared but for causal: top-left"),
    "bottom-right": ({}, {"causal": "top-left"}, "what is declared but for causal: bottom-right"),
    "nan": ({"empty": np.nan}, {}, "what is declared but for empty_rows: nan"),
    "mean": ({"empty": None}, {}, "what is declared but for empty_rows: mean"),
    "zero": ({}, {"empty_rows": "mean"}, "what is declared but for empty_rows: zero"),
    "no scale": ({"scale": 1.0}, {}, "what is declared but for scale: 1"),
    "scale of d": ({"scale": lambda d: 1 / d}, {}, "what is declared but for scale: 1/d"),
    "own scale": ({}, {"scale": 1.0}, "what is declared but for scale: 1/sqrt(d)"),
    "polarity": ({"polarity": False}, {}, "what is declared but for mask: True hides a key"),
    "groups": (
        {"interleaved": True},
        {},
        "what is declared but for groups: query head h shares key head h % G",
    ),
    "hidden": ({"spoilt": True}, {}, "what is declared but for hidden: finite"),
    "tokens first": ({"axes": BNHD}, TURNED, "what is declared but for layout: bnhd"),
    "heads first": ({}, {"layout": "bnhd"}, "what is declared but for layout: bhnd"),
    "of a library": (JAX, {}, "spec jax-dpa"),
    "nearly that of a library": (JAX | {"scale": 1.0}, {}, "spec jax-dpa but for scale: 1"),
    "of a spec": (
        {"corner": "bottom-right"},
        dict(SPECS["onnx-24"]),
        "spec onnx-23, onnx-24, onnxruntime but for causal: bottom-right",
    ),
}


@pytest.mark.parametrize("name", DIAGNOSES)
def test_diagnosis(name):
    given, tags, words = DIAGNOSES[name]
    adapter = Adapter(softmax(**given), "softmax", ABLE, tags)
    report = check(adapter, checks=[x.name for x in checks_of(adapter) if x.name in CHECKS])
    assert report.verdict == "FAIL"
    assert report.diagnosis == [f"agrees with {words}"]
    assert f"\n  agrees with {words}\n" in str(report)
    assert json.loads(report.to_json())["diagnosis"] == report.diagnosis


def test_diagnosis_of_an_isolated_candidate():
    """Another process calls it; what the page says is the same."""
    pytest.importorskip("jinja2")
    report = check(
        refattn.softmax_attention,
        estimator="softmax",
        capabilities=["causal"],
        tags={"causal": "top-left"},
        checks=["causal_cross"],
        isolate=True,
    )
    words = "agrees with what is declared but for causal: bottom-right"
    assert report.diagnosis == [words]
    assert f"<p>{words}</p>" in report.to_html()
    assert f'<property name="diagnosis.0" value="{words}" />' in report.to_junit()


def test_diagnosis_within_its_time():
    """A candidate that hangs where it is asked more than a check asks is not waited for."""

    def slow(q, k, v):
        time.sleep(0.3)
        return naive.softmax_attention(q, k, v, scale=1.0)

    start = time.monotonic()
    report = check(slow, estimator="softmax", checks=["reference_values"], time_limit=1.0)
    assert report.verdict == "FAIL"
    assert time.monotonic() - start < 5


def test_no_diagnosis_of_what_no_convention_explains():
    def wrong(q, k, v):
        return naive.softmax_attention(q, k, v) + 0.01

    report = check(wrong, estimator="softmax", checks=["reference_values"])
    assert (report.verdict, report.diagnosis) == ("FAIL", [])
    right = check(refattn.softmax_attention, estimator="softmax", checks=["reference_values"])
    assert (right.verdict, right.diagnosis) == ("PASS", [])


def test_diagnosis_of_estimators():
    def features(q, k, v, *, omega, mask=None):
        mask = None if mask is None else ~mask
        return naive.random_feature_attention(q, k, v, omega=omega, mask=mask)

    able = ["omega_only", "mask"]
    report = check(features, estimator="rfa", capabilities=able, checks=["mask"])
    assert report.diagnosis == ["agrees with what is declared but for mask: True hides a key"]
    assert "kernel" in ESTIMATORS
    wrong = check(
        lambda x, y, omega: np.ones(np.shape(x)[:-1]),
        estimator="kernel",
        capabilities=["omega_only"],
    )
    assert (wrong.verdict, wrong.diagnosis) == ("FAIL", [])


@pytest.mark.parametrize("corner", ["top-left", "bottom-right"])
def test_diagnosis_of_torch(corner):
    torch = pytest.importorskip("torch")

    def sdpa(q, k, v, causal=False):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    tags = {"library": "torch", "dtype": "float32", "causal": corner}
    asked = ["causal_cross"]
    report = check(sdpa, estimator="softmax", capabilities=["causal"], tags=tags, checks=asked)
    if corner == "top-left":
        assert report.verdict == "PASS"
    else:
        assert report.diagnosis == ["agrees with what is declared but for causal: top-left"]
