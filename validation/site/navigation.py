"""What the site has, and in which order."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

__all__ = ["ROOT", "SITE", "Entry", "Group", "groups", "relative"]

SITE = Path(__file__).parent
ROOT = SITE.parent.parent

_GUIDE = {
    "Start": {
        "index": "refattn",
        "choose": "Choose an estimator",
        "questions": "Questions",
        "glossary": "Glossary",
    },
    "Check a kernel": {
        "ci": "In CI, with pytest",
        "numbers": "Numbers from a GPU",
        "tolerances": "Tolerances explained",
        "gradients": "Gradients",
        "vectors": "Golden vectors",
    },
    "Use": {
        "streaming": "Streaming a decode",
        "performer": "From performer-pytorch",
    },
    "Background": {
        "where": "Formulas and sources",
        "verdicts": "How verdicts are proven",
    },
}
_MEASURED = {  # and whatever other README there is, by its heading
    "validation": "Claims of the references",
    "validation/bugs": "Hall of bugs",
    "validation/benchmarks": "Benchmarks",
    "validation/digits": "Digits in float64",
    "validation/model": "A sentence encoder",
    "validation/data": "Bundled data",
}


class Entry(NamedTuple):
    """A page: its address in the site, its name in the navigation, and the file it is made of."""

    url: str
    title: str
    source: Path | None = None


class Group(NamedTuple):
    """Pages under one heading."""

    title: str
    entries: list[Entry]


def groups() -> list[Group]:
    """All pages of the navigation but the modules of the API."""
    found = [
        Group(
            title,
            [
                Entry(f"{name}.html", text, SITE / "guide" / f"{name}.md")
                for name, text in pages.items()
            ],
        )
        for title, pages in _GUIDE.items()
    ]
    documents = {path: _title(path) for path in sorted(ROOT.glob("validation/**/README.md"))}
    known = {ROOT / folder / "README.md": text for folder, text in _MEASURED.items()}
    measured = [
        Entry(f"{'-'.join(path.relative_to(ROOT).parts[:-1])}.html", text, path)
        for path, text in {
            **known,
            **{x: documents[x] for x in documents if x not in known},
        }.items()
    ]
    shown = [Entry("gallery.html", "Gallery"), Entry("report.html", "Report of a run")]
    return [*found, Group("Measured", [*shown, *measured])]


def _title(path: Path) -> str:
    """The heading of a document."""
    return path.read_text("utf-8").partition("\n")[0].lstrip("# ")


def relative(url: str, base: str) -> str:
    """The address of one page, seen from another."""
    return "../" * base.count("/") + url
