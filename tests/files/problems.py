"""Files with every array that a problem may have, and what is said of files that are changed."""

import json

import numpy as np
import pytest

from refattn.files.arrays import load_qkv
from refattn.files.tensors import open_tensors

pytest.importorskip("safetensors")
ml_dtypes = pytest.importorskip("ml_dtypes")

CODES = {
    "bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "bool": "BOOL", "int32": "I32",
}  # fmt: skip
IN_NPZ = ("float16", "float32", "float64")
SUFFIXES = ("npz", "safetensors")


def number_type(name):
    return np.dtype(name if name in (*IN_NPZ, "bool") else getattr(ml_dtypes, name))


def to_safetensors(arrays, codes=None, shape=None):
    """The format as it is written by hand: tensors in any dtype, here in order of their names."""
    header, data = {}, b""
    for name, x in sorted(arrays.items()):
        raw = x.tobytes()
        code = (codes or {}).get(name) or CODES[x.dtype.name]
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": code, "shape": shape or x.shape, "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def save(folder, suffix, arrays):
    path = folder / f"file.{suffix}"
    if suffix == "npz":
        np.savez(path, **arrays)
    else:
        path.write_bytes(to_safetensors(arrays))
    return path


def problem(dtype="float32", lead=(2, 6), key_heads=None, n=3, m=5, seed=0):
    """Every array that may be in a file; the numbers of the results mean nothing."""
    rng = np.random.default_rng(seed)
    keys = lead if key_heads is None else (*lead[:-1], key_heads)
    d, dv, samples = 4, 2, 7
    shapes = {
        "q": (*lead, n, d), "k": (*keys, m, d), "v": (*keys, m, dv),
        "out": (*lead, n, dv), "lse": (*lead, n),
        "bias": (n, m), "sinks": lead[-1:], "omega": (*lead[-1:], samples, d),
        "d_out": (*lead, n, dv), "dq": (*lead, n, d), "dk": (*keys, m, d), "dv": (*keys, m, dv),
    }  # fmt: skip
    arrays = {
        k: np.asarray(rng.standard_normal(s)).astype(number_type(dtype)) for k, s in shapes.items()
    }
    return arrays | {"mask": rng.random((*lead[:-1], 1, n, m)) < 0.5}


def bnhd(arrays):
    """The same with heads after tokens."""
    axes = {name: (-2, -1) if name == "lse" else (-3, -2) for name in arrays}
    axes |= dict.fromkeys(("mask", "bias", "sinks", "omega"), (-1, -1))
    return {name: np.swapaxes(x, *axes[name]).copy() if x.ndim else x for name, x in arrays.items()}


def opened(folder, suffixes=SUFFIXES, read=open_tensors, base=None, options=None, **changes):
    """Read a file of each kind in which arrays are changed: all say the same, which is raised.

    An array is left out for None, and zeros for a shape.
    """
    said = set()
    for suffix in suffixes:
        arrays = dict(base or problem())
        for name, x in changes.items():
            arrays[name] = np.zeros(x, arrays[name].dtype) if isinstance(x, tuple) else x
        path = save(folder, suffix, {name: x for name, x in arrays.items() if x is not None})
        try:
            read(path, **(options or {}))
        except (TypeError, ValueError) as error:
            said.add((type(error), str(error).replace(path.name, "file")))
    ((kind, words),) = said
    assert "\n" not in words
    raise kind(words)


def loaded(folder, dtype=None, **changes):
    """The same of what `compare` and `profile` read, from an .npz."""
    options = {"required": "qkv", "dtype": dtype} | changes.pop("options", {})
    rng = np.random.default_rng(0)
    shapes = {"q": (2, 3, 6, 4), "k": (2, 3, 7, 4), "v": (2, 3, 7, 4)}
    base = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    return opened(folder, ("npz",), load_qkv, base, options, **changes)
