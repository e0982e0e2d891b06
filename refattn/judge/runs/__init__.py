"""Judge two outputs of one kernel together: are they two runs of one right kernel?

`matching` finds the rows with equal inputs, in files of which one may have more rows or batch
members; `comparing` verifies both outputs and tests what is between them; `sameness` has the words.
"""

from .comparing import same
from .sameness import Same

__all__ = ["Same", "same"]
__dir__ = __all__.copy
