"""The decoding state of random-feature attention with positive features."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..arrays import checks, frequencies, qkv
from ..arrays.heads import group_heads, grouped_lead
from ..arrays.library import Array, array_namespace, as_written, constant, root_scale
from ..arrays.shown import held
from ..engine.attend import Attended, merge
from ..engine.causal import causal_attention
from ..engine.hops import Keys, Samples, read, sample
from ..engine.positive import Positive
from .state import check_keys, check_same, copy_array


@held()
@dataclass(frozen=True, eq=False)
class PositiveState:
    r"""The random-feature sums over the keys so far, for `refattn.random_feature_attention`.

    It stores the mean value f_s and the log normaliser log Z_s of each frequency: S (d_v + 1)
    numbers for each head, whatever the number of tokens. States merge as in `refattn.merge`.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import random_feature_attention, sampling
    >>> from refattn.streaming import PositiveState
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 6, 4))
    >>> omega = sampling.draw(8, 4, rng=1).omega
    >>> state = PositiveState.init(k[:4], v[:4], omega=omega).update(k[4:], v[4:])
    >>> bool(np.allclose(state.read(q), random_feature_attention(q, k, v, omega=omega)))
    True
    """

    samples: Attended
    omega: Array
    log_weight: Array
    scale: float | None = None

    @classmethod
    @as_written
    def init(
        cls,
        k: Array,
        v: Array,
        *,
        omega: Array,
        log_weight: Array | None = None,
        scale: float | None = None,
    ) -> PositiveState:
        """Make a state of the first keys (..., m, d) and values (..., m, d_v); m may be 0.

        `omega`, shape (..., S, d), `log_weight`, shape (..., S), and `scale` are as in
        `refattn.random_feature_attention`; leading axes are those of the keys.
        """
        qkv.keys_and_values(k, v)
        scale = checks.real("scale", scale, positive=True, optional=True, like=k)
        omega_of_keys, _ = frequencies.shared(omega, log_weight, k, grouped_lead(k, k, v))
        if log_weight is None:
            log_weight = np.zeros(omega.shape[-2])
        samples = _attend_from_frequencies(omega_of_keys, k, v, scale)
        return cls(samples, copy_array(omega), copy_array(log_weight), scale)

    @property
    def lead(self) -> tuple[int, ...]:
        """Leading axes of the keys and values."""
        return tuple(self.samples.lse.shape[:-1])

    @property
    def d(self) -> int:
        """Length of a key."""
        return int(self.omega.shape[-1])

    @property
    def _totals(self) -> Array:
        """What is kept of the values, (..., d_v)."""
        return self.samples.out

    @as_written
    def update(self, k: Array, v: Array) -> PositiveState:
        """Add keys (..., m, d) and values (..., m, d_v), with the same leading axes."""
        check_keys(self, k, v)
        more = _attend_from_frequencies(constant(self.omega, k), k, v, self.scale)
        return replace(self, samples=merge(self.samples, more))

    @as_written
    def read(self, q: Array) -> Array:
        """Attend from queries (..., n, d) to every key so far: (..., n, d_v)."""
        return self._read(q).out

    def _read(self, q: Array) -> Attended:
        """Attend to the samples; `lse` lacks what `near_and_far.lacking` says."""
        f, log_z = self.samples
        omega, log_weight = self._proposal(q)
        (q, omega, f, log_z, log_weight), ungroup = group_heads(
            q, omega, f, log_z[..., None, :], log_weight
        )
        states = Attended(f, log_z[..., 0, :])
        samples = Samples(root_scale(self.scale, q) * omega, log_weight)
        out, lse = read(q, samples, states)
        return Attended(ungroup(out), ungroup(lse, 1))

    @as_written
    def read_causal(self, q: Array, k: Array, v: Array) -> Array:
        """Attend from the queries of new tokens to every key so far and, causally, to their own.

        q (..., n, d), k (..., m, d) and v (..., m, d_v) are as in causal attention. The new keys
        are not added: call `read_causal`, then `update`, for each part of a long prompt.
        """
        qkv.check(q, k, v, causal=True)
        check_keys(self, k, v)
        return self._read_causal(q, k, v).out

    def _read_causal(self, q: Array, k: Array, v: Array) -> Attended:
        f, log_z = self.samples
        omega, log_weight = self._proposal(q)
        (q, k, v, omega, f, log_z, log_weight), ungroup = group_heads(
            q, k, v, omega, f, log_z[..., None, :], log_weight
        )
        past = Attended(f, log_z[..., 0, :])
        root = root_scale(self.scale, q)
        features = Positive(Samples(root * omega, log_weight), array_namespace(q))
        keys = Keys(k, v, half=root * root / 2)
        out, lse = causal_attention(q, keys, features, past)
        return Attended(ungroup(out), ungroup(lse, 1))

    def _proposal(self, q: Array) -> tuple[Array, Array]:
        """Frequencies and log weights (..., 1, S) for queries, which are checked."""
        f = self.samples.out
        checks.arrays(2, q=q, state=f)
        omega, log_weight = (constant(x, q) for x in (self.omega, self.log_weight))
        qkv.check(q, omega, f)
        return omega, log_weight[..., None, :]

    def merge(self, other: PositiveState) -> PositiveState:
        """Add the sums over other keys, with the same leading axes.

        Both states must have the same frequencies and log weights. If these are not NumPy
        arrays, only their shapes and dtypes are compared.
        """
        check_same(self, other, "scale", "lead", "omega", "log_weight")
        qkv.attended(self.samples, other.samples)
        return replace(self, samples=merge(self.samples, other.samples))


def _attend_from_frequencies(omega: Array, k: Array, v: Array, scale: float | None) -> Attended:
    """Attend from frequencies, in kernel coordinates, to some keys."""
    root = root_scale(scale, k)
    return sample(root * omega, Keys(k, v, half=root * root / 2))


PositiveState.__module__ = "refattn.streaming"  # where users find it, and so do pickles
