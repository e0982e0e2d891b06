"""A `Problem`: arrays and conventions of an attention call by head, its exact result and errors."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from threading import Lock
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...arrays import checks, qkv
from ...arrays.blocks import WHOLE, blocks
from ...arrays.heads import grouped_lead
from ...arrays.library import Doubles, to_host
from ...arrays.threads import Sequencer, for_each
from ...arrays.words import name_element
from ...engine.scores import Band
from .backward import analyse_gradient, exact_gradient, list_sources
from .formats import FORMATS, Format, check_all_hold, widen
from .head import ExactRows, ScoredRows, SoftmaxHead, exact_rows
from .linear import (
    LinearHead,
    analyse_linear,
    map_head,
    random_feature_head,
    read_frequencies,
)
from .profiles import Profile
from .recurrent import Recurrence, look_at_recurrence
from .roundings import Roundings, RowErrors
from .saved import BackwardHead, Saved, forget_gradients, save_queries
from .softmax import analyse_softmax

# Allocators such as glibc's keep what is freed, up to twice the largest block that was. Otherwise
# arrays of tiles go back to the system, and clearing their pages again takes a tenth of all time.
np.empty(2**22 - 2**10)
CALLED = {"scores": "softmax", "frequencies": "rfa", "map": "linear"}  # by users

Index = tuple[int, ...]  # of a head among the leading axes
_Look = Callable[[Index, Roundings, slice], Any]
_SAVED_NUMBERS, _SAVED_COLUMNS = 2**25, 24  # of heads at most, and of a query beside its mean key
_BLOCK_ROWS = 256  # queries of a block
_EXACT_HEADS = 4  # of which what is exact, or was rounded, is kept
_READ_HEADS = 64  # that are kept as they were read: what is kept are views of arrays, or all finite


class Packed(NamedTuple):
    """Sequences one after another, of which each sees itself: the mask says so.

    Conventions are as in `predict`, of each: its last query is level with its last key.
    """

    queries: npt.NDArray[np.int64]  # where each begins, and the end of the last
    keys: npt.NDArray[np.int64]
    causal: bool
    window: tuple[int | None, int | None]
    table: npt.NDArray[np.int64] | None = None  # of blocks of keys, (batch, blocks)
    blocks: Callable[[Index], Sequence[Doubles]] | None = None  # all keys, and values, of a head


class Problem(NamedTuple):
    """Softmax attention with its conventions, as in `predict`, of which heads are read one by one.

    `read` gives the arrays of a head by name, in float64: q, k, v and, where there are, bias, mask
    and sinks, (1, 1).
    """

    lead: tuple[int, ...]  # leading axes of the result
    shape: tuple[int, int, int]  # queries, keys, and columns of the values
    read: Callable[[Index], Mapping[str, Any]]
    scale: float
    causal: bool
    window: tuple[int | None, int | None]
    softcap: float | None
    feature_map: Callable[[Any], Any] | None = None
    kind: str = "scores"  # what weights are made of, or "frequencies", "map", "recurrent", "text"
    gradient: Gradient | None = None
    has_sinks: bool = False
    key_heads: int | None = None  # heads of keys where query heads share these in groups
    blocks: tuple[tuple[Index, slice], ...] | None = None  # that are looked at; None for all
    storage: str = "float64"  # what profiles with inputs of type `storage` round these to
    packed: Packed | None = None  # the sequences, if there are several
    record: str = ""  # name of a recurrence
    of: str = "out"  # what a recurrence gives: that, its last state or a gradient
    kept: str = ""  # type of the states that a recurrence was given or gave, if there is one
    derived: Callable[..., tuple[RowErrors, Doubles]] | None = None  # laws of rows, by a text

    @property
    def called(self) -> str:
        """Name the estimator as users do."""
        return self.record or CALLED[self.kind]

    @property
    def is_mean(self) -> bool:
        """Whether the result is a mean of the values, with weights by scores."""
        return self.kind == "scores" and self.gradient is None

    @property
    def result(self) -> str:
        """What the result is called."""
        named = self.of if self.gradient is None else self.gradient.of
        return {"out": "the output", "state": "the last state"}.get(named, named)

    @property
    def first(self) -> Mapping[str, Any]:
        """The arrays of the first head; none if there is no head."""
        return {} if 0 in self.lead else self.read((0,) * len(self.lead))

    @property
    def rows(self) -> str:
        """What the rows of the result belong to."""
        return "queries" if self.gradient is None or self.gradient.of == "dq" else "keys"

    @property
    def shares_keys(self) -> bool:
        """Whether the result is a gradient that sums over query heads."""
        return self.gradient is not None and any(len(x) > 1 for x in self.gradient.heads.values())

    def rows_apart(self, roundings: Roundings) -> bool:
        """Tell whether no rounding that matters has a part in two rows of the result."""
        if self.gradient is None or self.gradient.of == "dq":
            return self.kind in ("scores", "recurrent")  # features of keys are in all rows
        return roundings.delta_of_out and not roundings.scores_matter and self.gradient.has_out

    def analyse(
        self,
        index: Index,
        roundings: Roundings,
        i: slice,
        changes: Mapping[str, Any] = MappingProxyType({}),
        exact: ScoredRows | None = None,
    ) -> RowErrors:
        """Say what a kernel may give for the queries i of a head, of which all may be exact."""
        if (gradient := self.gradient) is not None:
            saved = gradient.saved(index, roundings, i)
            return analyse_gradient(saved, roundings, gradient.of, i, gradient.along(index))
        if self.derived is not None:
            return self.derived(self, index, roundings, i)[0]
        if self.kind == "scores":
            return analyse_softmax(self.head(index), roundings, i, changes, exact)
        if self.kind == "recurrent":
            return self.recurrence(index, roundings).rows.take(i)
        return analyse_linear(self.features(index, roundings), roundings, i)

    def recurrence(self, index: Index, roundings: Roundings) -> Recurrence:
        """Say what a kernel may give for a head of a recurrence."""
        return look_at_recurrence(self.read, index, self.scale, roundings, self.of)

    def exact(self, index: Index, roundings: Roundings, i: slice, thin: int = 1) -> Doubles:
        """Compute the exact result of scores, or of a gradient by one in so many tokens."""
        if self.gradient is None:
            return exact_rows(self.head(index), i)
        return exact_gradient(self.gradient.saved(index, roundings, i), self.gradient.of, i, thin)

    def list_sources(self, index: Index, roundings: Roundings, i: slice) -> list[Doubles]:
        """List what makes rows: queries, with the derivatives to outputs, or keys and values."""
        if self.gradient is None:
            return [self.read(index)["q"][i]]
        return list_sources(self.gradient.backs(index), roundings, self.gradient.of, i)

    def features(self, index: Index, roundings: Roundings) -> LinearHead:
        """Take the features of a head that the estimator has."""
        x = self.read(index)
        q, k, v = (x[name] for name in "qkv")
        keys: Any = {"visible": x["mask"][0] if "mask" in x else None, "causal": self.causal}
        if self.feature_map is not None:
            return map_head(q, k, v, self.feature_map, roundings, **keys)
        omega, log_weight = x["omega"], x["log_weight"]
        return random_feature_head(q, k, v, omega, log_weight, roundings, scale=self.scale, **keys)

    def head(self, index: Index, i: Any = WHOLE, j: Any = WHOLE) -> SoftmaxHead:
        """Read the arrays of a head, or of its queries i and keys j, with the conventions."""
        x = self.read(index)
        of_pairs = (x[name][i][:, j] if name in x else None for name in ("bias", "mask"))
        bias, mask = _hide_infinite_bias(*of_pairs)
        conventions = (self.causal, self.window, self.softcap)
        head = SoftmaxHead(x["q"][i], x["k"][j], x["v"][j], self.scale, bias, mask, *conventions)
        return head.with_sink(x["sinks"].item()) if self.has_sinks else head

    def items(self) -> Iterator[tuple[Index, slice]]:
        """List heads and blocks of their rows, of those that are looked at."""
        if self.blocks is not None:
            yield from self.blocks
            return
        for index in np.ndindex(self.lead):
            yield from ((index, i) for i in blocks(0, self.shape[0], _BLOCK_ROWS))

    def list_in_turn(self) -> list[tuple[int, tuple[Index, slice]]]:
        """List `items` with their places; of gradients, those of two heads in turn.

        Blocks of a head need what is saved of it: a thread would wait for the one that makes it.
        """
        found = [*enumerate(self.items())]
        if self.gradient is not None and all(len(x) == 1 for x in self.gradient.heads.values()):
            found.sort(key=lambda x: (self.number(x[1][0]) // 2, x[1][1].start))
        return found

    def number(self, index: Index) -> int:
        """Return the number of a head."""
        return int(np.ravel_multi_index(index, self.lead)) if index else 0

    def index_of(self, number: Any) -> Index:
        """Return the index of the head with a number."""
        return tuple(map(int, np.unravel_index(number, self.lead)))

    def few_items(self, count: int) -> list[tuple[Index, slice]]:
        """List so many of `items`, spread over all of them."""
        every = list(self.items())
        return every[:: max(1, len(every) // count)][:count]

    def looked_at(self, rows: Sequence[tuple[Index, slice]]) -> Problem:
        """Take some rows."""
        return self._replace(blocks=tuple(rows))

    def alone(self, index: Index) -> Problem:
        """Take one head."""
        if self.gradient is None:
            return self._replace(lead=(), read=lambda _: self.read(index), blocks=None)
        return self.gradient._replace(heads={(): self.gradient.heads[index]}).problem(())

    def replaced(self, name: str, change: Callable[[Index, Any], Any]) -> Problem:
        """Replace the mask, bias or sink by a function of the index of the head and of what was."""

        def read(index: Index) -> Mapping[str, Any]:
            arrays = self.read(index)
            return {**arrays, name: change(index, arrays.get(name))}

        return self._replace(read=read)

    def with_arrays_of(self, names: Iterable[str], at: Callable[[Index], Index]) -> Problem:
        """Read some arrays of another head."""

        def read(index: Index) -> Mapping[str, Any]:
            other = self.read(at(index))
            return {**self.read(index), **{x: other[x] for x in names}}

        return self._replace(read=read)

    def with_scales(self, scales: Mapping[str, Doubles]) -> Problem:
        """Keep the scales that q, k or v of 8 bits were multiplied by, with all axes of these."""
        if not scales:
            return self

        def read(index: Index) -> Mapping[str, Any]:
            arrays = dict(self.read(index))
            for name, x in scales.items():
                skipped = len(index) + 2 - x.ndim
                axes = zip(index[skipped:], x.shape[:-2], self.lead[skipped:], strict=True)
                arrays[f"{name}_scale"] = x[tuple(i * size // full for i, size, full in axes)]
            return arrays

        return self._replace(read=read)

    def masked(self, seen: npt.NDArray[np.bool_]) -> Problem:
        """Add one more mask."""
        return self.replaced("mask", lambda index, x: seen if x is None else seen & x)

    def without(self, name: str) -> Problem:
        """Leave out the mask, the bias or the sinks."""
        if name == "sinks":
            return self._replace(has_sinks=False)
        read = self.read
        return self._replace(read=lambda index: {x: y for x, y in read(index).items() if x != name})

    def leave_out(self) -> Iterator[tuple[str, Problem]]:
        """Name each option that was given, with the problem that is left without it."""
        if self.softcap is not None:
            yield "soft cap", self._replace(softcap=None)
        yield from ((x, self.without(x)) for x in ("bias", "mask") if x in self.first)
        if self.has_sinks:
            yield "sinks", self.without("sinks")
        if self.causal:
            yield "causal mask", self._replace(causal=False)
        if self.window != (None, None):
            yield "window", self._replace(window=(None, None))

    def read_by(self, profile: Profile) -> Problem:
        """Round queries, keys and values as a profile does first."""
        if profile.reading is None:
            return self
        to, powers = profile.reading
        return self.rounded(FORMATS[to.replace("storage", self.storage)], powers)

    def rounded(self, to: Format, powers: tuple[float, float] = (0.0, 0.0)) -> Problem:
        """Round queries and keys times powers of the scale, and values; 8 bits to their range."""
        if self.gradient is not None:
            gradient = self.gradient.rounded(to, powers)
            return gradient.problem(self.lead)._replace(blocks=self.blocks)
        heads, factors = [*np.ndindex(self.lead)], (abs(self.scale) ** x for x in (*powers, 0.0))
        to_read = {
            name: _scaled_to(to, (self.read(index)[name] for index in heads), by)
            for name, by in zip("qkv", factors, strict=True)
        }

        @lru_cache(maxsize=_EXACT_HEADS)
        def read(index: Index) -> Mapping[str, Any]:
            arrays = self.read(index)
            return {**arrays, **{name: x(arrays[name]) for name, x in to_read.items()}}

        return self._replace(read=read)


def _scaled_to(
    to: Format, arrays: Iterable[Doubles], factor: float = 1.0
) -> Callable[[Doubles], Doubles]:
    """Return what rounds arrays times a factor; for 8 bits it is to scale them to the range."""
    if to.has_8_bits:
        largest = max((float(np.max(np.abs(x), initial=0.0)) for x in arrays), default=0.0)
        scale = to.largest / largest if largest else 1.0
        return lambda x: to.round(x * scale) / scale
    by, single = float(np.float32(factor)), FORMATS["float32"].round  # as kernels multiply
    return to.round if factor in (0.0, 1.0) else lambda x: to.round(single(x * by)) / factor


class Gradient(NamedTuple):
    """The gradient of softmax attention in queries, keys or values: "dq", "dk" or "dv".

    For a query head `derivatives` gives the derivative to the output, and the output or None.
    """

    of: str
    forward: Problem  # what the output is of
    derivatives: Callable[[Index], tuple[Doubles, Doubles | None]]
    heads: Mapping[Index, Sequence[Index]]  # query heads with a part in each of the gradient
    has_out: bool
    columns: int  # of the gradient
    saved: Callable[..., Any] = lambda index, roundings, rows=WHOLE: None
    products: Callable[[Doubles], Doubles] | None = None  # rounds derivatives before products
    along: Callable[[Index], Doubles | None] = lambda index: None  # what covariances are found of

    def back(self, head: Index) -> BackwardHead:
        """Read a query head with the derivative to its output."""
        d_out, out = self.derivatives(head)
        rounded = d_out if self.products is None else self.products(d_out)
        return BackwardHead(self.forward.head(head), rounded, out, d_out)

    def backs(self, index: Index) -> list[BackwardHead]:
        """Read all query heads that have a part in a head of the gradient."""
        return [self.back(x) for x in self.heads[index]]

    def looking(self) -> _Look:
        """Return what looks at queries of heads once, for all blocks of rows and all gradients."""
        n, m, d = self.forward.shape
        most = max(map(len, self.heads.values()), default=1)
        most = max(most + 3, _SAVED_NUMBERS // max(1, max(n, m) * (d + _SAVED_COLUMNS)))

        guard, locks = Lock(), defaultdict[Any, Lock](Lock)  # others wait: they need the same

        @lru_cache(maxsize=_EXACT_HEADS)  # one after another, for all profiles
        def read(index: Index) -> tuple[BackwardHead, dict[Any, Any]]:
            return self.back(index), {}

        @lru_cache(maxsize=most)
        def look(index: Index, roundings: Roundings) -> tuple[BackwardHead, Saved, dict[Any, Any]]:
            back, known = read(index)
            return back, save_queries(back, roundings, slice(0), known), known

        def look_once(index: Index, roundings: Roundings, rows: slice) -> Any:
            roundings = forget_gradients(roundings)
            with guard:
                own = locks[index, roundings]
            with own:
                back, saved, known = look(index, roundings)
                return back, save_queries(back, roundings, rows, known, saved)

        return look_once

    def problem(self, lead: tuple[int, ...], look: _Look | None = None) -> Problem:
        """Pose the problem of the gradient, with what looks at heads."""
        look = look or self.looking()

        def saved(index: Index, roundings: Roundings, rows: slice = WHOLE) -> Any:
            rows = rows if self.of == "dq" else WHOLE  # rows of others are sums over all queries
            return [look(x, roundings, rows) for x in self.heads[index]]

        n, m, _ = self.forward.shape
        return self.forward._replace(
            lead=lead,
            shape=(n, m, self.columns) if self.of == "dq" else (m, n, self.columns),
            read=lambda index: self.forward.read(self.heads[index][0]),
            gradient=self._replace(saved=saved),
        )

    def rounded(self, to: Format, powers: tuple[float, float]) -> Gradient:
        """Round queries, keys and values; and derivatives to the output in products."""
        heads = np.ndindex(self.forward.lead)
        scaled = _scaled_to(to, (self.derivatives(index)[0] for index in heads))
        return self._replace(forward=self.forward.rounded(to, powers), products=scaled)


def pose_gradients(
    problem: Problem,
    shapes: Mapping[str, tuple[int, ...]],
    d_out: Callable[[Index], Doubles],
    out: Callable[[Index], Doubles] | None,
    dtype: str,
) -> dict[str, Problem]:
    """Pose the problems of gradients, whose shapes are given by name.

    The derivatives `d_out` must be numbers of the type, as those that a kernel was given.
    """
    if problem.kind != "scores":
        only = "gradients are judged for softmax and recurrences only"
        raise ValueError(f"{only}, got {problem.called}.")
    for index in np.ndindex(problem.lead):
        check_all_hold("d_out", d_out(index), index, dtype)

    def derivatives(index: Index) -> tuple[Doubles, Doubles | None]:
        return d_out(index), None if out is None else out(index)

    backward: dict[str, Gradient] = {}
    for name, (*lead, _, columns) in shapes.items():
        heads: dict[Index, list[Index]] = {x: [] for x in np.ndindex(*lead)}
        for index in np.ndindex(problem.lead):
            heads[_place(index, problem.lead, tuple(lead))].append(index)
        backward[name] = Gradient(name, problem, derivatives, heads, out is not None, columns)
    shared = max(backward.values(), key=lambda x: max(map(len, x.heads.values()), default=1))
    look = shared.looking()  # at a head for all of its gradients
    return {name: x.problem(shapes[name][:-2], look) for name, x in backward.items()}


def _hide_infinite_bias(bias: Any, mask: Any) -> tuple[Any, Any]:
    """Move hidden keys from the bias, where they are -inf, to the mask."""
    if bias is None or not np.any(hidden := np.isneginf(bias)):
        return bias, mask
    return np.where(hidden, 0.0, bias), ~hidden if mask is None else mask & ~hidden


def hide_unseen(x: dict[str, Any], band: Band) -> dict[str, Any]:
    """Put 0 in place of what is not finite and no query of a head sees.

    A hidden key does not exist, whatever it holds; one that a query sees must be finite.
    """
    for name in {"bias", "mask"} & {*x}:
        x[name] = np.broadcast_to(x[name], (len(x["q"]), len(x["k"])))
    mask = _hide_infinite_bias(x.get("bias"), x.get("mask"))[1]
    known = {name: np.isfinite(x[name]) for name in "qkv"}
    finite = {name: y.all(-1) for name, y in known.items()}
    for j in np.flatnonzero(~(finite["k"] & finite["v"])).tolist():
        key = slice(j, j + 1)
        mask_of_key = None if mask is None else mask[:, key]
        seen = band.visible(slice(0, len(x["q"])), key, None, np, mask_of_key)
        if seen is not None and not seen.any():
            finite["k"][j] = finite["v"][j] = True
    for name, whole in finite.items():
        if not whole.all():
            at = np.argwhere(~whole[:, None] & ~known[name])[0].tolist()
            where = "" if name == "q" else " where a query sees it"
            found = f"{x[name][tuple(at)]} at {name_element(at)}"
            raise ValueError(f"`{name}` must be finite{where}, got {found} of its head.")
        if known[name].all():
            x[name] = np.ascontiguousarray(x[name])
        else:  # what was there, a wrong kernel may have read
            x[name], x[f"{name}_lost"] = np.where(known[name], x[name], 0.0), ~known[name]
    return x


def pose_arrays(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    bias: Any = None,
    mask: Any = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    omega: Any = None,
    log_weight: Any = None,
    features: str = "positive",
    feature_map: Callable[[Any], Any] | None = None,
) -> Problem:
    """Pose the problem of arrays in memory."""
    checks.choice("features", features, ("positive", "hyperbolic"))
    if feature_map is not None:
        checks.function("feature_map", feature_map)
    kind = "scores"
    if omega is not None or feature_map is not None:
        kind = "frequencies" if feature_map is None else "map"
        refuse("omega", omega if kind == "map" else None, kind)
        of_scores = {"bias": bias, "window": window, "softcap": softcap, "sinks": sinks}
        for name, x in of_scores.items():
            refuse(name, x, kind)
    else:
        refuse("log_weight", log_weight, kind)
    numbers = {name: widen(name, x) for name, x in (("q", q), ("k", k), ("v", v))}
    if bias is not None:
        numbers["bias"] = widen("bias", bias)
    if mask is not None:
        checks.is_array("mask", mask)
        numbers["mask"] = mask = to_host(mask, None)
    q, k, v = (numbers[name] for name in "qkv")
    qkv.check(q, k, v, bias=numbers.get("bias"), mask=mask, causal=causal)
    if sinks is not None:
        numbers["sinks"] = qkv.of_heads("sinks", widen("sinks", sinks), q, k, v)
    for name in {"bias", "sinks"} & set(numbers):
        if np.any(np.isnan(numbers[name]) | (numbers[name] == np.inf)):
            raise ValueError(f"`{name}` must be finite or -inf, got NaN or inf.")
    n, m = q.shape[-2], k.shape[-2]
    if kind == "frequencies":
        numbers |= read_frequencies(omega, log_weight, features, q)
    check_mask_of_keys(() if mask is None else mask.shape, kind)
    window = qkv.window(window)
    band = Band.of(m - n, causal, window)
    lead = grouped_lead(q, k, v)

    @lru_cache(maxsize=_READ_HEADS)  # every block of queries reads its head
    def read(index: Index) -> Mapping[str, Any]:
        return hide_unseen({x: take_head(y, index, lead) for x, y in numbers.items()}, band)

    return Problem(
        lead,
        (n, m, v.shape[-1]),
        read,
        qkv.scale_or_default(scale, q.shape[-1]),
        causal,
        window,
        checks.real("softcap", softcap, positive=True, optional=True),
        feature_map,
        kind,
        has_sinks=sinks is not None,
        key_heads=count_key_heads(k.shape, v.shape, lead),
    )


def count_key_heads(k: tuple[int, ...], v: tuple[int, ...], lead: tuple[int, ...]) -> int | None:
    """Count the heads of keys if query heads share them in groups."""
    heads = max(x[-3] if len(x) > 2 else 1 for x in (k, v))
    return heads if lead and 1 < heads < lead[-1] else None


def refuse(name: str, x: Any, kind: str) -> None:
    if x is not None:
        raise ValueError(
            f"`{name}` must not be given for {CALLED.get(kind, kind)}, got {checks.describe(x)}."
        )


def check_mask_of_keys(shape: tuple[int, ...], kind: str) -> None:
    """Check that a mask is the same for all queries, where weights are not of scores."""
    if kind != "scores" and (1, 1, *shape)[-2] != 1:
        raise ValueError(
            f"`mask` must have shape (..., 1, m) or (m,) for {CALLED[kind]}, got {shape}."
        )


def take_head(x: Any, index: Index, lead: tuple[int, ...]) -> Any:
    """Take the part of an array for a head: axes broadcast, and heads share keys in groups."""
    return x[_place(index, lead, x.shape[: max(0, x.ndim - 2)])]


def _place(index: Index, lead: tuple[int, ...], part: tuple[int, ...]) -> Index:
    """Return where a head reads in an array with these leading axes."""
    at = zip(index[len(index) - len(part) :], lead[len(lead) - len(part) :], part, strict=True)
    return tuple(i * length // whole for i, whole, length in at)


def sweep(
    problem: Problem,
    dtype: str,
    profile: Profile,
    use: Callable[[Index, slice, RowErrors], Callable[[], None] | None],
    changes: Mapping[str, Any] = MappingProxyType({}),
    exact: ExactRows = MappingProxyType({}),
) -> None:
    """Analyse all blocks of queries, on the threads that BLAS may use, and use what is found.

    What `use` returns is called in the order of the blocks: sums over blocks belong there.
    """
    roundings, problem, sums = profile.roundings(dtype), problem.read_by(profile), Sequencer()

    def work(item: tuple[int, tuple[Index, slice]]) -> None:
        place, (index, i) = item
        with np.errstate(all="ignore"):  # small weights underflow, and bounds are infinite
            known = exact.get((index, i.start, i.stop))  # or None
            rest = use(index, i, problem.analyse(index, roundings, i, changes, known))
            sums.add(place, rest or (lambda: None))

    most = math.prod(problem.lead) + problem.shape[0]
    for_each(lambda: work, problem.list_in_turn(), most=most)


def check_holds(problem: Problem, types: Mapping[str, str]) -> None:
    """Check that arrays, queries, keys and values, are numbers of their types."""
    for index in np.ndindex(problem.lead):
        x = problem.read(index)
        for name, dtype in types.items():
            check_all_hold(name, x[name], index, dtype)
