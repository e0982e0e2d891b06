r"""Test attention kernels with difficult queries, keys and values, and without tolerances.

If the package is installed, pytest has the fixtures `qkv`, `qkv_dtype` and `qkv_shape`: a test that
takes `qkv` runs once for each of `CASES`. To change dtype or shape, override or parametrize the
other two::

    @pytest.mark.parametrize("qkv_dtype", ["float16", "float32"])
    def test_my_kernel(qkv, qkv_dtype):
        q, k, v = qkv
        assert_attention_close(my_kernel(q, k, v), q, k, v, dtype=qkv_dtype)

and ``@pytest.mark.parametrize("qkv", ["shifted"], indirect=True)`` chooses cases. A fixture of the
same name in your test module or conftest.py replaces these; ``-p no:refattn`` switches them off.
To check a whole implementation, use `refattn.check`.

* `assert_attention_close` raises an AssertionError if no correct kernel gives such an output;
* `audit` lists the known bugs that a test of yours accepts;
* `draw_qkv` and `cases` make inputs on which kernels often fail.
"""

from .judge import testing
from .judge.testing import *  # noqa: F403

__all__ = testing.__all__
__dir__ = __all__.copy
del testing
