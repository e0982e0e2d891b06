"""The inequalities behind verdicts, and corrections for many, in plain Python."""

import math


def many(p, tries):
    """Bonferroni's correction."""
    return min(1.0, p * max(tries, 1))


def chernoff(square, rows):
    """P(mean square of so many whole rows > x) <= (x e^(1 - x))^(N / 2)."""
    x = max(square, 1.0)
    return (x * math.exp(1 - x)) ** (math.floor(rows + 2.0**-20) / 2)


def symmetric(rows, weights):
    """Size, standard error, p-value and statistic of rows (T, U, G, slack)."""

    def total(f):
        return sum(w * f(*x) for w, x in zip(weights, rows, strict=True))

    errors, own, g, slack = (total(lambda *x, a=a: x[a]) for a in range(4))
    share = min(max(errors / own, 0.0), 1.0) if own else 0.0  # of own roundings, that leaves least
    assert all(abs(errors - x / 99 * own) >= abs(errors - share * own) - 1e-9 for x in range(100))
    left = errors - share * own
    root = math.sqrt(total(lambda t, u, g, _: (t - share * u) ** 2))
    beyond = max(abs(left) - slack, 0.0)
    t = beyond / root if root else 0.0
    value = left / g if g else 0.0
    error = math.inf
    if g:
        left = total(lambda t, u, g, _: (t - share * u - value * g) ** 2)
        largest = total(lambda t, u, g, _: g * g) / g  # if one row has all, its own variance
        error = math.sqrt(left + (largest if 8 * largest > g else 0.0)) / g
    return value, error, min(1.0, 2 * math.exp(-t * t / 2)), t


def surer(rows, weights):
    """With the best weights, or of rows over their standard deviations: which is surer."""
    value, error, p, t = symmetric(rows, weights)
    even = [[y / math.sqrt(x[2]) if x[2] else 0.0 for y in x] for x in rows]
    _, _, other, statistic = symmetric(even, weights)
    return value, error, many(min(p, other), 2), max(t, statistic)


def holm(p):
    """Sorted: the k-th of m times m - k + 1, and not less than the one before."""
    order, found, last = sorted(range(len(p)), key=lambda x: p[x]), {}, 0.0
    for k, x in enumerate(order):
        last = max(last, min(1.0, (len(p) - k) * p[x]))
        found[x] = last
    return [found[x] for x in range(len(p))]
