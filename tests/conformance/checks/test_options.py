"""Checks of windows, soft caps, sinks, biases and dropout: right ones pass, and mistakes show."""

import sys

import numpy as np
import pytest

import refattn
from refattn import attend, softmax_attention, vjp
from refattn.conformance import Adapter, Subprocess, check, checks_of
from refattn.conformance.candidate.adapter import CHOICES
from refattn.conformance.defects import VARIANTS

OPTIONS = ("window", "softcap", "sinks", "bias")
OF_OPTIONS = ("vjp", "d_bias", "d_sinks")
SEES = ("mask", "causal", "gqa")
CHECKS = (
    *("windows", "outside_of_windows", "soft_caps", "weights_of_sinks", "biases", "uses_together"),
    *("factors_of_dropout", "gradients_of_dropout", "gradients_together", "log_normalisers"),
)


def asked(fn, *capabilities, **tags):
    """The checks of options alone."""
    adapter = Adapter(fn, "softmax", capabilities, tags)
    return check(adapter, checks=[x.name for x in checks_of(adapter) if x.name in CHECKS], rng=0)


def moved(given, n, m, tag):
    """A window as a mask, where the tag says that it lies."""
    if "window" not in given:
        return given
    left, right = given.pop("window")
    ahead = np.arange(m) - np.arange(n)[:, None] - (0 if "top-left" in tag else m - n)
    seen = np.ones((n, m), dtype=bool)
    if left is not None:
        seen &= ahead >= (1 if "exclusive" in tag else 0) - left
    if right is not None:
        seen &= ahead <= right
    return given | {"mask": seen & given.get("mask", True)}


def attention(tag="", corner="bottom-right", behind=None, of_lse=None, layout=None):
    """The package's function of other conventions; `behind` changes the options of the way back."""

    def call(q, k, v, *, d_out=None, return_lse=False, **given):
        if layout is not None:
            q, k, v = (np.transpose(x, layout) for x in (q, k, v))
        n, m = q.shape[-2], k.shape[-2]
        given = moved(given, n, m, tag) if tag else given
        if given.get("causal") and corner == "top-left":
            del given["causal"]
            given["mask"] = np.tri(n, m, dtype=bool) & given.get("mask", True)
        given["scale"] = q.shape[-1] ** -0.5
        (out, lse), pullback = vjp(attend, q, k, v, **given)
        if d_out is not None:
            if behind is not None:
                pullback = vjp(attend, q, k, v, **behind(dict(given)))[1]
            found = pullback((d_out, None))
            return (out, *(x for x in found if x is not None))
        if layout is not None:
            out = np.transpose(out, np.argsort(layout))
        lse = lse if of_lse is None else of_lse(lse, given)
        return (out, lse) if return_lse else out

    return call


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_right_ones_pass(dtype):
    report = asked(attention(), *SEES, *OPTIONS, *OF_OPTIONS, "lse", dtype=dtype)
    assert {r.check for r in report.results} == {*CHECKS} - {
        "factors_of_dropout",
        "gradients_of_dropout",
    }
    assert report.verdict == "PASS", report


@pytest.mark.parametrize(
    "tags",
    [
        {"layout": "bhnd"},
        {"layout": "bnd"},
        {"layout": "nd"},
        {"layout": "hnd", "empty_rows": "undefined"},
        {"head_sizes": (8,), "same_value_size": True},
        {"multiple_of": 8},
        {"multiple_of": 8, "self_attention": True},
        {"causal_only": True},
        {"max_logit": 20.0},
    ],
    ids=str,
)
def test_right_ones_pass_within_limits(tags):
    seen = SEES if "h" in tags.get("layout", "h") else SEES[:2]
    report = asked(attention(), *seen, *OPTIONS, *OF_OPTIONS, **tags)
    assert report.verdict == "PASS", report


def test_heads_after_tokens():
    fn = attention(layout=(0, 2, 1, 3))
    assert asked(fn, *SEES, *OPTIONS, layout="bnhd").verdict == "PASS"


def of_empty_rows(value):
    def call(q, k, v, **given):
        out = softmax_attention(q, k, v, **given)
        if "sinks" in given:
            return out
        named = {name: x for name, x in given.items() if name in ("mask", "causal", "window")}
        lse = attend(q, k, v, **named).lse
        other = softmax_attention(0 * q, k, v) if value is None else value
        return np.where(np.isneginf(lse)[..., None], other, out)

    return call


@pytest.mark.parametrize(("declared", "value"), [("nan", np.nan), ("mean", None)])
def test_queries_without_keys_of_other_conventions(declared, value):
    report = asked(of_empty_rows(value), *SEES, *OPTIONS, empty_rows=declared)
    assert report.verdict == "PASS", report
    assert asked(of_empty_rows(value), *SEES, *OPTIONS).verdict == "FAIL"


WINDOWS = CHOICES["window"]


@pytest.mark.parametrize("tag", WINDOWS)
@pytest.mark.parametrize("corner", ["bottom-right", "top-left"])
def test_windows_of_each_convention(tag, corner):
    """Each passes as what it is declared to be, and is told what it is in place of another."""
    fn = attention(tag, corner)
    assert asked(fn, *SEES, "window", window=tag, causal=corner).verdict == "PASS"
    for other in WINDOWS:
        if other != tag:
            report = asked(fn, *SEES, "window", window=other, causal=corner)
            assert report.verdict == "FAIL"
            (words,) = report.diagnosis
            assert words.endswith(f"but for window: {tag}")


BEHIND = {
    "window": lambda given: {k: x for k, x in given.items() if k != "window"},
    "softcap": lambda given: {k: x for k, x in given.items() if k != "softcap"},
    "sinks": lambda given: {k: x for k, x in given.items() if k != "sinks"},
    "bias": lambda given: {k: x for k, x in given.items() if k != "bias"},
    "half a cap": lambda given: given | {"softcap": 2 * given.get("softcap", np.inf)},
}


@pytest.mark.parametrize("name", BEHIND)
def test_options_forgotten_on_the_way_back(name):
    report = asked(attention(behind=lambda x: right(BEHIND[name](x))), *SEES, *OPTIONS, *OF_OPTIONS)
    assert [r.check for r in report.results if r.status == "FAIL"] == ["gradients_together"]


@pytest.mark.parametrize("of", ["bias", "sinks"])
@pytest.mark.parametrize("change", [lambda x: -x, lambda x: 1.01 * x, np.zeros_like])
def test_gradients_of_biases_and_sinks(of, change):
    """Wrong in sign, by a hundredth, or not there."""

    def call(q, k, v, *, d_out=None, **given):
        out, pullback = vjp(softmax_attention, q, k, v, **given)
        if d_out is None:
            return out
        found = pullback(d_out)._asdict()
        found |= {of: None if found[of] is None else change(found[of])}
        names = (*"qkv", *(name for name in ("bias", "sinks") if name in given))
        return (out, *(found[name] for name in names))

    report = asked(call, *OPTIONS, *OF_OPTIONS)
    (wrong,) = (r for r in report.results if r.status == "FAIL")
    assert wrong.check == "gradients_together"
    assert f"d_{of}" in wrong.expected


def right(given):
    return {k: x for k, x in given.items() if not (k == "softcap" and x == np.inf)}


def test_normalisers_with_options():
    def uncapped(lse, given):
        return lse + 0.1 * ("softcap" in given)

    report = asked(attention(of_lse=uncapped), *SEES, *OPTIONS, "lse")
    failed = {r.check for r in report.results if r.status == "FAIL"}
    assert failed == {"log_normalisers", "uses_together"}


@pytest.mark.parametrize(("declared", "value"), [("nan", np.nan), ("mean", None)])
def test_lse_and_dropout_of_other_conventions(declared, value):
    """What a query without keys gets is not compared where they are asked."""

    def call(
        q, k, v, *, return_lse = False, dropout = 0.0, seed = 0,
        **given,
    ):  # fmt: skip
        out, lse = attend(q, k, v, scale=q.shape[-1] ** -0.5, **given)
        if dropout:
            kept = np.random.default_rng(seed).random((*q.shape[:-1], k.shape[-2])) >= dropout
            out = softmax_attention(q, k, v, dropout=kept / (1 - dropout), **given)
        other = softmax_attention(0 * q, k, v) if value is None else value
        out = np.where(np.isneginf(lse)[..., None], other, out)
        return (out, np.where(np.isneginf(lse), -1e38, lse)) if return_lse else out

    report = asked(call, *SEES, "window", "lse", "dropout", empty_rows=declared)
    assert report.verdict == "PASS", report


PROGRAM = """
import sys
import numpy as np
from refattn import attend
for line in sys.stdin:
    source, target = line.rstrip("\\n").split("\\t")
    given = dict(np.load(source))
    q, k, v = (given.pop(name) for name in "qkv")
    lse = given.pop("return_lse", False)
    if "window" in given:
        given["window"] = tuple(None if x < 0 else int(x) for x in given["window"])
    if "mask" in given:
        given["mask"] = given["mask"].astype(bool)
    if "causal" in given:
        given["causal"] = bool(given["causal"])
    if "softcap" in given:
        given["softcap"] = float(given["softcap"])
    found = attend(q, k, v, scale=q.shape[-1] ** -0.5, **given)
    np.savez(target, out=found.out, **({"lse": found.lse} if lse else {}))
    print("ok", flush=True)
"""


def test_programs(tmp_path):
    """A side of a window that has no limit is -1 in the file."""
    script = tmp_path / "attention.py"
    script.write_text(PROGRAM)
    fn = Subprocess([sys.executable, str(script)], format="npz", keep=True)
    try:
        report = asked(fn, *SEES, *OPTIONS, "lse")
    finally:
        fn.close()
    assert report.verdict == "PASS", report


def test_a_mask_may_be_refused_with_a_bias():
    """As by a library that takes one or the other; that nothing was asked is said."""

    def either(q, k, v, **given):
        if {"mask", "bias"} <= set(given):
            raise ValueError("only one of bias and mask")
        return softmax_attention(q, k, v, **given)

    report = asked(either, *SEES, *OPTIONS)
    assert report.verdict == "PASS", report
    assert "bias and mask together, which it refuses" in report.not_tried["uses_together"]

    def neither(q, k, v, **given):
        if {"softcap", "bias"} <= set(given):
            raise ValueError("only one of bias and softcap")
        return softmax_attention(q, k, v, **given)

    assert asked(neither, *SEES, *OPTIONS).verdict == "FAIL"


def test_limits_of_windows():
    """Conventions that are declared are in the report, and what is not asked is said."""
    report = asked(attention(), *SEES, *OPTIONS, multiple_of=8)
    assert report.limits
    adapter = Adapter(len, "softmax", ["window"], {"window": WINDOWS[3]})
    assert adapter.declared == {"window": "exclusive, top-left"}
    with pytest.raises(ValueError, match="`tags\\['window'\\]` must be one of"):
        Adapter(len, "softmax", ["window"], {"window": "exclusive"})
    with pytest.raises(ValueError, match="`capabilities` must be one of"):
        Adapter(len, "rfa", ["softcap"])


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_torch_differentiates_biases_and_sinks(dtype):
    torch = pytest.importorskip("torch")

    def eager(q, k, v, *, mask=True, **given):
        keys, values = (torch.repeat_interleave(x, q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = q @ keys.mT * q.shape[-1] ** -0.5
        if "softcap" in given:
            scores = given["softcap"] * torch.tanh(scores / given["softcap"])
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool) & torch.as_tensor(mask)
        scores = torch.where(seen, scores + given.get("bias", 0.0), -torch.inf)
        if "sinks" in given:
            sinks = given["sinks"].reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, sinks], -1)
        top = torch.clamp(scores.amax(-1, keepdim=True).detach(), min=-1e30)
        weights = torch.exp(scores - top)
        total = weights.sum(-1, keepdim=True)
        weights = weights / torch.where(total == 0, 1.0, total)
        return weights[..., : k.shape[2]] @ values

    tags = {"library": "torch", "dtype": dtype, "layout": "bhnd", "hidden": "finite"}
    able = ("mask", "gqa", "bias", "sinks", "softcap", *OF_OPTIONS)
    report = asked(eager, *able, **tags)
    assert report.verdict == "PASS", report


def torch_dropout():
    """Attention by torch, which has dropout."""
    torch = pytest.importorskip("torch")
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def call(
        q, k, v, *, mask = None, causal = False,
        dropout = 0.0, seed = 0,
    ):  # fmt: skip
        torch.manual_seed(seed)
        return sdpa(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal)

    return call


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dropout_of_torch(dtype):
    tags = {"library": "torch", "dtype": dtype, "causal": "top-left", "hidden": "finite"}
    adapter = Adapter(torch_dropout(), "softmax", ["causal", "dropout", "vjp"], tags)
    names = ["factors_of_dropout", "law_of_dropout", "gradients_of_dropout"]
    report = check(adapter, checks=names, rng=0)
    assert report.verdict == "PASS", report


@pytest.mark.long
def test_level_of_the_law_of_dropout():
    """20 correct ones at 5 %: as many fail as may, by the binomial law at 1e-6."""
    (fn,) = (m.fn for m in VARIANTS if m.name == "softmax-with-dropout")
    failed = sum(
        check(
            Adapter(fn, "softmax", ["dropout"]),
            checks=["law_of_dropout"],
            alpha=0.05,
            rng=seed,
            time_limit=4.0,
        ).verdict
        == "FAIL"
        for seed in range(20)
    )
    assert refattn.stats.binomial(failed, 20, 0.05) > 1e-6 or failed < 2


def period(u, axis, length):
    """Random numbers that come again after some."""
    return np.take(u, np.arange(u.shape[axis]) % length, axis)


PERIODS = {
    "64 keys": lambda u: period(u, -1, 64),
    "16 keys": lambda u: period(u, -1, 16),
    "8 queries": lambda u: period(u, -2, 8),
    "heads of a group": lambda u: u[..., np.arange(u.shape[-3]) // 2 * 2, :, :],
}


@pytest.mark.parametrize("name", PERIODS)
def test_dropout_that_comes_again(name):
    def call(q, k, v, *, dropout=0.0, seed=0, **given):
        shape = (*q.shape[:-1], k.shape[-2])
        u = np.random.default_rng(seed).random(shape)
        u = PERIODS[name](u) if u.ndim > 2 else u
        return softmax_attention(q, k, v, dropout=(u >= dropout) / (1 - dropout), **given)

    adapter = Adapter(call, "softmax", ["gqa", "dropout"])
    assert check(adapter, checks=["law_of_dropout"], rng=0).verdict == "FAIL"


def dropping(wrong):
    """Attention with dropout, whose way back has other factors."""

    def call(
        q, k, v, *, dropout = 0.0, seed = 0, d_out = None,
        **given,
    ):  # fmt: skip
        shape = (*q.shape[:-1], k.shape[-2])
        factors = (np.random.default_rng(seed).random(shape) >= dropout) / (1 - dropout)
        out, _ = vjp(softmax_attention, q, k, v, dropout=factors, **given)
        if d_out is None:
            return out
        behind = wrong(factors, q, k, given)
        pullback = vjp(softmax_attention, q, k, v, dropout=behind, **given)[1]
        return (out, *pullback(d_out)[:3])

    return call


@pytest.mark.parametrize(
    "wrong",
    [
        lambda f, q, k, given: np.roll(f, 1, -1) if given.get("causal") else f,
        lambda f, q, k, given: np.roll(f, 1, -2) if "mask" in given else f,
        lambda f, q, k, given: (
            f if k.shape[:-2] == q.shape[:-2] else np.broadcast_to(f[..., :1, :, :], f.shape)
        ),
    ],
    ids=["causal", "mask", "groups"],
)
def test_gradients_of_dropout_in_each_use(wrong):
    adapter = Adapter(dropping(wrong), "softmax", [*SEES, "dropout", "vjp"])
    report = check(adapter, checks=["gradients_of_dropout"], rng=0)
    assert report.verdict == "FAIL"
    right = Adapter(dropping(lambda f, *_: f), "softmax", [*SEES, "dropout", "vjp"])
    assert check(right, checks=["gradients_of_dropout"], rng=0).verdict == "PASS"


@pytest.mark.parametrize("layout", ["nd", "bnd", "hnd", None])
def test_dropout_of_any_layout(layout):
    adapter = Adapter(dropping(lambda f, *_: f), "softmax", ["dropout", "vjp"], {"layout": layout})
    names = ["factors_of_dropout", "law_of_dropout", "gradients_of_dropout"]
    report = check(adapter, checks=names, rng=0)
    assert report.verdict == "PASS", report


LSE = {
    "one query": lambda lse, q, k, given: lse + 1.0 * (q.shape[-2] == 1),
    "with causal": lambda lse, q, k, given: lse + 1.0 * bool(given.get("causal")),
    "groups and a mask": lambda lse, q, k, given: (
        lse + 1.0 * ("mask" in given and q.shape[:-2] != k.shape[:-2])
    ),
    "a window and a cap": lambda lse, q, k, given: (
        lse + 1.0 * ({"window", "softcap"} <= set(given))
    ),
    "no key": lambda lse, q, k, given: np.where(np.isneginf(lse), 0.0, lse),
}


@pytest.mark.parametrize("name", LSE)
def test_normalisers_together(name):
    def call(q, k, v, *, return_lse=False, **given):
        out, lse = attend(q, k, v, scale=q.shape[-1] ** -0.5, **given)
        return (out, LSE[name](lse, q, k, given)) if return_lse else out

    adapter = Adapter(call, "softmax", [*SEES, *OPTIONS, "lse"])
    names = ["log_normalisers", "normaliser_without_keys", "uses_together"]
    assert check(adapter, checks=names, rng=0).verdict == "FAIL"


def test_a_cotangent_of_lse_together():
    """Ignored where causal, or that of the first head."""

    def call(kind):
        def attention(
            q, k, v, *, return_lse = False, d_out = None,
            d_lse = None, **given,
        ):  # fmt: skip
            given["scale"] = q.shape[-1] ** -0.5
            (out, lse), pullback = vjp(attend, q, k, v, **given)
            if d_out is None:
                return (out, lse) if return_lse else out
            if d_lse is not None and kind == "causal" and given.get("causal"):
                d_lse = 0 * d_lse
            if d_lse is not None and kind == "heads" and d_lse.ndim > 1:
                d_lse = np.broadcast_to(d_lse[..., :1, :], d_lse.shape)
            return (out, *(x for x in pullback((d_out, d_lse)) if x is not None))

        return attention

    able = [*SEES, *OPTIONS, *OF_OPTIONS, "lse", "d_lse"]
    names = ["gradients_of_normalisers", "gradients_together"]
    for kind, verdict in (("", "PASS"), ("causal", "FAIL"), ("heads", "FAIL")):
        assert check(Adapter(call(kind), "softmax", able), checks=names, rng=0).verdict == verdict


def test_small_logits_of_large_keys():
    """Gradients of queries are as large as keys, however small the queries are."""
    adapter = Adapter(attention(), "softmax", ["vjp"], {"max_logit": 2.0})
    for seed in range(4):
        assert check(adapter, checks=["gradients_of_large_logits"], rng=seed).verdict == "PASS"
