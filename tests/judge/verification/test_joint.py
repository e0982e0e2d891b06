"""The law of a row: its bound, its level, and the rows that it names."""

import numpy as np
import pytest
from scipy import optimize, stats

from refattn import linear_attention, verify
from refattn.judge.rounding import PROFILES
from refattn.judge.rounding.covariance import distinct_columns
from refattn.judge.rounding.formats import FORMATS
from refattn.judge.rounding.problems import pose_arrays
from refattn.judge.verification import joint
from refattn.judge.verification.findings import Numbers
from tests.judge.rounding.rounded import (
    ALARM,
    Case,
    Noise,
    Steps,
    dump,
    dump_gradients,
    of_heads,
    results,
    stepwise,
)

SIZES = {  # tokens, head size, mean of the values, factor of queries, causal
    "plain": (64, 96, 16, 0, 1, False),
    "mean": (48, 200, 32, 2, 1, False),
    "causal": (64, 64, 24, 0.5, 3, True),
}


def arrays(seed, n, m, d, mean, factor, heads=2, dtype="bfloat16"):
    rng, to = np.random.default_rng(seed), FORMATS[dtype].round
    q, k, v = (rng.standard_normal((heads, x, d)) for x in (n, m, m))
    return to(factor * q), to(k), to(v + mean)


def made(name, dtype="bfloat16", size="plain", seed=0, heads=2):
    *sizes, causal = SIZES[size]
    return dump(name, *arrays(seed, *sizes, heads, dtype), dtype, causal=causal)


def changed(given, at, units):
    """A copy whose output is larger by so many units in some rows."""
    to, out = FORMATS[given["dtype"]], given["out"].copy()
    out[at] = to.round(out[at] * (1 + units * to.unit))
    return given | {"out": out}


def named(found):
    return [x for x, _ in found.rows]


@pytest.mark.parametrize("seed", range(4))
def test_the_least_square_is_that_of_the_best_point_of_the_box(seed):
    """Never above what a solver finds, which is what makes it a bound, and hardly below."""
    rng = np.random.default_rng(seed)
    root = rng.standard_normal((7, 7)) * np.exp(rng.standard_normal(7))[:, None]
    law, error = root @ root.T, 3 * rng.standard_normal(7)
    low, high = -rng.random(7), rng.random(7) * [1, 1, 1, 1, 5, 5, 0]
    inverse = np.linalg.inv(law)

    def square(b):
        return (error - b) @ inverse @ (error - b)

    def slope(b):
        return -2 * inverse @ (error - b)

    best = optimize.minimize(
        square, 0 * low, jac=slope, bounds=[*zip(low, high, strict=True)], tol=1e-12
    ).fun
    found = joint.Ellipsoids.of(law[None]).bound(error[None], low[None], high[None])[0]
    assert 0.98 * best <= found <= best * (1 + 1e-9)
    inside = 0.5 * (low + high)
    assert joint.Ellipsoids.of(law[None]).bound(inside[None], low[None], high[None]) == 0


def test_columns_that_are_one():
    """Powers of two and signs change no rounding; a column of zeros is one, too."""
    v = np.random.default_rng(0).standard_normal((9, 3))
    v[0, 0] = 0
    more = np.concatenate([v, -2 * v[:, :1], v[:, 1:2] / 8, 3 * v[:, 2:], 0 * v[:, :1]], -1)
    assert distinct_columns(more).tolist() == [0, 1, 2, 5, 6]


def p_values_of_noise(name, dtype, to, rounds):
    """P-values of rows whose spacings hide the noise, of roundings that are drawn as noise."""
    q, k, v = arrays(3, 32, 256, 24, 2, 1, 1, dtype)
    noise = Noise(FORMATS[dtype], np.random.default_rng(4))
    steps = Steps(weights=noise, out=to.round)
    if name == "eager":
        steps = steps._replace(scores=noise, normalised=True)
    problem, roundings = pose_arrays(q, k, v), PROFILES[name].roundings(dtype)
    rows = np.flatnonzero(problem.analyse((0,), roundings, slice(0, 32)).hidden())
    assert len(rows) > 16
    found = []
    for _ in range(rounds):
        out = stepwise(Case(q[0], k[0], v[0]), steps)
        numbers = Numbers(lambda _, x=out: x, dtype)
        found.append(joint.test_rows(problem, numbers, roundings, (0,), rows)[1])
    return np.exp(np.concatenate(found))


@pytest.mark.parametrize("rounds", [2, pytest.param(400, marks=pytest.mark.long)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["flash", "eager"])
def test_noise_that_spacings_hide_is_no_evidence(name, dtype, rounds):
    """At each level by as many rows, at most, as that leaves to chance, but for `ALARM`."""
    p = p_values_of_noise(name, dtype, FORMATS[dtype], rounds)
    for level in (0.5, 0.1, 1e-2, 1e-3, 1e-4):
        assert np.sum(p <= level) <= stats.binom.isf(ALARM, len(p), level), level


@pytest.mark.parametrize("off", [{"digits": 7}, {"truncated": True}])
@pytest.mark.parametrize("name", ["flash", "eager"])
def test_a_spacing_that_is_half_of_what_it_should_be_is_seen(name, off):
    """Outputs that are rounded by twice as much, or one way: half of the rows are rejected."""
    p = p_values_of_noise(name, "bfloat16", FORMATS["bfloat16"]._replace(**off), 1)
    assert np.median(p) < 1e-9


@pytest.mark.sweep(5)
@pytest.mark.parametrize("seed", [0, *(pytest.param(x, marks=pytest.mark.long) for x in (1, 3))])
@pytest.mark.parametrize("name", ["flash", "flash-fast", "upcast"])
def test_a_row_that_misses_a_key_is_named_where_spacings_hide_it(name, seed):
    """Of a weight below 1/200, beside values of mean 2: most columns are rounded as they were."""
    q, k, v = arrays(seed, 64, 256, 64, 2, 1, heads=1)
    key, given = np.argsort(-(k[0] @ q[0, 20]))[100], dump(name, q, k, v, "bfloat16")
    assert verify(**given, profile=name).verdict == "PASS"
    less = (np.delete(x, key, 1) for x in (k, v))
    given["out"][0, 20] = of_heads(name, q[:, 20:21], *less, "bfloat16")[0][0, 0]
    found = verify(**given, profile=name)
    assert (found.verdict, named(found)) == ("FAIL", [(0, 20)])


@pytest.mark.sweep(6)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["flash", "math"])
@pytest.mark.parametrize("size", SIZES)
def test_a_wrong_row_is_named_and_no_other(name, dtype, size):
    """One of 128 that is two spacings too large, at least: no test of each column sees it."""
    given = made(name, dtype, size, 3)
    assert verify(**given).rows == ()
    found = verify(**changed(given, (1, 30), 4), profile=name)
    assert (found.verdict, named(found)) == ("FAIL", [(1, 30)])
    assert found.rows[0][1] < found.alpha
    assert '"rows"' in found.to_json()


def test_repeated_columns_are_no_evidence():
    """Each column eight times, up to a power of two and a sign: one error, not eight."""
    q, k, v = arrays(5, 64, 96, 8, 0, 1)
    v = np.concatenate([v * 2.0**-i * (-1) ** i for i in range(8)], -1)
    for name in ("flash", "math"):
        found = verify(**dump(name, q, k, v, "bfloat16"), profile=name)
        assert (found.verdict, found.rows) == ("PASS", ())


def backward(name, seed=0, heads=2, n=96, d=32):
    rng, to = np.random.default_rng(seed), FORMATS["bfloat16"].round
    arrays = (to(rng.standard_normal((heads, n, d))) for _ in range(4))
    return dump_gradients(name, *arrays, "bfloat16", causal=True)


@pytest.mark.parametrize("of", ["dq", "dk", "dv"])
def test_a_wrong_row_of_a_gradient_is_named_and_no_other(of):
    """One of 128 that is two spacings too large, at least, where the output is right."""
    given, to = backward("upcast", n=64, d=16), FORMATS["bfloat16"]
    given[of][1, 50] = to.round(given[of][1, 50] * (1 + 4 * to.unit))
    found = verify(**given, profile="upcast")
    assert {x: y.verdict for x, y in found.parts.items() if y.verdict != "PASS"} == {of: "FAIL"}
    assert named(found.parts[of]) == [(1, 50)]
    assert all(
        0 < x.detectable["row"] < 0.5 for y, x in found.parts.items() if y not in ("out", of)
    )


@pytest.mark.long
@pytest.mark.parametrize(("of", "row"), [("dk", 100), ("dv", 30)])
def test_sums_that_are_rounded_more_often_do_not_take_a_wrong_row(of, row):
    """The digits of what a backward pass rounds are known: other rows fit such sums too well."""
    given = backward("flash", 2, heads=1, n=256, d=64)
    given[of][0, row] = FORMATS["bfloat16"].round(given[of][0, row] * (1 + 2.0**-7))
    found = verify(**results(given, "out", of), explain=False).parts[of]
    assert (found.verdict, named(found)) == ("FAIL", [(0, row)])


@pytest.mark.sweep(4)
@pytest.mark.parametrize("rows", ["tile", "class"])
def test_all_wrong_rows_are_named_where_they_are_many(rows, monkeypatch):
    """More than are tested at a time: of those, none is wrong by one element or by its mean."""
    monkeypatch.setattr(joint, "MOST", 8)
    at = (1, slice(8, 56)) if rows == "tile" else (slice(0, 4), slice(3, None, 4))
    given = changed(made("flash", "bfloat16", "plain", 5, heads=4), at, 3)
    wrong = np.zeros((4, 64), bool)
    wrong[at] = True
    found = verify(**given, profile="flash")
    assert joint.MOST < np.sum(wrong) == len(found.rows)
    assert {*named(found)} == {*map(tuple, np.argwhere(wrong).tolist())}
    words = "48 of 256 rows, head 1, queries 8 to 55"
    if rows == "class":
        words = "64 of 256 rows, queries 3 to 63 in steps of 4"
    assert found.place == words
    assert not found.more_rows
    monkeypatch.setattr(joint, "_PRODUCTS", 0)
    found = verify(**given, profile="flash")
    assert found.more_rows
    assert joint.MOST <= len(found.rows) < np.sum(wrong)
    assert found.place.startswith(f"at least {len(found.rows)} of 256 rows")


@pytest.mark.long
@pytest.mark.parametrize("name", ["flash", "math"])
def test_rows_that_no_kernel_can_give_are_named(name):
    """With NaN or infinity, or beyond the bound, and no others."""
    given = made(name, "float16", "mean", 7)
    given["out"][0, 5, 3] = np.nan
    given["out"][1, 7:9] = np.inf
    given["out"][1, 20] *= 2
    found = verify(**given)
    assert sorted(named(found)) == [(0, 5), (1, 7), (1, 8), (1, 20)]
    assert found.place.startswith("4 of 96 rows, head 0, query 5; head 1, queries 7, 8 and 20")


def test_rows_are_named_by_the_profile_of_all_others():
    """A looser profile, that they made likelier, rejects them only all together."""
    given = made("flash", "bfloat16", "plain", 5, heads=4)
    found = verify(**changed(given, np.s_[:, 3::16], 4))
    assert found.verdict == "FAIL"
    assert {i for _, i in named(found)} == {*range(3, 64, 16)}
    assert found.place == "16 of 256 rows, queries 3 to 51 in steps of 16"


@pytest.mark.parametrize("name", ["flash", pytest.param("math", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("of", "words"),
    [
        ("row", "one row"),
        pytest.param("tile", "16 rows", marks=pytest.mark.long),
        pytest.param("head", "one head", marks=pytest.mark.long),
    ],
)
def test_the_smallest_errors_of_a_row_a_tile_and_a_head(of, words, name):
    """Of 4 times the size they are rejected, and of a quarter of it they are not."""
    given = made(name, "bfloat16", "plain", 11)
    right, unit = verify(**given, profile=name), FORMATS["bfloat16"].unit
    assert right.verdict == "PASS"
    assert f"{words} wrong by a factor 1 + {right.detectable[of]:.2g}" in str(right)
    rows = {"row": slice(30, 31), "tile": slice(16, 32), "head": slice(None)}[of]
    for factor, verdict in ((0.25, "PASS"), (4.0, "FAIL")):
        wrong = changed(given, (1, rows), factor * right.detectable[of] / unit)
        assert verify(**wrong, profile=name).verdict == verdict


def test_rows_of_linear_attention_are_named():
    """By their largest error, or as ones that no kernel can give: their columns have no law."""
    q, k, v = arrays(12, 64, 96, 16, 0, 1)
    out = linear_attention(q, k, v, causal=True)
    given = {"q": q, "k": k, "v": v, "estimator": "linear", "causal": True}
    assert 0 < verify(**given, out=out).detectable["row"] < 1e-3
    out[0, 9] *= 1.2
    out[1, 20, 3] = np.nan
    assert sorted(named(verify(**given, out=out))) == [(0, 9), (1, 20)]


def test_a_log_normaliser_of_one_row_is_named():
    """It is one more test of a row; what it rejects is in the small print."""
    q, k, v = arrays(5, 64, 96, 16, 0, 1)
    out, lse = of_heads("flash", q, k, v, "bfloat16")
    given = {"q": q, "k": k, "v": v, "out": out, "dtype": "bfloat16", "profile": "flash"}
    found = verify(**given, lse=lse)
    assert found.verdict == "PASS"
    size = found.detectable["lse of a row"]
    assert f"one of them off by {size:.2g}" in str(found)
    lse[:, 17] += 2 * size
    found = verify(**given, lse=lse, explain=False)
    assert sorted(named(found)) == [(0, 17), (1, 17)]
    assert found.place.startswith("2 of 128 rows, query 17")
