"""Load the queries, keys and values that come with the package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

_NAME = "minilm_zen128_slice.npz"


def load_sample() -> tuple[np.ndarray[Any, Any], ...]:
    """Load queries, keys and values of a trained sentence encoder.

    Layers 0 and 3 and heads 0, 3, 6 and 9 of all-MiniLM-L6-v2 on 128 tokens of the Zen of Python.
    The arrays are not divided by sqrt(d), and attention in the model is not causal: it is
    ``refattn.softmax_attention(q, k, v)``.

    Parameters
    ----------
    None

    Returns
    -------
    q, k, v : NumPy arrays, shape (2, 4, 128, 32), float32
        Layers, heads, tokens, head size.

    Raises
    ------
    FileNotFoundError
        If the file was left out of the installation.

    Examples
    --------
    >>> import refattn
    >>> q, k, v = refattn.load_sample()
    >>> q.shape, str(q.dtype)
    ((2, 4, 128, 32), 'float32')
    """
    with np.load(path()) as file:
        return tuple(file[name] for name in "qkv")


def path(name: str | None = None) -> Path:
    """Find the file, or another beside it, installed or in a checkout."""
    name = _NAME if name is None else name
    here = Path(__file__).resolve().parents[1]
    for folder in (here / "data", here.parent / "validation" / "data"):
        if (folder / name).is_file():
            return folder / name
    raise FileNotFoundError(f"the sample {name} is not installed")
