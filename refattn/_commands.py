"""The commands of the command line; click and rich must be installed."""

from __future__ import annotations

import inspect
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import numpy as np

from . import _plots, _show, _validate, tolerance, verification
from ._files import INSTALL, load, sample
from ._problems import PROFILES, of_tensors
from ._streams import kept
from ._style import FORMATS
from ._tensors import DTYPES, open_tensors
from ._text import printable, said
from ._version import __version__
from .compare import measure
from .compare import names as comparable
from .profile import plan, search, study
from .registry import DEFAULT, ESTIMATORS, Estimator

__all__ = ["group"]


def _numbers(ctx: click.Context, param: click.Parameter, value: str) -> list[int]:
    """Parse positive integers separated by commas."""
    try:
        numbers = [int(item) for item in value.split(",")]
        if not all(1 <= number < 2**63 for number in numbers):
            raise ValueError
    except ValueError:
        raise click.BadParameter(
            f"must be positive integers separated by commas, below 2**63, got {value!r}."
        ) from None
    return sorted(set(numbers))


def _seed(ctx: click.Context, param: click.Parameter, value: int | None) -> int | None:
    """Check a seed: NumPy's hold 128 bits."""
    if value is not None and not 0 <= value < 2**128:
        raise click.BadParameter(f"must be at least 0 and below 2**128, got {value}.")
    return value


def _seed_or_random(ctx: click.Context, param: click.Parameter, value: str) -> int | None:
    """Parse a seed; None for a fresh one."""
    if value == "random":
        return None
    try:
        number = int(value)
    except ValueError:
        raise click.BadParameter(f"must be an integer or random, got {value!r}.") from None
    return _seed(ctx, param, number)


def _names(ctx: click.Context, param: click.Parameter, value: str | None) -> list[str]:
    """Parse names of estimators separated by commas."""
    if value == "all":
        return comparable()
    names = list(DEFAULT) if value is None else [x.strip() for x in value.split(",")]
    for name in names:
        if name not in ESTIMATORS or not ESTIMATORS[name].approximates:
            known = ", ".join(comparable())
            raise click.BadParameter(f"must be all or of {known}, got {name!r}.")
    return list(dict.fromkeys(ESTIMATORS[name].name for name in names))


def _output(*suffixes: str) -> Callable[[Any, Any, str | None], Path | None]:
    """Make a check that a file with such a suffix can be written; it is not opened yet."""
    *first, last = suffixes
    known = f"{', '.join(first)} or {last}" if first else last

    def check(ctx: click.Context, param: click.Parameter, value: str | None) -> Path | None:
        if value is None:
            return None
        if not value.lower().endswith(suffixes):  # an input given by mistake is not overwritten
            raise click.BadParameter(f"must end in {known}, got {value!r}.")
        folder = os.path.dirname(value) or "."
        target = value if os.path.exists(value) else folder
        if not os.path.isdir(folder) or os.path.isdir(value) or not os.access(target, os.W_OK):
            raise click.BadParameter(f"cannot write to {value!r}.")
        return Path(value)

    return check


class Unusable(click.ClickException):
    exit_code = 2


def _installed(option: str, module: str) -> None:
    try:
        import_module(module)
    except ModuleNotFoundError:
        raise Unusable(f"{option} {INSTALL}") from None


@contextmanager
def one_line(plotting: bool) -> Iterator[None]:
    """Turn what is raised for unusable input into one line and exit status 2."""
    if plotting:
        _installed("--plot", "matplotlib.figure")
    try:
        with np.errstate(all="ignore"):
            yield
    except (TypeError, ValueError, MemoryError, OverflowError) as error:
        raise Unusable(" ".join(str(error).split())) from None


def publish(
    show: Callable[[], None],
    json_path: Path | None = None,
    to_json: Callable[[], str] = str,
    plot_path: Path | None = None,
    plot: Callable[[Path], None] | None = None,
) -> None:
    try:
        show()
        if json_path is not None:
            json_path.write_text(to_json(), encoding="utf-8")
        if plot_path is not None and plot is not None:
            plot(plot_path)
    except OSError as error:
        raise Unusable(f"cannot write the results: {error}") from None


file_argument = click.argument(
    "file",
    required=False,
    type=click.Path(exists=True, dir_okay=False, readable=True, path_type=Path),
)
features_option = click.option(
    "--features",
    default="8,32,128,512",
    show_default=True,
    metavar="S,S,...",
    callback=_numbers,
    help="Numbers of features or samples.",
)
scale_option = click.option("--scale", type=float, help="Factor on q . k.  [default: 1/sqrt(d)]")


def dtype_option(default: str) -> Callable[[Any], Any]:
    return click.option(
        "--dtype",
        type=click.Choice(["float32", "float64"]),
        help=f"Cast the arrays first.  [default: {default}]",
    )


def json_option(content: str) -> Callable[[Any], Any]:
    return click.option(
        *("--json", "json_path"), metavar="OUT.json", callback=_output(".json"), help=content
    )


def plot_option(content: str) -> Callable[[Any], Any]:
    return click.option(
        *("--plot", "plot_path"),
        metavar="OUT.png",
        callback=_output(*FORMATS),
        help=f"{content} SVG and PDF too, by the suffix.",
    )


@click.group("refattn", context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="refattn")
def group() -> None:
    """Reference implementation of random-feature attention."""


@group.command()
@file_argument
@features_option
@click.option(
    "--estimators",
    metavar="NAME,NAME,...",
    callback=_names,
    help=f"all, or some of {', '.join(comparable())}.  [default: {','.join(DEFAULT)}]",
)
@click.option(
    "--draws",
    default=3,
    show_default=True,
    type=click.IntRange(1, 10**6),
    help="Independent draws to average over.",
)
@dtype_option("evaluate in the dtype of the file")
@click.option("--seed", default=0, show_default=True, type=int, callback=_seed)
@scale_option
@click.option("--causal", is_flag=True, help="Query i sees key j only if j <= i + m - n.")
@json_option("Write the errors of every head and draw.")
@plot_option("Plot error against S.")
@click.option("--per-head", is_flag=True, help="Print the error of every head too.")
def compare(
    file: Path | None,
    features: list[int],
    estimators: list[str],
    draws: int,
    dtype: str | None,
    seed: int,
    scale: float | None,
    causal: bool,
    json_path: Path | None,
    plot_path: Path | None,
    per_head: bool,
) -> None:
    """Compare estimators with exact softmax attention: error and time.

    FILE (.npz or .safetensors) holds arrays q, k, v of shape (..., n, d); the default is a
    sample from a sentence encoder that comes with the package. The error of a head is
    |estimate - exact| / |exact| in the Frobenius norm, averaged over the draws, where exact
    attention is evaluated in float64. Seconds are the median for one evaluation of all heads.
    The last column is the mean error that a sentence encoder tolerates of such an estimator.
    """
    with one_line(plot_path is not None):
        _validate.real("scale", scale, positive=True, optional=True)
        path = file or sample()
        arrays = load(path, dtype)
        found = measure(
            **arrays,
            estimators=estimators,
            sizes=features,
            draws=draws,
            seed=seed,
            scale=scale,
            causal=causal,
            track=partial(_show.track, "Comparing"),
        )
    publish(
        partial(_show.comparison, path, arrays, found, per_head),
        json_path,
        partial(_show.comparison_to_json, path, arrays, found),
        plot_path,
        partial(_plots.plot_comparison, found.rows),
    )


@group.command("profile")
@file_argument
@features_option
@click.option(
    "--target",
    default=0.1,
    show_default=True,
    type=float,
    help="Relative error that the recommended estimator is to reach.",
)
@click.option(
    "--measure",
    "measured",
    is_flag=True,
    help="Measure how many features or samples each estimator needs, S = 1, 2, 4, ...",
)
@click.option(
    "--estimators",
    metavar="NAME,NAME,...",
    default="all",
    callback=_names,
    help="Those that --measure measures.  [default: all]",
)
@click.option(
    "--most", type=click.IntRange(1), help="With --measure, the largest S.  [default: 4 max(n, m)]"
)
@click.option(
    "--draws",
    default=4,
    show_default=True,
    type=click.IntRange(2, 10**6),
    help="Independent draws that --measure averages over.",
)
@click.option("--seed", default=0, show_default=True, type=int, callback=_seed)
@click.option(
    "--shrink/--no-shrink",
    default=False,
    show_default=True,
    help="Shrink the covariances, for fewer rows than d^2.",
)
@dtype_option("as they are; moments and laws are evaluated in float64")
@scale_option
@json_option("Write all numbers, of every head.")
@plot_option("Plot the spectra of the covariances, and predicted error against S.")
def profile(
    file: Path | None,
    features: list[int],
    target: float,
    measured: bool,
    shrink: bool,
    dtype: str | None,
    scale: float | None,
    json_path: Path | None,
    plot_path: Path | None,
    **options: Any,
) -> None:
    """Say what to use: moments of queries and keys, predicted errors, and the cheapest estimator.

    FILE (.npz or .safetensors) holds arrays q, k of shape (..., n, d) and, for all but the
    moments, v; the default is a sample from a sentence encoder that comes with the package.
    Laws are evaluated for some of the queries, and errors are measured on some of the heads, where
    there are many; the output says on which. Without --measure no random numbers are used.
    `refattn moments` is the same command.
    """
    with one_line(plot_path is not None):
        _validate.real("scale", scale, positive=True, optional=True)
        _validate.real("target", target, positive=True)
        path = file or sample()
        arrays = load(path, dtype, required="qkv" if measured else "qk")
        searched = None
        if measured:
            planned = plan(*arrays.values(), target=target, scale=scale, **options)
            _show.planned(planned)
        found = study(
            **arrays,
            sizes=features,
            target=target,
            scale=scale,
            shrink=shrink,
            track=partial(_show.track, "Studying"),
        )
        if measured:
            searched = search(planned, track=partial(_show.track, "Measuring"))
    publish(
        partial(_show.profile, path, arrays, found, searched),
        json_path,
        partial(_show.profile_to_json, path, arrays, found, searched),
        plot_path,
        partial(_plots.plot_profile, found),
    )


group.add_command(profile, "moments")


def _window(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> tuple[int | None, int | None] | None:
    """Parse two numbers of keys, of which one or both may be left out."""
    if value is None:
        return None
    try:
        left, right = (int(side) if side.strip() else None for side in value.split(","))
        if min(left or 0, right or 0) < 0:
            raise ValueError
    except ValueError:
        raise Unusable(
            f"--window must be LEFT,RIGHT, two numbers of keys of at least 0, or nothing for "
            f"no limit (128,0 or 128,), got {value!r}."
        ) from None
    return left, right


def _in(*known: str) -> Callable[[Any, Any, str | None], str | None]:
    """Make a check that a word is known, with one line if it is not."""

    def check(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
        if value is not None and value not in known:
            raise Unusable(f"{param.opts[0]} must be of {', '.join(known)}, got {value!r}.")
        return value

    return check


window_option = click.option(
    "--window",
    metavar="LEFT,RIGHT",
    callback=_window,
    help="Keys that a query sees before and behind its own; 128, has no limit behind.",
)
softcap_option = click.option("--softcap", type=float, help="Scores are C tanh(score / C).")
causal_option = click.option(
    "--causal", is_flag=True, help="Query i sees key j only if j <= i + m - n."
)
layout_option = click.option(
    "--layout",
    default="bhnd",
    show_default=True,
    callback=_in("bhnd", "bnhd"),
    help="Whether heads come before tokens, in the arrays of FILE, or after them.",
)
profile_option = click.option(
    "--profile",
    metavar="NAME",
    callback=_in(*PROFILES),
    help=f"What the kernel rounds: {', '.join(PROFILES)}.  [default: any that is usual]",
)

_VERIFY = """Say whether the numbers in a file can be those of a correct kernel.

FILE (.safetensors or .npz) holds q, k, v and out as a kernel had them, in its own type, and may
hold lse, mask, bias, sinks and omega; with d_out, dq, dk and dv are judged. What a correct kernel
may differ by from exact attention follows from q, k, v and from what it rounds. The exit status is
0 if all files PASS, 1 if one FAILs, 3 if one is UNDERPOWERED, and 2 where there is no verdict.

\b
Such a file is written from torch by
  from safetensors.torch import save_file
  arrays = dict(q=q, k=k, v=v, out=out)  # and d_out=d_out, dq=q.grad, dk=k.grad, dv=v.grad
  save_file({x: y.contiguous() for x, y in arrays.items()}, "dump.safetensors")
from JAX by
  from safetensors.flax import save_file
  save_file(dict(q=q, k=k, v=v, out=out), "dump.safetensors")
and from C by
  uint64_t size = sprintf(text, "{\\"q\\":{\\"dtype\\":\\"BF16\\",\\"shape\\":[8,512,64],"
                                "\\"data_offsets\\":[0,524288]},...}");
  fwrite(&size, 8, 1, file), fwrite(text, 1, size, file), fwrite(q, 2, 262144, file), ...
that is, a length of 8 bytes, a header in JSON, and the arrays one after the other; the README has
the whole program.
"""


@group.command("verify", help=_VERIFY)
@click.argument(
    "files",
    metavar="FILE...",
    nargs=-1,
    required=True,
    type=click.Path(exists=True, dir_okay=False, readable=True, path_type=Path),
)
@click.option(
    "--estimator",
    default="softmax",
    show_default=True,
    callback=_in("softmax", "rfa", "linear"),
    help="What was computed: softmax, rfa (of omega in FILE, positive features) or linear (elu+1).",
)
@click.option(
    "--dtype",
    metavar="NAME",
    callback=_in(*DTYPES),
    help="What float32 or float64 arrays were rounded to.  [default: their type]",
)
@profile_option
@causal_option
@scale_option
@window_option
@softcap_option
@layout_option
@click.option(
    "--alpha",
    type=float,
    default=1e-6,
    show_default=True,
    help="Largest probability that a correct kernel fails.",
)
@json_option("Write the verdict; of several files, a list.")
@plot_option("Draw the errors of the worst head over their standard deviations.")
@click.pass_context
def verify(
    context: click.Context,
    /,
    files: tuple[Path, ...],
    json_path: Path | None,
    plot_path: Path | None,
    **options: Any,
) -> None:
    found: list[_show.Verified] = []
    with one_line(plot_path is not None):
        if plot_path is not None and len(files) > 1:
            raise ValueError(f"`--plot` must come with one FILE, got {len(files)}.")
    for number, path in enumerate(files):
        with one_line(False):
            try:
                found.append(_verified(path, **options))
            except (TypeError, ValueError) as error:
                name = f"{path.name}: " if len(files) > 1 else ""
                raise ValueError(f"{name}{error}") from None
        publish(partial(_show.verified, found[-1], number > 0))

    def plot(target: Path) -> None:
        with one_line(False):
            _plots.plot_verified(found[0], target)

    publish(lambda: None, json_path, partial(_show.verified_to_json, found), plot_path, plot)
    words = {x.verdict.verdict for x in found}
    context.exit(1 if "FAIL" in words else 3 if "UNDERPOWERED" in words else 0)


def _verified(
    path: Path,
    *,
    dtype: str | None,
    layout: str,
    profile: str | None,
    alpha: float,
    **options: Any,
) -> _show.Verified:
    """Judge what a file holds."""
    alpha = verification.alpha_of(alpha)
    tensors = open_tensors(path, dtype=dtype, layout=layout, required=())
    problem = of_tensors(tensors, **options)
    parts = verification.parts_of(tensors, problem)
    with _show.blocks("Verifying", len(list(problem.items()))) as tick:

        def shown(part: verification.Part) -> verification.Part:
            def out(index: tuple[int, ...]) -> Any:
                tick()
                return part.numbers.out(index)

            return part._replace(numbers=part.numbers._replace(out=out))

        judged = {name: shown(part) for name, part in parts.items()}
        verdict = verification.judge_all(judged, tensors.dtype, profile, alpha)
    return _show.Verified(tensors, problem, parts, verdict)


@group.command("tolerance")
@file_argument
@click.option(
    "--dtype",
    metavar="NAME",
    callback=_in(*tolerance.USUAL),
    help=f"What the kernel holds: {', '.join(tolerance.USUAL)}.  [default: what FILE holds]",
)
@profile_option
@click.option("--atol", type=float, help="What you allow.  [default: as torch.testing]")
@click.option("--rtol", type=float, help="What you allow, relative to the exact result.")
@causal_option
@scale_option
@window_option
@softcap_option
@layout_option
@json_option("Write all numbers, of every head.")
def tolerances(
    file: Path | None,
    dtype: str | None,
    profile: str | None,
    atol: float | None,
    rtol: float | None,
    layout: str,
    json_path: Path | None,
    **options: Any,
) -> None:
    """Say which tolerance a correct kernel needs, and which defects it lets through.

    FILE (.npz or .safetensors) holds arrays q, k, v of shape (..., n, d), and may hold mask,
    bias and sinks; the default is a sample of a sentence encoder, of the package. They are rounded
    to --dtype first. A tolerance allows |got - exact| <= atol + rtol |exact|; each defect is
    simulated, with the roundings of a kernel, and tried at --atol and --rtol, at the tolerance that
    a correct kernel needs, and by `refattn verify`.
    """
    with one_line(False):
        path = file or sample()
        tensors = open_tensors(path, layout=layout, required=())
        problem = of_tensors(tensors, **options)
        found = tolerance.of_problem(
            problem,
            dtype or tensors.dtype,
            profile=profile,
            atol=atol,
            rtol=rtol,
            track=partial(_show.track, "Trying"),
        )
    publish(
        partial(_show.tolerances, tensors, problem, found),
        json_path,
        partial(_show.tolerances_to_json, tensors, problem, found),
    )


def _list(context: click.Context, parameter: click.Parameter, asked: bool) -> None:
    """Print the words that `check` knows, with their meanings, or the table of conventions."""
    if not asked or context.resilient_parsing:
        return
    from . import conformance
    from .conformance.adapter import written

    if parameter.name == "list_specs":
        click.echo(conformance.conventions.listing())
        context.exit()
    known = {
        "--estimator": {
            ", ".join((record.name, *record.aliases)): _means(record)
            for record in dict.fromkeys(ESTIMATORS.values())
        },
        "--capability": conformance.CAPABILITIES,
        "--tag": conformance.TAGS,
        "--spec": {
            name: " ".join(f"{tag}={written(value)}" for tag, value in tags.items())
            for name, tags in conformance.SPECS.items()
        },
    }
    for option, words in known.items():
        click.echo(option)
        width = max(map(len, words))
        for word, meaning in words.items():
            text = textwrap.wrap(meaning, 96 - width)
            click.echo(f"  {word:<{width}}  {text[0]}")
            for more in text[1:]:
                click.echo(f"  {'':<{width}}  {more}")
    context.exit()


def _means(record: Estimator) -> str:
    """What an estimator computes, in the words of its formula, and what it may be able to do."""
    from .conformance.adapter import possible

    able = possible(record)
    formula = getattr(record.naive, "func", record.naive)
    given = getattr(record.naive, "keywords", {}) | getattr(record.fn, "keywords", {})
    summary = (inspect.getdoc(formula) or record.name).splitlines()[0]
    summary += "".join(f" {name} = {value}." for name, value in given.items())
    return f"{summary} May have: {', '.join(able)}." if able else summary


@group.command()
@click.argument("target", metavar="MODULE:CALLABLE")
@click.option(
    "--list",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_list,
    help="Print estimators, capabilities, tags and bundles of them with their meanings.",
)
@click.option(
    "--list-specs",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_list,
    help="Print the conventions of well-known functions, and what each is known from.",
)
@click.option("--estimator", required=True, help="What it computes: softmax, kernel, rfa, ...")
@click.option(
    *("--capability", "capabilities"), multiple=True, help="A keyword it takes; repeatable."
)
@click.option(
    *("--tag", "tags"), multiple=True, metavar="KEY=VALUE", help="A convention; repeatable."
)
@click.option("--spec", help="Conventions of a well-known function; see --list-specs.")
@click.option(
    "--level",
    type=click.Choice(["quick", "full", "soak"]),
    default="quick",
    show_default=True,
    help="How many seeds the statistical checks use.",
)
@click.option(
    "--alpha",
    type=float,
    default=1e-6,
    show_default=True,
    help="Largest probability that a correct implementation fails.",
)
@click.option(
    "--json",
    "json_path",
    is_flag=False,
    flag_value="-",
    metavar="[OUT.json]",
    help="Write the report as JSON; without a name, to standard output and nothing else.",
)
@click.option(
    *("--junit", "junit_path"),
    metavar="OUT.xml",
    callback=_output(".xml"),
    help="Write the report as JUnit XML.",
)
@click.option(
    *("--html", "html_path"),
    metavar="OUT.html",
    callback=_output(".html"),
    help="Write the report as a page that needs no other file.",
)
@click.option(
    "--xfails",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File of expected failures: lines `check: reason`.",
)
@click.option(
    "--seed",
    default="0",
    show_default=True,
    callback=_seed_or_random,
    help="Of what is drawn, or `random`.",
)
@click.option(*("--check", "names"), multiple=True, help="Run this check only; repeatable.")
@click.option("--time-limit", type=float, help="Seconds for the run.")
@click.option(
    *("--subprocess", "program"),
    type=click.Choice(["safetensors", "npz"]),
    help="MODULE:CALLABLE is a command that reads and writes such files instead.",
)
@click.option(
    "--keep",
    is_flag=True,
    help="The command is run once and makes all calls: it reads lines INPUT<tab>OUTPUT, two paths, "
    "and answers each with `ok` or `error: message`.",
)
@click.option(
    "--isolate",
    is_flag=True,
    help="Call MODULE:CALLABLE in a process of its own, whose crash is a failure.",
)
@click.option("--reproducers", is_flag=True, help="Print a script for each failure.")
@click.pass_context
def check(
    context: click.Context,
    /,
    target: str,
    json_path: str | None,
    junit_path: Path | None,
    html_path: Path | None,
    xfails: Path | None,
    reproducers: bool,
    **options: Any,
) -> None:
    """Check an implementation of an attention estimator.

    It is called with arrays by position and all else by keyword: see the documentation of
    refattn.conformance.check. The exit status is 0 for PASS, 1 for FAIL, 3 for UNDERPOWERED,
    and 2 where there is no verdict: for unusable arguments, and if the report cannot be
    written or the candidate ends the process before it is out; with --isolate, and for
    programs, such an end in a call is a failure. On a terminal the check that runs is named.
    """
    if sys.stdout is None:
        raise Unusable("cannot write the results: standard output is closed")
    quiet = json_path == "-"
    # A candidate may change the working directory.
    json_path = json_path if json_path is None or quiet else str(Path(json_path).absolute())
    junit_path = None if junit_path is None else junit_path.absolute()
    html_path = None if html_path is None else html_path.absolute()
    if html_path is not None:
        _installed("--html", "jinja2")
    with one_line(False):
        if json_path is not None and not quiet:
            _output(".json")(context, context.command.params[0], json_path)
        try:
            with kept(quiet):
                report = _check(target, xfails, **options)
        except (KeyboardInterrupt, SystemExit) as error:
            raise Unusable(f"ended by {type(error).__name__}, without a verdict") from None
    try:
        if quiet:
            click.echo(report.to_json(), nl=False)
        else:
            _show.verdicts(str(report))
            for result in report.results if reproducers else ():
                if result.reproducer:
                    text = f"\n# {result.check}\n{result.reproducer}"
                    click.echo(printable(text), nl=False)
        if json_path is not None and not quiet:
            Path(json_path).write_text(report.to_json(), encoding="utf-8")
        if junit_path is not None:
            junit_path.write_text(report.to_junit(), encoding="utf-8")
        if html_path is not None:
            html_path.write_text(report.to_html(), encoding="utf-8")
    except OSError as error:
        raise Unusable(f"cannot write the results: {error}") from None
    context.exit({"PASS": 0, "FAIL": 1, "UNDERPOWERED": 3}[report.verdict])


@group.command()
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    *("--format", "kind"),
    default="json",
    show_default=True,
    type=click.Choice(["json", "npz", "safetensors", "c", "onnx"]),
    help="What to write; c is a header, onnx a model for each case that it can express.",
)
@click.option("--check", is_flag=True, help="Say what is wrong with the vectors in DIRECTORY.")
def vectors(directory: Path, kind: str, check: bool) -> None:
    """Write golden vectors for implementations in any language into DIRECTORY.

    Files of the same name are replaced. With --check nothing is written; status 1 is problems.
    """
    from .conformance import vectors as golden

    try:
        with one_line(False):
            problems = golden.lint(directory) if check else []
            write = golden.export if kind in golden.EXPORTS else golden.write
            paths = [] if check else write(directory, format=kind)
            count = 0
            if not check and kind not in golden.EXPORTS:
                count = len(golden.load(directory, format=kind))
    except (ModuleNotFoundError, OSError) as error:
        raise Unusable(str(error)) from None
    if check:
        for problem in problems or [f"{directory}: no problems"]:
            click.echo(problem)
        sys.exit(1 if problems else 0)
    size = sum(path.stat().st_size for path in paths) / 1e3
    vectors_in = f"{count} vectors in " if count else ""
    click.echo(f"{directory}: {vectors_in}{len(paths)} files, {size:.0f} kB")


def _check(
    target: str,
    xfails: Path | None,
    *,
    estimator: str,
    capabilities: tuple[str, ...],
    tags: tuple[str, ...],
    spec: str | None,
    seed: int | None,
    names: tuple[str, ...],
    program: str | None,
    keep: bool,
    **options: Any,
) -> Any:
    """Run the checks on what the command line names."""
    from . import conformance

    pairs = dict(tag.partition("=")[::2] for tag in tags)
    for tag in tags:
        if "=" not in tag:
            raise ValueError(f"`--tag` must be KEY=VALUE, got {tag!r}.")
    if spec is not None:
        _validate.choice("--spec", spec, conformance.SPECS)
        pairs = {**conformance.SPECS[spec], **pairs}
    with _candidate(target, estimator, program, keep) as (fn, source):
        return conformance.check(
            conformance.Adapter(fn, estimator, capabilities, pairs, source=source),
            rng=seed,
            checks=names or None,
            expected_failures=None if xfails is None else _expected(xfails),
            track=_show.checking,
            **options,
        )


@contextmanager
def _candidate(
    target: str, estimator: str, program: str | None, keep: bool
) -> Iterator[tuple[Any, str | None]]:
    """What is called, and where it can be imported from; a program ends with the context."""
    if program is None:
        if keep:
            raise ValueError("`--keep` must come with --subprocess.")
        yield _imported(target), target
        return
    from .conformance import Subprocess

    _validate.choice("--estimator", estimator, ESTIMATORS)
    names = ESTIMATORS[estimator].arrays
    with closing(Subprocess(target, format=program, names=names, keep=keep)) as fn:
        if shutil.which(fn.command[0]) is None:
            raise ValueError(f"there is no program {fn.command[0]!r}.")
        yield fn, None


def _imported(target: str) -> Any:
    """The object that MODULE:NAME or MODULE:NAME.NAME names, from the current directory too."""
    module, colon, name = target.partition(":")
    if not (module and colon and name):
        raise ValueError(f"the target must be MODULE:CALLABLE, got {target!r}.")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"cannot import {target!r}: {said(error)}") from None
    except BaseException as error:  # also SystemExit and the like
        kind = type(error).__name__
        raise ValueError(f"importing {module!r} failed: {kind}: {said(error)}") from None
    return found


def _expected(path: Path) -> dict[str, str]:
    """Expected failures, a line each: the name of a check, a colon and the reason."""
    found = {}
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {str(path)!r}: {error}") from None
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        name, colon, reason = (part.strip() for part in line.partition(":"))
        if not (colon and reason):
            raise ValueError(f"line {number} of {path} must be `check: reason`, got {line!r}.")
        if name in found:
            raise ValueError(f"line {number} of {path} names {name!r} a second time.")
        found[name] = reason
    return found
