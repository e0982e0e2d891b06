"""Random-feature attention of arrays that need not fit in memory, written part by part."""

from __future__ import annotations

import numpy as np

from ..arrays import checks, qkv
from ..arrays.blocks import blocks
from ..arrays.library import Array
from ..arrays.words import with_known_keywords
from .positive import PositiveState


@with_known_keywords
def write_random_feature_attention(
    out: Array,
    q: Array,
    k: Array,
    v: Array,
    *,
    omega: Array,
    log_weight: Array | None = None,
    scale: float | None = None,
    causal: bool = False,
    chunk: int = 65_536,
) -> Array:
    r"""Read long arrays chunk by chunk, and write their random-feature attention into another.

    The numbers are those of `refattn.random_feature_attention` with positive features, up to
    rounding. If the arrays are memory maps, only `chunk` tokens and the sums are in memory.

    Parameters
    ----------
    out : NumPy array, shape (..., n, d_v), dtype of `q`
        Where the result goes, writable; for instance
        `numpy.lib.format.open_memmap(..., mode="w+")`. It must not overlap the other arrays.
    q, k, v : NumPy arrays, shapes (..., n, d), (..., m, d), (..., m, d_v), float32 or float64
        Queries, keys and values; for instance `numpy.load(..., mmap_mode="r")`.
    omega, log_weight, scale, causal
        As in `refattn.random_feature_attention`.
    chunk : int, default 65536
        Tokens read at a time.

    Returns
    -------
    array
        `out`.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import random_feature_attention, sampling
    >>> from refattn.streaming import write_random_feature_attention
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 6, 4))
    >>> omega, out = sampling.draw(8, 4, rng=1).omega, np.empty((6, 4))
    >>> bool(write_random_feature_attention(out, q, k, v, omega=omega, chunk=2) is out)
    True
    >>> bool(np.allclose(out, random_feature_attention(q, k, v, omega=omega)))
    True
    """
    _, lead = qkv.check(q, k, v, causal=causal)
    checks.positive_integer("chunk", chunk)
    n, shift = q.shape[-2], k.shape[-2] - q.shape[-2]
    shape = (*lead, n, v.shape[-1])
    if not (isinstance(out, np.ndarray) and out.dtype == q.dtype and out.flags.writeable):
        got = type(out).__name__
        if isinstance(out, np.ndarray):
            got = f"{out.dtype}, {'' if out.flags.writeable else 'not '}writable"
        raise TypeError(f"`out` must be a writable NumPy array of {q.dtype}, got {got}.")
    if out.shape != shape:
        raise ValueError(f"`out` must have shape {shape}, got {out.shape}.")

    def tokens(start: int, stop: int) -> tuple[Array, Array]:
        j = slice(max(start, 0), max(stop, 0))
        return k[..., j, :], v[..., j, :]

    state = PositiveState.init(*tokens(0, 0), omega=omega, log_weight=log_weight, scale=scale)
    for j in blocks(0, max(shift, 0) if causal else k.shape[-2], chunk):
        state = state.update(*tokens(j.start, j.stop))
    seen = min(max(-shift, 0), n) if causal else n  # queries before it read the state as it is
    for i in blocks(0, seen, chunk):
        out[..., i, :] = state.read(q[..., i, :])
    for i in blocks(seen, n, chunk):
        keys = tokens(i.start + shift, i.stop + shift)
        out[..., i, :] = state.read_causal(q[..., i, :], *keys)
        state = state.update(*keys)
    return out
