"""Memory beside what is returned: of a number of heads at once, however many there are."""

import contextlib
import tracemalloc
from functools import partial

import numpy as np
import pytest

import refattn
from refattn.arrays import arithmetic, blocks
from refattn.engine import attend, causal

OMEGA = np.random.default_rng(1).standard_normal((16, 8)).astype("f")
RFA = partial(refattn.random_feature_attention, omega=OMEGA)
LARA = partial(refattn.linear_randomized_attention, num_proposals=8, rng=0)
LOCAL = partial(refattn.local_random_feature_attention, omega=OMEGA)
CALLS = {
    "softmax": refattn.softmax_attention,
    "softmax causal": partial(refattn.softmax_attention, causal=True),
    "linear": refattn.linear_attention,
    "linear causal": partial(refattn.linear_attention, causal=True),
    "rfa": RFA,
    "rfa causal": partial(RFA, causal=True),
    "rfa trigonometric": partial(RFA, features="trigonometric"),
    "is": partial(refattn.importance_sampled_attention, omega=OMEGA),
    "ra": partial(refattn.randomized_attention, num_samples=1, rng=0),
    "mean of ratios": partial(refattn.mean_of_ratios_attention, omega=OMEGA[:2]),
    "lara": LARA,
    "lara causal": partial(LARA, causal=True),
    "eva": partial(refattn.eva_attention, window=32, rng=0),
    "second order": partial(refattn.second_order_attention, window=32),
    "local": partial(LOCAL, window=(16, 16)),
    "local causal": partial(LOCAL, window=(16, 0), causal=True),
    "coreset": partial(refattn.coreset_attention, num_keys=8, rng=0),
    "sampled keys": partial(refattn.sampled_key_attention, indices=np.arange(16)),
}

SMALL = {
    blocks: {
        "_OTHER_BLOCK": (256, 256),
        "_SHARES_OF_DEVICE": 2**40,
        "_NUMPY_ROWS": 64,
        "_NUMPY_ROW_BYTES": 1024,
    },
    causal: {"_STEP_BYTES": 2**15, "_LEAF": 32, "_LEAVES": 4},
    attend: {"_SHARED_BITS": 2**18},
    arithmetic: {"_CACHE_BYTES": 2**15},
}


@contextlib.contextmanager
def peak_of(cupy):
    """Largest number of bytes that are held on the way, in a list."""
    found = []
    if cupy is None:
        tracemalloc.start()
        try:
            yield found
            found.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    else:
        with cupy._ledger.count() as counts:
            yield found
        found.append(counts.peak)


@pytest.mark.long
@pytest.mark.parametrize("library", ["numpy", "cupy"])
@pytest.mark.parametrize("name", CALLS)
def test_memory_does_not_grow_with_heads(name, library, monkeypatch):
    """From 16 to 64 heads by less than the results, with small blocks that 16 heads fill."""
    cupy = pytest.importorskip("cupy") if library == "cupy" else None
    if cupy is not None and not hasattr(cupy, "_ledger"):
        pytest.skip("the stand-in for CuPy counts bytes")
    for module, small in SMALL.items():
        for constant, value in small.items():
            monkeypatch.setattr(module, constant, value)
    peaks = []
    for heads in (4, 16, 64):
        q, k, v = np.random.default_rng(0).standard_normal((3, heads, 512, 8), dtype="f")
        arrays = [x if cupy is None else cupy.asarray(x) for x in (q, k, v)]
        CALLS[name](*(x[:1] for x in arrays))  # what is imported or kept
        with peak_of(cupy) as found:
            out = CALLS[name](*arrays)
        peaks.append(found[0] - out.nbytes)
    print(name, library, [f"{x / 2**20:.2f} MiB" for x in peaks])
    assert peaks[2] - peaks[1] < out.nbytes


@pytest.mark.long
@pytest.mark.parametrize(("name", "most"), [("exact", 35), ("LARA", 85), ("causal RFA", 125)])
def test_few_kernels_of_a_gpu_and_no_wait(name, most):
    cupy = pytest.importorskip("cupy")
    if not hasattr(cupy, "_ledger"):
        pytest.skip("the stand-in for CuPy counts kernels")
    rng = np.random.default_rng(0)
    q, k, v = (cupy.asarray(x) for x in rng.standard_normal((3, 1, 8192, 8), dtype="f"))
    omega = cupy.asarray(rng.standard_normal((256, 8), dtype="f"))
    calls = {
        "exact": lambda: refattn.softmax_attention(q, k, v),
        "LARA": lambda: refattn.linear_randomized_attention(q, k, v, omega=omega),
        "causal RFA": lambda: refattn.random_feature_attention(q, k, v, omega=omega, causal=True),
    }
    with cupy._ledger.count() as counts:
        calls[name]()
    print(name, counts.launches, counts.uploads)
    assert counts.launches <= most
    assert counts.syncs == 0
