"""One fixture for every array library, the time of each case, what a run skipped, and accuracy."""

import contextlib
import gc
import importlib
import os
import time
import zlib
from collections import defaultdict

# Workers share the cores: BLAS reads this when NumPy is imported.
if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 0)):
    os.environ.setdefault("OPENBLAS_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))

import numpy as np
import pytest
from hypothesis import settings

os.environ.pop("COLUMNS", None)  # workers have one, whatever there is to print on

settings.register_profile("repeatable", deadline=None, derandomize=True, max_examples=10)
settings.register_profile("full", settings.get_profile("repeatable"), max_examples=50)
settings.register_profile("thorough", deadline=None, max_examples=1000)
settings.load_profile("repeatable")


class Host:
    """Marks a NumPy argument that stays NumPy whatever the library under test."""

    def __init__(self, value):
        self.value = value


class Backend:
    """Calls a function with arrays of one library and brings the results back to NumPy.

    Each call also checks that the results have the namespace, dtype and device of the arguments
    and that no argument was written to.
    """

    def __init__(self, name):
        self.name = name
        if name in ("numpy", "numpy-readonly"):
            self.xp, self.device = np, "cpu"
        elif name == "array_api_strict":
            self.xp = pytest.importorskip("array_api_strict")
            self.device = self.xp.Device("device1")  # not the default device
        elif name == "jax":
            self.jax = pytest.importorskip("jax")
            self.jax.config.update("jax_enable_x64", True)
            self.xp, self.device = self.jax.numpy, self.jax.devices()[0]
        elif name == "torch":
            self.xp = pytest.importorskip("torch")
            cuda = self.xp.cuda.is_available()
            self.device = self.xp.device("cuda", 0) if cuda else self.xp.device("cpu")
        elif name == "dask":
            self.xp = pytest.importorskip("dask.array")
            self.device = "cpu"
        elif name == "cupy":
            self.xp = pytest.importorskip("cupy")
            try:
                count = self.xp.cuda.runtime.getDeviceCount()
            except self.xp.cuda.runtime.CUDARuntimeError:
                pytest.skip("CuPy is installed but there is no GPU")
            self.device = self.xp.cuda.Device(count - 1)  # where there are more, not the default

    def array(self, x):
        if self.name == "numpy":
            return x.copy()
        if self.name == "numpy-readonly":
            x = x.copy()
            x.flags.writeable = False
            return x
        if self.name == "array_api_strict":
            return self.xp.asarray(x, device=self.device)
        if self.name == "torch":
            return self.xp.asarray(x.copy(), device=self.device)
        if self.name == "dask":
            # What a filter leaves has empty chunks, too.
            return self.xp.asarray(x, chunks=tuple((n - n // 2, 0, n // 2) for n in x.shape))
        with self.device if self.name == "cupy" else contextlib.nullcontext():
            return self.xp.asarray(x)

    def numpy(self, x):
        if self.name == "array_api_strict":
            x = self.xp.asarray(x, device=self.xp.Device("CPU_DEVICE"))
        if self.name == "torch":
            x = x.cpu()
        return self.xp.asnumpy(x) if self.name == "cupy" else np.asarray(x)

    def call(self, fn, *args, **kwargs):
        """Call `fn`, under jit on JAX and without computing anything on Dask."""
        named = {**dict(enumerate(args)), **kwargs}
        traced = {k: self.array(x) for k, x in named.items() if isinstance(x, np.ndarray)}
        static = {k: getattr(x, "value", x) for k, x in named.items() if k not in traced}

        def run(arrays):
            given = {**static, **arrays}
            positional = [given.pop(i) for i in range(len(args))]
            return fn(*positional, **given)

        with self.guard():
            result = self.jit(run)(traced)
        for name, x in traced.items():
            np.testing.assert_array_equal(self.numpy(x), named[name], err_msg=f"{name} changed")
        dtype = next(iter(x.dtype for x in named.values() if isinstance(x, np.ndarray)))
        if isinstance(result, tuple):
            return type(result)(*(None if x is None else self.check(x, dtype) for x in result))
        return self.check(result, dtype)

    def jit(self, run):
        if self.name != "jax":
            return run
        # JAX takes dictionaries with keys of one type only.
        return lambda arrays: self.jax.jit(
            lambda items: run(dict(zip(arrays, items, strict=True)))
        )(list(arrays.values()))

    def guard(self):
        if self.name == "array_api_strict":
            return self.xp.ArrayAPIStrictFlags(
                api_version="2024.12",
                boolean_indexing=False,
                data_dependent_shapes=False,
                enabled_extensions=(),
            )
        if self.name == "dask":
            import dask

            def refuse(*args, **kwargs):
                raise AssertionError("the function computed a Dask graph")

            return dask.config.set(scheduler=refuse)
        return contextlib.nullcontext()

    def check(self, x, dtype):
        from array_api_compat import array_namespace, device

        assert array_namespace(x) is array_namespace(self.array(np.zeros(1)))
        assert device(x) == self.device
        x = self.numpy(x)
        assert x.dtype == dtype
        return x


@pytest.fixture(
    params=["numpy", "numpy-readonly", "array_api_strict", "jax", "torch", "dask", "cupy"]
)
def backend(request):
    return Backend(request.param)


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.fixture
def jax():
    """JAX with float64."""
    return Backend("jax").jax


@pytest.fixture
def verdict_alone(monkeypatch):
    """Nothing explains a failure: the search for its cause takes most of the time of a verdict."""
    from refattn.judge.verification import judging

    monkeypatch.setattr(judging, "explain", lambda problem, numbers, verdict, *rest: verdict)
    monkeypatch.setattr(judging, "explain_gradients", lambda parts, verdicts, *rest: verdicts)


@pytest.fixture
def briefly(monkeypatch):
    """Nobody looks for what a failure is like, nor what would have to be declared for more."""
    from refattn.judge.conformance.report import runner

    monkeypatch.setattr(runner, "suspect", lambda *_: None)
    monkeypatch.setattr(runner, "diagnose", lambda *_: [])
    monkeypatch.setattr(runner, "not_tried", lambda *_: {})


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    return np.dtype(request.param)


# --- long cases: over .2 s of CPU, unless a function has no other ---------------------------------


# Seconds of CPU above which a case that is not marked `long` is named where CI is set. Some take
# half a second, and four times that where they are the first of a process to import or compile a
# thing. Cores that are shared with other work take longer: a clock fails no case.
LIMIT = 2.0
LONG_EXAMPLES = {  # of docstrings
    "refattn.judge.vectors.checking.lint",
    "refattn.judge.vectors.exporting.export",
    "refattn.judge.vectors.reading.load",
    "refattn.judge.vectors.writing.write",
    "refattn.judge.conformance.report.runner.check",
    "refattn.judge.verification.tolerances.tolerance",
}
LIBRARIES = ("scipy.stats", "matplotlib.pyplot", "jax.numpy", "dask.array", "arviz_stats")
SECONDS = "refattn/seconds"
SKIPPED = "refattn/skipped"
LEFT_OUT = pytest.StashKey()  # names of cases, until they are chosen
NOTHING = pytest.StashKey()  # words of marks
FIXTURES = pytest.StashKey()  # seconds


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="run long sweeps too")
    parser.addoption(
        "--turn", type=int, help="run one part in 64 of the long sweeps too: those whose turn it is"
    )
    parser.addoption(
        "--soak", action="store_true", help="run what is long, and more of the same kind"
    )
    parser.addoption(
        "--last-skipped",
        action="store_true",
        help="run what the last run skipped, and what checks more where more is installed",
    )
    parser.addoption(
        "--accuracy", action="store_true", help="show the error of every case, not the largest"
    )


@pytest.hookimpl(tryfirst=True)  # of all parameters
def pytest_collection_modifyitems(config, items):
    """Leave out what takes long; a skip of each would take longer than a quick case."""
    soak, turn = config.getoption("soak"), config.getoption("turn")
    chosen, left_out = [], []
    some = any("::" in x or x.startswith("@") for x in config.args)
    if not (some or config.getoption("lf", False)):  # else parameters are missing
        fail_marks_of_nothing(items)
    for item in items:
        full = soak or config.getoption("full")
        of_sweep = (m.args[0] for m in item.iter_markers("sweep"))
        if item.name in LONG_EXAMPLES or any(number_of(item) // 4 % x for x in of_sweep):
            item.add_marker(pytest.mark.long)
        if turn is not None:  # by its name, as no other test moves it; apart from `sweep`
            full = full or number_of(item) // 2**16 % 64 == turn % 64
        runs = {"soak": soak, "long": full, "docs": full or turn is not None}
        fits = all(run or not is_marked(item, mark) for mark, run in runs.items())
        (chosen if fits else left_out).append(item)
    items[:] = chosen
    config.stash[LEFT_OUT] = [x.nodeid for x in left_out]
    config.hook.pytest_deselected(items=left_out)


def pytest_collection(session):
    """Import from the end in each second process, so that one of both compiles a module."""
    config = session.config
    second = os.environ.get("PYTEST_XDIST_WORKER", "gw0")[-1] in "13579"
    if second and config.args == config.getini("testpaths"):
        files = sorted(config.rootpath.glob("tests/**/test_*.py"), reverse=True)
        names = (".".join(x.relative_to(config.rootpath).with_suffix("").parts) for x in files)
        for name in (*LIBRARIES[1:], *names):
            with contextlib.suppress(Exception, pytest.skip.Exception):  # which collecting tells
                importlib.import_module(name)


def pytest_collection_finish():
    """Look at the cases themselves no more each time that memory is collected."""
    gc.collect()
    gc.freeze()


def number_of(item):
    return zlib.crc32(item.nodeid.encode())


def words_of(item):
    return set(getattr(getattr(item, "callspec", None), "id", "").split("-"))


def is_marked(item, mark):
    """Whether a test has the mark, or has it with one of its parameters, or with several."""
    words = words_of(item)
    return any(
        not m.args or any({*x.split("+")} <= words for x in m.args) for m in item.iter_markers(mark)
    )


def fail_marks_of_nothing(items):
    """Where a word of a mark is no parameter's, which was renamed or has a hyphen."""
    found = defaultdict(set)
    for item in items:
        found[item.nodeid.partition("[")[0]] |= words_of(item)
    for item in items:
        marks = (m for name in ("long", "docs", "soak") for m in item.iter_markers(name))
        words = {x for m in marks for some in m.args for x in some.split("+")}
        item.stash[NOTHING] = words - found[item.nodeid.partition("[")[0]]


def pytest_runtest_setup(item):
    if words := item.stash.get(NOTHING, None):
        pytest.fail(f"it is marked for {sorted(words)}, and has no such parameter", False)


def cpu():
    """Seconds that this process and the children that it waited for have worked."""
    return time.process_time() + sum(os.times()[2:4])


def pytest_sessionstart(session):
    """Import first what takes long, so that no case is blamed for it."""
    if "CI" in os.environ and session.config.getoption("dist", "no") == "no":  # where cases run
        for name in LIBRARIES:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)


class Seconds:
    """Measures the CPU of each case, of examples in docstrings too, and writes it to the cache.

    Fixtures of function scope count; those that cases share do not.
    """

    def __init__(self, config):
        self.config, self.cases, self.slow = config, {}, {}

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef, request):
        before = cpu()
        result = yield
        if fixturedef.scope == "function":
            spent = request.node.stash.get(FIXTURES, 0.0)
            request.node.stash[FIXTURES] = spent + cpu() - before
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        before = cpu() - item.stash.get(FIXTURES, 0.0)
        result = yield
        seconds = cpu() - before
        item.user_properties.append(("seconds", seconds))
        marked = any(is_marked(item, mark) for mark in ("long", "docs", "soak"))
        default = not marked and not self.config.getoption("last_skipped")
        item.user_properties.append(("slow", "CI" in os.environ and default and seconds > LIMIT))
        return result

    def pytest_runtest_logreport(self, report):
        if report.when == "call":
            told = dict(report.user_properties)
            self.cases[report.nodeid] = told.get("seconds")
            if told.get("slow"):
                self.slow[report.nodeid] = told["seconds"]

    def pytest_terminal_summary(self, terminalreporter):
        for name, seconds in self.slow.items():
            terminalreporter.write_line(f"SLOW {name}: {seconds:.1f} s of CPU, not marked long")

    def pytest_sessionfinish(self):
        cache = getattr(self.config, "cache", None)
        if cache is not None and not hasattr(self.config, "workerinput"):
            cache.set(SECONDS, cache.get(SECONDS, {}) | self.cases)


# --- what the last run skipped, for lack of a library or a browser --------------------------------


def pytest_configure(config):
    full = config.getoption("full") or config.getoption("soak")
    if full and not config.getoption("--hypothesis-profile", None):
        settings.load_profile("full")
    config.addinivalue_line(
        "markers", "long(*words): is run with --full only, if a parameter has one of these names"
    )
    config.addinivalue_line(
        "markers", "sweep(n): one case of n is run, chosen by its name, and all with --full"
    )
    config.addinivalue_line(
        "markers", "docs(*words): is run with --full or --turn, likewise: long, and shows on pages"
    )
    config.addinivalue_line(
        "markers", "soak(*words): is run with --soak only, likewise: more of what --full runs"
    )
    config.addinivalue_line(
        "markers", "checks_more: runs everywhere, and checks more where torch is installed"
    )
    # JAX compiles a third faster so. At level 0 it computes scores twice, with other roundings, and
    # looks for their maximum by comparing the two: where it finds none, its derivative is 0 / 0.
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=1")
    cache = getattr(config, "cache", None)
    if cache is not None and os.access(config.rootpath, os.W_OK):
        # Programs that JAX compiled, for every process.
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache.mkdir("jax")))
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
    config.pluginmanager.register(Seconds(config), "seconds")
    config.pluginmanager.register(Skipped(config), "skipped")
    config.pluginmanager.register(Accuracy(config), "accuracy")


class Skipped:
    """Writes the tests, and whole modules, that are skipped or left out to the cache of pytest."""

    def __init__(self, config):
        self.cache = getattr(config, "cache", None)
        self.chooses = config.getoption("last_skipped")
        self.writes = not self.chooses and not hasattr(config, "workerinput")  # not a process of it
        self.names, self.left_out = set(), set()

    def pytest_runtest_logreport(self, report):
        if report.skipped and not hasattr(report, "wasxfail"):
            self.names.add(report.nodeid)

    def pytest_collectreport(self, report):
        if report.skipped:
            self.names.add(report.nodeid)

    def pytest_collection_modifyitems(self, config, items):
        if not self.chooses:
            return
        names = self.cache and self.cache.get(SKIPPED, None)
        if names is None:
            raise pytest.UsageError("--last-skipped needs a run before it")
        known, chosen, left_out = set(names), [], []
        for item in items:
            (chosen if self._chosen(item, known) else left_out).append(item)
        items[:] = chosen
        config.hook.pytest_deselected(items=left_out)

    def _chosen(self, item, names):
        module = item.nodeid.partition("::")[0]
        return (
            item.nodeid in names or module in names or bool(item.get_closest_marker("checks_more"))
        )

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        self.left_out |= set(getattr(node, "workeroutput", {}).get(SKIPPED, []))

    def pytest_sessionfinish(self, session):
        self.left_out |= set(session.config.stash.get(LEFT_OUT, []))
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput[SKIPPED] = sorted(self.left_out)
        if self.cache is not None and self.writes:
            self.cache.set(SKIPPED, sorted(self.names | self.left_out))

    def pytest_terminal_summary(self, terminalreporter):
        if self.left_out:
            terminalreporter.write_line(
                f"{len(self.left_out)} long cases were left out: --full and --soak run them"
            )


# --- accuracy against 50-digit arithmetic ---------------------------------------------------------


@pytest.fixture
def record_accuracy(request):
    """Collect (case, dtype, error in units of the accuracy contract), from every process."""

    def record(case, dtype, units):
        request.node.user_properties.append(("accuracy", (case, str(dtype), float(units))))

    return record


class Accuracy:
    """Tells the largest error of the run, and that of each case if asked."""

    def __init__(self, config):
        self.every = config.getoption("accuracy")
        self.worst = {}

    def pytest_runtest_logreport(self, report):
        for name, value in report.user_properties if report.when == "call" else ():
            if name == "accuracy":
                case, dtype, units = value
                key = str(case), str(dtype)
                self.worst[key] = max(float(units), self.worst.get(key, 0.0))

    def pytest_terminal_summary(self, terminalreporter):
        if not self.worst:
            return
        if self.every:
            terminalreporter.section("error against 50-digit arithmetic")
            terminalreporter.write_line(f"{'case':<52}{'dtype':<12}units of eps (1 + |exponent|)")
            for (case, dtype), units in sorted(self.worst.items()):
                terminalreporter.write_line(f"{case:<52}{dtype:<12}{units:6.2f}")
        terminalreporter.write_line(
            f"error against 50-digit arithmetic: at most C = {max(self.worst.values()):.2f} in "
            f"{len(self.worst)} cases (--accuracy shows them), asserted C = 16"
        )
