r"""Norms by which kernels divide the rows of queries and keys themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ...arrays.library import Doubles
from .problems import Index, Problem

NORMALISED = ("qk", "q", "k")
# In float32 the roundings of the norm itself would have to be in the law.
NORMALISED_TYPES = ("bfloat16", "float16")
_USUAL_CLAMP, _USUAL_ADDED = 1e-12, (1e-6, 1e-5)  # epsilons


class Norm(NamedTuple):
    """A norm in words, and as a function of rows (..., n, d)."""

    words: str
    of: Callable[[Doubles], Doubles]


def list_norms(epsilon: float | None = None) -> list[Norm]:
    """List the forms of a norm with this epsilon, or with the usual ones."""
    clamp = _USUAL_CLAMP if epsilon is None else epsilon

    def largest(x: Doubles) -> Doubles:
        return np.asarray(np.maximum(np.sqrt(np.sum(x * x, -1, keepdims=True)), clamp))

    def root(added: float, mean: bool, x: Doubles) -> Doubles:
        square = np.sum(x * x, -1, keepdims=True) / (x.shape[-1] if mean else 1)
        return np.asarray(np.sqrt(square + added))

    norms = [Norm(f"max(|x|, {clamp:g})", largest)]
    for words, mean in (("|x|^2", False), ("|x|^2 / d", True)):
        for added in _USUAL_ADDED if epsilon is None else (epsilon,):
            norms.append(Norm(f"sqrt({words} + {added:g})", partial(root, added, mean)))
    return norms


def divide_rows(problem: Problem, names: Sequence[str], norm: Norm) -> Problem:
    """Divide the rows of queries, of keys or of both by their norms, and keep these: `q_norm`."""
    if problem.gradient is not None:
        gradient = problem.gradient
        gradient = gradient._replace(forward=divide_rows(gradient.forward, names, norm))
        return gradient.problem(problem.lead)._replace(blocks=problem.blocks)

    def read(index: Index) -> Mapping[str, Any]:
        arrays = problem.read(index)
        norms = {f"{name}_norm": norm.of(arrays[name]) for name in names}
        return {**arrays, **norms, **{x: arrays[x] / norms[f"{x}_norm"] for x in names}}

    return problem._replace(read=read)
