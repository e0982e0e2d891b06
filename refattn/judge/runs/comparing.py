r"""Judge whether two outputs for one input are two runs of one right kernel: `same`.

Right kernels may sum in another order, cut keys elsewhere or run on another device. So two outputs
share the exact result and no rounding: where their errors are :math:`b + A \xi`, each sub-Gaussian
with covariance :math:`C` about an unknown point of a box (`verification.joint`), the difference is
sub-Gaussian with covariance :math:`C_A + C_B` about a point of the box that is the difference of
both, and below the sum of both bounds. The profiles are those by which each output passes alone.
The two verdicts and the tests between them share alpha.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...arrays import checks
from ...arrays.library import Doubles
from ...arrays.stored import mask_of_members
from ...arrays.threads import one_blas_thread
from ...arrays.words import with_known_keywords
from ...files.tensors import view_heads_first
from .. import stats
from ..mistakes.causes.places import list_rows
from ..rounding.covariance import distinct_columns
from ..rounding.formats import check_all_hold, dtype_of, widen
from ..rounding.problems import Index, Problem, pose_arrays
from ..rounding.profiles import Profile, check_hardware
from ..rounding.roundings import Roundings
from ..verification.choice import ProfileChoice, choose_profiles
from ..verification.door import check_alpha
from ..verification.empty_rows import EMPTY_ROWS, settle
from ..verification.evidence import log_chernoff
from ..verification.findings import Part, Worst
from ..verification.head_sums import row_weights
from ..verification.inputs import name_profiles, narrowest, read_inputs, unlimited
from ..verification.joint import box_rows, find_laws, find_wrong, list_tokens, name_wrong
from ..verification.judging import judge
from ..verification.looks import choose_blocks
from ..verification.reading import gather_parts
from ..verification.verdict import Verdict
from ..verification.z_scores import BEYOND, over_bound
from .matching import Match, match_rows
from .sameness import Same

_VERDICTS = 3  # on each output, and on what is between them
_NO_COLUMNS = np.zeros(0, np.int64)
_RowNumbers = npt.NDArray[np.int64]


class KernelRun(NamedTuple):
    """An output, the storage type of its kernel, and the profiles to try."""

    part: Part
    dtype: str
    profile: ProfileChoice = None

    def settle(self, verdict: Verdict) -> tuple[Part, Roundings]:
        """Read the inputs by the profile of a verdict, and look up what it rounds."""
        given = self.profile if isinstance(self.profile, Profile) else verdict.by
        (found,) = choose_profiles(self.dtype, self.part.numbers.out_dtype, given).values()
        if verdict.hardware is not None:
            found = found._replace(accumulator=verdict.hardware)
        read = self.part.problem.read_by(found)
        return self.part._replace(problem=read), found.roundings(self.dtype)


@with_known_keywords
def same(
    a: Any,
    b: Any,
    *,
    q: Any,
    k: Any,
    v: Any,
    dtype: Any = None,
    profile: str | Profile | None = None,
    alpha: float = 1e-6,
    bitwise: bool = False,
    scale: float | None = None,
    bias: Any = None,
    mask: Any = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | int | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    hardware: str | None = None,
    explain: bool = True,
    empty_rows: str = "zero",
    layout: str = "bhnd",
) -> Same:
    """Judge whether two outputs of softmax attention are two runs of one right kernel.

    Two runs may differ if the kernel cuts keys elsewhere, sums in another order, or runs on another
    device. They share the inputs and no rounding, so the variances of their errors add up.

    Parameters
    ----------
    a, b : arrays, shape (..., n, d_v)
        Outputs of one kernel for the same inputs. Of a batch that had more members pass the slice
        of those that both have.
    q, k, v : arrays, shapes (..., n, d), (..., m, d) and (..., m, d_v)
        The inputs.
    dtype, profile, hardware, explain, empty_rows, layout
        As in `verify`. Each output may have a profile of its own.
    alpha : float, default 1e-6
        Largest probability that two outputs of a right kernel fail.
    bitwise : bool, default False
        Whether no bit may differ.
    scale, bias, mask, causal, window, softcap, sinks
        As in `rounding.predict`.

    Returns
    -------
    Same
        PASS, FAIL or UNDERPOWERED, the rows that differ, and which output is wrong by itself.

    Raises
    ------
    TypeError, ValueError
        As in `verify`.

    Examples
    --------
    >>> import numpy as np
    >>> import refattn
    >>> q, k, v = (x[0, :1] for x in refattn.load_sample())
    >>> a = refattn.softmax_attention(q, k, v)
    >>> refattn.judge.same(a, a, q=q, k=k, v=v).equal
    True
    >>> b = a * np.where(np.arange(128) == 3, np.float32(1.001), 1)[:, None]
    >>> found = refattn.judge.same(a, b, q=q, k=k, v=v)
    >>> found.verdict, found.differing, found.wrong
    ('FAIL', 1, 'B')
    """
    checks.choice("layout", layout, ("bhnd", "bnhd"))
    checks.choice("empty_rows", empty_rows, EMPTY_ROWS)
    check_hardware("hardware", hardware)
    checks.flag("bitwise", bitwise)
    checks.flag("explain", explain)
    views = view_heads_first({"q": q, "k": k, "v": v, "a": a, "b": b}, layout)
    runs = []
    for name in ("a", "b"):
        results = {"out": views[name]}
        of_inputs = {x: views[x] for x in "qkv"}
        inputs = read_inputs(of_inputs, results, dtype, dict.fromkeys("qkv"))
        q, k, v = (inputs.numbers[x] for x in "qkv")
        seen = None if mask is None else mask_of_members(mask, q, k, v)
        options: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": sinks, "bias": bias}
        options |= {"mask": seen, "causal": causal, "window": unlimited(window)}
        problem = pose_arrays(q, k, v, **options)._replace(storage=inputs.storage)
        got, shape = widen(name, views[name]), (*problem.lead, problem.shape[0], problem.shape[2])
        if got.shape != shape:
            raise ValueError(
                f"`{name}` must have the shape of the result, {shape}, got {got.shape}."
            )
        for x, held in inputs.unchecked.items():
            check_all_hold(x, inputs.numbers[x], (), held)
        stored = narrowest(got, inputs.storage, dtype_of(views[name], name))
        types = {"out": inputs.types.get("out", stored)}
        declared = "out" in inputs.types
        parts = gather_parts(problem, {"out": got.__getitem__}, types, {}, declared)
        asked = profile, problem.kind, inputs.types, inputs.storage
        names = name_profiles(*asked, False, parts)
        runs.append(KernelRun(settle(parts, empty_rows)["out"], inputs.storage, names))
    return compare_runs((runs[0], runs[1]), check_alpha(alpha), bitwise, (False, hardware, explain))


@one_blas_thread()
@np.errstate(all="ignore")  # wrong numbers are of any size
def compare_runs(
    runs: tuple[KernelRun, KernelRun], alpha: float, bitwise: bool, asked: Sequence[Any]
) -> Same:
    """Compare the rows of two outputs that have equal inputs.

    `asked` has the last arguments of `judge`: whether all rows are tested, the hardware, and
    whether to search for causes.
    """
    a, b = (x.part for x in runs)
    match = match_rows(a, b)
    compared, differing = int(np.sum(match.partner >= 0)), int(np.sum(match.differs))
    if not compared:
        raise ValueError("A and B must have a row with equal inputs, got none.")
    equal = Same(
        "PASS",
        not differing,
        (),
        compared,
        differing,
        ", ".join(list_rows(a.problem, match.differs)),
        _name_added(a, b, match),
        bitwise=bitwise,
        alpha=alpha,
    )
    if equal.equal:
        return equal
    share = alpha / _VERDICTS
    alone = [judge(*x.part, x.dtype, x.profile, share, *asked) for x in runs]
    sides: Any = tuple(x.settle(y) for x, y in zip(runs, alone, strict=True))
    rows, p, worst = _test_between(_Pair(sides, match), share, asked[0])
    words = [x.verdict for x in alone]
    wrong = " and ".join(x for x, y in zip("AB", words, strict=True) if y == "FAIL")
    verdict = "UNDERPOWERED" if "UNDERPOWERED" in words else "PASS"
    return equal._replace(
        verdict="FAIL" if wrong or rows or p <= share or bitwise else verdict,
        rows=rows,
        wrong=wrong,
        worst=worst,
        p_value=min(1.0, _VERDICTS * p),
        a=alone[0],
        b=alone[1],
    )


class _Pair(NamedTuple):
    """Two outputs, with what their kernels round, and the rows that are compared."""

    sides: tuple[tuple[Part, Roundings], tuple[Part, Roundings]]
    match: Match

    def _split(
        self, index: Index, rows: _RowNumbers
    ) -> Iterator[tuple[_RowNumbers, Index, _RowNumbers]]:
        """Split rows of a head of A by the head of B that they are compared with."""
        of_a, of_b = (x.problem for x, _ in self.sides)
        heads, at = np.divmod(self.match.partner[of_a.number(index), rows], of_b.shape[0])
        for head in np.unique(heads).tolist():
            some = np.flatnonzero(heads == head)
            yield some, of_b.index_of(head), at[some]

    def measure(self, index: Index, rows: _RowNumbers) -> tuple[Doubles, ...]:
        """Return differences, the box of what is no evidence, standard deviations and bounds."""
        found = np.zeros((5, len(rows), self.sides[0][0].problem.shape[2]))
        for some, other, at in self._split(index, rows):
            laws, errors = [], []
            for (part, roundings), i, j in zip(
                self.sides, (index, other), (rows[some], at), strict=True
            ):
                laws.append(find_laws(part.problem, roundings, i, j, _NO_COLUMNS)[0])
                errors.append(laws[-1].errors(part.numbers.out(i)[j]))
            (low_a, high_a), (low_b, high_b) = (x.span_rounding() for x in laws)
            box = errors[0] - errors[1], low_a - high_b, high_a - low_b
            worst = np.hypot(laws[0].worst, laws[1].worst)
            found[:, some] = *box, worst, laws[0].bound + laws[1].bound
        return tuple(found)

    def test(self, index: Index, rows: _RowNumbers) -> tuple[Doubles, Doubles]:
        """Test rows by the law of all of their columns, as `find_wrong` asks."""
        squares, log_p = np.zeros(len(rows)), np.zeros(len(rows))
        (a, of_a), (b, of_b) = self.sides
        columns = distinct_columns(list_tokens(a.problem, index))
        for some, other, at in self._split(index, rows):
            one = box_rows(*a, of_a, index, rows[some], columns)
            squares[some], log_p[some] = one.less(box_rows(*b, of_b, other, at, columns)).test()
        return squares, log_p

    def show(self, index: Index, row: int, column: int, allowed: float) -> Worst:
        """Show an element of both."""
        (a, _), (b, _) = self.sides
        ((_, other, at),) = self._split(index, np.array([row]))
        x, y = float(a.numbers.out(index)[row, column]), b.numbers.out(other)[at[0], column]
        return Worst("out", (*index, row, column), x, float(y), allowed)


def _test_between(
    pair: _Pair, alpha: float, everything: bool
) -> tuple[tuple[tuple[Index, float], ...], float, Worst | None]:
    """Test the differences: list rows that are too far apart, and give the p-value of all tests."""
    (a, roundings), match = pair.sides[0], pair.match
    problem, tested = a.problem, _choose_rows(a.problem, match.differs, everything)
    squares, peaks, over = (np.zeros(tested.shape) for _ in range(3))
    count, most, worst = np.sum(match.partner >= 0), -1.0, None
    tries = math.sqrt(2 * math.log(2 * count * max(problem.shape[2], 1) / alpha))
    for head in np.flatnonzero(tested.any(-1)).tolist():
        index, rows = problem.index_of(head), np.flatnonzero(tested[head])
        errors, low, high, std, bound = pair.measure(index, rows)
        known = np.isfinite(std) & np.isfinite(errors)
        z = np.where(known, (errors - np.clip(errors, low, high)) / std, 0.0)
        squares[head, rows] = np.sum(z * z, -1) / np.maximum(np.sum(known, -1), 1)
        peaks[head, rows] = np.max(np.abs(z), -1, initial=0.0)
        over[head, rows] = np.max(over_bound(errors, bound), -1, initial=0.0)
        allowed = np.minimum(bound, np.maximum(-low, high) + tries * std)
        far = over_bound(errors, allowed)
        if np.max(far, initial=-1.0) > most:
            at, column = (int(x) for x in np.unravel_index(int(np.argmax(far)), far.shape))
            most = float(far[at, column])
            worst = pair.show(index, int(rows[at]), column, float(allowed[at, column]))
    # All rows that differ are tested by the law of all columns, as far as time allows.
    find = partial(find_wrong, problem, pair.test, squares, peaks, over > BEYOND, 1.0 * tested)
    wrong, _ = find(-math.inf)
    weights = row_weights(problem, roundings) * (match.partner >= 0)
    rows = np.sum(weights, -1)
    sums = np.sum(squares * weights, -1)
    of_all = float(log_chernoff(np.sum(sums) / max(np.sum(rows), 1e-300), np.sum(rows)))
    of_heads = log_chernoff(sums / np.where(rows > 0, rows, 1.0), rows)
    log_p = [of_all, float(np.min(of_heads)) + math.log(len(rows))]
    log_p += [x.log_p + math.log(count) for x in wrong[:1]]
    p = float(min(stats.holm([math.exp(max(min(x, 0.0), -700.0)) for x in log_p])))
    return name_wrong(find, int(count), alpha)[0], p, worst


def _choose_rows(problem: Problem, differs: npt.NDArray[np.bool_], everything: bool) -> Any:
    """Choose the rows that are tested: all that differ or, if these are many, a part of them."""
    looked = np.zeros_like(differs)
    for index, i in choose_blocks(problem, everything):
        looked[problem.number(index), i] = True
    return differs & looked if np.sum(differs) > np.sum(looked) else differs


def _name_added(a: Part, b: Part, match: Match) -> str:
    """Name the rows that only A or only B has."""
    alone = ("A", a, match.partner < 0), ("B", b, match.only_b)
    return " and ".join(
        f"{', '.join(list_rows(x.problem, y)) or 'all rows'} of {name}"
        for name, x, y in alone
        if y.any()
    )
