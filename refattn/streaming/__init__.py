r"""Decoding states: attention over keys that arrive over time.

Each state offers `init` (start from the first keys, possibly none), `update` (add keys), `read`
(attend to the keys so far) and `merge` (add the state of later keys). States are immutable:
`update` and `merge` return new ones. Reading token by token after each update is causal attention.
`EvaState` also takes the queries of its tokens. There is no state for `coreset_attention` or
`sampled_key_attention`: a new key changes the weights, or the sample, of all earlier keys.

`write_random_feature_attention` computes random-feature attention of arrays larger than memory.
"""

from .chunks import EvaState as EvaState
from .chunks import SecondOrderState as SecondOrderState
from .linear import LinearState as LinearState
from .local import LocalState as LocalState
from .positive import PositiveState as PositiveState
from .recurrent import RecurrentState as RecurrentState
from .softmax import SoftmaxState as SoftmaxState
from .writing import write_random_feature_attention as write_random_feature_attention

__all__ = sorted(x for x, value in globals().items() if callable(value))
__dir__ = __all__.copy
