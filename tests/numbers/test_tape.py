"""Derivatives by the tape against difference quotients, and what it is used by."""

import numpy as np
import pytest

from refattn import naive
from refattn.arrays.library import array_namespace, as_written
from refattn.numbers import primitives, steps, tape
from refattn.numbers.tape import Traced, given, pull_to_steps

LONG = np.longdouble
rng = np.random.default_rng(0)


def pulled(fn, arrays, g):
    """The value, and the cotangents of arrays, 0 of those that it does not depend on."""
    traced = [given(x) for x in arrays]
    out = fn(*traced)
    found = pull_to_steps(out, g)
    return out.x, [found.get(x.step, np.zeros_like(x.x)) for x in traced]


def agrees(fn, *arrays):
    """Compare a slope along a random way with a difference quotient in extended precision."""
    arrays = [np.asarray(x, LONG) for x in arrays]
    ways = [rng.standard_normal(x.shape) for x in arrays]
    plain = fn(*arrays)
    g = rng.standard_normal(np.shape(plain))
    out, found = pulled(fn, arrays, np.asarray(g, LONG))
    np.testing.assert_array_equal(out, plain)
    step = LONG(1e-6)
    ahead, back = (fn(*(x + s * w for x, w in zip(arrays, ways))) for s in (step, -step))  # noqa: B905
    want = np.sum(g * (ahead - back)) / (2 * step)
    got = sum(np.sum(x * w) for x, w in zip(found, ways, strict=True))
    np.testing.assert_allclose(float(got), float(want), rtol=1e-8, atol=1e-9)


def xp(x):
    return array_namespace(x)


@pytest.mark.parametrize("name", tape._SMOOTH)
def test_slopes_of_smooth_functions(name):
    x, y = 0.5 + rng.random((3, 4)), 0.5 + rng.random((4,))  # where all are defined
    if len(tape._SMOOTH[name]) == 2:
        agrees(lambda a, b: getattr(xp(a), name)(a, b), x, y)
        agrees(lambda a: getattr(xp(a), name)(a, a), x) if name[:3] not in ("max", "min") else None
    else:
        agrees(lambda a: getattr(xp(a), name)(a), x)


MOVES = {
    "matrix_transpose": lambda x: xp(x).matrix_transpose(x),
    "mT": lambda x: x.mT @ x,
    "reshape": lambda x: xp(x).reshape(x, (4, 6)),
    "broadcast_to": lambda x: xp(x).broadcast_to(x, (5, 2, 3, 4)),
    "expand_dims": lambda x: xp(x).expand_dims(x, axis=1),
    "squeeze": lambda x: xp(x).squeeze(x[:1], axis=0),
    "permute_dims": lambda x: xp(x).permute_dims(x, (2, 0, 1)),
    "moveaxis": lambda x: xp(x).moveaxis(x, 0, -1),
    "swapaxes": lambda x: np.swapaxes(x, 0, 2),
    "transpose": lambda x: np.transpose(x),
    "flip": lambda x: xp(x).flip(x, axis=1),
    "roll": lambda x: np.roll(x, 2, axis=-1),
    "repeat": lambda x: xp(x).repeat(x, 3, axis=-2),
    "tril": lambda x: xp(x).tril(x, k=1),
    "triu": lambda x: xp(x).triu(x),
    "astype": lambda x: xp(x).astype(xp(x).astype(x, np.longdouble), x.dtype),
    "getitem": lambda x: x[..., 1:, None, 2] * x[0, 0, 0],
    "sum": lambda x: xp(x).sum(x * x, axis=(0, -1)) + xp(x).sum(x),
    "mean": lambda x: xp(x).mean(x * x, axis=1, keepdims=True) * xp(x).mean(x),
    "max": lambda x: xp(x).max(x, axis=(-1, 0)) * np.max(x),
    "min": lambda x: xp(x).min(x, axis=1, keepdims=True),
    "sort": lambda x: np.sort(x, axis=1) * np.arange(3.0)[:, None],
    "where": lambda x: xp(x).where(x > 0.5, x * x, 2.0) * np.where(x > 0.5, 1.0, x),
    "clip": lambda x: np.clip(x, 0.3, 0.8),
    "concat": lambda x: xp(x).concat([x, 2 * x[:1], x[1:] ** 2], axis=0),
    "stack": lambda x: xp(x).stack([x, x * x], axis=-1),
    "take": lambda x: xp(x).take(x, np.asarray([2, 0, 2]), axis=1),
    "take_along_axis": lambda x: np.take_along_axis(x, np.asarray([[[1, 0, 1]]] * 2), axis=-1),
    "cumulative_sum": lambda x: np.cumulative_sum(x, axis=1, include_initial=True),
    "cumsum": lambda x: np.cumsum(x * x, axis=-1),
    "vecdot": lambda x: xp(x).vecdot(x, x + 1),
    "broadcast_arrays": lambda x: np.multiply(*xp(x).broadcast_arrays(x, x[:1])),
    "unpacked": lambda x: x[0] * sum(row[0] for row in x),
    "turned": lambda x: (1 - x) / (2 / x) - x**2 + (-x) @ np.ones((4, 2)) @ np.ones((2, 4)),
}


@pytest.mark.parametrize("name", MOVES)
def test_slopes_of_what_moves_and_sums(name):
    agrees(MOVES[name], rng.random((2, 3, 4)))


def test_products_are_summed_over_what_is_shared():
    agrees(lambda a, b: a @ b, rng.random((5, 2, 3, 4)), rng.random((2, 4, 6)))
    agrees(lambda a, b: np.matmul(a, b), rng.random((3, 4)), rng.random((5, 4, 2)))


def in_parts(x):
    """Write to a buffer, read it, and write over what was read."""
    space = xp(x)
    out = space.zeros_like(x)
    for i in range(3):
        out[i : i + 1] = x[i : i + 1] * (i + 1)
    early = out * out
    out[1] = x[0] * x[2]
    out[2] += x[1]
    return early + out


def test_buffers_are_what_they_were_when_they_were_read():
    agrees(in_parts, rng.random((3, 4)))


def test_every_step_has_its_name_its_operands_and_a_cotangent():
    x = given(np.asarray([[1.0, 2.0], [3.0, 4.0]]))
    y = np.exp(x @ x.mT) * 2.0
    names = [step.name for step in steps.before([y.step])]
    assert names == ["multiply", "constant", "exp", "matmul", "matrix_transpose", "given"]
    found = pull_to_steps(y, np.ones((2, 2)))
    product = next(step for step in found if step.name == "matmul")
    np.testing.assert_array_equal(product.args[0].x, x.x)
    np.testing.assert_allclose(found[product], y.x)
    assert {step.name for step in found} == {*names} - {"constant"}


def test_copies_along_a_first_axis_take_a_cotangent_each():
    """One way back for each element of the result: derivatives of all elements."""
    x = rng.random((2, 3))
    copies = given(np.broadcast_to(x, (6, 2, 3)))
    found = pull_to_steps(np.exp(copies) / 2, np.eye(6).reshape(6, 2, 3))
    each = found[copies.step].reshape(6, 6)
    np.testing.assert_allclose(each, np.diag(np.exp(x.ravel()) / 2))


@np.errstate(all="ignore")
def test_what_no_cotangent_reaches_takes_none_whatever_its_slope():
    x = np.asarray([0.0, 1.0, np.nan, np.inf])
    some = np.asarray([False, True, False, False])
    for fn in (np.log, np.sqrt, lambda x: 1 / x, lambda x: np.exp(x) * x):
        _, (found,) = pulled(lambda x: np.where(some, fn(x), 0.0), [x], np.ones(4))  # noqa: B023
        np.testing.assert_array_equal(found[[0, 2, 3]], 0.0)


def test_maxima_that_tie_share():
    _, (found,) = pulled(
        lambda x: np.max(x, axis=-1), [np.asarray([3.0, 1.0, 3.0])], np.asarray(1.0)
    )
    np.testing.assert_array_equal(found, [0.5, 0.0, 0.5])


def test_constants_take_no_cotangent_and_leave_no_steps():
    x = given(np.ones(2))
    fixed = tape.fixed(x) * Traced(np.ones(2))
    assert fixed.step.args == ()
    found = pull_to_steps(fixed * x, np.ones(2))
    assert {step.name for step in found} == {"multiply", "given"}


@pytest.mark.parametrize(
    ("formula", "name"),
    [
        (lambda x: np.linalg.det(x), "det"),
        (lambda x: np.fft.fft(x), "fft"),
        (lambda x: xp(x).prod(x), "prod"),
        (lambda x: np.add.reduce(x), "add.reduce"),
        (lambda x: x[np.asarray([0, 1])], "take"),
        (lambda x: np.matmul(x[0], x[0]), "matmul"),
    ],
)
def test_functions_that_are_not_in_a_table_are_named(formula, name):
    with pytest.raises((AttributeError, TypeError), match=f"must not use.*{name}"):
        formula(given(np.ones((2, 2))))


@pytest.mark.long("jax", "dask", "array_api_strict")
def test_every_library(backend):
    """A formula that is written once, in every array library."""
    arrays = {"q": rng.random((5, 3)), "k": rng.random((6, 3)), "v": rng.random((6, 2))}
    d_out, mask = rng.random((5, 2)), np.arange(6) < 4

    @as_written  # on the device of the arrays
    def pull(q, k, v, d_out, mask):
        traced = [given(x) for x in (q, k, v)]
        out = naive.softmax_attention(*traced, mask=Traced(mask), softcap=2.0)
        found = pull_to_steps(out, d_out)
        return tuple(found[x.step] for x in traced)

    want = pull(**arrays, d_out=d_out, mask=mask)

    def one(i):
        return lambda *args: pull(*args)[i]

    for i in range(3):
        got = backend.call(one(i), *arrays.values(), d_out, mask)
        np.testing.assert_allclose(got, want[i], rtol=1e-12, atol=1e-14)


# --- steps with pullbacks of their own ------------------------------------------------------------


def inner(x, y, options=(None, 2.0)):
    """A pair, of which the second is not smooth; options may hold arrays."""
    some, power = options
    out = x**power * y if some is None else x * some
    return out, (x + y, 3)


def test_a_function_may_be_one_step_that_is_traced_when_it_is_pulled_back():
    once = primitives.retraced(inner)

    def formula(function, x, y):
        a, (b, three) = function(x, y)
        c, _ = function(x, y, (y * y, 1.0))
        return a * three + b * b + c

    x, y = rng.random((2, 4)), rng.random((4,))
    agrees(lambda x, y: formula(once, x, y), x, y)
    g = np.ones((2, 4))
    want, got = (pulled(lambda x, y: formula(fn, x, y), [x, y], g)[1] for fn in (inner, once))  # noqa: B023
    for a, b in zip(want, got, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-14)
    out = once(given(x), y)[0]
    assert [step.name for step in steps.before([out.step])] == ["item", "inner", "given"]
    assert all(isinstance(z, np.ndarray) for z in (once(x, y)[0], once(x, y)[1][0]))


def test_a_function_may_have_a_pullback_that_is_written():
    @primitives.primitive
    def square(x, scale=1.0):
        return (scale * x * x,)

    @square.pullback
    def pull(result, cotangent, x, scale):
        return {"x": 2 * scale * x * cotangent[0]}

    agrees(lambda x: square(x, scale=3.0)[0] + x, rng.random(3))


def test_parts_are_summed_in_one_buffer():
    """Cotangents of many slices take the time and the memory of the whole array, not of each."""
    x = given(np.ones((4000, 8)))
    total = sum(np.sum(x[i : i + 1] * i) for i in range(4000))
    found = pull_to_steps(total, np.asarray(1.0))[x.step]
    np.testing.assert_array_equal(found, np.repeat(np.arange(4000.0)[:, None], 8, 1))
