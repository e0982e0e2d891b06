"""Defects of two or three uses together: each of them alone is right."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from .attention import Attention, Draws
from .shared import CATALOGUES as CATALOGUES
from .shared import Interleaved, defect

Array = Any

_interleaved = Interleaved().share


@defect("one-query-unmasked", ("softmax", "rfa", "linear"), "Decoding ignores the mask.")
class OneQueryUnmasked(Attention):
    """A path of its own for one query forgets the mask."""

    def visible(self, n: int, m: int, mask: Array | None, causal: bool) -> Array:
        return super().visible(n, m, None if n == 1 else mask, causal)


@defect(
    "one-query-interleaved",
    ("softmax", "rfa", "linear"),
    "Decoding with grouped heads reads the keys of head h mod G.",
)
class OneQueryInterleaved(Attention):
    """For one query, query head h reads key head h mod G."""

    def share(self, q: Array, x: Array) -> Array:
        return _interleaved(q, x) if q.shape[-2] == 1 else super().share(q, x)


@defect(
    "many-keys-interleaved",
    ("softmax", "rfa", "linear"),
    "Grouped heads are interleaved where there are more than 64 keys.",
)
class ManyKeysInterleaved(Attention):
    """Beyond one block of keys, query head h reads key head h mod G."""

    def share(self, q: Array, x: Array) -> Array:
        return _interleaved(q, x) if x.shape[-2] > 64 else super().share(q, x)


@defect(
    "value-length-interleaved",
    ("softmax", "rfa", "linear"),
    "Grouped heads are interleaved where values are not as long as keys.",
)
class ValueLengthInterleaved(Attention):
    """Values of another length come as heads h mod G."""

    def share(self, q: Array, x: Array) -> Array:
        return _interleaved(q, x) if x.shape[-1] != q.shape[-1] else super().share(q, x)


@defect(
    "padding-of-the-first",
    ("softmax", "rfa", "linear"),
    "A batch of which the first member is not padded is taken as not padded.",
)
class PaddingOfTheFirst(Attention):
    """Whether there is padding is looked up in the first member of the batch."""

    def visible(self, n: int, m: int, mask: Array | None, causal: bool) -> Array:
        plain = mask is not None and mask.ndim > 2 and mask[0].all()
        return super().visible(n, m, None if plain else mask, causal)


@defect(
    "mask-and-causal-top-left",
    ("softmax", "rfa", "linear"),
    "With a mask and causal, and n < m, recent keys are hidden.",
)
class MaskAndCausalTopLeft(Attention):
    """Query i sees keys up to i where a mask is given too."""

    def visible(self, n: int, m: int, mask: Array | None, causal: bool) -> Array:
        if mask is None or not causal:
            return super().visible(n, m, mask, causal)
        return super().visible(n, m, mask, False) & np.tri(n, m, dtype=bool)


@defect(
    "mask-in-diagonal-tiles",
    ("softmax", "rfa", "linear"),
    "Causal attention ignores the mask from the second tile on.",
)
class MaskInDiagonalTiles(Attention):
    """Causal, tiles of 64 before that of the diagonal are taken as seen."""

    def visible(self, n: int, m: int, mask: Array | None, causal: bool) -> Array:
        if mask is None or not causal:
            return super().visible(n, m, mask, causal)
        last = (np.arange(n)[:, None] + m - n) // 64
        seen = np.broadcast_to(mask, (*mask.shape[:-2], n, m)) | (np.arange(m) // 64 < last)
        return super().visible(n, m, seen, True)


@defect(
    "mask-cut-with-queries",
    ("softmax", "rfa", "linear"),
    "A mask for all queries is lost after the first 32.",
)
class MaskCutWithQueries(Attention):
    """Queries come in blocks of 32, and a mask of one row is cut like them."""

    def visible(self, n: int, m: int, mask: Array | None, causal: bool) -> Array:
        if mask is not None and (mask.ndim < 2 or mask.shape[-2] == 1):
            mask = mask | (np.arange(n)[:, None] >= 32)
        return super().visible(n, m, mask, causal)


@defect(
    "mask-written-to",
    ("softmax", "rfa", "linear"),
    "The caller's mask holds the causal mask afterwards.",
)
class MaskWrittenTo(Attention):
    """The causal mask is put into the mask that was given."""

    def visible(self, n: int, m: int, mask: Array | None, causal: bool) -> Array:
        if mask is not None and causal and mask.ndim > 1 and mask.shape[-2:] == (n, m):
            mask &= np.tri(n, m, m - n, dtype=bool)
        return super().visible(n, m, mask, causal)


@defect(
    "causal-mask-kept",
    ("softmax", "rfa", "linear"),
    "Causal attention after a call with more keys sees too few, or too many.",
)
class CausalMaskKept(Attention):
    """The causal mask is kept by the number of queries, and made anew only for more keys."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[int, Array] = {}

    def visible(self, n: int, m: int, mask: Array | None, causal: bool) -> Array:
        seen = super().visible(n, m, mask, False)
        if not causal:
            return seen
        if n not in self.kept or self.kept[n].shape[-1] < m:
            self.kept[n] = np.tri(n, m, m - n, dtype=bool)
        return seen & self.kept[n][:, :m]


@defect(
    "values-clipped",
    ("softmax", "rfa", "ra", "lara", "linear"),
    "Values beyond 100 are taken for 100.",
)
class ValuesClipped(Attention):
    """Values are clipped to [-100, 100]."""

    def average(self, weights: Array, v: Array, visible: Array) -> Array:
        return super().average(weights, np.clip(v, -100, 100), visible)


@defect(
    "stride-of-the-batch",
    ("softmax", "rfa", "linear"),
    "Wrong for arrays in which heads lie inside tokens.",
    "the old tutorial on fused attention",
)
class StrideOfTheBatch(Attention):
    """A member of the batch is looked for after as many heads, as they are strided."""

    def attend(self, q: Array, k: Array, v: Array, visible: Array, draws: Draws) -> Array:
        q, k, v = (self.as_heads_lie(x) for x in (q, k, v))
        return super().attend(q, k, v, visible, draws)

    def as_heads_lie(self, x: Array) -> Array:
        if x.ndim != 4 or x.shape[1] * x.strides[1] > x.strides[0]:
            return x
        return as_strided(x, x.shape, (x.shape[1] * x.strides[1], *x.strides[1:]))


@defect(
    "strides-without-sign",
    ("softmax", "rfa", "linear"),
    "Wrong for arrays that are flipped.",
)
class StridesWithoutSign(Attention):
    """Tokens are read forwards whatever the sign of their stride."""

    def attend(self, q: Array, k: Array, v: Array, visible: Array, draws: Draws) -> Array:
        q = q[..., ::-1, :] if q.ndim > 1 and q.strides[-2] < 0 else q
        return super().attend(q, k, v, visible, draws)


@defect(
    "causal-frequencies-of-the-first-head",
    ("rfa",),
    "Causal, with frequencies for each head, all heads use those of the first.",
)
class CausalFrequenciesOfTheFirstHead(Attention):
    """The causal path reads one set of frequencies."""

    def __call__(self, *arrays: Array, **options: Any) -> Array:
        omega = options.get("omega")
        if omega is not None and options.get("causal"):
            options["omega"] = omega[(0,) * (omega.ndim - 2)]
        return super().__call__(*arrays, **options)


@defect(
    "frequencies-of-a-group",
    ("rfa",),
    "With grouped heads and frequencies for each head, a group uses those of its first.",
)
class FrequenciesOfAGroup(Attention):
    """Heads that share keys share frequencies."""

    def __call__(self, q: Array, k: Array, v: Array, **options: Any) -> Array:
        omega = options.get("omega")
        if omega is not None and omega.ndim > 2 and 1 < k.shape[-3] < q.shape[-3]:
            times = q.shape[-3] // k.shape[-3]
            options["omega"] = np.repeat(omega[..., ::times, :, :], times, axis=-3)
        return super().__call__(q, k, v, **options)
