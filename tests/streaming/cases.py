"""Decoding states, and the attention of whole sequences that they decode."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

import refattn
from refattn import features, streaming
from refattn.estimators import near_and_far
from refattn.estimators.inputs import Options
from refattn.streaming import EvaState, LinearState, LocalState, PositiveState, SecondOrderState

OMEGA = np.random.default_rng(9).standard_normal((40, 3))
WEIGHT = np.random.default_rng(8).standard_normal(5)
WEIGHTED = {"omega": OMEGA[:5], "log_weight": WEIGHT}


class Case(NamedTuple):
    """How a state starts, and the whole of what it decodes, both with a window."""

    init: Callable[..., Any]
    whole: Callable[..., Any]  # of a window and a number of keys
    queries: bool = False  # whether the state takes queries, too

    def start(self, window, q, k, v):
        init = self.init(window)
        return init(k, v, q=q) if self.queries else init(k, v)

    def step(self, state, q, k, v):
        return state.update(k, v, q) if self.queries else state.update(k, v)


def plain(state, whole, **options):
    """A state without a window, of a function with the same options."""
    return Case(lambda w: partial(state.init, **options), lambda w, m: partial(whole, **options))


def eva(**options):
    fn, options = refattn.eva_attention, {"omega": "mean"} | options
    return Case(
        lambda w: partial(EvaState.init, window=w, **options),
        lambda w, m: partial(fn, window=w, **options),
        queries=True,
    )


def local(q, k, v, *, window, **options):
    """Local features at importance weights, which that function draws itself: by their copies."""
    options = Options(**{"scale": 0.4, **WEIGHTED, **options})
    inputs = near_and_far.prepare_random_features(q, k, v, options)
    return inputs.ungroup(near_and_far.attend_locally(inputs, window, True).out)


taylor = partial(features.taylor_features, degree=2)
slope = partial(features.elu_features, alpha=0.1)
scaled = partial(features.positive_features, omega=OMEGA[:3])


def recurrent(q, k, v, *, scale, causal=False):
    """The state after each token, or by `naive` after the last, with nothing but writes."""
    if causal:
        return refattn.recurrent_attention(q, k, v, scale=scale).out
    q, k, v = (x if len(x) == len(q) else np.repeat(x, len(q) // len(x), 0) for x in (q, k, v))
    return scale * (q @ (k.mT @ v))


PLAIN = {
    "softmax": plain(streaming.SoftmaxState, refattn.softmax_attention, scale=0.7),
    "positive": plain(PositiveState, refattn.random_feature_attention, scale=0.7, **WEIGHTED),
    "elu": plain(LinearState, refattn.linear_attention),
    "taylor": plain(LinearState, refattn.linear_attention, feature_map=taylor),
    "slope": plain(LinearState, refattn.linear_attention, feature_map=slope),
    "scaled": plain(LinearState, refattn.linear_attention, feature_map=scaled),
    "recurrent": plain(streaming.RecurrentState, recurrent, scale=0.7),
}
CHUNKED = {
    "mean": eva(),
    "published": eva(omega=None, rng=3, log_size=False, scale=0.4),
    "given": Case(
        lambda w: partial(EvaState.init, window=w, omega=OMEGA),
        lambda w, m: partial(refattn.eva_attention, window=w, omega=OMEGA[: -(-m // w)]),
    ),
    "second": Case(
        lambda w: partial(SecondOrderState.init, window=w, scale=0.4),
        lambda w, m: partial(refattn.second_order_attention, window=w, scale=0.4),
    ),
}
LOCAL = Case(
    lambda w: partial(LocalState.init, window=w - 1, scale=0.4, **WEIGHTED),
    lambda w, m: partial(local, window=(w - 1, 2)),
)
ONE = Case(
    lambda w: partial(LocalState.init, window=w - 1, omega=OMEGA[:1]),
    lambda w, m: partial(
        refattn.local_random_feature_attention, window=(w - 1, 2), omega=OMEGA[:1]
    ),
)
WINDOWED = CHUNKED | {"local": LOCAL, "local of one": ONE}
CASES = PLAIN | WINDOWED


def draw(seed, m, heads=4, groups=2, size=1.0):
    """Grouped heads of d = 3 and d_v = 2."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((h, m, d)) for h, d in ((heads, 3), (groups, 3), (groups, 2)))
    return size * q, size * k, v


def in_steps(name, window, q, k, v, cuts):
    """Results of tokens from the first cut on, and those of the last token of each step."""
    case, blocks, last = CASES[name], [], []
    state = case.start(window, *(x[..., : cuts[0], :] for x in (q, k, v)))
    for start, stop in pairwise(cuts):
        own = [x[..., start:stop, :] for x in (q, k, v)]
        if hasattr(state, "read_causal"):
            blocks.append(state.read_causal(*own))
        state = case.step(state, *own)
        last.append(state.read(q[..., stop - 1 : stop, :]))
    return blocks, last
