"""Steps with a pullback of their own: blocks and recurrences, whose steps would take memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any

from ..arrays.library import array_namespace, is_array_api_obj
from .steps import Slot, mapped, pairs, rebuilt
from .tape import Traced, given, pull_to_steps, record, untraced


def primitive(pull: Callable[..., dict[str, Any]]) -> Callable[[Any], Any]:
    """Decorate a function of arrays to be one step, however it computes.

    ``pull(result, cotangent, **arguments)`` gets the result and all arguments without a tape, and
    returns cotangents by the names of arguments. All of them may be tuples of tuples of arrays.
    Without traced arguments the function is as it was.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        parameters = signature(function)

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not any(isinstance(x, Traced) for x, _ in pairs((*args, *kwargs.values()), None)):
                return function(*args, **kwargs)
            bound = parameters.bind(*args, **kwargs)
            named = bound.arguments
            traced = [x for x, _ in pairs(tuple(named.values()), None) if isinstance(x, Traced)]
            plain = {name: mapped(untraced, x) for name, x in named.items()}
            bound.arguments = plain
            result = function(*bound.args, **bound.kwargs)

            def pull_all(g: Any) -> tuple[Any, ...]:
                taken = pull(result, rebuilt(result, iter(g)), **plain)
                both = pairs(tuple(named.values()), tuple(map(taken.get, named)))
                return tuple(y for x, y in both if isinstance(x, Traced))

            leaves = tuple(x for x, _ in pairs(result, None))
            joint = record(function.__name__, leaves, tuple(traced), pull_all)

            def item(i: int) -> Any:
                if not is_array_api_obj(leaves[i]):
                    return leaves[i]
                return record("item", leaves[i], (joint,), lambda g: (Slot(i, g),))

            return rebuilt(result, map(item, range(len(leaves))))

        return run

    return decorate


def retraced(function: Callable[..., Any]) -> Any:
    """Decorate a function to be one step that is traced when it is pulled back, not before.

    It is computed twice; in between, only arguments and results are held.
    """

    def pull(result: Any, cotangent: Any, **arguments: Any) -> dict[str, Any]:
        traced = {name: mapped(_given_numbers, x) for name, x in arguments.items()}
        bound = parameters.bind_partial()
        bound.arguments = traced
        found = pull_to_steps(function(*bound.args, **bound.kwargs), cotangent)

        def of(x: Any) -> Any:
            return found.get(x.step) if isinstance(x, Traced) else None

        return {name: mapped(of, x) for name, x in traced.items()}

    parameters = signature(function)
    return primitive(pull)(function)


def _given_numbers(x: Any) -> Any:
    """Trace an array of floats; other arrays are constants."""
    if not is_array_api_obj(x):
        return x
    floats = array_namespace(x).isdtype(x.dtype, "real floating")
    return given(x) if floats else Traced(x)
