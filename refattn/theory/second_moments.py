"""Exact attention in float64 and its sums over pairs of keys, of which variances are made."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ..arrays import checks, frequencies, matrices, qkv
from ..arrays.blocks import block_shape, blocks
from ..arrays.heads import group_with_lead, grouped_lead, head_counts
from ..arrays.library import Doubles
from ..attention import attend
from ..sampling import Gaussian
from .proposal import SquaredWeights


def unit_of(x: Doubles) -> Doubles:
    """Return the power of 2 near the largest entry of each head (..., n, d_v)."""
    _, exponent = np.frexp(np.max(np.abs(x), axis=(-2, -1), keepdims=True))
    return np.asarray(np.ldexp(1.0, np.clip(exponent, -1022, 1022)))


class KernelAttention:
    """Attention in kernel coordinates, in float64 on the host, one block of queries at a time.

    Values are in units of `unit`, a power of 2 for each head: their squares may overflow.
    """

    def __init__(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        scale: float | None = None,
        mask: Any = None,
        causal: bool = False,
        proposal: Gaussian | None = None,
    ) -> None:
        q, k, v = (
            checks.host(name, x, f"(..., {rows}, {columns})", 2)
            for name, x, rows, columns in (
                ("q", q, "n", "d"),
                ("k", k, "m", "d"),
                ("v", v, "m", "d_v"),
            )
        )
        checks.whole("mask", mask)
        mask = None if mask is None else np.asarray(mask)
        _, lead = qkv.check(q, k, v, mask=mask, causal=causal)
        scale = checks.real("scale", scale, positive=True, optional=True)
        root = q.shape[-1] ** -0.25 if scale is None else math.sqrt(scale)
        self.proposal = proposal
        if isinstance(proposal, Gaussian):
            frequencies.batch("proposal", proposal.lead, lead)
            q, k = proposal.change_gauge(q, k)
        self.root, self.lead = root, grouped_lead(q, k, v)
        q, k = q * root, k * root
        matrices.squares("q", q)  # then scores are finite, and those of -inf hidden keys
        matrices.squares("k", k)
        heads, groups = head_counts(q, k, v)
        self.share = 1 if 1 in (heads, groups) else heads // max(groups, 1)
        unit = unit_of(v)
        (q, k, v, mask, unit), lead, self.ungroup = group_with_lead(q, k, v / unit, mask, unit)
        self.q, self.k, self.v, self.mask, self.causal = q, k, v, mask, causal
        self.d = q.shape[-1]
        self.shape = (*lead, q.shape[-2], v.shape[-1])
        self.attended = attend(q, k, v, mask=mask, causal=causal)
        self.mean = self.ungroup(np.broadcast_to(self.attended.out, self.shape))
        self.unit = self.ungroup(np.broadcast_to(unit, (*self.shape[:-2], 1, 1)))

    def query_head(self, index: tuple[int, ...]) -> tuple[int, ...]:
        """Return the index among the heads of q of a head among groups of them."""
        if self.share == 1:
            return index
        return (*index[:-2], index[-2] * self.share + index[-1])

    def ways(self, index: tuple[int, ...]) -> Doubles:
        """Return the directions in kernel coordinates, in columns, of a head's coordinates."""
        gauge = None if self.proposal is None else self.proposal.gauge
        if gauge is None:
            return self.root * np.eye(self.d)
        gauges = np.broadcast_to(gauge, (*self.lead, self.d, self.d))
        return np.asarray(self.root * gauges[self.query_head(index)])

    def blocks(self, *, centred: bool) -> Iterator[tuple[Any, Doubles, Doubles, Doubles, Doubles]]:
        """Yield (index, log pi, values less their mean if `centred`, queries, keys).

        Shapes (r, m), (r, d_v, m), (r, d) and (m, d) for r queries of a head.
        """
        *lead, n, d_v = self.shape
        m = self.k.shape[-2]
        visible = np.broadcast_to(True if self.mask is None else self.mask, (*lead, n, m))
        out, lse = np.broadcast_to(self.attended.out, self.shape), self.attended.lse
        q, k, v = (np.broadcast_to(x, (*lead, *x.shape[-2:])) for x in (self.q, self.k, self.v))
        lse = np.broadcast_to(lse, (*lead, n))
        rows = max(1, math.prod(block_shape(q)) // (m * (d_v + 1) or 1))
        for head in np.ndindex(*lead):
            for i in blocks(0, n, rows):
                seen = visible[(*head, i)]
                if self.causal:
                    last_seen = np.arange(i.start, i.stop) + m - n
                    seen = seen & (np.arange(m) <= last_seen[:, None])
                total = np.where(np.isfinite(lse[(*head, i)]), lse[(*head, i)], 0.0)
                scores = np.where(seen, q[(*head, i)] @ k[head].T - total[:, None], -math.inf)
                values = np.broadcast_to(v[head].T, (i.stop - i.start, d_v, m))
                if centred:
                    values = values - out[(*head, i)][..., None]
                yield (*head, i), scores, values, q[(*head, i)], k[head]


# Sums over pairs of keys


class PairSums(NamedTuple):
    """Sums over pairs of keys of E_ijj' / Z_i^2 times u u', u and 1 for values u of the keys.

    All in units of the size of the values, whose squares may overflow.
    """

    square: Doubles  # (..., n, d_v)
    cross: Doubles  # (..., n, d_v)
    weight: Doubles  # (..., n)
    mean: Doubles  # (..., n, d_v)
    unit: Doubles  # (..., 1, 1)


class PairWeights(NamedTuple):
    """What makes E_ijj' / Z_i^2 = e^height b_j b_j' gram_jj' for some queries of a head."""

    index: Any
    scores: Doubles  # (r, m), log pi
    values: Doubles  # (r, d_v, m)
    q: Doubles  # (r, d), along the eigenvectors, as are keys
    key: Doubles  # (m, d)
    log_b: Doubles  # (r, m)
    gram: Doubles  # (m, m)
    height: Doubles  # (r,)
    head: SquaredWeights


def factor_pairs(problem: KernelAttention, *, centred: bool) -> Iterator[PairWeights]:
    r"""Factor the second moments of weighted features of pairs of keys.

    The integral of `log_kernel_variance` with 2z = 2 q + k + k' factors into
    E_jj' / Z^2 = e^{h} b_j b_j' G_jj', G a Gaussian kernel of the keys: no exponent is positive
    but h and the largest log b, which are to be carried apart.
    """
    from scipy.spatial.distance import cdist

    law = SquaredWeights(problem.proposal, problem.d)
    of = None  # the head that `head`, `key` and `gram` are of
    for index, scores, values, q_i, k_h in problem.blocks(centred=centred):
        if index[:-1] != of:
            of, head = index[:-1], law.at(problem.query_head(index[:-1]))
            key = head.rotate(k_h)
            x = key * np.sqrt((1 + head.curvature) / 4)
            gram = np.asarray(np.exp(-cdist(x, x, "sqeuclidean")))
        q = head.rotate(q_i)
        t = q - head.mean
        slope = key * head.curvature
        log_b = scores + t @ slope.T + np.sum(key * slope, axis=-1) / 2
        height = head.offset + head.quadratic(t)
        yield PairWeights(index, scores, values, q, key, log_b, gram, height, head)


def sum_pairs(problem: KernelAttention, *, centred: bool) -> PairSums:
    """Sum the second moments of weighted features over all pairs of keys.

    Values are taken less their mean if `centred`. The largest log b is carried apart for all keys
    and for those whose value is not 0: the key that takes all attention has a centred value of 0.
    """
    square, cross = np.zeros(problem.shape), np.zeros(problem.shape)
    weight = np.ones(problem.shape[:-1])
    for index, scores, values, _, _, log_b, gram, height, _ in factor_pairs(
        problem, centred=centred
    ):
        b, peak = scaled_exp(log_b)
        b_u, peak_u = scaled_exp(np.where(np.any(values != 0, axis=1), log_b, -math.inf))
        u, pairs = values * b_u[:, None, :], (b @ gram)[:, None, :]
        square[index] = times_exp(height + 2 * peak_u, np.sum((u @ gram) * u, axis=-1))
        cross[index] = times_exp(height + peak + peak_u, np.sum(pairs * u, axis=-1))
        total = times_exp(height + 2 * peak, np.sum(pairs * b[:, None, :], axis=-1))[:, 0]
        weight[index] = np.where(np.any(np.isfinite(scores), axis=-1), total, 1.0)
    ungroup = problem.ungroup
    sums = ungroup(square), ungroup(cross), ungroup(weight, core=1)
    return PairSums(*sums, problem.mean, problem.unit)


def scaled_exp(x: Doubles) -> tuple[Doubles, Doubles]:
    """Return e^(x - peak) and the peak of each row; 0 where all of a row is -inf."""
    peak = np.max(x, axis=-1)
    peak = np.where(np.isfinite(peak), peak, 0.0)
    return np.exp(x - peak[..., None]), peak


def times_exp(log_size: Doubles, sums: Doubles) -> Doubles:
    """Scale rows; what is 0 stays 0 where the scale overflows."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(np.where(sums == 0, 0.0, np.exp(log_size)[..., None] * sums))
