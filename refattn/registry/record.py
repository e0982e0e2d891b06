"""The record of an estimator, and functions that register and look up records."""

from __future__ import annotations

import inspect
import pkgutil
import re
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any, NamedTuple

from ..arrays import checks
from ..arrays.words import close, said
from ..estimators.inputs import open_partials

GROUP = "refattn.estimators"
_NO_SOFTMAX = {"exact", "feature-map", "projection", "recurrent"}

TRAITS: Mapping[str, str] = MappingProxyType(
    {
        "pairs": "takes vectors x and y, and estimates e^(x.y) for each pair",
        "rows": "takes rows x, and returns their mean and covariance",
        "exact": "is softmax attention itself",
        "feature-map": "its kernel is a dot product of features; a tag names the feature map",
        "normalised": "its weights sum to 1, and are the same for every column of values",
        "nonnegative": "no weight is negative",
        "unordered-keys": "the order of the keys does not matter, if the frequencies are the same",
        "queries-apart": "the result of a query does not depend on the other queries",
        "local": "treats near and far keys differently, so the order of tokens matters",
        "chunked": "its size is the length of a chunk; size 1 and a single chunk are exact",
        "exponential": "weights of keys are exponentials of inner products, which may be large",
        "quadratic": "its time grows with the product of the numbers of queries and keys",
        "unlimited-size": "its number of features or samples may exceed the number of tokens",
        "random": "draws random numbers from the generator `rng`",
        "seeds-differ": "no two seeds give the same result",
        "data-free": "the random numbers depend on the seed, not on the numbers in the arrays",
        "frequency-mean": "reordering its frequencies, or using each twice, changes nothing",
        "per-query": "each query has its own frequencies (..., n, S, d), or keys (..., n, S)",
        "random-features": "its formula is that of `rfa`, or of `kernel` for pairs, and takes "
        "`features`; all queries share frequencies from N(0, I), with the declared coupling",
        "trigonometric": "its features are sines and cosines, so weights may be negative",
        "target": "draws the frequencies of each query from its target distribution (RA)",
        "recurrent": "carries a state from token to token, and returns it with the output",
        "linear-solve": "solves a linear system, whose condition number multiplies rounding errors",
        "projection": "its kernel is a dot product of ReLU features of frequencies, each plus a "
        "constant; a tag is that constant",
        "proposals": "draws frequencies from Gaussian proposals around centres (LARA)",
    }
)

GATES: Mapping[str, str] = MappingProxyType(
    {
        "head": "a factor for each head, (heads,), 0 to 1",
        "log": "a logarithm for each token, (..., n), 0 or less",
        "logs": "a logarithm for each coordinate of a key, (..., n, d), 0 or less",
        "rate": "a number for each token, (..., n), 0 to 1 over the square of its key",
        "factor": "a number for each token, (..., n), 0 to 1",
        "pair": "two vectors for each token, (..., n, d), that take from a state",
    }
)


class Estimator(NamedTuple):
    """The record of an estimator, which the rest of the package uses.

    Attributes
    ----------
    name : str
        What the command line and `ESTIMATORS` call it: letters, digits, -, _, + and #.
    fn : callable
        The estimator, ``fn(q, k, v, **options)`` on arrays (..., n, d), (..., m, d), (..., m, d_v);
        with the trait "pairs" ``fn(x, y, ...)``, with "rows" ``fn(x)``. With the trait "random" it
        takes `rng`: anything that `numpy.random.default_rng` takes.
    naive : callable
        The plain formula, for arrays of any floating-point dtype of NumPy, also longdouble.
        Implementations are compared with it. It takes the `options`, including `omega` if that is
        one, and the size, if the estimator is not random or uses chunks.
    size : str or None
        The keyword that sets the number S of features, samples, landmarks, ...: a positive integer.
        `fn` must accept any S up to the numbers of queries and of keys.
    options : iterable of str
        Other keywords that `fn` and `naive` take: ``"scale"`` (a factor on q . k, by default
        1/sqrt(d)), ``"mask"``, ``"causal"``, ``"omega"`` (frequencies), ``"indices"`` (of keys,
        instead of drawn ones) with ``"log_probability"`` for a sample of them, and others in
        `conformance.CAPABILITIES`. With ``"vjp"``, gradients are compared with those of
        `refattn.vjp`: of `fn`, or if there is one of an estimator before it whose formula is
        `naive`.
    traits : iterable of str
        Its properties, names in `TRAITS`. Each trait adds checks; only "local" removes some, if a
        tag would move tokens to other places.
    state : class or None
        Its decoding state, as in `refattn.streaming`: with `init`, `update`, `read` and `merge`.
    aliases : iterable of str
        Other names.
    certified : callable or None
        The estimator in pairs of float64, with a proven error bound, as in `refattn.certified`:
        candidates in float64 are compared with it at sizes for which the formula is too slow.
    vjp : callable, str or None
        Its pullback, if `refattn.vjp` is to use it and not the steps of `fn`: called with all
        options of `fn`, it returns the output and a function from the cotangent of the output to
        `refattn.Gradients`. A string "package.module:name" says where it is; it is imported when it
        is used.
    evaluate : callable or None
        If `fn` has no argument for its random numbers: the function to which `fn` passes them.
        `vjp` is then the pullback of this function.
    vectors : callable, str or None
        Its golden vectors: a function, or a string that says where it is, as for `vjp`. Called with
        the first alias, or the name if there is none, it yields the recipes of cases, as
        `refattn.judge.vectors.recipes.usual` does. `naive` must be a formula of
        `refattn.naive`.
    source : iterable of str
        Where its formula is from.
    gates : mapping of str
        Other arrays that `fn` and `naive` always take, by keyword, each with its kind, a name in
        `GATES`.

    Examples
    --------
    >>> from refattn.registry import ESTIMATORS
    >>> ESTIMATORS["ra"].size
    'num_samples'
    >>> ESTIMATORS["rfa"] is ESTIMATORS["rfa-iid"]
    True
    """

    name: str
    fn: Callable[..., Any]
    naive: Callable[..., Any]
    size: str | None = None
    options: Iterable[str] = ()
    traits: Iterable[str] = ()
    state: Any = None
    aliases: Iterable[str] = ()
    certified: Callable[..., Any] | None = None
    vjp: Callable[..., Any] | str | None = None
    evaluate: Callable[..., Any] | None = None
    vectors: Callable[..., Any] | str | None = None
    source: Iterable[str] = ()
    gates: Mapping[str, str] = MappingProxyType({})

    def __hash__(self) -> int:  # a mapping has none
        return hash(self.name)

    def has(self, *traits: str) -> bool:
        """Whether it has all these traits, which must be names in `TRAITS`."""
        for name in set(traits) - TRAITS.keys():
            checks.choice("traits", name, TRAITS)
        return set(traits) <= set(self.traits)

    def takes(self, *options: str) -> bool:
        """Whether it takes all these options."""
        return set(options) <= set(self.options)

    @property
    def arrays(self) -> tuple[str, ...]:
        """Names of the arrays that it takes."""
        if self.has("rows"):
            return ("x",)
        return ("x", "y") if self.has("pairs") else ("q", "k", "v")

    @property
    def approximates(self) -> bool:
        """Whether it approximates softmax attention."""
        return self.arrays == ("q", "k", "v") and not _NO_SOFTMAX & set(self.traits)

    @property
    def function(self) -> Any:
        """The function that evaluates it, without the options that a `functools.partial` fixes."""
        return open_partials(self.evaluate or self.fn)[0]

    @property
    def differentiable(self) -> Callable[..., Any] | None:
        """The function to pass to `vjp`; None if it is no attention function."""
        if self.arrays != ("q", "k", "v"):
            return None
        if self.vjp is not None:
            return self.evaluate or self.fn
        (formula, options), (plain, fixed) = open_partials(self.naive), open_partials(self.fn)
        for record in _REGISTRY.known:  # those of the package are the first
            if open_partials(record.naive)[0] is formula:
                own = fixed if plain is record.function else {}
                return partial(record.function, **{**own, **options})
        return self.evaluate or self.fn

    def sized(self, samples: int) -> dict[str, Any]:
        """The keyword that sets S, if there is one, with its value."""
        return {} if self.size is None else {self.size: samples}


class _Estimators(Mapping[str, Estimator]):
    """The records by name and alias; entry points are read before the first look."""

    def __init__(self) -> None:
        self._records: dict[str, Estimator] = {}
        self._lock = threading.RLock()
        self._complete = False

    @property
    def known(self) -> list[Estimator]:
        """The records so far, without those of entry points that were not read."""
        return list(self._records.values())

    def __getitem__(self, name: str) -> Estimator:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def __repr__(self) -> str:
        return f"ESTIMATORS({', '.join(self)})"

    def _all(self) -> dict[str, Estimator]:
        with self._lock:
            if not self._complete:
                self._complete = True  # an entry point may look here too
                for point in entry_points(group=GROUP):
                    self._read(point)
            return self._records

    def _read(self, point: EntryPoint) -> None:
        """Add the records of an entry point; one that cannot be read is said, and left out."""
        try:
            found = point.load()
            records = [found] if isinstance(found, Estimator) else found
            if not isinstance(records, Iterable):
                raise TypeError(f"it must be an Estimator or several, got {type(found).__name__}.")
            for record in records:
                if record not in self._records.values():  # its module may have registered it
                    self.add(record)
        except Exception as error:  # it may be anything that another package does
            package = "of an unknown package" if point.dist is None else f"of {point.dist.name}"
            warnings.warn_explicit(  # at the module that failed: who asks for a name is no use
                f"the entry point {point.name} = {point.value} {package} adds no estimator: "
                f"{type(error).__name__}: {said(error)}",
                RuntimeWarning,
                point.module,
                lineno=1,
            )

    def add(self, record: Estimator) -> Estimator:
        record = _checked(record)
        names = (record.name, *record.aliases)
        with self._lock:
            for name in names:
                if name in self._records:
                    raise ValueError(
                        f"`name` and `aliases` must be new, got {name!r}, which is taken."
                    )
            self._records |= dict.fromkeys(names, record)
        return record


def load(place: Any) -> Any:
    """Import what a record names as "package.module:name"; anything else is the thing itself."""
    return pkgutil.resolve_name(place) if isinstance(place, str) else place


def find_record(fn: Any) -> Estimator | None:
    """Return the record of a function, with a pullback if one has it; read entry points last."""
    for records in (lambda: _REGISTRY.known, ESTIMATORS.values):
        found = [record for record in records() if record.function is fn]
        if found:
            return max(found, key=lambda record: record.vjp is not None)
    return None


_PLACES = ("vjp", "vectors")  # what may be named as "package.module:name"
_OPTIONAL = ("certified", "evaluate", *_PLACES)
_JOINTS = str.maketrans("", "", "-_+#")
_COMMAND_WORDS = ("all", "none")  # which no estimator may be called: options take them
# Options that are keywords of functions; the others say what an implementation can do.
_KEYWORDS = {
    *("scale", "mask", "causal", "window", "softcap", "bias", "sinks", "dropout"),
    *("omega", "indices", "log_probability"),
}
_ABILITIES = {
    *("lse", "vjp", "gqa", "gva", "offsets", "moments", "feature_map", "initial_state"),
    *("omega_per_head", "batch_invariant", "deterministic"),
}
# By trait, the keyword by which a formula is told what an implementation declares.
DECLARED = {"random-features": "features", "proposals": "weighting", "projection": "kernel_epsilon"}
# Traits that make sense with another one only, and those of a size.
_WITH_RANDOM, _WITH_SIZE = {"seeds-differ", "data-free", "target"}, {"chunked", "unlimited-size"}


def _checked(record: Any) -> Estimator:
    """The record with tuples of words, if it is right."""
    if not isinstance(record, Estimator):
        raise TypeError(f"`record` must be an Estimator, got {type(record).__name__}.")
    if not isinstance(record.name, str):
        raise TypeError(f"`name` must be a string, got {type(record.name).__name__}.")
    options, traits, aliases, source = (
        tuple(checks.list_names(argument, getattr(record, argument)))
        for argument in ("options", "traits", "aliases", "source")
    )
    for argument, names in (("name", (record.name,)), ("aliases", aliases)):
        for name in names:
            if not name.translate(_JOINTS).isalnum():
                raise ValueError(
                    f"`{argument}` must consist of letters, digits, -, _, + and #, got {name!r}."
                )
            if name in _COMMAND_WORDS:
                raise ValueError(f"`{argument}` must not be {name!r}: it is a reserved word.")
    if len({record.name, *aliases}) <= len(aliases):
        raise ValueError(f"`aliases` must differ from `name` and each other, got {aliases}.")
    for argument in ("fn", "naive", *_OPTIONAL):
        given = getattr(record, argument)
        if isinstance(given, str) and argument in _PLACES:
            if not re.fullmatch(r"[\w.]+:[\w.]+", given):
                raise ValueError(f'`{argument}` must be like "package.module:name", got {given!r}.')
        elif not (callable(given) or (given is None and argument in _OPTIONAL)):
            raise TypeError(f"`{argument}` must be callable, got {type(given).__name__}.")
    if not isinstance(record.size, str | None):
        raise TypeError(f"`size` must be a keyword or None, got {type(record.size).__name__}.")
    for argument, names in (("size", (record.size or "S",)), ("options", options)):
        for name in names:
            if not name.isidentifier():
                raise ValueError(f"`{argument}` must consist of keywords, got {name!r}.")
    for name in options:  # what begins with d_ or ends with _only is about a keyword
        known = {*_KEYWORDS, *_ABILITIES, *record.gates}
        if name.removeprefix("d_").removesuffix("_only") not in known:
            hint = close(name, known)
            raise ValueError(f"`options` must hold options of refattn, got {name!r}.{hint}")
    for name in traits:
        checks.choice("traits", name, TRAITS)
    _check_traits(record.size, {*traits})
    keywords = [*sorted(_KEYWORDS & {*options}), *filter(None, [record.size])]
    _check_keywords("fn", record.fn, [*keywords, *["rng"] * ("random" in traits)])
    _check_keywords("naive", record.naive, sorted(_KEYWORDS & {*options}))
    for trait in traits & DECLARED.keys():
        _check_keywords("naive", record.naive, [DECLARED[trait]], f"by the trait {trait!r}")
    if "vjp" in options and record.differentiable is None:
        raise ValueError(
            f"`options` must leave out 'vjp' for {record.name}, which is no attention function."
        )
    missing = [x for x in ("init", "update", "read", "merge") if not hasattr(record.state, x)]
    if record.state is not None and missing:
        raise TypeError(f"`state` must have {', '.join(missing)}, got {record.state!r}.")
    return record._replace(options=options, traits=traits, aliases=aliases, source=source)


def _check_traits(size: str | None, traits: set[str]) -> None:
    """Check that traits have what they are about."""
    alone = sorted(traits & _WITH_RANDOM)
    if alone and "random" not in traits:
        raise ValueError(f"`traits` must have 'random' with {alone[0]!r}.")
    sized = sorted(traits & _WITH_SIZE)
    if sized and size is None:
        raise ValueError(f"`size` must be given with the trait {sized[0]!r}, got None.")


def _check_keywords(
    argument: str,
    function: Any,
    names: Iterable[str],
    why: str = "by `size`, `options` or `traits` of the record",
) -> None:
    """Check that a function takes these keywords, where its signature is known."""
    try:
        taken = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of some that are not written in Python
        return
    known = {x.name for x in taken if x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY)}
    for name in names:
        if name not in known and not any(x.kind is x.VAR_KEYWORD for x in taken):
            raise ValueError(
                f"`{argument}` must take `{name}`, {why}, got a function of "
                f"{', '.join(x.name for x in taken)}."
            )


_REGISTRY = _Estimators()
ESTIMATORS: Mapping[str, Estimator] = _REGISTRY


def register(record: Estimator) -> Estimator:
    """Add an estimator to `ESTIMATORS`, for `compare`, `check` and the commands.

    Parameters
    ----------
    record : Estimator
        The record of the estimator.

    Returns
    -------
    Estimator
        The record that was stored: options, traits and aliases are tuples.

    Raises
    ------
    TypeError
        If `record` is not an Estimator, or a field does not have the type that `Estimator` states.
    ValueError
        If a name exists already or has characters other than letters, digits, -, _, + and #; if a
        trait is unknown or needs another trait; if a function does not take the size, an option or,
        if it is random, `rng`; or if ``"vjp"`` is among the options of what is no attention
        function.

    Examples
    --------
    >>> from refattn.registry import Estimator, register
    >>> def uniform(q, k, v):
    ...     return 0 * q[..., :1] + v.mean(axis=-2, keepdims=True)
    >>> record = Estimator("uniform", uniform, uniform, traits=("normalised", "nonnegative"))
    >>> register(record)  # doctest: +SKIP
    >>> register(record._replace(name="ra"))
    Traceback (most recent call last):
        ...
    ValueError: `name` and `aliases` must be new, got 'ra', which is taken.
    """
    return _REGISTRY.add(record)
