"""What each form claims to compute, in float64.

Results are compared for some queries: `by_query` evaluates the formula of `refattn.naive` for one
query after another, so that what it holds is all keys times all frequencies and no more. Performer
and what packages add to their normalisers are not in `naive`, and written down here.

Pullbacks are compared along one random direction for each of q, k and v, all tokens of a head
together: the inner product of the cotangent with the direction must be the `slopes` of the plain
NumPy form of `peers` that is linear in the tokens, of `peers.textbook_softmax` for exact attention.
These forms are checked by `by_query` where they are timed, and no pullback is written down.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from refattn import naive

Arrays = tuple[np.ndarray, ...]

STEP = 2.0**-100  # the square of which is lost beside 1


def direct(form: Callable[..., Any], q: Any, k: Any, v: Any, **options: Any) -> np.ndarray:
    """Evaluate a form in float64."""
    named = {name: _double(x) if name in ("omega", "centres") else x for name, x in options.items()}
    return np.asarray(form(*map(_double, (q, k, v)), **named))


def by_query(
    form: Callable[..., Any], q: Any, k: Any, v: Any, mask: Any = None, **options: Any
) -> np.ndarray:
    """Evaluate a form in float64, one query (..., d) after another, each with its row of a mask."""
    rows = []
    for i in range(q.shape[-2]):
        seen = None if mask is None else mask[i : i + 1]
        rows.append(direct(form, q[..., i : i + 1, :], k, v, mask=seen, **options))
    return np.concatenate(rows, axis=-2)


def by_head(form: Callable[..., Any], *arrays: Any) -> np.ndarray:
    """Evaluate a form for one head after another: the scores of all would not fit."""
    return np.stack([form(*head) for head in zip(*arrays, strict=True)])


def linear(q: Any, k: Any, v: Any, *, mask: Any = None, added: float = 0.0) -> np.ndarray:
    """Linear attention with elu + 1, `added` to the normaliser."""
    return _by_features(naive.elu_plus_one(q), naive.elu_plus_one(k), v, mask, added)


def performer(
    q: Any, k: Any, v: Any, *, omega: Any, mask: Any = None, added: float = 0.0
) -> np.ndarray:
    """Performer attention, `added` to each sum of key features."""
    phi_q, phi_k = performer_features(q, k, omega)
    return _by_features(phi_q, phi_k, v, mask, added * np.sum(phi_q, axis=-1, keepdims=True))


def performer_features(q: Any, k: Any, omega: Any, epsilon: float = 1e-4) -> Arrays:
    """Features below their maxima, which count as constants, with `epsilon` added to each."""
    omega = np.swapaxes(omega, -1, -2)

    def phi(x: Any, axes: Any) -> np.ndarray:
        x = x * x.shape[-1] ** -0.25
        largest = np.max((x @ omega).real, axis=axes, keepdims=True)
        half = np.sum(x * x, axis=-1, keepdims=True) / 2
        return np.asarray((np.exp(x @ omega - half - largest) + epsilon) * omega.shape[-1] ** -0.5)

    return phi(q, -1), phi(k, (-2, -1))


def _by_features(phi_q: Any, phi_k: Any, v: Any, mask: Any, added: Any) -> np.ndarray:
    kernel = phi_q @ np.swapaxes(phi_k, -1, -2)
    kernel = kernel if mask is None else np.where(mask, kernel, 0)
    return np.asarray(kernel @ v / (np.sum(kernel, axis=-1, keepdims=True) + added))


def slopes(form: Callable[..., Any], arrays: Any, d_out: Any, directions: Any) -> Arrays:
    """Derivatives of ``d_out . form(q, k, v)`` along a direction of each array, one for each head.

    The form is analytic, and evaluated a step into the complex plane: the imaginary part of the
    result over the step is the derivative, to rounding, as nothing is subtracted.
    """
    arrays, found = [*map(_double, arrays)], []
    for i, direction in enumerate(directions):
        moved = [*arrays[:i], arrays[i] + 1j * STEP * direction, *arrays[i + 1 :]]
        found.append(along([form(*moved).imag / STEP], [d_out])[0])
    return tuple(found)


def along(cotangents: Sequence[Any], directions: Sequence[Any]) -> Arrays:
    """Inner products of arrays and directions, one for each head, as (heads, 1)."""
    pairs = zip(map(_double, cotangents), map(_double, directions), strict=True)
    return tuple(np.sum(x * y, axis=-1).sum(axis=-1, keepdims=True) for x, y in pairs)


def _double(x: Any) -> np.ndarray:
    return np.asarray(x, dtype=np.float64)
