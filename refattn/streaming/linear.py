"""The decoding state of linear attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from .. import features
from ..arrays import checks, qkv
from ..arrays.blocks import WHOLE
from ..arrays.heads import broadcast_lead, group_heads, grouped_lead
from ..arrays.library import Array, array_namespace, as_written, device
from ..arrays.shown import held
from ..engine.hops import Keys
from ..engine.signed import Totals, merge_totals
from ..estimators.linear import map_features
from .state import check_keys, check_same, check_states


@held()
@dataclass(frozen=True, eq=False)
class LinearState:
    r"""The sums of features times values over the keys so far, for linear attention.

    It stores sum_j phi(k_j) [v_j, 1] divided by a common scale e^base: F (d_v + 1) numbers for each
    head, whatever the number of tokens. Katharopoulos et al., arXiv:2006.16236; Linear attention
    post (see `refattn.naive`).

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import linear_attention
    >>> from refattn.streaming import LinearState
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 6, 4))
    >>> state = LinearState.init(k[:4], v[:4]).update(k[4:], v[4:])
    >>> bool(np.allclose(state.read(q), linear_attention(q, k, v)))
    True
    """

    sums: Any
    d: int
    feature_map: Callable[[Array], Any] = features.elu_features

    @classmethod
    @as_written
    def init(
        cls, k: Array, v: Array, *, feature_map: Callable[[Array], Any] = features.elu_features
    ) -> LinearState:
        """Make a state of the first keys (..., m, d) and values (..., m, d_v); m may be 0.

        `feature_map` is as in `refattn.linear_attention`.
        """
        qkv.keys_and_values(k, v)
        checks.function("feature_map", feature_map)
        phi = map_features(feature_map, k, array_namespace(k))
        sums = phi.start(Keys(k, v), phi.block(k, broadcast_lead(k, v)))
        return cls(sums, int(k.shape[-1]), feature_map)

    @property
    def lead(self) -> tuple[int, ...]:
        """Leading axes of the keys and values."""
        return tuple(self.sums.total.shape[:-2])

    @property
    def _totals(self) -> Array:
        """What is kept of the values, (..., d_v)."""
        return self.sums.total[..., :-1]

    @as_written
    def update(self, k: Array, v: Array) -> LinearState:
        """Add keys (..., m, d) and values (..., m, d_v), with the same leading axes."""
        check_keys(self, k, v)
        return self.merge(LinearState.init(k, v, feature_map=self.feature_map))

    @as_written
    def read(self, q: Array) -> Array:
        """Attend from queries (..., n, d) to every key so far: (..., n, d_v)."""
        checks.arrays(2, q=q, state=self._totals)
        if q.shape[-1] != self.d:
            raise ValueError(
                f"`q` must have the last axis of the state, {self.d}, got {q.shape[-1]}."
            )
        total, xp = self.sums.total, array_namespace(q)
        shape = (*grouped_lead(q, total, total), q.shape[-2])
        if 0 in shape:  # Dask finds no maximum of no rows
            return xp.zeros((*shape, total.shape[-1] - 1), dtype=q.dtype, device=device(q))
        (q, *parts), ungroup = group_heads(q, *self.sums)
        phi = map_features(self.feature_map, q, xp)
        (sums,) = phi.read(phi.queries(q, WHOLE), Totals(*parts))
        return ungroup(phi.finish(sums).out)

    def merge(self, other: LinearState) -> LinearState:
        """Add the sums over other keys, with the same leading axes and feature map."""
        check_same(self, other, "d", "feature_map")
        check_states(**{"the state": (self.sums.total, other.sums.total)})
        return replace(self, sums=as_written(merge_totals)(self.sums, other.sums))


LinearState.__module__ = "refattn.streaming"  # where users find it, and so do pickles
