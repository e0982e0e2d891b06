"""Check files of golden vectors: all are there, unchanged, with the numbers of a new evaluation."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ...arrays.words import with_known_keywords
from .cases import FORMATS
from .reading import files_in, parse, read_vectors, tests_of
from .recipes import all_recipes
from .solving import document
from .writing import encoded, manifest_name, sealed


@with_known_keywords
def lint(
    directory: str | os.PathLike[str],
    *,
    track: Callable[[Sequence[Any]], Iterable[Any]] = iter,
) -> list[str]:
    """Say what is wrong with the vectors of a directory.

    The directory must hold the files of its manifests as they were written, and no others. All
    cases are evaluated again, and must be the same in every digit.

    Parameters
    ----------
    directory : path
        What `write` was given.
    track : callable
        Wraps the sequence of files, for a bar of progress, say.

    Returns
    -------
    list of str
        One line for each problem; empty if all is well.

    Raises
    ------
    ModuleNotFoundError
        If mpmath or, for its files, safetensors is not installed.

    Examples
    --------
    >>> import tempfile
    >>> from refattn.judge import vectors
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = vectors.write(folder, estimator="moments")
    ...     vectors.lint(folder)
    []
    """
    folder, files = Path(directory), files_in(directory)
    listings = {folder / manifest_name(kind) for kind in FORMATS}
    needed = {folder / manifest_name(kind) for kind, _ in files}
    manifests = {path for path in listings if path.is_file()}
    if not files and not manifests:
        return [f"{os.fspath(directory)}: no vectors"]
    missing, listed = sorted(needed - manifests), {path.name for path in manifests}
    problems = [f"{path.name}: is missing: write the vectors again" for path in missing]
    for path in sorted(manifests):
        try:
            data = path.read_bytes()
            manifest = parse(data.decode("ascii"))
            sums = {name: entry["sha256"] for name, entry in manifest["files"].items()}
        except Exception as error:  # anybody may have written it
            problems.append(f"{path.name}: cannot be read: {error!r}")
            missing.append(path)
            continue
        listed |= {*sums}
        problems += [f"{path.name}: is not as it was written"] * (data != sealed(manifest))
        problems += _compare_checksums(path, sums)
    others = set() if missing else {path.name for path in folder.iterdir()} - listed
    problems += [f"{name}: is in no manifest" for name in sorted(others)]
    for kind, path in track(list(files)):
        try:
            content, arrays = read_vectors(kind, path)
            found, now = _parts_of(content, arrays), _evaluate_cases(kind, path.stem, content)
        except ModuleNotFoundError:
            raise
        except Exception as error:  # parsers of foreign bytes raise all kinds
            problems.append(f"{path.name}: cannot be read: {error!r}")
            continue
        differ = sorted(x for x in found.keys() | now.keys() if found.get(x) != now.get(x))
        problems += [f"{path.name}: {x}: is not what a new evaluation gives" for x in differ]
    return problems


def _compare_checksums(manifest: Path, sums: dict[str, str]) -> Iterator[str]:
    """Compare the files of a manifest with their checksums."""
    for name, wanted in sums.items():
        path = manifest.with_name(name)
        if not path.is_file():
            yield f"{name}: is missing"
        elif hashlib.sha256(path.read_bytes()).hexdigest() != wanted:
            yield f"{name}: does not have the SHA-256 of {manifest.name}"


def _evaluate_cases(kind: str, file: str, content: Any) -> dict[str, Any]:
    """Evaluate the cases that a file has, and return what it would say of them."""
    ids = {test["id"] for test in tests_of(content)}
    recipes = [x for x in all_recipes() if x.file == file and x.id in ids]
    if not recipes:
        return {}
    with TemporaryDirectory() as folder:
        path = Path(folder, file)
        path.write_bytes(encoded(kind, document(recipes)))
        return _parts_of(*read_vectors(kind, path))


def _parts_of(content: Any, arrays: Any) -> dict[str, Any]:
    """Return what a file says of each case, with the group that it is in, and its arrays."""
    groups = content["testGroups"]
    cases = {test["id"]: {**group, "tests": test} for group in groups for test in group["tests"]}
    named = (arrays or {}).items()
    return cases | {name: (x.dtype.str, x.shape, x.tobytes()) for name, x in named}
