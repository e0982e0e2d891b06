r"""Random frequencies: drawn on the host with NumPy, in float64, the same for every array library.

Drawing is separate from evaluating: `draw` returns arrays, which any estimator accepts. A
coupling is the joint distribution of the frequencies, and a proposal is the distribution of each;
every coupling works with every proposal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol, get_args

import numpy as np

from .arrays import checks, frequencies, matrices, qkv
from .arrays.arithmetic import multiply
from .arrays.heads import group_with_lead, head_counts
from .arrays.library import Array, Doubles, as_written, constant
from .arrays.shown import held
from .arrays.words import warn_caller, with_known_keywords
from .engine.targets import Targets
from .typing import Coupling

__all__ = [
    "BIASED_COUPLINGS",
    "COUPLINGS",
    "Gaussian",
    "InfiniteVarianceWarning",
    "Mixture",
    "Samples",
    "draw",
    "draw_target",
]
__dir__ = __all__.copy


class InfiniteVarianceWarning(UserWarning):
    """The importance weights of a proposal have infinite variance, or may have it; see `draw`."""


@held()
class Samples(NamedTuple):
    """Frequencies and their importance weights.

    Attributes
    ----------
    omega : numpy.ndarray, shape (..., S, d), float64
        Frequencies, one a row, in kernel coordinates.
    log_weight : numpy.ndarray, shape (..., S), float64
        log N(omega; 0, I) - log q(omega) for frequencies drawn from q, so 0 for q = N(0, I).
    """

    omega: Doubles
    log_weight: Doubles


class Proposal(Protocol):
    """A distribution from which frequencies are drawn, one for each index of the axes `lead`."""

    @property
    def lead(self) -> tuple[int, ...]: ...

    @property
    def d(self) -> int: ...

    def transform(self, z: Doubles, rng: np.random.Generator) -> Doubles: ...

    def log_ratio(self, omega: Doubles) -> Doubles: ...

    def has_finite_variance(self) -> bool: ...


@held()
@dataclass(frozen=True, eq=False)
class Gaussian:
    r"""Gaussian proposals N(mean, cov), one or a batch of them.

    Attributes
    ----------
    mean : array_like, shape (..., d)
        Means, in kernel coordinates. Leading axes, for example heads, make a batch.
    cov : array_like, shape (..., d, d), optional
        Covariances, symmetric positive definite; the identity by default. Importance weights
        have finite variance only if every eigenvalue exceeds 1/2 (`draw` warns otherwise).
    gauge : array_like, shape (..., d, d), optional
        Invertible matrices A: the frequencies are for queries A q and keys A^{-T} k, which have
        the same products. Estimators that take the proposal change the gauge; see `adapt.fit`.

    Raises
    ------
    TypeError
        If an argument does not hold real numbers.
    ValueError
        If shapes do not match, a value is not finite, a covariance is not symmetric positive
        definite, or a gauge is singular.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn.sampling import Gaussian
    >>> q = Gaussian([1.0, 0.0], [[2.0, 0.0], [0.0, 1.0]])
    >>> q.log_density(np.array([[1.0, 0.0]]))
    array([-2.18445066])
    """

    mean: Doubles
    cov: Doubles | None = None
    gauge: Doubles | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "mean", checks.host("mean", self.mean, "(..., d)", 1))
        if self.cov is not None:
            cov = checks.host("cov", self.cov, "(..., d, d)", 2)
            matrices.definite("cov", cov, self.d)
            object.__setattr__(self, "cov", (cov + np.swapaxes(cov, -1, -2)) / 2)
            checks.leading("mean", self.mean[..., None, :], "cov", cov)
        if self.gauge is not None:
            gauge = checks.host("gauge", self.gauge, "(..., d, d)", 2)
            matrices.invertible("gauge", gauge, self.d)
            checks.leading("mean", self.mean[..., None, :], "gauge", gauge)
            object.__setattr__(self, "gauge", gauge)

    @property
    def d(self) -> int:
        """Length of a frequency."""
        return int(self.mean.shape[-1])

    @property
    def lead(self) -> tuple[int, ...]:
        """Shape of the batch."""
        outer = () if self.cov is None else self.cov.shape[:-2]
        return np.broadcast_shapes(self.mean.shape[:-1], outer)

    @cached_property
    def eigen(self) -> tuple[Doubles, Doubles]:
        """Eigenvalues (..., d) and eigenvectors (..., d, d), in columns, of the covariance."""
        cov = np.eye(self.d) if self.cov is None else self.cov
        values, vectors = np.linalg.eigh(cov)
        return values, vectors

    @as_written
    def change_gauge(self, q: Array, k: Array) -> tuple[Array, Array]:
        """Map queries (..., n, d) and keys (..., m, d) to A q and A^{-T} k, if there is a gauge.

        Raises ValueError where d is not that of the frequencies, or query heads that share a key
        head have different gauges.
        """
        matrices = self.gauges(q, k)
        return (q, k) if matrices is None else (multiply(q, matrices[0]), multiply(k, matrices[1]))

    def gauges(self, q: Array, k: Array) -> tuple[Array, Array] | None:
        """Return what `change_gauge` multiplies rows of queries and of keys by: A^T and A^{-1}."""
        _, lead = qkv.check(q, k, k)
        frequencies.over("proposal", self, q.shape[-1])
        if self.gauge is None:
            return None
        frequencies.batch("proposal", self.gauge.shape[:-2], lead)
        inverse = np.linalg.inv(self.gauge)
        heads, groups = head_counts(q, k, k)
        if min(heads, groups) > 1 and self.gauge.shape[:-2][-1:] == (heads,):
            inverse = inverse[..., :: heads // groups, :, :]
            if np.any(np.repeat(inverse, heads // groups, axis=-3) != np.linalg.inv(self.gauge)):
                raise ValueError(
                    "`proposal` must have one gauge for all query heads that share a key head."
                )
        return constant(np.swapaxes(self.gauge, -1, -2), q), constant(inverse, k)

    def transform(self, z: Doubles, rng: np.random.Generator) -> Doubles:
        """Map standard normal rows z (..., S, d) to draws: mean + cov^{1/2} z."""
        if self.cov is not None:
            values, vectors = self.eigen
            root = (vectors * np.sqrt(values)[..., None, :]) @ np.swapaxes(vectors, -1, -2)
            z = z @ root
        return self.mean[..., None, :] + z

    def log_ratio(self, omega: Doubles) -> Doubles:
        """Evaluate log N(omega; 0, I) - log q(omega), (..., S, d) to (..., S)."""
        mean = self.mean[..., None, :]
        if self.cov is None:
            return np.asarray(np.sum(mean * (mean / 2 - omega), axis=-1))
        values, vectors = self.eigen
        white = multiply(omega - mean, vectors) / np.sqrt(values)[..., None, :]
        log_det = np.sum(np.log(values), axis=-1)[..., None]
        return np.asarray((np.sum(white**2, -1) - np.sum(omega**2, -1) + log_det) / 2)

    def log_density(self, omega: Doubles) -> Doubles:
        """Evaluate log q(omega), (..., S, d) to (..., S)."""
        standard = -np.sum(np.asarray(omega) ** 2, -1) / 2 - self.d / 2 * math.log(2 * math.pi)
        return np.asarray(standard - self.log_ratio(omega))

    def has_finite_variance(self) -> bool:
        """Whether every covariance exceeds I/2, so that squared weights have a mean."""
        return bool(np.all(self.eigen[0] > 0.5))


@held()
@dataclass(frozen=True, eq=False)
class Mixture:
    r"""Mixture of Gaussian proposals, sum_c weights_c N(mean_c, cov_c).

    Attributes
    ----------
    components : sequence of Gaussian
        Components, of one length d and with batch axes that broadcast.
    weights : array_like, shape (C,), optional
        Probabilities; equal by default. Normalised to sum to 1.

    Raises
    ------
    TypeError
        If `components` holds anything but Gaussian proposals.
    ValueError
        If there is no component, lengths differ, or a weight is negative or all are 0.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn.sampling import Gaussian, Mixture, draw
    >>> q = Mixture([Gaussian(np.zeros(2)), Gaussian(np.ones(2))])
    >>> draw(3, 2, proposal=q, rng=0).omega.shape
    (3, 2)
    """

    components: Sequence[Gaussian]
    weights: Any = field(default=None)

    def __post_init__(self) -> None:
        components = check_gaussians("components", self.components)
        if len({c.d for c in components}) != 1:
            raise ValueError(
                "`components` must hold at least one Gaussian, all of one length d, "
                f"got lengths {[c.d for c in components]}."
            )
        weights = np.ones(len(components)) if self.weights is None else self.weights
        weights = checks.host("weights", weights, "(C,)", 1)
        if weights.shape != (len(components),) or np.any(weights < 0) or not np.any(weights):
            raise ValueError(
                "`weights` must hold a non-negative number for each component, not all 0, got "
                f"{weights} for {len(components)}."
            )
        if any(c.gauge is not None for c in components):
            raise ValueError("`components` must have no gauge: change that of q and k first.")
        try:
            np.broadcast_shapes(*(c.lead for c in components))
        except ValueError:
            raise ValueError(
                "`components` must have batch axes that broadcast, "
                f"got {[c.lead for c in components]}."
            ) from None
        object.__setattr__(self, "components", components)
        weights = weights / np.max(weights)  # their sum may overflow
        object.__setattr__(self, "weights", weights / np.sum(weights))

    @property
    def d(self) -> int:
        """Length of a frequency."""
        return self.components[0].d

    @property
    def lead(self) -> tuple[int, ...]:
        """Shape of the batch."""
        return np.broadcast_shapes(*(c.lead for c in self.components))

    def transform(self, z: Doubles, rng: np.random.Generator) -> Doubles:
        """Map standard normal rows z (..., S, d) to draws, each from a component drawn for it."""
        chosen = rng.choice(len(self.components), size=z.shape[:-1], p=self.weights)
        each = np.stack([c.transform(z, rng) for c in self.components])
        return np.asarray(np.take_along_axis(each, chosen[None, ..., None], axis=0)[0])

    def log_ratio(self, omega: Doubles) -> Doubles:
        """Evaluate log N(omega; 0, I) - log q(omega), (..., S, d) to (..., S)."""
        from scipy.special import logsumexp

        each = np.stack([-c.log_ratio(omega) for c in self.components])
        weights = self.weights.reshape((-1,) + (1,) * (each.ndim - 1))
        return np.asarray(-logsumexp(each, axis=0, b=weights))

    def log_density(self, omega: Doubles) -> Doubles:
        """Evaluate log q(omega), (..., S, d) to (..., S)."""
        standard = Gaussian(np.zeros(self.d))
        return np.asarray(standard.log_density(omega) - self.log_ratio(omega))

    def has_finite_variance(self) -> bool:
        """Whether the covariance of some component exceeds I/2: this bounds the squared weights.

        Sufficient, not necessary: components may bound them together.
        """
        pairs = zip(self.components, self.weights, strict=True)
        return any(c.has_finite_variance() for c, w in pairs if w > 0)


@with_known_keywords
def draw(
    num_samples: int,
    d: int,
    *,
    coupling: Coupling = "iid",
    proposal: Gaussian | Mixture | None = None,
    rng: Any = None,
) -> Samples:
    r"""Draw frequencies from a proposal, coupled with each other, and their importance weights.

    Parameters
    ----------
    num_samples : int
        Number of frequencies S, at least 1.
    d : int
        Length of a frequency, the head size, at least 1.
    coupling : str, default "iid"
        How frequencies depend on each other. With every coupling but the last two, each row z is
        exactly N(0, I). A Gaussian proposal maps rows to mean + cov^{1/2} z.

        * ``"iid"``: independent.
        * ``"orthogonal"``: blocks of d mutually orthogonal rows, each block a Haar-distributed
          rotation with independent chi_d norms; blocks are independent. Performers post (on
          arXiv:2009.14794), orthogonal random features.
        * ``"simplex"``: as orthogonal, with the directions of a block those of a regular simplex,
          at angles with cosine -1/(d - 1). Reid et al., arXiv:2301.13856.
        * ``"antithetic"``: pairs z, -z; the first half of the rows is iid.
        * ``"sobol"``, ``"halton"``: scrambled quasi-Monte Carlo points through the normal
          quantile (scipy.stats.qmc); Sobol points are balanced when S is a power of 2.
        * ``"regularised"``: orthogonal with all norms sqrt(d). Not normal, hence biased: the
          kernel is underestimated however many frequencies are drawn (see `BIASED_COUPLINGS`).
        * ``"sorf"``: the rows of sqrt(p) H D_1 H D_2 H D_3, p the power of 2 from d, H the
          orthogonal Hadamard matrix and D_i random signs; d entries of each. Their products with
          the d signs of D_3 are sums, and so only nearly normal. Yu et al., arXiv:1610.09072.

        When S is not a multiple of the block (d, 2 for antithetic, p for sorf) the last block is
        partial.
    proposal : Gaussian or Mixture, optional
        The distribution of each frequency, N(0, I) by default. A batch of proposals draws
        independently for each of its members. In a mixture the component of each frequency is drawn
        independently of z.
    rng : None, int, numpy.random.Generator or anything numpy.random.default_rng takes
        Source of randomness. The same seed gives the same frequencies whatever array library,
        dtype or device they are used with.

    Returns
    -------
    Samples
        `omega`, shape (..., S, d), and `log_weight`, shape (..., S), float64 NumPy arrays whose
        leading axes are those of the proposal.

    Raises
    ------
    TypeError
        If `num_samples` or `d` is not an integer or `proposal` not a proposal.
    ValueError
        If `num_samples` or `d` is below 1, `coupling` is unknown or `proposal` has another d or a
        gauge.

    Warns
    -----
    InfiniteVarianceWarning
        If the importance weights have infinite variance, because the covariance is not above I/2;
        or if they may have it, because no component of a mixture has a covariance above I/2.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import sampling
    >>> omega, log_weight = sampling.draw(4, 4, coupling="orthogonal", rng=0)
    >>> gram = omega @ omega.T
    >>> bool(np.allclose(gram, np.diag(np.diag(gram))))
    True
    """
    checks.length("d", d)
    checks.length("num_samples", num_samples, d)
    checks.choice("coupling", coupling, get_args(Coupling))
    rng = checks.generator(rng)
    couple = COUPLINGS[coupling]
    if proposal is None:
        return Samples(couple(num_samples, d, rng), np.zeros(num_samples))
    if not isinstance(proposal, Gaussian | Mixture):
        raise TypeError(
            f"`proposal` must be a Gaussian, a Mixture or None, got {type(proposal).__name__}."
        )
    if isinstance(proposal, Gaussian) and proposal.gauge is not None:
        raise ValueError(
            "`proposal` must have no gauge, which frequencies alone would lose: give it to the "
            "estimator, or draw from Gaussian(mean, cov) for the q and k of its `change_gauge`."
        )
    frequencies.over("proposal", proposal, d)
    if not proposal.has_finite_variance():
        warn_caller(
            "The covariance of `proposal` is not above I/2: importance weights have infinite "
            "variance, or may have if it is a mixture.",
            InfiniteVarianceWarning,
        )
    z = np.empty((*proposal.lead, num_samples, d))
    for index in np.ndindex(proposal.lead):
        z[index] = couple(num_samples, d, rng)
    omega = proposal.transform(z, rng)
    return Samples(omega, proposal.log_ratio(omega))


@as_written
def draw_target(
    q: Array,
    k: Array,
    *,
    num_samples: int,
    rng: Any = None,
    scale: float | None = None,
    mask: Array | None = None,
    causal: bool = False,
) -> Array:
    r"""Draw exactly from the target of randomized attention, for each query.

    .. math:: p_i(\omega) = \sum_j \pi_{ij} \, N(\omega;\, q_i + k_j,\, I), \qquad
              \pi_{ij} = \mathrm{softmax}_j(q_i \cdot k_j)

    in kernel coordinates: p_n of Zheng 2022 (see `refattn.naive`). The component j is found by
    inverting the distribution function of pi_i at a uniform number, block by block and in float64:
    memory does not depend on n times m, and the same seed gives the same frequencies on every
    backend and dtype, to rounding. If the device has no float64, as in JAX unless jax_enable_x64 is
    set, this is done on the host. JAX does not know the values of arrays that it traces: they stay
    in float32, where a uniform number within rounding of a step may select the next key. Takes time
    O(n m (d + S)).

    Parameters
    ----------
    q, k : array, shape (..., n, d) and (..., m, d), float32 or float64
        Queries and keys; see `attend` for broadcasting and grouped heads.
    num_samples : int
        Frequencies S for each query, at least 1.
    rng, scale
        As in `randomized_attention`.
    mask, causal
        As in `attend`: which keys each query sees. For a query that sees none, omega is
        N(q_i, I).

    Returns
    -------
    array, shape (..., n, S, d)
        Frequencies, in kernel coordinates, with the namespace, dtype and device of `q`.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import sampling
    >>> q, k = np.zeros((1, 2)), np.array([[5.0, 0.0]])
    >>> omega = sampling.draw_target(q, k, num_samples=10_000, rng=0, scale=1.0)
    >>> np.round(omega.mean(axis=-2), 1)
    array([[5., 0.]])
    """
    targets, ungroup = prepare_targets(q, k, num_samples, rng, scale, mask, causal)
    return ungroup(targets.draw(), core=3)


def prepare_targets(
    q: Array, k: Array, num_samples: Any, rng: Any, scale: Any, mask: Array | None, causal: bool
) -> tuple[Targets, Any]:
    """Check arguments of `draw_target`, draw uniform numbers, and group heads."""
    _, lead = qkv.check(q, k, k, mask=mask, causal=causal)
    scale = checks.real("scale", scale, positive=True, optional=True, like=q)
    n, d = q.shape[-2:]
    checks.length("num_samples", num_samples, math.prod(lead) * n * d)
    rng = checks.generator(rng)
    (q, k, _, mask), lead, ungroup = group_with_lead(q, k, k, qkv.key_rows(mask, k))
    u = rng.random((*lead, n, num_samples))
    return Targets(q, k, mask, u, rng, scale, causal), ungroup


def _antithetic(num_samples: int, d: int, rng: np.random.Generator) -> Doubles:
    half = rng.standard_normal((-(-num_samples // 2), d))
    return np.concatenate([half, -half])[:num_samples]


def _rotations(directions: Doubles, num_samples: int, rng: np.random.Generator) -> Doubles:
    """Rotate the unit vectors (d, d) anew for each block, cut to the number of samples."""
    d = directions.shape[-1]
    rows = np.empty((-(-num_samples // d), d, d))
    for block in rows:
        block[:] = directions @ _draw_rotation(d, rng)
    return rows.reshape(-1, d)[:num_samples]


def _give_norms(directions: Doubles, rng: np.random.Generator) -> Doubles:
    """Give unit vectors independent chi_d norms: rows that are N(0, I) one by one."""
    num_samples, d = directions.shape
    return directions * np.sqrt(rng.chisquare(d, (num_samples, 1)))


def _draw_rotation(d: int, rng: np.random.Generator) -> Doubles:
    """Draw a Haar-distributed orthogonal matrix (d, d): Mezzadri, arXiv:math-ph/0609050.

    LAPACK fixes the signs of R by convention, so that Q alone is not Haar; multiplying the
    columns of Q by the signs of diag R makes the factorisation unique and Q Haar.
    """
    from scipy.linalg import qr  # here, so that importing the package does not import SciPy

    q, r = qr(rng.standard_normal((d, d)))
    return np.asarray(q * np.where(np.diagonal(r) < 0, -1.0, 1.0))


def _simplex_directions(d: int) -> Doubles:
    """Corners of a regular simplex: unit vectors (d, d) with mutual products -1/(d - 1)."""
    if d == 1:
        return np.ones((1, 1))
    ones = np.append(np.ones(d - 1), 0.0)
    rows = math.sqrt(d / (d - 1)) * np.eye(d) - (math.sqrt(d) + 1) / (d - 1) ** 1.5 * ones
    rows[-1] = ones / math.sqrt(d - 1)
    return np.asarray(rows)


def _hadamard(num_samples: int, d: int, rng: np.random.Generator) -> Doubles:
    """Draw blocks sqrt(p) H D_1 H D_2 H D_3: rows of length sqrt(p), orthogonal where p = d."""
    from scipy.linalg import hadamard

    size = 1 << (d - 1).bit_length()
    h = hadamard(size) / math.sqrt(size)
    signs = rng.choice([-1.0, 1.0], (3, -(-num_samples // size), 1, size))
    first, second, third = h * signs
    rows = np.asarray(math.sqrt(size) * first @ second @ third)
    return rows.reshape(-1, size)[:num_samples, :d]


def _quasi(engine: str, num_samples: int, d: int, rng: np.random.Generator) -> Doubles:
    """Draw standard normal points by a scrambled quasi-Monte Carlo engine of SciPy."""
    from scipy.special import ndtri
    from scipy.stats import qmc

    # The first one apart: Sobol warns of first draws that are no power of 2; so does `draw`'s text.
    draw = getattr(qmc, engine)(d, rng=rng).random
    points = np.concatenate([draw(count) for count in (1, num_samples - 1) if count])
    return np.asarray(ndtri(np.clip(points, 2.0**-54, 1 - 2.0**-53)))  # 0 would give -inf


COUPLINGS: dict[Coupling, Callable[[int, int, np.random.Generator], Doubles]] = {
    "antithetic": _antithetic,
    "halton": partial(_quasi, "Halton"),
    "iid": lambda n, d, rng: rng.standard_normal((n, d)),
    "orthogonal": lambda n, d, rng: _give_norms(_rotations(np.eye(d), n, rng), rng),
    "regularised": lambda n, d, rng: math.sqrt(d) * _rotations(np.eye(d), n, rng),
    "simplex": lambda n, d, rng: _give_norms(_rotations(_simplex_directions(d), n, rng), rng),
    "sobol": partial(_quasi, "Sobol"),
    "sorf": _hadamard,
}

BIASED_COUPLINGS = frozenset({"regularised", "sorf"})


def check_gaussians(name: str, proposals: Any) -> Any:
    """Check a sequence of Gaussian proposals and return it as a tuple."""
    if not isinstance(proposals, Sequence):
        raise TypeError(
            f"`{name}` must be a sequence of Gaussian, got {checks.describe(proposals)}."
        )
    for p in proposals:
        if not isinstance(p, Gaussian):
            raise TypeError(f"`{name}` must hold Gaussian proposals only, got {type(p).__name__}.")
    return tuple(proposals)
