r"""EVA (Zheng et al., arXiv:2302.04542): a summary for each far chunk, and what it counts for.

Nothing is drawn: each summary is evaluated at the mean of the law of its frequency. The queries,
keys and values are those of a trained sentence encoder, and made ones whose sums are known.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import refattn
from refattn import eva_attention, second_order_attention, softmax_attention
from validation import plotting, suite

WINDOWS = (8, 16, 32)
ROUNDING = 1e-13  # relative to the values; a formula that differs is above 1e-2 here


def tasks(level: str) -> suite.Tasks:
    """The same at each level."""
    return [{}]


def run(rng: np.random.Generator) -> dict[str, Any]:
    """Relative errors on the tensors by window, and the largest ones on made keys."""
    q, k, v = (x.astype(np.float64) for x in refattn.load_sample())
    exact = softmax_attention(q, k, v)
    errors: dict[str, list[float]] = {"with its size": [], "as printed": [], "second order": []}
    for window in WINDOWS:
        for name, out in _estimates(q, k, v, window).items():
            errors[name].append(relative_error(out, exact))
    return {"errors": errors, "equal": _equal_keys(rng), "limits": _limits(q, k, v)}


def _estimates(q: Any, k: Any, v: Any, window: int) -> dict[str, Any]:
    return {
        "with its size": eva_attention(q, k, v, window=window, omega="mean"),
        "as printed": eva_attention(q, k, v, window=window, omega="mean", log_size=False),
        "second order": second_order_attention(q, k, v, window=window),
    }


def relative_error(out: Any, exact: Any) -> float:
    """Mean over the heads."""
    norm = np.linalg.norm
    return float(np.mean(norm(out - exact, axis=(-2, -1)) / norm(exact, axis=(-2, -1))))


def _equal_keys(rng: np.random.Generator) -> dict[str, float]:
    """Keys that are the same within each chunk, with values that differ."""
    q, v = rng.standard_normal((64, 4)), rng.standard_normal((64, 3))
    k = np.repeat(rng.standard_normal((8, 4)), 8, axis=0)
    exact = softmax_attention(q, k, v)
    return {name: float(np.abs(out - exact).max()) for name, out in _estimates(q, k, v, 8).items()}


def _limits(q: Any, k: Any, v: Any) -> dict[str, float]:
    """One chunk of all tokens, and one of each."""
    exact, found = softmax_attention(q, k, v), dict[str, float]()
    for window in (1, q.shape[-2]):
        for name, out in _estimates(q, k, v, window).items():
            found[name] = max(found.get(name, 0.0), float(np.abs(out - exact).max()))
    return found


def judge(results: suite.Results) -> suite.Findings:
    """Errors side by side."""
    ((errors, equal, limits),) = ((r["errors"], r["equal"], r["limits"]) for r in results)

    def below(name: str, other: str) -> list[Any]:
        rows = zip(WINDOWS, errors[name], errors[other], strict=True)
        return [suite.Compared(f"windows of {window}", a, b) for window, a, b in rows]

    evidence: suite.Evidence = {
        "as accurate": below("as printed", "with its size"),
        "size": below("with its size", "as printed"),
        "second order": below("second order", "with its size"),
        "equal keys": [suite.Compared("as printed", equal["as printed"], ROUNDING)],
        "equal keys, size": [
            suite.Compared(name, equal[name], ROUNDING)
            for name in ("with its size", "second order")
        ],
        "limits": [suite.Compared(name, x, 100 * ROUNDING) for name, x in limits.items()],
    }
    texts = "; ".join(
        f"{name}: {', '.join(f'{x:.2f}' for x in found)}" for name, found in errors.items()
    )
    remark = f"Relative errors on the tensors with windows of {WINDOWS}: {texts}."
    return suite.Findings(evidence, {"errors": errors}, remark)


def over_windows(axes: Any, top: float | None) -> None:
    """Label axes of errors against the window."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(WINDOWS, [str(x) for x in WINDOWS])
    axes.set(xlabel="window, keys", ylabel="relative error", ylim=(0, top))


def plot(data: dict[str, Any]) -> Any:
    """Error against the window."""
    figure, ((axes,),) = plotting.panels(size=(5.0, 3.0))
    labels = []
    for i, (name, errors) in enumerate(data["errors"].items()):
        drawn = plotting.mark(i)
        axes.plot(WINDOWS, errors, **drawn)
        labels.append(plotting.Label(name, (WINDOWS[-1], errors[-1]), drawn))
    over_windows(axes, None)
    plotting.beside({axes: labels})
    return figure


def plot_windows(data: dict[str, Any]) -> Any:
    """Relative error on trained tensors."""
    figure, axes = plotting.small()
    for name, colour in (("with its size", 0), ("as printed", 1)):
        axes.plot(WINDOWS, data["errors"][name], "o-", color=plotting.COLOURS[colour], label=name)
    over_windows(axes, 1)
    plotting.key(axes, loc="lower left")
    return figure
