"""The report of `refattn check`: on a page, and in rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...arrays.words import printable
from .page import Page, Table, limit


def print_report(report: Any, reproducers: bool, page: Page) -> None:
    """Print a report of checks, and scripts that show its failures."""
    if page.markdown:
        _print_checks(report, page)
    else:
        page.report(report.text(min(limit() or 100, 100)))
    for result in report.results if reproducers else ():
        if result.reproducer:
            page.block(printable(f"\n# {result.check}\n{result.reproducer}").removesuffix("\n"))


def _print_checks(report: Any, page: Page) -> None:
    """Print a report of checks as a table."""
    page.say(str(report).splitlines()[0])
    for line in (report.conclusion, *report.diagnosis):
        page.say(printable(line))
    table = Table("check", "status", "finding", left=("status", "finding"))
    for x in report.results:
        likeness = f" (like: {'; '.join(x.likeness)})" if x.likeness and x.status == "FAIL" else ""
        finding = "; ".join([f"{x.summary}{likeness}", *x.shortfalls])
        table.add_row(x.check, x.status, printable(finding))
    for name, why in report.not_tried.items():
        table.add_row(name, "not tried", printable(why))
    page.table(table)
    for name, text in report.limits.items():
        page.say(printable(f"limit of the verdict: {name}: {text}"))
    page.say(report.guarantee)


REPORT_COLUMNS = (
    *("check", "status", "severity", "layer", "claim", "expected", "got", "error", "p"),
    *("adjusted", "samples", "suspects", "reason", "seconds"),
)


def report_rows(report: Any) -> Iterator[dict[str, Any]]:
    """Yield a row for each check, and one for each that was not tried."""
    for result in report.results:
        row = {name: getattr(result, name) for name in REPORT_COLUMNS}
        yield row | {"suspects": "; ".join(result.suspects)}
    for name, why in report.not_tried.items():
        yield {"check": name, "status": "NOT TRIED", "reason": why}
