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
from refattn import naive

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
        draw = np.random.default_rng(sizes.d).standard_normal
        self.directions = tuple(draw(x.shape) for x in self.arrays)

    def wanted(self, forward: Oracle, form: Callable[..., Any]) -> Wanted:
        """Oracles of the three forms, given that of the forward and an analytic form of it."""
        back = cache(partial(oracles.slopes, form, self.arrays, self.d_out, self.directions))
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
        return self._forms("refattn", makes, wanted, ours=True)

    def theirs(self, wanted: Wanted, name: str, form: Any, *others: np.ndarray) -> list[Form]:
        """Three forms of a peer in torch."""
        back = partial(peers.torch_pullback, form, *self.arrays, self.d_out, *others)
        makes = partial(form, *self.arrays, *others), back, partial(back, both=True)
        return self._forms(name, makes, wanted)

    def _forms(
        self, name: str, makes: tuple[Any, ...], wanted: Wanted, ours: bool = False
    ) -> list[Form]:
        names = (name, name + PULLBACK, name + BOTH)
        along = partial(oracles.along, directions=self.directions)
        each = zip(names, makes, wanted, (None, along, along), strict=True)
        return [Form(name, make, oracle, ours, look) for name, make, oracle, look in each]

    def compared(self, name: str, *methods: list[Form], samples: int | None = None) -> Case:
        """Put methods together: each against its own forward, the first against the others."""
        first, *others = methods
        pairs = [(form, forms[0]) for forms in methods for form in forms[1:]]
        pairs += [pair for forms in others for pair in zip(first, forms, strict=True)]
        case = self.case(name, *(form for forms in methods for form in forms), samples=samples)
        return replace(case, ratios=[(form.name, to.name) for form, to in pairs])


def _exact(inputs: Inputs) -> Case:
    by_head = partial(oracles.by_head, peers.textbook_softmax)
    wanted = inputs.wanted(inputs.oracle(naive.softmax_attention), by_head)
    return inputs.compared(
        EXACT,
        inputs.ours(wanted, refattn.softmax_attention),
        inputs.theirs(wanted, SDPA, peers.torch_softmax),
    )


def _positive(inputs: Inputs, causal: bool = False) -> Case:
    count, mask = inputs.sizes.features, inputs.past() if causal else None
    omega = inputs.normal(count, inputs.sizes.d)
    exact = omega.astype(np.float64)
    by_features: Callable[..., Any] = peers.by_features_causal if causal else peers.by_features

    def performer(q: Any, k: Any, v: Any) -> Any:
        phi_q, phi_k = oracles.performer_features(q, k, exact)
        return by_features(phi_q, phi_k, v)

    forward = inputs.oracle(naive.random_feature_attention, omega=omega, mask=mask)
    positive = partial(peers.positive, omega=exact)
    wanted = inputs.wanted(forward, partial(peers.textbook, positive, causal=causal))
    theirs = inputs.wanted(inputs.performer(omega, mask), performer)
    options = {"causal": True} if causal else {}
    peer = peers.torch_performer_causal if causal else peers.torch_performer
    return inputs.compared(
        RFA + CAUSAL if causal else RFA,
        inputs.ours(wanted, refattn.random_feature_attention, omega=omega, **options),
        inputs.theirs(theirs, CHUNKS if causal else TORCH, peer, omega),
        samples=count,
    )


def _linear(inputs: Inputs) -> Case:
    textbook = partial(peers.textbook, naive.elu_plus_one)
    wanted = inputs.wanted(inputs.oracle(naive.linear_attention), textbook)
    return inputs.compared(
        LINEAR,
        inputs.ours(wanted, refattn.linear_attention),
        inputs.theirs(wanted, TORCH_LINEAR, peers.torch_linear),
    )


def _lara(inputs: Inputs) -> Case:
    q, k = (x.astype(np.float64) for x in inputs.arrays[:2])
    count = inputs.sizes.features
    centres = peers.chunk_centres(q, k, count)
    omega = (centres + inputs.rng.standard_normal(centres.shape)).astype(inputs.dtype)
    forward = inputs.oracle(naive.linear_randomized_attention, omega=omega, centres=centres)
    textbook = partial(peers.textbook_linear_randomized, omega=omega.astype(np.float64))
    wanted = inputs.wanted(forward, textbook)
    fn = refattn.linear_randomized_attention
    ours = inputs.ours(wanted, fn, omega=omega, num_proposals=count)
    return inputs.compared(LARA, ours, samples=count)


CASES = (_exact, _positive, partial(_positive, causal=True), _linear, _lara)
