"""What an entry of the page is made of, and what its measurements share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import refattn

Floats = npt.NDArray[Any]


class Number(NamedTuple):
    """A measurement, and what it is to be compared with.

    Of a finding the value exceeds the bound as long as the finding is there; of an implementation
    in which nothing was found it stays below. Without a bound it only explains.
    """

    what: str  # was measured, on which arrays
    value: float
    right: str  # what a right implementation gives
    bound: float | None = None


class Candidate(NamedTuple):
    """A function of one of these modules as `refattn check` takes it, and which checks to make."""

    source: str
    estimator: str
    checks: tuple[str, ...]
    capabilities: tuple[str, ...] = ()
    tags: Mapping[str, Any] = MappingProxyType({})


class Finding(NamedTuple):
    """Something that an implementation gets wrong, or does otherwise than one would expect."""

    name: str  # of the entry, on the command line
    package: str  # the distribution, as pip knows it
    title: str  # what is wrong
    cause: str
    mend: str  # the fix
    measure: Callable[[], tuple[Number, ...]]  # at least one of them has a bound
    note: str = ""  # what its authors say of it, and where it does not matter
    candidate: Candidate | None = None  # how `refattn check` shows it


class Tried(NamedTuple):
    """An implementation in which nothing was found, and what was tried."""

    name: str
    package: str
    title: str
    measure: Callable[[], tuple[Number, ...]]
    candidate: Candidate | None = None


class Reading(NamedTuple):
    """Something seen in source that was not run, and where it stands."""

    name: str
    repository: str
    path: str
    commit: str
    title: str
    cause: str
    mend: str


def real() -> tuple[Floats, Floats, Floats]:
    """Queries, keys and values of MiniLM, (2, 4, 128, 32), float32."""
    q, k, v = refattn.load_sample()
    return q, k, v


def normal(std: float, d: int = 64, n: int = 512) -> tuple[Floats, Floats, Floats]:
    """Normal queries and keys of a standard deviation, and normal values; (1, 4, n, d), float32."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 4, n, d)).astype("float32")
    return std * q, std * k, v


def exact(q: Any, k: Any, v: Any, **options: Any) -> Floats:
    """Exact attention in double precision."""
    q, k, v = (np.asarray(x, "float64") for x in (q, k, v))
    return np.asarray(refattn.softmax_attention(q, k, v, **options))


def error(got: Any, want: Any) -> float:
    """Relative error in the Frobenius norm."""
    got, want = (np.asarray(x, "float64") for x in (got, want))
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def taking(torch: Any, parts: Iterable[int], width: int, of: int) -> list[Any]:
    """Linear layers that return some of the equal parts of their input as they are."""
    layers = []
    for i in parts:
        layer = torch.nn.Linear(of * width, width, bias=False)
        rows = torch.eye(of * width)[i * width : (i + 1) * width]
        layer.weight = torch.nn.Parameter(rows, requires_grad=False)
        layers.append(layer)
    return layers
