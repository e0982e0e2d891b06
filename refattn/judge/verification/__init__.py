"""Judge whether a correct kernel can have produced given numbers: `verify`."""

from .door import verify
from .findings import Finding, Numbers, Suspect, Worst
from .judging import judge
from .tolerances import tolerance
from .verdict import Verdict

__all__ = ["Finding", "Numbers", "Suspect", "Verdict", "Worst", "judge", "tolerance", "verify"]
__dir__ = __all__.copy
