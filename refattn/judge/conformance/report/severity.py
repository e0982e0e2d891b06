"""Say what kind of failure one is."""

from __future__ import annotations

import numpy as np

from ..candidate.failures import Failure, Refusal
from ..checks.trials import Check, CheckRun
from ..truth.allowed import largest_exponent

_CONTRACTS = ("contract", "seeds")
_MASKED = ("hidden_nonsense", "gradients_of_hidden_nonsense")
# Ordinary inputs: exponents up to this and the length of a key, and numbers below that.
_ORDINARY, _LARGE = 60.0, 1e4


def find_severity(item: Check, trial: CheckRun, error: BaseException | None) -> str:
    """Return what kind of failure it is, or would be."""
    if isinstance(error, Refusal) or item.name in _CONTRACTS:
        return "contract"
    if item.layer != "identity":
        return "law"
    case = trial.case
    if not isinstance(error, Failure):
        return "contract"
    if item.name in _MASKED:
        return "masked"
    if case is not None and len(case.arrays) == len(trial.adapter.record.arrays):
        if trial.adapter.has("rows"):
            x = case.arrays[0]
            return "range" if np.max(np.abs(np.mean(x, -2)) > 1e3 * np.std(x, -2)) else "formula"
        exponent = largest_exponent(trial.adapter, case.arrays, case.options)
        if trial.adapter.has("random-features"):  # e^(-|q|^2/2) cancels, but is in the features
            q = trial.adapter.root(case.arrays[0].shape[-1]) * case.arrays[0]
            exponent += float(np.max(np.sum(q * q, -1), initial=0.0)) / 2
        small = all(np.max(np.abs(x), initial=0.0) < _LARGE for x in case.arrays)
        if not (small and exponent <= _ORDINARY + case.arrays[0].shape[-1]):
            return "range"
    return "formula"
