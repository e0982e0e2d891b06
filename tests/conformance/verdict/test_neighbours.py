"""A candidate of another convention is told which."""

import json
import time

import numpy as np
import pytest

import refattn
from refattn import naive
from refattn.conformance import SPECS, Adapter, check, checks_of

ABLE = ("mask", "causal", "gqa")
CHECKS = ("query_without_keys", "causal_cross", "grouped_heads", "hidden_nonsense")


BNHD = (0, 2, 1, 3)
RIGHT = {"corner": "bottom-right", "empty": 0.0, "seen": True, "groups": "contiguous"}
RIGHT |= {"spoilt": False, "axes": None, "scale": None}


def softmax(**said):
    """Attention of these conventions; `empty` None is the mean of all values."""
    said = RIGHT | said

    def attention(q, k, v, *, mask=None, causal=False):
        if said["axes"] is not None:
            q, k, v = (np.transpose(x, said["axes"]) for x in (q, k, v))
        if said["groups"] == "interleaved" and q.ndim > 2:
            times = (*(1,) * (q.ndim - 3), q.shape[-3] // k.shape[-3], 1, 1)
            k, v = np.tile(k, times), np.tile(v, times)
        n, m = q.shape[-2], k.shape[-2]
        seen = np.ones((n, m), bool) if mask is None else mask == said["seen"]
        if causal:
            seen = seen & np.tri(n, m, 0 if said["corner"] == "top-left" else m - n, dtype=bool)
        if said["spoilt"]:  # what is hidden is multiplied by 0
            k, v = (x + 0 * np.sum(x, -2, keepdims=True) for x in (k, v))
        scale = said["scale"](q.shape[-1]) if callable(said["scale"]) else said["scale"]
        out = naive.softmax_attention(q, k, v, mask=seen, scale=scale)
        mean = said["empty"] is None
        empty = naive.softmax_attention(0 * q, 0 * k, v) if mean else said["empty"]
        out = np.where(np.any(seen, -1)[..., None], out, empty).astype(q.dtype)
        return out if said["axes"] is None else np.transpose(out, np.argsort(said["axes"]))

    return attention


JAX = {"corner": "top-left", "empty": None, "axes": BNHD}
ONNX = dict(SPECS["onnx-24"])
BUT = "what is declared but for "
BOTTOM = "causal: bottom-right"
DIAGNOSES = [  # how a candidate differs, what it declares, and what it is told
    ({"corner": "top-left"}, {}, BUT + "causal: top-left"),
    ({}, {"causal": "top-left"}, BUT + BOTTOM),
    ({"empty": np.nan}, {}, BUT + "empty_rows: nan"),
    ({"empty": None}, {}, BUT + "empty_rows: mean"),
    ({}, {"empty_rows": "mean"}, BUT + "empty_rows: zero"),
    ({"scale": 1.0}, {}, BUT + "scale: 1"),
    ({"scale": lambda d: 1 / d}, {}, BUT + "scale: 1/d"),
    ({}, {"scale": 1.0}, BUT + "scale: 1/sqrt(d)"),
    ({"seen": False}, {}, BUT + "mask: True hides a key"),
    ({"groups": "interleaved"}, {}, BUT + "groups: query head h shares key head h % G"),
    ({"spoilt": True}, {}, BUT + "hidden: finite"),
    ({"axes": BNHD}, {"layout": "bhnd"}, BUT + "layout: bnhd"),
    ({}, {"layout": "bnhd"}, BUT + "layout: bhnd"),
    (JAX, {}, "spec jax-dpa"),
    (JAX | {"scale": 1.0}, {}, "spec jax-dpa but for scale: 1"),
    ({}, ONNX, f"spec onnx-23, onnx-24, onnxruntime but for {BOTTOM}"),
]


@pytest.mark.parametrize(("given", "tags", "words"), DIAGNOSES)
def test_diagnosis(given, tags, words):
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
    assert verdict(slow, time_limit=1.0)[0] == "FAIL"
    assert time.monotonic() - start < 5


def verdict(fn, estimator="softmax", able=(), checks=("reference_values",), **options):
    report = check(fn, estimator=estimator, capabilities=able, checks=checks, **options)
    return report.verdict, report.diagnosis


def test_no_diagnosis_of_what_no_convention_explains():
    wrong = verdict(lambda q, k, v: naive.softmax_attention(q, k, v) + 0.01)
    assert wrong == ("FAIL", [])
    assert verdict(refattn.softmax_attention) == ("PASS", [])


def test_diagnosis_of_estimators():
    def features(q, k, v, *, omega, mask=None):
        mask = None if mask is None else ~mask
        return naive.random_feature_attention(q, k, v, omega=omega, mask=mask)

    found = verdict(features, "rfa", ["omega_only", "mask"], ["mask"])
    assert found[1] == ["agrees with what is declared but for mask: True hides a key"]
    wrong = verdict(lambda x, y, omega: np.ones(np.shape(x)[:-1]), "kernel", ["omega_only"], None)
    assert wrong == ("FAIL", [])


@pytest.mark.parametrize("corner", ["top-left", "bottom-right"])
def test_diagnosis_of_torch(corner):
    torch = pytest.importorskip("torch")

    def sdpa(q, k, v, causal=False):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    tags = {"library": "torch", "dtype": "float32", "causal": corner}
    words = ["agrees with what is declared but for causal: top-left"]
    right = corner == "top-left"
    found = verdict(sdpa, able=["causal"], tags=tags, checks=["causal_cross"])
    assert found == (("PASS", []) if right else ("FAIL", words))
