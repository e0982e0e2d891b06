"""Numbers of longdouble, as many axes as NumPy has, and pairs."""

from fractions import Fraction
from functools import partial

import numpy as np
import pytest

import refattn
from refattn import attend, linear_randomized_attention, softmax_attention
from tests.reference import CONTRACT

RFA = refattn.random_feature_attention
OMEGA = np.random.default_rng(1).standard_normal((6, 3))


def test_most_axes():
    def axes(count, heads=1):
        return np.ones((*(1,) * (count - 3), heads, 2, 3))

    x = axes(31)
    assert attend(x, x, x).out.ndim == 31
    assert refattn.randomized_attention(x, x, x, num_samples=2, rng=0).ndim == 31
    assert attend(axes(30, 4), axes(30, 2), axes(30, 2)).out.ndim == 30


THIRD = np.longdouble(1) / 3
TAKES_A_SCALE = {
    "attend": lambda q, k, v, **s: attend(q, k, v, **s).out,
    "softmax_attention": softmax_attention,
    "random_feature_attention": partial(refattn.random_feature_attention, omega=OMEGA),
    "trigonometric": partial(
        refattn.random_feature_attention, omega=OMEGA, features="trigonometric"
    ),
    "importance_sampled_attention": partial(refattn.importance_sampled_attention, omega=OMEGA),
    "randomized_attention": lambda q, k, v, **s: refattn.randomized_attention(
        q, k, v, omega=np.stack([OMEGA] * 4, axis=-3), **s
    ),
    "linear_randomized_attention": partial(linear_randomized_attention, num_proposals=2, rng=0),
    "log_weights": lambda q, k, v, **s: refattn.diagnostics.log_weights(q, k, omega=OMEGA, **s),
    "draw_target": lambda q, k, v, **s: refattn.sampling.draw_target(
        q, k, num_samples=3, rng=0, **s
    ),
    "SoftmaxState": lambda q, k, v, **s: refattn.streaming.SoftmaxState.init(k, v, **s).read(q),
    "PositiveState": lambda q, k, v, **s: (
        refattn.streaming.PositiveState.init(k, v, omega=OMEGA, **s).update(k, v).read(q)
    ),
}


@pytest.mark.parametrize("scale", [THIRD, Fraction(1, 3)])
@pytest.mark.parametrize("name", TAKES_A_SCALE)
def test_a_scale_keeps_the_digits_of_longdouble(name, scale):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(s).astype(np.longdouble) for s in ((4, 3), (5, 3), (5, 2)))
    got, root = TAKES_A_SCALE[name](q, k, v, scale=scale), np.sqrt(THIRD)
    want = TAKES_A_SCALE[name](root * q, root * k, v, scale=1.0)
    exponent = np.max(np.abs(q @ k.T)) / 3 + np.max(np.abs(OMEGA)) * np.max(np.abs(q))
    atol = CONTRACT * np.finfo(np.longdouble).eps * (1 + exponent) / 8
    np.testing.assert_allclose(got, want, rtol=0, atol=float(atol * np.max(np.abs(want))))


def test_other_numbers_keep_the_digits_of_longdouble():
    rng, eps = np.random.default_rng(0), np.finfo(np.longdouble).eps
    q, k, v = (rng.standard_normal((4, 2)).astype(np.longdouble) for _ in range(3))
    bias = refattn.adapt.centre(q, k, [1.0, 2.0], [0.0, 0.0], scale=THIRD).bias
    np.testing.assert_allclose(bias[0], (k[:, 0] + 2 * k[:, 1]) / 3, rtol=float(16 * eps))
    shift = np.array([1, 2], np.longdouble) / 3
    centred = refattn.adapt.centre(q, k, shift, -shift)
    np.testing.assert_array_equal(centred.q, q - shift)
    np.testing.assert_array_equal(centred.k, k + shift)
    constant = refattn.features.positive_features(q, OMEGA[:, :2], square_norm=THIRD).log_scale
    peak = np.max(q @ OMEGA[:, :2].T, axis=-1)
    np.testing.assert_allclose(constant, peak - THIRD / 2, rtol=0, atol=float(16 * eps))
    options = {"num_proposals": 2, "weighting": "query", "rng": 0}
    want = linear_randomized_attention(q, k, v, beta=Fraction(1, 3), **options)
    near = linear_randomized_attention(q, k, v, beta=float(THIRD), **options)
    np.testing.assert_array_equal(linear_randomized_attention(q, k, v, beta=THIRD, **options), want)
    assert (np.any(want != near)) == (float(THIRD) != THIRD)


@pytest.mark.long("jax", "dask")
def test_a_longdouble_scale_leaves_other_dtypes_alone(backend, dtype):
    q, k, v = (np.ones(shape, dtype) for shape in ((4, 3), (5, 3), (5, 6)))
    got = backend.call(softmax_attention, q, k, v, scale=THIRD)
    np.testing.assert_allclose(got, softmax_attention(q, k, v, scale=1 / 3), rtol=1e-6)


def test_merge_takes_a_plain_pair():
    a = attend(np.ones((2, 4, 3)), *np.ones((2, 2, 5, 3)))
    assert isinstance(refattn.merge(a, tuple(a)), refattn.Attended)


@pytest.mark.sweep(2)
@pytest.mark.filterwarnings("ignore:.*(prototype|beta):UserWarning")
@pytest.mark.parametrize("kind", ["sparse", "compressed", "meta", "nested", "jagged"])
def test_tensors_of_torch_that_have_no_number_at_each_place(torch, kind):
    x = torch.ones((3, 4))
    bad = {
        "sparse": torch.Tensor.to_sparse,
        "compressed": torch.Tensor.to_sparse_csr,
        "meta": lambda x: x.to("meta"),
        "nested": lambda x: torch.nested.nested_tensor([x]),
        "jagged": lambda x: torch.nested.nested_tensor([x, x], layout=torch.jagged),
    }[kind](x)
    for name in "qkv":
        with pytest.raises(TypeError, match=f"^`{name}` must be a dense array"):
            refattn.softmax_attention(**dict.fromkeys("qkv", x) | {name: bad})
    for name in ("mask", "bias", "sinks"):
        with pytest.raises(TypeError, match=f"^`{name}` must be"):
            refattn.softmax_attention(x, x, x, **{name: bad})
