"""Exact attention: x-transformers, local-attention, keras, jax, onnxruntime, torch."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

import refattn

from ..benchmarks.peers import load
from .record import Floats, Number, error, exact, real

_TORCH = {"library": "torch", "dtype": "float32", "layout": "bhnd"}


def _tensors(*arrays: Floats) -> list[Any]:
    torch = load("torch", "torch")
    return [torch.asarray(x.copy()) for x in arrays]


# --- x-transformers ------------------------------------------------------------------------------


def x_causal(q: Any, k: Any, v: Any, *, causal: bool = False) -> Any:
    """Attention of x-transformers by torch's function, causal by the argument of the call."""
    attend = load("x_transformers.attend", "x-transformers").Attend(flash=True)
    return attend(q, k, v, causal=causal)[0]


def _x_causal() -> tuple[Number, ...]:
    package = load("x_transformers.attend", "x-transformers")
    arrays = real()
    numbers = []
    for flash in (True, False):
        got = package.Attend(flash=flash)(*_tensors(*arrays), causal=True)[0]
        numbers.append(
            Number(
                f"error of a call with causal=True, real tensors, flash={flash}",
                error(got, exact(*arrays, causal=True)),
                "below 1e-5, rounding",
                0.05 if flash else None,
            )
        )
        if flash:
            numbers.append(
                Number(
                    "error of the same call, compared with attention that is not causal",
                    error(got, exact(*arrays)),
                    "",
                )
            )
    return tuple(numbers)


def _x_distance() -> tuple[Number, ...]:
    attend = load("x_transformers.attend", "x-transformers").Attend
    q, k, v = real()
    x, y = q.astype(float), k.astype(float)
    squares = ((x[..., :, None, :] - y[..., None, :, :]) ** 2).sum(axis=-1)
    want = refattn.softmax_attention(np.zeros_like(x), y, v.astype(float), bias=-squares * 32**-0.5)
    return tuple(
        Number(
            f"error against scores -|q - k|^2 / sqrt(d), real tensors, flash={flash}",
            error(attend(l2_distance=True, flash=flash)(*_tensors(q, k, v))[0], want),
            "below 1e-5, rounding",
            1e-3 if flash else None,
        )
        for flash in (True, False)
    )


# --- local-attention -----------------------------------------------------------------------------


def _local() -> tuple[Number, ...]:
    torch, package = load("torch", "torch"), load("local_attention", "local-attention")
    numbers = []
    for n in (120, 112):
        arrays = tuple(x[..., :n, :] for x in real())
        ahead = np.abs(np.arange(n) - np.arange(n)[:, None])
        layer = package.LocalAttention(16, exact_windowsize=True, autopad=True)
        everything = torch.ones(2, n, dtype=torch.bool)
        for words, mask in (("", None), (", a mask that is True throughout", everything)):
            numbers.append(
                Number(
                    "error against attention to 16 keys on each side, real tensors, "
                    f"{n} tokens{words}",
                    error(layer(*_tensors(*arrays), mask=mask), exact(*arrays, mask=ahead <= 16)),
                    "below 1e-5, rounding",
                    1e-3 if n % 16 and mask is None else None,
                )
            )
    return tuple(numbers)


# --- keras ---------------------------------------------------------------------------------------


def keras_attention(q: Any, k: Any, v: Any, *, mask: Any = None) -> Any:
    """`keras.ops.dot_product_attention` with the backend torch; tokens before heads."""
    os.environ.setdefault("KERAS_BACKEND", "torch")
    keras = load("keras", "keras")
    if keras.backend.backend() != "torch":
        raise RuntimeError("Keras has another backend than torch")
    if mask is not None:
        shape = q.shape[0], q.shape[2], q.shape[1], k.shape[1]
        mask = mask.expand(shape)
    return keras.ops.dot_product_attention(q, k, v, mask=mask)


def _keras() -> tuple[Number, ...]:
    torch = load("torch", "torch")
    arrays = _tensors(*(x.swapaxes(1, 2) for x in real()))
    mask = torch.ones(128, 128, dtype=torch.bool)
    mask[:16] = False
    d_out = torch.zeros_like(arrays[0])
    d_out[:, :16] = torch.asarray(np.random.default_rng(0).standard_normal((2, 16, 4, 32)))
    given = [x.requires_grad_() for x in arrays]
    out = keras_attention(*given, mask=mask)
    dq = torch.autograd.grad(out, given[0], d_out)[0]
    with torch.no_grad():
        moved = keras_attention(2 * arrays[0], *arrays[1:], mask=mask)[:, :16]
    return (
        Number(
            "norm of dq divided by the norm of the cotangent, for the 16 queries that see no key, "
            "real tensors",
            float(dq.norm() / d_out.norm()),
            "0: the outputs do not change, see below",
            1e-3,
        ),
        Number(
            "largest change of their outputs when q is doubled",
            float((moved - out.detach()[:, :16]).abs().max()),
            "0",
        ),
    )


# --- jax -----------------------------------------------------------------------------------------


def _jax() -> tuple[Number, ...]:
    jax = load("jax", "jax")
    q, k, v = (jax.numpy.asarray(x.swapaxes(1, 2)) for x in real())

    def normaliser(x: Any) -> Any:
        return jax.nn.dot_product_attention(x, k, v, return_residual=True)[1].sum()

    x, y = (a.astype(float) for a in real()[:2])
    want = exact(x, y, y) * 32**-0.5  # the mean of keys, under the weights
    return (
        Number(
            "error of the gradient of the sum of the log normalisers with respect to q, real "
            "tensors; 1 if the gradient is 0",
            error(np.asarray(jax.grad(normaliser)(q)).swapaxes(1, 2), want),
            "below 1e-5, rounding",
            0.5,
        ),
    )


# --- onnxruntime ---------------------------------------------------------------------------------


def onnx_attention(q: Any, k: Any, v: Any) -> Floats:
    """Attention-24 of ONNX Runtime on a CPU, with the scale that it has by default."""
    return _onnx("onnxruntime", q, k, v)


def _onnx(engine: str, q: Floats, k: Floats, v: Floats, **options: Any) -> Floats:
    onnx, evaluate = load("onnx", "onnx"), load(engine, "onnx onnxruntime")
    helper, given = onnx.helper, dict(zip("QKV", (q, k, v), strict=True))
    kind = helper.np_dtype_to_tensor_dtype(q.dtype)
    graph = helper.make_graph(
        [helper.make_node("Attention", list(given), ["Y"], **options)],
        "attention",
        [helper.make_tensor_value_info(x, kind, y.shape) for x, y in given.items()],
        [helper.make_tensor_value_info("Y", kind, None)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
    if engine == "onnx.reference":
        return np.asarray(evaluate.ReferenceEvaluator(model).run(None, given)[0])
    settings = evaluate.SessionOptions()
    settings.log_severity_level = 4  # what a call refuses is an exception already
    session = evaluate.InferenceSession(
        model.SerializeToString(), settings, providers=["CPUExecutionProvider"]
    )
    return np.asarray(session.run(None, given)[0])


def _double() -> tuple[Number, ...]:
    q, k, v = (x.astype(float) for x in real())
    root = float(np.float32(32**-0.25))
    cases: list[tuple[str, float, dict[str, Any], float | None]] = [
        ("by default", 32**-0.5, {}, 1e-12),
        ("by default, against the square of d^(-1/4) in single precision", root**2, {}, None),
        ("0.25", 0.25, {"scale": 0.25}, None),
    ]
    return tuple(
        Number(
            f"error in double precision, real tensors, scale {words}",
            error(_onnx("onnxruntime", q, k, v, **options), exact(q, k, v, scale=scale)),
            "below 1e-14, rounding",
            bound,
        )
        for words, scale, options, bound in cases
    )


def _reference() -> tuple[Number, ...]:
    arrays = real()
    return tuple(
        Number(
            f"error in {dtype}, real tensors",
            error(_onnx("onnx.reference", *(x.astype(dtype) for x in arrays)), exact(*arrays)),
            f"below {bound:g}, rounding",
            bound,
        )
        for dtype, bound in (("float64", 1e-14), ("float32", 1e-5), ("float16", 1e-2))
    )


# --- torch ---------------------------------------------------------------------------------------


def torch_attention(q: Any, k: Any, v: Any, *, mask: Any = None, causal: bool = False) -> Any:
    """Attention of torch on a CPU."""
    torch = load("torch", "torch")
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, is_causal=causal)


def _torch() -> tuple[Number, ...]:
    torch = load("torch", "torch")
    arrays = real()
    mask = np.random.default_rng(0).random((128, 128)) < 0.5
    cases: list[tuple[str, dict[str, Any]]] = [("plain", {}), ("causal", {"causal": True})]
    cases.append(("with a mask", {"mask": mask}))
    numbers = []
    for words, options in cases:
        given = {x: torch.asarray(y) if x == "mask" else y for x, y in options.items()}
        numbers.append(
            Number(
                f"error of scaled_dot_product_attention, {words}, real tensors",
                error(torch_attention(*_tensors(*arrays), **given), exact(*arrays, **options)),
                "below 1e-5, rounding",
                1e-5,
            )
        )
    return tuple(numbers)
