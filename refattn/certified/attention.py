"""Compute attention, its gradients and random-feature attention with proven error bounds."""

from __future__ import annotations

from typing import Any

from ..arrays import checks, frequencies, qkv
from ..arrays.heads import Alibi, group_heads, grouped_lead
from ..arrays.library import Array, as_written
from ..engine.scores import Scores
from ..numbers.doubled import Pair
from ..numbers.pairs import to_pairs
from .assumptions import require
from .blocks import PairedAttention, attend_in_pairs, bound_of, pull_back_in_pairs, sum_repeated
from .inputs import (
    as_number,
    check_double,
    check_parts,
    first_part,
    number_in_pairs,
    power_in_pairs,
    prepare_pairs,
)
from .results import Certified, Gradients


@as_written
def attend(
    q: Array | Pair,
    k: Array | Pair,
    v: Array | Pair,
    *,
    bias: Array | Pair | Alibi | None = None,
    mask: Array | None = None,
    causal: bool = False,
    scale: float = 1.0,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
) -> Certified:
    r"""Compute softmax attention and its log normaliser in pairs of float64, with a proven bound.

    .. math::
        s_{ij} = \mathrm{cap}(\mathrm{scale}\; q_i \cdot k_j) + \mathrm{bias}_{ij}, \qquad
        \mathrm{lse}_i = \log \Bigl( e^{\mathrm{sink}} + \sum_j e^{s_{ij}} \Bigr), \qquad
        \mathrm{out}_i = \sum_j e^{s_{ij} - \mathrm{lse}_i} \, v_j

    as `refattn.attend` does. The arguments count as exact numbers.

    Parameters
    ----------
    q, k, v : array or Pair, shapes (..., n, d), (..., m, d), (..., m, d_v), float32 or float64
        As in `refattn.attend`. A pair of float64 counts as the sum of both.
    bias : array or Pair, broadcasting to (..., n, m), or Alibi, optional
        As in `refattn.attend`.
    mask, causal, scale, window, softcap, sinks
        As in `refattn.attend`.

    Returns
    -------
    Certified
        Pairs of float64 whatever the dtype of `q`, in its library and on its device. The bound is
        below 2^-60 of the sum of \|p v\|, the absolute terms of an output, for logits up to 1e5, d
        up to 4096 and m up to 2^16, unless some values are 2^20 times others. A query that sees no
        key, and no sink, has out 0 and lse -inf, without error. Where the bound is infinity, the
        result is that of `refattn.attend`: in rows that infinities or nan reach, and for exponents
        beyond about 1e15. A cap c adds about 2^-67 c to the errors of scores.

    Raises
    ------
    TypeError, ValueError
        As in `refattn.attend`; also TypeError for longdouble.
    RuntimeError
        If the library or the device does not meet the assumptions of the proof (see `self_test`) or
        has no float64, or if values are not known yet, as under `jax.jit`.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import certified
    >>> q, k, v = np.ones((1, 1)), np.array([[0.0], [1.0]]), np.array([[0.0], [1.0]])
    >>> out, lse, error = certified.attend(q, k, v)
    >>> out.hi, bool(error[0, 0] < 2**-66)  # e / (1 + e) = 0.73105857863000487925...
    (array([[0.73105858]]), True)
    >>> int((int(out.hi[0, 0] * 2**60) + int(out.lo[0, 0] * 2**60)) * 10**18 >> 60)
    731058578630004879
    """
    checks.real("scale", scale, like=first_part(q))
    factor = None if scale == 1 else number_in_pairs(scale)
    scores = Scores(None, bias, mask, causal, window, softcap, sinks)
    problem, ungroup = prepare_pairs(q, k, v, factor, scores)
    return _undo_groups(*attend_in_pairs(problem), ungroup)


@as_written
def softmax_attention(
    q: Array | Pair,
    k: Array | Pair,
    v: Array | Pair,
    *,
    scale: float | None = None,
    bias: Array | Pair | Alibi | None = None,
    mask: Array | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
) -> Certified:
    r"""Compute exact softmax attention in pairs of float64, with a proven error bound.

    .. math:: \mathrm{out}_i = \sum_j \mathrm{softmax}_j(\mathrm{scale}\; q_i \cdot k_j) \, v_j

    Sources (see `refattn.naive`): Random features post, Attention(Q, K, V); Ye 2023, eq. (3); Zheng
    2022, SoftmaxAttn.

    Parameters
    ----------
    q, k, v, bias, mask, causal, window, softcap, sinks
        As in `attend`.
    scale : float, optional
        Factor on q . k, 1 / sqrt(d) by default: the root in pairs, not in float64.

    Returns
    -------
    Certified
        As for `attend`.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import certified
    >>> q = k = np.array([[0.0], [1.0]])
    >>> found = certified.softmax_attention(q, k, np.array([[0.0], [4.0]]))
    >>> found.rounded()
    Rounded(out=array([[2.        ],
           [2.92423431]]), proven=array([[ True],
           [ True]]))
    """
    scores = Scores(None, bias, mask, causal, window, softcap, sinks)
    problem, ungroup = prepare_pairs(q, k, v, _scale_or_default(scale, q), scores)
    return _undo_groups(*attend_in_pairs(problem), ungroup)


@as_written
def softmax_gradients(
    q: Array | Pair,
    k: Array | Pair,
    v: Array | Pair,
    d_out: Array | Pair,
    *,
    scale: float | None = None,
    bias: Array | Pair | Alibi | None = None,
    mask: Array | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    sinks: Array | None = None,
) -> Gradients:
    r"""Compute gradients of exact softmax attention in pairs of float64, with proven error bounds.

    .. math::
        \bar v_j = \sum_i p_{ij} g_i, \qquad
        \bar s_{ij} = p_{ij} (g_i \cdot v_j - g_i \cdot \mathrm{out}_i), \qquad
        \bar q_i = \mathrm{scale} \sum_j \bar s_{ij} k_j, \quad
        \bar k_j = \mathrm{scale} \sum_i \bar s_{ij} q_i

    for the cotangent g of the output: this formula over pairs.

    Parameters
    ----------
    q, k, v, scale, bias, mask, causal, window, sinks
        As in `softmax_attention`.
    d_out : array or Pair, shape (..., n, d_v), float32 or float64
        Cotangent of the output.

    Returns
    -------
    Gradients
        Of `q`, `k` and `v`, summed over heads that share them.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import certified
    >>> q, k, v = np.array([[1.0]]), np.array([[0.0], [0.0]]), np.array([[0.0], [4.0]])
    >>> found = certified.softmax_gradients(q, k, v, np.ones((1, 1)))
    >>> found.k.value.hi, bool(found.k.error.max() < 2.0**-60)
    (array([[-1.],
           [ 1.]]), True)
    """
    factor = _scale_or_default(scale, q)
    problem, _ = prepare_pairs(
        q, k, v, factor, Scores(None, bias, mask, causal, window, None, sinks)
    )
    if isinstance(d_out, tuple):
        check_parts("d_out", d_out)
    (q1, k1, v1), g1 = map(first_part, (q, k, v)), first_part(d_out)
    checks.is_array("d_out", g1)
    checks.same_home("d_out", g1, "q", q1)
    checks.arrays(2, d_out=g1)
    check_double(g1, "d_out")
    shape = (*grouped_lead(q1, k1, v1), q1.shape[-2], v1.shape[-1])
    if tuple(g1.shape) != shape:
        raise ValueError(
            f"`d_out` must have the shape of the output, {shape}, got {tuple(g1.shape)}."
        )
    (*_, g), _ = group_heads(q1, k1, v1, to_pairs(d_out))
    pulled = pull_back_in_pairs(problem, g)
    pulled[0] = pulled[0] * as_number(factor, pulled[0])
    wholes = zip(pulled, problem[:3], (q1, k1, v1), strict=True)
    return Gradients(*(bound_of(sum_repeated(x, y.shape, tuple(z.shape))) for x, y, z in wholes))


@as_written
def random_feature_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    omega: Array,
    log_weight: Array | None = None,
    features: str = "positive",
    scale: float | None = None,
    mask: Array | None = None,
) -> Certified:
    r"""Compute random-feature attention in pairs of float64, with a proven error bound.

    .. math::
        \mathrm{out}_i = \frac{\sum_s w_s \xi(q_i, \omega_s) \sum_j \xi(k_j, \omega_s) \, v_j}
                              {\sum_s w_s \xi(q_i, \omega_s) \sum_j \xi(k_j, \omega_s)}, \qquad
        \xi(x, \omega) = e^{\omega \cdot x - |x|^2 / 2}

    where x is multiplied by the root of the scale first. `attend` is called twice: samples attend
    to keys with the bias -|k|^2 / 2, and queries attend to samples with the log normalisers of the
    first call. The second call takes the pairs and the errors of the first. Ye 2023, eq. (9); Zheng
    2022, RFA (see `refattn.naive`).

    Parameters
    ----------
    q, k, v, omega, log_weight, scale
        As in `refattn.random_feature_attention`, float32 or float64. All have the dtype of `q`, and
        count as exact numbers.
    features : str, default "positive"
        ``"positive"``, or ``"hyperbolic"``: positive features of omega and -omega. Trigonometric
        features may be negative, and their sums have no bound of this kind.
    mask : array of bool, shape (..., 1, m) or (m,), optional
        True where queries attend to the key.

    Returns
    -------
    Certified
        As for `attend`; `lse` is the log normaliser of samples seen by queries, without
        :math:`-|q|^2/2` and without :math:`-\log S`.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import certified, random_feature_attention, sampling
    >>> q, k, v = np.zeros((1, 2)), np.eye(2), np.array([[1.0], [3.0]])
    >>> omega, _ = sampling.draw(8, 2, rng=0)
    >>> found = certified.random_feature_attention(q, k, v, omega=omega)
    >>> out = random_feature_attention(q, k, v, omega=omega)
    >>> bool(abs(out - found.out.hi) < 1e-15), bool(found.error < 1e-19)
    (True, True)
    """
    xp, lead = qkv.check(q, k, v, mask=mask)
    checks.choice("features", features, ("hyperbolic", "positive"))
    checks.real("scale", scale, positive=True, optional=True, like=q)
    mask = qkv.one_row(mask, k)
    checks.is_array("omega", omega)
    omega, log_weight = frequencies.shared(omega, log_weight, q, lead)
    require(q, xp)
    if features == "hyperbolic":
        omega = xp.concat([omega, -omega], axis=-2)
        log_weight = xp.concat([log_weight, log_weight], axis=-1)
    arrays = (to_pairs(x) for x in (q, k, v, omega, log_weight[..., None, :]))
    (x, y, values, frequency, log_w, mask), ungroup = group_heads(*arrays, mask)
    root = power_in_pairs(q.shape[-1], "-0.25") if scale is None else power_in_pairs(scale, "0.5")
    x, y = (z * as_number(root, z) for z in (x, y))
    square = y.space.sum(y * y, axis=-1)[..., None, :]
    to_keys = PairedAttention(frequency, y, values, Scores(bias=square * -0.5, mask=mask))
    f, log_z = attend_in_pairs(to_keys)
    bias = y.space.matrix_transpose(log_z) + log_w
    return _undo_groups(
        *attend_in_pairs(PairedAttention(x, frequency, f, Scores(bias=bias))), ungroup
    )


def _undo_groups(out: Array, lse: Array, ungroup: Any) -> Certified:
    out, lse = ungroup(out), ungroup(lse)[..., 0]
    return Certified(out.pair, lse.pair, out.e, lse.e)


def _scale_or_default(scale: Any, q: Array | Pair) -> Pair:
    """Check the scale and return it in pairs, 1 / sqrt(d) by default."""
    x = first_part(q)
    checks.real("scale", scale, optional=True, like=x)
    checks.arrays(2, q=x)
    d = max(1, x.shape[-1])  # a head size of 0 is refused with all other shapes
    return number_in_pairs(scale) or power_in_pairs(d, "-0.5")
