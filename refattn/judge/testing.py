"""Compare a kernel with exact attention in a test: what `refattn.testing` offers and explains."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ..arrays import checks
from ..arrays.library import Floats
from ..arrays.words import check_keywords, with_known_keywords
from ..files.sample import load_sample
from ..typing import CASES, DTYPES, Case, Dtype
from .audits import Audit, audit
from .rounding.formats import FORMATS
from .rounding.profiles import PROFILES, Profile
from .verification.door import verify
from .verification.verdict import Verdict

__all__ = [
    "CASES",
    "PROFILES",
    "Audit",
    "Profile",
    "assert_attention_close",
    "audit",
    "cases",
    "draw_qkv",
]
__dir__ = __all__.copy


_Triple = tuple[Floats, Floats, Floats]

_STORED_AS = {"bfloat16": "float32"}  # NumPy has no such type


def assert_attention_close(
    actual: Any,
    q: Any,
    k: Any,
    v: Any,
    *,
    dtype: str | None = None,
    causal: bool = False,
    mask: Any = None,
    scale: float | None = None,
    layout: str = "bhnd",
    **options: Any,
) -> None:
    """Raise an AssertionError if no correct kernel can give this output.

    You choose no tolerance: the error that rounding allows is computed from the arrays.

    Parameters
    ----------
    actual : array, shape (..., n, d_v), or pair of arrays
        Output of the kernel, or a pair of output and log normalisers, shape (..., n).
    q, k, v : arrays, shapes (..., n, d), (..., m, d) and (..., m, d_v)
        Inputs of the kernel, of NumPy, torch, JAX or any array API library.
    dtype : str, optional
        Storage type of the kernel, that of `q` by default.
    layout : {"bhnd", "bnhd", "hnd"}
        Whether heads come before tokens, with "hnd" in blocks of a cache; in `mask`, `bias`,
        `sinks` and `omega` they always do.
    causal, mask, scale, **options
        As for `refattn.verify`: also `window`, `softcap`, `sinks`, `bias`, `profile`, `alpha`,
        `accumulate`, `estimator`, `omega`, and `d_out` with `dq`, `dk` and `dv`.

    Raises
    ------
    AssertionError
        If the verdict is FAIL, with its text: where the errors are largest, and known bugs that
        explain them.
    TypeError, ValueError
        If an argument is unusable.

    Warns
    -----
    UserWarning
        If the verdict is UNDERPOWERED, with its text: a wrong kernel would also have passed.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import softmax_attention, testing
    >>> q, k, v = testing.draw_qkv("shifted")
    >>> out = softmax_attention(q, k, v)
    >>> testing.assert_attention_close(out, q, k, v)
    >>> testing.assert_attention_close(out, q, k, v, causal=True)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    AssertionError: FAIL: no correct kernel in float32 gives such numbers ...
    """
    __tracebackhide__ = True  # pytest shows the line that calls
    if isinstance(actual, tuple | list) and len(actual) == 2:
        actual, options["lse"] = actual
    known = [x for x in inspect.signature(verify).parameters if x not in ("q", "k", "v", "out")]
    check_keywords("assert_attention_close", options, known)
    options |= {"dtype": dtype, "causal": causal, "mask": mask, "scale": scale, "layout": layout}
    _verify_actual(q=q, k=k, v=v, out=actual, **options).accept(stacklevel=3)


def _verify_actual(**arguments: Any) -> Verdict:
    """Verify the output, with errors in the words of the assertion."""
    try:
        return verify(**arguments)
    except (TypeError, ValueError) as error:
        if type(error) not in (TypeError, ValueError) or "`out`" not in str(error):
            raise
        raise type(error)(str(error).replace("`out`", "`actual`")) from None


@with_known_keywords
def draw_qkv(
    case: Case = "sample",
    *,
    shape: Sequence[int] | None = None,
    dtype: Dtype = "float32",
    rng: Any = 0,
) -> _Triple:
    """Make queries, keys and values of a case that is difficult for kernels.

    Parameters
    ----------
    case : {"sample", "normal", "large", "shifted", "negative", "equal", "outlier"}
        * ``"sample"``: arrays of a trained encoder, see `load_sample`; a part of them with `shape`;
        * ``"normal"``: standard normal;
        * ``"large"``: scores of a hundred and more, whose exponentials overflow;
        * ``"shifted"``: keys far from the origin, all in one direction: large scores that differ
          little;
        * ``"negative"``: scores so low that all exponentials underflow;
        * ``"equal"``: all keys are the same, and the output is the mean value;
        * ``"outlier"``: one key has all the weight of every query, and the largest value.
    shape : sequence of int, optional
        Shape of each array, (..., n, d); by default (2, 64, 32), or that of the whole sample.
    dtype : {"bfloat16", "float16", "float32", "float64"}
        Dtype that the numbers are rounded to; bfloat16 numbers are returned as float32.
    rng : None, int, numpy.random.Generator or anything numpy.random.default_rng takes
        Source of the random numbers.

    Returns
    -------
    q, k, v : NumPy arrays
        Arrays of finite numbers, whose exact attention is also finite.

    Raises
    ------
    TypeError, ValueError
        If an argument is unusable, or the sample has no part of that shape.

    Examples
    --------
    >>> from refattn import testing
    >>> q, k, v = testing.draw_qkv("equal", shape=(4, 100, 64), dtype="float16")
    >>> q.shape, str(q.dtype), bool((k == k[0, 0]).all())
    ((4, 100, 64), 'float16', True)
    """
    checks.choice("case", case, CASES)
    checks.choice("dtype", dtype, DTYPES)
    rng = checks.generator(rng)
    if shape is not None:
        if not isinstance(shape, Sequence) or len(shape) < 2:
            raise ValueError(f"`shape` must be that of queries, (..., n, d), got {shape!r}.")
        for size in shape:
            checks.positive_integer("shape", size)
    if case == "sample":
        arrays = tuple(_take_sample(x, shape) for x in load_sample())
    else:
        drawn = rng.standard_normal((3, *((2, 64, 32) if shape is None else map(int, shape))))
        arrays = _DRAWN[case](*drawn)
    q, k, v = (FORMATS[dtype].round(x).astype(_STORED_AS.get(dtype, dtype)) for x in arrays)
    return q, k, v


def _take_sample(x: Floats, shape: Sequence[int] | None) -> Floats:
    """Return a part of the sample: of its first heads, tokens and numbers."""
    if shape is None:
        return x
    *lead, n, d = shape
    heads, count = x.reshape(-1, *x.shape[-2:]), int(np.prod(lead))
    if count > heads.shape[0] or n > x.shape[-2] or d > x.shape[-1]:
        raise ValueError(
            f"`shape` must be no more than {len(heads)} heads, {x.shape[-2]} tokens and head size "
            f"{x.shape[-1]} of the sample, got {tuple(shape)}."
        )
    return heads[:count, :n, :d].reshape(tuple(shape))


def cases(seed: Any, count: int = 8) -> Iterator[_Triple]:
    """Draw inputs of many sizes and amplitudes, to which no kernel can be tuned.

    Use them for a test that a kernel must pass after its code is finished. Queries, keys and values
    have amplitudes from 1/8 to 8 on a log scale, and values a mean of up to twice their amplitude.
    There are 1 to 4 heads, 1 to 600 queries and keys on a log scale, and head sizes from 8 to 128.

    Parameters
    ----------
    seed : int or numpy.random.Generator
        Seed of the draws; a test should log it.
    count : int
        Number of cases.

    Yields
    ------
    q, k, v : arrays, shapes (h, n, d), (h, m, d) and (h, m, d)
        In float32, with n at most m.

    Raises
    ------
    TypeError, ValueError
        If an argument is unusable.

    Examples
    --------
    >>> from refattn import testing
    >>> [q.shape[0] == k.shape[0] for q, k, v in testing.cases(0, count=2)]
    [True, True]
    """
    checks.positive_integer("count", count)
    rng = checks.generator(seed, "seed")
    for _ in range(count):
        n, m = sorted(int(600 ** rng.random()) for _ in "nm")
        h, d = int(rng.integers(1, 5)), int(8 * 16 ** rng.random())
        of_q, of_k, of_v = 8.0 ** rng.uniform(-1, 1, 3)
        q, k, v = (rng.standard_normal((h, size, d)) for size in (n, m, m))
        scaled = (of_q, q), (of_k, k), (of_v, v + rng.uniform(-2, 2, d))
        q, k, v = ((a * x.astype(np.float32)).astype(np.float32) for a, x in scaled)
        yield q, k, v


def _put_outlier(q: Floats, k: Floats, v: Floats) -> _Triple:
    q, at = np.abs(q) + 4, k.shape[-2] // 2
    k[..., at, :], v[..., at, :] = 16, 1000
    return q, k, v


_DRAWN: dict[str, Callable[[Floats, Floats, Floats], _Triple]] = {  # of normal numbers
    "normal": lambda q, k, v: (q, k, v),
    "large": lambda q, k, v: (12 * q, 12 * k, v),
    "shifted": lambda q, k, v: (q / 4 + 6, k / 2 + 24, v),
    "negative": lambda q, k, v: (q / 4 + 12, k / 8 - 12, v),
    "equal": lambda q, k, v: (q, np.broadcast_to(k.reshape(-1, k.shape[-1])[0], k.shape), v),
    "outlier": _put_outlier,
}
