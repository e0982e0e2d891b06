"""The graph that an evaluation leaves, and the way back through it: cotangents of every step."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from itertools import count
from typing import Any, NamedTuple

from ..arrays.library import Array, array_namespace, device, is_jax_array, own_copy

_serial = count()
Back = Callable[[Any], tuple[Any, ...]]


class Step:
    """One operation: its name, its value, the steps of its operands, and what pulls back to them.

    `pull` takes the cotangent of the value and returns those of the operands. If no operand moves,
    it is None, there are no `args`, and the name is "given" or "constant". A `light` step does not
    keep its value `x`, and nor do the steps that depend on it.
    """

    light: bool
    __slots__ = ("args", "light", "name", "pull", "read", "serial", "shape", "x")

    def __init__(
        self,
        name: str,
        x: Any,
        args: tuple[Step, ...] = (),
        pull: Back | None = None,
        *,
        light: bool = False,
    ) -> None:
        self.light = light or any(arg.light for arg in args)
        self.name, self.x, self.args, self.pull = name, None if self.light else x, args, pull
        # Of several results their number, in a list.
        self.shape = [len(x)] if isinstance(x, tuple) else tuple(getattr(x, "shape", ()))
        self.serial, self.read = next(_serial), False
        for arg in args:
            arg.read = True

    @property
    def moves(self) -> bool:
        """Say whether it depends on what was given."""
        return self.pull is not None or self.name == "given"

    def __repr__(self) -> str:
        return f"<{self.name} of {', '.join(x.name for x in self.args) or 'nothing'}>"


class Slot(NamedTuple):
    """The cotangent of a part of an array, or of one of several results."""

    index: Any
    x: Any


def before(last: Iterable[Step]) -> list[Step]:
    """List steps and all that these were made of, the last first."""
    found, waiting = set[Step](), list(last)
    while waiting:
        step = waiting.pop()
        if step not in found:
            found.add(step)
            waiting += step.args
    return sorted(found, key=lambda step: -step.serial)


def pull_steps(
    last: Iterable[tuple[Step, Any]], wanted: Container[Step] | None = None
) -> dict[Step, Any]:
    """Take the cotangents of the last steps back to all steps before them, and return all.

    If only some are `wanted`, the others are dropped on the way.
    """
    sums, last = _Gathered(), list(last)
    for step, g in last:
        sums.add(step, g)
    for step in before(step for step, _ in last):
        g = sums.found.get(step)
        if g is not None and step.pull is not None:
            if wanted is not None and step not in wanted:
                del sums.found[step]
            for arg, x in zip(step.args, step.pull(g), strict=True):
                sums.add(arg, x)
    return sums.found


class _Gathered:
    """Cotangents of steps, added up; those of parts in one buffer for the whole."""

    def __init__(self) -> None:
        self.found: dict[Step, Any] = {}
        self._own = set[Step]()  # whose cotangent nothing else holds

    def add(self, step: Step, g: Any) -> None:
        """Add to the cotangent of a step."""
        if g is None or not step.moves:
            return
        held = self.found.get(step)
        if not isinstance(g, Slot):
            self.found[step] = g if held is None else held + g
            if held is not None:
                self._own.add(step)
        elif isinstance(step.shape, list):
            held = [None] * step.shape[0] if held is None else held
            held[g.index] = g.x if held[g.index] is None else held[g.index] + g.x
            self.found[step] = held
        else:
            self._add_part(step, g.index, g.x)

    def _add_part(self, step: Step, index: tuple[Any, ...], g: Array) -> None:
        held, xp = self.found.get(step), array_namespace(g)
        if held is None:
            held = xp.zeros(step.shape, dtype=g.dtype, device=device(g))
        elif step not in self._own:
            held = own_copy(held, xp)
        g = xp.reshape(g, held[index].shape)  # without the axes of `None`
        if is_jax_array(held):
            held = held.at[index].add(g)
        elif 0 not in g.shape:
            held[index] += g
        self.found[step] = held
        self._own.add(step)


def pairs(tree: Any, other: Any = None) -> list[tuple[Any, Any]]:
    """Pair the leaves of tuples with those of another tree, which has None for whole branches."""
    if not isinstance(tree, tuple):
        return [(tree, other)]
    others = (None,) * len(tree) if other is None else other
    return [pair for x, y in zip(tree, others, strict=True) for pair in pairs(x, y)]


def mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply a function to the leaves of tuples of tuples, in their order."""
    if not isinstance(tree, tuple):
        return function(tree)
    items = [mapped(function, x) for x in tree]
    return type(tree)(*items) if hasattr(tree, "_fields") else tuple(items)
