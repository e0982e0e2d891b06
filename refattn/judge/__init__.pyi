"""The names of the wing and their homes: read by type checkers, and by `__init__.py`."""

from . import audits as audits
from . import conformance as conformance
from . import mistakes as mistakes
from . import rounding as rounding
from . import runs as runs
from . import stats as stats
from . import testing as testing
from . import vectors as vectors
from . import verification as verification
from .audits import Audit as Audit
from .audits import audit as audit
from .conformance import Adapter as Adapter
from .conformance import Report as Report
from .conformance import check as check
from .conformance import parametrize_with_checks as parametrize_with_checks
from .runs import Same as Same
from .runs import same as same
from .verification import Verdict as Verdict
from .verification import tolerance as tolerance
from .verification import verify as verify

__all__: list[str]
