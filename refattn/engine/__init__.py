"""Compute the estimators: in blocks, on threads, and in linear time where their formula admits it.

Read `attend` first, softmax attention in blocks; then `hops`, two of which make a linear estimator;
then `causal`, for keys up to a query's own, with its arithmetics `positive` and `signed`. Modules
that end with `_back` compute gradients.

A sequence is cut in several ways. Each has one word here:

state
    What the keys up to some token add up to, of a size that does not depend on their number. Later
    queries read the state, and need the keys no more.
step
    The tokens that a causal function takes in one turn, all at once, from the state before them to
    the state after them. A step is one leaf or many.
leaf
    Tokens whose queries read one state, that of all keys before the leaf, and the keys of the leaf
    pair by pair. Papers on linear attention call it a chunk.
half
    One of two equal parts of a leaf, or of such a part. Every query of the later half sees every
    key of the earlier one, so that these pairs need no mask.
chunk
    Tokens that the formula of an estimator takes together, such as a window of
    `near_and_far` or the tokens behind a proposal of LARA: other chunks are another estimator.
block
    Part of an index space that is computed at once where the order does not matter, sized for the
    cache: some queries with some keys, or some rows.

Other steps, leaves, halves and blocks change results by rounding only.
"""

__all__ = []
__dir__ = __all__.copy
