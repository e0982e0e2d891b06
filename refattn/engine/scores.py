"""The options of exact attention: windows, caps of scores, sinks, slopes and dropout."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..arrays.arithmetic import times
from ..arrays.blocks import some_heads
from ..arrays.library import Array, device, is_numpy_array

Reach = tuple[int | None, int | None]


class Scores(NamedTuple):
    """How exact attention makes weights of products q . k: the options of `refattn.attend`.

    A door holds its arguments so. The engine gets them checked and in groups of heads: then the
    window is a pair, `sinks` have axes of queries and keys, and `slopes` stand for a bias `Alibi`.
    """

    scale: Array | None = None  # factor on q . k, or a number; None is 1
    bias: Array | None = None  # broadcasting to (..., n, m)
    mask: Array | None = None  # of bool, broadcasting to (..., n, m)
    causal: bool = False
    window: Reach | None = (None, None)  # keys seen to the left and to the right
    softcap: float | None = None
    sinks: Array | None = None  # (..., heads), or (..., 1, 1) in the engine
    dropout: Array | None = None  # factors of weights, broadcasting to (..., n, m)
    slopes: Array | None = None  # (..., 1, 1)
    shift: int | None = None  # key i + shift is level with query i; m - n by default

    def band(self, n: int, m: int) -> Band:
        """Find the keys, of m, that each of n queries sees by its place."""
        shift = m - n if self.shift is None else self.shift
        return Band.of(shift, self.causal, self.window or (None, None))


PLAIN = Scores()


class Band(NamedTuple):
    """The keys that a query sees by its place.

    Query i sees key j if i + shift - left <= j <= i + shift + right; None is no limit.
    """

    shift: int
    left: int | None = None
    right: int | None = None

    @classmethod
    def of(cls, shift: int, causal: bool, window: Reach = (None, None)) -> Band:
        """Causal attention is a window that ends at the query itself."""
        left, right = window
        if causal:
            right = 0 if right is None else min(right, 0)
        return cls(shift, left, right)

    def keys(self, i: slice, span: slice, step: int = 1) -> slice:
        """Find the keys of a span that some queries i see, from a multiple of `step` on."""
        start, stop = span.start, span.stop
        if self.left is not None:
            first = max(start, min(stop, i.start + self.shift - self.left))
            start += (first - start) // step * step  # whole blocks, shared with other queries
        if self.right is not None:
            stop = max(start, min(stop, i.stop + self.shift + self.right))
        return slice(start, stop)

    def columns(self, rows: int, columns: int) -> int:
        """Say how many keys a block has: all that its queries see, if these are few."""
        if self.left is None or self.right is None:
            return columns
        seen = rows + self.left + self.right
        return seen if columns < seen <= 4 * columns else columns

    def step(self, rows: int, columns: int) -> int:
        """Say where blocks of keys start: anywhere if one is all that some queries see."""
        if self.left is None or self.right is None:
            return columns
        return 1 if rows + self.left + self.right <= columns else columns

    def visible(
        self, i: slice, j: slice, home: Any, xp: Any, mask: Array | None = None
    ) -> Array | None:
        """Say which of the queries i see which of the keys j, if a mask lets them; None: all do."""
        seen = mask
        # A mask is made only where the first query does not see the last key, or the last query
        # not the first one: most blocks of a band lie inside.
        if self.right is not None and j.stop - 1 > i.start + self.shift + self.right:
            early = causal_mask(i, j, self.shift + self.right, home, xp)
            seen = early if seen is None else seen & early
        if self.left is not None and j.start < i.stop - 1 + self.shift - self.left:
            late = ~causal_mask(i, j, self.shift - self.left - 1, home, xp)
            seen = late if seen is None else seen & late
        return seen

    def distances(self, i: slice, j: slice, like: Array, xp: Any) -> Array:
        """Compute |i + shift - j|, shape (rows, columns)."""
        home = device(like)
        queries = xp.arange(i.start + self.shift, i.stop + self.shift, device=home)
        keys = xp.arange(j.start, j.stop, device=home)
        return xp.astype(xp.abs(queries[:, None] - keys[None, :]), like.dtype)

    def alibi(self, slopes: Array, box: tuple[slice, ...], j: slice, xp: Any) -> Array:
        """Compute the bias of `Alibi` for a box of heads and queries."""
        return -some_heads(slopes, box[:-1]) * self.distances(box[-1], j, slopes, xp)


def causal_mask(i: slice, j: slice, shift: int, device: Any, xp: Any) -> Array:
    """Say whether query i sees key j in causal attention: j <= i + shift, shape (rows, columns)."""
    queries = xp.arange(i.start + shift, i.stop + shift, device=device)
    keys = xp.arange(j.start, j.stop, device=device)
    return queries[:, None] >= keys[None, :]


def cap_scores(scores: Array, most: float, xp: Any) -> Array:
    """Compute c tanh(s / c) of our own temporary; in place on NumPy."""
    ratio = times(scores, xp.asarray(1 / most, dtype=scores.dtype, device=device(scores)))
    ratio = xp.tanh(ratio, out=ratio) if is_numpy_array(ratio) else xp.tanh(ratio)
    return times(ratio, xp.asarray(most, dtype=scores.dtype, device=device(scores)))


def slope_of_cap(scores: Array, most: float, xp: Any) -> Array:
    """Differentiate `cap_scores` to 1 / cosh(s / c)^2, with all digits where it is small."""
    # 1 - tanh^2 would cancel; e^(-2 |x|) neither overflows nor cancels.
    fallen = xp.exp(-2 * xp.abs(scores / most))
    return 4 * fallen / (1 + fallen) ** 2
