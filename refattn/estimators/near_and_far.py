r"""Estimators that attend exactly to near keys and approximately to the others.

In `eva_attention` and `second_order_attention` keys are cut into chunks of `window`, near are
those of the query's own chunk, and each other chunk is one term. In
`local_random_feature_attention` near are the keys in a sliding window.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import numpy as np

from .. import sampling
from ..arrays import checks, frequencies, qkv
from ..arrays.arithmetic import square_norm
from ..arrays.blocks import WHOLE, blocks, part, room, some_heads
from ..arrays.heads import group_heads
from ..arrays.library import Array, as_written, constant, device, fused, reverse, root_scale
from ..engine.attend import Attended, attend, merge
from ..engine.chunks import Chunks, attend_in_bands, cut_chunks, slice_rows
from ..engine.hops import Keys, sample
from ..engine.positive import two_hops
from ..engine.scores import Scores
from ..numbers.primitives import retraced
from ..typing import ArrayT, Coupling
from .inputs import Options, check_call, in_heads
from .rfa import RfaInputs, prepare_random_features

Sides = tuple[int | None, int | None]


def as_it_is(x: Array, core: int = 2) -> Array:
    """Give back what has no groups of heads."""
    return x


@as_written
def eva_attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    *,
    window: int,
    omega: Array | Literal["mean"] | None = None,
    rng: Any = None,
    log_size: bool = True,
    scale: float | None = None,
    mask: Array | None = None,
    causal: bool = False,
) -> ArrayT:
    r"""Attend to the keys of the query's chunk, and to one summary of each other chunk (EVA).

    .. math::
        \mathrm{out}_i = \frac{\sum_{j \in E_i} e^{q_i \cdot k_j} v_j
                               + \sum_c |P_c| \, e^{q_i \cdot \bar k_c} f_c(\omega_c)}
                              {\sum_{j \in E_i} e^{q_i \cdot k_j}
                               + \sum_c |P_c| \, e^{q_i \cdot \bar k_c}}, \qquad
        f_c(\omega) = \frac{\sum_{j \in P_c} \xi(k_j, \omega) \, v_j}
                           {\sum_{j \in P_c} \xi(k_j, \omega)}

    with E_i the keys that query i sees in its own chunk, P_c those of another chunk c and kbar_c
    their mean, omega_c ~ N(mean query + mean key of chunk c, I) in kernel coordinates, and
    xi(x, omega) = exp(omega . x - |x|^2/2). Zheng et al., arXiv:2302.04542, who leave out the
    number |P_c| of keys in a chunk: without it a chunk counts as one key. Biased: the denominator
    only approximates the sum over all keys, and omega_c is not drawn from the target of a query.
    Exact if one chunk holds all queries and keys. Time O(n (w + m / w)).

    Parameters
    ----------
    q, k, v
        As in `attend`: shapes (..., n, d), (..., m, d), (..., m, d_v), all float32 or float64.
    window : int
        Number w of keys of a chunk: key j is in chunk floor(j / w), and query i is in the chunk of
        key i + m - n.
    omega : array, shape (..., C, d), or "mean", optional
        A frequency for each of the ceil(m / w) chunks, in kernel coordinates, instead of drawn
        ones; or ``"mean"``: the mean of each distribution, with which nothing is random.
    rng, scale
        As in `random_feature_attention`.
    log_size : bool, default True
        Whether a summary counts once for each visible key of its chunk, or only once.
    mask : array of bool, broadcasting to (..., 1, m), optional
        True where the queries attend to the key: the same for all queries.
    causal : bool, default False
        Query i sees key j only if j <= i + m - n, and summaries only of the chunks before its own.

    Returns
    -------
    array, shape (..., n, d_v)
        Same namespace, dtype and device as `q`. Rows that see no key are 0.

    Raises
    ------
    TypeError, ValueError
        As in `attend`; if `window` is not a positive integer, if the mask differs between queries,
        or if `omega` does not have one frequency for each chunk.

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
    options = Options(scale, mask, causal, omega, rng=rng)
    inputs = prepare_chunks(q, k, v, options, window, log_size)

    def of_heads(some: EvaInputs) -> Array:
        return some.chunks.joined(attend_chunks(some).out)

    return inputs.ungroup(in_heads(inputs, of_heads, q, v, inputs.xp))


class EvaInputs(NamedTuple):
    """Checked arguments of `eva_attention`, heads in groups, and what summaries are made of."""

    chunks: Chunks
    mean: Array  # of the keys of each chunk, (..., C, d)
    omega: Array  # times the root of the scale
    bias: Array  # log of how often each summary counts, (..., C)
    root: Array
    xp: Any  # the array namespace
    causal: bool = True
    ungroup: Callable[..., Array] = as_it_is

    @property
    def lead(self) -> tuple[int, ...]:
        """Leading axes of the result."""
        return np.broadcast_shapes(self.chunks.lead, tuple(self.omega.shape[:-2]))

    def part(self, head: tuple[slice, ...]) -> EvaInputs:
        """Take some heads."""
        mean, omega = (some_heads(x, head) for x in (self.mean, self.omega))
        bias, chunks = part(self.bias, (*head, WHOLE)), self.chunks.part(head)
        return self._replace(chunks=chunks, mean=mean, omega=omega, bias=bias)

    @property
    def keys(self) -> Keys:
        """The keys of each chunk, as its frequency sees them."""
        chunks = self.chunks
        return Keys(chunks.k, chunks.v, chunks.mask, self.root * self.root / 2)

    def sampled(self) -> Attended:
        """What the frequency of each chunk sees of its keys, (..., C, 1, d_v)."""
        return sample(self.omega[..., None, :], self.keys)

    def far(self, f: Array) -> tuple[Array, Array, Scores]:
        """Summaries f (..., C, d_v) as keys and values, and how queries attend to them."""
        bias, mask = self.bias[..., None, None, :], self.chunks.others(WHOLE, self.causal)
        scores = Scores(self.root * self.root, bias, mask)
        return self.mean[..., None, :, :], f[..., None, :, :], scores


@as_written
def prepare_chunks(
    q: Array, k: Array, v: Array, options: Options, window: int, log_size: bool
) -> EvaInputs:
    """Check arguments of `eva_attention`, draw frequencies, and group heads."""
    scale, mask, lead, xp = check_call(q, k, v, options)
    mask, (window, count) = qkv.one_row(mask, k), qkv.cut_evenly("window", window, q, k)
    checks.flag("log_size", log_size)
    omega, noise = options.omega, None
    if frequencies.at_means(omega, options.rng):
        omega = None
    elif omega is not None:
        omega = frequencies.of_chunks(omega, count, q, lead)
    else:
        z = checks.generator(options.rng).standard_normal((count, q.shape[-1]))
        noise = constant(z, q)
    (q, k, v, mask, omega), ungroup = group_heads(q, k, v, mask, omega)
    chunks = cut_chunks(q, k, v, mask, window)
    inputs = summaries_of(chunks, root_scale(scale, q), omega, noise, log_size, xp)
    return inputs._replace(causal=options.causal, ungroup=ungroup)


@as_written
def summaries_of(
    chunks: Chunks, root: Array, omega: Array | None, noise: Array | None, log_size: bool, xp: Any
) -> EvaInputs:
    """Prepare summaries at frequencies given or those of the means, with their noise."""
    mean = chunks.mean(chunks.k)
    if omega is None:
        omega = root * (chunks.mean_query + mean)
        omega = omega if noise is None else omega + noise
    bias = chunks.log_size
    if not log_size:
        bias = xp.where(bias == -math.inf, bias, 0.0)
    return EvaInputs(chunks, mean, root * omega, bias, root, xp)


@as_written
def attend_chunks(inputs: EvaInputs) -> Attended:
    """Attend to the keys of the own chunk, and to summaries of others."""
    near, f = inputs.chunks.near(inputs.root * inputs.root, inputs.causal), inputs.sampled().out
    return merge(near, attend(inputs.chunks.q, *inputs.far(f[..., 0, :])))


@as_written
def second_order_attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    *,
    window: int,
    scale: float | None = None,
    mask: Array | None = None,
    causal: bool = False,
) -> ArrayT:
    r"""Attend to the keys of the query's chunk, and to the moments of each other chunk.

    .. math::
        \sum_{j \in P_c} e^{q \cdot k_j} v_j \approx
        |P_c| \, e^{q \cdot \bar k_c + q^T \Sigma_c q / 2}
        \bigl(\bar v_c + \mathrm{Cov}_c(v, k) \, q\bigr)

    with P_c the keys that the query sees in another chunk c, and the same without the last factor
    for the sum of e^(q . k_j). For keys and values with a joint normal distribution of these
    moments, it is the expected sum. The divisor of the covariances is |P_c|. Nothing is random; the
    error comes from the third and higher cumulants of each chunk. Exact if one chunk holds all
    queries and keys. Time O(n (w + m d (d + d_v) / w)).

    Parameters
    ----------
    q, k, v, window, scale, mask, causal
        As in `eva_attention`.

    Returns
    -------
    array, shape (..., n, d_v)
        Same namespace, dtype and device as `q`. Rows that see no key are 0. Values are not
        confined to the range of `v`.

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
    inputs = prepare_moments(q, k, v, Options(scale, mask, causal), window)

    def of_heads(some: _MomentInputs) -> Array:
        return some.chunks.joined(attend_moments(some.moments()).out)

    return inputs.ungroup(in_heads(inputs, of_heads, q, v, inputs.chunks.xp))


class ChunkMoments(NamedTuple):
    """Checked arguments of `second_order_attention`, heads in groups, and moments of chunks."""

    chunks: Chunks
    far_k: Array  # means and half the covariances of keys, (..., C, d + d d)
    far_v: Array  # means of values and their covariances with keys, (..., C, d_v + d d_v)
    root: Array
    xp: Any  # the array namespace
    causal: bool = True
    ungroup: Callable[..., Array] = as_it_is

    def blocks(self) -> Iterator[slice]:
        """Some chunks of queries at once, of all heads."""
        q = self.chunks.q
        row = max(1, math.prod(q.shape[:-3]) * q.shape[-2] * q.shape[-1] ** 2)
        return blocks(0, q.shape[-3], max(1, room(q) // row))

    def far(self, some: slice) -> tuple[Array, Array, Scores]:
        """Keys and values that stand for chunks, and how some chunks of queries attend to them."""
        bias, mask = self.chunks.log_size[..., None, None, :], self.chunks.others(some, self.causal)
        return self.far_k[..., None, :, :], self.far_v[..., None, :, :], Scores(None, bias, mask)


def squared(x: Array, xp: Any) -> tuple[Array, Array]:
    """Return queries x that have the scale in them, and their features x and x x^T.

    q . k + q^T cov q / 2 is a product with these.
    """
    square = x[..., :, None] * x[..., None, :]
    square = xp.reshape(square, (*x.shape[:-1], x.shape[-1] ** 2))
    return x, xp.concat([x, square], axis=-1)


def _of_values(out: Array, d: int, xp: Any) -> tuple[Array, Array]:
    """Split into means (..., d_v) of values, and their covariances with keys, (..., d, d_v)."""
    d_v = out.shape[-1] // (1 + d)
    turned = xp.reshape(out[..., d_v:], (*out.shape[:-1], d, d_v))
    return out[..., :d_v], turned


@as_written
def attend_squared(
    x: Array, features: Array, k: Array, v: Array, scores: Scores, xp: Any
) -> Attended:
    """Attend to moments of chunks, from queries and features of `squared`."""
    far = attend(features, k, v, scores)
    plain, turned = _of_values(far.out, x.shape[-1], xp)
    turned = xp.sum(x[..., None] * turned, axis=-2)
    return Attended(plain + turned, far.lse)


class _MomentInputs(NamedTuple):
    """Checked arguments of `second_order_attention`, heads in groups."""

    chunks: Chunks
    root: Array
    causal: bool
    ungroup: Callable[..., Array]

    @property
    def lead(self) -> tuple[int, ...]:
        """Leading axes of the result."""
        return self.chunks.lead

    def part(self, head: tuple[slice, ...]) -> _MomentInputs:
        """Take some heads."""
        return self._replace(chunks=self.chunks.part(head))

    def moments(self) -> ChunkMoments:
        moments = moments_of(self.chunks, self.root, self.chunks.xp)
        return moments._replace(causal=self.causal, ungroup=self.ungroup)


@as_written
def prepare_moments(q: Array, k: Array, v: Array, options: Options, window: int) -> _MomentInputs:
    """Check arguments of `second_order_attention`, and group heads."""
    scale, mask, _, _ = check_call(q, k, v, options)
    mask, (window, _) = qkv.one_row(mask, k), qkv.cut_evenly("window", window, q, k)
    (q, k, v, mask), ungroup = group_heads(q, k, v, mask)
    chunks = cut_chunks(q, k, v, mask, window)
    return _MomentInputs(chunks, root_scale(scale, q), options.causal, ungroup)


@as_written
def moments_of(chunks: Chunks, root: Array, xp: Any) -> ChunkMoments:
    """Compute means and covariances of the keys and values of each chunk."""
    mean, v_mean = chunks.mean(chunks.k), chunks.mean(chunks.v)
    apart, v_apart = (
        chunks.seen(x - y[..., None, :]) for x, y in ((chunks.k, mean), (chunks.v, v_mean))
    )
    share = xp.matrix_transpose(apart) / xp.maximum(chunks.size, xp.ones_like(chunks.size))
    cov, cross = share @ apart, share @ v_apart  # (..., C, d, d) and (..., C, d, d_v)
    cov, cross = (
        xp.reshape(x, (*x.shape[:-2], x.shape[-2] * x.shape[-1])) for x in (cov / 2, cross)
    )
    v_mean = xp.broadcast_to(v_mean, (*cross.shape[:-1], v_mean.shape[-1]))  # values of all heads
    far_k, far_v = xp.concat([mean, cov], axis=-1), xp.concat([v_mean, cross], axis=-1)
    return ChunkMoments(chunks, far_k, far_v, root, xp)


@retraced
def _attend_far(q: Array, root: Array, k: Array, v: Array, scores: Scores, xp: Any) -> Attended:
    """Let some queries attend to moments."""
    return attend_squared(*squared(root * root * q, xp), k, v, scores, xp)


@as_written
def attend_moments(moments: ChunkMoments) -> Attended:
    """Attend to the keys of the own chunk, and to the moments of others."""
    near, done = moments.chunks.near(moments.root * moments.root, moments.causal), []
    for some in moments.blocks():
        x, (k, v, scores) = moments.chunks.q[..., some, :, :], moments.far(some)
        far = _attend_far(x, moments.root, k, v, scores, moments.xp)
        done.append(merge(Attended(near.out[..., some, :, :], near.lse[..., some, :]), far))
    if not done:
        return near
    out, lse = zip(*done, strict=True)
    return Attended(moments.xp.concat(list(out), axis=-3), moments.xp.concat(list(lse), axis=-2))


@as_written
def local_random_feature_attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    *,
    window: tuple[int | None, int | None],
    omega: Array | None = None,
    num_features: int | None = None,
    coupling: Coupling = "iid",
    proposal: sampling.Gaussian | sampling.Mixture | None = None,
    rng: Any = None,
    scale: float | None = None,
    mask: Array | None = None,
    causal: bool = False,
) -> ArrayT:
    r"""Attend to near keys exactly, and to all other keys through random features.

    .. math::
        \mathrm{out}_i = \frac{\sum_{j \in E_i} e^{q_i \cdot k_j} v_j
                               + \sum_{j \notin E_i} \hat\kappa_{ij} v_j}
                              {\sum_{j \in E_i} e^{q_i \cdot k_j}
                               + \sum_{j \notin E_i} \hat\kappa_{ij}}, \qquad
        \hat\kappa_{ij} = \frac1S \sum_s w_s \, \xi(q_i, \omega_s) \, \xi(k_j, \omega_s)

    where E_i are the keys in the window of query i, w are the importance weights of drawn
    frequencies, and xi(x, omega) = exp(omega . x - |x|^2/2). Both sums are unbiased, but their
    ratio is not. Linear in n and m. Chen et al., arXiv:2110.15343, and Zhang et al.,
    arXiv:2410.10254, also treat near and far keys differently.

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
    options = Options(
        scale, mask, causal, omega,
        num_features=num_features, coupling=coupling, proposal=proposal, rng=rng,
    )  # fmt: skip
    inputs, sides = prepare_random_features(q, k, v, options), qkv.window(window)

    def of_heads(some: RfaInputs) -> Array:
        return attend_locally(some, sides, causal).out

    return inputs.ungroup(in_heads(inputs, of_heads, q, v, inputs.xp))


class Field(NamedTuple):
    """Keys before or after the windows, which queries read through random features."""

    q: Array
    keys: Keys
    causal: bool
    turned: bool = False  # whether the last tokens are the first

    def turn(self, done: Attended) -> Attended:
        """Queries the other way round, if they are."""
        if not self.turned:
            return done
        return Attended(reverse(done.out, -2), reverse(done.lse, -1))


def near_scores(keys: Keys, root: Array, sides: Sides, causal: bool) -> Scores:
    """How queries attend to the keys in their windows."""
    return Scores(root * root, mask=keys.mask, causal=causal, window=sides)


def lacking(q: Array, root: Array, count: int, xp: Any) -> Array:
    """Compute what normalisers of features lack to be those of keys, |q|^2 / 2 + log S."""
    return _log_of_factor(square_norm(q), root, constant(count, q), xp)


@fused
def _log_of_factor(square: Array, root: Array, count: Array, xp: Any) -> Array:
    return root * root * square / 2 + xp.log(count)


@as_written
def attend_locally(inputs: RfaInputs, sides: Sides, causal: bool) -> Attended:
    """Attend to near keys exactly, and to others through random features."""
    q, keys, samples, root, xp, _ = inputs
    done = attend_in_bands(q, keys.k, keys.v, near_scores(keys, root, sides, causal))
    of_query = lacking(q, root, samples.omega.shape[-2], xp)
    for field in _far_fields(q, keys, causal, sides, xp):
        out, lse = field.turn(two_hops(field.q, samples, field.keys, field.causal, xp))
        done = merge(done, Attended(out, lse - of_query))
    return done


def _far_fields(q: Array, keys: Keys, causal: bool, sides: Sides, xp: Any) -> Iterator[Field]:
    """Yield the keys before the windows, and those after them."""
    (left, right), (n, m) = sides, (q.shape[-2], keys.k.shape[-2])
    if keys.differ:
        near = Scores(window=sides).band(n, m).visible(slice(0, n), slice(0, m), device(q), xp)
        if near is not None:
            yield Field(q, keys._replace(mask=keys.mask & ~near), causal)
        return
    if left is not None:
        yield Field(q, keys.tokens(0, m - left - 1), True)
    if right is not None and not causal:
        # The other way round the last are the first, and the keys after become those before.
        mask = None if keys.mask is None else reverse(keys.mask, -1)
        turned = keys._replace(k=reverse(keys.k, -2), v=reverse(keys.v, -2), mask=mask)
        yield Field(reverse(q, -2), _first_keys(turned, n - right - 1, xp), True, turned=True)


def _first_keys(keys: Keys, count: int, xp: Any) -> Keys:
    """Take the first `count` keys, with hidden ones after them if there are fewer."""
    m = keys.k.shape[-2]
    if count <= m:
        return keys.tokens(0, count)
    mask = xp.ones((1, m), dtype=xp.bool, device=device(keys.k)) if keys.mask is None else keys.mask
    mask = xp.matrix_transpose(slice_rows(xp.matrix_transpose(mask), 0, count, xp))
    return Keys(slice_rows(keys.k, 0, count, xp), slice_rows(keys.v, 0, count, xp), mask, keys.half)
