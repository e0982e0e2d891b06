"""The site: it builds without a warning, links lead somewhere, and no other host is asked."""

import ast
import fcntl
import html
import itertools
import os
import re
import runpy
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import refattn
from tests.validation import links
from tests.validation.conftest import show

SITE = Path(__file__).parents[2] / "validation" / "site"
ROOT = SITE.parents[1]
GALLERY = sorted((SITE / "gallery").glob("[0-9]*.py"))
RIGHT = """return [...document.querySelectorAll('h1, h1 *, h2, article p')]
    .filter(x => !x.closest('table')).map(x => x.getBoundingClientRect().right)"""
COMMAND = [sys.executable, "-m", "validation.site"]


@pytest.fixture(scope="session")
def sphinx():
    """What the site is built with."""
    for name in ("sphinx", "myst_parser", "numpydoc", "pydata_sphinx_theme", "sphinx_gallery"):
        pytest.importorskip(name)


@pytest.fixture(scope="session")
def built(sphinx, tmp_path_factory):
    """The site, built once for all processes."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    with open(folder / "site.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "site.txt").exists():
            words = [*COMMAND, "--out", str(folder / "site")]
            pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            done = subprocess.run(words, cwd=ROOT, timeout=600, check=False, **pipe)
            (folder / "site.txt").write_text(f"{done.stdout}\nstatus {done.returncode}")
    printed = (folder / "site.txt").read_text()
    assert printed.endswith("status 0"), printed  # 1 after a warning
    return folder / "site"


@pytest.fixture
def read(built):
    """The text of a page of the site."""
    return lambda name: (built / name).read_text("utf-8")


def text_of(page):
    page = re.sub(r"<(script|style|svg|math)\b.*?</\1>", " ", page, flags=re.DOTALL)
    return re.sub(r"<[^>]*>", " ", page)


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
def test_links_lead_somewhere_and_names_to_the_api(built, read):
    assert links.problems(built) == []
    assert 'href="api/refattn.judge.stats.html#module-refattn.judge.stats"' in read("verdicts.html")
    assert 'href="api/refattn.testing.html#refattn.testing.assert_attention_close"' in read(
        "tolerances.html"
    )
    assert 'href="refattn.merge.html#refattn.merge"' in read("api/refattn.attend.html")
    assert 'href="source/validation/claims/cost.py.html"' in read("validation.html")


@pytest.mark.docs
def test_every_document_has_a_page(built, read):
    names = {path.stem for path in SITE.glob("guide/*.md")}
    names |= {
        "-".join(x.relative_to(ROOT).parts[:-1]) for x in ROOT.glob("validation/**/README.md")
    }
    assert {"choose", "validation", "validation-bugs"} < names
    for name in names:
        assert read(f"{name}.html").count("<main") == 1, name
    linked = re.findall(r"\]\((validation/[^)#]*)\)", (ROOT / "README.md").read_text("utf-8"))
    assert len(linked) > 10
    for name in linked:  # a guide's page has its name, a README's that of its folder
        guide = re.fullmatch(r"validation/site/guide/(\w+)\.md", name)
        page = guide[1] if guide else f"source/{name}"
        page = name.removesuffix("/README.md").replace("/", "-") if "README" in name else page
        assert (built / f"{page}.html").is_file(), name
    bugs = text_of(read("validation-bugs.html"))
    assert "performer-pytorch: causal attention depends on future keys" in bugs
    assert "statements" in text_of(read("report.html"))
    assert 'href="report/report.html"' in read("report.html")
    assert not list((built / "report").glob("results.*"))


@pytest.mark.docs
def test_every_public_name_has_a_page(read):
    for name in refattn.__all__:
        value = getattr(refattn, name)
        if name == "judge":  # what it exports has pages of its own
            continue
        home = f"refattn.{name}" if callable(value) else value.__name__
        page = read(f"api/{home}.html")
        if callable(value):
            assert f'id="{home}"' in page
            continue
        assert f'id="module-{home}"' in page
        for member in getattr(value, "__all__", ()):
            if callable(found := getattr(value, member)) and getattr(found, "__doc__", ""):
                own = f"{home}.{member}"
                same = getattr(refattn, member, None) is found
                assert (f'title="refattn.{member}"' if same else f'id="{own}"') in page, own


@pytest.mark.docs
def test_formulas_are_drawn_without_scripts(built, read):
    for path in (built / "api").rglob("*.html"):
        shown = path.read_text("utf-8")
        for word in ("math::", ":math:", r"\frac", r"\sum", "MathJax"):
            assert word not in shown, path
    assert '<div class="formula" tabindex="0"><math' in read("api/refattn.attend.html")
    assert read("tolerances.html").count("<math") > 3


@pytest.mark.docs
def test_figures_are_shown_with_the_lines_that_drew_them(built, read):
    for path in GALLERY:
        page = read(f"gallery/{path.stem}.html")
        assert f'src="../_images/sphx_glr_{path.stem}_001.svg"' in page
        shown = "".join(html.unescape(text_of(page)).split())
        for line in path.read_text("utf-8").split('"""', 2)[2].splitlines():
            assert "".join(line.split()) in shown
    assert (built / "_images" / "sphx_glr_1_errors_001.svg").read_text("utf-8").count("<path") > 9


def test_the_gallery_is_of_one_kind():
    assert len(GALLERY) >= 6
    for path in GALLERY:
        text = path.read_text("utf-8")
        title, line, *caption = ast.get_docstring(ast.parse(text)).splitlines()
        assert line == "=" * len(title), path.name
        assert caption
        code = text.split('"""', 2)[2].strip().splitlines()
        assert len([line for line in code if line and "import" not in line]) <= 17, path.name


@pytest.mark.docs("8_power")
@pytest.mark.parametrize("name", ["2_features", "3_couplings", "8_power"])
def test_labels_of_a_figure_are_seen_and_apart(name):
    pytest.importorskip("matplotlib")
    with np.errstate(all="raise", under="ignore"):
        figure = runpy.run_path(str(SITE / "gallery" / f"{name}.py"))["figure"]
    figure.draw_without_rendering()
    (axes,) = figure.axes
    inside = axes.get_window_extent()
    assert axes.texts
    for text in axes.texts:  # a label of a point that is outside is not drawn
        assert inside.contains(*axes.transData.transform(text.xy)), text.get_text()
    boxes = [text.get_window_extent() for text in axes.texts]
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


def test_formulas_that_have_no_mathml_are_named(sphinx):
    from validation.site import parts

    assert "<math" in parts.mathml(r"\max(x, 0)", "inline")
    with pytest.raises(Exception, match=r"no MathML for \\nothing"):
        parts.mathml(r"x + \nothing", "inline")


@pytest.mark.parametrize(
    ("text", "module", "found"),
    [
        ("refattn.attend", "", ["refattn.attend"]),
        ("rounding.predict", "", ["refattn.rounding.predict", "refattn.judge.rounding.predict"]),
        ("attend()", "", ["refattn.attend"]),
        ("refattn.gradients", "", ["refattn.gradients"]),
        ("holm", "refattn.judge.stats", ["refattn.judge.stats.holm"]),
        ("gradients", "", []),  # a word
        ("holm", "", []),
        ("q, k", "", []),
    ],
)
def test_what_a_name_stands_for(sphinx, text, module, found):
    from validation.site import parts

    assert list(parts.names(text, module)) == found


def test_a_report_that_was_written_before(tmp_path):
    """Its formulas are between dollars alone, and its files are linked to as they are."""
    from validation.site import documents

    report = tmp_path / "report"
    report.mkdir()
    (report / "report.html").touch()
    (report / "a.svg").touch()
    (report / "report.md").write_text("# A report\n\n[a](a.svg) [how](../README.md) $`x^2`$\n")
    documents.gather(tmp_path / "text", report, "A note.")
    text = (tmp_path / "text" / "report.md").read_text()
    assert text.startswith("# Report of a run\n\nA note.\n")
    assert '<a href="report/report.html">' in text
    assert '<a href="report/a.svg">a</a> [how](/validation.md) $x^2$' in text
    assert "# A report" not in text


def test_one_line_for_bad_input(sphinx, tmp_path):
    testing = pytest.importorskip("click.testing")
    from validation.site import __main__ as command

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
    code = "import sys; sys.modules['sphinx'] = None; import validation.site.__main__"
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)
    assert done.returncode == 2
    assert "needs `pip install 'refattn[site]'`" in done.stderr


@pytest.mark.docs
def test_pages_in_a_browser(built, browser):
    """No page is wider than a phone, and nothing goes wrong."""
    pages = "index guide choose numbers tolerances where streaming report validation-model api "
    pages += "validation-bugs gallery/index gallery/1_errors api/refattn.attend api/refattn.theory "
    pages += "api/refattn.judge.conformance source/validation/claims/cost.py"
    for name in pages.split():
        run = show(browser, built / f"{name}.html", 390)
        assert run("return document.documentElement.scrollWidth") <= 390, name
        assert max(run(RIGHT)) <= 390, name
        assert [x for x in browser.get_log("browser") if x["level"] != "INFO"] == [], name
    run = show(browser, built / "api" / "refattn.attend.html", 390)
    box = "let x = document.querySelector('.formula'), at = e => e.getBoundingClientRect().left; "
    assert run(box + "return at(x.firstChild) - at(x)") >= 0  # its beginning is seen
    assert run(box + "x.scrollLeft = 1e4; return x.scrollLeft") > 50  # and it scrolls to its end


@pytest.mark.docs
def test_figures_and_verdicts_on_a_phone(built, browser):
    """A figure scrolls in its frame, at a size that can be read, and what is printed wraps."""
    for name, frame in (("index", "figure"), ("gallery/1_errors", ".frame"), ("choose", "p")):
        run = show(browser, built / f"{name}.html", 390)
        box = f"let x = [...document.querySelectorAll('.bd-article {frame}')].find("
        box += "x => x.querySelector(':scope > img')); "
        assert run(box + "return x.clientWidth") <= 390
        assert run(box + "return x.querySelector('img').clientWidth") >= 500
        assert run(box + "x.scrollLeft = 1e4; return x.scrollLeft") > 100
    run = show(browser, built / "numbers.html", 390)
    wide = "return [...document.querySelectorAll('.wraps pre')].filter("
    assert run(wide + "x => x.scrollWidth > x.clientWidth).length") == 0
    assert run("return document.querySelectorAll('.wraps pre').length") > 0


def test_every_name_in_reports_is_explained(read):
    text = read("names.html")
    assert 'id="frequency_law"' in text
    assert "check frequency_law: frequencies are N(0, I)" in text
    assert 'id="softmax-scale-missing"' in text


@pytest.mark.docs
@pytest.mark.parametrize(
    ("words", "first"),
    [
        ("holm", "api/refattn.judge.stats.html#refattn.judge.stats.holm"),
        ("merging partial results", "streaming.html#merging-partial-results"),
        ("tolerances", "tolerances.html"),
        ("softmax_attention", "api/refattn.softmax_attention.html"),
        ("bugs in public implementations", "validation-bugs.html"),
        ("xyzzy", None),
    ],
)
def test_what_a_search_finds(built, browser, words, first):
    run = show(browser, built / "search.html", 390, place=f"?q={words.replace(' ', '+')}")
    find = "return [...document.querySelectorAll('#search-results li a')].map(x => x.href)"
    status = "return document.querySelector('#search-results').innerText"
    for _ in range(100):
        if "Search finished" in run(status) or "did not match" in run(status):
            break
        time.sleep(0.05)
    time.sleep(0.2)
    found = [url.removeprefix(built.as_uri() + "/") for url in run(find)]
    if first is None:
        assert not found
    else:
        assert any(url.startswith(first) for url in found[:5]), found[:5]
