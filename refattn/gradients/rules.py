r"""`vjp` and the gradient rules of estimators, composed as the estimators are.

`vjp` evaluates a function, and returns what takes the cotangent of its result, the derivative of
some loss with respect to it, to those of its arguments. One pullback is numerical, that of
`attend`; the others are made of it as the estimators are made of `attend`. Causal and linear forms
go over the tokens twice, forth and back, in time linear in them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

from .. import attention, sampling
from ..arrays import checks
from ..arrays.arithmetic import multiply
from ..arrays.blocks import WHOLE, part, sum_to
from ..arrays.heads import broadcast_lead
from ..arrays.library import Array, array_namespace, as_written, own_copy
from ..arrays.shown import held
from ..arrays.words import check_keywords, keyword_names
from ..engine import attend_back, hops_back
from ..engine.attend import Attended
from ..engine.attend import attend as attend_in_blocks
from ..engine.hops import Samples
from ..engine.positive import two_hops
from ..engine.scores import Scores
from ..engine.signed import linear_attention
from ..engine.signed_back import pull_linear
from ..estimators import linear, ra, rfa
from ..estimators.inputs import Options, open_partials
from ..estimators.recurrent import recurrent_attention
from ..estimators.rfa import RfaInputs
from ..registry.record import ESTIMATORS, find_record, load
from ..typing import Recurrent
from .feature_maps import check_pullback, map_with_pullback, waves_with_pullback

_RECURRENT = "refattn.gradients.recurrent:vjp_recurrent"  # which imports this module
Pullback = Callable[[Any], "Gradients"]


@held()
class Gradients(NamedTuple):
    """Cotangents of the arguments of an attention function.

    Each has the shape, dtype, namespace and device of its argument, and is summed over all its
    uses. It is None if the function has no such argument, or if the argument was not passed.

    Attributes
    ----------
    q, k, v : arrays, shapes (..., n, d), (..., m, d) and (..., m, d_v)
        Cotangents of queries, keys and values.
    bias : array, broadcasting to (..., n, m), or None
        Cotangent of the bias; 0 where a key is hidden.
    omega : array, shape (..., S, d) or (..., n, S, d), or None
        Cotangent of the frequencies, with the dtype and library of the queries.
    log_weight : array, shape (..., S), or None
        Cotangent of the log weights of frequencies.
    sinks : array, shape (..., heads), or None
        Cotangent of the scores of sinks.
    log_decay, removal, write, initial_state, beta, decay : arrays, a pair of them, or None
        Cotangents of the arguments of recurrences with these names.
    """

    q: Array
    k: Array
    v: Array
    bias: Array | None = None
    omega: Array | None = None
    log_weight: Array | None = None
    sinks: Array | None = None
    log_decay: Array | None = None
    removal: tuple[Array, Array] | None = None
    write: Array | None = None
    initial_state: Array | None = None
    beta: Array | None = None
    decay: Array | None = None


@as_written
def vjp(fn: Any, q: Array, k: Array, v: Array, **options: Any) -> tuple[Any, Pullback]:
    r"""Return the attention output and a function that computes its gradients (its pullback).

    .. math::
        \bar x = \sum_i \bar g_i \cdot \frac{\partial \, \mathrm{out}_i}{\partial x}

    for the cotangent :math:`\bar g` of the output and each argument x. For exact attention with
    weights :math:`p_{ij}`

    .. math::
        \bar s_{ij} = p_{ij} (\bar g_i \cdot v_j - \bar g_i \cdot \mathrm{out}_i), \quad
        \bar q_i = c \sum_j \bar s_{ij} k_j, \quad \bar k_j = c \sum_i \bar s_{ij} q_i, \quad
        \bar v_j = \sum_i p_{ij} \bar g_i

    with c the scale of the scores; the pullbacks of estimators are composed of this one.

    Parameters
    ----------
    fn : function
        `attend`, `recurrent_attention`, or a function whose record has a pullback, see
        `registry.Estimator`: all attention functions of the package but `coreset_attention`; or a
        `functools.partial` of one with options.
    q, k, v : arrays
        As `fn` takes them.
    **options
        As for `fn`. Drawn frequencies count as constants, except those that
        `linear_randomized_attention` draws around proposals and `eva_attention` around means: these
        depend on queries and keys. Pass `omega` (and `centres`) for the derivative at fixed
        frequencies (and proposals); `randomized_attention` needs `omega`. A `feature_map` must be
        one of `refattn.features`, or have its own pullback as an attribute: ``feature_map.vjp(x)``
        returns the features, and a function from their cotangent to the cotangent of x. For
        `Features` the function takes the cotangents of `values` and of `log_scale`, which is None
        where the scale cancels.

    Returns
    -------
    out : array, Attended or Recurrent
        ``fn(q, k, v, **options)``.
    pullback : function
        Maps the cotangent of `out`, an array of the same shape and dtype, to `Gradients`. For
        `attend` it takes a pair, for `out` and `lse`, and for recurrences one for `out` and
        `state`, of which one may be None. It may be called repeatedly.

    Raises
    ------
    TypeError, ValueError
        As `fn` does; if `fn` is none of these functions; from the pullback, if the cotangent does
        not match the result.

    Notes
    -----
    Errors are at most C eps (1 + E) relative to the sum of the absolute terms above, with E the
    largest exponent as in the notes of `fn`. Memory besides arguments and results does not depend
    on n or m if that of `fn` does not, except for causal LARA, which takes O(C S). A query that
    sees no key has gradient 0. Do not write to the arguments until the pullback has been called;
    you may write to the output. If LARA gets a sequence of proposals, there are no cotangents of
    `omega`.

    Where a derivative does not exist (at the kinks of ReLU features, and where
    `linear_randomized_attention` drops weights) the pullback uses the derivative from the left.

    Source: derived by the chain rule from the formulas of the references that `fn` names.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import softmax_attention, vjp
    >>> q, k, v = np.array([[1.0]]), np.array([[0.0], [0.0]]), np.array([[0.0], [4.0]])
    >>> out, pullback = vjp(softmax_attention, q, k, v)
    >>> out
    array([[2.]])
    >>> found = pullback(np.array([[1.0]]))
    >>> found.q, found.k.T, found.v.T
    (array([[0.]]), array([[-1.,  1.]]), array([[0.5, 0.5]]))
    """
    fn, fixed = open_partials(fn)
    if isinstance(fn, partial):
        raise TypeError(f"`fn` must have options by keyword only, got {fn!r}.")
    record = find_record(fn)
    own = {attention.attend: vjp_attend, recurrent_attention: _RECURRENT}
    rule = load(next((rule for of, rule in own.items() if of is fn), record and record.vjp))
    if rule is None:
        pulled = [*own, *(x.function for x in ESTIMATORS.values() if x.vjp is not None)]
        names = ", ".join(sorted({getattr(x, "__name__", repr(x)) for x in pulled}))
        said = f"`{fn.__name__}`, which has no pullback" if record else checks.describe(fn)
        raise TypeError(f"`fn` must be one of {names}, got {said}.")
    check_keywords(fn.__name__, fixed | options, keyword_names(fn) or [*fixed, *options])
    call = signature(fn).bind(q, k, v, **{**fixed, **options})
    call.apply_defaults()
    out, pullback = rule(*call.args, **call.kwargs)
    return _copy_result(out, array_namespace(q)), partial(_pull, pullback, out)


@as_written
def _pull(pullback: Pullback, out: Any, d_out: Any) -> Gradients:
    """Pull a cotangent back that matches the result."""
    if not isinstance(out, Attended | Recurrent):
        return pullback(_check_cotangent(d_out, out))
    names = [f"d_{name}" for name in out._fields]
    if not isinstance(d_out, tuple) or len(d_out) != 2:
        raise TypeError(
            f"`cotangents` must be a pair ({', '.join(names)}), of which one may be None, "
            f"got {checks.describe(d_out)}."
        )
    named = zip(names, d_out, out, strict=True)
    return pullback(
        tuple(None if x is None else _check_cotangent(x, of, name) for name, x, of in named)
    )


def _copy_result(out: Any, xp: Any) -> Any:
    """Copy a result for the caller, who may write to it; the pullback reads the original."""
    if isinstance(out, Attended | Recurrent):
        return type(out)(*(_copy_result(x, xp) for x in out))
    return own_copy(out, xp)


def _check_cotangent(d_out: Array, out: Array, name: str = "d_out") -> Array:
    """Check that a cotangent matches the result."""
    checks.arrays(0, **{name: d_out})
    checks.same_home(name, d_out, "out", out)
    if d_out.dtype != out.dtype:
        raise TypeError(
            f"`{name}` must have the dtype of the result, {out.dtype}, got {d_out.dtype}."
        )
    if tuple(d_out.shape) != tuple(out.shape):
        raise ValueError(
            f"`{name}` must have the shape of the result, {tuple(out.shape)}, "
            f"got {tuple(d_out.shape)}."
        )
    return d_out


# Exact attention.


def vjp_attend(q: Array, k: Array, v: Array, **options: Any) -> Any:
    """Pull `attend` back."""
    done, pull, xp = _pull_exact(q, k, v, Scores(**options))

    def pullback(cotangents: Any) -> Gradients:
        d_out, d_lse = cotangents
        return pull(xp.zeros_like(done.out) if d_out is None else d_out, d_lse)

    return done, pullback


def vjp_softmax(q: Array, k: Array, v: Array, **options: Any) -> Any:
    """Pull `softmax_attention` back."""
    (out, _), pull, _ = _pull_exact(q, k, v, Scores(**options), rooted=True)
    return out, pull


def _pull_exact(
    q: Array, k: Array, v: Array, scores: Scores, *, rooted: bool = False
) -> tuple[Attended, Callable[..., Gradients], Any]:
    """Attend; return also the pullback of cotangents of both results, and the namespace."""
    inputs = attention.prepare_attention(q, k, v, scores, rooted=rooted)
    xp, arrays = array_namespace(q), {**scores._asdict(), "q": q, "k": k, "v": v}
    done = attend_in_blocks(*inputs.arrays, inputs.scores)

    def pull(d_out: Array, d_lse: Array | None = None) -> Gradients:
        d_lse = None if d_lse is None else xp.reshape(d_lse, done.lse.shape)
        d_out = xp.reshape(d_out, done.out.shape)
        taken = attend_back.pull_attend(*inputs.arrays, done, d_out, d_lse, inputs.scores)
        named = {name: x for name, x in taken._asdict().items() if x is not None}
        return Gradients(**{name: xp.reshape(x, arrays[name].shape) for name, x in named.items()})

    return Attended(inputs.ungroup(done.out), inputs.ungroup(done.lse, core=1)), pull, xp


# Random features.


class Sources(NamedTuple):
    """The arguments as the caller has them, whose shapes cotangents have."""

    q: Array
    k: Array
    v: Array
    xp: Any
    omega: Array | None = None
    log_weight: Array | None = None
    gauges: tuple[Array, Array] | None = None
    both: bool = False  # whether frequencies have got their negatives

    def gradients(
        self, q: Array, k: Array, v: Array, omega: Any = None, log_weight: Any = None
    ) -> Gradients:
        """Return cotangents of these from those of what was made of them."""
        if self.gauges is None:
            q, k = self.xp.reshape(q, self.q.shape), self.xp.reshape(k, self.k.shape)
        else:
            q, k = (
                _before_gauge(d_x, x, gauge, self.xp)
                for d_x, x, gauge in zip((q, k), self[:2], self.gauges, strict=True)
            )
        v = self.xp.reshape(v, self.v.shape)
        return Gradients(q, k, v, None, self._omega(omega), self._log_weight(log_weight))

    def _omega(self, omega: Array | None) -> Array | None:
        if self.omega is None or omega is None:
            return None
        if self.both:
            half = omega.shape[-2] // 2
            omega = omega[..., :half, :] - omega[..., half:, :]
        return self.xp.reshape(omega, self.omega.shape)

    def _log_weight(self, log_weight: Array | None) -> Array | None:
        if self.log_weight is None or log_weight is None:
            return None
        half = log_weight.shape[-1] // 2
        if self.both:
            log_weight = log_weight[..., :half] + log_weight[..., half:]
        shape = (*log_weight.shape[:-1], self.log_weight.shape[-1])
        return self.xp.reshape(sum_to(log_weight, shape), self.log_weight.shape)


def _before_gauge(d_x: Array, x: Array, gauge: Array, xp: Any) -> Array:
    """Pull the product of x and the gauge, which may have more heads, back."""
    d_x = xp.reshape(d_x, (*broadcast_lead(x, gauge), *x.shape[-2:]))
    return sum_to(multiply(d_x, xp.matrix_transpose(gauge)), x.shape)


def with_pullback(
    raw: Array, ungroup: Callable[..., Array], sources: Sources, pull: Callable[[Array], Any]
) -> tuple[Array, Pullback]:
    """Undo the groups of heads of a result, and make its pullback from that of the groups."""
    out = ungroup(raw)

    def pullback(d_out: Array) -> Gradients:
        return sources.gradients(*pull(sources.xp.reshape(d_out, raw.shape)))

    return out, pullback


def sources_of(
    q: Array, k: Array, v: Array, options: Options, xp: Any, *, both: bool = False
) -> Sources:
    proposal = options.proposal
    gauges = proposal.gauges(q, k) if isinstance(proposal, sampling.Gaussian) else None
    return Sources(q, k, v, xp, options.omega, options.log_weight, gauges, both)


def vjp_random_features(
    q: Array, k: Array, v: Array, *, features: str, square_norms: Any, **shared: Any
) -> Any:
    """Pull `random_feature_attention` back: hop 2, then hop 1."""
    options = Options(**shared)
    inputs = rfa.prepare_random_features(q, k, v, options, features, square_norms)
    sources = sources_of(q, k, v, options, inputs.xp, both=features == "hyperbolic")
    (q, keys, samples, root, xp, ungroup), causal = inputs, options.causal
    if features == "trigonometric":
        norms = square_norms is None
        raw = linear_attention(q, keys, rfa.trigonometric(inputs, norms), causal)
        back = waves_with_pullback(inputs, norms)

        def pull_waves(d_out: Array) -> Any:
            pulled = pull_linear(q, keys, back, raw, d_out, causal=causal)
            return *pulled[:3], *pulled.parameters

        return with_pullback(raw, ungroup, sources, pull_waves)
    done = two_hops(q, samples, keys, causal, xp)

    def pull(d_out: Array) -> Any:
        pulled = hops_back.pull_two_hops(q, samples, keys, causal, done, d_out)
        return *pulled[:3], root * pulled.omega, pulled.log_weight

    return with_pullback(done.out, ungroup, sources, pull)


def vjp_importance_sampled(q: Array, k: Array, v: Array, **shared: Any) -> Any:
    """Pull `importance_sampled_attention` back: RFA times a ratio of normalisers."""
    options = Options(**shared)
    checks.is_array("omega", options.omega)
    inputs, causal = rfa.prepare_random_features(q, k, v, options), options.causal
    sources = sources_of(q, k, v, options, inputs.xp)
    q, keys, samples, root, xp, ungroup = inputs
    done, exact, log_ratio = rfa.importance_ratio(inputs, causal)
    half = xp.exp(log_ratio / 2)[..., None]
    raw, square = half * done.out * half, root * root
    scores = Scores(square, mask=keys.mask, causal=causal)

    def pull(d_out: Array) -> Any:
        d_log, none = xp.sum(d_out * raw, axis=-1), d_out[..., :0]
        pulled = hops_back.pull_two_hops(q, samples, keys, causal, done, half * d_out * half, d_log)
        no_values = keys.v[..., :0]
        normaliser = attend_back.pull_attend(q, keys.k, no_values, exact, none, -d_log, scores)
        d_q = pulled.q + normaliser.q - sum_to(square * d_log[..., None] * q, q.shape)
        d_k = pulled.k + normaliser.k
        return d_q, d_k, pulled.v, root * pulled.omega, pulled.log_weight

    return with_pullback(raw, ungroup, sources, pull)


def _vjp_mean_of_states(inputs: RfaInputs, sources: Sources, causal: bool) -> Any:
    """Pull a mean of states back: every sample of a query takes the same."""
    q, keys, samples, root, xp, ungroup = inputs
    size = samples.omega.shape[-2]

    def pull(d_out: Array) -> Any:
        some = q
        if ra.alike(samples, keys, causal):
            d_out, some = xp.sum(d_out, axis=-2, keepdims=True), q[..., :1, :]

        def read(box: tuple[slice, ...], q: Array, samples: Samples, states: Attended) -> Any:
            share = part(d_out, (*box, WHOLE))[..., None, :] / size
            return hops_back.Taken(None, None, None, share, None)

        pulled = hops_back.pull_per_query(read, some, samples, keys, causal)
        return attend_back.zeros_of(q), pulled.k, pulled.v, root * pulled.omega

    return with_pullback(ra.mean_of_states(inputs, causal), ungroup, sources, pull)


def vjp_randomized(q: Array, k: Array, v: Array, **shared: Any) -> Any:
    """Pull `randomized_attention` back at given frequencies."""
    options = Options(**shared)
    if options.omega is None:
        raise ValueError(
            "`omega` must be given: draws from p_i jump between keys, and have no derivative."
        )
    inputs = ra.prepare_by_query(q, k, v, options).sampled()
    return _vjp_mean_of_states(inputs, sources_of(q, k, v, options, inputs.xp), options.causal)


def vjp_mean_of_ratios(q: Array, k: Array, v: Array, **shared: Any) -> Any:
    """Pull `mean_of_ratios_attention` back."""
    options = Options(**shared)
    inputs = ra.prepare_for_all(q, k, v, options)
    return _vjp_mean_of_states(inputs, sources_of(q, k, v, options, inputs.xp), options.causal)


# Linear attention.


def vjp_linear(
    q: Array, k: Array, v: Array, *, feature_map: Any, mask: Array | None, causal: bool
) -> Any:
    """Pull `linear_attention` back, through its features."""
    given = q, k, v
    q, keys, xp, ungroup = linear.prepare_linear(*given, feature_map, mask, causal)
    sources = Sources(*given, xp)
    check_pullback(feature_map)
    features = linear.map_features(feature_map, keys.k if keys.k.shape[-2] else q, xp)
    raw = linear_attention(q, keys, features, causal)
    back = map_with_pullback(feature_map, features, xp)

    def pull(d_out: Array) -> Any:
        return pull_linear(q, keys, back, raw, d_out, causal=causal)[:3]

    return with_pullback(raw, ungroup, sources, pull)
