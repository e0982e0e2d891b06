"""Attention over Dask arrays that no worker could hold, also while a worker is killed.

Run as ``python -m validation.benchmarks.dask_run``. Each method runs on a cluster of processes on
this machine:

- *large*: q, k and v, drawn chunk by chunk, are larger than the memory of a worker; the result is
  reduced to a digest of each chunk, so that nobody ever holds it.
- *kill*: the same, and one worker is killed on the way.
- *small*: q, k and v are held in memory, by the workers and by one process, which take turns.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np

import refattn

try:
    import click
    import dask
    import dask.array as da
    import psutil
    from dask.base import optimize
    from dask.distributed import (
        Client,
        LocalCluster,
        SchedulerPlugin,
        WorkerPlugin,
        futures_of,
        wait,
    )
    from dask.utils import parse_bytes
    from distributed.protocol import pickle
    from rich.console import Console
except ModuleNotFoundError:
    sys.stderr.write("dask_run: error: needs `pip install 'refattn[distributed,validation]'`\n")
    sys.exit(2)

from refattn import distributed

from .. import results
from ..results import Section
from .timing import alternate, quartiles, ratio

Record = dict[str, Any]

SAMPLE_S = 0.02  # between two looks at the memory of a worker
RESTART_S = 120  # until another worker must have taken the place of one that was killed
SHRINK = 32  # how many times smaller the arrays are that are held in memory


@dataclass(frozen=True)
class Case:
    """One method on arrays (heads, tokens, head_size) in chunks of one head."""

    name: str
    tokens: int
    chunk: int
    heads: int
    head_size: int
    features: int
    seed: int
    causal: bool = False

    def arrays(self) -> list[Any]:
        """Draw q, k and v, lazily: every chunk has a seed of its own."""
        rng = da.random.default_rng(self.seed)
        shape = (self.heads, self.tokens, self.head_size)
        chunks = (1, self.chunk, self.head_size)
        return [rng.standard_normal(shape, chunks=chunks, dtype=np.float32) for _ in "qkv"]

    def attend(self, module: Any, arrays: list[Any]) -> Any:
        """Apply the method of `refattn`, or of `refattn.distributed`."""
        if not self.features:
            return module.softmax_attention(*arrays, causal=self.causal)
        omega = refattn.sampling.draw(self.features, self.head_size, rng=self.seed).omega
        return module.random_feature_attention(*arrays, omega=omega, causal=self.causal)


class Memory(WorkerPlugin):
    """Largest memory of a worker, its process and what Dask counts, since `reset`."""

    name = "memory"

    def setup(self, worker: Any) -> None:
        """Start to look."""
        self.worker, self.stopped = worker, Event()
        self.reset()
        Thread(target=self._watch, daemon=True).start()

    def teardown(self, worker: Any) -> None:
        """Stop."""
        self.stopped.set()

    def reset(self) -> None:
        """Forget what was seen."""
        self.start = psutil.Process().memory_info().rss
        self.peak = {"rss": self.start, "managed": 0, "spilled": 0}

    def _watch(self) -> None:
        process = psutil.Process()
        while not self.stopped.wait(SAMPLE_S):
            spilled = getattr(self.worker.data, "spilled_total", None)
            seen = {
                "rss": process.memory_info().rss,
                "managed": self.worker.state.nbytes,
                "spilled": spilled.disk if spilled else 0,
            }
            self.peak = {name: max(value, self.peak[name]) for name, value in seen.items()}


class Progress(SchedulerPlugin):
    """How often each task has been done, and how many workers were lost."""

    name = "progress"

    def __init__(self) -> None:
        self.done: Counter[Any] = Counter()
        self.lost = 0

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        """Count a task that has been computed."""
        if (start, finish) == ("processing", "memory"):
            self.done[key] += 1

    def remove_worker(self, *args: Any, **kwargs: Any) -> None:
        """Count a worker that is gone."""
        self.lost += 1


def reset(dask_worker: Any) -> None:
    """Forget the largest memory of a worker."""
    dask_worker.plugins[Memory.name].reset()


def memory(dask_worker: Any) -> dict[str, int]:
    """Memory of a worker, in bytes."""
    seen: Memory = dask_worker.plugins[Memory.name]
    return {"start": seen.start, **seen.peak}


@contextmanager
def watched(client: Client) -> Iterator[Progress]:
    """Count tasks and lost workers, and start to measure memory anew."""
    progress, scheduler = Progress(), _scheduler(client)
    client.run(reset)
    client.sync(_call, scheduler.add_plugin, progress)
    try:
        yield progress
    finally:
        client.sync(_call, scheduler.remove_plugin, Progress.name)


def _scheduler(client: Client) -> Any:
    """The scheduler, which runs in this process."""
    cluster: Any = client.cluster
    return cluster.scheduler


async def _call(function: Callable[..., Any], *args: Any) -> None:
    """Call a function in the thread of the scheduler."""
    function(*args)


def digest(x: np.ndarray) -> np.ndarray:
    """Sum, largest absolute value and checksum of a chunk, in place of the chunk."""
    found = (x.sum(dtype=np.float64), np.abs(x).max(), zlib.crc32(np.ascontiguousarray(x).data))
    return np.array(found, np.float64).reshape(1, 1, 3)


def digests(out: Any) -> Any:
    """The digests of all chunks, (heads, chunks of tokens, 3)."""
    chunks = (*((1,) * n for n in out.numblocks[:2]), (3,))
    return out.map_blocks(digest, chunks=chunks, dtype=float, meta=np.empty((0, 0, 0)))


def finished(held: Any) -> np.ndarray:
    """Wait for the chunks of a small array and fetch them.

    A task that gathered them all would be the goal of the work, to which Dask hurries along the
    states of the causal form: keys and values would pile up before queries read.
    """
    wait(held)
    return np.asarray(held.compute())


def over(held: Any) -> bool:
    """Whether every chunk is there."""
    return all(future.done() for future in futures_of(held))


def graph_size(x: Any) -> dict[str, int]:
    """Tasks, layers and bytes of a graph."""
    graph = x.__dask_graph__()
    return {
        "tasks": len(graph),
        "layers": len(getattr(graph, "layers", ())) or 1,
        "bytes": len(pickle.dumps(graph)),
    }


def large(client: Client, case: Case) -> tuple[Record, np.ndarray]:
    """Run a case that no worker could hold."""
    arrays = case.arrays()
    out = digests(case.attend(distributed, arrays))
    chunks = out.npartitions
    (optimised,) = optimize(out)
    with watched(client) as progress:
        start = time.perf_counter()
        found = finished(client.persist(out))
        seconds = time.perf_counter() - start
        workers = client.run(memory)
    return {
        "shape": arrays[0].shape,
        "chunk_shape": arrays[0].chunksize,
        "bytes": sum(x.nbytes for x in arrays),
        "chunks": chunks,
        "graph": graph_size(out),
        "optimised": graph_size(optimised),
        "tasks_per_chunk": sum(progress.done.values()) / chunks,
        "seconds": seconds,
        "workers": list(workers.values()),
        "finite": bool(np.isfinite(found).all()),
    }, found


def kill(client: Client, case: Case, want: np.ndarray) -> Record:
    """Run a case again and kill a worker when half of the tasks are done."""
    pids = client.run(os.getpid)
    out = digests(case.attend(distributed, case.arrays()))
    (optimised,) = optimize(out)
    with watched(client) as progress:
        start = time.perf_counter()
        held = client.persist(out)
        while len(progress.done) < len(optimised.__dask_graph__()) / 2 and not over(held):
            time.sleep(0.001)
        underway, done = not over(held), len(progress.done)
        os.kill(next(iter(pids.values())), signal.SIGKILL)
        found = finished(held)
        seconds = time.perf_counter() - start
        while not progress.lost:
            time.sleep(0.001)
    client.wait_for_workers(len(pids), timeout=RESTART_S)
    started = set(client.run(os.getpid).values()) - set(pids.values())
    times = progress.done.values()
    return {
        "underway": underway,
        "tasks_before": done,
        "tasks_recomputed": sum(times) - len(times),
        "workers_lost": progress.lost,
        "workers_started": len(started),
        "seconds": seconds,
        "identical": bool(np.array_equal(found, want)),
        "difference_of_sums": float(np.max(np.abs(found[..., 0] - want[..., 0]))),
    }


def small(client: Client, case: Case, repeats: int) -> Record:
    """Compare with one process, on arrays that both hold, in turn."""
    cut = client.persist(case.arrays())
    whole = [x.compute() for x in cut]

    def cluster() -> Any:
        out = client.persist(case.attend(distributed, cut))
        wait(out)
        return out

    def single() -> Any:
        return case.attend(refattn, whole)

    difference = np.max(np.abs(cluster().compute() - single())) / np.max(np.abs(whole[2]))
    times = alternate({"cluster": cluster, "single": single}, repeats)
    return {
        "shape": cut[0].shape,
        "bytes": sum(x.nbytes for x in cut),
        "seconds": quartiles(times["cluster"]).median,
        "seconds_single": quartiles(times["single"]).median,
        "ratio": ratio(times["cluster"], times["single"]).median,
        "difference_eps": float(difference / np.finfo(np.float32).eps),
    }


def run(client: Client, cases: list[Case], repeats: int) -> list[Record]:
    """Run every case, as it is, with a worker killed, and as small as memory holds."""
    records = []
    for case in cases:
        record, found = large(client, case)
        records.append(
            {
                "case": case.name,
                "large": record,
                "kill": kill(client, case, found),
                "small": small(client, replace(case, tokens=case.tokens // SHRINK), repeats),
            }
        )
    return records


def tables(records: list[Record], limit: int) -> list[Section]:
    """What was found, for people."""
    one = ("q, k, v", "q, k, v MB", "chunks", "tasks", "optimised", "graph MB", "tasks/chunk")
    two = ("done before", "recomputed", "started", "s", "identical", "q, k, v", "s in memory")
    found: tuple[list[list[Any]], list[list[Any]]] = [], []
    for x in records:
        a, b, c = x["large"], x["kill"], x["small"]
        found[0].append(
            [
                *(x["case"], _shape(a), f"{a['bytes'] / 1e6:.0f}", a["chunks"]),
                *(a["graph"]["tasks"], a["optimised"]["tasks"]),
                *(f"{a['optimised']['bytes'] / 1e6:.2f}", f"{a['tasks_per_chunk']:.1f}"),
                f"{a['seconds']:.1f}",
                ", ".join(f"{w['rss'] / 1e6:.0f}" for w in a["workers"]),
                f"{sum(w['spilled'] for w in a['workers']) / 1e6:.0f}",
            ]
        )
        found[1].append(
            [
                *(x["case"], b["tasks_before"], b["tasks_recomputed"], b["workers_started"]),
                f"{b['seconds']:.1f}",
                "yes" if b["identical"] else f"no, {b['difference_of_sums']:.1e}",
                *(_shape(c), f"{c['seconds']:.2f}", f"{c['seconds_single']:.2f}"),
                *(f"{c['ratio']:.2f}", f"{c['difference_eps']:.1f}"),
            ]
        )
    limits = f"larger than a worker, which may use {limit / 1e6:.0f} MB"
    killed = "a worker is killed, and held in memory against one process"
    last = ("s of one process", "ratio", "difference, eps")
    return [
        Section(limits, ["case", *one, "s", "peak MB of workers", "spilled MB"], found[0]),
        Section(killed, ["case", *two, *last], found[1]),
    ]


def _shape(record: Record) -> str:
    return " x ".join(map(str, record["shape"]))


@click.command()
@click.option("--tokens", type=click.IntRange(min=SHRINK), default=2_097_152, show_default=True)
@click.option("--features", type=click.IntRange(min=1), default=128, show_default=True)
@click.option("--workers", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--memory-limit", default="500MB", show_default=True, help="Of each worker.")
@click.option("--repeats", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--quick", is_flag=True, help="Small arrays, to see that it runs.")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default="dask.json",
    show_default=True,
    help="Where the results go.",
)
def main(
    tokens: int,
    features: int,
    workers: int,
    memory_limit: str,
    repeats: int,
    quick: bool,
    out: Path,
) -> None:
    """Run attention over Dask arrays on a cluster of processes of this machine.

    Causal attention has half as many tokens, and exact attention a 64th.
    """
    chunk, exact_chunk = 65_536, 4096
    if quick:
        tokens, chunk, exact_chunk, features, repeats = 8192, 256, 16, 16, 1
    case = partial(Case, heads=2, head_size=64, seed=0)
    cases = [
        case("random features", tokens, chunk, features=features),
        case("random features, causal", tokens // 2, chunk, features=features, causal=True),
        case("exact", tokens // 64, exact_chunk, features=0),
    ]
    with (
        tempfile.TemporaryDirectory() as folder,
        # After that time a cluster gives up a worker that is not there at the moment, though it may
        # be another one that has been killed and is started again.
        dask.config.set({"distributed.deploy.lost-worker-timeout": "1 hour"}),
        LocalCluster(
            n_workers=workers,
            threads_per_worker=1,
            memory_limit=memory_limit,
            local_directory=folder,
            silence_logs=logging.CRITICAL,  # the loss of a worker is no news here
            dashboard_address=":0",
        ) as cluster,
        Client(cluster) as client,
    ):
        client.register_plugin(Memory())
        limit = parse_bytes(memory_limit)
        records = run(client, cases, repeats)
    settings = {
        "workers": workers,
        "memory_limit": limit,
        "features": features,
        "cpus": os.cpu_count(),
        "versions": {x.__name__: x.__version__ for x in (refattn, np, dask)},
    }
    results.write(out.parent, {out.name: {"settings": settings, "cases": records}})
    for table in tables(records, limit):
        results.show(Console(width=160), table)
    click.echo(f"wrote {out}")


if __name__ == "__main__":
    # Under the name by which workers find its functions.
    from validation.benchmarks import dask_run

    dask_run.main(prog_name="python -m validation.benchmarks.dask_run")
