"""Parts of the keys and their merge: flash decoding over chunks, of which one may be empty."""

from itertools import pairwise

import numpy as np
import pytest

import refattn
from refattn.judge.kinds.parts import pose_parts
from refattn.judge.mistakes.causes.changed_inputs import list_merges
from refattn.judge.mistakes.causes.sampled import Rows
from refattn.judge.rounding.problems import pose_arrays
from refattn.judge.verification.findings import Numbers, Part
from refattn.judge.verification.judging import judge_all
from tests.cli import running
from tests.cli.running import loads
from tests.judge.rounding.rounded import FORMATS

bf16 = FORMATS["bfloat16"].round
f32 = np.float32
KEYS = np.array([0, 24, 24, 50, 64])  # part 1 is empty


Q, K, V = (bf16(x[0, :1, :64]) for x in refattn.load_sample())


def decode_chunk(q, k, v, to=bf16):
    """Softmax of one chunk in float32, its output and log of the normaliser."""
    if not k.shape[-2]:
        return np.zeros((*q.shape[:-1], v.shape[-1]), f32), np.full(q.shape[:-1], -np.inf, f32)
    s = (q.astype(f32) @ k.astype(f32).swapaxes(-1, -2)) * f32(q.shape[-1] ** -0.5)
    p = np.exp(s - s.max(-1, keepdims=True))
    total = p.sum(-1, keepdims=True)
    return to(p).astype(f32) @ v.astype(f32) / total, (s.max(-1) + np.log(total)[..., 0])


def chunks(skip=None, keys=KEYS, q=Q, k=K, v=V, to=bf16):
    """Outputs and log normalisers of chunks; one may be that of the keys of the chunk before."""
    spans = [slice(*x) for x in pairwise(keys)]
    if skip is not None:
        spans[skip] = spans[0]
    found = [decode_chunk(q, k[:, x], v[:, x], to) for x in spans]
    return (np.stack(x) for x in zip(*found, strict=True))


OUT, LSE = chunks()


def combine(out, lse, base=1.0, to=bf16):
    """Weigh chunks by their log normalisers, as the second kernel of flash decoding does."""
    weight = np.exp(f32(base) * (lse - lse.max(0)))
    return to((weight[..., None] * out).sum(0) / weight.sum(0)[..., None])


def judged(out, part_out, part_lse, **more):
    given = {"q": Q, "k": K, "v": V, "dtype": "bfloat16", "part_keys": np.array(KEYS)} | more
    found = refattn.verify(out=out, part_out=part_out, part_lse=part_lse, **given)
    return found, {x: y.verdict for x, y in found.parts.items()}


NAMES = ("out", "part 0", "part 1", "part 2", "part 3", "merge")


def test_right_parts_and_their_merge_pass():
    found, words = judged(combine(OUT, LSE), OUT, LSE)
    assert words == dict.fromkeys(NAMES, "PASS"), str(found)
    assert found.parts["part 1"].remarks == ["the part has no key"]


@pytest.mark.parametrize("keys", [[0, 63, 64], [0, 64]], ids=["of one key", "alone"])
def test_parts_with_nothing_to_weigh(keys):
    """One key has weight 1, and one part: any mean of its value is right."""
    out, lse = chunks(keys=keys)
    more = {"part_keys": np.array(keys), "explain": False}
    found, _ = judged(combine(bf16(out), lse), bf16(out), lse, **more)
    last = [*found.parts.values()][-1 if len(keys) == 2 else 1]
    assert (found.verdict, last.remarks) == ("PASS", ["no query sees more than one key"])


def test_parts_of_equal_scores_tell_nothing():
    """Two keys of one weight: what a scale does is not seen."""
    keys = np.array([0, 62, 64])
    out, lse = chunks(keys=keys, q=0 * Q)
    more = {"q": 0 * Q, "part_keys": keys, "explain": False}
    found, _ = judged(combine(bf16(out), lse), bf16(out), lse, **more)
    assert found.parts["part 1"].verdict == "UNDERPOWERED"


def test_parts_in_float32():
    arrays = {x: y.astype(f32) * f32(0.7) for x, y in zip("qkv", (Q, K, V), strict=True)}
    out, lse = chunks(**arrays, to=f32)
    more = arrays | {"dtype": None, "explain": False}
    assert judged(combine(out, lse, to=f32), out, lse, **more)[1] == dict.fromkeys(NAMES, "PASS")


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("base", "factor"), [(np.log(2), "0.693"), (np.log2(np.e), "1.44")])
def test_wrong_merges_are_named(base, factor):
    found, words = judged(combine(OUT, LSE, base), OUT, LSE)
    assert {x for x, y in words.items() if y == "FAIL"} == {"out", "merge"}
    cause = f"lse of the parts is multiplied by {factor}"
    assert cause in found.parts["merge"].suspects[0].text


def running_merge(out, lse):
    """Add one part after the other, and never update the log normaliser."""
    total = out[0]
    for more, other in zip(out[1:], lse[1:], strict=True):
        share = 1 / (1 + np.exp(lse[0] - other))
        total = total + share[..., None] * (more - total)
    return total


def weigh(weights):
    return lambda out, lse: (
        np.einsum("p...,p...d->...d", w := weights(lse), out) / w.sum(0)[..., None]
    )


WRONG_MERGES = {
    "part 2 counts twice": lambda out, lse: merge_of(out, lse, [0, 1, 2, 3, 2]),
    "part 3 is left out": lambda out, lse: merge_of(out, lse, [0, 1, 2]),
    "parts 0 and 3 have each other's weights": lambda out, lse: weigh(np.exp)(
        out, lse[[3, 1, 2, 0]]
    ),
    "each part has the weight of the next part": lambda out, lse: weigh(np.exp)(
        out, np.roll(lse, -1, 0)
    ),
    "lse of the parts is that of the query before": (
        lambda out, lse: weigh(np.exp)(out, np.roll(lse, 1, -1))
    ),
    "weights of parts are their numbers of keys": weigh(
        lambda lse: np.broadcast_to(np.diff(KEYS)[:, None, None], lse.shape)
    ),
    "weights of parts are lse, not e^lse": weigh(lambda lse: np.maximum(lse, 0)),
    "only the part with the largest lse is used": weigh(lambda lse: 1.0 * (lse == lse.max(0))),
    "the running lse of the merge is never updated": running_merge,
    "part 2 has the lse of the merge": lambda out, lse: weigh(np.exp)(
        out, replaced(lse, 2, np.logaddexp.reduce(lse))
    ),
    "lse of part 0 is in base 2": lambda out, lse: weigh(np.exp)(
        out, replaced(lse, 0, np.log2(np.e) * lse[0])
    ),
}


def replaced(lse, part, other):
    return np.where(np.arange(len(lse))[:, None, None] == part, other, lse)


def merge_of(out, lse, parts):
    return weigh(np.exp)(out[parts], lse[parts])


def posed(out, part_out, part_lse):
    given = {"part_out": part_out, "part_lse": part_lse, "part_keys": KEYS}
    problem = pose_arrays(Q, K, V)._replace(storage="bfloat16")
    return pose_parts({"out": Part(problem, Numbers(out.__getitem__, "bfloat16"))}, given)


@pytest.mark.long
def test_lse_of_a_part_is_read_with_other_strides():
    """It was written as (rows, heads), and is read as (heads, rows)."""
    q, k, v = (bf16(np.random.default_rng(8).standard_normal((4, 64, 16))) for _ in range(3))
    given = {"q": q, "k": k, "v": v}
    out, lse = chunks(keys=[0, 40, 64], **given)
    wrong = replaced(lse, 1, lse[1].T.reshape(lse[1].shape))
    merge, _ = judged(combine(out, wrong), out, lse, part_keys=np.array([0, 40, 64]), **given)
    words = "lse of part 1 is read with the strides of (heads, rows), not (rows, heads)"
    assert merge.suspects[0].text == f"agrees if {words}"  # though the output alone has no cause


def judge_merge(out, part_out, part_lse, profile=None):
    part = posed(out, part_out, part_lse)["merge"]
    return judge_all({"merge": part}, "bfloat16", profile, explain=False)


@pytest.fixture(scope="module")
def merges():
    """Known mistakes of the merge, by their texts."""
    problem = posed(OUT[0], OUT, LSE)["merge"].problem
    return {x.text: x for x in list_merges(problem)}


@pytest.mark.parametrize("text", WRONG_MERGES)
def test_known_mistakes_of_the_merge(text, merges):
    out, lse = OUT.astype(float), LSE.astype(float)
    every = np.arange(64)
    found = merges[text].result(Rows((0,), every, np.arange(4 * 64))).out
    assert np.allclose(found, WRONG_MERGES[text](out, lse)[0], rtol=1e-12, atol=1e-12)


def test_parts_in_16_bits_are_judged_by_their_merge():
    """A kernel that rounds its parts has not the errors of one that does not."""
    rounded = bf16(OUT)
    out = combine(rounded, LSE)
    assert [*posed(out, rounded, LSE)] == [*NAMES[1:]]
    assert [*posed(out, OUT, bf16(LSE))] == [*NAMES[1:]]
    assert judge_merge(out, rounded, LSE).verdict == "PASS"
    wrong = np.where(np.arange(64)[:, None] == 63, np.roll(out, 1, -2), out)
    found = judge_merge(wrong, rounded, LSE)
    assert (found.verdict, [x for x, _ in found.rows]) == ("FAIL", [(0, 63)])


def test_a_merge_that_rounds_its_scores_is_wrong():
    out = combine(OUT, bf16(LSE))
    assert judge_merge(out, OUT, LSE).verdict == "FAIL"
    assert judge_merge(out, OUT, LSE, "eager").verdict != "FAIL"


def test_a_wrong_part_under_a_right_merge():
    part_out, part_lse = chunks(skip=2)
    _, words = judged(combine(part_out, part_lse), part_out, part_lse, explain=False)
    assert {x for x, y in words.items() if y == "FAIL"} == {"out", "part 2"}


def test_an_empty_part_with_a_weight():
    """Its log normaliser is 0, so that it counts like a key of score 0."""
    lse = replaced(LSE, 1, 0)
    _, words = judged(combine(OUT, lse), OUT, lse, explain=False)
    assert words["part 1"] == "FAIL"
    assert words["merge"] == "PASS"


def test_parts_in_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    part_out = bf16(OUT)
    arrays = {"q": Q, "k": K, "v": V, "out": combine(part_out, LSE)}
    arrays = {x: y.astype(f32) for x, y in arrays.items()}
    np.savez("parts.npz", **arrays, part_out=part_out, part_lse=LSE, part_keys=KEYS)
    line = ("verify", "parts.npz", "--dtype", "bfloat16", "--no-cause", "--format", "json")
    result = running.run(*line)
    assert result.exit_code == 0, result.output
    assert [*loads(result.stdout)["parts"]] == [*NAMES[1:]]
    assert running.run("same", "parts.npz", "parts.npz", "--dtype", "bfloat16").exit_code == 0
