"""What is recorded: functions that yield names and results."""

import gzip
import json
from pathlib import Path

from tests.recorded import package, rounding, verification

FILE = Path(__file__).with_name("numbers.json.gz")
FUNCTIONS = (
    rounding.output, rounding.gradients, rounding.more_gradients, rounding.features_of_heads,
    rounding.formats,
    verification.verdicts, verification.choices, verification.profiles, verification.backward,
    verification.tolerances, verification.more_tolerances, verification.of_files,
    package.certified_errors,
    package.statistics, package.laws, package.estimators, package.rest,
)  # fmt: skip
CASES = {x.__name__: x for x in FUNCTIONS}


def recorded():
    return json.loads(gzip.decompress(FILE.read_bytes()))
