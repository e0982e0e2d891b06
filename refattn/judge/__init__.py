"""Judge what other programs computed: numbers, code, and tests of them.

`verify` says whether a correct kernel can have written given numbers, `check` whether an
implementation is right, `audit` which bugs a test does not notice, and `tolerance` which atol and
rtol a test needs. Nothing that computes attention imports this wing of the package.
"""

from ..arrays.lazy import load_lazily

__all__, __getattr__, __dir__ = load_lazily(__name__, __file__)
