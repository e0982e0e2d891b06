"""Chunks of recurrences that read or pass on other states, computed token by token: named."""

import re

import numpy as np
import pytest

from refattn.judge import verify
from refattn.judge.rounding.formats import FORMATS

RNG = np.random.default_rng(0)
N, D, COLUMNS = 100, 8, 16
BF16 = FORMATS["bfloat16"].round


def draw(by_coordinate=False):
    q, k, v = (BF16(RNG.standard_normal((2, N, x))) for x in (D, D, COLUMNS))
    k = BF16(k / np.linalg.norm(k, axis=-1, keepdims=True))
    g = -0.1 * RNG.exponential(size=(2, N, D if by_coordinate else 1))
    first = np.float32(RNG.standard_normal((2, D, COLUMNS)))
    beta = RNG.uniform(0.1, 0.9, (2, N)).astype("f4")
    return {"q": q, "k": k, "v": v, "g": g.astype("f4"), "beta": beta, "first": first}


def chunked(x, size=N, passed=None, last=False, by=0):
    """The delta rule with decays, in which states between chunks, or the last, have others.

    Of sums of log decays, `passed` gives what the state and its tokens are multiplied by.
    """
    state, states, read = np.float64(x["first"]), [], []
    out = np.zeros(x["v"].shape)
    for i in range(0, N, size):
        some, here = slice(i, min(i + size, N)), state
        sums = np.cumsum(x["g"][:, some], 1, dtype=np.float64)
        kept, own = np.exp(sums[:, -1:]), np.exp(sums[:, -1:] - sums)
        if passed is not None and (not last or i + size > N):
            kept, own = passed(sums)
        own = np.broadcast_to(own, (*sums.shape[:2], own.shape[-1]))
        states.append(state)
        read.append((some, np.exp(sums) * x["q"][:, some]))
        state = kept.mT * state
        for t in range(some.start, some.stop):
            q, k, v = (x[y][:, t, :, None] for y in "qkv")
            decayed = np.exp(x["g"][:, t])[..., None] * here
            written = x["beta"][:, t, None, None] * k @ (v - decayed.mT @ k).mT
            here, w = decayed + written, own[:, t - i, :, None]
            state = state + written * (w.mT if w.shape[1] == COLUMNS else w)
            out[:, t] = D**-0.5 * (q.mT @ here)[:, 0]
    states.append(state)
    for number, (some, q) in enumerate(read if by else ()):
        other = states[min(max(number + by, 0), len(read))]
        out[:, some] += D**-0.5 * q @ (other - states[number])
    return out, state


def states_before(x, i):
    """The state after so many tokens: keys of the others are 0, and they do not decay."""
    later = (np.arange(N) >= i)[:, None]
    return chunked({**x, "k": np.where(later, 0, x["k"]), "g": np.where(later, 0, x["g"])})[1]


def by_column(sums):
    padded = np.pad(sums, ((0, 0), (0, 32 - sums.shape[1]), (0, 0)), "edge")
    return np.exp(sums[:, -1:]), np.exp(sums[:, -1:] - padded[:, :COLUMNS]).mT


class OfChunkBefore:
    """The state decays as over the chunk of 16 before; the last chunk is shorter."""

    last = 0.0

    def __call__(self, sums):
        kept, self.last = np.exp(self.last), sums[:, -1:] * (sums.shape[1] == 16)
        return kept + 0 * sums[:, -1:], np.exp(sums[:, -1:] - sums)


def of_last(kept, own):
    """What the state and tokens are multiplied by, of sums of log decays and the last of them."""
    return lambda sums: (kept(sums[:, -1:]), own(sums, sums[:, -1:]))


ONE, TO_END = lambda *_: np.ones((1, 1, 1)), lambda sums, last: np.exp(last - sums)
CASES = {
    "chunks of 16 pass on, the decay of the state over the chunk is that of the chunk before": {
        "size": 16, "passed": OfChunkBefore()},
    "after its chunk of 32, not before it": {"size": 32, "by": 1},
    "one chunk of 16 too early": {"size": 16, "by": -1},
    "chunks of 32 pass on, the decay from a token to the end of its chunk is left out": {
        "size": 32, "passed": of_last(np.exp, ONE)},
    "chunks of 16 pass on, the decay from a token to the end of its chunk is that from its": {
        "size": 16, "passed": of_last(np.exp, lambda sums, _: np.exp(sums))},
    "chunks of 64 pass on, the decay of the state over the chunk is left out": {
        "size": 64, "passed": of_last(ONE, TO_END)},
    "chunks of 32 pass on, the decay from a token to the end of its chunk is read by the column "
    "of v": {"size": 32, "passed": by_column},
    "tokens 64 to 99 of chunks of 64, the sum of log decays over the chunk counts as 0": {
        "size": 64, "passed": of_last(ONE, lambda sums, _: np.exp(-sums)), "last": True},
}  # fmt: skip


# What queries of a chunk multiply the state before it by, of sums of log decays.
READ_WITH = {
    "that of its first token": lambda sums: sums[:, :1],
    "that of the token before": lambda sums: sums - np.diff(sums, axis=1, prepend=0),
}


@pytest.mark.long
@pytest.mark.parametrize("words", READ_WITH)
def test_decays_with_which_states_are_read(words):
    x = draw()
    out, state = chunked(x)
    for i in range(0, N, 32):
        sums = np.cumsum(x["g"][:, i : i + 32], 1, dtype=np.float64)
        before = states_before(x, i)
        off = np.exp(READ_WITH[words](sums)) - np.exp(sums)
        out[:, i : i + 32] += D**-0.5 * (off * x["q"][:, i : i + 32]) @ before
    found = judge(x, out, state).parts["out"].suspects
    assert [y.text for y in found] == [
        f"agrees if a query reads the state before its chunk of 32, but its decay is {words}"
    ]


@pytest.mark.long
def test_states_that_are_read_transposed():
    x = draw(by_coordinate=True)
    x |= {"v": x["v"][..., :D], "first": 0 * x["first"][..., :D]}
    out, state = chunked(x)
    assert judge(x, out, state).verdict == "PASS"
    for i in range(0, N, 16):
        sums = np.cumsum(x["g"][:, i : i + 16], 1, dtype=np.float64)
        before = states_before(x, i)
        out[:, i : i + 16] += (
            D**-0.5 * (np.exp(sums) * x["q"][:, i : i + 16]) @ (before.mT - before)
        )
    found = judge(x, out, state).parts["out"].suspects
    assert [y.text for y in found] == [
        "agrees if a query reads the transposed state before its chunk of 16"
    ]


@pytest.mark.long
def test_a_state_that_is_read_in_place_of_another():
    """Tokens from 64 on read one in which tokens 32 to 63 count twice, in one of two heads."""
    q, k, v = (BF16(RNG.standard_normal((2, N, x))) for x in (D, D, COLUMNS))
    g = np.float32(-0.02 * RNG.exponential(size=(2, N)))
    sums = np.cumsum(g, 1, dtype=np.float64)
    w = np.tril(np.exp(np.minimum(sums[:, :, None] - sums[:, None], 0)) * (q @ k.mT))
    out = D**-0.5 * w @ v
    w[0, 64:, 32:64] *= 2
    given = {"q": q, "k": k, "v": v, "log_decay": g, "estimator": "state-space-duality"}
    assert verify(**given, out=BF16(out), dtype="bfloat16").verdict == "PASS"
    found = verify(**given, out=BF16(D**-0.5 * w @ v), dtype="bfloat16").suspects
    assert [x.text for x in found] == [
        "agrees if tokens 64 to 99 read another state before token 64: in it is 2 times that of "
        "tokens 32 to 63 (head 0)"
    ]


@pytest.mark.long
def test_sums_of_log_decays_that_restart():
    x = draw()
    g = x["g"].copy()
    g[:, 32::64] -= np.sum(np.reshape(x["g"][:, :96], (2, -1, 32, 1)), 2)[:, ::2]
    found = judge(x, *chunked({**x, "g": g})).parts
    words = "agrees if the sum of log decays in chunks of 64 restarts after each 32 tokens"
    assert [y.suspects[0].text for y in found.values()] == [words, words]


@pytest.mark.long
def test_states_that_decay_by_column():
    """In each fourth column as over the whole chunk, in the others over fewer tokens."""
    last = 25 + 2 * (np.arange(COLUMNS) % 4)

    def passed(sums):
        at = np.minimum(last, sums.shape[1] - 1)
        return np.exp(sums[:, at]), np.exp(sums[:, -1:] - sums)

    x = draw()
    x |= {"g": x["g"] / 2, "first": 4 * x["first"], "beta": x["beta"] / 4}
    text = judge(x, *chunked(x, size=32, passed=passed)).parts["out"].suspects[0].text
    assert re.match(
        r"agrees if tokens 32 to \d+ read another state before token 32: in it is ", text
    )
    assert "times that of the state before token 0, as it decays, by column (columns" in text


def judge(x, out, state=None):
    decay, name = x["g"], "kimi-delta-attention"
    if decay.shape[-1] == 1:
        decay, name = decay[..., 0], "gated-delta-rule"
    given = {y: x[y] for y in ("q", "k", "v", "beta")} | {"initial_state": x.get("first")}
    given |= {"log_decay": decay, "out": BF16(out)}
    given |= {} if state is None else {"state": np.float32(state)}
    return verify(**given, estimator=name, dtype="bfloat16")


@pytest.mark.long
@pytest.mark.parametrize("words", CASES)
@pytest.mark.parametrize("by_coordinate", [False, True])
def test_what_chunks_read_and_pass_on(words, by_coordinate):
    if by_coordinate and "column" in words:
        return
    x = draw(by_coordinate)
    right = chunked(x)
    assert {y.verdict for y in judge(x, *right).parts.values()} == {"PASS"}
    out, state = chunked(x, **CASES[words])
    of = "state" if words.startswith("tokens") else "out"
    parts = judge(x, out if of == "out" else right[0], state).parts
    assert parts[of].verdict == "FAIL"
    assert words in parts[of].suspects[0].text
    assert len(parts[of].suspects) == 1


WITHIN = {
    "without decay": lambda far, last: 0 * far,
    "with twice the decay": lambda far, last: 2 * far,
    "with the decay up to the token before the query": lambda far, last: far - last,
}


def read_within(x, size, exponents):
    """The gated sum of keys and values, token by token; within a chunk with other decays."""
    g, out = np.float64(x["g"]), np.zeros((2, N, COLUMNS))
    sums = np.cumsum(g, 1)
    for t in range(N):
        far = sums[:, t, None] - sums[:, : t + 1]
        mine = np.arange(t + 1)[:, None] >= t - t % size
        far = np.where(mine, exponents(far, g[:, t, None]), far)
        products = np.sum(x["q"][:, t, None] * np.exp(far) * x["k"][:, : t + 1], -1)
        out[:, t] = D**-0.5 * (products[:, None] @ x["v"][:, : t + 1])[:, 0]
    return out


@pytest.mark.long
@pytest.mark.parametrize("words", WITHIN)
@pytest.mark.parametrize("by_coordinate", [False, True])
def test_decays_within_chunks(words, by_coordinate):
    x = draw(by_coordinate)
    given = {y: x[y] for y in "qkv"} | {"log_decay": x["g"] if by_coordinate else x["g"][..., 0]}
    judged = {"estimator": "gla" if by_coordinate else "ssd", "dtype": "bfloat16"}
    right = BF16(read_within(x, 32, lambda far, _: far))
    assert verify(**given, out=right, **judged).verdict == "PASS"
    found = verify(**given, out=BF16(read_within(x, 32, WITHIN[words])), **judged).suspects
    assert f"agrees if a query reads tokens of its chunk of 32 {words}" in found[0].text
