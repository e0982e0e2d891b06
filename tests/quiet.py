"""An estimator as another package has it: softmax attention that may attend to nothing.

One is added to the normaliser: Miller, "Attention Is Off By One", 2023; `add_zero_attn` in torch.
"""

import numpy as np

from refattn import attend, naive, vjp
from refattn.registry import Estimator
from refattn.streaming import SoftmaxState


def quiet_formula(q, k, v, *, scale=None, mask=None, causal=False):
    """Attend to one more key, of score 0 and value 0."""
    sinks = np.zeros(q.shape[-3:-2], q.dtype)
    return naive.softmax_attention(q, k, v, scale=scale, mask=mask, causal=causal, sinks=sinks)


def quiet_attention(q, k, v, *, scale=None, mask=None, causal=False):
    """Multiply softmax attention by the share that its keys have of the normaliser."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, lse = attend(q, k, v, scale=scale, mask=mask, causal=causal)
    return share(lse) * out


def share(lse):
    """e^lse / (1 + e^lse), beside an output."""
    return np.exp(-np.logaddexp(0, -lse))[..., None]


def pull_quiet(q, k, v, *, scale, mask, causal, forgets=False):
    """Pull `quiet_attention` back; `forgets` is a mistake, to be found."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    (out, lse), pull = vjp(attend, q, k, v, scale=scale, mask=mask, causal=causal)

    def pullback(d_out):
        d_lse = np.sum(share(lse) * (1 - share(lse)) * out * d_out, axis=-1)
        return pull((share(lse) * d_out, None if forgets else d_lse))

    return share(lse) * out, pullback


class QuietState(SoftmaxState):
    """The keys and values so far."""

    def read(self, q):
        return quiet_attention(q, self.k, self.v, scale=self.scale)


QUIET = Estimator(
    "quiet",
    quiet_attention,
    quiet_formula,
    options=("scale", "mask", "causal", "gqa", "vjp"),
    traits=("nonnegative", "exponential", "unordered-keys", "queries-apart", "quadratic"),
    state=QuietState,
    vjp=pull_quiet,
    source=("Miller, Attention Is Off By One, 2023",),
)
