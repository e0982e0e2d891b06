"""Well-known attention functions behind one signature: heads before tokens, NumPy in and out."""

import inspect
import os
import re
import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import pytest


class Driver(NamedTuple):
    """`call` takes q, k, v and options by name; `parameters` are the words of its signature.

    `layout` is that of the arrays that it hands over.
    """

    call: Callable[..., np.ndarray]
    parameters: str
    layout: str | None = "bhnd"


def driver(name):
    """That of a row of the table, or the test is skipped."""
    return _DRIVERS[name]()


def swap(x):
    """Heads before tokens, or after them."""
    return x.swapaxes(1, 2)


def _torch_sdpa():
    torch = pytest.importorskip("torch")
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def call(q, k, v, mask=None, causal=False, p=0):
        torch.manual_seed(0)
        mask = None if mask is None else torch.asarray(mask)
        grouped = q.shape[:-2] != k.shape[:-2]
        given = map(torch.asarray, (q, k, v))
        return sdpa(
            *given, attn_mask=mask, is_causal=causal, dropout_p=p, enable_gqa=grouped
        ).numpy()

    return Driver(call, sdpa.__doc__.partition("->")[0], None)


def _torch_flex():
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    torch = pytest.importorskip("torch")

    def call(q, k, v, mask=None, lse=False):
        shape, blocks = (1, q.shape[1], q.shape[2], k.shape[2]), None
        if mask is not None:
            seen = torch.asarray(np.broadcast_to(mask, shape).copy())
            blocks = flex.create_block_mask(lambda b, h, i, j: seen[b, h, i, j], *shape, "cpu")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is not compiled
            out, more = flex.flex_attention(
                *map(torch.asarray, (q, k, v)),
                block_mask=blocks,
                enable_gqa=q.shape[1] != k.shape[1],
                return_aux=flex.AuxRequest(lse=True),
            )
        return (more.lse if lse else out).numpy()

    return Driver(call, str(inspect.signature(flex.flex_attention)))


@cache
def _compiled(static):
    """JAX's function with these arguments, as one program for each shape."""
    import jax

    attention = partial(jax.nn.dot_product_attention, return_residual=True, **dict(static))
    return jax.jit(lambda q, k, v, arrays: attention(q, k, v, **arrays))


def _jax():
    jax = pytest.importorskip("jax")

    def call(q, k, v, lse=False, **options):
        names = {"causal": "is_causal", "window": "local_window_size"}
        options = {names.get(name, name): x for name, x in options.items()}
        arrays = {name: x for name, x in options.items() if isinstance(x, np.ndarray)}
        static = frozenset((name, x) for name, x in options.items() if name not in arrays)
        out, normaliser = _compiled(static)(*map(swap, (q, k, v)), arrays)
        return np.asarray(swap(normaliser) if lse else swap(out))

    return Driver(call, str(inspect.signature(jax.nn.dot_product_attention)), "bnhd")


def _onnx_model(opset, given, options):
    """A model of one node Attention, and what it is given."""
    onnx = pytest.importorskip("onnx")
    helper, types = onnx.helper, onnx.TensorProto
    names = ["Q", "K", "V", "attn_mask", "past_key", "past_value"]
    used = [name if name in given else "" for name in names]
    while not used[-1]:
        used.pop()
    outputs = ["Y", "present_key", "present_value"][: 3 if "past_key" in given else 1]
    kinds = {"b": types.BOOL, "f": types.FLOAT}
    graph = helper.make_graph(
        [helper.make_node("Attention", used, outputs, **options)],
        "attention",
        [helper.make_tensor_value_info(x, kinds[y.dtype.kind], y.shape) for x, y in given.items()],
        [helper.make_tensor_value_info(x, types.FLOAT, None) for x in outputs],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=11)


def run_onnx(model, given):
    """Results of a model by ONNX Runtime."""
    session = pytest.importorskip("onnxruntime").InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    names = [x.name for x in session.get_inputs()]
    return session.run(None, dict(zip(names, given, strict=True)))


def _onnx(opset, runtime=False):
    onnx = pytest.importorskip("onnx")
    evaluate = pytest.importorskip("onnxruntime" if runtime else "onnx.reference")

    def call(q, k, v, mask=None, past=None, causal=False, window=None, **options):
        given = {"Q": q, "K": k, "V": v}
        if mask is not None:
            given["attn_mask"] = mask
        if past is not None:
            given |= {"past_key": past[0], "past_value": past[1]}
        if window is not None:
            sides = ("left_window_size", "right_window_size")
            options |= dict(zip(sides, window, strict=True))
        model = _onnx_model(opset, given, {"is_causal": int(causal), **options})
        if runtime:
            return np.asarray(run_onnx(model, given.values())[0])
        return np.asarray(evaluate.ReferenceEvaluator(model).run(None, given)[0])

    schema = onnx.defs.get_schema("Attention", opset, "")
    slots = [x.name for x in (*schema.inputs, *schema.outputs)]
    return Driver(call, " ".join([*schema.attributes, *slots]))


def _xformers():
    """Its masks as they are without a GPU, and attention by torch with them added."""
    biases = pytest.importorskip("xformers.ops.fmha.attn_bias")
    fmha = pytest.importorskip("xformers.ops.fmha")
    sdpa = _torch_sdpa().call

    def call(q, k, v, causal=False, window=None):
        mask = biases.LocalAttentionFromBottomRightMask(*window) if window else None
        mask = biases.LowerTriangularMask() if causal else mask
        return sdpa(q, k, v, mask=mask.materialize((q.shape[2], k.shape[2])).numpy())

    return Driver(call, str(inspect.signature(fmha.memory_efficient_attention)))


def _keras():
    os.environ.setdefault("KERAS_BACKEND", "torch")
    keras = pytest.importorskip("keras")
    if keras.backend.backend() != "torch":
        pytest.skip("Keras has another backend")
    attention = keras.ops.dot_product_attention

    def call(q, k, v, softcap=None, causal=False, **given):
        given |= {"is_causal": causal, "attn_logits_soft_cap": softcap}
        return swap(attention(*map(swap, (q, k, v)), **given).numpy())

    return Driver(call, str(inspect.signature(attention)), "bnhd")


def _hf_eager():
    torch = pytest.importorskip("torch")
    models = pytest.importorskip("transformers.models.gemma2.modeling_gemma2")
    masks = pytest.importorskip("transformers.masking_utils")

    def call(q, k, v, mask=None, past=None, causal=False, window=None, softcap=None, p=0.0):
        torch.manual_seed(0)
        if past is not None:
            k, v = (np.concatenate(pair, 2) for pair in zip(past, (k, v), strict=True))
        n, m = q.shape[2], k.shape[2]
        if mask is not None and mask.dtype == bool:
            seen = torch.asarray(mask)
            mask = masks.eager_mask(1, n, m, mask_function=lambda b, h, i, j: seen[i, j])
        elif causal or window is not None:
            offset = 0 if past is None else past[0].shape[2]
            own = masks.causal_mask_function
            if window is not None:
                own = masks.sliding_window_causal_mask_function(window[0])
            mask = masks.eager_mask(1, n, m, q_offset=offset, mask_function=own)
        module = torch.nn.Module()
        module.num_key_value_groups, module.head_dim = q.shape[1] // k.shape[1], q.shape[-1]
        given = (torch.asarray(x) for x in (q, k, v))
        mask = None if mask is None else torch.as_tensor(mask)
        out, _ = models.eager_attention_forward(module, *given, mask, p, softcap=softcap)
        return swap(out.numpy())

    return Driver(call, str(inspect.signature(models.eager_attention_forward)))


_DRIVERS = {
    "torch-sdpa": _torch_sdpa,
    "torch-flex": _torch_flex,
    "jax-dpa": _jax,
    **{f"onnx-{opset}": partial(_onnx, opset) for opset in (23, 24, 25)},
    "onnxruntime": partial(_onnx, 24, runtime=True),
    "xformers": _xformers,
    "keras": _keras,
    "hf-eager": _hf_eager,
}

# What an argument for an option would be called.
_NAMES = {
    "causal": "causal",
    "mask": "mask",
    "softcap": "soft_?cap",
    "window": "window|local",
    **dict.fromkeys(("lse", "lse_empty"), r"(\b|_)lse|logsumexp|residual|return_aux"),
    "dropout": r"drop|\bp:",
    "past": "past|cache|offset",
}


def takes(found, option):
    """Whether a signature has a word for the option."""
    return re.search(_NAMES[option], found.parameters) is not None
