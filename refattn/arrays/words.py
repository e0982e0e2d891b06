"""Text that every reader takes: what others wrote, and what exceptions say."""

from __future__ import annotations

import json
import math
import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

# What XML forbids, lone surrogates and control characters, to which terminals react.
_STRANGE = re.compile("[^\t\n -~\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def printable(text: str) -> str:
    r"""Escape the characters that UTF-8, XML or a terminal does not take.

    >>> printable("d\x00\udcffe")
    'd\\x00\\udcffe'
    """
    return _STRANGE.sub(lambda match: match.group().encode("unicode_escape").decode(), text)


def portable(value: Any) -> Any:
    """What JSON and all its readers take: text is printable, what is not finite is None.

    What has fields is an object of these, arrays are lists, and all else is text.

    >>> portable({"a": [1.5, float("nan")], "b": "\\udcff"})
    {'a': [1.5, None], 'b': '\\\\udcff'}
    """
    if is_dataclass(value):
        value = {x.name: getattr(value, x.name) for x in fields(value)}
    elif hasattr(value, "_asdict"):
        value = value._asdict()
    elif hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {key: portable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [portable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, bool | int | float | None) else printable(str(value))


def to_json(value: Any, indent: int = 2) -> str:
    """Write what is `portable` of a value as JSON."""
    return json.dumps(portable(value), indent=indent, allow_nan=False) + "\n"


def said(error: BaseException) -> str:
    """What an exception says, in one line; nothing if it fails at that too."""
    try:
        return " ".join(str(error).split())
    except Exception:
        return ""


def ending(status: int) -> str:
    """How a process ended, by its exit status.

    >>> ending(3), ending(-11)
    ('with status 3', 'by SIGSEGV (signal 11)')
    """
    if status >= 0:
        return f"with status {status}"
    names = {number.value: number.name for number in signal.Signals}
    return f"by {names.get(-status, 'a signal')} (signal {-status})"


def close(word: str, known: Iterable[str]) -> str:
    """A question after what was received, if it is nearly a known word.

    >>> close("perfomer", ["performer", "ra"]), close("x", ["performer", "ra"])
    (' Did you mean performer?', '')
    """
    from difflib import get_close_matches

    matches = get_close_matches(word, list(known), 3, 0.7)
    return f" Did you mean {' or '.join(matches)}?" if matches else ""


def head_number(index: Sequence[int]) -> str:
    """Where a head is, by its leading axes.

    >>> head_number((0, 3)), head_number(())
    ('0,3', '-')
    """
    return ",".join(map(str, index)) or "-"
