"""What files say that they hold: found, and refused, before any of it is read."""

from __future__ import annotations

import math
import stat
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from ..arrays.words import one_word

_MOST_AXES = 64
_LONGEST_HEADER = 1 << 16  # bytes of a header, which takes about 100
_MUCH, _MOST_TIMES = 10**8, 200  # bytes, and times what is stored of them
_OTHER_FILES = {
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
    stat.S_ISFIFO: "a pipe",
    stat.S_ISSOCK: "a socket",
    stat.S_ISDIR: "a folder",
}


def must_be_a_file(path: Path) -> None:
    """Refuse what is no regular file, or is empty, without opening it: a pipe may never answer."""
    try:
        found = path.stat()
    except OSError as error:  # not there, or links in a circle
        raise ValueError(f"cannot read {str(path)!r}: {error.strerror or error}") from None
    if not stat.S_ISREG(found.st_mode):
        kinds = [words for test, words in _OTHER_FILES.items() if test(found.st_mode)]
        what = kinds[0] if kinds else "something else"
        raise ValueError(f"cannot read {str(path)!r}: {what}, not a regular file")
    if not found.st_size:  # so are the files by which a kernel talks, which may wait for ever
        raise ValueError(f"cannot read {str(path)!r}: the file is empty")
    if blocks := getattr(found, "st_blocks", 0):  # 0 where the system does not count them
        _must_be_stored(f"cannot read {str(path)!r}: it", found.st_size, 512 * blocks)


def list_members(archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """Find the members of an .npz archive by the names of their arrays."""
    members: dict[str, zipfile.ZipInfo] = {}
    for member in archive.infolist():
        name = member.filename.removesuffix(".npy")
        if name in members:
            raise ValueError(f"two arrays of the name {one_word(name)!r}")
        members[name] = member
    return members


def read_size(archive: zipfile.ZipFile, name: str, member: zipfile.ZipInfo) -> int:
    """Read the header of an array in an archive, and return how many bytes the array has."""
    with archive.open(member) as stream:
        start = stream.read(12)
        wide = start[6:7] != b"\x01"  # version 1 has a length of two bytes
        length = int.from_bytes(start[8 : 12 if wide else 10], "little")
        if not start.startswith(np.lib.format.MAGIC_PREFIX) or len(start) < 12:
            raise ValueError(f"`{name}` is not an array")
        if length > _LONGEST_HEADER:
            raise ValueError(f"`{name}` has a header of {length} bytes")
        stream.seek(0)
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_2_0 if wide else np.lib.format.read_array_header_1_0
        if version not in ((1, 0), (2, 0)):  # 3 is for names of fields
            raise ValueError(f"`{name}` is of version {version[0]} of its format")
        try:
            shape, _, dtype = read(stream)
        except ValueError as error:
            raise ValueError(f"`{name}`: {error}") from None
        must_have_axes(name, shape)
        if dtype.hasobject:
            raise ValueError(f"`{name}`: holds Python objects, not numbers")
        size = math.prod(shape) * dtype.itemsize
        there = member.file_size - stream.tell()
        if min(shape, default=0) < 0 or size != there:
            raise ValueError(f"`{name}` of shape {shape} and {dtype} has {there} bytes")
    return size


def must_have_axes(name: str, shape: Sequence[int]) -> None:
    """Check that NumPy has arrays of so many axes."""
    if len(shape) > _MOST_AXES:
        raise ValueError(f"`{name}` has {len(shape)} axes, of which NumPy has {_MOST_AXES} at most")


def _must_be_stored(what: str, size: int, stored: int) -> None:
    """Refuse what is nearly all zeros that are not stored: it may take any time to read."""
    if size > max(_MUCH, _MOST_TIMES * stored):
        raise ValueError(
            f"{what} would take {size / 1e9:.4g} GB, of which {stored / 1e6:.3g} MB are stored; "
            "the rest is zeros; if they are meant, write them all, as numpy.savez does"
        )


def must_fit(sizes: Mapping[str, int], stored: int) -> None:
    """Refuse arrays that take more memory than there is, or far more than is stored."""
    needed, free = sum(sizes.values()), free_memory()
    names = ", ".join(f"`{name}`" for name in sizes)
    _must_be_stored(names, needed, stored)
    if needed > free:
        raise ValueError(
            f"{names} take {needed / 1e9:.4g} GB, and {free / 1e9:.3g} GB of memory are free"
        )


def free_memory() -> float:
    """Count the bytes that this process may still take, as far as the system says."""
    free = math.inf
    with suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
        free = 1024.0 * int(next(x for x in lines if x.startswith("MemAvailable:")).split()[1])
    with suppress(OSError, ValueError):  # of a container
        most, now = (
            int(Path(f"/sys/fs/cgroup/memory.{x}").read_text("ascii")) for x in ("max", "current")
        )
        free = min(free, most - now)
    with suppress(ImportError):  # on Windows
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        free = free if limit == resource.RLIM_INFINITY else min(free, limit)
    return free
