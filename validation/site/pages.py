"""Markdown to pages: links, formulas, code in colours, and the words that are searched."""

from __future__ import annotations

import re
from collections.abc import Callable
from html import escape
from typing import Any, NamedTuple

from markdown_it import MarkdownIt
from markdown_it.token import Token
from mdit_py_plugins.dollarmath import dollarmath_plugin
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_by_name
from pygments.util import ClassNotFound

from .formulas import mathml

__all__ = ["Page", "Section", "block", "coloured", "render", "slug"]

_FORMATTER = HtmlFormatter(nowrap=True)


class Section(NamedTuple):
    """What is found by a search: a heading, its anchor and the words below it."""

    title: str
    anchor: str
    text: str


class Page(NamedTuple):
    """A page before it has its frame: its heading, its body, and its sections."""

    title: str
    body: str
    sections: list[Section]
    contents: list[tuple[int, str, str]]  # level, anchor, HTML


def slug(text: str, taken: set[str]) -> str:
    """The anchor of a heading, as the common forges of code make it."""
    base = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
    name, number = base, 0
    while name in taken:
        number += 1
        name = f"{base}-{number}"
    taken.add(name)
    return name


def coloured(code: str, language: str) -> str:
    """Code as HTML, with classes for its colours."""
    try:
        lexer = get_lexer_by_name(language) if language else TextLexer()
    except ClassNotFound:
        lexer = TextLexer()
    return str(highlight(code, lexer, _FORMATTER))


def block(code: str) -> str:
    """A block of code, which scrolls in its box."""
    return f'<pre class="code" tabindex="0"><code>{code}</code></pre>\n'


def render(
    text: str, link: Callable[[str], str], name: Callable[[str], str | None] = lambda x: None
) -> Page:
    """Make a page of Markdown.

    Parameters
    ----------
    text : str
        The Markdown.
    link : callable
        From an address in the text to one in the site.
    name : callable, optional
        From the name of something public to the address of its documentation, if it has one.
    """
    parser = MarkdownIt("commonmark").enable("table")
    dollarmath_plugin(
        parser,
        allow_space=False,
        allow_digits=False,
        renderer=lambda latex, options: mathml(latex, block=bool(options["display_mode"])),
    )
    tokens = parser.parse(text)
    _anchors(tokens)
    for token in tokens:
        for child in token.children or []:
            for key in ("href", "src"):
                if key in child.attrs:
                    child.attrs[key] = link(str(child.attrs[key]))
    renderer: Any = parser.renderer
    rules = renderer.rules
    rules["fence"] = rules["code_block"] = _code
    rules["table_open"] = lambda *_: '<div class="scroll" tabindex="0"><table>\n'
    rules["table_close"] = lambda *_: "</table></div>\n"
    rules["code_inline"] = lambda tokens, i, *_: _inline(tokens, i, name)
    rules["math_block"] = lambda tokens, i, *_: mathml(tokens[i].content, block=True)
    # GitHub has $`...`$ too, which is what reports write.
    rules["math_inline"] = lambda tokens, i, *_: mathml(tokens[i].content.strip("`"))
    body = renderer.render(tokens, parser.options, {})
    contents = []
    for i, token in enumerate(tokens):
        if token.type == "heading_open":
            inner = renderer.renderInline(tokens[i + 1].children or [], parser.options, {})
            inner = re.sub(r"</?a\b[^>]*>", "", inner)
            contents.append((int(token.tag[1]), str(token.attrs["id"]), inner))
    sections = _sections(tokens)
    return Page(sections[0].title, body, sections, contents)


def _anchors(tokens: list[Token]) -> None:
    taken: set[str] = set()
    for i, token in enumerate(tokens):
        if token.type == "heading_open":
            token.attrs["id"] = slug(_words(tokens[i + 1]), taken)


def _words(token: Token) -> str:
    if not token.children:
        return token.content
    return "".join(" " if x.type == "softbreak" else x.content for x in token.children)


def _sections(tokens: list[Token]) -> list[Section]:
    found: list[Section] = []
    for i, token in enumerate(tokens):
        if token.type == "heading_open":
            found.append(Section(_words(tokens[i + 1]), str(token.attrs["id"]), ""))
        elif token.type in ("inline", "fence") and tokens[i - 1].type != "heading_open":
            if not found:
                found.append(Section("", "", ""))
            words = " ".join(_words(token).split())
            found[-1] = found[-1]._replace(text=f"{found[-1].text} {words}".strip())
    return found


def _code(tokens: list[Token], i: int, *_: Any) -> str:
    language = (tokens[i].info.split() or [""])[0]
    return block(coloured(tokens[i].content, language))


def _inline(tokens: list[Token], i: int, name: Callable[[str], str | None]) -> str:
    text = tokens[i].content
    code = f"<code>{escape(text)}</code>"
    inside = any(x.type == "link_open" for x in tokens[:i]) and not any(
        x.type == "link_close" for x in tokens[_last(tokens[:i]) : i]
    )
    url = None if inside else name(text)
    return f'<a class="name" href="{url}">{code}</a>' if url else code


def _last(tokens: list[Token]) -> int:
    return max((j for j, x in enumerate(tokens) if x.type == "link_open"), default=0)
