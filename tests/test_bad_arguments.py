"""Bad arguments: what is raised and what the message says, from every `bad_arguments.txt`.

A line `> statement` sets up names for the rows below it, beside `np`, `refattn` and `tmp_path`, a
fresh folder. A row is `call | error | words`: the error is of this class, not of one below it,
and the words stand in the message as they are, with anything in the place of ` ... `. Lines that
begin with # are comments.
"""

import builtins
import functools
import re
from pathlib import Path

import numpy as np
import pytest

import refattn

FOLDER = Path(__file__).parent


@functools.cache
def names(setup):
    found = {"np": np, "refattn": refattn}
    exec(setup, found)
    return found


def rows():
    """The statements above a row in its file, and its three parts."""
    for path in sorted(FOLDER.rglob("bad_arguments.txt")):
        topic, setup = path.parent.relative_to(FOLDER), ""
        for line in path.read_text("utf-8").splitlines():
            if line.startswith("> "):
                setup += line[2:] + "\n"
            elif line and not line.startswith("#"):
                call, error, words = line.rsplit(" | ", 2)
                yield pytest.param(setup, call, error, words, id=f"{topic}: {call}")


@pytest.mark.parametrize(("setup", "call", "error", "words"), [*rows()])
def test_bad_arguments(setup, call, error, words, request):
    assert re.search(r"\w", words), "a row without words"
    given = dict(names(setup))
    if "tmp_path" in call:
        given["tmp_path"] = request.getfixturevalue("tmp_path")
    with pytest.raises(getattr(builtins, error)) as raised:
        eval(call, given)
    assert raised.type.__name__ == error
    message, position = str(raised.value), 0
    for part in words.split(" ... "):
        position = message.find(part, position)
        assert position >= 0, f"{message!r} does not have {part!r}"
        position += len(part)
