"""The command `refattn check`: load a candidate, run its checks, and print or write the report."""

from __future__ import annotations

import inspect
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..arrays.words import printable
from .options import (
    Answer,
    Unusable,
    alpha_option,
    examples,
    file_option,
    format_option,
    installed,
    mistakes_option,
    needed,
    one_line,
    publish,
    seed_or_random,
    words_of,
)
from .progress import checking, notice
from .show.page import Page, hanging, limit
from .streams import kept, unread

if TYPE_CHECKING:
    from ..registry import Estimator

_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_ROOM = 24  # characters beside a word, at least, or its meaning is below it


def _list(context: click.Context, parameter: click.Parameter, asked: bool) -> None:
    """Print the names that `check` knows, with their meanings, or the table of conventions."""
    if not asked or context.resilient_parsing:
        return
    conformance = needed("judge.conformance")
    from ..judge.conformance.candidate.tags import write_tag

    page = limit() or 100
    if parameter.name == "list_specs":
        with unread():
            click.echo(hanging(conformance.conventions.listing(min(page, 98)), limit()))
        context.exit()
    known = {
        "--estimator": {
            ", ".join((record.name, *record.aliases)): _describe_estimator(record)
            for record in dict.fromkeys(conformance.ESTIMATORS.values())
        },
        "--capability": conformance.CAPABILITIES,
        "--tag": conformance.TAGS,
        "--spec": {
            name: " ".join(f"{tag}={write_tag(value)}" for tag, value in tags.items())
            for name, tags in conformance.SPECS.items()
        },
        "--check": {name: f"{check.claim}." for name, check in conformance.CHECKS.items()},
    }
    with unread():
        for option, words in known.items():
            click.echo("\n".join([option, *_glossary(words, min(page, 100))]))
    context.exit()


def _glossary(words: Mapping[str, str], page: int) -> Iterator[str]:
    """Yield lines of words with their meanings beside them, or below if there is little room."""
    width = max(map(len, words))
    beside = page - width - 4 >= _ROOM
    indent = " " * (width + 4 if beside else 6)
    for word, meaning in words.items():
        text = textwrap.wrap(
            *(meaning, page),
            initial_indent=indent,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
        if beside:
            text[0] = f"  {word:<{width}}  {text[0].lstrip()}"
        else:
            yield hanging(f"  {word}", page)
        yield from text


def _describe_estimator(record: Estimator) -> str:
    """Describe an estimator in the words of its formula, and list its capabilities."""
    from ..judge.conformance.candidate.tags import possible
    from ..judge.conformance.report.explanations import summarise

    able = possible(record)
    summary = summarise(record)
    return f"{summary} Capabilities: {', '.join(able)}." if able else summary


@click.command(
    epilog=examples(
        "refattn check refattn:random_feature_attention --estimator rfa --capability omega",
        "refattn check refattn:softmax_attention --estimator softmax --format csv",
        "refattn check --list",
    )
)
@click.argument("target", metavar="MODULE:CALLABLE")
@click.option(
    "--list",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_list,
    help="Explain every estimator, capability, tag, spec and check.",
)
@click.option(
    "--list-specs",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_list,
    help="Print the conventions of well-known functions, and the source of each.",
)
@click.option(
    "--estimator",
    shell_complete=words_of(lambda: needed("judge.conformance").ESTIMATORS),
    help="Which estimator it implements: softmax, rfa, performer, lara, ra, eva, linear, ...  "
    "[default: softmax, if it needs only q, k, v]",
)
@click.option(
    *("--capability", "capabilities"),
    multiple=True,
    shell_complete=words_of(lambda: needed("judge.conformance").CAPABILITIES),
    help="A feature it supports (see --list); repeatable.",
)
@click.option(
    *("--tag", "tags"),
    multiple=True,
    metavar="KEY=VALUE",
    shell_complete=words_of(lambda: [f"{tag}=" for tag in needed("judge.conformance").TAGS]),
    help="A convention or limit of the implementation (see --list); repeatable.",
)
@click.option(
    "--spec",
    shell_complete=words_of(lambda: needed("judge.conformance").SPECS),
    help="Conventions of a well-known function; see --list-specs.",
)
@click.option(
    "--level",
    type=click.Choice(["quick", "full"]),
    default="quick",
    show_default=True,
    help="Number of seeds in statistical checks: 2,000 or 8,000.",
)
@alpha_option("implementation")
@format_option
@file_option("json", "Write the report as JSON.")
@file_option("html", "Write the report as a standalone page.")
@click.option(
    "--seed",
    default="0",
    show_default=True,
    callback=seed_or_random,
    help="Random seed, or `random`.",
)
@click.option(
    *("--check", "names"),
    multiple=True,
    shell_complete=words_of(lambda: needed("judge.conformance").CHECKS),
    help="Run this check only; repeatable.",
)
@click.option(
    "--time-limit", type=float, help="Seconds for the whole run.  [default: 120 at level quick]"
)
@click.option(
    *("--subprocess", "program"),
    type=click.Choice(["safetensors", "npz"]),
    help="The argument is a command that reads and writes such files, not MODULE:CALLABLE.",
)
@click.option(
    "--isolate/--in-process",
    default=None,
    help="Import and call MODULE:CALLABLE in its own process, or in this one, where it may change "
    "what judges it.  [default: in its own]",
)
@mistakes_option
@click.option("--reproducers", is_flag=True, help="Print a script for each failure.")
@click.option(
    "--verbose", is_flag=True, help="List every check, also those that passed or did not run."
)
@click.pass_context
def check(
    context: click.Context,
    /,
    target: str,
    kind: str,
    json_path: Path | None,
    html_path: Path | None,
    reproducers: bool,
    verbose: bool,
    **options: Any,
) -> None:
    """Check an implementation of an attention estimator.

    q, k and v (or x and y) are passed by position and everything else by keyword: see the
    documentation of refattn.check. The exit status is 0 for PASS, 1 for FAIL, 3 for
    UNDERPOWERED, and 2 after an error: the arguments are unusable, the report cannot be written,
    or, with --in-process, your function ended the process; otherwise that is a FAIL.
    """
    if sys.stdout is None:
        raise Unusable("cannot write the results: standard output is closed")
    if html_path is not None:
        installed("--html", "jinja2")
    with one_line(False):
        try:
            with kept(kind != "table"):
                report = _run_checks(target, options)
        except (TypeError, ValueError) as error:
            error.args = (_ARGUMENTS.sub(_name_option, str(error)),)
            raise
        except (KeyboardInterrupt, SystemExit) as error:
            raise Unusable(f"ended by {type(error).__name__}, without a verdict") from None
    show = partial(_print_report, report, reproducers, verbose=verbose)
    publish(
        Answer(show, report.tables, report.to_json, report.to_html),
        kind,
        json_path,
        html_path=html_path,
    )
    context.exit({"PASS": 0, "FAIL": 1, "UNDERPOWERED": 3}[report.verdict])


def _print_report(report: Any, reproducers: bool, page: Page, *, verbose: bool) -> None:
    """Print a report of checks, in Markdown as a table, and scripts that reproduce its failures."""
    if page.markdown:
        page.say(str(report).splitlines()[0])
        for line in filter(None, (report.conclusion, *report.diagnosis, report.advice)):
            page.say(printable(line))
        page.table(*report.tables())
        for name, text in report.limits.items():
            page.say(printable(f"limit of the verdict: {name}: {text}"))
        page.say(report.guarantee)
    else:
        page.report(report.text(min(limit() or 100, 100), verbose=verbose))
    for result in report.results if reproducers else ():
        if result.reproducer:
            page.block(printable(f"\n# {result.check}\n{result.reproducer}").removesuffix("\n"))


# Arguments of `conformance.check` in its messages, and the options that they come from.
_ARGUMENTS = re.compile(r"`(capabilities|checks|estimator|tags)(?:\['(\w+)'\])?`")
_OPTIONS = {"capabilities": "capability", "checks": "check", "tags": "tag"}


def _name_option(match: re.Match[str]) -> str:
    option, tag = _OPTIONS.get(match[1], match[1]), f" {match[2]}" if match[2] else ""
    return f"`--{option}{tag}`"


def _run_checks(target: str, options: dict[str, Any]) -> Any:
    """Run the checks on what the command line names."""
    from ..arrays import checks
    from ..judge import conformance
    from ..judge.conformance.candidate.target import import_target

    estimator, capabilities, tags, spec, seed, names, program = map(
        options.pop, ("estimator", "capabilities", "tags", "spec", "seed", "names", "program")
    )
    pairs = dict(tag.partition("=")[::2] for tag in tags)
    for tag in tags:
        if "=" not in tag:
            raise ValueError(f"`--tag` must be KEY=VALUE, got {tag!r}.")
    if spec is not None:
        checks.choice("--spec", spec, conformance.SPECS, listing="refattn check --list")
        pairs = {**conformance.SPECS[spec], **pairs}
    most = options["time_limit"] or conformance.TIME_LIMITS[options["level"]]
    apart = options.pop("isolate")
    if program is not None and apart:
        raise ValueError("`isolate` must be left out for a program: it has a process of its own.")
    apart = most if apart is not False else None
    with _candidate(target, estimator, program, apart) as (fn, source):
        estimator = estimator or _guess_estimator(fn)
        imported = estimator not in conformance.ESTIMATORS and source is not None and apart
        if imported:  # its module may register the estimator
            import_target(target)
        report = conformance.check(
            conformance.Adapter(fn, estimator, capabilities, pairs, source=source),
            rng=seed,
            checks=names or None,
            track=partial(checking, most=most),
            **options,
        )
    if imported:
        report.limits["imported"] = (
            f"the process that judges the candidate imported its module, to find {estimator!r}"
        )
    if program is None and apart is None:
        report.limits["in-process"] = _WITHIN_THE_JUDGE
    return report


_WITHIN_THE_JUDGE = (
    "the candidate ran in the process that judges it: what it changes there (NumPy, the clock, "
    "this report) and calls that hold the interpreter are not seen"
)


@contextmanager
def _candidate(
    target: str, estimator: str | None, program: str | None, apart: float | None
) -> Iterator[tuple[Any, str | None]]:
    """Open the callable or program; yield it, and where it can be imported from."""
    if program is None:
        from ..judge.conformance.candidate.isolation import Elsewhere
        from ..judge.conformance.candidate.target import import_target

        if apart is None:
            yield import_target(target), target
            return
        with closing(Elsewhere(partial(import_target, target), apart)) as there:
            yield there, target
        return
    from ..arrays import checks
    from ..judge.conformance import ESTIMATORS, Subprocess
    from ..judge.conformance.candidate.tags import COMMON, LISTING

    if estimator is None:
        raise ValueError(_UNNAMED)
    checks.choice("--estimator", estimator, ESTIMATORS, some=COMMON, listing=LISTING)
    names = ESTIMATORS[estimator].arrays
    with closing(Subprocess(target, format=program, names=names)) as fn:
        if shutil.which(fn.command[0]) is None:
            raise ValueError(f"there is no program {fn.command[0]!r}.")
        yield fn, None


_UNNAMED = "`--estimator` must be given: softmax, rfa, performer, ... (all: refattn check --list)."


def _guess_estimator(fn: Any) -> str:
    """Return softmax for a function of three arrays that nothing seeds or sizes, and say so."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except Exception:  # no signature, or one that fails
        raise ValueError(_UNNAMED) from None
    needed = [x.name for x in parameters if x.default is x.empty and x.kind in _BY_POSITION]
    drawn = {"seed", "rng", "omega", "indices", "feature_map"}
    if len(needed) != 3 or any(x.name in drawn or "num_" in x.name for x in parameters):
        raise ValueError(_UNNAMED)
    names = ", ".join(needed)
    notice(f"checked as softmax, because it needs only {names} (--estimator sets it)")
    return "softmax"
