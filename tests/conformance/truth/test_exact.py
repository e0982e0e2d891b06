"""Numbers of arbitrary precision."""

import numpy as np

from refattn.conformance.truth import exact


def test_exact_numbers_keep_every_bit():
    x = np.longdouble(1) / 3
    rest = float(x - np.longdouble(float(x)))
    assert exact.numbers([x])[0] - exact.numbers([float(x)])[0] == rest
    assert exact.numbers([np.inf])[0] == exact.context().inf
