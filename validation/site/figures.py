"""The gallery: files of about ten lines, run when the site is built, and shown as they are."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .. import svg
from .navigation import SITE

__all__ = ["Figure", "draw", "files"]


class Figure(NamedTuple):
    """A figure: its name, title, caption and code, and the drawing as an element of a page."""

    name: str
    title: str
    caption: str
    code: str
    drawing: str


def files() -> list[Path]:
    """The files of the gallery, in the order in which they are shown."""
    return sorted((SITE / "gallery").glob("[0-9]*.py"))


def draw(path: Path) -> Figure:
    """Run a file of the gallery, which leaves a `figure`, and take its title and words from it.

    Raises
    ------
    ValueError
        If the file has no docstring of a title and a caption, or leaves no figure.
    """
    text = path.read_text("utf-8")
    with np.errstate(all="raise", under="ignore"):
        left = runpy.run_path(str(path))
    title, _, caption = (left["__doc__"] or "").partition("\n\n")
    if not (title and caption and "figure" in left):
        raise ValueError(f"{path.name} must have a title and a caption, and leave a `figure`.")
    name = path.stem.partition("_")[2]
    drawing = svg.for_page(svg.draw(left["figure"], name), f"{name}-", title.rstrip("."))
    code = text.split('"""', 2)[2].strip("\n") + "\n"
    return Figure(name, title.rstrip("."), " ".join(caption.split()), code, drawing)
