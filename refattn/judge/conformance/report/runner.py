"""Run the checks that apply to a candidate, at one error probability, and make the report."""

from __future__ import annotations

import os
import secrets
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import islice
from typing import Any

import numpy as np

from ....arrays import checks as arrays_checks
from ....arrays.words import said, with_known_keywords
from ... import stats
from ..candidate.adapter import Adapter
from ..candidate.failures import Beyond, Failure, Unrepeatable, WrongRecord
from ..candidate.isolation import Crash, Elsewhere, isolated
from ..candidate.limits import leaving_out, sizes
from ..candidate.tags import CHOICES, LISTING, write_tag
from ..checks.recovery import refuse_other_formulas
from ..checks.trials import CHECKS, Check, CheckRun, attends
from .advice import advise
from .causes import Asked, ask_again, name_cause, name_ignored
from .draws import name_factor_of_kernel, name_frequencies
from .failures import Failures
from .interrupts import interrupt
from .neighbours import diagnose
from .refusals import describe_call, name_keyword, name_layout
from .report import EXPECTED, FAIL, PASS, STALE, UNDERPOWERED, Report, Result
from .reproduce import reproducer
from .severity import find_severity
from .suspects import suspect, weighing_keys_alike
from .untried import not_tried

# Seeds a statistical check may use, and seconds its calls may take; fewer seeds if they are slow.
LEVELS = {"quick": 2000, "full": 8000}
_BUDGET = {"quick": 60.0, "full": 300.0}
_SHARE_OF_DRAWS = 0.8  # of the time that a law has
_WORTH_IT = 1.5  # times as long, to draw again
TIME_LIMITS = {level: 2 * seconds for level, seconds in _BUDGET.items()}  # of a whole run
_TO_DIAGNOSE = 30.0  # seconds
_OF_COUPLINGS = {"frequency_pairs", "feature_sums", "feature_average", "unseen_law"}
_FEW_SEEDS = 500  # for each other coupling or feature map


@with_known_keywords
def check(
    fn: Callable[..., Any],
    *,
    estimator: str | None = None,
    capabilities: Iterable[str] = (),
    tags: Mapping[str, Any] | None = None,
    level: str = "quick",
    alpha: float = 1e-6,
    rng: Any = 0,
    expected_failures: Mapping[str, str] | None = None,
    checks: Iterable[str] | None = None,
    time_limit: float | None = None,
    isolate: bool = False,
    mistakes: str | os.PathLike[str] | None = None,
    on_result: Callable[[Result], None] | None = None,
    track: Callable[[Sequence[Check]], Iterable[Check]] = iter,
) -> Report:
    r"""Check that an implementation of an attention estimator is right.

    A candidate is called with q, k, v (or x, y) by position and everything else by keyword:

    ============  ======================================  =======================================
    estimator     black box                               with a capability
    ============  ======================================  =======================================
    ``softmax``   ``fn(q, k, v)``                         ``mask=``, ``causal=True``
    ``kernel``    ``fn(x, y, num_features=, seed=)``      ``omega``: ``fn(x, y, omega=)``;
                                                          ``feature_map``: ``fn(x, omega=)``
    ``rfa``       ``fn(q, k, v, num_features=, seed=)``   ``omega``: ``fn(q, k, v, omega=)``;
                                                          ``moments``: also ``mean=, cov=``
    ``ra``        ``fn(q, k, v, num_samples=, seed=)``    ``omega`` of shape (..., n, S, d)
    ``lara``      ``fn(q, k, v, num_proposals=, seed=)``  ``omega``: ``fn(..., omega=, centres=)``
    ``coreset``   ``fn(q, k, v, num_keys=, seed=)``       ``indices``: ``fn(q, k, v, indices=)``
    ``linear``    ``fn(q, k, v)``                         as softmax
    ``rwkv7``     ``fn(q, k, v, log_decay=, removal=)``   ``initial_state``: -> (out, state)
    ``moments``   ``fn(x)`` -> (mean, cov)
    ============  ======================================  =======================================

    Results are compared with the package's own evaluation in extended precision, within the
    rounding error of a careful evaluation in the candidate's dtype. The frequencies of a black box
    are recovered from its outputs, and their distribution is tested exactly. Recurrences take gates
    by keyword, as in `refattn.recurrences`, and may return (out, state) in every call.

    Several calls with one seed are compared: with the same inputs and, except for RA (whose draws
    depend on queries and keys), with other inputs of the same shapes. So the frequencies of RFA and
    of a kernel estimate may depend only on the seed, their number and their length.

    All declared capabilities must also work together: masks of any shape that broadcasts, causal,
    grouped heads; for exact attention also ``window=``, ``softcap=``, ``sinks=``, ``bias=`` and
    ``return_lse=True``, for ``(out, lse)``. A candidate may raise an exception for any two of a
    mask, a bias and causal together. With a cotangent ``d_lse=`` it returns the same arrays as
    without: the output and the gradients. No check combines ``lse`` with sinks or dropout, or
    dropout (``dropout=p`` and ``seed=``) with more than two other capabilities. No check calls a
    candidate from several threads at once, with empty arrays, or with seeds of 2^31 and more.

    Parameters
    ----------
    fn : callable or Adapter
        The implementation; an `Adapter` has the next three arguments already.
    estimator, capabilities, tags
        See `Adapter`.
    level : {"quick", "full"}
        2,000 or 8,000 seeds for each sample of a statistical check.
    alpha : float
        Largest probability that a correct implementation fails, over all checks together.
    rng : None, int, numpy.random.SeedSequence or numpy.random.Generator
        Source of inputs and seeds. The report has the seed to pass for the same run.
    expected_failures : mapping of check names to reasons, optional
        These checks still run; their failure does not count, and passing is an error.
    checks : iterable of str, optional
        Run these only.
    time_limit : float, optional
        Seconds for the whole run, also for the import of an isolated candidate; by default 120, or
        600 at level full. A check may take half of its share of the remaining time; slow candidates
        get fewer seeds. When the time is over, a check fails if the candidate seems to hang, and is
        underpowered if it is only slow; the remaining checks are not run.
    isolate : bool
        Call the candidate in its own process. A crash of that process is a failure of the check
        that ran, and the remaining checks are not run. The process must be able to import the
        candidate; a script that passes this needs ``if __name__ == "__main__":``.
    mistakes : path, optional
        A file of known bugs of your own that are tried first as causes, as in `refattn.verify`.
    on_result : callable, optional
        Called with each `Result` as it ends; statistical ones may still change.
    track : callable
        Wraps the sequence of the checks, for example to show progress.

    Returns
    -------
    Report
        The verdict and one result for each check.

    Raises
    ------
    TypeError, ValueError
        If an argument is unusable; if `expected_failures` or `checks` name a check that is unknown
        or does not apply; if `isolate` is passed with a program, or with a candidate that cannot be
        imported. An exception in the candidate is a failure, and is not raised.

    Examples
    --------
    >>> import refattn
    >>> report = refattn.conformance.check(
    ...     refattn.softmax_attention, estimator="softmax", capabilities=["mask", "causal"]
    ... )
    >>> report.verdict
    'PASS'
    """
    adapter = _adapter_of(fn, estimator, capabilities, tags)
    _usable(adapter)
    refuse_other_formulas(adapter)
    arrays_checks.choice("level", level, LEVELS)
    alpha = arrays_checks.real("alpha", alpha, positive=True)
    if alpha >= 1:
        raise ValueError(f"`alpha` must be below 1, got {alpha!r}.")
    limit = arrays_checks.real("time_limit", time_limit, positive=True, optional=True)
    limit = 2 * _BUDGET[level] if limit is None else limit
    if on_result is not None and not callable(on_result):
        raise TypeError(f"`on_result` must be callable, got {type(on_result).__name__}.")
    if mistakes is not None:
        from ...mistakes.defects.catalogue import read_mistakes

        read_mistakes(mistakes)  # a bad file is refused before anything runs
        mistakes = os.path.abspath(mistakes)  # a candidate may change the working directory
    seed = _seed_of(rng)
    chosen = {c.name: c for c in checks_of(adapter)}
    expected = _reasons(expected_failures)
    _refuse_unknown("expected_failures", expected, chosen)
    if checks is not None:
        names = arrays_checks.list_names("checks", checks)
        if not names:
            raise ValueError("`checks` must name at least one check, got none.")
        _refuse_unknown("checks", names, chosen)
        chosen = {name: c for name, c in chosen.items() if name in names}
    results: list[Result] = []
    trials: list[CheckRun] = []
    context = isolated if isolate or isinstance(adapter.fn, Elsewhere) else nullcontext
    start = adapter.fn.start if isinstance(adapter.fn, Elsewhere) else time.monotonic()
    end, most = start + limit, _BUDGET[level] * max(1.0, limit / TIME_LIMITS[level])
    stopped, beyond, times = "", dict[str, str](), dict[Any, list[float]]()
    with context(adapter) as candidate:
        for i, item in enumerate(track(list(chosen.values()))):
            left = max(end - time.monotonic(), 0.0)
            # Laws use all the time that they are given, so they share what is left.
            laws_left = sum(x.layer != "identity" for x in list(chosen.values())[i:])
            shares = 1 if item.layer == "identity" else laws_left
            budget = min(most, _SHARE_OF_DRAWS * left / shares)
            trial = CheckRun(candidate, item.name, seed, LEVELS[level], budget, level, times=times)
            result = _run_check(item, trial, left, limit / 2)
            if trial.beyond and trial.error is None and not trial.p:  # nothing was asked
                beyond[item.name] = trial.beyond
                continue
            results.append(result)
            # A thread that is late may still write to its own.
            trials.append(replace(trial, p=dict(trial.p), power=dict(trial.power)))
            if on_result is not None:
                on_result(result)
            stopped = _stops(item, trial, result)
            if stopped:
                break
        # Those that the clock cut short, whatever they found, share the time that others left.
        slow = [i for i, t in enumerate(trials) if t.reached < 1 and not stopped]
        for place, i in enumerate(slow):
            left = max(end - time.monotonic(), 0.0)
            budget = min(most, _SHARE_OF_DRAWS * left / (len(slow) - place))
            if budget > _WORTH_IT * trials[i].budget:
                item = chosen[results[i].check]
                trial = replace(trials[i].anew(), budget=budget)
                results[i], trials[i] = _run_check(item, trial, left, limit / 2), trial
        spent = time.monotonic() - start
        wrong = not stopped and any(r.status == FAIL for r in results)
        _correct(results, trials, alpha)
        failed = [r.check for r in results if r.status == FAIL]
        diagnosis, weighing, asked = list[str](), list[Any](), list[Asked]()
        if wrong and any(chosen[name].layer == "identity" for name in failed):
            within = partial(_within, candidate, seed, end)
            # Wrong at extreme inputs only is no other convention.
            formulas = {r.check for r in results if r.status == FAIL and r.severity == "formula"}
            diagnosis = within(partial(diagnose, failed=[chosen[x] for x in formulas]))
            called = [t for t in trials if t.name in formulas]
            asked = within(partial(ask_again, failed=called))
            diagnosis = diagnosis or within(partial(name_ignored, failed=called))
            diagnosis = diagnosis or within(partial(name_cause, asked=asked, mistakes=mistakes))
            weighing = within(weighing_keys_alike)
        if failed and not (diagnosis or stopped):
            diagnosis = _within(candidate, seed, end, name_factor_of_kernel) or name_frequencies(
                trials
            )
            diagnosis = diagnosis or _other_draws(candidate, failed, seed, alpha, end)
    again = {"rng": seed, "level": level, "alpha": alpha}
    again |= {} if time_limit is None else {"time_limit": limit}
    again |= {"isolate": True} if isolate or any(t.crashed for t in trials) else {}
    # Right at ordinary inputs: a declared limit on logits may be what is missing.
    only_range = {r.severity for r in results if r.status == FAIL} <= {"range", "masked"}
    for result, trial in zip(results, trials, strict=True):
        if result.status == FAIL:
            if only_range and result.severity == "range" and trial.case and attends(adapter):
                result.got += leaving_out(adapter, trial.case.arrays)
            result.reproducer = reproducer(trial, result, again)
            if result.check in expected:
                result.status, result.reason = EXPECTED, expected[result.check]
        elif result.check in expected and result.status == PASS:
            result.status, result.reason = STALE, expected[result.check]
        if result.status not in (FAIL, EXPECTED):
            result.severity = ""
    until = min(end, time.monotonic() + _TO_DIAGNOSE)
    suspect(results, trials, weighing, asked, bool(diagnosis), until)
    return Report(
        adapter.name or "",
        adapter.estimator,
        tuple(sorted(adapter.capabilities)),
        dict(adapter.tags or {}),
        level,
        alpha,
        seed,
        results,
        not_tried(adapter, chosen)
        | beyond
        | {t.name: "; ".join(t.untried) for t in trials if t.untried}
        | dict.fromkeys(list(chosen)[len(results) + len(beyond) :], stopped),
        adapter.limits,
        diagnosis,
        advice=advise(results, trials, LEVELS, level, limit, spent),
    )


def _within(candidate: Adapter, seed: int, end: float, find: Callable[..., Any]) -> list[Any]:
    """Return what a diagnosis finds that calls the candidate, as far as time allows."""
    found: list[Any] = []
    trial = CheckRun(candidate, "diagnosis", seed)
    item = Check("", "", "identity", frozenset(), attends, lambda t: found.extend(find(t)))
    limit = min(max(end - time.monotonic(), 0.0), _TO_DIAGNOSE)
    _run_check(item, trial, limit, limit)
    return list(found)


def _other_draws(
    candidate: Adapter, failed: list[str], seed: int, alpha: float, end: float
) -> list[str]:
    """Name the couplings, or else the features, under which the checks that fail would pass.

    A single frequency has one distribution, which no coupling changes. Identities and tests of
    pairs come first, and the first that fails ends the trial of a value.
    """
    if not (candidate.has("random-features") and candidate.draws):
        return []
    tag, more = "coupling", {"frequency_pairs"}
    if not set(failed) <= _OF_COUPLINGS:
        tag, more = "features", {"one_function", "frequency_law"}
    names, end = [], min(end, time.monotonic() + _TO_DIAGNOSE)
    for value in (x for x in CHOICES[tag] if x != candidate[tag]):
        # The same function, declared otherwise.
        other = replace(candidate, tags={**(candidate.tags or {}), tag: value})
        items = [x for x in checks_of(other) if x.name in {*more, *failed}]
        for item in sorted(items, key=lambda x: (x.layer != "identity", x.name not in more)):
            rest = max(end - time.monotonic(), 0.0)
            trial = CheckRun(other, item.name, seed, _FEW_SEEDS, rest / 2)
            result = _run_check(item, trial, rest, rest)
            _correct([result], [trial], alpha)
            if result.status != PASS:
                break
        else:
            names += [value] * bool(items)
    return [f"matches your declaration except that {tag} is {' or '.join(names)}"] * bool(names)


def _stops(item: Check, trial: CheckRun, result: Result) -> str:
    """Return why no other check can say more, if none can."""
    if result.status == FAIL and trial.over:
        return "the candidate hangs"
    if result.status == UNDERPOWERED and trial.over:
        return "interrupted" if trial.interrupted else "time is over"
    if trial.crashed:
        return "the candidate crashed"
    if item.name == "contract" and trial.refused and trial.calls == 0:
        result.got = f"{result.got}{name_layout(trial)}; {describe_call(trial)}"
        return trial.refused
    if trial.refused == Unrepeatable.stops:
        return trial.refused
    result.got += name_keyword(trial.adapter, result.got)
    return ""


def checks_of(adapter: Adapter) -> Iterator[Check]:
    """Return the checks that apply to a candidate."""
    return (item for item in CHECKS.values() if item.applies(adapter))


@with_known_keywords
def parametrize_with_checks(
    candidates: Iterable[Adapter],
    *,
    level: str = "quick",
    alpha: float = 1e-6,
    rng: Any = 0,
    expected_failures: Mapping[str, str] | None = None,
) -> Any:
    """Make a pytest test of every check of every candidate, as a decorator.

    The decorated test has one argument, ``check``, to call. The error probability of each test
    is alpha divided by the number of statistical checks of the candidate (Bonferroni), so that
    a correct candidate fails any with probability at most alpha.

    Parameters
    ----------
    candidates : iterable of Adapter
        The implementations.
    level, alpha, rng, expected_failures
        As in `check`; a check that is expected to fail runs, and fails if it passes. One that is
        underpowered is skipped. `expected_failures` may hold a mapping for each candidate, by name.

    Examples
    --------
    >>> import refattn
    >>> from refattn.judge.conformance import Adapter, parametrize_with_checks
    >>> @parametrize_with_checks([Adapter(refattn.softmax_attention, "softmax")])
    ... def test_attention(check):
    ...     check()
    """
    import pytest

    cases = []
    nested = isinstance(expected_failures, Mapping) and all(
        isinstance(x, Mapping) for x in expected_failures.values()
    )
    expected: dict[str, Any] = (
        {str(name): _reasons(x) for name, x in (expected_failures or {}).items()}
        if nested
        else _reasons(expected_failures)
    )
    adapters = list(candidates)
    for adapter in adapters:
        if not isinstance(adapter, Adapter):
            raise TypeError(f"`candidates` must be Adapters, got {type(adapter).__name__}.")
    for adapter in adapters:
        told = Failures(_label(adapter, adapters))
        chosen = list(checks_of(adapter))
        reasons_of = expected.get(str(adapter.name), {}) if nested else expected
        _refuse_unknown("expected_failures", reasons_of, [c.name for c in chosen])
        # Each law is a test of its own here, without Holm's correction over the run.
        statistical = max(sum(c.layer != "identity" for c in chosen), 1)
        for item in chosen:

            def run(
                adapter: Adapter = adapter,
                name: str = item.name,
                n: int = statistical,
                reasons_of: Mapping[str, str] = reasons_of,
                told: Failures = told,
            ) -> None:
                __tracebackhide__ = True  # pytest shows the report, not this code
                reasons = {k: x for k, x in reasons_of.items() if k == name}
                report = check(
                    adapter,
                    level=level,
                    alpha=alpha / n,
                    rng=rng,
                    checks=[name],
                    expected_failures=reasons,
                )
                if not report.results:
                    pytest.skip(report.not_tried[name])
                result = report.results[0]
                if report.verdict == FAIL:
                    raise AssertionError(told.describe(report))
                if result.status == EXPECTED:
                    pytest.xfail(result.reason)
                if result.status == UNDERPOWERED:
                    pytest.skip(f"underpowered: {result.summary}")

            cases.append(pytest.param(run, id=f"{_label(adapter, adapters)}-{item.name}"))
    return pytest.mark.parametrize("check", cases)


def _label(adapter: Adapter, others: Iterable[Adapter]) -> str:
    """Return the name of an adapter, and the tags that tell it from others of that name."""
    same = [x for x in others if x.name == adapter.name]
    tags = (adapter.tags or {}).items()
    differ = [write_tag(value) for tag, value in tags if any(x[tag] != value for x in same)]
    return "-".join([str(adapter.name), *differ])


def _adapter_of(fn: Any, estimator: str | None, capabilities: Any, tags: Any) -> Adapter:
    if isinstance(fn, Adapter):
        if estimator not in (None, fn.estimator) or capabilities or tags:
            raise ValueError("`estimator`, `capabilities` and `tags` must be left to the Adapter.")
        return fn
    if estimator is None:
        raise TypeError("`estimator` must be given: what does `fn` compute?")
    return Adapter(fn, estimator, capabilities, tags)


def _usable(adapter: Adapter) -> None:
    """Refuse what the libraries at hand cannot give to any candidate."""
    if adapter["dtype"] == "bfloat16" and adapter["library"] in ("numpy", "cupy"):
        raise ValueError(
            "`tags['dtype']` must be one that the library has, got 'bfloat16' for "
            f"{adapter['library']}."
        )
    if adapter["library"] != "jax" or adapter["dtype"] != "float64":
        return
    with suppress(ModuleNotFoundError):  # which the checks say
        if not import_module("jax").config.jax_enable_x64:
            raise ValueError(
                "`tags['dtype']` must not be float64 for JAX unless jax_enable_x64 is set "
                "(JAX_ENABLE_X64=1), got float64."
            )


def _seed_of(rng: Any) -> int:
    if rng is None:
        return secrets.randbits(31)
    if isinstance(rng, int | np.integer) and not isinstance(rng, bool):
        arrays_checks.non_negative_integer("rng", rng)
        if rng >= 2**128:  # more than NumPy's seeds hold
            bits = int(rng).bit_length()
            raise ValueError(f"`rng` must be below 2**128, got an integer of {bits} bits.")
        return int(rng)
    return int(arrays_checks.generator(rng).integers(2**31))


def _reasons(expected_failures: Any) -> dict[str, str]:
    if expected_failures is None:
        return {}
    if not isinstance(expected_failures, Mapping):
        kind = type(expected_failures).__name__
        raise TypeError(
            f"`expected_failures` must be a mapping of check names to reasons, got {kind}."
        )
    return {str(name): str(reason) for name, reason in expected_failures.items()}


def _refuse_unknown(argument: str, names: Iterable[str], chosen: Iterable[str]) -> None:
    for name in names:
        if name not in CHECKS:
            arrays_checks.choice(argument, name, CHECKS, listing=LISTING)
        if name not in chosen:
            raise ValueError(f"`{argument}` must name checks of this candidate, got {name!r}.")


def _run_check(item: Check, trial: CheckRun, limit: float, patience: float) -> Result:
    """Run one check within its time, whatever the candidate does.

    One whose call is not back after `patience` hangs; less of what is left is no evidence of that.
    """
    result = Result(item.name, item.claim, item.layer)
    start = time.perf_counter()
    outcome: list[BaseException | None] = []

    def work() -> None:
        try:
            with np.errstate(all="ignore"):
                item.run(trial)
            outcome.append(None)
        except BaseException as error:  # also SystemExit and the like, from the candidate
            outcome.append(error)

    thread = threading.Thread(target=work, daemon=True, name=f"check {item.name}")
    try:
        thread.start()
        thread.join(min(limit, threading.TIMEOUT_MAX))
    except KeyboardInterrupt:
        trial.interrupted = True
    late = thread.is_alive() or trial.interrupted
    trial.refused = "" if late else getattr(outcome[0], "stops", "")
    calls, since = trial.calls, trial.since
    # A call that has not returned, however many came before it.
    hangs = since is not None and time.monotonic() - since > patience and not trial.interrupted
    if late:
        trial.over = True  # no further calls
        if since is not None:
            interrupt(thread)
    error = None if late else outcome[0]
    if isinstance(error, WrongRecord):
        raise error
    trial.crashed = isinstance(error, Crash)
    result.seconds = time.perf_counter() - start
    result.error, result.samples = trial.error, trial.samples
    if late or trial.crashed or (error is not None and not isinstance(error, Failure)):
        trial.case = None  # no call alone shows this
    with np.errstate(all="ignore"):
        result.severity = find_severity(item, trial, error)
    if late:
        result.status = FAIL if hangs else UNDERPOWERED
        result.expected = f"an answer within {limit:.3g} s"
        why = "interrupted" if trial.interrupted else "no answer"
        result.got = "none" if hangs else f"{why} after {calls} calls"
    elif isinstance(error, Beyond):
        trial.beyond = str(error)
        trial.untried.append(f"other cases are {error}")
    elif isinstance(error, Failure):
        result.status, result.expected, result.got = FAIL, error.expected, error.got
        if result.severity == "range" and trial.case is not None and attends(trial.adapter):
            result.got += f", at {sizes(trial.adapter, trial.case.arrays)}"
    elif isinstance(error, ModuleNotFoundError):
        result.status, result.expected, result.got = FAIL, "an installed library", said(error)
    elif error is not None:
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {said(error)} ({where.name}, line {where.lineno})"
        result.status, result.expected, result.got = FAIL, "a result", text
    return result


def _correct(results: list[Result], trials: list[CheckRun], alpha: float) -> None:
    """Correct all p-values of the run by Holm's method; at most alpha is a failure.

    What a check detects is reckoned at the smallest level that Holm's method may hold it to.
    """
    named = [(r, name, p) for r, t in zip(results, trials, strict=True) for name, p in t.p.items()]
    adjusted: Any = stats.holm([p for _, _, p in named]) if named else []
    for (result, name, p), corrected in zip(named, adjusted, strict=True):
        if result.adjusted is None or (corrected, p) < (result.adjusted, result.p):
            result.p, result.adjusted, result.statistic = float(p), float(corrected), name
    for result, trial in zip(results, trials, strict=True):
        for name, (detectable, target) in trial.power.items():
            result.detectable[name] = detectable(alpha / max(len(named), 1))
            result.target[name] = target
        if result.status == FAIL:
            continue
        if result.adjusted is not None and result.adjusted <= alpha:
            result.status = FAIL
            result.expected = f"that {result.claim}"
            found = (y for x, y in trial.effects.items() if result.statistic.startswith(x))
            result.got = f"p = {result.p:.2g} ({result.statistic}), adjusted {result.adjusted:.2g}"
            result.got = ": ".join([*islice(found, 1), result.got])
        elif any(result.detectable[name] > target for name, target in result.target.items()) or (
            not trial.p and trial.error is None  # nothing was compared
        ):
            if not trial.p and trial.error is None and not result.expected:
                result.expected = "something that can be compared"
                result.got = "nothing: rounding or the declared tags may hide everything"
            result.status = UNDERPOWERED
