"""Keys that each wrong row sees are found row by row, and described; none is where none is."""

import re
from functools import partial

import numpy as np
import pytest

from refattn.judge import verify
from tests.judge.mistakes.causes.kernels import ahead, draw, fused, hide, named, scores, unnamed

N, M = 12, 64
Q, K, V, _ = draw(61, heads=4, n=N, m=M, d=32, size=1.5)
CAUSAL, J = ahead(N, M) <= 0, np.arange(M)
LONG = draw(62, n=64, d=32)[:3]
BLOCKS = np.random.default_rng(63).random((2, 64, 4)) < 0.6
BLOCKS[..., 0] = True
LOST = np.random.default_rng(64).random((4, N, N)) < 0.3


def given(seen, arrays=(Q, K, V), **options):
    q, k, v = arrays
    return {"q": q, "k": k, "v": v, "out": fused(hide(scores(q, k), seen), v)[0]} | options


def tree(parents):
    """Each new token sees itself, and what its parent sees."""
    seen = np.ones((N, M), bool)
    seen[:, M - N :] = np.eye(N)
    for token, parent in enumerate(parents, 1):
        seen[token] |= seen[parent]
    return seen


def members(lost):
    """Queries of two batch members lose other keys."""
    arrays = [x.reshape(2, 2, *x.shape[1:]) for x in (Q, K, V)]
    seen = CAUSAL & ~np.stack([(np.arange(N)[:, None] == i) & np.isin(J, j) for i, j in lost])
    return given(seen[:, None], arrays, causal=True)


def blocks(chosen):
    """In each row some blocks of 16 keys are seen."""
    return np.repeat(chosen, 16, -1) & (ahead(64, 64) <= 0)


CASES = {
    "tree": (lambda: given(tree([0, 0, 1, 1, 2, 4, 4, 5, 0, 3, 9]), causal=True),
        "the last 12 keys are seen as a tree of tokens, of which 1 to 11 follow 0, 0, 1, 1, 2, 4,"),
    "rows of members": (lambda: members([(3, (20, 50)), (7, (54, 58))]),
        "queries see other keys: query 3 of batch member 0 not keys 20, 50"),
    "blocks": (
        lambda: given(blocks(np.roll(BLOCKS, 1, 1)), LONG, mask=blocks(BLOCKS)),
        "queries see other keys: "),
}  # fmt: skip
test_keys_of_rows_are_named = named(CASES, profile="flash")


@pytest.mark.long
def test_what_is_said_of_rows_is_so():
    """Of each head that has its own keys, the first rows that are named lose those."""
    seen = np.broadcast_to(CAUSAL, (4, N, M)).copy()
    seen[..., M - N :] &= ~LOST | np.eye(N, dtype=bool)
    text = verify(**given(seen, causal=True), dtype="bfloat16").suspects[0].text
    first = text.removeprefix("agrees if queries see other keys: ").split("; ")[0]
    queries, keys = first.split(" of head 0 not ")
    for query in map(int, re.findall(r"\d+", queries)):
        assert not seen[0, query, [*map(int, re.findall(r"\d+", keys))]].any()


def weighed(power):
    s = hide(scores(Q, K), CAUSAL)
    return given(CAUSAL, causal=True) | {"out": fused(power * s, V[..., ::-1])[0]}


test_other_weights_are_no_other_keys = unnamed(
    {str(x): (partial(weighed, x), "see other keys") for x in (0.6, 1.5)}
)
