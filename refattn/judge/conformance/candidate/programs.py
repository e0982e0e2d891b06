"""Programs in any language as candidates: arrays go in and come out in files."""

from __future__ import annotations

import shlex
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from ....arrays import checks
from ....arrays.words import ending
from ....files.safetensors import read_tensors

_LONGEST = 1e6  # seconds that every system can wait for a program
GRACE = 1.0  # seconds that a program has to end by itself


class Subprocess:
    r"""A program called as an estimator: arrays go in and come out in files.

    For each call the arguments are written to a file, under the names by which `check` passes them
    (``num_features``, ``seed`` and ``causal`` as int64 numbers of shape (), ``indices`` as int64,
    ``mask`` as uint8, a pair of arrays as one with a first axis of 2). The program is run with the
    path of this file and the path of a file to write, and ``out`` is read from the latter (``mean``
    and ``cov`` for moments). If there is ``d_out``, the cotangent of ``out``, the gradients ``dq``,
    ``dk`` and ``dv`` are also read, and ``d_bias`` and ``d_sinks`` if declared, and the gradient of
    each gate, such as ``d_beta``; with ``return_lse``, ``lse`` is read, and with ``initial_state``,
    ``state``. A side of a ``window`` without a limit is -1. So a program in any language is checked
    without bindings.

    Parameters
    ----------
    command : str or sequence of str
        The program and its arguments, without a shell. ``{input}`` and ``{output}`` stand for
        the two paths, which are appended if neither is there; other braces are left as they are.
    format : {"safetensors", "npz"}
        Format of both files.
    names : sequence of str
        Names of the positional arrays; by default q, k and v.
    timeout : float
        Seconds after which a call is stopped, at most 10^6.

    Raises
    ------
    TypeError, ValueError
        If the command is empty or not a list of words, or the format is unknown.
    RuntimeError
        On a call, if the program cannot be started, crashes, exits with a status other than 0,
        takes too long, or writes no result.

    Examples
    --------
    >>> from refattn.judge.conformance import Subprocess
    >>> Subprocess("./attention --fast {input} {output}").command
    ['./attention', '--fast', '{input}', '{output}']
    """

    def __init__(
        self,
        command: str | Sequence[str],
        *,
        format: str = "safetensors",
        names: Sequence[str] = ("q", "k", "v"),
        timeout: float = 60.0,
    ) -> None:
        try:
            self.command = shlex.split(command) if isinstance(command, str) else list(command)
        except ValueError as error:
            raise ValueError(
                f"`command` must be a command line in shell syntax, got {command!r}: {error}."
            ) from None
        for word in self.command:
            if not isinstance(word, str):
                raise TypeError(f"`command` must hold strings only, got {type(word).__name__}.")
        if not self.command:
            raise ValueError("`command` must name a program, got nothing.")
        checks.choice("format", format, ("safetensors", "npz"))
        named = any("{input}" in word or "{output}" in word for word in self.command)
        if not named:
            self.command += ["{input}", "{output}"]
        self.format, self.names = format, tuple(names)
        self.timeout = checks.real("timeout", timeout, positive=True)
        # By which reports name a callable: a program, with the file that it runs.
        program, *words = self.command
        files = [Path(x).name for x in words if Path(x).is_file()]
        self.__qualname__ = " ".join([Path(program).name, *files[:1]])
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self, *arrays: Any, **options: Any) -> Any:
        """Have the program make one call."""
        named = dict(zip(self.names, arrays, strict=False))
        for key, value in options.items():
            if isinstance(value, tuple | list):  # a window, or a pair of arrays
                # Files hold no None: a window has no negative sides.
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
                self._run(source, target)
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
        if "initial_state" in options and "d_out" not in options:
            wanted += ["state"]
        if "d_out" in options:
            wanted += [f"d{name}" for name in self.names]
            others = dict.fromkeys(("bias", "sinks", *options))
            wanted += [f"d_{x}" for x in others if x in options and f"d_{x}" in result]
        for name in wanted:
            if name not in result:
                raise RuntimeError(f"the program wrote {sorted(result)} and not `{name}`")
        # A pair was written as one array, and its gradient comes back as one.
        pairs = [f"d_{x}" for x, value in options.items() if isinstance(value, tuple)]
        found = tuple(tuple(result[x]) if x in pairs else result[x] for x in wanted)
        return found[0] if wanted == ["out"] else found

    def close(self) -> None:
        """End a program that still runs."""
        if self._process is not None:
            self._process.kill()

    def _run(self, source: str, target: str) -> None:
        words = [w.replace("{input}", source).replace("{output}", target) for w in self.command]
        with subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        ) as process:
            self._process = process
            try:
                errors = process.communicate(timeout=min(self.timeout, _LONGEST))[1]
            # Also if the user interrupts: no program is left running.
            except BaseException:
                process.kill()
                raise
        if process.returncode != 0:
            said = errors.decode(errors="replace").strip()[-200:]  # the last of standard error
            said = f"{': ' if said else ''}{said}"
            raise RuntimeError(f"the program ended {ending(process.returncode)}{said}")

    def _write(self, path: str, arrays: Mapping[str, Any]) -> None:
        arrays = {k: np.asarray(x, order="C") for k, x in arrays.items()}
        if self.format == "npz":
            np.savez(path, allow_pickle=False, **arrays)
            return
        try:
            import_module("safetensors.numpy").save_file(arrays, path)
        except ModuleNotFoundError:
            needs = "format 'safetensors' needs `pip install 'refattn[cli]'`"
            raise ModuleNotFoundError(needs) from None

    def _read(self, path: str) -> dict[str, Any]:
        if self.format == "npz":
            with np.load(path, allow_pickle=False) as file:
                return dict(file)
        return read_tensors(path)[0]
