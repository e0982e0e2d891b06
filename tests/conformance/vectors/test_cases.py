"""The package meets every golden vector, in every dtype that it computes."""

import numpy as np
import pytest

from refattn import attend, naive
from refattn.conformance import vectors
from tests.conformance.vectors.running import error, forward, of_file, only, package
from tests.conformance.vectors.translating import under

DTYPES = pytest.mark.parametrize("dtype", ["float32", "float64", "longdouble"])
AFTER_BIAS = vectors.Convention("softcap", "after-bias")


def checked(case, run, dtype, record_accuracy, most=1.0):
    """Compare, if the case has a tolerance for the dtype; that of longdouble follows."""
    known = "float64" if dtype == "longdouble" else dtype
    if known in case.tolerance:
        ratio = float(np.finfo(dtype).eps / np.finfo(known).eps)
        off = error(case, run, np.dtype(dtype), case.tolerance[known] * ratio)
        record_accuracy(f"vectors, {case.group}", dtype, 16 * off)
        assert off <= most, case.id


@DTYPES
@pytest.mark.parametrize("name", vectors.FILES)
def test_package_meets_every_vector(name, dtype, every, record_accuracy):
    for case in of_file(every, name):
        run, most = package(case.estimator), 1.0
        if "d_out" in case.inputs:
            most = 0.1 if name in vectors.ESTIMATORS else 1.0
            case = only(case, *(x for x in case.expected if x != "d_centres"))  # of no pullback
        if case.convention is not None:
            run = under({case.convention.option: case.convention.value})
            if dtype == "longdouble" or ("d_out" in case.inputs and case.convention == AFTER_BIAS):
                continue
        checked(case, run, dtype, record_accuracy, most)


@DTYPES
@pytest.mark.parametrize("function", [naive.softmax_attention, attend])
def test_other_functions_meet_vectors_of_softmax(function, dtype, every, record_accuracy):
    files = ("softmax-options", "softmax-tiles", "softmax-hard")
    for case in forward(of_file(every, *files)):
        run = package("softmax", function)
        checked(only(case, "out"), lambda return_lse=False, run=run, **x: run(**x), dtype,
                record_accuracy)  # fmt: skip


def test_there_are_enough_cases(every):
    plain, back = forward(every), [case for case in every if "d_out" in case.inputs]
    assert sum("float32" in case.tolerance for case in of_file(plain, *vectors.ESTIMATORS)) > 100
    assert all("float64" in case.tolerance for case in of_file(plain, *vectors.ESTIMATORS))
    for dtype in ("float32", "float64"):
        chosen = [case for case in back if dtype in case.tolerance]
        assert len(of_file(chosen, *vectors.ESTIMATORS)) > 50
        options = of_file(chosen, "softmax-options", "softmax-tiles")
        assert len(options) > 15
        names = {name for case in options for name in case.expected}
        assert {"d_bias", "d_sinks", "lse"} < names
    said = {case.convention.option for case in back if case.convention is not None}
    assert said == {"causal", "window", "softcap"}
