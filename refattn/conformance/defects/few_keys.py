"""A few keys in place of all: coresets, and samples of keys."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .attention import Draws, square
from .catalogue import Catalogue
from .frequencies import constant_seed, fresh_entropy
from .softmax import Softmax

Array = Any


class FewKeys(Softmax):
    """Attention of one head to S keys, head by head."""

    axes = 1  # of the indices of one head

    def attend(self, q: Array, k: Array, v: Array, visible: Array, draws: Draws) -> Array:
        lead = np.broadcast_shapes(q.shape[:-2], k.shape[:-2])
        root, rng = q.shape[-1] ** -0.25, self.generator(draws.seed)
        q, k, v = (np.broadcast_to(x, (*lead, *x.shape[-2:])) for x in (root * q, root * k, v))
        out = np.empty((*lead, q.shape[-2], v.shape[-1]))
        for at in np.ndindex(*lead):
            own = draws._replace(
                indices=self.of_place(draws.indices, lead, at),
                log_probability=self.of_place(draws.log_probability, lead, at),
            )
            out[at] = self.of_head(q[at], k[at], v[at], own, rng)
        return out

    def of_place(self, x: Array | None, lead: tuple[int, ...], at: tuple[int, ...]) -> Array | None:
        """What is given to one head."""
        return None if x is None else np.broadcast_to(x, (*lead, *x.shape[-self.axes :]))[at]

    def of_head(
        self, q: Array, k: Array, v: Array, draws: Draws, rng: np.random.Generator
    ) -> Array:
        """The output of one head, shape (n, d_v)."""
        raise NotImplementedError


class Coreset(FewKeys):
    """Keys J that stand for all, by the kernel h of centred keys."""

    exponential = False

    def of_head(
        self, q: Array, k: Array, v: Array, draws: Draws, rng: np.random.Generator
    ) -> Array:
        chosen = draws.indices
        if chosen is None:
            chosen = self.pivots(self.centred(k, slice(None)), draws.number, rng)
        k = self.centred(k, chosen)
        weights = self.weights_of(self.kernel(k[chosen], k[chosen]), self.kernel(k[chosen], k))
        scores = q @ k[chosen].T
        p = np.exp(scores - scores.max(-1, keepdims=True))
        return self.ratio(p, weights, v, chosen)

    def centred(self, k: Array, chosen: Any) -> Array:
        """Keys less their mean."""
        return k - k.mean(-2, keepdims=True)

    def kernel(self, x: Array, y: Array) -> Array:
        """h(x_i, y_j) = exp(x_i . y_j)."""
        return np.exp(x @ y.T)

    def pivots(self, k: Array, number: Any, rng: np.random.Generator) -> Array:
        """Keys in turn, each by what those before leave of the diagonal of their kernel."""
        factor = self.factor(k)
        gram = np.exp(-np.sum((k[:, None] - k) ** 2, -1) / 2)
        chosen: list[int] = []
        for _ in range(number):
            left = self.left(gram, chosen) * factor
            left[chosen] = 0
            chosen.append(int(rng.choice(len(k), p=left / left.sum())))
        return np.array(chosen)

    def factor(self, k: Array) -> Array:
        """What the residual of a key is multiplied by."""
        return np.exp(square(k)) if self.exponential else np.ones(len(k))

    def left(self, gram: Array, chosen: list[int]) -> Array:
        """What the chosen leave of the diagonal."""
        some = gram[chosen]
        known = np.linalg.solve(some[:, chosen], some) if chosen else some
        return np.maximum(np.diagonal(gram) - np.sum(some * known, 0), 1e-300)

    def weights_of(self, chosen: Array, to_keys: Array) -> Array:
        """W = h_JJ^-1 h_JK."""
        return np.linalg.solve(chosen, to_keys)

    def ratio(self, p: Array, weights: Array, v: Array, chosen: Array) -> Array:
        """Weighted values over the sum of the weights."""
        return p @ weights @ v / (p @ weights).sum(-1, keepdims=True)


class KeySample(FewKeys):
    """A sample of the keys, each over how often it is expected in one: here, uniform."""

    def of_head(
        self, q: Array, k: Array, v: Array, draws: Draws, rng: np.random.Generator
    ) -> Array:
        scores = q @ k.T
        chosen, log_p = (  # (n or 1, S)
            self.sample(scores, v, draws.number, rng)
            if draws.indices is None
            else self.given(draws.indices, draws.log_probability)
        )
        chosen = np.broadcast_to(chosen, (len(q), chosen.shape[-1]))
        p = self.weights_of(np.take_along_axis(scores, chosen, -1), log_p)
        return np.sum(p[..., None] * v[chosen], -2) / p.sum(-1, keepdims=True)

    def given(self, indices: Array, log_p: Array) -> tuple[Array, Array]:
        """A sample that is given."""
        return np.atleast_2d(indices), np.atleast_2d(log_p)

    def weights_of(self, scores: Array, log_p: Array) -> Array:
        """Weights of the keys in the sample up to a factor, shape (n, S)."""
        scores = self.divided(scores, log_p)
        return np.exp(scores - scores.max(-1, keepdims=True))

    def sample(
        self, scores: Array, v: Array, number: Any, rng: np.random.Generator
    ) -> tuple[Array, Array]:
        """Which keys, and logs of how often each is expected: a systematic sample."""
        p = self.probability(v, number)
        points = self.points(number, rng)
        chosen = np.minimum(np.searchsorted(np.cumsum(p), points, "right"), len(v) - 1)
        return chosen[None], np.log(p[chosen])[None]

    def points(self, number: Any, rng: np.random.Generator) -> Array:
        """Where the cumulative probabilities are met."""
        return rng.random() + np.arange(number)

    def probability(self, v: Array, number: Any) -> Array:
        """How often each key is expected."""
        return np.full(len(v), number / len(v))

    def divided(self, scores: Array, log_p: Array) -> Array:
        """Log weights of the keys in the sample."""
        return scores - log_p


class ByNorms(KeySample):
    """Half uniform, half by the squared norms of values."""

    def probability(self, v: Array, number: Any) -> Array:
        share = self.share_of(v)
        full = np.zeros(len(v), bool)
        while True:  # shares that are cut at 1 leave more to the others
            p = np.where(full, 1, share * (number - full.sum()) / max(share[~full].sum(), 1e-300))
            if not (more := (p > 1) & ~full).any():
                return p
            full |= more

    def share_of(self, v: Array) -> Array:
        """What probabilities are proportional to, unless they are cut."""
        return 1 / len(v) + square(v) / square(v).sum()


class FromSoftmax(KeySample):
    """Independent keys of each query from its softmax."""

    axes = 2

    def sample(
        self, scores: Array, v: Array, number: Any, rng: np.random.Generator
    ) -> tuple[Array, Array]:
        p = np.exp(scores - scores.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        upper = np.cumsum(p, -1)[:, None, :]
        u = self.uniform((len(p), number), rng)
        chosen = np.minimum((upper <= u[..., None]).sum(-1), len(v) - 1)
        return chosen, np.log(number * np.take_along_axis(p, chosen, -1))

    def uniform(self, shape: tuple[int, int], rng: np.random.Generator) -> Array:
        """Numbers at which the distribution function is inverted."""
        return rng.random(shape)


CATALOGUES = {
    name: Catalogue(name, definition, ("gqa",))
    for name, definition in (
        ("coreset", Coreset),
        ("sampled-uniform", KeySample),
        ("sampled-norms", ByNorms),
        ("sampled-softmax", FromSoftmax),
    )
}
_CORESET, _UNIFORM, _NORMS, _SOFTMAX = CATALOGUES.values()

for _catalogue in CATALOGUES.values():
    _name, _made = _catalogue.estimator, _catalogue.definition
    _catalogue.defect(f"{_name}-seed-ignored", "The same seed gives different results.")(
        _made(generator=fresh_entropy)
    )
    _catalogue.defect(f"{_name}-seed-constant", "Different seeds give the same result.")(
        _made(generator=constant_seed)
    )


# Of coresets.


@_CORESET.defect("coreset-normaliser-of-chosen", "Weights do not sum to 1.")
class NormaliserOfChosen(Coreset):
    """The normaliser is that of the chosen keys alone."""

    def ratio(self, p: Array, weights: Array, v: Array, chosen: Array) -> Array:
        return p @ weights @ v / p.sum(-1, keepdims=True)


@_CORESET.defect("coreset-chosen-only", "Keys that were not chosen are not read.")
class ChosenOnly(Coreset):
    """Attention to the chosen keys."""

    def ratio(self, p: Array, weights: Array, v: Array, chosen: Array) -> Array:
        return p @ v[chosen] / p.sum(-1, keepdims=True)


@_CORESET.defect("coreset-not-centred", "Far from the origin all keys look alike.")
class KeysNotCentred(Coreset):
    """Keys as they are."""

    def centred(self, k: Array, chosen: Any) -> Array:
        return k


@_CORESET.defect("coreset-gram-missing", "Keys near several chosen ones count several times.")
class GramMissing(Coreset):
    """The kernel of the chosen keys is not inverted."""

    def weights_of(self, chosen: Array, to_keys: Array) -> Array:
        return to_keys


@_CORESET.defect("coreset-ridge", "With all keys chosen it is not exact attention.")
class Ridge(Coreset):
    """One is added to the diagonal."""

    def weights_of(self, chosen: Array, to_keys: Array) -> Array:
        return super().weights_of(chosen + np.eye(len(chosen)), to_keys)


@_CORESET.defect("coreset-exponential-pivots", "Long keys are chosen: another estimator.")
class ExponentialPivots(Coreset):
    """The residual is that of exp(k . k')."""

    exponential = True


@_CORESET.defect("coreset-greedy-pivots", "The seed makes no difference.", "pivoted Cholesky")
class GreedyPivots(Coreset):
    """The largest residual is always taken."""

    def left(self, gram: Array, chosen: list[int]) -> Array:
        left = super().left(gram, chosen)
        left[chosen] = 0
        return (np.arange(len(left)) == left.argmax()) * 1.0


# Of samples.


@_UNIFORM.defect("sampled-uniform-with-replacement", "A larger error: keys come twice.")
class WithReplacement(KeySample):
    """Independent keys."""

    def points(self, number: Any, rng: np.random.Generator) -> Array:
        return rng.random(number) * number


@_UNIFORM.defect("sampled-uniform-no-offset", "Every sample is the same.")
class NoOffset(KeySample):
    """Every m/S-th key from the first."""

    def points(self, number: Any, rng: np.random.Generator) -> Array:
        return np.arange(number) + 0.0


@_NORMS.defect("sampled-norms-not-divided", "Keys of large values weigh too much.")
class NotDivided(ByNorms):
    """The probabilities are left out."""

    def divided(self, scores: Array, log_p: Array) -> Array:
        return scores


@_NORMS.defect("sampled-norms-multiplied", "Keys of large values weigh too much, twice over.")
class Multiplied(ByNorms):
    """The wrong sign of the log probability."""

    def divided(self, scores: Array, log_p: Array) -> Array:
        return scores + log_p


@_NORMS.defect("sampled-norms-not-squared", "Another law: a larger error.")
class NotSquared(ByNorms):
    """Probabilities by the norms."""

    def share_of(self, v: Array) -> Array:
        return 1 / len(v) + np.sqrt(square(v)) / np.sqrt(square(v)).sum()


@_NORMS.defect("sampled-norms-no-uniform-part", "Keys of small values have too large weights.")
class NoUniformPart(ByNorms):
    """Probabilities by the squared norms alone."""

    def share_of(self, v: Array) -> Array:
        return square(v) / square(v).sum()


@_SOFTMAX.defect("sampled-softmax-weighed-twice", "Keys of large scores count twice.")
class WeighedTwice(FromSoftmax):
    """A sample from the softmax is weighed by the softmax again."""

    def divided(self, scores: Array, log_p: Array) -> Array:
        return scores + 0 * log_p


@_SOFTMAX.defect("sampled-softmax-root-of-probability", "Keys of large scores count too much.")
class RootOfProbability(FromSoftmax):
    """Weights are divided by the root of the probability."""

    def divided(self, scores: Array, log_p: Array) -> Array:
        return scores - log_p / 2


@_SOFTMAX.defect("sampled-softmax-shared", "The keys of a sample are one and the same.")
class SharedNumbers(FromSoftmax):
    """All places of a query's sample have the same number."""

    def uniform(self, shape: tuple[int, int], rng: np.random.Generator) -> Array:
        return np.broadcast_to(rng.random((shape[0], 1)), shape)


@_SOFTMAX.defect("sampled-softmax-greedy", "The largest scores are always taken.", "top-k")
class TopKeys(FromSoftmax):
    """The keys of the largest scores, in place of a sample."""

    def sample(
        self, scores: Array, v: Array, number: Any, rng: np.random.Generator
    ) -> tuple[Array, Array]:
        chosen = np.argsort(-scores, -1)[:, :number]
        return chosen, math.log(number) + np.take_along_axis(scores, chosen, -1)
