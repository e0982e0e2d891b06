"""Estimators have gradients without a line: those of the guide, and of other packages."""

from functools import partial

import numpy as np
import pytest

from refattn import linear_attention, vjp
from refattn.registry import ESTIMATORS, register
from tests.cases import agrees, pulled
from tests.quiet import QUIET, quiet_attention, quiet_formula
from tests.validation.guide_blocks import blocks, page


@pytest.fixture(autouse=True)
def spare(monkeypatch):
    """The records as they are, whatever a test adds."""
    monkeypatch.setattr(ESTIMATORS, "_records", dict(ESTIMATORS))


def problem():
    rng = np.random.default_rng(0)
    return {x: rng.standard_normal((2, n, 4)) for x, n in zip("qkv", (5, 7, 7), strict=True)}, rng


def of_the_guide(name):
    """Run a file of the guide, which registers an estimator."""
    text = next(x.text for x in blocks(page("extend")) if x.text.startswith(f"# {name}.py\n"))
    scope = {}
    exec(text, scope)
    return scope[f"{name}_attention"]


def test_the_estimators_of_the_guide():
    arrays, rng = problem()
    agrees(top := of_the_guide("top"), top, arrays, {"num_keys": 3, "scale": 0.4}, rng)
    arrays["omega"], plain = rng.standard_normal((6, 4)), of_the_guide("plain")
    for features in ("positive", "raw"):
        agrees(plain, plain, arrays, {"features": features}, rng)


def test_an_estimator_that_is_made_of_others():
    """Its pullback is what its author wrote, where that is written."""
    arrays, rng = problem()
    register(QUIET._replace(vjp=None))
    options = {"causal": True, "mask": np.arange(7) != 2}
    for fn in (quiet_attention, partial(quiet_attention, scale=0.3)):
        formula = partial(quiet_formula, **getattr(fn, "keywords", {}))
        agrees(fn, formula, arrays, options, rng)
    d_out = rng.standard_normal((2, 5, 4))
    found = pulled(quiet_attention, arrays, d_out, **options)
    register(QUIET._replace(name="quiet-too"))
    written = pulled(quiet_attention, arrays, d_out, **options)
    for x, y in found.items():
        np.testing.assert_allclose(y, written[x], rtol=1e-12, atol=1e-14)


def test_coresets_of_keys_that_are_drawn():
    """Which keys stand for all is constant; what they carry of the others moves with all keys."""
    coreset, (arrays, rng) = ESTIMATORS["coreset"].function, problem()
    drawn = np.asarray([[0, 2, 3], [6, 1, 4]])
    agrees(coreset, coreset, arrays, {"indices": drawn}, rng)
    d_out = rng.standard_normal((2, 5, 4))
    once, twice = (pulled(coreset, arrays, d_out, num_keys=3, rng=1) for _ in range(2))
    for x, y in once.items():
        assert np.isfinite(y).all()
        np.testing.assert_array_equal(y, twice[x])


def cubed(x):
    return np.maximum(x, 0.1) ** 3 + np.exp(-np.abs(x))


@pytest.mark.parametrize("causal", [False, True])
def test_feature_maps_need_no_pullback(causal):
    arrays, rng = problem()
    agrees(
        linear_attention, linear_attention, arrays, {"feature_map": cubed, "causal": causal}, rng
    )


def test_a_function_that_the_tape_does_not_know_is_named():
    arrays, _ = problem()
    out, pullback = vjp(linear_attention, **arrays, feature_map=lambda x: np.i0(x) + 1)
    with pytest.raises(TypeError, match="must not use `i0`"):
        pullback(out)
    register(QUIET._replace(fn=hermitian, naive=hermitian, options=(), state=None, vjp=None))
    with pytest.raises(TypeError, match="must not use `fft`"):
        vjp(hermitian, **arrays)


def hermitian(q, k, v):
    return np.real(np.fft.fft(q)) @ np.swapaxes(k, -1, -2) @ v
