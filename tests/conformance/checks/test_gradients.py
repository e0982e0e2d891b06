"""Checks of gradients: right ones pass, whatever the library, and each mistake shows."""

import contextlib
import sys
import tracemalloc
from functools import partial
from types import ModuleType

import numpy as np
import pytest

import refattn
from refattn import vjp
from refattn.conformance import Adapter, Failure, Subprocess, check, checks_of
from refattn.conformance.defects import MUTANTS, VARIANTS
from refattn.conformance.truth.reference import pulled_rounding

RIGHT = [m for m in VARIANTS if "vjp" in m.capabilities]
SEES = ("mask", "causal", "gqa")
BACK = [m for m in MUTANTS if "vjp" in m.capabilities]


def gradients(fn, estimator, *capabilities, **tags):
    """The checks of gradients alone."""
    adapter = Adapter(fn, estimator, ("vjp", *capabilities), tags)
    names = [x.name for x in checks_of(adapter) if x.name.startswith("gradients")]
    return check(adapter, checks=names, rng=0)


def with_pullback(fn, **fixed):
    """The package's own function, with `d_out`."""

    def attention(q, k, v, *, d_out=None, **options):
        if "seed" in options:
            options["rng"] = options.pop("seed")
        if d_out is None:
            return fn(q, k, v, **fixed, **options)
        out, pullback = vjp(fn, q, k, v, **fixed, **options)
        return (out, *pullback(d_out)[:3])

    return attention


OWN = {
    "softmax": (refattn.softmax_attention, "softmax", SEES, {}),
    "rfa": (refattn.random_feature_attention, "rfa", (*SEES, "omega", "omega_per_head"), {}),
    "rfa drawn": (refattn.random_feature_attention, "rfa", SEES, {}),
    "ra": (refattn.randomized_attention, "ra", (*SEES, "omega_only"), {}),
    "lara": (refattn.linear_randomized_attention, "lara", (*SEES, "omega"), {}),
    "is": (refattn.importance_sampled_attention, "is", (*SEES, "omega_only"), {}),
    "mean of ratios": (refattn.mean_of_ratios_attention, "mean-of-ratios", (*SEES, "omega"), {}),
    "linear": (refattn.linear_attention, "linear", SEES, {}),
    "relu": (
        partial(refattn.linear_attention, feature_map=refattn.features.relu_features),
        "linear",
        SEES,
        {"feature_map": "relu"},
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", OWN)
def test_own_pullbacks_pass(name, dtype):
    fn, estimator, capabilities, tags = OWN[name]
    report = gradients(with_pullback(fn), estimator, *capabilities, **tags, dtype=dtype)
    assert report.verdict == "PASS", report


@pytest.mark.long
@pytest.mark.parametrize("entry", RIGHT, ids=lambda m: m.name)
def test_other_styles_pass(entry):
    for dtype in ("float32", "float64"):
        report = gradients(
            entry.fn, entry.estimator, *entry.capabilities, **{**entry.tags, "dtype": dtype}
        )
        assert report.verdict == "PASS", report


def drawn(fn):
    """A way back as it is where frequencies are drawn inside."""

    def attention(q, k, v, *, num_features, seed, **options):
        omega = np.random.default_rng(seed).standard_normal((num_features, q.shape[-1]))
        return fn(q, k, v, omega=omega.astype(q.dtype), **options)

    return attention


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_mistakes_of_black_boxes(dtype):
    """Where frequencies are drawn slopes, sums and zeros show what numbers cannot."""
    by_name = {m.name.removeprefix("rfa-backward-"): m.fn for m in BACK if m.estimator == "rfa"}
    right = next(m.fn for m in RIGHT if m.name == "rfa-backward")
    assert gradients(drawn(right), "rfa", *SEES, dtype=dtype).verdict == "PASS"
    for name, seen_by in {
        "delta-dropped": "gradients_of_means",
        "normaliser-constant-for-keys": "gradients_are_slopes",
        "norm-forgotten": "gradients_are_slopes",
        "mask-ignored": "gradients_of_hidden",
        "mask-of-first-query": "gradients_are_slopes",
        "causal-ahead": "gradients_are_slopes",
        "causal-top-left": "gradients_are_slopes",
        "group-not-summed": "gradients_are_slopes",
        "group-interleaved": "gradients_are_slopes",
        "root-missing": "gradients_are_slopes",
        "cotangents-are-ones": "gradients_are_linear",
    }.items():
        report = gradients(drawn(by_name[name]), "rfa", *SEES, dtype=dtype)
        assert seen_by in [r.check for r in report.results if r.status == "FAIL"], (name, report)


def edited(fn, change):
    """A function with `d_out` whose four results are changed, given its arguments."""

    def attention(q, k, v, *, d_out=None, **options):
        if d_out is None:
            return fn(q, k, v, **options)
        found = list(fn(q, k, v, d_out=d_out, **options))
        change(found, q=q, k=k, v=v, d_out=d_out, **options)
        return tuple(found)

    return attention


def halved(part, when):
    def change(found, **given):
        found[part] = found[part] * (0.5 if when(**given) else 1.0)

    return change


def as_contiguous(found, **given):
    """Read d_out without its strides."""
    if not given["d_out"].flags.c_contiguous:
        found[2] = found[2][..., ::-1, :]


def write_to_d_out(found, **given):
    given["d_out"][...] = 0.0


def in_float64(found, **given):
    found[1] = found[1].astype(np.float64)


def nan_of_hidden(found, **given):
    if "mask" in given:
        found[1] = found[1] + 0.0 * given["k"].sum()


def clamped(found, **given):
    found[2] = np.where(given["k"] < -15, 0.0, found[2])


class Racing:
    """Every fifth call loses what one query adds."""

    calls = 0

    def __call__(self, found, **given):
        self.calls += 1
        if self.calls % 5 == 0:
            found[3] = 0.9 * found[3]


SOFTMAX = with_pullback(refattn.softmax_attention)
LINEAR = with_pullback(refattn.linear_attention)


@pytest.mark.parametrize(
    ("name", "fn", "estimator"),
    [
        ("gradients_of_layouts", edited(SOFTMAX, as_contiguous), "softmax"),
        ("gradients", edited(SOFTMAX, write_to_d_out), "softmax"),
        ("gradients", edited(SOFTMAX, in_float64), "softmax"),
        ("gradients_of_hidden_nonsense", edited(SOFTMAX, nan_of_hidden), "softmax"),
        ("gradients_of_extreme_features", edited(LINEAR, clamped), "linear"),
        ("gradients_again", edited(SOFTMAX, Racing()), "softmax"),
        (
            "gradients_of_many_tokens",
            edited(SOFTMAX, halved(1, lambda q, **_: q.shape[-1] > 64)),
            "softmax",
        ),
        (
            "gradients_of_many_tokens",
            edited(SOFTMAX, halved(3, lambda v, **_: v.shape[-1] > 128)),
            "softmax",
        ),
        (
            "gradients_of_many_tokens",
            edited(SOFTMAX, halved(2, lambda q, k, **_: q.shape[-3] > k.shape[-3] and len(q) > 1)),
            "softmax",
        ),
        (
            "gradients",
            edited(SOFTMAX, halved(1, lambda q, **_: q.shape[:-2] == (1, 10))),
            "softmax",
        ),
        (
            "gradients_are_linear",
            edited(
                SOFTMAX, lambda found, d_out, **_: halved(1, lambda: abs(d_out).max() > 99)(found)
            ),
            "softmax",
        ),
    ],
)
def test_mistakes_in_use(name, fn, estimator):
    """Of memory, sizes and repetition, each by the check that is for it."""
    tags = {"feature_map": "elu"} if estimator == "linear" else {}
    adapter = Adapter(fn, estimator, ("vjp", *SEES), {"dtype": "float32", **tags})
    report = check(adapter, checks=[name], level="full", rng=0)  # which has time for all sizes
    assert report.verdict == "FAIL", report


def test_torch_is_asked_in_every_way():
    """Twice through one graph, with a call between, for one input alone, with strides of 0."""
    torch = pytest.importorskip("torch")
    kept = []

    class Attention(torch.autograd.Function):  # type: ignore[misc, name-defined]
        """Right; `wrong` is what its way back does besides."""

        wrong = staticmethod(lambda ctx, q, k, v, g, found: found)

        @staticmethod
        def forward(ctx, q, k, v):
            ctx.save_for_backward(q, k, v)
            kept[:] = [q, k, v]
            return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v

        @classmethod
        def backward(cls, ctx, *d_out):
            (g,), (q, k, v) = d_out, cls.saved(ctx)
            c = q.shape[-1] ** -0.5
            p = torch.softmax(q @ k.mT * c, -1)
            t = cls.read(g) @ v.mT
            s = p * (t - (p * t).sum(-1, keepdim=True))
            found = [c * s @ k, c * s.mT @ q, p.mT @ cls.read(g)]
            return tuple(cls.given(ctx, found))

        saved = staticmethod(lambda ctx: ctx.saved_tensors)
        read = staticmethod(lambda g: g)
        given = staticmethod(lambda ctx, found: found)

    class Module(Attention):
        saved = staticmethod(lambda ctx: kept)

    class Strides(Attention):
        read = staticmethod(lambda g: g if g.is_contiguous() else g * 0 + g.flatten()[0] / 2)

    class Needs(Attention):
        given = staticmethod(lambda ctx, x: [y if all(ctx.needs_input_grad) else y / 2 for y in x])

    class Again(Attention):
        @staticmethod
        def given(ctx, found):
            ctx.times = getattr(ctx, "times", 0) + 1
            return [x * ctx.times for x in found]

    names = {None: Attention, "gradients_again": (Module, Needs, Again)}
    assert gradients(names[None].apply, "softmax", library="torch").verdict == "PASS"
    for made, name in (
        (Module, "gradients_again"),
        (Needs, "gradients_again"),
        (Again, "gradients_again"),
        (Strides, "gradients_of_layouts"),
    ):
        adapter = Adapter(made.apply, "softmax", ("vjp",), {"library": "torch"})
        assert check(adapter, checks=[name], rng=0).verdict == "FAIL", made


@pytest.mark.long
def test_declared_conventions_hold_on_the_way_back():
    """An epsilon in the normaliser, and NaN or means where a query sees nothing."""

    def with_epsilon(q, k, v, *, d_out=None):
        phi, slope = (
            (lambda x: np.where(x > 0, x + 1, np.exp(x))),
            lambda x: np.exp(np.minimum(x, 0)),
        )
        a, b = phi(q), phi(k)
        kernel = a @ b.mT
        total = kernel.sum(-1, keepdims=True) + 1e-6
        out = kernel @ v / total
        if d_out is None:
            return out
        pairs = (d_out @ v.mT - (d_out * out).sum(-1, keepdims=True)) / total
        return (out, slope(q) * (pairs @ b), slope(k) * (pairs.mT @ a), (kernel / total).mT @ d_out)

    report = gradients(with_epsilon, "linear", epsilon=1e-6)
    unsure = [r.check for r in report.results if r.status != "PASS"]
    assert unsure == ["gradients_of_extreme_features"], report  # below the epsilon
    assert report.verdict == "UNDERPOWERED"
    assert gradients(with_epsilon, "linear").verdict == "FAIL"

    def of_empty_rows(value):
        def attention(q, k, v, *, mask=None, d_out=None):
            options = {} if mask is None else {"mask": mask}
            out, pullback = vjp(refattn.softmax_attention, q, k, v, **options)
            seen = np.ones((), bool) if mask is None else mask.any(-1)[..., None]
            out = np.where(seen, out, value)
            if d_out is None:
                return out
            return (out, *(np.where(seen.all(), x, value) for x in pullback(d_out)[:3]))

        return attention

    report = gradients(of_empty_rows(np.nan), "softmax", "mask", empty_rows="nan")
    assert report.verdict == "PASS", report


def test_black_boxes_of_other_kinds():
    """LARA and RA that draw by themselves: what values take is always told."""
    waves = partial(refattn.random_feature_attention, features="trigonometric")
    for name, fn in (("lara", refattn.linear_randomized_attention), ("rfa-trigonometric", waves)):
        right = with_pullback(fn)
        assert gradients(right, name).verdict == "PASS", name
        wrong = edited(right, halved(3, lambda **_: True))
        assert gradients(wrong, name).verdict == "FAIL", name


def test_memory_of_what_is_allowed():
    """Weights of many pairs, and not a product with them for each key."""
    rng = np.random.default_rng(0)
    arrays = tuple(rng.standard_normal((n, 8)) for n in (513, 1025, 1025))
    tracemalloc.start()
    pulled_rounding(Adapter(SOFTMAX, "softmax", ("vjp",)), arrays, {}, np.ones((513, 8)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50 * 8 * 513 * 1025


def test_there_are_mistakes_enough():
    assert len({type(m.fn).__name__ for m in BACK}) == len(BACK) >= 40
    assert all(m.effect for m in BACK)


def test_suspects_and_places():
    """A mistake is recognised, and where it is said."""
    entry = next(m for m in BACK if m.name == "softmax-backward-scale-twice-in-dk")
    report = gradients(entry.fn, "softmax", *SEES)
    (result,) = (r for r in report.results if r.check == "gradients")
    assert result.expected.startswith("dk ")
    assert "n = 4, m = 6: every token" in result.got
    assert result.suspects[0].startswith("softmax-backward-scale-twice-in-dk (the same numbers)")
    assert "d_out=d_out" in result.reproducer
    assert "got = got[2]" in result.reproducer


def status(script):
    """The exit status of a script."""
    try:
        exec(script, {"__name__": "__main__"})
    except SystemExit as end:
        return int(end.code or 0)
    except Failure:
        return 1
    return 0


SLOPES, LINEAR = "gradients_are_slopes", "gradients_are_linear"
DEFECTS = {
    "not finite": (lambda out, q, k, v: (out, q, k * np.nan, v), ("gradients", LINEAR, SLOPES)),
    "an exception": (lambda out, q, k, v: {}[len(out)], ("gradients", SLOPES)),
    "a shape": (lambda out, q, k, v: (out, q, np.swapaxes(k, -1, -2), v), ("gradients", LINEAR)),
    "too few": (lambda out, q, k, v: (q, k, v), ("gradients", LINEAR)),
    "twice": (lambda out, q, k, v: (out, q, 2 * k, v), ("gradients", SLOPES)),
    "signs": (lambda out, q, k, v: (out, q, k, np.sign(v)), ("gradients_of_means", LINEAR, SLOPES)),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_scripts_show_a_mistake_until_it_is_mended(name, monkeypatch):
    defect, checks = DEFECTS[name]
    right = with_pullback(refattn.softmax_attention)

    def wrong(*arrays, **options):
        found = right(*arrays, **options)
        return defect(*found) if "d_out" in options else found

    module = ModuleType("under_repair")
    monkeypatch.setitem(sys.modules, "under_repair", module)
    adapter = Adapter(wrong, "softmax", ("vjp",), source="under_repair:attention")
    report = check(adapter, checks=checks, rng=0)
    for module.attention, failed in ((wrong, 1), (right, 0)):
        for result in report.results:
            assert status(result.reproducer) == failed, (result.check, result.reproducer)


PROGRAM = """
import sys
from importlib import import_module
import numpy as np, refattn

npz = sys.argv[1] == "npz"

def answer(source, target):
    given = np.load(source) if npz else import_module("safetensors.numpy").load_file(source)
    out, pullback = refattn.vjp(refattn.softmax_attention, *(given[x] for x in "qkv"))
    found = {"out": out}
    if "d_out" in given:
        q, k, v = pullback(given["d_out"])[:3]
        found |= {"dq": q, "dk": k, "dv": v}
    if npz:
        np.savez(target, **found)
    else:
        import_module("safetensors.numpy").save_file(found, target)

if sys.argv[2:]:
    answer(*sys.argv[2:])
else:
    for line in sys.stdin:
        answer(*line.rstrip().split("\\t"))
        print("ok", flush=True)
"""


@pytest.mark.parametrize(("form", "keep"), [("npz", False), ("npz", True), ("safetensors", True)])
def test_a_program_writes_gradients(form, keep, tmp_path):
    if form == "safetensors":
        pytest.importorskip("safetensors")
    right, wrong = tmp_path / "right.py", tmp_path / "wrong.py"
    right.write_text(PROGRAM, encoding="utf-8")
    wrong.write_text(PROGRAM.replace('"dk": k', '"dk": 2 * k'), encoding="utf-8")
    for path, verdict in ((right, "PASS"), (wrong, "FAIL")):
        command = [sys.executable, str(path), form]
        with contextlib.closing(Subprocess(command, format=form, keep=keep)) as fn:
            adapter = Adapter(fn, "softmax", ["vjp"], {"same_value_size": True})
            report = check(adapter, checks=["gradients"], rng=0)
        assert report.verdict == verdict, report


def test_a_program_without_gradients(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM.replace('"d_out" in given', "False"), encoding="utf-8")
    with contextlib.closing(Subprocess([sys.executable, str(path), "npz"], format="npz")) as fn:
        report = check(Adapter(fn, "softmax", ["vjp"]), checks=["gradients"], rng=0)
    assert report.results[0].got == "RuntimeError: the program wrote ['out'] and not `dq`"


def test_the_part_that_is_wrong_is_shown():
    """Of no cotangent too, where the last comparison before was of another part."""

    def attention(*arrays, d_out=None):
        found = with_pullback(refattn.softmax_attention)(*arrays, d_out=d_out)
        if d_out is None or np.any(d_out):
            return found
        out, dq, dk, dv = found
        return out, dq, dk + 1, dv

    adapter = Adapter(attention, "softmax", ("vjp",), {"same_value_size": True})
    report = check(adapter, checks=["gradients"], rng=0)
    assert "got = got[2]" in report.results[0].reproducer


def test_what_is_made_of_several_calls_is_like_no_mistake():
    """Neither a slope nor a multiple is what a catalogued mistake gives."""
    entry = next(m for m in BACK if m.name == "softmax-backward-cotangents-are-ones")
    adapter = Adapter(entry.fn, entry.estimator, entry.capabilities)
    report = check(adapter, checks=["gradients", SLOPES, LINEAR], rng=0)
    likeness = {r.check: len(r.likeness) for r in report.results}
    assert likeness == {"gradients": 1, LINEAR: 0, SLOPES: 0}


def test_results_that_are_none():
    def no_tuple(q, k, v, *, d_out=None):
        return refattn.softmax_attention(q, k, v)

    def transposed(q, k, v, *, d_out=None):
        out, pullback = vjp(refattn.softmax_attention, q, k, v)
        found = pullback(out if d_out is None else d_out)
        return out if d_out is None else (out, found.q, np.swapaxes(found.k, -1, -2), found.v)

    def three(*arrays, d_out=None):
        found = with_pullback(refattn.softmax_attention)(*arrays, d_out=d_out)
        return found if d_out is None else found[1:]

    for fn, words, came in (
        (no_tuple, "(out, dq, dk, dv)", "a ndarray"),
        (three, "(out, dq, dk, dv)", "a tuple of 3"),
        (transposed, "shape (6, 4)", "shape (4, 6)"),
    ):
        report = gradients(fn, "softmax")
        assert report.verdict == "FAIL"
        assert words in report.results[0].expected
        assert report.results[0].got == came


@pytest.mark.parametrize("wrong", [False, True])
def test_torch_differentiates_what_it_is_given(wrong):
    torch = pytest.importorskip("torch")

    class Attention(torch.autograd.Function):  # type: ignore[misc, name-defined]
        """Exact attention whose way back forgets the normaliser."""

        @staticmethod
        def forward(ctx, q, k, v):
            p = torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1)
            ctx.save_for_backward(q, k, v, p)
            return p @ v

        @staticmethod
        def backward(ctx, *d_out):
            (q, k, v, p), (g,), c = ctx.saved_tensors, d_out, ctx.saved_tensors[0].shape[-1] ** -0.5
            t = g @ v.mT
            s = p * (t if wrong else t - (p * t).sum(-1, keepdim=True))
            return c * s @ k, c * s.mT @ q, p.mT @ g

    for dtype in ("float32", "float64"):
        report = gradients(Attention.apply, "softmax", library="torch", dtype=dtype)
        assert report.verdict == ("FAIL" if wrong else "PASS"), report


@pytest.mark.long
def test_jax_differentiates_what_it_is_given():
    jax = pytest.importorskip("jax")
    jax.config.update("jax_enable_x64", True)

    def attention(q, k, v):
        weights = jax.nn.softmax(q @ jax.numpy.swapaxes(k, -1, -2) * q.shape[-1] ** -0.5, -1)
        return weights @ v

    def blocked(q, k, v):
        return attention(q, jax.lax.stop_gradient(k), v)

    assert gradients(attention, "softmax", library="jax").verdict == "PASS"
    assert gradients(blocked, "softmax", library="jax").verdict == "FAIL"
