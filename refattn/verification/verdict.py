r"""Verdicts on numbers: whether an output can be that of a correct kernel, to rounding.

`verify` compares what a kernel gave with what `refattn.rounding` says of a correct one. With
:math:`e` the error, :math:`\sigma` its standard deviation and :math:`D` what rounding to nearest
alone makes of the exact result, four kinds of statements are tried, each of which a correct kernel
violates with a probability that is bounded:

* no error exceeds its proven bound, whatever the roundings are;
* roundings are independent of each other: then each error is sub-Gaussian about
  :math:`\kappa D` for a :math:`\kappa \in [0, 1]`, which is 0 where noise before a rounding hides
  what it does to the exact number, and :math:`P(|e - \kappa D| > t \sigma) \le 2 e^{-t^2/2}`;
* for the mean square of N rows, of which the columns may depend on each other in any way,
  :math:`P(\overline{z^2} > x) \le (x e^{1 - x})^{N/2}`, by Jensen and Chernoff;
* errors of rows are symmetric and independent: then a sum over the rows of any fixed combinations
  of them, over the root of the sum of their squares, exceeds t with probability at most
  :math:`e^{-t^2/2}` (Efron), whatever their variances are. With the derivative of the output to a
  defect as weights this is a test for it, and it measures its size.

Rows with the same query, or the same exact result, are rounded alike: g of them have weights 1 / g,
and count for one. By Jensen and Cauchy both statements about rows hold for that, too.

Gradients are judged in the same way. Those in keys and values have rows that are not independent
where errors of scores, or of the sum of d_out * out, move the weights of one query for all keys.
Then the statements on rows are made on heads, and sums along a direction have a known variance:
:math:`P(|T - \kappa T_D| > t \sigma) \le 2 e^{-t^2/2}`.

    Efron, Student's t-test under symmetry conditions, Journal of the American Statistical
    Association 64(328), 1969.
"""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from ..arrays import checks
from ..arrays.library import Doubles
from ..arrays.shown import held
from ..arrays.words import portable
from ..features import elu_features
from ..files.tensors import Tensors
from ..rounding import problems
from ..rounding import profiles as rounding_profiles
from ..rounding.formats import FORMATS
from ..rounding.problems import Problem
from ..rounding.profiles import PROFILES, Profile
from ..rounding.roundings import WORST, Roundings, RowErrors
from ..typing import Features
from . import given as verification_given
from .trial import Finding, Numbers, Suspect, Trial, Z, attempt, place, row_weights

__all__ = ["Finding", "Numbers", "Suspect", "Verdict", "judge", "verify"]


def __dir__() -> list[str]:
    return __all__


_NARROW = ("math", "flash", "upcast", "flash-fast", "eager", "eager-narrow")  # from the tightest
_ALL_BUT = 0.95  # share of the mean square that a defect explains where there is no other
_MUCH = 0.5  # share below which the best of the suspects is no diagnosis
_FEW = 4  # blocks of queries that are looked at before all
_LIKE_THE_NEXT = "upcast"  # neither is the tighter one: that whose rms is nearer to 1 is named
_WIDE = ("math", "serial", "tf32")
_DOUBLE = ("math64", "serial64")
_BACKWARD: Mapping[bool, Sequence[str]] = {  # whether the type is narrow
    True: (
        "math",
        "flash",
        "upcast",
        "flash-fast",
        "flash-256",
        "flash-64",
        "flash-32",
        "eager",
        "eager-narrow",
    ),
    False: ("math", "recomputed", "serial"),
}


@held("verdict", "profile", "dtype", "shape", "alpha")
class Verdict(NamedTuple):
    """Whether numbers can be those of a correct kernel.

    Attributes
    ----------
    verdict : str
        ``"PASS"``; ``"FAIL"``, no profile that was tried explains the numbers; or
        ``"UNDERPOWERED"``, an output that is 1 % too large would not have been rejected.
    profile : str or None
        The tightest profile that explains the numbers.
    z : Z
        Errors over their standard deviations, by that profile or, of those rejected, by the one
        with which a known defect explains all, or else by the nearest: root mean square, largest,
        and where that is.
    tests : list of Finding
        What was tried, by that profile.
    suspects : list of Suspect
        Known defects that the numbers show, those that explain most first.
    remarks : list of str
        What else is to be seen.
    dtype, out_dtype : str
        The storage type, and that of the output.
    shape : tuple of int
        Of the output.
    known : float
        Share of the elements whose error has a law; for others there is the bound.
    detectable : dict
        Sizes of defects that would have been rejected.
    alpha : float
        At most this is the probability that a correct kernel fails.
    trials : dict of str to float
        Smallest corrected p-value of each profile that was tried.
    seconds : float
        Time taken.
    by : str
        Name of the profile that `z` and `tests` are by.
    of : str
        What all of this is said of: `out` or, where gradients are judged, the first of `parts` that
        failed or, if none did, that lacks power.
    parts : dict of str to Verdict
        Where gradients are judged, the verdicts on `out`, `dq`, `dk` and `dv`, each at its share of
        alpha.
    """

    verdict: str
    profile: str | None
    z: Z
    tests: list[Finding]
    suspects: list[Suspect]
    remarks: list[str]
    dtype: str
    out_dtype: str
    shape: tuple[int, ...]
    known: float
    detectable: dict[str, float]
    alpha: float
    trials: dict[str, float]
    seconds: float
    by: str = ""
    of: str = "out"
    parts: Mapping[str, Verdict] = MappingProxyType({})

    def to_json(self) -> str:
        """The verdict as JSON."""
        found = self._asdict()
        found["z"] = self.z._asdict()
        found["tests"], found["suspects"] = (
            [x._asdict() for x in items] for items in (self.tests, self.suspects)
        )
        found["parts"] = {name: json.loads(x.to_json()) for name, x in self.parts.items()}
        return json.dumps(portable(found), indent=1) + "\n"

    def accept(self, stacklevel: int = 2) -> None:
        """Raise an AssertionError if it is FAIL, and warn if it is UNDERPOWERED.

        A wrong kernel would have passed then, too: a test that is silent of it means little.
        """
        __tracebackhide__ = True  # pytest shows the line that calls
        if self.verdict == "FAIL":
            raise AssertionError(str(self))
        if self.verdict == "UNDERPOWERED":
            text = f"such numbers say little of a kernel: {self}"
            warnings.warn(text, UserWarning, stacklevel=stacklevel)

    def __str__(self) -> str:
        """The verdict in words."""
        if not self.parts:
            return "\n".join(_report(self))
        words = [f"{name} {x.verdict}" for name, x in self.parts.items()]
        lines = [f"{self.verdict}: {', '.join(words)}"]
        for name, part in self.parts.items():
            lines += [f"{name}: {_report(part)[0]}", *_report(part)[1:-1]]
        return "\n".join([*lines, _PROVEN])


def _report(found: Verdict) -> list[str]:
    return list(_lines(found))


def _lines(found: Verdict) -> Iterator[str]:
    one = "an output" if found.of == "out" else found.of
    types = found.dtype if found.out_dtype == found.dtype else f"{found.dtype} to {found.out_dtype}"
    said = {
        "PASS": f"a correct kernel in {types} gives such numbers (profile {found.profile})",
        "FAIL": f"no correct kernel in {types} gives such numbers (profiles tried: "
        f"{', '.join(found.trials)})",
        "UNDERPOWERED": f"{one} that is 1 % too large would not have been rejected",
    }
    yield f"{found.verdict}: {said[found.verdict]}"
    rows = math.prod(found.shape[:-1])
    yield (
        f"  {rows} rows of {found.shape[-1]}, {found.known:.1%} of the elements have a law; "
        f"alpha {found.alpha:g}, {len(found.tests)} tests, {found.seconds:.1f} s"
    )
    there = f" at {place(found.z.where)}" if found.z.where else ""
    yield (
        f"  z = error / standard deviation: rms {found.z.rms:.3f}, "
        f"largest {found.z.largest:.3g}{there}"
    )
    yield from (f"  {x}" for x in found.remarks)
    shown = [x for x in found.tests if x.adjusted <= found.alpha and x.name in _SHOWN]
    tiles = [x for x in found.tests if x.adjusted <= found.alpha and x.name.startswith(_PARTS)]
    for x in (*shown, *tiles[:1]):  # of tiles and heads where it is surest
        yield f"  {x.name}: {x.statistic:.3g}, p {_p(x.adjusted)}, {x.where}"
    if found.verdict == "FAIL":
        yield "  suspects, and the share of the mean square that each explains:"
        for suspect in found.suspects[:5]:
            yield f"    {suspect.explained:6.1%}  {suspect.text}"
        if not found.suspects:
            yield "    none of the known defects"
        elif max(x.explained for x in found.suspects) < _MUCH:
            yield "    none of them explains much"
    rejected = [x for x, p in found.trials.items() if p <= found.alpha]
    if found.verdict != "FAIL" and rejected:
        yield f"  it is not what kernels of these profiles give: {', '.join(rejected)}"
    if found.verdict != "FAIL" and found.known:
        sizes = [
            f"{_DEFECTS[x].format(one)} {size:.2g}"
            for x, size in found.detectable.items()
            if x in _DEFECTS
        ]
        rows = math.prod(found.shape)
        most = WORST * math.sqrt(2 * math.log(2 * len(found.tests) * rows / found.alpha))
        sizes.append(f"an element that is off by {most:.2g} standard deviations")
        yield f"  would have been rejected: {', '.join(sizes)}"
    yield _PROVEN


_PROVEN = "  proven: the bound. If roundings are independent and symmetric: the rest."
_SHOWN = ("bound", "largest z", "mean square", "mean square of columns")
_PARTS = ("mean square of tiles", "mean square of heads")
_DEFECTS = {
    "scale": "a scale wrong by",
    "factor": "{} wrong by a factor 1 +",
    "delta": "sum d_out * out wrong by a factor 1 +",
    "epsilon": "an epsilon in the normaliser of",
}


def _p(p: float) -> str:
    return f"{p:.1g}" if p > 1e-300 else "0"


def judge(
    problem: Problem,
    numbers: Numbers,
    dtype: str,
    profile: str | Profile | Sequence[str] | None = None,
    alpha: float = 1e-6,
) -> Verdict:
    """Say whether what a kernel gave for a problem can be that of a correct kernel."""
    start = time.perf_counter()
    profiles = _profiles(dtype, numbers.out_dtype, profile)
    trial = _trials(problem, numbers, dtype, profiles, alpha)
    trials: dict[str, Trial] = {}
    for name in _in_order(problem, numbers, dtype, profiles):
        trials[name] = trial(name)
        if name != _LIKE_THE_NEXT and _explained(trials, alpha):
            break
    best = min(trials.values(), key=lambda x: _rank(x, profiles[x.profile], alpha))
    return _verdict(problem, numbers, dtype, alpha, trials, best, start)


def _trials(
    problem: Problem,
    numbers: Numbers,
    dtype: str,
    profiles: Mapping[str, Profile],
    alpha: float,
) -> Callable[[str], Trial]:
    """What tries a profile by name; weights of rows are computed once."""
    weights: dict[tuple[str | None, bool, bool], Doubles] = {}

    def trial(name: str) -> Trial:
        chosen = profiles[name]
        kernel = chosen.kernel(dtype)
        products = problem.gradient is not None and kernel.products_matter
        known = chosen.inputs, problem.rows_apart(kernel), products
        if known not in weights:
            weights[known] = row_weights(problem.read_by(chosen), kernel)
        return attempt(problem, dtype, chosen, name, numbers, alpha, weights[known])

    return trial


def _verdict(
    problem: Problem,
    numbers: Numbers,
    dtype: str,
    alpha: float,
    trials: Mapping[str, Trial],
    best: Trial,
    start: float,
) -> Verdict:
    """What a trial says, of all that were made."""
    failed = best.rejected(alpha)
    verdict = "FAIL" if failed else "PASS" if best.powered else "UNDERPOWERED"
    suspects = list(best.suspects)
    remarks = list(_remarks(problem, numbers.out))
    if failed:
        remarks += [*_narrower(problem, dtype), *_in_float32(problem, numbers, dtype, alpha)]
        suspects[:0] = _alternatives(problem, numbers, dtype, PROFILES["eager"])
    return Verdict(
        verdict,
        None if failed else best.profile,
        best.z,
        best.tests,
        suspects,
        remarks,
        dtype,
        numbers.out_dtype,
        (*problem.lead, problem.shape[0], problem.shape[2]),
        best.known,
        best.detectable,
        alpha,
        {name: min((t.adjusted for t in x.tests), default=1.0) for name, x in trials.items()},
        time.perf_counter() - start,
        best.profile,
    )


class Part(NamedTuple):
    """Numbers to be judged, and what they are to be."""

    problem: Problem
    numbers: Numbers


def judge_all(
    parts: Mapping[str, Part],
    dtype: str,
    profile: str | Profile | Sequence[str] | None = None,
    alpha: float = 1e-6,
) -> Verdict:
    """Judge an output, gradients or both: together they fail with probability alpha at most."""
    share = alpha / len(parts)
    found: dict[str, Verdict] = {}
    if "out" in parts:
        found["out"] = judge(*parts["out"], dtype, profile, share)
        if len(parts) == 1:
            return found["out"]
    found |= _judge_gradients({x: y for x, y in parts.items() if x != "out"}, dtype, profile, share)
    found = {name: x._replace(of=name) for name, x in found.items()}
    first = min(found.values(), key=lambda x: ("FAIL", "UNDERPOWERED", "PASS").index(x.verdict))
    seconds = sum(x.seconds for x in found.values())
    return first._replace(alpha=alpha, seconds=seconds, parts=found)


def _judge_gradients(
    parts: Mapping[str, Part],
    dtype: str,
    profile: str | Profile | Sequence[str] | None,
    alpha: float,
) -> dict[str, Verdict]:
    """Judge the gradients of one backward pass by one profile: the first that explains most.

    Next is tried what may still explain most, and there the gradient that was rejected most often.
    So one that no profile explains is tried by all of them, and the others by few.
    """
    names = _BACKWARD[_is_narrow(dtype)] if profile is None else profile
    profiles = {x: _profiles(dtype, y.numbers.out_dtype, names) for x, y in parts.items()}
    trial = {x: _trials(*y, dtype, profiles[x], alpha) for x, y in parts.items()}
    trials: dict[str, dict[str, Trial]] = {x: {} for x in parts}
    spent = dict.fromkeys(parts, 0.0)
    every = next(iter(profiles.values()))
    near = {x: _near(*y, dtype, every) for x, y in parts.items()}

    def rejected(part: str, name: str) -> bool:
        return name in trials[part] and trials[part][name].rejected(alpha)

    def promise(name: str) -> tuple[int, int, float]:
        rest = [near[x][name] for x in parts if not rejected(x, name)]
        return len(parts) - len(rest), *_off(rest)

    def rank(name: str) -> tuple[int, float]:
        made = [x[name] for x in trials.values()]
        off = sum(abs(math.log(x.z.rms or 1.0)) for x in made)
        return sum(x.rejected(alpha) for x in made), off

    while True:
        name = min(every, key=promise)
        left = [x for x in parts if name not in trials[x]]
        if not left:
            break
        part = max(left, key=lambda x: sum(rejected(x, y) for y in every))
        start = time.perf_counter()
        trials[part][name] = trial[part](name)
        spent[part] += time.perf_counter() - start
    best = min((x for x in every if all(x in y for y in trials.values())), key=rank)
    return {
        x: _verdict(*y, dtype, alpha, trials[x], trials[x][best], time.perf_counter() - spent[x])
        for x, y in parts.items()
    }


def _explained(trials: Mapping[str, Trial], alpha: float) -> bool:
    """Whether one of the profiles explains the numbers."""
    return not all(x.rejected(alpha) for x in trials.values())


def _in_order(
    problem: Problem, numbers: Numbers, dtype: str, profiles: Mapping[str, Profile]
) -> list[str]:
    """Those first of which a few blocks are within the bounds, from the tightest."""
    near = _near(problem, numbers, dtype, profiles)
    return sorted(profiles, key=lambda x: near[x] == math.inf)


def _near(
    problem: Problem, numbers: Numbers, dtype: str, profiles: Mapping[str, Profile]
) -> dict[str, float]:
    """By profile, `_nearness`; where there is one to choose from it is not asked for."""
    if len(profiles) == 1:
        return dict.fromkeys(profiles, 0.0)
    return {x: _nearness(problem, numbers, y.kernel(dtype)) for x, y in profiles.items()}


def _off(near: Sequence[float]) -> tuple[int, float]:
    """How many results are beyond a bound, and how far the others are from a profile."""
    return sum(x == math.inf for x in near), sum(x for x in near if x < math.inf)


def _nearness(problem: Problem, numbers: Numbers, kernel: Roundings) -> float:
    """How far z of a few blocks is from 1 in root mean square; infinite beyond a bound."""
    square = _mean_square(problem, numbers, kernel)
    return abs(math.log(square)) if square else 0.0


def _mean_square(problem: Problem, numbers: Numbers, kernel: Roundings) -> float:
    """Of z of a few blocks of queries; infinite beyond a bound, or where none sees a key.

    Those that see none are left out: kernels give 0 for them, NaN or the mean of all values.
    """
    items, squares, count, compared = list(problem.items()), 0.0, 0, 0
    for index, i in items[:: max(1, len(items) // _FEW)][:_FEW]:
        with np.errstate(all="ignore"):
            rows, got = problem.analyse(index, kernel, i), numbers.out(index)[i]
        seen = ~np.isneginf(rows.lse) if problem.is_mean else np.ones(len(got), bool)
        if not np.all((np.abs(rows.errors(got)) <= rows.bound)[seen]):
            return math.inf
        z = _z(got, rows)[seen]
        squares, count = squares + float(np.nansum(z * z)), count + int(np.sum(~np.isnan(z)))
        compared += int(np.sum(seen))
    if not compared:
        return math.inf
    return squares / count if count else 0.0


def _rank(trial: Trial, profile: Profile, alpha: float) -> tuple[bool, bool, bool, float]:
    """What explains the numbers is first, then what does with a known defect, then the nearest.

    Sizes of defects are right for the problem as it was given, with inputs as they are.
    """
    most = max((x.explained for x in trial.suspects), default=0.0)
    rounded = profile.inputs is not None
    return trial.rejected(alpha), rounded, most < _ALL_BUT, abs(math.log(trial.z.rms or 1.0))


def z_by_row(
    problem: Problem, numbers: Numbers, dtype: str, profile: str | Profile
) -> tuple[Doubles, Doubles]:
    """Sums of z^2 over the columns, (heads, n), and the numbers of elements that have a law."""
    shape = math.prod(problem.lead), problem.shape[0]
    squares, counts = np.zeros(shape), np.zeros(shape)

    def add(index: tuple[int, ...], i: slice, rows: RowErrors) -> None:
        at = problem.number(index)
        z = _z(numbers.out(index)[i], rows)
        squares[at, i], counts[at, i] = np.nansum(z * z, -1), np.sum(~np.isnan(z), -1)

    problems.sweep(problem, dtype, _chosen(dtype, numbers.out_dtype, profile), add)
    return squares, counts


def z_of_head(
    problem: Problem,
    numbers: Numbers,
    dtype: str,
    profile: str | Profile,
    index: tuple[int, ...],
) -> Doubles:
    """Errors of a head over their standard deviations, (n, d_v); nan where there is no law."""
    found = np.empty((problem.shape[0], problem.shape[2]))
    chosen, got = _chosen(dtype, numbers.out_dtype, profile), numbers.out(index)
    problem = problem.read_by(chosen)  # 8 bits have a scale for all heads

    def add(_: tuple[int, ...], i: slice, rows: RowErrors) -> None:
        found[i] = _z(got[i], rows)

    problems.sweep(problem.alone(index), dtype, chosen._replace(inputs=None), add)
    return found


def _z(got: Doubles, rows: RowErrors) -> Doubles:
    error = rows.errors(got)
    found: Doubles = np.where(np.isfinite(rows.std) & np.isfinite(error), error / rows.std, np.nan)
    return found


def _chosen(dtype: str, out_dtype: str, profile: str | Profile) -> Profile:
    return next(iter(_profiles(dtype, out_dtype, profile).values()))


def parts_of(tensors: Tensors, problem: Problem) -> dict[str, Part]:
    """The results in a file: the output, with log normalisers, and gradients."""
    shapes = tensors.shapes
    names = [x for x in ("dq", "dk", "dv") if x in shapes]
    if "out" not in shapes and not names:
        raise ValueError(
            f"`out`, `dq`, `dk` or `dv` must be in FILE, to be judged: "
            f"{str(tensors.path)!r} has none."
        )
    found: dict[str, Part] = {}
    if "out" in shapes:
        lse = "lse" in shapes and problem.kind == "scores"
        numbers = Numbers(
            partial(tensors.read, "out"),
            _held(tensors, "out"),
            partial(tensors.read, "lse") if lse else None,
            _held(tensors, "lse") if lse else "float32",
        )
        found["out"] = Part(problem, numbers)
    if names:
        out = partial(tensors.read, "out") if "out" in shapes else None
        d_out = partial(tensors.read, "d_out")
        dtype = found["out"].numbers.out_dtype if "out" in shapes else tensors.dtype
        results: dict[str, Any] = {name: shapes[name] for name in names}
        backward = problems.pose_gradients(problem, results, d_out, out, dtype)
        for name, one in backward.items():
            own = partial(tensors.part, name)
            found[name] = Part(one, Numbers(own, _held(tensors, name)))
    return found


def _held(tensors: Tensors, name: str) -> str:
    """The type of the queries where it holds all numbers, their own type otherwise."""
    dtype, own = tensors.dtype, tensors.dtypes[name]
    if own == dtype or not math.prod(tensors.shapes[name]):
        return own
    all_held = all(np.all(FORMATS[dtype].holds(tensors.read(name, x))) for x in tensors.heads())
    return dtype if all_held else own


def usual_profiles(dtype: str) -> Sequence[str]:
    """Names of the profiles to try for a storage type, from the tightest."""
    if dtype == "float64":
        return _DOUBLE
    return _NARROW if _is_narrow(dtype) else _WIDE


def _is_narrow(dtype: str) -> bool:
    return FORMATS[dtype].digits <= FORMATS["float16"].digits


def _profiles(
    dtype: str, out_dtype: str, profile: str | Profile | Sequence[str] | None
) -> dict[str, Profile]:
    """Those to try, from the tightest, with the type of the output."""
    if isinstance(profile, str | Profile):
        name = profile if isinstance(profile, str) else "given"
        chosen = {name: rounding_profiles.profile_of(profile)}
    else:
        names = profile or usual_profiles(dtype)
        chosen = {x: rounding_profiles.profile_of(x) for x in names}
    return {
        name: x._replace(out=out_dtype) if x.out == "storage" else x for name, x in chosen.items()
    }


def _remarks(problem: Problem, read: Callable[[tuple[int, ...]], Doubles]) -> Iterator[str]:
    """What is to be seen without any law."""
    zero, nan, rows, first = True, 0, 0, ""
    for index in np.ndindex(problem.lead):
        got = read(index)
        zero = zero and not np.any(got)
        strange = np.flatnonzero(~np.all(np.isfinite(got), -1))
        if strange.size and not first:
            first = place((*index, int(strange[0])))
        nan, rows = nan + strange.size, rows + got.shape[0]
    if zero and rows:
        yield f"{problem.result} is 0 everywhere"
    if nan:
        yield f"{nan} of {rows} rows hold NaN or infinity, the first is {first}"


def _narrower(problem: Problem, dtype: str) -> Iterator[str]:
    """Whether queries, keys and values look like those of a narrower type."""
    for name in ("bfloat16", "float16"):
        to = FORMATS[name]
        heads = (problem.read(index) for index in np.ndindex(problem.lead))
        if to.digits < FORMATS[dtype].digits and all(
            np.all(to.holds(x[y])) for x in heads for y in "qkv"
        ):
            yield f"q, k and v hold numbers of {name} only: is that the dtype of the kernel?"
            return


def _in_float32(problem: Problem, numbers: Numbers, dtype: str, alpha: float) -> Iterator[str]:
    """Whether float64 numbers are those of sums or exponentials in float32."""
    if dtype == "float64" and problem.gradient is None:
        trial = _trials(problem, numbers, dtype, _profiles(dtype, numbers.out_dtype, "math"), alpha)
        if not trial("math").rejected(alpha):
            yield "profile math explains them: something in between is in float32"


def _alternatives(
    problem: Problem, numbers: Numbers, dtype: str, profile: Profile
) -> Iterator[Suspect]:
    """Other conventions by which a part of the numbers is within its bound, the nearest first."""
    kernel = profile.kernel(dtype)
    found = [
        (_mean_square(x, numbers, kernel), f"agrees if {text}") for text, x in _others(problem)
    ]
    for square, text in sorted(found, key=lambda x: x[0]):
        if square < math.inf:
            yield Suspect("convention", math.nan, math.nan, math.nan, 1.0, text)


def _others(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """Problems that are often taken for this one, of gradients those of their output."""
    gradient = problem.gradient
    for text, other in _conventions(problem if gradient is None else gradient.forward):
        if gradient is not None:
            other = gradient._replace(forward=other).problem(problem.lead)
        yield text, other
    if gradient is None and problem.has_sinks:  # bounds of gradients do not tell these apart
        yield from _other_sinks(problem)
    if problem.key_heads is not None:
        yield f"query head h shares key head h % {problem.key_heads}", problem.dealt()


def _other_sinks(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """Problems with other sinks."""
    changes: Mapping[str, Callable[[Any, Any], Any]] = {
        "is multiplied by the scale, too": lambda index, x: problem.scale * x,
        "is multiplied by log2(e) once more": lambda index, x: math.log2(math.e) * x,
        "counts twice": lambda index, x: x + math.log(2),
    }
    for words, change in changes.items():
        yield f"the sink {words}", problem.replaced("sinks", change)


def _conventions(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """Problems that are often taken for each other."""
    first = problem.read((0,) * len(problem.lead))
    d = first["q"].shape[-1]
    n, m, _ = problem.shape
    for words, scale in ((f"1 / sqrt({d})", d**-0.5), ("1", 1.0), (f"1 / {d}", 1 / d)):
        if not math.isclose(scale, problem.scale):
            yield f"the scale is {words}", problem._replace(scale=scale)
    without = "causal" if not problem.causal else "not causal"
    yield f"attention is {without}", problem._replace(causal=not problem.causal)

    if problem.kind == "scores" and not problem.causal:
        for words, ahead in (("sees one key more, the next", 1), ("does not see its last key", -1)):
            seen = np.tri(n, m, m - n + ahead, dtype=bool)
            yield f"attention is causal, and a query {words}", problem.masked(seen)
    if problem.kind == "scores" and n != m:
        corner = np.tri(n, m, dtype=bool)
        words = "attention is causal from the first key (query i sees key j if j <= i)"
        yield words, problem.masked(corner)._replace(causal=False)
    if "mask" in first:
        yield "the mask is inverted", problem.replaced("mask", lambda index, x: np.logical_not(x))
    for name in ("mask", "bias"):
        if name in first:
            yield f"the {name} is ignored", problem.without(name)
    if problem.has_sinks:
        yield "there is no sink", problem.without("sinks")
    left, right = problem.window
    for side, words, change in (
        (left, "left", lambda x: (x, right)),
        (right, "right", lambda x: (left, x)),
    ):
        for by in (-1, 1):
            if side is not None and side + by >= 0:
                yield (
                    f"the window reaches {side + by} to the {words}, not {side}",
                    problem._replace(window=change(side + by)),
                )


def verify(
    *,
    q: Any,
    k: Any,
    v: Any,
    out: Any = None,
    lse: Any = None,
    d_out: Any = None,
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
    omega: Any = None,
    log_weight: Any = None,
    estimator: str = "softmax",
    dtype: str | None = None,
    profile: str | Profile | None = None,
    alpha: float = 1e-6,
    scale: float | None = None,
    bias: Any = None,
    mask: Any = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    features: Features = "positive",
    feature_map: Callable[[Any], Any] | None = None,
) -> Verdict:
    """Say whether numbers can be those of a correct kernel, to rounding.

    They are compared with exact attention, by what `rounding.predict` says of errors; the tests,
    and what they assume, are those of `refattn.verification`. Profiles are tried from the tightest
    until one explains the numbers.

    Parameters
    ----------
    q, k, v : arrays, shapes (..., n, d), (..., m, d) and (..., m, d_v)
        What the kernel was given, of any floating-point dtype and library.
    out : array, shape (..., n, d_v), optional
        What it gave.
    lse : array, shape (..., n), optional
        The log normalisers that it gave, natural, of softmax attention.
    d_out : array, shape (..., n, d_v), optional
        What its backward pass was given: the derivative to the output, in numbers of the type of
        `out` or, without it, of the storage type.
    dq, dk, dv : arrays, shapes of `q`, `k` and `v`, optional
        What its backward pass gave, of softmax attention. It is taken to have had the numbers of
        `out`, if they are given, and to sum over heads that share keys.
    omega, log_weight : arrays, shapes (..., S, d) and (..., S), optional
        Frequencies of random feature attention, and their log weights.
    estimator : {"softmax", "rfa", "linear"}
        What the kernel computes.
    dtype : str, optional
        The storage type, by default that of `q`: what the numbers of `q`, `k` and `v` were rounded
        to, if they come in a wider type. So is that of `out`, if it holds all of its numbers.
    profile : str or Profile, optional
        What the kernel rounds, where that is known: no other is tried.
    alpha : float, default 1e-6
        Largest probability that a correct kernel fails.
    scale, bias, mask, causal, window, softcap, sinks, features, feature_map
        As in `rounding.predict`; for linear attention the map is `elu_features` by default.

    Returns
    -------
    Verdict
        PASS, FAIL or UNDERPOWERED, the profile that explains the numbers, and the suspects.

    Raises
    ------
    TypeError, ValueError
        As in `rounding.predict`; also if there is nothing to judge, if shapes of results do not
        match, if gradients come without `d_out`, or if an option is not one of the estimator.

    Examples
    --------
    >>> import numpy as np
    >>> import refattn
    >>> q, k, v = refattn.load_sample()
    >>> out = refattn.softmax_attention(q, k, v)
    >>> refattn.verify(q=q, k=k, v=v, out=out).profile
    'math'
    >>> off = refattn.softmax_attention(q, k, v, scale=32**-0.5 * 1.00001)
    >>> found = refattn.verify(q=q, k=k, v=v, out=off)
    >>> found.verdict, found.suspects[0].name
    ('FAIL', 'scale')
    """
    settings = {"bias": bias, "mask": mask, "causal": causal, "window": window}
    problem = problems.pose_arrays(
        q,
        k,
        v,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        **settings,
        **_estimator(estimator, omega, log_weight, features, feature_map),
    )
    alpha = alpha_of(alpha)
    n, _, d_v = problem.shape
    of_result = "the result"
    given = {
        "out": (out, (*problem.lead, n, d_v), of_result),
        "lse": (lse, (*problem.lead, n), of_result),
        "d_out": (d_out, (*problem.lead, n, d_v), of_result),
        "dq": (dq, tuple(q.shape), "`q`"),
        "dk": (dk, tuple(k.shape), "`k`"),
        "dv": (dv, tuple(v.shape), "`v`"),
    }
    got: dict[str, Doubles] = {}
    for name, (x, shape, of) in given.items():
        if x is not None:
            got[name] = problems.widen(name, x)
            if got[name].shape != shape:
                raise ValueError(
                    f"`{name}` must have the shape of {of}, {shape}, got {got[name].shape}."
                )
    dtype = problems.dtype_of(q) if dtype is None else dtype
    problems.check_holds(problem, dtype)
    types = {x: narrowest(got[x], dtype, problems.dtype_of(given[x][0], x)) for x in got}
    parts: dict[str, Part] = {}
    if "out" in got:
        parts["out"] = Part(problem, Numbers(got["out"].__getitem__, types["out"]))
    if "lse" in got:
        if problem.kind != "scores" or "out" not in got:
            raise ValueError("`lse` must come with `out`, of softmax attention.")
        numbers = parts["out"].numbers
        numbers = numbers._replace(lse=got["lse"].__getitem__, lse_dtype=types["lse"])
        parts["out"] = Part(problem, numbers)
    results: dict[str, Any] = {x: got[x].shape for x in ("dq", "dk", "dv") if x in got}
    if results:
        if "d_out" not in got:
            raise ValueError(f"`{next(iter(results))}` must come with `d_out`, got None.")
        read = got["out"].__getitem__ if "out" in got else None
        written = types.get("out", dtype)
        backward = problems.pose_gradients(
            problem, results, got["d_out"].__getitem__, read, written
        )
        for name, one in backward.items():
            parts[name] = Part(one, Numbers(got[name].__getitem__, types[name]))
    if not parts:
        raise ValueError("`out`, `dq`, `dk` or `dv` must be given, to be judged; got none.")
    return judge_all(parts, dtype, profile, alpha)


def narrowest(x: Doubles, dtype: str, own: str) -> str:
    """The storage type where it holds the numbers, their own type otherwise."""
    return dtype if x.size and np.all(FORMATS[dtype].holds(x)) else own


def alpha_of(alpha: Any) -> float:
    """Check a level."""
    found = float(checks.real("alpha", alpha, positive=True))
    if found >= 1:
        raise ValueError(f"`alpha` must be between 0 and 1, got {found}.")
    return found


def _estimator(
    estimator: Any, omega: Any, log_weight: Any, features: str, feature_map: Any
) -> dict[str, Any]:
    """What the estimator takes beside queries, keys and values."""
    kind = verification_given.kind_of(estimator)
    if kind == "scores":
        given = {"omega": omega, "log_weight": log_weight, "feature_map": feature_map}
        for option, x in given.items():
            if x is not None:
                raise ValueError(f"`{option}` must not be given for softmax.")
        return {}
    if kind == "map":
        return {"feature_map": elu_features if feature_map is None else feature_map}
    if omega is None:
        raise ValueError("`omega` must be given for rfa: frequencies (..., S, d), got None.")
    return {"omega": omega, "log_weight": log_weight, "features": features}
