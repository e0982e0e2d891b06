"""Every message about bad arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from refattn import Attended, attend, merge, softmax_attention

Q = np.ones((2, 4, 3))
K = np.ones((2, 5, 3))
V = np.ones((2, 5, 6))


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
def test_attention_arguments(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"q": Q, "k": K, "v": V, **change}
    q, k, v = (arguments.pop(name) for name in "qkv")
    for function in (attend, softmax_attention):
        with pytest.raises(error, match=message):
            function(q, k, v, **arguments)


def test_scale_of_attend_is_not_optional() -> None:
    with pytest.raises(TypeError, match=r"`scale` must be a finite real number, got NoneType"):
        attend(Q, K, V, scale=None)  # type: ignore[arg-type]


def test_libraries_and_devices_do_not_mix() -> None:
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
def test_merge_arguments(a: Any, b: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        merge(a, b)


def test_merge_takes_a_plain_pair() -> None:
    a = attend(Q, K, V)
    assert isinstance(merge(a, tuple(a)), Attended)  # type: ignore[arg-type]
