"""Runs of checks: the registry, the calls of a candidate, and what is compared with what.

Each check is a generator of comparisons; the first that fails ends it, and cases come smallest
first, so that the case reported is the smallest that shows the defect.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ....arrays.library import Floats
from ..candidate.adapter import Adapter
from ..candidate.failures import Failure
from ..candidate.gates import draw_gates
from ..candidate.limits import Arrays, Keywords, nearest_head_size, shrink, tokens
from ..candidate.samples import draw_frequencies, draw_key_indices
from ..truth.allowed import allowed_error, declared, of_rows, reference, rounding

# Size of queries and keys of black boxes with an epsilon, or with trigonometric features: the
# normaliser is large there, whatever the frequencies.
_SHORT = 0.02
_OF_PROBLEM = frozenset({"lead", "size", "shift", "d_v", "groups"})


class Call(NamedTuple):
    """One call of the candidate, with what should come and how far from it is allowed."""

    arrays: Arrays
    options: Keywords
    want: Floats | None = None
    allowed: float = 0.0
    strict: bool = False


@dataclass(frozen=True)
class Check:
    """A named claim about candidates of estimators with some traits, and how it is tested."""

    name: str
    claim: str
    layer: str
    traits: frozenset[str]
    needs: Callable[[Adapter], bool]
    run: Callable[[CheckRun], None]
    draws: bool = False

    def applies(self, adapter: Adapter) -> bool:
        """Return whether the check applies to this candidate."""
        drawn = adapter.draws or not self.of_draws
        return adapter.has(*self.traits) and drawn and self.needs(adapter)

    @property
    def of_draws(self) -> bool:
        """Whether it tests random draws of the candidate."""
        return self.draws or self.layer != "identity"


@dataclass
class CheckRun:
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
    effects: dict[str, str] = field(default_factory=dict)  # sizes, by the labels of statistics
    omega: Floats | None = None  # frequencies that it recovered, one of each seed
    kept: Any = None  # which weights dropout kept in the last call, if it recovered these
    samples: int = 0
    reached: float = 1.0  # share of the planned seeds that time allowed
    hidden: float = 0.0
    case: Call | None = None
    got: Any = None
    part: int | None = None  # which result of the last call is compared, if it is one
    calls: int = 0  # that have returned
    since: float | None = None  # when the call that runs now began
    beyond: str = ""  # why it ended, if that was a problem beyond what the candidate takes
    refused: str = ""  # why no call can be right, if the first call ended so
    crashed: bool = False  # whether the end of the candidate's process ended it
    advice: str = ""  # how to get what it lacks
    untried: list[str] = field(default_factory=list)  # what the check left out, and why
    over: bool = False  # time has run out, and nobody waits for the rest
    interrupted: bool = False  # by a signal
    times: dict[Any, list[float]] = field(default_factory=dict)  # of calls, by shapes

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng([self.seed, zlib.crc32(self.name.encode())])

    def anew(self) -> CheckRun:
        """Return another run of the same check, which draws the same numbers."""
        names = ("adapter", "name", "seed", "size", "budget", "level", "times")
        return CheckRun(**{x: getattr(self, x) for x in names})

    def normal(self, *shape: int, size: float = 1.0) -> Floats:
        """Draw normal numbers that are exact in the candidate's dtype; with relu, their sizes.

        Queries and keys of either sign may share no positive feature, and then nothing is defined.
        """
        z = size * self.rng.standard_normal(shape)
        return self.adapter.exact(np.abs(z) if self.adapter["feature_map"] == "relu" else z)

    @property
    def near(self) -> float:
        """Factor on queries and keys where the frequencies are not known."""
        adapter = self.adapter
        return _SHORT if adapter.waves or (adapter["epsilon"] and adapter.has("random")) else 1.0

    def declared(self, options: Keywords) -> float:
        """Return the error that the declared epsilon may cause in the last call."""
        return 0.0 if self.case is None else declared(self.adapter, self.case.arrays, options)

    def fit(self, n: int, m: int, d: int) -> tuple[int, int, int]:
        """Return sizes near these that the candidate takes as they are."""
        return *tokens(self.adapter, n, m), nearest_head_size(self.adapter, d)

    def new_seed(self) -> int:
        """Return a seed to give to the candidate."""
        # Laws call with the seeds after it, which stay below 2^31 as well.
        return int(self.rng.integers(2**31 - 2**20))

    def options(self, samples: int) -> dict[str, Any]:
        """Return the options that ask a black box for a number of samples, at one seed."""
        seed = {"seed": self.new_seed()} if self.adapter.has("random") else {}
        return self.adapter.record.sized(samples) | seed

    def _may_overflow(self, arrays: Arrays, options: Keywords) -> bool:
        """Return whether sums that cancel may leave the range of half precision, rightly."""
        if not self.adapter.waves or self.adapter["dtype"] != "float16":
            return False
        largest, most = 0.0, allowed_error(self.adapter, arrays, options)
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
        self.case = Call(arrays, options, strict=strict)
        self.got = self.part = None
        self.since = time.monotonic()
        got = self.adapter(*arrays, strict=strict, memory=memory, **options)
        shapes = (*(x.shape for x in arrays), *sorted(options))
        self.times.setdefault(shapes, []).append(time.monotonic() - self.since)
        self.since = None
        self.calls += 1
        self.got = got
        names = self.adapter.returns(options)
        for i, (name, x) in enumerate(zip(names, self.results, strict=True)):
            bad = int(np.sum(np.isnan(x) if name == "lse" else ~np.isfinite(x)))
            if bad and not self._may_overflow(arrays, options):
                where = f" in {name}" * (len(names) > 1)
                self.part = None if memory else i  # a script of one call would not repeat it
                raise Failure(
                    f"finite numbers{where}", f"{bad} of {x.size} that are NaN or infinite"
                )
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
        """Compare the last result or results, or what has a name, with what should have come."""
        if not isinstance(got, tuple):
            self._equal(got, want, allowed, f"{name} " if name else "")
            return
        each = allowed if isinstance(allowed, tuple) else (allowed,) * len(got)
        for triple in zip(got, want, each, strict=True):
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

    def compare_problem(
        self, *sizes: int, own: bool = False, by: Callable[..., None] | None = None, **named: Any
    ) -> None:
        """Draw a problem, with `own` of heads apart, and compare, `by` another comparison perhaps.

        What is not an argument of `problem` is one of the call.
        """
        arrays, options = self.problem(
            *sizes, **{name: named.pop(name) for name in _OF_PROBLEM & named.keys()}
        )
        if own:
            options |= self.of_heads(arrays, options)
        if by is None:
            self.compare(*arrays, **options | named)
        else:
            by(self, arrays, **options | named)

    def hides(self, allowed: float, v: Floats) -> None:
        """Note how much of the largest value a declared epsilon may hide."""
        if self.adapter["epsilon"]:
            self.hidden = max(self.hidden, allowed / max(float(np.max(np.abs(v))), 1e-300))
            # An epsilon that may hide more than this leaves too little to compare.
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
    ) -> tuple[Arrays, Keywords]:
        """Return inputs for the estimator, with frequencies where it takes them.

        `size` is that of queries and keys in kernel coordinates, and `shift` the mean of keys;
        with `groups` keys and values have that many heads in place of the last of `lead`.
        """
        adapter, record = self.adapter, self.adapter.record
        if record.has("recurrent"):
            (n, m), d = tokens(adapter, n, m), nearest_head_size(adapter, d)
            d_v = d if adapter["same_value_size"] else d_v
        if not adapter.drawn_keyword:
            size *= self.near
        elif record.has("linear-solve"):
            size *= min(1.0, 1.5 / math.sqrt(d))  # rows of e^(k . k') are to be of like size
        unit = size / adapter.root(d)
        if record.has("rows"):
            return (self.normal(*lead, n, d, size=size) + shift,), {}
        if record.has("pairs"):
            size *= min(1.0, 4 / math.sqrt(d))  # exp(x . y) itself must be representable
            x, y, omega = (self.normal(*s, d, size=size) for s in ((n,), (n,), (samples,)))
            less = shrink(adapter, x, y)
            return (adapter.exact(less * x), adapter.exact(less * y)), {"omega": omega / size}
        shared = lead if groups is None else (*lead[:-1], groups)
        q = self.normal(*lead, n, d, size=unit)
        k = adapter.exact(self.normal(*shared, m, d, size=unit) + shift * unit)
        less = shrink(adapter, q, k)
        q, k = (adapter.exact(less * x) for x in (q, k))
        v = self.normal(*shared, m, d if d_v is None else d_v)
        if record.has("recurrent"):
            if adapter["beta"] == "written":  # no rate bounds what is removed
                k = adapter.exact(k / np.maximum(1.0, np.linalg.norm(k, axis=-1, keepdims=True)))
            return (q, k, v), draw_gates(adapter, self.rng, k)
        if adapter.drawn_keyword == "indices":
            return (q, k, v), draw_key_indices(adapter, self.rng, k, lead, n, samples)
        if not record.takes("omega"):
            size_of_it = samples if record.has("unlimited-size") else min(samples, n, m)
            return (q, k, v), {} if record.has("random") else record.sized(size_of_it)
        return (q, k, v), draw_frequencies(adapter, self.normal, (q, k), samples, less * size)

    def cotangent(self, arrays: Arrays) -> Floats:
        """Draw a cotangent of the output, with the heads of queries."""
        q, _, v = arrays
        return self.normal(*q.shape[:-1], v.shape[-1])

    def given_or_drawn(self, frequencies: Keywords, samples: int = 4) -> dict[str, Any]:
        """Return options of a call: frequencies that are given to it, or a seed of which it draws.

        What is causal without being asked is told so.
        """
        adapter = self.adapter
        return adapter.settled | (frequencies if evaluated(adapter) else self.options(samples))

    def of_heads(self, arrays: Arrays, options: Keywords) -> dict[str, Any]:
        """Draw for each head what all heads were given."""
        (*lead, n, _), k = arrays[0].shape, arrays[1]
        if "indices" in options:
            samples = options["indices"].shape[-1]
            return draw_key_indices(self.adapter, self.rng, k, tuple(lead), n, samples, each=True)
        return {"omega": self.normal(*lead, *options["omega"].shape[-2:])}


CHECKS: dict[str, Check] = {}  # in the order of the table
CONDITIONS: dict[str, Callable[[Adapter], bool]] = {}  # that the table names
RUNS: dict[str, Callable[[CheckRun], None]] = {}  # functions that run the checks, by name


def add_check(run: Callable[[CheckRun], None]) -> Callable[[CheckRun], None]:
    """Register the function that runs the check of its name; its claim is in `claims`."""
    RUNS[run.__name__] = run
    return run


def add_condition(holds: Callable[[Adapter], bool]) -> Callable[[Adapter], bool]:
    """Register a condition on candidates, which the table of claims names."""
    CONDITIONS[holds.__name__] = holds
    return holds


@add_condition
def heads(adapter: Adapter) -> bool:
    """Return whether it takes several heads, or leading axes, in a call."""
    return adapter.lead(2, 3) != ()


@add_condition
def evaluated(adapter: Adapter) -> bool:
    """Return whether the candidate can be compared number by number."""
    return not adapter.has("random") or bool(adapter.drawn_keyword)


@add_condition
def attends(adapter: Adapter) -> bool:
    """Return whether it is attention: a result for each query, of its values."""
    return len(adapter.record.arrays) == 3


@add_condition
def stabilised(adapter: Adapter) -> bool:
    """Return whether large exponents are asked of it: cosines lose all digits to them."""
    return adapter.has("exponential") and not adapter.waves


def ways_to_call(t: CheckRun, options: Keywords, samples: int = 4) -> list[dict[str, Any]]:
    """Return the ways to call the candidate: with frequencies if it takes them, and with a seed."""
    ways = [options] if evaluated(t.adapter) else []
    alone = t.adapter.has("random") and t.adapter.black_box
    return ways + ([t.options(samples)] if alone else [])


@add_condition
def comparable(adapter: Adapter) -> bool:
    """Return whether results for different inputs can be compared.

    With a seed they can if the draws do not depend on the inputs; those of RA do by definition.
    """
    return attends(adapter) and (evaluated(adapter) or adapter.has("data-free"))


def comparable_ways(t: CheckRun, frequencies: Keywords, samples: int = 4) -> list[dict[str, Any]]:
    """Return the ways to call it for which results for different inputs can be compared."""
    ways = ways_to_call(t, frequencies, samples)
    return ways if t.adapter.has("data-free") else ways[:1]


def again(t: CheckRun, arrays: Arrays, options: Keywords) -> float:
    """Return the rounding error between two equal calls."""
    if t.adapter.has("rows"):
        return float(np.max(of_rows(t.adapter, np.asarray(arrays[0], np.longdouble))[1]))
    return 2 * rounding(t.adapter, arrays, options, 0.0 if t.got is None else t.got)


def same_within(t: CheckRun, arrays: Arrays, options: Keywords) -> float:
    """Return the error allowed between two evaluations of the same numbers."""
    return 2 * allowed_error(t.adapter, arrays, options, 0.0 if t.got is None else t.got)


def results_of(
    t: CheckRun, arrays: Arrays, ways: Iterable[dict[str, Any]], **more: Any
) -> Iterator[tuple[dict[str, Any], Floats, float]]:
    """Yield options of each way to call it, the result, and the error allowed in another."""
    for way in ways:
        options = way | more
        out = t.call(*arrays, **options)
        yield options, out, same_within(t, arrays, options)


def compare_known(
    t: CheckRun, want: Floats, allowed: float, *arrays: Floats, **options: Any
) -> None:
    """Compare a call with what is known to within `allowed`, whatever the formula gives."""
    got = t.call(*arrays, **options)
    t.equal(got, want, allowed + allowed_error(t.adapter, arrays, options, got))
