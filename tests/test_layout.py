"""The plan of the package: imports point one way, and modules lend each other public names only."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import refattn

ROOT = Path(refattn.__file__).parent
LINES = 900  # that a module may have
PARAMETERS = 7  # that a private function may have, but for few


def modules():
    """Modules by name."""
    names = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = ("refattn", *path.relative_to(ROOT).with_suffix("").parts)
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


MODULES = modules()


def imports(name, source, known):
    """Modules of the package that a module imports, with the name that it takes from each."""
    package = name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((x.name, None) for x in node.names if x.name in known)
        if not isinstance(node, ast.ImportFrom):
            continue
        base = node.module or ""
        if node.level:
            parts = package.split(".")
            outer = parts[: len(parts) - node.level + 1]
            base = ".".join([*outer, *filter(None, [node.module])])
        for item in node.names:
            if f"{base}.{item.name}" in known:
                yield f"{base}.{item.name}", None
            elif base in known:
                yield base, item.name


def graph(changed=None):
    """Which modules each imports; the lazy names of the package itself are no import."""
    known, found = set(MODULES), {}
    for name, path in MODULES.items():
        source = (changed or {}).get(name) or path.read_text("utf-8")
        found[name] = {other for other, _ in imports(name, source, known) if other != name}
    return {name: others for name, others in found.items() if name != "refattn"}


def test_imports_make_no_circle():
    tuple(TopologicalSorter(graph()).static_order())
    source = (
        MODULES["refattn.arrays.library"].read_text("utf-8")
        + "\nfrom ..estimators.lara import WEIGHTINGS\n"
    )
    circle = TopologicalSorter(graph({"refattn.arrays.library": source}))
    with pytest.raises(CycleError):
        circle.prepare()


def test_modules_lend_public_names_only():
    for name, path in MODULES.items():
        for other, taken in imports(name, path.read_text("utf-8"), set(MODULES)):
            private = (taken or "").startswith("_") and taken != "__version__"
            assert not private, f"{name} imports {taken} of {other}"


@pytest.mark.parametrize("name", MODULES)
def test_modules_are_not_long(name):
    assert len(MODULES[name].read_text("utf-8").splitlines()) <= LINES


def test_few_private_functions_have_many_parameters():
    many = []
    for name, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("_"):
                a = node.args
                if len([*a.posonlyargs, *a.args, *a.kwonlyargs]) > PARAMETERS:
                    many.append(f"{name}.{node.name}")
    assert len(many) <= 5, many


def test_only_tests_import_libraries_of_arrays():
    """The same code runs on every library, as it imports none but NumPy."""
    foreign = {"torch", "jax", "cupy", "dask"}
    for name, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            taken = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            taken += [x.name for x in node.names] if isinstance(node, ast.Import) else []
            assert not foreign & {x.partition(".")[0] for x in taken}, name
