"""Problems of files: those of the same arrays in memory, and the results that come with them."""

import math
from pathlib import Path

import numpy as np
import pytest

from refattn.features import elu_features
from refattn.files.tensors import Tensors, open_tensors
from refattn.judge.rounding.problems import pose_arrays
from refattn.judge.verification import reading
from refattn.judge.verification.reading import kind_of, list_judged, pose_tensors
from tests.files import problems


def held(arrays, lead=(2,)):
    """Arrays as a file would give them."""
    dtypes = {name: x.dtype.name for name, x in arrays.items()}
    return Tensors(Path("file"), arrays, dtypes, lead, ())


def draw(names="q k v", n=4, m=6):
    rng = np.random.default_rng(0)
    shapes = {"q": (2, n, 3), "k": (1, m, 3), "v": (1, m, 2), "bias": (1, m), "sinks": (2,)}
    arrays = {x: rng.standard_normal(y) for x, y in (shapes | {"omega": (5, 3)}).items()}
    arrays |= {"mask": rng.random((2, n, m)) < 0.6, "keys": rng.random((1, m)) < 0.6}
    return {x: arrays[x] for x in names.split()}


SCORES, KEYS = "q k v bias mask sinks", "q k v keys"
PROBLEMS = {
    "plain": ("softmax", "q k v", {}),
    "all": ("softmax", SCORES, {"causal": True, "window": (3, 1), "softcap": 2.0, "scale": 0.3}),
    "sinks": ("softmax", "q k v sinks", {}),
    "fewer keys": ("softmax", "q k v bias", {"window": (1, 0), "scale": -2.0}),
    "rfa": ("rfa", f"{KEYS} omega", {"scale": 0.7}),
    "hyperbolic": ("rfa", "q k v omega", {"features": "hyperbolic", "causal": True}),
    "linear": ("linear", KEYS, {}),
    "shared keys": ("softmax", "q k v", {}),
    "own map": ("linear", "q k v", {"feature_map": np.abs, "causal": True}),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_file_is_the_problem_of_its_arrays(name):
    estimator, names, options = PROBLEMS[name]
    arrays = draw(names, m=3 if name == "fewer keys" else 6)
    if "keys" in arrays:
        arrays["mask"] = arrays.pop("keys")
    if name == "shared keys":
        arrays = {x: y[0] if x != "q" else y for x, y in arrays.items()}
        arrays = {"q": np.repeat(arrays["q"], 2, 0), **{x: np.stack([arrays[x]] * 2) for x in "kv"}}
    lead = arrays["q"].shape[:1]
    found = pose_tensors(held(arrays, lead), estimator=estimator, **options)
    by_map = {"feature_map": elu_features} if estimator == "linear" else {}
    want = pose_arrays(**by_map | arrays | options)
    assert found._replace(read=None) == want._replace(read=None)
    for head in np.ndindex(lead):
        one, other = found.read(head), want.read(head)
        assert {*one} == {*other}
        for x in one:
            np.testing.assert_array_equal(np.squeeze(one[x]), np.squeeze(other[x]))
            assert np.shape(one[x])[-2:] == np.shape(other[x])[-2:] or x == "sinks"


@pytest.mark.parametrize("options", [{"causal": True}, {"window": (1, 1)}, {"window": (0, None)}])
@pytest.mark.parametrize(("n", "m"), [(6, 4), (4, 6), (5, 5)])
def test_a_key_may_hold_anything_where_no_query_sees_it(n, m, options):
    left, right = (math.inf if x is None else x for x in options.get("window", (None, 0)))
    ahead = np.arange(m) - np.arange(n)[:, None] - (m - n)
    allowed = (np.arange(m) < m - 1) | (np.arange(n)[:, None] == 0)  # one query, for the last
    seen = ((ahead >= -left) & (ahead <= right) & allowed).any(0)
    for j in range(m):
        arrays = draw(n=n, m=m) | {"mask": allowed}
        arrays["k"][0, j], arrays["v"][0, j, 1] = np.nan, np.inf
        problem = pose_tensors(held(arrays), **options)
        if seen[j]:
            with pytest.raises(ValueError, match="`k` must be finite where a query sees it"):
                problem.read((0,))
            continue
        assert problem.read((1,))["k"][j].tolist() == [0.0] * 3
        assert problem.read((1,))["v"][j].tolist() == [arrays["v"][0, j, 0], 0.0]


def test_kinds_of_estimators():
    assert [kind_of(x) for x in ("softmax", "rfa", "linear")] == ["scores", "frequencies", "map"]
    assert {kind_of(x) for x in ("lara", "ra", "eva", "second-order", "is")} == {"text"}
    known = "`estimator` must be one of softmax, rfa, linear, is, mean-of-ratios, ra, "
    for other in ("kernel", "sampled-keys", "nothing", None, 3):
        with pytest.raises(ValueError, match=known):
            kind_of(other)
    kinds = {"scores", "frequencies", "map", "recurrent", "text"}
    assert {kind_of(x) for x in list_judged()} == kinds


def test_results_of_a_file(tmp_path):
    """Types of those that hold numbers of a narrower one, and what gradients are of."""
    arrays = {x: y for x, y in problems.problem("float32", (4,), 2).items() if x not in ("omega",)}
    to = problems.number_type("bfloat16")
    for name in ("q", "k", "v", "d_out", "lse", "dk", "bias", "sinks"):
        arrays[name] = arrays[name].astype(to).astype(np.float32)
    arrays["out"][1:] = 0.0
    arrays["dq"][:3] = 0.0
    arrays["out"][0, 0, 0] = 0.5
    arrays["mask"] = arrays["mask"][0]
    file = problems.save(tmp_path, "npz", arrays)
    tensors = open_tensors(file, dtype="bfloat16")
    problem = pose_tensors(tensors)
    parts = reading.read_parts(tensors, problem)
    assert list(parts) == ["out", "dq", "dk", "dv"]
    assert parts["out"].problem is problem
    types = {name: part.numbers.out_dtype for name, part in parts.items()}
    assert types == dict.fromkeys(("out", "dq", "dv"), "float32") | {"dk": "bfloat16"}
    assert parts["out"].numbers.lse_dtype == "bfloat16"
    for name, part in parts.items():
        for index in np.ndindex(arrays[name].shape[:-2]):
            np.testing.assert_array_equal(part.numbers.out(index), arrays[name][index])
    np.testing.assert_array_equal(parts["out"].numbers.lse((3,)), arrays["lse"][3])
    for name, lead in (("dq", 4), ("dk", 2), ("dv", 2)):
        gradient = parts[name].problem.gradient
        assert (gradient.of, parts[name].problem.lead, gradient.has_out) == (name, (lead,), True)
        share = 4 // lead
        assert gradient.heads == {
            (h,): [(share * h + x,) for x in range(share)] for h in range(lead)
        }
        for x, y in zip(gradient.derivatives((3,)), ("d_out", "out"), strict=True):
            np.testing.assert_array_equal(x, arrays[y][3])


def test_types_of_results_of_a_file(tmp_path):
    base = {x: y for x, y in problems.problem("float32", (2,)).items() if x in ("q", "k", "v")}
    base = {x: y.astype(np.float16).astype(np.float32) for x, y in base.items()}
    out, lse = np.full((2, 3, 2), 0.1, np.float32), np.zeros((2, 3), np.float32)
    d_out = np.full((2, 3, 2), 0.3, np.float32)
    lse[0, 1] = 0.1

    def parts(estimator="softmax", dtype="float16", **results):
        file = problems.save(tmp_path, "npz", base | results)
        tensors = open_tensors(file, dtype=dtype)
        return reading.read_parts(tensors, pose_tensors(tensors, estimator=estimator))

    found = parts(out=out, lse=lse)["out"].numbers
    assert (found.out_dtype, found.lse_dtype) == ("float32", "float32")
    found = parts(out=out.astype(np.float16), lse=lse * 0)["out"].numbers
    assert (found.out_dtype, found.lse_dtype) == ("float16", "float16")
    assert parts("linear", out=out, lse=lse)["out"].numbers.lse is None
    assert parts(out=out)["out"].numbers.lse is None
    dq = base["q"]
    assert list(parts(out=out, d_out=d_out, dq=dq)) == ["out", "dq"]  # d_out is of the type of out
    for results in ({}, {"out": 0 * out}):
        with pytest.raises(ValueError, match="`d_out` must hold numbers of float16 only"):
            parts(d_out=d_out, dq=dq, **results)
    (alone,) = parts(d_out=0 * d_out, dq=dq).values()
    assert not alone.problem.gradient.has_out
    base["q"] = base["q"][:, :0]
    none = parts(dtype="float32", out=out[:, :0].astype(np.float16))["out"].numbers
    assert none.out_dtype == "float16"
    with pytest.raises(
        ValueError, match=r"`out`, `dq`, `dk` or `dv` must be in FILE, .* has only k, lse,"
    ):
        parts(lse=lse[:, :0])
