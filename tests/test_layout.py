"""The plan of the package: imports point one way, and modules lend each other public names only."""

import ast
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import refattn

ROOT = Path(refattn.__file__).parent
LINES = 900  # that a module may have
PARAMETERS = 7  # that a private function may have, but for few
FOREIGN = {"torch", "jax", "cupy", "dask"}


def modules():
    """Modules by name."""
    names = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = ("refattn", *path.relative_to(ROOT).with_suffix("").parts)
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


MODULES = modules()


def imports(name, tree):
    """Modules of the package that a module imports, with the name that it takes from each."""
    package = name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((x.name, None) for x in node.names if x.name in MODULES)
        if not isinstance(node, ast.ImportFrom):
            continue
        base = node.module or ""
        if node.level:
            parts = package.split(".")
            outer = parts[: len(parts) - node.level + 1]
            base = ".".join([*outer, *filter(None, [node.module])])
        for item in node.names:
            if f"{base}.{item.name}" in MODULES:
                yield f"{base}.{item.name}", None
            elif base in MODULES:
                yield base, item.name


@cache
def tree(name):
    return ast.parse(MODULES[name].read_text("utf-8"))


@pytest.mark.long
def test_imports_make_no_circle():
    """The lazy names of the package itself are no import."""
    graph = {
        name: {other for other, _ in imports(name, tree(name)) if other != name}
        for name in MODULES
        if name != "refattn"
    }
    tuple(TopologicalSorter(graph).static_order())
    graph["refattn.arrays.library"].add("refattn.estimators.lara")
    with pytest.raises(CycleError):
        TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_as_planned(name):
    assert len(MODULES[name].read_text("utf-8").splitlines()) <= LINES
    for other, taken in imports(name, tree(name)):
        private = (taken or "").startswith("_") and taken != "__version__"
        assert not private, f"{name} imports {taken} of {other}"
    for node in ast.walk(tree(name)):
        # The same code runs on every library, as it imports none but NumPy.
        taken = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        taken += [x.name for x in node.names] if isinstance(node, ast.Import) else []
        assert not FOREIGN & {x.partition(".")[0] for x in taken}


@pytest.mark.long
def test_few_private_functions_have_many_parameters():
    functions = [
        (f"{name}.{node.name}", node.args)
        for name in MODULES
        for node in ast.walk(tree(name))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("_")
    ]
    sizes = {x: len([*a.posonlyargs, *a.args, *a.kwonlyargs]) for x, a in functions}
    many = [x for x, size in sizes.items() if size > PARAMETERS]
    assert len(many) <= 5, many
