"""Estimators in place of the attention of an encoder: what becomes of its embeddings, at what cost.

Every estimator of `refattn.registry` that stands for softmax attention can be measured; none is
named here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from refattn import softmax_attention
from refattn.compare import Skipped
from refattn.registry import ESTIMATORS, Estimator

from . import metrics, minilm
from .encoder import Attention, Encoder

Array = npt.NDArray[Any]

EXACT, MEAN = "exact", "mean of v"
LONG = 64  # tokens of a long text
BLOCKS = 13  # of topics, for standard errors
THRESHOLD = 0.99  # of the cosine, at which errors are tolerated
TARGETS = (0.1, 0.3)  # errors of attention at which the loss of cosine is measured
METRICS: dict[str, metrics.Metric] = {
    "cosine": metrics.cosine,
    "low": metrics.low_cosine,
    "ranks": metrics.rank_correlation,
    "neighbours": metrics.neighbours,
}


class Row(NamedTuple):
    """What one way to compute attention does to the embeddings.

    `values` and `errors` are each of `METRICS`, and "long", the mean cosine of the long texts, with
    standard errors. `attention` is the relative error of attention on the queries, keys and values
    that it met, as `refattn compare` has it: mean over texts, heads, layers and draws.
    """

    estimator: str  # name of the registry, `EXACT` or `MEAN`
    samples: int | None  # S; the number of tokens where no more are taken
    layers: str  # "all", or the one that was replaced
    values: dict[str, float]
    errors: dict[str, float]
    attention: float
    seconds: float  # in attention, for all texts: the median of the draws
    multiply_adds: int | None  # of the matrix products there, where they could be counted


class _Watched:
    """An attention function that notes its time, and its error in each text and head."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.errors: list[Array] = []

    def around(self, attention: Attention) -> Attention:
        def run(q: Array, k: Array, v: Array) -> Array:
            start = time.perf_counter()
            out = attention(q, k, v)
            self.seconds += time.perf_counter() - start
            exact = softmax_attention(q, k, v)
            with np.errstate(all="ignore"):
                error = np.linalg.norm(out - exact, axis=(-2, -1))
                self.errors.append(np.ravel(error / np.linalg.norm(exact, axis=(-2, -1))))
            return out

        return run


class Replaced(NamedTuple):
    """Embeddings (T, width), the mean relative error of attention, and its seconds."""

    embeddings: Array
    error: float
    seconds: float


class Study:
    """An encoder and texts, `ids`: embeddings with any attention, from any layer on.

    Texts on one of the `topics` are not independent.
    """

    def __init__(self, encoder: Encoder, ids: Sequence[Array], topics: Sequence[int]) -> None:
        self.encoder = encoder
        self.lengths = np.array([len(one) for one in ids])
        self.blocks = np.asarray(topics) % BLOCKS
        self.batches = [np.flatnonzero(self.lengths == n) for n in np.unique(self.lengths)]
        self.states: list[list[Array]] = []  # what each layer is given, by batch
        for batch in self.batches:
            x = encoder.embeddings(np.stack([ids[int(i)] for i in batch]))
            self.states.append([x])
            for layer in range(encoder.depth):
                x = encoder.layer(layer, x, softmax_attention)
                self.states[-1].append(x)
        self.exact = self._gathered([states[-1] for states in self.states])

    def embed(self, attentions: Mapping[int, Attention]) -> Array:
        """Embeddings (T, width) with the attention of some layers replaced."""
        first, found = min(attentions), []
        for states in self.states:
            x = states[first]
            for layer in range(first, self.encoder.depth):
                x = self.encoder.layer(layer, x, attentions.get(layer, softmax_attention))
            found.append(x)
        return self._gathered(found)

    def _gathered(self, found: Sequence[Array]) -> Array:
        parts = [self.encoder.sentences(x) for x in found]
        out = np.empty((len(self.lengths), parts[0].shape[-1]), dtype=parts[0].dtype)
        for batch, part in zip(self.batches, parts, strict=True):
            out[batch] = part
        return out


def replace(study: Study, attentions: Mapping[int, Attention]) -> Replaced:
    """Replace the attention of some layers."""
    watched = _Watched()
    found = study.embed({layer: watched.around(one) for layer, one in attentions.items()})
    return Replaced(found, float(np.mean(np.concatenate(watched.errors))), watched.seconds)


def mean_of_values(q: Array, k: Array, v: Array) -> Array:
    """Attention to all keys alike."""
    out: Array = 0 * q[..., :1] + v.mean(axis=-2, keepdims=True)
    return out


def scaled(attention: Attention, factor: float) -> Attention:
    """Exact attention and a multiple of the error of another."""

    def run(q: Array, k: Array, v: Array) -> Array:
        exact = softmax_attention(q, k, v)
        return np.asarray(exact + np.asarray(factor, exact.dtype) * (attention(q, k, v) - exact))

    return run


def substitute(record: Estimator, samples: int | None, seed: np.random.SeedSequence) -> Attention:
    """The estimator as an attention function with random numbers of its own, the same in each call.

    So features have the same frequencies for all texts, as in a model that was made with them.
    """

    def run(q: Array, k: Array, v: Array) -> Array:
        options: dict[str, Any] = {}
        if samples is not None:
            most = samples if record.has("unlimited-size") else min(samples, q.shape[-2])
            options |= record.sized(most)
        if record.has("random"):
            options["rng"] = np.random.default_rng(seed)
        out: Array = record.fn(q, k, v, **options)
        return out

    return run


def multiply_adds(attention: Attention, tokens: int, width: int) -> int | None:
    """Multiply-adds in the matrix products of one head, counted by torch; None if it cannot."""
    try:
        torch = import_module("torch")
        counter = import_module("torch.utils.flop_counter").FlopCounterMode(display=False)
    except ModuleNotFoundError:
        return None
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, tokens, width, generator=draw) for _ in range(3))
    try:
        with counter:
            attention(q, k, v)
    except (TypeError, ValueError, RuntimeError):  # not written for torch
        return None
    return int(counter.get_total_flops()) // 2


def measure(
    study: Study,
    *,
    estimators: Iterable[str],
    sizes: Sequence[int] = (8, 32, 128),
    layers: Sequence[str] = ("all",),
    draws: int = 2,
    seed: int = 0,
    track: Callable[[Sequence[Any]], Iterable[Any]] = iter,
) -> tuple[list[Row], list[Skipped]]:
    """Measure exact attention, the mean of the values, and each estimator at each S.

    What has no size, or draws nothing, is measured once; what an estimator refuses is skipped.
    Layer l in draw i at S has ``SeedSequence(seed, spawn_key=(S, i, l))``, for every estimator.
    `layers` are "all" or numbers of one; `track` wraps the sequence of what is to be measured.
    """
    plan: list[tuple[Estimator | Attention, int | None]] = [
        (softmax_attention, None),
        (mean_of_values, None),
        *((ESTIMATORS[name], s) for name in estimators for s in _sizes(name, sizes)),
    ]
    rows, skipped = [], []
    for where, (what, samples) in track([(w, one) for w in layers for one in plan]):
        replaced = range(study.encoder.depth) if where == "all" else [int(where)]
        name = what.name if isinstance(what, Estimator) else NAMES[what]
        random = isinstance(what, Estimator) and what.has("random")
        each = [attentions(what, samples, seed, i, replaced) for i in range(draws)]
        try:
            row = _row(study, (name, samples, where), each[: draws if random else 1])
        except (ValueError, MemoryError, OverflowError) as refusal:
            skipped.append(Skipped(name, samples, str(refusal)))
        else:
            rows.append(row)
    return rows, skipped


def tolerated(
    study: Study,
    rows: Iterable[Row],
    *,
    threshold: float = 0.99,
    seed: int = 0,
    track: Callable[[Sequence[Any]], Iterable[Any]] = iter,
) -> dict[str, float]:
    r"""Relative error of attention in all layers that lowers the mean cosine to a threshold.

    An estimate is moved towards the exact result, or away from it,

    .. math:: \mathrm{exact} + t \, (\mathrm{estimate} - \mathrm{exact}),

    so that only the size of its error changes, to about each of `TARGETS`; the error at the
    threshold lies on a line between these, of log(1 - cosine) over the log of the error.

    Of each estimator the row of its middle S is used, in all layers, and the first draw.
    """
    measured: dict[str, list[Row]] = {}
    for row in rows:
        if row.layers == "all" and row.estimator in ESTIMATORS and row.attention > 0:
            measured.setdefault(row.estimator, []).append(row)
    found = {}
    for name, own in track(list(measured.items())):
        row = own[len(own) // 2]
        lost, errors = [], []
        layers = range(study.encoder.depth)
        own_draw = attentions(ESTIMATORS[name], row.samples, seed, 0, layers)
        for target in TARGETS:
            factor = target / row.attention
            one = replace(study, {i: scaled(x, factor) for i, x in own_draw.items()})
            lost.append(1 - metrics.cosine(one.embeddings, study.exact))
            errors.append(one.error)
        slope, start = np.polyfit(np.log(lost), np.log(errors), 1)
        found[name] = float(np.exp(start + slope * np.log(1 - threshold)))
    return found


def study_texts(each: int) -> tuple[Study, dict[str, Any]]:
    """The bundled encoder and some texts of each topic, and what they are."""
    topics = [topic[:each] for topic in minilm.texts()]
    texts = [text for topic in topics for text in topic]
    ids = minilm.tokens(texts)
    study = Study(minilm.load(), ids, [i for i, topic in enumerate(topics) for _ in topic])
    about = {"model": minilm.NAME, "package": minilm.PACKAGE, "texts": len(texts)}
    return study, about | {"tokens": int(sum(map(len, ids)))}


def describe_tolerated(
    study: Study, rows: Iterable[Row], seed: int, track: Callable[[Sequence[Any]], Iterable[Any]]
) -> dict[str, Any]:
    """What `refattn compare` holds errors against: see `compare.Tolerated`."""
    errors = tolerated(study, rows, threshold=THRESHOLD, seed=seed, track=track)
    return {
        "model": minilm.NAME,
        "measure": "mean cosine of its embeddings to the exact ones",
        "threshold": THRESHOLD,
        "errors": {name: float(f"{error:.3g}") for name, error in errors.items()},
    }


def attentions(
    what: Estimator | Attention, samples: int | None, seed: int, draw: int, layers: Iterable[int]
) -> dict[int, Attention]:
    """Attention of these layers in one draw."""
    if not isinstance(what, Estimator):
        return dict.fromkeys(layers, what)
    keys = {layer: (samples or 0, draw, layer) for layer in layers}
    return {
        layer: substitute(what, samples, np.random.SeedSequence(seed, spawn_key=key))
        for layer, key in keys.items()
    }


NAMES: dict[Any, str] = {softmax_attention: EXACT, mean_of_values: MEAN}


def _sizes(name: str, sizes: Sequence[int]) -> Sequence[int | None]:
    return [None] if ESTIMATORS[name].size is None else sizes


def _row(
    study: Study, label: tuple[str, int | None, str], draws: Sequence[dict[int, Attention]]
) -> Row:
    """Measure one way to compute attention in some layers, in draws of it."""
    found = [replace(study, one) for one in draws]
    embeddings, exact, blocks = np.stack([x.embeddings for x in found]), study.exact, study.blocks
    long = study.lengths >= LONG
    values, spread = {}, {}
    for name, metric in METRICS.items():
        values[name] = float(np.mean([metric(one, exact) for one in embeddings]))
        spread[name] = metrics.standard_error(metric, embeddings, exact, blocks)
    if np.any(long):
        part = embeddings[:, long], exact[long]
        values["long"] = float(np.mean(metrics.cosines(*part)))
        spread["long"] = metrics.standard_error(metrics.cosine, *part, blocks[long])
    return Row(
        *label,
        values,
        spread,
        float(np.mean([x.error for x in found])),
        float(np.median([x.seconds for x in found])),
        _count(study, list(draws[0].values())),
    )


def _count(study: Study, attentions: Sequence[Attention]) -> int | None:
    """Multiply-adds for all texts and heads, in layers of which each takes as many."""
    heads = study.encoder.heads
    width = study.exact.shape[-1] // heads
    total = 0
    for batch in study.batches:
        one = multiply_adds(attentions[0], int(study.lengths[batch[0]]), width)
        if one is None:
            return None
        total += one * len(batch) * heads * len(attentions)
    return total
