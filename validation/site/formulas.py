"""LaTeX to MathML, when the site is built: browsers draw it without scripts."""

from __future__ import annotations

import re
from textwrap import dedent

from latex2mathml.converter import convert

__all__ = ["Formulas", "mathml"]

_BLOCK = re.compile(
    r"^(?P<indent>[ ]*)\.\.[ ]math::[ ]*(?P<first>[^\n]*)\n"
    r"(?P<rest>(?:(?P=indent)[ ]+\S[^\n]*\n|[ ]*\n)*)",
    re.MULTILINE,
)
_INLINE = re.compile(r":math:`([^`]+)`")


def mathml(latex: str, *, block: bool = False) -> str:
    """Convert a formula.

    Raises
    ------
    ValueError
        If a command is not known.
    """
    found = convert(" ".join(latex.split()), display="block" if block else "inline")
    found = found.replace(r"\_", "_")
    if unknown := re.search(r"\\\w+", found):
        raise ValueError(f"no MathML for {unknown[0]} in the formula {latex}")
    return f'<div class="formula" tabindex="0">{found}</div>' if block else found


class Formulas:
    """Takes formulas out of a docstring, as nothing else should touch them, and puts them back."""

    def __init__(self) -> None:
        self._found: list[str] = []

    def take(self, docstring: str) -> str:
        """Replace the formulas of a docstring by words that stand for them."""
        docstring = _BLOCK.sub(self._block, docstring + "\n")
        return _INLINE.sub(lambda m: self._keep(mathml(m[1])), docstring)

    def put(self, page: str) -> str:
        """Replace these words by the formulas, as MathML."""
        page = re.sub(r"<p>\s*(FORMULA\d+E)\s*</p>", r"\1", page)
        return re.sub(r"FORMULA(\d+)E", lambda m: self._found[int(m[1])], page)

    def _block(self, match: re.Match[str]) -> str:
        text = match["first"] + "\n" + dedent(match["rest"])
        return f"\n{match['indent']}{self._keep(mathml(text, block=True))}\n\n"

    def _keep(self, found: str) -> str:
        self._found.append(found)
        return f"FORMULA{len(self._found) - 1}E"
