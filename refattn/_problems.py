"""Profiles of kernels, and the problems that kernels are given."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from . import _rounding, _rounding_linear, _validate
from ._array import array_namespace, to_host
from ._blocks import blocks
from ._formats import FORMATS, Format
from ._heads import broadcast_lead
from ._tensors import Tensors
from ._threads import InOrder, for_each
from .features import elu_features
from .registry import ESTIMATORS

__all__ = [
    "CALLED",
    "PROFILES",
    "Problem",
    "Profile",
    "conventions",
    "dtype_of",
    "holds",
    "kind_of",
    "of_arrays",
    "of_head",
    "of_tensors",
    "profile_of",
    "sweep",
    "wide",
]

_Floats = npt.NDArray[np.float64]
_ROWS = 256  # queries of a block
_NUMPY = ("float16", "float32", "float64")


class Profile(NamedTuple):
    """What a kernel rounds, and to what.

    A type is a name of a dtype (`float64`, `float32`, `tfloat32`, `float16`, `bfloat16`,
    `float8_e4m3fn` or `float8_e5m2`), `storage` for that of queries, keys and values, or None where
    nothing is rounded.

    Attributes
    ----------
    scores : str or None
        Type of q . k, of the scaled scores, and of those with a cap or a bias.
    weights : str or None
        Type of the weights in the second product.
    accumulate : str
        Type of the sums of products.
    out : str or None
        Type of the result.
    lanes : int
        Partial sums of a sum of products, of which each takes every so-manieth term.
    normalised : bool
        Whether weights are divided by their sum before they are rounded.
    softmax : str
        Type of the differences to the maximum, of the exponentials and of their sum.
    inputs : str or None
        Type to which queries, keys and values are rounded first: to nearest, and for 8 bits after a
        division by a scale that takes the largest of an array to the largest of the type.
    run : int
        Terms after which a sum of products starts afresh, and is added to those before.
    states : str or None
        Of random features and linear attention, type of the sums over the keys.
    exp : float
        Largest error of an exponential before it is rounded, in units u of the type of the sums.
        It is taken for random, but for that of e^0 and a sixteenth of the others.
    """

    scores: str | None = None
    weights: str | None = None
    accumulate: str = "float32"
    out: str | None = "storage"
    lanes: int = 1
    normalised: bool = False
    softmax: str = "float32"
    inputs: str | None = None
    run: int = 256
    states: str | None = None
    exp: float = 1.0

    def kernel(self, dtype: str) -> _rounding.Kernel:
        """The formats for a storage type."""

        def of(name: str | None) -> Format | None:
            return None if name is None else FORMATS[dtype if name == "storage" else name]

        softmax, accumulate = of(self.softmax), of(self.accumulate)
        assert softmax is not None
        assert accumulate is not None
        return _rounding.Kernel(
            of(self.scores),
            of(self.weights),
            softmax,
            accumulate,
            of(self.out),
            self.lanes,
            self.normalised,
            self.run,
            of(self.states),
            self.exp,
        )


Profile.__module__ = "refattn.rounding"  # where users find it, and so do pickles

PROFILES: Mapping[str, Profile] = {
    # All but the result in float32, sums in runs or one term after the other.
    "math": Profile(),
    "serial": Profile(run=2**40),
    # Fused: weights over the largest are rounded, with a good exponential or a fast one (a cubic).
    "flash": Profile(weights="storage", exp=32.0),
    "flash-fast": Profile(weights="storage", exp=2048.0),
    # Scores and softmax in float32, then probabilities are rounded.
    "upcast": Profile(weights="storage", normalised=True),
    # Step by step: scores are rounded, and probabilities; or every step of the softmax, too.
    "eager": Profile("storage", "storage", normalised=True),
    "eager-narrow": Profile("storage", "storage", normalised=True, softmax="storage"),
    # Matrix units that round what they are given.
    "tf32": Profile(weights="tfloat32", inputs="tfloat32"),
    "fp8-weights": Profile(weights="float8_e4m3fn"),
    "fp8": Profile(weights="float8_e4m3fn", inputs="float8_e4m3fn"),
    "half-sums": Profile("float16", "float16", "float16"),
}


class Problem(NamedTuple):
    """Softmax attention with its conventions, of which heads are read one by one.

    Attributes
    ----------
    lead : tuple of int
        Leading axes of the result.
    shape : tuple of int
        Numbers of queries, of keys, and of columns of the values.
    read : callable
        Gives the arrays of a head by name, in float64: q, k, v and, where there are, bias and mask.
    scale, causal, window, softcap
        As in `predict`.
    """

    lead: tuple[int, ...]
    shape: tuple[int, int, int]
    read: Callable[[tuple[int, ...]], Mapping[str, Any]]
    scale: float
    causal: bool
    window: tuple[int | None, int | None]
    softcap: float | None
    feature_map: Callable[[Any], Any] | None = None
    kind: str = "scores"

    @property
    def rows_apart(self) -> bool:
        """Whether no rounding has a part in two rows of the result."""
        return self.kind == "scores"

    def analyse(
        self,
        index: tuple[int, ...],
        kernel: _rounding.Kernel,
        i: slice,
        changes: Mapping[str, Any] = MappingProxyType({}),
    ) -> _rounding.Rows:
        """What a kernel may give for the queries i of a head."""
        if self.kind == "scores":
            return _rounding.analyse(self.head(index), kernel, i, changes)
        return _rounding_linear.analyse(self.features(index, kernel), kernel, i)

    def features(
        self, index: tuple[int, ...], kernel: _rounding.Kernel
    ) -> _rounding_linear.LinearHead:
        """Features of a head, of the estimator."""
        x = self.read(index)
        mask = x.get("mask")
        visible = None if mask is None else mask[0]
        if self.feature_map is not None:
            return _rounding_linear.mapped(
                x["q"],
                x["k"],
                x["v"],
                self.feature_map,
                kernel,
                visible=visible,
                causal=self.causal,
            )
        return _rounding_linear.exponential(
            x["q"],
            x["k"],
            x["v"],
            x["omega"],
            x["log_weight"],
            kernel,
            scale=self.scale,
            visible=visible,
            causal=self.causal,
        )

    def head(self, index: tuple[int, ...]) -> _rounding.Head:
        """The arrays and the conventions of a head."""
        x = self.read(index)
        conventions = (self.causal, self.window, self.softcap)
        bias, mask = _finite(x.get("bias"), x.get("mask"))
        return _rounding.Head(x["q"], x["k"], x["v"], self.scale, bias, mask, *conventions)

    def items(self) -> Iterator[tuple[tuple[int, ...], slice]]:
        """Heads and blocks of their queries."""
        for index in np.ndindex(self.lead):
            yield from ((index, i) for i in blocks(0, self.shape[0], _ROWS))

    def number(self, index: tuple[int, ...]) -> int:
        """Which head that is."""
        return int(np.ravel_multi_index(index, self.lead)) if index else 0

    def replaced(self, name: str, change: Callable[[tuple[int, ...], Any], Any]) -> Problem:
        """With another mask or bias, made of the index of the head and of the one that was."""

        def read(index: tuple[int, ...]) -> Mapping[str, Any]:
            found = self.read(index)
            return {**found, name: change(index, found.get(name))}

        return self._replace(read=read)

    def masked(self, seen: npt.NDArray[np.bool_]) -> Problem:
        """With one more mask."""
        return self.replaced("mask", lambda index, x: seen if x is None else seen & x)

    def without(self, name: str) -> Problem:
        """Without the mask or the bias."""
        read = self.read
        return self._replace(read=lambda index: {x: y for x, y in read(index).items() if x != name})

    def read_by(self, profile: Profile) -> Problem:
        """With queries, keys and values as a profile rounds them first."""
        return self if profile.inputs is None else self.rounded(FORMATS[profile.inputs])

    def rounded(self, to: Format) -> Problem:
        """With queries, keys and values rounded; those of 8 bits are scaled to their range."""
        factor = dict.fromkeys("qkv", 1.0)
        if to.digits <= 4:
            largest = dict.fromkeys("qkv", 0.0)
            for index in np.ndindex(self.lead):
                for name, x in self.read(index).items():
                    if name in largest:
                        largest[name] = max(largest[name], float(np.max(np.abs(x), initial=0.0)))
            factor = {name: to.largest / x if x else 1.0 for name, x in largest.items()}

        def read(index: tuple[int, ...]) -> Mapping[str, Any]:
            found = dict(self.read(index))
            return found | {name: to.round(found[name] * x) / x for name, x in factor.items()}

        return self._replace(read=read)


def _finite(bias: Any, mask: Any) -> tuple[Any, Any]:
    """A bias of -inf hides a key, as a mask does."""
    if bias is None or not np.any(hidden := np.isneginf(bias)):
        return bias, mask
    return np.where(hidden, 0.0, bias), ~hidden if mask is None else mask & ~hidden


def of_arrays(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    bias: Any = None,
    mask: Any = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    omega: Any = None,
    log_weight: Any = None,
    features: str = "positive",
    feature_map: Callable[[Any], Any] | None = None,
) -> Problem:
    """The problem of arrays in memory."""
    kind = "scores"
    if omega is not None or feature_map is not None:
        kind = "frequencies" if feature_map is None else "map"
        _no("omega", omega if kind == "map" else None, kind)
        for name, x in (("bias", bias), ("window", window), ("softcap", softcap)):
            _no(name, x, kind)
    else:
        _no("log_weight", log_weight, kind)
    given = {"q": q, "k": k, "v": v, "bias": bias}
    numbers = {name: wide(name, x) for name, x in given.items() if x is not None}
    if mask is not None:
        _validate.is_array("mask", mask)
        numbers["mask"] = mask = to_host(mask, None)
    q, k, v = (numbers[name] for name in "qkv")
    _validate.attention(q, k, v, bias=numbers.get("bias"), mask=mask, causal=causal)
    n, m = q.shape[-2], k.shape[-2]
    if kind == "frequencies":
        numbers |= _frequencies(omega, log_weight, features, q)
    if kind != "scores" and mask is not None and mask.ndim > 1 and mask.shape[-2] != 1:
        raise ValueError(
            f"`mask` must be of keys, (..., 1, m), for {CALLED[kind]}, got shape {mask.shape}."
        )
    lead = np.broadcast_shapes(
        _validate.lead(q, k, v), broadcast_lead(numbers.get("bias"), numbers.get("mask"))
    )

    def read(index: tuple[int, ...]) -> Mapping[str, Any]:
        found = {name: of_head(x, index, lead) for name, x in numbers.items()}
        return {
            name: np.broadcast_to(x, (n, m)) if name in ("bias", "mask") else x
            for name, x in found.items()
        }

    return Problem(
        lead,
        (n, m, v.shape[-1]),
        read,
        conventions(q.shape[-1], scale),
        causal,
        _window(window),
        _validate.real("softcap", softcap, positive=True, optional=True),
        feature_map,
        kind,
    )


def of_tensors(
    tensors: Tensors,
    *,
    estimator: str = "softmax",
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    features: str = "positive",
    feature_map: Callable[[Any], Any] | None = None,
) -> Problem:
    """The problem of a file, of which no more than some heads are in memory."""
    shapes = tensors.shapes
    used = {"scores": ("bias", "mask"), "frequencies": ("omega", "mask"), "map": ("mask",)}
    kind = kind_of(estimator)
    if kind == "frequencies" and "omega" not in shapes:
        raise ValueError(
            f"`omega` must be in FILE for rfa: frequencies (..., S, d); "
            f"{str(tensors.path)!r} has none."
        )
    if kind != "scores":
        _no("bias", shapes.get("bias"), kind)
        _no("window", window, kind)
        _no("softcap", softcap, kind)
        rows = (1, 1, *shapes.get("mask", ()))[-2]
        if rows != 1:
            raise ValueError(
                f"`mask` must be of keys, (..., 1, m), for {CALLED[kind]}, "
                f"got shape {shapes['mask']}."
            )
    names = [x for x in ("q", "k", "v", *used[kind]) if x in shapes]
    n, m = shapes["q"][-2], shapes["k"][-2]

    @lru_cache(maxsize=4)  # a head is asked for by each block of its queries
    def read(index: tuple[int, ...]) -> Mapping[str, Any]:
        found: dict[str, Any] = {name: tensors.read(name, index) for name in names}
        if "omega" in found:
            found |= _frequencies(found["omega"], None, features, found["q"])
        for name in {"bias", "mask"} & {*found}:
            found[name] = np.broadcast_to(found[name], (n, m))
        return found

    return Problem(
        tensors.lead,
        (n, m, shapes["v"][-1]),
        read,
        conventions(shapes["q"][-1], scale),
        causal,
        _window(window),
        _validate.real("softcap", softcap, positive=True, optional=True),
        (feature_map or elu_features) if kind == "map" else None,
        kind,
    )


def kind_of(estimator: Any) -> str:
    """What the weights of an estimator are made of: scores, frequencies or a map of features."""
    record = ESTIMATORS.get(estimator) if isinstance(estimator, str) else None
    if record is not None and record.arrays == ("q", "k", "v"):
        for trait, kind in _KINDS.items():
            if record.has(trait):
                return kind
    known = ", ".join(CALLED.values())
    raise ValueError(f"`estimator` must be of {known}, got {estimator!r}.")


_KINDS = {"exact": "scores", "random-features": "frequencies", "feature-map": "map"}
CALLED = {"scores": "softmax", "frequencies": "rfa", "map": "linear"}  # by users


def _no(name: str, x: Any, kind: str) -> None:
    if x is not None:
        raise ValueError(
            f"`{name}` must not be given for {CALLED[kind]}, got {_validate.describe(x)}."
        )


def _frequencies(omega: Any, log_weight: Any, features: str, q: _Floats) -> dict[str, _Floats]:
    """Frequencies (..., S, d) of positive features, and log weights (..., 1, S)."""
    _validate.choice("features", features, ("positive", "hyperbolic"))
    omega = wide("omega", omega)
    weights = None if log_weight is None else wide("log_weight", log_weight)
    omega, weights = _validate.frequencies(omega, weights, q, q.shape[:-2])
    weights = np.broadcast_to(weights, omega.shape[:-1])
    if features == "hyperbolic":  # the positive ones of a frequency and of its negative
        omega, weights = np.concatenate([omega, -omega], -2), np.concatenate([weights] * 2, -1)
    return {"omega": omega, "log_weight": weights[..., None, :]}


def of_head(x: Any, index: tuple[int, ...], lead: tuple[int, ...]) -> Any:
    """Part of an array that a head takes: axes broadcast, and heads share keys in groups."""
    own = x.shape[: max(0, x.ndim - 2)]
    at = zip(index[len(index) - len(own) :], lead[len(lead) - len(own) :], own, strict=True)
    return x[tuple(i * length // whole for i, whole, length in at)]


def conventions(d: int, scale: float | None) -> float:
    """The scale, given or 1 / sqrt(d)."""
    found = _validate.real("scale", scale, optional=True)
    return float(d**-0.5 if found is None else found)


def _window(window: Any) -> tuple[int | None, int | None]:
    if window is None:
        return None, None
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise ValueError(f"`window` must be a pair (left, right) or None, got {window!r}.")
    for side in window:
        if side is not None:
            _validate.non_negative_integer("window", side)
    return window[0], window[1]


def wide(name: str, x: Any) -> _Floats:
    """Numbers of any floating-point type, in float64 on the host."""
    _validate.is_array(name, x)
    dtype = dtype_of(x, name)
    if not isinstance(x, np.ndarray):
        xp = array_namespace(x)
        x = to_host(x if dtype in _NUMPY else xp.astype(x, xp.float32), None)
    return np.asarray(x, np.float64)


def dtype_of(x: Any, name: str = "q") -> str:
    """The name of a floating-point dtype."""
    found = str(x.dtype).removeprefix("torch.")
    if found not in FORMATS:
        known = ", ".join(name for name in FORMATS if name != "tfloat32")
        raise TypeError(f"`{name}` must have a dtype of {known}, got {x.dtype}.")
    return found


def sweep(
    problem: Problem,
    dtype: str,
    profile: Profile,
    use: Callable[[tuple[int, ...], slice, _rounding.Rows], Callable[[], None] | None],
    changes: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Analyse all blocks of queries, on the threads that BLAS may use, and use what is found.

    What `use` returns is called in the order of the blocks: sums over blocks belong there.
    """
    kernel, problem, sums = profile.kernel(dtype), problem.read_by(profile), InOrder()

    def work(item: tuple[int, tuple[tuple[int, ...], slice]]) -> None:
        place, (index, i) = item
        with np.errstate(all="ignore"):
            rest = use(index, i, problem.analyse(index, kernel, i, changes))
            sums.add(place, rest or (lambda: None))

    for_each(
        lambda: work, enumerate(problem.items()), most=math.prod(problem.lead) + problem.shape[0]
    )


def profile_of(profile: Any) -> Profile:
    """Check a profile, or the name of one."""
    if isinstance(profile, Profile):
        for field in ("scores", "weights", "accumulate", "out", "softmax", "inputs", "states"):
            _type(field, getattr(profile, field), field not in ("accumulate", "softmax"))
        _validate.positive_integer("lanes", profile.lanes)
        _validate.positive_integer("run", profile.run)
        return profile
    if not isinstance(profile, str) or profile not in PROFILES:
        raise ValueError(
            f"`profile` must be a Profile or of {', '.join(PROFILES)}, got {profile!r}."
        )
    return PROFILES[profile]


def _type(field: str, name: Any, optional: bool) -> None:
    if (name is None and optional) or name == "storage" or name in FORMATS:
        return
    known = ", ".join(["storage", *FORMATS])
    raise ValueError(f"`profile` must have {field} of {known}, got {name!r}.")


def holds(problem: Problem, dtype: str) -> None:
    """Check that queries, keys and values are numbers of the storage type."""
    _validate.choice("dtype", dtype, FORMATS)
    for index in np.ndindex(problem.lead):
        x = problem.read(index)
        for name in "qkv":
            held = FORMATS[dtype].holds(x[name])
            if not np.all(held):
                at = np.argwhere(~held)[0]
                raise ValueError(
                    f"`{name}` must hold numbers of {dtype} only, got {x[name][tuple(at)]!r} at "
                    f"{(*index, *map(int, at))}: round it first."
                )
