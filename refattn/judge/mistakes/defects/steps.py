"""Changes of one step of a formula that no row lists: what was computed instead is searched for.

Every expression of a formula's functions is a step. The text runs with each of them twice: as it is
written and, at the step that is chosen, as a template makes it (`x_` is what was there, `c_` a
number that is fitted).
"""

from __future__ import annotations

import ast
import copy
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import resources
from types import CodeType
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from ....arrays.library import Doubles
from ..text import cut, run
from .edits import Edited, text

_CHOSEN, _OTHER, _VALUE, _NUMBER = "step_", "other_", "x_", "c_"  # names that texts read
_NO_STEP = -1  # no step is chosen
_SAME_RESULT = 4  # times the error allowed, for numbers to be the same
# What is fitted, and numbers to begin with.
_FITS = {
    "x_ * c_": (1.0, 2.0, 0.5, math.sqrt(2), 4.0, 0.25, 2 * math.pi, 0.5 / math.pi),
    "x_ + c_": (0.0, 1.0, -1.0),
    **{f"x_ / (xp.sum(x_, axis={i}, keepdims=True) + c_)": (0.0,) for i in (-1, -2)},
}
_SLOPE = 1e-6
_MOST_STEPS = 8  # of a fit
_FEW_STARTS = 3  # numbers to begin with, if those of sizes are not tried
_DIGITS_SHOWN = (2, 4, 8)  # of a fitted number
_LAST_AXES = (-1, -2, -3)
# What is made of arrays of numbers, of truths, and of integers.
_OF_ONE_NUMBER = ("-x_", "0.0 * x_", "abs(x_)", "x_**2", "x_**0.5", "1 / x_")
_OF_FLOATS = (
    *(*_OF_ONE_NUMBER, "xp.exp(x_)", "xp.log(x_)", "xp.tanh(x_)"),
    *("xp.maximum(x_, 0.0)", "xp.minimum(x_, 0.0)", "xp.ones_like(x_)", "x_.mT"),
    *("x_[..., :1, :]", "x_[..., -1:, :]", "x_[..., :1, :, :]", "x_[..., ::-1, :, :]"),
    "xp.swapaxes(x_, -2, -3).reshape(x_.shape)",
    "x_.reshape(xp.swapaxes(x_, -2, -3).shape).swapaxes(-2, -3)",
    *(f"xp.{f}(x_, axis={i}, keepdims=True)" for f in ("sum", "mean", "max") for i in _LAST_AXES),
    *(f"x_ - xp.{f}(x_, axis={i}, keepdims=True)" for f in ("mean", "max") for i in _LAST_AXES[:2]),
    *(f"x_ / xp.sum(x_, axis={i}, keepdims=True)" for i in _LAST_AXES),
    *("x_ / xp.linalg.norm(x_, axis=-1, keepdims=True)", "softmax(x_)"),
    *(f"xp.cumulative_sum(x_, axis={i})" for i in _LAST_AXES[:2]),
    *("x_[..., ::-1]", "x_[..., ::-1, :]", "xp.astype(xp.astype(x_, xp.float32), x_.dtype)"),
    *(f"xp.roll(x_, {i}, axis={axis})" for i in (1, -1) for axis in _LAST_AXES),
)
_OF_TRUTHS = (
    *("~x_", "xp.ones_like(x_)", "x_.mT", "x_[..., :1, :]", "x_[..., ::-1]", "x_[..., ::-1, :]"),
    *(f"xp.{f}(x_, axis=-2, keepdims=True)" for f in ("any", "all")),
    *(f"xp.roll(x_, {i}, axis={axis})" for i in (1, -1) for axis in _LAST_AXES[:2]),
)
_OF_INTEGERS = ("x_ + 1", "x_ - 1", "0", "1", "-1", "-2", "-3", "-x_", "2 * x_", "x_ // 2")
_OF_LIMITS = ("0.0", "-1.0", "-1e4", "-1e9")  # in place of -inf
_SIBLINGS = (
    *(("sum", "mean", "max", "min", "prod"), ("exp", "expm1", "cosh"), ("cos", "sin")),
    *(("maximum", "minimum"), ("any", "all"), ("floor", "ceil", "round")),
)
_LIKE_OPERATORS: tuple[tuple[type[Any], ...], ...] = (
    *((ast.Add, ast.Sub, ast.Mult), (ast.Mult, ast.Div, ast.Add), (ast.FloorDiv, ast.Mod)),
    (ast.BitAnd, ast.BitOr, ast.BitXor),
    (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq),
)
_LIBRARIES = ("xp", "np", "math")
_EXPRESSIONS = (
    ast.Name,
    ast.Constant,
    ast.BinOp,
    ast.UnaryOp,
    ast.Compare,
    ast.Call,
    ast.Subscript,
)
_NO_STEPS = ("dtype", "device", "keepdims")  # arguments of functions of arrays


# What a step is, by its number, and the names of its module and function.
Other = Callable[[int, dict[str, Any], dict[str, Any]], Any]
_Tree = TypeVar("_Tree", bound=ast.AST)


class StepOfText(NamedTuple):
    """An expression of a function, and the statement that it is part of."""

    function: str
    statement: ast.stmt
    node: ast.expr


class Observed(NamedTuple):
    """A call, what came, what should have come, the error allowed, sizes by name, and options."""

    run: Callable[[Edited], Any]
    got: Doubles
    want: Doubles
    allowed: Doubles
    sizes: Mapping[str, int]
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Stepped(Edited):
    """An implementation in which one step can be another."""

    def space(self) -> dict[str, Any]:
        """Return the functions of the text, which read which step is chosen."""
        return _stepped(self)[0]

    @property
    def steps(self) -> Sequence[StepOfText]:
        """The steps of the text."""
        return _stepped(self)[1]

    def computes(
        self, seen: Observed, chosen: object = _NO_STEP, other: Other | None = None
    ) -> Any:
        """Return what comes if the steps chosen are what `other` says; None where that fails."""
        space = self.space()
        space.update({_CHOSEN: chosen, _OTHER: other})
        try:
            found = seen.run(self)
        except Exception:  # most changes are of no use
            return None
        finally:
            space[_CHOSEN] = _NO_STEP
        fits = np.shape(found) == seen.got.shape and np.all(np.isfinite(found))
        return found if fits else None


# The text asks whether what is chosen is not equal to the number of a step.
class _Reached:
    """A choice of no step, which keeps the steps that ask."""

    def __init__(self) -> None:
        self.steps = dict[int, None]()

    def __ne__(self, step: object) -> bool:
        self.steps[cast(int, step)] = None
        return True


class _Both(frozenset[int]):
    """A choice of two steps."""

    def __ne__(self, step: object) -> bool:
        return step not in self


class StepChange(NamedTuple):
    """Steps that are others: by a template, where c_ is `number`, or by an expression."""

    fn: Stepped
    steps: tuple[int, ...]
    new: str | ast.expr
    number: str = "1.0"

    def compute(self, seen: Observed, number: float | None = None) -> Any:
        """Return what the implementation with this change gives; None where it fails."""
        c = _number(self.number, seen.sizes) if number is None else number
        here = {i: _as_code(self.fn.steps[i].node) for i in self.steps}
        new = _as_code(_parsed(self.new) if isinstance(self.new, str) else self.new)

        def other(step: int, space: Any, names: Any) -> Any:
            if isinstance(self.new, str):
                names = {**names, _VALUE: eval(here[step], space, names), _NUMBER: c}
            return eval(new, space, names)

        chosen = self.steps[0] if len(self.steps) == 1 else _Both(self.steps)
        return self.fn.computes(seen, chosen, other)

    def explains(self, seen: Observed) -> bool:
        """Tell whether the implementation with this change gives what came."""
        return _is_same(self.compute(seen), seen)

    @property
    def name(self) -> str:
        """What a report calls it."""
        return "changed-step"

    @property
    def effect(self) -> str:
        """The same in a sentence."""
        steps = "one step" if len(self.steps) == 1 else "the step of queries and that of keys"
        return f"The formula with {steps} changed."

    def shown(self) -> str:
        """Return the statements as they should be, and as they are."""
        statements = dict[str, ast.stmt]()
        for step in (self.fn.steps[i] for i in self.steps):
            new, right = self.new, ast.unparse(step.statement)
            if isinstance(new, str):
                new = _put(_put(_parsed(new), _VALUE, step.node), _NUMBER, _parsed(self.number))
                if isinstance(step.node, ast.Constant) and not _is_read(new):
                    new = ast.Constant(eval(ast.unparse(new)))
            statements[right] = _put(statements.get(right, step.statement), step.node, new)
        lines = [f"in {step.function} (- right, + like yours):"]
        for right, x in statements.items():
            # Of a statement with others, its first line.
            pair = (y.split("\n", 1)[0] for y in (right, ast.unparse(x)))
            lines += [f"  {sign} {y}" for sign, y in zip("-+", pair, strict=True)]
        return "\n".join(lines)


def find_change(
    fns: Iterable[Stepped], calls: Sequence[Observed], end: float = math.inf
) -> StepChange | None:
    """Find a change that explains all calls, at best of one step without a number, until `end`."""
    first = min(calls, key=lambda x: x.got.size)
    # A size that is the same in all calls is not told from a number.
    told = {x: y for x, y in first.sizes.items() if any(z.sizes.get(x) != y for z in calls)}
    first = first._replace(sizes=told)
    right = first._replace(got=first.want)
    found = [(x, y) for x in fns if _is_same(x.computes(first), right) for y in _places(x, first)]
    for list_changes in (_without_numbers, _with_numbers):
        for fn, steps in found:
            if time.monotonic() > end:
                return None
            for change in list_changes(fn, steps, first):
                if all(change.explains(x) for x in calls):
                    return change
    return None


def _places(fn: Stepped, seen: Observed) -> list[tuple[int, ...]]:
    """List the steps that a call computes, in their order, then those of q and of k together."""
    reached = _Reached()
    fn.computes(seen, reached)
    of_k: dict[tuple[str, str], int] = {}
    for i in reached.steps:
        of_k.setdefault((fn.steps[i].function, ast.unparse(fn.steps[i].node)), i)
    pairs = []
    for (function, words), i in of_k.items():
        j = of_k.get((function, re.sub(r"(?<![a-z])q(?![a-z])", "k", words)), i)
        pairs += [(i, j)] if j != i else []
    return [*((i,) for i in reached.steps), *pairs]


def _without_numbers(fn: Stepped, steps: tuple[int, ...], seen: Observed) -> Iterator[StepChange]:
    value, names = _value_of(fn, steps[0], seen)
    new = list[str | ast.expr](_templates_of(value))
    if len(steps) == 1:
        new = [*_list_other(fn.steps[steps[0]].node, value, names), *new]
    yield from (y for x in new if (y := StepChange(fn, steps, x)).explains(seen))


def _with_numbers(fn: Stepped, steps: tuple[int, ...], seen: Observed) -> Iterator[StepChange]:
    value, _ = _value_of(fn, steps[0], seen)
    for template, starts in _FITS.items() if _is_of(value, float) else ():
        more = _list_names(seen.sizes) if len(starts) > _FEW_STARTS else ()
        every = [*starts, *(_number(x, seen.sizes) for x in more)]
        number = _fit(partial(StepChange(fn, steps, template).compute, seen), every, seen)
        names = () if number is None else _names_of(number, seen.sizes)
        yield from (StepChange(fn, steps, template, x) for x in names)


def _fit(run: Callable[[float], Any], starts: Iterable[float], seen: Observed) -> float | None:
    """Find a number of which the numbers of a call come, by Gauss-Newton from the best of some."""
    tried = ((x, run(x)) for x in starts)
    error = {x: _square(seen.got - y) for x, y in tried if y is not None}
    if not error:
        return None
    c = min(error, key=lambda x: error[x])
    left = math.inf
    for _ in range(_MOST_STEPS):
        h = _SLOPE * max(abs(c), 1.0)
        here, there = run(c), run(c + h)
        if here is None or there is None:
            return None
        if _is_same(here, seen):
            return c
        slope, before = (there - here) / h, left
        left = _square(seen.got - here)
        if not (0 < _square(slope) < math.inf and left < before / 2):
            return None
        c += float(np.sum(slope * (seen.got - here))) / _square(slope)
    return None


def _square(x: Doubles) -> float:
    with np.errstate(over="ignore"):
        return float(np.sum(x * x))


def _list_names(sizes: Iterable[str]) -> Iterator[str]:
    """List numbers that are made of sizes."""
    yield from (y for x in sizes for y in (x, f"{x} ** 0.5", f"1 / {x} ** 0.5", f"1 / {x}"))


def _names_of(number: float, sizes: Mapping[str, int]) -> Iterator[str]:
    """List what a number may be: by the sizes of a call, or with as few digits as it may have."""
    for name in _list_names(sizes):
        if math.isclose(_number(name, sizes), abs(number), rel_tol=1e-6):
            yield f"-({name})" if number < 0 else name
    for digits in _DIGITS_SHOWN:
        yield f"{number:.{digits}g}"


def _number(number: str, sizes: Mapping[str, int]) -> float:
    return float(eval(number, {}, dict(sizes)))


def _is_same(found: Any, seen: Observed) -> bool:
    most = _SAME_RESULT * seen.allowed
    return found is not None and bool(np.all(np.abs(found - seen.got) <= most))


def _value_of(fn: Stepped, step: int, seen: Observed) -> tuple[Any, Mapping[str, Any]]:
    """Return what a step is when it is first computed, and the names that it may read."""
    noted: list[tuple[Any, Mapping[str, Any]]] = []
    here = _as_code(fn.steps[step].node)

    def note(_: int, space: Any, names: Any) -> Any:
        noted.append((eval(here, space, names), dict(names)))
        return noted[-1][0]

    fn.computes(seen, step, note)
    return noted[0] if noted else (None, {})


def _templates_of(value: Any) -> tuple[str, ...]:
    """Return what may be made of a value."""
    if isinstance(value, bool):
        return ("not x_",)
    if isinstance(value, float) and math.isinf(value):
        return _OF_LIMITS
    if _is_of(value, float):
        return _OF_FLOATS if np.ndim(value) else _OF_ONE_NUMBER
    return _OF_TRUTHS if _is_of(value, np.bool_) else _OF_INTEGERS if _is_of(value, int) else ()


def _list_other(node: ast.expr, value: Any, names: Mapping[str, Any]) -> Iterator[ast.expr]:
    """List expressions with another operator, function, name or order of arguments."""
    match node:
        case ast.BinOp(op=op):
            yield from (ast.BinOp(node.left, x(), node.right) for x in _others(op))
        case ast.Compare(ops=[op]):
            yield from (ast.Compare(node.left, [x()], node.comparators) for x in _others(op))
        case ast.Name(id=name):
            for x, y in names.items():
                if x != name and type(y) is type(value) and x not in _LIBRARIES:
                    yield ast.Name(x, ast.Load())
        case ast.Call(func=func, args=[first, *rest]) if not isinstance(first, ast.Starred):
            yield first
            for axis in _LAST_AXES[1:] if isinstance(func, ast.Name) else ():
                turned = _put(_parsed(f"x_.swapaxes(-1, {axis})"), _VALUE, first)
                call = ast.Call(func, [turned, *rest], node.keywords)
                yield _put(_parsed(f"x_.swapaxes(-1, {axis})"), _VALUE, call)
            if rest and not isinstance(rest[0], ast.Starred):
                yield from (ast.BinOp(first, x(), rest[0]) for x in (ast.Add, ast.Mult))
                yield ast.Call(func, [rest[0], first, *rest[1:]], node.keywords)
            if isinstance(func, ast.Attribute):
                for alike in _SIBLINGS:
                    for other in {*alike} - {func.attr} if func.attr in alike else ():
                        other_func = ast.Attribute(func.value, other, ast.Load())
                        yield ast.Call(other_func, node.args, node.keywords)


def _others(operator: Any) -> Iterator[type[Any]]:
    for alike in _LIKE_OPERATORS:
        if isinstance(operator, alike[:1] if len(alike) < 4 else alike):
            yield from (x for x in alike if not isinstance(operator, x))
    if isinstance(operator, ast.Sub | ast.Div | ast.BitOr):
        yield {ast.Sub: ast.Add, ast.Div: ast.Mult, ast.BitOr: ast.BitAnd}[type(operator)]


def _is_of(value: Any, kind: Any) -> bool:
    """Tell whether a value is a number or an array of a kind."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.ndarray | np.generic):
        return False
    kinds = {float: np.floating, int: np.integer}
    return np.issubdtype(np.asarray(value).dtype, kinds.get(kind, kind))


def _put(tree: _Tree, old: ast.expr | str, new: ast.expr) -> _Tree:
    """Put an expression in the place of a node of a tree, or of a name."""
    return cast(_Tree, _Put(old, new).visit(copy.deepcopy(tree)))


class _Put(ast.NodeTransformer):
    def __init__(self, old: ast.expr | str, new: ast.expr) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> Any:
        if isinstance(self.old, str):
            found = isinstance(node, ast.Name) and node.id == self.old
        else:
            found = _what_and_where(node) == _what_and_where(self.old)
        return self.new if found else super().generic_visit(node)


def _what_and_where(node: ast.AST) -> tuple[Any, ...]:
    return (type(node), *(getattr(node, x, None) for x in node._attributes))


def _is_read(node: ast.AST) -> bool:
    """Tell whether an expression reads a name."""
    return any(isinstance(x, ast.Name) for x in ast.walk(node))


@cache
def _parsed(template: str) -> ast.expr:
    return ast.parse(template, mode="eval").body


def _as_code(node: ast.expr) -> CodeType:
    return compile(ast.fix_missing_locations(ast.Expression(copy.deepcopy(node))), "<step>", "eval")


@cache
def _equations() -> frozenset[str]:
    """Names of the functions that compute something: of the formulas, and of what stands in."""
    folders = resources.files("refattn.naive"), resources.files(__package__).joinpath("texts")
    files = (x for folder in folders for x in folder.iterdir() if x.name.endswith(".py"))
    no = ("__", "one_file", "draws", "keys")
    kept = (x.read_text("utf-8") for x in files if not x.name.startswith(no))
    return frozenset(name for x in kept for name in cut(x))


@cache
def _stepped(edited: Stepped) -> tuple[dict[str, Any], Sequence[StepOfText]]:
    """Run the text with all its steps; steps of the formula come before those of its parts."""
    texts, steps = dict(text(edited.over)), list[StepOfText]()
    plain = text() if edited.over else {}
    for name in [x for x in texts if x in _equations() and texts[x] != plain.get(x)]:
        tree = ast.parse(texts[name])
        for function in tree.body:
            if isinstance(function, ast.FunctionDef) and "@wraps(" not in texts[name]:
                function.body = [_Doubled(name, steps).visit(x) for x in function.body]
        texts[name] = ast.unparse(ast.fix_missing_locations(tree))
    space = run(texts)
    space[_CHOSEN] = _NO_STEP
    return space, steps


class _Doubled(ast.NodeTransformer):
    """Make each step a choice of two."""

    def __init__(self, function: str, steps: list[StepOfText]) -> None:
        self.function, self.steps = function, steps
        self.statement: ast.stmt = ast.Pass()

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.stmt):
            self.statement = copy.deepcopy(node)
        match node:
            case ast.Expr() | ast.AnnAssign() | ast.JoinedStr() | ast.Attribute(value=ast.Name()):
                return node
            case ast.keyword(arg=name) if name in _NO_STEPS:
                return node
            case ast.FunctionDef():
                node.body = [self.visit(x) for x in node.body]
                return node
            case ast.Constant(value=x) if isinstance(x, bool) or not isinstance(x, int | float):
                return node
        read = isinstance(getattr(node, "ctx", ast.Load()), ast.Load)
        if not (isinstance(node, _EXPRESSIONS) and read):
            return self.generic_visit(node)
        which = len(self.steps)
        self.steps.append(StepOfText(self.function, self.statement, copy.deepcopy(node)))
        if isinstance(node, ast.Call):
            node.args, node.keywords = (
                [self.visit(y) for y in x] for x in (node.args, node.keywords)
            )
            if isinstance(node.func, ast.Attribute) and not isinstance(node.func.value, ast.Name):
                node.func.value = self.visit(node.func.value)
        else:
            self.generic_visit(node)
        both = f"{_VALUE} if {_CHOSEN} != {which} else {_OTHER}({which}, globals(), locals())"
        return _put(_parsed(both), _VALUE, cast(ast.expr, node))
