"""The names of the package and their homes: read by type checkers, and by `__init__.py`."""

from .door import verify as verify
from .findings import Finding as Finding
from .findings import Numbers as Numbers
from .findings import Suspect as Suspect
from .findings import Worst as Worst
from .judging import judge as judge
from .tolerances import tolerance as tolerance
from .verdict import Verdict as Verdict

__all__: list[str]
