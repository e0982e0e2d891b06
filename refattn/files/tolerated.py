"""Load the errors of each estimator that a trained model was measured to tolerate."""

from __future__ import annotations

import json
from typing import NamedTuple

from ..arrays.shown import held
from .sample import path


@held()
class Tolerated(NamedTuple):
    """The relative error of attention that a trained model tolerates.

    Attributes
    ----------
    model : str
        Its name.
    measure : str
        The metric, computed with the attention of all layers replaced.
    threshold : float
        The value of the metric at which errors are tolerated.
    errors : dict of str to float
        The error at which the metric falls to `threshold`, mean over texts, layers and heads, by
        estimator.
    """

    model: str
    measure: str
    threshold: float
    errors: dict[str, float]

    @property
    def words(self) -> str:
        """Describe the errors in words."""
        return (
            f"mean error in all layers of {self.model} at which the {self.measure} "
            f"is {self.threshold:g}"
        )


Tolerated.__module__ = "refattn.compare"  # where users find it, and so do pickles


def tolerated() -> Tolerated:
    """Load the errors that a sentence encoder tolerates, as `validation/model` measured them.

    Errors of the same size may do more or less harm: errors that are independent between queries
    average out over the tokens, but errors that queries share do not. So each estimator has its own
    number. The numbers hold for this model, for short texts, and for errors in all layers at once.

    Parameters
    ----------
    None

    Returns
    -------
    Tolerated
        Errors of those estimators that were measured.

    Raises
    ------
    FileNotFoundError
        If the file was left out of the installation.

    Examples
    --------
    >>> from refattn import compare
    >>> found = compare.tolerated()
    >>> found.model, found.threshold
    ('all-MiniLM-L6-v2', 0.99)
    >>> found.errors["ra"] > found.errors["rfa-iid"]
    True
    """
    return Tolerated(**json.loads(path("minilm_tolerated.json").read_text("utf-8")))
