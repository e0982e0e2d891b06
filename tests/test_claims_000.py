"""Claims of reference 000: each is refuted when what it is about is made wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from claims import verdicts

from refattn import sampling


def test_proposition_1_needs_normal_frequencies(monkeypatch: pytest.MonkeyPatch) -> None:
    def uniform(num_samples: int, d: int, **options: Any) -> sampling.Samples:
        rng = np.random.default_rng(options["rng"])
        omega = rng.uniform(-(3**0.5), 3**0.5, (num_samples, d))
        return sampling.Samples(omega, np.zeros(num_samples))

    assert verdicts("proposition_1", "quick") == {"unbiased": "HOLDS"}
    monkeypatch.setattr(sampling, "draw", uniform)
    assert verdicts("proposition_1", "quick") == {"unbiased": "REFUTED"}
