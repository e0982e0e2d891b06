"""Checks of log normalisers: right ones pass in every convention, and each mistake shows."""

import numpy as np
import pytest

from refattn import attend, vjp
from refattn.conformance import Adapter, check, checks_of

SEES = ("mask", "causal", "gqa")
CHECKS = ("log_normalisers", "normaliser_without_keys", "merged_parts", "gradients_of_normalisers")


def normalisers(fn, *capabilities, **tags):
    """The checks of normalisers alone."""
    adapter = Adapter(fn, "softmax", ("lse", "d_lse", *capabilities), tags)
    names = [x.name for x in checks_of(adapter) if x.name in CHECKS]
    return check(adapter, checks=names, rng=0)


def with_lse(change=None, of_gradient=1.0):
    """The package's own function; `change` makes another lse of (lse, q, k, v, options)."""

    def attention(q, k, v, *, return_lse=False, d_out=None, d_lse=None, **options):
        (out, lse), pullback = vjp(attend, q, k, v, scale=q.shape[-1] ** -0.5, **options)
        if d_out is not None:
            d_lse = None if d_lse is None else float(of_gradient) * d_lse
            return (out, *pullback((d_out, d_lse))[:3])
        lse = lse if change is None else change(lse, q, k, v, options)
        return (out, lse) if return_lse else out

    return attention


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_right_ones_pass(dtype):
    report = normalisers(with_lse(), *SEES, "vjp", dtype=dtype)
    assert [r.check for r in report.results] == list(CHECKS)
    assert report.verdict == "PASS", report
    base_2 = with_lse(lambda lse, *_: lse / np.log(2.0), 1 / np.log(2.0))
    assert normalisers(base_2, *SEES, "vjp", dtype=dtype, lse_base="2").verdict == "PASS"
    assert normalisers(base_2, *SEES, "vjp", dtype=dtype).verdict == "FAIL"


def raw(lse, q, k, v, options):
    """Without a maximum."""
    with np.errstate(all="ignore"):
        return np.log(np.exp(lse))


WRONG = {
    "base 2": lambda lse, *_: lse / np.log(2.0),
    "no maximum": raw,
    "the mean, not the sum": lambda lse, q, k, *_: lse - np.log(k.shape[-2]),
    "1 more": lambda lse, *_: np.log1p(np.exp(lse)),
    "another sign": lambda lse, *_: -lse,
    "mask left out": lambda lse, q, k, v, o: attend(q, k, v, scale=q.shape[-1] ** -0.5).lse,
    "of another head": lambda lse, *_: np.roll(lse, 1, -2) if lse.ndim > 1 else lse,
    "infinite without keys": lambda lse, *_: np.where(lse == -np.inf, np.inf, lse),
    "a column": lambda lse, *_: lse[..., None],
    "rounded": lambda lse, *_: lse.astype(np.float16).astype(lse.dtype),
    "without scale": lambda lse, q, k, v, o: attend(q, k, v, **o).lse,
}


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_are_rejected(name):
    report = normalisers(with_lse(WRONG[name]), *SEES)
    assert report.verdict == "FAIL", report


def test_other_mistakes_are_rejected():
    report = normalisers(with_lse(of_gradient=0.0), "vjp")
    assert [r.check for r in report.results if r.status == "FAIL"] == ["gradients_of_normalisers"]
    report = normalisers(lambda q, k, v, **_: attend(q, k, v, scale=q.shape[-1] ** -0.5).out)
    assert report.verdict == "FAIL"
    assert report.results[0].expected == "(out, lse)"


def test_torch_and_jax_differentiate_both():
    torch = pytest.importorskip("torch")
    jax = pytest.importorskip("jax")

    def by(xp, softmax, log_sum_exp, layout):
        def attention(q, k, v, return_lse=False):
            axes = (lambda x: xp.swapaxes(x, 1, 2)) if layout == "bnhd" else (lambda x: x)
            q, k, v = map(axes, (q, k, v))
            s = q @ xp.swapaxes(k, -1, -2) * q.shape[-1] ** -0.5
            out = axes(softmax(s, -1) @ v)
            return (out, log_sum_exp(s, -1)) if return_lse else out

        return attention

    logsumexp = jax.scipy.special.logsumexp
    for layout in ("bhnd", "bnhd"):
        given = {"dtype": "float32", "layout": layout}
        of_torch = by(torch, torch.softmax, torch.logsumexp, layout)
        report = normalisers(of_torch, "vjp", library="torch", **given)
        assert report.verdict == "PASS", report
        of_jax = by(jax.numpy, jax.nn.softmax, logsumexp, layout)
        report = normalisers(of_jax, "vjp", library="jax", **given)
        assert report.verdict == "PASS", report
