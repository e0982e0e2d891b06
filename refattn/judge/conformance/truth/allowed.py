"""Compute the reference of a call, and how far from it an honest evaluation may be."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from .... import features, kernels, naive
from ....arrays.blocks import sum_to
from ....arrays.library import Floats
from ....attention import attend, softmax_attention
from ....gradients import vjp
from ....registry.record import DECLARED
from ..candidate.adapter import Adapter
from ..candidate.failures import WrongRecord
from ..candidate.gates import with_pairs
from ..candidate.limits import Arrays, Keywords, copies, in_place, repeated
from ..candidate.tags import draws_something
from . import projected, recurrences
from .solves import condition_of_solve, errors_of_pullback

# In error <= C eps (1 + largest exponent). Evaluations that round every operation and add in turn
# stay below a tenth of it on sums of a few terms, as a test shows; the rest is for long sums, which
# are not checked in the halves.
CONTRACT = {"float64": 4.0, "float32": 4.0, "float16": 2.0, "bfloat16": 2.0}

_UNDERFLOWS = {"float16": 2.0**-24}  # numbers that ordinary estimates may be below


def reference(adapter: Adapter, arrays: Arrays, options: Keywords) -> tuple[Any, Any]:
    """Return the estimator's result in extended precision, and the error allowed."""
    if adapter.has("rows"):
        return of_rows(adapter, np.asarray(arrays[0], np.longdouble))
    if adapter.has("recurrent"):
        want = of_function(adapter, recurrences.declared_formula(adapter), arrays, options)
        allowed = measured(adapter, arrays, options)
        return want, allowed if isinstance(want, tuple) else allowed[0]
    want = of_function(adapter, adapter.record.naive, arrays, options)
    return want, allowed_error(adapter, arrays, options, want)


def in_pairs(adapter: Adapter, arrays: Arrays, options: Keywords) -> Floats | None:
    """Return the exact result to more digits than float64 has, if there are pairs."""
    function = adapter.record.certified
    if adapter["dtype"] != "float64" or function is None:
        return None
    if not set(options) <= set(inspect.signature(function).parameters):
        return None
    out, _, error = of_function(adapter, function, arrays, options, np.float64)
    # The sum of both parts, in more digits than each.
    exact: Floats = np.asarray(out.hi, np.longdouble) + out.lo
    return exact if np.all(np.isfinite(error)) else None


def of_function(
    adapter: Adapter,
    function: Callable[..., Any],
    arrays: Arrays,
    options: Keywords,
    dtype: Any = np.longdouble,
) -> Any:
    """Evaluate a function of the same arguments with the conventions declared."""
    wide = tuple(np.asarray(x, dtype) for x in arrays)
    floats = {*_FLOATS, *adapter.record.gates}
    # Masks and counts keep their types.
    named = {k: np.asarray(x, dtype) if k in floats else x for k, x in options.items()}
    if adapter.has("local"):
        named = in_place(adapter, wide, named)
    # The formulas know the alignment to the last key only: another one is a mask.
    elif any(named.get(tag) and "top-left" in adapter[tag] for tag in ("causal", "window")):
        named["mask"] = adapter.visible(wide[0].shape[-2], wide[1].shape[-2], named)
        named = {k: x for k, x in named.items() if k not in ("causal", "window")}
    if adapter.record.takes("scale"):
        named["scale"] = adapter.root(wide[0].shape[-1]) ** 2
    for trait, tag in DECLARED.items():  # tags that are options of the formula
        if adapter.has(trait):
            named[tag] = adapter[tag]
    if adapter.has("feature-map"):
        named["feature_map"] = FEATURE_MAPS[adapter["feature_map"]]
    return function(*wide, **with_pairs(adapter.record, named))


# Options that are arrays of floats.
_FLOATS = ("omega", "centres", "bias", "sinks", "dropout", "log_probability", "initial_state")


FEATURE_MAPS = {"elu": naive.elu_plus_one, "relu": features.relu_features}


def of_rows(adapter: Adapter, x: Floats) -> tuple[Any, Any]:
    """Return mean and covariance, and the errors allowed."""
    want = adapter.record.naive(x, ddof=adapter["ddof"])
    unit = (CONTRACT[adapter["dtype"]] + math.sqrt(x.shape[-2])) * adapter.eps  # running sums
    off = unit * float(np.max(np.abs(x)))
    spread = float(np.max(np.abs(want.cov)))
    return (want.mean, want.cov), (off, unit * spread + 2 * off * math.sqrt(spread) + off**2)


def allowed_error(adapter: Adapter, arrays: Arrays, options: Keywords, got: Any = 0.0) -> float:
    """Return the allowed error: rounding, and declared epsilons."""
    return rounding(adapter, arrays, options, got) + declared(adapter, arrays, options, got)


def measured(
    adapter: Adapter, arrays: Arrays, options: Keywords, *functions: Callable[..., Any]
) -> tuple[float, ...]:
    """Bound the rounding of each result of a recurrence by what plain evaluations lose.

    Token by token and in chunks: bounds by absolute terms grow as states without removal would.
    Exponents may be differences of sums of all decays, in single precision at least.
    """
    rng, dtype = np.random.default_rng(0), _plain_dtype(adapter)
    ways = functions or tuple(recurrences.declared_formula(adapter, x) for x in (False, True))
    found = []
    # Each twice, with other last digits: one evaluation may be right by chance.
    for way in ways * 2:
        near = _near(adapter, arrays, options, rng, dtype)
        low, right = (of_function(adapter, way, *near, z) for z in (dtype, np.longdouble))
        pairs = zip(low, right, strict=True) if isinstance(low, tuple) else ((low, right),)
        found.append([(_size(x - y) / np.finfo(dtype).eps, _size(y)) for x, y in pairs])
    total = terms(adapter, recurrences.sum_of_logs(adapter, arrays[1].shape[-2], options))
    lost, size = np.max(found, axis=0).T
    allowed = 2 * CONTRACT[adapter["dtype"]] * (adapter.eps * (lost + size) + total * size)
    return tuple(allowed.tolist())


def _plain_dtype(adapter: Adapter) -> Any:
    return np.dtype("float64" if adapter["dtype"] == "float64" else "float32")


def _size(x: Any) -> float:
    return float(np.max(np.abs(x), initial=0.0))


def _near(
    adapter: Adapter, arrays: Arrays, options: Keywords, rng: np.random.Generator, dtype: Any
) -> tuple[Arrays, Keywords]:
    """Move arguments in the last digits of single precision."""

    def moved(x: Any) -> Floats:
        y: Floats = np.asarray(x, float) * (1 + _NEAR * rng.choice([-1.0, 1.0], np.shape(x)))
        return y.astype(dtype)

    floats = {"omega", "centres", "log_probability", "initial_state", *adapter.record.gates}
    moved_options = {k: moved(x) if k in floats else x for k, x in options.items()}
    return tuple(map(moved, arrays)), moved_options


_NEAR = 2.0**-20


def rounding(adapter: Adapter, arrays: Arrays, options: Keywords, got: Any = 0.0) -> float:
    """Return C eps (1 + largest exponent), and one for each term of the sums, of the largest value.

    Terms may be added one by one, in any order: numerator and normaliser are each off by at most
    half an eps of the absolute terms for each of them. A quotient N / D of sums with cancellation,
    of condition c = sum |terms| / |D|, is off by c eps of the largest value through N, and by c eps
    of itself through D.

    Derivatives by the tape times the rounding of each step are 3 to 300 times smaller, but need a
    cotangent for each number of the output: 2 to 20 ms a call for 5 queries, .5 to 17 s for 24,
    where this takes .1 ms, in checks with 300 calls. Of coresets they bound one way to solve, whose
    error others exceed ninefold.
    """
    if adapter.has("recurrent"):
        return measured(adapter, arrays, options)[0]
    added = sum(np.shape(options.get("omega", ()))[-2:-1])  # frequencies
    unit = CONTRACT[adapter["dtype"]] * adapter.eps
    unit *= 1 + largest_exponent(adapter, arrays, options)
    if adapter.has("pairs"):
        size = _estimate_size(adapter, arrays, options, got)
        return (unit + terms(adapter, added)) * size + _UNDERFLOWS.get(str(adapter["dtype"]), 0.0)
    n, m = (x.shape[-2] for x in arrays[:2])
    # As often as there are copies may a candidate add every key.
    unit += terms(adapter, added + m * copies(adapter, n, m, options))
    condition, size = 1.0, _norm(arrays[2])
    if adapter.waves:
        q, k = (adapter.root(x.shape[-1]) * np.asarray(x, float) for x in arrays[:2])
        condition = _cancellation(adapter, q, k, options)
        size += _norm(got)
    elif adapter.has("linear-solve") and not draws_something(adapter.record, options):
        condition = _condition_of_weights(adapter, arrays, options)
        if condition * unit > 1:  # which says nothing of the result
            return math.inf
    elif not adapter.has("normalised", "nonnegative") or (
        adapter.has("projection") and "omega" not in options
    ):
        condition = max(1.0, _measure_condition(adapter, arrays, options))
    return condition * unit * size


def pulled(adapter: Adapter, arrays: Arrays, options: Keywords) -> tuple[Arrays, tuple[float, ...]]:
    """Return output and cotangents of q, k, v in extended precision, and errors allowed.

    Of many pairs in float64, which takes far less time and has an error of its own. With a
    cotangent of lse its size counts as one of the output.
    """
    recurrent = adapter.has("recurrent")
    many = arrays[0].shape[-2] * arrays[1].shape[-2] > _MANY_PAIRS and not recurrent
    dtype, times = (np.float64, 2.0) if many else (np.longdouble, 1.0)
    apart = ("d_out", "d_lse", "return_lse", "autograd")
    usual = {k: x for k, x in options.items() if k not in apart}
    d_out, size = np.asarray(options["d_out"], dtype), np.abs(options["d_out"])
    fn: Any = adapter.record.differentiable
    cotangent: Any = d_out
    if "d_lse" in options:
        d_lse: Floats = np.asarray(options["d_lse"], dtype)
        if adapter["lse_base"] == "2":
            d_lse = d_lse / np.log(dtype(2))
        # Only `attend` returns lse, and so takes its cotangent.
        fn, cotangent = attend, (d_out, d_lse)
        size = size + np.abs(d_lse)[..., None]
        # Bounds are relative to values, lse is not: small values leave it its own size.
        times *= 1 + 1 / max(1e-3, _norm(arrays[2]))

    def evaluate(*wide: Floats, **named: Any) -> Arrays:
        if "feature_map" in named:
            named["feature_map"] = _MAPS[adapter["feature_map"]]
        try:
            out, pullback = vjp(fn, *wide, **named)
            narrow = np.asarray(d_out, wide[0].dtype)
            cotangents = pullback((narrow, None) if recurrent else cotangent)
        except Exception as error:
            words = f"{type(error).__name__}: {error}"
            name = adapter.record.name
            raise WrongRecord(f"`vjp` of the record of {name} must work, got {words}") from error
        gates = [getattr(cotangents, name) for name in adapter.pulled(usual)]
        return (
            getattr(out, "out", out),
            *cotangents[:3],
            *(np.concatenate(x, -1) if isinstance(x, tuple) else x for x in gates),
        )

    want = of_function(adapter, evaluate, arrays, usual, dtype)
    if recurrent:
        times, allowed = 2.0, measured(adapter, arrays, usual, evaluate)
    elif adapter.has("linear-solve"):
        allowed = _solved_rounding(adapter, arrays, usual, size)
    else:
        allowed = pulled_rounding(adapter, arrays, usual, size)
    return want, tuple(times * x + adapter.least for x in allowed)


_MANY_PAIRS = 2**14  # pairs
_MAPS = {"elu": features.elu_features, "relu": features.relu_features}


def pulled_rounding(
    adapter: Adapter, arrays: Arrays, options: Keywords, d_out: Floats
) -> tuple[float, ...]:
    r"""Bound the rounding of each result by its largest sum of absolute terms.

    With the weights p of pairs, a cotangent of v is a sum of p g over queries, and one of q or k of
    p (g . v_j - g . out_i) times how a pair's log weight moves. Sums over queries and keys may be
    running ones. Where weights have signs their sizes count, once more for the normaliser; those of
    frequencies that are not known are at most 1, for weights without.

    What the function itself loses in the dtype is no bound: where a weight is 1 it may lose 0,
    and other right pullbacks an eps of g . v.
    """
    q, k, v = (np.asarray(x, float) for x in arrays)
    n, m, g = q.shape[-2], k.shape[-2], np.abs(d_out)
    root = adapter.root(q.shape[-1])
    by_q, by_k = log_slopes(adapter, arrays, options)
    weights: Floats
    # The sizes of terms, whatever their signs: rounding is of each.
    terms_of = g @ np.swapaxes(np.abs(repeated(v, q)), -1, -2)  # of g . v
    if draws_something(adapter.record, options):  # by frequencies that are not known
        row = _cancellation(adapter, root * q, root * k, options) if adapter.waves else 1.0
        pairs = np.full(terms_of.shape, 2 * row * row * _largest_of(terms_of))
        weights = np.full(terms_of.shape, row)
        by_row = pairs[..., :1]
    else:
        weights = _sizes_of_weights(adapter, arrays, options)
        row = max(1.0, _largest_of(np.sum(weights, -1)))
        delta = np.sum(weights * terms_of, -1, keepdims=True)
        by_row = pairs = row * weights * (terms_of + delta)
        if not (adapter.has("normalised") or adapter.waves):  # it has the exact normaliser
            named = {name: x for name, x in options.items() if name != "omega"}
            shares = of_function(adapter, _attend_exactly, (q, k, _unit_rows(k)), named, np.float64)
            by_row = pairs = pairs + shares * delta
    # Gradients of a shared key head are sums over its query heads.
    shared = k.ndim > 2 and weights.ndim > 2
    group = max(1, weights.shape[-3] // k.shape[-3]) if shared else 1
    unit = CONTRACT[adapter["dtype"]] * adapter.eps
    unit *= 1 + largest_exponent(adapter, arrays, options)
    unit += terms(adapter, n * group + m)
    if adapter.has("projection") and projected.near_kinks(adapter, arrays, options):
        return (math.inf,) * 4  # slopes of either side are right
    sizes = (
        row * (_norm(v) + _largest_of(weights @ np.abs(repeated(v, q)))),
        by_q * _largest_of(np.sum(by_row, -1)),
        by_k * _largest_of(np.sum(pairs, -2)) * group,
        row * _largest_of(np.swapaxes(weights, -1, -2) @ g) * group,
    )
    # What the declared epsilon may do: add its share to any weight, twice, in numerators and in the
    # normaliser, and as much again to the derivatives of both.
    most, queries = declared(adapter, arrays, options), n * group
    share, products = 2 * most / _norm(v) if most else 0.0, _largest_of(terms_of)
    hidden = (
        most,
        *(
            share * x
            for x in (2 * by_q * products, 2 * queries * by_k * products, queries * _largest_of(g))
        ),
    )
    allowed = [unit * x + y for x, y in zip(sizes, hidden, strict=True)]
    # Of scores; a sink has what is left of the weight, at most all.
    of_options = {"bias": pairs, "sinks": np.sum(weights * terms_of, -1, keepdims=True)}
    for name in adapter.pulled(options):
        shape = np.shape(options[name]) + (1, 1) * (name == "sinks")
        total = sum_to(of_options[name], shape)
        added = of_options[name].size // max(1, total.size)
        allowed.append((unit + terms(adapter, added)) * _largest_of(total))
    return tuple(allowed)


def _sizes_of_weights(adapter: Adapter, arrays: Arrays, options: Keywords) -> Floats:
    """Return sizes of the weights of keys, (..., n, m), at the frequencies that are given."""
    if adapter.waves:
        q, k = (adapter.root(x.shape[-1]) * np.asarray(x, float) for x in arrays[:2])
        return _sizes_of_waves(adapter, q, k, options)
    fn: Any = adapter.record.differentiable
    weights: Floats = of_function(
        adapter, fn, (*arrays[:2], _unit_rows(arrays[1])), options, np.float64
    )
    return np.abs(weights)


def _attend_exactly(q: Floats, k: Floats, v: Floats, *, features: str = "", **options: Any) -> Any:
    return softmax_attention(q, k, v, **options)


def _unit_rows(k: Floats) -> Floats:
    """Return values that pick the weights of keys."""
    m = k.shape[-2]
    return np.broadcast_to(np.eye(m), (*k.shape[:-2], m, m))


def _largest_of(x: Floats) -> float:
    return float(np.max(x, initial=0.0))


def log_slopes(adapter: Adapter, arrays: Arrays, options: Keywords) -> tuple[float, float]:
    """Bound how fast the log weight of a pair moves with its query, and with its key.

    The other vector, in exact attention; frequencies, and the key itself, with features of them;
    phi(k) over phi(q) . phi(k) where phi is ReLU, and at most 1 where it is elu + 1.
    """
    q, k = (np.asarray(x, float) for x in arrays[:2])
    root = adapter.root(q.shape[-1])
    if adapter.has("feature-map") and adapter["feature_map"] == "elu":
        return 1.0, 1.0
    if adapter.has("feature-map"):
        products = q @ np.swapaxes(repeated(k, q), -1, -2)
        least = float(np.min(products, initial=np.inf))
        return _norm(k) / least, _norm(q) / least
    if adapter.has("projection"):
        return projected.slopes(adapter, arrays, options)
    exact = root**2 * _norm(k), root**2 * _norm(q)
    if adapter.has("random") and "indices" not in options:
        way = root * _longest_frequency(adapter, arrays, options)
        slopes = max(way, exact[0]) if adapter.has("local") else way, way + exact[0]
        return slopes if adapter.has("normalised") else (slopes[0] + exact[0], slopes[1] + exact[1])
    return exact


def terms(adapter: Adapter, count: float) -> float:
    """Bound the rounding of sums of so many terms, relative to the largest value.

    Halves are added in single precision.
    """
    return count * min(adapter.eps, 2.0**-23)


def _estimate_size(adapter: Adapter, arrays: Arrays, options: Keywords, got: Any) -> float:
    """Return the size of kernel estimates, at known frequencies or of those that came."""
    x, y = (adapter.root(z.shape[-1]) * np.asarray(z, float) for z in arrays)
    if adapter["features"] == "trigonometric":
        # Cosines are multiplied by e^((|x|^2 + |y|^2) / 2), and may cancel whatever comes.
        return math.exp((_norm(x) ** 2 + _norm(y) ** 2) / 2)
    if "omega" not in options:
        return float(np.max(np.abs(got)))
    omega = np.asarray(options["omega"], float)
    return float(np.max(kernels.estimate(x, y, omega, features=adapter["features"])))


def largest_exponent(adapter: Adapter, arrays: Arrays, options: Keywords) -> float:
    """Bound the exponents that an evaluation of the formulas in the log domain meets."""
    if adapter.has("rows"):
        return 0.0
    root = adapter.root(arrays[0].shape[-1])
    x, y = (root * _norm(z) for z in (arrays * 2)[:2])  # features are of one array
    w = _longest_frequency(adapter, arrays, options)
    if adapter.has("pairs"):
        return w * (x + y) + (x * x + y * y) / 2
    exponent = x * y
    if adapter.has("feature-map"):
        exponent = max(x, y)
    elif adapter.has("projection") and "omega" in options:
        exponent = projected.exponent(adapter, arrays, options)
    elif "indices" in options:
        # Centred keys are at most twice as long, and so is q . k; k . k' is at most (2 y)^2.
        exponent = 2 * x * y + 4 * y * y if adapter.has("linear-solve") else x * y
    elif adapter.has("random"):
        features = w * (y if adapter.has("per-query") else max(x, y)) + y * y / 2
        exponent = max(features, exponent) if adapter.has("local") else features
    if "centres" in options:
        mu = _norm(options["centres"])
        exponent = max(exponent, w * mu + mu * mu / 2)
    for name in ("bias", "sinks", "log_probability"):
        x = np.abs(np.asarray(options.get(name, 0.0), float))
        exponent += float(np.max(x, where=np.isfinite(x), initial=0.0))
    return exponent


def _longest_frequency(adapter: Adapter, arrays: Arrays, options: Keywords) -> float:
    """Return the length of the longest frequency, or of a long Gaussian vector."""
    if "omega" in options:
        return _norm(options["omega"])
    d, shared = arrays[0].shape[-1], adapter.has("random-features") or adapter.has("projection")
    about = 0.0 if shared else sum(map(_norm, (arrays * 2)[:2]))
    return math.sqrt(d) + 5 + adapter.root(d) * about  # they may lie about q + k


def _measure_condition(adapter: Adapter, arrays: Arrays, options: Keywords) -> float:
    """Measure how many eps of the largest value an honest evaluation may lose.

    A mean with positive weights loses a few, but for the exponents and where features are tiny. Of
    other estimators the formula is evaluated in two precisions; one that gives its frequencies to
    nobody, at one seed, is evaluated at arguments that differ in the last digits of single
    precision.
    """
    rng, unknown = np.random.default_rng(0), draws_something(adapter.record, options)
    dtype = _plain_dtype(adapter)

    def apart() -> Floats:
        held = np.float64 if unknown else dtype
        x, moved_options = _near(adapter, arrays, options, rng, held)
        if unknown:
            other = _near(adapter, arrays, options, rng, held)
            difference = black_box(adapter, x, moved_options) - black_box(adapter, *other)
            return difference / (2 * _NEAR)
        low, right = (
            of_function(adapter, adapter.record.naive, x, moved_options, z)
            for z in (dtype, np.longdouble)
        )
        lost: Floats = np.asarray(low - right) / np.finfo(dtype).eps
        return lost

    most = max(float(np.max(np.abs(apart()), initial=0.0)) for _ in range(4))
    return most / max(_norm(arrays[2]), 1e-300)


def _condition_of_weights(adapter: Adapter, arrays: Arrays, options: Keywords) -> float:
    """Return the condition of weights that are solved for, at indices that are given."""
    return condition_of_solve(*_for_solve(adapter, arrays), options["indices"])


def _solved_rounding(
    adapter: Adapter, arrays: Arrays, options: Keywords, size: Floats
) -> tuple[float, ...]:
    """Bound the rounding of a coreset's result and of its cotangents, at indices that are given."""
    q, k, v = _for_solve(adapter, arrays)
    found, root = errors_of_pullback(q, k, v, options["indices"], size), adapter.root(q.shape[-1])
    unit = CONTRACT[adapter["dtype"]] * adapter.eps
    unit *= 1 + largest_exponent(adapter, arrays, options)
    group = q.size // q.shape[-2] // max(1, np.size(arrays[1]) // k.shape[-2])
    out, dq, dk, dv = (unit * x for x in found)
    if not out <= _norm(v):  # which says nothing of the result
        return (math.inf,) * 4
    return out, root * dq, root * group * dk, group * dv


def _for_solve(adapter: Adapter, arrays: Arrays) -> tuple[Floats, Floats, Floats]:
    """Return queries and keys in kernel coordinates and values, of as many heads."""
    q, k, v = (np.asarray(x, float) for x in arrays)
    root = adapter.root(q.shape[-1])
    return root * q, repeated(root * k, q), repeated(v, q)


def black_box(adapter: Adapter, arrays: Arrays, options: Keywords) -> Floats:
    """Evaluate the registered function at a seed."""
    named = {"rng": options.get("seed", 0), **{k: x for k, x in options.items() if k != "seed"}}
    if adapter.has("local"):
        named = in_place(adapter, arrays, named)
    if adapter.has("projection"):
        named |= {tag: adapter[tag] for tag in ("coupling", "kernel_epsilon")}
    if adapter.record.takes("scale"):
        named["scale"] = adapter.root(arrays[0].shape[-1]) ** 2
    return np.asarray(adapter.record.fn(*arrays, **named), float)


def _cancellation(adapter: Adapter, q: Floats, k: Floats, options: Keywords) -> float:
    """Return the largest ratio of absolute terms to the normaliser of trigonometric features."""
    if "omega" not in options:  # no term is below cos(|omega| |q - k|) of its largest
        angle = (math.sqrt(q.shape[-1]) + 5) * (_norm(q) + _norm(k))
        return 1 / math.cos(angle) if angle < math.pi / 2 else math.inf
    return float(np.max(np.sum(_sizes_of_waves(adapter, q, k, options), -1)))


def _sizes_of_waves(adapter: Adapter, q: Floats, k: Floats, options: Keywords) -> Floats:
    """Return the absolute terms of each pair over the normaliser of its query."""
    k = repeated(k, q)
    omega = np.swapaxes(np.asarray(options["omega"], float), -1, -2)
    a, b = q @ omega, k @ omega
    cosine = np.cos(a) @ np.swapaxes(np.cos(b), -1, -2) + np.sin(a) @ np.swapaxes(np.sin(b), -1, -2)
    most = np.exp((np.sum(q * q, -1)[..., :, None] + np.sum(k * k, -1)[..., None, :]) / 2)
    seen = adapter.visible(q.shape[-2], k.shape[-2], options)
    normaliser = np.sum(np.where(seen, cosine / omega.shape[-1] * most, 0.0), -1, keepdims=True)
    empty = ~np.any(np.broadcast_to(seen, cosine.shape), -1, keepdims=True)
    return np.where(seen, most, 0.0) / np.where(empty, 1.0, np.abs(normaliser))


def declared(adapter: Adapter, arrays: Arrays, options: Keywords, got: Any = 0.0) -> float:
    """Bound the error that the declared epsilon may cause; infinite if that is all of it.

    Added to features or to the normaliser, it moves a mean of values by at most twice its share in
    the normaliser, over the keys that a query sees.
    """
    if not adapter["epsilon"]:
        return 0.0
    if adapter.has("pairs"):
        longest = max(adapter.root(x.shape[-1]) * _norm(x) for x in arrays)
        feature = math.exp(min(_longest_frequency(adapter, arrays, options) * longest, 700.0))
        size = _estimate_size(adapter, arrays, options, got)
        return float(adapter["epsilon"]) * (2 * feature + size)
    q, k = (adapter.root(x.shape[-1]) * np.asarray(x, float) for x in arrays[:2])
    share = _share(adapter, q, k, options)
    return _norm(arrays[2]) * 2 * share if share < 0.5 else math.inf


def _share(adapter: Adapter, q: Floats, k: Floats, options: Keywords) -> float:
    """Return the largest share of what the declared epsilon may add in the normaliser."""
    epsilon = float(adapter["epsilon"])
    if adapter.has("projection") and "omega" not in options:
        return math.inf
    if adapter.has("random") and "omega" not in options:
        # The largest feature of a query is 1; no other of a key is e^(2 |omega| |k| + ...) of it.
        y, w = _norm(k), math.sqrt(k.shape[-1]) + 5
        count = int(options.get(adapter.record.size or "", 1))
        x = _norm(q)
        least = math.exp(-min(2 * w * y + w * x + (x * x + y * y) / 2, 700.0))
        return epsilon * (2 * count + count) / least
    seen = adapter.visible(q.shape[-2], k.shape[-2], options)
    terms, added = _terms(adapter, q, k, seen, options)
    normaliser = np.abs(np.sum(np.where(seen, terms, 0.0), -1))
    # A normaliser may be a mean over frequencies: then what is added to it counts for each.
    more = np.sum(np.where(seen, added, 0.0), -1) + epsilon * len(options.get("omega", [0]))
    more = np.where(np.any(np.broadcast_to(seen, terms.shape), -1), more, 0.0)
    return float(np.max(more / np.maximum(normaliser, 1e-300), initial=0.0))


def _terms(
    adapter: Adapter, q: Floats, k: Floats, seen: Any, options: Keywords
) -> tuple[Floats, Floats]:
    """Return terms (..., n, m) of the normaliser, and what the epsilon adds to each.

    Features are taken as small as they may be: stabilised or not, by the largest omega . x of a
    query, and of all keys. Exponentials of softmax are stabilised by the largest that is seen.
    """
    epsilon = float(adapter["epsilon"])
    k = repeated(k, q)
    if adapter.has("feature-map"):
        phi_q, phi_k = (FEATURE_MAPS[adapter["feature_map"]](x) for x in (q, k))
    elif adapter.has("projection"):
        phi_q, phi_k = (projected.project(adapter, x, options["omega"]).phi for x in (q, k))
    elif "omega" in options and not adapter.has("per-query"):
        omega = np.swapaxes(np.asarray(options["omega"], float), -1, -2)
        phi_q, phi_k = (
            np.exp(
                a - np.max(a, axes, keepdims=True, initial=0.0) - np.sum(x * x, -1)[..., None] / 2
            )
            for x, a, axes in ((q, q @ omega, -1), (k, k @ omega, (-1, -2)))
        )
    else:  # softmax, or one for each sample
        if "omega" in options:
            q = np.asarray(options["omega"], float)
            k, seen = k[..., None, :, :], np.expand_dims(np.atleast_2d(seen), -2)
        scores = np.where(seen, q @ np.swapaxes(k, -1, -2), -np.inf)
        most = np.max(scores, -1, keepdims=True)
        terms = np.exp(scores - np.where(np.isfinite(most), most, 0.0))
        if "omega" in options:
            terms = np.min(terms, -2)
        return terms, np.full_like(terms, epsilon)
    total_q, total_k = (np.sum(phi, -1) for phi in (phi_q, phi_k))
    # (a + eps) . (b + eps), less a . b.
    added = epsilon * (total_q[..., :, None] + total_k[..., None, :]) + epsilon**2 * phi_q.shape[-1]
    return phi_q @ np.swapaxes(phi_k, -1, -2), added


@np.errstate(over="ignore")
def _norm(x: Any) -> float:
    """Return the largest length of a row, which may be infinite."""
    x = np.asarray(x, float)
    return float(np.max(np.sqrt(np.sum(x * x, -1)), initial=0.0))
