"""The law of dropout has its level."""

import pytest

from refattn import stats
from refattn.conformance import check
from tests.conformance.candidates import BY_NAME, failures, of


@pytest.mark.long
def test_level_of_the_law_of_dropout():
    """20 correct ones at 5 %: as many fail as may, by the binomial law at 1e-6."""
    adapter = of(BY_NAME["softmax-with-dropout"].fn, "softmax", "dropout")
    options = {"checks": ["law_of_dropout"], "alpha": 0.05, "time_limit": 4.0}
    failed = sum(bool(failures(check(adapter, rng=seed, **options))) for seed in range(20))
    assert stats.binomial(failed, 20, 0.05) > 1e-6 or failed < 2
