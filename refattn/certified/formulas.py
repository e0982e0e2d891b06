"""Run any formula over pairs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from ..arrays.library import (
    array_namespace,
    as_written,
    device,
    is_array_api_obj,
    is_numpy_array,
)
from ..numbers.doubled import Pair
from ..numbers.paired import Paired
from ..numbers.pairs import to_pairs
from .assumptions import require
from .blocks import bound_of, element, proven
from .inputs import check_double, first_part


@as_written
def evaluate(formula: Callable[..., Any], *arrays: Any, **options: Any) -> Any:
    """Evaluate a formula of `refattn.naive`, or any other of arrays, with a proven error bound.

    The formula runs on pairs of float64 with bounds, `refattn.numbers.pairs`, whose documentation
    says which functions it may use. Arguments count as exact numbers, and so do scales and other
    numbers. It takes the memory of the formula: use it for hundreds of tokens.

    Parameters
    ----------
    formula : function
        Such as `naive.randomized_attention`: the field `naive` of each estimator of
        `refattn.registry` is one.
    *arrays, **options
        What it takes. Arrays of floats, in tuples too, may be pairs.

    Returns
    -------
    Bound, or a tuple of them
        `value`, a pair of float64, and `error`, no less than the distance to the exact number.
        Where `error` is infinity, nothing is proven, and the value is that of the formula in
        float64.

    Raises
    ------
    TypeError
        If the formula uses a function without a proven bound; the message names it. Also for
        longdouble.
    RuntimeError
        As in `attend`.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import certified, naive
    >>> q, k, v = np.zeros((1, 2)), np.eye(2), np.array([[1.0], [3.0]])
    >>> found = certified.evaluate(naive.linear_attention, q, k, v)
    >>> found.value.hi, bool(found.error < 2.0**-60)
    (array([[2.]]), True)
    """
    first = next((x for x in arrays if is_array_api_obj(first_part(x))), None)
    if first is None:
        raise TypeError("`arrays` must hold an array of float32 or float64, got none.")
    like = first_part(first)
    library = array_namespace(like)
    require(like, library)
    check_double(like, "arrays")

    def run(change: Callable[[Any], Any]) -> Any:
        def changed(x: Any) -> Any:
            if isinstance(x, tuple) and not isinstance(x, Pair):
                return tuple(map(changed, x))
            if is_numpy_array(x):
                x = library.asarray(x, device=device(like))
            part = first_part(x)
            floating = is_array_api_obj(part) and library.isdtype(part.dtype, "real floating")
            return change(x) if floating else x

        return formula(*map(changed, arrays), **{name: changed(x) for name, x in options.items()})

    return _both(
        run(to_pairs),
        cache(lambda: run(lambda x: library.astype(first_part(x), library.float64))),
    )


def _both(found: Any, near: Callable[[], Any]) -> Any:
    if isinstance(found, tuple):
        both = (_both(x, partial(element, near, i)) for i, x in enumerate(found))
        return type(found)(*both) if hasattr(found, "_fields") else tuple(both)
    if not isinstance(found, Paired):
        return found
    return bound_of(proven((*found.pair, found.e), near, found.xp))
