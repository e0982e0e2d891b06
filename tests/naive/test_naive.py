"""Windows and sinks of exact attention as it is written, and that formulas share nothing."""

import ast
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given

from refattn import naive
from tests.problems import draw, sizes


@pytest.mark.long("window0")
@pytest.mark.parametrize("window", [(0, 0), (2, 1), (None, 1), (1, None), (None, None), (40, 40)])
@pytest.mark.parametrize("causal", [False, True])
@given(sizes, sizes)
def test_a_window_of_equal_scores_has_the_middle_of_its_values(window, causal, n, m):
    # Of equal scores the result is the middle of what is seen, here of keys from low to high.
    v = np.arange(m, dtype=float)[:, None]
    got = naive.softmax_attention(np.ones((n, 1)), 0 * v, v, window=window, causal=causal)
    left, right = window
    for i in range(n):
        level = i + m - n
        low = 0 if left is None else max(0, level - left)
        high = m - 1 if right is None else min(m - 1, level + right)
        if causal:
            high = min(high, level)
        want = (low + high) / 2 if low <= high else 0.0
        assert got[i, 0] == pytest.approx(want, rel=1e-14, abs=1e-14)


def without_a_source(documented):
    """Names whose text has no paper, no document of those that `naive` lists, and no derivation."""
    source = r"arXiv:\d{4}\.\d{5}|(post|Ye 2023|Zheng 2022), |Derived here"
    return [name for name, text in documented.items() if not re.search(source, text)]


def test_every_formula_names_its_source():
    """Not `visible`, which is a rule of masks."""
    formulas = {*naive.__all__} - {"visible"}
    assert without_a_source({name: getattr(naive, name).__doc__ for name in formulas}) == []
    assert without_a_source({"new": "Attend to keys, as a post from 2023 has it."}) == ["new"]


def test_arguments_may_be_named_in_any_order():
    """The library is that of the first parameter, wherever it stands in the call."""
    x, y = np.random.default_rng(0).standard_normal((2, 4, 3))
    for got, want in zip(
        naive.mean_and_covariance(ddof=0, x=x), naive.mean_and_covariance(x, ddof=0), strict=True
    ):
        np.testing.assert_array_equal(got, want)
    got = naive.kernel_estimate(features="hyperbolic", log_weight=None, omega=y, y=y, x=x)
    np.testing.assert_array_equal(got, naive.kernel_estimate(x, y, y, features="hyperbolic"))


def test_sinks_far_away():
    """One of -inf is none, and one of 1e4 takes all weight; what has no keys is 0 with any."""
    rng = np.random.default_rng(0)
    q, k, v, sinks = draw(rng, 4, 5, 3), draw(rng, 4, 7, 3), draw(rng, 4, 7, 2), draw(rng, 4)
    want = naive.softmax_attention(q, k, v)
    same = naive.softmax_attention(q, k, v, sinks=np.full(4, -np.inf))
    np.testing.assert_allclose(same, want, rtol=1e-14)
    np.testing.assert_array_equal(naive.softmax_attention(q, k, v, sinks=np.full(4, 1e4)), 0)
    hidden = naive.softmax_attention(q, k, v, sinks=sinks, mask=np.zeros(7, bool))
    np.testing.assert_array_equal(hidden, 0)


def test_formulas_share_nothing_with_the_engine():
    folder = Path(naive.__file__).parent
    inside = {path.stem for path in folder.glob("*.py")}
    names, modules = set(), set()
    others = {*folder.glob("__main__.py"), *folder.glob("one_file*.py")}
    for path in {*folder.glob("*.py")} - others:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module in inside:
                assert node.level == 1
            elif isinstance(node, ast.ImportFrom):
                modules.add(node.module)
                names |= {alias.name for alias in node.names} if node.level else set()
            elif isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
    ours = {"arrays", "arrays.library", "arrays.heads", "typing"}
    assert {x for x in modules if x not in sys.stdlib_module_names | {"collections.abc"}} <= ours
    assert names - {"inspect", "math"} == {
        *("checks", "qkv", "frequencies", "key_samples", "tokens", "Recurrent", "Alibi", "Array"),
        *("ArrayT", "Features", "Weighting", "group_heads", "grouped_lead", "constant"),
        *("array_namespace", "as_written", "broadcast_lead", "device", "is_array_api_obj"),
    }
