r"""A few keys in place of all: coresets (arXiv:2602.10056), samples, landmarks.

A trial is one draw of keys or frequencies for each estimator on the queries, keys and values of a
trained sentence encoder; trials are independent, and an error is the mean over the heads.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

import refattn
from refattn import coreset_attention, sampled_key_attention, softmax_attention
from refattn.estimators import key_sampling
from refattn.typing import KEY_LAWS
from validation import plotting, suite
from validation.claims.chunk_summaries import relative_error

TRIALS = {"tiny": 2, "quick": 40, "full": 60}
CHUNK = 10
KEYS = 32
LANDMARKS = (8, 16, 32)


def tasks(level: str) -> suite.Tasks:
    """Trials in chunks."""
    chunk = min(CHUNK, TRIALS[level])
    return [{"trials": chunk}] * (TRIALS[level] // chunk)


@cache
def tensors() -> tuple[Any, ...]:
    """Queries, keys, values and exact attention."""
    q, k, v = (x.astype(np.float64) for x in refattn.load_sample())
    return q, k, v, softmax_attention(q, k, v)


def run(rng: np.random.Generator, trials: int) -> list[dict[str, float]]:
    """Errors by estimator, one of each for each trial."""
    q, k, v, exact = tensors()
    found = []
    for _ in range(trials):
        seeds = iter(rng.integers(2**32, size=6))
        outs: dict[str, Any] = {
            pivots: coreset_attention(q, k, v, num_keys=KEYS, pivots=pivots, rng=int(next(seeds)))
            for pivots in key_sampling.PIVOTS
        }
        samples = {
            law: key_sampling.draw_keys(q, k, v, num_keys=KEYS, law=law, rng=int(next(seeds)))
            for law in KEY_LAWS
        }
        for law, drawn in samples.items():
            outs[law] = sampled_key_attention(q, k, v, **drawn._asdict())
        outs["ra"] = refattn.randomized_attention(q, k, v, num_samples=KEYS, rng=int(next(seeds)))
        indices = key_sampling.draw_pivots(k, num_keys=KEYS, rng=rng)
        outs["centred"] = coreset_attention(q, k, v, indices=indices)
        outs["as they are"] = _coreset_as_they_are(q, k, v, indices)
        centred = _coreset_as_they_are(q, k - k.mean(-2, keepdims=True), v, indices)
        errors = {name: relative_error(out, exact) for name, out in outs.items()}
        errors["formula of a coreset"] = relative_error(outs["centred"], centred)
        sample = _of_sample(q, k, v, *samples["norms"])
        errors["formula of samples"] = relative_error(outs["norms"], sample)
        found.append(errors)
    return found


def _coreset_as_they_are(q: Any, k: Any, v: Any, indices: Any) -> Any:
    """The coreset of keys that are not centred: sum_s e^(q . k_s) (W v)_s over that of (W 1)_s."""
    root = k.shape[-1] ** -0.25
    q, k = root * q, root * k
    chosen = np.take_along_axis(k, indices[..., None], axis=-2)
    half, half_chosen = (np.sum(x * x, -1)[..., None, :] / 2 for x in (k, chosen))
    rows = np.swapaxes(half_chosen, -1, -2)
    gram, to_keys = (
        np.exp(chosen @ np.swapaxes(x, -1, -2) - rows - y)
        for x, y in ((chosen, half_chosen), (k, half))
    )
    size = np.exp(half - half.max(-1, keepdims=True))
    carried = np.linalg.solve(gram, to_keys * size) @ np.concatenate([v, 0 * v[..., :1] + 1], -1)
    scores = q @ np.swapaxes(chosen, -1, -2) - half_chosen
    terms = np.exp(scores - scores.max(-1, keepdims=True)) @ carried
    return terms[..., :-1] / terms[..., -1:]


def _of_sample(q: Any, k: Any, v: Any, indices: Any, log_probability: Any) -> Any:
    """Softmax attention to a sample of keys, each divided by its probability."""
    k, v = (np.take_along_axis(x, indices[..., None], axis=-2) for x in (k, v))
    return softmax_attention(q, k, v, bias=-log_probability[..., None, :])


def _landmarks(q: Any, k: Any, v: Any, count: int) -> Any:
    """Nystrom attention: softmax of queries and landmarks, a pseudo-inverse, and softmax of keys.

    Xiong et al., arXiv:2102.03902, with landmarks that are means of segments.
    """
    scale = q.shape[-1] ** -0.5
    means = [x.reshape(*x.shape[:-2], count, -1, x.shape[-1]).mean(-2) for x in (q, k)]

    def weights(x: Any, y: Any) -> Any:
        return softmax_attention(x, y, np.eye(y.shape[-2]), scale=scale)

    middle = np.linalg.pinv(weights(*means))
    return weights(q, means[1]) @ (middle @ softmax_attention(means[0], k, v, scale=scale))


def judge(results: suite.Results) -> suite.Findings:
    """Sign tests over trials, and errors of landmarks, in which nothing is random."""
    q, k, v, exact = tensors()
    trials = [one for result in results for one in result]
    error = {name: np.array([one[name] for one in trials]) for name in trials[0]}
    identities = {name: error.pop(name) for name in [*error] if name.startswith("formula")}
    landmarks = {n: relative_error(_landmarks(q, k, v, n), exact) for n in LANDMARKS}
    nothing = relative_error(np.broadcast_to(v.mean(-2, keepdims=True), v.shape), exact)
    evidence: suite.Evidence = {
        "centred": [suite.more_often("centred", error["centred"] < error["as they are"])],
        "coreset": [
            suite.more_often(f"below {law}", error["gaussian"] < error[law])
            for law in ("uniform", "norms")
        ],
        "RA": [suite.more_often("ra below softmax", error["ra"] < error["softmax"])],
        "formulas": [suite.Compared(n, float(np.max(x)), 1e-6) for n, x in identities.items()],
        "landmarks": [suite.Compared(f"{n} landmarks", x, nothing) for n, x in landmarks.items()],
    }
    means = ", ".join(f"{np.mean(x):.2f} ({name})" for name, x in error.items())
    printed = ", ".join(f"{x:.2f} ({n})" for n, x in landmarks.items())
    remark = (
        f"Mean relative errors at S = {KEYS}: {means}. Nystrom attention: {printed}, where the "
        f"mean of the values has {nothing:.2f}."
    )
    return suite.Findings(evidence, {"error": {n: x.tolist() for n, x in error.items()}}, remark)


def plot(data: dict[str, Any]) -> Any:
    """Errors of all trials by estimator."""
    figure, ((axes,),) = plotting.panels(size=(6.0, 3.0))
    for i, values in enumerate(data["error"].values()):
        axes.plot(values, np.full(len(values), i), "|", markersize=9, color=plotting.COLOURS[0])
        axes.plot(np.median(values), i, "o", color=plotting.COLOURS[1])
    axes.set_yticks(range(len(data["error"])), list(data["error"]))
    axes.set(xlabel=f"relative error at S = {KEYS}: draws, and their median", xlim=(0, None))
    return figure


METHOD = (
    f"8 heads of all-MiniLM-L6-v2 on 128 tokens; S = {KEYS}. Exact sign tests over independent "
    "draws. Landmarks are means of segments and their inverse is an exact one."
)
