"""Verdicts on float64: errors are those to results in pairs, so that an eps is seen."""

import numpy as np
import pytest

import refattn
from refattn import naive
from refattn.judge import verify
from tests.judge.rounding.rounded import Steps, of_heads, stepwise

SHAPES = [(2, 40, 64, 16, 1.0), (1, 7, 600, 80, 0.3), (3, 130, 130, 8, 30.0), (1, 5, 2100, 64, 4.0)]


def tensors(seed, h, n, m, d, size):
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((h, *x)) for x in ((n, d), (m, d), (m, 16)))
    return [q * size, k, v + seed % 3]


def scores_of(q, k, causal):
    n, m = q.shape[-2], k.shape[-2]
    seen = np.tri(n, m, m - n, dtype=bool) if causal else True
    return np.where(seen, q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5, -np.inf)


def in_blocks(q, k, v, causal=False):
    """A fused kernel: a running maximum, sums rescaled, 48 keys at a time."""
    total, mass, top = 0.0, 0.0, np.full((*q.shape[:-1], 1), -np.inf)
    scores = scores_of(q, k, causal)
    for j in range(0, k.shape[-2], 48):
        s = scores[..., j : j + 48]
        new = np.maximum(top, s.max(-1, keepdims=True))
        weights, factor, top = np.exp(s - new), np.exp(top - new), new
        total = total * factor + weights @ v[..., j : j + 48, :]
        mass = mass * factor + weights.sum(-1, keepdims=True)
    return total / mass


def one_by_one(q, k, v, causal=False):
    """Sums in the order of their terms."""
    steps = Steps(sums=lambda x: x)
    return of_heads(lambda case, _: (stepwise(case, steps), None), q, k, v, "", causal=causal)[0]


KERNELS = {
    "formula": naive.softmax_attention,
    "in blocks": in_blocks,
    "one by one": one_by_one,
    "refattn": refattn.softmax_attention,
}


def of_logs(q, k, v):
    """e^(score - log normaliser): the rounding of the logarithm moves all weights of a row."""
    scores = q @ k.swapaxes(-1, -2) * q.dtype.type(q.shape[-1] ** -0.5)
    top = scores.max(-1, keepdims=True)
    lse = top + np.log(np.exp(scores - top).sum(-1, keepdims=True))
    return np.exp(scores - lse) @ v


@pytest.mark.parametrize("size", [10, pytest.param(100, marks=pytest.mark.long)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.usefixtures("verdict_alone")
def test_weights_from_large_logs_of_normalisers_pass(dtype, size):
    """Their errors are proportional to the logarithm, which grows with the scores."""
    q, k, v = (x.astype(dtype) for x in tensors(3, 2, 40, 100, 16, size))
    out = of_logs(q, k, v)
    found = verify(q=q, k=k, v=v, out=out)
    assert found.verdict == "PASS", str(found)
    if size == 10:
        assert found.profile == {np.float32: "recomputed", np.float64: "recomputed64"}[dtype]
        assert 0.5 < found.z.rms < 1.1
    assert verify(q=q, k=k, v=v, out=out * dtype(1 + 2000 * np.finfo(dtype).eps)).verdict == "FAIL"


@pytest.mark.sweep(6)
@pytest.mark.parametrize("shape", SHAPES[:3])
@pytest.mark.parametrize("wrong", ["factor", "scale", "epsilon", "float32 exponentials", "a key"])
@pytest.mark.usefixtures("verdict_alone")
def test_defects_below_the_digits_of_float32_fail(wrong, shape):
    q, k, v = tensors(2, *shape)
    scale, exact = q.shape[-1] ** -0.5, refattn.softmax_attention(q, k, v)

    def narrow_exponentials():
        scores = scores_of(q, k, False)
        w = np.exp((scores - scores.max(-1, keepdims=True)).astype(np.float32)).astype(float)
        return w @ v / w.sum(-1, keepdims=True)

    if wrong == "a key":
        q = q / np.abs(q).max()  # so that no key has a weight of 0
    out = {
        "factor": lambda: exact * (1 + 4e-15),
        "scale": lambda: refattn.softmax_attention(q, k, v, scale=scale * (1 + 1e-11)),
        "epsilon": lambda: exact / (1 + 1e-12),
        "float32 exponentials": narrow_exponentials,
        "a key": lambda: refattn.softmax_attention(q, k[:, 1:], v[:, 1:]),
    }[wrong]()
    alike = wrong == "factor" and shape[-1] > 10  # what rounding a large log normaliser may do
    given = {"profile": ("math64", "serial64")} if alike else {}
    assert verify(q=q, k=k, v=v, out=out, **given).verdict == "FAIL"


@pytest.mark.usefixtures("verdict_alone")
def test_options_and_log_normalisers():
    q, k, v = tensors(0, 2, 40, 64, 16, 3.0)
    rng = np.random.default_rng(3)
    given = {
        "causal": True,
        "window": (20, 0),
        "softcap": 20.0,
        "sinks": np.asarray([0.5, -np.inf]),
        "bias": rng.standard_normal((40, 64)),
        "mask": rng.random((40, 64)) < 0.8,
    }
    out, lse = refattn.attend(q, k, v, scale=0.25, **given)
    assert verify(q=q, k=k, v=v, out=out, lse=lse, scale=0.25, **given).verdict == "PASS"
    moved = lse + 2e-14 * (1 + abs(lse))
    assert verify(q=q, k=k, v=v, out=out, lse=moved, scale=0.25, **given).verdict == "FAIL"
    given["window"] = (21, 0)
    assert verify(q=q, k=k, v=v, out=out, lse=lse, scale=0.25, **given).verdict == "FAIL"


def test_kernels_of_torch_pass():
    torch = pytest.importorskip("torch")
    for shape in SHAPES:
        q, k, v = tensors(4, *shape)
        out = torch.nn.functional.scaled_dot_product_attention(*map(torch.asarray, (q, k, v)))
        assert verify(q=q, k=k, v=v, out=out.numpy()).verdict == "PASS"


@pytest.mark.usefixtures("verdict_alone")
def test_softmax_in_float32_is_named():
    """As in jax.nn.dot_product_attention, of float64 too."""
    jax = pytest.importorskip("jax")
    jax.config.update("jax_enable_x64", True)
    q, k, v = tensors(4, *SHAPES[0])
    given = (jax.numpy.asarray(x.swapaxes(0, 1))[None] for x in (q, k, v))
    out = np.asarray(jax.jit(jax.nn.dot_product_attention)(*given))[0].swapaxes(0, 1)
    assert out.dtype == np.float64
    found = verify(q=q, k=k, v=v, out=out)
    assert found.verdict == "FAIL"
    assert "some step of the kernel may be in float32" in str(found)
    assert verify(q=q, k=k, v=v, out=out, profile="math").verdict == "PASS"


@pytest.mark.parametrize("size", [1e-300, 1e-150, 1e155, 1e300])
def test_values_whose_errors_have_no_variance(size):
    """Bounds still reject wrong outputs; no sentence uses a variance."""
    q, k, v = tensors(5, 1, 32, 32, 8, 1.0)
    out = size * one_by_one(q, k, v)
    arrays = {"q": q, "k": k, "v": size * v}
    right, wrong = (verify(**arrays, out=x * out) for x in (1, 1.01))
    assert (right.verdict, wrong.verdict) == ("UNDERPOWERED", "FAIL")
    assert "next: multiply v and out by a power of 2" in str(right)
    for found in (right, wrong):
        assert "of its errors leave the range of float64" in str(found)
        assert "1 %" not in str(found)
        assert "float32" not in str(found)
