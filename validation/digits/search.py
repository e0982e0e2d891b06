"""Inputs on which a plain float64 evaluation of softmax attention loses most digits.

``python -m validation.digits.search`` climbs in each family and at each level of
`refattn.judge.vectors.hard`: it draws another seed or changes the width by one, and keeps
what makes the largest error larger. Errors are those of `plain`, to the results in pairs of
`refattn.certified`, whose proven bound must be far below them. Steps are drawn from a seed; what
they lead to depends on the last bits of sums, and so on the BLAS. The winners that are golden
vectors are `refattn.judge.vectors.hard.HARD_CASES`.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

try:
    import click
except ModuleNotFoundError as error:
    sys.stderr.write(f"search: error: {error}; needs `pip install 'refattn[validation]'`\n")
    sys.exit(2)

from refattn import certified
from refattn.arrays.tables import markdown
from refattn.judge.vectors import hard
from refattn.judge.vectors.hard import Hard

_Array = npt.NDArray[Any]

RELATIVE = ("output", "terms")
SEEDS = 4096
UNIT = 2.0**-53  # what one rounding may cost, relative
# Least and largest width by family: the sink keeps a weight that is not 1 to the last bit, and the
# keys that tie keep all of the weight.
WIDTHS = dict.fromkeys(hard.POWERS, (-2, 3)) | {"sink": (-2, 0), "tie": (0, 4)}
_PROVEN = 0.01  # largest share of an error that may be that of what it is compared with


class Lost(NamedTuple):
    """Digits lost: the decimal logarithm of the largest error, in units of one rounding."""

    output: float  # relative to the output
    terms: float  # relative to the sum of its absolute terms, sum |p v|
    median: float  # of the median error relative to the output


class Found(NamedTuple):
    """Where a climb began and ended, and what was lost there."""

    start: Hard
    first: Lost
    best: Hard
    last: Lost


def plain(q: _Array, k: _Array, v: _Array) -> _Array:
    """Evaluate the formula with NumPy, the largest logit subtracted.

    Examples
    --------
    >>> import numpy as np
    >>> from validation.digits.search import plain
    >>> plain(np.zeros((1, 1)), np.zeros((2, 1)), np.array([[1.0], [3.0]]))
    array([[2.]])
    """
    scores = q @ k.T * q.shape[-1] ** -0.5
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray(weights @ v / weights.sum(-1, keepdims=True))


def lost(case: Hard) -> Lost:
    """Digits that `plain` loses on a case.

    Raises
    ------
    ArithmeticError
        If what it is compared with is not proven to be much nearer.
    """
    q, k, v = (hard.recipe(case).inputs[name] for name in "qkv")
    exact = certified.softmax_attention(q, k, v)
    error = abs((plain(q, k, v) - exact.out.hi) - exact.out.lo)
    terms = certified.softmax_attention(q, k, abs(v)).out.hi
    by_output, by_terms = error / abs(exact.out.hi), error / terms
    if not np.max(exact.error / abs(exact.out.hi)) <= _PROVEN * np.max(by_output):
        raise ArithmeticError(f"{case.label}: the bound of the exact output is too large.")
    return Lost(*(_digits(x) for x in (np.max(by_output), np.max(by_terms), np.median(by_output))))


def _digits(error: Any) -> float:
    """Digits that are lost with a relative error."""
    return float(np.log10(max(float(error), UNIT * 1e-3) / UNIT))


def _judged(case: Hard) -> Lost:
    """Digits lost; of a case that cannot be judged fewer than of any other."""
    try:
        return lost(case)
    except ArithmeticError:
        return Lost(-np.inf, -np.inf, -np.inf)


def climb(start: Hard, *, steps: int = 200, relative: str = "output", seed: int = 0) -> Found:
    """Change seed or width, and keep what loses more; what cannot be judged is passed over.

    `steps` cases are tried, of the same family, level and sizes; `relative` says what of `Lost`.
    """
    rng = np.random.default_rng([seed, zlib.crc32(start.label.encode())])
    first = best = (start, _judged(start))
    low, high = WIDTHS[start.family]
    for _ in range(steps):
        case = best[0]
        if rng.random() < 0.25:
            width = case.width + int(rng.choice([-1, 1]))
            case = case._replace(width=min(max(width, low), high))
        else:
            case = case._replace(seed=int(rng.integers(SEEDS)))
        found = _judged(case)
        if getattr(found, relative) > getattr(best[1], relative):
            best = case, found
    return Found(*first, *best)


def starts() -> Iterator[Hard]:
    """Where climbs begin: each family and level, in two head sizes and two numbers of keys."""
    for family, powers in hard.POWERS.items():
        for level in range(1, len(powers) + 1):
            yield Hard(family, level, d=64 if level == 2 else 32, m=200 if level == 3 else 128)


@click.command()
@click.option("--family", type=click.Choice(tuple(hard.POWERS)), multiple=True)
@click.option("--steps", type=click.IntRange(min=0), default=200, show_default=True)
@click.option("--relative", type=click.Choice(RELATIVE), default="output", show_default=True)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
def main(family: tuple[str, ...], steps: int, relative: str, seed: int) -> None:
    """Search for the worst case of each family and level."""
    rows = []
    for start in starts():
        if start.family in (family or hard.POWERS):
            found = climb(start, steps=steps, relative=relative, seed=seed)
            last = (found.first.output, found.last.output, found.last.median, found.last.terms)
            rows.append([found.best.label, *(f"{x:.1f}" for x in last)])
    columns = ["case", "start: worst", "found: worst", "median", "of sum |p v|"]
    click.echo(markdown(columns, rows, [i == 0 for i in range(len(columns))]), nl=False)


if __name__ == "__main__":
    main(prog_name="python -m validation.digits.search")
