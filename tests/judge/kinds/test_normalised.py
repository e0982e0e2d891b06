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


def inputs():
    return [bf16(x[0, :1, :96]).astype(f32) for x in refattn.load_sample()]


def attend(norm, names="qk", to=bf16, scale=SCALE):
    """A fused kernel that divides rows by their norms first, in float32, and rounds them."""
    q, k, v = inputs()
    q, k = (to(x / norm(x)).astype(f32) if y in names else x for x, y in ((q, "q"), (k, "k")))
    s = q @ k.swapaxes(-1, -2) * f32(scale)
    p = np.exp(s - s.max(-1, keepdims=True))
    return bf16(bf16(p).astype(f32) @ v / p.sum(-1, keepdims=True))


def judged(out, normalise="qk", scale=SCALE, **more):
    q, k, v = inputs()
    given = {"q": q, "k": k, "v": v, "out": out, "dtype": "bfloat16", "scale": scale}
    return refattn.verify(**given, normalise=normalise, **more)


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
    assert (
        judged(attend(NORMS["RMS"], scale=1.01 * 0.3), scale=0.3, explain=False).verdict == "FAIL"
    )
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
    q, k, v = inputs()
    q *= times
    s, divided = 0.3, "qk".translate(dict.fromkeys(map(ord, left_out)))
    out, _ = forth_and_back(q, k, v, NORMS[form], (divided, divided, s))
    given = {"q": q, "k": k, "v": v, "out": out, "dtype": "bfloat16", "scale": s}
    found = refattn.verify(**given, normalise="qk")
    assert [x.text for x in found.suspects] == [f"agrees if {NOT_DIVIDED[left_out]}"]


NOT_DIVIDED = {
    "qk": "queries and keys are not divided by their norms",
    "q": "queries are not divided by their norms",
    "k": "keys are not divided by their norms",
}


def forth_and_back(q, k, v, norm, how):
    """A fused kernel and its backward pass, which divide by norms what their names say."""
    forth, back, scale = how
    g = bf16(np.random.default_rng(0).standard_normal(v.shape)).astype(f32)

    def divide(names):
        return [bf16(x / norm(x)).astype(f32) if y in names else x for x, y in ((q, "q"), (k, "k"))]

    x, y = divide(forth)
    s = x @ y.swapaxes(-1, -2) * f32(scale)
    top = s.max(-1, keepdims=True)
    p = np.exp(s - top)
    out = bf16(bf16(p).astype(f32) @ v / p.sum(-1, keepdims=True))
    lse = top + np.log(p.sum(-1, keepdims=True))
    x, y = divide(back)
    p = np.exp(x @ y.swapaxes(-1, -2) * f32(scale) - lse)
    d_s = p * (g @ v.swapaxes(-1, -2) - (g * out).sum(-1, keepdims=True))
    d_s = bf16(d_s).astype(f32).swapaxes(-1, -2)
    dv = bf16(bf16(p).astype(f32).swapaxes(-1, -2) @ g)
    return out, {"d_out": g, "dv": dv, "dk": bf16(d_s @ x * f32(scale)), "by_rows": d_s @ q}


@pytest.mark.long
def test_norms_that_a_backward_pass_leaves_out_are_the_cause():
    q, k, v = inputs()
    given = {"q": q, "k": k, "v": v, "dtype": "bfloat16", "scale": 0.3}
    for names, left in (("qk", "q"), ("qk", "qk"), ("q", "q")):
        rest = names.replace(left, "")
        out, back = forth_and_back(q, k, v, NORMS["RMS"], (names, rest, 0.3))
        of = ["d_out", "dv", *(["dk"] if names == "q" else [])]
        found = refattn.verify(**given, out=out, **{x: back[x] for x in of}, normalise=names)
        words = f"agrees if in the backward pass {NOT_DIVIDED[left]} (lse and out are right)"
        assert found.parts["out"].verdict == "PASS"
        assert {x.suspects[0].text for y, x in found.parts.items() if y != "out"} == {words}
    out, back = forth_and_back(q, k, v, NORMS["RMS"], ("q", "q", 0.3))
    back["dk"] = bf16(back.pop("by_rows") * f32(0.3))
    found = refattn.verify(**given, out=out, **back, normalise="q")
    assert found.parts["dv"].verdict == "PASS"
    words = "agrees if dk sums queries that are not divided by their norms"
    assert [x.text for x in found.suspects] == [words]


@pytest.mark.long
def test_a_backward_pass_that_computes_a_wrong_forward_pass_again():
    q, k, v = inputs()
    out = refattn.softmax_attention(q, k, v)
    g = np.random.default_rng(0).standard_normal(v.shape).astype(f32)
    _, pull = refattn.vjp(refattn.softmax_attention, q, k, v, causal=True)
    back = dict(zip(("dq", "dk", "dv"), pull(g), strict=False))
    found = refattn.verify(q=q, k=k, v=v, out=out, d_out=g, **back)
    words = "in the backward pass, which computes the forward pass again, attention is causal"
    assert found.suspects[0].text == f"agrees if {words}"


@pytest.mark.long
def test_of_forms_that_rounding_tells_apart_the_one_that_fits_is_found():
    q, k, v = (x * f32(2.0**-8) for x in inputs())
    q, k, v = (bf16(x).astype(f32) for x in (q, k, v))

    def of(x):
        return x / np.sqrt(np.sum(x * x, -1, keepdims=True) + f32(1e-5))

    s = of(q) @ of(k).swapaxes(-1, -2) * f32(SCALE)
    p = np.exp(s - s.max(-1, keepdims=True))
    out = bf16(bf16(p).astype(f32) @ v / p.sum(-1, keepdims=True))
    given = {"q": q, "k": k, "v": v, "out": out, "dtype": "bfloat16", "scale": SCALE}
    found = refattn.verify(**given, normalise="qk", explain=False)
    assert found.verdict == "PASS"
    assert found.remarks[0].endswith("sqrt(|x|^2 + 1e-05)")
    assert refattn.verify(**given, normalise="qk", norm_eps=0.5, explain=False).verdict == "FAIL"


def test_files(tmp_path):
    q, k, v = inputs()
    path = tmp_path / "a.npz"
    np.savez(path, q=q, k=k, v=v, out=attend(NORMS["F.normalize"], "k"))
    options = ["--dtype", "bfloat16", "--scale", "10", "--format", "json"]
    result = running.run("verify", path, *options, "--normalise", "k")
    assert result.exit_code == 0
    assert "keys x are divided by max(|x|, 1e-12)" in loads(result.stdout)["remarks"]


@pytest.mark.long
@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_caches_that_are_truncated_not_rounded(name):
    q, k, v = inputs()
    to = FORMATS[name]._replace(truncated=True).round
    s = q @ to(k).swapaxes(-1, -2) * 32**-0.5
    p = np.exp(s - s.max(-1, keepdims=True))
    out = bf16(bf16(p) @ to(v) / p.sum(-1, keepdims=True))
    found = refattn.verify(q=q, k=k, v=v, out=out, dtype="bfloat16")
    words = f"agrees if keys and values are cut to {name}, not rounded, first"
    assert (found.verdict, found.suspects[0].text) == ("FAIL", words)
