"""Chosen keys: kernels that gather keys by their indices, and the choice of these."""

import numpy as np
import pytest

import refattn
from refattn.judge.kinds.chosen import choose_keys
from refattn.judge.mistakes.causes.changed_inputs import list_choices
from refattn.judge.mistakes.causes.sampled import Rows
from refattn.judge.rounding.problems import pose_arrays
from tests.cli import running
from tests.cli.running import loads
from tests.judge.rounding.rounded import FORMATS

bf16 = FORMATS["bfloat16"].round
f32 = np.float32
N, S = 64, 12
CAUSAL = np.tril(np.ones((N, N), bool))


Q, K, V = (bf16(x[0, :2, :N]) for x in refattn.load_sample())


def top_k(scores, seen=CAUSAL, count=S):
    """The best keys that each query sees, and -1 where it sees fewer."""
    scores = np.where(seen, scores, -np.inf)
    best = np.argsort(-scores, -1, kind="stable")[..., :count]
    return np.where(np.take_along_axis(scores, best, -1) > -np.inf, best, -1)


SCORES = Q @ K.swapaxes(-1, -2)
BEST = top_k(SCORES)


def gather(indices, *, pad="skip", row=0):
    """Attend one query after the other to the keys that it gathers, in float32.

    A pad of -1 may be skipped, or NumPy's last key; `row` queries on stands what is gathered.
    """
    out = np.zeros_like(V)
    for h, i in np.ndindex(Q.shape[:2]):
        keys = indices[h, (i + row) % N]
        keys = keys[keys >= 0] if pad == "skip" else keys
        s = (K[h, keys].astype(f32) @ Q[h, i].astype(f32)) * f32(Q.shape[-1] ** -0.5)
        p = np.exp(s - s.max())
        out[h, i] = bf16(p) @ V[h, keys] / p.sum()
    return bf16(out)


def judged(out, indices, **more):
    given = {"q": Q, "k": K, "v": V, "out": out, "indices": indices, "dtype": "bfloat16"}
    return refattn.verify(**given | {"causal": True} | more)


def test_a_right_kernel_and_its_choice_pass():
    found = judged(gather(BEST), BEST, index_q=Q, index_k=K)
    assert {x: y.verdict for x, y in found.parts.items()} == {"out": "PASS", "indices": "PASS"}
    assert found.parts["out"].profile.startswith("flash")


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("wrong", "cause"),
    [
        ({"pad": "last"}, "-1 in the indices is read as the last key"),
        ({"row": -1}, "each query has the keys that the query before it chose"),
    ],
)
def test_wrong_kernels_are_named(wrong, cause):
    found = judged(gather(BEST, **wrong), BEST)
    assert found.verdict == "FAIL"
    assert cause in found.suspects[0].text


WRONG_READS = {
    "-1 in the indices is read as the first key of the choice": np.where(
        BEST < 0, BEST[..., :1], BEST),
    "the key after each chosen key is read": np.where(BEST < 0, -1, np.minimum(BEST + 1, N - 1)),
    "the place of each key in the choice is read as the key": np.where(BEST < 0, -1, np.arange(S)),
    "the last 4 keys of each choice are left out": BEST[..., :8],
    "only the first 2 keys of each choice are read": BEST[..., :2],
    "the first key of each choice is left out": BEST[..., 1:],
    "blocks of 8 queries have the keys that the first of them chose": BEST[:, ::8].repeat(8, 1),
}  # fmt: skip


@pytest.mark.parametrize("text", WRONG_READS)
def test_known_mistakes_of_reading_a_choice(text):
    """Each is a gather of other keys; a query that sees none has no row to compare."""
    problem = choose_keys(pose_arrays(Q, K, V), {"indices": BEST})
    (mistake,) = (x for x in list_choices(problem) if x.text == text)
    read, at = WRONG_READS[text][0, 20:30], np.arange(20, 30)
    for i, keys in zip(at, read, strict=True):
        weights = np.exp(K[0, keys[keys >= 0]] @ Q[0, i] * Q.shape[-1] ** -0.5)
        expected = weights @ V[0, keys[keys >= 0]] / weights.sum()
        got = mistake.result(Rows((0,), np.array([i]), np.arange(N))).out[0]
        assert np.allclose(got, expected, rtol=1e-9, atol=1e-12)


RANKINGS = {
    "the keys with the smallest scores are chosen": -SCORES,
    "keys are ranked by the means of 4 queries": SCORES.reshape(2, N // 4, 4, N).mean(2).repeat(
        4, 1),
    "index_q is read from the first head": Q[[0, 0]] @ K.swapaxes(-1, -2),
    "indices are read from the first head": SCORES[[0, 0]],
    "each key is ranked by the vector of the key before it": np.roll(SCORES, 1, -1),
}  # fmt: skip


@pytest.mark.parametrize("cause", RANKINGS)
def test_wrong_rankings_are_named(cause):
    indices = top_k(RANKINGS[cause])
    found = judged(gather(indices), indices, index_q=Q, index_k=K)
    assert found.parts["indices"].suspects[0].text == cause


def test_blocks_of_keys_are_chosen():
    """Blocks of 8 keys are ranked by their means, and a query's own block is always chosen."""
    means, own = K.reshape(2, N // 8, 8, -1).mean(2), np.eye(N // 8) * 32
    index_q = np.concatenate([Q, np.tile(own.repeat(8, 0), (2, 1, 1))], -1)
    index_k = np.concatenate([means, np.tile(own, (2, 1, 1))], -1)
    scores = index_q @ index_k.swapaxes(-1, -2)
    best = top_k(scores, CAUSAL[:, ::8], 3)
    keys = np.where(best < 0, -1, 8 * best)[..., None] + np.where(
        best[..., None] < 0, 0, np.arange(8)
    )
    keys = keys.reshape(2, N, -1)
    out = gather(np.where(keys <= np.arange(N)[:, None], keys, -1))
    given = {"index_q": index_q, "index_k": index_k, "explain": False}
    words = {x: y.verdict for x, y in judged(out, best, **given).parts.items()}
    assert words == {"out": "PASS", "indices": "PASS"}
    spoiled = best.copy()
    spoiled[1, 40, 1] = np.argmin(scores[1, 40, :6])  # those it sees
    assert [x for x, _ in judged(out, spoiled, **given).parts["indices"].rows] == [(1, 40)]


def test_ties_within_rounding_are_no_fault():
    """Keys are ranked by scores in bfloat16: profile `eager` allows that, and `math` does not."""
    index_k = bf16(4 + np.random.default_rng(0).random(K.shape))
    ranked = top_k(bf16(np.ones_like(Q) @ index_k.swapaxes(-1, -2)))
    out = gather(ranked)
    more = {"index_q": np.ones_like(Q), "index_k": index_k, "explain": False}
    assert judged(out, ranked, **more).parts["indices"].profile == "eager"
    strict = judged(out, ranked, profile="flash", **more)
    assert {x: y.verdict for x, y in strict.parts.items()} == {"out": "PASS", "indices": "FAIL"}


WORST = int(np.argmin(SCORES[1, 40, :41]))


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (WORST, "has a larger score than key"),
        (BEST[1, 40, 1], "a key is chosen twice: 1 rows"),
        (63, "that the query does not see: 1 rows"),
        (-1, "though there is room: 1 rows"),
    ],
)
def test_a_wrong_choice(key, words):
    spoiled = BEST.copy()
    spoiled[1, 40, 2] = key
    found = judged(gather(BEST), spoiled, index_q=Q, index_k=K, explain=False)
    part = found.parts["indices"]
    assert part.verdict == "FAIL"
    assert any(words in x.text for x in part.suspects), part.suspects
    assert [x for x, _ in part.rows] == [(1, 40)]
    assert "difference of scores / what rounding allows: rms" in str(part)


def test_a_choice_of_all_keys_is_none():
    every = np.where(CAUSAL, np.arange(N), -1)[None]  # one for both heads
    found = judged(gather(np.repeat(every, 2, 0)), every, index_q=Q, index_k=K)
    assert found.parts["indices"].verdict == "UNDERPOWERED"
    assert found.verdict == "UNDERPOWERED"


def test_blocks_of_queries_choose_together_in_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = np.sort(BEST[:, 15::16])  # of 16 queries, by the last of each
    out = gather(np.repeat(blocks, 16, -2))
    np.savez("moba.npz", q=Q, k=K, v=V, out=out, indices=blocks)
    result = running.run("verify", "moba.npz", "--dtype", "bfloat16", "--format", "json")
    assert (result.exit_code, loads(result.stdout)["verdict"]) == (0, "PASS")
    posed = choose_keys(pose_arrays(Q, K, V), {"indices": blocks})
    assert np.array_equal(
        np.sum(posed.read((0,))["mask"], -1), np.sum(blocks[0] >= 0, -1).repeat(16)
    )


@pytest.mark.sweep(7)
@pytest.mark.parametrize("causal", [False, True])
def test_blocks_choose_by_vectors_of_their_own(causal):
    """Four queries choose by their mean what any of them sees."""
    pooled = Q.reshape(2, N // 4, 4, -1).mean(-2)
    best = top_k(pooled @ K.swapaxes(-1, -2), CAUSAL[3::4] if causal else True)
    each = np.repeat(best, 4, 1)
    seen = CAUSAL[np.arange(N)[:, None], each] & (each >= 0) if causal else each >= 0
    out = gather(np.where(seen, each, -1))
    given = {"index_q": pooled, "index_k": K, "causal": causal, "empty_rows": "any"}
    found = judged(out, best, **given)
    assert found.parts["indices"].verdict == "PASS"
    assert found.parts["out"].verdict == "PASS"
    other = judged(out, best, **given | {"index_q": np.roll(pooled, 1, 1)})
    assert other.parts["indices"].verdict == "FAIL"
    with pytest.raises(
        ValueError, match=r"`index_q` must be finite, of shape \(\.\.\., 16, size\)"
    ):
        judged(out, best, **given | {"index_q": Q})


def test_a_key_that_counts_twice_is_no_padding():
    indices = np.where(BEST < 0, BEST[..., :1], BEST)
    indices[..., -1] = indices[..., 0]
    found = judged(gather(indices), indices)
    assert [x.text for x in found.suspects] == ["agrees if a key that is chosen twice counts twice"]
