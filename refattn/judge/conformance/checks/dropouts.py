r"""Checks of dropout: which weights are kept, with what factor, and by what law.

With values that are the rows of the identity outputs are the weights themselves, so that each call
says which were kept. These are tested as independent and of probability 1 - p: counts of kept
weights, and of pairs of which both or none are kept, are binomial, exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

from ....arrays.library import Floats
from ....attention import softmax_attention
from ... import stats
from ..candidate.failures import Failure, Refusal
from ..candidate.limits import Arrays, Keywords
from ..truth.allowed import (
    CONTRACT,
    largest_exponent,
    of_function,
    pulled,
    pulled_rounding,
    reference,
)
from .cases import covering, in_time, levels, problem_of, without_empty_rows
from .recovery import draw_results, keep_p
from .trials import CheckRun, add_check

_RATES = (0.5, 0.1, 0.75)
_SHARE = 1 / 6  # of the seeds of a law, as each says much


def _shown(arrays: Arrays) -> Arrays:
    """Return the same queries and keys, of moderate weights, with values that show these."""
    q, k, _ = arrays
    m = k.shape[-2]
    return q / 2, k / 2, np.broadcast_to(np.eye(m), (*k.shape[:-1], m)).copy()


def _cases(t: CheckRun) -> Iterator[tuple[Arrays, Keywords]]:
    """Yield any two of the other uses, as far as time allows."""
    uses = {name: x for name, x in levels(t.adapter).items() if name not in ("d_v", "lse")}
    uses["n"] = (5, 1, 24)
    uses["more"] = tuple(x for x in uses["more"] if 0 <= x < 100)
    for case in in_time(t, covering(uses, t.rng, 2), "uses"):
        arrays, options = problem_of(t, case | {"d_v": None})
        options = without_empty_rows(t.adapter, arrays, options)
        # Values that show the weights have as many columns as there are keys.
        if not (t.adapter["same_value_size"] and arrays[1].shape[-2] != arrays[2].shape[-1]):
            yield _shown(arrays), t.adapter.settled | options


def _calls(t: CheckRun, back: bool = False) -> Iterator[tuple[Arrays, Keywords, Keywords, Any]]:
    """Yield each case with dropout and its results, and note what is refused."""
    refused: set[str] = set()
    for i, (arrays, options) in enumerate(_cases(t)):
        dropping = options | {"dropout": _RATES[i % len(_RATES)], "seed": t.new_seed()}
        if back:
            dropping["d_out"] = t.cotangent(arrays)
        try:
            results = t.call(*arrays, **dropping)
        except Refusal:
            if options == t.adapter.settled:
                raise
            # A function may have no dropout with a mask, say: that is no failure.
            t.since, refused = None, refused | {" and ".join(sorted(options))}
            continue
        yield arrays, options, dropping, results
    if refused:
        some = ", ".join(sorted(refused, key=len)[:3])
        t.untried.append(f"with {some}, which the function rejects")


def _weights_without(t: CheckRun, arrays: Any, options: Keywords) -> tuple[Floats, float]:
    """Return weights without dropout, and what they may be off by, relatively."""
    exact = np.asarray(of_function(t.adapter, softmax_attention, arrays, options), float)
    unit = CONTRACT[t.adapter["dtype"]] * t.adapter.eps
    return exact, unit * (2 + largest_exponent(t.adapter, arrays, options))


def _find_kept(
    t: CheckRun, weights: tuple[Floats, float], rate: float, out: Floats
) -> npt.NDArray[np.bool_]:
    """Find the weights that were kept; all others are to be 0, and these w / (1 - p)."""
    exact, allowed = weights
    # Weights that underflow do not tell whether they are kept.
    known = exact > t.adapter.least / t.adapter.eps
    share = np.divide(out * (1 - rate), exact, out=np.zeros(out.shape), where=known)
    # Whatever is nearer to kept than to dropped; how near is tested below.
    kept: npt.NDArray[np.bool_] = share > 0.5
    error = np.abs(share - kept)
    worst = np.unravel_index(int(np.argmax(error)), error.shape)
    t.error = max(t.error or 0.0, float(error[worst]) / allowed)
    if error[worst] > allowed or np.any(out[exact == 0]):
        place = f"{share[worst]:.6g} times that at {tuple(int(i) for i in worst)}"
        plain = np.all(np.abs(share - (1 - rate))[known] <= allowed)
        got = "the weights without dropout: nothing is dropped" if plain else place
        raise Failure(f"weights that are dropped, or divided by {1 - rate:g}", got)
    return kept


@add_check
def factors_of_dropout(t: CheckRun) -> None:
    """Try every declared capability, twice at each seed; at p = 0 nothing may be dropped."""
    adapter, plain = t.adapter, t.adapter.settled
    arrays, _ = t.problem(*t.fit(4, 6, 4))
    got = t.call(*arrays, **plain, dropout=0.0, seed=t.new_seed())
    t.equal(got, *reference(adapter, arrays, plain))
    for arrays, options, dropping, first in _calls(t):
        _find_kept(t, _weights_without(t, arrays, options), dropping["dropout"], first)
        # The same seed keeps the same weights.
        t.equal(t.call(*arrays, **dropping), first, 0.0)


@add_check
def law_of_dropout(t: CheckRun) -> None:
    """Count kept weights: in total, by place, and in pairs of heads, batches, tokens and seeds."""
    plain = t.adapter.settled
    n, m, d = t.fit(40, 144, 16)  # past blocks of 128 keys
    if t.adapter["same_value_size"]:
        n, m, d = t.fit(40, d, d)
    lead, groups = t.adapter.lead(2, 4), 2 if t.adapter.grouped else None
    for rate in _RATES:
        arrays = _shown(t.problem(n, m, d, lead=lead, groups=groups)[0])
        weights = _weights_without(t, arrays, plain)

        def one(seed: int, arrays: Any = arrays, weights: Any = weights, p: float = rate) -> Floats:
            return _find_kept(t, weights, p, t.call(*arrays, **plain, dropout=p, seed=seed))

        kept = draw_results(t, one, _SHARE / len(_RATES)) > 0
        _independent(t, rate, kept, t.adapter.visible(n, m, plain))


def _independent(t: CheckRun, rate: float, kept: npt.NDArray[np.bool_], seen: Any) -> None:
    """Test indicators of shape (seeds, ..., n, m), of which those count that are seen."""
    seen = np.broadcast_to(seen, kept.shape)
    label = f"p = {rate:g}, "
    count = int(np.sum(seen))
    p = stats.binomial(int(np.sum(kept & seen)), count, 1 - rate)
    keep_p(t, f"{label}kept", p, count, stats.binomial, p=1 - rate)
    each = np.sum(kept, 0)[seen[0]]
    # The worst place of all, by the union bound.
    p = min(1.0, each.size * min(stats.binomial(int(x), len(kept), 1 - rate) for x in set(each)))
    keep_p(t, f"{label}each", p, len(kept), stats.binomial, tries=each.size, p=1 - rate)
    # The probability that two independent weights have the same fate.
    same = rate**2 + (1 - rate) ** 2
    for name, axis in (("seeds", 0), ("queries", -2), ("keys", -1)):
        x, y = (np.moveaxis(z, axis, 0) for z in (kept, seen))
        apart = []
        for lag in (2**i for i in range(len(x).bit_length() - 1)):
            first = np.arange(len(x) - lag)
            for phase in (0, 1):  # of which all pairs are disjoint
                i = first[first // lag % 2 == phase]
                if len(i):
                    # Pairs that share no indicator are independent.
                    apart.append((x[i] == x[i + lag])[y[i] & y[i + lag]])
        _test_alike(t, f"{label}{name} apart by powers of two", apart, same)
    heads = kept.reshape(len(kept), -1, *kept.shape[-2:])
    seen_of_head = seen.reshape(heads.shape)[:, 0]
    pairs = combinations(range(heads.shape[1]), 2)
    alike = [(heads[:, i] == heads[:, j])[seen_of_head] for i, j in pairs]
    if alike:
        _test_alike(t, f"{label}heads", alike, same)


def _test_alike(t: CheckRun, name: str, alike: list[npt.NDArray[np.bool_]], same: float) -> None:
    """Test how many of the pairs have the same fate, the worst of several counts."""
    tries = len(alike)
    p = min(1.0, tries * min(stats.binomial(int(np.sum(x)), x.size, same) for x in alike))
    n = min(x.size for x in alike)
    keep_p(t, name, p, n, stats.binomial, tries=tries, p=same)


@add_check
def gradients_of_dropout(t: CheckRun) -> None:
    """Find the kept weights from the result, and use them in the formula."""
    for arrays, options, dropping, results in _calls(t, back=True):
        rate, d_out = dropping["dropout"], dropping["d_out"]
        t.kept = _find_kept(t, _weights_without(t, arrays, options), rate, results[0])
        factors = t.kept / (1 - rate)
        want = pulled(t.adapter, arrays, options | {"dropout": factors, "d_out": d_out})[0]
        # Dropout multiplies cotangents of weights by up to 1 / (1 - p).
        most = pulled_rounding(t.adapter, arrays, options, d_out / (1 - rate))
        names = t.adapter.returns(dropping)
        for name, x, y, allowed in zip(names, results, want, most, strict=True):
            t.equal(x, y, allowed / (1 - rate if name == "out" else 1.0), name)
