"""The blocks of the pages of the guide: run in order, and compared with what is shown.

A block of Python is run, and a block without a language after it is what it prints; one, or an
edit, that begins with a comment that names a file is that file. A block of a console has commands
after ``$`` and what they print: those of ``refattn`` and ``python`` are run, unless the fence says
``shown`` (other tests compare some of these). ``...`` stands for lines that are left out. Numbers
agree to 2 %; times are not compared, and neither is how much of a tolerance rounding takes.
"""

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "validation" / "site" / "guide"
NUMBER = r"-?\d+(?:\.\d*)?(?:e[+-]?\d+)?"
NOT_COMPARED = rf"{NUMBER}\s?s\b|(?<=max error ){NUMBER}(?= x allowed error)|─+"
TIMES = ("seconds", "ratio")  # columns that no run repeats


class Block(NamedTuple):
    language: str
    words: list[str]
    text: str


class Run(NamedTuple):
    """Code or a command, what is shown of its output, and the output."""

    code: str
    shown: str
    printed: str


def page(name):
    return (GUIDE / f"{name}.md").read_text("utf-8")


def blocks(text):
    for fence, inside in re.findall(r"^```([^\n]*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        language, *words = fence.split() or [""]
        yield Block(language, words, inside)


# Lines on progress, which differ from machine to machine.
BESIDE = (
    r"^(?:(?:estimated time|time limit): .*|check \d+ of \d+: .*|"
    r"\w+: (?:\d+ of \d+|not yet done) after .*)\n"
)


def runs(text, folder):
    """Run the blocks of a page in a folder, in which the process is."""
    scope = {"__name__": "__main__"}
    for block, after in pairwise([*blocks(text), Block("end", [], "")]):
        if "shown" in block.words:
            continue
        if name := re.match(r"# (\w+\.(?:py|diff))\n", block.text):
            (folder / name[1]).write_text(block.text)
        elif block.language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(block.text, f"<{block.text[:30]!r}>", "exec"), scope)
            yield Run(block.text, "" if after.language else after.text, out.getvalue())
        elif block.language == "console":
            for line, shown in commands(block.text):
                yield Run(line, shown, command(line, folder))


def commands(text):
    """The commands of a console, and what is shown of each."""
    return re.findall(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", text, re.MULTILINE)


def command(line, folder):
    """What a command prints, with its errors."""
    program, *args = shlex.split(line.replace("\\\n", " "))
    if program == "refattn" and args[0] == "check":  # which imports what is in the folder
        program, args = "python", ["-m", "refattn", *args]
        if "--time-limit" not in args:  # what is printed is that of a machine with time
            args += ["--time-limit", "900"]
    if program == "refattn":
        from click.testing import CliRunner

        from refattn import cli

        done = CliRunner().invoke(cli.commands(), args, prog_name="refattn")
        assert done.exit_code in (0, 1, 2, 3), done.output
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        return re.sub(BESIDE, "", done.output, flags=re.MULTILINE)
    assert program == "python", line
    env = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1", "COLUMNS": "100"}
    if "check" in args:  # each finding in a line, as in a pipe
        del env["COLUMNS"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    code = [sys.executable, "-W", "ignore", *args]
    result = subprocess.run(code, cwd=folder, env=env, timeout=1000, check=False, **pipes)
    return re.sub(BESIDE, "", result.stdout, flags=re.MULTILINE)


def lines_of(text):
    """Lines, the columns of times left out of tables of estimators."""
    lines, spans = [], []
    for line in text.rstrip("\n").splitlines():
        if "estimator" in line and any(f" {name}" in line for name in TIMES):
            names = list(re.finditer(r"\S+(?: \S+)*", line))
            spans = [
                (before.end(), name.end())  # numbers are set right, and may be wider than names
                for before, name in pairwise(names)
                if name.group() in TIMES
            ]
        elif not line.strip():
            spans = []
        kept = (x for i, x in enumerate(line) if not any(a <= i < b for a, b in spans))
        lines.append("".join(kept).rstrip())
    return lines


def same(shown, printed, atol=1e-12):
    """Whether two lines have the same words and numbers that are close; times may be any."""
    shown, printed = (re.sub(NOT_COMPARED, " ANY ", x) for x in (shown, printed))
    a, b = (" ".join(re.sub(NUMBER, "#", x).split()) for x in (shown, printed))
    x, y = ([float(n) for n in re.findall(NUMBER, z)] for z in (shown, printed))
    return a == b and np.allclose(x, y, rtol=0.02, atol=atol)


def difference(shown, printed, atol=1e-12):
    """Empty if what is shown is what was printed, but for lines that are left out."""
    parts = [[]]
    for line in lines_of(shown):
        if line.strip() == "...":
            parts.append([])
        else:
            parts[-1].append(line)
    rest = lines_of(printed)
    for number, part in enumerate(parts):
        last = number == len(parts) - 1
        places = [
            at
            for at in range(len(rest) - len(part) + 1)
            if all(same(a, b, atol) for a, b in zip(part, rest[at:], strict=False))
        ]
        if number == 0:
            places = [0] if 0 in places else []
        if last:
            places = [at for at in places if at + len(part) == len(rest)]
        if not places:
            return "shown:\n" + "\n".join(part) + "\n\nprinted:\n" + "\n".join(rest)
        rest = rest[(places[-1] if last else places[0]) + len(part) :]
    return ""
