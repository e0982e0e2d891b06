"""Golden vectors as one file: an archive with checksums, the same bytes whenever it is written."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from ...arrays.words import with_known_keywords
from .exporting import EXPORTS, export
from .writing import write

SUFFIXES = (".tar.gz", ".zip")
SUMS = "SHA256SUMS"

_UNREADABLE = (
    EOFError, NotImplementedError, OSError, RuntimeError, tarfile.TarError, zipfile.BadZipFile,
    zlib.error,
)  # fmt: skip
_LARGEST_ARCHIVE = 2**30  # bytes that are unpacked at most: vectors are a thousandth of it


def is_archive(path: str | os.PathLike[str]) -> bool:
    """Return whether the name is that of an archive, in small letters or not.

    >>> from refattn.judge import vectors
    >>> vectors.archives.is_archive("golden.zip"), vectors.archives.is_archive("golden")
    (True, False)
    """
    return os.fspath(path).lower().endswith(SUFFIXES)


@with_known_keywords
def pack(
    path: str | os.PathLike[str], *, format: str = "json", estimator: str | None = None
) -> list[Path]:
    """Write the golden vectors into one archive.

    It has the files that `write`, or `export`, puts into a directory, and `SHA256SUMS`, which
    ``sha256sum -c SHA256SUMS`` checks. Names are sorted and times fixed: two runs give identical
    bytes. So do two machines for .zip, in which nothing is compressed; bytes of .tar.gz are those
    of a version of zlib.

    Parameters
    ----------
    path : path
        A file that ends in .zip or .tar.gz. One of the same name is replaced.
    format : {"json", "npz", "safetensors", "c", "onnx"}
        As for `write` and `export`.
    estimator : str, optional
        As for `write`.

    Returns
    -------
    list of Path
        The archive.

    Raises
    ------
    ValueError
        If the name does not end so, or the format is unknown.
    ModuleNotFoundError
        If what the format needs is not installed.

    Examples
    --------
    >>> import tempfile, zipfile
    >>> from refattn.judge import vectors
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     [path] = vectors.pack(f"{folder}/golden.zip")
    ...     names = zipfile.ZipFile(path).namelist()
    >>> names[:4]
    ['README.md', 'SHA256SUMS', 'coreset.json', 'eva.json']
    """
    if not is_archive(path):
        raise ValueError(f"`path` must end in .zip or .tar.gz, got {os.fspath(path)!r}.")
    target = Path(path)
    with TemporaryDirectory() as folder:
        written = (export if format in EXPORTS else write)(
            folder, format=format, estimator=estimator
        )
        content = {x.relative_to(folder).as_posix(): x.read_bytes() for x in written}
    content[SUMS] = _write_sums(content)
    data = (_zip if target.suffix.lower() == ".zip" else _tar)(dict(sorted(content.items())))
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.part")
    draft.write_bytes(data)
    os.replace(draft, target)
    return [target]


@contextmanager
def unpacked(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Unpack an archive of plain files into a directory that is there for the time.

    It has no files in other directories, links or names twice, and is not far larger than vectors
    are.

    >>> import tempfile, zipfile
    >>> from refattn.judge import vectors
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with zipfile.ZipFile(f"{folder}/golden.zip", "w") as file:
    ...         file.writestr("README.md", "Vectors")
    ...     with vectors.archives.unpacked(f"{folder}/golden.zip") as found:
    ...         (found / "README.md").read_text()
    'Vectors'
    """
    try:
        members = (_of_zip if Path(path).suffix.lower() == ".zip" else _of_tar)(Path(path))
    except _UNREADABLE as error:
        raise ValueError(f"cannot be read: {error}") from None
    with TemporaryDirectory() as folder:
        for name, data in members:
            target = Path(folder, name)
            if target.exists():
                raise ValueError(f"has {name!r} twice.")
            target.write_bytes(data)
        yield Path(folder)


def wrong_sums(folder: Path) -> list[str]:
    """Describe what is wrong with the checksums of a directory; nothing if it has none."""
    path = folder / SUMS
    if not path.is_file():
        return []
    there = {x.name: x.read_bytes() for x in folder.iterdir() if x.is_file() and x != path}
    if path.read_bytes() == _write_sums(there):
        return []
    lines = path.read_text("ascii", "replace").splitlines()
    listed = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    bad = [
        name for name in sorted({*listed, *there}) if listed.get(name) != _checksum(there.get(name))
    ]
    return [f"{SUMS}: does not match {', '.join(bad)}" if bad else f"{SUMS}: was changed"]


def _checksum(data: bytes | None) -> str | None:
    return None if data is None else hashlib.sha256(data).hexdigest()


def _write_sums(content: dict[str, bytes]) -> bytes:
    """Return checksums as sha256sum reads them."""
    return "".join(f"{_checksum(content[name])}  {name}\n" for name in sorted(content)).encode(
        "ascii"
    )


def _zip(content: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, data in content.items():
            info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            info.create_system, info.external_attr = 3, 0o644 << 16  # whatever the machine
            archive.writestr(info, data)
    return file.getvalue()


def _tar(content: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, data in content.items():
            info = tarfile.TarInfo(name)  # of no user, of the year 1970
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return gzip.compress(file.getvalue(), mtime=0)


def _of_zip(path: Path) -> list[tuple[str, bytes]]:
    with zipfile.ZipFile(path) as archive:
        infos = archive.infolist()
        _check_names({x.filename: x.file_size for x in infos})
        return [(x.filename, archive.read(x)) for x in infos]


def _of_tar(path: Path) -> list[tuple[str, bytes]]:
    with gzip.open(path) as stream:
        data = stream.read(_LARGEST_ARCHIVE + 1)
    _check_names({path.name: len(data)})
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
        infos = archive.getmembers()
        _check_names({x.name: x.size if x.isreg() else -1 for x in infos})
        files = ((x.name, archive.extractfile(x)) for x in infos)
        return [(name, file.read()) for name, file in files if file is not None]


def _check_names(sizes: dict[str, int]) -> None:
    """Check that an archive holds files of one folder only, and how large they are."""
    for name, size in sizes.items():
        if size < 0 or not name or Path(name).name != name or "\\" in name or name == "..":
            raise ValueError(f"has {name!r}, which is no plain file.")
    if sum(sizes.values()) > _LARGEST_ARCHIVE:
        raise ValueError(f"is larger than {_LARGEST_ARCHIVE} bytes.")
