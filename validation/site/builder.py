"""All pages of the site, in one folder."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import jinja2
from markupsafe import Markup

import refattn

from . import figures, links, pages
from .api import Api, address
from .navigation import ROOT, SITE, Group, groups, relative

__all__ = ["CLAIMS", "Built", "build"]

# Whose report is made where none is given: exact ones that take no time.
CLAIMS = ("rfa_is_snis", "lara_cases", "attention_as_expectation", "linear_attention")


class Built(NamedTuple):
    """What was made: how many pages, in which time, and the links that lead nowhere."""

    pages: int
    seconds: float
    problems: list[str]


def build(out: Path, *, report: Path | None = None) -> Built:
    """Build the site in a folder, whose files of earlier builds are replaced.

    Parameters
    ----------
    out : pathlib.Path
        The folder; it is made if needed.
    report : pathlib.Path, optional
        A folder that `python -m validation` wrote; by default `CLAIMS` are tried anew.

    Raises
    ------
    ValueError
        If `out` holds files that no build made, a link of a page leads to nothing, or a formula
        cannot be shown.
    """
    start = time.monotonic()
    if out.exists() and any(out.iterdir()) and not (out / "search-index.js").exists():
        raise ValueError(f"{out} holds other files; choose a folder that is new or of a build.")
    if report is not None and not (report / "report.html").is_file():
        raise ValueError(f"{report} holds no report.html; `python -m validation` writes one.")
    with tempfile.TemporaryDirectory() as folder:
        site = _Site(Path(folder) / "site")
        site.write(report)
        if out.exists():
            shutil.rmtree(out)
        shutil.copytree(site.out, out)
    count = sum(1 for _ in out.rglob("*.html"))
    return Built(count, time.monotonic() - start, links.problems(out))


class _Site:
    """The pages while they are made, and what they ask for: sources, files, and words to find."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.api = Api()
        self.groups = groups()
        self.of_file = {
            entry.source: entry.url for g in self.groups for entry in g.entries if entry.source
        }
        self.of_file[ROOT / "README.md"] = "index.html"
        *guide, measured = self.groups
        self.guide = {entry.url for group in guide for entry in group.entries}
        self.measured = {entry.url: entry.title for entry in measured.entries}
        self.asked: dict[Path, str] = {}  # sources and documents that pages link to
        self.index: list[list[str]] = []
        self.env = jinja2.Environment(
            loader=jinja2.FileSystemLoader(SITE / "templates"),
            autoescape=True,
            trim_blocks=True,
            lstrip_blocks=True,
            undefined=jinja2.StrictUndefined,
        )

    def write(self, report: Path | None) -> None:
        """Write all pages, and then those that they ask for."""
        for name in ("site.css", "site.js"):
            self.put(name, (SITE / "templates" / name).read_text("utf-8"))
        trial = None if report else self.trial()
        drawn = [figures.draw(path) for path in figures.files()]
        for group in self.groups:
            for entry in group.entries:
                if entry.source is not None:
                    first = (
                        {"figure": self.captioned(drawn[0], entry.url)}
                        if entry.url == "index.html"
                        else {}
                    )
                    self.document(entry.source, entry.url, **first)
        self.gallery(drawn)
        for url, page in self.api.pages(self.frame):
            self.put(url, page)
        for member in self.api.members:
            self.index.append([member.name, member.kind, member.url, member.text])
        self.report(report, trial)
        done: set[Path] = set()
        while rest := self.asked.keys() - done:
            for path in sorted(rest):
                self.source(path, self.asked[path])
            done |= rest
        words = json.dumps(self.index, ensure_ascii=False, separators=(",", ":"))
        self.put("search-index.js", f"window.searchIndex = {words};\n")

    def put(self, url: str, text: str) -> None:
        path = self.out / url
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def frame(self, url: str) -> dict[str, Any]:
        """What the frame of a page shows."""
        modules = [
            (name, relative(address(name), url), address(name) == url)
            for name in self.api.modules
            if self._listed(name, url)
        ]
        return {
            "root": relative("", url),
            "version": refattn.__version__,
            "groups": [
                Group(g.title, [e._replace(url=relative(e.url, url)) for e in g.entries])
                for g in self.groups
            ],
            "here": relative(url, url),
            "modules": modules,
            "in_api": url.startswith("api/"),
        }

    def _listed(self, module: str, url: str) -> bool:
        """Modules of the package, and those beside and below the one that is shown."""
        parent = module.rpartition(".")[0]
        return (
            parent in ("", "refattn")
            or url.startswith(address(parent).removesuffix(".html") + ("/" if "/" in url else ""))
            or url == address(parent)
        )

    def page(self, url: str, page: pages.Page, template: str = "page.html", **more: Any) -> None:
        """Write a page of the guide in its frame, and note what is found in it."""
        text = self.env.get_template(template).render(
            **self.frame(url),
            page=page,
            body=Markup(page.body),
            contents=[(level, anchor, Markup(text)) for level, anchor, text in page.contents[1:]],
            **more,
        )
        self.put(url, text)
        # What is measured is found by its name in the navigation; its heading says more.
        kind = "guide" if url in self.guide else "measured"
        name = self.measured.get(url, page.title)
        for section in page.sections:
            whole = section.title in ("", page.title)
            title = name if whole else f"{name}: {section.title}"
            where = url if whole else f"{url}#{section.anchor}"
            words = (
                f"{page.title}. {section.text}" if whole and name != page.title else section.text
            )
            self.index.append([title, kind, where, words])

    def document(self, path: Path, url: str, **more: Any) -> None:
        """A page of a file in Markdown."""
        page = pages.render(
            path.read_text("utf-8"),
            lambda link: self.link(link, path, url),
            lambda name: self.name(name, url),
        )
        if not page.title:  # it begins with a table, say
            page = page._replace(title=path.relative_to(ROOT).as_posix())
        self.page(url, page, "front.html" if more else "page.html", **more)

    def trial(self) -> subprocess.Popen[str]:
        """Try a few claims, beside everything else."""
        command = ["-m", "validation", *CLAIMS, "--workers", "1", "--out"]
        return subprocess.Popen(
            [sys.executable, *command, str(self.out / "report")],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def gallery(self, drawn: list[figures.Figure]) -> None:
        sections = [pages.Section("Gallery", "", "Figures and the lines that made them.")]
        sections += [pages.Section(f.title, f.name, f.caption) for f in drawn]
        contents = [(1, "", "Gallery"), *((2, f.name, f.title) for f in drawn)]
        code = [Markup(pages.coloured(f.code, "python")) for f in drawn]
        drawn = [self.captioned(figure, "gallery.html") for figure in drawn]
        page = pages.Page("Gallery", "", sections, contents)
        self.page("gallery.html", page, "gallery.html", figures=list(zip(drawn, code, strict=True)))

    def captioned(self, figure: figures.Figure, url: str) -> figures.Figure:
        """A figure whose caption is HTML, with links to what it names."""
        page = pages.render(figure.caption, str, lambda name: self.name(name, url))
        caption = page.body.removeprefix("<p>").removesuffix("</p>\n")
        return figure._replace(caption=Markup(caption))

    def report(self, given: Path | None, trial: subprocess.Popen[str] | None) -> None:
        """The report of a run, and a page that leads to it."""
        target = self.out / "report"
        if given is not None:
            shutil.copytree(given, target)
        elif trial is not None and (trial.communicate()[1], trial.returncode)[1]:
            raise ValueError(f"`python -m validation` ended with status {trial.returncode}.")
        for path in target.glob("results.*"):  # kept for runs that go on
            path.unlink()
        path = target / "report.md"
        table = path.read_text("utf-8") if path.exists() else ""
        text = "# Report of a run\n\n"
        if given is None:
            text += (
                "A few claims of the references, which take no time, were tried when these pages "
                f"were built, by `python -m validation {' '.join(CLAIMS)}`. "
                "[How all of them are tried](../README.md).\n\n"
            )
        text += "[The whole report, with figures](report/report.html)\n\n"
        text += re.sub(r"^# .*\n", "", table, flags=re.MULTILINE)
        self.page("report.html", pages.render(text, self.of_report))

    def of_report(self, link: str) -> str:
        """Links of the table of a report are those of a file in its folder."""
        if link == "../README.md":
            return "validation.html"
        if urlsplit(link).scheme or link.startswith(("#", "report/")):
            return link
        if (self.out / "report" / link.partition("#")[0]).is_file():
            return f"report/{link}"
        return self.link(link, SITE.parent / "report" / "report.md", "report.html")

    def name(self, name: str, url: str) -> str | None:
        found = self.api.url(name)
        return found and relative(found, url)

    def link(self, link: str, path: Path, url: str) -> str:
        """An address in a file, as one in the page made of it."""
        parts = urlsplit(link)
        if parts.scheme or not parts.path:
            return link
        target = (path.parent / parts.path).resolve()
        if target.is_dir() and (target / "README.md").is_file():
            target = target / "README.md"
        if not target.is_file() or not target.is_relative_to(ROOT):
            raise ValueError(f"{path.relative_to(ROOT)}: {link} leads to nothing.")
        module = ".".join(target.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if target in self.of_file:
            found = self.of_file[target]
        elif target.suffix == ".py" and module in self.api.modules:
            found = address(module)
        else:
            name = target.relative_to(ROOT).as_posix()
            page = target.suffix in (".py", ".md", ".toml", ".txt")
            found = f"source/{name}.html" if page else f"files/{name}"
            self.asked[target] = found
        return relative(found, url) + (f"#{parts.fragment}" if parts.fragment else "")

    def source(self, path: Path, url: str) -> None:
        """A file that a page links to: a document, a page of code, or as it is."""
        if path.suffix == ".md":
            self.document(path, url)
        elif url.endswith(".html"):
            name = path.relative_to(ROOT).as_posix()
            language = {".py": "python", ".toml": "toml"}.get(path.suffix, "")
            code = pages.coloured(path.read_text("utf-8"), language)
            body = f"<h1><code>{name}</code></h1>\n{pages.block(code)}"
            page = pages.Page(name, body, [], [(1, "", name)])
            self.page(url, page)
        else:
            target = self.out / url
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
