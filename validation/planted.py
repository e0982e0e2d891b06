"""Bugs planted in the package, and the claim that must notice each: ``planted.toml``.

Run as ``python -m validation.planted``, with parts of names of bugs to plant only those. For each a
fresh process imports the package with a change of its text, and runs the claim at the quick level.
A bug is noticed if a verdict that no clock decides is not the expected one. The exit status is 1 if
some bug is not.
"""

from __future__ import annotations

import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from importlib.machinery import SourceFileLoader
from multiprocessing import get_context
from pathlib import Path
from types import CodeType
from typing import NamedTuple
from unittest.mock import patch


class Bug(NamedTuple):
    """What is wrong, the claim that must notice, and a change of the text of a module."""

    name: str
    claim: str
    module: str
    old: str
    new: str

    def plant(self, source: str) -> str:
        """Return the text of the module with the change."""
        if (count := source.count(self.old)) != 1:
            raise ValueError(f"`{self.module}` has {self.old!r} {count} times, not once.")
        return source.replace(self.old, self.new)


def bugs() -> Iterator[Bug]:
    """All that are planted; those of several claims once for each."""
    text = Path(__file__).with_suffix(".toml").read_text("utf-8")
    for claim, found in tomllib.loads(text).items():
        for name, change in found.items():
            yield Bug(name, claim, *change)


def noticed(bug: Bug, seed: int = 0) -> tuple[list[str], float]:
    """Plant a bug in this process, which must not have imported refattn; say who notices, when."""
    read = SourceFileLoader.get_code

    def get_code(self: SourceFileLoader, fullname: str) -> CodeType | None:
        if fullname != bug.module:
            return read(self, fullname)
        source = bug.plant(self.get_source(fullname) or "")
        return compile(source, self.path, "exec", dont_inherit=True)

    with patch.object(SourceFileLoader, "get_code", get_code):
        from . import runner

        start = time.process_time()
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as one:
            results = Path(folder) / "results.jsonl"
            records = runner.run([bug.claim], one, level="quick", seed=seed, results=results)
    return runner.unexpected(records), time.process_time() - start


def main(words: Sequence[str]) -> int:
    """Plant one bug after another, print what notices it, and count what is not noticed."""
    chosen = [b for b in bugs() if not words or any(w in b.name for w in words)]
    missed = 0
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        for bug, (found, seconds) in zip(chosen, pool.map(noticed, chosen), strict=True):
            missed += not found
            said = found[0] if found else f"{bug.claim}: NOT NOTICED"
            print(f"{bug.name} ({seconds:.1f} s): {said}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} noticed")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
