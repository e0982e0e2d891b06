"""Exact softmax attention, and merging of results over different sets of keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .arrays import checks, qkv
from .arrays.heads import Alibi, group_heads
from .arrays.library import Array, as_written, constant
from .engine.attend import Attended
from .engine.attend import attend as attend_in_blocks
from .engine.attend import merge as merge_parts
from .engine.scores import Scores
from .typing import ArrayT

__all__ = ["Alibi", "Attended", "alibi", "attend", "merge", "softmax_attention"]
__dir__ = __all__.copy


@as_written
def attend(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    *,
    bias: Array | Alibi | None = None,
    mask: Array | None = None,
    causal: bool = False,
    scale: float = 1.0,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    dropout: Array | None = None,
) -> Attended[ArrayT]:
    r"""Compute softmax attention and its log normaliser.

    .. math::
        s_{ij} = \mathrm{cap}(\mathrm{scale}\; q_i \cdot k_j) + \mathrm{bias}_{ij}, \qquad
        \mathrm{lse}_i = \log \Bigl( e^{\mathrm{sink}} + \sum_j e^{s_{ij}} \Bigr), \qquad
        \mathrm{out}_i = \sum_j e^{s_{ij} - \mathrm{lse}_i} \, r_{ij} \, v_j

    over the keys j that query i sees. By default there is no cap, bias, sink or factor r.

    Most estimators of the package use this function and `merge`. Scores are computed in blocks and
    never stored all at once: the memory used besides arguments and result does not depend on n, m
    or the leading axes.

    Parameters
    ----------
    q : array, shape (..., n, d), float32 or float64
        Queries. On NumPy, longdouble too. Leading axes of all arguments broadcast.
    k : array, shape (..., m, d), dtype of `q`
        Keys. m may be 0. Grouped queries: when the axis before the last two (the head axis) of
        `k` and `v` divides that of `q`, consecutive query heads share a key head: with H query
        heads and G key heads, query head h uses key head h // (H // G).
    v : array, shape (..., m, d_v), dtype of `q`
        Values.
    bias : array, broadcasting to (..., n, m), dtype of `q`, or Alibi, optional
        Added to the scores; `alibi` makes one. -inf hides a key, but a NaN in the key still reaches
        the result: use `mask` to hide it.
    mask : array of bool, broadcasting to (..., n, m), optional
        True where the query attends to the key. Masking a key equals deleting it: NaN in a
        masked key or value does not reach the result.
    causal : bool, default False
        Query i sees key j only if j <= i + m - n: the last query sees every key (the
        bottom-right convention).
    scale : float, default 1.0
        Factor on q . k.
    window : pair of int or None, optional
        (left, right): query i sees key j only if i + m - n - left <= j <= i + m - n + right;
        None is no limit. Keys outside the window cost no time.
    softcap : float, optional
        Cap c > 0: each score s becomes c tanh(s / c).
    sinks : array, broadcasting to (..., heads), dtype of `q`, optional
        Score of one more key for each head, that all its queries see and whose value is 0; finite,
        or -infinity for no sink.
    dropout : array, broadcasting to (..., n, m), dtype of `q`, optional
        Factors r of the weights: 0 where a weight was dropped and 1 / (1 - p) where it was kept, if
        a kernel drops weights with probability p.

    Returns
    -------
    Attended
        `out`, shape (..., n, d_v), and `lse`, shape (..., n), with the namespace, dtype and
        device of `q`. A query that sees no key, and no sink, has out 0 and lse -inf, the identity
        of `merge`. If results are merged, only one of them may have the sink.

    Raises
    ------
    TypeError
        If an argument is not an array, if arrays come from different libraries, have different
        dtypes or a dtype other than those above, or if `mask` is not boolean.
    ValueError
        If shapes do not match or devices differ.

    Notes
    -----
    Against exact arithmetic on the same floats, the error of `out` (relative to the largest value)
    and of `lse` is at most C eps (1 + max |scale| |q_i| |k_j| + max |bias|). The tests assert C =
    16 for d up to 4096. Sums of more than 128 terms are split. Shorter sums q . k are not split, as
    that would take a fifth more time. C exceeds 16 only for vectors constructed so that all
    roundings of q . k have the same sign. For these and d up to 128, C is 3 d / 16 if the d terms
    are nearly equal. It is d / 2, the bound for any sum of d terms, if the first term is far larger
    than the rest. For larger d it is 64. Scores must be representable: if scale * q . k itself
    overflows the dtype, the row is NaN. A NaN or an infinite value affects only the rows that see
    it. Values within a factor 10 m of the smallest normal number may lose digits.

    The last bits depend on the array library, and on NumPy also on its BLAS and the processor, but
    not on the number of threads or on the calling thread. NumPy raises no warnings here, and
    torch.autocast changes nothing. JAX, whose default on GPUs is TF32, multiplies float32 in full
    precision here; so does torch, unless `torch.backends.cuda.matmul.allow_tf32` is True.

    Blocks of keys are summed as by Milakov and Gimelshein, arXiv:1805.02867 (running maximum and
    rescaled sums), but as a balanced tree, so that rounding errors do not grow with m. On NumPy no
    maximum is computed if norms bound the scores well enough.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import attend
    >>> q, k, v = np.zeros((1, 2)), np.ones((3, 2)), np.array([[0.0], [3.0], [6.0]])
    >>> attend(q, k, v)
    Attended(out=array([[3.]]), lse=array([1.09861229]))
    >>> attend(q, k, v, mask=np.array([True, True, False])).out
    array([[1.5]])
    >>> attend(q, k, v, window=(1, 0)).out, attend(q, k, v, sinks=np.array(0.0)).out
    (array([[4.5]]), array([[2.25]]))
    """
    scores = Scores(scale, bias, mask, causal, window, softcap, sinks, dropout)
    return prepare_attention(q, k, v, scores).attend()


class ExactInputs(NamedTuple):
    """Arguments of exact attention: checked, and in groups of heads."""

    arrays: tuple[Array, Array, Array]
    scores: Scores
    ungroup: Callable[..., Array]

    def attend(self) -> Attended:
        """Attend, and undo the groups."""
        out, lse = attend_in_blocks(*self.arrays, self.scores)
        return Attended(self.ungroup(out), self.ungroup(lse, core=1))


def prepare_attention(
    q: Array, k: Array, v: Array, scores: Scores, *, rooted: bool = False
) -> ExactInputs:
    """Check arguments of `attend`, or of `softmax_attention` if `rooted`, and group heads.

    A scale of None is 1 / sqrt(d) if `rooted`.
    """
    scale, bias, mask, causal, window, softcap, sinks, dropout, _, shift = scores
    slopes = bias.slopes if isinstance(bias, Alibi) else None
    bias = None if isinstance(bias, Alibi) else bias
    qkv.check(q, k, v, bias=bias, mask=mask, causal=causal, dropout=dropout)
    scale = checks.real("scale", scale, optional=rooted, like=q)
    softcap = qkv.softcap(softcap, q)
    sinks, slopes = (
        None if x is None else qkv.of_heads(name, x, q, k, v)
        for name, x in (("sinks", sinks), ("slopes", slopes))
    )
    (q, k, v, bias, mask, sinks, dropout, slopes), ungroup = group_heads(
        q, k, v, bias, mask, sinks, dropout, slopes
    )
    if scale is None:
        scale = constant(q.shape[-1], q) ** -0.5  # in the dtype of q: longdouble keeps its digits
    sides = qkv.window(window)
    checked = Scores(scale, bias, mask, causal, sides, softcap, sinks, dropout, slopes, shift)
    return ExactInputs((q, k, v), checked, ungroup)


def alibi(slopes: Array) -> Alibi:
    r"""Make a bias that falls with the distance of query and key (ALiBi).

    .. math:: \mathrm{bias}_{ij} = - \mathrm{slope} \; |i + m - n - j|

    The last query is aligned with the last key. No array of shape (n, m) is made.

    Parameters
    ----------
    slopes : array, broadcasting to (..., heads), dtype of the queries
        How fast the scores of each head fall. With H heads, a power of 2, they are
        2^(-8 (h + 1) / H) in Press et al., arXiv:2108.12409.

    Returns
    -------
    Alibi
        For `bias` of `attend` and of `softmax_attention`.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import attend, attention
    >>> q, k, v = np.zeros((1, 1, 1)), np.zeros((1, 2, 1)), np.array([[[4.0], [2.0]]])
    >>> attend(q, k, v, bias=attention.alibi(np.array([np.log(3.0)]))).out  # weights 1/4 and 3/4
    array([[[2.5]]])
    """
    checks.is_array("slopes", slopes)
    return Alibi(slopes)


@as_written
def merge(a: Attended[ArrayT], b: Attended[ArrayT]) -> Attended[ArrayT]:
    r"""Combine attention over two disjoint sets of keys.

    .. math::
        \mathrm{lse} = \log(e^{\mathrm{lse}_a} + e^{\mathrm{lse}_b}), \qquad
        \mathrm{out} = e^{\mathrm{lse}_a - \mathrm{lse}} \mathrm{out}_a
                     + e^{\mathrm{lse}_b - \mathrm{lse}} \mathrm{out}_b

    Associative and commutative, with identity (0, -inf): blocks of keys, streams and machines
    may be combined in any order.

    Parameters
    ----------
    a, b : Attended
        `out` of shape (..., n, d_v) and `lse` of shape (..., n); leading axes broadcast. Same
        namespace, dtype and device.

    Returns
    -------
    Attended
        As if the queries had attended to both sets at once.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import attend, merge
    >>> q, k, v = np.ones((1, 2)), np.eye(2), np.array([[1.0], [3.0]])
    >>> merge(attend(q, k[:1], v[:1]), attend(q, k[1:], v[1:])).out, attend(q, k, v).out
    (array([[2.]]), array([[2.]]))
    """
    qkv.attended(a=a, b=b)
    return merge_parts(Attended(*a), Attended(*b))


@as_written
def softmax_attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    *,
    scale: float | None = None,
    bias: Array | Alibi | None = None,
    mask: Array | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    dropout: Array | None = None,
) -> ArrayT:
    r"""Compute exact softmax attention.

    .. math:: \mathrm{out}_i = \sum_j \mathrm{softmax}_j(\mathrm{scale}\; q_i \cdot k_j) \, v_j

    The options change this as in `attend`.

    Sources (see `refattn.naive`): Random features post, Attention(Q, K, V); Ye 2023, eq. (3); Zheng
    2022, SoftmaxAttn.

    Parameters
    ----------
    q, k, v, bias, mask, causal, window, softcap, sinks, dropout
        As in `attend`: shapes (..., n, d), (..., m, d), (..., m, d_v), all float32 or float64.
    scale : float, optional
        Factor on q . k, 1 / sqrt(d) by default.

    Returns
    -------
    array, shape (..., n, d_v)
        Same namespace, dtype and device as `q`. Rows that see no key are 0.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn import softmax_attention
    >>> q = k = np.array([[0.0], [np.log(3.0)]])
    >>> softmax_attention(q, k, np.array([[0.0], [4.0]]), scale=1 / np.log(3.0))
    array([[2.],
           [3.]])
    """
    scores = Scores(scale, bias, mask, causal, window, softcap, sinks, dropout)
    return prepare_attention(q, k, v, scores, rooted=True).attend().out
