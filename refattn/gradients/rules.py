r"""Derivatives of attention: pullbacks of estimators, composed as these are.

`vjp` evaluates a function, and returns what takes the cotangent of its result, the derivative of
some loss with respect to it, to those of its arguments. One pullback is numerical, that of
`attend`; the others are made of it as the estimators are made of `attend`. Causal and linear forms
go over the tokens twice, forth and back, in time linear in them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NamedTuple

from .. import attention, naive, sampling
from ..arrays import checks, qkv
from ..arrays.blocks import WHOLE, part, sum_to
from ..arrays.heads import broadcast_lead
from ..arrays.library import Array, array_namespace
from ..arrays.products import multiply
from ..arrays.shown import held
from ..engine import hops_back, kernel, kernel_back
from ..engine.hops import Samples
from ..engine.kernel import Attended
from ..engine.positive import two_hops
from ..engine.signed import linear_attention
from ..engine.signed_back import pull_linear
from ..estimators import few_keys, lara, linear, near_and_far, ra, rfa
from ..estimators.inputs import arguments
from ..estimators.rfa import Inputs
from . import few_keys as gradients_few_keys
from . import lara as gradients_lara
from . import near_and_far as gradients_near_and_far
from .feature_maps import check, of_map, of_waves

__all__ = ["Gradients", "vjp"]


def __dir__() -> list[str]:
    return __all__


_OF_QUERY = ("query", "query-over-queries")  # weightings of LARA

Pullback = Callable[[Any], "Gradients"]


@held()
class Gradients(NamedTuple):
    """Cotangents of the arguments of an attention function.

    Each has the shape, dtype, namespace and device of its argument: where an argument is broadcast
    or shared by heads, it is the sum over all its uses. Those of arguments that the function does
    not have, or that were not given, are None.

    Attributes
    ----------
    q, k, v : arrays, shapes (..., n, d), (..., m, d) and (..., m, d_v)
        Of queries, keys and values.
    bias : array, broadcasting to (..., n, m), or None
        Of what is added to the scores; 0 where a key is hidden.
    omega : array, shape (..., S, d) or (..., n, S, d), or None
        Of frequencies, with the dtype and library of the queries.
    log_weight : array, shape (..., S), or None
        Of the log weights of frequencies.
    sinks : array, shape (..., heads), or None
        Of the scores of sinks.
    """

    q: Array
    k: Array
    v: Array
    bias: Array | None = None
    omega: Array | None = None
    log_weight: Array | None = None
    sinks: Array | None = None


def vjp(fn: Any, q: Array, k: Array, v: Array, **options: Any) -> tuple[Any, Pullback]:
    r"""Evaluate attention, and return its pullback too.

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
        One of the public attention functions: `attend`, `softmax_attention`,
        `random_feature_attention`, `importance_sampled_attention`, `randomized_attention`,
        `mean_of_ratios_attention`, `linear_randomized_attention`, `linear_attention`,
        `sampled_key_attention`, `eva_attention`, `second_order_attention` or
        `local_random_feature_attention`, or a `functools.partial` of one with options.
        `coreset_attention` has no pullback.
    q, k, v : arrays
        As `fn` takes them.
    **options
        As for `fn`. Drawn frequencies count as constants, but for those that
        `linear_randomized_attention` draws around proposals and `eva_attention` around means: these
        move with the queries and keys that the proposals and means are made of. Give `omega` (and
        `centres`) for the derivative at fixed frequencies (and proposals). `randomized_attention`
        must be given its frequencies. A `feature_map` must be one of `refattn.features`, or have a
        pullback of its own in an attribute: ``feature_map.vjp(x)`` returns the features, and a
        function from their cotangent to that of x (for `Features`, from those of `values` and of
        `log_scale`, which is None where the scale cancels).

    Returns
    -------
    out : array or Attended
        ``fn(q, k, v, **options)``.
    pullback : function
        Takes the cotangent of `out`, an array of its shape and dtype (for `attend` a pair, for
        `out` and `lse`, of which one may be None), to `Gradients`. It may be called again.

    Raises
    ------
    TypeError, ValueError
        As `fn` does; if `fn` is none of these functions; from the pullback if the cotangent does
        not match the result.

    Notes
    -----
    Errors are at most C eps (1 + E) relative to the sum of the absolute terms above, with E the
    largest exponent as in the notes of `fn`. Memory beside arguments and results does not depend on
    n or m where that of `fn` does not, but for causal LARA, which takes O(C S). A query that sees
    no key has gradient 0. Arguments must be left as they are until the pullback has been called;
    the output may be written to. There are no cotangents of `omega` where LARA is given a sequence
    of proposals.

    Where a derivative does not exist, at the kinks of ReLU features and at weights of
    `linear_randomized_attention` that are dropped, it is the one from the left.

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
    fn, fixed = opened(fn)
    if isinstance(fn, partial):
        raise TypeError(f"`fn` must have options by keyword only, got {fn!r}.")
    known = _PULLBACKS.get(fn) if isinstance(fn, Hashable) else None
    if known is None:
        names = ", ".join(sorted(x.__name__ for x in _PULLBACKS))
        said = checks.describe(fn)
        if fn is few_keys.coreset_attention:
            said = "`coreset_attention`, which has no pullback"
        raise TypeError(f"`fn` must be one of {names}, got {said}.")
    out, pullback = known(arguments(fn, q, k, v, **{**fixed, **options}))
    return _own(out), pullback


def opened(fn: Any) -> tuple[Any, dict[str, Any]]:
    """The function within partials, and the options that they give by keyword."""
    options: dict[str, Any] = {}
    while isinstance(fn, partial) and not fn.args:
        fn, options = fn.func, {**fn.keywords, **options}
    return fn, options


def pulled_back(fn: Any, formula: Any) -> Callable[..., Any] | None:
    """What `vjp` takes for an estimator and its formula, if it takes anything.

    The function of the same name where the formula is of `naive`, with what the estimator fixes if
    it is that function, or the estimator itself.
    """
    formula, options = opened(formula)
    plain, own = opened(fn)
    for known in _PULLBACKS:
        if getattr(naive, known.__name__, None) is formula:
            return partial(known, **{**(own if plain is known else {}), **options})
    return fn if isinstance(plain, Hashable) and plain in _PULLBACKS else None


def _own(out: Any) -> Any:
    """A copy for the caller, who may write to it; the pullback reads the original."""
    if isinstance(out, Attended):
        return Attended(*map(_own, out))
    return array_namespace(out).asarray(out, copy=True)


def _checked(d_out: Array, out: Array, name: str = "d_out") -> Array:
    """A cotangent that matches the result."""
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


def _like(x: Array, given: Array) -> Array:
    """Undo the grouping of heads."""
    return array_namespace(x).reshape(x, given.shape)


# Exact attention.


def _attend(given: dict[str, Any]) -> Any:
    """Pull `attend` back."""
    inputs = attention.prepare(given)
    done, pull = _exact(inputs, given)
    result = Attended(inputs.ungroup(done.out), inputs.ungroup(done.lse, core=1))

    def pullback(cotangents: Any) -> Gradients:
        if not isinstance(cotangents, tuple) or len(cotangents) != 2:
            raise TypeError(
                "`cotangents` must be a pair (d_out, d_lse), of which one may be None, "
                f"got {checks.describe(cotangents)}."
            )
        d_out, d_lse = cotangents
        if d_out is None:
            d_out = array_namespace(result.out).zeros_like(result.out)
        d_lse = None if d_lse is None else _checked(d_lse, result.lse, "d_lse")
        found: Gradients = pull(_checked(d_out, result.out), d_lse)
        return found

    return result, pullback


def _softmax(given: dict[str, Any]) -> Any:
    """Pull `softmax_attention` back."""
    inputs = attention.prepare(given, rooted=True)
    done, pull = _exact(inputs, given)
    out = inputs.ungroup(done.out)
    return out, lambda d_out: pull(_checked(d_out, out))


def _exact(inputs: attention.Inputs, given: dict[str, Any]) -> Any:
    """Exact attention with its pullback, of cotangents of the output and of the normaliser."""
    done = kernel.attend(*inputs.arrays, **inputs.options)

    def pull(d_out: Array, d_lse: Array | None = None) -> Gradients:
        d_lse = None if d_lse is None else _like(d_lse, done.lse)
        found = kernel_back.pull_attend(
            *inputs.arrays, done, _like(d_out, done.out), d_lse, **inputs.options
        )
        named = {name: x for name, x in found._asdict().items() if x is not None}
        return Gradients(**{name: _like(x, given[name]) for name, x in named.items()})

    return done, pull


# Random features.


class _Sources(NamedTuple):
    """The arguments as they were given, whose shapes cotangents have."""

    q: Array
    k: Array
    v: Array
    omega: Array | None = None
    log_weight: Array | None = None
    gauges: tuple[Array, Array] | None = None
    both: bool = False  # whether frequencies have got their negatives

    def gradients(
        self, q: Array, k: Array, v: Array, omega: Any = None, log_weight: Any = None
    ) -> Gradients:
        """Cotangents of these from those of what was made of them."""
        if self.gauges is None:
            q, k = _like(q, self.q), _like(k, self.k)
        else:
            q, k = (
                _before_gauge(x, given, gauge)
                for x, given, gauge in zip((q, k), self[:2], self.gauges, strict=True)
            )
        return Gradients(
            q, k, _like(v, self.v), None, self._omega(omega), self._log_weight(log_weight)
        )

    def _omega(self, omega: Array | None) -> Array | None:
        if self.omega is None or omega is None:
            return None
        if self.both:
            half = omega.shape[-2] // 2
            omega = omega[..., :half, :] - omega[..., half:, :]
        return _like(omega, self.omega)

    def _log_weight(self, log_weight: Array | None) -> Array | None:
        if self.log_weight is None or log_weight is None:
            return None
        half = log_weight.shape[-1] // 2
        if self.both:
            log_weight = log_weight[..., :half] + log_weight[..., half:]
        return _like(
            sum_to(log_weight, (*log_weight.shape[:-1], self.log_weight.shape[-1])), self.log_weight
        )


def _before_gauge(x: Array, given: Array, gauge: Array) -> Array:
    """Cotangent of what was multiplied by the gauge, which may have more heads."""
    lead = broadcast_lead(given, gauge)
    x = array_namespace(x).reshape(x, (*lead, *given.shape[-2:]))
    return sum_to(multiply(x, array_namespace(x).matrix_transpose(gauge)), given.shape)


def _sources(given: dict[str, Any]) -> _Sources:
    q, k, v = _tokens(given)
    proposal, both = given.get("proposal"), given.get("features") == "hyperbolic"
    gauges = proposal.gauges(q, k) if isinstance(proposal, sampling.Gaussian) else None
    return _Sources(q, k, v, given.get("omega"), given.get("log_weight"), gauges, both)


def _tokens(given: dict[str, Any]) -> tuple[Array, Array, Array]:
    return given["q"], given["k"], given["v"]


def _random_features(given: dict[str, Any]) -> Any:
    """Pull `random_feature_attention` back: hop 2, then hop 1."""
    q, keys, samples, root, ungroup = rfa.prepare(given)
    sources, causal = _sources(given), given["causal"]
    if given["features"] == "trigonometric":
        norms = given["square_norms"] is None
        waves = rfa.trigonometric(*samples, root, norms)
        raw = linear_attention(q, keys, waves, causal)
        back = of_waves(*samples, root, norms)
        out = ungroup(raw)

        def pull(d_out: Array) -> Gradients:
            d_out = _like(_checked(d_out, out), raw)
            pulled = pull_linear(q, keys, back, raw, d_out, causal=causal)
            return sources.gradients(*pulled[:3], *pulled.parameters)

        return out, pull
    done = two_hops(q, samples, keys, causal)
    out = ungroup(done.out)

    def pullback(d_out: Array) -> Gradients:
        d_out = _like(_checked(d_out, out), done.out)
        pulled = hops_back.pull_two_hops(q, samples, keys, causal, done, d_out)
        return sources.gradients(*pulled[:3], root * pulled.omega, pulled.log_weight)

    return out, pullback


def _importance_sampled(given: dict[str, Any]) -> Any:
    """Pull `importance_sampled_attention` back: RFA times a ratio of normalisers."""
    checks.is_array("omega", given["omega"])
    inputs, sources, causal = rfa.prepare(given), _sources(given), given["causal"]
    q, keys, samples, root, ungroup = inputs
    xp = array_namespace(q)
    done, exact, log_ratio = rfa.importance_ratio(inputs, causal)
    half = xp.exp(log_ratio / 2)[..., None]
    raw = half * done.out * half
    out = ungroup(raw)

    def pullback(d_out: Array) -> Gradients:
        d_out = _like(_checked(d_out, out), raw)
        d_log = xp.sum(d_out * raw, axis=-1)
        pulled = hops_back.pull_two_hops(q, samples, keys, causal, done, half * d_out * half, d_log)
        none, square = d_out[..., :0], root * root
        normaliser = kernel_back.pull_attend(
            q,
            keys.k,
            keys.v[..., :0],
            exact,
            none,
            -d_log,
            mask=keys.mask,
            causal=causal,
            scale=square,
        )
        d_q = pulled.q + normaliser.q - sum_to(square * d_log[..., None] * q, q.shape)
        return sources.gradients(
            d_q, pulled.k + normaliser.k, pulled.v, root * pulled.omega, pulled.log_weight
        )

    return out, pullback


def _means(inputs: Inputs, given: dict[str, Any]) -> Any:
    """Pull a mean of states back: every sample of a query takes the same."""
    q, keys, samples, root, ungroup = inputs
    sources, causal = _sources(given), given["causal"]
    raw = ra.mean_of_states(q, samples, keys, causal)
    out, xp, size = ungroup(raw), array_namespace(q), samples.omega.shape[-2]

    def pullback(d_out: Array) -> Gradients:
        d_out, some = _like(_checked(d_out, out), raw), q
        if ra.alike(samples, keys, causal):
            d_out, some = xp.sum(d_out, axis=-2, keepdims=True), q[..., :1, :]

        def read(box: tuple[slice, ...], q: Array, own: Samples, states: Attended) -> Any:
            share = part(d_out, (*box, WHOLE))[..., None, :] / size
            return hops_back.Taken(None, None, None, share, None)

        pulled = hops_back.pull_per_query(read, some, samples, keys, causal)
        return sources.gradients(kernel_back.zeros_of(q), pulled.k, pulled.v, root * pulled.omega)

    return out, pullback


def _randomized(given: dict[str, Any]) -> Any:
    """Pull `randomized_attention` back at given frequencies."""
    if given["omega"] is None:
        raise ValueError(
            "`omega` must be given: draws from p_i jump between keys, and have no derivative."
        )
    return _means(ra.prepare_by_query(given), given)


def _mean_of_ratios(given: dict[str, Any]) -> Any:
    """Pull `mean_of_ratios_attention` back."""
    return _means(ra.prepare_for_all(given), given)


def _proposals(given: dict[str, Any]) -> Any:
    """Pull `linear_randomized_attention` back, through proposals that are made of q and k."""
    inputs, sources, causal = lara.prepare(given), _sources(given), given["causal"]
    query_weighted = inputs.options.weighting in _OF_QUERY
    if sources.omega is not None and inputs.own is not None:
        sources = sources._replace(omega=None)
    done = lara.attend_prepared(inputs, causal)
    out, pull = inputs.ungroup(done.out), gradients_lara.pull
    if causal or query_weighted:
        pull = gradients_lara.pull_causal if causal else gradients_lara.pull_query_weighted

    def pullback(d_out: Array) -> Gradients:
        return sources.gradients(*pull(inputs, done, _like(_checked(d_out, out), done.out)))

    return out, pullback


# Near and far.


def _local(given: dict[str, Any]) -> Any:
    """Pull `local_random_feature_attention` back, part by part."""
    sides, causal = qkv.window(given["window"]), given["causal"]
    inputs, sources = rfa.prepare(given), _sources(given)
    local = near_and_far.attend_locally(inputs, sides, causal)
    out = inputs.ungroup(local.done.out)

    def pullback(d_out: Array) -> Gradients:
        d_out = _like(_checked(d_out, out), local.done.out)
        pulled = gradients_near_and_far.pull_local(inputs, sides, causal, local, d_out)
        return sources.gradients(*pulled[:3], inputs.root * pulled.omega)

    return out, pullback


def _eva(given: dict[str, Any]) -> Any:
    """Pull `eva_attention` back, through the means that summaries are made of."""
    inputs, sources = near_and_far.prepare_chunks(given), _sources(given)
    done = near_and_far.attend_chunks(inputs)
    raw = inputs.chunks.joined(done.done.out)
    out = inputs.ungroup(raw)

    def pullback(d_out: Array) -> Gradients:
        d_out = _like(_checked(d_out, out), raw)
        pulled = gradients_near_and_far.pull_chunks(inputs, done, d_out, sources.k.shape[-2])
        return sources.gradients(*pulled)

    return out, pullback


def _second_order(given: dict[str, Any]) -> Any:
    """Pull `second_order_attention` back, through the moments."""
    inputs, sources = near_and_far.prepare_moments(given), _sources(given)
    done = near_and_far.attend_moments(inputs)
    raw = inputs.chunks.joined(done.out)
    out = inputs.ungroup(raw)

    def pullback(d_out: Array) -> Gradients:
        d_out = _like(_checked(d_out, out), raw)
        pulled = gradients_near_and_far.pull_moments(inputs, done, d_out, sources.k.shape[-2])
        return sources.gradients(*pulled)

    return out, pullback


# Samples of keys.


def _sampled_keys(given: dict[str, Any]) -> Any:
    """Pull `sampled_key_attention` back at given samples."""
    inputs, sources = few_keys.prepare_samples(given), _sources(given)
    done = few_keys.attend_samples(inputs)
    out = inputs.ungroup(done.out)

    def pullback(d_out: Array) -> Gradients:
        d_out = _like(_checked(d_out, out), done.out)
        return sources.gradients(*gradients_few_keys.pull(inputs, done, d_out)[:3])

    return out, pullback


# Linear attention.


def _linear(given: dict[str, Any]) -> Any:
    """Pull `linear_attention` back, through its features."""
    sources, causal, feature_map = _sources(given), given["causal"], given["feature_map"]
    q, keys, ungroup = linear.prepare(given)
    check(feature_map)
    features = linear.of_map(feature_map, keys.k if keys.k.shape[-2] else q)
    raw = linear_attention(q, keys, features, causal)
    out, back = ungroup(raw), of_map(feature_map, features)

    def pullback(d_out: Array) -> Gradients:
        d_out = _like(_checked(d_out, out), raw)
        pulled = pull_linear(q, keys, back, raw, d_out, causal=causal)
        return sources.gradients(*pulled[:3])

    return out, pullback


_PULLBACKS: dict[Any, Callable[..., Any]] = {
    attention.attend: _attend,
    attention.softmax_attention: _softmax,
    rfa.random_feature_attention: _random_features,
    rfa.importance_sampled_attention: _importance_sampled,
    ra.randomized_attention: _randomized,
    ra.mean_of_ratios_attention: _mean_of_ratios,
    lara.linear_randomized_attention: _proposals,
    few_keys.sampled_key_attention: _sampled_keys,
    near_and_far.eva_attention: _eva,
    near_and_far.second_order_attention: _second_order,
    near_and_far.local_random_feature_attention: _local,
    linear.linear_attention: _linear,
}
