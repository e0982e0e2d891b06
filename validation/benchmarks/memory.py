"""Peak memory beside arguments and result, each size in a process of its own.

That of a pullback is beside what `refattn.vjp` has kept for it too, the result with its normalisers
and a copy of it for the caller; its results are cotangents.

Run as ``python -m validation.benchmarks.memory '{"form": ..., ...}'``, the arguments of `peak`, it
prints what `peak` returns: what one process has held before does not count for the next.

On Linux it is the anonymous memory (RssAnon), without pages of mapped files; elsewhere the resident
memory, which needs psutil. It is read about every millisecond by a thread.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

import refattn
from refattn.streaming import write_random_feature_attention

from .cases import Record
from .child import run_python
from .settings import Settings, Sizes

RFA, STREAMED, EXACT = "RFA in memory", "RFA from file to file", "exact attention in memory"
RFA_BACK, EXACT_BACK = "RFA, pullback", "exact attention, pullback"

_INTERVAL = 0.001  # seconds
_STATUS = Path("/proc/self/status")


def run(settings: Settings) -> Iterator[Record]:
    """Measure each form and size in float32.

    A record has ``"case"``, ``"dtype"``, ``"sizes"``, ``"kind"`` (of memory) and ``"bytes"``, null
    where memory cannot be read.
    """
    for form, heads, tokens in _plan(settings.sizes):
        size = {"heads": heads, "tokens": tokens, "d": settings.sizes.d}
        if form not in (EXACT, EXACT_BACK):
            size["S"] = settings.sizes.features
        options = size | {"form": form, "seed": settings.seed, "threads": settings.threads}
        child = run_python("-m", __name__, json.dumps(options))
        yield {"case": form, "dtype": "float32", "sizes": size} | json.loads(child.stdout)


def peak(
    form: str, *, heads: int, tokens: int, d: int, S: int = 1, seed: int = 0, threads: int = 1
) -> dict[str, Any]:
    """Kind of memory, and bytes that a form needs beside its arguments and its result."""
    kind, read = resident()
    if read is None:
        return {"kind": kind, "bytes": None}
    with threadpool_limits(threads), TemporaryDirectory() as directory:
        rng = np.random.default_rng(seed)
        omega = rng.standard_normal((S, d), dtype=np.float32)
        call = partial(_prepare, form, rng=rng, d=d, omega=omega, directory=directory)
        call(heads=1, tokens=64)()  # imports, and what BLAS keeps
        measured = call(heads=heads, tokens=tokens)
        before = read()
        with _sampled(read) as samples:
            result = measured()
        results: tuple[Any, ...] = result if isinstance(result, tuple) else (result,)
        held = sum(x.nbytes for x in results if not (x is None or isinstance(x, np.memmap)))
        return {"kind": kind, "bytes": max(samples) - before - held}


def resident() -> tuple[str, Callable[[], int] | None]:
    """Kind of memory that can be read here, and how, in bytes."""
    if _STATUS.exists() and "RssAnon:" in _STATUS.read_text():
        return "anonymous", _anonymous
    try:
        import psutil
    except ModuleNotFoundError:
        return "not available: pip install psutil", None
    process = psutil.Process()
    return "resident", lambda: int(process.memory_info().rss)


def _plan(sizes: Sizes) -> Iterator[tuple[str, int, int]]:
    for tokens in sizes.memory_lengths:
        for form in (RFA, STREAMED, RFA_BACK):
            yield form, 1, tokens
    for form in (RFA, RFA_BACK):
        yield form, sizes.many_heads, sizes.memory_lengths[0]
    for tokens in sizes.exact_memory_lengths:
        for form in (EXACT, EXACT_BACK):
            yield form, 1, tokens


def _prepare(
    form: str,
    *,
    rng: np.random.Generator,
    heads: int,
    tokens: int,
    d: int,
    omega: np.ndarray,
    directory: str,
) -> Callable[[], Any]:
    shape = (heads, tokens, d)
    if form == STREAMED:
        q, k, v = (_file(directory, name, shape, rng) for name in "qkv")
        out = np.lib.format.open_memmap(f"{directory}/out.npy", "w+", np.float32, shape)
        return partial(write_random_feature_attention, out, q, k, v, omega=omega)
    q, k, v = (rng.standard_normal(shape, dtype=np.float32) for _ in range(3))
    fn: Callable[..., Any] = refattn.softmax_attention
    if form in (RFA, RFA_BACK):
        fn = partial(refattn.random_feature_attention, omega=omega)
    if form in (RFA, EXACT):
        return partial(fn, q, k, v)
    d_out = rng.standard_normal(shape, dtype=np.float32)
    return partial(refattn.vjp(fn, q, k, v)[1], d_out)


def _file(
    directory: str, name: str, shape: tuple[int, int, int], rng: np.random.Generator
) -> np.ndarray:
    """Write an array token by token range, and open it for reading."""
    path = f"{directory}/{name}.npy"
    array = np.lib.format.open_memmap(path, "w+", np.float32, shape)
    for start in range(0, shape[1], 8192):
        part = array[:, start : start + 8192]
        part[...] = rng.standard_normal(part.shape, dtype=np.float32)
    array.flush()
    del array
    return np.asanyarray(np.load(path, mmap_mode="r"))


@contextmanager
def _sampled(read: Callable[[], int]) -> Iterator[list[int]]:
    """Read memory again and again while the body runs, and at its end."""
    samples: list[int] = []
    done = threading.Event()

    def watch() -> None:
        while not done.wait(_INTERVAL):
            samples.append(read())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield samples
        samples.append(read())
    finally:
        done.set()
        thread.join()


def _anonymous() -> int:
    fields = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
    return 1024 * int(fields["RssAnon"].split()[0])


if __name__ == "__main__":
    print(json.dumps(peak(**json.loads(sys.argv[1]))))
