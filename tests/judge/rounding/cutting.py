"""Sums of products as matrix units cut them, step by step, and kernels that take them.

A unit adds a group of exact products to an accumulator: all are aligned to the largest of them and
cut towards zero a number of binary digits below its leading one, added without a rounding, and the
sum is cut towards zero.
"""

import numpy as np

from refattn.judge.rounding.formats import FORMATS
from tests.judge.rounding.rounded import f32, scores32


def binade(x):
    """The power of two below |x|; 0 for 0."""
    x = np.abs(np.asarray(x, np.float64))
    return np.where(x > 0, np.ldexp(1.0, np.frexp(x)[1] - 1), 0.0)


def cut(x, step):
    """Cut to a multiple of the step towards zero."""
    safe = np.where(step > 0, step, 1.0)
    return np.where(step > 0, np.trunc(x / safe) * safe, 0.0)


def add_group(total, terms, below, kept):
    """Add terms (..., kk) to an accumulator (...)."""
    every = np.concatenate([total[..., None], terms], -1)
    step = binade(np.max(np.abs(every), -1)) * 2.0**-below
    found = np.sum(cut(every, step[..., None]), -1)
    return cut(found, binade(found) * 2.0**-kept)


def product(x, y, unit, total=None):
    """x (rows, t) times y (t, columns), added to a sum (rows, columns) group by group."""
    if total is None:
        total = np.zeros((len(x), y.shape[1]))
    for at in range(0, len(y), unit.group):
        terms = x[:, None, at : at + unit.group] * y[at : at + unit.group].T
        total = add_group(total, terms, unit.aligned, unit.kept)
    return total


def split_product(x, y):
    """x times y in float32, in three products of TF32: of leading digits, and of those after."""
    to = FORMATS["tfloat32-truncated"].round
    (x1, x2), (y1, y2) = ((to(a), to(a - to(a))) for a in (x, y))
    return single(single(x1 @ y2 + x2 @ y1) + x1 @ y1)


def flash(case, dtype, unit, *, tile=64, out=None, weights=None):
    """Tiles of keys over the running maximum; the normaliser is in float32.

    Without a unit sums are exact.
    """
    to, s = FORMATS[weights or dtype], scores32(case)
    top = np.full((len(s), 1), -np.inf, f32)
    total, found = np.zeros_like(top), np.zeros((len(s), case.v.shape[1]))
    far, terms = np.zeros_like(found), 0  # sums in float32 of a unit that starts afresh
    for j in range(0, s.shape[1], tile):
        part, v = s[:, j : j + tile], case.v[j : j + tile]
        new = np.maximum(top, part.max(-1, keepdims=True))
        safe = np.where(np.isfinite(new), new, f32(0))
        w, shrink = np.exp(part - safe), np.exp(np.where(np.isfinite(top), top, safe) - safe)
        total = total * shrink + w.sum(-1, keepdims=True, dtype=f32)
        w, found, far, top = to.round(w), single(found * shrink), single(far * shrink), new
        if unit is not None and unit.split:
            found = single(found + split_product(w, v))
        else:
            found = found + w @ v if unit is None else product(w, v, unit, found)
        terms += tile
        if unit is not None and unit.run is not None and terms >= unit.run:
            far, found, terms = single(far + found), 0 * found, 0
    return FORMATS[out or dtype].round((far + found) / np.where(total > 0, total, f32(1)))


def backward(case, g, dtype, unit):
    """Output and gradients, of queries that see a key; weights are computed again, and rounded."""
    to, s, factor = FORMATS[dtype], scores32(case), f32(case.factor)
    top = np.max(s, -1, keepdims=True)
    p = np.exp(s - (top + np.log(np.exp(s - top).sum(-1, keepdims=True, dtype=f32))))
    out = flash(case, dtype, unit)
    delta = (g * out).sum(-1, keepdims=True).astype(f32)
    ds, p = to.round(p * ((g @ case.v.T).astype(f32) - delta)), to.round(p)
    sums = {"dq": (ds, case.k), "dk": (ds.T, case.q), "dv": (p.T, g)}
    found = {x: single(product(*of, unit)) * (1 if x == "dv" else factor) for x, of in sums.items()}
    return {"out": out} | {x: to.round(y) for x, y in found.items()}


def split_backward(case, g):
    """Output and gradients in float32, of products that are split."""
    s = single(split_product(case.q, case.k.T) * case.factor)
    w = single(np.exp(s - np.max(s, -1, keepdims=True)))
    p = single(w / single(np.sum(w, -1, keepdims=True)))
    out = split_product(p, case.v)
    apart = single(split_product(g, case.v.T) - single(np.sum(g * out, -1, keepdims=True)))
    ds, factor = single(p * apart), case.factor
    found = {"dq": factor * split_product(ds, case.k), "dk": factor * split_product(ds.T, case.q)}
    return {"out": out, "dv": split_product(p.T, g)} | {x: single(y) for x, y in found.items()}


def single(x):
    return x.astype(f32).astype(np.float64)
