"""Which catalogued defects a failure is like."""

import json
import re

import numpy as np
import pytest

import refattn
from refattn import naive
from refattn.judge.conformance import check
from refattn.judge.conformance.checks import recovery
from refattn.judge.conformance.checks.trials import CheckRun
from refattn.judge.conformance.report import runner, suspects
from tests.judge.conformance.candidates import (
    BY_NAME,
    catalogued,
    entry,
    failures,
    of,
    wide,
    wrong_at_zero,
)


def named(report):
    return [s for r in report.results if r.status == "FAIL" for s in r.suspects]


NAMED = """rfa-key-norm-dropped softmax-scale-missing linear-softplus eva-size-not-counted
    second-order-divisor-less-one rfa-local-edge-twice"""


@pytest.mark.long("rfa", "eva", "second", "linear")
@pytest.mark.parametrize("name", NAMED.split())
def test_a_known_defect_is_named(name):
    report = check(catalogued(name), checks=["reference_values"], rng=2)
    assert any(s.startswith(f"{name} (the same numbers)") for s in named(report)), named(report)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", ["forgotten", "not-scaled", "times-p"])
def test_a_backward_pass_that_drops_otherwise_is_named(name):
    name = f"softmax-dropout-{name}-behind"
    report = check(catalogued(name), checks=["gradients_of_dropout"], rng=2)
    assert named(report)[0].startswith(f"{name} (the same numbers)")


@pytest.mark.long
def test_a_known_defect_is_named_by_the_laws_that_it_fails():
    report = check(catalogued("kernel-qr-unsigned"), rng=2)
    words = "kernel-qr-unsigned (fails the same checks)"
    assert any(s.startswith(words) for s in named(report)), named(report)


def test_frequencies_as_qr_gives_them_are_named_first():
    """With norms sqrt(d) they fail what frequencies of another length fail: both are named."""
    failed = {"frequency_law", "long_vectors", "feature_sums", "feature_average"}
    for more, first in (({}, "rfa-qr-unsigned"), ({"frequency_pairs"}, "rfa-qr-unsigned-fixed")):
        adapter = of(wide, "rfa", coupling="orthogonal")
        laws = failed | {"frequency_pairs"}
        same = suspects._same_checks(adapter, failed | {*more}, laws, 3, of_draws=True)
        found = [x.name for x, _ in same]
        assert found[0].startswith(first)
        assert len(found) > 1


@pytest.mark.long("whole")
@pytest.mark.parametrize("name", ["rfa-key-norm-dropped", "rfa-key-norm-whole"])
def test_a_wrong_norm_of_keys_is_named_without_frequencies(name):
    report = check(of(entry(name), "rfa"), checks=["one_function"], rng=0)
    assert any(s.startswith(f"{name} (the same weights of long") for s in named(report))
    trial = CheckRun(of(wide, "rfa"), "diagnosis", 0)
    assert suspects.weighing_keys_alike(trial) == []  # right


def test_right_numbers_are_like_no_bug():
    """Where others that they should be equal to are wrong, many bugs give the right ones too."""
    candidate = of(wrong_at_zero, "gated-delta-rule", "initial_state")
    report = check(candidate, checks=["state_handed_over"], rng=0)
    assert (report.verdict, named(report)) == ("FAIL", [])


def own_performer(norm=True, half=True, epsilon=0.0, max_logit=300.0):
    def attention(q, k, v, *, num_features, seed):
        omega = np.random.default_rng(seed).standard_normal((num_features, q.shape[-1]))
        x, y = (z * q.shape[-1] ** -0.25 for z in (q, k))
        logs = [z @ omega.T - (z * z).sum(-1, keepdims=True) / 2 * half for z in (x, y)]
        phi = [np.exp(z) + epsilon for z in logs]
        weights = phi[0] @ np.swapaxes(phi[1], -1, -2)
        return weights @ v / (weights.sum(-1, keepdims=True) if norm else k.shape[-2])

    return of(attention, "rfa", max_logit=max_logit)


def test_keys_that_weigh_as_they_are_to_are_like_no_mistake():
    """Without a normaliser no bug of the catalogue has these numbers, and none is named."""
    trials = (CheckRun(own_performer(norm=False), "diagnosis", seed) for seed in range(3))
    assert [x for trial in trials for x in suspects.weighing_keys_alike(trial)] == []


@pytest.mark.sweep(5)
@pytest.mark.long("0.0+300.0", "0.0+4.0")
@pytest.mark.parametrize("max_logit", [300.0, 40.0, 4.0])
@pytest.mark.parametrize("epsilon", [1e-4, 0.0])
def test_a_constant_added_to_features_is_named_without_frequencies(epsilon, max_logit):
    """If keys may be so long that nothing else is left of their weight."""
    for seed in range(3):
        candidate = own_performer(epsilon=epsilon, max_logit=max_logit)
        found = suspects.weighing_keys_alike(CheckRun(candidate, "diagnosis", seed))
        names = ["rfa-feature-epsilon", "rfa-epsilon-in-both"] if epsilon and max_logit > 4 else []
        assert [x.name for x, _ in found] == names


def test_laws_name_the_bug_whose_numbers_are_the_same(monkeypatch):
    """Without the norms frequencies look longer: bugs of the draw fail the same laws."""
    monkeypatch.setitem(runner.LEVELS, "quick", 300)
    monkeypatch.setattr(suspects, "_same_checks", lambda *x, **_: [(entry("rfa-fixed-norms"), "")])
    names = ["one_function", "long_vectors"]
    report = check(own_performer(half=False), checks=names, rng=0)
    assert failures(report) == {*names}
    assert all("the same weights of long keys" in words for words in named(report))
    assert any("rfa-key-norm-dropped" in words for words in named(report))


@pytest.mark.sweep(4)
@pytest.mark.parametrize("norm", [1.0, 8**0.5])
def test_a_bug_that_fails_the_same_laws_has_the_same_moments(norm):
    """Directions that are right, of norm 1 or, as in the known bug, sqrt(d)."""
    z = np.random.default_rng(0).standard_normal((300, 8))
    omega = norm * z / np.linalg.norm(z, axis=-1, keepdims=True)
    trial = CheckRun(of(own_performer().fn, "rfa"), "frequency_law", 0, omega=omega)
    assert suspects._same_moments(BY_NAME["rfa-fixed-norms"], trial) is (norm > 1)
    recovery.note_moments(trial, "d = 8, ", recovery.frequency_moments(omega))
    square = "mean |omega|^2 = 1, should be 8"
    words = "variance of |omega|^2 = 0, should be 16" if norm > 1 else square
    assert trial.effects == {"d = 8, ": words}


@pytest.mark.long
def test_a_law_that_fails_names_the_size_of_the_error(monkeypatch):
    monkeypatch.setitem(runner.LEVELS, "quick", 300)

    def short(q, k, v, *, num_features, seed):
        omega = 0.5 * np.random.default_rng(seed).standard_normal((num_features, q.shape[-1]))
        return refattn.random_feature_attention(q, k, v, omega=omega)

    (result,) = check(of(short, "rfa"), checks=["frequency_law"]).results
    assert re.match(r"mean \|omega\|\^2 = (1.9|2|2.0)\d*, should be 8: p = ", result.got)


@pytest.mark.long
def test_one_failed_law_is_no_pattern(monkeypatch):
    monkeypatch.setitem(runner.LEVELS, "quick", 300)
    monkeypatch.setattr(runner, "_other_draws", lambda *x: [])
    report = check(of(wide, "rfa"), rng=0, checks=["contract", "feature_sums", "seeds"])
    assert failures(report) == {"feature_sums"}
    assert not any(r.suspects for r in report.results)


@pytest.mark.long
def test_failures_that_thirteen_defects_share_are_no_pattern():
    report = check(catalogued("kernel-box-muller-half"), rng=2)
    assert len(failures(report)) >= 4, str(report)
    assert not any(r.suspects for r in report.results)


@pytest.mark.long
def test_where_a_mistake_is_is_said():
    report = check(catalogued("softmax-backward-scale-twice-in-dk"), checks=["gradients"], rng=0)
    (result,) = report.results
    assert result.expected.startswith("dk ")
    assert "n = 4, m = 6: every token" in result.got
    assert result.suspects[0].startswith("softmax-backward-scale-twice-in-dk (the same numbers)")
    assert "d_out=d_out" in result.reproducer
    assert "got = got[2]" in result.reproducer


@pytest.mark.long
def test_a_defect_that_changes_other_gradients_as_well_is_not_named():
    """Without D, dk is the same, but dq is wrong as well."""
    name = "linear-backward-normaliser-constant-for-keys"
    report = check(catalogued(name), checks=["gradients"], rng=0)
    assert [x.partition(" ")[0] for x in named(report)] == [name]


@pytest.mark.long
def test_a_step_that_no_defect_changes_is_shown():
    def halved(q, k, v, *, indices, log_probability):
        p = np.sqrt(np.exp(log_probability))
        return naive.sampled_key_attention(q, k, v, indices=indices, log_probability=np.log(p))

    names = ["reference_values", "any_probabilities"]
    report = check(of(halved, "sampled-norms", "indices_only"), checks=names, rng=2)
    (words,) = {*named(report)}
    assert words == "changed-step (the same numbers): The formula with one step changed."
    (change,) = {*(x for r in report.results for x in r.changes)}
    place, right, wrong = change.splitlines()
    assert place.startswith("in ")
    assert re.search(r"0\.5|2", wrong)
    assert wrong != right


def test_a_black_box_is_named_by_all_checks_that_it_fails():
    def mean(q, k, v, *, num_features, seed):
        omega = np.random.default_rng(seed).standard_normal((num_features, q.shape[-1]))
        phi = [np.maximum(x * q.shape[-1] ** -0.25 @ omega.T, 0) + 1e-3 for x in (q, k)]
        return phi[0] @ (np.swapaxes(phi[1], -1, -2) @ v)

    names = ["contract", "own_law", "seeds", "weighted_mean"]
    report = check(of(mean, "performer-relu"), checks=names, rng=0)
    assert failures(report) == {"own_law", "weighted_mean"}
    words = "performer-relu-not-normalised (fails the same checks)"
    assert all(x.startswith(words) for x in named(report))


def test_what_a_known_defect_changes_is_shown():
    report = check(catalogued("softmax-scale-missing"), checks=["reference_values"], rng=2)
    (result,) = report.results
    place, right, wrong = result.changes[0].splitlines()
    assert place == "in any_scale (- right, + like yours):"
    assert right.startswith('  - return {"scale": constant(q.shape[-1], q) ** -0.5 if ')
    assert wrong == '  + return {"scale": 1.0 if factor is None else factor}'
    assert f"            {place}\n            {right}\n" in report.text()
    assert json.loads(report.to_json())["results"][0]["changes"] == result.changes
    report = check(catalogued("softmax-gqa-interleaved"), checks=["grouped_heads"], rng=2)
    assert report.results[0].suspects
    assert not any(report.results[0].changes)


@pytest.mark.long
def test_what_is_made_of_several_calls_is_like_no_mistake():
    """Neither a slope nor a multiple is what a catalogued mistake gives."""
    adapter = catalogued("softmax-backward-cotangents-are-ones")
    names = ["gradients", "gradients_are_slopes", "gradients_are_linear"]
    report = check(adapter, checks=names, rng=0)
    likeness = {r.check: len(r.likeness) for r in report.results}
    assert likeness == dict(zip(names, (1, 0, 0), strict=True))
