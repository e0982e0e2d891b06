"""The law of a row by the tape: what each step of a text may be off by, and where that leads."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ....arrays.library import Doubles
from ....numbers.tape import Traced, given, pull_to_steps
from ..formats import Format
from ..roundings import (
    BIAS,
    RMS,
    WORST,
    Roundings,
    RowErrors,
    is_power_of_two,
    round_bound,
    walk,
)

_WALKS = ("matmul", "sum", "mean")
_ELEMENTARY = ("exp", "log")
_INEXACT = (*_WALKS, *_ELEMENTARY, "add", "subtract", "multiply", "divide", "given")
_HIGHER = {True: 16.0, False: 1 + 2.0**-6}  # higher orders of a bound, if steps are narrow or not


class RowLaw(NamedTuple):
    """What is derived of a row: arrays (d_v,), and a covariance (d_v, d_v)."""

    out: Doubles
    covariance: Doubles
    bound: Doubles
    slack: Doubles  # what errors of exponentials and logarithms may have in common


def derive(text: Callable[..., Traced], arrays: Any, roundings: Roundings, tied: bool) -> RowLaw:
    """Derive the law of a row, (d_v,), which a text computes of arrays by name.

    Equal numbers of a step have equal errors if `tied`, or errors of their own: both are allowed.
    """
    columns = arrays["v"].shape[-1]
    copies = {x: given(np.broadcast_to(y, (columns, *y.shape))) for x, y in arrays.items()}
    out = text(**copies)
    # Copies of all arrays, one a column: one sweep back has the derivatives of all columns.
    sweep = pull_to_steps(out, np.eye(columns).reshape(out.shape))
    narrow, operands = roundings.scores, roundings.weights
    found = RowLaw(out.x[0].ravel(), *np.zeros((1, columns, columns)), *np.zeros((2, columns)))
    for step, slope in sweep.items():
        if step.name not in _INEXACT:
            continue
        of_step: Any = step.x
        variance, most, common = _round_step(step, roundings, tied)
        if narrow is not None and step.name != "given":
            variance, most = _round_to(of_step[0], variance, most, narrow)
        _add_errors(found, slope, of_step[0], (variance, most, common), tied)
        if step.name == "matmul" and narrow is None and operands is not None:
            for arg, through in zip(step.args, step.pull(slope), strict=True):  # type: ignore[misc]
                if through is not None:
                    x = np.asarray(arg.x)[0]
                    _add_errors(found, through, x, (*_round_to(x, 0.0, 0.0, operands), 0.0), tied)
    return found


def _add_errors(found: RowLaw, slope: Any, x: Any, errors: Any, tied: bool) -> None:
    """Add the errors of a step, or of what it reads, to those of a row."""
    slope, x = np.where(np.isfinite(slope), slope, 0.0).reshape(len(slope), -1), np.ravel(x)
    variance, most, common = (
        np.where(np.isfinite(x), np.broadcast_to(np.ravel(y), x.shape), 0.0) for y in errors
    )
    found.covariance[:] += (slope * variance) @ slope.T
    found.bound[:] += np.abs(slope) @ most
    found.slack[:] += np.abs(slope) @ common
    if tied and x.size > 1:
        order = np.argsort(x, kind="stable")
        starts = np.flatnonzero(np.diff(x[order], prepend=math.nan))
        several = np.diff(starts, append=x.size) > 1
        together = np.add.reduceat(slope[:, order], starts, 1)[:, several]
        found.covariance[:] += (together * variance[order][starts][several]) @ together.T


def _round_to(x: Doubles, variance: Any, most: Any, to: Format) -> tuple[Any, Any]:
    """Round what a step gave; a number of the type stays as it is."""
    step = to.spacing(x)
    return variance + np.where(to.round(x) == x, 0.0, step * step / 12), most + step / 2


def _round_step(step: Any, roundings: Roundings, tied: bool) -> tuple[Any, Any, Any]:
    """Return variance and bound of what a step is off by, and what such errors have in common."""
    x, to = step.x[0], roundings.accumulate
    u, size, common = to.unit, np.abs(step.x[0]), 0.0
    if step.name in _WALKS:
        squares, sizes, count, equal = _list_terms(step, tied)
        count = np.maximum(count, 1)
        share, divided = (1 / count, 1.0) if step.name == "mean" else (1.0, 0.0)
        sums = walk(0.0, x / share, squares, count, 1) + squares * (step.name == "matmul")
        sums = np.where(count > 1, equal * sums, 0.0) * share**2
        variance = (RMS * u) ** 2 * (sums + divided * x * x)
        return variance, u * (count + 1) * sizes * share, common
    if step.name in _ELEMENTARY:  # absolute errors of logarithms, relative ones of exponentials
        of, exact = (size, 1.0) if step.name == "exp" else (1.0, 0.0)  # e^0 and log 1
        off = roundings.exp * u * of * (x != exact)
        return np.square(off / 2) + np.square(RMS * u * size), off + u * size, BIAS * off
    by = [y.x for y in step.args if np.size(y.x[:1] if y.moves else y.x) == 1]
    if step.name in ("multiply", "divide") and any(is_power_of_two(np.ravel(y)[0]) for y in by):
        return 0.0, 0.0, common
    # A number of the type is not rounded: products of narrow numbers.
    variance = np.where(to.round(x) == x, 0.0, np.square(RMS * u * x))
    return variance, u * size, common


def _list_terms(step: Any, tied: bool) -> tuple[Any, Any, Any, Any]:
    """Return squares, sizes and counts of the terms of sums, and how many are equal at most.

    Terms of 0 round nothing. Equal terms that are added in turn have equal errors: by Cauchy and
    Schwarz the variance of their sum is at most so many times that of independent errors.
    """
    if step.name == "matmul":
        a, b = (y.x[0] if y.moves else y.x for y in step.args)  # constants have no copies
        equal = _count_equal(a)[..., None] if tied else 1.0
        return np.square(a) @ np.square(b), np.abs(a) @ np.abs(b), (a != 0) * 1.0 @ (b != 0), equal
    terms, kept = step.args[0].x[0], step.args[0].x.ndim == step.x.ndim
    # Texts sum along the last axis, or keep the one that they sum along.
    along = [i for i, n in enumerate(step.x.shape[1:]) if n < terms.shape[i]] if kept else [-1]
    if not along:  # sums of one term
        return terms**2, np.abs(terms), 1.0, 1.0
    terms = np.moveaxis(terms, along[0], -1)
    sums = (*(np.sum(y, -1) for y in (terms**2, np.abs(terms), terms != 0)), _count_equal(terms))
    squares, sizes, count, equal = (np.expand_dims(y, along[0]) if kept else y for y in sums)
    return squares, sizes, count, equal


def _count_equal(x: Doubles) -> Doubles:
    """Count how often the commonest number but 0 is among those along the last axis."""
    x, most = np.sort(x, -1), np.ones(x.shape[:-1])
    for more in range(1, x.shape[-1]):
        same = np.any((x[..., more:] == x[..., :-more]) & (x[..., more:] != 0), -1)
        if not same.any():
            break
        most += same
    return most


def write_rows(laws: list[RowLaw], roundings: Roundings) -> tuple[RowErrors, Doubles]:
    """Add the last rounding, and return what is known of rows with their covariances before it."""
    out, covariance, bound, slack = (np.stack(x) for x in zip(*laws, strict=True))
    std = np.sqrt(np.diagonal(covariance, axis1=1, axis2=2))
    near, spacing, worst = out, np.zeros_like(out), WORST * std
    bound = bound * _HIGHER[roundings.scores is not None or roundings.weights is not None]
    if roundings.out is not None:
        spacing, near = roundings.out.spacing(out), roundings.out.round(out)
        std, worst = (np.sqrt(y * y + spacing * spacing / 12) for y in (std, worst))
    bound = round_bound(roundings.out, out, bound)
    std, worst = (np.where(std > 0, y, math.inf) for y in (std, worst))
    none = np.zeros(len(out))
    known: Any = out, none, none, near, std, worst, bound, none, none, none, spacing, slack, {}
    return RowErrors(*known), covariance
