"""Steps with a pullback of their own: blocks and recurrences, whose steps would take memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from inspect import signature
from itertools import count
from typing import Any, ParamSpec, Protocol, TypeVar, cast

from ..arrays.library import is_array_api_obj, untraced
from .steps import Slot, mapped, pairs
from .tape import Traced, given, pull_to_steps, record

_Given = ParamSpec("_Given")
_R = TypeVar("_R", covariant=True)
_Rule = TypeVar("_Rule", bound=Callable[..., Mapping[str, Any]])
# Of arguments by name, traced and not, the result, and the cotangent of it: those of arguments.
_Pulled = Callable[[Mapping[str, Any], Mapping[str, Any], Any, Any], Mapping[str, Any]]


class Primitive(Protocol[_Given, _R]):
    """A function that is one step of a tape."""

    def __call__(self, *args: _Given.args, **kwargs: _Given.kwargs) -> _R:
        """Evaluate it."""

    def pullback(self, written: _Rule) -> _Rule:
        """Decorate its pullback."""


def primitive(function: Callable[_Given, _R]) -> Primitive[_Given, _R]:
    """Decorate a function of arrays to be one step, however it computes.

    Its pullback is set by the decorator `pullback` that it gets as an attribute: a function of the
    result, the cotangent and all arguments by keyword, not traced, which returns cotangents by the
    names of arguments. Arguments and results may be tuples of tuples of arrays. Without traced
    arguments the function is as it was.
    """

    def pull(traced: Any, plain: Mapping[str, Any], result: Any, g: Any) -> Mapping[str, Any]:
        found: Mapping[str, Any] = run.of(result, g, **plain)
        return found

    def pullback(written: _Rule) -> _Rule:
        run.of = written
        return written

    run: Any = _one_step(function, pull, holds_result=True)
    run.pullback = pullback
    return cast(Primitive[_Given, _R], run)


def retraced(function: Callable[_Given, _R]) -> Callable[_Given, _R]:
    """Decorate a function to be one step that is traced when it is pulled back, not before.

    It is computed twice; in between, only arguments and results are held.
    """

    def pull(
        traced: Mapping[str, Any], plain: Mapping[str, Any], result: Any, g: Any
    ) -> Mapping[str, Any]:
        def anew(x: Any) -> Any:
            if not isinstance(x, Traced):
                return x
            return given(x.x, light=True) if x.step.moves else Traced(x.x)

        def taken(x: Any) -> Any:
            return found.get(x.step) if isinstance(x, Traced) else None

        bound, arguments = (
            parameters.bind_partial(),
            {x: mapped(anew, y) for x, y in traced.items()},
        )
        bound.arguments = dict(arguments)
        wanted = [x for x, _ in pairs(tuple(arguments.values())) if isinstance(x, Traced)]
        found = pull_to_steps(function(*bound.args, **bound.kwargs), g, wanted)
        return {name: mapped(taken, x) for name, x in arguments.items()}

    parameters = signature(function)
    return _one_step(function, pull, holds_result=False)


def _one_step(
    function: Callable[_Given, _R], pull: _Pulled, *, holds_result: bool
) -> Callable[_Given, _R]:
    parameters = signature(function)

    @wraps(function)
    def run(*args: _Given.args, **kwargs: _Given.kwargs) -> Any:
        if not any(isinstance(x, Traced) for x, _ in pairs((*args, *kwargs.values()))):
            return function(*args, **kwargs)
        bound = parameters.bind(*args, **kwargs)
        traced = dict(bound.arguments)
        plain = {name: mapped(untraced, x) for name, x in traced.items()}
        bound.arguments = dict(plain)
        result = function(*bound.args, **bound.kwargs)
        whole = tuple(traced.values())
        operands = tuple(x for x, _ in pairs(whole) if isinstance(x, Traced))
        leaves = tuple(x for x, _ in pairs(result, None))
        held = result if holds_result else mapped(lambda x: None, result)

        def pull_all(g: Any) -> tuple[Any, ...]:
            cotangents = iter(g)
            taken = pull(traced, plain, held, mapped(lambda x: next(cotangents), held))
            both = pairs(whole, tuple(map(taken.get, traced)))
            return tuple(y for x, y in both if isinstance(x, Traced))

        joint = record(function.__name__, leaves, operands, pull_all)

        def item(x: Any) -> Any:
            i = next(places)
            return (
                record("item", x, (joint,), lambda g: (Slot(i, g),)) if is_array_api_obj(x) else x
            )

        places = count()
        return mapped(item, result)

    return run
