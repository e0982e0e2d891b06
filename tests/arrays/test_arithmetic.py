"""Sums of products: exact where every order of summation is, in bounded memory.

Kernels that are written for CuPy are compiled for the host: what they do needs no GPU.
"""

import ctypes
import shutil
import subprocess
import sys
import tracemalloc
from functools import cache

import numpy as np
import pytest

import refattn
from refattn.arrays import arithmetic, library
from refattn.arrays.arithmetic import Workspace, multiply, sum_of_products
from refattn.arrays.blocks import Sizes
from refattn.arrays.library import array_namespace, as_written, fused
from refattn.numbers.tape import given, pull_to_steps

TERMS = [48, 64, 65, 128, 129, 511, 1023, 1024, 1025, 4096, 4097, 8193]


@pytest.mark.parametrize(
    "terms", [n if n in (48, 129, 1025) else pytest.param(n, marks=pytest.mark.long) for n in TERMS]
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
    monkeypatch.setattr(arithmetic, "cache_sizes", lambda: Sizes(512, 10**6))
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


# --- steps that are one kernel of CuPy ------------------------------------------------------------


@fused
def shares(x, base, xp):
    return xp.exp(x - base), xp.exp(base - x)


@fused
def largest(x, more, xp):
    return xp.max(x + more, axis=-1)


def test_a_step_runs_as_it_is_and_is_traced_function_by_function(backend):
    x, base = np.array([[0.0, 1.0], [2.0, -3.0]]), np.array([[1.0], [2.0]])

    @as_written
    def product_of_steps(x, base):
        xp = array_namespace(x, base)
        a, b = shares(x, base, xp)
        return a * b * largest(x, 0.5, xp)[..., None]

    want = np.broadcast_to([[1.5], [2.5]], (2, 2))
    np.testing.assert_allclose(backend.call(product_of_steps, x, base), want, rtol=1e-14)
    traced = given(x)
    a, b = shares(traced, base, array_namespace(traced))
    found = pull_to_steps((a, b), (np.ones_like(x), np.ones_like(x)))
    np.testing.assert_allclose(found[traced.step], a.x - b.x, rtol=1e-14)


@pytest.fixture
def stand_in():
    """The stand-in for CuPy, of which no step is a kernel yet."""
    cupy = pytest.importorskip("cupy")
    if not hasattr(cupy, "_ledger"):
        pytest.skip("the stand-in for CuPy counts kernels and refuses what CuPy refuses")
    library._kernel_of_step.cache_clear()
    yield cupy
    library._kernel_of_step.cache_clear()


def test_a_step_is_one_kernel_of_cupy_that_is_made_once(stand_in, monkeypatch):
    made, fuse = [], stand_in.fuse
    monkeypatch.setattr(stand_in, "fuse", lambda **name: made.append(name) or fuse(**name))
    x, base = (stand_in.asarray(np.array([y])) for y in ([0.0, 1.0], [2.0, 2.0]))
    with stand_in._ledger.count() as counts:
        for _ in range(3):
            shares(x, base, array_namespace(x))
    assert (counts.launches, made) == (3, [{"kernel_name": "refattn_shares"}])
    product = fused(lambda x, xp: xp.exp(x) @ xp.matrix_transpose(x))
    with pytest.warns(RuntimeWarning, match="makes no kernel of .* does not support"):
        first = product(x, array_namespace(x))
    np.testing.assert_array_equal(stand_in.asnumpy(product(x, array_namespace(x)) - first), 0.0)


def test_steps_keep_to_what_cupy_fuses(stand_in, monkeypatch):
    """They ask for no shape, and have results of the shape that their arguments broadcast to."""
    names, inside, fuse, shape = set(), [], stand_in.fuse, stand_in.ndarray.shape

    def checked(kernel_name):
        def decorate(step):
            def run(*args):
                inside.append(kernel_name)
                results = fuse(kernel_name=kernel_name)(step)(*args)
                inside.clear()
                shapes = [x.shape for x in args if isinstance(x, stand_in.ndarray)]
                whole = np.broadcast_shapes(*shapes)
                if isinstance(results, tuple) or results.ndim == len(whole):
                    found = results if isinstance(results, tuple) else (results,)
                    assert {x.shape for x in found} == {whole}, kernel_name
                else:
                    assert results.ndim == len(whole) - 1, kernel_name
                names.add(kernel_name)
                return results

            return run

        return decorate

    def read(x):
        assert not (inside and sys._getframe(1).f_globals["__name__"].startswith("refattn")), inside
        return shape.fget(x)

    monkeypatch.setattr(stand_in, "fuse", checked)
    monkeypatch.setattr(stand_in.ndarray, "shape", property(read, shape.fset))
    rng = np.random.default_rng(0)
    q, k, v, omega = (
        stand_in.asarray(rng.standard_normal(x)) for x in [(2, 300, 4)] * 3 + [(8, 4)]
    )
    mask = stand_in.asarray(rng.random((1, 300)) < 0.7)
    rfa = refattn.random_feature_attention
    for causal in (False, True):
        for fn, more in (
            (refattn.softmax_attention, {}),
            (rfa, {"omega": omega}),
            (rfa, {"omega": omega, "features": "trigonometric"}),
            (refattn.linear_attention, {}),
            (refattn.second_order_attention, {"window": 64}),
        ):
            for options in ({}, {"mask": mask}):
                out, pullback = refattn.vjp(fn, q, k, v, causal=causal, **options, **more)
                pullback(out)
    assert len(names) >= 25, names


# --- kernels of CuPy ------------------------------------------------------------------------------

COMPILER = shutil.which("c++")
compiles = pytest.mark.skipif(COMPILER is None, reason="there is no compiler of C++")
NUMBERS = {"float32": ctypes.c_float, "float64": ctypes.c_double}


def compiled(path, parameters, code, dtype):
    """Compile a kernel, for arrays that are all read in order but where they are raw."""
    types, listed, given = [], [], []
    for *raw, kind, name in (x.split() for x in parameters.split(", ")):
        if kind == "int64" or name == "most":  # a number
            types.append(ctypes.c_int64 if kind == "int64" else NUMBERS[dtype])
            listed.append(f"{kind.replace('int64', 'long long')} {name}")
        else:
            types.append(ctypes.c_void_p)
            listed.append(f"const T *{name if raw else name + '_'}")
            given.append("" if raw else f"const T {name} = {name}_[i];")
    named = {"float32": "float", "float64": "double"}[dtype]
    path.with_suffix(".cpp").write_text(
        f"#include <cmath>\n#include <cstddef>\nusing std::exp;\ntypedef {named} T;\n"
        f'extern "C" void run({", ".join(listed)}, T *z_, long long n) {{'
        f"for (long long i = 0; i < n; ++i) {{ {''.join(given)} T &z = z_[i]; {code}; }} }}\n"
    )
    source, binary = map(str, (path.with_suffix(".cpp"), path.with_suffix(".so")))
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", binary, source], check=True)
    run = ctypes.CDLL(binary).run
    run.argtypes = [*types, ctypes.c_void_p, ctypes.c_int64]
    return run


@pytest.fixture
def kernel(tmp_path):
    """A maker of kernels that take and return arrays of NumPy, or of the stand-in for CuPy."""

    def make(parameters, results, code, name):
        raw = ["raw" in x for x in parameters.split(", ")]
        assert results == "T z"

        @cache
        def of_dtype(dtype):
            return compiled(tmp_path / f"{name}_{dtype}", parameters, code, dtype)

        def call(*args):
            host = [getattr(x, "_a", x) for x in args]
            inputs, outputs = host[: len(raw)], host[len(raw) :]
            plain = [x for x, is_raw in zip(inputs, raw, strict=True) if not is_raw and np.ndim(x)]
            shape = outputs[0].shape if outputs else np.broadcast_shapes(*(x.shape for x in plain))
            out = np.empty(shape, inputs[0].dtype)
            held = [
                np.ascontiguousarray(x if is_raw else np.broadcast_to(x, shape))
                if np.ndim(x)
                else x
                for x, is_raw in zip(inputs, raw, strict=True)
            ]
            pointers = (x.ctypes.data if np.ndim(x) else x for x in held)
            of_dtype(str(out.dtype))(*pointers, out.ctypes.data, out.size)
            return out

        return call

    return make


@pytest.mark.long
@compiles
@pytest.mark.parametrize("dtype", NUMBERS)
def test_sums_of_pieces(kernel, dtype):
    call = kernel(*arithmetic._CUPY_KERNELS["sum_pieces"], "sum_pieces")
    for count in (1, 7, 8, 64, 65, 130, 512):
        x = np.random.default_rng(0).integers(-8, 9, (3, 2, count, 5, 4)).astype(dtype)
        got = call(x, count, 20, np.empty((3, 2, 5, 4), dtype))
        np.testing.assert_array_equal(got, np.sum(x, axis=-3))
    x = np.full((1, 512, 1, 1), 0.7, dtype)  # rounding errors of one sign
    got = call(x, 512, 1, np.empty((1, 1, 1), dtype))
    assert abs(got[0, 0, 0] / 512 - x[0, 0, 0, 0]) <= 5 * np.finfo(dtype).eps


@pytest.mark.long
@compiles
def test_functions_on_cupy_call_them(kernel, monkeypatch):
    cupy = pytest.importorskip("cupy")
    if not hasattr(cupy, "_ledger"):
        pytest.skip("CuPy compiles them itself")
    called = []

    def make(*names):
        call = kernel(*names)
        return lambda *args: called.append(names[-1]) or cupy.asarray(call(*args))

    monkeypatch.setattr(cupy, "ElementwiseKernel", make, raising=False)
    monkeypatch.setattr(arithmetic, "_cupy_kernel", cache(arithmetic._cupy_kernel.__wrapped__))
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, n, w)) for n, w in ((9, 3), (200, 3), (200, 70)))
    omega = rng.standard_normal((130, 3))
    for causal in (False, True):
        for fn, more in (
            (refattn.softmax_attention, {}),
            (refattn.random_feature_attention, {"omega": omega}),
        ):
            called.clear()
            options = {key: cupy.asarray(x) for key, x in more.items()}
            out, pullback = refattn.vjp(fn, *map(cupy.asarray, (q, k, v)), causal=causal, **options)
            want, of_numpy = refattn.vjp(fn, q, k, v, causal=causal, **more)
            np.testing.assert_allclose(cupy.asnumpy(out), want, rtol=0, atol=1e-12)
            for x, y in zip(pullback(out)[:3], of_numpy(want)[:3], strict=True):
                np.testing.assert_allclose(cupy.asnumpy(x), y, rtol=0, atol=1e-12)
            assert set(called) == {"refattn_sum_pieces"}, (fn, causal)


@pytest.mark.parametrize("count", [8, 100, 301, 512])
def test_pieces_are_added_in_eights(backend, count):
    x = np.full((2, count, 3, 1), 0.7)  # rounding errors of one sign

    @as_written
    def total(x):
        return arithmetic.sum_pieces(x, array_namespace(x))

    got = backend.call(total, x)
    np.testing.assert_allclose(got / count, x[:, 0], rtol=4 * np.finfo(float).eps)
