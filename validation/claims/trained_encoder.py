r"""Reference 003, experimental results: RA, LARA and RFA in place of trained softmax attention.

The reference trains models with them. Here the attention of all layers of a trained sentence
encoder is replaced, and its embeddings are compared with the exact ones.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

import refattn
from refattn.registry import ESTIMATORS
from validation import plotting, suite
from validation.claims import few_keys
from validation.model import measure, metrics, minilm
from validation.suite import control, derived

KEPT = 0.99  # cosine
ERROR = 0.2  # relative, of attention, where estimators are compared at the same one
RA, RFA, ADAPTED = ("ra", 32), ("rfa-iid", 128), ("rfa-adapted", 128)
LINEAR = (RFA, ("rfa-orthogonal", 128), ("lara-own", 128), ("lara-balance", 128))


tasks = few_keys.tasks


@cache
def model() -> tuple[Any, Any]:
    """The encoder, and tokens of all texts."""
    texts = [text for topic in minilm.texts() for text in topic]
    return minilm.load(), minilm.tokens(texts)


def run(rng: np.random.Generator, trials: int) -> list[dict[str, dict[str, float]]]:
    """Cosines, errors of attention and seconds by estimator, one of each for each trial."""
    encoder, ids = model()
    found = []
    for _ in range(trials):
        study = measure.Study(encoder, [ids[rng.integers(len(ids))]], [0])
        seed = int(rng.integers(2**32))
        one: dict[str, dict[str, float]] = {"seconds": {}, "cosine": {}, "same error": {}}
        for name, samples in (RA, ADAPTED, *LINEAR):
            layers = range(encoder.depth)
            attentions = measure.attentions(ESTIMATORS[name], samples, seed, 0, layers)
            seen = measure.replace(study, attentions)
            one["cosine"][name] = metrics.cosine(seen.embeddings, study.exact)
            one["seconds"][name] = seen.seconds
            if (name, samples) in (RA, RFA):
                factor = ERROR / seen.error
                small = {i: measure.scaled(x, factor) for i, x in attentions.items()}
                same = measure.replace(study, small).embeddings
                one["same error"][name] = metrics.cosine(same, study.exact)
        plain = dict.fromkeys(range(encoder.depth), refattn.softmax_attention)
        one["seconds"][measure.EXACT] = measure.replace(study, plain).seconds
        found.append(one)
    return found


def judge(results: suite.Results) -> suite.Findings:
    """Sign tests over trials; sums of times."""
    trials = [one for result in results for one in result]
    names = list(trials[0]["cosine"])
    cosine = {name: np.array([one["cosine"][name] for one in trials]) for name in names}
    same = {x: np.array([one["same error"][x] for one in trials]) for x, _ in (RA, RFA)}
    seconds = {name: sum(one["seconds"][name] for one in trials) for name in trials[0]["seconds"]}
    ratio = seconds[RA[0]] / seconds[measure.EXACT]
    linear = {f"{name}, {s}": cosine[name] for name, s in LINEAR}
    evidence: suite.Evidence = {
        "RA keeps": [suite.more_often("ra, 32 keeps", cosine["ra"] >= KEPT)],
        "linear keep": [suite.more_often(f"{name} keeps", x >= KEPT) for name, x in linear.items()],
        "linear lose": [
            suite.more_often(f"{name} does not", x < KEPT) for name, x in linear.items()
        ],
        "adapted": [
            suite.more_often(f"rfa-adapted, 128 above {name}", cosine["rfa-adapted"] > x)
            for name, x in linear.items()
        ],
        "kind of error": [suite.more_often("ra above rfa-iid", same["ra"] > same["rfa-iid"])],
        "RA costs": [
            suite.Timed("seconds of exact attention over those of ra, 32", 1 / ratio, 1.0)
        ],
    }
    means = ", ".join(f"{np.mean(x):.3f} ({name})" for name, x in cosine.items())
    lost = {name: f"{1 - np.mean(x):.2g}" for name, x in same.items()}
    remark = (
        f"Mean cosines: {means}. RA takes {ratio:.0f} times the seconds of exact attention on "
        f"these texts. With errors of attention scaled to {ERROR:g}, 1 - cosine is {lost['ra']} "
        f"for RA and {lost['rfa-iid']} for RFA: RA draws for each query, and the mean over the "
        "tokens averages such errors out."
    )
    data = {"cosine": {name: x.tolist() for name, x in cosine.items()}}
    return suite.Findings(evidence, data, remark)


def plot(data: dict[str, Any]) -> Any:
    """1 - cosine of each trial, by estimator."""
    figure, ((axes,),) = plotting.panels(size=(6.4, 3.2))
    samples = dict((RA, ADAPTED, *LINEAR))
    for i, values in enumerate(data["cosine"].values()):
        lost = np.sort(np.maximum(1 - np.array(values), 1e-6))
        axes.semilogx(lost, np.full(len(lost), i), "|", markersize=10, color=plotting.COLOURS[0])
        axes.plot(np.median(lost), i, "o", color=plotting.COLOURS[1])
    axes.axvline(1 - KEPT, color=plotting.INK, linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(data["cosine"])), [f"{x}, {samples[x]}" for x in data["cosine"]])
    axes.set(xlabel="1 - cosine to the exact embedding: texts, and their median")
    return figure


STATEMENTS = {
    "RA keeps": derived(
        "With RA of 32 samples in all layers, embeddings of more than half of the texts have a "
        "cosine of .99 or more to the exact ones."
    ),
    "linear keep": control(
        "So have those with RFA and LARA of 128 samples, which are more than any text has tokens."
    ),
    "linear lose": derived(
        "With RFA and LARA of 128 samples more than half of the texts have a lower one."
    ),
    "adapted": derived(
        "RFA of 128 samples from the Gaussian that suits queries and keys best keeps more than "
        "RFA and LARA with given laws, in more than half of the texts."
    ),
    "kind of error": derived(
        f"At the same relative error of attention, {ERROR:g}, more than half of the texts "
        "lose less by RA than by RFA."
    ),
    "RA costs": derived("RA of 32 samples takes more time than exact attention on these texts."),
}
ALONE = True  # it measures seconds
NEEDS = minilm.MODULES
