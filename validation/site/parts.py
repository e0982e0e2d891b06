"""What Sphinx does not bring: formulas as MathML, links of names, and figures as SVG."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from inspect import isclass, isroutine
from pathlib import Path
from textwrap import indent
from typing import Any

from docutils import nodes
from docutils.parsers.rst.states import Inliner
from latex2mathml.converter import convert
from sphinx.errors import ExtensionError
from sphinx.util.nodes import make_refnode
from sphinx_gallery.scrapers import figure_rst

import refattn

from .. import svg


def mathml(latex: str, display: str) -> str:
    """Convert a formula, which browsers draw without scripts."""
    found = convert(" ".join(latex.split()), display=display).replace(r"\_", "_")
    if unknown := re.search(r"\\\w+", found):
        raise ExtensionError(f"no MathML for {unknown[0]} in the formula {latex}")
    return found


def _inline(writer: Any, node: nodes.Node) -> None:
    writer.body.append(mathml(node.astext(), "inline"))
    raise nodes.SkipNode


def _block(writer: Any, node: nodes.Node) -> None:
    writer.body.append(
        f'<div class="formula" tabindex="0">{mathml(node.astext(), "block")}</div>\n'
    )
    raise nodes.SkipNode


def names(text: str, module: str) -> Iterator[str]:
    """What a name in a text may stand for; a module's name alone may be any word."""
    name = re.sub(r"\(.*\)$", "", text)
    if re.fullmatch(r"[A-Za-z_][\w.]*", name):
        yield from [f"{module}.{name}"] * bool(module)
        inner = name.removeprefix("refattn.")
        if inner != name or "." in name or callable(getattr(refattn, name, None)):
            yield f"refattn.{inner}"
            if inner.partition(".")[0] in refattn.judge.__all__:  # `rounding` is there by two names
                yield f"refattn.judge.{inner}"


def _link_names(app: Any, document: nodes.document, page: str) -> None:
    """Make a link of each name of something public."""
    objects = app.env.domains.python_domain.objects
    module = page.removeprefix("api/") if page.startswith("api/refattn.") else ""
    for literal in list(document.findall(nodes.literal)):
        if isinstance(literal.parent, nodes.reference | nodes.title):
            continue
        found = next((objects[x] for x in names(literal.astext(), module) if x in objects), None)
        if found is not None and (found.docname, found.objtype) != (page, "module"):
            link = (app.builder, page, found.docname, found.node_id, literal.deepcopy())
            literal.replace_self(make_refnode(*link))


def _wrap_output(app: Any, document: nodes.document, page: str) -> None:
    """Let what commands print wrap on a phone, where it holds no table."""
    for block in document.findall(nodes.literal_block):
        if block.get("language") in ("console", "text") and "──" not in block.astext():
            block["classes"].append("wraps")


def public(module: str) -> list[tuple[str, str]]:
    """Classes and functions of a module, as kinds and names.

    What the package itself exports is shown there alone, and listed here without a kind.
    """
    found = importlib.import_module(module)
    own = [x for x, value in vars(found).items() if getattr(value, "__module__", "") == module]
    names = getattr(found, "__all__", None) or [x for x in own if not x.startswith("_")]
    values = {name: getattr(found, name) for name in names}
    kinds = {x: "class" for x, value in values.items() if isclass(value)}
    kinds |= {x: "function" for x, value in values.items() if isroutine(value)}
    exported = {x for x in kinds if getattr(refattn, x, None) is values[x]}
    kinds |= dict.fromkeys(exported, "")
    return [(kinds[x], f"~refattn.{x}" if x in exported else x) for x in kinds]


def _skip(app: Any, what: str, name: str, value: Any, skip: bool, options: Any) -> bool | None:
    """Leave out fields of named tuples, which say nothing of themselves."""
    return True if (value.__doc__ or "").startswith("Alias for field number ") else None


def _bar(
    inliner: Inliner, match: re.Match[str], line: int
) -> tuple[str, list[Any], str, list[Any]]:
    """Leave a bar as it is: norms are written with bars, and nothing is a substitution."""
    end = match.end("start")
    return match.string[:end], [], match.string[end:], []


def _no_way_back(app: Any, page: str, template: str, context: dict[str, Any], _: Any) -> None:
    """Leave out links of sources to pages, as viewcode knows one page for each file only."""
    if page.startswith("_modules/"):
        back = r'<a class="viewcode-back".*?</a>'
        context["body"] = re.sub(back, "", context.get("body", ""), flags=re.DOTALL)


def figure(block: Any, names: dict[str, Any], settings: dict[str, Any]) -> str:
    """Draw the `figure` that a file of the gallery leaves, for sphinx-gallery."""
    path = Path(next(names["image_path_iterator"])).with_suffix(".svg")
    title = re.split(r"[.\n]", names["example_globals"]["__doc__"])[0]
    root = svg.draw(names["example_globals"]["figure"], path.stem)
    path.write_text(svg.for_file(root, title), encoding="utf-8")
    image = str(figure_rst([str(path)], settings["src_dir"], title))
    return "\n.. container:: frame\n\n" + indent(image, "   ") + "\n"


def setup(app: Any) -> dict[str, Any]:
    """Register them."""
    Inliner.dispatch["|"] = _bar
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    app.connect("doctree-resolved", _link_names)
    app.connect("doctree-resolved", _wrap_output)
    app.connect("html-page-context", _no_way_back)
    app.connect("autodoc-skip-member", _skip)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
