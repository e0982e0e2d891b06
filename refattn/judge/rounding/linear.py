r"""Predict the rounding errors of attention that is linear in features, and bound them.

.. math:: \mathrm{out}_i = \frac{\sum_s \phi_{is} \, U_s}{\sum_s \phi_{is} \, Z_s}, \qquad
    U_s = \sum_j \psi_{js} \, v_j, \quad Z_s = \sum_j \psi_{js}

With relative errors :math:`\alpha_{is}` of a query's features, :math:`\beta_{js}` of a key's and
:math:`\gamma_{sc}`, :math:`\gamma'_s` of the sums, where they are rounded, to first order

.. math:: \delta \mathrm{out}_{ic} = \frac{1}{\sum_s \phi_{is} Z_s} \sum_s \phi_{is} \Big[
    \alpha_{is} (U_{sc} - Z_s \mathrm{out}_{ic})
    + \sum_j \psi_{js} \beta_{js} (v_{jc} - \mathrm{out}_{ic})
    + \gamma_{sc} U_{sc} - \gamma'_s Z_s \mathrm{out}_{ic} \Big] + \text{sums} + \text{rounding}.

All queries of a head share the errors of its keys: rows are not independent here.

A kernel that computes step by step rounds products of features,
:math:`a_{ij} = \sum_s \phi_{is} \psi_{js}`, their sums with and without values, and the quotient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...arrays import checks, frequencies
from ...arrays.blocks import blocks
from ...arrays.library import Doubles
from .formats import Format, widen
from .roundings import BIAS, RMS, SURE, WORST, Roundings, RowErrors, walk

_DOUBLE_ELU = 2.0**-40  # by which elu(x) + 1 may differ in float64, over its size or 1
_STATE_NUMBERS = 2**21  # numbers of the sums over the keys of some queries


class FeatureErrors(NamedTuple):
    """Features (rows, S), up to a factor for each row or each S that cancels."""

    value: Doubles  # what is computed
    nearest: Doubles  # the same, rounded to nearest where the profile rounds it
    variance: Doubles  # of the relative error
    most: Doubles  # the largest relative error is e^most - 1

    def rows(self, i: slice) -> FeatureErrors:
        return FeatureErrors(*(x[i] for x in self))


class LinearHead(NamedTuple):
    """Features of the queries and keys of a head, in float64, and the values."""

    queries: FeatureErrors
    keys: FeatureErrors
    v: Doubles
    visible: npt.NDArray[np.bool_] | None  # keys, (m,)
    causal: bool
    of_map: bool = False  # whether products of features and sums may be rounded


def read_frequencies(omega: Any, log_weight: Any, features: str, q: Doubles) -> dict[str, Doubles]:
    """Check frequencies (..., S, d) of positive features, and log weights (..., 1, S)."""
    checks.choice("features", features, ("positive", "hyperbolic"))
    omega = widen("omega", omega)
    weights = None if log_weight is None else widen("log_weight", log_weight)
    omega, weights = frequencies.shared(omega, weights, q, q.shape[:-2])
    weights = np.broadcast_to(weights, omega.shape[:-1])
    if features == "hyperbolic":  # the positive ones of a frequency and of its negative
        omega, weights = np.concatenate([omega, -omega], -2), np.concatenate([weights] * 2, -1)
    return {"omega": omega, "log_weight": weights[..., None, :]}


def random_feature_head(
    q: Doubles,
    k: Doubles,
    v: Doubles,
    omega: Doubles,
    log_weight: Doubles,
    roundings: Roundings,
    *,
    scale: float,
    visible: npt.NDArray[np.bool_] | None,
    causal: bool,
) -> LinearHead:
    """Take random features exp(omega . x - |x|^2 / 2) of x = sqrt(scale) q, with weights."""
    q, k = math.sqrt(scale) * q, math.sqrt(scale) * k
    of_queries, of_keys = q @ omega.T, k @ omega.T
    squares = np.sum(k * k, -1, keepdims=True) / 2
    of_keys = of_keys - squares + log_weight
    if visible is not None:
        of_keys = np.where(visible[:, None], of_keys, -math.inf)
    # A factor of a frequency cancels between its features of queries and keys, as one of a query
    # does: with the largest key taken out here, and put in there, neither overflows.
    top = np.max(of_keys, axis=0, initial=-math.inf)
    top = np.where(np.isfinite(top), top, 0.0)
    gaps = of_queries + top
    gaps = gaps - np.max(gaps, -1, keepdims=True)
    # As they are stored: over the largest of a query, and over the largest of all keys.
    stored = of_queries - np.max(of_queries, -1, keepdims=True)
    highest = np.max(of_keys, initial=-math.inf)
    highest = highest if np.isfinite(highest) else 0.0
    phi = _exponent_errors(q, omega, of_queries, 0.0, roundings)
    psi = _exponent_errors(k, omega, of_keys, squares, roundings)
    return LinearHead(
        _round_features(np.exp(gaps), np.exp(stored), *phi, roundings.weights),
        _round_features(np.exp(of_keys - top), np.exp(of_keys - highest), *psi, roundings.weights),
        v,
        visible,
        causal,
    )


def _exponent_errors(
    x: Doubles, omega: Doubles, exponents: Doubles, squares: Any, roundings: Roundings
) -> tuple[Doubles, Doubles]:
    """Return variance and bound of the errors of exponents and of the exponential."""
    d, unit, half = x.shape[-1], roundings.accumulate.unit, roundings.softmax.unit
    exponents = np.where(np.isfinite(exponents), exponents, 0.0)
    terms = np.square(x) @ np.square(omega).T
    sums = walk(0.0, x @ omega.T, terms, d, roundings.lanes) + terms
    # |k|^2 / 2 is a running sum of d terms of one sign: sum (t / d)^2 is about d / 3.
    sums = sums + np.square(squares) * (d / 3 + 2) + 2 * np.square(exponents)
    variance = (RMS * unit) ** 2 * sums + (RMS * half) ** 2 * (np.square(exponents) + 1)
    # Sizes of products sum up to |x| |omega| at most: Cauchy and Schwarz.
    norms = np.sqrt(np.sum(x * x, -1))[:, None] * np.sqrt(np.sum(omega * omega, -1))
    most = (d + 4) * unit * (norms + squares) + (half + unit) * (4 * np.abs(exponents) + 4)
    most = most + roundings.exp * unit
    if roundings.scores is not None:
        variance = variance + np.square(RMS * roundings.scores.unit * exponents)
        # 1.01, as what is rounded has errors already.
        most = most + 1.01 * roundings.scores.unit * np.abs(exponents)
    return variance, most


def _round_features(
    value: Doubles, stored: Doubles, variance: Doubles, most: Doubles, to: Format | None
) -> FeatureErrors:
    """Round features of which a multiple is stored."""
    if to is None:
        return FeatureErrors(value, value, variance, most)
    # The stored multiple is what is rounded. A number that the type holds has no error, and one
    # halfway between two of its numbers is off by half their distance.
    size = np.where(stored == 0, 1.0, np.abs(stored))
    nearest, spacing = to.round(stored), to.spacing(stored)
    step = np.where(nearest == stored, 0.0, spacing / size)
    ratio = np.where(stored == 0, 1.0, nearest / np.where(stored == 0, 1.0, stored))
    known = np.where(2 * np.abs(nearest - stored) == spacing, 1 / 4, 1 / 12)
    return FeatureErrors(
        value, value * ratio, variance + step * step * known, most + np.log1p(step / 2)
    )


def _round_elu(features: FeatureErrors, to: Format) -> FeatureErrors:
    """Round elu(x), and then elu(x) + 1."""
    value = features.value
    below = np.where(value < 1, value - 1, 0.0)  # what is not negative is as it was given
    off = np.where(below < 0, to.spacing(below), 0.0) / np.where(value > 0, value, 1.0)
    stored = np.where(value < 1, to.round(below) + 1, value)
    rounded = _round_features(
        value, stored, features.variance + off * off / 12, features.most + np.log1p(off / 2), to
    )
    return rounded._replace(nearest=to.round(stored))


def map_head(
    q: Doubles,
    k: Doubles,
    v: Doubles,
    feature_map: Callable[[Doubles], Doubles],
    roundings: Roundings,
    *,
    visible: npt.NDArray[np.bool_] | None,
    causal: bool,
) -> LinearHead:
    """Take features of a map that is computed to a few units of the type of the sums."""

    def of(x: Doubles) -> FeatureErrors:
        value = np.asarray(feature_map(x), np.float64)
        unit = roundings.accumulate.unit
        # What the storage type holds, as ReLU's, is not computed but copied.
        variance = np.where(value == 0, 0.0, np.full_like(value, (2 * RMS * unit) ** 2))
        most = np.full_like(value, (roundings.exp + 4) * unit)
        elu = np.where(x < 0, np.expm1(np.minimum(x, 0.0)), x) + 1
        if (
            roundings.weights is not None
            and _by_steps(roundings)
            and elu.shape == value.shape
            and np.allclose(value, elu, rtol=_DOUBLE_ELU, atol=_DOUBLE_ELU)
        ):
            return _round_elu(FeatureErrors(value, value, variance, most), roundings.weights)
        return _round_features(value, value, variance, most, roundings.weights)

    keys = of(k)
    if visible is not None:
        keys = FeatureErrors(*(np.where(visible[:, None], x, 0.0) for x in keys))
    return LinearHead(of(q), keys, v, visible, causal, of_map=True)


def _by_steps(roundings: Roundings) -> bool:
    """Tell whether products of features, or sums before the division, are rounded."""
    return roundings.scores is not None or roundings.softmax.unit > roundings.accumulate.unit


class _Steps(NamedTuple):
    """What rounding step by step adds, where a query has the normaliser `mass`, for its values."""

    variance: Doubles  # of products: times v^2, v and 1
    weights: Doubles  # variance of products over their sum
    nearest: Doubles | None  # sums with v and 1; None if they are rounded alone
    units: float  # by which a product and its sums may be off
    least: Doubles  # the same near 0, where half the smallest number is more, for v and 1
    sums: Format | None  # to which sums are rounded
    normalised: bool


def _take_steps(head: LinearHead, roundings: Roundings, i: slice) -> _Steps | None:
    """Round products of features, those over their sum, and the sum, for the queries i."""
    if not head.of_map or not _by_steps(roundings):
        return None
    (queries, keys), v, to = (head.queries.rows(i), head.keys), head.v, roundings.scores
    signed = np.concatenate([v, np.ones((len(v), 1))], -1)
    (rows, d_v), sizes = (len(queries.value), v.shape[1]), np.sum(np.abs(signed), 0)
    sums = roundings.softmax if roundings.softmax.unit > roundings.accumulate.unit else None
    units = 0.0 if sums is None else sums.unit
    least = 0 * sizes if sums is None else np.full_like(sizes, sums.spacing(0.0) / 2)
    none = np.zeros((rows, 2 * d_v + 1)), np.zeros((rows, d_v))
    if to is None:  # sums over keys come first
        return _Steps(*none, None, units, least, sums, False)
    products, near = queries.value @ keys.value.T, queries.nearest @ keys.nearest.T
    if head.causal:
        ahead = np.arange(i.start, i.stop)[:, None] + len(v) - len(head.queries.value)
        hidden = np.arange(len(v)) > ahead
        products[hidden] = near[hidden] = 0.0

    def square_step(x: Doubles, to: Format) -> Doubles:
        return np.where(x == 0, 0.0, np.square(to.spacing(x)) / 12)

    near = to.round(near)
    nearest, weights = near @ signed, none[1]
    if sums is not None:
        nearest = sums.round(nearest)
    units, least = units + to.unit, least + sizes * to.spacing(0.0) / 2
    if roundings.normalised and roundings.weights is not None:
        total, divisor = (
            np.where(x == 0, 1.0, x) for x in (np.sum(products, -1, keepdims=True), nearest[:, -1:])
        )
        weights = square_step(products / total, roundings.weights) @ np.square(v)
        near = roundings.weights.round(near / divisor)
        nearest = np.concatenate([near @ v, np.ones((rows, 1))], -1)
        units += roundings.weights.unit
        least = least + sizes * np.max(np.abs(total)) * roundings.weights.spacing(0.0) / 2
    noise = square_step(products, to) @ np.concatenate([v * v, signed], -1)
    return _Steps(noise, weights, nearest, units, least, sums, roundings.normalised)


class _States(NamedTuple):
    """Sums over keys, (S, ...) or, for queries with keys of their own, (rows, S, ...)."""

    total: Doubles  # psi v and psi
    nearest: Doubles  # the same, rounded
    noise: Doubles  # psi^2 var(beta) times v^2, v and 1
    squares: Doubles  # psi^2 times v^2 and 1
    shift: Doubles  # |psi| (e^most - 1) times |v| and 1
    sizes: Doubles  # |psi| times |v| and 1


def _list_columns(keys: FeatureErrors, v: Doubles) -> Iterator[tuple[Doubles, Doubles]]:
    """List features of keys, and columns whose products with them are the states."""
    ones = np.ones((v.shape[0], 1))
    value, signed = np.abs(keys.value), np.concatenate([v, ones], -1)
    size = np.concatenate([np.abs(v), ones], -1)
    noise = np.concatenate([v * v, v, ones], -1)
    yield from (
        (keys.value, signed),
        (keys.nearest, signed),
        (np.square(value) * keys.variance, noise),
        (np.square(value), np.square(signed)),
        (value * np.expm1(keys.most), size),
        (value, size),
    )


def analyse_linear(head: LinearHead, roundings: Roundings, i: slice) -> RowErrors:
    """Say what a kernel that rounds like this may give for the queries i."""
    m, n = head.v.shape[0], head.queries.value.shape[0]
    if not head.causal:
        states = _States(*(x.T @ y for x, y in _list_columns(head.keys, head.v)))
        steps = _take_steps(head, roundings, i)
        return _analyse_rows(head.queries.rows(i), states, roundings, m, steps)
    parts, sums = [], head.keys.value.shape[-1] * (2 * head.v.shape[-1] + 1)
    for block in blocks(i.start, i.stop, max(1, min(64, _STATE_NUMBERS // max(sums, 1)))):
        first = max(0, min(m, block.start + 1 + m - n))
        before = head.keys.rows(slice(first))
        known = [x.T @ y for x, y in _list_columns(before, head.v[:first])]
        more = slice(first, max(first, min(m, block.stop + m - n)))
        fresh = [
            np.cumsum(x[:, :, None] * y[:, None, :], axis=0)
            for x, y in _list_columns(head.keys.rows(more), head.v[more])
        ]
        # Each query of the block has states of its own: those before, and the keys since.
        seen = np.clip(np.arange(block.start, block.stop) + 1 + m - n, 0, m) - first
        seen_sums = []
        for start, rest in zip(known, fresh, strict=True):
            padded = np.concatenate([np.zeros((1, *start.shape)), rest])
            seen_sums.append(start + padded[np.maximum(seen, 0)])
        rows = _analyse_rows(
            head.queries.rows(block),
            _States(*seen_sums),
            roundings,
            m,
            _take_steps(head, roundings, block),
        )
        empty = (seen + first <= 0)[:, None]
        parts.append(rows._replace(out=np.where(empty, 0.0, rows.out)))
    return RowErrors.join(parts)


def _weigh_states(weights: Doubles, states: Doubles) -> Doubles:
    """Sum weights (rows, S) times states (S, c) or (rows, S, c) over S."""
    if states.ndim == 2:
        return weights @ states
    sums: Doubles = (weights[:, None, :] @ states)[:, 0]
    return sums


def _analyse_rows(
    queries: FeatureErrors, states: _States, roundings: Roundings, m: int, steps: _Steps | None
) -> RowErrors:
    unit, narrow = roundings.accumulate.unit, roundings.states
    value = queries.value
    sums = _weigh_states(value, states.total)
    mass = sums[:, -1:]
    seen = mass != 0
    phi = value / np.where(seen, mass, 1.0)
    out = sums[:, :-1] / np.where(seen, mass, 1.0)
    d_v, square = out.shape[-1], phi * phi

    def about(x: Doubles) -> Doubles:
        """From sums with v^2, v and 1, those with (v - out)^2."""
        second, first, zeroth = np.split(x, [d_v, 2 * d_v], -1)
        return np.asarray(np.maximum(second - 2 * out * first + out * out * zeroth, 0.0))

    # An error of a query's feature multiplies the whole state: squares about its own mean value.
    total, count = states.total[..., :-1], states.total[..., -1:]
    states_squared = np.concatenate([total * total, total * count, count * count], -1)
    benford = about(_weigh_states(square * queries.variance, states_squared))
    benford += about(_weigh_states(square, states.noise))
    features = value.shape[-1]
    run = max(1, min(m, roundings.run))
    # Three sums are rounded step by step: over the keys of a run, over runs, and over features. The
    # quotient has such errors from its normaliser, too.
    sizes = np.square(states.total)
    moved = walk(0.0, states.total, states.squares, run, roundings.lanes) + sizes * max(1, m / run)
    walked = _weigh_states(square, moved)
    last = np.concatenate([out, np.ones_like(mass)], -1)
    walked += walk(0.0, last, _weigh_states(square, sizes), features, roundings.lanes)
    walked = walked[:, :-1] + out * out * walked[:, -1:]
    benford += (RMS * unit) ** 2 * (walked + 3 * out * out)
    if narrow is not None:
        ends = _weigh_states(square, np.concatenate([total * total, count * count], -1))
        benford += (RMS * narrow.unit) ** 2 * (ends[:, :-1] + out * out * ends[:, -1:])
    bound = _bound_errors(queries, states, phi, out, roundings, m, steps)
    nearest = _weigh_states(queries.nearest, states.nearest)
    known: Doubles | float = 0.0  # variances of numbers whose digits are known
    if steps is not None:
        whole = np.where(seen, mass, 1.0)
        known = about(steps.variance) / whole**2 + steps.weights
        if steps.sums is not None:
            of_sum = out * steps.sums.spacing(mass)
            of_values = 0.0 if steps.normalised else steps.sums.spacing(out * mass)
            known = known + (of_sum**2 + np.square(of_values)) / (12 * whole**2)
            nearest = steps.sums.round(nearest)
        nearest = nearest if steps.nearest is None else steps.nearest
    near = nearest[:, :-1] / np.where(nearest[:, -1:] == 0, 1.0, nearest[:, -1:])
    # Features have known spacings, too, beside RMS units: WORST for all is on the safe side.
    std, worst = np.sqrt(benford + known), np.sqrt(WORST**2 * benford + known)
    loose = np.abs(near - out) > SURE * std
    spacing = np.zeros_like(out)
    if roundings.out is not None:
        spacing = roundings.out.spacing(out)
        std, worst = (np.sqrt(x * x + spacing * spacing / 12) for x in (std, worst))
        bound = bound + roundings.out.spacing(np.abs(out) + bound) / 2
        near = roundings.out.round(near)
    free = ~loose & (std > 0) & seen
    std, worst = (np.where(free, x, math.inf) for x in (std, worst))
    none = np.zeros(out.shape[0])
    slack = (
        (roundings.exp * BIAS + 4)
        * unit
        * (_weigh_states(np.abs(phi), states.sizes)[:, :-1] + np.abs(out))
    )
    return RowErrors(out, none, none, near, std, worst, bound, none, none, none, spacing, slack, {})


def _bound_errors(
    queries: FeatureErrors,
    states: _States,
    phi: Doubles,
    out: Doubles,
    roundings: Roundings,
    m: int,
    steps: _Steps | None,
) -> Doubles:
    """Bound the errors: every rounding at its largest."""
    size, grown = np.abs(phi), np.abs(phi) * np.exp(queries.most)
    shift = _weigh_states(grown, states.shift) + _weigh_states(grown - size, states.sizes)
    features = phi.shape[-1]
    gamma = (min(m, roundings.run) + m / roundings.run + features + 4) * roundings.accumulate.unit
    if roundings.states is not None:
        gamma += 1.01 * roundings.states.unit
    gamma += 0.0 if steps is None else steps.units
    gamma = gamma / (1 - gamma) if gamma < 1 else math.inf
    sizes = _weigh_states(size, states.sizes)
    error = shift + gamma * (sizes + shift)
    if steps is not None:
        mass = np.abs(_weigh_states(queries.value, states.total)[:, -1:])
        error += 2 * steps.least / np.where(mass > 0, mass, 1.0)  # 2: of sums that are off already
    # Divided by the smallest possible normaliser, of 1 here; there is no bound if that is 0.
    mass, off = error[:, -1:], error[:, :-1]
    least = np.where(mass < 1, 1 - mass, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        bound = np.where(least > 0, (off + np.abs(out) * mass) / least, math.inf)
    return np.asarray(bound + 4 * roundings.accumulate.unit * (np.abs(out) + bound))
