"""The correct variants agree with the package, and every mutant differs from them."""

import json
from importlib import resources

import numpy as np
import pytest

from refattn import kernels, vjp
from refattn.judge.conformance import CAPABILITIES
from refattn.judge.mistakes.defects import MUTANTS, VARIANTS
from refattn.judge.mistakes.defects.catalogue import read
from refattn.registry import ESTIMATORS
from tests.judge.conformance.candidates import BY_NAME
from tests.judge.mistakes.defects.probes import COUNT, SIZES, gates, probes, same, tokens, ways
from validation import kills

ROWS = resources.files("refattn.judge.mistakes.defects") / "rows"
BASE = {m.name: m for m in VARIANTS if m.name == m.estimator}

each = pytest.mark.parametrize("entry", [*VARIANTS, *MUTANTS], ids=lambda m: m.name)


def test_names_and_numbers_of_entries():
    names = [m.name for m in (*VARIANTS, *MUTANTS)]
    assert len(set(names)) == len(names)
    least = {"softmax": 10, "kernel": 12, "rfa": 20, "ra": 8, "lara": 6, "linear": 6, "moments": 6}
    for estimator, count in least.items():
        assert sum(m.estimator == estimator for m in MUTANTS) >= count
        assert estimator in BASE
    for m in (*VARIANTS, *MUTANTS):
        assert f"{m.name}-".startswith(f"{m.estimator}-")
        assert set(m.capabilities) <= set(CAPABILITIES)
        assert m.effect.endswith(".")


def test_kills_have_a_line_each():
    """The file is as `validation/kills.py` writes it, and a change to a defect changes a line."""
    text = kills.FILE.read_text("utf-8")
    assert text == kills.written(json.loads(text))
    for m in MUTANTS:
        assert text.count(f'\n  "{m.name}": [') == 1


@pytest.mark.sweep(12)
@pytest.mark.long("float32")
@each
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_contract(entry, dtype):
    """Every entry takes the arguments it claims, and returns their shape and dtype."""
    if entry.estimator == "moments":
        mean, covariance = entry.fn(tokens(2, 5, 3, dtype=dtype))
        assert mean.dtype == covariance.dtype == dtype
        if entry.name != "moments-transposed":
            assert mean.shape == (2, 3)
            assert covariance.shape == (2, 3, 3)
        return
    if entry.estimator == "kernel":
        x, y = tokens(5, 1, 3, dtype=dtype), tokens(4, 3, dtype=dtype)
        for size in (1, 5):
            out = entry.fn(x, y, num_features=size, seed=3)
            assert out.shape == (5, 4)
            assert out.dtype == dtype
        assert entry.fn(x[0, 0], y[0], num_features=2, seed=0).shape == ()
        return
    for lead in ((), (4,), (2, 4)):
        q, k = tokens(*lead, 9, 6, dtype=dtype), tokens(*lead, 9, 6, dtype=dtype)
        v = tokens(*lead, 9, 5, dtype=dtype)
        if lead and "gqa" in entry.capabilities:
            k, v = k[..., :2, :, :], v[..., :2, :, :]
        more = {"mask": np.arange(9) < 7, "causal": True}
        more = {name: x for name, x in more.items() if name in entry.capabilities}
        for options in ways(entry, lead):
            out = entry.fn(q, k, v, **options, **more, **gates(entry.estimator, k))
            out = out[0] if isinstance(out, tuple) else out
            assert out.shape == (*lead, 9, 5)
            assert out.dtype == dtype


def pulled(fn, *args, d_out=None, **options):
    """The package's result, with gradients where there is a cotangent."""
    if d_out is None:
        return fn(*args, **options)
    out, pullback = vjp(fn, *args, **options)
    return (out, *pullback(d_out)[:3])


@pytest.mark.sweep(6)
@pytest.mark.parametrize("entry", VARIANTS, ids=lambda m: m.name)
def test_variants_agree_with_the_package(entry):
    features = {name: x for name, x in entry.tags.items() if name == "features"}
    for args, options in probes(entry.estimator, entry.capabilities):
        if (features or "d_out" in options) and max(np.abs(x).max() for x in args[:2]) > 10:
            continue  # cosines, and differences from a mean of one value, lose all digits
        if entry.estimator == "moments":
            (x,) = args
            want = (x.mean(-2), np.vectorize(np.cov, signature="(d,n)->(d,d)")(x.mT))
        elif entry.estimator == "kernel":
            if "seed" in options:
                continue
            x, y = (np.atleast_2d(z)[:, None] for z in args)
            want = kernels.estimate(x, y, **features, **options).reshape(args[0].shape[:-1])
        elif "seed" in options:
            if entry.estimator != "lara":
                continue  # the package draws in another order
            given = {key: x for key, x in options.items() if key != "seed"}
            want = ESTIMATORS["lara"].fn(*args, rng=options["seed"], **given)
        else:
            with np.errstate(invalid="ignore"):  # linear attention whose features all vanish
                want = pulled(ESTIMATORS[entry.estimator].fn, *args, **features, **options)
        assert same(entry.fn(*args, **options), want, 1e-9)  # exponents go up to 1e5


# Seen in large arrays, in other layouts or in the next call: checks of sizes and uses reject these.
LATE = (
    *("last-chunk-lost", "decay-clipped", "late-keys-dropped", "late-tokens", "state-reset"),
    *("block-edge", "size-64", "size-128"),
    *("first-256", "-1024", "-4096", "-16384", "precision-sums", "lie", "lies", "out"),
    *("one-query-unmasked", "first-of-batch", "last-block-of-queries-lost", "blocks-overwrite"),
    *("last-block-of-keys-lost", "diagonal-twice"),
    *("given-exponentials", "given-clamped", "given-counts-cut"),  # of probabilities
    *("given-norm-cut", "batch-of-ten", "long-groups-in-turn"),
    *("features-repeated", "late-features-shrunk", "from-minus-5e4", "from-minus-5e4-with-0"),
    "maximum-from-0",
)
KINDS = {"dropout": "with-dropout", "window": "options", "vjp": "backward", "indices_only": "given"}
# What is compared otherwise (see test_effects.py), or right where one thing is asked.
ELSEWHERE = {"feature_map", "moments"}


TOGETHER = {m.name for m in read((ROWS / "combined.diff").read_text("utf-8"))}


def differs_at_once(m):
    late = m.name.endswith(("precision-choice", *LATE))
    return not (late or m.name in TOGETHER or ELSEWHERE & set(m.capabilities))


@pytest.mark.sweep(4)
@pytest.mark.parametrize("entry", [m for m in MUTANTS if differs_at_once(m)], ids=lambda m: m.name)
def test_mutants_differ(entry):
    """By more than rounding from the correct variant on the same arguments, seeds included."""
    kind = next((x for able, x in KINDS.items() if able in entry.capabilities), None)
    base = BASE[entry.estimator] if kind is None else BY_NAME[f"{entry.estimator}-{kind}"]
    assert any(
        not same(entry.fn(*args, **options), base.fn(*args, **options), 1e-9)
        for args, options in probes(entry.estimator, entry.capabilities)
    )


DRAWN = [m for m in MUTANTS if m.estimator in ("kernel", "rfa-local", *COUNT)]
STILL = ("seed-constant", "noise-dropped", "exact", "rademacher", "causal-bucket-excluded")
STILL = (*STILL, "far-unseen")


@pytest.mark.sweep(6)
@pytest.mark.parametrize("entry", DRAWN, ids=lambda m: m.name)
def test_the_same_seed_gives_the_same(entry):
    """And another seed something else, but for the mutants of seeds."""
    count = {SIZES.get(entry.estimator, "num_features"): 3}
    args = [tokens(30, 4, seed=s) for s in range(2 if entry.estimator == "kernel" else 3)]
    outs = [entry.fn(*args, **count, seed=seed) for seed in (1, 1, 2, 17)]
    short = entry.name.removeprefix(f"{entry.estimator}-")
    assert np.array_equal(outs[0], outs[1]) == (short not in ("seed-ignored", "dropout"))
    if short not in STILL and entry.name not in ("lara-noise-dropped", "ra-greedy"):
        assert not np.array_equal(outs[0], outs[2])
        assert np.array_equal(outs[0], outs[3]) == (short == "seed-mod-16")
