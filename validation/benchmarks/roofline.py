"""How close refattn comes to its matrix products and exponentials alone.

Two rooflines compute, for as many scores, ``q @ k.T``, an exponential in place and ``@ v``, and
nothing else but, in the cache, the sums of rows as a product with ones: no maximum, no division.

- ``whole arrays``: one operation after another over all scores of all heads, as one would write
  them down, into memory that is already there; each operation uses all threads. The target is set
  against this one.
- ``in cache``: each thread takes blocks of its own, with BLAS on one thread, and all blocks of a
  thread share the same small arrays, so that nothing is read from memory either. Whoever evaluates
  the scores with these operations cannot be faster. Each piece is timed alone, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

import refattn

from .cases import Case, Form, Record, measure
from .estimators import DTYPES, EXACT, RFA
from .settings import Settings

WHOLE_ARRAYS, IN_CACHE = "roofline, whole arrays", "roofline, in cache"
SCORES, EXPONENTIALS, VALUES, MASS = "q @ k.T", "exp", "@ v", "@ ones"
PIECES = SCORES, EXPONENTIALS, VALUES, MASS
_ROWS = _COLUMNS = 512


def run(settings: Settings) -> Iterator[Record]:
    """Time refattn and its roofline in the same rounds."""
    for dtype in DTYPES:
        for make in (_positive, _exact):
            case = make(settings, dtype, np.random.default_rng(settings.seed))
            yield measure(case, settings.repeats, pause=settings.pause)


def in_cache(
    count: int,
    shape: tuple[int, int, int],
    dtype: str,
    threads: int,
    pieces: tuple[str, ...] = PIECES,
) -> Callable[[], None]:
    """Make a call that computes pieces of `count` blocks of scores, of shape (rows, columns, d)."""
    rows, columns, d = shape
    q, k, v = _small(dtype, rows, columns, d)
    blas = ThreadpoolController().select(user_api="blas")

    def work(blocks: Iterator[int]) -> None:
        scores, out, mass = (np.empty((rows, n), dtype) for n in (columns, d, 1))
        weights, ones = np.ones_like(scores), np.ones((columns, 1), dtype)
        steps: dict[str, Callable[[], Any]] = {
            SCORES: lambda: np.matmul(q, k.T, out=scores),
            EXPONENTIALS: lambda: np.exp(scores, out=weights),
            VALUES: lambda: np.matmul(weights, v, out=out),
            MASS: lambda: np.matmul(weights, ones, out=mass),
        }
        steps[SCORES]()
        if len(pieces) == len(PIECES):
            weights = scores
        chosen = [steps[piece] for piece in pieces]
        for _ in blocks:  # the threads share one iterator: whoever is free takes the next block
            for step in chosen:
                step()

    def call() -> None:
        blocks = iter(range(count))
        with blas.limit(limits=1), ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, [blocks] * threads))

    return call


def whole_arrays(
    heads: int, rows: int, columns: int, d: int, dtype: str, threads: int, passes: int = 1
) -> Callable[[], None]:
    """Make a call that computes the scores (heads, rows, columns), `passes` times."""
    q, k, v = _small(dtype, rows, columns, d)
    q = np.tile(q, (heads, 1))
    scores, out = np.ones((heads * rows, columns), dtype), np.ones((heads * rows, d), dtype)
    parts = [np.array_split(x, threads) for x in (q, scores, out)]
    blas = ThreadpoolController().select(user_api="blas")
    steps = (
        lambda q, scores, out: np.matmul(q, k.T, out=scores),
        lambda q, scores, out: np.exp(scores, out=scores),
        lambda q, scores, out: np.matmul(scores, v, out=out),
    )

    def call() -> None:
        with blas.limit(limits=1), ThreadPoolExecutor(threads) as pool:
            for step in passes * steps:
                list(pool.map(step, *parts))

    return call


def _small(dtype: str, *lengths_and_d: int) -> list[np.ndarray]:
    """Draw queries, keys and values whose scores are of the order of 1: no exponential is slow."""
    rng, (rows, columns, d) = np.random.default_rng(0), lengths_and_d
    arrays = (rng.standard_normal((n, d)) * d**-0.25 for n in (rows, columns, columns))
    return [x.astype(dtype) for x in arrays]


def _positive(settings: Settings, dtype: str, rng: np.random.Generator) -> Case:
    sizes, (heads, tokens) = settings.sizes, settings.sizes.linear
    q, k, v, omega = _arrays(rng, dtype, *3 * [(heads, tokens, sizes.d)], (sizes.features, sizes.d))
    # Samples attend to keys, then queries to samples.
    shape, passes = (heads, tokens, sizes.features, sizes.d), 2
    size = {"heads": heads, "tokens": tokens, "d": sizes.d, "S": sizes.features}
    ours = partial(refattn.random_feature_attention, q, k, v, omega=omega)
    return _case(RFA, size, ours, shape, passes, dtype, settings.threads)


def _exact(settings: Settings, dtype: str, rng: np.random.Generator) -> Case:
    sizes, (heads, tokens) = settings.sizes, settings.sizes.quadratic
    q, k, v = _arrays(rng, dtype, *3 * [(heads, tokens, sizes.d)])
    shape, passes = (heads, tokens, tokens, sizes.d), 1
    size = {"heads": heads, "tokens": tokens, "d": sizes.d}
    ours = partial(refattn.softmax_attention, q, k, v)
    return _case(EXACT, size, ours, shape, passes, dtype, settings.threads)


def _arrays(rng: np.random.Generator, dtype: str, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    return [rng.standard_normal(shape).astype(dtype, copy=False) for shape in shapes]


def _case(
    name: str,
    size: dict[str, int],
    ours: Callable[[], Any],
    shape: tuple[int, int, int, int],
    passes: int,
    dtype: str,
    threads: int,
) -> Case:
    heads, rows, columns, d = shape
    block = min(columns, _COLUMNS)
    count = passes * heads * -(-rows // _ROWS) * -(-columns // block)
    forms = (
        Form("refattn", lambda: ours, ours=True),
        Form(WHOLE_ARRAYS, partial(whole_arrays, *shape, dtype, threads, passes)),
        Form(IN_CACHE, partial(in_cache, count, (_ROWS, block, d), dtype, threads)),
        *(
            Form(
                f"{IN_CACHE}, {x}",
                partial(in_cache, count, (_ROWS, block, d), dtype, threads, (x,)),
            )
            for x in PIECES
        ),
    )
    return Case(name, dtype, size, forms)
