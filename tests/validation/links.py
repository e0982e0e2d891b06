"""Whether every link of a folder of pages leads somewhere, and no page asks another host."""

from __future__ import annotations

import os
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

__all__ = ["problems"]

_LOADED = {
    "script",
    "img",
    "link",
    "iframe",
    "source",
    "video",
    "audio",
    "object",
    "embed",
    "image",
}
_OUTSIDE = {"http", "https", "mailto"}  # where a link may lead


class _Reader(HTMLParser):
    """The anchors of a page, what it links to, and what it loads."""

    def __init__(self) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.doubled: list[str] = []
        self.links: list[tuple[str, bool]] = []  # address, is it loaded with the page

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for key, value in attrs:
            if value is None:
                continue
            if key == "id":
                if value in self.anchors:
                    self.doubled.append(value)
                self.anchors.add(value)
            elif key in ("href", "src", "data", "poster", "xlink:href"):
                self.links.append((value, tag in _LOADED))
            elif key == "style":
                self.links.extend((x, True) for x in _of_style(value))
        self._tag = tag

    def handle_data(self, data: str) -> None:
        if getattr(self, "_tag", "") == "style":
            self.links.extend((x, True) for x in _of_style(data))


def _of_style(text: str) -> list[str]:
    found = re.findall(r"url\(\s*['\"]?([^'\")]+)", text) + re.findall(
        r"@import\s+['\"]([^'\"]+)", text
    )
    return [x for x in found if not x.startswith("#")]


def problems(folder: Path) -> list[str]:
    """Every link of a folder of pages that leads nowhere, and whatever asks another host."""
    base = os.path.abspath(folder)
    files = {os.path.join(where, name) for where, _, names in os.walk(base) for name in names}
    pages: dict[str, _Reader] = {}
    for path in sorted(files):
        if (
            path.endswith(".html") and "_static" not in Path(path).parts
        ):  # there: a theme's templates
            reader = pages[path] = _Reader()
            reader.feed(Path(path).read_text("utf-8"))
            reader.close()
    found = []
    for path, reader in pages.items():
        name = os.path.relpath(path, base)
        found += [f"{name}: two elements have the id {x}" for x in reader.doubled]
        for link, loaded in dict.fromkeys(reader.links):
            parts = urlsplit(link)
            if parts.scheme == "data" or (parts.scheme in _OUTSIDE and not loaded):
                continue
            if parts.scheme or parts.netloc:
                found.append(f"{name}: asks another host for {link}")
                continue
            target = os.path.normpath(os.path.join(os.path.dirname(path), unquote(parts.path)))
            target = target if parts.path else path
            if target not in files:
                found.append(f"{name}: {link} is not there")
            elif parts.fragment and unquote(parts.fragment) not in pages[target].anchors:
                found.append(f"{name}: {link} has no such place")
    for sheet in sorted(folder.rglob("*.css")):
        for link in _of_style(sheet.read_text("utf-8")):
            if not (sheet.parent / link).is_file() and not link.startswith("data:"):
                found.append(f"{sheet.relative_to(folder)}: {link} is not there")
    return found
