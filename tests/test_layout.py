"""The plan of the package: what may import what, how large a thing may be, what a name may be."""

import ast
import gc
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import refattn

ROOT = Path(refattn.__file__).parent
LINES, MODULES, PARAMETERS, HOMES = 600, 20, 7, 80
FORMULAS = set(refattn.naive.__all__)
SEARCHES = {"array_namespace": 60, "broadcast_lead": 12}
FOREIGN = {"torch", "jax", "cupy", "dask", "tensorflow", "mlx", "ndonnx", "sparse"}
# A folder, or a module at the top or in `judge`, and those that it imports beside `arrays` and
# `typing`. What computes attention imports nothing of what judges it, which has one door.
TABLE = {
    "arrays": "",
    "naive": "_version",
    "features": "numbers",
    "files": "",
    "numbers": "",
    "engine": "features numbers",
    "attention": "engine",
    "kernels": "engine",
    "sampling": "engine",
    "moments": "engine",
    "diagnostics": "engine",
    "packed": "attention",
    "recurrences": "estimators",
    "estimators": "engine features kernels numbers sampling",
    "gradients": "attention engine estimators numbers registry",
    "streaming": "attention engine estimators features",
    "certified": "engine naive numbers",
    "distributed": "attention engine estimators sampling streaming",
    "theory": "attention estimators kernels sampling",
    "adapt": "moments sampling theory",
    "registry": "adapt attention certified estimators kernels moments naive recurrences sampling "
    "streaming",
    "compare": "adapt attention files moments registry sampling theory",
    "judge": "",
    "judge.stats": "",
    "judge.rounding": "certified engine naive numbers",
    "judge.mistakes": "engine features judge.rounding judge.stats judge.verification naive "
    "registry",
    "judge.verification": "engine features files judge.kinds judge.mistakes judge.rounding "
    "judge.stats registry",
    "judge.kinds": "engine files judge.rounding judge.verification",
    "judge.runs": "files judge.mistakes judge.rounding judge.stats judge.verification",
    "judge.conformance": "_version attention engine estimators features files gradients kernels "
    "judge.mistakes judge.rounding judge.stats judge.verification naive registry sampling theory",
    "judge.vectors": "_version files judge.conformance judge.mistakes naive registry",
    "judge.audits": "features judge.conformance judge.mistakes judge.rounding judge.verification",
    "judge.testing": "files judge.audits judge.rounding judge.verification",
    "judge.pytest_plugin": "judge.testing",
    "testing": "judge.testing",
    "cli": "_version compare files judge registry",
    "__main__": "cli",
    "typing": "",
}
# What makes arrays, loads a module by its name, does nothing but hand on, and has a docstring.
CREATIONS = {"zeros", "ones", "empty", "full", "arange", "asarray", "eye", "linspace"}
LOADERS = {"import_module", "__import__", "resolve_name"}
HANDS_ON = ast.Import | ast.ImportFrom | ast.Expr
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
# Folders of `conformance`: checks know of no defects, and defects are edits of the formulas.
HANDED_ON = {"refattn.__main__", "refattn.testing"}
JUDGES = {"judge", "compare", "cli", "testing"}  # the last is a name for what stands in `judge`
CHECKS, DEFECTS = "refattn.judge.conformance.checks", "refattn.judge.mistakes.defects"


class Module:
    """What the rules ask of a module."""

    def __init__(self, text="", package=False):
        tree = ast.parse(text)
        nodes = list(ast.walk(tree))
        self.package, self.lines = package, text.count("\n")
        self.defines = any(not isinstance(x, HANDS_ON) for x in tree.body) or not tree.body
        documented = (x for x in nodes if isinstance(x, DOCUMENTED))
        self.docstrings = [x for x in map(ast.get_docstring, documented) if x is not None]
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        targets = [y for x in tree.body if isinstance(x, ast.Assign) for y in x.targets]
        targets += [x.target for x in tree.body if isinstance(x, ast.AnnAssign)]
        self.names = {x.name for x in tree.body if isinstance(x, kinds)}
        self.names |= {x.id for x in targets if isinstance(x, ast.Name)}
        self.imports = [x for x in nodes if isinstance(x, ast.Import | ast.ImportFrom)]
        self.functions = [x for x in nodes if isinstance(x, ast.FunctionDef | ast.AsyncFunctionDef)]
        self.calls = [x for x in nodes if isinstance(x, ast.Call)]
        attributes = (x for x in nodes if isinstance(x, ast.Attribute))
        self.attributes = [
            (x.value.id, x.attr) for x in attributes if isinstance(x.value, ast.Name)
        ]


@pytest.fixture(scope="module")
def plan():
    """Modules of the package by name."""
    modules = {}
    gc.disable()  # which would take as long as all else: trees are no garbage
    try:
        for path in sorted(ROOT.rglob("*.py")):
            parts = ("refattn", *path.relative_to(ROOT).with_suffix("").parts)
            package = parts[-1] == "__init__"
            name = ".".join(parts[:-1] if package else parts)
            modules[name] = Module(path.read_text("utf-8"), package)
    finally:
        gc.enable()
    return modules


def imports(name, modules):
    """Modules of the package that a module imports, and the name that it takes, if any."""
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
    yield from loads(outer, modules[name], modules)


def loads(outer, module, modules):
    """Modules that calls load by a name that stands in them, of the module or of what it holds."""
    for call in module.calls:
        if not (LOADERS & name_of(call.func) and call.args):
            continue
        text = getattr(call.args[0], "value", None)
        if isinstance(text, str):
            path = text.partition(":")[0].lstrip(".")
            level = len(text) - len(text.lstrip("."))
            whole = ".".join([*outer[: len(outer) - level + 1], path]) if level else path
            named = [x for x in (whole, whole.rpartition(".")[0]) if x in modules]
            yield from ((x, None) for x in named[:1])


def name_of(x):
    return {getattr(x, "id", ""), getattr(x, "attr", "")}


def room(name):
    """What the table calls it: the first part after the package, in `judge` the first two."""
    _, *parts = name.split(".")
    return ".".join(parts[: 1 + (parts[0] == "judge")]) if parts else name


def wing(name):
    return room(name).partition(".")[0]


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
        for other, taken in imports(name, modules):
            # Names that the package itself loads at first use are for users.
            own = {room(other), wing(other)} & allowed
            inside = taken == "__version__" if other == "refattn" else own
            if name != "refattn" and not inside:
                yield name, other
            if name.startswith(CHECKS) and other.startswith(DEFECTS):
                yield name, other


def imports_of_the_judge(modules):
    """What computes attention knows nothing of what judges it, whatever the table says."""
    for name in modules:
        if wing(name) not in JUDGES:
            yield from ((name, x) for x, _ in imports(name, modules) if wing(x) == "judge")


def private_names_that_are_lent(modules):
    for name in modules:
        for other, taken in imports(name, modules):
            if (taken or "").startswith("_") and taken != "__version__":
                yield name, other, taken
        lent = {other.rpartition(".")[2] for other, taken in imports(name, modules) if not taken}
        for holder, attribute in modules[name].attributes:
            if holder in lent and attribute.startswith("_") and not attribute.endswith("__"):
                yield name, holder, attribute


def imports_of_array_libraries(modules):
    """The same code runs on every library, as it imports none but NumPy."""
    for name, module in modules.items():
        for node in module.imports:
            if getattr(node, "level", 0):
                continue
            taken = [getattr(node, "module", None) or "", *(x.name for x in node.names)]
            if FOREIGN & {part for x in taken for part in x.split(".")}:
                yield name, taken


def modules_that_are_private(modules):
    yield from (x for x in modules if "._" in x and not x.endswith(("._version", ".__main__")))


def folders_that_are_too_full(modules):
    sizes = Counter(name.rpartition(".")[0] for name in modules if not modules[name].package)
    yield from (x for x, size in sizes.items() if size > MODULES)


def modules_that_are_too_long(modules):
    for name, module in modules.items():
        if module.lines > LINES:
            yield name, module.lines


def private_functions_of_many_parameters(modules):
    for name, module in modules.items():
        for node in module.functions:
            taken = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            private = node.name.startswith("_") and not node.name.endswith("__")
            if private and len(taken) > PARAMETERS:
                yield name, node.name


def searches(modules):
    """What a door found, the namespace and the leading axes, is handed down."""
    for what, most in SEARCHES.items():
        calls = [
            name
            for name, module in modules.items()
            for x in module.calls
            if what in name_of(x.func)
        ]
        if len(calls) > most:
            yield what, Counter(calls).most_common()


def arrays_made_on_no_device(modules):
    """They would be on the current one of several; a candidate's library is called as it asks."""
    for name, module in modules.items():
        for x in module.calls if ".conformance" not in name else ():
            made = "xp" in name_of(getattr(x.func, "value", None)) and x.func.attr in CREATIONS
            if made and not {y.arg for y in x.keywords} & {"device", None}:
                yield name, x.lineno


def names_with_several_homes(modules):
    """Some are the words of a protocol, or of a folder; but one name should mean one thing.

    A formula has the name of the function that it is of.
    """
    homes = Counter(
        x
        for name, module in modules.items()
        for x in module.names
        if x[:2] != "__" and not (room(name) == "naive" and x in FORMULAS)
    )
    several = sorted(name for name, count in homes.items() if count > 1)
    if len(several) > HOMES:
        yield several


def modules_that_only_hand_on(modules):
    """The face of a folder does; elsewhere it is another path to what has one."""
    for name, module in modules.items():
        if not (module.defines or module.package or name in HANDED_ON):
            yield name


def arguments_without_names(modules):
    """Readers and tools follow an argument by its name, which `locals()` hides."""
    for name, module in modules.items():
        yield from ((name, x.lineno) for x in module.calls if "locals" in name_of(x.func))


def docstrings_that_begin_without_a_sentence(modules):
    for name, module in modules.items():
        for text in module.docstrings:
            first = text.split("\n\n")[0].split()
            if len(first) < 2 or not first[-1].endswith((".", ":", "?")):
                yield name, text


LIBRARY, DOOR = "refattn.arrays.library", "refattn.attention"
BREACHES = (
    (circles, {LIBRARY: "from .. import attention", DOOR: "from .arrays.library import exp"}),
    (imports_against_the_table, {LIBRARY: "from ..features import exp"}),
    (imports_against_the_table, {LIBRARY: "from .. import softmax_attention"}),
    (imports_against_the_table, {DOOR: "import refattn"}),
    (imports_against_the_table, {f"{CHECKS}.laws": "from ...mistakes.defects import edits"}),
    (imports_against_the_table, {LIBRARY: "importlib.import_module('refattn.features')"}),
    (imports_against_the_table, {LIBRARY: "def f():\n    import_module('..features', 'refattn')"}),
    (imports_against_the_table, {LIBRARY: "pkgutil.resolve_name('refattn.features:exp')"}),
    (
        imports_against_the_table,
        {f"{CHECKS}.laws": "import_module('...mistakes.defects', __package__)"},
    ),
    (circles, {LIBRARY: "__import__('refattn.features')", "refattn.features": f"import {LIBRARY}"}),
    (imports_of_the_judge, {DOOR: "from .judge.rounding import predict"}),
    (imports_of_the_judge, {DOOR: "from . import judge"}),
    (imports_of_the_judge, {"refattn.engine.hops": "def f():\n    from ..judge import stats"}),
    (imports_of_the_judge, {LIBRARY: "import_module('..judge.stats', __package__)"}),
    (private_names_that_are_lent, {DOOR: "from .arrays.library import _NUMPY"}),
    (private_names_that_are_lent, {DOOR: "from .arrays import library\nlibrary._NUMPY"}),
    (imports_of_array_libraries, {DOOR: "def f():\n    import torch.nn"}),
    (imports_of_array_libraries, {DOOR: "import array_api_compat.torch"}),
    (modules_that_are_private, {"refattn.engine._hops": ""}),
    (folders_that_are_too_full, {f"refattn.engine.more{i}": "" for i in range(MODULES + 1)}),
    (modules_that_are_too_long, {DOOR: "\n" * (LINES + 1)}),
    (private_functions_of_many_parameters, {DOOR: "def _f(a, b, c, d, e, f, g, *, h): 0"}),
    (private_functions_of_many_parameters, {DOOR: "async def _f(a, b, c, d, e, f, g, h): 0"}),
    (arguments_without_names, {DOOR: "def f(x):\n    return g(locals())"}),
    (modules_that_only_hand_on, {"refattn.engine.hop": '"""Hops."""\nfrom .hops import read'}),
    (docstrings_that_begin_without_a_sentence, {DOOR: "def f():\n    'Attention'"}),
    (docstrings_that_begin_without_a_sentence, {DOOR: '"""Attention to keys\n\nMore."""'}),
    (
        names_with_several_homes,
        dict.fromkeys((DOOR, f"{DOOR}.more"), "".join(f"x{i} = {i}\n" for i in range(HOMES + 1))),
    ),
    *((searches, {DOOR: f"{what}(x)\n" * (most + 1)}) for what, most in SEARCHES.items()),
    (arrays_made_on_no_device, {DOOR: "xp.zeros(3, dtype=q.dtype)"}),
    (arrays_made_on_no_device, {DOOR: "self.xp.asarray(x, copy=True)"}),
    (searches, {DOOR: "library.array_namespace(x)\n" * (SEARCHES["array_namespace"] + 1)}),
)
RULES = dict.fromkeys(rule for rule, _ in BREACHES)


@pytest.mark.parametrize("rule", RULES, ids=lambda x: x.__name__)
def test_the_package_keeps_to_its_plan(plan, rule):
    assert list(rule(plan)) == []


@pytest.mark.parametrize(("rule", "texts"), BREACHES)
def test_a_breach_is_seen(plan, rule, texts):
    empty = {name: Module(package=x.package) for name, x in plan.items()}
    assert list(rule(empty)) == []
    assert list(rule(empty | {name: Module(text) for name, text in texts.items()}))


def test_the_table_names_what_is_there(plan):
    assert {room(x) for x in plan} - {"refattn", "_version"} == set(TABLE)
