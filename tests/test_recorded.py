"""Numbers are those that were recorded, on any processor and with any BLAS."""

import pytest

from tests.recorded.cases import CASES, recorded
from tests.recorded.results import changes, results

WANT = recorded()


@pytest.mark.long("backward", "more_gradients", "more_tolerances", "of_files", "profiles")
@pytest.mark.parametrize("name", CASES)
def test_numbers_are_those_that_were_recorded(name):
    found, want = results(CASES[name]), WANT[name]
    changed = changes(name, found, want)
    assert not changed, f"{len(changed)} changed, the first: " + "\n".join(
        f"{x}: {found.get(x)}, not {want.get(x)}" for x in changed[:5]
    )
