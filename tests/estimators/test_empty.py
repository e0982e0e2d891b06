"""No queries, no keys, no columns of values, no heads: every estimator, with every mask."""

from functools import partial
from itertools import product

import numpy as np
import pytest

from refattn import (
    importance_sampled_attention,
    linear_attention,
    linear_randomized_attention,
    mean_of_ratios_attention,
    random_feature_attention,
    randomized_attention,
    registry,
    softmax_attention,
)
from refattn.estimators import lara, rfa
from refattn.streaming import LinearState, PositiveState, SoftmaxState

OMEGA = np.random.default_rng(0).standard_normal((2, 2))
ESTIMATORS = {
    "softmax": softmax_attention,
    "linear": linear_attention,
    **{
        f"rfa {name}": partial(random_feature_attention, omega=OMEGA, features=name)
        for name in rfa.FEATURES
    },
    "is": partial(importance_sampled_attention, omega=OMEGA),
    "ra": partial(randomized_attention, num_samples=2, rng=0),
    "mean of ratios": partial(mean_of_ratios_attention, num_samples=2, rng=0),
    **{
        f"lara {name}": partial(
            linear_randomized_attention, num_proposals=1, rng=0, weighting=name, antithetic=True
        )
        for name in lara.WEIGHTINGS
    },
}
NO_MEAN = ("is", "rfa trigonometric")  # of values of 1, these are not 1


def problems(backend):
    """Every (heads, n, m, d_v), mask and direction; fewer where each takes long."""
    lazy = backend.name in ("array_api_strict", "dask", "jax")
    masks = ("none", "n, m") if lazy else ("none", "m", "1, m", "n, m")
    shapes = product((0, 3) if lazy else (0, 1, 3), repeat=4)
    if lazy:
        shapes = (shape for shape in shapes if shape.count(0) in (1, 2))
    return product(shapes, masks, (False, True))


@pytest.mark.long("readonly", "jax", "dask")
@pytest.mark.parametrize("name", ESTIMATORS)
def test_empty_axes(backend, name):
    """Right shapes, rows of 0 where no key is seen, or an error: chunks of LARA are not empty."""
    backend.jit = lambda run: run  # type: ignore[method-assign]  # each shape would be compiled
    for (heads, n, m, d_v), kind, causal in problems(backend):
        q, k, v = (np.ones((heads, *shape)) for shape in ((n, 2), (m, 2), (m, d_v)))
        seen, options = np.ones((n, m), bool), {}
        if kind != "none":
            shape = {"m": (m,), "1, m": (1, m), "n, m": (n, m)}[kind]
            options["mask"] = np.broadcast_to(np.arange(m) > 0, shape).copy()
            seen = seen & options["mask"]
        if causal:
            seen = seen & np.tri(n, m, m - n, dtype=bool)
        call = partial(backend.call, ESTIMATORS[name], q, k, v, causal=causal, **options)
        if "lara" in name and "query" in name:
            if causal:
                continue
            call = partial(backend.call, ESTIMATORS[name], q, k, v, **options)
        if "lara" in name and causal and kind == "n, m" and n != 1:
            continue  # a mask of each query's own
        if "lara" in name and 0 in (n, m):
            with pytest.raises(ValueError, match="for chunks not to be empty, got 1"):
                call()
            continue
        out, some = call(), seen.any(-1)
        assert out.shape == (heads, n, d_v)
        assert np.all(out[:, ~some] == 0)
        assert np.all(np.isfinite(out))
        if name not in NO_MEAN:
            np.testing.assert_allclose(out[:, some], 1, rtol=1e-12)


@pytest.mark.long("jax", "dask")
@pytest.mark.parametrize("name", ["softmax", "positive", "linear"])
def test_states_of_empty_axes(backend, name):
    init = {
        "softmax": SoftmaxState.init,
        "positive": partial(PositiveState.init, omega=OMEGA),
        "linear": LinearState.init,
    }[name]
    backend.jit = lambda run: run  # type: ignore[method-assign]

    def decode(q, k, v):
        return init(k, v).merge(init(k[..., :0, :], v[..., :0, :])).update(k, v).read(q)

    for heads, n, m, d_v in product((0, 3), repeat=4):
        q, k, v = (np.ones((heads, *shape)) for shape in ((n, 2), (m, 2), (m, d_v)))
        out = backend.call(decode, q, k, v)
        np.testing.assert_allclose(out, np.full((heads, n, d_v), float(m > 0)), rtol=1e-12)
        if name == "positive":
            read = backend.call(lambda q, k, v: init(k, v).read_causal(q, k, v), q, k, v)
            np.testing.assert_allclose(read, np.full((heads, n, d_v), float(m > 0)), rtol=1e-12)


@pytest.mark.parametrize("function", list(ESTIMATORS.values()))
def test_no_head_size(function):
    q = np.ones((3, 0))
    with pytest.raises(ValueError, match="`q` must have a head size d of at least 1"):
        function(q, q, np.ones((3, 2)))


@pytest.mark.parametrize("d_v", [0, 3])
def test_no_heads_and_many_keys(backend, d_v):
    q, k, v = np.ones((0, 3, 8)), np.ones((0, 300, 8)), np.ones((0, 300, d_v))
    for function in (linear_attention, softmax_attention):
        assert backend.call(function, q, k, v).shape == (0, 3, d_v)


@pytest.mark.parametrize("name", [x for x, r in registry.ESTIMATORS.items() if r.approximates])
def test_no_heads(name):
    """What is fitted to queries and keys too: there are no moments then, and no results."""
    record, x = registry.ESTIMATORS[name], np.ones((0, 6, 4))
    options = record.sized(2) | ({"rng": 0} if record.has("random") else {})
    assert record.fn(x, x, x, **options).shape == (0, 6, 4)
