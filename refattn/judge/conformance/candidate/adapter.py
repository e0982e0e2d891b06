"""Call the function under test by its declared conventions, and catch what it may do wrong."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from ....arrays import checks
from ....arrays.library import Floats, array_namespace
from ....arrays.words import said
from ....engine.scores import Reach
from ....registry import ESTIMATORS, Estimator
from .failures import Failure, Refusal, SeveralResults
from .gates import LOGS, halves, token_axes, with_pairs
from .libraries import lay_out, pull_by_torch, receive
from .limits import fitted, head_size
from .tags import (
    CHOICES,
    COMMON,
    DEFAULTS,
    DRAWN_KEYWORDS,
    LIMITS,
    LISTING,
    TAGS,
    only_of,
    parse_tag,
    possible,
    refuse_limits,
    write_tag,
)

# Options whose last two axes are not tokens and coordinates.
_OF_MATRICES = ("mask", "bias", "initial_state")
_OF_INDICES = ("indices", "log_probability")  # which have leading axes, and S


@dataclass(frozen=True)
class Adapter:
    """A callable, the estimator it claims to be, and its conventions.

    Parameters
    ----------
    fn : callable
        Called with q, k, v (or x, y) by position and everything else by keyword; see `check`.
    estimator : str
        What it computes: a name of `registry.ESTIMATORS`, such as ``"softmax"``, ``"kernel"``,
        ``"rfa"``, ``"ra"``, ``"lara"``, ``"linear"``, ``"moments"``.
    capabilities : iterable of str
        Keywords it takes beyond those of a black box: names of `CAPABILITIES`, which explains them,
        as `refattn check --list` does. ``"indices"`` are integers from 0 to m - 1, for all heads or
        for each; the indices of a coreset are all different.
    tags : mapping, optional
        Conventions, see `TAGS`; values may be strings, as on the command line.
    name : str, optional
        Name in reports; by default that in `source`, or that of the callable.
    source : str, optional
        Where the callable can be imported from, as ``"module:name"``, for scripts that show a
        failure; without it they look for the callable under its own name.

    Raises
    ------
    TypeError
        If `fn` is not callable, or an argument does not have the type stated above.
    ValueError
        If the estimator, a capability, a tag or its value is unknown, if NumPy arrays are to be
        on a device, or if `source` has no colon.

    Notes
    -----
    The seed is passed as ``seed=``, or as ``rng=`` if that is what the callable has instead, as
    the functions of this package do. Calling the adapter takes and returns NumPy arrays with the
    axes (..., n, d), whatever the library, dtype and layout of the callable.

    Examples
    --------
    >>> import numpy as np, refattn
    >>> from refattn.judge.conformance import Adapter
    >>> rfa = Adapter(refattn.random_feature_attention, "rfa", tags={"layout": "bnhd"})
    >>> rfa(*np.ones((3, 5, 2)), num_features=4, seed=0).shape
    (5, 2)
    """

    fn: Callable[..., Any]
    estimator: str
    capabilities: Iterable[str] = ()
    tags: Mapping[str, Any] | None = field(default=None)
    name: str | None = None
    source: str | None = None

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise TypeError(f"`fn` must be callable, got {type(self.fn).__name__}.")
        checks.choice("estimator", self.estimator, ESTIMATORS, some=COMMON, listing=LISTING)
        capabilities = frozenset(checks.list_names("capabilities", self.capabilities))
        for name in sorted(capabilities):
            able = possible(self.record) or ("none of them",)
            listing = f"those of {self.estimator} in {LISTING}"
            checks.choice("capabilities", name, able, listing=listing)
        # An alias such as `performer` implies a coupling, which a tag may replace.
        tags = {**DEFAULTS, **({"coupling": self._coupling} if self._coupling else {})}
        if not isinstance(self.tags, Mapping | None):
            raise TypeError(
                f"`tags` must be a mapping of tags to values, got {type(self.tags).__name__}."
            )
        for name, value in (self.tags or {}).items():
            checks.choice("tags", name, TAGS, listing=LISTING)
            tags[name] = parse_tag(name, value)
        if tags["device"] is not None and tags["library"] == "numpy":
            raise ValueError(
                f"`tags['device']` must be left out for NumPy arrays, got {tags['device']!r}."
            )
        refuse_limits(self.record, capabilities, tags)
        for attribute in ("name", "source"):
            text = getattr(self, attribute)
            if not isinstance(text, str | None):
                kind = type(text).__name__
                raise TypeError(f"`{attribute}` must be a string, got {kind}.")
        if self.source is not None and not all(self.source.partition(":")):
            raise ValueError(f"`source` must be module:name, got {self.source!r}.")
        name = self.name or (self.source or "").partition(":")[2] or name_of(self.fn)
        for attribute, value in (("capabilities", capabilities), ("tags", tags), ("name", name)):
            # The class is frozen: an adapter means the same for all checks of a run.
            object.__setattr__(self, attribute, value)

    def __getitem__(self, tag: str) -> Any:
        return self.tags[tag]  # type: ignore[index]

    def can(self, *capabilities: str) -> bool:
        """Return whether the candidate has all these capabilities, or others that imply them."""
        # `omega_only` says that `omega=` is taken, and so for indices.
        implied = {name for name in DRAWN_KEYWORDS if only_of(name) in self.capabilities}
        if self["causal_only"]:
            implied.add("causal")
        return set(capabilities) <= implied.union(self.capabilities)

    def has(self, *traits: str) -> bool:
        """Return whether the estimator has all these traits."""
        return self.record.has(*traits)

    @property
    def waves(self) -> bool:
        """Whether its features are cosines and sines, whose sums may cancel."""
        tagged = self.has("random-features") and self["features"] == "trigonometric"
        return self.has("trigonometric") or tagged

    @property
    def drawn_keyword(self) -> str:
        """The keyword that passes frequencies or indices instead of drawn ones; empty if none."""
        return next(filter(self.can, DRAWN_KEYWORDS), "")

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers itself, different for each seed."""
        frequencies = self.has("random") and self.black_box and not self["fixed_frequencies"]
        return frequencies or self.can("dropout")

    @property
    def grouped(self) -> bool:
        """Whether heads of queries may share those of keys."""
        return self.can("gqa") and "h" in (self["layout"] or "h")

    @property
    def settled(self) -> dict[str, Any]:
        """Options of every call: causal if the candidate always is."""
        return {"causal": True} if self["causal_only"] else {}

    @property
    def black_box(self) -> bool:
        """Whether it can draw its random numbers itself."""
        return not set(map(only_of, DRAWN_KEYWORDS)) & set(self.capabilities)

    @property
    def limits(self) -> dict[str, str]:
        """For each declared limit of the candidate, what a report does not cover."""
        words = dict.fromkeys(self.capabilities, "")
        words |= {tag: f"={write_tag(value)}" for tag, value in self.declared.items()}
        known = self.drawn_keyword or self.has("random-features") or self.has("target")
        if self.has("random") and self.draws and not (known or self.has("proposals")):
            words["own_law"] = ""  # which is all that is known of its values
        return {f"{name}{words[name]}": text for name, text in LIMITS.items() if name in words}

    @property
    def declared(self) -> dict[str, Any]:
        """The tags whose value is not the default."""
        return {name: x for name, x in (self.tags or {}).items() if x != DEFAULTS[name]}

    @cached_property
    def record(self) -> Estimator:
        """The record of the estimator, which is that of `rfa` for its couplings."""
        own, rfa = ESTIMATORS[self.estimator], ESTIMATORS["rfa"]
        return rfa if self._coupling and own.function is rfa.function else own

    @property
    def _coupling(self) -> str:
        """The coupling that a name implies, such as orthogonal for `performer`."""
        fixed = getattr(ESTIMATORS[self.estimator].fn, "keywords", {})
        word = fixed.get("coupling") if [*fixed] == ["coupling"] else ""
        return word if word in CHOICES["coupling"] else ""

    @cached_property
    def _seed(self) -> str:
        try:
            parameters = inspect.signature(self.fn).parameters
        except Exception:  # no signature, or one that a candidate has written and that fails
            return "seed"
        return "rng" if "rng" in parameters and "seed" not in parameters else "seed"

    @cached_property
    def _batches(self) -> bool:
        """Whether a kernel estimate takes several vectors in a call, or is called for each."""
        x = np.array([[0.5, 0.25], [0.125, -0.5]])
        sized: dict[str, Any] = {"num_features": 3, "seed": 1}
        try:
            both = self._within((x, x[::-1]), sized)
            one = self._within((x[1], x[0]), sized)
        except Failure:
            return False
        # Digits do not matter: rows that are taken for something else are far off.
        return bool(np.allclose(both[1], one, rtol=1e-2))

    @property
    def eps(self) -> float:
        """Distance from 1 to the next number of the candidate's dtype."""
        return 2.0**-7 if self["dtype"] == "bfloat16" else float(np.finfo(self["dtype"]).eps)

    @property
    def half(self) -> bool:
        """Whether its numbers are of 16 bits."""
        return self["dtype"] in ("float16", "bfloat16")

    @property
    def masks_future(self) -> bool:
        """Whether it can be causal with given frequencies; LARA's proposals use all queries."""
        return self.can("causal") and not self.has("proposals")

    @property
    def least(self) -> float:
        """The smallest positive number with all digits of its dtype."""
        return float(np.finfo("float32" if self["dtype"] == "bfloat16" else self["dtype"]).tiny)

    def root(self, d: int) -> float:
        """Return the square root of the scale: what turns inputs into kernel coordinates."""
        if not self.record.takes("scale"):
            return 1.0
        if self["scale"] is None:
            return float(head_size(self, d) ** -0.25)
        return float(self["scale"] ** 0.5)

    def visible(self, n: int, m: int, options: Mapping[str, Any]) -> Any:
        """Return which of n queries sees which of m keys, (..., n, m); True if all see all."""
        seen = options.get("mask", True)
        if options.get("causal"):
            seen = np.asarray(seen) & self._band(n, m, "causal", (None, 0))
        if options.get("window") and self.record.takes("window"):  # else it is a size
            seen = np.asarray(seen) & self._band(n, m, "window", options["window"])
        return seen

    def _band(self, n: int, m: int, tag: str, window: Reach) -> npt.NDArray[np.bool_]:
        """Return the keys of a window, where the tag says that it lies."""
        ahead = np.arange(m) - np.arange(n)[:, None] - (0 if "top-left" in self[tag] else m - n)
        left, right = (math.inf if x is None else x for x in window)
        return (-left <= ahead) & (ahead <= right)

    def lead(self, *sizes: int) -> tuple[int, ...]:
        """Keep as many sizes of leading axes (batch, heads) as the layout has."""
        return sizes if self["layout"] is None else sizes[len(sizes) - self._axes :]

    @property
    def _axes(self) -> int:
        return len(self["layout"]) - 2

    def exact(self, x: Any) -> Floats:
        """Return the numbers rounded to the candidate's dtype, in float64."""
        if self["dtype"] != "bfloat16":
            return np.asarray(x, dtype=self["dtype"]).astype(np.float64)
        # NumPy has no bfloat16: to the upper half of a float32, to nearest, ties to even.
        bits = np.asarray(x, np.float32).view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
        return rounded.view(np.float32).astype(np.float64)

    def __call__(
        self,
        *arrays: Any,
        strict: bool = False,
        memory: Mapping[str, str] | None = None,
        **options: Any,
    ) -> Any:
        """Call the candidate; what it may not do raises `Failure`.

        Exceptions and shapes always count; with `strict` also the library and dtype of the
        result, and writing to arguments. Arrays are contiguous but for those that `memory` names as
        "transposed", "sliced", "read-only", "heads inside", "reversed" or "expanded".
        """
        if self.has("pairs") and np.ndim(arrays[0]) > 1 and not self._batches:
            # The candidate takes one pair of vectors at a time.
            shape = np.broadcast_shapes(*(np.shape(x) for x in arrays))
            rows = zip(
                *(np.broadcast_to(x, shape).reshape(-1, shape[-1]) for x in arrays), strict=True
            )
            return np.stack([self(*row, strict=strict, **options) for row in rows]).reshape(
                shape[:-1] if len(arrays) > 1 else (*shape[:-1], -1)
            )
        return self._within(arrays, options, strict=strict, memory=memory)

    def _within(self, arrays: tuple[Any, ...], options: dict[str, Any], **how: Any) -> Any:
        """Call it within its limits."""
        return fitted(self, partial(self._call, **how), arrays, options)

    def _call(
        self,
        *arrays: Any,
        strict: bool = False,
        memory: Mapping[str, str] | None = None,
        **options: Any,
    ) -> Any:
        layouts = memory or {}
        named = {
            name: lay_out(self._send(x), layouts.get(name))
            for name, x in zip(self.record.arrays, arrays, strict=False)
        }
        sent = list(named.values())
        keywords = {
            self._seed if k == "seed" else k: lay_out(self._option(k, x), layouts.get(k))
            for k, x in options.items()
        }
        held = {k: x for k, x in (named | keywords).items() if hasattr(x, "shape")}
        d_out = keywords.pop("d_out", None)
        # A call may write to its arguments, in whatever library.
        before = {k: receive(x).copy() for k, x in held.items()} if strict else {}
        try:
            # What a candidate warns of shows in its numbers, or does no harm.
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                if d_out is None:
                    result = self._evaluate(*sent, **keywords)
                else:
                    result = self._differentiated(sent, keywords, d_out)
        except Exception as error:
            raise Refusal("a result", f"{type(error).__name__}: {said(error)[:300]}") from error
        for k, x in before.items():
            if not np.array_equal(receive(held[k]), x, equal_nan=True):
                raise Failure(f"`{k}` to be left as it was", "other numbers in it after the call")
        if self.has("rows"):
            # A NamedTuple is taken by its names, whatever their order.
            named_pair = hasattr(result, "mean") and hasattr(result, "cov")
            pair = (result.mean, result.cov) if named_pair else result
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise Failure("a pair (mean, cov)", _describe_type(pair))
            mean, cov = pair
            *lead, _, d = np.shape(arrays[0])
            return (
                self._result(mean, (*lead, d), sent[0], strict),
                self._result(cov, (*lead, d, d), sent[0], strict),
            )
        shape = self._shape(*arrays, **options)
        if d_out is None and "return_lse" in options:
            if not isinstance(result, tuple | list) or len(result) != 2:
                raise Failure("(out, lse)", _describe_type(result))
            out, lse = result
            return self._result(out, shape, sent[0], strict), self._normalisers(lse, shape)
        if d_out is None and "initial_state" in options:
            if not isinstance(result, tuple | list) or len(result) != 2:
                raise Failure("(out, state)", _describe_type(result))
            like, state = keywords["initial_state"], np.shape(options["initial_state"])
            last = self._of_option(result[1], like, "initial_state").reshape(state)
            return self._result(result[0], shape, sent[0], strict), last
        if d_out is None:
            # Which of several results is the output is not guessed.
            if isinstance(result, tuple):
                or_lse = ", or declare --capability lse" if "lse" in possible(self.record) else ""
                if "vjp" in self.capabilities:
                    or_lse += "; return gradients only if d_out= is passed"
                raise SeveralResults(
                    "an array", f"{_describe_type(result)}: return out alone{or_lse}"
                )
            return self._result(result, shape, sent[0], strict)
        more, names = self.pulled(options), self.returns(options)
        if not isinstance(result, tuple | list) or len(result) != len(names):
            raise Failure(f"({', '.join(names)})", _describe_type(result))
        shapes = (shape, *map(np.shape, arrays))
        main = (self._result(x, y, sent[0], strict) for x, y in zip(result, shapes, strict=False))
        others = (
            self._of_tokens(x, np.shape(options[y]), y)
            if y in token_axes(self.record)
            else self._of_option(x, keywords[y], y).reshape(np.shape(options[y]))
            for x, y in zip(result[4:], more, strict=True)
        )
        return (*main, *others)

    def returns(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        """Name the results of a call with these options."""
        if self.has("rows"):
            return "mean", "cov"
        if "d_out" in options:
            of_options = (f"d_{name}" for name in self.pulled(options))
            return ("out", *(f"d{name}" for name in self.record.arrays), *of_options)
        more = {"return_lse": "lse", "initial_state": "state"}
        return ("out", *(name for option, name in more.items() if option in options))

    def pulled(self, options: Mapping[str, Any]) -> list[str]:
        """Return the options of a call whose cotangents it returns."""
        names = [name for name in ("bias", "sinks") if name in options and self.can(f"d_{name}")]
        return [*names, *(name for name in self.record.gates if name in options)]

    def _of_tokens(self, x: Any, shape: tuple[int, ...], name: str) -> Floats:
        """Return the cotangent of a gate with the axes (..., n), or (..., n, d), or of a pair."""
        if isinstance(x, tuple):
            both = zip(x, halves(np.empty(shape)), strict=True)
            return np.concatenate([self._of_tokens(y, like.shape, name) for y, like in both], -1)
        if token_axes(self.record)[name] == -1:
            return self._result(x[..., None], (*shape, 1), x, False)[..., 0]
        return self._result(x, shape, x, False)

    def _of_option(self, x: Any, like: Any, name: str) -> Floats:
        """Return a cotangent, or a state, which has the shape of what it is of."""
        got, name = self._result(x, None, like, False), name.replace("initial_", "")
        if got.shape != tuple(like.shape):
            raise Failure(
                f"{'' if name == 'state' else 'd_'}{name} of shape {tuple(like.shape)}",
                f"shape {got.shape}",
            )
        return got

    def _normalisers(self, lse: Any, shape: Any) -> Floats:
        """Return log normalisers to base e, with queries last whatever the layout."""
        got = self._result(lse, None, lse, False)
        axes = () if self["layout"] is None else (1,) * (self._axes + 2 - len(shape))
        full = (*axes, *shape[:-1])
        if got.shape != full:
            raise Failure(f"log normalisers of shape {full}", f"shape {got.shape}")
        return got.reshape(shape[:-1]) * (math.log(2) if self["lse_base"] == "2" else 1.0)

    def _evaluate(self, *arrays: Any, **keywords: Any) -> Any:
        """Call the function; the last state of a recurrence is left out unless one is passed."""
        result = self.fn(*arrays, **with_pairs(self.record, keywords))
        whole = {"initial_state", "d_out"} & set(keywords) or not self.has("recurrent")
        return result[0] if isinstance(result, tuple) and not whole else result

    def _differentiated(self, sent: list[Any], keywords: dict[str, Any], d_out: Any) -> Any:
        """Return the result and the cotangents of queries, keys and values."""
        way = keywords.pop("autograd", None)
        if self["library"] not in ("torch", "jax"):
            return self._evaluate(*sent, d_out=d_out, **keywords)
        # Autograd takes one cotangent for both results.
        if "d_lse" in keywords:
            d_out = (d_out, keywords.pop("d_lse"))
        more = self.pulled(keywords)

        def call(*arrays: Any) -> Any:
            named = keywords | dict(zip(more, arrays[3:], strict=True))
            return self._evaluate(*arrays[:3], **named)

        sent = [*sent, *(keywords[name] for name in more)]
        if self["library"] == "torch":
            out, *cotangents = pull_by_torch(call, sent, d_out, way)
        else:
            out, pullback = import_module("jax").vjp(call, *sent)
            cotangents = pullback(d_out)
        return (out[0] if "return_lse" in keywords else out, *cotangents)

    def _shape(self, *arrays: Any, **options: Any) -> tuple[int, ...] | None:
        if self.has("pairs"):
            if len(arrays) == 1:
                return None  # features: any number of them
            return np.broadcast_shapes(*(np.shape(x) for x in arrays))[:-1]
        q, k, v = (np.shape(x) for x in arrays)
        heads = q[:-2], k[:-2]
        if "h" in (self["layout"] or "h"):
            # Query heads may share key heads and, in recurrences, value heads those of queries and
            # keys.
            most = max(q[-3:-2], v[-3:-2])
            heads = q[:-3] + most, k[:-3] + most
        return (*np.broadcast_shapes(*heads), q[-2], v[-1])

    def _result(self, x: Any, shape: tuple[int, ...] | None, like: Any, strict: bool) -> Floats:
        # A subclass may multiply otherwise, as a matrix does, or hide numbers, as a masked array
        # does.
        kind = type(x)
        if issubclass(kind, np.ndarray) and kind not in (np.ndarray, np.memmap):
            raise Failure(
                "a plain array", f"a {kind.__name__}, which may hide or scale its numbers"
            )
        if strict:
            kinds = (np.ndarray, np.generic) if self["library"] == "numpy" else type(like)
            if not isinstance(x, kinds):
                raise Failure(f"an array of {self['library']}", _describe_type(x))
            if str(x.dtype) != str(like.dtype):
                raise Failure(f"dtype {like.dtype}, that of the arguments", f"{x.dtype}")
        try:
            got = receive(x)
        except Exception as error:
            raise Failure("an array", f"a {kind.__name__} ({said(error)})") from error
        if got.dtype.kind not in "fiub":
            raise Failure("real numbers", f"{_describe_type(x)}, of dtype {got.dtype}")
        if shape is None:
            return got
        if self["layout"] is not None and len(self.record.arrays) == 3:
            full = (1,) * (self._axes + 2 - len(shape)) + shape
            order = self._order()
            if got.shape != tuple(full[i] for i in order):
                raise Failure(f"shape {tuple(full[i] for i in order)}", f"shape {got.shape}")
            got = np.transpose(got, np.argsort(order)).reshape(shape)
        if got.shape != shape:
            raise Failure(f"shape {shape}", f"shape {got.shape}")
        return got

    def _order(self) -> list[int]:
        # The axes in the order of this package, those that the layout has.
        canonical = [axis for axis in "bhnd" if axis in self["layout"]]
        return [canonical.index(axis) for axis in self["layout"]]

    def _send(self, x: Any) -> Any:
        """Round to the dtype, add the leading axes of the layout, convert to the library."""
        x = np.asarray(x, np.float64)
        if self["layout"] is not None and len(self.record.arrays) == 3:
            x = x.reshape((1,) * (self._axes + 2 - x.ndim) + x.shape)
            x = np.ascontiguousarray(np.transpose(x, self._order()))
        return self._convert(x)

    def _option(self, name: str, x: Any) -> Any:
        if name == "window" and "exclusive" in self["window"]:
            left, right = x
            # An exclusive limit counts the own key of a query as well.
            return (None if left is None else left + 1, right)
        if not isinstance(x, np.ndarray):
            return x
        if name == "sinks":
            return self._convert(np.atleast_1d(x) if "h" in (self["layout"] or "") else x)
        if name in self.record.gates:
            if self["decay"] == "factor" and self.record.gates[name] in LOGS:
                x = np.exp(x)
            axis = token_axes(self.record).get(name)
            if axis is None:
                return self._convert(x)
            return self._send(x[..., None])[..., 0] if axis == -1 else self._send(x)
        of_queries = self.has("per-query") and name in ("omega", *_OF_INDICES)
        core = 3 if of_queries and name == "omega" else 2
        if name == "d_out":
            return self._send(x)
        if name == "d_lse" and self["layout"] is not None:
            x = x.reshape((1,) * (self._axes + 1 - x.ndim) + x.shape)
        if self["layout"] is not None and (name in _OF_MATRICES or of_queries):
            x = x.reshape((1,) * (self._axes + core - x.ndim) + x.shape)
        if name == "initial_state" and self.half:
            return self._convert(x, "float32")
        # torch indexes by no shorter integers, and JAX may have no longer ones.
        integers = "int32" if self["library"] == "jax" else "int64"
        kinds = {"mask": "bool", "indices": integers, "offsets": integers}
        return self._convert(x, kinds.get(name))

    def _convert(self, x: Floats, kind: str | None = None) -> Any:
        """Convert to a fresh array of the candidate's library, device and dtype, or another."""
        dtype, library = kind or self["dtype"], self["library"]
        # Numbers are rounded already, so that the library only changes their type.
        held = "float32" if dtype == "bfloat16" else dtype
        # A copy, as candidates may write to it.
        x = np.array(self.exact(x) if kind is None else x, dtype=held, order="C")
        if library == "numpy":
            return x
        device = {} if self["device"] is None else {"device": self["device"]}
        if library == "jax":
            jax, xp = import_module("jax"), import_module("jax.numpy")
            y = xp.asarray(x, dtype=getattr(xp, dtype if dtype != "bool" else "bool_"))
            return y if self["device"] is None else jax.device_put(y, self["device"])
        xp = import_module(library)
        if library == "cupy":
            xp = array_namespace(xp.empty(0))  # whose asarray takes a device
        return xp.asarray(x, dtype=getattr(xp, dtype), **device)


def name_of(fn: Any) -> str:
    """Return the name of a callable in reports: its own name, or that of its type."""
    try:
        name = fn.__qualname__
    except Exception:  # it may be anything that a candidate has written
        name = None
    return name if isinstance(name, str) and name else type(fn).__name__


def _describe_type(result: Any) -> str:
    """Describe a result that is not the arrays expected."""
    if result is None:
        return "None"
    kind = type(result).__name__
    return f"a {kind} of {len(result)}" if isinstance(result, tuple | list) else f"a {kind}"
