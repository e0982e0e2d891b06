"""Small problems of numbers with few digits, and kernels that round coarsely."""

import numpy as np

from refattn.judge.rounding.formats import FORMATS, Format
from refattn.judge.rounding.roundings import Roundings


def draw(seed, *shape, size=1.0, step=8):
    return size * np.rint(step * np.random.default_rng(seed).standard_normal(shape)) / step


def qkv(lead=(), n=9, m=11, d=4, d_v=3, share=1, size=1.0, step=8):
    keys = (*lead[:-1], lead[-1] // share) if lead else ()
    q, k = draw(0, *lead, n, d, step=step), draw(1, *keys, m, d, step=step)
    return q, k, draw(2, *keys, m, d_v, size=size)


def seen(n, m):
    return np.random.default_rng(3).random((n, m)) < 0.7


def hidden(n, m):
    return np.where(np.random.default_rng(4).random((n, m)) < 0.8, draw(5, n, m), -np.inf)


SINKS = np.array([-1.0, 2.5])
OPTIONS = {  # arguments of `qkv`, and options
    "plain": ({}, {}),
    "fewer keys": ({"n": 12, "m": 7}, {"causal": True, "scale": -0.75}),
    "window": ({}, {"causal": True, "window": (3, 1), "scale": 0.5}),
    "cap": ({}, {"softcap": 2.5, "scale": 0.3}),
    "cap of 2": ({}, {"softcap": 2.0, "bias": hidden(9, 11)}),
    "sinks": ({"lead": (2,), "share": 2}, {"sinks": SINKS, "window": (None, 2)}),
    "all": (
        {"lead": (2,)},
        {
            "bias": hidden(9, 11), "mask": seen(9, 11), "sinks": SINKS, "softcap": 3.0,
            "scale": 0.9, "causal": True, "window": (6, None),
        },
    ),
    "many keys": ({"n": 5, "m": 150, "d": 9}, {"causal": True}),
    "small": ({"size": 2.0**-128}, {}),
    "large": ({"size": 2.0**126}, {"scale": 2.0}),
    "equal": ({"n": 4, "m": 40, "d": 1}, {"scale": 2.0**-14}),
    "alike": ({"n": 120, "m": 64, "d": 1, "step": 1}, {}),
    "one key": ({"m": 1, "d": 20, "d_v": 20}, {}),
    "wide": ({"m": 5, "d": 20, "d_v": 20}, {"scale": 0.3}),
}  # fmt: skip


def coarse(digits, least=-126):
    return Format(digits, least, (2 - 2.0**-8) * 2.0**127)


PLAIN = Roundings(
    scores=None, weights=None, softmax=coarse(12), accumulate=coarse(13), out=coarse(11), lanes=1,
    normalised=False, run=256, states=None, exp=3.0, d_weights=None, d_scores=None,
    delta_of_out=False, parts=None,
)  # fmt: skip
KERNELS = {
    "fine": PLAIN._replace(lanes=2, run=64, states=coarse(12)),
    "recomputed": PLAIN._replace(delta_of_out=True, out=None),
    "fused": PLAIN._replace(
        weights=coarse(10, -14), d_scores=coarse(10), delta_of_out=True, parts=(4, 6), run=64
    ),
    "fast": PLAIN._replace(
        weights=coarse(8), accumulate=coarse(24), softmax=coarse(23), delta_of_out=True
    ),
    "upcast": PLAIN._replace(weights=coarse(10), normalised=True, d_weights=coarse(11, -14)),
    "eager": PLAIN._replace(
        scores=coarse(12), weights=coarse(10), softmax=coarse(11), normalised=True,
        d_weights=coarse(12), d_scores=coarse(11), lanes=4,
    ),
    "half": PLAIN._replace(
        scores=coarse(11, -14), weights=coarse(9, -14), accumulate=coarse(12, -14)
    ),
    "double": PLAIN._replace(accumulate=FORMATS["float64"], softmax=FORMATS["float64"]),
}  # fmt: skip
