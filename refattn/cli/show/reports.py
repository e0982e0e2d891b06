"""The report of `refattn check` on a page."""

from __future__ import annotations

from typing import Any

from ...arrays.words import printable
from .page import Page, limit


def print_report(report: Any, reproducers: bool, page: Page, *, verbose: bool = False) -> None:
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
