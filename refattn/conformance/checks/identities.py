"""Checks that hold number by number: agreement with the reference, and identities.

Each check is a generator of comparisons; the first that fails ends it, and cases come smallest
first, so that the case reported is the smallest that shows the defect.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...arrays.library import Floats
from ..candidate.adapter import Adapter
from ..candidate.failures import Failure, Refusal
from ..candidate.given import few, frequencies, of_one_key
from ..candidate.limits import for_heads, largest_logit, nearest_head_size, tokens
from ..truth.reference import declared, of_rows, reference, rounding, tolerance

__all__ = [
    "CHECKS",
    "Case",
    "Check",
    "Trial",
    "again",
    "attends",
    "check",
    "comparable",
    "comparable_ways",
    "evaluated",
    "stabilised",
]


# Size of queries and keys of black boxes with an epsilon, or with trigonometric features: the
# normaliser is large there, whatever the frequencies.
_NEAR = 0.02


class Case(NamedTuple):
    """One call of the candidate, with what should come and how far from it is allowed."""

    arrays: tuple[Floats, ...]
    options: dict[str, Any]
    want: Floats | None = None
    allowed: float = 0.0
    strict: bool = False


@dataclass(frozen=True)
class Check:
    """A named claim about candidates of estimators with some traits, and how it is tried."""

    name: str
    claim: str
    layer: str
    traits: frozenset[str]
    needs: Callable[[Adapter], bool]
    run: Callable[[Trial], None]
    draws: bool = False

    def applies(self, adapter: Adapter) -> bool:
        """Whether the check can be made of this candidate."""
        own = adapter.draws or not self.of_draws
        return adapter.has(*self.traits) and own and self.needs(adapter)

    @property
    def of_draws(self) -> bool:
        """Whether it is of what a candidate draws by itself, as all laws are."""
        return self.draws or self.layer != "identity"


@dataclass
class Trial:
    """One run of one check: draws its inputs, calls the candidate, keeps what was found.

    The stream of random numbers depends on the seed of the run and the name of the check only, so
    that a check run alone repeats what it did among the others.
    """

    adapter: Adapter
    name: str
    seed: int
    size: int = 0
    budget: float = 60.0
    level: str = "quick"
    error: float | None = None
    p: dict[str, float] = field(default_factory=dict)
    power: dict[str, tuple[Callable[[float], float], float]] = field(default_factory=dict)
    samples: int = 0
    reached: float = 1.0  # share of the planned seeds that time allowed
    hidden: float = 0.0
    case: Case | None = None
    got: Any = None
    part: int | None = None  # which result of the last call is compared, if it is one
    calls: int = 0  # that have returned
    since: float | None = None  # when the call that runs now began
    beyond: str = ""  # why it ended, if that was a problem beyond what the candidate takes
    refused: bool = False  # whether a call that raised ended it
    crashed: bool = False  # whether the end of the candidate's process ended it
    untried: list[str] = field(default_factory=list)  # what the check left out, and why
    over: bool = False  # time has run out, and nobody waits for the rest

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng([self.seed, zlib.crc32(self.name.encode())])

    def normal(self, *shape: int, size: float = 1.0) -> Floats:
        """Normal numbers that are exact in the candidate's dtype; with relu, their sizes only.

        Queries and keys of either sign may share no positive feature, and then nothing is defined.
        """
        z = size * self.rng.standard_normal(shape)
        return self.adapter.exact(np.abs(z) if self.adapter["feature_map"] == "relu" else z)

    @property
    def near(self) -> float:
        """Factor on queries and keys where the frequencies are not known."""
        adapter = self.adapter
        return _NEAR if adapter.waves or (adapter["epsilon"] and adapter.has("random")) else 1.0

    def declared(self, options: dict[str, Any]) -> float:
        """What the declared epsilon may do to the last call."""
        return 0.0 if self.case is None else declared(self.adapter, self.case.arrays, options)

    def fit(self, n: int, m: int, d: int) -> tuple[int, int, int]:
        """Sizes near these that the candidate takes as they are."""
        return *tokens(self.adapter, n, m), nearest_head_size(self.adapter, d)

    def new_seed(self) -> int:
        """A seed to give to the candidate."""
        return int(self.rng.integers(2**31 - 2**20))

    def options(self, samples: int) -> dict[str, Any]:
        """How a black box is asked for a number of samples, at one seed."""
        seed = {"seed": self.new_seed()} if self.adapter.has("random") else {}
        return self.adapter.record.sized(samples) | seed

    def _may_overflow(self, arrays: tuple[Floats, ...], options: dict[str, Any]) -> bool:
        """Whether sums that cancel may leave the range of half precision, rightly."""
        if not self.adapter.waves or self.adapter["dtype"] != "float16":
            return False
        largest, most = 0.0, tolerance(self.adapter, arrays, options)
        if "omega" in options:
            want, most = reference(self.adapter, arrays, options)
            largest = float(np.max(np.abs(want), initial=0.0))
        return largest + most > float(np.finfo(np.float16).max)

    def call(
        self,
        *arrays: Floats,
        strict: bool = False,
        memory: Mapping[str, str] | None = None,
        **options: Any,
    ) -> Any:
        """Call the candidate, and remember how; NaN or infinity is a failure."""
        if self.over:
            raise Failure("an answer in time", "none")
        self.case = Case(arrays, options, strict=strict)
        self.got = self.part = None
        self.since = time.monotonic()
        got = self.adapter(*arrays, strict=strict, memory=memory, **options)
        self.since = None
        self.calls += 1
        self.got = got
        for i, x in enumerate(self.results):
            infinite = i == 1 and "return_lse" in options and "d_out" not in options
            bad = int(np.sum(np.isnan(x) if infinite else ~np.isfinite(x)))
            if bad and not self._may_overflow(arrays, options):
                raise Failure("finite numbers", f"{bad} of {x.size} that are NaN or infinite")
        return got

    @property
    def results(self) -> tuple[Any, ...]:
        """What the last call gave."""
        return self.got if isinstance(self.got, tuple) else (self.got,)

    @property
    def numbers(self) -> Any:
        """The result of the last call that is compared; None if something made of it is."""
        return None if self.part is None else self.results[self.part]

    def equal(self, got: Any, want: Any, allowed: Any, name: str = "") -> None:
        """Compare the last result, or what has a name, with what should have come."""
        if not isinstance(got, tuple):
            self._equal(got, want, allowed, f"{name} " if name else "")
            return
        for triple in zip(got, want, allowed, strict=True):
            self._equal(*triple, "")

    def _equal(self, got: Floats, want: Floats, allowed: float, name: str) -> None:
        self.part = next((i for i, x in enumerate(self.results) if x is got), None)
        if self.case is not None:
            self.case = self.case._replace(
                want=np.asarray(want, np.float64), allowed=float(allowed)
            )
        if not got.size or not math.isfinite(allowed):
            return
        known = np.isfinite(got) & np.isfinite(want)  # what is infinite `call` has let through
        error = np.abs(
            np.asarray(np.where(known, got, 0), np.longdouble) - np.where(known, want, 0)
        )
        worst = np.unravel_index(int(np.argmax(error)), error.shape)
        ratio = float(error[worst]) / allowed if allowed else math.inf * float(error[worst] > 0)
        self.error = max(self.error or 0.0, ratio)
        if self.error > 1:
            place = f" at {tuple(int(i) for i in worst)}" if error.ndim else ""
            raise Failure(
                f"{name}{float(np.asarray(want)[worst]):.12g}{place}, to within {allowed:.2g}",
                f"{float(got[worst]):.12g}, off by {float(error[worst]):.2g}",
            )

    def compare(self, *arrays: Floats, strict: bool = False, **options: Any) -> None:
        """Compare the candidate with the package's own evaluation in extended precision."""
        got = self.call(*arrays, strict=strict, **options)
        want, allowed = reference(self.adapter, arrays, options)
        self.hides(allowed, arrays[-1])
        self.equal(got, want, allowed)

    def hides(self, allowed: float, v: Floats) -> None:
        """Note how much of the largest value a declared epsilon may hide."""
        if self.adapter["epsilon"]:
            self.hidden = max(self.hidden, allowed / max(float(np.max(np.abs(v))), 1e-300))
            self.power["error"] = (lambda alpha: self.hidden, 0.05)

    def problem(
        self,
        n: int,
        m: int,
        d: int,
        samples: int = 1,
        *,
        lead: tuple[int, ...] = (),
        size: float = 1.0,
        shift: float = 0.0,
        d_v: int | None = None,
        groups: int | None = None,
    ) -> tuple[tuple[Floats, ...], dict[str, Any]]:
        """Inputs for the estimator, with frequencies where it takes them.

        `size` is that of queries and keys in kernel coordinates, and `shift` the mean of keys;
        with `groups` keys and values have that many heads in place of the last of `lead`.
        """
        adapter, record = self.adapter, self.adapter.record
        if not adapter.given:
            size *= self.near
        elif record.has("solved"):
            size *= min(1.0, 1.5 / math.sqrt(d))  # rows of e^(k . k') are to be of like size
        unit = size / adapter.root(d)
        if record.has("rows"):
            return (self.normal(*lead, n, d, size=size) + shift,), {}
        if record.has("pairs"):
            size *= min(1.0, 4 / math.sqrt(d))  # exp(x . y) itself must be representable
            x, y, omega = (self.normal(*s, d, size=size) for s in ((n,), (n,), (samples,)))
            return (x, y), {"omega": omega / size}
        shared = lead if groups is None else (*lead[:-1], groups)
        q = self.normal(*lead, n, d, size=unit)
        k = adapter.exact(self.normal(*shared, m, d, size=unit) + shift * unit)
        most = largest_logit(adapter, (q, k))
        if most > (adapter["max_logit"] or math.inf):
            q = adapter.exact(q * (0.9 * adapter["max_logit"] / most))
        v = self.normal(*shared, m, d if d_v is None else d_v)
        if adapter.given == "indices":
            return (q, k, v), few(adapter, self.rng, k, lead, n, samples)
        if not record.takes("omega"):
            size_of_it = samples if record.has("any-size") else min(samples, n, m)
            return (q, k, v), {} if record.has("random") else record.sized(size_of_it)
        return (q, k, v), frequencies(adapter, self.normal, (q, k), samples, size)

    def of_heads(self, arrays: tuple[Floats, ...], options: dict[str, Any]) -> dict[str, Any]:
        """What is given to all heads, given anew to each."""
        (*lead, n, _), k = arrays[0].shape, arrays[1]
        if "indices" in options:
            samples = options["indices"].shape[-1]
            return few(self.adapter, self.rng, k, tuple(lead), n, samples, each=True)
        return {"omega": self.normal(*lead, *options["omega"].shape[-2:])}


CHECKS: dict[str, Check] = {}


def check(
    *traits: str,
    claim: str,
    layer: str = "identity",
    needs: str | Callable[[Adapter], bool] = "",
    draws: bool = False,
) -> Callable[[Callable[[Trial], None]], Callable[[Trial], None]]:
    """Register a check of estimators with these traits.

    `needs` are capabilities separated by blanks, or a condition; with `draws` the candidate must
    draw frequencies of its own for each seed, as all laws ask.
    """
    condition = needs if callable(needs) else lambda adapter: adapter.can(*needs.split())

    def register(run: Callable[[Trial], None]) -> Callable[[Trial], None]:
        name = run.__name__
        CHECKS[name] = Check(name, claim, layer, frozenset(traits), condition, run, draws)
        return run

    return register


def evaluated(adapter: Adapter) -> bool:
    """Whether the candidate can be compared number by number."""
    return not adapter.has("random") or bool(adapter.given)


def attends(adapter: Adapter) -> bool:
    """Whether it is attention: a result for each query, of its values."""
    return len(adapter.record.arrays) == 3


def _with(*capabilities: str) -> Callable[[Adapter], bool]:
    """Attention that can be compared number by number, with these capabilities."""
    return lambda x: attends(x) and evaluated(x) and x.can(*capabilities)


def stabilised(adapter: Adapter) -> bool:
    """Whether large exponents are asked of it: cosines lose all digits to them."""
    return adapter.has("exponential") and not adapter.waves


def _ways(t: Trial, options: dict[str, Any], samples: int = 4) -> list[dict[str, Any]]:
    """The ways to call the candidate: with frequencies if it takes them, and with a seed."""
    ways = [options] if evaluated(t.adapter) else []
    alone = t.adapter.has("random") and t.adapter.black_box
    return ways + ([t.options(samples)] if alone else [])


@check(claim="takes and returns what it says, and the same twice at one seed")
def contract(t: Trial) -> None:
    """Library, dtype and shape of the result, arguments left alone, repeatability."""
    for sizes in ((), (2,), (2, 3)):
        n, m, _ = t.fit(5, 5, 4)  # with a mask and without it the same keys, for what is drawn
        arrays, given = t.problem(n, m, 4, 4, lead=t.adapter.lead(*sizes))
        if t.adapter.has("pairs"):
            arrays = tuple(x[0] for x in arrays)
        for options in _ways(t, given):
            first = t.call(*arrays, strict=True, **options)
            second = t.call(*arrays, **options)
            allowed = again(t, arrays, options)
            t.equal(second, first, (allowed, allowed) if isinstance(first, tuple) else allowed)
            if t.adapter.can("mask"):
                seen = np.ones((*arrays[0].shape[:-1], m), dtype=bool)
                t.equal(t.call(*arrays, strict=True, **options, mask=seen), first, allowed)
                seen[..., ::2] = False
                t.call(*arrays, strict=True, **options, mask=seen)
            if t.adapter.can("causal") and (not t.adapter.has("proposals") or "seed" in options):
                t.call(*arrays, strict=True, **options, causal=True)
    if attends(t.adapter) and t.adapter.draws:  # of few keys, all near, nothing may be drawn
        arrays, options = t.problem(*t.fit(5, 40, 4), 4)[0], t.options(4)
        first = t.call(*arrays, **options)
        t.equal(t.call(*arrays, **options), first, again(t, arrays, options))


def again(t: Trial, arrays: tuple[Floats, ...], options: dict[str, Any]) -> float:
    """Rounding between two equal calls."""
    if t.adapter.has("rows"):
        return float(np.max(of_rows(t.adapter, np.asarray(arrays[0], np.longdouble))[1]))
    return 2 * rounding(t.adapter, arrays, options, 0.0 if t.got is None else t.got)


def _same(t: Trial, arrays: tuple[Floats, ...], options: dict[str, Any]) -> float:
    """Allowed between two evaluations of the same numbers."""
    return 2 * tolerance(t.adapter, arrays, options, 0.0 if t.got is None else t.got)


def _part(t: Trial, want: Floats, allowed: float, *arrays: Floats, **options: Any) -> None:
    """Compare a call on some of the keys, or equal ones, with what is known to within `allowed`."""
    got = t.call(*arrays, **options)
    t.equal(got, want, allowed + tolerance(t.adapter, arrays, options, got))


@check(
    "random",
    "continuous",
    claim="the result depends on the seed, and two seeds never give the same",
    draws=True,
)
def seeds(t: Trial) -> None:
    """Seeds that are typed, in a row, and apart by powers of 2; each the same twice."""
    few = t.adapter["dtype"] in ("float16", "bfloat16")  # equal results may be chance
    arrays, _ = t.problem(3, 9, 8)
    options = t.options(2)
    start = options.pop("seed")
    typed = [0, 1, 42, 2**31 - 1]
    near = [] if few else [*range(start, start + 32), *(start ^ 2**j for j in range(5, 31))]
    found: dict[bytes, int] = {}
    for seed in [*typed, *near]:
        got = t.call(*arrays, **options, seed=seed)
        _new(found, got, seed)
        if seed in typed:
            allowed = again(t, arrays, options)
            t.equal(t.call(*arrays, **options, seed=seed), got, allowed)
    t.error = t.error or 0.0
    if not few and t.adapter.lead(2, 3):
        _seeds_of_heads(t, start)


def _new(found: dict[bytes, int], got: Any, seed: int) -> None:
    """No other seed may have given the same."""
    other = found.setdefault(np.asarray(got).tobytes(), seed)
    if other != seed:
        raise Failure(f"different results for seeds {other} and {seed}", "the same bit for bit")


def _seeds_of_heads(t: Trial, start: int) -> None:
    """Heads that are equal get other results at other seeds, be it of one another."""
    arrays, _ = t.problem(3, 9, 8)
    lead = t.adapter.lead(2, 3)
    arrays = tuple(np.broadcast_to(x, (*lead, *x.shape)).copy() for x in arrays)
    options, found = t.options(2), dict[bytes, int]()
    for seed in range(start, start + 8):
        out = t.call(*arrays, **(options | {"seed": seed}))
        for head in (out[index] for index in np.ndindex(*lead)):
            _new(found, head, seed)


_SHAPES = (  # n, m, d, samples, leading axes
    (1, 1, 1, 1, ()),
    (2, 2, 2, 2, ()),
    (3, 5, 4, 3, ()),
    (7, 4, 3, 16, (2,)),
    (5, 6, 8, 5, (2, 3)),
    (33, 33, 16, 65, ()),
    (2, 1100, 8, 130, ()),
    (300, 257, 4, 9, ()),
    (1, 5, 64, 7, (2, 3)),
    (4, 6, 128, 3, ()),
    (3, 4, 4, 3, (2, 1, 3)),
)


@check(claim="agrees with the reference on ordinary numbers", needs=evaluated)
def reference_values(t: Trial) -> None:
    """Cases of many shapes, then keys off the origin, and unequal frequencies."""
    for n, m, d, samples, lead in _SHAPES:
        rows = max(n, 2) if t.adapter.has("rows") else n
        rows, m, d = t.fit(rows, m, d)
        if t.adapter["causal_only"]:  # of which queries are asked one by one
            rows = min(rows, 2 if m > 100 else 8)
        arrays, options = t.problem(rows, m, d, samples, lead=t.adapter.lead(*lead))
        if m <= 100 or t.adapter.eps < 1e-4:
            t.compare(*arrays, **options)
    for size, shift in ((0.3, 1.0), (1.5, 0.0), (1.0, -1.0)):
        arrays, options = t.problem(6, 9, 5, 7, size=size, shift=shift)
        if "omega" in options:
            options["omega"] = t.adapter.exact(options["omega"] * np.linspace(0, 2, 5))
        t.compare(*arrays, **options)
    if t.adapter.has("rows") and t.adapter.eps < 1e-4:
        t.compare(t.normal(3000, 20))
        t.compare(t.normal(40, 193))
    if t.adapter["feature_map"] == "relu":
        signs = np.array([1.0, -1.0, 1.0])
        (q, k, v), _ = t.problem(6, 9, 3)
        t.compare(q * signs, k * signs[::-1], v)


@check(
    claim="values may have another length than keys",
    needs=lambda adapter: _with()(adapter) and not adapter["same_value_size"],
)
def value_length(t: Trial) -> None:
    """d_v of 1 and of more than d."""
    for d_v in (1, 7, 20):
        arrays, options = t.problem(4, 5, 3, 4, d_v=d_v)
        t.compare(*arrays, **options)


@check(
    "exponential",
    claim="right where unstabilised exponentials lose digits",
    needs=evaluated,
)
def large_logits(t: Trial) -> None:
    """Exponents of some tens."""
    for size in (2.0, 4.0):
        arrays, options = t.problem(6, 8, 4, 5, size=size)
        t.compare(*arrays, **options)


@check(
    "exponential",
    "mean",
    claim="right where exponentials overflow or underflow, in whatever order they are taken",
    needs=lambda adapter: evaluated(adapter) and stabilised(adapter),
)
def extreme_logits(t: Trial) -> None:
    """Exponents of thousands of either sign, and rows in which all of them are very negative."""
    low = t.adapter["dtype"] in ("float16", "bfloat16")
    for size in (10.0, 16.0) if low else (10.0, 25.0, 70.0):
        arrays, options = t.problem(5, 6, 2, 4, size=size)
        t.compare(*arrays, **options)
        q, k, v = arrays
        q = -np.abs(q)
        k = np.abs(k)
        t.compare(q, k, v, **options)
        t.compare(-q, k, v, **options)


@check(
    "feature-map", claim="right where features are tiny or large: the ratio does not see their size"
)
def extreme_features(t: Trial) -> None:
    """Entries from -8 to -60 make elu + 1 features down to 1e-26; those above 709 overflow exp."""
    low = t.adapter["dtype"] in ("float16", "bfloat16")
    (q, k, v), _ = t.problem(4, 5, 3)
    if t.adapter["feature_map"] == "relu":
        t.compare(np.abs(q) * 2.0**-6, np.abs(k) * 2.0**-6, v)
        return
    for shift in (-2.0,) if low else (-4.0, -8.0, -16.0, -30.0):
        tiny_q, tiny_k = (t.adapter.exact(shift - np.abs(x)) for x in (q, k))
        t.compare(tiny_q, tiny_k, v)
        t.compare(np.abs(q), tiny_k, v)
    large = 20.0 if low else 800.0
    t.compare(q + large, t.adapter.exact(k * large), v)


@check("rows", claim="mean and covariance do not lose digits to a large mean")
def large_mean(t: Trial) -> None:
    """Data whose mean is many times their spread, constant columns, two rows, N below d."""
    offset = {"float64": 1e8, "float32": 1e4}.get(t.adapter["dtype"], 16.0)
    for n, d in ((2, 1), (2, 3), (5, 2), (50, 3), (1000, 4)):
        steps = t.rng.integers(-8, 9, (n, d)) * 1.0
        t.compare(t.adapter.exact(offset + steps))
        steps[:, 0] = 0.0
        t.compare(t.adapter.exact(offset + steps))


@check("rows", claim="each member of a batch has its own moments")
def batches_of_rows(t: Trial) -> None:
    """Leading axes."""
    for lead in t.adapter.lead(3), t.adapter.lead(2, 3):
        x = t.normal(*lead, 7, 3)
        t.compare(t.adapter.exact(x + np.arange(math.prod(lead)).reshape(*lead, 1, 1)))


@check("mean", claim="a weighted mean of values: weights sum to 1, positive ones stay inside")
def weighted_mean(t: Trial) -> None:
    """Constant values come back, one key returns its value, equal keys their mean; linear in v."""
    low = t.adapter["dtype"] in ("float16", "bfloat16")
    positive = t.adapter.has("positive") and not t.adapter.waves
    for size in (0.5, 2.0, 8.0 if low else 30.0) if stabilised(t.adapter) else (0.5,):
        (q, k, v), given = t.problem(5, 7, 4, 4, size=size)
        for options in _ways(t, given):
            allowed = _same(t, (q, k, v), options)
            out = t.call(q, k, v, **options)
            if positive:
                lowest, highest = (np.broadcast_to(f(v, -2), out.shape) for f in (np.min, np.max))
                t.equal(out, np.clip(out, lowest, highest), allowed)
            t.equal(t.call(q, k, np.ones_like(v), **options), np.ones(q.shape), allowed)
            small = 2.0**-10 if low else 2.0**-40
            for factor in (small,) if low else (small, 2.0**20):
                scaled = t.call(q, k, factor * v, **options)
                t.equal(scaled, factor * out, factor * allowed)
            t.equal(t.call(q, k, v[..., ::-1], **options), out[..., ::-1], allowed)
            if t.adapter.has("unordered"):
                same, mean = np.broadcast_to(k[:1], k.shape), np.mean(v, -2)
                _part(t, np.broadcast_to(mean, out.shape), 0.0, q, same, v, **options)
            options = options | of_one_key(t.adapter, options)
            _part(t, np.broadcast_to(v[0], out.shape), 0.0, q, k[:1], v[:1], **options)


@check("unordered", claim="the order of keys does not matter", needs=evaluated)
def order_of_keys(t: Trial) -> None:
    """A permutation of keys and values."""
    (q, k, v), options = t.problem(4, 9, 4, 5)
    order = t.rng.permutation(9)
    out = t.call(q, k, v, **options)
    t.equal(t.call(q, k[order], v[order], **options), out, _same(t, (q, k, v), options))


def comparable(adapter: Adapter) -> bool:
    """Whether results for different inputs can be compared.

    With a seed they can if the draws do not depend on the inputs; those of RA do by definition.
    """
    return attends(adapter) and (evaluated(adapter) or adapter.has("common"))


def comparable_ways(t: Trial, given: dict[str, Any], samples: int = 4) -> list[dict[str, Any]]:
    """The ways to call it for which results for different inputs can be compared."""
    ways = _ways(t, given, samples)
    return ways if t.adapter.has("common") else ways[:1]


@check(
    "separate",
    claim="each query has a result of its own",
    needs=lambda adapter: (
        comparable(adapter)
        and (
            not adapter.has("proposals")
            or (adapter.can("omega") and adapter["weighting"] in ("balance", "own"))
        )
    ),
)
def queries_apart(t: Trial) -> None:
    """Editing other queries, far away too, leaves a query's result."""
    (q, k, v), given = t.problem(4, 6, 4, 4)
    ways = comparable_ways(t, given)
    for options in ways[:1] if t.adapter.has("proposals") else ways:
        out = t.call(q, k, v, **options)
        allowed = _same(t, (q, k, v), options)
        for size in (1.0, 8.0):
            edited = np.concatenate([q[:1], t.normal(3, 4, size=size)])
            t.equal(t.call(edited, k, v, **options)[:1], out[:1], allowed)


@check(
    claim="heads and members of a batch do not mix",
    needs=lambda adapter: comparable(adapter) and adapter.lead(2, 3) != (),
)
def heads_apart(t: Trial) -> None:
    """Editing one head leaves the others; with given frequencies each equals itself alone."""
    lead = t.adapter.lead(2, 3)
    (q, k, v), given = t.problem(5, 6, 4, 4, lead=lead)
    for options in comparable_ways(t, given):
        out = t.call(q, k, v, **options)
        allowed = _same(t, (q, k, v), options)
        for index in np.ndindex(*lead):
            if "seed" not in options:
                alone = options | for_heads(t.adapter, options, index)
                _part(t, out[index], allowed, q[index], k[index], v[index], **alone)
            others = np.ones((*lead, 1, 1))
            others[index] = 0
            edited = (t.adapter.exact(x + others * t.normal(*x.shape)) for x in (q, k, v))
            t.equal(t.call(*edited, **options)[index], out[index], allowed)


@check(claim="each head uses the frequencies given for it", needs="omega omega_per_head")
def frequencies_of_heads(t: Trial) -> None:
    """Frequencies with the leading axes of queries."""
    arrays, options = t.problem(5, 6, 4, 4, lead=t.adapter.lead(2, 3))
    t.compare(*arrays, **options | t.of_heads(arrays, options))


def _mask(t: Trial, n: int, m: int, lead: tuple[int, ...] = ()) -> npt.NDArray[Any]:
    """A random mask with at least one key for each query, and a row that sees the first only."""
    mask = t.rng.random((*lead, n, m)) < 0.6
    mask[..., np.arange(n), np.arange(n) % m] = True
    mask[..., 0, 1:] = False
    mask[..., 0, 0] = True
    return mask


@check(claim="a masked key is as if it were not there", needs=_with("mask"))
def mask(t: Trial) -> None:
    """Agreement with the reference under masks of each query, and of padding."""
    sizes = [(2, 3, ()), (5, 5, ()), (6, 70, ()), (4, 5, t.adapter.lead(2, 3))]
    if t.adapter.eps < 1e-4:  # across the edges of blocks
        sizes += [(3, 129, ()), (2, 520, ()), (2, 1030, ())]
        sizes += [(130, 9, ()), (70, 140, t.adapter.lead(2, 3))]
    for n, m, lead in sizes:
        arrays, options = t.problem(n, m, nearest_head_size(t.adapter, 4), 5, lead=lead)
        t.compare(*arrays, **options, mask=_mask(t, n, m, lead))
        padding = np.broadcast_to(np.arange(m) < max(1, m // 2), (*lead, n, m)).copy()
        t.compare(*arrays, **options, mask=padding)
    if stabilised(t.adapter):
        arrays, options = t.problem(5, 6, 4, 5, size=4.0)
        t.compare(*arrays, **options, mask=_mask(t, 5, 6))


@check(claim="a mask broadcasts over heads and queries", needs=_with("mask"))
def mask_broadcasts(t: Trial) -> None:
    """Masks of shape (n, m), (1, m) and (m,), and one for each of a batch or for each head."""
    arrays, options = t.problem(4, 5, 4, 5, lead=t.adapter.lead(2, 3))
    t.compare(*arrays, **options, mask=_mask(t, 4, 5))
    padding = np.array([[True, False, True, True, False]])
    t.compare(*arrays, **options, mask=padding)
    t.compare(*arrays, **options, mask=padding[0])
    lead = arrays[0].shape[:-2]
    each = _mask(t, 1, 5, lead[:1] + (1,) * (len(lead) - 1)) if lead else padding
    each[..., 1] = True
    t.compare(*arrays, **options, mask=each)
    if len(lead) == 2:
        t.compare(*arrays, **options, mask=_mask(t, 4, 5, (1, lead[1])))
        t.compare(*arrays, **options, mask=_mask(t, 1, 5, (1, lead[1])))


@check(
    claim="what is masked has no effect, however large",
    needs=lambda adapter: comparable(adapter) and adapter.can("mask"),
)
def masked_keys_unseen(t: Trial) -> None:
    """Editing masked keys and values changes nothing."""
    seen = np.broadcast_to(np.arange(6) < 4, (5, 6)).copy()
    for size, edits in _edits(t):
        (q, k, v), given = t.problem(5, 6, 4, 4, size=size)
        for options in comparable_ways(t, given):
            out = t.call(q, k, v, **options, mask=seen)
            allowed = _same(t, (q, k, v), options | {"mask": seen})
            for edit in edits:
                hidden, values = (
                    np.concatenate([x[:4], t.normal(2, 4, size=edit)]) for x in (k, v)
                )
                given = options | {"mask": seen}
                t.equal(t.call(q, hidden, values, **given), out, allowed + t.declared(given))


def _edits(t: Trial) -> list[tuple[float, tuple[float, ...]]]:
    """Sizes of visible keys, and of hidden ones that may not matter: also 0 among far ones."""
    low = t.adapter["dtype"] in ("float16", "bfloat16")
    if not stabilised(t.adapter):
        return [(1.0, (0.0, 1.0, 10.0))]
    return (
        [(1.0, (0.0, 1.0, 10.0)), (8.0, (0.0, 1.0))]
        if low
        else [
            (1.0, (0.0, 1.0, 3000.0)),
            (40.0, (0.0, 1.0, 300.0)),
        ]
    )


@check(
    claim="a query that sees no key gets 0, or what is declared",
    needs=lambda adapter: _with("mask")(adapter) and adapter["empty_rows"] != "undefined",
)
def query_without_keys(t: Trial) -> None:
    """A masked row, all of them, and some in each member of a batch."""
    arrays, options = t.problem(4, 5, 4, 4)
    hidden = _mask(t, 4, 5)
    hidden[2] = False
    t.compare(*arrays, **options, mask=hidden)
    t.equal(t.got[2], np.zeros(4), t.adapter.eps)
    t.compare(*arrays, **options, mask=np.zeros((4, 5), dtype=bool))
    lead = t.adapter.lead(2, 3)
    arrays, options = t.problem(4, 5, 4, 4, lead=lead)
    t.compare(*arrays, **options, mask=t.rng.random((*lead, 4, 5)) < 0.3)
    if _causal(t.adapter):
        arrays, options = t.problem(4, 4, 4, 4)
        hidden = np.arange(4)[:, None] * np.ones(4) % 2 == 1
        _both(t, arrays, options | {"causal": True, "mask": hidden})


def _causal(adapter: Adapter) -> bool:
    return _with("causal")(adapter) and not adapter.has("proposals")


@check(claim="query i sees keys 0 to i", needs=_causal)
def causal(t: Trial) -> None:
    """Agreement with the reference, with as many queries as keys."""
    heads = [(6, (2, 3)), (130, (2, 3))]
    for n, lead in [*((n, ()) for n in (1, 2, 5, 17, 65, 130)), *heads]:
        arrays, options = t.problem(n, n, 4, 5, lead=t.adapter.lead(*lead))
        t.compare(*arrays, **options, causal=True)
    if t.adapter.eps < 1e-4:  # across the edges of blocks
        for n in (257, 513) if not t.adapter.has("per-query") else (257,):
            arrays, options = t.problem(n, n, 2, 2)
            t.compare(*arrays, **options, causal=True)
    arrays, options = t.problem(6, 6, 4, 5, size=3.0 if t.adapter.has("exponential") else 1.0)
    t.compare(*arrays, **options, causal=True)


@check(
    claim="with a mask and causal both hide keys",
    needs=lambda adapter: _causal(adapter) and adapter.can("mask"),
)
def mask_with_causal(t: Trial) -> None:
    """Agreement with the reference; a candidate may refuse both at once, by an exception."""
    arrays, options = t.problem(6, 6, 4, 5)
    _both(t, arrays, options | {"mask": _mask(t, 6, 6), "causal": True})


def _both(t: Trial, arrays: tuple[Floats, ...], options: dict[str, Any]) -> None:
    """A mask and causal at once, which a candidate that takes each alone may refuse."""
    try:
        t.adapter(*arrays, **options)
    except Refusal:
        for other in ("mask", "causal"):
            t.compare(*arrays, **{k: x for k, x in options.items() if k != other})
        return
    t.compare(*arrays, **options)


@check(
    claim="with fewer queries than keys, or more, they are aligned as declared",
    needs=lambda adapter: _causal(adapter) and not adapter["self_attention"],
)
def causal_cross(t: Trial) -> None:
    """n below m, and above."""
    empty = t.adapter["causal"] == "bottom-right"  # whether some of 7 queries of 4 keys see none
    undefined = t.adapter["empty_rows"] == "undefined" or not t.adapter.can("mask")
    sizes = [(1, 4), (3, 5), (20, 70), (1, 200), (30, 200), (70, 333)]
    for n, m in sizes if empty and undefined else [*sizes, (7, 4)]:
        arrays, options = t.problem(*t.fit(n, m, 4), 5)
        t.compare(*arrays, **options, causal=True)


@check(
    claim="the future has no effect, however large",
    needs=lambda adapter: comparable(adapter) and adapter.can("causal"),
)
def future_unseen(t: Trial) -> None:
    """Editing later keys and values, and then later queries too, leaves earlier results."""
    for size, edits in _edits(t):
        (q, k, v), given = t.problem(9, 9, 4, 3, size=size)
        ways = comparable_ways(t, given, 3)
        for options in ways[-1:] if t.adapter.has("proposals") else ways:
            out = t.call(q, k, v, **options, causal=True)
            allowed = _same(t, (q, k, v), options | {"causal": True})
            if t.adapter["feature_map"] == "relu":  # of queries that are 0 nothing is defined
                edits = tuple(edit for edit in edits if edit)
            for edit in edits:
                for first in (8, 4):
                    edited = [
                        np.concatenate([x[:first], t.normal(9 - first, 4, size=edit)])
                        for x in (q, k, v)
                    ]
                    given = options | {"causal": True}
                    later = t.call(*edited, **given)
                    t.equal(later[:first], out[:first], allowed + t.declared(given))


@check(
    "random-features",
    "mean",
    claim="causal and masked attention use the keys and frequencies that plain attention does",
    needs=lambda adapter: (adapter.can("causal") or adapter.can("mask")) and adapter.black_box,
)
def visible_part(t: Trial) -> None:
    """At one seed a query's result is that of plain attention to the keys it sees."""
    (q, k, v), _ = t.problem(6, 6, 4, size=t.near if t.adapter.can("omega") else 1.0)
    for samples in (1, 5):
        options = t.options(samples)
        ways: list[tuple[str, Any, Any]] = (
            [("causal", True, np.tri(6, dtype=bool))] if t.adapter.can("causal") else []
        )
        if t.adapter.can("mask"):
            ways.append(("mask", seen := _mask(t, 6, 6), seen))
        for name, value, seen in ways:
            out = t.call(q, k, v, **options, **{name: value})
            allowed = tolerance(t.adapter, (q, k, v), options | {name: value}, out)
            for i in range(6):
                own = tolerance(t.adapter, (q[i : i + 1], k[seen[i]], v[seen[i]]), options, out[i])
                t.equal(t.call(q, k[seen[i]], v[seen[i]], **options)[i], out[i], allowed + own)


@check(
    claim="consecutive query heads share a key head",
    needs=lambda adapter: _with("gqa")(adapter) and "h" in (adapter["layout"] or "h"),
)
def grouped_heads(t: Trial) -> None:
    """Four query heads over two and one key heads, six over three."""
    for heads, groups in ((4, 2), (4, 1), (6, 3)):
        lead = t.adapter.lead(2, heads)
        arrays, options = t.problem(3, 5, 4, 5, lead=lead, groups=groups)
        t.compare(*arrays, **options)
        if t.adapter.can("mask"):
            t.compare(*arrays, **options, mask=_mask(t, 3, 5, lead))
        if _causal(t.adapter):
            arrays, options = t.problem(5, 5, 4, 5, lead=lead, groups=groups)
            t.compare(*arrays, **options, causal=True)


@check(
    "random-features",
    "mean",
    claim="with one frequency queries cancel from the ratio",
    needs=lambda adapter: adapter["features"] == "positive" and not adapter["fixed_frequencies"],
)
def one_frequency(t: Trial) -> None:
    """At S = 1 the result is the same for every query."""
    (q, k, v), given = t.problem(6, 7, 4, 1)
    for options in _ways(t, given, 1):
        out = t.call(q, k, v, **options)
        t.equal(out, np.broadcast_to(out[:1], out.shape), _same(t, (q, k, v), options))


@check("average", claim="the estimate is the mean over frequencies", needs="omega")
def mean_over_frequencies(t: Trial) -> None:
    """Frequencies in another order, and each of them twice, give the same."""
    arrays, options = t.problem(4, 6, 4, 6)
    axis = -2
    omega = options["omega"]
    out = t.call(*arrays, omega=omega)
    allowed = _same(t, arrays, options)
    t.equal(t.call(*arrays, omega=np.flip(omega, axis).copy()), out, allowed)
    t.equal(t.call(*arrays, omega=np.concatenate([omega, omega], axis)), out, allowed)


@check(
    "pairs", claim="features of x times features of y are the estimate", needs="omega feature_map"
)
def feature_products(t: Trial) -> None:
    """Products of the exposed features, the same map for both sides."""
    for d, samples in ((1, 1), (3, 4), (8, 33)):
        (x, y), options = t.problem(5, 5, d, samples)
        want, allowed = reference(t.adapter, (x, y), options)
        a, b = (t.call(z, **options) for z in (x, y))
        if a.shape != b.shape or a.shape[:-1] != x.shape[:-1]:
            raise Failure("features of shape (5, F)", f"shape {a.shape}")
        t.equal(np.sum(a * b, -1), want, allowed)
