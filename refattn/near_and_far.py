r"""Near keys exactly, the rest approximately: both attend, and their results merge.

In `eva_attention` and `second_order_attention` keys are cut into chunks of `window`, near are
those of the query's own chunk, and each other chunk is one term. In
`local_random_feature_attention` near are the keys in a sliding window.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from . import _validate, sampling
from ._arguments import check
from ._array import (
    Array,
    array_namespace,
    as_written,
    constant,
    device,
    reverse,
    root_scale,
    square_norm,
)
from ._blocks import block_shape, blocks
from ._heads import broadcast_lead, group_heads
from ._hops import Exponential, Keys, Samples, causal_attention, sample, two_hops
from ._kernel import Attended, attend, merge
from ._scores import Options
from .estimators import arranged

__all__ = [
    "eva_attention",
    "local_random_feature_attention",
    "second_order_attention",
]


@as_written
def eva_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    window: int,
    omega: Array | None = None,
    rng: Any = None,
    sampled: bool = True,
    log_size: bool = True,
    scale: float | None = None,
    mask: Array | None = None,
    causal: bool = False,
) -> Array:
    r"""Attend to the keys of the own chunk, and to one summary of each other chunk (EVA).

    .. math::
        \mathrm{out}_i = \frac{\sum_{j \in E_i} e^{q_i \cdot k_j} v_j
                               + \sum_c |P_c| \, e^{q_i \cdot \bar k_c} f_c(\omega_c)}
                              {\sum_{j \in E_i} e^{q_i \cdot k_j}
                               + \sum_c |P_c| \, e^{q_i \cdot \bar k_c}}, \qquad
        f_c(\omega) = \frac{\sum_{j \in P_c} \xi(k_j, \omega) \, v_j}
                           {\sum_{j \in P_c} \xi(k_j, \omega)}

    with the mean key of each chunk, and omega_c ~ N(mean query + mean key of chunk c, I) in kernel
    coordinates. Zheng et al., arXiv:2302.04542, who leave out the number |P_c| of keys in a chunk:
    without it a chunk counts as one key. Biased, whatever is drawn. Time O(n (w + m / w)).

    Parameters
    ----------
    q, k, v
        As in `attend`: shapes (..., n, d), (..., m, d), (..., m, d_v), all float32 or float64.
    window : int
        Keys w of a chunk: key j is in chunk floor(j / w), and query i in that of the key which is
        level with it, j = i + m - n.
    omega : array, shape (..., C, d), optional
        A frequency for each of the ceil(m / w) chunks, in kernel coordinates, in place of those
        drawn.
    rng : None, int, numpy.random.Generator or anything numpy.random.default_rng takes
        Source of the drawn frequencies.
    sampled : bool, default True
        Whether omega_c is drawn. If not, it is the mean of its law: no random numbers are used.
    log_size : bool, default True
        Whether a summary counts as often as there are keys seen in its chunk, or once.
    scale : float, optional
        Factor on q . k, 1 / sqrt(d) by default, positive.
    mask : array of bool, broadcasting to (..., 1, m), optional
        True where the queries attend to the key: the same for all queries.
    causal : bool, default False
        Query i sees key j only if j <= i + m - n, and summaries of the chunks before its own.

    Returns
    -------
    array, shape (..., n, d_v)
        Same namespace, dtype and device as `q`. Rows that see no key are 0.

    Raises
    ------
    TypeError, ValueError
        As in `attend`; if `window` is not a positive integer, if the mask differs between queries,
        or if `omega` has not one frequency for each chunk.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import eva_attention
    >>> q, k, v = np.zeros((3, 1)), np.zeros((3, 1)), np.array([[0.0], [1.0], [5.0]])
    >>> eva_attention(q, k, v, window=2, rng=0)
    array([[2.],
           [2.],
           [2.]])
    """
    scale, mask = check(q, k, v, scale, mask, causal)
    mask, (window, count) = _validate.one_row(mask, k), _validate.chunks("window", window, q, k)
    _validate.flag("sampled", sampled)
    _validate.flag("log_size", log_size)
    noise, lead = None, _validate.lead(q, k, v)
    if omega is not None:
        omega = _validate.chunk_frequencies(omega, count, q, lead)
    elif sampled:
        noise = constant(_validate.generator(rng).standard_normal((count, q.shape[-1])), q)
    (q, k, v, mask, omega), ungroup = group_heads(q, k, v, mask, omega)
    root, chunks = root_scale(scale, q), _chunked(q, k, v, mask, window)
    mean = chunks.mean(chunks.k)
    if omega is None:
        omega = root * (chunks.mean_query + mean)
        omega = omega if noise is None else omega + noise
    keys = Keys(chunks.k, chunks.v, chunks.mask, root * root / 2)
    summary = sample(root * omega[..., None, :], keys).out[..., 0, :]
    bias = chunks.log_size
    if not log_size:
        bias = array_namespace(q).where(bias == -math.inf, bias, 0.0)
    near = chunks.near(root * root, causal)
    far = attend(
        *(chunks.q, mean[..., None, :, :], summary[..., None, :, :]),
        bias=bias[..., None, None, :],
        mask=chunks.others(slice(None), causal),
        scale=root * root,
    )
    return ungroup(chunks.joined(merge(near, far).out))


@as_written
def second_order_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    window: int,
    scale: float | None = None,
    mask: Array | None = None,
    causal: bool = False,
) -> Array:
    r"""Attend to the keys of the own chunk, and to the moments of each other chunk.

    .. math::
        \sum_{j \in P_c} e^{q \cdot k_j} v_j \approx
        |P_c| \, e^{q \cdot \bar k_c + q^T \Sigma_c q / 2}
        \bigl(\bar v_c + \mathrm{Cov}_c(v, k) \, q\bigr)

    and so for the sum of e^(q . k_j) without the last factor: what keys and values with a joint
    normal law of these moments give. The divisor of the covariances is |P_c|. Nothing is drawn.
    Time O(n (w + m d (d + d_v) / w)).

    Parameters
    ----------
    q, k, v, window, scale, mask, causal
        As in `eva_attention`.

    Returns
    -------
    array, shape (..., n, d_v)
        Same namespace, dtype and device as `q`. Rows that see no key are 0. Values are not
        confined to the range of `v`.

    Raises
    ------
    TypeError, ValueError
        As in `eva_attention`.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import second_order_attention
    >>> q, k, v = np.zeros((3, 1)), np.zeros((3, 1)), np.array([[0.0], [1.0], [5.0]])
    >>> second_order_attention(q, k, v, window=2)
    array([[2.],
           [2.],
           [2.]])
    """
    scale, mask = check(q, k, v, scale, mask, causal)
    mask, (window, _) = _validate.one_row(mask, k), _validate.chunks("window", window, q, k)
    (q, k, v, mask), ungroup = group_heads(q, k, v, mask)
    root, chunks = root_scale(scale, q), _chunked(q, k, v, mask, window)
    xp, (d, d_v) = array_namespace(q), (q.shape[-1], v.shape[-1])
    mean, v_mean = chunks.mean(chunks.k), chunks.mean(chunks.v)
    apart, v_apart = (
        chunks.seen(x - y[..., None, :]) for x, y in ((chunks.k, mean), (chunks.v, v_mean))
    )
    share = xp.matrix_transpose(apart) / xp.maximum(chunks.size, xp.ones_like(chunks.size))
    cov, cross = share @ apart, share @ v_apart  # (..., C, d, d) and (..., C, d, d_v)
    # q . k + q^T cov q / 2 is a product with features q and q q^T of the query.
    flat = [xp.reshape(x, (*x.shape[:-2], x.shape[-2] * x.shape[-1])) for x in (cov / 2, cross)]
    far_k, far_v = _joined([mean, flat[0]])[..., None, :, :], _joined([v_mean, flat[1]])
    bias, near, found = chunks.log_size[..., None, None, :], chunks.near(root * root, causal), []
    for some in blocks(
        0, chunks.q.shape[-3], max(1, math.prod(block_shape(q)) // (window * d * d))
    ):
        x = root * root * chunks.q[..., some, :, :]
        square = xp.reshape(x[..., :, None] * x[..., None, :], (*x.shape[:-1], d * d))
        far = attend(
            *(xp.concat([x, square], axis=-1), far_k, far_v[..., None, :, :]),
            bias=bias,
            mask=chunks.others(some, causal),
        )
        plain, turned = far.out[..., :d_v], far.out[..., d_v:]
        turned = xp.reshape(turned, (*turned.shape[:-1], d, d_v))
        far = Attended(plain + xp.sum(x[..., None] * turned, axis=-2), far.lse)
        of_some = Attended(near.out[..., some, :, :], near.lse[..., some, :])
        found.append(merge(of_some, far).out)
    return ungroup(chunks.joined(xp.concat(found, axis=-3) if found else near.out))


@as_written
def local_random_feature_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    window: tuple[int | None, int | None],
    omega: Array | None = None,
    num_features: int | None = None,
    coupling: str = "iid",
    proposal: sampling.Gaussian | sampling.Mixture | None = None,
    rng: Any = None,
    scale: float | None = None,
    mask: Array | None = None,
    causal: bool = False,
) -> Array:
    r"""Attend to near keys exactly, and to all others through random features.

    .. math::
        \mathrm{out}_i = \frac{\sum_{j \in E_i} e^{q_i \cdot k_j} v_j
                               + \sum_{j \notin E_i} \hat\kappa_{ij} v_j}
                              {\sum_{j \in E_i} e^{q_i \cdot k_j}
                               + \sum_{j \notin E_i} \hat\kappa_{ij}}, \qquad
        \hat\kappa_{ij} = \frac1S \sum_s w_s \, \xi(q_i, \omega_s) \, \xi(k_j, \omega_s)

    where E_i are the keys in the window of query i, and w are the importance weights of drawn
    frequencies. Both sums are unbiased, their ratio is not. Linear in n and m. Near and far
    fields: Chen et al., arXiv:2110.15343; Zhang et al., arXiv:2410.10254.

    Parameters
    ----------
    q, k, v, omega, num_features, coupling, proposal, rng, scale, mask, causal
        As in `random_feature_attention`, with positive features.
    window : pair of int or None
        (left, right): key j is in E_i if i + m - n - left <= j <= i + m - n + right. None is no
        limit on that side.

    Returns
    -------
    array, shape (..., n, d_v)
        Same namespace, dtype and device as `q`. Rows that see no key are 0.

    Raises
    ------
    TypeError, ValueError
        As in `random_feature_attention`, and if `window` is not such a pair.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import local_random_feature_attention
    >>> q, k, v = np.ones((2, 1)), np.array([[0.0], [1.0]]), np.array([[0.0], [1.0]])
    >>> omega = np.array([[1.5]])
    >>> local_random_feature_attention(q, k, v, omega=omega, window=(None, 0))
    array([[0.88079708],
           [0.73105858]])
    """
    sides = _validate.window(window)
    found = arranged(
        q, k, v, omega=omega, num_features=num_features, coupling=coupling, proposal=proposal,
        rng=rng, scale=scale, mask=mask, causal=causal,
    )  # fmt: skip
    q, keys, samples, root, ungroup = found
    done = attend(
        *(q, keys.k, keys.v),
        mask=keys.mask,
        causal=causal,
        scale=root * root,
        options=Options(sides),
    )
    of_query = root * root * square_norm(q) / 2 + math.log(samples.omega.shape[-2])
    for far in _far(q, samples, keys, causal, sides):
        done = merge(done, Attended(far.out, far.lse - of_query))
    return ungroup(done.out)


def _far(
    q: Array,
    samples: Samples,
    keys: Keys,
    causal: bool,
    window: tuple[int | None, int | None],
) -> Iterator[Attended]:
    """Read the keys before the window, and those after it, through random features."""
    (left, right), (n, m), xp = window, (q.shape[-2], keys.k.shape[-2]), array_namespace(q)
    if keys.differ:
        band = Options(window).band(n, m, False)
        near = band.visible(slice(0, n), slice(0, m), device(q), xp)
        if near is not None:
            yield two_hops(q, samples, keys._replace(mask=keys.mask & ~near), causal)
        return
    if left is not None:
        yield causal_attention(q, keys.tokens(0, m - left - 1), Exponential(samples))
    if right is not None and not causal:
        # The other way round the last are the first, and the keys after become those before.
        mask = None if keys.mask is None else reverse(keys.mask, -1)
        turned = keys._replace(k=reverse(keys.k, -2), v=reverse(keys.v, -2), mask=mask)
        before = _padded(turned, n - right - 1)
        after = causal_attention(reverse(q, -2), before, Exponential(samples))
        yield Attended(reverse(after.out, -2), reverse(after.lse, -1))


def _padded(keys: Keys, count: int) -> Keys:
    """The first `count` keys, with hidden ones after them if there are fewer."""
    m, xp = keys.k.shape[-2], array_namespace(keys.k)
    if count <= m:
        return keys.tokens(0, count)
    mask = xp.ones((1, m), dtype=xp.bool, device=device(keys.k)) if keys.mask is None else keys.mask
    rows = xp.matrix_transpose(_rows(xp.matrix_transpose(mask), 0, count))
    return Keys(_rows(keys.k, 0, count), _rows(keys.v, 0, count), rows, keys.half)


class _Chunks(NamedTuple):
    """Queries, and the keys of their chunks; keys of all chunks."""

    q: Array  # (..., B, w, d)
    own: tuple[Array, Array, Array | None]  # (..., B, w, d), (..., B, w, d_v), (..., B, 1, w)
    k: Array  # (..., C, w, d)
    v: Array  # (..., C, w, d_v)
    mask: Array | None  # (..., C, 1, w)
    size: Array  # keys that are seen in each chunk, (..., C, 1, 1)
    mean_query: Array  # (..., C, d), 0 of none
    first: int  # chunk of the first query, which may be before that of the first key
    ahead: int  # first query of a chunk of queries, in the chunk of its keys
    rows: slice  # of the chunks, where the queries are

    @property
    def log_size(self) -> Array:
        """Log of the number of keys seen in each chunk, (..., C)."""
        xp, size = array_namespace(self.k), self.size[..., 0, 0]
        return xp.where(size > 0, xp.log(xp.where(size > 0, size, 1.0)), -math.inf)

    def seen(self, x: Array) -> Array:
        """Rows (..., C, w, d) of keys that are seen, 0 in place of others."""
        xp = array_namespace(x)
        return x if self.mask is None else xp.where(xp.matrix_transpose(self.mask), x, 0.0)

    def mean(self, x: Array) -> Array:
        """Mean over the keys that are seen in each chunk, (..., C, d); 0 of none."""
        xp = array_namespace(x)
        total = xp.sum(self.seen(x), axis=-2)
        return total / xp.maximum(self.size, xp.ones_like(self.size))[..., 0]

    def near(self, scale: Array, causal: bool) -> Attended:
        """Attend to the keys of the own chunk."""
        k, v, mask = self.own
        options = Options(shift=self.ahead)
        return attend(self.q, k, v, mask=mask, causal=causal, scale=scale, options=options)

    def others(self, some: slice, causal: bool) -> Array:
        """Which chunks some of the chunks of queries see as a whole, (B, 1, C)."""
        xp, home = array_namespace(self.q), device(self.q)
        own = xp.arange(self.first, self.first + self.q.shape[-3], dtype=xp.int32, device=home)
        own, chunk = own[some], xp.arange(self.k.shape[-3], dtype=xp.int32, device=home)
        far = chunk < own[:, None] if causal else chunk != own[:, None]
        return far[:, None, :]

    def joined(self, out: Array) -> Array:
        """Results of the queries, (..., n, d_v)."""
        xp = array_namespace(out)
        shape = (*out.shape[:-3], out.shape[-3] * out.shape[-2], out.shape[-1])
        return xp.reshape(out, shape)[..., self.rows, :]


def _chunked(q: Array, k: Array, v: Array, mask: Array | None, window: int) -> _Chunks:
    """Cut tokens into chunks; the last query is level with the last key."""
    xp, n, m = array_namespace(q), q.shape[-2], k.shape[-2]
    shift, count = m - n, -(-m // window)
    first = shift // window
    start, stop, end = first * window, count * window, count * window - shift

    def cut(x: Array, start: int, stop: int) -> Array:
        x = _rows(x, start, stop)
        return xp.reshape(x, (*x.shape[:-2], (stop - start) // window, window, x.shape[-1]))

    def keys(start: int) -> tuple[Array, Array, Array | None]:
        there = xp.ones((m, 1), dtype=xp.bool, device=device(k))
        there = there if mask is None else there & xp.matrix_transpose(mask)
        seen = None
        if mask is not None or start < 0 or stop > m:
            seen = xp.matrix_transpose(cut(there, start, stop))
        return cut(k, start, stop), cut(v, start, stop), seen

    all_keys = keys(0)
    seen = all_keys[-1]
    size = xp.full((1, 1), window, dtype=q.dtype, device=device(q))
    size = xp.broadcast_to(size, (count, 1, 1))
    if seen is not None:
        size = xp.sum(xp.astype(seen, q.dtype), axis=-1, keepdims=True)
    # Queries of several chunks have places in them; those of one, which may be few, have none.
    few = count - first == 1
    of_queries = q[..., None, :, :] if few else cut(q, start - shift, end)
    places = slice(0, n) if few else slice(shift - start, shift - start + n)
    some = xp.ones((n, 1), dtype=q.dtype, device=device(q))
    some = some[None] if few else cut(some, start - shift, end)
    most = xp.sum(some, axis=-2)
    mean = xp.sum(of_queries, axis=-2) / xp.where(most > 0, most, 1.0)
    mean = _rows(mean, -first, count - first)
    ahead = shift - start if few else 0
    return _Chunks(of_queries, keys(start), *all_keys, size, mean, first, ahead, places)


def _rows(x: Array, start: int, stop: int) -> Array:
    """Rows from `start` to `stop` of x, (..., m, d), and zeros beyond those that there are."""
    xp, m = array_namespace(x), x.shape[-2]
    inside = x[..., max(0, min(start, m)) : max(0, min(stop, m)), :]
    before, after = max(0, min(stop, 0) - start), max(0, stop - max(start, m))
    if not before and not after:
        return inside
    zeros = [
        xp.zeros((*x.shape[:-2], size, x.shape[-1]), dtype=x.dtype, device=device(x))
        for size in (before, after)
    ]
    return xp.concat([zeros[0], inside, zeros[1]], axis=-2)


def _joined(parts: list[Array]) -> Array:
    """Join along the last axis what has other leading axes."""
    xp, lead = array_namespace(*parts), broadcast_lead(*parts)
    return xp.concat([xp.broadcast_to(x, (*lead, *x.shape[-2:])) for x in parts], axis=-1)
