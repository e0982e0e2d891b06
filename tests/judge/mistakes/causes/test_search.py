"""Wrong outputs and log normalisers: the cause is named, and none that is not there."""

import math
import re

import numpy as np
import pytest

from refattn import softmax_attention
from refattn.judge import verify
from refattn.judge.mistakes.causes.places import as_suspect, say_what_is_left
from refattn.judge.mistakes.causes.trials import Trials
from refattn.judge.mistakes.causes.wrong_rows import stay_wrong
from refattn.judge.rounding.formats import FORMATS
from tests.judge.mistakes.causes.kernels import (
    BF16,
    LOG2E,
    ahead,
    draw,
    fused,
    hide,
    in_tiles,
    named,
    parametrize,
    posing,
    scores,
)

N = 64
Q, K, V, _ = draw()
E4M3 = FORMATS["float8_e4m3fn"].round
LARGE = draw(2, size=4.0)[:3]
BIAS = BF16(np.random.default_rng(9).standard_normal((N, N)))
MASK = np.arange(N) < 40
SINKS_OF_FOUR = np.array([1.0, 2.0, -1.5, 3.0])
FAR = ahead(N, N)
ROW, J = np.arange(N)[:, None], np.arange(N)


def sinking(s, v, sink):
    """One key more, whose value is 0."""
    s = np.concatenate([s, np.broadcast_to(sink, (*s.shape[:-1], 1))], -1)
    return fused(s, np.concatenate([v, 0 * v[..., :1, :]], -2))


given, attention = posing(Q, K, V)


def far_below(least=0, by=-24):
    """Weights are over a maximum of at least so much; the sum of those that vanish is 1."""
    q, k = Q.copy(), K.copy()
    q[..., ::2, 0], k[..., 0] = BF16(by), 24
    s = scores(q, k)
    top = np.maximum(np.max(s, -1, keepdims=True), least)
    w = np.where(s - top < -103, 0, np.exp(np.maximum(s - top, -1e3)))
    total = np.where(np.any(w, -1, keepdims=True), np.sum(w, -1, keepdims=True), 1)
    lse = {"lse": (top + np.log(total))[..., 0]} if least else {}
    return given(BF16(w @ V / total), (q, k, V), **lse)


def summed(size, more):
    """The sum of the weights in bfloat16; of more than 256 that are nearly 1 it stays at 256."""
    q, k, v, _ = draw(3, heads=1, n=32, m=512, size=size)
    s, total = scores(q, k), np.zeros((1, 32))
    w = np.exp(s - more * np.max(s, -1, keepdims=True))
    for j in range(512):
        total = BF16(total + w[..., j])
    return given(BF16(w) @ (v + more) / total[..., None], (q, k, BF16(v + more)))


def summed_in_steps():
    """Every partial sum of a score is rounded."""
    q, k, v = LARGE
    s = np.zeros((2, N, N))
    for x in range(16):
        s = BF16(s + q[..., x, None] * k[:, None, :, x])
    return given(fused(s / 4, v)[0], LARGE)


FOUR = draw(7, heads=4)[:3]


def of_four(change=0.0, order=slice(None), **options):
    """Four heads, with a change of scores or another order."""
    return given(fused(scores(*FOUR[:2]) + change, FOUR[2])[0][order], FOUR, **options)


def sinking_four(used, said):
    sinks = np.array(used)[:, None, None]
    return given(sinking(scores(*FOUR[:2]), FOUR[2], sinks)[0], FOUR, sinks=np.array(said))


def of_four_without_bias(of_lse="own", left=""):
    """The output has no bias; log normalisers have it, and so does one row."""
    s = scores(*FOUR[:2])
    out, lse = fused(s, FOUR[2])
    lse = {"right": fused(s + BIAS, FOUR[2])[1], "noise": np.sin(97 * lse)}.get(of_lse, lse)
    if left in ("out", "a tenth"):
        out[2, 22] *= -1 if left == "out" else 1.1
    elif left == "lse":
        lse[2, 22] += 1
    return given(out, FOUR, bias=BIAS, lse=lse)


def with_lse(s, arrays=(Q, K, V), base=1.0, **options):
    out, lse = fused(s, arrays[2])
    return given(out, arrays, lse=base * lse, **options)


def empty(value):
    out, _ = fused(hide(S, SEEN), V)
    mean = np.mean(V, -2, keepdims=True)
    filled = {"zero": 0.0, "nan": math.nan, "mean": mean, "any": 7.0}[value]
    return given(np.where(ROWS[:, None], out, filled), mask=SEEN)


def unseen():
    """Rows that see no key by mistake are wrong: 0, and -inf, not left out as NaN is."""
    out, lse = fused(hide(S, FAR < 0), V)
    lse = np.where(np.isnan(lse), -np.inf, lse).astype(np.float32)
    return given(np.nan_to_num(out), causal=True, lse=lse)


def in_8_bits():
    w = np.exp(S - np.max(S, -1, keepdims=True))
    return given(E4M3(w) @ V / np.sum(w, -1, keepdims=True))


def sloped(slopes):
    return -np.array(slopes)[:, None, None] * np.abs(FAR)


def crossing(size):
    """Tiles of queries and keys, other ones in each head."""
    seen = np.zeros((2, N, N), bool)
    for head, i, j in ((0, 16, 32), (1, 0, 16), (1, 48, 0)):
        seen[head, i : i + size, j : j + size] = True
    return seen


def overwritten():
    """The first rows of a head are the last of the one before, times a number."""
    out = fused(S, V)[0]
    out[1, :20] = BF16(0.3 * out[0, 44:])
    return given(out)


PAGES = np.where(J < 48, J, J - 32)
S = scores(Q, K)
LSE = fused(S, V)[1]
ROWS = np.arange(N) < 40
SEEN = np.tri(N, dtype=bool) & ROWS & ROWS[:, None]
HEAD_1 = (np.arange(2) == 1)[:, None, None]
CAUSAL = hide(S, FAR <= 0)
EMPTY = {"nan": "NaN", "mean": "the mean of v"}
PART = "agrees in part if the bias is ignored"
ONE_LEFT = f"{PART}; it does not explain 1 of 256 wrong rows, the first is head 2, row 22$"
# What is done and said, and what is to be named.
CASES = {
    "no cap": (lambda: given(fused(scores(*LARGE[:2]), LARGE[2])[0], LARGE, softcap=8.0),
        "there is no soft cap"),
    "sink twice": (lambda: given(sinking(S, V, 1.5 + np.where(ROW < 22, 0, math.log(2)))[0],
        sinks=1.5 * np.ones(2)), "the sink counts twice, but only in queries 22 to 63"),
    "sink of blocks": (lambda: given(sinking(S, V, 1.5 + math.log(-(-J.size // 16)))[0],
        sinks=1.5 * np.ones(2)), "times, as if once for each block of 16 keys"),
    "scale times 1.3": (lambda: attention(1.3 * S), "times the declared scale"),
    "bias twice": (lambda: attention(S + 2 * BIAS, bias=BIAS), "the bias is multiplied by"),
    "cap of 6": (lambda: given(fused(6 * np.tanh(scores(*LARGE[:2]) / 6), LARGE[2])[0], LARGE,
        softcap=8.0), "the soft cap is"),
    "not rescaled": (lambda: given(in_tiles(S, V, 16, 0, 0)),
        "the running sums are not rescaled when the maximum grows (tiles of 16 keys)"),
    "output divided": (lambda: given(in_tiles(S, V, 16, 1, -1)), "the running output is divided, "
        "not multiplied, by e^(old - new maximum) when the maximum grows (tiles of 16 keys)"),
    "from 0": (far_below, "the running maximum starts at 0"),
    "from far below": (lambda: far_below(-12500, -12500), "at -5e4 for q . k before the scale"),
    "stalled": (lambda: summed(0.1, 1), "the sum of the weights stays at 256"),
    "lost tile": (lambda: attention(S[..., :48], V[:, :48]), "keys 48 to 63 are left out"),
    "stops early, causal": (lambda: attention(hide(S, (FAR <= 0) & (J < 59)), causal=True),
        "keys 59 to 63 are left out"),
    "lost tiles": (lambda: attention(hide(S, ~crossing(16))), "queries see other keys: queries 16 "
        "to 31 of head 0 not keys 32 to 47; queries 0 to 15 of head 1 not keys 16 to 31"),
    "other pages": (lambda: attention(S[..., PAGES], V[:, PAGES]), "tiles are read from elsewhere: "
        "keys and values 48 to 63 are those of 16 to 31"),
    "other columns": (lambda: given(np.roll(fused(S, V)[0], 4, -1) * (J[:16] > 3)),
        "in head 0, columns 4 to 15 hold the numbers of columns 0 to 11, and 4 columns are 0"),
    "overwritten": (overwritten, "in head 1, queries 0 to 19 hold the numbers of queries 44 to "
        "63 of head 0, times"),
    "filled": (lambda: attention(np.where(MASK, S, S - 6), mask=MASK),
        "is added to the scores of hidden keys, not -inf"),
    "replaced": (lambda: attention(np.where(FAR <= 0, S, -4), causal=True),
        "hidden keys have the score -4.0"),
    "sums of scores": (summed_in_steps, "scores are rounded to bfloat16 (errors are "),
    "heads exchanged": (lambda: of_four(order=[0, 2, 1, 3]),
        "each head holds the output of other heads: head 1 from head 2, head 2 from head 1"),
    "slopes of their own": (lambda: of_four(sloped([0.3, 0.02, 0.7, 0.05])),
        "scores fall by 0.3"),
    "biases by head": (lambda: of_four(np.array([2, 1, -1, 1])[:, None, None] * BIAS, bias=BIAS),
        "the bias is multiplied by 2"),
    "no bias in a head": (lambda: of_four(np.array([1, 1, 0, 1])[:, None, None] * BIAS, bias=BIAS),
        "the bias is read from other heads: head 2 has none"),
    "sinks of others": (lambda: sinking_four([1.0, 2, 0, 3], [3.0, 2, 1, 0]),
        "head 0 from head 2, head 2 from head 3, head 3 from head 0"),
    "sinks of their own": (lambda: sinking_four([1.0, 2, 0, 3], np.ones(4)), "e^sink counts 2.7"),
    "sinks times a number": (lambda: sinking_four(1.7 * SINKS_OF_FOUR, SINKS_OF_FOUR),
        "each sink is multiplied by 1."),
    "log of i": (lambda: attention(hide(np.log(ROW + 1) * S, FAR <= 0), causal=True),
        "times the log of the position of the query"),
    "log beyond": (lambda: attention(hide(np.maximum(np.log(ROW + 1) / 3, 1) * S, FAR <= 0),
        causal=True), "log(position of the query) / log(20.0"),
    "lse times 1.01": (lambda: attention(S, lse=1.01 * LSE), "lse is 1.01 times what it should be"),
    "lse to base 2": (lambda: attention(S, lse=LOG2E * LSE), "lse is in base 2"),
    "lse of the last part": (lambda: attention(S, lse=fused(S[..., 48:], V[:, 48:])[1]),
        "lse is computed from the last of 4 parts of the keys"),
    "lse of smooth keys": (
        lambda: attention(S, lse=fused(scores(Q, K - np.mean(K, 1, keepdims=True)), V)[1]),
        "lse is computed from keys minus their mean"),
    "lse transposed": (lambda: attention(S, lse=LSE.T.reshape(LSE.shape)), "lse is transposed"),
    "lse to base 2 of the last": (lambda: attention(S, lse=np.where(J < 32, 1, LOG2E) * LSE),
        "lse is in base 2 (multiplied by log2(e)), but only in queries 32 to 63"),
    "lse too large": (lambda: attention(S, lse=LSE + 0.01), "lse is too large by 0.01"),
    "bias times a known number": (lambda: attention(S + math.log(2) * BIAS, bias=BIAS),
        "agrees if the bias is multiplied by 0.69... (ln(2))$"),
    "bias times another": (lambda: attention(S + 0.71 * BIAS, bias=BIAS),
        "agrees if the bias is multiplied by 0.71"),
    "no bias": (of_four_without_bias, "agrees if the bias is ignored$"),
    "no bias in out": (lambda: of_four_without_bias("right"),
        "agrees if the bias is ignored, and lse is right$"),
    "no bias, another lse": (lambda: of_four_without_bias("noise"),
        f"{PART} (only the output: lse does not agree)$"),
    **{f"no bias but for {x}": (lambda x=x: of_four_without_bias("own", x), ONE_LEFT)
        for x in ("out", "a tenth", "lse")},
    **{f"rows are {x}": (lambda x=x: empty(x), f"agrees if rows that see no key are {y} (to accept "
        f"it: empty_rows='{x}', or --empty-rows {x})$") for x, y in EMPTY.items()},
    "weights in 8 bits": (in_8_bits, "weights are rounded to float8_e4m3fn but not in their sum"),
    "scores in 8 digits": (lambda: attention(BF16(S)),
        "scores are rounded to bfloat16 or sums of products are kept in float16, or other"),
    "in a head": (lambda: attention(np.where(HEAD_1, S, CAUSAL), causal=True),
        "agrees if attention is not causal, but only in head 1"),
    "between right rows": (lambda: attention(np.where(ROW % 3 == 1, S, CAUSAL), causal=True),
        "agrees if attention is not causal, but only in queries 1 to 61 in steps of 3$"),
    "the first keys twice": (lambda: with_lse(CAUSAL + math.log(2) * ((ROW >= 16) & (J < 16)),
        causal=True), "agrees if keys 0 to 15 count twice, but only in queries 16 to 63$"),
    "last key unseen": (unseen, "agrees if a query does not see its last key$"),
}  # fmt: skip
# One for each set of arrays and options.
OTHERWISE = (
    "no cap", "sink twice", "bias twice", "not rescaled", "from far below", "stalled", "filled",
    "replaced", "no bias in a head", "rows are nan",
)  # fmt: skip
FAST = ("no cap", "not rescaled", "lse to base 2", "rows are nan", "the first keys twice")


def judged(arrays, **more):
    return verify(**({"profile": "flash"} | arrays | more), dtype="bfloat16")


test_causes_are_named = named(CASES, FAST, profile="flash")


@pytest.mark.sweep(6)
@parametrize(OTHERWISE, FAST)
def test_no_cause_is_named_for_another_defect(name):
    """Right by all that is said, but for numbers of another kind in some rows."""
    arrays = CASES[name][0]()
    options = {x: y for x, y in arrays.items() if x not in ("out", "lse")}
    out = BF16(softmax_attention(**options))
    rows = out.shape[-2] // 4
    other = np.random.default_rng(5).standard_normal((7, out.shape[-1]))
    out[..., rows : rows + 7, :] = BF16(other)
    found = judged(options, out=out)
    assert found.verdict == "FAIL"
    where = f"queries {rows} to {rows + 6}"
    unrelated = f"{where}: numbers have nothing to do with the exact ones: never written (stale)"
    assert all(x.text.startswith(unrelated) for x in found.suspects)
    assert where in found.place


def test_numbers_are_fitted_to_errors_of_a_million_units():
    """In float32 errors are as large if the scale grows with the log of the place."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 96, 16)).astype("f4")
    grown = 0.3 * np.log(np.arange(96, dtype="f4") + 1)[:, None] * q
    found = verify(q=q, k=k, v=v, out=softmax_attention(grown, k, v, causal=True), causal=True)
    words = "agrees if scores are multiplied by (0.3000|0.2999).* times the log of the position"
    assert re.match(words, found.suspects[0].text)


def test_an_option_that_changes_nothing_is_no_cause():
    """A window that hides nothing, a mask that does not, and a cap that is too large to matter."""
    out = fused(S, V)[0]
    found = judged(given(BF16(1.01 * out), window=(N, N), mask=np.ones(N, bool), softcap=1e6))
    assert [x.name for x in found.suspects] == ["factor"]


def test_a_lse_that_fails_alone_is_explained_alone():
    lse = LSE.copy()
    lse[1, 7] = -np.inf
    found = judged(attention(S, lse=lse))
    words = "1 log normaliser is -inf, of query 7, head 1"
    assert (found.verdict, [x.text for x in found.suspects]) == ("FAIL", [words])
    assert "head 1, query 7" in found.place
    assert found.worst[:4] == ("lse", (1, 7), -math.inf, pytest.approx(LSE[1, 7]))


def test_rows_that_are_left():
    """Those of which a tenth of the error or more stays, if that is more than roundings make."""
    out = np.ones((4, 8))
    got = out + np.array([0, 0.9, 2e-3, 1e-2])[:, None]
    before = out + np.array([0, 0.01, 1, 1])[:, None]
    assert stay_wrong(got, out, before, 1e-4).tolist() == [False, True, False, False]


def test_a_cause_that_leaves_most_rows_is_none():
    some = say_what_is_left(as_suspect("agrees if x"), [(1, 2)] * 4, 10)
    most = say_what_is_left(as_suspect("agrees if x"), [(1, 2)] * 5, 10)
    words = (
        "agrees in part if x; it does not explain 4 of 10 wrong rows, the first is head 1, row 2"
    )
    assert (some.text, some.explained, some.name) == (words, 0.6, "convention")
    assert most.name == "convention in part"


@pytest.mark.long
def test_the_worst_element():
    out = fused(S, V)[0]
    right = judged(given(out)).worst
    assert right.name == "out"
    assert abs(right.got - right.exact) < right.allowed
    wrong = out.copy()
    wrong[1, 20, 3] += 1
    found = judged(given(wrong)).worst
    assert found.where == (1, 20, 3)
    assert found.got - found.exact == pytest.approx(1, abs=0.01)
    assert found.allowed < 0.1
    wrong[0, 2, 5] = math.nan
    assert judged(given(wrong)).worst.where == (0, 2, 5)


@parametrize(("no cap", "bias twice", "lost tile"), FAST)
def test_a_verdict_has_few_lines(name):
    """With a failed test, the worst element, and shares of at most all."""
    found = judged(CASES[name][0]())
    text, verbose = str(found), found.write(verbose=True)
    assert len(text.splitlines()) <= 12
    assert "\n  failed: " in text
    assert "\n  worst: " in text
    assert "\n  next: " in text
    assert len(verbose.splitlines()) >= len(text.splitlines())


@pytest.mark.long("zero", "mean", "any", "undefined")
@pytest.mark.parametrize("option", ["zero", "nan", "mean", "any", "undefined"])
@pytest.mark.parametrize("value", ["zero", "nan", "mean", "any"])
def test_rows_that_see_no_key(value, option):
    """They pass by the option that is theirs."""
    right = option in (value, "any", "undefined")
    assert (judged(empty(value), empty_rows=option).verdict == "FAIL") != right


def unwritten(where, value=None):
    """Right numbers, but at a place."""
    out, _ = fused(S, V)
    other = BF16(np.random.default_rng(3).standard_normal(out.shape))
    out[where] = other[where] if value is None else value * out[where]
    return given(BF16(out))


SEEN_PLACES = {
    "sum in 8 digits": (lambda: summed(0.2, 0), "each row is the exact row times a number"),
    "stale rows": (lambda: unwritten(np.s_[:, 1::4]),
        "queries 1 to 61 in steps of 4: numbers are unlike the exact ones"),
    "stale values": (lambda: attention(S, v=np.where((J // 16 == 2)[:, None], V[::-1, ::-1], V)),
        "other values for keys 32 to 47 would explain the error"),
    "no tail": (lambda: unwritten(np.s_[:, 48:], 0), "queries 48 to 63: all numbers are 0"),
    "no columns": (lambda: unwritten(np.s_[..., 12:], 0), "columns 12 to 15: all numbers are 0"),
    "one head": (lambda: unwritten(np.s_[1], 1.5), "head 1: numbers are 1.5 times as large"),
    "rows by factors": (lambda: unwritten(np.s_[0], np.linspace(2, 3, N)[:, None]),
        "head 0: each row is the exact row times a number, 2.001 to 3"),
}  # fmt: skip


@parametrize(("scale times 1.3", "lost tile", "lse to base 2"), FAST)
def test_rows_of_nan_hide_no_cause(name):
    """That of the other rows is named; of these it is said how many there are, and where."""
    arrays = CASES[name][0]()
    numbers = arrays[name.split()[0] if name.startswith("lse") else "out"]
    numbers[0, 3], numbers[1, 40:43] = np.nan, np.inf
    found = judged(arrays)
    assert found.suspects[0].text.startswith("agrees if ")
    assert CASES[name][1] in found.suspects[0].text
    assert found.place == "all 128 rows"
    line = "4 log normalisers are not finite, of queries 3, 40, 41 and 42"
    if "lse" not in name:
        first = "head 0, row 3 (queries 3, 40, 41 and 42)"
        line = f"4 of 128 rows hold NaN or infinity, the first is {first}"
    assert line in found.remarks


@parametrize(SEEN_PLACES, FAST)
def test_what_wrong_numbers_of_a_place_are_is_said(name):
    make, words = SEEN_PLACES[name]
    assert words in judged(make()).remarks[0]


def test_a_factor_that_leaves_much_of_the_errors_is_not_said():
    factors = 1.03 + 0.03 * np.random.default_rng(0).standard_normal(V.shape[-2:])
    assert "times as large" not in str(judged(unwritten(np.s_[1], factors)))


def test_one_wrong_number_is_not_like_numbers_never_computed():
    text = str(judged(unwritten(np.s_[0, 5, 3], -30.0)))
    assert "unknown cause" in text
    assert "never computed" not in text


def test_wrong_rows_anywhere_have_no_place():
    out = attention(S)["out"].copy()
    rows = [0, 1, 3, 7, 20, 34, out.shape[-2] - 1]
    out[:, rows] = out[:, rows][:, ::-1]
    place = judged(attention(S) | {"out": out}).place
    assert "rows" in place
    assert "queries" not in place


def test_right_numbers_have_no_remark():
    assert judged(attention(S)).remarks == []


def test_log_normalisers_that_are_not_finite():
    lse = LSE.copy()
    lse[:, 40:] = np.inf
    remarks = judged(attention(S, lse=lse)).remarks
    assert "48 log normalisers are inf, of queries 40 to 63" in remarks


@pytest.mark.long
def test_other_rows_are_judged_where_rows_see_no_key():
    arrays = empty("nan")
    arrays["out"] = BF16(1.05 * arrays["out"])
    assert judged(arrays, empty_rows="nan").verdict == "FAIL"
    assert judged(arrays, empty_rows="any").verdict == "FAIL"


def test_normalisers_of_rows_that_see_no_key():
    arrays = empty("zero")
    lse = np.where(ROWS, fused(hide(S, SEEN), V)[1], math.inf)
    found = judged(arrays, lse=lse)
    assert "lse of rows that see no key is inf" in found.suspects[0].text
    assert judged(arrays, lse=lse, empty_rows="any").verdict == "PASS"


# What is wrong by a number, and the largest error of it: log normalisers tell its last digits.
NUMBERS = {
    "the bias is multiplied by 2": (CASES["bias twice"][0], 0.0066),
    "the soft cap is 6": (CASES["cap of 6"][0], 0.02),
    "the scale is 1.3": (CASES["scale times 1.3"][0], 0.0043),
    "the scale is 0.96": (lambda: attention(0.96 * S), 0.01),  # too far for a derivative
    "the scale is 0.9": (lambda: with_lse(0.9 * S), 2.5e-5),
    "the scale is 0.71": (lambda: with_lse(0.71 * S), 2.5e-5),
    "the scale is -1": (lambda: with_lse(-S), 2.5e-5),
    "the bias is multiplied by 0.3": (lambda: with_lse(S + 0.3 * BIAS, bias=BIAS), 2.5e-5),
    "the soft cap is 7": (
        lambda: with_lse(7 * np.tanh(scores(*LARGE[:2]) / 7), LARGE, softcap=8.0), 2.5e-5),
    "the scale is 0.9, lse to base 2": (lambda: with_lse(0.9 * S, base=LOG2E), 2.5e-5),
}  # fmt: skip


@pytest.mark.sweep(5)
@parametrize(NUMBERS, ("the scale is 0.71", "the scale is 0.9, lse to base 2"))
def test_numbers_are_measured(name):
    """With their own error, and no words on log normalisers that do not agree."""
    make, most = NUMBERS[name]
    start, *said = name.split(",")[0].rsplit(" ", 1)
    text = judged(make()).suspects[0].text
    found = re.match(f"agrees if {start} (\\S+) ± (\\S+)(?!.*only the output)", text)
    value, error = map(float, found.groups())
    assert abs(value - float(said[0])) < 4 * error < 4 * most


@pytest.mark.long
def test_nothing_is_fitted_where_one_number_leaves_roundings_alone(monkeypatch):
    """A key that two heads lose; lists would name it a second time, or another cause."""
    q, k, v = BF16(np.random.default_rng(1).standard_normal((3, 2, 256, 32)))
    lost = fused(hide(scores(q, k), np.arange(256) != 100), v)[0]
    monkeypatch.setattr(Trials, "list_fitted", lambda self: pytest.fail("a list was fitted"))
    found = judged(given(lost, (q, k, v))).suspects
    assert found[0].text.startswith("key 100 is missing: ")
    value, error = map(float, re.search(r"(\S+) ± (\S+)", found[0].text).groups())
    assert abs(value - 1) < 4 * error < 0.02


def test_masks_of_columns_tell_no_lengths():
    """A member whose mask shows one half of each 8 keys, and one that sees all of them."""
    arrays = BF16(np.random.default_rng(31).standard_normal((3, 2, 1, 64, 16)))
    half = np.arange(64) % 8 < 4
    mask = np.stack([np.ones((64, 64), bool), half == half[:, None]])[:, None]
    found = judged(given(softmax_attention(*arrays), arrays, mask=mask, profile=None))
    assert not any("lengths" in x.text for x in found.suspects)


THREE = draw(5, heads=3, n=96, d=32)[:3]
LATER = ahead(96, 96)


def of_two(seen=True, scale=1.0, keys=slice(None), values=slice(None), factor=1.0):
    q, k, v = THREE
    return BF16(factor * fused(hide(scale * scores(q, k[keys]), seen), v[values])[0])


TWO = {  # what is so, and with which options
    "a query also sees the next key, and the scale is 1.2": lambda: (
        of_two(LATER <= 1, 1.2), {"causal": True}),
    "the window reaches 16 keys to the left, not 15, and the scale is 1.3": lambda: (
        of_two((LATER <= 0) & (LATER >= -16), 1.3), {"causal": True, "window": (15, 0)}),
    "keys are read from the head before, and keys 90 to 95 are left out": lambda: (
        of_two(np.arange(96) < 90, keys=[2, 0, 1]), {}),
    "a query also sees the next key, and the output is 1.1": lambda: (
        of_two(LATER <= 1, factor=1.1), {"causal": True}),
    "the scale is 1, and attention is not causal": lambda: (
        of_two(scale=32**0.5), {"causal": True}),
    "values are read from the first head, and the scale is 0.8": lambda: (
        of_two(scale=0.8, values=[0, 0, 0]), {}),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("words", TWO)
def test_two_causes_at_once(words):
    (out, options), (q, k, v) = TWO[words](), THREE
    text = verify(q=q, k=k, v=v, out=out, dtype="bfloat16", **options).suspects[0].text
    text = re.sub(r"\d\.\d{4,}", lambda x: f"{float(x.group()):.3g}", text)
    assert words in text
