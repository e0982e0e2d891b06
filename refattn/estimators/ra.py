r"""Randomized attention: frequencies for every query."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from ..arrays import frequencies
from ..arrays.blocks import WHOLE, part
from ..arrays.heads import group_heads, group_with_lead
from ..arrays.library import Array, array_namespace, as_written, device, root_scale
from ..engine.attend import Attended, attend, undo_overflow
from ..engine.hops import Keys, Samples, per_query
from ..engine.scores import Scores
from ..engine.targets import Targets
from ..numbers.tape import Traced
from ..sampling import prepare_targets
from ..typing import ArrayT, Coupling
from .inputs import Options, check_call, choose_frequencies, exactly_one, in_heads
from .rfa import RfaInputs


@as_written
def randomized_attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    *,
    omega: Array | Literal["mean"] | None = None,
    num_samples: int | None = None,
    rng: Any = None,
    scale: float | None = None,
    mask: Array | None = None,
    causal: bool = False,
) -> ArrayT:
    r"""Estimate softmax attention by randomized attention (RA).

    .. math::
        \mathrm{out}_i = \frac1S \sum_s f_i(\omega_{is}), \qquad
        f_i(\omega) = \frac{\sum_j \xi(k_j, \omega) \, v_j}{\sum_j \xi(k_j, \omega)}, \qquad
        \omega_{is} \sim p_i = \sum_j \pi_{ij} \, N(q_i + k_j, I)

    with pi_ij = softmax_j(q_i . k_j) and xi(x, omega) = exp(omega . x - |x|^2/2). Zheng 2022, RA
    (see `refattn.naive`). Unbiased if the frequencies are drawn exactly from p_i, as
    `sampling.draw_target` does. The variance is Var(f_i)/S, where Var(f_i) is at most the variance
    of the value of one random key. Takes time O(n m S).

    With ``omega="mean"`` the result is f_i at the mean of p_i, as the authors' code computes at
    inference. It is exact attention with the scores lowered by the distance of each key from the
    mean key of the query,

    .. math::
        \mathrm{out}_i = \sum_j \mathrm{softmax}_j\Bigl(
            q_i \cdot k_j - \tfrac12 |k_j - \bar k_i|^2\Bigr) \, v_j, \qquad
        \bar k_i = \sum_j \pi_{ij} \, k_j .

    Nothing is random, and no number of samples reduces the error: `theory.target_mean_law`.

    Parameters
    ----------
    q, k, v, rng, scale, mask, causal
        As in `random_feature_attention`. `f_i` and `p_i` range over the keys query i sees.
    omega : array, shape (..., n, S, d), or "mean", optional
        Frequencies of each query, in kernel coordinates; or ``"mean"``: for each query one, the
        mean of p_i.
    num_samples : int, optional
        Number S of frequencies to draw for each query when `omega` is not given.

    Returns
    -------
    array, shape (..., n, d_v)
        Same namespace, dtype and device as `q`. Rows that see no key are 0.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import randomized_attention, softmax_attention
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 5, 4))
    >>> approx = randomized_attention(q, k, v, num_samples=4096, rng=1)
    >>> bool(np.max(np.abs(approx - softmax_attention(q, k, v))) < 0.1)
    True
    """
    options = Options(scale, mask, causal, omega, num_samples=num_samples, rng=rng)
    inputs = prepare_by_query(q, k, v, options)

    def of_heads(some: RaInputs) -> Array:
        if some.source is None:
            return attend_at_means(some, causal)
        return mean_of_states(some.sampled(), causal)

    return inputs.ungroup(in_heads(inputs, of_heads, q, v, inputs.xp))


class RaInputs(NamedTuple):
    """Checked arguments of `randomized_attention`, heads in groups: frequencies or what draws them.

    Frequencies are as they are given; None are those at the means of their distributions.
    """

    q: Array
    keys: Keys
    source: Array | Targets | None
    root: Array
    xp: Any  # the array namespace
    ungroup: Callable[..., Array]

    @property
    def lead(self) -> tuple[int, ...]:
        """Leading axes of the result."""
        if self.source is None or isinstance(self.source, Targets):
            return self.keys.lead(self.q)
        return self.keys.lead(self.q, self.source[..., 0, :])

    def part(self, head: tuple[slice, ...]) -> RaInputs:
        """Take some heads."""
        box, source = (*head, WHOLE, WHOLE), self.source
        if isinstance(source, Targets):
            source = source.part(head)
        elif source is not None:
            source = part(source, (*box, WHOLE))
        return self._replace(q=part(self.q, box), keys=self.keys.part(head), source=source)

    def sampled(self) -> RfaInputs:
        """Have the frequencies, times the root of the scale."""
        q, keys, source, root, xp, ungroup = self
        omega = source.draw() if isinstance(source, Targets) else source
        return RfaInputs(q, keys, _equal_samples(root * omega, xp), root, xp, ungroup)


def prepare_by_query(q: Array, k: Array, v: Array, options: Options) -> RaInputs:
    """Check arguments of `randomized_attention`, and group heads."""
    scale, mask, lead, xp = check_call(q, k, v, options)
    omega, num_samples, rng = options.omega, options.num_samples, options.rng
    exactly_one(omega=omega, num_samples=num_samples)
    root, targets, rows = root_scale(scale, q), None, None
    if num_samples is not None and isinstance(q, Traced):
        raise ValueError(
            "`omega` must be given: draws from p_i jump between keys, and have no derivative."
        )
    if num_samples is not None:
        targets, whole = prepare_targets(q, k, num_samples, rng, scale, mask, options.causal)
        if targets.lead != group_with_lead(q, k, v)[1]:  # heads of `v` share some
            omega = whole(targets.draw(), core=3)
    if omega is not None and not frequencies.at_means(omega, rng):
        omega = frequencies.of_queries(omega, q, lead)
        tail = omega.shape[-2:]
        # With S and d as one axis, the heads are third from last, as group_heads expects.
        rows = xp.reshape(omega, (*omega.shape[:-2], tail[0] * tail[1]))
    (q, k, v, mask, rows), ungroup = group_heads(q, k, v, mask, rows)
    source = targets if rows is None else xp.reshape(rows, (*rows.shape[:-1], *tail))
    return RaInputs(q, Keys(k, v, mask, root * root / 2), source, root, xp, ungroup)


def attend_at_means(inputs: RaInputs, causal: bool) -> Array:
    """Attend from root (q_i + mean key), the mean of the target of a query: in two passes."""
    (k, v, mask, _), scale = inputs.keys, inputs.root * inputs.root
    scores = Scores(scale, mask=mask, causal=causal)
    centres = inputs.q + attend(inputs.q, k, k, scores).out
    return attend(centres, k, v, scores, key_bias=inputs.keys.bias).out


def _equal_samples(omega: Array, xp: Any) -> Samples:
    equal = xp.zeros((1, omega.shape[-2]), dtype=omega.dtype, device=device(omega))
    return Samples(omega, equal)


@as_written
def mean_of_ratios_attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    *,
    omega: Array | None = None,
    num_samples: int | None = None,
    coupling: Coupling = "iid",
    rng: Any = None,
    scale: float | None = None,
    mask: Array | None = None,
    causal: bool = False,
) -> ArrayT:
    r"""Average estimates from one random feature each, with frequencies from N(0, I).

    .. math:: \mathrm{out}_i = \frac1S \sum_s f_i(\omega_s), \qquad \omega_s \sim N(0, I)

    with f_i(omega) = sum_j xi(k_j, omega) v_j / sum_j xi(k_j, omega) over the keys that query i
    sees and xi(x, omega) = exp(omega . x - |x|^2/2). Ye 2023 (see `refattn.naive`), eq. (12), which
    calls it RA. It is not RA: the frequencies do not come from the target p_i of
    `randomized_attention`, and xi(q_i, omega) cancels. So the result depends on the query only
    through the keys that it sees. Biased, and inconsistent: with more samples it tends to the mean
    of f(omega) under N(0, I), not to attention. Provided to show the difference.

    Parameters
    ----------
    q, k, v, omega, coupling, rng, scale, mask, causal
        As in `random_feature_attention`, omega of shape (..., S, d) shared by all queries.
    num_samples : int, optional
        Number S of frequencies to draw when `omega` is not given.

    Returns
    -------
    array, shape (..., n, d_v)
        Same namespace, dtype and device as `q`. Rows that see no key are 0.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import mean_of_ratios_attention
    >>> q, k, v = np.array([[-3.0], [3.0]]), np.array([[1.0], [1.0]]), np.array([[0.0], [1.0]])
    >>> mean_of_ratios_attention(q, k, v, num_samples=8, rng=0)
    array([[0.5],
           [0.5]])
    """
    options = Options(
        scale, mask, causal, omega, num_samples=num_samples, coupling=coupling, rng=rng
    )
    inputs = prepare_for_all(q, k, v, options)
    return inputs.ungroup(mean_of_states(inputs, causal))


def prepare_for_all(q: Array, k: Array, v: Array, options: Options) -> RfaInputs:
    """Check arguments of `mean_of_ratios_attention`, draw frequencies, and group heads."""
    scale, mask, lead, xp = check_call(q, k, v, options)
    omega, _ = choose_frequencies(options, "num_samples", q, lead)
    (q, k, v, omega, mask), ungroup = group_heads(q, k, v, omega, mask)
    root = root_scale(scale, q)
    samples = _equal_samples(root * omega[..., None, :, :], xp)
    return RfaInputs(q, Keys(k, v, mask, root * root / 2), samples, root, xp, ungroup)


@as_written
def mean_of_states(inputs: RfaInputs, causal: bool) -> Array:
    """Average over samples, of each query or of all, what the first hop returns."""
    q, keys, samples, _, xp, _ = inputs
    n = q.shape[-2]

    if samples.omega.shape[-3] == 1 and not causal and not keys.differ:  # the same for each query
        out = per_query(_mean_of, q[..., : min(1, n), :], samples, keys, causal, xp).out
        return xp.repeat(out, max(1, n), axis=-2)
    return per_query(_mean_of, q, samples, keys, causal, xp).out


def _mean_of(q: Array, samples: Samples, states: Attended) -> Attended:
    """Average over the samples of each query."""
    xp = array_namespace(q)
    share = states.out / states.out.shape[-2]  # the sum of large values may overflow
    largest = xp.max(xp.abs(share), axis=-2)
    return Attended(undo_overflow(xp.sum(share, axis=-2), largest, xp=xp), states.lse[..., 0])
