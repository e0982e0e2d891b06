"""JAX multiplies matrices with fewer digits than they have, on GPUs and TPUs, unless told not to.

On a CPU it does not; so each program is read, not run.
"""

import inspect

import numpy as np
import pytest

import refattn
from refattn import adapt, attention, diagnostics, features, kernels, moments, packed, sampling
from refattn.arrays.library import as_written
from refattn.attention import Attended
from refattn.estimators import key_sampling
from refattn.gradients import vjp
from refattn.naive import one_file
from tests.cases import differentiable, prepared, those
from tests.streaming import cases as streams

SIZES = pytest.mark.parametrize("size", [5, pytest.param(140, marks=pytest.mark.long)])


def precisions(fn, given):
    """Of each product in the program of a function; the caller wants few digits."""
    jax = pytest.importorskip("jax")
    leaves, tree = jax.tree.flatten(given)
    traced = [i for i, x in enumerate(leaves) if getattr(x, "dtype", None) in (np.float32, bool)]

    def run(*arrays):
        known = dict(zip(traced, arrays, strict=True))
        held = [known.get(i, x) for i, x in enumerate(leaves)]
        return fn(**jax.tree.unflatten(tree, held))

    with jax.enable_x64(False), jax.default_matmul_precision("bfloat16"):
        program = jax.make_jaxpr(run)(*(leaves[i] for i in traced))
        assert jax.config.jax_default_matmul_precision == "bfloat16"  # as before
    return list(products(program.jaxpr, jax.tree.leaves))


def products(program, leaves):
    """Those in loops, branches and functions, too."""
    for step in program.eqns:
        if step.primitive.name == "dot_general":
            yield step.params["precision"]
        for x in leaves(step.params, is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(x, "jaxpr", x)
            yield from products(inner, leaves) if hasattr(inner, "eqns") else ()


def are_full(found):
    return all(x is not None and [y.name for y in x] == ["HIGHEST"] * 2 for x in found)


def assert_full(fn, given, least=1):
    found = precisions(fn, given)
    assert len(found) >= least
    assert are_full(found), found


# --- what is seen ---------------------------------------------------------------------------------


WAYS = {
    "plain": lambda jax, f: f,
    "jit": lambda jax, f: jax.jit(f),
    "vmap": lambda jax, f: lambda x: jax.vmap(f)(x[None]),
    "grad": lambda jax, f: lambda x: jax.grad(lambda x: jax.numpy.sum(f(x)))(x),
    "remat": lambda jax, f: jax.checkpoint(f),
    "scan": lambda jax, f: lambda x: jax.lax.scan(lambda y, _: (f(y), None), x, length=3)[0],
    "while": lambda jax, f: lambda x: jax.lax.while_loop(lambda x: x[0, 0] < 9, f, x),
    "cond": lambda jax, f: lambda x: jax.lax.cond(x[0, 0] > 0, f, lambda x: x, x),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_a_bare_product_is_seen(way):
    jax, given = pytest.importorskip("jax"), {"x": np.ones((2, 2), np.float32)}
    bare, full = (
        precisions(WAYS[way](jax, f), given) for f in (lambda x: x @ x, as_written(lambda x: x @ x))
    )
    assert len(bare) == len(full) > 0
    assert not are_full(bare)
    assert are_full(full)


# --- attention ------------------------------------------------------------------------------------


@pytest.mark.sweep(4)
@pytest.mark.parametrize("way", ["fn", pytest.param("formula", marks=pytest.mark.long)])
@SIZES
@those()
def test_attention(name, size, way):
    case, p, options = prepared(name, "grouped", size, size + 2, "keys", size > 9, dtype=np.float32)
    given = dict(zip("qkv", p.arrays, strict=True)) | options | p.options
    assert_full(lambda q, k, v, **options: getattr(case, way)(q, k, v, **options), given)


def test_the_file_of_a_formula():
    name, scope = "random_feature_attention", {"__name__": "vendored"}
    exec(compile(one_file.formulas([name]), "vendored.py", "exec"), scope)
    assert_full(scope[name], {x: GIVEN[x] for x in ("q", "k", "v", "omega")}, least=2)


@pytest.mark.long
@SIZES
@those("vjp")
def test_pullbacks(name, size):
    """They are called when `vjp` has returned."""
    case, arrays, options, _ = differentiable(
        name, "grouped", size, size + 2, "keys", size > 9, dtype=np.float32
    )

    def pull(**given):
        out, pullback = vjp(case.fn, **given)
        return pullback(out)

    assert_full(pull, arrays | options, least=4)


@pytest.mark.long
@those("vjp")
def test_derivatives(name):
    """As `test_jax_differentiates` takes them."""
    jax = pytest.importorskip("jax")
    case, arrays, options, _ = differentiable(name, n=5, m=7, dtype=np.float32)

    def run(arrays, options):
        def loss(given):
            return jax.numpy.sum(case.fn(**given, **options))

        return jax.jit(jax.vmap(jax.value_and_grad(loss)))(arrays)

    several = {x: np.stack([y, y]) for x, y in arrays.items()}
    assert_full(run, {"arrays": several, "options": options}, least=4)


@pytest.mark.long
@pytest.mark.parametrize("name", streams.CASES)
def test_states(name):
    def decode(q, k, v):
        first, rest = (
            streams.CASES[name].start(3, *(x[..., some, :] for x in (q, k, v)))
            for some in (slice(0, 3), slice(3, 6))
        )
        merged = first.merge(rest).read(q)
        return merged, streams.in_steps(name, 3, q, k, v, (3, 6))

    arrays = (x.astype(np.float32) for x in streams.draw(0, 6))
    assert_full(decode, dict(zip("qkv", arrays, strict=True)), least=4)


# --- all other functions of arrays ----------------------------------------------------------------


X = np.random.default_rng(0).standard_normal((2, 6, 4)).astype(np.float32)
GIVEN = {  # by annotation, or by name
    "Attended[ArrayT]": Attended(X, X[..., 0]), "Moments": moments.estimate(X),
    "Iterable[Array]": [X, X], **dict.fromkeys(("q", "k", "v", "x", "y"), X),
    **dict.fromkeys(("omega", "log_weights"), X[0]), "slopes": X[:, 0, 0],
    **dict.fromkeys(("a", "b"), np.ones(4)), "degree": 2, "num_keys": 3, "num_samples": 2,
    "beta": X[..., 0] ** 2, "decay": 0.5,
    "function": refattn.softmax_attention, "functions": [lambda x: x * x],
    **dict.fromkeys(("q_offsets", "k_offsets"), (0, 2)), "block_table": [[1, 0], [0, 1]],
    **dict.fromkeys(("paged q", "k_pages", "v_pages"), X[..., None]), "lengths": [7, 3],
}  # fmt: skip
ON_HOST = {  # by NumPy
    *("expected_log_excess", "fit", "gauge", "oprf", "optimal_gaussian", "pareto_k"),
    *("saderf", "sderf", "summary"),
}
ELSEWHERE = {*ON_HOST, *refattn.__all__} - {"attend", "merge"}  # attention is above
MODULES = (
    *(adapt, attention, diagnostics, features, kernels),
    *(key_sampling, moments, packed, sampling),
)
OTHERS = {
    f"{module.__name__.rpartition('.')[2]}.{x}": getattr(module, x)
    for module in (*MODULES, refattn.naive)
    for x in sorted({*module.__all__} - ELSEWHERE - {"draw"})  # which takes no arrays
    if inspect.isfunction(getattr(module, x))
}


@pytest.mark.parametrize("name", OTHERS)
def test_others(name):
    """With the arguments they require; functions without a product today are tried as well."""
    fn, own = OTHERS[name], name.rpartition(".")[2]
    taken = inspect.signature(fn).parameters.items()
    given = {
        x: GIVEN.get(f"{own} {x}", GIVEN.get(y.annotation, GIVEN.get(x)))
        for x, y in taken
        if y.default is y.empty and y.kind is not y.VAR_KEYWORD
    }
    assert_full(fn, given, least=0)


def test_others_make_products():
    assert_full(OTHERS["kernels.estimate"], {x: GIVEN[x] for x in ("x", "y", "omega")})
