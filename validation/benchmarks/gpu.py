"""refattn on a GPU, with CuPy: its time and memory against torch, and block sizes.

Run as ``python -m validation.benchmarks.gpu``. CuPy and torch share their arrays and the default
stream of the device, on which events measure the time of both. Products are never in TF32.
"""

from __future__ import annotations

import math
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import array_api_compat
import numpy as np

try:
    import click
    from rich.console import Console
except ModuleNotFoundError:
    sys.stderr.write("gpu: error: needs `pip install 'refattn[validation]'`\n")
    sys.exit(2)

import refattn
from refattn.arrays import blocks as arrays_blocks
from refattn.arrays import library
from refattn.engine import causal

from .. import results
from ..results import Section
from . import peers
from .timing import Timer, alternate, quartiles, ratio

Record = dict[str, Any]
Form = Callable[[], Any]
Shape = tuple[int, int, int]

CHECKED = 64  # queries of the first head that are compared with float64 on the host
SCORES = 2**28  # that the roofline holds at once

BLOCKS = ((2048, 2048), (8192, 2048), (8192, 8192), (16384, 4096), (32768, 8192))
STEPS = ((8, 256), (16, 256), (32, 256), (64, 256), (32, 128), (16, 512))


class Unavailable(click.ClickException):
    """There is nothing to measure on."""

    exit_code = 2


@dataclass(frozen=True)
class Device:
    """Where arrays live, and how its time and memory are measured."""

    xp: Any
    elapsed: Timer
    peak: Callable[[Form], int]  # bytes beside what was there before, with the result
    about: Record
    torch: Any = None
    share: Callable[[Any], Any] = lambda x: x  # an array as a tensor on the same memory
    out_of_memory: tuple[type[Exception], ...] = (MemoryError,)


@dataclass(frozen=True)
class Method:
    """A method of refattn as a function of q, k, v and omega, and torch's if it has one."""

    ours: Callable[..., Any]
    hops: Callable[..., list[tuple[Any, Any, Any]]]
    theirs: Callable[..., Any] | None = None
    whole: bool = False  # a row of the result depends on all queries


def cuda() -> Device:
    """The current device of CuPy, and torch if it is there."""
    try:
        cupy = import_module("cupy")
    except ImportError:
        raise Unavailable("CuPy not installed: pip install 'refattn[cupy]'") from None
    try:
        found = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError:
        found = 0
    if not found:
        raise Unavailable("no CUDA device")
    torch = _torch()

    class Hook(cupy.cuda.MemoryHook):  # type: ignore[misc, name-defined]
        """Largest memory that is in use, counted from 0."""

        name = "peak"
        used = peak = 0

        def malloc_postprocess(self, **kwargs: int) -> None:
            self.used += kwargs["mem_size"]
            self.peak = max(self.peak, self.used)

        def free_postprocess(self, **kwargs: int) -> None:
            self.used -= kwargs["mem_size"]

    def elapsed(form: Callable[[], object]) -> float:
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        cupy.cuda.Device().synchronize()
        start.record()
        form()
        end.record()
        end.synchronize()
        return float(cupy.cuda.get_elapsed_time(start, end)) / 1e3

    def peak(form: Form) -> int:
        cupy.cuda.Device().synchronize()
        cupy.get_default_memory_pool().free_all_blocks()
        before = 0
        if torch is not None:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        with Hook() as hook:
            form()
        cupy.cuda.Device().synchronize()
        of_torch = 0 if torch is None else torch.cuda.max_memory_allocated() - before
        return int(hook.peak + of_torch)

    out_of_memory: list[type[Exception]] = [cupy.cuda.memory.OutOfMemoryError]
    if torch is not None:
        out_of_memory.append(torch.cuda.OutOfMemoryError)
    return Device(
        cupy, elapsed, peak, _about(cupy, torch), torch, _share(torch), tuple(out_of_memory)
    )


def _torch() -> Any:
    """Torch, if it is there with CUDA, without TF32."""
    try:
        torch = import_module("torch")
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    return torch


def _share(torch: Any) -> Callable[[Any], Any]:
    return (lambda x: x) if torch is None else torch.from_dlpack


def _about(cupy: Any, torch: Any) -> Record:
    """The device and the libraries that drive it."""
    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(cupy.cuda.Device().id)
    return {
        "device": properties["name"].decode(),
        "compute_capability": cupy.cuda.Device().compute_capability,
        "memory": int(properties["totalGlobalMem"]),
        "multiprocessors": int(properties["multiProcessorCount"]),
        "driver": runtime.driverGetVersion(),
        "cuda": runtime.runtimeGetVersion(),
        "cupy": cupy.__version__,
        "torch": None if torch is None else torch.__version__,
        "torch_cuda": None if torch is None else torch.version.cuda,
        "torch_allows_tf32": None if torch is None else torch.backends.cuda.matmul.allow_tf32,
    }


# --- what is compared ---------------------------------------------------------------------------


def _performer(torch: Any, q: Any, k: Any, v: Any, omega: Any) -> Any:
    with torch.inference_mode():
        return peers.performer(q, k, v, omega)


def _sdpa(torch: Any, q: Any, k: Any, v: Any, omega: Any) -> Any:
    with torch.inference_mode():
        return peers.sdpa(torch, q, k, v)


def _exact(q: Any, k: Any, v: Any, omega: Any) -> Any:
    return refattn.softmax_attention(q, k, v)


def _features(q: Any, k: Any, v: Any, omega: Any, causal: bool = False) -> Any:
    return refattn.random_feature_attention(q, k, v, omega=omega, causal=causal)


def _lara(q: Any, k: Any, v: Any, omega: Any) -> Any:
    return refattn.linear_randomized_attention(q, k, v, omega=omega)


def _exact_both(q: Any, k: Any, v: Any, omega: Any) -> Any:
    return _both(refattn.softmax_attention, q, k, v)


def _features_both(q: Any, k: Any, v: Any, omega: Any) -> Any:
    return _both(refattn.random_feature_attention, q, k, v, omega=omega)


def _both(function: Any, q: Any, k: Any, v: Any, **options: Any) -> Any:
    """Forth and back; v is the cotangent of the result, so that rows of q need no other rows."""
    _, pullback = refattn.vjp(function, q, k, v, **options)
    return pullback(v[:, -q.shape[1] :]).q


def _sdpa_both(torch: Any, q: Any, k: Any, v: Any, omega: Any) -> Any:
    return peers.torch_pullback(peers.torch_softmax, q, k, v, v, both=True)()[0]


def _performer_both(torch: Any, q: Any, k: Any, v: Any, omega: Any) -> Any:
    return peers.torch_pullback(peers.torch_performer, q, k, v, v, omega, both=True)()[0]


def _one_hop(q: Any, k: Any, v: Any, omega: Any) -> list[tuple[Any, Any, Any]]:
    return [(q, k, v)]


def _two_hops(q: Any, k: Any, v: Any, omega: Any) -> list[tuple[Any, Any, Any]]:
    omega = omega + 0 * q[:, :1, :1]  # for each head
    return [(omega, k, v), (q, omega, omega)]


METHODS = {
    "exact": Method(_exact, _one_hop, _sdpa),
    "random features": Method(_features, _two_hops, _performer),
    "random features, causal": Method(partial(_features, causal=True), _two_hops),
    "LARA": Method(_lara, _two_hops, whole=True),
    # Forth and back, with the roofline of the way forth.
    "exact, both": Method(_exact_both, _one_hop, _sdpa_both),
    "random features, both": Method(_features_both, _two_hops, _performer_both),
}


def roofline(xp: Any, hops: list[tuple[Any, Any, Any]]) -> None:
    """The products and the exponentials of attention from x to y with values z, and no more."""
    for x, y, z in hops:
        (heads, n, _), m = x.shape, y.shape[1]
        room = xp.empty(min(max(SCORES, m), heads * n * m), dtype=x.dtype)
        for head, i in arrays_blocks.tiles((heads, n), SCORES // m):
            q, k = x[head, i], xp.swapaxes(y[head], -1, -2)
            shape = (*q.shape[:2], m)
            scores = room[: math.prod(shape)].reshape(shape)
            xp.matmul(q, k, out=scores)
            xp.exp(scores, out=scores)
            xp.matmul(scores, z[head])


# --- measurements -------------------------------------------------------------------------------


def draw(shape: Shape, features: int, dtype: str) -> list[np.ndarray]:
    """Draw q, k, v and omega on the host."""
    rng = np.random.default_rng(0)
    shapes = (shape, shape, shape, (features, shape[-1]))
    return [rng.standard_normal(x, dtype=np.dtype(dtype).type) for x in shapes]


def compare(
    device: Device, name: str, shape: Shape, features: int, dtype: str, repeats: int
) -> Record:
    """Check refattn, torch and the roofline, measure their memory, and time them in turn."""
    method, host = METHODS[name], draw(shape, features, dtype)
    arrays = [device.xp.asarray(x) for x in host]
    forms: dict[str, Form] = {"refattn": partial(method.ours, *arrays)}
    if device.torch is not None and method.theirs is not None:
        tensors = [device.share(x) for x in arrays]
        forms["torch"] = partial(method.theirs, device.torch, *tensors)
    want = _rows(method.ours(*_wide(host, method.whole)))
    found = {form: _checked(device, call, want, dtype) for form, call in forms.items()}
    forms["roofline"] = partial(roofline, device.xp, method.hops(*arrays))
    found["roofline"] = {}
    calls = {form: call for form, call in forms.items() if "missing" not in found[form]}
    seconds = alternate(calls, repeats, pause=0.0, timer=device.elapsed)
    for form, times in seconds.items():
        found[form] |= {"seconds": times, "median": quartiles(times).median}
    record = {"method": name, "shape": shape, "features": features, "dtype": dtype, "forms": found}
    if "refattn" in seconds:
        others = [form for form in seconds if form != "refattn"]
        record["ratios"] = {x: ratio(seconds["refattn"], seconds[x])._asdict() for x in others}
    return record


def _wide(host: list[np.ndarray], whole: bool) -> list[np.ndarray]:
    """What the checked rows are computed from in float64: the last ones of the first head."""
    q, k, v, omega = (x.astype(np.float64) for x in host)
    return [q[:1] if whole else q[:1, -CHECKED:], k[:1], v[:1], omega]


def _rows(out: Any) -> np.ndarray:
    """The rows that are checked."""
    return np.asarray(library.to_host(out[:1, -CHECKED:]))


def _checked(device: Device, call: Form, want: np.ndarray, dtype: str) -> Record:
    """Error of a form, relative to the largest value that is checked, and its memory."""
    try:
        error = float(np.max(np.abs(_rows(call()) - want)) / np.max(np.abs(want)))
        peak = device.peak(call)
    except device.out_of_memory:
        return {"missing": "out of memory"}
    units = error / float(np.finfo(dtype).eps)
    return {"error_eps": units if math.isfinite(units) else None, "peak": peak}


Patches = dict[str, Callable[[], Any]]


@contextmanager
def _steps(leaves: int, leaf: int) -> Iterator[None]:
    """Causal steps of so many leaves, of so many tokens each."""
    with mock.patch.multiple(causal, _LEAVES=leaves, _LEAF=leaf):
        yield


def sweep(device: Device, shape: Shape, features: int, repeats: int) -> list[Record]:
    """Time methods in float32 under several sizes of blocks, and of causal steps."""
    arrays = [device.xp.asarray(x) for x in draw(shape, features, "float32")]
    blocks: Patches = {
        str(x): partial(mock.patch.object, arrays_blocks, "_OTHER_BLOCK", x) for x in BLOCKS
    }
    steps: Patches = {str(x): partial(_steps, *x) for x in STEPS}
    plan = {"exact": blocks, "random features": blocks, "random features, causal": steps}
    records = []
    for name, patches in plan.items():
        call = partial(METHODS[name].ours, *arrays)
        forms = {size: partial(_under, patch, call) for size, patch in patches.items()}
        fitting = dict(_fitting(device, forms))
        seconds = alternate(fitting, repeats, pause=0.0, timer=device.elapsed)
        medians = {size: quartiles(times).median for size, times in seconds.items()}
        records.append({"method": name, "shape": shape, "seconds": seconds, "medians": medians})
    return records


def _fitting(device: Device, forms: Mapping[str, Form]) -> Iterator[tuple[str, Form]]:
    """The forms that the memory suffices for."""
    for name, form in forms.items():
        try:
            form()
        except device.out_of_memory:
            continue
        yield name, form


def _under(patch: Callable[[], Any], call: Form) -> Any:
    with patch():
        return call()


def run(
    device: Device,
    out: Path,
    *,
    shapes: list[Shape],
    features: int,
    repeats: int,
    blocks: bool,
) -> Record:
    """Measure everything, and write what there is after every step."""
    versions = {x.__name__: x.__version__ for x in (refattn, np, array_api_compat)}
    about = {**device.about, "python": platform.python_version(), "versions": versions}
    found: Record = {"about": about, "comparisons": [], "blocks": []}

    def write() -> None:
        results.write(out.parent, {out.name: found})

    write()
    for shape in shapes:
        for dtype in ("float32", "float64"):
            for name in METHODS:
                one = compare(device, name, shape, features, dtype, repeats)
                found["comparisons"].append(one)
                write()
        if blocks:
            found["blocks"] += sweep(device, shape, features, repeats)
            write()
    return found


def tables(found: Record) -> Iterator[Section]:
    """What was found, for people."""
    rows: list[list[Any]] = []
    for record in found["comparisons"]:
        for name, form in record["forms"].items():
            quotient = record.get("ratios", {}).get(name)
            rows.append(
                [
                    *(record["method"], _by(record["shape"]), record["dtype"], name),
                    form.get("missing") or f"{1e3 * form['median']:.3f}",
                    "" if quotient is None else f"{quotient['median']:.2f}",
                    f"{form['error_eps']:.1f}" if form.get("error_eps") is not None else "",
                    f"{form['peak'] / 1e6:.0f}" if "peak" in form else "",
                ]
            )
    columns = ["method", "q, k, v", "dtype", "form", "ms", "refattn / it", "error, eps", "peak MB"]
    yield Section(str(found["about"].get("device", "")), columns, rows)
    if found["blocks"]:
        title = "blocks of queries and keys; causal: tokens of a step and of a leaf"
        rows = [
            [record["method"], _by(record["shape"]), size, f"{1e3 * median:.3f}"]
            for record in found["blocks"]
            for size, median in record["medians"].items()
        ]
        yield Section(title, ["method", "q, k, v", "size", "ms"], rows)


def _by(shape: Shape) -> str:
    return " x ".join(map(str, shape))


def _shape(context: Any, option: Any, values: tuple[str, ...]) -> list[Shape]:
    """Parse sizes such as 8x8192x64."""
    try:
        found = [tuple(int(n) for n in x.split("x")) for x in values]
    except ValueError:
        found = [()]
    if any(len(x) != 3 or min(x) < 1 for x in found):
        raise click.BadParameter("must be heads x tokens x head size, such as 8x8192x64.")
    return [(x[0], x[1], x[2]) for x in found]


@click.command()
@click.option(
    "--size",
    "shapes",
    multiple=True,
    default=("8x8192x64", "16x65536x64"),
    show_default=True,
    callback=_shape,
    help="Heads x tokens x head size; may be given several times.",
)
@click.option("--features", type=click.IntRange(min=1), default=256, show_default=True)
@click.option("--repeats", type=click.IntRange(min=1), default=7, show_default=True)
@click.option("--blocks", is_flag=True, help="Also try sizes of blocks.")
@click.option("--quick", is_flag=True, help="Small arrays, to see that it runs.")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default="gpu.json",
    show_default=True,
    help="Where the results go.",
)
def main(
    shapes: list[Shape], features: int, repeats: int, blocks: bool, quick: bool, out: Path
) -> None:
    """Measure refattn on a GPU with CuPy, against torch if it is installed.

    The exit status is 2 if there is no GPU or no CuPy.
    """
    if quick:
        shapes, features, repeats = [(2, 512, 16)], 32, 2
    found = run(cuda(), out, shapes=shapes, features=features, repeats=repeats, blocks=blocks)
    for table in tables(found):
        results.show(Console(width=120), table)
    click.echo(f"wrote {out}")


if __name__ == "__main__":
    main(prog_name="python -m validation.benchmarks.gpu")
