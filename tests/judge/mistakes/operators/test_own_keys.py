"""A key of each wrong row, another in each, that is lost, counted twice, seen or exchanged."""

from functools import partial

import numpy as np
import pytest

from refattn import attend, softmax_attention, verify, vjp
from refattn.judge.rounding.formats import FORMATS
from refattn.judge.verification import joint, trial
from refattn.judge.verification.findings import ProfileTrial, Suspect, Z
from tests.judge.mistakes.causes.kernels import named
from tests.judge.rounding.rounded import of_heads

BF16 = FORMATS["bfloat16"].round
HEADS, N, M, D = 2, 64, 96, 16
ROWS = ((0, 5), (0, 40), (1, 17))
KEYS = (7, 60, 33)


def made(d_v=D, seed=0):
    rng = np.random.default_rng(seed)
    q, k, v = (BF16(rng.standard_normal((HEADS, *x))) for x in ((N, D), (M, D), (M, d_v)))
    mask = np.arange(M) % 8 > 0  # some keys are hidden
    return {"q": q, "k": k, "v": v, "mask": mask}


GIVEN = made()
OUT, LSE = attend(*(GIVEN[x] for x in "qkv"), mask=GIVEN["mask"], scale=D**-0.5)
# Of every key, e^score over the sum of those that are seen.
WEIGHTS = np.exp(GIVEN["q"] @ np.swapaxes(GIVEN["k"], -1, -2) / D**0.5 - LSE[..., None])
SEEN = WEIGHTS * GIVEN["mask"]


def spoiled(at, to, **more):
    """The right output, with other numbers at a place."""
    out = OUT.copy()
    out[at] = to
    return GIVEN | {"out": BF16(out)} | more


def wrong_row(at, key, way):
    p, v = SEEN[at].copy(), GIVEN["v"][at[0]]
    if way == "alone":
        p = np.where(np.arange(M) == key, 1.0, 0.0)
    elif way in ("another", "weighed"):
        v = v.copy()
        v[key] = v[key + 1] if way == "another" else 0.0
    else:
        p[key] = {"lost": 0.0, "twice": 2 * p[key], "seen": WEIGHTS[at][key]}[way]
    return p @ v / np.sum(p)


def in_rows(rows):
    """Some rows are others; the others are right."""
    return spoiled(tuple(zip(*ROWS, strict=True)), np.stack(rows))


def of_way(way, keys=KEYS):
    return in_rows([wrong_row(*x, way) for x in zip(ROWS, keys, strict=True)])


def of_largest():
    """The key of the largest weight has the value of the next."""
    return in_rows([wrong_row(at, int(np.argmax(SEEN[at][:-1])), "another") for at in ROWS])


def counted(counts):
    """Keys count otherwise in a few rows; key 16 is hidden: it counts once too often."""
    times = 1.0 * GIVEN["mask"]
    times[[*counts]] = [*counts.values()]
    p = WEIGHTS * times
    return spoiled(np.s_[0, 3:9], (p @ GIVEN["v"] / np.sum(p, -1, keepdims=True))[0, 3:9])


def weighed_in_a_row():
    p = WEIGHTS[0, 5] * GIVEN["mask"] * np.where(np.arange(M) // 8 == 1, 1.3, 1)
    return spoiled((0, 5), p @ GIVEN["v"][0] / np.sum(p))


def copied(few):
    return spoiled((0, 5, few), OUT[1, 40, few])


def of_values():
    v = GIVEN["v"].copy()
    v[0, 33, 5], v[1, 50] = 20.0, 3.0
    return GIVEN | {"out": BF16(softmax_attention(**GIVEN | {"v": v}))}


def measured(factor=1.0, **options):
    """What is wrong in few rows is measured in these; no rounding is coarser in all."""
    out = factor * softmax_attention(**GIVEN, **options)
    return in_rows([out[at] for at in ROWS])


def rows_of_0(rows, has_lse):
    """These are not named by what is linear in the output, and of any size there."""
    return spoiled((1, rows), 0.0, lse=LSE if has_lse else None)


def lse_off():
    lse = LSE.copy()
    lse[1, 17] += 0.002
    return GIVEN | {"out": BF16(OUT), "lse": lse}


def sums_off(factor, rows):
    """No precision is lost where log normalisers say by how much outputs are off."""
    rng = np.random.default_rng(4)
    q, k, v = (BF16(rng.standard_normal((2, 64, 32))) for _ in range(3))
    out, lse = of_heads("flash", q, k, v, "bfloat16")
    out[1, rows] = BF16(out[1, rows] / factor)
    lse[1, rows] += np.log(factor)
    return {"q": q, "k": k, "v": v, "out": out, "lse": lse.astype(np.float32)}


EACH = "each wrong row: key 7 in query 5, key 60 in query 40"
CASES = {
    "lost": (lambda: of_way("lost"), f"a key is left out of {EACH}"),
    "twice": (lambda: of_way("twice"), f"a key counts twice in {EACH}"),
    "seen": (lambda: of_way("seen", (16, 40, 64)),
        "a hidden key is seen in each wrong row: key 16 in query 5, key 40"),
    "weighed": (lambda: of_way("weighed"),
        "a key counts in the sum of the weights only in each wrong row: key 7"),
    "alone": (lambda: of_way("alone"), f"one key has all the weight in {EACH}"),
    "another": (of_largest, "a key has the value of another in each wrong row: key"),
    "one key of all": (lambda: of_way("twice", (60, 60, 60)),
        "agrees if key 60 counts twice, but only in "),
    "weights of a tile": (weighed_in_a_row,
        "weights of keys 8 to 15 are 1.3 times what they should be, but only in head 0, query 5"),
    "factor": (lambda: measured(1.03), "the output is 1.0"),
    "scale": (lambda: measured(scale=1.06 / D**0.5), "the scale is 1.06"),
    "window": (lambda: measured(window=(30, 30)), "there is a window of 30 keys"),
    "three lost": (lambda: counted({3: 0, 41: 0, 60: 0}),
        "agrees if keys 3, 41 and 60 do not count, but only in "),
    "two twice": (lambda: counted({3: 2, 41: 2, 60: 0.5}),
        "agrees if keys 3 and 41 count twice and key 60 counts 0.5 times"),
    "one that is hidden": (lambda: counted({3: 0, 16: 1, 60: 0}),
        "agrees if keys 3 and 60 do not count and key 16 counts twice"),
    "another row": (lambda: copied(slice(None)),
        "agrees if in head 0, query 5 holds the numbers of query 40 of head 1"),
    "columns of a row": (lambda: copied(slice(8, 16)),
        "agrees if in head 0, columns 8 to 15 of query 5 hold the numbers of query 40 of head 1"),
    "lse": (lse_off, "agrees if lse is too large by 0.002, but only in head 1, query 17$"),
    **{f"sum times {x} in {len(rows)}": (partial(sums_off, x, rows), "agrees if sums of weights "
        f"are {x} times what they should be, in out and in lse$")
        for x in (0.9, 1.3) for rows in ([17], [17, 30, 44])},
    **{f"{len(rows)} rows of 0{', lse' * x}": (partial(rows_of_0, rows, x), "all numbers are 0")
        for x in (True, False) for rows in ([17], [3, 40], [3, 9, 17, 20, 40])},
    "values": (of_values,
        "values of key 33 of head 0 are other numbers in column 5: column 5 of key 33"),
}  # fmt: skip
test_what_is_wrong_in_few_rows = named(CASES, ("lost", "alone", "factor", "one key of all", "lse",
    "1 rows of 0", "2 rows of 0", "1 rows of 0, lse", "sum times 0.9 in 1"))  # fmt: skip


def test_the_wrong_rows_are_known():
    found = verify(**of_way("lost"), dtype="bfloat16")
    assert [at for at, _ in sorted(found.rows)] == [*ROWS]


def test_few_columns_do_not_tell_which_key_it_is():
    """Of 96 keys one is near to any error in two columns, by chance."""
    given = made(d_v=2)
    out = softmax_attention(**given)
    for at in ROWS:
        out[at] += np.random.default_rng(at).uniform(0.05, 0.1, 2)
    found = verify(**given, out=BF16(out), dtype="bfloat16")
    assert found.verdict == "FAIL"
    assert not any("each wrong row" in x.text for x in found.suspects)


def gradients(seed=1):
    rng = np.random.default_rng(seed)
    q, d_out = (BF16(rng.standard_normal((2, N, D))) for _ in range(2))
    k, v = (BF16(rng.standard_normal((1, N, D))) for _ in range(2))
    out, pullback = vjp(softmax_attention, q, k, v)
    found = pullback(d_out)
    given = {"q": q, "k": k, "v": v, "d_out": d_out, "out": BF16(out), "dtype": "bfloat16"}
    one = vjp(softmax_attention, q[:1], k, v)[1](d_out[:1])
    return given, {"dq": BF16(found.q), "dk": BF16(found.k), "dv": BF16(found.v)}, one


def test_a_head_that_few_keys_lack():
    """It is left out of their sums alone."""
    given, parts, one = gradients()
    parts["dk"][0, [9, 41]] = BF16(one.k[0, [9, 41]])
    found = verify(**given, **parts).parts["dk"]
    assert [at for at, _ in sorted(found.rows)] == [(0, 9), (0, 41)]
    assert "query heads h with h % 2 = 1 are left out" in found.suspects[0].text


def test_columns_of_few_rows():
    """They are named if the others are right."""
    given, parts, _ = gradients()
    parts["dv"][0, 30:33, :4] = BF16(1.2 * parts["dv"][0, 30:33, :4])
    found = verify(**given, **parts).parts["dv"]
    assert found.place.endswith("keys 30 to 32, columns 0 to 3")


@pytest.mark.long("64")
@pytest.mark.parametrize("d_v", [16, 64])
def test_rows_of_anything_have_no_cause(d_v):
    """Nothing that is fitted to a row may leave more than roundings."""
    for seed in range(3):
        given, rng = made(d_v, seed), np.random.default_rng(seed)
        out = softmax_attention(**given)
        out[0, 5] += 0.1 * rng.normal(size=d_v)
        found = verify(**given, out=BF16(out), dtype="bfloat16")
        assert [at for at, _ in found.rows] == [(0, 5)]
        assert not found.suspects


def test_a_row_beside_one_of_nan():
    given = spoiled((1, 17), 1.3 * OUT[1, 17])
    given["out"][0, 5] = np.nan
    found = verify(**given, dtype="bfloat16")
    assert "the output is 1.3" in found.suspects[0].text or "1.29" in found.suspects[0].text


def suspect(name, estimate, error, explained=1.0):
    return Suspect(name, estimate, error, 0.0, explained, name)


def test_what_few_rows_say_and_what_all_say():
    """In all rows it is surer if it is as large; in few it must leave nothing but roundings."""

    def chosen(whole, few, rms=10.0):
        tries = (
            ProfileTrial("", [], x, Z(rms, 0.0, ()), 1.0, {}, True, None, 0.0, (), [])
            for x in (whole, few)
        )
        found = trial.choose_suspects(*tries, "row 5")
        assert all(x in whole or x.text.endswith(", but only in row 5") for x in found)
        return [(x.name, x.estimate) for x in found]

    scale, factor = suspect("scale", 0.06, 0.001), suspect("factor", 0.3, 0.001, 0.99)
    assert chosen([suspect("scale", 3e-4, 1e-4)], [scale]) == [("scale", 0.06)]
    assert chosen([suspect("scale", 0.0602, 1e-5)], [scale]) == [("scale", 0.0602)]
    of_head = suspect("scale of a head", 0.0602, 1e-5)
    assert chosen([of_head], [scale]) == [("scale of a head", 0.0602)]
    assert chosen([], [suspect("epsilon", 1, 0.1), factor]) == [("factor", 0.3)]
    assert chosen([], [suspect("softcap", 1, 0.1, 0.95)]) == []
    assert chosen([], [suspect("key", 0.4, 0.01), suspect("factor of a tile", 1, 0.1)]) == []
    assert chosen([], [suspect("key", 0.99, 0.01)]) == [("key", 0.99)]
    assert chosen([suspect("key", 0.4, 0.01)], []) == []


def test_few_rows_are_an_eighth():
    rows = [((0, x), 0.0) for x in range(4)]
    assert len(joint.list_few(rows, False, 32)) == 4
    assert joint.list_few(rows, False, 31) == joint.list_few(rows, True, 64) == ()


@pytest.mark.long
@pytest.mark.parametrize(
    ("factor", "more", "words"),
    [
        (1.02, 0, "the output is 1.020"),
        (0.98, 0, "the output is 0.979"),
        (1, 40, "agrees if 40.2 ± 0.1 is added to the sum of e^score"),
    ],
)
def test_factors_and_what_is_added_to_sums_of_many_weights(factor, more, words):
    """These are nearly alike, and the worst of many rows tell less than all do."""
    rng = np.random.default_rng(1)
    q, k, v = (BF16(rng.standard_normal((1, 1024, 64))) for _ in range(3))
    w = np.exp(q @ np.swapaxes(k, -1, -2) / 8)
    out = BF16(w) @ v / (np.sum(w, -1, keepdims=True) + more)
    found = verify(q=q, k=k, v=v, out=BF16(factor * BF16(out)), dtype="bfloat16")
    assert found.suspects[0].text.startswith(words)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["factor", "noise"])
def test_one_number_tells_no_cause(kind, dtype):
    """Some size of any cause fits it, and its own step."""
    rng, to = np.random.default_rng(2), FORMATS[dtype].round
    q, k, v = (to(rng.standard_normal((2, 64, x))) for x in (16, 16, 1))
    out = to(softmax_attention(q, k, v))
    out[1, 20] = to(1.37 * out[1, 20] if kind == "factor" else rng.normal(size=1))
    found = verify(q=q, k=k, v=v, out=out, dtype=dtype)
    assert (found.verdict, found.suspects) == ("FAIL", [])


J, SOME = np.arange(M), (3, 17, 30, 44, 70, 90)
FACTORS = {
    "values of keys 40 to 59 are 1.25 times": ("values", np.where((J >= 40) & (J < 60), 1.25, 1)),
    "values of keys 1 of each 3 are 0.9 times": ("values", np.where(J % 3 == 1, 0.9, 1)),
    "values of some keys have factors: keys 0 to 31 1.5, keys 32 to 63 0.8, keys 64 to 95 1.1": (
        "values", np.array([1.5, 0.8, 1.1])[J // 32]),
    "values of keys 3, 17, 30 and 3 more spans are 1.3 times": (
        "values", np.where(np.isin(J, SOME), 1.3, 1)),
    "scores of some keys have factors: key 3 1.4, key 17 0.7": (
        "scores", 1 + np.isin(J, SOME) * np.where(J % 2, 0.4, -0.3) * np.where(J == 17, -0.75, 1)),
    "scores of keys 64 to 95 are 2 times": ("scores", np.where(J >= 64, 2.0, 1)),
    "scores of keys 1 of each 2 are 0.8 times": ("scores", np.where(J % 2, 0.8, 1)),
}  # fmt: skip


@pytest.mark.parametrize("sinks", [None, np.array([1.0, 2.0])])
@pytest.mark.parametrize("words", FACTORS)
@pytest.mark.long(*[x for x in FACTORS if "64 to 95 are" not in x])
def test_keys_that_have_a_factor_of_their_own(words, sinks):
    """As a scale of a quantised block is missing, or that of another block."""
    of, c = FACTORS[words]
    rng = np.random.default_rng(3)
    q, k, v = (BF16(rng.standard_normal((HEADS, x, 2 * D))) for x in (N, M, M))
    given = {"q": q, "k": k, "v": v, "sinks": sinks}
    changed = {"k" if of == "scores" else "v": (k if of == "scores" else v) * c[:, None]}
    out = BF16(attend(**given | changed, scale=(2 * D) ** -0.5).out)
    assert words in verify(**given, out=out, dtype="bfloat16").suspects[0].text
