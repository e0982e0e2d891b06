r"""Checks of the laws of randomized attention and of LARA, whose frequencies depend on the inputs.

One sample of randomized attention, and one proposal of LARA, give their frequency: keys weigh
:math:`\xi(k, \omega) = e^{\omega \cdot k - |k|^2/2}`, so that ratios of weights determine it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from itertools import combinations
from typing import Any

import numpy as np
from scipy import special

from ....arrays.library import Floats
from ... import stats
from ..candidate.failures import Failure
from ..candidate.limits import Keywords
from ..truth.allowed import allowed_error
from .recovery import check_normal, draw_results, keep_p, recover_frequency, recovery_error
from .trials import CheckRun, add_check


def _target(t: CheckRun, d: int) -> tuple[Floats, Floats, Floats]:
    """Return a query, keys in general position and their weights, in kernel coordinates."""
    q = t.normal(d)
    # Then the groups of keys along the last axis weigh about the same.
    q[-1] = 0.0
    keys = np.concatenate([np.zeros((1, d)), 2 * np.eye(d)]) + t.normal(d, size=0.3)
    keys[:, -1] += 1.75 * (-1.0) ** np.arange(d + 1)  # two groups far apart, of similar weights
    root = t.adapter.root(d)
    q, keys = (root * t.adapter.exact(z / root) for z in (q, keys))
    return q, keys, special.softmax(keys @ q)


@add_check
def target_law(t: CheckRun) -> None:
    """Recover frequencies from single samples of the second of three queries, d = 4.

    With fewer seeds, also of the last of six queries of the last head, d = 8.
    """
    _target_law(t, 4, (), 3, 1, 1.0)
    _target_law(t, 8, t.adapter.lead(2, 2), 6, 5, 0.5)


@add_check
def masked_target_law(t: CheckRun) -> None:
    """Recover frequencies as for `target_law`, with a key of large weight masked."""
    _target_law(t, 4, (), 3, 1, 0.5, hide="mask")


@add_check
def causal_target_law(t: CheckRun) -> None:
    """Recover causal frequencies of the last query but one; the last key has a large weight."""
    _target_law(t, 4, (), 6, 4, 0.5, hide="causal")


def _target_law(
    t: CheckRun,
    d: int,
    lead: tuple[int, ...],
    n: int,
    query: int,
    share: float,
    hide: str | None = None,
) -> None:
    q, keys, weight = _target(t, d)
    root = t.adapter.root(d)
    queries, shown = t.normal(*lead, n, d), t.normal(*lead, d + 1, d)
    last = (-1,) * len(lead)
    queries[(*last, query)], shown[last] = q, keys
    options: Keywords = {}
    if hide is not None:
        # A key that would have most of the weight, were it not hidden.
        shown = np.concatenate([shown, (2 * q)[None]])
        seen = np.broadcast_to(np.arange(d + 2) <= d, (n, d + 2)).copy()
        options = {"mask": seen} if hide == "mask" else {"causal": True}
    values = np.broadcast_to(np.eye(shown.shape[-2]), (*lead, *[shown.shape[-2]] * 2))

    def one(seed: int) -> Floats:
        asked = {**t.adapter.record.sized(1), "seed": seed, **options}
        out = t.call(queries / root, shown / root, values, **asked)
        return recover_frequency(out[(*last, query)][: d + 1], keys)

    omega = draw_results(t, one, share)
    # One coordinate's map to a normal number has slope at most 1 (Jensen, since the normal density
    # is a concave function of the distribution function); the weights of the others add to it.
    size = math.sqrt(d) + 6 + float(np.max(np.linalg.norm(q + keys, axis=-1)))
    spread = float(np.linalg.norm(np.linalg.inv(keys[1:] - keys[0]), 2))
    far = float(np.max(np.abs(keys[:, None] - keys)))
    error = 64 * t.adapter.eps * (1 + size * float(np.max(np.abs(keys))) * d) * spread * (1 + far)
    check_normal(t, _rosenblatt(omega, q + keys, weight), error, f"d = {d}, ")


def _rosenblatt(omega: Floats, centres: Floats, weight: Floats) -> Floats:
    """Turn draws from the mixture of N(centre_j, I) into iid N(0, I) rows.

    U_i is the distribution function of coordinate i given those before it (Rosenblatt, 1952).
    """
    log_r = np.broadcast_to(np.log(weight), (len(omega), len(weight)))
    columns = []
    for i in range(omega.shape[-1]):
        z = omega[:, i, None] - centres[:, i]
        log_r = log_r - special.logsumexp(log_r, -1, keepdims=True)
        # Both tails in the log domain, or far coordinates are lost to rounding.
        low = special.logsumexp(log_r + special.log_ndtr(z), -1)
        high = special.logsumexp(log_r + special.log_ndtr(-z), -1)
        columns.append(np.where(low < high, special.ndtri_exp(low), -special.ndtri_exp(high)))
        log_r = log_r - z * z / 2
    return np.stack(columns, -1)


@add_check
def choices(t: CheckRun) -> None:
    """Count how many of 16 samples choose one of a thousand light keys: a binomial distribution.

    A heavy key comes before the light ones, and a key that is never chosen comes after them, far
    away, so that the result is the fraction of samples that chose a light key.
    """
    from scipy import stats as laws

    d, samples, light, far = 2, 16, 1000, 14.0
    sized = t.adapter.record.sized(samples)
    root = t.adapter.root(d)
    heavy = [math.log(0.9 / 0.1 * light), far]
    keys = np.concatenate([[heavy], np.tile([[0.0, -far]], (light, 1)), [[-30.0, 0.0]]])
    q, keys = (t.adapter.exact(x / root) for x in (np.array([[1.0, 0.0]]), keys))
    weight = special.softmax(root * root * (keys @ q[0]))
    values = np.ones((light + 2, 1))
    values[[0, -1]] = 0.0
    share = float(weight @ values[:, 0])

    def one(seed: int) -> Floats:
        return np.asarray(samples * t.call(q, keys, values, **sized, seed=seed)[0, 0])

    results = draw_results(t, one)
    counts = np.round(results)
    if np.max(np.abs(results - counts)) > 0.01:
        raise Failure(
            "whole numbers of samples", f"{results[np.argmax(np.abs(results - counts))]:.4g}"
        )
    n = len(counts)
    law = laws.binom(samples, share)
    below, at = law.cdf(counts - 1), law.pmf(counts)
    uniform = np.clip(below + t.rng.random(n) * at, 0.0, 1.0)  # exactly so if counts are binomial
    keep_p(t, "counts", stats.ks(uniform, lambda u: u), n, stats.ks)
    p = stats.binomial(int(np.sum(counts)), n * samples, share)
    keep_p(t, "share", p, n * samples, stats.binomial, p=share)


@add_check
def unbiased(t: CheckRun) -> None:
    """Test the mean weights of three keys at S = 16 by bounds for numbers between 0 and 1."""
    d, m, root = 4, 6, t.adapter.root(4)
    q, k = (t.normal(count, d, size=1 / root) for count in (3, m))
    k = t.adapter.exact(k + q[1] * (np.arange(m) < 2)[:, None])
    want = special.softmax((root * root) * (q @ k.T), -1)
    values, sized = np.eye(m), t.adapter.record.sized(16)
    weights = draw_results(t, lambda seed: t.call(q, k, values, **sized, seed=seed)[1])
    n = len(weights)
    allowed = 2 * allowed_error(t.adapter, (q, k, values), {})
    if np.any((weights < -allowed) | (weights > 1 + allowed)):
        raise Failure("weights between 0 and 1", f"{np.min(weights):.3g} to {np.max(weights):.3g}")
    for j in range(3):
        x = np.clip(weights[:, j], 0.0, 1.0)
        mean = float(want[1, j])
        keep_p(t, f"weight of key {j}, bets", stats.betting(x, mean), n, None)
        p = stats.empirical_bernstein(x, mean)
        test = stats.empirical_bernstein  # bets have no proven power
        keep_p(t, f"weight of key {j}", p, n, test, variance=mean * (1 - mean))


@add_check
def mean_of_samples(t: CheckRun) -> None:
    r"""Recover both samples at S = 2 from the weights of five keys j c e_0.

    Weights times e^{|k|^2/2} are A_1 a_1^j + A_2 a_2^j with a_s = e^{c omega_s}, and the mean of
    two ratios has A_s = 1 / (2 sum_j e^{omega_s . k_j - |k_j|^2/2}) (Prony's method).
    """
    d, c, root = 3, 1.0, t.adapter.root(3)
    line = np.zeros((5, d))
    # Equal steps along one axis: the weights are sums of powers.
    line[:, 0] = c * np.arange(5)
    square = np.exp(np.asarray(line[:, 0], np.longdouble) ** 2 / 2)
    q, sized = np.zeros((2, d)), t.adapter.record.sized(2)
    start = t.new_seed()

    def shares(out: Floats) -> tuple[Floats, float]:
        """Return A_s times twice the normaliser, 1 each, and the gap of the frequencies."""
        m = out * square
        pivot = m[0] * m[2] - m[1] ** 2
        total, product = (m[0] * m[3] - m[1] * m[2]) / pivot, (m[1] * m[3] - m[2] ** 2) / pivot
        gap = np.sqrt(max(total * total - 4 * product, 0.0))
        larger = (total + gap) / 2
        nodes = np.array([larger, product / larger])  # without cancellation
        weight = (m[1] - nodes[::-1] * m[0]) / (nodes - nodes[::-1])
        return 2 * weight * (nodes[:, None] ** np.arange(5) @ (1 / square)), float(gap / abs(total))

    seeds = range(start, start + 16)
    outs = [t.call(q, line / root, np.eye(5), **sized, seed=seed)[1] for seed in seeds]
    curved = (math.log(max(x[0] * x[2] / x[1] ** 2, 1e-300)) + c * c for x in outs)
    bend = max(0.0, *map(abs, curved))
    with np.errstate(all="ignore"):
        out = max(outs, key=lambda x: np.nan_to_num(shares(x)[1], nan=-1.0))
    if not bend > 1e3 * t.adapter.eps:  # by chance only if 16 pairs all lie within 1e-2
        raise Failure("the mean of two different samples", "the result of a single one")
    sums = shares(out)[0]
    allowed = 0.0
    unit = recovery_error(t, d, 4 * c) * 4 * c  # of the output of the longest key
    for j in range(5):  # to first order, by how much each output's rounding moves the shares
        moved = out.copy()
        moved[j] *= 1 + unit
        allowed += float(np.max(np.abs(shares(moved)[0] - sums)))
    t.case = None
    t.equal(sums, np.ones(2), allowed)


@add_check
def sample_average(t: CheckRun) -> None:
    """Compare the distribution of two of twelve weights, at S = 16 and 64, with refattn's own."""
    d, m, many, root = 4, 12, min(10 * t.size, 20_000), t.adapter.root(4)
    q, k = (t.normal(count, d, size=1 / root) for count in (2, m))
    k[-1] = 1.2 * q[-1]  # the last key matters
    k, values = t.adapter.exact(k), np.eye(m)[:, [0, -1]]
    for samples in (16, 64):
        sized = t.adapter.record.sized(samples)

        def one(seed: int, sized: Keywords = sized) -> Floats:
            return np.asarray(t.call(q, k, values, **sized, seed=seed)[-1])

        weights = draw_results(t, one, 0.5)
        # Each of many equal problems draws by itself: one call gives as many samples of the law.
        queries = np.broadcast_to(q[-1:], (many, 1, d))
        ours = t.adapter.record.fn(queries, k, values, **sized, scale=root * root, rng=t.rng)[:, 0]
        for j, key in enumerate(("first", "last")):
            p = stats.dkwm_two_sample(weights[:, j], ours[:, j])
            name, test = f"S = {samples}, weight of the {key} key", stats.dkwm_two_sample
            keep_p(t, name, p, len(weights), test, reference=many)


@add_check
def draws_apart(t: CheckRun) -> None:
    """Pass equal queries, heads and batch members; their results must differ.

    There are more queries than keys, so some queries draw from the same component; if they also
    had the same noise, they would have the same result. Keys are small, so no weight rounds to 1.
    """
    lead = t.adapter.lead(2, 2)
    (q, k, v), _ = t.problem(1, 3, 3, size=0.5)
    q, k, v = (np.broadcast_to(x, (*lead, *x.shape)).copy() for x in (np.repeat(q, 4, 0), k, v))
    out = t.call(q, k, v, **t.options(1)).reshape(-1, 3)
    for first, second in combinations(out, 2):
        if np.array_equal(first, second):
            raise Failure("different draws for equal queries and heads", "the same")
    t.error = 0.0


@add_check
def proposal_noise(t: CheckRun) -> None:
    """Recover frequencies at C = 1 from successive seeds, and test their differences.

    Queries are equal and keys nearly equal. So every centre that can be computed from them is the
    same up to the distance between keys.
    """
    d, root = 4, t.adapter.root(4)
    # Nearer keys give nearer centres and fewer digits of the frequency.
    c = 1e-3 if t.adapter["dtype"] == "float64" else 0.03
    keys = np.concatenate([np.zeros((1, d)), c * np.eye(d)])
    q = np.broadcast_to(t.normal(1, d, size=0.5 / root), (d + 1, d))

    def one(seed: int) -> Floats:
        out = t.call(q, keys / root, np.eye(d + 1), **t.adapter.record.sized(1), seed=seed)[0]
        return recover_frequency(out, keys)

    omega = draw_results(t, one)
    # The difference of two draws has no centre left.
    omega = omega[: len(omega) // 2 * 2]
    error = 2 * c + 2 * recovery_error(t, d, c)
    check_normal(t, (omega[::2] - omega[1::2]) / math.sqrt(2), error)


def _two_exponentials(m: Floats) -> tuple[Floats, Floats]:
    """Return nodes x and weights of rows w_0 x_0^i + w_1 x_1^i (Prony's method).

    In rationals: the numbers of a row may differ by many orders, and a solution in floats is off by
    roundings of the largest.
    """
    rows = [[Fraction(float(x)) for x in row] for row in m]
    terms = [(y, -x, z) for row in rows for x, y, z in zip(row, row[1:], row[2:], strict=False)]
    xx, xy, yy, xz, yz = (
        sum((t[i] * t[j] for t in terms), Fraction(0))
        for i, j in ((0, 0), (0, 1), (1, 1), (0, 2), (1, 2))
    )
    det = xx * yy - xy * xy
    total, product = (xz * yy - yz * xy) / det, (xx * yz - xy * xz) / det
    gap = Fraction(math.sqrt(max(total * total - 4 * product, Fraction(0))))
    first = (total + gap) / 2
    nodes = first, product / first
    weights = [
        [(y - nodes[1] * x) / (nodes[0] - nodes[1]), (nodes[0] * x - y) / (nodes[0] - nodes[1])]
        for x, y, *_ in rows
    ]
    return np.array(nodes, float), np.array(weights, float)


@add_check
def two_proposals(t: CheckRun) -> None:
    """Recover both frequencies along an axis, at C = 2, from the weights of five keys on it.

    Two queries that differ by b e_0 weigh the proposals differently by e^{b (omega_1 - omega_2)}
    along the axis, whatever the centres and the weighting ("balance" or "own") are.
    """
    b = 0.5

    def excess(omega: Floats, ratio: Floats) -> float:
        return float(ratio[1] - ratio[0] - b * (omega[0] - omega[1]))

    _check_pair(t, b, excess, "two proposals")


@add_check
def given_moments_weights(t: CheckRun) -> None:
    """Recover both frequencies along an axis, at S = 2, and their importance weights.

    The weights depend on this axis alone if mean and covariance are those of N(0, I) on the others.
    """
    mean, variance = 0.5, 1.5

    def excess(omega: Floats, ratio: Floats) -> float:
        log_weight = (omega - mean) ** 2 / (2 * variance) - omega**2 / 2
        return float(ratio[0] - (log_weight[0] - log_weight[1]))

    cov = np.diag([variance, 1.0, 1.0])
    _check_pair(t, 0.0, excess, "two frequencies", mean=mean * np.eye(3)[0], cov=cov)


def _check_pair(
    t: CheckRun, b: float, excess: Callable[[Floats, Floats], float], what: str, **more: Any
) -> None:
    """Check that an excess is 0, of two frequencies and the log ratios of their weights.

    There is a ratio at a query that is 0, and one at b e_0.
    """
    d, c, root = 3, 1.0, t.adapter.root(3)
    line = np.zeros((5, d))
    line[:, 0] = c * (np.arange(5) - 2)
    square = np.exp(line[:, 0] ** 2 / 2)
    q = np.zeros((5, d))
    q[1, 0] = b

    def mixture(out: Floats) -> tuple[Floats, Floats]:
        """Return nodes e^{c omega} and log ratios of the weights at both queries."""
        nodes, weights = _two_exponentials(out[:2] * square)
        weights = weights * nodes**2  # from those of the first key to those of the one at 0
        return nodes, np.log(weights[:, 0] / weights[:, 1])

    def excess_of(out: Floats) -> float:
        nodes, ratio = mixture(out)
        return excess(np.log(nodes) / c, ratio)

    def gap(out: Floats) -> float:
        with np.errstate(all="ignore"):
            try:
                nodes, ratio = mixture(out)
                known = bool(np.all(nodes > 0) and np.all(np.isfinite(ratio)))
                return float((nodes[0] - nodes[1]) / nodes[0]) if known else -1.0
            except (ArithmeticError, ValueError):  # they are not two, or not numbers
                return -1.0

    start, sized = t.new_seed(), t.adapter.record.sized(2)
    outs = [
        t.call(q / root, line / root, np.eye(5), **sized, seed=seed, **more)
        for seed in range(start, start + 16)
    ]
    out = max(outs, key=gap)
    # By chance only if the frequencies of 16 seeds are all that near.
    if gap(out) < 1e-2:
        raise Failure(f"the results of {what}", "those of a single one")
    allowed = 0.0
    unit = recovery_error(t, d, 2 * c) * 2 * c  # of the output of the longest key
    for i in np.ndindex(2, 5):  # to first order, by how much each output's rounding moves it
        moved = out.copy()
        moved[i] *= 1 + unit
        allowed += abs(excess_of(moved) - excess_of(out))
    t.case = None
    t.equal(np.array(excess_of(out)), np.zeros(()), allowed)


@add_check
def unseen_weights(t: CheckRun) -> None:
    """Test nothing, and report UNDERPOWERED.

    To test the weights, declare centres=chunks if your proposals are those of refattn, for float32
    or float64 arrays of any number of tokens; or take omega= and centres= (--capability omega).
    """
    t.power["centres and importance weights"] = (lambda alpha: math.inf, 1.0)
    t.advice = (
        "to test centres and importance weights, add --tag centres=chunks if your proposals are "
        "the means of chunks (float32 or float64, any number of tokens), or --capability omega if "
        "your function takes omega= and centres="
    )


@add_check
def proposal_average(t: CheckRun) -> None:
    """Compare the distribution of weights at C = 3 with that of refattn.

    The tokens of each chunk are near one point, on a separate axis. There the weights by a chunk's
    own proposal differ most from those by the mixture: their distribution functions are at least
    0.12 apart.
    """
    d, m, many, root = 4, 6, min(25 * t.size, 100_000), t.adapter.root(4)
    # Tokens of a chunk together, so that each chunk has a proposal of its own place.
    points = np.repeat(np.diag([1.1, 0.9, 0.7, 0.0])[:3], m // 3, 0)
    q, k = (t.adapter.exact((points + t.normal(m, d, size=0.03)) / root) for _ in range(2))
    sized = t.adapter.record.sized(3)
    weights = draw_results(t, lambda seed: t.call(q, k, np.eye(m), **sized, seed=seed)[1])
    ours = t.adapter.record.fn(
        *(np.broadcast_to(q, (many, m, d)), k, np.eye(m)),
        **sized,
        weighting=t.adapter["weighting"],
        scale=root * root,
        rng=t.rng,
    )[:, 1]
    for j in range(3):
        p = stats.dkwm_two_sample(weights[:, j], ours[:, j])
        keep_p(t, f"weight of key {j}", p, len(weights), stats.dkwm_two_sample, reference=many)
