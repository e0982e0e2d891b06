"""Numbers of any number of digits, and the formulas in them."""

from functools import partial

import numpy as np
import pytest

from refattn import naive
from refattn.judge.conformance.truth import digits
from refattn.judge.mistakes.text import Edit

Q, K, V = np.random.default_rng(0).standard_normal((3, 4, 3))
OMEGA, BIAS = np.random.default_rng(1).standard_normal((2, 4, 3))
MASK = np.array([[True, False, True, True]] * 3 + [[False] * 4])
FEW = {"indices": np.array([0, 2])}
CALLS = {
    "chunked_linear_randomized_attention": [
        {"omega": OMEGA, "num_proposals": 2, "weighting": "query", "beta": 0.5, "chunk": 3},
        {"omega": OMEGA, "num_proposals": 2, "causal": True, "chunk": 3},
    ],
    "chunked_random_feature_attention": [{"omega": OMEGA, "mask": MASK[0], "chunk": 3}],
    "coreset_attention": [FEW | {"mask": MASK[0]}],
    "eva_attention": [{"window": 3, "causal": True}, {"window": 2, "omega": OMEGA[:2]}],
    "importance_sampled_attention": [{"omega": OMEGA, "mask": MASK}],
    "linear_attention": [{"mask": MASK}],
    "linear_randomized_attention": [
        {"omega": OMEGA, "num_proposals": 2, "weighting": "query", "beta": 0.5},
        {"omega": OMEGA, "num_proposals": 2, "causal": True},
    ],
    "local_random_feature_attention": [{"window": (1, 0), "omega": OMEGA}],
    "mean_of_ratios_attention": [{"omega": OMEGA, "causal": True}],
    "random_feature_attention": [
        {"omega": OMEGA, "features": x, "log_weight": OMEGA[:, 0], "mask": MASK}
        for x in ("positive", "hyperbolic", "trigonometric")
    ],
    "randomized_attention": [{"omega": Q[:, None] + OMEGA}],
    "sampled_key_attention": [FEW | {"log_probability": BIAS[0, :2], "mask": MASK}],
    "second_order_attention": [{"window": 2}],
    "softmax_attention": [
        {"mask": MASK, "softcap": 1.5, "sinks": np.array(0.3), "dropout": 2.0 * MASK},
        {"bias": BIAS @ BIAS.T, "scale": 0.3, "window": (2, None)},
    ],
}
RATE, LOG, LOGS = (
    {"beta": OMEGA[:, 0] ** 2},
    {"log_decay": -(BIAS[:, 0] ** 2)},
    {"log_decay": -(BIAS**2)},
)
PAIR = {"removal": (OMEGA, BIAS)}
CALLS |= {
    "delta_rule": [RATE],
    "gated_delta_rule": [RATE | LOG],
    "gated_linear_attention": [LOGS | {"initial_state": OMEGA[:3]}],
    "kimi_delta_attention": [RATE | LOGS],
    "recurrent_attention": [LOG | PAIR | {"read": "before"}],
    "retention": [{"decay": 0.7}],
    "rwkv7": [LOGS | PAIR],
    "state_space_duality": [LOG | {"write": OMEGA[:, 1]}],
}
EVERY = [(name, options) for name, calls in CALLS.items() for options in calls]


def of(module, name):
    """A formula; of a recurrence its output without the state."""

    def evaluate(*args, **options):
        out = getattr(module, name)(*args, **options)
        return out[0] if isinstance(out, tuple) else out

    return evaluate


def off(got, want):
    return float(max(abs(np.ravel(got - want)), default=0))


def test_numbers_keep_every_bit():
    x = np.longdouble(1) / 3
    rest = float(x - np.longdouble(float(x)))
    assert digits.numbers([x])[0] - digits.numbers([float(x)])[0] == rest
    assert digits.numbers([np.inf])[0] == digits.context().inf
    tiny = np.longdouble(2) ** -16000
    assert digits.numbers([tiny])[0] == digits.context().mpf(2) ** -16000 or tiny == 0


def test_every_formula_is_called():
    others = {"elu_plus_one", "kernel_estimate", "mean_and_covariance", "visible"}
    assert {*CALLS} | others == {*naive.__all__}


@pytest.mark.parametrize(("name", "options"), EVERY)
def test_numbers_of_the_text_have_all_digits(name, options):
    """A number that is a float somewhere has no more than 17 in common with one of more digits."""
    low, high = (of(digits.formulas(x), name)(Q, K, V, **options) for x in (50, 80))
    assert off(low, high) < 1e-46
    got = of(naive, name)(Q, K, V, **options)
    assert off(got, high) < 1e-13
    assert off(got, high) > 0


@pytest.mark.parametrize(("name", "options"), EVERY)
def test_slopes_are_those_of_differences(name, options):
    """Along a random way, of numbers of 150 digits: to the square of the step."""
    rng, h = np.random.default_rng(2), digits.context(150).mpf(10) ** -50
    arrays = {"q": Q, "k": K, "v": V} | {x: options[x] for x in ("omega", "bias") if x in options}
    rest = {x: y for x, y in options.items() if x not in arrays}
    formula = partial(of(digits.formulas(150), name), **rest)
    way = {x: rng.standard_normal(y.shape) for x, y in arrays.items()}
    d_out = rng.standard_normal((4, 3))

    def moved(step):
        wide = {x: digits.numbers(y, dps=150) + step * way[x] for x, y in arrays.items()}
        return np.sum(formula(**wide) * d_out)

    out, found = digits.pull_back(formula, d_out, dps=150, **arrays)
    assert off(out, formula(**arrays)) == 0
    want = (moved(h) - moved(-h)) / (2 * h)
    assert abs(sum(np.sum(x * way[name]) for name, x in found.items()) - want) < 1e-90


def test_a_change_must_be_of_something():
    for old, times in (("no such text", "0"), ("x", "[2-9]")):
        with pytest.raises(ValueError, match=f"`elu_plus_one` has '{old}' {times} times, not once"):
            digits.formulas(50, Edit("elu_plus_one", old, "y"))
    changed = digits.formulas(50, Edit("elu_plus_one", "0, x + 1", "0, x + 2"))
    assert changed.elu_plus_one(np.array([1.0]))[0] == 3
