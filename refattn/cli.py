"""The command line.

`refattn compare` measures every estimator against exact attention; `refattn moments` says what the
moments of queries and keys promise; `refattn check` says whether an implementation is right;
`refattn vectors` writes golden vectors.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from . import __version__, _safetensors, _validate, adapt, theory
from . import _sample as _bundled
from . import moments as _moments
from ._array import broadcast_lead, group_heads
from ._text import portable, printable, said
from .attention import softmax_attention
from .estimators import DEFAULT_ESTIMATORS, ESTIMATORS
from .sampling import Gaussian

if TYPE_CHECKING:
    import click

    from . import conformance

__all__ = ["main"]

_Array = npt.NDArray[Any]

_INSTALL = "needs `pip install 'refattn[cli]'`"


def main() -> None:
    """Run the command line (the console script `refattn`)."""
    try:
        for name in ("click", "rich"):
            import_module(name)
    except ModuleNotFoundError:
        sys.stderr.write(f"refattn: error: the command line {_INSTALL}\n")
        sys.exit(2)
    if sys.argv[1:2] == ["check"]:
        sys.exit(_answer_of(sys.argv[1:]))
    _run()


def _run() -> None:
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # characters that it does not have
    commands()(prog_name="refattn")


def _answer_of(words: list[str]) -> int:
    """Run a check in a process of its own: the status is what it leaves word of, and no other.

    A candidate may end its process at any time, in compiled code too, and with status 0.
    """
    with tempfile.TemporaryDirectory() as folder:
        word = Path(folder) / "status"
        code = (
            f"import sys; sys.path[:] = {sys.path!r}\n"
            f"from refattn.cli import _answer; _answer({str(word)!r}, {os.getpid()})"
        )
        try:
            ended = subprocess.call([sys.executable, "-c", code, *words])
        except KeyboardInterrupt:
            return 130
        if word.exists():
            return int(word.read_text("ascii"))
    sys.stderr.write(f"Error: the process ended, with status {ended}, before the report was out\n")
    return 2


def _answer(word: str, parent: int) -> None:
    """Run the command line, and leave word of its exit status in a file."""
    threading.Thread(target=_follow, args=(parent,), daemon=True).start()
    try:
        _run()
    except SystemExit as ending:
        draft = Path(f"{word}.part")
        draft.write_text(str(ending.code or 0), "ascii")
        draft.replace(word)
        _end(ending)
        raise


def _follow(parent: int) -> None:
    """End when the process that waits for the answer is no more."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(2)


def _end(ending: SystemExit) -> None:
    """End at once if a candidate still hangs in compiled code, or has threads of its own.

    The interpreter's own shutdown would unwind the first, and abort when the code is C++, and wait
    for the others.
    """
    others = [t for t in threading.enumerate() if t is not threading.main_thread()]
    if any(t.name.startswith("check ") or not t.daemon for t in others):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(ending.code or 0))


def commands() -> click.Group:
    """Build the command group; click must be installed."""
    import click

    class Unusable(click.ClickException):
        exit_code = 2

    @contextmanager
    def one_line(plotting: bool) -> Iterator[None]:
        """Turn what is raised for unusable input into one line and exit status 2."""
        if plotting:
            try:
                import_module("matplotlib.figure")
            except ModuleNotFoundError:
                raise Unusable(f"--plot {_INSTALL}") from None
        try:
            with np.errstate(all="ignore"):
                yield
        except (TypeError, ValueError, MemoryError, OverflowError) as error:
            raise Unusable(" ".join(str(error).split())) from None

    def publish(
        show: Callable[[], None],
        json_path: Path | None,
        to_json: Callable[[], str],
        plot_path: Path | None,
        plot: Callable[[Path], None],
    ) -> None:
        try:
            show()
            if json_path is not None:
                json_path.write_text(to_json(), encoding="utf-8")
            if plot_path is not None:
                plot(plot_path)
        except OSError as error:
            raise Unusable(f"cannot write the results: {error}") from None

    file_argument = click.argument(
        "file",
        required=False,
        type=click.Path(exists=True, dir_okay=False, readable=True, path_type=Path),
    )
    features_option = click.option(
        "--features",
        default="8,32,128,512",
        show_default=True,
        metavar="S,S,...",
        callback=_numbers,
        help="Numbers of features or samples.",
    )
    scale_option = click.option(
        "--scale", type=float, help="Factor on q . k.  [default: 1/sqrt(d)]"
    )

    def dtype_option(default: str) -> Callable[[Any], Any]:
        return click.option(
            "--dtype",
            type=click.Choice(["float32", "float64"]),
            help=f"Cast the arrays first.  [default: {default}]",
        )

    def json_option(content: str) -> Callable[[Any], Any]:
        return click.option(
            *("--json", "json_path"), metavar="OUT.json", callback=_output(".json"), help=content
        )

    def plot_option(content: str) -> Callable[[Any], Any]:
        return click.option(
            *("--plot", "plot_path"), metavar="OUT.png", callback=_output(".png"), help=content
        )

    @click.group("refattn", context_settings={"help_option_names": ["-h", "--help"]})
    @click.version_option(__version__, prog_name="refattn")
    def group() -> None:
        """Reference implementation of random-feature attention."""

    @group.command()
    @file_argument
    @features_option
    @click.option(
        "--estimators",
        metavar="NAME,NAME,...",
        callback=_names,
        help=f"all, or some of {', '.join(ESTIMATORS)}.  [default: {','.join(DEFAULT_ESTIMATORS)}]",
    )
    @click.option(
        "--draws",
        default=3,
        show_default=True,
        type=click.IntRange(1, 10**6),
        help="Independent draws to average over.",
    )
    @dtype_option("evaluate in the dtype of the file")
    @click.option("--seed", default=0, show_default=True, type=int, callback=_seed)
    @scale_option
    @click.option("--causal", is_flag=True, help="Query i sees key j only if j <= i + m - n.")
    @json_option("Write the errors of every head and draw.")
    @plot_option("Plot error against S.")
    @click.option("--per-head", is_flag=True, help="Print the error of every head too.")
    def compare(
        file: Path | None,
        features: list[int],
        estimators: list[str],
        draws: int,
        dtype: str | None,
        seed: int,
        scale: float | None,
        causal: bool,
        json_path: Path | None,
        plot_path: Path | None,
        per_head: bool,
    ) -> None:
        """Compare estimators with exact softmax attention: error and time.

        FILE (.npz or .safetensors) holds arrays q, k, v of shape (..., n, d); the default is a
        sample from a sentence encoder that comes with the package. The error of a head is
        |estimate - exact| / |exact| in the Frobenius norm, averaged over the draws, where exact
        attention is evaluated in float64. Seconds are the median for one evaluation of all heads.
        """
        with one_line(plot_path is not None):
            _validate.real("scale", scale, positive=True, optional=True)
            path = file or _sample()
            arrays = load(path, dtype)
            q, k, v = (arrays[name] for name in "qkv")
            if scale is None:
                scale = q.shape[-1] ** -0.5
            inputs = Inputs(path, q, k, v, scale, causal, seed, draws)
            rows, skipped = measure(inputs, estimators, features)
        publish(
            partial(show, inputs, rows, skipped, per_head),
            json_path,
            partial(to_json, inputs, rows, skipped),
            plot_path,
            partial(plot, rows),
        )

    @group.command("moments")
    @file_argument
    @features_option
    @click.option(
        "--target",
        default=0.1,
        show_default=True,
        type=float,
        help="Relative error that the recommended estimator is to reach.",
    )
    @click.option(
        "--shrink/--no-shrink",
        default=False,
        show_default=True,
        help="Shrink the covariances, for fewer rows than d^2.",
    )
    @dtype_option("as they are; what follows is evaluated in float64")
    @scale_option
    @json_option("Write all numbers, of every head.")
    @plot_option("Plot the spectra of the covariances, and predicted error against S.")
    def moments(
        file: Path | None,
        features: list[int],
        target: float,
        shrink: bool,
        dtype: str | None,
        scale: float | None,
        json_path: Path | None,
        plot_path: Path | None,
    ) -> None:
        """Say what the moments of queries and keys promise: adaptation, error, cost.

        FILE (.npz or .safetensors) holds arrays q, k of shape (..., n, d) and, for the predicted
        errors, v; the default is a sample from a sentence encoder that comes with the package.
        No random numbers are used. Predicting errors takes time proportional to m^2 for m keys.
        """
        with one_line(plot_path is not None):
            _validate.real("scale", scale, positive=True, optional=True)
            _validate.real("target", target, positive=True)
            path = file or _sample()
            arrays = load(path, dtype, required="qk")
            if scale is None:
                scale = arrays["q"].shape[-1] ** -0.5
            profile = study(Question(path, arrays, scale, target, shrink, features))
        publish(
            partial(show_profile, profile),
            json_path,
            partial(profile_to_json, profile),
            plot_path,
            partial(plot_profile, profile),
        )

    @group.command()
    @click.argument("target", metavar="MODULE:CALLABLE")
    @click.option("--estimator", required=True, help="What it computes: softmax, kernel, rfa, ...")
    @click.option(
        *("--capability", "capabilities"), multiple=True, help="A keyword it takes; repeatable."
    )
    @click.option(
        *("--tag", "tags"), multiple=True, metavar="KEY=VALUE", help="A convention; repeatable."
    )
    @click.option(
        "--level",
        type=click.Choice(["quick", "full", "soak"]),
        default="quick",
        show_default=True,
        help="How many seeds the statistical checks use.",
    )
    @click.option(
        "--alpha",
        type=float,
        default=1e-6,
        show_default=True,
        help="Largest probability that a correct implementation fails.",
    )
    @click.option(
        "--json",
        "json_path",
        is_flag=False,
        flag_value="-",
        metavar="[OUT.json]",
        help="Write the report as JSON; without a name, to standard output and nothing else.",
    )
    @click.option(
        *("--junit", "junit_path"),
        metavar="OUT.xml",
        callback=_output(".xml"),
        help="Write the report as JUnit XML.",
    )
    @click.option(
        "--xfails",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="File of expected failures: lines `check: reason`.",
    )
    @click.option("--seed", type=int, callback=_seed, help="For the same run again.")
    @click.option(*("--check", "names"), multiple=True, help="Run this check only; repeatable.")
    @click.option("--time-limit", type=float, help="Seconds for each check.")
    @click.option(
        *("--subprocess", "program"),
        type=click.Choice(["safetensors", "npz"]),
        help="MODULE:CALLABLE is a command that reads and writes such files instead.",
    )
    @click.option("--reproducers", is_flag=True, help="Print a script for each failure.")
    @click.pass_context
    def check(
        context: click.Context,
        /,
        target: str,
        json_path: str | None,
        junit_path: Path | None,
        xfails: Path | None,
        reproducers: bool,
        **options: Any,
    ) -> None:
        """Check an implementation of an attention estimator.

        It is called with arrays by position and all else by keyword: see the documentation of
        refattn.conformance.check. The exit status is 0 for PASS, 1 for FAIL, 3 for UNDERPOWERED,
        and 2 where there is no verdict: for unusable arguments, and if the report cannot be
        written or the candidate ends the process before it is out.
        """
        if sys.stdout is None:
            raise Unusable("cannot write the results: standard output is closed")
        quiet = json_path == "-"
        # A candidate may change the working directory.
        json_path = json_path if json_path is None or quiet else str(Path(json_path).absolute())
        junit_path = None if junit_path is None else junit_path.absolute()
        with one_line(False):
            if json_path is not None and not quiet:
                _output(".json")(context, context.command.params[0], json_path)
            try:
                with _kept(quiet):
                    report = _check(target, xfails, **options)
            except (KeyboardInterrupt, SystemExit) as error:
                raise Unusable(f"ended by {type(error).__name__}, without a verdict") from None
        try:
            if quiet:
                click.echo(report.to_json(), nl=False)
            else:
                click.echo(str(report))
                for result in report.results if reproducers else ():
                    if result.reproducer:
                        text = f"\n# {result.check}\n{result.reproducer}"
                        click.echo(printable(text), nl=False)
            if json_path is not None and not quiet:
                Path(json_path).write_text(report.to_json(), encoding="utf-8")
            if junit_path is not None:
                junit_path.write_text(report.to_junit(), encoding="utf-8")
        except OSError as error:
            raise Unusable(f"cannot write the results: {error}") from None
        context.exit({"PASS": 0, "FAIL": 1, "UNDERPOWERED": 3}[report.verdict])

    @group.command()
    @click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
    @click.option(
        *("--format", "kind"),
        default="json",
        show_default=True,
        type=click.Choice(["json", "npz", "safetensors"]),
        help="What to write.",
    )
    @click.option("--check", is_flag=True, help="Say what is wrong with the vectors in DIRECTORY.")
    def vectors(directory: Path, kind: str, check: bool) -> None:
        """Write golden vectors for implementations in any language into DIRECTORY.

        One file an estimator, a schema and a README; files of the same name are replaced. With
        --check nothing is written, and the exit status is 1 if there are problems.
        """
        from .conformance import vectors as golden

        try:
            with one_line(False):
                problems = golden.lint(directory) if check else []
                paths = [] if check else golden.write(directory, format=kind)
                count = 0 if check else len(golden.load(directory, format=kind))
        except (ModuleNotFoundError, OSError) as error:
            raise Unusable(str(error)) from None
        if check:
            for problem in problems or [f"{directory}: no problems"]:
                click.echo(problem)
            sys.exit(1 if problems else 0)
        size = sum(path.stat().st_size for path in paths) / 1e3
        click.echo(f"{directory}: {count} vectors in {len(paths)} files, {size:.0f} kB")

    return group


def _check(
    target: str,
    xfails: Path | None,
    *,
    estimator: str,
    capabilities: tuple[str, ...],
    tags: tuple[str, ...],
    seed: int | None,
    names: tuple[str, ...],
    program: str | None,
    **options: Any,
) -> conformance.Report:
    """Run the checks on what the command line names."""
    from . import conformance

    source = None
    pairs = dict(tag.partition("=")[::2] for tag in tags)
    for tag in tags:
        if "=" not in tag:
            raise ValueError(f"`--tag` must be KEY=VALUE, got {tag!r}.")
    if program is not None:
        _validate.choice("--estimator", estimator, conformance.ESTIMATORS)
        fn: Any = conformance.Subprocess(
            target, format=program, names=conformance.ESTIMATORS[estimator].arrays
        )
        if shutil.which(fn.command[0]) is None:
            raise ValueError(f"there is no program {fn.command[0]!r}.")
    else:
        fn, source = _imported(target), target
    return conformance.check(
        conformance.Adapter(fn, estimator, capabilities, pairs, source=source),
        rng=seed,
        checks=names or None,
        expected_failures=None if xfails is None else _expected(xfails),
        **options,
    )


@contextmanager
def _kept(to_error: bool) -> Iterator[None]:
    """Give back the standard streams and `sys.exit`, whatever a candidate makes of them.

    What it prints, from compiled code too, may go to standard error instead.
    """
    leave, streams = sys.exit, (sys.stdout, sys.stderr)
    files = [_copy(stream, fd) for fd, stream in enumerate(streams, 1)]
    if to_error:
        if None not in files:
            os.dup2(2, 1)
        sys.stdout = sys.stderr
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr, *streams):
            with suppress(Exception):  # it may be anything that a candidate has put there
                stream.flush()
        _flush()
        for fd, file in enumerate(files, 1):
            if file is not None:
                os.dup2(file, fd)
                os.close(file)
        sys.exit = leave
        sys.stdout, sys.stderr = (_opened(stream, fd) for fd, stream in enumerate(streams, 1))


def _copy(stream: Any, fd: int) -> int | None:
    """Another handle of the file below a standard stream, if it has one."""
    with suppress(AttributeError, OSError, ValueError):
        stream.flush()
        _flush()
        return os.dup(fd) if stream.fileno() == fd else None
    return None


def _opened(stream: Any, fd: int) -> Any:
    """The stream, or another on its file if it was closed or detached."""
    with suppress(AttributeError, ValueError):
        if not stream.closed:
            return stream
    with suppress(OSError):
        return open(fd, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
    return stream


def _flush() -> None:
    """Write out the buffers of C, while they still go to the right place."""
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).fflush(None)


def _imported(target: str) -> Any:
    """The object that MODULE:NAME or MODULE:NAME.NAME names, from the current directory too."""
    module, colon, name = target.partition(":")
    if not (module and colon and name):
        raise ValueError(f"the target must be MODULE:CALLABLE, got {target!r}.")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"cannot import {target!r}: {said(error)}") from None
    except BaseException as error:  # also SystemExit and the like
        kind = type(error).__name__
        raise ValueError(f"importing {module!r} failed: {kind}: {said(error)}") from None
    return found


def _expected(path: Path) -> dict[str, str]:
    """Expected failures, a line each: the name of a check, a colon and the reason."""
    found = {}
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {str(path)!r}: {error}") from None
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        name, colon, reason = (part.strip() for part in line.partition(":"))
        if not (colon and reason):
            raise ValueError(f"line {number} of {path} must be `check: reason`, got {line!r}.")
        if name in found:
            raise ValueError(f"line {number} of {path} names {name!r} a second time.")
        found[name] = reason
    return found


def _numbers(ctx: click.Context, param: click.Parameter, value: str) -> list[int]:
    """Parse positive integers separated by commas."""
    import click

    try:
        numbers = [int(item) for item in value.split(",")]
        if not all(1 <= number < 2**63 for number in numbers):
            raise ValueError
    except ValueError:
        raise click.BadParameter(
            f"must be positive integers separated by commas, below 2**63, got {value!r}."
        ) from None
    return sorted(set(numbers))


def _seed(ctx: click.Context, param: click.Parameter, value: int | None) -> int | None:
    """Check a seed: NumPy's hold 128 bits."""
    import click

    if value is not None and not 0 <= value < 2**128:
        raise click.BadParameter(f"must be at least 0 and below 2**128, got {value}.")
    return value


def _names(ctx: click.Context, param: click.Parameter, value: str | None) -> list[str]:
    """Parse names of estimators separated by commas."""
    import click

    if value == "all":
        return list(ESTIMATORS)
    names = list(DEFAULT_ESTIMATORS) if value is None else [x.strip() for x in value.split(",")]
    for name in names:
        if name not in ESTIMATORS:
            raise click.BadParameter(f"must be all or of {', '.join(ESTIMATORS)}, got {name!r}.")
    return list(dict.fromkeys(names))


def _output(suffix: str) -> Callable[[Any, Any, str | None], Path | None]:
    """Make a check that a file with this suffix can be written; it is not opened yet."""
    import click

    def check(ctx: click.Context, param: click.Parameter, value: str | None) -> Path | None:
        if value is None:
            return None
        if not value.lower().endswith(suffix):  # an input given by mistake is not overwritten
            raise click.BadParameter(f"must end in {suffix}, got {value!r}.")
        folder = os.path.dirname(value) or "."
        target = value if os.path.exists(value) else folder
        if not os.path.isdir(folder) or os.path.isdir(value) or not os.access(target, os.W_OK):
            raise click.BadParameter(f"cannot write to {value!r}.")
        return Path(value)

    return check


def _sample() -> Path:
    """Find the data that come with the package."""
    try:
        return _bundled.path()
    except FileNotFoundError as error:
        raise ValueError(f"FILE must be given: {error}.") from None


def load(path: Path, dtype: str | None = None, *, required: str = "qkv") -> dict[str, _Array]:
    """Read and check q, k and v.

    Parameters
    ----------
    path : Path
        File of type .npz (not pickled) or .safetensors.
    dtype : {"float32", "float64"}, optional
        Cast floating-point arrays to this.
    required : {"qkv", "qk"}
        Names of the arrays that must be there.

    Returns
    -------
    dict of arrays
        q, k and, if the file has it, v. All float32 or all float64, finite, with shapes that match.

    Raises
    ------
    TypeError, ValueError
        If the file cannot be used.
    """
    readers = {".npz": _read_npz, ".safetensors": _read_safetensors}
    if path.suffix.lower() not in readers:
        raise ValueError(f"FILE must end in .npz or .safetensors, got {str(path)!r}.")
    try:
        arrays = readers[path.suffix.lower()](path)
    except ModuleNotFoundError:
        raise ValueError(f"reading .safetensors {_INSTALL}") from None
    except Exception as error:  # parsers of foreign bytes raise all kinds
        raise ValueError(f"cannot read {str(path)!r}: {error}") from None
    missing = [name for name in required if name not in arrays]
    if missing:
        names = f"{', '.join(required[:-1])} and {required[-1]}"
        raise ValueError(
            f"FILE must hold arrays {names}: {str(path)!r} has no {' and no '.join(missing)}."
        )
    if dtype is not None:
        with np.errstate(over="ignore"):
            arrays = {n: x.astype(dtype) if x.dtype.kind == "f" else x for n, x in arrays.items()}
    arrays = {name: arrays[name] for name in "qkv" if name in arrays}  # in this order
    q, k = arrays["q"], arrays["k"]
    try:
        _validate.attention(q, k, arrays.get("v", k))
        if q.dtype.itemsize > 8:
            raise TypeError(f"`q` must have dtype float32 or float64, got {q.dtype}.")
    except TypeError as error:
        raise TypeError(f"{error} (--dtype casts floating-point arrays.)") from None
    for name, x in arrays.items():
        if not np.all(np.isfinite(x)):
            raise ValueError(f"`{name}` must be finite in {x.dtype}, got NaN or infinity.")
    return arrays


def _read_npz(path: Path) -> dict[str, _Array]:
    if not zipfile.is_zipfile(path):  # np.load would take it for a pickle
        raise ValueError("not a complete .npz archive")
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in "qkv" if name in file}


def _read_safetensors(path: Path) -> dict[str, _Array]:
    return _safetensors.read(path, "qkv")[0]


# compare: estimators against exact attention


class Inputs(NamedTuple):
    """What is compared, and how."""

    path: Path
    q: _Array
    k: _Array
    v: _Array
    scale: float
    causal: bool
    seed: int
    draws: int


class Row(NamedTuple):
    """Errors of one method, relative to exact attention in float64."""

    estimator: str
    samples: int | None  # S
    errors: _Array  # (draws, ...), one for each draw and head
    seconds: float | None  # for one evaluation of all heads

    @property
    def per_head(self) -> _Array:
        """Mean over the draws, shape (...)."""
        return np.asarray(np.mean(self.errors, axis=0))

    @property
    def worst_head(self) -> tuple[int, ...]:
        """Index of the head of largest error; () if there are no leading axes."""
        return tuple(map(int, np.unravel_index(np.argmax(self.per_head), self.per_head.shape)))


class Skipped(NamedTuple):
    """An estimator that does not take this S, or these options."""

    estimator: str
    samples: int
    reason: str


def measure(
    inputs: Inputs, estimators: Iterable[str], features: Iterable[int]
) -> tuple[list[Row], list[Skipped]]:
    """Measure exact attention, the mean of the values, and each estimator at each S it takes."""
    q, k, v = inputs.q, inputs.k, inputs.v
    settings: dict[str, Any] = {"scale": inputs.scale, "causal": inputs.causal}
    wide = [x.astype(np.float64) for x in (q, k, v)]
    exact, size = _reference(*wide, **settings)

    warm: set[str] = set()
    skipped = []

    def error(estimate: _Array) -> _Array:
        return np.asarray(np.linalg.norm(estimate - exact, axis=(-2, -1)) / size)

    def timed(name: str, samples: int | None, evaluate: Callable[[int], _Array]) -> Row:
        if name not in warm:
            evaluate(0)
            warm.add(name)
        errors, seconds = [], []
        for i in range(inputs.draws):
            start = time.perf_counter()
            estimate = evaluate(i)
            seconds.append(time.perf_counter() - start)
            errors.append(error(estimate))
        return Row(name, samples, np.stack(errors), float(np.median(seconds)))

    uniform = softmax_attention(np.zeros_like(wide[0]), *wide[1:], **settings)
    rows = [
        timed("exact", None, lambda i: softmax_attention(q, k, v, **settings)),
        Row("mean of v", None, error(uniform)[None], None),
    ]
    for name, samples in _track("Comparing", [(n, s) for n in estimators for s in features]):
        try:
            rows.append(timed(name, samples, partial(_evaluate, inputs, name, samples)))
        except (ValueError, MemoryError, OverflowError) as problem:
            skipped.append(Skipped(name, samples, str(problem)))
    if len(rows) == 2 and skipped:
        name, samples, reason = skipped[0]
        raise ValueError(f"{name} with S = {samples}: {reason}")
    return rows, skipped


def _reference(q: _Array, k: _Array, v: _Array, **settings: Any) -> tuple[_Array, _Array]:
    """Exact attention and its norm in each head, which errors are relative to."""
    exact = softmax_attention(q, k, v, **settings)
    size = np.linalg.norm(exact, axis=(-2, -1))
    if not (size.size and np.all(np.isfinite(size) & (size > 0))):
        raise ValueError(
            "exact attention must be finite and not all zero in each head, for errors relative "
            f"to it to exist, got norms {size.tolist()}."
        )
    return np.asarray(exact), np.asarray(size)


def _track(description: str, items: list[Any]) -> Iterable[Any]:
    """Iterate with a progress bar on a terminal."""
    from rich.console import Console
    from rich.progress import track

    return track(
        items,
        console=Console(stderr=True),
        description=description,
        transient=True,
        disable=not sys.stderr.isatty(),
    )


def _evaluate(inputs: Inputs, estimator: str, samples: int, draw: int) -> _Array:
    """Evaluate an entry of the registry; the seed depends on S and the draw, not on the entry."""
    rng = np.random.default_rng(np.random.SeedSequence(inputs.seed, spawn_key=(samples, draw)))
    estimate: _Array = ESTIMATORS[estimator](
        *(inputs.q, inputs.k, inputs.v),
        num_samples=samples,
        rng=rng,
        scale=inputs.scale,
        causal=inputs.causal,
    )
    return estimate


def show(inputs: Inputs, rows: list[Row], skipped: list[Skipped], per_head: bool) -> None:
    """Print the results as tables."""
    import click

    console = _console()
    click.echo(
        f"{_heading(inputs.path, {name: getattr(inputs, name) for name in 'qkv'})}\n"
        f"scale {inputs.scale:.6g}, {'causal' if inputs.causal else 'not causal'}, "
        f"seed {inputs.seed}, draws {inputs.draws}; errors relative to exact attention in float64"
    )
    reference = rows[0].seconds
    table = _table("estimator", "S", "mean error", "worst head", "which", "seconds", "ratio")
    for row in rows:
        table.add_row(
            row.estimator,
            "" if row.samples is None else str(row.samples),
            _digits(np.mean(row.per_head)),
            _digits(np.max(row.per_head)),
            _index(row.worst_head),
            *_times(row.seconds, reference),
        )
    console.print(table)
    for name, samples, reason in skipped:
        click.echo(f"skipped: {name} with S = {samples}: {reason}")
    if per_head:
        click.echo()
        columns = [r.estimator + ("" if r.samples is None else f"@{r.samples}") for r in rows]
        table = _table("head", *columns)
        for head in np.ndindex(rows[0].per_head.shape):
            table.add_row(_index(head), *(_digits(row.per_head[head]) for row in rows))
        console.print(table)


def _console() -> Any:
    from rich.console import Console

    return Console(width=1000, highlight=False, markup=False)  # tables are never squeezed


def _heading(path: Path, arrays: dict[str, _Array]) -> str:
    """Name of the file, shapes and dtype."""
    import click

    shapes = ", ".join(f"{name} {x.shape}" for name, x in arrays.items())
    return f"{click.format_filename(path.name)}: {shapes}, {arrays['q'].dtype}"


def _table(first: str, *rest: str) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column(first)
    for name in rest:
        table.add_column(name, justify="right")
    return table


def _index(head: tuple[int, ...]) -> str:
    return ",".join(map(str, head)) or "-"


def _times(seconds: float | None, reference: float | None) -> tuple[str, str]:
    if seconds is None or reference is None:
        return "", ""
    return f"{seconds:.2g}", _digits(seconds / reference)


def _digits(value: Any) -> str:
    return f"{value:#.3g}".rstrip(".")


def to_json(inputs: Inputs, rows: list[Row], skipped: list[Skipped]) -> str:
    """Format the results as JSON; what is not finite becomes null."""
    reference = rows[0].seconds
    report = {
        **_origin(inputs.path, {name: getattr(inputs, name) for name in "qkv"}),
        "scale": inputs.scale,
        "causal": inputs.causal,
        "seed": inputs.seed,
        "draws": inputs.draws,
        "results": [
            {
                "estimator": row.estimator,
                "samples": row.samples,
                "error_mean": float(np.mean(row.per_head)),
                "error_worst": float(np.max(row.per_head)),
                "worst_head": list(row.worst_head),
                "seconds": row.seconds,
                "ratio": row.seconds and reference and row.seconds / reference,
                "error_per_head": row.per_head.tolist(),
                "error_per_draw": row.errors.tolist(),
            }
            for row in rows
        ],
        "skipped": [entry._asdict() for entry in skipped],
    }
    return _dump(report)


def _origin(path: Path, arrays: dict[str, _Array]) -> dict[str, Any]:
    """Versions, and what was read."""
    return {
        "refattn": __version__,
        "numpy": np.__version__,
        "file": path.name,
        "shapes": {name: list(x.shape) for name, x in arrays.items()},
        "dtype": str(arrays["q"].dtype),
    }


def _dump(report: dict[str, Any]) -> str:
    return json.dumps(portable(report), indent=2, allow_nan=False) + "\n"


def plot(rows: list[Row], path: Path) -> None:
    """Draw error, mean over heads, against S."""
    from matplotlib.figure import Figure

    curves: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row.samples is not None:
            point = (row.samples, float(np.mean(row.per_head)))
            curves.setdefault(row.estimator, []).append(point)
    figure = Figure(figsize=(6, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.axhline(float(np.mean(rows[1].per_head)), color="0.5", linestyle=":", label="mean of v")
    points = next(iter(curves.values()))
    _plot_curves(axes, curves, guide=points)
    axes.set_ylabel("relative error, mean over heads")
    figure.savefig(path, format="png", dpi=150)


def _plot_curves(
    axes: Any, curves: dict[str, list[tuple[int, float]]], guide: list[tuple[int, float]]
) -> None:
    """Draw error against S, with 1/sqrt(S) through the first point of the guide."""
    for i, (name, points) in enumerate(curves.items()):
        axes.plot(*zip(*points, strict=True), marker="osD^v"[i // 10 % 5], label=name)
    slope = [(s, guide[0][1] * math.sqrt(guide[0][0] / s)) for s, _ in guide]
    axes.plot(*zip(*slope, strict=True), color="0.5", linestyle="--", label="1/sqrt(S)")
    axes.set_xscale("log")
    if any(error > 0 for points in curves.values() for _, error in points):
        axes.set_yscale("log")
    axes.set_xlabel("number of features or samples S")
    axes.set_xticks([s for s, _ in guide], labels=[str(s) for s, _ in guide])
    axes.xaxis.minorticks_off()
    axes.legend()


# moments: what queries and keys promise

_PARTS = {  # of moments.Summary
    "mean_norm": "|mean {}|",
    "trace": "tr {}",
    "condition": "cond {}",
    "effective_rank": "rank {}",
}
_QUANTILES = {"quantile_5": 0.05, "quantile_50": 0.5, "quantile_95": 0.95}
_QUANTILE_ROWS = 2048  # at most so many queries, and keys, make the pairs of the quantiles
_LAW_KEYS, _LAW_QUERIES = 1024, 256  # with more keys, laws are evaluated for so many queries
_LAWS = ("rfa", "rfa-adapted", "is", "ra")
_RECOMMENDED = ("rfa", "rfa-adapted", "ra")


class Question(NamedTuple):
    """What is asked about queries and keys."""

    path: Path
    arrays: dict[str, _Array]  # q, k and perhaps v
    scale: float
    target: float
    shrink: bool
    features: list[int]

    @property
    def rows(self) -> tuple[int, int]:
        """Numbers n of queries and m of keys in a head."""
        return self.arrays["q"].shape[-2], self.arrays["k"].shape[-2]

    def cost(self, estimator: str, samples: float) -> float:
        """Multiply-adds of an estimator for a head, relative to exact attention."""
        n, m = self.rows
        return samples * (n * m if estimator == "ra" else n + m) / (n * m)


class Profile(NamedTuple):
    """Answers, arrays of shape (...) over the heads after what is stated."""

    question: Question
    lead: tuple[int, ...]
    advised: int  # d^2
    eigenvalues: dict[str, _Array]  # of q and k, (..., d)
    table: dict[str, _Array]  # moments, by column
    excess: dict[str, _Array]  # expected log excess, by proposal
    error: dict[str, _Array]  # by law, (S, ...)
    inside: dict[str, _Array]  # share of queries in the regime of the law, (S, ...)
    needed: dict[str, _Array]  # S for the target, by estimator

    @property
    def heads(self) -> list[tuple[int, ...]]:
        return list(np.ndindex(self.lead))

    def predictions(self, name: str) -> list[float]:
        """Mean error over heads for each S, nan if any query is outside the regime."""
        pairs = zip(self.error[name], self.inside[name], strict=True)
        return [float(np.mean(e)) if np.all(share == 1) else math.nan for e, share in pairs]

    def recommended(self, head: tuple[int, ...]) -> tuple[str, float | None, float]:
        """Name, S and cost relative to exact attention of what reaches the target for least."""
        options: list[tuple[str, float | None, float]] = [("exact attention", None, 1.0)]
        for name, needed in self.needed.items():
            samples = float(needed[head])
            options.append((name, samples, self.question.cost(name, samples)))
        return min(options, key=lambda option: option[2])


def study(question: Question) -> Profile:
    """Estimate moments, adapt to them, and predict errors; all in float64, head by head."""
    q, k, *values = (x.astype(np.float64) for x in question.arrays.values())
    lead, heads = _each_head(q, k, values[0] if values else k)
    d = q.shape[-1]
    if not heads or 0 in question.rows:
        raise ValueError(
            f"`q` and `k` must have at least one head and one row, got shapes {q.shape} and "
            f"{k.shape}."
        )
    if values:
        _reference(q, k, values[0], scale=question.scale)

    def estimate(x: _Array) -> _moments.Moments:
        found = _moments.estimate(x)
        return _moments.shrink(found) if question.shrink else found

    fitted = adapt.fit(estimate(q), estimate(k), scale=question.scale)
    assert fitted.cov is not None
    assert fitted.gauge is not None
    mean = np.broadcast_to(fitted.mean, (*lead, d))
    cov, gauge = (np.broadcast_to(x, (*lead, d, d)) for x in (fitted.cov, fitted.gauge))
    found = [
        _study_head(
            *(q_h, k_h, v_h if values else None, question, estimate),
            Gaussian(mean[head], cov[head], gauge=gauge[head]),
        )
        for head, q_h, k_h, v_h in _track("Studying", heads)
    ]

    def stacked(part: str) -> dict[str, _Array]:
        """Join the heads; what has an axis over S gets it first."""
        joined = {}
        for name in found[0][part]:
            x = np.stack([head[part][name] for head in found])
            x = x.reshape((*lead, *x.shape[1:]))
            joined[name] = np.moveaxis(x, -1, 0) if part in ("error", "inside") else x
        return joined

    parts = ("eigenvalues", "table", "excess", "error", "inside", "needed")
    return Profile(question, lead, d * d, *(stacked(part) for part in parts))


def _each_head(
    q: _Array, k: _Array, v: _Array
) -> tuple[tuple[int, ...], list[tuple[tuple[int, ...], _Array, _Array, _Array]]]:
    """Shape of the heads, and views (index, q, k, v) of each, also where they share keys."""
    grouped, ungroup = group_heads(q, k, v)
    inner = broadcast_lead(*grouped)
    lead = ungroup(np.broadcast_to(0.0, (*inner, 1, 1))).shape[:-2]
    q, k, v = (np.broadcast_to(x, (*inner, *x.shape[-2:])) for x in grouped)
    pairs = zip(np.ndindex(lead), np.ndindex(inner), strict=True)
    return lead, [(head, q[i], k[i], v[i]) for head, i in pairs]


def _spaced(x: _Array, most: int) -> _Array:
    """At most so many rows, evenly spaced from the first to the last."""
    if len(x) <= most:
        return x
    return np.asarray(x[np.linspace(0, len(x) - 1, most).round().astype(int)])


def _study_head(
    q: _Array,
    k: _Array,
    v: _Array | None,
    question: Question,
    estimate: Callable[[_Array], _moments.Moments],
    fitted: Gaussian,
) -> dict[str, dict[str, Any]]:
    from scipy.spatial.distance import cdist

    root = math.sqrt(question.scale)
    of_q, of_k = estimate(root * q), estimate(root * k)
    both = {"q": _moments.summary(of_q), "k": _moments.summary(of_k)}
    rows = [_spaced(root * x, _QUANTILE_ROWS) for x in (q, k)]
    quantiles = np.quantile(cdist(rows[0], -rows[1], "sqeuclidean"), list(_QUANTILES.values()))
    proposals = {
        "N(0, I)": None,
        "OPRF": adapt.oprf(of_q, of_k),
        "SDERF": adapt.sderf(of_q, of_k),
        "Gaussian": adapt.optimal_gaussian(of_q, of_k),
        "fit": fitted,
    }
    error, inside, needed = {}, {}, {}
    if v is not None:
        few = _spaced(q, _LAW_QUERIES if len(k) > _LAW_KEYS else len(q))
        exact = softmax_attention(few, k, v, scale=question.scale)
        for name, law in _laws(few, k, v, question.scale, fitted).items():
            laws = [_rescaled(law, samples) for samples in question.features]
            error[name] = [theory.relative_error(law, exact) for law in laws]
            inside[name] = [np.mean(law.in_regime) for law in laws]
            if name.startswith("rfa"):
                needed[name] = theory._features_to_reach(question.target, law, exact)
            elif name == "ra":
                count = (theory.relative_error(law, exact) / question.target) ** 2
                needed[name] = np.maximum(np.ceil(count * (1 - 1e-12)), 1.0)
    return {
        "eigenvalues": {name: x.eigenvalues for name, x in both.items()},
        "table": {
            **{f"{part}_{name}": getattr(x, part) for part in _PARTS for name, x in both.items()},
            **dict(zip(_QUANTILES, quantiles, strict=True)),
        },
        "excess": {
            name: adapt.expected_log_excess(of_q, of_k, proposal)
            for name, proposal in proposals.items()
        },
        "error": error,
        "inside": inside,
        "needed": needed,
    }


def _laws(q: _Array, k: _Array, v: _Array, scale: float, fitted: Gaussian) -> dict[str, theory.Law]:
    """The laws of one feature or sample."""
    attention_law = partial(theory.attention_law, q, k, v, num_features=1, scale=scale)
    return {
        "rfa": attention_law(),
        "rfa-adapted": attention_law(proposal=fitted),
        "is": theory.importance_sampling_law(q, k, v, num_features=1, scale=scale),
        "ra": theory.randomized_attention_law(q, k, v, num_samples=1, scale=scale),
    }


def _rescaled(law: theory.Law, samples: int) -> theory.Law:
    """Turn the law of one sample into that of several."""
    count = float(samples)
    return type(law)(law.bias / count, law.variance / count, law.ess * count)


def show_profile(profile: Profile) -> None:
    """Print the answers as tables."""
    import click

    question, console = profile.question, _console()
    click.echo(_heading(question.path, question.arrays))
    click.echo(
        f"scale {question.scale:.6g}, covariances {'' if question.shrink else 'not '}shrunk, "
        f"not causal; {_worth(profile)}"
    )
    click.echo(
        "\nMoments in kernel coordinates, sqrt(scale) q and sqrt(scale) k: norm of the mean;"
    )
    click.echo("trace, condition and effective rank of the covariance; quantiles of |q_i + k_j|^2")
    labels = {f"{part}_{x}": label.format(x) for part, label in _PARTS.items() for x in "qk"}
    labels |= {name: f"{p:.0%}" for name, p in _QUANTILES.items()}
    console.print(_per_head(profile, {labels[name]: x for name, x in profile.table.items()}))
    if max(question.rows) > _QUANTILE_ROWS:
        click.echo(f"quantiles: over at most {_QUANTILE_ROWS} evenly spaced queries and keys")
    click.echo("\nExpected log excess of the variance of a kernel estimate, by proposal (best: 0)")
    console.print(_per_head(profile, profile.excess))
    if not profile.error:
        click.echo("\nFILE has no v: predicted errors and the recommendation are left out.")
        return
    click.echo("\nPredicted relative error, mean over heads (ra: an upper bound)")
    table = _table("S", *(f"{name} (bound)" if name == "ra" else name for name in _LAWS))
    outside = False
    for i, samples in enumerate(question.features):
        cells = []
        for name in _LAWS:
            value, share = profile.predictions(name)[i], float(np.mean(profile.inside[name][i]))
            outside = outside or share < 1
            cells.append(_digits(value) if share == 1 else f"- ({math.floor(100 * share)}%)")
        table.add_row(str(samples), *cells)
    console.print(table)
    if outside:
        click.echo("-: outside the regime of the law (effective sample size below 10) for some")
        click.echo("queries; in brackets the share of queries inside")
    if question.rows[1] > _LAW_KEYS and question.rows[0] > _LAW_QUERIES:
        click.echo(f"laws: of {_LAW_QUERIES} evenly spaced queries of each head, and all keys")
    _show_recommendation(profile)


def _worth(profile: Profile) -> str:
    """Compare the numbers of rows with d^2."""
    n, m = profile.question.rows
    counts = f"n = {n}, m = {m}"
    rough = sorted({x for x in (n, m) if x <= profile.advised})
    if not rough:
        return f"{counts}; N > d^2 = {profile.advised}, as reference 002 advises"
    listed = " and ".join(map(str, rough))
    sign = "<" if rough[-1] < profile.advised else "<="
    return f"{counts}\nN = {listed} {sign} d^2 = {profile.advised}: covariances are rough"


def _per_head(profile: Profile, columns: dict[str, _Array]) -> Any:
    """Make a table of one row a head, the median and the worst."""
    table = _table("head", *columns)
    for head in profile.heads:
        table.add_row(_index(head), *(_cell(x[head]) for x in columns.values()))
    for label, pick in (("median", np.median), ("worst", np.max)):
        cells = []
        for name, x in columns.items():
            known = x[~np.isnan(x)]
            least = label == "worst" and name.startswith("rank")
            cells.append(_cell((np.min if least else pick)(known) if known.size else math.nan))
        table.add_row(label, *cells)
    return table


def _cell(value: Any) -> str:
    return "-" if math.isnan(value) else _digits(value)


def _show_recommendation(profile: Profile) -> None:
    import click

    question = profile.question
    click.echo(f"\nS for relative error {question.target:g}, and what reaches it for least")
    table = _table("head", *_RECOMMENDED, "recommended", "cost/exact")
    chosen: dict[str, list[float | None]] = {}
    for head in profile.heads:
        name, samples, cost = profile.recommended(head)
        chosen.setdefault(name, []).append(samples)
        counts = (_count(float(profile.needed[name][head])) for name in _RECOMMENDED)
        table.add_row(_index(head), *counts, name, _digits(cost))
    _console().print(table)
    for name, counts_of in chosen.items():
        known = [x for x in counts_of if x is not None]
        median = f", median S = {_count(float(np.median(known)))}" if known else ""
        click.echo(
            f"recommended for {len(counts_of)} of {len(profile.heads)} heads: {name}{median}"
        )
    click.echo(
        "cost: multiply-adds, S (n + m) (d + d_v) for rfa and rfa-adapted, n S m (d + d_v) for ra"
    )
    click.echo("(at least that of exact attention, which it evaluates), n m (d + d_v) for exact")


def _count(value: float) -> str:
    if not math.isfinite(value):
        return "-"
    return f"{value:g}" if value < 1e6 else f"{value:.2e}"


def profile_to_json(profile: Profile) -> str:
    """Format the answers as JSON; what is not finite becomes null.

    heads: one object a head, with its index `head`, `moments` in kernel coordinates
    (what `moments.Summary` holds, and quantiles of |q_i + k_j|^2 in percent), the `eigenvalues` of
    the covariances of q and k, largest first, `log_excess` by proposal, `num_features` for the
    target by estimator, and what is `recommended`. predictions: one object for each estimator and
    S, with `error_mean` over heads (null outside the regime of the law), `error_per_head` (what
    the law says there too) and `share_in_regime_per_head` of the queries.
    """
    question = profile.question
    n, m = question.rows
    heads = []
    for head in profile.heads:
        entry: dict[str, Any] = {
            "head": list(head),
            "moments": {name: float(x[head]) for name, x in profile.table.items()},
            "eigenvalues": {name: x[head].tolist() for name, x in profile.eigenvalues.items()},
            "log_excess": {name: float(x[head]) for name, x in profile.excess.items()},
        }
        if profile.error:
            entry["num_features"] = {name: float(x[head]) for name, x in profile.needed.items()}
            keys = ("estimator", "num_features", "cost_ratio")
            entry["recommended"] = dict(zip(keys, profile.recommended(head), strict=True))
        heads.append(entry)
    return _dump(
        {
            **_origin(question.path, question.arrays),
            "scale": question.scale,
            "shrink": question.shrink,
            "target": question.target,
            "count": {"q": n, "k": m},
            "advised_count": profile.advised,
            "enough": {"q": n > profile.advised, "k": m > profile.advised},
            "heads": heads,
            "predictions": [
                {
                    "estimator": name,
                    "samples": samples,
                    "error_mean": profile.predictions(name)[i],
                    "error_per_head": error[i].tolist(),
                    "share_in_regime_per_head": profile.inside[name][i].tolist(),
                }
                for name, error in profile.error.items()
                for i, samples in enumerate(question.features)
            ],
        }
    )


def plot_profile(profile: Profile, path: Path) -> None:
    """Draw the spectra of q and k and, if there are predictions, error against S."""
    from matplotlib.figure import Figure

    names = list(profile.eigenvalues)
    panels = len(names) + bool(profile.error)
    figure = Figure(figsize=(4.5 * panels, 4), layout="constrained")
    axes = figure.subplots(1, panels)
    for ax, name in zip(axes, names, strict=False):
        values = profile.eigenvalues[name].reshape(-1, profile.eigenvalues[name].shape[-1])
        positive = np.where(values > 0, values, math.nan)
        ax.plot(np.arange(1, values.shape[-1] + 1), positive.T, linewidth=0.7)
        if np.any(values > 0):
            ax.set_yscale("log")
        ax.set_xlabel(f"eigenvalue of the covariance of {name}, one line a head")
    axes[0].set_ylabel("size in kernel coordinates")
    if profile.error:
        curves = {}
        for name in _LAWS:
            pairs = zip(profile.question.features, profile.predictions(name), strict=True)
            points = [(samples, error) for samples, error in pairs if math.isfinite(error)]
            if points:
                curves["ra (bound)" if name == "ra" else name] = points
        _plot_curves(axes[-1], curves, guide=curves["ra (bound)"])
        axes[-1].set_ylabel("predicted relative error, mean over heads")
    figure.savefig(path, format="png", dpi=150)


if __name__ == "__main__":
    main()
