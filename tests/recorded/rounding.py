"""What is known of errors, in formats so coarse that every term of a formula counts."""

import numpy as np

from refattn import features
from refattn.judge.rounding.covariance import variance_along
from refattn.judge.rounding.formats import FORMATS
from refattn.judge.rounding.problems import pose_arrays, pose_gradients
from refattn.judge.rounding.roundings import sum_error, walk
from tests.recorded.problems import KERNELS, OPTIONS, PLAIN, draw, qkv, seen

CHANGES = {"scale": lambda head, tile, i: tile.logits * tile.slope}


def output():
    for name, (sizes, options) in OPTIONS.items():
        q, k, v = qkv(**sizes)
        problem = pose_arrays(q, k, v, **options)
        for kernel, roundings in KERNELS.items():
            for index in np.ndindex(problem.lead):
                i = slice(len(q[index]) // 4, q.shape[-2])
                rows = problem.analyse(index, roundings, i, CHANGES)
                if kernel == "double":  # whether errors have a law depends on the last digits
                    rows = rows._replace(std=0.0, worst=0.0)
                yield f"{name}, {kernel}, {index}", rows


def gradients():
    yield from gradients_of(*[*OPTIONS][:6])


def more_gradients():
    yield from gradients_of("all", "many keys", "small", "large", "equal", "one key", "wide")


def gradients_of(*names):
    for name in names:
        sizes, options = OPTIONS[name]
        q, k, v = qkv(**sizes)
        problem = pose_arrays(q, k, v, **options)
        d_out = draw(6, *problem.lead, *q.shape[-2:-1], v.shape[-1])
        d_out[..., 1, :] = 2 * d_out[..., 0, :]
        outs = {"no out": None, "out": draw(7, *d_out.shape).__getitem__}
        shapes = {"dq": q.shape, "dk": k.shape, "dv": v.shape}
        for kernel, roundings in [*KERNELS.items()][:-1]:
            for out in [*outs][: 1 + roundings.delta_of_out]:
                posed = pose_gradients(problem, shapes, d_out.__getitem__, outs[out], "float64")
                for of, one in posed.items():
                    yield from gradient(f"{name}, {kernel}, {out}, {of}", one, roundings)


def gradient(place, one, roundings):
    index, i, of = (0,) * len(one.lead), slice(0, one.shape[0]), one.gradient.of
    rows = one.analyse(index, roundings, i)
    # Numbers of few digits are half-way between two but for the last digits of sums.
    yield place, rows._replace(nearest=0.0) if roundings.kept else rows
    yield f"{place}, exact", one.exact(index, roundings, i)
    yield f"{place}, sources", one.list_sources(index, roundings, i)
    yield f"{place}, apart", one.rows_apart(roundings)
    if of != "dq":
        saved, w = one.gradient.saved(index, roundings), draw(8, *rows.out.shape)
        yield f"{place}, along", variance_along(saved, roundings, of, w)


def features_of_heads():
    q, k, v = qkv(n=12, m=10)
    omega, log_weight = draw(6, 5, 4, size=0.5), draw(7, 5, size=0.25)
    for name, options in {
        "positive": {"omega": omega, "log_weight": log_weight, "scale": 0.5},
        "hyperbolic": {"omega": omega, "features": "hyperbolic", "causal": True},
        "map": {"feature_map": features.elu_features, "mask": seen(1, 10)},
        "causal map": {"feature_map": lambda x: np.maximum(x, 0.0), "causal": True},
        "masked": {"omega": omega, "mask": seen(1, 10), "causal": True},
    }.items():
        problem = pose_arrays(q, k, v, **options)
        for kernel, roundings in KERNELS.items():
            yield f"{name}, {kernel}", problem.analyse((), roundings, slice(1, 12))


def formats():
    x = np.array(
        [0.0, 1.0, -1.5, 3e-5, 1e-7, 1e-41, 65504.0, 65520.0, 447.0, 470.0, 3e38, -3.39e38]
    )
    for name, to in FORMATS.items():
        yield name, [to, to.spacing(x), to.round(x), to.holds(x)]
    for number, (run, lanes) in enumerate([(256, 1), (16, 4), (2**40, 3)]):
        kernel = PLAIN._replace(run=run, lanes=lanes)
        yield f"sums {number}", [sum_error(kernel, x, 2) for x in (1, 20, 300, 10**5)]
        yield f"walk {number}", [walk(0.5, y, 9.0, 7, lanes) for y in (0.25, -3.0, 40.0)]
