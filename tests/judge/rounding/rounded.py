"""Attention kernels that round what a profile says, in NumPy; and those that are wrong by a little.

A head is float64 arrays (n, d), (m, d), (m, d_v). Sums are sums of float32 numbers or, with another
rounding, the float64 sum to which the error of one rounding is added.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from refattn.judge.rounding import PROFILES, problems
from refattn.judge.rounding.formats import FORMATS, Format
from refattn.judge.rounding.profiles import EVERY_PROFILE
from refattn.naive import visible

LOG2E = math.log2(math.e)
Array = np.ndarray
f32 = np.float32
BF16 = FORMATS["bfloat16"].round
ALARM = 1e-9  # probability that a correct law fails one of the tests of laws, each
EXACT = {"accumulate": "float64", "softmax": "float64", "exp": 0.0, "out": None}  # of a profile
SINKS = np.array([-3.0, 1.5, 3.25, 5.0])  # below, among and above the scores


def interval(rows):
    """Where the mean square of so many independent rows is, but for `ALARM`.

    Of sub-Gaussian numbers of variance 1, below (x e^(1 - x))^(N / 2) = ALARM / 2, and above by
    P(mean < 1 - t) <= exp(-N t^2 / (2 E z^4)) with E z^4 <= 3 for sums of uniform numbers.
    """
    need = math.log(2 / ALARM)
    upper = 1.0
    while rows / 2 * (upper - 1 - math.log(upper)) < need:
        upper += 1e-3
    return 1 - math.sqrt(6 * need / rows), upper


def ratio(error, size):
    """Largest |error| / size; 0 / 0 is 0, and anything may come out where there is no bound."""
    error = np.where(np.isinf(size), 0.0, np.where(np.isnan(error), np.inf, np.abs(error)))
    return float(np.max(np.where(error == 0, 0.0, error / np.where(size > 0, size, 1e-300))))


class Case(NamedTuple):
    """Softmax attention of one head."""

    q: Array
    k: Array
    v: Array
    scale: float | None = None
    bias: Array | None = None
    mask: Array | None = None
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    sinks: float | None = None  # that of the head

    @property
    def factor(self):
        return self.q.shape[-1] ** -0.5 if self.scale is None else self.scale

    @property
    def options(self):
        sinks = None if self.sinks is None else np.asarray(self.sinks)
        return dict(zip(self._fields[3:], self[3:], strict=True)) | {"sinks": sinks}

    def with_sink(self, s):
        """Scores and, at the end, that of the sink."""
        if self.sinks is None:
            return s
        return np.concatenate([s, np.full((len(s), 1), self.sinks, s.dtype)], -1)

    def with_zero(self, x):
        """Keys or values, and the zeros of the sink."""
        return x if self.sinks is None else np.concatenate([x, 0 * x[:1]])

    def seen(self):
        return visible(self.q, self.k, mask=self.mask, causal=self.causal, window=self.window)


# --- roundings ------------------------------------------------------------------------------------


class Nearest(NamedTuple):
    to: Format

    def __call__(self, x):
        return self.to.round(x)


class Stochastic(NamedTuple):
    """Up or down, so that the mean is right: mean square of the error h^2 / 6 on average."""

    to: Format
    rng: np.random.Generator

    def __call__(self, x):
        step = self.to.spacing(x)
        return np.floor(x / step + self.rng.random(np.shape(x))) * step


class Noise(NamedTuple):
    """What the law takes a rounding for: an error that is uniform on half a spacing each way."""

    to: Format
    rng: np.random.Generator

    def __call__(self, x):
        return x + self.to.spacing(x) * (self.rng.random(np.shape(x)) - 0.5)


def same(x):
    return x


class Steps(NamedTuple):
    """Roundings of a kernel in float64."""

    scores: Callable[[Array], Array] = same
    weights: Callable[[Array], Array] = same
    sums: Callable[[Array], Array] = same
    out: Callable[[Array], Array] = same
    normalised: bool = False
    softmax: Callable[[Array], Array] = same


def running(terms, to):
    """Sum over the last axis, of which each partial sum is rounded."""
    total = to(terms[..., 0])
    for t in range(1, terms.shape[-1]):
        total = to(total + terms[..., t])
    return total


def multiplied(x, by, to):
    """A product that is rounded, unless it is with a power of two, which no error is made in."""
    return by * x if abs(math.frexp(by)[0]) == 0.5 else to(by * x)


def divided(x, by, to):
    return x / by if abs(math.frexp(by)[0]) == 0.5 else to(x / by)


def stepwise(case, steps):
    """Attention in float64 with explicit roundings."""
    q, k, v = case.q, case.k, case.with_zero(case.v)
    s = q @ k.T if steps.sums is same else running(q[:, None] * k, steps.sums)
    s = steps.scores(s)
    s = steps.scores(steps.sums(case.factor * s))
    if case.softcap is not None:
        ratio = steps.scores(np.tanh(divided(s, case.softcap, steps.scores)))
        s = multiplied(ratio, case.softcap, steps.scores)
    if case.bias is not None:
        s = steps.scores(steps.sums(s + case.bias))
    s = case.with_sink(np.where(case.seen(), s, -math.inf))
    top = np.max(s, -1, keepdims=True)
    gap = s - np.where(np.isfinite(top), top, 0.0)
    shown = np.isfinite(gap)
    w = np.where(gap == 0, 1.0, steps.softmax(np.exp(steps.softmax(np.where(shown, gap, 0.0)))))
    w = np.where(shown, w, 0.0)
    total = steps.softmax(w.sum(-1, keepdims=True))
    total = np.where(total > 0, total, 1.0)
    if steps.normalised:
        w = np.where(w > 0, steps.weights(w / total), 0.0)
        total = np.ones_like(total)
    else:
        w = np.where((w > 0) & (w < 1), steps.weights(w), w)
    found = w @ v if steps.sums is same else running((w[:, None] * v.T), steps.sums)
    return steps.out(found / total)


# --- kernels in float32 ---------------------------------------------------------------------------


def scores32(case, to=None):
    """Scores in float32, and the sink's, each step rounded to a narrow type if there is one."""
    s, _ = scores_and_ratio(case, to)
    return case.with_sink(np.where(case.seen(), s, f32(-np.inf)).astype(f32))


def scores_and_ratio(case, to=None):
    """Scores of all keys, and the tanh of a cap."""

    def narrow(x):
        return x.astype(f32) if to is None else to.round(x).astype(f32)

    s = narrow(case.q.astype(f32) @ case.k.T.astype(f32))
    s, ratio = narrow(s * f32(case.factor)), np.zeros_like(s)
    if case.softcap is not None:
        ratio = narrow(np.tanh(narrow(s / f32(case.softcap))))
        s = narrow(f32(case.softcap) * ratio)
    if case.bias is not None:
        s = narrow(s + case.bias.astype(f32))
    return s, ratio


def _top(s):
    top = np.max(s, -1, keepdims=True, initial=-np.inf)
    return np.where(np.isfinite(top), top, f32(0)).astype(f32)


def plain(
    case, dtype, *, scores=False, weights=False, softmax=False, out=None, of=None, logs=False
):
    """In float32, but for what is rounded: scores, probabilities, and steps of the softmax.

    To the storage type or to another, `of`. With `logs` probabilities are e^(s - log normaliser).
    """
    to = FORMATS[of or dtype]

    def narrow(x, really):
        return to.round(x).astype(f32) if really else x

    s = scores32(case, to if scores else None)
    top = _top(s)
    w = narrow(np.exp(narrow(s - top, softmax)), softmax)
    w = np.where(np.isneginf(s), f32(0), w)
    total = narrow(w.sum(-1, keepdims=True, dtype=f32), softmax)
    p = narrow(w / np.where(total > 0, total, f32(1)), weights)
    with np.errstate(divide="ignore"):
        lse = None if weights else (top + np.log(total))[:, 0]
    if logs:
        p = np.exp(s - np.where(np.isfinite(lse), lse, f32(0))[:, None])
    return FORMATS[out or dtype].round(p @ case.with_zero(case.v).astype(f32)), lse


def flash(
    case,
    dtype,
    *,
    tile=16,
    base2=False,
    rescale=True,
    rounded_normaliser=False,
    log2e=LOG2E,
    fast=0.0,
    weights=None,
    out=None,
    sink_first=True,
    lag=-1.0,
    sums="float32",
):
    """Tiles of keys with a running maximum; weights are rounded, their sum is of those before.

    The maximum may start from the sink, or the sink may be added to the sum at the end. It may stay
    as it is where a tile has scores that are larger by so many powers of 2 at most. Running sums
    may be rounded after each tile.
    """
    to = FORMATS[weights or dtype]
    s, v = scores32(case), case.v.astype(f32)
    sink, s = s[:, len(v) :], s[:, : len(v)]
    n, m = s.shape
    top = np.full((n, 1), -np.inf, f32)
    total, found = np.zeros((n, 1), f32), np.zeros((n, v.shape[1]), f32)
    if sink_first and sink.size:
        top, total = sink, np.ones((n, 1), f32)
    for j in range(0, m, tile):
        part = s[:, j : j + tile]
        new = np.maximum(top, part.max(-1, keepdims=True))
        with np.errstate(invalid="ignore"):  # of nothing that was seen
            new = np.where((new - top) * f32(log2e) <= lag, top, new)
        safe = np.where(np.isfinite(new), new, f32(0)).astype(f32)
        if base2:
            c = f32(log2e)
            w, shrink = np.exp2(part * c - safe * c), np.exp2((top - safe) * c)
        else:
            w, shrink = np.exp(part - safe), np.exp(top - safe)
        if fast:  # an exponential with an error that has a part in common
            w = w * (1 + f32(fast) * np.cos(40 * np.where(np.isfinite(part), part - safe, 0)))
        if not rescale:
            shrink = np.where(np.isfinite(top), f32(1), f32(0))
        narrow = to.round(w).astype(f32)
        total = total * shrink + (narrow if rounded_normaliser else w).sum(-1, keepdims=True)
        found = FORMATS[sums].round(found * shrink + narrow @ v[j : j + tile]).astype(f32)
        top = new
    if sink.size and not sink_first:
        total = total + np.exp(sink - np.where(np.isfinite(top), top, sink))
        top = np.where(np.isfinite(top), top, sink)
    found = found / np.where(total > 0, total, f32(1))
    with np.errstate(divide="ignore"):
        lse = (np.where(np.isfinite(top), top, f32(0)) + np.log(total))[:, 0]
    return FORMATS[out or dtype].round(found), lse


def serial(case, dtype):
    """Sums of products in float32, term by term."""

    def product(x, y):
        return running(x.astype(f32)[:, None] * y.astype(f32), lambda x: x.astype(f32))

    s = product(case.q, case.k) * f32(case.factor)
    if case.softcap is not None:
        s = f32(case.softcap) * np.tanh(s / f32(case.softcap))
    s = np.where(case.seen(), s if case.bias is None else s + case.bias.astype(f32), -np.inf)
    s = case.with_sink(s)
    w = np.exp((s - _top(s)).astype(f32))
    total = np.cumsum(w, -1, dtype=f32)[:, -1:]
    found = product(w, case.with_zero(case.v).T) / np.where(total > 0, total, f32(1))
    return FORMATS[dtype].round(found), None


online = partial(flash, tile=1, weights="float32")  # one key after the other


def half_sums(case, dtype="float16", normalised=False):
    """Sums of products in float16, term by term."""
    to = Nearest(FORMATS["float16"])
    steps = Steps(scores=to, weights=to, sums=to, out=to, normalised=normalised)
    return stepwise(case, steps), None


def quantised(to, *arrays):
    """Arrays rounded to a type; those of 8 bits scaled to its range."""

    def narrow(x):
        largest = np.max(np.abs(x), initial=0.0)
        factor = to.largest / largest if to.digits <= 4 and largest else 1.0
        return to.round(x * factor) / factor

    return [narrow(x) for x in arrays]


E4M3 = "float8_e4m3fn"
CUT = "tfloat32-truncated"
INPUTS = {x: y.inputs for x, y in PROFILES.items() if y.inputs not in (None, "storage")}


def read_as(name, q, k, *others, scale=None):
    """Queries, keys and others in the type of a profile; the scale that is left, and its parts."""
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    a, b = PROFILES[name].scale_first
    if a:
        q, k = ((factor**x * y.astype(f32)).astype(np.float64) for x, y in ((a, q), (b, k)))
    read = quantised(FORMATS[INPUTS[name]], q, k, *others)
    return read, factor if a == 0 else 1.0, (factor**a, factor**b)


NARROW, WIDE = ("bfloat16", "float16"), ("float32",)
TF32 = {"weights": True, "of": "tfloat32"}
TABLE = {  # of profiles: a kernel, and the types of its inputs
    "math": (plain, (*NARROW, *WIDE)),
    "recomputed": (partial(plain, logs=True), WIDE),
    "serial": (serial, ("float32", "bfloat16")),
    "flash": (flash, NARROW),
    "upcast": (partial(plain, weights=True), NARROW),
    "flash-fast": (partial(flash, base2=True, fast=2.0**-14), NARROW),
    "flash-lazy": (partial(flash, base2=True, fast=2.0**-14, lag=8.0), NARROW),
    "eager": (partial(plain, scores=True, weights=True), NARROW),
    "eager-narrow": (partial(plain, scores=True, weights=True, softmax=True), NARROW),
    "tf32": (partial(flash, weights="tfloat32", tile=32), WIDE),
    "fp8-weights": (partial(flash, weights=E4M3), NARROW),
    "fp8": (partial(flash, weights=E4M3), NARROW[:1]),
    "half-sums": (half_sums, NARROW[1:]),
    "tf32-eager": (partial(plain, **TF32), WIDE),
    "tf32-scaled": (partial(flash, weights="tfloat32", tile=32), WIDE),
    "tf32-scaled-eager": (partial(plain, **TF32), WIDE),
    "tf32-roots-eager": (partial(plain, **TF32), WIDE),
    "tf32-truncated": (partial(flash, weights=CUT, tile=32), WIDE),
    "tf32-truncated-eager": (partial(plain, weights=True, of=CUT), WIDE),
    "fp8-weights-eager": (partial(plain, weights=True, of=E4M3), NARROW),
    "fp8-eager": (partial(plain, weights=True, of=E4M3), NARROW[:1]),
    "half-sums-eager": (partial(half_sums, normalised=True), NARROW[1:]),
}
KERNELS, DTYPES = ({x: y[i] for x, y in TABLE.items()} for i in range(2))


def of_heads(name, q, k, v, dtype, **options):
    """A kernel, or that of a name, on arrays (heads, n, d) with as many heads of keys or fewer."""
    share, kernel = len(q) // len(k), KERNELS.get(name, name)
    if name in INPUTS:
        (q, k, v), scale, _ = read_as(name, q, k, v, scale=options.get("scale"))
        options |= {"scale": scale}

    def case(h):
        given = {
            a: x[h] if isinstance(x, Array) and x.ndim in (1, 3) else x for a, x in options.items()
        }
        return Case(q[h], k[h // share], v[h // share], **given)

    found = [kernel(case(h), dtype) for h in range(len(q))]
    out = np.stack([out for out, _ in found])
    return out, None if found[0][1] is None else np.stack([lse for _, lse in found])


# --- attention that is linear in features ---------------------------------------------------------


def positive_features(case, omega, log_weight, dtype, narrow=False):
    """Positive random features in float32, over the largest of a query and of all keys."""
    root = f32(math.sqrt(case.factor))
    q, k, w = case.q.astype(f32) * root, case.k.astype(f32) * root, omega.astype(f32)
    a = q @ w.T
    b = k @ w.T - (k * k).sum(-1, keepdims=True, dtype=f32) / f32(2) + log_weight.astype(f32)
    seen = np.ones(len(k), bool) if case.mask is None else case.mask[0]
    b = np.where(seen[:, None], b, f32(-np.inf))
    top = b.max() if np.isfinite(b.max()) else f32(0)
    phi, psi = np.exp(a - a.max(-1, keepdims=True)), np.exp(b - top)
    return _linear(phi, psi, case, dtype, narrow)


def linear(case, feature_map, dtype, narrow=False):
    """Attention of a feature map in float32."""
    phi, psi = (feature_map(x.astype(f32)).astype(f32) for x in (case.q, case.k))
    if case.mask is not None:
        psi = np.where(case.mask[0][:, None], psi, f32(0))
    return _linear(phi, psi, case, dtype, narrow)


def _linear(phi, psi, case, dtype, narrow):
    v, to = case.v.astype(f32), FORMATS[dtype]
    if narrow:
        phi, psi = (to.round(x).astype(f32) for x in (phi, psi))
    with_ones = np.concatenate([v, np.ones((len(v), 1), f32)], -1)
    if case.causal:
        n, m = len(phi), len(psi)
        terms = psi[:, :, None] * with_ones[:, None, :]
        state = np.concatenate(
            [np.zeros((1, *terms.shape[1:]), f32), np.cumsum(terms, 0, dtype=f32)]
        )
        at = np.clip(np.arange(n) + 1 + m - n, 0, m)
        found = np.einsum("ns,nsc->nc", phi, state[at], dtype=f32)
    else:
        found = phi @ (psi.T @ with_ones)
    mass = found[:, -1:]
    return to.round(found[:, :-1] / np.where(mass == 0, f32(1), mass))


def gradient(of, q, k, v, g, dtype="float64", **options):
    """What of a gradient is analysed, of one head."""
    problem = problems.pose_arrays(q, k, v, **options)
    shape = {"dq": q, "dk": k, "dv": v}[of].shape
    return problems.pose_gradients(problem, {of: shape}, lambda _: g, None, dtype)[of]


# --- backward passes ------------------------------------------------------------------------------


# Each rounds what its profile says.
BACKWARD = tuple(
    x for x, y in PROFILES.items()
    if y.accumulate != "float64" and y.inputs != "storage" and not y.by_head
)  # fmt: skip


class Wrong(NamedTuple):
    """What a backward pass may do wrong."""

    dq: float = 1.0
    dk: float = 1.0
    dv: float = 1.0
    delta: float = 1.0
    scale: float = 1.0  # of the scores that are computed again
    shift: int = 0  # of the causal edge
    lost: int = 0  # rows at the end of queries, and of keys
    seen: bool = False  # no mask
    no_norm: bool = False  # of another row
    truncated: bool = False
    no_sink: bool = False  # in the sum of the weights that are computed again
    flat: bool = False  # no slope of the cap
    late: bool = False  # the slope of the cap at the capped score
    slope: str = "ratio"  # what it is computed of, not wrong: the tanh, the capped score, or cosh


RIGHT = Wrong()


def backward(name, case, d_out, dtype, wrong=RIGHT, of_products=None, of_keys=True):
    """Output and gradients in float32, with the roundings of a profile."""
    back, to = EVERY_PROFILE[name], FORMATS[dtype]
    types = (dtype if x in (None, "storage") else x for x in (back.weights, back.d_scores))
    of_weights, of_scores = (FORMATS[x] for x in types)
    stepwise = back.scores is not None  # weights and scores of the forward pass, as they were
    every_step = back.softmax != "float32"

    def narrow(x, really=True, to=to):
        return to.round(x).astype(f32) if really else x.astype(f32)

    def matrix(x, y):
        if back.accumulate == "float16":
            return running(x[:, None] * y.T, FORMATS["float16"].round).astype(f32)
        if name == "serial":
            return running(x[:, None] * y.T, lambda x: x.astype(f32))
        return x @ y

    seen = case.seen()
    if wrong.seen:
        seen = case._replace(mask=None).seen()
    if wrong.shift:
        ahead = np.arange(len(case.k)) - np.arange(len(case.q))[:, None]
        seen = ahead <= len(case.k) - len(case.q) + wrong.shift
    s = scores32(case, to if stepwise else None)
    other = case if stepwise else case._replace(scale=case.factor * wrong.scale)
    again, ratio = scores_and_ratio(other, to if stepwise else None)
    again = case.with_sink(np.where(seen, again, f32(-np.inf)).astype(f32))
    top = _top(s)
    with np.errstate(divide="ignore"):
        w = narrow(np.exp(narrow(s - top, every_step)), every_step)
        total = narrow(w.sum(-1, keepdims=True, dtype=f32), every_step)
        total = np.where(total > 0, total, f32(1))
        lse = top + np.log(total)
        if wrong.no_sink:
            lse = top + np.log(total - w[:, -1:])
    given, q = d_out.astype(f32), case.q.astype(f32)
    g = given if of_products is None else of_products.astype(f32)
    v, k = (case.with_zero(x).astype(f32) for x in (case.v, case.k))
    kept = w / total
    if back.delta != "weights":
        p = narrow(np.exp(again - lse), back.again)
    else:
        p = narrow(kept, stepwise and not back.upcast)
        if wrong.shift or wrong.seen or wrong.no_sink:
            p = narrow(np.exp(again - lse), stepwise)
    out = KERNELS.get(name.removesuffix("-upcast"), flash)(case, dtype)[0]
    t = narrow(matrix(g, v.T), back.d_weights)
    if back.delta == "unrounded":
        delta = (given * flash(case, "float32", weights=dtype)[0]).sum(-1, keepdims=True, dtype=f32)
    elif back.delta == "out":
        delta = (given * out.astype(f32)).sum(-1, keepdims=True, dtype=f32)
    else:
        delta = (p * t).sum(-1, keepdims=True, dtype=f32)
        delta = narrow(delta, every_step)
    if wrong.no_norm:
        delta = np.roll(delta, 1, 0)
    ds = p * (t - f32(wrong.delta) * delta)
    ds = narrow(ds, stepwise)
    if case.softcap is not None:
        cap = f32(case.softcap)
        at = np.tanh(ratio) if wrong.late else f32(not wrong.flat) * ratio
        slope = 1 - at * at
        if wrong.slope == "capped":
            slope = 1 - (cap * ratio / cap) ** 2
        elif wrong.slope == "cosh":
            slope = 1 / np.cosh(q @ case.k.T.astype(f32) * f32(case.factor) / cap) ** 2
        slope = np.concatenate([slope, 0 * ds[:, len(case.k) :]], -1)
        ds = narrow(narrow(narrow(ds * cap, stepwise) * slope, stepwise) / cap, stepwise)
    factor = f32(case.factor)
    if back.scaled:
        ds, factor = ds * factor, f32(1)
    ds = narrow(ds, back.d_scores, of_scores)
    if stepwise:
        ds, factor = narrow(ds * factor), f32(1)
    n, m = ds.shape
    keep_q, keep_k = slice(0, n - wrong.lost), slice(0, m - wrong.lost)
    p = narrow(p, back.weights, of_weights)

    def product(x, y, by, size):
        if size is None:
            return (f32(by) * matrix(x, y)).astype(f32)
        found = np.zeros((x.shape[0], y.shape[1]), f32)
        for at in range(0, x.shape[1], size):
            found = narrow(found + f32(by) * (x[:, at : at + size] @ y[at : at + size]))
        return found

    queries, keys = back.parts or (None, None)
    dq = product(ds[:, keep_k], k[keep_k], factor * f32(wrong.dq), keys)
    dk = product(ds.T[:, keep_q], q[keep_q], factor * f32(wrong.dk), queries)
    dv = product(p.T[:, keep_q], g[keep_q], f32(wrong.dv), queries)

    def final(x, rounded=True):
        if not rounded:
            return x
        if wrong.truncated:
            step = to.spacing(x)
            return np.trunc(x / step) * step
        return to.round(x)

    return out, final(dq), *(final(x[: len(case.k)], of_keys) for x in (dk, dv))


def differentiated(name, case, d_out, dtype, block=16, wrong=RIGHT):
    """Output and gradients of a maximum that runs over blocks of keys, all steps differentiated."""
    to, wide = FORMATS[dtype], name == "math-maximum"
    narrow = (lambda x: x.astype(f32)) if wide else (lambda x: to.round(x).astype(f32))
    q, k, v, g = (x.astype(f32) for x in (case.q, case.with_zero(case.k), case.v, d_out))
    v, s, some = case.with_zero(v), scores32(case), slice(0, len(q) - wrong.lost)
    sums, mass = np.zeros((len(q), v.shape[1]), f32), np.zeros((len(q), 1), f32)
    top, steps = np.full_like(mass, -1e30), []
    for j in range(0, len(k), block):
        at = slice(j, j + block)
        new = np.maximum(top, np.max(s[:, at], -1, keepdims=True))
        p, shrink = np.exp(s[:, at] - new), np.exp(top - new)
        steps.append((at, new, top, p, shrink, mass, sums))
        mass = mass * shrink + p.sum(-1, keepdims=True, dtype=f32)
        sums, top = sums * shrink + narrow(p) @ v[at], new
    mass = np.where(mass > 0, mass, f32(1))
    out, d_sums = sums / mass, g / mass
    d_mass = -(g * sums / (mass * mass)).sum(-1, keepdims=True, dtype=f32)
    d_top, dv, ds = np.zeros_like(mass), np.zeros_like(v), np.zeros_like(s)
    for at, new, before, p, shrink, mass, sums in reversed(steps):
        dv[at] = f32(wrong.dv) * (narrow(p)[some].T @ d_sums[some])
        d = (narrow(d_sums @ v[at].T) + d_mass) * p
        shrunk = ((d_sums * sums).sum(-1, keepdims=True, dtype=f32) + d_mass * mass) * shrink
        left = d_top - d.sum(-1, keepdims=True, dtype=f32) - shrunk
        tied, largest = before == new, s[:, at] == new
        here = np.where(tied, f32(0.5), f32(1)) * np.any(largest, -1, keepdims=True)
        ds[:, at] = d + largest * left * here / np.maximum(largest.sum(-1, keepdims=True), 1)
        d_top = shrunk + left * (1 - here)
        d_sums, d_mass = d_sums * shrink, d_mass * shrink
    factor, m = f32(case.factor), len(case.k)
    if case.softcap is not None:
        ratio = scores_and_ratio(case)[1]
        ds[:, :m] *= 1 - ratio * ratio
    seen = slice(0, m - wrong.lost)
    dq = factor * f32(wrong.dq) * (ds[:, seen] @ k[seen])
    found = out, dq, factor * f32(wrong.dk) * (ds[some].T @ q[some]), dv
    return [to.round(x[:m] if at > 1 else x) for at, x in enumerate(found)]


def made(name, q, k, v, g, dtype, wrong=RIGHT, by_head=True, block=16, **options):
    """What a backward pass gives, of heads that share keys where there are fewer of these.

    Gradients in keys are rounded by head, and so are their sums if `by_head` is "each".
    """
    share, sinks, products = len(q) // len(k), options.pop("sinks", None), g
    parts_of_scale = 1.0, 1.0
    if name in INPUTS:
        read = read_as(name, q, k, v, g, scale=options.get("scale"))
        (q, k, v, products), options["scale"], parts_of_scale = read
    found = []
    for h in range(len(q)):
        of_head = options | ({} if sinks is None else {"sinks": float(sinks[h])})
        case = Case(q[h], k[h // share], v[h // share], **of_head)
        if name.endswith("maximum"):
            found.append(differentiated(name, case, g[h], dtype, block, wrong))
        else:
            found.append(backward(name, case, g[h], dtype, wrong, products[h], by_head))
    out, dq, dk, dv = (np.stack(x) for x in zip(*found, strict=True))
    to = FORMATS[dtype]
    if name in INPUTS:
        dq, dk = (to.round(x * by) for x, by in zip((dq, dk), parts_of_scale, strict=True))
    parts = (np.moveaxis(x.reshape(len(k), share, *x.shape[1:]), 1, -1) for x in (dk, dv))
    of_sums = to.round if by_head == "each" else same
    dk, dv = (to.round(running(x, of_sums)) for x in parts)
    return {"out": out, "dq": dq, "dk": dk, "dv": dv}


def dump(name, q, k, v, dtype, **options):
    """What `verify` takes of a kernel, but for log normalisers."""
    out, _ = of_heads(name, q, k, v, dtype, **options)
    return {"q": q, "k": k, "v": v, "out": out, "dtype": dtype, **options}


def dump_gradients(name, q, k, v, g, dtype, wrong=RIGHT, by_head=True, block=16, **options):
    """What `verify` takes of a forward and a backward pass."""
    found = made(name, q, k, v, g, dtype, wrong, by_head, block, **options)
    return {"q": q, "k": k, "v": v, "d_out": g, "dtype": dtype, **options, **found}


def results(given, *names):
    """The same with these results alone."""
    every = ("out", "lse", "dq", "dk", "dv", "state")
    return {x: y for x, y in given.items() if x in names or x not in every}
