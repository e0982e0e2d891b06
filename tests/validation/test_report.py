"""The report of the validation suite: its page, summary, figures and numbers."""

import json
import re
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock
from xml.etree import ElementTree

import numpy as np
import pytest

pytest.importorskip("jinja2")
pytest.importorskip("latex2mathml")
pytest.importorskip("matplotlib")

from tests.pages import Page
from tests.validation import links
from tests.validation.conftest import run_claim, show
from validation import plotting, report, sources, suite
from validation.suite import Compared, Erratum, Findings, Shown, Statement

SETTINGS = {"level": "quick", "seed": 7, "alpha": 1e-6, "beta": 1e-6, "statements": 6, "new": "<i>"}
MARKUP = "<script>alert('&')</script> \"κ\" ≤ λ²"


def curves(data):
    """Error against m,
    with its law.

    Not in the caption.
    """
    figure, ((left, right),) = plotting.panels(1, 2, size=(9, 3.5))
    left.loglog(data["m"], data["error"], "o", label="measured & so")
    left.plot(data["m"], [1 / m for m in data["m"]], label="law <1/m>")
    left.set(xlabel="m", ylabel=r"$\kappa_m$")
    right.fill_between(data["m"], 1, 2, hatch="/")
    left.legend()
    return figure


def image(data):
    figure, ((axes,),) = plotting.panels()
    axes.imshow(np.arange(12.0).reshape(3, 4))
    return figure


broken = Mock(side_effect=KeyError("no <m>"))


def small(data):
    """Beside the text."""
    figure, axes = plotting.small()
    axes.plot(data["m"], data["error"])
    return figure


ERRATA = (
    Erratum("One <of the> least", ("printed",), "“As $1 < 2$”.", "None.", "Little.", 3),
    Erratum(
        "The lesser", ("printed",), "It is $x^2$.", "`a < b`", MARKUP, 1, small, "002, eq. (1)"
    ),
    Erratum("The greater", ("printed",), "Printed.", "Right ($\\le 2$).", "Effect.", 2, small),
    Erratum("Not found here", ("printed", "corrected"), "So it says.", "Not.", "No.", 9, small),
)
PLOTS = {"curves": curves, "image": image, "broken": broken}
SMALL = {"curves": [e.plot for e in ERRATA]}


def record(name, statements, evidence, *, data=None, remark="", **more):
    """A record as the suite makes it."""
    more = {"title": f"Claim {name}", "errata": ()} | more
    claim = replace(suite.claims()["theorem_1"], name=name, statements=statements, **more)
    findings = Findings(evidence, data or {}, remark)
    return {**suite.record(claim, findings, 1e-7), "seconds": 1.25}


def examples():
    """Every kind of verdict and of mishap."""
    statements = {
        "printed": Statement("It is below 1.", suite.REFUTED),
        "corrected": Statement("It is below 2.", printed=False),
    }
    evidence = {
        "printed": [Compared("at d = 2", 1.5, 1.0, "of the bound")],
        "corrected": [
            suite.Tested("m = 4", 0.5, lambda level: 0.05, 0.1, "sd"),
            suite.Tested("m = 8", 0.2, lambda level: 0.01, 0.1, "sd"),
            Shown("signs", 1e-12),
        ],
    }
    remark, data = "It is wrong by 1.5.", {"m": [1, 2, 4], "error": [1.1, 0.4, 0.3]}
    strange = {MARKUP: Statement(MARKUP)}, {MARKUP: [Compared(MARKUP, 1.0, 2.0, MARKUP)]}
    failed = {"claim": "failed", "title": "Could not be tried", "source": "001", "statements": []}
    plain = record("plain", {"b": Statement("B.")}, {"b": [Shown("s", 0.3)]})
    return [
        record("curves", statements, evidence, remark=remark, data=data, errata=ERRATA),
        record("image", *strange, title=MARKUP, remark=MARKUP),
        record("broken", {"a": Statement("A.")}, {"a": [suite.Tested("t", 1e-30)]}),
        {**plain, "unheard-of": [1, {"x": None}]},
        failed | {"error": "Traceback:\n  <module>\nMemoryError: 64 & more", "seconds": 0.1},
    ]


def written(folder, records, *more, settings=SETTINGS):
    """The page of a report."""
    report.write(settings, records, folder, *more)
    return Page((folder / "report.html").read_text("utf-8"))


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    out = tmp_path_factory.mktemp("report")
    report.write(SETTINGS, examples(), out, PLOTS, SMALL)
    return out


@pytest.fixture(scope="module")
def html(out):
    return (out / "report.html").read_text("utf-8")


@pytest.fixture(scope="module")
def page(html):
    return Page(html)


def test_the_page_leads_with_the_sum_of_all_verdicts(page):
    assert page.all("html") == [{"lang": "en"}]
    view = {"name": "viewport", "content": "width=device-width, initial-scale=1"}
    assert view in page.all("meta")
    assert len(page.text("h1")) == 1
    heads = ["To look into", "Wrong in print", "All claims", "Sources", "How to read this"]
    assert page.text("h2") == heads
    titles = ["Claim curves", MARKUP, "Claim broken", "Claim plain", "Could not be tried"]
    assert page.text("h3") == ["The greater", "The lesser", "Further", *titles]
    assert page.text("h4") == ["printed", "corrected", MARKUP, "a", "b"]
    shown = [" ".join(text.split()) for _, text in page.texts]
    head = shown.index(page.text("h1")[0])
    assert shown[head + 1 : head + 3] == [
        "Of 5 statements of 5 claims, 2 hold, 1 is refuted as expected, 1 contradicts "
        "what is expected, 1 is underpowered and 1 claim ended in an error.",
        heads[0],
    ]
    assert any("wrong verdict by chance is at most 1e-06" in text for text in shown)
    assert "The suite has 6 statements; 5 have a verdict here." in shown


def test_what_is_not_as_it_should_be_is_named_at_the_top(page):
    says = [text for inside, text in page.texts if inside[-2:] == ("li", "span")]
    error = "The claim could not be tested: MemoryError: 64 & more"
    figure, expected = "It has no figure: KeyError: 'no <m>'", "expected HOLDS"
    assert says[:4] == [f"REFUTED, {expected}", figure, error, f"UNDERPOWERED, {expected}"]
    tried = ["refuted", "holds", "holds", "unexpected", "underpowered"]
    classes = ["erratum", "erratum", *(f"tried {x}" for x in tried)]
    assert [a["class"] for a in page.all("article")] == classes
    assert page.text("pre") == ["Traceback: <module> MemoryError: 64 & more"]
    assert any("could not be drawn. KeyError: 'no <m>'" in text for text in page.text("p"))


def test_what_is_wrong_in_print_comes_first(page, html):
    places = [html.index(f">{title}") for title in ("The greater", "The lesser", "One &lt;of the")]
    assert places == sorted(places)
    assert max(places) < html.index('id="claims"')
    assert "Not found here" not in html  # one of its statements holds
    assert page.text("figcaption")[:2] == ["Beside the text."] * 2
    assert "2 places" not in html
    assert "3 places, the most important first" in html
    assert "Ye 2023, eq. (1); refuted:" in html.replace("&#39;", "'")
    assert page.text("math") == []  # everything in it is in an element of its own
    assert len(page.all("math")) == 3
    assert {"2", "x", "1", "&#x0003C;"} >= set(page.text("mn"))
    assert "a < b" in page.text("code")
    assert "As $" not in html


def test_every_claim_opens_and_has_an_address(page):
    found = [a for a in page.all("section") if a.get("class") == "claim"]
    names = ("curves", "image", "broken", "plain", "failed")
    assert [a["id"] for a in found] == [f"claim-{name}" for name in names]
    assert [a["data-source"] for a in found] == ["000"] * 4 + ["001"]
    assert sum("open" in a for a in page.all("details")) == 1  # what is to look into
    marks = [a for a in page.all("a") if a.get("class", "").startswith("mark ")]
    states = ["refuted", "holds", "holds", "unexpected", "underpowered", "error"]
    assert [a["data-state"] for a in marks] == states
    assert marks[1]["href"] == "#curves--corrected"
    anchors = {a["href"] for a in page.all("a") if a.get("class") == "anchor"}
    assert {a["href"] for a in marks} <= anchors
    assert "python -m validation curves --level quick --seed 7" in page.text("code")
    assert [" ".join(row.split()) for row in page.text("dt")][:3] == ["Printed", "Right", "Effect"]
    assert all("scope" in a for a in page.all("th"))
    evidence = [text for text in page.text("dd") if text.startswith(("1.5", "p =", "1 <"))]
    assert evidence[0] == "1.5 of the bound (at most 1)"
    assert "p = 1e-12 that chance showed it" in evidence


def test_addresses_lead_to_places_on_the_page_or_to_sources(page, out):
    assert links.problems(out) == []
    ids = {a["id"] for _, a in page.elements if "id" in a}
    outside = {u for s in sources.SOURCES.values() for u in s.links.values()}
    for tag, attributes in page.elements:
        address = attributes.get("href", "")
        assert address[:1] in ("", "#") or address.startswith("data:") or address in outside
        assert tag == "a" or not address.startswith("http")
        assert not {"srcset", "action"} & set(attributes)
        assert {*attributes.get("aria-labelledby", "").split()} <= ids
        values = " ".join(attributes.values())
        assert {*re.findall(r"url\(['\"]?#?([^'\")]+)", values)} <= ids
    assert any(v.startswith("data:image/png;base64,") for _, a in page.elements for v in a.values())
    assert page.all("script") == [{}]  # one, within the page


def test_text_is_shown_as_it_is_and_without_scripts(page, html):
    assert MARKUP in page.text("h3")
    assert MARKUP in page.text("p")
    assert MARKUP in page.text("dd") + page.text("span")
    assert "<i>" in page.text("dd")
    assert html.count("<script") == 1
    assert [tag for tag, attributes in page.elements if "hidden" in attributes] == ["form"]


def test_figures_take_the_colours_of_the_page(page, html):
    figures = [a for a in page.all("svg") if a.get("role") == "img"]
    assert len(figures) == 4
    titles = ["The greater. Beside the text.", "The lesser. Beside the text."]
    titles += ["Claim curves. Error against m, with its law.", MARKUP]
    assert page.text("title")[1:] == titles
    assert page.text("figcaption") == [*["Beside the text."] * 2, "Error against m, with its law."]
    assert "currentColor" in html
    # Neither a background nor a legend's text or frame in a colour of its own.
    for colour in (plotting.INK, "#ffffff", "#000000"):
        assert not any(colour in value for _, a in page.elements for value in a.values())
    assert "measured &amp; so" in html  # as text, not as outlines
    assert len(page.text("style")) == 1


def test_figures_stand_on_their_own(out):
    names = sorted(path.name for path in (out / "figures").iterdir())
    assert names == ["curves.svg", "image.svg"]
    for name in names:
        text = (out / "figures" / name).read_text("utf-8")
        root = ElementTree.fromstring(text)
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert {"width", "height", "viewBox"} <= set(root.attrib)
        assert plotting.INK in text
        assert "currentColor" not in text
        background = root.find(".//*[@id='background']/*")
        assert background is not None
        assert "#ffffff" in background.attrib["style"]


def test_the_numbers_can_be_read_back(out):
    data = json.loads((out / "report.json").read_text("utf-8"))
    assert list(data) == ["version", "settings", "counts", "claims", "sources"]
    assert (data["version"], data["settings"]) == (1, SETTINGS)
    assert data["claims"] == json.loads(json.dumps(examples()))
    assert [e["title"] for e in data["claims"][0]["errata"]] == [e.title for e in ERRATA]
    assert data["sources"]["001"]["name"] == "Performers post"
    counts = " ".join(f"{n} {what}" for what, n in data["counts"].items())
    assert counts == (
        "5 claims 5 statements 2 hold 1 refuted 1 underpowered 1 unexpected 0 timed 1 errors"
    )


def test_the_markdown_has_the_same_table(out):
    text = (out / "report.md").read_text("utf-8")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    cells = [re.split(r"(?<!\\)\|", row)[1:-1] for row in rows]
    assert [len(row) for row in cells] == [6] * 8
    verdicts = ["✗ REFUTED, as expected", *["✓ HOLDS, as expected"] * 2]
    verdicts += ["! REFUTED, expected HOLDS", "? UNDERPOWERED, expected HOLDS", "! ERROR"]
    assert [row[3].strip() for row in cells[2:]] == verdicts
    errata = [x.split("**") for x in text.splitlines() if x.startswith("- **")]
    titles = ["The greater", "The lesser", r"One \<of the\> least"]
    assert [title for _, title, _ in errata] == titles
    start = r" (Ye 2023, eq. (1)). Printed: It is $`x^2`$. Right: `a < b` "
    assert errata[1][2].startswith(start)
    assert cells[2][2].strip() == "printed (as printed)"
    assert cells[3][2].strip() == "corrected (derived)"
    assert r"\<script\>alert('&amp;')\</script\>" in cells[4][1]
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert links == ["figures/curves.svg", "figures/curves.svg", "figures/image.svg"]
    assert all((out / link).exists() for link in links)


def test_the_same_records_give_the_same_bytes(out, tmp_path):
    for path in report.write(SETTINGS, examples(), tmp_path, PLOTS, SMALL):
        assert path.read_bytes() == (out / path.relative_to(tmp_path)).read_bytes()
        assert path.is_relative_to(tmp_path)
    assert not list(tmp_path.rglob("*.new"))


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_report_that_fails_leaves_the_former(tmp_path, monkeypatch):
    report.write(SETTINGS, examples()[1:2], tmp_path, PLOTS)
    before = contents(tmp_path)
    monkeypatch.setattr(Path, "replace", Mock(side_effect=OSError("No space left on device")))
    with pytest.raises(OSError, match="No space"):
        report.write(SETTINGS, examples()[1:], tmp_path, PLOTS)
    assert before == contents(tmp_path)


def test_no_records(tmp_path):
    page = written(tmp_path, [], settings={})
    assert not page.all("table")
    assert not page.all("script")
    assert "No claim was tested." in page.text("p")
    assert "No claim was tested." in (tmp_path / "report.md").read_text("utf-8")
    assert json.loads((tmp_path / "report.json").read_text("utf-8"))["claims"] == []
    assert report.summary([]) == "No claim was tested."


def test_claims_of_one_name_or_a_strange_one_keep_apart(tmp_path):
    names = ["curves", "curves", "Curves", "../../curves", "κ"]
    records = [{**examples()[1], "claim": name} for name in names]
    paths = report.write(SETTINGS, records, tmp_path, dict.fromkeys(names, image))
    assert all(path.resolve().is_relative_to(tmp_path.resolve()) for path in paths)
    assert links.problems(tmp_path) == []
    assert len(list((tmp_path / "figures").iterdir())) == 5


def test_records_may_have_little_and_names_alike(tmp_path):
    holds = {"verdict": "HOLDS", "expected": "HOLDS"}
    x = [holds | {"name": name} for name in ("eq. (6)", "eq 6", "Eq. 6", "κ")]
    records = [{"claim": "x", "statements": x}, {"claim": "y", "statements": []}]
    page = written(tmp_path, records, PLOTS, settings={})
    assert page.text("h2") == ["All claims", "How to read this"]
    assert page.text("h3") == ["x", "y"]
    found = [a["id"] for a in page.all("article")]
    assert found == ["x--eq-6", "x--eq-6-2", "x--Eq-6-3", "x--claim"]


def test_figures_of_the_suite_are_drawn_by_default(tmp_path):
    paths = report.write(SETTINGS, [run_claim("proposition_1")], tmp_path)
    assert tmp_path / "figures" / "proposition_1.svg" in paths
    # One that cannot be drawn leaves its text.
    written(tmp_path, examples()[:1], {}, {"curves": [None, broken]})
    text = (tmp_path / "report.html").read_text("utf-8")
    assert "The lesser has no figure: KeyError" in text
    assert "It is <span" in text


def test_every_printed_sentence_that_is_refuted_is_corrected_once():
    errata = [e for claim in suite.claims().values() for e in claim.errata]
    for name, claim in suite.claims().items():
        wrong = {k for k, s in claim.statements.items() if s.expected == suite.REFUTED}
        corrected = [statement for e in claim.errata for statement in e.statements]
        assert len(corrected) == len(set(corrected)), name
        assert {k for k in wrong if claim.statements[k].printed} <= set(corrected) <= wrong, name
    assert len(errata) == len({e.weight for e in errata})
    assert 6 <= sum(e.plot is not None for e in errata) <= 10


def texts(claim):
    """Everything in which formulas are shown, but for remarks."""
    yield from (s.text for s in claim.statements.values())
    yield claim.method
    for e in claim.errata:
        yield from (e.printed, e.instead, e.consequence)


@pytest.mark.parametrize("name", suite.claims())
def test_the_formulas_of_every_text(name):
    for text in texts(suite.claims()[name]):
        assert text.strip()
        shown = Page(f"<p>{report._formulas(text)}</p>")
        outside = [piece for inside, piece in shown.texts if "math" not in inside]
        assert not any(c in piece for piece in outside for c in "$\\`^"), text
        assert len(shown.all("math")) == text.count("$") / 2
        for inside, piece in shown.texts:
            assert "math" not in inside or "\\" not in piece, text


def test_sources_go_by_name():
    used = set()
    for claim in suite.claims().values():
        for text in (claim.source, *(e.source for e in claim.errata)):
            used |= {place.id for place in sources.places(text)}
    assert used == set(sources.SOURCES)
    names = [source.name for source in sources.SOURCES.values()]
    assert len(names) == len(set(names))
    for source in sources.SOURCES.values():
        for label, address in source.links.items():
            kind, _, number = label.partition(":")
            assert kind == "code" or address == f"https://arxiv.org/abs/{number}"
    assert sources.named("001, A; 002, eq. (6)") == "Performers post, A; Ye 2023, eq. (6)"
    assert sources.named("arXiv:2602.10056, key coresets") == "Key coresets"
    assert sources.named("999, x") == "999, x"
    assert sources.named("") == ""


def test_the_summary_is_aligned():
    *lines, count = report.summary(examples()).splitlines()
    marks = ["   REFUTED", "   HOLDS", "   HOLDS", "!  REFUTED", "!  UNDERPOWERE", "!  ERROR"]
    assert [line[:14].rstrip() for line in lines] == marks
    assert len({line.index("curves") for line in lines[:2]}) == 1
    assert lines[0].startswith("   REFUTED       curves  printed")
    assert lines[0].endswith("at d = 2: 1.5 of the bound (at most 1)")
    assert lines[5].endswith("MemoryError: 64 & more")
    assert count.startswith("Of 5 statements of 5 claims, 2 hold")


def test_the_sentence_counts():
    for verdicts, counts in (
        (["HOLDS"], "1 statement of 1 claim, 1 holds"),
        (["HOLDS", "REFUTED"], "2 statements of 1 claim, 1 holds, 1 is refuted as expected"),
    ):
        statements = [{"name": "s", "verdict": v, "expected": v, "number": "1"} for v in verdicts]
        last = report.summary([{"claim": "x", "statements": statements}]).splitlines()[-1]
        assert last == f"Of {counts} and none contradicts what is expected."


def test_a_timed_verdict_that_differs_is_shown_as_one_of_this_machine(tmp_path):
    statements = {"slow": Statement("It is fast."), "fast": Statement("It is fast, too.")}
    evidence = {name: [suite.Timed("seconds", x, 2.0)] for name, x in (("slow", 3.0), ("fast", 1))}
    one = record("times", statements, evidence)
    page = written(tmp_path, [one])
    marks = [a for a in page.all("a") if a.get("class", "").startswith("mark ")]
    assert [a["data-state"] for a in marks] == ["timed", "holds"]
    assert marks[0]["title"] == "REFUTED, expected HOLDS (timed here)"
    rows = (tmp_path / "report.md").read_text("utf-8").splitlines()
    assert sum("| slow (as printed, timed) | ~ REFUTED, expected HOLDS (timed here) |" in row
               for row in rows) == 1  # fmt: skip
    assert report.summary([one]).splitlines()[-1] == (
        "Of 2 statements of 1 claim, 1 holds, none contradicts what is expected and 1 timed one "
        "differs on this machine."
    )


CONTRASTS = """
const rgb = text => text.match(/[\\d.]+/g).map(Number);
const light = c => c.slice(0, 3).map(x => x / 255)
  .map(x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4)
  .reduce((sum, x, i) => sum + x * [0.2126, 0.7152, 0.0722][i], 0);
const behind = e => {
  for (; e; e = e.parentElement) {
    const c = rgb(getComputedStyle(e).backgroundColor);
    if (c.length < 4 || c[3] > 0) return c;
  }
};
const own = e => [...e.childNodes].some(n => n.nodeType == 3 && n.data.trim());
return [...document.body.querySelectorAll("*")]
  .filter(e => !(e instanceof SVGElement) && own(e) && e.getClientRects().length)
  .map(e => {
    const [a, b] = [light(rgb(getComputedStyle(e).color)), light(behind(e))].sort((x, y) => y - x);
    return [(a + 0.05) / (b + 0.05), e.className || e.tagName];
  });
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 375])
def test_the_page_in_a_browser(browser, out, width, scheme):
    run = show(browser, out / "report.html", width, scheme)
    assert run("return innerWidth") == width
    assert run("return document.documentElement.scrollWidth") <= width
    sizes = "return [...document.querySelectorAll(arguments[0])].map(e => e.getBoundingClientRect()"
    sizes += ").map(r => [r.width, r.height])"
    seen = [(".mark", 6), (".erratum svg", 2), ("math", 3), ("select", 2)]
    for what, count in (*seen, ("svg", 4), ("details tbody tr", 7)):
        if what == "svg":
            assert not [pair for pair in run(CONTRASTS) if pair[0] < 4.5]
            run("document.querySelectorAll('details').forEach(d => d.open = true)")
            assert run("return document.documentElement.scrollWidth") <= width
        found = run(sizes, what)
        assert len(found) == count
        assert all(w > 0 and h > 0 for w, h in found)
    background = run("return getComputedStyle(document.body).backgroundColor")
    bright = sum(map(int, re.findall(r"\d+", background))) > 3 * 128
    assert bright == (scheme == "light")
    dim = [pair for pair in run(CONTRASTS) if pair[0] < 4.5]
    assert not dim
    assert not browser.get_log("browser")
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    requests = [e["params"] for e in events if e["method"] == "Network.requestWillBeSent"]
    address = (out / "report.html").as_uri()
    asked = [r["request"]["url"] for r in requests if r["documentURL"] == address]
    assert asked[0] == address
    assert all(url.startswith("data:") for url in asked[1:])


SHOWN = """
return [...document.querySelectorAll(arguments[0])].filter(e => e.checkVisibility())
  .map(e => e.id || e.textContent.trim().replace(/\\s+/g, " "));
"""
CHOOSE = """
const form = document.querySelector(".filters");
[form.source.value, form.verdict.value] = arguments;
form.verdict.dispatchEvent(new Event("change", {bubbles: true}));
return form.querySelector("output").value;
"""


def test_filters_and_addresses_in_a_browser(browser, out):
    run = show(browser, out / "report.html")
    assert run(CHOOSE, "", "") == "5 statements of 5 claims"
    assert run(CHOOSE, "000", "holds") == "2 statements of 2 claims"
    assert run(SHOWN, ".claim") == ["claim-curves", "claim-image"]
    assert run(SHOWN, ".claim:first-of-type .mark") == ["✓HOLDS: corrected"]
    assert run(CHOOSE, "001", "refuted") == "0 statements of 0 claims"
    assert run(CHOOSE, "001", "") == "0 statements of 1 claim"
    # An address shows what it leads to, closed and filtered as it is.
    run("location.hash = '#curves--corrected'")
    browser.execute_async_script("setTimeout(arguments[0], 100)")
    assert run(SHOWN, ".tried") == ["curves--printed", "curves--corrected"]
    assert len(run(SHOWN, ".claim")) == 5
    top = "return document.getElementById('curves--corrected').getBoundingClientRect().top"
    assert 0 <= run(top) < 800
    run("document.querySelectorAll('details').forEach(d => d.open = false)")
    run("dispatchEvent(new Event('hashchange'))")  # some browsers open nothing themselves
    assert run(SHOWN, ".tried") == ["curves--printed", "curves--corrected"]
    run = show(browser, out / "report.html", place="#broken--a")
    assert run(SHOWN, ".tried") == ["broken--a"]
    assert not browser.get_log("browser")


def test_the_whole_suite_fits_before_details_are_opened(browser, tmp_path):
    evidence = {suite.HOLDS: [Compared("c", 1, 2)], suite.REFUTED: [Compared("c", 2, 1)]}
    records = [
        suite.record(c, Findings({k: evidence[s.expected] for k, s in c.statements.items()}, {}), 1)
        for c in suite.claims().values()
    ]
    plots = {
        name: [e.plot and (lambda data: plotting.small()[0]) for e in claim.errata]
        for name, claim in suite.claims().items()
    }
    report.write({**SETTINGS, "code": "c" * 12}, records, tmp_path, {}, plots)
    run = show(browser, tmp_path / "report.html")
    count = sum(len(claim.errata) for claim in suite.claims().values())
    assert len(run(SHOWN, ".erratum, .errata li")) == count
    assert run("return document.documentElement.scrollHeight") <= 5400
    run = show(browser, tmp_path / "report.html", 375)
    assert run("return document.documentElement.scrollWidth") == 375
    run("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert run("return document.documentElement.scrollWidth") == 375
