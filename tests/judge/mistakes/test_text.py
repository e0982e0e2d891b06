"""The printed formulas, cut into statements, run as the file does."""

import numpy as np

from refattn import naive
from refattn.judge.mistakes.text import code, cut, run, statements

SOURCE = '''"""About."""

from __future__ import annotations

import math
from .. import other

HALF = 0.5
ROOT: float = math.sqrt(2)


def name(function):
    return function.__name__


# of which the name is taken
@name
def half(x: Unknown = HALF):
    """Half."""
    return x / 2
'''


def test_statements_have_names():
    found = cut(SOURCE)
    assert [*found] == [
        *("from __future__ import annotations", "import math", "HALF", "ROOT", "name", "half"),
    ]
    assert found["half"].startswith("@name\ndef half(x")
    assert run(found)["half"] == "half"


def test_the_formulas_run():
    space, q = run(statements()), np.eye(3)
    for name in naive.__all__:
        assert callable(space[name])
    np.testing.assert_array_equal(
        space["softmax_attention"](q, q, q), naive.softmax_attention(q, q, q)
    )


def test_changed_statements_are_bound_where_they_are_defined():
    space = run(cut(SOURCE), {"HALF": "HALF = 2", "name": "def name(function): return function"})
    assert space["half"]() == 1
    assert space["half"].__annotations__ == {"x": "Unknown"}
    assert code("x = 1", "x").co_filename == "<x>"
