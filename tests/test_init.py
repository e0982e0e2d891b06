"""The public names and what importing the package costs."""

import importlib
import inspect
import pkgutil
import subprocess
import sys
from typing import get_args

import numpy as np
import pytest

import refattn
from refattn.files import arrays as files_arrays

INNER = {"stats", "key_sampling", "testing", "pytest_plugin"}  # modules in a folder, with a list


def test_names_are_sorted_and_exist():
    assert refattn.__all__ == sorted(refattn.__all__)
    for name in refattn.__all__:
        assert getattr(refattn, name) is not None
    assert set(refattn.__all__) <= set(dir(refattn))


def test_every_public_module_is_there_without_being_imported():
    names = {m.name for m in pkgutil.iter_modules(refattn.__path__) if not m.name.startswith("_")}
    inside = {"arrays", "cli", "engine", "files", "numbers"}
    assert names - inside <= set(refattn.__all__)
    code = f"import refattn; [getattr(refattn, name) for name in {sorted(names - inside)}]"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_modules_list_their_public_functions():
    """Those that users name, and packages; inside, what has no underscore is lent to others."""
    for info in pkgutil.walk_packages(refattn.__path__, "refattn."):
        parts = info.name.split(".")[1:]
        named = len(parts) == 1 or info.ispkg or {*parts} & INNER
        if parts[-1].startswith("_") or parts[0] == "cli":
            continue
        module = importlib.import_module(info.name)
        assert hasattr(module, "__all__") == bool(named), info.name
        if not named:
            continue
        # Whose names load when they are first used.
        if info.name in ("refattn.judge", "refattn.judge.verification"):
            continue
        public = {
            name
            for name, value in vars(module).items()
            if not name.startswith("_")
            and (inspect.isfunction(getattr(value, "__wrapped__", value)) or inspect.isclass(value))
            and (value.__module__ == module.__name__ or info.ispkg or name in module.__all__)
        }
        # Constants, classes, functions, each in the order of the alphabet.
        order = sorted(
            module.__all__, key=lambda x: (len(x) < 2 or not x.isupper(), not x[0].isupper(), x)
        )
        assert order == list(module.__all__)
        callables = {name for name in module.__all__ if callable(getattr(module, name))}
        assert {name for name in callables if not get_args(getattr(module, name))} <= public


def test_a_mistyped_keyword_gets_a_suggestion():
    """From every public function, before it looks at its arguments."""
    silent = []
    for info in pkgutil.walk_packages(refattn.__path__, "refattn."):
        if not {"cli", "__main__"}.isdisjoint(info.name.split(".")):
            continue
        module = importlib.import_module(info.name)
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            if not inspect.isfunction(value):
                continue
            parameters = inspect.signature(value).parameters.values()
            words = [x.name for x in parameters if x.kind is x.KEYWORD_ONLY]
            if not words or any(x.kind is x.VAR_KEYWORD for x in parameters):
                continue
            count = sum(x.default is x.empty and x.name not in words for x in parameters)
            with pytest.raises((TypeError, ValueError)) as raised:
                value(*[None] * count, **{max(words, key=len) + "s": None})
            if "Did you mean " not in str(raised.value):
                silent.append(f"{info.name}.{name}: {raised.value}")
    assert not silent


def test_dir_lists_public_names_only():
    """Modules that users name, and packages: what an interpreter offers after a dot."""
    for info in pkgutil.walk_packages(refattn.__path__, "refattn."):
        parts = info.name.split(".")[1:]
        named = len(parts) == 1 or info.ispkg
        if named and parts[0] != "cli" and not any(x.startswith("_") for x in parts):
            module = importlib.import_module(info.name)
            assert dir(module) == sorted(module.__all__), info.name
    assert dir(refattn) == sorted([*refattn.__all__, "__version__"])
    assert "TYPE_CHECKING" not in dir(refattn)


def test_public_functions_document_themselves():
    for name in refattn.__all__:
        value = getattr(refattn, name)
        if inspect.isfunction(value):
            for section in ("Parameters", "Returns", "Examples", ">>>"):
                assert section in (value.__doc__ or ""), f"{name} has no {section}"


@pytest.mark.checks_more
def test_import_is_light():
    code = (
        "import sys, refattn\n"
        "heavy = {'scipy', 'matplotlib', 'torch', 'jax', 'cupy', 'dask', 'click', 'rich'}\n"
        "print(sorted(heavy & {name.partition('.')[0] for name in sys.modules}))\n"
        "import numpy as np\n"
        "refattn.attend(np.ones((2, 2)), np.ones((2, 2)), np.ones((2, 2)))\n"
        "refattn.random_feature_attention(*np.ones((3, 2, 2)), num_features=2)\n"
        "print(sorted(heavy & {name.partition('.')[0] for name in sys.modules}))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout.splitlines() == ["[]", "[]"]


def test_version():
    from importlib.metadata import version

    assert refattn.__version__ == version("refattn")


def test_array_helpers():
    from refattn.arrays.blocks import blocks, part, tiles

    assert [(s.start, s.stop) for s in blocks(2, 9, 3)] == [(2, 5), (5, 8), (8, 9)]
    for size in (0, 1, 3, 4, 100):
        seen = np.zeros((2, 3, 4), int)
        for index in tiles((2, 3, 4), size):
            seen[index] += 1
            assert seen[index].size <= max(size, 1)
        assert np.all(seen == 1)
    assert list(tiles((), 5)) == [()]
    x = np.arange(6).reshape(2, 1, 3)
    index = (slice(0, 1), slice(1, 2), slice(5, 7), slice(1, 3))
    np.testing.assert_array_equal(part(x, index), x[1:2, :, 1:3])


def test_the_sample_is_what_the_command_line_reads():
    arrays, _ = files_arrays.load_qkv(files_arrays.find_sample())
    for name, x in zip("qkv", refattn.load_sample(), strict=True):
        np.testing.assert_array_equal(x, arrays[name])
