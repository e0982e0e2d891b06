"""Checks of gradients: right ones pass, whatever the library, and each mistake shows."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import refattn
from refattn import vjp
from refattn.conformance import Adapter, Report, check, checks_of
from refattn.conformance.defects import MUTANTS, VARIANTS, Mutant

RIGHT = [m for m in VARIANTS if "vjp" in m.capabilities]
SEES = ("mask", "causal", "gqa")
BACK = [m for m in MUTANTS if "vjp" in m.capabilities]


def gradients(fn: Any, estimator: str, *capabilities: str, **tags: Any) -> Report:
    """The checks of gradients alone."""
    adapter = Adapter(fn, estimator, ("vjp", *capabilities), tags)
    names = [x.name for x in checks_of(adapter) if x.name.startswith("gradients")]
    return check(adapter, checks=names, rng=0)


def with_pullback(fn: Any, **fixed: Any) -> Any:
    """The package's own function, with `d_out`."""

    def attention(q: Any, k: Any, v: Any, *, d_out: Any = None, **options: Any) -> Any:
        if "seed" in options:
            options["rng"] = options.pop("seed")
        if d_out is None:
            return fn(q, k, v, **fixed, **options)
        out, pullback = vjp(fn, q, k, v, **fixed, **options)
        return (out, *pullback(d_out)[:3])

    return attention


OWN: dict[str, tuple[Any, str, tuple[str, ...], dict[str, Any]]] = {
    "softmax": (refattn.softmax_attention, "softmax", SEES, {}),
    "rfa": (refattn.random_feature_attention, "rfa", (*SEES, "omega", "omega_per_head"), {}),
    "rfa drawn": (refattn.random_feature_attention, "rfa", SEES, {}),
    "ra": (refattn.randomized_attention, "ra", (*SEES, "omega_only"), {}),
    "lara": (refattn.linear_randomized_attention, "lara", (*SEES, "omega"), {}),
    "is": (refattn.importance_sampled_attention, "is", (*SEES, "omega_only"), {}),
    "mean of ratios": (refattn.mean_of_ratios_attention, "mean-of-ratios", (*SEES, "omega"), {}),
    "linear": (refattn.linear_attention, "linear", SEES, {}),
    "relu": (
        partial(refattn.linear_attention, feature_map=refattn.features.relu_features),
        "linear",
        SEES,
        {"feature_map": "relu"},
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", OWN)
def test_own_pullbacks_pass(name: str, dtype: str) -> None:
    fn, estimator, capabilities, tags = OWN[name]
    report = gradients(with_pullback(fn), estimator, *capabilities, **tags, dtype=dtype)
    assert report.verdict == "PASS", report


@pytest.mark.long
@pytest.mark.parametrize("entry", RIGHT, ids=lambda m: m.name)
def test_other_styles_pass(entry: Mutant) -> None:
    for dtype in ("float32", "float64"):
        report = gradients(
            entry.fn, entry.estimator, *entry.capabilities, **{**entry.tags, "dtype": dtype}
        )
        assert report.verdict == "PASS", report


@pytest.mark.parametrize("entry", BACK, ids=lambda m: m.name)
def test_mistakes_are_rejected(entry: Mutant) -> None:
    """Each by the first of the checks that it fails; its way forth is right."""
    adapter = Adapter(entry.fn, entry.estimator, entry.capabilities, entry.tags)
    for name in (
        "gradients",
        "gradients_of_large_logits",
        "gradients_together",
        "gradients_of_many_tokens",
    ):
        if name in [x.name for x in checks_of(adapter)]:
            report = check(adapter, checks=[name], rng=0)
            if report.verdict == "FAIL":
                return
    raise AssertionError(entry.name)


def drawn(fn: Any) -> Any:
    """A way back as it is where frequencies are drawn inside."""

    def attention(q: Any, k: Any, v: Any, *, num_features: int, seed: int, **options: Any) -> Any:
        omega = np.random.default_rng(seed).standard_normal((num_features, q.shape[-1]))
        return fn(q, k, v, omega=omega.astype(q.dtype), **options)

    return attention


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_mistakes_of_black_boxes(dtype: str) -> None:
    """Where frequencies are drawn slopes, sums and zeros show what numbers cannot."""
    by_name = {m.name.removeprefix("rfa-backward-"): m.fn for m in BACK if m.estimator == "rfa"}
    right = next(m.fn for m in RIGHT if m.name == "rfa-backward")
    assert gradients(drawn(right), "rfa", *SEES, dtype=dtype).verdict == "PASS"
    for name, seen_by in {
        "delta-dropped": "gradients_of_means",
        "normaliser-constant-for-keys": "gradients_are_slopes",
        "norm-forgotten": "gradients_are_slopes",
        "mask-ignored": "gradients_of_hidden",
        "mask-of-first-query": "gradients_are_slopes",
        "causal-ahead": "gradients_are_slopes",
        "causal-top-left": "gradients_are_slopes",
        "group-not-summed": "gradients_are_slopes",
        "group-interleaved": "gradients_are_slopes",
        "root-missing": "gradients_are_slopes",
        "cotangents-are-ones": "gradients_are_linear",
    }.items():
        report = gradients(drawn(by_name[name]), "rfa", *SEES, dtype=dtype)
        assert seen_by in [r.check for r in report.results if r.status == "FAIL"], (name, report)


def test_there_are_mistakes_enough() -> None:
    assert len({type(m.fn).__name__ for m in BACK}) == len(BACK) >= 40
    assert all(m.effect for m in BACK)


def test_suspects_and_places() -> None:
    """A mistake is recognised, and where it is said."""
    entry = next(m for m in BACK if m.name == "softmax-backward-scale-twice-in-dk")
    report = gradients(entry.fn, "softmax", *SEES)
    (result,) = (r for r in report.results if r.check == "gradients")
    assert result.expected.startswith("dk ")
    assert "n = 4, m = 6: every token" in result.got
    assert result.suspects[0].startswith("softmax-backward-scale-twice-in-dk (the same numbers)")
    assert "d_out=d_out" in result.reproducer
    assert "got = got[2]" in result.reproducer


def test_results_that_are_none() -> None:
    def no_tuple(q: Any, k: Any, v: Any, *, d_out: Any = None) -> Any:
        return refattn.softmax_attention(q, k, v)

    def transposed(q: Any, k: Any, v: Any, *, d_out: Any = None) -> Any:
        out, pullback = vjp(refattn.softmax_attention, q, k, v)
        found = pullback(out if d_out is None else d_out)
        return out if d_out is None else (out, found.q, np.swapaxes(found.k, -1, -2), found.v)

    for fn, words in ((no_tuple, "(out, dq, dk, dv)"), (transposed, "shape (6, 4)")):
        report = gradients(fn, "softmax")
        assert report.verdict == "FAIL"
        assert words in report.results[0].expected


@pytest.mark.parametrize("wrong", [False, True])
def test_torch_differentiates_what_it_is_given(wrong: bool) -> None:
    torch = pytest.importorskip("torch")

    class Attention(torch.autograd.Function):  # type: ignore[misc, name-defined]
        """Exact attention whose way back forgets the normaliser."""

        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
            p = torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1)
            ctx.save_for_backward(q, k, v, p)
            return p @ v

        @staticmethod
        def backward(ctx: Any, *d_out: Any) -> Any:
            (q, k, v, p), (g,), c = ctx.saved_tensors, d_out, ctx.saved_tensors[0].shape[-1] ** -0.5
            t = g @ v.mT
            s = p * (t if wrong else t - (p * t).sum(-1, keepdim=True))
            return c * s @ k, c * s.mT @ q, p.mT @ g

    for dtype in ("float32", "float64"):
        report = gradients(Attention.apply, "softmax", library="torch", dtype=dtype)
        assert report.verdict == ("FAIL" if wrong else "PASS"), report


def test_jax_differentiates_what_it_is_given() -> None:
    jax = pytest.importorskip("jax")
    jax.config.update("jax_enable_x64", True)

    def attention(q: Any, k: Any, v: Any) -> Any:
        weights = jax.nn.softmax(q @ jax.numpy.swapaxes(k, -1, -2) * q.shape[-1] ** -0.5, -1)
        return weights @ v

    def blocked(q: Any, k: Any, v: Any) -> Any:
        return attention(q, jax.lax.stop_gradient(k), v)

    assert gradients(attention, "softmax", library="jax").verdict == "PASS"
    assert gradients(blocked, "softmax", library="jax").verdict == "FAIL"
