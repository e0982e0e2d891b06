r"""Types for static type checkers: arrays, and the names that options take.

Functions check their arguments against the same names, so a name that a type checker accepts is
valid.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, get_args

__all__ = [
    "CASES",
    "DTYPES",
    "KEY_LAWS",
    "ArrayT",
    "Case",
    "Coupling",
    "Dtype",
    "Features",
    "KeyLaw",
    "KnownCoupling",
    "Pivots",
    "Recurrent",
    "SupportsArray",
    "Weighting",
]

if TYPE_CHECKING:  # which every type checker knows, though it may not be installed
    from typing_extensions import TypeVar

    ArrayT = TypeVar("ArrayT", bound="SupportsArray", default=Any)
else:
    from typing import TypeVar

    ArrayT = TypeVar("ArrayT", bound="SupportsArray")  # defaults begin with Python 3.13
__dir__ = __all__.copy


class SupportsArray(Protocol):
    """An array of any library: what a type checker can know of all of them.

    Attention functions return arrays of the type of their queries, for example `torch.Tensor`. They
    check libraries, dtypes and shapes when they are called.

    Attributes
    ----------
    shape : tuple of int
        Lengths of the axes.
    dtype : dtype
        Type of the elements, one of the library.
    """

    @property
    def shape(self) -> Any:
        """Lengths of the axes."""

    @property
    def dtype(self) -> Any:
        """Type of the elements."""

    def __getitem__(self, key: Any, /) -> Any:
        """Part of the array."""


Coupling = Literal[
    "antithetic", "halton", "iid", "orthogonal", "regularised", "simplex", "sobol", "sorf"
]  # fmt: skip
"""How frequencies depend on each other: `refattn.sampling.draw`."""


KnownCoupling = Literal["antithetic", "iid", "orthogonal", "regularised", "simplex"]
"""Couplings for which `theory` has formulas; it has none for quasi-random points."""


Features = Literal["hyperbolic", "positive", "trigonometric"]
"""Feature maps of the softmax kernel."""


Weighting = Literal["balance", "own", "query", "query-over-queries"]
"""Weights of the proposals of LARA."""


Pivots = Literal["exponential", "gaussian"]
"""Kernels whose pivots are the keys of a coreset."""


KeyLaw = Literal["norms", "softmax", "uniform"]
"""Distributions from which the keys of a sample are drawn."""

KEY_LAWS: tuple[KeyLaw, ...] = get_args(KeyLaw)


class Recurrent(NamedTuple):
    """The result of a recurrence.

    Attributes
    ----------
    out : array, shape (..., n, d_v)
        What each token reads.
    state : array, shape (..., d, d_v)
        The state after the last token, with the leading axes of keys, values, gates and initial
        state.
    """

    out: Any
    state: Any


Case = Literal["sample", "normal", "large", "shifted", "negative", "equal", "outlier"]

"""Queries, keys and values of `refattn.testing`."""

CASES: tuple[Case, ...] = get_args(Case)


Dtype = Literal["bfloat16", "float16", "float32", "float64"]

"""Storage types of kernels."""

DTYPES: tuple[Dtype, ...] = get_args(Dtype)
