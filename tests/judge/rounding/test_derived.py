"""Laws derived from texts: they agree with the laws that have formulas, and hold for kernels."""

import itertools
from functools import partial

import numpy as np
import pytest

from refattn import naive
from refattn.features import elu_features
from refattn.judge import rounding
from refattn.judge.rounding.derived import rows, texts
from refattn.judge.rounding.derived.law import derive, write_rows
from refattn.judge.rounding.formats import FORMATS
from refattn.judge.rounding.profiles import profile_of
from refattn.judge.verification.door import verify
from tests.cases import CASES, prepared


def softmax(q, k, v, *, i, seen, normalised):
    xp, scores = q.__array_namespace__(), q.shape[-1] ** -0.5 * (q[:, i : i + 1] @ k.mT)
    e = xp.where(seen, xp.exp(scores - float(np.max(scores.x[0][0][seen]))), 0.0)
    mass = xp.sum(e, axis=-1, keepdims=True)
    return e / mass @ v if normalised else e @ v / mass


def linear(q, k, v, *, i, seen, normalised):
    xp = q.__array_namespace__()
    phi, psi = (
        xp.where(x > 0, x + 1.0, xp.exp(xp.where(x > 0, 0.0, x))) for x in (q[:, i : i + 1], k)
    )
    psi = xp.where(seen[:, None], psi, 0.0)
    return phi @ (psi.mT @ v) / (phi @ xp.sum(psi, axis=-2, keepdims=True).mT)


def features(q, k, v, omega, *, i, seen, normalised):
    xp, root = q.__array_namespace__(), q.shape[-1] ** -0.25
    q, k = root * q[:, i : i + 1], root * k
    phi, psi = q @ omega.mT, k @ omega.mT - xp.sum(k * k, axis=-1, keepdims=True) / 2
    top = np.max(psi.x[0][seen])
    phi = xp.exp(phi - float(np.max(phi.x[0])))
    psi = xp.where(seen[:, None], xp.exp(psi - float(top)), 0.0)
    return phi @ (psi.mT @ v) / (phi @ xp.sum(psi, axis=-2, keepdims=True).mT)


def compare(text, dtype, profile, causal=False, size=1.0, mean=0.0):
    """Divide the derived standard deviations by those of the formula."""
    rng, to = np.random.default_rng(0), FORMATS[dtype].round
    (n, m, d, d_v), rounded = (8, 96, 16, 8), profile_of(profile).roundings(dtype)
    q, k, v = to(size * rng.standard_normal((n, d))), *to(rng.standard_normal((2, m, d)))
    arrays = {"q": q, "k": k, "v": to(v[:, :d_v] + mean)}
    options = {"feature_map": elu_features} if text is linear else {}
    if text is features:
        arrays["omega"] = options["omega"] = to(rng.standard_normal((16, d)))
    known = rounding.predict(
        *(arrays[x] for x in "qkv"), dtype=dtype, profile=profile, causal=causal, **options
    )
    laws = []
    for i in range(n):
        seen = np.arange(m) <= i + m - n if causal else np.ones(m, bool)
        write = partial(text, i=i, seen=seen, normalised=rounded.normalised)
        laws.append(derive(write, arrays, rounded, tied=False))
    found, _ = write_rows(laws, rounded)
    np.testing.assert_allclose(found.out, known.out, atol=1e-12)
    return np.median(found.std / known.std)


@pytest.mark.parametrize("more", [{}, {"causal": True, "size": 2.0, "mean": 2.0}])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("profile", ["math", "flash", "upcast"])
def test_softmax_has_the_law_of_its_formula(dtype, profile, more):
    assert compare(softmax, dtype, profile, **more) == pytest.approx(1, abs=5e-4)


@pytest.mark.parametrize("mean", [0.0, 2.0])
@pytest.mark.parametrize("text", [softmax, linear, features])
def test_float32_has_the_law_of_its_formula(text, mean):
    """Formulas know running sums of scores in part, and leave out what is small."""
    assert compare(text, "float32", "serial", mean=mean) == pytest.approx(1, abs=0.07)


@pytest.mark.parametrize("mean", [0.0, 2.0])
def test_one_key_after_the_other_fits_linear_attention_in_float32(mean):
    """Running sums of the normaliser are as large as those of values of one sign."""
    single, z = np.float32, []

    def add(a, b):
        out = np.zeros((len(a), b.shape[1]), single)
        for j in range(len(b)):
            out = out + a[:, j : j + 1] * b[j]
        return out

    for seed in range(12):
        rng = np.random.default_rng(seed)
        q, k, v = (rng.standard_normal(x).astype(single) for x in ((12, 16), (256, 16), (256, 8)))
        v, phi, psi = v + single(mean), *(elu_features(x) for x in (q, k))
        sums = add(phi, add(psi.T, v)), add(phi, add(psi.T, np.ones((256, 1), single)))
        found = rounding.predict(
            q, k, v, dtype="float32", profile="serial", feature_map=elu_features
        )
        z.append((sums[0] / sums[1] - found.out) / found.std)
    assert 0.85 < np.sqrt(np.mean(np.square(z))) < 1.1


OF_TEXTS = [
    x
    for x, case in CASES.items()
    if "formula" not in case.lacks and getattr(naive, case.fn.__name__, None) in texts.TEXTS
]


@pytest.mark.sweep(6)
@pytest.mark.long("lara own", "lara own, centres", "lara query, centres", "eva published")
@pytest.mark.parametrize("name", OF_TEXTS)
def test_texts_say_what_formulas_say(name, monkeypatch):
    """In every order of their steps, causal or not, and with a key that is hidden."""
    roundings = profile_of("flash").roundings("bfloat16")
    for mask, causal in itertools.product(("none", "keys"), (False, True)):
        case, p, options = prepared(name, "none", 3, 6, mask, causal)
        formula = getattr(naive, case.fn.__name__)
        options = {x: y for x, y in options.items() if x != "sampled"}
        if "bias" in options:
            with pytest.raises(ValueError, match="`bias` must not be given for"):
                rows.pose_text(formula, *p.arrays, options, name=name, **p.options)
            continue
        want = formula(*p.arrays, **options, **p.options)
        text, orders = texts.TEXTS[formula]
        for order in orders:
            with monkeypatch.context() as patch:
                patch.setitem(texts.TEXTS, formula, (text, (order,)))
                posed = rows.pose_text(formula, *p.arrays, options, name=name, **p.options)
                found = posed.analyse((), roundings, slice(0, 3))
            np.testing.assert_allclose(found.out, want, rtol=0, atol=1e-13)


def test_every_formula_with_a_text_is_tried():
    assert {*texts.TEXTS} == {getattr(naive, CASES[x].fn.__name__) for x in OF_TEXTS}


@pytest.mark.parametrize(("size", "verdict"), [(2.0**-11, "PASS"), (2.0**-8, "FAIL")])
def test_the_only_weight_is_rounded_where_it_need_not_be_1(size, verdict):
    """Kernels of near keys and features divide weights by what the features say."""
    rng = np.random.default_rng(5)
    q, k = rng.standard_normal((2, 1, 8)).astype("f2")
    v, omega = rng.standard_normal((1, 64)).astype("f2"), rng.standard_normal((16, 8))
    out = (v / (1 + size)).astype("f2")
    problem = {"q": q, "k": k, "v": v, "omega": omega, "out": out, "window": (8, 8)}
    assert verify(**problem, estimator="rfa-local", profile="flash").verdict == verdict
