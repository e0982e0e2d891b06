"""Every message about bad arguments."""

from fractions import Fraction
from functools import partial

import numpy as np
import pytest

from refattn import (
    Attended,
    adapt,
    attend,
    diagnostics,
    features,
    importance_sampled_attention,
    linear_randomized_attention,
    merge,
    moments,
    random_feature_attention,
    randomized_attention,
    sampling,
    softmax_attention,
    streaming,
)
from tests.reference import CONTRACT

Q = np.ones((2, 4, 3))
K = np.ones((2, 5, 3))
V = np.ones((2, 5, 6))
OMEGA = np.random.default_rng(1).standard_normal((6, 3))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"q": [[1.0]]},
            TypeError,
            r"`q` must be an array of a library with the array API, got list",
        ),
        ({"k": None}, TypeError, r"`k` must be an array .*, got NoneType"),
        ({"v": 3.0}, TypeError, r"`v` must be an array .*, got 3.0 of type float"),
        ({"q": np.ones(3)}, ValueError, r"`q` must have at least 2 axes, got shape \(3,\)"),
        ({"v": np.ones(3)}, ValueError, r"`v` must have at least 2 axes, got shape \(3,\)"),
        (
            {"q": Q.astype(int)},
            TypeError,
            r"`q` must have dtype float32 or float64, got int64: cast",
        ),
        ({"q": Q.astype(np.float16)}, TypeError, r"got float16: cast it first, .*xp.astype\(q"),
        ({"q": Q.astype(complex)}, TypeError, r"`q` must have dtype .*, got complex128"),
        (
            {"k": K.astype(np.float32)},
            TypeError,
            r"`k` must have the dtype of `q`, float64, got float32: cast one of them first",
        ),
        (
            {"k": np.ones((2, 5, 4))},
            ValueError,
            r"`q` and `k` must have last axes .*, got shapes \(2, 4, 3\) and \(2, 5, 4\)",
        ),
        (
            {"q": np.ones((4, 0)), "k": np.ones((5, 0))},
            ValueError,
            r"`q` must have a head size d of at least 1, got shape \(4, 0\)",
        ),
        (
            {"v": np.ones((2, 6, 6))},
            ValueError,
            r"`k` and `v` must have next-to-last axes .*, got shapes \(2, 5, 3\) and \(2, 6, 6\)",
        ),
        (
            {"q": np.ones((3, 4, 3))},
            ValueError,
            r"leading axes that broadcast, or a head axis .* divides that in `q`, got shapes "
            r"\(3, 4, 3\), \(2, 5, 3\) and \(2, 5, 6\)",
        ),
        (
            {"q": np.ones((2, 2, 4, 3)), "v": np.ones((3, 2, 5, 6))},
            ValueError,
            "axes that broadcast",
        ),
        ({"q": np.ones((6, 4, 3)), "v": np.ones((3, 5, 6))}, ValueError, "axes that broadcast"),
        ({"k": np.ones((0, 5, 3)), "v": np.ones((0, 5, 6))}, ValueError, "axes that broadcast"),
        ({"mask": np.ones((4, 5))}, TypeError, r"`mask` must have dtype bool .*, got float64"),
        ({"mask": [[True]]}, TypeError, r"`mask` must be an array .*, got list"),
        (
            {"mask": np.ones((4, 4), bool)},
            ValueError,
            r"`mask` must broadcast to \(\.\.\., n, m\) = \(2, 4, 5\), got shape \(4, 4\)",
        ),
        (
            {"mask": np.ones((3, 2, 4, 5), bool)},
            ValueError,
            r"`mask` must broadcast .* \(2, 4, 5\)",
        ),
        ({"bias": np.ones((4, 4))}, ValueError, r"`bias` must broadcast to \(\.\.\., n, m\)"),
        (
            {"bias": np.ones(5, np.float32)},
            TypeError,
            r"`bias` must have the dtype of `q`, float64",
        ),
        ({"bias": np.ones(5, bool)}, TypeError, r"`bias` must have the dtype of `q`.*, got bool"),
        ({"causal": 1}, TypeError, r"`causal` must be True or False, got 1 of type int"),
        (
            {"causal": np.ones((4, 5), bool)},
            TypeError,
            r"`causal` must be True .*, got numpy.ndarray",
        ),
        ({"scale": "2"}, TypeError, r"`scale` must be a finite real number.*, got '2' of type str"),
        ({"scale": np.inf}, ValueError, r"`scale` must be a finite real number.*, got inf"),
        ({"scale": np.ones(2)}, TypeError, r"`scale` must be a finite real .*, got numpy.ndarray"),
        ({"scale": 1j}, TypeError, r"`scale` must be a finite real .*, got complex"),
        ({"scale": True}, TypeError, r"`scale` must be a finite real .*, got True of type bool"),
    ],
)
def test_attention_arguments(change, error, message):
    arguments = {"q": Q, "k": K, "v": V, **change}
    q, k, v = (arguments.pop(name) for name in "qkv")
    for function in (attend, softmax_attention):
        with pytest.raises(error, match=message):
            function(q, k, v, **arguments)


def test_scale_of_attend_is_not_optional():
    with pytest.raises(TypeError, match=r"`scale` must be a finite real number, got NoneType"):
        attend(Q, K, V, scale=None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "number",
    [10**400, -(10**5000), Fraction(10**5000, 3)],
    ids=["10**400", "-10**5000", "10**5000 / 3"],
)
def test_numbers_of_many_digits(number):
    # Python refuses to print some of them.
    with pytest.raises(ValueError, match=r"`scale` must be a finite real number, got about -?10"):
        attend(Q, K, V, scale=number)
    wide = (x.astype(np.longdouble) for x in (Q, K, V))
    if abs(number) > 10**4932:  # more than any longdouble
        with pytest.raises(ValueError, match="`scale` must be a finite real number, got about"):
            attend(*wide, scale=number)
    with pytest.raises(TypeError, match=r"`causal` must be True or False"):
        attend(Q, K, V, causal=number)
    if isinstance(number, int):
        with pytest.raises(ValueError, match=r"`num_features` must be .*, got about -?10"):
            random_feature_attention(Q, K, V, num_features=number)


def test_most_axes():
    def axes(count, heads=1):
        return np.ones((*(1,) * (count - 3), heads, 2, 3))

    x, many = axes(31), axes(40)
    assert attend(x, x, x).out.ndim == 31
    assert randomized_attention(x, x, x, num_samples=2, rng=0).ndim == 31
    assert attend(axes(30, 4), axes(30, 2), axes(30, 2)).out.ndim == 30
    for call in (attend, softmax_attention, merge):
        arguments = [(many, many[..., 0])] * 2 if call is merge else [many] * 3
        with pytest.raises(ValueError, match=r"`(q|a.out)` must have at most 31 axes, got 40"):
            call(*arguments)
    with pytest.raises(ValueError, match="`k` must have at most 31 axes, got 40"):
        attend(x, many, many)
    with pytest.raises(ValueError, match="`mask` must have at most 31 axes, got 40"):
        attend(x, x, x, mask=np.ones((1,) * 40, bool))
    with pytest.raises(ValueError, match="`q` must have at most 30 axes, got 31"):
        attend(axes(31, 4), axes(31, 2), axes(31, 2))
    with pytest.raises(ValueError, match="`omega` must have at most 32 axes, got 40"):
        random_feature_attention(x, x, x, omega=many)
    with pytest.raises(ValueError, match="`mean` must have at most 31 axes, got 40"):
        sampling.Gaussian(many)
    with pytest.raises(ValueError, match="`x` must have at most 31 axes, got 40"):
        moments.estimate(many)


THIRD = np.longdouble(1) / 3
TAKES_A_SCALE = {
    "attend": lambda q, k, v, **s: attend(q, k, v, **s).out,
    "softmax_attention": softmax_attention,
    "random_feature_attention": partial(random_feature_attention, omega=OMEGA),
    "trigonometric": partial(random_feature_attention, omega=OMEGA, features="trigonometric"),
    "importance_sampled_attention": partial(importance_sampled_attention, omega=OMEGA),
    "randomized_attention": lambda q, k, v, **s: randomized_attention(
        q, k, v, omega=np.stack([OMEGA] * 4, axis=-3), **s
    ),
    "linear_randomized_attention": partial(linear_randomized_attention, num_proposals=2, rng=0),
    "log_weights": lambda q, k, v, **s: diagnostics.log_weights(q, k, omega=OMEGA, **s),
    "draw_target": lambda q, k, v, **s: sampling.draw_target(q, k, num_samples=3, rng=0, **s),
    "SoftmaxState": lambda q, k, v, **s: streaming.SoftmaxState.init(k, v, **s).read(q),
    "PositiveState": lambda q, k, v, **s: (
        streaming.PositiveState.init(k, v, omega=OMEGA, **s).update(k, v).read(q)
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
    bias = adapt.centre(q, k, [1.0, 2.0], [0.0, 0.0], scale=THIRD).bias
    np.testing.assert_allclose(bias[0], (k[:, 0] + 2 * k[:, 1]) / 3, rtol=float(16 * eps))
    shift = np.array([1, 2], np.longdouble) / 3
    centred = adapt.centre(q, k, shift, -shift)
    np.testing.assert_array_equal(centred.q, q - shift)
    np.testing.assert_array_equal(centred.k, k + shift)
    constant = features.positive_features(q, OMEGA[:, :2], square_norm=THIRD).log_scale
    peak = np.max(q @ OMEGA[:, :2].T, axis=-1)
    np.testing.assert_allclose(constant, peak - THIRD / 2, rtol=0, atol=float(16 * eps))
    options = {"num_proposals": 2, "weighting": "query", "rng": 0}
    want = linear_randomized_attention(q, k, v, beta=Fraction(1, 3), **options)
    near = linear_randomized_attention(q, k, v, beta=float(THIRD), **options)
    np.testing.assert_array_equal(linear_randomized_attention(q, k, v, beta=THIRD, **options), want)
    assert (np.any(want != near)) == (float(THIRD) != THIRD)


def test_a_longdouble_scale_leaves_other_dtypes_alone(backend, dtype):
    q, k, v = (x[0].astype(dtype) for x in (Q, K, V))
    got = backend.call(softmax_attention, q, k, v, scale=THIRD)
    np.testing.assert_allclose(got, softmax_attention(q, k, v, scale=1 / 3), rtol=1e-6)


def test_libraries_and_devices_do_not_mix():
    strict = pytest.importorskip("array_api_strict")
    q, k, v = (strict.asarray(x) for x in (Q, K, V))
    with pytest.raises(
        TypeError, match=r"`k` must come from the same array library as `q`, got num"
    ):
        attend(q, K, v)
    with pytest.raises(TypeError, match=r"`mask` must come from the same array library as `q`"):
        attend(q, k, v, mask=np.ones((4, 5), bool))
    elsewhere = strict.asarray(V, device=strict.Device("device1"))
    with pytest.raises(
        ValueError, match=r"`v` must be on the device of `q`, .*CPU.*, got .*device1"
    ):
        attend(q, k, elsewhere)


@pytest.mark.parametrize(
    ("a", "b", "error", "message"),
    [
        (np.ones(3), (V, V[..., 0]), TypeError, r"`a` must be a pair \(out, lse\), got numpy.nd"),
        ((V, V[..., 0]), [V], TypeError, r"`b` must be a pair \(out, lse\), got list"),
        (
            (V, V[..., 0]),
            (V, 1.0),
            TypeError,
            r"`b.lse` must be an array .*, got 1.0 of type float",
        ),
        (
            (V, V[0, :, 0]),
            (V, V[..., 0]),
            ValueError,
            r"`a.lse` must have the shape of `a.out` without its last axis, got .*\(5,\)",
        ),
        (
            (V, V[..., 0]),
            (V.astype(np.float32), V[..., 0].astype(np.float32)),
            TypeError,
            r"`b.out` must have the dtype of `a.out`, float64, got float32",
        ),
        (
            (V, V[..., 0]),
            (V[..., :2], V[..., 0]),
            ValueError,
            r"`a` and `b` must hold means of one length d_v .*\(2, 5, 6\) and \(2, 5, 2\)",
        ),
        ((V, V[..., 0]), (V[:, :3], V[:, :3, 0]), ValueError, r"for queries that broadcast"),
    ],
)
def test_merge_arguments(a, b, error, message):
    with pytest.raises(error, match=message):
        merge(a, b)


def test_merge_takes_a_plain_pair():
    a = attend(Q, K, V)
    assert isinstance(merge(a, tuple(a)), Attended)  # type: ignore[arg-type]
