"""The commands of the command line; click and rich must be installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from .._version import __version__
from ..arrays.threads import Interrupted
from ..arrays.words import close
from .options import Unusable, examples, known_option, needed, one_line
from .progress import Work, notice
from .streams import INTERRUPTED, drop_unread, unread

# Commands: module and function, imported when they run, and the line of `refattn --help`.
COMMANDS = {
    "audit": ("audit:audit_command", "List the bugs that a test of a kernel does not notice."),
    "check": ("check:check", "Check an implementation of an attention estimator."),
    "compare": ("compare:compare", "Compare estimators with exact attention; recommend one."),
    "explain": ("explain:explain", "Explain a check, a known bug, or another name in a report."),
    "same": ("same:same_command", "Judge two outputs of a kernel for the same inputs."),
    "tolerance": ("verify:tolerance_command", "Compute the atol and rtol that a test needs."),
    "vectors": ("group:vectors", "Write golden vectors for other languages."),
    "verify": ("verify:verify", "Judge the output of a kernel, from a file."),
}

_COMPLETION = """\b
The shell completes names of commands, options and estimators after
  eval "$(_REFATTN_COMPLETE=bash_source refattn)"     in ~/.bashrc
  eval "$(_REFATTN_COMPLETE=zsh_source refattn)"      in ~/.zshrc
  _REFATTN_COMPLETE=fish_source refattn | source      in ~/.config/fish/config.fish
"""


_UNREAD = 128 + 13  # as of a program that SIGPIPE ends


class _Group(click.Group):
    """Commands that are imported when they run, whose exit status is 1 only for a FAIL."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(import_module(f".{module}", __package__), name)
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args[0] not in COMMANDS:
            ctx.fail(f"No such command {args[0]!r}.{close(args[0], COMMANDS)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, words) for name, (_, words) in COMMANDS.items()])

    def make_context(self, *args: Any, **options: Any) -> click.Context:
        with _give_status():
            return super().make_context(*args, **options)

    def invoke(self, ctx: click.Context) -> Any:
        with _give_status():
            return super().invoke(ctx)


@contextmanager
def _give_status() -> Iterator[None]:
    """Give each way to end without a result its own exit status."""
    try:
        yield
    except BrokenPipeError:
        drop_unread()
        raise click.exceptions.Exit(_UNREAD) from None
    except OSError as error:
        raise Unusable(" ".join(str(error).split())) from None
    except KeyboardInterrupt as error:
        known = isinstance(error, Interrupted)
        notice("Aborted!" if known else "Aborted: nothing was found until now")
        raise click.exceptions.Exit(INTERRUPTED) from None


@click.group(
    "refattn",
    cls=_Group,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=_COMPLETION
    + "\n"
    + examples("refattn compare", "refattn compare --target 0.1", "refattn check --list"),
)
@click.version_option(__version__, prog_name="refattn")
def group() -> None:
    """Test attention kernels and approximations of attention, and compare them.

    Output is wrapped to the width of the terminal (or $COLUMNS); in pipes and files each failure
    and each cause is on one line.
    """


@click.command(
    epilog=examples(
        "refattn vectors golden --format npz",
        "refattn vectors golden --estimator softmax",
        "refattn vectors golden --format npz --check",
    )
)
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    *("--format", "kind"),
    default="json",
    show_default=True,
    type=click.Choice(["json", "npz", "safetensors", "c", "onnx"]),
    help="Format; c is one header, onnx a model for each vector that ONNX can express.",
)
@known_option(
    "--estimator",
    known=lambda: needed("judge.vectors").ESTIMATORS,
    metavar="NAME",
    help="Write the vectors of one estimator: softmax, rfa, lara, linear, ...  [default: all]",
)
@click.option("--check", is_flag=True, help="Check the vectors that are there; write nothing.")
def vectors(directory: Path, kind: str, estimator: str | None, check: bool) -> None:
    """Write golden vectors, for implementations in any language, into a directory.

    Files of the same name are replaced. With --check nothing is written; exit status 1 means that
    problems were found.
    """
    from ..judge import vectors as golden
    from ..judge.vectors.exporting import EXPORTS
    from ..judge.vectors.solving import prepare

    try:
        with one_line(False):
            with Work("Checking" if check else "Solving") as work:
                problems = golden.lint(directory, track=work.track) if check else []
                if not check:
                    prepare(work.track, estimator)
            write: Any = golden.export if kind in EXPORTS else golden.write
            paths = [] if check else write(directory, format=kind, estimator=estimator)
            count = 0
            if not check and kind not in EXPORTS:
                count = len(golden.load(directory, format=kind))
    except (ModuleNotFoundError, OSError) as error:
        raise Unusable(str(error)) from None
    if check:
        with unread():
            click.echo("\n".join(problems or [f"{directory}: no problems"]))
        sys.exit(1 if problems else 0)
    size = sum(path.stat().st_size for path in paths) / 1e3
    vectors_in = f"{count} vectors in " if count else ""
    with unread():
        click.echo(f"{directory}: {vectors_in}{len(paths)} files, {size:.0f} kB")
