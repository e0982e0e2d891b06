"""Pose the problem of a file, and pair the numbers of a file or a call with what they are to be."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ...arrays import checks, qkv
from ...arrays.library import Doubles
from ...arrays.stored import NARROW, ONE_STRAY
from ...arrays.words import name_some
from ...engine.scores import Band
from ...features import elu_features
from ...files.tensors import Tensors
from ...registry import ESTIMATORS
from ..kinds.chosen import CHOSEN, choose_keys
from ..kinds.parts import PART_ARRAYS, pose_parts
from ..kinds.sequences import keep_sequences, limit_sequences
from ..mistakes.causes.places import remark_stray
from ..mistakes.causes.wrong_rows import thin
from ..rounding.derived.rows import open_formula, pose_text
from ..rounding.derived.texts import TEXTS
from ..rounding.formats import FORMATS
from ..rounding.layers import pose_recurrence
from ..rounding.linear import read_frequencies
from ..rounding.problems import (
    CALLED,
    Index,
    Problem,
    check_mask_of_keys,
    count_key_heads,
    hide_unseen,
    pose_gradients,
    refuse,
)
from ..rounding.profiles import profile_of
from .choice import is_narrow
from .findings import Numbers, Part
from .inputs import type_of_states, unlimited, widest

_BACKWARD = ("dq", "dk", "dv")
DERIVED = ("float32", "float16", "bfloat16")  # types of inputs whose laws are derived
_ROWS_OF_TYPE, _HEADS_OF_TYPE = 64, 4  # rows that tell the type, and their heads
_MOVED = 2.0**-18  # of a number, that roundings of float32 do not move it by
_KINDS = {"exact": "scores", "random-features": "frequencies", "feature-map": "map"}
_KINDS |= {"recurrent": "recurrent"}
_GIVEN = ("omega", "log_weight", "centres", "indices")  # of estimators whose laws are derived


def pose_tensors(
    tensors: Tensors,
    *,
    estimator: str = "softmax",
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    features: str = "positive",
    feature_map: Callable[[Any], Any] | None = None,
    chunk: int | None = None,
    num_proposals: int | None = None,
    kernel_epsilon: float | None = None,
) -> Problem:
    """Pose the problem of a file, reading one head at a time."""
    shapes = tensors.shapes
    used = {"scores": ("bias", "mask", "sinks"), "frequencies": ("omega", "mask"), "map": ("mask",)}
    kind = kind_of(estimator)
    refuse_sequences(tensors.sequences, kind, estimator)
    if kind == "text":
        for name in ("bias", "sinks"):
            refuse(name, shapes.get(name), estimator)
        refuse("softcap", softcap, estimator)
        given: dict[str, Any] = {"window": window if chunk is None else chunk}
        given |= {"num_proposals": num_proposals, "kernel_epsilon": kernel_epsilon}
        arrays = {x: tensors.part(x, ()) for x in ("q", "k", "v", "mask", *_GIVEN) if x in shapes}
        if "indices" in arrays:  # numbers of files are read in float64
            arrays["indices"] = arrays["indices"].astype(np.int64)
        return pose_by_text(estimator, arrays, given, tensors.dtype, scale, causal)
    of_text = {"chunk": chunk, "num_proposals": num_proposals, "kernel_epsilon": kernel_epsilon}
    for name, size in of_text.items():
        refuse(name, size, kind)
    if kind == "frequencies" and "omega" not in shapes:
        raise ValueError(
            f"`omega` must be in FILE for rfa: frequencies (..., S, d); "
            f"{str(tensors.path)!r} has none."
        )
    if kind != "scores":
        for name in ("bias", "sinks"):
            refuse(name, shapes.get(name), kind)
        refuse("window", window, kind)
        refuse("softcap", softcap, kind)
    if kind == "recurrent":
        refuse("mask", shapes.get("mask"), kind)
        return pose_states(tensors, estimator, scale)["out"]
    check_mask_of_keys(shapes.get("mask", ()), kind)
    names = [x for x in ("q", "k", "v", *used[kind]) if x in shapes]
    n, m = shapes["q"][-2], shapes["k"][-2]
    window = qkv.window(unlimited(window))
    limits = causal, window
    see = limit_sequences(tensors.sequences, (n, m), *limits)
    if see is not None:
        causal, window = False, (None, None)
    band = Band.of(m - n, causal, window)

    @lru_cache(maxsize=4)  # every block of queries reads its head
    def read(index: Index) -> Mapping[str, Any]:
        arrays: dict[str, Any] = {name: tensors.read(name, index) for name in names}
        if "omega" in arrays:
            arrays |= read_frequencies(arrays["omega"], None, features, arrays["q"])
        if see is not None:
            arrays["mask"] = arrays["mask"] & see(index)
        return hide_unseen(arrays, band)

    # Heads are read when they are analysed: arrays of a file may be larger than memory.
    posed = Problem(
        tensors.lead,
        (n, m, shapes["v"][-1]),
        read,
        qkv.scale_or_default(scale, shapes["q"][-1]),
        causal,
        window,
        checks.real("softcap", softcap, positive=True, optional=True),
        (feature_map or elu_features) if kind == "map" else None,
        kind,
        has_sinks="sinks" in names,
        key_heads=count_key_heads(shapes["k"], shapes["v"], tensors.lead),
        storage=tensors.dtype,
    ).with_scales(tensors.scales)
    if tensors.sequences is not None:
        posed = keep_sequences(posed, tensors.sequences, *limits)
    chosen = tensors.read_whole(CHOSEN)
    return choose_keys(posed, chosen) if "indices" in chosen else posed


def pose_by_text(
    estimator: str,
    arrays: Mapping[str, Any],
    given: Mapping[str, Any],
    storage: str,
    scale: float | None,
    causal: bool,
) -> Problem:
    """Pose the problem of an estimator whose law is derived from its text, of arrays by name."""
    if storage not in DERIVED:
        raise ValueError(f"{estimator} is judged in {', '.join(DERIVED)} only, got {storage}.")
    formula, options = open_formula(ESTIMATORS[estimator].naive)
    q, k, v = (arrays[x] for x in "qkv")
    given = {**options, **{x: y for x, y in given.items() if y is not None}}
    given |= {x: y for x, y in arrays.items() if x in _GIVEN and y is not None}
    settings: dict[str, Any] = {"scale": scale, "mask": arrays.get("mask"), "causal": causal}
    posed = pose_text(formula, q, k, v, given, name=estimator, **settings)
    return posed._replace(storage=storage)


def list_gates(estimator: Any) -> list[str]:
    """Name what a file holds beside q, k and v for a recurrence, or a law that is derived."""
    if kind_of(estimator) == "text":
        return [*_GIVEN]
    if kind_of(estimator) != "recurrent":
        return [*CHOSEN, *PART_ARRAYS] if kind_of(estimator) == "scores" else []
    pairs = {"pair": ("{}_a", "{}_b")}
    gates = ESTIMATORS[estimator].gates.items()
    names = [x.format(name) for name, kind in gates for x in pairs.get(kind, ("{}",))]
    return [*names, "initial_state", "state"]


def pose_states(tensors: Tensors, estimator: str, scale: float | None) -> dict[str, Problem]:
    """Pose the problems of a recurrence in a file, whose arrays are read as a whole."""
    names = ("q", "k", "v", "d_out", *list_gates(estimator))
    x = {name: tensors.part(name, ()) for name in names if name in tensors.shapes}
    # What is left are gates; the state is not an input.
    q, k, v, d_out, _ = (x.pop(name, None) for name in ("q", "k", "v", "d_out", "state"))
    pair = tuple(x.pop(y) for y in ("removal_a", "removal_b") if y in x)
    gates = gates_of(estimator, {**x, "removal": pair if len(pair) == 2 else None}, "in FILE")
    problems = pose_recurrence(q, k, v, gates, record=estimator, scale=scale, d_out=d_out)
    of, got = problems["state"], tensors.shapes.get("state")
    shape = (*of.lead, of.shape[0], of.shape[2])
    if got not in (None, shape):
        raise ValueError(f"`state` must have the shape of the last state, {shape}, got {got}.")
    return {name: y._replace(storage=tensors.dtype) for name, y in problems.items()}


def kind_of(estimator: Any) -> str:
    """Return what weights of an estimator are made of: scores, frequencies or a map of features."""
    record = ESTIMATORS.get(estimator) if isinstance(estimator, str) else None
    if record is not None and record.arrays == ("q", "k", "v"):
        for trait, kind in _KINDS.items():
            if record.has(trait):
                return kind
        if open_formula(record.naive)[0] in TEXTS:
            return "text"
    chunked = (x.name for x in ESTIMATORS.values() if x.has("recurrent"))
    texts = (x.name for x in ESTIMATORS.values() if open_formula(x.naive)[0] in TEXTS)
    known = ", ".join(dict.fromkeys([*CALLED.values(), *texts, *chunked]))
    raise ValueError(f"`estimator` must be one of {known}, got {estimator!r}.")


def gates_of(estimator: str, given: Mapping[str, Any], where: str = "given") -> dict[str, Any]:
    """Take the gates of a recurrence, of which it needs all but a factor on what it writes."""
    # Only a factor on what is written may be left out: it is 1.
    gates = ESTIMATORS[estimator].gates
    known = {*gates, "initial_state"}
    refuse_options(estimator, {x: y for x, y in given.items() if x not in known})
    for name, kind in gates.items():
        if given.get(name) is None and kind != "factor":
            raise ValueError(f"`{name}` must be {where} for {estimator}, got None.")
    return {x: y for x, y in given.items() if x in known}


def refuse_sequences(sequences: Any, kind: str, estimator: str) -> None:
    """Refuse packed and paged sequences of what is not softmax attention."""
    if sequences and kind != "scores":
        raise ValueError(f"packed sequences are not judged for {estimator}.")


def refuse_options(estimator: str, given: Mapping[str, Any]) -> None:
    """Refuse what an estimator does not take."""
    for name, x in given.items():
        if x is not None:
            raise ValueError(
                f"`{name}` must not be given for {estimator}, got {checks.describe(x)}."
            )


def gather_recurrent(
    problems: Mapping[str, Problem],
    read: Mapping[str, Callable[[Index], Any]],
    types: Mapping[str, str],
    kept: str,
) -> dict[str, Part]:
    """Gather what is judged of a recurrence that keeps its state in a type."""
    # A state is rounded to the type that it is kept in, which other arrays need not have.
    parts, types = {}, {x: kept if x == "state" else y for x, y in types.items()}
    problems = {x: y._replace(kept=kept) for x, y in problems.items()}
    for name in ("out", "state", *_BACKWARD):
        if name in types and name not in problems:
            raise ValueError(
                f"`{name}` is not judged for this recurrence. Of gradients, `dv` is judged; `dq` "
                "and `dk` only if all coordinates share the decay and nothing is removed. A "
                "gradient of an array that heads share is not judged."
            )
        if name in types:
            parts[name] = Part(problems[name], Numbers(read[name], types[name]))
    return parts


def list_judged() -> list[str]:
    """List names and aliases of the estimators whose numbers can be judged."""
    return [
        name
        for name, record in ESTIMATORS.items()
        if record.arrays == ("q", "k", "v")
        and (any(record.has(x) for x in _KINDS) or open_formula(record.naive)[0] in TEXTS)
    ]


def read_parts(tensors: Tensors, problem: Problem) -> dict[str, Part]:
    """Read the results in a file: the output, with log normalisers, and gradients."""
    names = [x for x in ("out", "state", *_BACKWARD) if x in tensors.shapes]
    if not names:
        there = {*tensors.shapes, *tensors.others}
        raise ValueError(
            f"`out`, `dq`, `dk` or `dv` must be in FILE, to be judged: "
            f"{str(tensors.path)!r} has only {name_some(there)}."
        )
    if {"out", "lse"} <= {*tensors.shapes} and problem.kind == "scores":
        names.append("lse")
    types = {x: tensors.dtype if x == "state" else _storage_type(tensors, x) for x in names}
    own = ("state", *_BACKWARD)  # leading axes, and not those of the output
    read = {x: partial(tensors.part if x in own else tensors.read, x) for x in tensors.shapes}
    if problem.kind == "recurrent":
        problems = pose_states(tensors, problem.record, problem.scale)
        states = {x: tensors.part(x, ()) for x in ("state", "initial_state") if x in tensors.shapes}
        kept = type_of_states(states, tensors.stored, tensors.dtype)
        return gather_recurrent(problems, read, types, kept)
    parts = gather_parts(problem, read, types, tensors.shapes)
    if "part_out" in tensors.shapes and "out" in parts:
        parts = pose_parts(parts, tensors.read_whole(PART_ARRAYS))
    return parts


def gather_parts(
    problem: Problem,
    read: Mapping[str, Callable[[Index], Any]],
    types: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    declared: bool = False,
) -> dict[str, Part]:
    """Gather what is judged: an output, with log normalisers if they have a type, and gradients.

    The type of the output may have been declared.
    """
    parts: dict[str, Part] = {}
    if "out" in types:
        lse: dict[str, Any] = {}
        if "lse" in types:
            lse = {"lse": read["lse"], "lse_dtype": types["lse"]}
        dtype, remark = types["out"], ""
        if not declared:
            dtype, remark = _settle_type(problem, read["out"], dtype)
        parts["out"] = Part(problem, Numbers(read["out"], dtype, **lse, remark=remark))
    gradients = {x: shapes[x] for x in _BACKWARD if x in types}
    if gradients:
        # A backward pass is given d_out in the type of the output.
        dtype = widest(types.get("out", problem.storage), problem.storage)
        backward = pose_gradients(problem, gradients, read["d_out"], read.get("out"), dtype)
        for name, y in backward.items():
            dtype, remark = _settle_type(y, read[name], types[name])
            parts[name] = Part(y, Numbers(read[name], dtype, remark=remark))
    return parts


def _settle_type(problem: Problem, out: Callable[[Index], Doubles], stored: str) -> tuple[str, str]:
    """Find the narrow type of nearly all rows of a wide result, and name the few other rows.

    It is the storage type or, beside 8 bits, one of 16 bits.
    """
    names = [problem.storage, *NARROW] if FORMATS[problem.storage].has_8_bits else [problem.storage]
    if problem.kind != "scores" or not is_narrow(problem.storage):
        return stored, ""
    for name in (x for x in names if widest(stored, x) != x):
        stray = np.zeros((math.prod(problem.lead), problem.shape[0]), bool)
        for index in np.ndindex(problem.lead):
            stray[problem.number(index)] = ~np.all(FORMATS[name].holds(out(index)), -1)
            if ONE_STRAY * np.sum(stray) > stray.size:
                break
        else:
            if _are_rounded(problem, out, np.argwhere(~stray)):
                return name, remark_stray(problem, stray, name) if stray.any() else ""
    return stored, ""


def _are_rounded(
    problem: Problem, out: Callable[[Index], Doubles], rows: npt.NDArray[np.int64]
) -> bool:
    """Tell whether rows, by some of them, differ from the exact result as if they were rounded.

    Where they do not, the exact result may be a number of a narrow type itself: values of one key.
    """
    rows = thin(
        rows[np.isin(rows[:, 0], thin(np.unique(rows[:, 0]), _HEADS_OF_TYPE))], _ROWS_OF_TYPE
    )
    roundings, off = profile_of("math").roundings(problem.storage), []
    for number in np.unique(rows[:, 0]).tolist():
        index, i = problem.index_of(number), rows[rows[:, 0] == number, 1].tolist()
        with np.errstate(all="ignore"):
            exact = [problem.exact(index, roundings, slice(x, x + 1)) for x in i]
            got = out(index)[i]
        off.append((np.abs(got - np.concatenate(exact)) > _MOVED * np.abs(got)).ravel())
    return bool(off) and bool(np.mean(np.concatenate(off)) > 1 / 2)


def _storage_type(tensors: Tensors, name: str) -> str:
    """Return the type of the queries if it holds all numbers, else the type they are stored in."""
    dtype, stored = tensors.dtype, tensors.dtypes[name]
    if widest(stored, dtype) == dtype or not math.prod(tensors.shapes[name]):
        return stored
    # Arrays are often saved in float32 that were computed in a narrow type: all numbers tell it.
    all_held = all(np.all(FORMATS[dtype].holds(tensors.read(name, x))) for x in tensors.heads())
    return dtype if all_held else stored
