"""Arguments and options that commands share, with their checks and completions."""

from __future__ import annotations

import dis
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from ..arrays.tables import Table
from ..arrays.words import close
from .progress import notice
from .show.page import FIGURE_FORMATS, Page, to_csv
from .streams import unread

COMMON = ("rfa", "performer", "rfa-adapted", "lara", "ra", "snis", "eva", "second-order", "coreset")


def _parse_numbers(ctx: click.Context, param: click.Parameter, value: str) -> list[int]:
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


def seed(ctx: click.Context, param: click.Parameter, value: int | None) -> int | None:
    """Check a seed: NumPy's hold 128 bits."""
    if value is not None and not 0 <= value < 2**128:
        raise click.BadParameter(f"must be at least 0 and below 2**128, got {value}.")
    return value


def seed_or_random(ctx: click.Context, param: click.Parameter, value: str) -> int | None:
    """Parse a seed; None for a fresh one."""
    if value == "random":
        return None
    try:
        number = int(value)
    except ValueError:
        raise click.BadParameter(f"must be an integer or random, got {value!r}.") from None
    return seed(ctx, param, number)


def words_of(known: Callable[[], Iterable[str]], *, many: bool = False) -> Callable[..., Any]:
    """Make the completion of a word in the shell, or of the last of several with commas."""

    def complete(
        ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        before, comma, start = incomplete.rpartition(",") if many else ("", "", incomplete)
        return [CompletionItem(before + comma + x) for x in known() if x.startswith(start)]

    return complete


def _aliased() -> list[str]:
    """Return names and aliases of the estimators that stand for softmax attention."""
    from ..registry import ESTIMATORS

    return [name for name, record in ESTIMATORS.items() if record.approximates]


def _parse_names(ctx: click.Context, param: click.Parameter, value: str | None) -> list[str]:
    """Parse names of estimators separated by commas."""
    if value is None:
        return []
    from ..compare.measured import names as comparable
    from ..registry import ESTIMATORS

    chosen: list[str] = []
    for name in map(str.strip, value.split(",")):
        if name == "all":
            chosen += comparable()
        elif name in ESTIMATORS and ESTIMATORS[name].approximates:
            chosen.append(ESTIMATORS[name].name)
        else:
            hint = close(name, ["all", *_aliased()])
            if ":" in name:
                hint = (
                    " To add your own: refattn.registry.register, in a package with an entry point "
                    "of the group refattn.estimators (guide: Add an estimator)."
                )
            raise click.BadParameter(
                f"must be all, or some of {', '.join(COMMON)}, ... (those that estimate softmax "
                f"attention: refattn check --list), got {name!r}.{hint}"
            )
    return list(dict.fromkeys(chosen))


def estimators_option(help: str) -> Callable[[Any], Any]:
    return click.option(
        "--estimators",
        metavar="NAME,NAME,...",
        callback=_parse_names,
        shell_complete=words_of(lambda: ["all", *_aliased()], many=True),
        help=help,
    )


mistakes_option = click.option(
    "--mistakes",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, readable=True, path_type=Path),
    help="Known bugs of your own, tried first as causes: edits of the formulas, as the guide shows "
    "(validation/site/guide/mistakes.md). The file is executed, like a file of tests.",
)


def output(*suffixes: str) -> Callable[[Any, Any, str | None], Path | None]:
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
        return Path(value).absolute()  # a candidate may change the working directory

    return check


def needed(module: str) -> Any:
    """Import a module of the package, which help and usage errors do without."""
    return import_module(f"..{module}", __package__)


class Unusable(click.ClickException):
    exit_code = 2


def installed(option: str, module: str) -> None:
    try:
        import_module(module)
    except ModuleNotFoundError:
        from ..files.arrays import INSTALL

        raise Unusable(f"{option} {INSTALL}") from None


@contextmanager
def one_line(plotting: bool) -> Iterator[None]:
    """Turn what is raised for unusable input into one line and exit status 2.

    Errors that the package does not raise itself are its own mistakes: these it lets pass.
    """
    import numpy as np

    if plotting:
        installed("--plot", "matplotlib.figure")
    try:
        with np.errstate(all="ignore"):
            yield
    except (TypeError, ValueError, MemoryError, OverflowError) as error:
        if isinstance(error, TypeError | ValueError) and not _is_raised_here(error):
            raise
        raise Unusable(_name_the_option(" ".join(str(error).split()))) from None


def _is_raised_here(error: BaseException) -> bool:
    """Tell whether a `raise` of the package is where an error comes from."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None:
        return False
    code = last.tb_frame.f_code
    within = Path(code.co_filename).is_relative_to(Path(__file__).parents[1])
    return within and dis.opname[code.co_code[last.tb_lasti]] == "RAISE_VARARGS"


def _name_the_option(message: str) -> str:
    """Name an option where a message starts with the argument that was read from it."""
    context, (name, _, rest) = click.get_current_context(), message[1:].partition("`")
    given = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    options = [x.opts[0] for x in context.command.params if given and x.name == name]
    return f"{options[0]}{rest.replace(' or None,', ',', 1)}" if options else message


class Answer(NamedTuple):
    """The result of a command, in every format."""

    show: Callable[[Page], None]
    tables: Callable[[], Sequence[Table]]  # its rows, for one flat table
    to_json: Callable[[], str]
    to_html: Callable[[], str] | None = None


def publish(
    answer: Answer,
    kind: str,
    json_path: Path | None = None,
    plot_path: Path | None = None,
    plot: Callable[[Path], None] | None = None,
    html_path: Path | None = None,
) -> None:
    """Print a result in a format, and write the files that the options name."""
    import numpy as np

    try:
        with unread(), np.errstate(all="ignore"):  # what is not finite is shown as it is
            if kind == "json":
                click.echo(answer.to_json(), nl=False)
            elif kind == "csv":
                click.echo(to_csv(answer.tables()), nl=False)
            else:
                answer.show(Page(markdown=kind == "markdown"))
        if json_path is not None:
            json_path.write_text(answer.to_json(), encoding="utf-8")
        if html_path is not None and answer.to_html is not None:
            html_path.write_text(answer.to_html(), encoding="utf-8")
        if plot_path is not None and plot is not None:
            with one_line(False):
                plot(plot_path)
    except OSError as error:
        raise Unusable(f"cannot write the results: {error}") from None


def many_heads(heads: int, tokens: int, layout: str) -> None:
    """Warn of more heads than tokens: the axes may be in the other order."""
    if heads > tokens:
        other = {"bhnd": "bnhd", "bnhd": "bhnd"}[layout]
        notice(
            f"warning: {heads} heads of {tokens} token{'s' * (tokens != 1)} in layout {layout} "
            f"look transposed; if so, pass --layout {other}"
        )


def examples(*lines: str) -> str:
    """Return the end of a help text: commands that work as they stand."""
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])


format_option = click.option(
    *("--format", "kind"),
    type=click.Choice(["table", "markdown", "csv", "json"]),
    default="table",
    show_default=True,
    help="Format of the results; csv is one flat table, json is what --json writes.",
)
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
    callback=_parse_numbers,
    help="Numbers S of features, samples, keys or tokens to try.",
)


def alpha_option(who: str) -> Callable[[Any], Any]:
    """Make the option of the level of a verdict."""
    words = f"Largest probability that a correct {who} fails."
    return click.option("--alpha", type=float, default=1e-6, show_default=True, help=words)


scale_option = click.option("--scale", type=float, help="Factor on q . k.  [default: 1/sqrt(d)]")


def file_option(form: str, content: str, suffixes: Sequence[str] = ()) -> Callable[[Any], Any]:
    """Make the option of an output file; by default its suffix is the name of the option."""
    suffixes = suffixes or (f".{form}",)
    return click.option(
        *(f"--{form}", f"{form}_path"),
        metavar=f"OUT{suffixes[0]}",
        callback=output(*suffixes),
        help=content,
    )


def plot_option(content: str) -> Callable[[Any], Any]:
    content += " The suffix may also be .svg or .pdf."
    return file_option("plot", content, FIGURE_FORMATS)


def _parse_window(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> tuple[int | None, int | None] | None:
    """Parse two numbers of keys; nothing and -1 are no limit."""
    if value is None:
        return None
    try:
        sides = map(str.strip, value.split(","))
        left, right = (None if side in ("", "-1") else int(side) for side in sides)
        if min(left or 0, right or 0) < 0:
            raise ValueError
    except ValueError:
        raise Unusable(
            f"--window must be LEFT,RIGHT, numbers of keys of at least 0; an empty side has no "
            f"limit (128,0 or 128,). Got {value!r}."
        ) from None
    return left, right


def known_option(
    *names: str,
    known: Callable[[], Iterable[str]],
    aliases: Callable[[], Iterable[str]] = tuple,
    **attributes: Any,
) -> Callable[[Any], Any]:
    """Make an option of a word that must be known, with one line if it is not."""

    def taken() -> list[str]:
        return list(dict.fromkeys([*known(), *aliases()]))

    def check(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
        if value is not None and value not in taken():
            raise Unusable(
                f"{param.opts[0]} must be one of {', '.join(known())}, got {value!r}."
                f"{close(value, taken())}"
            )
        return value

    return click.option(*names, callback=check, shell_complete=words_of(taken), **attributes)


window_option = click.option(
    "--window",
    metavar="LEFT,RIGHT",
    callback=_parse_window,
    help="Number of keys that query i sees before and after key i + m - n; `128,` means no limit "
    "after.",
)
softcap_option = click.option(
    "--softcap", type=float, metavar="C", help="The kernel uses C tanh(score / C) as the score."
)
causal_option = click.option(
    "--causal", is_flag=True, help="Query i of n sees key j of m only if j <= i + m - n."
)
layout_option = known_option(
    "--layout",
    known=lambda: ("bhnd", "bnhd"),
    metavar="[bhnd|bnhd]",
    default="bhnd",
    show_default=True,
    help="Order of the axes in FILE: heads before tokens, or after them.",
)
pages_layout_option = known_option(
    "--layout",
    known=lambda: needed("files.sequences").LAYOUTS,
    metavar="[bhnd|bnhd|hnd]",
    default="bhnd",
    show_default=True,
    help="Order of the axes in FILE: heads before tokens, or after them; hnd if heads come before "
    "tokens in the blocks of a block_table only.",
)


def _list_profiles() -> Mapping[str, Any]:
    every: Mapping[str, Any] = needed("judge.rounding.profiles").EVERY_PROFILE
    return every


profile_option = known_option(
    "--profile",
    known=_list_profiles,
    aliases=lambda: (
        f"{x}@{y}" for x in _list_profiles() for y in needed("judge.rounding.hardware").UNITS
    ),
    metavar="NAME",
    help="What the kernel rounds: math, flash, upcast, eager, tf32, fp8, half-sums, ...; an "
    "unknown name prints the list.  [default: try the usual ones]",
)


def hardware_option(default: str) -> Callable[[Any], Any]:
    return known_option(
        "--hardware",
        known=lambda: ("ieee", *needed("judge.rounding.hardware").UNITS),
        metavar="NAME",
        help="Hardware whose matrix units truncate sums of products: hopper, hopper-promoted, "
        f"blackwell, ampere, turing, ada, volta; ieee if sums are rounded.  [default: {default}]",
    )
