"""The words of flash-attention: windows of -1, lse beside (b, n, h, d), masks of padding."""

from functools import partial
from inspect import signature
from unittest.mock import Mock

import numpy as np
import pytest

import refattn
from refattn import packed, testing, verify
from refattn.files.sequences import SEQUENCE_ARRAYS
from refattn.files.tensors import open_tensors
from refattn.judge.mistakes.causes import reasons
from refattn.judge.verification import door, judging
from refattn.judge.verification.findings import Z
from tests.judge.rounding.rounded import Case, plain

B, H, N, M, D = 2, 3, 24, 20, 8
f32 = np.float32
save_file = pytest.importorskip("safetensors.numpy").save_file


def attended(**options):
    """Exact numbers of heads, in float32; options of all heads, or a mask of each member."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((B, H, n, D)).astype(f32) for n in (N, M, M))
    out, lse = np.zeros_like(q), np.zeros((B, H, N), f32)
    mask = options.pop("mask", None)
    for b, h in np.ndindex(B, H):
        seen = None if mask is None else mask[b]
        one = Case(*(x[b, h].astype(float) for x in (q, k, v)), mask=seen, **options)
        out[b, h], lse[b, h] = plain(one, "float32")
    return {"q": q, "k": k, "v": v, "out": out, "lse": lse}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("window", [(-1, -1), (5, -1), (-1, 0), [3, 0]])
def test_minus_1_is_no_limit(window):
    sides = tuple(None if x == -1 else x for x in window)
    assert verify(**attended(window=sides), window=window).verdict == "PASS"
    other = (2, 1) if sides == (None, None) else None
    assert verify(**attended(window=sides), window=other).verdict == "FAIL"


@pytest.mark.usefixtures("verdict_alone")
def test_a_mask_of_the_keys_of_each_member():
    mask = np.arange(M) < np.array([[M], [13]])
    given = attended(mask=mask)
    assert verify(**given, mask=mask).verdict == "PASS"
    assert verify(**given, mask=mask[::-1]).verdict == "FAIL"


def test_a_mask_that_may_be_two_things():
    x = np.ones((4, 2, 4, 3), f32)
    mask = np.ones((4, 4), bool)
    with pytest.raises(ValueError, match=r"write \(1, 1, n, m\) or \(batch, 1, 1, m\)"):
        verify(q=x, k=x, v=x, out=x, mask=mask)
    assert verify(q=x, k=x, v=x, out=x, mask=mask[:, None, None]).verdict != "FAIL"


@pytest.mark.parametrize("heads_first", [False, True])
def test_files_with_tokens_before_heads(tmp_path, heads_first):
    mask = np.arange(M) < np.array([[M], [13]])
    given = attended(mask=mask)
    lse = given["lse"] if heads_first else np.swapaxes(given["lse"], 1, 2)
    arrays = {x: np.swapaxes(y, 1, 2) for x, y in given.items() if x != "lse"}
    np.savez(tmp_path / "x.npz", **arrays, lse=lse, mask=mask)
    found = open_tensors(tmp_path / "x.npz", layout="bnhd")
    np.testing.assert_array_equal(found.read("lse", (1, 2)), given["lse"][1, 2])
    np.testing.assert_array_equal(found.read("mask", (1, 2)), mask[1:])


def test_causes_that_are_not_searched_for(monkeypatch):
    """In tests, say: the same verdict, and nothing is named that explains a little."""
    searched = Mock(side_effect=AssertionError("searched"))
    monkeypatch.setattr(judging, "explain", searched)
    monkeypatch.setattr(judging, "explain_gradients", searched)
    rng = np.random.default_rng(0)
    q, k, v, d_out = rng.standard_normal((4, 24, 8)).astype(f32)
    out, pullback = refattn.vjp(refattn.softmax_attention, q, k, v)
    given = {"q": q, "k": k, "v": v, "d_out": d_out}
    given |= {f"d{x}": getattr(pullback(d_out), x) for x in "qkv"}
    assert refattn.verify(out=out, explain=False, **given).verdict == "PASS"
    noise = (0.01 * rng.standard_normal(out.shape)).astype(f32)
    wrong = given | {"dk": given["dk"] * f32(1.02)}
    found = refattn.verify(out=out + noise, explain=False, **wrong)
    assert [x.verdict for x in found.parts.values()] == ["FAIL", "PASS", "FAIL", "PASS"]
    text = str(found)
    assert "causes were not searched for" in text
    assert "unknown cause" not in text
    assert "cause: " not in str(found.parts["out"])
    assert "dk is 1.019999" in text  # what is measured anyway, and explains all
    with pytest.raises(AssertionError, match="causes were not searched for"):
        testing.assert_attention_close(out + noise, q, k, v, explain=False)


def test_an_error_in_the_search_for_causes_ends_no_verdict(errors_of_causes, monkeypatch, caplog):
    monkeypatch.setattr(reasons, "ERRORS", errors_of_causes)
    broken = Mock(side_effect=IndexError("of the search"))
    monkeypatch.setattr(reasons, "search_causes", broken)
    monkeypatch.setattr(reasons, "explain_backward", broken)
    q, k, v, d_out = np.random.default_rng(0).standard_normal((4, 24, 8)).astype(f32)
    out, pullback = refattn.vjp(refattn.softmax_attention, q, k, v)
    given = {"q": q, "k": k, "v": v, "d_out": d_out, "out": np.flip(out, 0).copy()}
    found = refattn.verify(**given, dv=1.5 * pullback(d_out).v)
    assert [x.verdict for x in found.parts.values()] == ["FAIL", "FAIL"]
    assert caplog.text.count("search for causes ended with IndexError('of the search')") == 2


def paged():
    """Keys in blocks of 8, of which 2 are of no sequence and hold NaN; causal attention of them."""
    rng, lengths = np.random.default_rng(3), np.array([23, 0, 16], np.int32)
    table = np.array([[4, 1, 6], [-1, 99, -1], [0, 3, -1]], np.int32)
    q, k, v = (rng.standard_normal((*x, H, D)).astype(f32) for x in ((3, 9), (7, 8), (7, 8)))
    k[[2, 5]] = v[[2, 5]] = k[6, 7] = np.nan
    attend = partial(refattn.attend, scale=D**-0.5, causal=True)
    out, lse = packed.paged(attend, q, k, v, block_table=table, lengths=lengths)
    arrays = {"q": q, "k": k, "v": v, "out": out, "lse": lse}
    return arrays | {"block_table": table, "cache_seqlens": lengths}


def test_keys_in_blocks():
    given = paged()
    assert verify(**given, causal=True).verdict == "PASS"
    given["block_table"] = np.array([[1, 4, 6], [1, 1, 1], [3, 0, 1]])
    assert verify(**given, causal=True, explain=False).verdict == "FAIL"


def test_tensors_of_torch_are_named_in_its_words():
    torch = pytest.importorskip("torch")
    x = torch.zeros((2, 4, 4))
    with pytest.raises(TypeError, match="`q` must be a dense array, got a tensor of device meta"):
        refattn.verify(**dict.fromkeys(("q", "k", "v", "out"), x.to("meta")))
    with pytest.raises(TypeError, match=r"for example with q.to\(torch.float32\)"):
        refattn.softmax_attention(*[x.bfloat16()] * 3)


def test_masks_of_integers_in_files(tmp_path):
    x = np.zeros((4, 4), f32)
    save_file(
        {"mask": np.ones((4, 4), int)} | dict.fromkeys(["q", "k", "v", "out"], x),
        tmp_path / "x.safetensors",
    )
    with pytest.raises(TypeError, match="got int64: pass mask != 0"):
        open_tensors(tmp_path / "x.safetensors")


def test_each_axis_of_a_place_is_named_whatever_the_layout():
    arrays = {x: np.random.default_rng(0).standard_normal((2, 48, 4, 16)) for x in "qkv"}
    q, k, v = (x.swapaxes(1, 2) for x in arrays.values())
    out = refattn.softmax_attention(q, k, v).swapaxes(1, 2)
    out[1, 30, 2, 5] += 0.1
    found = refattn.verify(**arrays, out=out, layout="bnhd")
    place = "head (1, 2), row 30, column 5"
    text = str(found)
    assert f"out at {place} is " in text
    assert f"largest {found.z.largest:.3g} at {place}\n" in text
    assert f"bound = {found.tests[0].statistic:.3g}, p 0, at {place}\n" in text
    arrays["k"][1, 30, 2, 5] = np.nan
    with pytest.raises(ValueError, match="got nan at row 30, column 5 of its head"):
        refattn.verify(**arrays, out=out, layout="bnhd")


@pytest.mark.long
@pytest.mark.usefixtures("verdict_alone")
def test_the_other_layout_is_judged_with_the_same_arguments(monkeypatch):
    arrays = {x: np.random.default_rng(0).standard_normal((48, 4, 16)) for x in "qkv"}
    calls = []
    monkeypatch.setattr(door, "verify", lambda **given: calls.append(given) or found)
    found = verify(**arrays, out=arrays["q"], layout="bnhd", mask=np.ones(48, bool))
    assert found.verdict == "FAIL"
    verify(**arrays, out=arrays["q"], mask=np.ones(4, bool))
    (given,) = calls
    left = {"lse", "d_out", "dq", "dk", "dv", "state", *SEQUENCE_ARRAYS}
    assert {*given} == {*signature(verify).parameters} - left
    assert given["mask"].shape == (4,)
    assert given["layout"] == "bnhd"


def test_no_plot_of_lse():
    arrays = attended()
    arrays["lse"][0, 1] += f32(0.05)
    report = str(verify(**arrays))
    assert "lse is too large by 0.05, but only in head (0, 1)" in report
    assert "--plot" not in report


def test_numbers_that_are_absurd_have_no_root_mean_square():
    x = np.ones((2, 1))
    found = verify(q=x, k=x, v=x, out=x)._replace(verdict="FAIL")
    for z in (Z(3e45, 1e46, (0, 0)), Z(np.nan, np.inf, (0, 0))):
        text = str(found._replace(z=z))
        assert "numbers are far beyond those of attention, or not finite, the largest at" in text
        assert "rms" not in text
        parts = {"out": found._replace(z=z, of="out"), "dv": found._replace(z=z, of="dv")}
        assert "dv: FAIL (numbers are far beyond" in str(found._replace(parts=parts))
    assert "rms 3e+03" in str(found._replace(z=Z(3e3, 1e4, (0, 0))))
