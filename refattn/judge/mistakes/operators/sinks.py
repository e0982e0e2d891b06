"""Sinks that rows take from other heads, by a rule of their places."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from ...rounding.problems import Problem
from ..causes.sampled import Alternative, Result, Rows, attend, pad_sum, take_rows


def list_sinks(problem: Problem) -> Iterator[Alternative]:
    """List kernels that take the number of a row for that of the head whose sink it has.

    Rows of all heads, or of those that share a key head, lie one after another, query by query or
    head by head.
    """
    if not problem.has_sinks:
        return
    heads, n = problem.lead[-1] if problem.lead else 1, problem.shape[0]
    for size in sorted({heads, heads // (problem.key_heads or heads)} - {1}):
        orders = {f"{size} i + g": (1, size), f"{n} g + i": (n, 1)}
        steps = sorted({size, n})
        for (name, (of_head, of_query)), step in product(orders.items(), steps):
            if step < size * n and not (step == n and of_head == n and n >= size):  # its own
                place = f"({name}) // {step} % {size}"
                text = f"in query i, head g of each {size} has the sink that is number {place}"
                order = partial(_number_row, size, of_head, of_query, step)
                answer = partial(_take_sinks_of_rows, problem, order)
                yield Alternative(text, problem, answer=answer)


def _number_row(size: int, of_head: int, of_query: int, step: int, head: int, i: Any) -> Any:
    """Return the head that has the number of a row over a step, of the same group."""
    g = head % size
    return head - g + (of_head * g + of_query * i) // step % size


def _take_sinks_of_rows(problem: Problem, order: Callable[[int, Any], Any], rows: Rows) -> Result:
    """Take for each query the sink of another head."""
    heads = range(problem.lead[-1] if problem.lead else 1)
    every = [problem.read((*rows.at[:-1], h)[: len(rows.at)])["sinks"] for h in heads]
    sinks = np.ravel(every)[order(rows.at[-1] if rows.at else 0, rows.queries)]
    return pad_sum(attend(take_rows(problem.without("sinks"), rows)), sinks, sinks)
