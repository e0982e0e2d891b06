"""States of recurrences that go wrong before a token, computed token by token: named."""

import numpy as np
import pytest

from tests.judge.mistakes.causes.kernels import BF16
from tests.judge.mistakes.operators.test_handed_on import N, judge

RNG = np.random.default_rng(7)
D, HEADS = 32, 3


def draw(by_coordinate):
    q, k, v = (BF16(RNG.standard_normal((HEADS, N, D))) for _ in range(3))
    k = BF16(k / np.linalg.norm(k, axis=-1, keepdims=True))
    g = np.float32(-0.1 * RNG.exponential(size=(HEADS, N, D if by_coordinate else 1)))
    g[:, 70:80] = 0  # padding
    return {"q": q, "k": k, "v": v, "g": g, "beta": np.float32(RNG.uniform(0.1, 0.9, (HEADS, N)))}


def recur(x, at=None, change=None, decays=None, writes=None):
    """The delta rule with decays; a state may be changed before a token, from those before."""
    g = np.float64(x["g"] if decays is None else decays)
    beta = np.float64(x["beta"] if writes is None else writes)
    s, states, out = np.zeros((HEADS, D, D)), [], np.zeros((HEADS, N, D))
    for t in range(N):
        states.append(s)
        s = change(s, states, g) if t == at else s
        q, k, v = (x[y][:, t, :, None] for y in "qkv")
        s = np.exp(g[:, t])[..., None] * s
        s = s + beta[:, t, None, None] * k @ (v - s.mT @ k).mT
        out[:, t] = D**-0.5 * (q.mT @ s)[:, 0]
    return out


STATES = {  # the token, and the state before it
    "it is transposed": (40, lambda s, old, g: s.mT),
    "0 ": (80, lambda s, old, g: 0 * s),
    "that before token 32": (50, lambda s, old, g: old[32]),
    "that of head 1": (81, lambda s, old, g: s[[1, 1, 1]]),
    "it lacks the decay of tokens 64 to 89": (
        90, lambda s, old, g: s * np.exp(-g[:, 64:90].sum(1))[..., None]),
    "it decays twice at tokens 64 to 89": (
        90, lambda s, old, g: s * np.exp(g[:, 64:90].sum(1))[..., None]),
    "the right state times 0.125": (85, lambda s, old, g: s / 8),
    "the right state times a number of each of its rows, ": (
        60, lambda s, old, g: s * np.linspace(0.25, 4, D)[:, None]),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("words", STATES)
@pytest.mark.parametrize("by_coordinate", [False, True])
def test_states_before_a_token(words, by_coordinate):
    x = draw(by_coordinate)
    assert judge(x, recur(x)).verdict == "PASS"
    at, change = STATES[words]
    (found,) = judge(x, recur(x, at, change)).suspects
    start = f"agrees if tokens {at} to 99 read another state before token {at}: {words}"
    assert start.strip() in found.text


DECAYS = {
    "the decay of tokens 20 to 29 is applied twice": (20, 30, lambda g: 2 * g),
    "the decay of tokens 40 to 63 is left out": (40, 64, lambda g: 0 * g),
    "the decay of tokens 40 to 63 is that of the token before": (
        40, 64, lambda g: np.roll(g, 1, 1)),
    "the state decays at tokens 70 to 79, where log_decay is 0: by factors of 0.81": (
        70, 80, lambda g: g - 0.2),
    "before token 33: the right state times ": (33, 34, lambda g: 0 * g - np.log(4)),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("words", DECAYS)
def test_decays_of_some_tokens(words):
    x = draw(False)
    start, stop, change = DECAYS[words]
    there = ((np.arange(N) >= start) & (np.arange(N) < stop))[:, None]
    (found,) = judge(x, recur(x, decays=np.where(there, change(x["g"]), x["g"]))).suspects
    assert words in found.text


def other_bias(g):
    """Log decays are -softplus(x) / 5, of x with another bias in each column."""
    with np.errstate(divide="ignore"):
        x = np.log(np.expm1(-5.0 * np.float64(g)))
    return -np.logaddexp(0, x + np.linspace(-1, 2, D)) / 5


@pytest.mark.long
@pytest.mark.parametrize(("change", "words"), [
    (lambda g: g * np.linspace(0.25, 2, D), "log decays are multiplied by a number of each column"),
    (other_bias, "the gate has another bias in each column, if log decays"),
])  # fmt: skip
def test_decays_of_columns(change, words):
    x = draw(True)
    (found,) = judge(x, recur(x, decays=change(x["g"]))).suspects
    assert f"agrees if {words}" in found.text


@pytest.mark.long
@pytest.mark.parametrize("by_coordinate", [False, True])
def test_what_is_no_state_or_decay_is_not_named_so(by_coordinate):
    x = draw(by_coordinate)
    writes = x["beta"].copy()
    writes[:, 20:40] *= 0.5
    wrong = [recur(x, writes=writes), recur(x) + 0.1 * RNG.standard_normal((HEADS, N, D))]
    for out in wrong:
        verdict = judge(x, out)
        assert verdict.verdict == "FAIL"
        assert not any("state" in y.text or "decay" in y.text for y in verdict.suspects)


def test_initial_states_and_numbers_that_are_lost():
    """A state of anything, rows of NaN, and a factor of all."""
    x = draw(False)
    right = recur(x)
    lost = right.copy()
    lost[1, 60:] = np.nan
    strange = RNG.standard_normal((HEADS, D, D))
    for out, words in (
        (recur(x, 0, lambda *_: strange), "the initial state is another than"),
        (lost, "40 of 300 rows hold NaN or infinity, the first is head 1, row 60"),
        (right / 8, "numbers are 0.125 times what they should be"),
    ):
        assert words in judge(x, out).suspects[0].text
