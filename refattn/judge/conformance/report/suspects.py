"""Find the known bugs that explain a failure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, cast

import numpy as np

from ....registry import ESTIMATORS
from ...mistakes.defects.edits import Edited
from ...mistakes.defects.steps import Observed, Stepped, find_change
from ..candidate.adapter import Adapter
from ..candidate.limits import shrink
from ..candidate.tags import CAPABILITIES
from ..checks.recovery import FAR_OFF, frequency_moments
from ..checks.trials import CHECKS, Call, CheckRun
from ..truth.allowed import of_function, pulled, reference
from .causes import Asked, way_of
from .report import EXPECTED, FAIL, Result

_Suspect = tuple[Any, str]  # a defect or a change, and in which way it is like the candidate
_MOST_SUSPECTS = 3  # suspects named for a failure
_FEW_CALLS = 3  # that failed, and that a changed step must explain
_ENOUGH_CHECKS = 2  # that both fail
_ENOUGH_LAWS = 3  # the same of laws, where the frequencies drawn are wrong and nothing else
_DRAWS_OF_A_DEFECT = 200  # at which frequencies of a defect are drawn
_LONG, _LEAST_WEIGHT = 30.0, 1e-9  # length of a key, and the weight that counts as none
_BENT = "the same weights of long keys"
_SAME_NUMBERS, _NEAR_NUMBERS = "the same numbers", "nearly the same numbers"
_NEARLY = 0.05  # of the error that is found, for numbers to be nearly those of a defect


class _Draw(np.random.Generator):
    """Draws what a candidate drew: 1 where it kept a weight, 0 where it dropped it."""

    def __init__(self, kept: Any) -> None:
        super().__init__(np.random.PCG64(0))
        self.kept = kept

    def random(self, *args: Any, **kwargs: Any) -> Any:
        return 1.0 * self.kept


def suspect(
    results: list[Result],
    trials: list[CheckRun],
    others: list[_Suspect],
    asked: Sequence[Asked] = (),
    told: bool = False,
    end: float = math.inf,
) -> None:
    """Name, for each failure, known bugs with the same numbers or failed checks, or else others.

    Numbers are the same if they are so in the calls that were `asked` about as well. If no known
    bug gives them and no cause was `told`, a change of one step of the formula is searched for,
    until `end`; bugs with nearly the same numbers are named if there is none.
    """
    failed = {r.check for r in results if r.status in (FAIL, EXPECTED)}
    if not failed:
        return
    adapter = trials[0].adapter
    laws = {r.check for r in results if r.layer != "identity"}
    drawn = _same_checks(adapter, failed & laws, laws, _ENOUGH_LAWS, of_draws=True)
    for trial in (t for t in trials if drawn and t.omega is not None):
        drawn = [x for x in drawn if _same_moments(x[0], trial)]
    numbers = {t.name: _same_numbers(t, asked) for t in trials if t.name in failed - laws}
    sure = told or any(words == _SAME_NUMBERS for x in numbers.values() for _, words in x or ())
    if adapter.draws and adapter.has("random") and not (sure or others or drawn):
        ran = {r.check for r in results}
        others = _same_checks(adapter, failed, ran, _ENOUGH_CHECKS)
    if not sure:
        # At extreme inputs alone another formula may hold.
        formulas = {r.check for r in results if r.severity == "formula"} & numbers.keys()
        numbers |= _changed_step([t for t in trials if t.name in formulas], asked, end)
    for result, trial in zip(results, trials, strict=True):
        found: list[_Suspect] = []
        if result.check in failed and result.check in laws:
            bent = [x for x in others if x[1] == _BENT]  # which look like other frequencies
            found = bent or drawn or others
        elif result.check in failed:
            near = numbers[trial.name]
            # Where a cause is known, what is nearly like it is another.
            same = [x for x in near or () if x[1] == _SAME_NUMBERS or not sure]
            result.compared, found = near is not None, same[:_MOST_SUSPECTS]
        if result.check in failed and not (found or result.compared):
            found = others
        result.suspects = [f"{x.name} ({words}): {x.effect}" for x, words in found]
        result.changes = [x.shown() for x, _ in found]


def _changed_step(
    trials: Sequence[CheckRun], asked: Sequence[Asked], end: float
) -> dict[str, list[_Suspect] | None]:
    """Find a change of one step that gives the candidate's numbers, by the checks that it fails."""
    from ...mistakes.defects import VARIANTS

    if not trials:
        return {}
    adapter = trials[0].adapter
    failed = {t.name: y for t in trials if (y := _of_trial(t)) is not None}
    more = [_observed(adapter, x.case, x.got, x.want, x.allowed, range(len(x.got))) for x in asked]
    # The way back is another text.
    forth = any("d_out" not in x.options for x in (*failed.values(), *more))
    failed = {x: y for x, y in failed.items() if ("d_out" not in y.options) == forth}
    # Of other sizes, but not all: one that failed may have another mistake as well.
    small = sorted(failed.values(), key=lambda x: x.got.size)
    small = [*{str(x.sizes): x for x in reversed(small)}.values()][-_FEW_CALLS:]
    calls = [*small, *(x for x in more if ("d_out" not in x.options) == forth)]
    if not calls:
        return {}
    fns = (
        Stepped("", x.estimator, x.fn.over, features=x.fn.features)
        for x in VARIANTS
        if ESTIMATORS[x.estimator] is adapter.record and not x.fn.edits
    )
    change = find_change(fns, calls, end)
    if change is None:
        return {}
    return {x: [(change, _SAME_NUMBERS)] for x, y in failed.items() if change.explains(y)}


def _of_trial(trial: CheckRun) -> Observed | None:
    """Return the last call of a trial, if its numbers are compared and nothing is drawn."""
    case, part = trial.case, trial.part
    if case is None or case.want is None or trial.numbers is None or part is None:
        return None
    if "seed" in case.options:
        return None
    return _observed(trial.adapter, case, (trial.numbers,), (case.want,), (case.allowed,), (part,))


def _observed(
    adapter: Adapter,
    case: Call,
    got: Sequence[Any],
    want: Sequence[Any],
    allowed: Sequence[float],
    parts: Sequence[int],
) -> Observed:
    """Return a call and some of its results, as numbers in a row."""
    options = case.options | ({"ddof": adapter["ddof"]} if adapter.has("rows") else {})

    def run(fn: Edited) -> Any:
        found = of_function(adapter, fn, case.arrays, options, np.float64)
        found = found if isinstance(found, tuple) else (found,)
        return np.concat([np.ravel(found[i]) for i in parts])

    most = [np.full(np.size(x), y) for x, y in zip(want, allowed, strict=True)]
    rows = [np.concat([np.ravel(x) for x in y]) for y in (got, want, most)]
    sizes = dict(zip("nd", case.arrays[0].shape[-2:], strict=True))
    sizes |= {} if adapter.has("rows") else {"m": case.arrays[1].shape[-2]}
    sizes |= {"S": case.options["omega"].shape[-2]} if "omega" in case.options else {}
    return Observed(run, rows[0], rows[1], rows[2], sizes, case.options)


def _same_numbers(trial: CheckRun, asked: Sequence[Asked]) -> list[_Suspect] | None:
    """List defects that give the candidate's numbers, or else nearly these, the nearest first.

    None if they cannot be called as the candidate was when it failed.
    """
    from ...mistakes.defects import MUTANTS

    adapter, case, numbers = trial.adapter, trial.case, trial.numbers
    if case is None or case.want is None or numbers is None or trial.part is None:
        return None
    if adapter["scale"] is not None or ("seed" in case.options and trial.kept is None):
        return None
    options = case.options if trial.kept is None else {**case.options, "seed": _Draw(trial.kept)}
    given = {"lse" if name == "return_lse" else name for name in case.options}
    needed = ({*CAPABILITIES} & given) - {adapter.record.size}  # the window of EVA is its size
    gradient = "d_out" in case.options
    like = [x for x in asked if way_of(x.case) == way_of(case)]
    near = []
    for mutant in MUTANTS:
        if ESTIMATORS[mutant.estimator] is not adapter.record:
            continue
        able = {x.removesuffix("_only") for x in mutant.capabilities}
        if not needed <= able or gradient != ("vjp" in able):
            continue
        mutant.fn.space()  # an edit that cannot be made is no failure of the defect
        try:
            bug = Adapter(mutant.fn, mutant.estimator)
            got = bug(*case.arrays, **options)
        except Exception:  # a defect may be that it fails
            continue
        got = got[trial.part] if isinstance(got, tuple) else got
        if not np.all(np.isfinite(got)):
            continue
        error = float(np.max(np.abs(numbers - case.want), initial=0.0))
        apart = float(np.max(np.abs(got - numbers), initial=0.0))
        if apart < _NEARLY * error:  # nearer to what came than the right numbers are
            same = apart <= 4 * case.allowed
            if same and not all(x.is_given_by(bug) for x in like):
                continue  # small problems make mistakes alike
            # Those met in public code are the first of the same numbers.
            order = (not mutant.seen, 0.0) if same else (True, apart)
            near.append((*order, mutant.name, (mutant, _SAME_NUMBERS if same else _NEAR_NUMBERS)))
    if _is_right(trial) if near else trial.kept is not None:  # a defect may draw others
        return None
    return [found for *_, found in sorted(near, key=lambda x: x[:3])]


def _is_right(trial: CheckRun) -> bool:
    """Return whether the last numbers are right, and those that they should be equal to are not."""
    call, part = cast(Call, trial.case), cast(int, trial.part)
    evaluate = pulled if "d_out" in call.options else reference
    with suppress(Exception):  # a check may ask for what no formula has
        found = evaluate(trial.adapter, call.arrays, call.options)
        want, allowed = (x[part] if isinstance(x, tuple) else x for x in found)
        return bool(np.all(np.abs(trial.numbers - want) <= allowed))
    return False


def _same_checks(
    adapter: Adapter, failed: set[str], ran: set[str], least: int, of_draws: bool = False
) -> list[_Suspect]:
    """Return defects that fail the same of these checks, at least so many, unless others do, too.

    Those of draws are of the same coupling, and fail laws alone.
    """
    from ...mistakes.defects import MUTANTS
    from .explanations import kills

    if len(failed) < least:
        return []
    most = _MOST_SUSPECTS if of_draws else 1
    names = (adapter.record.name, *adapter.record.aliases)
    fails = {mutant: {*x} for name in names for mutant, x in kills().get(name, {}).items()}
    alike = [
        (x, "fails the same checks")
        for x in sorted(MUTANTS, key=lambda x: not x.seen)  # first those met in public code
        if fails.get(x.name, set()) & ran == failed
        and not (of_draws and x.tags.get("coupling", "iid") != adapter["coupling"])
        and not (of_draws and any(CHECKS[y].layer == "identity" for y in fails[x.name]))
    ]
    return alike if len(alike) <= most else []


def _same_moments(defect: Any, trial: CheckRun) -> bool:
    """Return whether no moment tells the frequencies of a defect from those recovered."""
    adapter = Adapter(defect.fn, defect.estimator, tags=defect.tags)
    other = CheckRun(adapter, trial.name, trial.seed, _DRAWS_OF_A_DEFECT)
    with suppress(Exception):  # a defect may be that it fails
        CHECKS[trial.name].run(other)
    mine, theirs = trial.omega, other.omega
    if mine is None or theirs is None or mine.shape[-1] != theirs.shape[-1]:
        return True
    for (_, a, *_), (_, b, *_) in zip(
        frequency_moments(mine), frequency_moments(theirs), strict=True
    ):
        spread = math.sqrt(np.var(a) / len(a) + np.var(b) / len(b))
        if abs(np.mean(a) - np.mean(b)) > FAR_OFF * spread + 1e-3:  # for rounding, if none vary
            return False
    return True


def weighing_keys_alike(trial: CheckRun) -> list[_Suspect]:
    """Return defects that weigh long keys as a black box does, whose frequencies are not known.

    At S = 1 the logarithm of a weight is omega . k - |k|^2 / 2. At 2 k, less twice that at k, it
    does not depend on omega. Keys of length 30 in opposite directions have equal weights only if
    these are 0, or a constant that is added to features.
    """
    from ...mistakes.defects import MUTANTS

    adapter, (n, m, d) = trial.adapter, trial.fit(1, 5, 4)
    known = adapter.draws and adapter.has("random-features", "normalised")
    if not known or adapter["scale"] is not None or adapter["features"] != "positive":
        return []
    k, x = np.zeros((m, d)), trial.normal(2, d, size=0.5)
    k[1:5] = *x, *(2 * x)
    long = np.zeros((m, d))
    long[1:3] = np.outer((1, -1), _LONG * x[0] / np.linalg.norm(x[0]))
    long *= shrink(adapter, 0 * long, long)

    def bend(call: Callable[..., Any], **options: Any) -> Any:
        rows = [call(np.zeros((n, d)), keys, np.eye(m), **options)[0] for keys in (k, long)]
        log, ends = np.log(np.maximum(rows, _LEAST_WEIGHT))
        least = ends[1] - ends[0] if abs(ends[1] - ends[2]) < _NEARLY else 0.0
        return np.asarray([*(log[3:5] - 2 * log[1:3] + log[0]), log[1] == log[2], least])

    got, omega, near = bend(trial.call, **trial.options(1)), trial.rng.standard_normal((1, d)), []
    want = bend(Adapter(adapter.record.naive, adapter.record.name), omega=omega)
    limits = _NEARLY * np.maximum(np.abs(got - want), np.sum(x**2) / 2)
    off = np.abs(got - want) > limits
    words = _BENT if np.any(off[:3]) else "the same least weight of a key"
    for mutant in MUTANTS if np.any(off) else ():
        if ESTIMATORS[mutant.estimator] is adapter.record and "vjp" not in mutant.capabilities:
            with suppress(Exception), np.errstate(all="ignore"):  # a defect may be that it fails
                bent = bend(Adapter(mutant.fn, mutant.estimator), omega=omega)
                if np.all(np.abs(bent - got) <= limits):
                    near.append((mutant, words))
    return sorted(near, key=lambda x: not x[0].seen)[:_MOST_SUSPECTS]
