"""Where float32 is enough for the law of errors: what it gives is what float64 gives."""

import numpy as np
import pytest

from refattn.judge.rounding import PROFILES
from refattn.judge.rounding.problems import pose_arrays
from refattn.judge.rounding.softmax import analyse_softmax
from refattn.judge.verification.directions import SCORE_CHANGES


def rows(profile, dtype="bfloat16", size=1.0, may_be_single=True, **options):
    """Rows of numbers of few digits, with columns of tiny, equal and alternating values."""
    rng = np.random.default_rng(0)
    q, k, v = (np.rint(8 * rng.standard_normal((x, 24))) / 8 for x in (128, 300, 300))
    v[:, 3], v[:, 4], v[:, 5], v[::2, 6] = 2.0**-120 * v[:, 3], 0.0, 2.0**100, 2.0**-60
    problem = pose_arrays(size * q, k, v, **options)
    roundings = PROFILES[profile]._replace(out=None).roundings(dtype)
    some = problem.head(()), roundings, slice(0, 128), SCORE_CHANGES
    return analyse_softmax(*some, may_be_single=may_be_single)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0, "sinks": np.array(1.5)}])
@pytest.mark.parametrize("profile", ["flash", "upcast", "flash-fast"])
def test_float32_changes_no_standard_deviation_and_no_bound_downwards(profile, options, dtype):
    got, want = (rows(profile, dtype, may_be_single=x, **options) for x in (True, False))
    for name in ("std", "worst", "lse_std", "slack"):
        x, y = getattr(got, name), getattr(want, name)
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=0, err_msg=name)
    np.testing.assert_array_equal(got.nearest, want.nearest)
    assert np.any(got.bound != want.bound)  # float32 was used
    for name in ("bound", "lse_bound"):
        more = getattr(got, name)[want.bound[:, 0] > 0] / getattr(want, name)
        assert np.nanmin(more) >= 1
        assert np.nanmax(more) < 1 + 4 * 2.0**-14


@pytest.mark.parametrize(("profile", "size"), [("math", 1.0), ("eager", 1.0), ("flash", 16.0)])
def test_float64_is_used_where_more_digits_matter(profile, size):
    """Scores that are rounded, and weights whose squares may underflow."""
    got, want = (rows(profile, size=size, may_be_single=x) for x in (True, False))
    for name in ("std", "bound"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name))


def test_weights_that_are_nearly_the_same_are_told_apart_in_float64():
    got, want = (rows("flash", size=2.0**-9, may_be_single=x) for x in (True, False))
    assert np.all(np.isinf(want.std))  # roundings are tied to each other
    np.testing.assert_array_equal(got.bound, want.bound)
    np.testing.assert_array_equal(got.std, want.std)
