"""The conformance kit: correct implementations pass, wrong ones fail, none harms the kit."""

import contextlib
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import refattn
from refattn import conformance, kernels, moments, sampling
from refattn.conformance import Adapter, Failure, Report, Result, Subprocess, check
from refattn.conformance.checks import identities
from refattn.conformance.defects import MUTANTS, VARIANTS
from refattn.conformance.truth.reference import reference
from refattn.conformance.verdict import runner

KILLS = json.loads(
    (Path(conformance.__file__).parent / "verdict" / "kills.json").read_text("utf-8")
)
VISIBLE = ("mask", "causal", "gqa")


def kernel(x, y, *, num_features=None, seed=None, omega=None):
    if omega is None:
        omega = sampling.draw(num_features, x.shape[-1], rng=seed).omega
    return kernels.estimate(x, y, omega)


def rfa_of_moments(q, k, v, *, mean=None, cov=None, **options):
    proposal = None if mean is None else sampling.Gaussian(mean, cov)
    options["rng"] = options.pop("seed")
    return refattn.random_feature_attention(q, k, v, proposal=proposal, **options)


OWN = {
    "softmax": (refattn.softmax_attention, VISIBLE, {}),
    "linear": (refattn.linear_attention, VISIBLE, {}),
    "linear-relu": (
        partial(refattn.linear_attention, feature_map=refattn.features.relu_features),
        (),
        {"feature_map": "relu"},
    ),
    "moments": (moments.estimate, (), {}),
    "moments-0": (partial(moments.estimate, ddof=0), (), {"ddof": "0"}),
    "kernel": (kernel, ("omega",), {}),
    "rfa": (refattn.random_feature_attention, ("omega", "omega_per_head", *VISIBLE), {}),
    "rfa-scale": (
        partial(refattn.random_feature_attention, scale=0.4),
        ("omega", "causal"),
        {"scale": 0.4},
    ),
    "rfa-orthogonal": (
        partial(refattn.random_feature_attention, coupling="orthogonal"),
        (),
        {"coupling": "orthogonal"},
    ),
    "rfa-antithetic": (
        partial(refattn.random_feature_attention, coupling="antithetic"),
        (),
        {"coupling": "antithetic"},
    ),
    "rfa-hyperbolic": (
        partial(refattn.random_feature_attention, features="hyperbolic"),
        ("omega", "mask"),
        {"features": "hyperbolic"},
    ),
    "rfa-trigonometric": (
        partial(refattn.random_feature_attention, features="trigonometric"),
        ("omega", "mask"),
        {"features": "trigonometric"},
    ),
    "rfa-moments": (rfa_of_moments, ("moments",), {}),
    "ra": (refattn.randomized_attention, ("omega", *VISIBLE), {}),
    "lara": (refattn.linear_randomized_attention, ("omega", *VISIBLE), {"centres": "chunks"}),
    "lara-query": (
        partial(refattn.linear_randomized_attention, weighting="query"),
        ("omega", "mask"),
        {"weighting": "query", "centres": "chunks"},
    ),
}


@pytest.fixture
def few_seeds(monkeypatch):
    """The quick level with a quarter of its seeds: passing needs no power."""
    monkeypatch.setitem(runner.LEVELS, "quick", 500)


@pytest.fixture
def fewest_seeds(monkeypatch):
    """Fewer than any power needs: that is tried with functions of the package, above."""
    monkeypatch.setitem(runner.LEVELS, "quick", 100)


@pytest.mark.soak("scale", "antithetic")
@pytest.mark.long(
    "ra",
    "trigonometric",
    "hyperbolic",
    "orthogonal",
    "moments",
    "scale",
    "float32",
    "query",
    "antithetic",
    "lara",
)
@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        *(("float64", name) for name in OWN),
        *(("float32", name) for name in ("softmax", "linear", "moments", "kernel", "rfa", "lara")),
    ],
)
@pytest.mark.usefixtures("few_seeds")
def test_own_functions_pass(name, dtype):
    fn, capabilities, tags = OWN[name]
    report = check(
        fn,
        estimator=name.partition("-")[0],
        capabilities=capabilities,
        tags=tags | {"dtype": dtype},
        rng=len(name),
    )
    assert report.verdict == "PASS", str(report)
    assert all(r.error is not None or r.p is not None for r in report.results)
    for r in report.results:
        assert all(r.detectable[key] <= target for key, target in r.target.items())


NEAR_AND_FAR = {
    "eva": ("causal", "gqa"),
    "eva-sampled": ("causal", "gqa"),
    "second-order": ("causal", "gqa"),
    "rfa-local": ("omega", "omega_per_head", *VISIBLE),
}


@pytest.mark.soak("second", "sampled", "coreset")
@pytest.mark.long("local")
@pytest.mark.parametrize("name", [*NEAR_AND_FAR, "coreset", "sampled-norms"])
@pytest.mark.usefixtures("few_seeds")
def test_own_functions_of_near_keys_and_few_keys_pass(name):
    fn = refattn.registry.ESTIMATORS[name].fn
    report = check(fn, estimator=name, capabilities=NEAR_AND_FAR.get(name, ("gqa",)), rng=1)
    assert report.verdict == "PASS", str(report)


def ported(library, dtype, **tags):
    if library == "jax":
        pytest.importorskip("jax").config.update("jax_enable_x64", True)
    pytest.importorskip(library)
    return {"library": library, "dtype": dtype, **tags}


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_attention_of_torch(dtype):
    tags = ported("torch", dtype, layout="bhnd", causal="top-left", hidden="finite")
    import torch

    def fn(q, k, v, mask=None, causal=False):
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=True
        )

    report = check(fn, estimator="softmax", capabilities=VISIBLE, tags=tags, rng=0)
    assert report.verdict == "PASS", str(report)
    tags["causal"] = "bottom-right"
    report = check(fn, estimator="softmax", capabilities=VISIBLE, tags=tags, rng=0)
    failed = {r.check for r in report.results if r.status == "FAIL"}
    assert failed == {"causal_cross"}


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_attention_of_jax(dtype):
    tags = ported("jax", dtype, layout="bnhd", causal="top-left", hidden="finite")
    import jax

    def fn(q, k, v, mask=None, causal=False):
        return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=causal)

    some = ["contract", "value_length", "large_logits", "query_without_keys", "causal_cross"]
    report = check(fn, estimator="softmax", capabilities=VISIBLE, tags=tags, rng=0, checks=some)
    failed = {r.check for r in report.results if r.status != "PASS"}
    if dtype == "float64":  # scores are in float32 there
        assert "large_logits" in failed
    else:  # a query without keys gets the mean of the values there, and values have length d
        assert failed == {"query_without_keys", "value_length"}


@pytest.mark.long("jax")
@pytest.mark.parametrize("library", ["torch", "jax"])
def test_own_functions_on_other_libraries(library):
    tags = ported(library, "float64", layout="bnhd")

    def fn(q, k, v, **options):
        move = (lambda x: x.transpose(1, 2)) if library == "torch" else lambda x: x.swapaxes(1, 2)
        options["rng"] = options.pop("seed", None)
        return move(refattn.random_feature_attention(*map(move, (q, k, v)), **options))

    report = check(
        fn,
        estimator="rfa",
        capabilities=("omega", "mask", "causal"),
        tags=tags,
        checks=["contract", "order_of_keys", "reference_values", "mask"][
            : 4 if library == "torch" else 1
        ],
        rng=0,
        time_limit=600,  # JAX compiles, beside other work perhaps
    )
    assert report.verdict == "PASS", str(report)


@pytest.mark.soak(
    *("weights", "blocks", "upcast", "online", "simplex", "reversed", "gumbel", "orthogonal"),
    "trigonometric",
)
@pytest.mark.long(
    *("rfa", "recurrent", "ra", "orthogonal", "upcast", "online", "linear", "simplex", "lara"),
    *("options", "sink", "dropout", "second"),
)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda m: m.name)
@pytest.mark.usefixtures("fewest_seeds")
def test_correct_variants_pass(variant):
    report = check(
        variant.fn,
        estimator=variant.estimator,
        capabilities=variant.capabilities,
        tags=variant.tags,
        rng=1,
    )
    assert report.verdict != "FAIL", str(report)


def killers(mutant):
    return KILLS[mutant.estimator][mutant.name]


def adapted(mutant, **tags):
    capabilities = set(mutant.capabilities)
    if mutant.estimator == "rfa" and "omega" in capabilities:
        capabilities.add("omega_per_head")
    if mutant.estimator == "lara":
        tags["centres"] = "chunks"
    return Adapter(mutant.fn, mutant.estimator, capabilities, dict(mutant.tags) | tags, mutant.name)


def cheapest(names):
    """An identity, but not that of a few seeds, which may differ by chance; or a strong law."""
    weak = {"seeds": 2, "long_vectors": 1, "uses_together": 1, "large_logits": 1}
    if "frequency_pairs" in names:  # the other may take a minute
        weak["frequency_law"] = 1
    return min(
        names, key=lambda name: (conformance.CHECKS[name].layer != "identity", weak.get(name, 0))
    )


def test_every_defect_is_in_the_matrix_and_rejected():
    listed = {(e, name) for e, found in KILLS.items() for name in found}
    assert listed == {(m.estimator, m.name) for m in MUTANTS}
    assert [m.name for m in MUTANTS if not killers(m)] == []
    assert len(MUTANTS) >= 40


@pytest.mark.soak("coreset", "sampled")
@pytest.mark.long("rfa", "ra", "lara", "kernel")
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_defects_fail(mutant):
    """By one check that rejects it, an identity where there is one, at another seed."""
    name = cheapest(killers(mutant))
    report = check(adapted(mutant), checks=[name], rng=1)
    assert report.verdict == "FAIL", str(report)
    assert report.results[0].reproducer


# Checks without a defect that they alone reject, and why they are made all the same.
JUSTIFIED = {
    "value_length": "says at once that d_v = d is assumed",
    "large_logits": "tells lost digits from overflow",
    "extreme_logits": "compares digits where weighted_mean knows bounds only",
    "batches_of_rows": "tells a wrong axis from a wrong formula",
    "order_of_keys": "needs no reference, so that an error of the reference would show",
    "queries_apart": "of a black box and without a reference",
    "heads_apart": "of a black box and without a reference",
    "mask": "tells wrong masks from masks that do not broadcast",
    "mask_broadcasts": "tells masks that do not broadcast from wrong ones",
    "masked_keys_unseen": "of a black box; sizes of hidden keys far from those of visible ones",
    "causal": "tells causal attention from its combination with masks",
    "mask_with_causal": "tells their combination from each alone",
    "future_unseen": "all there is for causal LARA, and of any black box",
    "visible_part": "of a black box: causal and masked forms against the plain one",
    "one_frequency": "needs no reference and no recovery, so that it holds in halves",
    "mean_over_frequencies": "needs no reference",
    "calls_apart": "tells memory that is used again from a result that was never right",
    "recovered_values": "all there is of the formula of a black box",
    "feature_average": "unbiasedness itself, and couplings of which no exact law is known",
    "target_law": "of a black box without masks",
    "masked_target_law": "of a black box with masks",
    "causal_target_law": "of a black box that is causal",
    "mean_of_samples": "the formula at S = 2, number by number",
    "two_proposals": "the formula of a black box, whatever its centres",
    "unseen_law": "rejects nothing: it says what is not tested",
    "unbiased": "the claim itself, which the exact laws imply",
    "all_keys": "without a reference, and tells a wrong use of indices from a wrong estimator",
    "order_of_given_keys": "without a reference",
    "keys_of_heads": "tells indices of each head from what else is asked with them",
    "keys_given_again": "tells places that count once from wrong probabilities",
    "reference_values": "ordinary numbers, of which other checks have special cases",
    "query_without_keys": "where causal attention is not taken, and causal_cross not made",
    "one_function": "the formula of frequencies that are drawn once, which no law can tell",
    "long_vectors": "a law far out, where recovered_values has the formula at two frequencies",
    "same_bits": "of calls, which are the same in the catalogue",
    "same_bits_in_any_batch": "of what is declared only",
    "log_normalisers": "of a second output, which the catalogue does not have",
    "normaliser_without_keys": "of the same",
    "merged_parts": "of the same, and without a reference",
    "gradients_of_normalisers": "of the same",
    "windows": "tells windows from what else is asked with them",
    "outside_of_windows": "without a reference",
    "soft_caps": "tells caps from what else is asked with them",
    "weights_of_sinks": "tells sinks from what else is asked with them",
    "biases": "tells biases from what else is asked with them",
    "factors_of_dropout": "of every use, and at p = 0",
    "gradients": "the plainest case, of which the report can be read",
    "gradients_of_hidden": "of a black box",
    "gradients_of_hidden_nonsense": "of what a way back computes with what is hidden",
    "gradients_of_extreme_features": "tells lost digits from a wrong formula",
    "gradients_of_layouts": "of strides, which the catalogue leaves alone",
    "gradients_again": "of memory between calls, which the catalogue does not have",
    "gradients_of_means": "of a black box, and without a reference",
    "gradients_are_linear": "of a black box, and without a reference",
    "gradients_are_slopes": "all there is of the gradients of a black box",
    "proposal_noise": "LARA with proposals of its own, to which proposal_average does not apply",
}


def test_every_check_is_needed():
    alone = {k[0] for found in KILLS.values() for k in found.values() if len(k) == 1}
    assert set(conformance.CHECKS) - alone == set(JUSTIFIED)


@pytest.mark.long
def test_a_known_defect_is_named():
    by_name = {m.name: m for m in MUTANTS}
    for name in (
        *("rfa-key-norm-dropped", "softmax-scale-missing", "linear-softplus"),
        *("eva-size-not-counted", "second-order-divisor-less-one", "rfa-local-edge-twice"),
    ):
        report = check(adapted(by_name[name]), rng=2)
        named = [s for r in report.results for s in r.suspects]
        assert any(s.startswith(f"{name} (the same numbers)") for s in named), named
    report = check(adapted(by_name["kernel-qr-unsigned"]), rng=2)
    named = [s for r in report.results if r.status == "FAIL" for s in r.suspects]
    assert any(s.startswith("kernel-qr-unsigned (fails the same laws)") for s in named), named


# Misbehaviour


def endless(*args, **options):
    while True:
        pass


def raising(q, k, v, **options):
    raise RuntimeError("no\nGPU")


def exiting(q, k, v, **options):
    sys.exit(3)


def writing(q, k, v, **options):
    out = refattn.softmax_attention(q, k, v, **options)
    k *= 2
    return out


def restless(q, k, v, *, num_features, seed):
    return refattn.random_feature_attention(q, k, v, num_features=num_features)


MISBEHAVING = {
    "raises": (raising, "softmax", "contract", "RuntimeError: no GPU"),
    "exits": (exiting, "softmax", "contract", "SystemExit"),
    "writes": (writing, "softmax", "contract", "other numbers in it"),
    "wrong shape": (lambda q, k, v: v[..., :1], "softmax", "contract", "shape (5, 1)"),
    "wrong dtype": (
        lambda q, k, v: refattn.softmax_attention(q, k, v).astype(np.float32),
        "softmax",
        "contract",
        "float32",
    ),
    "not an array": (lambda q, k, v: "no", "softmax", "contract", "a str"),
    "nothing": (lambda q, k, v: None, "softmax", "contract", "a NoneType"),
    "list": (
        lambda q, k, v: refattn.softmax_attention(q, k, v).tolist(),
        "softmax",
        "contract",
        "a list",
    ),
    "objects": (
        lambda q, k, v: refattn.softmax_attention(q, k, v).astype(object),
        "softmax",
        "contract",
        "object",
    ),
    "nan": (lambda q, k, v: q @ k.swapaxes(-1, -2) @ v * np.nan, "softmax", "contract", "NaN"),
    "restless": (restless, "rfa", "contract", ""),
    "not a pair": (lambda x: x.mean(-2), "moments", "contract", "a ndarray"),
    "takes no seed": (lambda q, k, v: v, "rfa", "contract", "TypeError"),
}


@pytest.mark.long("writes", "restless")
@pytest.mark.parametrize("name", MISBEHAVING)
def test_misbehaviour_is_a_failure_with_a_sentence(name):
    fn, estimator, where, text = MISBEHAVING[name]
    report = check(fn, estimator=estimator, rng=0)
    assert report.verdict == "FAIL"
    found = {r.check: r for r in report.results}
    asked = {c.name for c in conformance.checks_of(Adapter(fn, estimator))}
    # What was tried in part, for want of time, is in both.
    assert asked - set(report.not_tried) <= set(found) <= asked
    assert found[where].status == "FAIL"
    assert text in found[where].got
    assert "\n" not in found[where].got


def test_a_hanging_callable_costs_its_time_and_no_more():
    start = time.perf_counter()
    report = check(endless, estimator="softmax", rng=0, time_limit=0.2)
    assert time.perf_counter() - start < 30
    assert {r.status for r in report.results} == {"FAIL"}
    assert {r.expected for r in report.results} == {"an answer within 0.2 s"}
    later = check(refattn.softmax_attention, estimator="softmax", rng=0)
    assert later.verdict == "PASS"


def test_a_slow_callable_is_underpowered(monkeypatch):
    monkeypatch.setitem(runner._BUDGET, "quick", 0.02)
    report = check(kernel, estimator="kernel", rng=0, time_limit=60)
    assert report.verdict == "UNDERPOWERED"
    assert {r.check for r in report.results if r.status == "UNDERPOWERED"} == {
        "frequency_law",
        "frequency_pairs",
        "feature_sums",
        "feature_average",
        "long_vectors",
    }
    assert "detects" in str(report)


@pytest.mark.long
def test_a_declared_epsilon_widens_and_is_not_a_pass():
    def fn(q, k, v, *, omega=None, num_features=None, seed=None):
        if omega is None:
            omega = np.random.default_rng(seed).standard_normal((num_features, q.shape[-1]))
        r = q.shape[-1] ** -0.25
        a = (r * q) @ omega.T
        b = (r * k) @ omega.T - r * r * np.sum(k * k, -1, keepdims=True) / 2
        a = np.exp(a - a.max(-1, keepdims=True)) + 1e-6
        b = np.exp(b - b.max((-1, -2), keepdims=True)) + 1e-6
        top = a @ (np.swapaxes(b, -1, -2) @ v)
        return top / (a @ np.sum(b, -2)[..., None])

    plain = check(fn, estimator="rfa", capabilities=["omega"], rng=0)
    assert plain.verdict == "FAIL"
    declared = check(fn, estimator="rfa", capabilities=["omega"], tags={"epsilon": 1e-6}, rng=0)
    assert declared.verdict == "UNDERPOWERED", str(declared)


def test_expected_failures_run_and_stale_ones_are_errors():
    def fn(q, k, v):
        return refattn.softmax_attention(q, k, v, scale=1.0)

    failing = {
        r.check: "scale"
        for r in check(fn, estimator="softmax", rng=0).results
        if r.status == "FAIL"
    }
    report = check(fn, estimator="softmax", rng=0, expected_failures=failing)
    assert report.verdict == "PASS"
    assert {r.check for r in report.results if r.status == "EXPECTED FAILURE"} == set(failing)
    stale = check(
        refattn.softmax_attention, estimator="softmax", rng=0, expected_failures={"contract": "old"}
    )
    assert stale.verdict == "FAIL"
    assert [r.reason for r in stale.results if r.status == "STALE"] == ["old"]
    for unknown in ("no_such_check", "target_law"):
        with pytest.raises(ValueError, match="expected_failures"):
            check(fn, estimator="softmax", expected_failures={unknown: "?"})


@pytest.mark.long
@pytest.mark.usefixtures("few_seeds")
def test_the_same_seed_is_the_same_run():
    first, again, other = (check(kernel, estimator="kernel", rng=rng) for rng in (5, 5, 6))
    assert [r.p for r in first.results] == [r.p for r in again.results]
    assert [r.p for r in first.results] != [r.p for r in other.results]
    alone = check(kernel, estimator="kernel", rng=5, checks=["frequency_law"])
    assert alone.results[0].p == next(r.p for r in first.results if r.check == "frequency_law")
    drawn = check(refattn.softmax_attention, estimator="softmax", rng=None)
    assert drawn.seed != check(refattn.softmax_attention, estimator="softmax", rng=None).seed


def test_reports():
    report = check(lambda q, k, v: v[..., :1, :] + 0 * q, estimator="softmax", rng=3)
    content = json.loads(report.to_json())
    assert content["verdict"] == "FAIL"
    assert content["seed"] == 3
    assert {r["check"] for r in content["results"]} == {r.check for r in report.results}
    root = ElementTree.fromstring(report.to_junit().encode())
    assert int(root.get("failures", "0")) == sum(r.status == "FAIL" for r in report.results)
    assert len(root.findall("testcase")) == len(report.results)
    assert "alpha 1e-06" in str(report)
    assert "Holm" in report.guarantee
    bad = Report("x", "softmax", (), {}, "quick", 1e-6, 0, [Result("c", "y", "law", p=math.nan)])
    assert json.loads(bad.to_json())["results"][0]["p"] is None


def test_verdicts():
    def verdict(*statuses):
        results = [Result(str(i), "", "law", status=s) for i, s in enumerate(statuses)]
        return Report("x", "rfa", (), {}, "quick", 1e-6, 0, results).verdict

    assert verdict("PASS", "EXPECTED FAILURE") == "PASS"
    assert verdict("PASS", "UNDERPOWERED") == "UNDERPOWERED"
    assert verdict("UNDERPOWERED", "FAIL") == "FAIL"
    assert verdict("STALE") == "FAIL"


def module_level_softmax(q, k, v):
    return refattn.softmax_attention(q, k, v, scale=1.0)


@pytest.mark.long
def test_reproducers_run_and_show_the_failure():
    report = check(module_level_softmax, estimator="softmax", rng=0)
    scripts = [r.reproducer for r in report.results if r.status == "FAIL"][:3]
    assert scripts
    for script in scripts:
        result = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        )
        assert result.returncode == 1, result.stderr
        error, allowed = re.findall(r"error (\S+) allowed (\S+)", result.stdout)[0]
        assert float(error) > float(allowed)
    report = check(partial(kernel), estimator="kernel", rng=0)
    assert not any(r.reproducer for r in report.results)


def test_reproducer_of_a_law():
    mutant = next(m for m in MUTANTS if m.name == "kernel-uniform")
    report = check(adapted(mutant), checks=["frequency_law"], rng=0)
    script = report.results[0].reproducer
    assert "checks=['frequency_law'], rng=0" in script


def overflowing(q, k, v):
    weights = np.exp(q @ np.swapaxes(k, -1, -2) / q.shape[-1] ** 0.5)
    return weights @ v / np.sum(weights, -1, keepdims=True)


def test_pytest_parametrisation():
    good = Adapter(refattn.softmax_attention, "softmax", name="good")
    bad = Adapter(lambda q, k, v: v[..., :1, :] + 0 * q, "softmax", name="bad")
    mark = conformance.parametrize_with_checks([good, bad])
    cases = {p.id: p.values[0] for p in mark.args[1]}
    for name, run in cases.items():
        if name.startswith("good"):
            run()
    with pytest.raises(AssertionError, match=r"expected .*\nformula: wrong at ordinary inputs\n"):
        cases["bad-reference_values"]()
    expecting = conformance.parametrize_with_checks(
        [bad], expected_failures={"reference_values": "known"}
    )
    cases = {p.id: p.values[0] for p in expecting.args[1]}
    with pytest.raises(pytest.xfail.Exception):
        cases["bad-reference_values"]()
    narrow = Adapter(overflowing, "softmax", name="narrow")
    cases = {p.id: p.values[0] for p in conformance.parametrize_with_checks([narrow]).args[1]}
    message = "range: wrong at extreme inputs only\nthe tag max_logit bounds what is asked\n"
    with np.errstate(all="ignore"), pytest.raises(AssertionError, match=message):
        cases["narrow-extreme_logits"]()
    with pytest.raises(TypeError, match="Adapters"):
        conformance.parametrize_with_checks([refattn.softmax_attention])


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"fn": 3, "estimator": "rfa"}, TypeError, "fn"),
        ({"estimator": "rfb"}, ValueError, "estimator"),
        ({"estimator": None}, TypeError, "estimator"),
        ({"estimator": "moments", "capabilities": ["mask"]}, ValueError, "capabilities"),
        ({"capabilities": ["omega"]}, ValueError, "capabilities"),
        ({"tags": {"colour": 1}}, ValueError, "tags"),
        ({"tags": {"layout": "dn"}}, ValueError, "layout"),
        ({"tags": {"scale": -1}}, ValueError, "scale"),
        ({"tags": {"scale": "x"}}, ValueError, "scale"),
        ({"tags": {"epsilon": -1e-6}}, ValueError, "epsilon"),
        ({"tags": {"dtype": "int8"}}, ValueError, "dtype"),
        ({"level": "slow"}, ValueError, "level"),
        ({"alpha": 0}, ValueError, "alpha"),
        ({"alpha": 1.5}, ValueError, "alpha"),
        ({"rng": -1}, ValueError, "rng"),
        ({"checks": ["none"]}, ValueError, "checks"),
        ({"time_limit": 0}, ValueError, "time_limit"),
        ({"expected_failures": ["contract"]}, TypeError, "expected_failures"),
    ],
)
def test_bad_arguments(arguments, error, text):
    given = {"fn": refattn.softmax_attention, "estimator": "softmax"} | arguments
    with pytest.raises(error, match=text):
        check(**given)


# The machinery


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
def test_bfloat16_rounding(numbers):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = np.array(numbers, np.float32)
    x = x[np.abs(x) < 3e38]
    adapter = Adapter(refattn.softmax_attention, "softmax", tags={"dtype": "bfloat16"})
    want = x.astype(ml_dtypes.bfloat16).astype(np.float64)
    np.testing.assert_array_equal(adapter.exact(x), want)


@pytest.mark.parametrize("layout", [None, "nd", "hnd", "nhd", "bnd", "bhnd", "bnhd"])
def test_layouts_go_there_and_back(layout):
    seen = []

    def fn(q, k, v):
        seen.append(q.shape)
        return q + 0 * v[..., :1, :1]

    adapter = Adapter(fn, "softmax", tags={"layout": layout})
    lead = adapter.lead(2, 3)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((*lead, m, 4)) for m in (5, 5, 5))
    np.testing.assert_array_equal(adapter(q, k, v) - 0 * q, q + 0 * v[..., :1, :1])
    sizes = dict(zip([axis for axis in "bhnd" if axis in (layout or "bhnd")], q.shape, strict=True))
    assert seen[0] == tuple(sizes[axis] for axis in layout or "bhnd")


def trial(fn, estimator, **tags):
    return identities.Trial(Adapter(fn, estimator, tags=tags), "test", 0, 50)


def test_frequencies_are_recovered():
    from refattn.conformance.checks import laws

    for fn, estimator in ((kernel, "kernel"), (refattn.random_feature_attention, "rfa")):
        t = trial(fn, estimator)
        d, c = 3, 0.5
        got = np.log(laws._estimates(t, np.zeros(d), np.eye(d), 1, 7)) + 0.5
        np.testing.assert_allclose(got, sampling.draw(1, d, rng=7).omega[0], rtol=0, atol=1e-12)
        y = c * np.concatenate([np.eye(d), 2 * np.eye(d), np.eye(d)[:1] + np.eye(d)[1:]])
        mean = laws._estimates(t, np.zeros(d), y, 2, 7) * np.exp(np.sum(y * y, -1) / 2)
        want = sampling.draw(2, d, rng=7).omega
        got = laws._paired(mean, d, c)
        np.testing.assert_allclose(sorted(got.tolist()), sorted(want.tolist()), atol=1e-10)


@pytest.mark.parametrize("features", ["hyperbolic", "trigonometric"])
def test_frequencies_are_recovered_up_to_sign(features):
    from refattn.conformance.checks import laws

    t = trial(
        partial(refattn.random_feature_attention, features=features), "rfa", features=features
    )
    for seed in range(20):
        got = laws._recovered(t, 5, 0.3, seed)
        want = sampling.draw(1, 5, rng=seed).omega[0]
        want = want * np.sign(want[0])
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)


def test_rosenblatt_makes_draws_from_a_mixture_normal():
    from refattn import stats
    from refattn.conformance.checks import recovery, targets

    rng = np.random.default_rng(0)
    centres, weight = 3 * rng.standard_normal((4, 2)), np.array([0.1, 0.2, 0.3, 0.4])
    index = rng.choice(4, 4000, p=weight)
    omega = centres[index] + rng.standard_normal((4000, 2))
    z = targets._rosenblatt(omega, centres, weight)
    t = trial(kernel, "kernel")
    recovery.normal(t, z, 0.0)
    assert stats.suite_p(list(t.p.values())) > 1e-6
    t = trial(kernel, "kernel")
    recovery.normal(t, targets._rosenblatt(omega, centres, weight[::-1].copy()), 0.0)
    assert stats.suite_p(list(t.p.values())) < 1e-6
    far = targets._rosenblatt(np.array([[1e4, -1e4]]), centres, weight)
    assert np.all(np.isfinite(far))


def rounded(x, dtype):
    return Adapter(kernel, "kernel", tags={"dtype": dtype}).exact(x)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("estimator", ["softmax", "rfa"])
def test_honest_evaluations_stay_within_the_tolerance(estimator, dtype):
    """Every operation rounded to the dtype, sums in turn: within a fifth, and not far below."""
    near = partial(rounded, dtype=dtype)

    def total(x, axis):
        parts = np.moveaxis(x, axis, 0)
        result = parts[0]
        for part in parts[1:]:
            result = near(result + part)
        return result

    def dot(a, b):
        return total(near(a[..., :, None, :] * b[..., None, :, :]), -1)

    def attention(scores, v):
        weight = near(np.exp(near(scores - np.max(scores, -1, keepdims=True))))
        top = total(near(weight[..., None] * v[..., None, :, :]), -2)
        return near(top / total(weight, -1)[..., None])

    def softmax(q, k, v):
        return attention(near(dot(q, k) * near(q.shape[-1] ** -0.5)), v)

    def rfa(q, k, v, *, omega):
        root = near(q.shape[-1] ** -0.25)
        q, k = near(root * q), near(root * k)
        a = dot(q, omega)
        b = near(dot(k, omega) - near(total(near(k * k), -1) / 2)[..., None])
        a = near(np.exp(near(a - np.max(a, -1, keepdims=True))))
        most = np.max(b, -2, keepdims=True)
        b = near(np.exp(near(b - most)))
        sums = total(near(b[..., None] * near(v[..., :, None, :])), -3)
        a = near(a * near(np.exp(near(most - np.max(most)))))
        top = total(near(a[..., None] * sums[..., None, :, :]), -2)
        return near(top / dot(a, total(b, -2)[..., None, :]))

    fn = {"softmax": softmax, "rfa": rfa}[estimator]
    t = trial(fn, estimator, dtype=dtype)
    worst = 0.0
    for seed, size in itertools.product(range(20), (0.3, 1.0, 2.0)):
        t.rng = np.random.default_rng(seed)
        arrays, options = t.problem(6, 8, 4, 8, size=size)
        want, allowed = reference(t.adapter, arrays, options)
        got = fn(*arrays, **options)
        worst = max(worst, float(np.max(np.abs(got - want))) / allowed)
    assert 0.01 < worst < 0.2


@pytest.mark.soak
@pytest.mark.long
@pytest.mark.usefixtures("few_seeds")
def test_checks_of_a_batch_of_vectors_one_by_one():
    def single(x, y, *, num_features, seed):
        if x.ndim != 1:
            raise ValueError("one vector at a time")
        return kernel(x, y, num_features=num_features, seed=seed)

    report = check(
        single,
        estimator="kernel",
        rng=0,
        checks=["frequency_law", "recovered_values"],
        time_limit=600,
    )
    assert report.verdict == "PASS", str(report)


# Programs


SOURCE = Path(__file__).with_name("attention.c")


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    path = tmp_path_factory.mktemp("c") / "attention"
    subprocess.run([compiler, "-O2", "-o", path, SOURCE, "-lm"], check=True)
    return str(path)


@pytest.mark.parametrize("defect", ["", "unstable", "strict"])
def test_a_program_in_c(program, defect):
    fn = Subprocess(f"{program} {defect} {{input}} {{output}}")
    report = check(fn, estimator="softmax", capabilities=["causal"], tags={"layout": "nd"}, rng=0)
    failed = [r.check for r in report.results if r.status == "FAIL"]
    want = {
        "": [],
        "unstable": ["extreme_logits", "weighted_mean", "future_unseen"],
        "strict": ["causal", "causal_cross", "uses_together", "large_sizes"],
    }[defect]
    assert set(failed) == set(want), str(report)
    if failed:
        script = next(r.reproducer for r in report.results if r.reproducer)
        assert f"Subprocess(['{program}'" in script


def test_a_program_in_c_that_is_kept(program):
    with contextlib.closing(Subprocess(f"{program} serve", keep=True)) as fn:
        options = {"capabilities": ["causal"], "tags": {"layout": "nd"}}
        report = check(fn, estimator="softmax", rng=0, **options)
    assert report.verdict == "PASS", str(report)


PYTHON = """
import sys, numpy as np, refattn
given = dict(np.load(sys.argv[1]))
if "x" in given:
    m = refattn.moments.estimate(given["x"])
    np.savez(sys.argv[2], mean=m.mean, cov=m.cov)
else:
    np.savez(sys.argv[2], out=refattn.softmax_attention(given["q"], given["k"], given["v"]))
"""


@pytest.mark.long
def test_a_program_with_npz_files(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(PYTHON, encoding="utf-8")
    command = [sys.executable, str(script)]
    fn = Subprocess(command, format="npz")
    report = check(fn, estimator="softmax", checks=["contract"], rng=0)
    assert report.verdict == "PASS", str(report)
    fn = Subprocess(command, format="npz", names=("x",))
    report = check(fn, estimator="moments", checks=["contract"], rng=0)
    assert report.verdict == "PASS", str(report)


def test_programs_that_fail(tmp_path):
    x = np.ones((2, 2))
    for words, text in (
        (["/nonexistent"], "could not be started"),
        ([sys.executable, "-c", "import sys; sys.exit('broken')"], "status 1: broken"),
        ([sys.executable, "-c", "pass"], "no readable result"),
    ):
        with pytest.raises(Failure, match=text):
            Adapter(Subprocess(words), "softmax")(x, x, x)
    slow = Subprocess([sys.executable, "-c", "import time; time.sleep(9)"], timeout=0.2)
    with pytest.raises(Failure, match=r"more than 0\.2 s"):
        Adapter(slow, "softmax")(x, x, x)
    for bad in (
        {"command": ""},
        {"command": "x", "format": "pickle"},
        {"command": "x", "timeout": 0},
    ):
        with pytest.raises(ValueError, match=r"command|format|timeout"):
            Subprocess(**bad)
