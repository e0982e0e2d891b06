"""The measured level of the conformance checks: runs, their count, and the command line."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import refattn
from refattn.judge.conformance import TAGS, Adapter
from refattn.registry import ESTIMATORS
from validation import level


@pytest.fixture(autouse=True)
def _here(monkeypatch):
    """Threads see what a test puts in place of a candidate."""
    monkeypatch.setattr(level, "ProcessPoolExecutor", ThreadPoolExecutor)


def wide(x, y, *, num_features, seed):
    omega = 2 * np.random.default_rng(seed).standard_normal((num_features, x.shape[-1]))
    return refattn.kernels.estimate(x, y, omega)


@pytest.mark.long
def test_correct_candidates(tmp_path, capsys):
    file = tmp_path / "level.md"
    words = ["catalogue linear-recurrent", "moments-welford", "--seeds", "2", "--workers", "1"]
    assert level.main([*words, "--output", str(file)]) == 0
    said = file.read_text("utf-8")
    assert "| catalogue linear-recurrent | 2 | 0 | 0 | 0 | 0 |\n" in said
    assert "| **all** | 4 | 0 | 0 | 0 | 0 |\n" in said
    assert said.endswith("Failures:\n\n- none\n")
    assert capsys.readouterr().out.startswith(said)


@pytest.mark.long("frequency_law")
@pytest.mark.parametrize("check", ["reference_values", "frequency_law"])
def test_a_wrong_candidate_alarms(check, monkeypatch, capsys):
    wrong = Adapter(wide, "kernel")
    if check == "reference_values":
        wrong = Adapter(lambda x: (2 * np.mean(x, -2), np.cov(x.T)), "moments")
    monkeypatch.setattr(level, "CANDIDATES", {"wrong": wrong})
    assert level.main(["wrong", "--seeds", "1", "--workers", "1"]) == 1
    said = capsys.readouterr().out
    assert "| wrong | 1 | 1 | 1 | 1 | 1 |" in said
    assert f"- wrong, seed {level.run(('wrong', 0)).seed}, {check}: " in said


def test_alarms_are_counted_at_each_level():
    runs = [("a", 0.05, []), ("a", 2e-3, []), ("b", 1.0, ["mask: no"]), ("b", 1e-3, [])]
    lines = level.table([level.Run(x, 7, p, said, 0.0) for x, p, said in runs]).splitlines()
    assert lines[2:7] == [
        "| a | 2 | 2 | 1 | 0 | 0 |",
        "| b | 2 | 2 | 2 | 2 | 1 |",
        "| **all** | 4 | 4 | 3 | 2 | 1 |",
        "| alarms expected, at most |  | 0.2 | 0.04 | 0.004 | 4e-06 |",
        "| share, 99% upper limit |  | 1 | 1 | 0.96 | 0.86 |",
    ]
    assert lines[-1] == "- b, seed 7, mask: no"
    assert level.upper_limit(0, 300) == pytest.approx(1 - 0.01 ** (1 / 300))
    assert level.upper_limit(300, 300) == 1


def test_runs_are_independent_and_large_sizes_are_rare(monkeypatch):
    asked = []

    def check(adapter, **options):
        asked.append(options | {"law_seeds": refattn.conformance.LEVELS["quick"]})
        return refattn.conformance.Report("", "softmax", (), {}, "quick", 1e-6, 0, [], {})

    monkeypatch.setattr(refattn.conformance, "check", check)
    names = ("softmax", "catalogue softmax")
    for job in ((name, i) for name in names for i in range(11)):
        level.run(job)
    assert len({x["rng"] for x in asked}) == 22
    assert ["large_sizes" in x["checks"] for x in asked] == 2 * [True, *9 * [False], True]
    assert {x["law_seeds"] for x in asked} == {level.LAW_SEEDS}
    assert refattn.conformance.LEVELS["quick"] == 2000


def test_every_estimator_and_value_is_a_candidate():
    adapters = level.CANDIDATES.values()
    assert {x.name for x in ESTIMATORS.values()} <= {x.name for x in adapters}
    for tag, values in level.VALUES.items():
        assert {*values} <= {x[tag] for x in adapters}
    plain = Adapter(len, "softmax")
    assert [tag for tag in TAGS if all(x[tag] == plain[tag] for x in adapters)] == ["device"]


def test_unusable_arguments(capsys):
    for words, said in (
        (["--seeds", "0"], "--seeds must be at least 1, got 0"),
        (["--workers", "-1"], "--workers must be at least 1, got -1"),
        (["nothing"], "names must be parts of names of candidates, got 'nothing'"),
    ):
        with pytest.raises(SystemExit) as error:
            level.main(words)
        assert error.value.code == 2
        assert said in capsys.readouterr().err


def test_candidates_whose_library_is_missing_are_named(monkeypatch, capsys):
    monkeypatch.setattr(level, "find_spec", lambda name: None if name == "torch" else name)
    assert (
        level.main(["softmax of torch", "moments-welford", "--seeds", "1", "--workers", "1"]) == 0
    )
    said = capsys.readouterr().out
    assert "left out, for want of their library: softmax of torch\n" in said
    assert "| softmax of torch |" not in said
