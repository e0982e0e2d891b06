"""Defects of several estimators: heads, masks, causality, normalisers, sizes, features."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from . import lara, linear, ra, rfa, softmax
from .attention import Attention, Draws, as_it_lies
from .catalogue import NO_TAGS, Catalogue

Array = Any
Kind = type[Attention]

CATALOGUES = {
    module.CATALOGUE.estimator: module.CATALOGUE for module in (softmax, rfa, ra, lara, linear)
}


def _with(defect: Kind, catalogue: Catalogue) -> Kind:
    """The estimator with one step of another class."""
    name = f"{catalogue.estimator.upper()}{defect.__name__}"
    return type(name, (defect, catalogue.definition), {})


def variant(name: str, estimators: tuple[str, ...], effect: str) -> Callable[[Kind], Kind]:
    """Enter each of the estimators with the step, a correct one."""

    def enter(made: Kind) -> Kind:
        for catalogue in (CATALOGUES[estimator] for estimator in estimators):
            entry = catalogue.variant(f"{catalogue.estimator}-{name}", effect)
            entry(_with(made, catalogue))
        return made

    return enter


def defect(
    name: str,
    estimators: tuple[str, ...],
    effect: str,
    seen: str = "",
    *,
    only: tuple[str, ...] | None = None,
    tags: Mapping[str, Any] = NO_TAGS,
) -> Callable[[Kind], Kind]:
    """Enter each of the estimators with the defect.

    `only` are the capabilities it claims beside omega, all that the estimator has by default.
    """

    def enter(made: Kind) -> Kind:
        for catalogue in (CATALOGUES[estimator] for estimator in estimators):
            claimed = only and tuple(c for c in catalogue.capabilities if c in ("omega", *only))
            entry = catalogue.defect(
                f"{catalogue.estimator}-{name}", effect, seen, only=claimed, tags=tags
            )
            entry(_with(made, catalogue))
        return made

    return enter


@variant("upcast", ("softmax", "rfa", "lara"), "Computed in float64 for float32.")
class Upcast(Attention):
    """Correct: everything in float64, the result rounded to the dtype of the query."""

    def attend(self, q: Array, k: Array, v: Array, visible: Array, draws: Draws) -> Array:
        q, k, v = (x.astype(np.float64) for x in (q, k, v))
        return super().attend(q, k, v, visible, draws)


@defect(
    "gqa-interleaved",
    ("softmax", "rfa", "linear"),
    "With grouped heads query head h reads the keys of head h mod G.",
    "repeat for repeat_interleave",
)
class Interleaved(Attention):
    """Query head h reads key head h mod G."""

    def repeat(self, x: Array, times: int) -> Array:
        return np.concatenate([x] * times, axis=-3)


@defect("gqa-first-head", ("softmax", "rfa"), "With grouped heads only the first key head is read.")
class FirstHead(Attention):
    """All query heads read the first key head where heads are grouped."""

    def repeat(self, x: Array, times: int) -> Array:
        return np.repeat(x[..., :1, :, :], times * x.shape[-3], axis=-3)


@defect(
    "values-of-next-head",
    ("softmax", "rfa", "lara"),
    "Each head attends to the values of the next.",
)
class ValuesOfNextHead(Attention):
    """Values come from the next head."""

    def average(self, weights: Array, v: Array, visible: Array) -> Array:
        return super().average(weights, np.roll(v, -1, axis=-3) if v.ndim > 2 else v, visible)


@defect(
    "heads-mixed",
    ("softmax", "rfa", "ra", "lara", "linear"),
    "Values of heads and tokens are shuffled among each other.",
    "reshape for transpose",
)
class HeadsMixed(Attention):
    """Values laid out (heads, tokens) are read as (tokens, heads)."""

    def average(self, weights: Array, v: Array, visible: Array) -> Array:
        if v.ndim > 2:
            *lead, heads, m, size = v.shape
            v = v.reshape(*lead, m, heads, size).swapaxes(-2, -3)
        return super().average(weights, v, visible)


@defect(
    "mask-off-by-one",
    ("softmax", "rfa", "ra", "linear"),
    "Each query sees the neighbours of the keys that it should see.",
)
class MaskOffByOne(Attention):
    """The mask is shifted by one key."""

    def mask(self, mask: Array) -> Array:
        return np.roll(mask, 1, axis=-1)


@defect(
    "mask-inverted",
    ("softmax", "rfa", "linear"),
    "True hides: what is left is the padding.",
    "torch key_padding_mask against attn_mask",
)
class MaskInverted(Attention):
    """True hides the key."""

    def mask(self, mask: Array) -> Array:
        return ~mask


@defect("mask-ignored", ("softmax", "rfa", "ra", "lara"), "Padding is read.")
class MaskIgnored(Attention):
    """The mask is accepted and not used."""

    def mask(self, mask: Array) -> Array:
        return np.ones_like(mask)


@defect(
    "mask-of-first-query", ("softmax", "rfa"), "Masks that differ between queries are not honoured."
)
class MaskOfFirstQuery(Attention):
    """The mask of the first query serves for all."""

    def mask(self, mask: Array) -> Array:
        return mask[..., :1, :] if mask.ndim > 1 else mask


@defect(
    "mask-dropped-when-causal",
    ("softmax", "rfa", "linear"),
    "Padding is read as soon as `causal` is set.",
)
class MaskDroppedWhenCausal(Attention):
    """The causal mask replaces the caller's."""

    def visible(self, n: int, m: int, mask: Array | None, causal: bool) -> Array:
        return super().visible(n, m, None if causal else mask, causal)


@defect(
    "mask-on-values",
    ("softmax", "rfa", "lara", "linear"),
    "The normaliser counts the padding: with half the keys masked, outputs about halve.",
    "performer-pytorch, google-research performer, flash-linear-attention, PyG",
)
@defect(
    "causal-normaliser-global",
    ("rfa", "linear"),
    "Early causal outputs are too small: the normaliser ranges over the future.",
    "performer-pytorch",
    only=("causal",),
)
class MaskOnValues(Attention):
    """Hidden values are zeroed, but hidden keys still count in the normaliser."""

    def weights(self, q: Array, k: Array, visible: Array, draws: Draws) -> Array:
        return super().weights(q, k, np.ones_like(visible), draws)

    def sum(self, weights: Array, v: Array, visible: Array) -> Array:
        return super().sum(np.where(visible, weights, 0), v, visible)


@defect(
    "causal-strict",
    ("softmax", "rfa", "ra", "linear"),
    "A token does not see itself, the first nothing at all.",
)
class CausalStrict(Attention):
    """A query does not see its own key."""

    def past(self, i: Array, j: Array, shift: int) -> Array:
        return j < i + shift


@defect("causal-ahead", ("softmax", "rfa", "ra", "linear"), "A token sees the next one.")
class CausalAhead(Attention):
    """A query sees the key after its own."""

    def past(self, i: Array, j: Array, shift: int) -> Array:
        return j <= i + shift + 1


@defect("causal-ignored", ("softmax", "rfa"), "Tokens see the future.")
class CausalIgnored(Attention):
    """`causal` is accepted and not used."""

    def past(self, i: Array, j: Array, shift: int) -> Array:
        return j >= 0 * i


@defect(
    "causal-top-left",
    ("softmax", "rfa"),
    "With more keys than queries the last query does not see the last keys.",
    "torch is_causal",
)
class CausalTopLeft(Attention):
    """The first query sees the first key only, also where there are more keys than queries."""

    def past(self, i: Array, j: Array, shift: int) -> Array:
        return j <= i


@defect(
    "causal-by-blocks",
    ("softmax", "rfa", "linear"),
    "Tokens see the future of their block of eight.",
)
class CausalByBlocks(Attention):
    """Causal between blocks of eight only: a query sees all keys of its block."""

    def past(self, i: Array, j: Array, shift: int) -> Array:
        return j // 8 <= (i + shift) // 8


@defect(
    "causal-bucket-excluded",
    ("softmax", "rfa", "linear"),
    "The first 64 outputs are 0, later ones lack the keys nearest to them.",
    "linear-attention-transformer",
)
class CausalBucketExcluded(Attention):
    """A query sees the keys of earlier buckets of 64, not those of its own."""

    def past(self, i: Array, j: Array, shift: int) -> Array:
        return j // 64 < (i + shift) // 64


@defect("causal-window", ("softmax", "rfa"), "Tokens see the last eight only.")
class CausalWindow(Attention):
    """A query sees the last eight keys only."""

    def past(self, i: Array, j: Array, shift: int) -> Array:
        return (j <= i + shift) & (j > i + shift - 8)


@defect(
    "causal-over-channels",
    ("rfa", "linear"),
    "The causal output is the running mean, over channels, of the output that is not causal.",
    "xformers favor, flash-linear-attention",
)
class CausalOverChannels(Attention):
    """The causal sum runs over the channels of the output."""

    def __call__(self, q: Array, k: Array, v: Array, **options: Any) -> Array:
        if not options.pop("causal", False):
            return super().__call__(q, k, v, **options)
        out = super().__call__(q, k, v, **options)
        return np.cumsum(out, axis=-1) / np.arange(1, v.shape[-1] + 1, dtype=out.dtype)


@defect(
    "tail-dropped",
    ("softmax", "rfa", "lara", "linear"),
    "Up to three keys at the end are not read unless m is a multiple of four.",
)
class TailDropped(Attention):
    """Keys after the last whole block of four are never read."""

    def visible(self, n: int, m: int, mask: Array | None, causal: bool) -> Array:
        read = np.arange(m) < (m // 4 * 4 or m)
        return super().visible(n, m, mask, causal) & read


@defect(
    "tail-of-queries-dropped",
    ("softmax", "rfa"),
    "Up to three outputs at the end are 0 unless n is a multiple of four.",
)
class TailOfQueriesDropped(Attention):
    """Queries after the last whole block of four are never written."""

    def average(self, weights: Array, v: Array, visible: Array) -> Array:
        n = weights.shape[-2]
        written = np.arange(n)[:, None] < (n // 4 * 4 or n)
        return np.where(written, super().average(weights, v, visible), 0)


@defect(
    "absolute-epsilon",
    ("linear",),
    "Outputs depend on the size of the features: shrunk wherever the normaliser is small.",
    "flash-linear-attention, fast-transformers",
)
class AbsoluteEpsilon(Attention):
    """1e-6 is added to the normaliser."""

    def total(self, weights: Array, visible: Array) -> Array:
        return super().total(weights, visible) + 1e-6


@defect("half-precision-weights", ("softmax", "rfa", "linear"), "Three digits, whatever the dtype.")
class HalfPrecisionWeights(Attention):
    """Weights are stored in float16."""

    def average(self, weights: Array, v: Array, visible: Array) -> Array:
        return super().average(weights.astype(np.float16).astype(v.dtype), v, visible)


@defect("single-precision", ("softmax", "rfa", "ra", "lara", "linear"), "Seven digits in float64.")
class SinglePrecision(Attention):
    """float64 arguments are computed with in float32."""

    def attend(self, q: Array, k: Array, v: Array, visible: Array, draws: Draws) -> Array:
        q, k, v = (x.astype(np.float32) for x in (q, k, v))
        return super().attend(q, k, v, visible, draws)


@defect("dropout", ("softmax", "rfa"), "Outputs differ from call to call.")
class Dropout(Attention):
    """Dropout of a tenth of the weights is left on."""

    def average(self, weights: Array, v: Array, visible: Array) -> Array:
        kept = np.random.default_rng().random(weights.shape) > 0.1
        return super().average(np.where(kept, weights, 0), v, visible)


@defect(
    "late-keys-dropped",
    ("softmax", "rfa", "ra", "lara", "linear"),
    "Keys after the last whole block of 1,024 are not read.",
)
class LateKeysDropped(Attention):
    """Keys after the last whole block of 1,024 are never read, if there is one."""

    def visible(self, n: int, m: int, mask: Array | None, causal: bool) -> Array:
        read = np.arange(m) < (m // 1024 * 1024 or m)
        return super().visible(n, m, mask, causal) & read


@defect(
    "causal-late-tokens", ("softmax", "rfa", "linear"), "From token 1,024 on, none sees itself."
)
class CausalLateTokens(Attention):
    """Queries from the 1,024th on do not see their own key."""

    def past(self, i: Array, j: Array, shift: int) -> Array:
        return j <= i + shift - (i >= 1024)


@defect(
    "causal-state-reset",
    ("softmax", "rfa", "ra", "linear"),
    "Tokens from the 512th on see nothing before their block.",
)
class CausalStateReset(Attention):
    """A query sees keys of its own block of 512 only."""

    def past(self, i: Array, j: Array, shift: int) -> Array:
        return (j <= i + shift) & (j // 512 == (i + shift) // 512)


@defect(
    "causal-block-edge",
    ("softmax", "rfa", "linear"),
    "Every 1,024th token does not see the one before it.",
)
class CausalBlockEdge(Attention):
    """The first query of a block of 1,024 does not see the last key of the block before."""

    def past(self, i: Array, j: Array, shift: int) -> Array:
        edge = (i >= 1024) & (i % 1024 == 0)
        return (j <= i + shift) & ~(edge & (j == i + shift - 1))


@defect(
    "batch-of-two",
    ("softmax", "rfa", "ra", "lara", "linear"),
    "Members of a batch after the second get its values.",
)
class BatchOfTwo(Attention):
    """Values are read for two members of a batch."""

    def average(self, weights: Array, v: Array, visible: Array) -> Array:
        if v.ndim > 2 and len(v) > 3:
            v = np.concatenate([v[:2], np.broadcast_to(v[1:2], (len(v) - 2, *v.shape[1:]))])
        return super().average(weights, v, visible)


@defect(
    "hidden-times-zero",
    ("softmax", "rfa", "ra", "lara", "linear"),
    "NaN or infinity in padding spoils every output.",
    "most code",
)
class HiddenTimesZero(Attention):
    """Hidden values are multiplied by 0."""

    def sum(self, weights: Array, v: Array, visible: Array) -> Array:
        return weights @ v


@defect(
    "keys-as-they-lie",
    ("softmax", "rfa", "ra", "lara", "linear"),
    "Keys that are not contiguous are read in the wrong order.",
    "kernels that ignore strides",
)
class KeysAsTheyLie(Attention):
    """Keys are read as they lie in memory, as if they were contiguous."""

    def attend(self, q: Array, k: Array, v: Array, visible: Array, draws: Draws) -> Array:
        return super().attend(q, as_it_lies(k), v, visible, draws)


@defect(
    "workspace-handed-out",
    ("softmax", "linear"),
    "A result changes when the next call of its shape is made.",
    "buffers kept between calls",
)
class WorkspaceHandedOut(Attention):
    """Results of one shape are written to the same memory."""

    def __init__(self) -> None:
        self.held: dict[Any, Array] = {}

    def __call__(self, q: Array, k: Array, v: Array, **options: Any) -> Array:
        out = super().__call__(q, k, v, **options)
        held = self.held.setdefault((out.shape, out.dtype), np.empty_like(out))
        held[...] = out
        return held


@defect(
    "maximum-of-heads",
    ("softmax", "rfa", "lara"),
    "Heads whose scores are far below those of others get NaN.",
)
class MaximumOfHeads(softmax.Softmax):
    """A maximum for each query, of all heads, is subtracted."""

    def exponentiate(self, scores: Array, visible: Array) -> Array:
        scores = np.where(visible, scores, -np.inf)
        axes = tuple(range(scores.ndim - 2))
        top = scores.max((*axes, -1), keepdims=True, initial=-np.inf)
        return np.exp(scores - np.where(top == -np.inf, 0.0, top).astype(scores.dtype))


@defect(
    "head-size-128",
    ("softmax", "rfa", "ra", "lara", "linear"),
    "Entries from the 128th on are not read.",
)
class HeadSize128(Attention):
    """Entries of queries and keys from the 128th on are taken for 0."""

    def attend(self, q: Array, k: Array, v: Array, visible: Array, draws: Draws) -> Array:
        q, k = (np.where(np.arange(x.shape[-1]) < 128, x, 0) for x in (q, k))
        return super().attend(q, k, v, visible, draws)


@defect("first-256", ("rfa", "ra"), "Samples after the 256th are not read.")
class First256(rfa.RFA):
    """Frequencies after the 256th are not used."""

    first = 256

    def frequencies(self, q: Array, k: Array, visible: Array, draws: Draws) -> Array:
        return super().frequencies(q, k, visible, draws)[..., : self.first, :]


@defect("first-1024", ("rfa",), "Samples after the 1,024th are not read.")
class First1024(First256):
    """Frequencies after the 1,024th are not used."""

    first = 1024


@defect("one-sample-used", ("rfa", "lara"), "The number of samples makes no difference.")
class OneSampleUsed(rfa.RFA):
    """The first of the frequencies is used, however many there are."""

    def log_features(self, q: Array, k: Array, visible: Array, draws: Draws) -> tuple[Array, Array]:
        log_q, log_k = super().log_features(q, k, visible, draws)
        return log_q[..., :1], log_k[..., :1]


@defect(
    "exponents-clipped",
    ("rfa", "ra", "lara"),
    "Long queries and keys are taken for shorter ones.",
)
class ExponentsClipped(rfa.RFA):
    """Exponents of features are clipped to [-10, 10]."""

    def log_q(self, q: Array, omega: Array) -> Array:
        return np.clip(super().log_q(q, omega), -10, 10)

    def log_k(self, k: Array, omega: Array) -> Array:
        return np.clip(super().log_k(k, omega), -10, 10)


@defect(
    "root-in-single-precision",
    ("rfa", "ra", "lara"),
    "Seven digits in float64 unless d is a power of 16.",
)
class RootInSinglePrecision(rfa.RFA):
    """d^(-1/4) is rounded to float32."""

    def root(self, d: int) -> float:
        return float(np.float32(super().root(d)))


@defect(
    "half-precision-sums",
    ("softmax", "rfa", "linear"),
    "Sums over thousands of keys stop growing.",
    tags={"dtype": "float16"},
)
class HalfPrecisionSums(Attention):
    """Weights are added one after another, in half precision."""

    def average(self, weights: Array, v: Array, visible: Array) -> Array:
        mass = weights.dtype.type(0)
        total = np.zeros((*weights.shape[:-1], v.shape[-1]), v.dtype)
        for j in range(v.shape[-2]):
            weight = weights[..., j, None]
            mass = mass + weight
            total = total + weight * np.where(visible[..., j, None], v[..., j, None, :], 0)
        return total / np.where(visible.any(-1, keepdims=True), mass, 1).astype(v.dtype)


@defect("seed-plus-head", ("rfa", "ra", "lara"), "Neighbouring seeds share all heads but one.")
class SeedPlusHead(Attention):
    """Head h draws from a generator with the seed plus h."""

    def attend(self, q: Array, k: Array, v: Array, visible: Array, draws: Draws) -> Array:
        if draws.seed is None or q.ndim < 3:
            return super().attend(q, k, v, visible, draws)
        attend = super().attend
        given = (np.broadcast_to(x, (*q.shape[:-2], *x.shape[-2:])) for x in (k, v, visible))
        heads = zip(*(np.moveaxis(x, -3, 0) for x in (q, *given)), strict=True)
        outs = [
            attend(a, b, c, seen, draws._replace(seed=draws.seed + h))
            for h, (a, b, c, seen) in enumerate(heads)
        ]
        return np.stack(outs, axis=-3)
