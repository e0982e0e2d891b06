"""Gradients of every attention function, by a tape over the function itself: `vjp`.

Steps that go over blocks of scores, chunks or tokens are single steps of the tape, with pullbacks
of their own: those are in `engine`, beside what they pull back.
"""

from __future__ import annotations

from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import numpy as np

from . import attention
from .arrays import checks
from .arrays.library import (
    Array,
    array_namespace,
    as_written,
    device,
    is_array_api_obj,
    is_numpy_array,
    own_copy,
    untraced,
)
from .arrays.shown import held
from .arrays.words import check_keywords, keyword_names
from .engine import attend_back, positive_back, recurrent_back, signed_back
from .engine.attend import Attended
from .estimators import lara_back
from .estimators.inputs import open_partials
from .estimators.recurrent import recurrent_attention
from .numbers.steps import mapped, pairs
from .numbers.tape import Traced, given, pull_to_steps
from .registry.record import ESTIMATORS, find_record, load
from .typing import Recurrent

__all__ = ["Gradients", "vjp"]
__dir__ = __all__.copy

# With these the steps of the engine know their pullbacks.
_PULLBACKS = (attend_back, lara_back, positive_back, recurrent_back, signed_back)


@held()
class Gradients(NamedTuple):
    """Cotangents of the arguments of an attention function.

    Each has the shape, dtype, namespace and device of its argument, and is summed over all its
    uses. It is None if the function has no such argument, or if the argument was not passed.

    Attributes
    ----------
    q, k, v : arrays, shapes (..., n, d), (..., m, d) and (..., m, d_v)
        Cotangents of queries, keys and values.
    bias : array, broadcasting to (..., n, m), or by lag (..., n + m - 1), or None
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
def vjp(fn: Any, q: Array, k: Array, v: Array, **options: Any) -> tuple[Any, Any]:
    r"""Return the attention output and a function that computes its gradients (its pullback).

    .. math::
        \bar x = \sum_i \bar g_i \cdot \frac{\partial \, \mathrm{out}_i}{\partial x}

    for the cotangent :math:`\bar g` of the output and each argument x. For exact attention with
    weights :math:`p_{ij}`

    .. math::
        \bar s_{ij} = p_{ij} (\bar g_i \cdot v_j - \bar g_i \cdot \mathrm{out}_i), \quad
        \bar q_i = c \sum_j \bar s_{ij} k_j, \quad \bar k_j = c \sum_i \bar s_{ij} q_i, \quad
        \bar v_j = \sum_i p_{ij} \bar g_i

    with c the scale of the scores; the pullbacks of estimators are made of this one.

    Parameters
    ----------
    fn : function
        `attend`, `recurrent_attention`, the function of a registered estimator of attention, or a
        `functools.partial` of one with options. It runs on arrays that record its steps, so that
        it may be any function of the array API, or of NumPy's names for it, that
        `refattn.numbers.tape` lists.
    q, k, v : arrays
        As `fn` takes them.
    **options
        As for `fn`. Drawn frequencies count as constants, except those that
        `linear_randomized_attention` draws around proposals and `eva_attention` around means: these
        depend on queries and keys, as do the means themselves (``omega="mean"``). Pass an array
        `omega` (and `centres`) for the derivative at fixed frequencies (and proposals);
        `randomized_attention` needs `omega`. A `feature_map` may
        be any such function too, or have its own pullback as an attribute: ``feature_map.vjp(x)``
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
        As `fn` does; if `fn` is none of these functions, or uses what has no
        derivative here; from the pullback, if the cotangent does
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
    known = [attention.attend, recurrent_attention]
    if not (record and record.arrays == ("q", "k", "v")) and all(fn is not x for x in known):
        known += [x.function for x in ESTIMATORS.values() if x.arrays == ("q", "k", "v")]
        names = ", ".join(sorted({getattr(x, "__name__", repr(x)) for x in known}))
        raise TypeError(f"`fn` must be one of {names}, got {checks.describe(fn)}.")
    check_keywords(fn.__name__, fixed | options, keyword_names(fn) or [*fixed, *options])
    call = signature(fn).bind(q, k, v, **{**fixed, **options})
    rule = load(record and record.vjp)
    if rule is not None:
        call.apply_defaults()
        out, pullback = rule(*call.args, **call.kwargs)
    else:
        out, pullback = _evaluate(fn, {"q": q, "k": k, "v": v, **fixed, **options})
    return _copy_result(out, array_namespace(q)), partial(_pull, pullback, out)


def _evaluate(fn: Any, arguments: dict[str, Any]) -> tuple[Any, Any]:
    """Evaluate a function on a tape; return also the pullback of its result."""
    host = is_numpy_array(arguments["q"])

    def trace(name: str, x: Any) -> Any:
        if not is_array_api_obj(x) or isinstance(x, np.ma.MaskedArray | np.generic):
            return x
        if name in Gradients._fields:
            return given(x, light=True)
        # What may be of NumPy beside arrays of another library takes no cotangent.
        return x if is_numpy_array(x) and not host else Traced(x)

    traced = {}
    for name, x in arguments.items():
        x = tuple(x) if isinstance(x, list) and all(map(is_array_api_obj, x)) else x
        taken = "" if isinstance(x, attention.Alibi) else name  # slopes are constants
        traced[name] = mapped(partial(trace, taken), x)
    named = {name: x for name, x in traced.items() if name not in ("q", "k", "v")}
    result = fn(traced["q"], traced["k"], traced["v"], **named)
    return mapped(untraced, result), partial(_pull_traced, traced, result)


def _pull_traced(traced: dict[str, Any], result: Any, d_out: Any) -> Gradients:
    """Pull a cotangent back to what was given; options on which nothing depends take none."""
    arrays = {name: traced[name] for name in Gradients._fields if _is_given(traced.get(name))}
    q, wanted = traced["q"], (x for x, _ in pairs(tuple(arrays.values())))
    found, xp = pull_to_steps(result, d_out, wanted), untraced(q.__array_namespace__())
    held = [x for x, _ in pairs(d_out)]

    def of(x: Any) -> Array:
        g = found.get(x.step)
        if g is None:
            return xp.zeros(x.shape, dtype=q.dtype, device=device(q.x))
        return _own(xp.astype(g, q.dtype, copy=False), held, xp)

    return Gradients(**{name: mapped(of, x) for name, x in arrays.items()})


def _own(g: Array, held: list[Any], xp: Any) -> Array:
    """Copy a cotangent if it is a part of an array, or one of those that others hold."""
    alone = is_numpy_array(g) and g.flags.owndata and all(g is not x for x in held)
    held.append(g)
    return g if alone else own_copy(g, xp)


def _is_given(x: Any) -> bool:
    return all(isinstance(y, Traced) and y.step.moves for y, _ in pairs(x))


@as_written
def _pull(pullback: Any, out: Any, d_out: Any) -> Gradients:
    """Pull a cotangent back that matches the result."""
    if not isinstance(out, Attended | Recurrent):
        found: Gradients = pullback(_check_cotangent(d_out, out))
        return found
    names = [f"d_{name}" for name in out._fields]
    if not isinstance(d_out, tuple) or len(d_out) != 2:
        raise TypeError(
            f"`cotangents` must be a pair ({', '.join(names)}), of which one may be None, "
            f"got {checks.describe(d_out)}."
        )
    named = zip(names, d_out, out, strict=True)
    pulled: Gradients = pullback(
        tuple(None if x is None else _check_cotangent(x, of, name) for name, x, of in named)
    )
    return pulled


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
