r"""A sentence encoder of the kind of BERT, in NumPy, whose attention is given layer by layer.

The names of the weights are those of `transformers.BertModel`. Texts of the same number of tokens
make a batch: nothing is padded, so that no attention function needs a mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import erf

Array = npt.NDArray[Any]
Attention = Callable[[Array, Array, Array], Array]  # q, k, v, each (batch, heads, n, d)

_EPS = 1e-12  # of LayerNorm


class Encoder(NamedTuple):
    """Weights, by their names in a `transformers.BertModel`, and what is computed with them."""

    weights: Mapping[str, Array]
    heads: int  # of a layer

    @property
    def depth(self) -> int:
        """Number of layers."""
        return sum(name.endswith(".attention.self.query.weight") for name in self.weights)

    def embeddings(self, ids: Array) -> Array:
        """Vectors of tokens (batch, n), shape (batch, n, width), which the first layer is given."""
        words = self.weights["embeddings.word_embeddings.weight"][ids]
        positions = self.weights["embeddings.position_embeddings.weight"][: ids.shape[-1]]
        kind = self.weights["embeddings.token_type_embeddings.weight"][0]
        return self._normalised(words + positions + kind, "embeddings")

    def layer(self, index: int, x: Array, attention: Attention) -> Array:
        """Layer `index`: attention, then a network for each token, each added to what it is of."""
        prefix = f"encoder.layer.{index}."
        q, k, v = (
            self._split(self._linear(x, f"{prefix}attention.self.{name}"))
            for name in ("query", "key", "value")
        )
        attended = self._linear(_joined(attention(q, k, v)), f"{prefix}attention.output.dense")
        x = self._normalised(x + attended, f"{prefix}attention.output")
        hidden = _gelu(self._linear(x, f"{prefix}intermediate.dense"))
        return self._normalised(
            x + self._linear(hidden, f"{prefix}output.dense"), f"{prefix}output"
        )

    def _linear(self, x: Array, name: str) -> Array:
        y = x @ self.weights[f"{name}.weight"].T
        y += self.weights[f"{name}.bias"]
        return np.asarray(y)

    def _normalised(self, x: Array, name: str) -> Array:
        """LayerNorm over the last axis."""
        x = x - np.mean(x, axis=-1, keepdims=True)
        x /= np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + _EPS)
        name += ".LayerNorm"
        return np.asarray(x * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"])

    def _split(self, x: Array) -> Array:
        """From (batch, n, width) to (batch, heads, n, d)."""
        return np.swapaxes(x.reshape(*x.shape[:-1], self.heads, -1), -2, -3)

    @staticmethod
    def sentences(x: Array) -> Array:
        """Embeddings of texts, shape (batch, width): the mean over the tokens, with norm 1."""
        mean = np.mean(x, axis=-2)
        return np.asarray(mean / np.linalg.norm(mean, axis=-1, keepdims=True))


def _joined(x: Array) -> Array:
    """From (batch, heads, n, d) to (batch, n, width)."""
    x = np.swapaxes(x, -2, -3)
    return x.reshape(*x.shape[:-2], -1)


def _gelu(x: Array) -> Array:
    return np.asarray(x * (1 + erf(x / math.sqrt(2))) / 2)
