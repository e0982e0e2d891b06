"""What all commands share: formats, layouts, names, help and completion."""

import csv
import io
import math
import os
import re
import shutil
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from click.shell_completion import ShellComplete

from refattn import __version__, cli, compare
from refattn.cli.group import COMMANDS
from refattn.judge.verification import tolerances
from tests.cli.commands import LINES, output, returned
from tests.cli.running import cells, headings, loads, process, run

pytestmark = pytest.mark.usefixtures("here")


# --- formats: JSON is what the function returned, and tables are the JSON


def pairs(x, key=""):
    """Every number, and the key or name of the attribute that it has, in something nested."""
    if isinstance(x, (dict, tuple)) and (isinstance(x, dict) or hasattr(x, "_asdict")):
        for name, y in (x if isinstance(x, dict) else x._asdict()).items():
            yield from pairs(y, name)
    elif isinstance(x, (list, tuple, np.ndarray)):
        for y in x:
            yield from pairs(y, key)
    elif isinstance(x, (bool, int, float, np.number)) and np.isfinite(x):
        yield key, float(x)


def numbers(x):
    return {number for _, number in pairs(x)}


def assert_says(seen, name):
    """JSON has every number that the function of a command returned, by its name where it has."""
    if name in ("verify", "check"):
        found = loads(returned(name, {"verify": "judge_all", "check": "check"}[name]).to_json())
        assert found == {key: seen[key] for key in found}
    elif name == "compare":
        found = returned(name, "measure")
        assert numbers(found) <= numbers(seen)
        for row, x in zip(found.rows, seen["results"], strict=True):
            assert (row.estimator, row.samples) == (x["estimator"], x["samples"])
            assert (row.errors.tolist(), row.seconds) == (x["error_per_draw"], x["seconds"])
            assert (row.per_head.mean(), row.per_head.max()) == (x["error_mean"], x["error_worst"])
            assert x["standard_error"] == (row.standard_error if row.samples else 0)
            assert x["ratio"] == (row.seconds and row.seconds / found.rows[0].seconds)
            assert x["error_tolerated"] == compare.tolerated().errors.get(row.estimator)
    elif name == "tolerance":
        assert numbers(returned(name, "find_tolerance")) <= numbers(seen)
    else:
        found, inside = returned(name, "study"), {*pairs(seen)}
        assert numbers(found._replace(rows=())) <= numbers(seen) | {float(found.sizes[0])}
        assert {*pairs([found.table, found.excess, found.by_law, found.holds_from])} <= inside
        assert seen["count"] == {"q": found.rows[0], "k": found.rows[1]}
        assert seen["enough"] == {"q": True, "k": True}
        for head, x in zip(found.heads, seen["heads"], strict=True):
            assert (x["head"], x["recommended"]) == ([*head], found.recommended(head)._asdict())
        for x in seen["predictions"]:
            mean = found.predictions(x["estimator"])[found.sizes.index(x["samples"])]
            assert x["error_mean"] == (None if math.isnan(mean) else mean)
        assert (seen["measured"] is None) == (name == "advice")
        if name == "measure":
            found, measured = returned(name, "search"), seen["measured"]
            assert measured["recommended"] == found.ranking[0]._asdict()
            for candidate, x in zip(found.candidates, measured["estimators"], strict=True):
                assert (candidate.estimator, candidate.reached) == (x["estimator"], x["reached"])
                assert candidate.choice.cost_ratio == x["cost_ratio"]
                for row, y in zip(candidate.steps, x["steps"], strict=True):
                    assert (row.samples, row.seconds) == (y["samples"], y["seconds"])
                    assert row.per_head.tolist() == y["error_per_head"]
                    assert np.mean(row.errors) == y["error_mean"]
                    assert found.standard_error(row) == y["standard_error"]


def tables(name, seen):
    """Beginnings of lines, and the rows of the tables below them, from the JSON."""
    if name == "compare":
        keys = ("estimator", "samples", "error_mean", "standard_error", "error_worst", "worst_head")
        rows = [[x[y] for y in (*keys, "seconds", "ratio")] for x in seen["results"]]
        for row, x in zip(rows, seen["results"], strict=True):
            row[3] = row[3] or None  # nothing is drawn
            row[5] = str(x["worst_head"][0])
            row += [x["error_tolerated"]]
        yield "estimator", rows
    elif name in ("advice", "measure"):
        heads = seen["heads"]
        for part in ("moments", "log_excess"):
            columns = [[x[part][y] for x in heads] for y in heads[0][part]]
            worst = [(min if "rank" in x else max) for x in heads[0][part]]
            rows = [[str(i), *x] for i, x in enumerate(zip(*columns, strict=True))]
            rows += [["median", *map(np.median, columns)]]
            yield part, [*rows, ["worst", *(f(x) for f, x in zip(worst, columns, strict=True))]]
        yield "predictions", list(predicted(seen["predictions"]))
        for part in ("num_features_by_law", "law_holds_from"):
            yield part, [[str(i), *x[part].values()] for i, x in enumerate(heads)]
        if name == "measure":
            keys = ("error_mean", "standard_error", "error_worst", "seconds", "cost_ratio")
            rows = []
            for x in seen["measured"]["estimators"]:
                last = x["steps"][-1]
                samples = str(last["samples"]) if x["reached"] else f"> {last['samples']}"
                rows.append([x["estimator"], samples, *(last[y] for y in keys)])
            yield "measured", rows
    elif name == "tolerance":
        needs = [list(flat(x).values()) for x in seen["needs"]]
        yield "needs", [[x[0], *x[2:4], x[5], x[4], x[7], x[6]] for x in needs]  # rtol, atol
        rows = []
        for x in seen["power"]:
            tried = [(x[y], "fails" if x[y] > 1 else "passes") for y in ("given", "ours")]
            row = [x["defect"], x["size"] or None, *tried, x["verdict"], x["suspect"] or None]
            rows.append(row)
        yield "power", rows


def predicted(entries):
    for samples in dict.fromkeys(x["samples"] for x in entries):
        row = [samples]
        for x in entries:
            if x["samples"] == samples:
                share = math.floor(100 * x["share_in_regime"])
                row.append(f"- ({share}%)" if x["error_mean"] is None else x["error_mean"])
        yield row


def flat(row):
    """The values of a row of JSON by the names that CSV has for them."""
    found = {}
    for name, x in row.items():
        found |= (
            {f"{name}.{y}": z for y, z in flat(x).items()} if isinstance(x, dict) else {name: x}
        )
    return found


def records(name, seen):
    """The rows of the CSV, from the JSON."""
    if name == "compare":
        return seen["results"]
    if name == "verify":
        places = [{"row": dict(zip(("where", "p"), x, strict=True))} for x in seen["rows"]]
        suspects = [{"suspects": x} for x in seen["suspects"] or [{}]]
        return [seen | {"suspects": {}} | x for x in suspects + places]
    if name == "check":
        rest = {"status": "NOT TRIED"}
        others = [{"check": x, "reason": y, "finding": y} for x, y in seen["not_tried"].items()]
        return seen["results"] + [x | rest for x in others]
    parts = ("needs", "power") if name == "tolerance" else ("heads", "predictions")
    rows = [{"table": part, **x} for part in parts for x in seen[part]]
    for x in seen["measured"]["estimators"] if name == "measure" else ():
        rows += [{"table": "measured", **y} for y in x["steps"]]
    return rows


def written(x):
    """A cell of CSV."""
    if isinstance(x, list):
        return "; ".join(x) if x and isinstance(x[0], str) else ",".join(map(str, x))
    return "" if x is None else str(x)


def words(x):
    """Every key and every text in something nested."""
    if isinstance(x, dict):
        return {*x}.union(*map(words, x.values()))
    return {x} if isinstance(x, str) else set().union(*map(words, x if isinstance(x, list) else ()))


def assert_cell(cell, value):
    """A number is rounded to the digits that a cell has."""
    if isinstance(value, tuple):
        value, word = value
        assert cell.endswith(f" {word}")
        cell = cell.removesuffix(word)
    if isinstance(value, str):
        assert cell == value
    else:
        unit = 10.0 ** Decimal(cell.strip()).as_tuple().exponent
        assert abs(float(cell) - value) <= 0.501 * unit


@pytest.mark.sweep(2)
@pytest.mark.long("tolerance")
@pytest.mark.parametrize("name", LINES)
def test_every_format_has_the_numbers_of_the_function(name):
    text = output(name, "--format", "json", "--json", "out.json")
    assert text == Path("out.json").read_text("utf-8")
    seen = loads(text)
    assert_says(seen, name)
    shape = {"tolerance": [24, 32], "advice": [2, 24, 3], "measure": [2, 24, 3]}
    if name != "check":
        assert (seen["refattn"], seen["numpy"]) == (__version__, np.__version__)
        assert seen["file"] == LINES[name].split()[1]
        assert [seen["shapes"][x] for x in "qkv"] == [shape.get(name, [2, 24, 32])] * 3
    for title, rows in tables(name, seen):
        printed = cells(output(name), title)
        for got, row in zip(printed, rows, strict=True):
            for cell, value in zip(got, [x for x in row if x is not None], strict=True):
                assert_cell(cell, value)
    markdown = output(name, "--format", "markdown")
    assert "─" not in markdown
    rules = list(re.finditer(r"^\|( ---:? \|)+$" if name != "verify" else "^```$", markdown, re.M))
    assert rules
    names = headings(output(name))
    if name == "check":
        names = re.findall(r"[^| ]+", markdown[: rules[0].start()].splitlines()[-1])
        assert len(names) == 3
    known = words(seen)
    assert all(part in known for heading in names for part in heading.split("."))
    found = list(csv.DictReader(io.StringIO(output(name, "--format", "csv"))))
    expected = records(name, seen)
    assert len(found) == len(expected) > 0
    for row, x in zip(found, map(flat, expected), strict=True):
        assert row == {key: written(x.get(key)) for key in row}
        assert "" not in row
        assert sum(map(bool, row.values())) > 2


def test_errors_of_heads():
    found = loads(output("compare", "--format", "json"))["results"]
    rows = list(csv.DictReader(io.StringIO(output("compare", "--per-head", "--format", "csv"))))
    of_heads = [row for row in rows if row["head"]]
    assert len(rows) - len(of_heads) == len(found)
    expected = [
        (x["estimator"], written(x["samples"]), str(i), str(error))
        for x in found
        for i, error in enumerate(x["error_per_head"])
    ]
    keys = ("estimator", "samples", "head", "error_mean")
    assert [tuple(row[x] for x in keys) for row in of_heads] == expected
    names = {"head", "exact", "mean of v", "rfa-iid@4", "lara-balance@4"}
    assert names <= {*headings(output("compare", "--per-head"))}


def test_titles_and_answers():
    lines = output("measure").splitlines()
    measured = loads(output("measure", "--format", "json"))["measured"]
    line = (
        f"measured 2 estimators, S = 1, 2, 4, ... up to 4, {measured['draws']} draws, on 2 heads: "
    )
    assert f"{line}the smallest power of 2 that reaches relative error 0.1" in lines
    assert "recommended for relative error 0.1: the mean of v, whose error is at most" in "\n".join(
        lines
    )
    assert "at this error these tensors do not need attention" in lines
    q, k, v = np.load("easy.npz").values()
    np.savez("no_mean.npz", q=q, k=k, v=v - np.mean(v, axis=-2, keepdims=True))
    again = LINES["measure"].replace("easy", "no_mean")
    lines = run(*again.split(), "--json", "measured.json", width=200).stdout.splitlines()
    measured = loads(Path("measured.json").read_text("utf-8"))["measured"]
    assert "recommended for relative error 0.1, as measured on 2 of 2 heads:" in lines
    ratios = {x["cost_ratio"]: x["estimator"] for x in measured["estimators"] if x["reached"]}
    ratios[1.0] = "exact attention"
    best = ratios[min(ratios)]
    assert measured["recommended"]["estimator"] == best
    answer = lines[[x.startswith("recommended") for x in lines].index(True) + 1]
    assert answer.startswith(best)


def test_a_tolerance_is_one_table(monkeypatch):
    """Known bugs, which take nearly all of the time, are simulated only if somebody sees them."""
    seen, simulated = [], tolerances._try_defect
    monkeypatch.setattr(tolerances, "_try_defect", lambda *x: seen.append(x) or simulated(*x))
    done = run("tolerance", "flat.npz", "--dtype", "float16", "--profile", "flash")
    lines = done.stdout.splitlines()
    assert sum(set(x) == {"─"} for x in lines) == 1
    assert lines[-3].startswith("torch's default (atol 1.00e-05, rtol 0.00100) would reject a ")
    fused = r"recommended for a fused kernel \(profile flash\): atol \S+, rtol 0\.\d+"
    assert re.fullmatch(fused, lines[-2])
    assert lines[-1].startswith("--verbose: ")
    assert len(seen) == 1


def test_the_header_names_types_that_differ():
    arrays = dict(np.load("right.npz"))
    mask = np.ones((24, 24), bool)
    for dtype, said in (("float32", ""), ("float16", " float16")):
        np.savez("types.npz", **arrays | {"out": arrays["out"].astype(dtype), "mask": mask})
        first = run("verify", "types.npz").stdout.splitlines()[0]
        shape = "(2, 24, 32)"
        assert first == (
            f"types.npz: q {shape}, k {shape}, v {shape}, out {shape}{said}, mask (24, 24) bool, "
            "others float32"
        )


LAYOUTS = {  # a command, and what does not depend on the layout
    "compare qkv.npz --features 4 --estimators ra --draws 1": "results",
    "compare qkv.npz --target 0.1 --measure --estimators ra --most 2": "heads",
    "tolerance qkv.npz --dtype bfloat16 --profile flash": "needs",
    "verify right.npz": "z",
}


@pytest.mark.long("heads", "needs")
@pytest.mark.parametrize(("line", "key"), LAYOUTS.items())
def test_layouts(line, key):
    command, _, *words = line.split()
    swapped = [command, "swapped.npz", *words]
    plain, found = (
        run(*x, "--format", "json") for x in (line.split(), [*swapped, "--layout", "bnhd"])
    )
    assert plain.exit_code == found.exit_code
    assert "warning" not in plain.stderr + found.stderr
    expected, got = (loads(x.stdout) for x in (plain, found))
    assert got["shapes"]["q"] == expected["shapes"]["q"]
    if key == "results":  # times differ
        for x, y in zip(got[key], expected[key], strict=True):
            assert x["error_per_head"] == y["error_per_head"]
    else:
        assert got[key] == expected[key]
    if key in ("results", "z"):
        assert (
            "warning: 24 heads of 2 tokens in layout bhnd look transposed; if so, pass "
            "--layout bnhd\n"
        ) in run(*swapped).stderr


# --- help, completion, `python -m`


def completed(line):
    *words, start = line.split(" ")
    complete = ShellComplete(cli.commands(), {}, "refattn", "_REFATTN_COMPLETE")
    return [x.value for x in complete.get_completions(words, start)]


def test_completion():
    assert completed("to") == ["tolerance"]
    assert completed("compare --estimators perf") == ["performer"]
    assert completed("compare --estimators ra,lara-o") == ["ra,lara-own"]
    assert completed("check x:y --estimator fav") == ["favor", "favor+", "favor++", "favor#"]
    assert "torch-sdpa" in completed("check x:y --spec torch")
    assert "scale=" in completed("check x:y --tag sc")
    assert completed("check x:y --capability caus") == ["causal"]
    assert "flash-fast" in completed("verify --profile flash")
    assert completed("verify --layout b") == ["bhnd", "bnhd"]
    found = completed("verify --estimator ")
    assert found
    assert sorted(set(found)) == sorted(found)
    assert "_REFATTN_COMPLETE=bash_source refattn" in run("--help").stdout


COMPLETE = {"_REFATTN_COMPLETE": "bash_complete", "COMP_WORDS": "refattn ver", "COMP_CWORD": "1"}


@pytest.mark.long("words1", "words2")
@pytest.mark.parametrize(
    ("words", "env", "start"),
    [
        (["compare", "--help"], {}, "Usage: refattn compare [OPTIONS] [FILE]\n"),
        ([], {"_REFATTN_COMPLETE": "bash_source"}, "_refattn_completion"),
        ([], COMPLETE, "plain,verify\n"),
    ],
)
def test_the_module_is_the_command_line(words, env, start):
    assert process(*words, env=env).stdout.lstrip().startswith(start)


@pytest.mark.long
@pytest.mark.skipif(os.name != "posix", reason="terminals as of POSIX")
def test_colour_on_a_terminal():
    import pty

    ours, theirs = pty.openpty()
    done = process(*LINES["verify"].split(), out=theirs, env={"TERM": "xterm-256color"})
    os.close(theirs)
    with open(ours, "rb", closefd=True) as terminal:
        text = terminal.read1(2**16).decode()
    assert done.returncode in (0, 3)
    assert re.search("\x1b\\[3.*(PASS|UNDERPOWERED)", text)


SLOW = ("audit", "vectors", "check refattn:random", "check refattn:softmax", "tolerance")


def examples():
    for name in COMMANDS:
        command = cli.commands().get_command(None, name)
        lines = re.findall(r"^  refattn (.*)$", command.epilog or "", re.M)
        assert len(lines) in (2, 3), name
        for line in lines:
            slow = "--target" in line or "--layout" in line or line.startswith(SLOW)
            yield pytest.param(line, marks=[pytest.mark.long] * slow)


def write_audited():
    """Write a kernel with two tests that look at shapes only."""
    kernel = "from refattn.naive.softmax import softmax_attention as flash\nx = np.ones((2, 4, 3))"
    check = "assert flash(x, x, x).shape == x.shape"
    Path("tests").mkdir()
    for path, text in (
        ("mykernels.py", f"import numpy as np\n{kernel}"),
        ("check_attn.py", f"from mykernels import flash, x\n{check}"),
        ("tests/test_attn.py", f"from mykernels import *\ndef test_forward():\n    {check}"),
    ):
        Path(path).write_text(text)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("line", [*examples()])
def test_examples_of_the_help(line):
    if "bnhd" in line:  # the same files, with their axes in the other order
        shutil.copy("swapped.npz", "qkv.npz")
        line = line.replace("dump.safetensors", "swapped.npz")
    if line.endswith("--check"):
        run("vectors", "golden", "--format", "npz")
    if line.startswith("audit"):
        write_audited()
    if line.startswith("same"):
        shutil.copy("dump.safetensors", "again.safetensors")
    result = run(*line.split())
    wrong = "--causal --window" in line or "check" in line or line.startswith("audit")
    assert result.exit_code in ((0, 1, 3) if wrong else (0, 3)), result.output
    assert "Usage" not in result.output
