"""Measure the error and time of estimators against exact softmax attention.

`measure` returns what `refattn compare` prints.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..arrays import checks, qkv
from ..arrays.heads import grouped_lead
from ..arrays.library import Floats, to_host
from ..arrays.shown import held
from ..arrays.tables import Column, Table, digits, two_digits, write_head
from ..arrays.threads import Interrupted
from ..arrays.words import close, with_known_keywords
from ..attention import softmax_attention
from ..files.tolerated import tolerated
from ..registry import DEFAULT, ESTIMATORS, Estimator

REFUSALS = (ValueError, MemoryError, OverflowError)  # what an estimator may not take S with

QUADRATIC_PAIRS = 2**19  # of query and key, for estimators that take n m S
QUADRATIC_QUERIES = 32  # of a head, at least
SLOW = 100  # times the multiply-adds of exact attention: more are left out unless named


_CUT_SHORT = "the comparison was interrupted"
_Cases = list[tuple[Estimator, int | None]]


class Row(NamedTuple):
    """Errors of one method, relative to exact attention in float64."""

    estimator: str
    samples: int | None  # S
    errors: Floats  # (draws, ...), one for each draw and head
    seconds: float | None  # for one evaluation of all heads, in proportion if of some queries
    queries: int | None = None  # of each head, evenly spaced; None for all

    @property
    def per_head(self) -> Floats:
        """Mean over the draws, shape (...)."""
        return np.asarray(np.mean(self.errors, axis=0))

    @property
    def standard_error(self) -> float:
        """Standard error of the mean over draws and heads; nan for one draw.

        Heads may share what is drawn: only draws are independent.
        """
        draws = len(self.errors)
        if draws < 2:
            return math.nan
        with np.errstate(invalid="ignore", over="ignore"):  # of errors that are not finite
            means = self.errors.reshape(draws, -1).mean(axis=-1)
            return float(np.std(means, ddof=1) / math.sqrt(draws))

    @property
    def worst_head(self) -> tuple[int, ...]:
        """Index of the head with the largest error; () if there are no leading axes."""
        return tuple(map(int, np.unravel_index(np.argmax(self.per_head), self.per_head.shape)))


class Skipped(NamedTuple):
    """An estimator that does not support this S, or these options."""

    estimator: str
    samples: int | None
    reason: str
    limit: str = ""  # on S, in few words, where that is the reason

    @property
    def label(self) -> str:
        """The estimator, and S if it has one."""
        return self.estimator + ("" if self.samples is None else f" with S = {self.samples}")


def listed(skipped: Iterable[Skipped]) -> str:
    """List all that was skipped in one line.

    >>> listed([Skipped("a", 9, "", "at most 8"), Skipped("b", 9, "", "at most 8")])
    'S = 9 of a, b (at most 8)'
    """
    sizes: dict[tuple[str, str], list[str]] = {}
    for x in skipped:
        words = x.limit or x.reason.removeprefix(f"{x.estimator} ")
        words = re.sub(r",? got [^,]*$", "", words).rstrip(".")
        sizes.setdefault((x.estimator, words), []).extend([f"{x.samples}"] * bool(x.samples))
    alike: dict[tuple[str, str], list[str]] = {}
    for (name, words), tried in sizes.items():
        which = f"S = {', '.join(tried)} of " if tried else ""
        alike.setdefault((which, words), []).append(name)
    return "; ".join(f"{which}{', '.join(x)} ({words})" for (which, words), x in alike.items())


@held()
class Comparison(NamedTuple):
    """Result of `measure`.

    Attributes
    ----------
    rows : list of Row
        Exact attention in the dtype of the arrays, the mean of the values, then each estimator at
        each S.
    skipped : list of Skipped
        What could not be measured, and why.
    scale, causal, seed, draws
        The arguments of `measure`; `scale` is the number that was used.
    """

    rows: list[Row]
    skipped: list[Skipped]
    scale: float
    causal: bool
    seed: int
    draws: int

    @property
    def conclusion(self) -> str:
        """What the table means: which estimators beat the mean of the values, by 2 standard errors.

        >>> import refattn
        >>> sample = refattn.load_sample()
        >>> refattn.compare.measure(*sample, estimators=["rfa"], sizes=[8]).conclusion
        'On these tensors no estimator beats the mean of v.'
        """
        limit, *errors = (float(np.mean(row.per_head)) for row in self.rows[1:])
        sizes: dict[str, list[tuple[int, bool]]] = {}
        close = []
        for row, error in zip(self.rows[2:], errors, strict=True):
            beats = error + 2 * float(np.nan_to_num(row.standard_error)) < limit
            sizes.setdefault(row.estimator, []).append((row.samples or 0, beats))
            if error < limit and not beats:
                close.append(row.estimator + f" at S = {row.samples}" * (row.samples is not None))
        better = {x: [s for s, beats in tried if beats] for x, tried in sizes.items()}
        best = [
            name + ("" if len(least) == len(sizes[name]) else f" from S = {min(least)}")
            for name, least in better.items()
            if least
        ]
        names = " and ".join(filter(None, [", ".join(best[:-1]), *best[-1:]])) or "no estimator"
        only = "only " * (0 < len(best) < len(sizes))
        verb = "is" if len(close) == 1 else "are"
        tied = f" {', '.join(close)} {verb} within two standard errors of it." if close else ""
        return f"On these tensors {only}{names} beat{'s' * (len(best) < 2)} the mean of v.{tied}"

    def tables(self) -> tuple[Table, Table]:
        """Return a table of errors and times by method and S, and a table of errors by head."""
        limits, reference = tolerated(), self.rows[0].seconds
        random = {x for x, record in ESTIMATORS.items() if record.has("random")}
        rows = [
            {
                "estimator": row.estimator,
                "samples": row.samples,
                "error_mean": float(np.mean(row.per_head)),
                "standard_error": row.standard_error if row.estimator in random else 0.0,
                "error_worst": float(np.max(row.per_head)),
                "worst_head": list(row.worst_head),
                "queries": row.queries,
                "seconds": row.seconds,
                "ratio": row.seconds and reference and row.seconds / reference,
                "error_tolerated": limits.errors.get(row.estimator),
                "error_per_head": row.per_head.tolist(),
                "error_per_draw": row.errors.tolist(),
            }
            for row in self.rows
        ]
        columns = (
            *(Column("estimator"), Column("samples"), Column("head", None)),
            Column("error_mean", digits),
            Column("standard_error", two_digits, "over draws"),
            Column("error_worst", digits, drop=2),
            Column("worst_head", write_head, drop=1),
            Column("queries", None),
            Column("seconds", two_digits, drop=3),
            Column("ratio", digits, "seconds divided by those of exact"),
            Column("error_tolerated", digits, limits.words, drop=4),
        )
        names = ("estimator", "samples", "head", "error_mean")
        of_heads = [
            dict(zip(names, (x.estimator, x.samples, list(i), float(error)), strict=True))
            for x in self.rows
            for i, error in np.ndenumerate(x.per_head)
        ]
        heads = [Column("head", write_head), *(Column(x) for x in names if x != "head")]
        return Table("results", rows, columns, keys=2), Table("", of_heads, heads)


class Inputs(NamedTuple):
    """Queries, keys and values, and exact attention over them in float64."""

    q: Floats
    k: Floats
    v: Floats
    scale: float
    causal: bool
    seed: int
    exact: Floats
    size: Floats  # its norm in each head
    taken: Floats | None = None  # which queries of a longer sequence these are; None for all

    def error(self, estimate: Floats) -> Floats:
        """Return the relative error of each head."""
        difference = np.linalg.norm(estimate - self.exact, axis=(-2, -1))
        return np.asarray(difference / self.size)

    def row_of_exact(self, draws: int) -> Row:
        """Measure exact attention in the dtype of the arrays."""
        plain = partial(
            softmax_attention, self.q, self.k, self.v, scale=self.scale, causal=self.causal
        )
        return self._time("exact", None, lambda draw: plain(), draws, warm=False)

    def row(self, record: Estimator, samples: int | None, draws: int, *, warm: bool) -> Row:
        """Measure an estimator; unless `warm`, it is first evaluated once without being timed.

        If the estimator does not support this S, its exception is raised, such as ValueError.
        """
        evaluate = partial(_evaluate_draw, self, record, samples)
        return self._time(record.name, samples, evaluate, draws, warm=warm)

    def _time(
        self,
        name: str,
        samples: int | None,
        evaluate: Callable[[int], Floats],
        draws: int,
        *,
        warm: bool,
    ) -> Row:
        """Return errors of the draws and the median time; if not `warm` one more comes first."""
        if not warm:
            evaluate(0)
        errors, seconds = [], []
        for draw in range(draws):
            start = time.perf_counter()
            estimate = evaluate(draw)
            seconds.append(time.perf_counter() - start)
            errors.append(self.error(estimate))
        return Row(name, samples, np.stack(errors), float(np.median(seconds)))


def pose(
    q: Floats,
    k: Floats,
    v: Floats,
    *,
    scale: float | None = None,
    causal: bool = False,
    seed: int = 0,
) -> Inputs:
    """Check queries, keys and values, and evaluate exact attention, which errors are relative to.

    It must be finite, and not 0 in any head.

    >>> import refattn
    >>> from refattn.compare import measured
    >>> inputs = measured.pose(*refattn.load_sample())
    >>> inputs.row(refattn.registry.ESTIMATORS["ra"], 32, 2, warm=False).errors.shape
    (2, 2, 4)
    """
    qkv.check(q, k, v, causal=causal)
    q, k, v = (to_host(x, None) for x in (q, k, v))
    scale = qkv.scale_or_default(scale, q.shape[-1], positive=True)
    checks.non_negative_integer("seed", seed)
    wide = (x.astype(np.float64) for x in (q, k, v))
    return Inputs(q, k, v, scale, causal, seed, *exact_and_size(*wide, scale=scale, causal=causal))


def on_some(inputs: Inputs, queries: int) -> Inputs:
    """Take some queries of each head, evenly spaced from the first to the last.

    Estimators give the same for them if a query's result does not depend on others. Exact
    attention must not be 0 for all of them in any head.

    >>> import refattn
    >>> from refattn.compare import measured
    >>> measured.on_some(measured.pose(*refattn.load_sample()), 32).q.shape
    (2, 4, 32, 32)
    """
    taken = places(inputs.q.shape[-2], queries)
    exact = inputs.exact[..., taken, :]
    size = _norm_heads(exact)
    return inputs._replace(q=inputs.q[..., taken, :], exact=exact, size=size, taken=taken)


def places(count: int, most: int) -> npt.NDArray[np.intp]:
    """Take at most so many of the numbers below `count`, evenly spaced from first to last."""
    return np.linspace(0, count - 1, min(count, most)).round().astype(np.intp)


def few_queries(q: Floats, k: Floats) -> int | None:
    """Choose how many queries of each head to take for what takes n m S; None for all, if few."""
    heads = math.prod(grouped_lead(q, k, k))
    most = max(QUADRATIC_QUERIES, QUADRATIC_PAIRS // max(1, heads * k.shape[-2]))
    return most if most < q.shape[-2] else None


def names() -> list[str]:
    """List the estimators that approximate softmax attention, in the order of the registry."""
    return [x.name for name, x in ESTIMATORS.items() if x.approximates and x.name == name]


@with_known_keywords
def measure(
    q: Floats,
    k: Floats,
    v: Floats,
    *,
    estimators: Iterable[str] = DEFAULT,
    sizes: Sequence[int] = (8, 32, 128, 512),
    draws: int = 3,
    seed: int = 0,
    scale: float | None = None,
    causal: bool = False,
    queries: int | None = None,
    slowest: int | None = None,
    track: Callable[[Sequence[Any]], Iterable[Any]] = iter,
) -> Comparison:
    r"""Measure the error of estimators relative to exact attention, and their time.

    .. math:: |\mathrm{estimate} - \mathrm{exact}|_F \,/\, |\mathrm{exact}|_F

    for each head and draw, where exact attention is evaluated in float64.

    Parameters
    ----------
    q, k, v : arrays, shapes (..., n, d), (..., m, d) and (..., m, d_v)
        Queries, keys and values, all float32 or all float64. They are measured on the host, by
        NumPy, whatever their library.
    estimators : iterable of str
        Names of estimators, see `names`.
    sizes : sequence of int
        Numbers S of features, samples, ...; an estimator that has no size is measured once.
    draws : int
        Independent draws of random numbers.
    seed : int
        Draw i at S has the seed ``SeedSequence(seed, spawn_key=(S, i))``, for every estimator.
    scale : float, optional
        Factor on q . k, 1 / sqrt(d) by default.
    causal : bool, default False
        Query i sees key j only if j <= i + m - n.
    queries : int, optional
        Estimators whose time grows with n m S, and whose queries are independent of each other, are
        measured on this many queries of each head, evenly spaced; on all by default.
    slowest : int, optional
        Skip estimators at S above this, if they take S times the multiply-adds of exact attention.
    track : callable
        Wraps the sequence of measurements, for example to show progress.

    Returns
    -------
    Comparison
        Errors and times, and what was skipped.

    Raises
    ------
    TypeError, ValueError
        If an argument is unusable, if a name is unknown, if exact attention is not finite or is 0
        in some head, or if no estimator supports the arguments.
    KeyboardInterrupt
        If it is interrupted; its attribute `found` is the comparison until then.

    Examples
    --------
    >>> import refattn
    >>> from refattn import compare
    >>> found = compare.measure(
    ...     *refattn.load_sample(), estimators=["rfa-iid", "ra"], sizes=[8, 32], draws=1
    ... )
    >>> [(row.estimator, row.samples) for row in found.rows[2:]]
    [('rfa-iid', 8), ('rfa-iid', 32), ('ra', 8), ('ra', 32)]
    >>> found.rows[0].per_head.shape
    (2, 4)
    """
    checks.positive_integer("draws", draws)
    sizes = checks.positive_integers("sizes", sizes)
    if queries is not None:
        checks.positive_integer("queries", queries)
    chosen = [record_of(name) for name in checks.list_names("estimators", estimators)]
    qkv.check(q, k, v, causal=causal)
    _check_some(q, k, v)
    cases: _Cases = [(x, s) for x in chosen for s in (sizes if x.size else [None])]
    slow = [(x, s) for x, s in cases if slowest and x.has("quadratic") and (s or 0) > slowest]
    words = f"over {slowest} times the multiply-adds of exact attention"
    skipped = [Skipped(x.name, s, words, words) for x, s in slow]
    cases = [x for x in cases if x not in slow]
    inputs = pose(q, k, v, scale=scale, causal=causal, seed=seed)
    few = on_some(inputs, queries) if queries is not None and queries < q.shape[-2] else None
    wide, zero = (x.astype(np.float64) for x in (inputs.k, inputs.v)), np.zeros(inputs.q.shape)
    uniform = softmax_attention(zero, *wide, scale=inputs.scale, causal=causal)
    mean_of_v = Row("mean of v", None, inputs.error(uniform)[None], None)
    rows = [inputs.row_of_exact(draws), mean_of_v]
    warm = set()

    def result() -> Comparison:
        return Comparison(rows, skipped, inputs.scale, causal, seed, draws)

    try:
        for record, samples in track(cases):
            apart = not causal or record.takes("causal", "mask")  # which is what some queries see
            posed = few if few is not None and on_part(record) and apart else inputs
            try:
                row = posed.row(record, samples, draws, warm=record.name in warm)
            except REFUSALS as refusal:
                skipped.append(_skipped(inputs, record, samples, str(refusal)))
            else:
                if posed is not inputs and row.seconds is not None:
                    share = q.shape[-2] / posed.q.shape[-2]
                    row = row._replace(seconds=share * row.seconds, queries=posed.q.shape[-2])
                rows.append(row)
                warm.add(record.name)
    except KeyboardInterrupt:
        known = {x[:2] for x in (*rows, *skipped)}
        left = [(x.name, s) for x, s in cases if (x.name, s) not in known]
        skipped += [Skipped(*x, _CUT_SHORT, _CUT_SHORT) for x in left]
        raise Interrupted(result()) from None
    if len(rows) == 2 and skipped:
        raise ValueError(f"{skipped[0].label}: {skipped[0].reason}")
    return result()


def _norm_heads(exact: Floats) -> Floats:
    size = np.linalg.norm(exact, axis=(-2, -1))
    if not (size.size and np.all(np.isfinite(size) & (size > 0))):
        raise ValueError(
            "exact attention must be finite and not all zero in each head: errors are divided by "
            f"its norm. Got norms {size.tolist()}."
        )
    return np.asarray(size)


def _check_some(q: Floats, k: Floats, v: Floats) -> None:
    """Check that there are heads and tokens."""
    for name, x in zip("qkv", (q, k, v), strict=True):
        if 0 in x.shape[:-1]:
            raise ValueError(
                f"`{name}` must have at least one head and one row, got shape {x.shape}."
            )


def exact_and_size(q: Floats, k: Floats, v: Floats, **settings: Any) -> tuple[Floats, Floats]:
    """Compute exact attention and its norm in each head, which errors are relative to."""
    _check_some(q, k, v)
    exact = np.asarray(softmax_attention(q, k, v, **settings))
    return exact, _norm_heads(exact)


def record_of(name: str) -> Estimator:
    """Find an estimator that stands for softmax attention."""
    if name not in ESTIMATORS or not ESTIMATORS[name].approximates:
        known = [x for x, record in ESTIMATORS.items() if record.approximates]
        raise ValueError(
            f"`estimators` must be one of {', '.join(names())}, got {name!r}.{close(name, known)}"
        )
    return ESTIMATORS[name]


def on_part(record: Estimator) -> bool:
    """Tell whether an estimator takes too long on all queries, and gives the same on some."""
    return record.has("quadratic", "queries-apart", "unordered-keys")


def _skipped(inputs: Inputs, record: Estimator, samples: int | None, reason: str) -> Skipped:
    n, m = inputs.q.shape[-2], inputs.k.shape[-2]
    limit = ""
    if samples is not None and samples > min(n, m) and not record.has("unlimited-size"):
        limit = f"at most {n} here" if n == m else f"more than the {n} queries or {m} keys"
    return Skipped(record.name, samples, reason, limit)


def _evaluate_draw(inputs: Inputs, record: Estimator, samples: int | None, draw: int) -> Floats:
    """Evaluate an estimator; the seed depends on S and the draw, not on the estimator."""
    options: dict[str, Any] = {"scale": inputs.scale, "causal": inputs.causal}
    default = {"scale": inputs.q.shape[-1] ** -0.5, "causal": False}
    for name in default:
        if not record.takes(name) and options.pop(name) != default[name]:
            raise ValueError(f"{record.name} does not take `{name}`.")
    sized = {} if samples is None else record.sized(samples)
    if inputs.causal and inputs.taken is not None:
        n, m = int(inputs.taken[-1]) + 1, inputs.k.shape[-2]  # the last is always there
        del options["causal"]
        options["mask"] = np.tri(n, m, m - n, dtype=bool)[inputs.taken]
    if record.has("random"):
        seed = np.random.SeedSequence(inputs.seed, spawn_key=(samples or 0, draw))
        sized["rng"] = np.random.default_rng(seed)
    return np.asarray(record.fn(inputs.q, inputs.k, inputs.v, **sized, **options))
