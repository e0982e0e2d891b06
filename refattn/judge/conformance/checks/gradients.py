"""Checks of gradients: pullbacks of queries, keys and values, by cotangents of the output.

What comes is compared with the package's own pullback in extended precision, where the candidate
can be compared number by number, and with difference quotients of its own results where it draws.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from ....arrays.library import Floats
from ..candidate.adapter import Adapter
from ..candidate.failures import Failure, Refusal
from ..candidate.gates import token_axes
from ..candidate.limits import Arrays, Keywords
from ..truth.allowed import log_slopes, pulled, pulled_rounding, rounding
from .cases import covering, growing, layouts, levels, try_cases, without_empty_rows
from .sizes import describe_places
from .trials import CheckRun, add_check, add_condition, evaluated, stabilised

NAMES = ("out", "dq", "dk", "dv")
_PULLED_SECONDS = {"quick": 20.0, "full": 80.0}


def compare_gradients(t: CheckRun, arrays: Arrays, **options: Any) -> None:
    """Compare output and gradients with the reference, and say where they are wrong."""
    memory = options.pop("memory", None)
    options = t.adapter.settled | options
    options.setdefault("d_out", t.cotangent(arrays))
    got = t.call(*arrays, **options, strict=True, memory=memory)
    want, allowed = pulled(t.adapter, arrays, options)
    t.hides(allowed[0], arrays[2])
    axes = dict.fromkeys((*NAMES, "d_bias"), -2) | {
        f"d_{x}": i for x, i in token_axes(t.adapter.record).items()
    }
    for name, x, y, most in zip(t.adapter.returns(options), got, want, allowed, strict=True):
        try:
            t.equal(x, y, most)
        except Failure as failure:
            if memory:
                t.part = None  # which the script of one call would not repeat
            wrong = np.abs(np.asarray(x, np.longdouble) - y) > most
            n, m = (z.shape[-2] for z in arrays[:2])
            raise Failure(
                f"{name} {failure.expected}",
                f"{failure.got}; n = {n}, m = {m}: {describe_places(wrong, axes.get(name, 0))}",
            ) from None


@add_check
def gradients(t: CheckRun) -> None:
    """Try inputs without and with leading axes, d_v other than d, and a cotangent of 0."""
    drawn: list[dict[str, Any]] = [
        {"lead": lead} for lead in ((), t.adapter.lead(2, 3), t.adapter.lead(1, 10))
    ]
    drawn += [{"d_v": 7}] * (not t.adapter["same_value_size"])
    for each in drawn:
        arrays, options = t.problem(*t.fit(4, 6, 4), 4, **each)
        compare_gradients(t, arrays, **options)
    # Gradients are linear: without a cotangent they are exactly 0.
    nothing = 0 * t.cotangent(arrays)
    for x in t.call(*arrays, d_out=nothing, **t.adapter.settled, **options)[1:]:
        t.equal(x, np.zeros(x.shape), 0.0)


@add_check
def gradients_together(t: CheckRun) -> None:
    """Combine masks of every shape, causal=True, one query, grouped heads, and unequal lengths."""

    def compare(arrays: Arrays, **options: Any) -> None:
        options = without_empty_rows(t.adapter, arrays, options)
        if options.get("return_lse"):
            options["d_lse"] = t.normal(*arrays[0].shape[:-1])
        compare_gradients(t, arrays, **options)

    uses = levels(t.adapter)
    if t.adapter["empty_rows"] != "zero":
        # Fewer keys than queries leave causal queries without keys.
        uses["more"] = tuple(x for x in uses["more"] if x >= 0)
    if not t.adapter.can("d_lse"):
        uses.pop("lse", None)
    try_cases(t, covering(uses, t.rng, 2), compare, _PULLED_SECONDS)


@add_check
def gradients_of_large_logits(t: CheckRun) -> None:
    """Try exponents of tens and of thousands, where most weights vanish."""
    for size in (4.0, 10.0) if t.adapter.half else (4.0, 10.0, 40.0, 200.0):
        t.compare_problem(*t.fit(5, 6, 4), 4, size=size, by=compare_gradients)


@add_check
def gradients_of_extreme_features(t: CheckRun) -> None:
    """Try entries down to -20, where elu + 1 and its slope are e^-20, and above 709."""
    low = t.adapter.half
    (q, k, v), _ = t.problem(*t.fit(4, 5, 3), 4)
    for shift in (-2.0,) if low else (-4.0, -20.0):
        tiny_q, tiny_k = (t.adapter.exact(shift - np.abs(x)) for x in (q, k))
        compare_gradients(t, (tiny_q, tiny_k, v))
        compare_gradients(t, (np.abs(q), tiny_k, v))
    large = 20.0 if low else 800.0
    compare_gradients(t, (t.adapter.exact(np.abs(q) + large), t.adapter.exact(k * large), v))


class _PulledSize(NamedTuple):
    """Tokens, head sizes, heads and samples of a problem, and other options of the call."""

    n: int
    m: int
    d: int
    d_v: int
    heads: tuple[int, ...] = ()
    samples: int = 9
    groups: int | None = None
    use: Mapping[str, Any] = MappingProxyType({})

    @property
    def pairs(self) -> int:
        """How many pairs of queries and keys there are."""
        return self.n * self.m * math.prod(self.heads)

    def fitted(self, t: CheckRun) -> _PulledSize:
        """Return as much of the size as the candidate takes."""
        n, m, d = t.fit(self.n, self.m, self.d)
        return self._replace(
            n=n,
            m=m,
            d=d,
            d_v=d if t.adapter["same_value_size"] else self.d_v,
            heads=t.adapter.lead(*self.heads),
            samples=self.samples if t.adapter.has("unlimited-size") else min(self.samples, n, m),
            groups=self.groups if t.adapter.grouped else None,
        )

    def problem(self, t: CheckRun, size: float = 1.0) -> tuple[Arrays, Keywords]:
        """Draw random inputs."""
        named: Any = {"lead": self.heads, "d_v": self.d_v, "groups": self.groups}
        return t.problem(self.n, self.m, self.d, self.samples, size=size, **named)


_RAGGED = (
    _PulledSize(17, 33, 3, 5),
    _PulledSize(129, 130, 8, 9),
    _PulledSize(65, 65, 40, 70, samples=100),
    _PulledSize(33, 30, 80, 130, heads=(1, 2)),
    _PulledSize(129, 129, 4, 5, heads=(2, 2), groups=1),
    _PulledSize(257, 257, 8, 9),
    _PulledSize(513, 1025, 8, 9),
    _PulledSize(1025, 1025, 8, 9),
)


@add_check
def gradients_of_many_tokens(t: CheckRun) -> None:
    """Try all sizes that are one more than a power of two, also causal, as far as time allows."""
    causal = t.adapter.masks_future
    ways: list[dict[str, Any]] = [{}] * (not t.adapter["causal_only"])
    ways += [{"causal": True}] * causal + [{"window": (40, 3)}] * t.adapter.can("window")
    sizes = (x._replace(m=max(x.m, x.n)) if causal else x for x in _RAGGED)
    cases = [size.fitted(t)._replace(use=way) for size, way in product(sizes, ways)]
    for case in growing(t, cases, _PULLED_SECONDS, "{0.n} queries and more"):
        arrays, frequencies = case.problem(t)
        compare_gradients(t, arrays, **frequencies, **case.use)


@add_check
def gradients_of_layouts(t: CheckRun) -> None:
    """Try transposed and sliced arrays, tokens before heads, and a broadcast cotangent."""
    arrays, frequencies = t.problem(*t.fit(5, 6, 4), 4, lead=t.adapter.lead(2, 3))
    held = [name for name, x in frequencies.items() if isinstance(x, np.ndarray)]
    names = [*t.adapter.record.arrays, *held, "d_out"]
    for memory in layouts(t, names, "transposed", "sliced", "heads inside"):
        compare_gradients(t, arrays, **frequencies, memory=memory)
    ones = np.ones_like(t.cotangent(arrays))  # that of a plain sum
    # A sum has a cotangent whose strides are 0, which kernels may not expect.
    compare_gradients(t, arrays, **frequencies, d_out=ones, memory={"d_out": "expanded"})


@add_check
def gradients_again(t: CheckRun) -> None:
    """Repeat calls; in torch also twice through one graph, and for one input at a time."""
    arrays, frequencies = t.problem(*t.fit(4, 6, 4), 4)
    # A function of torch may keep what it needs for its backward pass in the wrong place.
    for way in ("again", "crossed", "alone") if t.adapter["library"] == "torch" else ():
        compare_gradients(t, arrays, **frequencies, autograd=way)
    for _ in range(20):
        try:
            compare_gradients(t, arrays, **frequencies)
        except Failure:
            t.part = None  # one call may be right
            raise


@add_condition
def hides(adapter: Adapter) -> bool:
    """Return whether something is not seen by some query."""
    causal = adapter.masks_future
    separate = adapter.has("queries-apart") and not adapter.has("proposals")
    return causal or separate or adapter.can("mask")


@add_check
def gradients_of_hidden(t: CheckRun) -> None:
    """Test masked keys, future keys, and queries whose cotangent is 0.

    Rounding errors are allowed: a maximum over all keys may have a gradient, which then cancels.
    """
    n, m, d = t.fit(5, 7, 4)
    arrays, frequencies = t.problem(n, m, d, 4)
    options = t.given_or_drawn(frequencies)
    d_out = t.cotangent(arrays)
    most = pulled_rounding(t.adapter, arrays, options, d_out)
    if t.adapter.can("mask"):
        mask = np.ones((n, m), dtype=bool)
        mask[:, 2] = False
        results = t.call(*arrays, d_out=d_out, mask=mask, **options)
        _take_nothing(t, results, np.arange(m) == 2, most)
    if t.adapter.masks_future:
        first = d_out.copy()
        first[1:] = 0.0  # the first query sees the keys up to m - n, or one
        seen = 1 if t.adapter["causal"] == "top-left" else m - n + 1
        results = t.call(*arrays, d_out=first, **options | {"causal": True})
        _take_nothing(t, results, np.arange(m) >= seen, most)
    if t.adapter.has("queries-apart") and not t.adapter.has("proposals"):
        one = d_out.copy()
        one[[0, -1]] = 0.0
        results = t.call(*arrays, d_out=one, **options)
        t.equal(results[1][[0, -1]], np.zeros((2, d)), most[1])


@add_check
def gradients_of_hidden_nonsense(t: CheckRun) -> None:
    """Put NaN, infinity and huge numbers into masked keys and values."""
    n, m, d = t.fit(5, 7, 4)
    (q, k, v), frequencies = t.problem(n, m, d, 4)
    options = t.given_or_drawn(frequencies)
    options |= {"d_out": t.cotangent((q, k, v)), "mask": np.arange(m) != 2}
    frequencies = {name: x for name, x in options.items() if name != "d_out"}
    # Bounds are of the masked problem: nonsense is put in afterwards.
    most = pulled_rounding(t.adapter, (q, k, v), frequencies, options["d_out"])
    results = t.call(q, k, v, **options)
    k, v = k.copy(), v.copy()
    k[2], v[2] = np.nan, np.inf
    second = t.call(q, k, v, **options)
    for name, x, y, allowed in zip(NAMES, second, results, most, strict=True):
        t.equal(x, y, 2 * allowed, name)


def _take_nothing(t: CheckRun, results: Any, hidden: Floats, most: tuple[float, ...]) -> None:
    """Check that keys and values that are hidden have no gradient."""
    for part in (2, 3):
        x = results[part][hidden]
        t.equal(x, np.zeros(x.shape), most[part])


@add_check
def gradients_of_means(t: CheckRun) -> None:
    """Test that dv sums to the sum of d_out, and that equal values give q and k gradient 0.

    Exact attention does not change if all keys move by the same vector, so dk sums to 0. It does
    not change if queries are doubled and keys halved, so q . dq and k . dk have the same sum.
    """
    n, m, d = t.fit(5, 7, 4)
    for size in (1.0, 10.0) if stabilised(t.adapter) and not t.adapter.half else (1.0,):
        arrays, frequencies = t.problem(n, m, d, 4, size=size)
        options = t.given_or_drawn(frequencies)
        d_out = t.cotangent(arrays)
        named = options | {"d_out": d_out}
        q, k = (np.asarray(x, np.longdouble) for x in arrays[:2])
        most = pulled_rounding(t.adapter, arrays, options, d_out)
        _, dq, dk, dv = t.call(*arrays, **named)
        t.equal(dv.sum(-2), d_out.sum(-2), m * most[3], "sum of dv")
        if t.adapter.has("exact"):
            t.equal(dk.sum(-2), np.zeros(d), m * most[2], "sum of dk")
            # Errors of sums of products, each bounded by the largest entries.
            both = n * d * most[1] * np.max(np.abs(q)) + m * d * most[2] * np.max(np.abs(k))
            t.equal(np.sum(k * dk), np.sum(q * dq), both, "sum of k . dk")
        # A mean of equal values does not depend on its weights.
        same = (*arrays[:2], np.repeat(arrays[2][:1], m, 0))
        results = t.call(*same, **named)
        for i in (1, 2):
            t.equal(results[i], np.zeros_like(results[i]), most[i], NAMES[i])


@add_check
def gradients_are_linear(t: CheckRun) -> None:
    """Multiply the cotangent by powers of 2: gradients must grow by the same factors."""
    arrays, frequencies = t.problem(*t.fit(4, 6, 4), 4)
    options = t.given_or_drawn(frequencies)
    d_out = t.cotangent(arrays)
    once = t.call(*arrays, d_out=d_out, **options)
    names = t.adapter.returns(options | {"d_out": d_out})[1:]
    for factor in (4.0, 2.0**-6) if t.adapter.half else (4.0, 2.0**-6, 2.0**24, 2.0**-24):
        other = t.call(*arrays, d_out=factor * d_out, **options)
        for name, x, y in zip(names, once[1:], other[1:], strict=True):
            # Powers of 2 change no digit of sums and products, unless a function adds constants.
            t.equal(y / factor, x, 8 * t.adapter.eps * float(np.max(np.abs(x), initial=0)), name)


def _moves(adapter: Adapter) -> str:
    """Name the arrays whose slopes quotients can tell: values always, by linearity.

    Of queries and keys where weights are positive and what is drawn at one seed does not move.
    """
    # What depends on q and k by its draws jumps where they move.
    fixed = evaluated(adapter) or (adapter.has("data-free") and not adapter.has("proposals"))
    positive = not evaluated(adapter) if adapter.waves else adapter.has("normalised", "nonnegative")
    return "qkv" if fixed and positive else "v"


@add_check
def gradients_are_slopes(t: CheckRun) -> None:
    """Take difference quotients in random directions, at one seed, for each capability."""
    adapter = t.adapter
    if _moves(adapter) == "v":
        t.untried.append("queries and keys, without frequencies that are given")
    causal = adapter.masks_future
    few, many = _PulledSize(4, 6, 4, 4, samples=4), _PulledSize(40, 70, 4, 4)
    n, m, *_ = few.fitted(t)
    seen = np.ones((n, m), dtype=bool)
    seen[0, 1:] = seen[-1, :-1] = False
    uses = [few, few._replace(d_v=7, heads=(2, 3)), few._replace(n=1, samples=20), many]
    if causal:
        uses += [x._replace(use={"causal": True}) for x in (few, many)]
    if adapter.can("mask"):
        uses.append(few._replace(use={"mask": seen}))
        if causal:
            uses.append(few._replace(use={"causal": True, "mask": seen}))
    if adapter.grouped:
        uses.append(few._replace(heads=(4,), groups=2))
    for size in (x.fitted(t) for x in uses):
        (q, k, v), frequencies = size.problem(t, 0.5)
        use = without_empty_rows(adapter, (q, k), {**adapter.settled, **size.use})
        if adapter.has("feature-map"):  # whose slopes are not continuous at 0
            q, k = (adapter.exact(x + np.where(x < 0, -0.25, 0.25)) for x in (q, k))
        try:
            _slopes(t, (q, k, v), t.given_or_drawn(frequencies, size.samples) | use)
        except Refusal:
            if not {"mask", "causal"} <= set(use):
                raise
            t.since = None


def _slopes(t: CheckRun, arrays: Arrays, options: Keywords) -> None:
    r"""Compare gradients with quotients of the fourth order, along one way of q, k and v each.

    Where log weights move by at most L to a unit of the way, a mean f of values is analytic where
    :math:`|L \Im t| < \pi/2`, and there at most 1 / cos(L Im t) of the largest value, so that
    :math:`|f^{(5)}| \le 120 L^5 / \cos 1` of it. With steps h the error is h^4 / 30 of this, and
    3/2 of that of results over h.
    """
    d_out, root = t.cotangent(arrays), arrays[0].shape[-1] ** 0.5
    d_out[..., :-4, :] = 0.0  # of many queries: sums of many errors may be as large as slopes
    results = t.call(*arrays, d_out=d_out, **options)
    off, size = rounding(t.adapter, arrays, options), float(np.max(np.abs(arrays[2])))
    # Steps are along signs, a way of length sqrt(d) in each row.
    steepest = root * (1 / root + sum(log_slopes(t.adapter, arrays, options)))
    # Where the sum of both errors is least, rounded down to a power of 2, which is exact.
    step = 2.0 ** math.floor(math.log2((off / size / 20) ** 0.2 / steepest))
    quotient = 1.5 * off / step + 4 / math.cos(1) * step**4 * steepest**5 * size
    for i, name in enumerate("qkv"):
        if name not in _moves(t.adapter):
            continue
        way = t.rng.choice([-1.0, 1.0], arrays[i].shape)
        total = 0.0
        # 12 h f' = 8 (f(h) - f(-h)) - (f(2 h) - f(-2 h)), up to terms in h^5.
        for far, weight in ((1, 8.0), (-1, -8.0), (2, -1.0), (-2, 1.0)):
            moved = list(arrays)
            moved[i] = t.adapter.exact(arrays[i] + far * step * way)
            total += weight * float(np.sum(t.call(*moved, **options) * d_out))
        want = np.asarray(total / (12 * step))
        got = np.asarray(np.sum(results[i + 1] * way))
        allowed = quotient * float(np.sum(np.abs(d_out)))
        t.equal(got, want, allowed, f"a slope along {name} of")


@add_check
def gradients_of_normalisers(t: CheckRun) -> None:
    """Pass a cotangent of lse besides that of the output."""
    for lead, (n, m) in product(((), t.adapter.lead(2, 3)), ((4, 6), (1, 6), (70, 70))):
        arrays, _ = t.problem(*t.fit(n, m, 4), lead=lead)
        compare_gradients(t, arrays, d_lse=t.normal(*arrays[0].shape[:-1]), return_lse=True)
