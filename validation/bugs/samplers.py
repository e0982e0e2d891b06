"""Random features outside attention: py_rff, scikit-learn."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..benchmarks.peers import load
from .record import Floats, Number, real

_SETS = 4000


def _rff() -> tuple[Number, ...]:
    draw, d = load("PyRFF.main", "py_rff").get_orf_matrix, 32
    state = np.random.get_state()  # noqa: NPY002  # that of NumPy is all that it draws from
    np.random.seed(0)  # noqa: NPY002
    omega = np.stack([draw(d, d, 1.0) for _ in range(_SETS)])  # frequencies are columns
    np.random.set_state(state)  # noqa: NPY002
    lengths = np.linalg.norm(omega, axis=-2)
    cosine = np.abs((omega[..., 0] * omega[..., 1]).sum(axis=-1) / lengths[:, 0] / lengths[:, 1])
    keys = real()[1][0, 0].astype(float)
    x = (keys[0] - keys[1]) * 1.5 / np.linalg.norm(keys[0] - keys[1])
    estimates = np.cos(x @ omega).mean(axis=-1)
    truth, step = np.exp(-(x @ x) / 2), float(estimates.std()) * _SETS**-0.5
    return (
        Number(
            "relative bias (absolute value) of estimates of the Gaussian kernel; x - y between two "
            f"keys of the real tensors, rescaled to length 1.5, {_SETS} sets",
            abs(float(estimates.mean() / truth) - 1),
            f"0 ± {step / truth:.2g} (standard error)",
            6 * step / truth,
        ),
        Number(
            "mean cosine of the angle of two frequencies of a set, in absolute value, d = 32",
            float(cosine.mean()),
            "0: they are orthogonal",
            1e-6,
        ),
        Number(
            "variance of the squared length of a frequency, divided by 2 d",
            float((lengths**2).var() / (2 * d)),
            "1, as for chi-squared with d degrees of freedom",
        ),
    )


def _estimates(make: Any, x: Floats, seeds: int = 2000) -> Floats:
    products = []
    for seed in range(seeds):
        z = make(seed).fit_transform(x)
        products.append(z[0] @ z[1])
    return np.asarray(products)


def _scikit_learn() -> tuple[Number, ...]:
    package = load("sklearn.kernel_approximation", "scikit-learn")
    x = real()[1][0, 0, :2].astype(float) / 4
    y = np.abs(x)
    ratio = 4 * (y[0] + 1) * (y[1] + 1) / (y[0] + y[1] + 2) ** 2
    cases = (
        (
            "RBFSampler",
            lambda seed: package.RBFSampler(gamma=0.5, n_components=64, random_state=seed),
            x,
            np.exp(-((x[0] - x[1]) ** 2).sum() / 2),
        ),
        (
            "SkewedChi2Sampler",
            lambda seed: package.SkewedChi2Sampler(
                skewedness=1.0, n_components=64, random_state=seed
            ),
            y,
            np.sqrt(ratio).prod(),
        ),
        (
            "PolynomialCountSketch",
            lambda seed: package.PolynomialCountSketch(
                degree=2, coef0=1, n_components=64, random_state=seed
            ),
            x,
            (x[0] @ x[1] + 1) ** 2,
        ),
    )
    numbers = []
    for name, make, inputs, truth in cases:
        found = _estimates(make, inputs)
        step = float(found.std()) * len(found) ** -0.5
        numbers.append(
            Number(
                f"{name}: mean estimate minus its kernel, in standard errors, 2000 seeds, two keys "
                "of the real tensors",
                abs(float(found.mean()) - float(truth)) / step,
                "below 6",
                6.0,
            )
        )
    z = package.Nystroem(gamma=0.5, n_components=128, random_state=0).fit_transform(
        real()[1][0, 0] / 4
    )
    keys = real()[1][0, 0].astype(float) / 4
    squares = ((keys[:, None] - keys) ** 2).sum(axis=-1)
    numbers.append(
        Number(
            "Nystroem with all points as components: largest error of the kernel",
            float(np.abs(z @ z.T - np.exp(-squares / 2)).max()),
            "below 1e-3, in single precision",
            1e-3,
        )
    )
    return tuple(numbers)
