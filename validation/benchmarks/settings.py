"""What a run measures: sizes, repeats, threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from threadpoolctl import threadpool_info, threadpool_limits

from . import peers


@dataclass(frozen=True)
class Sizes:
    """Sizes of the arrays of every section."""

    d: int = 64
    features: int = 256
    checked: int = 32  # queries whose result is compared with an oracle

    # estimators and roofline: heads and tokens of forms linear and quadratic in the tokens,
    # and of those that also take a product with the samples of each query
    linear: tuple[int, int] = (8, 8192)
    quadratic: tuple[int, int] = (4, 4096)
    dense: tuple[int, int] = (2, 512)
    samples: int = 16  # of each query

    # gradients
    backward: tuple[int, int] = (8, 4096)

    # scaling
    lengths: tuple[int, ...] = tuple(2**i for i in range(10, 21))
    exact_up_to: int = 2**14
    fitted_from: int = 2**14
    counts: tuple[int, ...] = tuple(2**i for i in range(4, 12))
    counts_fitted_from: int = 256
    counts_length: int = 2**14

    # memory
    memory_lengths: tuple[int, ...] = (2**13, 2**16, 2**20)
    exact_memory_lengths: tuple[int, ...] = (2**13, 2**16)
    many_heads: int = 16


FULL = Sizes()
QUICK = Sizes(
    linear=(2, 2048),
    quadratic=(2, 1024),
    dense=(1, 256),
    backward=(2, 1024),
    lengths=tuple(2**i for i in range(10, 15)),
    exact_up_to=2**12,
    fitted_from=2**12,
    counts=(64, 256, 1024),
    counts_fitted_from=64,
    counts_length=2**12,
    memory_lengths=(2**12, 2**14),
    exact_memory_lengths=(2**12,),
)


@dataclass(frozen=True)
class Settings:
    """Settings of a run."""

    sizes: Sizes
    repeats: int
    pause: float
    threads: int
    seed: int
    new_memory: bool = False  # whether each large array is


def available_threads() -> int:
    """Threads that BLAS, and so refattn, uses unless told otherwise."""
    libraries = [x["num_threads"] for x in threadpool_info() if x["user_api"] == "blas"]
    return max(libraries, default=1)


@contextmanager
def limit_threads(threads: int) -> Iterator[None]:
    """Give BLAS, and so refattn, and torch this many threads."""
    with threadpool_limits(threads):
        try:
            torch = peers.load("torch", "torch")
        except peers.Missing:
            yield
            return
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)
