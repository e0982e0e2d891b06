"""Clean text for messages: quoted values, and what exceptions say, safe for any terminal."""

from __future__ import annotations

import inspect
import json
import math
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar
from unicodedata import category

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

_SPECIAL = re.compile("[^\t\n -~]")
# Letters and marks by their category, of which nothing is seen.
_UNSEEN = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)

# What other libraries call our arguments, types, layouts and hardware.
_WORDS = {
    "q": "query queries",
    "k": "key keys",
    "v": "value values",
    "out": "o output",
    "lse": "logsumexp softmax_lse",
    "d_out": "do dout grad_out grad_output",
    "causal": "is_causal",
    "scale": "sm_scale softmax_scale",
    "mask": "attn_mask attention_mask key_padding_mask padding_mask",
    "bias": "attn_bias",
    "window": "window_size",
    "softcap": "soft_cap logits_soft_cap",
    "sinks": "s_aux",
    "vjp": "grad gradient gradients backward",
    "num_features": "nb_features",
    "rng": "seed",
    "bfloat16": "bf16",
    "float16": "fp16 half",
    "float32": "fp32",
    "float64": "fp64",
    "bhnd": "bhsd",
    "bnhd": "bshd",
    "hopper": "h100 h200",
    "ampere": "a100",
}
ELSEWHERE = {word: name for name, words in _WORDS.items() for word in words.split()}


def printable(text: str) -> str:
    r"""Escape the characters that UTF-8, XML or a terminal does not take, or that nobody sees.

    Those turn text around, as the marks of direction do, end a line, or take no room.

    >>> printable("d\x00\udcff\u202ee")
    'd\\x00\\udcff\\u202ee'
    """
    return _SPECIAL.sub(lambda match: _show_character(match.group()), text)


def one_word(text: str) -> str:
    r"""Escape what is not `printable`, and what would begin another line or column.

    >>> one_word("q\n\tk")
    'q\\n\\tk'
    """
    return re.sub("[\t\n]", lambda match: _escape(match.group()), printable(text))


def name_some(names: Iterable[str], most: int = 20) -> str:
    """Join names in order, the first of them if there are many.

    >>> name_some("dcba", 3)
    'a, b, c and 1 more'
    """
    ordered = sorted(names)
    more = len(ordered) - most
    return ", ".join(ordered[:most]) + (f" and {more:,} more" if more > 0 else "")


def _show_character(character: str) -> str:
    seen = character.isprintable() and not _UNSEEN.match(character)
    return character if seen or category(character) == "Zs" else _escape(character)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()


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


def warn_caller(text: str, category: type[Warning]) -> None:
    """Warn at the line of the caller that led into the package, however deep this is called."""
    level, frame = 2, sys._getframe(1)
    package = __name__.partition(".")[0]
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(
        (f"{package}.", "contextlib")  # whose contexts are decorators
    ):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)


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
    """A question after what was received, if another library or a slip may mean a known word.

    >>> close("perfomer", ["performer", "ra"]), close("x", ["performer", "ra"])
    (' Did you mean performer?', '')
    >>> close("sm_scale", ["q_scale", "scale"])
    ' Did you mean scale?'
    """
    from difflib import get_close_matches

    known = list(known)
    here = ELSEWHERE.get(word.lower())
    matches = [here] if here in known else get_close_matches(word, known, 3, 0.7)
    return f" Did you mean {' or '.join(matches)}?" if matches else ""


def check_keywords(function: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Refuse keywords that a function does not take, with those that may be meant.

    >>> check_keywords("attend", ["is_causal"], ["causal", "mask"])
    Traceback (most recent call last):
    ...
    TypeError: attend() got an unexpected keyword argument 'is_causal'. Did you mean causal?
    """
    for name in given:
        if name not in known:
            raise TypeError(
                f"{function}() got an unexpected keyword argument {name!r}.{close(name, known)}"
            )


def keyword_names(function: Callable[..., Any]) -> list[str] | None:
    """Names that a function takes as keywords; None if it takes any."""
    parameters = inspect.signature(function).parameters.values()
    if any(x.kind is x.VAR_KEYWORD for x in parameters):
        return None
    return [x.name for x in parameters if x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY)]


def with_known_keywords(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Decorate a function to say which keyword may be meant, or is to be passed."""
    known = keyword_names(function)
    if known is None:
        return function
    parameters = inspect.signature(function).parameters.values()
    needed = [x.name for x in parameters if x.kind is x.KEYWORD_ONLY and x.default is x.empty]

    @wraps(function)
    def call(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        __tracebackhide__ = True  # pytest shows the line that calls
        check_keywords(function.__qualname__, kwargs, known)
        for name in needed:
            if name not in kwargs:
                raise TypeError(f"{function.__qualname__}() needs `{name}`: pass {name}=...")
        return function(*args, **kwargs)

    return call


def head_number(index: Sequence[int]) -> str:
    """Where a head is, by its leading axes.

    >>> head_number((0, 3)), head_number(())
    ('0,3', '-')
    """
    return ",".join(map(str, index)) or "-"


def place(index: Sequence[int]) -> str:
    """Write an index; one number has no brackets."""
    return f"({', '.join(map(str, index))})" if len(index) != 1 else str(index[0])


def name_row(index: Sequence[int]) -> str:
    """Name each axis of a row's place: files may have tokens before heads.

    >>> name_row((1, 2, 30)), name_row((30,))
    ('head (1, 2), row 30', 'row 30')
    """
    *head, row = index
    return f"head {place(head)}, row {row}" if head else f"row {row}"


def name_element(index: Sequence[int]) -> str:
    """Name each axis of an element's place."""
    return f"{name_row(index[:-1])}, column {index[-1]}"
