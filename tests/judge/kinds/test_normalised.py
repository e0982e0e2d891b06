"""Queries and keys that a kernel divides by their norms, and what it rounds of them."""

import numpy as np
import pytest

import refattn
from tests.cli import running
from tests.cli.running import loads
from tests.judge.rounding.rounded import FORMATS

bf16 = FORMATS["bfloat16"].round
f32 = np.float32
SCALE = 10.0
NORMS = {
    "F.normalize": lambda x: np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), f32(1e-12)),
    "l2norm of fla": lambda x: np.sqrt(np.sum(x * x, -1, keepdims=True) + f32(1e-6)),
    "RMS": lambda x: np.sqrt(np.mean(x * x, -1, keepdims=True) + f32(1e-6)),
}


Q, K, V = (bf16(x[0, :1, :96]).astype(f32) for x in refattn.load_sample())
GIVEN = {"q": Q, "k": K, "v": V, "dtype": "bfloat16"}


def divide(q, k, norm, names, to=bf16):
    """Queries and keys over their norms, in float32, rounded, if their names say so."""
    return [to(x / norm(x)).astype(f32) if y in names else x for x, y in ((q, "q"), (k, "k"))]


def fused(q, k, v, scale):
    """The output and log normalisers of a fused kernel."""
    s = q @ k.swapaxes(-1, -2) * f32(scale)
    top = s.max(-1, keepdims=True)
    p = np.exp(s - top)
    total = p.sum(-1, keepdims=True)
    return bf16(bf16(p).astype(f32) @ v / total), top + np.log(total)


def attend(norm, names="qk", to=bf16, scale=SCALE):
    return fused(*divide(Q, K, norm, names, to), V, scale)[0]


def judged(out, normalise="qk", scale=SCALE, **more):
    return refattn.verify(**GIVEN | {"out": out, "scale": scale} | more, normalise=normalise)


@pytest.mark.long
@pytest.mark.parametrize("rounded", [True, False])
@pytest.mark.parametrize("form", NORMS)
def test_right_kernels_pass_whatever_the_norm_and_its_rounding(form, rounded):
    scale = 0.3 if form == "RMS" else SCALE
    found = judged(attend(NORMS[form], to=bf16 if rounded else f32, scale=scale), scale=scale)
    assert found.verdict == "PASS"
    assert f"queries and keys x are divided by {'sqrt' if form == 'RMS' else 'max'}" in str(found)


@pytest.mark.long
def test_a_wrong_kernel_fails_and_undeclared_norms_are_the_cause():
    out = attend(NORMS["F.normalize"])
    assert judged(bf16(1.01 * out), explain=False).verdict == "FAIL"
    wrong = attend(NORMS["RMS"], scale=1.01 * 0.3)
    assert judged(wrong, scale=0.3, explain=False).verdict == "FAIL"
    found = judged(out, None)
    assert found.verdict == "FAIL"
    assert found.suspects[0].text == (
        "agrees if queries and keys are divided by their norms and rounded (--normalise qk)"
    )


@pytest.mark.long
@pytest.mark.parametrize("left_out", ["qk", "q", "k"])
@pytest.mark.parametrize("times", [1, 8])  # rows of norms near 1, and near the root of d
@pytest.mark.parametrize("form", ["F.normalize", "RMS"])
def test_a_norm_that_is_left_out_is_the_cause(form, times, left_out):
    divided = "qk".translate(dict.fromkeys(map(ord, left_out)))
    out, _ = fused(*divide(times * Q, K, NORMS[form], divided), V, 0.3)
    found = judged(out, scale=0.3, q=times * Q)
    assert [x.text for x in found.suspects] == [f"agrees if {NOT_DIVIDED[left_out]}"]


NOT_DIVIDED = {
    "qk": "queries and keys are not divided by their norms",
    "q": "queries are not divided by their norms",
    "k": "keys are not divided by their norms",
}


def forth_and_back(forth, back, scale=0.3):
    """A fused kernel and its backward pass, which divide by norms what their names say."""
    g = bf16(np.random.default_rng(0).standard_normal(V.shape)).astype(f32)
    out, lse = fused(*divide(Q, K, NORMS["RMS"], forth), V, scale)
    x, y = divide(Q, K, NORMS["RMS"], back)
    p = np.exp(x @ y.swapaxes(-1, -2) * f32(scale) - lse)
    d_s = p * (g @ V.swapaxes(-1, -2) - (g * out).sum(-1, keepdims=True))
    d_s = bf16(d_s).astype(f32).swapaxes(-1, -2)
    dv = bf16(bf16(p).astype(f32).swapaxes(-1, -2) @ g)
    return out, {"d_out": g, "dv": dv, "dk": bf16(d_s @ x * f32(scale)), "by_rows": d_s @ Q}


@pytest.mark.long
def test_norms_that_a_backward_pass_leaves_out_are_the_cause():
    for names, left in (("qk", "q"), ("qk", "qk"), ("q", "q")):
        rest = names.replace(left, "")
        out, back = forth_and_back(names, rest)
        of = ["d_out", "dv", *(["dk"] if names == "q" else [])]
        found = judged(out, names, 0.3, **{x: back[x] for x in of})
        words = f"agrees if in the backward pass {NOT_DIVIDED[left]} (lse and out are right)"
        assert found.parts["out"].verdict == "PASS"
        assert {x.suspects[0].text for y, x in found.parts.items() if y != "out"} == {words}
    out, back = forth_and_back("q", "q")
    back["dk"] = bf16(back.pop("by_rows") * f32(0.3))
    found = judged(out, "q", 0.3, **back)
    assert found.parts["dv"].verdict == "PASS"
    words = "agrees if dk sums queries that are not divided by their norms"
    assert [x.text for x in found.suspects] == [words]


@pytest.mark.long
def test_a_backward_pass_that_computes_a_wrong_forward_pass_again():
    out = refattn.softmax_attention(Q, K, V)
    g = np.random.default_rng(0).standard_normal(V.shape).astype(f32)
    _, pull = refattn.vjp(refattn.softmax_attention, Q, K, V, causal=True)
    back = dict(zip(("dq", "dk", "dv"), pull(g), strict=False))
    found = refattn.verify(q=Q, k=K, v=V, out=out, d_out=g, **back)
    words = "in the backward pass, which computes the forward pass again, attention is causal"
    assert found.suspects[0].text == f"agrees if {words}"


@pytest.mark.long
def test_of_forms_that_rounding_tells_apart_the_one_that_fits_is_found():
    q, k, v = (bf16(x * f32(2.0**-8)).astype(f32) for x in (Q, K, V))
    plus = lambda x: np.sqrt(np.sum(x * x, -1, keepdims=True) + f32(1e-5))  # noqa: E731
    out, _ = fused(*divide(q, k, plus, "qk", f32), v, SCALE)
    given = {"q": q, "k": k, "v": v, "explain": False}
    found = judged(out, **given)
    assert found.verdict == "PASS"
    assert found.remarks[0].endswith("sqrt(|x|^2 + 1e-05)")
    assert judged(out, **given, norm_eps=0.5).verdict == "FAIL"


def test_files(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, q=Q, k=K, v=V, out=attend(NORMS["F.normalize"], "k"))
    options = ["--dtype", "bfloat16", "--scale", "10", "--format", "json"]
    result = running.run("verify", path, *options, "--normalise", "k")
    assert result.exit_code == 0
    assert "keys x are divided by max(|x|, 1e-12)" in loads(result.stdout)["remarks"]


@pytest.mark.long
@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_caches_that_are_truncated_not_rounded(name):
    to = FORMATS[name]._replace(truncated=True).round
    found = refattn.verify(**GIVEN, out=fused(Q, to(K), to(V), 32**-0.5)[0])
    words = f"agrees if keys and values are cut to {name}, not rounded, first"
    assert (found.verdict, found.suspects[0].text) == ("FAIL", words)
