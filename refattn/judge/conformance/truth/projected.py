r"""How far weights of ReLU features of a projection may be off.

.. math:: w_{ij} = \sum_s \phi_s(q_i) \, \phi_s(k_j), \qquad
    |\delta w_{ij}| \le u \sum_s |\omega_s| \big( |q_i| \, [\omega_s \cdot q_i > 0] \, \phi_s(k_j)
    + \phi_s(q_i) \, |k_j| \, [\omega_s \cdot k_j > 0] \big), \qquad
    \phi_s(x) = \max(\omega_s \cdot x, 0) + \epsilon

for projections that are off by u of \|omega\| \|x\|.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ....arrays.library import Floats
from ..candidate.adapter import Adapter
from ..candidate.limits import Arrays, Keywords, repeated

_OFF = 16.0  # of eps |omega| |x|: more than omega . x is off by


class Projected(NamedTuple):
    """Features of rows, (..., n, S)."""

    phi: Floats
    active: Floats  # 1 where omega_s . x is positive, or may be by rounding
    sizes: Floats  # |omega_s| |x| there
    kinks: Any  # where either sign may come of rounding


def project(adapter: Adapter, x: Floats, omega: Any) -> Projected:
    """Project rows in kernel coordinates."""
    omega = np.asarray(omega, float)
    sizes = np.linalg.norm(x, axis=-1)[..., None] * np.linalg.norm(omega, axis=-1)[..., None, :]
    z, off = x @ np.swapaxes(omega, -1, -2), _OFF * adapter.eps * sizes
    phi, active = np.maximum(z, 0.0) + adapter["kernel_epsilon"], (z > -off) * 1.0
    return Projected(phi, active, active * sizes, (abs(z) <= off) & (off > 0))


def exponent(adapter: Adapter, arrays: Arrays, options: Keywords) -> float:
    """Bound how far rounding moves the sum of a row's weights, in units of omega . x, relatively.

    What is small beside that sum has no part in the result.
    """
    q, k = _project_both(adapter, arrays, options)
    phi = np.swapaxes(k.phi, -1, -2)
    moved = q.sizes @ phi + q.phi @ np.swapaxes(k.sizes, -1, -2)
    seen = adapter.visible(moved.shape[-2], moved.shape[-1], options)
    moved, weights = (np.sum(np.where(seen, x, 0.0), -1) for x in (moved, q.phi @ phi))
    return float(np.max(moved / np.where(weights > 0, weights, 1.0), initial=0.0))


def slopes(adapter: Adapter, arrays: Arrays, options: Keywords) -> tuple[float, float]:
    """Bound how fast the log weight of a pair moves with its query and with its key.

    Features are epsilon at least, whatever the frequencies.
    """
    root, epsilon = adapter.root(arrays[0].shape[-1]), adapter["kernel_epsilon"]
    if "omega" not in options:
        return (root * (np.sqrt(arrays[0].shape[-1]) + 5) / epsilon,) * 2
    longest = float(np.max(np.linalg.norm(options["omega"], axis=-1), initial=0.0))
    q, k = _project_both(adapter, arrays, options)
    phi, active = (np.swapaxes(x, -1, -2) for x in (k.phi, k.active))
    weights, of_q, of_k = q.phi @ phi, q.active @ phi, q.phi @ active
    by_q, by_k = (float(np.max(x / weights, initial=0.0)) for x in (of_q, of_k))
    return root * longest * by_q, root * longest * by_k


def near_kinks(adapter: Adapter, arrays: Arrays, options: Keywords) -> bool:
    """Tell whether rounding may choose between two slopes of a feature at given frequencies."""
    known = "omega" in options
    return known and any(x.kinks.any() for x in _project_both(adapter, arrays, options))


def _project_both(adapter: Adapter, arrays: Arrays, options: Keywords) -> list[Projected]:
    q, k = (adapter.root(x.shape[-1]) * np.asarray(x, float) for x in arrays[:2])
    return [project(adapter, x, options["omega"]) for x in (q, repeated(k, q))]
