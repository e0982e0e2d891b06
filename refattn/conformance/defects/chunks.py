"""Keys of the own chunk, and a summary of each other: EVA and second-order summaries."""

from __future__ import annotations

from typing import Any

import numpy as np

from .attention import Draws, square
from .catalogue import Catalogue
from .softmax import Softmax

Array = Any


class Chunked(Softmax):
    """Attention to the keys of the own chunk, and to one more for each other chunk.

    Members of chunks have shape (C, m) or (C, n), means (..., C, d).
    """

    def root(self, d: int) -> float:
        """The factor on queries and on keys that leads to kernel coordinates."""
        return float(d**-0.25)

    def attend(self, q: Array, k: Array, v: Array, visible: Array, draws: Draws) -> Array:
        lead, root = np.broadcast_shapes(q.shape[:-2], k.shape[:-2]), self.root(q.shape[-1])
        q, k, v = (np.broadcast_to(x, (*lead, *x.shape[-2:])) for x in (root * q, root * k, v))
        (n, m), size = visible.shape, draws.number
        own, of_key = self.chunk_of_query(n, m, size), np.arange(m) // size
        chunk = np.arange(-(-m // size))
        member, queries = (x == chunk[:, None] for x in (of_key, own))
        scores, values = self.summaries(q, k, v, member, queries)
        near = self.near(visible, own[:, None], of_key)
        far = self.far(visible, own[:, None], chunk, member)
        return self.join(q @ k.swapaxes(-1, -2), v, near, scores, values, far)

    def chunk_of_query(self, n: int, m: int, size: Any) -> Array:
        """Chunk of the key that is level with each query; the last query is with the last key."""
        return (np.arange(n) + m - n) // size

    def near(self, visible: Array, own: Array, of_key: Array) -> Array:
        """Which keys a query sees one by one, shape (n, m)."""
        return visible & (of_key == own)

    def far(self, visible: Array, own: Array, chunk: Array, member: Array) -> Array:
        """Which chunks a query sees as a whole, shape (n, C)."""
        return (chunk != own) & self.whole(visible, member)

    def whole(self, visible: Array, member: Array) -> Array:
        """Of which chunks a query may see all keys, shape (n, C)."""
        return (visible[:, None, :] | ~member).all(-1)

    def join(
        self, scores: Array, v: Array, near: Array, of_chunks: Array, values: Array, far: Array
    ) -> Array:
        """The mean over near keys and far chunks; `values` of the latter are (..., n, C, d_v)."""
        rows = np.broadcast_to(v[..., None, :, :], (*scores.shape, v.shape[-1]))
        values = np.broadcast_to(values, (*of_chunks.shape, v.shape[-1]))
        seen = np.concatenate([near, far], -1)
        weights = self.exponentiate(np.concatenate([scores, of_chunks], -1), seen)
        values = np.concatenate([rows, values], -2)
        return self.average(weights[..., None, :], values, seen[:, None, :])[..., 0, :]

    def mean(self, x: Array, member: Array) -> Array:
        """Mean of the rows of each chunk, 0 of none."""
        return member.astype(x.dtype) @ x / np.maximum(member.sum(-1), 1).astype(x.dtype)[:, None]

    def log_size(self, member: Array) -> Array:
        """Log of the number of keys of each chunk, shape (C,)."""
        return np.log(member.sum(-1))

    def summaries(
        self, q: Array, k: Array, v: Array, member: Array, queries: Array
    ) -> tuple[Array, Array]:
        """Scores of chunks, (..., n, C), and values, broadcasting to (..., n, C, d_v)."""
        raise NotImplementedError


class EVA(Chunked):
    """A chunk has the score of its mean key, and the value of its keys at one frequency."""

    def summaries(
        self, q: Array, k: Array, v: Array, member: Array, queries: Array
    ) -> tuple[Array, Array]:
        omega, mean = self.omega(q, k, member, queries), self.mean(k, member)
        values = self.values(self.log_features(k, omega), v, member)
        return self.scores_of(q, mean, member).astype(q.dtype), values[..., None, :, :]

    def omega(self, q: Array, k: Array, member: Array, queries: Array) -> Array:
        """Mean query and mean key of each chunk."""
        return self.mean(q, queries) + self.mean(k, member)

    def scores_of(self, q: Array, mean: Array, member: Array) -> Array:
        """Scores of the chunks."""
        return q @ mean.swapaxes(-1, -2) + self.log_size(member)

    def log_features(self, k: Array, omega: Array) -> Array:
        """log xi(k_j, omega_c), shape (..., C, m)."""
        return omega @ k.swapaxes(-1, -2) - square(k)[..., None, :] / 2

    def values(self, log_features: Array, v: Array, member: Array) -> Array:
        """What each chunk stands for."""
        weights = self.exponentiate(log_features, member)
        return weights / weights.sum(-1, keepdims=True) @ v


class SecondOrder(Chunked):
    """A chunk counts as keys and values with a joint normal law of its moments."""

    def summaries(
        self, q: Array, k: Array, v: Array, member: Array, queries: Array
    ) -> tuple[Array, Array]:
        mean, value = self.mean(k, member), self.mean(v, member)
        spread = self.spread(q, self.covariance(k, k, member))
        scores = q @ mean.swapaxes(-1, -2) + spread + self.log_size(member)
        turned = self.turned(q, self.covariance(k, v, member))
        return scores.astype(q.dtype), value[..., None, :, :] + turned

    def covariance(self, x: Array, y: Array, member: Array) -> Array:
        """Covariance of the rows of each chunk, shape (..., C, d, d_v)."""
        x, y = (self.apart(z, member) for z in (x, y))
        return x.swapaxes(-1, -2) @ y / self.divisor(member).astype(x.dtype)[:, None, None]

    def apart(self, x: Array, member: Array) -> Array:
        """Members of each chunk less their mean, 0 for others, shape (..., C, m, d)."""
        away = x[..., None, :, :] - self.mean(x, member)[..., None, :]
        return np.where(member[..., None], away, 0)

    def divisor(self, member: Array) -> Array:
        """What sums of products are divided by."""
        return member.sum(-1)

    def spread(self, q: Array, cov: Array) -> Array:
        """q^T cov q / 2, shape (..., n, C)."""
        return np.einsum("...nd,...cde,...ne->...nc", q, cov, q, optimize=True) / 2

    def turned(self, q: Array, cross: Array) -> Array:
        """Cov(v, k) q, shape (..., n, C, d_v)."""
        return np.einsum("...nd,...cdv->...ncv", q, cross)


CATALOGUES = {
    "eva": Catalogue("eva", EVA, ("causal", "gqa")),
    "second-order": Catalogue("second-order", SecondOrder, ("causal", "gqa")),
}
_EVA, _SECOND = CATALOGUES.values()


# Of both.


def _defect(name: str, effect: str, seen: str = "") -> Any:
    """Enter each of the two with the step of a class."""

    def enter(made: type[Chunked]) -> type[Chunked]:
        for name_of, catalogue in CATALOGUES.items():
            base = type(made.__name__, (made, catalogue.definition), {})
            catalogue.defect(f"{name_of}-{name}", effect, seen)(base)
        return made

    return enter


@_defect(
    "size-not-counted",
    "A chunk weighs as one key: the longer the window, the less the far keys count.",
    "arXiv:2302.04542, efficient-attention",
)
class SizeNotCounted(Chunked):
    """A summary counts once."""

    def log_size(self, member: Array) -> Array:
        return np.zeros(len(member))


@_defect("size-not-logged", "Chunks weigh e^|P| in place of |P|.")
class SizeNotLogged(Chunked):
    """The number of keys is added to the score, not its logarithm."""

    def log_size(self, member: Array) -> Array:
        return member.sum(-1)


@_defect("size-of-window", "A last chunk that is shorter weighs too much.")
class SizeOfWindow(Chunked):
    """Every chunk counts as many keys as the first."""

    def log_size(self, member: Array) -> Array:
        return np.full(len(member), np.log(member[0].sum()))


@_defect("padding-in-means", "Means of a last chunk that is shorter are pulled to the origin.")
class PaddingInMeans(Chunked):
    """Keys are padded by zeros to whole chunks, and means are over these too."""

    def mean(self, x: Array, member: Array) -> Array:
        return member.astype(x.dtype) @ x / member.sum(-1).max(initial=1).astype(x.dtype)


@_defect("tail-dropped", "A last chunk that is shorter is read by its own queries only.")
class LastChunkDropped(Chunked):
    """Summaries are made of whole chunks only."""

    def far(self, visible: Array, own: Array, chunk: Array, member: Array) -> Array:
        count = member.sum(-1)
        return super().far(visible, own, chunk, member) & (count == count.max(initial=0))


@_defect("own-chunk-twice", "The nearest keys count twice.")
class OwnChunkTwice(Chunked):
    """The own chunk comes key by key, and as a summary too where all of it is seen."""

    def far(self, visible: Array, own: Array, chunk: Array, member: Array) -> Array:
        return self.whole(visible, member)


@_defect("own-chunk-summed-up", "The nearest keys are blurred as the far ones are.")
class OwnChunkSummedUp(Chunked):
    """The own chunk is a summary where all of it is seen."""

    def near(self, visible: Array, own: Array, of_key: Array) -> Array:
        member = of_key == np.arange(of_key.max(initial=0) + 1)[:, None]
        whole = np.take_along_axis(self.whole(visible, member), np.maximum(own, 0), -1)
        return super().near(visible, own, of_key) & ~whole

    def far(self, visible: Array, own: Array, chunk: Array, member: Array) -> Array:
        return self.whole(visible, member)


@_defect("neighbour-twice", "Keys of the chunk before count twice.", "overlapping windows of EVA")
class NeighbourTwice(Chunked):
    """Near are the keys of the chunk before too, whose summary still counts."""

    def near(self, visible: Array, own: Array, of_key: Array) -> Array:
        return visible & ((of_key == own) | (of_key == own - 1))


@_defect("far-unseen", "Attention within chunks: no key of another is read.")
class FarUnseen(Chunked):
    """Keys of the own chunk only."""

    def far(self, visible: Array, own: Array, chunk: Array, member: Array) -> Array:
        return np.zeros_like(super().far(visible, own, chunk, member))


@_defect("always-causal", "Later chunks are not read, causal or not.")
class AlwaysCausal(Chunked):
    """Only chunks before the own are read."""

    def far(self, visible: Array, own: Array, chunk: Array, member: Array) -> Array:
        return super().far(visible, own, chunk, member) & (chunk < own)


@_defect("causal-own-summary", "Causal outputs read the future of their chunk.")
class CausalOwnSummary(Chunked):
    """Causal, chunks up to the own are read: the own, too, where a part of it is to come."""

    def far(self, visible: Array, own: Array, chunk: Array, member: Array) -> Array:
        own_and_cut = (chunk == own) & ~self.whole(visible, member)
        return super().far(visible, own, chunk, member) | own_and_cut


@_defect("causal-last-chunk-unseen", "Causal, the keys just before the own chunk are not read.")
class CausalLastChunkUnseen(Chunked):
    """Causal, summaries begin two chunks before the own."""

    def far(self, visible: Array, own: Array, chunk: Array, member: Array) -> Array:
        causal = not visible.all()
        return super().far(visible, own, chunk, member) & ~(causal & (chunk == own - 1))


@_defect("causal-within-chunks", "Causal outputs read the future of their chunk, key by key.")
class CausalWithinChunks(Chunked):
    """Causal between chunks only."""

    def near(self, visible: Array, own: Array, of_key: Array) -> Array:
        return np.broadcast_to(of_key == own, visible.shape)


@_defect("chunk-off-by-one", "The last query of each chunk reads the next key by key.")
class ChunkOffByOne(Chunked):
    """Query i is in the chunk of the key after its own."""

    def chunk_of_query(self, n: int, m: int, size: Any) -> Array:
        return (np.arange(n) + m - n + 1) // size


@_defect("chunks-top-left", "With more keys than queries the wrong keys are near.")
class ChunksTopLeft(Chunked):
    """The first query is level with the first key."""

    def chunk_of_query(self, n: int, m: int, size: Any) -> Array:
        return np.arange(n) // size


@_defect("normalisers-apart", "Far keys weigh as much as near ones, whatever their scores.")
class NormalisersApart(Chunked):
    """Near keys and far chunks have a softmax each, and the mean of the two is taken."""

    def join(
        self, scores: Array, v: Array, near: Array, of_chunks: Array, values: Array, far: Array
    ) -> Array:
        parts = [
            super(NormalisersApart, self).join(scores, v, near & a, of_chunks, values, far & b)
            for a, b in ((True, False), (False, True))
        ]
        count = near.any(-1, keepdims=True).astype(v.dtype) + far.any(-1, keepdims=True)
        return sum(parts) / np.maximum(count, 1).astype(v.dtype)


@_defect("mean-of-all-keys", "All chunks have the same score.")
class MeanOfAll(Chunked):
    """Means are over all rows in place of those of the chunk."""

    def mean(self, x: Array, member: Array) -> Array:
        return super().mean(x, np.ones_like(member))


@_defect("root-twice", "Attention of exp(q . k / d).")
class ChunksRootTwice(Chunked):
    """d^(-1/4) is applied twice."""

    def root(self, d: int) -> float:
        return float(d**-0.5)


@_defect("unstabilised", "NaN where exponents pass 709.")
class ChunksUnstabilised(Chunked):
    """Exponentials as they are."""

    def exponentiate(self, scores: Array, visible: Array) -> Array:
        return np.exp(np.where(visible, scores, -np.inf))


@_defect(
    "gqa-interleaved",
    "With grouped heads query head h reads the keys of head h mod G.",
    "repeat for repeat_interleave",
)
class ChunksInterleaved(Chunked):
    """Query head h reads key head h mod G."""

    def repeat(self, x: Array, times: int) -> Array:
        return np.concatenate([x] * times, axis=-3)


@_defect("causal-strict", "A token does not see itself, the first nothing at all.")
class ChunksStrict(Chunked):
    """A query does not see its own key."""

    def past(self, i: Array, j: Array, shift: int) -> Array:
        return j < i + shift


# Of EVA.


@_EVA.variant("eva-online", "Near keys first, then chunk by chunk, with a running maximum.")
class Merged(EVA):
    """Correct: the two parts by themselves, and merged by their log normalisers."""

    def join(
        self, scores: Array, v: Array, near: Array, of_chunks: Array, values: Array, far: Array
    ) -> Array:
        values = np.broadcast_to(values, (*of_chunks.shape, v.shape[-1]))
        top = np.full((*scores.shape[:-1], 1), -np.inf, v.dtype)
        total = out = np.zeros((*scores.shape[:-1], 1), v.dtype)
        parts = [(scores, near, v[..., None, :, :])]
        parts += [
            (of_chunks[..., c, None], far[:, c, None], values[..., c, None, :])
            for c in range(far.shape[-1])
        ]
        for part, seen, rows in parts:
            part = np.where(seen, part, -np.inf)
            new = np.maximum(top, part.max(-1, keepdims=True))
            finite = np.where(new == -np.inf, 0, new)
            keep, w = np.exp(top - finite), np.exp(part - finite)
            total, out = total * keep + w.sum(-1, keepdims=True), out * keep
            out, top = out + (w[..., None, :] @ rows)[..., 0, :], new
        return out / np.where(total == 0, 1, total)


@_EVA.defect("eva-mean-query-missing", "Values of chunks do not lean to what its queries ask for.")
class MeanQueryMissing(EVA):
    """The frequency is the mean key."""

    def omega(self, q: Array, k: Array, member: Array, queries: Array) -> Array:
        return self.mean(k, member) + 0 * self.mean(q, queries)


@_EVA.defect("eva-mean-key-missing", "Values of chunks lean to short keys.")
class MeanKeyMissing(EVA):
    """The frequency is the mean query."""

    def omega(self, q: Array, k: Array, member: Array, queries: Array) -> Array:
        return self.mean(q, queries) + 0 * self.mean(k, member)


@_EVA.defect("eva-mean-of-all-queries", "Values of chunks lean to what other queries ask for.")
class MeanOfAllQueries(EVA):
    """The mean query is that of all queries."""

    def omega(self, q: Array, k: Array, member: Array, queries: Array) -> Array:
        return self.mean(q, np.ones_like(queries)) + self.mean(k, member)


@_EVA.defect("eva-queries-from-the-first", "With more keys than queries, frequencies of others.")
class QueriesFromTheFirst(EVA):
    """The mean query of a chunk is that of the queries with its indices."""

    def omega(self, q: Array, k: Array, member: Array, queries: Array) -> Array:
        shift = member.shape[-1] - queries.shape[-1]
        own = np.pad(member, ((0, 0), (0, max(0, -shift))))[:, : queries.shape[-1]]
        return self.mean(q, own) + self.mean(k, member)


@_EVA.defect("eva-omega-unscaled", "Frequencies d^(1/4) too long.", "the scale on q . k alone")
class OmegaUnscaled(EVA):
    """Frequencies are means of queries and keys before the scale."""

    def omega(self, q: Array, k: Array, member: Array, queries: Array) -> Array:
        return super().omega(q, k, member, queries) / self.root(k.shape[-1])


@_EVA.defect("eva-features-scaled-once", "Values of chunks are nearly those of its longest keys.")
class FeaturesScaledOnce(EVA):
    """Features take keys before the scale."""

    def log_features(self, k: Array, omega: Array) -> Array:
        return super().log_features(k / k.dtype.type(self.root(k.shape[-1])), omega)


@_EVA.defect("eva-key-norm-dropped", "Long keys weigh e^(|k|^2/2) too much in their chunk.")
class ChunkKeyNormDropped(EVA):
    """Features of keys have no norm."""

    def log_features(self, k: Array, omega: Array) -> Array:
        return omega @ k.swapaxes(-1, -2)


@_EVA.defect("eva-key-norm-not-halved", "Short keys weigh too much in their chunk.")
class ChunkKeyNormNotHalved(EVA):
    """The whole squared length is subtracted."""

    def log_features(self, k: Array, omega: Array) -> Array:
        return super().log_features(k, omega) - square(k)[..., None, :] / 2


@_EVA.defect("eva-mean-of-values", "A chunk stands for all its values alike.", "pooling of keys")
class MeanOfValues(EVA):
    """The value of a chunk is the mean of its values."""

    def log_features(self, k: Array, omega: Array) -> Array:
        return 0 * super().log_features(k, omega)


@_EVA.defect("eva-features-of-all-keys", "Values of a chunk are read from all keys.")
class FeaturesOfAllKeys(EVA):
    """The value of a chunk is over all keys, at its frequency."""

    def values(self, log_features: Array, v: Array, member: Array) -> Array:
        return super().values(log_features, v, np.ones_like(member))


@_EVA.defect("eva-score-of-frequency", "Chunks weigh by their queries as well as by their keys.")
class ScoreOfFrequency(EVA):
    """The score of a chunk is that of its frequency in place of its mean key."""

    def summaries(
        self, q: Array, k: Array, v: Array, member: Array, queries: Array
    ) -> tuple[Array, Array]:
        _, values = super().summaries(q, k, v, member, queries)
        return self.scores_of(q, self.omega(q, k, member, queries), member), values


@_EVA.defect("eva-score-unscaled", "Scores of chunks d^(1/4) too large.")
class ScoreUnscaled(EVA):
    """The mean key is that before the scale."""

    def scores_of(self, q: Array, mean: Array, member: Array) -> Array:
        return super().scores_of(q, mean / self.root(q.shape[-1]), member)


@_EVA.defect("eva-values-unstabilised", "NaN where features of keys pass e^709, or all vanish.")
class ValuesUnstabilised(EVA):
    """Features of keys as they are."""

    def values(self, log_features: Array, v: Array, member: Array) -> Array:
        weights = np.exp(np.where(member, log_features, -np.inf))
        return weights / weights.sum(-1, keepdims=True) @ v


@_EVA.defect("eva-maximum-of-all-chunks", "NaN for chunks whose features are far below others'.")
class MaximumOfAllChunks(EVA):
    """One maximum for the features of all chunks."""

    def values(self, log_features: Array, v: Array, member: Array) -> Array:
        scores = np.where(member, log_features, -np.inf)
        weights = np.exp(scores - scores.max((-1, -2), keepdims=True))
        return weights / weights.sum(-1, keepdims=True) @ v


@_EVA.defect("eva-frequencies-of-groups", "With grouped heads, frequencies of no head's own.")
class FrequenciesOfGroups(EVA):
    """A chunk is summed up once for all query heads that share its keys."""

    def share(self, q: Array, x: Array) -> Array:
        self.heads = x.shape[-3] if x.ndim > 2 else 1
        return super().share(q, x)

    def omega(self, q: Array, k: Array, member: Array, queries: Array) -> Array:
        if q.ndim > 2:
            of_group = q.reshape(*q.shape[:-3], self.heads, -1, *q.shape[-2:])
            q = np.broadcast_to(of_group.mean(-3, keepdims=True), of_group.shape).reshape(q.shape)
        return super().omega(q, k, member, queries)


# Of second-order summaries.


@_SECOND.variant("second-order-by-projection", "The variance and covariance of q . k.")
class ByProjection(SecondOrder):
    """Correct: moments of the scores of each query in place of those of keys."""

    def summaries(
        self, q: Array, k: Array, v: Array, member: Array, queries: Array
    ) -> tuple[Array, Array]:
        scores, count = q @ k.swapaxes(-1, -2), member.sum(-1).astype(q.dtype)
        share = member.astype(q.dtype) / count[:, None]
        mean = scores @ share.T
        apart = np.where(member, scores[..., None, :] - mean[..., None], 0)  # (..., n, C, m)
        spread = np.sum(apart * apart, -1) / count / 2
        value = self.mean(v, member)[..., None, :, :]
        away = np.where(member[..., None], v[..., None, :, :] - value[..., 0, :, None, :], 0)
        turned = np.einsum("...ncm,...cmv->...ncv", apart, away) / count[:, None]
        return (mean + spread + np.log(count)).astype(q.dtype), value + turned


@_SECOND.defect("second-order-divisor-less-one", "Spreads of small chunks are too large.", "np.cov")
class DivisorLessOne(SecondOrder):
    """Covariances have the divisor |P| - 1."""

    def divisor(self, member: Array) -> Array:
        return np.maximum(member.sum(-1) - 1, 1)


@_SECOND.defect("second-order-divisor-missing", "Spreads grow with the window.")
class DivisorMissing(SecondOrder):
    """Sums in place of means of products."""

    def divisor(self, member: Array) -> Array:
        return np.ones(len(member))


@_SECOND.defect("second-order-spread-missing", "Chunks of keys that differ weigh too little.")
class SpreadMissing(SecondOrder):
    """The score has no quadratic form."""

    def spread(self, q: Array, cov: Array) -> Array:
        return 0 * super().spread(q, cov)


@_SECOND.defect("second-order-spread-not-halved", "Chunks of keys that differ weigh too much.")
class SpreadNotHalved(SecondOrder):
    """The quadratic form without its half."""

    def spread(self, q: Array, cov: Array) -> Array:
        return 2 * super().spread(q, cov)


@_SECOND.defect("second-order-spread-subtracted", "Chunks of keys that differ weigh too little.")
class SpreadSubtracted(SecondOrder):
    """The quadratic form with the wrong sign."""

    def spread(self, q: Array, cov: Array) -> Array:
        return -super().spread(q, cov)


@_SECOND.defect("second-order-diagonal", "Keys whose entries go together are misjudged.")
class Diagonal(SecondOrder):
    """The variances of the entries only."""

    def spread(self, q: Array, cov: Array) -> Array:
        return super().spread(q, cov * np.eye(cov.shape[-1], dtype=cov.dtype))


@_SECOND.defect("second-order-isotropic", "All directions of queries count alike.")
class Isotropic(SecondOrder):
    """The mean variance in place of the covariance."""

    def spread(self, q: Array, cov: Array) -> Array:
        trace = np.trace(cov, axis1=-2, axis2=-1)[..., None, None] / cov.shape[-1]
        return super().spread(q, trace * np.eye(cov.shape[-1], dtype=cov.dtype))


@_SECOND.defect("second-order-scale-once", "Spreads sqrt(d) too large.")
class SpreadScaledOnce(SecondOrder):
    """The covariance is that of keys before the scale."""

    def spread(self, q: Array, cov: Array) -> Array:
        return super().spread(q, cov / self.root(q.shape[-1]) ** 2)


@_SECOND.defect("second-order-turned-missing", "A chunk gives its mean value, whatever is asked.")
class TurnedMissing(SecondOrder):
    """Values have no covariance with keys."""

    def turned(self, q: Array, cross: Array) -> Array:
        return 0 * super().turned(q, cross)


@_SECOND.defect("second-order-turned-away", "Values lean to the keys that are least asked for.")
class TurnedAway(SecondOrder):
    """The covariance of values and keys with the wrong sign."""

    def turned(self, q: Array, cross: Array) -> Array:
        return -super().turned(q, cross)


@_SECOND.defect("second-order-turned-halved", "Values lean half as much as they should.")
class TurnedHalved(SecondOrder):
    """The half of the quadratic form is on the covariance of values and keys, too."""

    def turned(self, q: Array, cross: Array) -> Array:
        return super().turned(q, cross) / 2


@_SECOND.defect("second-order-turned-unscaled", "Values lean d^(1/4) too much.")
class TurnedUnscaled(SecondOrder):
    """The query before the scale."""

    def turned(self, q: Array, cross: Array) -> Array:
        return super().turned(q / q.dtype.type(self.root(q.shape[-1])), cross)


@_SECOND.defect(
    "second-order-transposed",
    "Values are wrong where they are as long as keys, as they mostly are.",
)
class Transposed(SecondOrder):
    """The covariance of keys and values where that of values and keys is meant."""

    def turned(self, q: Array, cross: Array) -> Array:
        square_one = cross.shape[-1] == cross.shape[-2]
        return super().turned(q, cross.swapaxes(-1, -2) if square_one else cross)


@_SECOND.defect("second-order-not-centred", "Spreads are too large by the square of the mean.")
class NotCentred(SecondOrder):
    """Second moments in place of covariances."""

    def apart(self, x: Array, member: Array) -> Array:
        return np.where(member[..., None], x[..., None, :, :], 0)


@_SECOND.defect("second-order-centred-by-all", "Spreads count that between chunks too.")
class CentredByAll(SecondOrder):
    """Deviations from the mean of all keys in place of the chunk's."""

    def apart(self, x: Array, member: Array) -> Array:
        return np.where(member[..., None], (x - x.mean(-2, keepdims=True))[..., None, :, :], 0)


@_SECOND.defect("second-order-spread-in-numerator", "Weights do not sum to 1.")
class SpreadInNumerator(SecondOrder):
    """The normaliser has no quadratic form."""

    def summaries(
        self, q: Array, k: Array, v: Array, member: Array, queries: Array
    ) -> tuple[Array, Array]:
        scores, values = super().summaries(q, k, v, member, queries)
        spread = self.spread(q, self.covariance(k, k, member)).astype(q.dtype)
        return scores - spread, np.exp(spread)[..., None] * values
