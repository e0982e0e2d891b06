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

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from ..arrays.library import Doubles
from ..rounding.problems import Problem
from ..rounding.profiles import Profile
from ..rounding.roundings import Roundings
from .alternatives import list_remarks, suspect_narrower
from .choice import BACKWARD_PROFILES, ProfileChoice, choose_profiles, is_narrow
from .findings import Numbers, Part, ProfileTrial
from .head_sums import row_weights
from .reasons import explain, explain_gradients
from .trial import attempt
from .verdict import Verdict
from .z_scores import mean_square

_ALL_BUT = 0.95  # share of the mean square that a defect explains where there is no other
_LIKE_THE_NEXT = "upcast"  # neither is the tighter one: that whose rms is nearer to 1 is named


def judge(
    problem: Problem,
    numbers: Numbers,
    dtype: str,
    profile: ProfileChoice = None,
    alpha: float = 1e-6,
) -> Verdict:
    """Say whether what a kernel gave for a problem can be that of a correct kernel."""
    start = time.perf_counter()
    profiles = choose_profiles(dtype, numbers.out_dtype, profile)
    trial = _prepare_trials(problem, numbers, dtype, profiles, alpha)
    trials: dict[str, ProfileTrial] = {}
    for name in _order_profiles(problem, numbers, dtype, profiles):
        trials[name] = trial(name)
        if name != _LIKE_THE_NEXT and _any_explains(trials, alpha):
            break
    best = min(trials.values(), key=lambda x: _rank_trial(x, profiles[x.profile], alpha))
    verdict = _conclude(problem, numbers, dtype, alpha, trials, best, start)
    return explain(problem, numbers, verdict, profile)


def _prepare_trials(
    problem: Problem, numbers: Numbers, dtype: str, profiles: Mapping[str, Profile], alpha: float
) -> Callable[[str], ProfileTrial]:
    """Return what tries a profile by name; weights of rows are computed once."""
    weights: dict[tuple[str | None, bool, bool], Doubles] = {}

    def trial(name: str) -> ProfileTrial:
        chosen = profiles[name]
        kernel = chosen.kernel(dtype)
        products = problem.gradient is not None and kernel.products_matter
        known = chosen.inputs, problem.rows_apart(kernel), products
        if known not in weights:
            weights[known] = row_weights(problem.read_by(chosen), kernel)
        return attempt(problem, dtype, chosen, name, numbers, alpha, weights[known])

    return trial


def _conclude(
    problem: Problem,
    numbers: Numbers,
    dtype: str,
    alpha: float,
    trials: Mapping[str, ProfileTrial],
    best: ProfileTrial,
    start: float,
) -> Verdict:
    """Write the verdict of the best of the trials."""
    failed = best.rejected(alpha)
    verdict = "FAIL" if failed else "PASS" if best.powered else "UNDERPOWERED"
    suspects = list(best.suspects)
    remarks = list(list_remarks(problem, numbers.out))
    if failed:
        remarks += [
            *suspect_narrower(problem, dtype),
            *_suspect_float32(problem, numbers, dtype, alpha),
        ]
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


def judge_all(
    parts: Mapping[str, Part], dtype: str, profile: ProfileChoice = None, alpha: float = 1e-6
) -> Verdict:
    """Judge an output, gradients or both: together they fail with probability alpha at most."""
    share = alpha / len(parts)
    verdicts: dict[str, Verdict] = {}
    if "out" in parts:
        verdicts["out"] = judge(*parts["out"], dtype, profile, share)
        if len(parts) == 1:
            return verdicts["out"]
    backward = {x: y for x, y in parts.items() if x != "out"}
    forward = verdicts["out"].verdict if "out" in verdicts else ""
    gradients = _judge_gradients(backward, dtype, profile, share)
    verdicts |= explain_gradients(backward, gradients, profile, forward)
    verdicts = {name: x._replace(of=name) for name, x in verdicts.items()}
    first = min(verdicts.values(), key=lambda x: ("FAIL", "UNDERPOWERED", "PASS").index(x.verdict))
    seconds = sum(x.seconds for x in verdicts.values())
    return first._replace(alpha=alpha, seconds=seconds, parts=verdicts)


def _judge_gradients(
    parts: Mapping[str, Part], dtype: str, profile: ProfileChoice, alpha: float
) -> dict[str, Verdict]:
    """Judge the gradients of one backward pass by one profile: the first that explains most.

    Next is tried what may still explain most, and there the gradient that was rejected most often.
    So one that no profile explains is tried by all of them, and the others by few.
    """
    names = BACKWARD_PROFILES[is_narrow(dtype)] if profile is None else profile
    profiles = {x: choose_profiles(dtype, y.numbers.out_dtype, names) for x, y in parts.items()}
    trial = {x: _prepare_trials(*y, dtype, profiles[x], alpha) for x, y in parts.items()}
    trials: dict[str, dict[str, ProfileTrial]] = {x: {} for x in parts}
    spent = dict.fromkeys(parts, 0.0)
    every = next(iter(profiles.values()))
    near = {x: _measure_distances(*y, dtype, every) for x, y in parts.items()}

    def rejected(part: str, name: str) -> bool:
        return name in trials[part] and trials[part][name].rejected(alpha)

    def promise(name: str) -> tuple[int, int, float]:
        rest = [near[x][name] for x in parts if not rejected(x, name)]
        return len(parts) - len(rest), *_count_off(rest)

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
        x: _conclude(*y, dtype, alpha, trials[x], trials[x][best], time.perf_counter() - spent[x])
        for x, y in parts.items()
    }


def _any_explains(trials: Mapping[str, ProfileTrial], alpha: float) -> bool:
    """Tell whether one of the profiles explains the numbers."""
    return not all(x.rejected(alpha) for x in trials.values())


def _order_profiles(
    problem: Problem, numbers: Numbers, dtype: str, profiles: Mapping[str, Profile]
) -> list[str]:
    """Put the profiles first whose bounds hold for a few blocks, from the tightest."""
    near = _measure_distances(problem, numbers, dtype, profiles)
    return sorted(profiles, key=lambda x: near[x] == math.inf)


def _measure_distances(
    problem: Problem, numbers: Numbers, dtype: str, profiles: Mapping[str, Profile]
) -> dict[str, float]:
    """Return `_distance_of_profile` for each profile; 0 if there is only one."""
    if len(profiles) == 1:
        return dict.fromkeys(profiles, 0.0)
    return {x: _distance_of_profile(problem, numbers, y.kernel(dtype)) for x, y in profiles.items()}


def _count_off(near: Sequence[float]) -> tuple[int, float]:
    """Count results beyond a bound, and sum the distances of the rest."""
    return sum(x == math.inf for x in near), sum(x for x in near if x < math.inf)


def _distance_of_profile(problem: Problem, numbers: Numbers, kernel: Roundings) -> float:
    """Return how far the mean square of z of a few blocks is from 1; infinite beyond a bound."""
    square = mean_square(problem, numbers, kernel)
    return abs(math.log(square)) if square else 0.0


def _rank_trial(
    trial: ProfileTrial, profile: Profile, alpha: float
) -> tuple[bool, bool, bool, float]:
    """Rank first what explains the numbers, then what does with a known defect, then the nearest.

    Sizes of defects are right for the problem as it was given, with inputs as they are.
    """
    most = max((x.explained for x in trial.suspects), default=0.0)
    rounded = profile.inputs is not None
    return trial.rejected(alpha), rounded, most < _ALL_BUT, abs(math.log(trial.z.rms or 1.0))


def _suspect_float32(problem: Problem, numbers: Numbers, dtype: str, alpha: float) -> Iterator[str]:
    """Say if float64 numbers are those of sums or exponentials in float32."""
    if dtype == "float64" and problem.gradient is None:
        trial = _prepare_trials(
            problem, numbers, dtype, choose_profiles(dtype, numbers.out_dtype, "math"), alpha
        )
        if not trial("math").rejected(alpha):
            yield "profile math explains them: something in between is in float32"
