r"""Theorem 1 of reference 000: random features of the general form, and kernels that they give.

.. math::
    \xi(x) = \frac{h(x)}{\sqrt m} [f_1(\omega_1 \cdot x), \ldots, f_l(\omega_m \cdot x)], \qquad
    \kappa(x, y) = E \, \xi(x) \cdot \xi(y)

with h = exp(-|x|^2/2) and f = exp for exp(x . y). Elementwise powers in place of tensor powers in
the map without randomness give 1 + sum_i (exp(x_i y_i) - 1).
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import numpy as np

from refattn import features, kernels, sampling
from refattn.typing import Features
from validation import plotting, suite

PAIRS = {"tiny": 5, "quick": 200, "full": 2000}
DEGREES = {2: 20, 3: 16, 8: 6}  # of the Taylor series, by d
NODES = 64
COUNT = 16  # frequencies
SHIFTS = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0)
EPS = float(np.finfo(float).eps)


def half_square(x: Any) -> Any:
    """log h for trigonometric features, and less it for positive ones."""
    return np.sum(x * x, -1) / 2


FORMS: dict[Features, tuple[Any, Any]] = {  # f_1, ..., f_l and log h
    "positive": ((np.exp,), lambda x: -half_square(x)),
    "hyperbolic": ((np.exp, lambda u: np.exp(-u)), lambda x: -half_square(x) - math.log(2) / 2),
    "trigonometric": ((np.cos, np.sin), half_square),
}


def elementwise(x: Any, degree: int) -> Any:
    """The feature map read with elementwise powers: 1, x, x^2 / sqrt(2!), ..."""
    powers = [x**n / math.sqrt(math.factorial(n)) for n in range(1, degree + 1)]
    return np.concatenate([np.ones_like(x[..., :1]), *powers], axis=-1)


def tasks(level: str) -> suite.Tasks:
    """Pairs of vectors in each dimension."""
    return [{"d": d, "pairs": PAIRS[level]} for d in DEGREES]


def run(rng: np.random.Generator, d: int, pairs: int) -> dict[str, Any]:
    """Errors of each identity, in units of rounding, over random pairs of vectors."""
    x, y = rng.standard_normal((2, pairs, d)) / math.sqrt(d)
    omega = sampling.draw(pairs * COUNT, d, rng=rng).omega.reshape(pairs, COUNT, d)
    both = np.stack([x, y], 1)
    half = np.sum(both * both, (1, 2)) / 2
    size = 1 + half + np.max(np.sum(np.abs(omega @ np.swapaxes(both, 1, 2)), -1), -1)
    found: dict[str, Any] = {"d": d, "form": {}, "mean": {}}
    for name, (functions, log_h) in FORMS.items():
        phi = features.random_features(both, omega, functions, log_h=log_h)
        values = np.exp(phi.log_scale[..., None]) * phi.values
        own = getattr(features, f"{name}_features")(both, omega)
        own = np.exp(own.log_scale[..., None]) * own.values
        # Cosines cancel: errors are relative to what is added up.
        scale = np.sum(np.abs(values[:, 0] * values[:, 1]), -1)
        estimate = kernels.estimate(x, y, omega, features=name)
        error = np.abs(np.sum(values[:, 0] * values[:, 1], -1) - estimate) / scale / size
        maps = np.abs(own - values) / np.max(np.abs(values), -1, keepdims=True)
        found["form"][name] = float(max(error.max(), (maps.max((1, 2)) / size).max())) / EPS
        found["mean"][name] = quadrature(x, y, functions, log_h, kernels.softmax_kernel)
    waves = (np.cos, np.sin)
    found["gaussian"] = quadrature(x, y, waves, None, kernels.gaussian_kernel)
    shift = rng.standard_normal((pairs, d)) / math.sqrt(d)
    found["shift"] = moved(kernels.softmax_kernel, x, y, shift)
    found["gaussian_shift"] = moved(kernels.gaussian_kernel, x, y, shift)
    degree, t = DEGREES[d], np.sum(x * y, -1)
    kernel, most = kernels.softmax_kernel(x, y), np.exp(np.sum(np.abs(x * y), -1))
    plain = np.sum(elementwise(x, degree) * elementwise(y, degree), -1)
    # What the series leaves out, and rounding of terms that add up to exp(sum |x_i y_i|).
    allowed = remainder(np.sum(np.abs(x * y), -1), degree) + 16 * EPS * most
    found["elementwise"] = float(np.max(np.abs(plain - kernel) / allowed))
    found["tensor"] = max(
        float(np.max(np.abs(taylor(both, p) - kernel) / (remainder(t, p) + 16 * EPS * most)))
        for p in range(degree + 1)
    )
    return found


def quadrature(x: Any, y: Any, functions: Any, log_h: Any, kernel: Any) -> float:
    """Largest error of means over frequencies in the plane of a pair, by Gauss and Hermite.

    The features of one pair depend on no other part of omega. Ten pairs are enough.
    """
    nodes, weights = np.polynomial.hermite_e.hermegauss(NODES)
    grid = np.stack(np.meshgrid(nodes, nodes, indexing="ij"), -1).reshape(-1, 2)
    weight = np.outer(weights, weights).ravel() / (2 * math.pi)
    errors = []
    for pair in np.stack([x, y], 1)[:10]:
        omega = grid @ np.linalg.qr(pair.T)[0].T
        both = np.broadcast_to(pair, (len(grid), *pair.shape))
        phi = features.random_features(both, omega[:, None], functions, log_h=log_h)
        products = inner(phi)
        size = np.sum(weight * np.abs(products)) * (1 + pair[0] @ pair[0] + pair[1] @ pair[1])
        errors.append(float(np.abs(weight @ products - kernel(*pair)) / size) / EPS)
    return max(errors)


def inner(phi: features.Features) -> Any:
    """Inner products of the features of pairs."""
    return np.exp(np.sum(phi.log_scale, -1)) * np.sum(phi.values[:, 0] * phi.values[:, 1], -1)


def moved(kernel: Any, x: Any, y: Any, shift: Any) -> float:
    """Change of the logarithm of a kernel as both vectors move, in units of rounding."""
    change = np.log(kernel(x + shift, y + shift)) - np.log(kernel(x, y))
    size = 1 + sum(np.sum(v * v, -1) for v in (x, y, shift))
    return float(np.max(np.abs(change) / size)) / EPS


def taylor(both: Any, degree: int) -> Any:
    """Inner products of pairs by tensor powers, as far as the degree."""
    return inner(features.taylor_features(both, degree=degree))


def remainder(t: Any, degree: int) -> Any:
    """Bound on what the series of exp(t) leaves out after a degree, by Lagrange."""
    power = np.abs(t) ** (degree + 1) / math.factorial(degree + 1)
    return power * np.exp(np.maximum(t, 0))


def judge(results: suite.Results) -> suite.Findings:
    """Identities and integrals within rounding; elementwise powers and shifts are not."""
    unit, sums = "eps (1 + exponents)", "eps (1 + |x|^2 + |y|^2)"
    lagrange = (1.0, "bounds on the remainder")
    evidence: suite.Evidence = defaultdict(list)
    for r in results:
        d = f"d = {r['d']}"
        moved = f"{d}, log kernel moved"
        for name in FORMS:
            evidence["general form" if name == "positive" else "other features"] += [
                suite.Compared(f"{d}, {name}, every omega", r["form"][name], 8, unit),
                suite.Compared(f"{d}, {name}, mean", r["mean"][name], 32, sums),
            ]
        evidence["stationary"].append(suite.Compared(moved, r["shift"], 16, sums))
        evidence["Bochner"] += [
            suite.Compared(moved, r["gaussian_shift"], 16, sums),
            suite.Compared(f"{d}, mean of cosines and sines", r["gaussian"], 32, sums),
        ]
        error = suite.Compared(f"{d}, error", r["elementwise"], *lagrange)
        evidence["elementwise powers"].append(error)
        # The bound is attained as x . y tends to 0, so that the largest ratio is near 1.
        tight = f"{d}, error (near the bound for small x . y)"
        evidence["tensor powers"].append(suite.Compared(tight, r["tensor"], *lagrange))
    data = _figure()
    remark = (
        r"The general form gives $e^{x \cdot y}$, for which Theorem 1 is used though it is not "
        f"stationary: moving x = y = 0 by a vector of length {SHIFTS[-1]:g} multiplies it by "
        f"{data['softmax'][-1]:.0f}. Read elementwise, the map of powers gives "
        f"{data['elementwise'][-1]:.2f} for x = y = (1, 1), in place of $e^2$ = {math.exp(2):.2f}, "
        "which tensor powers give."
    )
    return suite.Findings(evidence, data, remark)


def _figure() -> dict[str, Any]:
    """Inner products for x = y = (1, 1) by degree, and kernels at x = y = c by the length of c."""
    one = np.ones((1, 2))
    degrees = list(range(16))
    both = np.stack([one, one], 1)
    c = np.outer(SHIFTS, np.array([0.6, 0.8]))
    return {
        "degrees": degrees,
        "tensor": [float(taylor(both, p)[0]) for p in degrees],
        "elementwise": [float(np.sum(elementwise(one, p) ** 2)) for p in degrees],
        "remainder": [float(remainder(2.0, p)) for p in degrees],
        "shifts": list(SHIFTS),
        "softmax": kernels.softmax_kernel(c, c).tolist(),
        "gaussian": kernels.gaussian_kernel(c, c).tolist(),
    }


def plot(data: dict[str, Any]) -> Any:
    """Errors of both maps by degree; kernels as both vectors move."""
    figure, ((left, right),) = plotting.panels(1, 2, size=(8.4, 3.6))
    for name, style in (("elementwise", "s-"), ("tensor", "o")):
        errors = np.abs(np.array(data[name]) - math.exp(2))
        left.plot(data["degrees"], np.maximum(errors, 1e-16), style, label=f"{name} powers")
    bound: dict[str, Any] = {"color": plotting.COLOURS[1], "label": "remainder's bound"}
    left.plot(data["degrees"], data["remainder"], **bound)
    left.set(yscale="log", xlabel="degree", ylabel="error for x = y = (1, 1)")
    left.legend()
    right.plot(data["shifts"], data["softmax"], "o-", label="exp(x . y)")
    right.plot(data["shifts"], data["gaussian"], "s-", label="exp(-|x - y|^2 / 2)")
    right.set(yscale="log", xlabel="|c|", ylabel="kernel at x = y = c")
    right.legend()
    return figure
