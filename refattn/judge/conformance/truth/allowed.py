"""Compute the reference of a call, and how far from it an honest evaluation may be."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from .... import features, kernels, naive
from ....arrays.library import Floats
from ....attention import attend
from ....gradients import vjp
from ....registry.record import DECLARED
from ..candidate.adapter import Adapter
from ..candidate.failures import WrongRecord
from ..candidate.gates import with_pairs
from ..candidate.limits import Arrays, Keywords, copies, in_place, repeated
from ..candidate.tags import draws_something
from . import projected, recurrences
from .solves import condition_of_solve

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
    off = rounding(adapter, arrays, options, want, known=True)
    return want, off + declared(adapter, arrays, options, want)


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
    adapter: Adapter,
    arrays: Arrays,
    options: Keywords,
    *functions: Callable[..., Any],
    added: float = 0.0,
    want: Any = None,
) -> tuple[float, ...]:
    """Bound the rounding of each result by what its formula loses in the dtype.

    Recurrences also run in chunks. What is right is `want`, if that is known: else results with
    more digits. Of an estimator that gives its frequencies to nobody there is what its results move
    by at one seed. Sums have so many terms `added`, in any order, and exponents of recurrences may
    be differences of sums of all decays: in single precision at least.
    """
    recurrent, contract = adapter.has("recurrent"), CONTRACT[adapter["dtype"]]
    unknown = not functions and draws_something(adapter.record, options)
    ways, rng, found = functions or (adapter.record.naive,), np.random.default_rng(0), []
    if recurrent and not functions:
        ways = tuple(recurrences.declared_formula(adapter, x) for x in (False, True))
    low, high = "float64" if adapter["dtype"] == "float64" else "float32", "longdouble"
    if _are_many(adapter, arrays):
        low, high, want = "float32", "float64", None
    eps = 2 * _NEAR if unknown else float(np.finfo(low).eps)
    # Each twice, with other last digits: one evaluation may be right by chance.
    for way in ways if want is not None else ways * 2:
        at = (arrays, options) if want is not None else _near(adapter, arrays, options, rng)
        if unknown:
            others = _near(adapter, arrays, options, rng)
            one, other = black_box(adapter, *at), black_box(adapter, *others)
        else:
            one = of_function(adapter, way, *at, low)
            other = of_function(adapter, way, *at, high) if want is None else want
        both = zip(one, other, strict=True) if isinstance(one, tuple) else ((one, other),)
        found.append([(_size(x - y) / eps, _size(y)) for x, y in both])
    lost, size = np.max(found, axis=0).T
    exponent = 0.0 if recurrent else largest_exponent(adapter, arrays, options)
    unit = contract * adapter.eps * (2 + exponent) + terms(adapter, added)
    logs = recurrences.sum_of_logs(adapter, arrays[1].shape[-2], options) if recurrent else 0.0
    allowed = unit * (lost + size) + 2 * contract * terms(adapter, logs) * size
    return tuple(allowed.tolist())


def _are_many(adapter: Adapter, arrays: Arrays) -> bool:
    """Say whether pairs are too many for extended precision."""
    return arrays[0].shape[-2] * arrays[1].shape[-2] > 2**14 and not adapter.has("recurrent")


def _size(x: Any) -> float:
    """Return the largest size, infinite if there is a nan."""
    return float(np.max(np.nan_to_num(np.abs(x), nan=math.inf), initial=0.0))


def _near(
    adapter: Adapter, arrays: Arrays, options: Keywords, rng: np.random.Generator
) -> tuple[Arrays, Keywords]:
    """Move arguments in the last digits of single precision, which they then have."""

    def moved(x: Any) -> Floats:
        y: Floats = np.asarray(x, float) * (1 + _NEAR * rng.choice([-1.0, 1.0], np.shape(x)))
        return y.astype(np.float32).astype(float)

    floats = {"omega", "centres", "log_probability", "initial_state", *adapter.record.gates}
    moved_options = {k: moved(x) if k in floats else x for k, x in options.items()}
    return tuple(map(moved, arrays)), moved_options


_NEAR = 2.0**-20


def rounding(
    adapter: Adapter, arrays: Arrays, options: Keywords, got: Any = 0.0, *, known: bool = False
) -> float:
    """Return C eps (1 + largest exponent), and one for each term of the sums, of the largest value.

    Terms may be added one by one, in any order: numerator and normaliser are each off by at most
    half an eps of the absolute terms for each of them. A quotient N / D of sums with cancellation,
    of condition c = sum |terms| / |D|, is off by c eps of the largest value through N, and by c eps
    of itself through D.
    """
    if adapter.has("recurrent"):
        return measured(adapter, arrays, options)[0]
    added = sum(np.shape(options.get("omega", ()))[-2:-1])  # frequencies
    solved = adapter.has("linear-solve") and not draws_something(adapter.record, options)
    if not adapter.has("pairs"):
        # As often as there are copies may a candidate add every key.
        n, m = (x.shape[-2] for x in arrays[:2])
        added += m * copies(adapter, n, m, options)
        drawn = adapter.has("projection") and "omega" not in options
        if drawn or not (solved or adapter.waves or adapter.has("normalised", "nonnegative")):
            return measured(adapter, arrays, options, added=added, want=got if known else None)[0]
    unit = CONTRACT[adapter["dtype"]] * adapter.eps
    unit *= 1 + largest_exponent(adapter, arrays, options)
    if adapter.has("pairs"):
        size = _estimate_size(adapter, arrays, options, got)
        return (unit + terms(adapter, added)) * size + _UNDERFLOWS.get(str(adapter["dtype"]), 0.0)
    unit += terms(adapter, added)
    condition, size = 1.0, _norm(arrays[2])
    if adapter.waves:
        q, k = (adapter.root(x.shape[-1]) * np.asarray(x, float) for x in arrays[:2])
        condition = _cancellation(adapter, q, k, options)
        size += _norm(got)
    elif solved:
        condition = _condition_of_weights(adapter, arrays, options)
        if condition * unit > 1:  # which says nothing of the result
            return math.inf
    return condition * unit * size


def pulled(adapter: Adapter, arrays: Arrays, options: Keywords) -> tuple[Arrays, tuple[float, ...]]:
    """Return output and cotangents of q, k, v in extended precision, and errors allowed.

    Of many pairs in float64, which takes far less time and has an error of its own.
    """
    many = _are_many(adapter, arrays)
    way, usual = _pullback(adapter, options)
    want = of_function(adapter, way, arrays, usual, np.float64 if many else np.longdouble)
    times = 2.0 if many or adapter.has("recurrent") else 1.0
    allowed = pulled_rounding(adapter, arrays, options, want)
    return want, tuple(times * x + adapter.least for x in allowed)


_MAPS = {"elu": features.elu_features, "relu": features.relu_features}


def _pullback(adapter: Adapter, options: Keywords) -> tuple[Callable[..., Arrays], Keywords]:
    """Return what evaluates the output and all cotangents, and the options that it takes."""
    apart = ("d_out", "d_lse", "return_lse", "autograd")
    usual = {k: x for k, x in options.items() if k not in apart}

    def evaluate(*wide: Floats, **named: Any) -> Arrays:
        fn, dtype = adapter.record.differentiable, wide[0].dtype
        d_out = np.asarray(options["d_out"], dtype)
        cotangent: Any = (d_out, None) if adapter.has("recurrent") else d_out
        if "d_lse" in options:
            d_lse = np.asarray(options["d_lse"], dtype)
            d_lse = d_lse / np.log(dtype.type(2)) if adapter["lse_base"] == "2" else d_lse
            # Only `attend` returns lse, and so takes its cotangent.
            fn, cotangent = attend, (d_out, d_lse)
        if "feature_map" in named:
            named["feature_map"] = _MAPS[adapter["feature_map"]]
        try:
            out, pullback = vjp(fn, *wide, **named)
            cotangents = pullback(cotangent)
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

    return evaluate, usual


def pulled_rounding(
    adapter: Adapter, arrays: Arrays, options: Keywords, want: Any = None
) -> tuple[float, ...]:
    """Bound the rounding of the output and of all cotangents, and what a declared epsilon does.

    Sums over queries and keys may be running ones. Weights by frequencies that are not known are at
    most 1, or have as large terms as cancel.
    """
    q, k, v = (np.asarray(x, float) for x in arrays)
    if adapter.has("projection") and projected.near_kinks(adapter, arrays, options):
        return (math.inf,) * 4  # slopes of either side are right
    m, (evaluate, usual) = k.shape[-2], _pullback(adapter, options)
    # Gradients of a shared key head are sums over its query heads.
    queries = max(1, q.size // q.shape[-1] * m // max(1, k.size // k.shape[-1]))
    unknown, most = draws_something(adapter.record, usual), declared(adapter, arrays, usual)
    allowed: tuple[float, ...] = ()
    if not unknown:
        allowed = measured(adapter, arrays, usual, evaluate, added=queries + m, want=want)
        if adapter.has("linear-solve"):
            # Other ways to solve lose more in cotangents too, as they may in the output.
            more = max(1.0, rounding(adapter, arrays, usual) / allowed[0])
            allowed = tuple(more * x for x in allowed)
        if not most:
            return allowed
    # The sizes of terms, whatever their signs, of g . v.
    g, slopes = np.abs(np.asarray(options["d_out"], float)), log_slopes(adapter, arrays, usual)
    products = float(np.max(g @ np.swapaxes(np.abs(repeated(v, q)), -1, -2), initial=0.0))
    largest = float(np.max(g, initial=0.0))
    sizes = (2 * slopes[0] * products, 2 * queries * slopes[1] * products, queries * largest)
    if unknown:
        unit = CONTRACT[adapter["dtype"]] * adapter.eps
        unit *= 1 + largest_exponent(adapter, arrays, usual)
        unit += terms(adapter, queries + m)
        if adapter.waves:
            q, k = (adapter.root(q.shape[-1]) * x for x in (q, k))
            unit *= _cancellation(adapter, q, k, usual) ** 2
        allowed = tuple(unit * x for x in (2 * _norm(v), *sizes))
    # A declared epsilon may add its share to any weight, twice, in numerators and in the
    # normaliser, and as much again to the derivatives of both.
    share = 2 * most / _norm(v) if most else 0.0
    hidden = (most, *(share * x for x in sizes))
    return tuple(x + y for x, y in zip(allowed, hidden, strict=False)) + allowed[4:]


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


def _condition_of_weights(adapter: Adapter, arrays: Arrays, options: Keywords) -> float:
    """Return the condition of weights that are solved for, in kernel coordinates."""
    q, k, v = (np.asarray(x, float) for x in arrays)
    root = adapter.root(q.shape[-1])
    q, k = root * q, repeated(root * k, q)
    return condition_of_solve(q, k, repeated(v, q), options["indices"])


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


def _norm(x: Any) -> float:
    """Return the largest length of a row."""
    x = np.asarray(x, float)
    return float(np.max(np.sqrt(np.sum(x * x, -1)), initial=0.0))
