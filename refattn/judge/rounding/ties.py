r"""Errors that are equal as keys are: they add up, and do not cancel.

Equal keys, such as padding tokens or a token that comes again, have equal products with a query,
and so equal errors of scores, of exponentials, and of weights that are rounded. Which of them are
one error may depend on the blocks of keys, and on the order of sums. But whatever it is that they
have in common, for n equal keys it is, by Cauchy and Schwarz,

.. math:: \Big(\sum_j x_j\Big) \Big(\sum_j x_j\Big)^T \preceq n \sum_j x_j x_j^T .

So do terms of a sum that are equal, weights or weights times values: while a running sum keeps its
leading digit, the same number added to it is rounded by the same amount.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...arrays.library import Doubles
from .head import SoftmaxHead


class Ties(NamedTuple):
    """How many keys that a query sees are equal to each key: arrays (queries or 1, m)."""

    weights: Doubles  # equal keys
    terms: Doubles  # equal keys with equal values
    new: npt.NDArray[np.bool_]  # of equal keys, which is the first, (m,)

    def take(self, keys: slice) -> Ties:
        """Take some keys."""
        return Ties(self.weights[:, keys], self.terms[:, keys], self.new[keys])

    def count_alike(self, columns: int) -> Doubles:
        """Count the most terms that are alike, of values in so many columns and of ones."""
        ones, terms = (np.max(x, -1, keepdims=True) for x in (self.weights, self.terms))
        return np.concatenate([np.repeat(terms, columns, 1), ones], -1)

    @property
    def most(self) -> Doubles:
        """The most that are equal, for each query."""
        return np.asarray(np.max(self.weights, -1, initial=1.0))


def find_ties(head: SoftmaxHead, i: slice) -> Ties | None:
    """Find equal keys that the queries i see; None if there are none."""
    keys = slice(0, head.keys)
    k, v = head.k[keys], head.v[keys]
    if len(np.unique(_mark_keys(k))) == head.keys:
        return None
    first, of_key = _group_equal(k)
    seen = head.visible(i, keys)
    seen = np.ones((1, head.keys), bool) if seen is None else seen
    terms, weights = np.ones((2, len(seen), len(head.k)))  # of a sink, too
    weights[:, keys] = _count_alike(of_key, seen)
    terms[:, keys] = _count_alike(_group_equal(np.concatenate([k, v], -1))[1], seen)
    new = np.ones(len(head.k), bool)
    new[keys] = np.isin(np.arange(head.keys), first)
    return None if np.all(weights == 1) else Ties(weights, terms, new)


def mark_equal(x: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return numbers that are equal if rows are; those of other rows hardly ever are."""
    return np.array([hash(row.tobytes()) for row in x + 0.0], np.int64)  # where -0 is 0


def count_equal(marks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Count how often each number is there."""
    _, which, counts = np.unique(marks.ravel(), return_inverse=True, return_counts=True)
    return np.asarray(counts[which].reshape(marks.shape))


def _mark_keys(x: Doubles) -> Doubles:
    """Return numbers that are equal if rows are, and that are found at once."""
    return np.asarray(np.sum(x * np.cos(np.arange(1.0, x.shape[1] + 1)), -1))


def _group_equal(x: Doubles) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Group equal rows: return the first of each group, and the group of each row."""
    _, first, group = np.unique(_mark_keys(x), return_index=True, return_inverse=True)
    if len(first) < len(x) and np.any(x != x[first[group]]):
        _, first, group = np.unique(x, axis=0, return_index=True, return_inverse=True)
    return first, group.ravel()


def _count_alike(
    group: npt.NDArray[np.int64], seen: npt.NDArray[np.bool_]
) -> npt.NDArray[np.int64]:
    """Count keys of the group of each key, among those that are seen."""
    order = np.argsort(group, kind="stable")
    begin = np.flatnonzero(np.diff(group[order], prepend=-1))
    counts = np.add.reduceat(seen[:, order], begin, axis=1, dtype=np.int64)
    return np.asarray(np.maximum(counts[:, group], 1))
