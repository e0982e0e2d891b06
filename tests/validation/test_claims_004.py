"""Claims of reference 004: each changes its verdict when what it is about is made wrong."""

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

pytest.importorskip("matplotlib")

from refattn import features, streaming
from refattn.engine import signed
from tests.validation.claims import verdicts
from validation import suite
from validation.claims import cost, linear_attention, linear_time


def test_linear_attention():
    expected = {key: s.expected for key, s in suite.claims()["linear_attention"].statements.items()}
    assert verdicts("linear_attention", "quick") == expected


def test_linear_attention_with_epsilon(monkeypatch):
    normaliser = signed.Signed.normaliser
    monkeypatch.setattr(signed.Signed, "normaliser", lambda own, sums: normaliser(own, sums) + 1e-6)
    found = verdicts("linear_attention")
    assert found["linear"] == found["recurrent"] == "REFUTED"


def test_states_that_forget(monkeypatch):
    monkeypatch.setattr(streaming, "merge_totals", lambda a, b: b)
    assert verdicts("linear_attention")["recurrent"] == "REFUTED"


def test_elu_as_printed(monkeypatch):
    monkeypatch.setattr(
        features,
        "elu_features",
        lambda x, alpha=1.0: linear_attention.printed_elu_plus_one(x, alpha),
    )
    found = verdicts("linear_attention")
    assert found["finite, rewritten"] == found["digits, rewritten"] == "REFUTED"


def test_elu_mended(monkeypatch):
    monkeypatch.setattr(
        linear_attention,
        "printed_elu_plus_one",
        lambda x, alpha: features.elu_features(np.asarray(x), alpha),
    )
    found = verdicts("linear_attention")
    assert found["finite"] == found["digits, alpha = 1"] == "HOLDS"


@pytest.mark.long
def test_memory_of_random_features():
    """The part of the claim that does not depend on the clock."""
    memory = [task for task in cost.tasks("tiny") if not task["repeats"]]
    with threadpool_limits(1):
        results = [cost.run(np.random.default_rng(0), **task) for task in memory]
    values = results[0]["values"]
    assert values["textbook"][-1] > 10 * values["textbook"][0]
    assert values["refattn"][-1] < 4 * values["refattn"][0]
    values = results[1]["values"]
    textbook, ours = (values[name] for name in cost.LINEAR)
    assert textbook[-1] > 4 * textbook[0]
    assert ours[-1] < 2 * ours[0]


@pytest.mark.long
def test_operations():
    tasks = linear_time.tasks("tiny")
    results = [linear_time.run(np.random.default_rng(0), **task) for task in tasks]
    claim = suite.claims()["linear_time"]
    record = suite.record(claim, claim.judge(results), 1e-6)
    assert record["statements"][0]["verdict"] == "HOLDS"
