"""The report of a run: a page, a summary and numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["summary", "write"]


def write(settings: dict[str, Any], records: list[dict[str, Any]], out: Path) -> list[Path]:
    """Write the report into a directory and return its files."""
    path = out / "report.json"
    path.write_text(json.dumps({"settings": settings, "claims": records}, indent=1) + "\n")
    return [path]


def summary(records: list[dict[str, Any]]) -> str:
    """One line for each statement."""
    lines = []
    for one in records:
        for s in one["statements"]:
            lines.append(f"{s['verdict']:<13}{one['claim']}, {s['name']}: {s['number']}")
        if "error" in one:
            lines.append(f"{'ERROR':<13}{one['claim']}")
    return "\n".join(lines)
