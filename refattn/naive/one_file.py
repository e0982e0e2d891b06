"""The formulas of `naive` as one file that imports nothing of the package, for others to keep.

The file is made of the source of the package: the definitions that the formulas reach, in the
order terms, formulas, checks. Formulas that are asked for by name come first; they are given their
checks at the end.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import resources
from typing import NamedTuple

from .. import naive
from .._version import __version__
from ..arrays.checks import choice

# In the order of the file: what runs at import comes first.
_MODULES = tuple(dict.fromkeys((
    "typing", "naive.one_file_array", "arrays.heads", "naive.terms", "naive.doors",
    "naive.softmax", "naive.rfa", "naive.ra", "naive.lara", "naive.linear", "naive.near_and_far",
    *(getattr(naive, x).__module__.removeprefix("refattn.") for x in naive.__all__),
    "arrays.qkv", "arrays.tokens", "arrays.frequencies", "arrays.key_samples", "arrays.checks",
    "arrays.words",
)))  # fmt: skip
# What names of a module begin with, as there is one namespace only.
_PREFIXES = {
    "arrays.checks": "check", "arrays.qkv": "qkv", "arrays.frequencies": "frequencies",
    "arrays.key_samples": "key_samples", "arrays.tokens": "tokens",
}  # fmt: skip
_INSTEAD = {"arrays.library": "naive.one_file_array"}
_PLAIN = {"ArrayT": "Array"}  # names of types that are not needed

_HEADER = """\
# refattn.naive {version}: attention estimators, each as its formula is written.
# Copyright (c) 2026, the refattn developers. SPDX-License-Identifier: BSD-3-Clause
# Made by `python -m refattn.naive{words}`; do not edit.
# SHA-256 of all lines below this one: {digest}
"""


class _Definition(NamedTuple):
    """A name of a module, and what it takes from where."""

    module: str
    name: str
    node: ast.stmt
    text: str  # with the comments before it


def formulas(names: Sequence[str] = ()) -> str:
    """Write formulas of `naive`, all or those named, as the source of one module.

    It needs NumPy 2, and array-api-compat for arrays of libraries without `__array_namespace__`.

    Parameters
    ----------
    names : sequence of str, optional
        Names of `naive`, all by default.

    Returns
    -------
    str
        The module. Its first lines name version and licence, and have the SHA-256 of all others.

    Raises
    ------
    ValueError
        If `naive` has no such name.
    """
    for name in names:
        choice("names", name, naive.__all__)
    chosen = sorted(set(names)) or naive.__all__
    kept, imports = _reached([_home(name) for name in chosen])
    ahead = [x for x in kept if x.name in names and not _defined_by_others(x)]
    first, last = zip(*map(_undecorated, ahead), strict=True) if ahead else ((), ())
    module = ast.parse(_source("naive.__init__"))  # not `__doc__`, which python -OO leaves out
    title, _, *rest = (ast.get_docstring(module) or "").split("\n\n")  # less that on the package
    heading = "\n\n".join([title, *rest])
    body = [f'r"""{heading}\n"""', "from __future__ import annotations", *_statements(imports)]
    if len(chosen) > 1:
        body.append("__all__ = [\n" + "".join(f'    "{name}",\n' for name in chosen) + "]")
    else:
        body.append(f'__all__ = ["{chosen[0]}"]')
    others = [_renamed(x) for x in kept if x not in ahead]
    text = "\n\n\n".join(["\n\n".join(body), *first, *others, *last]) + "\n"
    text = "# fmt: off\n" + text
    words = "".join(f" {name}" for name in names)
    digest = hashlib.sha256(text.encode("ascii")).hexdigest()
    return _HEADER.format(version=__version__, words=words, digest=digest) + text


@cache
def _source(module: str) -> str:
    *folders, file = module.split(".")
    return resources.files("refattn").joinpath(*folders, f"{file}.py").read_text("utf-8")


@cache
def _definitions(module: str) -> dict[str, _Definition]:
    """What a module defines, by name, in order."""
    source = _source(module)
    lines = source.splitlines()
    found: dict[str, _Definition] = {}
    for node in ast.parse(source).body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                first = min([node.lineno, *(x.lineno for x in node.decorator_list)])
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                first = node.lineno
            case _:
                continue
        while lines[first - 2].startswith("#"):
            first -= 1
        found[name] = _Definition(module, name, node, "\n".join(lines[first - 1 : node.end_lineno]))
    return found


@cache
def _imported(module: str) -> dict[str, tuple[str | None, str]]:
    """What a module imports: where each name is from, of the package or (None) outside of it."""
    parts = module.split(".")
    found: dict[str, tuple[str | None, str]] = {}
    for node in ast.parse(_source(module)).body:
        if isinstance(node, ast.Import):
            for x in node.names:
                text = f"import {x.name}" + (f" as {x.asname}" if x.asname else "")
                found[x.asname or x.name] = (None, text)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {x.name: (None, f"from {node.module} import {x.name}") for x in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = [*parts[: len(parts) - node.level], *filter(None, [node.module])]
            for x in node.names:
                whole = ".".join([*base, x.name])
                inside, name = (whole, "") if whole in _MODULES else (".".join(base), x.name)
                found[x.asname or x.name] = (_INSTEAD.get(inside, inside), name)
    return found


def _home(name: str) -> tuple[str, str]:
    """Where `naive` defines a name."""
    return next((m, name) for m in _MODULES if m.startswith("naive.") and name in _definitions(m))


def _uses(definition: _Definition) -> Iterator[tuple[ast.expr, str | None, str]]:
    """Names of modules in a definition: where each is, its module or None, and its name there."""
    own, imported = _definitions(definition.module), _imported(definition.module)
    bound = {x.arg for x in ast.walk(definition.node) if isinstance(x, ast.arg)}
    for x in ast.walk(definition.node):
        if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store):
            bound.add(x.id)
    bound.discard(definition.name)
    for x in ast.walk(definition.node):
        if isinstance(x, ast.Attribute) and isinstance(x.value, ast.Name):
            where, name = imported.get(x.value.id, ("", ""))
            if where and not name:  # a module of the package
                yield x, where, x.attr
        elif isinstance(x, ast.Name) and x.id not in bound:
            if x.id in own:
                yield x, definition.module, x.id
            elif x.id in imported and imported[x.id][1]:
                where, name = imported[x.id]
                yield x, where, name


def _reached(roots: Sequence[tuple[str, str]]) -> tuple[list[_Definition], set[str]]:
    """Definitions that some need, in the order of the file, and the imports of all."""
    open_, seen, imports = list(roots), set(roots), set()
    while open_:
        module, name = open_.pop()
        for _, where, used in _uses(_definitions(module)[name]):
            if where is None:
                imports.add(used)
                continue
            home = ("naive.one_file_array", _PLAIN[used]) if used in _PLAIN else (where, used)
            if home not in seen:
                seen.add(home)
                open_.append(home)
    every = (x for module in _MODULES for x in _definitions(module).values())
    return [x for x in every if (x.module, x.name) in seen], imports


def _called(module: str, name: str) -> str:
    """The name in the file."""
    if module in _PREFIXES and not name.startswith("_"):
        return f"{_PREFIXES[module]}_{name}"
    before = _MODULES[: _MODULES.index(module)]
    if any(name in _definitions(other) for other in before if other not in ("typing", *_PREFIXES)):
        return f"_{module.rpartition('.')[2]}{name}"
    return name


def _renamed(definition: _Definition) -> str:
    """The source of a definition, with the names of the file."""
    module, name, node, text = definition
    lines = text.splitlines()
    first = (node.end_lineno or 0) - len(lines) + 1
    edits = []
    for x, where, used in _uses(definition):
        if where is not None:
            new = _PLAIN.get(used) or _called(where, used)
            edits.append((x.lineno - first, x.col_offset, x.end_col_offset or 0, new))
    for row, start, stop, new in sorted(set(edits), reverse=True):
        lines[row] = lines[row][:start] + new + lines[row][stop:]
    at = node.lineno - first
    if _called(module, name) != name:  # a line begins with the name, or with one word before it
        lines[at] = re.sub(rf"^(\w+ )?{name}\b", rf"\g<1>{_called(module, name)}", lines[at])
    return "\n".join(lines).replace(">>> from refattn import naive", ">>> import naive")


def _defined_by_others(definition: _Definition) -> bool:
    """Whether a formula has a default that is a name, which must be there before it."""
    assert isinstance(definition.node, ast.FunctionDef)
    arguments = definition.node.args
    defaults = filter(None, (*arguments.defaults, *arguments.kw_defaults))
    return any(isinstance(x, ast.Name) for default in defaults for x in ast.walk(default))


def _undecorated(definition: _Definition) -> tuple[str, str]:
    """The source of a formula without its decorator, and a statement that decorates it."""
    head, mark, body = _renamed(definition).partition(f"def {definition.name}(")
    call = head[head.index("@") + 1 :].rstrip()
    return mark + body, f"{definition.name} = {call}({definition.name})"


def _statements(imports: set[str]) -> Iterator[str]:
    """Statements that import, those of the standard library first, and names of a module once."""
    taken: dict[str, set[str]] = {}
    plain = sorted(x for x in imports if x.startswith("import "))
    for x in imports - set(plain):
        _, module, _, name = x.split()
        taken.setdefault(module, set()).add(name)
    named = [f"from {m} import {', '.join(sorted(names))}" for m, names in sorted(taken.items())]
    yield "\n".join([*(x for x in plain if " numpy" not in x), *named])
    yield "\n".join(x for x in plain if " numpy" in x)
