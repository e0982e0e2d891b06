"""Bound the rounding of attention to keys whose weights are found by solving a linear system."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from ....arrays.library import Floats


def condition_of_solve(q: Floats, k: Floats, v: Floats, indices: Any) -> float:
    r"""Return relative errors of a coreset's result over those of its kernels, at most.

    With r = e^{q . k_s} up to factors, A = g_JJ and B = g_JK a, where
    :math:`h_{ij} = a_i g_{ij} a_j`, the result is N / D, N = r A^-1 B v and D = r A^-1 B 1. Let all
    entries of r, A and B be off by delta of themselves, and elimination be as if A were off by
    :math:`|\delta A| \le S \rho \delta |L| |L^T|` more, with its Cholesky factor L. To first order,
    with X = A^-1 B v,

    .. math::
        |\delta N| \le \delta \, r \bigl( |X| + |A^{-1}|
        (|B| |v| + (|A| + S \rho |L| |L^T|) |X|) \bigr)

    and so for D with 1 in place of v; the result is off by at most (|dN| + |N / D| |dD|) / |D|.
    Factors of Cholesky have rho = 1, those of h as well as those of g: in them a cancels. Where
    rows of h are exchanged, a long one for a short one, what is subtracted is longer, by up to
    rho = max a / min a.

    Arrays are in kernel coordinates, with as many heads of keys as of queries; `indices`
    (..., S) are the keys J. Returned is the largest such error over delta and the length of the
    longest value, infinite where A is singular to rounding.
    """
    solve = _pose_solve(q, k, indices)
    if solve is None:
        return math.inf
    (sums, moved), (norm, norm_moved) = (
        _sum_over_chosen(solve, x) for x in (v, np.ones_like(v[..., :1]))
    )
    with np.errstate(all="ignore"):
        error = (moved + np.abs(sums / norm) * norm_moved) / np.abs(norm)
    longest = float(np.max(np.sqrt(np.sum(v * v, -1)), initial=1e-300))
    return float(np.max(np.where(np.isnan(error), np.inf, error), initial=1.0 * longest)) / longest


def errors_of_pullback(q: Floats, k: Floats, v: Floats, indices: Any, size: Floats) -> list[float]:
    r"""Return errors of a coreset's result, and of cotangents of q, k and v, over those of kernels.

    With v' = [v, 1], X = A^-1 B v' and the cotangent G of [N, D], of which `size` has the sizes of
    what it is made of, cotangents of log r, log B and log A, entry by entry, are

    .. math::
        r_{is} \, G_i \cdot X_s, \qquad B_{sj} \, Y_s \cdot v'_j, \qquad
        -A_{st} \, Y_s \cdot X_t, \qquad Y = A^{-T} r^T G

    of which q and k take their products with keys and queries, and v takes B^T Y. X is off by what
    `condition_of_solve` says, and Y likewise, by the errors of r and G in place of those of B and
    v. Each factor is taken at its size with one of the others at its error. Of a centred key the
    mean is subtracted, with at most as large a cotangent.
    """
    solve = _pose_solve(q, k, indices)
    if solve is None:
        return [math.inf] * 4
    one = np.ones_like(v[..., :1])
    values, inverse = np.concatenate([v, one], -1), np.abs(solve.inverse)
    x = solve.inverse @ (solve.near @ values)
    x_off = inverse @ (solve.near @ np.abs(values) + solve.off @ np.abs(x))
    sums, moved = solve.shares @ x, solve.shares @ (np.abs(x) + x_off)
    with np.errstate(all="ignore"):
        norm, norm_off = np.abs(sums[..., -1:]), moved[..., -1:] / np.abs(sums[..., -1:])
        out = np.abs(sums[..., :-1]) / norm
        out_off = moved[..., :-1] / norm + out * norm_off
        g = np.concatenate([size, np.sum(size * out, -1, keepdims=True)], -1) / norm
        g_off = np.concatenate([0 * size, np.sum(size * out_off, -1, keepdims=True)], -1) / norm
        g_off = g_off + g * norm_off
        y = inverse @ (solve.shares.mT @ g)
        y_off = inverse @ (solve.shares.mT @ (g + g_off) + solve.off @ y)
    x, values = np.abs(x), np.abs(values)
    of_r = solve.shares * ((g + g_off) @ x.mT + g @ x_off.mT)
    of_b = solve.near * ((y + y_off) @ values.mT)
    of_a = solve.own * ((y + y_off) @ x.mT + y @ x_off.mT)
    long_q, long_k, long = (np.sqrt(np.sum(z * z, -1)) for z in (q, solve.k, solve.chosen))
    pairs = of_b * (long[..., None] + 2 * long_k[..., None, :])
    both = (of_a + of_a.mT) * (long[..., None] + long[..., None, :])
    of_s = np.sum(of_r * (long_q[..., None] + long[..., None, :]), -2) + np.sum(pairs, -1)
    dk = 2 * (np.max(of_s + np.sum(both, -1)) + np.max(np.sum(pairs, -2)))
    dv = solve.near.mT @ (y + y_off)[..., :-1]
    found = (out_off, np.sum(of_r * long[..., None, :], -1), dk, dv)
    return [float(np.max(np.where(np.isnan(z), math.inf, z), initial=0.0)) for z in found]


class _Solve(NamedTuple):
    """Matrices r, B, A, A^-1, and what A is off by over delta, M; keys, centred, and those of J."""

    shares: Floats
    near: Floats
    own: Floats
    inverse: Floats
    off: Floats
    k: Floats
    chosen: Floats


def _sum_over_chosen(solve: _Solve, values: Floats) -> tuple[Floats, Floats]:
    """Return the sum over the keys of J, and its error over delta."""
    x = solve.inverse @ (solve.near @ values)
    moved = solve.near @ np.abs(values) + solve.off @ np.abs(x)
    return solve.shares @ x, solve.shares @ (np.abs(x) + np.abs(solve.inverse) @ moved)


def _pose_solve(q: Floats, k: Floats, indices: Any) -> _Solve | None:
    """Return the matrices of a coreset; None if A is not positive definite to rounding."""
    # A common shift of the keys cancels from the kernel g, and exponents are smaller without it.
    k = k - np.mean(k, -2, keepdims=True)
    lead = np.broadcast_shapes(k.shape[:-2], indices.shape[:-1])
    at = np.broadcast_to(indices, (*lead, indices.shape[-1]))[..., None]
    chosen = np.take_along_axis(np.broadcast_to(k, (*lead, *k.shape[-2:])), at, -2)
    half, half_chosen = (np.sum(x * x, -1)[..., None, :] / 2 for x in (k, chosen))
    near, gram = (
        np.exp(chosen @ np.swapaxes(x, -1, -2) - y - np.swapaxes(half_chosen, -1, -2))
        for x, y in ((k, half), (chosen, half_chosen))
    )
    # B = g_JK a, with a over its largest.
    near = near * np.exp(half - np.max(half, -1, keepdims=True))
    scores = q @ np.swapaxes(chosen, -1, -2) - half_chosen
    # A factor of a query cancels from N / D.
    shares = np.exp(scores - np.max(scores, -1, keepdims=True))
    try:
        lower, inverse = np.abs(np.linalg.cholesky(gram)), np.linalg.inv(gram)
    except np.linalg.LinAlgError:
        return None
    # e^spread is rho, max a / min a.
    spread = np.max(half_chosen, -1, keepdims=True) - np.min(half_chosen, -1, keepdims=True)
    off = gram + gram.shape[-1] * np.exp(spread) * (lower @ np.swapaxes(lower, -1, -2))
    return _Solve(shares, near, gram, inverse, off, k, chosen)
