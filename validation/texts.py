"""Tables of texts, in files where they need no quotes and no escapes."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any


def read(path: Path) -> dict[str, Any]:
    """Read a table; where a line ends in a text makes no difference, and lists are tuples."""
    return {key: _joined(x) for key, x in tomllib.loads(path.read_text("utf-8")).items()}


def _joined(x: Any) -> Any:
    if isinstance(x, dict):
        return {key: _joined(value) for key, value in x.items()}
    if isinstance(x, list):
        return tuple(map(_joined, x))
    return " ".join(x.split()) if isinstance(x, str) else x
