"""The site: links lead somewhere, no other host is asked, and everything can be found."""

import itertools
import json
import re
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest

import refattn
from tests.validation.conftest import show

testing = pytest.importorskip("click.testing")
for _name in ("pdoc", "latex2mathml", "markdown_it", "mdit_py_plugins", "jinja2", "matplotlib"):
    pytest.importorskip(_name)

from validation import suite  # noqa: E402
from validation.site import __main__ as command  # noqa: E402
from validation.site import builder, figures, formulas, links, navigation, pages  # noqa: E402
from validation.site.api import Api, address  # noqa: E402

FIGURE = figures.files()[1]
REPORT = "<!doctype html><title>Report</title><p id='top'>A report.</p>"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The site, with a report that was written before and one figure only."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "report").mkdir()
    (folder / "report" / "report.html").write_text(REPORT)
    (folder / "report" / "report.md").write_text("# A report\n\n| a | b |\n|---|---|\n| 1 | 2 |\n")
    (folder / "report" / "results.jsonl").write_text("{}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "files", lambda: [FIGURE])
        found = builder.build(folder / "out", report=folder / "report")
    assert found.problems == []
    return folder / "out"


@pytest.fixture
def read(built):
    """The text of a page of the site."""
    return lambda name: (built / name).read_text("utf-8")


def text_of(html):
    html = re.sub(r"<(script|style|svg|math)\b.*?</\1>", " ", html, flags=re.DOTALL)
    return re.sub(r"<[^>]*>", " ", html)


PAGE = """<html><head></head><body id="top"><h1 id="x">X</h1>
<a href="#x">x</a> <a href="b.html#y">y</a> <a href="https://example.org">elsewhere</a></body></html>
"""


@pytest.mark.parametrize(
    ("before", "after", "what"),
    [
        ('"b.html#y"', '"c.html#y"', "c.html#y is not there"),
        ('"b.html#y"', '"b.html#z"', "b.html#z has no such place"),
        ('"#x"', '"#z"', "#z has no such place"),
        ("<a", '<p id="x"></p><a', "two elements have the id x"),
        ("</head>", '<script src="https://a.org/x.js"></script></head>', "asks another host"),
        ("</head>", "<style>a { background: url(//a.org/b) }</style></head>", "asks another host"),
        ("</head>", '<link href="no.css"></head>', "no.css is not there"),
        ("</body>", '<img src="no.png"></body>', "no.png is not there"),
    ],
)
def test_broken_links_are_seen(tmp_path, before, after, what):
    (tmp_path / "a.html").write_text(PAGE)
    (tmp_path / "b.html").write_text('<p id="y">y</p>')
    assert links.problems(tmp_path) == []
    (tmp_path / "a.html").write_text(PAGE.replace(before, after, 1))
    (problem,) = links.problems(tmp_path)
    assert problem.startswith("a.html: ")
    assert what in problem


@pytest.mark.docs
def test_every_document_has_a_page_and_every_page_the_frame(built, read):
    titles = [entry.title for group in navigation.groups() for entry in group.entries]
    for path in built.rglob("*.html"):
        parts = path.relative_to(built).parts
        if parts[0] != "report":
            text = path.read_text("utf-8")
            assert text.count("<main") == text.count('id="site-pages"') == 1, path
            assert all(f">{title}</a>" in text for title in titles), path
            assert f'href="{"../" * (len(parts) - 1)}site.css"' in text, path
    sources = {entry.source for group in navigation.groups() for entry in group.entries}
    validation = Path(suite.__file__).parent
    assert {*validation.glob("**/README.md"), *navigation.SITE.glob("guide/*.md")} <= sources
    bugs = text_of(read("validation-bugs.html"))
    assert "performer-pytorch: causal attention depends on future keys" in bugs
    assert (built / "source/validation/claims/cost.py.html").is_file()
    assert "<td>2</td>" in read("report.html")
    assert 'href="report/report.html"' in read("report.html")
    assert not (built / "report" / "results.jsonl").exists()


@pytest.mark.docs
def test_every_public_name_is_documented_and_found(read):
    index = json.loads(read("search-index.js").split("=", 1)[1].rstrip(";\n"))
    names = {title for title, kind, _, _ in index if kind not in ("guide", "measured")}
    api = Api()
    modules = {f"refattn.{x}" for x in refattn.__all__ if not callable(getattr(refattn, x))}
    assert {name for name in api.modules if name.count(".") == 1} == modules
    assert {f"refattn.{name}" for name in refattn.__all__} <= names
    for name, module in api.modules.items():
        page = read(address(name))
        for member in getattr(module.obj, "__all__", ()):
            if callable(getattr(module.obj, member)):
                assert f'id="{member}"' in page, f"{name}.{member}"
                assert f"{name}.{member}" in names
    words = {title: text for title, kind, _, text in index if kind == "guide"}
    assert "merge" in words["Streaming a decode: Parts that meet"]
    for title, _, url, _ in index:
        assert title, url
        file, _, anchor = url.partition("#")
        assert not anchor or f'id="{anchor}"' in read(file), url
    assert api.url("refattn.verify") == "api/refattn.html#verify"
    assert api.url("stats.holm") == "api/refattn/stats.html#holm"
    assert api.url("attend()") == "api/refattn.html#attend"
    assert api.url("refattn.gradients") == "api/refattn/gradients.html"
    for word in ("gradients", "np.exp", "holm", "q, k"):
        assert api.url(word) is None


@pytest.mark.docs
def test_formulas_are_drawn_without_scripts(built, read):
    for path in (built / "api").rglob("*.html"):
        code = r'<div class="pdoc-code codehilite">.*?</div>'
        shown = re.sub(code, "", path.read_text("utf-8"), flags=re.DOTALL)
        for word in ("math::", ":math:", "FORMULA", "ForwardRef"):
            assert word not in shown, path
    attention = read("api/refattn/attention.html")
    assert '<div class="formula" tabindex="0"><math' in attention
    assert "mask:Array|None=None" in "".join(text_of(attention).split())  # types as written
    assert read("tolerances.html").count("<math") > 3


@pytest.mark.docs
def test_figures_are_drawn_from_the_lines_that_are_shown(read):
    text = read("gallery.html")
    shown = text_of(text).replace("&quot;", '"').replace("&#39;", "'").replace("&gt;", ">")
    squeezed = "".join(shown.split())
    for line in FIGURE.read_text("utf-8").split('"""', 2)[2].splitlines():
        assert "".join(line.split()) in squeezed
    assert "<svg" in text


def test_the_gallery_is_of_one_kind(tmp_path):
    files = figures.files()
    assert len(files) >= 6
    for path in files:
        code = path.read_text("utf-8").split('"""', 2)[2].strip().splitlines()
        assert len([line for line in code if line and "import" not in line]) <= 17, path.name
    path = tmp_path / "1_none.py"
    path.write_text('"""A title.\n\nWords.\n"""\n\nfigure_ = 1\n')
    with pytest.raises(ValueError, match=r"1_none.py must have a title and a caption, and leave"):
        figures.draw(path)


@pytest.mark.docs("8_power")
@pytest.mark.parametrize("name", ["2_features", "3_couplings", "8_power"])
def test_labels_of_a_figure_are_seen_and_apart(name):
    figure = runpy.run_path(str(navigation.SITE / "gallery" / f"{name}.py"))["figure"]
    figure.draw_without_rendering()
    (axes,) = figure.axes
    inside = axes.get_window_extent()
    assert axes.texts
    for text in axes.texts:  # a label of a point that is outside is not drawn
        assert inside.contains(*axes.transData.transform(text.xy)), text.get_text()
    boxes = [text.get_window_extent() for text in axes.texts]
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


def test_links_of_documents():
    text = "# A\n\n## B b\n\n## B b\n\n[x](y.md#z) ![p](q.png) `refattn.verify` `nothing`\n"
    known = {"refattn.verify": "api.html#verify"}
    page = pages.render(text, lambda x: f"to/{x}", known.get)
    assert [anchor for _, anchor, _ in page.contents] == ["a", "b-b", "b-b-1"]
    assert 'href="to/y.md#z"' in page.body
    assert 'src="to/q.png"' in page.body
    assert '<a class="name" href="api.html#verify"><code>refattn.verify</code></a>' in page.body
    assert "<code>nothing</code>" in page.body
    assert page.title == "A"


def test_formulas_in_both_ways_of_writing_them():
    """Reports put what is between dollars between backticks, too."""
    plain, quoted = (pages.render(text, str).body for text in (r"$\max(x, 0)$", r"$`\max(x, 0)`$"))
    assert "<math" in plain
    assert plain == quoted
    with pytest.raises(ValueError, match=r"no MathML for \\nothing"):
        formulas.mathml(r"x + \nothing")


def test_one_line_for_bad_input(tmp_path):
    (tmp_path / "mine.txt").write_text("keep me")
    for words, arguments in (
        ("holds other files", [tmp_path]),
        ("holds no report.html", [tmp_path / "o", "--report", tmp_path]),
    ):
        done = testing.CliRunner().invoke(command.main, ["--out", *map(str, arguments)])
        assert done.exit_code == 1
        assert words in done.output
    assert (tmp_path / "mine.txt").read_text() == "keep me"


def test_what_is_missing_is_named():
    code = "import sys; sys.modules['pdoc'] = None; import validation.site.__main__"
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "needs `pip install 'refattn[site]'`" in done.stderr


@pytest.mark.docs
def test_the_whole_site(tmp_path, monkeypatch):
    """With all figures, and the report of a few claims."""
    found = builder.build(tmp_path / "out")
    assert found.problems == []
    assert found.pages == sum(1 for _ in (tmp_path / "out").rglob("*.html")) > 80
    assert "statements" in (tmp_path / "out" / "report.html").read_text("utf-8")
    monkeypatch.setattr(figures, "files", lambda: [FIGURE])
    again = builder.build(tmp_path / "out", report=tmp_path / "out" / "report")
    assert again.pages == found.pages


@pytest.mark.docs
def test_pages_in_a_browser(built, browser):
    """No page is wider than a phone, and nothing is logged."""
    names = "index choose numbers tolerances where streaming gallery report validation-model"
    names += " validation-bugs api/refattn/theory api/refattn/conformance"
    for name in names.split():
        run = show(browser, built / f"{name}.html", 375)
        assert run("return document.documentElement.scrollWidth") <= 375, name
        assert browser.get_log("browser") == [], name
        if name == "streaming":  # a table scrolls before its words are one below the other
            cells = "return [...document.querySelectorAll('main td')].map(x => x.offsetWidth)"
            assert min(run(cells)) > 100


@pytest.mark.docs
@pytest.mark.parametrize(
    ("words", "first"),
    [
        ("holm", "api/refattn/stats.html#holm"),
        ("parts that meet", "streaming.html#parts-that-meet"),
        ("how to stream a decode", "streaming.html"),
        ("decode", "streaming.html"),
        ("kv cache", "streaming.html"),
        ("incremental decoding", "streaming.html"),
        ("what is a tolerance?", "tolerances.html"),
        ("tolerance", "tolerances.html"),
        ("hall of bugs", "validation-bugs.html"),
        ("bugs in public implementations", "validation-bugs.html"),
        ("errors that are tolerated", "validation-model.html#the-error-that-is-tolerated"),
        ("gradient", "gradients.html"),
        ("softmax_attention", "api/refattn.html#softmax_attention"),
        ("attend()", "api/refattn.html#attend"),
        ("verify", "api/refattn.html#verify"),
        ("tolerance.study", "api/refattn/verification/tolerance.html#study"),
        ("refattn.verification.tolerance", "api/refattn/verification/tolerance.html"),
        ("is", ""),  # a stop word, if nothing else is said
        ("glossary xyzzy", "glossary.html"),  # no page has both
        ("xyzzy", None),
    ],
)
def test_what_a_search_finds_first(built, browser, words, first):
    run = show(browser, built / "index.html", 375)
    browser.find_element("id", "site-search").send_keys(words)
    # The index has come when something is shown; what is shown for the last key follows at once.
    for _ in range(100):
        if browser.find_elements("css selector", "#site-found li"):
            break
        time.sleep(0.05)
    find = "return [...document.querySelectorAll('#site-found a')].map(x => x.href)"
    found = [url.removeprefix(built.as_uri() + "/") for url in run(find)]
    if first is None:
        assert not found
        assert browser.find_element("css selector", "#site-found .nothing").is_displayed()
    else:
        assert found
        assert not first or found[0] == first
