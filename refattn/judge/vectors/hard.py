r"""Cases of exact attention on which float64 loses most digits.

A family says what cancels, and a level by how much: a plain evaluation in float64 loses about
3 x level digits of the output, of about 16. The id of a case has all that it was drawn with.

cancelling
    Keys come twice, with opposite values but for :math:`2^{-p}` of them.
equal
    All keys are equal, and the values of the second half are those of the first with the other
    sign, but for :math:`2^{-p}` of them.
large
    Logits near :math:`2^p` with differences of order one.
means
    A mean of :math:`2^p` in queries and keys, which all logits of a query have in common.
sink
    One key of value 0 has nearly all the weight, among logits near :math:`2^p`.
tie
    Two keys have all the weight, with logits of tens to thousands that differ by about
    :math:`2^{-p}`, and opposite values but for as much of them.
values
    A mean of :math:`2^p` in the values of all keys but one, whose value balances them.

Numbers are drawn as everywhere, and combined by single sums and products, which are the same on
every machine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ...arrays.library import Floats
from .drawing import Recipe, draw_stream

_Qkv = tuple[Floats, Floats, Floats]

# The p above by level.
POWERS: dict[str, tuple[int, ...]] = {
    "cancelling": (8, 18, 28, 38),
    "equal": (8, 18, 28, 38),
    "large": (9, 16),
    "means": (4, 9, 14, 19),
    "sink": (9, 16),
    "tie": (4, 12, 22, 32),
    "values": (8, 18, 28, 38),
}


class Hard(NamedTuple):
    """What a case is drawn with."""

    family: str  # a key of `POWERS`
    level: int  # from 1
    seed: int = 0  # a word of its id, so that all numbers change with it
    width: int = 0  # power of two that queries or keys are multiplied by, see the families
    n: int = 2
    m: int = 128  # which is even
    d: int = 32
    d_v: int = 4

    @property
    def label(self) -> str:
        """The id.

        Examples
        --------
        >>> Hard("tie", 2, seed=7, width=5).label
        'softmax-hard-tie-level2-seed7-width5-n2-m128-d32-dv4-float64'
        """
        width = f"width{self.width}".replace("-", "minus")
        words = (f"level{self.level}", f"seed{self.seed}", width)
        sizes = (f"n{self.n}", f"m{self.m}", f"d{self.d}", f"dv{self.d_v}")
        return "-".join(("softmax-hard", self.family, *words, *sizes, "float64"))


def _with_cancelling_values(q: Floats, k: Floats, v: Floats, small: float, width: float) -> _Qkv:
    half = len(k) // 2
    k = np.concatenate([k[:half], k[:half]])
    return q * width, k, np.concatenate([v[:half], v[half:] * small - v[:half]])


def _with_equal_keys(q: Floats, k: Floats, v: Floats, small: float, width: float) -> _Qkv:
    half, size = len(k) // 2, abs(v)  # of one sign, so that partial sums grow
    return (
        q * width,
        np.repeat(k[:1], len(k), 0),
        np.concatenate([size[:half], v[half:] * small - size[:half]]),
    )


def _with_large_logits(q: Floats, k: Floats, v: Floats, small: float, width: float) -> _Qkv:
    way = k[0]
    return way + q / 8, way / small + k * width, v


def _with_means(q: Floats, k: Floats, v: Floats, small: float, width: float) -> _Qkv:
    half = k.shape[-1] // 2
    k = np.concatenate([k[:, :half], -k[:, :half]], -1)  # sums of 0: the mean of q moves nothing
    return q * width + 1 / small, k + 1 / small, v


def _with_sink(q: Floats, k: Floats, v: Floats, small: float, width: float) -> _Qkv:
    way, first = k[0], np.arange(len(k))[:, None] == 0
    k = np.where(first, way * (8 * width), k) + way / small
    return way + q / 8, k, np.where(first, 0.0, v)


def _with_tie(q: Floats, k: Floats, v: Floats, small: float, width: float) -> _Qkv:
    way = k[0]
    k, v = k.copy(), v.copy()
    k[0], k[1] = way * (32 * width), way * (32 * width) + k[1] * small
    v[1] = v[1] * small - v[0]
    return way + q / 8, k, v


def _with_mean_values(q: Floats, k: Floats, v: Floats, small: float, width: float) -> _Qkv:
    v = v + 1 / small
    v[0] -= len(k) / small
    return q * width, k * small, v


# What is special, and what is made of q, k and v.
_FAMILIES: dict[str, tuple[str, Callable[[Floats, Floats, Floats, float, float], _Qkv]]] = {
    "cancelling": ("Equal keys have values that cancel.", _with_cancelling_values),
    "equal": ("All keys are equal, and their values cancel.", _with_equal_keys),
    "large": ("Large logits with small differences.", _with_large_logits),
    "means": ("Queries and keys have large means.", _with_means),
    "sink": ("One key of value 0 has nearly all the weight, among large logits.", _with_sink),
    "tie": ("The two largest logits nearly tie, and their values cancel.", _with_tie),
    "values": ("Values have a large mean, which one key balances.", _with_mean_values),
}


def recipe(hard: Hard) -> Recipe:
    """Draw a case.

    Examples
    --------
    >>> found = recipe(Hard("large", 1, m=4, d=2, d_v=3))
    >>> {name: x.shape for name, x in found.inputs.items()}
    {'q': (2, 2), 'k': (4, 2), 'v': (4, 3)}
    """
    label, (comment, combine) = hard.label, _FAMILIES[hard.family]
    shapes = {"q": (hard.n, hard.d), "k": (hard.m, hard.d), "v": (hard.m, hard.d_v)}
    q, k, v = (
        draw_stream(f"{label}/{name}", shape, "float64", 1.0) for name, shape in shapes.items()
    )
    small = 2.0 ** -POWERS[hard.family][hard.level - 1]
    return Recipe(
        id=label,
        estimator="softmax",
        comment=comment,
        flags=("HARD",),
        arguments={"scale": None, "causal": False},
        dtype="float64",
        inputs=dict(zip(shapes, combine(q, k, v, small, 2.0**hard.width), strict=True)),
        file="softmax-hard",
        group=f"softmax-hard-{hard.family}",
    )


# What `python -m validation.digits.search` found.
HARD_CASES: tuple[Hard, ...] = (
    Hard("cancelling", 1, 1475, -2),
    Hard("cancelling", 2, 1201, 0, d=64),
    Hard("cancelling", 3, 2679, 0, m=200),
    Hard("cancelling", 4, 1651, -1),
    Hard("equal", 1, 3608, -1),
    Hard("equal", 2, 857, 1, d=64),
    Hard("equal", 3, 272, 0, m=200),
    Hard("equal", 4, 1778, 0),
    Hard("large", 1, 2584, 0),
    Hard("large", 2, 1893, -2, d=64),
    Hard("means", 1, 3421, 1),
    Hard("means", 2, 2528, 0, d=64),
    Hard("means", 3, 713, -1, m=200),
    Hard("means", 4, 244, 1),
    Hard("sink", 1, 2929, 0),
    Hard("sink", 2, 1336, 0, d=64),
    Hard("tie", 1, 3729, 0),
    Hard("tie", 2, 1688, 0, d=64),
    Hard("tie", 3, 3168, 0, m=200),
    Hard("tie", 4, 1231, 1),
    Hard("values", 1, 2908, -2),
    Hard("values", 2, 3680, 0, d=64),
    Hard("values", 3, 2981, 0, m=200),
    Hard("values", 4, 2013, 0),
)
