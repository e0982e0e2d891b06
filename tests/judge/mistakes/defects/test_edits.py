"""Rows are read as they are written, applied where they fit, and shown where they are short."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from refattn import naive
from refattn.judge.mistakes import defects
from refattn.judge.mistakes.defects import MUTANTS, VARIANTS
from refattn.judge.mistakes.defects.catalogue import read
from refattn.judge.mistakes.defects.edits import Edited
from refattn.judge.mistakes.text import Edit
from tests.judge.conformance.candidates import BY_NAME
from tests.judge.mistakes.defects.probes import tokens

ROWS = Path(defects.__file__).parent / "rows"
Q, K, V = tokens(6, 4), tokens(6, 4, seed=1), tokens(6, 3, seed=2)
ROW = """# About what.
only: omega causal

ahead: softmax rfa ra over stabilised
A token sees
the next one.
seen: here, there
tags: coupling=orthogonal features=trigonometric
lacks: omega
@ visible
- (ahead <= 0)
+ (ahead <= 1)
- seen = seen & mask
+ pass
+             seen = seen & ~mask
@ hide
- -math.inf
+ -1e4
@ average
- softmax
@ weighted_sum
- terms
"""


def test_a_row_is_read():
    softmax, rfa, ra = read(ROW)
    assert [x.name for x in (softmax, rfa, ra)] == ["softmax-ahead", "rfa-ahead", "ra-ahead"]
    assert softmax.effect == "A token sees the next one."
    assert softmax.seen == "here, there"
    assert rfa.tags == {"coupling": "orthogonal", "features": "trigonometric"}
    assert rfa.capabilities == ("causal",)
    assert rfa.fn.over == "stabilised"
    assert rfa.fn.features == "trigonometric"
    assert rfa.fn.edits == (
        Edit("visible", "(ahead <= 0)", "(ahead <= 1)"),
        Edit("visible", "seen = seen & mask", "pass\n            seen = seen & ~mask"),
        Edit("hide", "-math.inf", "-1e4"),
        Edit("average", "softmax", ""),
        Edit("weighted_sum", "terms", ""),
    )
    with pytest.raises(ValueError, match=r"ahead: .* begin with @, - or \+, got '  seen'"):
        list(read("ahead: softmax\nWrong.\n@ visible\n  seen\n"))


@pytest.mark.parametrize(
    ("function", "old", "said"),
    [
        ("visible", "ahead > 0", "ahead: `visible` has 'ahead > 0' 0 times, not once."),
        ("visible", "seen", "ahead: `visible` has 'seen' 10 times, not once."),
        ("nowhere", "seen", "ahead: `nowhere` is no function of the text."),
        ("visible", "True where the query", "ahead: `visible` has .* 0 times"),  # of its docstring
    ],
)
def test_an_old_text_occurs_exactly_once(function, old, said):
    (entry,) = read(f"ahead: softmax\nWrong.\n@ {function}\n- {old}\n+ x\n")
    with pytest.raises(ValueError, match=said):
        entry.fn(Q, K, V)


def test_every_row_applies_and_changes_something():
    for entry in (*VARIANTS, *MUTANTS):
        for lines in entry.fn.diff().values():
            assert {x[:2] for x in lines} <= {"- ", "+ "}, entry.name
            assert lines, entry.name


SHOWN = {
    "softmax-causal-ahead": "in visible (- right, + like yours):\n"
    "  - seen = seen & (ahead <= 0)\n  + seen = seen & (ahead <= 1)",
    "softmax-gqa-interleaved": "",  # what calls the formula
    "softmax-single-precision": "",
    "softmax-mask-minus-1e4": "",  # three functions
    "softmax-window-skips-a-block": "",  # four lines
    "rfa-stabiliser-sees-future": "",  # the text itself
}


@pytest.mark.parametrize("name", SHOWN)
def test_a_short_change_of_one_formula_is_shown(name):
    assert BY_NAME[name].fn.shown() == SHOWN[name]


@pytest.mark.parametrize("file", sorted(ROWS.iterdir()), ids=lambda x: x.name)
def test_a_file_is_in_the_order_of_its_functions(file):
    found = [
        (x.fn.edits[0].function if x.fn.edits else "", x.fn.block)
        for x in read(file.read_text("utf-8"))
    ]
    assert found == sorted(found)
    assert file.read_text("utf-8").startswith("# ")


def test_most_changes_are_shown():
    assert sum(bool(m.fn.shown()) for m in MUTANTS) > len(MUTANTS) / 2


def test_an_implementation_keeps_its_state_and_can_be_pickled():
    fn = BY_NAME["softmax-workspace-handed-out"].fn
    first = fn(Q, K, V)
    assert fn(K, Q, V) is first
    assert BY_NAME["linear-workspace-handed-out"].fn(Q, K, V) is not first
    copy = pickle.loads(pickle.dumps(fn))
    assert copy == fn
    assert copy(Q, K, V) is first


def test_without_edits_it_is_the_formula():
    fn = Edited("", "softmax")
    np.testing.assert_array_equal(fn(Q, K, V), naive.softmax_attention(Q, K, V))
    np.testing.assert_array_equal(fn(q=Q, k=K, v=V), fn(Q, K, V))
    assert fn.diff() == {}
