"""Verdicts on numbers: correct kernels pass, at the level that is said, and defects do not."""

import itertools
import json
import math
import pickle
import re
from types import SimpleNamespace

import numpy as np
import pytest

import refattn
from refattn.features import elu_features
from refattn.judge.rounding import PROFILES
from refattn.judge.rounding.formats import FORMATS
from refattn.judge.rounding.problems import pose_arrays
from refattn.judge.verification import door, findings, judging, likelihood, verify
from refattn.judge.verification.verdict import join_verdicts
from tests.judge.rounding.rounded import (
    BF16,
    DTYPES,
    LOG2E,
    Case,
    dump,
    f32,
    flash,
    of_heads,
    scores32,
)
from tests.judge.verification.test_evidence import alarms
from validation import level_numbers


def smallest(found):
    return min(found.trials.values())


@pytest.mark.parametrize("count", [3, pytest.param(2000, marks=pytest.mark.long)])
def test_level(count):
    """No right file fails, and there are no more alarms than the level allows."""
    p = []
    for seed in range(10_000, 10_000 + count):
        words, given = level_numbers.draw_file(seed)
        found = verify(**given, explain=False)
        assert found.verdict != "FAIL", words
        p.append(level_numbers.smallest(found))
    for level in (0.05, 0.01, 0.001):
        assert alarms(np.log(np.maximum(p, 1e-300)), level)


def odd():
    """Honest problems in which roundings are less independent than they look: arrays, options."""
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((3, 48, 8)) for _ in range(3))
    key, hidden = rng.integers(0, 4, 48), rng.random((48, 48)) < 0.5
    empty = {"mask": np.broadcast_to(np.arange(48)[:, None] > 10, (48, 48))}
    arrays = {
        "equal queries": {"q": np.repeat(q[:, :1], 48, 1)},
        "padded with zeros": {"q": np.where(np.arange(48)[:, None] < 25, 0, q)},
        "equal keys": {"k": 0 * k},
        "four keys": {"k": k[:, key]},
        "batch of copies": {"q": q[[0] * 3], "k": k[[0] * 3], "v": v[[0] * 3]},
        "queries nearly equal": {"q": q[:, :1] + 1e-3 * q},
        "keys nearly equal": {"k": k[:, :1] + 1e-2 * k},
        "small integers": {"q": np.rint(q), "k": np.rint(k)},
        "signs": {"q": np.sign(q), "k": np.sign(k), "v": np.sign(v)},
        "values with a mean": {"v": 1 + v / 100},
        "large mean": {"v": 100 + v},
        "one value": {"v": 0 * v + 1},
        "zero values": {"v": 0 * v},
        "values of a unit matrix": {"v": np.broadcast_to(np.eye(48), (3, 48, 48))},
        "one key": {"k": k[:, :1], "v": v[:, :1]},
        "two keys": {"k": k[:, :2], "v": v[:, :2]},
        "one dimension": {"q": q[..., :1], "k": k[..., :1]},
        "one column": {"v": v[..., :1]},
        "heads of all sizes": {"v": v * np.array([1e-3, 1, 1e3])[:, None, None]},
    }
    sizes = (1e-7, 1e-5, 1e-3, 1e-2, 0.1, 30.0, 1000.0)
    arrays |= {f"queries times {x}": {"q": x * q} for x in sizes}
    arrays |= {f"values times {x}": {"v": x * v} for x in (1e-7, 1e-5, 1e4)}
    options = {
        "bias of -inf": {"bias": np.where(hidden, -np.inf, 0.0)},
        "the least bias": {"bias": np.where(hidden, -65504.0, 0.0)},
        "empty rows": empty,
        "a sink of -inf": {"sinks": np.array([-np.inf, 1.0, 2.0])},
        "a sink and empty rows": empty | {"sinks": np.full(3, 1.0)},
        "a narrow window": {"window": (1, 0)},
    }
    options |= {f"a sink of {x}": {"sinks": np.full(3, x)} for x in (-20.0, 0.0, 5.0, 12.0)}
    both = {
        "equal queries, causal": (arrays["equal queries"], {"causal": True}),
        "few tokens": ({"q": q[:, key], "k": k[:, key]}, {"causal": True}),
        "a small cap": ({"q": 4 * q}, {"softcap": 0.5}),
    }
    return {x: (y, {}) for x, y in arrays.items()} | {x: ({}, y) for x, y in options.items()} | both


@pytest.mark.sweep(5)
@pytest.mark.long("float16", "math", "eager", "narrow", "weights")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(x, y) for x in ("math", "flash", "eager", "eager-narrow", "fp8-weights") for y in DTYPES[x]],
)
@pytest.mark.parametrize("third", range(3))
def test_honest_uses_pass(name, dtype, third):
    rng, to = np.random.default_rng(3), FORMATS[dtype].round
    usual = dict(zip("qkv", (rng.standard_normal((3, 48, 8)) for _ in range(3)), strict=True))
    for words, (changed, options) in [*odd().items()][third::3]:
        x = {a: to(y) for a, y in (usual | changed).items()}
        with np.errstate(all="ignore"):
            out, lse = of_heads(name, **x, dtype=dtype, **options)
        found = verify(**x, out=out, lse=lse, dtype=dtype, profile=name, **options)
        assert found.verdict != "FAIL", (words, found.tests[:3])
        assert smallest(found) > 1e-3, (words, found.tests[:3])


ALL = range(12)
SOME = [5, 9]


def sample(heads=SOME):
    """128 x 32 trained tensors: of 12 heads 4 have the queries of other keys."""
    q, k, v = (BF16(x.reshape(8, 128, 32).astype(np.float64)) for x in refattn.load_sample())
    pairs = ((q, [1, 0, 3, 2]), (k, range(4)), (v, range(4)))
    return [np.concatenate([x, x[y]])[list(heads)] for x, y in pairs]


def run(kernel=flash, to="bfloat16", heads=SOME, sinks=None, **options):
    """A kernel on the sample, with other conventions than will be said, and a sink of each head."""
    own = {x: y for x, y in options.items() if x in Case._fields}
    rest = {x: y for x, y in options.items() if x not in own}
    if kernel is flash:
        rest["out"] = to
    of_heads = [None] * len(heads) if sinks is None else map(float, sinks)
    cases = (Case(*x, **own, sinks=s) for *x, s in zip(*sample(heads), of_heads, strict=True))
    return np.stack([kernel(x, "bfloat16", **rest)[0] for x in cases])


def judged(out, *, heads=SOME, profile="flash", **said):
    """The verdict on what is said to be attention of the sample."""
    q, k, v = sample(heads)
    given = {"q": q, "k": k, "v": v} | said
    return verify(**given, out=out, dtype="bfloat16", profile=profile)


def truncated(x):
    step = FORMATS["bfloat16"].spacing(x)
    return np.trunc(x / step) * step


def one_tile(case, dtype, *, epsilon=0.0):
    """A cap comes before the scale, or something is added to the normaliser."""
    s = scores32(case._replace(softcap=None))
    if case.softcap is not None:
        s = case.softcap * np.tanh(s / f32(case.factor) / case.softcap) * case.factor
    w = np.exp(s - s.max(-1, keepdims=True))
    return BF16(BF16(w) @ case.v / (w.sum(-1, keepdims=True) + f32(epsilon))), None


def changed(x, at, to):
    x = x.copy()
    x[at] = to(x[at])
    return BF16(x)


WITHOUT_LAST = np.arange(128) < 127
TWICE = np.where(np.arange(128) == 60, math.log(2), 0.0) + np.zeros((128, 1))
SLOPE = -0.01 * np.abs(np.arange(128) - np.arange(128)[:, None])
SCALE = 32**-0.5
RISE = 0.001 * (np.arange(128) - np.arange(128)[:, None])
A, H = {"heads": ALL}, {"heads": [0]}
C, ONE, CAP = {"causal": True}, np.eye(1, 128, dtype=bool), {"softcap": 20.0}
LOST = np.tile(WITHOUT_LAST, (128, 1))
EDGES = [np.tri(128, k=x, dtype=bool) | (ONE & ONE.T) for x in (1, -1)]
EXACT, WINDOW = run(to="float32"), {"window": (64, 0)}
OWN, SMALL = {"heads": [0], "window": (1, 0)}, {"heads": [0], "sinks": np.array([-1.0])}
SINKS, NEXT = BF16(np.random.default_rng(7).normal(2, 1, 2)), "attention is causal, but a query"
CAPPED = "1 / cap^2 of a soft cap on the scores is 2.4"


def one_head_of(right, wrong):
    return np.concatenate([right[:1], wrong[1:]])


def one_row_of(right, wrong):
    return np.concatenate([wrong[:, :1], right[:, 1:]], 1)


# What is done, what is said, whether allclose(rtol=1e-2, atol=1e-2) sees it, and what is told.
DEFECTS = {
    "scale 1e-4": (lambda: run(scale=SCALE * 1.0001, heads=ALL), A, False, "the scale is 1.000"),
    "scale 2e-4": (lambda: run(scale=SCALE * 1.0002, heads=ALL), A, False, "the scale is 1.000"),
    "scale 3e-3": (lambda: run(scale=SCALE * 1.003), {}, False, "the scale is 1.0029"),
    "last key lost": (lambda: run(mask=LOST), {}, True, "key 127 is left out"),
    "key twice": (lambda: run(bias=TWICE), {}, True, "key 60 counts twice"),
    "edge +1": (lambda: run(mask=EDGES[0]), C, True, "also sees the next key"),
    "edge -1": (lambda: run(mask=EDGES[1]), C, True, "does not see its last key"),
    "truncated": (lambda: truncated(EXACT), {}, False, "is truncated, not rounded ("),
    "epsilon 1e-3": (lambda: run(one_tile, epsilon=1e-3), {}, False, "0.001"),
    "log2 e": (lambda: run(base2=True, log2e=1.443, heads=ALL), A, False, "the scale is 1.00018"),
    "tile": (lambda: changed(EXACT, np.s_[-1, 32:48], lambda x: 1.01 * x), {}, False, ""),
    "tile 3e-3": (lambda: changed(EXACT, np.s_[-1, 32:48], lambda x: 1.003 * x), {}, False, ""),
    "cap before": (lambda: run(one_tile, **CAP), CAP, True, ""),
    "cap of 200": (lambda: run(softcap=200.0, heads=ALL), A, False, CAPPED),
    "ALiBi": (lambda: run(bias=1.01 * SLOPE), {"bias": SLOPE}, False, ""),
    "rise": (lambda: run(bias=RISE), {}, True, "scores rise by 0.001"),
    "factor": (lambda: BF16(1.003 * EXACT), {}, False, "the output is 1.00"),
    "epsilon 1e-2": (lambda: run(one_tile, epsilon=1e-2), {}, False, "sum of e^(score - "),
    "window": (lambda: run(window=(65, 0)), WINDOW, True, "reaches 65 keys to the left"),
    "window of 1": (lambda: run(window=(0, 0), heads=[0]), OWN, True, "reaches 0 keys to the left"),
    "no small sink": (lambda: run(heads=[0]), SMALL, False, "agrees if there is no sink"),
    "sinks scaled": (lambda: run(sinks=SCALE * SINKS), {"sinks": SINKS}, True, "the sink is also "),
    "sinks, base 2": (lambda: run(sinks=LOG2E * SINKS), {"sinks": SINKS}, True, "by log2(e)"),
    "causal, edge +1": (lambda: run(mask=EDGES[0]), {}, True, f"{NEXT} also sees the next key"),
    "causal, edge -1": (lambda: run(mask=EDGES[1]), {}, True, f"{NEXT} does not see its last key"),
    "one head": (lambda: one_head_of(run(), run(scale=SCALE * 1.003)), {}, False, "head 1"),
    "no rescaling": (lambda: run(rescale=False), {}, True, ""),
    "columns": (lambda: run()[..., [1, 0, *range(2, 32)]], {}, True, ""),
    "NaN": (lambda: changed(run(), np.s_[1, 5, 3], lambda x: math.nan), {}, True, ""),
    "zeros": (lambda: 0 * run(), {}, True, "the output is 0 everywhere"),
    "transposed": (lambda: np.swapaxes(run(), 1, 2).reshape(2, 128, 32), {}, True, ""),
    "one number": (lambda: changed(run(), np.s_[1, 7, 9], lambda x: 1.02 * x), {}, False, ""),
    "row of the next": (lambda: run()[:, [*range(7), 8, *range(8, 128)]], {}, True, ""),
    "one key in a row": (lambda: one_row_of(run(**H), run(mask=LOST, **H)), H, True, ""),
}
FAST = {"scale 3e-3", "last key lost", "edge -1", "truncated", "epsilon 1e-3", "window", "one head"}
FAST |= {"tile", "tile 3e-3", "NaN", "zeros", "window of 1", "no small sink"}


def some(names, fast):
    """Cases of which only some are not long."""
    return [pytest.param(x, marks=[] if x in fast else [pytest.mark.long]) for x in names]


@pytest.mark.sweep(5)
@pytest.mark.long("window")
@pytest.mark.parametrize("defect", some(DEFECTS, FAST))
def test_defects_are_rejected(defect):
    make, said, seen, words = DEFECTS[defect]
    said = {"heads": SOME} | said
    out = make()
    found = judged(out, **said)
    assert found.verdict == "FAIL"
    assert np.allclose(out, run(**said), rtol=1e-2, atol=1e-2) != seen
    if words:
        assert words in found.suspects[0].text
    json.loads(found.to_json())
    assert str(found).startswith("FAIL: no correct kernel in bfloat16")


def test_a_mask_that_hides_all_is_no_suspect():
    q, k, v = (x[:, :24] for x in sample([0]))
    out = 1.1 * refattn.softmax_attention(q, k, v)
    found = judged(BF16(out), q=q, k=k, v=v, mask=np.ones(24, bool))
    assert found.verdict == "FAIL"
    assert not any("inverted" in x.text for x in found.suspects)


@pytest.mark.long
def test_a_failure_that_nothing_explains_is_said_to_be_one():
    """Suspects that explain little are not named; the failed tests and the place are."""
    words = "\n  unknown cause: nothing that was tried explains most of the error\n"
    rolled = judged(np.roll(run(), 5, 1)).suspects[0].text
    assert re.match(
        r"agrees if in head 0, queries 5 to 127 hold the numbers of queries 0 to 122, "
        r"queries 0 to 4 hold the numbers of queries 123 to 127",
        rolled,
    )
    found = judged(BF16(np.sin(97 * run(**H))), **H)
    assert found.suspects == []
    assert str(found).split("\n  where: ")[0] + "\n" == str(found).splitlines()[0] + words
    assert "\n  failed: " in str(found)
    assert "unknown cause" not in found.to_json()
    found = judged(BF16(1.01 * run(to="float32", **H)), **H)
    assert max(x.explained for x in found.suspects) > 0.5
    assert words not in str(found)
    assert all(0 <= x.explained <= 1 for x in found.suspects)


# Too small for 12 x 128 x 32 numbers of 8 digits, or another way to be right.
NOT_SEEN = {
    "scale 2e-5": lambda: run(scale=SCALE * 1.00002),
    "epsilon 1e-5": lambda: run(one_tile, epsilon=1e-5),
    "log2 e": lambda: run(base2=True, log2e=1.4427),
    "rounded normaliser": lambda: run(rounded_normaliser=True),
    "tile": lambda: changed(run(to="float32"), np.s_[-1, 32:48], lambda x: 1.0002 * x),
    "rounded twice": lambda: BF16(FORMATS["float16"].round(run(to="float32"))),
}


@pytest.mark.parametrize("defect", NOT_SEEN)
def test_what_is_not_seen(defect):
    found = judged(NOT_SEEN[defect]())
    assert found.verdict == "PASS"
    assert found.detectable["scale"] > 2e-5
    assert found.detectable["epsilon"] > 1e-5


@pytest.mark.parametrize(
    ("at", "by", "words"),
    [
        (np.s_[1, 5:7, 3], math.nan, "2 of 256 rows hold NaN or infinity, the first is head 1, "
            "row 5 (queries 5 to 6, column 3)"),
        (np.s_[1, 5, 3], math.nan,
            "1 of 256 rows holds NaN or infinity, at head 1, row 5 (column 3)"),
        (np.s_[:], math.nan, "256 of 256 rows hold NaN or infinity, the first is head 0, row 0 "
            "(queries 0 to 127)"),
        (np.s_[:], 0.0, "the output is 0 everywhere"),
    ],
)  # fmt: skip
def test_remarks(at, by, words):
    found = judged(changed(run(), at, lambda x: by * x))
    assert found.remarks == [words]
    if at == np.s_[:]:  # no row is a result
        cause = words.partition(",")[0]
        assert [x.text for x in found.suspects] == [cause]
        assert str(found).count(cause) == 1
        assert by == 0 or "standard deviation" not in str(found)


def test_one_cause_is_not_printed_with_two_numbers():
    q, k, v = (x.astype(np.float32) for x in sample([0]))
    out = refattn.softmax_attention(q, k, v, scale=0.2)
    found = verify(q=q, k=k, v=v, out=out)
    times = "times the declared scale"
    assert sum(times in x.text for x in found.suspects) == 1
    assert [times in x for x in str(found).splitlines()].count(True) == 1


def test_the_gradient_of_the_output_alone_is_not_used():
    q, k, v = sample([0])
    out = refattn.naive.softmax_attention(q, k, v)
    text = "d_out is not used: there is no dq, dk or dv"
    found = verify(q=q, k=k, v=v, out=out, d_out=v, dtype="float64")
    assert text in found.remarks
    assert text in str(found)
    k = k / np.linalg.norm(k, axis=-1, keepdims=True)
    rest = {"beta": np.full(q.shape[:-1], 0.5), "estimator": "delta-rule", "dtype": "float64"}
    out, state = refattn.naive.delta_rule(q, k, v, beta=rest["beta"])
    found = verify(q=q, k=k, v=v, out=out, state=state, d_out=v, **rest)
    assert text in str(found)


def test_verdicts_can_be_pickled():
    x = np.zeros((1, 2, 2))
    for results in ({"out": x}, {"out": x, "d_out": x, "dq": x}):
        verdict = verify(q=x, k=x, v=x, **results, profile="math")
        assert str(pickle.loads(pickle.dumps(verdict))) == str(verdict)


@pytest.mark.usefixtures("verdict_alone")
def test_lse():
    """That of a row that sees no key is minus infinity."""
    rng = np.random.default_rng(4)
    q, k, v = (BF16(rng.standard_normal((20, 30, 8)))[:, :x] for x in (20, 30, 30))
    mask = np.broadcast_to(np.arange(20)[:, None] > 3, (20, 30))
    out, lse = of_heads("flash", q, k, v, "bfloat16", mask=mask)
    given = {"q": q, "k": k, "v": v, "out": out, "dtype": "bfloat16", "mask": mask}
    assert verify(**given, lse=lse).verdict == "PASS"
    not_finite = np.where(lse == lse.max(), np.nan, lse), np.where(np.isinf(lse), 0.0, lse)
    for wrong in (lse + 1e-4, lse * LOG2E, *not_finite):
        assert verify(**given, lse=wrong).verdict == "FAIL"


@pytest.mark.usefixtures("verdict_alone")
def test_nan_where_scores_overflow():
    """Nothing is proven there; elsewhere a NaN, and an error beyond the bound, still show."""
    rng = np.random.default_rng(5)
    q, k, v = (FORMATS["float16"].round(rng.standard_normal((40, 30, 8)))[0] for _ in range(3))
    q[3] = 60000.0
    given = {"q": q, "k": k, "v": v, "dtype": "float16", "profile": "half-sums"}
    with np.errstate(all="ignore"):
        out = of_heads("half-sums", q[None], k[None], v[None], "float16")[0][0]
    assert verify(**given, out=out).verdict != "FAIL"
    for wrong in (math.nan, math.inf, 3.0):
        other = out.copy()
        other[4, 2] = wrong
        assert verify(**given, out=other).verdict == "FAIL"


def test_ranks_of_profiles():
    """What explains the numbers, then what does with a defect, then the nearest, in logarithms."""

    def rank(rejected, inputs, explained, rms):
        suspects = [SimpleNamespace(explained=x) for x in explained]
        z = SimpleNamespace(rms=rms)
        trial = SimpleNamespace(rejected=lambda _: rejected, suspects=suspects, z=z)
        return findings.ProfileTrial.rank(trial, 1e-6, inputs)

    assert rank(False, True, [], 9.0) < rank(True, False, [0.96], 1.0)
    assert rank(True, False, [0.96], 9.0) < rank(True, False, [0.94, 0.5], 1.0)
    assert rank(True, False, [], 9.0) < rank(True, True, [0.96], 1.0)
    assert rank(True, False, [], 0.5) == pytest.approx(rank(True, False, [], 2.0))


def test_elements_that_would_be_rejected_and_profiles_that_are_ruled_out_are_told():
    """t worst + D + slack, of P(|z| > t) <= 2 exp(-t^2 / 2) for all elements and tests at alpha."""
    q, k, v = (x[:1, :16] for x in sample())
    found = verify(**dump("flash", q, k, v, "bfloat16"), profile="flash")
    told = re.search(r"an element that is off by (\S+) standard deviations", str(found))
    assert float(told[1]) == pytest.approx(found.element, rel=1e-2)
    assert found.element > found.z.largest  # else it would have been rejected
    roundings = PROFILES["flash"].roundings("bfloat16")
    rows = pose_arrays(q, k, v).analyse((0,), roundings, slice(0, 16))
    most = np.max((np.abs(rows.nearest - rows.out) + rows.slack) / rows.std)
    far = (found.element - most) / np.max(rows.worst / rows.std)
    p = 2 * math.exp(-(far**2) / 2) * len(found.tests) * rows.out.size
    assert p == pytest.approx(found.alpha, rel=0.05)  # D is of one side, and slack of both
    words = "\n  profiles ruled out: math\n"
    assert words not in str(found)
    tried = found._replace(trials={"math": 1e-9, "flash": 1.0})
    assert words in str(tried)
    assert words not in str(tried._replace(verdict="FAIL"))  # which names all that were tried


ORDER = ("FAIL", "UNDERPOWERED", "PASS")


@pytest.mark.parametrize("verdicts", [*itertools.product(ORDER, repeat=3)])
def test_the_worst_of_all_parts_is_what_is_said(verdicts):
    """The first of these, at the alpha of all; seconds are those of all."""
    x, names = np.zeros((1, 2, 2)), ("out", "dq", "dv")
    plain = verify(q=x, k=x, v=x, out=x, profile="math")._replace(seconds=2.0)
    parts = {x: plain._replace(verdict=y) for x, y in zip(names, verdicts, strict=True)}
    found, worst = join_verdicts(parts, 0.3, 3), min(verdicts, key=ORDER.index)
    assert (found.verdict, found.of) == (worst, names[verdicts.index(worst)])
    assert (found.alpha, found.seconds) == (0.3, 6.0)
    assert [(x.of, x.verdict) for x in found.parts.values()] == [*zip(names, verdicts, strict=True)]
    alone = {"out": parts["out"]}
    assert join_verdicts(alone, 0.3, 1) == parts["out"]
    assert join_verdicts({"dq": parts["dq"]}, 0.3, 1).parts.keys() == {"dq"}


# Evidence against profiles, what some rows and what all rows reject, what is tried in which order,
# and what is chosen, of dq, dk and dv by math (m), flash (f) and upcast (u).
OF_ALL = {
    "the first explains all": ({}, "", "", "dq m dk m dv m", "m"),
    "the likeliest": ({"dk f": -5.0}, "", "", "dq f dk f dv f", "f"),
    "some rows rule it out": ({}, "dv m", "", "dv f dq f dk f", "f"),
    "the second": ({}, "", "dk m", "dq m dk m dq f dk f dv f", "f"),
    "none explains one of them": (
        {"dv f": -1.0}, "", "dk m dk f dk u", "dq f dk f dq m dk m dq u dk u dv f", "f",
    ),
    "none explains two": (
        {}, "", "dq m dq f dk u dv u", "dq m dq f dq u dk u dv u dk m dv m", "m",
    ),
    "all but one are ruled out": ({"dq u": 9.0}, "dq m dq f", "", "dq u dk u dv u", "u"),
    "one that is unlikely comes last": (
        {"dq m": 20.0}, "", "dk f dk u", "dq f dk f dq u dk u dq m dk m dv m", "m",
    ),
    "all are ruled out": ({"dk f": -5.0}, "dk m dk f dk u", "", "dq m dv m", "m"),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_ALL)
def test_gradients_are_judged_by_one_profile(name, monkeypatch):
    against, *words, order, best = OF_ALL[name]
    out, rejected = ({*zip(x.split()[::2], x.split()[1::2], strict=True)} for x in words)
    tried = []

    class Case:
        def __init__(self, part, asked):
            self.of, self.profiles, self.explained = part, dict.fromkeys("mfu"), {*"mfu"}
            self.glance = self.take_evidence = lambda _: False
            self.conclude = lambda x: (part, x)
            self.fits = {}

        def compare(self, names):
            of = {x: against.get(f"{self.of} {x}", 0.0) for x in names}
            self.fits = {x: likelihood.Fit(True, y, "", 0.0) for x, y in of.items()}

        def is_out(self, x):
            return x in self.fits and (self.of, x) in out

        def rejects(self, x, first):
            if not self.is_out(x) and f"{self.of} {x}" not in tried:
                tried.append(f"{self.of} {x}")
            return self.is_rejected(x)

        def is_rejected(self, x):
            return self.is_out(x) or (f"{self.of} {x}" in tried and (self.of, x) in rejected)

    monkeypatch.setattr(judging, "_Case", Case)
    parts = {x: x for x in ("dq", "dk", "dv")}
    found = judging._judge_gradients(parts, SimpleNamespace(hardware="ieee"))
    assert " ".join(tried) == order
    assert found == {x: (x, best) for x in parts}


def test_the_feature_map_of_linear_attention_is_the_one_given(monkeypatch):
    monkeypatch.setattr(door, "judge_all", lambda parts, *_: parts)
    x = np.ones((3, 2))
    for given, expected in ((None, elu_features), (np.exp, np.exp)):
        found = verify(q=x, k=x, v=x, out=x, estimator="linear", feature_map=given)
        assert found["out"].problem.feature_map is expected


def test_derivatives_to_a_wider_output_are_of_its_type():
    q, k, v = (x[:1, :8] for x in sample())
    out, pullback = refattn.vjp(refattn.softmax_attention, q, k, v)
    out, d_out = (x.astype(np.float32) for x in (out, out - 0.1))
    given = {"q": q, "k": k, "v": v, "d_out": d_out, "dv": BF16(pullback(d_out.astype(float))[2])}
    given |= {"dtype": "bfloat16", "profile": "math"}
    assert verify(**given, out=out).parts["dv"].verdict != "FAIL"
    wide = given | {"dv": pullback(d_out.astype(float))[2].astype(np.float32)}
    assert verify(**wide, out=out).parts["dv"].out_dtype == "float32"
    for wrong in ({}, {"out": BF16(out)}):
        with pytest.raises(ValueError, match=r"`d_out` must hold numbers of bfloat16"):
            verify(**given, **wrong)


@pytest.mark.sweep(2)
@pytest.mark.long("inf", "bfloat16")
@pytest.mark.parametrize(("bad", "where"), [(math.nan, "kv"), (math.inf, "k"), (-math.inf, "v")])
@pytest.mark.parametrize("by", ["mask", "bias", "causal", "window"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@pytest.mark.usefixtures("verdict_alone")
def test_what_no_query_sees_may_hold_anything(dtype, by, where, bad):
    """A correct kernel does not fail for what padding holds; a visible one is refused."""
    rng, to, few = np.random.default_rng(3), FORMATS[dtype].round, np.arange(40) < 30
    q, k, v, d_out = (to(rng.standard_normal((2, 40, 16))) for _ in range(4))
    options, hidden = {
        "mask": ({"mask": few}, slice(30, 40)),
        "bias": ({"bias": np.where(few, 0.0, -np.inf) * np.ones((40, 1))}, slice(30, 40)),
        "causal": ({"causal": True, "mask": np.arange(40) != 39}, slice(39, 40)),
        "window": ({"window": (10, 0)}, slice(0, 20)),
    }[by]
    if by == "window":
        q, d_out = q[:, -10:], d_out[:, -10:]
    out, pullback = refattn.vjp(refattn.softmax_attention, q, k, v, **options)
    found = dict(zip(("dq", "dk", "dv"), map(to, pullback(d_out)[:3]), strict=True))
    given = {**options, "q": q, "k": k.copy(), "v": v.copy(), "dtype": dtype, "out": to(out)}
    for name in where:
        given[name][:, hidden] = bad
    for results in ({}, {"d_out": d_out, **found}):
        assert verify(**given, **results).verdict == "PASS"
    assert verify(**given | {"out": to(1.05 * out)}).verdict == "FAIL"
    for name, words in ((where[0], "where a query sees it, "), ("q", "")):
        given[name][1, 5 if name == "q" else 25, 3] = bad
        with pytest.raises(ValueError, match=f"`{name}` must be finite {words}".strip()):
            verify(**given)


@pytest.mark.long
def test_a_row_that_has_a_law_in_large_blocks_alone_is_no_error():
    """The first of causal attention, in float32; small tiles of wrong rows are looked at again."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 300, 64)).astype("f4")
    out = refattn.softmax_attention(q, k, v, causal=True)
    out[:, 1:] *= np.float32(1.5)
    assert verify(q=q, k=k, v=v, out=out, causal=True).verdict == "FAIL"


@pytest.mark.long
def test_a_cause_is_said_once_and_where_it_is():
    rng = np.random.default_rng(0)
    given = {x: BF16(rng.standard_normal((2, 64, 16))) for x in "qkv"}

    def judge(out, **options):
        return verify(**given, out=BF16(out), dtype="bfloat16", **options)

    seen = np.tril(np.ones((64, 64), bool), 1)
    found = judge(refattn.softmax_attention(*given.values(), mask=seen), causal=True)
    assert [x.name for x in found.suspects] == ["convention", "edge+1"]  # in words, and measured
    short, every = found.write(), found.write(verbose=True)
    assert "cause: a query also sees the next key (explains 100 %" in short
    assert "or: " not in short
    assert "or: a query also sees the next key: 1 ± " in every
    stale = refattn.softmax_attention(*given.values())
    stale[1, 32:48] = stale[1, :16]
    assert "where: 16 of 128 rows, head 1, queries 32 to 47\n" in str(judge(stale))


def test_a_known_cause_leaves_no_guess_at_the_precision():
    suspect = findings.Suspect("scale", 0.02, 1e-5, 1e3, 1.0, "the scale is 1.02 times")
    guess = "all rows: relative errors are 0.02 in every row: precision is lost, as by 8 bits"
    exact = refattn.softmax_attention(*(x := np.ones((3, 8, 4))))
    found = verify(q=x[0], k=x[1], v=x[2], out=exact)
    failed = found._replace(verdict="FAIL", suspects=[suspect], remarks=[guess])
    assert guess not in failed.write()
    assert guess in failed.write(verbose=True)
    assert guess in failed._replace(suspects=[suspect._replace(explained=0.9)]).write()


def test_a_caller_that_raises_underflow_gets_a_verdict():
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 60, 8)).astype("f4")
    out = refattn.softmax_attention(q, k, v)
    with np.errstate(all="raise"):
        assert verify(q=q, k=k, v=v, out=out).verdict == "PASS"
        assert verify(q=q, k=k, v=v, out=1.01 * out).verdict == "FAIL"
