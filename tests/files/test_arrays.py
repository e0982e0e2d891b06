"""What `compare` and `profile` read of files."""

import numpy as np
import pytest

from refattn.files.arrays import load_qkv
from refattn.files.tensors import open_tensors
from tests.files.problems import number_type, problem, save, to_safetensors


def same(found, expected, dtype):
    assert list(found) == list("qkv")
    for name, x in found.items():
        np.testing.assert_array_equal(x, expected[name].astype(dtype), strict=True)


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_arrays_are_those_of_the_file_and_narrow_ones_are_widened(tmp_path, suffix, dtype):
    if (suffix, dtype) == ("npz", "bfloat16"):
        pytest.skip("an .npz cannot hold bfloat16")
    arrays = {name: x for name, x in problem(dtype).items() if name in "qkv"}
    path = save(tmp_path, suffix, arrays | {"other": np.ones(1, np.int32)})
    wide = "float32" if number_type(dtype).itemsize < 4 else dtype
    found, stored = load_qkv(path)
    assert stored == dtype
    same(found, arrays, wide)
    for other in ("float32", "float64"):
        same(load_qkv(path, other)[0], arrays, other)


@pytest.mark.parametrize("code", ["F8_E4M3", "F8_E5M2", "F8_E8M0", "F6_E2M3", "F4"])
def test_dtypes_that_numpy_does_not_have(tmp_path, code):
    pytest.importorskip("safetensors", minversion="0.7")
    size = {"F6_E2M3": 6, "F4": 4}.get(code, 8)  # bytes of 8 numbers
    arrays = dict.fromkeys("qkv", np.zeros(size, np.uint8))
    path = tmp_path / "qkv.safetensors"
    path.write_bytes(to_safetensors(arrays, dict.fromkeys("qkv", code), shape=[2, 4]))
    words = f"`q` must have a dtype that NumPy has, or bfloat16, got {code}: cast it"
    with pytest.raises(ValueError, match=words):
        load_qkv(path)
    if code not in ("F8_E4M3", "F8_E5M2"):
        with pytest.raises(TypeError, match=f"`q` must have dtype .*, got {code}"):
            open_tensors(path, required=())


@pytest.mark.skipif(np.dtype(np.longdouble).itemsize == 8, reason="float64 under another name")
def test_longdouble_must_be_cast(tmp_path):
    x = np.ones((7, 4), np.longdouble)
    path = save(tmp_path, "npz", dict.fromkeys("qkv", x))
    with pytest.raises(TypeError, match="`q` must have dtype float32 or float64, got float128"):
        load_qkv(path)
    with pytest.raises(TypeError, match=r"`q` must have dtype .*, got float128"):
        open_tensors(path, required=())
    same(load_qkv(path, "float64")[0], dict.fromkeys("qkv", x), "float64")
