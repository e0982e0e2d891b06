"""Failures of the tests of one candidate: the first of a cause is told, and others are counted."""

from __future__ import annotations

import os
import re
import tempfile
from collections import Counter
from pathlib import Path

from .report import Report

_ODD = re.compile(r"[^\w.-]+")


class Failures:
    """The failures of a candidate so far, each as the report of one check."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._first: dict[str, str] = {}  # the first check, by what was received and by its cause
        self._alike: Counter[str] = Counter()

    def describe(self, report: Report) -> str:
        """Write a failure with its script, or which failure before it has the same cause."""
        result = report.results[0]
        exception = result.got.partition(";")[0]  # what follows says how the candidate was called
        causes = [f"{result.expected} {exception}", *report.diagnosis]
        first = next((self._first[x] for x in causes if x in self._first), "")
        self._first |= {x: first or result.check for x in causes if x not in self._first}
        if first:
            self._alike[first] += 1
            words = f"like {first}, which was told ({self._alike[first]} more so far)"
            return f"{result.summary}\n{words}"
        lines = [*result.failure(), *report.diagnosis, f"refattn explain {result.check}"]
        return "\n".join([*lines, self._write(result.check, result.reproducer, report.seed)])

    def _write(self, check: str, script: str, seed: int) -> str:
        """Write a script to a new file, and say where; without a folder for it, only the seed."""
        name = _ODD.sub("-", f"refattn-{self.name}-{check}-")
        try:
            handle, path = tempfile.mkstemp(".py", name)
            os.close(handle)
            Path(path).write_text(script, encoding="utf-8")
        except OSError:
            return f"seed {seed}"
        return f"script: {path} (inputs are of seed {seed})"
