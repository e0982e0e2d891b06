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


def inputs():
    return [bf16(x[0, :2, :N]) for x in refattn.load_sample()]


def top_k(scores):
    """The best keys that each query sees, and -1 where it sees fewer."""
    scores = np.where(CAUSAL, scores, -np.inf)
    best = np.argsort(-scores, -1, kind="stable")[..., :S]
    return np.where(np.take_along_axis(scores, best, -1) > -np.inf, best, -1)


def gather(q, k, v, indices, *, pad="skip", row=0):
    """Attend one query after the other to the keys that it gathers, in float32.

    A pad of -1 may be skipped, or NumPy's last key; `row` queries on stands what is gathered.
    """
    out = np.zeros_like(v)
    for h, i in np.ndindex(q.shape[:2]):
        keys = indices[h, (i + row) % N]
        keys = keys[keys >= 0] if pad == "skip" else keys
        s = (k[h, keys].astype(f32) @ q[h, i].astype(f32)) * f32(q.shape[-1] ** -0.5)
        p = np.exp(s - s.max())
        out[h, i] = bf16(p) @ v[h, keys] / p.sum()
    return bf16(out)


def judged(out, indices, **more):
    q, k, v = inputs()
    given = {"q": q, "k": k, "v": v, "out": out, "indices": indices, "dtype": "bfloat16"}
    return refattn.verify(**given | {"causal": True} | more)


@pytest.fixture(scope="module")
def best():
    q, k, _ = inputs()
    return top_k(q @ k.swapaxes(-1, -2))


def test_a_right_kernel_and_its_choice_pass(best):
    q, k, v = inputs()
    found = judged(gather(q, k, v, best), best, index_q=q, index_k=k)
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
def test_wrong_kernels_are_named(best, wrong, cause):
    q, k, v = inputs()
    found = judged(gather(q, k, v, best, **wrong), best)
    assert found.verdict == "FAIL"
    assert cause in found.suspects[0].text


WRONG_READS = {
    "-1 in the indices is read as the first key of the choice": (
        lambda x: np.where(x < 0, x[..., :1], x)
    ),
    "the key after each chosen key is read": lambda x: np.where(
        x < 0, -1, np.minimum(x + 1, N - 1)
    ),
    "the place of each key in the choice is read as the key": (
        lambda x: np.where(x < 0, -1, np.arange(S))
    ),
    "the last 4 keys of each choice are left out": lambda x: x[..., :8],
    "only the first 2 keys of each choice are read": lambda x: x[..., :2],
    "the first key of each choice is left out": lambda x: x[..., 1:],
    "blocks of 8 queries have the keys that the first of them chose": (
        lambda x: x[:, ::8].repeat(8, 1)
    ),
}


@pytest.mark.parametrize("text", WRONG_READS)
def test_known_mistakes_of_reading_a_choice(best, text):
    """Each is a gather of other keys; a query that sees none has no row to compare."""
    q, k, v = inputs()
    problem = choose_keys(pose_arrays(q, k, v), {"indices": best})
    (mistake,) = (x for x in list_choices(problem) if x.text == text)
    read, at = WRONG_READS[text](best)[0, 20:30], np.arange(20, 30)
    for i, keys in zip(at, read, strict=True):
        weights = np.exp(k[0, keys[keys >= 0]] @ q[0, i] * q.shape[-1] ** -0.5)
        expected = weights @ v[0, keys[keys >= 0]] / weights.sum()
        got = mistake.result(Rows((0,), np.array([i]), np.arange(N))).out[0]
        assert np.allclose(got, expected, rtol=1e-9, atol=1e-12)


def mean_of_four(q, k):
    return q.reshape(2, N // 4, 4, -1).mean(2).repeat(4, 1) @ k.swapaxes(-1, -2)


@pytest.mark.parametrize(
    ("rank", "cause"),
    [
        (lambda q, k: -q @ k.swapaxes(-1, -2), "the keys with the smallest scores are chosen"),
        (mean_of_four, "keys are ranked by the means of 4 queries"),
        (lambda q, k: q[[0, 0]] @ k.swapaxes(-1, -2), "index_q is read from the first head"),
        (lambda q, k: (q @ k.swapaxes(-1, -2))[[0, 0]], "indices are read from the first head"),
        (
            lambda q, k: q @ np.roll(k, 1, 1).swapaxes(-1, -2),
            "each key is ranked by the vector of the key before it",
        ),
    ],
)
def test_wrong_rankings_are_named(rank, cause):
    q, k, v = inputs()
    indices = top_k(rank(q, k))
    found = refattn.verify(
        q=q, k=k, v=v, out=gather(q, k, v, indices), indices=indices, dtype="bfloat16",
        causal=True, index_q=q, index_k=k,
    ).parts["indices"]  # fmt: skip
    assert found.suspects[0].text == cause


def test_blocks_of_keys_are_chosen():
    """Blocks of 8 keys are ranked by their means, and a query's own block is always chosen."""
    q, k, v = inputs()
    means, own = k.reshape(2, N // 8, 8, -1).mean(2), np.eye(N // 8) * 32
    index_q = np.concatenate([q, np.tile(own.repeat(8, 0), (2, 1, 1))], -1)
    index_k = np.concatenate([means, np.tile(own, (2, 1, 1))], -1)
    scores = index_q @ index_k.swapaxes(-1, -2)
    scores = np.where(CAUSAL[:, ::8], scores, -np.inf)
    best = np.argsort(-scores, -1, kind="stable")[..., :3]
    best = np.where(np.take_along_axis(scores, best, -1) > -np.inf, best, -1)
    keys = np.where(best < 0, -1, 8 * best)[..., None] + np.where(
        best[..., None] < 0, 0, np.arange(8)
    )
    keys = keys.reshape(2, N, -1)
    out = gather(q, k, v, np.where(keys <= np.arange(N)[:, None], keys, -1))
    given = {"index_q": index_q, "index_k": index_k, "explain": False}
    words = {x: y.verdict for x, y in judged(out, best, **given).parts.items()}
    assert words == {"out": "PASS", "indices": "PASS"}
    spoiled = best.copy()
    spoiled[1, 40, 1] = np.argmin(np.where(np.isfinite(scores[1, 40]), scores[1, 40], np.inf))
    assert [x for x, _ in judged(out, spoiled, **given).parts["indices"].rows] == [(1, 40)]


def test_ties_within_rounding_are_no_fault():
    """Keys are ranked by scores in bfloat16: profile `eager` allows that, and `math` does not."""
    q, k, v = inputs()
    index_k = bf16(4 + np.random.default_rng(0).random(k.shape))
    ranked = top_k(bf16(np.ones_like(q) @ index_k.swapaxes(-1, -2)))
    out = gather(q, k, v, ranked)
    more = {"index_q": np.ones_like(q), "index_k": index_k, "explain": False}
    assert judged(out, ranked, **more).parts["indices"].profile == "eager"
    strict = judged(out, ranked, profile="flash", **more)
    assert {x: y.verdict for x, y in strict.parts.items()} == {"out": "PASS", "indices": "FAIL"}


def change(indices, to):
    indices = indices.copy()
    indices[1, 40, 2] = to
    return indices


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda x, worst: change(x, worst), "has a larger score than key"),
        (lambda x, _: change(x, x[1, 40, 1]), "a key is chosen twice: 1 rows"),
        (lambda x, _: change(x, 63), "that the query does not see: 1 rows"),
        (lambda x, _: change(x, -1), "though there is room: 1 rows"),
    ],
)
def test_a_wrong_choice(best, spoil, words):
    q, k, v = inputs()
    worst = int(np.argmin((q @ k.swapaxes(-1, -2))[1, 40, :41]))
    spoiled = spoil(best, worst)
    found = judged(gather(q, k, v, best), spoiled, index_q=q, index_k=k, explain=False)
    part = found.parts["indices"]
    assert part.verdict == "FAIL"
    assert any(words in x.text for x in part.suspects), part.suspects
    assert [x for x, _ in part.rows] == [(1, 40)]
    assert "difference of scores / what rounding allows: rms" in str(part)


def test_a_choice_of_all_keys_is_none():
    q, k, v = inputs()
    every = np.where(CAUSAL, np.arange(N), -1)[None]  # one for both heads
    found = judged(gather(q, k, v, np.repeat(every, 2, 0)), every, index_q=q, index_k=k)
    assert found.parts["indices"].verdict == "UNDERPOWERED"
    assert found.verdict == "UNDERPOWERED"


def test_blocks_of_queries_choose_together_in_a_file(best, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    q, k, v = inputs()
    blocks = np.sort(best[:, 15::16])  # of 16 queries, by the last of each
    out = gather(q, k, v, np.repeat(blocks, 16, -2))
    np.savez("moba.npz", q=q, k=k, v=v, out=out, indices=blocks)
    result = running.run("verify", "moba.npz", "--dtype", "bfloat16", "--format", "json")
    assert (result.exit_code, loads(result.stdout)["verdict"]) == (0, "PASS")
    posed = choose_keys(pose_arrays(q, k, v), {"indices": blocks})
    assert np.array_equal(
        np.sum(posed.read((0,))["mask"], -1), np.sum(blocks[0] >= 0, -1).repeat(16)
    )


@pytest.mark.sweep(7)
@pytest.mark.parametrize("causal", [False, True])
def test_blocks_choose_by_vectors_of_their_own(causal):
    """Four queries choose by their mean what any of them sees."""
    q, k, v = inputs()
    pooled = q.reshape(2, N // 4, 4, -1).mean(-2)
    scores = pooled @ k.swapaxes(-1, -2)
    scores = np.where(CAUSAL[3::4], scores, -np.inf) if causal else scores
    best = np.argsort(-scores, -1, kind="stable")[..., :S]
    best = np.where(np.take_along_axis(scores, best, -1) > -np.inf, best, -1)
    each = np.repeat(best, 4, 1)
    seen = CAUSAL[np.arange(N)[:, None], each] & (each >= 0) if causal else each >= 0
    out = gather(q, k, v, np.where(seen, each, -1))
    given = {"index_q": pooled, "index_k": k, "causal": causal, "empty_rows": "any"}
    found = judged(out, best, **given)
    assert found.parts["indices"].verdict == "PASS"
    assert found.parts["out"].verdict == "PASS"
    other = judged(out, best, **given | {"index_q": np.roll(pooled, 1, 1)})
    assert other.parts["indices"].verdict == "FAIL"
    with pytest.raises(
        ValueError, match=r"`index_q` must be finite, of shape \(\.\.\., 16, size\)"
    ):
        judged(out, best, **given | {"index_q": q})


def test_a_key_that_counts_twice_is_no_padding(best):
    q, k, v = inputs()
    indices = np.where(best < 0, best[..., :1], best)
    indices[..., -1] = indices[..., 0]
    found = judged(gather(q, k, v, indices), indices)
    assert [x.text for x in found.suspects] == ["agrees if a key that is chosen twice counts twice"]
