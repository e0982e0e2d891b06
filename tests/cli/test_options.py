"""What all commands share: formats, tables that fit, times, layouts, names, help and completion."""

import csv
import io
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import refattn
from refattn import cli, compare, naive, profile
from refattn.registry import ESTIMATORS

pytest.importorskip("rich")
pytest.importorskip("safetensors")
testing = pytest.importorskip("click.testing")

from click.shell_completion import ShellComplete  # noqa: E402

from refattn.cli import options, progress  # noqa: E402
from refattn.cli.show import page, records  # noqa: E402


def run(*words, width=80):
    env = {"COLUMNS": str(width)}
    return testing.CliRunner().invoke(cli.commands(), list(map(str, words)), env=env)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A folder with a file of each kind that the examples of the help name."""
    from safetensors.numpy import save_file

    q, k, v = (x[1, :2, :24] for x in refattn.load_sample())
    out = naive.softmax_attention(*(x.astype(float) for x in (q, k, v))).astype(np.float32)
    arrays = {"q": q, "k": k, "v": v, "out": out}
    save_file(
        {x: np.ascontiguousarray(y) for x, y in arrays.items()}, tmp_path / "dump.safetensors"
    )
    np.savez(tmp_path / "qkv.npz", q=q, k=k, v=v)
    swapped = {x: np.swapaxes(y, 0, 1) for x, y in arrays.items()}
    np.savez(tmp_path / "swapped.npz", **swapped)
    monkeypatch.chdir(tmp_path)
    return tmp_path


COMMANDS = {
    "compare": (
        ["compare", "qkv.npz", "--features", "4,40", "--estimators", "rfa,lara", "--draws", "2"],
        records.COMPARISON,
    ),
    "profile": (["profile", "qkv.npz", "--features", "8"], records.PROFILE),
    "measure": (
        ["profile", "qkv.npz", "--measure", "--estimators", "ra", "--most", "4"],
        records.PROFILE,
    ),
    "verify": (["verify", "dump.safetensors"], records.VERIFIED),
    "tolerance": (
        ["tolerance", "qkv.npz", "--dtype", "float16", "--profile", "flash"],
        records.TOLERANCES,
    ),
    "check": (
        ["check", "refattn:softmax_attention", "--estimator", "softmax", "--check", "contract"],
        records.CHECKED,
    ),
}


def without_times(x):
    """A report without what differs from run to run."""
    timed = ("seconds", "ratio", "estimated_seconds", "cost_ratio", "recommended")
    if isinstance(x, dict):
        return {key: without_times(y) for key, y in x.items() if key not in timed}
    return [without_times(y) for y in x] if isinstance(x, list) else x


@pytest.mark.parametrize("name", COMMANDS)
def test_formats(name):
    words, columns = COMMANDS[name]
    shown = run(*words, "--format", "json", "--json", "out.json")
    assert shown.exit_code in (0, 3), shown.output
    written = Path("out.json").read_text("utf-8")
    assert shown.stdout == written
    plain = run(*words, "--json", "other.json", width=60)
    assert without_times(json.loads(Path("other.json").read_text("utf-8"))) == without_times(
        json.loads(written)
    )
    table = run(*words, "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(table.stdout)))
    assert rows
    assert tuple(rows[0]) == columns
    assert all(None not in row and None not in row.values() for row in rows)
    markdown = run(*words, "--format", "markdown").stdout
    assert "─" not in markdown
    assert re.search(r"^\|( ---:? \|)+$" if name != "verify" else "^```$", markdown, re.M)
    assert {shown.exit_code, plain.exit_code, table.exit_code} == {shown.exit_code}


def test_numbers_of_the_csv_are_those_of_the_json():
    words = COMMANDS["compare"][0]
    found = json.loads(run(*words, "--format", "json").stdout)["results"]
    rows = list(csv.DictReader(io.StringIO(run(*words, "--per-head", "--format", "csv").stdout)))
    for x, row in zip(found, rows[: len(found)], strict=True):
        assert (row["estimator"], row["head"]) == (x["estimator"], "")
        assert row["samples"] == ("" if x["samples"] is None else str(x["samples"]))
        for name, key in (("error", "error_mean"), ("standard_error", "standard_error")):
            assert float(row[name]) == x[key]
    heads = [(row["estimator"], row["samples"], row["head"]) for row in rows[len(found) :]]
    assert len(heads) == 2 * len(found)
    per_head = [error for x in found for error in x["error_per_head"]]
    assert [float(row["error"]) for row in rows[len(found) :]] == per_head


def test_standard_errors_are_over_draws():
    words = COMMANDS["compare"][0]
    for x in json.loads(run(*words, "--format", "json").stdout)["results"]:
        means = np.mean(x["error_per_draw"], -1)
        expected = np.std(means, ddof=1) / math.sqrt(2) if x["estimator"] in ESTIMATORS else 0.0
        assert x["standard_error"] == pytest.approx(expected)
    lines = run(*words, width=100).stdout.splitlines()
    assert lines[2].split()[:5] == ["estimator", "S", "mean", "error", "±"]


# --- width


@pytest.mark.parametrize("name", [x for x in COMMANDS if x not in ("verify", "check")])
def test_tables_fit_the_page(name):
    narrow, wide = (run(*COMMANDS[name][0], width=width).stdout for width in (80, 300))
    assert max(map(len, narrow.splitlines())) <= 80
    assert "left out at this width" not in wide
    rest = "left out at this width: names (--format csv has all)"

    def words(text):
        return {x for word in re.findall(r"[^\s\d─]+", text) if len(x := word.strip(",")) > 2}

    assert words(narrow) <= words(wide) | words(rest)  # none is broken


def test_the_least_important_columns_are_left_out():
    table = page.Table("a", "bb", "ccc", "bb", drop=("bb", "ccc"))
    table.add_row("1", "2", "3", "4")
    assert table.fitting(17) == ([0, 1, 2, 3], [])  # 1 + 2 + 3 + 2, and three gaps of 3
    assert table.fitting(16) == ([0, 2], ["bb"])
    assert table.fitting(1) == ([0], ["bb", "ccc"])
    pairs = page.Table("a", "bb", "ccc", "d", drop=(("bb", "d", "e"), "ccc"))
    assert pairs.fitting(8) == ([0, 2], ["bb", "d"])
    assert table.parts(9) == [[0, 1], [0, 2], [0, 3]]
    assert [len(line) for line in page._drawn(table, [0, 1, 2, 3]).splitlines()] == [17] * 3
    narrow, wide = (run("compare", *COMMANDS["compare"][0][1:], width=x).stdout for x in (80, 120))
    assert "left out at this width: which, worst head (--format csv has all)\n" in narrow
    assert "worst head" not in narrow.partition("left out")[0]
    assert "worst head   which" in wide


def test_tables_of_heads_are_split():
    words = [*COMMANDS["compare"][0], "--per-head"]
    narrow, wide = (run(*words, width=width).stdout for width in (40, 200))

    def cells(output):
        return {x for line in output.split("\n\n", 1)[1].splitlines() for x in line.split()[1:]}

    assert {"rfa-iid@4", "lara-balance@4"} <= cells(narrow)
    assert len(re.findall("^head", narrow, re.M)) > len(re.findall("^head", wide, re.M)) == 1


def test_what_is_still_too_wide_is_split():
    table = page.Table("a b", "S", "cccc", "dddd", "", "eeee", drop=("eeee",), keys=2)
    table.add_row("x", "1", "2", "3", "no", "4")
    kept, _ = table.fitting(19)
    assert table.parts(26, kept) == [[0, 1, 2, 3, 4]]
    assert table.parts(19, kept) == [[0, 1, 2], [0, 1, 3, 4]]  # what has no name is not alone
    assert table.name(4, [0, 3, 4]) == ""
    assert table.name(4, [0, 4]) == "dddd"


@pytest.mark.parametrize("width", [32, 40, 60])
@pytest.mark.parametrize("name", ["compare", "profile", "tolerance"])
def test_tables_fit_narrow_pages(name, width):
    words = COMMANDS[name][0]
    shown = run(*words, width=width).stdout.splitlines()
    long = [line for line in shown if len(line) > width]
    assert not long
    if name == "compare" and width < 60:  # rows are told by S too
        heads = [line.split()[:2] for line in shown if line.startswith("estimator")]
        assert len(heads) > 1
        assert all(x == ["estimator", "S"] for x in heads)


@pytest.mark.parametrize("width", [40, 60, 80])
def test_verdicts_fit_the_page(width):
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 24, 8)).astype(np.float32)
    np.savez("wrong.npz", q=q, k=k, v=v, out=1.01 * refattn.softmax_attention(q, k, v))
    shown = run("verify", "wrong.npz", width=width).stdout
    assert max(map(len, shown.splitlines())) <= width
    start = shown[shown.index("FAIL: ") :].splitlines()
    assert start[1].startswith("  ")  # what goes on is indented
    for words in (
        COMMANDS["check"][0],
        ["check", "refattn.naive:rfa", "--estimator", "softmax", "--check", "contract"],
        ["check", "--list"],
        ["check", "--list-specs"],
    ):
        lines = run(*words, width=width).stdout.splitlines()
        whole = run(*words, width=300).stdout
        assert max(map(len, lines), default=0) <= width or width == 40, words
        assert {x for line in lines for x in line.split()} <= {*whole.split()}  # none is broken


def test_where_lines_are_broken(monkeypatch):
    terminal = io.StringIO()
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(sys, "stdout", terminal)
    assert page.limit() is None
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    assert page.limit() == page.width()
    monkeypatch.setattr(sys, "stdout", None)
    assert page.limit() is None
    monkeypatch.setenv("COLUMNS", "33")
    assert page.limit() == 33
    assert page.hanging("  one two three", 9) == "  one two\n      three"


def test_a_pipe_has_one_line_for_each_fact():
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 24, 8)).astype(np.float32)
    np.savez("wrong.npz", q=q, k=k, v=v, out=1.01 * refattn.softmax_attention(q, k, v))
    env = {"COLUMNS": None}
    shown = testing.CliRunner().invoke(cli.commands(), ["verify", "wrong.npz"], env=env).stdout
    assert re.search(r"^FAIL: no correct kernel .* \(profiles tried: .*\)$", shown, re.M)
    assert page.hanging("x" * 50 + " y", None) == "x" * 50 + " y"


def test_what_markdown_and_csv_would_take_for_their_own():
    shown = run("profile", "qkv.npz", "--features", "8", "--format", "markdown").stdout
    assert "\\|mean q\\|" in shown
    assert "||" not in shown
    assert page.to_csv(["a"], [{"a": "x\x1b[31m"}]) == "a\nx\\x1b[31m\n"


def test_the_header_names_types_that_differ():
    q, k, v = (x.astype(np.float32) for x in np.random.default_rng(0).standard_normal((3, 24, 8)))
    mask = np.tril(np.ones((24, 24), bool))
    out = refattn.softmax_attention(q, k, v, mask=mask)
    for other, said in ((out, "out (24, 8)"), (out.astype(np.float16), "out (24, 8) float16")):
        np.savez("types.npz", q=q, k=k, v=v, out=other, mask=mask)
        first = run("verify", "types.npz", width=200).stdout.splitlines()[0]
        assert first == (
            f"types.npz: q (24, 8), k (24, 8), v (24, 8), {said}, mask (24, 24) bool, float32"
        )


def test_more_heads_than_tokens_are_warned_of(capsys):
    for heads, warned in ((8, False), (9, True)):
        options.many_heads(heads, 8, "bhnd")
        assert ("--layout bnhd" in capsys.readouterr().err) is warned


# --- notices, times, some of the queries


def test_numbers_that_overflow_are_not_warned_of():
    found = profile.study(*np.random.default_rng(0).standard_normal((3, 24, 8)), sizes=[4])
    for error, spread in ((math.inf, 0.0), (1e300, 1.0)):  # warnings are errors here
        far = found._replace(error={"rfa": np.array([error])}, spread={"rfa": np.array(spread)})
        assert not math.isfinite(far.standard_errors("rfa")[0])


def test_empty_arrays_are_named():
    x = np.random.default_rng(0).standard_normal((2, 24, 8)).astype(np.float32)
    for name, arrays in {
        "q": {"q": x[:, :0], "k": x, "v": x},
        "k": {"q": x, "k": x[:, :0], "v": x[:, :0]},
    }.items():
        np.savez("empty.npz", **arrays)
        failed = run("compare", "empty.npz")
        said = f"Error: `{name}` must have at least one head and one row, got shape (2, 0, 8).\n"
        assert (failed.exit_code, failed.stderr) == (2, said)
    np.savez("empty.npz", q=x[:0], k=x[:0], v=x[:0])
    assert "Error: `q` must have at least one head" in run("compare", "empty.npz").stderr


def test_what_is_skipped_is_said_once_and_beside_the_results():
    words = ["compare", "qkv.npz", "--features", "4,40,50", "--estimators", "lara,lara-own,rfa"]
    for kind in ("table", "csv", "json", "markdown"):
        result = run(*words, "--format", kind)
        said = "skipped: S = 40, 50 of lara-balance, lara-own (at most 24 here)\n"
        assert result.stderr == said
        assert "skipped: " not in result.stdout
    done = run("compare", "qkv.npz", "--features", 4, "--estimators", "coreset,rfa", "--causal")
    assert done.stderr == "skipped: S = 4 of coreset (does not take `causal`)\n"


def test_quadratic_estimators_are_measured_on_some_queries(monkeypatch):
    words = ["compare", "qkv.npz", "--features", 512, "--estimators", "rfa,ra", "--format", "json"]
    monkeypatch.setattr(compare, "QUADRATIC_PAIRS", 2 * 6 * 24)
    monkeypatch.setattr(compare, "QUADRATIC_QUERIES", 4)
    for more in ([], ["--causal"]):
        result = run(*words, *more)
        assert result.stderr == (
            "ra: on 6 evenly spaced queries of each head, seconds in proportion "
            "(--all-queries takes all)\n"
        )
        few = {x["estimator"]: x for x in json.loads(result.stdout)["results"]}
        result = run(*words, *more, "--all-queries")
        assert result.stderr == ""
        every = {x["estimator"]: x for x in json.loads(result.stdout)["results"]}
        assert few["rfa-iid"]["error_per_head"] == every["rfa-iid"]["error_per_head"]
        assert [(x["ra"]["queries"], x["rfa-iid"]["queries"]) for x in (few, every)] == [
            (6, None),
            (None, None),
        ]
        assert few["ra"]["error_mean"] == pytest.approx(every["ra"]["error_mean"], rel=0.5)


def test_few_queries_see_what_they_saw():
    """Causal attention on some of the queries is that of those of all."""
    q, k, v = (x[1, :2, :24].astype(float) for x in refattn.load_sample())
    posed = compare.pose(q, k, v, causal=True)
    few = compare.on_some(posed, 5)
    np.testing.assert_array_equal(few.taken, [0, 6, 12, 17, 23])
    record = ESTIMATORS["is"]
    found = compare._evaluate(few, record, 8, 0)
    np.testing.assert_allclose(found, compare._evaluate(posed, record, 8, 0)[:, few.taken])


def test_times_are_foreseen():
    q, k, v = (x[1, :2, :100] for x in refattn.load_sample())
    told = []
    found = compare.measure(q, k, v, estimators=["rfa", "ra"], sizes=[8, 64], announce=told.append)
    spent = sum(4 * (row.seconds or 0.0) for row in found.rows)
    assert len(told) == 1
    assert 0.05 < told[0] / spent < 20
    planned = profile.plan(q, k, v, estimators=["rfa"], most=4)
    assert 0 < planned.seconds < 60
    whole = [np.tile(x, (30, 3, 1)) for x in (q, k, v)]
    assert profile.foreseen(*whole) > profile.foreseen(q, k, v) == 0.0


def test_what_takes_long_is_announced(capsys):
    assert progress.LONG == 10  # seconds, as the guide says
    with progress.Work("Working") as work:
        work.estimated(9.9)
        work.estimated(100.0)
    assert capsys.readouterr() == ("", "")
    with progress.Work("Working") as work:
        work.estimated(7000.0, " or more")
        work.estimated(8000.0)
    assert capsys.readouterr() == ("", "estimated time: about 1.2e+02 min or more\n")


def test_the_rest_is_estimated_from_what_is_done(capsys, monkeypatch):
    clock = iter(range(0, 10_000, 20))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    with progress.Work("Working") as work:
        assert list(work.track(range(5))) == list(range(5))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "estimated time: about 100 s"
    assert re.fullmatch(r"Working: \d of 5 after \S+ \S+", lines[1])


@pytest.mark.parametrize("name", ["compare", "verify", "tolerance", "measure"])
def test_commands_announce_their_time(name, monkeypatch):
    monkeypatch.setattr(progress, "LONG", -1.0)
    result = run(*COMMANDS[name][0])
    assert result.stderr.startswith("estimated time: about "), result.stderr


def test_vectors_announce_their_time(monkeypatch):
    pytest.importorskip("mpmath")
    from refattn.conformance.vectors import recipes, solving

    monkeypatch.setattr(progress, "LONG", -1.0)
    monkeypatch.setattr(progress, "_SOON", -1.0)
    seen = []
    monkeypatch.setattr(solving, "_once", lambda recipe: seen.append(recipe.id))
    monkeypatch.setattr(solving, "documents", dict)
    with progress.Work("Solving") as work:
        solving.prepare(work.track)
    assert seen == [recipe.id for recipe in recipes.all_recipes()]
    assert work.announced


def test_checks_say_how_long_they_may_take(monkeypatch, capfd):
    monkeypatch.setattr(progress, "_SOON", -1.0)
    assert run(*COMMANDS["check"][0]).exit_code == 0
    assert "estimated time: at most 2 min (--time-limit sets it)\n" in capfd.readouterr().err


# --- layouts, names


@pytest.mark.parametrize("command", ["compare", "measure", "tolerance", "verify"])
def test_layouts(command):
    words = COMMANDS[command][0]
    file = next(x for x in words if x.startswith(("qkv", "dump")))
    swapped = ["swapped.npz" if x == file else x for x in words]
    plain, found, wrong = (
        run(*x, "--format", "json") for x in (words, [*swapped, "--layout", "bnhd"], swapped)
    )
    assert plain.exit_code == found.exit_code
    expected, got = (json.loads(x.stdout) for x in (plain, found))
    for name in ("results", "heads", "needs", "z"):
        if name in expected:
            assert without_times(got[name]) == without_times(expected[name])
    assert got["shapes"]["q"] == expected["shapes"]["q"]
    assert "warning" not in plain.stderr + found.stderr
    assert (
        "warning: 24 heads of 2 tokens in layout bhnd; if it is the other way round, say --layout "
        "bnhd\n"
    ) in wrong.stderr


def test_layouts_need_an_axis_of_heads():
    np.savez("flat.npz", **dict.fromkeys("qkv", np.ones((4, 2))))
    result = run("compare", "flat.npz", "--layout", "bnhd")
    assert result.exit_code == 2
    assert "`q` must have axes (..., n, h, d) in bnhd, got shape (4, 2)." in result.stderr
    assert run("compare", "flat.npz", "--layout", "nbhd").exit_code == 2


@pytest.mark.parametrize("name", ["performer", "favor"])
def test_performer_is_a_name_of_random_features(name):
    assert ESTIMATORS[name] is ESTIMATORS["rfa"]
    words = ["compare", "qkv.npz", "--features", 4, "--format", "json", "--estimators"]
    found, expected = (json.loads(run(*words, x).stdout)["results"] for x in (name, "rfa"))
    assert without_times(found) == without_times(expected)
    target = ["check", "refattn:random_feature_attention", "--check", "contract", "--estimator"]
    assert run(*target, name).exit_code == 0
    failed = run("verify", "dump.safetensors", "--estimator", name)
    assert "`omega` must be in FILE" in failed.stderr


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["compare", "--estimators", "perfomer"], "performer"),
        (["profile", "--estimators", "lara-balanse"], "lara-balance"),
        (["check", "refattn:attend", "--estimator", "sofmax"], "softmax"),
        (["check", "refattn:attend", "--estimator", "rfa", "--spec", "torch-spda"], "torch-sdpa"),
        (["verify", "dump.safetensors", "--estimator", "lineer"], "linear"),
        (["tolerance", "--profile", "flsh"], "flash"),
    ],
)
def test_names_that_are_close_are_suggested(words, name):
    result = run(*words)
    assert result.exit_code == 2
    assert re.search(rf"Did you mean .*{name}.*\?$", result.stderr.strip())
    unlike = run(*words[:-1], "zzz")
    assert unlike.exit_code == 2
    assert "Did you mean" not in unlike.stderr
    with pytest.raises(ValueError, match=r"got 'perfomer'\. Did you mean performer\?$"):
        compare.record_of("perfomer")


# --- help, completion, `python -m`


def completed(words, start):
    group = cli.commands()
    found = ShellComplete(group, {}, "refattn", "_REFATTN_COMPLETE").get_completions(words, start)
    return [x.value for x in found]


def test_all_may_be_among_names():
    words = ["compare", "qkv.npz", "--features", "4", "--draws", "1", "--format", "csv"]
    found = [run(*words, "--estimators", x).stdout for x in ("all,performer", "performer,all")]
    names = [list(dict.fromkeys(x.split(",")[0] for x in y.splitlines()[3:])) for y in found]
    assert sorted(names[0]) == sorted(names[1])
    assert set(names[0]) <= set(compare.names())
    assert "ra" in names[0]


def test_no_name_is_offered_twice():
    said = run("verify", "dump.safetensors", "--estimator", "softmx").stderr
    assert said.endswith("Did you mean softmax?\n")
    found = completed(["verify", "--estimator"], "")
    assert sorted(set(found)) == sorted(found)


def test_completion():
    assert completed([], "to") == ["tolerance"]
    assert completed(["compare", "--estimators"], "perf") == ["performer"]
    assert completed(["compare", "--estimators"], "ra,lara-o") == ["ra,lara-own"]
    assert completed(["check", "x:y", "--estimator"], "fav") == ["favor"]
    assert "torch-sdpa" in completed(["check", "x:y", "--spec"], "torch")
    assert "scale=" in completed(["check", "x:y", "--tag"], "sc")
    assert completed(["check", "x:y", "--capability"], "caus") == ["causal"]
    assert "flash-fast" in completed(["verify", "--profile"], "flash")
    assert completed(["verify", "--layout"], "b") == ["bhnd", "bnhd"]
    assert "_REFATTN_COMPLETE=bash_source refattn" in run("--help").stdout


def process(*words, **env):
    return subprocess.run(
        [sys.executable, "-m", "refattn", *words],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **env},
    )


def test_the_module_is_the_command_line():
    shown = process("compare", "--help")
    assert shown.stdout.startswith("Usage: refattn compare [OPTIONS] [FILE]\n")
    assert (
        process(_REFATTN_COMPLETE="bash_source").stdout.lstrip().startswith("_refattn_completion")
    )
    found = process(_REFATTN_COMPLETE="bash_complete", COMP_WORDS="refattn ver", COMP_CWORD="1")
    assert found.stdout == "plain,verify\n"


@pytest.mark.parametrize("width", [80, 200])
def test_a_pipe_has_no_colour(width):
    shown = process(*COMMANDS["verify"][0], COLUMNS=str(width))
    assert "\x1b" not in shown.stdout + shown.stderr


@pytest.mark.skipif(os.name != "posix", reason="terminals as of POSIX")
@pytest.mark.parametrize("plain", [False, True])
def test_colour_on_a_terminal(plain):
    import pty

    ours, theirs = pty.openpty()
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm-256color"}
    env = env | ({"NO_COLOR": "1"} if plain else {})
    command = [sys.executable, "-m", "refattn", *COMMANDS["verify"][0]]
    with open(ours, "rb", closefd=True) as terminal:
        done = subprocess.run(command, env=env, stdout=theirs, stderr=subprocess.PIPE, timeout=60)
        os.close(theirs)
        text = terminal.read1(2**16).decode()
    assert done.returncode in (0, 3)
    assert re.search("PASS|UNDERPOWERED", text)
    assert ("\x1b[3" in text) is not plain


def examples():
    for name, command in cli.commands().commands.items():
        lines = re.findall(r"^  refattn (.*)$", command.epilog or "", re.M)
        assert len(lines) in (2, 3), name
        if name != "moments":
            yield from (pytest.param(line, marks=_marks(line)) for line in lines)


def _marks(line):
    slow = ("vectors", "check refattn:random", "check refattn:softmax", "tolerance --dtype")
    slow = (*slow, "profile qkv.npz --measure")
    return [pytest.mark.long] if line.startswith(slow) or line == "compare" else []


@pytest.mark.parametrize("line", list(examples()))
def test_examples_of_the_help(line):
    if "bnhd" in line:  # the same files, with their axes in the other order
        arrays = dict(np.load("swapped.npz"))
        np.savez("qkv.npz", **{x: arrays[x] for x in "qkv"})
        from safetensors.numpy import save_file

        save_file({x: np.ascontiguousarray(y) for x, y in arrays.items()}, "dump.safetensors")
    if line.endswith("--check"):
        run("vectors", "golden", "--format", "npz")
    result = run(*line.split())
    wrong = "--causal --window" in line or "check" in line
    assert result.exit_code in ((0, 1, 3) if wrong else (0, 3)), result.output
    assert "Usage" not in result.output
