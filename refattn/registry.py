"""One record for each estimator: what it computes, how it is called, what is claimed of it.

`refattn.compare` and `refattn.conformance` find estimators here and ask for their options and
traits, never for their names. Another package adds its own with `register`, or names records in
the entry-point group ``refattn.estimators`` of its metadata, which is read when a name is first
looked up:

.. code-block:: toml

    [project.entry-points."refattn.estimators"]
    nystrom = "mypackage.records:NYSTROM"
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any, NamedTuple

from . import attention, certified, kernels, moments, naive, sampling, streaming
from .arrays import checks
from .arrays.library import Array
from .arrays.words import said
from .estimators import few_keys, key_sampling, lara, linear, near_and_far, ra, rfa
from .gradients import rules
from .typing import KEY_LAWS, Features, KeyLaw

__all__ = ["DEFAULT", "ESTIMATORS", "GROUP", "TRAITS", "Estimator", "register"]


def __dir__() -> list[str]:
    return __all__


GROUP = "refattn.estimators"

TRAITS: Mapping[str, str] = MappingProxyType(
    {
        "pairs": "takes vectors x and y, and estimates e^(x.y) for each pair",
        "rows": "takes rows x, and gives their mean and covariance",
        "exact": "is softmax attention itself",
        "feature-map": "its kernel is a dot product of features; a tag names the feature map",
        "mean": "a mean of the values: weights sum to 1, and are the same for every column",
        "positive": "no weight is negative",
        "unordered": "the order of the keys does not matter, at given frequencies",
        "separate": "the result of a query does not depend on the other queries",
        "local": "treats keys near a query differently from distant ones: tokens must keep places",
        "chunked": "its size is the length of a chunk of distant keys: exact at 1",
        "exponential": "weighs keys by the exponential of an inner product, which may be large",
        "quadratic": "takes time that grows with the product of the numbers of queries and keys",
        "any-size": "its size may exceed the number of tokens",
        "random": "draws random numbers from the generator given as `rng`",
        "continuous": "no two seeds give the same result",
        "common": "what a seed draws does not depend on the numbers in the arrays",
        "average": "averages over frequencies: in any order, or each twice, they give the same",
        "per-query": "each query has its own frequencies (..., n, S, d), or keys (..., n, S)",
        "random-features": "all queries share frequencies that are N(0, I), or coupled as tagged",
        "waves": "its features are sines and cosines: weights may be negative, and sums cancel",
        "target": "draws the frequencies of each query from its target distribution (RA)",
        "solved": "solves a linear system for its weights: errors grow with its condition",
        "proposals": "draws frequencies from Gaussian proposals around centres (LARA)",
    }
)


class Estimator(NamedTuple):
    """What the rest of the package knows of an estimator.

    Attributes
    ----------
    name : str
        What the command line and `ESTIMATORS` call it: letters, digits, - and _.
    fn : callable
        The estimator, ``fn(q, k, v, **options)`` on arrays (..., n, d), (..., m, d), (..., m, d_v);
        with the trait "pairs" ``fn(x, y, ...)``, with "rows" ``fn(x)``. With the trait "random" it
        takes `rng`, whatever `numpy.random.default_rng` takes.
    naive : callable
        The formula as it is written, for arrays of any floating-point dtype of NumPy, longdouble
        too: what implementations are compared with. It takes the `options`, `omega` among them
        where that is one, and, if the estimator is not random or is of chunks, the size.
    size : str or None
        The keyword that sets the number S of features, samples, landmarks, ...: a positive integer.
        Any S up to the numbers of queries and of keys must be taken.
    options : iterable of str
        Other keywords that `fn` and `naive` take: ``"scale"`` (a factor on q . k, by default
        1/sqrt(d)), ``"mask"``, ``"causal"``, ``"omega"`` (frequencies), ``"indices"`` (of keys, in
        place of those drawn) with ``"log_probability"`` for a sample of them, and more that an
        implementation may be able to do, see `conformance.CAPABILITIES`. With ``"vjp"``, gradients
        are compared with those of `refattn.vjp`: it must take `fn`, or `naive` must be a formula of
        `refattn.naive`, for which it takes the function of the same name.
    traits : iterable of str
        What is claimed of it, in words of `TRAITS`. Each adds checks; none but "local" takes any
        away, and that only where a tag would have tokens asked at other places.
    state : class or None
        Its decoding state, as in `refattn.streaming`: with `init`, `update`, `read` and `merge`.
    aliases : iterable of str
        Other names.
    certified : callable or None
        It in pairs, with a proven error, as in `refattn.certified`: what candidates in float64 are
        compared with at sizes that the formula is too slow for.

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

    def has(self, *traits: str) -> bool:
        """Whether it has all these traits."""
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
        """Whether it stands for softmax attention, so that its error is of interest."""
        return self.arrays == ("q", "k", "v") and not {"exact", "feature-map"} & set(self.traits)

    @property
    def differentiable(self) -> Callable[..., Any] | None:
        """What `vjp` takes for it; None if there is no pullback to compare with."""
        return rules.pulled_back(self.fn, self.naive)

    def sized(self, samples: int) -> dict[str, Any]:
        """The keyword that sets S, if there is one, with its value."""
        return {} if self.size is None else {self.size: samples}


class _Estimators(Mapping[str, Estimator]):
    """The records by name and alias; entry points are read before the first look."""

    def __init__(self) -> None:
        self._records: dict[str, Estimator] = {}
        self._lock = threading.RLock()
        self._complete = False

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
            for record in [found] if isinstance(found, Estimator) else found:
                if record not in self._records.values():  # its module may have registered it
                    self.add(record)
        except Exception as error:  # it may be anything that another package does
            package = "of an unknown package" if point.dist is None else f"of {point.dist.name}"
            warnings.warn(
                f"the entry point {point.name} = {point.value} {package} adds no estimator: "
                f"{type(error).__name__}: {said(error)}",
                RuntimeWarning,
                stacklevel=4,
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


_JOINTS = str.maketrans("", "", "-_")


def _checked(record: Any) -> Estimator:
    """The record with tuples of words, if it is right."""
    if not isinstance(record, Estimator):
        raise TypeError(f"`record` must be an Estimator, got {type(record).__name__}.")
    if not isinstance(record.name, str):
        raise TypeError(f"`name` must be a string, got {type(record.name).__name__}.")
    options, traits, aliases = (
        tuple(checks.list_names(argument, given))
        for argument, given in (
            ("options", record.options),
            ("traits", record.traits),
            ("aliases", record.aliases),
        )
    )
    for argument, names in (("name", (record.name,)), ("aliases", aliases)):
        for name in names:
            if not name.translate(_JOINTS).isalnum():
                raise ValueError(f"`{argument}` must be of letters, digits, - and _, got {name!r}.")
    if len({record.name, *aliases}) <= len(aliases):
        raise ValueError(f"`aliases` must differ from `name` and each other, got {aliases}.")
    for argument in ("fn", "naive"):
        if not callable(getattr(record, argument)):
            kind = type(getattr(record, argument)).__name__
            raise TypeError(f"`{argument}` must be callable, got {kind}.")
    if not isinstance(record.size, str | None):
        raise TypeError(f"`size` must be a keyword or None, got {type(record.size).__name__}.")
    for argument, names in (("size", (record.size or "S",)), ("options", options)):
        for name in names:
            if not name.isidentifier():
                raise ValueError(f"`{argument}` must be of keywords, got {name!r}.")
    for name in traits:
        checks.choice("traits", name, TRAITS)
    if "vjp" in options and record.differentiable is None:
        raise ValueError(
            f"`options` must leave out 'vjp' for {record.name}: there is no pullback to compare "
            "with, as `vjp` takes neither `fn` nor a function with the formula `naive`."
        )
    missing = [x for x in ("init", "update", "read", "merge") if not hasattr(record.state, x)]
    if record.state is not None and missing:
        raise TypeError(f"`state` must have {', '.join(missing)}, got {record.state!r}.")
    return record._replace(options=options, traits=traits, aliases=aliases)


_REGISTRY = _Estimators()
ESTIMATORS: Mapping[str, Estimator] = _REGISTRY


def register(record: Estimator) -> Estimator:
    """Add an estimator, for `compare`, `check` and all else that looks in `ESTIMATORS`.

    Parameters
    ----------
    record : Estimator
        What is known of it.

    Returns
    -------
    Estimator
        The record as it is kept: options, traits and aliases are tuples.

    Raises
    ------
    TypeError
        If `record` is not an Estimator, or a part of it has another type than there.
    ValueError
        If a name is taken or has other signs than letters, digits, - and _, or a trait is not of
        `TRAITS`, or ``"vjp"`` is among the options and there is no pullback to compare with.

    Examples
    --------
    >>> from refattn.registry import Estimator, register
    >>> def uniform(q, k, v):
    ...     return 0 * q[..., :1] + v.mean(axis=-2, keepdims=True)
    >>> record = Estimator("uniform", uniform, uniform, traits=("mean", "positive"))
    >>> register(record)  # doctest: +SKIP
    >>> register(record._replace(name="ra"))
    Traceback (most recent call last):
        ...
    ValueError: `name` and `aliases` must be new, got 'ra', which is taken.
    """
    return _REGISTRY.add(record)


# The package's own.

# What a comparison shows unless told otherwise: one of each kind, and the best of its kind.
DEFAULT = ("rfa-iid", "rfa-orthogonal", "rfa-adapted", "lara-own", "lara-balance", "ra", "eva")

_NEAR = (8, 8)  # tokens on each side, half of the smallest block that pays
_SEES = ("scale", "mask", "causal", "gqa", "vjp")
_SAMPLE = ("scale", "gqa", "indices", "log_probability")
_DRAWS = ("random", "continuous", "common")
_ROWS = ("unordered", "separate")  # what a query sees is a set, and other queries are not in it
_MEAN = ("mean", "positive", "exponential")
_EVA = (*_MEAN, "local", "chunked")
_SHARED = (*_ROWS, *_DRAWS, "any-size", "average")  # of random features


def _kernel(
    x: Array,
    y: Array,
    *,
    omega: Array | None = None,
    num_features: int = 1,
    rng: Any = None,
    features: Features = "positive",
) -> Any:
    """Estimate the softmax kernel at frequencies given or drawn."""
    if omega is None:
        omega = sampling.draw(num_features, x.shape[-1], rng=rng).omega
    return kernels.estimate(x, y, omega, features=features)


def _importance_sampled(
    q: Array, k: Array, v: Array, *, num_samples: int, rng: Any = None, **options: Any
) -> Array:
    """Importance sampling at frequencies drawn from N(0, I)."""
    omega, log_weight = sampling.draw(num_samples, q.shape[-1], rng=rng)
    return rfa.importance_sampled_attention(q, k, v, omega=omega, log_weight=log_weight, **options)


def _adapted(fn: Callable[..., Array], fit: str) -> Callable[..., Array]:
    """The estimator with its proposal fitted first, by a function of `adapt`."""

    def run(
        q: Array,
        k: Array,
        v: Array,
        *,
        rng: Any = None,
        scale: float | None = None,
        **options: Any,
    ) -> Array:
        from . import adapt  # it imports SciPy

        if options.get("causal") or options.get("mask") is not None:
            raise ValueError(
                "`mask` and `causal` must not be given: the moments are of all queries and keys."
            )
        proposal = getattr(adapt, fit)(q, k, scale=scale)
        return fn(q, k, v, proposal=proposal, rng=rng, scale=scale, **options)

    return run


def _sampled(law: KeyLaw) -> Callable[..., Array]:
    """Attention to a sample of keys, given or drawn first."""

    def run(
        q: Array,
        k: Array,
        v: Array,
        *,
        num_keys: int = 1,
        indices: Any = None,
        log_probability: Any = None,
        rng: Any = None,
        **options: Any,
    ) -> Array:
        if indices is None:
            indices, log_probability = key_sampling.draw_keys(
                q, k, v, num_keys=num_keys, law=law, rng=rng, **options
            )
        return few_keys.sampled_key_attention(
            q, k, v, indices=indices, log_probability=log_probability, **options
        )

    return run


_RFA = Estimator(
    "rfa-iid",
    rfa.random_feature_attention,
    naive.random_feature_attention,
    size="num_features",
    options=(*_SEES, "omega", "omega_per_head", "moments"),
    traits=(*_MEAN, *_SHARED, "random-features"),
    state=streaming.PositiveState,
    aliases=("rfa", "performer", "favor"),
)
_LARA = Estimator(
    "lara-balance",
    lara.linear_randomized_attention,
    naive.linear_randomized_attention,
    size="num_proposals",
    options=(*_SEES, "omega"),
    traits=(*_MEAN, *_ROWS, *_DRAWS, "proposals"),
    aliases=("lara",),
)


def _coupled(coupling: str) -> Estimator:
    """RFA with frequencies that are not independent."""
    return _RFA._replace(
        name=f"rfa-{coupling}",
        fn=partial(_RFA.fn, coupling=coupling),
        options=(*_SEES, "omega", "omega_per_head"),
        traits=(*_MEAN, *_SHARED),
        aliases=(),
    )


def _featured(name: str) -> Estimator:
    """RFA with features that are not positive, or not those of the theory."""
    return _RFA._replace(
        name=f"rfa-{name}",
        fn=partial(_RFA.fn, features=name),
        naive=partial(_RFA.naive, features=name),
        options=(*_SEES, "omega", "omega_per_head"),
        traits=("mean", *_SHARED, "waves") if name == "trigonometric" else (*_MEAN, *_SHARED),
        state=None,
        aliases=(),
    )


def _weighted(weighting: str) -> Estimator:
    """LARA with other weights."""
    return _LARA._replace(
        name=f"lara-{weighting}",
        fn=partial(_LARA.fn, weighting=weighting),
        naive=partial(_LARA.naive, weighting=weighting),
        options=_SEES if weighting == "own" else ("scale", "mask", "gqa", "vjp"),
        traits=(*_MEAN, *_DRAWS),
        aliases=(),
    )


def _fitted(name: str, record: Estimator, fit: str = "fit") -> Estimator:
    """An estimator whose proposal is fitted to the queries and keys."""
    return record._replace(
        name=name,
        fn=_adapted(record.fn, fit),
        options=("scale",),
        traits=(*_MEAN, *_DRAWS, *({"any-size"} & set(record.traits))),
        state=None,
        aliases=(),
    )


for _record in (
    Estimator(
        "softmax",
        attention.softmax_attention,
        naive.softmax_attention,
        options=(
            *_SEES,
            "lse",
            "d_lse",
            "window",
            "softcap",
            "sinks",
            "d_sinks",
            "bias",
            "d_bias",
            "dropout",
        ),
        traits=(*_MEAN, *_ROWS, "exact", "quadratic"),
        state=streaming.SoftmaxState,
        certified=certified.softmax_attention,
    ),
    Estimator(
        "kernel",
        _kernel,
        _kernel,
        size="num_features",
        options=("omega", "feature_map"),
        traits=("pairs", "exponential", *_DRAWS, "any-size", "average", "random-features"),
    ),
    *(_RFA if name == "iid" else _coupled(name) for name in sampling.COUPLINGS),
    *(_featured(name) for name in kernels.FEATURES if name != "positive"),
    _fitted("rfa-adapted", _RFA),
    _fitted("rfa-saderf", _RFA, "saderf"),
    Estimator(
        "is",
        _importance_sampled,
        naive.importance_sampled_attention,
        size="num_samples",
        options=(*_SEES, "omega"),
        traits=(*_SHARED, "quadratic"),
    ),
    Estimator(
        "mean-of-ratios",
        ra.mean_of_ratios_attention,
        naive.mean_of_ratios_attention,
        size="num_samples",
        options=(*_SEES, "omega"),
        traits=(*_MEAN, *_SHARED),
    ),
    Estimator(
        "ra",
        ra.randomized_attention,
        naive.randomized_attention,
        size="num_samples",
        options=(*_SEES, "omega"),
        traits=(
            *(*_MEAN, *_ROWS, "quadratic", "random", "continuous"),
            *("any-size", "average", "per-query", "target"),
        ),
    ),
    *(_LARA if name == "balance" else _weighted(name) for name in lara.WEIGHTINGS),
    _fitted("lara-adapted", _LARA),
    *(
        Estimator(
            "coreset" if pivots == "gaussian" else f"coreset-{pivots}",
            partial(few_keys.coreset_attention, pivots=pivots),
            naive.coreset_attention,
            size="num_keys",
            options=("scale", "gqa", "indices"),
            traits=("mean", "separate", "random", "solved"),
        )
        for pivots in reversed(key_sampling.PIVOTS)
    ),
    *(
        Estimator(
            f"sampled-{law}",
            _sampled(law),
            naive.sampled_key_attention,
            size="num_keys",
            # Norms of values make samples jump where values move.
            options=_SAMPLE if law == "norms" else (*_SAMPLE, "vjp"),
            traits=(
                *(*_MEAN, "separate", "random"),
                *(("quadratic", "per-query") if law == "softmax" else ()),
            ),
            aliases=("sampled-keys",) if law == "uniform" else (),
        )
        for law in reversed(KEY_LAWS)
    ),
    *(
        Estimator(
            "eva" if log_size else "eva-published",
            partial(near_and_far.eva_attention, sampled=False, log_size=log_size),
            partial(naive.eva_attention, log_size=log_size),
            size="window",
            options=("scale", "causal", "gqa", "vjp"),
            traits=_EVA,
            state=streaming.EvaState,
        )
        for log_size in (True, False)
    ),
    Estimator(
        "eva-sampled",
        near_and_far.eva_attention,
        naive.eva_attention,
        size="window",
        options=("scale", "causal", "gqa", "vjp", "omega", "omega_per_head"),
        traits=(*_EVA, "random"),
        state=streaming.EvaState,
    ),
    Estimator(
        "second-order",
        near_and_far.second_order_attention,
        naive.second_order_attention,
        size="window",
        options=("scale", "causal", "gqa", "vjp"),
        traits=("mean", "exponential", "local", "chunked"),
        state=streaming.SecondOrderState,
    ),
    Estimator(
        "rfa-local",
        partial(near_and_far.local_random_feature_attention, window=_NEAR),
        partial(naive.local_random_feature_attention, window=_NEAR),
        size="num_features",
        options=(*_SEES, "omega", "omega_per_head"),
        traits=(*_MEAN, "local", "random", "common", "any-size"),
        state=streaming.LocalState,
    ),
    Estimator(
        "linear",
        linear.linear_attention,
        naive.linear_attention,
        options=("mask", "causal", "gqa", "vjp"),
        traits=("mean", "positive", *_ROWS, "feature-map"),
        state=streaming.LinearState,
    ),
    Estimator("moments", moments.estimate, moments.estimate, traits=("rows",)),
):
    register(_record)
