"""Figures as SVG, for a file of their own and for a page with many of them."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from . import plotting

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_BACKGROUND = "background"
# Text is laid out by the metrics of the first, which comes with matplotlib.
_FONTS = ["DejaVu Sans", "Verdana", "Geneva"]


def draw(figure: Figure, salt: str) -> ElementTree.Element:
    """Draw a figure on white, with text as text, the same in every run; names without namespace.

    It is tidied first: see `plotting.tidy`.
    """
    import matplotlib

    figure.patch.set_gid(_BACKGROUND)
    style: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": salt,
        "font.sans-serif": _FONTS,
    }
    with matplotlib.rc_context(style), io.BytesIO() as file:
        plotting.tidy(figure)
        # No date, and no version of matplotlib either: the settings of the run are elsewhere.
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(file, format="svg", facecolor="white", metadata=nothing)
        root = ElementTree.fromstring(file.getvalue())
    for metadata in root.findall(f"{{{_SVG}}}metadata"):
        root.remove(metadata)
    for element in root.iter():
        element.tag = _local(element.tag)
        element.attrib = {_local(name): value for name, value in element.attrib.items()}
    return root


def size(root: ElementTree.Element) -> tuple[float, float]:
    """Width and height, in points."""
    _, _, width, height = root.attrib["viewBox"].split()
    return float(width), float(height)


def for_file(root: ElementTree.Element, title: str) -> str:
    """Make a document that stands on its own."""
    root = _titled(root, title)
    # Links have the older name too, for programs that know no other.
    for element in root.iter():
        if "href" in element.attrib:
            element.set("xlink:href", element.attrib.pop("href"))
    root.attrib = {"xmlns": _SVG, "xmlns:xlink": _XLINK, **root.attrib}
    return '<?xml version="1.0" encoding="utf-8"?>\n' + _text(root) + "\n"


def for_page(root: ElementTree.Element, prefix: str, title: str) -> str:
    """Make an element of a page, in the colour of its text and without a background.

    All ids begin with the prefix, and the outermost group has the prefix and "figure".
    """
    root = _titled(root, title)
    for parent in list(root.iter()):
        for child in list(parent):
            # A style element would hold for the whole page.
            if child.tag == "style" or child.get("id") == _BACKGROUND:
                parent.remove(child)
    for group in root.findall("g"):
        group.set("id", "figure")
    for element in root.iter():
        for name, value in element.attrib.items():
            if name == "id":
                value = prefix + value
            elif name == "href" and value.startswith("#"):
                value = f"#{prefix}{value[1:]}"
            elif name != "href":
                value = re.sub(r"url\(#", f"url(#{prefix}", value)
                value = re.sub(plotting.INK, "currentColor", value, flags=re.IGNORECASE)
            element.set(name, value)
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    root.set("role", "img")
    root.set("aria-labelledby", f"{prefix}title")
    return _text(root)


def _titled(root: ElementTree.Element, title: str) -> ElementTree.Element:
    """Copy a drawing and put a title first."""
    root = ElementTree.fromstring(_text(root))
    element = ElementTree.Element("title", {"id": "title"})
    element.text = title
    root.insert(0, element)
    return root


def _local(name: str) -> str:
    return name.rpartition("}")[2]


def _text(root: ElementTree.Element) -> str:
    return ElementTree.tostring(root, encoding="unicode")
