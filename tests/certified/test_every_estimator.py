"""Every formula of the registry in pairs: within its bound of 60 digits, and bounds are small."""

from inspect import signature

import numpy as np
import pytest

from refattn import certified, naive
from refattn.judge.conformance.truth import digits
from refattn.registry import ESTIMATORS
from tests.certified.test_certified import DPS, least_ratio, number

N, D, D_V, S = 10, 4, 3, 6

OPTIONS = {
    "omega": lambda rng, k: rng.standard_normal((S, D)),
    "log_weight": lambda rng, k: rng.standard_normal(S),
    "num_proposals": lambda rng, k: 3,
    "indices": lambda rng, k: np.asarray([0, 3, 7, 8]),
    "window": lambda rng, k: 4,
    "decay": lambda rng, k: 0.75,
    "log_decay": lambda rng, k: -rng.random((N, D)),
    "beta": lambda rng, k: rng.random(N),
    "write": lambda rng, k: rng.random(N),
    "removal": lambda rng, k: (-k, k * rng.random((N, 1))),
    "initial_state": lambda rng, k: rng.standard_normal((D, D_V)),
}
ELSEWHERE = {
    ("randomized_attention", "omega"): lambda rng, k: rng.standard_normal((N, S, D)),
    ("eva_attention", "omega"): lambda rng, k: rng.standard_normal((3, D)),
    ("local_random_feature_attention", "window"): lambda rng, k: (2, 1),
    ("softmax_attention", "window"): lambda rng, k: (2, 1),
    ("linear_randomized_attention", "beta"): lambda rng, k: 0.5,
    ("state_space_duality", "log_decay"): lambda rng, k: -rng.random(N),
    ("gated_delta_rule", "log_decay"): lambda rng, k: -rng.random(N),
}


def cases():
    """Every formula of the registry once, plain, masked and causal."""
    found = {}
    for name, record in ESTIMATORS.items():
        formula = record.naive
        options = tuple(getattr(formula, "keywords", {}).items())
        function = getattr(formula, "func", formula)
        if function.__module__.startswith("refattn.naive"):
            found.setdefault((function.__name__, options), name)
    for (function, options), name in found.items():
        of = signature(getattr(naive, function)).parameters
        ways = [{}, {"mask": np.arange(N) % 4 != 1}] if "mask" in of else [{}]
        weighting = dict(options).get("weighting", "")
        ways += [{"causal": True}] if "causal" in of and "query" not in weighting else []
        for way in ways:
            yield pytest.param(function, dict(options) | way, id=f"{name} {''.join(way)}")


def arguments(function, options, seed=50):
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((N, x)) for x in (D, D, D_V))
    k = k / np.linalg.norm(k, axis=-1, keepdims=True)
    for name in signature(getattr(naive, function)).parameters:
        make = ELSEWHERE.get((function, name), OPTIONS.get(name))
        if make is not None and name not in options:
            options = options | {name: make(rng, k)}
    return (q, k, v), options


def leaves(x):
    """Results, or the one."""
    return x if isinstance(x, tuple) and not isinstance(x, certified.Bound) else (x,)


def holds(found, want):
    return all(
        least_ratio(x.error, abs(number(x.value) - y)) >= 1
        for x, y in zip(leaves(found), leaves(want), strict=True)
    )


@pytest.mark.sweep(4)
@pytest.mark.parametrize(("function", "options"), list(cases()))
def test_every_estimator_is_within_its_bound(function, options):
    """To 2^-50 of the largest, and not if a key moves by its rounding."""
    arrays, options = arguments(function, options)
    found = certified.evaluate(getattr(naive, function), *arrays, **options)
    formula = getattr(digits.formulas(DPS), function)
    assert holds(found, formula(*arrays, **options))
    for x in leaves(found):
        assert x.error.max() <= 2.0**-50 * np.abs(x.value.hi).max()
    q, k, v = arrays
    assert not holds(found, formula(q, k, v * (1 + 2.0**-45), **options))


def moved_to(x, xp):
    if isinstance(x, tuple):
        return tuple(moved_to(y, xp) for y in x)
    return xp.asarray(x) if isinstance(x, np.ndarray) else x


@pytest.mark.parametrize("library", ["torch", "array_api_strict"])
@pytest.mark.parametrize(
    "function",
    ["linear_attention", "eva_attention", "linear_randomized_attention", "gated_delta_rule"],
)
def test_formulas_run_on_other_libraries(function, library):
    xp = pytest.importorskip(library)
    arrays, options = arguments(function, {})
    wanted = certified.evaluate(getattr(naive, function), *arrays, **options)
    options = {name: moved_to(x, xp) for name, x in options.items()}
    found = certified.evaluate(getattr(naive, function), *moved_to(arrays, xp), **options)
    for x, y in zip(leaves(found), leaves(wanted), strict=True):
        off = [np.asarray(a) - b for a, b in zip(x.value, y.value, strict=True)]
        assert (abs(off[0] + off[1]) <= np.asarray(x.error) + y.error).all()
        assert (np.asarray(x.error) <= 2.0**-50 * np.abs(y.value.hi).max()).all()


def test_kernels_and_moments_are_certified_too():
    rng = np.random.default_rng(51)
    x, y, omega = rng.standard_normal(D), rng.standard_normal(D), rng.standard_normal((S, D))
    for features in ("positive", "hyperbolic", "trigonometric"):
        options = {"features": features, "omega": omega}
        found = certified.evaluate(naive.kernel_estimate, x, y, **options)
        assert holds((found,), (digits.formulas(DPS).kernel_estimate(x, y, **options),))
        assert found.error < 2.0**-50 * abs(found.value.hi)
    x = rng.standard_normal((N, D)) + 100
    found = certified.evaluate(naive.mean_and_covariance, x)
    assert holds(found, digits.formulas(DPS).mean_and_covariance(x))
    assert all((y.error < 2.0**-70).all() for y in found)


def test_errors_grow_where_a_formula_cancels():
    """The bound knows: of 1 + x - 1 for small x it is as large as the rounding of 1."""

    def formula(q, k, v):
        return (1.0 + q) - 1.0

    q = np.full((1, 1), 2.0**-80)
    found = certified.evaluate(formula, q, q, q)
    assert 2.0**-106 < found.error < 2.0**-100
    assert abs(found.value.hi + found.value.lo - q) <= found.error


def test_what_is_not_proven_is_the_formula_in_float64():
    (q, k, v), _ = arguments("softmax_attention", {"window": None})
    q[2], v[5, 1] = np.nan, np.inf
    found = certified.evaluate(naive.softmax_attention, q, k, v)
    plain = naive.softmax_attention(q, k, v)
    np.testing.assert_array_equal(np.isinf(found.error), ~np.isfinite(plain))
    np.testing.assert_array_equal(found.value.hi[np.isinf(found.error)], plain[~np.isfinite(plain)])


def test_a_formula_with_another_function_is_an_error():
    def formula(q, k, v):
        return q.__array_namespace__().sinh(q)

    x = np.ones((2, 2))
    with pytest.raises(TypeError, match="must not use `sinh` of numbers"):
        certified.evaluate(formula, x, x, x)
    with pytest.raises(TypeError, match="must hold an array"):
        certified.evaluate(formula, 1.0)


def test_branches_that_errors_leave_open():
    """A third times 3 is 1 to the last digit of a pair: no branch may depend on more."""

    def branched(x, limit):
        return x if (x / 3 * 3)[0] > (x + limit)[0] else -x

    assert certified.evaluate(branched, np.ones(1), limit=0.5).value.hi == -1
    with pytest.raises(ValueError, match="a comparison open"):
        certified.evaluate(branched, np.ones(1), limit=2.0**-115)


def test_subnormal_numbers_that_are_flushed(torch):
    x = torch.tensor([1.25 * 2.0**-1022], dtype=torch.float64)
    if not torch.set_flush_denormal(True):
        pytest.skip("the processor does not flush them")
    try:
        for like in (x, x.numpy()):
            with pytest.raises(RuntimeError, match="needs subnormal numbers"):
                certified.evaluate(lambda x: x - 2.0**-1022, like)
    finally:
        torch.set_flush_denormal(False)
