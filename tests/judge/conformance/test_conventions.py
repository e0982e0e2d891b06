"""What libraries do, one option at a time: of all its values, only that of the table agrees."""

import numpy as np
import pytest

from refattn import attend, naive
from refattn.judge.conformance import CONVENTIONS, SPECS, TAGS, Adapter, check, conventions
from refattn.judge.conformance.conventions import OPTIONS, Read, Run
from tests.libraries import driver, swap, takes

RNG = np.random.default_rng(0)
NONE = "none"


def problem(n=3, m=5, heads=2, groups=2, d_v=8):
    shapes = (1, heads, n, 8), (1, groups, m, 8), (1, groups, m, d_v)
    return [RNG.standard_normal(shape).astype(np.float32) for shape in shapes]


def close(got, want):
    return got.shape == want.shape and bool(np.allclose(got, want, atol=1e-4, equal_nan=True))


def of(option):
    """A test for each library in which the option is known from running it."""
    names = [
        name
        for name, library in CONVENTIONS.items()
        if option in library.cells and isinstance(library.cells[option].source, Run)
    ]
    return pytest.mark.parametrize("name", names)


def said(name, option):
    return CONVENTIONS[name].cells[option].value


def agrees(name, option, ask, answers):
    """The value of the table gives what the library does, and its neighbours do not."""
    value, found = said(name, option), driver(name)
    if value == NONE:
        assert not takes(found, option)
        return
    assert value in answers
    got = ask(found.call)
    assert [x for x, want in answers.items() if close(got, want)] == [value]


def refuses(name, option, error=(TypeError, ValueError), words=None, **given):
    """Whether the table says that the library refuses, which it must then do."""
    if said(name, option) != "refused":
        return False
    call = driver(name).call
    with pytest.raises(error, match=words):
        call(*problem(), **given)
    return True


def band(n, m, shift, left=None, right=None):
    """Query i sees key j if i + shift - left <= j <= i + shift + right."""
    ahead = np.arange(m) - np.arange(n)[:, None] - shift
    seen = np.ones((n, m), bool) if left is None else ahead >= -left
    return seen if right is None else seen & (ahead <= right)


def without(axis, at):
    """A mask of 3 queries and 5 keys, of which one query or key is not seen."""
    mask = np.ones((3, 5), bool)
    mask[(slice(None),) * axis + (at,)] = False
    return mask


def bias():
    return RNG.standard_normal((1, 1, 3, 5)).astype(np.float32)


@pytest.mark.sweep(2)
@of("layout")
def test_layout(name):
    """The drivers hand arrays over in this layout; in the other the result is another."""
    q, k, v = problem(2, 2)
    found, want = driver(name), naive.softmax_attention(q, k, v)
    assert found.layout == said(name, "layout")
    assert close(found.call(q, k, v), want)
    assert not close(swap(found.call(*map(swap, (q, k, v)))), want)
    if found.layout is None:
        assert close(found.call(q[0], k[0], v[0]), want[0])
        assert close(found.call(q[0, 0], k[0, 0], v[0, 0]), want[0, 0])


@of("causal")
def test_causal(name):
    q, k, v = problem()
    answers = {
        "bottom-right": naive.softmax_attention(q, k, v, causal=True),
        "top-left": naive.softmax_attention(q, k, v, mask=band(3, 5, 0, right=0)),
    }
    agrees(name, "causal", lambda call: call(q, k, v, causal=True), answers)


@pytest.mark.sweep(3)
@of("empty_rows")
def test_empty_rows(name):
    (q, k, v), mask = problem(), without(0, 1)
    empty = ~mask.any(-1)[:, None]
    want = naive.softmax_attention(q, k, v, mask=mask)
    rows = {"zero": 0.0, "nan": np.nan, "mean": np.mean(v, -2, keepdims=True)}
    answers = {value: np.where(empty, row, want) for value, row in rows.items()}
    agrees(name, "empty_rows", lambda call: call(q, k, v, mask=mask), answers)


@of("hidden")
def test_hidden(name):
    """Key 1 is hidden, and NaN with its value, alone, or not at all."""
    (q, k, v), mask = problem(), without(1, 1)
    call, want = driver(name).call, naive.softmax_attention(q, k, v, mask=mask)
    key, value = (np.where(mask[0][:, None], x, np.float32(np.nan)) for x in (k, v))
    tries = {"finite": (k, v), "finite-values": (key, v), "any": (key, value)}
    found = [x for x, arrays in tries.items() if close(call(q, *arrays, mask=mask), want)]
    assert found[-1] == said(name, "hidden")


@of("mask")
def test_mask(name):
    (q, k, v), mask = problem(), RNG.random((3, 5)) < 0.5
    mask[:, 0], mask[:, 1] = True, False
    ways = {"seen": mask, "hidden": ~mask}
    answers = {x: naive.softmax_attention(q, k, v, mask=own) for x, own in ways.items()}
    agrees(name, "mask", lambda call: call(q, k, v, mask=mask), answers)


@of("float_mask")
def test_float_mask(name):
    (q, k, v), mask = problem(), bias()
    mask[..., 0], mask[..., 1] = 0, -np.inf
    if refuses(name, "float_mask", mask=mask):
        return
    answers = {
        "added": naive.softmax_attention(q, k, v, bias=mask),
        "as-bool": naive.softmax_attention(q, k, v, mask=mask != 0),
    }
    agrees(name, "float_mask", lambda call: call(q, k, v, mask=mask), answers)


@of("default_scale")
def test_default_scale(name):
    q, k, v = problem()
    scales = {"1/sqrt(d)": None, "1": 1.0, "1/d": 1 / 8}
    answers = {x: naive.softmax_attention(q, k, v, scale=scale) for x, scale in scales.items()}
    agrees(name, "default_scale", lambda call: call(q, k, v), answers)


@of("groups")
def test_groups(name):
    q, k, v = problem(heads=6, groups=2)
    turned = (np.tile(x, (1, 3, 1, 1)) for x in (k, v))
    answers = {
        "contiguous": naive.softmax_attention(q, k, v),
        "interleaved": naive.softmax_attention(q, *turned),
    }
    agrees(name, "groups", lambda call: call(q, k, v), answers)


@of("softcap")
def test_softcap(name):
    (q, k, v), own = problem(), bias()
    if refuses(name, "softcap", ValueError, "TPU", softcap=0.5):
        return
    capped = 0.5 * np.tanh((q @ k.swapaxes(-1, -2) / np.sqrt(8) + own) / 0.5)
    answers = {
        "before-bias": naive.softmax_attention(q, k, v, bias=own, softcap=0.5),
        "after-bias": naive.softmax_attention(0 * q, k, v, bias=capped.astype(np.float32)),
    }
    agrees(name, "softcap", lambda call: call(q, k, v, mask=own, softcap=0.5), answers)


@of("window")
def test_window(name):
    """One key short or long on either side is another answer too."""
    q, k, v = problem(6, 9)
    windows = {
        "inclusive": (2, 1),
        "exclusive": (1, 1),
        "left one long": (3, 1),
        "right one short": (2, 0),
        "right one long": (2, 2),
    }
    if name == "hf-eager":  # which has windows of causal attention only
        windows = {x: (left, 0) for x, (left, _) in windows.items() if not x.startswith("right")}
    answers = {
        f"{value}, {corner}": naive.softmax_attention(q, k, v, mask=band(6, 9, shift, *sides))
        for value, sides in windows.items()
        for corner, shift in (("top-left", 0), ("bottom-right", 3))
    }
    agrees(name, "window", lambda call: call(q, k, v, window=(2, 1)), answers)


@of("lse")
def test_lse(name):
    q, k, v = problem()
    natural = attend(q, k, v, scale=8**-0.5).lse
    answers = {"e": natural, "2": natural / np.log(2), "e, but for log m": natural - np.log(5)}
    agrees(name, "lse", lambda call: call(q, k, v, lse=True), answers)


@of("lse_empty")
def test_lse_empty(name):
    (q, k, v), mask = problem(), without(0, 1)
    values = {"-inf": -np.inf, "inf": np.inf, "finite": -0.7 * np.finfo(np.float32).max}
    want = attend(q, k, v, mask=mask, scale=8**-0.5).lse
    answers = {x: np.where(mask.any(-1), want, value) for x, value in values.items()}
    agrees(name, "lse_empty", lambda call: call(q, k, v, mask=mask, lse=True), answers)


@of("dropout")
def test_dropout(name):
    """Values that are unit vectors show the weights; those that are kept have the factor."""
    q, k, _ = problem(m=8)
    v = np.broadcast_to(np.eye(8, dtype=np.float32), (1, 2, 8, 8)).copy()
    if said(name, "dropout") == NONE:
        agrees(name, "dropout", None, {})
        return
    out = driver(name).call(q, k, v, p=0.75)
    kept = out > 0
    assert 0 < np.mean(kept) < 0.6
    weights = naive.softmax_attention(q, k, v)[kept]
    answers = {"1": weights, "1/(1-p)": 4 * weights, "1/p": weights / 0.75}
    assert [x for x, want in answers.items() if close(out[kept], want)] == [said(name, "dropout")]


@of("past")
def test_past(name):
    """Three queries and two more keys, after four that are past."""
    (q, k, v), (_, *past) = problem(3, 2), problem(1, 4)
    keys, values = (np.concatenate(pair, 2) for pair in zip(past, (k, v), strict=True))
    answers = {
        value: naive.softmax_attention(q, keys, values, mask=band(3, 6, shift, right=0))
        for value, shift in (("behind", 4), ("bottom-right", 3), ("top-left", 0))
    }
    agrees(name, "past", lambda call: call(q, k, v, past=past, causal=True), answers)


@of("same_value_size")
def test_same_value_size(name):
    q, k, v = problem(d_v=6)
    call = driver(name).call
    if said(name, "same_value_size"):
        with pytest.raises((TypeError, ValueError)):
            call(q, k, v)
    else:
        assert close(call(q, k, v), naive.softmax_attention(q, k, v))


def test_every_cell_is_of_the_vocabulary_and_has_its_test():
    counts = {Run: 0, Read: 0}
    for name, library in CONVENTIONS.items():
        for option, cell in library.cells.items():
            counts[type(cell.source)] += 1
            values = OPTIONS[option].values
            assert not values or cell.value in values or cell.value is None
            if isinstance(cell.source, Run):
                marks = globals()[cell.source.test].pytestmark
                (mark,) = (x for x in marks if x.name == "parametrize")
                assert cell.source.test == f"test_{option}"
                assert name in mark.args[1]
            else:
                assert all(cell.source)
    assert counts == {Run: 135, Read: 42}
    assert "177 conventions: 135 tested by " in conventions.listing()
    assert conventions.listing().endswith(", 42 read in source files (*)")


@pytest.mark.long("jax")
@pytest.mark.parametrize("corner", ["as declared", "another"])
@pytest.mark.parametrize("name", ["torch-sdpa", "jax-dpa", "onnx-24", "onnxruntime", "keras"])
def test_specs_hold(name, corner):
    """The checks agree with the bundle, and say what is wrong with one like it."""
    tags = {"dtype": "float32", "layout": "bhnd"}
    for tag in {"causal", "empty_rows", "hidden"} & set(SPECS[name]):
        tags[tag] = SPECS[name][tag]
    if said(name, "same_value_size"):
        tags["same_value_size"] = True
    names = ["query_without_keys", "causal_cross", "grouped_heads"]
    if corner == "another":
        tags["causal"], names = "bottom-right", ["causal_cross"]
    adapter = Adapter(driver(name).call, "softmax", ["mask", "causal", "gqa"], tags)
    report = check(adapter, checks=names)
    if corner == "as declared":
        assert report.verdict == "PASS", report
    else:
        (words,) = report.diagnosis
        assert words.endswith("except that causal is top-left")


def test_specs_are_of_the_table():
    for name, tags in SPECS.items():
        for tag, value in tags.items():
            assert tag in TAGS
            if tag in OPTIONS:
                assert CONVENTIONS[name].cells[tag].value == value
        Adapter(len, "softmax", (), tags)
