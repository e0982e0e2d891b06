"""Arrays in types of their own, as of an 8-bit cache: verdicts on calls and on files."""

from functools import partial

import numpy as np
import pytest

from refattn import verify
from refattn.files.tensors import open_tensors
from refattn.judge.rounding import PROFILES
from refattn.judge.rounding.formats import FORMATS, STORED
from refattn.judge.verification import reading
from tests.judge.rounding.rounded import dump_gradients, flash, made, of_heads, online

ml_dtypes = pytest.importorskip("ml_dtypes")
save_file = pytest.importorskip("safetensors.numpy").save_file

f32 = np.float32
M = 96  # keys
SHARES = {  # axes of the largest number, and of the scale in files: of heads, tokens, blocks, ...
    "one": ((0, 1, 2), ()),
    "heads": ((1, 2), (2,)),
    "tokens": ((2,), (2, M)),
    "columns": ((1,), (2, 1, 16)),
    "blocks": (None, (2, 8)),
}


def quantised(x, dtype, share):
    """Numbers of 8 bits with their scale, which has the axes that `share` says."""
    to, (axes, shape) = STORED[dtype], SHARES[share]
    largest = np.abs(x)
    if axes is None:
        largest = largest.reshape(2, 8, -1).max(-1)
    else:
        largest = largest.max(axes, keepdims=True)
    scale = (largest / (127 if dtype == "int8" else to.largest)).astype(f32).reshape(shape)
    whole = np.repeat(scale, M // 8, 1)[..., None] if axes is None else scale
    if share in ("heads", "tokens"):
        whole = scale.reshape(*scale.shape, *[1] * (3 - scale.ndim))
    return to.round(x / whole.astype(float)), scale, whole.astype(float)


def kernel(*args, **options):
    return of_heads(*args, **options)[0]


def stored(x, dtype):
    return np.asarray(x).astype(np.int8 if dtype == "int8" else getattr(ml_dtypes, dtype, dtype))


def cache(q_dtype, dtype, share, *, name="flash", cast=False, wrong=1.0, seed=0):
    """A kernel that reads keys and values of 8 bits, with one scale that is off."""
    rng = np.random.default_rng(seed)
    q = FORMATS[q_dtype].round(rng.standard_normal((2, 48, 16)))
    given, read = {}, {}
    for x in "kv":
        numbers, scale, whole = quantised(rng.standard_normal((2, M, 16)), dtype, share)
        given |= {x: stored(numbers, dtype), f"{x}_scale": scale}
        read[x] = numbers * whole
        if cast:
            read[x] = FORMATS[q_dtype].round(read[x])
    out = kernel(name, q, wrong * read["k"], read["v"], q_dtype)
    return given | {"q": stored(q, q_dtype), "out": stored(out, q_dtype)}


CACHES = [
    ("bfloat16", "int8", "tokens"), ("bfloat16", "int8", "blocks"), ("float16", "int8", "columns"),
    ("bfloat16", "float8_e4m3fn", "one"), ("bfloat16", "float8_e4m3fn", "heads"),
    ("float16", "float8_e5m2", "tokens"), ("float32", "int8", "heads"),
]  # fmt: skip
of_caches = pytest.mark.parametrize("types", CACHES, ids="-".join)


@pytest.mark.sweep(8)
@of_caches
@pytest.mark.parametrize("cast", [False, True])
def test_right_kernels_with_a_cache_of_8_bits(types, cast):
    """Products of the numbers as they are, or rounded to the type of q first."""
    name = "math" if types[0] == "float32" else "flash"
    given = cache(*types, name=name, cast=cast)
    found = verify(**given)
    assert found.verdict == "PASS", str(found)
    assert found.dtype == types[0]
    right = f"{name}-cast" if cast and name == "flash" else name
    assert found.profile in (name, right)
    # In float32 terms are summed by lanes of any number, so that errors may be smaller.
    least = 0.8 if types[0] != "float32" else 0.5
    assert least < verify(**given, profile=right).z.rms < 1.1


@pytest.mark.sweep(12)
@of_caches
@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.usefixtures("verdict_alone")
def test_wrong_kernels_with_a_cache_of_8_bits(types, cast):
    """The scale of keys 2 % too large: the scale of scores is; or one that was left out."""
    assert verify(**cache(*types, cast=cast, wrong=1.02)).verdict == "FAIL"
    for lost in ("k_scale", "v_scale"):  # without it results may be beyond all bounds
        assert verify(**cache(*types, cast=cast) | {lost: None}).verdict != "PASS"


def wide(name, size, mean, wrong=1.0):
    """Narrow inputs, and a kernel that computes and stores in float32."""
    rng, to = np.random.default_rng(5), FORMATS["bfloat16"]
    q, k, v = (to.round(rng.standard_normal((1, x, 16))) for x in (12, 1000, 1000))
    q, v = to.round(size * q), to.round(v + mean)
    out, lse = of_heads(name, q, k, v, "float32")
    narrow = {x: stored(y, "bfloat16") for x, y in zip("qkv", (q, k, v), strict=True)}
    return narrow | {"out": (wrong * out).astype(f32), "lse": lse}


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", ["serial", online])
@pytest.mark.parametrize(("size", "mean"), [(8.0, 0.0), (1.0, 2.0)])
def test_a_wide_output_of_narrow_inputs_is_tried_as_sums_in_float32(name, size, mean):
    """One key after the other; where few keys have the weight, many are too small to be added."""
    found = verify(**wide(name, size, mean))
    assert (found.verdict, found.dtype) == ("PASS", "bfloat16")
    assert found.profile in ("math", "recomputed", "serial")
    wrong = verify(**wide(name, size, mean, 1 + 1e-5), profile=["math", "recomputed", "serial"])
    assert wrong.verdict == "FAIL"


@pytest.mark.parametrize("name", [x for x in PROFILES if x.endswith("-cast")])
def test_every_profile_of_a_cache_has_a_kernel(name):
    plain = name.removesuffix("-cast")
    assert PROFILES[name] == PROFILES[plain]._replace(inputs="storage")
    found = verify(**cache("bfloat16", "int8", "tokens", name=plain, cast=True), profile=name)
    assert (found.verdict, found.profile) == ("PASS", name)
    assert 0.85 < found.z.rms < 1.15


@pytest.mark.sweep(6)
@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
@of_caches
def test_files_say_the_same(tmp_path, suffix, types):
    """Scales are read; an .npz has float32 in place of what it cannot hold."""
    from refattn.cli.verify import _judge_file

    given, expected = cache(*types), verify(**cache(*types))
    path = tmp_path / f"file.{suffix}"
    dtype = None
    if suffix == "npz":
        wide = {x: y.astype(f32) if y.dtype.kind in "Vf" else y for x, y in given.items()}
        np.savez(path, **wide)
        dtype = {x: types[1] for x in "kv" if types[1] != "int8"} | {"q": types[0], "out": types[0]}
    else:
        save_file({x: np.ascontiguousarray(y) for x, y in given.items()}, path)
    options = {"estimator": "softmax", "scale": None, "causal": False, "window": None}
    found = _judge_file(
        path, dtype=dtype, layout="bhnd", profile=None, alpha=1e-6, softcap=None, **options
    )
    assert found.tensors.dtypes["k"] == types[1]
    assert found.verdict.verdict == expected.verdict
    assert found.verdict.z == expected.z


@pytest.mark.parametrize("as_float32", [True, False])
def test_a_cache_that_is_given_in_float32(as_float32):
    """Numbers times scales in float32, beside q and an output in bfloat16."""
    given = cache("bfloat16", "int8", "tokens")
    for x in "kv":
        given[x] = given[x].astype(f32) * given.pop(f"{x}_scale")[..., None]
    if as_float32:  # all numbers of q are of the type of out
        given["q"] = given["q"].astype(f32)
    found = verify(**given)
    assert (found.verdict, found.profile, found.dtype) == ("PASS", "flash", "bfloat16")


WIDE = pytest.mark.parametrize("wide", [f32, pytest.param(np.float64, marks=pytest.mark.long)])
NARROW = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])


def wide_arrays(dtype, wide):
    """Arrays of a wide type that hold numbers of a narrow one."""
    rng, to = np.random.default_rng(1), FORMATS[dtype].round
    q, k, v = (to(x) for x in rng.standard_normal((3, 2, M, 16)))
    arrays = {"q": q, "k": k, "v": v, "out": kernel("flash", q, k, v, dtype)}
    return {x: y.astype(wide) for x, y in arrays.items()}


@pytest.mark.sweep(2)
@WIDE
@NARROW
@pytest.mark.parametrize("stray", ["none", "q", "k", "v", "out"])
@pytest.mark.usefixtures("verdict_alone")
def test_wide_arrays_that_hold_narrow_numbers_are_of_the_narrow_type(tmp_path, dtype, wide, stray):
    """Unless the type is given, or one of them holds a number of the wide type."""
    given, own = wide_arrays(dtype, wide), np.dtype(wide).name
    if stray != "none":
        given[stray] = given[stray] * wide(1.01)
    np.savez(tmp_path / "file.npz", **given)
    tensors, found = open_tensors(tmp_path / "file.npz"), verify(**given)
    assert {*tensors.stored.values()} == {own}
    if stray != "none":
        assert tensors.dtype == found.dtype == own
        return
    assert {*tensors.dtypes.values()} == {tensors.dtype} == {dtype}
    assert (found.verdict, found.profile, found.dtype) == ("PASS", "flash", dtype)
    assert verify(**given, dtype=own).dtype == own


@pytest.mark.usefixtures("verdict_alone")
def test_queries_in_float32_beside_keys_in_float16():
    """They may be rounded to float16 as well, which is what TF32 keeps of them."""
    rng, to = np.random.default_rng(1), FORMATS["float16"].round
    q = rng.standard_normal((2, 48, 16)).astype(f32).astype(float)
    k, v = (to(x) for x in rng.standard_normal((2, 2, M, 16)))
    given = {"q": q.astype(f32), "k": k.astype(np.float16), "v": v.astype(np.float16)}
    found = verify(**given, out=kernel("math", q, k, v, "float32").astype(f32))
    assert (found.verdict, found.profile) == ("PASS", "math")
    rounded = kernel(partial(flash, out="float32"), to(q), k, v, "float16")
    assert verify(**given, out=rounded.astype(f32)).profile == "tf32"
    assert verify(**given, out=(rounded * 1.001).astype(f32)).verdict == "FAIL"
    half = verify(**given, out=kernel("math", q, k, v, "float16").astype(np.float16))
    assert (half.verdict, half.profile) == ("PASS", "math")


@pytest.mark.parametrize("weights", ["float8_e4m3fn", "bfloat16"])
@pytest.mark.usefixtures("verdict_alone")
def test_queries_in_8_bits_and_the_type_of_weights(weights):
    """Weights are rounded to 8 bits by default, as queries are, or to what is said."""
    rng = np.random.default_rng(2)
    numbers, scales, whole = {}, {}, {}
    for x, m in (("q", M), ("k", M), ("v", M)):
        drawn = rng.standard_normal((2, m, 16))
        numbers[x], scales[f"{x}_scale"], whole[x] = quantised(drawn, "float8_e4m3fn", "heads")
    read = [numbers[x] * whole[x] for x in "qkv"]
    name = "fp8-weights" if weights == "float8_e4m3fn" else "flash"
    out = stored(kernel(name, *read, "bfloat16"), "bfloat16")
    given = {x: stored(y, "float8_e4m3fn") for x, y in numbers.items()} | scales | {"out": out}
    said = {} if weights == "float8_e4m3fn" else {"dtype": {"weights": weights}}
    found = verify(**given, **said)
    assert found.verdict != "FAIL"
    assert (found.profile, found.dtype) == ("flash", weights)
    other = {"weights": "bfloat16" if weights == "float8_e4m3fn" else "float8_e4m3fn"}
    rms = verify(**given, dtype=other, profile="flash").z.rms
    assert not 0.5 < rms < 2


def test_integers_in_queries_take_the_type_of_values():
    rng = np.random.default_rng(3)
    v = FORMATS["float16"].round(rng.standard_normal((2, M, 16)))
    q, q_scale, of_q = quantised(rng.standard_normal((2, M, 16)), "int8", "blocks")
    k, k_scale, of_k = quantised(rng.standard_normal((2, M, 16)), "int8", "tokens")
    out = kernel("flash", q * of_q, k * of_k, v, "float16")
    given = {"q": stored(q, "int8"), "k": stored(k, "int8"), "v": stored(v, "float16")}
    given |= {"q_scale": q_scale, "k_scale": k_scale, "out": stored(out, "float16")}
    found = verify(**given)
    assert (found.verdict, found.profile, found.dtype) == ("PASS", "flash", "float16")


@pytest.mark.long
@pytest.mark.parametrize("cast", [False, True])
def test_gradients_with_a_cache(cast):
    """As of a fine-tuned adapter beside frozen keys in 8 bits."""
    given = cache("bfloat16", "int8", "tokens")
    q = given["q"].astype(float)
    k, v = (given[x].astype(float) * given[f"{x}_scale"][..., None].astype(float) for x in "kv")
    if cast:
        k, v = (FORMATS["bfloat16"].round(x) for x in (k, v))
    g = FORMATS["bfloat16"].round(np.random.default_rng(4).standard_normal(q.shape))
    found = made("flash", q, k, v, g, "bfloat16") | {"d_out": g}
    verdict = verify(**given | {x: stored(y, "bfloat16") for x, y in found.items()})
    assert {x.verdict for x in verdict.parts.values()} == {"PASS"}


def test_types_by_array_in_files(tmp_path):
    given = cache("bfloat16", "int8", "tokens")
    path = tmp_path / "file.safetensors"
    save_file({x: np.ascontiguousarray(y) for x, y in given.items()}, path)
    found = open_tensors(path, dtype={"weights": "float16"})
    assert found.dtype == "float16"
    assert found.dtypes == {"q": "bfloat16", "k": "int8", "v": "int8", "out": "bfloat16"}
    exact = given["k"][1].astype(float) * given["k_scale"][1, :, None]
    np.testing.assert_array_equal(found.read("k", (1,)), exact)
    with pytest.raises(
        ValueError, match=r"`out` must hold float8_e5m2 numbers only, as `dtype` declares, got"
    ):
        open_tensors(path, dtype={"out": "float8_e5m2"})


# --- outputs in a wider type than their numbers --------------------------------------------------


def in_float32(stray=(), factor=1.0, size=1.0, dtype="bfloat16"):
    """A fused kernel whose output is stored in float32, some rows of it never rounded."""
    rng, to = np.random.default_rng(3), FORMATS[dtype].round
    q, k, v = (to(rng.standard_normal((2, 128, 32))) for _ in range(3))
    q = to(size * q)
    out, exact = (kernel("flash", q, k, v, x) for x in (dtype, "float32"))
    if size > 1:  # it was not rounded at all
        out = exact
    out[1, list(stray)] = factor * exact[1, list(stray)]
    narrow = {x: stored(y, dtype) for x, y in zip("qkv", (q, k, v), strict=True)}
    return narrow | {"out": out.astype(f32)}


def judge_both(given, tmp_path):
    """Judge a call, and a file in which q, k and v have their own type."""
    save_file(given, tmp_path / "a.safetensors")
    tensors = open_tensors(tmp_path / "a.safetensors")
    part = reading.read_parts(tensors, reading.pose_tensors(tensors))["out"]
    found = verify(**given)
    assert part.numbers.out_dtype == found.out_dtype
    assert part.numbers.remark in (*found.remarks, "")
    return found


@pytest.mark.parametrize("all_wide", [False, True])
@pytest.mark.parametrize(
    ("dtype", "factor"),
    [("float16", 1.0), ("bfloat16", 1.0), ("bfloat16", 1 + 2.0**-18), ("bfloat16", 1 + 2.0**-6)],
)
def test_rows_that_were_not_rounded_are_named(dtype, factor, all_wide, tmp_path):
    """If their numbers are right they are no reason to fail, but another type than all others.

    As float32, the roundings of all other rows would be errors of a looser profile. Other arrays
    may be of float32, too, and hold the numbers of the narrow type.
    """
    given = in_float32(range(70, 86), factor, dtype=dtype)
    if all_wide:
        given |= {x: np.asarray(given[x], f32) for x in "qkv"}
    found = judge_both(given, tmp_path)
    right = factor < 1.001
    assert (found.verdict, found.out_dtype) == ("PASS" if right else "FAIL", dtype)
    words = f"head 1, queries 70 to 85: numbers that {dtype} does not have; all other rows"
    assert any(x.startswith(words) for x in found.remarks)
    assert judge_both(in_float32(dtype=dtype), tmp_path).remarks == []


@pytest.mark.parametrize("size", [1.0, 1e4])
def test_an_output_that_was_not_rounded_has_its_own_type(size, tmp_path):
    """Where scores are large, nearly all rows are those of one key: numbers of a narrow type."""
    given = in_float32(range(128) if size == 1 else (), size=size)
    given["out"][0] = given["out"][1]
    for name in "qkv":
        given[name][0] = given[name][1]
    held = np.all(FORMATS["bfloat16"].holds(given["out"]), -1)
    assert np.mean(held) > 7 / 8 if size > 1 else not np.any(held)
    assert not np.all(held)
    found = judge_both(given, tmp_path)
    assert (found.out_dtype, found.verdict == "FAIL") == ("float32", False)
    assert not any("does not have" in x for x in found.remarks)


def test_rows_of_a_gradient_that_were_not_rounded_are_named():
    rng = np.random.default_rng(4)
    q, k, v, g = (FORMATS["bfloat16"].round(rng.standard_normal((2, 40, 16))) for _ in range(4))
    given = dump_gradients("flash", q, k, v, g, "bfloat16")
    given["dv"][1, 3:5] *= 1 + 2.0**-18
    narrow = {x: stored(given[x], "bfloat16") for x in ("q", "k", "v", "d_out")}
    found = verify(**given | narrow | {"dtype": None}).parts["dv"]
    assert (found.verdict, found.out_dtype) == ("PASS", "bfloat16")
    assert found.remarks[0].startswith("head 1, keys 3 to 4: numbers that bfloat16 does not have")
    assert found.remarks[0].endswith("so dv is judged as bfloat16")


E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def micro_cache(x, size, power):
    """Numbers of E2M1 in blocks of columns with scales: powers of 2 (MXFP4) or E4M3 (NVFP4)."""
    tiles = x.reshape(*x.shape[:-1], -1, size)
    scale = np.abs(tiles).max(-1) / 6
    scale = 2 ** np.ceil(np.log2(scale)) if power else FORMATS["float8_e4m3fn"].round(scale)
    nearest = np.abs(np.abs(tiles / scale[..., None])[..., None] - E2M1).argmin(-1)
    return (np.sign(tiles) * E2M1[nearest]).reshape(x.shape), scale


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("size", "power"), [(8, True), (4, False)])
def test_caches_of_4_bits(size, power):
    """A byte has two numbers: a kernel may exchange them, or use the scale of another block."""
    rng = np.random.default_rng(size)
    q = FORMATS["bfloat16"].round(rng.standard_normal((2, 48, 16)))
    (k, k_scale), (v, v_scale) = (
        micro_cache(rng.standard_normal((2, M, 16)), size, power) for _ in "kv"
    )
    given = {"k": stored(k, "float8_e4m3fn"), "v": stored(v, "float8_e4m3fn")}
    given |= {"q": stored(q, "bfloat16"), "k_scale": k_scale, "v_scale": v_scale}

    def answer(k, k_scale):
        read = k * k_scale.repeat(size, -1), v * v_scale.repeat(size, -1)
        out = kernel("flash", q, *read, "bfloat16")
        return verify(**given, out=stored(out, "bfloat16"))

    assert answer(k, k_scale).verdict == "PASS"
    exchanged = k.reshape(2, M, 8, 2)[..., ::-1].reshape(k.shape)
    words = "keys have columns 2 i and 2 i + 1 exchanged, as by the order of two numbers in a byte"
    assert answer(exchanged, k_scale).suspects[0].text == f"agrees if {words}"
    words = "k_scale is that of the next block of columns"
    assert answer(k, np.roll(k_scale, -1, -1)).suspects[0].text == f"agrees if {words}"
