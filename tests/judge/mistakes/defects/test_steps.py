"""A change of one step of a formula is found from numbers, and told from all others."""

import ast

import numpy as np
import pytest

from refattn import naive
from refattn.judge.mistakes.defects.steps import Observed, Stepped, find_change

T = np.swapaxes


def softmax(s, axis=-1):
    p = np.exp(s - np.max(s, axis, keepdims=True))
    return p / np.sum(p, axis, keepdims=True)


def scores(q, k):
    return q @ T(k, -1, -2) * q.shape[-1] ** -0.5


def normed(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def merged(out):
    b, h, n, d = out.shape
    return T(out.reshape(b, n, h, d), 1, 2)


def with_epsilon(q, k, v, epsilon=3e-4):
    p = np.exp(scores(q, k))
    top = np.exp(np.max(scores(q, k), -1, keepdims=True))
    return p @ v / (np.sum(p, -1, keepdims=True) + epsilon * top)


def twice(q, k, v):
    p = softmax(scores(q, k))
    return p / np.sum(p, -2, keepdims=True) @ v


def estimate(q, k, v, omega, norm=0.5, length=1.0):
    q, k = (length * x * x.shape[-1] ** -0.25 for x in (q, k))
    log_k = k @ omega.T - norm * np.sum(k * k, -1, keepdims=True)
    p = np.exp(q @ omega.T) @ T(np.exp(log_k), -1, -2)
    return p @ v / np.sum(p, -1, keepdims=True)


def observe(estimator, wrong, sizes=((3, 5, 4), (9, 14, 6)), seed=0):
    """Calls of a wrong function, and what should come."""
    rng, calls = np.random.default_rng(seed), []
    right = {"softmax": naive.softmax_attention, "rfa": naive.random_feature_attention}[estimator]
    for n, m, d in sizes:
        arrays = [rng.standard_normal((1, 2, x, d)) for x in (n, m, m)]
        more = {"omega": rng.standard_normal((7, d))} if estimator == "rfa" else {}

        def run(fn, arrays=arrays, more=more):
            return np.ravel(fn(*arrays, **more))

        got, want, allowed = run(wrong), run(right), np.full(n * d * 2, 1e-13)
        sizes_of = {"n": n, "m": m, "d": d}
        calls.append(Observed(run, got, want, allowed, sizes_of, more))
    return calls


def find(estimator, wrong, **named):
    return find_change([Stepped("", estimator)], observe(estimator, wrong, **named))


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("estimator", "wrong", "line"),
    [
        ("softmax", lambda q, k, v: softmax(scores(q, k), -3) @ v, "swapaxes(-1, -3)"),
        ("softmax", lambda q, k, v: merged(softmax(scores(q, k)) @ v), ".reshape("),
        ("softmax", lambda q, k, v: softmax(2 * scores(q, k)) @ v, "2"),
        ("softmax", lambda q, k, v: softmax(scores(normed(q), normed(k))) @ v, "norm("),
        ("softmax", lambda q, k, v: softmax(scores(q, k)) @ v[..., ::-1, :], "::-1"),
        ("softmax", twice, "axis=-2"),
        ("rfa", lambda *x, omega: estimate(*x, omega, norm=0.0), "0.0 *"),
        ("rfa", lambda *x, omega: estimate(*x, omega, norm=1.0), "half"),
    ],
)
def test_a_change_of_a_step_is_found(estimator, wrong, line):
    change = find(estimator, wrong)
    _, right, other, *_ = change.shown().splitlines()
    assert line in other
    assert line not in right or "half" in line
    ast.parse(right.removeprefix("  - "))
    ast.parse(other.removeprefix("  + "))


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("wrong", "number"),
    [
        (with_epsilon, "0.0003"),
        (lambda q, k, v: softmax(1.37 * scores(q, k)) @ v, "1.4|1.37"),
        (lambda q, k, v: softmax(scores(q, k)) @ v / q.shape[-2], "1 / n"),
        (lambda q, k, v: softmax(scores(q, k)) @ v * k.shape[-2] ** 0.5, "m ** 0.5"),
    ],
)
def test_a_number_is_fitted_and_named_by_sizes(wrong, number):
    change = find("softmax", wrong)
    assert change.number in number.split("|")
    assert change.number in change.shown()


@pytest.mark.long
@pytest.mark.parametrize(
    "wrong",
    [
        lambda q, k, v: softmax(scores(q, k) + 0.1 * np.sin(17 * scores(q, k))) @ v,
        lambda q, k, v: softmax(q.shape[-2] * scores(q, k) / 3) @ v[..., ::-1, :],  # two
        lambda q, k, v: softmax(scores(q, k) * (1 if k.shape[-2] > 5 else 2)) @ v,
    ],
)
def test_no_change_explains_what_is_no_change_of_a_step(wrong):
    assert find("softmax", wrong) is None


@pytest.mark.long
def test_a_constant_that_is_other_by_a_size_is_shown():
    def wrong(q, k, v, omega):
        return estimate(q, k, v, omega, norm=0.5 + 0.5 / q.shape[-1])

    assert "1 / d" in find("rfa", wrong).shown()


def test_a_size_that_all_calls_share_has_no_name():
    def wrong(q, k, v):
        return softmax(scores(q, k)) @ v / 4

    change = find("softmax", wrong, sizes=((3, 5, 4), (9, 14, 4)))
    assert "d" not in change.number
    assert float(change.number) == 0.25


def test_the_search_ends_in_time_and_needs_a_text_that_is_right():
    calls = observe("softmax", twice)
    assert find_change([Stepped("", "softmax")], calls, end=0.0) is None
    off = [x._replace(want=x.want + 1) for x in calls]
    assert find_change([Stepped("", "softmax")], off) is None


def test_a_text_of_two_ways_computes_what_is_written():
    """Whatever was chosen before."""
    fn, (call, _) = Stepped("", "softmax"), observe("softmax", twice)
    assert find_change([fn], [call]) is not None
    assert np.max(np.abs(fn.computes(call) - call.want)) < 1e-13
