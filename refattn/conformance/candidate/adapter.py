"""What stands between the checks and a callable: its conventions, and how it may misbehave."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib import import_module
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from ...arrays import checks
from ...arrays.library import Floats, array_namespace
from ...arrays.words import said
from ...registry import ESTIMATORS, Estimator
from .failures import Failure, Refusal
from .limits import fitted, head_size

__all__ = [
    "CAPABILITIES",
    "CHOICES",
    "DEFAULTS",
    "GIVEN",
    "TAGS",
    "Adapter",
    "drawn",
    "possible",
    "written",
]

Window = tuple[int | None, int | None]


# Options of an estimator that the checks know how to use.
CAPABILITIES: Mapping[str, str] = MappingProxyType(
    {
        "batch_invariant": "a query has the same bits alone, in any batch and in any order",
        "bias": "bias=, floats (..., n, m), added to the scores",
        "causal": "causal=True: query i sees key j only if j <= i + m - n",
        "d_bias": "with bias and vjp: returns d_bias after dv",
        "d_lse": "with lse and vjp: d_lse=, a cotangent of lse beside d_out",
        "d_sinks": "with sinks and vjp: returns d_sinks after these",
        "deterministic": "the same call has the same bits, gradients too",
        "dropout": "dropout=p, seed=: weights are kept with probability 1 - p, and divided by it",
        "feature_map": "a kernel called as fn(x, omega=omega) returns features",
        "gqa": "keys and values may have fewer heads than queries, shared by consecutive ones",
        "indices": "indices=, keys (S,) or of each head, of sampled-softmax (n, S); of samples "
        "with log_probability=, logs of how often each is expected",
        "indices_only": "the same, and no other way to call it: it draws nothing by itself",
        "lse": "return_lse=True: returns (out, lse), log normalisers (..., heads, n) without sinks",
        "mask": "mask=, boolean (..., n, m), True where a query sees a key",
        "moments": "mean= and cov= of the law of the frequencies",
        "omega": "omega=, frequencies (S, d); of RA (n, S, d), of LARA with centres=, of EVA "
        "(C, d) for C chunks",
        "omega_only": "the same, and no other way to call it: it draws nothing by itself",
        "omega_per_head": "the frequencies may differ between heads",
        "sinks": "sinks=, (heads,), the score for each query head of a key whose value is 0",
        "softcap": "softcap=c: scores are c tanh(score / c), before a bias is added",
        "vjp": "d_out=: returns (out, dq, dk, dv); of torch and jax the library differentiates",
        "window": "window=(left, right): the query sees so many keys before its own, and after",
    }
)

DTYPES = ("float64", "float32", "float16", "bfloat16")
LIBRARIES = ("numpy", "torch", "jax", "cupy")
LAYOUTS = ("nd", "hnd", "nhd", "bnd", "bhnd", "bnhd")

TAGS: Mapping[str, str] = MappingProxyType(
    {
        "scale": "factor on q . k; None, the default, for 1/sqrt(d)",
        "coupling": 'how frequencies depend on each other, as in sampling.draw; "iid" by default',
        "features": '"positive" (default), "hyperbolic" or "trigonometric"',
        "feature_map": 'of linear attention: "elu" (default) or "relu"',
        "weighting": 'of LARA: "balance" (default), "own", "query" or "query-over-queries"',
        "dtype": f"of the arrays: {', '.join(DTYPES)}; float64 by default",
        "library": f"of the arrays: {', '.join(LIBRARIES)}; numpy by default",
        "device": "of the arrays, in the words of their library",
        "layout": f"axes, one of {', '.join(LAYOUTS)}; by default any leading axes, then n, d",
        "centres": '"chunks" if LARA as a black box takes its proposals as this package does',
        "causal": '"bottom-right" (default) or "top-left": which keys a query sees if n != m',
        "lse_base": 'of the log normalisers: "e" (default) or "2"',
        "hidden": 'what masked keys and values may be: "any" (default), NaN too; "finite-values", '
        'keys alone may be NaN; or "finite"',
        "epsilon": "what is added to features or normalisers; 0 by default",
        "ddof": "of the covariance: 0, or 1 by default",
        "head_sizes": "the only d that it takes, such as 64,128; any by default",
        "multiple_of": "what numbers of tokens must be multiples of; 1 by default",
        "self_attention": "true if there must be as many queries as keys",
        "causal_only": "true if every call is causal, with causal=True only if that is declared",
        "same_value_size": "true if values must be as long as queries and keys",
        "fixed_frequencies": "true if drawn when it was made: neither a size nor a seed is given",
        "empty_rows": 'what a query gets that sees no key: "zero" (default), "nan", "mean" or '
        '"undefined"',
        "max_logit": "the largest |scale q . k| that it takes; any by default",
        "window": 'which keys a window holds: "inclusive", so many besides the query\'s own, or '
        '"exclusive", left counts that; and where it lies if n != m, "bottom-right" or "top-left"; '
        '"inclusive, bottom-right" by default',
    }
)

CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "coupling": ("iid", "orthogonal", "simplex", "antithetic", "sobol", "halton"),
        "features": ("positive", "hyperbolic", "trigonometric"),
        "feature_map": ("elu", "relu"),
        "weighting": ("balance", "own", "query", "query-over-queries"),
        "dtype": DTYPES,
        "library": LIBRARIES,
        "layout": LAYOUTS,
        "causal": ("bottom-right", "top-left"),
        "hidden": ("any", "finite-values", "finite"),
        "lse_base": ("e", "2"),
        "centres": ("own", "chunks"),
        "empty_rows": ("zero", "nan", "mean", "undefined"),
        "window": (
            "inclusive, bottom-right",
            "inclusive, top-left",
            "exclusive, bottom-right",
            "exclusive, top-left",
        ),
    }
)

_TRUE_OR_FALSE = ("self_attention", "causal_only", "same_value_size", "fixed_frequencies")
# Limits of attention only.
_OF_TOKENS = ("multiple_of", "self_attention", "causal_only", "same_value_size", "empty_rows")

DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {name: options[0] for name, options in CHOICES.items()}
    | dict.fromkeys(_TRUE_OR_FALSE, False)
    | dict.fromkeys(("scale", "device", "layout", "head_sizes", "max_logit"))
    | {"epsilon": 0.0, "ddof": 1, "multiple_of": 1}
)

_OF_BITS = ("batch_invariant", "deterministic")

# What may be given of what an estimator draws: results are numbers then, and need no seed.
GIVEN = ("omega", "indices")
_OF_INDICES = ("indices", "log_probability")  # which have leading axes, and S

# What a verdict does not cover where a tag or a capability says so.
LIMITS: Mapping[str, str] = MappingProxyType(
    {
        "indices_only": "how keys are drawn is not its own",
        "omega_only": "how frequencies are drawn is not its own",
        "hidden": "what is hidden was finite",
        "epsilon": "errors that it may cause were allowed",
        "head_sizes": "no other length of queries and keys was asked",
        "multiple_of": "no other number of tokens was asked",
        "self_attention": "there were always as many queries as keys",
        "causal_only": "every call was causal",
        "same_value_size": "values were always as long as keys",
        "fixed_frequencies": "the law of its frequencies was not tested",
        "empty_rows": "queries that see no key were compared with that",
        "max_logit": "no larger inner product was asked",
    }
)


@dataclass(frozen=True)
class Adapter:
    """A callable, the estimator it claims to be, and its conventions.

    Parameters
    ----------
    fn : callable
        Called with arrays by position and everything else by keyword; see `check`.
    estimator : str
        What it computes: a name of `registry.ESTIMATORS`, such as ``"softmax"``, ``"kernel"``,
        ``"rfa"``, ``"ra"``, ``"lara"``, ``"linear"``, ``"moments"``.
    capabilities : iterable of str
        Keywords it takes beyond those of a black box: ``"omega"`` (frequencies are given; for
        LARA with ``centres``), ``"omega_per_head"`` (they may differ between heads), ``"indices"``
        (keys are given in place of those drawn, with ``log_probability`` if they are a sample:
        integers from 0 to m - 1, for all heads or each; those of a coreset differ), ``"mask"``,
        ``"causal"``, ``"gqa"`` (fewer key than query heads), ``"feature_map"`` (a kernel called
        as ``fn(x, omega=omega)`` returns features), ``"moments"`` (RFA takes ``mean`` and
        ``cov`` of the law of its frequencies), ``"vjp"`` (gradients: with the tag ``library``
        torch or jax the library differentiates the callable, otherwise it takes ``d_out`` and
        returns ``(out, dq, dk, dv)``), ``"lse"`` (with ``return_lse=True`` exact attention returns
        ``(out, lse)``), ``"d_lse"`` (whose gradient it has too), and of exact attention
        ``"window"``, ``"softcap"``, ``"sinks"``, ``"bias"`` and ``"dropout"``, with gradients also
        of ``"d_bias"`` and ``"d_sinks"``, in this order after ``dv``.
    tags : mapping, optional
        Conventions, see `TAGS`; values may be strings, as on the command line.
    name : str, optional
        Name in reports; by default that of the callable.
    source : str, optional
        Where the callable can be imported from, as ``"module:name"``, for scripts that show a
        failure; without it they look for the callable under its own name.

    Raises
    ------
    TypeError
        If `fn` is not callable, or an argument is of another type than above.
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
    >>> from refattn.conformance import Adapter
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
        checks.choice("estimator", self.estimator, ESTIMATORS)
        capabilities = frozenset(checks.list_names("capabilities", self.capabilities))
        for name in sorted(capabilities):
            checks.choice("capabilities", name, possible(self.record) or ("none of them",))
        tags = dict(DEFAULTS)
        if not isinstance(self.tags, Mapping | None):
            raise TypeError(
                f"`tags` must be a mapping of tags to values, got {type(self.tags).__name__}."
            )
        for name, value in (self.tags or {}).items():
            checks.choice("tags", name, TAGS)
            tags[name] = _tag(name, value)
        if tags["device"] is not None and tags["library"] == "numpy":
            raise ValueError(
                f"`tags['device']` must be left out for NumPy arrays, got {tags['device']!r}."
            )
        _limited(self.record, capabilities, tags)
        for attribute in ("name", "source"):
            given = getattr(self, attribute)
            if not isinstance(given, str | None):
                kind = type(given).__name__
                raise TypeError(f"`{attribute}` must be a string, got {kind}.")
        if self.source is not None and not all(self.source.partition(":")):
            raise ValueError(f"`source` must be module:name, got {self.source!r}.")
        name = self.name or _name(self.fn)
        for attribute, value in (("capabilities", capabilities), ("tags", tags), ("name", name)):
            object.__setattr__(self, attribute, value)

    def __getitem__(self, tag: str) -> Any:
        return self.tags[tag]  # type: ignore[index]

    def can(self, *capabilities: str) -> bool:
        """Whether the candidate has all these capabilities, or others that imply them."""
        implied = {name for name in GIVEN if _only(name) in self.capabilities}
        if self["causal_only"]:
            implied.add("causal")
        return set(capabilities) <= implied.union(self.capabilities)

    def has(self, *traits: str) -> bool:
        """Whether the estimator has all these traits."""
        return self.record.has(*traits)

    @property
    def waves(self) -> bool:
        """Whether its features are cosines and sines, of which sums may cancel."""
        tagged = self.has("random-features") and self["features"] == "trigonometric"
        return self.has("waves") or tagged

    @property
    def given(self) -> str:
        """The keyword for what it would draw by itself; empty if it does not take that."""
        return next(filter(self.can, GIVEN), "")

    @property
    def draws(self) -> bool:
        """Whether it draws something by itself, other for each seed."""
        frequencies = self.has("random") and self.black_box and not self["fixed_frequencies"]
        return frequencies or self.can("dropout")

    @property
    def grouped(self) -> bool:
        """Whether heads of queries may share those of keys."""
        return self.can("gqa") and "h" in (self["layout"] or "h")

    @property
    def settled(self) -> dict[str, Any]:
        """Options of every call: what is causal without being asked has to be told so."""
        return {"causal": True} if self["causal_only"] else {}

    @property
    def black_box(self) -> bool:
        """Whether it can be called without what it would draw."""
        return not set(map(_only, GIVEN)) & set(self.capabilities)

    @property
    def limits(self) -> dict[str, str]:
        """What a verdict does not cover, by what the candidate declares."""
        words = dict.fromkeys(self.capabilities, "")
        words |= {tag: f"={written(value)}" for tag, value in self.declared.items()}
        return {f"{name}{words[name]}": text for name, text in LIMITS.items() if name in words}

    @property
    def declared(self) -> dict[str, Any]:
        """The tags whose value is not the default."""
        return {name: x for name, x in (self.tags or {}).items() if x != DEFAULTS[name]}

    @property
    def record(self) -> Estimator:
        """What is known of the estimator."""
        return ESTIMATORS[self.estimator]

    @cached_property
    def _seed(self) -> str:
        try:
            parameters = inspect.signature(self.fn).parameters
        except Exception:  # no signature, or one that a candidate has written and that fails
            return "seed"
        return "rng" if "rng" in parameters and "seed" not in parameters else "seed"

    @cached_property
    def _batches(self) -> bool:
        """Whether a kernel takes several vectors in a call; if not it is called for each."""
        x = np.array([[0.5, 0.25], [0.125, -0.5]])
        given: dict[str, Any] = {"num_features": 3, "seed": 1}
        try:
            both = self._within((x, x[::-1]), given)
            one = self._within((x[1], x[0]), given)
        except Failure:
            return False
        return bool(np.allclose(both[1], one, rtol=1e-2))

    @property
    def eps(self) -> float:
        """Distance from 1 to the next number of the candidate's dtype."""
        return 2.0**-7 if self["dtype"] == "bfloat16" else float(np.finfo(self["dtype"]).eps)

    @property
    def least(self) -> float:
        """The least positive number of all its digits."""
        return float(np.finfo("float32" if self["dtype"] == "bfloat16" else self["dtype"]).tiny)

    def root(self, d: int) -> float:
        """Square root of the scale: what turns inputs into kernel coordinates."""
        if not self.record.takes("scale"):
            return 1.0
        if self["scale"] is None:
            return float(head_size(self, d) ** -0.25)
        return float(self["scale"] ** 0.5)

    def visible(self, n: int, m: int, options: Mapping[str, Any]) -> Any:
        """Which of n queries sees which of m keys, (..., n, m); True where all see all."""
        seen = options.get("mask", True)
        if options.get("causal"):
            seen = np.asarray(seen) & self._band(n, m, "causal", (None, 0))
        if options.get("window") and self.record.takes("window"):  # else it is a size
            seen = np.asarray(seen) & self._band(n, m, "window", options["window"])
        return seen

    def _band(self, n: int, m: int, tag: str, window: Window) -> npt.NDArray[np.bool_]:
        """The keys of a window, where the tag says that it lies."""
        ahead = np.arange(m) - np.arange(n)[:, None] - (0 if "top-left" in self[tag] else m - n)
        left, right = (math.inf if x is None else x for x in window)
        return (-left <= ahead) & (ahead <= right)

    def lead(self, *sizes: int) -> tuple[int, ...]:
        """As many of the sizes of leading axes (batch, heads) as the layout has."""
        return sizes if self["layout"] is None else sizes[len(sizes) - self._axes :]

    @property
    def _axes(self) -> int:
        return len(self["layout"]) - 2

    def exact(self, x: Any) -> Floats:
        """The numbers rounded to the candidate's dtype, in float64."""
        if self["dtype"] != "bfloat16":
            return np.asarray(x, dtype=self["dtype"]).astype(np.float64)
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
            name: _in_memory(self._send(x), layouts.get(name))
            for name, x in zip(self.record.arrays, arrays, strict=False)
        }
        sent = list(named.values())
        keywords = {
            self._seed if k == "seed" else k: _in_memory(self._option(k, x), layouts.get(k))
            for k, x in options.items()
        }
        held = {k: x for k, x in (named | keywords).items() if hasattr(x, "shape")}
        d_out = keywords.pop("d_out", None)
        before = {k: self._receive(x).copy() for k, x in held.items()} if strict else {}
        try:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                if d_out is None:
                    result = self.fn(*sent, **keywords)
                else:
                    result = self._differentiated(sent, keywords, d_out)
        except Exception as error:
            raise Refusal("a result", f"{type(error).__name__}: {said(error)[:300]}") from error
        for k, x in before.items():
            if not np.array_equal(self._receive(held[k]), x, equal_nan=True):
                raise Failure(f"`{k}` to be left as it was", "other numbers in it after the call")
        if self.has("rows"):
            named_pair = hasattr(result, "mean") and hasattr(result, "cov")
            pair = (result.mean, result.cov) if named_pair else result
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise Failure("a pair (mean, cov)", _came(pair))
            mean, cov = pair
            *lead, _, d = np.shape(arrays[0])
            return (
                self._result(mean, (*lead, d), sent[0], strict),
                self._result(cov, (*lead, d, d), sent[0], strict),
            )
        shape = self._shape(*arrays, **options)
        if d_out is None and "return_lse" in options:
            if not isinstance(result, tuple | list) or len(result) != 2:
                raise Failure("(out, lse)", _came(result))
            out, lse = result
            return self._result(out, shape, sent[0], strict), self._normalisers(lse, shape)
        if d_out is None:
            return self._result(result, shape, sent[0], strict)
        more = self.pulled(options)
        names = ("out", "dq", "dk", "dv", *(f"d_{name}" for name in more))
        if not isinstance(result, tuple | list) or len(result) != len(names):
            raise Failure(f"({', '.join(names)})", _came(result))
        shapes = (shape, *map(np.shape, arrays))
        main = (self._result(x, y, sent[0], strict) for x, y in zip(result, shapes, strict=False))
        others = (self._of_option(x, keywords[y], y) for x, y in zip(result[4:], more, strict=True))
        return (
            *main,
            *(x.reshape(np.shape(options[y])) for x, y in zip(others, more, strict=True)),
        )

    def pulled(self, options: Mapping[str, Any]) -> list[str]:
        """The options of a call whose cotangents it gives."""
        return [name for name in ("bias", "sinks") if name in options and self.can(f"d_{name}")]

    def _of_option(self, x: Any, like: Any, name: str) -> Floats:
        """A cotangent, which has the shape of what it is of."""
        got = self._result(x, None, like, False)
        if got.shape != tuple(like.shape):
            raise Failure(f"d_{name} of shape {tuple(like.shape)}", f"shape {got.shape}")
        return got

    def _normalisers(self, lse: Any, shape: Any) -> Floats:
        """Log normalisers to base e, with queries last whatever the layout."""
        got = self._result(lse, None, lse, False)
        axes = () if self["layout"] is None else (1,) * (self._axes + 2 - len(shape))
        full = (*axes, *shape[:-1])
        if got.shape != full:
            raise Failure(f"log normalisers of shape {full}", f"shape {got.shape}")
        return got.reshape(shape[:-1]) * (math.log(2) if self["lse_base"] == "2" else 1.0)

    def _differentiated(self, sent: list[Any], keywords: dict[str, Any], d_out: Any) -> Any:
        """The result and the cotangents of queries, keys and values."""
        way = keywords.pop("autograd", None)
        if self["library"] not in ("torch", "jax"):
            return self.fn(*sent, d_out=d_out, **keywords)
        if "d_lse" in keywords:
            d_out = (d_out, keywords.pop("d_lse"))
        more = self.pulled(keywords)

        def call(*arrays: Any) -> Any:
            return self.fn(*arrays[:3], **keywords | dict(zip(more, arrays[3:], strict=True)))

        sent = [*sent, *(keywords[name] for name in more)]
        if self["library"] == "torch":
            out, *found = self._by_torch(call, sent, d_out, way)
        else:
            out, pullback = import_module("jax").vjp(call, *sent)
            found = pullback(d_out)
        return (out[0] if "return_lse" in keywords else out, *found)

    @staticmethod
    def _by_torch(call: Callable[..., Any], sent: list[Any], d_out: Any, way: Any) -> Any:
        """The same by torch: each input "alone", "again" through one graph, or "crossed" calls."""
        torch = import_module("torch")

        def forth(wanted: range) -> tuple[Any, list[Any]]:
            given = [x.detach() for x in sent]
            given = [x.requires_grad_() if i in wanted else x for i, x in enumerate(given)]
            return call(*given), [given[i] for i in wanted]

        def back(out: Any, given: list[Any]) -> list[Any]:
            found = torch.autograd.grad(out, given, d_out, allow_unused=True, retain_graph=True)
            pairs = zip(found, given, strict=True)
            return [torch.zeros_like(x) if g is None else g for g, x in pairs]

        out, given = forth(range(len(sent)))
        if way == "alone":
            return (out, *(back(*forth(range(i, i + 1)))[0] for i in range(len(sent))))
        if way == "again":
            back(out, given)
        if way == "crossed":
            call(*(2 * x.detach() for x in sent))
        return (out, *back(out, given))

    def _shape(self, *arrays: Any, **options: Any) -> tuple[int, ...] | None:
        if self.has("pairs"):
            if len(arrays) == 1:
                return None  # features: any number of them
            return np.broadcast_shapes(*(np.shape(x) for x in arrays))[:-1]
        q, k, v = (np.shape(x) for x in arrays)
        heads = (q[:-2], k[:-3] + q[-3:-2] if "h" in (self["layout"] or "h") else k[:-2])
        return (*np.broadcast_shapes(*heads), q[-2], v[-1])

    def _result(self, x: Any, shape: tuple[int, ...] | None, like: Any, strict: bool) -> Floats:
        kind = type(x)
        if issubclass(kind, np.ndarray) and kind not in (np.ndarray, np.memmap):
            raise Failure(
                "a plain array", f"a {kind.__name__}, which may hide or scale its numbers"
            )
        if strict:
            kinds = (np.ndarray, np.generic) if self["library"] == "numpy" else type(like)
            if not isinstance(x, kinds):
                raise Failure(f"an array of {self['library']}", f"a {kind.__name__}")
            if str(x.dtype) != str(like.dtype):
                raise Failure(f"dtype {like.dtype}, that of the arguments", f"{x.dtype}")
        try:
            got = self._receive(x)
        except Exception as error:
            raise Failure("an array", f"a {kind.__name__} ({said(error)})") from error
        if got.dtype.kind not in "fiub":
            raise Failure("real numbers", f"a {kind.__name__} of dtype {got.dtype}")
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
            return (None if left is None else left + 1, right)
        if not isinstance(x, np.ndarray):
            return x
        if name == "sinks":
            return self._convert(np.atleast_1d(x) if "h" in (self["layout"] or "") else x)
        of_queries = self.has("per-query") and name in ("omega", *_OF_INDICES)
        core = 3 if of_queries and name == "omega" else 2
        if name == "d_out":
            return self._send(x)
        if name == "d_lse" and self["layout"] is not None:
            x = x.reshape((1,) * (self._axes + 1 - x.ndim) + x.shape)
        if self["layout"] is not None and (name in ("mask", "bias") or of_queries):
            x = x.reshape((1,) * (self._axes + core - x.ndim) + x.shape)
        # torch indexes by no shorter integers, and JAX may have no longer ones.
        integers = "int32" if self["library"] == "jax" else "int64"
        return self._convert(x, {"mask": "bool", "indices": integers}.get(name))

    def _convert(self, x: Floats, kind: str | None = None) -> Any:
        """A fresh array of the candidate's library and device, and of its dtype or another kind."""
        dtype, library = kind or self["dtype"], self["library"]
        held = "float32" if dtype == "bfloat16" else dtype
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

    def _receive(self, x: Any) -> Floats:
        """The numbers of a result as a NumPy array, halves in float32."""
        if hasattr(x, "detach"):
            x = x.detach().cpu()
        if str(getattr(x, "dtype", "")).endswith(("bfloat16", "float16")):
            x = x.float() if hasattr(x, "float") else x.astype(np.float32)
        if type(x).__module__.startswith("cupy"):
            x = x.get()
        return np.asarray(x)


def _in_memory(x: Any, layout: str | None) -> Any:
    """The same array of NumPy or torch, laid out otherwise."""
    if layout is None or x.ndim < 2:
        return x
    if layout == "read-only":
        if isinstance(x, np.ndarray):
            x.flags.writeable = False
        return x
    xp = import_module(type(x).__module__.partition(".")[0])
    if layout == "expanded":  # where all numbers are one
        return xp.broadcast_to(x[(slice(0, 1),) * x.ndim], x.shape)
    if layout == "reversed":
        return np.flip(np.flip(x, -2).copy(), -2)
    if layout in ("transposed", "heads inside"):
        i, j = (-2, -1) if layout == "transposed" else (max(-3, -x.ndim), -2)
        shape = list(x.shape)
        shape[i], shape[j] = shape[j], shape[i]
        room = xp.swapaxes(xp.zeros(tuple(shape), dtype=x.dtype), i, j)
        room[...] = x
        return room
    room = xp.zeros((*x.shape[:-1], 2 * x.shape[-1]), dtype=x.dtype)
    room[..., ::2] = x
    return room[..., ::2]


def _name(fn: Any) -> str:
    """What a callable is called in reports: its own name if it has one, or that of its type."""
    try:
        name = fn.__qualname__
    except Exception:  # it may be anything that a candidate has written
        name = None
    return name if isinstance(name, str) and name else type(fn).__name__


def _came(result: Any) -> str:
    """What came in place of several arrays."""
    kind = type(result).__name__
    return f"a {kind} of {len(result)}" if isinstance(result, tuple | list) else f"a {kind}"


def _brief(value: Any) -> str:
    """What was received, shortened: digits may be thousands."""
    if isinstance(value, int) and abs(value) >= 10**40:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _only(name: str) -> str:
    """The capability of what is called with this keyword, and in no other way."""
    return f"{name}_only"


def drawn(record: Estimator, options: Iterable[str]) -> bool:
    """Whether something is drawn in a call with these options."""
    return record.has("random") and not set(GIVEN) & set(options)


def possible(record: Estimator) -> list[str]:
    """Capabilities that implementations of an estimator may have."""
    bits = _OF_BITS if len(record.arrays) == 3 else ()
    only = [_only(name) for name in GIVEN if record.takes(name)]
    return [name for name in CAPABILITIES if name in (*record.options, *bits, *only)]


def _limited(record: Estimator, capabilities: Iterable[str], tags: Mapping[str, Any]) -> None:
    """Refuse limits that an estimator cannot have."""
    if len(record.arrays) < 3:
        for tag in _OF_TOKENS:
            if tags[tag] != DEFAULTS[tag]:
                raise ValueError(
                    f"`tags[{tag!r}]` must be left out for {record.name}, got {tags[tag]!r}."
                )
    if record.has("rows") and tags["head_sizes"] is not None:
        raise ValueError(f"`tags['head_sizes']` must be left out for {record.name}.")
    given = {*GIVEN, *map(_only, GIVEN)} & set(capabilities)
    if tags["fixed_frequencies"] and (given or not record.has("random")):
        raise ValueError(
            "`tags['fixed_frequencies']` must be left out where no frequencies are drawn, or "
            f"where they are given, got {tags['fixed_frequencies']!r}."
        )
    if tags["causal_only"] and not record.takes("causal"):
        raise ValueError(f"`tags['causal_only']` must be left out for {record.name}.")


def written(value: Any) -> str:
    """The value of a tag as on the command line."""
    if isinstance(value, tuple) and len(value) > 4:
        return f"{value[0]},{value[1]},...,{value[-1]}"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _true(name: str, value: Any) -> bool:
    words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if not isinstance(value, bool) and str(value).lower() not in words:
        raise ValueError(f"`tags[{name!r}]` must be true or false, got {_brief(value)}.")
    return words[str(value).lower()]


def _sizes(value: Any) -> tuple[int, ...] | None:
    """Head sizes: a number, several, or as text separated by commas."""
    if value is None:
        return None
    given = value.split(",") if isinstance(value, str) else value
    try:
        sizes = tuple(int(size) for size in (given if np.iterable(given) else (given,)))
    except (TypeError, ValueError):
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise ValueError(f"`tags['head_sizes']` must be positive integers, got {_brief(value)}.")
    return tuple(sorted(set(sizes)))


def _tag(name: str, value: Any) -> Any:
    """The value of a tag, from its text where it is one."""
    if name in _TRUE_OR_FALSE:
        return _true(name, value)
    if name == "head_sizes":
        return _sizes(value)
    if name in CHOICES:
        if not (name == "layout" and value in (None, "None")):
            checks.choice(f"tags[{name!r}]", value, CHOICES[name])
        return None if value == "None" else value
    if name == "device":
        return value
    if value is None or (name == "scale" and value == "None"):
        return (
            None
            if name in ("scale", "device", "max_logit")
            else checks.real(f"tags[{name!r}]", value)
        )
    if name == "ddof":
        if isinstance(value, bool) or value not in (0, 1, "0", "1"):
            raise ValueError(f"`tags['ddof']` must be 0 or 1, got {_brief(value)}.")
        return int(value)
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(f"`tags[{name!r}]` must be a finite number, got {_brief(value)}.")
        value = number
    number = checks.real(f"tags[{name!r}]", value, positive=name in ("scale", "max_logit"))
    if name == "multiple_of":
        if number < 1 or number != int(number):
            raise ValueError(f"`tags['multiple_of']` must be a positive integer, got {value!r}.")
        return int(number)
    if number < 0:
        raise ValueError(f"`tags[{name!r}]` must be at least 0, got {value!r}.")
    return float(number)
