r"""Tolerances for tests of kernels: the smallest useful ones, and the bugs that they accept.

`tolerance` returns what `refattn tolerance` prints. A tolerance is a pair of numbers,

.. math:: |\mathrm{got} - \mathrm{exact}| \le \mathrm{atol} + \mathrm{rtol} \, |\mathrm{exact}|

for all elements. `judge.rounding` predicts the standard deviation of each error of a correct
kernel. An error exceeds t standard deviations with probability at most :math:`2 e^{-t^2 / 2}`. The
probability that some error exceeds its tolerance is at most the sum of these probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...arrays import checks
from ...arrays.library import Doubles
from ...arrays.shown import held
from ...arrays.tables import Column, Table, digits, write_head
from ...arrays.words import portable, with_known_keywords
from ..rounding.formats import FORMATS, Format, dtype_of
from ..rounding.hardware import IEEE
from ..rounding.head import scan_tiles
from ..rounding.problems import Index, Problem, pose_arrays, sweep
from ..rounding.profiles import PROFILES, Profile, check_hardware, profile_of
from ..rounding.roundings import RowErrors
from .choice import fused_profile, usual_profiles
from .findings import Numbers
from .judging import judge
from .units import name_on_hardware

LEVEL = 1e-6  # probability that a correct kernel exceeds the tolerance
_HEADS, _QUERIES = 8, 1024  # of the power table, queries of all heads together


class Allowance(NamedTuple):
    """A tolerance: |got - exact| <= atol + rtol |exact|."""

    atol: float
    rtol: float


# Of torch.testing.assert_close.
USUAL: Mapping[str, Allowance] = {
    "float32": Allowance(1e-5, 1.3e-6),
    "float16": Allowance(1e-5, 1e-3),
    "bfloat16": Allowance(1e-5, 1.6e-2),
}


class Need(NamedTuple):
    """The smallest tolerances that a correct kernel of a profile meets.

    Attributes
    ----------
    profile : str
        Name of the profile.
    head : tuple of int or None
        Index of the head; None for all heads.
    atol, proven : float
        The smallest atol for rtol 0: met with probability 1 - 1e-6, and always.
    pair, proven_pair : Allowance
        The same with an rtol: of several multiples of the unit of rounding, the one that allows the
        smallest errors on average.
    drift : float
        Relative error of the result that truncated sums of matrix units cause; negative if the
        result is too small.
    """

    profile: str
    head: Index | None
    atol: float
    proven: float
    pair: Allowance
    proven_pair: Allowance
    drift: float = 0.0


class Defect(NamedTuple):
    """A known mistake of a certain size, in words."""

    name: str
    size: str = ""
    problem: Callable[[Problem], Problem] = lambda x: x  # that is solved in place of the right one
    # The output in place of the right one, from what is known of some queries, and its rounding.
    change: Callable[[Doubles, RowErrors, Index, slice], Doubles] = lambda x, *_: x
    round: Callable[[Format, Doubles], Doubles] = Format.round
    weights: str | None = None  # what they are rounded to in place of the type of the profile


class Power(NamedTuple):
    """How a known bug is judged by tolerances and by `refattn.verify`.

    Attributes
    ----------
    defect, size : str
        The bug and its size; the first row is a correct kernel.
    given, ours : float
        Largest error / tolerance, for the tolerance that was passed and for the smallest that a
        correct kernel meets; up to 1 passes.
    verdict, suspect : str
        The verdict of `refattn.verify`, and the cause that it names; "" if it names none.
    """

    defect: str
    size: str
    given: float
    ours: float
    verdict: str
    suspect: str


@held()
class Tolerance(NamedTuple):
    """The tolerances that a correct kernel needs, and the known bugs that they accept.

    Attributes
    ----------
    needs : list of Need
        For each profile: for all heads, then for each head.
    power : list of Power
        For a correct kernel, then for each known bug.
    dtype, profile : str
        The storage type, and the profile of the kernels with bugs.
    given, ours : Allowance
        The tolerance that was passed, and the one that a correct kernel of this profile needs.
    lead, rows : tuple of int and int
        Heads, and queries of each head, on which bugs were simulated.
    hardware : str or None
        The hardware whose matrix units truncate sums, if any.
    """

    needs: list[Need]
    power: list[Power]
    dtype: str
    profile: str
    given: Allowance
    ours: Allowance
    lead: tuple[int, ...]
    rows: int
    hardware: str | None = None

    def tables(self) -> tuple[Table, Table]:
        """Return a table of needed tolerances, and a table of known bugs."""
        pairs = (f"{x}.{y}" for x in ("pair", "proven_pair") for y in ("rtol", "atol"))
        needs = [Column("profile"), Column("head", write_head)]
        drift = [] if self.hardware is None else ["drift"]
        names = ("atol", "proven", *pairs, *drift)
        needs += [Column(x, digits, drop=int(x.startswith("proven_"))) for x in names]
        power = [
            *(Column("defect"), Column("size")),
            *(Column("given", _write_ratio, drop=2), Column("ours", _write_ratio, drop=3)),
            *(Column("verdict"), Column("suspect", drop=1)),
        ]
        tables = (("needs", self.needs, needs), ("power", self.power, power))
        first, second = (Table(x, [portable(z) for z in y], columns) for x, y, columns in tables)
        return first, second._replace(keys=2)


def _write_ratio(ratio: float) -> str:
    """Write an error over what is allowed, and what becomes of it."""
    return f"{digits(ratio)} {'passes' if ratio <= 1 else 'fails'}"


@with_known_keywords
def tolerance(
    q: Any,
    k: Any,
    v: Any,
    *,
    dtype: str | None = None,
    profile: str | None = None,
    atol: float | None = None,
    rtol: float | None = None,
    scale: float | None = None,
    bias: Any = None,
    mask: Any = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    hardware: str | None = None,
    track: Callable[[Sequence[Any]], Iterable[Any]] = iter,
) -> Tolerance:
    """Compute the tolerance that a correct kernel needs, and find the known bugs that it accepts.

    Kernels with bugs are simulated with the roundings of the profile, to nearest. On large arrays
    they are simulated on evenly spaced heads, and on the last queries of each.

    Parameters
    ----------
    q, k, v : arrays, shapes (..., n, d), (..., m, d) and (..., m, d_v)
        Queries, keys and values; they are rounded to `dtype` first.
    dtype : {"bfloat16", "float16", "float32"}, optional
        Storage type of the kernel, that of `q` by default.
    profile : str, optional
        What the kernel rounds, a name of `rounding.PROFILES`. By default all usual profiles are
        studied, and kernels with bugs round as `flash` does, or as `math` in float32.
    atol, rtol : float, optional
        The tolerance to test on known bugs. If you pass only one, the other is 0; if you pass none,
        they are those of `torch.testing.assert_close`.
    scale, bias, mask, causal, window, softcap
        As for `rounding.predict`.
    hardware : str, optional
        Hardware on which the kernel runs, as in `verify`. The loss from its truncated sums is added
        to the needed tolerance.
    track : callable
        Wraps the sequence of kernels to simulate, for example to draw a progress bar.

    Returns
    -------
    Tolerance
        The needed tolerances, and how each known bug is judged.

    Raises
    ------
    TypeError, ValueError
        If an argument is unusable.

    Examples
    --------
    >>> import refattn
    >>> q, k, v = (x[0, :1, :32] for x in refattn.load_sample())
    >>> found = refattn.judge.tolerance(q, k, v, dtype="bfloat16", profile="flash")
    >>> f"atol {found.needs[0].atol:.1g}"
    'atol 0.005'
    >>> row = next(x for x in found.power if x[:2] == ("output times", "1.003"))
    >>> row.ours < 1, row.verdict  # passes at the needed tolerance, but not `verify`
    (True, 'FAIL')
    """
    problem = pose_arrays(
        q, k, v, scale=scale, bias=bias, mask=mask, causal=causal, window=window, softcap=softcap
    )
    dtype = dtype_of(q) if dtype is None else dtype
    return find_tolerance(
        problem, dtype, profile=profile, hardware=hardware, atol=atol, rtol=rtol, track=track
    )


def find_tolerance(
    problem: Problem,
    dtype: str,
    *,
    profile: str | None = None,
    hardware: str | None = None,
    atol: float | None = None,
    rtol: float | None = None,
    bugs: bool = True,
    track: Callable[[Sequence[Any]], Iterable[Any]] = iter,
) -> Tolerance:
    """Do for a problem as `tolerance` for arrays; without `bugs` simulate a correct kernel only."""
    checks.choice("dtype", dtype, USUAL)
    checks.choice("profile", (profile or "flash").partition("@")[0], PROFILES)
    check_hardware("hardware", hardware)
    if 0 in (*problem.lead, *problem.shape):
        sizes = ", ".join(map(str, problem.shape))
        raise ValueError(
            f"`q`, `k` and `v` must not be empty, got leading axes {problem.lead} and "
            f"n, m, d_v = {sizes}."
        )
    given = _check_allowance(dtype, atol, rtol)
    problem = problem.rounded(FORMATS[dtype])
    for index in np.ndindex(problem.lead):
        for name, x in problem.read(index).items():
            if name in "qkv" and not np.all(np.isfinite(x)):
                raise ValueError(f"`{name}` must be finite in {dtype}, got NaN or infinity.")
    usual = usual_profiles(dtype) if profile is None else [profile]
    fused = profile or fused_profile(dtype)
    *names, simulated = (name_on_hardware(x, dtype, hardware) for x in (*usual, fused))
    part, rows = _choose_part(problem)
    defects = list(catalogue(part))[: None if bugs else 1]  # the first is none
    needs: list[Need] = []
    power: list[Power] = []
    ours = Allowance(math.nan, math.nan)
    for item in track([*names, *defects]):
        if isinstance(item, str):
            needs += measure_needs(problem, dtype, item)
        else:
            if not power:  # all profiles were measured: this is the first defect
                ours = next(x.pair for x in needs if x.head is None and x.profile == simulated)
            power.append(_try_defect(part, item, dtype, simulated, names, given, ours))
    return Tolerance(needs, power, dtype, simulated, given, ours, part.lead, rows, hardware)


def _check_allowance(dtype: str, atol: float | None, rtol: float | None) -> Allowance:
    if atol is None and rtol is None:
        return USUAL[dtype]
    limits = []
    for name, x in (("atol", atol), ("rtol", rtol)):
        value = float(checks.real(name, 0.0 if x is None else x))
        if value < 0:
            raise ValueError(f"`{name}` must be at least 0, got {value}.")
        limits.append(value)
    return Allowance(*limits)


class _ElementErrors(NamedTuple):
    """What is known of the errors of some elements: they are sub-Gaussian beyond `off`."""

    size: Doubles  # of the exact result
    off: Doubles
    std: Doubles
    bound: Doubles
    shift: Doubles  # away from 0

    def less(self, rtol: float) -> _ElementErrors:
        """Take a relative tolerance off."""
        share = rtol * self.size
        return self._replace(off=self.off - share, bound=self.bound - share)

    def limits(self, level: float) -> Doubles:
        """Return what each error exceeds with its share of a probability at most."""
        # 2 e^(-t^2 / 2) = level / (number of elements): all have the same share.
        t = math.sqrt(2 * math.log(2 * max(self.off.size, 1) / level))
        return np.minimum(self.bound, self.off + t * self.std)


def measure_needs(problem: Problem, dtype: str, name: str) -> Iterator[Need]:
    """Find what a profile needs, for all heads and for each."""
    shape = (*problem.lead, problem.shape[0], problem.shape[2])
    elements = _ElementErrors(*(np.empty(shape) for _ in _ElementErrors._fields))

    def add(index: Index, i: slice, rows: RowErrors) -> None:
        at: Any = (*index, i)
        elements.size[at], elements.shift[at] = np.abs(rows.out), rows.shift * np.sign(rows.out)
        elements.off[at] = np.abs(rows.nearest - rows.out) + rows.slack
        elements.std[at], elements.bound[at] = rows.worst, rows.bound

    sweep(problem, dtype, profile_of(name), add)
    unit = FORMATS[dtype].unit
    yield _need_of(name, None, _ElementErrors(*(x.ravel() for x in elements)), unit)
    for head in np.ndindex(problem.lead) if math.prod(problem.lead) > 1 else ():
        yield _need_of(name, head, _ElementErrors(*(x[head].ravel() for x in elements)), unit)


def _need_of(name: str, head: Index | None, elements: _ElementErrors, unit: float) -> Need:
    # A larger rtol needs a smaller atol: of three, the one that allows least for a mean element.
    mean = float(np.mean(elements.size))
    of = {x * unit: elements.less(x * unit) for x in (1.0, 2.0, 4.0)}
    cost = {x: _largest_or_zero(y.limits(LEVEL)) + x * mean for x, y in of.items()}
    sure = {x: _largest_or_zero(y.bound) + x * mean for x, y in of.items()}
    rtol, proven = min(cost, key=cost.__getitem__), min(sure, key=sure.__getitem__)
    return Need(
        name,
        head,
        _smallest_atol(elements),
        _largest_or_zero(elements.bound),
        Allowance(_smallest_atol(of[rtol]), rtol),
        Allowance(_largest_or_zero(of[proven].bound), proven),
        # The drift: a regression of shifts on sizes through 0.
        float(np.sum(elements.shift * elements.size) / (np.sum(elements.size**2) or 1.0)),
    )


def _largest_or_zero(x: Doubles) -> float:
    return max(float(np.max(x, initial=0.0)), 0.0)


def _smallest_atol(elements: _ElementErrors) -> float:
    """Find the smallest atol that all errors stay within, but for a probability of `LEVEL`."""
    # Equal shares waste the level on elements whose errors are small. By bisection, the atol at
    # which the probabilities of all elements add up to it; only those near it need to be summed.
    limits = elements.limits(LEVEL / 100)
    high = _largest_or_zero(limits)
    if not 0 < high < math.inf:
        return high
    low = high / 2
    near = _ElementErrors(*(x[limits > low] for x in elements))  # others exceed it with LEVEL / 100
    for _ in range(30):
        middle = (low + high) / 2
        t = np.maximum(middle - near.off, 0.0) / near.std
        tail = np.where(middle < near.bound, np.minimum(2 * np.exp(-t * t / 2), 1.0), 0.0)
        low, high = (low, middle) if np.sum(tail) <= 0.99 * LEVEL else (middle, high)
    return high


def _choose_part(problem: Problem) -> tuple[Problem, int]:
    """Take some heads, and their last queries."""
    heads = list(np.ndindex(problem.lead))
    chosen = heads if len(heads) <= _HEADS else heads[:: -(-len(heads) // _HEADS)]
    n, m, d_v = problem.shape
    rows = min(n, max(_QUERIES // len(chosen), 1))
    if rows == n and len(chosen) == len(heads):
        return problem, n

    def read(index: Index) -> Mapping[str, Any]:
        arrays = dict(problem.read(chosen[index[0]]))
        # The last query is level with the last key, so that these stay where they were.
        last = {x: arrays[x][n - rows :] for x in ("q", "mask", "bias") if x in arrays}
        return arrays | last

    return problem._replace(lead=(len(chosen),), shape=(rows, m, d_v), read=read), rows


def _add_bias(problem: Problem, bias: Callable[[Index], Any]) -> Problem:
    return problem.replaced("bias", lambda index, x: bias(index) + (0.0 if x is None else x))


def catalogue(problem: Problem) -> Iterator[Defect]:
    """List mistakes that kernels are known for, as far as the problem can show them; first none."""
    yield Defect("none")
    for by in (3e-4, 1e-3, 3e-3, 1e-2):
        scale = problem.scale * (1 + by)
        yield Defect("scale times", f"{1 + by:g}", partial(Problem._replace, scale=scale))
    for value in (1.443, 1.44):  # for e^x as 2^(x log2 e): the constant to few digits
        scale = problem.scale * (value * math.log(2))
        yield Defect("log2(e) as", f"{value}", partial(Problem._replace, scale=scale))
    yield from _list_key_defects(problem)
    yield from _list_convention_defects(problem)
    for size in (1e-4, 1e-3, 1e-2):
        yield Defect("ALiBi slope of", f"{size:g}", partial(_add_slope, size))
    for size in (1e-4, 1e-3, 1e-2):
        yield Defect(
            "added to the normaliser", f"{size:g}", change=partial(_add_to_normaliser, size)
        )
    for by in (3e-4, 1e-3, 3e-3):
        yield Defect("output times", f"{1 + by:g}", change=lambda x, *_, c=1 + by: c * x)
    tile = min(64, problem.shape[0])
    for by in (3e-3, 1e-2, 3e-2):
        words = f"{tile} queries of a head times"
        yield Defect(words, f"{1 + by:g}", change=partial(_multiply_tile, 1 + by, tile))
    text = "output truncated, not rounded"
    yield Defect(text, round=lambda to, x: to._replace(truncated=True).round(x))
    yield Defect("weights in float8_e4m3fn", weights="float8_e4m3fn")


def _list_key_defects(problem: Problem) -> Iterator[Defect]:
    n, m, _ = problem.shape
    if m < 2:
        return
    for key in sorted({0, m // 2, m - 1}):
        mask = np.ones((n, m), bool)
        mask[:, key] = False
        yield Defect("lost: key", f"{key}", partial(Problem.masked, seen=mask))
    # A bias of log 2 doubles a weight.
    twice = np.zeros((n, m))
    twice[:, m // 2] = math.log(2)
    yield Defect("counted twice: key", f"{m // 2}", partial(_add_bias, bias=lambda index: twice))
    block = 64 if m > 64 else -(-m // 2)
    yield Defect("not rescaled: blocks of keys of", f"{block}", partial(_forget_rescaling, block))


def _list_convention_defects(problem: Problem) -> Iterator[Defect]:
    n, m, _ = problem.shape
    if problem.causal:
        for by in (1, -1):
            edge = np.tri(n, m, m - n + by, dtype=bool)
            yield Defect("causal edge moved by", f"{by:+d}", partial(_move_edge, edge))
    left, right = problem.window
    if left:
        yield Defect("window ends early, by", "1", lambda x: x._replace(window=(left - 1, right)))
    if problem.softcap is None:
        for cap in (50.0, 30.0):
            yield Defect("softcap of", f"{cap:g}", partial(Problem._replace, softcap=cap))
    else:
        yield Defect("softcap left out", "", partial(Problem._replace, softcap=None))
    for name in ("mask", "bias", "sinks"):
        if name in problem.first:
            yield Defect(f"{name} left out", "", partial(Problem.without, name=name))


def _move_edge(edge: npt.NDArray[np.bool_], problem: Problem) -> Problem:
    return problem._replace(causal=False).masked(edge)


def _add_slope(slope: float, problem: Problem) -> Problem:
    n, m, _ = problem.shape
    ahead = slope * (np.arange(m) - np.arange(m - n, m)[:, None])
    return _add_bias(problem, lambda index: ahead)


def _forget_rescaling(block: int, problem: Problem) -> Problem:
    """Leave what was summed before the maximum grew as it was."""

    def bias(index: Index) -> Any:
        head = problem.head(index)
        n, m = head.q.shape[0], head.keys
        shift, top = np.zeros((n, m)), np.full((n, 1), -math.inf)
        for tile in scan_tiles(head, slice(0, n), block):
            if tile.is_sink:
                continue
            scores = np.broadcast_to(tile.scores, (n, tile.scores.shape[-1]))
            seen = scores if tile.visible is None else np.where(tile.visible, scores, -math.inf)
            top = np.maximum(top, np.max(seen, -1, keepdims=True))
            # Weights over the maximum of their time, as a bias.
            shift[:, tile.keys] = np.where(np.isfinite(top), -top, 0.0)
        return shift

    return _add_bias(problem, bias)


def _add_to_normaliser(
    size: float, out: Doubles, rows: RowErrors, index: Index, i: slice
) -> Doubles:
    """Add something to the sum of the weights, of which the largest is 1."""
    with np.errstate(all="ignore"):
        share = np.nan_to_num(np.exp(rows.top - rows.lse))[:, None]
    return np.asarray(out / (1 + size * share))


def _multiply_tile(
    by: float, size: int, out: Doubles, rows: RowErrors, index: Index, i: slice
) -> Doubles:
    """Multiply the output of the first queries of the first head."""
    inside = (np.arange(i.start, i.stop) < size) & (not any(index))
    return np.where(inside[:, None], by * out, out)


def _try_defect(
    problem: Problem,
    defect: Defect,
    dtype: str,
    simulated: str,
    profiles: Sequence[str],
    given: Allowance,
    ours: Allowance,
) -> Power:
    """Try the output of a kernel with a defect."""
    exact, got = _simulate(problem, defect, dtype, profile_of(simulated))
    numbers = Numbers(got.__getitem__, dtype)
    # Simulated sums are rounded: units that truncate need not be tried.
    verdict = judge(problem, numbers, dtype, profiles, LEVEL, hardware=IEEE)
    suspect = verdict.suspects[0].text if verdict.suspects and verdict.verdict == "FAIL" else ""
    return Power(
        defect.name,
        defect.size,
        _largest_excess(got, exact, given),
        _largest_excess(got, exact, ours),
        verdict.verdict,
        suspect,
    )


def _simulate(
    problem: Problem, defect: Defect, dtype: str, profile: Profile
) -> tuple[Doubles, Doubles]:
    """Simulate a kernel with a defect that rounds to nearest; return the exact result too."""
    shape = (*problem.lead, problem.shape[0], problem.shape[2])
    exact, got = np.empty(shape), np.empty(shape)
    to = FORMATS[dtype if profile.out in (None, "storage") else str(profile.out)]
    changed = profile._replace(out=None, weights=defect.weights or profile.weights)

    def write(index: Index, i: slice, rows: RowErrors) -> None:
        at: Any = (*index, i)
        got[at] = defect.round(to, defect.change(rows.nearest, rows, index, i))

    def keep(index: Index, i: slice, rows: RowErrors) -> None:
        at: Any = (*index, i)
        exact[at] = rows.out

    # The reference is of the inputs as they are given, whatever a profile rounds them to first.
    sweep(problem, dtype, profile._replace(inputs=None), keep)
    sweep(defect.problem(problem), dtype, changed, write)
    return exact, got


def _largest_excess(got: Doubles, exact: Doubles, pair: Allowance) -> float:
    """Return the largest error over what is allowed."""
    error, allowed = np.abs(got - exact), pair.atol + pair.rtol * np.abs(exact)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(error == 0, 0.0, error / allowed)
    return float(np.max(np.where(np.isnan(ratio), math.inf, ratio), initial=0.0))
