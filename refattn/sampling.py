r"""Random frequencies: drawn on the host with NumPy, in float64, the same for every array library.

Drawing is apart from evaluating: `draw` returns plain arrays, which any estimator accepts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from . import _validate

__all__ = ["COUPLINGS", "Samples", "draw"]

Floats = npt.NDArray[np.float64]


class Samples(NamedTuple):
    """Frequencies and their importance weights.

    Attributes
    ----------
    omega : numpy.ndarray, shape (S, d), float64
        Frequencies, one a row, in kernel coordinates.
    log_weight : numpy.ndarray, shape (S,), float64
        log N(omega; 0, I) - log q(omega), 0 when they are drawn from N(0, I).
    """

    omega: Floats
    log_weight: Floats


def draw(
    num_samples: int,
    d: int,
    *,
    coupling: str = "iid",
    rng: Any = None,
) -> Samples:
    r"""Draw frequencies, each of them exactly N(0, I_d).

    Parameters
    ----------
    num_samples : int
        Number of frequencies S, at least 1.
    d : int
        Length of a frequency, the head size, at least 1.
    coupling : {"iid", "orthogonal"}, default "iid"
        How frequencies depend on each other. Every coupling keeps the law of each frequency.

        * ``"iid"``: independent.
        * ``"orthogonal"``: blocks of d mutually orthogonal rows (the last block is partial when d
          does not divide S), each a Haar-distributed rotation with independent chi_d norms;
          blocks are independent. Reference 001, orthogonal random features.
    rng : None, int, numpy.random.Generator or anything numpy.random.default_rng takes
        Source of randomness. The same seed gives the same frequencies whatever array library,
        dtype or device they are used with.

    Returns
    -------
    Samples
        `omega`, shape (S, d), and `log_weight`, shape (S,), both float64 NumPy arrays.

    Raises
    ------
    TypeError
        If `num_samples` or `d` is not an integer.
    ValueError
        If `num_samples` or `d` is below 1 or `coupling` is unknown.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import sampling
    >>> omega, log_weight = sampling.draw(4, 4, coupling="orthogonal", rng=0)
    >>> gram = omega @ omega.T
    >>> bool(np.allclose(gram, np.diag(np.diag(gram))))
    True
    """
    _validate.positive_integer("num_samples", num_samples)
    _validate.positive_integer("d", d)
    _validate.choice("coupling", coupling, COUPLINGS)
    omega = COUPLINGS[coupling](num_samples, d, np.random.default_rng(rng))
    return Samples(omega, np.zeros(num_samples))


def _iid(num_samples: int, d: int, rng: np.random.Generator) -> Floats:
    return rng.standard_normal((num_samples, d))


def _orthogonal(num_samples: int, d: int, rng: np.random.Generator) -> Floats:
    blocks = -(-num_samples // d)
    directions = np.concatenate([_haar(d, rng) for _ in range(blocks)])[:num_samples]
    return directions * np.sqrt(rng.chisquare(d, (num_samples, 1)))


def _haar(d: int, rng: np.random.Generator) -> Floats:
    """Draw a Haar-distributed orthogonal matrix (d, d): theory of Mezzadri, arXiv:math-ph/0609050.

    LAPACK fixes the signs of R by convention, so that Q alone is not Haar; multiplying the
    columns of Q by the signs of diag R makes the factorisation unique and Q Haar.
    """
    from scipy.linalg import qr  # here, so that importing the package does not import SciPy

    q, r = qr(rng.standard_normal((d, d)))
    return np.asarray(q * np.where(np.diagonal(r) < 0, -1.0, 1.0))


COUPLINGS: dict[str, Callable[[int, int, np.random.Generator], Floats]] = {
    "iid": _iid,
    "orthogonal": _orthogonal,
}
