"""How close refattn comes to its matrix products and exponentials alone.

The roofline runs, for every block of scores, ``q @ k.T``, an exponential in place and ``@ v`` on as
many threads as refattn uses, each taking blocks of its own with BLAS on one thread. All blocks of a
thread share the same small arrays, which stay in cache: nothing is read from memory, reduced,
rescaled or divided. Nothing that evaluates the scores can be faster without doing less.
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

__all__ = ["ROOFLINE", "roofline", "run"]

ROOFLINE = "roofline"
_ROWS = _COLUMNS = 512


def run(settings: Settings) -> Iterator[Record]:
    """Time refattn and its roofline in the same rounds."""
    for dtype in DTYPES:
        for make in (_positive, _exact):
            case = make(settings, dtype, np.random.default_rng(settings.seed))
            yield measure(case, settings.repeats, pause=settings.pause)


def roofline(
    count: int, rows: int, columns: int, d: int, dtype: str, threads: int
) -> Callable[[], None]:
    """Make a call that computes `count` blocks of scores (rows, columns)."""
    rng = np.random.default_rng(0)
    # Scores are of the order of 1, so that no exponential is slow or out of range.
    q, k, v = (rng.standard_normal((n, d)) * d**-0.25 for n in (rows, columns, columns))
    blas = ThreadpoolController().select(user_api="blas")

    def work(blocks: Iterator[int]) -> None:
        q_i, k_j, v_j = (x.astype(dtype) for x in (q, k, v))
        scores, out = np.empty((rows, columns), dtype), np.empty((rows, d), dtype)
        for _ in blocks:  # the threads share one iterator: whoever is free takes the next block
            np.matmul(q_i, k_j.T, out=scores)
            np.exp(scores, out=scores)
            np.matmul(scores, v_j, out=out)

    def call() -> None:
        blocks = iter(range(count))
        with blas.limit(limits=1), ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, [blocks] * threads))

    return call


def _positive(settings: Settings, dtype: str, rng: np.random.Generator) -> Case:
    sizes, (heads, tokens) = settings.sizes, settings.sizes.linear
    q, k, v, omega = _arrays(rng, dtype, *3 * [(heads, tokens, sizes.d)], (sizes.features, sizes.d))
    blocks = 2 * heads * -(-tokens // _ROWS)  # samples attend to keys, queries to samples
    shape = blocks, _ROWS, sizes.features, sizes.d
    size = {"heads": heads, "tokens": tokens, "d": sizes.d, "S": sizes.features}
    ours = partial(refattn.random_feature_attention, q, k, v, omega=omega)
    return _case(RFA, size, ours, shape, dtype, settings.threads)


def _exact(settings: Settings, dtype: str, rng: np.random.Generator) -> Case:
    sizes, (heads, tokens) = settings.sizes, settings.sizes.quadratic
    q, k, v = _arrays(rng, dtype, *3 * [(heads, tokens, sizes.d)])
    blocks = heads * -(-tokens // _ROWS) * -(-tokens // _COLUMNS)
    shape = blocks, _ROWS, _COLUMNS, sizes.d
    size = {"heads": heads, "tokens": tokens, "d": sizes.d}
    ours = partial(refattn.softmax_attention, q, k, v)
    return _case(EXACT, size, ours, shape, dtype, settings.threads)


def _arrays(rng: np.random.Generator, dtype: str, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    return [rng.standard_normal(shape).astype(dtype, copy=False) for shape in shapes]


def _case(
    name: str,
    size: dict[str, int],
    ours: Callable[[], Any],
    shape: tuple[int, int, int, int],
    dtype: str,
    threads: int,
) -> Case:
    forms = (
        Form("refattn", lambda: ours, ours=True),
        Form(ROOFLINE, partial(roofline, *shape, dtype, threads)),
    )
    return Case(name, dtype, size, forms)
