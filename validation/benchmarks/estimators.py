"""Every public estimator against its peers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import numpy as np

import refattn
from refattn import naive, sampling

from . import oracles, peers
from .cases import Case, Form, Record, measure
from .settings import Settings, Sizes

DTYPES = ("float32", "float64")
EXACT, RFA, LARA, CAUSAL = "exact attention", "RFA, positive", "LARA", ", causal"
LINEAR, PLAIN = "linear attention, elu + 1", "refattn, not causal"
SDPA, TORCH, SAME_SAMPLES = "torch SDPA", "torch Performer", "refattn, RFA of as many samples"
CHUNKS, TORCH_LINEAR = "torch Performer in chunks", "torch"

Oracle = Callable[[], np.ndarray]


def run(settings: Settings) -> Iterator[Record]:
    """Measure each case in each dtype."""
    for dtype in DTYPES:
        for make in CASES:
            inputs = Inputs(settings.sizes, dtype, np.random.default_rng(settings.seed))
            yield measure(make(inputs), settings.repeats, pause=settings.pause)


class Inputs:
    """Arrays of one case, and what is common to its forms."""

    def __init__(self, sizes: Sizes, dtype: str, rng: np.random.Generator) -> None:
        self.sizes, self.dtype, self.rng = sizes, dtype, rng

    def normal(self, *shape: int) -> np.ndarray:
        """Draw from N(0, 1)."""
        return self.rng.standard_normal(shape).astype(self.dtype, copy=False)

    def tokens(
        self, shape: tuple[int, int], factor: float = 1.0
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Draw queries, keys and values (heads, tokens, d); the first two times a factor."""
        q, k, v = (self.normal(*shape, self.sizes.d) for _ in range(3))
        self.rows = np.linspace(0, shape[1] - 1, min(shape[1], self.sizes.checked)).astype(int)
        q *= factor
        k *= factor
        self.arrays = q, k, v
        return self.arrays

    def past(self) -> np.ndarray:
        """Which keys each checked query sees in causal attention."""
        return np.asarray(self.rows[:, None] >= np.arange(self.arrays[1].shape[-2]))

    def oracle(
        self, form: Callable[..., Any], evaluate: Any = oracles.by_query, **options: Any
    ) -> Oracle:
        """Evaluate a formula for the checked queries, once."""
        q, k, v = self.arrays
        return cache(partial(evaluate, form, q[..., self.rows, :], k, v, **options))

    def performer(self, omega: np.ndarray, mask: Any = None, added: float = 0.0) -> Oracle:
        """Evaluate Performer for the checked queries, once."""
        options = {"omega": omega, "mask": mask, "added": added}
        return self.oracle(oracles.performer, oracles.direct, **options)

    def case(self, name: str, *forms: Form, samples: int | None = None) -> Case:
        """Put forms together."""
        heads, tokens, d = self.arrays[0].shape
        size = {"heads": heads, "tokens": tokens, "d": d}
        if samples is not None:
            size["S"] = samples
        return Case(name, self.dtype, size, forms, self.rows)


def _ours(oracle: Oracle, function: Callable[..., Any], *args: Any, **options: Any) -> Form:
    return Form("refattn", lambda: partial(function, *args, **options), oracle, ours=True)


def _textbook(oracle: Oracle, function: Callable[..., Any], *args: Any, **options: Any) -> Form:
    return Form("textbook NumPy", lambda: partial(function, *args, **options), oracle)


def _exact(inputs: Inputs) -> Case:
    arrays = inputs.tokens(inputs.sizes.quadratic)
    oracle = inputs.oracle(naive.softmax_attention)
    return inputs.case(
        EXACT,
        _ours(oracle, refattn.softmax_attention, *arrays),
        Form(SDPA, partial(peers.torch_softmax, *arrays), oracle),
        _textbook(oracle, peers.textbook_softmax, *arrays),
    )


def _exact_causal(inputs: Inputs) -> Case:
    arrays = inputs.tokens(inputs.sizes.quadratic)
    oracle = inputs.oracle(naive.softmax_attention, mask=inputs.past())
    return inputs.case(
        EXACT + CAUSAL,
        _ours(oracle, refattn.softmax_attention, *arrays, causal=True),
        Form(SDPA, partial(peers.torch_softmax, *arrays, causal=True), oracle),
        _textbook(oracle, peers.textbook_softmax, *arrays, causal=True),
    )


def _positive(inputs: Inputs) -> Case:
    arrays, count = inputs.tokens(inputs.sizes.linear), inputs.sizes.features
    omega = inputs.normal(count, inputs.sizes.d)
    oracle = inputs.oracle(naive.random_feature_attention, omega=omega)
    performer = inputs.performer(omega)
    return inputs.case(
        RFA,
        _ours(oracle, refattn.random_feature_attention, *arrays, omega=omega),
        Form(TORCH, partial(peers.torch_performer, *arrays, omega), performer),
        Form("performer-pytorch", partial(peers.performer_pytorch, *arrays, omega), performer),
        _textbook(oracle, peers.textbook, peers.positive, *arrays, omega),
        samples=count,
    )


def _positive_causal(inputs: Inputs) -> Case:
    arrays, count = inputs.tokens(inputs.sizes.linear), inputs.sizes.features
    omega, past = inputs.normal(count, inputs.sizes.d), inputs.past()
    form = naive.random_feature_attention
    oracle, not_causal = (inputs.oracle(form, omega=omega, mask=mask) for mask in (past, None))
    performer, package = (inputs.performer(omega, past, added=added) for added in (0.0, 1e-6))
    ours = partial(refattn.random_feature_attention, causal=True)
    plain = partial(refattn.random_feature_attention, *arrays, omega=omega)
    performer_pytorch = partial(peers.performer_pytorch, *arrays, omega, causal=True)
    return inputs.case(
        RFA + CAUSAL,
        _ours(oracle, ours, *arrays, omega=omega),
        Form(PLAIN, lambda: plain, not_causal, ours=True),
        Form(CHUNKS, partial(peers.torch_performer_causal, *arrays, omega), performer),
        Form("performer-pytorch", performer_pytorch, package),
        _textbook(oracle, peers.textbook, peers.positive, *arrays, omega, causal=True),
        samples=count,
    )


def _hyperbolic(inputs: Inputs) -> Case:
    arrays, count = inputs.tokens(inputs.sizes.linear), inputs.sizes.features
    omega = inputs.normal(count, inputs.sizes.d)
    both = np.concatenate([omega, -omega])
    oracle = inputs.oracle(naive.random_feature_attention, omega=omega, features="hyperbolic")
    ours = partial(refattn.random_feature_attention, features="hyperbolic")
    return inputs.case(
        "RFA, hyperbolic",
        _ours(oracle, ours, *arrays, omega=omega),
        _textbook(oracle, peers.textbook, peers.positive, *arrays, both),
        samples=count,
    )


def _trigonometric(inputs: Inputs) -> Case:
    # Of longer queries and keys the estimated normaliser vanishes for some.
    arrays, count = inputs.tokens(inputs.sizes.linear, factor=0.5), inputs.sizes.features
    omega = inputs.normal(count, inputs.sizes.d)
    oracle = inputs.oracle(naive.random_feature_attention, omega=omega, features="trigonometric")
    ours = partial(refattn.random_feature_attention, features="trigonometric")
    return inputs.case(
        "RFA, trigonometric",
        _ours(oracle, ours, *arrays, omega=omega),
        _textbook(oracle, peers.textbook, peers.trigonometric, *arrays, omega),
        samples=count,
    )


def _linear(inputs: Inputs) -> Case:
    arrays = inputs.tokens(inputs.sizes.linear)
    oracle = inputs.oracle(naive.linear_attention)
    package = inputs.oracle(oracles.linear, oracles.direct, added=1e-6)
    fast_transformers = partial(peers.fast_transformers_linear, *arrays)
    return inputs.case(
        LINEAR,
        _ours(oracle, refattn.linear_attention, *arrays),
        Form(TORCH_LINEAR, partial(peers.torch_linear, *arrays), oracle),
        Form("pytorch-fast-transformers", fast_transformers, package),
        _textbook(oracle, peers.textbook, naive.elu_plus_one, *arrays),
    )


def _linear_causal(inputs: Inputs) -> Case:
    arrays, oracle = (
        inputs.tokens(inputs.sizes.linear),
        inputs.oracle(naive.linear_attention, mask=inputs.past()),
    )
    return inputs.case(
        LINEAR + CAUSAL,
        _ours(oracle, partial(refattn.linear_attention, causal=True), *arrays),
        Form(TORCH_LINEAR, partial(peers.torch_linear, *arrays, causal=True), oracle),
        _textbook(oracle, peers.textbook, naive.elu_plus_one, *arrays, causal=True),
    )


def _lara(inputs: Inputs) -> Case:
    arrays, count = inputs.tokens(inputs.sizes.linear), inputs.sizes.features
    shared = inputs.normal(count, inputs.sizes.d)
    q, k = (x.astype(np.float64) for x in arrays[:2])
    centres = peers.chunk_centres(q, k, count)
    omega = (centres + inputs.rng.standard_normal(centres.shape)).astype(inputs.dtype)
    oracle = inputs.oracle(naive.linear_randomized_attention, omega=omega, centres=centres)
    ours = partial(refattn.linear_randomized_attention, num_proposals=count)
    rfa = partial(refattn.random_feature_attention, *arrays, omega=shared)
    of_rfa = inputs.oracle(naive.random_feature_attention, omega=shared)
    return inputs.case(
        LARA,
        _ours(oracle, ours, *arrays, omega=omega),
        Form(SAME_SAMPLES, lambda: rfa, of_rfa, ours=True),
        _textbook(oracle, peers.textbook_linear_randomized, *arrays, omega),
        samples=count,
    )


def _randomized(inputs: Inputs) -> Case:
    arrays, count = inputs.tokens(inputs.sizes.dense), inputs.sizes.samples
    omega = sampling.draw_target(*arrays[:2], num_samples=count, rng=inputs.rng)
    oracle = inputs.oracle(
        naive.randomized_attention, oracles.direct, omega=omega[..., inputs.rows, :, :]
    )
    return inputs.case(
        "randomized attention",
        _ours(oracle, refattn.randomized_attention, *arrays, omega=omega),
        _textbook(oracle, peers.textbook_randomized, *arrays, omega),
        samples=count,
    )


def _mean_of_ratios(inputs: Inputs) -> Case:
    arrays, count = inputs.tokens(inputs.sizes.dense), inputs.sizes.samples
    omega = inputs.normal(count, inputs.sizes.d)
    oracle = inputs.oracle(naive.mean_of_ratios_attention, omega=omega)
    return inputs.case(
        "mean of ratios",
        _ours(oracle, refattn.mean_of_ratios_attention, *arrays, omega=omega),
        _textbook(oracle, peers.textbook_mean_of_ratios, *arrays, omega),
        samples=count,
    )


def _importance_sampled(inputs: Inputs) -> Case:
    arrays, count = inputs.tokens(inputs.sizes.quadratic), inputs.sizes.features
    omega = inputs.normal(count, inputs.sizes.d)
    oracle = inputs.oracle(naive.importance_sampled_attention, omega=omega)
    return inputs.case(
        "importance sampling",
        _ours(oracle, refattn.importance_sampled_attention, *arrays, omega=omega),
        _textbook(oracle, peers.textbook_importance_sampled, *arrays, omega),
        samples=count,
    )


CASES = (
    _exact,
    _exact_causal,
    _positive,
    _positive_causal,
    _hyperbolic,
    _trigonometric,
    _linear,
    _linear_causal,
    _lara,
    _randomized,
    _mean_of_ratios,
    _importance_sampled,
)
