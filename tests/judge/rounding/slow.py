"""The variance and the bound of a row of softmax attention, term by term, in plain Python."""

import math
from itertools import permutations
from types import SimpleNamespace

# Mean square of an error that is uniform on half a spacing, 2^(1 - f) units at 2^f: for f uniform
# on [0, 1], by the rule of midpoints, and at the most.
BENFORD = sum(4.0 ** (1 - (x + 0.5) / 4096) for x in range(4096)) / 4096 / 12
EDGE = 4 / 12


def uniform(step):
    """Variance of an error that is uniform on half a step each way."""
    return step * step / 12


def step(to, x):
    return float(to.spacing(x))


def summed(terms):
    """Mean over all orders of the sum of the squares of the running sums."""
    orders = [*permutations(terms)]
    total = sum(sum(sum(x[: t + 1]) ** 2 for t in range(len(x))) for x in orders)
    return total / len(orders)


def running(terms):
    """The same, and the squares of the terms, which are products that are rounded."""
    return summed(terms) + sum(x * x for x in terms)


def equal(run, m):
    """The same for m terms of 1 / m in runs, and of the sums of runs: leading orders of m."""
    run = min(run, m)
    return run * run / (3 * m) + (m / (3 * run) if run < m else 0)


def gamma(kernel, terms, more):
    """Of sums in lanes of runs: roundings in a lane, of lanes, of runs, and some more."""
    k = min(terms, kernel.run) / kernel.lanes + kernel.lanes + terms / kernel.run + more
    u = kernel.accumulate.unit
    return k * u / (1 - k * u) if k * u < 1 else math.inf


def roundings(case, key):
    """Numbers that step-by-step kernels round, derivatives of the score, and where they are."""
    c, cap = case.factor, case.softcap
    if not math.log2(abs(c)).is_integer():
        yield key.product, c, "before the cap"
    yield key.logit, 1.0, "before the cap"
    if cap:
        if not math.log2(cap).is_integer():
            yield key.logit / cap, cap, "before the cap"
        yield key.ratio, cap, "the tanh"
        if not math.log2(cap).is_integer():
            yield key.capped, 1.0, "after the cap"
    if case.bias is not None:
        yield key.score, 1.0, "after the cap"


def key_of(case, kernel, i, j):
    """A key, or the sink: its score with the variance and the bound of that."""
    c, cap, u, to = case.factor, case.softcap, kernel.accumulate.unit, kernel.scores
    q, k = (x.tolist() for x in (case.q[i], case.k[j]))
    terms = [x * y for x, y in zip(q, k, strict=True)]
    key = SimpleNamespace(j=j, v=case.v[j].tolist(), product=sum(terms))
    key.logit = c * key.product
    key.ratio = math.tanh(key.logit / cap) if cap else 0.0
    key.capped = cap * key.ratio if cap else key.logit
    key.score = key.capped + (0.0 if case.bias is None else float(case.bias[i, j]))
    norms = math.hypot(*q) * math.hypot(*k)
    walked = running(terms) if kernel.scores_matter else norms**2 * len(q)
    logits = key.logit**2 * (2 if cap else 1)  # times the scale, and over the cap
    variance = {
        "before the cap": BENFORD * u * u * (c * c * walked + logits),
        "the tanh": BENFORD * u * u * key.capped**2 if cap else 0.0,
        "after the cap": BENFORD * u * u * key.capped**2 if cap else 0.0,
    }
    if case.bias is not None:
        variance["after the cap"] += BENFORD * u * u * key.score**2
    least = 2.0 ** (kernel.accumulate.least - kernel.accumulate.digits)
    bound = abs(c) * (gamma(kernel, len(q), 1) * norms + len(q) * least) + 2 * u * abs(key.logit)
    both = [*roundings(case, key)] if to else []
    for number, factor, where in both:
        variance[where] += uniform(factor * step(to, number))
        if where == "before the cap":
            bound += abs(factor) * step(to, abs(number) + bound / abs(factor)) / 2
    key.before_cap = bound
    bound += 2 * u * abs(key.score) + (6 * u * abs(key.capped) if cap else 0.0)
    for number, factor, where in both:
        if where == "the tanh":
            bound += factor * step(to, number) / 2
        elif where == "after the cap":
            bound += step(to, abs(number) + bound) / 2
    slope = 1 - key.ratio**2
    key.variance = slope**2 * variance["before the cap"]
    key.variance += variance["the tanh"] + variance["after the cap"]
    key.bound, key.risen = bound, key.logit * slope  # the derivative to log scale
    return key


def slope_bound(case, kernel, key):
    """(1 - t^2) (e^(2 |dx|) - 1) + 2 e (1 + e) + 2 u, with an error e of the tanh t; 1 at most."""
    cap, u, to = case.softcap, kernel.accumulate.unit, kernel.scores
    e = 6 * u * abs(key.ratio)
    e += (step(to, key.ratio) + step(to, key.capped) / cap) / 2 if to else 0.0
    if key.before_cap >= cap:
        return 1.0
    c = math.cosh(key.logit / cap)
    return min(math.expm1(2 * key.before_cap / cap) / c / c + 2 * e * (1 + e) + 2 * u, 1.0)


def sink_of(case, kernel, columns):
    u, score = kernel.accumulate.unit, float(case.sinks)
    v, variance = [0.0] * columns, BENFORD * u * u * score**2
    bound = 2 * u * abs(score)
    return SimpleNamespace(j=None, v=v, score=score, variance=variance, bound=bound, risen=0.0)


def row(case, kernel, i):
    """What `analyse_softmax` says of the query i, but for what is tied."""
    u, h, m, columns = kernel.accumulate.unit, kernel.softmax.unit, len(case.k), len(case.v[0])
    keys = [key_of(case, kernel, i, j) for j in range(m) if case.seen()[i, j]]
    if case.sinks is not None:
        keys.append(sink_of(case, kernel, columns))
        m += 1
    top = max(x.score for x in keys)
    total = sum(math.exp(x.score - top) for x in keys)
    whole, lse = 1 / total, top + math.log(total)
    for x in keys:
        x.gap = x.score - top
        x.weight, x.p = math.exp(x.gap), math.exp(x.score - lse)
        # The difference to the maximum, of which the digits are known if it is narrow.
        narrow = uniform(step(kernel.softmax, x.gap))
        x.variance += narrow if h > u else BENFORD * h * h * x.gap**2
        if x.gap < 0:
            x.variance += (kernel.exp * u / 2) ** 2
            if h > u:
                x.variance += uniform(step(kernel.softmax, x.weight) / x.weight)
        x.bound += h * (2 * (abs(x.gap) + x.bound) + 3) + u * kernel.exp
        x.bound += m / 16 * (h * (kernel.exp + 1) + u)  # a maximum that changes every 16 keys
        x.most, x.least = x.p * math.expm1(x.bound), x.p * math.exp(-x.bound)
        x.rounded, x.wider, x.flushed, x.moved = 0.0, 0.0, 0.0, x.most
        if (to := kernel.weights) is not None:
            if kernel.normalised:
                x.rounded = uniform(step(to, x.p))
            elif x.gap < 0 or (kernel.exp > 32 and total >= 1 + 2.0**-8):
                # Over the largest; a running maximum may have been another, or lag by 2^8.
                x.rounded = uniform(step(to, x.weight) * whole)
                widest = max(step(to, x.weight) * whole, 2 * to.unit * x.p)
                x.wider = uniform(widest) - x.rounded
                if x.weight < 4 * step(to, 0.0):  # they are rounded to 0, or as if they were
                    x.flushed = min(x.weight, step(to, 0.0) / 2) * whole
            if x.p < 1:
                last = 2.0 ** (to.least - to.digits) * (1.0 if kernel.normalised else whole)
                x.moved += to.unit * (x.p + x.most) + last
    shift, least = sum(x.most for x in keys), sum(x.least for x in keys)
    of_sum = gamma(kernel, m, 2 + 2 * m / 16)
    found = SimpleNamespace(lse=lse, top=top, std=[], worst=[], bound=[], slack=[], out=[])
    rise = sum(x.p * x.risen for x in keys)
    normaliser = equal(kernel.run, m)
    if kernel.scores_matter:
        weights = {x.j: x.p for x in keys}
        normaliser = summed([weights.get(j, 0.0) for j in range(len(case.k))])
        normaliser += 1 if case.sinks is None else 1 + min(1.0, weights[None] ** 2 / u**2)
    found.normaliser = BENFORD * u * u * normaliser
    of_16 = {x.j and x.j // 16: x.gap for x in sorted(keys, key=lambda x: x.gap)}
    tops = [x for x in keys if x.gap == (0 if kernel.exp <= 32 else of_16[x.j and x.j // 16])]
    for c in range(columns):
        v = [x.v[c] for x in keys]
        out = sum(x.p * y for x, y in zip(keys, v, strict=True))
        scores = sum(x.p**2 * x.variance * (y - out) ** 2 for x, y in zip(keys, v, strict=True))
        own = sum(x.rounded * y * y for x, y in zip(keys, v, strict=True))
        if kernel.scores_matter:
            terms = {x.j: x.p * x.v[c] for x in keys}  # hidden keys are terms that are 0
            walked = running([terms.get(j, 0.0) for j in range(len(case.k))])
            walked += out**2  # the runs are added; the sink, which adds 0, rounds nothing
        else:
            own += sum(x.p**2 * x.variance * y * y for x, y in zip(keys, v, strict=True))
            scores, walked = 0.0, m * out**2
        sums = BENFORD * u * u * (walked + out**2) + BENFORD * (h * out) ** 2
        sums += found.normaliser * out**2
        last = m * step(kernel.accumulate, 0.0) * (1.0 if kernel.normalised else whole)
        if abs(out) * u < last:  # sums in the range of subnormal numbers
            sums += uniform(last) / m
        wider = sum(x.wider * y * y for x, y in zip(keys, v, strict=True))
        known, rest = (own, scores + sums) if kernel.scores is None else (own + scores, sums)
        variance, worst = known + rest, known + EDGE / BENFORD * rest + wider
        sizes = sum(x.p * abs(y) for x, y in zip(keys, v, strict=True))
        moved = sum(x.moved * abs(y) for x, y in zip(keys, v, strict=True))
        bound = (moved + of_sum * (sizes + moved) + last / 2 + abs(out) * shift) / least
        bound += (2 * of_sum + 4 * h) * (abs(out) + bound)  # of both sums, and of the quotient
        if kernel.out is not None:
            variance, worst = (x + uniform(step(kernel.out, out)) for x in (variance, worst))
            bound += step(kernel.out, abs(out) + bound) / 2
        # Errors of exponentials in common: that of the largest, and a sixteenth of the others.
        common = sum(x.p * abs(x.v[c]) for x in tops) + abs(out) * sum(x.p for x in tops)
        steep = sum(x.p * x.risen * y for x, y in zip(keys, v, strict=True)) - rise * out
        slack = kernel.exp * (common + (sizes + abs(out)) / 16) + 3 * abs(steep)
        found.out.append(out)
        lost = 0 < sizes < 8 * last  # all of them
        found.std.append(math.inf if lost else math.sqrt(variance))
        found.worst.append(math.inf if lost else math.sqrt(worst))
        found.bound.append(bound)
        flushed = sum(x.flushed * (abs(y) + abs(out)) for x, y in zip(keys, v, strict=True))
        found.slack.append(u * slack + flushed)
    size = abs(lse) + 1 + math.log(m)
    relative = sum(x.p**2 * x.variance for x in keys)
    of_sum, of_log = BENFORD * u * u * m / 3, BENFORD * u * u * size**2
    found.lse_std = math.sqrt(relative + max(of_sum, found.normaliser) + 2 * of_log)
    found.lse_bound = math.log1p(shift / least) + (m + 4) * u + 4 * u * size
    common = kernel.exp
    if kernel.exp > 32:  # of units: what is as large so far, and a polynomial over few powers of 2
        mean, largest = sum(x.p * x.gap for x in keys), sum(x.p for x in tops)
        near = math.exp(-16 * sum(x.p * (x.gap - mean) ** 2 for x in keys))
        common *= largest + (1 - largest) * max(2 / 16, near)
    found.lse_slack = u * (common + 3 * abs(rise) + 2 * abs(lse))
    return found
