"""`refattn compare`, also with --target: what it prints beside the numbers."""

import re
import sys

import numpy as np
import pytest

from refattn import __version__, cli, compare, registry
from refattn.cli import show
from refattn.cli.options import COMMON
from refattn.compare import advice, measured, names, plans
from refattn.compare.measured import DEFAULT
from refattn.files import sample
from refattn.registry import ESTIMATORS
from tests.cli.running import cells, loads, process, report, run, shown
from tests.cli.test_unusable import refused
from tests.validation import guide_blocks

pytestmark = pytest.mark.usefixtures("here")


def in_guide(words):
    """What the guide shows for `refattn compare` and these words."""
    return guide_blocks.page("choose").split(f"$ refattn compare{words}\n")[1].split("```")[0]


@pytest.mark.long
def test_comparison_of_the_sample():
    output = shown("compare")
    lines = output.splitlines()
    assert lines[0].startswith("minilm_zen128_slice.npz: q (2, 4, 128, 32)")
    assert "float32" in lines[0]
    assert lines[1].startswith("scale 0.176777, not causal, seed 0, draws 3")
    assert " ".join(lines[2].split()) == (
        "estimator samples error_mean standard_error error_worst worst_head seconds ratio "
        "error_tolerated"
    )
    assert "; error_tolerated: mean error in all layers of all-MiniLM-L6" in lines[-4]
    assert lines[-1] == "next: refattn verify FILE judges the output of a kernel"
    assert " ".join(lines[-3:-1]) == (
        "On these tensors rfa-iid from S = 512, rfa-orthogonal from S = 128, rfa-adapted from S = "
        "32, lara-balance from S = 128, lara-mean, ra, ra-mean and eva beat the mean of v. rfa-iid "
        "at S = 128 is within two standard errors of it."
    )
    rows, known = (cells(x, "estimator") for x in (output, in_guide("")))
    assert rows[0][-1] == "1.00"
    for row, expected in zip(rows, known, strict=True):
        at = 1 + (row[0] in ESTIMATORS and ESTIMATORS[row[0]].size is not None)
        assert row[:at] == expected[:at]
        np.testing.assert_allclose(float(row[at]), float(expected[at]), 0.02, 1e-6)
    assert max(map(len, lines[:-4])) <= 120  # the rows of the table
    assert not any("…" in line for line in lines)


def test_json_is_strict_where_an_estimate_overflows(monkeypatch):
    record = ESTIMATORS[DEFAULT[0]]._replace(fn=lambda q, k, v, **options: np.inf * q)
    monkeypatch.setitem(ESTIMATORS._records, DEFAULT[0], record)
    row = report("compare", "qkv.npz", "--features", 4)["results"][2]
    assert row["estimator"] == DEFAULT[0]
    assert row["error_mean"] is row["error_worst"] is row["error_per_head"][0] is None


def test_narrow_dtypes_are_said_to_be_widened():
    np.savez("half.npz", **{x: y.astype(np.float16) for x, y in np.load("qkv.npz").items()})
    words = ["compare", "half.npz", "--features", 2, "--estimators", "ra"]
    for more, dtype, said in (
        ([], "float32", "read as float32: the file has float16\n"),
        (["--dtype", "float32"], "float32", ""),
        (["--dtype", "float64"], "float64", ""),
    ):
        result = run(*words, *more, "--format", "json")
        assert (loads(result.stdout)["dtype"], result.stderr) == (dtype, said)


def test_tables_of_heads():
    words = ("--features", "2,4", "--estimators", "ra", "--per-head", "--draws", 1)
    lines = shown("compare", "qkv.npz", *words).splitlines()
    start = lines.index("error_per_head") + 1
    assert lines[start].split() == ["head", "exact", "mean", "of", "v", "ra@2", "ra@4"]
    assert [line.split()[0] for line in lines[start + 2 : -1]] == ["0", "1"]
    assert shown("compare", "flat.npz", *words).splitlines()[-2].startswith("-  ")


def test_version_and_help():
    assert shown("--version") == f"refattn, version {__version__}\n"
    text = "".join(shown("compare", "--help").split())
    assert all(name in text and ESTIMATORS[name].approximates for name in COMMON)
    assert f"[default:{','.join(DEFAULT)};" in text
    listed = shown("check", "--list")
    assert all(name in listed for name in names())
    done = run("profile")
    assert done.exit_code == 2
    assert "No such command 'profile'" in done.stderr


def test_what_is_not_installed(here, monkeypatch, capsys):
    install = "needs `pip install 'refattn[cli]'`"
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for words in ((), ("--target", 0.1)):
        assert f"--plot {install}" in refused("compare", *words, "--plot", "out.png")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert f"reading .safetensors {install}" in refused("compare", "dump.safetensors")
    monkeypatch.setattr(sample, "_NAME", "nothing.npz")
    assert "FILE must be given: the sample nothing.npz is not installed" in refused("compare")
    for name in ("rich", "click"):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 2
        assert capsys.readouterr().err == f"refattn: error: the command line {install}\n"


@pytest.mark.long
@pytest.mark.long("bad")
@pytest.mark.parametrize("kind", ["good", "bad"])
def test_a_process_without_warnings_in_ascii(kind):
    env = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"}
    more = ["--features", "2", "--estimators", "ra"] if kind == "good" else ["--scale=0"]
    done = process("compare", "qkv.npz", *more, env=env, python=["-W", "error"])
    assert done.stdout.isascii()
    if kind == "good":
        assert (done.returncode, done.stderr) == (0, "")
    else:
        assert (done.returncode, done.stdout) == (2, "")
        assert re.fullmatch("Error: --scale must be a positive.*\n", done.stderr)


def test_skipped_sizes_are_said_once_and_beside_the_results():
    words = ["compare", "qkv.npz", "--features", "4,40,50", "--estimators", "lara,lara-own,rfa"]
    said = "skipped: S = 40, 50 of lara-balance, lara-own (at most 24 here)\n"
    for kind in ("table", "csv", "json", "markdown"):
        result = run(*words, "--format", kind)
        assert result.stderr == said
        assert "skipped: " not in result.stdout
    done = run("compare", "qkv.npz", "--features", 4, "--estimators", "coreset,rfa", "--causal")
    assert done.stderr == "skipped: S = 4 of coreset (does not take `causal`)\n"


def test_slow_estimators_are_left_out_unless_they_are_named(monkeypatch):
    """At S above 100; what is left out takes no time, and is in the table if it is named."""
    monkeypatch.setattr(registry.own, "DEFAULT", ("ra", "rfa-iid"))
    monkeypatch.setattr(registry, "DEFAULT", ("ra", "rfa-iid"))
    words = ["compare", "qkv.npz", "--features", "100,101", "--draws", 1]
    said = "skipped: S = 101 of ra (over 100 times the multiply-adds of exact attention)"
    done = run(*words)
    assert done.stderr == f"{said}; --estimators all has them\n"
    assert "101" not in [x.split()[1] for x in done.stdout.splitlines() if x.startswith("ra ")]
    done = run(*words, "--estimators", "ra")
    assert done.stderr == ""
    assert [x.split()[1] for x in done.stdout.splitlines() if x[:3] == "ra "] == ["100", "101"]


@pytest.mark.parametrize("more", [(), ("--causal",)])
def test_quadratic_estimators_are_measured_on_some_queries(monkeypatch, more):
    words = ["compare", "qkv.npz", "--features", 128, "--estimators", "rfa,ra", "--format", "json"]
    monkeypatch.setattr(measured, "QUADRATIC_PAIRS", 2 * 6 * 24)
    monkeypatch.setattr(measured, "QUADRATIC_QUERIES", 4)
    few, every = (run(*words, *more, *x) for x in ((), ("--all-queries",)))
    said = "ra: on 6 evenly spaced queries of each head, seconds in proportion "
    assert (few.stderr, every.stderr) == (f"{said}(--all-queries takes all)\n", "")
    (*_, few_rfa, few), (*_, rfa, ra) = (loads(x.stdout)["results"] for x in (few, every))
    assert few_rfa["error_per_head"] == rfa["error_per_head"]
    assert [x["queries"] for x in (few_rfa, few, rfa, ra)] == [None, 6, None, None]
    assert few["error_mean"] == pytest.approx(ra["error_mean"], rel=0.5)


@pytest.mark.long("all")
@pytest.mark.parametrize("other", ["all", "favor", "rfa", "performer"])
def test_other_names_of_estimators(other):
    """`all` may be among names, in any order, and is never there twice."""
    words = ["compare", "qkv.npz", "--features", "4", "--draws", "1", "--estimators"]
    seen = [x["estimator"] for x in report(*words, f"{other},performer")["results"]][2:]
    assert seen == list(dict.fromkeys(seen))
    expected = set(names()) if other == "all" else {ESTIMATORS[other].name, "rfa-orthogonal"}
    assert {"rfa-orthogonal"} <= set(seen) <= expected
    assert other != "all" or "ra" in seen


# --- the estimator to use

RECOMMEND = ("compare", "--target", 0.1)


@pytest.mark.long
def test_profile_of_the_sample_is_that_of_the_guide():
    output = shown(*RECOMMEND, width=100)
    assert output == shown(*RECOMMEND, width=100)
    lines = output.splitlines()
    assert lines[0].startswith("minilm_zen128_slice.npz: q (2, 4, 128, 32)")
    assert lines[1] == "scale 0.176777, covariances not shrunk, not causal; n = 128, m = 128"
    assert lines[2] == "N = 128 rows < d^2 = 1024: covariances are rough"
    assert "effective sample size below 10" in output
    assert lines[-2].startswith("recommended for relative error 0.1, by the formulas")
    assert lines[-1] == "exact attention, for 8 of 8 heads"
    assert max(map(len, lines)) <= 100
    assert not any(word in output for word in ("…", "inf", "nan"))
    assert not guide_blocks.difference(in_guide(" --target 0.1"), shown(*RECOMMEND, width=80))


@pytest.mark.long("measured")
@pytest.mark.parametrize("more", [(), ("--measure", "--estimators", "eva")], ids=["", "measured"])
def test_no_estimator_is_recommended_where_the_mean_of_v_is_enough(more):
    *_, first, last = shown("compare", "--target", 0.95, *more).splitlines()
    assert first.endswith("for relative error 0.95: the mean of v, whose error is at most 0.910")
    assert last == "at this error these tensors do not need attention"
    assert "mean of v, whose" not in shown("compare", "--target", 0.9, *more)  # not in each head


@pytest.mark.long
def test_the_guide_shows_what_is_measured():
    command = re.search(r"\$ refattn compare( --target 0\.3 -.*)", guide_blocks.page("choose"))[1]
    texts = in_guide(command), shown("compare", *command.split(), width=120)
    for row, printed in zip(*(cells(x, "measured") for x in texts), strict=True):
        assert row[:2] == printed[:2]
        numbers, expected = ([float(x) for x in y[2:5]] for y in (row, printed))
        np.testing.assert_allclose(numbers, expected, 0.02)


def profiled(*words, width=120, **arrays):
    np.savez("other.npz", **arrays)
    return shown(*RECOMMEND, "other.npz", *words, width=width)


def test_advice_on_the_number_of_rows():
    q, k = np.random.default_rng(0).standard_normal((2, 3, 40, 3)) / 2
    output = profiled(q=q[:, :30], k=k)
    assert "n = 30, m = 40; N > d^2 = 9, as" in output
    left_out = "\nFILE has no v: predicted errors and the recommendation are left out.\n"
    assert output.endswith(left_out)
    assert "predictions" not in output
    rough = "covariances are rough\n"
    assert f"n = 9, m = 40\nN = 9 rows <= d^2 = 9: {rough}" in profiled(q=q[:, :9], k=k)
    assert f"\nN = 5 and 6 rows < d^2 = 9: {rough}" in profiled(q=q[:, :5], k=k[:, :6])


def test_recommendations_are_printed():
    output = shown(*RECOMMEND, "easy.npz", "--target", 1e-4)
    assert output.endswith("--measure tries it):\nexact attention, for 2 of 2 heads\n")
    price = r"0\.\d+ times the cost of exact attention \(median\)"
    line = rf"\nrfa(-adapted)? with S = \d+, {price}, for 2 of 2 heads\n$"
    q, k = np.random.default_rng(0).standard_normal((2, 2, 200, 3)) / 2
    assert re.search(line, profiled("--target", 0.4, q=q, k=k, v=k))


def test_measured_on_some_of_the_data(monkeypatch):
    monkeypatch.setattr(plans, "PAIRS", 24 * 24)
    monkeypatch.setattr(plans, "QUADRATIC_QUERIES", 5)
    words = ("--measure", "--estimators", "ra,lara", "--most", 16, "--target", 1e-3)
    output = shown(*RECOMMEND, "easy.npz", *words)
    assert "heads, evenly spaced: 0\n" in output
    assert "ra: on 5 evenly spaced queries of each head\n" in output
    assert [row[1] for row in cells(output, "measured")] == ["> 16", "> 16"]
    assert output.endswith("as measured on 1 of 2 heads:\nexact attention\n")


def test_outside_the_regime_no_number_is_shown():
    q, k, v = 20 * np.random.default_rng(0).standard_normal((3, 8, 4))
    output = profiled("--features", "4,16", q=q, k=k, v=v)
    assert all(row[1] == "- (0%)" for row in cells(output, "predictions"))
    assert "-: the formula is not valid there (effective sample size below 10)" in output
    assert "inf" not in output
    assert cells(output, "num_features_by_law")[0][1] == "-"
    seen = report(*RECOMMEND, "other.npz", "--features", 4)
    by_name = {x["estimator"]: x for x in seen["predictions"]}
    assert by_name["rfa"]["error_mean"] is by_name["rfa"]["error_per_head"] is None
    assert seen["heads"][0]["num_features_by_law"]["rfa"] is None


def test_a_constant_has_no_rank():
    pytest.importorskip("matplotlib")
    x = np.ones((1, 3))
    output = profiled("--plot", "out.png", q=x, k=x, v=x)
    assert "nan" not in output
    assert cells(output, "moments")[0][7] == "-"
    head = report(*RECOMMEND, "other.npz")["heads"][0]
    assert head["moments"]["effective_rank_q"] is None


def test_what_is_taken_of_the_rows_is_said(monkeypatch):
    output = shown(*RECOMMEND, "easy.npz")
    assert "evenly spaced" not in output
    assert "±" not in output
    for module in (advice, show.advice):
        monkeypatch.setattr(module, "QUANTILE_ROWS", 20)
    monkeypatch.setattr(advice, "LAW_QUERIES", 3)
    output = shown(*RECOMMEND, "easy.npz", "--features", 4000)
    assert "quantiles: over at most 20 evenly spaced queries and keys\n" in output
    assert "predicted for 3 evenly spaced queries of each head, and all keys;\n" in output
    found = compare.study(*np.load("easy.npz").values(), sizes=[4000])
    for name, cell in zip(compare.advice.LAWS, cells(output, "predictions")[0][1:], strict=True):
        error, spread = map(float, cell.split(" ± "))
        assert error == pytest.approx(found.predictions(name)[0], rel=6e-3)
        assert spread == pytest.approx(found.standard_errors(name)[0], rel=0.34)  # one digit
