"""Numbers of any number of digits, and the formulas in them."""

from functools import partial

import numpy as np
import pytest

from refattn import naive
from refattn.judge.conformance.truth import digits
from refattn.judge.mistakes.text import Edit
from tests.formulas import CALLS, K, Q, V

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
    more = {x: y for x, y in options.items() if x in ("omega", "bias") and not isinstance(y, str)}
    arrays = {"q": Q, "k": K, "v": V} | more
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


def test_absolute_terms_of_exact_attention():
    """Those of dq are p (|g| . |v| + sum p |g| . |v|) |k|, of dk with |q|, and of dv p |g|."""
    formula, g = digits.formulas().softmax_attention, np.array([[1.0, -2.0, 0.5]] * 4)
    _, found = digits.pull_back(formula, g, absolute=True, q=Q, k=K, v=V)
    p, products = formula(Q, K, np.eye(len(K))), abs(g) @ abs(V).T
    terms = p * (products + (p * products).sum(-1)[:, None]) * Q.shape[-1] ** -0.5
    want = {"q": terms @ abs(K), "k": terms.T @ abs(Q), "v": p.T @ abs(g)}
    assert all(off(found[name], x) < 1e-14 for name, x in want.items())


def test_a_change_must_be_of_something():
    for old, times in (("no such text", "0"), ("x", "[2-9]")):
        with pytest.raises(ValueError, match=f"`elu_plus_one` has '{old}' {times} times, not once"):
            digits.formulas(50, Edit("elu_plus_one", old, "y"))
    changed = digits.formulas(50, Edit("elu_plus_one", "0, x + 1", "0, x + 2"))
    assert changed.elu_plus_one(np.array([1.0]))[0] == 3
