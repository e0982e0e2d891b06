"""A run of the checks: its time, its level, what is expected to fail, and what comes of it."""

import dataclasses
import json
import re
import subprocess
import sys
import time
from functools import partial

import numpy as np
import pytest

import refattn
from refattn import conformance
from refattn.judge.conformance import Adapter, check
from refattn.judge.conformance.checks import sizes, trials
from refattn.judge.conformance.report import runner
from refattn.judge.conformance.report.advice import advise
from tests.judge.conformance import candidates
from tests.judge.conformance.candidates import BY_NAME, changed, failures, of, plain

SOFTMAX = {"estimator": "softmax", "rng": 0}
FEW = ["contract", "reference_values", "value_length"]


def waiting(seconds, fn=plain):
    def slow(*arrays, **options):
        time.sleep(seconds)
        return fn(*arrays, **options)

    return slow


@pytest.mark.long
def test_a_slow_candidate_is_given_fewer_seeds_within_its_time_limit():
    slow = waiting(0.005, candidates.seeded(refattn.random_feature_attention))
    report = check(slow, estimator="rfa", rng=0, checks=["frequency_law"], time_limit=3.0)
    (result,) = report.results
    assert result.status == "UNDERPOWERED", str(report)
    assert 3 <= result.samples < 2000
    assert result.adjusted is not None


def test_time_runs_out_for_a_slow_candidate():
    """The call at the end of the time is no hang."""
    names = ["weighted_mean", "queries_apart"]
    report = check(waiting(0.02), checks=names, time_limit=0.3, **SOFTMAX)
    (result,) = report.results
    assert report.verdict == "UNDERPOWERED"
    assert re.fullmatch(r"no answer after [1-9]\d* calls", result.got)
    assert f"expected an answer within 0.3 s; got {result.got}" in str(report)
    assert "time is over: queries_apart" in report.text(verbose=True)
    assert "not run: time is over" in str(report)


def test_seeds_are_no_advice_where_nothing_can_be_seen():
    """An epsilon hides the distribution of the frequencies, with any number of seeds."""
    adapter = of(refattn.random_feature_attention, "rfa", epsilon=1e-6)
    text = str(check(adapter, checks=["unseen_law"]))
    assert "law of frequencies: no error would be detected, however large" in text
    assert "an epsilon of 0" in text
    assert "--level" not in text
    assert "inf" not in text


def test_two_equal_calls_that_differ_end_a_run():
    """The estimator of the same function that is random is named."""
    report = check(refattn.eva_attention, estimator="eva", checks=["contract", "reference_values"])
    (result,) = report.results
    assert (result.status, result.severity) == ("FAIL", "contract")
    assert "results that differ: the function draws random numbers" in result.got
    assert "--estimator eva-sampled draws" in result.got
    assert report.not_tried["reference_values"] == "two equal calls differ"


def test_a_function_without_cotangent_is_told_of_it():
    capable = {"capabilities": ["vjp"], "checks": ["gradients", "gradients_again"]}
    report = check(refattn.softmax_attention, estimator="softmax", **capable)
    assert "wrap it, as with refattn.vjp" in report.results[0].got
    assert "1 more, which may have the same cause: gradients_again" in str(report)


@pytest.mark.parametrize("answers", [0, 1])
def test_a_candidate_that_hangs_fails_and_costs_its_time_and_no_more(answers):
    left = [None] * answers

    def hanging(q, k, v):
        while not left:
            if answers:
                time.sleep(0.01)
        left.pop()
        return plain(q, k, v)

    start = time.perf_counter()
    report = check(hanging, time_limit=0.2, **SOFTMAX)
    assert time.perf_counter() - start < 30
    (result,) = report.results
    assert (result.status, result.summary) == ("FAIL", "expected an answer within 0.2 s; got none")
    assert "time_limit=0.2)" in result.reproducer
    assert check(plain, checks=FEW, **SOFTMAX).verdict == "PASS"


def test_an_import_is_not_interrupted(tmp_path, monkeypatch):
    (tmp_path / "slow_import.py").write_text(
        "import time\nfor _ in range(100): time.sleep(0.01)\nwhole = True\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def importing(q, k, v):
        import slow_import

        assert slow_import.whole
        return plain(q, k, v)

    (result,) = check(importing, checks=["contract"], time_limit=0.2, **SOFTMAX).results
    assert result.got == "none"
    import slow_import  # here the thread of the check has ended its import, not broken it off

    assert slow_import.whole


def test_time_that_is_over_before_the_first_call_is_no_failure(monkeypatch):
    def slow(self, *sizes, **options):
        time.sleep(0.5)
        raise AssertionError

    monkeypatch.setattr(trials.CheckRun, "problem", slow)
    (result,) = check(plain, checks=["contract"], time_limit=0.1, **SOFTMAX).results
    assert (result.status, result.got) == ("UNDERPOWERED", "no answer after 0 calls")


def test_what_a_late_check_still_finds_does_not_count(monkeypatch):
    def adding(trial):
        while True:  # not in a call, so that nothing interrupts it
            trial.p[f"p {len(trial.p)}"] = 0.5
            trial.power[f"p {len(trial.p)}"] = (lambda alpha: 0.0, 1.0)
            time.sleep(0)
            if len(trial.p) > 10**5:
                return

    late = dataclasses.replace(trials.CHECKS["contract"], run=adding)
    monkeypatch.setitem(trials.CHECKS, "contract", late)
    (result,) = check(plain, checks=["contract"], time_limit=0.05, **SOFTMAX).results
    assert result.status == "UNDERPOWERED"


def test_what_time_did_not_allow_is_said(monkeypatch):
    monkeypatch.setattr(sizes, "_LARGE_SECONDS", {"quick": 0.0})
    report = check(plain, checks=["large_sizes", "contract"], **SOFTMAX)
    assert "larger ones, for lack of time" in report.not_tried["large_sizes"]
    assert "larger ones, for lack of time" in report.text(verbose=True)
    assert report.verdict == "UNDERPOWERED"


def test_a_slow_callable_is_underpowered(monkeypatch):
    monkeypatch.setitem(runner._BUDGET, "quick", 0.02)
    laws = ["frequency_law", "frequency_pairs", "feature_sums", "feature_average", "long_vectors"]
    report = check(
        candidates.kernel, estimator="kernel", checks=["contract", *laws], rng=0, time_limit=60
    )
    assert report.verdict == "UNDERPOWERED"
    assert {r.check for r in report.results if r.status == "UNDERPOWERED"} == {*laws}
    assert "would only detect" in str(report)
    assert re.fullmatch(
        r"too slow: \d+ of 2,000 seeds in [\d.]+ s: --time-limit \d+", report.advice
    )
    assert f"\n  {report.advice}\n" in str(report)


@pytest.mark.parametrize(
    ("tags", "threads", "advised"),
    [
        ({}, "2", False),
        ({"library": "torch"}, "2", True),
        ({"library": "torch"}, "1", False),
        ({"library": "torch", "device": "cuda:0"}, "2", False),
    ],
)
def test_threads_of_torch_are_an_advice_on_a_cpu(monkeypatch, tags, threads, advised):
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    trial = trials.CheckRun(of(plain, "softmax", **tags), "causal", 0, reached=0.5)
    weak = runner.Result("causal", "", "identity", "UNDERPOWERED")
    text = advise([weak], [trial], {"quick": 2000}, "quick", 120.0, 118.0)
    assert text.startswith("too slow: 1,000 of 2,000 seeds in 118 s: --time-limit 240")
    assert ("OMP_NUM_THREADS=1" in text) is advised


@pytest.mark.parametrize(("first", "said"), [(1.0, True), (0.05, False)])
def test_a_candidate_that_is_compiled_for_each_shape_is_recognised(first, said):
    times = {("shape", i): [first, 0.01, 0.01] for i in range(4)}
    trial = trials.CheckRun(of(plain, "softmax"), "causal", 0, reached=0.5, times=times)
    weak = runner.Result("causal", "", "identity", "UNDERPOWERED")
    text = advise([weak], [trial], {"quick": 2000}, "quick", 120.0, 118.0)
    words = "4 s of it in the first call of each of 4 shapes (1 s, later calls 0.01 s"
    assert (words in text) is said
    assert ("compiled for each shape" in text) is said


def test_progress_is_followed_check_by_check():
    seen = []

    def track(checks):
        assert len(checks) == 2
        for item in checks:
            seen.append(item.name)
            yield item
            seen.append("done")

    check(plain, checks=["contract", "value_length"], track=track, **SOFTMAX)
    assert seen == ["contract", "done", "value_length", "done"]


def test_a_run_stops_where_every_call_raises():
    def other(query, key):
        return query

    report = check(other, **SOFTMAX)
    assert [r.check for r in report.results] == ["contract"]
    called = "called as fn(q, k, v) with arrays (n, d) of float64 and numpy"
    assert (
        f"{called} (see --tag layout, --tag dtype, --tag library), defined as fn(query, key)"
        in report.results[0].got
    )
    assert "every call raises: reference_values" in report.text(verbose=True)
    assert "not run: every call raises" in str(report)


def test_keywords_of_another_name_are_one_failure():
    def other(query, key, value, attn_mask=None, is_causal=False):
        return refattn.softmax_attention(query, key, value, mask=attn_mask, causal=is_causal)

    report = check(other, capabilities=["mask"], checks=["mask", "query_without_keys"], **SOFTMAX)
    text = str(report)
    words = "called with mask=, the function takes attn_mask=: wrap it"
    assert text.count(words) == 1
    assert "1 more, which may have the same cause: " in text


def test_a_run_stops_where_every_call_returns_a_tuple():
    report = check(lambda q, k, v: (q, q[..., 0]), **SOFTMAX)
    (result,) = report.results
    assert (result.check, result.severity) == ("contract", "contract")
    assert "a tuple of 2: return out alone, or declare --capability lse" in result.got
    assert "not run: every call returns several results" in str(report)


def test_exceptions_without_words():
    class Wordless(BaseException):
        def __str__(self):
            raise RuntimeError

    def fails(q, k, v):
        raise Wordless

    (result,) = check(fails, checks=["contract"], **SOFTMAX).results
    assert result.status == "FAIL"
    assert result.got.startswith("Wordless: ")


def test_the_same_seed_is_the_same_run(monkeypatch):
    monkeypatch.setitem(runner.LEVELS, "quick", 40)
    given = {"estimator": "kernel", "checks": ["long_vectors", "feature_average"]}
    first, again, other = (check(candidates.kernel, rng=rng, **given) for rng in (5, 5, 6))
    assert [r.p for r in first.results] == [r.p for r in again.results]
    assert [r.p for r in first.results] != [r.p for r in other.results]
    alone = check(candidates.kernel, estimator="kernel", rng=5, checks=["feature_average"])
    assert alone.results[0].p == next(r.p for r in first.results if r.check == "feature_average")
    drawn = [check(plain, estimator="softmax", rng=None, checks=FEW).seed for _ in range(2)]
    assert drawn[0] != drawn[1]


def clipped(q, k, v):
    """Wrong at extreme inputs only."""
    return candidates.averaged(np.clip(candidates.scores(q, k), -60.0, 60.0), v)


@pytest.mark.long
def test_severity_and_what_was_not_tried():
    alone = check(clipped, checks=["extreme_logits"], **SOFTMAX)
    assert alone.verdict == "FAIL"
    assert "right at ordinary inputs" not in str(alone)
    report = check(clipped, checks=[*FEW, "large_logits", "extreme_logits"], **SOFTMAX)
    assert report.severities.keys() == {"range"}
    assert "right at all ordinary inputs that were tried" in str(report)
    assert report.not_tried["mask"] == "needs --capability mask"
    assert report.not_tried["mask_with_causal"] == "needs --capability causal and --capability mask"
    summed = {**SOFTMAX, "capabilities": ["mask"]}
    report = check(candidates.selecting, checks=[*FEW, "hidden_nonsense"], **summed)
    assert report.severities.keys() == {"masked"}
    assert "masked keys or values hold NaN" in str(report)
    assert "max_logit" not in str(report)
    shifted = changed(after=lambda out, *_: out + 0.1)
    report = check(shifted, checks=[*FEW, "queries_apart"], **SOFTMAX)
    assert {r.severity for r in report.results if r.status == "PASS"} == {""}
    assert "formula" in report.severities
    assert "wrong at ordinary inputs" in str(report)


@pytest.mark.long
def test_a_convention_of_causal_attention_is_blamed_once():
    """Top-left attention gives 0 where no key is seen, whatever it takes for the past."""
    top_left = BY_NAME["softmax-causal-top-left"].fn
    names = ["causal", "causal_cross", "query_without_keys"]
    report = check(of(top_left, "softmax", "mask", "causal"), checks=names)
    assert failures(report) == {"causal_cross"}
    declared = of(top_left, "softmax", "mask", "causal", causal="top-left")
    assert check(declared, checks=names).verdict == "PASS"


@pytest.mark.long("orthogonal", "antithetic")
@pytest.mark.parametrize("coupling", ["iid", "orthogonal", "antithetic"])
def test_another_coupling_is_named(monkeypatch, coupling):
    """Where only the distribution of what is drawn is wrong."""
    monkeypatch.setattr(runner, "_FEW_SEEDS", 60)
    if coupling != "orthogonal":  # which fewer seeds do not tell from iid
        monkeypatch.setitem(runner.LEVELS, "quick", 60)
    drawn = partial(refattn.random_feature_attention, coupling=coupling)
    declared = "iid" if coupling == "orthogonal" else "orthogonal"
    found = check(of(drawn, "rfa", coupling=declared), checks=["frequency_pairs"])
    assert found.diagnosis == [f"matches your declaration except that coupling is {coupling}"]


def test_no_other_coupling_is_named_where_a_formula_is_wrong_too(monkeypatch):
    monkeypatch.setitem(runner.LEVELS, "quick", 60)
    wrong = changed(after=lambda out, *_: out + 0.1, fn=refattn.random_feature_attention)
    names = ["frequency_pairs", "weighted_mean"]
    found = check(of(wrong, "rfa", coupling="orthogonal"), checks=names)
    assert failures(found) == set(names)
    assert found.diagnosis == []


@pytest.mark.sweep(3)
@pytest.mark.long("draws")
@pytest.mark.parametrize("able", ["omega_only", "draws"])
@pytest.mark.parametrize("features", ["trigonometric", "hyperbolic", "positive"])
def test_other_features_are_named(monkeypatch, able, features):
    """From results at frequencies that are given, or at seeds."""
    monkeypatch.setattr(runner, "_FEW_SEEDS", 60)
    declared = "positive" if features == "trigonometric" else "trigonometric"
    drawn = partial(refattn.random_feature_attention, features=features)
    adapter = of(drawn, "rfa", *({able} - {"draws"}), features=declared)
    found = check(adapter, checks=["one_function" if able == "draws" else "reference_values"])
    assert found.diagnosis == [f"matches your declaration except that features is {features}"]


def test_a_verdict_names_its_limits():
    tags = {"fixed_frequencies": "yes", "head_sizes": "8", "epsilon": 0.0}
    adapter = of(partial(refattn.random_feature_attention, omega=np.eye(8)), "rfa", **tags)
    assert adapter.limits == {
        "head_sizes=8": "no other length of queries and keys was tested",
        "fixed_frequencies=true": "the distribution of its frequencies was not tested",
    }
    report = check(adapter, checks=["contract"])
    assert "needs frequencies of its own for each seed" in report.not_tried["frequency_law"]
    assert [*of(len, "rfa-trigonometric").limits] == ["own_law"]
    for other in (("rfa-trigonometric", "omega"), ("rfa",), ("ra",), ("softmax", "dropout")):
        assert not of(len, *other).limits
    given = of(refattn.sampled_key_attention, "sampled-norms", "indices_only")
    report = check(given, checks=["all_keys"])
    assert report.limits == {"indices_only": "drawing of keys was not tested"}


def test_nothing_asked_is_no_pass():
    """Where the limits leave no case of a check, it is not tried."""
    adapter = of(refattn.softmax_attention, "softmax", "mask", max_logit=0.5)
    report = check(adapter, checks=["heads_of_other_size"])
    assert report.results == []
    assert report.verdict == "UNDERPOWERED"
    assert report.not_tried["heads_of_other_size"] == "beyond the declared `max_logit`"


def test_candidates_in_half_precision_are_not_said_to_be_right():
    """The allowed error of a solve is all of the result there."""
    adapter = of(lambda q, k, v, indices: 0 * q, "coreset", "indices_only", dtype="float16")
    report = check(adapter, checks=["order_of_given_keys"])
    assert report.verdict == "UNDERPOWERED", str(report)


def refusing(*names):
    """Exact attention that does not take these together."""

    def attention(q, k, v, **options):
        if all(options.get(name) is not None and options.get(name) is not False for name in names):
            raise ValueError("one or the other")
        return refattn.softmax_attention(q, k, v, **options)

    return attention


@pytest.mark.long("names2")
@pytest.mark.parametrize(
    ("names", "able", "verdict"),
    [
        pytest.param(("causal", "mask"), ("mask", "causal"), "PASS", marks=pytest.mark.long),
        (("bias", "mask"), ("mask", "causal", "bias"), "PASS"),
        (("softcap", "bias"), ("mask", "softcap", "bias"), "FAIL"),
    ],
)
def test_a_mask_may_be_refused_with_another(names, able, verdict):
    """As by a library that takes one or the other; that nothing was asked is said."""
    report = check(of(refusing(*names), "softmax", *able), checks=["uses_together"])
    assert report.verdict == verdict, report
    if verdict == "PASS":
        words = f"{names[0]} and mask together, which the function rejects"
        assert words in report.not_tried["uses_together"]


@pytest.mark.long
def test_a_limit_is_suggested_only_where_no_formula_is_wrong_too():
    def clipping(off):
        return lambda q, k, v: clipped(q, k, v) + off

    names = ["reference_values", "extreme_logits"]
    for off, suggested in ((0.0, True), (0.1, False)):
        results = check(clipping(off), checks=names, **SOFTMAX).results
        assert "at queries of norm" in results[1].got
        assert ("max_logit" in results[1].got) is suggested


@pytest.mark.long
def test_pytest_parametrisation():
    def cases(adapter, **options):
        mark = conformance.parametrize_with_checks([adapter], **options)
        return {p.id: p.values[0] for p in mark.args[1]}

    good = cases(Adapter(refattn.softmax_attention, "softmax", name="good"))
    good["good-value_length"]()
    bad = Adapter(lambda q, k, v: v[..., :1, :] + 0 * q, "softmax", name="bad")
    words = r"expected .*\nformula: wrong at ordinary inputs\n"
    words += r"cause: keys 1 to 74 are left out\nrefattn explain reference_values\nscript: "
    with pytest.raises(AssertionError, match=words) as raised:
        cases(bad)["bad-reference_values"]()
    assert raised.traceback.filter(raised)[-1].path.name == "test_runner.py"  # the call is shown
    expecting = cases(bad, expected_failures={"reference_values": "known"})
    with pytest.raises(pytest.xfail.Exception):
        expecting["bad-reference_values"]()
    narrow = cases(Adapter(clipped, "softmax", name="narrow"))
    message = "max_logit=.* leaves them out.\nrange: wrong at extreme inputs only\n"
    with pytest.raises(AssertionError, match=message):
        narrow["narrow-extreme_logits"]()


def test_ids_of_adapters_of_one_name_have_the_tags_that_differ():
    tags = [{"layout": "bhnd", "dtype": x} for x in ("float32", "float16")]
    adapters = [Adapter(refattn.softmax_attention, "softmax", (), x, "mine") for x in tags]
    adapters.append(Adapter(refattn.softmax_attention, "softmax", name="alone"))
    mark = conformance.parametrize_with_checks(adapters)
    ids = {p.id.removesuffix("-value_length") for p in mark.args[1] if "value_length" in p.id}
    assert ids == {"mine-float32", "mine-float16", "alone"}


PRINTING = """
import ctypes, os, sys
import refattn

out = sys.stdout

class Model:
    def __call__(self, q, k, v):
        print("from Python")
        out.write("held")
        os.write(1, b"to the file")
        if os.name == "posix":
            ctypes.CDLL(None).puts(b"from C")
        return refattn.softmax_attention(q, k, v, scale=1.0)

model = Model()
print("imported")
"""


@pytest.mark.long
@pytest.mark.parametrize("words", ["--format=json", "--reproducers"])
def test_what_a_candidate_prints_is_not_in_the_output(tmp_path, words):
    pytest.importorskip("click")
    (tmp_path / "printing_candidates.py").write_text(PRINTING, encoding="utf-8")
    main = "from refattn.cli import main; main()"
    given = ["printing_candidates:model", "--estimator", "softmax", "--check", "value_length"]
    result = subprocess.run(
        [sys.executable, "-c", main, "check", *given, words],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=600,
    )
    if words == "--reproducers":  # which import the instance
        assert "from printing_candidates import model\n\nfn = model\n" in result.stdout
        return
    assert json.loads(result.stdout)["verdict"] == "FAIL", result.stdout
    assert result.returncode == 1
    texts = ("imported", "from Python", "held", "to the file")
    for text in texts + (("from C",) if sys.platform != "win32" else ()):
        assert text in result.stderr, text


def test_json_alone_without_a_file_below(monkeypatch, tmp_path):
    from tests.cli.running import run

    (tmp_path / "printing_here.py").write_text(
        "import refattn\n\ndef fn(q, k, v):\n"
        "    print('printed')\n    return refattn.softmax_attention(q, k, v)\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    words = ("--estimator", "softmax", "--format", "json", "--check", "contract", "--in-process")
    result = run("check", "printing_here:fn", *words)
    assert json.loads(result.stdout)["verdict"] == "PASS"
    assert "printed" in result.stderr
