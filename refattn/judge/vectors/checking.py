"""Check files of golden vectors: format, flags, shapes and, evaluated again, every number."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ... import registry
from ...arrays.library import Floats
from ...arrays.words import with_known_keywords
from ..conformance.conventions import OPTIONS
from .cases import (
    CONTRACT_FACTOR,
    DTYPE_FACTS,
    FORMATS,
    GRADIENTS,
    INSTALL_VECTORS,
    Case,
    Convention,
    is_exact,
)
from .formulas import visible, with_lse
from .meanings import known_meanings, meaning
from .reading import case_of, files_in, parse, read_vectors, tests_of
from .recipes import estimator_of, schema
from .solving import solved
from .sources import libraries, sources
from .writing import manifest_name, sealed

_OF_PAIRS = ("bias", "dropout", "keep", "mask")  # of a query and a key
_OF_SAMPLES = ("indices", "log_probability")


@with_known_keywords
def lint(
    directory: str | os.PathLike[str],
    *,
    fraction: float = 1.0,
    rng: Any = None,
    track: Callable[[Sequence[Any]], Iterable[Any]] = iter,
) -> list[str]:
    """Say what is wrong with the vectors of a directory.

    The directory must hold the files of its manifests as they were written, and no others. They
    must satisfy the schema and more: unique ids and keys, no case twice, flags described
    and used, inputs that are numbers of the stated dtype, shapes that agree, finite outputs,
    allowed errors as the accuracy contract has them. All cases, or a random part, are evaluated
    again, and must give the same digits.

    Parameters
    ----------
    directory : path
        What `write` was given.
    fraction : float, default 1
        Part of the cases that is evaluated again; all of them take a few seconds.
    rng : None, int, numpy.random.Generator or anything numpy.random.default_rng takes
        Chooses them.
    track : callable
        Wraps the sequence of files, for a bar of progress, say.

    Returns
    -------
    list of str
        One line for each problem; empty if all is well.

    Raises
    ------
    ModuleNotFoundError
        If jsonschema, mpmath or, for its files, safetensors is not installed.

    Examples
    --------
    >>> import tempfile
    >>> from refattn.judge import vectors
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = vectors.write(folder)
    ...     vectors.lint(folder, fraction=0.01)
    []
    """
    try:
        from jsonschema import Draft202012Validator
    except ModuleNotFoundError as error:
        message = f"checking vectors {INSTALL_VECTORS}"
        raise ModuleNotFoundError(message, name=error.name) from None
    of_files = schema()
    of_manifests = {"$ref": "#/$defs/manifest", "$defs": of_files["$defs"]}
    folder, files = Path(directory), files_in(directory)
    kinds = {kind for kind in FORMATS if (folder / manifest_name(kind)).is_file()}
    if not files and not kinds:
        return [f"{os.fspath(directory)}: no vectors"]
    generator, problems = np.random.default_rng(rng), []
    manifests: dict[str, Any] = {}
    for kind in sorted(kinds | {kind for kind, _ in files}):
        name = manifest_name(kind)
        if kind not in kinds:
            problems.append(f"{name}: is missing: write the vectors again")
            continue
        manifest, wrong = _lint_manifest(folder / name, Draft202012Validator(of_manifests))
        problems += [f"{name}: {problem}" for problem in wrong]
        manifests |= {} if manifest is None else {name: manifest}
    problems += _lint_files(folder, manifests)
    if len(manifests) == len(kinds) > 0:
        listed = {name for manifest in manifests.values() for name in manifest["files"]}
        there = {path.name for path in folder.iterdir()}
        problems += [f"{name}: is in no manifest" for name in sorted(there - listed - {*manifests})]
    seen: dict[str, Counter[Any]] = {kind: Counter() for kind in FORMATS}
    for kind, path in track(list(files)):
        try:
            document, arrays = read_vectors(kind, path)
            wrong = _schema_errors(Draft202012Validator(of_files), document)
        except ModuleNotFoundError:
            raise
        except Exception as error:  # parsers of foreign bytes raise all kinds
            problems.append(f"{path.name}: cannot be read: {error}")
            continue
        if not wrong:
            entry = manifests.get(manifest_name(kind), {"files": {}})["files"].get(path.name)
            wrong = [] if entry is None else list(_lint_ids(document, entry.get("tests", [])))
            wrong += _lint_file(
                path, document, arrays, seen[kind], lambda: generator.random() < fraction
            )
        problems += [f"{path.name}: {problem}" for problem in wrong]
    return problems


def _schema_errors(schema: Any, document: Any) -> list[str]:
    return [
        f"{'/'.join(map(str, error.absolute_path))}: {error.message[:200]}"
        for error in schema.iter_errors(document)
    ]


def _lint_manifest(path: Path, schema: Any) -> tuple[Any, list[str]]:
    """Return a manifest, or None if it is of no use, and what is wrong with it."""
    try:
        data = path.read_bytes()
        manifest = parse(data.decode("ascii"))
        wrong = _schema_errors(schema, manifest)
    except Exception as error:
        return None, [f"cannot be read: {error}"]
    if wrong:
        return None, wrong
    return manifest, [] if data == sealed(manifest) else ["is not as it was written"]


def _lint_files(folder: Path, manifests: dict[str, Any]) -> Iterator[str]:
    """Compare files with their checksums."""
    for listing, manifest in manifests.items():
        for name, entry in manifest["files"].items():
            path = folder / name
            if not path.is_file():
                yield f"{name}: is missing"
                continue
            data = path.read_bytes()
            if len(data) != entry["bytes"]:
                yield f"{name}: has {len(data)} bytes, not the {entry['bytes']} of {listing}"
            elif hashlib.sha256(data).hexdigest() != entry["sha256"]:
                yield f"{name}: does not have the SHA-256 of {listing}"


def _lint_ids(document: Any, ids: list[str]) -> Iterator[str]:
    """Compare the cases of a file with those of its manifest."""
    there = {test["id"] for test in tests_of(document)}
    yield from (f"{name}: is missing" for name in ids if name not in there)
    yield from (f"{name}: is not in the manifest" for name in sorted(there - set(ids)))


def _lint_file(
    path: Path,
    document: Any,
    arrays: dict[str, Floats] | None,
    seen: Counter[Any],
    again: Callable[[], bool],
) -> Iterator[str]:
    tests = tests_of(document)
    for group in document["testGroups"]:
        yield from _lint_group(group)
    if document["estimator"] != estimator_of(path.stem):
        yield f"estimator is {document['estimator']!r}"
    if document["numberOfTests"] != len(tests):
        yield f"numberOfTests is {document['numberOfTests']}, but there are {len(tests)}"
    used, described = {flag for test in tests for flag in test["flags"]}, set(document["notes"])
    for flag in sorted(used ^ described):
        yield f"flag {flag} is {'not described' if flag in used else 'described but not used'}"
    listed = set()
    for group, test in ((g, test) for g in document["testGroups"] for test in g["tests"]):
        seen[test["id"]] += 1
        if seen[test["id"]] > 1:
            yield f"{test['id']}: id is used twice"
        try:
            case = case_of(document["estimator"], group, test, arrays)
            if arrays is not None:
                listed |= {f"{case.id}.{name}" for name in case.inputs}
                listed |= {f"{case.id}.{name}.{part}" for name in case.expected
                          for part in ("expected", "expected_low", "size")}  # fmt: skip
            problems = list(_lint_case(case, test, arrays is None))
            content = meaning(case)
            seen[content] += 1
            if seen[content] > 1:
                problems.append("the same inputs and arguments as another case")
            if not problems and again():
                problems = list(_lint_again(case, group, test, arrays is None))
            if known_meanings().get(case.id, content) != content:
                problems.append("is the id of other inputs, arguments or another convention")
        except Exception as error:  # the numbers may be anything that the schema allows
            problems = [f"{type(error).__name__}: {error}"]
        yield from (f"{test['id']}: {problem}" for problem in problems)
    if arrays is not None:
        yield from (f"array {name} belongs to no case" for name in sorted(set(arrays) - listed))


def _lint_group(group: dict[str, Any]) -> Iterator[str]:
    """Compare a group's source and libraries with those that are known."""
    said, kind = group.get("convention"), group["type"]
    convention = None
    if said is not None:
        convention = Convention(said["option"], said["value"])
        if convention.value not in getattr(OPTIONS.get(convention.option), "values", ()):
            yield f"{kind}: {convention.option} {convention.value!r} is not a convention"
            return
        if said["libraries"] != libraries(convention):
            yield f"{kind}: libraries are not those of the table of conventions"
    if group["source"] != sources(kind, convention):
        yield f"{kind}: source does not name the sources of the group"


def _lint_case(case: Case, test: dict[str, Any], with_data: bool) -> Iterator[str]:
    """Check what can be checked without evaluating."""
    for part in ("inputs", "expected"):
        for name, tensor in test[part].items():
            if with_data != ("data" in tensor):
                yield f"{name}: data must be {'here' if with_data else 'in the arrays'}"
            if tuple(tensor["shape"]) != getattr(case, part)[name].shape:
                yield f"{name}: has shape {getattr(case, part)[name].shape}, not the stated one"
    for name, x in case.inputs.items():
        if (x.dtype == np.int64) != (name == "indices") or x.dtype.kind not in "bfi":
            yield f"{name}: has dtype {x.dtype}"
        elif not np.all(np.isfinite(x)) or not is_exact(x, case.dtype):
            yield f"{name}: is not exact in {case.dtype}"
    for name, x in case.expected.items():
        holes = _holes(case, name)
        if np.any(~np.isfinite(x) & ~holes) or not np.all(np.isfinite(case.expected_low[name])):
            yield f"{name}: expected values are not finite"
        try:
            fits = np.broadcast_shapes(x.shape, case.size[name].shape) == x.shape
        except ValueError:
            fits = False
        if not fits or case.expected_low[name].shape != x.shape:
            yield f"{name}: shapes of expected values and sizes do not agree"
    shapes = {name: x.shape for name, x in case.expected.items()}
    if (wanted := _shapes(case)) != shapes:
        yield f"shapes {shapes} do not follow from the inputs, {wanted}"
    for dtype, allowed in case.tolerance.items():
        if allowed != CONTRACT_FACTOR * DTYPE_FACTS[dtype][1] * (1 + case.cond):
            yield f"tolerance for {dtype} is not 16 eps (1 + cond)"
    if (case.result == "acceptable") != ("EPS" in case.flags):
        yield f"result {case.result!r} does not go with the flags"


def _holes(case: Case, name: str) -> Floats:
    """Mark where an output may be nan or infinite: its row sees no key."""
    if name not in ("out", "lse") or np.all(np.isfinite(case.expected[name])):
        return np.array(False)
    empty = np.asarray(~visible(case).any(-1))
    return empty[..., None] if name == "out" else empty


def _shapes(case: Case) -> dict[str, tuple[int, ...]]:
    """Return shapes of the outputs; raises where those of the inputs do not agree."""
    x = {name: value.shape for name, value in case.inputs.items()}
    others = ("v", "past_v", "d_out", "d_lse", "log_weight", "sinks", "slopes", *_OF_SAMPLES)
    sizes = {shape[-1] for name, shape in x.items() if name not in (*others, *_OF_PAIRS)}
    if len(sizes) != 1:
        raise ValueError(f"head sizes {sorted(sizes)} differ")
    record = registry.ESTIMATORS[case.estimator]
    if record.has("rows"):
        d = x["x"][-1]
        return {"mean": (d,), "cov": (d, d)}
    if record.has("pairs"):
        if x["x"] != x["y"]:
            raise ValueError(f"shapes {x['x']} and {x['y']} of pairs differ")
        return {"out": x["x"][:1]}
    if x["k"][:-1] != x["v"][:-1]:
        raise ValueError(f"shapes {x['k']} and {x['v']} of keys and values do not agree")
    pairs = (*x["q"][:-1], x["k"][-2])
    for name in _OF_PAIRS:
        if np.broadcast_shapes(x.get(name, ()), pairs) != pairs:
            raise ValueError(f"shape {x[name]} of {name} does not fit {pairs}")
    for name in {"sinks", "slopes"} & x.keys():
        if x[name] != pairs[:-2]:
            raise ValueError(f"shape {x[name]} of {name} is not that of the heads, {pairs[:-2]}")
    if "indices" in x:
        _check_sample(case, pairs)
    shapes = {"out": (*x["q"][:-1], x["v"][-1])}
    if with_lse(case):
        shapes["lse"] = x["q"][:-1]
    for name in {"out", "lse"} & shapes.keys():
        if f"d_{name}" in x and x[f"d_{name}"] != shapes[name]:
            raise ValueError(f"shape {x[f'd_{name}']} of d_{name} is not {shapes[name]}")
    if "d_out" in x:
        shapes |= {GRADIENTS[name]: shape for name, shape in x.items() if name in GRADIENTS}
    return shapes


def _check_sample(case: Case, pairs: tuple[int, ...]) -> None:
    """Raise where indices are not of keys, or not of the queries that there are."""
    indices, (*rows, m) = case.inputs["indices"], pairs
    if indices.min() < 0 or indices.max() >= m:
        raise ValueError(
            f"indices from {indices.min()} to {indices.max()} are not all from 0 to {m - 1}"
        )
    if indices.shape[:-1] not in ((), tuple(rows)):
        raise ValueError(f"shape {indices.shape} of indices does not fit queries {tuple(rows)}")
    if case.inputs.get("log_probability", indices).shape != indices.shape:
        raise ValueError(f"log_probability does not have the shape of indices, {indices.shape}")


def _lint_again(
    case: Case, group: dict[str, Any], test: dict[str, Any], with_data: bool
) -> Iterator[str]:
    """Evaluate the case from the inputs in the file."""
    fresh = solved(case)
    again = case_of(case.estimator, group, fresh)
    for name in case.expected:
        same = all(
            np.array_equal(getattr(case, part)[name], getattr(again, part)[name], equal_nan=True)
            for part in ("expected", "expected_low", "size")
        )
        if not same or (with_data and test["expected"][name] != fresh["expected"][name]):
            yield f"{name}: a new evaluation gives other digits or sizes"
    if (case.cond, case.tolerance) != (again.cond, again.tolerance):
        yield "cond or tolerance does not follow from the inputs"
