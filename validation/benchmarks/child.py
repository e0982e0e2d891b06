"""Python processes of their own, which find the same packages as this one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[2]


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with some arguments; a child that fails raises with what it wrote."""
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    if done.returncode:
        raise RuntimeError(f"python {' '.join(arguments)}\n{done.stderr}")
    return done
