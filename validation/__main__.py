"""The command line: ``python -m validation``."""

from __future__ import annotations

import multiprocessing
import secrets
import sys
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from pathlib import Path

try:
    import click
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    from . import report, runner, sources, suite
except ModuleNotFoundError:
    sys.stderr.write("validation: error: needs `pip install 'refattn[validation]'`\n")
    sys.exit(2)


@click.command()
@click.argument("claims", nargs=-1, metavar="[CLAIM]...")
@click.option("--level", type=click.Choice(suite.LEVELS), default="quick", show_default=True)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--vary-seed", is_flag=True, help="Draw the seed, and print it.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default="validation-report",
    show_default=True,
    help="Where the report and the results go.",
)
@click.option("--workers", type=click.IntRange(min=1), help="Processes; all cores by default.")
@click.option("--resume", is_flag=True, help="Do not test claims again that --out has results of.")
@click.option("--list", "listing", is_flag=True, help="Print the claims and stop.")
def main(
    claims: tuple[str, ...],
    level: str,
    seed: int,
    vary_seed: bool,
    out: Path,
    workers: int | None,
    resume: bool,
    listing: bool,
) -> None:
    """Test all claims of the sources, or only each CLAIM that is named, and write a report.

    The exit status is 0 if every verdict is the expected one, 1 if not, and 2 for unusable
    arguments. A claim that a source prints wrongly is expected to be refuted. Verdicts on times are
    reported, but do not change the exit status: a busy machine may give others.
    """
    if listing:
        width = max(map(len, suite.claims()))
        for claim in suite.claims().values():
            click.echo(f"{claim.name:<{width}}  {sources.named(claim.source)}: {claim.title}")
        return
    if vary_seed:
        if resume:
            raise click.UsageError("--vary-seed starts a run, and --resume goes on with one.")
        seed = secrets.randbelow(2**32)
    lacking = {name: suite.missing(claim.needs) for name, claim in suite.claims().items()}
    names = list(dict.fromkeys(claims)) or [name for name in lacking if not lacking[name]]
    left_out = (
        [] if claims else [f"{name} needs {', '.join(x)}" for name, x in lacking.items() if x]
    )
    console = Console(stderr=True)
    console.print(f"{len(names)} claims, level {level}, seed {seed}")
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "results.jsonl").open("ab").close()
    except OSError as error:
        raise click.UsageError(f"cannot write to {out}: {error}") from None
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        # Processes started afresh, as threads of this one would not survive a fork.
        with (
            Progress(*columns, console=console, transient=True) as bars,
            ProcessPoolExecutor(
                workers, multiprocessing.get_context("spawn"), runner.end_with_parent
            ) as executor,
        ):
            known = {name: bars.add_task(name, total=None) for name in names}
            try:
                records = runner.run(
                    names,
                    executor,
                    level=level,
                    seed=seed,
                    results=out / "results.jsonl",
                    resume=resume,
                    progress=lambda n, done, of: bars.update(known[n], completed=done, total=of),
                )
            except BaseException:
                executor.shutdown(cancel_futures=True)
                raise
        for path in report.write(runner.settings(level, seed), records, out):
            console.print(f"wrote {path}")
    except BrokenExecutor:
        raise click.ClickException("a worker process died; go on with --resume.") from None
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    except OSError as error:
        raise click.ClickException(f"cannot write the results: {error}") from None
    click.echo(report.summary(records))
    for reason in left_out:
        click.echo(f"left out: {reason}")
    for line in runner.timed_otherwise(records):
        click.echo(f"timed here: {line}", err=True)
    problems = runner.unexpected(records)
    for problem in problems:
        click.echo(f"unexpected: {problem}", err=True)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main(prog_name="python -m validation")
