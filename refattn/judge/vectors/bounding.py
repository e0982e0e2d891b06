"""Compute the condition and the sizes that errors of the outputs of a case are relative to."""

from __future__ import annotations

from typing import Any

import numpy as np

from ... import registry
from ...arrays.library import Floats
from .cases import Case
from .drawing import Recipe
from .formulas import (
    HeadArrays,
    case_pullback,
    has_chunks,
    heads_of_case,
    truth,
    value_of,
    with_lse,
)


def bounds(case: Recipe | Case, values: dict[str, Floats]) -> tuple[float, dict[str, Floats]]:
    """Return the largest exponent and what errors are relative to: the accuracy contract.

    `values` are those of the outputs.
    """
    x, features = case.inputs, case.arguments.get("features")
    record, mp = registry.ESTIMATORS[case.estimator], truth().context()
    if record.has("rows"):
        rows, mean, cov = truth().numbers(x["x"]), values["mean"], values["cov"]
        sd = np.array([mp.sqrt(cov[i, i]) for i in range(len(mean))], dtype=object)
        z = abs(rows[0] - mean) / np.where(sd == 0, 1, sd)
        return _round_up(max(z)), {
            "mean": _round_all_up(abs(mean) + sd),
            "cov": _round_all_up(np.outer(sd, sd)),
        }
    if record.has("pairs"):
        want = abs(values["out"])
        long_x, long_y, long_omega = (_longest_row(x[name]) for name in ("x", "y", "omega"))
        cond = long_omega * (long_x + long_y) + (long_x**2 + long_y**2) / 2
        if features == "trigonometric":
            squares = sum((truth().numbers(x[name]) ** 2).sum(-1) for name in "xy")
            want = np.array([mp.exp(s / 2) for s in squares], dtype=object)
        if "log_weight" in x:
            cond += max(abs(truth().numbers(x["log_weight"])))
        return _round_up(cond), {"out": _round_all_up(want)}
    conds, rows = zip(*(_bound_head(case, head) for head in heads_of_case(case)), strict=True)
    size = {"out": np.reshape(rows, (*x["q"].shape[:-1], 1))}
    if "d_out" in x:
        terms = case_pullback(case, 50, absolute=True)[1]
        size |= {name: _of_rows(name, x) for name, x in terms.items()}
    if features != "trigonometric":
        size = {name: _largest_size(rows, name) for name, rows in size.items()}
    if with_lse(case):
        base = mp.log(2) if value_of(case, "lse") == "2" else mp.mpf(1)
        size["lse"] = np.array(1 / base, dtype=object)
    return _round_up(max(conds)), {name: _round_all_up(rows) for name, rows in size.items()}


def _root_of_case(case: Recipe | Case, head: HeadArrays) -> Any:
    """Return the square root of the scale."""
    scales = {"1": 1.0, "1/d": 1 / head.q.shape[-1]}
    scale = scales.get(value_of(case, "default_scale"), case.arguments.get("scale"))
    return _root(scale, head.q.shape[-1])


def _root(scale: Any, d: int) -> Any:
    """Return the square root of a scale, 1/sqrt(d) by default."""
    mp = truth().context()
    return mp.sqrt(1 / mp.sqrt(d) if scale is None else mp.mpf(scale))


def _trigonometric(x: Floats, omega: Floats, root: Any) -> Floats:
    """Evaluate trigonometric features (n, 2 S)."""
    xp, x = truth().formulas().xp, truth().numbers(x) * root
    z = x @ truth().numbers(omega).T
    waves = np.concatenate([xp.cos(z), xp.sin(z)], axis=1)
    return np.asarray(xp.exp((x * x).sum(-1)[:, None] / 2) * waves)


def _largest_size(rows: Floats, name: str) -> Floats:
    """Return the largest size for all; gradients that nothing moves are exactly 0."""
    if name == "out":
        return np.array(np.max(rows), dtype=object)
    return np.where(rows == 0, 0, np.max(rows))


def _bound_head(case: Recipe | Case, head: HeadArrays) -> tuple[Any, Floats]:
    """Bound the exponent of one head and size each row, over keys that are seen."""
    mp, features = truth(), case.arguments.get("features")
    seen = head.visible.any(0) | (value_of(case, "empty_rows") == "mean")
    q, k, v, visible = head.q, head.k[seen], head.v[seen], head.visible[:, seen]
    root = _root_of_case(case, head)
    a, b, size = _longest_row(q) * root, _longest_row(k) * root, _longest_row(v)
    if head.dropout is not None:
        size *= np.max(head.dropout)
    cond, rows = a * b, [size] * len(q)
    cond += (
        max(abs(truth().numbers(head.bias[head.visible])), default=0) if np.ndim(head.bias) else 0
    )
    cond += 0 if head.sinks is None else abs(mp.numbers(head.sinks)[()])
    if registry.ESTIMATORS[case.estimator].has("feature-map"):
        cond = max(_longest_row(q), _longest_row(k))
    elif _has_few_keys(case):
        cond, grown = _bound_few_keys(case, head, a, b)
        rows = [size * grown] * len(q)
    elif head.omega is not None:
        w = _longest_row(head.omega)
        cond = max(w * a, w * b + b**2 / 2) + np.max(abs(mp.numbers(head.log_weight)))
        if head.centres is not None:
            cond += _longest_row(head.centres) * w + _longest_row(head.centres) ** 2
        if features == "trigonometric":
            cond = w * (a + b) + (a**2 + b**2) / 2
            phi = [_trigonometric(x, head.omega, root) for x in (q, k)]
            terms, kernel = abs(phi[0]) @ abs(phi[1]).T, phi[0] @ phi[1].T
            rows = [
                size * terms[i, see].sum() / abs(kernel[i, see].sum()) if see.any() else size
                for i, see in enumerate(visible)
            ]
    return cond, np.array(rows, dtype=object)


def _has_few_keys(case: Recipe | Case) -> bool:
    """Return whether few keys stand for all, or something for those outside a window or chunk."""
    hides = registry.ESTIMATORS[case.estimator].takes("window")  # what is outside is not seen
    return "indices" in case.inputs or ("window" in case.arguments and not hides)


def _bound_few_keys(case: Recipe | Case, head: HeadArrays, a: Any, b: Any) -> tuple[Any, Any]:
    """Bound the exponent, and what size grows by, for few keys or summaries.

    `a` and `b` are the largest lengths of queries and keys.
    """
    mp, positive = truth().context(), registry.ESTIMATORS[case.estimator].has("nonnegative")
    if "log_probability" in case.inputs:
        return a * b + np.max(abs(truth().numbers(head.log_probability))), 1
    if "indices" in case.inputs:  # keys less their mean are at most twice as long
        return 2 * b * (a + b), _terms_of_coreset(case, head)
    if has_chunks(case):
        near = a * b + mp.log(len(head.k))
        if not positive:  # the spread of a chunk along a query is at most b
            return near + (a * b) ** 2, 1 + a * b
        w = a + b if head.omega is None else _longest_row(head.omega)
        return max(near, w * b + b * b / 2), 1
    assert head.omega is not None
    return _longest_row(head.omega) * (a + b) + (a * a + b * b) / 2, 1


def _terms_of_coreset(case: Recipe | Case, head: HeadArrays) -> Any:
    """Sum of the absolute terms over the normaliser, times the condition of what is solved."""
    mp, exp, seen = truth().context(), truth().formulas().xp.exp, head.visible[-1]
    q, k = (truth().numbers(x) * _root_of_case(case, head) for x in (head.q, head.k))
    k = k - k[seen].sum(0) / int(seen.sum())
    chosen = k[[j for j in head.indices if seen[j]]]
    to_chosen = mp.inverse(mp.matrix(exp(chosen @ chosen.T).tolist()))
    weights = np.array(to_chosen.tolist(), dtype=object) @ exp(chosen @ k[seen].T)
    kernel = exp(q @ chosen.T)
    terms = (kernel @ abs(weights).sum(1)) / abs((kernel @ weights).sum(1))
    apart = ((chosen[:, None] - chosen) ** 2).sum(-1)
    gram = mp.matrix(exp(-apart / 2).tolist())
    return max(terms) * mp.mnorm(gram, "F") * mp.mnorm(mp.inverse(gram), "F")


def _of_rows(name: str, terms: Floats) -> Floats:
    """Return the largest of each row of tokens or samples."""
    alone = name in ("d_bias", "d_sinks", "d_log_weight")
    return terms if alone else np.max(terms, axis=-1, keepdims=True)


def _longest_row(x: Floats) -> Any:
    return truth().context().sqrt(max((truth().numbers(x) ** 2).sum(-1).ravel(), default=0))


def _round_up(x: Any) -> float:
    """Round up to three digits."""
    return float(f"{float(x) * 1.01:.3g}")


def _round_all_up(x: Floats) -> Floats:
    return np.array([_round_up(e) for e in x.ravel()]).reshape(x.shape)
