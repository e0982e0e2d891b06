"""Programs in any language as candidates: arrays go in and come out in files."""

from __future__ import annotations

import os
import queue
import shlex
import subprocess
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import numpy as np

from ...arrays import checks
from ...arrays.words import ending
from ...files.safetensors import read_tensors

_LONGEST = 1e6  # seconds that every system can wait for a program
GRACE = 1.0  # seconds that a program has to end by itself


class Subprocess:
    r"""A program called as an estimator: arrays go in and come out in files.

    For each call the arguments are written to a file (arrays under the names of the contract,
    ``num_features``, ``seed`` and ``causal`` as int64 numbers of shape (), ``indices`` as int64,
    ``mask`` as uint8), the program is run with the paths of this file and of one to write, and
    ``out`` is read from the latter (``mean`` and ``cov`` for moments). Where there is ``d_out``,
    the cotangent of ``out``, those of the arrays are read too: ``dq``, ``dk`` and ``dv``, with
    ``d_bias`` and ``d_sinks`` if they are there; with ``return_lse``, ``lse`` is read. A side of a
    ``window`` without a limit is -1. So a program in any language is checked without bindings.

    With `keep` the program is started once and makes all calls. It reads a line for each on its
    standard input, the two paths with a tab between them, and answers on its standard output with
    a line that is ``ok`` or ``error: message``, which it must flush; other lines are passed over.
    It ends when its input does. After a crash it is started again for the next call.

    Parameters
    ----------
    command : str or sequence of str
        The program and its arguments, without a shell. ``{input}`` and ``{output}`` stand for
        the two paths, which are appended if neither is there; other braces are left as they are.
    format : {"safetensors", "npz"}
        Format of both files.
    names : sequence of str
        Names of the positional arrays, those of q, k, v by default.
    timeout : float
        Seconds after which a call is stopped; at most 10^6 are waited.
    keep : bool
        Whether the program reads the paths from its standard input, call after call.

    Raises
    ------
    TypeError, ValueError
        If the command is empty or no list of words, or names the paths though the program is kept,
        or the format is unknown.
    RuntimeError
        On a call, if the program cannot be started, crashes, exits with another status than 0 or,
        if it is kept, at all, answers with an error, takes too long, or writes no result.

    Notes
    -----
    A program in Python that is kept::

        for line in sys.stdin:
            source, target = line.rstrip("\n").split("\t")
            given = np.load(source)
            np.savez(target, out=attention(given["q"], given["k"], given["v"]))
            print("ok", flush=True)

    Examples
    --------
    >>> from refattn.conformance import Subprocess
    >>> Subprocess("./attention --fast {input} {output}").command
    ['./attention', '--fast', '{input}', '{output}']
    >>> Subprocess("./attention --serve", keep=True).command
    ['./attention', '--serve']
    """

    def __init__(
        self,
        command: str | Sequence[str],
        *,
        format: str = "safetensors",
        names: Sequence[str] = ("q", "k", "v"),
        timeout: float = 60.0,
        keep: bool = False,
    ) -> None:
        try:
            self.command = shlex.split(command) if isinstance(command, str) else list(command)
        except ValueError as error:
            raise ValueError(
                f"`command` must be words as of a shell, got {command!r}: {error}."
            ) from None
        for word in self.command:
            if not isinstance(word, str):
                raise TypeError(f"`command` must hold strings only, got {type(word).__name__}.")
        if not self.command:
            raise ValueError("`command` must name a program, got nothing.")
        checks.choice("format", format, ("safetensors", "npz"))
        named = any("{input}" in word or "{output}" in word for word in self.command)
        if named and keep:
            raise ValueError(
                "`command` must leave out {input} and {output} if the program is kept, "
                f"got {self.command!r}."
            )
        if not (named or keep):
            self.command += ["{input}", "{output}"]
        self.format, self.names, self.keep = format, tuple(names), keep
        self.timeout = checks.real("timeout", timeout, positive=True)
        self.__qualname__ = Path(self.command[0]).name
        self._process: subprocess.Popen[bytes] | None = None
        self._program: _Program | None = None

    def __call__(self, *arrays: Any, **options: Any) -> Any:
        """Have the program make one call."""
        named = dict(zip(self.names, arrays, strict=False))
        for key, value in options.items():
            if key == "window":
                value = [-1 if x is None else x for x in value]
            value = np.asarray(value)
            named[key] = (
                value
                if value.dtype.kind == "f"
                else value.astype(np.uint8 if key == "mask" else np.int64)
            )
        with tempfile.TemporaryDirectory() as folder:
            source, target = (f"{folder}/{name}.{self.format}" for name in ("input", "output"))
            self._write(source, named)
            try:
                (self._ask if self.keep else self._run)(source, target)
            except OSError as error:
                raise RuntimeError(f"the program could not be started: {error}") from None
            except subprocess.TimeoutExpired:
                raise RuntimeError(f"the program took more than {self.timeout:g} s") from None
            try:
                result = self._read(target)
            except Exception as error:
                raise RuntimeError(f"the program wrote no readable result: {error}") from None
        wanted = ["mean", "cov"] if self.names == ("x",) else ["out"]
        if "return_lse" in options and "d_out" not in options:
            wanted += ["lse"]
        if "d_out" in options:
            wanted += [f"d{name}" for name in self.names]
            wanted += [x for x in ("d_bias", "d_sinks") if x[2:] in options and x in result]
        for name in wanted:
            if name not in result:
                raise RuntimeError(f"the program wrote {sorted(result)} and not `{name}`")
        return result["out"] if wanted == ["out"] else tuple(result[name] for name in wanted)

    def close(self) -> None:
        """End a program that still runs; of one that is kept, the next call starts another."""
        if self._process is not None:
            self._process.kill()
        if self._program is not None:
            self._program.end()
            self._program = None

    @property
    def _seconds(self) -> float:
        return float(min(self.timeout, _LONGEST))

    def _run(self, source: str, target: str) -> None:
        """Run the program for one call."""
        words = [w.replace("{input}", source).replace("{output}", target) for w in self.command]
        with subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        ) as process:
            self._process = process
            try:
                errors = process.communicate(timeout=self._seconds)[1]
            except BaseException:
                process.kill()
                raise
        if process.returncode != 0:
            raise _failure_of(process.returncode, errors)

    def _ask(self, source: str, target: str) -> None:
        """Have the program that is kept make one call, and start it if there is none."""
        if self._program is None:
            self._program = _Program(self.command)
        try:
            answer = self._program.ask(f"{source}\t{target}\n", self._seconds)
        except BaseException:
            self._program.kill()
            self._program = None
            raise
        if answer != "ok":
            raise RuntimeError(answer.removeprefix("error: "))

    def _write(self, path: str, arrays: Mapping[str, Any]) -> None:
        arrays = {k: np.asarray(x, order="C") for k, x in arrays.items()}
        if self.format == "npz":
            np.savez(path, allow_pickle=False, **arrays)
        else:
            _safetensors().save_file(arrays, path)

    def _read(self, path: str) -> dict[str, Any]:
        if self.format == "npz":
            with np.load(path, allow_pickle=False) as file:
                return dict(file)
        return read_tensors(path)[0]


class _Program:
    """A program that is kept, and answers a line with a line."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._errors: deque[bytes] = deque(maxlen=10)
        # Both are read at all times: a program that writes into a full pipe waits.
        self._readers = [
            threading.Thread(target=work, args=(stream, kept), daemon=True)
            for work, stream, kept in (
                (_pass_answers_on, self._process.stdout, self._answers),
                (_keep_last, self._process.stderr, self._errors),
            )
        ]
        for reader in self._readers:
            reader.start()
        self.end = weakref.finalize(self, _end_program, self._process)

    def ask(self, request: str, seconds: float) -> str:
        """Return the answer to a request: ``ok`` or an error."""
        until = time.monotonic() + seconds
        with suppress(OSError):  # the program has ended
            os.write(self._process.stdin.fileno(), os.fsencode(request))  # type: ignore[union-attr]
        try:
            answer = self._answers.get(timeout=seconds)
        except queue.Empty:
            raise subprocess.TimeoutExpired(request, seconds) from None
        if answer is None:
            status = self._process.wait(max(until - time.monotonic(), 0.0))
            for reader in self._readers:
                reader.join(GRACE)
            raise _failure_of(status, b"".join(self._errors))
        return answer

    def kill(self) -> None:
        """End at once."""
        self._process.kill()
        self.end()


def _pass_answers_on(stream: IO[bytes], answers: queue.SimpleQueue[str | None]) -> None:
    """Pass answers on, and None at the end."""
    with stream:
        for line in stream:
            text = line.decode(errors="replace").rstrip("\r\n")
            if text == "ok" or text.startswith("error: "):
                answers.put(text)
    answers.put(None)


def _keep_last(stream: IO[bytes], lines: deque[bytes]) -> None:
    with stream:
        lines.extend(stream)


def _end_program(process: subprocess.Popen[bytes]) -> None:
    """End the input of a program, and the program if that does not."""
    process.stdin.close()  # type: ignore[union-attr]
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _failure_of(status: int, errors: bytes) -> RuntimeError:
    """Make the error of a program that failed, with the last words of its standard error."""
    words = errors.decode(errors="replace").strip()[-200:]
    return RuntimeError(f"the program ended {ending(status)}{': ' if words else ''}{words}")


def _safetensors() -> Any:
    try:
        return import_module("safetensors.numpy")
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "format 'safetensors' needs `pip install 'refattn[cli]'`"
        ) from None
