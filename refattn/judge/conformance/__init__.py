"""Test whether an implementation of an attention estimator is right, and if not, name its bug.

`check` runs the checks that apply to a callable and returns a `Report`; `Adapter` declares how the
callable is called; `Subprocess` makes a callable of a program in any language;
`parametrize_with_checks` makes pytest tests.
"""

from ...registry import ESTIMATORS
from .candidate.adapter import Adapter
from .candidate.failures import Failure
from .candidate.programs import Subprocess
from .candidate.tags import CAPABILITIES, TAGS
from .checks.trials import CHECKS, Check
from .conventions import CONVENTIONS, SPECS
from .report.report import Report, Result
from .report.runner import LEVELS, TIME_LIMITS, check, checks_of, parametrize_with_checks

__all__ = [
    "CAPABILITIES",
    "CHECKS",
    "CONVENTIONS",
    "ESTIMATORS",
    "LEVELS",
    "SPECS",
    "TAGS",
    "TIME_LIMITS",
    "Adapter",
    "Check",
    "Failure",
    "Report",
    "Result",
    "Subprocess",
    "check",
    "checks_of",
    "parametrize_with_checks",
]
__dir__ = __all__.copy
