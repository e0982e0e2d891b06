"""Sums of products of many terms: exact where every order of summation is, in bounded memory."""

import tracemalloc

import numpy as np
import pytest

from refattn.arrays import products
from refattn.arrays.blocks import Sizes
from refattn.arrays.library import Workspace
from refattn.arrays.products import multiply, sum_of_products

TERMS = [48, 64, 65, 128, 129, 511, 1023, 1024, 1025, 4096, 4097, 8193]


@pytest.mark.parametrize(
    "terms",
    [n if n in (48, 129, 1025) else pytest.param(n, marks=pytest.mark.long) for n in TERMS],
)
@pytest.mark.long("lead0", "lead2", "lead3", "lead4")
@pytest.mark.parametrize("lead", [((), ()), ((2, 1), (3,)), ((), (3,)), ((3,), ()), ((40,), (40,))])
def test_every_part_of_a_product(terms, lead):
    rng = np.random.default_rng(0)
    for n, columns in ((1, 513), (64, 257), (65, 256), (129, 1), (130, 300), (0, 3), (3, 0)):
        if n * columns * terms * np.prod(lead[0] + lead[1]) > 10**8:
            n = 3
        x = rng.integers(-8, 9, (*lead[0], n, terms)).astype(np.float32)
        y = rng.integers(-8, 9, (*lead[1], terms, columns)).astype(np.float32)
        want = x.astype(np.float64) @ y.astype(np.float64)
        memory = Workspace()
        again = (f(x, y, memory) for f in (multiply, multiply, sum_of_products))
        for got in (multiply(x, y), *again, sum_of_products(x, y)):
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_tile_of_a_product(dtype, monkeypatch):
    monkeypatch.setattr(products, "cache_sizes", lambda: Sizes(512, 10**6))
    rng, memory = np.random.default_rng(0), Workspace()
    for n, columns in ((256, 192), (512, 512), (300, 64), (257, 128), (256, 65), (64, 64)):
        x, y = (rng.integers(-8, 9, (2, m, 48)).astype(dtype) for m in (n, columns))
        for some in (y, y[:1]):
            for right in (some.mT, np.ascontiguousarray(some.mT)):
                np.testing.assert_array_equal(multiply(x, right, memory), x @ right)


@pytest.mark.long("shape0", "shape1")
@pytest.mark.parametrize("shape", [(64, 64, 4096), (256, 64, 1024), (2000, 1, 4096), (1, 64, 4096)])
def test_memory_of_a_product_does_not_depend_on_heads(shape):
    x, y = np.ones(shape), np.ones((shape[-1], 64))
    out = np.empty((*shape[:-1], 64))
    tracemalloc.start()
    try:
        sum_of_products(x, y, None, out)
        assert tracemalloc.get_traced_memory()[1] < 4e6
    finally:
        tracemalloc.stop()
