r"""Random-feature attention (RFA), importance-sampled attention and the choice of features.

The positive family is two hops of attention. Samples attend to keys,

.. math::
    (f_s, \log Z_s) = \mathrm{attend}(\omega_s, k, v, \mathrm{bias}_j = -|k_j|^2 / 2),

then queries attend to samples with the normalisers as a bias. The factor exp(-|q|^2/2) cancels.
Everything is in kernel coordinates, sqrt(scale) times the arguments, so that omega ~ N(0, I).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from .. import features, sampling
from ..arrays import checks, qkv
from ..arrays.arithmetic import finite, square_norm
from ..arrays.blocks import some_heads
from ..arrays.heads import group_heads
from ..arrays.library import Array, as_written, constant, root_scale, untraced
from ..engine import signed
from ..engine.attend import Attended, attend
from ..engine.hops import Keys, Samples
from ..engine.lags import attend_by_lags
from ..engine.positive import Positive, two_hops
from ..engine.scores import Scores
from ..engine.signed import Signed
from ..kernels import FEATURES, both_signs
from ..numbers.tape import fixed
from ..typing import ArrayT, Coupling, Features
from .inputs import Options, change_gauge, check_call, choose_frequencies, group_lags, in_heads


@as_written
def random_feature_attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    *,
    omega: Array | None = None,
    log_weight: Array | None = None,
    num_features: int | None = None,
    features: Features = "positive",
    coupling: Coupling = "iid",
    proposal: sampling.Gaussian | sampling.Mixture | None = None,
    square_norms: tuple[Any, Any] | None = None,
    rng: Any = None,
    scale: float | None = None,
    bias: Array | None = None,
    mask: Array | None = None,
    causal: bool = False,
) -> ArrayT:
    r"""Estimate softmax attention from random features of the softmax kernel (RFA, Performer).

    .. math::
        \mathrm{out}_i =
        \frac{\sum_s w_s \, \xi(q_i, \omega_s) \cdot \sum_j \xi(k_j, \omega_s) \, v_j}
             {\sum_s w_s \, \xi(q_i, \omega_s) \cdot \sum_j \xi(k_j, \omega_s)}

    with the positive features xi(x, omega) = exp(omega . x - |x|^2/2) by default. Sources (see
    `refattn.naive`): Random features post, KernelizedAttention; Performers post, attention_hat
    (without its factor 2 pi); Ye 2023, eq. (10); Zheng 2022, RFA. Linear in n and m. Consistent as
    the number of features grows, and biased for any finite number: with positive features it is
    self-normalised importance sampling (SNIS, Zheng 2022) of `randomized_attention`, with w the
    importance weights.

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
        log N(omega; 0, I) - log r(omega) for frequencies from another distribution r; default 0.
    num_features : int, optional
        Number S of frequencies to draw when `omega` is not given.
    features : {"positive", "hyperbolic", "trigonometric"}
        The feature map for each frequency: ``"positive"``; ``"hyperbolic"``, positive features
        of omega and -omega; ``"trigonometric"``, exp(|x|^2/2) [cos omega.x, sin omega.x], whose
        estimated normaliser may vanish or be negative.
    coupling : str, default "iid"
        How drawn frequencies depend on each other; see `sampling.draw`. Heads share frequencies
        unless the proposal is a batch.
    proposal : sampling.Gaussian or sampling.Mixture, optional
        Distribution of drawn frequencies, N(0, I) by default. Queries and keys are put into its
        gauge, if it has one (`adapt.fit`).
    square_norms : pair of floats or arrays of shape (...), optional
        Finite constants for each head in place of |q|^2 and |k|^2 in the features, in kernel
        coordinates: Ye 2023, eqs. (13) to (15), see `moments.mean_plus_trace` and
        `moments.mean_only`. These constants cancel, and so does the true |q|^2, but not |k|^2: the
        estimate is then of softmax_j(q . k_j + |k_j|^2 / 2), or, with trigonometric features, of
        softmax_j(q . k_j - |k_j|^2 / 2), however many features there are. With a `proposal` that
        has a gauge A, the norms are those of A q and A^{-T} k. The values of the constants change
        nothing, so a NaN in them is noticed only in NumPy arrays.
    rng : None, int, numpy.random.Generator or anything numpy.random.default_rng takes
        Source of the drawn frequencies.
    scale : float, optional
        Factor on q . k, 1 / sqrt(d) by default, positive. `q` and `k` are multiplied by its
        square root first: kernel coordinates.
    bias : array, shape (..., n + m - 1), dtype of `q`, optional
        Bias by lag: the weight of query i and key j is times exp(bias[n - 1 + j - i]), in the
        numerator and the normaliser, as relative positions are. -inf hides a lag. The cost is
        O(S d_v n log(n)^2) by FFT from the length on at which pairs, O(n m S), take longer.
    mask : array of bool, broadcasting to (..., n, m), optional
        True where the query attends to the key. A mask that is the same for all queries,
        shape (..., 1, m) or (m,), keeps the cost linear; any other costs O(n m S), and is an error
        with `bias`.
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
        `log_weight` is given without `omega`, if `square_norms` are not finite, or if an option
        is unknown.

    Notes
    -----
    Against exact arithmetic on the same floats the error relative to the largest value is at most C
    eps (1 + the largest of |omega| |q|, |omega| |k| + |k|^2/2), in kernel coordinates, with C as in
    `attend`. With trigonometric features it is relative to the sum of the absolute terms. Nothing
    is added to denominators, nothing is clamped, and positive features are computed as logarithms,
    which do not overflow. |k|^2 must be representable, or the result is NaN.

    Causal attention cuts the tokens into small blocks. Queries use random features for keys of
    earlier blocks, and kernel estimates pair by pair for keys of their own block. Later keys enter
    no sum and no maximum, so changing them leaves earlier outputs the same bit for bit.

    With `bias` (Luo et al., arXiv:2106.12566; Choromanski et al., arXiv:2107.07999) the earlier
    half of the tokens is read by the later half, and so on within halves. A Fourier transform of
    such a tile rounds relative to its largest term, not to each row: the error relative to the sum
    of the absolute terms of a row is about eps e^r sqrt(log2 n), where r is the range of the bias
    over the lags of the tile, less a straight line. float32 is transformed in float64. With NumPy,
    tiles that would lose more than 16 eps to r are evaluated pair by pair. Other libraries do not
    look at values: there digits are lost, up to all, where the bias of long sequences hides lags
    or is steep but no straight line on either side of the query, and where kernels and bias both
    have exponents beyond the range of the dtype.

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
    options = Options(
        scale, mask, causal, omega, log_weight, num_features,
        coupling=coupling, proposal=proposal, rng=rng,
    )  # fmt: skip
    inputs = prepare_random_features(q, k, v, options, features, square_norms)
    q_of, keys, xp, ungroup = inputs.q, inputs.keys, inputs.xp, inputs.ungroup
    waves = trigonometric(inputs, square_norms is None) if features == "trigonometric" else None
    if bias is not None:
        lags = group_lags(bias, q, k, v, mask)
        some = waves or Positive(inputs.samples, xp)
        return ungroup(attend_by_lags(q_of, keys, lags, some, causal, xp))
    if waves is not None:
        return ungroup(signed.linear_attention(q_of, keys, waves, causal))
    return ungroup(two_hops(q_of, inputs.samples, keys, causal, xp).out)


class RfaInputs(NamedTuple):
    """Arguments of random-feature attention: checked, in groups of heads, frequencies drawn.

    Frequencies are times the root of the scale, but for trigonometric features.
    """

    q: Array
    keys: Keys
    samples: Samples
    root: Array
    xp: Any  # the array namespace
    ungroup: Callable[..., Array]

    @property
    def lead(self) -> tuple[int, ...]:
        """Leading axes of the result."""
        return self.keys.lead(self.q, *self.samples)

    def part(self, head: tuple[slice, ...]) -> RfaInputs:
        """Take some heads."""
        q, *samples = (some_heads(x, head) for x in (self.q, *self.samples))
        return self._replace(q=q, keys=self.keys.part(head), samples=Samples(*samples))


def prepare_random_features(
    q: Array,
    k: Array,
    v: Array,
    options: Options,
    features: str = "positive",
    square_norms: Any = None,
) -> RfaInputs:
    """Check arguments of random-feature attention, draw frequencies, and group heads."""
    scale, mask, lead, xp = check_call(q, k, v, options)
    checks.choice("features", features, FEATURES)
    q, k = change_gauge(q, k, options.proposal, lead)
    omega, log_weight = choose_frequencies(options, "num_features", q, lead)
    norms = square_norms is None
    if not norms:
        qkv.two_per_head("square_norms", square_norms, (q, k))
    if features == "hyperbolic":
        omega, log_weight = both_signs(omega, log_weight, xp)
    (q, k, v, omega, log_weight, mask), ungroup = group_heads(
        q, k, v, omega, log_weight[..., None, :], mask
    )
    root = root_scale(scale, q)
    keys, samples = Keys(k, v, mask), Samples(omega, log_weight)
    if features != "trigonometric":
        keys = keys._replace(half=root * root / 2 if norms else None)
        samples = samples._replace(omega=root * omega)
    return RfaInputs(q, keys, samples, root, xp, ungroup)


@as_written
def trigonometric(inputs: RfaInputs, norms: bool) -> Signed:
    """Make trigonometric features, with the weights of the samples on the side of the queries.

    Without `norms` those of the keys count as equal, and cancel: any constant will do.
    """
    (omega, log_weight), xp, root = inputs.samples, inputs.xp, untraced(inputs.root)

    def phi_q(x: Array, arrays: tuple[Array, ...], memory: Any) -> features.Features:
        values, log_scale = features.trusted_waves(x * root, arrays[0], norms)
        return features.Features(values * arrays[1], log_scale)

    def phi_k(x: Array, arrays: tuple[Array, ...], memory: Any) -> features.Features:
        return features.trusted_waves(x * root, arrays[0], norms)

    arrays = (omega, wave_weights(log_weight, xp))
    return Signed(phi_q, phi_k, 2 * omega.shape[-2], xp=xp, arrays=arrays)


def wave_weights(log_weight: Array, xp: Any) -> Array:
    """Return the weights of cosines and sines, up to a factor."""
    largest = xp.max(fixed(log_weight), axis=-1, keepdims=True)  # any factor cancels
    weight = xp.exp(log_weight - finite(largest, xp))
    return xp.concat([weight, weight], axis=-1)


@as_written
def importance_sampled_attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    *,
    omega: Array,
    log_weight: Array | None = None,
    scale: float | None = None,
    mask: Array | None = None,
    causal: bool = False,
) -> ArrayT:
    r"""Estimate softmax attention by importance sampling with the exact normaliser (IS).

    .. math::
        \mathrm{out}_i = \frac1S \sum_s w_s \frac{p_i(\omega_s)}{N(\omega_s; 0, I)} f(\omega_s),
        \qquad \frac{p_i(\omega)}{N(\omega; 0, I)} = \xi(q_i, \omega) \sum_j \xi(k_j, \omega) / Z_i

    with f(omega) = sum_j xi(k_j, omega) v_j / sum_j xi(k_j, omega), xi(x, omega) = exp(omega . x -
    |x|^2/2) and Z_i = sum_j exp(q_i . k_j). Z_i is computed exactly: time O(n m). Unbiased. Ye
    2023, eq. (11); Zheng 2022, importance sampling (see `refattn.naive`).

    Parameters
    ----------
    q, k, v, scale, mask, causal
        As in `random_feature_attention`.
    omega : array, shape (..., S, d)
        Frequencies drawn from some distribution r, in kernel coordinates.
    log_weight : array, shape (..., S), optional
        log w = log N(omega; 0, I) - log r(omega); 0 by default.

    Returns
    -------
    array, shape (..., n, d_v)
        Same namespace, dtype and device as `q`. Rows that see no key are 0. Values are not
        confined to the range of `v`, and overflow where the estimate itself does.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import importance_sampled_attention, sampling
    >>> q, k, v = np.zeros((1, 1)), np.array([[0.0], [0.5]]), np.array([[0.0], [1.0]])
    >>> omega, _ = sampling.draw(100_000, 1, rng=0)
    >>> np.round(importance_sampled_attention(q, k, v, omega=omega), 2)
    array([[0.5]])
    """
    checks.is_array("omega", omega)  # it cannot be drawn
    options = Options(scale, mask, causal, omega, log_weight)
    inputs = prepare_random_features(q, k, v, options)

    def of_heads(some: RfaInputs) -> Array:
        done, log_ratio = importance_ratio(some, causal)
        half = some.xp.exp(log_ratio / 2)[..., None]
        return half * done.out * half  # the ratio alone may overflow

    return inputs.ungroup(in_heads(inputs, of_heads, q, v, inputs.xp))


@as_written
def importance_ratio(inputs: RfaInputs, causal: bool) -> tuple[Attended, Array]:
    """Return RFA, and the log of its estimated normaliser over the exact one.

    The ratio is what importance sampling multiplies RFA by; its log is -inf without keys.
    """
    q, keys, samples, root, xp, _ = inputs
    k, v, mask, _ = keys
    done = two_hops(q, samples, keys, causal, xp)
    exact = attend(q, k, v[..., :0], Scores(root * root, mask=mask, causal=causal))
    empty = exact.lse == -math.inf
    log_estimate, log_exact = (xp.where(empty, 0.0, x) for x in (done.lse, exact.lse))
    log_size = xp.log(constant(samples.omega.shape[-2], q))
    log_ratio = log_estimate - root * root * square_norm(q) / 2 - log_size - log_exact
    return done, xp.where(empty, -math.inf, log_ratio)
