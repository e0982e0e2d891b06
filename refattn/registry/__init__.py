"""One record for each estimator: what it computes, how it is called, and its traits.

`refattn.compare` and `refattn.check` find estimators here and use their options and traits,
never their names. Another package adds its own estimators with `register`, or names their records
in the entry-point group ``refattn.estimators`` of its metadata, which is read when a name is first
looked up:

.. code-block:: toml

    [project.entry-points."refattn.estimators"]
    nystrom = "mypackage.records:NYSTROM"
"""

from .own import DEFAULT
from .record import ESTIMATORS, TRAITS, Estimator, register

__all__ = ["DEFAULT", "ESTIMATORS", "TRAITS", "Estimator", "register"]
__dir__ = __all__.copy
