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

    Efron, Student's t-test under symmetry conditions, Journal of the American Statistical
    Association 64(328), 1969.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from . import _problems, _rounding, _validate
from ._errors import Finding, Numbers, Suspect, Trial, Z, attempt, place, row_weights
from ._formats import FORMATS
from ._problems import PROFILES, Problem, Profile
from ._tensors import Tensors
from ._text import portable
from .features import elu_features

__all__ = ["Finding", "Numbers", "Suspect", "Verdict", "judge", "verify"]

_Floats = npt.NDArray[np.float64]

_NARROW = ("math", "flash", "upcast", "flash-fast", "eager", "eager-narrow")  # from the tightest
_ALL_BUT = 0.95  # share of the mean square that a defect explains where there is no other
_FEW = 4  # blocks of queries that are looked at before all
_LIKE_THE_NEXT = "upcast"  # neither is the tighter one: that whose rms is nearer to 1 is named
_WIDE = ("math", "serial", "tf32")


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

    def to_json(self) -> str:
        """The verdict as JSON."""
        found = self._asdict()
        found["z"] = self.z._asdict()
        found["tests"], found["suspects"] = (
            [x._asdict() for x in items] for items in (self.tests, self.suspects)
        )
        return json.dumps(portable(found), indent=1) + "\n"

    def __str__(self) -> str:
        """The verdict in words."""
        return "\n".join(_report(self))


def _report(found: Verdict) -> Iterator[str]:
    types = found.dtype if found.out_dtype == found.dtype else f"{found.dtype} to {found.out_dtype}"
    said = {
        "PASS": f"a correct kernel in {types} gives such numbers (profile {found.profile})",
        "FAIL": f"no correct kernel in {types} gives such numbers (profiles tried: "
        f"{', '.join(found.trials)})",
        "UNDERPOWERED": "an output that is 1 % too large would not have been rejected",
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
    rejected = [x for x, p in found.trials.items() if p <= found.alpha]
    if found.verdict != "FAIL" and rejected:
        yield f"  it is not what kernels of these profiles give: {', '.join(rejected)}"
    if found.verdict != "FAIL" and found.known:
        sizes = [
            f"{_DEFECTS[x]} {size:.2g}" for x, size in found.detectable.items() if x in _DEFECTS
        ]
        rows = math.prod(found.shape)
        most = _rounding.WORST * math.sqrt(2 * math.log(2 * len(found.tests) * rows / found.alpha))
        sizes.append(f"an element that is off by {most:.2g} standard deviations")
        yield f"  would have been rejected: {', '.join(sizes)}"
    yield "  proven: the bound. If roundings are independent and symmetric: the rest."


_SHOWN = ("bound", "largest z", "mean square", "mean square of columns")
_PARTS = ("mean square of tiles", "mean square of heads")
_DEFECTS = {
    "scale": "a scale wrong by",
    "factor": "an output wrong by a factor 1 +",
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
    trials: dict[str, Trial] = {}
    weights: dict[str | None, _Floats] = {}
    profiles = _profiles(dtype, numbers.out_dtype, profile)
    near = [x for x in profiles if _within(problem, numbers, profiles[x].kernel(dtype))]
    for name in (*near, *(x for x in profiles if x not in near)):
        chosen = profiles[name]
        if chosen.inputs not in weights:
            weights[chosen.inputs] = row_weights(problem.read_by(chosen))
        trials[name] = attempt(problem, dtype, chosen, name, numbers, alpha, weights[chosen.inputs])
        if name != _LIKE_THE_NEXT and _explained(trials, alpha):
            break
    best = min(trials.values(), key=lambda x: _rank(x, profiles[x.profile], alpha))
    failed = best.rejected(alpha)
    verdict = "FAIL" if failed else "PASS" if best.powered else "UNDERPOWERED"
    suspects = list(best.suspects)
    remarks = list(_remarks(problem, numbers.out))
    if failed:
        remarks += _narrower(problem, dtype)
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


def _explained(trials: Mapping[str, Trial], alpha: float) -> bool:
    """Whether one of the profiles explains the numbers."""
    return not all(x.rejected(alpha) for x in trials.values())


def _within(problem: Problem, numbers: Numbers, kernel: _rounding.Kernel) -> bool:
    """Whether a few blocks of queries are within their bounds."""
    items = list(problem.items())
    for index, i in items[:: max(1, len(items) // _FEW)][:_FEW]:
        with np.errstate(all="ignore"):
            rows = problem.analyse(index, kernel, i)
            if not np.all(np.abs(numbers.out(index)[i] - rows.out) <= rows.bound):
                return False
    return True


def _rank(trial: Trial, profile: Profile, alpha: float) -> tuple[bool, bool, bool, float]:
    """What explains the numbers is first, then what does with a known defect, then the nearest.

    Sizes of defects are right for the problem as it was given, with inputs as they are.
    """
    most = max((x.explained for x in trial.suspects), default=0.0)
    rounded = profile.inputs is not None
    return trial.rejected(alpha), rounded, most < _ALL_BUT, abs(math.log(trial.z.rms or 1.0))


def z_by_row(
    problem: Problem, numbers: Numbers, dtype: str, profile: str | Profile
) -> tuple[_Floats, _Floats]:
    """Sums of z^2 over the columns, (heads, n), and the numbers of elements that have a law."""
    shape = math.prod(problem.lead), problem.shape[0]
    squares, counts = np.zeros(shape), np.zeros(shape)

    def add(index: tuple[int, ...], i: slice, rows: _rounding.Rows) -> None:
        at = problem.number(index)
        z = _z(numbers.out(index)[i], rows)
        squares[at, i], counts[at, i] = np.nansum(z * z, -1), np.sum(~np.isnan(z), -1)

    _problems.sweep(problem, dtype, _chosen(dtype, numbers.out_dtype, profile), add)
    return squares, counts


def z_of_head(
    problem: Problem,
    numbers: Numbers,
    dtype: str,
    profile: str | Profile,
    index: tuple[int, ...],
) -> _Floats:
    """Errors of a head over their standard deviations, (n, d_v); nan where there is no law."""
    found = np.empty((problem.shape[0], problem.shape[2]))
    chosen, got = _chosen(dtype, numbers.out_dtype, profile), numbers.out(index)
    problem = problem.read_by(chosen)  # 8 bits have a scale for all heads

    def add(index: tuple[int, ...], i: slice, rows: _rounding.Rows) -> None:
        found[i] = _z(got[i], rows)

    one = problem._replace(lead=(), read=lambda _: problem.read(index))
    _problems.sweep(one, dtype, chosen._replace(inputs=None), add)
    return found


def _z(got: _Floats, rows: _rounding.Rows) -> _Floats:
    error = got - rows.out
    found: _Floats = np.where(np.isfinite(rows.std) & np.isfinite(error), error / rows.std, np.nan)
    return found


def _chosen(dtype: str, out_dtype: str, profile: str | Profile) -> Profile:
    return next(iter(_profiles(dtype, out_dtype, profile).values()))


def numbers_of(tensors: Tensors) -> Numbers:
    """The results in a file."""
    if "out" not in tensors.shapes:
        raise ValueError(
            f"`out` must be in FILE, for it to be judged: {str(tensors.path)!r} has none."
        )
    return Numbers(
        partial(tensors.read, "out"),
        _held(tensors, "out"),
        partial(tensors.read, "lse") if "lse" in tensors.shapes else None,
        _held(tensors, "lse") if "lse" in tensors.shapes else "float32",
    )


def _held(tensors: Tensors, name: str) -> str:
    """The type of the queries where it holds all numbers, their own type otherwise."""
    dtype, own = tensors.dtype, tensors.dtypes[name]
    if own == dtype or not math.prod(tensors.shapes[name]):
        return own
    all_held = all(np.all(FORMATS[dtype].holds(tensors.read(name, x))) for x in tensors.heads())
    return dtype if all_held else own


def usual_profiles(dtype: str) -> Sequence[str]:
    """Names of the profiles to try for a storage type, from the tightest."""
    return _NARROW if FORMATS[dtype].digits <= FORMATS["float16"].digits else _WIDE


def _profiles(
    dtype: str, out_dtype: str, profile: str | Profile | Sequence[str] | None
) -> dict[str, Profile]:
    """Those to try, from the tightest, with the type of the output."""
    if isinstance(profile, str | Profile):
        name = profile if isinstance(profile, str) else "given"
        chosen = {name: _problems.profile_of(profile)}
    else:
        names = profile or usual_profiles(dtype)
        chosen = {x: _problems.profile_of(x) for x in names}
    return {
        name: x._replace(out=out_dtype) if x.out == "storage" else x for name, x in chosen.items()
    }


def _remarks(problem: Problem, read: Callable[[tuple[int, ...]], _Floats]) -> Iterator[str]:
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
        yield "the output is 0 everywhere"
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


def _alternatives(
    problem: Problem, numbers: Numbers, dtype: str, profile: Profile
) -> Iterator[Suspect]:
    """Other conventions by which a part of the numbers is within its bound, where it was not."""
    kernel = profile.kernel(dtype)
    for text, other in _conventions(problem):
        if _within(other, numbers, kernel):
            yield Suspect("convention", math.nan, math.nan, math.nan, 1.0, f"agrees if {text}")


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

    if n != m and problem.rows_apart:
        corner = np.tri(n, m, dtype=bool)
        words = "attention is causal from the first key (query i sees key j if j <= i)"
        yield words, problem.masked(corner)._replace(causal=False)
    if "mask" in first:
        yield "the mask is inverted", problem.replaced("mask", lambda index, x: np.logical_not(x))
    for name in ("mask", "bias"):
        if name in first:
            yield f"the {name} is ignored", problem.without(name)
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
    out: Any,
    lse: Any = None,
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
    features: str = "positive",
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
    out : array, shape (..., n, d_v)
        What it gave.
    lse : array, shape (..., n), optional
        The log normalisers that it gave, natural, of softmax attention.
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
    scale, bias, mask, causal, window, softcap, features, feature_map
        As in `rounding.predict`; for linear attention the map is `elu_features` by default.

    Returns
    -------
    Verdict
        PASS, FAIL or UNDERPOWERED, the profile that explains the numbers, and the suspects.

    Raises
    ------
    TypeError, ValueError
        As in `rounding.predict`; also if shapes of results do not match, or if an option is not
        one of the estimator.

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
    settings = {"bias": bias, "mask": mask, "causal": causal, "window": window, "softcap": softcap}
    problem = _problems.of_arrays(
        q,
        k,
        v,
        scale=scale,
        **settings,
        **_estimator(estimator, omega, log_weight, features, feature_map),
    )
    alpha = alpha_of(alpha)
    n, _, d_v = problem.shape
    given = {"out": (out, (*problem.lead, n, d_v)), "lse": (lse, (*problem.lead, n))}
    got: dict[str, _Floats] = {}
    for name, (x, shape) in given.items():
        if x is not None:
            got[name] = _problems.wide(name, x)
            if got[name].shape != shape:
                raise ValueError(
                    f"`{name}` must have the shape of the result, {shape}, got {got[name].shape}."
                )
    dtype = _problems.dtype_of(q) if dtype is None else dtype
    _problems.holds(problem, dtype)
    numbers = Numbers(
        lambda index: got["out"][index],
        narrowest(got["out"], dtype, _problems.dtype_of(out, "out")),
    )
    if lse is not None:
        if problem.kind != "scores":
            raise ValueError(f"`lse` must not be given for {estimator}.")
        own = narrowest(got["lse"], dtype, _problems.dtype_of(lse, "lse"))
        numbers = numbers._replace(lse=lambda index: got["lse"][index], lse_dtype=own)
    return judge(problem, numbers, dtype, profile, alpha)


def narrowest(x: _Floats, dtype: str, own: str) -> str:
    """The storage type where it holds the numbers, their own type otherwise."""
    return dtype if x.size and np.all(FORMATS[dtype].holds(x)) else own


def alpha_of(alpha: Any) -> float:
    """Check a level."""
    found = float(_validate.real("alpha", alpha, positive=True))
    if found >= 1:
        raise ValueError(f"`alpha` must be between 0 and 1, got {found}.")
    return found


def _estimator(
    estimator: Any, omega: Any, log_weight: Any, features: str, feature_map: Any
) -> dict[str, Any]:
    """What the estimator takes beside queries, keys and values."""
    kind = _problems.kind_of(estimator)
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
