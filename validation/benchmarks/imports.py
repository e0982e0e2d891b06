"""What importing takes, in fresh processes, by ``python -X importtime``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

from .cases import Record
from .child import run_python
from .settings import Settings
from .timing import alternate

STATEMENTS = {  # refattn loads its submodules, and NumPy, when they are first used
    "numpy": ("numpy", "import numpy"),
    "refattn": ("refattn", "import refattn"),
    "refattn and its estimators": ("refattn", "import refattn.estimators"),
}
# Microseconds of a module with all it imports, and its name, which is indented inside another.
_LINE = re.compile(r"import time: *\d+ \| *(\d+) \| (\S+)$", re.MULTILINE)


def run(settings: Settings) -> Iterator[Record]:
    """Time imports in turn."""
    forms = {name: partial(import_seconds, *what) for name, what in STATEMENTS.items()}
    seconds = alternate(forms, settings.repeats, pause=0.0, timer=lambda form: float(form()))  # type: ignore[arg-type]
    entries = [
        {"name": name, "ours": "refattn" in name, "seconds": seconds[name]} for name in forms
    ]
    yield {"case": "import", "dtype": None, "sizes": {}, "forms": entries}


def import_seconds(package: str, statement: str) -> float:
    """Seconds that a statement takes to import a package, NumPy included, in a new process."""
    return total(run_python("-X", "importtime", "-c", statement).stderr, package)


def total(log: str, package: str) -> float:
    """Sum the outermost imports of a package, in seconds."""
    found = _LINE.findall(log)
    return sum(int(us) for us, name in found if name.partition(".")[0] == package) / 1e6
