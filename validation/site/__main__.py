"""The command line: ``python -m validation.site``."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PACKAGES = "click latex2mathml myst_parser numpydoc pydata_sphinx_theme sphinx sphinx_gallery"
if missing := [name for name in PACKAGES.split() if find_spec(name) is None]:
    names = ", ".join(missing)
    sys.stderr.write(f"validation.site: error: needs `pip install 'refattn[site]'` ({names})\n")
    sys.exit(2)

import click  # noqa: E402

from .documents import ROOT, SITE, gather  # noqa: E402

# Claims of the report if none is given: exact ones that take little time.
CLAIMS = ("rfa_is_snis", "lara_cases", "attention_as_expectation", "linear_attention")
NOTE = f"""\
When these pages were built, `python -m validation {" ".join(CLAIMS)}` tested a few claims of
the sources that take little time. [How all claims are tested](../README.md)."""


@click.command()
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default="build/site",
    show_default=True,
    help="Folder for the pages.",
)
@click.option(
    "--report",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="The report of a run of `python -m validation`.  [default: test a few quick claims]",
)
def main(out: Path, report: Path | None) -> None:
    """Build the guide, the API, the report and the gallery as pages that need no server."""
    if out.exists() and any(out.iterdir()) and not (out / "searchindex.js").exists():
        message = f"{out} holds other files; choose a new folder, or one of an earlier build."
        raise click.ClickException(message)
    if report is not None and not (report / "report.html").is_file():
        message = f"{report} holds no report.html; `python -m validation` writes one."
        raise click.ClickException(message)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        text, pages = Path(folder) / "text", Path(folder) / "pages"
        note, report = ("", report) if report else (NOTE, _try(Path(folder) / "report"))
        gather(text, report, note)
        status = _build(text, pages)
        if not (pages / "index.html").is_file():
            raise click.ClickException("Sphinx wrote no pages.")
        shutil.copytree(report, pages / "report", ignore=shutil.ignore_patterns("results.*"))
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(pages, out)
    count = sum(1 for _ in out.rglob("*.html"))
    click.echo(f"wrote {out / 'index.html'}: {count} pages, {time.monotonic() - start:.1f} s")
    sys.exit(status)


def _try(folder: Path) -> Path:
    """Try a few claims, and return the folder of their report."""
    arguments = (*CLAIMS, "--workers", "1", "--out", str(folder))
    if _run("validation", *arguments, stdout=subprocess.DEVNULL):
        raise click.ClickException(f"`python -m validation {' '.join(CLAIMS)}` failed.")
    return folder


def _build(text: Path, pages: Path) -> int:
    """Run Sphinx, and return its status: 1 after a warning."""
    options = ("-W", "--keep-going", "-q", "-j", "auto", "-c", str(SITE))
    return _run("sphinx", *options, "-d", str(pages.with_name("read")), str(text), str(pages))


def _run(module: str, *arguments: str, **options: Any) -> int:
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, cwd=ROOT, check=False, **options).returncode


if __name__ == "__main__":
    main(prog_name="python -m validation.site")
