"""What moments promise, as a function: its numbers, and that it prints nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from refattn import profile, softmax_attention, theory


def test_predictions_and_costs(capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    q, k, v = 0.3 * rng.standard_normal((3, 2, 12, 3))
    found = profile.study(q, k, v, sizes=[400], target=0.05)
    assert list(found.error) == list(profile.LAWS)
    law = theory.attention_law(q, k, v, num_features=400)
    want = theory.relative_error(law, softmax_attention(q, k, v))
    np.testing.assert_allclose(found.error["rfa"][0], want, rtol=1e-9)
    needed = theory.num_features_for(0.05, q, k, v)
    np.testing.assert_array_equal(found.needed["rfa"], needed)
    assert found.cost("rfa", 6.0) == 6 * (12 + 12) / 144
    assert found.cost("ra", 6.0) == 6
    assert found.heads == [(0,), (1,)]
    assert capsys.readouterr() == ("", "")


def test_without_values() -> None:
    q, k = np.random.default_rng(0).standard_normal((2, 12, 3))
    found = profile.study(q, k)
    assert found.error == found.needed == {}
    assert found.heads == [()]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"target": 0.0}, "`target` must be a positive"),
        ({"scale": -1.0}, "`scale` must be a positive"),
        ({"sizes": [0]}, "`sizes` must be a positive integer"),
        ({"v": np.zeros((12, 3))}, "exact attention must be finite and not all zero"),
    ],
)
def test_bad_arguments(changes: dict[str, Any], text: str) -> None:
    q, k = np.random.default_rng(0).standard_normal((2, 12, 3))
    with pytest.raises(ValueError, match=text):
        profile.study(q, k, **changes)
