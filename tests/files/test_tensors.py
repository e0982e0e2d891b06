"""Files with attention problems and results: what is read of them, and what is said of bad ones."""

import io
import json
import math
import re
import sys
import tracemalloc
import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refattn import naive
from refattn.files import contents, tensors
from refattn.files.tensors import ARRAYS, DTYPES, JUDGED, open_tensors
from tests.files.problems import IN_NPZ, SUFFIXES, bnhd, number_type, problem, save, to_safetensors


def expected(name, x, lead):
    """An array for each query head: shared heads are repeated, and all else broadcasts."""
    core = {"lse": 1, "sinks": 0}.get(name, 2)
    x = x.astype(bool if name == "mask" else np.float64)
    x = x.reshape((1,) * (core - x.ndim) + x.shape)
    if lead and x.ndim > core and x.shape[-core - 1] not in (1, lead[-1]):
        x = np.repeat(x, lead[-1] // x.shape[-core - 1], axis=-core - 1)
    return np.broadcast_to(x, (*lead, *x.shape[x.ndim - core :]))


def read_all(found, head):
    return {name: found.read(name, head) for name in found.shapes}


def check_read(found, arrays, lead):
    assert found.lead == lead
    assert set(found.shapes) == set(found.dtypes) == set(arrays)
    heads = list(found.heads())
    assert heads == list(np.ndindex(lead))
    for name, x in arrays.items():
        assert found.shapes[name] == x.shape
        whole = expected(name, x, lead)
        for head in heads:
            part = found.read(name, head)
            assert type(part) is np.ndarray
            assert part.flags.writeable
            assert part.dtype == (bool if name == "mask" else np.float64)
            np.testing.assert_array_equal(part, whole[head], strict=True)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("key_heads", [None, 3, 1])
@pytest.mark.parametrize(
    ("suffix", "dtype"), [("npz", x) for x in IN_NPZ] + [("safetensors", x) for x in DTYPES]
)
def test_every_dtype_and_layout(tmp_path, suffix, dtype, key_heads, layout):
    arrays = problem(dtype, key_heads=key_heads)
    path = save(tmp_path, suffix, arrays if layout == "bhnd" else bnhd(arrays))
    found = open_tensors(path, layout=layout)
    assert found.path == path
    assert (found.dtype, found.others) == (dtype, ())
    assert found.dtypes == dict.fromkeys(arrays, dtype) | {"mask": "bool"}
    check_read(found, arrays, (2, 6))


@given(
    lead=st.lists(st.integers(1, 3), max_size=3).map(tuple),
    groups=st.integers(1, 3),
    n=st.integers(1, 4),
    m=st.integers(0, 4),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_any_heads(tmp_path_factory, lead, groups, n, m, dtype, seed):
    key_heads = lead[-1] if lead else None
    lead = (*lead[:-1], lead[-1] * groups) if lead else lead
    arrays = problem(dtype, lead, key_heads, n, m, seed)
    if not lead:
        arrays |= {"mask": arrays["mask"].reshape(n, m), "bias": arrays["bias"][0]}
    found = open_tensors(save(tmp_path_factory.mktemp("any"), "safetensors", arrays))
    check_read(found, arrays, lead)


def test_heads_that_share_keys_are_those_of_attention(tmp_path):
    arrays = problem("float64", key_heads=2)
    q, k, v = (arrays[name] for name in "qkv")
    arrays["out"] = naive.softmax_attention(q, k, v)
    found = open_tensors(save(tmp_path, "npz", arrays))
    for head in found.heads():
        x = read_all(found, head)
        out = naive.softmax_attention(x["q"], x["k"], x["v"])
        np.testing.assert_allclose(out, x["out"], rtol=1e-12)
    assert [found.index("dk", (1, h)) for h in range(6)] == [(1, h // 3) for h in range(6)]
    places = {"dq": (1, 4), "mask": (1, 0), "bias": (), "omega": (4,), "sinks": (4,)}
    assert {name: found.index(name, (1, 4)) for name in places} == places


def test_leading_axes_broadcast(tmp_path):
    rng = np.random.default_rng(0)
    shapes = {"q": (1, 3, 2, 4), "k": (5, 1, 6, 4), "v": (6, 4), "out": (5, 3, 2, 4)}
    arrays = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    found = open_tensors(save(tmp_path, "safetensors", arrays))
    check_read(found, arrays, (5, 3))


def test_frequencies_of_each_query_are_refused(tmp_path):
    arrays = problem(lead=(2, 3))
    arrays["omega"] = np.zeros((3, 3, 7, 4), np.float32)
    path = save(tmp_path, "npz", arrays)
    fails(path, r"`omega` must broadcast to \(..., S, d\) = \(2, 3, 7, 4\), got .*\(3, 3, 7, 4\)")


def test_only_a_head_is_read_of_safetensors(tmp_path, monkeypatch):
    """A file of 1 GB, of which few bytes were ever written."""
    monkeypatch.setattr(contents, "_MUCH", 2e9)
    h, n, dv = 2000, 500, 500
    shapes = {"k": (h, 1, 1), "q": (h, n, 1), "v": (h, 1, dv), "out": (h, n, dv)}
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    path = tmp_path / "large.safetensors"
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
        file.seek(-2, io.SEEK_END)
        file.write(b"\x80\x3f")
    tracemalloc.start()
    try:
        out = open_tensors(path).read("out", (h - 1,))
        assert tracemalloc.get_traced_memory()[1] < 1e8
    finally:
        tracemalloc.stop()
    assert out[-1, -1] == out.sum() == 1


def test_torch_files(torch, tmp_path):
    save_file = pytest.importorskip("safetensors.torch").save_file
    rng = np.random.default_rng(0)
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float16):
        x = {n: torch.asarray(rng.standard_normal((2, 3, 4))) for n in ("q", "k", "v", "out")}
        x = {name: array.to(dtype) for name, array in x.items()}
        path = tmp_path / "file.safetensors"
        save_file(x | {"mask": torch.ones(3, 3, dtype=torch.bool)}, path, {"made": "by torch"})
        found = open_tensors(path)
        assert found.dtype == str(dtype).removeprefix("torch.")
        for head in found.heads():
            assert found.read("mask", head).all()
            for name, array in x.items():
                part = array[head].to(torch.float64).numpy()
                np.testing.assert_array_equal(found.read(name, head), part)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_what_is_required_and_what_else_is_there(tmp_path, suffix):
    arrays = {name: x for name, x in problem().items() if name not in JUDGED}
    check_read(open_tensors(save(tmp_path, suffix, arrays), required=()), arrays, (2, 6))
    open_tensors(save(tmp_path, suffix, arrays | {"lse": problem()["lse"]}))
    arrays = problem() | {"weights": np.ones(2, np.int32), "Q": np.ones((), bool)}
    found = open_tensors(save(tmp_path, suffix, arrays))
    assert found.others == ("Q", "weights")
    assert set(found.shapes) == set(ARRAYS)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_numbers_that_were_rounded(tmp_path, suffix):
    wide = problem("float32")
    arrays = {
        name: x if x.dtype == bool else x.astype(number_type("bfloat16")).astype(np.float32)
        for name, x in wide.items()
    }
    arrays["out"] = wide["out"]
    arrays["dq"][..., 0] = np.nan  # may be anything
    arrays["dk"] = arrays["dk"].astype(np.float64)
    arrays["dv"] = arrays["dv"].astype(np.float16)
    path = save(tmp_path, suffix, arrays)
    found = open_tensors(path, dtype="bfloat16")
    assert found.dtype == "bfloat16"
    own = {"out": "float32", "dv": "float16", "mask": "bool"}
    assert found.dtypes == dict.fromkeys(arrays, "bfloat16") | own
    check_read(found, arrays, (2, 6))
    assert open_tensors(path, dtype="float32").dtypes["dk"] == "float32"
    for dtype in (None, "float32"):
        assert open_tensors(path, dtype=dtype).dtype == "float32"
    arrays["k"][1, 2, 0, 3] = np.float32(0.1)
    message = (
        r"`k` must hold bfloat16 numbers only, as .*, got 0.10000000149\d* at index \(1, 2, 0, 3\)"
    )
    fails(save(tmp_path, suffix, arrays), message, dtype="bfloat16")
    message = r"`k` must hold bfloat16 numbers only, as .*, got 0.1\d* at index \(1, 0, 2, 3\)"
    fails(save(tmp_path, suffix, bnhd(arrays)), message, dtype="bfloat16", layout="bnhd")


@pytest.mark.parametrize("dtype", sorted(set(DTYPES) - {"float32", "float64"}))
@pytest.mark.parametrize("wide", ["float32", "float64"])
def test_all_numbers_of_a_type(tmp_path, dtype, wide):
    size = number_type(dtype).itemsize
    bits = np.arange(256**size, dtype=f"u{size}").view(number_type(dtype))
    with np.errstate(invalid="ignore"):  # of signalling NaNs
        numbers = bits[np.isfinite(bits)].astype(wide)[:, None]
    arrays = {"q": numbers, "k": numbers[:1], "v": numbers[:1], "lse": numbers[:, 0]}
    found = open_tensors(save(tmp_path, "npz", arrays), dtype=dtype)
    assert set(found.dtypes.values()) == {dtype}
    for value in (1e5, *np.nextafter(numbers[[3, 9, -2], 0], np.inf)):
        arrays["v"] = np.array([[value]], wide)
        message = f"`v` must hold {dtype} numbers only, as `dtype` declares, "
        message += f"got {float(value)!r} at index (0, 0)."
        fails(save(tmp_path, "npz", arrays), re.escape(message), dtype=dtype)


@pytest.mark.parametrize("order", ["C", "F"])
@given(at=st.lists(st.integers(0, 95), min_size=1, max_size=3))
def test_the_first_of_many_numbers(tmp_path_factory, order, at):
    q = np.ones((2, 4, 3, 4), np.float32)
    q.reshape(-1)[at] = 0.1
    arrays = {"q": q.copy(order), "k": q[0, 0] * 0, "v": q[0, 0] * 0, "lse": q[..., 0]}
    path = save(tmp_path_factory.mktemp("first"), "npz", arrays)
    first = tuple(int(i) for i in np.unravel_index(min(at), q.shape))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensors, "_BLOCK", 7)
        fails(path, re.escape(f"got 0.10000000149011612 at index {first}."), dtype="float16")
    open_tensors(path)


def fails(path, message, kind=ValueError, **options):
    with pytest.raises(kind) as info:
        open_tensors(path, **options)
    assert type(info.value) is kind
    assert "\n" not in str(info.value)
    assert re.search(message, str(info.value)), str(info.value)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            {"q": "query", "k": "key", "out": "o"},
            "rename `key` to `k`, `o` to `out`, `query` to `q`",
        ),
        (
            {"mask": "attention_mask", "lse": "softmax_lse"},
            "`attention_mask` to `mask`, `softmax_lse`",
        ),
        ({"lse": "window_size"}, "`window_size` of .* is not read: pass the option `window`"),
        ({"lse": "scale"}, "`scale` of .* is not read: pass the option `scale`"),
        ({"q": "qkv"}, "`qkv` of .* must be split into `q`, `k` and `v`"),
        ({"d_out": "dout"}, "rename `dout` to `d_out`"),
    ],
)
def test_what_others_call_our_arrays_is_refused(tmp_path, names, message):
    arrays = problem()
    fails(save(tmp_path, "npz", {names.get(x, x): y for x, y in arrays.items()}), message)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_dtypes_that_are_not_read(tmp_path, suffix):
    arrays = problem()
    known = "bfloat16, float16, float32, float64, float8_e4m3fn or float8_e5m2"
    for name in set(ARRAYS) - {"mask"}:
        path = save(tmp_path, suffix, arrays | {name: arrays[name].astype(np.int32)})
        code = "I32" if suffix == "safetensors" else "int32"
        fails(path, f"`{name}` must have dtype {known}, got {code}", TypeError)


def test_other_members_of_npz(tmp_path):
    def with_text(name, arrays):
        path = save(tmp_path, "npz", arrays)
        with zipfile.ZipFile(path, "a") as file:
            file.writestr(name, "some")
        return path

    objects = save(tmp_path, "npz", problem() | {"k": np.full(3, None)})
    fails(objects, "cannot read .*`k`: holds Python objects")
    assert open_tensors(with_text("notes.txt", problem())).others == ("notes.txt",)
    arrays = {name: x for name, x in problem().items() if name != "q"}
    fails(with_text("q", arrays), "cannot read .*`q` is not an array")
    swapped = {n: x.astype(x.dtype.newbyteorder(">")) for n, x in problem().items()}
    check_read(open_tensors(save(tmp_path, "npz", swapped)), problem(), (2, 6))


@pytest.mark.parametrize(
    ("suffix", "dtype"), [("npz", "float32"), *(("safetensors", x) for x in DTYPES)]
)
def test_numbers_that_are_not_finite(tmp_path, suffix, dtype):
    at = (1, 5, 2, 1)
    for name in ("q", "d_out"):
        for value in (np.nan, np.inf, -np.inf):
            arrays = problem(dtype)
            with np.errstate(invalid="ignore"):
                arrays[name][at] = value
            seen = "nan" if dtype == "float8_e4m3fn" else str(value)  # it has no infinity
            message = rf"`{name}` must be finite, got {seen} at index \(1, 5, 2, 1\)\."
            fails(save(tmp_path, suffix, arrays), message)
    arrays = problem(dtype)
    arrays["omega"][2, 1, 0] = np.nan
    fails(save(tmp_path, suffix, arrays), r"`omega` must be finite, got nan at index \(2, 1, 0\)")
    arrays = problem(dtype)
    for name in ("k", "v", "out", "lse", "dq", "dk", "dv"):  # of hidden keys, what is posed says
        arrays[name][1, 2] = np.nan
        arrays[name][1, 3] = -np.inf
        arrays[name][1, 4] = np.inf
    check_read(open_tensors(save(tmp_path, suffix, arrays)), arrays, (2, 6))


@pytest.mark.parametrize(("name", "hidden", "other"), [("sinks", 2, 3), ("bias", (0, 2), (1, 3))])
def test_minus_infinity_hides(tmp_path, name, hidden, other):
    arrays = problem()
    arrays[name][hidden] = -np.inf
    check_read(open_tensors(save(tmp_path, "npz", arrays)), arrays, (2, 6))
    for value in (np.nan, np.inf):
        arrays[name][other] = value
        place = re.escape(str(other if name == "bias" else (other,)))
        message = rf"`{name}` must be finite or -inf, got {value} at index {place}"
        fails(save(tmp_path, "npz", arrays), message)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e5m2"])
def test_signalling_nan(tmp_path, dtype):
    arrays = problem(dtype)
    size = arrays["q"].itemsize
    bits = {"bfloat16": 0x7FA0, "float16": 0x7D00, "float32": 0x7FA00000, "float8_e5m2": 0x7D}
    arrays["out"].reshape(-1).view(f"u{size}")[5] = bits[dtype]
    found = open_tensors(save(tmp_path, "safetensors", arrays), dtype=dtype)
    assert np.isnan(found.read("out", (0, 0))).sum() == 1
    arrays["q"].reshape(-1).view(f"u{size}")[5] = bits[dtype]
    message = r"`q` must be finite, got nan at index \(0, 0, 1, 1\)"
    fails(save(tmp_path, "safetensors", arrays), message)


def test_bad_files(tmp_path):
    whole = save(tmp_path, "npz", problem()).read_bytes()
    tensors = to_safetensors(problem())
    for name, content in {
        "text.npz": b"q,k,v\n1,2,3\n",
        "empty.npz": b"",
        "array.npz": b"\x93NUMPY\x01\x00",
        "text.safetensors": b"q,k,v\n1,2,3\n",
        "empty.safetensors": b"",
        "npz.safetensors": whole,
        "header.safetensors": tensors[:8] + b"?" + tensors[9:],
        "safetensors.npz": tensors,
    }.items():
        path = tmp_path / name
        path.write_bytes(content)
        fails(path, f"cannot read {re.escape(repr(str(path)))}: ")
    for suffix in SUFFIXES:
        fails(tmp_path / f"none.{suffix}", "cannot read .*No such file")
    corrupt = bytearray(whole)
    corrupt[len(whole) // 4] ^= 0xFF
    path.write_bytes(corrupt)
    fails(path, "cannot read .*Bad CRC-32")
    path = tmp_path / "file.safetensors"
    path.write_bytes(to_safetensors(problem(), {"q": "F128"}))
    fails(path, "cannot read .*F128")
    fails(tmp_path / "qkv.pt", "FILE must end in .npz or .safetensors, got .*qkv.pt")


@pytest.mark.parametrize("kind", ["npz", "compressed", "safetensors"])
def test_truncated_files(tmp_path, kind):
    arrays = problem(lead=(2,))
    path = tmp_path / ("file.npz" if kind != "safetensors" else "file.safetensors")
    if kind == "compressed":
        np.savez_compressed(path, **arrays)
    else:
        save(tmp_path, path.suffix[1:], arrays)
    whole = path.read_bytes()
    open_tensors(path)
    for length in range(0, len(whole), 50):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="cannot read"):
            open_tensors(path)


@given(suffix=st.sampled_from(SUFFIXES), place=st.floats(0, 1), byte=st.integers(0, 255))
def test_changed_bytes(tmp_path_factory, suffix, place, byte):
    path = save(tmp_path_factory.mktemp("bytes"), suffix, problem(lead=(2,)))
    content = bytearray(path.read_bytes())
    content[int(place * (len(content) - 1))] = byte
    path.write_bytes(content)
    try:
        found = open_tensors(path)
        read_all(found, next(found.heads()))
    except (TypeError, ValueError) as error:  # nothing else
        said = str(error)
    else:
        said = ""
    assert "\n" not in said


def test_missing_packages(tmp_path, monkeypatch):
    install = "needs `pip install 'refattn\\[cli\\]'`"
    path = save(tmp_path, "safetensors", problem("bfloat16"))
    single = save(tmp_path, "npz", problem())
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    fails(path, f"bfloat16 {install}")
    fails(single, f"float8_e5m2 {install}", dtype="float8_e5m2")
    check_read(open_tensors(single), problem(), (2, 6))
    check_read(open_tensors(save(tmp_path, "safetensors", problem())), problem(), (2, 6))
    monkeypatch.setitem(sys.modules, "safetensors", None)
    fails(path, f"reading .safetensors {install}")
