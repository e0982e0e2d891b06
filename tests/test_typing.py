"""What type checkers see: the types of arrays, and the names of options."""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import pytest

import refattn
from refattn import kernels, registry, sampling, theory, typing
from refattn.estimators import key_sampling, lara

USE = '''
import numpy as np
import numpy.typing as npt
import refattn
from refattn import kernels, naive, sampling, testing, theory
from refattn.typing import Coupling

class Tensor:
    """Of some library."""
    shape = (2, 3)
    dtype = "float32"
    def __getitem__(self, key: int | slice) -> "Tensor":
        return self

t, x = Tensor(), np.ones((2, 3))

def right(name: Coupling) -> Tensor:
    out: npt.NDArray[np.float64] = refattn.softmax_attention(x, x, x, mask=x > 0, bias=x)
    out = naive.random_feature_attention(x, x, x, omega=x, features="hyperbolic")
    out = refattn.merge(refattn.attend(x, x, x), refattn.attend(x, x, x)).out
    sampling.draw(4, 2, coupling=name)
    testing.draw_qkv("shifted", dtype="bfloat16")
    found: refattn.Attended = refattn.attend(t, t, t, causal=True)
    found.out + 1
    refattn.linear_attention(t, t, t).shape
    refattn.random_feature_attention(t, t, t, omega=x, num_features=None, coupling="sobol")
    return refattn.attend(t, t, t, mask=x > 0).out

def wrong(name: str) -> None:
    refattn.softmax_attention(t, t, t) + 1  # operator
    refattn.attend(t, t, t).lse + 1  # operator
    naive.softmax_attention(t, t, t) + 1  # operator
    refattn.softmax_attention([[1.0]], x, x)  # type-var
    refattn.sofmax_attention(x, x, x)  # attr-defined
    refattn.random_feature_attention(x, x, x, num_features=4, coupling="orthogonl")  # arg-type
    refattn.random_feature_attention(x, x, x, num_features=4, features="postive")  # arg-type
    refattn.linear_randomized_attention(x, x, x, num_proposals=2, weighting="equal")  # arg-type
    refattn.coreset_attention(x, x, x, num_keys=2, pivots="gauss")  # arg-type
    naive.random_feature_attention(x, x, x, omega=x, features="positiv")  # arg-type
    kernels.estimate(x, x, x, features="cosine")  # arg-type
    theory.kernel_variance(x, x, num_features=4, coupling="sobol")  # arg-type
    sampling.draw(4, 2, coupling=name)  # arg-type
    refattn.softmax_attention(x, x, x, causal=None)  # arg-type
    testing.draw_qkv("shiftd")  # arg-type
    testing.draw_qkv(dtype="float8")  # arg-type
    refattn.softmax_attention(x, x, x, casual=True)  # call-arg
'''

TAKEN = {
    typing.Coupling: sampling.COUPLINGS,
    typing.Features: kernels.FEATURES,
    typing.KeyLaw: typing.KEY_LAWS,
    typing.KnownCoupling: theory.COUPLINGS,
    typing.Pivots: key_sampling.PIVOTS,
    typing.Weighting: lara.WEIGHTINGS,
}


@pytest.mark.long
def test_a_type_checker_sees_arrays_and_options(tmp_path, request):
    """It finds what is wrong, line by line, and nothing in what is right."""
    pytest.importorskip("mypy")
    (tmp_path / "use.py").write_text(USE)
    cache = getattr(request.config, "cache", None)  # the first run reads what NumPy declares
    kept = tmp_path if cache is None else cache.mkdir("mypy")
    options = "--follow-imports=silent", "--no-error-summary", "--config-file=", "--cache-dir"
    command = [sys.executable, "-m", "mypy", *options, str(kept), "use.py"]
    env = {**os.environ, "MYPYPATH": str(Path(refattn.__file__).parent.parent)}
    found = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
    )
    assert found.stderr == ""
    errors = re.findall(r"^use\.py:(\d+): error: .*\[([\w-]+)\]$", found.stdout, re.MULTILINE)
    comments = (line.partition("  # ")[2] for line in USE.splitlines())
    meant = [(i, code) for i, code in enumerate(comments, 1) if code]
    assert [(int(line), code) for line, code in errors] == meant, found.stdout


@pytest.mark.parametrize("alias", TAKEN)
def test_checks_take_the_names_that_types_have(alias):
    assert get_origin(alias) is Literal
    assert set(get_args(alias)) == set(TAKEN[alias])


def test_every_option_of_names_is_typed():
    """No public attention function has an option whose default is a name and whose type is any."""
    public = {getattr(refattn, name) for name in refattn.__all__ if name.endswith("_attention")}
    for fn in public & {record.fn for record in registry.ESTIMATORS.values()}:
        hints = get_type_hints(fn, vars(sys.modules[fn.__module__]))
        for name, parameter in inspect.signature(fn).parameters.items():
            if isinstance(parameter.default, str):
                assert get_origin(hints[name]) is Literal, (fn, name)
                assert parameter.default in get_args(hints[name])
