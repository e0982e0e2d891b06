"""Weights that are another function of the score than its exponential."""

from functools import partial

import ml_dtypes
import numpy as np

from refattn.judge import verify
from tests.judge.mistakes.causes.kernels import named

N, D = 96, 32
Q, K, V = np.random.default_rng(5).standard_normal((3, 2, N, D)).astype(ml_dtypes.bfloat16)
START = "e^x of a score less the largest is"


def given(weigh, of_scores=False):
    """Weights of scores less the largest, in causal attention, or of all scores as they are."""
    q, k, v = (x.astype(float) for x in (Q, K, V))
    scores = q @ np.swapaxes(k, -1, -2) / D**0.5
    if of_scores:
        w = weigh(scores)
    else:
        scores = np.where(np.tri(N, dtype=bool), scores, -np.inf)
        x = scores - np.max(scores, -1, keepdims=True)
        w = np.where(np.isfinite(x), weigh(np.maximum(x, -700.0)), 0.0)
    out = (w @ v / np.sum(w, -1, keepdims=True)).astype(ml_dtypes.bfloat16)
    return {"q": Q, "k": K, "v": V, "out": out, "causal": not of_scores}


def by_bits(x):
    """Schraudolph's exponential: the bits of a float32 are nearly a logarithm."""
    bits = np.maximum(x * (2**23 / np.log(2)) + 127 * 2**23 - 486411, 0.0)
    return bits.astype(np.int32).view(np.float32).astype(float)


def in_8_bits(x):
    return np.exp(x).astype(ml_dtypes.float8_e4m3fn).astype(float)


CASES = {
    "bits": (by_bits, f"{START} linear between powers of 2, at x log2(e) less 0.058"),
    "power": (lambda x: np.maximum(1 + x / 64, 0.0) ** 64, f"{START} (1 + x / n)^n with n = 6"),
    "series": (lambda x: 1 + x + x * x / 2, f"{START} the sum of the first 3 terms of its series"),
    "table": (lambda x: np.exp(np.floor(16 * x) / 16), f"{START} that of the next lower multiple"),
    "8-bits": (in_8_bits, "weights are rounded to float8_e4m3fn before they are added, too"),
    "clamped": (lambda x: np.exp(np.maximum(x, -3.0)), f"{START} no less than e^-2.99"),
    # What is near to one of these is not one of them.
    "scale": (lambda x: np.exp(1.02 * x), "the scale is 1.0"),
}
BY_SCORE = {
    "sigmoid": (lambda s: 1 / (1 + np.exp(-s)), "weights are 1 / (1 + e^-score), not e^score"),
    "relu": (lambda s: np.maximum(s, 0), "weights are max(score, 0), not e^score"),
    "above": (lambda s: np.exp(np.minimum(s, 1.5)), "scores are no larger than 1.5"),
    "below": (lambda s: np.exp(np.maximum(s, -0.5)), "scores are no less than -0.49"),
}
EVERY = {x: (partial(given, y), z) for x, (y, z) in CASES.items()}
EVERY |= {x: (partial(given, y, True), z) for x, (y, z) in BY_SCORE.items()}
test_weights_that_are_another_function = named(EVERY, ("power", "relu"))


def test_weights_of_a_sum_and_a_product_have_no_other_function():
    """A number that is taken from each weight is no power, though one is near to it."""
    found = verify(**given(lambda x: np.maximum(np.exp(x) - 1e-3, 0)))
    assert not any("e^x" in x.text for x in found.suspects)
