"""Golden vectors that lose digits: narrow steps miss them."""

import numpy as np
import pytest

from refattn.conformance.vectors import hard
from tests.conformance.vectors.running import error, of_file


@pytest.fixture(scope="module")
def hard_cases(every):
    return of_file(every, "softmax-hard")


def narrowed(*names):
    """A dense softmax with some of its steps in float32."""

    def cast(name, x):
        return x.astype(np.float32).astype(x.dtype) if name in names else x

    def run(q, k, v, scale, causal):
        scores = cast("scores", q @ k.T * q.shape[-1] ** -0.5)
        weights = cast("weights", np.exp(scores - scores.max(-1, keepdims=True)))
        return cast("weights", weights / weights.sum(-1, keepdims=True)) @ cast("values", v)

    return run


CAUGHT = {
    "scores": {"cancelling", "large", "means", "sink", "tie", "values"},
    "weights": {"cancelling", "large", "means", "tie", "values"},
    "values": {"cancelling", "equal", "large", "means", "tie", "values"},
}


@pytest.mark.parametrize("step", CAUGHT)
def test_hard_cases_catch_narrow_steps(step, hard_cases):
    assert all(error(case, narrowed()) <= 1 for case in hard_cases)
    assert all(c.flags == ("HARD",) and set(c.tolerance) == {"float64"} for c in hard_cases)
    caught = {case.id.split("-")[2] for case in hard_cases if error(case, narrowed(step)) > 1}
    assert caught >= CAUGHT[step]


def test_levels_say_how_many_digits_are_lost(hard_cases):
    """Of the median entry, in a plain evaluation: about 3 a level."""
    for case, known in zip(hard_cases, hard.CASES, strict=True):
        got = narrowed()(**case.inputs, **case.arguments)
        off = abs(got - case.expected["out"] - case.expected_low["out"])
        digits = np.log10(np.median(off / abs(case.expected["out"])) * 2.0**53)
        assert case.id == known.label
        assert 3 * known.level - 2 <= digits <= 3 * known.level + 2, case.id
