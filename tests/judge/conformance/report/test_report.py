"""The report of a run of the checks: as text, JSON and a page."""

import json
import math
import os
import re
import sys
from dataclasses import replace
from html import unescape

import pytest

from refattn.judge.conformance import Report, Result
from refattn.judge.conformance.report.explanations import explain
from refattn.judge.conformance.report.report import EXPECTED, FAIL, PASS, STALE, UNDERPOWERED
from tests.pages import Page

MARKUP = "<script>alert('&')</script> \"κ\" \x1b[31m\udcff"
SHOWN = "<script>alert('&')</script> \"κ\" \\x1b[31m\\udcff"
NONE = "\N{EN DASH}"


def report(*results, name="mine", **more):
    about = (name, "rfa", ("omega",), {"dtype": "float32"}, "quick", 1e-6, 7)
    return Report(*about, [*results], **more)


def result(status=PASS, severity="", check="large_logits"):
    found = Result(check, "as it should be", "identity", status, severity, error=0.25)
    if status in (FAIL, EXPECTED):
        found.expected, found.got, found.error = "1.5", "2.5", 1e6
    return found


def page(found):
    pytest.importorskip("jinja2")
    return Page(found.to_html())


def test_reprs_are_short_and_numbers_are_there_or_not():
    long = Result("contract", "", "identity", FAIL, expected="x\n" * 1000, got=MARKUP)
    found = report(result(), result(), long, name=MARKUP + "\n")
    assert repr(found) == f"<Report FAIL: {(MARKUP + chr(10))!r} as rfa, 2 PASS, 1 FAIL>"
    for text in (repr(found), repr(long)):
        assert len(text) < 150
        assert text.isprintable()
    assert repr(Result("contract", "", "identity")) == "<Result PASS: contract>"
    assert "alpha 1e-06" in str(found)
    assert "Holm" in found.guarantee
    none = report(Result("c", "y", "law", p=math.nan))
    assert json.loads(none.to_json())["results"][0]["p"] is None


@pytest.mark.parametrize(
    ("results", "verdict", "text"),
    [
        ([PASS], PASS, "no deviation was found"),
        ([PASS, EXPECTED], PASS, "no deviation was found other than 1 expected"),
        ([PASS, UNDERPOWERED], UNDERPOWERED, "no deviation was found, but some checks lack power"),
        ([], UNDERPOWERED, "nothing was checked"),
        ([UNDERPOWERED, FAIL], FAIL, ""),
        ([PASS, STALE], FAIL, "1 passed, though a failure was expected"),
    ],
)
def test_the_conclusion_says_the_verdict(results, verdict, text):
    found = report(*(result(status, "law" * (status == EXPECTED)) for status in results))
    said = found.conclusion
    assert found.verdict == verdict
    assert said.startswith(text)
    assert json.loads(found.to_json())["conclusion"] == said
    assert (f"\n  {said}\n" in f"{found}\n") == (verdict != PASS and bool(said))


def test_severities_are_in_every_format():
    some = [result(FAIL, name) for name in ("range", "formula", "range")]
    found = report(result(), *some, result(EXPECTED, "law"))
    words = "1 formula failure: wrong at ordinary inputs; "
    words += "2 range failures: wrong at extreme inputs only"
    assert str(found).splitlines()[1] == f"  {words}"
    content, counts = json.loads(found.to_json()), {"formula": 1, "range": 2}
    assert (content["verdict"], content["seed"]) == ("FAIL", 7)
    assert content["severities"] == found.severities == counts
    assert [r["severity"] for r in content["results"]] == ["", "range", "formula", "range", "law"]
    text = page(found).read("article")
    assert words in text
    assert "formula 1 wrong at ordinary inputs range 2 wrong at extreme inputs only" in text
    assert "severity law: random draws have the wrong distribution" in text  # of the expected one


def test_failures_at_extreme_inputs_only_have_words_of_their_own():
    def says(found):
        texts = page(found).read("article").lower(), str(found), found.conclusion
        return {"right at all ordinary inputs that were tried" in x for x in texts}

    only = report(result(), result(FAIL, "range"))
    assert says(only) == {True}
    for status in (FAIL, EXPECTED):
        assert says(report(result(FAIL, "range"), result(status, "formula"))) == {False}


def test_names_in_a_page_lead_to_their_explanations():
    """To the text that `refattn explain` prints, of checks and of known bugs that results have."""
    like = replace(result(FAIL, check="causal"), suspects=["softmax-scale-missing: too large"])
    text = report(like, result(check="contract")).to_html()
    for name in ("causal", "softmax-scale-missing", "contract"):
        assert f'<a href="#explain-{name}">{name}</a>' in text
        (shown,) = re.findall(rf'id="explain-{name}">(.*?)</pre>', text, re.DOTALL)
        assert unescape(shown) == "\n".join(explain(name))
    assert "#explain-" not in report(result(check="of another version")).to_html()


def test_limits_are_in_every_format():
    limits = {"head_sizes": "only d of 64, 128 were tried", "dtype": f"{MARKUP} only"}
    found, free = report(result(), limits=limits), report(result())
    text = str(found).split("limits of the verdict:\n")[1]
    assert text.startswith("  head_sizes  only d of 64, 128 were tried\n  dtype       <script>")
    assert json.loads(found.to_json())["limits"]["head_sizes"] == limits["head_sizes"]
    shown = page(found).read("article")
    assert f"Limits of the verdict head_sizes {limits['head_sizes']} dtype {SHOWN} only" in shown
    assert "limits of the verdict" not in f"{free} {page(free).read('article')}".lower()
    assert json.loads(free.to_json())["limits"] == {}


# The page


@pytest.fixture
def everything():
    """A report with text of a candidate wherever there may be some."""
    failed = result(FAIL, "range")
    failed.expected = failed.got = failed.reproducer = MARKUP
    failed.suspects, failed.changes = [MARKUP, "another"], [f"- {MARKUP}", ""]
    weak = Result("frequency_law", "a law", "law", UNDERPOWERED, p=0.04, adjusted=0.5, samples=30)
    weak.target, weak.detectable = {"scale": 0.1}, {"scale": 0.25}
    unlike = result(FAIL, "formula", "mask")
    unlike.compared = True
    stale = result(STALE)
    stale.reason = MARKUP
    left = {"gqa": "needs more", "causal": "needs more", "seeds": MARKUP}
    found = report(result(check="contract"), failed, unlike, weak, stale, name=MARKUP)
    found.capabilities, found.tags = (MARKUP, "causal"), {"device": MARKUP, "scale": 1.0, "ddof": 1}
    found.not_tried = left
    return found


def test_the_page_holds_everything(everything):
    text = page(everything).read("article")
    for part in (
        f"refattn {everything.version} · check of an implementation FAIL {SHOWN} as rfa",
        f"estimator rfa capabilities {SHOWN}, causal device {SHOWN} scale 1.0 level quick alpha",
        "level quick alpha 1e-06 seed 7",
        "Summary 1 PASS 2 FAIL 1 UNDERPOWERED 1 STALE",
        f"expected {SHOWN} got {SHOWN} like {SHOWN} - {SHOWN} another Script that reproduces it "
        f"{SHOWN}",
        "like none of the known bugs",
        f"STALE large_logits Required: as it should be. failure expected {SHOWN}",
        f"PASS contract as it should be max error 0.25 x allowed error {NONE} {NONE} 0.25 0",
        "p = 0.04, adjusted 0.5, 30 seeds "
        "scale: would only detect an error of 0.25 or more (target 0.1) "
        f"0.04 0.5 {NONE} 0.000",
        f"Not run needs more gqa, causal {SHOWN} seeds",
        f"Guarantee {everything.guarantee}",
    ):
        assert part in text, part


def test_the_page_has_no_script_and_needs_no_other_file(everything):
    found = page(everything)
    assert found.read("title") == f"FAIL: {SHOWN} as rfa"
    for tag, attributes in found.elements:
        assert tag not in {"script", "img", "iframe", "object", "embed", "base", "form"}
        assert not any(name.startswith("on") for name in attributes)
        links = {attributes.get("src"), attributes.get("href")} - {None, "data:,"}
        assert all(link.startswith("#") for link in links)
    assert "script" not in {tags[-1] for tags, _ in found.texts if tags}
    style = "".join(data for tags, data in found.texts if "style" in tags)
    assert not re.search(r"url\(|@import", style)
    assert "prefers-color-scheme: dark" in style
    scripts = [tags[-2:] for tags, data in found.texts if "alert" in data and "pre" in tags]
    assert scripts == [("dd", "pre"), ("details", "pre")]
    everything.to_html().encode()  # no lone surrogates


def test_notebooks_show_a_part_of_a_page(everything):
    whole, part = page(everything), Page(everything._repr_html_())
    assert part.read("article") == whole.read("article")
    assert not {tag for tag, _ in part.elements} & {"html", "head", "body", "script", "title"}
    style = "".join(data for tags, data in part.texts if "style" in tags)
    selectors = re.findall(r"^\s*([^@\s}-][^{};]*)\{", style, re.MULTILINE)
    assert len(selectors) > 10
    assert {x.split()[0].partition(":")[0] for x in selectors} == {".refattn-report"}


def test_without_jinja2(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs `pip install 'refattn\[cli\]'`"):
        report(result()).to_html()
    assert report(result())._repr_html_() is None


# The command line


def check(*words, **options):
    from tests.cli.running import cli, testing

    given = ["check", *words, "--estimator", "softmax", "--check", "value_length"]
    done = testing.CliRunner().invoke(cli.commands(), given, **options)
    return done.exit_code, done.output


MOVING = "import os, refattn\nos.chdir('elsewhere')\nfn = refattn.softmax_attention\n"


@pytest.mark.long
def test_pages_from_the_command_line(tmp_path, monkeypatch):
    pytest.importorskip("jinja2")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "moving", raising=False)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "moving.py").write_text(MOVING)
    status, said = check("moving:fn", "--html", "out.html")
    assert status == 0, said
    text = (tmp_path / "out.html").read_text("utf-8")
    assert "PASS fn as softmax" in Page(text).read("article")
    status, said = check("refattn:softmax_attention", "--html", "out.png")
    assert (status, "must end in .html, got 'out.png'" in said) == (2, True)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    found = check("no_such_module:fn", "--html", "out.html")
    assert found == (2, "Error: --html needs `pip install 'refattn[cli]'`\n")


def test_the_last_lines_of_a_short_report():
    """A check that ran in part is counted once, and a failure says where its name is explained."""
    left = {"large_logits": "d = 64, for lack of time", "mask": "needs --capability mask"}
    found = report(result(), result(FAIL, "law", "order_of_keys"), not_tried=left)
    counted = "1 check passed; 1 not run: not declared, or not requested (--verbose lists them; "
    counted += "--capability mask adds 1)"
    last = "explain any name above: refattn explain order_of_keys"
    assert found.text(width=200).splitlines()[-2:] == [counted, last]
    assert last not in report(result(), not_tried=left).text()


COLOURS = {PASS: 32, FAIL: 31, STALE: 31, UNDERPOWERED: 33, EXPECTED: 33}


def on_a_terminal(found, monkeypatch, **variables):
    """What a terminal is sent of a report with all checks."""
    command = pytest.importorskip("refattn.cli.check")
    tables = pytest.importorskip("refattn.cli.show.page")
    if os.name != "posix":
        pytest.skip("terminals as of POSIX")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"TERM": "xterm", "COLUMNS": "200"} | variables).items():
        monkeypatch.setenv(name, value)
    ours, theirs = os.openpty()
    os.set_blocking(ours, False)
    with open(theirs, "w", encoding="utf-8") as file, open(ours, "rb", buffering=0) as screen:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", file)
            command._print_report(found, False, tables.Page(), verbose=True)
        return (screen.read(10**5) or b"").decode().replace("\r\n", "\n")


def test_statuses_have_colours_on_a_terminal(monkeypatch):
    found = report(*(result(status, "law", f"check_{i}") for i, status in enumerate(COLOURS)))
    sent = on_a_terminal(found, monkeypatch)
    assert sent.startswith("\x1b[31mFAIL\x1b[0m: mine as rfa")
    for status, colour in COLOURS.items():
        assert f"\n\x1b[{colour}m  {status}\x1b[0m  " in sent
    assert sent.count("\x1b[0m") == 1 + len(COLOURS)
    assert re.sub(r"\x1b\[\d+m", "", sent) == f"{found.text(verbose=True)}\n"


@pytest.mark.parametrize("variables", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_no_colour_where_none_is_wanted(monkeypatch, variables):
    found = report(result())
    assert on_a_terminal(found, monkeypatch, **variables) == f"{found.text(verbose=True)}\n"


@pytest.mark.long
def test_the_command_line_has_no_colour_on_a_pipe():
    none = {"NO_COLOR": None, "FORCE_COLOR": None, "TTY_COMPATIBLE": None, "TERM": "xterm"}
    assert check("refattn:softmax_attention", env=none, color=True)[1].startswith("PASS: ")
    forced = check("refattn:softmax_attention", env=none | {"FORCE_COLOR": "1"})[1]
    assert forced.startswith("\x1b[32mPASS\x1b[0m: ")


def test_causes_come_first_and_what_follows_from_them_is_folded():
    """A formula before a distribution; the rest is one line, unless nothing explains it."""
    kinds = {"frequency_law": "law", "weighted_mean": "range", "one_function": "formula"}
    failed = [Result(x, "", "identity", "FAIL", severity=y) for x, y in kinds.items()]
    last = "2 more, which may have the same cause: weighted_mean, frequency_law"
    assert last in report(*failed, diagnosis=["matches another"]).text()
    assert len(re.findall("^  FAIL", report(*failed).text(), re.MULTILINE)) == 3
    for result in failed:
        result.suspects, result.changes = ["a bug (the same numbers)"], [""]
    text = report(*failed).text()
    assert text.index("FAIL          one_function") < text.index(last)
    assert len(re.findall("^  FAIL", report(*failed).text(verbose=True), re.MULTILINE)) == 3
    failed[0].suspects = ["another bug (fails the same checks)"]
    assert "1 more, which may have the same cause: weighted_mean" in report(*failed).text()
