"""The way back: the pullback of each function against its forward, and against torch's autograd.

There are three forms of each:

- the forward: the plain call, of ours without `refattn.vjp`, of torch without a graph;
- ``pullback``: cotangents of q, k and v from that of the result, and nothing else. What the way
  forth leaves for it has been made before: by one call of `vjp`, or as the graph that torch keeps;
- ``both``: forth and back, as a step of training needs it: `vjp` and its pullback, each once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np

import refattn

from . import oracles, peers
from .cases import Case, Form, Record, measure
from .estimators import (
    CAUSAL,
    CHUNKS,
    DTYPES,
    EXACT,
    LARA,
    LINEAR,
    RFA,
    SDPA,
    TORCH,
    TORCH_LINEAR,
    Oracle,
)
from .estimators import Inputs as Forward
from .settings import Settings, Sizes

__all__ = ["BOTH", "PULLBACK", "Inputs", "run"]

BOTH, PULLBACK = ", both", ", pullback"

Wanted = tuple[Callable[[], Any], ...]


def run(settings: Settings) -> Iterator[Record]:
    """Measure each case in each dtype."""
    for dtype in DTYPES:
        for make in CASES:
            inputs = Inputs(settings.sizes, dtype, np.random.default_rng(settings.seed))
            yield measure(make(inputs), settings.repeats, pause=settings.pause)


class Inputs(Forward):
    """Arrays of one case, with the cotangent of its result."""

    def __init__(self, sizes: Sizes, dtype: str, rng: np.random.Generator) -> None:
        super().__init__(sizes, dtype, rng)
        self.tokens(sizes.backward)
        self.d_out = self.normal(*self.arrays[2].shape)

    def wanted(self, forward: Oracle, pullback: Callable[..., Any], *args: Any) -> Wanted:
        """Oracles of the three forms, given that of the forward, for the checked tokens."""

        @cache
        def back() -> tuple[np.ndarray, ...]:
            found = pullback(*self.arrays, self.d_out, *args)
            return tuple(x[..., self.rows, :] for x in found)

        return forward, back, back

    def ours(self, wanted: Wanted, fn: Any, **options: Any) -> list[Form]:
        """Three forms of a function."""
        vjp = partial(refattn.vjp, fn, *self.arrays, **options)

        def back(pullback: Any) -> tuple[Any, ...]:
            return tuple(pullback(self.d_out)[:3])

        makes = (
            lambda: partial(fn, *self.arrays, **options),
            lambda: partial(back, vjp()[1]),
            lambda: lambda: back(vjp()[1]),
        )
        return _forms("refattn", makes, wanted, ours=True)

    def theirs(self, wanted: Wanted, name: str, form: Any, *others: np.ndarray) -> list[Form]:
        """Three forms of a peer in torch."""
        back = partial(peers.torch_pullback, form, *self.arrays, self.d_out, *others)
        makes = partial(form, *self.arrays, *others), back, partial(back, both=True)
        return _forms(name, makes, wanted)

    def compared(self, name: str, *methods: list[Form], samples: int | None = None) -> Case:
        """Put methods together: each against its own forward, the first against the others."""
        first, *others = methods
        pairs = [(form, forms[0]) for forms in methods for form in forms[1:]]
        pairs += [pair for forms in others for pair in zip(first, forms, strict=True)]
        case = self.case(name, *(form for forms in methods for form in forms), samples=samples)
        return replace(case, ratios=[(form.name, to.name) for form, to in pairs])


def _forms(name: str, makes: tuple[Any, ...], wanted: Wanted, ours: bool = False) -> list[Form]:
    names = (name, name + PULLBACK, name + BOTH)
    return [Form(*of_one, ours) for of_one in zip(names, makes, wanted, strict=True)]


def _exact(inputs: Inputs) -> Case:
    wanted = inputs.wanted(inputs.oracle(oracles.softmax), oracles.softmax_pullback)
    return inputs.compared(
        EXACT,
        inputs.ours(wanted, refattn.softmax_attention),
        inputs.theirs(wanted, SDPA, peers.torch_softmax),
    )


def _positive(inputs: Inputs) -> Case:
    count = inputs.sizes.features
    omega = inputs.normal(count, inputs.sizes.d)
    forward = inputs.oracle(oracles.positive, omega)
    wanted = inputs.wanted(forward, oracles.positive_pullback, omega)
    forward = inputs.oracle(oracles.performer, omega)
    performer = inputs.wanted(forward, oracles.performer_pullback, omega)
    return inputs.compared(
        RFA,
        inputs.ours(wanted, refattn.random_feature_attention, omega=omega),
        inputs.theirs(performer, TORCH, peers.torch_performer, omega),
        samples=count,
    )


def _positive_causal(inputs: Inputs) -> Case:
    count, past = inputs.sizes.features, inputs.past()
    omega = inputs.normal(count, inputs.sizes.d)
    every_past = np.tri(inputs.sizes.backward[1], dtype=bool)
    forward = inputs.oracle(oracles.positive, omega, past)
    wanted = inputs.wanted(forward, oracles.positive_pullback, omega, every_past)
    forward = inputs.oracle(oracles.performer, omega, past)
    performer = inputs.wanted(forward, oracles.performer_pullback, omega, every_past)
    return inputs.compared(
        RFA + CAUSAL,
        inputs.ours(wanted, refattn.random_feature_attention, omega=omega, causal=True),
        inputs.theirs(performer, CHUNKS, peers.torch_performer_causal, omega),
        samples=count,
    )


def _linear(inputs: Inputs) -> Case:
    wanted = inputs.wanted(inputs.oracle(oracles.linear), oracles.linear_pullback)
    return inputs.compared(
        LINEAR,
        inputs.ours(wanted, refattn.linear_attention),
        inputs.theirs(wanted, TORCH_LINEAR, peers.torch_linear),
    )


def _lara(inputs: Inputs) -> Case:
    (q, k, _), count = inputs.arrays, inputs.sizes.features
    centres = oracles.chunk_centres(q, k, count)
    omega = (centres + inputs.rng.standard_normal(centres.shape)).astype(inputs.dtype)
    forward = inputs.oracle(oracles.linear_randomized, omega, centres)
    wanted = inputs.wanted(forward, oracles.linear_randomized_pullback, omega)
    options = {"omega": omega, "num_proposals": count}
    ours = inputs.ours(wanted, refattn.linear_randomized_attention, **options)
    return inputs.compared(LARA, ours, samples=count)


CASES = (_exact, _positive, _positive_causal, _linear, _lara)
