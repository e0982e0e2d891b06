"""Packed and paged sequences in a call are judged as those in a file are."""

import numpy as np
import pytest

import refattn
from refattn import packed
from refattn.files.tensors import open_tensors
from refattn.judge.verification.judging import judge_all
from refattn.judge.verification.reading import pose_tensors, read_parts
from tests.judge.rounding.rounded import FORMATS

bf16 = FORMATS["bfloat16"].round
OPTIONS = {"plain": {}, "causal": {"causal": True}, "window": {"causal": True, "window": (5, 0)}}
OFFSETS = np.array([0, 3, 3, 12]), np.array([0, 4, 6, 21])  # one has no queries
TABLE, LENGTHS = np.array([[5, 0, 9], [2, 7, 3]]), np.array([7, 11])  # pages of 4; 9 is not there


def attend(q, k, v, **options):
    """A fused kernel in bfloat16, with its log normalisers."""
    out, lse = refattn.attend(q, k, v, scale=q.shape[-1] ** -0.5, **options)
    return bf16(out), lse


def draw(layout, rng):
    """Grouped heads: 4 of queries to 2 of keys."""
    normal = rng.standard_normal
    if layout == "packed":
        q, k, v = (bf16(normal((x, h, 16))) for x, h in ((12, 4), (21, 2), (21, 2)))
        return q, k, v, dict(zip(("cu_seqlens_q", "cu_seqlens_k"), OFFSETS, strict=True))
    q, k, v = bf16(normal((2, 3, 4, 16))), *(bf16(normal((8, 4, 2, 16))) for _ in "kv")
    return q, k, v, {"block_table": TABLE, "cache_seqlens": LENGTHS}


def run(layout, wrong, sinks=None, **options):
    """Return the arrays of a call; a wrong kernel reads another page, or other offsets."""
    q, k, v, given = draw(layout, np.random.default_rng(3))
    options |= {} if sinks is None else {"sinks": sinks}
    if layout == "packed":
        of_q, of_k = given.values()
        of_k = of_k + (wrong == "wrong") * np.array([0, 1, 0, 0])
        out, lse = packed.varlen(attend, q, k, v, q_offsets=of_q, k_offsets=of_k, **options)
    else:
        table = np.where(TABLE == 7, 6, TABLE) if wrong == "wrong" else TABLE
        out, lse = packed.paged(
            attend, q, k, v, block_table=table, lengths=given["cache_seqlens"], **options
        )
    return {"q": q, "k": k, "v": v, "out": out, "lse": lse, **given}


def judge_file(path, arrays, **options):
    np.savez(path, **arrays)
    tensors = open_tensors(path, dtype="bfloat16", required=())
    problem = pose_tensors(tensors, **options)
    return judge_all(read_parts(tensors, problem), "bfloat16", None, 1e-6)


@pytest.mark.sweep(6)
@pytest.mark.long("wrong")
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("wrong", ["right", "wrong"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("layout", ["packed", "paged"])
def test_a_call_is_judged_as_a_file_is(tmp_path, layout, options, wrong, sinks):
    sinks = {"sinks": np.array([0.5, -1.0, 2.0, 0.0])} if sinks else {}
    arrays = run(layout, wrong, **sinks, **OPTIONS[options]) | sinks
    found = refattn.verify(**arrays, dtype="bfloat16", **OPTIONS[options])
    other = judge_file(tmp_path / "a.npz", arrays, **OPTIONS[options])
    assert found.verdict == other.verdict == ("FAIL" if wrong == "wrong" else "PASS")
    assert (found.z, found.place, found.tests) == (other.z, other.place, other.tests)
    assert [x.text for x in found.suspects] == [x.text for x in other.suspects]
    assert found.suspects[0].name == "convention" if wrong == "wrong" else found.profile


@pytest.mark.long
@pytest.mark.parametrize("library", ["torch", "jax.numpy"])
def test_a_paged_cache_of_8_bits_in_other_libraries(library):
    to, arrays = pytest.importorskip(library), run("paged", "right")
    numbers = {x: to.asarray(np.float32(arrays[x])) for x in "qkv"}
    cast = (lambda x, d: x.to(getattr(to, d))) if library == "torch" else lambda x, d: x.astype(d)
    kept = {x: cast(numbers[x], "float8_e4m3fn") for x in "kv"}
    k, v = (np.asarray(cast(kept[x], "float32"), float) for x in "kv")
    scale = {"k_scale": 0.5, "v_scale": np.array([2.0, 0.25])}
    k, v, pages = 0.5 * k, v * scale["v_scale"][:, None], {"lengths": LENGTHS}
    out, lse = packed.paged(attend, arrays["q"], k, v, block_table=TABLE, **pages)
    given = {**numbers, **kept, "lse": lse, "block_table": TABLE.tolist(), **scale}
    given |= {"cache_seqlens": LENGTHS, "dtype": "bfloat16", "explain": False}
    assert refattn.verify(**given, out=out).verdict == "PASS"
    assert refattn.verify(**given, out=out[::-1]).verdict == "FAIL"


@pytest.mark.long("axes1", "axes2", "axes3")
@pytest.mark.parametrize("axes", [(0, 2), (0, 1, 2), (0, 1, 2, 3), (0, 2, 3)])
def test_scales_of_pages_are_in_order_with_them(tmp_path, axes):
    """In a call and in a file, of each page and head, or of tokens or columns, too."""
    rng = np.random.default_rng(4)
    q, k, v, given = draw("paged", rng)
    shape = [x if at in axes else 1 for at, x in enumerate((8, 4, 2, 16))]
    scales = {x: 2.0 ** rng.integers(-2, 3, shape) for x in "kv"}
    pages = {"block_table": TABLE, "lengths": LENGTHS}
    out, lse = packed.paged(attend, q, k * scales["k"], v * scales["v"], **pages)
    plain = {x: y[:, 0, :, 0] if axes == (0, 2) else y for x, y in scales.items()}
    arrays = {"q": q, "k": k, "v": v, "out": out, "lse": lse, **given}
    arrays |= {f"{x}_scale": y for x, y in plain.items()}
    assert refattn.verify(**arrays, dtype="bfloat16", explain=False).verdict == "PASS"
    assert judge_file(tmp_path / "a.npz", arrays).verdict == "PASS"
    arrays["k_scale"] = arrays["k_scale"][::-1]
    assert refattn.verify(**arrays, dtype="bfloat16", explain=False).verdict == "FAIL"


def test_scales_of_as_many_pages_as_sequences_are_refused():
    """If it is not told by all axes of the pages which of them these are of."""
    q, k, v, given = draw("paged", np.random.default_rng(4))
    arrays = {"q": q, "k": k[:2], "v": v[:2], "out": q, **given}
    arrays |= {"block_table": TABLE % 2, "dtype": "bfloat16", "explain": False}
    for shape in ((2, 2), (2, 1, 2, 1)):
        with pytest.raises(ValueError, match="may be of 2 blocks or of as many sequences"):
            refattn.verify(**arrays, k_scale=np.ones(shape))
    assert refattn.verify(**arrays, k_scale=np.ones((2, 4, 2, 1))).verdict == "FAIL"


@pytest.mark.sweep(2)
@pytest.mark.parametrize("axes", [(0, 2), (0, 1, 2)])
def test_heads_before_tokens_in_pages(tmp_path, axes):
    """In a call and in a file; where only this layout fits it is named, or else it is tried."""
    rng = np.random.default_rng(4)
    q, k, v, given = draw("paged", rng)
    shape = [x if at in axes else 1 for at, x in enumerate((8, 4, 2, 1))]
    scale = 2.0 ** rng.integers(-2, 3, shape)
    out, _ = packed.paged(attend, q, k * scale, v, block_table=TABLE, lengths=LENGTHS)
    arrays = {"q": q, "k": k.swapaxes(1, 2), "v": v.swapaxes(1, 2), "out": out, **given}
    arrays["k_scale"] = scale[:, 0, :, 0] if axes == (0, 2) else scale.swapaxes(1, 2)
    options = {"dtype": "bfloat16", "explain": False}
    assert refattn.verify(**arrays, layout="hnd", **options).verdict == "PASS"
    np.savez(tmp_path / "a.npz", **arrays)
    tensors = open_tensors(tmp_path / "a.npz", dtype="bfloat16", required=(), layout="hnd")
    pages = np.concatenate((k * scale)[TABLE[0, :2]])  # of 7 keys, the last is of no sequence
    np.testing.assert_array_equal(tensors.read("k", (0, 0))[:7], pages[:7, 0])
    with pytest.raises(ValueError, match="which fits layout hnd"):  # pages of 2 are too short
        refattn.verify(**arrays, **options)
    arrays |= {"k": k, "v": v, "k_scale": scale[:, 0, :, 0] if axes == (0, 2) else scale}
    with pytest.raises(ValueError, match="which fits layout bhnd"):
        refattn.verify(**arrays, **options, layout="hnd")
    with pytest.raises(ValueError, match="`layout` hnd must come with `block_table`"):
        refattn.verify(q=q, k=q, v=q, out=q, layout="hnd")


@pytest.mark.long
def test_pages_that_fit_both_layouts_are_tried_in_the_other():
    q, k, v, given = draw("paged", np.random.default_rng(4))
    given["block_table"] = np.concatenate([2 * TABLE[..., None], 2 * TABLE[..., None] + 1], -1)
    given["block_table"] = given["block_table"].reshape(2, 6)  # pages of 2 tokens of 2 heads
    out, _ = packed.paged(attend, q, k, v, block_table=TABLE, lengths=LENGTHS)
    k, v = (x.reshape(16, 2, 2, 16).swapaxes(1, 2) for x in (k, v))
    arrays = {"q": q, "k": k, "v": v, "out": out, **given, "dtype": "bfloat16", "explain": False}
    assert refattn.verify(**arrays, layout="hnd").verdict == "PASS"
    (cause,) = refattn.verify(**arrays).suspects
    assert cause.text == "the arrays look transposed: pass layout='hnd'"
    arrays |= {"k": k.swapaxes(1, 2), "v": v.swapaxes(1, 2)}
    (cause,) = refattn.verify(**arrays, layout="hnd").suspects
    assert cause.text == "the arrays look transposed: pass layout='bhnd'"
    arrays["out"] = 1.25 * out  # wrong in both, each of which is the other's other
    assert refattn.verify(**arrays).verdict == "FAIL"


def test_gradients_of_packed_sequences():
    q, k, v, given = draw("packed", np.random.default_rng(5))
    mask = np.repeat(np.arange(3), np.diff(OFFSETS[0]))[:, None] == np.repeat(
        np.arange(3), np.diff(OFFSETS[1])
    )
    heads_first = [x.swapaxes(0, 1) for x in (q, k, v)]
    out, pull = refattn.vjp(refattn.softmax_attention, *heads_first, mask=mask)
    g = bf16(np.random.default_rng(6).standard_normal(out.shape))
    back = {f"d{x}": y.swapaxes(0, 1) for x, y in zip("qkv", pull(g), strict=False)}
    arrays = {"q": q, "k": k, "v": v, "d_out": g.swapaxes(0, 1), **back, **given}
    assert refattn.verify(**arrays).verdict == "PASS"
    arrays["dq"] = 1.01 * arrays["dq"]
    assert refattn.verify(**arrays, explain=False).parts["dq"].verdict == "FAIL"


@pytest.mark.long
def test_numbers_past_the_end_may_be_somewhat_larger():
    """The last page is read whole, with a number above all that are seen."""
    q, k, v, _ = draw("paged", np.random.default_rng(4))
    k, v = (x.reshape(2, 16, 2, 16).copy() for x in (k, v))
    k[1, 10, 0, 0] = 1.5 * np.max(np.abs(k))
    given = {"block_table": np.array([[0, 1]]), "cache_seqlens": np.array([20])}
    read = {"block_table": given["block_table"], "lengths": np.array([32])}
    out, _ = packed.paged(attend, q[:1], k, v, **read)
    (cause,) = refattn.verify(q=q[:1], k=k, v=v, out=out, dtype="bfloat16", **given).suspects
    assert cause.text == "agrees if lengths of sequences are rounded up to multiples of 16 keys"
