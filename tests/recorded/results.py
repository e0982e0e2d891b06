"""Numbers and words of results, and when they differ."""

import math
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass

import numpy as np

from refattn.judge.verification.findings import Finding, Suspect

MOST = 5  # numbers of an array: sums of those that are so far from each other


def flat(x, name=""):
    """Names with numbers or words in them."""
    if isinstance(x, str | None):
        yield name, few_digits(str(x))
    elif isinstance(x, Mapping):
        for key, y in x.items():
            yield from flat(y, f"{name}.{key}")
    elif isinstance(x, Finding):
        name = f"{name.rpartition('.')[0]}.{x.name}"  # their order is that of p-values
        yield f"{name}, words", few_digits(x.where)
        yield name, [log(x.p_value), log(x.adjusted), x.statistic]
    elif isinstance(x, Suspect):
        yield f"{name}, words", few_digits(f"{x.name} {x.text}")
        yield name, [x.estimate, x.error, log(x.adjusted), x.explained]
    elif name.endswith(".trials"):
        yield f"{name}, words", " ".join(x)
        yield name, [log(y) for y in x.values()]
    elif is_dataclass(x):
        yield from flat({y.name: getattr(x, y.name) for y in fields(x)}, name)
    elif hasattr(x, "_asdict"):
        yield from flat({k: y for k, y in x._asdict().items() if k != "seconds"}, name)
    elif isinstance(x, list | tuple) and not all(isinstance(y, int | float) for y in x):
        for i, y in enumerate(x):
            yield from flat(y, f"{name}.{i}")
    else:
        yield name, folded(np.asarray(x))


def few_digits(words):
    """Words with four digits of each number, without its error; 0 if that is all it is."""
    number = r"-?\d+(\.\d+)?(e[-+]?\d+)?"
    words = re.sub(f" ± {number}", "", words)
    return re.sub(number, lambda x: f"{float(x[0]) if abs(float(x[0])) > 1e-12 else 0:.4g}", words)


def log(p):
    """p-values are compared in logs."""
    return math.log(max(p, 1e-300)) if p == p else p


def folded(x):
    """At most `MOST` weighted sums of the finite numbers, and as many of where others are."""
    x = np.asarray(x, np.float64).ravel()
    if x.size <= MOST:
        return x.tolist()
    weights = 1 + np.arange(x.size) * 0.618 % 1
    codes = np.where(np.isnan(x), 3.0, np.where(np.isinf(x), np.sign(x) + 2.5, 0.0))
    parts = [np.where(codes == 0, x, 0.0), *[codes] * bool(codes.any())]
    cuts = [np.pad(weights * y, (0, -x.size % MOST)).reshape(-1, MOST).sum(0) for y in parts]
    return [*np.concatenate(cuts).tolist(), x.size]


def results(function):
    """Names of results of a case, with numbers or words."""
    with np.errstate(all="ignore"):
        return dict(flat(dict(function())))


# Sums are of float64, to 2^-53; errors of outputs in float32 are known to 2^-29 of them, and so are
# z and what verdicts are made of. Certified bounds are sums of what is not negative.
RTOL = {"certified_errors": 1e-12}
RTOL |= dict.fromkeys(("verdicts", "profiles", "backward", "of_files"), 1e-6)


def different(got, want, rtol=1e-9):
    """Tell whether words or numbers differ by more than another order of sums makes them."""
    if not isinstance(got, list) or not isinstance(want, list):
        return got != want
    if len(got) != len(want):
        return True
    x, y = (np.array(z, np.float64) for z in (got, want))
    atol = rtol / 1000 * np.max(np.abs(y[np.isfinite(y)]), initial=0.0)  # of what cancels
    return not np.allclose(x, y, rtol=rtol, atol=atol, equal_nan=True)


def changes(name, found, want):
    """List the places of a case where results are others."""
    places = sorted({*found, *want})
    return [x for x in places if different(found.get(x), want.get(x), RTOL.get(name, 1e-9))]
