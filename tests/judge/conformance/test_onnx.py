"""The node tests of the operator Attention that come with onnx, and ONNX Runtime on them."""

import warnings
from collections import namedtuple
from functools import cache

import numpy as np
import pytest

from refattn import softmax_attention
from tests.libraries import run_onnx

# A model of one node with what it takes and gives, by the names of the operator.
Node = namedtuple("Node", "name attributes given wanted model")


@cache
def nodes():
    """All of them, but for those in which the operator is expanded into others."""
    onnx = pytest.importorskip("onnx")
    loader = pytest.importorskip("onnx.backend.test.loader")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tests of other operators
        cases = loader.load_model_tests(kind="node")
    return tuple(
        node_of(onnx, case)
        for case in cases
        if case.name.startswith("test_attention_") and not case.name.endswith("_expanded")
    )


def node_of(onnx, case):
    (node,) = case.model.graph.node
    schema = onnx.defs.get_schema("Attention", case.model.opset_import[0].version, "")
    ((inputs, outputs),) = case.data_sets

    def named(slots, there, arrays):
        names = [slot.name for slot, x in zip(slots, there, strict=False) if x]
        return {name: np.asarray(x) for name, x in zip(names, arrays, strict=True)}

    attributes = {x.name: onnx.helper.get_attribute_value(x) for x in node.attribute}
    given = named(schema.inputs, node.input, inputs)
    wanted = named(schema.outputs, node.output, outputs)
    return Node(case.name, attributes, given, wanted, case.model)


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
    past = x["past_key"].shape[2] if "past_key" in x else 0
    if past:
        pairs = ((x["past_key"], k), (x["past_value"], v))
        k, v = (np.concatenate([behind.astype(float), new], 2) for behind, new in pairs)
    m = k.shape[2]
    outs, weights = [], []
    for i, length in enumerate(x.get("nonpad_kv_seqlen", np.full(len(q), m))):
        options = seen_by(node, i, length, length - q.shape[2], past)
        outs.append(softmax_attention(q[i], k[i, :, :length], v[i, :, :length], **options))
        shown = np.broadcast_to(np.eye(length), (*k.shape[1:2], length, length))
        of_keys = softmax_attention(q[i], k[i, :, :length], shown, **options)
        weights.append(np.pad(of_keys, ((0, 0), (0, 0), (0, m - length))))
    found = {"present_key": k, "present_value": v, "Y": unsplit(np.stack(outs), node.wanted["Y"])}
    if a.get("qk_matmul_output_mode") == 3:  # 0 to 2 are of scores
        found["qk_matmul_output"] = np.stack(weights)
    return found


def seen_by(node, i, length, last, past):
    """Options for one of a batch, of so many keys, whose last are those of the queries."""
    a, x = node.attributes, node.given
    options = {"scale": a.get("scale"), "softcap": a.get("softcap") or None}
    mask, n = x.get("attn_mask"), length - last
    if mask is not None:
        own = mask[i if len(mask) > 1 else 0] if mask.ndim == 4 else mask
        room = [(0, 0)] * (own.ndim - 1) + [(0, max(0, length - own.shape[-1]))]
        if own.dtype == bool:
            options["mask"] = np.pad(own, room)[..., :length]
        else:
            own = np.pad(own.astype(float), room, constant_values=-np.inf)
            options["bias"] = own[..., :length]
    sides = [a.get(f"{side}_window_size", -1) for side in ("left", "right")]
    own_key = last if "nonpad_kv_seqlen" in x else past  # of the first query
    if own_key == last:
        window = tuple(None if side < 0 else side for side in sides)
        return options | {"causal": bool(a.get("is_causal")), "window": window}
    ahead = np.arange(length) - np.arange(n)[:, None] - own_key
    left, right = (np.inf if side < 0 else side for side in sides)
    seen = (ahead >= -left) & (ahead <= right) & (not a.get("is_causal") or ahead <= 0)
    return options | {"mask": seen & options.get("mask", True)}


def allowed(node):
    """Rounding of the operator in the precision of its softmax, or of its arrays."""
    digits = {"float64": 53, "float32": 24, "float16": 11}.get(str(node.given["Q"].dtype), 8)
    q, k, v = (np.max(np.abs(node.given[name].astype(float))) for name in "QKV")
    return float(8 * 2.0**-digits * (1 + q * k) * max(v, 1.0))


def count(title, outputs):
    """Which tests agree, which do not, and of which scores are asked that no output shows."""
    words = {"agreed": [], "disagreed": [], "not expressible": [], "not run": []}
    for node in nodes():
        wanted, word = outputs(node), "agreed"
        if wanted is None:
            words["not run"].append(node.name)
            continue
        found = evaluated(node)
        off = [found[name] - np.asarray(x, float) for name, x in wanted.items() if name in found]
        if any(np.max(np.abs(x), initial=0.0) > allowed(node) for x in off):
            word = "disagreed"
        elif set(wanted) - set(found):
            word = "not expressible"
        words[word].append(node.name)
    print(f"\n{title}: " + ", ".join(f"{len(x)} {word}" for word, x in words.items()))
    assert not words["disagreed"], words["disagreed"]
    assert len(words["agreed"]) > 70
    return words


def test_node_tests_of_onnx():
    found = count(f"{len(nodes())} node tests of Attention", lambda node: node.wanted)
    assert not found["not run"]
    modes = {node.attributes.get("qk_matmul_output_mode", 0) for node in nodes()
             if node.name in found["not expressible"]}  # fmt: skip
    assert modes <= {0, 1, 2}


def runtime(node):
    """What ONNX Runtime gives for the model, if it has the operator for it."""
    try:
        return dict(zip(node.wanted, run_onnx(node.model, node.given.values()), strict=True))
    except Exception as error:
        if not type(error).__module__.startswith("onnxruntime"):  # whose own say what it lacks
            raise
        return None


def test_onnx_runtime_on_the_same():
    """It agrees where it has the operator."""
    pytest.importorskip("onnxruntime")
    count("ONNX Runtime", runtime)
