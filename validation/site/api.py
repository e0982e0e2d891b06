"""The pages of the API, by pdoc, in the frame of the site."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, ForwardRef, NamedTuple
from unittest.mock import patch

import jinja2
import pdoc.doc
import pdoc.doc_ast
import pdoc.extract
import pdoc.render
import pdoc.render_helpers

import refattn

from .formulas import Formulas
from .navigation import SITE

__all__ = ["Api", "Member", "Written", "address"]

# What a NamedTuple says by itself.
_OF_TUPLES = re.compile(r"Create new instance of |Alias for field number ")
_get_source = pdoc.doc_ast.get_source
_MODULES = ["refattn", r"!refattn\.(.*\.)?_"]


class Member(NamedTuple):
    """A module, class, function or constant that is documented."""

    name: str
    kind: str
    url: str
    text: str


def address(module: str) -> str:
    """Where the page of a module is."""
    return f"api/{module.replace('.', '/')}.html"


class Api:
    """The public modules of the package."""

    def __init__(self) -> None:
        with _loaded():
            names = pdoc.extract.walk_specs(_MODULES)
            self.modules = {name: pdoc.doc.Module.from_name(name) for name in names}
            self.members = list(self._members())
        self.urls = {member.name: member.url for member in self.members}

    def url(self, name: str) -> str | None:
        """Where a name is documented, such as `refattn.verify`, `stats.holm` or `attend()`."""
        name = re.sub(r"\(.*\)$", "", name)
        if not re.fullmatch(r"[A-Za-z_][\w.]*", name):
            return None
        if name in self.urls:
            return self.urls[name]
        # A module's name alone may be any word.
        known = "." in name or (name in refattn.__all__ and f"refattn.{name}" not in self.modules)
        return self.urls.get(f"refattn.{name}") if known else None

    def pages(self, frame: Callable[[str], dict[str, Any]]) -> Iterator[tuple[str, str]]:
        """The addresses of the pages and the pages, in the frame of the site.

        Parameters
        ----------
        frame : callable
            From the address of a page to what its frame shows.
        """
        pdoc.render.configure(
            docformat="numpy", search=False, template_directory=SITE / "templates"
        )
        formulas = Formulas()
        env = pdoc.render.env

        @jinja2.pass_context
        def to_markdown(context: jinja2.runtime.Context, docstring: str) -> str:
            if _OF_TUPLES.match(docstring):
                return ""
            text = formulas.take(docstring)
            return pdoc.render_helpers.to_markdown(text, context["module"], "numpy")

        filters = {"to_markdown": to_markdown}
        with _loaded(), patch.dict(env.filters, filters), patch.dict(env.globals):
            for name, module in self.modules.items():
                url = address(name)
                env.globals.update(frame(url))
                page = pdoc.render.html_module(module, self.modules)
                # Headings in docstrings have the same names everywhere: they are no anchors.
                page = re.sub(r'<h6 id="[^"]*">', "<h6>", page)
                yield url, _tables(formulas.put(page))

    def _members(self) -> Iterator[Member]:
        exported = {id(getattr(refattn, name)): name for name in refattn.__all__}
        for name, module in self.modules.items():
            yield Member(name, "module", address(name), _words(module.docstring))
            listed = getattr(module.obj, "__all__", None)
            for doc in module.flattened_own_members:
                top = doc.qualname.partition(".")[0]
                if (
                    doc.kind == "module"
                    or any(part.startswith("_") for part in doc.qualname.split("."))
                    or (listed is not None and top not in listed)
                    or not doc.docstring
                    or _OF_TUPLES.match(doc.docstring)
                ):
                    continue
                kind = {"variable": "constant"}.get(doc.kind, doc.kind)
                # What the package itself exports is shown there and at home; one is found.
                if name != "refattn" and id(doc.obj) in exported:
                    url = f"{address('refattn')}#{doc.qualname}"
                else:
                    url = f"{address(name)}#{doc.qualname}"
                yield Member(f"{name}.{doc.qualname}", kind, url, _words(doc.docstring))


@contextmanager
def _loaded() -> Iterator[None]:
    """The package with every name that it loads at first use, and types as they are written."""
    names = {name: getattr(refattn, name) for name in refattn.__all__}
    with ExitStack() as stack:
        stack.enter_context(patch.dict(vars(refattn), names))
        stack.enter_context(patch.object(pdoc.doc_ast, "get_source", _source))
        for name in pdoc.extract.walk_specs(_MODULES):
            module = sys.modules.get(name) or importlib.import_module(name)
            for value in list(vars(module).values()):
                for types in _annotations(value):
                    written = {x: Written(_qualified(t, value)) for x, t in types.items()}
                    stack.enter_context(patch.dict(types, written))
        yield


def _source(value: Any) -> str:
    """The source of a module, class or function, of a class also where it is found elsewhere."""
    if not isinstance(value, type) or _get_source(value):
        return _get_source(value)
    kind: type = value
    for home, module in list(sys.modules.items()):
        if home.startswith("refattn.") and vars(module).get(kind.__name__) is kind:
            with patch.object(kind, "__module__", home), suppress(OSError):
                return inspect.getsource(kind)
    return ""


class Written:
    """A type that is shown as it is written, not as what it stands for."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text

    def __call__(self) -> None:
        """Types are callable, which is all that is asked of one."""


def _annotations(value: Any) -> Iterator[dict[str, Any]]:
    """The annotations of a function, or of a class and its methods, of this package."""
    if not str(getattr(value, "__module__", "")).startswith("refattn"):
        return
    if inspect.isfunction(value):
        yield inspect.unwrap(value).__annotations__
    elif inspect.isclass(value):
        yield vars(value).get("__annotations__", {})  # the dict itself, which is patched
        for part in vars(value).values():
            part = getattr(part, "__func__", getattr(part, "fget", part))
            if inspect.isfunction(part):
                yield inspect.unwrap(part).__annotations__


def _qualified(written: Any, owner: Any) -> str:
    """A type as it is written, but with the modules of public classes, which become links."""
    if isinstance(written, Written):
        return repr(written)
    if isinstance(written, ForwardRef):
        written = written.__forward_arg__
    if not isinstance(written, str):
        return inspect.formatannotation(written)
    known = vars(sys.modules[inspect.unwrap(owner).__module__])

    def full(match: re.Match[str]) -> str:
        value = known.get(match[0])
        home = getattr(value, "__module__", "")
        if inspect.isclass(value) and re.fullmatch(r"refattn(\.[a-z]\w*)*", home):
            return f"{home}.{value.__qualname__}"
        return match[0]

    return re.sub(r"(?<![\w.\"'])[A-Za-z_]\w*(?![\w.])", full, written)


def _words(docstring: str) -> str:
    """What is said before the examples, without markup."""
    text = docstring.partition("\nExamples\n---")[0]
    text = re.sub(r"\.\. math::.*?(?=\n\s*\n|\Z)", "", text, flags=re.DOTALL)
    text = re.sub(r":math:`[^`]*`|[`*]|-{3,}", "", text)
    return " ".join(text.split())


def _tables(page: str) -> str:
    """Tables scroll in their box."""
    page = page.replace("<table>", '<div class="scroll" tabindex="0"><table>')
    return page.replace("</table>", "</table></div>")
