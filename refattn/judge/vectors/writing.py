"""Files of golden vectors, the same bytes whenever and wherever they are written."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import zipfile
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from ...arrays.library import Floats
from ...arrays.words import with_known_keywords
from .cases import DIGITS, FLAGS, FORMATS, GRADIENTS, SCHEMA, VERSION, check_format, read_text
from .reading import cases_of, files_in, parse, tests_of
from .recipes import all_recipes, estimator_of, schema
from .solving import documents
from .sources import libraries

# What the format calls each kind of numbers, and how it has them.
_SAFETENSORS = {"b": ("BOOL", "?"), "f": ("F64", "<f8"), "i": ("I64", "<i8")}


@with_known_keywords
def write(
    directory: str | os.PathLike[str], *, format: str = "json", estimator: str | None = None
) -> list[Path]:
    """Write the golden vectors, at least a file for each estimator, with schema and manifest.

    Parameters
    ----------
    directory : path
        Made if it is not there. Files of the same name are replaced, others left alone. README and
        manifests are of all vectors in it.
    format : {"json", "npz", "safetensors"}
        "json" has inputs as C99 hexadecimal floats and outputs as 34 digits; the others have
        float64 arrays, outputs as two of them whose sum has about 32 digits.
    estimator : str, optional
        One of `ESTIMATORS`, to write its files only.

    Returns
    -------
    list of Path
        The files written.

    Raises
    ------
    ValueError
        If the format or the estimator is unknown.
    ModuleNotFoundError
        If mpmath is not installed.

    Examples
    --------
    >>> import tempfile
    >>> from refattn.judge import vectors
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     paths = vectors.write(folder, format="npz")
    >>> [path.name for path in paths][:3]
    ['README.md', 'coreset.npz', 'eva.npz']
    """
    check_format(format)
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    written = documents(estimator)
    content = {f"{name}.{format}": encoded(format, doc) for name, doc in written.items()}
    beside = {estimator_of(path.stem) for _, path in files_in(folder)}
    readme = _readme(beside | {document["estimator"] for document in written.values()})
    text = json.dumps(schema(), sort_keys=True, indent=2) + "\n"
    shared = {"README.md": readme.encode(), SCHEMA.name: text.encode()}
    content |= shared
    manifests = {manifest_name(format): _manifest(folder, format, content, written)}
    for kind in {*FORMATS} - {format}:
        path = folder / manifest_name(kind)
        made = _manifest(folder, kind, shared, written)
        if path.is_file() and made != path.read_bytes():
            manifests[path.name] = made
    content |= manifests
    paths = [folder / name for name in sorted(content)]
    for path in paths:
        draft = path.with_name(f".{path.name}.part")
        draft.write_bytes(content[path.name])
        os.replace(draft, path)
    return paths


def encoded(format: str, document: dict[str, Any]) -> bytes:
    """Return the file of a document."""
    encode = {"json": to_json, "npz": _to_npz, "safetensors": _to_safetensors}[format]
    return encode(document)


def manifest_name(format: str) -> str:
    return f"manifest-{format}.json"


def _listed(manifest: Path) -> dict[str, Any]:
    """Return the entries of a manifest whose files are still there; none if it cannot be read."""
    try:
        files = parse(manifest.read_text("ascii"))["files"]
        return {name: entry for name, entry in files.items() if (manifest.parent / name).is_file()}
    except Exception:  # anybody may have written it
        return {}


def _manifest(folder: Path, kind: str, content: dict[str, bytes], written: dict[str, Any]) -> bytes:
    """Return checksums of files by name, and the names of the cases in those of an estimator."""
    tests = {name: [test["id"] for test in tests_of(doc)] for name, doc in written.items()}
    files = _listed(folder / manifest_name(kind))
    for name, data in content.items():
        files[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        if (file := name.partition(".")[0]) in tests:
            files[name] |= {"numberOfTests": len(tests[file]), "tests": tests[file]}
    version = next(iter(written.values()))["packageVersion"]
    return sealed({"files": files, "package": "refattn", "packageVersion": version,
                    "schema": SCHEMA.name, "schemaVersion": VERSION})  # fmt: skip


def sealed(manifest: dict[str, Any]) -> bytes:
    """Return the file of a manifest, with the checksum of all else in it."""
    body = {key: value for key, value in manifest.items() if key != "sha256"}
    return to_json(body | {"sha256": hashlib.sha256(to_json(body)).hexdigest()})


def to_json(document: dict[str, Any]) -> bytes:
    """Write arrays of numbers and strings on one line each."""
    text = json.dumps(document, sort_keys=True, indent=1, allow_nan=False)
    text = re.sub(r"\[\n[^\[\]{}]*\]", lambda match: " ".join(match.group().split()), text)
    return (text + "\n").encode("ascii")


def _arrays(document: dict[str, Any]) -> tuple[bytes, dict[str, Floats]]:
    """Take the arrays out of a document: what is left, as JSON, and the arrays by name."""
    arrays: dict[str, Floats] = {}
    document = json.loads(json.dumps(document))
    for case, test in zip(cases_of(document), tests_of(document), strict=True):
        parts = {"expected": case.expected, "expected_low": case.expected_low, "size": case.size}
        arrays |= {f"{case.id}.{name}": x for name, x in case.inputs.items()}
        for part, named in parts.items():
            arrays |= {f"{case.id}.{name}.{part}": x for name, x in named.items()}
        for tensor in (*test["inputs"].values(), *test["expected"].values()):
            del tensor["data"]
            tensor.pop("size", None)
    return json.dumps(document, sort_keys=True).encode("ascii"), dict(sorted(arrays.items()))


def _to_npz(document: dict[str, Any]) -> bytes:
    metadata, arrays = _arrays(document)
    arrays["metadata"] = np.frombuffer(metadata, np.uint8)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(arrays):
            info = zipfile.ZipInfo(f"{name}.npy", (1980, 1, 1, 0, 0, 0))
            info.create_system = 3  # the default depends on the machine
            member = io.BytesIO()
            np.lib.format.write_array(member, arrays[name], (1, 0), allow_pickle=False)
            archive.writestr(info, member.getvalue())
    return file.getvalue()


def _to_safetensors(document: dict[str, Any]) -> bytes:
    metadata, arrays = _arrays(document)
    header: dict[str, Any] = {"__metadata__": {"refattn": metadata.decode()}}
    body = b""
    for name in sorted(arrays, key=lambda name: (arrays[name].dtype == bool, name)):
        x = arrays[name]
        kind, dtype = _SAFETENSORS[x.dtype.kind]
        data = x.astype(dtype).tobytes()
        header[name] = {
            "dtype": kind,
            "shape": list(x.shape),
            "data_offsets": [len(body), len(body) + len(data)],
        }
        body += data
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + body


def _readme(names: set[str]) -> str:
    rows = (
        " | ".join(cell.replace("|", "\\|") for cell in (name, *FLAGS[name]))
        for name in sorted(FLAGS)
    )
    return Template(read_text("README.md.txt")).substitute(
        estimators=", ".join(sorted(names)),
        conventions=_table_of_conventions(names),
        digits=DIGITS,
        gradients=", ".join(f"`{name}`" for name in GRADIENTS.values()),
        read_npz=read_text("read_npz.py.txt"),
        read_safetensors=read_text("read_safetensors.cpp"),
        flags="\n".join(f"| {row} |" for row in rows),
    )


def _table_of_conventions(names: set[str]) -> str:
    rows = {
        x.group: (*x.convention, ", ".join(libraries(x.convention)))
        for x in all_recipes()
        if x.estimator in names and x.convention and not x.group.endswith("-gradients")
    }
    return "\n".join(f"| {' | '.join((kind, *rows[kind]))} |" for kind in sorted(rows))
