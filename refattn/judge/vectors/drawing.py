"""Draw the numbers of a case from raw bits of a generator, as the words of the table ask."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ...arrays.library import Floats
from .cases import DTYPE_FACTS, Convention


class Recipe(NamedTuple):
    """A case without its outputs."""

    id: str
    estimator: str
    comment: str
    flags: tuple[str, ...]
    arguments: dict[str, Any]
    dtype: str
    inputs: dict[str, Floats]
    file: str
    group: str
    convention: Convention | None = None


@dataclass(frozen=True)
class Drawn:
    """What is drawn: how many of what, in numbers of which dtype and how large."""

    n: int = 4
    m: int = 6
    d: int = 4
    d_v: int = 3
    count: int = 5  # frequencies, or keys of a sample
    heads: tuple[int, ...] = ()
    key_heads: tuple[int, ...] = ()
    omega_heads: tuple[int, ...] = ()
    cotangents: tuple[str, ...] = ()
    dtype: str = "float32"
    size: float | None = None  # of queries and keys, or of the vectors of a kernel
    plain: float | None = None  # of all else

    @property
    def pairs(self) -> tuple[int, int]:
        """The numbers of queries and keys."""
        return self.n, self.m

    def shape(self, name: str, per_query: bool = False) -> tuple[int, ...]:
        """Return the shape of an input."""
        rows = {"q": self.n, "k": self.m, "v": self.m, "d_out": self.n, "d_lse": self.n}
        if name in rows:
            lead = self.key_heads if name in "kv" else self.heads
            width = {"q": (self.d,), "k": (self.d,), "d_lse": ()}.get(name, (self.d_v,))
            return (*lead, rows[name], *width)
        if name in "xy":
            return (self.n, self.d)
        lead = (self.n,) if per_query else self.omega_heads if name == "omega" else ()
        return (*lead, self.count, self.d)

    def width(self, name: str) -> float:
        """Return the bound of the numbers of an input: queries and keys have their own."""
        if name in "qkxy" and self.size is not None:
            return self.size
        return self.plain or (1.0 if self.dtype.endswith("16") else 2.0)


def draw_stream(name: str, shape: tuple[int, ...], dtype: str, size: float) -> Floats:
    """Draw from a grid of [-size, size) with as many bits as the dtype has; size is 2^p."""
    bits = DTYPE_FACTS[dtype][0]
    raw = np.random.PCG64(zlib.crc32(name.encode())).random_raw(math.prod(shape))
    steps = (raw >> np.uint64(64 - bits)).astype(np.int64) - 2 ** (bits - 1)
    return np.asarray(steps.reshape(shape) * (size * 2.0 ** (1 - bits)))


class Inputs(dict[str, Any]):
    """The inputs of a case by name, while they are drawn."""

    def __init__(self, label: str, of: Drawn) -> None:
        super().__init__()
        self.label, self.of = label, of

    def draw(self, name: str, shape: tuple[int, ...]) -> Floats:
        """Draw an input of a shape."""
        return draw_stream(f"{self.label}/{name}", shape, self.of.dtype, self.of.width(name))


def round_to_single(x: Floats, dtype: str) -> Floats:
    """Round to float32 what is drawn for a narrower dtype than float64."""
    return x.astype(np.float32).astype(float) if x.dtype == float and dtype != "float64" else x


def _seen(shape: tuple[int, ...], step: int = 7) -> Floats:
    """Hide every third key and one of `step`, others from each query."""
    index = np.arange(math.prod(shape)).reshape(shape)
    return np.asarray((index % 3 != 1) & (index % step != step - 2))


def _row_hidden(pairs: tuple[int, int], step: int = 7) -> Floats:
    """Return the same, and query 1 sees nothing."""
    return np.asarray(_seen(pairs, step) & (np.arange(pairs[0]) != 1)[:, None])


def _hide_huge(x: Inputs) -> dict[str, Any]:
    mask = np.arange(x.of.m) % 3 != 1
    huge = np.where(mask[:, None], 1.0, 2.0**40)
    return {"mask": mask, "k": x["k"] * huge, "v": x["v"] * huge}


def _probe(d: int) -> Floats:
    """Return plus and minus e_i and (1, ..., 1)."""
    rows = np.concatenate([np.eye(d), np.ones((1, d))])
    return np.concatenate([rows, -rows])


def _show_signs(omega: Floats) -> Floats:
    """Make the first entries of rows of alternating sign, so that a lost sign shows."""
    signs = np.where(np.arange(omega.shape[-2]) % 2, 1.0, -1.0)
    return np.concatenate([abs(omega[..., :1]) * signs[:, None], omega[..., 1:]], axis=-1)


def _stretch(k: Floats) -> Floats:
    """Return keys in nearly one direction, of lengths from 1/4 to 4."""
    lengths = 2.0 ** (np.arange(len(k)) % 5 - 2)
    return np.asarray((np.ones_like(k) + k / 16) * lengths[:, None] / 2)


def _sample(x: Inputs) -> dict[str, Any]:
    """Draw probabilities of given indices, or of keys that lie apart, others for each query."""
    queries = (*x.of.heads, x.of.n)
    rows = np.arange(math.prod(queries)).reshape(*queries, 1)
    apart = np.asarray((rows + 2 * np.arange(x.of.count)) % x.of.m, np.int64)
    indices = x.pop("indices", apart)
    return {"log_probability": x.draw("log_probability", indices.shape), "indices": indices}


# What a word of the table adds to the inputs, or replaces of them.
INPUTS: dict[str, Callable[[Inputs], dict[str, Any]]] = {
    # masks
    "hide": lambda x: {"mask": _seen(x.of.pairs, 5)},
    "hide-keys": lambda x: {"mask": _seen((x.of.m,), 5)},
    "hide-row": lambda x: {"mask": _row_hidden(x.of.pairs, 5)},
    "hide-huge": _hide_huge,
    "mask": lambda x: {"mask": _seen(x.of.pairs)},
    "emptyrow": lambda x: {"mask": _row_hidden(x.of.pairs)},
    # queries, keys and values
    "above": lambda x: {"q": x["q"] + 30, "k": x["k"] + 30},
    "apart": lambda x: {"q": x["q"] + 30, "k": x["k"] - 30},
    "opposed": lambda x: {"q": x["q"] + 30, "k": -(x["k"] + 30)},
    "negative": lambda x: {"q": x["q"] / 2 - 20, "k": x["k"] / 2 - 20},
    "equal": lambda x: {"k": np.repeat(x["k"][:1], x.of.m, 0)},
    "lengths": lambda x: {"k": _stretch(x["k"])},
    "opposite": lambda x: {"k": -x["q"][np.arange(x.of.m) % x.of.n]},
    "near": lambda x: {"v": 1 + x["v"] / 1024},
    "ones": lambda x: {"v": np.ones_like(x["v"])},
    "past4": lambda x: {
        "past_k": x.draw("past_k", (*x.of.key_heads, 4, x.of.d)),
        "past_v": x.draw("past_v", (*x.of.key_heads, 4, x.of.d_v)),
    },
    # frequencies, and what goes with them
    "omega": lambda x: {"omega": x.draw("omega", x.of.shape("omega"))},
    "weights": lambda x: {"log_weight": x["omega"][:, 0] * 2},
    "centres2": lambda x: {"centres": x["centres"][:2]},
    "centres3": lambda x: {"centres": x["centres"][:3]},
    "key-probes": lambda x: {"k": _probe(x.of.d), "omega": _show_signs(x["omega"])},
    "probes": lambda x: {"q": _probe(x.of.d), **INPUTS["key-probes"](x)},
    "queries-above": lambda x: {"q": x["q"] + 512, "omega": 1 + x["omega"] / 64},
    "queries-below": lambda x: {"q": x["q"] - 512, "omega": 1 + x["omega"] / 64},
    # keys of samples
    "sample": _sample,
    "every-key": lambda x: {
        "indices": np.tile(np.array([3, 5, 0, 4, 2, 1]), (x.of.n, 1)),
        "log_probability": np.zeros(x.of.pairs),
    },
    # options of exact attention
    "bias": lambda x: {"bias": x.draw("bias", x.of.pairs)},
    "headbias": lambda x: {"bias": x.draw("bias", (*x.of.heads, *x.of.pairs))},
    "bias1024": lambda x: {"bias": 512 * x.draw("bias", x.of.pairs)},
    "sinks": lambda x: {"sinks": x.draw("sinks", x.of.heads)},
    "sinks32": lambda x: {"sinks": 32 + x.draw("sinks", x.of.heads)},
    "sinksminus32": lambda x: {"sinks": x.draw("sinks", x.of.heads) - 32},
    "slopes": lambda x: {"slopes": 2.0 ** -(1 + np.arange(x.of.heads[0]))},
    "dropout2": lambda x: {"dropout": 2.0 * _seen(x.of.pairs)},
    "dropout4": lambda x: {"dropout": 4.0 * (x.draw("dropout", (*x.of.heads, *x.of.pairs)) > 0)},
    "keep": lambda x: {"keep": _seen(x.of.pairs)},
    # pairs of a kernel
    "pair-above": lambda x: {name: round_to_single(x[name] / 8 + 8, "float32") for name in "xy"},
    "pair-lengths": lambda x: {"y": x["y"] * 2.0 ** np.arange(-2, 2)[:, None]},
    "pair-opposite": lambda x: {"omega": x["omega"] * 512, "y": x["y"] / 1024 - x["x"]},
    "pair-probes": lambda x: {
        "x": _probe(x.of.d),
        "y": np.roll(_probe(x.of.d), 1, 0),
        "omega": _show_signs(x["omega"]),
    },
    "pair-weights": lambda x: {"log_weight": x["omega"][:, 0]},
    "zero": lambda x: {"x": 0 * x["x"], "y": 0 * x["y"]},
    # rows of moments
    "offset12": lambda x: {"x": x["x"] + 2.0**12},
    "offset30": lambda x: {"x": x["x"] + 2.0**30},
    "rows-equal": lambda x: {"x": np.repeat(x["x"][:1], 8, 0)},
    "scales": lambda x: {"x": x["x"] * np.array([2.0**-30, 1.0, 2.0**30])},
}
