"""Causes that others look like: the plainest is named first, and what cannot be told apart is said.

Each is not named where its neighbours are what is wrong.
"""

import math
from functools import partial

import numpy as np

from refattn.judge.rounding.formats import FORMATS
from tests.judge.mistakes.causes.kernels import (
    BF16,
    ahead,
    draw,
    fused,
    hide,
    named,
    posing,
    scores,
    unnamed,
)

N = 64
Q, K, V, _ = draw()
S, FAR, J = scores(Q, K), ahead(N, N), np.arange(N)
FIRST = J % 32
E4M3 = FORMATS["float8_e4m3fn"].round
HEADS = draw(7, heads=6, n=32)[:3]
given, _ = posing(Q, K, V)


def of_first(more=None):
    """Copies have the weights of the keys that they are of; log normalisers tell them apart."""
    out, lse = fused(S[..., FIRST], V[:, FIRST])
    return given(out, lse=None if more is None else lse + more)


def windowed(causal, left, right, has_lse):
    out, lse = fused(hide(S, (-left <= FAR) & (right >= FAR)), V)
    return given(out, causal=causal, lse=lse if has_lse else None)


def unscaled(*names):
    """More keys than queries: keys cannot have the scales of queries."""
    q, k, v, _ = draw(3, n=32, m=48)
    by_query, by_key = np.linspace(0.5, 1, 32)[:, None], np.linspace(1, 2, 48)[:, None]
    scales = {"q_scale": by_query[None], **dict.fromkeys(names, by_key[None])}
    stored = E4M3(q / by_query), E4M3(k / by_key), E4M3(v / by_key) if "v_scale" in names else v
    out = fused(scores(by_query * stored[0], stored[1]), stored[2])[0]
    return given(out, stored, **scales)


def overflowing(most, least):
    """Scores of head 1 fall from `most` to `least` from tile to tile; its rows are NaN."""
    q, k = Q.copy(), K.copy()
    q[1], k[1] = 4 * np.eye(16)[0], 0
    k[1, :, 0] = BF16(np.where(J < 32, most, least))
    out = fused(scores(q, k), V)[0]
    out[1] = math.nan
    return given(out, (q, k, V))


def of_other_heads(order, change=lambda lse: lse):
    out, lse = fused(scores(*HEADS[:2]), HEADS[2])
    return given(out, HEADS, lse=change(lse[order]))


def larger(lse):
    lse[2] += 0.01
    return lse


LOST, RESET = "agrees if keys 32 to 63 are left out$", "the maximum is taken per tile"
WINDOWS = {
    (True, 9, 0): "9 keys to the left",
    (False, 9, 0): "9 keys to the left and 0 to the right",
    (False, 9, 64): "9 keys to the left",
    (False, 64, 9): "9 keys to the right",
    (False, 9, 9): "9 keys to both sides",
    (False, 9, 7): "9 keys to the left and 7 to the right",
    (False, 2, 30): "2 keys to the left and 30 to the right",
}
ORDERS = {
    (0, 3, 1, 4, 2, 5): "head 1 from head 3, head 2 from head 1, head 3 from head 4, head 4 from "
    "head 2, as if heads in order (2, 3) were written as (3, 2)",
    (0, 2, 1, 3, 4, 5): "head 1 from head 2, head 2 from head 1",
}
CASES = {
    "lost, not copies": (of_first, LOST),
    "copies by lse": (lambda: of_first(0), "agrees if row j % 32 of k and v is used for key j"),
    "lost by lse": (lambda: of_first(-math.log(2)), LOST),
    **{f"window {x} {y}": (partial(windowed, *x, y), f"agrees if there is a window of {words}$")
        for x, words in WINDOWS.items() for y in (False, True)},
    "no scale of keys": (lambda: unscaled("k_scale"), "agrees if k_scale is not applied$"),
    "no scales": (lambda: unscaled("k_scale", "v_scale"),
        "agrees if k_scale and v_scale are not applied$"),
    # NaN does not tell a reset from none where scores are as large as they fall.
    **{f"reset at {x}": (partial(overflowing, x, x - 120), f"agrees if {RESET}, and the factor of "
        f"the earlier sums overflows float32, or no maximum is subtracted, and e^score overflows "
        f"float{16 if x < 88 else 32} (NaN does not tell which)$") for x in (60, 100)},
    **{f"lse of heads {x}": (partial(of_other_heads, [*x]),
        f"agrees if lse is that of other heads: {words}$") for x, words in ORDERS.items()},
}  # fmt: skip
test_the_plainest_is_named_first = named(CASES, profile="flash")
NEIGHBOURS = {
    "no reset": (lambda: overflowing(100, 40), RESET),
    **{f"in all heads but one {x}": (partial(of_other_heads, [*x], larger), "") for x in ORDERS},
    **{f"other rows {x}": (partial(of_other_heads, [*x], lambda lse: np.roll(lse, 3, -1)),
        "other heads") for x in ORDERS},
}  # fmt: skip
test_the_others_are_not_named = unnamed(NEIGHBOURS, profile="flash")
