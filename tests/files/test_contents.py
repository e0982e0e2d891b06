"""Files that are refused for what they are, or say that they hold, before they are read."""

import io
import json
import os
import socket
import struct
import time
import zipfile

import numpy as np
import pytest

from refattn.arrays.words import printable
from refattn.files import contents
from refattn.files.arrays import load_qkv
from refattn.files.tensors import open_tensors
from tests.files.problems import save

X = np.ones((1, 3, 2), np.float32)
posix = pytest.mark.skipif(os.name != "posix", reason="files as of POSIX")


def refused(path, words):
    start = time.monotonic()
    with pytest.raises(ValueError, match=words) as info:
        load_qkv(path)
    assert time.monotonic() - start < 1
    assert str(info.value) == printable(str(info.value))


def header(shape, dtype="<f4"):
    file = io.BytesIO()
    described = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, described)
    return file.getvalue()


def archive(path, **members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(f"{name}.npy", content)
    return path


def array(x=X):
    file = io.BytesIO()
    np.save(file, x)
    return file.getvalue()


@posix
@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@pytest.mark.parametrize("kind", ["device", "pipe", "socket", "folder", "empty", "circle", "talks"])
def test_no_regular_file_is_opened(tmp_path, kind, suffix):
    here, path = tmp_path / "here", tmp_path / f"file{suffix}"
    match kind:
        case "device":
            here.symlink_to("/dev/zero")
        case "pipe":
            os.mkfifo(here)
        case "socket":
            with socket.socket(socket.AF_UNIX) as end:
                os.chdir(tmp_path)  # its name may not be long
                end.bind("here")
        case "folder":
            here.mkdir()
        case "empty":
            here.touch()
        case "circle":
            here.symlink_to(path)
        case "talks":
            here.symlink_to("/proc/self/status")
    path.symlink_to(here)
    words = {"empty": "is empty", "talks": "is empty", "circle": "cannot read"}
    refused(path, words.get(kind, f"a {kind}, not a regular file"))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (header((1 << 30, 1 << 20)), "`q` of shape .* has 0 bytes"),
        (header((1 << 62, 8)) + bytes(64), "`q` of shape .* has 64 bytes"),
        (header((-1, 8)) + bytes(32), "`q` of shape .* has 32 bytes"),
        (header((3, 2)) + bytes(25), "`q` of shape .* has 25 bytes"),
        (header((3,), "|O") + bytes(24), "`q`: holds Python objects"),
        (b"\x93NUMPY\x02\x00\xff\xff\xff\xff{}", "`q` has a header of 4294967295 bytes"),
        (b"\x93NUMPY\x09\x00\x02\x00\x00\x00{}", "`q` is of version 9"),
        (header((1,) * 73) + bytes(4), "`q` has 73 axes"),
        (b"0123456789ab", "`q` is not an array"),
        (b"", "`q` is not an array"),
    ],
)
def test_headers_that_lie(tmp_path, content, words):
    refused(archive(tmp_path / "x.npz", q=content, k=array(), v=array()), words)


def test_two_members_of_a_name(tmp_path):
    path = tmp_path / "x.npz"
    with zipfile.ZipFile(path, "w") as file:
        for name in ("q.npy", "k.npy", "q"):
            file.writestr(name, array())
    refused(path, "two arrays of the name 'q'")
    entry = {"dtype": "F32", "shape": [3, 2], "data_offsets": [0, 24]}
    words = '{"q":%s,"q":%s}' % ((json.dumps(entry),) * 2)
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(words)) + words.encode() + bytes(24))
    refused(path, "two entries of the name 'q'|not a complete")


def test_more_axes_than_arrays_have(tmp_path):
    words = json.dumps({"q": {"dtype": "F32", "shape": [1] * 73, "data_offsets": [0, 4]}})
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(words)) + words.encode() + bytes(4))
    refused(path, "`q` has 73 axes")


def test_arrays_larger_than_memory(tmp_path, monkeypatch):
    """What a small archive would take is known from its headers: nothing is unpacked."""
    path = archive(tmp_path / "x.npz", **dict.fromkeys("qkv", array(np.zeros((1, 2000, 64)))))
    assert path.stat().st_size < 30_000
    load_qkv(path)
    monkeypatch.setattr(contents, "free_memory", lambda: 3e6)
    refused(path, "`q`, `k`, `v` take 0.003072 GB, and 0.003 GB of memory are free")
    monkeypatch.undo()
    assert contents.free_memory() > 1e6


@pytest.mark.parametrize("kind", ["compressed", pytest.param("holes", marks=posix)])
def test_zeros_that_are_not_stored(tmp_path, monkeypatch, kind):
    """They may take any time to read, in memory or not."""
    monkeypatch.setattr(contents, "_MUCH", 1e6)
    x = np.zeros((1, 4000, 64))
    if kind == "compressed":
        path = archive(tmp_path / "x.npz", **dict.fromkeys("qkv", array(x)))
        refused(path, "`q`, `k`, `v` would take 0.006144 GB, of which 0.0[0-9]* MB are stored")
        np.savez(tmp_path / "whole.npz", **dict.fromkeys("qkv", x))
        load_qkv(tmp_path / "whole.npz")
        return
    path = tmp_path / "x.safetensors"
    words = json.dumps({"q": {"dtype": "F64", "shape": x.shape, "data_offsets": [0, x.nbytes]}})
    path.write_bytes(struct.pack("<Q", len(words)) + words.encode())
    os.truncate(path, path.stat().st_size + x.nbytes)
    refused(path, "it would take 0.00204[0-9]* GB")


STRANGE = "\0\x1b\x7f\x85\x9b\xad\u061c\u200b\u200e\u2028\u2029\u202e\u2066\ufeff\ufe0f\u3164\ue000"


@pytest.mark.parametrize("character", [*STRANGE, "\n", "\t"])
def test_names_are_shown_escaped(tmp_path, character):
    stored = save(tmp_path, "safetensors", {f"q{character}": X, "k": X, "v": X, "out": X})
    with pytest.raises(ValueError, match="has no q, but") as error:
        open_tensors(stored)
    assert str(error.value).isprintable()
    assert "q" + character.encode("unicode_escape").decode() in str(error.value)


def test_what_is_seen_stays():
    text = "Größe ω₁² · 日本 \xa0 é ≤\n\t|"
    assert printable(text) == text
