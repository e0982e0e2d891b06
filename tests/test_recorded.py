"""Numbers are those that were recorded, in any array library and on any processor."""

import pytest

from tests import recorded

WANT = recorded.recorded()


@pytest.mark.parametrize("name", recorded.CASES)
def test_numbers_are_those_that_were_recorded(name):
    found, want = recorded.results(name), WANT[name]
    changed = recorded.changes(name, found, want)
    assert not changed, f"{len(changed)} changed, the first: " + "\n".join(
        f"{x}: {found.get(x)}, not {want.get(x)}" for x in changed[:5]
    )
