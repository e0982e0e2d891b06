"""The formulas as text: what `python -m refattn.naive` prints, cut into statements that can run."""

from __future__ import annotations
import __future__

import ast
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from types import CodeType, MappingProxyType
from typing import Any, NamedTuple

from ...arrays.words import close
from ...naive.one_file import formulas

_NOTHING: Mapping[str, str] = MappingProxyType({})


@cache
def statements() -> Mapping[str, str]:
    """Return the statements of the printed file by name, in order."""
    return MappingProxyType(cut(formulas()))


def cut(source: str) -> dict[str, str]:
    """Cut a module into statements: what is defined by its name, all else by itself.

    Imports from this package are left out, as the printed file defines what they name.

    Examples
    --------
    >>> cut("from . import x\\nimport math\\n\\n\\ndef half(x):\\n    return x / 2\\n")
    {'import math': 'import math', 'half': 'def half(x):\\n    return x / 2'}
    """
    return dict(_named(source))


def _named(source: str) -> Iterator[tuple[str, str]]:
    lines = source.splitlines()
    for node in ast.parse(source).body:
        # A function begins with its decorators, which `lineno` leaves out.
        first = min([node.lineno, *(x.lineno for x in getattr(node, "decorator_list", ()))])
        text = "\n".join(lines[first - 1 : node.end_lineno])
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name, text
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                yield name, text
            case ast.ImportFrom(level=level) if level:
                pass
            case ast.Expr():
                pass
            case _:
                yield text, text


class Edit(NamedTuple):
    """One change of one function."""

    function: str
    old: str
    new: str

    def apply(self, source: str) -> str:
        """Return the function with the change; its docstring is left alone."""
        quotes = '"""'
        start = source.find(quotes, source.find(quotes) + 3) + 1  # 0 if there is no docstring
        if (count := source.count(self.old, start)) != 1:
            raise ValueError(f"`{self.function}` has {self.old!r} {count} times, not once.")
        return source[:start] + source[start:].replace(self.old, self.new)


def edited(texts: Mapping[str, str], edits: Iterable[Edit]) -> dict[str, str]:
    """Return the functions that are changed, each by its edits in their order."""
    found = dict[str, str]()
    for edit in edits:
        if edit.function not in texts:
            hint = close(edit.function, texts)
            raise ValueError(f"`{edit.function}` is no function of the text.{hint}")
        source = found.get(edit.function, texts[edit.function])
        found[edit.function] = edit.apply(source)
    return found


def code(source: str, name: str) -> CodeType:
    """Compile a statement; annotations are not evaluated, as in the file."""
    # The printed file begins with this import, and a statement alone lacks it.
    flag = __future__.annotations.compiler_flag
    compiled: CodeType = compile(source, f"<{name}>", "exec", flag, dont_inherit=True)
    return compiled


_compiled = cache(code)


@cache
def names_read(source: str) -> frozenset[str]:
    """Return the names that a statement reads, without those that it assigns."""
    names = [x for x in ast.walk(ast.parse(source)) if isinstance(x, ast.Name)]
    return frozenset(x.id for x in names) - {x.id for x in names if isinstance(x.ctx, ast.Store)}


def list_dependents(texts: Mapping[str, str], names: Iterable[str]) -> set[str]:
    """Return these statements, and all that read one of them, or read what reads it.

    Examples
    --------
    >>> sorted(list_dependents({"a": "a = 1", "b": "b = a", "c": "c = b", "d": "d = 2"}, "a"))
    ['a', 'b', 'c']
    """
    found = {*names}
    while more := {x for x, y in texts.items() if x not in found and found & names_read(y)}:
        found |= more
    return found


def run(
    texts: Mapping[str, str],
    changed: Mapping[str, str] = _NOTHING,
    unchanged: Mapping[str, Any] = _NOTHING,
) -> dict[str, Any]:
    """Run statements in a namespace of their own, some of them changed; return the namespace.

    All run again, not the changed ones alone: defaults and decorators are bound when a function is
    defined. Statements that are not changed are compiled once. If the namespace of the `unchanged`
    statements is given, only what reads a changed one runs again.
    """
    space: dict[str, Any] = {"__name__": "formulas", **unchanged}
    again = list_dependents(texts, changed) if unchanged else texts
    for name, source in texts.items():
        if name in again:
            exec(code(changed[name], name) if name in changed else _compiled(source, name), space)
    return space
