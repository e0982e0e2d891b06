"""The plan of the package: what may import what, how large a thing may be, what a name may be."""

import ast
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import refattn

ROOT = Path(refattn.__file__).parent
LINES, MODULES, PARAMETERS, SEARCHES = 600, 20, 7, 60
FOREIGN = {"torch", "jax", "cupy", "dask"}
# A folder, or a module at the top, and those that it imports beside `arrays` and `typing`.
TABLE = {
    "arrays": "",
    "naive": "_version",
    "features": "",
    "stats": "",
    "files": "",
    "engine": "features",
    "attention": "engine",
    "kernels": "engine",
    "sampling": "engine",
    "moments": "engine",
    "diagnostics": "engine",
    "packed": "attention",
    "estimators": "engine features kernels sampling",
    "gradients": "attention engine estimators features naive sampling",
    "streaming": "attention engine estimators features",
    "certified": "engine",
    "distributed": "attention engine estimators sampling streaming",
    "theory": "attention estimators kernels sampling",
    "adapt": "estimators moments sampling theory",
    "registry": "adapt attention certified estimators gradients kernels moments naive sampling "
    "streaming",
    "rounding": "certified engine",
    "verification": "engine features files registry rounding stats",
    "testing": "files rounding verification",
    "pytest_plugin": "testing",
    "compare": "attention files registry",
    "profile": "adapt attention compare moments registry sampling theory",
    "conformance": "_version attention engine features files gradients kernels naive registry "
    "rounding sampling stats theory verification",
    "cli": "_version compare conformance files profile registry rounding verification",
    "__main__": "cli",
    "typing": "",
}
# Folders of `conformance`: checks know of no defects, and defects are edits of the formulas.
CHECKS, DEFECTS = "refattn.conformance.checks", "refattn.conformance.defects"


class Module:
    """What the rules ask of a module."""

    def __init__(self, text="", package=False):
        nodes = list(ast.walk(ast.parse(text)))
        self.package, self.lines = package, text.count("\n")
        self.imports = [x for x in nodes if isinstance(x, ast.Import | ast.ImportFrom)]
        self.functions = [x for x in nodes if isinstance(x, ast.FunctionDef)]
        self.calls = [x.func for x in nodes if isinstance(x, ast.Call)]


def plan():
    """Modules of the package by name."""
    for path in sorted(ROOT.rglob("*.py")):
        parts = ("refattn", *path.relative_to(ROOT).with_suffix("").parts)
        package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if package else parts)
        yield name, Module(path.read_text("utf-8"), package)


PLAN = dict(plan())


def imports(name, modules):
    """Modules of the package that a module imports, with the name that it takes from each."""
    outer = name.split(".") if modules[name].package else name.split(".")[:-1]
    for node in modules[name].imports:
        if isinstance(node, ast.Import):
            yield from ((x.name, None) for x in node.names if x.name in modules)
        if not isinstance(node, ast.ImportFrom):
            continue
        above = outer[: len(outer) - node.level + 1] if node.level else []
        base = ".".join([*above, *filter(None, [node.module])])
        for item in node.names:
            if f"{base}.{item.name}" in modules:
                yield f"{base}.{item.name}", None
            elif base in modules:
                yield base, item.name


def room(name):
    return name.split(".")[1] if "." in name else name


# --- the rules: each yields what breaks it --------------------------------------------------------


def circles(modules):
    """The lazy names of the package itself are no import."""
    graph = {
        name: {other for other, _ in imports(name, modules) if other != name}
        for name in modules
        if name != "refattn"
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        yield error.args[1]


def imports_against_the_table(modules):
    for name in modules:
        allowed = {room(name), "arrays", "typing", *TABLE.get(room(name), "").split()}
        for other, _ in imports(name, modules):
            if name != "refattn" and room(other) not in allowed and other != "refattn":
                yield name, other
            if name.startswith(CHECKS) and other.startswith(DEFECTS):
                yield name, other


def private_names_that_are_lent(modules):
    for name in modules:
        for other, taken in imports(name, modules):
            if (taken or "").startswith("_") and taken != "__version__":
                yield name, other, taken


def imports_of_array_libraries(modules):
    """The same code runs on every library, as it imports none but NumPy."""
    for name, module in modules.items():
        for node in module.imports:
            taken = [getattr(node, "module", None) or "", *(x.name for x in node.names)]
            if FOREIGN & {x.partition(".")[0] for x in taken}:
                yield name, taken


def modules_that_are_private(modules):
    yield from (x for x in modules if "._" in x and not x.endswith(("._version", ".__main__")))


def folders_that_are_too_full(modules):
    sizes = Counter(name.rpartition(".")[0] for name in modules if not modules[name].package)
    yield from (x for x, size in sizes.items() if size > MODULES)


def modules_that_are_too_long(modules):
    """But for tables: the catalogue of defects."""
    for name, module in modules.items():
        if module.lines > LINES and not name.startswith(DEFECTS):
            yield name, module.lines


def private_functions_of_many_parameters(modules):
    for name, module in modules.items():
        for node in module.functions:
            taken = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            private = node.name.startswith("_") and not node.name.endswith("__")
            if private and len(taken) > PARAMETERS:
                yield name, node.name


def searches_for_the_namespace(modules):
    """They are made in public functions, and handed down: so many in all."""
    calls = [name for name, module in modules.items() for x in module.calls if called(x)]
    if len(calls) > SEARCHES:
        yield Counter(calls).most_common()


def called(x):
    return getattr(x, "id", "") == "array_namespace"


LIBRARY, DOOR = "refattn.arrays.library", "refattn.attention"
BREACHES = {
    circles: {LIBRARY: "from .. import attention", DOOR: "from .arrays.library import exp"},
    imports_against_the_table: {LIBRARY: "from ..features import exp"},
    private_names_that_are_lent: {DOOR: "from .arrays.library import _NUMPY"},
    imports_of_array_libraries: {DOOR: "def f():\n    import torch.nn"},
    modules_that_are_private: {"refattn.engine._hops": ""},
    folders_that_are_too_full: {f"refattn.engine.more{i}": "" for i in range(MODULES + 1)},
    modules_that_are_too_long: {DOOR: "\n" * (LINES + 1)},
    private_functions_of_many_parameters: {DOOR: "def _f(a, b, c, d, e, f, g, *, h): 0"},
    searches_for_the_namespace: {DOOR: "array_namespace(x)\n" * (SEARCHES + 1)},
}


@pytest.mark.parametrize("rule", BREACHES, ids=lambda x: x.__name__)
def test_the_package_keeps_to_its_plan(rule):
    assert list(rule(PLAN)) == []


@pytest.mark.parametrize("rule", BREACHES, ids=lambda x: x.__name__)
def test_a_breach_is_seen(rule):
    empty = {name: Module(package=x.package) for name, x in PLAN.items()}
    assert list(rule(empty)) == []
    assert list(rule(empty | {name: Module(text) for name, text in BREACHES[rule].items()}))


def test_checks_know_of_no_defects():
    modules = PLAN | {f"{CHECKS}.laws": Module("from ..defects import rfa")}
    assert list(imports_against_the_table(modules)) == [(f"{CHECKS}.laws", f"{DEFECTS}.rfa")]


def test_the_table_names_what_is_there():
    assert {room(x) for x in PLAN} - {"refattn", "_version"} == set(TABLE)
