"""The folder that Sphinx reads: the guide, the READMEs and what they link to, in one place."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import refattn
from refattn.judge.conformance.report.explanations import explain, groups

SITE = Path(__file__).parent
ROOT = SITE.parents[1]
_MODULES = {f"refattn.{name}" for name in refattn.__all__}
_MODULES |= {f"refattn.judge.{name}" for name in refattn.judge.__all__}
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
_ORPHAN = "---\norphan: true\n---\n"  # which is linked to, and in no table of contents
_SOURCE = "---\norphan: true\nnosearch: true\n---\n# `{}`\n\n``````{}\n{}``````\n"


def gather(folder: Path, report: Path, note: str) -> None:
    """Write what Sphinx reads into a folder: also the report of a run, with a note."""
    shutil.copytree(SITE / "contents", folder)
    documents = _Documents(folder)
    while documents.waiting:
        documents.write(documents.waiting.pop())
    front = (folder / "front.md").read_text("utf-8")
    with (folder / "index.md").open("a", encoding="utf-8") as file:
        file.write(front)
    (folder / "front.md").unlink()
    (folder / "names.md").write_text(_explanations(), encoding="utf-8")
    table = report / "report.md"
    text = re.sub(r"^# .*\n", "", table.read_text("utf-8")) if table.exists() else ""
    head = f"# Report of a run\n\n{note}\n\n[The whole report, with figures](report.html)\n"
    text = _links(head + text, lambda *link: _of_report(report, *link))
    (folder / "report.md").write_text(_formulas(text), encoding="utf-8")


def _explanations() -> str:
    """Explain every name in reports, as `refattn explain` does in a terminal."""
    lines = ["# Names in reports", "", "`refattn explain NAME` prints these texts."]
    for title, names in groups().items():
        lines += ["", f"## {title}"]
        for name in names:
            lines += ["", f"### {name}", "", "``````text", *explain(name), "``````"]
    return "\n".join([*lines, ""])


class _Documents:
    """The names of pages in the site by their files, and those that are not written yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pages = {path: path.stem for path in SITE.glob("guide/*.md")}
        for path in ROOT.glob("validation/**/README.md"):
            self.pages[path] = "-".join(path.relative_to(ROOT).parts[:-1])
        self.waiting = list(self.pages)

    def write(self, path: Path) -> None:
        """Write a page of Markdown with the links of the site, or one that shows a file."""
        text = path.read_text("utf-8")
        if path.suffix == ".md":
            text = _formulas(_links(text, lambda *link: self.link(path.parent, *link)))
            text = _ORPHAN * self.pages[path].startswith("source/") + text
        else:
            language = "python" if path.suffix == ".py" else "text"
            text = _SOURCE.format(path.relative_to(ROOT), language, text)
        target = self.folder / f"{self.pages[path]}.md"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")

    def link(self, start: Path, image: str, text: str, link: str) -> str | None:
        """A link of a file as one of the site, if it leads to a file of ours."""
        parts = urlsplit(link)
        path = (start / parts.path).resolve()
        if parts.scheme or not parts.path or not path.is_relative_to(ROOT) or not path.is_file():
            return None
        name = path.relative_to(ROOT).as_posix()
        module = name.removesuffix(".py").replace("/", ".")
        if image:
            (self.folder / "files" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, self.folder / "files" / name)
            link = f"/files/{name}"
        elif module in _MODULES:
            link = f"/api/{module}.rst"
        else:
            if path not in self.pages:
                self.pages[path] = f"source/{name}"
                self.waiting.append(path)
            link = f"/{self.pages[path]}.md" + (f"#{parts.fragment}" if parts.fragment else "")
        return f"{image}[{text}]({link})"


def _links(text: str, change: Callable[[str, str, str], str | None]) -> str:
    """Change the links of a document."""
    return _LINK.sub(lambda m: change(m[1], m[2], m[3]) or m[0], text)


def _formulas(text: str) -> str:
    """Formulas as Sphinx reads them, from those of GitHub, which have backticks, too."""
    return re.sub(r"\$`([^`]*)`\$", r"$\1$", text)


def _of_report(report: Path, image: str, text: str, link: str) -> str | None:
    """Links to files of a report, which are copied as they are, and to how it was made."""
    if (report / link).is_file():
        return f'<a href="report/{link}">{text}</a>'
    return f"[{text}](/validation.md)" if link == "../README.md" else None
