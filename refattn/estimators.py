r"""Random-feature estimators of softmax attention, a few lines each over `attend`.

The positive family is two hops of attention. Samples attend to keys,

.. math::
    (f_s, \log Z_s) = \mathrm{attend}(\omega_s, k, v, \mathrm{bias}_j = -|k_j|^2 / 2),

then queries attend to samples, with the normalisers as a bias. The factor exp(-|q|^2/2) cancels.
Everything is in kernel coordinates, sqrt(scale) times the arguments, so that omega ~ N(0, I).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from . import _validate, sampling
from ._array import (
    Array,
    array_namespace,
    block_shape,
    blocks,
    broadcast_lead,
    constant,
    device,
    group_heads,
    part,
    put,
    tiles,
)
from .attention import (
    Attended,
    _attend,
    _finish,
    _log_sum_exp,
    _mean,
    _merge,
    _past,
)
from .kernels import FEATURES

__all__ = ["ESTIMATORS", "random_feature_attention"]

# Tokens per step of the causal form, and below how many pairs are evaluated one by one.
_CHUNK, _LEAF = 128, 16


def random_feature_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    omega: Array | None = None,
    log_weight: Array | None = None,
    num_features: int | None = None,
    features: str = "positive",
    coupling: str = "iid",
    rng: Any = None,
    scale: float | None = None,
    mask: Array | None = None,
    causal: bool = False,
) -> Array:
    r"""Estimate softmax attention from random features of the softmax kernel (RFA, Performer).

    .. math::
        \mathrm{out}_i =
        \frac{\sum_s w_s \, \xi(q_i, \omega_s) \sum_j \xi(k_j, \omega_s) \, v_j}
             {\sum_s w_s \, \xi(q_i, \omega_s) \sum_j \xi(k_j, \omega_s)},
        \qquad \xi(x, \omega) = \exp(\omega \cdot x - |x|^2 / 2)

    Reference 000, KernelizedAttention; reference 002, eq. (10); reference 003, RFA. Linear in n
    and m. Consistent as the number of features grows, and biased for any finite number: it is
    self-normalised importance sampling (reference 003, RFA as SNIS).

    Parameters
    ----------
    q : array, shape (..., n, d), float32 or float64
        Queries; see `attend` for broadcasting and grouped heads.
    k : array, shape (..., m, d), dtype of `q`
        Keys.
    v : array, shape (..., m, d_v), dtype of `q`
        Values.
    omega : array, shape (..., S, d), optional
        Frequencies, in kernel coordinates: a NumPy array or one of the library of `q`, cast to
        the dtype and device of `q`. With `omega` the result is deterministic.
    log_weight : array, shape (..., S), optional
        log N(omega; 0, I) - log q(omega) for frequencies drawn from another law q; 0 by default.
    num_features : int, optional
        Number S of frequencies to draw when `omega` is not given.
    features : {"positive"}
        The feature map.
    coupling : {"iid", "orthogonal"}, default "iid"
        How drawn frequencies depend on each other; see `sampling.draw`. All heads share them.
    rng : None, int, numpy.random.Generator or anything numpy.random.default_rng takes
        Source of the drawn frequencies.
    scale : float, optional
        Factor on q . k, 1 / sqrt(d) by default, positive. `q` and `k` are multiplied by its
        square root first: kernel coordinates.
    mask : array of bool, broadcasting to (..., n, m), optional
        True where the query attends to the key. A mask that is the same for all queries,
        shape (..., 1, m) or (m,), keeps the cost linear; any other costs O(n m S).
    causal : bool, default False
        Query i sees key j only if j <= i + m - n. The cost stays linear.

    Returns
    -------
    array, shape (..., n, d_v)
        Same namespace, dtype and device as `q`. Rows that see no key are 0.

    Raises
    ------
    TypeError
        As in `attend`, and if `num_features` is not an integer or `scale` not a real number.
    ValueError
        As in `attend`; if not exactly one of `omega` and `num_features` is given, if
        `log_weight` is given without `omega`, or if an option is unknown.

    Notes
    -----
    Against exact arithmetic on the same floats the error relative to the largest value is at
    most C eps (1 + the largest of |omega| |q|, |omega| |k| + |k|^2/2), in kernel coordinates, with
    C as in `attend`. Nothing is added to denominators or clamped, and features never overflow or
    underflow as they would outside the log domain.

    Causal attention merges, for each chunk of queries, the state of the samples before the chunk
    with the chunk itself, which is halved until it is small: its second half attends to its first
    half in two hops. Later keys enter no sum and no maximum, so editing them leaves earlier
    outputs unchanged bit for bit.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import random_feature_attention, softmax_attention
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 5, 4))
    >>> approx = random_feature_attention(q, k, v, num_features=4096, coupling="orthogonal", rng=1)
    >>> bool(np.max(np.abs(approx - softmax_attention(q, k, v))) < 0.1)
    True
    """
    _validate.attention(q, k, v, mask=mask, causal=causal)
    _validate.real("scale", scale, positive=True, optional=True)
    _validate.choice("features", features, FEATURES)
    if (omega is None) == (num_features is None):
        given = "neither" if omega is None else "both"
        raise ValueError(f"Exactly one of `omega` and `num_features` must be given, got {given}.")
    if log_weight is not None and omega is None:
        raise ValueError("`log_weight` must come with the `omega` it weighs, got no `omega`.")
    if num_features is not None:
        _validate.positive_integer("num_features", num_features)
        omega, log_weight = sampling.draw(num_features, q.shape[-1], coupling=coupling, rng=rng)
    omega, log_weight = _validate.frequencies(omega, log_weight, q, _validate.lead(q, k, v))
    (q, k, v, omega, log_weight, mask), ungroup = group_heads(
        q, k, v, omega, log_weight[..., None, :], mask
    )
    root = _root(scale, q)
    if mask is not None and mask.ndim == 1:
        mask = mask[None, :]
    if mask is not None and mask.shape[-2] > 1:
        return ungroup(_per_query(q, k, v, omega, log_weight, root, mask, causal))
    if causal:
        return ungroup(_causal(q, k, v, omega, log_weight, root, mask))
    return ungroup(_read(q, omega, _sample(omega, k, v, mask, root), log_weight, root).out)


def _root(scale: float | None, q: Array) -> Array:
    """Square root of the scale, the factor to kernel coordinates, in the dtype of `q`."""
    return constant(q.shape[-1], q) ** -0.25 if scale is None else constant(scale, q) ** 0.5


def _sample(omega: Array, k: Array, v: Array, mask: Array | None, root: Array) -> Attended:
    """First hop, samples attend to keys: f_s and log Z_s."""
    xp = array_namespace(k)
    half = root * root / 2
    return _attend(
        omega, k, v, mask=mask, scale=root, key_bias=lambda k: -half * xp.sum(k * k, axis=-1)
    )


def _read(q: Array, omega: Array, states: Attended, log_weight: Array, root: Array) -> Attended:
    """Second hop, queries attend to samples; `log_weight` has shape (..., n or 1, S)."""
    bias = states.lse[..., None, :] + log_weight
    return _attend(q, omega, states.out, bias=bias, scale=root)


def _causal(
    q: Array,
    k: Array,
    v: Array,
    omega: Array,
    log_weight: Array,
    root: Array,
    mask: Array | None,
) -> Array:
    """Two hops over the keys that each query sees, chunk after chunk."""
    lead = broadcast_lead(q, k, v, omega, log_weight, mask)
    out = array_namespace(q).empty(
        (*lead, q.shape[-2], v.shape[-1]), dtype=q.dtype, device=device(q)
    )
    whole = slice(None)
    for head in tiles(lead, math.prod(block_shape(q)) // (_CHUNK * omega.shape[-2])):
        q_h, k_h, v_h, omega_h, weight_h, mask_h = (
            None if x is None else part(x, (*head, whole, whole))
            for x in (q, k, v, omega, log_weight, mask)
        )
        for i, out_i in _causal_chunks(q_h, k_h, v_h, omega_h, weight_h, root, mask_h):
            out = put(out, (*head, i, slice(0, v.shape[-1])), out_i)
    return out


def _causal_chunks(
    q: Array,
    k: Array,
    v: Array,
    omega: Array,
    log_weight: Array,
    root: Array,
    mask: Array | None,
) -> Iterator[tuple[slice, Array]]:
    """Yield the outputs chunk by chunk, carrying the state of the samples over the keys passed."""
    n, shift = q.shape[-2], k.shape[-2] - q.shape[-2]

    def keys(j: slice) -> tuple[Array, Array, Array | None]:
        return k[..., j, :], v[..., j, :], None if mask is None else mask[..., j]

    first = max(0, -shift)  # queries before it see no key
    state = _sample(omega, *keys(slice(0, max(0, shift))), root)
    if first:
        yield slice(0, first), _read(q[..., :first, :], omega, state, log_weight, root).out
    for i in blocks(first, n, _CHUNK):
        q_i, own = q[..., i, :], keys(slice(i.start + shift, i.stop + shift))
        past = _read(q_i, omega, state, log_weight, root)
        yield i, _merge(past, _triangle(q_i, *own, omega, log_weight, root)).out
        state = _merge(state, _sample(omega, *own, root))


def _triangle(
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None,
    omega: Array,
    log_weight: Array,
    root: Array,
) -> Attended:
    """Causal two hops within a chunk: the second half sees the first, then each half itself."""
    xp = array_namespace(q)
    n = q.shape[-2]
    if n <= _LEAF:
        q, k = q * root, k * root
        frequencies = xp.matrix_transpose(omega)
        x = q @ frequencies + log_weight
        y = k @ frequencies - xp.sum(k * k, axis=-1, keepdims=True) / 2
        scores = _log_sum_exp(x[..., :, None, :] + y[..., None, :, :])
        visible = _past(slice(0, n), slice(0, n), 0, device(q), xp)
        return _finish(_mean(scores, v, visible if mask is None else visible & mask, xp), xp)
    h = n // 2
    early, late = (
        (q[..., i, :], k[..., i, :], v[..., i, :], None if mask is None else mask[..., i])
        for i in (slice(0, h), slice(h, n))
    )
    across = _read(late[0], omega, _sample(omega, *early[1:], root), log_weight, root)
    a = _triangle(*early, omega, log_weight, root)
    b = _merge(across, _triangle(*late, omega, log_weight, root))
    return Attended(
        *(xp.concat([x, y], axis=axis) for x, y, axis in ((a.out, b.out, -2), (a.lse, b.lse, -1)))
    )


def _per_query(
    q: Array,
    k: Array,
    v: Array,
    omega: Array,
    log_weight: Array,
    root: Array,
    mask: Array,
    causal: bool,
) -> Array:
    """Two hops with every query in a batch of its own: each sees keys of its own choice."""
    xp = array_namespace(q)
    n, m, d_v = q.shape[-2], k.shape[-2], v.shape[-1]
    lead = broadcast_lead(q, k, v, omega, log_weight, mask)
    out = xp.empty((*lead, n, d_v), dtype=q.dtype, device=device(q))
    whole = slice(None)
    for *head, i in tiles((*lead, n), math.prod(block_shape(q)) // (omega.shape[-2] * d_v)):
        q_i, weight_i, mask_i = (
            part(x, (*head, i, whole))[..., None, :] for x in (q, log_weight, mask)
        )
        if causal:
            mask_i = mask_i & _past(i, slice(0, m), m - n, device(q), xp)[..., None, :]
        k_h, v_h, omega_h = (part(x, (*head, whole, whole))[..., None, :, :] for x in (k, v, omega))
        states = _sample(omega_h, k_h, v_h, mask_i, root)
        out_i = _read(q_i, omega_h, states, weight_i, root).out[..., 0, :]
        out = put(out, (*head, i, slice(0, d_v)), out_i)
    return out


ESTIMATORS: dict[str, Callable[..., Array]] = {
    "rfa-iid": partial(random_feature_attention, coupling="iid"),
    "rfa-orthogonal": partial(random_feature_attention, coupling="orthogonal"),
}
