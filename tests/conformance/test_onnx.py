"""The node tests of the operator Attention that come with onnx, and ONNX Runtime on them."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest

from refattn import softmax_attention

SCORES = ("scaled", "capped", "biased")  # modes 0 to 2 of qk_matmul_output; 3 is of weights


class Node(NamedTuple):
    """One test: a model of one node with what it takes and gives, by the names of the operator."""

    name: str
    opset: int
    attributes: dict[str, Any]
    given: dict[str, np.ndarray]
    wanted: dict[str, np.ndarray]
    model: Any


@cache
def nodes():
    """All of them, but for those in which the operator is expanded into others."""
    onnx = pytest.importorskip("onnx")
    loader = pytest.importorskip("onnx.backend.test.loader")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tests of other operators
        cases = loader.load_model_tests(kind="node")
    found = []
    for case in cases:
        if not case.name.startswith("test_attention_") or case.name.endswith("_expanded"):
            continue
        (node,) = case.model.graph.node
        schema = onnx.defs.get_schema("Attention", case.model.opset_import[0].version, "")
        ((inputs, outputs),) = case.data_sets
        taken = [slot.name for slot, x in zip(schema.inputs, node.input, strict=False) if x]
        gives = [slot.name for slot, x in zip(schema.outputs, node.output, strict=False) if x]
        read = onnx.helper.get_attribute_value
        found.append(
            Node(
                case.name,
                case.model.opset_import[0].version,
                {x.name: read(x) for x in node.attribute},
                {name: np.asarray(x) for name, x in zip(taken, inputs, strict=True)},
                {name: np.asarray(x) for name, x in zip(gives, outputs, strict=True)},
                case.model,
            )
        )
    return tuple(found)


def split(x, heads):
    """(b, n, h d) as (b, h, n, d)."""
    return x if x.ndim == 4 else np.swapaxes(x.reshape(*x.shape[:2], heads, -1), 1, 2)


def unsplit(x, like):
    """(b, h, n, d) in as many axes as another array has."""
    return x if like.ndim == 4 else np.swapaxes(x, 1, 2).reshape(like.shape)


def evaluated(node):
    """The same by this package, in double precision: queries are the last, one batch at a time."""
    a, x = node.attributes, node.given
    q = split(x["Q"], a.get("q_num_heads", 0)).astype(float)
    k, v = (split(x[name], a.get("kv_num_heads", 0)).astype(float) for name in "KV")
    if "past_key" in x:
        k, v = (
            np.concatenate([x[behind].astype(float), new], 2)
            for behind, new in (("past_key", k), ("past_value", v))
        )
    found = {"present_key": k, "present_value": v}
    n, m = q.shape[2], k.shape[2]
    lengths = x.get("nonpad_kv_seqlen", np.full(len(q), m))
    past = x["past_key"].shape[2] if "past_key" in x else 0
    sides = [a.get(f"{side}_window_size", -1) for side in ("left", "right")]
    window = tuple(None if side < 0 else side for side in sides)
    mask = x.get("attn_mask")
    outs, weights = [], []
    for i, length in enumerate(lengths):
        options = {"scale": a.get("scale"), "softcap": a.get("softcap") or None}
        keys, values = k[i, :, :length], v[i, :, :length]
        if mask is not None:
            own = mask[i if len(mask) > 1 else 0] if mask.ndim == 4 else mask
            room = [(0, 0)] * (own.ndim - 1) + [(0, max(0, length - own.shape[-1]))]
            if own.dtype == bool:
                options["mask"] = np.pad(own, room)[..., :length]
            else:
                own = np.pad(own.astype(float), room, constant_values=-np.inf)
                options["bias"] = own[..., :length]
        own_key = length - n if "nonpad_kv_seqlen" in x else past  # of the first query
        if own_key != length - n:
            ahead = np.arange(length) - np.arange(n)[:, None] - own_key
            left, right = (np.inf if side is None else side for side in window)
            seen = (ahead >= -left) & (ahead <= right)
            seen &= ahead <= 0 if a.get("is_causal") else True
            options["mask"] = seen & options.get("mask", True)
        else:
            options |= {"causal": bool(a.get("is_causal")), "window": window}
        outs.append(softmax_attention(q[i], keys, values, **options))
        shown = np.broadcast_to(np.eye(length), (*keys.shape[:-1], length))
        weights.append(
            np.pad(
                softmax_attention(q[i], keys, shown, **options), ((0, 0), (0, 0), (0, m - length))
            )
        )
    found["Y"] = unsplit(np.stack(outs), node.wanted["Y"])
    if a.get("qk_matmul_output_mode") == 3:
        found["qk_matmul_output"] = np.stack(weights)
    return found


def allowed(node):
    """Rounding of the operator in the precision of its softmax, or of its arrays."""
    dtype = node.given["Q"].dtype
    digits = {"float64": 53, "float32": 24, "float16": 11}.get(str(dtype), 8)
    scores = np.max(np.abs(node.given["Q"].astype(float))) * np.max(
        np.abs(node.given["K"].astype(float))
    )
    size = np.max(np.abs(node.given["V"].astype(float)))
    return float(8 * 2.0**-digits * (1 + scores) * max(size, 1.0))


def agrees(node, found, wanted):
    """Whether all that is known of both is the same."""
    return all(
        np.max(np.abs(found[name] - np.asarray(x, float)), initial=0.0) <= allowed(node)
        for name, x in wanted.items()
        if name in found
    )


def count(title, outputs):
    """Which tests agree, which do not, and of which scores are asked that no output shows."""
    words = {"agreed": [], "disagreed": [], "not expressible": [], "not run": []}
    for node in nodes():
        wanted = outputs(node)
        if wanted is None:
            words["not run"].append(node.name)
            continue
        found = evaluated(node)
        if not agrees(node, found, wanted):
            words["disagreed"].append(node.name)
        elif set(wanted) - set(found):
            words["not expressible"].append(node.name)
        else:
            words["agreed"].append(node.name)
    print(f"\n{title}: " + ", ".join(f"{len(x)} {word}" for word, x in words.items()))
    return words


def test_node_tests_of_onnx():
    found = count(f"{len(nodes())} node tests of Attention", lambda node: node.wanted)
    assert not found["disagreed"], found["disagreed"]
    assert not found["not run"]
    modes = {node.attributes.get("qk_matmul_output_mode", 0) for node in nodes()
             if node.name in found["not expressible"]}  # fmt: skip
    assert modes <= set(range(len(SCORES)))  # scores themselves; whose results agree
    assert len(found["agreed"]) > 70


def runtime(node):
    """What ONNX Runtime gives for the model, if it has the operator for it."""
    ort = pytest.importorskip("onnxruntime")
    try:
        session = ort.InferenceSession(
            node.model.SerializeToString(), providers=["CPUExecutionProvider"]
        )
        names = [x.name for x in session.get_inputs()]
        values = dict(zip(names, node.given.values(), strict=True))
        return dict(zip(node.wanted, session.run(None, values), strict=True))
    except Exception as error:
        if not type(error).__module__.startswith("onnxruntime"):  # whose own say what it lacks
            raise
        return None


def test_onnx_runtime_on_the_same():
    """It agrees where it has the operator."""
    found = count("ONNX Runtime", runtime)
    assert not found["disagreed"], found["disagreed"]
    assert len(found["agreed"]) > 70
