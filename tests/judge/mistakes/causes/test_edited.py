"""Rows of mistakes are tried as causes: those of a user's file first, the package's own last."""

import math

import numpy as np
import pytest

from refattn.judge import verify
from refattn.judge.mistakes.defects.catalogue import read_mistakes
from tests.judge.mistakes.causes.kernels import BF16, ahead, backward, draw, fused, hide, scores

Q, K, V, _ = draw(n=24, m=32)
J = np.arange(32)
HALVED = math.log(2) * (J % 3 == 0)
ROWS = """# What this kernel has got wrong before.

fails: softmax
This one cannot run.
@ softmax_attention
- hide(s, seen)
+ hide(s, missing)

third-key: softmax
Every third key has half of its weight.
seen: here
@ softmax_attention
- hide(s, seen)
+ hide(s - math.log(2) * (integers(0, k.shape[-2], q) % 3 == 0), seen)

heads-reversed: softmax
Query heads are read in reverse order.
@ call
- dtype = q.dtype
+ dtype, q = q.dtype, q[..., ::-1, :, :]

odd-keys: softmax over backward
In the backward pass, odd keys have half of their derivatives.
@ pull
- p * (t - delta)
+ p * (t - delta) * (1 - integers(0, k.shape[-2], q) % 2 / 2)
"""


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.diff"
    path.write_text(ROWS, "utf-8")
    return path


def first(out, arrays=(Q, K, V), dtype="bfloat16", **options):
    verdict = verify(**dict(zip("qkv", arrays, strict=True)), out=out, dtype=dtype, **options)
    return verdict.verdict, [x.text for x in verdict.suspects[:1]]


THIRD = ("FAIL", ["agrees if every third key has half of its weight"])


@pytest.mark.sweep(3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_row_is_found_in_the_numbers_that_it_makes(rows, dtype, causal):
    """Also in log normalisers; without the file, the cause is unknown."""
    s = hide(scores(Q, K) - HALVED, ~np.array(causal) | (ahead(24, 32) <= 0))
    out, lse = fused(s, V)
    if dtype == "float32":
        w = np.exp(s - lse[..., None].astype(float))
        out = (w @ V / np.sum(w, -1, keepdims=True)).astype(dtype)
    given = {"lse": lse, "dtype": dtype, "causal": causal}
    assert first(out, **given, mistakes=rows) == THIRD
    assert first(out, **given) != THIRD


@pytest.mark.sweep(2)
def test_a_row_is_not_found_in_other_numbers(rows):
    """Neither in right ones nor in those of another mistake."""
    assert first(fused(scores(Q, K), V)[0], mistakes=str(rows)) == ("PASS", [])
    s = hide(scores(Q, K), ahead(24, 32) <= 1)
    found = first(fused(s, V)[0], causal=True, mistakes=rows)
    assert found == ("FAIL", ["agrees if a query also sees the next key"])


@pytest.mark.sweep(2)
def test_a_row_that_cannot_run_is_said(rows, caplog):
    first(fused(scores(Q, K) - HALVED, V)[0], mistakes=rows)
    (said,) = (x.getMessage() for x in caplog.records)
    assert said.startswith("the mistake fails could not be tried: NameError(")


def test_a_row_of_calls_is_run_with_all_heads(rows):
    """Query heads 0 to 3 share two key heads, in two batch members."""
    q, k, v = (np.stack(x) for x in zip(*(draw(i, heads=4, n=12)[:3] for i in (1, 2)), strict=True))
    keys, values = (np.repeat(x[:, :2], 2, 1) for x in (k, v))
    out = fused(scores(q[:, ::-1], keys), values)[0]
    found = first(out, (q, k[:, :2], v[:, :2]), mistakes=rows)
    assert found == ("FAIL", ["agrees if query heads are read in reverse order"])


@pytest.mark.sweep(2)
@pytest.mark.parametrize("heads", [1, 2])
def test_a_row_of_a_backward_pass_is_found_in_gradients(rows, heads):
    q, k, v, g = draw(3, n=24)
    halved = np.where(np.arange(24) % 2, 0.5, 1.0)
    of_scores = lambda p, t, delta: p * (t - delta) * halved  # noqa: E731
    given = backward(q, k[:heads], v[:heads], g, of_scores=of_scores)
    parts = verify(**given, mistakes=rows).parts
    said = "agrees if in the backward pass, odd keys have half of their derivatives"
    assert {x: y.suspects[0].text.startswith(said) for x, y in parts.items() if y.suspects} == {
        "dq": True,
        "dk": True,
    }


def weights(s):
    return np.exp(s - np.max(s, -1, keepdims=True))


S = scores(Q, K)
OWN = {  # output, and what the package's own row says
    "top-four": (
        np.where(weights(S) >= np.sort(weights(S), -1)[..., -4, None], weights(S), 0.0),
        "all keys but the four with the largest scores are ignored",
    ),
    "over-queries": (
        np.exp(S) / np.sum(np.exp(S), -2, keepdims=True),
        "the softmax is taken over queries, not over keys",
    ),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", OWN)
def test_an_own_row_is_found_where_no_other_cause_holds(name):
    w, said = OWN[name]
    out = BF16(w @ V / (1.0 if name == "over-queries" else np.sum(w, -1, keepdims=True)))
    assert first(out) == ("FAIL", [f"agrees if {said}"])


ROW = "third: softmax\nEvery third key.\n@ visible\n- (ahead <= 0)\n+ (ahead < 0)\n"
SHORT = "third: softmax\nEvery third key.\n@ visible: (ahead <= 0) => (ahead < 0)\n"
BELOW = SHORT.replace(" => ", "\n+ ")


def test_a_short_change_is_one_line(tmp_path):
    for name, text in (("short", SHORT), ("below", BELOW), ("long", ROW)):
        (tmp_path / name).write_text(text, "utf-8")
    short, *others = (read_mistakes(tmp_path / x) for x in ("short", "below", "long"))
    assert others == [short, short]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "a file of mistakes must have a row, got none."),
        (ROW.replace(": softmax", ""), "third: a row must begin with `name: estimators`, got 't"),
        (ROW.replace("softmax", "sofmax"), "third: a row must be of softmax, .*, got 'sofmax'."),
        (ROW.replace("softmax", "ra over backward"), "third: a row must be of softmax, rfa, lin"),
        (ROW.replace("softmax", "softmax over x"), "third: a row must be over backward, .* got 'x"),
        (ROW.replace("Every third key.\n", ""), "third: a row must say its effect in a sentence"),
        (ROW[: ROW.index("@")], "third: a row must change a function, got 'no edit'."),
        (ROW.replace("visible", "visibel"), "`visibel` is no function .* Did you mean visible?"),
        (ROW.replace("<= 0", "> 0", 1), r"third: `visible` has '\(ahead > 0\)' 0 times, not once."),
        (ROW.replace("< 0", "< "), "third: the edited text must run, got SyntaxError: "),
        (ROW.replace("@ v", "v"), "third: a row must change a function, got 'no edit'."),
        (
            ROW.replace("- (", "= ("),
            r"third: .* lines that begin with @, - or \+, got '= ",
        ),
        (
            SHORT.replace("=>", "to"),
            r"third: `visible` has '\(ahead <= 0\) to .* 0 times, not once",
        ),
        (ROW.encode("utf-16"), "codec can't decode"),
    ],
)
def test_a_bad_file_is_refused(text, said, tmp_path):
    """With the file, the row and the rule."""
    path = tmp_path / "bad.diff"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=f"bad.diff: .*{said}"):
        read_mistakes(path)


def test_a_path_is_needed(tmp_path):
    with pytest.raises(ValueError, match=r"none\.diff: .*No such file"):
        read_mistakes(tmp_path / "none.diff")
    with pytest.raises(TypeError, match="`mistakes` must be a path, got 3"):
        verify(q=Q, k=K, v=V, out=V, mistakes=3)
