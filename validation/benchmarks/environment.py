"""What a run was made on, without anything that names the machine."""

from __future__ import annotations

import ctypes
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from threadpoolctl import threadpool_info

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # numbers of options of glibc's mallopt
_LARGE = 2**22  # bytes

_PACKAGES = (
    "refattn",
    "numpy",
    "scipy",
    "threadpoolctl",
    "torch",
    "performer-pytorch",
    "pytorch-fast-transformers",
)


def describe() -> dict[str, Any]:
    """Processor, system, versions and BLAS."""
    blas = [x for x in threadpool_info() if x["user_api"] == "blas"]
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "blas": [
            {key: x.get(key) for key in ("internal_api", "version", "architecture", "num_threads")}
            for x in blas
        ],
    }


def map_large_arrays() -> bool:
    """Give arrays of 4 MiB and more new memory, where the C library is glibc; say whether it is.

    Left alone, glibc keeps what was freed up to the size of the largest array so far, at most 32
    MiB: whether mapping memory is part of a time would depend on what ran before. Now only what
    lies between arrays that are still held is kept.
    """
    try:
        library = ctypes.CDLL(None)
        done = library.mallopt(_M_MMAP_THRESHOLD, _LARGE) and library.mallopt(
            _M_TRIM_THRESHOLD, _LARGE
        )
        library.malloc_trim(0)
    except (AttributeError, OSError, TypeError):  # another library, or Windows
        return False
    return bool(done)


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or "unknown"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
