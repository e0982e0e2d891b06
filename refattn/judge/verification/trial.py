"""Test numbers against one profile: all tests of `verify`, and the known bugs they point to."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...arrays.library import Doubles
from ...arrays.words import name_element, name_row
from .. import stats
from ..rounding.backward import list_directions
from ..rounding.covariance import bound_covariance, variance_along
from ..rounding.problems import Index, Problem, sweep
from ..rounding.profiles import Profile
from ..rounding.roundings import WORST, Roundings, RowErrors
from .directions import (
    PLAIN_DIRECTIONS,
    SCORE_CHANGES,
    bound_along,
    explain_size,
    give_error,
    list_changes,
    sum_factor,
)
from .evidence import (
    Estimate,
    Evidence,
    Known,
    is_doubtful,
    log_chernoff,
    log_quadratic,
)
from .findings import (
    ONLY_IN,
    Find,
    Finding,
    Numbers,
    ProfileTrial,
    Suspect,
    WrongRow,
    Z,
    name_factor,
    name_heads,
)
from .head_sums import ONE_PERCENT, HeadSums
from .joint import bound_factor, find_wrong, knows_columns, test_rows
from .looks import Look, choose_loud
from .z_scores import BEYOND

_OF_HEAD = " of a head"
_SMALLEST_TILE = 16
_LOUD_SIZES, _LOUD_TILES = (16, 64), 2  # of tiles, of which so many of each are tried again
_MOST_OF_A_WEIGHT = 1.5  # more than that is no missing key
_NEEDS_NO_OTHER = -100.0  # log of a p-value beside which no other test counts
_AS_MUCH = 0.1  # of the error: what explains so little less is preferred if it is plainer
_LEFT_IN_FEW = 4.0  # mean square of z, at most
_SAME_SIZE = 3.0  # standard errors, within which two sizes are the same
_WORST_ARE_LARGER = 0.05  # of a size, by which it may be another in rows that were the worst
_LOUD = 1.2  # mean square of z from which on
_FACTOR_SIZES = (1, 4, 16, 64)  # of tiles whose factors are tried again, likewise
_LOUD_FACTOR = 4.0  # standard deviations, if columns were independent, from which on


def begin_sums(
    problem: Problem, dtype: str, profile: Profile, numbers: Numbers, weights: Doubles
) -> HeadSums:
    """Begin to add up errors along all known defects, with weights of rows by `row_weights`."""
    names = ["factor", "truncated"]
    if problem.gradient is not None:
        has_cap = problem.softcap is not None
        names += list_directions(problem.gradient.of, has_cap, problem.has_sinks)
    if problem.is_mean:
        edges = ["edge+1", "edge-1"] * problem.causal
        names = [*list_changes(problem), *names, "epsilon", "sink", *edges]
    if numbers.lse is not None:
        names.append("lse")
    rows_apart = problem.rows_apart(profile.roundings(dtype))
    return HeadSums(problem, names, numbers, weights, rows_apart)


def attempt(
    problem: Problem,
    dtype: str,
    profile: Profile,
    name: str,
    numbers: Numbers,
    alpha: float,
    look: Look,
) -> ProfileTrial:
    """Try whether the numbers can be those of a correct kernel of a profile.

    The weights are those of `row_weights`, for queries, keys and values as the profile reads them.
    """
    errors = look.sums or begin_sums(problem, dtype, profile, numbers, look.weights)
    changes = list_changes(problem) if problem.is_mean else {}
    if look.sums is None:  # all directions on some blocks, and on the rest those that cost little
        full = problem if look.full is None else problem._replace(blocks=look.full)
        sweep(full, dtype, profile, errors.add, changes, look.exact)
    if look.rest:
        few = {x: f for x, f in changes.items() if x in PLAIN_DIRECTIONS}
        rest = problem._replace(blocks=look.rest)
        sweep(rest, dtype, profile, errors.add_few, few, look.exact)
    roundings, rows_apart = profile.roundings(dtype), errors.rows_apart
    squares, count = errors.square, errors.rows
    if not rows_apart:  # rows of a head are one witness, as they share roundings
        errors.merge_rows()
    if problem.derived is not None:
        errors.add_laws({"factor": bound_factor(problem.read_by(profile), numbers, roundings)})
    elements = float(errors.elements)
    raw = [*_test_bound(errors), *_test_sizes(errors, elements)]
    raw += _test_lse(errors) if numbers.lse is not None else []
    read, directions = problem.read_by(profile), list[_Outcome]()

    def needs(enough: float) -> bool:
        """Tell whether no p-value is so small yet that other tests do not count."""
        return all(x.log_p >= enough for x in (*raw, *directions))

    if errors.along:
        directions += _test_gradients(errors, read, roundings)
    else:
        directions += _test_directions(errors)
        if needs(max(_NEEDS_NO_OTHER, look.enough)) and (doubtful := _list_doubtful(errors)):
            errors.add_laws(bound_along(problem, numbers, dtype, profile, doubtful))
            directions = list(_test_directions(errors))
    if problem.is_mean:
        directions += [*_test_keys(errors), *_test_tiles(errors)]
        if look.full != () or needs(look.enough):  # which say, in a longer look, what is wrong
            directions += _test_loud_factors(errors, read, roundings)
        if needs(look.enough):
            raw += _test_loud_tiles(errors, read, roundings)
    about = read, partial(test_rows, read, numbers, roundings), squares, errors.peak
    of_rows = partial(find_wrong, *about, errors.over > BEYOND, errors.hidden)
    find: Find = cache(partial(of_rows, of_lse=errors.lse_squares))
    if knows_columns(problem) and needs(max(_NEEDS_NO_OTHER, look.enough)):
        raw += _test_rows(find(-math.inf)[0], count)
    # All tests of a profile share alpha. A p-value of e^-700 is as good as 0, and not 0 in float64.
    adjusted = stats.holm([math.exp(max(x.log_p, -700.0)) for x in (*raw, *directions)])
    outcomes = sorted(zip((*raw, *directions), adjusted, strict=True), key=lambda x: x[0].log_p)
    tests = [
        Finding(x.name, math.exp(max(x.log_p, -700.0)), float(p), x.statistic, x.where)
        for x, p in outcomes
    ]
    # A direction is suspected if it is tested against, or if it explains much of what failed.
    suspects = [
        Suspect(
            *(x.name, x.value, x.error, float(p), x.explained / max(errors.weighted, 1e-300)),
            x.where + name_factor(problem, 1 + x.value, x.error) * (x.name == "factor"),
        )
        for x, p in zip(directions, adjusted[len(raw) :], strict=True)
        if p <= alpha or (min(adjusted) <= alpha and x.explained > errors.weighted / 4)
    ]
    suspects = _keep_telling(suspects)
    rms = math.sqrt(errors.plain / elements) if elements else 0.0
    # From here on, what would have been seen: 2 e^(-t^2 / 2) is alpha / (count of tests) at t.
    threshold = math.sqrt(2 * math.log(2 * len(tests) / alpha))
    usable = float(np.sum(errors.weights * (errors.counted > 0)))
    # A defect of size x adds x G to T, whose standard deviation is about sqrt(G). By Cauchy sum T
    # over sqrt(sum T^2) is at most the root of the number of rows: few rows reject no size at all.
    detectable = {
        x: float((threshold * np.sqrt(np.sum(sums.size)) + np.sum(sums.slack)) / np.sum(sums.size))
        for x, sums in errors.sums.items()
        if np.sum(sums.size) > 0 and usable > 2 * threshold**2 and not errors.along
    }
    heads = len(errors.weights)
    if "factor" in detectable and heads > 1 and usable > 2 * heads * threshold**2:
        of_factor = errors.sums["factor"]
        g, slack = (float(np.median(np.sum(x, -1))) for x in (of_factor.size, of_factor.slack))
        detectable["head"] = (threshold * math.sqrt(g) + slack) / g if g > 0 else math.inf
    for x, of_heads in errors.known.items():
        law = of_heads.over(0)
        if law.g > 0:
            size = float((threshold * math.sqrt(law.variance) + law.slack) / law.g)
            detectable[x] = min(size, detectable.get(x, math.inf))
    if "lse" in detectable and rows_apart:
        of_lse, some = errors.sums["lse"], errors.sums["lse"].size > 0
        far = WORST * math.sqrt(2 * math.log(8 * max(count, 1) * len(tests) / alpha))  # 4 of a row
        off = (of_lse.slack[some] / of_lse.size[some], far / np.sqrt(of_lse.size[some]))
        detectable["lse of a row"] = float(np.median(np.add(*off)))
    # An output that is 1 % too large is seen by its mean square, or along the factor.
    square = errors.strength / max(elements, 1.0)
    powered = bool(log_chernoff(square, usable) <= math.log(alpha / len(tests)))
    powered = powered or detectable.get("factor", 1.0) <= ONE_PERCENT
    known = elements / max(float(np.sum(errors.looked)) * problem.shape[2], 1)
    # The test of the largest z is corrected for all elements, too.
    far = math.sqrt(2 * math.log(2 * len(tests) * max(elements, 1.0) / alpha))
    element = errors.widest * far + errors.furthest
    z = Z(rms, *errors.farthest)
    found = tuple(problem.items())
    loud = choose_loud(found, errors.square, problem) if look.rest else ()
    sizes = known, detectable, powered
    return ProfileTrial(name, tests, suspects, z, *sizes, find, element, loud, errors.idle)


def passes(errors: HeadSums, alpha: float) -> bool:
    """Tell whether nothing that is tried of sizes and of some directions is rejected."""
    tried = *_test_bound(errors), *_test_sizes(errors, errors.elements), *_test_directions(errors)
    return bool(min(stats.holm([math.exp(max(x.log_p, -700.0)) for x in tried])) > alpha)


def _keep_telling(suspects: list[Suspect]) -> list[Suspect]:
    """Keep the suspects that explain most; name one head if it explains more than all together."""
    telling: dict[str, Suspect] = {}
    for suspect in sorted(suspects, key=lambda x: -x.explained):
        telling.setdefault(suspect.name.removesuffix(_OF_HEAD), suspect)
    most = max((x.explained for x in telling.values()), default=0.0)
    return [x for x in telling.values() if x.explained >= most / 2]


def choose_suspects(whole: ProfileTrial, few: ProfileTrial, where: str) -> list[Suspect]:
    """Choose between what is measured in all rows and in the few that are wrong.

    In all rows, or those of a head, it is surer, if it is the same. In few it must leave nothing
    but roundings, and the text says where they are.
    """
    # A place among few rows says nothing, and a part of one key of many is near to any of them.
    some = [x for x in few.suspects if " of " not in x.name and (x.name != "key" or _is_whole(x))]
    some = [x for x in some if (1 - x.explained) * few.z.rms**2 < _LEFT_IN_FEW]
    same = [x for x in whole.suspects if any(_are_as_large(x, y) for y in some)]
    some = [x._replace(text=f"{x.text}{ONLY_IN}{where}") for x in some]
    most = max((x.explained for x in some), default=0.0) - _AS_MUCH
    plain = [x for x in some if x.name in ("factor", "scale") and x.explained >= most]
    return same or plain[:1] or some or [x for x in whole.suspects if _may_be_of_few(x, whole)]


def _may_be_of_few(x: Suspect, whole: ProfileTrial) -> bool:
    """Tell whether what all rows say may be a defect of few: a factor leaves roundings alone."""
    if x.name in ("key", "key" + _OF_HEAD):
        return _is_whole(x)
    return not x.name.startswith("factor") or (1 - x.explained) * whole.z.rms**2 < _LEFT_IN_FEW


def _is_whole(x: Suspect) -> bool:
    return abs(abs(x.estimate) - 1) <= _SAME_SIZE * x.error


def _are_as_large(x: Suspect, y: Suspect) -> bool:
    apart = abs(x.estimate - y.estimate)
    error = max(x.error, y.error, _WORST_ARE_LARGER / _SAME_SIZE * abs(x.estimate))
    return x.name.removesuffix(_OF_HEAD) == y.name and apart <= _SAME_SIZE * error


class _Outcome(NamedTuple):
    """A test before the correction for many."""

    name: str
    log_p: float
    statistic: float
    where: str
    value: float = 0.0
    error: float = 0.0
    explained: float = 0.0


def _test_bound(errors: HeadSums) -> Iterator[_Outcome]:
    ratio, where = errors.beyond
    log_p = -math.inf if ratio > BEYOND else 0.0  # it is proven: no correct kernel exceeds it
    yield _Outcome("bound", log_p, ratio, _name_where(where))


def _name_where(where: Index) -> str:
    return f"at {name_element(where)}" if where else ""


def _test_lse(errors: HeadSums) -> Iterator[_Outcome]:
    log_p = -math.inf if errors.lse_beyond > BEYOND else 0.0
    yield _Outcome("bound of lse", log_p, errors.lse_beyond, "")
    if errors.lse_rows:
        mean = errors.lse_square / errors.lse_rows
        yield _Outcome(
            "mean square of lse", float(log_chernoff(mean, errors.lse_rows)), mean, "all rows"
        )


def _test_sizes(errors: HeadSums, elements: float) -> Iterator[_Outcome]:
    """Test the largest |z|, and mean squares: of all, of heads, of tiles of rows and of columns."""
    if not elements:
        return
    # Each |z| exceeds t with probability 2 e^(-t^2 / 2): corrected for all elements.
    z, where = errors.largest
    yield _Outcome(
        "largest z",
        _correct_for_tries(math.log(2) - z * z / 2, elements),
        z,
        _name_where(where),
    )
    # Rows are independent, but their columns are not: a row counts once, by the mean over these.
    n = errors.square.shape[1]
    used = errors.counted > 0
    weights = errors.weights * used
    rows, total = np.sum(weights), np.sum(errors.square * weights)
    yield _Outcome(
        "mean square", float(log_chernoff(total / rows, rows)), float(total / rows), "all rows"
    )
    for size in _tile_sizes(n):
        cut = np.arange(0, n, size)
        counts = np.add.reduceat(weights, cut, axis=1)
        means = np.add.reduceat(errors.square * weights, cut, axis=1)
        means = means / np.where(counts > 0, counts, 1.0)
        log_p = log_chernoff(means, counts)
        head, tile = (int(x) for x in np.unravel_index(int(np.argmin(log_p)), log_p.shape))
        name, words = "mean square of heads", _name_head(errors.problem, head) or "all rows"
        if size < n:
            name = f"mean square of tiles of {size}"
            words = _name_tile(errors.problem, head, tile * size, min(n, (tile + 1) * size))
        # The least likely tile was chosen among all of its size.
        chance = _correct_for_tries(float(log_p[head, tile]), log_p.size)
        yield _Outcome(name, chance, float(means[head, tile]), words)
    means = errors.column / np.where(errors.column_rows > 0, errors.column_rows, 1.0)
    log_p = log_chernoff(means, errors.column_rows)
    column = int(np.argmin(log_p))
    yield _Outcome(
        "mean square of columns",
        _correct_for_tries(float(log_p[column]), log_p.size),
        float(means[column]),
        f"column {column}",
    )


def _test_rows(wrong: Sequence[WrongRow], count: int) -> Iterator[_Outcome]:
    """Test the row that is the least likely of so many."""
    if wrong:
        log_p = _correct_for_tries(wrong[0].log_p, count)
        yield _Outcome("row", log_p, wrong[0].square, name_row(wrong[0].at))


def _test_loud_tiles(
    errors: HeadSums, problem: Problem, roundings: Roundings
) -> Iterator[_Outcome]:
    """Test small tiles again whose mean squares are large, by how columns depend on each other.

    The law of each is found only there, but all of them are corrected for.
    """
    if not errors.square.size:
        return
    # The joint law of a row: its columns are many witnesses, once their covariance is known. That
    # costs d_v^2 for each weight, so only the tiles with the largest mean squares are tried. All
    # columns of a row must be known, and no other row be rounded alike.
    whole = (errors.counted == problem.shape[2]) & (errors.weights == 1)
    tried: list[_Outcome] = []
    count = 0
    for size in _LOUD_SIZES:
        squares = _cut_tiles(errors.square * whole, size)
        full = np.sum(_cut_tiles(1.0 * whole, size), -1) == size
        means = np.where(full, np.mean(squares, -1), 0.0)
        count += int(np.sum(full))
        for head, i, rows in _analyse_loudest(problem, roundings, means, size, _LOUD):
            covariance = bound_covariance(problem.head(problem.index_of(head)), roundings, i, rows)
            # The covariance of z = e / worst; its eigenvalues are the variances in sum z^2.
            covariance /= rows.worst[:, :, None] * rows.worst[:, None, :]
            mean = float(means[head, i.start // size])
            total = mean * size * problem.shape[2]
            log_p = log_quadratic(total, np.asarray(np.linalg.eigvalsh(covariance)))
            words = _name_tile(problem, head, i.start, i.stop)
            tried.append(_Outcome("sum of squares of a tile", log_p, mean, words))
    if tried:
        best = min(tried, key=lambda x: x.log_p)
        yield best._replace(log_p=_correct_for_tries(best.log_p, count))


def _analyse_loudest(
    problem: Problem, roundings: Roundings, scores: Doubles, size: int, least: float
) -> Iterator[tuple[int, slice, RowErrors]]:
    """Find the laws of the tiles with the largest scores (heads, tiles), if these are so large."""
    for at in np.argsort(-scores, axis=None)[:_LOUD_TILES].tolist():
        head, tile = (int(x) for x in np.unravel_index(at, scores.shape))
        i = slice(tile * size, min(problem.shape[0], (tile + 1) * size))
        if scores[head, tile] >= least:
            # Errors of a scale are the same for all: a part of the slack, where they are known.
            change = {"scale": SCORE_CHANGES["scale"]}
            rows = problem.analyse(problem.index_of(head), roundings, i, change)
            if np.all(np.isfinite(rows.worst)):  # a large block of rows may have a law, and not i
                yield head, i, rows


def _tile_sizes(n: int) -> Iterator[int]:
    """List sizes of tiles: all rows of a head, and smaller powers of two."""
    yield n
    size = _SMALLEST_TILE
    while size < n:  # powers of 2, as kernels have tiles
        yield size
        size *= 2


def _test_directions(errors: HeadSums) -> Iterator[_Outcome]:
    for name, sums in errors.sums.items():
        rows = Evidence.of(*sums, errors.weights)
        sentence = explain_size(errors.problem, name)
        yield from _test_direction(errors, name, rows, sentence, errors.known.get(name))


def _list_doubtful(errors: HeadSums) -> list[str]:
    """Name the plain directions of which the law is wanted, of all heads or of one."""
    if not errors.problem.is_mean:
        return []
    plain = {x: y for x, y in errors.sums.items() if x in PLAIN_DIRECTIONS}
    scaled = {x: (errors.weights * y.errors, errors.weights * y.size) for x, y in plain.items()}
    return [
        x for x, of in scaled.items() if is_doubtful(*map(np.ravel, of)) or np.any(is_doubtful(*of))
    ]


def _test_gradients(errors: HeadSums, problem: Problem, roundings: Roundings) -> Iterator[_Outcome]:
    """Test directions whose sums have a known variance, over all heads and in the surest."""
    gradient, names = problem.gradient, [*errors.along]
    assert gradient is not None
    # What an element has alone, and what one query does to all keys: they are independent.
    variances = np.array([np.sum(errors.alone[x], -1) for x in names])
    for number in np.flatnonzero(errors.looked):
        saved = gradient.saved(problem.index_of(number), roundings)
        along = np.stack([errors.along[x][number] for x in names])
        with np.errstate(all="ignore"):
            variances[:, number] += variance_along(saved, roundings, gradient.of, along)
    for name, variance in zip(names, variances, strict=True):
        # One sum a head, as its rows depend on each other, at the least favourable digits.
        sums = (*(x[:, 0] for x in errors.sums[name]), WORST**2 * variance)
        rows = Known(*(errors.weights[:, 0] * x for x in sums))
        errors.known[name] = rows
        yield from _test_direction(errors, name, rows, explain_size(errors.problem, name))


def _test_tiles(errors: HeadSums) -> Iterator[_Outcome]:
    """Test the tile of queries of one head in which a factor on the output explains most."""
    sums, (heads, n) = errors.sums["factor"], errors.square.shape
    tried: list[_Outcome] = []
    count = 0
    for size in _tile_sizes(n):
        if size == n or not heads:
            continue
        t, u, g, slack, weights = (_cut_tiles(x, size) for x in (*sums, errors.weights))
        (head, tile), most, explained, tiles = _find_most(Evidence.of(t, u, g, slack, weights))
        count += tiles
        size_of = explain_size(errors.problem, "factor")(most.value, most.error)
        where = _name_tile(errors.problem, head, tile * size, min(n, (tile + 1) * size))
        test = most.log_p, most.statistic, f"{size_of}, {where}", most.value, most.error
        tried.append(_Outcome("factor of a tile", *test, explained))
    if tried:
        best = max(tried, key=lambda x: x.explained)
        yield best._replace(log_p=_correct_for_tries(best.log_p, count))


def _test_loud_factors(
    errors: HeadSums, problem: Problem, roundings: Roundings
) -> Iterator[_Outcome]:
    """Test a factor on few rows again where it explains most, by the variance of their sum."""
    # Signs of few rows are no evidence, however large their errors are: their variances are.
    sums, n = errors.sums["factor"], errors.square.shape[1]
    whole = (errors.counted == problem.shape[2]) & (errors.weights == 1)
    tried: list[_Outcome] = []
    count = 0
    for size in (x for x in _FACTOR_SIZES if x < max(n, 2)):
        t, g, full = (np.sum(_cut_tiles(x * whole, size), -1) for x in (sums.errors, sums.size, 1))
        z = np.where(full > 0, np.abs(t) / np.sqrt(np.where(g > 0, g, math.inf)), 0.0)
        count += int(np.sum(full > 0))
        for head, i, rows in _analyse_loudest(problem, roundings, z, size, _LOUD_FACTOR):
            if not np.all(whole[head, i]):
                continue
            index = problem.index_of(head)
            known = sum_factor(problem, index, i, rows, errors.numbers, roundings)
            value, error, log_p, statistic = map(float, known.test())
            words = explain_size(problem, "factor")(value, error)
            words += f", {_name_tile(problem, head, i.start, i.stop)}"
            found = log_p, statistic, words, value, error, float(np.square(value) * known.g)
            tried.append(_Outcome("factor of few rows", *found))
    if tried:
        best = min(tried, key=lambda x: x.log_p)
        yield best._replace(log_p=_correct_for_tries(best.log_p, count))


def _cut_tiles(x: Doubles, size: int) -> Doubles:
    """Cut rows (heads, n) into tiles (heads, tiles, size), with zeros at the end."""
    heads, n = x.shape
    return np.pad(x, ((0, 0), (0, -n % size))).reshape(heads, -(-n // size), size)


def _test_direction(
    errors: HeadSums,
    name: str,
    rows: Evidence | Known,
    sentence: Callable[[float, float], str],
    known: Known | None = None,
) -> Iterator[_Outcome]:
    """Test a direction over all heads and, if there are several, in the head where it is surest."""
    for of_head in (False, True)[: 1 + (len(rows.g) > 1)]:
        total = rows if of_head else rows.over(0)
        tried = total.test()
        if known is not None:
            tried = (known if of_head else known.over(0)).add_to(tried)
        log_p = np.atleast_1d(tried.log_p)
        at = int(np.argmin(log_p))
        heads, value, error, size = _pool_heads(tried, total.g, at)
        where = f", {name_heads(errors.problem, heads)}" if of_head else ""
        yield _Outcome(
            name + (_OF_HEAD if of_head else ""),
            _correct_for_tries(float(log_p[at]), log_p.size),
            float(np.atleast_1d(tried.statistic)[at]),
            sentence(value, error) + where if error < math.inf else "cannot be estimated",
            value,
            error,
            value * value * size,
        )


def _pool_heads(
    tried: Estimate, sizes: Any, at: int
) -> tuple[npt.NDArray[np.int64], float, float, float]:
    """Put heads together in which a defect is as large as in one of them, if not in all.

    Return them, with the size, its standard error and the square of the direction.
    """
    value, error, g = (np.atleast_1d(x) for x in (tried.value, tried.error, sizes))
    one = np.arange(len(g)) == at
    same = np.abs(value - value[at]) <= _SAME_SIZE * np.hypot(error, error[at])
    alike = same & (np.abs(value) > _SAME_SIZE * error) | one
    alike = one if alike.all() else alike
    total = float(np.sum(g[alike]))
    size = float(np.sum((value * g)[alike])) / total if total else float(value[at])
    of_size = math.hypot(*(error * g)[alike]) / total if total else float(error[at])
    return np.flatnonzero(alike), size, of_size, total


def _test_keys(errors: HeadSums) -> Iterator[_Outcome]:
    """Test the key whose loss, or second use, explains most; a sink is the last."""
    heads, m = errors.keys.best.t.shape
    if not m:
        return
    for name, rows in (("key", errors.keys.over(0)), ("key" + _OF_HEAD, errors.keys))[
        : 1 + (heads > 1)
    ]:
        (head, key), most, explained, count = _find_most(rows)
        value, error = most.value, most.error
        called = "the sink" if key == errors.problem.shape[1] else f"key {key}"
        words = (
            f"{called} is missing: {give_error(value, error)} of its weight"
            if 0 < value < _MOST_OF_A_WEIGHT
            else f"{called} counts {give_error(1 - value, error)} times"
        )
        where = f", {_name_head(errors.problem, head)}" if name != "key" else ""
        log_p = _correct_for_tries(most.log_p, count)
        yield _Outcome(name, log_p, most.statistic, words + where, value, error, explained)


def _find_most(rows: Evidence) -> tuple[tuple[int, int], Estimate, float, int]:
    """Find what explains most, of (heads, ...): its place, estimate and share, and count all."""
    # x^2 G is what a defect of size x takes from the sum of squares of z.
    tried = rows.test()
    explained = np.atleast_2d(np.square(tried.value) * rows.g)
    head, at = map(int, np.unravel_index(int(np.argmax(explained)), explained.shape))
    most = Estimate(*(float(np.atleast_2d(x)[head, at]) for x in tried))
    return (head, at), most, float(explained[head, at]), explained.size


def _correct_for_tries(log_p: float, tries: float) -> float:
    """Correct for many tries, by Bonferroni."""
    return min(log_p + math.log(max(tries, 1.0)), 0.0)


def _name_tile(problem: Problem, head: int, start: int, stop: int) -> str:
    rows = f"{problem.rows} {start} to {stop - 1}"
    return f"{_name_head(problem, head)}, {rows}" if problem.lead else rows


def _name_head(problem: Problem, number: int) -> str:
    return name_heads(problem, np.array([number])) if problem.lead else ""
