"""Calls with nothing in them, and numbers that nobody sees: a seeded sweep of every function.

`test_laws` tests values and `gradients/test_rules` gradients where keys are hidden;
`arrays/test_threads` interrupts what changes something global.
"""

import zlib

import numpy as np
import pytest

from refattn import certified, vjp
from refattn.registry import ESTIMATORS
from tests.cases import CASES
from tests.judge.mistakes.defects.probes import gates
from tests.problems import Problem

RECURRENT = {x.name: x for x in ESTIMATORS.values() if x.has("recurrent")}
SIZES = {  # leading axes, queries and keys; the last has chunks of length 0 only
    "no queries": ((), 0, 3),
    "no keys": ((2,), 3, 0),
    "no heads": ((2, 0), 3, 4),
    "no tokens": ((), 0, 0),
    "empty chunks": ((2,), 4, 5),
}


def takes(name, size):
    """Frequencies and indices may be of tokens."""
    lacks, (_, n, m) = CASES[name].lacks if name in CASES else (), SIZES[size]
    return not ("no-tokens" in lacks and 0 in (n, m)) and not ("no-keys" in lacks and m == 0)


CALLS = [(x, y) for x in (*CASES, *RECURRENT) for y in SIZES if takes(x, y)]


def make(name, size, rng):
    """A function, its arrays, its options in turn, and what its case lacks."""
    lead, n, m = SIZES[size]
    if name in RECURRENT:
        q, k, v = (rng.standard_normal((*lead, n, x)) for x in (3, 3, 2))
        return RECURRENT[name].fn, (q, k, v), [gates(name, k)], ()
    shapes, case = ((n, 3), (m, 3), (m, 2)), CASES[name]
    arrays = tuple(rng.standard_normal((*lead, *x)) for x in shapes)
    options, more = case.draw(Problem(*arrays, {}, rng)), [{}, {"mask": np.zeros(m, bool)}]
    more += [{"causal": True}] * ("causal" not in case.lacks)
    more += [{"mask": rng.random((n, m)) < 0.5}] * ("rows" not in case.lacks)
    return case.fn, arrays, [options | x for x in more], case.lacks


def in_chunks(x, rng):
    """An array of Dask that has chunks of length 0."""
    da = pytest.importorskip("dask.array")
    if isinstance(x, tuple):
        return tuple(in_chunks(y, rng) for y in x)
    if not isinstance(x, np.ndarray) or x.dtype.kind == "i":
        return x
    chunks = [rng.permutation([0, 0, s]) if rng.random() < 0.5 or s < 2 else (1, 0, s - 1)
        for s in x.shape]  # fmt: skip
    return da.from_array(x, chunks=tuple(tuple(map(int, y)) for y in chunks))


def pull(fn, arrays, options, lacks, to=np.asarray):
    """The results of a call and, where it has some, its gradients."""
    out = fn(*arrays, **options)
    results = list(out) if isinstance(out, tuple) else [out]
    if "vjp" in lacks:
        return results
    d_out = [to(np.ones(x.shape)) for x in results]
    _, pullback = vjp(fn, *arrays, **options)
    found = pullback(type(out)(*d_out) if isinstance(out, tuple) else d_out[0])
    return [*results, found.q, found.k, found.v]


@pytest.mark.sweep(24)
@pytest.mark.long("empty chunks")
@pytest.mark.parametrize(("name", "size"), CALLS)
def test_where_there_is_nothing(name, size):
    rng = np.random.default_rng(zlib.crc32(f"{name}, {size}".encode()))
    fn, arrays, every, lacks = make(name, size, rng)
    lead, n, m = SIZES[size]
    for options in every:
        want = pull(fn, arrays, options, lacks)
        assert want[0].shape == (*lead, n, 2)
        assert all(np.isfinite(x).all() for x in want)
        hidden = name not in RECURRENT and (m == 0 or not np.any(options.get("mask", True)))
        assert not (hidden and any(x.any() for x in want))
        assert "vjp" in lacks or [x.shape for x in want[-3:]] == [x.shape for x in arrays]
        cut = [in_chunks(x, rng) for x in arrays]
        of_dask = {x: in_chunks(y, rng) for x, y in options.items()}
        found = pull(fn, cut, of_dask, lacks, lambda x: in_chunks(x, rng))
        for x, y in zip(found, want, strict=True):
            np.testing.assert_allclose(x.compute(scheduler="synchronous"), y, 1e-7, 1e-9)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("seed", range(24))
def test_numbers_that_a_row_does_not_see_have_no_part_in_its_bound(seed):
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((5, x)) for x in (3, 3, 2))
    seen = rng.random((5, 5)) < 0.7
    seen[:, 2] = [False, False, False, True, True]
    causal = bool(seed % 2)
    options = {"causal": True, "mask": seen[-1:]} if causal else {"mask": seen}
    at, rows = (4, 4) if causal else (2, 3)  # these do not see the key
    for value in (np.nan, np.inf, np.finfo(float).max, 1e30):
        x, y = k.copy(), v.copy()
        x[at], y[at] = value, value
        want = certified.attend(q, k, v, **options)
        got = certified.attend(q, x, y, **options)
        np.testing.assert_array_equal(got.out.hi[:rows], want.out.hi[:rows])
        assert (got.error[:rows] <= 2 * want.error[:rows] + 2.0**-70).all()
