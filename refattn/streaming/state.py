"""Checks and copies that all decoding states share."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ..arrays import checks, qkv
from ..arrays.heads import grouped_lead
from ..arrays.library import Array, array_namespace, as_written, is_array_api_obj, is_numpy_array


class KeysAndValues:
    """A state that holds keys and values as they are."""

    k: Array
    v: Array

    @property
    def lead(self) -> tuple[int, ...]:
        """Leading axes of the keys and values."""
        return grouped_lead(self.k, self.k, self.v)

    @property
    def d(self) -> int:
        """Length of a key."""
        return int(self.k.shape[-1])

    @property
    def _totals(self) -> Array:
        """What is kept of the values, (..., d_v)."""
        return self.v

    @property
    def _xp(self) -> Any:
        return array_namespace(self.k)

    @as_written
    def _followed_by(self, k: Array, v: Array) -> tuple[Array, Array]:
        """Append keys and values."""
        check_states(k=(self.k, k), v=(self.v, v))
        xp = self._xp
        return xp.concat([self.k, k], axis=-2), xp.concat([self.v, v], axis=-2)


def check_same(a: Any, b: Any, *fields: str) -> None:
    """Check that `b` is a state that merges with `a`."""
    if type(a) is not type(b):
        raise TypeError(f"`other` must be a {type(a).__name__}, got {type(b).__name__}.")
    for name in fields:
        if not _options_agree(getattr(a, name), getattr(b, name)):
            raise ValueError(f"`other` must have the `{name}` of this state.")


def _options_agree(a: Any, b: Any) -> bool:
    """Whether two options agree; of arrays other than NumPy's only shapes and dtypes can be seen.

    A `functools.partial` that was pickled equals no other, so that its parts are compared.
    """
    if a is b:
        return True
    if isinstance(a, partial) and isinstance(b, partial):
        return _options_agree((a.func, a.args, a.keywords), (b.func, b.args, b.keywords))
    if isinstance(a, tuple | list) and type(a) is type(b):
        return len(a) == len(b) and all(map(_options_agree, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_options_agree(a[name], b[name]) for name in a)
    if is_array_api_obj(a) and is_array_api_obj(b):
        if is_numpy_array(a) and is_numpy_array(b):
            return np.array_equal(a, b)
        kinds = {is_numpy_array(x) or x.dtype for x in (a, b)}  # one library has its own dtypes
        return tuple(a.shape) == tuple(b.shape) and (True in kinds or len(kinds) == 1)
    equal = a == b
    return isinstance(equal, bool | np.bool_) and bool(equal)


def check_keys(state: Any, k: Array, v: Array) -> None:
    """Check more keys and values of a state: a token axis left out would read heads as tokens."""
    qkv.keys_and_values(k, v)
    checks.arrays(2, k=k, state=state._totals)
    if grouped_lead(k, k, v) != state.lead:
        raise ValueError(
            f"`k` and `v` must have the leading axes of the state, {state.lead}, "
            f"got shapes {tuple(k.shape)} and {tuple(v.shape)}."
        )
    for name, x, size in (("k", k, state.d), ("v", v, state._totals.shape[-1])):
        if x.shape[-1] != size:
            raise ValueError(
                f"`{name}` must have the last axis of the state, {size}, got {x.shape[-1]}."
            )


def check_queries(q: Array, k: Array, v: Array) -> None:
    """Check queries of the last of some new tokens."""
    qkv.check(q, k, v)
    if q.shape[-2] > k.shape[-2]:
        raise ValueError(
            "`q` must have no more rows than `k`: they are queries of the last of these tokens, "
            f"got {q.shape[-2]} and {k.shape[-2]}."
        )


@as_written
def copy_array(x: Array) -> Array:
    """Copy an array of the caller's: a state does not change when the caller writes to it."""
    return array_namespace(x).astype(x, x.dtype, copy=True)


def check_states(**pairs: tuple[Array, Array]) -> None:
    """Check arrays (..., m, c) of two states that are to be joined along the tokens."""
    for name, (x, y) in pairs.items():
        checks.arrays(2, **{name: x, f"other {name}": y})
        if checks.shape_of(x)[:-2] != checks.shape_of(y)[:-2] or x.shape[-1] != y.shape[-1]:
            raise ValueError(
                f"`{name}` must have the leading axes and the last axis of the state, "
                f"got shapes {checks.shape_of(x)} and {checks.shape_of(y)}."
            )
