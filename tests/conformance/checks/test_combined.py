"""Uses together: every few of them meet, in few cases."""

from itertools import combinations, product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from refattn.conformance.checks.combined import covering


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.integers(1, 4), st.integers(0, 99))
@settings(max_examples=40)
def test_every_few_levels_meet(sizes, strength, seed):
    levels = {f"factor {i}": tuple(range(size)) for i, size in enumerate(sizes)}
    rows = list(covering(levels, np.random.default_rng(seed), strength))
    assert rows[0] == dict.fromkeys(levels, 0)
    assert len(rows) <= np.prod(sizes)
    for names in combinations(levels, min(strength, len(levels))):
        met = {tuple(row[name] for name in names) for row in rows}
        assert met == set(product(*(levels[name] for name in names)))


def test_few_cases_cover_many():
    levels = {str(i): tuple(range(size)) for i, size in enumerate((3, 3, 8, 2, 3, 3, 2))}
    rows = list(covering(levels, np.random.default_rng(0)))
    assert 72 <= len(rows) <= 150  # of 2,592; 72 have all of the three longest factors
