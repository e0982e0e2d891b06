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
from .cases import DIGITS, FLAGS, GRADIENTS, SCHEMA, VERSION, check_format, read_text
from .reading import cases_of, tests_of
from .recipes import schema
from .solving import documents

# What the format calls each kind of numbers, and how it has them.
_SAFETENSORS = {"b": ("BOOL", "?"), "f": ("F64", "<f8"), "i": ("I64", "<i8")}


def write(
    directory: str | os.PathLike[str], *, format: str = "json", estimator: str | None = None
) -> list[Path]:
    """Write the golden vectors, at least a file for each estimator, with schema and manifest.

    Parameters
    ----------
    directory : path
        Made if it is not there. Files of the same name are replaced, others left alone.
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
    >>> from refattn.conformance import vectors
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     paths = vectors.write(folder, format="npz")
    >>> [path.name for path in paths][:3]
    ['README.md', 'coreset.npz', 'eva.npz']
    """
    check_format(format)
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    encode = {"json": to_json, "npz": _to_npz, "safetensors": _to_safetensors}[format]
    written = documents(estimator)
    content = {f"{name}.{format}": encode(doc) for name, doc in written.items()}
    content["README.md"] = _readme(written).encode()
    content[SCHEMA.name] = (json.dumps(schema(), sort_keys=True, indent=2) + "\n").encode()
    content[manifest_name(format)] = _manifest(content, written)
    paths = [folder / name for name in sorted(content)]
    for path in paths:
        draft = path.with_name(f".{path.name}.part")
        draft.write_bytes(content[path.name])
        os.replace(draft, path)
    return paths


def manifest_name(format: str) -> str:
    return f"manifest-{format}.json"


def _manifest(content: dict[str, bytes], written: dict[str, Any]) -> bytes:
    """Return checksums of files by name, and the names of the cases in those of an estimator."""
    tests = {name: [test["id"] for test in tests_of(doc)] for name, doc in written.items()}
    files = {}
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


def _readme(written: dict[str, Any]) -> str:
    rows = (
        " | ".join(cell.replace("|", "\\|") for cell in (name, *FLAGS[name]))
        for name in sorted(FLAGS)
    )
    return Template(read_text("README.md.txt")).substitute(
        estimators=", ".join(sorted({doc["estimator"] for doc in written.values()})),
        conventions=_table_of_conventions(written),
        digits=DIGITS,
        gradients=", ".join(f"`{name}`" for name in GRADIENTS.values()),
        read_npz=read_text("read_npz.py.txt"),
        read_safetensors=read_text("read_safetensors.cpp"),
        flags="\n".join(f"| {row} |" for row in rows),
    )


def _table_of_conventions(written: dict[str, Any]) -> str:
    groups = written.get("softmax-conventions", {"testGroups": []})["testGroups"]
    conventions = (
        (group["type"], group["convention"]) for group in groups if "convention" in group
    )
    rows = {
        kind: (said["option"], said["value"], ", ".join(said["libraries"]))
        for kind, said in conventions
        if not kind.endswith("-gradients")
    }
    return "\n".join(f"| {' | '.join((kind, *row))} |" for kind, row in rows.items())
