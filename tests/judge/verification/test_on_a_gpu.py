"""Kernels of torch on a GPU: all are right, and none may be rejected."""

import itertools
import warnings

import ml_dtypes
import pytest

import refattn

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("torch has no GPU", allow_module_level=True)

attention = pytest.importorskip("torch.nn.attention")
BACKENDS = {
    "flash": attention.SDPBackend.FLASH_ATTENTION,
    "cudnn": attention.SDPBackend.CUDNN_ATTENTION,
    "efficient": attention.SDPBackend.EFFICIENT_ATTENTION,
    "math": attention.SDPBackend.MATH,
}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
VALUES = {"normal": 0.0, "mean 3": 3.0, "in [.5, 1]": None}
SHAPES = [(4, 512, 512, 64), (2, 512, 2048, 128), (4, 256, 4096, 64), (1, 256, 16384, 64)]


def draw(name, dtype, heads, n, m, d):
    generator = torch.Generator("cuda").manual_seed(m + d)
    like = {"generator": generator, "device": "cuda"}
    q, k = (torch.randn(heads, x, d, **like) for x in (n, m))
    mean = VALUES[name]
    v = torch.rand(heads, m, d, **like) / 2 + 0.5 if mean is None else mean
    v = v if mean is None else torch.randn(heads, m, d, **like) + mean
    g = torch.randn(heads, n, d, **like)
    return [x.to(DTYPES[dtype]) for x in (q, k, v, g)]


def on_host(x):
    x = x.detach().contiguous().cpu()
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


def attend(backend, q, k, v, **options):
    """Call torch with a backend; skip what it has no kernel for."""
    with warnings.catch_warnings(), attention.sdpa_kernel(BACKENDS[backend]):
        warnings.simplefilter("ignore")
        try:
            function = torch.nn.functional.scaled_dot_product_attention
            return function(q[None], k[None], v[None], **options)[0]
        except RuntimeError as error:
            pytest.skip(str(error))


def judged(**arrays):
    causal = arrays.pop("is_causal", False)
    return refattn.verify(**{x: on_host(y) for x, y in arrays.items()}, causal=causal)


@pytest.fixture(params=[False, True], ids=["ieee", "tf32"])
def tf32(request):
    torch.backends.cuda.matmul.allow_tf32 = request.param
    yield request.param
    torch.backends.cuda.matmul.allow_tf32 = False


KERNELS = list(itertools.product(BACKENDS, DTYPES))
BY_HAND = ("q k", "(q c) k")


@pytest.mark.long
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize(("backend", "dtype"), [*KERNELS, *((x, "float32") for x in BY_HAND)])
def test_outputs(backend, dtype, values, shape, tf32):
    if tf32 and dtype != "float32":
        pytest.skip("as without")
    q, k, v, _ = draw(values, dtype, *shape)
    c = q.shape[-1] ** -0.5
    if backend in BY_HAND:
        scores = q @ k.mT * c if backend == "q k" else (q * c) @ k.mT
        out = torch.softmax(scores, -1) @ v
        assert judged(q=q, k=k, v=v, out=1.001 * out).verdict == "FAIL"
    else:
        out = attend(backend, q, k, v)
    verdict = judged(q=q, k=k, v=v, out=out)
    assert verdict.verdict == "PASS", str(verdict)
    if dtype != "float32":  # where a slack, of all alike, is larger than the deviations
        assert verdict.z.rms < 1.05, str(verdict)


@pytest.mark.long
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(4, 512, 512, 64), (2, 1024, 1024, 128)], ids=str)
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize(("backend", "dtype"), KERNELS)
def test_gradients(backend, dtype, values, shape, causal):
    q, k, v, g = draw(values, dtype, *shape)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attend(backend, *leaves, is_causal=causal)
    out.backward(g)
    dq, dk, dv = (x.grad for x in leaves)
    given = {"q": q, "k": k, "v": v, "d_out": g, "is_causal": causal}
    verdict = judged(**given, out=out, dq=dq, dk=dk, dv=dv)
    assert verdict.verdict == "PASS", str(verdict)
    if dtype != "float32":
        assert all(0.9 < x.z.rms < 1.1 for x in verdict.parts.values()), str(verdict)
    wrong = judged(**given, out=out, dq=dq, dk=1.02 * dk, dv=dv)
    assert wrong.parts["dk"].verdict == "FAIL", str(wrong)
