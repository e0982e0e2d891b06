"""Bad arguments: what is raised and what the message says, from every `bad_arguments.txt`.

A line `> statement` sets up names for the rows of its file, beside `np`, `refattn` and `tmp_path`, a
fresh folder. A row is `call | error | words`: the words stand in the message as they are, with
anything in the place of ` ... `. Lines that begin with # are comments.
"""

import builtins
import functools
from pathlib import Path

import numpy as np
import pytest

import refattn

FOLDER = Path(__file__).parent
FILES = sorted(FOLDER.rglob("bad_arguments.txt"))


def lines(path):
    return [x for x in path.read_text("utf-8").splitlines() if x and not x.startswith("#")]


@functools.cache
def names(path):
    found = {"np": np, "refattn": refattn}
    exec("\n".join(x[2:] for x in lines(path) if x.startswith("> ")), found)
    return found


def rows():
    for path in FILES:
        for line in lines(path):
            if not line.startswith("> "):
                call, error, words = line.rsplit(" | ", 2)
                topic = path.parent.relative_to(FOLDER)
                yield pytest.param(path, call, error, words, id=f"{topic}: {call}")


@pytest.mark.parametrize(("path", "call", "error", "words"), [*rows()])
def test_bad_arguments(path, call, error, words, tmp_path):
    with pytest.raises(getattr(builtins, error)) as raised:
        eval(call, {**names(path), "tmp_path": tmp_path})
    message, position = str(raised.value), 0
    for part in words.split(" ... "):
        position = message.find(part, position)
        assert position >= 0, f"{message!r} does not have {part!r}"
        position += len(part)
