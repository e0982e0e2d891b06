"""Problems of attention, and what rounding may change in their answers."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from refattn import naive
from tests import reference
from tests.reference import CONTRACT

sizes = st.integers(1, 7)
seeds = st.integers(0, 2**32 - 1)
magnitudes = st.sampled_from([1e-8, 0.1, 1.0, 10.0, 100.0])
dtypes = st.sampled_from([np.float32, np.float64])


def draw(rng, *shape, dtype=np.float64, size=1.0):
    return (size * rng.standard_normal(shape)).astype(dtype)


def with_norm(x, length):
    norms = np.sqrt(np.sum(x.astype(np.float64) ** 2, -1, keepdims=True))
    return (x / norms * length).astype(x.dtype)


def largest(x):
    return float(np.max(np.abs(x), initial=0))


def eps(x):
    return float(np.finfo(x.dtype).eps)


# --- problems -------------------------------------------------------------------------------------

LEADS = {  # leading axes of queries, keys and values
    "none": ((), (), ()),
    "broadcast": ((2, 3), (3,), (2, 1)),
    "values": ((), (), (2,)),
    "keys": ((), (2,), ()),
    "grouped": ((2, 6), (2, 3), (3,)),
    "shared": ((4,), (1,), (1,)),
}
MASKS = ("none", "keys", "rows", "heads")


@dataclass
class Problem:
    """Queries, keys, values, what each query sees, and a generator for what else is drawn."""

    q: Any
    k: Any
    v: Any
    options: Any
    rng: Any

    @property
    def arrays(self):
        return self.q, self.k, self.v

    @property
    def lead(self):
        shapes = [x.shape[:-2] for x in self.arrays]
        heads = [1 if len(s) == 0 else s[-1] for s in shapes]
        if heads[0] > max(heads[1:]) > 1:
            shapes = [(*s[:-1], heads[0]) for s in shapes]
        return np.broadcast_shapes(*shapes)

    @property
    def visible(self):
        n, m = self.q.shape[-2], self.k.shape[-2]
        past = np.tri(n, m, m - n, dtype=bool) if self.options.get("causal") else True
        shape = (*self.lead, n, m)
        return np.broadcast_to(past & np.asarray(self.options.get("mask", True)), shape)

    def each(self, x):
        """The array with a head for each query head, and all leading axes."""
        heads = (1, *self.lead)[-1]
        if x.ndim > 2 and x.shape[-3] not in (1, heads):
            x = np.repeat(x, heads // x.shape[-3], axis=-3)
        return np.broadcast_to(x, (*self.lead, *x.shape[-2:]))

    def wide(self, x):
        return self.each(x.astype(np.float64))


def make(lead, n, m, mask, causal, seed, dtype, d=None):
    rng = np.random.default_rng(seed)
    own, d_v = rng.integers(1, 5, 2)
    d = own if d is None else d
    q, k, v = (
        draw(rng, *shape, rows, width, dtype=dtype)
        for shape, rows, width in zip(LEADS[lead], (n, m, m), (d, d, d_v), strict=True)
    )
    options = {"causal": True} if causal else {}
    heads = (1, *LEADS[lead][0])[-1]
    shape = {"none": None, "keys": (m,), "rows": (n, m), "heads": (heads, 1, m)}[mask]
    if lead == "none" and mask == "heads":
        shape = (1, m)
    if shape is not None:
        options["mask"] = rng.random(shape) < 0.6
    return Problem(q, k, v, options, rng)


problems = given(
    st.builds(
        make,
        st.sampled_from(sorted(LEADS)),
        sizes,
        sizes,
        st.sampled_from(MASKS),
        st.booleans(),
        seeds,
        dtypes,
    )
)


def slope(formula, arrays, way, d_out, **options):
    """Derivative of the weighted output along a way, in extended precision."""
    step, total = np.longdouble(2.0**-18), np.longdouble(0)
    floats = {x for x, y in options.items() if isinstance(y, np.ndarray) and y.dtype == float}
    wide = options | {x: options[x].astype(np.longdouble) for x in floats}
    for i, weight in ((1, 8), (2, -1)):  # the error is of the fourth order
        for sign in (1, -1):
            moved = {
                x: y.astype(np.longdouble) + sign * i * step * way[x] for x, y in arrays.items()
            }
            total += sign * weight * np.sum(formula(**moved, **wide) * d_out)
    return float(total / (12 * step))


# --- what two answers within the accuracy contract may differ by ----------------------------------


def tolerance(q, k, scale=1.0):
    """Exact attention: twice the contract, since both sides of a comparison are rounded."""
    return 2 * CONTRACT * eps(q) * (1 + abs(scale) * reference.norm(q) * reference.norm(k))


def exponent(q, k, omega, scale=None):
    """Largest exponent of the two hops, in kernel coordinates."""
    root = reference.root(scale, q.shape[-1])
    norm_q, norm_k = root * reference.norm(q), root * reference.norm(k)
    return reference.norm(omega) * max(norm_q, norm_k) + norm_k**2 / 2


def rfa_tolerance(q, k, omega):
    return 2 * CONTRACT * eps(q) * (1 + exponent(q, k, omega))


def values_atol(p):
    return 2 * CONTRACT * eps(p.q) * largest(p.v)


def linear_atol(p, options):
    """Of features of elu, which underflow."""
    return values_atol(p) if max(reference.norm(p.q), reference.norm(p.k)) < 80 else np.inf


def softmax_atol(p, options):
    """With the exponents of biases, sinks and distances, and values times what dropout leaves."""
    units = sum(largest(options.get(name, 0)) for name in ("bias", "sinks"))
    units += largest(options.get("slopes", 0)) * (p.q.shape[-2] + p.k.shape[-2])
    atol = tolerance(p.q, p.k, p.q.shape[-1] ** -0.5) * largest(p.v)
    return (atol + units * values_atol(p)) * max(1.0, largest(options.get("dropout", 1)))


def rfa_atol(p, options):
    return rfa_tolerance(p.q, p.k, options["omega"]) * largest(p.v)


def longest_mean(p):
    """A frequency as long as the mean of one's distribution may be, a query and a key."""
    root = reference.root(None, p.q.shape[-1])
    return np.full((1, 1), root * (reference.norm(p.q) + reference.norm(p.k)))


def target_mean_atol(p, options):
    """As for RFA; the error of a mean key is in the exponents, times a key."""
    units = 1 + exponent(p.q, p.k, longest_mean(p))
    return units * rfa_atol(p, {"omega": longest_mean(p)})


def is_atol(p, options):
    """As for RFA, times the estimated over the exact normaliser, whose exponents count too."""
    ones = np.ones_like(p.v[..., :1])
    ratio = naive.importance_sampled_attention(
        *map(p.wide, (p.q, p.k, ones)), **options, **p.options
    )
    norm_q, norm_k = (reference.norm(x) for x in (p.q, p.k))
    root = reference.root(None, p.q.shape[-1])
    extra = root**2 * norm_q * (norm_q / 2 + norm_k) + largest(options["log_weight"])
    units = 1 + exponent(p.q, p.k, options["omega"]) + extra
    return units * ratio * values_atol(p)


def trigonometric_atol(p, options):
    """Relative to the sums of absolute terms; infinite where the normaliser has no digits."""
    root = reference.root(None, p.q.shape[-1])
    q, k = root * p.wide(p.q), root * p.wide(p.k)
    omega = np.swapaxes(options["omega"].astype(np.float64), -1, -2)
    norms = np.sum(k * k, -1)[..., None, :] / 2
    if np.max(norms) > 600:
        return np.inf
    if "bias" in options:
        n, m = p.q.shape[-2], p.k.shape[-2]
        lag = n - 1 + np.arange(m) - np.arange(n)[:, None]
        norms = norms + options["bias"][..., lag]
    size = np.where(p.visible, np.exp(norms), 0)
    angle = (q @ omega)[..., :, None, :] - (k @ omega)[..., None, :, :]
    weight = np.exp(options["log_weight"])
    total = np.abs(np.sum(size * np.sum(weight * np.cos(angle), -1), -1, keepdims=True))
    terms = np.sum(size, -1, keepdims=True) * np.sum(weight)
    seen = np.any(p.visible, -1, keepdims=True)
    unit = rfa_tolerance(p.q, p.k, options["omega"])
    lost = np.where(seen, unit * terms / np.where(seen, np.maximum(total, 1e-300), 1), 0)
    # |num/den - num'/den'| <= lost (|v| + |num/den|) / (1 - lost), |num/den| <= |v| terms/total
    return np.where(lost < 0.5, 2 * lost * (1 + lost / unit) * largest(p.v), np.inf)


def lara_atol(p, options):
    """Centres have exponents too; alpha cancels where it is near 0, its own size is the measure."""
    root = reference.root(None, p.q.shape[-1])
    centre = root * (reference.norm(p.q) + reference.norm(p.k))
    if "centres" in options:
        centre = reference.norm(options["centres"])
    omega = np.full((1, 1), centre) if isinstance(options["omega"], str) else options["omega"]
    units = 1 + exponent(p.q, p.k, omega)
    units += centre * reference.norm(omega) + centre**2
    if "query" in options["weighting"]:
        if isinstance(options["omega"], str):
            options = {**options, "omega": options["centres"]}
        units += (root * reference.norm(p.q)) ** 2
        units /= min(1.0, smallest_alpha(root * p.wide(p.q), **options))
    return units * values_atol(p)


def smallest_alpha(q, *, omega, centres, weighting, beta):
    """Smallest |B_s + beta (t_ic - mean_c t_ic)|, at the given centres."""
    (count, samples), n = (centres.shape[-2], omega.shape[-2]), q.shape[-2]
    own = np.arange(samples) // (samples // count)
    log_ratio = omega @ centres.T - np.sum(centres**2, -1) / 2
    share = np.exp(log_ratio - np.logaddexp.reduce(log_ratio, -1, keepdims=True))
    balance = np.take_along_axis(share, np.broadcast_to(own[:, None], (*share.shape[:-1], 1)), -1)
    chunk = np.arange(n) * count // n
    q_mean = np.stack([q[..., chunk == c, :].mean(-2) for c in range(count)], axis=-2)
    t = q @ np.swapaxes(q_mean, -1, -2)
    axis = -1 if weighting == "query" else -2
    t = np.exp(t - np.max(t, axis=axis, keepdims=True))
    t = t / t.sum(axis, keepdims=True)
    t = (t - t.mean(-1, keepdims=True))[..., own]
    return float(np.min(np.abs(balance[..., None, :, 0] + beta * t)))


def near_and_far_atol(p, options):
    """Exponents of queries and keys together, and of frequencies."""
    units = 1 + (reference.norm(p.q) + reference.norm(p.k)) ** 2
    if "omega" in options:
        means = isinstance(options["omega"], str)
        units += exponent(p.q, p.k, longest_mean(p) if means else options["omega"])
    return (units + largest(options.get("log_probability", 0))) * values_atol(p)


def coreset_atol(p, options):
    """Times the root of the condition of the kernel of the chosen keys."""
    chosen = p.wide(p.k)[..., options["indices"], :] / p.k.shape[-1] ** 0.25
    apart = np.linalg.norm(chosen[..., :, None, :] - chosen[..., None, :, :], axis=-1)
    condition = np.linalg.cond(np.exp(-(apart**2) / 2)) if chosen.size else np.ones(1)
    terms = len(options["indices"]) * largest(np.sqrt(condition))
    return 40 * terms * near_and_far_atol(p, options)


def second_order_atol(p, options):
    """Exponents have squares of scores, and values are multiplied by scores."""
    score = reference.norm(p.q) * reference.norm(p.k) * p.q.shape[-1] ** -0.5
    return (1 + score) ** 2 * near_and_far_atol(p, options)
