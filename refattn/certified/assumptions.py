"""Test what the error proof assumes of an array library and a device.

A compiler that takes (a + b) - a for b, or an accelerator that rounds products more coarsely, would
undo the proof.
"""

from __future__ import annotations

import decimal
from collections.abc import Callable, Iterator
from fractions import Fraction
from operator import mul
from typing import Any

import numpy as np

from ..arrays.library import (
    Array,
    array_namespace,
    device,
    has_float64,
    is_numpy_array,
    is_torch_array,
    to_host,
)
from ..arrays.words import with_known_keywords
from ..numbers.doubled import EXP_ROUNDING, ROUNDING, Pair, as_pair, exp_pair, two_product, two_sum
from ..numbers.slices import (
    Slices,
    bits_of_slices,
    facing,
    side_by_side,
    sliced_error,
    sliced_products,
)

_Run = Callable[..., list[Any]]  # calls a function of arrays on the device: results on the host

_FAILURES: dict[tuple[str, str], list[str]] = {}  # by library and device, once each was tested


def require(like: Array, xp: Any) -> None:
    """Raise RuntimeError where the proof does not hold."""
    where = xp.__name__, str(device(like))
    if not has_float64(like, xp):
        raise RuntimeError(
            f"certified attention needs float64, which {where[0]} on {where[1]} lacks."
        )
    if is_numpy_array(like) or is_torch_array(like):  # a thread may flush them at any time
        least = xp.full((1,), 2.0**-1022, dtype=xp.float64, device=device(like)) * 0.5
        if not bool(least[0] > 0):
            raise RuntimeError(
                "certified attention needs subnormal numbers, which are flushed to 0: after "
                "torch.set_flush_denormal(True), say."
            )
    if where not in _FAILURES:
        try:
            _FAILURES[where] = self_test(like)
        except Exception as error:
            raise RuntimeError(
                f"certified attention must read arrays of float64, which {where[0]} on {where[1]} "
                f"did not allow: {error}"
            ) from error
    if _FAILURES[where]:
        raise RuntimeError(
            f"certified attention needs sums and products in the written order, but "
            f"{where[0]} on {where[1]} changes them: {'; '.join(_FAILURES[where])}."
        )


@with_known_keywords
def self_test(like: Array | None = None, *, compiled: Any = None) -> list[str]:
    r"""Test whether the array library and the device meet the assumptions of the proof.

    Sums and products in pairs, slices, products of matrices of slices, and e^x are computed on the
    device and compared with integers and with numbers of 60 digits, bit for bit where there is no
    error.

    Parameters
    ----------
    like : array, optional
        An array of the library, on the device: NumPy by default.
    compiled : function, optional
        Compiles a function, as `jax.jit` and `torch.compile` do; the compiled functions are tested.

    Returns
    -------
    list of str
        What failed; empty if nothing did.

    Examples
    --------
    >>> from refattn import certified
    >>> certified.self_test()
    []
    """
    like = np.empty(0) if like is None else like
    compiled = (lambda function: function) if compiled is None else compiled
    rng, xp = np.random.default_rng(0), array_namespace(like)

    def run(function: Any, *arrays: Any) -> list[Any]:
        there = [xp.asarray(x, dtype=xp.float64, device=device(like)) for x in arrays]
        return [to_host(x) for x in compiled(function)(*there)]

    tests = (_test_operations(run, rng), _test_slices(run, rng, xp), _test_exp(run, rng, xp))
    return [failure for test in tests for failure in test]


def _test_operations(run: _Run, rng: np.random.Generator) -> Iterator[str]:
    """Compare sums and products of two numbers with fractions."""
    a, b = (rng.standard_normal(999) * 2.0 ** rng.integers(-40, 40, 999) for _ in range(2))
    exact = [(Fraction(x), Fraction(y)) for x, y in zip(a, b, strict=True)]
    for name, function, wanted in (
        ("sums in pairs", two_sum, [x + y for x, y in exact]),
        ("products in pairs", two_product, [x * y for x, y in exact]),
    ):
        hi, lo = run(function, a, b)
        if [Fraction(x) + Fraction(y) for x, y in zip(hi, lo, strict=True)] != wanted:
            yield f"{name} have errors"


def _test_slices(run: _Run, rng: np.random.Generator, xp: Any) -> Iterator[str]:
    """Count the bits of slices, and compare products of matrices with fractions."""
    d, size = 64, 33
    x, y = (rng.standard_normal((size, d)) for _ in range(2))
    bits, powers = bits_of_slices(d, 3), [np.full((size, 1), 2.0)] * 2

    def slice_and_multiply(x: Array, y: Array, x_power: Array, y_power: Array) -> list[Array]:
        a, b = (Slices.of(as_pair(z, xp), p, bits, 3, xp) for z, p in ((x, x_power), (y, y_power)))
        return [*sliced_products(side_by_side(a, xp), facing(b, xp), 3, xp), *a.parts]

    *matrices, first, second = run(slice_and_multiply, x, y, *powers)
    for t, part in enumerate((first, second), 1):
        units = part / (2.0 * 2.0 ** (1 - bits * t))
        if not ((units == np.round(units)).all() and (abs(units) <= 2.0**bits).all()):
            yield f"slice {t} has more than {bits} bits"
    inner = [[sum(map(mul, map(Fraction, u), map(Fraction, w))) for w in y] for u in x]
    most = Fraction(4 * sliced_error(d, bits, 3))
    if any(
        abs(sum(Fraction(m[i, j]) for m in matrices) - inner[i][j]) > most
        for i in range(size)
        for j in range(size)
    ):
        yield "errors of products of matrices exceed their bound"


def _test_exp(run: _Run, rng: np.random.Generator, xp: Any) -> Iterator[str]:
    """Compare e^x with 60 digits."""
    x = -np.concatenate([np.zeros(1), 2.0 ** rng.uniform(-30, 9, 200)])
    low = x * rng.uniform(-ROUNDING, ROUNDING, x.size)
    hi, lo = run(lambda x, y: exp_pair(Pair(x, y), xp), x, low)
    with decimal.localcontext(prec=60):
        decimals = zip(*(map(decimal.Decimal, y.tolist()) for y in (x, low, hi, lo)), strict=True)
        wrong = [abs((p + r) / (z + y).exp() - 1) for z, y, p, r in decimals]
    if not max(wrong) <= EXP_ROUNDING:
        yield f"e^x has a relative error of {float(max(wrong)):.1e}"
