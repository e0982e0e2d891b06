"""`refattn explain`: every name in a report can be explained."""

import pytest

import refattn
from refattn.judge.conformance import CHECKS
from refattn.judge.conformance.report import explanations
from refattn.judge.mistakes.defects import MUTANTS
from refattn.judge.rounding import PROFILES
from tests.cli.running import run, shown


def test_every_check_and_known_bug_is_explained():
    """A check with its kind and how it is computed; a bug with its effect."""
    for name, check in CHECKS.items():
        text = "\n".join(explanations.explain(name))
        assert f"check {name}: {check.claim}." in text
        assert "\n  how:\n    " in text, name
        assert f"--check {name}" in text
    for bug in MUTANTS:
        assert any(bug.effect in line for line in explanations.explain(bug.name))


def test_every_name_is_in_one_group():
    """As the pages of the site have them."""
    grouped = [name for names in explanations.groups().values() for name in names]
    assert len(grouped) == len(set(grouped))
    assert {*CHECKS, *(x.name for x in MUTANTS)} <= set(grouped) <= set(explanations.names())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("softmax-scale-missing", '+ return {"scale": 1.0 if factor is None else factor}'),
        ("softmax-scale-missing", "detected by: reference_values, "),
        ("mask", "capability mask: mask=, boolean"),
        ("causal", "tag causal: "),
        ("causal", "declare it: refattn check MODULE:CALLABLE --tag causal=VALUE"),
        ("rfa-qr-unsigned-fixed-norms", "correct code: def orthogonal("),
        ("rfa-qr-unsigned-fixed-norms", "what to do: compare yours with the lines above"),
        ("rfa-halved-norms", "what to do: use the lines marked -"),
        ("normalised", "trait normalised, of estimators: "),
        ("adjusted", "Holm's method"),
        ("error_tolerated", "a column of compare: "),
        ("RFA", "estimator rfa-iid, rfa, "),
        ("rfa-adapted", ", with proposal=adapt.fit(q, k)."),
        ("eva-published", ", with log_size=False and omega='mean'."),
        ("frequency_law", "look first at: how the function draws"),
        ("mask", "look first at: the element"),
        ("unseen_law", "kind: no test for estimators"),
        ("unseen_law", "an epsilon of 0. run it alone: "),
        ("rounding_errors", "a correct function fails with probability below 1e-8"),
        ("softmax-scale-missing", "what to do: use the lines marked -"),
        ("softmax-sink-capped", "what to do: leave out the lines marked +"),
        ("softmax-gqa-interleaved", "what to do: compare yours with `python -m refattn.naive`"),
        ("performer", "test yours: refattn check MODULE:CALLABLE --estimator performer"),
        ("law", "severity law: random draws have the wrong distribution."),
        ("lara", "it is called as: fn(q, k, v, num_proposals=, seed=)"),
        ("softmax", "it is called as: fn(q, k, v) test"),
        ("flash", "profile flash, of refattn verify: a fused kernel: "),
        ("hopper", "hardware hopper, of refattn verify: its matrix units truncate sums."),
        ("torch-sdpa", "declare it: refattn check MODULE:CALLABLE --spec torch-sdpa"),
        ("bound", "bound: a test of verify: no error exceeds its proven bound"),
        ("unknown cause", "unknown cause: no known bug that verify tries explains"),
        ("edge-1", "look like a known bug: a query does not see its last key"),
        ("mean square of tiles of 16", "deviation, of a tile of 16 or more queries of a head."),
        ("UNDERPOWERED", "UNDERPOWERED: a verdict: no test failed, but"),
        ("performer", "estimator rfa-orthogonal, performer, favor, favor+: "),
        ("torch-sdpa", "spec torch-sdpa, conventions of a well-known function: library=torch "),
    ],
)
def test_explanations(name, words):
    assert words in " ".join(shown("explain", name).split())


def test_every_profile_is_explained():
    for name in PROFILES:
        assert explanations.explain(name)[-1].startswith(f"profile {name}, of refattn verify: ")


@pytest.mark.long
def test_every_test_of_verify_is_explained():
    """Of an output, its log normalisers and gradients."""
    q, k, v = (x[:, :40] for x in refattn.load_sample())
    out, pullback = refattn.vjp(refattn.softmax_attention, q, k, v, causal=True)
    lse = refattn.attend(q, k, v, causal=True).lse
    given = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "d_out": out}
    found = refattn.verify(**given, dq=pullback(out).q, causal=True).parts
    names = {x.name for part in found.values() for x in part.tests}
    assert {"key of a head", "mean square of tiles of 16", "delta"} < names
    assert all(explanations.explain(x) for x in names)


def test_a_name_that_nothing_has():
    done = run("explain", "frequency_lwa")
    assert done.exit_code == 2
    assert "nothing is named 'frequency_lwa'" in done.stderr
    assert "Did you mean frequency_law" in done.stderr
