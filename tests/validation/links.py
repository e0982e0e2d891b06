"""Whether every link of a folder of pages leads somewhere, and no page asks another host."""

import os
import re
from collections import Counter
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tests.pages import Page

_LOADED = {
    *("script", "img", "link", "iframe", "source"),
    *("video", "audio", "object", "embed", "image"),
}
_OUTSIDE = {"http", "https", "mailto"}  # where a link may lead


def _links(page):
    """Each address that a page holds, and whether it is loaded with the page."""
    styles = page.text("style")
    for tag, attributes in page.elements:
        styles.append(attributes.get("style", ""))
        for key in ("href", "src", "data", "poster", "xlink:href"):
            if key in attributes:
                yield attributes[key], tag in _LOADED
    yield from ((link, True) for style in styles for link in _of_style(style))


def _of_style(text):
    found = re.findall(r"url\(\s*['\"]?([^'\")]+)", text) + re.findall(
        r"@import\s+['\"]([^'\"]+)", text
    )
    return [x for x in found if not x.startswith("#")]


def problems(folder):
    """Every link of a folder of pages that leads nowhere, and whatever asks another host."""
    base = os.path.abspath(folder)
    files = {os.path.join(where, name) for where, _, names in os.walk(base) for name in names}
    pages = {
        path: Page(Path(path).read_text("utf-8"))
        for path in sorted(files)  # in _static: a theme's templates
        if path.endswith(".html") and "_static" not in Path(path).parts
    }
    anchors = {x: Counter(a["id"] for _, a in y.elements if "id" in a) for x, y in pages.items()}
    found = []
    for path, page in pages.items():
        name = os.path.relpath(path, base)
        doubled = [x for x, times in anchors[path].items() if times > 1]
        found += [f"{name}: two elements have the id {x}" for x in doubled]
        for link, loaded in dict.fromkeys(_links(page)):
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
            elif parts.fragment and unquote(parts.fragment) not in anchors[target]:
                found.append(f"{name}: {link} has no such place")
    for sheet in sorted(folder.rglob("*.css")):
        for link in _of_style(sheet.read_text("utf-8")):
            if not (sheet.parent / link).is_file() and not link.startswith("data:"):
                found.append(f"{sheet.relative_to(folder)}: {link} is not there")
    return found
